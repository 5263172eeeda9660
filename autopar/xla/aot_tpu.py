"""Ahead-of-time compilation for TPU slices: their names, and libtpu's description of them.

libtpu contains the TPU compiler and describes slices without having one, on any Linux machine. It comes with `pip
install "autopar[tpu]"`.

At its start libtpu requests the description of its slice from the cloud. The variables of `NO_SLICE` replace this
request. They must be in the environment before JAX loads libtpu, which happens at the first request for a TPU topology,
or for devices with `JAX_PLATFORMS` unset: importing this module early is not needed.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import pathlib
import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils, topologies

from autopar.errors import InvalidArgumentError, MissingCompilerError

_SPEC = re.compile(r"^tpu:([a-z]*\d+[a-z]*):(\d+(?:x\d+){1,2})(?::(\d+))?$")

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


def parse(spec: str) -> TpuSlice | None:
    """Reads `tpu:GENERATION:CHIPS` or `tpu:GENERATION:CHIPS:SLICES`; None for what is not of that form."""
    m = _SPEC.match(spec)
    if m is None:
        return None
    chips = tuple(int(n) for n in m.group(2).split("x"))
    return TpuSlice(generation=m.group(1), chips=chips, num_slices=int(m.group(3) or 1))


def _has_tpu() -> bool:
    """Whether this machine has TPU chips, whose settings must not be changed."""
    dev = pathlib.Path("/dev")
    return any(dev.glob("accel[0-9]*")) or any(dev.glob("vfio/[0-9]*"))
