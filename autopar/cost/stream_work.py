"""Work on the streams of a device: what a program does, in which order it ran, and when."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterator, Sequence

import msgspec

from autopar.common.enums import HashedById
from autopar.hardware.collective_cost import CollectiveKind
from autopar.lowering.instructions import Compute

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
