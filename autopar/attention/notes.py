"""Texts of plans about attention: the kernel that runs it, what that gains, and what stands in the way of it."""

from __future__ import annotations

from typing import Any

from autopar.attention import ring
from autopar.attention.checks import score_products
from autopar.attention.kernels import Kernel
from autopar.attention.match import obstacle
from autopar.common import jax_compat
from autopar.common.text import text_of_bytes, text_of_part, text_of_s
from autopar.ir.graph import Op, OpGraph

# Rounding of weights in 16 bits: before or after they are divided by their sum (`autopar.attention.ring`).
_ROUNDING = (
    "in 16 bits weights are rounded before they are divided by their sum, not after it (Search(attention='as written') "
    "keeps the order)"
)


def attention_left(graph: OpGraph, kernel: Kernel) -> tuple[str, ...]:
    """The attention that a described graph still has as it is written, beside passes of a kernel, and the reason."""
    left = [op for op in score_products(graph) if op.role is graph.forward_role]
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
    found = (op for op in score_products(graph) if op.role is graph.forward_role)
    return [op for op in found if _nbytes(graph, *op.outputs) > _nbytes(graph, *op.inputs)]


def _nbytes(graph: OpGraph, *ids: Any) -> int:
    return sum(graph.values[i].nbytes for i in ids)


def chosen_note(kernel: Kernel, gain_s: float | None) -> str:
    """The choice of a kernel, for `gain_s` of computing in a step, or, where that is none, for its memory."""
    if gain_s is None:
        why = "as it is written, nothing was found that fits"
    elif gain_s > 0:
        why = f"computing takes {text_of_s(gain_s)} less of a step than by the operations as they are written"
    else:
        why = f"computing takes {text_of_s(-gain_s)} more of a step, which the memory that it saves is worth"
    return f"attention runs by {kernel.value}, which keeps no scores: {why}; {_ROUNDING}"
