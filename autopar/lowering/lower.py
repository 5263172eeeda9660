"""From decisions to instructions: the operands of each operation and every resharding step, in program order.

The same instructions are executed (`emit`), counted (`prediction`) and measured for memory, so that what is predicted
is what runs. `ShardingPlan` has the decisions for one graph on one mesh: a search writes it. Equations are kept as they
were lowered last: the candidates of one step on one mesh differ in few of them.
"""

from __future__ import annotations

import dataclasses
from collections import ChainMap

import numpy as np

from autopar.frontend.callbacks import is_callback
from autopar.ir.graph import ALL, REDUCED, UNREDUCED, Atom, Block, Op, OpGraph, OpKind, Role, Section
from autopar.ir.layout import Layout, LogicalMesh, replicated
from autopar.ir.partial_sums import Partials
from autopar.ir.resharding import MeshLinks, ReshardStep, StepKind, fits, gather_and_slice, paths_by_size
from autopar.ir.strategies import Strategy
from autopar.lowering.collective_matmul import with_collective_matmuls
from autopar.lowering.instructions import (
    Accumulate,
    Compute,
    Instruction,
    Leave,
    Loop,
    LoweredBlock,
    Move,
    Pass,
    Place,
    Split,
    Stack,
)
from autopar.ops.kernels.local import leaves_summands


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SolverReport:
    """What the solver says of its answer. `nodes` before and `classes` after folding."""

    status: str
    objective_s: float
    bound_s: float
    gap: float
    nodes: int
    classes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Relaxation:
    """What was given up: for a node the strategies that are left, the numbers of reshards whose ways are all open, and
    for notes the values (with the number of the axis) that are computed whole, or cut where they should not be.
    """

    nodes: dict[int, np.ndarray]
    edges: frozenset[int]
    whole: tuple[tuple[int, int], ...] = ()
    cut: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ShardingPlan:
    """The decisions for one graph on one mesh.

    `strategy[op.id]` of every operation that has a choice (the others are replicated); `unreduced`, `reduced` and
    `copies` are layouts of values as in `ChoiceGraph`; a value that is in none of them is replicated.
    `transfer_layouts[op.id]` is the layout in which a value leaves for another stage. Arguments that are `in_host` lie
    in the memory of the host between steps; values that are `saved_in_host` are there between the forward and the
    backward pass. `relaxation` is what was given up of constraints.
    """

    mesh: LogicalMesh
    strategy: dict[int, Strategy]
    partials: Partials
    unreduced: dict[int, Layout]
    reduced: dict[int, Layout]
    copies: dict[tuple[int, str], Layout]
    report: SolverReport
    transfer_layouts: dict[int, Layout] = dataclasses.field(default_factory=dict)
    in_host: frozenset[int] = frozenset()
    saved_in_host: frozenset[int] = frozenset()
    overlapped_axes: tuple[int, ...] = ()
    relaxation: Relaxation | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class LoweredEquation:
    """The last instruction of an equation, and the decisions that it was made of: those for the `values` that it reads
    and makes. `moves`: whether an operand had to be brought to another place for it.
    """

    compute: Compute
    values: tuple[int, ...]
    unreduced: tuple[Layout | None, ...]
    reduced: tuple[Layout | None, ...]
    moves: bool

    def is_of(self, op: Op, plan: ShardingPlan) -> bool:
        """Whether a plan decides the same for the equation and its values, copies apart."""
        return (
            self.compute.op is op
            and self.compute.strategy is plan.strategy.get(op.id)
            and self.unreduced == tuple(map(plan.unreduced.get, self.values))
            and self.reduced == tuple(map(plan.reduced.get, self.values))
        )


class LoweredEquations:
    """The last instruction of each equation, for programs of one graph on one mesh, and of the same graph with other
    counts of its operations.

    An instruction that is taken again also keeps what was worked out of it: its keys, and its work on the streams.
    """

    def __init__(self) -> None:
        self._last: dict[tuple[int, float], LoweredEquation] = {}

    def last(self, op: Op, plan: ShardingPlan) -> LoweredEquation | None:
        """The equation as it was lowered last, if a plan decides the same for it."""
        last = self._last.get((op.id, op.count))
        return last if last is not None and last.is_of(op, plan) else None

    def keep(self, compute: Compute, plan: ShardingPlan) -> None:
        """Takes an instruction as the last one of its equation."""
        op = compute.op
        values = tuple([a for a in (*op.inputs, *op.outputs) if isinstance(a, int)])
        unreduced, reduced = tuple(map(plan.unreduced.get, values)), tuple(map(plan.reduced.get, values))
        moves = any(place is not None and place[1] != UNREDUCED for place in compute.reads)
        self._last[op.id, op.count] = LoweredEquation(compute, values, unreduced, reduced, moves)


def lower(
    graph: OpGraph, plan: ShardingPlan, links: MeshLinks, equations: LoweredEquations | None = None
) -> LoweredBlock:
    """Instructions of the whole step. `equations`: those of other programs of the graph on the mesh, taken again where
    they do not differ.
    """
    lowered = _Lowering(graph, plan, links, equations or LoweredEquations()).top()
    return with_collective_matmuls(lowered, plan.overlapped_axes) if plan.overlapped_axes else lowered


class _Scope:
    """The places in which values lie at a point of the program. Inner scopes see outer ones.

    Instructions are kept by the section in which they run; a scope inside of a loop has one section only. `once` are
    the values that all micro-batches share.
    """

    def __init__(
        self,
        once: frozenset[int] = frozenset(),
        places: ChainMap[int, dict[Place, Section]] | None = None,
        section: Section = Section.WHOLE,
    ) -> None:
        self.once, self.section = once, section
        self.is_inner = places is not None
        self.places: ChainMap[int, dict[Place, Section]] = places if places is not None else ChainMap()
        self.by_section: dict[Section, list[Instruction]] = {section: [] for section in Section}

    def inner(self, section: Section) -> _Scope:
        return _Scope(self.once, self.places.new_child(), section)

    @property
    def instructions(self) -> tuple[Instruction, ...]:
        return tuple(i for section in Section for i in self.by_section[section])

    def append(self, instruction: Instruction, section: Section) -> None:
        self.by_section[section].append(instruction)

    def has(self, value: int, place: Place, section: Section) -> bool:
        return any(place in m.get(value, {}) and self.sees(value, m[value][place], section) for m in self.places.maps)

    def sees(self, value: int, made: Section, section: Section) -> bool:
        """Whether what was made in one section can be read in another. What no micro-batch changes is moved anew in
        each section rather than kept for every micro-batch."""
        if made is section or made in (Section.WHOLE, Section.BEFORE):
            return True
        return made.repeats and section.repeats and value not in self.once

    def add(self, value: int, place: Place, section: Section) -> None:
        self.places.maps[0].setdefault(value, {})[place] = section

    def made_in(self, value: int) -> Section:
        """The section whose operation makes a value."""
        return next(iter(next(m[value] for m in self.places.maps if value in m).values()))

    def moved_before(self, value: int, layout: Layout) -> bool:
        return any(place[0] == layout for m in self.places.maps for place in m.get(value, {}))


class _Lowering:
    def __init__(self, graph: OpGraph, plan: ShardingPlan, links: MeshLinks, equations: LoweredEquations) -> None:
        self.graph, self.plan, self.links, self.equations = graph, plan, links, equations
        self.mesh: LogicalMesh = plan.mesh

    def top(self) -> LoweredBlock:
        block = self.graph.block
        scope = _Scope(self.graph.once() if self.graph.is_cut else frozenset())
        repeating = {v for i, v in enumerate(block.inputs) if i in self.graph.repeating}
        inputs = tuple(self.enter(scope, v, Section.FORWARD if v in repeating else Section.WHOLE) for v in block.inputs)
        self.block(scope, block)
        tied = {target: block.inputs[source] for source, target in self.graph.tied}
        scope.section = Section.AFTER if self.graph.is_cut else Section.WHOLE
        outputs: list[Place | None] = []
        for position, (atom, count) in enumerate(zip(block.outputs, self.graph.result_counts(), strict=True)):
            want = self.home(tied[position]) if position in tied else None
            if want is None and isinstance(atom, int) and self.graph.values[atom].rounded:
                want = replicated(self.rank(atom))  # a program's results divide
            outputs.append(self.read(scope, atom, want, Role.UPDATE, "", count))
        return LoweredBlock(block=block, inputs=inputs, instructions=scope.instructions, outputs=tuple(outputs))

    def rank(self, value: int) -> int:
        return len(self.graph.values[value].shape)

    def home(self, value: int) -> Layout:
        """Where a value lies as its operation, or the block it enters, leaves it."""
        return self.plan.unreduced.get(value) or replicated(self.rank(value))

    def enter(self, scope: _Scope, value: int, section: Section) -> Layout:
        layout = self.home(value)
        scope.add(value, (layout, UNREDUCED), section)
        return layout

    # Reading

    def read(
        self,
        scope: _Scope,
        atom: Atom,
        want: Layout | None,
        role: Role,
        module: str,
        count: float,
        unreduced: bool = False,
    ) -> Place | None:
        """Brings a value to a layout (None: wherever it is whole) and says where it lies then; None for a literal."""
        if not isinstance(atom, int):
            return None
        home = self.home(atom)
        at: Place = (home, UNREDUCED)
        reduced = self.plan.reduced.get(atom, home)
        if unreduced and want != reduced:
            return self.move(scope, atom, at, (want or home, role.value), role, module, count)
        at = self.move(scope, atom, at, (reduced, REDUCED), role, module, count)
        if want is None or want == reduced:
            return at
        if all(step.kind is StepKind.SLICE for step in self.steps(atom, reduced, want)):
            return self.move(scope, atom, at, (want, role.value), role, module, count)
        for shared in (ALL, role.value):
            copy = self.plan.copies.get((atom, shared))
            if copy is not None:
                at = self.move(scope, atom, at, (copy, shared), role, module, count)
        return self.move(scope, atom, at, (want, role.value), role, module, count)

    def steps(self, value: int, source: Layout, target: Layout) -> tuple[ReshardStep, ...]:
        v = self.graph.values[value]
        shape = v.split_shape
        steps = paths_by_size(len(shape), self.links).steps(source, target, v.nbytes)
        return steps if fits(steps, shape, self.mesh) else gather_and_slice(source, target)

    def move(
        self, scope: _Scope, value: int, source: Place, target: Place, role: Role, module: str, count: float
    ) -> Place:
        if source[0] == target[0]:
            return source
        section = scope.section
        if value in scope.once and section.repeats and target[1] in (ALL, REDUCED) and not scope.is_inner:
            # What no micro-batch changes and all read alike is moved once.
            section, count = Section.BEFORE, count / self.graph.num_microbatches
        if not scope.has(value, target, section):
            move = Move(
                value=value,
                source=source,
                target=target,
                steps=self.steps(value, source[0], target[0]),
                count=count,
                module=module,
                role=role,
                apart=scope.moved_before(value, target[0]),
                section=section,
            )
            scope.append(move, section)
            scope.add(value, target, section)
        return target

    # Operations

    def block(self, scope: _Scope, block: Block) -> None:
        for op in block.ops:
            if not scope.is_inner:
                scope.section = op.section
            if op.kind is OpKind.EQUATION:
                self.equation(scope, op)
            elif op.kind is OpKind.BARRIER:
                self.barrier(scope, op)
            elif op.kind in (OpKind.SCAN, OpKind.WHILE, OpKind.COND):
                self.loop(scope, op)
            else:
                self.crossing(scope, op)

    def crossing(self, scope: _Scope, op: Op) -> None:
        """A value enters or leaves the loop over micro-batches, or the stage."""
        (atom,) = op.inputs
        if op.kind is OpKind.SPLIT:
            (target,) = op.outputs
            place = self.read(scope, atom, self.home(target), op.role, op.place, op.count)
            scope.append(Split(op=op, read=place, result=self.home(target)), op.section)
            scope.add(target, (self.home(target), UNREDUCED), Section.FORWARD)
        elif op.kind is OpKind.ACCUMULATE:
            (target,) = op.outputs
            home = self.home(target)
            unreduced = self.plan.partials.reads_unreduced(op, 0)
            place = self.read(scope, atom, home, op.role, op.place, op.count, unreduced)
            scope.append(Accumulate(op=op, read=place, sum_=(home, UNREDUCED)), op.section)
            scope.add(target, (home, UNREDUCED), Section.AFTER)
        elif op.kind is OpKind.STACK:
            (target,) = op.outputs
            scope.section = scope.made_in(atom) if isinstance(atom, int) else op.section
            place = self.read(scope, atom, self.home(target), op.role, op.place, op.count)
            scope.append(Stack(op=op, read=place, result=self.home(target)), op.section)
            scope.add(target, (self.home(target), UNREDUCED), op.section)
        else:
            place = self.read(scope, atom, self.plan.transfer_layouts[op.id], op.role, op.place, op.count)
            scope.append(Leave(op=op, read=place), op.section)

    def equation(self, scope: _Scope, op: Op) -> None:
        last = self.equations.last(op, self.plan)
        if last is not None and not last.moves:
            compute = last.compute
        else:
            reads = self.operands(scope, op)
            if last is not None and last.compute.reads == reads:
                compute = last.compute
            else:
                compute = self.compute(op, reads)
                self.equations.keep(compute, self.plan)
        scope.append(compute, scope.section)
        for value, place in zip(op.outputs, compute.places, strict=True):
            scope.add(value, place, scope.section)

    def operands(self, scope: _Scope, op: Op) -> tuple[Place | None, ...]:
        """Brings the operands of an equation to where its strategy reads them."""
        strategy = self.plan.strategy.get(op.id)
        unreduced_operands = self.plan.partials.unreduced_operands(op)
        left, reduced_at = self.plan.unreduced, self.plan.reduced
        reads: list[Place | None] = []
        for i, atom in enumerate(op.inputs):
            if not isinstance(atom, int):
                reads.append(None)
                continue
            want = strategy.operands[i] if strategy is not None else replicated(self.rank(atom))
            home = left.get(atom)
            if home is not None and home == want and reduced_at.get(atom, home) == home:
                reads.append((home, UNREDUCED))  # as `read` finds too, of most operands
                continue
            reads.append(self.read(scope, atom, want, op.role, op.place, op.count, i in unreduced_operands))
        return tuple(reads)

    def compute(self, op: Op, reads: tuple[Place | None, ...]) -> Compute:
        """The instruction of an equation that reads its operands in these places."""
        strategy, results = self.plan.strategy.get(op.id), tuple(self.home(v) for v in op.outputs)
        reduced: tuple[int, ...] = strategy.combined if strategy is not None else ()
        if is_callback(op.eqn):  # the first device hands its results on to all others
            reduced = tuple(a for a, n in enumerate(self.mesh.axis_sizes) if n > 1)
        sums = strategy is not None and any(
            result.partial for result in strategy.results if not any(o.partial for o in strategy.operands)
        )
        written_out = sums and leaves_summands(op.eqn)  # each device's summand is what it makes
        if sums and not written_out:
            (value,) = op.outputs
            (partial,) = results
            target = self.plan.reduced.get(value, partial)
            # A sum that is wanted whole where it is made is left to the partitioner, which all-reduces it in place,
            # once for each dimension that is summed over.
            in_place = target == partial.reduced and len(self.steps(value, partial, target)) == 1
            in_place = in_place and sums_over_one_dimension(strategy, partial.partial)
            written_out = value in self.plan.partials.kept or not in_place
            if not written_out:
                reduced, results = partial.partial, (partial.reduced,)
        return Compute(op=op, reads=reads, results=results, strategy=strategy, written_out=written_out, reduced=reduced)

    def barrier(self, scope: _Scope, op: Op) -> None:
        reads = []
        for source, target in zip(op.inputs, op.outputs, strict=True):
            assert isinstance(source, int), "a barrier passes values only"
            # Decided alike, but where layers are decided as their counterparts are, which read what others made.
            place = self.read(scope, source, self.home(target), op.role, op.place, op.count)
            assert place is not None, "a value lies somewhere"
            reads.append(place)
            scope.add(target, (place[0], UNREDUCED), scope.section)
        scope.append(Pass(op=op, reads=tuple(reads)), scope.section)

    def loop(self, scope: _Scope, op: Op) -> None:
        wants, blocks = self.entries(op), []
        reads = tuple(
            self.read(scope, atom, want, op.role, op.place, op.count)
            for atom, want in zip(op.inputs, wants, strict=True)
        )
        results = tuple(self.home(v) for v in op.outputs)
        for index, block in enumerate(op.blocks):
            inner = scope.inner(scope.section)
            inputs = tuple(self.enter(inner, v, scope.section) for v in block.inputs)
            self.block(inner, block)
            outputs = tuple(
                self.read(inner, atom, want, op.role, op.place, op.count * op.trips, unreduced)
                for atom, (want, unreduced) in zip(block.outputs, self.exits(op, index), strict=True)
            )
            blocks.append(LoweredBlock(block=block, inputs=inputs, instructions=inner.instructions, outputs=outputs))
        scope.append(Loop(op=op, reads=reads, blocks=tuple(blocks), results=results), scope.section)
        for value, layout in zip(op.outputs, results, strict=True):
            scope.add(value, (layout, UNREDUCED), scope.section)

    def entries(self, op: Op) -> list[Layout | None]:
        """The layouts in which a loop takes its inputs."""
        if op.kind is OpKind.SCAN:
            (body,) = op.blocks
            whole = op.num_consts + op.num_carry
            homes = [self.home(v) for v in body.inputs]
            return [*homes[:whole], *(Layout(((), *layout.dims)) for layout in homes[whole:])]
        if op.kind is OpKind.WHILE:
            condition, body = op.blocks
            k = op.num_condition_consts
            return [self.home(v) for v in (*condition.inputs[:k], *body.inputs)]
        return [replicated(0), *(self.home(v) for v in op.blocks[0].inputs)]

    def exits(self, op: Op, index: int) -> list[tuple[Layout, bool]]:
        """The layouts in which a block must leave its outputs, and whether they may be partial."""
        kept = self.plan.partials.kept
        if op.kind is OpKind.WHILE and index == 0:
            (goes_on,) = op.blocks[0].outputs  # of a loop under `vmap`, one for each example
            return [(replicated(len(self.graph.values[goes_on].shape) if isinstance(goes_on, int) else 0), False)]
        if op.kind in (OpKind.SCAN, OpKind.WHILE):
            body = op.blocks[-1]
            first = len(body.inputs) - len(op.outputs) if op.kind is OpKind.WHILE else op.num_consts
            carried = body.inputs[first : first + op.num_carry]
            stacked = [(v, self.home(v)) for v in op.outputs[op.num_carry :]]
            slices = ((Layout(home.dims[1:], home.partial), v in kept) for v, home in stacked)
            return [*((self.home(v), v in kept) for v in carried), *slices]
        return [(self.home(v), False) for v in op.outputs]


def sums_over_one_dimension(strategy: Strategy | None, axes: tuple[int, ...]) -> bool:
    """Whether each operand that the axes split has all of them in one dimension."""
    assert strategy is not None, "a replicated operation sums nothing"
    dims = [set(dim).intersection(axes) for layout in strategy.operands for dim in layout.dims]
    return all(not on or len(on) == len(axes) for on in dims)
