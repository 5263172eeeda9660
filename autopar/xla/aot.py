"""Ahead-of-time compilation for absent hardware: `compile_for="tpu:v5e:2x4"`, `compile_for="gpu:h100:2x8"`.

A program lowered for a mesh of `target_mesh` compiles to the HLO, collectives and memory of the hardware itself; it
cannot run. The requirements of each kind of hardware are in `aot_tpu` and `aot_gpu`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.sharding import AxisType, Mesh

from autopar.errors import InvalidArgumentError
from autopar.hardware.cluster import Cluster
from autopar.xla import aot_gpu, aot_tpu
from autopar.xla.aot_gpu import GpuHosts
from autopar.xla.aot_tpu import TpuSlice

__all__ = ["GpuHosts", "TpuSlice", "parse", "spec_of", "target_devices", "target_mesh"]


def parse(spec: str) -> TpuSlice | GpuHosts:
    """Reads `tpu:v5e:2x4`, `tpu:v5p:2x2x2:4` (four slices), `gpu:h100:8` or `gpu:h100:2x8` (two hosts of eight).

    Raises:
        InvalidArgumentError: The text is not of these forms, or names a card that is not in `aot_gpu.CARDS`.
    """
    devices = aot_tpu.parse(spec) or aot_gpu.parse(spec)
    if devices is None:
        raise InvalidArgumentError(
            where="compile_for",
            expected="tpu:GENERATION:CHIPS, tpu:GENERATION:CHIPS:SLICES, gpu:CARD:CARDS or gpu:CARD:HOSTSxCARDS, CARD "
            f"one of {', '.join(aot_gpu.CARDS)}",
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
    for name, card in aot_gpu.CARDS.items():
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
