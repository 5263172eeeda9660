"""Programs that cut shards before they cross between meshes, and join them afterwards."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from autopar.ir.jax_sharding import named_sharding
from autopar.ir.layout import Layout
from autopar.ir.mesh import LogicalMesh
from autopar.runtime.execution.cross_mesh import Hop, refined, regrid


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
