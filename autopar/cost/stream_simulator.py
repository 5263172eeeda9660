"""A model of XLA's latency-hiding scheduler: streams on a virtual clock, for computation, collectives, and host copies.

XLA makes two instructions of a collective, one that starts it and one that waits for it, and its scheduler moves the
two apart. `run` is a model of what comes of that:

(1) Work is ready when what it reads is there. Of what is ready, each stream takes what stands first in the program:
    gradients are reduced behind the backward pass of other layers, and nobody waits for a value that is not there while
    something else can be done.
(2) A gather (anything that does not reduce) comes ahead of its reader, but only while what is on its way or waits to be
    read is at most twice the largest result. XLA starts the next gather when the one before it has come in.
(3) What a gather reads without waiting for anything (the cast of a parameter) comes ahead with it.
(4) Reductions of one kind over the same axes that do not depend on each other start together, when the last is made,
    as long as their results are not too large to be combined.
(5) Collectives run one at a time; those that the compiler does not take apart hold up computing.
(6) Copies to the memory of the host and from there run one at a time, beside computing and collectives.

Source: programs that XLA compiled for eight H100 (jaxlib 0.10.2) and for a v5e slice (libtpu 0.0.42.1): chains of
products under data parallelism and ZeRO-3, and each kind of collective beside products that do not read it.

Not modelled: what a collective takes of the memory's rate and of a GPU's multiprocessors from the computation beside
it; the memory of what is gathered ahead, which `autopar.cost.peak_memory` counts from its place in the program on.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Hashable, Iterator, Sequence

from autopar.common.records import HashedById, made_often
from autopar.hardware.collective_cost import PLANNED_KINDS, CollectiveKind
from autopar.hardware.kinds import Platform

# (2): the result that is read next, and the one on its way meanwhile.
RESULTS_AHEAD = 2


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """What runs beside computing in programs of one compiler.

    `kinds` are the collectives that it takes apart; reductions whose results together have at most `combined_bytes` on
    a device become one. `host_copies`: copies to and from the memory of the host.
    """

    kinds: frozenset[CollectiveKind]
    combined_bytes: int
    host_copies: bool = False


def overlap_of(platform: Platform) -> Overlap:
    """What XLA does for a platform as long as no flags say otherwise.

    The threshold for GPUs is the default of `xla_gpu_all_reduce_combine_threshold_bytes` and of the same for
    reduce-scatter; TPU reductions hold up computing, however they are combined. Copies between the memories of a device
    and its host are a `copy-start` and a `copy-done` in programs for both.
    """
    if platform is Platform.GPU:
        return Overlap(kinds=frozenset(PLANNED_KINDS), combined_bytes=30 << 20, host_copies=True)
    if platform is Platform.TPU:
        apart = {CollectiveKind.ALL_GATHER, CollectiveKind.COLLECTIVE_PERMUTE}
        return Overlap(kinds=frozenset(apart), combined_bytes=0, host_copies=True)
    return Overlap(kinds=frozenset(), combined_bytes=0)


class Stream(HashedById):
    """What a piece of work keeps busy."""

    COMPUTE = "compute"
    SEND = "send"
    HOST = "host"  # copies between the memories of a device and its host
    BOTH = "both"  # a collective that holds up computing, or a loop in which something is sent
    NEITHER = "neither"  # takes no time: another name for a value, or a part of it


# What runs beside computing.
_BESIDE = (Stream.SEND, Stream.HOST)


@made_often
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StreamWork:
    """A piece of work for one device, between the values that it reads and makes.

    Attributes:
        nbytes: Of a collective, what its result takes on a device.
        sent_bytes: What the device sends.
        reduction: Set for a reduction; those with equal ones may be combined.
        is_light: Elementwise, or moving values.
        inside: Of a loop, its blocks, which run one after the other and take `seconds`.
    """

    name: str
    stream: Stream
    seconds: float
    reads: tuple[Hashable, ...] = ()
    makes: tuple[Hashable, ...] = ()
    nbytes: float = 0.0
    sent_bytes: float = 0.0
    reduction: Hashable = None
    is_light: bool = False
    inside: tuple[Ran, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StreamEvent:
    """Work on a stream, COMPUTE or SEND, between two moments."""

    name: str
    stream: Stream
    start_s: float
    end_s: float
    sent_bytes: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """Work in the order in which it started, and when that was. `compute_s`, `send_s`, `host_s` are sums by stream."""

    order: tuple[StreamWork, ...]
    starts_s: tuple[float, ...]
    end_s: float
    compute_s: float
    send_s: float
    host_s: float = 0.0

    @property
    def hidden_s(self) -> float:
        """Seconds in which something was computed and something else sent or copied."""
        if not any(work.stream in _BESIDE for work in self.order):  # else rounding would show
            return sum(ran.hidden_s for work in self.order for ran in work.inside)
        return max(0.0, self.compute_s + self.send_s + self.host_s - self.end_s)

    @property
    def busy_s(self) -> float:
        """How long the busiest stream has work: the step takes no less, in whatever order things run."""
        compute_s = sum(work.seconds for work in self.order if _computes(work))
        send_s = sum(work.seconds for work in self.order if work.stream in (Stream.SEND, Stream.BOTH))
        return max(compute_s, send_s, self.host_s)

    def events(self) -> Iterator[StreamEvent]:
        """What took time, in order. A loop stands for its blocks."""
        for work, start_s in zip(self.order, self.starts_s, strict=True):
            for ran in work.inside:
                for e in ran.events():
                    yield dataclasses.replace(e, start_s=start_s + e.start_s, end_s=start_s + e.end_s)
                start_s += ran.end_s
            if work.seconds and not work.inside:
                stream = Stream.COMPUTE if work.stream is Stream.COMPUTE else Stream.SEND
                yield StreamEvent(
                    name=work.name,
                    stream=stream,
                    start_s=start_s,
                    end_s=start_s + work.seconds,
                    sent_bytes=work.sent_bytes,
                )


def run(program: Sequence[StreamWork], combined_bytes: int = 0) -> Ran:
    """Runs a program, in which each value has one maker, that stands before its readers.

    What nothing makes is there from the start. The streams never all wait, so that the end lies between the longest of
    their sums and all together.
    """
    if any(work.stream in _BESIDE for work in program):
        return _Clock(program, combined_bytes).run()
    starts_s, now_s = [], 0.0
    for work in program:
        starts_s.append(now_s)
        now_s += work.seconds
    return _ran(program, starts_s, now_s)


def _ran(order: Sequence[StreamWork], starts_s: Sequence[float], end_s: float) -> Ran:
    compute_s = sum(work.seconds for work in order if not work.inside and work.stream is Stream.COMPUTE)
    send_s = sum(work.seconds for work in order if not work.inside and work.stream in (Stream.SEND, Stream.BOTH))
    inside = [ran for work in order for ran in work.inside]
    return Ran(
        order=tuple(order),
        starts_s=tuple(starts_s),
        end_s=end_s,
        compute_s=compute_s + sum(ran.compute_s for ran in inside),
        send_s=send_s + sum(ran.send_s for ran in inside),
        host_s=sum(work.seconds for work in order if work.stream is Stream.HOST),
    )


class _Queue:
    """What one stream has to do: what is known to become ready, and of that what is ready, by rank."""

    def __init__(self) -> None:
        self.free_s = 0.0
        self.coming: list[tuple[float, tuple[int, int]]] = []
        self.ready: list[tuple[int, int]] = []

    def next_s(self) -> float:
        """When the stream can start something."""
        if self.ready:
            return self.free_s
        return max(self.free_s, self.coming[0][0]) if self.coming else math.inf

    def take(self, now_s: float) -> int:
        """What it starts then."""
        while self.coming and self.coming[0][0] <= now_s:
            heapq.heappush(self.ready, heapq.heappop(self.coming)[1])
        return heapq.heappop(self.ready)[1]


class _Clock:
    """A program while it runs. Work is known by its position."""

    def __init__(self, program: Sequence[StreamWork], combined_bytes: int) -> None:
        self.program = program
        self.makers = _makers(program)
        self.rank = [2 * i + 1 for i in range(len(program))]
        self.waits_for = [len(makers) for makers in self.makers]
        self.ready_s = [0.0] * len(program)
        self.readers: list[list[int]] = [[] for _ in program]
        for i, makers in enumerate(self.makers):
            for m in makers:
                self.readers[m].append(i)
        self.released_by: dict[int, list[int]] = {}  # gathers that may start once this has started
        self.hold_back()
        self.groups = _combined(program, self.makers, combined_bytes)
        self.compute, self.send, self.host = _Queue(), _Queue(), _Queue()
        of_stream = {Stream.SEND: self.send, Stream.HOST: self.host}
        self.queue_of = [of_stream.get(work.stream, self.compute) for work in program]
        self.queues = tuple(dict.fromkeys((self.compute, self.send, *self.queue_of)))
        self.arrived: list[int] = []  # work for which all is there that it waits for
        self.order: list[StreamWork] = []
        self.starts_s: list[float] = []
        self.end_s = 0.0

    def hold_back(self) -> None:
        """(2) and (3)."""
        program = self.program
        first_read: dict[int, int] = {}
        origins: list[tuple[int, ...]] = []  # what made the values that something is another name for
        early: list[bool] = []
        for i, work in enumerate(program):
            found = tuple(origin for m in self.makers[i] for origin in origins[m])
            is_name = work.stream is Stream.NEITHER
            is_light = is_name or (work.is_light and work.stream is Stream.COMPUTE)
            early.append(is_light and all(early[m] for m in self.makers[i]))
            origins.append(found if is_name else (i,))
            if not is_name:
                for origin in found:
                    first_read.setdefault(origin, i)
        gathers = [i for i, work in enumerate(program) if work.stream is Stream.SEND and work.reduction is None]
        most_bytes = RESULTS_AHEAD * max((program[i].nbytes for i in gathers), default=0.0)
        first, ahead_bytes = 0, 0.0
        for i in gathers:
            ahead_bytes += program[i].nbytes
            while ahead_bytes > most_bytes:
                ahead_bytes -= program[gathers[first]].nbytes
                first += 1
            # What stands behind the gather must not hold it back: it may wait for the gather.
            reader = first_read.get(gathers[first - 1], len(program)) if first else len(program)
            if reader < i:
                self.released_by.setdefault(reader, []).append(i)
                self.waits_for[i] += 1
            rank = 2 * reader if reader < i else 0
            along = [m for m in self.makers[i] if early[m]]
            while along:
                m = along.pop()
                if self.rank[m] > rank:
                    self.rank[m] = rank
                    along += self.makers[m]

    def run(self) -> Ran:
        self.arrived += [i for i, missing in enumerate(self.waits_for) if not missing]
        while True:
            while self.arrived:
                self.arrive(self.arrived.pop())
            if len(self.order) == len(self.program):
                return _ran(self.order, self.starts_s, self.end_s)
            queue = min(self.queues, key=_Queue.next_s)
            starts_s = queue.next_s()
            if math.isinf(starts_s):
                self.dissolve()
            else:
                self.start(queue.take(starts_s), starts_s)

    def start(self, i: int, at_s: float) -> None:
        work = self.program[i]
        start_s = max(at_s, self.send.free_s) if work.stream is Stream.BOTH else at_s
        done_s = start_s + work.seconds
        if _computes(work):
            self.compute.free_s = done_s
        if work.stream in (Stream.SEND, Stream.BOTH):
            self.send.free_s = done_s
        if work.stream is Stream.HOST:
            self.host.free_s = done_s
        self.order.append(work)
        self.starts_s.append(start_s)
        self.end_s = max(self.end_s, done_s)
        for gather in self.released_by.get(i, ()):
            self.got(gather, start_s)
        for reader in self.readers[i]:
            self.got(reader, done_s)

    def got(self, i: int, at_s: float) -> None:
        """One of the things that work waits for is there."""
        self.ready_s[i] = max(self.ready_s[i], at_s)
        self.waits_for[i] -= 1
        if not self.waits_for[i]:
            self.arrived.append(i)

    def arrive(self, i: int) -> None:
        """Takes up work that waits for nothing any more, but perhaps for what it is combined with."""
        group = self.groups.get(i) if self.groups else None
        if self.program[i].stream is Stream.NEITHER:
            self.start(i, self.ready_s[i])
        elif group is None:
            self.queue(i, self.ready_s[i])
        else:
            group.there.append(i)
            if len(group.there) == group.size:
                self.release(group)

    def release(self, group: _Group, not_before_s: float = 0.0) -> None:
        ready_s = max(not_before_s, *(self.ready_s[i] for i in group.there))
        for i in group.there:
            del self.groups[i]
            self.queue(i, ready_s)

    def dissolve(self) -> None:
        """Where groups wait for each other, one of them starts as far as it is there."""
        waiting = next((group for group in self.groups.values() if group.there), None)
        assert waiting is not None, "nothing can start: work waits for what comes behind it in the program"
        for i in [i for i, group in self.groups.items() if group is waiting and i not in waiting.there]:
            del self.groups[i]
        self.release(waiting, max(self.compute.free_s, self.send.free_s))

    def queue(self, i: int, ready_s: float) -> None:
        heapq.heappush(self.queue_of[i].coming, (ready_s, (self.rank[i], i)))


def _makers(program: Sequence[StreamWork]) -> list[list[int]]:
    """For each piece of work, the positions of what makes its operands."""
    made_by: dict[Hashable, int] = {}
    found = []
    for i, work in enumerate(program):
        found.append([made_by[value] for value in work.reads if value in made_by])
        made_by.update(dict.fromkeys(work.makes, i))
    return found


@dataclasses.dataclass(slots=True)
class _Group:
    """Reductions that start together, and those of them that could."""

    size: int = 0
    nbytes: float = 0.0
    there: list[int] = dataclasses.field(default_factory=list)


def _combined(program: Sequence[StreamWork], makers: Sequence[Sequence[int]], combined_bytes: int) -> dict[int, _Group]:
    """(4): the group of each reduction that is combined with others.

    Reductions of one kind depend on each other only if one has more of the kind before it than the other.
    """
    of_kind: dict[Hashable, list[int]] = {}
    for i, work in enumerate(program):
        if work.stream is Stream.SEND and work.reduction is not None:
            of_kind.setdefault(work.reduction, []).append(i)
    groups: dict[int, _Group] = {}
    last: list[int] = []  # the last computation on the way to each piece of work and through it
    made: list[int] = []  # the same, without the work itself
    for i, work_makers in enumerate(makers if of_kind else ()):
        at = -1
        for m in work_makers:
            at = max(at, last[m])
        made.append(at)
        last.append(i if _computes(program[i]) else at)
    for reductions in of_kind.values():
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
        open_group: dict[int, _Group] = {}
        for i in sorted(reductions, key=lambda i: (made[i], i)):
            group = open_group.get(before[i])
            if group is None or group.nbytes + program[i].nbytes > combined_bytes:
                group = open_group[before[i]] = _Group()
            groups[i] = group
            group.size += 1
            group.nbytes += program[i].nbytes
    return {i: group for i, group in groups.items() if group.size > 1}


def _computes(work: StreamWork) -> bool:
    return work.stream in (Stream.COMPUTE, Stream.BOTH)
