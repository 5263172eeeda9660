"""A step in the layouts that its author gives to its arguments and results, as one program on the author's mesh.

Layouts of arguments and results bind. Of those in the code (`with_sharding_constraint`) each is kept where it can be.
All else lies as Shardy's propagation lays it, wherever it can be. Mesh axes that the author names nowhere split
nothing.

In propagation each operation hands on what splits its factors, from operands to results and back, until nothing
changes: first from its largest values, then products, last from values that are broadcast to larger ones. Where two
factors of an operation, or two of its values, want an axis, that of the larger value has it. Unlike in Shardy, an axis
is never cut into several, and no dimension is split that does not divide.
"""

from __future__ import annotations

import collections
import dataclasses
import heapq
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from msgspec.structs import replace

from autopar.common import jax_compat
from autopar.common.progress import Progress
from autopar.cost import peak_memory
from autopar.cost.cost_model import NodeCosts, cost_model
from autopar.cost.overlap import timed
from autopar.cost.roofline import flops_of
from autopar.errors import UnsupportedError
from autopar.ir.graph import Block, Dimension, FactorKind, Op, OpGraph, OpKind, Purpose
from autopar.ir.layout import LogicalMesh
from autopar.ir.partial_sums import Partials
from autopar.ir.pins import Pin, Pinned, Pins, PinsOnMesh, pins_in_code
from autopar.ir.semantics import pairs
from autopar.ir.traced_step import TracedStep
from autopar.lowering.host_copies import with_host_copies
from autopar.lowering.instructions import Instruction, Loop, LoweredBlock, Move
from autopar.lowering.lower import lower
from autopar.passes.fold_step import GraphViews
from autopar.plan.context import PlanningContext, StepGraphs
from autopar.plan.options import PlanRequest
from autopar.plan.plan import Plan, Trees
from autopar.recipes.walks import Problem
from autopar.search.intra_op.spmd_candidate import ProgramMemory, SpmdCandidate, TimedSharding, with_memory
from autopar.search.intra_op.spmd_search import search_mesh
from autopar.search.planner import planning_context
from autopar.search.step_ways import whole_graph
from autopar.search.write_plan import plan_of

Axes = tuple[str, ...]
Dims = tuple[Axes, ...]


def propagated(
    graph: OpGraph, axis_sizes: Mapping[str, int], given: Mapping[int, Sequence[Axes | None]]
) -> dict[int, Dims]:
    """The axes of each dimension of each value. `given`: of those that the author lays, by number; a dimension that is
    None is open, as are the values that are not given.
    """
    return _Propagation(graph, axis_sizes, given).run()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Turn:
    """An operation that hands on what splits its values of at least a size, or a link between two values."""

    rank: int
    op: Any = None
    least_size: int = 0
    link: tuple[int, int, int] | None = None


class _Propagation:
    def __init__(
        self, graph: OpGraph, axis_sizes: Mapping[str, int], given: Mapping[int, Sequence[Axes | None]]
    ) -> None:
        self.graph, self.sizes = graph, axis_sizes
        self.dims: dict[int, list[Axes]] = {value.id: [() for _ in value.shape] for value in graph.values}
        self.open: dict[int, list[bool]] = {}
        for v, dims in given.items():
            several = [tuple(a for a in axes or () if axis_sizes.get(a, 1) > 1) for axes in dims]
            self.dims[v] = [axes if self.divides(v, d, axes) else () for d, axes in enumerate(several)]
            self.open[v] = [axes is None for axes in dims]
        self.turns = [turn for op in _inner_first(graph.block) for turn in (*self.turns_of(op), *_links(op))]
        self.of_value: dict[int, list[int]] = defaultdict(list)
        for i, turn in enumerate(self.turns):
            for v in set(turn.link[:2]) if turn.link is not None else _values(turn.op):
                self.of_value[v].append(i)

    def turns_of(self, op: Op) -> Iterator[_Turn]:
        """From its largest values an operation hands on at once; from the others products do next, and last all that
        is added to something larger, or summed: it must not decide on that.
        """
        sizes = [self.graph.values[v].size for v in _values(op)]
        if op.rule is None or not sizes:
            return
        is_product = sum(isinstance(a, int) for a in op.inputs) > 1 and any(
            factor.kind is not FactorKind.PASS for factor in op.rule.factors
        )
        if is_product:
            yield _Turn(rank=1, op=op)
            return
        yield _Turn(rank=0, op=op, least_size=max(sizes))
        if min(sizes) < max(sizes):
            yield _Turn(rank=2, op=op)

    def run(self) -> dict[int, Dims]:
        waiting = [(turn.rank, i) for i, turn in enumerate(self.turns)]
        heapq.heapify(waiting)
        is_waiting = [True] * len(waiting)
        while waiting:
            _, i = heapq.heappop(waiting)
            is_waiting[i] = False
            turn = self.turns[i]
            changed = self.operation(turn.op, turn.least_size) if turn.link is None else list(self.link(*turn.link))
            for other in (other for v in changed for other in self.of_value[v]):
                if not is_waiting[other]:
                    is_waiting[other] = True
                    heapq.heappush(waiting, (self.turns[other].rank, other))
        return {v: tuple(dims) for v, dims in self.dims.items()}

    def divides(self, v: int, d: int, axes: Axes) -> bool:
        size = math.prod(self.sizes[a] for a in axes)
        return bool(self.graph.values[v].shape[d]) and self.graph.values[v].shape[d] % size == 0

    def extend(self, v: int, d: int, axes: Axes) -> bool:
        """Splits a dimension over more axes, where it is open, they are free and it divides."""
        now = self.dims[v][d]
        if len(axes) <= len(now) or axes[: len(now)] != now or not self.open.get(v, (True,) * (d + 1))[d]:
            return False
        used = {a for axes_of in self.dims[v] for a in axes_of}
        if used & set(axes[len(now) :]) or not self.divides(v, d, axes):
            return False
        self.dims[v][d] = axes
        return True

    def link(self, outer: int, inner: int, dropped: int) -> Iterator[int]:
        """A value around a loop or a branch, and inside of it."""
        for d in range(len(self.dims[inner])):
            if self.extend(inner, d, self.dims[outer][d + dropped]):
                yield inner
            if self.extend(outer, d + dropped, self.dims[inner][d]):
                yield outer

    def operation(self, op: Op, least_size: int) -> list[int]:
        """The values whose layouts change by what splits those of at least a size."""
        assert op.rule is not None, "it was looked for"
        factors, changed = op.rule.factors, []
        places = [
            (v, d, of_dim)
            for v, d, of_dim in op.rule.factored_dims((*op.inputs, *op.outputs))
            if isinstance(v, int) and not any(factors[f].kind is FactorKind.FIXED for f in of_dim)
        ]
        wanted: dict[int, tuple[int, Axes]] = {}  # by factor: the size of the value that wants it, and the axes
        for v, d, of_dim in places:
            weight = self.graph.values[v].size
            if weight < least_size:
                continue
            for f, axes in self.split(of_dim, [factors[f].size for f in of_dim], self.dims[v][d]):
                before = wanted.get(f, (0, ()))
                longer = axes[: len(before[1])] == before[1] and len(axes) > len(before[1])
                other = axes != before[1][: len(axes)]
                if longer or (other and weight > before[0]):
                    wanted[f] = max(weight, before[0]) if longer else weight, axes
        for f in sorted(wanted, key=lambda f: -wanted[f][0]):
            for v, d, of_dim in places:
                if f in of_dim:
                    sizes = [factors[g].size for g in of_dim]
                    axes = self.joined(of_dim, sizes, self.dims[v][d], f, wanted[f][1])
                    if self.extend(v, d, axes):
                        changed.append(v)
        return changed

    def split(self, of_dim: Sequence[int], sizes: Sequence[int], axes: Axes) -> Iterator[tuple[int, Axes]]:
        """The axes of each factor of a dimension, major first, as far as they fill one before the next begins."""
        rest = list(axes)
        for f, size in zip(of_dim, sizes, strict=True):
            mine: list[str] = []
            while rest and size % self.sizes[rest[0]] == 0:
                size //= self.sizes[rest[0]]
                mine.append(rest.pop(0))
            if mine:
                yield f, tuple(mine)
            if size > 1:
                return

    def joined(self, of_dim: Sequence[int], sizes: Sequence[int], axes: Axes, factor: int, of_factor: Axes) -> Axes:
        """The axes of a dimension of which one factor has others than now; as now where a factor before it is not
        filled.
        """
        now, found = dict(self.split(of_dim, sizes, axes)), list[str]()
        for f, size in zip(of_dim, sizes, strict=True):
            mine = of_factor if f == factor else now.get(f, ())
            found += mine
            if math.prod(self.sizes[a] for a in mine) < size:
                break
        return tuple(found)


def _inner_first(block: Block) -> Iterator[Op]:
    """The operations of a block, those inside of a loop before the loop."""
    for op in block.ops:
        for inner in op.blocks:
            yield from _inner_first(inner)
        yield op


def _links(op: Op) -> Iterator[_Turn]:
    """Barriers, slices and stacks of loops hand on at once, what loops carry and branches read as products do."""
    for outer, inner, dropped in pairs(op):
        if isinstance(outer, int) and isinstance(inner, int):
            is_first = dropped or op.kind is OpKind.BARRIER
            yield _Turn(rank=0 if is_first else 1, link=(outer, inner, dropped))


def _values(op: Op) -> set[int]:
    return {v for v in (*op.inputs, *op.outputs) if isinstance(v, int)}


# What stands in place of a line for a layout that the author did not write.
PROPAGATED = "propagation"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GivenLayouts:
    """The author's mesh (its axes of several devices, major first), and the layouts of argument and result leaves, by
    number. `keeps_code`: layouts in the code of the step count too; `examples`: the axes over which layers hand their
    examples on; `propagates`: all else lies as a partitioner lays it, in place of the search.
    """

    axes: tuple[tuple[str, int], ...]
    arguments: Mapping[int, Pin]
    results: Mapping[int, Pin]
    keeps_code: bool = True
    examples: tuple[str, ...] = ()
    propagates: bool = True

    def on(self, views: GraphViews, traced: TracedStep) -> PinsOnMesh:
        """The layouts as pins on the author's mesh."""
        graph, laid = views.graph, self.laid(views.graph)
        if self.examples:
            laid = handed_on(views.annotated, self.examples) | laid
        first = len(graph.constants)
        arguments = {graph.block.inputs[first + i]: pin for i, pin in self.arguments.items()}
        if self.propagates:
            given = {v: pin.dims for v, pin in (laid | arguments).items()}
            found = propagated(graph, dict(self.axes), given)
            alike: dict[Any, Pin] = {}
            spread = {v: alike.setdefault(dims, Pin(pattern=PROPAGATED, dims=dims)) for v, dims in found.items()}
            laid = spread | laid
        every = laid | arguments
        pins = Pins(pins=(), axis_sizes=self.axes, in_code=tuple(every.items()), closed=bool(every))
        pinned = Pinned(
            pins=pins, leaves={}, modules={}, paths=traced.in_paths, in_code=every, is_wish=True,
            bound=frozenset(arguments),
        )  # fmt: skip
        return PinsOnMesh(pinned=pinned, mesh=LogicalMesh(axis_sizes=self.sizes), names=self.names)

    def laid(self, graph: OpGraph) -> dict[int, Pin]:
        """The values of a graph, other than arguments, that the results and the code lay."""
        found = _results(graph, self.results)
        written = pins_in_code(graph, LogicalMesh(axis_sizes=self.sizes).num_devices, is_wish=True)
        if written is not None and self.keeps_code:
            found |= {
                v: Pin(pattern=pin.pattern, dims=_full(pin, len(graph.values[v].shape))) for v, pin in written.in_code
            }
        return found

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.axes) or ("x",)

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(n for _, n in self.axes) or (1,)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GivenPlan:
    """The program of a step in given layouts. `kept` of `named` values of the code and the results lie as given."""

    context: PlanningContext
    candidate: SpmdCandidate
    trees: Trees
    kept: int
    named: int

    @property
    def step_time_s(self) -> float:
        return self.candidate.step_time_s

    @property
    def peak_bytes(self) -> int:
        return self.candidate.peak_bytes

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= self.context.limit_bytes

    def plan(self) -> Plan:
        """As a plan, with the author's names of the mesh axes."""
        return plan_of(self.context, self.candidate, self.trees)


def plan_as_given(problem: Problem, given: GivenLayouts, request: PlanRequest) -> GivenPlan:
    """The step as it is written, in given layouts; where it does not fit, the smallest program that was found.

    Raises: InvalidArgumentError for layouts that the step cannot have; UnsupportedError; SolverError.
    """
    context = _one_program(problem, request)
    at = given.on(context.views, context.traced)
    model = cost_model(context.cluster, at.mesh)
    folds = _is_folded_alike(context, at)
    found = search_mesh(context, model, at, folds=folds, time_limit_s=context.deadline.solve_s())
    if not isinstance(found, SpmdCandidate):
        raise UnsupportedError(
            where=f"the layouts of {context.traced.name}",
            expected=f"a program in them on the mesh {dict(given.axes)}",
            got=found.why,
            hint="leave out layouts of results, or autopar.plan(step, ...) for the search's own",
        )
    layouts, lies = at.layouts(context.graph), found.sharding.reduced
    named = [v for v in given.laid(context.graph) if v in lies]
    kept = sum(v in layouts and layouts[v].allows(lies[v]) for v in named)
    return GivenPlan(context=context, candidate=found, trees=problem.trees, kept=kept, named=len(named))


def _one_program(problem: Problem, request: PlanRequest) -> PlanningContext:
    """The input of the search for a step as its author's program is: its update is not stacked, its sums are reduced
    where they are computed.
    """
    silent = Progress("", show=False)
    context = planning_context(problem.traced, problem.cluster, request, problem.rules, silent, graphs=problem.graphs)
    traced = dataclasses.replace(context.traced, stacked_over=0)
    graph = whole_graph(traced, problem.rules, problem.graphs).graph
    views = problem.graphs.of(traced, "sums reduced at once", lambda: _SumsAtOnce(graph, flops_of))
    return dataclasses.replace(context, traced=traced, views=views, graph=graph)


class _SumsAtOnce(GraphViews):
    """The views of a graph of which no sum stays partial: XLA reduces each where it is computed."""

    def partials_of(self, graph: OpGraph) -> Partials:
        return Partials(kept=frozenset(), operands={})


def handed_on(annotated: OpGraph, axes: tuple[str, ...]) -> dict[int, Pin]:
    """Of the activations that layers hand on, each with its examples split over these axes, and nothing else."""
    found: dict[int, Pin] = {}
    for value in annotated.values:
        counts = value.dimensions
        examples = [d for d, names in enumerate(counts) if Dimension.EXAMPLE in names]
        if value.purpose is Purpose.ACTIVATION and len(examples) == 1 and any(Dimension.FEATURE in n for n in counts):
            dims = tuple(axes if d == examples[0] else () for d in range(len(counts)))
            found[value.id] = Pin(pattern=PROPAGATED, dims=dims)
    return found


def _full(pin: Pin, rank: int) -> tuple[tuple[str, ...] | None, ...]:
    return (*pin.dims, *((),) * (rank - len(pin.dims)))


def _results(graph: OpGraph, results: Mapping[int, Pin]) -> dict[int, Pin]:
    outputs = graph.block.outputs
    found = ((outputs[leaf], pin) for leaf, pin in results.items())
    return {value: pin for value, pin in found if isinstance(value, int)}


def _is_folded_alike(context: PlanningContext, at: PinsOnMesh) -> bool:
    """Whether repeated layers are pinned alike, so that the decisions of a few hold for all."""
    step = context.views.folded
    if step is None:
        return False
    layouts = at.layouts(context.graph)
    dims: dict[int, set[Any]] = collections.defaultdict(set)
    for value, like in step.value_of.items():
        dims[like].add(layouts[value].dims if value in layouts else None)
    return all(len(found) == 1 for found in dims.values())


def _differ(given: Sequence[Any], written: Sequence[Any], sizes: Mapping[str, int]) -> bool:
    """Whether two layouts do, but for axes of one device and dimensions that one of them leaves open."""

    def axes(dim: Any) -> tuple[str, ...]:
        return tuple(axis for axis in dim if sizes.get(axis, 1) > 1)

    pairs = zip(given, written, strict=True)
    return any(a is not None and b is not None and axes(a) != axes(b) for a, b in pairs)


def laid_anew(problem: Problem, given: GivenLayouts) -> Problem:
    """The step with a copy of each argument that the code lays in another way than it comes in."""
    graph = whole_graph(problem.traced, problem.rules, problem.graphs).graph
    first = len(graph.constants)
    leaf_of = {value: leaf for leaf, value in enumerate(graph.block.inputs[first:])}
    differing = {
        leaf_of[value]
        for value, written in graph.written
        if value in leaf_of
        and leaf_of[value] in given.arguments
        and _differ(given.arguments[leaf_of[value]].dims, written.dims, dict(given.axes))
    }
    if not differing:
        return problem
    jaxpr = problem.traced.jaxpr
    copies, names = [], {}
    for leaf in sorted(differing):
        var = jaxpr.invars[leaf]
        copy = jax_compat.open_jaxpr(jax.make_jaxpr(lambda x: checkpoint_name(x, "laid anew"))(_struct(var))).eqns[0]
        copies.append(copy.replace(invars=[var]))
        names[id(var)] = copy.outvars[0]

    def renamed(atoms: Any) -> list[Any]:
        return [names.get(id(atom), atom) for atom in atoms]

    eqns = [*copies, *(eqn.replace(invars=renamed(eqn.invars)) for eqn in jaxpr.eqns)]
    jaxpr = jaxpr.replace(eqns=eqns, outvars=renamed(jaxpr.outvars))
    written = tuple((names.get(id(var), var), layout) for var, layout in problem.traced.written)
    traced = dataclasses.replace(problem.traced, jaxpr=jaxpr, written=written)
    return dataclasses.replace(problem, traced=traced, graphs=StepGraphs())


def _struct(var: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype)


# A plan by lines of the code: places of operations are names of lines, in letters, as tables star numbers.

_LINE = re.compile(r"\bline_[a-z]+\b")
_COLUMN, _FOLDER = re.compile(r"(:\d+):\d+ \("), re.compile(r"^.*/site-packages/")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ByLine:
    """A plan whose modules are lines of the step's code. `text` tells the line of such a name."""

    graph: OpGraph
    candidate: SpmdCandidate
    memory: ProgramMemory
    plan: Plan
    lines: Mapping[str, str]

    def text(self, text: str) -> str:
        """A text with the lines that it names."""
        return _LINE.sub(lambda name: _short(self.lines.get(name[0], name[0])), text)

    @property
    def peak_line(self) -> str:
        """The line that makes the last value before the memory is fullest."""
        program, compiler = self.memory.program, self.candidate.model.compiler
        course = self.memory.estimate.course
        peak_at = max(course, key=lambda at: at[1])[0] if course else 0
        makers = {v: op.module for op in self.graph.ops() for v in op.outputs}
        alive = (r for r in peak_memory.live_ranges(program, compiler) if r.start <= peak_at < r.stop)
        for r in sorted(alive, key=lambda r: -r.start):
            value = self.memory.stands_for.get(r.value)
            if value is not None and value[0] in makers:
                return self.text(makers[value[0]])
        return ""


def by_line(made: GivenPlan) -> ByLine:
    """The same program with the lines of the code in place of modules."""
    lines: dict[str, str] = {}
    graph = dataclasses.replace(made.context.graph, block=_block_by_line(made.context.graph.block, lines))
    model, sharding = made.candidate.model, made.candidate.sharding
    costs = NodeCosts(graph, model)
    lowered = with_host_copies(graph, lower(graph, sharding, model.links, costs.equations), sharding)
    lowered = _sums_at_makers(lowered, {v: op.module for op in graph.ops() for v in op.outputs})
    ran = timed(graph, lowered, model, costs)
    found = TimedSharding(sharding=sharding, lowered=lowered, ran=ran, costs=costs)
    candidate, memory = with_memory(graph, model, found)
    candidate = dataclasses.replace(candidate, pins=made.candidate.pins)
    plan = plan_of(dataclasses.replace(made.context, graph=graph), candidate, made.trees)
    return ByLine(
        graph=graph, candidate=candidate, memory=memory, plan=plan, lines={name: text for text, name in lines.items()}
    )


def _sums_at_makers(lowered: LoweredBlock, makers: Mapping[int, str]) -> LoweredBlock:
    """The block with reductions told at the operations that leave the partial sums, not at those that read the sums."""

    def told(instruction: Instruction) -> Instruction:
        if isinstance(instruction, Loop):
            blocks = tuple(_sums_at_makers(block, makers) for block in instruction.blocks)
            return replace(instruction, blocks=blocks)
        if isinstance(instruction, Move) and any(step.before.partial for step in instruction.steps):
            return replace(instruction, module=makers.get(instruction.value, instruction.module))
        return instruction

    return dataclasses.replace(lowered, instructions=tuple(map(told, lowered.instructions)))


def _short(line: str) -> str:
    """A line without its column, and without the working directory or the folder of installed packages."""
    return _COLUMN.sub(r"\1 (", _FOLDER.sub("", line).removeprefix(f"{Path.cwd()}/"))


def _block_by_line(block: Block, lines: dict[str, str]) -> Block:
    def named(op: Op) -> Op:
        line = jax_compat.source_line(op.eqn) if op.eqn is not None else ""
        name = lines.setdefault(line or op.place or "(no line)", f"line_{_letters(len(lines))}")
        blocks = tuple(_block_by_line(inner, lines) for inner in op.blocks)
        return replace(op, module=name, parameters="", blocks=blocks)

    return replace(block, ops=tuple(map(named, block.ops)))


def _letters(number: int) -> str:
    """0 is a, 25 z, 26 ba."""
    digits: list[str] = []
    while number or not digits:
        number, digit = divmod(number, 26)
        digits.append(chr(ord("a") + digit))
    return "".join(reversed(digits))
