"""Calls that go straight to the program of the step's last call, and what has to be looked at before they do.

A compiled program refuses arguments of other shapes, types and layouts by itself. It does not know that jax's
configuration has changed, nor that an argument is now weakly typed or no longer, for either of which `jax.jit` has
another program; and it must never get a deleted array, or memory that it takes over and reads elsewhere too.
"""

from __future__ import annotations

import collections
import weakref
from collections.abc import Sequence
from typing import Any

import jax

from autopar import jax_compat
from autopar.compiled import Compiled, CompiledPipeline
from autopar.sharing_memory import share_memory
from autopar.staging import is_weak


class FastPath:
    """A compiled step and what a call of it has to have in common with its last one. `leaves` are those of that call.

    All of it is a few tenths of a microsecond for each leaf (`benchmarks/overhead.py`).
    """

    def __init__(self, compiled: Compiled | CompiledPipeline, leaves: Sequence[Any]) -> None:
        self.compiled, self.tree = compiled, compiled.traced.in_tree
        self._context = jax_compat.trace_context()
        self._weak = _weak_types(leaves)
        self._donated = sorted(compiled.donated)
        self._replaced_by = [compiled.traced.tied[i] for i in self._donated]
        # An array that is not taken over can share memory with one that is only where both have equal shards.
        alike: dict[Any, list[int]] = collections.defaultdict(list)
        for i, (aval, sharding) in enumerate(zip(compiled.traced.in_avals, compiled.leaf_shardings, strict=True)):
            alike[sharding.shard_shape(aval.shape), aval.dtype].append(i)
        groups = [(set(group) & compiled.donated, set(group) - compiled.donated) for group in alike.values()]
        self._alike = sorted(i for taken, kept in groups if taken and kept for i in taken)
        self._kept = sorted(i for taken, kept in groups if taken for i in kept)
        self._apart: list[Any] = []  # references to what is known to share no memory: donated leaves, then kept ones

    def takes(self, leaves: Sequence[Any]) -> bool:
        """Whether a call with these leaves may go to the program at once, which may still refuse it."""
        if jax_compat.trace_context() != self._context:
            return False
        kinds = set(map(type, leaves))
        if any(issubclass(kind, jax_compat.Tracer) for kind in kinds) or _weak_types(leaves) != self._weak:
            return False
        only_arrays = kinds == _ONLY_ARRAYS
        if any(x.is_deleted() for x in leaves if only_arrays or isinstance(x, jax.Array)):
            return False
        donated = [leaves[i] for i in self._donated]
        if len(set(map(id, leaves))) != len(leaves):
            ids = set(map(id, donated))
            taken = set(self._donated)
            if len(ids) != len(donated) or any(id(x) in ids for i, x in enumerate(leaves) if i not in taken):
                return False
        return self._are_apart(leaves, donated)

    def _are_apart(self, leaves: Sequence[Any], donated: Sequence[Any]) -> bool:
        """Whether what is taken over shares no memory with anything else."""
        kept = [leaves[i] for i in self._kept]
        n, known = len(donated), self._apart
        fresh = bool(known) and all(ref() is x for ref, x in zip(known, donated, strict=False))
        if fresh and all(ref() is x for ref, x in zip(known[n:], kept, strict=True)):
            return True
        if fresh:
            donated = [leaves[i] for i in self._alike]
        return not share_memory(*([x for x in xs if isinstance(x, jax.Array)] for xs in (donated, kept)))

    def run(self, leaves: Sequence[Any]) -> Sequence[Any]:
        """The leaves of the results, of leaves that share no memory. What replaces donated leaves is new memory."""
        kept = [leaves[i] for i in self._kept]
        results = self.compiled.run(leaves)
        self._apart = [_reference(x) for x in (*(results[i] for i in self._replaced_by), *kept)]
        return results


_ONLY_ARRAYS = {jax_compat.ArrayImpl}


def _weak_types(leaves: Sequence[Any]) -> list[bool]:
    try:
        return [x.weak_type for x in leaves]
    except AttributeError:
        return [is_weak(x) for x in leaves]


def _reference(x: Any) -> Any:
    """A weak reference; to what takes none, a function that gives nothing."""
    try:
        return weakref.ref(x)
    except TypeError:
        return lambda: None
