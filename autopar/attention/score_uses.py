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
class Around:
    """What a block sees of those around it: what made their values, and which of them its own inputs are."""

    makers: Mapping[int, Op]
    outside: Mapping[int, int]

    def inside(self, block: Block, op: Op) -> Around:
        """What the body of a scan sees: what does not change from one round to the next."""
        outside = dict(self.outside)
        if op.kind is OpKind.SCAN:
            pairs = zip(op.inputs[: op.num_consts], op.blocks[0].inputs, strict=False)
            outside.update({inner: outer for outer, inner in pairs if isinstance(outer, int)})
        return Around({**self.makers, **{v: made for made in block.ops for v in made.outputs}}, outside)
