"""The leaves of a compiled step (arguments, constants on the devices, results), and the calls on them.

A donated array may share memory with no other argument. jaxlib 0.10 ends the whole process where one buffer is donated
and read by one program over several CPU devices, or donated twice. Newer versions raise an error after half of the
devices have taken the buffer over. The same array may be several arguments, and several arrays may share buffers:
`jax.device_put` creates such arrays.

In a program of several processes every one calls the step with the same arguments: whole values (such as numpy arrays),
and global arrays, of which it may hold a part or nothing. Small results go to all processes.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from autopar.common import jax_compat
from autopar.common.jax_compat import buffer_addresses
from autopar.errors import AutoparError
from autopar.frontend.callbacks import call_with_results
from autopar.frontend.static_leaves import set_apart
from autopar.ir.traced_step import TracedStep
from autopar.plan.plan import Plan, shardings_in
from autopar.runtime.execute import turn
from autopar.runtime.heartbeat import the_watch
from autopar.runtime.process_rows import move, place
from autopar.runtime.transfers import absent, aval_of, crosser, from_whole, is_here, to_all_processes

# Results that are not state go to all processes where they are not larger: losses and other metrics.
SHARED_BYTES = 65536


class GlobalStep:
    """The placement around a compiled step: `arguments` before it, `results` after it.

    `reads` are (leaf of the arguments, sharding) of each of its inputs, with leaf -1 for constants; `result_shardings`
    has None for literals.
    """

    def __init__(
        self,
        traced: TracedStep,
        reads: Sequence[tuple[int, NamedSharding]],
        result_shardings: Sequence[NamedSharding | None],
    ) -> None:
        self._reads = [(leaf, traced.in_avals[leaf], sharding) for leaf, sharding in reads]
        self._name, self._fingerprint = traced.name, _fingerprint(traced)
        state = set(traced.tied.values())
        everybody = set(range(jax.process_count()))
        self._absent, self._shared, crossings = [], [], []
        for position, (aval, sharding) in enumerate(zip(traced.out_avals, result_shardings, strict=True)):
            if sharding is None:
                continue
            if not is_here(sharding):
                self._absent.append((position, absent(aval.shape, aval.dtype, sharding)))
            processes = {d.process_index for d in sharding.mesh.devices.flat}
            small = aval.size * jax_compat.itemsize(aval) <= SHARED_BYTES
            if position not in state and small and processes != everybody:
                everywhere = NamedSharding(sharding.mesh, PartitionSpec())
                self._shared.append((position, everywhere))
                crossings.append(to_all_processes(aval.shape, aval.dtype, everywhere))
        self._cross = crosser(crossings)
        here = [i for i, s in enumerate(result_shardings) if s is not None and is_here(s)]
        here += [position for position, _ in self._shared]
        # Kept until it is there: one that no later step takes away, if there is one, and a small one.
        self._awaited = min(here, key=lambda i: (i in state, traced.out_avals[i].size, i), default=None)

    def arguments(self, leaves: Sequence[Any]) -> list[Any]:
        """The step's inputs, from the leaves of its arguments; None for inputs that are constants.

        Raises: ProcessLostError; TypeError, in all processes alike, for a shape other than the compiled one.
        """
        watch = the_watch()
        if watch is not None:
            watch.begin_step(self._name, self._fingerprint)
        return [None if leaf < 0 else place(leaves[leaf], aval, sharding) for leaf, aval, sharding in self._reads]

    def await_end(self, results: Sequence[Any]) -> None:
        """Shows the others when the devices of this process have made the results."""
        watch = the_watch()
        if watch is not None:
            watch.await_result(None if self._awaited is None else results[self._awaited])

    def results(self, results: Sequence[Any]) -> list[Any]:
        """The results as global arrays; small ones are readable in every process."""
        out = list(results)
        for position, array in self._absent:
            out[position] = array
        if self._shared:
            readable = self._cross([move(out[position], everywhere) for position, everywhere in self._shared])
            for (position, _), array in zip(self._shared, readable, strict=True):
                out[position] = array
        self.await_end(out)
        return out


def _fingerprint(traced: TracedStep) -> str:
    """The same in all processes that run this step on arguments of these shapes."""
    shapes = ", ".join(f"{aval.dtype}{list(aval.shape)}" for aval in traced.in_avals)
    return f"{traced.fingerprint} {shapes}"


def with_process_lost_errors(run: Callable[[], Any]) -> Any:
    """Runs a function; where JAX fails because another process is lost, the error names that process.

    Raises: ProcessLostError.
    """
    try:
        return run()
    except AutoparError:
        raise
    except jax.errors.JaxRuntimeError as error:
        watch = the_watch()
        if watch is None:
            raise
        watch.blame(error)


def make_state(
    function: Callable[..., Sequence[Any]],
    leaves: Sequence[Any],
    shardings: Sequence[NamedSharding],
    args: Sequence[Any],
) -> list[Any]:
    """Runs `function(*args)`, with the leaves of its result in these shardings; runs once on each mesh."""
    state: list[Any] = [None] * len(leaves)
    meshes = {tuple(s.mesh.devices.flat): s.mesh for s in shardings}
    for devices, mesh in meshes.items():
        positions = [i for i, s in enumerate(shardings) if tuple(s.mesh.devices.flat) == devices]
        everywhere = NamedSharding(mesh, PartitionSpec())
        if not is_here(everywhere):
            for i in positions:
                state[i] = absent(leaves[i].shape, leaves[i].dtype, shardings[i])
            continue
        placed_args = set_apart(jax.tree.map(lambda x, s=everywhere: from_whole(x, aval_of(x), s), list(args)))

        def leaves_on_mesh(*values: Any, positions: Sequence[int] = positions) -> list[Any]:
            out = function(*values)
            return [out[i] for i in positions]

        for i, array in zip(
            positions,
            jax.jit(leaves_on_mesh, out_shardings=[shardings[i] for i in positions])(*placed_args),
            strict=True,
        ):
            state[i] = array
    return state


def leaves_of(traced: TracedStep, args: tuple[Any, ...]) -> list[Any]:
    """The leaves of the dynamic arguments. Raises: TypeError for arguments of another structure."""
    leaves, tree = jax.tree.flatten(args)
    if tree != traced.in_tree:
        raise TypeError(f"expected arguments with the structure {traced.in_tree}, got {tree}")
    return leaves


def has_aval(leaf: Any, aval: Any) -> bool:
    """Whether a leaf is an array or a number of this shape and dtype, 64 bits being cut as JAX does."""
    if isinstance(leaf, (jax.Array, np.ndarray)) and leaf.dtype == aval.dtype:
        return leaf.shape == aval.shape
    if not isinstance(leaf, (np.ndarray, np.generic, bool, int, float, complex)):
        return False
    own = aval_of(leaf)
    return own.dtype == aval.dtype and own.shape == aval.shape


def is_as_compiled(leaf: Any, aval: Any, sharding: NamedSharding) -> bool:
    """Whether a leaf has the shape and dtype of an argument of a program, and where it is on devices, its layout."""
    if not has_aval(leaf, aval):
        return False
    if not isinstance(leaf, jax.Array):
        return True
    return leaf.sharding is sharding or leaf.sharding.is_equivalent_to(sharding, leaf.ndim)


def text_of_leaf(leaf: Any) -> str:
    """A leaf in an error: its dtype, its shape and where it is."""
    if not isinstance(leaf, (jax.Array, np.ndarray)):
        return type(leaf).__name__
    at = f" in {leaf.sharding}" if isinstance(leaf, jax.Array) else ""
    return f"{leaf.dtype}{list(leaf.shape)}{at}"


def results_in_tree(traced: TracedStep, results: Sequence[Any]) -> Any:
    """The results of a step in their tree, in the explicit mesh of the arguments, if there is one; callbacks are called
    first, where they wait for the step's end.
    """
    results = call_with_results(traced, results) if traced.callbacks else results
    if types := traced.types_of_results:
        results = [x if to is None else _in_type(x, to) for x, to in zip(results, types, strict=True)]
    return jax.tree.unflatten(traced.out_tree, results)


@jax_compat.no_mesh_set()
def _in_type(array: jax.Array, sharding: NamedSharding) -> jax.Array:
    """A result with the sharding of its type; the same memory where it lies so already."""
    if jax.process_count() == 1:
        return jax.device_put(array, sharding)
    if not array.sharding.is_equivalent_to(sharding, array.ndim):
        typed = move(array, sharding)
    else:
        shards = [shard.data for shard in array.addressable_shards]
        typed = jax.make_array_from_single_device_arrays(array.shape, sharding, shards)
    return jax_compat.with_weak_type(typed, bool(array.weak_type))


class LeafwiseStep(abc.ABC):
    """A compiled step, called with trees and run on leaves: constructors of user trees may compute on their content."""

    __slots__ = ()
    plan: Plan
    traced: TracedStep
    leaf_shardings: tuple[NamedSharding, ...]
    donated: frozenset[int]
    across: GlobalStep | None
    # Whether a program may run in part before it refuses an argument, so that all are compared before (`accepts`).
    refuses_late: ClassVar[bool] = False

    @property
    def shardings(self) -> tuple[Any, ...]:
        """The shardings of the dynamic arguments, in their trees.

        Raises: UnsupportedError where a node accepts only arrays.
        """
        return shardings_in(self.traced.in_tree, self.leaf_shardings, f"compiled {self.traced.name}")

    def __call__(self, *args: Any) -> Any:
        leaves: Sequence[Any] = leaves_of(self.traced, args)
        if self.across is None:
            leaves = self.placed(leaves)
        return results_in_tree(self.traced, self.run(without_shared_memory(leaves, self.donated, self.own_constants)))

    @property
    @abc.abstractmethod
    def own_constants(self) -> Sequence[Any]:
        """The constants of the program, on the devices."""

    def placed(self, leaves: Sequence[Any]) -> Sequence[Any]:
        """The leaves as the program takes them. Raises: TypeError, also by the program itself."""
        return leaves

    def accepts(self, leaves: Sequence[Any], positions: Sequence[int]) -> bool:
        """Whether the leaves at these positions have the shapes, dtypes and layouts of the program; of a program that
        refuses others by itself, before it runs anything, always.
        """
        return True

    def run(self, leaves: Sequence[Any]) -> Sequence[Any]:
        """Runs the step on the leaves of the dynamic arguments. Returns the leaves of the results."""
        with turn:
            if self.across is None:
                return self._run(leaves)
            return with_process_lost_errors(lambda: self._run_across(leaves))

    @abc.abstractmethod
    def _run(self, leaves: Sequence[Any]) -> Sequence[Any]:
        """Runs the program in this process alone."""

    @abc.abstractmethod
    def _run_across(self, leaves: Sequence[Any]) -> Sequence[Any]:
        """Runs the program with the other processes."""


@jax_compat.no_mesh_set()
def copied(leaf: Any) -> Any:
    """A copy of the leaf. A leaf that is neither an array nor a number may wrap an array (`__jax_array__`)."""
    if isinstance(leaf, (jax.Array, np.ndarray)):
        return leaf.copy()
    return jax.numpy.array(leaf) if hasattr(leaf, "__jax_array__") else leaf


def put(arrays: Sequence[Any], shardings: Sequence[NamedSharding]) -> tuple[Any, ...]:
    """Places arrays that every process has on the devices, where they share no memory with those given: the program
    may delete or donate these.
    """
    if jax.process_count() == 1:
        placed = jax.device_put(list(arrays), list(shardings))
    else:
        placed = [from_whole(a, aval_of(a), s) for a, s in zip(arrays, shardings, strict=True)]
    return tuple(
        jax.device_put(copied(array), sharding) if _share_memory(array, on_devices) else on_devices
        for array, on_devices, sharding in zip(arrays, placed, shardings, strict=True)
    )


def _share_memory(array: Any, other: jax.Array) -> bool:
    """Whether arrays have a buffer in common."""
    if not isinstance(array, jax.Array):
        return False
    return not set(jax_compat.buffer_addresses(array)).isdisjoint(jax_compat.buffer_addresses(other))


def result_like(value: Any, aval: jax.ShapeDtypeStruct) -> Any:
    """A result with the weak type that JAX gives it; a literal becomes an array."""
    if not isinstance(value, jax.Array):
        value = jax.numpy.asarray(np.asarray(value), aval.dtype)
    return jax_compat.with_weak_type(value, bool(aval.weak_type))


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
