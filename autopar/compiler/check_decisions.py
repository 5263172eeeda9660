"""Validity of a plan's decisions against the graph of its step: each strategy is a strategy of its operation, each
layout is that in which the operation leaves the value, and partial sums reach only operations that accept them.

Decisions of a search are valid; those of a file may not be. Without this check they would raise an error far from the
cause or, for partial sums, give wrong numbers. `plan.file` holds the checks that need no step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Sequence

from autopar.common import jax_compat
from autopar.common.files import Fault
from autopar.errors import AutoparError, PlanMismatchError
from autopar.frontend.recompute_in_scans import Recompute, is_by_value
from autopar.ir.graph import Block, FactorKind, Op, OpGraph, OpKind, values_of, walk
from autopar.ir.layout import Layout, replicated
from autopar.ir.mesh import LogicalMesh
from autopar.ir.primitives import is_summing_type, sums_locally
from autopar.kernels.local import admits
from autopar.lowering.lower import ShardingPlan
from autopar.passes.stage_graph import StageGraph
from autopar.plan.codec import differing
from autopar.plan.schema import Decisions, PipelineRecord, PlannedValue
from autopar.sharding.strategies import Signature, Strategy, strategy_of

_HINT = "plan anew; what a plan must hold to is said with autopar.constrain, not by editing its file"


def check_decisions(plan: ShardingPlan, graph: OpGraph, place: str, step: str) -> None:
    """Raises: PlanMismatchError for the first invalid decision; `place` is the place of the decisions in the file."""
    for fault in _Checker(plan, graph, place).faults():
        raise mismatch(step, fault)


def check_operations(decisions: Decisions, graph: OpGraph, place: str, step: str) -> None:
    """Checks that decisions are for the operations that have their numbers in the graph. Raises: PlanMismatchError."""
    for number, op in differing(decisions, graph):
        where = f"{op.place or op.primitive} at {jax_compat.source_line(op.eqn)}" if op is not None and op.eqn else ""
        is_now = "no operation" if op is None else f"another one: {op.primitive} in {where or 'the step'}"
        expected = f"operation {number} of the graph as it was when the plan was made"
        raise mismatch(step, Fault(place=f"{place}.of_op.{number}", expected=expected, got=is_now))


def check_values(planned: Sequence[PlannedValue], actual: Sequence[PlannedValue], place: str, step: str) -> None:
    """Compares recorded arguments, or results, with those that the decisions imply. Raises: PlanMismatchError."""
    if len(planned) != len(actual):
        raise mismatch(step, Fault(place=place, expected=f"{len(actual)} of them", got=str(len(planned))))
    for i, (recorded, value) in enumerate(zip(planned, actual, strict=True)):
        if (recorded.kind == "constant") != (value.kind == "constant"):
            raise mismatch(step, Fault(place=f"{place}[{i}].kind", expected=value.kind, got=recorded.kind))
        for field in ("shape", "dtype", "stage", "stages", "layout", "in_host"):
            expected, got = getattr(value, field), getattr(recorded, field)
            if expected != got:
                raise mismatch(step, Fault(place=f"{place}[{i}].{field}", expected=str(expected), got=str(got)))


def check_layers(pipeline: PipelineRecord, names: Sequence[str], step: str) -> None:
    """Compares the layers and recomputation policies of a plan with those of the step. Raises: PlanMismatchError."""
    recorded = [(f"$.plan.pipeline.stages[{q}].layers", stage.layers) for q, stage in enumerate(pipeline.stages)]
    for place, layers in recorded:
        first, names = names[: len(layers)], names[len(layers) :]
        if tuple(layers) != tuple(first):
            raise mismatch(step, Fault(place=place, expected=", ".join(first) or "none", got=", ".join(layers)))
    if names:
        got = f"{len(names)} layers in no stage, the first of them {names[0]}"
        raise mismatch(step, Fault(place="$.plan.pipeline.stages", expected="stages that hold all layers", got=got))
    known = [policy.value for policy in Recompute]
    for i, policy in enumerate(pipeline.recomputed):
        if policy not in known and not is_by_value(policy):
            place = f"$.plan.pipeline.recomputed[{i}]"
            raise mismatch(step, Fault(place=place, expected=" or ".join(known), got=repr(policy)))


def check_groups(pipeline: PipelineRecord, group_of_stage: Sequence[int], step: str) -> None:
    """Checks that stages share a group of devices exactly where the schedule says so. Raises: PlanMismatchError."""
    first_device: dict[int, int] = {}
    for q, (stage, group) in enumerate(zip(pipeline.stages, group_of_stage, strict=True)):
        place, got = f"$.plan.pipeline.stages[{q}].first_device", str(stage.first_device)
        expected = first_device.setdefault(group, stage.first_device)
        if stage.first_device != expected:
            raise mismatch(step, Fault(place=place, expected=f"{expected}, as of its group's other stage", got=got))
        if list(first_device.values()).count(expected) > 1:
            raise mismatch(step, Fault(place=place, expected="devices of another group than the others'", got=got))


def check_transfers(
    plans: Sequence[ShardingPlan], stages: Sequence[StageGraph], group_of_stage: Sequence[int], step: str
) -> None:
    """Checks that a value has one layout on both sides within a group of devices. Raises: PlanMismatchError."""
    for q, (plan, stage) in enumerate(zip(plans, stages, strict=True)):
        for op in stage.graph.block.ops:
            target = stage.sends.get(op.id)
            if op.kind is not OpKind.SEND or target is None or group_of_stage[target] != group_of_stage[q]:
                continue
            (value,) = op.inputs
            assert isinstance(value, int), "values are sent, not literals"
            rank = len(stage.graph.values[value].shape)
            arrives = plans[target].unreduced.get(value) or replicated(rank)
            if plan.transfer_layouts[op.id] != arrives:
                place = f"$.plan.pipeline.stages[{q}].decisions.wires.{op.id}"
                expected, got = arrives.text(plan.mesh), plan.transfer_layouts[op.id].text(plan.mesh)
                raise mismatch(step, Fault(place=place, expected=expected, got=got))


@contextlib.contextmanager
def at_place(step: str, place: str) -> Iterator[None]:
    """Reports errors of its body as errors of a plan at a place of its file. Raises: PlanMismatchError."""
    try:
        yield
    except PlanMismatchError:
        raise
    except AutoparError as error:
        raise mismatch(step, Fault(place=place, expected=error.expected, got=error.got)) from error


def mismatch(step: str, fault: Fault) -> PlanMismatchError:
    """The error of a plan that does not belong to its step."""
    return PlanMismatchError(where=f"plan of {step}, {fault.place}", expected=fault.expected, got=fault.got, hint=_HINT)


@dataclasses.dataclass(slots=True)
class _Checker:
    plan: ShardingPlan
    graph: OpGraph
    place: str

    @property
    def mesh(self) -> LogicalMesh:
        return self.plan.mesh

    def home(self, value: int) -> Layout:
        """The layout in which the operation leaves a value, as in `lowering`."""
        return self.plan.unreduced.get(value) or replicated(len(self.graph.values[value].shape))

    def reduced(self, value: int) -> Layout:
        return self.plan.reduced.get(value) or self.home(value)

    def faults(self) -> Iterator[Fault]:
        yield from self.numbers()
        yield from self.layouts()
        yield from self.is_reduced("raw", self.graph.block.inputs)
        yield from self.block(self.graph.block)

    def numbers(self) -> Iterator[Fault]:
        """Operations and values exist in the graph."""
        ops = {op.id: op for op in walk(self.graph.block)}
        values = set(values_of(self.graph.block))
        for name, table in (("raw", self.plan.unreduced), ("placed", self.plan.reduced)):
            for v in table:
                if v not in values:
                    yield Fault(
                        place=f"{self.place}.{name}.{v}", expected="the number of a value of the step", got=str(v)
                    )
        for i, (v, _) in enumerate(self.plan.copies):
            if v not in values:
                yield Fault(place=f"{self.place}.copies[{i}][0]", expected="the number of a value", got=str(v))
        for op in self.plan.strategy:
            if op not in ops or ops[op].kind is not OpKind.EQUATION:
                yield Fault(place=f"{self.place}.of_op.{op}", expected="the number of an operation", got=str(op))
        sends = {op.id for op in ops.values() if op.kind is OpKind.SEND}
        for op in sends.symmetric_difference(self.plan.transfer_layouts):
            expected = "a layout of what is sent there" if op in sends else "the number of an operation that sends"
            yield Fault(place=f"{self.place}.wires.{op}", expected=expected, got="none" if op in sends else str(op))
        inputs = set(self.graph.block.inputs)
        for i, v in enumerate(sorted(self.plan.in_host)):
            if v not in inputs:
                yield Fault(place=f"{self.place}.in_host[{i}]", expected="the number of an argument", got=str(v))
        for i, v in enumerate(sorted(self.plan.saved_in_host)):
            if v not in values:
                yield Fault(place=f"{self.place}.saved_in_host[{i}]", expected="the number of a value", got=str(v))
        for i, a in enumerate(self.plan.overlapped_axes):
            if a not in range(len(self.plan.mesh.axis_sizes)):
                place = f"{self.place}.overlapped_axes[{i}]"
                yield Fault(place=place, expected="the number of a mesh axis", got=str(a))

    def layouts(self) -> Iterator[Fault]:
        """Layouts have the rank of their values and divide their shapes; only unreduced values may be partial."""
        ops = {op.id: op for op in walk(self.graph.block)}
        tables = [(f".raw.{v}", v, layout, True) for v, layout in self.plan.unreduced.items()]
        tables += [(f".placed.{v}", v, layout, False) for v, layout in self.plan.reduced.items()]
        tables += [(f".copies[{i}][2]", v, at, False) for i, ((v, _), at) in enumerate(self.plan.copies.items())]
        transfers = ((op, ops[op].inputs[0], layout) for op, layout in self.plan.transfer_layouts.items())
        tables += [(f".wires.{op}", v, layout, False) for op, v, layout in transfers if isinstance(v, int)]
        for name, v, layout, may_be_sum in tables:
            shape = self.graph.values[v].split_shape
            if len(layout.dims) != len(shape) or not layout.fits(shape, self.mesh):
                expected = f"a split of shape {list(shape)} into equal parts"
                yield Fault(place=f"{self.place}{name}", expected=expected, got=layout.text(self.mesh))
            if layout.partial and not may_be_sum:
                yield Fault(place=f"{self.place}{name}", expected="no sum", got=layout.text(self.mesh))
            if layout.partial and may_be_sum and v not in self.plan.reduced:
                yield Fault(place=f"{self.place}.placed.{v}", expected="where the sum comes to lie", got="nothing")

    def is_reduced(self, table: str, values: Sequence[int]) -> Iterator[Fault]:
        for v in values:
            if self.home(v).partial:
                yield Fault(place=f"{self.place}.{table}.{v}", expected="no sum", got=self.home(v).text(self.mesh))

    def lies_as(self, value: int, layout: Layout) -> Iterator[Fault]:
        if self.home(value) != layout:
            got = self.home(value).text(self.mesh)
            yield Fault(place=f"{self.place}.raw.{value}", expected=layout.text(self.mesh), got=got)

    def block(self, block: Block) -> Iterator[Fault]:
        partial_values, partials = self.plan.partials.kept, self.plan.partials
        for op in block.ops:
            if op.kind is OpKind.EQUATION:
                yield from self.equation(op)
            elif op.kind is OpKind.BARRIER:
                for source, target in zip(op.inputs, op.outputs, strict=True):
                    if isinstance(source, int):
                        yield from self.lies_as(target, self.reduced(source))
            elif op.kind is OpKind.ACCUMULATE:
                if not partials.reads_unreduced(op, 0):
                    yield from self.is_reduced("raw", op.outputs)
            elif op.kind is OpKind.SCAN:
                (body,) = op.blocks
                first, carry = op.num_consts, op.num_carry
                carried = body.inputs[first : first + carry]
                sums = [v for v in carried if v in partial_values]
                yield from self.is_reduced("raw", [v for v in body.inputs if v not in sums])
                for inner, result in zip(carried, op.outputs[:carry], strict=True):
                    yield from self.lies_as(result, self.home(inner))
                for stack in op.outputs[carry:]:
                    home = self.home(stack)
                    yield from self.lies_as(
                        stack, Layout(((), *home.dims[1:]), home.partial if stack in partial_values else ())
                    )
            elif op.kind is OpKind.WHILE:
                condition, body = op.blocks
                yield from self.is_reduced("raw", (*condition.inputs, *body.inputs, *op.outputs))
                carried = body.inputs[len(body.inputs) - len(op.outputs) :]
                for inner, result in zip(carried, op.outputs, strict=True):
                    yield from self.lies_as(result, self.home(inner))
            else:
                yield from self.is_reduced("raw", (*op.outputs, *(v for inner in op.blocks for v in inner.inputs)))
            for inner_block in op.blocks:
                yield from self.block(inner_block)

    def equation(self, op: Op) -> Iterator[Fault]:
        strategy = self.plan.strategy.get(op.id)
        place = f"{self.place}.of_op.{op.id}"
        if strategy is None:
            for v in op.outputs:
                yield from self.lies_as(v, replicated(len(self.graph.values[v].shape)))
            return
        if not is_strategy(strategy, signature_of(op, self.graph, self.plan), self.mesh):
            where = f" in {op.place}" if op.place else ""
            reads = ", ".join(layout.text(self.mesh) for layout in strategy.operands)
            makes = ", ".join(layout.text(self.mesh) for layout in strategy.results)
            yield Fault(place=place, expected=f"a way to split {op.primitive}{where}", got=f"{reads} -> {makes}")
        for v, layout in zip(op.outputs, strategy.results, strict=True):
            yield from self.lies_as(v, layout)


def signature_of(op: Op, graph: OpGraph, plan: ShardingPlan) -> Signature:
    """The signature of an operation's strategies, as in `build_choice_graph`, with all operands that can be partial."""
    assert op.rule is not None, "equations have rules"
    members = plan.partials.unreduced_operands(op)
    sums = any(f.kind is FactorKind.SUM for f in op.rule.factors)
    return Signature(
        rule=op.rule,
        operand_shapes=tuple(graph.values[a].split_shape if isinstance(a, int) else a.shape for a in op.inputs),
        result_shapes=tuple(graph.values[v].split_shape for v in op.outputs),
        sums_partially=sums and sums_locally(op.eqn) and is_summing_type(op.eqn),
        linear=(members,) if members else (),
        admits=admits(op.eqn),
    )


@functools.lru_cache(maxsize=1 << 16)
def is_strategy(strategy: Strategy, signature: Signature, mesh: LogicalMesh) -> bool:
    """Whether a strategy is one of an operation: the factors that its layouts split give the same strategy again."""
    rebuilt = strategy_of(signature, strategy.operands, strategy.results, mesh)
    if rebuilt is None:
        return False
    in_order = dataclasses.replace(rebuilt, ring=tuple(sorted(rebuilt.ring)))
    return in_order == dataclasses.replace(strategy, ring=tuple(sorted(strategy.ring)))
