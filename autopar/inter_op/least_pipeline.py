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
from autopar.inter_op.search_space import chunk_numbers, schedules_of, submesh_sizes
from autopar.ir.graph import Section
from autopar.ir.mesh import LogicalMesh
from autopar.plan.options import PlanRequest
from autopar.solver import Schedule, StageOption, StageProblem, best_stages


def least_pipeline_s(
    microbatched: MicrobatchedStep, cluster: Cluster, request: PlanRequest, under_s: float = math.inf
) -> float:
    """Seconds of a pipeline of this step in two stages or more at least, whatever its decisions; `under_s` where no
    pipeline takes less than that.

    It is the best division into stages by the tables, were no memory short, nothing sent, and every operation of a
    stage shared evenly by the devices of it, each of which runs its kernels, which take their time however small they
    are. Nor are tasks handed out faster than a process can.
    """
    if cluster.parts:
        return 0.0
    problems = tuple(_problems(microbatched, cluster, request))
    if not problems:
        return math.inf
    m, has_backward = problems[0].num_microbatches, any(o.backward_s.any() for o in problems[0].options)
    handed_s = least_handed_out_s(cluster, 2, m, has_backward=has_backward)
    if handed_s >= under_s:
        return under_s
    return max(handed_s, min(answer.bound_s for answer in best_stages(problems, under_s=under_s)))


def _problems(microbatched: MicrobatchedStep, cluster: Cluster, request: PlanRequest) -> Iterator[StageProblem]:
    """Of each schedule, the problem with stages on fewer devices than all."""
    num_layers, num_devices = len(microbatched.layers), cluster.num_devices
    sizes = [size for size in submesh_sizes(cluster, request, num_layers) if size < num_devices]
    costs = NodeCosts(microbatched.graph, cost_model(cluster, LogicalMesh(axis_sizes=(num_devices,))))
    options = tuple(_shared_option(microbatched, costs, size) for size in sizes)
    for name in schedules_of(request, cluster) if options else ():
        for chunks in chunk_numbers(request, name, num_layers):
            yield StageProblem(
                options=options,
                num_devices=num_devices,
                num_layers=num_layers,
                num_microbatches=microbatched.graph.num_microbatches,
                schedule=Schedule(name),
                limit_bytes=1,
                host_devices=cluster.domain_devices,
                chunks=chunks,
                fixed_num_stages=request.num_stages,
            )


def _shared_option(microbatched: MicrobatchedStep, costs: NodeCosts, size: int) -> StageOption:
    """The layers on so many devices: the operations of each, shared by all of these. What runs wherever it is read, and
    what is done once in a step, is left out.
    """
    graph, num_layers = microbatched.graph, len(microbatched.layers)
    seconds = {section: np.zeros(num_layers) for section in (Section.FORWARD, Section.BACKWARD)}
    for op, layer in zip(graph.block.ops, microbatched.assignment.layer_of, strict=True):
        if layer is not None and op.section in seconds:
            step_s = in_turn_s([op], lambda each: costs.shared_s(each, size))
            seconds[op.section][layer] += step_s / graph.num_microbatches
    none, no_bytes = np.zeros(num_layers), np.zeros(num_layers, dtype=np.int64)
    return StageOption(
        num_devices=size,
        forward_s=seconds[Section.FORWARD],
        backward_s=seconds[Section.BACKWARD],
        weight_s=seconds[Section.BACKWARD],  # may all be put off
        once_s=none,
        state_bytes=no_bytes,
        saved_bytes=no_bytes,
        working_bytes=no_bytes,
        send_s=none,
    )
