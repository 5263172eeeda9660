"""The published machines that `Cluster.preset` knows by name, of devices and links in `autopar.hardware.presets`."""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import math
import re

from autopar.errors import InvalidArgumentError
from autopar.hardware import presets
from autopar.hardware.collective_cost import Link
from autopar.hardware.kinds import DeviceKind

# The shapes of TPU slices on offer.
#
# Source: Google Cloud's pages on TPU v5e, v6e and v5p, and on TPU types and topologies (v4). Of two axes they list all;
# of three, parts of a cube of 4x4x4 and whole cubes, AxBxC with A <= B <= C, the largest of them 16x16x24 (v5p, 6144
# chips).

_OF_TWO_AXES = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
_PARTS_OF_A_CUBE = ((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4))
_MOST_CHIPS, _LONGEST = 6144, 24
NEAREST_SHOWN = 3


def is_offered(shape: tuple[int, ...]) -> bool:
    """Whether there are slices of this shape."""
    return shape in _offered(len(shape))


def nearest(shape: tuple[int, ...]) -> list[str]:
    """The slices of about as many chips, and then of axes most like these."""

    def distance(other: tuple[int, ...]) -> tuple[float, float]:
        chips = abs(math.log2(math.prod(shape) / math.prod(other)))
        return chips, sum(abs(math.log2(a / b)) for a, b in zip(sorted(shape), sorted(other), strict=True))

    return ["x".join(map(str, other)) for other in sorted(_offered(len(shape)), key=distance)[:NEAREST_SHOWN]]


def _offered(rank: int) -> tuple[tuple[int, ...], ...]:
    if rank == 2:
        return _OF_TWO_AXES
    cubes = itertools.combinations_with_replacement(range(4, _LONGEST + 1, 4), 3)
    return (*_PARTS_OF_A_CUBE, *(shape for shape in cubes if math.prod(shape) <= _MOST_CHIPS))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GpuHost:
    """As in `autopar.hardware.cluster.Cluster`."""

    device: DeviceKind
    inside: Link
    between: Link
    devices_per_host: int = 8
    hosts_per_domain: int = 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tpu:
    """`axes`: of the torus of chips. `chip_devices`: how many devices jax has of a chip, joined by `inside_chip`."""

    device: DeviceKind
    axes: int
    chip_devices: int = 1
    inside_chip: Link | None = None


# Of an NVL72 rack (GB200, GB300) 18 hosts of four cards, which one NVLink domain joins: NVIDIA's data sheets.
_NVL72_HOSTS, _NVL72_HOST_CARDS = 18, 4

GPU_HOSTS: dict[str, GpuHost] = {
    "p3.16xlarge": GpuHost(device=presets.V100, inside=presets.NVLINK2, between=presets.ETHERNET_25G),
    "dgx-a100-40g": GpuHost(device=presets.A100_40GB, inside=presets.NVLINK3, between=presets.HDR200),
    "dgx-a100-80g": GpuHost(device=presets.A100_80GB, inside=presets.NVLINK3, between=presets.HDR200),
    "dgx-h100": GpuHost(device=presets.H100, inside=presets.NVLINK4, between=presets.NDR400),
    "dgx-h200": GpuHost(device=presets.H200, inside=presets.NVLINK4, between=presets.NDR400),
    "dgx-b200": GpuHost(device=presets.B200, inside=presets.NVLINK5, between=presets.NDR400),
    "dgx-b300": GpuHost(device=presets.B300, inside=presets.NVLINK5, between=presets.XDR800),
    "gb200-nvl72": GpuHost(
        device=presets.GB200, inside=presets.NVLINK5_NVL72, between=presets.NDR400, devices_per_host=_NVL72_HOST_CARDS,
        hosts_per_domain=_NVL72_HOSTS,
    ),
    "gb300-nvl72": GpuHost(
        device=presets.GB300, inside=presets.NVLINK5_NVL72, between=presets.XDR800, devices_per_host=_NVL72_HOST_CARDS,
        hosts_per_domain=_NVL72_HOSTS,
    ),
    "mi300x": GpuHost(device=presets.MI300X, inside=presets.XGMI4, between=presets.NDR400),
    "mi355x": GpuHost(device=presets.MI355X, inside=presets.XGMI5, between=presets.NDR400),
}  # fmt: skip
TPUS: dict[str, Tpu] = {
    "tpu-v4": Tpu(device=presets.TPU_V4, axes=3),
    "tpu-v5e": Tpu(device=presets.TPU_V5E, axes=2),
    "tpu-v5p": Tpu(device=presets.TPU_V5P, axes=3),
    "tpu-v6e": Tpu(device=presets.TPU_V6E, axes=2),
    "tpu7x": Tpu(device=presets.TPU7X, axes=3, chip_devices=2, inside_chip=presets.TPU7X_CHIP),
}


def meant(text: str) -> str:
    """The cluster that a text is likely to mean, such as `dgx-h100x8` for `h100x8`; empty for none."""
    found = re.fullmatch(r"(.+?)(?:[x:](\d+))?", text.lower())
    named = found[1] if found else ""
    near = [name for name in GPU_HOSTS if len(named) > 2 and named in name]
    near = near or difflib.get_close_matches(named, GPU_HOSTS, 1)
    if not near or found is None:
        return ""
    return near[0] if found[2] is None else _of_hosts_or_devices(near[0], int(found[2]))


def _of_hosts_or_devices(name: str, number: int) -> str:
    """Clusters with a number of hosts, or of devices where they make up hosts."""
    each = GPU_HOSTS[name].devices_per_host * GPU_HOSTS[name].hosts_per_domain
    hosts, rest = divmod(number, each)
    of_hosts = f"{name}x{number} ({number * each} devices)"
    return of_hosts if rest or not hosts else f"{name}x{hosts} ({number} devices) or {of_hosts}"


def cards(name: str, number: int) -> int:
    """So many cards of a host. Raises: InvalidArgumentError for a number that does not divide the host's."""
    whole = GPU_HOSTS[name].devices_per_host
    parts = [str(n) for n in range(1, whole + 1) if whole % n == 0]
    if str(number) not in parts:
        raise InvalidArgumentError(
            where="cluster",
            expected=f"{', '.join(parts[:-1])} or {parts[-1]} cards of a host behind {name}:",
            got=f"'{name}:{number}'",
            hint=f"'{name}' is one host with all of its {whole} cards; more are {_of_hosts_or_devices(name, number)}",
        )
    return number


def tpu_shape(name: str, topology: str | None) -> tuple[int, ...]:
    """The torus of a slice: its chips, and as a last axis the devices of a chip where these are several.

    Raises: InvalidArgumentError for a topology that is none, or that there is not.
    """
    tpu = TPUS[name]
    if topology is None or not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", topology) or topology.count("x") != tpu.axes - 1:
        raise InvalidArgumentError(
            where=f"Cluster.preset({name!r})",
            expected=f"a topology of {tpu.axes} axes, such as topology={'x'.join(['4'] * tpu.axes)!r}",
            got=f"topology={topology!r}",
            hint="give the shape of the slice, as Google Cloud names it",
        )
    chips = tuple(map(int, topology.split("x")))
    if not is_offered(chips):
        raise InvalidArgumentError(
            where=f"Cluster.preset({name!r}, topology={topology!r})",
            expected=f"a topology that there is; nearest: {', '.join(nearest(chips))}",
            got=topology,
            hint="axes stand in ascending order, as Google Cloud names slices, and beyond 4x4x4 are multiples of 4; "
            "for other hardware make a Cluster(...) with its constants",
        )
    return chips if tpu.chip_devices == 1 else (*chips, tpu.chip_devices)
