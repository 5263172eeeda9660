"""Source of candidates: the search over stages, submeshes, numbers of micro-batches and schedules."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence

from autopar.cost.cost_model import LEAST_EXPOSED_FRACTION, cost_model
from autopar.errors import AutoparError, BatchMismatchError, UnsupportedError
from autopar.frontend.callbacks import refuse_callbacks
from autopar.hardware.cluster_parts import WHOLE
from autopar.inter_op.build_stages import MicrobatchedStep, cut_layers
from autopar.inter_op.device_parts import check_parts, on_part, orders, placements
from autopar.inter_op.evaluate import PipelineEvaluator
from autopar.inter_op.layer_decisions import Decisions
from autopar.inter_op.microbatch_walk import Tried, next_for_stages, next_numbers
from autopar.inter_op.one_stage import least_in_turn_s
from autopar.inter_op.option_tables import DecidedFor, tables
from autopar.inter_op.pipeline_candidate import SOURCE, PipelineCandidate, retry_without_hoisted_casts
from autopar.inter_op.search_space import (
    chunk_numbers,
    finest,
    is_long,
    microbatch_numbers,
    schedules_of,
    sizes_for,
    stage_numbers,
    uneven_stages,
)
from autopar.inter_op.stage_answers import by_tables, why_no_pipeline
from autopar.inter_op.stage_costs import PricedOption, undominated
from autopar.ir.graph import OpGraph
from autopar.ir.mesh import LogicalMesh
from autopar.microbatch.smaller_step import SmallerSteps, num_examples
from autopar.passes.remat_cheap import copies_state
from autopar.passes.split_scan import SplitStep, divisors, one_part_a_group, split_scans, trips_of
from autopar.plan.context import PlanningContext, Rejection
from autopar.plan.options import Effort
from autopar.solver import Schedule as SearchedSchedule
from autopar.solver import StagePlan, StageProblem

# The largest estimated memory of one stage, over the limit, that is built: the tables count values that layers share
# once for each layer.
OVERSTATED = 2.0
_NOTHING = Tried(step_time_s=math.inf)
NEAR_THE_BEST = 1.15  # the error of the tables: answers up to this ratio to the best are built, unless the step is long


def pipeline_candidates(context: PlanningContext) -> Iterator[PipelineCandidate | Rejection]:
    """The fastest pipeline that the request admits, one that fits where there is one; or the reason why none may be
    faster than `context.to_beat_s`. It is followed by other pipelines that fit and take at most
    `context.keep_tolerance` times as long.

    For each number of micro-batches: layers, a table of the cost of each layer on each mesh, then the dynamic programme
    over stages for all of them together. The best few answers are lowered to instructions and simulated. One stage is
    tried in other numbers of micro-batches too; where it is the best, it is decided again, under other weights and
    under data parallelism and ZeRO. A scan over layers is priced in small parts, and built in as many equal parts as
    there are stages, on equal submeshes. Where nothing fits, the search is repeated with copies of the state made in
    each micro-batch. With a tolerance, the best of each number of stages is built if it may be within the tolerance.

    Raises: InvalidArgumentError for a schedule without a model here; errors of the split into micro-batches, and for
    callbacks: the caller knows whether there is an alternative.
    """
    traced = context.traced
    refuse_callbacks(traced.jaxpr, traced.name)
    on_fewer = SmallerSteps()

    def search(hoist_casts: bool) -> tuple[Sequence[PipelineCandidate | Rejection], bool]:
        found = _Search(context=context, hoist_casts=hoist_casts, on_fewer=on_fewer)
        results, may_help = found.run()
        return (results, may_help) if found.confirms(results) else found.run()

    yield from retry_without_hoisted_casts(search, context.limit_bytes)


# A problem, with its number of micro-batches and its options.
_Posed = tuple[StageProblem, tuple[int, tuple[PricedOption, ...]]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Search:
    """One search, with copies of the state hoisted out of the micro-batches or made in each of them. `on_fewer`: the
    step on the examples of a micro-batch.
    """

    context: PlanningContext
    hoist_casts: bool
    on_fewer: SmallerSteps

    def run(self) -> tuple[Sequence[PipelineCandidate | Rejection], bool]:
        """(results, best first; whether copies of the state in each micro-batch may help)"""
        traced, cluster, rules = self.context.traced, self.context.cluster, self.context.rules
        step = split_scans(traced, finest(trips_of(traced, rules)), rules)
        check_parts(cluster, step)
        cuts = self.cuts(step)
        decided: dict[DecidedFor, Decisions] = {}
        builder = PipelineEvaluator(
            self.context,
            cuts,
            lambda microbatched, num_stages: self.microbatched(
                split_scans(traced, num_stages, rules), microbatched.graph.num_microbatches
            ),
        )
        posed = self.problems(step, cuts, decided) if self.several_may_pay(step, cuts, decided, builder) else []
        # One stage alone, plain gradient accumulation, is always built too.
        free_of = {(p.num_microbatches, p.schedule): (p, of) for p, of in posed if step.parts == 1 and p.chunks == 1}
        one_stage = [(dataclasses.replace(p, fixed_num_stages=1), of) for p, of in free_of.values()]
        problems, of_problem = [p for p, _ in posed + one_stage], [of for _, of in posed + one_stage]
        within = 1.0 if is_long(traced) else NEAR_THE_BEST
        answers = list(builder.search(problems, of_problem, len(posed), within))
        requested = self.context.request.num_microbatches
        if requested is None:
            for more in self.stages_in_other_numbers(step, cuts, decided, builder):
                posed_more, of_more = [p for p, _ in more], [of for _, of in more]
                answers += builder.search(posed_more, of_more, len(more), within, within * builder.longest_s)
                problems, of_problem = [*problems, *posed_more], [*of_problem, *of_more]
        if not self.context.deadline.passed:
            if requested is not None and (1, requested) not in builder.best_of:  # one stage is always tried
                limit_bytes = int(OVERSTATED * self.context.limit_bytes)
                self.one_stage(step, requested, cuts, decided, builder, limit_bytes)
            if requested is None:
                estimated: dict[int, Tried] = {}
                for problem, (m, options), answer in zip(problems, of_problem, answers, strict=True):
                    if problem.fixed_num_stages == 1 and isinstance(answer, StagePlan):
                        found = by_tables(problem, answer, options)
                        estimated[m] = min(estimated.get(m, found), found, key=lambda t: t.step_time_s)
                self.one_stage_in_other_numbers(step, cuts, decided, builder, estimated)
            hides = cost_model(cluster, LogicalMesh(axis_sizes=(cluster.num_devices,))).overlap.kinds
            builder.refine_one_stage((LEAST_EXPOSED_FRACTION, 0.0) if hides else ())
            if requested is None:
                numbers = divisors(num_examples(self.context.traced))
                builder.refine_in_other_numbers(lambda m: self.cut_in(step, m, cuts), numbers)
        builder.work_out_near(problems, of_problem, answers)
        slow = builder.best is None and any(isinstance(a, StagePlan) for a in answers)  # the reason is not memory
        copies = not slow and any(copies_state(microbatched.graph) for microbatched in cuts.values())
        nothing = Rejection(source=SOURCE, why=f"no pipeline: {why_no_pipeline(answers)}", is_note=True)
        return (*(builder.results() or (nothing,)), *uneven_stages(step, cluster)), copies

    def several_may_pay(
        self,
        step: SplitStep,
        cuts: dict[int, MicrobatchedStep],
        decided: dict[DecidedFor, Decisions],
        builder: PipelineEvaluator,
    ) -> bool:
        """Whether several stages may be faster than one. Where the whole batch is asked for as one micro-batch they
        wait for one another; then one is built first, and is enough if it fits and sends little (`least_in_turn_s`).
        On devices that share processors none waits in vain, for the others run faster then.
        """
        request, cluster = self.context.request, self.context.cluster
        are_alike = not cluster.parts and cluster.device.shared_by == 1
        in_turn = request.num_microbatches == 1 and request.admits_one_program and are_alike
        wants_others = request.effort is Effort.THOROUGH or self.context.keep_tolerance > 1
        smaller = [size for size in self.sizes(cuts[1], True)[WHOLE] if size < cluster.num_devices] if in_turn else []
        if not smaller or wants_others:
            return True
        self.one_stage(step, 1, cuts, decided, builder, self.context.limit_bytes)
        builder.settle()
        found = builder.best_built
        if found is None or not found.fits(self.context.limit_bytes):
            return True
        return found.step_time_s > least_in_turn_s(found.staged, max(smaller))

    def microbatched(self, step: SplitStep, m: int, whole: OpGraph | None = None) -> MicrobatchedStep:
        return cut_layers(step, m, self.context.rules, whole, hoist_casts=self.hoist_casts, on_fewer=self.on_fewer)

    def confirms(self, results: Sequence[PipelineCandidate | Rejection]) -> bool:
        """Whether the micro-batches of every pipeline found are what a trace gives."""
        pipelines = [result.staged for result in results if isinstance(result, PipelineCandidate)]
        steps = {(staged.step.parts, staged.graph.num_microbatches): staged.step.traced for staged in pipelines}
        with self.context.progress.pass_("micro-batches"):
            return all(
                m == 1 or self.on_fewer.confirm(traced, num_examples(traced) // m) for (_, m), traced in steps.items()
            )

    def cuts(self, step: SplitStep) -> dict[int, MicrobatchedStep]:
        """The step in each number of micro-batches that it admits; a step that mixes its examples, as one where no
        program fits: stages and recomputation need less memory. Raises: the reason, where it admits none.
        """
        cuts: dict[int, MicrobatchedStep] = {}
        error_of_last: AutoparError | None = None
        for m in microbatch_numbers(self.context.traced, self.context.cluster, self.context.request):
            if cuts and self.context.deadline.passed:
                break
            try:
                with self.context.progress.pass_(f"{m} micro-batches"):
                    cuts[m] = self.microbatched(step, m, self.context.graph)
            except (UnsupportedError, BatchMismatchError) as error:
                error_of_last = error  # other numbers may be traceable
        if error_of_last is not None and not cuts:
            fits = self.context.fastest_s < math.inf
            if fits or self.context.request.num_microbatches is not None or self.cut_in(step, 1, cuts) is None:
                raise error_of_last
        return cuts

    def cut_in(self, step: SplitStep, m: int, cuts: dict[int, MicrobatchedStep]) -> MicrobatchedStep | None:
        """The step in a number of micro-batches, which is added to the dictionary; None where it does not admit it."""
        if m not in cuts:
            try:
                with self.context.progress.pass_(f"{m} micro-batches"):
                    cuts[m] = self.microbatched(step, m, self.context.graph)
            except (UnsupportedError, BatchMismatchError):
                return None  # as in `cuts`
        return cuts[m]

    def stages_in_other_numbers(
        self,
        step: SplitStep,
        cuts: dict[int, MicrobatchedStep],
        decided: dict[DecidedFor, Decisions],
        builder: PipelineEvaluator,
    ) -> Iterator[list[_Posed]]:
        """The problems of several stages in numbers of micro-batches beside the fastest (`next_for_stages`), one number
        at a time, on submeshes of about the sizes of its stages, smaller ones for smaller micro-batches. Adds to the
        dictionaries.
        """
        numbers, tried = divisors(num_examples(self.context.traced)), set(cuts)
        while not self.context.deadline.passed:
            best = builder.best_of_several_stages
            if best is None or builder.best is None or best.step_time_s > NEAR_THE_BEST * builder.best.step_time_s:
                return
            m = next((m for m in next_for_stages(numbers, tried, best.num_microbatches) if m not in tried), None)
            if m is None:
                return
            tried.add(m)
            if self.cut_in(step, m, cuts) is not None:
                sizes = [mesh.num_devices for mesh in best.choice.group_meshes]
                near, more = min(sizes, key=lambda size: (-sizes.count(size), size)), m / best.num_microbatches
                yield self.problems(step, cuts, decided, [m], (near / (2 * max(more, 1)), 2 * near / min(more, 1)))

    def one_stage_in_other_numbers(
        self,
        step: SplitStep,
        cuts: dict[int, MicrobatchedStep],
        decided: dict[DecidedFor, Decisions],
        builder: PipelineEvaluator,
        estimated: dict[int, Tried],
    ) -> None:
        """One stage in fewer and more micro-batches while that is faster (`next_numbers`). Adds to the dictionaries.

        Args:
            estimated: One stage by the tables in each number of micro-batches in which it fits.
        """
        if not estimated:
            return
        numbers, largest, overstated = divisors(num_examples(self.context.traced)), max(estimated), OVERSTATED
        tried = {m: _tried(builder, m, known) for m, known in estimated.items()}
        while not self.context.deadline.passed:
            near = next_numbers(numbers, tried, self.context.limit_bytes, largest)
            if not near:
                return
            m = near[0]  # what comes of it decides on the others
            limit_bytes = int(overstated * self.context.limit_bytes)
            found = self.one_stage(step, m, cuts, decided, builder, limit_bytes)
            if (1, m) in builder.best_of:
                candidate, estimated_bytes = builder.best_of[1, m]
                fits = candidate.fits(self.context.limit_bytes)
                found = Tried(step_time_s=candidate.trial.step_time_s if fits else math.inf)
                overstated = max(1.0, estimated_bytes / candidate.trial.peak_bytes)
            tried[m] = _tried(builder, m, found)

    def one_stage(
        self,
        step: SplitStep,
        m: int,
        cuts: dict[int, MicrobatchedStep],
        decided: dict[DecidedFor, Decisions],
        builder: PipelineEvaluator,
        limit_bytes: int,
    ) -> Tried:
        """One stage in a number of micro-batches, by the tables; inf seconds: it does not fit, or the step admits no
        such split. The pipeline is built where it may be the best.
        """
        microbatched = self.cut_in(step, m, cuts)
        if microbatched is None:
            return _NOTHING
        with self.context.progress.pass_("layer costs"):
            priced = self.priced(microbatched, {WHOLE: [self.context.cluster.num_devices]}, decided)
        name = schedules_of(self.context.request)[0]
        for problem, options in self.on_schedule(step, cuts[m], name, priced, (1,)):
            limited = dataclasses.replace(problem, limit_bytes=limit_bytes)
            (answer,) = builder.search([limited], [(m, options)], 0, 1.0)
            return by_tables(limited, answer, options) if isinstance(answer, StagePlan) else _NOTHING
        return _NOTHING

    def problems(
        self,
        step: SplitStep,
        cuts: dict[int, MicrobatchedStep],
        decided: dict[DecidedFor, Decisions],
        numbers: Sequence[int] = (),
        sizes_between: tuple[float, float] = (0, math.inf),
    ) -> list[_Posed]:
        """The problems for each of these numbers of micro-batches (all), each schedule and, for scans, each number of
        stages, on submeshes of these sizes.
        """
        posed: list[_Posed] = []
        long, (least, most) = is_long(self.context.traced), sizes_between
        equal = stage_numbers(step, self.context.cluster) if step.parts > 1 else ()
        for m in numbers or cuts:
            step_of_m = cuts[m]
            with self.context.progress.pass_("layer costs"):
                sizes = self.sizes(step_of_m, m == min(cuts))
                sizes = {n: [size for size in of if least <= size <= most] for n, of in sizes.items()}
                priced = self.priced(step_of_m, sizes, decided)
                if long:  # options dominated in small micro-batches are not priced for large ones
                    better = {(o.mesh, o.part, dataclasses.replace(o.terms, overlapped_axes=())) for o in priced}
                    for key, of in decided.items():
                        if key[0].num_devices in sizes.get(key[-1], ()):
                            decided[key] = tuple(d for d in of if (key[0], key[-1], d.terms) in better)
            for name in schedules_of(self.context.request):
                problems = self.on_schedule(step, step_of_m, name, priced, equal or (None,))
                posed += [(problem, (m, options)) for problem, options in problems]
        return posed

    def sizes(self, microbatched: MicrobatchedStep, is_largest: bool) -> dict[int, Sequence[int]]:
        """The sizes of submeshes to price, for each part of the cluster and for the whole of it."""
        cluster, request = self.context.cluster, self.context.request
        if not cluster.parts:
            return {WHOLE: sizes_for(microbatched, cluster, request, is_largest)}
        of_parts = {n: sizes_for(microbatched, at, request, is_largest) for n, at in enumerate(cluster.parts)}
        return {**of_parts, WHOLE: [cluster.num_devices]}

    def priced(
        self, microbatched: MicrobatchedStep, sizes: dict[int, Sequence[int]], decided: dict[DecidedFor, Decisions]
    ) -> tuple[PricedOption, ...]:
        """The undominated options of submeshes of these sizes. Adds to `decided`."""
        cluster, options = self.context.cluster, list[PricedOption]()
        for number, of_part in sizes.items():
            found = tables(
                microbatched,
                cluster,
                of_part,
                self.context.limit_bytes,
                self.context.deadline.solve_s(),
                decided,
                prices_saved=not is_long(self.context.traced),
                number=number,
            )
            options += found if number == WHOLE else on_part(found, number, cluster, microbatched.layers)
        return undominated(options)

    def on_schedule(
        self,
        step: SplitStep,
        microbatched: MicrobatchedStep,
        name: str,
        priced: tuple[PricedOption, ...],
        numbers: Sequence[int | None],
    ) -> list[tuple[StageProblem, tuple[PricedOption, ...]]]:
        """The problems of one schedule, one for each number of chunks of a group, and of stages; None: any number."""
        request, cluster = self.context.request, self.context.cluster
        chunks_of_group = chunk_numbers(request, name, len(microbatched.layers))
        if step.parts > 1 and chunks_of_group[0] > 1:
            if request.schedule is not None or request.chunks is not None:
                raise one_part_a_group(step, name, chunks_of_group[0])
            return []
        if cluster.parts and chunks_of_group[0] > 1:
            return []  # all chunks have one option: none lies on two kinds of devices
        problems = []
        for num_stages, chunks, order in itertools.product(numbers, chunks_of_group, orders(cluster)):
            options = priced if step.parts == 1 else _on(priced, cluster.num_devices // (num_stages or 1))
            if step.parts > 1 and not options:
                continue  # more devices than examples
            problem = StageProblem(
                options=tuple(o.option for o in options),
                num_devices=cluster.num_devices,
                num_layers=len(microbatched.layers),
                num_microbatches=microbatched.graph.num_microbatches,
                schedule=SearchedSchedule(name),
                limit_bytes=self.context.limit_bytes,
                host_devices=cluster.domain_devices,
                chunks=chunks,
                fixed_num_stages=num_stages,
                placements=placements(options, cluster, order),
            )
            problems.append((problem, options))
        return problems


def _tried(builder: PipelineEvaluator, m: int, known: Tried) -> Tried:
    """One stage in m micro-batches as far as it was built, with the time that is known of it."""
    if (1, m) not in builder.best_of:
        return known
    candidate, _ = builder.best_of[1, m]
    return Tried(
        step_time_s=known.step_time_s,
        peak_bytes=candidate.trial.peak_bytes,
        policies=tuple(candidate.choice.policies),
    )


def _on(options: Sequence[PricedOption], num_devices: int) -> tuple[PricedOption, ...]:
    """The options of stages on this number of devices."""
    return tuple(o for o in options if o.mesh.num_devices == num_devices)
