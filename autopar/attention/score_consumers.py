"""The uses of scores of attention: values computed from them, and their other factors."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from autopar.attention.form import Expression
from autopar.attention.polynomial import Sum
from autopar.ir.graph import Block, Op, OpKind

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
class Product:
    """Two arrays multiplied: the operation, and the labels of its operands' dimensions."""

    op: Op
    left: Labels
    right: Labels


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
