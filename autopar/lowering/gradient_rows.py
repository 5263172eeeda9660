"""Gradients that lie in memory row by row, as the state does, in programs for TPUs.

The gradient of a weight is a product and its transpose, which XLA's TPU compiler makes of the product by writing it
column by column. From there it gives that order to the whole update: it copies the weight and its moments into columns
before, and back into rows after, six copies of state that one order of the gradient saves. (Seen in programs that
libtpu 0.0.42.1 compiles for v5e and v6e; a step of two such weights reads and writes a quarter less on v6e.)
"""

from __future__ import annotations

import functools
from typing import Any

import jax
from jax.sharding import Mesh

from autopar.common import jax_compat
from autopar.ir.graph import OpGraph, OpKind, Role
from autopar.ir.jax_sharding import partition_spec
from autopar.ir.layout import Layout

# What lies without gaps in a TPU's tiles lies row by row where nobody says otherwise; of other arrays the compiler may
# put another dimension last.
_TILE = (8, 128)


def gradients_in_rows(graph: OpGraph, mesh: Mesh) -> frozenset[int]:
    """The matrices that operations of the top block make for the update, or to be added up for it; none where the
    devices are no TPUs.
    """
    if mesh.devices.flat[0].platform != "tpu":
        return frozenset()
    readers = (op for op in graph.block.ops if op.role is Role.UPDATE or op.kind is OpKind.ACCUMULATE)
    read = {v for op in readers for v in op.inputs if isinstance(v, int)}
    return frozenset(
        v
        for op in graph.block.ops
        if op.role is Role.BACKWARD and op.kind is OpKind.EQUATION
        for v in op.outputs
        if v in read and len(graph.values[v].shape) >= len(_TILE)
    )


def in_rows(array: Any, layout: Layout, mesh: Mesh) -> Any:
    """An array on the devices, each part of it laid out in memory row by row.

    Said on each device's part: a partitioner gathers what it does not know.
    """
    spec = partition_spec(layout, mesh.axis_names)
    run = jax.shard_map(jax_compat.in_rows, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return run(array)


def in_whole_tiles(array: Any, layout: Layout, mesh: Mesh) -> Any:
    """The same, where each device's part fills whole tiles of a TPU; other arrays as they are."""
    sizes = [functools.reduce(lambda n, a: n * mesh.devices.shape[a], axes, 1) for axes in layout.dims]
    shape = array.shape[len(array.shape) - len(sizes) :]
    part = [n // split for n, split in zip(shape, sizes, strict=True)]
    fills = all(n % tile == 0 for n, tile in zip(part[-len(_TILE) :], _TILE, strict=True))
    return in_rows(array, layout, mesh) if fills else array
