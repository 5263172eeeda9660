"""The unstable parts of `jax.distributed` that autopar uses: its coordination service, its key-value store, and the end
of XLA's clients.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
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

    def wait_for(self, key: str, timeout_s: float) -> str | None:
        """The value as soon as there is one; None when there is none after `timeout_s` seconds."""
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class DetectedProcesses:
    """The processes that a cluster has started. `device_ids` are the devices of this one; None: all there are."""

    coordinator: str
    num_processes: int
    process_id: int
    device_ids: tuple[int, ...] | None


def detected_processes(timeout_s: int) -> DetectedProcesses | None:
    """What `jax.distributed.initialize` without arguments would join; None where it finds no cluster.

    Raises: what JAX raises for a cluster that it finds, but cannot read.
    """
    coordinator, processes, process, device_ids = clusters.ClusterEnv.auto_detect_unset_distributed_params(
        None, None, None, None, None, timeout_s
    )
    if coordinator is None or processes is None or process is None:
        return None
    return DetectedProcesses(
        coordinator=coordinator,
        num_processes=processes,
        process_id=process,
        device_ids=None if device_ids is None else tuple(device_ids),
    )


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
