"""`autopar.initialize`: one script alone, under the launcher, and under Slurm, Open MPI, Kubernetes or Cloud TPU."""

from __future__ import annotations

import os
from typing import Any

import jax

from autopar import distributed
from autopar.common import jax_distributed
from autopar.common.launched import VARIABLES, Launched, Reached, say_reached
from autopar.errors import InvalidArgumentError
from autopar.train.launch.placement import LOOPBACK, address, host_and_port, is_loopback

_AT = "autopar.initialize"
_CHECKPOINT_EVENTS = ("/jax/orbax/write/", "/jax/orbax/read/")


def initialize(*, initialization_timeout: int = distributed.INITIALIZATION_TIMEOUT_S) -> None:
    """Joins the processes of a program, if there are several; call it first, before JAX looks for its devices.

    The processes are those of `python -m autopar.launch`, else those that JAX finds under Slurm, Open MPI, Kubernetes
    or Cloud TPU. Without any of them, or for one process, nothing is joined. Failure detection is that of
    `autopar.distributed.initialize`, which takes addresses for processes that were started in another way.
    `initialization_timeout` is the waiting time for missing processes, in seconds.

    A program that has joined already stays as it is: a second call does nothing.

    Raises: InvalidArgumentError for variables of the launcher that are wrong, ProcessLostError where processes do not
    join, or are lost while they join; the errors of JAX.
    """
    launched = _launched()
    if jax_distributed.shared_store() is not None:  # JAX joins once only
        return
    if launched is None:
        coordinator = jax_distributed.detected_coordinator(initialization_timeout)
        if coordinator is not None:
            distributed.initialize(initialization_timeout=initialization_timeout, **binding(coordinator))
        return
    if launched.local_devices is not None:
        jax.config.update("jax_num_cpu_devices", launched.local_devices)
    if launched.num_processes > 1:
        if launched.transfer_address is not None:  # read by the client of CPU devices only
            jax.config.update("jax_cross_host_transfer_socket_address", launched.transfer_address)
            jax_distributed.gloo_at(host_and_port(launched.transfer_address)[0])
        distributed.initialize(
            launched.coordinator,
            launched.num_processes,
            launched.process_id,
            local_device_ids=launched.device_ids,
            initialization_timeout=initialization_timeout,
            cluster_detection_method="deactivate",
            **binding(launched.coordinator),
        )
    elif launched.device_ids is not None:
        jax_distributed.see_only(launched.device_ids)
    _tell_of_checkpoints()
    say_reached(Reached.JOINED)


def _tell_of_checkpoints() -> None:
    """Says to the launcher that the script has checkpoints, by the events of orbax, whoever calls it."""
    has_said = False

    def heard(event: str, *_: Any, **__: Any) -> None:
        nonlocal has_said
        if not has_said and event.startswith(_CHECKPOINT_EVENTS):
            has_said = True
            say_reached(Reached.CHECKPOINT)

    jax.monitoring.register_event_listener(heard)
    jax.monitoring.register_event_duration_secs_listener(heard)


def _launched() -> Launched | None:
    """Raises: InvalidArgumentError."""
    try:
        return Launched.read(os.environ)
    except (KeyError, ValueError) as error:
        raise InvalidArgumentError(
            where=_AT,
            expected="the variables of the environment as python -m autopar.launch sets them",
            got=f"{error!r} in {', '.join(f'{name}={os.environ[name]}' for name in VARIABLES if name in os.environ)}",
            hint="start the program with python -m autopar.launch, or set none of them",
        ) from None


def binding(coordinator: str) -> dict[str, Any]:
    """Where process 0 listens: JAX listens on all addresses of its host, unless it is told otherwise."""
    host, port = host_and_port(coordinator)
    if not is_loopback(host) or "JAX_COORDINATOR_BIND_ADDRESS" in os.environ:
        return {}
    return {"coordinator_bind_address": address(LOOPBACK if host == "localhost" else host, port)}
