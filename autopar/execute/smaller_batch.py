"""Carries a plan over to fewer examples: the last batch of an epoch keeps the layouts, and the state stays in place.

The step traced on the short batch has the same operations on other sizes. The decision for an operation is kept where
the sizes still divide, and of one program where examples are split unevenly; an operation does not use a mesh axis that
no longer divides what else it splits. The number of micro-batches is the smallest for which none is larger than before.
There is no search and no padding: the results are those of the step on that batch.

Longer batches are planned anew, since they may not fit into memory.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from msgspec.structs import replace

from autopar.cost.cost_model import cost_model
from autopar.errors import AutoparError
from autopar.ir.graph import Block, Op, OpGraph, OpKind, walk
from autopar.ir.layout import Layout, LogicalMesh, replicated
from autopar.ir.rules import RuleBook
from autopar.ir.strategies import Strategy, strategy_of
from autopar.ir.traced_step import TracedStep
from autopar.lowering.host_copies import with_host_copies
from autopar.lowering.lower import ShardingPlan, lower
from autopar.passes.smaller_step import example_leaves, num_examples
from autopar.plan.codec import decisions_of, sharding_plan_of
from autopar.plan.plan import Plan
from autopar.plan.schema import PipelineRecord, PlanRecord
from autopar.search.check_decisions import signature_of
from autopar.search.inter_op.build_stages import (
    MicrobatchedStep,
    StageGraphs,
    cut_layers,
    joined_as_named,
    stage_graphs,
)
from autopar.search.inter_op.decide_stages import CanonicalGraph, carried_over
from autopar.search.intra_op.spmd_candidate import memory_of
from autopar.search.materialize import recorded_stages, stage_shardings, step_in_parts, with_options_of
from autopar.search.step_ways import program_graph
from autopar.search.write_values import planned_values, staged_values


def for_short_batch(plan: Plan, planned: TracedStep, traced: TracedStep, rules: RuleBook) -> Plan | None:
    """The plan of a step for a batch of fewer examples; None where the step differs in anything else.

    `planned` is the step for which the plan was made, `traced` the step on the short batch.
    """
    examples = fewer_examples(planned, traced)
    if examples is None:
        return None
    planned, traced = (with_options_of(plan, t) for t in (planned, traced))
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
    cut, of_plan = record.pipeline, plan.record.pipeline
    if cut is not None and of_plan is not None and cut.num_microbatches > of_plan.num_microbatches:
        note += (
            f"; {examples[1]} are cut into {cut.num_microbatches} micro-batches, as they divide into no larger ones of "
            f"at most {examples[0] // of_plan.num_microbatches}, and take longer: add some of weight zero in the loss"
        )
    return Plan(dataclasses.replace(record, fingerprint=traced.fingerprint), plan.trees).with_note(note)


def fewer_examples(planned: TracedStep, traced: TracedStep) -> tuple[int, int] | None:
    """(examples of the plan, examples of the trace) where arguments differ only in that, and 0 < traced < planned."""
    fields = ("in_tree", "out_tree", "tied", "donated", "batch", "example_dims", "argument_of")
    if any(getattr(planned, name) != getattr(traced, name) for name in fields):
        return None
    of_dims = ((i, planned.example_dim(i)) for i in planned.batch)
    if not any(planned.in_avals[i].shape[dim] for i, dim in of_dims if dim is not None):
        return None  # no array has examples, or all are empty
    planned_examples, leaves = num_examples(planned), example_leaves(planned)
    for i, (a, b) in enumerate(zip(planned.in_avals, traced.in_avals, strict=True)):
        fewer = [d for d, sizes in enumerate(zip(a.shape, b.shape, strict=False)) if len(set(sizes)) > 1]
        are_examples = len(a.shape) == len(b.shape) and fewer in ([], [leaves.get(i)])
        if a.dtype != b.dtype or not are_examples:
            return None
    sizes = {traced.in_avals[i].shape[dim] for i, dim in leaves.items()}
    traced_examples = sizes.pop()
    return (planned_examples, traced_examples) if not sizes and 0 < traced_examples < planned_examples else None


def _in_one_program(plan: Plan, planned: TracedStep, traced: TracedStep, rules: RuleBook) -> PlanRecord | None:
    record = plan.record
    parts = record.uneven_over or plan.mesh.num_devices
    planned_graph, graph = (
        program_graph(planned, rules),
        program_graph(dataclasses.replace(traced, uneven_over=parts), rules),
    )
    decided = sharding_plan_of(record.decisions, record.solver, plan.mesh, planned_graph)
    sharding = on_other_sizes(decided, planned_graph, graph)
    if sharding is None:
        return None
    links = cost_model(plan.cluster, plan.mesh).links
    lowered = with_host_copies(graph, lower(graph, sharding, links), sharding)
    arguments, results = planned_values(traced, graph, lowered)
    return dataclasses.replace(
        record,
        arguments=tuple(arguments),
        results=tuple(results),
        decisions=decisions_of(sharding, graph),
        uneven_over=parts,
    )


def _in_micro_batches(
    plan: Plan,
    record: PipelineRecord,
    planned: TracedStep,
    traced: TracedStep,
    rules: RuleBook,
    examples: tuple[int, int],
) -> PlanRecord | None:
    sliced = plan.record.sliced
    planned_stages = stages_of(planned, record, rules, sliced)
    assert planned_stages is not None, "a plan has the layers of its own step"
    for count in counts(examples[0] // record.num_microbatches, examples[1]):
        # The step on this number of examples may have other operations, and the schedule may not admit the number.
        shorter = dataclasses.replace(record, num_microbatches=count)
        try:
            stages = stages_of(traced, shorter, rules, sliced)
        except AutoparError:
            continue
        shardings = stages_on_other_sizes(record, planned_stages[1], stages[1]) if stages is not None else None
        if stages is not None and shardings is not None:
            return _staged(plan, shorter, traced, *stages, shardings)
    return None


def counts(largest: int, examples: int) -> list[int]:
    """The numbers of equal micro-batches of at most `largest` examples, smallest number first."""
    return [n for n in range(1, examples + 1) if examples % n == 0 and examples // n <= largest]


def stages_of(
    traced: TracedStep, record: PipelineRecord, rules: RuleBook, sliced: frozenset[int]
) -> tuple[MicrobatchedStep, StageGraphs] | None:
    """A step in the stages of a plan; None where its layers differ.

    Raises: errors of the split into micro-batches and stages.
    """
    step = step_in_parts(traced, record, rules, sliced)
    microbatched = cut_layers(step, record.num_microbatches, rules, hoist_casts=record.keeps_copies)
    if microbatched.layers.names != tuple(name for stage in record.stages for name in stage.layers):
        return None
    first_layers = [stage.first_layer for stage in record.stages]
    return microbatched, stage_graphs(microbatched, record.recomputed, first_layers, record.schedule, record.chunks)


def stages_on_other_sizes(
    record: PipelineRecord, planned: StageGraphs, graphs: StageGraphs
) -> list[ShardingPlan] | None:
    """The recorded decisions of the planned stages for stages of other sizes; None where they hold other operations, or
    send other values.
    """
    found = []
    for sharding, a, b in zip(stage_shardings(record, planned.stages), planned.stages, graphs.stages, strict=True):
        fitting = on_other_sizes(sharding, a.graph, b.graph) if a.sends == b.sends else None
        if fitting is None:
            return None
        found.append(fitting)
    return found


def _staged(
    plan: Plan,
    record: PipelineRecord,
    traced: TracedStep,
    microbatched: MicrobatchedStep,
    graphs: StageGraphs,
    shardings: Sequence[ShardingPlan],
) -> PlanRecord:
    staged = recorded_stages(plan.cluster, record, microbatched, graphs, shardings)
    arguments, results = staged_values(traced, staged, plan.record.leaves)
    decided = tuple(
        dataclasses.replace(s, decisions=decisions_of(sharding, stage.graph))
        for s, sharding, stage in zip(record.stages, shardings, graphs.stages, strict=True)
    )
    return dataclasses.replace(
        plan.record,
        arguments=tuple(arguments),
        results=tuple(results),
        pipeline=dataclasses.replace(record, stages=decided),
    )


def on_other_sizes(sharding: ShardingPlan, planned: OpGraph, graph: OpGraph) -> ShardingPlan | None:
    """The decisions of a planned graph for one that holds the same operations on other sizes, as far as these divide;
    None where it holds others.

    Values may have other numbers: what is the same in all micro-batches depends on the sizes.
    """
    source, target = _skeleton(planned), _skeleton(graph)
    if source.key != target.key:
        return None
    return fitted(carried_over(sharding, source, target, graph), graph)


def _skeleton(graph: OpGraph) -> CanonicalGraph:
    """The operations of a graph, whatever the sizes; values are known by their first occurrence, and by their ranks."""
    number: dict[int, int] = {}

    def known(atom: object) -> object:
        if not isinstance(atom, int):
            return None
        return number.setdefault(atom, len(number)), len(graph.values[atom].shape)

    def of(block: Block) -> tuple[object, ...]:
        inputs = tuple(map(known, block.inputs))
        return inputs, tuple(map(of_op, block.ops)), tuple(map(known, block.outputs))

    def of_op(op: Op) -> tuple[object, ...]:
        operands, blocks = tuple(map(known, op.inputs)), tuple(map(of, op.blocks))
        counts = op.num_consts, op.num_carry, op.num_condition_consts, op.trips
        return op.kind, op.primitive, op.section, op.dim, counts, operands, blocks, tuple(map(known, op.outputs))

    key = of(graph.block)
    return CanonicalGraph(key=key, ops=tuple(op.id for op in walk(graph.block)), values=tuple(number))


def fitted(plan: ShardingPlan, graph: OpGraph) -> ShardingPlan:
    """The decisions for the operations of a graph, without axes that do not divide the graph's sizes."""
    return _Fitting(plan, graph).run()


@dataclasses.dataclass(slots=True)
class _Fitting:
    plan: ShardingPlan
    graph: OpGraph
    unreduced: dict[int, Layout] = dataclasses.field(default_factory=dict)
    strategy: dict[int, Strategy] = dataclasses.field(default_factory=dict)

    def run(self) -> ShardingPlan:
        plan = self.plan
        self.unreduced = {v: self.fit(layout, v) for v, layout in plan.unreduced.items()}
        for v in self.graph.block.inputs:  # arguments lie in equal parts
            if v in self.unreduced:
                self.unreduced[v] = fit(self.unreduced[v], self.graph.values[v].shape, plan.mesh)
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
        return fit(layout, self.graph.values[value].split_shape, self.plan.mesh)

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
            elif op.kind is OpKind.STACK and isinstance(op.inputs[0], int):
                # What a micro-batch adds lies like the whole.
                self.unreduced[op.outputs[0]] = self.fit(self.home(op.outputs[0]), op.inputs[0])
            for inner in op.blocks:
                self.block(inner)

    def equation(self, op: Op) -> None:
        strategy_before = self.plan.strategy.get(op.id)
        if strategy_before is None:
            return
        mesh, signature = self.plan.mesh, signature_of(op, self.graph, self.plan)
        shapes = (*signature.operand_shapes, *signature.result_shapes)
        layouts = (*strategy_before.operands, *strategy_before.results)
        dropped: set[int] = set()
        for layout, shape in zip(layouts, shapes, strict=True):
            dropped |= layout.sharded_axes - fit(layout, shape, mesh).sharded_axes
        if strategy_of(signature, strategy_before.operands, strategy_before.results, mesh) is None:
            # The operation does not take unequal parts.
            exact = [self.graph.values[a].shape if isinstance(a, int) else a.shape for a in (*op.inputs, *op.outputs)]
            for layout, shape in zip(layouts, exact, strict=True):
                dropped |= layout.sharded_axes - fit(layout, shape, mesh).sharded_axes
        # A sum that nobody leaves any more is not passed on.
        sums = [
            v
            for v, layout in zip(op.inputs, strategy_before.operands, strict=True)
            if isinstance(v, int) and layout.partial
        ]
        still_partial = {a for v in sums for a in self.home(v).partial}
        dropped |= {a for layout in strategy_before.operands for a in layout.partial} - still_partial
        strategy = strategy_before if not dropped else self.without(strategy_before, dropped, op)
        if strategy is None:
            replicated_layouts = [replicated(len(shape)) for shape in shapes]
            n = len(signature.operand_shapes)
            strategy = Strategy(tuple(replicated_layouts[:n]), tuple(replicated_layouts[n:]), 1)
        self.strategy[op.id] = strategy
        self.unreduced.update(zip(op.outputs, strategy.results, strict=True))

    def without(self, strategy_before: Strategy, dropped: set[int], op: Op) -> Strategy | None:
        """The strategy without some axes; None where the operation has no such strategy."""
        operands = [_without(layout, dropped) for layout in strategy_before.operands]
        results = [_without(layout, dropped) for layout in strategy_before.results]
        strategy = strategy_of(signature_of(op, self.graph, self.plan), operands, results, self.plan.mesh)
        if strategy is None:
            return None
        return replace(strategy, ring=tuple(a for a in strategy_before.ring if a not in dropped))


def fit(layout: Layout, shape: tuple[int, ...], mesh: LogicalMesh) -> Layout:
    """A layout with, in each dimension, those of its axes that split it into the most parts."""
    if layout.fits(shape, mesh):
        return layout

    def largest_part(axes: tuple[int, ...], size: int) -> tuple[int, ...]:
        subsets = (s for n in range(len(axes), -1, -1) for s in itertools.combinations(axes, n))
        return max((s for s in subsets if size % mesh.size(s) == 0), key=mesh.size)

    dims = tuple(largest_part(axes, size) for axes, size in zip(layout.dims, shape, strict=True))
    return Layout(dims, layout.partial)


def _without(layout: Layout, dropped: set[int]) -> Layout:
    dims = tuple(tuple(a for a in axes if a not in dropped) for axes in layout.dims)
    return Layout(dims, tuple(a for a in layout.partial if a not in dropped))


# What a plan's decisions come to on a batch of another size, without a search: the peak of a device.


def peak_of_other_batch(plan: Plan, planned: TracedStep, traced: TracedStep, rules: RuleBook) -> int | None:
    """Bytes of a device under a plan's decisions, on the step as it is traced on another batch; None where the step has
    other operations or layers then.

    `planned` is the step for which the plan was made.
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
    return max(joined_as_named(staged, record.joined, traced.name).peak_bytes)
