"""Which values may stay partial: sums that are added to one another before one reduction.

Examples: two partial gradients of one tied parameter, the input gradients of projections that read one activation, a
gradient that accumulates in a loop or over micro-batches, or that a loop over layers stacks. A reduction of each would
send the same bytes several times. All other sums are reduced where they are computed, so that the search carries no
partial layouts without a gain.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Mapping

from autopar.ir.graph import Atom, Block, FactorKind, Op, OpGraph, OpKind
from autopar.ir.primitives import is_summing_type, linear_operands, sums_locally

_ADDING = frozenset({"add", "add_any", "sub"})
# Linear operations through which partial values are followed. A product with a whole tensor is linear too, but then
# each device works on a full-size summand, which costs more than reducing first.
_CARRYING = _ADDING | {
    "neg", "transpose", "reshape", "squeeze", "expand_dims", "convert_element_type", "copy", "mul", "div", "slice",
    "pad",
}  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class Partials:
    """`kept`: values that may stay partial. `operands[op.id]`: the operands that an operation reads as they are."""

    kept: frozenset[int]
    operands: dict[int, frozenset[int]]

    def reads_unreduced(self, op: Op, operand: int) -> bool:
        return operand in self.unreduced_operands(op)

    def unreduced_operands(self, op: Op) -> frozenset[int]:
        return self.operands.get(op.id, frozenset())


def find_partials(graph: OpGraph) -> Partials:
    """Finds additions of sums with different origins, and what lies between the sums and the additions."""
    origins = _Origins()
    carriers: dict[int, tuple[Op, frozenset[int]]] = {}
    slices: dict[int, int] = {}
    wanted: list[int] = []
    _forward(graph.block, graph, origins, carriers, slices, wanted)
    kept: set[int] = set()
    operands: dict[int, frozenset[int]] = {}
    while wanted:
        value = wanted.pop()
        if value in kept:
            continue
        kept.add(value)
        if value in slices:
            wanted.append(slices[value])
        if value in carriers:
            op, members = carriers[value]
            operands[op.id] = members
            wanted += [a for i in members if isinstance(a := op.inputs[i], int)]
    return Partials(frozenset(kept), operands)


class _Origins(dict[int, int]):
    """The summing operations that each value is a linear function of, as bits of an integer: a chain of additions has
    all that were added so far in each of its values.
    """

    def __init__(self) -> None:
        super().__init__()
        self._numbers: dict[int, int] = {}

    def only(self, origin: int) -> int:
        """This one origin."""
        return 1 << self._numbers.setdefault(origin, len(self._numbers))


def same_partials(whole: Partials, folded: Partials, op_of: Mapping[int, int], value_of: Mapping[int, int]) -> bool:
    """Whether sums may stay partial in a graph exactly where their counterparts in the folded one may.

    `op_of` and `value_of` are the counterparts of operations and values of the whole graph.
    """
    alike = all((v in whole.kept) == (like in folded.kept) for v, like in value_of.items())
    return alike and all(whole.operands.get(op) == folded.operands.get(like) for op, like in op_of.items())


def _forward(
    block: Block,
    graph: OpGraph,
    origins: _Origins,
    carriers: dict[int, tuple[Op, frozenset[int]]],
    slices: dict[int, int],
    wanted: list[int],
) -> None:
    """Follows sums forward. `origins[v]` are the summing operations that v is a linear function of, `slices[v]` is what
    each iteration of a loop makes of v.
    """
    readers = _readers(block)
    for op in block.ops:
        if op.kind is OpKind.SCAN:
            _accumulators(op, graph, origins, carriers, wanted)
        for inner in op.blocks:
            _forward(inner, graph, origins, carriers, slices, wanted)
        if op.kind is OpKind.SCAN:
            (body,) = op.blocks
            carried = body.inputs[op.num_consts : op.num_consts + op.num_carry]
            for inner_value, after, result in zip(carried, body.outputs, op.outputs, strict=False):
                if inner_value in origins and after in origins:
                    origins[result] = origins.only(op.id)
            for made, stack in zip(body.outputs[op.num_carry :], op.outputs[op.num_carry :], strict=True):
                if isinstance(made, int) and made in origins:
                    origins[stack], slices[stack] = origins[made], made
        if op.kind is OpKind.ACCUMULATE and isinstance(summand := op.inputs[0], int) and summand in origins:
            # Summands of all micro-batches are added up before they are reduced, once a step.
            (result,) = op.outputs
            origins[result] = origins[summand]
            carriers[result] = (op, frozenset({0}))
            wanted.append(result)
        if op.kind is not OpKind.EQUATION or op.rule is None:
            continue
        if len(op.outputs) != 1:
            origins.update((v, origins.only(op.id)) for v in _summands(op))
            continue
        (result,) = op.outputs
        summed = [f for f in op.rule.factors if f.kind is FactorKind.SUM]
        operand = op.inputs[0] if op.primitive == "reduce_sum" else None
        if all(f.size == 1 for f in summed) and isinstance(operand, int) and operand in origins:
            # A sum over a dimension of size one (what is left of a broadcast in a gradient) only drops it.
            origins[result] = origins[operand]
            carriers[result] = (op, frozenset({0}))
            continue
        if summed:
            if sums_locally(op.eqn) and is_summing_type(op.eqn):
                origins[result] = origins.only(op.id)
            continue
        members = _carried_operands(op, graph, origins, readers)
        if members is None:
            continue
        of_each = [origins.get(a, 0) for i in sorted(members) if isinstance(a := op.inputs[i], int)]
        origins[result] = functools.reduce(operator.or_, of_each, 0)
        carriers[result] = (op, members)
        adds = op.primitive in _ADDING and all(of_each) and not of_each[0] & of_each[1]
        if adds:
            wanted.append(result)


def _summands(op: Op) -> list[int]:
    """The results of an operation with several that lack one of its summed factors."""
    assert op.rule is not None, "equations have rules"
    summed = {i for i, f in enumerate(op.rule.factors) if f.kind is FactorKind.SUM}
    if not summed or not (sums_locally(op.eqn) and is_summing_type(op.eqn)):
        return []
    results = zip(op.outputs, op.rule.results, strict=True)
    return [v for v, dims in results if summed - {f for dim in dims for f in dim}]


def _readers(block: Block) -> dict[int, list[Op | None]]:
    """Who reads each value in a block; None for the block's own results."""
    readers: dict[int, list[Op | None]] = {}
    for op in block.ops:
        for atom in op.inputs:
            if isinstance(atom, int):
                readers.setdefault(atom, []).append(op)
    for atom in block.outputs:
        if isinstance(atom, int):
            readers.setdefault(atom, []).append(None)
    return readers


def _carried_operands(
    op: Op, graph: OpGraph, origins: _Origins, readers: dict[int, list[Op | None]]
) -> frozenset[int] | None:
    """The operands in which an operation is linear and that all come from sums.

    A whole value may join a chain of additions too (one device holds it, the others zeros), where the result goes
    straight into the next addition: a gradient that bypasses a layer, added to those of its projections.
    """
    if op.primitive not in _CARRYING:
        return None
    for members in linear_operands(op.primitive, op.eqn):
        sums = all(isinstance(a := op.inputs[i], int) and a in origins for i in members)
        scalars = all(_size(a, graph) == 1 for i, a in enumerate(op.inputs) if i not in members)
        if sums and scalars:
            return members
    if op.primitive in _ADDING and all(isinstance(a, int) for a in op.inputs):
        next_ones = readers.get(op.outputs[0], [])
        chained = len(next_ones) == 1 and next_ones[0] is not None and next_ones[0].primitive in _ADDING
        same_shape = len({graph.values[a].shape for a in op.inputs if isinstance(a, int)}) == 1
        if chained and same_shape and any(a in origins for a in op.inputs):
            return frozenset({0, 1})
    return None


def _size(atom: Atom, graph: OpGraph) -> int:
    if isinstance(atom, int):
        return graph.values[atom].size
    n = 1
    for d in atom.shape:
        n *= d
    return n


def _accumulators(
    op: Op,
    graph: OpGraph,
    origins: _Origins,
    carriers: dict[int, tuple[Op, frozenset[int]]],
    wanted: list[int],
) -> None:
    """Carried values to which a loop's body only adds sums: they may stay partial until the loop ends."""
    (body,) = op.blocks
    readers = _readers(body)
    made_by = {v: inner for inner in body.ops for v in inner.outputs}
    for position in range(op.num_carry):
        carried, after = body.inputs[op.num_consts + position], body.outputs[position]
        if not isinstance(after, int) or after not in made_by or readers[after] != [None]:
            continue
        adding = made_by[after]
        if adding.primitive not in _ADDING or readers.get(carried) != [adding] or adding.inputs[0] == adding.inputs[1]:
            continue
        other = [a for a in adding.inputs if a != carried]
        if len(other) == 1 and isinstance(other[0], int):
            origins[carried] = origins.only(-1 - carried)  # an origin of its own: disjoint from every sum in the body
