"""Source of candidates: the search over stages, submeshes, numbers of micro-batches and schedules."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Sequence

from autopar.cost.cost_model import LEAST_EXPOSED_FRACTION, cost_model
from autopar.errors import AutoparError, BatchMismatchError, UnsupportedError
from autopar.frontend.callbacks import refuse_callbacks
from autopar.hardware.cluster import Cluster
from autopar.inter_op.build_stages import MicrobatchedStep, cut_layers
from autopar.inter_op.evaluate import SOURCE, PipelineCandidate, PipelineEvaluator, retry_without_hoisted_casts
from autopar.inter_op.layer_decisions import Decisions, layer_decisions
from autopar.inter_op.search_space import (
    finest,
    is_long,
    meshes_inside,
    microbatch_numbers,
    schedules_of,
    sizes_for,
    stage_numbers,
)
from autopar.inter_op.stage_costs import PricedOption, again_of, stage_options, undominated
from autopar.inter_op.staged import default_chunks, part_of
from autopar.ir.graph import OpGraph
from autopar.ir.mesh import LogicalMesh
from autopar.microbatch.smaller_step import num_examples
from autopar.passes.assign_layers import assign_layers
from autopar.passes.fold_layers import fold_layers
from autopar.passes.remat_cheap import copies_state
from autopar.passes.split_scan import SplitStep, divisors, one_part_a_group, split_scans, trips_of
from autopar.plan.context import PlanningContext, Rejection
from autopar.solver import NoStages, StagePlan, StageProblem
from autopar.solver import Schedule as SearchedSchedule

# How many times of the memory of one stage the tables may say, which count what layers share in each of them: what is
# promising is worked out, and then it is known.
OVERSTATED = 2.0
_NUMBER = re.compile(r"\d+(?:,\d+)*")
NEAR_THE_BEST = 1.15  # so far from the best are answers looked at for steps that are not long: the tables are off by it


# What decisions were made for: mesh, operations and values, devices that examples divide among, and where what is saved
# has a price the examples and the micro-batches in flight.
DecidedFor = tuple[LogicalMesh, int, int, int, int]


def pipeline_candidates(context: PlanningContext) -> Iterator[PipelineCandidate | Rejection]:
    """The fastest pipeline, of all that was not asked for otherwise, one that fits where there is one; or why there is
    none that may be faster than `context.to_beat_s`. Behind it come others that fit and take at most
    `context.keep_tolerance` times as long.

    For each number of micro-batches: layers, a table of what each layer costs on each mesh, then the dynamic programme
    over stages for all of them together; the best few are worked out to the last instruction and simulated.
    One stage is tried in other numbers of micro-batches too. Where it is the best, it is decided once more, under other
    terms and as data parallelism and ZeRO do.
    A scan over layers is priced in small parts and worked out in as many equal ones as there are stages, on equal
    submeshes. Where nothing fits, all is searched again with copies of the state made in each micro-batch anew.
    Where near ones are wanted, the best of each number of stages is worked out if it may be one of them.

    Raises: InvalidArgumentError for a schedule without a model here; what cutting into micro-batches raises, for
    callbacks too: the caller knows whether there is anything else.
    """
    traced = context.traced
    refuse_callbacks(traced.jaxpr, traced.name)
    yield from retry_without_hoisted_casts(
        lambda hoist_casts: _Search(context=context, hoist_casts=hoist_casts).run(), context.limit_bytes
    )


# A problem, with the micro-batches that it is for and the options that its numbers stand for.
_Posed = tuple[StageProblem, tuple[int, tuple[PricedOption, ...]]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Search:
    """One search, copies of the state being kept or made in each micro-batch anew."""

    context: PlanningContext
    hoist_casts: bool

    def run(self) -> tuple[Sequence[PipelineCandidate | Rejection], bool]:
        """(what is found, best first, whether copies that are made anew may help)"""
        traced, cluster, rules = self.context.traced, self.context.cluster, self.context.rules
        step = split_scans(traced, finest(trips_of(traced, rules)), rules)
        cuts = self.cuts(step)
        decided: dict[DecidedFor, Decisions] = {}
        posed = self.problems(step, cuts, decided)
        # One stage alone, plain accumulation of gradients, is worked out too, whatever the programme likes better.
        free_of = {(p.num_microbatches, p.schedule): (p, of) for p, of in posed if step.parts == 1 and p.chunks == 1}
        one_stage = [(dataclasses.replace(p, fixed_num_stages=1), of) for p, of in free_of.values()]
        problems, of_problem = [p for p, _ in posed + one_stage], [of for _, of in posed + one_stage]
        builder = PipelineEvaluator(
            self.context,
            cuts,
            lambda cut, num_stages: self.cut(split_scans(traced, num_stages, rules), cut.graph.num_microbatches),
        )
        within = 1.0 if is_long(traced) else NEAR_THE_BEST
        answers = builder.search(problems, of_problem, len(posed), within)
        if not self.context.deadline.passed:
            given = self.context.request.num_microbatches
            if given is not None and (1, given) not in builder.best_of:  # as one stage in other numbers is tried
                limit_bytes = int(OVERSTATED * self.context.limit_bytes)
                self.one_stage_s(step, given, cuts, decided, builder, limit_bytes)
            if given is None:
                estimated_s: dict[int, float] = {}
                for problem, (m, _), answer in zip(problems, of_problem, answers, strict=True):
                    if problem.fixed_num_stages == 1 and isinstance(answer, StagePlan):
                        estimated_s[m] = min(estimated_s.get(m, math.inf), answer.step_time_s)
                self.one_stage_in_other_numbers(step, cuts, decided, builder, estimated_s)
            hides = cost_model(cluster, LogicalMesh(axis_sizes=(cluster.num_devices,))).overlap.kinds
            builder.refine_one_stage((LEAST_EXPOSED_FRACTION, 0.0) if hides else ())
        builder.work_out_near(problems, of_problem, answers)
        slow = builder.best is None and any(isinstance(a, StagePlan) for a in answers)  # not for want of memory
        copies = not slow and any(copies_state(cut.graph) for cut in cuts.values())
        nothing = Rejection(source=SOURCE, why=f"no pipeline: {why_no_pipeline(answers)}", is_note=True)
        return builder.found() or (nothing,), copies

    def cut(self, step: SplitStep, m: int, whole: OpGraph | None = None) -> MicrobatchedStep:
        return cut_layers(step, m, self.context.rules, whole, hoist_casts=self.hoist_casts)

    def cuts(self, step: SplitStep) -> dict[int, MicrobatchedStep]:
        """The step in each number of micro-batches that it can be cut into.

        Raises: why it cannot, where it can be cut into none of them.
        """
        found: dict[int, MicrobatchedStep] = {}
        refused: AutoparError | None = None
        for m in microbatch_numbers(self.context.traced, self.context.cluster, self.context.request):
            if found and self.context.deadline.passed:
                break
            try:
                with self.context.progress.pass_(f"{m} micro-batches"):
                    found[m] = self.cut(step, m, self.context.graph)
            except (UnsupportedError, BatchMismatchError) as error:
                refused = error  # some sizes are traced to another program: others may serve
        if refused is not None and not found:
            raise refused
        return found

    def one_stage_in_other_numbers(
        self,
        step: SplitStep,
        cuts: dict[int, MicrobatchedStep],
        decided: dict[DecidedFor, Decisions],
        builder: PipelineEvaluator,
        estimated_s: dict[int, float],
    ) -> None:
        """One stage in half and twice the micro-batches while that is faster: where there is memory for fewer,
        parameters are gathered, and gradients added up, less often. Adds to `cuts`, `decided` and `estimated_s`.

        Args:
            estimated_s: What one stage takes in those numbers of micro-batches in which it fits.
        """
        numbers, most, over = divisors(num_examples(self.context.traced)), max(cuts), OVERSTATED
        while estimated_s and not self.context.deadline.passed:
            best = min(estimated_s, key=lambda m: estimated_s[m])
            fewer = max((d for d in numbers if 2 * d <= best), default=best)
            more = min((d for d in numbers if 2 * best <= d < most), default=best)
            near = [m for m in (fewer, more) if m not in estimated_s]
            if not near:
                return
            for m in near:
                limit_bytes = int(over * self.context.limit_bytes)
                estimated_s[m] = self.one_stage_s(step, m, cuts, decided, builder, limit_bytes)
                if (1, m) in builder.best_of:
                    made, told_bytes = builder.best_of[1, m]
                    estimated_s[m] = made.trial.step_time_s if made.fits(self.context.limit_bytes) else math.inf
                    over = max(1.0, told_bytes / made.trial.peak_bytes)

    def one_stage_s(
        self,
        step: SplitStep,
        m: int,
        cuts: dict[int, MicrobatchedStep],
        decided: dict[DecidedFor, Decisions],
        builder: PipelineEvaluator,
        limit_bytes: int,
    ) -> float:
        """What one stage takes in a number of micro-batches, by the tables (inf: it does not fit, or cannot be cut so);
        worked out where it may be the best.
        """
        if m not in cuts:
            try:
                with self.context.progress.pass_(f"{m} micro-batches"):
                    cuts[m] = self.cut(step, m, self.context.graph)
            except (UnsupportedError, BatchMismatchError):
                return math.inf  # as in `cuts`: others may serve
        with self.context.progress.pass_("layer costs"):
            priced = self.priced(cuts[m], [self.context.cluster.num_devices], decided)
        name = schedules_of(self.context.request)[0]
        for problem, options in self.on_schedule(step, cuts[m], name, priced, (1,)):
            limited = dataclasses.replace(problem, limit_bytes=limit_bytes)
            (answer,) = builder.search([limited], [(m, options)], 0, 1.0)
            return answer.step_time_s if isinstance(answer, StagePlan) else math.inf
        return math.inf

    def problems(
        self, step: SplitStep, cuts: dict[int, MicrobatchedStep], decided: dict[DecidedFor, Decisions]
    ) -> list[_Posed]:
        """Those of the dynamic programme, for each number of micro-batches, schedule and, of scans, of stages."""
        found: list[_Posed] = []
        long = is_long(self.context.traced)
        equal = stage_numbers(step, self.context.cluster) if step.parts > 1 else ()
        for m, cut in cuts.items():
            numbers = equal or (None,)
            with self.context.progress.pass_("layer costs"):
                sizes = sizes_for(cut, self.context.cluster, self.context.request, m == min(cuts))
                priced = self.priced(cut, sizes, decided)
                if long:  # what is nowhere better with small micro-batches is not priced for large ones
                    better = {(o.mesh, o.terms) for o in priced}
                    for key, of in decided.items():
                        decided[key] = tuple(d for d in of if (key[0], d.terms) in better)
            for name in schedules_of(self.context.request):
                made = self.on_schedule(step, cut, name, priced, numbers)
                found += [(problem, (m, options)) for problem, options in made]
        return found

    def priced(
        self, cut: MicrobatchedStep, sizes: Sequence[int], decided: dict[DecidedFor, Decisions]
    ) -> tuple[PricedOption, ...]:
        """The options of submeshes of these sizes that none of them is better than in all. Adds to `decided`."""
        long = is_long(self.context.traced)
        made = tables(
            cut,
            self.context.cluster,
            sizes,
            self.context.limit_bytes,
            self.context.deadline.solve_s(),
            decided,
            prices_saved=not long,
        )
        return undominated(made)

    def on_schedule(
        self,
        step: SplitStep,
        cut: MicrobatchedStep,
        name: str,
        priced: tuple[PricedOption, ...],
        numbers: Sequence[int | None],
    ) -> list[tuple[StageProblem, tuple[PricedOption, ...]]]:
        """The problems of one schedule, one for each number of stages (none: any), of a scan those that it has."""
        request, cluster = self.context.request, self.context.cluster
        chunks = request.chunks or default_chunks(name)
        if step.parts > 1 and chunks > 1:
            if request.schedule is not None or request.chunks is not None:
                raise one_part_a_group(step, name, chunks)
            return []
        found = []
        for num_stages in numbers:
            options = priced if step.parts == 1 else _on(priced, cluster.num_devices // (num_stages or 1))
            if step.parts > 1 and not options:
                continue  # stages of more devices than share an example
            problem = StageProblem(
                options=tuple(o.option for o in options),
                num_devices=cluster.num_devices,
                num_layers=len(cut.layers),
                num_microbatches=cut.graph.num_microbatches,
                schedule=SearchedSchedule(name),
                limit_bytes=self.context.limit_bytes,
                host_devices=cluster.devices_per_host,
                chunks=chunks,
                fixed_num_stages=num_stages,
            )
            found.append((problem, options))
        return found


def _on(options: Sequence[PricedOption], num_devices: int) -> tuple[PricedOption, ...]:
    """The options of stages on so many devices."""
    return tuple(o for o in options if o.mesh.num_devices == num_devices)


def tables(
    cut: MicrobatchedStep,
    cluster: Cluster,
    sizes: Sequence[int],
    limit_bytes: int,
    time_limit_s: float,
    decided: dict[DecidedFor, Decisions],
    *,
    prices_saved: bool = True,
) -> tuple[PricedOption, ...]:
    """The options of every submesh of these sizes.

    `decided` are the decisions made for smaller micro-batches: they are kept where operations and values have the same
    numbers and hang together alike, examples divide among as many of the devices, and what is saved has no price that
    depends on their number (`prices_saved`, which long steps do without); then they are only priced anew. Adds to it
    what is decided here.
    """
    assignment = assign_layers(cut.graph, cut.layers)
    contracted = fold_layers(cut.graph, assignment, len(cut.layers))
    wiring, again = hash(wiring_of(contracted.graph)), again_of(contracted)
    options: list[PricedOption] = []
    models = [cost_model(part, mesh) for part in (part_of(cluster, n) for n in sizes) for mesh in meshes_inside(part)]
    examples = num_examples(cut.step.traced) // cut.graph.num_microbatches
    # Some boundary lies between hosts, and the slowest stage sets the pace.
    link = cluster.between_hosts if cluster.num_hosts > 1 else cluster.inside_host
    for model in models:
        mesh = model.links.mesh
        stages = cluster.num_devices / mesh.num_devices
        in_flight = min(math.ceil(stages), cut.graph.num_microbatches) if prices_saved else 0
        key = mesh, wiring, math.gcd(examples, mesh.num_devices), in_flight and examples, in_flight
        if key not in decided:
            # A stage on this mesh holds about its share of the layers.
            room_bytes, equal = limit_bytes * stages, cut.step.parts > 1
            decided[key] = layer_decisions(contracted, model, room_bytes, in_flight, equal, time_limit_s)
        options += stage_options(contracted, again, cut.layers, model, link, decided[key])
    return tuple(options)


def wiring_of(graph: OpGraph) -> tuple:
    """Operations and values by their numbers, without sizes: equal where decisions for one graph serve another."""
    return tuple(
        (op.id, op.kind, op.section, op.primitive, tuple(a for a in op.inputs if isinstance(a, int)), op.outputs)
        for op in graph.ops()
    )


def why_no_pipeline(answers: Sequence[StagePlan | NoStages]) -> str:
    """The reasons of the problems that have no plan."""
    reasons: dict[str, tuple[list[int], str]] = {}
    for answer in answers:
        if isinstance(answer, NoStages):  # of reasons that differ in numbers alone that with the smallest
            numbers = [int(n.replace(",", "")) for n in _NUMBER.findall(answer.reason)]
            kind = _NUMBER.sub("", answer.reason)
            reasons[kind] = min(reasons.get(kind, (numbers, answer.reason)), (numbers, answer.reason))
    return "; ".join(reason for _, reason in reasons.values()) or "no pipeline was near the plan without stages"
