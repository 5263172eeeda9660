"""The least time of a pipeline in a number of micro-batches, from its operations alone."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from autopar.cost.cost_model import NodeCosts, cost_model
from autopar.cost.least_time import in_turn_s
from autopar.hardware.cluster import Cluster
from autopar.inter_op.build_stages import MicrobatchedStep
from autopar.inter_op.handing_out import least_handed_out_s
from autopar.inter_op.search_space import chunk_numbers, schedules_of
from autopar.ir.graph import OpGraph, Section
from autopar.ir.mesh import LogicalMesh
from autopar.plan.options import PlanRequest
from autopar.solver import Schedule, Stage, StageOption, StageProblem, step_time_s


def least_pipeline_s(microbatched: MicrobatchedStep, cluster: Cluster, request: PlanRequest) -> float:
    """Seconds of a pipeline of this step in two stages or more at least, whatever these and its decisions.

    All devices share every operation evenly, but each runs its kernels, which take their time however small they are;
    nothing is sent, and the stages take equally long, which by the model of their schedule is the least. Nor are tasks
    handed out faster than a process can.
    """
    if cluster.parts:
        return 0.0
    graph = microbatched.graph
    m, seconds = graph.num_microbatches, _shared_s(graph, cluster)
    forward_s, backward_s = seconds[Section.FORWARD] / m, seconds[Section.BACKWARD] / m
    has_backward, least_s = backward_s > 0, math.inf
    for name in schedules_of(request, cluster):
        for chunks in chunk_numbers(request, name, len(microbatched.layers)):
            for groups in _numbers_of_groups(name, len(microbatched.layers) // chunks, m, cluster.num_devices):
                stages_s = _equal_stages_s(name, groups, chunks, m, forward_s, backward_s)
                handed_s = least_handed_out_s(cluster, groups * chunks, m, has_backward=has_backward)
                least_s = min(least_s, max(stages_s, handed_s))
    return least_s


def _shared_s(graph: OpGraph, cluster: Cluster) -> dict[Section, float]:
    """Seconds of the operations of each section in a step, each shared by all devices."""
    costs = NodeCosts(graph, cost_model(cluster, LogicalMesh(axis_sizes=(cluster.num_devices,))))
    seconds = dict.fromkeys(Section, 0.0)
    for op in graph.block.ops:
        seconds[op.section] += in_turn_s([op], lambda each: costs.shared_s(each, cluster.num_devices))
    return seconds


def _numbers_of_groups(name: str, most: int, num_microbatches: int, num_devices: int) -> Iterator[int]:
    """Groups of devices, two or more, of which a schedule has a stage or several each."""
    match Schedule(name):
        case Schedule.ZB_H1 | Schedule.ZB_1P:
            most = min(most, num_microbatches)
        case Schedule.ZB_H2 | Schedule.ZB_2P:
            most = min(most, (num_microbatches + 1) // 2)
    for groups in range(2, min(most, num_devices) + 1):
        if name != Schedule.INTERLEAVED or num_microbatches % groups == 0:
            yield groups


def _equal_stages_s(
    name: str, groups: int, chunks: int, num_microbatches: int, forward_s: float, backward_s: float
) -> float:
    num_stages, none = groups * chunks, np.zeros(groups * chunks)
    option = StageOption(
        num_devices=1,
        forward_s=none + forward_s / num_stages,
        backward_s=none + backward_s / num_stages,
        weight_s=none + backward_s / num_stages,  # may all be put off
        once_s=none,
        state_bytes=none,
        saved_bytes=none,
        working_bytes=none,
        send_s=none,
    )
    problem = StageProblem(
        options=(option,),
        num_devices=groups,
        num_layers=num_stages,
        num_microbatches=num_microbatches,
        schedule=Schedule(name),
        limit_bytes=0,
        host_devices=groups,
        chunks=chunks,
    )
    return step_time_s(problem, [Stage(first=q, last=q + 1, option=0) for q in range(num_stages)])
