"""Zero-bubble schedules: weight gradients run apart from input gradients, and fill idle time.

Zero Bubble Pipeline Parallelism, arXiv:2401.10241 (ZB-H1, ZB-H2); Pipeline Parallelism with Controllable Memory,
arXiv:2405.15362 (ZB-V). The lists are those drawn by hand for F = B = W. Where the times of the tasks are given, the
weight gradients are also placed greedily between the passes in their order, and what takes least time is kept;
`automatic_schedules` also chooses the order of the passes. The papers' check of the optimiser after the fact is not
here: a program whose optimiser waits for all groups pays the stagger of ZB-H2 and ZB-V, see `Placement.span_s`.
"""

from __future__ import annotations

import collections
import dataclasses
import heapq

from autopar.runtime.pipeline.program import TaskKind
from autopar.runtime.pipeline.schedule import PipelineSchedule, Slot, SlotEnds, StageCosts, mesh_of_stages, place

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
    return _best(_chain("zb-h1", lists, m, in_flight=min(p, m)), costs, whole_step)


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
    return _best(_chain("zb-h2", lists, m, in_flight=min(2 * p - 1, m)), costs, whole_step)


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
    return _best(schedule, costs, whole_step)


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


def _best(by_hand: PipelineSchedule, costs: StageCosts | None, whole_step: bool) -> PipelineSchedule:
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
