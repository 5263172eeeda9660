"""`PipelineSchedule`, and the placement of its tasks on a clock: each device group runs its list in order, each task as
soon as its inputs are there.

The needs are those of a chain of stages: the forward pass of a stage follows that of the stage before, the backward
pass that of the stage after (of the last stage: its own forward pass), a separate weight gradient its backward pass.
Skip connections add nothing to this: what a stage needs of an earlier one is there once its neighbour is done.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

from autopar.errors import ScheduleError
from autopar.runtime.program import TaskKind


class Slot(NamedTuple):
    """One place in the list of a device group: what to run there. (The slots of a `Program` are something else.)"""

    kind: TaskKind
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind.value} of micro-batch {self.micro_batch} on stage {self.stage}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """How long the tasks of a stage take, all stages alike, and a transfer between neighbouring groups.

    `backward_s` is the gradient by the stage's input alone; `weight_s`, by its weights, is added to it where the
    schedule does not run the two apart. Several stages on one group: the times are of one stage (a chunk).
    """

    forward_s: float = 1.0
    backward_s: float = 1.0
    weight_s: float = 1.0
    transfer_s: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StageCosts:
    """`Times` of stages that differ, by stage, and what their weight gradients hold.

    Attributes:
        send_s: Of one micro-batch from each stage but the last to the next one; nothing inside of a group.
        send_back_s: The same of gradients, from the next stage to each.
        deferred: Of what a stage holds of a micro-batch once its forward pass has run, the part that it still holds
            once its backward pass has: what its weight gradient reads.
    """

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    weight_s: tuple[float, ...]
    send_s: tuple[float, ...]
    send_back_s: tuple[float, ...]
    deferred: tuple[float, ...]

    @classmethod
    def alike(cls, times: Times, num_stages: int, deferred: float = 1.0) -> StageCosts:
        sends = (times.transfer_s,) * (num_stages - 1)
        return cls(
            forward_s=(times.forward_s,) * num_stages,
            backward_s=(times.backward_s,) * num_stages,
            weight_s=(times.weight_s,) * num_stages,
            send_s=sends,
            send_back_s=sends,
            deferred=(deferred,) * num_stages,
        )

    def seconds(self, slot: Slot, merged: bool = False) -> float:
        """How long a task takes; a backward pass with the weight gradient in it if they are `merged`."""
        match slot.kind:
            case TaskKind.FORWARD:
                return self.forward_s[slot.stage]
            case TaskKind.BACKWARD:
                return self.backward_s[slot.stage] + (self.weight_s[slot.stage] if merged else 0.0)
            case _:
                return self.weight_s[slot.stage]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSchedule:
    """The order of the tasks on each device group.

    Attributes:
        num_stages: Stages, where a group holds several of them all are counted.
        mesh_of_stage: The device group that holds a stage, groups counted from 0.
        lists: For each group what it runs, in order.
        splits_backward: WEIGHT tasks stand on their own; else BACKWARD does their work too.
        in_flight: For each group the most pairs (stage, micro-batch) whose forward pass has begun and whose backward
            pass (where split: weight gradient) is not done. See `in_flight_microbatches`.
        forward_only: There are FORWARD tasks only, and nothing is kept for a backward pass: `in_flight` is 0.
    """

    name: str
    num_microbatches: int
    num_stages: int
    mesh_of_stage: tuple[int, ...]
    lists: tuple[tuple[Slot, ...], ...]
    splits_backward: bool
    in_flight: tuple[int, ...]
    forward_only: bool = False

    @property
    def num_groups(self) -> int:
        return len(self.lists)

    @property
    def chunks(self) -> int:
        """Stages of the group that holds most."""
        return max(collections.Counter(self.mesh_of_stage).values())

    @property
    def kinds(self) -> tuple[TaskKind, ...]:
        """What each stage runs once a micro-batch."""
        if self.forward_only:
            return (TaskKind.FORWARD,)
        both = (TaskKind.FORWARD, TaskKind.BACKWARD)
        return (*both, TaskKind.WEIGHT) if self.splits_backward else both

    @property
    def in_flight_microbatches(self) -> tuple[Fraction, ...]:
        """`in_flight` in whole micro-batches: a group with v stages holds 1/v of its share for each pair."""
        return tuple(Fraction(n, self.chunks) for n in self.in_flight)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Start and end of every entry of the schedule's lists, in seconds, and the busy seconds of each group."""

    starts_s: tuple[tuple[float, ...], ...]
    ends_s: tuple[tuple[float, ...], ...]
    busy_s: tuple[float, ...]

    @property
    def makespan_s(self) -> float:
        return max(ends[-1] for ends in self.ends_s if ends)

    @property
    def span_s(self) -> float:
        """From the first to the last task of the group where that takes longest: the cost of arXiv:2401.10241,
        section 5.3.

        Less than `makespan_s` where groups end in the order in which they begin: one step then overlaps the next,
        unless the optimiser waits for all groups.
        """
        return max(ends[-1] - starts[0] for starts, ends in zip(self.starts_s, self.ends_s, strict=True) if ends)

    @property
    def bubble_s(self) -> float:
        """Idle time between first and last task of the group where it is most."""
        spans = (e[-1] - s[0] - busy for s, e, busy in zip(self.starts_s, self.ends_s, self.busy_s, strict=True) if e)
        return max(spans)

    @property
    def bubble_rate(self) -> float:
        """(cost - work) / cost, as tables of arXiv:2401.10241 print it."""
        return (self.span_s - max(self.busy_s)) / self.span_s


# Two stages a group, s and 2p-1-s: the pipeline ends where it began.
V_SHAPED = ("zb-v", "dualpipev", "inference-v")


def mesh_of_stages(name: str, num_groups: int, chunks: int) -> tuple[int, ...]:
    """The group of devices of each stage of a schedule: one round of the groups after the other, and in a V back."""
    if name in V_SHAPED:
        return (*range(num_groups), *reversed(range(num_groups)))
    return tuple(range(num_groups)) * chunks


def place(schedule: PipelineSchedule, times: Times | StageCosts | None = None) -> Placement:
    """When each entry runs.

    Raises:
        ScheduleError: The lists wait for each other in a circle, or for something that no list has.
    """
    if not isinstance(times, StageCosts):
        times = StageCosts.alike(times or Times(), schedule.num_stages)
    merged = not schedule.splits_backward
    ends_of = SlotEnds(schedule.mesh_of_stage, times)
    clock_s = [0.0] * schedule.num_groups
    starts: list[list[float]] = [[] for _ in clock_s]
    ends: list[list[float]] = [[] for _ in clock_s]
    waiting = collections.deque(range(schedule.num_groups))
    idle_turns = 0
    while waiting and idle_turns <= len(waiting):
        group = waiting.popleft()
        todo = schedule.lists[group]
        position = begun = len(starts[group])
        while position < len(todo) and (ready := ends_of.ready_s(todo[position])) is not None:
            slot = todo[position]
            starts[group].append(max(clock_s[group], ready))
            clock_s[group] = starts[group][-1] + times.seconds(slot, merged)
            ends_of.ran(slot, clock_s[group])
            ends[group].append(clock_s[group])
            position += 1
        idle_turns = 0 if position > begun else idle_turns + 1
        if position < len(todo):
            waiting.append(group)
    if waiting:
        heads = "; ".join(f"group {g} at {schedule.lists[g][len(starts[g])]}" for g in sorted(waiting))
        raise ScheduleError(
            where=f"schedule {schedule.name}",
            expected="that some group can go on",
            got=f"a deadlock: {heads}",
            hint="on each group put a task behind all that what it waits for waits for",
        )
    return Placement(
        starts_s=tuple(map(tuple, starts)),
        ends_s=tuple(map(tuple, ends)),
        busy_s=tuple(sum(times.seconds(slot, merged) for slot in todo) for todo in schedule.lists),
    )


class SlotEnds:
    """When the slots of a schedule have ended, by stage and micro-batch, and from when on others can begin."""

    def __init__(self, mesh_of_stage: Sequence[int], costs: StageCosts) -> None:
        self.last, self.mesh_of_stage, self.costs = len(mesh_of_stage) - 1, mesh_of_stage, costs
        self.forward: dict[tuple[int, int], float] = {}
        self.backward: dict[tuple[int, int], float] = {}

    def ran(self, slot: Slot, end_s: float) -> None:
        kind, stage, micro_batch = slot
        if kind is TaskKind.FORWARD:
            self.forward[stage, micro_batch] = end_s
        elif kind is TaskKind.BACKWARD:
            self.backward[stage, micro_batch] = end_s

    def ready_s(self, slot: Slot) -> float | None:
        """From when on a slot can run; None as long as something that it waits for has not run."""
        kind, stage, micro_batch = slot
        if kind is TaskKind.WEIGHT:
            return self.backward.get((stage, micro_batch))
        if kind is TaskKind.FORWARD:
            if stage == 0:
                return 0.0
            neighbour, end_s = stage - 1, self.forward.get((stage - 1, micro_batch))
            transfer_s = self.costs.send_s[neighbour]
        else:
            own_s = self.forward.get((stage, micro_batch))
            if own_s is None or stage == self.last:
                return own_s
            neighbour, end_s = stage + 1, self.backward.get((stage + 1, micro_batch))
            transfer_s = self.costs.send_back_s[stage]
        if end_s is None:
            return None
        return end_s if self.mesh_of_stage[neighbour] == self.mesh_of_stage[stage] else end_s + transfer_s


def peak_in_flight(schedule: PipelineSchedule) -> tuple[int, ...]:
    """What `PipelineSchedule.in_flight` promises, counted from the lists."""
    if schedule.forward_only:
        return (0,) * schedule.num_groups
    release = schedule.kinds[-1]
    peaks = []
    for todo in schedule.lists:
        held = peak = 0
        for slot in todo:
            if slot.kind is TaskKind.FORWARD:
                held += 1
                peak = max(peak, held)
            elif slot.kind is release:
                held -= 1
        peaks.append(peak)
    return tuple(peaks)
