"""The decisions of a search as a plan records them, and back; signatures of the operations that they are bound to.

Decisions name operations and values by number. Another version of autopar or JAX may number the operations of a graph
differently, and the decisions would apply to wrong operations without an error. Therefore a plan keeps a signature of
each decided operation: of its number, its computation, and the values that it reads and makes.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator

from autopar.ir.graph import Op, OpGraph
from autopar.ir.layout import Layout, LogicalMesh
from autopar.ir.partial_sums import find_partials
from autopar.ir.strategies import Strategy
from autopar.lowering.lower import ShardingPlan, SolverReport
from autopar.plan.schema import SIGNATURE_DIGITS, Decisions


def decisions_of(plan: ShardingPlan, graph: OpGraph) -> Decisions:
    """The decisions for a graph as tables of numbers; `sharding_plan_of` is the inverse."""
    layouts: dict[Layout, int] = {}
    strategies: dict[Strategy, int] = {}

    def number(layout: Layout) -> int:
        return layouts.setdefault(layout, len(layouts))

    of_op = {op: strategies.setdefault(s, len(strategies)) for op, s in plan.strategy.items()}
    raw = {v: number(layout) for v, layout in plan.unreduced.items()}
    placed = {v: number(layout) for v, layout in plan.reduced.items()}
    copies = tuple((v, readers, number(layout)) for (v, readers), layout in plan.copies.items())
    wires = {op: number(layout) for op, layout in plan.transfer_layouts.items()}
    return Decisions(
        layouts=tuple(layouts),
        strategies=tuple(strategies),
        of_op=of_op,
        raw=raw,
        placed=placed,
        copies=copies,
        wires=wires,
        in_host=tuple(sorted(plan.in_host)),
        saved_in_host=tuple(sorted(plan.saved_in_host)),
        overlapped_axes=plan.overlapped_axes,
        operations=signatures(graph, {*of_op, *wires}),
    )


def sharding_plan_of(decisions: Decisions, report: SolverReport, mesh: LogicalMesh, graph: OpGraph) -> ShardingPlan:
    """The inverse of `decisions_of`."""
    layouts = decisions.layouts
    return ShardingPlan(
        mesh=mesh,
        strategy={op: decisions.strategies[i] for op, i in decisions.of_op.items()},
        partials=find_partials(graph),
        unreduced={v: layouts[i] for v, i in decisions.raw.items()},
        reduced={v: layouts[i] for v, i in decisions.placed.items()},
        copies={(v, readers): layouts[i] for v, readers, i in decisions.copies},
        report=report,
        transfer_layouts={op: layouts[i] for op, i in decisions.wires.items()},
        in_host=frozenset(decisions.in_host),
        saved_in_host=frozenset(decisions.saved_in_host),
        overlapped_axes=tuple(decisions.overlapped_axes),
    )


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
