"""A step in the micro-batches and stages that a request names."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from autopar.attention.checks import check_attention
from autopar.cost.roofline import main_dtype
from autopar.frontend.build_graph import build_graph
from autopar.hardware.cluster import Cluster, part_number
from autopar.inter_op.build_stages import (
    MicrobatchedStep,
    cut_layers,
    layers_of_pieces,
)
from autopar.inter_op.followed_stages import schedule_beside
from autopar.inter_op.search_space import few_bubbles, meshes_inside, submesh_sizes
from autopar.inter_op.stage_choice import StageChoice
from autopar.inter_op.staged import default_chunks
from autopar.inter_op.submeshes import part_of
from autopar.ir.graph import OpGraph
from autopar.ir.mesh import LogicalMesh
from autopar.ir.traced_step import TracedStep
from autopar.passes.assign_stages import balanced, more_layers
from autopar.passes.remat_policy import policies_of
from autopar.passes.saved_arrays import check_passes_apart, check_saved_arrays
from autopar.passes.split_scan import SplitStep, split_scans
from autopar.plan.context import PlanningContext, StepGraphs
from autopar.plan.options import PlanRequest
from autopar.runtime.schedule import mesh_of_stages
from autopar.sharding.binding import Binding
from autopar.sharding.rules import RuleBook

# Steps with their scans over layers in parts, and what is made of them: once for all plans of a step.


def split_step(
    traced: TracedStep,
    parts: int,
    rules: RuleBook,
    graphs: StepGraphs,
    groups: Sequence[int] = (),
    sliced: frozenset[int] = frozenset(),
) -> SplitStep:
    """`split_scans`, the same object for the same parts; and the step is traced once on a number of examples, for all
    parts. Raises: as `split_scans`.
    """
    groups = tuple(groups or range(parts))

    def retrace(avals: Sequence[jax.ShapeDtypeStruct]) -> Any:
        shapes = tuple((a.shape, a.dtype, a.weak_type) for a in avals)
        return graphs.of(traced, ("traced on", shapes), lambda: traced.retrace(avals))

    def split() -> SplitStep:
        return split_scans(dataclasses.replace(traced, retrace=retrace), parts, rules, sliced, groups)

    return graphs.of(traced, ("split", parts, groups, sliced), split)


def whole_batch(step: SplitStep, rules: RuleBook, graphs: StepGraphs) -> OpGraph:
    """The graph of the whole batch of a step in parts."""
    return graphs.of(step.traced, "in parts", lambda: build_graph(step.traced, rules))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RequestedStep:
    """The step in the micro-batches that a request names, with its schedule and its number of stages."""

    microbatched: MicrobatchedStep
    schedule: str
    chunks: int
    num_stages: int
    binding: Binding | None


def requested_step(context: PlanningContext, hoist_casts: bool, keeps: bool = True) -> RequestedStep:
    """The step in the micro-batches of a request, which is kept for other plans of the step unless it says so.

    Raises: errors of the split; InvalidArgumentError.
    """
    request, cluster, traced, rules = context.request, context.cluster, context.traced, context.rules
    binding, followed = request.binding, request.followed_stages
    name = request.schedule or ("1f1b" if followed is None else schedule_beside(followed, context.graph))
    chunks = request.chunks or default_chunks(name)
    num_stages = (request.num_stages or 1) * chunks
    sliced = followed.sliced if followed is not None else frozenset()
    groups = mesh_of_stages(name, num_stages // chunks, chunks)
    step = split_step(traced, num_stages, rules, context.graphs, groups, sliced)
    parts = binding.example_parts(cluster.num_devices * chunks // num_stages) if binding is not None else 1
    num_microbatches = request.num_microbatches or few_bubbles(traced, num_stages, parts)
    whole = context.graph if step.parts == 1 else whole_batch(step, rules, context.graphs)

    def cut() -> MicrobatchedStep:
        return cut_layers(step, num_microbatches, rules, whole, hoist_casts=hoist_casts)

    key = "micro-batches", step.scopes, step.part_of_argument, num_microbatches, hoist_casts
    microbatched = context.graphs.of(traced, key, cut) if keeps else cut()
    return RequestedStep(
        microbatched=microbatched, schedule=name, chunks=chunks, num_stages=num_stages, binding=binding
    )


def check_binding(context: PlanningContext, microbatched: MicrobatchedStep, asked: RequestedStep) -> None:
    """Raises: InvalidArgumentError or UnsupportedError for a step, with its semantics, that a recipe cannot bind."""
    binding, cluster, name = asked.binding, context.cluster, context.traced.name
    if binding is None:
        return
    binding.check(microbatched.graph, cluster.num_devices * asked.chunks // asked.num_stages)
    if binding.shares_sequences:
        check_attention(microbatched.graph)
    if binding.offloads_activations:
        check_saved_arrays(microbatched.graph, name)
        check_passes_apart(name, cluster.device.platform, asked.num_stages)


def equal_choice(
    microbatched: MicrobatchedStep,
    cluster: Cluster,
    schedule: str,
    num_stages: int,
    chunks: int,
    binding: Binding | None = None,
    recompute: str = "nothing",
    meshes: Sequence[LogicalMesh] | None = None,
) -> list[StageChoice]:
    """Stages of about equal arithmetic, or of one part of a scan each, on equal submeshes, for every mesh that a
    binding allows, or for the given meshes.

    Raises: InvalidArgumentError for more stages than layers, or a number of groups that does not divide the devices.
    """
    (size,) = submesh_sizes(cluster, PlanRequest(num_stages=num_stages // chunks), len(microbatched.layers))
    parts, rates = parts_in_turn(microbatched, cluster, num_stages // chunks)
    first_layers = (
        layers_of_pieces(microbatched)
        if microbatched.step.parts > 1
        else balanced(microbatched.layers, num_stages, rates * chunks, more_layers(microbatched.graph))
    )
    if meshes is None:
        meshes = meshes_inside(part_of(cluster, size)) if binding is None else [binding.on(size)[0]]
    return [
        StageChoice(
            schedule=schedule,
            chunks=chunks,
            first_layers=first_layers,
            group_meshes=(mesh,) * (num_stages // chunks),
            policies=policies_of(recompute, len(microbatched.layers)),
            group_parts=parts,
        )
        for mesh in meshes
    ]


def parts_in_turn(
    microbatched: MicrobatchedStep, cluster: Cluster, num_groups: int
) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """(the part of the cluster that each of equal groups of devices is in, in the order of the devices; the rate of
    matrix products of its devices). Empty on a cluster of one kind.

    Raises: InvalidArgumentError for a group with devices of several kinds.
    """
    if not cluster.parts or num_groups == 1:
        return (), ()
    size = cluster.num_devices // num_groups
    numbers = tuple(part_number(cluster, group * size, size) for group in range(num_groups))
    dtype = main_dtype(microbatched.graph)
    return numbers, tuple(cluster.parts[number].device.flops_per_s(dtype) for number in numbers)
