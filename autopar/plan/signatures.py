"""Signatures of operations: the structure of the graph to which the decisions of a plan are bound.

Decisions name operations and values by number. Another version of autopar or JAX may number the operations of a graph
differently, and the decisions would apply to wrong operations without an error. Therefore a plan keeps a signature of
each decided operation: of its number, its computation, and the values that it reads and makes.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator

from autopar.ir.graph import Op, OpGraph
from autopar.plan.schema import SIGNATURE_DIGITS, Decisions


def signature(op: Op) -> str:
    """Digits that differ between the operations of a graph, and from the one with that number in another graph."""
    inputs = ",".join(str(a) if isinstance(a, int) else "literal" for a in op.inputs)
    text = f"{op.id} {op.kind.value} {op.primitive} {op.key} {inputs} {op.outputs} {op.trips}"
    return f"{zlib.crc32(text.encode()):08x}"[-SIGNATURE_DIGITS:]


def signatures(graph: OpGraph, decided: set[int]) -> str:
    """The signatures of these operations, in the order of their numbers."""
    of_op = {op.id: signature(op) for op in graph.ops() if op.id in decided}
    return "".join(of_op[number] for number in sorted(of_op))


def differing(decisions: Decisions, graph: OpGraph) -> Iterator[tuple[int, Op | None]]:
    """The numbers of decided operations that differ in the present graph, with the operations there."""
    ops = {op.id: op for op in graph.ops()}
    for i, number in enumerate(sorted({*decisions.of_op, *decisions.wires})):
        op = ops.get(number)
        if op is None or signature(op) != decisions.operations[i * SIGNATURE_DIGITS : (i + 1) * SIGNATURE_DIGITS]:
            yield number, op
