"""What is known of a step in one stage: the least memory of its devices, and what it would take in several stages."""

from __future__ import annotations

import dataclasses

from autopar.cost.cost_model import cost_model
from autopar.cost.usage import compute_times_s
from autopar.hardware.cluster import Cluster
from autopar.inter_op.build_stages import MicrobatchedStep, build
from autopar.inter_op.fit_stages import BuildLimits
from autopar.inter_op.stage_choice import StageChoice
from autopar.inter_op.staged import StagedStep
from autopar.inter_op.submeshes import part_of
from autopar.inter_op.truncated_model import TruncatedModel, estimate
from autopar.ir.graph import Section
from autopar.ir.mesh import LogicalMesh


def least_bytes(
    microbatched: MicrobatchedStep,
    choice: StageChoice,
    cluster: Cluster,
    time_limit_s: float,
    short: TruncatedModel | None = None,
) -> int:
    """Bytes that each device needs for a choice of one stage even if every value is split over all devices; 0 for a
    cluster of several kinds, whose devices do not hold equal parts. By an estimate, where the step has a shorter form.

    What is lost between values does not count, nor what may lie in vector memory, if it is split.
    """
    if cluster.parts:
        return 0
    alone = dataclasses.replace(choice, group_meshes=(LogicalMesh(axis_sizes=(1,)),), terms=(), over_limit=())
    # What takes longer than nothing is not decided again to fit.
    limits = BuildLimits(
        limit_bytes=cluster.num_devices * cluster.device.memory_bytes, time_limit_s=time_limit_s, to_beat_s=0.0
    )
    one_device = part_of(cluster, 1)
    found = None if short is None else estimate(short, alone, one_device, limits)
    if found is not None:
        live_bytes = found.peak_bytes[0] - found.lost_bytes
    else:
        built = build(microbatched, alone, one_device, limits)
        live_bytes = built.peak_bytes[0] - built.lost_at_peak_bytes(0)
    vector_bytes = cost_model(one_device, alone.group_meshes[0]).compiler.vector_memory_bytes
    return max(0, -(-live_bytes // cluster.num_devices) - vector_bytes)


def least_in_turn_s(staged: StagedStep, most_devices: int) -> float:
    """Seconds that the one stage of a step takes at least as several, of at most so many devices each, in one
    micro-batch: these run their forward passes one after another. Communication and work done twice are left out.
    """
    (planned,) = staged.stages
    graph, num_devices = planned.stage.graph, planned.model.links.mesh.num_devices
    strategy, section = planned.sharding.strategy, {op.id: op.section for op in graph.ops()}
    shared_s = forward_s = 0.0
    for op, seconds in compute_times_s(graph, planned.lowered.lowered, planned.model).items():
        op_s = seconds * (strategy[op].split if op in strategy else 1) / num_devices
        shared_s += op_s
        forward_s += op_s if section[op] is Section.FORWARD else 0.0
    return shared_s + forward_s * (num_devices / most_devices - 1)
