"""The stages of a step that follows another one's: cut where the state of each stage is."""

from __future__ import annotations

from autopar.errors import UnsupportedError
from autopar.inter_op.build_stages import MicrobatchedStep
from autopar.inter_op.stage_choice import StageChoice
from autopar.ir.graph import OpGraph, Role, read_by
from autopar.ir.mesh import LogicalMesh
from autopar.passes.assign_layers import assign_layers
from autopar.plan.options import FollowedStages


def schedule_beside(followed: FollowedStages, graph: OpGraph) -> str:
    """Forward passes alone where the step has no backward pass, else the schedule of the other step."""
    has_backward = any(op.role is Role.BACKWARD for op in graph.ops())
    return followed.schedule if has_backward else "inference"


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
    graph = microbatched.graph
    num_stages, first = len(followed.group_axis_sizes) * chunks, len(graph.constants)
    homes = assign_layers(graph, microbatched.layers).homes
    read = {v for op in graph.block.ops for v in read_by(op)}
    place = dict(followed.leaves)
    stages_at: dict[int, list[tuple[int, str]]] = {}
    for i, leaf in enumerate(microbatched.leaves):
        value = graph.block.inputs[first + i]
        if leaf in place and value in read:
            stages_at.setdefault(homes[first + i], []).append((place[leaf].stage, place[leaf].path))
    first_layers = [0]
    for layer in sorted(stages_at):
        for stage, path in sorted(stages_at[layer]):
            reached = len(first_layers) - 1
            if stage not in (reached, reached + 1) or (stage > reached and layer == first_layers[-1]):
                raise _out_of_order(microbatched, path, stage, reached)
            if stage > reached:
                first_layers.append(layer)
    if len(first_layers) < num_stages:
        raise _out_of_order(microbatched, "state", num_stages - 1, len(first_layers) - 1)
    return tuple(first_layers)


def _out_of_order(microbatched: MicrobatchedStep, what: str, stage: int, reached: int) -> UnsupportedError:
    name = microbatched.step.traced.name
    return UnsupportedError(
        where=f"{name}, follow",
        expected="layers that read the state in the order of the stages that it lies on",
        got=f"{what} on stage {stage}, read at stage {reached}",
        hint=f"leave follow out: {name} then plans for itself, and its calls move the state",
    )
