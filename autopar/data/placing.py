"""The rows of a batch that the devices of this process hold, and global arrays made of them: nothing is sent.

The leaves of a batch may lie on different devices: of a pipeline each on the stages that read it. A process reads the
rows that any leaf has on its devices.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from autopar.executables.step_leaves import put
from autopar.runtime.execution.cross_process import absent, is_here
from autopar.runtime.execution.global_arrays import aval_of

Index = tuple[slice, ...]


def rows_of(parts: Iterable[Index], num_rows: int) -> np.ndarray:
    """The numbers of the rows in some parts of arrays with `num_rows` rows, in ascending order, each once."""
    ranges = {index[0].indices(num_rows)[:2] for index in parts}
    return np.unique(np.concatenate([np.arange(0), *(np.arange(*r) for r in ranges)]))


def own_rows(shapes: Sequence[tuple[int, ...]], shardings: Sequence[NamedSharding]) -> np.ndarray:
    """The rows of the leaves' parts on the devices of this process."""
    parts: list[Index] = []
    for shape, sharding in zip(shapes, shardings, strict=True):
        parts += _parts(sharding, tuple(shape)).values()
    return rows_of(parts, shapes[0][0])


def from_rows(
    leaves: Sequence[np.ndarray], rows: np.ndarray, num_rows: int, shardings: Sequence[NamedSharding]
) -> list[Any]:
    """Global arrays of `num_rows` rows, of those that this process has: `rows` are their numbers, ascending."""
    if jax.process_count() == 1 and len(rows) == num_rows:
        return list(put(leaves, shardings))
    return [_from_rows(x, rows, num_rows, s) for x, s in zip(leaves, shardings, strict=True)]


def _from_rows(own: np.ndarray, rows: np.ndarray, num_rows: int, sharding: NamedSharding) -> Any:
    shape, dtype = (num_rows, *own.shape[1:]), aval_of(own).dtype
    if not is_here(sharding):
        return absent(shape, dtype, sharding)
    shards = []
    for device, (whole, *rest) in _parts(sharding, shape).items():
        start, stop, _ = whole.indices(num_rows)
        first = int(np.searchsorted(rows, start))
        part = np.asarray(own[(slice(first, first + stop - start), *rest)], dtype)
        shards.append(jax.device_put(part, SingleDeviceSharding(device, memory_kind=sharding.memory_kind)))
    return jax.make_array_from_single_device_arrays(shape, sharding, shards)


def _parts(sharding: NamedSharding, shape: tuple[int, ...]) -> Mapping[Any, Index]:
    return dict(sharding.addressable_devices_indices_map(shape))


@functools.lru_cache(maxsize=64)
def evenly(num_rows: int) -> NamedSharding:
    """Rows over all devices, as many to each as divides; for batches that no plan has a layout for."""
    devices = np.array(jax.devices())
    groups = math.gcd(num_rows, devices.size)
    mesh = Mesh(devices.reshape(groups, -1), ("rows", "copies"), axis_types=(AxisType.Auto,) * 2)
    return NamedSharding(mesh, PartitionSpec("rows"))
