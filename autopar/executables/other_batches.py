"""What a plan's decisions come to on a batch of another size, without a search: the peak of a device."""

from __future__ import annotations

from autopar.compiler.materialize import recorded_stages, with_options_of
from autopar.compiler.whole_graph import program_graph
from autopar.cost.cost_model import cost_model
from autopar.errors import AutoparError
from autopar.executables.smaller_batch import on_other_sizes, stages_of, stages_on_other_sizes
from autopar.inter_op.joined_tasks import joined_as_named
from autopar.intra_op.spmd_candidate import memory_of
from autopar.ir.traced_step import TracedStep
from autopar.lowering.host_copies import with_host_copies
from autopar.lowering.lower import lower
from autopar.plan.codec import sharding_plan_of
from autopar.plan.plan import Plan
from autopar.plan.schema import PipelineRecord
from autopar.sharding.rules import RuleBook


def peak_of_other_batch(plan: Plan, planned: TracedStep, traced: TracedStep, rules: RuleBook) -> int | None:
    """Bytes of a device under a plan's decisions, on the step as it is traced on another batch; None where the step has
    other operations or layers then.

    `planned` is the step for which the plan was made. On a cluster of several kinds the bytes are to be compared with
    the memory of the smallest device.
    """
    planned, traced = (with_options_of(plan, t) for t in (planned, traced))
    if plan.record.pipeline is not None:
        return _of_stages(plan, plan.record.pipeline, planned, traced, rules)
    planned_graph, graph = program_graph(planned, rules), program_graph(traced, rules)
    model = cost_model(plan.cluster, plan.mesh)
    decided = sharding_plan_of(plan.record.decisions, plan.record.solver, plan.mesh, planned_graph)
    sharding = on_other_sizes(decided, planned_graph, graph)
    if sharding is None:
        return None
    lowered = with_host_copies(graph, lower(graph, sharding, model.links), sharding)
    return memory_of(graph, lowered, model).estimate.peak_bytes


def _of_stages(
    plan: Plan, record: PipelineRecord, planned: TracedStep, traced: TracedStep, rules: RuleBook
) -> int | None:
    try:
        own, other = (stages_of(t, record, rules, plan.record.sliced) for t in (planned, traced))
    except AutoparError:
        return None  # the batch cannot be cut into these micro-batches
    shardings = stages_on_other_sizes(record, own[1], other[1]) if own is not None and other is not None else None
    if other is None or shardings is None:
        return None
    microbatched, graphs = other
    staged = recorded_stages(plan.cluster, record, microbatched, graphs, shardings)
    return joined_as_named(staged, record.joined, traced.name).peak_of_smallest_bytes
