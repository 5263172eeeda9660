"""Leaves as arrays that tensorstore can hold, and back: random keys as their numbers, rare types as their bits.

Everything goes by shards, so that nothing is computed across devices, and an array of which this process holds no part
stays one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from autopar.common import jax_compat
from autopar.errors import DonatedStateError, UnsupportedError
from autopar.runtime.transfers import aval_of, from_whole, is_whole
from autopar.train.checkpoint.manifest import NUMBERS, LeafRecord, NamedLeaf, text_of, type_of

_BITS = "uint8"


def record_of(leaf: NamedLeaf) -> LeafRecord:
    """What a checkpoint says of a leaf.

    Raises: UnsupportedError for what is neither an array nor a number; DonatedStateError for an array that a step has
    taken over.
    """
    value = leaf.value
    if isinstance(value, jax.Array) and value.is_deleted():
        raise DonatedStateError(
            where=f"save, {leaf.path or leaf.name}",
            expected="the state that the last step returned",
            got="an array that was donated to a step",
            hint="state, metrics = train_step(state, batch), then save(i + 1, state)",
        )
    if isinstance(value, NUMBERS) and not isinstance(value, np.generic):
        return LeafRecord(name=leaf.name, kind="number", dtype=type_of(value), number=text_of(value))
    if isinstance(value, jax.Array) and jax_compat.is_key_dtype(value.dtype):
        raw, _ = jax_compat.raw_key(value.dtype)
        implementation = str(jax.random.key_impl(value))
        return LeafRecord(
            name=leaf.name, kind="key", shape=value.shape, dtype=implementation, stored_dtype=np.dtype(raw).name
        )
    if isinstance(value, jax.Array | np.ndarray | np.generic):
        dtype = np.dtype(value.dtype)
        stored = _stored_dtype(dtype)
        if stored is not None:
            is_numpy = isinstance(value, np.ndarray | np.generic)
            return LeafRecord(
                name=leaf.name,
                kind="array",
                shape=tuple(value.shape),
                dtype=dtype.name,
                stored_dtype=stored,
                is_numpy=is_numpy,
            )
    raise UnsupportedError(
        where=f"save, {leaf.path or leaf.name}",
        expected="arrays, random keys and numbers as the leaves of a state",
        got=f"{type(value).__name__}" + (f" of {value.dtype}" if hasattr(value, "dtype") else ""),
        hint="keep what is no array out of the state, or make it a static field of its class",
    )


def stored_array(value: Any, record: LeafRecord) -> Any:
    """The array that is written for a leaf: global in a program of several processes."""
    if not isinstance(value, jax.Array):
        array = np.asarray(value)
        array = array.astype(array.dtype.newbyteorder("="), copy=False)  # the numbers, in this machine's order of bytes
        return array.view(_BITS) if record.stored_dtype != record.dtype else array
    if record.kind == "key":
        trailing = jax_compat.raw_key(value.dtype)[1]
        value = _by_shards(value, jax.random.key_data, (*value.shape, *trailing), np.dtype(record.stored_dtype))
    elif record.stored_dtype != record.dtype:
        value = _by_shards(value, _bits_of, value.shape, np.dtype(_BITS))
    if jax.process_count() > 1 and is_whole(value):
        return from_whole(value, aval_of(value), _a_device_of_each_process())
    return value


def stored_shape(record: LeafRecord) -> tuple[int, ...]:
    """The shape of the array on disk."""
    if record.kind != "key":
        return record.shape
    return (*record.shape, *jax_compat.raw_key(record.leaf_dtype)[1])


def stored_sharding(record: LeafRecord, sharding: Any) -> Any:
    """The sharding in which the array on disk is read, for a leaf that is to have `sharding`."""
    return _longer(sharding, len(stored_shape(record))) if record.kind == "key" else sharding


def restored_array(stored: Any, record: LeafRecord, sharding: Any) -> Any:
    """The leaf of an array that was read."""
    if record.kind == "key":
        wrap = functools.partial(jax.random.wrap_key_data, impl=record.dtype)
        if not isinstance(stored, jax.Array):
            return wrap(stored)
        return _by_shards(stored, wrap, record.shape, record.leaf_dtype, sharding)
    if not isinstance(stored, jax.Array):
        return stored.view(record.leaf_dtype) if record.stored_dtype != record.dtype else stored
    if record.stored_dtype != record.dtype:
        dtype = record.leaf_dtype
        return _by_shards(stored, lambda part: np.asarray(part).view(dtype), record.shape, dtype, sharding)
    return stored


@functools.cache
def _stored_dtype(dtype: Any) -> str | None:
    """The type on disk; None for types of objects and the like."""
    import tensorstore

    try:
        tensorstore.dtype(dtype.name)
    except ValueError:
        try:
            is_numeric = jax.numpy.issubdtype(dtype, jax.numpy.number)
        except TypeError:
            is_numeric = False
        return _BITS if is_numeric and dtype.itemsize == 1 else None
    return str(dtype.name) if dtype.kind not in "OSU" else None


def _bits_of(part: Any) -> Any:
    return np.asarray(part).view(_BITS)


def _by_shards(array: Any, convert: Callable[[Any], Any], shape: Any, dtype: Any, sharding: Any = None) -> Any:
    """An array whose shards are those of `array`, each converted."""
    if sharding is None:
        sharding = _longer(array.sharding, len(shape))
    shards = []
    for shard in array.addressable_shards:
        at = SingleDeviceSharding(shard.device, memory_kind=array.sharding.memory_kind)
        shards.append(jax.device_put(convert(shard.data), at))
    return jax.make_array_from_single_device_arrays(tuple(shape), sharding, shards, dtype=dtype)


def _longer(sharding: Any, ndim: int) -> Any:
    """The sharding for more dimensions, which are not split."""
    if not isinstance(sharding, NamedSharding) or len(sharding.spec) >= ndim:
        return sharding
    spec = PartitionSpec(*sharding.spec, *(None,) * (ndim - len(sharding.spec)))
    return NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)


@functools.cache
def _a_device_of_each_process() -> NamedSharding:
    first: dict[int, Any] = {}
    for device in jax.devices():
        first.setdefault(device.process_index, device)
    mesh = Mesh(np.array([first[process] for process in sorted(first)]), ("process",), axis_types=(AxisType.Auto,))
    return NamedSharding(mesh, PartitionSpec())
