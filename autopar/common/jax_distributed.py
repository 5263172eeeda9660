"""The unstable parts of `jax.distributed` that autopar uses: its coordination service, its key-value store, and the end
of XLA's clients.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax._src import clusters, distributed, xla_bridge


class SharedStore:
    """Texts that all processes of a `jax.distributed` program share, by key, kept by process 0.

    Everything raises `jax.errors.JaxRuntimeError` when process 0 does not answer.
    """

    def __init__(self, client: Any) -> None:
        self._client = client

    def set(self, key: str, value: str) -> None:
        self._client.key_value_set(key, value, allow_overwrite=True)

    def set_once(self, key: str, value: str) -> str:
        """Sets the value of a key that has none; returns the value that it has then, which may be another process's."""
        try:
            self._client.key_value_set(key, value)
        except jax.errors.JaxRuntimeError as error:
            if "ALREADY_EXISTS" not in str(error):
                raise
            found: str = self._client.blocking_key_value_get(key, 1000)
            return found
        return value

    def wait_for(self, key: str, timeout_s: float) -> str | None:
        """The value as soon as there is one; None when there is none after `timeout_s` seconds.

        A wait in vain leaves about 50 kB in the memory of process 0 and 20 kB in that of the waiting one, for good
        (jaxlib 0.10.2): not to be called again and again for a key that nobody writes.
        """
        try:
            value: str = self._client.blocking_key_value_get(key, int(timeout_s * 1000))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error) and "NOT_FOUND" not in str(error):
                raise
            return None
        return value

    def delete(self, key: str) -> None:
        self._client.key_value_delete(key)

    def below(self, prefix: str) -> dict[str, str]:
        """The values whose keys begin with `prefix`, by what follows it."""
        return {key[len(prefix) :]: value for key, value in self._client.key_value_dir_get(prefix)}


def initialize_distributed(
    before_service: Callable[[str, int], None], address_for: Callable[[str, int, int], str], *args: Any, **options: Any
) -> None:
    """`jax.distributed.initialize`. Process 0 calls `before_service(bind address, number of processes)` first; the
    client connects to `address_for(address of the service, number of this process, number of processes)`.
    """
    module = distributed._jax

    class Around:
        def __getattr__(self, name: str) -> Any:
            return getattr(module, name)

        def get_distributed_runtime_service(self, bind_address: str, processes: int, **how: Any) -> Any:
            before_service(bind_address, processes)
            return module.get_distributed_runtime_service(bind_address, processes, **how)

        def get_distributed_runtime_client(self, address: str, process: int, **how: Any) -> Any:
            at = address_for(address, process, distributed.global_state.num_processes)
            return module.get_distributed_runtime_client(at, process, **how)

    distributed._jax = Around()
    try:
        jax.distributed.initialize(*args, **options)
    finally:
        distributed._jax = module


def detected_coordinator(timeout_s: int) -> str | None:
    """host:port of process 0 as `jax.distributed.initialize` without arguments finds it; None for a single process.

    Raises: what JAX raises for a cluster that it finds, but cannot read.
    """
    given = os.environ.get("JAX_COORDINATOR_ADDRESS")
    coordinator, processes, process, _ = clusters.ClusterEnv.auto_detect_unset_distributed_params(
        given, None, None, None, None, timeout_s
    )
    return coordinator if process is not None and processes is not None and processes > 1 else None


def gloo_at(host: str) -> None:
    """Makes the collectives of CPU devices listen at an address of this host; JAX takes that of the host's name."""
    module = xla_bridge._jax

    class Around:
        def __getattr__(self, name: str) -> Any:
            return getattr(module, name)

        def make_gloo_tcp_collectives(self, *args: Any, **how: Any) -> Any:
            return module.make_gloo_tcp_collectives(*args, **({"hostname": host} | how))

    xla_bridge._jax = Around()


def see_only(device_ids: Sequence[int]) -> None:
    """Restricts this process to some GPUs, as `jax.distributed.initialize(local_device_ids=...)` does."""
    visible = ",".join(map(str, device_ids))
    jax.config.update("jax_cuda_visible_devices", visible)
    jax.config.update("jax_rocm_visible_devices", visible)


def process_of_distributed() -> tuple[int, int]:
    """(number of this process, number of processes); the devices need not have been looked for."""
    return distributed.global_state.process_id, distributed.global_state.num_processes


def coordinator_address() -> str:
    """host:port of the coordination service, in process 0."""
    return distributed.global_state.coordinator_address or ""


def shared_store() -> SharedStore | None:
    """What the processes of this program share; None where `jax.distributed` is not in use."""
    client = distributed.global_state.client
    return None if client is None else SharedStore(client)


def is_shutting_down() -> bool:
    """Whether a thread of this process is in `jax.distributed.shutdown`: its client knows that all come to an end."""
    shutdown = distributed.State.shutdown.__code__
    frames = sys._current_frames().values()
    return any(frame.f_code is shutdown for top in frames for frame, _ in traceback.walk_stack(top))


def await_arrays() -> None:
    """Returns when all arrays of this process are there, also those that another process sends; or have failed."""
    for client in _clients():
        for array in client.live_arrays():
            with contextlib.suppress(RuntimeError):  # it was donated, or what it was computed from has failed
                array.block_until_ready()


def never_destroy_clients() -> None:
    """Keeps XLA's clients until the process ends, beyond Python's own end.

    Their destructors run after everything of Python's, where nothing can end them or say what they wait for.
    """
    for client in _clients():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(client))


def _clients() -> list[Any]:
    return list(xla_bridge.backends().values()) if xla_bridge.backends_are_initialized() else []
