"""Compiling for TPU slices that are not there: `compile_for="tpu:v5e:2x4"`.

libtpu holds the TPU compiler and describes slices without having one, on any Linux machine. It comes with
`pip install "autopar[tpu]"`. A program lowered for a mesh of `target_mesh` compiles to the HLO, collectives and memory
that the slice itself would get; it cannot be run.

When libtpu starts it asks the cloud which slice it is part of. The variables of `_NO_SLICE` answer for it. They must
be in the environment before libtpu is loaded, which jax does when it is first asked for a TPU topology, or for its
devices with `JAX_PLATFORMS` unset: importing this module early is not needed.
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

from autopar.errors import AutoparError, InvalidArgumentError

_SPEC = re.compile(r"^tpu:([a-z]*\d+[a-z]*):(\d+(?:x\d+){1,2})(?::(\d+))?$")

# The accelerator type needs to be one that libtpu knows; the slice that is compiled for need not be of it.
_NO_SLICE = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


class MissingLibtpuError(AutoparError, ImportError):
    """The TPU compiler is not installed."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TpuSlice:
    """Slices of TPU chips of one generation, all alike and joined by the data-centre network.

    Attributes:
        generation: As libtpu calls it: `v4`, `v5e`, `v5p`, `v6e`, `tpu7x`.
        chips: The grid of chips of one slice, `(2, 4)`.
        num_slices: How many slices.
    """

    generation: str
    chips: tuple[int, ...]
    num_slices: int = 1

    @property
    def topology_name(self) -> str:
        return f"{self.generation}:{'x'.join(map(str, self.chips))}"

    @property
    def num_chips(self) -> int:
        return math.prod(self.chips) * self.num_slices

    def __str__(self) -> str:
        return f"tpu:{self.topology_name}" + (f":{self.num_slices}" if self.num_slices > 1 else "")


def parse(spec: str) -> TpuSlice:
    """Reads `tpu:GENERATION:CHIPS` or `tpu:GENERATION:CHIPS:SLICES`, as in `tpu:v5e:2x4` or `tpu:v5p:2x2x2:4`.

    Raises:
        InvalidArgumentError: The text is not of that form.
    """
    m = _SPEC.match(spec)
    if m is None:
        raise InvalidArgumentError(
            where="compile_for",
            expected="tpu:GENERATION:CHIPS or tpu:GENERATION:CHIPS:SLICES",
            got=repr(spec),
            hint="name slices as 'tpu:v5e:2x4', or 'tpu:v5p:2x2x2:4' for four of them",
        )
    chips = tuple(int(n) for n in m.group(2).split("x"))
    return TpuSlice(generation=m.group(1), chips=chips, num_slices=int(m.group(3) or 1))


def target_devices(spec: str | TpuSlice) -> tuple[Any, ...]:
    """The `jax.Device`s of slices that are not there. They can be compiled for, and hold no data.

    There are two devices a chip where jax sees two cores (`v4`, `tpu7x`).

    Raises:
        InvalidArgumentError: A malformed spec, or one for which libtpu knows no slice.
        MissingLibtpuError: libtpu is not installed.
    """
    slices = parse(spec) if isinstance(spec, str) else spec
    if importlib.util.find_spec("libtpu") is None:
        raise MissingLibtpuError(
            where=f"compile_for={str(slices)!r}",
            expected=f"the libtpu of jax {jax.__version__}, which holds the TPU compiler",
            got="no module libtpu",
            hint='pip install "autopar[tpu]", and set JAX_PLATFORMS=cpu for runs on CPU: it makes jax look for a TPU',
        )
    if not _has_tpu():
        for name, value in _NO_SLICE.items():
            os.environ.setdefault(name, value)
    options = {"num_slices": slices.num_slices} if slices.num_slices > 1 else {}
    try:
        description = topologies.get_topology_desc(platform="tpu", topology_name=slices.topology_name, **options)
    except jax.errors.JaxRuntimeError as error:
        settings = " ".join(f"{name}={value}" for name, value in _NO_SLICE.items())
        raise InvalidArgumentError(
            where=f"compile_for={str(slices)!r}",
            expected="a slice that libtpu can describe, such as v5e:2x2, v5e:2x4, v6e:4x4, v5p:2x2x2 or tpu7x:2x2x1",
            got=f"{slices.topology_name}: {error}",
            hint=f"if there are such slices, libtpu was loaded before it was told that it has none of its own: "
            f"start Python with {settings} JAX_PLATFORMS=cpu",
        ) from error
    return tuple(description.devices)


def target_mesh(spec: str | TpuSlice, axis_sizes: Sequence[int], axis_names: Sequence[str]) -> Mesh:
    """A mesh over the devices of slices that are not there, its axes laid out along the slice's links.

    Of several slices the first axis crosses them, so it must be a multiple of their number.

    Args:
        spec: As for `parse`.
        axis_sizes: Devices along each axis; together all devices of the slices.
        axis_names: As many names.

    Raises:
        InvalidArgumentError: The axes do not fit the slices, or as for `target_devices`.
        MissingLibtpuError: libtpu is not installed.
    """
    slices = parse(spec) if isinstance(spec, str) else spec
    if len(axis_sizes) != len(axis_names):
        raise InvalidArgumentError(
            where="axis_names",
            expected=f"one name for each of the sizes {tuple(axis_sizes)}",
            got=str(tuple(axis_names)),
            hint="give as many names as sizes",
        )
    devices = target_devices(slices)
    if math.prod(axis_sizes) != len(devices):
        raise InvalidArgumentError(
            where=f"compile_for={str(slices)!r}",
            expected=f"a mesh of its {len(devices)} devices",
            got=f"{' x '.join(map(str, axis_sizes))}, which is {math.prod(axis_sizes)}",
            hint=f"choose axis sizes whose product is {len(devices)}, or another slice",
        )
    if axis_sizes[0] % slices.num_slices:
        raise InvalidArgumentError(
            where=f"compile_for={str(slices)!r}",
            expected=f"a first mesh axis that crosses the slices: a multiple of {slices.num_slices}",
            got=str(axis_sizes[0]),
            hint="put the axis with least traffic first, with a size that the number of slices divides",
        )
    within = (axis_sizes[0] // slices.num_slices, *axis_sizes[1:])
    size = len(devices) // slices.num_slices
    grids = [
        mesh_utils.create_device_mesh(within, list(devices[i : i + size]), allow_split_physical_axes=True)
        for i in range(0, len(devices), size)
    ]
    return Mesh(np.concatenate(grids), tuple(axis_names), axis_types=(AxisType.Auto,) * len(axis_sizes))


def _has_tpu() -> bool:
    """Whether this machine has TPU chips of its own, whose settings must be left alone."""
    dev = pathlib.Path("/dev")
    return any(dev.glob("accel[0-9]*")) or any(dev.glob("vfio/[0-9]*"))
