"""Runs an operation that is a program for one device on each device's part: a kernel, or an island."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from autopar.common import jax_compat
from autopar.ir.jax_sharding import partition_spec
from autopar.ir.layout import Layout, replicated
from autopar.ir.mesh import LogicalMesh
from autopar.kernels.custom_partitions import is_custom_partition
from autopar.kernels.islands import Spec, is_island, island_of, mesh_axes
from autopar.kernels.operation import is_kernel
from autopar.kernels.run_island import run_parts
from autopar.kernels.vmapped_calls import on_parts


def run_on_parts(eqn: Any, reads: Sequence[Layout | None], results: Sequence[Layout], mesh: Mesh, operands: Any) -> Any:
    """The results of an equation whose operands lie as `reads` says (None: whole), as `results` says."""
    layouts = [at or replicated(len(v.aval.shape)) for at, v in zip(reads, eqn.invars, strict=True)]
    if is_custom_partition(eqn):  # its own function is asked how, by the partitioner
        return jax_compat.bind(eqn, operands)
    if is_island(eqn):
        return _run_island(eqn, layouts, results, mesh, operands)

    def local(*parts: Any) -> tuple[Any, ...]:
        made = eqn.params["function"](*parts) if is_kernel(eqn) else jax_compat.bind(on_parts(eqn, parts), parts)
        return tuple(a[None] if at.partial else a for a, at in zip(made, results, strict=True))

    run = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=tuple(partition_spec(layout, mesh.axis_names) for layout in layouts),
        out_specs=tuple(partition_spec(layout, mesh.axis_names) for layout in results),
        check_vma=False,
    )
    return run(*operands)


def _run_island(eqn: Any, reads: Sequence[Layout], results: Sequence[Layout], mesh: Mesh, operands: Any) -> Any:
    """An island under the plan's devices, as a mesh with the island's names for the axes that stand for its own."""
    island = island_of(eqn)
    logical = LogicalMesh(axis_sizes=tuple(mesh.shape.values()))
    mapped = mesh_axes(island, (*reads, *results), logical)
    assert mapped is not None, "the strategy was admitted"
    names: dict[tuple[int, ...], str] = {axes: name for name, axes in mapped.items()}
    taken = {a for axes in names for a in axes}
    others = {(a,): f"_{name}" for a, name in enumerate(mesh.axis_names) if a not in taken}
    in_order = sorted([*names.items(), *others.items()])
    sizes = [logical.size(axes) for axes, _ in in_order]
    renamed = Mesh(mesh.devices.reshape(sizes), [name for _, name in in_order])

    def specs(of: Sequence[Spec]) -> tuple[PartitionSpec, ...]:
        return tuple(PartitionSpec(*(tuple(x for x in names if x in mapped) for names in spec)) for spec in of)

    run = jax.shard_map(
        lambda *parts: tuple(run_parts(eqn, island, mapped, parts)),
        mesh=renamed, in_specs=specs(island.operands), out_specs=specs(island.results), check_vma=False,
    )  # fmt: skip
    return run(*operands)
