"""The devices of this program, with the constants of `autopar.hardware.presets` or of a saved measurement."""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from collections.abc import Sequence
from typing import Any

from autopar.errors import InvalidArgumentError, NotEnoughDevicesError
from autopar.hardware import presets
from autopar.hardware.collective_cost import Link
from autopar.hardware.kinds import DeviceKind
from autopar.hardware.measurement import FitQuality, MeasuredOn, Measurement, saved_for


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LocalDevices:
    """What `autopar.Cluster.local` is made of; fields as there, but that a host is here what the inner link joins. That
    may be `processes_per_host` processes on hosts of their own.
    """

    name: str
    device: DeviceKind
    num_hosts: int
    devices_per_host: int
    inside_host: Link
    between_hosts: Link
    torus: tuple[int, ...] = ()
    fits: tuple[FitQuality, ...] = ()
    processes_per_host: int = 1
    inside_chip: Link | None = None


def find(num_devices: int | None = None, *, measured: bool = True) -> LocalDevices:
    """The first `num_devices` of `jax.devices()`, or all; with saved measured constants if there are any.

    Raises: as `chosen`.
    """
    devices, found = chosen(num_devices)
    measurement = saved_for(measured_on(devices, found)) if measured else None
    return found if measurement is None else as_measured(found, measurement)


def as_measured(found: LocalDevices, measurement: Measurement) -> LocalDevices:
    """Devices with the rates and links of a measurement. Their memory is what this program has, not that one."""
    return dataclasses.replace(
        found,
        device=dataclasses.replace(
            measurement.device,
            memory_bytes=found.device.memory_bytes,
            host_link_bytes_per_s=found.device.host_link_bytes_per_s,
        ),
        inside_host=measurement.inside_host,
        between_hosts=measurement.between_hosts,
        fits=measurement.fits,
    )


def measured_on(devices: Sequence[Any], found: LocalDevices) -> MeasuredOn:
    """What a measurement of these devices is filed under."""
    import jax

    on_cpu = devices[0].platform == "cpu"
    return MeasuredOn(
        platform=devices[0].platform,
        device_kind=devices[0].device_kind,
        num_hosts=found.num_hosts,
        devices_per_host=found.devices_per_host,
        jax_version=jax.__version__,
        cores=(os.cpu_count() or 1) if on_cpu else 0,
    )


def chosen(num_devices: int | None = None) -> tuple[list[Any], LocalDevices]:
    """The first `num_devices` of `jax.devices()`, or all, and what the tables say of them.

    Raises:
        InvalidArgumentError: Devices of several kinds, or of one that is not in the tables.
        NotEnoughDevicesError: Fewer devices than asked for.
    """
    import jax  # here, because starting jax's devices is a thing that only those who ask for them should wait for

    devices = jax.devices()
    if num_devices is not None and not 1 <= num_devices <= len(devices):
        raise NotEnoughDevicesError(
            where="Cluster.local",
            expected=f"1 to {len(devices)} devices, as many as this program has ({devices[0].platform})",
            got=str(num_devices),
            hint="plan for other hardware with Cluster.preset(...); virtual CPU devices come from "
            "JAX_NUM_CPU_DEVICES=8, set before jax starts",
        )
    devices = devices[:num_devices]
    return devices, describe(devices)


def describe(devices: Sequence[Any]) -> LocalDevices:
    """The tables' words for a list of jax devices. Raises as `find`."""
    names = Counter(d.device_kind for d in devices)
    if len(names) > 1:
        raise InvalidArgumentError(
            where="Cluster.local",
            expected="devices of one kind",
            got=", ".join(f"{count} of {kind!r}" for kind, count in names.items()),
            hint="give the devices of one kind as cluster=Cluster.local(num_devices=...)",
        )
    num_hosts, devices_per_host = _hosts(devices)
    platform = devices[0].platform
    if platform == "cpu":
        cores = os.cpu_count() or 1
        return LocalDevices(
            name=f"local-cpu-{len(devices)}",
            device=presets.cpu_device(num_devices=devices_per_host, cores=cores, host_bytes=_host_memory_bytes()),
            num_hosts=num_hosts,
            devices_per_host=devices_per_host,
            inside_host=presets.cpu_link(devices_per_host),
            between_hosts=presets.cpu_process_link(devices_per_host),
        )
    kind = _kind(devices[0])
    wire = presets.TPU_ICI.get(kind.name)
    inside, between = (wire, presets.TPU_DCN) if wire else presets.GPU_LINKS[kind.name]
    return LocalDevices(
        name=f"local-{kind.name}-{len(devices)}",
        device=dataclasses.replace(kind, memory_bytes=_memory_bytes(devices[0], kind)),
        num_hosts=num_hosts,
        devices_per_host=devices_per_host,
        inside_host=inside,
        between_hosts=between,
        torus=_torus(devices[:devices_per_host]) if wire else (),
        inside_chip=presets.TPU7X_CHIP if kind.name == presets.TPU7X.name else None,
        processes_per_host=1 if wire else _processes(devices[:devices_per_host]),
    )


def _processes(devices: Sequence[Any]) -> int:
    """How many processes hold the devices that fast links join, each several of its own: hosts of an NVLink domain.

    Processes with one device each may share a host; jax does not say.
    """
    counts = set(Counter(d.process_index for d in devices).values())
    of_each = counts.pop()
    return 1 if counts or of_each == 1 else len(devices) // of_each


def _hosts(devices: Sequence[Any]) -> tuple[int, int]:
    """(number of hosts, devices of each). jax numbers what fast links join as slices; a process is a host otherwise,
    and on CPU, where jax calls everything one slice."""
    sliced = devices[0].platform != "cpu" and hasattr(devices[0], "slice_index")
    groups = Counter(d.slice_index if sliced else d.process_index for d in devices)
    if len(set(groups.values())) > 1:
        return len(devices), 1  # uneven hosts: count on nothing but the network between them
    return len(groups), len(devices) // len(groups)


def _kind(device: Any) -> DeviceKind:
    for prefix, kind in presets.BY_JAX_NAME:
        if device.device_kind.startswith(prefix):
            return kind
    capability = str(getattr(device, "compute_capability", ""))
    if capability in presets.BY_COMPUTE_CAPABILITY:
        return dataclasses.replace(
            presets.BY_COMPUTE_CAPABILITY[capability],
            source=f"{device.device_kind} taken for the card of compute capability {capability}",
        )
    raise InvalidArgumentError(
        where="Cluster.local",
        expected=f"one of {', '.join(sorted({prefix for prefix, _ in presets.BY_JAX_NAME}))}, or CPU",
        got=repr(device.device_kind),
        hint="pass a cluster: make a Cluster(...) with the constants of these devices",
    )


def _memory_bytes(device: Any, kind: DeviceKind) -> int:
    """What the allocator of this program may give out (jax takes a share of a GPU), or else the table's size."""
    stats = device.memory_stats() or {}
    return int(stats.get("bytes_limit", kind.memory_bytes))


def _torus(devices: Sequence[Any]) -> tuple[int, ...]:
    """Extents of the devices' coordinates, without the axes of size one; a line of them if they fill no box."""
    extents = [max(axis) - min(axis) + 1 for axis in zip(*(d.coords for d in devices), strict=True)]
    cores = len({d.core_on_chip for d in devices}) if hasattr(devices[0], "core_on_chip") else 1
    shape = (*(tuple(n for n in extents if n > 1) or (1,)), *((cores,) if cores > 1 else ()))
    filled = 1
    for n in shape:
        filled *= n
    return shape if filled == len(devices) else (len(devices),)


def _host_memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
