"""A requested pipeline: equal stages on equal submeshes, bound by a recipe or by pins where there are any."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from autopar.attention.checks import check_attention
from autopar.common.progress import Progress
from autopar.errors import BatchMismatchError, UnsupportedError
from autopar.frontend.callbacks import refuse_callbacks
from autopar.hardware.cluster import Cluster
from autopar.inter_op.build_stages import MicrobatchedStep, StageChoice, build, cut_layers, layers_of_pieces
from autopar.inter_op.evaluate import PipelineCandidate, retry_without_hoisted_casts
from autopar.inter_op.search_space import few_bubbles, is_long, meshes_inside, microbatch_numbers, submesh_sizes
from autopar.inter_op.staged import default_chunks, part_of
from autopar.ir.mesh import LogicalMesh
from autopar.ir.traced_step import TracedStep
from autopar.passes.assign_stages import balanced
from autopar.passes.remat_cheap import copies_state
from autopar.passes.split_scan import cut_scans, one_part_a_group
from autopar.plan.options import PipelineOptions, PlanOptions
from autopar.sharding.constraints import Binding
from autopar.sharding.pins import PinsOnMesh, on_meshes
from autopar.sharding.rules import RuleBook
from autopar.sharding.semantics import annotate_semantics


def requested_pipeline(
    traced: TracedStep,
    cluster: Cluster,
    options: PlanOptions,
    limit_bytes: int,
    rules: RuleBook,
    progress: Progress,
) -> PipelineCandidate:
    """Stages of equal arithmetic on equal submeshes, as asked; the logical mesh that is fastest and fits. Where none
    does, copies of the state are made in each micro-batch anew.

    Raises: UnsupportedError for a step that cannot be cut, such as one with callbacks.
    """
    refuse_callbacks(traced.jaxpr, traced.name)
    found = retry_without_hoisted_casts(
        lambda hoist_casts: _asked(traced, cluster, options, limit_bytes, rules, progress, hoist_casts), limit_bytes
    )
    assert isinstance(found, PipelineCandidate), "stages that were asked for are built whether they fit or not"
    return found


def in_one_stage(
    traced: TracedStep,
    cluster: Cluster,
    options: PlanOptions,
    limit_bytes: int,
    rules: RuleBook,
    progress: Progress,
) -> PipelineCandidate | None:
    """One stage on all devices, in the most micro-batches that may be chosen: what comes near to fitting where no
    stages fit. None for a step that cannot be cut so, and for a long one, of which even that takes long.
    """
    if is_long(traced):
        return None
    most = max(microbatch_numbers(traced, cluster, options.pipeline))
    asked = dataclasses.replace(options, pipeline=PipelineOptions(num_stages=1, num_microbatches=most))
    try:
        return requested_pipeline(traced, cluster, asked, limit_bytes, rules, progress)
    except (UnsupportedError, BatchMismatchError):
        return None


def _asked(
    traced: TracedStep,
    cluster: Cluster,
    options: PlanOptions,
    limit_bytes: int,
    rules: RuleBook,
    progress: Progress,
    hoist_casts: bool,
) -> tuple[PipelineCandidate, bool]:
    """(the best of what was asked for, copies of the state being kept or made anew; whether there are any)"""
    asked, binding = options.pipeline, options.binding
    name = asked.schedule or "1f1b"
    chunks = asked.chunks or default_chunks(name)
    num_stages = (asked.num_stages or 1) * chunks
    with progress.pass_("micro-batches"):
        step = cut_scans(traced, num_stages, rules)
        if step.parts > 1 and chunks > 1:
            raise one_part_a_group(step, name, chunks)
        parts = binding.example_parts(cluster.num_devices * chunks // num_stages) if binding is not None else 1
        num_microbatches = asked.num_microbatches or few_bubbles(traced, num_stages, parts)
        cut = cut_layers(step, num_microbatches, rules, hoist_casts=hoist_casts)
        if binding is not None:
            cut = dataclasses.replace(cut, graph=annotate_semantics(cut.graph))
            binding.check(cut.graph, cluster.num_devices * chunks // num_stages)
            if binding.shares_sequences:
                check_attention(cut.graph)
    pinned: list[PinsOnMesh] = []
    if options.pins is not None:
        (size,) = submesh_sizes(cluster, PipelineOptions(num_stages=num_stages // chunks), len(cut.layers))
        found = options.pins.found(traced, cut.graph)
        part = part_of(cluster, size)
        pinned = on_meshes(found, part, options.max_mesh_axes, binding, cut.graph, cut.leaves)
    meshes = [at.mesh for at in pinned] or None
    choices = equal_choice(cut, cluster, name, num_stages, chunks, binding, options.recompute, meshes)
    built = []
    for choice, pins in itertools.zip_longest(choices, pinned):
        constraints = binding.on(choice.group_meshes[0].num_devices)[1] if binding is not None else None
        with progress.pass_("build stages"):
            staged = build(cut, choice, cluster, limit_bytes, options.deadline.solve_s(), constraints, pins)
            built.append(
                PipelineCandidate(staged=staged, choice=choice, weighed=(), hoist_casts=hoist_casts, pins=pins)
            )
    best = min(built, key=lambda found: found.rank(limit_bytes))
    return dataclasses.replace(best, weighed=tuple(found.trial for found in built)), copies_state(cut.graph)


def equal_choice(
    cut: MicrobatchedStep,
    cluster: Cluster,
    schedule: str,
    num_stages: int,
    chunks: int,
    binding: Binding | None = None,
    recompute: str = "nothing",
    meshes: Sequence[LogicalMesh] | None = None,
) -> list[StageChoice]:
    """Stages of about equal arithmetic, or of one part of a scan each, on equal submeshes, for every mesh of them that
    a binding leaves, or those that are given.

    Raises: InvalidArgumentError for more stages than layers, or a number of groups that does not cut the devices.
    """
    (size,) = submesh_sizes(cluster, PipelineOptions(num_stages=num_stages // chunks), len(cut.layers))
    first_layers = layers_of_pieces(cut) if cut.step.parts > 1 else balanced(cut.layers, num_stages)
    if meshes is None:
        meshes = meshes_inside(part_of(cluster, size)) if binding is None else [binding.on(size)[0]]
    return [
        StageChoice(
            schedule=schedule,
            chunks=chunks,
            first_layers=first_layers,
            group_meshes=(mesh,) * (num_stages // chunks),
            policies=(recompute,) * len(cut.layers),
        )
        for mesh in meshes
    ]
