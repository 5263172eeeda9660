"""Validity of a plan's decisions against the graph of its step: each strategy is a strategy of its operation, each
layout is that in which the operation leaves the value, and partial sums reach only operations that accept them.

Decisions of a search are valid, a changed file is refused by its checksum and one of another format by its version
(`plan.plan`), and a step with other operations by `check_operations`. Where rules of sharding have changed since, they
may not be. Without this check they would raise an error far from the cause or, for partial sums, give wrong numbers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from autopar.common import jax_compat
from autopar.common.files import Fault
from autopar.errors import AutoparError, PlanMismatchError
from autopar.ir.graph import Block, FactorKind, Op, OpGraph, OpKind
from autopar.ir.layout import Layout, LogicalMesh, replicated
from autopar.ir.primitives import is_summing_type, sums_locally
from autopar.ir.strategies import Signature, Strategy, strategy_of
from autopar.lowering.lower import ShardingPlan
from autopar.ops.kernels.local import admits
from autopar.plan.codec import differing
from autopar.plan.schema import Decisions, PipelineRecord, PlannedValue

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
    """Compares the layers of a plan with those of the step. Raises: PlanMismatchError."""
    recorded = [(f"$.plan.pipeline.stages[{q}].layers", stage.layers) for q, stage in enumerate(pipeline.stages)]
    for place, layers in recorded:
        first, names = names[: len(layers)], names[len(layers) :]
        if tuple(layers) != tuple(first):
            raise mismatch(step, Fault(place=place, expected=", ".join(first) or "none", got=", ".join(layers)))
    if names:
        got = f"{len(names)} layers in no stage, the first of them {names[0]}"
        raise mismatch(step, Fault(place="$.plan.pipeline.stages", expected="stages that hold all layers", got=got))


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
        yield from self.is_reduced(self.graph.block.inputs)
        yield from self.block(self.graph.block)

    def is_reduced(self, values: Sequence[int]) -> Iterator[Fault]:
        for v in values:
            if self.home(v).partial:
                yield Fault(place=f"{self.place}.raw.{v}", expected="no sum", got=self.home(v).text(self.mesh))

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
                    yield from self.is_reduced(op.outputs)
            elif op.kind is OpKind.SCAN:
                (body,) = op.blocks
                first, carry = op.num_consts, op.num_carry
                carried = body.inputs[first : first + carry]
                sums = [v for v in carried if v in partial_values]
                yield from self.is_reduced([v for v in body.inputs if v not in sums])
                for inner, result in zip(carried, op.outputs[:carry], strict=True):
                    yield from self.lies_as(result, self.home(inner))
                for stack in op.outputs[carry:]:
                    home = self.home(stack)
                    yield from self.lies_as(
                        stack, Layout(((), *home.dims[1:]), home.partial if stack in partial_values else ())
                    )
            elif op.kind is OpKind.WHILE:
                condition, body = op.blocks
                yield from self.is_reduced((*condition.inputs, *body.inputs, *op.outputs))
                carried = body.inputs[len(body.inputs) - len(op.outputs) :]
                for inner, result in zip(carried, op.outputs, strict=True):
                    yield from self.lies_as(result, self.home(inner))
            else:
                yield from self.is_reduced((*op.outputs, *(v for inner in op.blocks for v in inner.inputs)))
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
    in_order = replace(rebuilt, ring=tuple(sorted(rebuilt.ring)))
    return in_order == replace(strategy, ring=tuple(sorted(strategy.ring)))
