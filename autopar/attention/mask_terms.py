"""What scores of attention are read with: polynomials, the values computed from scores, and the terms that meet them.

A polynomial is a sum of numbers times powers of atoms; an atom is any tuple, whose first entry is its kind. The terms
are expressions of positions, numbers and arrays.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from scipy.cluster.hierarchy import DisjointSet

from autopar.attention.form import COMPARISONS, ELEMENTWISE, Expression
from autopar.common import jax_compat
from autopar.ir.graph import Atom, Block, Constant, Dimension, Op, OpGraph, OpKind, Value

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
    what is left of a tree when that is taken off are known as such, by the tree.
    """

    labels: Labels
    sum: Sum | None
    tree: Expression | None = None
    largest_of: Expression | None = None
    without_largest: Expression | None = None


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
