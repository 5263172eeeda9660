"""The best plan of a manual way: its settings by bounds and estimates, and plans of those that may be the best."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable

from autopar.common.progress import Progress
from autopar.compiler.planner import make_plan
from autopar.errors import AutoparError, MemoryLimitError
from autopar.manual.estimates import Estimates, best_case
from autopar.manual.settings import Attempt, Outcome, Problem, Walk
from autopar.plan.plan import Plan
from autopar.plan.summary import fullest

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
