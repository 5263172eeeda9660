"""Which leaves of a step's state are stored padded, under a recipe whose devices do not divide them."""

from __future__ import annotations

import math

from autopar.compiler.whole_graph import whole_graph
from autopar.frontend.pad_state import padded_step
from autopar.frontend.saved_names import saving
from autopar.hardware.cluster import Cluster
from autopar.inter_op.split_steps import forms_of_stages
from autopar.inter_op.staged import default_chunks
from autopar.ir.graph import Purpose
from autopar.ir.padded import PaddedForm
from autopar.ir.traced_step import TracedStep
from autopar.passes.scan_stacks import find_stacks
from autopar.plan.options import PlanRequest
from autopar.plan.plan import Plan
from autopar.plan.step_graphs import StepGraphs
from autopar.runtime.pipeline.schedule import mesh_of_stages
from autopar.sharding.binding import Binding
from autopar.sharding.padding import padded_forms
from autopar.sharding.rules import RuleBook


def stored_step(
    traced: TracedStep, cluster: Cluster, request: PlanRequest, rules: RuleBook, graphs: StepGraphs
) -> TracedStep:
    """The step with the leaves of its state as they are stored on a cluster: padded where a recipe shares them out
    among devices that do not divide them, and where the requested stages do not divide the layers of a scan. The graph
    that this is read from is one of `graphs`.

    Raises: InvalidArgumentError where the recipe does not fit the devices; UnsupportedError as `build_graph`.
    """
    if traced.padded:
        return traced
    forms = dict(request.padded) or _chosen_forms(traced, cluster, request, rules, graphs)
    num_stages = (request.num_stages or 1) * (request.chunks or 1)
    what = "padded", tuple(sorted(forms.items())), num_stages  # plans of the same forms share the graphs of one step
    return graphs.of(traced, what, lambda: padded_step(traced, forms, num_stages=num_stages)) if forms else traced


def stored_as_planned(traced: TracedStep, plan: Plan) -> TracedStep:
    """The step as a plan has it: the names that `jax.checkpoint` saves, and the leaves of its state as stored."""
    if plan.record.saved_names is not None and traced.saved_names is None:
        traced = saving(traced, plan.record.saved_names)
    forms, avals = plan.record.padded, traced.in_avals
    fit = all(i < len(avals) and avals[i].shape == form.shape for i, form in forms.items())
    if not fit or traced.padded:
        return traced
    pipeline = plan.record.pipeline
    return padded_step(traced, forms, num_stages=len(pipeline.stages) if pipeline is not None else 1)


def _chosen_forms(
    traced: TracedStep, cluster: Cluster, request: PlanRequest, rules: RuleBook, graphs: StepGraphs
) -> dict[int, PaddedForm]:
    binding, num_stages = request.binding, request.num_stages or 1
    schedule = request.schedule or "1f1b"
    groups = mesh_of_stages(schedule, num_stages, request.chunks or default_chunks(schedule))
    if len(groups) > 1 and (forms := forms_of_stages(traced, rules, graphs, groups)):
        return forms
    if binding is None or not traced.tied or cluster.num_devices % num_stages:
        return {}
    num_devices = cluster.num_devices // num_stages
    if not _shares_state(binding) or _all_divide(traced, num_devices):
        return {}
    if num_stages > 1 and find_stacks(traced, rules) is not None:
        return {}  # each stage gets a slice of the stacked layers, which are stored as they are
    graph = whole_graph(traced, rules, graphs).annotated
    first = len(graph.block.inputs) - len(traced.in_avals)
    return {position - first: form for position, form in padded_forms(graph, binding, num_devices).items()}


def padding_notes(traced: TracedStep) -> list[str]:
    """A note on the leaves that are stored padded, where there are any: the largest, and what the padding adds."""
    if not traced.padded:
        return []
    sizes = [
        (math.prod(p.shape), math.prod(p.stored_shape), traced.in_avals[p.leaf].dtype.itemsize) for p in traced.padded
    ]
    code_bytes, stored_bytes = (sum(row[i] * row[2] for row in sizes) for i in (0, 1))
    largest = max(zip(sizes, traced.padded, strict=True), key=lambda row: row[0][0] * row[0][2])[1]
    n = len(traced.padded)
    return [
        f"{n} {'array is' if n == 1 else 'arrays are'} stored padded, {stored_bytes / code_bytes - 1:.2%} larger, as "
        f"the devices do not divide them: {traced.in_paths[largest.leaf]} {list(largest.shape)} as "
        f"{list(largest.stored_shape)}{'' if n == 1 else ', ...'}; they come back as autopar.PaddedArray"
    ]


def _shares_state(binding: Binding) -> bool:
    return any(
        Purpose.OPTIMIZER in use.must_shard and size != 1 for use, size in zip(binding.axes, binding.sizes, strict=True)
    )


def _all_divide(traced: TracedStep, num_devices: int) -> bool:
    """Whether each leaf has a dimension that divides by all devices, so that nothing need be looked at."""
    shapes = {traced.in_avals[leaf].shape for leaf in traced.tied}
    return all(any(n % num_devices == 0 for n in shape) for shape in shapes if shape)
