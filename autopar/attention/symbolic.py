"""The equations of a block as polynomials in the scores of attention.

A value with scores is a sum of terms (`polynomial`): numbers times powers of *atoms*. An atom is a product of queries
and keys (or of the result's gradient and the values), the weights that softmax computes from one, a sum over a row, or
any other factor of the scores.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from autopar.attention.form import ELEMENTWISE, Expression, has_score
from autopar.attention.mask_terms import ArrayReader
from autopar.attention.polynomial import ONE, Sum, add, multiply, power, scale, term_of
from autopar.attention.score_consumers import Around, Label, Labels, Product, Read, Use
from autopar.ir.graph import Block, Op, OpGraph, OpKind


class Reader(ArrayReader):
    """Reads the equations of one block in order."""

    def __init__(self, block: Block, named: OpGraph, wanted: set[int], around: Around) -> None:
        super().__init__(block, named, around)
        self.block, self.wanted = block, wanted
        self.known: dict[int, Read] = {}
        self.products: dict[int, Product] = {}
        self.uses: list[Use] = []
        self.weights: dict[Expression, tuple[Labels, Label]] = {}  # labels of the scores, and that of the keys
        self.slopes: dict[Expression, Sum] = {}  # the scores' sums, by tree

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
            for v in op.outputs:
                self.known[v] = found or self.unknown(v)

    def unknown(self, value: int) -> Read:
        return Read(tuple(self.label() for _ in self.shape(value)), None)

    def product(self, op: Op, reads: Sequence[Read | None]) -> None:
        (left, right) = op.inputs
        (left_sum, right_sum), (left_kept, right_kept) = op.eqn.params["dimension_numbers"]
        if all(read is not None for read in reads):
            self.known[op.outputs[0]] = self.unknown(op.outputs[0])
            return
        if all(read is None for read in reads):
            if op.id not in self.wanted:
                return
            first = tuple(self.label() for _ in self.shape(left))
            second = [self.label() for _ in self.shape(right)]
            for a, b in (*zip(left_sum, right_sum, strict=True), *zip(left_kept, right_kept, strict=True)):
                second[b] = first[a]
            out = self.result(first, tuple(second), op)
            self.products[op.id] = Product(op, first, tuple(second))
            self.known[op.outputs[0]] = Read(out, {((("product", op.id), 1),): 1.0}, ("score", op.id))
            return
        which = 0 if reads[0] is not None else 1
        read, other = reads[which], op.inputs[1 - which]
        assert read is not None, "one of the operands is known"
        if not isinstance(other, int):
            self.known[op.outputs[0]] = self.unknown(op.outputs[0])
            return
        at = [self.label() for _ in self.shape(other)]
        mine, theirs = ((left_sum, left_kept), (right_sum, right_kept))[:: 1 if which == 0 else -1]
        for pairs in zip(mine, theirs, strict=True):
            for a, b in zip(*pairs, strict=True):
                at[b] = read.labels[a]
        left_at, right_at = (read.labels, tuple(at))[:: 1 if which == 0 else -1]
        summed = tuple(read.labels[d] for d in mine[0])
        self.uses.append(Use(op, read, other, tuple(at), summed, self.result(left_at, right_at, op)))

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
            labels = self.moved(op, first.labels) if first is not None else None
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

    def moved(self, op: Op, labels: Labels) -> Labels | None:
        """The labels behind an operation that moves dimensions; None where it splits or joins them."""
        shape, out = self.shape(op.inputs[0]), self.shape(op.outputs[0])
        if op.primitive == "transpose":
            return tuple(labels[d] for d in op.eqn.params["permutation"])
        if op.primitive == "broadcast_in_dim":
            made = [self.label() for _ in out]
            for d, at in enumerate(op.eqn.params["broadcast_dimensions"]):
                if shape[d] == out[at]:
                    made[at] = labels[d]
            return tuple(made)
        if [n for n in shape if n != 1] != [n for n in out if n != 1]:
            return None
        large = iter(x for x, n in zip(labels, shape, strict=True) if n != 1)
        return tuple(next(large) if n != 1 else self.label() for n in out)

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
        return self.row_sums(read, axes, left)

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
