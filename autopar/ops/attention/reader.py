"""Reads the equations of a block around scores of attention: polynomials, the values computed from scores, and the
terms that meet them.

A polynomial is a sum of numbers times powers of atoms; an atom is any tuple, whose first entry is its kind. The terms
are expressions of positions, numbers and arrays.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from scipy.cluster.hierarchy import DisjointSet

from autopar.common import jax_compat
from autopar.ir.graph import Atom, Block, Constant, Dimension, Op, OpGraph, OpKind, Value
from autopar.ops.attention.form import COMPARISONS, ELEMENTWISE, Expression, has_score

# Atoms with their powers, in order; a sum of such terms, each with a number.
Term = tuple[tuple[Any, int], ...]
Sum = dict[Term, float]
ONE: Term = ()
# Numbers are equal that differ by the rounding of the constants in a program.
RELATIVE_ERROR = 1e-5


def term_of(atoms: Sequence[tuple[Any, int]]) -> Term:
    """Atoms as a term: powers added up; what was chosen once is chosen."""
    powers: dict[Any, int] = {}
    for atom, n in atoms:
        powers[atom] = 1 if atom[0] == "chosen" else powers.get(atom, 0) + n
    return tuple(sorted(((a, n) for a, n in powers.items() if n), key=repr))


def add(one: Sum, other: Sum) -> Sum:
    out = dict(one)
    for term, number in other.items():
        total = out.get(term, 0.0) + number
        if abs(total) <= RELATIVE_ERROR * max(abs(number), abs(out.get(term, 0.0))):
            out.pop(term, None)
        else:
            out[term] = total
    return out


def scale(one: Sum, by: float) -> Sum:
    return {term: number * by for term, number in one.items()}


def multiply(one: Sum, other: Sum) -> Sum:
    out: Sum = {}
    for (a, x), (b, y) in itertools.product(one.items(), other.items()):
        out = add(out, {term_of((*a, *b)): x * y})
    return out


def power(one: Sum, n: int) -> Sum | None:
    """A power of a single term."""
    if len(one) != 1 or any(atom[0] == "chosen" for term in one for atom, _ in term):
        return None
    ((term, number),) = one.items()
    return {tuple((atom, power * n) for atom, power in term): number**n}


def equal(one: Sum, other: Sum) -> bool:
    return one.keys() == other.keys() and all(
        math.isclose(number, other[term], rel_tol=RELATIVE_ERROR) for term, number in one.items()
    )


# A label stands for what a dimension counts; those that meet in one operation are joined. None: of size one.
Label = int
Labels = tuple[Label, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Read:
    """What is known of a value that scores went into.

    `sum` is None where it is nothing that is understood. `tree` computes it of one product. A row's largest value and
    what is left of a tree when that is taken off are known as such, by the tree. `column`: the label of the keys where
    one more column stands behind them, a sink: in a sum its products are zero, and its weights those of the sink.
    """

    labels: Labels
    sum: Sum | None
    tree: Expression | None = None
    largest_of: Expression | None = None
    without_largest: Expression | None = None
    column: Label | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Factor:
    """An array as a factor of a product of matrices: `value` times the sums of rows in `scale`.

    `at`: the labels of the array's dimensions; `labels`: those of the product's operand, which may be moved.
    """

    value: Atom
    at: Labels
    labels: Labels
    scale: Sum


@dataclasses.dataclass(frozen=True, slots=True)
class Product:
    """Two arrays multiplied: the operation, the number of its atom, and the arrays with the labels of their
    dimensions.
    """

    op: Op
    number: int
    left: Factor
    right: Factor


@dataclasses.dataclass(frozen=True, slots=True)
class Use:
    """An array that is multiplied with what is known: `other` is the array, `at` its labels."""

    op: Op
    read: Read
    other: int
    at: Labels
    summed: Labels
    out: Labels


@dataclasses.dataclass(frozen=True, slots=True)
class Equals:
    """Values that are equal since equal equations make them of equal values: under `jax.checkpoint` some are computed
    again, or handed on by a barrier. `numbers` of values that have an earlier equal: that one.
    """

    numbers: Mapping[int, int]
    made: Mapping[tuple[object, ...], tuple[int, ...]]  # results by equations and the numbers of what they read

    def number(self, value: int) -> int:
        return self.numbers.get(value, value)

    def within(self, block: Block, outside: Mapping[int, int]) -> Equals:
        """With the values of a block, some of whose inputs are values of those around it."""
        numbers, made = dict(self.numbers), dict(self.made)
        numbers.update({v: numbers.get(outer, outer) for v, outer in outside.items()})
        for op in block.ops:
            if op.kind is OpKind.BARRIER:
                pairs = zip(op.inputs, op.outputs, strict=True)
                numbers.update({v: numbers.get(a, a) for a, v in pairs if isinstance(a, int)})
            elif op.kind is OpKind.EQUATION and op.key:
                operands = (numbers.get(a, a) if isinstance(a, int) else a.content for a in op.inputs)
                earlier = made.setdefault((op.key, *operands), op.outputs)
                if earlier is not op.outputs:
                    numbers.update(zip(op.outputs, earlier, strict=True))
        return Equals(numbers, made)


@dataclasses.dataclass(frozen=True, slots=True)
class Around:
    """What a block sees of those around it: what made their values, which of them its own inputs are, and which values
    are equal.
    """

    makers: Mapping[int, Op]
    outside: Mapping[int, int]
    equals: Equals = Equals({}, {})

    def within(self, block: Block) -> Around:
        """What the blocks of operations of a block see."""
        makers = {**self.makers, **{v: made for made in block.ops for v in made.outputs}}
        return Around(makers, self.outside, self.equals.within(block, self.outside))

    def inside(self, *ops: Op) -> Around:
        """What the bodies of scans see: what does not change from one round to the next."""
        outside = dict(self.outside)
        for op in ops:
            if op.kind is OpKind.SCAN:
                pairs = zip(op.inputs[: op.num_consts], op.blocks[0].inputs, strict=False)
                outside.update({inner: outer for outer, inner in pairs if isinstance(outer, int)})
        return Around(self.makers, outside, self.equals)


MOVES = frozenset({"broadcast_in_dim", "reshape", "squeeze", "expand_dims", "transpose", "copy"})


# Operations one behind the other that an expression has at most: a mask or a bias takes some ten. What is longer, such
# as a stream of activations with as many features as positions, is an array.
LONGEST = 64


class ArrayReader:
    """Reads arrays of one block by what made them. Dimensions have labels: those of the scores that they meet."""

    def __init__(self, block: Block, named: OpGraph, values: Sequence[Value], around: Around) -> None:
        """`values`: those of the described graph, and of what passes have added to it."""
        self.values, self.outside = values, around.outside
        self.makers = {**around.makers, **{v: op for op in block.ops for v in op.outputs}}
        self.own = {*block.inputs, *(v for op in block.ops for v in op.outputs)}
        self.constants = dict(zip(named.block.inputs, named.constants, strict=False))
        self.equals = around.equals.within(block, around.outside)
        self.first_here: dict[int, int] = {}
        for v in (*block.inputs, *(v for op in block.ops for v in op.outputs)):
            self.first_here.setdefault(self.equals.number(v), v)
        self._labels = DisjointSet()
        self._representative: list[Label] = []  # of the set that a root leads: the oldest of its labels
        self._parts: dict[Label, tuple[tuple[Label, int], ...]] = {}  # of dimensions that are others joined: with sizes
        self._of_parts: dict[Labels, Label] = {}
        self._steady: dict[int, bool] = {}

    # Labels

    def label(self) -> Label:
        label = len(self._representative)
        self._labels.add(label)
        self._representative.append(label)
        return label

    def of(self, label: Label) -> Label:
        found = self._representative[self._labels[label]]
        if (parts := self._parts.get(found)) is None:
            return found
        return self._of_parts.setdefault(tuple(self.of(x) for x, _ in parts), found)

    def all(self, labels: Labels) -> Labels:
        return tuple(map(self.of, labels))

    def flat(self, labels: Labels) -> Labels:
        """The labels, of joined dimensions those of their parts."""
        return tuple(itertools.chain.from_iterable(self.parts(x) for x in labels))

    def parts(self, label: Label) -> Labels:
        """The labels of a dimension's parts, or its own."""
        parts = self._parts.get(self._representative[self._labels[label]])
        return self.flat(tuple(x for x, _ in parts)) if parts else (self.of(label),)

    def join(self, one: Labels, other: Labels) -> Labels:
        for a, b in zip(one, other, strict=True):
            first, second = (self._representative[self._labels[x]] for x in (a, b))
            parts, others = self._parts.get(first), self._parts.get(second)
            self._labels.merge(a, b)
            self._representative[self._labels[a]] = min(first, second)
            if parts and others and [n for _, n in parts] == [n for _, n in others]:
                self.join(tuple(x for x, _ in parts), tuple(x for x, _ in others))
            if parts or others:
                self._parts[min(first, second)] = parts or others or ()
        return one

    def regrouped(self, labels: Labels, shape: Sequence[int], out: Sequence[int], splits: bool) -> Labels | None:
        """The labels of a reshape's result, which joins neighbours or takes them apart again; None where it does
        another thing, and of arrays without elements. `splits`: whether it may take apart a dimension that nothing
        joined.
        """
        if 0 in (*shape, *out):
            return None
        left = [pair for x, n in zip(labels, shape, strict=True) if n != 1 for pair in self._sized(x, n)][::-1]
        made = []
        for n in out:
            group: list[tuple[Label, int]] = []
            while math.prod(size for _, size in group) < n:
                missing = n // math.prod(size for _, size in group)
                if left and missing < left[-1][1] and left[-1][1] % missing == 0 and splits:
                    x, size = left.pop()
                    parts = (self.label(), missing), (self.label(), size // missing)
                    self._parts[self._representative[self._labels[x]]] = parts
                    left += parts[::-1]
                if not left or missing % left[-1][1]:
                    return None
                group.append(left.pop())
            made.append(self._joined(group) if group else self.label())
        return None if left else tuple(made)

    def sizes(self, label: Label, size: int) -> tuple[int, ...]:
        """The sizes of the parts of a dimension, or its own."""
        return (1,) if size == 1 else tuple(n for _, n in self._sized(label, size))

    def _sized(self, label: Label, size: int) -> list[tuple[Label, int]]:
        """The parts of a dimension of this size, with theirs."""
        parts = self._parts.get(self._representative[self._labels[label]])
        return [pair for x, n in parts for pair in self._sized(x, n)] if parts else [(self.of(label), size)]

    def _joined(self, parts: list[tuple[Label, int]]) -> Label:
        if len(parts) == 1:
            return parts[0][0]
        key = self.all(tuple(x for x, _ in parts))
        if key not in self._of_parts:
            self._of_parts[key] = self.label()
            self._parts[self._of_parts[key]] = tuple(parts)
        return self._of_parts[key]

    def shape(self, atom: Atom) -> tuple[int, ...]:
        return self.values[atom].shape if isinstance(atom, int) else atom.shape

    # Arrays

    def sum_of(self, atom: Atom, labels: Labels) -> Sum | None:
        number = self.number(atom)
        if number is not None:
            return {ONE: number} if number else {}
        tree = self.tree_of(atom, labels)
        return {((("other", self.settled(tree)), 1),): 1.0} if tree is not None else None

    def number(self, atom: Atom) -> float | None:
        """The number that a value is everywhere."""
        number = _number(atom)
        return self.filled(atom) if number is None and isinstance(atom, int) else number

    def filled(self, value: int) -> float | None:
        """The number that an array is filled with."""
        op = self.maker(value)
        if op is None or op.kind is not OpKind.EQUATION:
            return None
        if op.primitive in ("broadcast_in_dim", "reshape", "convert_element_type", "copy"):
            (source,) = op.inputs[:1]
            return self.number(source)
        aval = op.eqn.outvars[0].aval
        if op.primitive not in ("sqrt", "rsqrt") or np.dtype(aval.dtype).kind != "f":
            return None
        number = self.number(op.inputs[0])  # of a head's width, say
        if number is None or number <= 0:
            return None
        root = np.sqrt(np.asarray(number, aval.dtype))
        return float(root if op.primitive == "sqrt" else 1 / root)

    def tree_of(self, atom: Atom, labels: Labels, depth: int = 0) -> Expression | None:
        """An array that meets scores as an expression of positions, numbers and arrays that lack rows or keys.

        `depth`: the operations between it and the scores that are in the expression already.
        """
        if not isinstance(atom, int):
            number = _number(atom)
            return None if number is None else ("const", number, str(atom.literal.aval.dtype))
        atom = self.first(atom)
        value = self.values[atom]
        labels = labels if value.shape else ()
        if (number := self.filled(atom)) is not None:
            return ("const", number, value.dtype)
        if atom in self.outside:
            # Made of smaller arrays (segments, lengths), it is computed of them where it is read.
            found = self.tree_of(self.outside[atom], labels, depth)
            if found is not None and self.read_size(found) < value.size:
                return found
        op = self.makers.get(atom)
        large = sum(n != 1 for n in value.shape)
        positions = sum(Dimension.SEQUENCE in names for names in value.dimensions)
        if op is None or op.kind is not OpKind.EQUATION or depth >= LONGEST:
            return self.array(atom, labels)
        is_condition = op.primitive in COMPARISONS and any(self.number(a) is not None for a in op.inputs)
        if positions < 2 and large and not is_condition and not self.is_steady(atom):
            return self.array(atom, labels)
        found = self.expanded(op, labels, depth + 1)
        return found if found is not None else self.array(atom, labels)

    def read_size(self, tree: Expression) -> int:
        """The elements of the arrays that an expression reads."""
        return sum(self.values[value].size for value in {node[1] for node in nodes_of(tree) if node[0] == "array"})

    def array(self, value: int, labels: Labels) -> Expression:
        """An array as it was before its dimensions were moved: one of segments, say, that meets scores twice."""
        value = self.first(value)
        op = self.makers.get(value)
        if op is not None and op.kind is OpKind.EQUATION and op.primitive in MOVES:
            source, before = op.inputs[0], self.moved_back(op, labels)
            if isinstance(source, int) and before is not None:
                return self.array(source, before)
        earliest = value if value in self.own else self.equals.number(value)
        return self.counted_out(value, labels) or ("array", earliest, labels)

    def first(self, value: int) -> int:
        """The first array of the block that is computed as one of its values is."""
        return self.first_here[self.equals.number(value)] if value in self.own else value

    def maker(self, value: int) -> Op | None:
        """The operation that computes a value first, of this block or of one around it."""
        value = self.first(value)
        return self.makers.get(self.outside.get(value, value))

    def counted_out(self, value: int, labels: Labels) -> Expression | None:
        """A constant of the step that counts positions, or says of each two by their distance whether one sees the
        other, as an expression; None for others.
        """
        while value in self.outside:
            value = self.outside[value]
        if value not in self.constants:
            return None
        numbers = np.asarray(self.constants[value])
        large = [labels[d] for d, n in enumerate(numbers.shape) if n != 1]
        numbers = numbers.squeeze()
        if numbers.ndim == 1 and numbers.dtype == np.int32 and np.all(np.diff(numbers) == 1):
            return ("add", (), ("iota", large[0], "int32"), ("const", int(numbers[0]), "int32"))
        if numbers.ndim != 2 or numbers.dtype != bool or not np.array_equal(numbers[1:, 1:], numbers[:-1, :-1]):
            return None
        by_distance = np.concatenate([numbers[0, :0:-1], numbers[:, 0]])
        seen = np.flatnonzero(by_distance) - (numbers.shape[1] - 1)
        if seen.size == 0 or seen[-1] - seen[0] != seen.size - 1:
            return None
        distance = ("sub", (), *(("iota", label, "int32") for label in large))
        ends = (("ge", seen[0]), ("le", seen[-1]))
        return ("and", (), *((name, (), distance, ("const", int(end), "int32")) for name, end in ends))

    def expanded(self, op: Op, labels: Labels, depth: int) -> Expression | None:
        """An operation as an expression of what it reads; None where it is none of the simple ones."""
        name, params = op.primitive, op.eqn.params
        if name == "iota":
            d = params["dimension"]
            return ("iota", labels[d], str(op.eqn.outvars[0].aval.dtype)) if self.shape(op.outputs[0])[d] != 1 else None
        if name in MOVES:
            (source,) = op.inputs[:1]
            before = self.moved_back(op, labels)
            return self.tree_of(source, before, depth) if before is not None else None
        simple = name in ELEMENTWISE or name in ("convert_element_type", "integer_pow")
        if name == "div" and np.dtype(op.eqn.outvars[0].aval.dtype).kind not in "fV":
            simple = False
        if not simple or any(len(self.shape(a)) not in (0, len(labels)) for a in op.inputs):
            return None
        operands = [self.tree_of(a, labels if self.shape(a) else (), depth) for a in op.inputs]
        if any(o is None for o in operands):
            return None
        own = {"convert_element_type": "new_dtype", "integer_pow": "y"}.get(name)
        return (name, (_plain(params[own]),) if own else (), *operands)

    def moved_back(self, op: Op, labels: Labels) -> Labels | None:
        shape, out = self.shape(op.inputs[0]), self.shape(op.outputs[0])
        if op.primitive == "copy":
            return labels
        if op.primitive == "transpose":
            made = [0] * len(shape)
            for at, d in enumerate(op.eqn.params["permutation"]):
                made[d] = labels[at]
            return tuple(made)
        if op.primitive == "broadcast_in_dim":
            return tuple(
                labels[at] if shape[d] == out[at] else self.label()
                for d, at in enumerate(op.eqn.params["broadcast_dimensions"])
            )
        if [n for n in shape if n != 1] != [n for n in out if n != 1]:
            return None
        large = iter(x for x, n in zip(labels, out, strict=True) if n != 1)
        return tuple(next(large) if n != 1 else self.label() for n in shape)

    def is_steady(self, value: int) -> bool:
        """Whether an array is made of positions and numbers alone."""
        if value not in self._steady:
            op = self.maker(value)
            counts = self.counted_out(value, tuple(range(len(self.shape(value))))) is not None
            simple = op is not None and op.kind is OpKind.EQUATION and not op.blocks
            self._steady[value] = counts or (
                op is not None and simple and all(self.is_steady(a) for a in op.inputs if isinstance(a, int))
            )
        return self._steady[value]

    def settled(self, tree: Expression) -> Expression:
        """An expression with labels as they are joined by now."""
        match tree:
            case ("iota", label, dtype):
                return ("iota", self.of(label), dtype)
            case ("array", value, labels):
                shape = self.values[value].shape
                return ("array", value, tuple(self.of(x) if n != 1 else -1 for x, n in zip(labels, shape, strict=True)))
            case ("score", _) | ("const", _, _):
                return tree
            case (name, params, *operands):
                return (name, params, *map(self.settled, operands))
        raise AssertionError(f"no expression: {tree}")


def nodes_of(tree: Expression) -> Iterator[Expression]:
    yield tree
    if tree[0] not in ("score", "iota", "array", "const"):
        for operand in tree[2:]:
            yield from nodes_of(operand)


def _number(atom: Atom) -> float | None:
    """The number that a literal is."""
    if not isinstance(atom, Constant) or atom.shape:
        return None
    dtype = atom.literal.aval.dtype
    return None if jax_compat.is_key_dtype(dtype) else _plain(np.asarray(atom.literal.val).item())


def _plain(value: Any) -> Any:
    """A parameter as a number, or a type as its name."""
    return value if isinstance(value, (bool, int, float)) else str(np.dtype(value))


# The equations of a block as polynomials in the scores of attention.
#
# A value with scores is a sum of terms: numbers times powers of *atoms*. An atom is a product of queries
# and keys (or of the result's gradient and the values), the weights that softmax computes from one, a sum over a row,
# or any other factor of the scores.


class Reader(ArrayReader):
    """Reads the equations of one block in order."""

    def __init__(
        self, block: Block, named: OpGraph, products: Collection[int], values: Sequence[Value], around: Around
    ) -> None:
        """`products`: of scores whose attention is sought, in a described graph."""
        super().__init__(block, named, values, around)
        self.block, self.wanted = block, products
        self.known: dict[int, Read] = {}
        self.products: dict[int, Product] = {}
        self.pairs: dict[frozenset[object], int] = {}  # the atom's number of the product of two arrays
        self.uses: dict[int, Use] = {}  # by operation
        self.weights: dict[Expression, tuple[Labels, Label]] = {}  # labels of the scores, and that of the keys
        self.slopes: dict[Expression, Sum] = {}  # the scores' sums, by tree
        self.columns: dict[int, Read] = {}  # by columns of sinks that are cut off, the values that they are cut off
        self.extended: list[tuple[Expression, Sum]] = []  # scores with a sink behind them, and the sum of the scores
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
        elif reads and reads[0] is not None and reads[0].column is not None and (cut := self.cut(op, reads[0])):
            for v, is_column in zip(op.outputs, cut, strict=True):
                if is_column:
                    self.columns[v] = reads[0]
                else:
                    self.known[v] = Read(reads[0].labels, reads[0].sum)
        elif any(read is not None for read in reads):
            found = self.followed(op, reads) if len(op.outputs) == 1 else None
            if all(read is None or of_result(read) for read in reads):
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
        if read is not None and read.column is None and (found := self.scaled(read)) is not None:
            return found
        if read is not None and not of_result(read):
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
        if not isinstance(factor.value, int) or read.column is not None:
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
        if name in ("concatenate", "pad"):
            return self.extended_by_one(op, first) if first is not None and first.column is None else None
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
        column = next((r.column for r in reads if r is not None and r.column is not None), None)
        if column is not None and not self.goes_with_column(op, reads, labels, column):
            return None
        if name == "sub" and reads[0] is not None and reads[1] is not None and reads[1].largest_of is not None:
            if reads[0].without_largest is not None:  # once more, as it is zero now
                shifted = ("shifted", (), reads[0].without_largest)
                return dataclasses.replace(reads[0], labels=labels) if self.same(shifted, reads[1].largest_of) else None
            same = reads[0].tree is not None and self.same(reads[0].tree, reads[1].largest_of)
            return Read(labels, None, without_largest=reads[0].tree, column=column) if same else None
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
        return Read(labels, self.combined(name, params, sums, trees[0]), tree, column=column)

    # A sink: a number of each head, behind the scores of the keys, whose weight multiplies no value

    def extended_by_one(self, op: Op, read: Read) -> Read | None:
        """Scores with a sink behind them, or a gradient with a zero there; None for others."""
        params = op.eqn.params
        if op.primitive == "pad":
            added = [d for d, padding in enumerate(params["padding_config"]) if padding != (0, 0, 0)]
            if [params["padding_config"][d] for d in added] != [(0, 1, 0)] or self.number(op.inputs[1]) != 0:
                return None
            if not read.sum or not all(any(atom[0] == "product" for atom, _ in term) for term in read.sum):
                return None
            return Read(read.labels, read.sum, column=read.labels[added[0]])
        d = params["dimension"]
        if read.tree is None or not has_score(read.tree) or [self.shape(a)[d] for a in op.inputs[1:]] != [1]:
            return None
        sink = self.tree_of(op.inputs[1], tuple(self.label() if at == d else x for at, x in enumerate(read.labels)))
        if sink is None or sink[0] != "array":
            return None
        tree = ("sink", (), read.tree, sink)
        self.extended.append((tree, read.sum or {}))
        return Read(read.labels, None, tree, column=read.labels[d])

    def cut(self, op: Op, read: Read) -> tuple[bool, ...] | None:
        """Of each result of a slice or a split that parts keys and sink, whether it is the sink's; None for others."""
        params, shape = op.eqn.params, self.shape(op.inputs[0])
        if op.primitive == "split":
            cut, ends = [params["axis"]], list(itertools.accumulate(params["sizes"], initial=0))
        elif op.primitive == "slice" and params["strides"] is None:
            pairs = [*zip(params["start_indices"], params["limit_indices"], strict=True)]
            cut = [d for d, (pair, n) in enumerate(zip(pairs, shape, strict=True)) if pair != (0, n)]
            ends = list(pairs[cut[0]]) if cut else []
        else:
            return None
        if len(cut) != 1 or read.column is None or self.of(read.labels[cut[0]]) != self.of(read.column):
            return None
        keys = shape[cut[0]] - 1
        return {(0, keys, keys + 1): (False, True), (0, keys): (False,), (keys, keys + 1): (True,)}.get(tuple(ends))

    def goes_with_column(self, op: Op, reads: Sequence[Read | None], labels: Labels, column: Label) -> bool:
        """Whether each operand has a sink behind its keys, or one number for all of a row."""
        if self.of(column) not in labels:
            return False
        d = labels.index(self.of(column))
        return all(
            not self.shape(a)
            or self.shape(a)[d] == 1
            or self.number(a) is not None
            or (read is not None and (read.column is not None or _of_rows(read)))
            for a, read in zip(op.inputs, reads, strict=True)
        )

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
        return self.regrouped(labels, shape, out, splits=not of_result(read))

    def reduced(self, op: Op, read: Read) -> Read | None:
        axes = op.eqn.params["axes"]
        left = tuple(x for d, x in enumerate(read.labels) if d not in axes)
        axes = [d for d in axes if self.shape(op.inputs[0])[d] != 1]
        if not axes:
            return dataclasses.replace(read, labels=left)
        if op.primitive == "reduce_max" and read.without_largest is not None:
            keys = [key for tree, (_, key) in self.weights.items() if self.same(tree, read.without_largest)]
            is_row = self.all(tuple(read.labels[d] for d in axes)) in [(self.of(key),) for key in keys]
            same = is_row and (read.without_largest[0] == "sink") == (read.column is not None)
            return Read(left, None, largest_of=("shifted", (), read.without_largest)) if same else None
        if op.primitive == "reduce_max":
            if read.tree is None or len(axes) != 1 or not has_score(read.tree):
                return None
            has_sink = read.tree[0] == "sink"
            if has_sink != (read.column is not None and self.of(read.column) == self.of(read.labels[axes[0]])):
                return None
            labels, key = self.weights.setdefault(self.settled(read.tree), (read.labels, read.labels[axes[0]]))
            if self.all(labels) != self.all(read.labels) or self.of(key) != self.of(read.labels[axes[0]]):
                return None
            scores = next((sums for tree, sums in self.extended if has_sink and self.same(tree, read.tree)), read.sum)
            self.slopes[self.settled(read.tree)] = scores or {}
            return Read(left, None, largest_of=read.tree)
        if read.sum is None:
            return None
        return self.along(read, axes, left) if of_result(read) else self.row_sums(read, axes, left)

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
            if not products and (tree[0] == "sink") != (read.column is not None):
                return None
            key = self.of(self.weights[tree][1])
            column = key if read.column is None else self.of(read.column)
            if self.all(tuple(read.labels[d] for d in axes)) != (key,) or column != key:
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
        atoms = [(("weights", tree), 1), (("total", tree), 1)]
        return Read(read.labels, {term_of(atoms): 1.0}, column=read.column)

    def same(self, one: Expression, other: Expression) -> bool:
        return self.settled(one) == self.settled(other)


def _of_rows(read: Read) -> bool:
    """Whether a value is a number of each row of scores, made of sums over its keys."""
    return read.sum is not None and all(atom[0] in ("total", "along") for term in read.sum for atom, _ in term)


def of_result(read: Read) -> bool:
    """Whether a value is computed of a result of attention, or of one that is not divided by the sums of rows yet."""
    return any(atom[0] == "result" for term in read.sum or () for atom, _ in term)
