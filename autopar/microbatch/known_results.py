"""Results of a scan that are known before the micro-batches, made by a scan of their own.

A loss that is summed over chunks of tokens is divided by a count that the same scan sums. The count comes of the batch
alone, but beside the loss it would be known after the last micro-batch only, and gradients need it in the first one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Set

from autopar.common.records import replaced
from autopar.ir.graph import Atom, Op, OpGraph, OpKind, read_by
from autopar.ir.rewrite import Fresh, clone
from autopar.microbatch.microbatch_analysis import is_heavy
from autopar.microbatch.part_of_results import part_of_results


def split_known_results(whole: OpGraph, part: OpGraph) -> tuple[OpGraph, OpGraph]:
    """Both graphs, of a whole batch and of a micro-batch, with such results made apart.

    Only results that an equation reads: what another loop reads, such as a mask that is kept for the backward pass,
    stays. Both graphs have the same operations before and after.
    """
    wanted = _wanted(whole)
    return (_with_parts(whole, wanted), _with_parts(part, wanted)) if wanted else (whole, part)


def _with_parts(graph: OpGraph, wanted: Mapping[int, frozenset[int]]) -> OpGraph:
    fresh, ops = Fresh(graph), []
    for op in graph.block.ops:
        ops += _apart(op, wanted[op.outputs[0]], fresh) if op.outputs and op.outputs[0] in wanted else [op]
    return dataclasses.replace(
        graph, values=tuple(fresh.values), block=dataclasses.replace(graph.block, ops=tuple(ops))
    )


def _apart(op: Op, known: frozenset[int], fresh: Fresh) -> list[Op]:
    """The scan of the known results, and that of the others; the operation itself where it cannot be taken apart."""
    apart = part_of_results(op, known)
    rest = part_of_results(op, [v for v in op.outputs if v not in known])
    if apart is None or rest is None:
        return [op]
    again = set(apart.outputs)  # what the others need too
    outputs = tuple(fresh.copy_of(v) if v in again else v for v in rest.outputs)
    return [replaced(clone(apart, {}, fresh), outputs=apart.outputs), replaced(rest, outputs=outputs)]


def _wanted(graph: OpGraph) -> dict[int, frozenset[int]]:
    """By the first result of a scan, its results that are known before the loop and that equations read."""
    known = set(graph.block.inputs)
    read = {a for op in graph.block.ops if op.kind is OpKind.EQUATION for a in op.inputs if isinstance(a, int)}
    wanted = {}
    for op in graph.block.ops:
        found = known_results(op, known)
        known |= found
        if op.kind is OpKind.SCAN and 0 < len(found) < len(op.outputs) and not read.isdisjoint(found):
            wanted[op.outputs[0]] = frozenset(found & read)
    return wanted


def known_results(op: Op, known: Set[int]) -> set[int]:
    """The results of an operation that are known where some values are, and cheap to make for the whole batch."""
    if op.kind is OpKind.BARRIER:
        return {v for a, v in zip(op.inputs, op.outputs, strict=True) if _is_known(a, known)}
    if op.kind is not OpKind.SCAN:
        return set(op.outputs) if not is_heavy(op) and all(v in known for v in read_by(op)) else set()
    (body,), k, n = op.blocks, op.num_consts, op.num_consts + op.num_carry
    carried = {i for i in range(op.num_carry) if _is_known(op.inputs[k + i], known)}
    others = {v for i, v in enumerate(body.inputs) if not k <= i < n and _is_known(op.inputs[i], known)}
    while True:
        inside = known | others | {body.inputs[k + i] for i in carried}
        for inner in body.ops:
            inside |= known_results(inner, inside)
        if all(_is_known(body.outputs[i], inside) for i in carried):
            break
        carried = {i for i in carried if _is_known(body.outputs[i], inside)}
    stacked = range(op.num_carry, len(op.outputs))
    return {op.outputs[i] for i in (*carried, *(j for j in stacked if _is_known(body.outputs[j], inside)))}


def _is_known(atom: Atom, known: Set[int]) -> bool:
    return not isinstance(atom, int) or atom in known
