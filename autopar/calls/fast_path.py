"""The fast path of a call: directly to the program of the last call, after the checks that the program does not make.

A compiled program refuses arguments of other shapes, dtypes and layouts. It does not detect a change of JAX's
configuration or of the weak type of an argument, for each of which `jax.jit` has another program. It must never get a
deleted array, or a donated buffer that another argument reads.
"""

from __future__ import annotations

import collections
import operator
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax

from autopar.common import jax_compat
from autopar.executables.compiled_step import CompiledStep
from autopar.executables.step_leaves import share_memory
from autopar.frontend.static_leaves import RawLeaves
from autopar.frontend.tracing import is_weak


class FastPath:
    """A compiled step, and the properties that a call must share with the last one, whose leaves were `leaves`, `raw`
    with its static ones.

    The results that replaced the donated leaves in the last call are new memory of known types, and most calls pass
    them on. All checks take a fraction of a microsecond for each leaf.
    """

    def __init__(self, compiled: CompiledStep, leaves: Sequence[Any], raw: RawLeaves) -> None:
        traced = compiled.traced
        self.compiled, self.raw = compiled, raw
        self._context = jax_compat.trace_context()
        self._weak = _weak_types(leaves)
        donated, donates = sorted(compiled.donated), compiled.donated
        self._donated = _picker(donated)
        self._others = [i for i in range(len(leaves)) if i not in donates]
        self._replaced = _picker([traced.tied[i] for i in donated])
        self._weak_of_others = [self._weak[i] for i in self._others]
        self._stays_as_weak = all(bool(traced.out_avals[traced.tied[i]].weak_type) == self._weak[i] for i in donated)
        # An array that is not taken over can share memory with one that is only where both have equal shards.
        same_shards: dict[Any, list[int]] = collections.defaultdict(list)
        for i, (aval, sharding) in enumerate(zip(traced.in_avals, compiled.leaf_shardings, strict=True)):
            same_shards[sharding.shard_shape(aval.shape), aval.dtype].append(i)
        groups = [(set(group) & donates, set(group) - donates) for group in same_shards.values()]
        self._same_shards = sorted(
            i for donated_group, other_group in groups if donated_group and other_group for i in donated_group
        )
        self._kept = sorted(i for donated_group, other_group in groups if donated_group for i in other_group)
        self.called_s: float | None = None  # the latest run, by time.perf_counter
        # References to what is known to share no memory: what replaced the donated leaves, and what was kept beside it.
        self._new: list[Any] = []
        self._beside: list[Any] = []
        self._others_before: list[Any] = []  # references to what was not replaced, of a program that refuses late

    def accepts(self, leaves: Sequence[Any]) -> bool:
        """Whether a call with these leaves may run the program at once; the program may still refuse it."""
        if jax_compat.trace_context() != self._context or not _hold_data(leaves):
            return False
        donated = self._donated(leaves)
        is_new = bool(self._new) and all(map(operator.is_, map(operator.call, self._new), donated))
        if is_new and self._stays_as_weak:
            if self._weak_of_others != _weak_types([leaves[i] for i in self._others]):
                return False
        elif self._weak != _weak_types(leaves):
            return False
        if self.compiled.refuses_late and not self._are_accepted(leaves, is_new):
            return False
        if len(set(map(id, leaves))) != len(leaves):
            ids = set(map(id, donated))
            if len(ids) != len(donated) or any(id(leaves[i]) in ids for i in self._others):
                return False
        return self._share_no_memory(leaves, donated, is_new)

    def _are_accepted(self, leaves: Sequence[Any], is_new: bool) -> bool:
        """Whether the program accepts the leaves, of which those of the last call, and its results, are known."""
        if not is_new:
            return self.compiled.accepts(leaves, range(len(leaves)))
        known = map(operator.call, self._others_before) if self._others_before else [None] * len(self._others)
        return self.compiled.accepts(
            leaves, [i for i, before in zip(self._others, known, strict=True) if before is not leaves[i]]
        )

    def _share_no_memory(self, leaves: Sequence[Any], donated: Sequence[Any], is_new: bool) -> bool:
        """Whether donated leaves share no memory with other leaves."""
        beside = [leaves[i] for i in self._kept]
        if is_new and all(map(operator.is_, map(operator.call, self._beside), beside)):
            return True
        if is_new:
            donated = [leaves[i] for i in self._same_shards]
        return not share_memory(*([x for x in xs if isinstance(x, jax.Array)] for xs in (donated, beside)))

    def run(self, leaves: Sequence[Any]) -> Sequence[Any]:
        """Runs the program on leaves that share no memory. Results that replace donated leaves are new memory."""
        beside = [leaves[i] for i in self._kept]
        self.called_s = time.perf_counter()
        results = self.compiled.run(leaves)
        self._new = _references(self._replaced(results))
        self._beside = _references(beside)
        if self.compiled.refuses_late:
            self._others_before = _references([leaves[i] for i in self._others])
        return results


_ONLY_ARRAYS = {jax_compat.ArrayImpl}


def _hold_data(leaves: Sequence[Any]) -> bool:
    """Whether all leaves hold data: none is a tracer or a deleted array."""
    kinds = set(map(type, leaves))
    if kinds == _ONLY_ARRAYS:
        return not any(map(jax_compat.ArrayImpl.is_deleted, leaves))
    if any(issubclass(kind, jax_compat.Tracer) for kind in kinds):
        return False
    return not any(x.is_deleted() for x in leaves if isinstance(x, jax.Array))


def _weak_types(leaves: Sequence[Any]) -> list[bool]:
    try:
        return [x.weak_type for x in leaves]
    except AttributeError:
        return [is_weak(x) for x in leaves]


def _picker(positions: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    if len(positions) > 1:
        return operator.itemgetter(*positions)
    return lambda values: [values[i] for i in positions]


def _references(values: Sequence[Any]) -> list[Any]:
    """Weak references; to what accepts none, functions that give nothing."""
    try:
        return list(map(weakref.ref, values))
    except TypeError:
        return [_reference(x) for x in values]


def _reference(x: Any) -> Any:
    try:
        return weakref.ref(x)
    except TypeError:
        return lambda: None
