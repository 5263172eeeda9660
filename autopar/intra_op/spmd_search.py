"""Source of candidates: one SPMD program over all devices, by an integer program on each logical mesh."""

from __future__ import annotations

import dataclasses
import itertools
import math
import operator
import time
from collections.abc import Iterator, Sequence

from autopar.cost.cost_model import EXPOSED_FRACTION, LEAST_EXPOSED_FRACTION, CostModel, cost_model
from autopar.intra_op.ilp import GivenLayouts, IntraOp
from autopar.intra_op.logical_meshes import logical_meshes
from autopar.intra_op.memory_prices import MemoryPrices, search_price
from autopar.intra_op.memory_refusals import cannot_fit
from autopar.intra_op.spmd_candidate import SpmdCandidate, evaluated, over_limit_values
from autopar.ir.mesh import LogicalMesh
from autopar.plan.context import PlanningContext, Rejection
from autopar.sharding.pins import PinsOnMesh
from autopar.solver import Solution, Status

SOURCE = "logical meshes"
GAIN_OF_AN_AXIS = 0.01  # what a second axis must gain over one for three to be tried
# Where memory is short: how many prices of a byte are tried, the first one (as a part of the step's time divided by the
# peak), and by how much it rises until a plan fits. The first is low: where compute decides the time, bytes are cheap.
MEMORY_ROUNDS, FIRST_PRICE, PRICE_RISE = 14, 1e-4, 5.0
IMPOSSIBLE = "impossible"  # what is said of a mesh on which constraints leave nothing
LONG_STEP = 5_000  # operations; whatever is done to a longer step takes long
# What may count of a send that computing can hide: how much of it does depends on what else is sent.
EXPOSED_FRACTIONS = (EXPOSED_FRACTION, LEAST_EXPOSED_FRACTION)


def mesh_candidates(context: PlanningContext) -> Iterator[SpmdCandidate | Rejection]:
    """The best plan on each logical mesh, or the reason for which there is none.

    A rejection with a MemoryLimitError ends the search: no mesh can have a plan that fits.
    """
    deadline = context.deadline
    may_fit = not context.request.leaves_layouts_free or context.cluster.num_devices == 1
    meshes = logical_meshes(context)
    for number, (mesh, pins) in enumerate(meshes):
        candidates = [c for c in context.candidates if isinstance(c, SpmdCandidate)]
        fits = any(c.peak_bytes <= context.limit_bytes for c in candidates)
        if deadline.passed and fits:
            outcome: SpmdCandidate | Rejection = not_tried(mesh, deadline.text)
        elif not worth_trying(mesh, candidates, context.limit_bytes):
            outcome = not_tried(mesh, f"the axis before it gained less than {GAIN_OF_AN_AXIS:.0%}")
        else:
            # Where nothing can fit, a search for what does takes minutes: it is asked first whether anything can, for a
            # long step at once, for others when nothing fits on the first mesh.
            slow = number > 0 or len(context.graph.block.ops) > LONG_STEP
            if slow and not may_fit and not fits:
                with context.progress.pass_("least memory"):
                    refusal = cannot_fit(context)
                if refusal is not None:
                    yield Rejection(source=SOURCE, why=refusal.got, error=refusal)
                    return
                may_fit = True
            with context.progress.pass_(f"mesh {mesh}"):
                model, time_s = cost_model(context.cluster, mesh), deadline.solve_s(len(meshes) - number)
                outcome = search_mesh(context, model, pins, time_limit_s=time_s)
        yield outcome
        context = context.after([outcome])


def not_tried(mesh: LogicalMesh, why: str) -> Rejection:
    return Rejection(source=SOURCE, text=f"mesh {mesh}", why=f"not tried: {why}", axis_sizes=mesh.axis_sizes)


def worth_trying(mesh: LogicalMesh, candidates: Sequence[SpmdCandidate], limit_bytes: int) -> bool:
    """Whether a mesh of three axes may pay: where two axes gained next to nothing over one, a third is not tried.

    The search on three axes costs more than all others together. Where no plan fits yet, every mesh is tried.
    """
    num_axes = len(mesh.axis_sizes)
    if num_axes < 3:
        return True

    def fastest_s(axes: int) -> float:
        fitting = [c for c in candidates if c.peak_bytes <= limit_bytes]
        return min((c.step_time_s for c in fitting if len(c.model.links.mesh.axis_sizes) == axes), default=math.inf)

    one_axis_less_s, most_axes_s = fastest_s(num_axes - 2), fastest_s(num_axes - 1)
    return (
        math.isinf(one_axis_less_s) or math.isinf(most_axes_s) or most_axes_s < one_axis_less_s * (1 - GAIN_OF_AN_AXIS)
    )


def search_mesh(
    context: PlanningContext, model: CostModel, pins: PinsOnMesh | None = None, *, time_limit_s: float
) -> SpmdCandidate | Rejection:
    """The fastest plan on one mesh that fits into the memory, else the smallest plan that was found.

    The ILP is solved without memory first. Its objective adds up computation and communication, an upper bound of the
    time with overlap by which plans are compared. On platforms with overlap, and without a recipe, the ILP is re-solved
    with a part of the communication that computation can hide (`slack`, `EXPOSED_FRACTIONS`), and the search continues
    from the fastest plan. Where the exact peak of that plan is over the limit, bytes get a price
    (`_MeshSearch.leaner`), unless a plan on another mesh fits and is as fast. The whole search takes at most
    `time_limit_s`, except for its last solution.

    Returns a rejection when the time limit passed without any plan.
    """
    until_s = time.perf_counter() + time_limit_s
    request, graph, mesh = context.request, context.graph, model.links.mesh
    arguments = graph.block.inputs[len(graph.constants) :]
    intra_op = IntraOp(
        graph,
        model,
        GivenLayouts(
            fixed={arguments[i]: layout for i, layout in request.fixed},
            pins=pins.layouts(graph) if pins is not None else {},
            in_host=frozenset(arguments[i] for i in request.in_host),
        ),
        constraints=request.binding.on(mesh.num_devices)[1] if request.binding is not None else None,
    )
    free = intra_op.solve(time_limit_s=time_limit_s)
    if free.status not in (Status.OPTIMAL, Status.FEASIBLE):
        why = f"no plan after {free.wall_s:.1f} s ({free.status.value})"
        if free.status is Status.INFEASIBLE:
            why = IMPOSSIBLE
        return Rejection(source=SOURCE, text=f"mesh {mesh}", why=why, axis_sizes=mesh.axis_sizes)
    search = _MeshSearch(context=context, intra_op=intra_op, free=free, pins=pins, until_s=until_s)
    best = search.candidate(free)
    exposed_fraction = 1.0
    # A recipe means the plan that its source describes, which does not count on what is hidden.
    hides = model.overlap.kinds and request.binding is None and best.sends
    for fraction in EXPOSED_FRACTIONS if hides else ():
        hidden = intra_op.solve(time_limit_s=search.left_s, exposed_fraction=fraction)
        if hidden.status in (Status.OPTIMAL, Status.FEASIBLE):
            candidate = search.candidate(search.at_full_cost(hidden))
            if candidate.step_time_s < best.step_time_s:
                best, exposed_fraction = candidate, fraction
    if best.peak_bytes <= context.limit_bytes or best.step_time_s >= context.fastest_s:
        return best
    return search.leaner(best, exposed_fraction)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _MeshSearch:
    """The integer program of one mesh, its solution for the least time, and the deadline of the search on it."""

    context: PlanningContext
    intra_op: IntraOp
    free: Solution
    pins: PinsOnMesh | None
    until_s: float

    @property
    def left_s(self) -> float:
        return max(self.until_s - time.perf_counter(), 1.0)

    def candidate(self, solution: Solution) -> SpmdCandidate:
        """A solution, lowered and evaluated."""
        candidate = evaluated(self.context.graph, self.intra_op.model, self.intra_op.decode(solution))
        return dataclasses.replace(candidate, pins=self.pins)

    def at_full_cost(self, solution: Solution) -> Solution:
        """A solution under another objective, with its cost under the objective of the search, and the bound of that
        objective. On one device there is no choice, and the cost is zero.
        """
        cost, bound = self.intra_op.cost(solution.choice), self.free.bound
        gap = (cost - bound) / cost if cost else 0.0
        return dataclasses.replace(solution, status=Status.FEASIBLE, objective=cost, bound=bound, gap=gap)

    def leaner(self, best: SpmdCandidate, exposed_fraction: float) -> SpmdCandidate:
        """The fastest plan that fits, else the smallest that was found, where the fastest of all is over the limit.

        The price applies to the values that are alive where the memory is over the limit in any plan seen so far.
        """
        limit_bytes = self.context.limit_bytes
        smallest, smallest_fits, priced = best, False, over_limit_values(best, limit_bytes)

        def attempt(s_per_byte: float) -> bool | None:
            nonlocal smallest, smallest_fits, priced
            if time.perf_counter() > self.until_s:
                return None
            prices = MemoryPrices(s_per_byte=s_per_byte, values=priced)
            solution = self.intra_op.solve(time_limit_s=self.left_s, prices=prices, exposed_fraction=exposed_fraction)
            if solution.status not in (Status.OPTIMAL, Status.FEASIBLE):
                return None
            candidate = self.candidate(self.at_full_cost(solution))
            fits = candidate.peak_bytes <= limit_bytes
            if (not fits, _rank(candidate, fits)) < (not smallest_fits, _rank(smallest, smallest_fits)):
                smallest = candidate
            if fits:
                smallest_fits = True
            else:
                priced |= over_limit_values(candidate, limit_bytes)
            return fits

        first_s = best.step_time_s / best.peak_bytes * FIRST_PRICE
        rising = list(itertools.accumulate([first_s, *[PRICE_RISE] * (MEMORY_ROUNDS - 1)], operator.mul))
        search_price(attempt, rising, halve_by=PRICE_RISE)
        return smallest


def _rank(candidate: SpmdCandidate, fits: bool) -> float:
    """The key by which candidates are compared, smaller is better: time among plans that fit, memory among others."""
    return candidate.step_time_s if fits else float(candidate.peak_bytes)
