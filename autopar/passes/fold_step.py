"""Folding of the repeated layers of a step that is not cut, and what several sources of candidates read of one graph.

Decisions for the folded graph are decisions for the whole step: an operation that was dropped is decided like its
counterpart in a layer that stays. A step of forty equal layers is searched for as one of three or four.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping

from msgspec.structs import replace

from autopar.ir.graph import Block, Op, OpGraph, OpKind, Role, Section, read_by, walk
from autopar.ir.partial_sums import Partials, find_partials, same_partials
from autopar.ir.rewrite import makers
from autopar.ir.semantics import annotate_semantics
from autopar.passes.assign_layers import assign_layers
from autopar.passes.fold_layers import fold_layers
from autopar.passes.layers import find_layers

_SECTION = {Role.FORWARD: Section.FORWARD, Role.BACKWARD: Section.BACKWARD, Role.UPDATE: Section.AFTER}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """For how many operations, and values, of a whole graph one of a folded graph stands, where not for one. Bodies of
    loops too.
    """

    of_op: Mapping[int, float]
    of_value: Mapping[int, float]


ONE_EACH = Weights(of_op={}, of_value={})


@dataclasses.dataclass(frozen=True, kw_only=True)
class FoldedStep:
    """A step with its repeated layers taken out.

    `graph` has what stays, with the numbers of the whole graph; `paired_ops` are operations that are to be decided
    alike (`FoldedGraph`). `op_of[o]` and `value_of[v]` are the counterparts in it of o and v of the whole graph,
    themselves where they stay.
    """

    graph: OpGraph
    paired_ops: tuple[tuple[Op, Op], ...]
    op_of: Mapping[int, int]
    value_of: Mapping[int, int]
    weights: Weights


def fold_step(graph: OpGraph, flops: Callable[[Op], float]) -> FoldedStep | None:
    """The step with its repeated layers taken out; None where nothing is repeated, or where an operation or value would
    have no counterpart in the folded graph. `flops(op)` is the arithmetic of one run of an equation.

    Layers are found as for pipelines, by the passes in which operations stand: what is made of weights alone (casts of
    all layers, say) belongs to the layer that reads it, wherever it is written.
    """
    sections = _SECTION if graph.forward_role is Role.FORWARD else dict.fromkeys(Role, Section.FORWARD)
    before = _before_the_batch(graph)
    cut = _with_sections(graph, lambda op: Section.BEFORE if op.id in before else sections[op.role])
    layers = find_layers(cut, flops)
    assignment = assign_layers(cut, layers)
    folded = fold_layers(cut, assignment, len(layers), ends_apart=True)
    if len(folded.graph.block.ops) == len(graph.block.ops):
        return None
    whole = _with_sections(folded.graph, lambda op: Section.WHOLE)
    ops = {op.id: op for op in whole.block.ops}
    likeness = _Likeness(graph, whole)
    for layer, stand_in in enumerate(folded.stands_for):
        if layer != stand_in:
            for op, like in zip(folded.members[layer], folded.members[stand_in], strict=True):
                likeness.ops(op, like)
    likeness.operands()
    likeness.results()
    if not likeness.is_complete():
        return None
    weight_of = {
        inner.id: weight
        for op in whole.block.ops
        if (weight := folded.weight_of(op)) != 1.0
        for inner in _with_inner(op)
    }
    return FoldedStep(
        graph=whole,
        paired_ops=tuple((ops[a.id], ops[b.id]) for a, b in folded.paired_ops),
        op_of=likeness.op_of,
        value_of=likeness.value_of,
        weights=Weights(of_op=weight_of, of_value=folded.copies()),
    )


class _Likeness:
    """The counterparts of operations and values in the folded graph, while they are found."""

    def __init__(self, graph: OpGraph, folded: OpGraph) -> None:
        self.graph, self.folded = graph, folded
        self.op_of: dict[int, int] = {op.id: op.id for op in folded.ops()}
        stay = {*folded.block.inputs, *(v for op in folded.ops() for v in _made_by(op))}
        self.value_of: dict[int, int] = {v: v for v in stay}
        self.pairs: list[tuple[Op, Op]] = []

    def ops(self, op: Op, like: Op) -> None:
        """An operation that was dropped, and the one of equal structure that stays."""
        self.pairs.append((op, like))
        for a, b in zip(_with_inner(op), _with_inner(like), strict=True):
            self.op_of[a.id] = b.id
            self.value_of.update(zip(_made_by(a), _made_by(b), strict=True))

    def operands(self) -> None:
        """What dropped operations alone read (arguments, operations of no layer) is like what its counterparts read."""
        maker = makers(self.graph.block.ops)
        for op, like in self.pairs:  # grows with the operations of no layer
            for x, y in zip(_read(op), _read(like), strict=True):
                if x in self.value_of or y not in self.value_of or not self.same_type(x, y):
                    continue
                made, counterpart = maker.get(x), maker.get(y)
                if made is None and counterpart is None:
                    self.value_of[x] = self.value_of[y]
                elif made is not None and counterpart is not None and self.may_be_like(made, counterpart):
                    self.ops(made, counterpart)

    def results(self) -> None:
        """Arguments that nobody reads lie as the results that replace them."""
        block = self.graph.block
        like = {atom: block.inputs[i] for i, o in self.graph.tied if isinstance(atom := block.outputs[o], int)}
        for i, o in self.graph.tied:
            result, argument = block.outputs[o], block.inputs[i]
            if argument not in self.value_of and isinstance(result, int) and result in self.value_of:
                counterpart = like.get(self.value_of[result])
                if counterpart in self.value_of and self.same_type(argument, counterpart):
                    self.value_of[argument] = self.value_of[counterpart]

    def may_be_like(self, op: Op, like: Op) -> bool:
        """Whether an operation of no layer that was dropped is like one that stays."""
        return op.id not in self.op_of and like.id in self.op_of and _same_kind(op, like)

    def same_type(self, one: int, other: int) -> bool:
        a, b = self.graph.values[one], self.graph.values[other]
        return (a.shape, a.dtype) == (b.shape, b.dtype)

    def is_complete(self) -> bool:
        """Whether every operation and value has a counterpart, and those of tied values are tied too."""
        block, folded = self.graph.block, self.folded.block
        tied = {(folded.inputs[i], a) for i, o in self.folded.tied if isinstance(a := folded.outputs[o], int)}
        values = {*block.inputs, *(v for op in self.graph.ops() for v in _made_by(op))}
        if not values <= self.value_of.keys() or not {op.id for op in self.graph.ops()} <= self.op_of.keys():
            return False
        pairs = ((block.inputs[i], block.outputs[o]) for i, o in self.graph.tied)
        return all((self.value_of[v], self.value_of[atom]) in tied for v, atom in pairs if isinstance(atom, int))


def _with_sections(graph: OpGraph, section_of: Callable[[Op], Section]) -> OpGraph:
    ops = tuple(replace(op, section=section_of(op)) for op in graph.block.ops)
    return dataclasses.replace(graph, block=replace(graph.block, ops=ops))


def _with_inner(op: Op) -> Iterable[Op]:
    yield op
    for block in op.blocks:
        yield from walk(block)


def _before_the_batch(graph: OpGraph) -> set[int]:
    """The operations outside of the backward pass that read no examples, and that what reads some needs."""
    examples = {graph.block.inputs[i] for i in graph.batch}
    for op in graph.block.ops:
        if op.kind is OpKind.BARRIER:
            examples.update(out for a, out in zip(op.inputs, op.outputs, strict=True) if a in examples)
        elif not examples.isdisjoint(read_by(op)):
            examples.update(op.outputs)
    before: set[int] = set()
    needed: set[int] = set()
    forward_role = graph.forward_role
    for op in reversed(graph.block.ops):
        if op.role is not Role.BACKWARD and op.kind is OpKind.EQUATION and examples.isdisjoint(op.outputs):
            if not needed.isdisjoint(op.outputs):
                before.add(op.id)
                needed.update(read_by(op))
        elif op.role is not Role.UPDATE or forward_role is Role.UPDATE:
            needed.update(read_by(op))
    return before


def _made_by(op: Op) -> tuple[int, ...]:
    """The results of an operation, and what its blocks are given."""
    return (*op.outputs, *(v for block in op.blocks for v in block.inputs))


def _read(op: Op) -> list[int]:
    return [a for inner in _with_inner(op) for a in inner.inputs if isinstance(a, int)]


def _same_kind(one: Op, other: Op) -> bool:
    return (one.kind, one.key or one.primitive, len(one.inputs)) == (
        other.kind, other.key or other.primitive, len(other.inputs),
    )  # fmt: skip


class GraphViews:
    """The graph of a step with its repeated layers folded, and with what its values and their dimensions are for.

    `flops(op)` is the arithmetic of one run of an equation.
    """

    def __init__(self, graph: OpGraph, flops: Callable[[Op], float]) -> None:
        self.graph, self._flops = graph, flops
        # With the block by whose id they are known, so that the id stays its own.
        self._partials: dict[int, tuple[Block, Partials]] = {}

    @property
    def partials(self) -> Partials:
        """Which values of the whole graph may stay partial sums."""
        return self.partials_of(self.graph)

    def partials_of(self, graph: OpGraph) -> Partials:
        """Which values may stay partial sums, of the whole graph or the folded one, annotated or not."""
        key = id(graph.block)
        if key not in self._partials:
            self._partials[key] = graph.block, find_partials(graph)
        return self._partials[key][1]

    @functools.cached_property
    def folded(self) -> FoldedStep | None:
        """The step with its repeated layers taken out; None where there are none to take out, or where sums could stay
        partial in one of both graphs only.
        """
        step = fold_step(self.graph, self._flops)
        if step is None or not same_partials(self.partials, self.partials_of(step.graph), step.op_of, step.value_of):
            return None
        return step

    @functools.cached_property
    def annotated_fold(self) -> FoldedStep | None:
        """`folded` with the semantics of its values."""
        step = self.folded
        return dataclasses.replace(step, graph=annotate_semantics(step.graph)) if step is not None else None

    @functools.cached_property
    def annotated(self) -> OpGraph:
        """The graph with the semantics of its values: those of dropped layers mean what their counterparts do."""
        step = self.annotated_fold
        if step is None:
            return annotate_semantics(self.graph)
        known = step.graph.values
        values = list(self.graph.values)
        for v, like in step.value_of.items():
            meant = known[like]
            values[v] = replace(values[v], dimensions=meant.dimensions, sides=meant.sides, purpose=meant.purpose)
        return dataclasses.replace(self.graph, values=tuple(values))
