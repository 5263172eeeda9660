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
    """Leaves of which the donated ones share no memory with the rest, the constants, nor each other.

    Those that did are copies: what was given stays as it is where it is not taken over by itself.
    """
    out, taken = list(leaves), set(donated)
    kept = [leaf for i, leaf in enumerate(leaves) if i not in taken]
    held = {a for array in (*kept, *constants) if isinstance(array, jax.Array) for a in buffer_addresses(array)}
    for i in sorted(taken):
        if isinstance(out[i], jax.Array):
            addresses = buffer_addresses(out[i])
            if not held.isdisjoint(addresses):
                out[i] = out[i].copy()
            held.update(addresses)
    return out


def share_memory(donated: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether donated arrays share memory with others or with each other."""
    held: set[int] = set()
    for array in donated:
        addresses = buffer_addresses(array)
        if not held.isdisjoint(addresses):
            return True
        held.update(addresses)
    return any(not held.isdisjoint(buffer_addresses(array)) for array in others)
