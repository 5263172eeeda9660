"""Ahead-of-time compilation for NVIDIA GPUs: the names of hosts, and the description of a card that XLA needs.

JAX's CUDA plugin contains XLA's GPU compiler. It comes with `pip install "autopar[gpu]"`, on any Linux machine,
together with NVIDIA's assembler, which XLA calls. Libraries for matrix products are not needed.

Measurements need a card: on the card XLA tries several kernels for each matrix product. Here it takes its first choice,
which may split the contraction and add the parts in a second kernel. Cards of compute capability 7.0 (V100) and below
are not supported by CUDA 13.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies

from autopar.errors import InvalidArgumentError, MissingCompilerError
from autopar.hardware import presets
from autopar.hardware.kinds import DeviceKind

_SPEC = re.compile(r"^gpu:([a-z]+\d+(?:-\d+g)?):(?:([1-9]\d*)x)?([1-9]\d*)$")
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
        if not is_installed():
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


def parse(spec: str) -> GpuHosts | None:
    """Reads `gpu:CARD:CARDS` or `gpu:CARD:HOSTSxCARDS`; None for what is not of that form, or of no card of `CARDS`."""
    m = _SPEC.match(spec)
    if m is None or m.group(1) not in CARDS:
        return None
    return GpuHosts(card=m.group(1), cards_per_host=int(m.group(3)), num_hosts=int(m.group(2) or 1))


def is_installed() -> bool:
    """Whether jax has a CUDA plugin."""
    if importlib.util.find_spec("jax_plugins") is None:  # else the look-up of a module in it raises
        return False
    return any(importlib.util.find_spec(f"jax_plugins.{name}") is not None for name in _PLUGINS)
