"""Arrays over the devices of several processes, of values that every process has whole.

A value that every process has whole (numpy arrays, numbers, arrays on one device of its own) is equal in all of them
and is never sent: each process takes the parts that its devices need.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, SingleDeviceSharding

from autopar.common import jax_compat
from autopar.runtime.execution.cross_process import absent, is_here


def aval_of(value: Any) -> jax.ShapeDtypeStruct:
    """Shape and dtype of an array, a random key or a number."""
    dtype = value.dtype if hasattr(value, "dtype") else np.result_type(value)
    return jax.ShapeDtypeStruct(np.shape(value), jax.dtypes.canonicalize_dtype(dtype, allow_extended_dtype=True))


def is_whole(value: Any) -> bool:
    """Whether every process has a value of its own, the same in all."""
    return not isinstance(value, jax.Array) or isinstance(value.sharding, SingleDeviceSharding)


def from_whole(value: Any, aval: Any, sharding: NamedSharding) -> Any:
    """A global array of a value that every process has; nothing is sent."""
    if sharding.is_fully_addressable:
        return jax.device_put(value, sharding)
    if not is_here(sharding):
        return absent(aval.shape, aval.dtype, sharding)
    if not jax_compat.is_key_dtype(aval.dtype):
        value = np.asarray(value, aval.dtype)
    parts = sharding.addressable_devices_indices_map(tuple(aval.shape))
    shards = []
    for device, index in parts.items():
        at = SingleDeviceSharding(device, memory_kind=sharding.memory_kind)
        shards.append(jax.device_put(value[index] if aval.shape else value, at))
    return jax.make_array_from_single_device_arrays(tuple(aval.shape), sharding, shards)
