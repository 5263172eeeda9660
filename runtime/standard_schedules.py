"""Pipeline schedules by name: pure functions from numbers to lists of tasks.

p groups, m micro-batches, v stages (chunks) a group; F, B and W the times of a forward pass, of the gradient by the
input and of that by the weights, of one group's share of the model. Bubbles are those of the group that idles most,
between its first and last task (`Placement.bubble_s`), with transfers that take no time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType

from autopar.errors import InvalidArgumentError, expect_one_of
from autopar.runtime.program import TaskKind
from autopar.runtime.schedule import (
    V_SHAPED,
    PipelineSchedule,
    Placement,
    Slot,
    StageCosts,
    Times,
    mesh_of_stages,
    peak_in_flight,
    place,
)
from autopar.runtime.zero_bubble_schedules import zb_1p, zb_2p, zb_h1, zb_h2, zb_v

__all__ = [
    "SCHEDULES",
    "PipelineSchedule",
    "Placement",
    "Slot",
    "StageCosts",
    "Times",
    "dualpipev",
    "eager_one_f_one_b",
    "gpipe",
    "inference",
    "inference_v",
    "interleaved",
    "make_schedule",
    "one_f_one_b",
    "peak_in_flight",
    "place",
    "zb_1p",
    "zb_2p",
    "zb_h1",
    "zb_h2",
    "zb_v",
]

F, B, W = TaskKind.FORWARD, TaskKind.BACKWARD, TaskKind.WEIGHT


def gpipe(num_groups: int, num_microbatches: int) -> PipelineSchedule:
    """All forward passes, then all backward passes (arXiv:1811.06965), the last micro-batch first.

    Bubble (p-1)(F+B+W) for every m; in flight m.
    """
    m = num_microbatches
    lists = [
        [*(Slot(F, s, i) for i in range(m)), *(Slot(B, s, i) for i in reversed(range(m)))] for s in range(num_groups)
    ]
    return _chain("gpipe", lists, m, tuple(m for _ in lists))


def one_f_one_b(num_groups: int, num_microbatches: int) -> PipelineSchedule:
    """Forward and backward passes by turns as soon as there is one to go back (PipeDream-flush, arXiv:2006.09503).

    Bubble (p-1)(F+B+W) for every m; in flight p-s on stage s, at most m.
    """
    p, m = num_groups, num_microbatches
    return _alternating("1f1b", p, m, [p - s for s in range(p)])


def eager_one_f_one_b(num_groups: int, num_microbatches: int) -> PipelineSchedule:
    """1F1B with forward passes ahead, so that a transfer runs beside a task (Alpa's overlap, arXiv:2211.05322).

    Bubble (p-1)(F+B+W) for every m; with transfers (p-1)(F+B+W+2C) while 2C <= F+B+W, where 1F1B pays again in every
    turn. In flight 2(p-s)-1 on stage s, at most m.
    """
    p, m = num_groups, num_microbatches
    return _alternating("eager-1f1b", p, m, [2 * (p - s) - 1 for s in range(p)])


def interleaved(num_groups: int, num_microbatches: int, chunks: int) -> PipelineSchedule:
    """Chunk c of group g is stage c*p + g (Megatron-LM, arXiv:2104.04473, section 2.2).

    Bubble (p-1)(F+B+W)/v where p divides m. Where it does not, the lists are those of the next multiple without the
    micro-batches that there are not: their idle time stays. In flight 2(p-g-1) + (v-1)p + 1 chunks on group g, that is
    p + (p-1)/v micro-batches on the first; v = 1 is eager 1F1B.
    """
    p, m, v = num_groups, num_microbatches, chunks
    rounded = -(-m // p) * p
    lists = []
    for g in range(p):
        forward = _in_turns(F, g, p, rounded, range(v))
        backward = _in_turns(B, g, p, rounded, reversed(range(v)))
        full = _turns(forward, backward, min(2 * (p - g - 1) + (v - 1) * p + 1, rounded * v))
        lists.append([x for x in full if x.micro_batch < m])
    return PipelineSchedule(
        name="interleaved",
        num_microbatches=m,
        num_stages=p * v,
        mesh_of_stage=mesh_of_stages("interleaved", p, v),
        lists=tuple(map(tuple, lists)),
        splits_backward=False,
        in_flight=tuple(min(2 * (p - g - 1) + (v - 1) * p + 1, m * v) for g in range(p)),
    )


def dualpipev(num_groups: int, num_microbatches: int) -> PipelineSchedule:
    """Two stages a group in a V, whose forward pass of one micro-batch stands beside the backward pass of another of
    the other stage, so that each can hide what the other sends (DeepSeek-V3, arXiv:2412.19437, section 3.2.1, and its
    cut in half). Weight gradients stand on their own where a group would wait.

    On p = 2 groups, 4 micro-batches (capitals: the second stage of a group; brackets: neighbours, `pairs`)::

        group 0   f0 f1 f2 F0  B0 W0 F1  [f3 B1 W1] [F2 b0 w0]  B2 W2 [F3 b1 w1]  B3 W3 b2 w2 b3 w3
        group 1   f0 F0 f1 F1            [f2 B0 W0] [F2 b0 w0] [f3 B1 W1] [F3 b1 w1]  B2 W2 b2 w2 B3 b3 W3 w3

    Bubble (p-1)F for F = B = W where each runs on its own, from m = 2p on; of neighbours that take P as one program at
    most (p-1)(P+B-2W), the published one. In flight at most 2p+1 pairs (stage, micro-batch), each of half a group's
    layers.
    """
    p, m = num_groups, max(num_microbatches, 2 * num_groups)
    lists = (tuple(x for x in _dualpipev_list(g, p, m) if x.micro_batch < num_microbatches) for g in range(p))
    schedule = PipelineSchedule(
        name="dualpipev",
        num_microbatches=num_microbatches,
        num_stages=2 * p,
        mesh_of_stage=mesh_of_stages("dualpipev", p, 2),
        lists=tuple(lists),
        splits_backward=True,
        in_flight=(0,) * p,
    )
    return dataclasses.replace(schedule, in_flight=peak_in_flight(schedule))


def _dualpipev_list(group: int, num_groups: int, num_microbatches: int) -> list[Slot]:
    g, p, m = group, num_groups, num_microbatches
    down, up = g, 2 * p - 1 - g
    forward = {stage: iter([Slot(F, stage, i) for i in range(m)]) for stage in (down, up)}
    backward = {stage: iter([Slot(B, stage, i) for i in range(m)]) for stage in (down, up)}
    put_off: list[Slot] = []  # weight gradients, the oldest first
    todo: list[Slot] = []

    def back(stage: int, puts_off: bool = False) -> None:
        slot = next(backward[stage])
        todo.append(slot)
        (put_off if puts_off else todo).append(Slot(W, stage, slot.micro_batch))

    todo += [next(forward[down]) for _ in range(2 * (p - g - 1))]
    for _ in range(g + 1):
        todo += [next(forward[down]), next(forward[up])]
    for _ in range(p - g - 1):
        back(up)
        todo.append(next(forward[up]))
    for _ in range(m - 2 * p + g + 1):
        for there, here in ((down, up), (up, down)):
            todo.append(next(forward[there]))
            back(here)
    for _ in range(p - g - 1):
        back(up)
        todo.append(next(forward[up]))
        back(down)
    for number in range(2 * (g + 1)):
        back(up if number % 2 == 0 else down, puts_off=number > g)
    for _ in range(p - g - 1):
        todo.append(put_off.pop(0))
        back(down, puts_off=True)
    return [*todo, *put_off]


def inference(num_groups: int, num_microbatches: int, chunks: int = 1) -> PipelineSchedule:
    """Forward passes only. Bubble 0: a group waits before its first and after its last task only (v = 1, or p
    divides m). Nothing is in flight, since nothing is kept.
    """
    p, m, v = num_groups, num_microbatches, chunks
    rounded = m if v == 1 else -(-m // p) * p
    lists = ([x for x in _in_turns(F, g, p, rounded, range(v)) if x.micro_batch < m] for g in range(p))
    return PipelineSchedule(
        name="inference",
        num_microbatches=m,
        num_stages=p * v,
        mesh_of_stage=mesh_of_stages("inference", p, v),
        lists=tuple(map(tuple, lists)),
        splits_backward=False,
        in_flight=(0,) * p,
        forward_only=True,
    )


def inference_v(num_groups: int, num_microbatches: int) -> PipelineSchedule:
    """Forward passes only, on the stages of ZB-V: s and 2p-1-s on group s, so that the pipeline ends where it began.

    A micro-batch enters every second task, which leaves each group one for the way down and one for the way up. Bubble
    2(p-1)F of one stage, on the first group; the last never waits. Nothing is in flight, since nothing is kept.
    """
    p, m = num_groups, num_microbatches
    lists = []
    for g in range(p):
        down, up = g, 2 * p - 1 - g
        at = [(2 * i + stage, Slot(F, stage, i)) for stage in (down, up) for i in range(m)]
        lists.append(tuple(slot for _, slot in sorted(at, key=lambda row: row[0])))
    return PipelineSchedule(
        name="inference-v",
        num_microbatches=m,
        num_stages=2 * p,
        mesh_of_stage=mesh_of_stages("inference-v", p, 2),
        lists=tuple(lists),
        splits_backward=False,
        in_flight=(0,) * p,
        forward_only=True,
    )


def _chain(
    name: str, lists: Sequence[Sequence[Slot]], num_microbatches: int, in_flight: Iterable[int]
) -> PipelineSchedule:
    """One stage on each group."""
    return PipelineSchedule(
        name=name,
        num_microbatches=num_microbatches,
        num_stages=len(lists),
        mesh_of_stage=tuple(range(len(lists))),
        lists=tuple(map(tuple, lists)),
        splits_backward=False,
        in_flight=tuple(in_flight),
    )


def _alternating(name: str, num_groups: int, num_microbatches: int, in_flight: Sequence[int]) -> PipelineSchedule:
    """As many forward passes as may be in flight, then backward and forward by turns."""
    m = num_microbatches
    bounds = [min(bound, m) for bound in in_flight]
    lists = [
        _turns([Slot(F, s, i) for i in range(m)], [Slot(B, s, i) for i in range(m)], bounds[s])
        for s in range(num_groups)
    ]
    return _chain(name, lists, m, bounds)


def _turns(forward: Sequence[Slot], backward: Sequence[Slot], in_flight: int) -> list[Slot]:
    """The first `in_flight` of `forward`, then one of `backward` and one of `forward` by turns."""
    todo = list(forward[:in_flight])
    for i, slot in enumerate(backward):
        todo += [slot, *forward[in_flight + i : in_flight + i + 1]]
    return todo


def _in_turns(kind: TaskKind, group: int, num_groups: int, num_microbatches: int, chunks: Iterable[int]) -> list[Slot]:
    """As many micro-batches as there are groups through one chunk, the same through the next, then the next ones."""
    p, order = num_groups, list(chunks)
    return [
        Slot(kind, chunk * p + group, i)
        for first in range(0, num_microbatches, p)
        for chunk in order
        for i in range(first, min(first + p, num_microbatches))
    ]


_Maker = Callable[[int, int, int], PipelineSchedule]
# Those whose lists are the same whatever tasks take, from (num_groups, num_microbatches, chunks).
_DRAWN: Mapping[str, _Maker] = MappingProxyType(
    {
        "gpipe": lambda p, m, v: gpipe(p, m),
        "1f1b": lambda p, m, v: one_f_one_b(p, m),
        "eager-1f1b": lambda p, m, v: eager_one_f_one_b(p, m),
        "interleaved": interleaved,
        "dualpipev": lambda p, m, v: dualpipev(p, m),
        "inference": inference,
        "inference-v": lambda p, m, v: inference_v(p, m),
    }
)

# Those that are fitted to what tasks take, where that is given.
_Fit = Callable[[int, int, StageCosts | None, bool], PipelineSchedule]
_FITTED: Mapping[str, _Fit] = MappingProxyType(
    {"zb-h1": zb_h1, "zb-h2": zb_h2, "zb-v": zb_v, "zb-1p": zb_1p, "zb-2p": zb_2p}
)

SCHEDULES = (*_DRAWN, *_FITTED)

# Stages on a group, where that is not 1.
_CHUNKS: Mapping[str, Callable[[int], bool]] = MappingProxyType(
    {
        "interleaved": lambda v: v >= 1,
        "inference": lambda v: v >= 1,
        **{name: lambda v: v == 2 for name in V_SHAPED},
    }
)


def make_schedule(
    name: str,
    num_groups: int,
    num_microbatches: int,
    chunks: int = 1,
    times: Times | StageCosts | None = None,
    *,
    whole_step: bool = False,
) -> PipelineSchedule:
    """The schedule of a name in `SCHEDULES`.

    Args:
        num_groups: Device groups of the pipeline.
        chunks: Stages on each group: any number for "interleaved" and "inference", 2 for those in a V ("zb-v",
            "dualpipev", "inference-v"), 1 for the others.
        times: Of one stage, or of each stage, where the zero-bubble schedules are to be fitted to them; the others do
            not ask.
        whole_step: They are fitted to end early, not to let the next step begin while groups still end this one: the
            least `Placement.makespan_s`, not `Placement.span_s`.

    Raises:
        InvalidArgumentError: An unknown name, or numbers that the schedule has no lists for.
    """
    expect_one_of("schedule", name, SCHEDULES, "1f1b is always possible", f"one of {', '.join(SCHEDULES)}")
    for what, number in (("num_groups", num_groups), ("num_microbatches", num_microbatches)):
        if number < 1:
            raise InvalidArgumentError(
                where=f"{what} of schedule {name}", expected="1 or more", got=str(number), hint=f"set {what}"
            )
    if not _CHUNKS.get(name, lambda v: v == 1)(chunks):
        expected = dict.fromkeys(("interleaved", "inference"), "1 or more")
        expected |= dict.fromkeys(V_SHAPED, "2 stages on each group")
        raise InvalidArgumentError(
            where=f"chunks of schedule {name}",
            expected=expected.get(name, "1 stage on each group"),
            got=str(chunks),
            hint="interleaved takes any number of stages on a group",
        )
    costs = _stage_costs(name, num_groups * chunks, times)
    if name in _DRAWN:
        return _DRAWN[name](num_groups, num_microbatches, chunks)
    return _FITTED[name](num_groups, num_microbatches, costs, whole_step)


def is_fitted(name: str) -> bool:
    """Whether a schedule has other lists for other times of its tasks."""
    return name in _FITTED


def _stage_costs(name: str, num_stages: int, times: Times | StageCosts | None) -> StageCosts | None:
    """Raises: InvalidArgumentError for costs of another number of stages, or none that can be."""
    if times is None:
        return None
    costs = times if isinstance(times, StageCosts) else StageCosts.alike(times, num_stages)
    each = dataclasses.astuple(costs)
    if (sizes := tuple(map(len, each))) != (num_stages,) * 3 + (num_stages - 1,) * 2 + (num_stages,):
        raise InvalidArgumentError(
            where=f"times of schedule {name}",
            expected=f"those of {num_stages} stages and of the transfers between them",
            got=f"{sizes[0]} stages, {sizes[3]} and {sizes[4]} transfers",
            hint="several stages on a group have times of their own",
        )
    passes_s = costs.forward_s + costs.backward_s + costs.weight_s
    if min(number for numbers in each for number in numbers) < 0 or not sum(passes_s) > 0:
        raise InvalidArgumentError(
            where=f"times of schedule {name}",
            expected="seconds, none below 0",
            got=str(times),
            hint="leave times out for the lists drawn for equal times",
        )
    return costs
