"""Cheap values are computed again in each section that reads them, instead of once before the loop.

Masks, positions, and constants broadcast over the batch cost next to nothing inside the kernels that read them.
Computed before the first micro-batch, they would occupy memory through the whole step, as much as the activations that
they are added to. So would what is larger than the part of the batch that it is made of: labels as one of 0 and 1 for
each class.

Half-precision copies of parameters take one pass over memory and occupy memory through the whole step as well. Where
memory is short, they too may be computed again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from msgspec.structs import replace

from autopar.ir.graph import Atom, Op, OpGraph, OpKind, Section, read_by
from autopar.ir.rewrite import Fresh, clone, missing, reading, renumbered

# Elementwise operations and those that make or lay out values: what compilers compute again rather than keep.
_CHEAP = frozenset({
    "iota", "broadcast_in_dim", "reshape", "squeeze", "expand_dims", "transpose", "convert_element_type", "copy",
    "eq", "ne", "lt", "le", "gt", "ge", "and", "or", "not", "xor", "add", "sub", "mul", "neg", "max", "min", "select_n",
    "slice", "rem", "sign", "abs", "integer_pow", "square", "stop_gradient", "full", "concatenate", "rev", "pad",
    "clamp",
})  # fmt: skip


def sink_cheap_ops(graph: OpGraph, *, of_state: bool = False) -> OpGraph:
    """The graph with cheap operations in the sections that read them: those on constants, those on the batch that
    enlarge it, and with `of_state` those on the state.
    """
    cheap = _cheap(graph, _state(graph) if of_state else frozenset()) | _enlarged(graph)
    if not cheap:
        return graph
    fresh = Fresh(graph)
    names: dict[Section, dict[int, int]] = {}
    rows: list[Op] = []
    for op in graph.block.ops:
        if op.section.repeats:
            known = names.setdefault(op.section, {})
            for made in (each for value in read_by(op) for each in missing(value, cheap, known)):
                count = made.count * graph.num_microbatches
                rows.append(replace(clone(made, known, fresh), section=op.section, count=count))
            op = reading(op, known)
        rows.append(op)
    return renumbered(
        dataclasses.replace(
            graph,
            values=tuple(fresh.values),
            block=replace(graph.block, ops=_without_unread(rows, graph.block.outputs, cheap)),
        )
    )


def copies_state(graph: OpGraph) -> bool:
    """Whether anything is made of the state once that could be made in each micro-batch, in which it is read."""
    return copied_bytes(graph) > 0


def copied_bytes(graph: OpGraph) -> int:
    """Bytes of what is made of the state once and could be made in each micro-batch: so much less memory at most is
    needed where it is, by the same decisions.
    """
    copies = _cheap(graph, _state(graph)).keys()
    read = {v for op in graph.block.ops if op.section.repeats for v in copies & read_by(op)}
    return sum(graph.values[v].nbytes for v in read)


def _state(graph: OpGraph) -> frozenset[int]:
    """The arguments of a step without the batch."""
    return frozenset(v for position, v in enumerate(graph.block.inputs) if position not in graph.batch)


def _cheap(graph: OpGraph, given: frozenset[int]) -> dict[int, Op]:
    """The operation of each value that cheap operations before the loop compute from arguments and constants."""
    cheap: dict[int, Op] = {}
    for op in graph.block.ops:
        is_cheap = op.section is Section.BEFORE and op.kind is OpKind.EQUATION and op.primitive in _CHEAP
        if is_cheap and all(not isinstance(a, int) or a in cheap or a in given for a in op.inputs):
            cheap.update(dict.fromkeys(op.outputs, op))
    return cheap


def _enlarged(graph: OpGraph) -> dict[int, Op]:
    """The operations of values that repeated sections read, and that cheap operations make before the loop of less: of
    parts of the batch, and of what else there is but the state. With the operations on the way there.
    """
    batch, of_state, others = {graph.block.inputs[p] for p in graph.batch}, set(_state(graph)), set[int]()
    for op in graph.block.ops:
        if op.section is Section.BEFORE and not of_state.isdisjoint(read_by(op)):
            of_state.update(op.outputs)
        elif op.section is Section.BEFORE and (op.kind is not OpKind.EQUATION or op.primitive not in _CHEAP):
            others.update(op.outputs)
    cheap, parts = _cheap(graph, frozenset(batch | others)), {v: frozenset({v}) for v in batch | others}
    for v, op in cheap.items():
        parts[v] = frozenset().union(*(parts.get(a, frozenset()) for a in read_by(op)))
    size = {v: sum(graph.values[part].nbytes for part in of) for v, of in parts.items()}
    read = {v for op in graph.block.ops if op.section.repeats for v in cheap.keys() & read_by(op)}
    found: dict[int, Op] = {}
    waiting = [v for v in read if parts[v] and graph.values[v].nbytes > size[v]]
    while waiting:
        v = waiting.pop()
        if v in cheap and v not in found:
            found[v] = cheap[v]
            waiting += read_by(cheap[v])
    return found


def _without_unread(rows: list[Op], outputs: tuple[Atom, ...], cheap: Mapping[int, Op]) -> tuple[Op, ...]:
    """The operations without the cheap ones, made before the loop, that nobody reads any more."""
    live = {a for a in outputs if isinstance(a, int)}
    kept: list[Op] = []
    for op in reversed(rows):
        sunk_away = op.section is Section.BEFORE and not op.blocks and any(v in cheap for v in op.outputs)
        if not sunk_away or live.intersection(op.outputs):
            kept.append(op)
            live.update(read_by(op))
    return tuple(reversed(kept))
