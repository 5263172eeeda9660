"""Names of dimensions, followed through a graph by the factors of its operations' rules, forwards and backwards.

A dimension that is split or joined (reshape) is followed in its parts.
"""

from __future__ import annotations

import collections
import enum
import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Generic, TypeVar

from autopar.ir.graph import Atom, Block, Op, OpGraph, OpKind, Value, walk

# What is followed: what dimensions count (`Dimension`), or which side of a matrix they are (`Side`).
Name = TypeVar("Name", bound=enum.Enum)
# A dimension in parts, major first: the size of each and its names.
Parts = tuple[tuple[int, frozenset[Name]], ...]

_UNKNOWN: frozenset[Any] = frozenset()
# A value and the position of one of its dimensions.
DimensionOf = tuple[int, int]


class FollowedNames(Generic[Name]):
    """The parts of every dimension, as far as they are known; of some values only, where those are given."""

    def __init__(self, graph: OpGraph, within: Collection[int] | None = None) -> None:
        self.graph, self.within = graph, within
        self.parts: dict[DimensionOf, Parts[Name]] = {}
        self.waiting: collections.deque[int] = collections.deque()  # values whose news have not gone round
        self.of_value: dict[int, list[Callable[[], None]]] = {}
        for op in walk(graph.block):
            if op.rule is not None:
                self.watch_op(op)
        for outer, inner, dropped in links(graph.block):
            for value in (outer, inner):
                self.of_value.setdefault(value, []).append(functools.partial(self.alike, outer, inner, dropped))
        for one, other in _scanned(graph.block):
            for value in (one, other):
                self.of_value.setdefault(value, []).append(functools.partial(self.scanned_alike, one, other))

    def watch_op(self, op: Op) -> None:
        assert op.rule is not None
        factored = op.rule.factored_dims((*op.inputs, *op.outputs))
        places = [(atom, d, factors) for atom, d, factors in factored if isinstance(atom, int)]
        through = functools.partial(self.through, places, [f.size for f in op.rule.factors])
        for value in {value for value, _, _ in places}:
            self.of_value.setdefault(value, []).append(through)

    def of(self, value: int, d: int) -> Parts[Name]:
        return self.parts.get((value, d), ((self.graph.values[value].shape[d], _UNKNOWN),))

    def name(self, value: int, d: int, what: Name) -> None:
        self.put((value, d), ((self.graph.values[value].shape[d], frozenset({what})),))

    def put(self, at: DimensionOf, parts: Parts[Name]) -> None:
        if self.within is not None and at[0] not in self.within:
            return
        size = self.graph.values[at[0]].shape[at[1]]
        if size == 1 or math.prod(n for n, _ in parts) != size or all(not names for _, names in parts):
            return
        merged = _merged(self.of(*at), parts)
        if merged != self.parts.get(at):
            self.parts[at] = merged
            self.waiting.append(at[0])

    def names(self, value: Value) -> tuple[frozenset[Name], ...]:
        return tuple(_names_of(self.parts.get((value.id, d))) for d in range(len(value.shape)))

    def settle(self) -> None:
        """Follows until nothing changes; names are only ever added, so that this ends."""
        while self.waiting:
            for follow in self.of_value.get(self.waiting.popleft(), ()):
                follow()

    def alike(self, outer: int, inner: int, dropped: int) -> None:
        """The inner value's dimensions are the outer one's, without the first `dropped`."""
        for d in range(len(self.graph.values[inner].shape)):
            if d + dropped < len(self.graph.values[outer].shape):
                self.copy((outer, d + dropped), (inner, d))
                self.copy((inner, d), (outer, d + dropped))

    def scanned_alike(self, one: int, other: int) -> None:
        """What a scan goes over counts the same in all of its slices and stacks."""
        self.copy((one, 0), (other, 0))
        self.copy((other, 0), (one, 0))

    def copy(self, source: DimensionOf, target: DimensionOf) -> None:
        """One dimension counts what the other does; where it counts a micro-batch's part of it, in one piece."""
        parts, size = self.of(*source), self.graph.values[target[0]].shape[target[1]]
        if math.prod(n for n, _ in parts) != size:
            parts = ((size, frozenset().union(*(names for _, names in parts))),)
        self.put(target, parts)

    def through(self, places: Sequence[tuple[int, int, tuple[int, ...]]], sizes: Sequence[int]) -> None:
        """What is known of a factor in one place is known of it in all."""
        known: dict[int, Parts[Name]] = {}
        for value, d, factors in places:
            at = self.parts.get((value, d))
            if at is None:
                continue
            if len(factors) == 1 and len(at) == 1 and at[0][0] == sizes[factors[0]]:  # most are: nothing is cut
                cut: list[Parts[Name]] = [at]
            else:
                cut = _cut(at, [sizes[f] for f in factors])
            for f, parts in zip(factors, cut, strict=True):
                known[f] = _merged(known[f], parts) if f in known else parts
        for value, d, factors in places:
            if len(factors) == 1 and known.get(factors[0]) == self.parts.get((value, d)):
                continue  # nothing new, or nothing known
            self.put((value, d), tuple([part for f in factors for part in known.get(f, ((sizes[f], _UNKNOWN),))]))


def _names_of(parts: Parts[Name] | None) -> frozenset[Name]:
    """All names of the parts of a dimension; None: it has none."""
    if parts is None:
        return _UNKNOWN
    return parts[0][1] if len(parts) == 1 else frozenset().union(*(names for _, names in parts))


def _merged(a: Parts[Name], b: Parts[Name]) -> Parts[Name]:
    """What both say; where they are cut differently, what the first says, if it says anything."""
    if a == b:
        return a
    if [n for n, _ in a] == [n for n, _ in b]:
        return tuple((n, x | y) for (n, x), (_, y) in zip(a, b, strict=True))
    return a if any(names for _, names in a) else b


def _cut(parts: Parts[Name], sizes: Sequence[int]) -> list[Parts[Name]]:
    """The parts that make up each of the factors of these sizes, major first; a part may be cut evenly."""
    rest = list(parts)
    found: list[Parts[Name]] = []
    for size in sizes:
        mine: list[tuple[int, frozenset[Name]]] = []
        left = size
        while left > 1 and rest:
            n, names = rest[0]
            if left % n == 0:
                mine.append(rest.pop(0))
                left //= n
            elif n % left == 0:
                mine.append((left, names))
                rest[0] = (n // left, names)
                left = 1
            else:
                break
        if left > 1:  # cut across: whatever is in there
            across: frozenset[Name] = frozenset().union(*(names for _, names in [*mine, *rest]))
            mine = [(size, across)]
        found.append(tuple(mine) or ((size, _UNKNOWN),))
    return found


def links(block: Block) -> Iterator[tuple[int, int, int]]:
    """(value around, value inside, dimensions that it loses) of all loops, branches and marks."""
    for op in block.ops:
        for outer, inner, dropped in pairs(op):
            if isinstance(outer, int) and isinstance(inner, int):
                yield outer, inner, dropped
        for inside in op.blocks:
            yield from links(inside)


def _scanned(block: Block) -> Iterator[tuple[int, int]]:
    """Pairs of arrays that one scan takes slices of, or stacks."""
    for op in walk(block):
        if op.kind is OpKind.SCAN:
            slices = [a for a in op.inputs[op.num_consts + op.num_carry :] if isinstance(a, int)]
            yield from itertools.pairwise([*slices, *op.outputs[op.num_carry :]])


def pairs(op: Op) -> Iterator[tuple[Atom, Atom, int]]:
    k, c = op.num_consts, op.num_carry
    if op.kind in (OpKind.BARRIER, OpKind.SPLIT, OpKind.ACCUMULATE, OpKind.STACK):
        yield from ((a, b, 0) for a, b in zip(op.inputs, op.outputs, strict=True))
    elif op.kind is OpKind.SCAN:
        (body,) = op.blocks
        yield from ((a, b, int(i >= k + c)) for i, (a, b) in enumerate(zip(op.inputs, body.inputs, strict=True)))
        yield from ((a, b, int(i >= c)) for i, (a, b) in enumerate(zip(op.outputs, body.outputs, strict=True)))
        yield from ((a, b, 0) for a, b in zip(body.inputs[k : k + c], body.outputs, strict=False))
    elif op.kind is OpKind.WHILE:
        condition, body = op.blocks
        of_condition = op.num_condition_consts
        carried = op.inputs[op.num_consts :]
        around = (*op.inputs[:of_condition], *carried, *op.inputs[of_condition:], *op.outputs)
        inside = (*condition.inputs, *body.inputs, *body.outputs)
        yield from ((a, b, 0) for a, b in zip(around, inside, strict=True))
    elif op.kind is OpKind.COND:
        for branch in op.blocks:
            around, inside = (*op.inputs[1:], *op.outputs), (*branch.inputs, *branch.outputs)
            yield from ((a, b, 0) for a, b in zip(around, inside, strict=True))
