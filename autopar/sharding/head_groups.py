"""Attention shared by heads among more devices than there are of keys and values.

One mesh axis would split such heads inside (their width, whose products are partial sums of all scores). Two axes split
queries by heads over both, and keys and values over the first: within a group of devices each has the keys and values
of the heads that its queries read, as Megatron copies them. Where heads are exchanged for positions (Ulysses), keys and
values are exchanged over the first axis and gathered over the second, which sends as much as exchanging copies of their
heads would. Source: Ainslie et al., "GQA", 2023, section 2.2.
"""

from __future__ import annotations

import dataclasses
import math

from autopar.ir.graph import Dimension, OpGraph
from autopar.sharding.binding import Binding

_HEADS_ALONE = frozenset({Dimension.HEAD})


def with_heads(binding: Binding, graph: OpGraph) -> Binding:
    """A binding that knows the heads of a graph with annotated values: its axes are then cut as they need it."""
    return dataclasses.replace(binding, heads=common_heads(graph))


def splits_heads(binding: Binding) -> bool:
    """Whether an axis of it shares attention by heads."""
    return any(use.splits_heads and size != 1 for use, size in zip(binding.axes, binding.sizes, strict=True))


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
