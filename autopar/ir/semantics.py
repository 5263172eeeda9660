"""The purpose of each value of a step, and what its dimensions count: examples, positions in a sequence, experts.

Recipes speak of these ("split the batch over data"), the graph does not know them. So the dimensions of the batch,
whose meaning is known, are followed through the operations by the factors of their rules, forwards and backwards; a
dimension that is split or joined (reshape) is followed in its parts.

Attention inside of kernels is known by the factors of their calls. A call attends where it reads two or more arrays of
positions by something that may be split, and needs the positions of one of them whole: those of keys. The factors that
may be split, stand in all of these arrays, and count neither examples nor positions are heads. Several heads of queries
to a head of keys are one factor with it.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
import scipy.sparse
import scipy.sparse.csgraph
from msgspec.structs import replace
from scipy.cluster.hierarchy import DisjointSet

from autopar.ir.graph import (
    Atom,
    Block,
    Dimension,
    FactorKind,
    Op,
    OpGraph,
    OpKind,
    Purpose,
    Role,
    Rule,
    Side,
    Value,
    read_by,
    walk,
)
from autopar.ir.primitives import ATTENTION_PASSES, KERNEL_CALLS, MATRIX_PRODUCTS

Dims = tuple[tuple[int, ...], ...]
NamesOf = Callable[[int, int], frozenset[Dimension]]  # what a dimension of a value counts


def is_attention(op: Op, names_of: NamesOf) -> bool:
    """Whether an operation is a call that needs whole positions of one of several arrays of them."""
    if op.primitive not in KERNEL_CALLS or op.rule is None:
        return False
    sequences = list(_sequences(op, names_of))
    needs_whole = any(
        op.rule.factors[f].kind is not FactorKind.PASS
        for atom, dims in sequences
        for d, factors in enumerate(dims)
        for f in factors
        if Dimension.SEQUENCE in names_of(atom, d)
    )
    return needs_whole and len(sequences) > 1


def heads_of(op: Op, names_of: NamesOf) -> frozenset[int]:
    """The factors of a call of attention that are heads."""
    return frozenset.intersection(*(_uncounted(op, atom, dims, names_of) for atom, dims in _sequences(op, names_of)))


def attention_calls(graph: OpGraph) -> Iterator[tuple[Op, frozenset[int]]]:
    """The calls of a described graph that attend, and their factors that are heads."""

    def names_of(atom: int, d: int) -> frozenset[Dimension]:
        names = graph.values[atom].dimensions
        return names[d] if names else frozenset()

    for op in graph.ops():
        if is_attention(op, names_of):
            yield op, heads_of(op, names_of)


def _sequences(op: Op, names_of: NamesOf) -> Iterator[tuple[int, Dims]]:
    """The operands of positions by something that may be split, and the factors of their dimensions."""
    assert op.rule is not None, "only operations with a rule are asked"
    for atom, dims in zip(op.inputs, op.rule.operands, strict=True):
        if not isinstance(atom, int) or not _uncounted(op, atom, dims, names_of):
            continue
        if any(Dimension.SEQUENCE in names_of(atom, d) for d in range(len(dims))):
            yield atom, dims


def _uncounted(op: Op, atom: int, dims: Dims, names_of: NamesOf) -> frozenset[int]:
    """The factors of an operand that may be split and count neither examples nor positions."""
    assert op.rule is not None, "only operations with a rule are asked"
    counted = {Dimension.EXAMPLE, Dimension.SEQUENCE}
    return frozenset(
        f
        for d, factors in enumerate(dims)
        if not names_of(atom, d) & counted
        for f in factors
        if op.rule.factors[f].kind is FactorKind.PASS
    )


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
    return op.primitive in _OF_STACKS and op.role is Role.UPDATE is not graph.forward_role


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


# Values that are or belong to weights, without examples.
_OF_WEIGHTS = frozenset(Purpose) - {Purpose.BATCH, Purpose.ACTIVATION}
# Operations between whole dimensions and pieces of them.
_IN_PIECES = frozenset({"concatenate", "dynamic_slice", "dynamic_update_slice", "pad", "slice", "split"})
# Operations that change the shape or the type of one array and none of its numbers.
_OF_ONE_ARRAY = frozenset({"broadcast_in_dim", "convert_element_type", "copy", "expand_dims", "reshape", "squeeze"})


def annotate_semantics(graph: OpGraph) -> OpGraph:
    """The graph with the purpose and the dimensions of its values.

    A batch leaf says which of its dimensions counts examples (`example_dim`). The others count positions: of whole
    numbers (tokens) all of them, of others all but the last, which holds features. Experts are what a product of a
    parameter keeps apart although it counts neither examples nor positions. Features are what layers hand on: of two
    widths that a matrix joins, one is handed on and the other stays inside of a layer (`_handed_on`). Heads are what a
    product of two values with positions keeps apart beside the examples; they are widths like others until then. The
    sides of matrices are followed through weights only: their copies, gradients, and the optimiser's state.
    """
    followed: FollowedNames[Dimension] = FollowedNames(graph)
    for position in graph.batch:
        value = graph.values[graph.block.inputs[position]]
        is_key = value.dtype.startswith("key<")
        whole_numbers = is_key or not np.issubdtype(np.dtype(value.dtype), np.inexact)
        for d in range(len(value.shape)):
            if d == value.example_dim:
                followed.name(value.id, d, Dimension.EXAMPLE)
            elif whole_numbers or d < len(value.shape) - 1:
                followed.name(value.id, d, Dimension.SEQUENCE)
    followed.settle()
    while found := [*_examples_in_blocks(graph, followed), *_positions_in_pieces(graph, followed)]:
        for value_id, d, what in found:
            followed.name(value_id, d, what)
        followed.settle()
    dependent = _dependent(graph, [graph.block.inputs[i] for i in graph.batch])
    for value_id, d in _expert_dimensions(graph, followed, dependent):
        followed.name(value_id, d, Dimension.EXPERT)
    followed.settle()
    for value_id, d in _handed_on(graph, followed, dependent):
        followed.name(value_id, d, Dimension.FEATURE)
    followed.settle()
    named = [replace(v, dimensions=followed.names(v)) for v in graph.values]
    purposes = _purposes(graph, named, dependent)
    for at, parts in _heads(graph, followed, dependent):
        followed.put(at, parts)
    followed.settle()
    values = [
        replace(v, dimensions=followed.names(v), purpose=purposes.get(v.id, Purpose.ACTIVATION)) for v in graph.values
    ]
    sides = _followed_sides(graph, values, dependent)
    return dataclasses.replace(graph, values=tuple(replace(v, sides=sides.names(v)) for v in values))


def _dependent(graph: OpGraph, sources: Sequence[int]) -> set[int]:
    """All values that are computed of some."""
    behind: dict[int, list[int]] = {}  # the values that are computed of each
    for op in graph.ops():
        for a, b, _ in pairs(op):
            if isinstance(a, int) and isinstance(b, int):
                behind.setdefault(a, []).append(b)
                if a in op.outputs and b not in op.outputs:
                    behind.setdefault(b, []).append(a)
        if not op.blocks and op.kind is not OpKind.BARRIER:  # those hand on values one by one, as the pairs say
            for a in op.inputs:
                if isinstance(a, int):
                    behind.setdefault(a, []).extend(op.outputs)
    found, left = set(sources), list(sources)
    while left:
        for v in behind.get(left.pop(), ()):
            if v not in found:
                found.add(v)
                left.append(v)
    return found


def _examples_in_blocks(graph: OpGraph, followed: FollowedNames[Dimension]) -> Iterator[tuple[int, int, Dimension]]:
    """Dimensions in which arrays of examples are joined, and those of parts of them, where these are not named yet:
    leaves of a batch that pass a model together count examples there too.
    """

    def counts(atom: Atom, d: int) -> bool:
        return isinstance(atom, int) and any(Dimension.EXAMPLE in names for _, names in followed.of(atom, d))

    for op in graph.ops():
        if op.primitive == "concatenate":
            d = int(op.eqn.params["dimension"])
            if all(counts(atom, d) for atom in op.inputs) and not counts(op.outputs[0], d):
                yield op.outputs[0], d, Dimension.EXAMPLE
        elif op.primitive in ("slice", "split", "pad") and isinstance(op.inputs[0], int):
            before = graph.values[op.inputs[0]].shape
            for out in op.outputs:
                for d, (n, size) in enumerate(zip(before, graph.values[out].shape, strict=True)):
                    fewer, more = sorted((n, size))
                    are_blocks = 1 < fewer < more and more % fewer == 0
                    if are_blocks and counts(op.inputs[0], d) and not counts(out, d):
                        yield out, d, Dimension.EXAMPLE


def _positions_in_pieces(graph: OpGraph, followed: FollowedNames[Dimension]) -> Iterator[tuple[int, int, Dimension]]:
    """Dimensions whose pieces, or of which a whole, count positions, where these are not named yet.

    A piece of any length counts what the whole does: the tokens before the last one, a shift by one, padding. No factor
    says so, for devices cannot hand on such a dimension in equal parts.
    """
    for op in graph.ops():
        if op.primitive not in _IN_PIECES:
            continue
        for d in range(len(graph.values[op.outputs[0]].shape)):
            pieces = [v for v in (*_arrays_in_pieces(op), *op.outputs) if graph.values[v].shape[d] > 1]
            named = [v for v in pieces if all(names == {Dimension.SEQUENCE} for _, names in followed.of(v, d))]
            if named and len({graph.values[v].shape[d] for v in pieces}) > 1:
                yield from ((v, d, Dimension.SEQUENCE) for v in pieces if v not in named)


def _arrays_in_pieces(op: Op) -> list[int]:
    """The arrays that an operation takes pieces of, or puts together: not padding's number, nor where pieces lie."""
    several = {"concatenate": len(op.inputs), "dynamic_update_slice": 2}
    return [atom for atom in op.inputs[: several.get(op.primitive, 1)] if isinstance(atom, int)]


def _expert_dimensions(
    graph: OpGraph, followed: FollowedNames[Dimension], dependent: set[int]
) -> Iterator[tuple[int, int]]:
    """Dimensions of weights that a product keeps apart and that are nothing else, or that rows are exchanged for."""
    for op in graph.ops():
        yield from ((atom, d) for atom, d in _exchanged(op) if atom not in dependent)
        if op.primitive != "dot_general" or op.rule is None:
            continue
        kept_apart = {f for dim in op.rule.operands[0] for f in dim} & {f for dim in op.rule.operands[1] for f in dim}
        kept_apart &= {f for dim in op.rule.results[0] for f in dim}
        for atom, dims in zip(op.inputs, op.rule.operands, strict=True):
            if not isinstance(atom, int) or atom in dependent:
                continue
            for d, factors in enumerate(dims):
                unnamed = all(not names for _, names in followed.of(atom, d))
                if unnamed and factors and kept_apart.issuperset(factors):
                    yield atom, d


def _exchanged(op: Op) -> Iterator[tuple[int, int]]:
    """The dimensions of an operation's operands that are experts: parts of them are exchanged for rows."""
    if op.rule is not None and any(f.kind is FactorKind.EXCHANGE for f in op.rule.factors):
        for atom, d, factors in op.rule.factored_dims((*op.inputs, *op.outputs)):
            if isinstance(atom, int) and any(op.rule.factors[f].kind is FactorKind.EXCHANGE for f in factors):
                yield atom, d


def _heads(
    graph: OpGraph, followed: FollowedNames[Dimension], dependent: set[int]
) -> Iterator[tuple[DimensionOf, Parts]]:
    """Dimensions that scores and what they weigh keep apart, and those that queries alone have (of several that share
    keys); the parts of them that count nothing else are heads. So are the heads of kernels that attend.
    """

    def names_of(value: int, d: int) -> frozenset[Dimension]:
        return frozenset(name for _, names in followed.of(value, d) for name in names)

    for op in graph.ops():
        if op.rule is None or not dependent.issuperset(read_by(op)):
            continue
        if op.primitive in ATTENTION_PASSES:
            yield from _heads_of_passes(op, followed)
        if is_attention(op, names_of):
            yield from _heads_of_call(op, heads_of(op, names_of), followed)
        of_positions = (isinstance(atom, int) and _has_positions(graph, followed, atom) for atom in op.inputs)
        if op.primitive != "dot_general" or not all(of_positions):
            continue
        (left, right), (result,) = op.rule.operands, op.rule.results
        kept_apart = (
            {f for dim in left for f in dim} & {f for dim in right for f in dim} & {f for dim in result for f in dim}
        )
        at = [d for d in range(len(result)) if any(_is_position(n) for _, n in followed.of(op.outputs[0], d))]
        is_scores = len(at) > 1  # positions of queries by those of keys
        for d, factors in enumerate(result):
            parts = followed.of(op.outputs[0], d)
            if factors and (is_scores or kept_apart.issuperset(factors)) and any(not names for _, names in parts):
                yield (op.outputs[0], d), tuple((n, names or frozenset({Dimension.HEAD})) for n, names in parts)


def _heads_of_passes(op: Op, followed: FollowedNames[Dimension]) -> Iterator[tuple[DimensionOf, Parts]]:
    """Those of attention as one operation: what it keeps apart beside examples."""
    assert op.rule is not None, "passes have rules"
    for value, dims in zip(op.outputs, op.rule.results, strict=True):
        for d, factors in enumerate(dims):
            parts = followed.of(value, d)
            is_apart = bool(factors) and all(op.rule.factors[f].kind is FactorKind.PASS for f in factors)
            if is_apart and any(not names for _, names in parts):
                yield (value, d), tuple((n, names or frozenset({Dimension.HEAD})) for n, names in parts)


def _heads_of_call(
    op: Op, heads: frozenset[int], followed: FollowedNames[Dimension]
) -> Iterator[tuple[DimensionOf, Parts]]:
    """The dimensions of a kernel's arrays that its heads are the major part of."""
    assert op.rule is not None, "its factors are known"
    for value, d, factors in op.rule.factored_dims((*op.inputs, *op.outputs)):
        if isinstance(value, int) and heads.intersection(factors):
            parts = followed.of(value, d)
            yield (value, d), tuple((n, names or frozenset({Dimension.HEAD})) for n, names in parts)


def _is_position(names: frozenset[Dimension]) -> bool:
    return Dimension.SEQUENCE in names


def _has_positions(graph: OpGraph, followed: FollowedNames[Dimension], value: int) -> bool:
    dimensions = range(len(graph.values[value].shape))
    return any(_is_position(names) for d in dimensions for _, names in followed.of(value, d))


def _handed_on(graph: OpGraph, followed: FollowedNames[Dimension], dependent: set[int]) -> list[DimensionOf]:
    """Dimensions of the operands of products with weights that count what layers hand on.

    Dimensions that operations of the forward pass treat as one are one width, such as that of all that is added up in
    a residual stream. Each product with weights joins two widths, what it sums over and what it makes, and one of them
    is handed on: what the first product sums over whose width a later one makes again (before it stand embeddings), or
    else what the first product sums over. So columns are cut, then rows. Where that cannot be, since a product makes
    the width that it sums over, none of the widths that hang together is told apart.
    """
    role = graph.forward_role
    forward = [op for op in graph.ops() if op.rule is not None and op.role is role]

    def unnamed(value: int, d: int) -> bool:
        return not any(names for _, names in followed.of(value, d))

    width, looked_up = _widths(graph, forward, unnamed), _one_hot(forward)
    joined: dict[DimensionOf, set[DimensionOf]] = {}
    first_read: dict[DimensionOf, int] = {}
    last_made: dict[DimensionOf, int] = {}
    products = []
    for position, op in enumerate(forward):
        if op.primitive not in MATRIX_PRODUCTS:
            continue
        assert op.rule is not None
        made = {f for dims in op.rule.results for fs in dims for f in fs}
        for atom, dims in zip(op.inputs, op.rule.operands, strict=True):
            if not isinstance(atom, int) or atom in dependent:
                continue
            named = [(width[atom, d], made.issuperset(fs)) for d, fs in enumerate(dims) if fs and unnamed(atom, d)]
            ones, others = [at for at, is_made in named if not is_made], [at for at, is_made in named if is_made]
            if ones and others:
                last_made.update(dict.fromkeys(others, position))
                products.append((position, not looked_up.isdisjoint(read_by(op)), ones, others))
    for position, looks_up, ones, others in products:
        if looks_up and any(last_made.get(one, position) > position for one in ones):
            continue  # an embedding whose words the logits make again
        for one, other in itertools.product(ones, others):
            first_read.setdefault(one, position)
            joined.setdefault(one, set()).add(other)
            joined.setdefault(other, set()).add(one)
    found: set[DimensionOf] = set()
    seen: set[DimensionOf] = set()
    returning = [at for at, position in first_read.items() if last_made.get(at, position) > position]
    for first in (*returning, *first_read):
        if first not in seen:
            sides = _two_sides(first, joined)
            seen |= sides.keys()
            if all(sides[a] != sides[b] for a in sides for b in joined[a]):
                found |= {at for at, side in sides.items() if not side}
    return [at for at in width if width[at] in found]


def _one_hot(forward: Sequence[Op]) -> set[int]:
    """Values that are one where a number is that of their place and zero elsewhere: products with them look rows up."""
    places: set[int] = set()
    found: set[int] = set()
    for op in forward:
        read, is_the_same = set(read_by(op)), op.primitive in _OF_ONE_ARRAY
        if op.primitive == "iota" or (is_the_same and read and places.issuperset(read)):
            places.update(op.outputs)
        elif (op.primitive == "eq" and places & read) or (is_the_same and found & read):
            found.update(op.outputs)
    return found


def _widths(graph: OpGraph, forward: Sequence[Op], unnamed: Callable[[int, int], bool]) -> DisjointSet:
    """Dimensions without a name, in sets of those that operations of the forward pass treat as one."""
    widths = DisjointSet()

    def merge(one: DimensionOf, other: DimensionOf) -> None:
        widths.add(one)
        widths.add(other)
        widths.merge(one, other)

    for op in forward:
        assert op.rule is not None
        at_factor: dict[int, DimensionOf] = {}
        for atom, d, factors in op.rule.factored_dims((*op.inputs, *op.outputs)):
            if isinstance(atom, int) and unnamed(atom, d):
                for f in factors:
                    merge(at_factor.setdefault(f, (atom, d)), (atom, d))
        if op.primitive in _IN_PIECES:
            for v, out in itertools.product(_arrays_in_pieces(op), op.outputs):
                for d in range(len(graph.values[out].shape)):
                    if unnamed(v, d) and unnamed(out, d):
                        merge((v, d), (out, d))
    for outer, inner, dropped in links(graph.block):
        for d in range(len(graph.values[inner].shape)):
            if d + dropped < len(graph.values[outer].shape) and unnamed(inner, d) and unnamed(outer, d + dropped):
                merge((outer, d + dropped), (inner, d))
    return widths


def _two_sides(first: DimensionOf, joined: Mapping[DimensionOf, set[DimensionOf]]) -> dict[DimensionOf, bool]:
    """Everything that hangs together with the first one, on its side (False) or on the other."""
    sides = {first: False}
    waiting = [first]
    while waiting:
        at = waiting.pop()
        for other in joined[at]:
            if other not in sides:
                sides[other] = not sides[at]
                waiting.append(other)
    return sides


def _purposes(graph: OpGraph, values: Sequence[Value], dependent: set[int]) -> dict[int, Purpose]:
    found: dict[int, Purpose] = {}
    matrices = _feeding(graph, values, dependent)
    forward_role = graph.forward_role

    def has_examples(v: int) -> bool:
        return any(Dimension.EXAMPLE in names for names in values[v].dimensions)

    for op in graph.ops():
        updates = op.role is Role.UPDATE and op.role is not forward_role
        for v in op.outputs:
            if op.kind is OpKind.ACCUMULATE:
                found[v] = Purpose.ACCUMULATOR
            elif updates and not has_examples(v):
                found[v] = Purpose.UPDATE
            elif v not in dependent:
                copied = v in matrices and len(values[v].shape) > 1
                found[v] = Purpose.MATRIX_COPY if copied else Purpose.WEIGHT_COPY
            elif op.role is Role.BACKWARD and not has_examples(v):
                found[v] = Purpose.GRADIENT
        for block in op.blocks:
            for v in block.inputs:
                if updates and not has_examples(v):
                    found[v] = Purpose.UPDATE
                elif v not in dependent:
                    copied = v in matrices and len(values[v].shape) > 1
                    found[v] = Purpose.MATRIX_COPY if copied else Purpose.WEIGHT_COPY
    inputs = graph.block.inputs
    # Parameters need not be replaced: an evaluation step reads them only, or closes over them.
    state = {v for i, v in enumerate(inputs) if i >= len(graph.constants) or v in matrices}
    updating = Role.UPDATE if forward_role is Role.FORWARD else None
    forward = {v for op in graph.block.ops if op.role is not updating for v in read_by(op)}
    for position, v in enumerate(inputs):
        if position in graph.batch:
            found[v] = Purpose.BATCH
        elif v in state & matrices and len(values[v].shape) > 1:
            found[v] = Purpose.MATRIX
        elif v in state:
            found[v] = Purpose.PARAMETER if v in forward else Purpose.OPTIMIZER
    return found


def _has_columns(op: Op, i: int, value: Value) -> bool:
    """Whether a product keeps a dimension of its operand that is a width. What has none is a gate: it tells experts
    apart, and is small.
    """
    assert op.rule is not None
    others = {f for j, dims in enumerate(op.rule.operands[:2]) if j != i for dim in dims for f in dim}
    return any(
        names <= {Dimension.FEATURE} and factors and not others.intersection(factors)
        for names, factors in zip(value.dimensions, op.rule.operands[i], strict=True)
    )


def _feeding(graph: OpGraph, values: Sequence[Value], dependent: set[int]) -> set[int]:
    """What reaches a product of the forward pass as a matrix, by way of values that are computed of state alone."""
    role = graph.forward_role
    wanted = {
        atom
        for op in graph.ops()
        if op.primitive in MATRIX_PRODUCTS and op.role is role
        for i, atom in enumerate(op.inputs)
        if isinstance(atom, int) and atom not in dependent and _has_columns(op, i, values[atom])
    }
    wanted |= {atom for op in graph.ops() for atom, _ in _exchanged(op) if atom not in dependent}
    for op in reversed(list(graph.ops())):
        for outer, inner, _ in pairs(op):
            if not isinstance(outer, int) or not isinstance(inner, int):
                continue  # a literal: a loop's body may hand one out, or be handed one
            if inner in wanted and outer not in dependent:
                wanted.add(outer)
        if not op.blocks and op.kind is not OpKind.BARRIER and wanted.intersection(op.outputs):
            wanted.update(a for a in op.inputs if isinstance(a, int) and a not in dependent)
    return wanted


def _followed_sides(graph: OpGraph, values: Sequence[Value], dependent: set[int]) -> FollowedNames[Side]:
    """Which side of a matrix each dimension of weights is. A matrix that one product reads as it is and another
    transposed (an embedding that makes the logits too) may have dimensions that are both.
    """
    sides: FollowedNames[Side] = FollowedNames(graph, {v.id for v in values if v.purpose in _OF_WEIGHTS})
    for op in graph.ops():
        if op.primitive not in MATRIX_PRODUCTS or op.role is not Role.FORWARD:
            continue
        assert op.rule is not None
        made = {f for dims in op.rule.results for fs in dims for f in fs}
        for i, atom in enumerate(op.inputs):
            if not isinstance(atom, int) or atom in dependent or not _has_columns(op, i, values[atom]):
                continue
            # Sizes of groups, and scales, are no matrices.
            others = {f for j, dims in enumerate(op.rule.operands[:2]) if j != i for fs in dims for f in fs}
            for d, factors in enumerate(op.rule.operands[i]):
                if factors and others.issuperset(factors) and made.isdisjoint(factors):
                    sides.name(atom, d, Side.INPUT)
                elif factors and made.issuperset(factors) and others.isdisjoint(factors):
                    sides.name(atom, d, Side.OUTPUT)
    sides.settle()
    return sides
