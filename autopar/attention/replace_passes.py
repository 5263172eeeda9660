"""Replaces each pass of attention that a reader of a block has found (`autopar.attention.match`) by one operation."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import jax

from autopar.attention import ring
from autopar.attention.beside_scores import nodes_of
from autopar.attention.form import KEY, NONE, AttentionForm, Expression, Gradients
from autopar.attention.polynomial import Sum, add, equal, multiply, term_of
from autopar.attention.score_uses import Label, Labels, Product, Use
from autopar.attention.symbolic import Reader
from autopar.common import jax_compat
from autopar.ir.graph import Atom, Block, Dimension, Op, OpGraph, OpKind, read_by
from autopar.ir.rewrite import Fresh, reading, remove_dead
from autopar.sharding.rules import equation_key


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

    def __init__(self, block: Block, reader: Reader, named: OpGraph, fresh: Fresh) -> None:
        self.block, self.reader, self.named, self.fresh = block, reader, named, fresh
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
        self.uses: dict[Expression, list[Use]] = {}  # by the softmax whose weights are in them
        for use in reader.uses:
            atoms = {atom for term in use.read.sum or () for atom, _ in term}
            for atom in atoms:
                if atom[0] == "weights":
                    self.uses.setdefault(atom[1], []).append(use)

    def run(self) -> Block:
        for found in self.found():
            self.write(found)
        return _in_order(self.block, self.added, self.replaced) if self.added else self.block

    def found(self) -> Iterator[_Found]:
        reader = self.reader
        for tree, (labels, key) in reader.weights.items():
            numbers = {node[1] for node in nodes_of(tree) if node[0] == "score"}
            if len(numbers) != 1 or len(set(reader.all(labels))) != len(labels):
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
        operands = zip(product.op.inputs, (product.left, product.right), strict=True)
        sides = [(a, at) for a, at in operands if isinstance(a, int)]
        sides.sort(key=lambda side: key not in self.reader.all(side[1]))
        has_key = [key in self.reader.all(at) for _, at in sides]
        return (sides[0], sides[1]) if has_key == [True, False] else None

    def sort(self, found: _Found, use: Use) -> None:
        """Enters a use of a softmax's weights, or of the gradient of its product, where it belongs."""
        assert use.read.sum is not None, "it has weights"
        key = self.reader.of(self.reader.weights[found.tree][1])
        if equal(use.read.sum, {((("weights", found.tree), 1),): 1.0}):
            over_keys = self.reader.all(use.summed) == (key,)
            (found.values if over_keys else found.of_values).append(use)
            return
        for number in {atom[1] for term in use.read.sum for atom, _ in term if atom[0] == "product"}:
            if equal(use.read.sum, self.gradient(found, number)):
                found.of_products.append((use, number))

    def gradient(self, found: _Found, number: int) -> Sum:
        """What the gradient of the scores' product is: the slope times (P G - D P)."""
        own = ("product", found.product.op.id)
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
            if same(use.other) not in forward:
                made = self.forward(found, use.other, use.at, use.out, use.op)
                if made is None:
                    return
                forward[same(use.other)] = made
            op, form = forward[same(use.other)]
            if self.letters(found, use.out, use.at) == form.out:
                self.replaced[use.op.outputs[0]] = op.outputs[0]
        for number in dict.fromkeys(number for _, number in found.of_products):
            self.backward(found, number, forward)

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
            made = self.forward(found, value, value_at, change_at, product.op)
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
        out = self.letters(found, change_at, value_at)
        if out is None or sorted(out) != sorted(form.out) or self.letters(found, value_at, value_at) != form.value:
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
        arrays = [self.as_read(atom, others) for atom, others in zip(op.inputs, read, strict=False)]
        operands = (*arrays, *op.outputs, change, *op.inputs[3:])
        results = dict(zip(order, self.operation(form, gradients, operands, like).outputs, strict=True))
        self.replaced.update({v: results[name] for v, name in replaced.items()})

    def as_read(self, forward: Atom, backward: Sequence[int]) -> Atom:
        """An array of the forward pass, or what the backward pass computes again for it rather than keep it."""
        again = backward[0] if backward else forward
        return forward if self.root(again) == self.root(forward) else again

    def root(self, atom: Atom) -> Atom:
        """The value in front of the barriers that one passed."""
        return self.behind.get(atom, atom) if isinstance(atom, int) else atom

    def as_known(self, found: _Found, use: Use, at: Labels) -> Labels:
        """The labels of a use's result, those of its own dimensions by the labels that the array is known to have."""
        scores = set(self.reader.all(self.reader.weights[found.tree][0]))
        pairs = zip(self.reader.all(use.at), self.reader.all(at), strict=True)
        known = {a: b for a, b in pairs if a not in scores and b not in scores}
        return tuple(known.get(x, x) for x in self.reader.all(use.out))

    # Letters

    def names(self, found: _Found, value_at: Labels) -> dict[Label, str]:
        """A letter for each label: those of scores, of what queries and keys are summed over, of values' own."""
        reader = self.reader
        scores, key = reader.weights[found.tree]
        order = [*reader.all(scores), *reader.all(found.query_at), *reader.all(value_at)]
        alphabet = (chr(c) for c in range(ord("a"), ord("z") + 1) if chr(c) != KEY)
        return {x: KEY if x == reader.of(key) else next(alphabet) for x in dict.fromkeys(order)}

    def letters(self, found: _Found, labels: Labels, value_at: Labels) -> str | None:
        names = self.names(found, value_at)
        found_letters = [names.get(self.reader.of(x)) for x in labels]
        return "".join(x for x in found_letters if x) if all(found_letters) else None

    def forward(
        self, found: _Found, value: int, value_at: Labels, out_at: Labels, like: Op
    ) -> tuple[Op, AttentionForm] | None:
        """The operation of a forward pass; None where its dimensions are not those of one."""
        scores, _ = self.reader.weights[found.tree]
        parts = [self.letters(found, at, value_at) for at in (found.query_at, found.key_at, value_at, out_at, scores)]
        if any(p is None or len(set(p)) != len(p) for p in parts):
            return None
        query, key, weighed, out, scored = (p for p in parts if p is not None)
        rows = scored.replace(KEY, "")
        if set(out) != (set(weighed) - {KEY}) | set(rows):
            return None
        at = self.named.values[found.query]
        keys = self.named.values[found.key].shape[key.index(KEY)]
        positions = [
            letter
            for letter, n, names in zip(query, at.shape, at.dimensions, strict=True)
            if letter in rows and letter not in key and n == keys and Dimension.SEQUENCE in names
        ]
        arrays: dict[tuple[int, str], int] = {}
        score = self.written(found, value_at, found.tree, arrays)
        if len(positions) != 1 or score is None or any(set(a) - set(scored) - {NONE} for _, a in arrays):
            return None
        form = AttentionForm(
            query=query, key=key, value=weighed, out=out, rows=rows, position=positions[0], score=score,
            arrays=tuple(letters for _, letters in arrays), sources=_sources([v for v, _ in arrays]),
        )  # fmt: skip
        operands = (found.query, found.key, value, *(v for v, _ in arrays))
        # `jax.checkpoint` round attention alone would have the scores computed again, rather than kept. There are none.
        same = form, tuple(self.behind.get(v, v) for v in operands)
        if same not in self.forwards:
            self.forwards[same] = self.operation(form, None, operands, like)
        return self.forwards[same], form

    def written(
        self, found: _Found, value_at: Labels, tree: Expression, arrays: dict[tuple[int, str], int]
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
                shape = self.named.values[value].shape
                at = [NONE if n == 1 else names.get(self.reader.of(x)) for x, n in zip(labels, shape, strict=True)]
                if not all(at):
                    return None
                return ("array", arrays.setdefault((value, "".join(x for x in at if x)), len(arrays)))
            case (name, params, *operands):
                inner = [self.written(found, value_at, o, arrays) for o in operands]
                return None if any(o is None for o in inner) else (name, params, *inner)
        raise AssertionError(f"no expression: {tree}")

    # Operations

    def operation(self, form: AttentionForm, gradients: Gradients | None, operands: Sequence[Atom], like: Op) -> Op:
        values = [self.fresh.values[v] for v in operands if isinstance(v, int)]
        avals = tuple(jax.ShapeDtypeStruct(v.shape, v.dtype) for v in values)
        eqn = jax_compat.at_line_of(like.eqn, ring.equation(form, gradients, avals))
        made = [v.aval for v in eqn.outvars]
        outputs = tuple(self.fresh.value(a.shape, str(a.dtype), jax_compat.itemsize(a)) for a in made)
        op = dataclasses.replace(
            like, id=self.fresh.op_id(), primitive=eqn.primitive.name, eqn=eqn, inputs=tuple(operands),
            outputs=outputs, rule=ring.rule_of(eqn), key=equation_key(eqn),
        )  # fmt: skip
        self.added.append(op)
        self.like[op.id] = like.id
        return op


def _in_order(block: Block, added: Sequence[Op], replaced: Mapping[int, int]) -> Block:
    """The block with more operations, in an order in which everything is made before it is read, without dead ones."""
    ops = [reading(op, replaced) for op in (*block.ops, *added)]
    outputs = tuple(replaced.get(a, a) if isinstance(a, int) else a for a in block.outputs)
    maker = {v: op for op in ops for v in op.outputs}
    placed: dict[int, Op] = {}

    def place(op: Op) -> None:
        if op.id not in placed:
            for v in read_by(op):
                if v in maker:
                    place(maker[v])
            placed[op.id] = op

    for op in ops:
        place(op)
    return remove_dead(dataclasses.replace(block, ops=tuple(placed.values()), outputs=outputs))


def _sources(values: Sequence[int]) -> tuple[int, ...]:
    """Of each value the first place where it is."""
    return tuple(values.index(v) for v in values)
