"""Finds attention in a graph by its computation, and replaces each of its passes by one operation.

Equations are read as algebra (below), so the spelling of attention, its masks and its softmax does not matter, nor
the form in which differentiation leaves them. With P the weights, G a product of the result's gradient and the values,
and D the sum of P G over a row, the matrix that multiplies the values must be P, and the matrix that multiplies the
keys must be s (P G - D P), s being the derivative of the scores by the product. The sum of P over a row is 1: no
gradient passes through the maximum.

The weights may be divided by their sum after the product with the values: the quotient is then the result, and G and D
have the sum as a factor. D may also be the sum of the result times its gradient. Reshapes may join dimensions of scores
and take them apart again.

Attention of other forms stays as it is, and a ring refuses it: dropout on the weights, weights that are returned, a
gradient of a bias. Plans say which kernel runs attention, what that gains, and what stands in the way of it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from msgspec.structs import replace

from autopar.attention import ring
from autopar.attention.checks import score_products
from autopar.attention.form import ELEMENTWISE, KEY, NONE, AttentionForm, Expression, Gradients, has_score
from autopar.attention.kernels import Kernel, obstacle_for
from autopar.attention.mask_terms import (
    ONE,
    Around,
    ArrayReader,
    Factor,
    Label,
    Labels,
    Product,
    Read,
    Sum,
    Use,
    add,
    equal,
    multiply,
    nodes_of,
    power,
    scale,
    term_of,
)
from autopar.common import jax_compat
from autopar.common.text import text_of_bytes, text_of_part, text_of_s
from autopar.errors import UnsupportedError
from autopar.ir.graph import Atom, Block, Dimension, Op, OpGraph, OpKind, walk
from autopar.ir.rewrite import Fresh, in_order, remove_dead, renumbered
from autopar.ir.scan_pairs import JoinedBodies, closed, with_joined_scans
from autopar.sharding.rules import equation_key
from autopar.sharding.semantics import annotate_semantics

# The equations of a block as polynomials in the scores of attention.
#
# A value with scores is a sum of terms (`polynomial`): numbers times powers of *atoms*. An atom is a product of queries
# and keys (or of the result's gradient and the values), the weights that softmax computes from one, a sum over a row,
# or any other factor of the scores.


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sought:
    """The products of scores whose attention becomes operations, in a described graph; `kernel` is to take them.

    `obstacles`: by product, what stands in the way where that is known.
    """

    named: OpGraph
    products: set[int]
    kernel: Kernel
    obstacles: dict[int, str] = dataclasses.field(default_factory=dict)


class Reader(ArrayReader):
    """Reads the equations of one block in order."""

    def __init__(self, block: Block, sought: Sought, fresh: Fresh, around: Around) -> None:
        super().__init__(block, sought.named, fresh.values, around)
        self.block, self.wanted = block, sought.products
        self.known: dict[int, Read] = {}
        self.products: dict[int, Product] = {}
        self.pairs: dict[frozenset[object], int] = {}  # the atom's number of the product of two arrays
        self.uses: dict[int, Use] = {}  # by operation
        self.weights: dict[Expression, tuple[Labels, Label]] = {}  # labels of the scores, and that of the keys
        self.slopes: dict[Expression, Sum] = {}  # the scores' sums, by tree
        self.first_unknown: Op | None = None  # the first equation on scores that is not understood

    # Operations

    def run(self) -> None:
        for op in self.block.ops:
            if op.kind is OpKind.BARRIER:
                for source, target in zip(op.inputs, op.outputs, strict=True):
                    if isinstance(source, int) and source in self.known:
                        self.known[target] = self.known[source]
            elif op.kind is OpKind.EQUATION:
                self.equation(op)

    def equation(self, op: Op) -> None:
        reads = [self.known.get(a) if isinstance(a, int) else None for a in op.inputs]
        if op.primitive == "dot_general":
            self.product(op, reads)
        elif any(read is not None for read in reads):
            found = self.followed(op, reads) if len(op.outputs) == 1 else None
            if all(read is None or _of_result(read) for read in reads):
                if found is not None and len(found.sum or ()) == 1:
                    self.known[op.outputs[0]] = found
                return
            was_known = any(read is not None and (read.sum is not None or read.tree is not None) for read in reads)
            if found is None and was_known and self.first_unknown is None:
                self.first_unknown = op
            for v in op.outputs:
                self.known[v] = found or self.unknown(v)

    def unknown(self, value: int) -> Read:
        return Read(tuple(self.label() for _ in self.shape(value)), None)

    def product(self, op: Op, reads: Sequence[Read | None]) -> None:
        factors = [self.factor(a, read) for a, read in zip(op.inputs, reads, strict=True)]
        left, right = (f or r for f, r in zip(factors, reads, strict=True))
        assert left is not None, "what is not known is a factor"
        assert right is not None, "what is not known is a factor"
        if factors == [None, None]:
            self.known[op.outputs[0]] = self.unknown(op.outputs[0])
            return
        if None not in factors and op.id not in self.wanted:
            return
        sums, kept = op.eqn.params["dimension_numbers"]
        for lefts, rights in (sums, kept):
            self.join(tuple(left.labels[d] for d in lefts), tuple(right.labels[d] for d in rights))
        out = self.result(left.labels, right.labels, op)
        match factors:
            case [Factor() as one, Factor() as other]:
                pair = self.pairs.setdefault(self.pair(one.value, other.value), op.id)
                number = pair if pair < 0 else op.id
                self.products[number] = Product(op, number, one, other)
                scale = multiply(one.scale, other.scale)
                tree: Expression | None = ("score", number) if scale == {ONE: 1.0} else None
                self.known[op.outputs[0]] = Read(out, multiply({((("product", number), 1),): 1.0}, scale), tree)
            case [Factor() as factor, None] | [None, Factor() as factor]:
                read = reads[factors.index(None)]
                assert read is not None, "it is no factor"
                summed = tuple(read.labels[d] for d in sums[factors.index(None)])
                self.use(op, read, factor, summed, out)

    def factor(self, atom: Atom, read: Read | None) -> Factor | None:
        """An operand of a product without scores: an array, alone or times sums of rows; None for others."""
        if read is not None and (found := self.scaled(read)) is not None:
            return found
        if read is not None and not _of_result(read):
            return None
        labels = tuple(self.label() for _ in self.shape(atom))
        return Factor(atom, labels, labels, {ONE: 1.0})

    def scaled(self, read: Read) -> Factor | None:
        """An array times sums of rows."""
        ((term, number),) = (read.sum or {}).items() if len(read.sum or {}) == 1 else (((), 0.0),)
        arrays = [(atom[1], n) for atom, n in term if atom[0] == "other" and atom[1][0] == "array"]
        rest = [(atom, n) for atom, n in term if atom[0] == "total"]
        if len(arrays) != 1 or arrays[0][1] != 1 or len(rest) + 1 != len(term):
            return None
        (_, value, at), _ = arrays[0]
        return Factor(value, tuple(self.label() if x < 0 else x for x in at), read.labels, {term_of(rest): number})

    def pair(self, one: Atom, other: Atom) -> frozenset[object]:
        """Two arrays, whichever comes first."""
        return frozenset(self.equals.number(a) if isinstance(a, int) else a.content for a in (one, other))

    def use(self, op: Op, read: Read, factor: Factor, summed: Labels, out: Labels) -> None:
        """Enters a product of an array and what is known, which is a result of attention where weights are summed over
        the keys.
        """
        if not isinstance(factor.value, int):
            self.known[op.outputs[0]] = self.unknown(op.outputs[0])
            return
        if read.sum is not None:
            read = dataclasses.replace(read, sum=multiply(read.sum, factor.scale))
        self.uses[op.id] = Use(op, read, factor.value, factor.at, summed, out)
        ((term, number),) = (read.sum or {}).items() if len(read.sum or {}) == 1 else (((), 0.0),)
        weights = [(atom[1], n) for atom, n in term if atom[0] == "weights"]
        rest = [(atom, n) for atom, n in term if atom[0] == "total"]
        if len(weights) != 1 or weights[0][1] != 1 or len(rest) + 1 != len(term):
            return
        if self.all(summed) == (self.of(self.weights[weights[0][0]][1]),):
            self.known[op.outputs[0]] = Read(out, {term_of([(("result", op.id), 1), *rest]): number})

    def result(self, left: Labels, right: Labels, op: Op) -> Labels:
        """The labels of a product's dimensions: what is kept apart, what the left has alone, what the right has."""
        (left_sum, right_sum), (left_kept, right_kept) = op.eqn.params["dimension_numbers"]
        return (
            *(left[d] for d in left_kept),
            *(x for d, x in enumerate(left) if d not in (*left_sum, *left_kept)),
            *(x for d, x in enumerate(right) if d not in (*right_sum, *right_kept)),
        )

    def followed(self, op: Op, reads: Sequence[Read | None]) -> Read | None:
        """What an equation makes of scores; None where that is not understood."""
        name, params, (first, *_) = op.primitive, op.eqn.params, reads
        if name in ("broadcast_in_dim", "reshape", "squeeze", "expand_dims", "transpose"):
            labels = self.moved(op, first) if first is not None else None
            return dataclasses.replace(first, labels=labels) if first is not None and labels is not None else None
        if name in ("convert_element_type", "copy", "reduce_precision", "stop_gradient"):
            is_float = all(np.dtype(v.aval.dtype).kind in "fV" for v in (*op.eqn.invars, *op.eqn.outvars))
            return first if is_float else None
        if name in ("reduce_max", "reduce_sum"):
            return self.reduced(op, first) if first is not None else None
        if name == "exp":
            return self.exponential(first) if first is not None else None
        out = self.shape(op.outputs[0])
        if any(len(self.shape(a)) not in (0, len(out)) for a in op.inputs):
            return None
        labels = tuple(self.label() for _ in out)
        for a, read in zip(op.inputs, reads, strict=True):
            for d, x in enumerate(read.labels if read is not None else ()):
                if self.shape(a)[d] == out[d]:
                    self.join((x,), (labels[d],))
        labels = self.all(labels)
        if name == "sub" and reads[0] is not None and reads[1] is not None and reads[1].largest_of is not None:
            same = reads[0].tree is not None and self.same(reads[0].tree, reads[1].largest_of)
            return Read(labels, None, without_largest=reads[0].tree) if same else None
        if name == "max":
            row = next((r for r in reads if r is not None and r.largest_of is not None), None)
            others = [a for a, r in zip(op.inputs, reads, strict=True) if r is not row]
            if row is not None and all(self.number(a) == -math.inf for a in others):
                return row
        if name not in ELEMENTWISE and name != "integer_pow":
            return None
        sums = [r.sum if r is not None else self.sum_of(a, labels) for a, r in zip(op.inputs, reads, strict=True)]
        trees = [r.tree if r is not None else self.tree_of(a, labels) for a, r in zip(op.inputs, reads, strict=True)]
        tree: Expression | None = None
        if all(t is not None for t in trees):
            tree = (name, (params["y"],) if name == "integer_pow" else (), *trees)
        return Read(labels, self.combined(name, params, sums, trees[0]), tree)

    def combined(self, name: str, params: Mapping[str, Any], sums: Sequence[Sum | None], which: Any) -> Sum | None:
        """The sum that an elementwise operation makes."""
        if name in ("mul", "div") and sums[0] == {}:
            return {}
        if name == "mul" and sums[1] == {}:
            return {}
        if name == "select_n":
            no, yes = sums[1:]
            if no == {} and yes == {}:
                return {}
            if no is None or yes is None or which is None:
                return None
            chosen: Sum = {((("chosen", self.settled(which)), 1),): 1.0}
            return add(no, multiply(chosen, add(yes, scale(no, -1.0))))
        if any(s is None for s in sums):
            return None
        known = [s for s in sums if s is not None]
        match name:
            case "neg":
                return scale(known[0], -1.0)
            case "add" | "add_any":
                return add(*known)
            case "sub":
                return add(known[0], scale(known[1], -1.0))
            case "mul":
                return multiply(*known)
            case "div":
                inverse = power(known[1], -1)
                return multiply(known[0], inverse) if inverse is not None else None
            case "integer_pow":
                return power(known[0], params["y"])
        return None

    def moved(self, op: Op, read: Read) -> Labels | None:
        """The labels behind an operation that moves, joins or splits dimensions; None where that is not understood."""
        shape, out, labels = self.shape(op.inputs[0]), self.shape(op.outputs[0]), read.labels
        if op.primitive == "transpose":
            return tuple(labels[d] for d in op.eqn.params["permutation"])
        if op.primitive == "broadcast_in_dim":
            made = [self.label() for _ in out]
            for d, at in enumerate(op.eqn.params["broadcast_dimensions"]):
                if shape[d] == out[at]:
                    made[at] = labels[d]
            return tuple(made)
        return self.regrouped(labels, shape, out, splits=not _of_result(read))

    def reduced(self, op: Op, read: Read) -> Read | None:
        axes = op.eqn.params["axes"]
        left = tuple(x for d, x in enumerate(read.labels) if d not in axes)
        axes = [d for d in axes if self.shape(op.inputs[0])[d] != 1]
        if not axes:
            return dataclasses.replace(read, labels=left)
        if op.primitive == "reduce_max":
            if read.tree is None or len(axes) != 1 or not has_score(read.tree):
                return None
            labels, key = self.weights.setdefault(self.settled(read.tree), (read.labels, read.labels[axes[0]]))
            if self.all(labels) != self.all(read.labels) or self.of(key) != self.of(read.labels[axes[0]]):
                return None
            self.slopes[self.settled(read.tree)] = read.sum or {}
            return Read(left, None, largest_of=read.tree)
        if read.sum is None:
            return None
        return self.along(read, axes, left) if _of_result(read) else self.row_sums(read, axes, left)

    def along(self, read: Read, axes: Sequence[int], left: Labels) -> Read | None:
        """The sum of a result of attention times its gradient over the values' own dimensions: that of the weights
        times the product of gradient and values over the keys.
        """
        ((term, number),) = (read.sum or {}).items()
        results = [(atom[1], n) for atom, n in term if atom[0] == "result"]
        factor = self.scaled(Read(read.labels, {term_of([part for part in term if part[0][0] != "result"]): number}))
        if factor is None or [n for _, n in results] != [1]:
            return None
        use = self.uses[results[0][0]]
        (tree,) = (atom[1] for term in use.read.sum or () for atom, _ in term if atom[0] == "weights")
        large = tuple(x for x, n in zip(use.at, self.shape(use.other), strict=True) if n != 1)
        own = set(self.flat(large)) - set(self.flat(self.weights[tree][0]))
        if set(self.flat(tuple(read.labels[d] for d in axes))) != own:
            return None
        of_pair = self.pairs.setdefault(self.pair(factor.value, use.other), -1 - len(self.pairs))
        return Read(left, multiply(factor.scale, {((("along", tree, of_pair), 1),): 1.0}))

    def row_sums(self, read: Read, axes: Sequence[int], left: Labels) -> Read | None:
        """Sums over the keys: of the weights 1, of the weights times a product a number for each row."""
        total: Sum = {}
        for term, number in (read.sum or {}).items():
            weights = [(atom, n) for atom, n in term if atom[0] == "weights"]
            products = [(atom, n) for atom, n in term if atom[0] == "product"]
            rest = [(atom, n) for atom, n in term if atom[0] in ("total", "along")]
            if len(weights) + len(products) + len(rest) != len(term) or [n for _, n in weights] != [1]:
                return None
            (_, tree), _ = weights[0]
            if len(axes) != 1 or self.of(self.weights[tree][1]) != self.of(read.labels[axes[0]]):
                return None
            if products:
                if [n for _, n in products] != [1]:
                    return None
                rest.append((("along", tree, products[0][0][1]), 1))
            total = add(total, multiply({ONE: number}, {term_of(rest): 1.0}))
        return Read(left, total)

    def exponential(self, read: Read) -> Read | None:
        if read.without_largest is None:
            return None
        tree = self.settled(read.without_largest)
        return Read(read.labels, {term_of([(("weights", tree), 1), (("total", tree), 1)]): 1.0})

    def same(self, one: Expression, other: Expression) -> bool:
        return self.settled(one) == self.settled(other)


def _of_result(read: Read) -> bool:
    """Whether a value is computed of a result of attention, or of one that is not divided by the sums of rows yet."""
    return any(atom[0] == "result" for term in read.sum or () for atom, _ in term)


# Replaces each pass of attention that a reader of a block has found (below) by one operation.


@dataclasses.dataclass(slots=True)
class _Found:
    """One softmax of a block: what its weights multiply (values), and what multiplies them in the backward pass."""

    tree: Expression
    product: Product
    query: int
    key: int
    query_at: Labels
    key_at: Labels
    values: list[Use] = dataclasses.field(default_factory=list)
    of_values: list[Use] = dataclasses.field(default_factory=list)  # gradients of the values
    of_products: list[tuple[Use, int]] = dataclasses.field(default_factory=list)  # with the product D comes from


class PassWriter:
    """Puts an operation in the place of each pass of what was read in a block."""

    def __init__(self, block: Block, reader: Reader, sought: Sought, fresh: Fresh) -> None:
        self.block, self.reader, self.fresh = block, reader, fresh
        self.sought = sought
        self.added: list[Op] = []
        self.position = {op.id: i for i, op in enumerate(block.ops)}
        self.made_at = {v: i for i, op in enumerate(block.ops) for v in op.outputs}
        self.behind: dict[int, int] = {}  # what a barrier hands on: the value in front of it
        for op in block.ops:
            if op.kind is OpKind.BARRIER:
                pairs = zip(op.inputs, op.outputs, strict=True)
                self.behind.update({b: self.behind.get(a, a) for a, b in pairs if isinstance(a, int)})
        self.forwards: dict[tuple[AttentionForm, tuple[Atom, ...]], Op] = {}
        self.like: dict[int, int] = {}  # of each added operation, one in whose place it stands
        self.replaced: dict[int, int] = {}  # values by those that are made in their place
        self.of_results: dict[int, list[int]] = {}  # what is a result of attention, by its product with the values
        for v, read in reader.known.items():
            match [*(read.sum or {}).items()]:
                case [(((("result", int(number)), 1),), 1.0)]:
                    self.of_results.setdefault(number, []).append(v)
        self.uses: dict[Expression, list[Use]] = {}  # by the softmax whose weights are in them
        for use in reader.uses.values():
            atoms = {atom for term in use.read.sum or () for atom, _ in term}
            for atom in atoms:
                if atom[0] == "weights":
                    self.uses.setdefault(atom[1], []).append(use)

    def run(self) -> Block:
        for found in self.found():
            self.write(found)
        return in_order(self.block, self.added, self.replaced) if self.added else self.block

    def found(self) -> Iterator[_Found]:
        reader = self.reader
        for tree, (labels, key) in reader.weights.items():
            numbers = {node[1] for node in nodes_of(tree) if node[0] == "score"}
            flat = reader.flat(labels)
            if len(numbers) != 1 or len(set(flat)) != len(flat):
                continue
            product = reader.products[numbers.pop()]
            sides = self.sides(product, reader.of(key))
            if sides is None:
                continue
            (key_value, key_at), (query_value, query_at) = sides
            found = _Found(tree, product, query_value, key_value, query_at, key_at)
            for use in self.uses.get(tree, ()):
                self.sort(found, use)
            yield found

    def sides(self, product: Product, key: Label) -> tuple[tuple[int, Labels], tuple[int, Labels]] | None:
        """The operand of a product that has the keys' positions, and the other."""
        sides = [(f.value, f.at) for f in (product.left, product.right) if isinstance(f.value, int)]
        sides.sort(key=lambda side: key not in self.reader.all(side[1]))
        has_key = [key in self.reader.all(at) for _, at in sides]
        return (sides[0], sides[1]) if has_key == [True, False] else None

    def sort(self, found: _Found, use: Use) -> None:
        """Enters a use of a softmax's weights, or of the gradient of its product, where it belongs."""
        assert use.read.sum is not None, "it has weights"
        key, weights = self.reader.of(self.reader.weights[found.tree][1]), (("weights", found.tree), 1)
        over_keys = self.reader.all(use.summed) == (key,)
        undivided: Sum = {term_of([weights, (("total", found.tree), 1)]): 1.0}
        if equal(use.read.sum, {(weights,): 1.0}) or (over_keys and equal(use.read.sum, undivided)):
            (found.values if over_keys else found.of_values).append(use)
            return
        for number in {atom[1] for term in use.read.sum for atom, _ in term if atom[0] == "product"}:
            if equal(use.read.sum, self.gradient(found, number)):
                found.of_products.append((use, number))

    def gradient(self, found: _Found, number: int) -> Sum:
        """What the gradient of the scores' product is: the slope times (P G - D P)."""
        own = ("product", found.product.number)
        slope: Sum = {}
        for term, n in self.reader.slopes[found.tree].items():
            if (own, 1) in term:
                slope = add(slope, {tuple(part for part in term if part != (own, 1)): n})
        weights, along = ("weights", found.tree), ("along", found.tree, number)
        changes: Sum = {
            term_of([(weights, 1), (("product", number), 1)]): 1.0,
            term_of([(weights, 1), (along, 1)]): -1.0,
        }
        return multiply(slope, changes)

    def write(self, found: _Found) -> None:
        forward: dict[int, tuple[Op, AttentionForm]] = {}  # by the values that are weighed
        same = self.reader.equals.number
        for use in found.values:
            for result, out in self.results(use):
                out = self.kept(found, result, out)
                if same(use.other) not in forward:
                    made = self.forward(found, use.other, use.at, out, use.op)
                    if made is None:
                        return
                    forward[same(use.other)] = made
                op, form = forward[same(use.other)]
                if self.letters(found, out, use.at) == form.out:
                    self.replaced[result] = self.shaped(op.outputs[0], result, use.op)
        for number in dict.fromkeys(number for _, number in found.of_products):
            self.backward(found, number, forward)

    def results(self, use: Use) -> Iterator[tuple[int, Labels]]:
        """The results of a use of weights, with labels: its own, or where weights are not divided by their sums yet,
        each quotient.
        """
        result: Sum = {((("result", use.op.id), 1),): 1.0}
        known = self.reader.known
        for v in self.of_results.get(use.op.id, ()):
            maker = self.block.ops[self.made_at[v]]
            before = (known[a].sum for a in maker.inputs if isinstance(a, int) and a in known)
            if all(sums is None or not equal(sums, result) for sums in before):
                yield v, known[v].labels

    def backward(self, found: _Found, number: int, forward: dict[int, tuple[Op, AttentionForm]]) -> None:
        """One operation for the gradients that go back from one gradient of a result (`change`)."""
        product = self.reader.products[number]
        sides = self.sides(product, self.reader.of(self.reader.weights[found.tree][1]))
        if sides is None:
            return
        (value, value_at), (change, change_at) = sides
        same = self.reader.equals.number
        if same(value) not in forward:
            # The scores are computed again: the result, which nobody asks for, is laid out as its gradient.
            out_at = self.kept(found, change, change_at)
            made = self.forward(found, value, value_at, out_at, product.op)
            if made is None:
                return
            forward[same(value)] = made
        op, form = forward[same(value)]
        # What the change is computed of is no gradient: a softmax over queries weighs its result as it does these.
        last = max(self.made_at.get(v, -1) for v in (value, change))
        of_product = [u for u, n in found.of_products if n == number and self.position[u.op.id] > last]
        of_value = [u for u in found.of_values if same(u.other) == same(change) and self.position[u.op.id] > last]
        groups = {
            "query": (form.query, found.key_at, [u for u in of_product if same(u.other) == same(found.key)]),
            "key": (form.key, found.query_at, [u for u in of_product if same(u.other) == same(found.query)]),
            "value": (form.value, change_at, of_value),
        }
        out = self.letters(found, self.kept(found, change, change_at), value_at)
        weighed = self.letters(found, self.kept(found, value, value_at), value_at)
        if out is None or sorted(out) != sorted(form.out) or weighed != form.value:
            return
        dims: dict[str, str] = {}
        replaced: dict[int, str] = {}
        for name, (own, at, uses) in groups.items():
            for use in uses:
                letters = self.letters(found, self.as_known(found, use, at), value_at)
                if letters is None or sorted(letters) != sorted(own) or dims.setdefault(name, letters) != letters:
                    return
                replaced[use.op.outputs[0]] = name
        order = ("query", "key", "value")
        query, key, value_dims = (dims.get(name, groups[name][0]) for name in order)
        gradients = Gradients(out=out, query=query, key=key, value=value_dims)
        uses = [use for _, _, uses in groups.values() for use in uses]
        if not uses:
            return
        like = min((use.op for use in uses), key=lambda o: self.position[o.id])
        read = [[use.other for use in groups["key"][2]], [use.other for use in groups["query"][2]], [value]]
        arrays = [self.as_read(atom, others, like) for atom, others in zip(op.inputs, read, strict=False)]
        change = self.apart(found, change, change_at, like)
        operands = (*arrays, *op.outputs, change, *op.inputs[3:])
        eqn = self.equation(form, gradients, operands, like)
        results = dict(zip(order, self.operation(eqn, operands, like).outputs, strict=True))
        self.replaced.update({v: self.shaped(results[name], v, like) for v, name in replaced.items()})

    def as_read(self, forward: Atom, backward: Sequence[int], like: Op) -> Atom:
        """An array of the forward pass, or what the backward pass computes again for it rather than keep it."""
        again = backward[0] if backward else forward
        if self.root(again) == self.root(forward) or not isinstance(again, int):
            return forward
        assert isinstance(forward, int), "a value, as what is computed again"
        return self.reshaped(again, self.fresh.values[forward].shape, like)

    def root(self, atom: Atom) -> Atom:
        """The value in front of the barriers that one passed."""
        return self.behind.get(atom, atom) if isinstance(atom, int) else atom

    def as_known(self, found: _Found, use: Use, at: Labels) -> Labels:
        """The labels of a use's result, those of its own dimensions by the labels that the array is known to have."""
        scores = set(self.reader.flat(self.reader.weights[found.tree][0]))
        pairs = zip(self.reader.all(use.at), self.reader.all(at), strict=True)
        known = {a: b for a, b in pairs if a not in scores and b not in scores}
        return tuple(known.get(x, x) for x in self.reader.flat(self.kept(found, use.op.outputs[0], use.out)))

    # Letters

    def names(self, found: _Found, value_at: Labels) -> dict[Label, str]:
        """A letter for each label: those of scores, of what queries and keys are summed over, of values' own."""
        reader = self.reader
        scores, key = reader.weights[found.tree]
        order = reader.flat((*scores, *found.query_at, *value_at))
        alphabet = (chr(c) for c in range(ord("a"), ord("z") + 1) if chr(c) != KEY)
        return {x: KEY if x == reader.of(key) else next(alphabet) for x in dict.fromkeys(order)}

    def letters(self, found: _Found, labels: Labels, value_at: Labels) -> str | None:
        names = self.names(found, value_at)
        found_letters = [names.get(x) for x in self.reader.flat(labels)]
        return "".join(x for x in found_letters if x) if all(found_letters) else None

    def forward(
        self, found: _Found, value: int, value_at: Labels, out_at: Labels, like: Op
    ) -> tuple[Op, AttentionForm] | None:
        """The operation of a forward pass; None where its dimensions are not those of one."""
        scores, _ = self.reader.weights[found.tree]
        whole = (found.query, found.query_at), (found.key, found.key_at), (value, value_at)
        kept = [self.kept(found, v, at) for v, at in whole]
        parts = [self.letters(found, at, value_at) for at in (*kept, out_at, scores)]
        query_value, key_value, value = (self.apart(found, v, at, like) for v, at in whole)
        if any(p is None or len(set(p)) != len(p) for p in parts):
            return None
        query, key, weighed, out, scored = (p for p in parts if p is not None)
        rows = scored.replace(KEY, "")
        if set(out) != (set(weighed) - {KEY}) | set(rows):
            return None
        at = self.fresh.values[query_value]
        keys = self.fresh.values[key_value].shape[key.index(KEY)]
        of_queries = {
            letter: n
            for letter, n, names in zip(query, at.shape, at.dimensions, strict=True)
            if letter in rows and letter not in key and Dimension.SEQUENCE in names
        }
        positions = [letter for letter, n in of_queries.items() if n == keys] or [*of_queries]
        arrays: dict[tuple[int, str], int] = {}
        score = self.written(found, value_at, found.tree, arrays, like)
        if len(positions) != 1 or score is None or any(set(a) - set(scored) - {NONE} for _, a in arrays):
            return None
        form = AttentionForm(
            query=query, key=key, value=weighed, out=out, rows=rows, position=positions[0], score=score,
            arrays=tuple(letters for _, letters in arrays), sources=_sources([v for v, _ in arrays]),
        )  # fmt: skip
        operands = (query_value, key_value, value, *(v for v, _ in arrays))
        # `jax.checkpoint` round attention alone would have the scores computed again, rather than kept. There are none.
        same = form, tuple(self.behind.get(v, v) for v in operands)
        if same not in self.forwards:
            eqn = self.equation(form, None, operands, like)
            if obstacle := obstacle_for(eqn, self.sought.kernel, 1):
                self.sought.obstacles[found.product.op.id] = obstacle
                return None
            like = replace(like, recomputes=found.product.op.recomputes)
            self.forwards[same] = self.operation(eqn, operands, like)
        return self.forwards[same], form

    def written(
        self, found: _Found, value_at: Labels, tree: Expression, arrays: dict[tuple[int, str], int], like: Op
    ) -> Expression | None:
        """An expression in letters, its arrays numbered."""
        names = self.names(found, value_at)
        match tree:
            case ("score", _):
                return ("score",)
            case ("const", _, _):
                return tree
            case ("iota", label, dtype):
                letter = names.get(self.reader.of(label))
                return ("iota", letter, dtype) if letter else None
            case ("array", value, labels):
                sized = zip(labels, self.fresh.values[value].shape, strict=True)
                at = [NONE if n == 1 else self.letters(found, (x,), value_at) for x, n in sized]
                if not all(at):
                    return None
                value = self.apart(found, value, labels, like)
                return ("array", arrays.setdefault((value, "".join(x for x in at if x)), len(arrays)))
            case (name, params, *operands):
                inner = [self.written(found, value_at, o, arrays, like) for o in operands]
                return None if any(o is None for o in inner) else (name, params, *inner)
        raise AssertionError(f"no expression: {tree}")

    # Operations

    def equation(self, form: AttentionForm, gradients: Gradients | None, operands: Sequence[Atom], like: Op) -> Any:
        values = [self.fresh.values[v] for v in operands if isinstance(v, int)]
        avals = tuple(jax.ShapeDtypeStruct(v.shape, v.dtype) for v in values)
        return jax_compat.at_line_of(like.eqn, ring.equation(form, gradients, avals))

    def kept(self, found: _Found, value: int, labels: Labels) -> Labels:
        """The labels of an array without those of dimensions of size one that a reshape took from the scores."""
        scores = set(self.reader.flat(self.reader.weights[found.tree][0]))
        sized = [*zip(labels, self.fresh.values[value].shape, strict=True)]
        has_own = any(n != 1 and not scores.intersection(self.reader.parts(x)) for x, n in sized)
        return tuple(x for x, n in sized if n != 1 or not has_own or self.reader.of(x) in scores)

    def apart(self, found: _Found, value: int, labels: Labels, like: Op) -> int:
        """An array with a dimension for each of the labels of it that are kept."""
        own = self.fresh.values[value]
        sized = dict(zip(labels, own.shape, strict=True))
        sizes = [self.reader.sizes(x, sized[x]) for x in self.kept(found, value, labels)]
        shape = tuple(n for parts in sizes for n in parts)
        if shape == own.shape:
            return value
        named = dict(zip(labels, own.dimensions, strict=False))
        kept = zip(self.kept(found, value, labels), sizes, strict=True)
        made = self.reshaped(value, shape, like)
        dimensions = tuple(named.get(x, frozenset()) for x, parts in kept for _ in parts)
        self.fresh.values[made] = replace(self.fresh.values[made], dimensions=dimensions)
        self.behind[made] = self.behind.get(value, value)
        return made

    def shaped(self, made: int, result: int, like: Op) -> int:
        """A value with the shape and the type of the one in whose place it stands."""
        made, own = self.reshaped(made, self.fresh.values[result].shape, like), self.fresh.values[result]
        if self.fresh.values[made].dtype == own.dtype:
            return made
        return self.one_equation(lambda a: jax.lax.convert_element_type(a, own.dtype), made, like)

    def reshaped(self, value: int, shape: tuple[int, ...], like: Op) -> int:
        is_same = self.fresh.values[value].shape == shape
        return value if is_same else self.one_equation(lambda a: a.reshape(shape), value, like)

    def one_equation(self, function: Callable[[Any], Any], value: int, like: Op) -> int:
        own = self.fresh.values[value]
        closed = jax.make_jaxpr(function)(jax.ShapeDtypeStruct(own.shape, own.dtype))
        (eqn,) = jax_compat.open_jaxpr(closed).eqns
        return self.operation(jax_compat.at_line_of(like.eqn, eqn), (value,), like).outputs[0]

    def operation(self, eqn: Any, operands: Sequence[Atom], like: Op) -> Op:
        made = [v.aval for v in eqn.outvars]
        outputs = tuple(self.fresh.value(a.shape, str(a.dtype), jax_compat.itemsize(a)) for a in made)
        rule = ring.rule_of(eqn) if eqn.primitive in (ring.FORWARD, ring.BACKWARD) else None
        op = replace(
            like, id=self.fresh.op_id(), primitive=eqn.primitive.name, eqn=eqn, inputs=tuple(operands),
            outputs=outputs, rule=rule, key=equation_key(eqn),
        )  # fmt: skip
        self.added.append(op)
        self.like[op.id] = like.id
        return op


def _sources(values: Sequence[int]) -> tuple[int, ...]:
    """Of each value the first place where it is."""
    return tuple(values.index(v) for v in values)


def blockwise(graph: OpGraph, kernel: Kernel = Kernel.BLOCKS) -> OpGraph:
    """The graph with an operation for each pass of each attention that is found and that a kernel takes, which for
    blocks is all. Other attention stays as it is.

    Attention of which anything would be left (weights that something else reads, say) stays whole: replacing a part of
    it would compute scores twice.
    """
    named = annotate_semantics(graph)
    wanted = {op.id for op in score_products(named)}
    while wanted:
        fresh = Fresh(named)
        sought = Sought(named=named, products=wanted, kernel=kernel)
        block = closed(_rewritten(graph.block, sought, fresh, Around({}, {})), fresh)
        left = wanted & {op.id for op in walk(block)}
        if not left:
            values = tuple(replace(v, dimensions=(), purpose=None) for v in fresh.values)
            return renumbered(dataclasses.replace(graph, values=values, block=remove_dead(block)))
        wanted = wanted - left
    return graph


def obstacle(graph: OpGraph, product: Op, kernel: Kernel) -> str:
    """The reason for which attention around a product of scores of a described graph is no operation of a kernel; empty
    where there is none.
    """
    sought = Sought(named=graph, products={op.id for op in score_products(graph)}, kernel=kernel)
    block = _rewritten(graph.block, sought, Fresh(graph), Around({}, {}))
    if all(op.id != product.id for op in walk(block)):
        return ""
    return sought.obstacles.get(product.id, "scores or weights that something else reads or is the gradient of")


def check_blockwise(graph: OpGraph) -> None:
    """Raises: UnsupportedError where a graph of `blockwise` has scores left, which no ring can have."""
    for op in score_products(annotate_semantics(graph)):
        raise UnsupportedError(
            where=f"{op.place or 'the step'} at {jax_compat.source_line(op.eqn)}",
            expected="attention as softmax(scale * q k^T + mask) v with weights that nothing else reads",
            got=f"scores of shape {list(graph.values[op.outputs[0]].shape)} that are used in another way",
            hint="leave dropout out of the attention weights, put jax.checkpoint round the attention, or take "
            "recipes.sequence_parallel('ulysses')",
        )


def _rewritten(block: Block, sought: Sought, fresh: Fresh, around: Around) -> Block:
    if any(op.blocks for op in block.ops):
        seen = functools.cache(functools.partial(around.within, block))
        block = with_joined_scans(block, fresh, functools.partial(_rewritten_pair, sought, fresh, seen))
        seen = functools.cache(functools.partial(around.within, block))
        ops: list[Op] = []
        for op in block.ops:
            inner = tuple(_rewritten(b, sought, fresh, seen().inside(op)) for b in op.blocks)
            ops.append(replace(op, blocks=inner) if inner else op)
        block = replace(block, ops=tuple(ops))
    reader = Reader(block, sought, fresh, around)
    reader.run()
    if (unknown := reader.first_unknown) is not None:
        stands = f"{unknown.primitive} at {jax_compat.source_line(unknown.eqn)}"
        sought.obstacles.update({product.op.id: stands for product in reader.products.values()})
    return PassWriter(block, reader, sought, fresh).run()


def _rewritten_pair(
    sought: Sought, fresh: Fresh, seen: Callable[[], Around], first: Op, second: Op, joined: JoinedBodies
) -> JoinedBodies | None:
    """The bodies of two scans with attention found as if they were one. `seen`: by blocks of operations beside them."""
    reader = Reader(joined.block, sought, fresh, seen().inside(first, second))
    reader.run()
    writer = PassWriter(joined.block, reader, sought, fresh)
    found = writer.run()
    if not writer.added:
        return None
    of_first = {op.id for op in writer.added if writer.like[op.id] in joined.first}
    return dataclasses.replace(joined, block=found, first=joined.first | of_first)


# Rounding of weights in 16 bits: before or after they are divided by their sum (`autopar.attention.ring`).
_ROUNDING = (
    "in 16 bits weights are rounded before they are divided by their sum, not after it (Search(attention='as written') "
    "keeps the order)"
)


def attention_left(graph: OpGraph, kernel: Kernel) -> tuple[str, ...]:
    """The attention that a described graph still has as it is written, beside passes of a kernel, and the reason."""
    left = [op for op in score_products(graph) if op.role is graph.forward_role]
    if not left:
        has_passes = any(op.primitive in ring.PRIMITIVES for op in graph.ops())
        return () if has_passes else (f"no attention was found that {kernel.value} could run",)
    places = [*dict.fromkeys(op.place or jax_compat.source_line(op.eqn) or "the step" for op in left)]
    named = ", ".join(places[:3]) + (", ..." if len(places) > 3 else "")
    stay = (
        "1 product of scores stays as it is" if len(left) == 1 else f"{len(left)} products of scores stay as they are"
    )
    return (f"{stay} written ({named}): {kernel.value} does not take {obstacle(graph, left[0], kernel)}",)


def attention_as_written(graph: OpGraph, kernel: Kernel, part: float = 0.0) -> tuple[str, ...]:
    """The attention of a described graph without passes of a kernel: scores that are larger than the queries and keys
    that they are made of cost more to write and to read than these.

    `kernel`: that of the device. `part`: of the step that operations on scores take beside the products; zero where
    that is not known.
    """
    large = large_scores(graph)
    if not large:
        return ()
    largest = max(large, key=lambda op: _nbytes(graph, *op.outputs))
    takes = f", and operations on them take {text_of_part(part)} of the step beside the products" if part else ""
    told = f"its scores, up to {text_of_bytes(_nbytes(graph, *largest.outputs))} over all devices, go through memory"
    why = obstacle(graph, largest, kernel)
    if why:
        return (f"attention runs as it is written: {told}{takes}; {kernel.value} does not take {why}",)
    way = "blockwise" if kernel is Kernel.BLOCKS else "kernel"
    return (f"attention runs as it is written: {told}{takes}; Search(attention='{way}') keeps none ({kernel.value})",)


def large_scores(graph: OpGraph) -> list[Op]:
    """The products of scores of the forward pass that are larger than the queries and keys that they are made of."""
    found = (op for op in score_products(graph) if op.role is graph.forward_role)
    return [op for op in found if _nbytes(graph, *op.outputs) > _nbytes(graph, *op.inputs)]


def _nbytes(graph: OpGraph, *ids: Any) -> int:
    return sum(graph.values[i].nbytes for i in ids)


def chosen_note(kernel: Kernel, gain_s: float | None) -> str:
    """The choice of a kernel, for `gain_s` of computing in a step, or, where that is none, for its memory."""
    if gain_s is None:
        why = "as it is written, nothing was found that fits"
    elif gain_s > 0:
        why = f"computing takes {text_of_s(gain_s)} less of a step than by the operations as they are written"
    else:
        why = f"computing takes {text_of_s(-gain_s)} more of a step, which the memory that it saves is worth"
    return f"attention runs by {kernel.value}, which keeps no scores: {why}; {_ROUNDING}"
