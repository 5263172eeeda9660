"""The best plan of a manual way: its settings by bounds and estimates, and plans of those that may be the best.

Estimates are made on fewer of a step's equal layers, by the rules of `autopar.inter_op.truncated_model` and
`autopar.inter_op.evaluate`: one may be off by `ESTIMATE_ERROR` and `PEAK_ERROR`, so what may be the best by it is
planned, and the rest is not.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable

from msgspec.structs import replace

from autopar.common.progress import Progress
from autopar.compiler.planner import make_plan, planning_context
from autopar.cost.cost_model import least_time_s
from autopar.errors import AutoparError, MemoryLimitError
from autopar.inter_op.build_stages import recomputed
from autopar.inter_op.evaluate import PEAK_ERROR
from autopar.inter_op.requested import estimated_one_stage, requested_step
from autopar.inter_op.truncated_model import ESTIMATE_ERROR
from autopar.manual.walks import LINE_ERROR, Attempt, Outcome, Problem, Walk, least_bubbles
from autopar.passes.remat import policies_of
from autopar.plan.context import PlanningContext
from autopar.plan.options import PlanRequest
from autopar.plan.plan import Plan
from autopar.plan.summary import fullest
from autopar.sharding.binding import most_parts

# How far above the limit an estimate may be of what fits as a plan: for devices that share matrices, decisions that
# need less memory are found for all layers that are not found for a few.
LEANER_ERROR = 0.25


def best_case(outcome: Outcome) -> tuple[int, float]:
    """The rank of what an estimate may come to at best, to be compared with that of a plan."""
    time_s, peak_bytes = (1 - ESTIMATE_ERROR) * outcome.step_time_s, int(outcome.peak_bytes / (1 + PEAK_ERROR))
    return dataclasses.replace(outcome, step_time_s=time_s, peak_bytes=peak_bytes).rank()


class Estimates:
    """Of the settings of a step on a cluster."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.rules, self.graphs = problem, problem.rules, problem.graphs

    def outcome(self, attempt: Attempt, best: Outcome | None) -> Outcome | None:
        """What an attempt comes to; None where only a plan tells: where there is no estimate, or the attempt may be the
        best and an estimate may be wrong in whether it fits.
        """
        if not attempt.frontier:
            return self.slow_stages(attempt.options, best)
        one_program = attempt.options.admits_one_program
        request = dataclasses.replace(attempt.options, num_stages=1)
        try:
            context = self.context(request)
            found = self.state_exceeds(context) or self.too_slow(context, best)
            if found is not None or (one_program and self.problem.whole_fits):
                return found  # an estimate of one program only tells what is far from fitting
            found = self.estimated(context)
        except AutoparError:  # the plan is refused too, and says why
            return None
        if found is None:
            return None
        if one_program:  # not in one stage, though nearly that: what is far from fitting is told alone
            return found if found.peak_bytes > (1 + LINE_ERROR) * found.limit_bytes else None
        near = 1 / (1 + PEAK_ERROR) < found.peak_bytes / found.limit_bytes < 1 + LEANER_ERROR
        may_be_best = best is None or best_case(found) < best.rank()
        return None if near and may_be_best else found

    def context(self, request: PlanRequest) -> PlanningContext:
        cluster, progress = self.problem.cluster, Progress("", show=False)
        return planning_context(self.problem.traced, cluster, request, self.rules, progress, graphs=self.graphs)

    def state_exceeds(self, context: PlanningContext) -> Outcome | None:
        """A request under which the arguments alone exceed the memory, each split along every axis that may split it:
        without a recipe, over all devices.
        """
        request, graph, needed_bytes = context.request, context.views.annotated, 0.0
        first, n = len(graph.constants), context.cluster.num_devices
        in_host = {graph.block.inputs[first + i] for i in request.in_host}
        bound = request.binding.on(n) if request.binding is not None else None
        if bound is not None:
            in_host |= bound[1].in_host(graph)
        for at in graph.donated:
            value = graph.values[graph.block.inputs[at]]
            needed_bytes += 0 if value.id in in_host else value.nbytes / (most_parts(value, *bound) if bound else n)
        if needed_bytes <= context.limit_bytes:
            return None
        return Outcome(
            step_time_s=math.inf, peak_bytes=int(needed_bytes), limit_bytes=context.limit_bytes, of_state=True
        )

    def state_alone(self, request: PlanRequest) -> Outcome | None:
        """What is known of a request that was refused for its memory, if it names no stages, from its state alone."""
        if request.num_stages not in (None, 1):
            return None
        try:
            return self.state_exceeds(self.context(request))
        except AutoparError:  # the refusal of the plan says why
            return None

    def too_slow(self, context: PlanningContext, best: Outcome | None) -> Outcome | None:
        """A setting whose arithmetic alone takes longer than the best so far, shared by all devices without waiting, in
        whatever number of micro-batches: in one of them no operation takes longer for each example.
        """
        if best is None or not best.fits or context.request.recompute == "nothing":
            return None
        least_s = sum(self.least_s(context))
        if least_s < best.step_time_s:
            return None
        return Outcome(step_time_s=least_s, peak_bytes=0, limit_bytes=context.limit_bytes, too_slow=True)

    def slow_stages(self, request: PlanRequest, best: Outcome | None) -> Outcome | None:
        """Stages that take longer than the best so far by arithmetic alone, shared by all devices, and by the bubbles
        that they have in their micro-batches however unequal they are.
        """
        stages, m = request.num_stages or 1, request.num_microbatches or 1
        if best is None or not best.fits:
            return None
        try:
            context = self.context(dataclasses.replace(request, num_stages=1))
            passes_s, once_s = self.least_s(context)
        except AutoparError:  # the plan is refused too, and says why
            return None
        least_s = passes_s + once_s
        if request.schedule in (None, "1f1b") and (request.chunks or 1) == 1:
            least_s = max(least_s, least_bubbles(stages, m) * passes_s)
        if least_s < best.step_time_s:
            return None
        return Outcome(step_time_s=least_s, peak_bytes=0, limit_bytes=context.limit_bytes, too_slow=True)

    def least_s(self, context: PlanningContext) -> tuple[float, float]:
        """The least seconds of (the passes, what runs once a step) under the recomputation of a request, shared by all
        devices, in whatever number of micro-batches.
        """
        request, traced, cluster = context.request, context.traced, context.cluster

        def least() -> tuple[float, float]:
            whole = dataclasses.replace(context, request=dataclasses.replace(request, num_microbatches=1))
            microbatched = requested_step(whole, True).microbatched
            graph = recomputed(microbatched, policies_of(request.recompute, len(microbatched.layers))).graph
            passes = tuple(op for op in graph.block.ops if op.section.repeats)
            passes_only = dataclasses.replace(graph, block=replace(graph.block, ops=passes))
            passes_s = least_time_s(passes_only, cluster)
            return passes_s, max(0.0, least_time_s(graph, cluster) - passes_s)

        return self.graphs.of(traced, ("least time", cluster, request.recompute), least)

    def estimated(self, context: PlanningContext) -> Outcome | None:
        """What a requested step in one stage comes to, as `requested_pipelines` takes it."""
        binding = context.request.binding
        if binding is not None and binding.offloads_activations:
            return None
        found = estimated_one_stage(context, keeps=True)
        if found is None:
            return None
        return Outcome(step_time_s=found.step_time_s, peak_bytes=found.peak_bytes, limit_bytes=context.limit_bytes)


MOST_ATTEMPTS = 40


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """What a way came to. `plan` is the best that fits, or else one that was built though it does not fit; `error` is
    why there is none; `text` is the setting of either.

    `attempts`: how many settings were seen, by a plan, an estimate or a bound, of which `fitting` are known to fit;
    `cut_short`: why not all of them were. `planned_s`: seconds of this machine.
    """

    text: str = ""
    plan: Plan | None = None
    outcome: Outcome | None = None
    error: AutoparError | None = None
    attempts: int = 0
    fitting: int = 0
    cut_short: str = ""
    planned_s: float = 0.0

    @property
    def excess_bytes(self) -> int:
        """Bytes of a device by which the setting that is the nearest to fitting exceeds the limit."""
        return 0 if self.outcome is None else max(0, self.outcome.peak_bytes - self.outcome.limit_bytes)


def made_of(
    problem: Problem,
    settings: Walk,
    most_attempts: int = MOST_ATTEMPTS,
    report: Callable[[Made], None] = lambda made: None,
    progress: Progress | None = None,
) -> Made:
    """The best of the settings of a way; `report` is told after each of them what it came to so far, `progress` shows
    which is planned.
    """
    making = _Making(problem, report, progress or Progress("", show=False))
    outcome = None
    while True:
        try:
            attempt = settings.send(outcome)
        except StopIteration:
            break
        if making.made.attempts == most_attempts:
            making.made = dataclasses.replace(making.made, cut_short=f"ended after {most_attempts} attempts")
            break
        outcome = making.seen(attempt)
    making.settle()
    return making.made


def outcome_of(plan: Plan) -> Outcome:
    """What a plan comes to, on the device that comes nearest to its limit."""
    full = fullest(plan.record)
    assert full.limit_bytes is not None, "make_plan always has a limit"
    predicted = plan.predicted
    return Outcome(
        step_time_s=predicted.step_time_s,
        peak_bytes=full.peak_bytes,
        limit_bytes=full.limit_bytes,
        work_s=(1 - predicted.bubble_fraction) * predicted.step_time_s if plan.record.pipeline is not None else 0.0,
    )


def _state_error(problem: Problem, outcome: Outcome) -> MemoryLimitError:
    return MemoryLimitError(
        where=f"the state of {problem.traced.name} under the recipe",
        limit_bytes=outcome.limit_bytes,
        needed_bytes=outcome.peak_bytes,
        largest=[],
        hint="choose a recipe under which more devices share the state",
    )


class _Making:
    """What a way has come to, while its attempts are gone through."""

    def __init__(self, problem: Problem, report: Callable[[Made], None], progress: Progress) -> None:
        self.problem, self.report, self.progress, self.made = problem, report, progress, Made()
        self.begun = time.perf_counter()
        self.estimates = Estimates(problem)
        self.waiting: list[tuple[Attempt, Outcome]] = []  # estimates of which no plan was made

    def seen(self, attempt: Attempt) -> Outcome | None:
        """What an attempt comes to, by an estimate or a plan; None where it is refused, but not for its memory."""
        known = [outcome for _, outcome in self.waiting]
        known += [self.made.outcome] if self.made.outcome is not None and self.made.plan is not None else []
        outcome = self.estimates.outcome(attempt, min(known, key=Outcome.rank, default=None))
        self.made = dataclasses.replace(self.made, attempts=self.made.attempts + 1)
        if outcome is None:
            return self.planned(attempt)
        if outcome.of_state:
            self.kept(attempt, outcome, None, _state_error(self.problem, outcome))
        elif not outcome.too_slow:
            self.waiting.append((attempt, outcome))
            self.made = dataclasses.replace(self.made, fitting=self.made.fitting + outcome.fits)
        return outcome

    def planned(self, attempt: Attempt, *, is_counted: bool = False) -> Outcome | None:
        """What the plan of an attempt comes to, which is kept where it is the best. `is_counted`: among `fitting`."""
        problem, plan, outcome = self.problem, None, None
        error: AutoparError | None = None
        progress = self.progress.within(attempt.text)
        try:
            plan = make_plan(
                problem.traced, problem.trees, problem.cluster, attempt.options, problem.rules, progress, problem.graphs
            )
            outcome = outcome_of(plan)
        except MemoryLimitError as refusal:
            refused = Outcome(step_time_s=math.inf, peak_bytes=refusal.needed_bytes, limit_bytes=refusal.limit_bytes)
            outcome = self.estimates.state_alone(attempt.options) or refused
            error = refusal
        except AutoparError as refusal:
            error = refusal
        fitting = self.made.fitting + (plan is not None and outcome is not None and outcome.fits) - is_counted
        self.made = dataclasses.replace(self.made, fitting=fitting, planned_s=time.perf_counter() - self.begun)
        self.kept(attempt, outcome, plan, error)
        self.report(self.made)
        return outcome

    def kept(self, attempt: Attempt, outcome: Outcome | None, plan: Plan | None, error: AutoparError | None) -> None:
        """Keeps what an attempt came to, where it is the best so far."""
        best = self.made.outcome
        if best is None or (outcome is not None and outcome.rank() < best.rank()):
            self.made = dataclasses.replace(self.made, text=attempt.text, plan=plan, outcome=outcome, error=error)

    def settle(self) -> None:
        """Plans what is estimated, the best first, until nothing else may be better than what was planned."""
        while self.waiting:
            best = self.made.outcome
            better = [pair for pair in self.waiting if best is None or best_case(pair[1]) < best.rank()]
            if not better:
                break
            attempt, outcome = min(better, key=lambda pair: pair[1].rank())
            self.waiting.remove((attempt, outcome))
            self.planned(attempt, is_counted=outcome.fits)
        self.made = dataclasses.replace(self.made, planned_s=time.perf_counter() - self.begun)
