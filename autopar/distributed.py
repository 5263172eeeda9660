"""`jax.distributed.initialize` with failure detection: errors name the lost process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from autopar.common import jax_distributed
from autopar.errors import ProcessLostError
from autopar.runtime.coordinator import CoordinatorLink, RollCall
from autopar.runtime.heartbeat import begin_watch, leave, lost_error, wait_until_stuck

_AT = "autopar.distributed.initialize"
INITIALIZATION_TIMEOUT_S = 300  # as jax has it


def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    initialization_timeout: int = INITIALIZATION_TIMEOUT_S,
    **options: Any,
) -> None:
    """Joins the processes of a program: `jax.distributed.initialize`, with the same arguments.

    All processes call it. When one of them is killed or stopped afterwards, process 0 included, each of the others ends
    within a minute with an error that names it, or normally where all have finished their work. With JAX's own
    function, they end so only from the first step on, and JAX adds a C++ stack where the lost process is process 0.
    `initialization_timeout` is the waiting time for missing processes, in seconds.

    Raises: ProcessLostError where processes do not join, or are lost while they join; the errors of JAX.
    """
    joining = _Joining(float(initialization_timeout), bool(options.get("mtls_cert_file")))
    options["initialization_timeout"] = max(initialization_timeout, INITIALIZATION_TIMEOUT_S)  # the roll call is first
    jax_distributed.initialize_distributed(
        joining.before_the_service,
        joining.address_for_client,
        coordinator_address,
        num_processes,
        process_id,
        **options,
    )
    store, (process, processes) = jax_distributed.shared_store(), jax_distributed.process_of_distributed()
    if store is not None and processes > 1:
        begin_watch(store, process, processes, joining.link)
    joining.end()


class _Joining:
    """The failure detection while JAX joins the processes."""

    def __init__(self, timeout_s: float, has_certificates: bool) -> None:
        self._timeout_s, self._has_certificates = timeout_s, has_certificates
        self._joined = threading.Event()
        self._roll_call: RollCall | None = None
        self.link: CoordinatorLink | None = None

    def before_the_service(self, bind_address: str, num_processes: int) -> None:
        """Process 0 meets the other processes at the address of the later service. Raises: ProcessLostError."""
        self._meet(0, num_processes, bind_address)

    def address_for_client(self, address: str, process: int, num_processes: int) -> str:
        """The address that the client of a process connects to. Raises: ProcessLostError."""
        if process == 0:
            return address
        self._meet(process, num_processes, address)
        if self._has_certificates:  # they name the host of process 0
            return address
        self.link = link = CoordinatorLink(address)
        link.when_lost(lambda: self._end_unless_joined(process, lambda: (0, str(link.lost))))
        return link.address

    def end(self) -> None:
        self._joined.set()
        if self._roll_call is not None:
            self._roll_call.close()

    def _meet(self, process: int, num_processes: int, address: str) -> None:
        self._roll_call = call = RollCall(process, num_processes, address, self._timeout_s)
        call.hold()
        if call.lost is not None:
            raise _error(process, *call.lost)
        call.when_lost(lambda: self._end_unless_joined(process, lambda: call.lost or (0, "")))

    def _end_unless_joined(self, process: int, lost: Callable[[], tuple[int, str]]) -> None:
        """Ends this process if another one is lost before all have joined: JAX waits for it in C++."""
        if not self._joined.is_set():
            where = wait_until_stuck(self._joined.is_set)
            if where is not None:
                leave(_error(process, *lost()), where)


def _error(process: int, lost: int, reason: str) -> ProcessLostError:
    return lost_error(process, lost, reason, _AT)
