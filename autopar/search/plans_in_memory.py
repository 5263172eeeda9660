"""The plans of a step in the way to write it that is fastest in the memory that there is.

Ways that save less for the backward pass are planned where the step does not fit otherwise, or its memory costs time;
ways that save more, where that may fit too. Each plan tells what to expect of the other ways. One program comes first,
as it takes less time to search for than stages and micro-batches do.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

from autopar.common.progress import Deadline
from autopar.errors import MemoryLimitError, SolverError, UnsupportedError
from autopar.plan.options import WORTHWHILE, Attention, Effort, PlanRequest
from autopar.plan.plan import Plan
from autopar.search.inter_op.evaluate import PEAK_ERROR
from autopar.search.step_ways import StepWay

Plans = tuple[Plan, ...]


def plans_in_memory(
    request: PlanRequest,
    ways: Iterable[StepWay],
    plans_with: Callable[[PlanRequest], Plans],
    num_devices: int,
    *,
    within: Callable[[StepWay, float], StepWay | None] = lambda near, most_bytes: None,
    in_stages: bool = False,
) -> Plans:
    """The plans of a step in the first of `ways`, or in another that is faster as the memory is.

    `plans_with` makes the plans of a request. `within`: as `StepWays.within`. `in_stages`: none is one program, which
    has the whole batch's values at once. Stages in enough micro-batches hold little of them, so that the fastest way
    comes first.

    Raises: as `plans_with`; MemoryLimitError where none fits, that of the way that needs least.
    """
    search = _Search(request, plans_with, num_devices, within)
    search.enter_ways(ways)
    first = search.waiting[0]
    if in_stages:
        most_s = (1 + WORTHWHILE) * min(way.least_s for way in search.waiting)
        # Of ways that compute for nearly as long, the leanest takes larger micro-batches.
        fastest = [way for way in search.waiting if way.least_s <= most_s]
        first = min(fastest, key=lambda way: (way.saved_bytes, way.least_s))
    elif request.admits_one_program and request.leaves_layouts_free and not request.in_host:
        search.as_one_program(first)
    if search.best is None or search.best in search.waiting:
        search.plan(search.fastest_as_one_stage(first.attention) or search.best or first)
    while (way := search.next_way()) is not None:
        if search.deadline.passed:
            untried = f"not all ways to write the step were planned: {search.deadline.text}"
            return tuple(plan.with_note(untried) for plan in search.found())
        search.plan(way)
    return search.found()


@dataclasses.dataclass(frozen=True, slots=True)
class KnownProgram:
    """A program that a plan found or tried, or one in other micro-batches: `share` of what the backward pass reads of
    the whole batch is on a device at once. `step_s`: None of one that does not fit and was not timed.
    """

    step_s: float | None
    peak_bytes: float
    share: float


class _Search:
    """The plans of a step in some ways to write it.

    Attributes:
        plans: The fastest so far, and those near it; `best` is their way.
        fitting: The ways that have a plan.
        known: The programs that are known of ways: of their plans, and those that do not fit.
        waiting: The ways that were not planned yet.
        by_value: Those of a choice by value, planned or not.
        filled: Those of them, by attention and choice, next to which another one was made (`next_made_to_fit`).
        refused: The error of the way nearest to fitting.
        refused_bytes: By attention, what ways save at least that do not fit, or are no faster, in any micro-batches.
        one_stage_s: Of ways, by their ids, that do not fit as one program: the step time of one stage under ZeRO in the
            fewest micro-batches that fit; inf: none does.
    """

    def __init__(
        self,
        request: PlanRequest,
        plans_with: Callable[[PlanRequest], Plans],
        num_devices: int,
        within: Callable[[StepWay, float], StepWay | None],
    ) -> None:
        self.request, self.plans_with, self.num_devices, self.within = request, plans_with, num_devices, within
        self.deadline = Deadline.after(request.time_limit_s)
        self.plans: Plans = ()
        self.best: StepWay | None = None
        self.fitting: list[StepWay] = []
        self.known: list[tuple[StepWay, list[KnownProgram]]] = []
        self.waiting: list[StepWay] = []
        self.by_value: list[StepWay] = []
        self.filled: set[tuple[Attention, str]] = set()
        self.limit_bytes = math.inf
        self.refused: MemoryLimitError | None = None
        self.refused_bytes: dict[Attention, float] = {}
        self.one_stage_s: dict[int, float] = {}

    def enter_ways(self, ways: Iterable[StepWay]) -> None:
        for way in ways:
            self.waiting.append(way)
            if way.kept_bytes is not None:
                self.by_value.append(way)

    def found(self) -> Plans:
        if self.plans:
            return self.plans
        assert self.refused is not None, "there is a way, with a plan or without one that fits"
        raise self.refused

    def as_one_program(self, first: StepWay) -> None:
        """Plans the fastest way that fits as one program, as far as those before it tell. Where none is expected to,
        ways are planned as one stage in few micro-batches, which takes little time: that which saves least, then those
        that may be faster.
        """
        way: StepWay | None = first
        while way is not None and not (self.known and self.deadline.passed):
            try:
                if self.is_one_program(way):
                    return
            except (SolverError, UnsupportedError):
                return
            way = self.next_program()

    def is_one_program(self, way: StepWay) -> bool:
        """Plans a way as one program, or where that does not fit as one stage in few micro-batches; whether a program
        fits, beside which stages were searched for. Raises: SolverError.
        """
        try:
            plans = self.plans_of(way, defer_stages=True)
        except MemoryLimitError as error:
            self.knows(way, error)
            self.one_stage_s[id(way)] = math.inf
            return False
        self.enter(way, plans)
        if is_searched_whole(plans[0]):
            self.waiting = [other for other in self.waiting if other is not way]
            return True
        self.one_stage_s[id(way)] = plans[0].predicted.step_time_s
        return False

    def knows(self, way: StepWay, error: MemoryLimitError) -> None:
        """Takes the error of a way that does not fit for that of one program."""
        self.limit_bytes = error.limit_bytes
        self.known.append((way, [KnownProgram(None, error.needed_bytes, 1 / self.num_devices)]))

    def next_program(self) -> StepWay | None:
        """The way that may fit as one program and be faster than the best so far; without any plan, the leanest one."""
        tried = {id(other) for other, _ in self.known}
        ways = [way for way in self.waiting if id(way) not in tried and way.least_s < math.inf]
        may_fit = [way for way in ways if self.expected_s(way) < self.least_worth_s]
        if may_fit or self.plans:
            return min(may_fit, key=lambda way: (self.expected_s(way), way.least_s), default=None)
        least_bytes = min((other.saved_bytes for other, _ in self.known), default=math.inf)
        leaner = [way for way in ways if way.saved_bytes < least_bytes]
        return min(leaner, key=lambda way: (way.saved_bytes, way.least_s), default=None)

    def plan(self, way: StepWay) -> None:
        """Plans a way in any program that is faster than the best so far. Where one stage tells how they compare, it is
        planned as that first.
        """
        compares = self.is_comparable_with_best(way) and id(way) not in self.one_stage_s
        try:
            if compares and not self.is_one_program(way):
                return
            self.waiting = [other for other in self.waiting if other is not way]
            if not compares:
                self.enter(way, self.plans_of(way, to_beat_s=self.step_s))
        except MemoryLimitError as error:
            if self.refused is None or error.needed_bytes < self.refused.needed_bytes:
                self.refused = error
            self.knows(way, error)
            # With a plan of a way that saves less, the next one saves at most as much as lies halfway to it, or less
            # than this one by the bytes that one program of it is over the limit.
            less = [other.saved_bytes for other in self.fitting if other.saved_bytes < way.saved_bytes]
            most_bytes = way.saved_bytes or math.inf
            if less:
                over_bytes = (error.needed_bytes - error.limit_bytes) * self.num_devices
                most_bytes = max((way.saved_bytes + max(less)) / 2, way.saved_bytes - over_bytes)
            self.refused_bytes[way.attention] = min(self.refused_bytes.get(way.attention, math.inf), most_bytes)
        except (SolverError, UnsupportedError):
            self.waiting = [other for other in self.waiting if other is not way]
            if not self.plans and self.refused is None:
                raise

    def next_way(self) -> StepWay | None:
        """The way that is expected to be fastest, where that is worth it: the best one first, where it was planned as
        one stage alone. Where nothing fits yet, that which saves least.
        """
        if self.best is not None and self.best in self.waiting:
            return self.best
        ways = [w for w in self.waiting if w.saved_bytes < self.refused_bytes.get(w.attention, math.inf)]
        if not self.plans:
            return min(ways, key=lambda way: (way.least_s == math.inf, way.saved_bytes), default=None)
        expected = [(self.expected_s(way), i) for i, way in enumerate(ways)]
        step_s, i = min(expected, default=(math.inf, 0))
        made = self.next_made_to_fit((1 - WORTHWHILE) * min(step_s, self.step_s))
        if made is not None:
            return made
        return ways[i] if step_s < self.least_worth_s else None

    def next_made_to_fit(self, under_s: float) -> StepWay | None:
        """A new way, which saves as much as fits in a program that is known, between two choices by value; None where
        none is expected to take less than so many seconds.
        """
        found: tuple[StepWay, float] | None = None
        for way, programs in self.known:
            for program in programs:
                most_bytes = way.saved_bytes + (self.limit_bytes - program.peak_bytes) / program.share
                most_bytes = min(most_bytes, self.refused_bytes.get(way.attention, math.inf))
                for less, more in self.next_to(way.attention, most_bytes):
                    part = (most_bytes - less.saved_bytes) / (more.saved_bytes - less.saved_bytes)
                    least_s = less.least_s + part * (more.least_s - less.least_s)
                    expected_s = least_s + self.added_s(program, way)
                    if expected_s < under_s:
                        under_s, found = expected_s, (less, most_bytes)
        if found is None:
            return None
        less, _ = found
        self.filled.add((less.attention, less.scan_recompute))
        made = self.within(*found)
        if made is None or made.saved_bytes <= less.saved_bytes:
            return None
        self.enter_ways([made])
        return made if self.expected_s(made) < self.least_worth_s else None

    def next_to(self, attention: Attention, most_bytes: float) -> Iterator[tuple[StepWay, StepWay]]:
        """Pairs of choices by value, the next that saves less than so many bytes and the next that saves more: without
        values in the memory of the hosts, and with some there.
        """
        for sends in (False, True):
            alike = [way for way in self.by_value if way.attention is attention and way.sends is sends]
            less = max((w for w in alike if w.saved_bytes <= most_bytes), key=_saved_bytes, default=None)
            more = min((w for w in alike if w.saved_bytes > most_bytes), key=_saved_bytes, default=None)
            if less is not None and more is not None and (attention, less.scan_recompute) not in self.filled:
                yield less, more

    @property
    def least_worth_s(self) -> float:
        """Step time below which another way is worth planning."""
        effort = self.request.effort
        gain = effort.least_gain if effort is Effort.THOROUGH else max(effort.least_gain, WORTHWHILE)
        return (1 - gain) * self.step_s if self.plans else math.inf

    @property
    def step_s(self) -> float:
        return self.plans[0].predicted.step_time_s if self.plans else math.inf

    def plans_of(self, way: StepWay, *, defer_stages: bool = False, to_beat_s: float = math.inf) -> Plans:
        limit_s = self.request.time_limit_s
        if limit_s is not None and (self.known or self.refused is not None):
            limit_s = self.deadline.left_s
        asked = dataclasses.replace(way.of(self.request), defer_stages=defer_stages, to_beat_s=to_beat_s)
        return self.plans_with(dataclasses.replace(asked, time_limit_s=limit_s))

    def enter(self, way: StepWay, plans: Plans) -> None:
        whole = [program for other, programs in self.known if other is way for program in programs]
        self.known.append((way, known_programs(plans[0], way, whole)))
        self.fitting.append(way)
        self.limit_bytes = plans[0].record.memory_limit_bytes or math.inf
        step_s = plans[0].predicted.step_time_s
        if step_s < self.step_s or (way is self.best and step_s == self.step_s):  # with more that was weighed beside it
            self.best = way
            self.plans = tuple(functools.reduce(Plan.with_note, way.notes, plan) for plan in plans)

    def fastest_as_one_stage(self, attention: Attention) -> StepWay | None:
        """The way with this attention that is fastest as one stage; None where none fits so."""
        alike = [way for way in self.waiting if way.attention is attention]
        fitting = [way for way in alike if self.one_stage_s.get(id(way), math.inf) < math.inf]
        return min(fitting, key=lambda way: self.one_stage_s[id(way)], default=None)

    def is_comparable_with_best(self, way: StepWay) -> bool:
        """Whether one stage in few micro-batches tells how a way compares with the best: neither fits as one program,
        and they differ alone in what scans compute again, so that the search over stages gains about as much in both.
        """
        of_best_s = self.one_stage_s.get(id(self.best), math.inf)
        return self.best is not None and way.attention is self.best.attention and of_best_s < math.inf

    def expected_s(self, way: StepWay) -> float:
        """The least step time that is expected of a way: each program that is known takes as much longer or shorter in
        it as computing does, if it then fits; as one stage in few micro-batches does, where that is known. inf: none
        fits.
        """
        if way.least_s == math.inf:
            return math.inf
        if self.is_comparable_with_best(way) and id(way) in self.one_stage_s:
            return max(self.step_s + self.one_stage_s[id(way)] - self.one_stage_s[id(self.best)], way.least_s)
        found = math.inf
        for other, programs in self.known:
            for program in programs:
                more_bytes = (way.saved_bytes - other.saved_bytes) * program.share
                if program.peak_bytes + more_bytes <= (1 + PEAK_ERROR) * self.limit_bytes:
                    found = min(found, way.least_s + self.added_s(program, other))
        return found

    def added_s(self, program: KnownProgram, way: StepWay) -> float:
        """Seconds of a step in a program beyond the least of its way; of one that was not timed the fewest of those
        that were, with as much of the batch on a device.
        """
        alike = [(program, way)]
        if program.step_s is None:
            alike = [(p, other) for other, programs in self.known for p in programs if p.share == program.share]
        added = (p.step_s - other.least_s for p, other in alike if p.step_s is not None)
        return max(0.0, min(added, default=0.0))


def is_searched_whole(plan: Plan) -> bool:
    """Whether a plan for which stages were deferred, where no program fits, is of a step of which one does."""
    pipeline, limit_bytes = plan.record.pipeline, plan.record.memory_limit_bytes or math.inf
    fitting = (t for t in plan.record.tried if t.peak_bytes is not None and t.peak_bytes <= limit_bytes)
    return pipeline is None or len(pipeline.stages) > 1 or any(fitting)


def known_programs(plan: Plan, way: StepWay, whole: Sequence[KnownProgram]) -> list[KnownProgram]:
    """The programs of a plan of a way, those of one micro-batch that are faster but do not fit, and in micro-batches
    between these and up to four times as many: what is not there through the whole step shrinks with their size, and
    each adds the same time, or none where only a program in one is known. `whole` are those of one micro-batch that are
    known beside those of the plan.
    """
    pipeline, num_devices = plan.record.pipeline, plan.cluster.num_devices
    number, stages = (pipeline.num_microbatches, len(pipeline.stages)) if pipeline is not None else (1, 1)
    share = min(number, stages) / number / num_devices
    taken_s, taken_bytes = plan.predicted.step_time_s, max(plan.predicted.peak_bytes)
    tried = [
        KnownProgram(t.step_time_s, t.peak_bytes, 1 / num_devices)
        for t in plan.record.tried
        if t.peak_bytes is not None
    ]
    tried = tried or [*whole]
    built = {
        c.num_microbatches: KnownProgram(c.step_time_s, c.peak_bytes, 1 / c.num_microbatches / num_devices)
        for c in plan.record.weighed
        if c.num_microbatches is not None and c.step_time_s is not None and c.peak_bytes is not None
    }
    programs = [KnownProgram(taken_s, taken_bytes, share)]
    programs += [p for p in (*tried, *built.values()) if p.step_s is None or p.step_s < taken_s]
    each_s = 0.0
    lasting_bytes = float(max(sum(memory.throughout.values()) for memory in plan.predicted.memory))
    if number > 1 and tried:
        first_s, first_bytes = min((way.least_s if p.step_s is None else p.step_s, p.peak_bytes) for p in tried)
        each_s = max(0.0, taken_s - first_s) / (number - 1)
        lasting_bytes = first_bytes - (first_bytes - taken_bytes) / (1 - 1 / number)
    for m in (1 << i for i in range(1, number.bit_length() + 2)):
        if m != number and m not in built:
            peak_bytes = lasting_bytes + (taken_bytes - lasting_bytes) * number / m
            programs.append(KnownProgram(taken_s + each_s * (m - number), peak_bytes, min(m, stages) / m / num_devices))
    return programs


def _saved_bytes(way: StepWay) -> float:
    return way.saved_bytes
