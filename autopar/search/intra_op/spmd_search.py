"""Source of candidates: one SPMD program over all devices, by an integer program on each logical mesh."""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from autopar.common.text import text_of_limit, text_of_s
from autopar.cost.cost_model import EXPOSED_FRACTION, CostModel, NodeCosts
from autopar.hardware.cluster import Cluster
from autopar.ir.graph import OpGraph
from autopar.ir.layout import LogicalMesh, factorisations, orderings
from autopar.ir.pins import PinsOnMesh, on_meshes
from autopar.passes.fold_step import ONE_EACH, FoldedStep
from autopar.plan.context import PlanningContext, Rejection
from autopar.plan.options import AS_FAST, NEARLY_EQUAL, WORTHWHILE, Effort
from autopar.search.intra_op.build_choice_graph import tables_of
from autopar.search.intra_op.formulation import SMALL, whole_nodes
from autopar.search.intra_op.ilp import GivenLayouts, IntraOp
from autopar.search.intra_op.memory_prices import MemoryPrices, search_price
from autopar.search.intra_op.slack import ALL_EXPOSED, Exposure, with_overlapped_axes
from autopar.search.intra_op.spmd_candidate import (
    ProgramMemory,
    SpmdCandidate,
    TimedSharding,
    over_limit_values,
    timed_sharding,
    unfold,
    with_memory,
)
from autopar.solver import Solution, Status

# Which logical meshes are tried, and from which step time on a program on one is of no use.


# The logical meshes on which one SPMD program is planned.


def logical_meshes(context: PlanningContext) -> list[tuple[LogicalMesh, PinsOnMesh | None]]:
    """The meshes that the request names, else the distinct ones of the cluster; each with the pins on it.

    Raises: InvalidArgumentError for pins that name nothing, or that hold on no mesh.
    """
    request, cluster, graph = context.request, context.cluster, context.graph
    if request.pins is not None:
        resolved = request.pins.found(context.traced, graph)
        return [(at.mesh, at) for at in on_meshes(resolved, cluster, request.max_mesh_axes, request.binding, graph)]
    if request.binding is not None:
        return [(request.binding.on(cluster.num_devices)[0], None)]
    if request.axis_sizes is not None:
        return [(LogicalMesh(axis_sizes=request.axis_sizes), None)]
    most_axes = min(request.max_mesh_axes, 2) if request.effort is Effort.QUICK else request.max_mesh_axes
    return [(mesh, None) for mesh in distinct_meshes(cluster, most_axes)]


def distinct_meshes(cluster: Cluster, max_axes: int) -> tuple[LogicalMesh, ...]:
    """The factorisations of the device count; of axes on different links every order."""
    meshes: dict[LogicalMesh, None] = {}
    for mesh in factorisations(cluster.num_devices, max_axes):
        if not cluster.has_links_for(len(mesh.axis_sizes)):
            continue
        for ordered in orderings(mesh):
            if len(set(cluster.axis_links(ordered.axis_sizes))) > 1 or ordered == mesh:
                meshes[ordered] = None
    return tuple(meshes)


SOURCE = "logical meshes"


def rejected(mesh: LogicalMesh, why: str) -> Rejection:
    return Rejection(source=SOURCE, text=f"mesh {mesh}", why=why, axis_sizes=mesh.axis_sizes)


def not_tried(mesh: LogicalMesh, why: str) -> Rejection:
    return rejected(mesh, f"not tried: {why}")


def worth_trying(mesh: LogicalMesh, context: PlanningContext) -> bool:
    """Whether a mesh of three axes may pay: one that splits an axis of the best mesh of two axes, where that gained
    more than next to nothing over one.

    The search on three axes costs more than all others together. Where no plan fits yet, every mesh is tried.
    """
    num_axes = len(mesh.axis_sizes)
    if num_axes < 3 or context.request.effort is Effort.THOROUGH:
        return True
    times_s: dict[int, float] = {}
    on_one_less: list[SpmdCandidate] = []
    for outcome in context.results:
        if isinstance(outcome, SpmdCandidate) and outcome.peak_bytes <= context.limit_bytes:
            axes, time_s = len(outcome.model.links.mesh.axis_sizes), outcome.step_time_s
            on_one_less += [outcome] if axes == num_axes - 1 else []
        elif isinstance(outcome, Rejection) and outcome.least_s is not None:
            axes, time_s = len(outcome.axis_sizes), outcome.least_s
        else:
            continue
        times_s[axes] = min(times_s.get(axes, math.inf), time_s)
    one_axis_less_s, most_axes_s = times_s.get(num_axes - 2, math.inf), times_s.get(num_axes - 1, math.inf)
    if math.isinf(one_axis_less_s) or math.isinf(most_axes_s):
        return True
    best = min(on_one_less, key=lambda c: c.step_time_s, default=None)
    splits = best is None or context.keep_tolerance > 1 or _splits_an_axis(mesh, best.model.links.mesh, context.cluster)
    return most_axes_s < one_axis_less_s * (1 - WORTHWHILE) and splits


def _splits_an_axis(mesh: LogicalMesh, of: LogicalMesh, cluster: Cluster) -> bool:
    """Whether a mesh is another with one axis split in two: neighbouring ones, or where all axes are on the same links
    any two.
    """
    sizes, wanted = mesh.axis_sizes, of.axis_sizes
    if len(set(cluster.axis_links(sizes))) > 1:
        joined = [(*sizes[:i], sizes[i] * sizes[i + 1], *sizes[i + 2 :]) for i in range(len(sizes) - 1)]
        return wanted in joined
    pairs = itertools.combinations(range(len(sizes)), 2)
    joined = [(sizes[i] * sizes[j], *(n for k, n in enumerate(sizes) if k not in (i, j))) for i, j in pairs]
    return sorted(wanted) in map(sorted, joined)


def fastest_fitting(context: PlanningContext) -> SpmdCandidate | None:
    """The fastest program so far that fits."""
    fitting = (c for c in context.candidates if isinstance(c, SpmdCandidate) and c.peak_bytes <= context.limit_bytes)
    return min(fitting, key=lambda c: c.step_time_s, default=None)


def longest_s(context: PlanningContext, num_axes: int) -> float:
    """Step time from which on a program on so many mesh axes is neither the plan nor wanted beside it: of nearly equal
    ones that on the fewest axes is taken. Infinite as long as none fits.
    """
    best = fastest_fitting(context)
    if best is None:
        return math.inf
    if context.keep_tolerance > 1:
        return best.step_time_s * max(1 + NEARLY_EQUAL, context.keep_tolerance)
    has_more_axes = num_axes > len(best.sharding.mesh.axis_sizes)
    return best.step_time_s / (1 + NEARLY_EQUAL) if has_more_axes else best.step_time_s * (1 + NEARLY_EQUAL)


def extra_s_of(context: PlanningContext) -> float:
    """What the objective has beyond the step's time (the batch read in, layouts that two readers share), taken to be on
    every mesh what it is for the fastest program that fits.
    """
    best = fastest_fitting(context)
    return max(0.0, best.sharding.report.objective_s - best.step_time_s) if best is not None else 0.0


def slower(context: PlanningContext, model: CostModel, least_s: float, step_time_s: float | None = None) -> Rejection:
    """Of what takes longer than a candidate that fits, before its memory is computed, or its time (None)."""
    extra_s = least_s - context.fastest_s
    if extra_s <= 0:
        why = f"as fast to {NEARLY_EQUAL:.3%}, on a mesh of more axes"
    elif extra_s <= AS_FAST * context.fastest_s:
        why = "as fast" if step_time_s is not None else "a bound says that it is no faster"
    elif step_time_s is None:
        why = f"a bound says that it is slower by about {text_of_s(extra_s)} or more"
    else:
        why = f"slower by {text_of_s(extra_s)}"
    return Rejection(
        source=SOURCE,
        text=f"mesh {model.links.mesh}",
        why=why,
        axis_sizes=model.links.mesh.axis_sizes,
        step_time_s=step_time_s,
        least_s=least_s,
    )


def hides(context: PlanningContext, model: CostModel) -> bool:
    """Whether the program of a mesh is solved under other exposures too. A recipe means the plan that its source
    describes, which does not count on what is hidden.
    """
    request = context.request
    several = bool(model.overlap.kinds) and request.binding is None and model.links.mesh.num_devices > 1
    return several and request.effort is not Effort.QUICK


def _gains_little(
    context: PlanningContext, intra_op: IntraOp, solved: dict[Exposure, Solution], time_limit_s: float
) -> bool:
    """Whether the integer program of a mesh of three axes, with what can hide hidden, has an optimum that is hardly
    less than that of the fastest program so far, where one fits. Adds the solution to those that are known.
    """
    best, num_axes = fastest_fitting(context), len(intra_op.model.links.mesh.axis_sizes)
    wants_all = context.keep_tolerance > 1 or context.request.effort is Effort.THOROUGH
    if best is None or num_axes < 3 or wants_all or not hides(context, intra_op.model):
        return False
    known = [c for c in context.candidates if isinstance(c, SpmdCandidate) and c.hidden_s is not None]
    fitting = [c for c in known if c.peak_bytes <= context.limit_bytes]
    of = min(fitting, key=lambda c: c.step_time_s, default=None)
    if of is None or of.hidden_s is None or (best is not of and best.source == SOURCE):  # the best is slower to fit
        return False
    wanted_s = (1 - WORTHWHILE) * of.hidden_s * best.step_time_s / of.step_time_s
    solved[HIDDEN] = intra_op.solve(time_limit_s=time_limit_s, exposure=HIDDEN, cutoff_s=wanted_s)
    return solved[HIDDEN].bound >= wanted_s


HIDDEN = Exposure(EXPOSED_FRACTION)
IMPOSSIBLE = "impossible"  # what is said of a mesh on which constraints leave nothing
LONG_STEP = 5_000  # operations; whatever is done to a longer step takes long


def search_mesh(
    context: PlanningContext,
    model: CostModel,
    pins: PinsOnMesh | None = None,
    *,
    folds: bool = False,
    time_limit_s: float,
    may_fit: bool = True,
) -> SpmdCandidate | Rejection:
    """The fastest plan on one mesh that fits into the memory, else the smallest plan that was found.

    The ILP is solved without memory first. Its objective adds up computation and communication, an upper bound of the
    time with overlap by which plans are compared. On platforms with overlap, and without a recipe, the ILP is re-solved
    with a part of the communication that computation can hide (`slack`, `EXPOSED_FRACTION`), and the search continues
    from the fastest plan. Where the exact peak of that plan is over the limit, bytes get a price
    (`MeshSearch.leaner`), unless a plan on another mesh fits and is as fast, or none `may_fit`. The whole search takes
    at most `time_limit_s`, except for its last solution.

    With `folds`, of repeated layers three or four are searched for (`passes.fold_step`), and what is found is evaluated
    on the whole step.

    Returns a rejection when the time limit passed without any plan, and for what cannot be the plan beside another
    candidate that fits (`longest_s`).
    """
    search = begin_on_mesh(context, model, pins, folds=folds, time_limit_s=time_limit_s)
    return search if isinstance(search, Rejection) else search.outcome(may_fit=may_fit)


def begin_on_mesh(
    context: PlanningContext,
    model: CostModel,
    pins: PinsOnMesh | None = None,
    *,
    folds: bool,
    time_limit_s: float,
) -> MeshSearch | Rejection:
    """The search on one mesh with its integer program solved and nothing evaluated on the whole step, or why there is
    none.
    """
    until_s = time.perf_counter() + time_limit_s
    mesh = model.links.mesh
    intra_op, step = _problem(context, model, pins, folds=folds)
    slow_s = longest_s(context, len(mesh.axis_sizes))
    solved: dict[Exposure, Solution] = {}
    if _gains_little(context, intra_op, solved, time_limit_s):
        return rejected(mesh, f"its integer program, with what can hide hidden, gains less than {WORTHWHILE:.0%}")
    left_s = max(until_s - time.perf_counter(), 1.0)
    cutoff_s = math.inf if model.overlap.kinds else slow_s + extra_s_of(context)
    free = intra_op.solve(time_limit_s=left_s, cutoff_s=cutoff_s)
    if free.status not in (Status.OPTIMAL, Status.FEASIBLE):
        why = IMPOSSIBLE if free.status is Status.INFEASIBLE else f"no plan {text_of_limit(time_limit_s)}"
        return rejected(mesh, why)
    return MeshSearch(
        context=context,
        intra_op=intra_op,
        step=step,
        costs=intra_op.costs if step is None else tables_of(context, context.graph, model).costs,
        free=free,
        solved=solved,
        bounds=[],
        pins=pins,
        until_s=until_s,
    )


def _problem(
    context: PlanningContext, model: CostModel, pins: PinsOnMesh | None, *, folds: bool
) -> tuple[IntraOp, FoldedStep | None]:
    """The integer program of one mesh, and the step with its layers folded where it is that one's.

    Problems so small that they are solved whole (`formulation.SMALL`) are left whole here too: equal layers may then be
    decided differently.
    """
    request, views = context.request, context.views
    annotates = request.binding is not None
    step = (views.annotated_fold if annotates else views.folded) if folds else None
    if step is not None:
        intra_op = _intra_op(context, model, pins, step.graph, step)
        if whole_nodes(intra_op.choices, step.weights.of_value) > SMALL:
            return intra_op, step
    return _intra_op(context, model, pins, views.annotated if annotates else context.graph, None), None


def _intra_op(
    context: PlanningContext, model: CostModel, pins: PinsOnMesh | None, graph: OpGraph, step: FoldedStep | None
) -> IntraOp:
    """The integer program of a graph, that of the step or its folded one."""
    request, whole = context.request, context.graph
    arguments, stays = whole.block.inputs[len(whole.constants) :], set(graph.block.inputs)
    return IntraOp(
        graph,
        model,
        GivenLayouts(
            fixed={arguments[i]: layout for i, layout in request.fixed if arguments[i] in stays},
            pins=pins.layouts(graph) if pins is not None else {},
            idle=pins.idle if pins is not None else frozenset(),
            in_host=frozenset(arguments[i] for i in request.in_host if arguments[i] in stays),
        ),
        constraints=request.binding.on(model.links.mesh.num_devices)[1] if request.binding is not None else None,
        paired_ops=step.paired_ops if step is not None else (),
        weights=step.weights if step is not None else ONE_EACH,
        tables=tables_of(context, graph, model),
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MeshSearch:
    """The integer program of one mesh, its solution for the least time, and the deadline of the search on it.

    `step`: the folded step of the program, None where the program is of the whole graph. `solved`: the solutions
    by what they charge of sends that can hide. `bounds`: these with the seconds that they take at least, once computed.
    """

    context: PlanningContext
    intra_op: IntraOp
    step: FoldedStep | None
    costs: NodeCosts
    free: Solution
    solved: dict[Exposure, Solution]
    bounds: list[tuple[float, Solution, Exposure]]
    pins: PinsOnMesh | None
    until_s: float

    def outcome(self, *, may_fit: bool = True) -> SpmdCandidate | Rejection:
        """The fastest plan that fits, else the smallest, or where none `may_fit` the fastest; or why it cannot be the
        plan.
        """
        context, model = self.context, self.intra_op.model
        slow_s = longest_s(context, len(model.links.mesh.axis_sizes))
        if not model.overlap.kinds:  # the objective is nearly the step's time, and its bound one of that
            least_s = self.free.bound - extra_s_of(context)
            if least_s >= slow_s:
                return slower(context, model, least_s)
        fastest = self.fastest(slow_s)
        if isinstance(fastest, float):
            return slower(context, model, fastest)
        found, exposure = fastest
        ways = self.ways(found)
        if ways[-1].ran.end_s >= slow_s:
            return slower(context, model, ways[-1].ran.end_s, ways[-1].ran.end_s)
        best, memory = self.candidate(ways)
        if best.peak_bytes <= context.limit_bytes or best.step_time_s >= context.fastest_s or not may_fit:
            return best
        return self.leaner(best, memory, exposure)

    def going_on(self, context: PlanningContext, time_limit_s: float) -> MeshSearch:
        """The search beside what else was found since it began."""
        return dataclasses.replace(self, context=context, until_s=time.perf_counter() + time_limit_s)

    @property
    def at_least_s(self) -> float:
        """Seconds that a plan on this mesh takes at least; zero where nothing is folded, so that to evaluate one costs
        as little.
        """
        return 0.0 if self.step is None else self.bounded()[0][0]

    @property
    def left_s(self) -> float:
        return max(self.until_s - time.perf_counter(), 1.0)

    def least_s(self, solution: Solution) -> tuple[float, bool]:
        """(seconds that a solution takes at least, whether it sends anything), of a folded program: how long the busier
        stream has work.
        """
        assert self.step is not None, "of a whole program the time itself costs as little"
        sharding = self.intra_op.decode(solution)
        ran = timed_sharding(self.step.graph, self.intra_op.model, sharding, self.intra_op.costs).ran
        return ran.busy_s, ran.send_s > 0

    def fastest(self, slow_s: float) -> tuple[TimedSharding, Exposure] | float:
        """The fastest solution on the clock, with what counted of a send that can hide; or, where none can take less
        than `slow_s`, what they take at least. Solutions that may take least are evaluated first: others need not be.
        """
        best, least_s = None, math.inf
        for at_least_s, solution, exposure in self.in_turn(slow_s):
            too_long_s = slow_s if best is None else min(slow_s, best[0].ran.end_s)
            least_s = min(least_s, at_least_s)
            if at_least_s >= too_long_s:
                continue
            found = self.timed(solution)
            if best is None or found.ran.end_s < best[0].ran.end_s:
                best = found, exposure
            if not found.ran.send_s:
                break  # nothing is sent that could hide
        return least_s if best is None else best

    def in_turn(self, slow_s: float) -> Iterable[tuple[float, Solution, Exposure]]:
        """The solutions, with seconds that they take at least, which are zero where nothing is folded, and where there
        is one solution whose time is wanted anyway.
        """
        if self.step is None or (slow_s == math.inf and not self.hides):
            return ((0.0, solution, exposure) for solution, exposure in self.solutions())
        return self.bounded()

    def bounded(self) -> list[tuple[float, Solution, Exposure]]:
        """The solutions of a folded program, that which may take least in front."""
        if not self.bounds:
            for solution, exposure in self.solutions():
                at_least_s, sends = self.least_s(solution)
                self.bounds.append((at_least_s, solution, exposure))
                if not sends:
                    break
            self.bounds.sort(key=lambda each: each[0])
        return self.bounds

    @property
    def hides(self) -> bool:
        return hides(self.context, self.intra_op.model)

    @property
    def hidden_s(self) -> float | None:
        """The least objective where of what can hide only a part counts; None where it was not looked for."""
        solution = self.solved.get(HIDDEN)
        return solution.objective if solution is not None and solution.choice else None

    def under(self, exposure: Exposure) -> Solution:
        """The solution under an exposure."""
        if exposure not in self.solved:
            self.solved[exposure] = self.intra_op.solve(time_limit_s=self.left_s, exposure=exposure)
        return self.solved[exposure]

    def solutions(self) -> Iterator[tuple[Solution, Exposure]]:
        """The solutions under one exposure after the other, each choice once."""
        weighed: set[tuple[int, ...]] = set()
        for exposure in itertools.chain([ALL_EXPOSED], self.exposures() if self.hides else ()):
            solution = self.free if exposure == ALL_EXPOSED else self.under(exposure)
            if solution.status not in (Status.OPTIMAL, Status.FEASIBLE):
                continue
            if exposure != ALL_EXPOSED:
                solution = self.at_full_cost(solution)
            if tuple(solution.choice) not in weighed:
                weighed.add(tuple(solution.choice))
                yield solution, exposure

    def exposures(self) -> Iterator[Exposure]:
        """Of what is sent before a loop it depends on all else that is whether it hides: both are tried."""
        yield HIDDEN
        if self.intra_op.sends_before_loops:
            yield Exposure(EXPOSED_FRACTION, before_loops=False)

    def timed(self, solution: Solution) -> TimedSharding:
        """A solution on the clock, on the whole step."""
        sharding = self.intra_op.decode(solution)
        if self.step is not None:
            sharding = unfold(sharding, self.context.views.partials, self.context.graph, self.step)
        return timed_sharding(self.context.graph, self.intra_op.model, sharding, self.costs)

    def ways(self, found: TimedSharding) -> list[TimedSharding]:
        """A timed sharding, and the same with products in pieces where that is faster; a recipe says itself where they
        are.
        """
        if self.context.request.binding is not None or time.perf_counter() > self.until_s:
            return [found]
        in_pieces = with_overlapped_axes(self.context.graph, self.intra_op.model, found)
        return [found] if in_pieces is found else [found, in_pieces]

    def candidate(self, ways: Sequence[TimedSharding]) -> tuple[SpmdCandidate, ProgramMemory]:
        """The candidate of the last of these that fits, else of that of least memory, with its memory over time."""
        graph, model, limit_bytes = self.context.graph, self.intra_op.model, self.context.limit_bytes
        made = []
        for way in reversed(ways):
            candidate, memory = with_memory(graph, model, way)
            made.append((dataclasses.replace(candidate, pins=self.pins, hidden_s=self.hidden_s), memory))
            if candidate.peak_bytes <= limit_bytes:
                return made[-1]
        return min(made, key=lambda each: each[0].peak_bytes)

    def prices(self, s_per_byte: float, values: frozenset[tuple[int, str]]) -> MemoryPrices:
        """A price on the bytes of values of the whole step."""
        if self.step is None:
            return MemoryPrices(s_per_byte=s_per_byte, values=values)
        like = Counter((self.step.value_of[v], state) for v, state in values)
        copies: dict[int, float] = {}
        for (v, _), times in like.items():
            copies[v] = max(copies.get(v, 0.0), float(times))
        return MemoryPrices(s_per_byte=s_per_byte, values=frozenset(like), copies=copies)

    def at_full_cost(self, solution: Solution) -> Solution:
        """A solution under another objective, with its cost under the objective of the search, and the bound of that
        objective. On one device there is no choice, and the cost is zero.
        """
        cost, bound = self.intra_op.cost(solution.choice), self.free.bound
        gap = (cost - bound) / cost if cost else 0.0
        return dataclasses.replace(solution, status=Status.FEASIBLE, objective=cost, bound=bound, gap=gap)

    def leaner(self, best: SpmdCandidate, memory: ProgramMemory, exposure: Exposure) -> SpmdCandidate:
        """The fastest plan that fits, else the smallest that was found, where the fastest of all is over the limit.

        The price applies to the values that are alive where the memory is over the limit in any plan seen so far.
        `memory`: that of the fastest of all.
        """
        limit_bytes, compiler = self.context.limit_bytes, self.intra_op.model.compiler
        smallest, smallest_fits, priced = best, False, over_limit_values(memory, compiler, limit_bytes)
        fitted: dict[tuple[int, ...], bool] = {}  # by the choice: neighbouring prices often lead to the same

        def attempt(s_per_byte: float) -> bool | None:
            nonlocal smallest, smallest_fits, priced
            if time.perf_counter() > self.until_s:
                return None
            prices = self.prices(s_per_byte, priced)
            solution = self.intra_op.solve(time_limit_s=self.left_s, prices=prices, exposure=exposure)
            if solution.status not in (Status.OPTIMAL, Status.FEASIBLE):
                return None
            choice = tuple(solution.choice)
            if choice in fitted:
                return fitted[choice]
            candidate, over_time = self.candidate(self.ways(self.timed(self.at_full_cost(solution))))
            candidate = dataclasses.replace(candidate, hidden_s=None)  # which is that of the fastest
            fits = fitted[choice] = candidate.peak_bytes <= limit_bytes
            if (not fits, _rank(candidate, fits)) < (not smallest_fits, _rank(smallest, smallest_fits)):
                smallest = candidate
            if fits:
                smallest_fits = True
            else:
                priced |= over_limit_values(over_time, compiler, limit_bytes)
            return fits

        search_price(attempt, best.step_time_s / best.peak_bytes, goes_on=True)
        return smallest


def _rank(candidate: SpmdCandidate, fits: bool) -> float:
    """The key by which candidates are compared, smaller is better: time among plans that fit, memory among others."""
    return candidate.step_time_s if fits else float(candidate.peak_bytes)
