"""Collectives that XLA makes one of: gathers ahead of their readers, and reductions; rule (4) of `stream_simulator`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Sequence

from autopar.cost.stream_work import Stream, StreamWork, computes
from autopar.hardware.collective_cost import CollectiveKind


def early_work(program: Sequence[StreamWork], makers: Sequence[Sequence[int]]) -> list[bool]:
    """Which light computation, and names of its results, wait for nothing."""
    early: list[bool] = []
    for i, work in enumerate(program):
        is_light = work.stream is Stream.NEITHER or (work.is_light and work.stream is Stream.COMPUTE)
        early.append(is_light and all(map(early.__getitem__, makers[i])))
    return early


def with_combined_gathers(
    program: Sequence[StreamWork], makers: Sequence[Sequence[int]], early: Sequence[bool], combined_bytes: int
) -> list[StreamWork] | None:
    """(4) for gathers: those over the same axes of what waits for nothing, as one at the place of the first, behind
    what makes their operands; in program order, as long as their results are not too large. None where none are
    combined. `early`: as of `early_work`.
    """
    groups: list[list[int]] = []
    open_group: dict[Hashable, tuple[list[int], float]] = {}
    for i, work in enumerate(program):
        if work.gather is None or work.stream is not Stream.SEND or not all(early[m] for m in makers[i]):
            continue
        members, nbytes = open_group.get(work.gather, ([], math.inf))
        if nbytes + work.nbytes > combined_bytes:
            members, nbytes = [], 0.0
            groups.append(members)
        members.append(i)
        open_group[work.gather] = members, nbytes + work.nbytes
    groups = [members for members in groups if len(members) > 1]
    if not groups:
        return None
    at = {members[0]: members for members in groups}
    inside = {i for members in groups for i in members[1:]}
    placed: set[int] = set()
    combined: list[StreamWork] = []

    def place(i: int) -> None:
        """What early work reads, then the work."""
        stack = [i]
        while stack:
            missing = [m for m in makers[stack[-1]] if m not in placed]
            if missing:
                stack += missing
            elif (j := stack.pop()) not in placed:
                placed.add(j)
                combined.append(program[j])

    for i, work in enumerate(program):
        if i in at:
            for m in (m for member in at[i] for m in makers[member]):
                place(m)
            combined.append(_as_one([program[member] for member in at[i]]))
            placed.update(at[i])
        elif i not in inside and i not in placed:
            placed.add(i)
            combined.append(work)
    return combined


def _as_one(gathers: Sequence[StreamWork]) -> StreamWork:
    first, *others = gathers
    parts_s = [first.seconds, *(work.seconds - work.latency_s for work in others)]
    seconds = sum(parts_s)
    return dataclasses.replace(
        first,
        name=f"{first.name} and {len(others)} more",
        seconds=seconds,
        reads=tuple(dict.fromkeys(value for work in gathers for value in work.reads)),
        makes=tuple(value for work in gathers for value in work.makes),
        nbytes=sum(work.nbytes for work in gathers),
        sent_bytes=sum(work.sent_bytes for work in gathers),
        causes=tuple(
            (cause, share * part_s / seconds)
            for work, part_s in zip(gathers, parts_s, strict=True)
            for cause, share in (work.causes if seconds else ())
        ),
    )


@dataclasses.dataclass(slots=True)
class Group:
    """Reductions that start together, and those of them that could."""

    size: int = 0
    nbytes: float = 0.0
    there: list[int] = dataclasses.field(default_factory=list)


def combined_reductions(
    program: Sequence[StreamWork], makers: Sequence[Sequence[int]], combined_bytes: int, scattered_bytes: int
) -> dict[int, Group]:
    """(4): the group of each reduction that is combined with others.

    Reductions of one kind depend on each other only if one has more of the kind before it than the other.
    """
    of_kind: dict[Hashable, list[int]] = {}
    for i, work in enumerate(program):
        if work.stream is Stream.SEND and work.reduction is not None:
            of_kind.setdefault(work.reduction, []).append(i)
    groups: dict[int, Group] = {}
    last: list[int] = []  # the last computation on the way to each piece of work and through it
    made: list[int] = []  # the same, without the work itself
    for i, work_makers in enumerate(makers if of_kind else ()):
        at = -1
        for m in work_makers:
            at = max(at, last[m])
        made.append(at)
        last.append(i if computes(program[i]) else at)
    for reduction, reductions in of_kind.items():
        if len(reductions) == 1:
            continue
        scatters = isinstance(reduction, tuple) and reduction[0] is CollectiveKind.REDUCE_SCATTER
        most_bytes = scattered_bytes if scatters else combined_bytes
        its = set(reductions)
        before: list[int] = []  # reductions of the kind on the longest way to each piece of work
        through: list[int] = []  # the same, with the work itself
        for i, work_makers in enumerate(makers):
            most = 0
            for m in work_makers:
                if through[m] > most:
                    most = through[m]
            before.append(most)
            through.append(most + 1 if i in its else most)
        open_group: dict[int, Group] = {}
        for i in sorted(reductions, key=lambda i: (made[i], i)):
            group = open_group.get(before[i])
            if group is None or group.nbytes + program[i].nbytes > most_bytes:
                group = open_group[before[i]] = Group()
            groups[i] = group
            group.size += 1
            group.nbytes += program[i].nbytes
    return {i: group for i, group in groups.items() if group.size > 1}
