"""The form of a value of a micro-batch relative to that of the whole batch, and the form of one of two values."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import msgspec
from msgspec.structs import replace

from autopar.common.enums import HashedById
from autopar.ir.graph import Op
from autopar.ops.kernels.islands import Spec


class CombinesExamples(Exception):
    """An operation combines examples; raised where its results have no form. Internal."""

    def __init__(self, op: Op, why: str) -> None:
        super().__init__(why)
        self.op, self.why = op, why

    def plain(self) -> CombinesExamples:
        """The same without the frames that it was raised in, which would keep the graphs of a kept state alive."""
        return CombinesExamples(self.op, self.why)


class Form(HashedById):
    INVARIANT = "invariant"  # the whole batch's value, in every micro-batch
    SPLIT = "split"  # the micro-batches' values, joined, are the whole batch's
    PARTIAL_SUM = "partial sum"  # the micro-batches' values add up to the whole batch's
    UNAVAILABLE = "unavailable"  # a micro-batch alone has nothing of it
    OWN = "own"  # the micro-batch's alone, in a shape of its own (`accumulation`)
    RUNNING = "running"  # in a loop over examples: the carried value `dim` as a trip began, plus what that trip adds


# A mean over examples has the first power of the number of micro-batches, the mean of a mean's square the second.
_MOST_POWERS = 4

# In place of a dimension: a SPLIT inside of a loop over examples differs from trip to trip, and a micro-batch has
# some of the trips.
TRIPS = -1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class IslandLayout:
    """Of a value that an island made for another one: its spec, and the axes of the island that examples lie on. The
    parts of an INVARIANT are then alike on all devices of these axes. `inside`: how an island in its body lays the
    parts of its devices in one part of the value.
    """

    spec: Spec
    axes: tuple[str, ...]
    inside: IslandLayout | None = None


class State(msgspec.Struct, frozen=True, kw_only=True):
    """The relation of a value of one micro-batch to that of the whole batch.

    `dim`, `outer`: dimension `dim` of a SPLIT (or `TRIPS`) holds `outer` blocks, each with the examples in order; for
    `outer` 1, micro-batch i has the i-th of equal slices. `uniform`: along `dim` all slices of a SPLIT are alike, so
    that they are any number of blocks (`outer` is 1). `zero`: all elements are zero. `early`: the whole value can be
    computed before the first micro-batch. `of_batch`: such a value, of one micro-batch, mixes examples, or has rows
    that the step draws itself, and is no part of the state. `streams`: the value is computed for each micro-batch;
    other values are known before or after the loop. `cut`: the SPLIT is a slice of the whole value, and is not
    computed. `cause`: the operation that combined examples (PARTIAL_SUM and UNAVAILABLE). `laid`: how an island lays
    the parts of its devices side by side, where that is not by example; only islands read such a SPLIT. `weight`: the
    whole batch's value is that many times what its form says; other than 1 only where literals are a micro-batch's
    (`accumulation`).
    """

    form: Form
    dim: int = 0
    outer: int = 1
    uniform: bool = False
    zero: bool = False
    early: bool = False
    of_batch: bool = False
    streams: bool = True
    cut: bool = False
    laid: IslandLayout | None = None
    weight: float | None = 1.0
    cause: CombinesExamples | None = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, State) and self._but_cause() == other._but_cause()

    def __hash__(self) -> int:
        return hash(self._but_cause())

    def _but_cause(self) -> tuple[object, ...]:
        """What makes two states the same: all but `cause`, the last one."""
        return msgspec.structs.astuple(self)[:-1]


def inside_loop(state: State) -> State:
    """A state as the body of a loop reads it, without what is known outside."""
    return replace(state, early=False, streams=True, cut=False)


def of_slice(state: State) -> State:
    """The state of a slice along dimension 0, as a trip of a loop over anything but examples reads it."""
    return _with_dim(state, state.dim - 1)


def of_stack(state: State) -> State:
    """The state of an array whose slices along dimension 0 are what the trips of such a loop make."""
    return _with_dim(state, state.dim + 1)


def _with_dim(state: State, dim: int) -> State:
    return replace(state, dim=dim) if state.form is Form.SPLIT and state.dim != TRIPS else state


def differs_by_trip(state: State) -> bool:
    """Whether a value is a function of what a trip of a loop over examples reads, and of nothing else of them."""
    return state.form is Form.SPLIT and state.dim == TRIPS


def split_alike(first: State, second: State) -> bool:
    """Whether two values are SPLIT along the same dimension, into as many blocks."""
    forms = first.form is second.form is Form.SPLIT and first.dim == second.dim
    return forms and (first.uniform or second.uniform or first.outer == second.outer)


def join(op: Op, first: State, second: State) -> State:
    """The state of a value that is one of two."""
    zero = first.zero and second.zero
    for a, b in ((first, second), (second, first)):
        stays_in_trip = differs_by_trip(b) or b.form in (Form.OWN, Form.RUNNING)
        if a.form is Form.UNAVAILABLE and not stays_in_trip:
            return a
        if a.form is Form.PARTIAL_SUM and (b.form is Form.PARTIAL_SUM or b.zero):
            return replace(a, zero=zero, weight=_join_weights(op, a, b))
    if differs_by_trip(first) and second.form is Form.INVARIANT:
        return replace(first, zero=zero, weight=_join_weights(op, first, second))
    if differs_by_trip(second) and first.form is Form.INVARIANT:
        return replace(second, zero=zero, weight=_join_weights(op, first, second))
    is_other_sum = first.form is second.form is Form.RUNNING and first.dim != second.dim
    is_other_split = first.form is Form.SPLIT and not split_alike(first, second)
    if first.form is not second.form or is_other_sum or is_other_split:
        raise CombinesExamples(op, "what it carries depends on the examples in more ways than one")
    if first.uniform:  # of as many blocks as the other one
        first = replace(first, outer=second.outer, uniform=second.uniform)
    return replace(first, zero=zero, weight=_join_weights(op, first, second))


def with_weights_of(states: Mapping[int, State], before: int, number: int) -> Mapping[int, State] | None:
    """States in another number of micro-batches than `before`: weights are powers of it. None where one is none."""
    powers: dict[float | None, float] = {
        float(before) ** p: float(number) ** p for p in range(-_MOST_POWERS, _MOST_POWERS + 1) if p
    }
    others = {s.weight for s in states.values()} - {None, 1.0}
    if not others:
        return states
    if not others <= powers.keys():
        return None
    return {v: replace(s, weight=powers[s.weight]) if s.weight in others else s for v, s in states.items()}


def _join_weights(op: Op, first: State, second: State) -> float | None:
    """The weight of a value that is one of two; zeros have any."""
    if first.zero or first.weight is None:
        return second.weight
    if second.zero or second.weight is None or first.weight == second.weight:
        return first.weight
    raise CombinesExamples(op, "what it carries is a sum over examples, and a mean over them")
