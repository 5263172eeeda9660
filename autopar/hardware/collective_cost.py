"""The cost of a collective in the alpha-beta model: the bytes that each device sends, and the seconds.

Time = fixed overhead + steps * latency (alpha) + bytes sent * seconds per byte (1 / beta). The bytes are those of ring
algorithms, which are the least that any algorithm can send for large arrays (Chan et al., "Collective communication:
theory, practice and experience", 2007); the steps depend on what joins the devices (`Fabric`). Where more was measured
of a switched link, it stands in `SwitchDetail`. All but permutes are affine in the bytes.

Not modelled: contention between collectives that run at the same time, and the way from the protocols for small
messages to those for large ones: measured times of 4 to 64 MB are up to 1.5 times what an affine function says.
"""

from __future__ import annotations

import dataclasses
import enum

import numpy as np
from numpy.typing import ArrayLike, NDArray

from autopar.errors import InvalidArgumentError


class CollectiveKind(enum.StrEnum):
    """The collectives of XLA, by their names in HLO. Plans use those in `PLANNED_KINDS`."""

    ALL_REDUCE = "all-reduce"
    ALL_GATHER = "all-gather"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_TO_ALL = "all-to-all"
    COLLECTIVE_PERMUTE = "collective-permute"
    RAGGED_ALL_TO_ALL = "ragged-all-to-all"
    COLLECTIVE_BROADCAST = "collective-broadcast"


PLANNED_KINDS = (
    CollectiveKind.ALL_REDUCE,
    CollectiveKind.ALL_GATHER,
    CollectiveKind.REDUCE_SCATTER,
    CollectiveKind.ALL_TO_ALL,
    CollectiveKind.COLLECTIVE_PERMUTE,
)


class Fabric(enum.StrEnum):
    """What joins the devices, as far as the number of steps and the way of a byte depend on it.

    SWITCHED: a way between any two devices with all of their rate (NVSwitch, InfiniBand, Ethernet). DIRECT: a wire of
    its own between any two devices, so that n devices have n-1 wires each (Infinity Fabric of a host). TORUS: wires
    between neighbours only (TPU interconnect), so that bytes for a device k hops away load k wires. SHARED_MEMORY:
    threads of one process that wait for one another and copy (virtual CPU devices).
    """

    SWITCHED = "switched"
    DIRECT = "direct"
    TORUS = "torus"
    SHARED_MEMORY = "shared memory"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SwitchDetail:
    """What is measured of a switched link beyond one latency and one rate. None: not known, or not so.

    Attributes:
        kept_bytes_per_s: Rate of the part of an array that a device keeps: a ring of n devices handles n parts, of
            which n-1 travel. Measured rates of 2, 4 and 8 devices differ by it.
        switch_bytes_per_s: Rate at which the switch adds up (NVLS): each device sends its array once and receives the
            sum once, for any number of devices. An all-reduce takes this or the ring, whichever is faster.
        tree_latency_s: Seconds for a step of an all-reduce's tree, where data are also added up. An all-reduce goes
            through the tree or twice round the ring, whichever is faster.
        pair_bytes_per_s: Rate of a permute while NCCL gives its pairs of devices few channels.
        pair_ramp_s: A permute that would take longer than this is given more channels, and takes just this, until
            all channels are busy and the link's own rate counts.
    """

    kept_bytes_per_s: float | None = None
    switch_bytes_per_s: float | None = None
    tree_latency_s: float | None = None
    pair_bytes_per_s: float | None = None
    pair_ramp_s: float | None = None

    def __post_init__(self) -> None:
        given = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        paired = (self.pair_bytes_per_s is None) == (self.pair_ramp_s is None)
        if paired and all(value is None or value > 0 for value in given.values()):
            return
        raise InvalidArgumentError(
            where="SwitchDetail",
            expected="constants above zero, pair_bytes_per_s and pair_ramp_s both or neither",
            got=", ".join(f"{name}={value}" for name, value in given.items() if value is not None),
            hint="leave out what is not known",
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What the devices along one mesh axis are joined by.

    Attributes:
        latency_s: Alpha, seconds for one step of a collective.
        bytes_per_s: Beta, bytes that one device sends in a second while all devices send; of one wire, where all are
            joined directly.
        source: Where the constants come from.
        overhead_s: Seconds that a collective takes before its first step (kernel launch).
        fabric: What kind of network it is.
        rings: On a torus, the number of physical axes that the mesh axis spans; else 1.
        detail: On a switched fabric, what more is known of it.
        kind_bytes_per_s: (kind, rate) where a kind has another rate than `bytes_per_s`: of devices on several hosts,
            where an all-to-all sends more between hosts than a ring.
        devices_per_card: Between hosts, how many devices share a network card: one device alone sends at so many times
            `bytes_per_s`.
        is_asynchronous: Whether collectives run beside computing where the compiler takes them apart. False for systems
            that wait for each collective, such as tensor parallelism that launches its next product behind it.
        sends_in_place: Whether products in pieces send and receive these by copies straight to and from where they
            read and write them (user buffers of NVIDIA's Transformer Engine), without copies of their own.
        has_ring_order: Whether positions lie in the order of a balanced ring of attention already, as systems have it
            that lay out their batches so (Megatron-LM, torchtitan). Else each pass exchanges them.
    """

    latency_s: float
    bytes_per_s: float
    source: str
    overhead_s: float = 0.0
    fabric: Fabric = Fabric.SWITCHED
    rings: int = 1
    detail: SwitchDetail | None = None
    kind_bytes_per_s: tuple[tuple[CollectiveKind, float], ...] = ()
    devices_per_card: int = 1
    is_asynchronous: bool = True
    sends_in_place: bool = False
    has_ring_order: bool = False

    def __post_init__(self) -> None:
        if self.kind_bytes_per_s and self.fabric is Fabric.TORUS:
            raise InvalidArgumentError(
                where=f"Link(source={self.source!r}).kind_bytes_per_s",
                expected="rates of single kinds on another fabric than a torus",
                got=f"{len(self.kind_bytes_per_s)} on {self.fabric.value}",
                hint="leave kind_bytes_per_s out: the wires that each kind's bytes cross on a torus are known",
            )
        if self.detail is not None and self.fabric is not Fabric.SWITCHED:
            raise InvalidArgumentError(
                where=f"Link(source={self.source!r}).detail",
                expected="a detail on a switched fabric only",
                got=f"one on {self.fabric.value}",
                hint="leave detail out: nothing would read it",
            )
        rates = (self.bytes_per_s, *(rate for _, rate in self.kind_bytes_per_s))
        if min(rates) > 0 and min(self.latency_s, self.overhead_s) >= 0 and min(self.rings, self.devices_per_card) >= 1:
            return
        raise InvalidArgumentError(
            where=f"Link(source={self.source!r})",
            expected="bytes_per_s above zero, of each kind too, latency_s and overhead_s of zero or more, rings "
            "and devices_per_card of one or more",
            got=f"bytes_per_s={min(rates)}, latency_s={self.latency_s}, overhead_s={self.overhead_s}, "
            f"rings={self.rings}, devices_per_card={self.devices_per_card}",
            hint="give seconds and bytes per second, not microseconds or gigabytes",
        )

    def rate_of(self, kind: CollectiveKind) -> float:
        """Bytes that one device sends in a second, in collectives of this kind."""
        return dict(self.kind_bytes_per_s).get(kind, self.bytes_per_s)


def sent_bytes(kind: CollectiveKind, result_bytes: ArrayLike, n: ArrayLike) -> NDArray[np.float64]:
    """Bytes that each of `n` devices sends, for a result of `result_bytes` on each device (both may be arrays).

    All-reduce 2(n-1)/n of the result, all-gather (n-1)/n of the gathered result, all-to-all (n-1)/n of the result,
    reduce-scatter (n-1) times its result (which is 1/n of what is reduced), permute and broadcast their result. A
    ragged all-to-all counts as if its pieces were of one size. Source: ring algorithms, nccl-tests doc/PERFORMANCE.md.
    """
    size, count = _size_and_count(result_bytes, n)
    match kind:
        case CollectiveKind.ALL_REDUCE:
            return size * (2.0 * (count - 1.0) / count)
        case CollectiveKind.ALL_GATHER | CollectiveKind.ALL_TO_ALL | CollectiveKind.RAGGED_ALL_TO_ALL:
            return size * ((count - 1.0) / count)
        case CollectiveKind.REDUCE_SCATTER:
            return size * (count - 1.0)
        case CollectiveKind.COLLECTIVE_PERMUTE | CollectiveKind.COLLECTIVE_BROADCAST:
            return size * np.where(count > 1.0, 1.0, 0.0)


def steps(kind: CollectiveKind, n: ArrayLike, fabric: Fabric) -> NDArray[np.float64]:
    """Latencies that follow one another in a collective of `PLANNED_KINDS` over `n` devices.

    SWITCHED, DIRECT: all-gather and reduce-scatter go round a ring, n-1 steps; an all-to-all sends to each of n-1
    peers in turn; an all-reduce goes up and down a tree, 2 log2(n) steps (NCCL takes trees for what is bound by
    latency; measured on GB200, 64 devices: all-gather 91 us, all-reduce 50 us; 16 devices: 29 us and 50 us).
    TORUS: n-1 hops to the far end of a line, twice for the all-reduce (scaling-book, "Sharded matrices").
    SHARED_MEMORY: every thread waits for all n-1 others, whatever the collective (measured: 2, 4 and 8 virtual CPU
    devices take 17, 41 and 116 us for a permute as for an all-reduce of 1 kB).
    """
    _, count = _size_and_count(0.0, n)
    others = count - 1.0
    match fabric, kind:
        case Fabric.SHARED_MEMORY, _:
            return others
        case _, CollectiveKind.COLLECTIVE_PERMUTE:
            return np.where(count > 1.0, 1.0, 0.0)
        case Fabric.SWITCHED | Fabric.DIRECT, CollectiveKind.ALL_REDUCE:
            return 2.0 * np.log2(count)
        case Fabric.TORUS, CollectiveKind.ALL_REDUCE:
            return 2.0 * others
        case _:
            return others


def time_s(kind: CollectiveKind, result_bytes: ArrayLike, n: ArrayLike, link: Link) -> NDArray[np.float64]:
    """Seconds of one collective over `n` devices joined by `link`; `result_bytes` as in `sent_bytes`.

    Zero for one device: XLA drops such a collective. A ragged all-to-all goes the ways of an all-to-all.
    """
    kind = CollectiveKind.ALL_TO_ALL if kind is CollectiveKind.RAGGED_ALL_TO_ALL else kind
    _, count = _size_and_count(0.0, n)
    seconds = link.overhead_s + _latencies_s(kind, n, link) + _transfer_s(kind, result_bytes, n, link)
    return np.where(count > 1.0, seconds, 0.0)


def _latencies_s(kind: CollectiveKind, n: ArrayLike, link: Link) -> NDArray[np.float64]:
    direct = steps(kind, n, link.fabric) * link.latency_s
    if kind is not CollectiveKind.ALL_REDUCE or link.detail is None or link.detail.tree_latency_s is None:
        return direct
    return np.minimum(ring_steps(n) * link.latency_s, steps(kind, n, link.fabric) * link.detail.tree_latency_s)


def _transfer_s(kind: CollectiveKind, result_bytes: ArrayLike, n: ArrayLike, link: Link) -> NDArray[np.float64]:
    seconds = wire_bytes(kind, result_bytes, n, link.fabric, link.rings) / link.rate_of(kind)
    detail = link.detail
    if detail is None:
        return seconds
    if kind is CollectiveKind.COLLECTIVE_PERMUTE:
        if detail.pair_bytes_per_s is None or detail.pair_ramp_s is None:
            return seconds
        few_channels = sent_bytes(kind, result_bytes, n) / detail.pair_bytes_per_s
        return np.maximum(seconds, np.minimum(few_channels, detail.pair_ramp_s))
    if detail.kept_bytes_per_s is not None:
        seconds = seconds + kept_bytes(kind, result_bytes, n) / detail.kept_bytes_per_s
    if kind is CollectiveKind.ALL_REDUCE and detail.switch_bytes_per_s is not None:
        seconds = np.minimum(seconds, np.asarray(result_bytes, dtype=np.float64) / detail.switch_bytes_per_s)
    return seconds


def ring_steps(n: ArrayLike) -> NDArray[np.float64]:
    """Steps of an all-reduce twice round a ring of `n` devices."""
    _, count = _size_and_count(0.0, n)
    return 2.0 * (count - 1.0)


def kept_bytes(kind: CollectiveKind, result_bytes: ArrayLike, n: ArrayLike) -> NDArray[np.float64]:
    """Bytes of the part that a device handles and does not send: one for n-1 sent, none in a permute."""
    _, count = _size_and_count(0.0, n)
    if kind is CollectiveKind.COLLECTIVE_PERMUTE:
        return np.zeros_like(sent_bytes(kind, result_bytes, n))
    return sent_bytes(kind, result_bytes, n) / np.maximum(count - 1.0, 1.0)


def wire_bytes(
    kind: CollectiveKind, result_bytes: ArrayLike, n: ArrayLike, fabric: Fabric, rings: int = 1
) -> NDArray[np.float64]:
    """Bytes that pass a device's wires: those it sends, each as often as the fabric passes it on."""
    sent = sent_bytes(kind, result_bytes, n)
    _, count = _size_and_count(0.0, n)
    if fabric is Fabric.DIRECT and kind is not CollectiveKind.COLLECTIVE_PERMUTE:
        return sent / np.maximum(count - 1.0, 1.0)  # over all wires at once
    if fabric is not Fabric.TORUS:
        return sent
    return sent * _hops(kind, count, rings)


def _hops(kind: CollectiveKind, count: NDArray[np.float64], rings: int) -> NDArray[np.float64]:
    """Wires that a byte crosses on a torus, on average over the bytes sent.

    In the ring algorithms each byte sent goes to a neighbour. An all-to-all sends to everyone: the distances in a ring
    of n devices add up to n^2/4 over n-1 peers, so that its time is (local bytes) n/4 / beta, a quarter of the
    all-gather of the whole array (scaling-book, "Sharded matrices", all-to-all). An axis over several physical axes, r
    rings of about n^(1/r) devices, has beta of all of them together and r times the distance of one.
    """
    if kind is not CollectiveKind.ALL_TO_ALL:
        return np.ones_like(count)
    distance = rings * count ** (1.0 / rings) / 4.0
    return np.maximum(1.0, distance * count / np.maximum(count - 1.0, 1.0))


def _size_and_count(result_bytes: ArrayLike, n: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    size, count = np.asarray(result_bytes, dtype=np.float64), np.asarray(n, dtype=np.float64)
    assert (count >= 1.0).all(), f"a collective joins 1 device or more, got n={n!r}"
    assert (size >= 0.0).all(), f"a result has 0 bytes or more, got {result_bytes!r}"
    return size, count
