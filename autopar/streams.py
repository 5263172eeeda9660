"""Two streams on a virtual clock: one computes, the other sends. What overlaps is decided by the order of issue.

XLA makes two instructions of a collective, one that starts it and one that waits for it, and moves the two apart.
`order_of_issue` is a model of where they come to stand, `run` of the time that an order takes:

(1) A reduction starts as soon as what it reduces is made.
(2) Anything else (a gather) starts ahead of its reader, but only while what is on its way or waits to be read is at
    most twice the largest result. XLA starts the next gather when the one before it has come in, ahead of its reader.
(3) Elementwise work is fused into what reads it: the cast of a parameter is computed right before its gather, the
    transpose of a reduced gradient not before the update.
(4) Reductions of one kind over the same axes, of which none is read before the last is made, start together, as long
    as their results are not too large to be combined.
(5) Collectives run one at a time in the order of issue, and none starts before computing has come to its place.
(6) Collectives that the compiler does not take apart hold up computing.

Source: programs that XLA compiled for eight H100 (jaxlib 0.10.2) and for a v5e slice (libtpu 0.0.42.1): chains of
products under data parallelism and ZeRO-3, and each kind of collective beside products that do not read it.

Not modelled: what a collective takes of the memory's rate and of a GPU's multiprocessors from the computation beside
it; the memory of what is gathered ahead, which `autopar.memory` counts from its place in the program on.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Hashable, Iterator, Sequence

from autopar.collectives import CollectiveKind

# (2): the result that is read next, and the one on its way meanwhile.
RESULTS_AHEAD = 2


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """What runs beside computing in programs of one compiler.

    `kinds` are the collectives that it takes apart; reductions whose results together have at most `combined_bytes` on
    a device become one.
    """

    kinds: frozenset[CollectiveKind]
    combined_bytes: int


def overlap_of(platform: str) -> Overlap:
    """What XLA does for a platform (`cpu`, `gpu`, `tpu`) as long as no flags say otherwise.

    The threshold for GPUs is the default of `xla_gpu_all_reduce_combine_threshold_bytes` and of the same for
    reduce-scatter; TPU reductions hold up computing, however they are combined.
    """
    if platform == "gpu":
        return Overlap(kinds=frozenset(CollectiveKind), combined_bytes=30 << 20)
    if platform == "tpu":
        apart = {CollectiveKind.ALL_GATHER, CollectiveKind.COLLECTIVE_PERMUTE}
        return Overlap(kinds=frozenset(apart), combined_bytes=0)
    return Overlap(kinds=frozenset(), combined_bytes=0)


class Stream(enum.Enum):
    """What a piece of work keeps busy."""

    COMPUTE = "compute"
    SEND = "send"
    BOTH = "both"  # a collective that holds up computing, or a loop in which something is sent
    NEITHER = "neither"  # takes no time: another name for a value, or a part of it


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A piece of work for one device, between the values that it reads and makes.

    Attributes:
        nbytes: Of a collective, what its result takes on a device.
        sent_bytes: What the device sends.
        reduction: Set for a reduction; those with equal ones may be combined.
        is_light: Elementwise, or moving values: computed by its readers.
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

    @property
    def follows(self) -> bool:
        """Whether it is issued where it is first read, wherever it stands."""
        return self.stream is Stream.NEITHER or (self.is_light and self.stream is Stream.COMPUTE)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Work on a stream, COMPUTE or SEND, between two moments."""

    name: str
    stream: Stream
    start_s: float
    end_s: float
    sent_bytes: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """Work in the order of issue, and when each piece started. `compute_s` and `send_s` are sums."""

    order: tuple[Work, ...]
    starts_s: tuple[float, ...]
    end_s: float
    compute_s: float
    send_s: float

    @property
    def hidden_s(self) -> float:
        """Seconds in which something was computed and something else sent."""
        if not any(work.stream is Stream.SEND for work in self.order):  # else rounding would show
            return sum(ran.hidden_s for work in self.order for ran in work.inside)
        return max(0.0, self.compute_s + self.send_s - self.end_s)

    def events(self) -> Iterator[Event]:
        """What took time, in the order of issue. A loop stands for its blocks."""
        for work, start_s in zip(self.order, self.starts_s, strict=True):
            for ran in work.inside:
                for e in ran.events():
                    yield dataclasses.replace(e, start_s=start_s + e.start_s, end_s=start_s + e.end_s)
                start_s += ran.end_s
            if work.seconds and not work.inside:
                stream = Stream.COMPUTE if work.stream is Stream.COMPUTE else Stream.SEND
                yield Event(
                    name=work.name,
                    stream=stream,
                    start_s=start_s,
                    end_s=start_s + work.seconds,
                    sent_bytes=work.sent_bytes,
                )


def run(order: Sequence[Work]) -> Ran:
    """Runs work in the order of issue: each piece starts when what it reads is there and its stream is free.

    What nothing makes is there from the start. The streams never both idle, so that the end lies between the longer of
    the two sums and both together.
    """
    computed_s = sent_s = compute_s = send_s = 0.0
    there_s: dict[Hashable, float] = {}
    starts_s: list[float] = []
    end_s = 0.0
    for work in order:
        start_s = max((there_s.get(value, 0.0) for value in work.reads), default=0.0)
        if work.stream is not Stream.NEITHER:
            start_s = max(start_s, computed_s)  # (5) holds up a collective until computing has come to its place
        if work.stream in (Stream.SEND, Stream.BOTH):
            start_s = max(start_s, sent_s)
        done_s = start_s + work.seconds
        if work.stream in (Stream.COMPUTE, Stream.BOTH):
            computed_s = done_s
        if work.stream in (Stream.SEND, Stream.BOTH):
            sent_s = done_s
        if work.inside:
            compute_s += sum(ran.compute_s for ran in work.inside)
            send_s += sum(ran.send_s for ran in work.inside)
        elif work.stream is Stream.COMPUTE:
            compute_s += work.seconds
        else:
            send_s += work.seconds
        for value in work.makes:
            there_s[value] = done_s
        starts_s.append(start_s)
        end_s = max(end_s, done_s)
    return Ran(order=tuple(order), starts_s=tuple(starts_s), end_s=end_s, compute_s=compute_s, send_s=send_s)


def order_of_issue(program: Sequence[Work], combined_bytes: int = 0) -> tuple[Work, ...]:
    """Work in program order -> in the order in which a compiler issues it, by rules (1) to (4).

    Each value has one maker, which stands before its readers, here as there.
    """
    if not any(work.stream is Stream.SEND for work in program):
        return tuple(program)
    makers, earliest = _makers(program), _ahead(program)
    places = _places(program, makers, earliest)
    for i, place in _combined(program, makers, places, combined_bytes).items():
        earliest[i] = place
    places = _places(program, makers, earliest)
    issued: list[list[Work]] = [[] for _ in range(4 * len(program) + 1)]
    for work, place in zip(program, places, strict=True):
        issued[place].append(work)
    return tuple(work for works in issued for work in works)


def _makers(program: Sequence[Work]) -> list[list[int]]:
    """For each piece of work, the positions of what makes its operands."""
    made_by: dict[Hashable, int] = {}
    found = []
    for i, work in enumerate(program):
        found.append([made_by[value] for value in work.reads if value in made_by])
        made_by.update(dict.fromkeys(work.makes, i))
    return found


# Places of issue are numbered: 2 p is right before position p of the program, 2 p + 1 is there; of one place, work is
# issued in program order. From twice the length of the program on they are behind everything in it.


def _ahead(program: Sequence[Work]) -> list[int]:
    """(2): the first place at which a collective may start; 0 for reductions, by (1)."""
    earliest = [0] * len(program)
    gathers = [i for i, work in enumerate(program) if work.stream is Stream.SEND and work.reduction is None]
    most_bytes = RESULTS_AHEAD * max((program[i].nbytes for i in gathers), default=0.0)
    first, ahead_bytes = 0, 0.0
    for i in gathers:
        ahead_bytes += program[i].nbytes
        while ahead_bytes > most_bytes:
            ahead_bytes -= program[gathers[first]].nbytes
            first += 1
        # A gather stands right before its reader. Once that has its turn, the gather counts no more.
        earliest[i] = 2 * (gathers[first - 1] + 1) if first else 0
    return earliest


def _places(program: Sequence[Work], makers: Sequence[Sequence[int]], earliest: Sequence[int]) -> list[int]:
    """Where each piece of work is issued; what is neither sent nor light stays where it stands."""
    end = 2 * len(program)
    places = [2 * end if work.follows else 2 * i + 1 for i, work in enumerate(program)]
    behind: list[int] = []  # the first place at which what a piece of work makes can be read
    sent: list[bool] = []  # whether that has come from other devices
    waits: list[bool] = []  # whether it is light work on what has come from other devices
    for i, work in enumerate(program):
        ready = max((behind[m] for m in makers[i]), default=0)
        sends, of_sent = work.stream is Stream.SEND, any(sent[m] for m in makers[i])
        if sends:
            # What it reads comes along, by (3): not if computing would have to wait for that.
            places[i] = 2 * i if any(waits[m] for m in makers[i]) else max(earliest[i], ready)
        behind.append(places[i] if sends else ready if work.follows else 2 * i + 2)
        sent.append(sends or (work.stream is Stream.NEITHER and of_sent))
        waits.append(work.follows and (any(waits[m] for m in makers[i]) or (work.stream is Stream.COMPUTE and of_sent)))
    for i in reversed(range(len(program))):
        if places[i] == 2 * end:  # made for nobody here: at the end, what is ready first comes first
            places[i] = end + behind[i]
        for m in makers[i]:
            if program[m].follows:
                places[m] = min(places[m], places[i])
    return places


def _combined(
    program: Sequence[Work], makers: Sequence[Sequence[int]], places: Sequence[int], combined_bytes: int
) -> dict[int, int]:
    """(4): the reductions that are combined, by position, and the place at which each of them starts."""
    first_read = [len(program)] * len(program)
    for i in reversed(range(len(program))):
        for m in makers[i]:
            first_read[m] = min(first_read[m], first_read[i] if program[i].follows else i)
    reductions = [i for i, work in enumerate(program) if work.stream is Stream.SEND and work.reduction is not None]
    groups: list[_Group] = []
    open_group: dict[Hashable, _Group] = {}
    for i in sorted(reductions, key=lambda i: (places[i], i)):
        work = program[i]
        group = open_group.get(work.reduction)
        if group is None or group.nbytes + work.nbytes > combined_bytes or places[i] > 2 * group.until:
            group = open_group[work.reduction] = _Group(until=first_read[i])
            groups.append(group)
        group.members.append(i)
        group.nbytes += work.nbytes
        group.until = min(group.until, first_read[i])
    return {i: places[group.members[-1]] for group in groups if len(group.members) > 1 for i in group.members}


@dataclasses.dataclass(slots=True)
class _Group:
    """Reductions that start together: `until` is where in the program the first of them is read."""

    until: int
    members: list[int] = dataclasses.field(default_factory=list)
    nbytes: float = 0.0
