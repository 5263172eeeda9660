"""Source of candidates: the search over stages, submeshes, numbers of micro-batches and schedules, and the bound below
which no pipeline is.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence

import numpy as np

from autopar.common.text import text_of_bytes, text_of_s
from autopar.cost.cost_model import NodeCosts, cost_model, in_turn_s
from autopar.errors import AutoparError, BatchMismatchError, MixedExamplesError, UnsupportedError
from autopar.frontend.callbacks import refuse_callbacks
from autopar.hardware.cluster import Cluster
from autopar.ir.graph import OpGraph, Section
from autopar.ir.layout import LogicalMesh
from autopar.passes.assign_stages import balanced, held_through, more_layers
from autopar.passes.layers import MAX_LAYERS
from autopar.passes.remat_cheap import copies_state
from autopar.passes.smaller_step import num_examples
from autopar.passes.split_scan import SplitStep, divisors, finest_parts
from autopar.plan.context import PlanningContext, Rejection
from autopar.plan.options import Effort, PlanRequest
from autopar.runtime.schedule import V_SHAPED
from autopar.search.inter_op.build_stages import MicrobatchedStep, cut_layers
from autopar.search.inter_op.decide_stages import StageChoice
from autopar.search.inter_op.evaluate import PEAK_ERROR, PipelineEvaluator
from autopar.search.inter_op.one_stage import (
    MicrobatchCounts,
    first_that_may_fit,
    least_in_turn_s,
    of_recipes,
    recompute_in_some_layers,
    refine_in_other_counts,
    refine_one_stage,
)
from autopar.search.inter_op.pipeline_candidate import (
    SOURCE,
    PipelineCandidate,
    PipelineEstimate,
    retry_without_hoisted_casts,
)
from autopar.search.inter_op.requested import split_step, whole_batch
from autopar.search.inter_op.search_space import (
    NEAR_THE_BEST,
    Tried,
    chunk_numbers,
    is_long,
    microbatch_numbers,
    next_for_stages,
    next_numbers,
    numbers_within,
    odd_part,
    schedules_of,
    submesh_sizes,
    uneven_stages,
)
from autopar.search.inter_op.stage_costs import PricedOption
from autopar.search.inter_op.stage_problems import (
    AnsweredProblems,
    MeshScreen,
    Posed,
    PosedProblems,
    by_tables,
    why_no_pipeline,
)
from autopar.search.inter_op.staged import least_handed_out_s
from autopar.solver import Schedule, StageOption, StagePlan, StageProblem, best_stages

# What every pipeline of a step holds through its micro-batches, and whether the devices of a cluster can.


def held_bytes(graph: OpGraph) -> int:
    """Bytes that all devices together hold through the last micro-batch, however its layers are cut into stages and
    sharded.
    """
    return sum(graph.values[v].nbytes for v in held_through(graph))


def why_too_large(graph: OpGraph, cluster: Cluster, limit_bytes: int) -> str | None:
    """Why no pipeline of this graph fits into `limit_bytes` on each device; None where one may fit."""
    held = held_bytes(graph)
    if held <= limit_bytes * cluster.num_devices:
        return None
    return (
        f"the state and the sums of {graph.num_microbatches} micro-batches, split over all devices, take "
        f"{text_of_bytes(held / cluster.num_devices)} on each"
    )


def fewest_microbatches(microbatched: MicrobatchedStep, cluster: Cluster, limit_bytes: int) -> int:
    """The least number of micro-batches in which the step may fit, whatever layers recompute: their inputs are kept."""
    held, m = held_bytes(microbatched.graph), microbatched.graph.num_microbatches
    kept = m * sum(microbatched.layers.crossing_bytes)
    return math.ceil(kept / max(limit_bytes * cluster.num_devices - held, 1))


# The least time of a pipeline in a number of micro-batches, from its operations alone.


def least_pipeline_s(
    microbatched: MicrobatchedStep, cluster: Cluster, request: PlanRequest, under_s: float = math.inf
) -> float:
    """Seconds of a pipeline of this step in two stages or more at least, whatever its decisions; `under_s` where no
    pipeline takes less than that.

    It is the best division into stages by the tables, were no memory short, nothing sent, and every operation of a
    stage shared evenly by the devices of it, each of which runs its kernels, which take their time however small they
    are. Nor are tasks handed out faster than a process can.
    """
    problems = tuple(_problems(microbatched, cluster, request))
    if not problems:
        return math.inf
    handed_s = least_handed_out_s(cluster, 2, problems[0].num_microbatches)
    if handed_s >= under_s:
        return under_s
    return max(handed_s, min(answer.bound_s for answer in best_stages(problems, under_s=under_s)))


def _problems(microbatched: MicrobatchedStep, cluster: Cluster, request: PlanRequest) -> Iterator[StageProblem]:
    """Of each schedule, the problem with stages on fewer devices than all."""
    num_layers, num_devices = len(microbatched.layers), cluster.num_devices
    sizes = [size for size in submesh_sizes(cluster, request, num_layers) if size < num_devices]
    costs = NodeCosts(microbatched.folded.graph, cost_model(cluster, LogicalMesh(axis_sizes=(num_devices,))))
    options = tuple(_shared_option(microbatched, costs, size) for size in sizes)
    for name in schedules_of(request, cluster) if options else ():
        for chunks in chunk_numbers(request, name, num_layers):
            yield StageProblem(
                options=options,
                num_devices=num_devices,
                num_layers=num_layers,
                num_microbatches=microbatched.graph.num_microbatches,
                schedule=Schedule(name),
                limit_bytes=1,
                host_devices=cluster.domain_devices,
                chunks=chunks,
                fixed_num_stages=request.num_stages,
            )


def _shared_option(microbatched: MicrobatchedStep, costs: NodeCosts, size: int) -> StageOption:
    """The layers on so many devices: the operations of each, shared by all of these. What several layers read that have
    each their own copy, and what is done once in a step, is left out. Equal layers take as long as the one that stands
    for them in the tables.
    """
    folded, num_layers = microbatched.folded, len(microbatched.layers)
    of_layer = {section: dict.fromkeys(folded.weight, 0.0) for section in (Section.FORWARD, Section.BACKWARD)}
    for op in folded.graph.block.ops:
        layer = folded.layer_of[op.id]
        if layer is not None and op.section in of_layer:
            step_s = in_turn_s([op], lambda each: costs.shared_s(each, size))
            runs = folded.weight[layer] * folded.graph.num_microbatches
            of_layer[op.section][layer] += step_s / runs
    seconds = {section: np.array([of[layer] for layer in folded.stands_for]) for section, of in of_layer.items()}
    none, no_bytes = np.zeros(num_layers), np.zeros(num_layers, dtype=np.int64)
    return StageOption(
        num_devices=size,
        forward_s=seconds[Section.FORWARD],
        backward_s=seconds[Section.BACKWARD],
        weight_s=seconds[Section.BACKWARD],  # may all be put off
        once_s=none,
        state_bytes=no_bytes,
        saved_bytes=no_bytes,
        working_bytes=no_bytes,
        send_s=none,
    )


# The largest estimated memory of one stage, over the limit, that is built: the tables count values that layers share
# once for each layer.
OVERSTATED = 2.0
TRAINED_IN_A_V = tuple(name for name in V_SHAPED if name != "inference-v")
_NOTHING = Tried(step_time_s=math.inf)


def pipeline_candidates(context: PlanningContext) -> Iterator[PipelineCandidate | Rejection]:
    """The fastest pipeline that the request admits, one that fits where there is one; or the reason why none may be
    faster than `context.to_beat_s`. It is followed by other pipelines that fit and take at most
    `context.keep_tolerance` times as long.

    For each number of micro-batches: layers, a table of the cost of each layer on each mesh, then the dynamic programme
    over stages for all of them together. The best few answers are lowered to instructions and simulated. Where no
    program fits, one stage comes first, and several only where a bound says that they may be faster. One stage is tried
    in other numbers of micro-batches too; where it is the best, it is decided again, under other weights and under data
    parallelism and ZeRO. A scan over layers is priced in small parts, and built in as many equal parts as
    there are stages, on equal submeshes. Where nothing fits, the search is repeated with copies of the state made in
    each micro-batch. With a tolerance, the best of each number of stages is built if it may be within the tolerance.

    Raises: InvalidArgumentError for a schedule without a model here; errors of the split into micro-batches, and for
    callbacks: the caller knows whether there is an alternative.
    """
    traced = context.traced
    refuse_callbacks(traced.jaxpr, traced.name)

    def search(hoist_casts: bool) -> tuple[Sequence[PipelineCandidate | Rejection], bool]:
        request = context.request
        wants_others = request.effort is Effort.THOROUGH or context.keep_tolerance > 1
        is_free = not wants_others and not request.names_pipeline and context.cluster.num_devices > 1
        return _Search(
            context=context,
            hoist_casts=hoist_casts,
            screens=not wants_others,
            begins_with_one=is_free and not context.program_fits,
        ).run()

    yield from retry_without_hoisted_casts(search, context.limit_bytes)


@dataclasses.dataclass(slots=True, kw_only=True)
class _Search:
    """One search, with copies of the state hoisted out of the micro-batches or made in each of them.

    Attributes:
        screens: Meshes far from the fastest are left out.
        begins_with_one: One stage comes first, and several only where a bound says that they may be faster.
        step: The step with its scans in the parts that stages are made of.
        cuts: The step in the numbers of micro-batches in which a pipeline was looked for.
    """

    context: PlanningContext
    hoist_casts: bool
    screens: bool
    begins_with_one: bool = False
    step: SplitStep = dataclasses.field(init=False)
    cuts: dict[int, MicrobatchedStep] = dataclasses.field(init=False)
    posed: PosedProblems = dataclasses.field(init=False)
    builder: PipelineEvaluator = dataclasses.field(init=False)
    answered: AnsweredProblems = dataclasses.field(init=False)

    def run(self) -> tuple[Sequence[PipelineCandidate | Rejection], bool]:
        """(results, best first; whether copies of the state in each micro-batch may help)"""
        traced, cluster = self.context.traced, self.context.cluster
        step = self.step = self.in_finest_parts()
        self.cut_first()
        if not self.cuts:
            return (self.nothing("a bound says that none is faster"),), False
        self.cuts, too_large = self.that_may_fit()
        if not self.cuts:
            return (self.nothing(too_large),), False
        screen: MeshScreen | None = None
        if self.screens:
            equal, longest_s = step.parts > 1, self.context.to_beat_s
            if self.walks():  # which begins in a number of micro-batches that may be far from the best
                longest_s *= NEAR_THE_BEST**2
            screen = MeshScreen(num_devices=cluster.num_devices, are_equal=equal, longest_s=longest_s)
        self.posed = PosedProblems(self.context, step, screen)
        self.builder = PipelineEvaluator(
            self.context,
            self.cuts,
            functools.cache(lambda groups, m: self.microbatched(self.split(len(groups), groups), m)),
        )
        within = 1.0 if is_long(traced) else NEAR_THE_BEST
        to_beat_s, tolerance = self.context.to_beat_s, self.context.keep_tolerance
        self.answered = AnsweredProblems(self.context.progress, within, tolerance, math.inf)
        alone: dict[int, Tried] = {}
        first = tuple(self.cuts)
        if self.begins_with_one:
            alone = self.begin_with_one_stage()
            self.answered.to_beat_s = min(to_beat_s, self.fastest_s())
        found_late = self.context.deadline.passed and self.fastest_s() < math.inf
        if not self.begins_with_one or (self.context.stages_may_beat(self.answered.to_beat_s) and not found_late):
            self.several_stages(first)
            if not self.context.deadline.passed:
                self.one_stage_otherwise(alone)
        self.builder.settle()
        if self.begins_with_one and self.fastest_s() == math.inf and self.answered.to_beat_s < to_beat_s:
            return dataclasses.replace(self, begins_with_one=False).run()  # an estimate said that one stage fits
        self.builder.work_out_near(self.answered.posed, self.answered.answers)
        if screen is not None and screen.has_left_out and self.needs_left_out(screen, self.builder.best):
            return dataclasses.replace(self, screens=False).run()
        found_any = any(isinstance(answer, StagePlan) for answer in self.answered.answers)
        slow = self.builder.best is None and found_any  # the reason is not memory
        copies = not slow and any(copies_state(microbatched.graph) for microbatched in self.cuts.values())
        nothing = self.nothing(why_no_pipeline(self.answered.answers))
        others = uneven_stages(step, cluster)
        if self.begins_with_one and not self.answered.several and self.answered.to_beat_s < math.inf:
            why = self.why_not_several(self.answered.to_beat_s)
            others.append(Rejection(source=SOURCE, text="several stages", why=why))
        return (*(self.builder.results() or (nothing,)), *others), copies

    def fastest_s(self) -> float:
        """The time of the fastest that was evaluated and fits; inf: there is none."""
        best = self.builder.best
        return best.step_time_s if best is not None and best.fits(self.context.limit_bytes) else math.inf

    def several_stages(self, first: Sequence[int]) -> None:
        """Several stages in the `first` numbers of micro-batches and beside the best of them: by the tables, then
        built.
        """
        walks, requested = self.walks(), self.context.request.num_microbatches
        if self.answered.to_beat_s < self.context.to_beat_s:
            self.posed.screen_from(NEAR_THE_BEST**2 * self.answered.to_beat_s if walks else self.answered.to_beat_s)
            first = self.may_beat(self.answered.to_beat_s, first)
        if first and self.several_may_pay(first):
            for problems in self.first_problems(first):
                self.answered.solve(problems)
                self.posed.screen_from(NEAR_THE_BEST * self.answered.fastest_s)
            if self.step.parts == 1 and not self.begins_with_one:
                self.answered.solve_one_stage()  # plain gradient accumulation is always built too
        tried = set(first[:1]) if walks else set(first)
        if walks:
            for more in self.stages_in_other_numbers(self.answered, tried):
                self.answered.solve(more)
                self.posed.screen_from(NEAR_THE_BEST * self.answered.fastest_s)
        within, several = self.answered.within, len(self.answered.several)
        self.builder.search(self.answered.posed, several, within, answers=self.answered.answers)
        if requested is None:
            for more in self.stages_in_other_numbers(self.builder, tried):
                self.answered.add(more, self.builder.search(more, len(more), within, within * self.builder.longest_s))

    def may_beat(self, to_beat_s: float, first: Sequence[int]) -> tuple[int, ...]:
        """Of the first numbers of micro-batches those in which several stages may take less; where that is none of a
        walk, the next larger one, as they wait less for one another there.
        """
        found = tuple(m for m in first if self.several_may_be_faster(self.cuts[m], to_beat_s))
        if found or not self.walks():
            return found
        for m in [m for m in divisors(num_examples(self.context.traced)) if m >= 2 * max(first)][:2]:
            more = self.cut_in(m)
            if more is not None and self.several_may_be_faster(more, to_beat_s):
                return (m,)
        return ()

    def begin_with_one_stage(self) -> dict[int, Tried]:
        """One stage in the numbers of micro-batches in which it was tried: it bounds what several may take. It ends
        where it is far above what these take at least.
        """
        least_s = min(least_pipeline_s(cut, self.context.cluster, self.context.request) for cut in self.cuts.values())
        alone = self.first_of_one_stage(NEAR_THE_BEST**2 * least_s)
        self.one_stage_in_other_numbers(alone, NEAR_THE_BEST * least_s)
        return alone

    def one_stage_otherwise(self, alone: dict[int, Tried]) -> None:
        """One stage in other numbers of micro-batches, where it may come near the best, and under other decisions."""
        requested, limit_bytes = self.context.request.num_microbatches, self.context.limit_bytes
        if requested is not None and not self.builder.one_stage_fits(requested):  # one stage is always tried
            self.one_stage(requested, int(OVERSTATED * limit_bytes))
        if requested is None:
            found = alone or self.answered.of_one_stage()
            if not found and math.isinf(self.fastest_s()):
                found = self.first_of_one_stage()
            self.one_stage_in_other_numbers(found)
        row = LogicalMesh(axis_sizes=(self.context.cluster.num_devices,))
        hides = self.context.cluster.num_devices > 1 and cost_model(self.context.cluster, row).overlap.kinds
        others = self.other_numbers()
        refine_one_stage(self.builder, others, (0.0,) if hides else ())
        refine_in_other_counts(self.builder, others)
        ladders = [ladder for of in self.posed.decided.policies.values() for ladder in of.ladders()]
        recompute_in_some_layers(self.builder, others, ladders)
        self.in_a_v()

    def needs_left_out(self, screen: MeshScreen, best: PipelineCandidate | PipelineEstimate | None) -> bool:
        """Whether meshes that a screen left out may be needed, as the tables promised too much: none fits, where there
        is no other plan of the step, or all are slow.
        """
        if best is None or not best.fits(self.context.limit_bytes):
            return self.context.to_beat_s == math.inf
        step_time_s = min(best.step_time_s, self.context.to_beat_s)
        return screen.has_left_out_for_pipeline and step_time_s > screen.longest_s

    def why_not_several(self, one_stage_s: float) -> str:
        """The reason for which several stages were not searched for beside one that takes so long."""
        least_s = self.context.least_s
        if self.context.stages_may_beat(one_stage_s):
            return "not searched: a bound says that none is faster"
        below = f"{1 - least_s / one_stage_s:.1%} below the best so far"
        return f"not searched: no plan can take less than {text_of_s(least_s)}, {below}"

    def nothing(self, why: str) -> Rejection:
        """That there is no pipeline, and a note on it where no program fits either."""
        return Rejection(source=SOURCE, why=f"no pipeline: {why}", is_note=self.context.to_beat_s == math.inf)

    def walks(self) -> bool:
        """Whether several stages are tried in one number of micro-batches, and by the tables in others from there on
        (`stages_in_other_numbers`), rather than in a few and then as built: where tables and pipelines take long.
        """
        traced, request = self.context.traced, self.context.request
        is_thorough = request.effort is Effort.THOROUGH or self.context.keep_tolerance > 1
        if request.num_microbatches is not None or is_thorough:
            return False
        # Micro-batches for odd numbers of hosts lie on no walk by halves.
        halves = odd_part(num_examples(traced), self.context.cluster) == 1
        return halves and (is_long(traced) or self.step.parts > 1)

    def first_problems(self, first: Sequence[int]) -> Iterator[list[Posed]]:
        """The problems of the first numbers of micro-batches; of a search that walks through numbers, those of several
        stages in the first number, and in the others those of one stage on all devices.
        """
        for number, m in enumerate(first):
            least = self.context.cluster.num_devices if number and self.walks() else 0
            most = self.context.cluster.num_devices - 1 if self.begins_with_one else math.inf
            if least <= most:
                yield self.posed.of(self.cuts[m], sizes_between=(least, most))

    def several_may_pay(self, first: Sequence[int]) -> bool:
        """Whether several stages may be faster than one. Where the whole batch is asked for as one micro-batch they
        wait for one another; then one is built first, and is enough if it fits and sends little (`least_in_turn_s`).
        """
        if not any(self.several_may_be_faster(self.cuts[m]) for m in first):
            return False
        request, cluster = self.context.request, self.context.cluster
        in_turn = request.num_microbatches == 1 and request.admits_one_program
        wants_others = request.effort is Effort.THOROUGH or self.context.keep_tolerance > 1
        sizes = self.posed.sizes(len(self.cuts[1].layers)) if in_turn else ()
        smaller = [size for size in sizes if size < cluster.num_devices]
        if not smaller or wants_others:
            return True
        self.one_stage(1, self.context.limit_bytes)
        self.builder.settle()
        found = self.builder.best_built
        if found is None or not found.fits(self.context.limit_bytes):
            return True
        return found.step_time_s > least_in_turn_s(found.staged, max(smaller))

    def in_finest_parts(self) -> SplitStep:
        """The step with its scans in the parts that stages are made of: whole on one device, which has one stage."""
        traced, is_single = self.context.traced, self.context.cluster.num_devices == 1
        return self.split(1 if is_single else finest_parts(traced, self.context.rules, MAX_LAYERS))

    def split(self, parts: int, groups: tuple[int, ...] = ()) -> SplitStep:
        """The step with its scans in so many parts, on these groups of devices, by default one of its own each: the
        same for every number of micro-batches.
        """
        return split_step(self.context.traced, parts, self.context.rules, self.context.graphs, groups)

    def microbatched(self, step: SplitStep, m: int) -> MicrobatchedStep:
        rules, whole = self.context.rules, self.context.graph
        if step.parts > 1:
            whole = whole_batch(step, rules, self.context.graphs)
        return cut_layers(step, m, rules, whole, hoist_casts=self.hoist_casts)

    def admitted(self, m: int) -> MicrobatchedStep:
        """The step in m micro-batches. One that mixes the examples of some mixes those of their parts: where it mixes
        those of m, the fewest that m is a multiple of are asked once, for all of their multiples.

        Raises: as `cut_layers`.
        """
        alike = dataclasses.replace(self.context.traced, scan_recompute="")  # which changes no results
        key = "micro-batches that mix", self.step.parts
        mixed: dict[int, MixedExamplesError] = self.context.graphs.of(alike, key, dict)
        for number, error in mixed.items():
            if m % number == 0:
                raise error.with_traceback(None)
        try:
            return self.microbatched(self.step, m)
        except MixedExamplesError as error:
            mixed[m] = error
            with contextlib.suppress(UnsupportedError, BatchMismatchError):
                self.admitted(divisors(m)[1])
            raise

    def cut_first(self) -> None:
        """Cuts the step in each number of micro-batches that it admits, where it may be faster so; a step that mixes
        its examples, as one where no program fits: stages and recomputation need less memory. Raises: the reason, where
        it admits none.
        """
        cuts = self.cuts = {}
        error_of_last: AutoparError | None = None
        is_cut = False
        for m in microbatch_numbers(self.context.traced, self.context.cluster, self.context.request):
            # A search that walks through numbers begins with one; of a scan, one stage is searched for in several.
            if cuts and (self.context.deadline.passed or (self.walks() and self.step.parts == 1)):
                break
            try:
                with self.context.progress.pass_(f"{m} micro-batches"):
                    found = self.admitted(m)
            except (UnsupportedError, BatchMismatchError) as error:
                error_of_last = error  # other numbers may be traceable
                continue
            is_cut = True
            if self.may_be_faster(found):
                cuts[m] = found
        if error_of_last is not None and not is_cut:
            fits = self.context.fastest_s < math.inf
            if fits or self.context.request.num_microbatches is not None or self.cut_in(1) is None:
                raise error_of_last

    def that_may_fit(self) -> tuple[dict[int, MicrobatchedStep], str]:
        """(the numbers of micro-batches in which a pipeline may fit, why others have none)"""
        if self.context.request.in_host:
            return self.cuts, ""  # part of the state is not on the devices
        at, limit_bytes = self.context.cluster, self.context.limit_bytes
        why = {m: why_too_large(cut.graph, at, limit_bytes) for m, cut in self.cuts.items()}
        texts = [text for text in why.values() if text is not None]
        return {m: cut for m, cut in self.cuts.items() if why[m] is None}, texts[-1] if texts else ""

    def cut_in(self, m: int) -> MicrobatchedStep | None:
        """The step in a number of micro-batches, which is added to the dictionary; None where it does not admit it, or
        no pipeline of it may be faster.
        """
        if m not in self.cuts:
            try:
                with self.context.progress.pass_(f"{m} micro-batches"):
                    found = self.admitted(m)
            except (UnsupportedError, BatchMismatchError):
                return None  # as in `cut_first`
            if not self.may_be_faster(found):
                return None
            self.cuts[m] = found
        return self.cuts[m]

    def may_be_faster(self, microbatched: MicrobatchedStep) -> bool:
        """Whether a pipeline in these micro-batches may take less than the best program that fits, or is wanted beside
        it. One stage is no faster than that: it does what a program does, in more tasks. The time to beat may be that
        of a step that is written in another way, which one stage may be faster than.
        """
        context = self.context
        is_of_another = not context.program_fits and context.least_s < context.keep_tolerance * context.to_beat_s
        return is_of_another or self.several_may_be_faster(microbatched)

    def several_may_be_faster(self, microbatched: MicrobatchedStep, to_beat_s: float = math.inf) -> bool:
        """Whether several stages in these micro-batches may take less than the plan that is there, and `to_beat_s`."""
        context = self.context
        too_long_s = context.keep_tolerance * min(context.to_beat_s, to_beat_s)
        return too_long_s == math.inf or (
            least_pipeline_s(microbatched, context.cluster, context.request, too_long_s) < too_long_s
        )

    def other_numbers(self) -> MicrobatchCounts:
        """The numbers of micro-batches of one stage."""
        num_examples_, requested = num_examples(self.context.traced), self.context.request.num_microbatches
        return MicrobatchCounts(
            numbers=divisors(num_examples_) if requested is None else (requested,),
            cut=self.cut_in,
            num_examples=num_examples_,
            num_devices=self.context.cluster.num_devices,
            least_s=self.context.least_s,
        )

    def stages_in_other_numbers(
        self, found: AnsweredProblems | PipelineEvaluator, tried: set[int]
    ) -> Iterator[list[Posed]]:
        """The problems of several stages in numbers of micro-batches beside the fastest (`next_for_stages`), one number
        at a time, on submeshes of about the sizes of its stages, smaller ones for smaller micro-batches, while it has
        several. Adds to the dictionary, and to the numbers that were tried. Where that is one, the first two steps of
        the walk may both bring several stages nearer to the best.
        """
        numbers = divisors(num_examples(self.context.traced))
        while not self.context.deadline.passed:
            best = found.best_of_several_stages(NEAR_THE_BEST if len(tried) > 1 else NEAR_THE_BEST**2)
            if best is None:
                return
            m = next((m for m in next_for_stages(numbers, tried, best.num_microbatches) if m not in tried), None)
            if m is None:
                return
            tried.add(m)
            if (microbatched := self.cut_in(m)) is not None:
                near = min(best.sizes, key=lambda size: (-best.sizes.count(size), size))
                more = m / best.num_microbatches
                sizes = near / (2 * max(more, 1)), 2 * near / min(more, 1)
                yield self.posed.of(microbatched, sizes_between=sizes)

    def in_a_v(self) -> None:
        """Builds the best pipeline also in a V, where it has several equal groups of devices and is far from the bound:
        two stages of about equal arithmetic on each group, under each such schedule of a step with a backward pass.
        """
        self.builder.settle()
        best, request = self.builder.best_built, self.context.request
        if best is None or request.schedule is not None or request.chunks is not None:
            return
        groups, m = best.choice.group_meshes, best.num_microbatches
        cut, parts = self.cuts[m], self.step.parts
        layers, graph = cut.layers, cut.graph
        has_room = 4 <= 2 * len(groups) <= min(len(layers), m) and (parts == 1 or parts % (2 * len(groups)) == 0)
        has_backward = any(op.section is Section.BACKWARD for op in graph.block.ops)
        if (
            len(set(groups)) > 1
            or not has_room
            or not has_backward
            or not self.context.stages_may_beat(best.step_time_s)
        ):
            return
        first_layers = balanced(layers, 2 * len(groups), more_layers(graph))
        # Stages of a scan have one policy, which the choice that was built has for each stage.
        policies = best.choice.policies if parts == 1 else best.choice.policies[:1] * len(layers)
        plain = dataclasses.replace(best.choice, policies=policies, first_layers=first_layers, terms=(), over_limit=())
        for name in TRAINED_IN_A_V:
            # Its policies are for the micro-batches in flight of another schedule.
            most_bytes = (1 + PEAK_ERROR) * self.context.limit_bytes
            self.builder.refined(m, dataclasses.replace(plain, schedule=name, chunks=2), "", most_bytes=most_bytes)

    @property
    def number_that_fits(self) -> int | None:
        """The number of micro-batches in which one stage is known to fit."""
        numbers = (candidate.num_microbatches for candidate in self.context.fitting)
        return next((number for number in numbers if number is not None), None)

    def first_of_one_stage(self, longest_s: float = math.inf) -> dict[int, Tried]:
        """One stage in the number of micro-batches in which it is known to fit, else in the fewest in which it may fit
        without recomputation, where recipes come first, else in the most; empty where it does not fit, where the work
        of its devices takes longer than `longest_s`, and where a recipe is as near to the bound as a search is worth.
        """
        limit_bytes, cluster, most = self.context.limit_bytes, self.context.cluster, max(self.cuts)
        m = self.number_that_fits
        if m is None:
            keeps_all = StageChoice(
                schedule=schedules_of(self.context.request, cluster)[0],
                chunks=1,
                first_layers=(0,),
                group_meshes=(LogicalMesh(axis_sizes=(cluster.num_devices,)),),
                policies=("nothing",) * len(self.cuts[most].layers),
            )
            # In one micro-batch, what keeps all is a program.
            fewest = fewest_microbatches(self.cuts[most], cluster, limit_bytes)
            fewest, others = max(fewest, 1 + self.context.weighed_one_program), self.other_numbers()
            m = first_that_may_fit(self.builder, others, fewest, keeps_all) or most
            of_recipes(self.builder, others, m, keeps_all)
            if not self.context.stages_may_beat(self.fastest_s()):
                return {}
        screen = None
        if longest_s < math.inf:
            screen = MeshScreen(num_devices=cluster.num_devices, is_of_one=True, longest_s=longest_s)
        for number in sorted({m, max(m, most)}):
            found = self.one_stage(number, int(OVERSTATED * limit_bytes), screen)
            if self.builder.one_stage_fits(number):
                return {number: found}
        return {}

    def one_stage_in_other_numbers(self, known: dict[int, Tried], longest_s: float = math.inf) -> None:
        """One stage in fewer and more micro-batches while that is faster (`next_numbers`), and may come near the best,
        or takes no longer than `longest_s`. Adds to the dictionaries.

        Args:
            known: One stage by the tables in each number of micro-batches in which it fits.
        """
        limit_bytes, overstated = self.context.limit_bytes, OVERSTATED
        numbers, largest = divisors(num_examples(self.context.traced)), max(known, default=0)
        share, rest = divmod(numbers[-1], self.context.cluster.num_devices)
        whole = () if rest else divisors(share)
        known |= {m: _tried(self.builder, m, each) for m, each in known.items()}
        while known and not self.context.deadline.passed:
            best_s = self.fastest_s()
            if best_s > longest_s or (len(known) > 1 and not self.context.stages_may_beat(best_s)):
                return
            # In one micro-batch it is a program, of which those that fit were found.
            whole_too = numbers if not self.context.program_fits else [m for m in numbers if m > 1 or m in known]
            within = numbers_within(whole_too, known, NEAR_THE_BEST * best_s)
            near = next_numbers(within, known, limit_bytes, largest, whole)
            if not near:
                return
            m = near[0]  # what comes of it decides on the others
            found = self.one_stage(m, int(overstated * limit_bytes))
            if (1, m) in self.builder.best_of:
                candidate, estimated_bytes = self.builder.best_of[1, m]
                overstated = max(1.0, estimated_bytes / candidate.peak_bytes)
            known[m] = _tried(self.builder, m, found)

    def one_stage(self, m: int, limit_bytes: int, screen: MeshScreen | None = None) -> Tried:
        """One stage in a number of micro-batches, as built where that fits, else by the tables; inf seconds: it does
        not fit, the step admits no such split, or the screen leaves out all meshes. The pipeline is built where it may
        be the best; where it does not fit, the tables say what would.
        """
        microbatched = self.cut_in(m)
        if microbatched is None:
            return _NOTHING
        with self.context.progress.pass_("layer costs"):
            priced = self.posed.priced(microbatched, [self.context.cluster.num_devices], screen)
        name = schedules_of(self.context.request, self.context.cluster)[0]
        for problem, options in self.posed.on_schedule(self.cuts[m], name, priced, (1,)) if priced else ():
            limited = dataclasses.replace(problem, limit_bytes=limit_bytes)
            # The tables err, and an estimate takes little time.
            is_estimated = self.context.keep_tolerance <= 1 and self.builder.short(m) is not None
            within = NEAR_THE_BEST if is_estimated else 1.0
            (answer,) = self.builder.search([(limited, options)], 0, within)
            if not self.builder.one_stage_fits(m):
                self.recomputing_otherwise(m, priced, within)
            built = self.builder.best_of.get((1, m))
            if built is not None and self.builder.one_stage_fits(m):
                return Tried(step_time_s=built[0].step_time_s)
            if built is not None:
                tighter_bytes = built[1] * self.context.limit_bytes // built[0].peak_bytes
                (answer,) = best_stages([dataclasses.replace(limited, limit_bytes=tighter_bytes)])
            return by_tables(limited, answer, options) if isinstance(answer, StagePlan) else _NOTHING
        return _NOTHING

    def recomputing_otherwise(self, m: int, priced: tuple[PricedOption, ...], within: float) -> None:
        """Builds one stage in m micro-batches under each kind of recomputation: the bytes of the tables err by kind.
        First that of fewest bytes; where it does not fit none is expected to, else the faster ones too.
        """
        limit_bytes = int(OVERSTATED * self.context.limit_bytes)
        name = schedules_of(self.context.request, self.context.cluster)[0]
        answers: list[tuple[StageProblem, StagePlan, tuple[PricedOption, ...]]] = []
        for policies in dict.fromkeys(option.policies for option in priced):
            alike = tuple(option for option in priced if option.policies == policies)
            for problem, options in self.posed.on_schedule(self.cuts[m], name, alike, (1,)):
                limited = dataclasses.replace(problem, limit_bytes=limit_bytes)
                (answer,) = best_stages([limited])
                if isinstance(answer, StagePlan):
                    answers.append((limited, answer, options))
        by_bytes = sorted(answers, key=lambda each: max(each[1].peak_bytes))
        by_time = sorted(by_bytes[1:], key=lambda each: each[1].step_time_s)
        for number, each in enumerate((*by_bytes[:1], *by_time)):
            if number and not self.builder.one_stage_fits(m):
                return
            self.builder.run([each], 1, within)


def _tried(builder: PipelineEvaluator, m: int, known: Tried) -> Tried:
    """One stage in m micro-batches as far as it was built, with the time that is known of it."""
    if (1, m) not in builder.best_of:
        return known
    candidate, _ = builder.best_of[1, m]
    return Tried(
        step_time_s=known.step_time_s,
        peak_bytes=candidate.peak_bytes,
        policies=tuple(candidate.choice.policies),
    )
