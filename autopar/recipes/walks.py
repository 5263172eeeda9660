"""The settings that a recipe leaves open, and how they are gone through: a frontier of memory, or a walk from the best.

A recipe such as data parallelism leaves open into how many micro-batches the batch is cut and what is recomputed, and
Megatron's grid leaves open how many devices share what. Each is a generator: it yields attempts, is told what each came
to, and goes on from that.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any

from autopar.hardware.cluster import Cluster
from autopar.ir.rules import RuleBook
from autopar.ir.traced_step import TracedStep
from autopar.plan.context import StepGraphs
from autopar.plan.options import PlanRequest
from autopar.plan.plan import Trees
from autopar.recipes import Recipe

RECOMPUTE = ("nothing", "matmuls", "input")  # in the order of what they save


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A traced step on a cluster. `request` is what holds for all plans of it, such as a memory limit; `examples` those
    of the batch, `experts` what a number of devices has to divide that shares experts (1: the step has none);
    `attends`: it has attention, whose positions can be shared. Plans of the step share `graphs`. `whole_fits`: a
    program of the whole batch is known to fit, so that others are likely to.
    """

    traced: TracedStep
    trees: Trees
    cluster: Cluster
    examples: int
    experts: int = 1
    attends: bool = True
    whole_fits: bool = False
    request: PlanRequest = dataclasses.field(default_factory=PlanRequest)
    rules: RuleBook = dataclasses.field(default_factory=RuleBook)
    graphs: StepGraphs = dataclasses.field(default_factory=StepGraphs)

    def under(self, recipe: Recipe) -> PlanRequest:
        """The request of a plan under a recipe."""
        return self.request.with_recipe(recipe.request)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One plan to be made. `frontier`: it is one of settings without stages of which the fastest that fits is looked
    for, so that an estimate or a bound may do for one that is slower or does not fit.
    """

    text: str
    options: PlanRequest
    frontier: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What an attempt came to; no time where a plan was refused for the memory it needs. `too_slow`: the time is a
    lower bound, which other settings are below, of this recomputation in any number of micro-batches. `of_state`: the
    peak is that of the state alone, which every number of micro-batches and all recomputation have. `work_s`: of a plan
    with stages the seconds in which a device waits for no other stage, in the mean.
    """

    step_time_s: float
    peak_bytes: int
    limit_bytes: int
    too_slow: bool = False
    of_state: bool = False
    work_s: float = 0.0

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= self.limit_bytes

    def rank(self) -> tuple[int, float]:
        """Smaller is better: what fits first, then what is faster; of what does not fit, the smaller; last what is
        known to exceed the memory by its state alone, whose peak is higher than that.
        """
        return (0, self.step_time_s) if self.fits else (1 + self.of_state, float(self.peak_bytes))


Walk = Generator[Attempt, Outcome | None, None]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One setting: devices that share each matrix, or each sequence, stages, ZeRO (`zero_size`: among so many devices,
    0 for all), examples of a copy in a micro-batch, recomputation, and the schedule of stages where it is not 1F1B.
    """

    tp: int = 1
    sp: int = 1
    pp: int = 1
    zero: int = 0
    zero_size: int = 0
    examples: int
    recompute: str
    schedule: str = ""

    def num_microbatches(self, problem: Problem) -> int | None:
        """None where the batch cannot be cut so, or the step names another number of micro-batches."""
        together = problem.cluster.num_devices // (self.tp * self.sp * self.pp) * self.examples
        number, rest = divmod(problem.examples, together)
        named = problem.request.num_microbatches
        return number if not rest and named in (None, number) else None

    def saves_more(self, other: Point) -> bool:
        """Whether the same setting needs less memory than another, or as much, by micro-batches and recomputation."""
        own, others = ((p.tp, p.sp, p.pp, p.zero, p.schedule) for p in (self, other))
        level = RECOMPUTE.index
        return own == others and self.examples <= other.examples and level(self.recompute) >= level(other.recompute)

    def needs_no_saving(self, other: Point) -> bool:
        """Whether the same setting saves more than another, which fits, and is not faster for it: with stages smaller
        micro-batches of the same recomputation leave smaller bubbles.
        """
        return self.saves_more(other) and (self.pp == 1 or self.recompute != other.recompute)

    def text(self, m: int) -> str:
        """The setting in words, which has m micro-batches."""
        stages = "groups of interleaved stages" if self.schedule == "interleaved" else "stages"
        among = f" in groups of {self.zero_size}" if self.zero_size else ""
        parts = (
            [f"tp {self.tp}"] * (self.tp > 1)
            + [f"sp {self.sp}"] * (self.sp > 1)
            + [f"{self.pp} {stages}"] * (self.pp > 1)
        )
        parts += [f"ZeRO {self.zero}{among}"] * (self.zero > 0) + [f"{m} micro-batches"] * (m > 1)
        parts += [self.schedule] * (self.schedule not in ("", "interleaved"))
        parts += [f"recompute {self.recompute}"] * (self.recompute != "nothing")
        return ", ".join(parts) or "whole batch"


FIRST_EXAMPLES = 4  # of each copy of the model in a micro-batch, where a walk begins that is lean
# How far above the limit the peak may be that a line through two settings gives for a third, which is tried all the
# same: four settings of data and tensor parallelism for BERT of 340M lay within 2 % of such lines.
LINE_ERROR = 0.1
# The part by which the work of a setting may be less on another schedule, or in smaller micro-batches, than it is where
# it was planned: at most 1.6 % in 63 pairs of settings of Llama 3 8B on 64 H100.
WORK_ERROR = 0.05


def frontier(problem: Problem, recipe_of: Callable[[Point, int], Recipe], **setting: Any) -> Walk:
    """The settings without stages among which the fastest is: for each way to recompute, the largest micro-batches that
    fit.

    Fewer micro-batches of the same recomputation are never slower without stages: what is sent and handed out for each
    of them is sent more often. So a way that recomputes more is worth a look only where it allows larger ones. A peak
    is a part that stays and a part for each example of a micro-batch: of settings between those that were tried, or
    beyond them, a line tells which may fit.
    """
    share = problem.examples // (problem.cluster.num_devices // (setting.get("tp", 1) * setting.get("sp", 1)))
    points = (Point(examples=e, recompute="nothing", **setting) for e in range(1, share + 1))
    sizes, fitting = [point.examples for point in points if point.num_microbatches(problem) is not None], 0
    for recompute in RECOMPUTE:
        larger = [e for e in sizes if e > fitting]
        if larger:
            start = Point(examples=larger[0] if fitting else larger[-1], recompute=recompute, **setting)
            found = yield from _largest_fitting(problem, start, larger, recipe_of)
            if found is None:
                return
            fitting = max(fitting, found)


def _largest_fitting(
    problem: Problem, start: Point, sizes: Sequence[int], recipe_of: Callable[[Point, int], Recipe]
) -> Generator[Attempt, Outcome | None, int | None]:
    """The most examples of a copy in a micro-batch with which a setting fits, of some sizes in rising order; 0 where it
    fits with none of them, or with none as fast as other settings; None where it is refused whatever their number. The
    size of `start` is tried first.
    """
    left, fitting, refused, peaks = list(sizes), 0, 0, dict[int, int]()
    point = start
    while True:
        m = point.num_microbatches(problem)
        assert m is not None, "the sizes divide the examples of a copy"
        outcome = yield dataclasses.replace(attempt_of(problem, point, m, recipe_of), frontier=True)
        left.remove(point.examples)
        may_fit = left
        if outcome is not None and outcome.too_slow:
            return fitting
        if outcome is not None and outcome.of_state:
            return None
        if outcome is None:
            refused += 1
            if refused == 2:  # what refuses two sizes is not their number
                return fitting if peaks else None
        elif outcome.fits:
            fitting = max(fitting, point.examples)
            left = [e for e in left if e > fitting]
        else:
            left = [e for e in left if e < point.examples]
        if outcome is not None:
            peaks[point.examples] = outcome.peak_bytes
            may_fit = [e for e in left if least_peak_bytes(peaks, e) <= outcome.limit_bytes]
        if not may_fit:
            return fitting if peaks else None
        point = dataclasses.replace(point, examples=may_fit[-1])


def least_peak_bytes(peaks: Mapping[int, int], examples: int) -> float:
    """The least that a setting may need, by the peaks of others that differ in the examples of a micro-batch alone: by
    the line through the nearest two, `LINE_ERROR` less; by one, if nothing of its peak stayed with fewer examples.
    """
    near = sorted(peaks, key=lambda e: abs(e - examples))[:2]
    if len(near) < 2:
        (only,) = near
        return peaks[only] * examples / only if examples < only else peaks[only]
    a, b = near
    return (peaks[a] + (peaks[b] - peaks[a]) * (examples - a) / (b - a)) / (1 + LINE_ERROR)


def attempt_of(problem: Problem, point: Point, m: int, recipe_of: Callable[[Point, int], Recipe]) -> Attempt:
    """The attempt at a setting, which has m micro-batches."""
    return Attempt(text=point.text(m), options=problem.under(recipe_of(point, m)))


def first_points(problem: Problem, **setting: Any) -> list[Point]:
    """Where a walk over a setting begins: the batch as it is (where that fits nothing leaner is looked at), and a few
    examples at a time with everything recomputed; with stages the latter alone.

    Nothing where the batch has fewer examples than there are copies of the model.
    """
    copies = problem.cluster.num_devices // (setting.get("tp", 1) * setting.get("pp", 1))
    share, rest = divmod(problem.examples, copies)
    if rest or not share:
        return []
    examples = max(e for e in range(1, min(share, FIRST_EXAMPLES) + 1) if share % e == 0)
    few = Point(examples=examples, recompute="input", **setting)
    return [few] if setting.get("pp", 1) > 1 else [Point(examples=share, recompute="nothing", **setting), few]


def neighbours(point: Point, m: int, outcome: Outcome, schedules: Sequence[str] = ()) -> Iterator[Point]:
    """What may be better than a point, which has m micro-batches: leaner where it does not fit, else faster.

    Micro-batches grow and shrink as memory allows, by two at least: what does not depend on them makes both steps
    careful. Smaller ones are faster where there are stages, for they leave smaller bubbles; and where they make room to
    keep more for the backward pass. Of stages that fit, other schedules are looked at too, and whole copies of the
    optimizer's state, which need no gathers.
    """
    level, leaner = RECOMPUTE.index(point.recompute), RECOMPUTE.index(point.recompute) + 1
    smaller = [point.examples // parts for parts in (2, 4) if point.examples % parts == 0]
    if outcome.fits:
        more = 2 if point.pp > 1 else math.gcd(power_below(outcome.limit_bytes / outcome.peak_bytes), m)
        yield dataclasses.replace(point, examples=more * point.examples)
        for recompute in RECOMPUTE[:level]:
            for examples in (point.examples, *smaller):
                yield dataclasses.replace(point, examples=examples, recompute=recompute)
        if point.pp > 1 and smaller:
            yield dataclasses.replace(point, examples=smaller[0])
        if point.pp > 1 and not point.schedule:
            yield from (dataclasses.replace(point, schedule=schedule) for schedule in schedules)
        if point.pp > 1 and point.zero:
            yield dataclasses.replace(point, zero=0)
    else:
        parts = math.gcd(power_below(outcome.peak_bytes / outcome.limit_bytes), point.examples)
        if parts > 1:
            yield dataclasses.replace(point, examples=point.examples // parts)
        if leaner < len(RECOMPUTE):
            examples = point.examples // max(parts // 2, 1)
            yield dataclasses.replace(point, examples=examples, recompute=RECOMPUTE[leaner])


def walk(
    problem: Problem,
    starts: Iterable[Point],
    recipe_of: Callable[[Point, int], Recipe],
    schedules: Sequence[str] = (),
) -> Walk:
    """All starts, then from the best of them to its neighbours for as long as one is better."""
    seen: dict[Point, Outcome | None] = {}

    def tried(points: Iterable[Point]) -> Generator[Attempt, Outcome | None, None]:
        for point in points:
            if point in seen or (m := point.num_microbatches(problem)) is None:
                continue
            known = [(other, o) for other, o in seen.items() if o is not None]
            if any(not o.fits and other.saves_more(point) for other, o in known):
                continue  # a leaner one did not fit
            if any(o.fits and point.needs_no_saving(other) for other, o in known):
                continue
            if more_stages_are_slower(point, seen) or (point.pp > 1 and takes_too_long(point, seen)):
                continue
            outcome = yield attempt_of(problem, point, m, recipe_of)
            seen[point] = None if outcome is not None and outcome.too_slow else outcome

    def best() -> Point | None:
        known = [(outcome.rank(), n, point) for n, (point, outcome) in enumerate(seen.items()) if outcome is not None]
        return min(known)[2] if known else None

    yield from tried(starts)
    here = best()
    while here is not None:
        outcome = seen[here]
        m = here.num_microbatches(problem)
        assert outcome is not None, "the best came to something"
        assert m is not None, "what was tried can be cut"
        yield from tried(neighbours(here, m, outcome, schedules))
        if best() == here:
            return
        here = best()


def least_bubbles(stages: int, m: int) -> float:
    """How many times as long as without bubbles m micro-batches take at least in 1F1B.

    A stage works on all micro-batches, and waits for one pass forward and one back through all stages before it. With
    w(q) seconds of stage q for a micro-batch, the step takes m w(q) + w(0) + ... + w(q - 1) at least; it is shortest
    where these are equal, with a sum of all w of the step's time multiplied by 1 - (1 - 1/m)**stages.
    """
    return stages / (m * (1 - (1 - 1 / m) ** stages))


def takes_too_long(point: Point, seen: Mapping[Point, Outcome | None]) -> bool:
    """Whether a setting with stages is slower than the best by the work of its devices alone, which takes as long at
    least as in micro-batches that are no smaller, and as on another schedule.
    """
    best_s = min((o.step_time_s for o in seen.values() if o is not None and o.fits), default=math.inf)
    return any(
        outcome is not None
        and known.examples >= point.examples
        and dataclasses.replace(known, examples=point.examples, schedule=point.schedule) == point
        and (1 - WORK_ERROR) * outcome.work_s >= best_s
        for known, outcome in seen.items()
    )


def more_stages_are_slower(point: Point, seen: Mapping[Point, Outcome | None]) -> bool:
    """Whether the same setting with fewer stages fits, and became slower already when it got more of them."""
    fewer = {
        known.pp: outcome.step_time_s
        for known, outcome in seen.items()
        if outcome is not None and outcome.fits and known.pp < point.pp
        if dataclasses.replace(known, pp=point.pp, zero=point.zero) == point
    }
    last = [fewer[pp] for pp in sorted(fewer)[-2:]]
    return len(last) == 2 and last[0] < last[1]


def power_below(ratio: float) -> int:
    """The largest power of two that is no more than a ratio, and at least two."""
    return max(2, 2 ** math.floor(math.log2(ratio)))
