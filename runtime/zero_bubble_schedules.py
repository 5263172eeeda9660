"""Zero-bubble schedules: weight gradients run apart from input gradients, and fill idle time.

Zero Bubble Pipeline Parallelism, arXiv:2401.10241 (ZB-H1, ZB-H2); Pipeline Parallelism with Controllable Memory,
arXiv:2405.15362 (ZB-V). The lists are those drawn by hand for F = B = W. Where the times of the tasks are given, the
weight gradients are also placed greedily between the passes in their order, and what takes least time is kept; ZB-1p
and ZB-2p also choose the order of the passes. The papers' check of the optimiser after the fact is not here: a program
whose optimiser waits for all groups pays the stagger of ZB-H2 and ZB-V, see `Placement.span_s`.

ZB-1p and ZB-2p are made for the times of their tasks, as in section 3.1 of arXiv:2401.10241: forward passes ahead as
far as memory allows, then one forward and one backward pass of each stage by turns, weight gradients where a stage
would idle or its memory is full. Three questions that the rules leave open are answered in all eight ways, and the
lists that take least time are kept. With the paper's times and memory every rate of its Table 5 comes out to four
decimals. The paper's integer program, which may improve on these lists, is not here.
"""

from __future__ import annotations

import collections
import dataclasses
import heapq
import itertools
from typing import NamedTuple

from autopar.runtime.program import TaskKind
from autopar.runtime.schedule import (
    PipelineSchedule,
    Slot,
    SlotEnds,
    StageCosts,
    mesh_of_stages,
    peak_in_flight,
    place,
)

F, B, W = TaskKind.FORWARD, TaskKind.BACKWARD, TaskKind.WEIGHT

# Idle time that a weight gradient fills, in parts of its own time: any, half, all of it. Tried one after the other.
_GAPS = (0.0, 0.5, 1.0)


def zb_h1(
    num_groups: int, num_microbatches: int, costs: StageCosts | None = None, whole_step: bool = False
) -> PipelineSchedule:
    """1F1B with the weight gradients of stage s put off by s micro-batches; memory as 1F1B's worst stage everywhere.

    Bubble (p-1)(F+B-W) for F >= W, B >= W and m >= p: every published rate of the paper to four decimals. With
    transfers (p-1)(F+B-W+4C) while 2C <= W, paid on the way down and up before the first backward pass of stage 0 and
    again after its last forward pass. In flight p, at most m.
    """
    p, m = num_groups, num_microbatches
    lists = tuple(_delayed(s, m, warm_up=p - s, delay=s) for s in range(p))
    return _by_hand_or_filled(_chain("zb-h1", lists, m, in_flight=min(p, m)), costs, whole_step)


def zb_h2(
    num_groups: int, num_microbatches: int, costs: StageCosts | None = None, whole_step: bool = False
) -> PipelineSchedule:
    """More micro-batches in flight, so that the last stage never waits, and twice the delay of ZB-H1.

    Bubble (p-1)(F+B-2W), 0 for F = B = W, from m = 2p-1 on (F >= W, B >= W); below that each micro-batch less costs
    one task more, up to the bubble of ZB-H1 at m = p. With transfers (p-1)(F+B-2W+2C). The groups end in the order in
    which they begin, (p-1)F apart: who waits for all of them waits that long. In flight 2p-1, at most m.
    """
    p, m = num_groups, num_microbatches
    lists = tuple(_delayed(s, m, warm_up=2 * (p - s) - 1, delay=2 * s) for s in range(p))
    return _by_hand_or_filled(_chain("zb-h2", lists, m, in_flight=min(2 * p - 1, m)), costs, whole_step)


def zb_v(
    num_groups: int, num_microbatches: int, costs: StageCosts | None = None, whole_step: bool = False
) -> PipelineSchedule:
    """Two stages a group, s and 2p-1-s, so that the pipeline turns round where it began: a V.

    Bubble 0 for F = B = W from m = 2p on, and no formula for other times: give them. In flight at most 2p pairs, each
    of half a group's layers: the memory of 1F1B's worst stage. Twice the transfers of ZB-H1. The groups end in the
    order in which they begin.
    """
    p, m = num_groups, num_microbatches
    # Made for at least 2p micro-batches; those that there are not are left out, which makes nobody wait.
    lists = tuple(tuple(x for x in _v_list(s, p, max(m, 2 * p)) if x.micro_batch < m) for s in range(p))
    schedule = PipelineSchedule(
        name="zb-v",
        num_microbatches=m,
        num_stages=2 * p,
        mesh_of_stage=mesh_of_stages("zb-v", p, 2),
        lists=lists,
        splits_backward=True,
        in_flight=(2 * min(p, m),) * p,
    )
    return _by_hand_or_filled(schedule, costs, whole_step)


def _chain(name: str, lists: tuple[tuple[Slot, ...], ...], num_microbatches: int, in_flight: int) -> PipelineSchedule:
    """One stage on each group."""
    return PipelineSchedule(
        name=name,
        num_microbatches=num_microbatches,
        num_stages=len(lists),
        mesh_of_stage=tuple(range(len(lists))),
        lists=lists,
        splits_backward=True,
        in_flight=(in_flight,) * len(lists),
    )


def _delayed(stage: int, num_microbatches: int, *, warm_up: int, delay: int) -> tuple[Slot, ...]:
    """Forward passes to begin with; then backward pass, weight gradient of `delay` micro-batches ago, forward pass."""
    m = num_microbatches
    todo = [Slot(F, stage, i) for i in range(min(warm_up, m))]
    for i in range(m):
        todo.append(Slot(B, stage, i))
        if i >= delay:
            todo.append(Slot(W, stage, i - delay))
        if warm_up + i < m:
            todo.append(Slot(F, stage, warm_up + i))
    todo += [Slot(W, stage, i) for i in range(max(0, m - delay), m)]
    return tuple(todo)


def _v_list(group: int, num_groups: int, num_microbatches: int) -> list[Slot]:
    """The list of one group of ZB-V for at least 2p micro-batches."""
    p, m = num_groups, num_microbatches
    down, up = group, 2 * p - 1 - group
    todo: list[Slot] = []
    count: collections.Counter[tuple[TaskKind, int]] = collections.Counter()

    def add(*what: tuple[TaskKind, int]) -> None:
        for kind, stage in what:
            if count[kind, stage] < m:
                todo.append(Slot(kind, stage, count[kind, stage]))
                count[kind, stage] += 1

    # Until the first micro-batch comes back up; until its backward pass can begin; until that is back.
    add(*[(F, down)] * (2 * (p - group) - 1))
    add(*[(F, up), (F, down)] * group)
    add(*[(F, up), (B, up), (W, up)] * (p - group))
    while count[F, up] < m:
        add((F, down), (B, down), (W, down), (F, up), (B, up), (W, up))
    # What others wait for first, then what nobody waits for.
    add(*[(B, down), (B, up)] * group)
    add(*[(B, down), (W, down)] * (p - group))
    add(*[(W, up)] * m, *[(W, down)] * m)
    return todo


def _by_hand_or_filled(by_hand: PipelineSchedule, costs: StageCosts | None, whole_step: bool) -> PipelineSchedule:
    """The list by hand, or one of those filled greedily if it takes less time: the group that takes longest, or until
    the last one ends.
    """
    if costs is None:
        return by_hand
    found = [by_hand]
    for gap in _GAPS:
        found.append(dataclasses.replace(by_hand, lists=_filled(by_hand, costs, gap)))

    def seconds(schedule: PipelineSchedule) -> float:
        placement = place(schedule, costs)
        return placement.makespan_s if whole_step else placement.span_s

    return min(found, key=seconds)


def _filled(schedule: PipelineSchedule, costs: StageCosts, gap: float) -> tuple[tuple[Slot, ...], ...]:
    """The forward and backward passes in their order, the weight gradients where a group idles or is full.

    A weight gradient, oldest first, runs when a forward pass would bring the group above its promise, when nothing
    else is left, or when the group would idle for at least `gap` of its time.
    """
    skeleton = [[x for x in todo if x.kind is not W] for todo in schedule.lists]
    groups = range(schedule.num_groups)
    ends_of = SlotEnds(schedule.mesh_of_stage, costs)
    clock = [0.0] * schedule.num_groups
    position = [0] * schedule.num_groups
    held = [0] * schedule.num_groups
    pending: list[collections.deque[Slot]] = [collections.deque() for _ in groups]
    lists: list[list[Slot]] = [[] for _ in groups]

    def choice(group: int) -> tuple[float, float, Slot] | None:
        """(when it is sure that this is next, start, what)"""
        now, oldest = clock[group], pending[group][0] if pending[group] else None
        if position[group] == len(skeleton[group]):
            return None if oldest is None else (now, now, oldest)
        slot = skeleton[group][position[group]]
        if slot.kind is F and held[group] >= schedule.in_flight[group]:
            return None if oldest is None else (now, now, oldest)
        arrives = ends_of.ready_s(slot)
        if oldest is not None:
            enough = now + gap * costs.seconds(oldest)
            if arrives is None:
                # Others may still turn out to make it ready before that.
                return enough, now, oldest
            if arrives > now and arrives >= enough:
                return now, now, oldest
        return None if arrives is None else (max(now, arrives), max(now, arrives), slot)

    choices = [choice(group) for group in groups]
    queue = [(chosen[0], group) for group, chosen in enumerate(choices) if chosen is not None]
    heapq.heapify(queue)
    while queue:
        known, group = heapq.heappop(queue)
        chosen = choices[group]
        if chosen is None or chosen[0] != known:
            continue  # has changed since
        _, start, slot = chosen
        clock[group] = start + costs.seconds(slot)
        ends_of.ran(slot, clock[group])
        lists[group].append(slot)
        if slot.kind is W:
            pending[group].popleft()
            held[group] -= 1
        else:
            position[group] += 1
            held[group] += slot.kind is F
            if slot.kind is B:
                pending[group].append(Slot(W, slot.stage, slot.micro_batch))
        for changed in _touched(schedule, slot):
            choices[changed] = chosen = choice(changed)
            if chosen is not None:
                heapq.heappush(queue, (chosen[0], changed))
    assert sum(map(len, lists)) == sum(map(len, schedule.lists)), "a group is full and has nothing to release"
    return tuple(map(tuple, lists))


def _touched(schedule: PipelineSchedule, slot: Slot) -> set[int]:
    """The groups for which a slot that has run changes what they can run: its own and its neighbours."""
    stages = range(max(0, slot.stage - 1), min(slot.stage + 2, schedule.num_stages))
    return {schedule.mesh_of_stage[stage] for stage in stages}


class Rules(NamedTuple):
    """What the greedy rules leave open."""

    delays_first_backward: bool  # one more forward pass where the first backward pass arrives while it runs
    holds_back_forward: bool  # a stage that is ahead leaves its forward pass out where that makes no bubble larger
    fills_short_gaps: (
        bool  # a weight gradient where a stage idles for less than its time and has idled less than others
    )


def zb_1p(
    num_groups: int, num_microbatches: int, costs: StageCosts | None = None, whole_step: bool = False
) -> PipelineSchedule:
    """The memory of 1F1B's worst stage: on each stage what p micro-batches hold once their forward passes have run.

    For stages alike ZB-H1's bubble (p-1)(F+B-W) from m = p on, where what is put off holds as much as all.
    """
    return _best_of_all_rules("zb-1p", zb_h1(num_groups, num_microbatches), num_groups, costs, whole_step)


def zb_2p(
    num_groups: int, num_microbatches: int, costs: StageCosts | None = None, whole_step: bool = False
) -> PipelineSchedule:
    """Twice the memory of ZB-1p, and next to no bubble where F and B take about as long and m is 3p or more.

    The groups end in the order in which they begin, see `Placement.span_s`; of the whole step (p-1)F are lost.
    """
    return _best_of_all_rules("zb-2p", zb_h2(num_groups, num_microbatches), 2 * num_groups, costs, whole_step)


def most_held(schedule: PipelineSchedule, costs: StageCosts) -> float:
    """The most that a stage holds of one stage for each group, in micro-batches whose forward pass has run."""
    most = 0.0
    for todo in schedule.lists:
        forward = weights = 0
        for slot in todo:
            forward += (slot.kind is F) - (slot.kind is B)
            weights += (slot.kind is B) - (slot.kind is W)
            most = max(most, forward + costs.deferred[slot.stage] * weights)
    return most


def _best_of_all_rules(
    name: str, by_hand: PipelineSchedule, limit: int, costs: StageCosts | None, whole_step: bool
) -> PipelineSchedule:
    """Of all rules what takes least time within a limit of micro-batches held, or the lists by hand if they keep it and
    are as good. Those are the best for F = B = W, and are taken where no costs are given.
    """
    if costs is None:
        return dataclasses.replace(by_hand, name=name)
    placement = place(by_hand, costs)
    takes_s = Takes(span_s=placement.span_s, makespan_s=placement.makespan_s).key(whole_step)
    keeps = most_held(by_hand, costs) <= limit
    best, least_s = (by_hand.lists, takes_s) if keeps else (None, None)
    for answers in itertools.product((False, True), repeat=len(Rules._fields)):
        made = _Lists(costs, by_hand.num_microbatches, limit, Rules(*answers))
        lists, takes_s = made.made(), made.takes().key(whole_step)
        if least_s is None or takes_s < least_s:
            best, least_s = lists, takes_s
    assert best is not None
    schedule = dataclasses.replace(by_hand, name=name, lists=best)
    return dataclasses.replace(schedule, in_flight=peak_in_flight(schedule))


class Takes(NamedTuple):
    """How long lists take, see `Placement`."""

    span_s: float
    makespan_s: float

    def key(self, whole_step: bool) -> tuple[float, float]:
        return (self.makespan_s, self.span_s) if whole_step else (self.span_s, self.makespan_s)


class _Lists:
    """The lists of a chain of stages while they grow, on a clock.

    Each stage keeps at least one forward pass more than the next one while there are any, so that in each turn every
    stage can run one forward pass, first to last, and then one backward pass, last to first. `limit` is in
    micro-batches whose forward pass has run; one whose backward pass has run counts as `StageCosts.deferred`.
    """

    def __init__(self, costs: StageCosts, num_microbatches: int, limit: int, rules: Rules) -> None:
        self.costs, self.m, self.limit, self.rules = costs, num_microbatches, limit, rules
        self.stages = range(len(costs.forward_s))
        self.last = len(self.stages) - 1
        self.lists: list[list[Slot]] = [[] for _ in self.stages]
        self.clock_s = [0.0 for _ in self.stages]
        self.begin_s = [0.0 for _ in self.stages]
        self.idle_s = [0.0 for _ in self.stages]
        self.most_idle_s = 0.0
        self.forward_ends_s: list[list[float]] = [[] for _ in self.stages]
        self.backward_ends_s: list[list[float]] = [[] for _ in self.stages]
        self.weights = [0 for _ in self.stages]

    def made(self) -> tuple[tuple[Slot, ...], ...]:
        self.warm_up()
        for _ in range(1, self.m):
            self.run_forward()
            self.run_backward()
        for stage in self.stages:
            self.run_weights(stage)
        return tuple(map(tuple, self.lists))

    def takes(self) -> Takes:
        spans_s = (end_s - begin_s for begin_s, end_s in zip(self.begin_s, self.clock_s, strict=True))
        return Takes(span_s=max(spans_s), makespan_s=max(self.clock_s))

    # The first turn

    def warm_up(self) -> None:
        for stage in self.stages:
            self.add(F, stage)
        for stage, number in enumerate(self.ahead()):
            for _ in range(number):
                self.add(F, stage)
        for stage in reversed(self.stages):
            self.add(B, stage)

    def ahead(self) -> list[int]:
        """Forward passes of each stage between its first one and its first backward pass: as many as run until the
        gradient arrives, fewer than those of the stage before unless that has run all.
        """
        found = [0 for _ in self.stages]
        arrives_s = self.clock_s[self.last] + self.costs.backward_s[self.last]
        for stage in reversed(self.stages[:-1]):
            arrives_s += self.costs.send_back_s[stage]
            end_s, forward_s = self.clock_s[stage], self.costs.forward_s[stage]
            while 1 + found[stage] < min(self.m, self.limit):
                if end_s >= arrives_s if self.rules.delays_first_backward else end_s + forward_s > arrives_s:
                    break
                end_s += forward_s
                found[stage] += 1
            arrives_s = max(end_s, arrives_s) + self.costs.backward_s[stage]
        for stage in self.stages[1:]:
            before = found[stage - 1]
            found[stage] = min(found[stage], before if 1 + before == self.m else max(0, before - 1))
        return found

    # All other turns

    def run_forward(self) -> None:
        runs = [len(ends) < self.m for ends in self.forward_ends_s]
        if self.rules.holds_back_forward:
            for stage in self.stages[:-1]:
                runs[stage] = runs[stage] and not self.can_wait(stage)
        for stage in reversed(self.stages[:-1]):
            # A stage that ran ahead of one that waits would hold what nobody needs yet.
            runs[stage] = runs[stage] and (runs[stage + 1] or len(self.forward_ends_s[stage + 1]) == self.m)
        for stage in self.stages:
            if runs[stage]:
                while self.held(stage) + 1 > self.limit:
                    self.add(W, stage)
                self.fill(stage, self.arrival_s(F, stage))
                self.add(F, stage)

    def can_wait(self, stage: int) -> bool:
        """Whether the next forward pass of a stage can be left out of this turn: the next stage has one to run, and
        comes to its own backward pass too late for this one to fit in before the gradient arrives.
        """
        after = stage + 1
        if len(self.forward_ends_s[stage]) < len(self.forward_ends_s[after]) + 2:
            return False
        gradient_s = (
            self.clock_s[after]
            + self.costs.forward_s[after]
            + self.costs.backward_s[after]
            + self.costs.send_back_s[stage]
        )
        if self.clock_s[stage] >= gradient_s:
            return True
        too_much = max(0.0, self.held(stage) + 1 - self.limit)
        room_s = -(-too_much // self.costs.deferred[stage]) * self.costs.weight_s[stage] if too_much else 0.0
        if self.clock_s[stage] + self.costs.forward_s[stage] + room_s <= gradient_s:
            return False
        return gradient_s - self.clock_s[stage] <= self.most_idle_s - self.idle_s[stage]

    def run_backward(self) -> None:
        for stage in reversed(self.stages):
            self.fill(stage, self.arrival_s(B, stage))
            while self.waiting(stage) and self.held(stage) - 1 + self.costs.deferred[stage] > self.limit:
                self.add(W, stage)
            if stage == 0 and len(self.forward_ends_s[0]) == self.m:
                self.run_weights(0)  # nobody waits for what is left to do here
            self.add(B, stage)

    def run_weights(self, stage: int) -> None:
        while self.waiting(stage):
            self.add(W, stage)

    def fill(self, stage: int, until_s: float) -> None:
        """Weight gradients while a stage waits; a last one that takes longer than that where the stage would otherwise
        idle more than all others have, or where short gaps are filled.
        """
        weight_s = self.costs.weight_s[stage]
        while self.waiting(stage) and self.clock_s[stage] + weight_s <= until_s:
            self.add(W, stage)
        gap_s = until_s - self.clock_s[stage]
        idles_most = gap_s > self.most_idle_s - self.idle_s[stage]
        if self.waiting(stage) and gap_s > 0 and (idles_most or self.rules.fills_short_gaps):
            self.add(W, stage)

    # One task

    def held(self, stage: int) -> float:
        """What a stage holds, in micro-batches whose forward pass has run."""
        forward = len(self.forward_ends_s[stage]) - len(self.backward_ends_s[stage])
        return forward + self.costs.deferred[stage] * self.waiting(stage)

    def waiting(self, stage: int) -> int:
        """Weight gradients that can run."""
        return len(self.backward_ends_s[stage]) - self.weights[stage]

    def arrival_s(self, kind: TaskKind, stage: int) -> float:
        """From when on the next pass of a kind has what it needs."""
        forward, backward = self.forward_ends_s, self.backward_ends_s
        if kind is F:
            return forward[stage - 1][len(forward[stage])] + self.costs.send_s[stage - 1] if stage else 0.0
        number = len(backward[stage])
        if stage == self.last:
            return forward[stage][number]
        return max(forward[stage][number], backward[stage + 1][number] + self.costs.send_back_s[stage])

    def add(self, kind: TaskKind, stage: int) -> None:
        start_s, ends_s = self.clock_s[stage], (self.forward_ends_s if kind is F else self.backward_ends_s)[stage]
        number = self.weights[stage] if kind is W else len(ends_s)
        if kind is not W:
            start_s = max(start_s, self.arrival_s(kind, stage))
            if self.lists[stage]:
                self.idle_s[stage] += start_s - self.clock_s[stage]
                self.most_idle_s = max(self.most_idle_s, self.idle_s[stage])
            else:
                self.begin_s[stage] = start_s
        slot = Slot(kind, stage, number)
        self.clock_s[stage] = start_s + self.costs.seconds(slot)
        self.lists[stage].append(slot)
        if kind is W:
            self.weights[stage] += 1
        else:
            ends_s.append(self.clock_s[stage])
