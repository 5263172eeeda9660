"""Values to the devices of several processes, and moves of arrays from some of their devices to others."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from autopar.ir.layout import Layout
from autopar.ir.mesh import LogicalMesh
from autopar.runtime.execution.cross_process import absent, crosser, crossing, is_here
from autopar.runtime.execution.cut_shards import End
from autopar.runtime.execution.global_arrays import from_whole, is_whole
from autopar.runtime.processes.agreement import meet


def place(value: Any, aval: Any, sharding: NamedSharding) -> Any:
    """A value where it is wanted. `aval` has its shape and dtype.

    Raises: TypeError, in all processes alike, for a value of another shape.
    """
    if np.shape(value) != aval.shape:
        raise TypeError(f"compiled for shape {aval.shape}, got {np.shape(value)}")
    if is_whole(value):
        return from_whole(value, aval, sharding)
    if value.dtype != aval.dtype:
        raise TypeError(f"compiled for {aval.dtype}, got {value.dtype}")
    if value.sharding == sharding or value.sharding.is_equivalent_to(sharding, value.ndim):
        return value
    return move(value, sharding)


def move(array: Any, sharding: NamedSharding) -> Any:
    """A global array on other devices or in another layout; every process must call it.

    Within the array's own devices it is resharded. To other devices it is sent whole, one copy to each. On CPU devices
    this returns when the array is there: of a whole state more programs would be in flight than XLA's CPU client takes
    (`autopar.runtime.execution.dispatch`), and the processes would wait for one another forever.
    """
    moved = _moved(array, sharding)
    if jax.devices()[0].platform == "cpu":
        jax.block_until_ready([shard.data for shard in moved.addressable_shards])
    return moved


def _moved(array: Any, sharding: NamedSharding) -> Any:
    source_devices, target_devices = list(array.sharding.mesh.devices.flat), list(sharding.mesh.devices.flat)
    if set(target_devices) <= set(source_devices):
        return _narrow(array, sharding, source_devices, target_devices)
    everywhere = _replicated(array.sharding.mesh)
    replicated = _relaid(array, everywhere)
    (arrived,) = _sender(array.shape, array.dtype, everywhere, _replicated(sharding.mesh))([replicated])
    if arrived is None:
        return absent(array.shape, array.dtype, sharding)
    return _relaid(arrived, sharding)


def _narrow(array: Any, sharding: NamedSharding, source_devices: Sequence[Any], target_devices: Sequence[Any]) -> Any:
    """To some or all of the devices that hold the array: resharded over all of them, so that these get their parts."""
    dropped_devices = [d for d in source_devices if d not in set(target_devices)]
    if len(dropped_devices) % len(target_devices):  # the others can be given no part each: then all have the whole
        full = _relaid(array, _replicated(array.sharding.mesh))
        at = {s.device: s.data for s in full.addressable_shards}
        index = sharding.addressable_devices_indices_map(array.shape)
        shards = [at[d][i] if array.ndim else at[d] for d, i in index.items()]
    else:
        grid = np.array([*target_devices, *dropped_devices]).reshape((-1, *sharding.mesh.axis_sizes))
        mesh = Mesh(grid, ("copy", *sharding.mesh.axis_names), axis_types=(AxisType.Auto,) * grid.ndim)
        full = _relaid(array, NamedSharding(mesh, sharding.spec))
        at = {s.device: s.data for s in full.addressable_shards}
        shards = [at[d] for d in target_devices if d in at]
    if not shards:
        return absent(array.shape, array.dtype, sharding)
    on_devices = NamedSharding(sharding.mesh, sharding.spec)
    narrow = jax.make_array_from_single_device_arrays(array.shape, on_devices, shards)
    return narrow if sharding.memory_kind == on_devices.memory_kind else _relaid(narrow, sharding)


def _relaid(array: Any, sharding: NamedSharding) -> Any:
    """The array in another layout on the same devices, in any order of them."""
    if not is_here(sharding):
        return absent(array.shape, array.dtype, sharding)
    if list(array.sharding.mesh.devices.flat) != list(sharding.mesh.devices.flat):
        return jax.device_put(array, sharding)
    return _identity(sharding)(array)


@functools.lru_cache(maxsize=1024)
def _identity(sharding: NamedSharding) -> Any:
    return jax.jit(_unchanged, out_shardings=sharding)


def _unchanged(x: Any) -> Any:
    return x


@functools.lru_cache(maxsize=1024)
def _sender(
    shape: tuple[int, ...], dtype: Any, source: NamedSharding, target: NamedSharding
) -> Callable[[Sequence[Any]], list[Any]]:
    """Of a value that is replicated at both ends."""
    route = crossing(shape, dtype, _end(source, len(shape)), _end(target, len(shape)))
    return crosser([route], waits_for_all("a moved array"))


def waits_for_all(what: str) -> Callable[[list[Any]], None] | None:
    """Between a transfer and what is computed of it: returns when all processes have what they were sent.

    None for accelerators. The CPU client serves what it sends with the few threads that also wait in collectives: so
    none may begin before.
    """

    def wait(arrived: list[Any]) -> None:
        jax.block_until_ready(arrived)
        meet(what)

    return wait if jax.devices()[0].platform == "cpu" else None


def _replicated(mesh: Any) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def _end(sharding: NamedSharding, ndim: int) -> End:
    """A replicated array's end of a transfer."""
    mesh: Any = sharding.mesh
    logical = LogicalMesh(axis_sizes=(math.prod(mesh.axis_sizes),))
    return End(layout=Layout(((),) * ndim), logical=logical, mesh=mesh, sharding=sharding)
