"""A step in a program of several processes: placement of its arguments, and its small results in all processes.

Every process calls the step with the same arguments: whole values (such as numpy arrays), and global arrays, of which
it may hold a part or nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from autopar.common import jax_compat
from autopar.errors import AutoparError
from autopar.frontend.static_leaves import set_apart
from autopar.ir.traced_step import TracedStep
from autopar.runtime.heartbeat import the_watch
from autopar.runtime.process_rows import move, place
from autopar.runtime.transfers import absent, aval_of, cross, from_whole, is_here, to_all_processes

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
        self._absent, self._shared = [], []
        for position, (aval, sharding) in enumerate(zip(traced.out_avals, result_shardings, strict=True)):
            if sharding is None:
                continue
            if not is_here(sharding):
                self._absent.append((position, absent(aval.shape, aval.dtype, sharding)))
            processes = {d.process_index for d in sharding.mesh.devices.flat}
            small = aval.size * jax_compat.itemsize(aval) <= SHARED_BYTES
            if position not in state and small and processes != everybody:
                everywhere = NamedSharding(sharding.mesh, PartitionSpec())
                crossing = to_all_processes(aval.shape, aval.dtype, everywhere)
                self._shared.append((position, everywhere, crossing))
        here = [i for i, s in enumerate(result_shardings) if s is not None and is_here(s)]
        here += [position for position, _, _ in self._shared]
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
            replicated = [move(out[position], everywhere) for position, everywhere, _ in self._shared]
            readable = cross([crossing for _, _, crossing in self._shared], replicated)
            for (position, _, _), array in zip(self._shared, readable, strict=True):
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
