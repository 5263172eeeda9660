"""Finds attention in a graph by its computation, and replaces each of its passes by one operation.

Equations are read as algebra (below), so the spelling of attention, its masks and its softmax does not matter, nor
the form in which differentiation leaves them. With P the weights, G a product of the result's gradient and the values,
and D the sum of P G over a row, the matrix that multiplies the values must be P, and the matrix that multiplies the
keys must be s (P G - D P), s being the derivative of the scores by the product. The sum of P over a row is 1: no
gradient passes through the maximum.

The weights may be divided by their sum after the product with the values: the quotient is then the result, and G and D
have the sum as a factor. D may also be the sum of the result times its gradient. Reshapes may join dimensions of scores
and take them apart again.

A sink, a number of each head behind the scores, which takes a part of each row's weights and multiplies no value, is
taken off again: the operation runs without it, and its result is scaled by what the sink leaves to the keys. The
backward pass reads the result and the sums of rows with the sink.

Attention of other forms stays as it is, and a ring refuses it: dropout on the weights, weights that are returned, a
gradient of a bias. Plans say which kernel runs attention, what that gains, and what stands in the way of it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from msgspec.structs import replace

from autopar.common import jax_compat
from autopar.common.text import text_of_bytes, text_of_part, text_of_s
from autopar.errors import UnsupportedError
from autopar.ir.graph import Atom, Block, Constant, Dimension, Op, OpGraph, OpKind, walk
from autopar.ir.primitives import ATTENTION_PASSES
from autopar.ir.rewrite import Fresh, in_order, remove_dead, renumbered
from autopar.ir.rules import equation_key
from autopar.ir.scan_pairs import JoinedBodies, closed, with_joined_scans
from autopar.ir.semantics import annotate_semantics
from autopar.ops.attention import ring
from autopar.ops.attention.checks import score_products
from autopar.ops.attention.form import KEY, NONE, AttentionForm, Expression, Gradients
from autopar.ops.attention.kernels import Kernel, obstacle_for
from autopar.ops.attention.reader import (
    Around,
    Label,
    Labels,
    Product,
    Reader,
    Sum,
    Use,
    add,
    equal,
    multiply,
    nodes_of,
    term_of,
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sought:
    """The products of scores whose attention becomes operations, in a described graph; `kernel` is to take them.

    `obstacles`: by product, what stands in the way where that is known.
    """

    named: OpGraph
    products: set[int]
    kernel: Kernel
    obstacles: dict[int, str] = dataclasses.field(default_factory=dict)


# Replaces each pass of attention that a reader of a block has found by one operation.


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
        self.sinks: dict[Expression, tuple[int, str] | None] = {}  # by softmax
        self.with_sink: dict[tuple[int, Expression], tuple[int, ...]] = {}  # results with a sink
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
        return multiply(slope, self.changes(found, number))

    def changes(self, found: _Found, number: int) -> Sum:
        """The gradient of the scores: P G - D P."""
        weights, along = ("weights", found.tree), ("along", found.tree, number)
        return {
            term_of([(weights, 1), (("product", number), 1)]): 1.0,
            term_of([(weights, 1), (along, 1)]): -1.0,
        }

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
                    made_here = self.results_of(found, op, form)
                    self.replaced[result] = self.shaped(made_here[0], result, use.op)
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
        saved = self.results_of(found, op, form)
        operands = (*arrays, *saved, change, *op.inputs[3:])
        eqn = self.equation(form, gradients, operands, like)
        results = dict(zip(order, self.operation(eqn, operands, like).outputs, strict=True))
        self.replaced.update({v: self.shaped(results[name], v, like) for v, name in replaced.items()})
        if found.tree[0] == "sink":
            self.sink_backward(found, number, (form, gradients), (*saved, change), value_at, like)

    # Sinks

    def sink(self, found: _Found, value_at: Labels, form: AttentionForm, like: Op) -> tuple[int, str] | None:
        """(the array of a softmax's sinks, its letters, `NONE` of a dimension of size one); None where it has others
        than rows have.
        """
        if found.tree not in self.sinks:
            arrays: dict[tuple[int, str], int] = {}
            self.written(found, value_at, found.tree[3], arrays, like)
            (sink,) = arrays or (None,)
            self.sinks[found.tree] = sink if sink is not None and set(sink[1]) <= {*form.rows, NONE} else None
        return self.sinks[found.tree]

    def known_sink(self, found: _Found) -> tuple[int, str]:
        sink = self.sinks[found.tree]
        assert sink is not None, "the forward pass has it"
        return sink

    def results_of(self, found: _Found, op: Op, form: AttentionForm) -> tuple[int, ...]:
        """The results of a forward pass: the attention's own, and each row's largest number and sum, with a sink."""
        if found.tree[0] != "sink":
            return op.outputs
        if (op.id, found.tree) not in self.with_sink:
            sink, at = self.known_sink(found)
            function = functools.partial(_with_sink, form, at)
            self.with_sink[op.id, found.tree] = self.computed(function, (*op.outputs, sink), op)
        return self.with_sink[op.id, found.tree]

    def sink_backward(
        self,
        found: _Found,
        number: int,
        forms: tuple[AttentionForm, Gradients],
        arrays: tuple[int, ...],
        value_at: Labels,
        like: Op,
    ) -> None:
        """The gradients of a softmax's sink for each row, where they are cut off behind those of the scores.

        Args:
            arrays: The result, each row's largest number and sum, and the gradient of the result.
        """
        (form, gradients), (sink, sink_at) = forms, self.known_sink(found)
        key = self.reader.of(self.reader.weights[found.tree][1])
        for v, read in self.reader.columns.items():
            if read.sum is None or not equal(read.sum, self.changes(found, number)):
                continue
            rows = self.letters(found, tuple(x for x in read.labels if self.reader.of(x) != key), value_at)
            if rows is not None and sorted(rows) == sorted(form.rows):
                function = functools.partial(_sink_backward, form, gradients, (sink_at, rows))
                (made,) = self.computed(function, (*arrays, sink), like)
                self.replaced[v] = self.shaped(made, v, like)

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
        tree = found.tree[2] if found.tree[0] == "sink" else found.tree
        score = self.written(found, value_at, tree, arrays, like)
        if len(positions) != 1 or score is None or any(set(a) - set(scored) - {NONE} for _, a in arrays):
            return None
        form = AttentionForm(
            query=query, key=key, value=weighed, out=out, rows=rows, position=positions[0], score=score,
            arrays=tuple(letters for _, letters in arrays), sources=_sources([v for v, _ in arrays]),
        )  # fmt: skip
        if found.tree[0] == "sink" and self.sink(found, value_at, form, like) is None:
            return None
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
        (made,) = self.computed(function, (value,), like)
        return made

    def computed(self, function: Callable[..., Any], values: Sequence[int], like: Op) -> tuple[int, ...]:
        """The results of a function of arrays, by operations beside one."""
        structs = [jax.ShapeDtypeStruct(self.fresh.values[v].shape, self.fresh.values[v].dtype) for v in values]
        jaxpr = jax_compat.open_jaxpr(jax.make_jaxpr(function)(*structs))
        known = dict(zip(jaxpr.invars, values, strict=True))
        for eqn in jaxpr.eqns:
            operands = [Constant(a) if isinstance(a, jax_compat.Literal) else known[a] for a in eqn.invars]
            made = self.operation(jax_compat.at_line_of(like.eqn, eqn), operands, like)
            known.update(zip(eqn.outvars, made.outputs, strict=True))
        return tuple(known[v] for v in jaxpr.outvars)

    def operation(self, eqn: Any, operands: Sequence[Atom], like: Op) -> Op:
        made = [v.aval for v in eqn.outvars]
        outputs = tuple(self.fresh.value(a.shape, str(a.dtype), jax_compat.itemsize(a)) for a in made)
        rule = ring.rule_of(eqn) if eqn.primitive in (ring.FORWARD, ring.BACKWARD) else None
        op = replace(
            like, id=self.fresh.op_id(), primitive=eqn.primitive.name, eqn=eqn, inputs=tuple(operands),
            outputs=outputs, rule=rule, key=equation_key(eqn),
        )  # fmt: skip
        self.added.append(op)
        self.like[op.id] = self.like.get(like.id, like.id)
        return op


# A sink beside attention. Dimensions have letters, as in `AttentionForm`.


def _spread(array: Any, at: str, shape: Sequence[int], letters: str) -> Any:
    """An array repeated along the dimensions of another one that it lacks, in the order of that one."""
    own = at.replace(NONE, "")
    ordered = [x for x in letters if x in own]
    array = array.reshape([n for n, x in zip(array.shape, at, strict=True) if x != NONE])
    array = jax.lax.transpose(array, [own.index(x) for x in ordered])
    return jax.lax.broadcast_in_dim(array, shape, [letters.index(x) for x in ordered])


def _with_sink(form: AttentionForm, at: str, out: Any, largest: Any, total: Any, sink: Any) -> tuple[Any, Any, Any]:
    """(result, each row's largest number, its sum) with a sink in each row."""
    sinks = _spread(sink.astype(total.dtype), at, total.shape, form.rows)
    larger = jax.lax.max(largest, sinks)
    of_keys = total * jax.lax.exp(largest - larger)
    more = of_keys + jax.lax.exp(sinks - larger)
    share = _spread(of_keys / more, form.rows, out.shape, form.out)
    scaled = (share * out.astype(share.dtype)).astype(out.dtype)
    # The result of a row that sees no keys is nan; its sink has all of the weight.
    return jax.lax.select(share == 0, jax.lax.full_like(out, 0), scaled), larger, more


def _sink_backward(
    form: AttentionForm,
    gradients: Gradients,
    letters: tuple[str, str],
    out: Any,
    largest: Any,
    total: Any,
    change: Any,
    sink: Any,
) -> tuple[Any]:
    """The gradient of the sink of each row: less its weight times the sum of the result times its gradient.

    Args:
        letters: Those of the sinks, and of what is made.
    """
    at, made = letters
    sinks = _spread(sink.astype(total.dtype), at, total.shape, form.rows)
    change = jax.lax.transpose(change, [gradients.out.index(x) for x in form.out]).astype(total.dtype)
    own = [d for d, x in enumerate(form.out) if x not in form.rows]
    along = (out.astype(total.dtype) * change).sum(own)
    along = _spread(along, "".join(x for x in form.out if x in form.rows), total.shape, form.rows)
    of_row = -along * jax.lax.exp(sinks - largest) / total
    return (jax.lax.transpose(of_row, [form.rows.index(x) for x in made]),)


def _sources(values: Sequence[int]) -> tuple[int, ...]:
    """Of each value the first place where it is."""
    return tuple(values.index(v) for v in values)


def blockwise(graph: OpGraph, kernel: Kernel = Kernel.BLOCKS, named: OpGraph | None = None) -> OpGraph:
    """The graph with an operation for each pass of each attention that is found and that a kernel takes, which for
    blocks is all. Other attention stays as it is. `named`: the graph with its semantics, where these are known.

    Attention of which anything would be left (weights that something else reads, say) stays whole: replacing a part of
    it would compute scores twice.
    """
    named = annotate_semantics(graph) if named is None else named
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
    reader = Reader(block, sought.named, sought.products, fresh.values, around)
    reader.run()
    if (unknown := reader.first_unknown) is not None:
        stands = f"{unknown.primitive} at {jax_compat.source_line(unknown.eqn)}"
        sought.obstacles.update({product.op.id: stands for product in reader.products.values()})
    return PassWriter(block, reader, sought, fresh).run()


def _rewritten_pair(
    sought: Sought, fresh: Fresh, seen: Callable[[], Around], first: Op, second: Op, joined: JoinedBodies
) -> JoinedBodies | None:
    """The bodies of two scans with attention found as if they were one. `seen`: by blocks of operations beside them."""
    reader = Reader(joined.block, sought.named, sought.products, fresh.values, seen().inside(first, second))
    reader.run()
    writer = PassWriter(joined.block, reader, sought, fresh)
    found = writer.run()
    if not writer.added:
        return None
    of_first = {op.id for op in writer.added if writer.like[op.id] in joined.first}
    return dataclasses.replace(joined, block=found, first=joined.first | of_first)


# Rounding of weights in 16 bits: before or after they are divided by their sum (`autopar.ops.attention.ring`).
_ROUNDING = (
    "in 16 bits weights are rounded before they are divided by their sum, not after it (Search(attention='as written') "
    "keeps the order)"
)


def attention_left(graph: OpGraph, kernel: Kernel) -> tuple[str, ...]:
    """The attention that a described graph still has as it is written, beside passes of a kernel, and the reason."""
    forward = graph.forward_role
    left = [op for op in score_products(graph) if op.role is forward]
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
    forward = graph.forward_role
    found = (op for op in score_products(graph) if op.role is forward)
    return [op for op in found if _nbytes(graph, *op.outputs) > _nbytes(graph, *op.inputs)]


def _nbytes(graph: OpGraph, *ids: Any) -> int:
    return sum(graph.values[i].nbytes for i in ids)


def chosen_note(kernel: Kernel, gain_s: float | None, graph: OpGraph) -> str:
    """The choice of a kernel, for `gain_s` of computing in a step, or, where that is none, for its memory; `graph` has
    its passes.
    """
    if gain_s is None:
        why = "as it is written, nothing was found that fits"
    elif gain_s > 0:
        why = f"computing takes {text_of_s(gain_s)} less of a step than by the operations as they are written"
    else:
        why = f"computing takes {text_of_s(-gain_s)} more of a step, which the memory that it saves is worth"
    passes = [op for op in graph.ops() if op.primitive in ATTENTION_PASSES]
    rounds = any(graph.values[op.outputs[0]].itemsize <= 2 for op in passes)
    rounding = f"; {_ROUNDING}" if rounds else ""
    return f"attention runs by {kernel.value}, which keeps no scores: {why}{rounding}"
