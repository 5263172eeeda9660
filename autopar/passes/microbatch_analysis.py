"""Each value of a micro-batch relative to the whole batch: invariant, split, a partial sum, or unavailable.

Operations are followed one by one. An operation that keeps the examples independent (`example_rules`) gives split
values, a sum over examples gives partial sums, a linear operation (`primitives`) on partial sums gives partial sums.
Every other operation mixes the examples.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from msgspec.structs import replace

from autopar.common import jax_compat
from autopar.ir.graph import Atom, Block, Constant, Op, OpGraph, OpKind, Role, Value, has_effects
from autopar.ir.primitives import is_inexact, linear_operands
from autopar.ir.rewrite import handed_on
from autopar.ops.kernels.islands import is_island
from autopar.ops.kernels.local import is_custom_partition, runs_locally
from autopar.ops.kernels.pallas_grid import is_pallas_call, is_same_kernel
from autopar.passes.example_rules import (
    AGAINST_OTHERS,
    COMBINES,
    SEVERAL,
    SHARED,
    MixesExamples,
    Results,
    places_of_results,
    shape_of,
    sums_over_examples,
)
from autopar.passes.forms import (
    TRIPS,
    CombinesExamples,
    Form,
    State,
    differs_by_trip,
    inside_loop,
    join,
    of_slice,
    of_stack,
    split_alike,
)
from autopar.passes.running_state import StateUpdates

# Shares: what counts once for the whole batch, and is added to sums over examples inside of a loop of the step.
#
# The gradient of a layer in a scan is the sum over examples of its loss, and that of a penalty on its weights, which
# every micro-batch computes alike. Each adds the m-th part of it, so that it counts once in the sum over m micro-
# batches. Only floating point numbers have such parts.


def shared_operands(op: Op, states: Sequence[State]) -> list[int]:
    """The operands that an equation adds to sums over examples; none where it is not linear in both together."""
    if op.kind is not OpKind.EQUATION or any(s.form not in (Form.INVARIANT, Form.PARTIAL_SUM) for s in states):
        return []
    sums = {i for i, s in enumerate(states) if s.form is Form.PARTIAL_SUM}
    members = next((m for m in linear_operands(op.primitive, op.eqn) if sums and sums <= m), frozenset())
    shared = [i for i in sorted(members - sums) if not states[i].zero]
    return shared if all(is_inexact(op.eqn.invars[i].aval.dtype) for i in shared) else []


def starts_sum(op: Op, carried: int, before: State, after: State) -> bool:
    """Whether a carried value of a loop is the same in every micro-batch at first, and then adds sums over examples.

    `before` and `after` are its states around a trip.
    """
    adds = before.form is Form.INVARIANT and not before.zero and after.form is Form.PARTIAL_SUM
    return adds and is_inexact(op.eqn.outvars[carried].aval.dtype)


# Equations whose parameters count rows or groups of examples, which are fewer in a micro-batch.
#
# Examples in blocks are arrays of all examples that stand one behind the other in one dimension: joined and cut apart.
# `model(jnp.concatenate([chosen, rejected]))` has two blocks, and its micro-batches have the examples of one in each.


def counted_examples(eqn: Any, part: Any, states: Sequence[State], parts: int) -> list[State] | None:
    """The states of the results of an equation that joins or cuts arrays along the examples, between blocks, or that
    convolves each example with a kernel of its own; None for any other equation.

    Args:
        part: The equation of a micro-batch.
        states: Of the operands, at least one a SPLIT.
        parts: The number of micro-batches.
    """
    rule = _RULES.get(eqn.primitive.name)
    return None if rule is None else rule(eqn, part, states, parts)


def blocks_of_slices(eqn: Any, states: Sequence[State]) -> set[int]:
    """In how many blocks examples would have to lie for an equation to cut an array between them; none of another one,
    or where they lie in blocks already.
    """
    state = states[0]
    if state.form is not Form.SPLIT or state.outer != 1 or state.uniform:
        return set()
    size = shape_of(eqn.invars[0])[state.dim]
    if eqn.primitive.name == "slice":
        bounds = [eqn.params[name][state.dim] for name in ("start_indices", "limit_indices")]
    elif eqn.primitive.name == "split" and int(eqn.params["axis"]) == state.dim:
        bounds = list(eqn.params["sizes"])
    else:
        return set()
    blocks = size // math.gcd(size, *bounds)
    return {blocks} if blocks > 1 else set()


def _block(eqn: Any, operand: int, state: State) -> int:
    """The length of a block of an operand."""
    return shape_of(eqn.invars[operand])[state.dim] // state.outer


def _are_blocks(whole: Sequence[int], part: Sequence[int], length: int, parts: int) -> bool:
    """Whether numbers of rows are whole blocks, in the whole batch and in a micro-batch."""
    pairs = zip(whole, part, strict=True)
    return all(n % length == 0 and n == k * parts and n >= 0 for n, k in pairs)


def _concatenated(eqn: Any, part: Any, states: Sequence[State], parts: int) -> list[State] | None:
    dim = int(eqn.params["dimension"])
    if any(s.form is not Form.SPLIT or s.dim != dim for s in states):
        return None
    sizes, of_part = ([shape_of(v)[dim] for v in e.invars] for e in (eqn, part))
    lengths = {_block(eqn, i, s) for i, s in enumerate(states) if not s.uniform} or {math.gcd(*sizes)}
    length = lengths.pop() if len(lengths) == 1 else 0
    if not length or not _are_blocks(sizes, of_part, length, parts):
        return None
    return [State(form=Form.SPLIT, dim=dim, outer=sum(sizes) // length)]


def _sliced(eqn: Any, part: Any, states: Sequence[State], parts: int) -> list[State] | None:
    (state,), (whole, of_part) = states, (eqn.params, part.params)
    dim, begin, end = state.dim, "start_indices", "limit_indices"
    strides = whole["strides"] or (1,) * len(whole[begin])
    if (whole["strides"] or strides) != (of_part["strides"] or strides) or strides[dim] != 1:
        return None
    others = [d for d in range(len(strides)) if d != dim]
    if any(whole[name][d] != of_part[name][d] for name in (begin, end) for d in others):
        return None
    bounds, of_part = ([p[name][dim] for name in (begin, end)] for p in (whole, of_part))
    if state.uniform:
        return [state]
    length = _block(eqn, 0, state)
    if not _are_blocks(bounds, of_part, length, parts):
        return None
    return [State(form=Form.SPLIT, dim=dim, outer=(bounds[1] - bounds[0]) // length)]


def _split(eqn: Any, part: Any, states: Sequence[State], parts: int) -> list[State] | None:
    (state,), sizes = states, eqn.params["sizes"]
    if int(eqn.params["axis"]) != state.dim:
        return None
    if state.uniform:
        return [state for _ in sizes]
    length = _block(eqn, 0, state)
    if not _are_blocks(sizes, part.params["sizes"], length, parts):
        return None
    return [State(form=Form.SPLIT, dim=state.dim, outer=size // length) for size in sizes]


def _padded(eqn: Any, part: Any, states: Sequence[State], parts: int) -> list[State] | None:
    """Each row of what is added is the same: blocks whose examples are alike."""
    (state, filled), (whole, of_part) = states, (e.params["padding_config"] for e in (eqn, part))
    if state.form is not Form.SPLIT or filled.form is not Form.INVARIANT:
        return None
    if any(a != b for d, (a, b) in enumerate(zip(whole, of_part, strict=True)) if d != state.dim):
        return None
    (low, high, inside), (low_of_part, high_of_part, _) = whole[state.dim], of_part[state.dim]
    if inside or not (low or high):
        return None
    size = shape_of(eqn.invars[0])[state.dim]
    length = math.gcd(size, low, high) if state.uniform else _block(eqn, 0, state)
    if not _are_blocks((low, high), (low_of_part, high_of_part), length, parts):
        return None
    return [State(form=Form.SPLIT, dim=state.dim, outer=(size + low + high) // length)]


def _tiled(eqn: Any, part: Any, states: Sequence[State], parts: int) -> list[State] | None:
    (state,), reps = states, eqn.params["reps"]
    if len(reps) != len(shape_of(eqn.invars[0])) or reps != part.params["reps"] or state.uniform:
        return None
    return [State(form=Form.SPLIT, dim=state.dim, outer=state.outer * reps[state.dim])]


def _convolved(eqn: Any, part: Any, states: Sequence[State], parts: int) -> list[State] | None:
    """Under `vmap` over images and kernels, and in gradients of each example, examples are groups of a convolution."""
    images, kernels, numbers = *states, eqn.params["dimension_numbers"]
    if any(s.form is not Form.SPLIT or s.outer != 1 for s in states) or kernels.dim != numbers.rhs_spec[0]:
        return None
    groups = {"batch_group_count": numbers.lhs_spec[0], "feature_group_count": numbers.lhs_spec[1]}
    differing = [name for name, value in eqn.params.items() if repr(value) != repr(part.params[name])]
    if len(differing) != 1 or images.dim != groups.get(differing[0]):
        return None
    if eqn.params[differing[0]] != parts * part.params[differing[0]]:
        return None
    return [State(form=Form.SPLIT, dim=int(numbers.out_spec[1]))]


_RULES = {
    "conv_general_dilated": _convolved,
    "concatenate": _concatenated,
    "slice": _sliced,
    "split": _split,
    "pad": _padded,
    "tile": _tiled,
}


def reshaped(
    source: Sequence[int], target: Sequence[int], state: State, parts: int, is_part: Callable[[int], bool]
) -> tuple[int, int, bool] | None:
    """(dimension, blocks, whether its slices are alike) of the examples after a reshape; None where no dimension holds
    them.

    Args:
        state: Of the operand, a SPLIT.
        parts: The number of micro-batches, into which each block is cut.
        is_part: Whether the shapes of the result are those of a batch and a micro-batch along a dimension.
    """
    before = math.prod(source[: state.dim])
    blocks, preceding = before * state.outer, 1  # in the order of the elements
    for d, size in enumerate(target):
        is_inside = preceding % before == 0 and preceding * size <= before * source[state.dim]
        if state.uniform and is_inside and is_part(d):
            return d, 1, True
        if not state.uniform and blocks % preceding == 0 and blocks < preceding * size:
            inner = blocks // preceding
            return (d, inner, False) if size % (inner * parts) == 0 else None
        preceding *= size
    if not state.uniform:
        return None
    return reshaped(source, target, replace(state, uniform=False), parts, is_part)


# What is not worth doing for the whole batch outside of the loop, beside kernels and islands.
_HEAVY = frozenset({"dot_general", "conv_general_dilated", "triangular_solve", "cholesky", "lu", "qr", "eigh", "svd"})
# Parameters that are sizes of results, whose shapes are looked at, and of the first operand's dimensions.
_SIZES = frozenset({"shape", "new_sizes", "sizes", "sharding"})
_SIZES_OF_OPERAND = frozenset({"limit_indices", "slice_sizes"})
# What leaves zeros zeros.
_ZERO_KEEPING = frozenset({
    "add", "add_any", "sub", "neg", "transpose", "reshape", "squeeze", "expand_dims", "broadcast_in_dim", "reduce_sum",
    "cumsum", "slice", "copy", "rev", "dynamic_slice", "select_n", "concatenate", "dynamic_update_slice",
    "convert_element_type",
})  # fmt: skip
# The operands to which an operation adds the others.
_ADDED_TO = {"add": (0, 1), "add_any": (0, 1), "sub": (0,), "scatter-add": (0,), "scatter-sub": (0,)}
_READS_BEFORE = "it reads what the examples before have added up to"


@dataclasses.dataclass(slots=True)
class Follower:
    """Follows examples through the operations of the graphs of a whole batch and of one of its micro-batches.

    Both graphs have the same operations on values of the same numbers. `runs` is the number of equal runs into which
    the examples of a micro-batch can be split in all dimensions found so far: a dimension of pairs of neighbouring
    examples has half as many runs as examples. `body_states` follows what has a body on one part of its operands: a
    `shard_map`, and what has a partitioner of its own. `updates` are those of state that run behind the loop, once for
    each micro-batch.

    `blocks`: in so many blocks the examples of the batch's leaves are cut, of each of which a micro-batch has its part;
    `wanted_blocks` are numbers that slices between examples would have.

    `shares[v]` are the positions of the operands that count once for the whole batch and that an operation with the
    first result v adds to sums over examples: each micro-batch reads a share of them, the operand divided by the number
    of micro-batches. They are found inside of loops, while `sharing`; elsewhere such a sum is added up behind the loop
    over micro-batches.

    `late[v]` are the states of the values in the body of a scan with the first result v, of which some results are made
    of whole sums over examples (UNAVAILABLE). They are found while `deferring`.
    """

    whole: OpGraph
    part: OpGraph
    num_microbatches: int
    runs: int = 0
    body_states: Callable[[Op, Op, Sequence[State], int], list[State]] | None = None
    updates: StateUpdates = dataclasses.field(default_factory=StateUpdates)
    shares: dict[int, frozenset[int]] = dataclasses.field(default_factory=dict)
    sharing: bool = False
    late: dict[int, Mapping[int, State]] = dataclasses.field(default_factory=dict)
    deferring: bool = False
    blocks: int = 1
    wanted_blocks: set[int] = dataclasses.field(default_factory=set)

    def same_shape(self, value: int) -> bool:
        return self.whole.values[value].shape == self.part.values[value].shape

    def is_part(self, value: int, dim: int) -> bool:
        """Whether a value's shapes are those of a batch and a micro-batch along `dim`."""
        shape, expected = self.whole.values[value].shape, list(self.whole.values[value].shape)
        if shape[dim] % self.num_microbatches:
            return False
        expected[dim] //= self.num_microbatches
        return tuple(expected) == self.part.values[value].shape

    def by_shape(self, value: int) -> State:
        """The state of a value that is known before the first micro-batch, by its shapes."""
        invariant = State(form=Form.INVARIANT, early=True, streams=False)
        if self.same_shape(value):
            return invariant
        for dim in range(len(self.whole.values[value].shape)):
            if self.is_part(value, dim):
                return replace(invariant, form=Form.SPLIT, dim=dim, cut=True)
        return replace(invariant, form=Form.UNAVAILABLE)

    def cuts(self, value: int, state: State) -> None:
        """Records a value of which each micro-batch has a part."""
        self.runs = math.gcd(
            self.runs, self.whole.values[value].shape[state.dim] // (state.outer * self.num_microbatches)
        )

    def stays_in_loop(self, op: Op, part: Op, states: Sequence[State]) -> bool:
        """Whether an operation must run for each micro-batch even where its result is known before."""
        return False

    def begin_again(self) -> None:
        """Forgets what was found on the way."""
        self.runs, self.shares, self.late, self.wanted_blocks = 0, {}, {}, set()

    def permission(self, op: Op) -> bool:
        """Whether an operation may mix the examples of a micro-batch."""
        return False

    def may_share(self, states: Sequence[State]) -> bool:
        """Whether a loop that reads such operands may read shares: one that can run only for each micro-batch."""
        return self.num_microbatches > 1 and any(s.form is Form.SPLIT for s in states)

    def leaving_weight(self, state: State, value: Value, maker: Op) -> float:
        """By what the join of the micro-batches' values is multiplied where a value leaves the loop."""
        return 1.0

    # Operations

    def follow(self, op: Op, part: Op, states: Sequence[State], around: Mapping[int, State]) -> list[State]:
        """The states of an operation's results when it runs once for each micro-batch.

        `part` is the operation of the micro-batch; `around` are the states of values that its blocks read from outside.
        Raises: CombinesExamples when the results have no form.
        """
        self.check_available(op, states)
        if op.kind is OpKind.BARRIER:
            return list(states)
        if op.kind is OpKind.SCAN:
            return self._scan(op, part, states, around)
        if op.kind is OpKind.WHILE:
            return self._while(op, part, states, around)
        if op.kind is OpKind.COND:
            return self._cond(op, part, states, around)
        if any(s.form is Form.RUNNING or differs_by_trip(s) for s in states):
            return self._in_trip(op, part, states)
        has_body = self.body_states is not None and (is_island(op.eqn) or is_custom_partition(op.eqn))
        if has_body and any(s.form is not Form.INVARIANT for s in states):
            assert self.body_states is not None
            return self._checked(op, self.body_states(op, part, states, self.num_microbatches))
        zero = op.primitive in _ZERO_KEEPING and all(s.zero for s in _summands_of(op, states))
        if any(s.form is Form.SPLIT for s in states):
            results = self._examples(op, part, states)
        elif any(s.form is Form.PARTIAL_SUM for s in states):
            results = self._linear(op, part, states)
        else:
            results = self._unchanged(op, part)
        return [replace(s, zero=zero) for s in results]

    def check_available(self, op: Op, states: Sequence[State]) -> None:
        """Raises: CombinesExamples for an operation that reads what a micro-batch does not have. Of a scan, what reads
        it in the body can be deferred.
        """
        missing = [s for s in states if s.form is Form.UNAVAILABLE]
        if missing and not (self.deferring and op.kind in (OpKind.SCAN, OpKind.BARRIER)):
            causes = [s.cause for s in missing if s.cause is not None]
            raise causes[0].plain() if causes else CombinesExamples(op, "it reads a result of all examples")

    def _examples(self, op: Op, part: Op, states: Sequence[State]) -> list[State]:
        """Results of an equation that reads parts."""
        places = tuple(s.dim if s.form is Form.SPLIT else None for s in states)
        blocks = counted_examples(op.eqn, part.eqn, states, self.num_microbatches)
        if blocks is not None:
            return self._checked(op, blocks)
        self.wanted_blocks |= blocks_of_slices(op.eqn, states)
        uniform = all(s.uniform for s in states if s.form is Form.SPLIT)
        outers = {s.outer for s in states if s.form is Form.SPLIT and not s.uniform} or {1}
        if len(outers) != 1:
            raise CombinesExamples(op, SEVERAL)
        if any(s.form is Form.SPLIT and s.laid is not None for s in states):
            raise CombinesExamples(op, "it reads the parts of a shard_map outside of one")
        (outer,) = outers
        for atom, s in zip(op.inputs, states, strict=True):
            if s.form is Form.INVARIANT and isinstance(atom, int) and not self.same_shape(atom):
                raise CombinesExamples(op, AGAINST_OTHERS)
        self._check_parameters(op, part, places)
        if sums_over_examples(op.eqn, places) and sums_over_examples(part.eqn, places):
            return self._summed(op, states)
        if any(s.form is Form.PARTIAL_SUM for s in states):
            raise CombinesExamples(op, COMBINES)
        if op.primitive == "reshape":
            dims, outer, uniform = self._reshaped(op, states[0])
        else:
            dims = self._apart(op, part, places)
        results = [self._made(op, dim, outer) for dim in dims]
        return self._checked(op, [replace(s, uniform=uniform and s.form is Form.SPLIT) for s in results])

    def _made(self, op: Op, dim: int | None, outer: int) -> State:
        """The state of a result with the examples in a dimension, as `example_rules.Results` says it."""
        if dim is None:
            return State(form=Form.PARTIAL_SUM, cause=CombinesExamples(op, "it sums over examples"))
        return State(form=Form.INVARIANT) if dim == SHARED else State(form=Form.SPLIT, dim=dim, outer=outer)

    def _checked(self, op: Op, results: list[State]) -> list[State]:
        """Results whose shapes are those of their forms; records those of which each micro-batch has a part."""
        for value, state in zip(op.outputs, results, strict=True):
            is_split = state.form is Form.SPLIT
            sums = state.form is Form.PARTIAL_SUM
            is_like = self.is_part(value, state.dim) if is_split else self.same_shape(value)
            if not is_like or (sums and not is_number(self.whole.values[value].dtype)):
                raise CombinesExamples(op, "its result does not follow the number of examples")
            if is_split:
                self.cuts(value, state)
        return results

    def _summed(self, op: Op, states: Sequence[State]) -> list[State]:
        """A sum over examples; where it is added to another value, that must be a sum over examples too."""
        added = op.primitive in ("scatter-add", "scatter-sub")
        if added and not (states[0].form is Form.PARTIAL_SUM or states[0].zero):
            raise CombinesExamples(op, "it adds sums over examples to something else")
        if any(s.form is Form.PARTIAL_SUM for s in states[added:]) or not _can_be_summed(op):
            raise CombinesExamples(op, COMBINES)
        if not all(self.same_shape(v) for v in op.outputs):
            raise CombinesExamples(op, "its result does not follow the number of examples")
        cause = CombinesExamples(op, "it sums over examples")
        return [State(form=Form.PARTIAL_SUM, cause=cause) for _ in op.outputs]

    def _reshaped(self, op: Op, state: State) -> tuple[Results, int, bool]:
        """(the dimension of the result that holds the examples, its blocks, whether its slices are alike)."""
        (operand,), (result,) = op.inputs, op.outputs
        assert isinstance(operand, int), "literals hold no examples"
        shapes = [self.whole.values[v].shape for v in (operand, result)]
        place = reshaped(shapes[0], shapes[1], state, self.num_microbatches, lambda dim: self.is_part(result, dim))
        if place is None:
            raise CombinesExamples(op, "it takes the examples apart")
        return [place[0]], *place[1:]

    def _apart(self, op: Op, part: Op, places: Sequence[int | None]) -> Results:
        """The dimensions of an equation's results that hold the examples; None of sums over them."""
        try:
            results = places_of_results(op.eqn, places)
            if results == places_of_results(part.eqn, places):
                return results
        except MixesExamples as why:
            raise CombinesExamples(op, str(why)) from None
        raise CombinesExamples(op, "its result does not follow the number of examples")

    def _check_parameters(self, op: Op, part: Op, places: Sequence[int | None]) -> None:
        """Raises: CombinesExamples where parameters differ in more than sizes of dimensions with examples."""
        if is_pallas_call(op.eqn):
            if not is_same_kernel(op.eqn, part.eqn):
                raise CombinesExamples(op, "its kernel depends on the number of examples")
            return
        for name, value in op.eqn.params.items():
            part_value = part.eqn.params[name]
            if name in _SIZES or (name in _SIZES_OF_OPERAND and _differ_at(value, part_value) <= {places[0]}):
                continue
            if not _same_parameter(value, part_value):
                raise CombinesExamples(op, f"its {name} depends on the number of examples")

    def _linear(self, op: Op, part: Op, states: Sequence[State]) -> list[State]:
        """Results of an equation that reads summands and no parts."""
        for members in linear_operands(op.primitive, op.eqn):
            inside = all(s.form is Form.PARTIAL_SUM or s.zero for i, s in enumerate(states) if i in members)
            outside = all(s.form is Form.INVARIANT for i, s in enumerate(states) if i not in members)
            if inside and outside and _is_same(op, part) and _can_be_summed(op):
                cause = next(s.cause for s in states if s.form is Form.PARTIAL_SUM)
                return [State(form=Form.PARTIAL_SUM, cause=cause) for _ in op.outputs]
        raise CombinesExamples(op, "it is not linear in a sum over examples")

    def _unchanged(self, op: Op, part: Op) -> list[State]:
        """Results of an equation that reads nothing that depends on the examples."""
        if all(self.same_shape(v) for v in op.outputs) and _is_same(op, part):
            return [State(form=Form.INVARIANT) for _ in op.outputs]
        varies = _dims_that_vary(op)
        if varies is not None:
            (value,) = op.outputs
            for dim in range(len(self.whole.values[value].shape)):
                if dim not in varies and self.is_part(value, dim):
                    self.cuts(value, state := State(form=Form.SPLIT, dim=dim, uniform=True))
                    return [state]
        raise CombinesExamples(op, "it counts the examples")

    # Blocks

    def block_states(self, block: Block, part: Block, states: Sequence[State]) -> list[State]:
        """The states of the outputs of a block that reads nothing from around it."""
        return self._block(block, part, states, {})

    def _block(self, block: Block, part: Block, states: Sequence[State], around: Mapping[int, State]) -> list[State]:
        """The states of the outputs of a block that runs in each micro-batch as a whole."""
        deferring, self.deferring = self.deferring, False
        try:
            known = self._values_of(block, part, states, around)
        finally:
            self.deferring = deferring
        return [state_of(a, known) for a in block.outputs]

    def _values_of(
        self, block: Block, part: Block, states: Sequence[State], around: Mapping[int, State]
    ) -> Mapping[int, State]:
        """The states of a block's values, and of those around it, from those of its inputs."""
        state_of_value = {**around, **dict(zip(block.inputs, states, strict=True))}
        for op, part_op in zip(block.ops, part.ops, strict=True):
            results = self._inside(op, part_op, [state_of(a, state_of_value) for a in op.inputs], state_of_value)
            state_of_value.update(zip(op.outputs, results, strict=True))
        return state_of_value

    def _inside(self, op: Op, part: Op, states: Sequence[State], around: Mapping[int, State]) -> list[State]:
        """The results of an operation of a block, which may read shares, or whole sums over examples."""
        self._read_shares(op, ())
        try:
            return self.follow(op, part, states, around)
        except CombinesExamples as mixes:
            shared = shared_operands(op, states) if self.sharing else []
            if not shared and self._can_wait(op, states):
                self.late.pop(op.outputs[0], None)
                cause = next((s.cause for s in states if s.form is Form.UNAVAILABLE and s.cause), mixes.plain())
                return [State(form=Form.UNAVAILABLE, streams=False, cause=cause) for _ in op.outputs]
            if not shared:
                raise
        summand = next(s for s in states if s.form is Form.PARTIAL_SUM)
        states = [replace(summand, zero=False) if i in shared else s for i, s in enumerate(states)]
        results = self.follow(op, part, states, around)
        self._read_shares(op, shared)
        return results

    def _can_wait(self, op: Op, states: Sequence[State]) -> bool:
        """Whether an operation in the body of a scan can run behind the loop over micro-batches: it reads sums over
        examples, and nothing of the size of the batch; or it is what may run there outside of scans.
        """
        if not self.deferring or has_effects(op):
            return False
        forms = {s.form for s in states}
        is_small = forms.isdisjoint((Form.SPLIT, Form.OWN)) and all(
            self.same_shape(a) for a in (*op.inputs, *op.outputs) if isinstance(a, int)
        )
        if is_small and not forms.isdisjoint((Form.PARTIAL_SUM, Form.UNAVAILABLE)):
            return True
        return not is_work_on_examples(op) and all(map(_can_leave_the_loop, states))

    def _read_shares(self, op: Op, positions: Sequence[int]) -> None:
        self.shares.pop(op.outputs[0] if op.outputs else -1, None)
        if positions:
            self.shares[op.outputs[0]] = frozenset(positions)

    def _scan(self, op: Op, part: Op, states: Sequence[State], around: Mapping[int, State]) -> list[State]:
        k, n = op.num_consts, op.num_consts + op.num_carry
        if op.trips != part.trips or any(s.form is Form.SPLIT and s.dim == 0 for s in states[n:]):
            return self._scan_over_examples(op, part, states, around)
        (body,), (part_body,) = op.blocks, part.blocks
        consts, carry = ([inside_loop(s) for s in some] for some in (states[:k], states[k:n]))
        xs = [of_slice(inside_loop(s)) for s in states[n:]]

        known: Mapping[int, State] = {}
        self.late.pop(op.outputs[0] if op.outputs else -1, None)

        def round_(carry: list[State]) -> tuple[list[State], list[State]]:
            nonlocal known
            known = self._values_of(body, part_body, [*consts, *carry, *xs], around)
            outputs = [state_of(a, known) for a in body.outputs]
            return outputs[: op.num_carry], outputs[op.num_carry :]

        carry, ys = self._settled(op, k, carry, round_)
        if any(y.form is Form.RUNNING for y in ys):
            raise CombinesExamples(op, _READS_BEFORE)
        if any(s.form is Form.UNAVAILABLE for s in (*carry, *ys)):
            self.late[op.outputs[0]] = known
        return [*carry, *map(of_stack, ys)]

    def _scan_over_examples(
        self, op: Op, part: Op, states: Sequence[State], around: Mapping[int, State]
    ) -> list[State]:
        """The results of a scan of which a micro-batch runs its own trips, those over its examples.

        Each trip must be the same function of its slices: what it stacks are then rows of the examples, and what is
        carried adds up over any trips, where a trip adds to it and does not read it otherwise.
        """
        k, n = op.num_consts, op.num_consts + op.num_carry
        slices = states[n:]
        over = all(s.form is Form.SPLIT and s.dim == 0 and s.laid is None for s in slices)
        outers = {s.outer for s in slices if s.form is Form.SPLIT and not s.uniform} or {1}
        if op.trips != part.trips * self.num_microbatches or not over or len(outers) != 1:
            raise CombinesExamples(op, "it goes over the examples beside something else, or over their number")
        (body,), (part_body,) = op.blocks, part.blocks
        (outer,), unchanged = outers, handed_on(op)
        inputs = [inside_loop(s) for s in states[:k]]
        for i, s in enumerate(states[k:n]):
            running = State(form=Form.RUNNING, dim=i, weight=None if s.zero else s.weight)
            inputs.append(inside_loop(s) if i in unchanged else running)
        inputs += [replace(inside_loop(s), dim=TRIPS, outer=1, uniform=False) for s in slices]
        outputs = self._block(body, part_body, inputs, around)
        shared, carried = [], list(states[k:n])
        for i, (start, end) in enumerate(zip(states[k:n], outputs, strict=False)):
            if i in unchanged:
                continue
            carried[i] = self._summed_over_trips(op, i, start, end)
            if start.form is Form.INVARIANT and not start.zero:
                shared.append(k + i)
        stacked = []
        for y in outputs[op.num_carry :]:
            if y.form is not Form.INVARIANT and not differs_by_trip(y):
                raise CombinesExamples(op, _READS_BEFORE if y.form is Form.RUNNING else SEVERAL)
            is_alike = y.form is Form.INVARIANT
            stacked.append(replace(y, form=Form.SPLIT, dim=0, outer=1 if is_alike else outer, uniform=is_alike))
        self._read_shares(op, shared)
        return self._checked(op, [*map(inside_loop, carried), *stacked])

    def _summed_over_trips(self, op: Op, carried: int, start: State, end: State) -> State:
        """The state of a carried value behind a loop over examples, by those in front of it and behind one trip."""
        if end.form is not Form.RUNNING or end.dim != carried:
            raise CombinesExamples(op, "a trip over examples reads what those before it made")
        cause = CombinesExamples(op, "it sums over examples")
        is_share = self.sharing and starts_sum(op, carried, start, State(form=Form.PARTIAL_SUM))
        if not (start.zero or start.form is Form.PARTIAL_SUM or is_share):
            raise CombinesExamples(op, "it adds sums over examples to something else")
        return State(form=Form.PARTIAL_SUM, weight=end.weight, cause=cause)

    def _in_trip(self, op: Op, part: Op, states: Sequence[State]) -> list[State]:
        """Results of an equation in a trip of a loop over examples: the same function of the trip's slices."""
        running = [i for i, s in enumerate(states) if s.form is Form.RUNNING]
        if any(s.form is not Form.INVARIANT and not differs_by_trip(s) for s in states if s.form is not Form.RUNNING):
            raise CombinesExamples(op, SEVERAL)
        if not all(map(self.same_shape, op.outputs)) or not _is_same(op, part):
            raise CombinesExamples(op, "it counts the examples")
        if not running:
            return [State(form=Form.SPLIT, dim=TRIPS) for _ in op.outputs]
        if len(running) > 1 or running[0] not in _ADDED_TO.get(op.primitive, ()):
            raise CombinesExamples(op, _READS_BEFORE)
        return [states[running[0]]]

    def _while(self, op: Op, part: Op, states: Sequence[State], around: Mapping[int, State]) -> list[State]:
        (condition, body), (other_condition, other_body) = op.blocks, part.blocks
        k, n = op.num_condition_consts, op.num_consts
        inside = [inside_loop(s) for s in states]

        def round_(carry: list[State]) -> tuple[list[State], list[State]]:
            (goes_on,) = self._block(condition, other_condition, [*inside[:k], *carry], around)
            if differs_by_trip(goes_on):
                outputs = self._block(body, other_body, [*inside[k:n], *carry], around)
                return [_in_some_trips(s) for s in outputs], []
            # Under `vmap` each example has a condition, and stays as it is when that no longer holds.
            is_own = goes_on.form is Form.SPLIT and all(split_alike(s, goes_on) for s in carry)
            if goes_on.form is not Form.INVARIANT and not is_own:
                raise CombinesExamples(op, "how long it runs depends on all examples")
            return self._block(body, other_body, [*inside[k:n], *carry], around), []

        return self._settled(op, n, inside[n:], round_)[0]

    def _settled(self, op: Op, first: int, carry: list[State], round_: Any) -> tuple[list[State], list[State]]:
        """The states of the carried values, from operand `first` on, at their fixed point, and those of the stacked
        results. What a sum over examples starts from is read as a share.
        """
        start = carry
        for _ in range(len(Form) * (1 + len(carry))):  # each round but the last settles at least one form
            carry_out, stacked = round_(carry)
            joined = [
                replace(b, zero=False) if self.sharing and starts_sum(op, i, a, b) else join(op, a, b)
                for i, (a, b) in enumerate(zip(carry, carry_out, strict=True))
            ]
            if joined == carry:
                pairs = enumerate(zip(start, carry, strict=True), first)
                sums = [i for i, (a, b) in pairs if not a.zero and a.form is not b.form is Form.PARTIAL_SUM]
                self._read_shares(op, sums)
                return carry, stacked
            carry = joined
        raise CombinesExamples(op, "what it carries takes ever other forms")

    def _cond(self, op: Op, part: Op, states: Sequence[State], around: Mapping[int, State]) -> list[State]:
        by_trip = differs_by_trip(states[0])
        if states[0].form is not Form.INVARIANT and not by_trip:
            raise CombinesExamples(op, "which branch it takes depends on the examples")
        inside = [inside_loop(s) for s in states[1:]]
        results: list[State] | None = None
        for block, part_block in zip(op.blocks, part.blocks, strict=True):
            branch = self._block(block, part_block, inside, around)
            results = branch if results is None else [join(op, a, b) for a, b in zip(results, branch, strict=True)]
        assert results is not None, "a cond has branches"
        return [_in_some_trips(s) for s in results] if by_trip else results


def is_heavy(op: Op) -> bool:
    """Whether an operation, or one in its blocks, is not worth doing for the whole batch outside of the loop."""
    if op.kind is not OpKind.EQUATION:
        return any(is_heavy(inner) for block in op.blocks for inner in block.ops)
    return op.primitive in _HEAVY or runs_locally(op.eqn)


def is_work_on_examples(op: Op) -> bool:
    """Whether an operation that mixes examples is refused, rather than run on all of them behind the loop."""
    return op.kind is not OpKind.EQUATION or is_heavy(op) or op.role is Role.BACKWARD


def state_of(atom: Atom, states: Mapping[int, State]) -> State:
    if isinstance(atom, Constant):
        return State(form=Form.INVARIANT, early=True, streams=False, zero=_is_zero(atom))
    return states[atom]


def _dims_that_vary(op: Op) -> set[int] | None:
    """The dimensions of the result along which an equation that fills an array may make slices that differ; None for
    another equation.
    """
    if op.primitive == "iota":
        return {int(op.eqn.params["dimension"])}
    if op.primitive == "broadcast_in_dim":
        shape = op.eqn.invars[0].aval.shape
        return {d for d, n in zip(op.eqn.params["broadcast_dimensions"], shape, strict=True) if n != 1}
    return None


def _can_leave_the_loop(state: State) -> bool:
    """Whether the whole batch's value can be put together of those of the micro-batches, whatever its shape."""
    if state.form in (Form.OWN, Form.RUNNING) or state.laid is not None:
        return False
    return state.form is not Form.SPLIT or (state.dim != TRIPS and state.outer == 1)


def _in_some_trips(state: State) -> State:
    """The state of a value that some trips of a loop over examples make, and others not, or differently."""
    return State(form=Form.SPLIT, dim=TRIPS, weight=state.weight) if state.form is Form.INVARIANT else state


def _is_zero(constant: Constant) -> bool:
    if jax_compat.is_key_dtype(constant.literal.aval.dtype):
        return False
    return bool(np.all(np.asarray(constant.literal.val) == 0))


def _summands_of(op: Op, states: Sequence[State]) -> Sequence[State]:
    """The operands that are zero when the result is, of an operation that keeps zeros."""
    if op.primitive == "select_n":
        return states[1:]
    if op.primitive == "dynamic_update_slice":
        return states[:2]
    return states[:1] if op.primitive == "dynamic_slice" else states


def _is_same(op: Op, part: Op) -> bool:
    """Whether the equations of a micro-batch and of the whole batch compute the same from the same operands."""
    return op.key == part.key and same_code(op.eqn, part.eqn)


def same_code(eqn: Any, part: Any) -> bool:
    """Whether the jaxprs of two equations with the same key are the same."""
    params = ((v, part.params[name]) for name, v in eqn.params.items() if jax_compat.is_jaxpr(v))
    return all(_same_parameter(value, of_part) for value, of_part in params)


def _same_parameter(value: Any, part_value: Any) -> bool:
    # Functions that come with an equation differ from trace to trace; what they compute, its jaxprs say too.
    return (callable(value) and not jax_compat.is_jaxpr(value)) or repr(value) == repr(part_value)


def _differ_at(sizes: Sequence[int], part_sizes: Sequence[int]) -> set[int | None]:
    return {d for d, (a, b) in enumerate(zip(sizes, part_sizes, strict=True)) if a != b}


def _can_be_summed(op: Op) -> bool:
    """Whether results are numbers; sums of integers in any order are exact."""
    return all(is_number(str(v.aval.dtype)) for v in op.eqn.outvars)


def is_number(dtype: str) -> bool:
    """Whether a value's type is one of numbers, rather than of truth values or random keys."""
    return not dtype.startswith("key<") and dtype != "bool"
