"""Mesh axes of a recipe as two, where arrays of the step divide by one of them only.

Attention shared by heads among more devices than there are of keys and values: one mesh axis would split such heads
inside (their width, whose products are partial sums of all scores). Two axes split queries by heads over both, and keys
and values over the first: within a group of devices each has the keys and values of the heads that its queries read, as
Megatron copies them. Where heads are exchanged for positions (Ulysses), keys and values are exchanged over the first
axis and gathered over the second, which sends as much as exchanging copies of their heads would. Source: Ainslie et
al., "GQA", 2023, section 2.2.

State shared out by ZeRO among devices that divide none of its dimensions (24 devices, widths of a power of two): over
two axes, each array is split by those that divide it, and each group of devices has a copy of it.
"""

from __future__ import annotations

import dataclasses
import math

from autopar.ir.graph import Dimension, OpGraph, Value
from autopar.ir.layout import enumerate_layouts
from autopar.ir.mesh import LogicalMesh
from autopar.sharding.binding import Binding
from autopar.sharding.constraints import Constraints

# The least by which two axes make the state of a device smaller, as a share of it: the search goes over more layouts.
LEAST_GAIN = 0.005
_HEADS_ALONE = frozenset({Dimension.HEAD})


def with_groups(binding: Binding, graph: OpGraph, num_devices: int) -> Binding:
    """A binding that knows what divides the heads and the state of a graph with annotated values, on so many devices:
    its axes are then cut as they need it.

    Raises: InvalidArgumentError where the sizes do not make up the devices.
    """
    binding = dataclasses.replace(binding, state_parts=0)  # asked of the axes as they are named
    if any(use.splits_heads and size != 1 for use, size in zip(binding.axes, binding.sizes, strict=True)):
        binding = dataclasses.replace(binding, heads=common_heads(graph))
    return dataclasses.replace(binding, state_parts=_state_parts(binding, graph, num_devices))


def common_heads(graph: OpGraph) -> int:
    """The largest number of devices that can share the heads of queries, keys and values; 0 without any.

    Of queries in groups that share keys, (heads of keys, queries of each), the second dimension counts none of these.
    """
    sizes = [
        [n for n, names in zip(v.shape, v.dimensions, strict=True) if names == _HEADS_ALONE and n > 1]
        for v in graph.values
        if v.dimensions
    ]
    ungrouped = [n for found in sizes if len(found) == 1 for n in found]
    return math.gcd(*(ungrouped or [n for found in sizes for n in found]))


def _state_parts(binding: Binding, graph: OpGraph, num_devices: int) -> int:
    """Among how many devices of an axis the state is shared out with the least of it on each; 0: all that it has."""
    mesh, constraints = binding.on(num_devices)
    axis = next((a for a, use in enumerate(constraints.axes) if use.shares_state), None)
    if axis is None:
        return 0
    values = [graph.values[graph.block.inputs[position]] for position in graph.donated]

    def bytes_on_each(parts: int) -> float:
        sizes = (*mesh.axis_sizes[:axis], parts, *mesh.axis_sizes[axis + 1 :])
        inside = LogicalMesh(axis_sizes=sizes)
        return sum(value.nbytes / most_parts(value, inside, constraints) for value in values)

    n = mesh.axis_sizes[axis]
    best = min((parts for parts in range(2, n + 1) if n % parts == 0), key=bytes_on_each, default=n)
    return best if bytes_on_each(best) < (1 - LEAST_GAIN) * bytes_on_each(n) else 0


def most_parts(value: Value, mesh: LogicalMesh, constraints: Constraints) -> int:
    """The most parts that allowed layouts split a value into."""
    return max(at.shards(mesh) for at in enumerate_layouts(value.shape, mesh) if constraints.allows(value, at))
