"""The layouts that a partitioner gives to the values of a step whose author lays some of them: Shardy's propagation.

Each operation hands on what splits its factors, from operands to results and back, until nothing changes: first from
its largest values, then products, last from values that are broadcast to larger ones. Where two factors of an
operation, or two of its values, want an axis, that of the larger value has it. Unlike in Shardy, an axis is never cut
into several, and no dimension is split that does not divide.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from autopar.ir.graph import Block, FactorKind, Op, OpGraph, OpKind
from autopar.sharding.semantics import pairs

Axes = tuple[str, ...]
Dims = tuple[Axes, ...]


def propagated(
    graph: OpGraph, axis_sizes: Mapping[str, int], given: Mapping[int, Sequence[Axes | None]]
) -> dict[int, Dims]:
    """The axes of each dimension of each value. `given`: of those that the author lays, by number; a dimension that is
    None is open, as are the values that are not given.
    """
    return _Propagation(graph, axis_sizes, given).run()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Turn:
    """An operation that hands on what splits its values of at least a size, or a link between two values."""

    rank: int
    op: Any = None
    least_size: int = 0
    link: tuple[int, int, int] | None = None


class _Propagation:
    def __init__(
        self, graph: OpGraph, axis_sizes: Mapping[str, int], given: Mapping[int, Sequence[Axes | None]]
    ) -> None:
        self.graph, self.sizes = graph, axis_sizes
        self.dims: dict[int, list[Axes]] = {value.id: [() for _ in value.shape] for value in graph.values}
        self.open: dict[int, list[bool]] = {}
        for v, dims in given.items():
            several = [tuple(a for a in axes or () if axis_sizes.get(a, 1) > 1) for axes in dims]
            self.dims[v] = [axes if self.divides(v, d, axes) else () for d, axes in enumerate(several)]
            self.open[v] = [axes is None for axes in dims]
        self.turns = [turn for op in _inner_first(graph.block) for turn in (*self.turns_of(op), *_links(op))]
        self.of_value: dict[int, list[int]] = defaultdict(list)
        for i, turn in enumerate(self.turns):
            for v in set(turn.link[:2]) if turn.link is not None else _values(turn.op):
                self.of_value[v].append(i)

    def turns_of(self, op: Op) -> Iterator[_Turn]:
        """From its largest values an operation hands on at once; from the others products do next, and last all that
        is added to something larger, or summed: it must not decide on that.
        """
        sizes = [self.graph.values[v].size for v in _values(op)]
        if op.rule is None or not sizes:
            return
        is_product = sum(isinstance(a, int) for a in op.inputs) > 1 and any(
            factor.kind is not FactorKind.PASS for factor in op.rule.factors
        )
        if is_product:
            yield _Turn(rank=1, op=op)
            return
        yield _Turn(rank=0, op=op, least_size=max(sizes))
        if min(sizes) < max(sizes):
            yield _Turn(rank=2, op=op)

    def run(self) -> dict[int, Dims]:
        waiting = [(turn.rank, i) for i, turn in enumerate(self.turns)]
        heapq.heapify(waiting)
        is_waiting = [True] * len(waiting)
        while waiting:
            _, i = heapq.heappop(waiting)
            is_waiting[i] = False
            turn = self.turns[i]
            changed = self.operation(turn.op, turn.least_size) if turn.link is None else list(self.link(*turn.link))
            for other in (other for v in changed for other in self.of_value[v]):
                if not is_waiting[other]:
                    is_waiting[other] = True
                    heapq.heappush(waiting, (self.turns[other].rank, other))
        return {v: tuple(dims) for v, dims in self.dims.items()}

    def divides(self, v: int, d: int, axes: Axes) -> bool:
        size = math.prod(self.sizes[a] for a in axes)
        return bool(self.graph.values[v].shape[d]) and self.graph.values[v].shape[d] % size == 0

    def extend(self, v: int, d: int, axes: Axes) -> bool:
        """Splits a dimension over more axes, where it is open, they are free and it divides."""
        now = self.dims[v][d]
        if len(axes) <= len(now) or axes[: len(now)] != now or not self.open.get(v, (True,) * (d + 1))[d]:
            return False
        used = {a for axes_of in self.dims[v] for a in axes_of}
        if used & set(axes[len(now) :]) or not self.divides(v, d, axes):
            return False
        self.dims[v][d] = axes
        return True

    def link(self, outer: int, inner: int, dropped: int) -> Iterator[int]:
        """A value around a loop or a branch, and inside of it."""
        for d in range(len(self.dims[inner])):
            if self.extend(inner, d, self.dims[outer][d + dropped]):
                yield inner
            if self.extend(outer, d + dropped, self.dims[inner][d]):
                yield outer

    def operation(self, op: Op, least_size: int) -> list[int]:
        """The values whose layouts change by what splits those of at least a size."""
        assert op.rule is not None, "it was looked for"
        factors, changed = op.rule.factors, []
        places = [
            (v, d, of_dim)
            for v, d, of_dim in op.rule.factored_dims((*op.inputs, *op.outputs))
            if isinstance(v, int) and not any(factors[f].kind is FactorKind.FIXED for f in of_dim)
        ]
        wanted: dict[int, tuple[int, Axes]] = {}  # by factor: the size of the value that wants it, and the axes
        for v, d, of_dim in places:
            weight = self.graph.values[v].size
            if weight < least_size:
                continue
            for f, axes in self.split(of_dim, [factors[f].size for f in of_dim], self.dims[v][d]):
                before = wanted.get(f, (0, ()))
                longer = axes[: len(before[1])] == before[1] and len(axes) > len(before[1])
                other = axes != before[1][: len(axes)]
                if longer or (other and weight > before[0]):
                    wanted[f] = max(weight, before[0]) if longer else weight, axes
        for f in sorted(wanted, key=lambda f: -wanted[f][0]):
            for v, d, of_dim in places:
                if f in of_dim:
                    sizes = [factors[g].size for g in of_dim]
                    axes = self.joined(of_dim, sizes, self.dims[v][d], f, wanted[f][1])
                    if self.extend(v, d, axes):
                        changed.append(v)
        return changed

    def split(self, of_dim: Sequence[int], sizes: Sequence[int], axes: Axes) -> Iterator[tuple[int, Axes]]:
        """The axes of each factor of a dimension, major first, as far as they fill one before the next begins."""
        rest = list(axes)
        for f, size in zip(of_dim, sizes, strict=True):
            mine: list[str] = []
            while rest and size % self.sizes[rest[0]] == 0:
                size //= self.sizes[rest[0]]
                mine.append(rest.pop(0))
            if mine:
                yield f, tuple(mine)
            if size > 1:
                return

    def joined(self, of_dim: Sequence[int], sizes: Sequence[int], axes: Axes, factor: int, of_factor: Axes) -> Axes:
        """The axes of a dimension of which one factor has others than now; as now where a factor before it is not
        filled.
        """
        now, found = dict(self.split(of_dim, sizes, axes)), list[str]()
        for f, size in zip(of_dim, sizes, strict=True):
            mine = of_factor if f == factor else now.get(f, ())
            found += mine
            if math.prod(self.sizes[a] for a in mine) < size:
                break
        return tuple(found)


def _inner_first(block: Block) -> Iterator[Op]:
    """The operations of a block, those inside of a loop before the loop."""
    for op in block.ops:
        for inner in op.blocks:
            yield from _inner_first(inner)
        yield op


def _links(op: Op) -> Iterator[_Turn]:
    """Barriers, slices and stacks of loops hand on at once, what loops carry and branches read as products do."""
    for outer, inner, dropped in pairs(op):
        if isinstance(outer, int) and isinstance(inner, int):
            is_first = dropped or op.kind is OpKind.BARRIER
            yield _Turn(rank=0 if is_first else 1, link=(outer, inner, dropped))


def _values(op: Op) -> set[int]:
    return {v for v in (*op.inputs, *op.outputs) if isinstance(v, int)}
