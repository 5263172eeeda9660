"""Where the processes of one start of this host stand among those of all hosts, and their addresses."""

from __future__ import annotations

import contextlib
import dataclasses
import ipaddress
import re
import socket
from collections.abc import Mapping
from pathlib import Path

from autopar.common.launched import VARIABLES, Launched

# The GPUs of this host, found without JAX, and how its processes share them.


_DEVICES = Path("/dev")
# Who sees fewer than all, in the order in which the libraries ask.
_VISIBLE = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")


def count_gpus(environment: Mapping[str, str], devices: Path = _DEVICES) -> int:
    """How many GPUs JAX would see in a process of this host; 0 where it is told to use CPU devices."""
    platforms = environment.get("JAX_PLATFORMS", "")
    if platforms and not {"cuda", "rocm", "gpu"} & set(platforms.split(",")):
        return 0
    for name in _VISIBLE:
        if name in environment:
            return len([part for part in environment[name].split(",") if part.strip() not in ("", "-1")])
    if not devices.is_dir():
        return 0
    nvidia = [path for path in devices.iterdir() if re.fullmatch(r"nvidia\d+", path.name)]
    amd = list((devices / "dri").glob("renderD*")) if (devices / "kfd").exists() else []
    return len(nvidia) or len(amd)


def gpus_of(local_process: int, processes: int, per_process: int | None, gpus: int) -> tuple[int, ...] | None:
    """The GPUs of one of the processes of this host, as JAX numbers those that it sees; None: JAX takes all there are.

    Raises: ValueError where there are too few.
    """
    if gpus == 0 or (processes == 1 and per_process is None):
        return None
    each = per_process if per_process is not None else gpus // processes
    if each * processes > gpus or each == 0:
        raise ValueError(
            f"{processes} processes with {each or 1} GPUs each need {processes * max(each, 1)}, this host has {gpus}"
        )
    return tuple(range(local_process * each, (local_process + 1) * each))


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


LOOPBACK = "127.0.0.1"


def free_ports(count: int, host: str = LOOPBACK) -> list[int]:
    """Ports on which nobody listens now; whoever is slow may find another one there."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket(_family(host))) for _ in range(count)]
        for s in sockets:
            s.bind((host, 0))
        return [s.getsockname()[1] for s in sockets]


def address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def host_and_port(text: str) -> tuple[str, int]:
    """Raises: ValueError."""
    host, colon, port = text.rpartition(":")
    if not colon or not host:
        raise ValueError(f"{text!r} is not host:port")
    return host.strip("[]"), int(port)


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def own_address_towards(host: str, port: int) -> str:
    """The address of this host by which `host` sees it; nothing is sent. Raises: OSError."""
    family, kind, protocol, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as s:
        s.connect(where)
        return str(s.getsockname()[0])


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
