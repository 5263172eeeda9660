"""The leaves of the state that are stored padded under a recipe: ZeRO's devices divide none of their dimensions.

Sources: Rajbhandari et al., "ZeRO", 2020, section 5; DeepSpeed and Megatron-LM store all optimizer state of a group in
one flat buffer, padded to a multiple of the devices. Here each array is padded for itself, in the dimension in which
that adds least, so that its other dimensions stay what they are, and can be split by tensor parallelism.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from autopar.ir.graph import OpGraph, Value
from autopar.ir.layout import enumerate_layouts
from autopar.ir.mesh import LogicalMesh
from autopar.ir.padded import PaddedForm
from autopar.sharding.binding import Binding
from autopar.sharding.constraints import Constraints

# The most that a dimension's padding may add to an array, as a share of it, before its elements are stored in one row.
DIMENSION_WASTE = 0.005
# The most that arrays which stay whole may add to the state of a device, as a share of it.
WHOLE_SHARE = 0.005


def padded_forms(graph: OpGraph, binding: Binding, num_devices: int) -> dict[int, PaddedForm]:
    """Of an annotated graph, the inputs by position that are stored padded on so many devices, and their forms.

    State that no layout splits over all axes that must share it out, but for small arrays. Raises:
    InvalidArgumentError where the recipe does not fit the devices.
    """
    mesh, constraints = binding.on(num_devices)
    tied = dict(graph.tied)
    share_bytes, uneven = 0.0, dict[PaddedForm, list[tuple[int, Value]]]()
    for position in sorted(graph.donated):
        value = graph.values[graph.block.inputs[position]]
        axes = sharing_axes(value, constraints, mesh)
        if not axes:
            continue
        share_bytes += value.nbytes / mesh.size(axes)
        result = graph.block.outputs[tied[position]] if position in tied else None
        is_number = value.size > 1 and not value.dtype.startswith("key<")
        if is_number and isinstance(result, int) and not _divides(value, axes, constraints, mesh):
            form = _form(value, axes, constraints, mesh)
            if form is not None:
                uneven.setdefault(form, []).append((position, value))
    found: dict[int, PaddedForm] = {}
    excess_bytes = 0.0
    for form, rows in sorted(uneven.items(), key=lambda item: sum(v.nbytes for _, v in item[1])):
        excess_bytes += sum(v.nbytes for _, v in rows)
        if excess_bytes > WHOLE_SHARE * share_bytes:
            found.update({position: form for position, _ in rows})
    return dict(sorted(found.items()))


def sharing_axes(value: Value, constraints: Constraints, mesh: LogicalMesh) -> tuple[int, ...]:
    """The axes of copies of the model that must share a value out, along any of its dimensions."""
    return tuple(
        a
        for a, use in enumerate(constraints.axes)
        if mesh.axis_sizes[a] > 1 and value.purpose in use.must_shard and value.purpose in use.may_shard
    )


def _divides(value: Value, axes: Sequence[int], constraints: Constraints, mesh: LogicalMesh) -> bool:
    """Whether a layout splits a value over all these axes, and over as many others as any layout does."""
    layouts = [at.sharded_axes for at in enumerate_layouts(value.shape, mesh) if constraints.allows(value, at)]
    other = frozenset().union(*layouts) - set(axes)
    return any(split.issuperset(axes) and split.issuperset(other) for split in layouts)


def _form(value: Value, axes: Sequence[int], constraints: Constraints, mesh: LogicalMesh) -> PaddedForm | None:
    """The form in which a value divides over all these axes, and in other dimensions over as many others as before."""
    allowed = [at for at in enumerate_layouts(value.shape, mesh) if constraints.allows(value, at)]
    other = frozenset().union(*(at.sharded_axes for at in allowed)) - set(axes)
    by_dimension = min(_padded_in_one(value, axes, other, constraints, mesh), key=math.prod, default=None)
    adds = math.inf if by_dimension is None else math.prod(by_dimension) / value.size - 1
    if adds > DIMENSION_WASTE and not other and len(value.shape) > 1 and _may_lie_anyhow(value, axes, constraints):
        return PaddedForm(value.shape, (_multiple(value.size, mesh.size(axes)),))
    return None if by_dimension is None else PaddedForm(value.shape, by_dimension)


def _padded_in_one(
    value: Value, axes: Sequence[int], other: frozenset[int], constraints: Constraints, mesh: LogicalMesh
) -> Iterator[tuple[int, ...]]:
    """Shapes with one dimension padded that have a layout of all these axes, with no other axis in that dimension."""
    for d in range(len(value.shape)):
        for number in range(1, len(axes) + 1):
            for along in itertools.combinations(axes, number):
                size = _multiple(value.shape[d], mesh.size(along))
                shape = (*value.shape[:d], size, *value.shape[d + 1 :])
                if any(
                    at.sharded_axes.issuperset({*axes, *other})
                    and other.isdisjoint(at.dims[d])
                    and constraints.allows(value, at)
                    for at in enumerate_layouts(shape, mesh)
                ):
                    yield shape


def _may_lie_anyhow(value: Value, axes: Sequence[int], constraints: Constraints) -> bool:
    """Whether all axes may split all dimensions: no axis owns one (experts)."""
    return all(constraints.may_split(constraints.axes[a], value, d) for a in axes for d in range(len(value.shape)))


def _multiple(number: int, of: int) -> int:
    return -(-number // of) * of
