"""Tensor parallelism over more devices than key and value heads.

One mesh axis would split such heads inside (their width, whose products are partial sums of all scores). Two axes split
queries by heads over both, and keys and values over the first: within a group of devices each has the keys and values
of the heads that its queries read, as Megatron copies them. Source: Ainslie et al., "GQA", 2023, section 2.2.
"""

from __future__ import annotations

import dataclasses
import math

from autopar.ir.graph import Dimension, OpGraph
from autopar.sharding.constraints import Binding

_HEADS_ALONE = frozenset({Dimension.HEAD})


def with_heads(binding: Binding, graph: OpGraph) -> Binding:
    """A binding that knows the heads of a graph with annotated values: its axes are then cut as they need it."""
    return dataclasses.replace(binding, heads=common_heads(graph))


def splits_heads(binding: Binding) -> bool:
    """Whether an axis of it splits matrices, and attention by heads."""
    return any(use.splits_heads and size != 1 for use, size in zip(binding.axes, binding.sizes, strict=True))


def common_heads(graph: OpGraph) -> int:
    """The largest number of devices that can share the heads of queries, keys and values; 0 without any."""
    sizes = (
        n
        for value in graph.values
        if value.dimensions
        for n, names in zip(value.shape, value.dimensions, strict=True)
        if names == _HEADS_ALONE and n > 1
    )
    return math.gcd(*sizes)
