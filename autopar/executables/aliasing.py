"""Arguments of one call that share buffers: a donated array may share memory with no other argument.

jaxlib 0.10 ends the whole process where one buffer is donated and read by one program over several CPU devices, or
donated twice. Newer versions raise an error after half of the devices have taken the buffer over. The same array may be
several arguments, and several arrays may share buffers: `jax.device_put` creates such arrays.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax

from autopar.common.jax_compat import buffer_addresses


def without_shared_memory(leaves: Sequence[Any], donated: Iterable[int], constants: Sequence[Any] = ()) -> list[Any]:
    """Leaves whose donated ones share no memory with other leaves, with constants, or with each other.

    A donated leaf that shares memory is replaced by a copy. Random keys do not tell where they are: they are compared
    as objects.
    """
    out, donated_positions = list(leaves), set(donated)
    other_leaves = [leaf for i, leaf in enumerate(leaves) if i not in donated_positions]
    held = set(map(id, other_leaves))
    addresses_held = {
        a for array in (*other_leaves, *constants) if isinstance(array, jax.Array) for a in buffer_addresses(array)
    }
    for i in sorted(donated_positions):
        if isinstance(out[i], jax.Array):
            addresses = buffer_addresses(out[i])
            if id(leaves[i]) in held or not addresses_held.isdisjoint(addresses):
                out[i] = out[i].copy()
            held.add(id(leaves[i]))
            addresses_held.update(addresses)
    return out


def share_memory(donated: Sequence[Any], other_arrays: Sequence[Any]) -> bool:
    """Whether donated arrays share memory with others or with each other."""
    addresses_held: set[int] = set()
    for array in donated:
        addresses = buffer_addresses(array)
        if not addresses_held.isdisjoint(addresses):
            return True
        addresses_held.update(addresses)
    return any(not addresses_held.isdisjoint(buffer_addresses(array)) for array in other_arrays)
