"""Notes on arrays that a recipe left whole, or split where its source does not, and the dimension that prevented it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from autopar.inter_op.staged import PlannedStage
from autopar.intra_op.spmd_candidate import SpmdCandidate
from autopar.ir.graph import Dimension, OpGraph, Purpose, Value
from autopar.ir.layout import Layout, replicated
from autopar.lowering.decisions import ShardingPlan
from autopar.sharding.binding import Binding
from autopar.sharding.constraints import Constraints

# Of the arrays of a note so many are named; those of repeated layers are one.
NAMED = 4
_NUMBER = re.compile(r"\d+")
_PIECE = re.compile(r"\d+|\D+")
_WEIGHTS = (Purpose.MATRIX, Purpose.MATRIX_COPY)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """A step, or a stage of one, with annotated values, and its decisions under a recipe's constraints."""

    graph: OpGraph
    arguments: Sequence[int]
    sharding: ShardingPlan
    constraints: Constraints


def bound_step(graph: OpGraph, candidate: SpmdCandidate, binding: Binding) -> Bound:
    """The step of one program."""
    _, constraints = binding.on(candidate.sharding.mesh.num_devices)
    return Bound(graph=graph, arguments=graph.block.inputs, sharding=candidate.sharding, constraints=constraints)


def bound_stages(stages: Iterable[PlannedStage], constraints: Constraints) -> list[Bound]:
    """The stages of a pipeline."""
    return [
        Bound(
            graph=planned.stage.graph,
            arguments=planned.stage.graph.block.inputs[: len(planned.stage.arguments)],
            sharding=planned.sharding,
            constraints=constraints,
        )
        for planned in stages
    ]


def recipe_notes(bounds: Sequence[Bound]) -> tuple[str, ...]:
    """A note for each axis and reason: arguments that stay whole although the recipe splits such arguments, and
    activations that are computed whole, or resharded between operations.
    """
    arrays_of: dict[tuple[str, str], dict[str, list[str]]] = {}
    noted: set[tuple[str, str]] = set()
    for bound in bounds:
        for axis, why, at, text in (*_whole_arguments(bound), *_given_up(bound)):
            if (axis, at) not in noted:
                noted.add((axis, at))
                arrays = arrays_of.setdefault((axis, why), {})
                arrays.setdefault(_NUMBER.sub("*", at) + text, []).append(at + text)
    return tuple(f"recipe, {axis}: {why}: {_listed(arrays)}" for (axis, why), arrays in arrays_of.items())


def _listed(arrays: Mapping[str, Sequence[str]]) -> str:
    texts = [texts[0] if len(texts) == 1 else f"{_starred(texts)} ({len(texts)}x)" for texts in arrays.values()]
    more = f", and {len(texts) - NAMED} more" if len(texts) > NAMED else ""
    return ", ".join(texts[:NAMED]) + more


def _starred(texts: Sequence[str]) -> str:
    """Texts that differ only in numbers as one text, with stars for the numbers."""
    pieces = zip(*(_PIECE.findall(text) for text in texts), strict=True)
    return "".join(at[0] if len(set(at)) == 1 else "*" for at in pieces)


_Note = tuple[str, str, str, str]  # axis, reason, what it is called, its shape and what of it matters


def _whole_arguments(bound: Bound) -> Iterator[_Note]:
    for v in bound.arguments:
        value = bound.graph.values[v]
        if value.size == 1 or value.rounded:  # each device takes its part of what does not divide
            continue
        layout = bound.sharding.reduced.get(v, replicated(len(value.shape)))
        for axis, (use, parts) in enumerate(zip(bound.constraints.axes, bound.sharding.mesh.axis_sizes, strict=True)):
            if parts > 1 and value.purpose in use.must_shard and axis not in layout.sharded_axes:
                reason = _reason(bound, value, layout, axis)
                if reason is not None:
                    yield (
                        f"{use.name} axis of {parts} devices",
                        reason[0],
                        value.name,
                        f" {list(value.shape)}{reason[1]}",
                    )


def _reason(bound: Bound, value: Value, layout: Layout, axis: int) -> tuple[str, str] | None:
    """The reason for an argument's not being split over an axis, and its dimensions; None: the
    recipe does not apply.
    """
    use, mesh = bound.constraints.axes[axis], bound.sharding.mesh
    parts = mesh.axis_sizes[axis]
    may = [d for d, n in enumerate(value.shape) if n > 1 and bound.constraints.may_split(use, value, d)]
    if not may:
        if value.purpose in _WEIGHTS and use.unnamed:
            return "matrices stay whole, whose dimensions are not known to be heads or widths inside of a layer", ""
        if value.purpose is Purpose.BATCH and Dimension.EXAMPLE in use.dimensions:
            return "parts of the batch stay whole, which are not known to hold examples (batch_axis)", ""
        return None
    if not any(value.shape[d] % (parts * mesh.size(layout.dims[d])) == 0 for d in may):
        sizes = ", ".join(f"dimension {d}: {value.shape[d]}" for d in may)
        return f"arrays stay whole, since {parts} does not divide what is to be split", f" ({sizes})"
    return "arrays stay whole, although they divide, since what reads them cannot be split so", ""


def _given_up(bound: Bound) -> Iterator[_Note]:
    relaxed, values = bound.sharding.relaxation, bound.graph.values
    if relaxed is None:
        return
    makers = {v: f"{op.place}/{op.primitive}".lstrip("/") for op in bound.graph.ops() for v in op.outputs}
    names = [
        f"{u.name} axis of {n} devices"
        for u, n in zip(bound.constraints.axes, bound.sharding.mesh.axis_sizes, strict=True)
    ]
    for v, axis in relaxed.whole:
        if values[v].purpose is Purpose.ACTIVATION and v in makers:
            why = "activations are computed whole, since the operations between them cannot be split so"
            yield names[axis], why, makers[v], f" {list(values[v].shape)}"
    for v in relaxed.cut:
        if v in makers:
            why = (
                "activations are gathered and cut anew, since what makes them and what reads them are split differently"
            )
            yield " and ".join(names), why, makers[v], f" {list(values[v].shape)}"
