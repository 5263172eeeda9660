"""A plan carried over to fewer examples: the last batch of an epoch keeps its layouts, and its state stays where it is.

The step traced on the short batch is the same operations on other sizes. What was decided for an operation holds for
it where its sizes still divide; of a mesh axis that does not divide them any more, the operation makes no use. A batch
in micro-batches becomes as many as keep each of them no larger than it was. Nothing is searched for, and nothing is
padded: results are those of the whole step on that batch.

Longer batches are planned anew: they may not fit into memory.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

from autopar.compiler.check_decisions import signature_of
from autopar.compiler.write_values import planned_values, staged_values
from autopar.cost.cost_model import cost_model
from autopar.errors import AutoparError
from autopar.frontend.build_graph import build_graph
from autopar.inter_op.build_stages import MicrobatchedStep, cut_layers, recomputed
from autopar.inter_op.staged import Submesh, cut_stages, model_of, planned_stage, schedule_of, stage_program
from autopar.ir.graph import Block, Op, OpGraph, OpKind
from autopar.ir.layout import Layout, replicated
from autopar.ir.mesh import LogicalMesh
from autopar.ir.traced_step import TracedStep
from autopar.lowering.decisions import ShardingPlan
from autopar.lowering.host_offload import with_host_copies
from autopar.lowering.lower import lower
from autopar.microbatch.smaller_step import example_leaves, num_examples
from autopar.passes.split_scan import split_scans
from autopar.passes.stage_graph import StageGraph
from autopar.plan.codec import decisions_of, sharding_plan_of
from autopar.plan.plan import Plan
from autopar.plan.schema import PipelineRecord, PlanRecord
from autopar.runtime.pipeline.standard_schedules import PipelineSchedule
from autopar.sharding.rules import RuleBook
from autopar.sharding.strategies import Strategy, strategy_of


def for_short_batch(plan: Plan, planned: TracedStep, traced: TracedStep, rules: RuleBook) -> Plan | None:
    """The plan of a step for a batch of fewer examples; None where the step differs in anything else.

    `planned` is the step as the plan was made for it, `traced` the same on the short batch.
    """
    examples = _fewer_examples(planned, traced)
    if examples is None:
        return None
    attention = plan.record.blockwise_attention
    planned, traced = (dataclasses.replace(t, blockwise_attention=attention) for t in (planned, traced))
    if plan.record.pipeline is None:
        record = _in_one_program(plan, planned, traced, rules)
    else:
        record = _in_micro_batches(plan, plan.record.pipeline, planned, traced, rules, examples)
    if record is None:
        return None
    note = (
        f"the layouts of the plan for {examples[0]} examples, as far as {examples[1]} divide; times, memory and "
        "collectives are those of that plan"
    )
    return Plan(dataclasses.replace(record, fingerprint=traced.fingerprint), plan.trees).with_note(note)


def _fewer_examples(planned: TracedStep, traced: TracedStep) -> tuple[int, int] | None:
    """(examples of the plan, examples now) where arguments differ only in that, and 0 < now < planned."""
    same = ("in_tree", "out_tree", "tied", "donated", "batch", "argument_of")
    if any(getattr(planned, name) != getattr(traced, name) for name in same):
        return None
    if not any(planned.in_avals[i].shape for i in planned.batch):
        return None
    before = num_examples(planned)
    leaves = example_leaves(planned)
    for i, (a, b) in enumerate(zip(planned.in_avals, traced.in_avals, strict=True)):
        trailing = i in leaves and len(b.shape) == len(a.shape) and a.shape[1:] == b.shape[1:]
        if a.dtype != b.dtype or not (a.shape == b.shape or trailing):
            return None
    sizes = {traced.in_avals[i].shape[0] for i in leaves}
    now = sizes.pop()
    return (before, now) if not sizes and 0 < now < before else None


def _in_one_program(plan: Plan, planned: TracedStep, traced: TracedStep, rules: RuleBook) -> PlanRecord | None:
    before, graph = build_graph(planned, rules), build_graph(traced, rules)
    if not _same_operations(before, graph):
        return None
    record = plan.record
    sharding = fitted(sharding_plan_of(record.decisions, record.solver, plan.mesh, graph), graph)
    links = cost_model(plan.cluster, plan.mesh).links
    lowered = with_host_copies(graph, lower(graph, sharding, links), sharding.in_host, plan.mesh)
    arguments, results = planned_values(traced, graph, lowered)
    return dataclasses.replace(
        record, arguments=tuple(arguments), results=tuple(results), decisions=decisions_of(sharding, graph)
    )


def _in_micro_batches(
    plan: Plan,
    made: PipelineRecord,
    planned: TracedStep,
    traced: TracedStep,
    rules: RuleBook,
    examples: tuple[int, int],
) -> PlanRecord | None:
    _, _, before = _stages(planned, made, rules, None)
    for count in counts(examples[0] // made.num_microbatches, examples[1]):
        # The step on so many examples may be other operations, and a schedule may want another number.
        shorter = dataclasses.replace(made, num_microbatches=count)
        try:
            staged_graph, schedule, stages = _stages(traced, shorter, rules, before)
        except AutoparError:
            continue
        if stages:
            return _staged(plan, shorter, traced, staged_graph, schedule, stages)
    return None


def counts(most: int, examples: int) -> list[int]:
    """The numbers of equal micro-batches of at most so many examples, the smallest first."""
    return [n for n in range(1, examples + 1) if examples % n == 0 and examples // n <= most]


def _stages(
    traced: TracedStep, made: PipelineRecord, rules: RuleBook, like: list[StageGraph] | None
) -> tuple[MicrobatchedStep, PipelineSchedule, list[StageGraph]]:
    """A step in the stages of a plan. No stages where their operations differ from those of `like`.

    Raises: what cutting into micro-batches and stages raises.
    """
    cut = cut_layers(
        split_scans(traced, made.scan_parts, rules), made.num_microbatches, rules, hoist_casts=made.keeps_copies
    )
    schedule = schedule_of(made.schedule, len(made.stages), made.num_microbatches, made.chunks)
    if cut.layers.names != tuple(name for stage in made.stages for name in stage.layers):
        return cut, schedule, []
    first_layers = [stage.first_layer for stage in made.stages]
    graph = recomputed(cut, made.recomputed)
    stages = cut_stages(graph, cut.layers, first_layers, schedule.splits_backward, len(made.stages))
    if like is not None:
        pairs = zip(like, stages, strict=True)
        if not all(a.sends == b.sends and _same_operations(a.graph, b.graph) for a, b in pairs):
            return cut, schedule, []
    return cut, schedule, stages


def _staged(
    plan: Plan,
    made: PipelineRecord,
    traced: TracedStep,
    cut: MicrobatchedStep,
    schedule: PipelineSchedule,
    stages: list[StageGraph],
) -> PlanRecord:
    submeshes = [Submesh(first_device=s.first_device, mesh=LogicalMesh(axis_sizes=s.axis_sizes)) for s in made.stages]
    shardings = [
        fitted(sharding_plan_of(s.decisions, s.solver, at.mesh, stage.graph), stage.graph)
        for s, at, stage in zip(made.stages, submeshes, stages, strict=True)
    ]
    rows = zip(made.stages, submeshes, stages, shardings, schedule.mesh_of_stage, strict=True)
    ready = [
        planned_stage(s.first_layer, stage, model_of(plan.cluster, at.mesh), sharding, mesh, like=q)
        for q, (s, at, stage, sharding, mesh) in enumerate(rows)
    ]
    graph = recomputed(cut, made.recomputed)
    staged = stage_program(cut.step, graph, cut.layers, ready, submeshes, schedule, plan.cluster)
    arguments, results = staged_values(traced, staged)
    decided = tuple(
        dataclasses.replace(s, decisions=decisions_of(sharding, stage.graph))
        for s, sharding, stage in zip(made.stages, shardings, stages, strict=True)
    )
    return dataclasses.replace(
        plan.record,
        arguments=tuple(arguments),
        results=tuple(results),
        pipeline=dataclasses.replace(made, stages=decided),
    )


def _same_operations(one: OpGraph, other: OpGraph) -> bool:
    """Whether two graphs hold the same operations under the same numbers, for any sizes."""
    values = zip(one.values, other.values, strict=False)
    same = len(one.values) == len(other.values) and all(len(a.shape) == len(b.shape) for a, b in values)
    return same and list(_skeleton(one.block)) == list(_skeleton(other.block))


def _skeleton(block: Block) -> Iterator[object]:
    def numbers(atoms: tuple[object, ...]) -> tuple[object, ...]:
        return tuple(a if isinstance(a, int) else None for a in atoms)

    yield block.inputs, numbers(block.outputs)
    for op in block.ops:
        yield op.id, op.kind, op.primitive, numbers(op.inputs), op.outputs, op.section, op.dim, len(op.blocks)
        yield op.num_consts, op.num_carry, op.num_condition_consts, op.trips
        for inner in op.blocks:
            yield from _skeleton(inner)


def fitted(plan: ShardingPlan, graph: OpGraph) -> ShardingPlan:
    """Decisions for the operations of a graph, as far as they divide the graph's sizes."""
    return _Fitting(plan, graph).made()


@dataclasses.dataclass(slots=True)
class _Fitting:
    plan: ShardingPlan
    graph: OpGraph
    unreduced: dict[int, Layout] = dataclasses.field(default_factory=dict)
    strategy: dict[int, Strategy] = dataclasses.field(default_factory=dict)

    def made(self) -> ShardingPlan:
        plan = self.plan
        self.unreduced = {v: self.fit(layout, v) for v, layout in plan.unreduced.items()}
        self.block(self.graph.block)
        sent = {op.id: op.inputs[0] for op in self.graph.block.ops if op.kind is OpKind.SEND}
        transfers = {op: (sent[op], layout) for op, layout in plan.transfer_layouts.items()}
        return dataclasses.replace(
            plan,
            strategy=self.strategy,
            unreduced=self.unreduced,
            reduced={v: self.fit(layout, v) for v, layout in plan.reduced.items()},
            copies={key: self.fit(layout, key[0]) for key, layout in plan.copies.items()},
            transfer_layouts={op: self.fit(layout, v) for op, (v, layout) in transfers.items() if isinstance(v, int)},
        )

    def fit(self, layout: Layout, value: int) -> Layout:
        return fit(layout, self.graph.values[value].shape, self.plan.mesh)

    def home(self, value: int) -> Layout:
        return self.unreduced.get(value) or replicated(len(self.graph.values[value].shape))

    def reduced(self, value: int) -> Layout:
        reduced = self.plan.reduced.get(value)
        return self.fit(reduced, value) if reduced is not None else self.home(value)

    def block(self, block: Block) -> None:
        for op in block.ops:
            if op.kind is OpKind.EQUATION:
                self.equation(op)
            elif op.kind is OpKind.BARRIER:
                for source, target in zip(op.inputs, op.outputs, strict=True):
                    if isinstance(source, int):
                        self.unreduced[target] = self.reduced(source)
            elif op.kind is OpKind.ACCUMULATE:
                (source,), (target,) = op.inputs, op.outputs
                home = self.home(target)
                summed = self.home(source).partial if isinstance(source, int) else ()
                self.unreduced[target] = Layout(home.dims, tuple(a for a in home.partial if a in summed))
            for inner in op.blocks:
                self.block(inner)

    def equation(self, op: Op) -> None:
        old = self.plan.strategy.get(op.id)
        if old is None:
            return
        mesh, signature = self.plan.mesh, signature_of(op, self.graph, self.plan)
        shapes = (*signature.operand_shapes, *signature.result_shapes)
        layouts = (*old.operands, *old.results)
        dropped: set[int] = set()
        for layout, shape in zip(layouts, shapes, strict=True):
            dropped |= layout.sharded_axes - fit(layout, shape, mesh).sharded_axes
        # A sum that nobody leaves any more is not passed on.
        sums = [v for v, layout in zip(op.inputs, old.operands, strict=True) if isinstance(v, int) and layout.partial]
        left = {a for v in sums for a in self.home(v).partial}
        dropped |= {a for layout in old.operands for a in layout.partial} - left
        strategy = old if not dropped else self.without(old, dropped, op)
        if strategy is None:
            whole = [replicated(len(shape)) for shape in shapes]
            n = len(signature.operand_shapes)
            strategy = Strategy(tuple(whole[:n]), tuple(whole[n:]), 1)
        self.strategy[op.id] = strategy
        self.unreduced.update(zip(op.outputs, strategy.results, strict=True))

    def without(self, old: Strategy, dropped: set[int], op: Op) -> Strategy | None:
        """The strategy without some axes; None where the operation has no such strategy."""
        operands = [_without(layout, dropped) for layout in old.operands]
        results = [_without(layout, dropped) for layout in old.results]
        strategy = strategy_of(signature_of(op, self.graph, self.plan), operands, results, self.plan.mesh)
        if strategy is None:
            return None
        return dataclasses.replace(strategy, ring=tuple(a for a in old.ring if a not in dropped))


def fit(layout: Layout, shape: tuple[int, ...], mesh: LogicalMesh) -> Layout:
    """A layout with, in each dimension, those of its axes that divide it into the most parts."""
    if layout.fits(shape, mesh):
        return layout

    def most(axes: tuple[int, ...], size: int) -> tuple[int, ...]:
        subsets = (s for n in range(len(axes), -1, -1) for s in itertools.combinations(axes, n))
        return max((s for s in subsets if size % mesh.size(s) == 0), key=mesh.size)

    dims = tuple(most(axes, size) for axes, size in zip(layout.dims, shape, strict=True))
    return Layout(dims, layout.partial)


def _without(layout: Layout, dropped: set[int]) -> Layout:
    dims = tuple(tuple(a for a in axes if a not in dropped) for axes in layout.dims)
    return Layout(dims, tuple(a for a in layout.partial if a not in dropped))
