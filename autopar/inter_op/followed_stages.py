"""The stages of a step that follows another one's: cut where the state of each stage is."""

from __future__ import annotations

import bisect

from autopar.errors import UnsupportedError
from autopar.inter_op.build_stages import MicrobatchedStep, layers_of_pieces
from autopar.inter_op.stage_choice import StageChoice
from autopar.ir.graph import OpGraph, Role, read_by
from autopar.ir.mesh import LogicalMesh
from autopar.plan.options import FollowedStages


def schedule_beside(followed: FollowedStages, graph: OpGraph) -> str:
    """Forward passes alone where the step has no backward pass, on the same groups; else the schedule of the other."""
    if any(op.role is Role.BACKWARD for op in graph.ops()):
        return followed.schedule
    return "inference-v" if followed.schedule == "zb-v" else "inference"


def followed_choice(
    microbatched: MicrobatchedStep, followed: FollowedStages, schedule: str, chunks: int
) -> StageChoice:
    """The stages of a followed plan for this step: each begins at the first layer that reads state of its own.

    Raises: UnsupportedError where the layers read the state in another order than that of the stages.
    """
    meshes = tuple(LogicalMesh(axis_sizes=sizes) for sizes in followed.group_axis_sizes)
    return StageChoice(
        schedule=schedule,
        chunks=chunks,
        first_layers=_first_layers(microbatched, followed, chunks),
        group_meshes=meshes,
        policies=("nothing",) * len(microbatched.layers),
    )


def _first_layers(microbatched: MicrobatchedStep, followed: FollowedStages, chunks: int) -> tuple[int, ...]:
    num_stages, stages_at = len(followed.group_axis_sizes) * chunks, _stages_at(microbatched, followed)
    if microbatched.step.parts > 1:  # cut at the parts of a scan
        first_layers = layers_of_pieces(microbatched)
        for layer, wanted in stages_at.items():
            reached = bisect.bisect_right(first_layers, layer) - 1
            for stage, path in wanted:
                if stage != reached:
                    raise _out_of_order(microbatched, path, stage, reached)
        return first_layers
    found = [0]
    for layer in sorted(stages_at):
        for stage, path in sorted(stages_at[layer]):
            reached = len(found) - 1
            if stage not in (reached, reached + 1) or (stage > reached and layer == found[-1]):
                raise _out_of_order(microbatched, path, stage, reached)
            if stage > reached:
                found.append(layer)
    if len(found) < num_stages:
        raise _out_of_order(microbatched, "state", num_stages - 1, len(found) - 1)
    return tuple(found)


def _stages_at(microbatched: MicrobatchedStep, followed: FollowedStages) -> dict[int, list[tuple[int, str]]]:
    """By layer: (stage, path) of each followed leaf, or slice of one, that the step reads and that lies there first."""
    graph, place = microbatched.graph, dict(followed.leaves)
    first, homes = len(graph.constants), microbatched.assignment.homes
    read = {v for op in graph.block.ops for v in read_by(op)}
    stages_at: dict[int, list[tuple[int, str]]] = {}
    for i, piece in enumerate(microbatched.step.arguments):
        if piece.leaf in place and graph.block.inputs[first + i] in read:
            value = place[piece.leaf]
            stage = value.stages[piece.part] if piece.parts > 1 else value.stage
            stages_at.setdefault(homes[first + i], []).append((stage, value.path))
    return stages_at


def _out_of_order(microbatched: MicrobatchedStep, what: str, stage: int, reached: int) -> UnsupportedError:
    name = microbatched.step.traced.name
    return UnsupportedError(
        where=f"{name}, plan",
        expected="layers that read the state in the order of the stages that it lies on",
        got=f"{what} on stage {stage}, read at stage {reached}",
        hint=f"leave plan out: {name} then plans for itself, and its calls move the state",
    )
