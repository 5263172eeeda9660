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

import numpy as np
import scipy.sparse
import scipy.sparse.csgraph

from autopar.ir.graph import Atom, Block, Op, OpGraph, OpKind, Role, Rule, Value, walk

# What is followed: what dimensions count (`Dimension`), or which side of a matrix they are (`Side`).
Name = TypeVar("Name", bound=enum.Enum)
# A dimension in parts, major first: the size of each and its names.
Parts = tuple[tuple[int, frozenset[Name]], ...]

_UNKNOWN: frozenset[Any] = frozenset()
_OF_STACKS = frozenset({"concatenate", "dynamic_slice", "slice", "split", "stack", "unstack"})
# A value and the position of one of its dimensions.
DimensionOf = tuple[int, int]


class FollowedNames(Generic[Name]):
    """The parts of every dimension, as far as they are known; of some values only, where those are given.

    Dimensions that a rule or a loop holds to be one, in one piece, are joined before anything is followed: they share
    what is known. What goes round are names behind a dimension that is split or joined.
    """

    def __init__(self, graph: OpGraph, within: Collection[int] | None = None) -> None:
        self.graph, self.within = graph, within
        # Dimensions have numbers: those of a value stand one behind the other.
        self.first = [0, *itertools.accumulate(len(v.shape) for v in graph.values)]
        self.joined: tuple[list[int], list[int]] = ([], [])  # pairs of dimensions that are one
        self.parts: dict[int, Parts[Name]] = {}
        self.waiting: collections.deque[int] = collections.deque()  # dimensions whose news have not gone round
        self.watching: list[tuple[Collection[int], Callable[[], None]]] = []
        for op in walk(graph.block):
            if op.rule is not None and not _stacks_state(graph, op):
                self.join_by_rule(op, op.rule)
        for outer, inner, dropped in links(graph.block):
            inner_rank, outer_rank = len(graph.values[inner].shape), len(graph.values[outer].shape)
            for d in range(min(inner_rank, outer_rank - dropped)):
                self.join_alike((outer, d + dropped), (inner, d))
        for one, other in _scanned(graph.block):  # what a scan goes over counts the same in all its slices and stacks
            self.join_alike((one, 0), (other, 0))
        self.one = self.numbered()  # of each dimension, the number of those that are joined with it
        self.size = [n for v in graph.values for n in v.shape]
        self.followers: dict[int, list[Callable[[], None]]] = {}
        for dimensions, follow in self.watching:
            for at in {self.one[i] for i in dimensions}:
                self.followers.setdefault(at, []).append(follow)

    # Which dimensions are one

    def join(self, one: int, other: int) -> None:
        self.joined[0].append(one)
        self.joined[1].append(other)

    def numbered(self) -> list[int]:
        count, joined = self.first[-1], np.array(self.joined, dtype=np.int64)
        pairs = scipy.sparse.coo_array((np.ones(joined.shape[1], np.int8), joined), shape=(count, count))
        _, numbers = scipy.sparse.csgraph.connected_components(pairs, directed=False)
        found: list[int] = numbers.tolist()
        return found

    def is_followed(self, value: int) -> bool:
        return self.within is None or value in self.within

    def join_by_rule(self, op: Op, rule: Rule) -> None:
        """Joins the dimensions that are one factor; where dimensions consist of several, they are watched."""
        atoms, values, factors = (*op.inputs, *op.outputs), self.graph.values, rule.factors
        at_factor: dict[int, int] = {}
        places: list[tuple[int, tuple[int, ...]]] = []
        is_whole = True
        for atom, dims in zip(atoms, (*rule.operands, *rule.results), strict=True):
            if not isinstance(atom, int) or not self.is_followed(atom):
                continue
            first, shape = self.first[atom], values[atom].shape
            for d, of_dim in enumerate(dims):
                if not of_dim:
                    continue
                places.append((first + d, of_dim))
                if len(of_dim) == 1 and shape[d] == factors[of_dim[0]].size:
                    at = at_factor.setdefault(of_dim[0], first + d)
                    if at != first + d:
                        self.join(first + d, at)
                else:
                    is_whole = False
        if not is_whole:
            sizes = [f.size for f in factors]
            self.watching.append(([i for i, _ in places], functools.partial(self.through, places, sizes)))

    def join_alike(self, one: DimensionOf, other: DimensionOf) -> None:
        """Joins two dimensions that count the same; those of two sizes, one of a micro-batch, are watched."""
        if not self.is_followed(one[0]) or not self.is_followed(other[0]):
            return
        a, b = self.number(*one), self.number(*other)
        if self.graph.values[one[0]].shape[one[1]] == self.graph.values[other[0]].shape[other[1]]:
            self.join(a, b)
        else:
            self.watching.append(((a, b), functools.partial(self.alike, a, b)))

    # What is known of them

    def number(self, value: int, d: int) -> int:
        return self.first[value] + d

    def of(self, value: int, d: int) -> Parts[Name]:
        return self._of(self.number(value, d))

    def name(self, value: int, d: int, what: Name) -> None:
        self.put((value, d), ((self.graph.values[value].shape[d], frozenset({what})),))

    def put(self, at: DimensionOf, parts: Parts[Name]) -> None:
        if self.is_followed(at[0]):
            self._put(self.number(*at), parts)

    def names(self, value: Value) -> tuple[frozenset[Name], ...]:
        first = self.first[value.id]
        return tuple(_names_of(self.parts.get(self.one[i])) for i in range(first, first + len(value.shape)))

    def settle(self) -> None:
        """Follows until nothing changes; names are only ever added, so that this ends."""
        while self.waiting:
            for follow in self.followers.get(self.waiting.popleft(), ()):
                follow()

    def _of(self, i: int) -> Parts[Name]:
        return self.parts.get(self.one[i], ((self.size[i], _UNKNOWN),))

    def _put(self, i: int, parts: Parts[Name]) -> None:
        size, at = self.size[i], self.one[i]
        if size == 1 or math.prod(n for n, _ in parts) != size or all(not names for _, names in parts):
            return
        merged = _merged(self._of(i), parts)
        if merged != self.parts.get(at):
            self.parts[at] = merged
            self.waiting.append(at)

    def alike(self, one: int, other: int) -> None:
        """Each dimension counts what the other does; where it counts a micro-batch's part of it, in one piece."""
        for source, target in ((one, other), (other, one)):
            names: frozenset[Name] = frozenset().union(*(names for _, names in self._of(source)))
            self._put(target, ((self.size[target], names),))

    def through(self, places: Sequence[tuple[int, tuple[int, ...]]], sizes: Sequence[int]) -> None:
        """What is known of a factor in one place is known of it in all."""
        known: dict[int, Parts[Name]] = {}
        for i, factors in places:
            at = self.parts.get(self.one[i])
            if at is None:
                continue
            if len(factors) == 1 and len(at) == 1 and at[0][0] == sizes[factors[0]]:  # most are: nothing is cut
                cut: list[Parts[Name]] = [at]
            else:
                cut = _cut(at, [sizes[f] for f in factors])
            for f, parts in zip(factors, cut, strict=True):
                known[f] = _merged(known[f], parts) if f in known else parts
        for i, factors in places:
            if len(factors) == 1 and known.get(factors[0]) == self.parts.get(self.one[i]):
                continue  # nothing new, or nothing known
            self._put(i, tuple([part for f in factors for part in known.get(f, ((sizes[f], _UNKNOWN),))]))


def _stacks_state(graph: OpGraph, op: Op) -> bool:
    """Whether matrices of the update become one stack, or are taken out of one: their sizes are the same, what their
    rows and columns count is not.
    """
    return op.role is Role.UPDATE is not graph.forward_role and op.primitive in _OF_STACKS


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
