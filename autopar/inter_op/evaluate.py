"""Evaluation of answers of the stage search: built to the last instruction, simulated, compared."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Sequence

from autopar.errors import BatchMismatchError, SolverError, UnsupportedError
from autopar.inter_op.build_stages import MicrobatchedStep, StageChoice, build, evened
from autopar.inter_op.stage_costs import PricedOption
from autopar.inter_op.staged import StagedStep
from autopar.intra_op.baselines import baseline_bindings
from autopar.plan.context import PlanningContext, Rejection
from autopar.plan.schema import PipelineTrial
from autopar.sharding.constraints import Binding
from autopar.sharding.pins import PinsOnMesh
from autopar.sharding.semantics import annotate_semantics
from autopar.solver import NoStages, Schedule, Stage, StagePlan, StageProblem, best_stages

SOURCE = "pipelines"
# Of the plans that are best by the search's model, for each number of micro-batches in turn, so many are worked out
# exactly, and the best of one stage.
MOST_BUILT = 3
# Where such a plan needs more memory than the search took it for, it is searched again with so much less, so often:
# for one schedule, for another, and once more.
TIGHTENED = 3


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PipelineCandidate:
    """A pipeline, built out, and what was weighed on the way to it."""

    staged: StagedStep
    choice: StageChoice
    weighed: tuple[PipelineTrial, ...]
    hoist_casts: bool
    pins: PinsOnMesh | None = None
    name: str = ""
    source: str = SOURCE

    @property
    def step_time_s(self) -> float:
        return self.staged.simulation.step_time_s

    @property
    def peak_bytes(self) -> int:
        return max(self.staged.simulation.peak_bytes)

    @property
    def text(self) -> str:
        text = f"{self.staged.graph.num_microbatches} micro-batches, {self.choice.text}"
        return text + (f", {self.name}" if self.name else "")

    @property
    def trial(self) -> PipelineTrial:
        """What it came to."""
        return PipelineTrial(text=self.text, step_time_s=self.step_time_s, peak_bytes=self.peak_bytes)

    def fits(self, limit_bytes: int) -> bool:
        return self.peak_bytes <= limit_bytes

    def rank(self, limit_bytes: int) -> tuple[bool, float]:
        """Smaller is better: what fits first, then what is faster."""
        return not self.fits(limit_bytes), self.step_time_s


class PipelineEvaluator:
    """The answers of the search over stages, worked out exactly: the fastest on the virtual clock that fits.

    `in_stages` cuts a step with a scan in small parts into as many as there are stages. Others that fit and take at
    most `context.keep_tolerance` times as long as the best, or as what it must beat, are kept beside it; 1 keeps none.
    """

    def __init__(
        self,
        context: PlanningContext,
        cuts: dict[int, MicrobatchedStep],
        in_stages: Callable[[MicrobatchedStep, int], MicrobatchedStep],
    ) -> None:
        self.context, self.cuts, self.in_stages = context, cuts, in_stages
        self.cluster, self.limit_bytes, self.deadline = context.cluster, context.limit_bytes, context.deadline
        self.to_beat_s, self.keep_tolerance = context.to_beat_s, context.keep_tolerance
        self.weighed: list[PipelineTrial] = []
        self.built: set[tuple[int, StageChoice]] = set()  # with fewer bytes the programme may give an answer again
        self.not_built: list[Rejection] = []
        self.best: PipelineCandidate | None = None
        self.kept: list[PipelineCandidate] = []
        # The best of so many stages in so many micro-batches, and the bytes that the tables took it for.
        self.best_of: dict[tuple[int, int], tuple[PipelineCandidate, int]] = {}

    def search(
        self,
        problems: Sequence[StageProblem],
        of_problem: Sequence[tuple[int, tuple[PricedOption, ...]]],
        first_alone: int,
        within: float,
    ) -> Sequence[StagePlan | NoStages]:
        """Solves the problems, of which those from `first_alone` on are about one number of stages, and works the best
        answers out. Where the fastest needs more memory than there is, all are solved again, those of schedules that
        did with so much less. `of_problem` is each one's number of micro-batches with its options. Returns the answers
        at the limit itself.
        """
        first_answers: Sequence[StagePlan | NoStages] = ()
        searched = list(problems)
        for tightened in range(1 + TIGHTENED):
            with self.context.progress.pass_("stages"):
                several, alone = searched[:first_alone], searched[first_alone:]
                answers = [*best_stages(several, within), *best_stages(alone, 1.0)]
            first_answers = first_answers or answers
            plans = {number: answer for number, answer in enumerate(answers) if isinstance(answer, StagePlan)}
            kinds = {n: self.kind(of_problem[n][0], plan) for n, plan in plans.items() if n < first_alone}
            ranked = in_turn((kind, plans[n].step_time_s, n) for n, kind in kinds.items())
            _, alone_at = min(
                ((plan.step_time_s, n) for n, plan in plans.items() if n >= first_alone), default=(0.0, None)
            )
            if alone_at is not None:
                ranked.insert(MOST_BUILT, alone_at)
            most = 1 if tightened else MOST_BUILT + (alone_at is not None)
            too_large = self.run([(problems[n], plans[n], *of_problem[n]) for n in ranked], most, within)
            if not too_large or self.deadline.passed:
                break
            searched = [dataclasses.replace(p, limit_bytes=too_large.get(p.schedule, p.limit_bytes)) for p in searched]
        return first_answers

    def kind(self, m: int, plan: StagePlan) -> tuple[int, int]:
        """What answers are alike in: micro-batches, and stages where they are equal parts of a scan."""
        return m, len(plan.stages) if self.cuts[m].step.parts > 1 else 0

    def run(
        self,
        ranked: Sequence[tuple[StageProblem, StagePlan, int, tuple[PricedOption, ...]]],
        most: int,
        within: float,
    ) -> dict[Schedule, int]:
        """Works out at most so many more of some answers, which come fastest first, as far as the tables say that they
        are `within` so many times of the best one's time.
        Where the fastest does not fit: of each schedule of which one did not the bytes to keep to, for plans that need
        as much more than the search takes them for.
        """
        too_large: dict[Schedule, int] = {}
        fastest_fits = True
        built = 0
        for problem, answer, m, options in ranked:
            choice, estimated_s = choice_of(problem, answer, options), answer.step_time_s
            if (m, choice) in self.built:
                continue
            over = self.best is None or not self.best.fits(self.limit_bytes)
            beaten = self.best is not None and not over and estimated_s >= within * self.best.trial.step_time_s
            late = self.deadline.passed and (not over or self.to_beat_s < math.inf)
            if beaten or late or built >= most or estimated_s > 1.2 * self.to_beat_s:
                text, peak_bytes = f"{m} micro-batches, {choice.text}", max(answer.peak_bytes)
                self.weighed.append(PipelineTrial(text=text, step_time_s=estimated_s, peak_bytes=peak_bytes))
                why = self.deadline.text if late else "others are faster by the tables of layer costs"
                self.not_built.append(
                    Rejection(
                        source=SOURCE,
                        text=text,
                        why=f"not worked out: {why}",
                        step_time_s=estimated_s,
                        peak_bytes=peak_bytes,
                    )
                )
                continue
            built += 1
            self.built.add((m, choice))
            found = self.evaluate(m, choice)
            self.weighed.append(found.trial)
            kind = len(choice.first_layers), m
            known = self.best_of.get(kind)
            if known is None or found.rank(self.limit_bytes) < known[0].rank(self.limit_bytes):
                self.best_of[kind] = found, max(answer.peak_bytes)
            self.weigh(found)
            if not found.fits(self.limit_bytes):
                fastest_fits = fastest_fits and built > 1
                tighter_bytes = max(answer.peak_bytes) * self.limit_bytes // found.trial.peak_bytes
                too_large.setdefault(problem.schedule, tighter_bytes)
        return {} if fastest_fits else too_large

    def evaluate(
        self, m: int, choice: StageChoice, binding: Binding | None = None, name: str = ""
    ) -> PipelineCandidate:
        """A choice to the last instruction, on the virtual clock; on the mesh of a binding, as that asks.

        Raises: SolverError where there is none in time.
        """
        constraints = None
        if binding is not None:
            mesh, constraints = binding.on(self.cluster.num_devices)
            choice = dataclasses.replace(choice, group_meshes=(mesh,), terms=(), over_limit=())
        with self.context.progress.pass_("build stages"):
            cut = self.cuts[m]
            if cut.step.parts > 1:
                cut = self.in_stages(cut, len(choice.first_layers))
                choice = evened(cut, choice)
            if binding is not None:
                cut = dataclasses.replace(cut, graph=annotate_semantics(cut.graph))
            staged = build(cut, choice, self.cluster, self.limit_bytes, self.deadline.solve_s(), constraints)
        return PipelineCandidate(staged=staged, choice=choice, weighed=(), hoist_casts=cut.hoist_casts, name=name)

    def refine_one_stage(self, counts: Iterable[float]) -> None:
        """Decides the best of one stage once more where it takes no longer than the best of all: with other counts of
        what computing hides, and as data parallelism and ZeRO do. Which of them waits least is known on the virtual
        clock alone.
        """
        one_stage = [found for (stages, _), (found, _) in self.best_of.items() if stages == 1]
        one = min(one_stage, key=lambda found: found.rank(self.limit_bytes), default=None)
        if one is None or self.best is None:
            return
        is_best = one.fits(self.limit_bytes) and one.step_time_s <= self.best.step_time_s
        if one is not self.best and not is_best:
            return
        m, choice = one.staged.graph.num_microbatches, one.choice
        keeps_all = dataclasses.replace(choice, policies=("nothing",) * len(choice.policies))
        for (name, binding), saving in itertools.product(baseline_bindings(), dict.fromkeys((choice, keeps_all))):
            self.refined(m, saving, name, binding)
        for count in counts:
            terms = tuple(dataclasses.replace(t, exposed_fraction=count) for t in choice.terms)
            if terms != choice.terms:
                self.refined(m, dataclasses.replace(choice, terms=terms), f"hidden sends count {count:g}")

    def refined(self, m: int, choice: StageChoice, name: str, binding: Binding | None = None) -> None:
        """Works another choice out, while there is time."""
        if self.deadline.passed:
            return
        try:
            found = self.evaluate(m, choice, binding, name)
        except SolverError:  # what was found stands
            return
        self.weighed.append(found.trial)
        self.weigh(found)

    def weigh(self, found: PipelineCandidate) -> None:
        """Takes what was worked out for the best, where it is, and keeps it where it is near."""
        if self.best is None or found.rank(self.limit_bytes) < self.best.rank(self.limit_bytes):
            self.best = found
        self.keep(found)

    def keep(self, found: PipelineCandidate) -> None:
        """Keeps what was worked out as long as it is near, where that was asked for: plans take much memory."""
        if self.keep_tolerance > 1:
            longest_s = self.longest_s
            self.kept.append(found)
            self.kept = [one for one in self.kept if one.fits(self.limit_bytes) and one.step_time_s <= longest_s]

    @property
    def longest_s(self) -> float:
        """What takes longer is not near."""
        best_s = self.best.step_time_s if self.best is not None and self.best.fits(self.limit_bytes) else math.inf
        return self.keep_tolerance * min(self.to_beat_s, best_s)

    def work_out_near(
        self,
        problems: Sequence[StageProblem],
        of_problem: Sequence[tuple[int, tuple[PricedOption, ...]]],
        answers: Sequence[StagePlan | NoStages],
    ) -> None:
        """Works out, where others than the best were asked for, of each number of stages the answer that is fastest by
        the tables, if it is near the best, which stays what it was: nothing where that does not fit. `of_problem` as in
        `search`.
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
            answer, (m, options) = answers[n], of_problem[n]
            assert isinstance(answer, StagePlan), "others are not among the fastest"
            choice = choice_of(problems[n], answer, options)
            if estimated_s > self.longest_s or (m, choice) in self.built:
                continue
            self.built.add((m, choice))
            try:
                found = self.evaluate(m, choice)
            except (SolverError, UnsupportedError, BatchMismatchError):  # there are others
                continue
            self.weighed.append(found.trial)
            self.keep(found)

    def found(self) -> tuple[PipelineCandidate | Rejection, ...]:
        """The best, those that were kept beside it, the fastest first, and what was not worked out; nothing where all
        was not.
        """
        if self.best is None:
            return ()
        near = sorted((kept for kept in self.kept if kept is not self.best), key=lambda kept: kept.step_time_s)
        candidates = (dataclasses.replace(made, weighed=tuple(self.weighed)) for made in (self.best, *near))
        return (*candidates, *self.not_built)


def in_turn(plans: Iterable[tuple[Hashable, float, int]]) -> list[int]:
    """Of plans given as (kind, seconds, number) the numbers: the fastest of each kind, fastest first, then the second
    of each, and so on.
    """
    turn: dict[Hashable, int] = {}
    found: list[tuple[int, int]] = []
    for kind, _, number in sorted(plans, key=lambda plan: plan[1]):
        turn[kind] = turn.get(kind, -1) + 1
        found.append((turn[kind], number))
    return [number for _, number in sorted(found, key=lambda entry: entry[0])]


def choice_of(problem: StageProblem, answer: StagePlan, options: Sequence[PricedOption]) -> StageChoice:
    """What an answer of the dynamic programme stands for."""
    taken = [options[stage.option] for stage in answer.stages]
    groups = len(answer.stages) // problem.chunks
    return StageChoice(
        schedule=problem.schedule.value,
        chunks=problem.chunks,
        first_layers=tuple(stage.first for stage in answer.stages),
        group_meshes=tuple(o.mesh for o in taken[:groups]),
        policies=tuple(
            o.policy for o, stage in zip(taken, answer.stages, strict=True) for _ in range(stage.first, stage.last)
        ),
        terms=tuple(o.terms for o in taken),
        over_limit=tuple(
            o.over_limit or _state_bytes(_cheapest(options, o), stage) > problem.limit_bytes
            for o, stage in zip(taken, answer.stages, strict=True)
        ),
    )


def _cheapest(options: Sequence[PricedOption], like: PricedOption) -> PricedOption:
    """The option on the same mesh, with the same recomputation, that was decided where bytes cost least."""
    alike = (o for o in options if (o.mesh, o.policy) == (like.mesh, like.policy))
    return min(alike, key=lambda o: o.terms.s_per_byte)


def _state_bytes(option: PricedOption, stage: Stage) -> int:
    return int(option.option.state_bytes[stage.first : stage.last].sum())


def retry_without_hoisted_casts(
    search: Callable[[bool], tuple[Sequence[PipelineCandidate | Rejection], bool]], limit_bytes: int
) -> Sequence[PipelineCandidate | Rejection]:
    """What a search finds, best first, that is told whether cheap copies of the state are hoisted out of the
    micro-batches: they are, where that fits, and where it says that making them anew would not help.
    """
    found, may_help = search(True)
    best = found[0]
    if not may_help or (isinstance(best, PipelineCandidate) and best.fits(limit_bytes)):
        return found
    leaner, _ = search(False)
    best_leaner = leaner[0]
    if isinstance(best_leaner, Rejection):
        return found
    if isinstance(best, Rejection):
        return leaner
    return min((best, found), (best_leaner, leaner), key=lambda pair: pair[0].rank(limit_bytes))[1]
