"""The roles of a plan's mesh axes, by the names of the known parallelisms, from the decisions of a search.

The role of an axis follows from the dimensions that it splits in the matrix products of the forward and backward pass,
weighted by their arithmetic: examples (data), positions (sequence), experts (expert) or widths (tensor). A data axis
that also shards state has the role of sharded data (ZeRO, FSDP). An axis that splits state and no product has the role
of state: its devices compute the same. Of a step without products, the role follows from the batch.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator, Mapping

from autopar.cost.roofline import flops_of
from autopar.ir.graph import Dimension, OpGraph, OpKind, Role, Value
from autopar.ir.layout import Layout
from autopar.ir.primitives import MATRIX_PRODUCTS
from autopar.lowering.decisions import ShardingPlan
from autopar.sharding.semantics import annotate_semantics

DATA, SHARDED_DATA, STATE, TENSOR = "data", "sharded data", "state", "tensor"
SEQUENCE, EXPERT = "sequence", "expert"
# What a product does that an axis splits in dimensions of several names: experts have examples too, as positions have.
_FIRST = ((Dimension.EXPERT, EXPERT), (Dimension.EXAMPLE, DATA), (Dimension.SEQUENCE, SEQUENCE))


def dimensions_of(graph: OpGraph) -> Mapping[int, Value]:
    """The values of a graph by number, with the meaning of their dimensions."""
    is_described = any(value.purpose is not None for value in graph.values)
    return {value.id: value for value in (graph if is_described else annotate_semantics(graph)).values}


def roles_of_axes(plan: ShardingPlan, graph: OpGraph, values: Mapping[int, Value]) -> tuple[str, ...]:
    """The role of each axis of the plan's mesh; its own name (x) where it splits nothing."""
    return tuple(
        _role(plan, graph, values, axis) or name if plan.mesh.axis_sizes[axis] > 1 else name
        for axis, name in enumerate(plan.mesh.axis_names)
    )


def _role(plan: ShardingPlan, graph: OpGraph, values: Mapping[int, Value], axis: int) -> str | None:
    work: dict[str, float] = collections.defaultdict(float)
    has_products = False
    for op in graph.ops():
        strategy = plan.strategy.get(op.id)
        if (
            strategy is None
            or op.kind is not OpKind.EQUATION
            or op.role is Role.UPDATE
            or op.primitive not in MATRIX_PRODUCTS
        ):
            continue
        has_products = True
        layouts = (*zip(op.inputs, strategy.operands, strict=True), *zip(op.outputs, strategy.results, strict=True))
        split = {name for v, at in layouts if isinstance(v, int) for name in _split(values.get(v), at, axis)}
        if split or any(axis in at.sharded_axes for _, at in layouts):
            work[_named(split)] += op.count * flops_of(op)
    role = max(work, key=lambda name: work[name]) if work else None
    inputs = [(v, plan.unreduced.get(v)) for v in graph.block.inputs]
    state = [at for i, (_, at) in enumerate(inputs) if i in graph.donated and at is not None]
    batch = [(v, at) for i, (v, at) in enumerate(inputs) if i in graph.batch and at is not None]
    in_parts = any(axis in at.sharded_axes for at in state)
    if role is None and not has_products:
        split = {name for v, at in batch for name in _split(values.get(v), at, axis)}
        role = _named(split) if split else None
    if role is None and in_parts:
        return STATE
    return SHARDED_DATA if role == DATA and in_parts else role


def _split(value: Value | None, layout: Layout, axis: int) -> Iterator[Dimension]:
    """The meanings of the dimensions that an axis splits."""
    if value is not None:
        for axes, names in zip(layout.dims, value.dimensions, strict=False):
            if axis in axes:
                yield from names


def _named(split: set[Dimension]) -> str:
    return next((role for dimension, role in _FIRST if dimension in split), TENSOR)
