"""The arguments and results of a step, with their layouts, as a plan records them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from autopar.errors import UnsupportedError
from autopar.ir.graph import HOST, UNREDUCED, OpGraph
from autopar.ir.layout import replicated
from autopar.ir.traced_step import TracedStep
from autopar.lowering.instructions import LoweredBlock, Place
from autopar.passes.split_scan import LeafSlice
from autopar.plan.schema import PlannedValue
from autopar.search.inter_op.staged import StagedStep


def planned_values(
    traced: TracedStep, graph: OpGraph, lowered: LoweredBlock
) -> tuple[list[PlannedValue], list[PlannedValue]]:
    """(arguments, constants first; results) with their layouts."""
    places = [(0, place) for place in lowered.entries()]
    result_places = [(0, place) if place is not None else None for place in lowered.outputs]
    num_constants = len(lowered.inputs) - len(traced.in_avals)
    arguments = _arguments(graph, num_constants, places)
    return arguments, _results(traced, result_places)


def staged_values(
    traced: TracedStep, staged: StagedStep, places: Mapping[int, PlannedValue] | None = None
) -> tuple[list[PlannedValue], list[PlannedValue]]:
    """(arguments, constants first; results) of a pipeline, each on its first stage.

    Leaves that no stage reads stay where `places` has them, by number.

    Raises: UnsupportedError where the slices of a leaf cannot form one array.
    """
    program, graph, step = staged.staged, staged.graph, staged.step
    first_constant = len(graph.constants)
    argument_places: dict[int, _Placed] = {}
    for position, b in zip(program.arguments, program.pipeline.inputs, strict=True):
        argument_places.setdefault(position, (program.stage_of[b], program.key_of[b][1]))
    result_places = {
        position: (program.stage_of[b], program.key_of[b][1])
        for position, b in zip(program.results, program.pipeline.outputs, strict=True)
    }
    arguments = _arguments(graph, first_constant, [argument_places.get(p) for p in range(len(graph.block.inputs))])
    results = _results(step.traced, [result_places.get(p) for p in range(len(step.traced.out_avals))])
    read = {step.arguments[p - first_constant].leaf for p in argument_places if p >= first_constant}
    for i, piece in enumerate(step.arguments, first_constant):
        at = None if piece.leaf in read else (places or {}).get(piece.leaf)
        if at is not None:
            stage = at.stages[piece.part] if at.stages else at.stage
            arguments[i] = dataclasses.replace(arguments[i], layout=at.layout, stage=stage, in_host=at.in_host)
    leaves = leaves_of_pieces(arguments[first_constant:], step.arguments, traced.in_paths)
    whole_results = leaves_of_pieces(results, step.results, traced.out_paths)
    return [*arguments[:first_constant], *leaves], whole_results


_Placed = tuple[int, Place]  # stage and place; None for what is the same everywhere


def _arguments(graph: OpGraph, num_constants: int, placed: Sequence[_Placed | None]) -> list[PlannedValue]:
    rows = []
    for position, (v, stage_and_place) in enumerate(zip(graph.block.inputs, placed, strict=True)):
        value, kind = graph.values[v], kind_of_argument(graph, position, num_constants)
        rows.append(_planned(value.name, value.shape, value.dtype, value.size * value.itemsize, kind, stage_and_place))
    return rows


def _results(traced: TracedStep, placed: Sequence[_Placed | None]) -> list[PlannedValue]:
    rows = zip(traced.out_paths, traced.out_avals, placed, strict=True)
    return [_planned(path, tuple(aval.shape), str(aval.dtype), 0, "result", at) for path, aval, at in rows]


def _planned(
    path: str, shape: tuple[int, ...], dtype: str, nbytes: int, kind: str, placed: _Placed | None
) -> PlannedValue:
    stage, (layout, state) = placed or (0, (replicated(len(shape)), UNREDUCED))
    return PlannedValue(
        path=path,
        shape=shape,
        dtype=dtype,
        nbytes=nbytes,
        kind=kind,
        layout=layout,
        stage=stage,
        in_host=state == HOST,
    )


def leaves_of_pieces(
    values: Sequence[PlannedValue], pieces: Sequence[LeafSlice], paths: Sequence[str]
) -> list[PlannedValue]:
    """The leaves of which the values are slices, in order.

    Raises: UnsupportedError where the slices of a leaf differ in layout or share a stage.
    """
    slices_of: dict[int, list[PlannedValue]] = {}
    for value, piece in zip(values, pieces, strict=True):
        slices_of.setdefault(piece.leaf, []).append(value)
    out = []
    for leaf, parts in slices_of.items():
        first = parts[0]
        if len(parts) == 1:
            out.append(first)
            continue
        stages = tuple(part.stage for part in parts)
        if len({part.layout for part in parts}) > 1 or len(set(stages)) < len(stages):
            raise UnsupportedError(
                where=paths[leaf],
                expected="a part of it on each stage, all in one layout",
                got=", ".join(f"{part.layout} on stage {part.stage}" for part in parts),
                hint="use another number of stages, or write the layers out in a Python loop",
            )
        out.append(
            dataclasses.replace(
                first,
                path=paths[leaf],
                shape=(len(parts) * first.shape[0], *first.shape[1:]),
                nbytes=len(parts) * first.nbytes,
                stages=stages,
            )
        )
    return out


def kind_of_argument(graph: OpGraph, position: int, first_argument: int) -> str:
    if position < first_argument:
        return "constant"
    if position in graph.donated:
        return "state"
    return "batch" if position in graph.batch else "other"
