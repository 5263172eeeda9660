"""`Cluster`, the hardware of a plan: devices, their number, and the links between them."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from autopar.common.files import JsonFaultError, decoded
from autopar.errors import InvalidArgumentError
from autopar.hardware import discovery, mesh_links, presets
from autopar.hardware.collective_cost import Fabric, Link
from autopar.hardware.kinds import DeviceKind
from autopar.hardware.measurement import FitQuality, Measurement

__all__ = ["Cluster", "DeviceKind", "Fabric", "Link"]

_FORMAT_VERSION = 3
# A machine before the file of its devices, whose path may have an @ too.
_MACHINE = re.compile(rf"({'|'.join(map(re.escape, ('local', *presets.GPU_HOSTS, *presets.TPUS)))})([x:].*)?")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Hosts of equal devices. The inner link joins the devices of a domain: one host (a DGX box), or several (an NVL72
    rack has 18 hosts of 4). Of TPUs a host here is a slice.

    Attributes:
        name: As in `Cluster.preset`, or free.
        device: What each device is.
        num_hosts: Number of hosts.
        devices_per_host: Devices of each.
        hosts_per_domain: Hosts of each domain; neighbours in the order of hosts.
        inside_host: Link between devices of one domain. On a torus: one wire, one way.
        between_hosts: Link between domains, per device: the rate of a host's network cards divided by its devices.
        torus: Physical shape of a host's devices where the link inside is a torus (TPU), else empty.
        inside_chip: On a torus of chips that are several devices each, the link between these: they are the last axis
            of the torus, and share the chip's wires to others.
        axis_override: Instead of what follows from the above, one link for all mesh axes, or one for each.
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
    hosts_per_domain: int = 1
    inside_chip: Link | None = None

    def __post_init__(self) -> None:
        if self.num_hosts < 1 or self.devices_per_host < 1:
            raise InvalidArgumentError(
                where=f"Cluster({self.name!r})",
                expected="one host or more with one device or more",
                got=f"{self.num_hosts} hosts of {self.devices_per_host} devices",
                hint="count the devices that the program will run on",
            )
        if self.hosts_per_domain < 1 or self.num_hosts % self.hosts_per_domain:
            raise InvalidArgumentError(
                where=f"Cluster({self.name!r}).hosts_per_domain",
                expected=f"a number that divides {self.num_hosts} hosts",
                got=str(self.hosts_per_domain),
                hint="give the hosts that one fast link joins (18 of an NVL72 rack), or 1",
            )
        if self.torus and (min(self.torus) < 1 or math.prod(self.torus) != self.domain_devices):
            raise InvalidArgumentError(
                where=f"Cluster({self.name!r}).torus",
                expected=f"a shape of {self.devices_per_host} devices",
                got="x".join(map(str, self.torus)),
                hint="devices_per_host is the product of the torus",
            )

    @property
    def num_devices(self) -> int:
        return self.num_hosts * self.devices_per_host

    @property
    def num_domains(self) -> int:
        """How many parts the cluster has that only the network between hosts joins."""
        return self.num_hosts // self.hosts_per_domain

    @property
    def domain_devices(self) -> int:
        """Devices that the inner link joins."""
        return self.hosts_per_domain * self.devices_per_host

    def axis_links(self, axis_sizes: Sequence[int]) -> tuple[Link, ...]:
        """The link that each axis of a logical mesh runs on, the mesh laid row-major over domains, then devices.

        An axis inside a domain has the inner link; one over several shares their networks (`hardware.mesh_links`).

        Raises: InvalidArgumentError for a mesh of more devices than the cluster, or that does not fill whole domains.
        """
        sizes = tuple(axis_sizes)
        self._check_mesh(sizes)
        if self.axis_override:
            slowest = min(self.axis_override, key=lambda link: link.bytes_per_s)
            return self.axis_override if len(self.axis_override) == len(sizes) else (slowest,) * len(sizes)
        return tuple(self._group_link(sizes, (axis,)) for axis in range(len(sizes)))

    def joint_links(self, axis_sizes: Sequence[int]) -> tuple[tuple[tuple[int, ...], Link], ...]:
        """(axes, link) of collectives over two axes or more at once; empty where the slowest of their links stands for
        them: where links are given for each axis, and inside a domain with a switch.
        """
        sizes = tuple(axis_sizes)
        if self.axis_override or not (self.torus or math.prod(sizes) > self.domain_devices):
            return ()
        return tuple((axes, self._group_link(sizes, axes)) for axes in mesh_links.joint_axes(sizes))

    def _group_link(self, sizes: tuple[int, ...], axes: tuple[int, ...]) -> Link:
        inside = self.inside_host
        if self.torus:
            inside = mesh_links.group_link(self.torus, sizes, axes, self.inside_host, self.inside_chip)
        lies = mesh_links.spread(sizes, axes, self.domain_devices)
        if lies.hosts == 1:
            return inside
        return mesh_links.link_over_hosts(lies, inside, self.between_hosts, is_ring=len(axes) == 1)

    def has_links_for(self, num_axes: int) -> bool:
        """Whether meshes of so many axes have links: of links given for each axis, as many, or one for all."""
        return num_axes == 1 or len(self.axis_override) in (0, 1, num_axes)

    def _check_mesh(self, sizes: tuple[int, ...]) -> None:
        total = math.prod(sizes)
        whole_hosts = total % self.domain_devices == 0 or self.domain_devices % total == 0
        links_given = self.has_links_for(len(sizes))
        if total <= self.num_devices and whole_hosts and links_given:
            return
        domains = "hosts" if self.hosts_per_domain == 1 else "domains"
        raise InvalidArgumentError(
            where=f"mesh {'x'.join(map(str, sizes))} on cluster {self.name!r}",
            expected=f"whole {domains}, or a part of one ({self.num_domains} {domains} of {self.domain_devices} "
            "devices)" + ("" if links_given else f", and {len(self.axis_override)} axes, one for each link given"),
            got=f"{total} devices on {len(sizes)} axes",
            hint="choose axis sizes whose product is the number of devices",
        )

    def submesh(self, num_domains: int, domain_devices: int) -> Cluster:
        """A part of this cluster, for a pipeline stage. Part of a torus counts as a line of its devices."""
        whole = domain_devices == self.domain_devices
        of_host = math.gcd(domain_devices, self.devices_per_host)
        hosts_per_domain = domain_devices // of_host
        return dataclasses.replace(
            self,
            num_hosts=num_domains * hosts_per_domain,
            devices_per_host=of_host,
            hosts_per_domain=hosts_per_domain,
            torus=self.torus if whole else mesh_links.part(self.torus, domain_devices, self.inside_chip),
        )

    @classmethod
    def local(cls, num_devices: int | None = None, *, measured: bool = True) -> Cluster:
        """The devices of this program (the first `num_devices` of them), all of one kind.

        Their constants are those that `measure` saved for devices like these under this version of jax, or else those
        of `autopar.hardware.presets`; `measured=False` takes the latter always. A measurement of several accelerators
        holds for fewer of them too. One of CPU devices holds for the same number of devices only, on as many cores:
        they share these cores and the memory, so that each of four does about twice as much as each of eight.

        Raises:
            InvalidArgumentError: Devices of several kinds, or of one that is not in `autopar.hardware.presets`.
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
        return cls(
            name=found.name,
            device=found.device,
            num_hosts=found.num_hosts * found.processes_per_host,
            devices_per_host=found.devices_per_host // found.processes_per_host,
            inside_host=found.inside_host,
            between_hosts=found.between_hosts,
            torus=found.torus,
            inside_chip=found.inside_chip,
            fits=found.fits,
            hosts_per_domain=found.processes_per_host,
        )

    @classmethod
    def preset(cls, name: str, *, hosts: int = 1, topology: str | None = None) -> Cluster:
        """A published machine: `Cluster.preset("dgx-h100", hosts=16)`, `Cluster.preset("tpu-v5e", topology="2x4")`.

        On TPU `hosts` counts slices, each of the topology; of NVL72, where one NVLink domain joins 18 hosts, racks.

        Raises:
            InvalidArgumentError: A name that is not known, or a topology missing or where it means nothing.
        """
        if name in presets.TPUS:
            return _tpu_slices(name, hosts, topology)
        if name not in presets.GPU_HOSTS or topology is not None:
            raise InvalidArgumentError(
                where=f"Cluster.preset({name!r}, topology={topology!r})",
                expected=f"one of {', '.join((*presets.GPU_HOSTS, *presets.TPUS))}"
                + (" (topology on TPU only)" if topology else ""),
                got=repr(name) + (f" with topology {topology!r}" if topology else ""),
                hint="for other hardware make a Cluster(...) with its constants",
            )
        machine = presets.GPU_HOSTS[name]
        return cls(
            name=name,
            device=machine.device,
            num_hosts=hosts * machine.hosts_per_domain,
            devices_per_host=machine.devices_per_host,
            inside_host=machine.inside,
            between_hosts=machine.between,
            hosts_per_domain=machine.hosts_per_domain,
        )

    @classmethod
    def parse(cls, text: str) -> Cluster:
        """A cluster as the command line names it.

        `local` or `local:4` (devices of this program); `dgx-h100`, `dgx-h100x16` (16 hosts), `dgx-h100:4` (4 cards of
        a host); `tpu-v5e:2x4`, `tpu-v5p:4x4x4:2` (2 slices); `dgx-h100x16@h100.json` is such a machine with the devices
        of a file (`of_devices_in`); anything else that ends in .json is a file made by `save`.

        Raises:
            InvalidArgumentError: None of these.
        """
        name, at, path = text.partition("@")
        if at and _MACHINE.fullmatch(name):
            return cls.parse(name).of_devices_in(path)
        if text.endswith(".json"):
            return cls.load(text)
        if m := re.fullmatch(r"local(?::(\d+))?", text):
            return cls.local(int(m[1]) if m[1] else None)
        if m := re.fullmatch(r"(tpu-?\w+):(\d+(?:x\d+)*)(?::(\d+))?", text):
            return cls.preset(m[1], topology=m[2], hosts=int(m[3] or 1))
        for name in presets.GPU_HOSTS:
            if m := re.fullmatch(rf"{re.escape(name)}(?:x(\d+))?", text):
                return cls.preset(name, hosts=int(m[1] or 1))
            if m := re.fullmatch(rf"{re.escape(name)}:(\d+)", text):
                return dataclasses.replace(cls.preset(name).submesh(1, presets.cards(name, int(m[1]))), name=text)
        close = presets.meant(text)
        raise InvalidArgumentError(
            where="cluster",
            expected=f"local, a .json file, a machine with its number of hosts as in dgx-h100x8 or of cards as in "
            f"dgx-h100:4 ({', '.join(presets.GPU_HOSTS)}), or a TPU with the shape of its slice as in tpu-v5e:4x4 "
            f"({', '.join(presets.TPUS)})",
            got=repr(text),
            hint=f"did you mean {close}?" if close else "for other hardware make a Cluster(...) with its constants",
        )

    def of_devices_in(self, path: str | Path) -> Cluster:
        """This cluster with the measured devices of a file, and their link where several of one host were measured.

        Raises: InvalidArgumentError for a file of other devices; as `load`.
        """
        measured = self.load(path)
        if measured.device.name != self.device.name:
            raise InvalidArgumentError(
                where=f"{self.name}@{path}",
                expected=f"a file of {self.device.name}",
                got=f"one of {measured.device.name}",
                hint="measure on such a device: autopar measure --save FILE.json",
            )
        own = {name: getattr(self.device, name) for name in ("memory_bytes", "host_link_bytes_per_s")}
        has_link = measured.devices_per_host > 1 and not self.torus
        return dataclasses.replace(
            self,
            name=f"{self.name}@{Path(path).name}",
            device=dataclasses.replace(measured.device, **own),
            inside_host=measured.inside_host if has_link else self.inside_host,
            fits=measured.fits,
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
            version = decoded(data, _Version, f"a cluster in format version {_FORMAT_VERSION}").format_version
            if version != _FORMAT_VERSION:
                raise _unreadable(path, f"format version {version}")
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
        return stored.cluster

    @classmethod
    def flat(cls, num_devices: int, *, device: DeviceKind = presets.H100, links: Sequence[Link] = ()) -> Cluster:
        """One host with one link between all devices, or one for each mesh axis: a mesh of one axis has the slowest."""
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
class _Version:
    format_version: int


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


def _tpu_slices(name: str, slices: int, topology: str | None) -> Cluster:
    shape = presets.tpu_shape(name, topology)
    device = presets.TPUS[name].device
    return Cluster(
        name=f"{name}:{topology}",
        device=device,
        num_hosts=slices,
        devices_per_host=math.prod(shape),
        inside_host=presets.TPU_ICI[device.name],
        between_hosts=presets.TPU_DCN,
        torus=shape,
        inside_chip=presets.TPUS[name].inside_chip,
    )
