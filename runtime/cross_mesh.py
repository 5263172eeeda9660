"""Resharding between two meshes in pieces: the layouts at both ends, the cuts of shards, the transfers, the joins.

Two layouts cut a value into two grids of pieces. Both are cut further, to the coarsest common grid: each device of the
source holds the same number of fine pieces, and each device of the target needs the same number. Each fine piece that a
device needs is sent to it once. Example: 2 devices that hold a half each send to 4 that need a quarter each; every half
is cut in two, and the quarters cross in two rounds, in each of which a device sends one. The cuts and joins are
programs.

Each byte should cross once. Where the value is replicated over some devices, each of them sends a part, and the
receiving stage gathers the parts (Zhuang et al., "On optimizing the communication of model parallelism", 2022: local
all-gather). Both ends therefore hold the value split as finely as their mesh allows. Where one end has finer pieces
than the other, pieces are cut before they cross, or joined afterwards.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from autopar.ir.jax_sharding import named_sharding
from autopar.ir.layout import Layout, LogicalMesh, replicated


@functools.cache
def wire_layouts(shape: tuple[int, ...], source: LogicalMesh, target: LogicalMesh) -> tuple[Layout, Layout]:
    """The layouts on both meshes, leading dimensions split first."""
    free = replicated(len(shape))
    return refined(shape, (free, source), (free, target))


def refined(
    shape: tuple[int, ...], source: tuple[Layout, LogicalMesh], target: tuple[Layout, LogicalMesh]
) -> tuple[Layout, Layout]:
    """Two layouts split further over the axes that replicate them, so that little crosses and on many links at once.

    First the target gets as many different pieces as can be (each of its copies is one more crossing), then the source;
    then both the same grid of pieces if that can be, else the one with the least to cut.
    """
    mine, theirs = (_by_grid(shape, *end) for end in (source, target))
    best = max(itertools.product(mine, theirs), key=lambda grids: _rank(*grids))
    return mine[best[0]], theirs[best[1]]


def grid_of(layout: Layout, mesh: LogicalMesh) -> tuple[int, ...]:
    """Into how many pieces each dimension is split."""
    return tuple(mesh.size(axes) for axes in layout.dims)


def common_grid(grid: Iterable[int], other: Iterable[int]) -> tuple[int, ...]:
    """The coarsest grid that cuts no piece of either."""
    return tuple(math.lcm(a, b) for a, b in zip(grid, other, strict=True))


def _by_grid(shape: tuple[int, ...], layout: Layout, mesh: LogicalMesh) -> dict[tuple[int, ...], Layout]:
    """A layout with some of its idle axes behind the ones that split its dimensions, one for each grid of pieces."""
    assert not layout.partial, "what crosses is no sum"
    idle = [a for a, n in enumerate(mesh.axis_sizes) if n > 1 and a not in layout.sharded_axes]
    found: dict[tuple[int, ...], Layout] = {}
    for places in itertools.product((None, *range(len(shape))), repeat=len(idle)):
        dims = [
            (*axes, *(a for a, place in zip(idle, places, strict=True) if place == d))
            for d, axes in enumerate(layout.dims)
        ]
        finer = Layout(tuple(dims))
        if finer.fits(shape, mesh):
            found.setdefault(grid_of(finer, mesh), finer)
    return found


def _rank(source: tuple[int, ...], target: tuple[int, ...]) -> tuple[int, int, int, tuple[int, ...]]:
    fine = common_grid(source, target)
    return math.prod(target), math.prod(source), -math.prod(fine), source


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Hop:
    """One fine piece from a device to a device: part `sent` of what the sender holds is part `taken` of the receiver's.

    Devices are numbers in row-major order of their mesh; parts are numbers in row-major order of the cuts.
    """

    sender: int
    sent: int
    receiver: int
    taken: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Regridding:
    """The pieces and rounds of a transfer.

    Attributes:
        cuts: The number of parts of a source's piece along each dimension.
        joins: The number of parts of a target's piece along each dimension.
        rounds: The hops. In a round a device sends at most one part and receives at most one part.
    """

    cuts: tuple[int, ...]
    joins: tuple[int, ...]
    rounds: tuple[tuple[Hop, ...], ...]


def regrid(
    source: Layout,
    source_mesh: LogicalMesh,
    target: Layout,
    target_mesh: LogicalMesh,
    near: Callable[[int, int], bool] = lambda sender, receiver: True,
) -> Regridding:
    """The hops between two layouts of one value, spread evenly over the devices that hold copies of a piece.

    `near(sender, receiver)`: pairs of devices that are preferred.
    """
    have, want = grid_of(source, source_mesh), grid_of(target, target_mesh)
    fine = common_grid(have, want)
    cuts = tuple(f // n for f, n in zip(fine, have, strict=True))
    joins = tuple(f // n for f, n in zip(fine, want, strict=True))
    holders: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    for device, part, piece in _fine_pieces(source, source_mesh, cuts):
        holders.setdefault(piece, []).append((device, part))
    sends = [0] * source_mesh.num_devices
    hops = []
    for device, part, piece in _fine_pieces(target, target_mesh, joins):
        sender, sent = min(holders[piece], key=lambda holder: (not near(holder[0], device), sends[holder[0]]))
        sends[sender] += 1
        hops.append(Hop(sender=sender, sent=sent, receiver=device, taken=part))
    return Regridding(cuts=cuts, joins=joins, rounds=hops_in_rounds(hops))


def _places(layout: Layout, mesh: LogicalMesh) -> list[tuple[int, ...]]:
    """For each device, the position of its piece along each dimension."""
    places = []
    for device in itertools.product(*map(range, mesh.axis_sizes)):
        place = []
        for axes in layout.dims:
            at = 0
            for a in axes:
                at = at * mesh.axis_sizes[a] + device[a]
            place.append(at)
        places.append(tuple(place))
    return places


def _fine_pieces(layout: Layout, mesh: LogicalMesh, cuts: tuple[int, ...]) -> list[tuple[int, int, tuple[int, ...]]]:
    """(device, part of its piece, fine piece)."""
    return [
        (device, number, tuple(p * c + k for p, c, k in zip(place, cuts, part, strict=True)))
        for device, place in enumerate(_places(layout, mesh))
        for number, part in enumerate(itertools.product(*map(range, cuts)))
    ]


def hops_in_rounds(hops: Sequence[Hop]) -> tuple[tuple[Hop, ...], ...]:
    """The fewest possible rounds: an edge colouring of a bipartite graph (König: as many colours as the largest
    degree).

    A hop takes the lowest round that is free at both of its ends. Where there is none, two rounds are swapped along the
    alternating path from its receiver, which frees the sender's round there.
    """
    sent: dict[int, int] = {}
    received: dict[int, int] = {}
    for hop in hops:
        sent[hop.sender] = sent.get(hop.sender, 0) + 1
        received[hop.receiver] = received.get(hop.receiver, 0) + 1
    num_rounds = max((*sent.values(), *received.values()), default=0)
    at: list[dict[int, dict[int, int]]] = [{}, {}]  # by side: device -> round -> hop
    round_of: dict[int, int] = {}

    def ends(number: int) -> tuple[int, int]:
        return hops[number].sender, hops[number].receiver

    def free(side: int, device: int) -> int:
        return next(sender_round for sender_round in range(num_rounds) if sender_round not in at[side].get(device, {}))

    def enter(number: int, sender_round: int) -> None:
        round_of[number] = sender_round
        for side, device in enumerate(ends(number)):
            at[side].setdefault(device, {})[sender_round] = number

    for number in range(len(hops)):
        sender, receiver = ends(number)
        sender_round, receiver_round = free(0, sender), free(1, receiver)
        path = []
        side, device, want = 1, receiver, sender_round
        while sender_round != receiver_round and want in at[side].get(device, {}):
            step = at[side][device][want]
            path.append(step)
            side, want = 1 - side, receiver_round if want == sender_round else sender_round
            device = ends(step)[side]
        for step in path:
            for side, device in enumerate(ends(step)):
                del at[side][device][round_of[step]]
        for step in path:
            enter(step, receiver_round if round_of[step] == sender_round else sender_round)
        enter(number, sender_round)
    rounds: list[list[Hop]] = [[] for _ in range(num_rounds)]
    for number, sender_round in round_of.items():
        rounds[sender_round].append(hops[number])
    assert math.fsum(map(len, rounds)) == len(hops), "a hop is lost"
    return tuple(tuple(sorted(hops_of_round, key=lambda h: (h.receiver, h.taken))) for hops_of_round in rounds)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """One end of a transfer: how the value lies there. `mesh` are the devices of the `logical` mesh."""

    layout: Layout
    logical: LogicalMesh
    mesh: Mesh
    sharding: NamedSharding


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Recut:
    """Cuts an array into parts, or joins it from parts, each device on its own.

    Attributes:
        sharding: Of the whole array.
        parts: Of its parts; the whole array is in it too, on the side of the parts.
        counts: The number of parts along each dimension; part k holds the k-th part of every device's shard.
    """

    sharding: NamedSharding
    parts: NamedSharding
    counts: tuple[int, ...]

    def cut(self, array: Any) -> list[Any]:
        """The parts, row-major."""
        array = jax.lax.with_sharding_constraint(array, self.parts)
        return list(self._on_each(self._slices, 1)(array))

    def join(self, parts: Sequence[Any]) -> Any:
        """The inverse of `cut`."""
        (array,) = self._on_each(self._concatenated, len(parts))(*parts)
        return jax.lax.with_sharding_constraint(array, self.sharding)

    def _on_each(self, local: Callable[..., tuple[Any, ...]], num_inputs: int) -> Callable[..., Any]:
        spec = self.parts.spec
        num_outputs = math.prod(self.counts) if num_inputs == 1 else 1
        return jax.shard_map(
            local,
            mesh=self.parts.mesh,
            in_specs=(spec,) * num_inputs,
            out_specs=(spec,) * num_outputs,
            check_vma=False,
        )

    def _slices(self, shard: Any) -> tuple[Any, ...]:
        sizes = [n // c for n, c in zip(shard.shape, self.counts, strict=True)]
        return tuple(
            shard[tuple(slice(k * n, (k + 1) * n) for k, n in zip(part, sizes, strict=True))]
            for part in itertools.product(*map(range, self.counts))
        )

    def _concatenated(self, *parts: Any) -> tuple[Any, ...]:
        joined = list(parts)
        for dim in reversed(range(len(self.counts))):
            n = self.counts[dim]
            joined = [jnp.concatenate(joined[i : i + n], dim) if n > 1 else joined[i] for i in range(0, len(joined), n)]
        return tuple(joined)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Passage:
    """How a value is cut, which parts cross, and how they are joined.

    Attributes:
        cut: What is done on the source first, None: nothing, there is one part.
        rounds: Which part goes from where to where; devices by their numbers in their meshes.
        fine_shape: Of a part on one device.
        part_shape: Of the parts that arrive, as arrays over all devices of the target.
        part_sharding: Of the same.
        num_parts: How many there are on the target.
        joined: What is done on the target at last, None: nothing, there is one part.
    """

    cut: Recut | None
    rounds: tuple[tuple[Hop, ...], ...]
    fine_shape: tuple[int, ...]
    part_shape: tuple[int, ...]
    part_sharding: NamedSharding
    num_parts: int
    joined: Recut | None


def passage(
    shape: Sequence[int], source: End, target: End, near: Callable[[int, int], bool] = lambda sender, receiver: True
) -> Passage:
    """From any layout of a value to any other. `near`: see `regrid`.

    A value that the target's devices hold several copies of crosses in different parts, which they gather; only where
    its dimensions do not divide, each copy crosses.
    """
    shape = tuple(shape)
    leaves, arrives = refined(shape, (source.layout, source.logical), (target.layout, target.logical))
    grids = regrid(leaves, source.logical, arrives, target.logical, near)
    source_sharding, target_sharding = named_sharding(leaves, source.mesh), named_sharding(arrives, target.mesh)
    part_shape = tuple(n // k for n, k in zip(shape, grids.joins, strict=True))
    num_cut, num_joined = math.prod(grids.cuts), math.prod(grids.joins)
    is_cut, is_joined = num_cut > 1 or leaves != source.layout, num_joined > 1 or arrives != target.layout
    return Passage(
        cut=Recut(sharding=source.sharding, parts=source_sharding, counts=grids.cuts) if is_cut else None,
        rounds=grids.rounds,
        fine_shape=target_sharding.shard_shape(part_shape),
        part_shape=part_shape,
        part_sharding=target_sharding if is_joined else target.sharding,
        num_parts=num_joined,
        joined=Recut(sharding=target.sharding, parts=target_sharding, counts=grids.joins) if is_joined else None,
    )


def shard_of(array: Any, number: int) -> Any:
    """What a device of this process holds. `addressable_data` gives of a replicated array the first one's only."""
    return array.addressable_shards[number].data if array.is_fully_replicated else array.addressable_data(number)


@functools.lru_cache(maxsize=4096)
def cutter(recuts: tuple[Recut | None, ...]) -> Callable[[Sequence[Any]], list[Sequence[Any]]]:
    """Cuts the arrays that are to be cut, all in one program."""
    at = [i for i, r in enumerate(recuts) if r is not None]
    present = [r for r in recuts if r is not None]
    if not present:
        return lambda arrays: [[a] for a in arrays]

    def cut(*arrays: Any) -> list[list[Any]]:
        return [r.cut(a) for r, a in zip(present, arrays, strict=True)]

    jitted = jax.jit(cut, in_shardings=tuple(r.sharding for r in present))

    def run(arrays: Sequence[Any]) -> list[Sequence[Any]]:
        parts_of: list[Sequence[Any]] = [[a] for a in arrays]
        for i, parts in zip(at, jitted(*[arrays[i] for i in at]), strict=True):
            parts_of[i] = parts
        return parts_of

    return run


@functools.lru_cache(maxsize=4096)
def joiner(recuts: tuple[Recut | None, ...]) -> Callable[[Sequence[Sequence[Any]]], list[Any]]:
    """Joins the arrays that come in parts, all in one program."""
    at = [i for i, r in enumerate(recuts) if r is not None]
    present = [r for r in recuts if r is not None]
    if not present:
        return lambda parts: [p for (p,) in parts]

    def join(*parts: Sequence[Any]) -> list[Any]:
        return [r.join(p) for r, p in zip(present, parts, strict=True)]

    jitted = jax.jit(join, out_shardings=[r.sharding for r in present])

    def run(parts: Sequence[Sequence[Any]]) -> list[Any]:
        joined = [p[0] for p in parts]
        for i, array in zip(at, jitted(*[parts[i] for i in at]), strict=True):
            joined[i] = array
        return joined

    return run
