"""Schedules made for the times of their tasks: ZB-1p and ZB-2p.

Zero Bubble Pipeline Parallelism, arXiv:2401.10241, section 3.1: forward passes ahead as far as memory allows, then one
forward and one backward pass of each stage by turns, weight gradients where a stage would idle or its memory is full.
Three questions that the rules leave open are answered in all eight ways, and the lists that take least time are kept.
With the paper's times and memory every rate of its Table 5 comes out to four decimals. The paper's integer program,
which may improve on these lists, is not here.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import NamedTuple

from autopar.runtime.pipeline.program import TaskKind
from autopar.runtime.pipeline.schedule import PipelineSchedule, Slot, StageCosts, peak_in_flight, place
from autopar.runtime.pipeline.zero_bubble_schedules import zb_h1, zb_h2

F, B, W = TaskKind.FORWARD, TaskKind.BACKWARD, TaskKind.WEIGHT


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
    return _best("zb-1p", zb_h1(num_groups, num_microbatches), num_groups, costs, whole_step)


def zb_2p(
    num_groups: int, num_microbatches: int, costs: StageCosts | None = None, whole_step: bool = False
) -> PipelineSchedule:
    """Twice the memory of ZB-1p, and next to no bubble where F and B take about as long and m is 3p or more.

    The groups end in the order in which they begin, see `Placement.span_s`; of the whole step (p-1)F are lost.
    """
    return _best("zb-2p", zb_h2(num_groups, num_microbatches), 2 * num_groups, costs, whole_step)


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


def _best(
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
