"""Where the processes of one start of this host stand among those of all hosts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from autopar.common.launched import VARIABLES, Launched
from autopar.launch.gpus import count_gpus, gpus_of
from autopar.launch.ports import LOOPBACK, address, free_ports


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placement:
    """One start on this host: `processes` of `num_processes`, from number `first_process` on.

    `coordinator` is host:port of process 0, `host` the address of this host for the others.
    """

    restart: int
    first_process: int
    processes: int
    num_processes: int
    coordinator: str
    host: str


def on_one_host(restart: int, processes: int) -> Placement:
    """All processes on this host, reachable from nowhere else."""
    return Placement(
        restart=restart,
        first_process=0,
        processes=processes,
        num_processes=processes,
        coordinator=address(LOOPBACK, free_ports(1)[0]),
        host=LOOPBACK,
    )


def environments(
    placement: Placement, devices_per_process: int | None, folder: Path, environment: Mapping[str, str]
) -> list[dict[str, str]]:
    """The environment of each process of this host. Raises: ValueError where there are too few GPUs."""
    gpus = count_gpus(environment)
    ports = free_ports(placement.processes, placement.host)
    inherited = {name: value for name, value in environment.items() if name not in VARIABLES}
    inherited.setdefault("PYTHONUNBUFFERED", "1")  # lines are shown when they are printed
    found = []
    for i, port in enumerate(ports):
        launched = Launched(
            coordinator=placement.coordinator,
            num_processes=placement.num_processes,
            process_id=placement.first_process + i,
            local_devices=devices_per_process if gpus == 0 else None,
            device_ids=gpus_of(i, placement.processes, devices_per_process, gpus),
            transfer_address=address(placement.host, port),
            restart=placement.restart,
            folder=folder,
        )
        found.append(inherited | launched.variables())
    return found
