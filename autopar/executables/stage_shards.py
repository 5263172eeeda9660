"""Leaves that are one array for the user and shards on the stages: split before a step, joined after it.

Nothing is copied: the parts and the whole share the devices' buffers, and donation of a part deletes the whole.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding

from autopar.ir.jax_sharding import named_sharding, submesh
from autopar.plan.plan import Plan
from autopar.plan.schema import PlannedValue


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StageShardedLeaf:
    """One leaf: its shape and sharding over all its stages, and the sharding of the part on each of them."""

    path: str
    shape: tuple[int, ...]
    sharding: NamedSharding
    parts: tuple[NamedSharding, ...]

    @property
    def part_shape(self) -> tuple[int, ...]:
        return (self.shape[0] // len(self.parts), *self.shape[1:])

    def split(self, array: Any) -> list[jax.Array]:
        """The parts of an array. Raises: ValueError for another shape or sharding."""
        if not isinstance(array, jax.Array) or array.shape != self.shape or not self._has_sharding(array):
            raise ValueError(f"{self.path}: expected an array of shape {self.shape} on {self.sharding}")
        shards = {shard.device: shard.data for shard in array.addressable_shards}
        return [
            jax.make_array_from_single_device_arrays(
                self.part_shape, part, [shards[device] for device in part.mesh.devices.flat]
            )
            for part in self.parts
        ]

    def join(self, parts: Sequence[jax.Array]) -> jax.Array:
        """The inverse of `split`."""
        shards = [shard.data for part in parts for shard in part.addressable_shards]
        return jax.make_array_from_single_device_arrays(self.shape, self.sharding, shards)

    def _has_sharding(self, array: jax.Array) -> bool:
        return array.sharding == self.sharding or array.sharding.is_equivalent_to(self.sharding, len(self.shape))


@dataclasses.dataclass(frozen=True, slots=True)
class StageShardedLeaves:
    """All leaves of the arguments, or of the results, in order; None for leaves on a single stage."""

    leaves: tuple[StageShardedLeaf | None, ...]

    def split(self, leaves: Sequence[Any]) -> list[Any]:
        """Leaves and slices in order. Raises: ValueError."""
        out: list[Any] = []
        for leaf, sharded in zip(leaves, self.leaves, strict=True):
            out += [leaf] if sharded is None else sharded.split(leaf)
        return out

    def join(self, pieces: Sequence[Any]) -> list[Any]:
        """The inverse of `split`."""
        remaining = iter(pieces)
        return [
            next(remaining) if sharded is None else sharded.join([next(remaining) for _ in sharded.parts])
            for sharded in self.leaves
        ]


def stage_sharded_leaves(values: Sequence[PlannedValue], plan: Plan) -> StageShardedLeaves:
    """The leaves of a plan's arguments (without constants) or results."""
    return StageShardedLeaves(tuple(_stage_sharded_leaf(value, plan) if value.stages else None for value in values))


def _stage_sharded_leaf(value: PlannedValue, plan: Plan) -> StageShardedLeaf:
    meshes = [submesh(*plan.stage_mesh(stage)) for stage in value.stages]
    return StageShardedLeaf(
        path=value.path,
        shape=value.shape,
        sharding=plan.sharding_of(value),
        parts=tuple(named_sharding(value.layout, mesh, in_host=value.in_host) for mesh in meshes),
    )
