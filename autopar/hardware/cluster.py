"""`Cluster`, the hardware of a plan: devices, their number, and the links between them."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from autopar.common.json_files import JsonFaultError, decoded
from autopar.errors import InvalidArgumentError
from autopar.hardware import discovery, host_groups, presets, torus, tpu_slices
from autopar.hardware.collective_cost import Fabric, Link
from autopar.hardware.kinds import DeviceKind
from autopar.hardware.measurement import FitQuality, Measurement

__all__ = ["Cluster", "DeviceKind", "Fabric", "Link"]

_FORMAT_VERSION = 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Hosts of equal devices. A host here is what the inner link joins: a DGX box, an NVL72 rack, a TPU slice.

    Attributes:
        name: As in `Cluster.preset`, or free.
        device: What each device is.
        num_hosts: Number of hosts.
        devices_per_host: Devices of each.
        inside_host: Link between devices of one host. On a torus: one wire, one way.
        between_hosts: Link between hosts, per device: the host's rate divided by its devices.
        torus: Physical shape of a host's devices where the link inside is a torus (TPU), else empty.
        axis_override: One link for each mesh axis, or one for all, instead of what follows from the above.
        fits: Of measured constants, how well they give back what was timed; empty where they come from tables.
    """

    name: str
    device: DeviceKind
    num_hosts: int
    devices_per_host: int
    inside_host: Link
    between_hosts: Link
    torus: tuple[int, ...] = ()
    axis_override: tuple[Link, ...] = ()
    fits: tuple[FitQuality, ...] = ()

    def __post_init__(self) -> None:
        if self.num_hosts < 1 or self.devices_per_host < 1:
            raise InvalidArgumentError(
                where=f"Cluster({self.name!r})",
                expected="one host or more with one device or more",
                got=f"{self.num_hosts} hosts of {self.devices_per_host} devices",
                hint="count the devices that the program will run on",
            )
        if self.torus and (min(self.torus) < 1 or math.prod(self.torus) != self.devices_per_host):
            raise InvalidArgumentError(
                where=f"Cluster({self.name!r}).torus",
                expected=f"a shape of {self.devices_per_host} devices",
                got="x".join(map(str, self.torus)),
                hint="devices_per_host is the product of the torus",
            )

    @property
    def num_devices(self) -> int:
        return self.num_hosts * self.devices_per_host

    def axis_links(self, axis_sizes: Sequence[int]) -> tuple[Link, ...]:
        """The link that each axis of a logical mesh runs on, the mesh laid row-major over hosts, then devices.

        An axis inside a host has the inner link. One that joins devices of several hosts shares each host's network
        with the other groups of the host (`autopar.hardware.host_groups`).

        Raises:
            InvalidArgumentError: The mesh has more devices than the cluster, or does not fill whole hosts.
        """
        sizes = tuple(axis_sizes)
        self._check_mesh(sizes)
        if self.axis_override:
            return self.axis_override * len(sizes) if len(self.axis_override) == 1 else self.axis_override
        return tuple(self._group_link(sizes, (axis,)) for axis in range(len(sizes)))

    def joint_links(self, axis_sizes: Sequence[int]) -> tuple[tuple[tuple[int, ...], Link], ...]:
        """(axes, link) of collectives over two axes or more at once; empty where the slowest of their links stands for
        them: where links are given for each axis, and inside a host with a switch.
        """
        sizes = tuple(axis_sizes)
        if self.axis_override or not (self.torus or math.prod(sizes) > self.devices_per_host):
            return ()
        return tuple((axes, self._group_link(sizes, axes)) for axes in host_groups.joint_axes(sizes))

    def _group_link(self, sizes: tuple[int, ...], axes: tuple[int, ...]) -> Link:
        inside = self.inside_host
        if self.torus:
            inside = torus.group_link(self.torus, sizes, axes, self.inside_host)
        lies = host_groups.spread(sizes, axes, self.devices_per_host)
        if lies.hosts == 1:
            return inside
        return host_groups.link_over_hosts(lies, inside, self.between_hosts, is_ring=len(axes) == 1)

    def _check_mesh(self, sizes: tuple[int, ...]) -> None:
        total = math.prod(sizes)
        whole_hosts = total % self.devices_per_host == 0 or self.devices_per_host % total == 0
        links_given = len(self.axis_override) in (0, 1, len(sizes))
        if total <= self.num_devices and whole_hosts and links_given:
            return
        raise InvalidArgumentError(
            where=f"mesh {'x'.join(map(str, sizes))} on cluster {self.name!r}",
            expected=f"whole hosts, or a part of one ({self.num_hosts} hosts of {self.devices_per_host} devices)"
            + ("" if links_given else f", and {len(self.axis_override)} axes, one for each link given"),
            got=f"{total} devices on {len(sizes)} axes",
            hint="choose axis sizes whose product is the number of devices",
        )

    def submesh(self, num_hosts: int, devices_per_host: int) -> Cluster:
        """A part of this cluster, for a pipeline stage. Part of a torus counts as a line of its devices."""
        whole = devices_per_host == self.devices_per_host
        return dataclasses.replace(
            self,
            num_hosts=num_hosts,
            devices_per_host=devices_per_host,
            torus=self.torus if whole else (devices_per_host,) * bool(self.torus),
        )

    @classmethod
    def local(cls, num_devices: int | None = None, *, measured: bool = True) -> Cluster:
        """The devices of this program (the first `num_devices` of them), all of one kind.

        Their constants are those that `measure` saved for devices like these under this version of jax, or else those
        of `autopar.hardware.presets`; `measured=False` takes the latter always. A measurement of several accelerators
        holds for fewer of them too. One of CPU devices holds for the same number of devices only, on as many cores:
        they share these cores and the memory, so that each of four does about twice as much as each of eight.

        Raises:
            InvalidArgumentError: A device that is not in `autopar.hardware.presets`.
            NotEnoughDevicesError: Fewer devices than asked for.
        """
        return cls._of(discovery.find(num_devices, measured=measured))

    @classmethod
    def measure(
        cls,
        num_devices: int | None = None,
        *,
        save: bool = True,
        show_progress: bool = True,
        report: Callable[[Measurement], None] | None = None,
    ) -> Cluster:
        """The devices of this program with constants that are timed now, on an otherwise idle machine, in a minute.

        All devices work at once in groups of 2, 4, ...: collectives of each kind between the devices of a host and
        between hosts, matrix products of each dtype, copies. Compared with `local`, rates, efficiencies, overheads and
        links are measured; peaks and memory are not. What a torus of TPUs does over a wire is taken from the tables.
        How well the constants fit what was timed is in `fits`.

        Args:
            num_devices: The first so many devices; None takes all.
            save: Whether to keep it in the user's cache directory, where `local` finds it.
            show_progress: Whether a progress line is shown on a terminal.
            report: Gets the measurement: all timings, and as `str` a table of them.

        Raises:
            InvalidArgumentError: As `local`; or times that make no sense, as on a machine that is much too busy.
            NotEnoughDevicesError: Fewer devices than asked for.
        """
        from autopar.hardware import calibrate

        measurement = calibrate.measure(num_devices, show_progress=show_progress)
        if save:
            measurement.save()
        if report is not None:
            report(measurement)
        return cls.of_measurement(measurement, num_devices)

    @classmethod
    def of_measurement(cls, measurement: Measurement, num_devices: int | None = None) -> Cluster:
        """The devices of this program with the constants of a measurement of such devices. Raises as `local`."""
        return cls._of(discovery.as_measured(discovery.find(num_devices, measured=False), measurement))

    @classmethod
    def _of(cls, found: discovery.LocalDevices) -> Cluster:
        return cls(**{field.name: getattr(found, field.name) for field in dataclasses.fields(found)})

    @classmethod
    def preset(cls, name: str, *, hosts: int = 1, topology: str | None = None) -> Cluster:
        """A published machine: `Cluster.preset("dgx-h100", hosts=16)`, `Cluster.preset("tpu-v5e", topology="2x4")`.

        On TPU `hosts` counts slices, each of the topology.

        Raises:
            InvalidArgumentError: A name that is not known, or a topology missing or where it means nothing.
        """
        if name in _TPUS:
            return _tpu_slices(name, hosts, topology)
        if name not in _GPU_HOSTS or topology is not None:
            raise InvalidArgumentError(
                where=f"Cluster.preset({name!r}, topology={topology!r})",
                expected=f"one of {', '.join((*_GPU_HOSTS, *_TPUS))}" + (" (topology on TPU only)" if topology else ""),
                got=repr(name) + (f" with topology {topology!r}" if topology else ""),
                hint="for other hardware make a Cluster(...) with its constants",
            )
        device, devices_per_host, inside, between = _GPU_HOSTS[name]
        return cls(
            name=name,
            device=device,
            num_hosts=hosts,
            devices_per_host=devices_per_host,
            inside_host=inside,
            between_hosts=between,
        )

    @classmethod
    def parse(cls, text: str) -> Cluster:
        """A cluster as the command line names it.

        `local` or `local:4` (devices of this program); `dgx-h100`, `dgx-h100x16` (16 hosts); `tpu-v5e:2x4`,
        `tpu-v5p:4x4x4:2` (2 slices); anything that ends in .json is a file made by `save`.

        Raises:
            InvalidArgumentError: None of these.
        """
        if text.endswith(".json"):
            return cls.load(text)
        if m := re.fullmatch(r"local(?::(\d+))?", text):
            return cls.local(int(m[1]) if m[1] else None)
        if m := re.fullmatch(r"(tpu-\w+):(\d+(?:x\d+)*)(?::(\d+))?", text):
            return cls.preset(m[1], topology=m[2], hosts=int(m[3] or 1))
        for name in _GPU_HOSTS:
            if m := re.fullmatch(rf"{re.escape(name)}(?:x(\d+))?", text):
                return cls.preset(name, hosts=int(m[1] or 1))
        raise InvalidArgumentError(
            where="cluster",
            expected=f"local, a .json file, {', '.join(_GPU_HOSTS)} (x16), {', '.join(_TPUS)} (:4x4)",
            got=repr(text),
            hint="the number behind x counts hosts, the shape behind : is the TPU slice's",
        )

    def save(self, path: str | Path) -> None:
        """Writes JSON that `load` reads."""
        stored = _Stored(format_version=_FORMAT_VERSION, cluster=self)
        Path(path).write_bytes(msgspec.json.format(msgspec.json.encode(stored), indent=2) + b"\n")

    @classmethod
    def load(cls, path: str | Path) -> Cluster:
        """Reads what `save` wrote.

        Raises:
            InvalidArgumentError: No such file, another format, or a value in it, which is named by its place in the
                file, that is none of a cluster.
        """
        try:
            data = Path(path).read_bytes()
        except OSError as error:
            raise InvalidArgumentError(
                where=str(path),
                expected="a cluster in a file",
                got="no such file" if isinstance(error, FileNotFoundError) else f"one that cannot be read ({error})",
                hint="make one with Cluster.save, or on the command line: autopar measure --save cluster.json",
            ) from error
        try:
            stored = decoded(data, _Stored, f"a cluster in format version {_FORMAT_VERSION}")
        except JsonFaultError as error:
            fault = error.fault
            if not fault.place.startswith("$.cluster"):
                raise _unreadable(path, fault.got) from error
            raise InvalidArgumentError(
                where=f"{path}, {fault.place}",
                expected=fault.expected,
                got=fault.got,
                hint="mend the file there, or make it anew with Cluster.save",
            ) from error
        if stored.format_version != _FORMAT_VERSION:
            raise _unreadable(path, f"format version {stored.format_version}")
        return stored.cluster

    @classmethod
    def flat(cls, num_devices: int, *, device: DeviceKind = presets.H100, links: Sequence[Link] = ()) -> Cluster:
        """One host with one link between all devices, or with one link for each mesh axis, whatever its size."""
        inside = links[0] if links else presets.NVLINK4
        return cls(
            name=f"flat-{num_devices}",
            device=device,
            num_hosts=1,
            devices_per_host=num_devices,
            inside_host=inside,
            between_hosts=inside,
            axis_override=tuple(links),
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Stored:
    format_version: int
    cluster: Cluster


def _unreadable(path: str | Path, got: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        where=str(path),
        expected=f"a cluster in format version {_FORMAT_VERSION}",
        got=got,
        hint="make the file anew with Cluster.save",
    )


# Name -> device, devices that the inner link joins, link inside, link between.
_GPU_HOSTS: dict[str, tuple[DeviceKind, int, Link, Link]] = {
    "p3.16xlarge": (presets.V100, 8, presets.NVLINK2, presets.ETHERNET_25G),
    "dgx-a100-40g": (presets.A100_40GB, 8, presets.NVLINK3, presets.HDR200),
    "dgx-a100-80g": (presets.A100_80GB, 8, presets.NVLINK3, presets.HDR200),
    "dgx-h100": (presets.H100, 8, presets.NVLINK4, presets.NDR400),
    "dgx-h200": (presets.H200, 8, presets.NVLINK4, presets.NDR400),
    "dgx-b200": (presets.B200, 8, presets.NVLINK5, presets.NDR400),
    "gb200-nvl72": (presets.GB200, 72, presets.NVLINK5_NVL72, presets.NDR400),
}
# Name -> device, axes of the torus.
_TPUS: dict[str, tuple[DeviceKind, int]] = {
    "tpu-v4": (presets.TPU_V4, 3),
    "tpu-v5e": (presets.TPU_V5E, 2),
    "tpu-v5p": (presets.TPU_V5P, 3),
    "tpu-v6e": (presets.TPU_V6E, 2),
}


def _tpu_slices(name: str, slices: int, topology: str | None) -> Cluster:
    device, rank = _TPUS[name]
    if topology is None or not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", topology) or topology.count("x") != rank - 1:
        raise InvalidArgumentError(
            where=f"Cluster.preset({name!r})",
            expected=f"a topology of {rank} axes, such as topology={'x'.join(['4'] * rank)!r}",
            got=f"topology={topology!r}",
            hint="give the shape of the slice, as Google Cloud names it",
        )
    shape = tuple(map(int, topology.split("x")))
    if not tpu_slices.is_offered(shape):
        raise InvalidArgumentError(
            where=f"Cluster.preset({name!r}, topology={topology!r})",
            expected=f"a topology that there is; nearest: {', '.join(tpu_slices.nearest(shape))}",
            got=topology,
            hint="axes stand in ascending order, as Google Cloud names slices, and beyond 4x4x4 are multiples of 4; "
            "for other hardware make a Cluster(...) with its constants",
        )
    return Cluster(
        name=f"{name}:{topology}",
        device=device,
        num_hosts=slices,
        devices_per_host=math.prod(shape),
        inside_host=presets.TPU_ICI[device.name],
        between_hosts=presets.TPU_DCN,
        torus=shape,
    )
