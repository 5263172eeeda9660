"""Modules that are taken per micro-batch: the step's passes run on each micro-batch as on a batch of that size.

Where the user allows it (`Search(per_microbatch=...)`), an operation may mix the examples of its micro-batch:
batch statistics, a router's loss and capacity, scales of 8-bit products. The step is then that of gradient
accumulation: each micro-batch runs the program that was traced on it, literals included, and what leaves the loop is
joined over the micro-batches.

How it is joined is followed operation by operation, beside the forms: the `weight` w of a state says that the whole
batch's value is w times the join (the sum, the concatenation) of the micro-batches' values. A sum over examples has
weight 1; divided by the number of examples, which is a literal m times as large in the whole batch's program, 1/m: a
mean of the micro-batches' means. What a permitted operation makes of its micro-batch alone leaves as a mean, 1/m.
None stands for a cotangent whose weight is that of the loss, whatever that is; it takes the weight of what it is added
to. A loss with a weight other than 1/m (a sum over examples) has no sensible meaning there, and is refused.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from msgspec.structs import replace

from autopar.common import jax_compat
from autopar.common.paths import class_of, names_module
from autopar.errors import InvalidArgumentError, UnsupportedError
from autopar.ir.graph import Constant, Op, OpGraph, OpKind, Role, Value
from autopar.ir.primitives import is_inexact, linear_operands
from autopar.ir.traced_step import TracedStep
from autopar.passes.forms import CombinesExamples, Form, State
from autopar.passes.microbatch_analysis import Follower, is_number
from autopar.passes.running_state import check_updates, state_updates

_PRODUCTS = frozenset({"mul", "dot_general", "conv_general_dilated"})
# What hands on the weight of its operands beside what `linear_operands` says: it scales with them, or moves them.
_SCALES_WITH = frozenset({
    "convert_element_type", "reduce_precision", "split", "stack", "unstack", "tile", "scatter", "psum", "stop_gradient",
    "select_and_scatter_add", "select_and_gather_add", "reduce_max", "reduce_min", "max", "min", "abs", "sort",
})  # fmt: skip


def shortest_name(module: str) -> str:
    """How a user may name a module and those of its class: the last part of its path that is no number."""
    parts = [class_of(part) for part in module.split("/")]
    while len(parts) > 1 and parts[-1].isdigit():
        parts.pop()
    return parts[-1]


@dataclasses.dataclass(slots=True, kw_only=True)
class AccumulatingFollower(Follower):
    """Follows examples where the modules that `patterns` name may mix those of a micro-batch. `mixing` are the patterns
    of those that do.
    """

    patterns: tuple[str, ...]
    mixing: set[str] = dataclasses.field(default_factory=set)
    _permitted: dict[str, bool] = dataclasses.field(default_factory=dict)  # by module

    def __post_init__(self) -> None:
        self.updates = state_updates(self.whole, self.part, self.permission)
        check_updates(self.whole, self.updates, self.permission)

    def begin_again(self) -> None:
        Follower.begin_again(self)
        self.mixing.clear()

    def permission(self, op: Op) -> bool:
        if op.module not in self._permitted:
            self._permitted[op.module] = any(names_module(pattern, op.module) for pattern in self.patterns)
        return self._permitted[op.module]

    def stays_in_loop(self, op: Op, part: Op, states: Sequence[State]) -> bool:
        """A micro-batch's own literals count there, and what is permitted reads the examples of a micro-batch."""
        reads_examples = any(s.form is not Form.INVARIANT for s in states)
        return bool(_unlike_constants(op, part)) or (reads_examples and self.permission(op))

    def follow(self, op: Op, part: Op, states: Sequence[State], around: Mapping[int, State]) -> list[State]:
        self.check_available(op, states)
        try:
            return self._weighed(op, part, states, around)
        except CombinesExamples:
            if not self.permission(op):
                raise
        self.mixing |= {p for p in self.patterns if names_module(p, op.module)}
        weight = None if op.role is Role.BACKWARD else 1.0
        read = [
            State(form=Form.INVARIANT, weight=weight) if s.form in (Form.PARTIAL_SUM, Form.OWN) else s for s in states
        ]
        try:
            made = self._weighed(op, part, read, around)
        except CombinesExamples:
            return [self._by_shape_of_part(op, v) for v in op.outputs]
        return [self._own(op) if s.form is Form.INVARIANT else s for s in made]

    def _weighed(self, op: Op, part: Op, states: Sequence[State], around: Mapping[int, State]) -> list[State]:
        """The results of an operation with their weights, as for a step that keeps examples apart."""
        if op.kind is not OpKind.EQUATION:
            return Follower.follow(self, op, part, states, around)
        ratio = _ratio(op, part)
        alike = part if ratio == 1.0 else replace(part, key=op.key)
        results = Follower.follow(self, op, alike, states, around)
        weight = _weight(op, states)
        if weight is not None:
            weight *= ratio
        return [replace(s, weight=None if s.zero else weight) for s in results]

    def _own(self, op: Op) -> State:
        """The state of a value, of the shape of the whole batch's, that each micro-batch has for itself."""
        weight = None if op.role is Role.BACKWARD else 1.0 / self.num_microbatches
        return State(form=Form.PARTIAL_SUM, weight=weight, cause=CombinesExamples(op, "each micro-batch has its own"))

    def _by_shape_of_part(self, op: Op, value: int) -> State:
        """The state of what an operation makes of all examples of a micro-batch, by its shapes."""
        if self.same_shape(value):
            return self._own(op)
        for dim in range(len(self.whole.values[value].shape)):
            if self.is_part(value, dim):
                return State(form=Form.SPLIT, dim=dim, weight=None if op.role is Role.BACKWARD else 1.0)
        return State(form=Form.OWN, weight=None, cause=CombinesExamples(op, "each micro-batch has its own"))

    def may_share(self, states: Sequence[State]) -> bool:
        return False  # a mean over micro-batches would read another share than a sum

    def leaving_weight(self, state: State, value: Value, maker: Op) -> float:
        """By what the join of the micro-batches' values is multiplied where a value leaves the loop.

        Raises: UnsupportedError for what has no mean over micro-batches, and for gradients of a loss that is no mean.
        """
        where = maker.module or maker.primitive
        if state.form is Form.OWN:
            raise UnsupportedError(
                where=where, expected="results of modules taken per micro-batch whose size follows the examples",
                got=f"one of shape {value.shape} for the whole batch, of which micro-batches have no parts",
                hint="do not return it from the step, or use num_microbatches=1",
            )  # fmt: skip
        is_mean = state.weight is None or math.isclose(state.weight * self.num_microbatches, 1.0, rel_tol=1e-5)
        if self.mixing and maker.role is Role.BACKWARD and state.form is Form.PARTIAL_SUM and not is_mean:
            raise UnsupportedError(
                where=where, expected="gradients of a loss that is a mean over examples, as modules are taken per "
                f"micro-batch ({', '.join(self.patterns)})",
                got="those of a sum, of a sum divided by another number, or by one computed for the whole batch",
                hint="divide the loss by the number of examples, or name its module in Search(per_microbatch=...)",
            )  # fmt: skip
        weight = state.weight if state.weight is not None else 1.0 / self.num_microbatches
        if weight != 1.0 and not (is_number(value.dtype) and is_inexact(jax.numpy.dtype(value.dtype))):
            raise UnsupportedError(
                where=where, expected="floating point results of modules taken per micro-batch, which have a mean",
                got=f"one of {value.dtype}, which each micro-batch has for itself",
                hint="return it as float32, or not at all",
            )  # fmt: skip
        return weight


def _unlike_constants(op: Op, part: Op) -> list[tuple[int, np.ndarray, np.ndarray]]:
    """(operand, the whole batch's literal, the micro-batch's) of literals that depend on the number of examples."""
    unlike = []
    for i, (a, b) in enumerate(zip(op.inputs, part.inputs, strict=True)):
        if (
            a is not b
            and isinstance(a, Constant)
            and isinstance(b, Constant)
            and not jax_compat.is_key_dtype(a.literal.aval.dtype)
        ):
            first, second = np.asarray(a.literal.val), np.asarray(b.literal.val)
            if first.shape != second.shape or not np.array_equal(first, second, equal_nan=first.dtype.kind in "fc"):
                unlike.append((i, first, second))
    return unlike


def _ratio(op: Op, part: Op) -> float:
    """How many times the whole batch's result is the micro-batch's, by the literals that they read."""
    ratio = 1.0
    for i, whole, own in _unlike_constants(op, part):
        if op.primitive not in ("mul", "div") or (op.primitive == "div" and i == 0) or not np.all(own):
            raise CombinesExamples(op, "it counts the examples")
        ratio *= float(whole) / float(own) if op.primitive == "mul" else float(own) / float(whole)
    return ratio


def _weight(op: Op, states: Sequence[State]) -> float | None:
    """The weight of an operation's results, but for its literals."""
    weights = [None if s.zero else s.weight for s in states]
    if op.primitive in _PRODUCTS:
        return _product(weights)
    if op.primitive == "div" and weights[1] not in (None, 1.0):  # a cotangent by its scale: neither depends on the loss
        return None if weights[0] is None else weights[0] / weights[1]
    for members in linear_operands(op.primitive, op.eqn):
        if all(w in (1.0, None) for i, w in enumerate(weights) if i not in members):
            return _joined(op, [(s, weights[i]) for i, s in enumerate(states) if i in members])
    other = {w for w in weights if w is not None and w != 1.0}
    if op.role is Role.BACKWARD or op.primitive in _SCALES_WITH:  # cotangents go through linearly
        return _joined(op, [(s, w) for s, w in zip(states, weights, strict=True) if w in other or not other])
    if other:
        raise CombinesExamples(op, "it is not linear in what is averaged over the examples")
    return _joined(op, list(zip(states, weights, strict=True)))


def _product(weights: Sequence[float | None]) -> float | None:
    known = math.prod(w for w in weights if w is not None)
    return None if known == 1.0 and None in weights else known


def _joined(op: Op, weighed: Sequence[tuple[State, float | None]]) -> float | None:
    """The weight that all have, but for values that are the same in every micro-batch and join no sum over them. What
    each trip of a loop over examples adds joins one, as a micro-batch has some of the trips.
    """
    by_trip = any(s.form is Form.RUNNING for s, _ in weighed)
    known = {w for s, w in weighed if w is not None and (s.form is not Form.INVARIANT or w != 1.0 or by_trip)}
    if len(known) > 1:
        raise CombinesExamples(op, "it adds a sum over examples to a mean over them")
    if known:
        return known.pop()
    depend = [w for s, w in weighed if s.form is not Form.INVARIANT or w is None]
    return None if depend and all(w is None for w in depend) else 1.0


def check_patterns(traced: TracedStep, graph: OpGraph) -> None:
    """Raises: InvalidArgumentError for a pattern that names no module, whether the step mixes examples or not."""
    modules = sorted({op.module for op in graph.ops()})
    for pattern in traced.per_microbatch:
        if not any(names_module(pattern, module) for module in modules):
            ends = [m.rsplit("/", 1)[-1] for m in modules if m]
            close = ", ".join(dict.fromkeys(difflib.get_close_matches(pattern, ends, 3, 0.0)))
            raise InvalidArgumentError(
                where=f"Search(per_microbatch={pattern!r})", expected="the path of a module, or its end",
                got=f"none of the {len(ends)} modules of {traced.name}",
                hint=f"{f'names that are near: {close}; ' if close else ''}a module is a jax.named_scope, of Flax too",
            )  # fmt: skip
