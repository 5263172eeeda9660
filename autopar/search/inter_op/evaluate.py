"""Exact evaluation of answers of the stage search: pipelines are built, simulated and compared."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

from autopar.common.text import text_of_bytes
from autopar.errors import BatchMismatchError, PlanMismatchError, SolverError, UnsupportedError
from autopar.ir.binding import Binding
from autopar.ir.constraints import Constraints
from autopar.passes.assign_stages import held_through
from autopar.plan.context import PlanningContext, Rejection
from autopar.plan.options import Effort
from autopar.plan.schema import CandidateRecord
from autopar.runtime.schedule import mesh_of_stages
from autopar.search.inter_op.build_stages import MicrobatchedStep, build, evened
from autopar.search.inter_op.decide_stages import BuildLimits, StageChoice, choice_of
from autopar.search.inter_op.pipeline_candidate import SOURCE, PipelineCandidate, PipelineEstimate
from autopar.search.inter_op.search_space import BestStages
from autopar.search.inter_op.stage_costs import PricedOption
from autopar.search.inter_op.stage_problems import Posed, in_turn
from autopar.search.inter_op.truncated_model import ESTIMATE_ERROR, TruncatedModel, estimate, least_bytes, short_step
from autopar.search.intra_op.ilp import ObjectiveWeights
from autopar.search.intra_op.mesh_searches import leanest_bindings
from autopar.solver import NoStages, Schedule, StagePlan, StageProblem, best_stages, fullness

# The number of plans that are built: the best by the tables, for each number of micro-batches in turn. The best of one
# stage comes on top.
MOST_BUILT = 3
# The number of searches with a lower limit, where a built plan needs more memory than estimated: for one schedule, for
# another, and once more.
TIGHTENED = 3
# The part by which an estimate's peak may be too large. Seen with BERT of 340M parameters. A peak that is too small is
# seen where it is built.
PEAK_ERROR = 0.06


def held_too_much(source: str, num_microbatches: int, name: str, held_bytes: int) -> Rejection:
    """A recipe of one stage that is not evaluated, as a device has no room for what it holds through a step."""
    text, held = f"{num_microbatches} micro-batches, {name}", text_of_bytes(held_bytes)
    return Rejection(source=source, text=text, why=f"not evaluated: each device holds {held}", peak_bytes=held_bytes)


class PipelineEvaluator:
    """Evaluates answers of the stage search, and keeps the fastest that fits.

    What has one stage of many equal layers is estimated on fewer of them, and built where that makes it the best
    (`settle`). Everything else is built.

    `in_stages` gives scans in as many parts as there are stages, by the groups of devices of these, in micro-batches.
    Candidates that fit, and take at most `context.keep_tolerance` times as long as the best candidate or as
    `context.to_beat_s`, are kept; 1 keeps none.
    """

    def __init__(
        self,
        context: PlanningContext,
        cuts: dict[int, MicrobatchedStep],
        in_stages: Callable[[tuple[int, ...], int], MicrobatchedStep],
    ) -> None:
        self.context, self.cuts, self.in_stages = context, cuts, in_stages
        self.cluster, self.limit_bytes, self.deadline = context.cluster, context.limit_bytes, context.deadline
        self.to_beat_s, self.keep_tolerance = context.to_beat_s, context.keep_tolerance
        self.weighed: list[CandidateRecord] = []
        self.built: set[tuple[int, StageChoice]] = set()  # a search under a lower limit may repeat an answer
        self.not_built: list[Rejection] = []
        self.best: PipelineCandidate | PipelineEstimate | None = None
        self.best_built: PipelineCandidate | None = None
        self.estimated: list[PipelineEstimate] = []
        self.short_steps: dict[int, TruncatedModel | None] = {}  # by the number of micro-batches
        self.least_bytes_of: dict[tuple[int, tuple[str, ...]], int] = {}  # by that, and what each layer recomputes
        self.kept: list[PipelineCandidate] = []
        self.refinements: list[PipelineEstimate] = []  # in short: plans take much memory
        # For (stages, micro-batches): the best candidate, and its bytes by the tables.
        self.best_of: dict[tuple[int, int], tuple[PipelineEstimate, int]] = {}

    def search(
        self,
        posed: Sequence[Posed],
        first_alone: int,
        within: float,
        under_s: float = math.inf,
        answers: Sequence[StagePlan | NoStages] = (),
    ) -> Sequence[StagePlan | NoStages]:
        """Solves the problems and builds the best answers; the problems from `first_alone` on have one fixed number of
        stages. Where the fastest pipeline exceeds the memory, all problems are solved again, with a lower limit for the
        schedules that exceeded it. `answers`: those under the limit itself, where they are known. Returns these, of
        several stages those that take less than `under_s`.
        """
        first_answers, problems, options = answers, [problem for problem, _ in posed], [options for _, options in posed]
        searched = list(problems)
        for tightened in range(1 + TIGHTENED):
            if tightened or not answers:
                with self.context.progress.pass_("stages"):
                    several, alone = searched[:first_alone], searched[first_alone:]
                    answers = [*best_stages(several, within, under_s), *best_stages(alone, 1.0)]
            first_answers = first_answers or answers
            plans = {number: answer for number, answer in enumerate(answers) if isinstance(answer, StagePlan)}
            kinds = {n: self.kind(problems[n].num_microbatches, plan) for n, plan in plans.items() if n < first_alone}
            ranked = in_turn((kind, plans[n].step_time_s, n) for n, kind in kinds.items())
            _, alone_at = min(
                ((plan.step_time_s, n) for n, plan in plans.items() if n >= first_alone), default=(0.0, None)
            )
            if alone_at is not None:
                ranked.insert(MOST_BUILT, alone_at)
            max_built = 1 if tightened else MOST_BUILT + (alone_at is not None)
            too_large = self.run([(problems[n], plans[n], options[n]) for n in ranked], max_built, within)
            if not too_large or self.deadline.passed:
                break
            searched = [dataclasses.replace(p, limit_bytes=too_large.get(p.schedule, p.limit_bytes)) for p in searched]
        return first_answers

    def kind(self, m: int, plan: StagePlan) -> tuple[int, int]:
        """The group in which answers are ranked: micro-batches, and the number of equal parts of a scan."""
        return m, len(plan.stages) if self.cuts[m].step.parts > 1 else 0

    def run(
        self,
        ranked: Sequence[tuple[StageProblem, StagePlan, tuple[PricedOption, ...]]],
        max_built: int,
        within: float,
    ) -> dict[Schedule, int]:
        """Builds at most `max_built` of the answers, which come fastest first, as far as their estimated time is less
        than `within` times the time of the best.

        Where the fastest does not fit, returns a lower limit for each schedule that exceeded the memory, scaled by the
        ratio of the exact peak to the estimated one.
        """
        too_large: dict[Schedule, int] = {}
        fastest_fits = True
        built = 0
        for problem, answer, options in ranked:
            m = problem.num_microbatches
            choice, estimated_s = choice_of(problem, answer, options), answer.step_time_s
            estimated_bytes = round(fullness(problem, answer.stages) * problem.limit_bytes)
            if (m, choice) in self.built:
                continue
            over = self.best is None or not self.best.fits(self.limit_bytes)
            beaten = self.best is not None and not over and estimated_s >= within * self.best.step_time_s
            late = self.deadline.passed and (not over or self.to_beat_s < math.inf)
            # On one device the tables overstate what a few numbers of micro-batches take.
            is_slow = self.cluster.num_devices > 1 and estimated_s > 1.2 * self.to_beat_s
            if beaten or late or built >= max_built or is_slow:
                text, peak_bytes = choice.text(m), estimated_bytes
                why = self.deadline.text if late else "others are faster by the tables of layer costs"
                self.not_built.append(
                    Rejection(
                        source=SOURCE,
                        text=text,
                        why=f"not evaluated: {why}",
                        step_time_s=estimated_s,
                        peak_bytes=peak_bytes,
                    )
                )
                continue
            built += 1
            self.built.add((m, choice))
            candidate = self.evaluate(m, choice)
            self.weighed.append(candidate.record)
            kind = len(choice.first_layers), m
            best_of_kind = self.best_of.get(kind)
            if best_of_kind is None or candidate.rank(self.limit_bytes) < best_of_kind[0].rank(self.limit_bytes):
                in_short = candidate.in_short if isinstance(candidate, PipelineCandidate) else candidate
                self.best_of[kind] = in_short, estimated_bytes
            self.weigh(candidate)
            if not candidate.fits(self.limit_bytes):
                fastest_fits = fastest_fits and built > 1
                tighter_bytes = estimated_bytes * self.limit_bytes // candidate.peak_bytes
                too_large.setdefault(problem.schedule, tighter_bytes)
        return {} if fastest_fits else too_large

    def evaluate(
        self,
        m: int,
        choice: StageChoice,
        binding: Binding | None = None,
        name: str = "",
        to_beat_s: float = math.inf,
        most_bytes: float = math.inf,
    ) -> PipelineCandidate | PipelineEstimate:
        """The time and the memory of a choice; under a binding, on its mesh and under its constraints. What takes
        `to_beat_s` or longer, or more than `most_bytes`, is not made to fit.

        Raises: SolverError where there is no solution in time.
        """
        limits = dataclasses.replace(self.limits(to_beat_s), most_bytes=most_bytes)
        short = self.short(m) if len(choice.first_layers) == 1 and self.keep_tolerance <= 1 else None
        if short is None:
            return self.build(m, choice, binding, name, limits)
        on_mesh, constraints = self.under(choice, binding)
        with self.context.progress.pass_("estimate stages"):
            found = estimate(short, on_mesh, self.cluster, limits, constraints)
        if found is None:
            return self.build(m, choice, binding, name, limits)
        return PipelineEstimate(
            num_microbatches=m,
            choice=choice,
            step_time_s=max(found.step_time_s, self.context.least_s),  # proven, where few layers say less
            peak_bytes=found.peak_bytes[0],
            binding=binding,
            name=name,
            on_mesh=on_mesh,
            to_beat_s=to_beat_s,
            rounds=found.rounds,
            least_s=found.least_s,
        )

    def short(self, m: int) -> TruncatedModel | None:
        """The step in m micro-batches with fewer of its equal layers."""
        if m not in self.short_steps:
            with self.context.progress.pass_("estimate stages"):
                self.short_steps[m] = short_step(self.cuts[m], self.cluster, self.context.least_s)
        return self.short_steps[m]

    def under(self, choice: StageChoice, binding: Binding | None) -> tuple[StageChoice, Constraints | None]:
        """A choice on the mesh of a binding, and its constraints."""
        if binding is None:
            return choice, None
        mesh, constraints = binding.on(self.cluster.num_devices)
        return dataclasses.replace(choice, group_meshes=(mesh,), terms=(), over_limit=()), constraints

    def limits(self, to_beat_s: float) -> BuildLimits:
        return BuildLimits(limit_bytes=self.limit_bytes, time_limit_s=self.deadline.solve_s(), to_beat_s=to_beat_s)

    def build(
        self,
        m: int,
        choice: StageChoice,
        binding: Binding | None,
        name: str,
        limits: BuildLimits,
        terms: Sequence[ObjectiveWeights] = (),
    ) -> PipelineCandidate:
        """A choice lowered to instructions and simulated, under these weights first. Raises: SolverError."""
        choice, constraints = self.under(choice, binding)
        with self.context.progress.pass_("make programs of the stages"):
            microbatched = self.cuts[m]
            if microbatched.step.parts > 1:
                num_groups = len(choice.first_layers) // choice.chunks
                microbatched = self.in_stages(mesh_of_stages(choice.schedule, num_groups, choice.chunks), m)
                choice = evened(microbatched, choice)
            if binding is not None:
                microbatched = microbatched.annotated
            staged = build(microbatched, choice, self.cluster, limits, constraints, terms=terms)
        hoist_casts = microbatched.hoist_casts
        return PipelineCandidate(staged=staged, choice=choice, weighed=(), hoist_casts=hoist_casts, name=name)

    def settle(self) -> None:
        """Builds estimates, the best first, until no other promises more than the best that is built, of those that may
        fit (`PEAK_ERROR`); with much effort also those that may be better by what estimates err.
        """
        while left := [e for e in self.estimated if self.may_be_better(e)]:
            found = min(left, key=lambda candidate: candidate.rank(self.limit_bytes))
            self.estimated.remove(found)
            row, m = self.weighed.index(found.record), found.num_microbatches
            first, limits = found.first_to_build(self.limit_bytes, PEAK_ERROR), self.limits(found.to_beat_s)
            if not found.fits(self.limit_bytes):  # leaner decisions do not either, but for the error of the estimate
                limits = dataclasses.replace(limits, decides_again=False)
            try:
                built = self.build(m, found.choice, found.binding, found.name, limits, first.terms if first else ())
            except SolverError:  # there are others
                continue
            self.weighed[row] = built.record
            self.weigh(built)
        self.best = self.best_built

    def may_be_better(self, estimate: PipelineEstimate) -> bool:
        fits = estimate.peak_bytes <= (1 + PEAK_ERROR) * self.limit_bytes
        error = ESTIMATE_ERROR if self.context.request.effort is Effort.THOROUGH else 0.0
        time_s = (1 - error) * estimate.step_time_s
        return self.best_built is None or (not fits, time_s) < self.best_built.rank(self.limit_bytes)

    def recipes(self, m: int) -> list[tuple[int, str, Binding]]:
        """Data parallelism and ZeRO of one stage in m micro-batches, each after the least bytes that a device holds
        through them, the leanest first.
        """
        graph = self.cuts[m].annotated.graph
        return leanest_bindings(self.cluster, graph, held_through(graph))

    def does_not_fit(self, m: int, name: str, held_bytes: int) -> None:
        """Remembers a recipe of one stage that is not evaluated for what it holds."""
        self.not_built.append(held_too_much(SOURCE, m, name, held_bytes))

    def least_bytes(self, m: int, choice: StageChoice) -> int:
        """The least bytes of a choice of one stage in m micro-batches; 0 where they are not found in time."""
        key = m, tuple(choice.policies)
        if key not in self.least_bytes_of:
            short, time_limit_s = self.short(m), self.deadline.solve_s()
            with self.context.progress.pass_("least memory"):
                try:
                    nbytes = least_bytes(self.cuts[m], choice, self.cluster, time_limit_s, short)
                except SolverError:
                    nbytes = 0
            self.least_bytes_of[key] = nbytes if short is None else int((1 - PEAK_ERROR) * nbytes)
        return self.least_bytes_of[key]

    def may_gain(self, m: int, choice: StageChoice) -> bool:
        """Whether a choice of one stage in m micro-batches, decided otherwise, may be faster than the best by more than
        estimates err, or with much effort by anything. It computes no less than others of the same recomputation in as
        many micro-batches or in fewer, whose matrices are larger.
        """
        if self.best is None or not self.best.fits(self.limit_bytes):
            return True
        worth = 0.0 if self.context.request.effort is Effort.THOROUGH else ESTIMATE_ERROR
        alike = (e for e in self.estimated if e.num_microbatches <= m and e.choice.policies == choice.policies)
        return max((e.least_s for e in alike), default=0.0) < (1 - worth) * self.best.step_time_s

    def refined(
        self, m: int, choice: StageChoice, name: str, binding: Binding | None = None, most_bytes: float = math.inf
    ) -> PipelineEstimate | None:
        """Evaluates another choice, before the deadline, and remembers what it came to; None: no solution in time.
        `most_bytes`: as of `evaluate`.
        """
        if self.deadline.passed:
            return None
        for known in self.refinements:  # a binding has a mesh of its own
            is_alike = known.choice == choice if binding is None else known.choice.policies == choice.policies
            if is_alike and known.num_microbatches == m and known.binding == binding:
                return known
        best = self.best if self.best is not None and self.best.fits(self.limit_bytes) else None
        to_beat_s = self.keep_tolerance * best.step_time_s if best is not None else math.inf
        try:
            candidate = self.evaluate(m, choice, binding, name, to_beat_s, most_bytes)
        except (SolverError, PlanMismatchError):  # the best stays
            return None
        self.weighed.append(candidate.record)
        self.weigh(candidate)
        found = PipelineEstimate(
            num_microbatches=m, choice=choice, step_time_s=candidate.step_time_s, peak_bytes=candidate.peak_bytes,
            to_beat_s=to_beat_s, binding=binding, name=name,
        )  # fmt: skip
        self.refinements.append(found)
        return found

    def as_it_is(
        self, m: int, choice: StageChoice, binding: Binding | None = None
    ) -> PipelineCandidate | PipelineEstimate | None:
        """What a choice comes to without anything done to make it fit; None: no solution in time."""
        try:
            return self.evaluate(m, choice, binding, to_beat_s=0.0)
        except (SolverError, PlanMismatchError):  # in other micro-batches a layer may have other values
            return None

    def weigh(self, candidate: PipelineCandidate | PipelineEstimate) -> None:
        """Makes a candidate the best, if it is, and keeps it, if it is within the tolerance."""
        if isinstance(candidate, PipelineCandidate):  # what is estimated is no plan yet
            self.context.weighed(candidate.step_time_s, candidate.peak_bytes)
        if self.best is None or candidate.rank(self.limit_bytes) < self.best.rank(self.limit_bytes):
            self.best = candidate
        if isinstance(candidate, PipelineEstimate):
            self.estimated.append(candidate)
            return
        if self.best_built is None or candidate.rank(self.limit_bytes) < self.best_built.rank(self.limit_bytes):
            self.best_built = candidate
        self.keep(candidate)

    def keep(self, candidate: PipelineCandidate) -> None:
        """Keeps a candidate while it is within the tolerance; without a tolerance, nothing: plans take much memory."""
        if self.keep_tolerance > 1:
            longest_s = self.longest_s
            self.kept.append(candidate)
            self.kept = [near for near in self.kept if near.fits(self.limit_bytes) and near.step_time_s <= longest_s]

    def one_stage_fits(self, m: int) -> bool:
        """Whether one stage was found that fits in m micro-batches."""
        found = self.best_of.get((1, m))
        return found is not None and found[0].fits(self.limit_bytes)

    def best_of_several_stages(self, within: float) -> BestStages | None:
        """The fastest that fits, where it takes at most `within` times as long as the best."""
        several = (c for (stages, _), (c, _) in self.best_of.items() if stages > 1 and c.fits(self.limit_bytes))
        found = min(several, key=lambda candidate: candidate.step_time_s, default=None)
        if found is None or self.best is None or found.step_time_s > within * self.best.step_time_s:
            return None
        return BestStages(found.num_microbatches, [mesh.num_devices for mesh in found.choice.group_meshes])

    @property
    def longest_s(self) -> float:
        """The longest step time within the tolerance."""
        best_s = self.best.step_time_s if self.best is not None and self.best.fits(self.limit_bytes) else math.inf
        return self.keep_tolerance * min(self.to_beat_s, best_s)

    def work_out_near(self, posed: Sequence[Posed], answers: Sequence[StagePlan | NoStages]) -> None:
        """With a tolerance, builds for each number of stages the answer that is fastest by the tables, if it may be
        within the tolerance of the best, which stays the best. Does nothing where the best does not fit.
        """
        if (
            self.deadline.passed
            or self.keep_tolerance <= 1
            or self.best is None
            or not self.best.fits(self.limit_bytes)
        ):
            return
        fastest: dict[int, tuple[float, int]] = {}
        for n, answer in enumerate(answers):
            if isinstance(answer, StagePlan):
                stages = len(answer.stages)
                fastest[stages] = min(fastest.get(stages, (math.inf, n)), (answer.step_time_s, n))
        for estimated_s, n in sorted(fastest.values()):
            answer, (problem, options) = answers[n], posed[n]
            assert isinstance(answer, StagePlan), "only plans are among the fastest"
            m, choice = problem.num_microbatches, choice_of(problem, answer, options)
            if estimated_s > self.longest_s or (m, choice) in self.built:
                continue
            self.built.add((m, choice))
            try:
                candidate = self.build(m, choice, None, "", self.limits(math.inf))
            except (SolverError, UnsupportedError, BatchMismatchError):  # there are others
                continue
            self.weighed.append(candidate.record)
            self.keep(candidate)

    def results(self) -> tuple[PipelineCandidate | Rejection, ...]:
        """The best, the others within the tolerance, fastest first, the rejections; nothing where none was built."""
        self.settle()
        best = self.best_built
        if best is None:
            return ()
        others = sorted((kept for kept in self.kept if kept is not best), key=lambda kept: kept.step_time_s)
        candidates = (dataclasses.replace(candidate, weighed=tuple(self.weighed)) for candidate in (best, *others))
        return (*candidates, *self.not_built)
