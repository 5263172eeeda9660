"""Groups of copies that share the state of a model, where their whole number divides few of its dimensions.

Forty-eight copies of a model whose widths are powers of two cannot split its arrays evenly; three groups of sixteen
can, each with all of the state.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from autopar.ir.graph import OpGraph, Purpose
from autopar.ir.mesh import AXIS_NAMES
from autopar.sharding.constraints import Binding
from autopar.sharding.parallelisms import data_axis, replica_axis


def in_groups(binding: Binding, graph: OpGraph, num_devices: int) -> Binding:
    """The binding, its data axis cut into copies of groups that share the state, of the size at which a device has the
    least of it; the same binding where that is the whole axis, or no mesh axis is left.

    `graph` has the state among its donated arguments; `num_devices` are those of a stage. Raises: InvalidArgumentError,
    as `Binding.on`.
    """
    mesh, constraints = binding.on(num_devices)
    names = [use.name for use in constraints.axes]
    axis = next((a for a, use in enumerate(constraints.axes) if use.name == data_axis().name), None)
    if axis is None or replica_axis().name in names or len(names) == len(AXIS_NAMES):
        return binding
    shares, size = constraints.axes[axis], mesh.axis_sizes[axis]
    if Purpose.OPTIMIZER not in shares.must_shard:
        return binding
    best = group_size([graph.values[graph.block.inputs[i]].shape for i in sorted(graph.donated)], size)
    if best in (1, size):
        return binding
    return dataclasses.replace(
        binding,
        axes=(*constraints.axes[:axis], replica_axis(), *constraints.axes[axis:]),
        sizes=(*mesh.axis_sizes[:axis], size // best, best, *mesh.axis_sizes[axis + 1 :]),
    )


def note_on_groups(requested: Binding | None, binding: Binding | None) -> list[str]:
    """A note on the groups that a binding has and the requested one has not."""
    if requested is None or binding is None or binding is requested:
        return []
    axis = [use.name for use in binding.axes].index(replica_axis().name)
    copies, size = binding.sizes[axis], binding.sizes[axis + 1]
    assert copies is not None, "both parts of the axis have sizes"
    assert size is not None, "both parts of the axis have sizes"
    return [
        f"recipe, data axis of {copies * size} devices: few arrays of the state have a dimension that this divides; "
        f"{copies} groups of {size} devices have a copy of it each"
    ]


def group_size(shapes: Sequence[tuple[int, ...]], num_copies: int) -> int:
    """The divisor of the number of copies over which arrays that have a dimension it divides are split, the others
    whole, so that a device has the fewest elements; of equals the largest.
    """

    def elements(size: int) -> float:
        return sum(math.prod(shape) / (size if any(n % size == 0 for n in shape) else 1) for shape in shapes)

    divisors = [n for n in range(1, num_copies + 1) if num_copies % n == 0]
    return min(reversed(divisors), key=elements)
