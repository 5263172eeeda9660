"""Ahead-of-time compilation for absent hardware: `compile_for="tpu:v5e:2x4"`, `compile_for="gpu:h100:2x8"`.

A program lowered for a mesh of `target_mesh` compiles to the HLO, collectives and memory of the hardware itself; it
cannot run.

TPU slices: libtpu contains the TPU compiler and describes slices without having one, on any Linux machine. It comes
with `pip install "autopar[tpu]"`. At its start libtpu requests the description of its slice from the cloud. The
variables of `NO_SLICE` replace this request. They must be in the environment before JAX loads libtpu, which happens at
the first request for a TPU topology, or for devices with `JAX_PLATFORMS` unset: importing this module early is not
needed.

NVIDIA GPUs: JAX's CUDA plugin contains XLA's GPU compiler. It comes with `pip install "autopar[gpu]"`, on any Linux
machine, together with NVIDIA's assembler, which XLA calls. Libraries for matrix products are not needed. Measurements
need a card: on the card XLA tries several kernels for each matrix product. Here it takes its first choice, which may
split the contraction and add the parts in a second kernel. Cards of compute capability 7.0 (V100) and below are not
supported by CUDA 13.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import os
import pathlib
import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils, topologies
from jax.sharding import AxisType, Mesh

from autopar.errors import InvalidArgumentError, MissingCompilerError
from autopar.hardware import presets
from autopar.hardware.cluster import Cluster
from autopar.hardware.kinds import DeviceKind


def parse(spec: str) -> TpuSlice | GpuHosts:
    """Reads `tpu:v5e:2x4`, `tpu:v5p:2x2x2:4` (four slices), `gpu:h100:8` or `gpu:h100:2x8` (two hosts of eight).

    Raises:
        InvalidArgumentError: The text is not of these forms, or names a card that is not in `CARDS`.
    """
    devices = _tpu_slice(spec) or _gpu_hosts(spec)
    if devices is None:
        raise InvalidArgumentError(
            where="compile_for",
            expected="tpu:GENERATION:CHIPS, tpu:GENERATION:CHIPS:SLICES, gpu:CARD:CARDS or gpu:CARD:HOSTSxCARDS, CARD "
            f"one of {', '.join(CARDS)}",
            got=repr(spec),
            hint="name slices as 'tpu:v5e:2x4', or 'tpu:v5p:2x2x2:4' for four of them; GPUs as 'gpu:h100:8', or "
            "'gpu:h100:2x8' for two hosts of eight",
        )
    return devices


def spec_of(cluster: Cluster) -> str | None:
    """The devices of a cluster as a text for `parse`; None where no compiler for them is available."""
    if cluster.torus:
        generation = cluster.device.name.removeprefix("TPU ").lower()
        chips = cluster.torus if cluster.inside_chip is None else cluster.torus[:-1]
        return str(TpuSlice(generation=generation, chips=chips, num_slices=cluster.num_hosts))
    for name, card in CARDS.items():
        if card.kind.name == cluster.device.name:
            return str(GpuHosts(card=name, cards_per_host=cluster.domain_devices, num_hosts=cluster.num_domains))
    return None


def target_devices(spec: str | TpuSlice | GpuHosts) -> tuple[Any, ...]:
    """The `jax.Device`s of absent hardware. Programs can be compiled for them; they hold no data.

    Raises:
        InvalidArgumentError: A malformed spec, or one that the compiler does not know.
        MissingCompilerError: The compiler is not installed.
    """
    return (parse(spec) if isinstance(spec, str) else spec).devices()


def target_mesh(spec: str | TpuSlice | GpuHosts, axis_sizes: Sequence[int], axis_names: Sequence[str]) -> Mesh:
    """A mesh over the devices of absent hardware, its axes laid out along the links.

    For several slices or hosts the first axis crosses them, so it must be a multiple of their number.

    Args:
        spec: As for `parse`.
        axis_sizes: Devices along each axis; together all devices.
        axis_names: As many names.

    Raises:
        InvalidArgumentError: The axes do not fit the devices, or as for `target_devices`.
        MissingCompilerError: The compiler is not installed.
    """
    target = parse(spec) if isinstance(spec, str) else spec
    groups = target.num_groups
    if len(axis_sizes) != len(axis_names):
        raise InvalidArgumentError(
            where="axis_names",
            expected=f"one name for each of the sizes {tuple(axis_sizes)}",
            got=str(tuple(axis_names)),
            hint="give as many names as sizes",
        )
    devices = target.devices()
    if math.prod(axis_sizes) != len(devices):
        raise InvalidArgumentError(
            where=f"compile_for={str(target)!r}",
            expected=f"a mesh of its {len(devices)} devices",
            got=f"{' x '.join(map(str, axis_sizes))}, which is {math.prod(axis_sizes)}",
            hint=f"choose axis sizes whose product is {len(devices)}, or other hardware",
        )
    if axis_sizes[0] % groups:
        raise InvalidArgumentError(
            where=f"compile_for={str(target)!r}",
            expected=f"a first mesh axis that crosses the slices or hosts: a multiple of {groups}",
            got=str(axis_sizes[0]),
            hint="put the axis with least traffic first, with a size that their number divides",
        )
    within = (axis_sizes[0] // groups, *axis_sizes[1:])
    size = len(devices) // groups
    grids = [target.grid(devices[i : i + size], within) for i in range(0, len(devices), size)]
    return Mesh(np.concatenate(grids), tuple(axis_names), axis_types=(AxisType.Auto,) * len(axis_sizes))


_TPU_SPEC = re.compile(r"^tpu:([a-z]*\d+[a-z]*):(\d+(?:x\d+){1,2})(?::(\d+))?$")

# The accelerator type needs to be one that libtpu knows; the slice that is compiled for need not be of it.
NO_SLICE = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TpuSlice:
    """Equal slices of TPU chips of one generation, joined by the data-centre network.

    Attributes:
        generation: The name in libtpu: `v4`, `v5e`, `v5p`, `v6e`, `tpu7x`.
        chips: The grid of chips of one slice, `(2, 4)`.
        num_slices: The number of slices.
    """

    generation: str
    chips: tuple[int, ...]
    num_slices: int = 1

    @property
    def topology_name(self) -> str:
        return f"{self.generation}:{'x'.join(map(str, self.chips))}"

    @property
    def num_groups(self) -> int:
        """The slices: groups of devices that slow links join, which the first mesh axis crosses."""
        return self.num_slices

    def __str__(self) -> str:
        return f"tpu:{self.topology_name}" + (f":{self.num_slices}" if self.num_slices > 1 else "")

    def devices(self) -> tuple[Any, ...]:
        """Two a chip where jax sees two cores (`v4`, `tpu7x`).

        Raises:
            InvalidArgumentError: libtpu knows no such slice.
            MissingCompilerError: libtpu is not installed.
        """
        if importlib.util.find_spec("libtpu") is None:
            raise MissingCompilerError(
                where=f"compile_for={str(self)!r}",
                expected=f"the libtpu of jax {jax.__version__}, which holds the TPU compiler",
                got="no module libtpu",
                hint='pip install "autopar[tpu]", and set JAX_PLATFORMS=cpu for runs on CPU: it makes jax look for a '
                "TPU",
            )
        if not _has_tpu():
            for name, value in NO_SLICE.items():
                os.environ.setdefault(name, value)
        options = {"num_slices": self.num_slices} if self.num_slices > 1 else {}
        try:
            description = topologies.get_topology_desc(platform="tpu", topology_name=self.topology_name, **options)
        except jax.errors.JaxRuntimeError as error:
            settings = " ".join(f"{name}={value}" for name, value in NO_SLICE.items())
            raise InvalidArgumentError(
                where=f"compile_for={str(self)!r}",
                expected="a slice that libtpu can describe, such as v5e:2x2, v5e:2x4, v6e:4x4, v5p:2x2x2 or "
                "tpu7x:2x2x1",
                got=f"{self.topology_name}: {error}",
                hint=f"if there are such slices, libtpu was loaded before it was told that it has none of its own: "
                f"start Python with {settings} JAX_PLATFORMS=cpu",
            ) from error
        return tuple(description.devices)

    def grid(self, devices: Sequence[Any], axis_sizes: Sequence[int]) -> np.ndarray:
        """The devices of one slice as an array of these sizes, its axes laid out along the slice's links."""
        return mesh_utils.create_device_mesh(axis_sizes, list(devices), allow_split_physical_axes=True)


def _tpu_slice(spec: str) -> TpuSlice | None:
    """Reads `tpu:GENERATION:CHIPS` or `tpu:GENERATION:CHIPS:SLICES`; None for what is not of that form."""
    m = _TPU_SPEC.match(spec)
    if m is None:
        return None
    chips = tuple(int(n) for n in m.group(2).split("x"))
    return TpuSlice(generation=m.group(1), chips=chips, num_slices=int(m.group(3) or 1))


def _has_tpu() -> bool:
    """Whether this machine has TPU chips, whose settings must not be changed."""
    dev = pathlib.Path("/dev")
    return any(dev.glob("accel[0-9]*")) or any(dev.glob("vfio/[0-9]*"))


_GPU_SPEC = re.compile(r"^gpu:([a-z]+\d+(?:-\d+g)?):(?:([1-9]\d*)x)?([1-9]\d*)$")
_PLUGINS = ("xla_cuda13", "xla_cuda12")
_CUDNN = (9, 10)  # the version that jax 0.10 to 0.12 ask for
_KIBIBYTE, _MEBIBYTE = 1 << 10, 1 << 20

# What all cards of compute capability 8.0, 9.0 and 10.0 have in common (CUDA C++ Programming Guide, technical
# specifications per compute capability). A core is a streaming multiprocessor.
_COMMON = {
    "threads_per_block_limit": 1024,
    "threads_per_warp": 32,
    "threads_per_core_limit": 2048,
    "registers_per_block_limit": 65536,
    "registers_per_core_limit": 65536,
    "shared_memory_per_block": 48 * _KIBIBYTE,  # without asking for more
    "block_dim_limit_x": 2**31 - 1,
    "block_dim_limit_y": 65535,
    "block_dim_limit_z": 65535,
    "thread_dim_limit_x": 1024,
    "thread_dim_limit_y": 1024,
    "thread_dim_limit_z": 64,
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """The description of a card for XLA's compiler.

    Attributes:
        name: The name of the card in the driver, and in JAX.
        kind: The same card as a `DeviceKind`.
        compute_capability: (major, minor).
        cores: Streaming multiprocessors.
        lanes_per_core: float32 units of each.
        clock_ghz: The highest.
        l2_bytes: Second-level cache.
        shared_bytes_per_core: Shared memory of a multiprocessor.
        shared_bytes_per_block: The largest part of it for one block.
        memory_bytes: Memory as the driver reports it, a little less than the nominal size.
    """

    name: str
    kind: DeviceKind
    compute_capability: tuple[int, int]
    cores: int
    lanes_per_core: int
    clock_ghz: float
    l2_bytes: int
    shared_bytes_per_core: int
    shared_bytes_per_block: int
    memory_bytes: int

    def description(self) -> str:
        """XLA's `GpuTargetConfigProto` as text."""
        major, minor = self.compute_capability
        facts = {
            **_COMMON,
            "core_count": self.cores,
            "fpus_per_core": self.lanes_per_core,
            "clock_rate_ghz": self.clock_ghz,
            "l2_cache_size": self.l2_bytes,
            "shared_memory_per_core": self.shared_bytes_per_core,
            "shared_memory_per_block_optin": self.shared_bytes_per_block,
            "device_memory_size": self.memory_bytes,
            "memory_bandwidth": int(self.kind.peak_memory_bytes_per_s),
        }
        lines = [f"  {name}: {value}" for name, value in facts.items()]
        lines.append(f"  cuda_compute_capability {{ major: {major} minor: {minor} }}")
        return "\n".join(
            [
                "gpu_device_info {",
                *lines,
                "}",
                'platform_name: "CUDA"',
                f"dnn_version_info {{ major: {_CUDNN[0]} minor: {_CUDNN[1]} }}",
                f'device_description_str: "{self.name}"',
            ]
        )


def _ampere(name: str, kind: DeviceKind, *, memory_bytes: int) -> Card:
    return Card(
        name=name, kind=kind, compute_capability=(8, 0), cores=108, lanes_per_core=64, clock_ghz=1.41,
        l2_bytes=40 * _MEBIBYTE, shared_bytes_per_core=164 * _KIBIBYTE, shared_bytes_per_block=163 * _KIBIBYTE,
        memory_bytes=memory_bytes,
    )  # fmt: skip


def _hopper(name: str, kind: DeviceKind, *, memory_bytes: int) -> Card:
    return Card(
        name=name, kind=kind, compute_capability=(9, 0), cores=132, lanes_per_core=128, clock_ghz=1.98,
        l2_bytes=50 * _MEBIBYTE, shared_bytes_per_core=228 * _KIBIBYTE, shared_bytes_per_block=227 * _KIBIBYTE,
        memory_bytes=memory_bytes,
    )  # fmt: skip


# Cores, clocks and caches: NVIDIA's white papers of each architecture. Shared memory: the Programming Guide, as above.
# Memory as the driver tells it, and the caches and clock of B200: openxla/xla, target_config/specs.
CARDS: dict[str, Card] = {
    "a100-40g": _ampere("NVIDIA A100-SXM4-40GB", presets.A100_40GB, memory_bytes=42_331_013_120),
    "a100-80g": _ampere("NVIDIA A100-SXM4-80GB", presets.A100_80GB, memory_bytes=85_100_068_864),
    "h100": _hopper("NVIDIA H100 80GB HBM3", presets.H100, memory_bytes=84_942_979_072),
    "h200": _hopper("NVIDIA H200", presets.H200, memory_bytes=151_397_597_184),
    "b200": Card(
        name="NVIDIA B200", kind=presets.B200, compute_capability=(10, 0), cores=148, lanes_per_core=128,
        clock_ghz=1.965, l2_bytes=132_644_864, shared_bytes_per_core=228 * _KIBIBYTE,
        shared_bytes_per_block=227 * _KIBIBYTE, memory_bytes=191_514_411_008,
    ),
}  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GpuHosts:
    """Hosts of equal cards.

    Attributes:
        card: A key of `CARDS`.
        cards_per_host: Cards of each host.
        num_hosts: How many hosts.
    """

    card: str
    cards_per_host: int
    num_hosts: int = 1

    @property
    def num_groups(self) -> int:
        """The hosts: groups of devices that slow links join, which the first mesh axis crosses."""
        return self.num_hosts

    def __str__(self) -> str:
        return f"gpu:{self.card}:" + (f"{self.num_hosts}x" if self.num_hosts > 1 else "") + str(self.cards_per_host)

    def devices(self) -> tuple[Any, ...]:
        """Host by host.

        Raises:
            InvalidArgumentError: jax could not take the plugin in.
            MissingCompilerError: The CUDA plugin is not installed.
        """
        if not has_gpu_compiler():
            raise MissingCompilerError(
                where=f"compile_for={str(self)!r}",
                expected=f"the CUDA plugin of jax {jax.__version__}, which holds the GPU compiler",
                got="no module jax_plugins.xla_cuda13",
                hint='pip install "autopar[gpu]", and set JAX_PLATFORMS=cpu where there is no GPU',
            )
        try:
            description = topologies.get_topology_desc(
                platform="cuda",
                target_config=CARDS[self.card].description(),
                topology=f"1x{self.num_hosts}x{self.cards_per_host}",
            )
        except (jax.errors.JaxRuntimeError, NotImplementedError) as error:
            # Unless told not to, the plugin looks for NVIDIA's libraries first, and leaves when it finds none.
            raise InvalidArgumentError(
                where=f"compile_for={str(self)!r}",
                expected="a CUDA plugin that describes cards",
                got=str(error),
                hint="set JAX_PLATFORMS=cpu before jax looks for its devices; else the plugin may be of another "
                f"version than jax {jax.__version__}",
            ) from error
        return tuple(description.devices)

    def grid(self, devices: Sequence[Any], axis_sizes: Sequence[int]) -> np.ndarray:
        """The devices of one host as an array of these sizes: all pairs of them have equal links."""
        return np.array(devices).reshape(axis_sizes)


def _gpu_hosts(spec: str) -> GpuHosts | None:
    """Reads `gpu:CARD:CARDS` or `gpu:CARD:HOSTSxCARDS`; None for what is not of that form, or of no card of `CARDS`."""
    m = _GPU_SPEC.match(spec)
    if m is None or m.group(1) not in CARDS:
        return None
    return GpuHosts(card=m.group(1), cards_per_host=int(m.group(3)), num_hosts=int(m.group(2) or 1))


def has_gpu_compiler() -> bool:
    """Whether jax has a CUDA plugin."""
    if importlib.util.find_spec("jax_plugins") is None:  # else the look-up of a module in it raises
        return False
    return any(importlib.util.find_spec(f"jax_plugins.{name}") is not None for name in _PLUGINS)
