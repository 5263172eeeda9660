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
    as long as their results are not too large to be combined. So do gathers: those of what waits for nothing (3) at the
    place of the first. What is combined has the latency of one collective.
(5) Collectives run one at a time; those that the compiler does not take apart hold up computing.
(6) Copies to the memory of the host and from there run one at a time, beside computing and collectives.
(7) Where that is shorter, computation that leads to no collective, such as gradients of weights that stay where they
    are, runs while nothing else can: behind the gradient of activations whose reduction it hides.

Source: programs that XLA compiled for eight H100 (jaxlib 0.10.2) and for a v5e slice (libtpu 0.0.42.1): chains of
products under data parallelism, ZeRO-1 and ZeRO-3, and each kind of collective beside products that do not read it.

Not modelled: what a collective takes of the memory's rate and of a GPU's multiprocessors from the computation beside
it; the memory of what is gathered ahead, which `autopar.cost.peak_memory` counts from its place in the program on.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Hashable, Iterator, Sequence

import msgspec
from msgspec.structs import replace

from autopar.common.enums import HashedById
from autopar.hardware.collective_cost import PLANNED_KINDS, CollectiveKind
from autopar.hardware.kinds import Platform
from autopar.lowering.instructions import Compute

# Work on the streams of a device: what a program does, in which order it ran, and when.


# Collectives that are counted together: their kind, the mesh axes that they are over, and the module that sends.
Cause = tuple[CollectiveKind, tuple[int, ...], str]
# What a collective is counted under, each with its share of the seconds: several where collectives are combined.
Causes = tuple[tuple[Cause, float], ...]


class Stream(HashedById):
    """What a piece of work keeps busy."""

    COMPUTE = "compute"
    SEND = "send"
    HOST = "host"  # copies between the memories of a device and its host
    BOTH = "both"  # a collective that holds up computing, or a loop in which something is sent
    NEITHER = "neither"  # takes no time: another name for a value, or a part of it


# What runs beside computing.
BESIDE = (Stream.SEND, Stream.HOST)


class StreamWork(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """A piece of work for one device, between the values that it reads and makes.

    Attributes:
        nbytes: Of a collective, what its result takes on a device.
        sent_bytes: What the device sends.
        reduction: Set for a reduction; those with equal ones may be combined.
        gather: The same of an all-gather.
        latency_s: Of a collective, the part of `seconds` that does not depend on its bytes.
        is_light: Elementwise, or moving values.
        causes: Of a collective, what it is counted under.
        inside: Of a loop, its blocks, which run one after the other and take `seconds`.
        pieces_of: The product of whose pieces it computes or sends one.
    """

    name: str
    stream: Stream
    seconds: float
    reads: tuple[Hashable, ...] = ()
    makes: tuple[Hashable, ...] = ()
    nbytes: float = 0.0
    sent_bytes: float = 0.0
    reduction: Hashable = None
    gather: Hashable = None
    latency_s: float = 0.0
    is_light: bool = False
    causes: Causes = ()
    inside: tuple[Ran, ...] = ()
    pieces_of: Hashable = None


@dataclasses.dataclass(slots=True)
class KeptWork:
    """What programs of one graph have in common of an instruction: the numbers of the places that it reads and makes,
    and its work, where that is one piece.
    """

    compute: Compute
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    work: StreamWork | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class SendTime:
    """Seconds of collectives, and those of them in which nothing is computed: what the step waits for."""

    seconds: float
    exposed_s: float

    def __add__(self, other: SendTime) -> SendTime:
        return SendTime(self.seconds + other.seconds, self.exposed_s + other.exposed_s)

    def times(self, share: float) -> SendTime:
        return SendTime(share * self.seconds, share * self.exposed_s)


NO_TIME = SendTime(0.0, 0.0)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StreamEvent:
    """Work on a stream, COMPUTE or SEND, between two moments."""

    name: str
    stream: Stream
    start_s: float
    end_s: float
    sent_bytes: float = 0.0
    causes: Causes = ()


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
        if not any(work.stream in BESIDE for work in self.order):  # else rounding would show
            return sum(ran.hidden_s for work in self.order for ran in work.inside)
        return max(0.0, self.compute_s + self.send_s + self.host_s - self.end_s)

    @property
    def busy_s(self) -> float:
        """How long the busiest stream has work: the step takes no less, in whatever order things run."""
        compute_s = sum(work.seconds for work in self.order if computes(work))
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
                    causes=work.causes,
                )

    def sends(self) -> dict[Cause, SendTime]:
        """Cause of collectives -> their seconds. Of combined ones the first has the latency, the others none."""
        computed: list[tuple[float, float]] = []
        sent: list[tuple[float, float, Causes]] = []
        for event in self.events():
            if event.stream is Stream.COMPUTE:
                computed.append((event.start_s, event.end_s))
            elif event.causes:
                sent.append((event.start_s, event.end_s, event.causes))
        computed.sort()
        sent.sort(key=lambda each: each[:2])
        found: dict[Cause, SendTime] = {}
        first = 0  # collectives run one at a time: what ended before one began ended before the next
        for start_s, end_s, causes in sent:
            while first < len(computed) and computed[first][1] <= start_s:
                first += 1
            exposed_s, at = end_s - start_s, first
            while at < len(computed) and computed[at][0] < end_s:
                exposed_s -= min(computed[at][1], end_s) - max(computed[at][0], start_s)
                at += 1
            time = SendTime(end_s - start_s, max(0.0, exposed_s))
            for cause, share in causes:
                found[cause] = found.get(cause, NO_TIME) + time.times(share)
        return found


def computes(work: StreamWork) -> bool:
    return work.stream in (Stream.COMPUTE, Stream.BOTH)


def makers_of(program: Sequence[StreamWork]) -> list[list[int]]:
    """For each piece of work, the positions of what makes its operands."""
    made_by: dict[Hashable, int] = {}
    found = []
    for i, work in enumerate(program):
        found.append([made_by[value] for value in work.reads if value in made_by])
        made_by.update(dict.fromkeys(work.makes, i))
    return found


# Collectives that XLA makes one of: gathers ahead of their readers, and reductions; rule (4) above.


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
    return replace(
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


def leads_to_collective(program: Sequence[StreamWork], readers: Sequence[Sequence[int]]) -> list[bool]:
    """(7): whether a collective needs a piece of work; of pieces of a product, another collective than theirs."""
    sends = [work.stream in (Stream.SEND, Stream.BOTH) for work in program]
    leads = [False] * len(program)
    for i in range(len(program) - 1, -1, -1):
        of = program[i].pieces_of
        leads[i] = any(leads[j] or (sends[j] and (of is None or program[j].pieces_of != of)) for j in readers[i])
    return leads


@dataclasses.dataclass(slots=True)
class Group:
    """Collectives that start together, and those of them that could."""

    size: int = 0
    nbytes: float = 0.0
    there: list[int] = dataclasses.field(default_factory=list)


def combined_later(
    program: Sequence[StreamWork],
    makers: Sequence[Sequence[int]],
    early: Sequence[bool],
    combined_bytes: int,
    scattered_bytes: int,
) -> dict[int, Group]:
    """(4): the group of each reduction that is combined with others, and of each gather that waits for something, such
    as those of new parameters. `early`: as of `early_work`.

    Collectives of one kind depend on each other only if one has more of the kind before it than the other.
    """
    of_kind: dict[Hashable, list[int]] = {}
    for i, work in enumerate(program):
        if work.stream is not Stream.SEND:
            continue
        if work.reduction is not None:
            of_kind.setdefault(work.reduction, []).append(i)
        elif work.gather is not None and not all(early[m] for m in makers[i]):
            of_kind.setdefault((CollectiveKind.ALL_GATHER, work.gather), []).append(i)
    groups: dict[int, Group] = {}
    last: list[int] = []  # the last computation on the way to each piece of work and through it
    made: list[int] = []  # the same, without the work itself
    for i, work_makers in enumerate(makers if of_kind else ()):
        at = -1
        for m in work_makers:
            at = max(at, last[m])
        made.append(at)
        last.append(i if computes(program[i]) else at)
    for kind, collectives in of_kind.items():
        if len(collectives) == 1:
            continue
        scatters = isinstance(kind, tuple) and kind[0] is CollectiveKind.REDUCE_SCATTER
        most_bytes = scattered_bytes if scatters else combined_bytes
        its = set(collectives)
        before: list[int] = []  # collectives of the kind on the longest way to each piece of work
        through: list[int] = []  # the same, with the work itself
        for i, work_makers in enumerate(makers):
            most = 0
            for m in work_makers:
                if through[m] > most:
                    most = through[m]
            before.append(most)
            through.append(most + 1 if i in its else most)
        open_group: dict[int, Group] = {}
        for i in sorted(collectives, key=lambda i: (made[i], i)):
            group = open_group.get(before[i])
            if group is None or group.nbytes + program[i].nbytes > most_bytes:
                group = open_group[before[i]] = Group()
            groups[i] = group
            group.size += 1
            group.nbytes += program[i].nbytes
    return {i: group for i, group in groups.items() if group.size > 1}


ALL_BYTES = 1 << 40  # a threshold that combines all collectives of a program

# (2): the result that is read next, and the one on its way meanwhile.
RESULTS_AHEAD = 2
# (7): the share of a program that nothing is computed in, from which on another order is tried.
WORTH_ANOTHER_ORDER = 0.02


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """What runs beside computing in programs of one compiler.

    `kinds` are the collectives that it takes apart; those whose results together have at most `combined_bytes` on a
    device become one, reduce-scatters up to `scattered_bytes`. `host_copies`: copies to and from the memory of the
    host. `slices_ahead`: copies of slices that the next turn of a scan reads, of arrays in the memory of the host.
    """

    kinds: frozenset[CollectiveKind]
    combined_bytes: int
    scattered_bytes: int = 0
    host_copies: bool = False
    slices_ahead: bool = False


def overlap_of(platform: Platform, largest_axis: int = 1) -> Overlap:
    """What XLA does for a platform under the options of a plan (`compiler_options`) whose largest mesh axis has so many
    devices.

    The threshold for GPUs is the default of `xla_gpu_all_reduce_combine_threshold_bytes` and of the same for gathers.
    That for reduce-scatters counts results too, which are a part of what is sent: at the default, those of a whole
    backward pass become one that starts at its end. Here they are combined up to as many bytes of their operands, over
    the largest axis. TPU reductions hold up computing, however they are combined. Copies between the memories of a
    device and its host are a start and a `done` in programs for both, with computing in between. In a scan for TPU a
    turn starts that of the next turn's slice (seen for v6e and TPU7x, libtpu 0.0.42.1, and taken for the TPUs before).
    """
    if platform is Platform.GPU:
        combined_bytes = 30 << 20
        return Overlap(
            kinds=frozenset(PLANNED_KINDS),
            combined_bytes=combined_bytes,
            scattered_bytes=combined_bytes // largest_axis,
            host_copies=True,
        )
    if platform is Platform.TPU:
        apart = {CollectiveKind.ALL_GATHER, CollectiveKind.COLLECTIVE_PERMUTE}
        return Overlap(kinds=frozenset(apart), combined_bytes=0, host_copies=True, slices_ahead=True)
    return Overlap(kinds=frozenset(), combined_bytes=0)


def overlap_of_exchanges(overlap: Overlap) -> Overlap:
    """Of programs that run once a step beside a pipeline's micro-batches: they exchange gradients or gather parameters
    and have nothing to hide that behind, so that one collective, with one latency, is the best. A ring of 48 hosts has
    latencies of 0.7 ms, in which 33 MB cross a link of 400 Gb/s.
    """
    if not overlap.combined_bytes:
        return overlap
    return dataclasses.replace(overlap, combined_bytes=ALL_BYTES, scattered_bytes=ALL_BYTES)


def run(program: Sequence[StreamWork], combined_bytes: int = 0, scattered_bytes: int | None = None) -> Ran:
    """Runs a program, in which each value has one maker, that stands before its readers; `combined_bytes` and
    `scattered_bytes` (by default the same) as those of `Overlap`.

    What nothing makes is there from the start. The streams never all wait, so that the end lies between the longest of
    their sums and all together.
    """
    if any(work.stream in BESIDE for work in program):
        scattered_bytes = combined_bytes if scattered_bytes is None else scattered_bytes
        makers = makers_of(program)
        early = early_work(program, makers)
        combined = with_combined_gathers(program, makers, early, combined_bytes)
        if combined is not None:
            program, makers = combined, makers_of(combined)
            early = early_work(program, makers)
        orders = (
            _Clock(program, makers, early, combined_bytes, scattered_bytes, defers=defers) for defers in (False, True)
        )
        ran = next(orders).run()
        if ran.end_s - ran.compute_s > WORTH_ANOTHER_ORDER * ran.end_s:
            ran = min(ran, next(orders).run(), key=lambda ran: ran.end_s)
        return ran
    starts_s, now_s = [], 0.0
    for work in program:
        starts_s.append(now_s)
        now_s += work.seconds
    return _ran(program, starts_s, now_s)


def _ran(order: Sequence[StreamWork], starts_s: Sequence[float], end_s: float) -> Ran:
    compute_s = sum([work.seconds for work in order if work.stream is Stream.COMPUTE and not work.inside])
    others = [work for work in order if work.stream is not Stream.COMPUTE]
    send_s = sum([work.seconds for work in others if work.stream in (Stream.SEND, Stream.BOTH) and not work.inside])
    inside = [ran for work in order if work.inside for ran in work.inside]
    return Ran(
        order=tuple(order),
        starts_s=tuple(starts_s),
        end_s=end_s,
        compute_s=compute_s + sum(ran.compute_s for ran in inside),
        send_s=send_s + sum(ran.send_s for ran in inside),
        host_s=sum([work.seconds for work in others if work.stream is Stream.HOST]) + sum(ran.host_s for ran in inside),
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

    def __init__(
        self,
        program: Sequence[StreamWork],
        makers: list[list[int]],
        early: Sequence[bool],
        combined_bytes: int,
        scattered_bytes: int,
        *,
        defers: bool,
    ) -> None:
        """`defers`: whether computation gives way as in (7)."""
        self.program = list(program)
        self.makers, self.early = makers, early
        self.waits_for = [len(of_work) for of_work in makers]
        self.ready_s = [0.0] * len(program)
        self.readers: list[list[int]] = [[] for _ in program]
        for i, of_work in enumerate(makers):
            for m in of_work:
                self.readers[m].append(i)
        self.rank = [2 * i + 1 for i in range(len(program))]
        for i, leads in enumerate(leads_to_collective(program, self.readers) if defers else ()):
            if program[i].stream is Stream.COMPUTE and not leads:
                self.rank[i] += 2 * len(program)
        self.released_by: dict[int, list[int]] = {}  # gathers that may start once this has started
        self.hold_back()
        self.groups = combined_later(program, self.makers, self.early, combined_bytes, scattered_bytes)
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
        gathers = [i for i, work in enumerate(program) if work.stream is Stream.SEND and work.reduction is None]
        first_read: dict[int, int] = {}
        origins: list[tuple[int, ...]] = [()] * len(program)  # the gathers of which something makes values, or names
        for i in gathers:
            origins[i] = (i,)
        for i, work in enumerate(program if gathers else ()):
            if work.stream is Stream.NEITHER:
                origins[i] = tuple([origin for m in self.makers[i] for origin in origins[m]])
                continue
            for m in self.makers[i]:
                for origin in origins[m]:
                    first_read.setdefault(origin, i)
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
            along = [m for m in self.makers[i] if self.early[m]]
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
        stream, start_s = work.stream, at_s
        if stream is Stream.BOTH:
            start_s = max(at_s, self.send.free_s)
        done_s = start_s + work.seconds
        if stream is Stream.COMPUTE:
            self.compute.free_s = done_s
        elif stream is Stream.SEND:
            self.send.free_s = done_s
        elif stream is Stream.BOTH:
            self.compute.free_s = self.send.free_s = done_s
        elif stream is Stream.HOST:
            self.host.free_s = done_s
        self.order.append(work)
        self.starts_s.append(start_s)
        if done_s > self.end_s:
            self.end_s = done_s
        if i in self.released_by:
            for gather in self.released_by[i]:
                self.got(gather, start_s)
        ready_s, waits_for = self.ready_s, self.waits_for
        for reader in self.readers[i]:  # as `got`
            if done_s > ready_s[reader]:
                ready_s[reader] = done_s
            waits_for[reader] -= 1
            if not waits_for[reader]:
                self.arrived.append(reader)

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

    def release(self, group: Group, not_before_s: float = 0.0) -> None:
        ready_s = max(not_before_s, *(self.ready_s[i] for i in group.there))
        for i in sorted(group.there, key=lambda i: self.rank[i])[1:]:
            work = self.program[i]
            if work.latency_s:
                self.program[i] = replace(work, seconds=work.seconds - work.latency_s, latency_s=0.0)
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
