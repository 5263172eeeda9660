"""Layouts as JAX shardings, and logical meshes as JAX meshes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from autopar.errors import NotEnoughDevicesError, UnsupportedError
from autopar.ir.layout import Layout, LogicalMesh

# What jax calls memory of the host that devices copy from and to, and their own.
HOST_MEMORY, DEVICE_MEMORY = "pinned_host", "device"


def abstract_mesh(mesh: LogicalMesh) -> AbstractMesh:
    return AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_sizes))


def concrete_mesh(mesh: LogicalMesh) -> Mesh:
    """The mesh over this program's first devices. Raises: NotEnoughDevicesError."""
    return submesh(mesh, 0)


def submesh(mesh: LogicalMesh, first_device: int) -> Mesh:
    """The mesh over this program's devices from `first_device` on. Raises: NotEnoughDevicesError."""
    devices = jax.devices()
    needed = first_device + mesh.num_devices
    if len(devices) < needed:
        raise NotEnoughDevicesError(
            where=f"mesh {mesh}",
            expected=f"{needed} devices",
            got=f"{len(devices)} {jax.default_backend()} device(s)",
            hint="plan for the devices at hand (cluster=None), or run where there are as many; for a trial on CPU set "
            f"JAX_NUM_CPU_DEVICES={needed} before jax starts",
        )
    grid = np.array(devices[first_device:needed]).reshape(mesh.axis_sizes)
    return Mesh(grid, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_sizes))


def check_host_memory(where: str, device: Any) -> None:
    """Raises: UnsupportedError where a device cannot keep arrays in the memory of its host; jax ignores them then."""
    kinds = sorted(memory.kind for memory in device.addressable_memories())
    if HOST_MEMORY not in kinds:
        raise UnsupportedError(
            where=where,
            expected=f"devices with jax's memory kind {HOST_MEMORY!r}, where the plan keeps arrays of the step",
            got=f"{device.platform} devices with {', '.join(map(repr, kinds)) or 'none'}",
            hint="plan without offload=..., or run where jax has memory kinds: on GPU, TPU and CPU, but not "
            "when compiling for GPUs that are not here",
        )


def joint_mesh(mesh: LogicalMesh, first_devices: Sequence[int]) -> Mesh:
    """The meshes of several stages, each from its first device on, as one mesh with the stages as its first axis.

    Raises: NotEnoughDevicesError.
    """
    grid = np.stack([submesh(mesh, first).devices for first in first_devices])
    return Mesh(grid, (_stage_axis(mesh.axis_names), *mesh.axis_names), axis_types=(AxisType.Auto,) * grid.ndim)


def abstract_joint_mesh(mesh: LogicalMesh, num_stages: int) -> AbstractMesh:
    sizes = (num_stages, *mesh.axis_sizes)
    return AbstractMesh(
        sizes, (_stage_axis(mesh.axis_names), *mesh.axis_names), axis_types=(AxisType.Auto,) * len(sizes)
    )


def stacked_spec(layout: Layout, axis_names: Sequence[str]) -> PartitionSpec:
    """The `PartitionSpec` on a joint mesh of an array whose equal parts along dimension 0 lie on the stages."""
    first, *rest = _named(layout.dims, axis_names)
    return _spec([(_stage_axis(axis_names), *first), *rest])


def _stage_axis(axis_names: Sequence[str]) -> str:
    """The name of the axis of the stages in a mesh over several of them: one that no axis of a stage has."""
    return next(name for n in range(len(axis_names) + 1) if (name := f"stage{n or ''}") not in axis_names)


def on_parts(
    function: Callable[..., Any], mesh: Mesh, operands: Sequence[Layout], results: Layout | Sequence[Layout]
) -> Callable[..., Any]:
    """A function of a device's parts as one of global arrays, all of which lie so; `results`: of one, or of several."""
    out_specs: Any = (
        partition_spec(results, mesh.axis_names)
        if isinstance(results, Layout)
        else tuple(partition_spec(layout, mesh.axis_names) for layout in results)
    )
    in_specs = tuple(partition_spec(layout, mesh.axis_names) for layout in operands)
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def partition_spec(layout: Layout, axis_names: Sequence[str]) -> PartitionSpec:
    """The `PartitionSpec` of a layout; a partial one has its leading dimension of summands in front."""
    return _spec(_named((layout.partial, *layout.dims) if layout.partial else layout.dims, axis_names))


def _named(dims: Sequence[Sequence[int]], axis_names: Sequence[str]) -> list[tuple[str, ...]]:
    return [tuple(axis_names[a] for a in axes) for axes in dims]


def _spec(dims: Sequence[tuple[str, ...]]) -> PartitionSpec:
    entries = [names if len(names) > 1 else names[0] if names else None for names in dims]
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)


def named_sharding(layout: Layout, mesh: Mesh, *, in_host: bool = False) -> NamedSharding:
    spec = partition_spec(layout, mesh.axis_names)
    return NamedSharding(mesh, spec, memory_kind=HOST_MEMORY) if in_host else NamedSharding(mesh, spec)


def dims_of(spec: PartitionSpec, rank: int) -> tuple[tuple[str, ...] | None, ...]:
    """The axes of each of so many dimensions of a spec; None leaves one open."""
    entries = (*spec, *(None,) * (rank - len(spec)))
    return tuple(
        None if e is PartitionSpec.UNCONSTRAINED else () if e is None else (e,) if isinstance(e, str) else tuple(e)
        for e in entries
    )
