"""Examples that devices do not divide, split unevenly: of 13 over 8 devices six have two, one has one and one has none.

XLA splits a dimension unevenly inside of a program and masks what is beyond its end. A device then works on as many
rows as the largest part has: what is split, and what it costs, follows from the number of examples rounded up. Arrays
keep their shapes, and so do the values; an operation that cannot be split so reads its operands whole.

Arguments and results of a program divide evenly, by jax's rule: those that do not are whole on each device.
"""

from __future__ import annotations

import dataclasses

from msgspec.structs import replace

from autopar.ir.graph import Atom, Block, Dimension, Factor, FactorKind, Op, OpGraph, OpKind, Rule
from autopar.ir.primitives import COMBINING, IN_EQUAL_PARTS
from autopar.ir.semantics import annotate_semantics
from autopar.ops.kernels.grouped import is_grouped
from autopar.ops.kernels.local import runs_locally

# What makes the rows of examples one by one, of parts of any size.
_BY_ROWS = (
    IN_EQUAL_PARTS
    | COMBINING
    | frozenset({
        "argmax", "argmin", "broadcast_in_dim", "concatenate", "cumlogsumexp", "cummax", "cummin", "cumprod", "cumsum",
        "dot_general", "dynamic_slice", "dynamic_update_slice", "expand_dims", "iota", "pad", "reduce_sum",
        "reduce_window_max", "reduce_window_sum", "reshape", "rev", "select_and_gather_add", "select_and_scatter_add",
        "slice", "sort", "split", "squeeze", "top_k", "transpose",
    })
)  # fmt: skip
# What sums or compares examples: XLA masks what is beyond the end, and zeros that are filled in change nothing.
_REDUCING = COMBINING | {"conv_general_dilated", "dot_general", "reduce_sum", "scatter-add"}


def round_examples(graph: OpGraph, parts: int) -> OpGraph:
    """The graph with its examples rounded up to what `parts` divides, where they may be split unevenly; the graph as it
    is, where they divide or are fewer.
    """
    examples = _num_examples(graph)
    if examples % parts == 0 or examples < parts:
        return graph
    return _Rounding(graph, examples, -(-examples // parts) * parts).run()


def _num_examples(graph: OpGraph) -> int:
    """The number of examples of a batch; 0 where its leaves have none, or several numbers."""
    leaves = [graph.values[graph.block.inputs[i]] for i in graph.batch]
    sizes = {v.shape[v.example_dim] for v in leaves if v.example_dim is not None}
    return sizes.pop() if len(sizes) == 1 else 0


class _Rounding:
    """`counting[v]` are the dimensions of a value that count the examples, each one of them once."""

    def __init__(self, graph: OpGraph, examples: int, rounded: int) -> None:
        self.graph, self.examples, self.rounded = graph, examples, rounded
        counted = frozenset({Dimension.EXAMPLE})
        self.counting = {
            v.id: frozenset(
                d
                for d, (n, names) in enumerate(zip(v.shape, v.dimensions, strict=True))
                if (n, names) == (examples, counted)
            )
            for v in annotate_semantics(graph).values
        }

    def run(self) -> OpGraph:
        values = tuple(
            replace(v, rounded=tuple(self.rounded if d in dims else n for d, n in enumerate(v.shape))) if dims else v
            for v in self.graph.values
            for dims in (self.counting[v.id],)
        )
        return dataclasses.replace(self.graph, values=values, block=self.block(self.graph.block))

    def block(self, block: Block) -> Block:
        return replace(block, ops=tuple(self.op(op) for op in block.ops))

    def op(self, op: Op) -> Op:
        if op.blocks:
            op = replace(op, blocks=tuple(self.block(b) for b in op.blocks))
        if op.kind is not OpKind.EQUATION or op.rule is None:
            return op
        split = {f for f in range(len(op.rule.factors)) if self.may_split(op, op.rule, f)}
        if not split:
            return op
        factors = tuple(
            Factor(f.size, f.kind, self.rounded) if i in split else f for i, f in enumerate(op.rule.factors)
        )
        return replace(op, rule=replace(op.rule, factors=factors), key=f"{op.key} of {self.rounded}: {sorted(split)}")

    def may_split(self, op: Op, rule: Rule, f: int) -> bool:
        """Whether a factor counts the examples wherever it occurs, and the operation may have it split unevenly."""
        kind = rule.factors[f].kind
        if rule.factors[f].size != self.examples or not self.is_taken(op, kind):
            return False
        places = [
            (atom, d, factors) for atom, d, factors in rule.factored_dims((*op.inputs, *op.outputs)) if f in factors
        ]
        return all(factors == (f,) and self.counts(atom, d) for atom, d, factors in places)

    def counts(self, atom: Atom, d: int) -> bool:
        return isinstance(atom, int) and d in self.counting[atom]

    def is_taken(self, op: Op, kind: FactorKind) -> bool:
        if op.eqn is None or op.rule is None or runs_locally(op.eqn) or is_grouped(op.eqn):
            return False  # each device's part is made by hand
        if op.primitive in IN_EQUAL_PARTS and any(v.aval.dtype.name.startswith("key<") for v in op.eqn.invars):
            return False  # there is no zero among random keys
        if kind is FactorKind.PASS:
            return op.primitive in _BY_ROWS or self.is_by_elements(op, op.rule)
        return kind in (FactorKind.SUM, FactorKind.EXTREMUM) and op.primitive in _REDUCING

    def is_by_elements(self, op: Op, rule: Rule) -> bool:
        """Whether each element of the results is made of the same elements of the operands, by the rule."""
        described = zip((*op.inputs, *op.outputs), (*rule.operands, *rule.results), strict=True)
        arrays = [dims for atom, dims in described if isinstance(atom, int) and self.graph.values[atom].shape]
        if len({len(dims) for dims in arrays}) != 1 or any(f.kind is not FactorKind.PASS for f in rule.factors):
            return False
        return all(len({factors for factors in at if factors}) <= 1 for at in zip(*arrays, strict=True))
