"""Predictions from the instructions of a lowered step: its collectives, seconds and bytes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from autopar.attention import ring
from autopar.cost import peak_memory
from autopar.cost.cost_model import CostModel, NodeCosts, ring_bytes
from autopar.cost.roofline import is_fusible
from autopar.cost.xla_program import MemoryStep as MemoryStep
from autopar.hardware import host_cpu
from autopar.hardware.collective_cost import CollectiveKind, sent_bytes
from autopar.ir.graph import Op, OpGraph, OpKind, Value
from autopar.ir.layout import Layout, local_bytes
from autopar.ir.mesh import LogicalMesh
from autopar.ir.value_state import HOST, UNREDUCED
from autopar.lowering.instructions import (
    Accumulate,
    Compute,
    HostCopy,
    Instruction,
    Leave,
    Loop,
    LoweredBlock,
    Move,
    Pass,
    Place,
    Split,
    Stack,
)
from autopar.sharding.resharding import ReshardStep, StepKind


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveUse:
    """One collective of the step: `sent_bytes` by each device in one run, `count` runs a step, `module` its cause."""

    kind: CollectiveKind
    axes: tuple[int, ...]
    sent_bytes: float
    count: float
    time_s: float
    module: str
    value: str

    @property
    def total_bytes(self) -> float:
        return self.sent_bytes * self.count


def predicted_collectives(graph: OpGraph, lowered: LoweredBlock, model: CostModel) -> tuple[CollectiveUse, ...]:
    """Every collective of a lowered step, in program order. Of a branch, the alternative that sends most."""
    found: list[CollectiveUse] = []
    for instruction in lowered.instructions:
        if isinstance(instruction, Move):
            value = graph.values[instruction.value]
            for step in instruction.steps:
                use = use_of_step(value, step, instruction, model)
                if use is not None:
                    found.append(use)
        elif isinstance(instruction, Compute) and instruction.reduced:
            found += uses_of_reduction(graph, instruction, model)
        elif isinstance(instruction, Compute):
            found += uses_of_ring(instruction, model)
        elif isinstance(instruction, Loop):
            inner = [predicted_collectives(graph, block, model) for block in instruction.blocks]
            if instruction.op.kind is OpKind.COND:
                found += max(inner, key=lambda uses: sum(u.total_bytes for u in uses))
            else:
                found += [use for uses in inner for use in uses]
    return tuple(found)


def use_of_step(value: Value, step: ReshardStep, move: Move, model: CostModel) -> CollectiveUse | None:
    """The collective of one step of a resharding; None for a step that stays on the device."""
    links = model.links
    nbytes = value.nbytes * model.widening(value.dtype)
    collective = links.as_compiled(step, nbytes)
    if collective is None:
        return None
    kind, result_bytes = collective
    return CollectiveUse(
        kind=kind,
        axes=step.axes,
        sent_bytes=float(sent_bytes(kind, result_bytes, links.mesh.size(step.axes))),
        count=move.count,
        time_s=(links.time_s(kind, result_bytes, step.axes) + links.copied_s(step, nbytes)) * move.count,
        module=move.module,
        value=value.name or f"{value.dtype}{list(value.shape)}",
    )


def uses_of_reduction(graph: OpGraph, compute: Compute, model: CostModel) -> list[CollectiveUse]:
    """The all-reduces that the partitioner makes of an operation with a split reduced factor."""
    mesh, op = model.links.mesh, compute.op
    out = []
    for v, layout in zip(op.outputs, compute.results, strict=True):
        value = graph.values[v]
        nbytes = local_bytes(value.shape, value.itemsize, layout, mesh) * model.widening(value.dtype)
        out.append(
            CollectiveUse(
                kind=CollectiveKind.ALL_REDUCE,
                axes=compute.reduced,
                sent_bytes=float(sent_bytes(CollectiveKind.ALL_REDUCE, nbytes, mesh.size(compute.reduced))),
                count=op.count,
                time_s=model.links.time_s(CollectiveKind.ALL_REDUCE, nbytes, compute.reduced) * op.count,
                module=op.module,
                value=value.name or f"{value.dtype}{list(value.shape)}",
            )
        )
    return out


def uses_of_ring(compute: Compute, model: CostModel) -> list[CollectiveUse]:
    """The permutes by which parts of an operation's operands go round the devices that split it."""
    op, strategy = compute.op, compute.strategy
    if strategy is None or not strategy.ring:
        return []
    turns = model.links.mesh.size(strategy.ring) - 1
    kind, out = CollectiveKind.COLLECTIVE_PERMUTE, []
    for nbytes, (i, _) in zip(ring_bytes(op, strategy, model), ring.travelling(op.eqn), strict=True):
        aval = op.eqn.invars[i].aval
        out.append(
            CollectiveUse(
                kind=kind,
                axes=strategy.ring,
                sent_bytes=nbytes,
                count=op.count * turns,
                time_s=model.links.time_s(kind, nbytes, strategy.ring) * op.count * turns,
                module=op.module,
                value=f"{aval.dtype}{list(aval.shape)}",
            )
        )
    return out


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HostUse:
    """What one device keeps in the memory of its host, and copies from there and back in a step."""

    kept_bytes: int
    copied_bytes: int
    time_s: float


def host_use(graph: OpGraph, lowered: LoweredBlock, model: CostModel) -> HostUse:
    """Of the state that a lowered step finds in the memory of the host."""
    mesh = model.links.mesh

    def local(value: int, layout: Layout) -> int:
        v = graph.values[value]
        return local_bytes(v.shape, v.itemsize, layout, mesh)

    entries = zip(lowered.block.inputs, lowered.entries(), strict=True)
    copies = [i for i in lowered.instructions if isinstance(i, HostCopy)]
    return HostUse(
        kept_bytes=sum(local(v, layout) for v, (layout, state) in entries if state == HOST),
        copied_bytes=sum(local(t.value, t.target[0]) for t in copies),
        time_s=sum(host_copy_s(graph, t, model) for t in copies),
    )


def host_copy_s(graph: OpGraph, copy: HostCopy, model: CostModel) -> float:
    """Seconds of a copy from the memory of the host, or to it."""
    value = graph.values[copy.value]
    nbytes = local_bytes(value.shape, value.itemsize, copy.target[0], model.links.mesh)
    return model.device.host_copy_s(nbytes)


def compute_times_s(
    graph: OpGraph, lowered: LoweredBlock, model: CostModel, costs: NodeCosts | None = None
) -> dict[int, float]:
    """Seconds that one device computes each operation (by its number) in a step, collectives left out.

    Of a branch, the alternative that takes longest. `costs` of the same graph and model save working them out again.
    """
    costs = costs or NodeCosts(graph, model)

    def of_block(block: LoweredBlock) -> dict[int, float]:
        out: dict[int, float] = {}
        for instruction in block.instructions:
            if isinstance(instruction, Compute):
                out[instruction.op.id] = costs.compute_s(instruction.op, instruction.strategy)
            elif isinstance(instruction, Loop):
                inner = [of_block(b) for b in instruction.blocks]
                if instruction.op.kind is OpKind.COND:
                    inner = [max(inner, key=lambda seconds: sum(seconds.values()))]
                for seconds in inner:
                    out.update(seconds)
        return out

    return of_block(lowered)


def allocation_s(estimate: peak_memory.MemoryEstimate, model: CostModel) -> float:
    """Seconds that a step in one program waits for the memory of its temporary values."""
    return host_cpu.page_fault_s(model.device, estimate.temporary_bytes)


def memory_program(
    graph: OpGraph, lowered: LoweredBlock, model: CostModel
) -> tuple[peak_memory.MemoryProgram, dict[int, tuple[int, Place]]]:
    """The step as `peak_memory` wants it, and which value in which place each of its numbers stands for."""
    writer = _MemoryWriter(graph, model)
    steps: list[MemoryStep] = []
    env: dict[tuple[int, Place], int] = {}
    arguments = [writer.define(v, place, env) for v, place in zip(lowered.block.inputs, lowered.entries(), strict=True)]
    writer.block(lowered, env, steps)
    results: list[int] = []
    taken = set(arguments)
    for atom, place in zip(lowered.block.outputs, lowered.outputs, strict=True):
        source = env[atom, place] if isinstance(atom, int) and place is not None else writer.literal(steps)
        results.append(writer.own(source, taken, steps))
        taken.add(results[-1])
    tied = {arguments[i]: results[o] for i, o in graph.tied}
    program = peak_memory.MemoryProgram(
        steps=tuple(steps), nbytes=writer.nbytes, arguments=tuple(arguments), results=tuple(results), donated=tied
    )
    return program, writer.stands_for


def task_memory(
    graph: OpGraph,
    instructions: Sequence[Instruction],
    inputs: Sequence[tuple[int, Place]],
    outputs: Sequence[tuple[int, Place]],
    model: CostModel,
) -> int:
    """Bytes on one device that a part of a step, run as a program of its own, needs beside its inputs and outputs."""
    program, _ = task_program(graph, instructions, inputs, outputs, model)
    return peak_memory.estimate(program, model.compiler).temporary_bytes


def task_program(
    graph: OpGraph,
    instructions: Sequence[Instruction],
    inputs: Sequence[tuple[int, Place]],
    outputs: Sequence[tuple[int, Place]],
    model: CostModel,
) -> tuple[peak_memory.MemoryProgram, dict[int, tuple[int, Place]]]:
    """A part of a step that runs as a program of its own, and which value in which place each number stands for.

    An input that is an output too (an accumulator) is updated in place.
    """
    writer = _MemoryWriter(graph, model)
    steps: list[MemoryStep] = []
    env: dict[tuple[int, Place], int] = {}
    arguments = {(value, place): writer.define(value, place, env) for value, place in inputs}
    for instruction in instructions:
        writer.instruction(instruction, env, steps)
    results: list[int] = []
    taken = set(arguments.values())
    donated: dict[int, int] = {}
    for value, place in outputs:
        if (value, place) not in env:
            results.append(writer.literal(steps))  # an accumulator's zeros
            continue
        results.append(writer.own(env[value, place], taken, steps))
        taken.add(results[-1])
        if (value, place) in arguments:
            donated[arguments[value, place]] = results[-1]
    program = peak_memory.MemoryProgram(
        steps=tuple(steps),
        nbytes=writer.nbytes,
        arguments=tuple(arguments.values()),
        results=tuple(results),
        donated=donated,
    )
    return program, writer.stands_for


def kind_of(op: Op) -> str:
    """The primitive's name; a broadcast that only adds dimensions of size one is a reshape."""
    if op.primitive == "broadcast_in_dim" and op.eqn.outvars[0].aval.size == op.eqn.invars[0].aval.size:
        return "reshape"
    return op.primitive


_HALF_PRECISION = frozenset({np.dtype(jnp.bfloat16), np.dtype(np.float16)})


def is_half_precision(op: Op) -> bool:
    """Whether all operands and results are 16-bit floats."""
    # The size first: looking the type up costs ten times as much, and most are wider.
    return all(
        v.aval.dtype.itemsize == 2 and v.aval.dtype in _HALF_PRECISION for v in (*op.eqn.invars, *op.eqn.outvars)
    )


def reduces_last(op: Op) -> bool:
    """Whether a reduction runs over its operand's last dimension."""
    axes = op.eqn.params.get("axes", ())
    return not axes or len(op.eqn.invars[0].aval.shape) - 1 in axes


class _MemoryWriter:
    def __init__(self, graph: OpGraph, model: CostModel) -> None:
        self.graph, self.mesh = graph, model.links.mesh
        self.nbytes: dict[int, int] = {}
        self.stands_for: dict[int, tuple[int, Place]] = {}

    def new(self, nbytes: int) -> int:
        self.nbytes[len(self.nbytes)] = nbytes
        return len(self.nbytes) - 1

    def local(self, value: int, layout: Layout) -> int:
        v = self.graph.values[value]
        return local_bytes(v.shape, v.itemsize, layout, self.mesh)

    def define(self, value: int, place: Place, env: dict[tuple[int, Place], int]) -> int:
        number = env[value, place] = self.new(0 if place[1] == HOST else self.local(value, place[0]))
        self.stands_for[number] = (value, place)
        return number

    def literal(self, steps: list[MemoryStep]) -> int:
        number = self.new(4)  # a scalar: its few bytes decide nothing
        steps.append(MemoryStep(inputs=(), outputs=(number,), kind="iota", fusible=True))
        return number

    def own(self, value: int, taken: set[int], steps: list[MemoryStep]) -> int:
        """A result that is an argument, or another result, handed through needs memory of its own."""
        if value not in taken:
            return value
        copy = self.new(self.nbytes[value])
        steps.append(MemoryStep(inputs=(value,), outputs=(copy,), kind="convert", fusible=True))
        return copy

    def block(self, lowered: LoweredBlock, env: dict[tuple[int, Place], int], steps: list[MemoryStep]) -> None:
        for instruction in lowered.instructions:
            self.instruction(instruction, env, steps)

    def instruction(self, instruction: Instruction, env: dict[tuple[int, Place], int], steps: list[MemoryStep]) -> None:
        if isinstance(instruction, Move):
            self.move(instruction, env, steps)
        elif isinstance(instruction, Compute) and instruction.op.primitive in ring.PRIMITIVES:
            self.attention(instruction, env, steps)
        elif isinstance(instruction, Compute):
            op = instruction.op
            outputs = tuple(self.define(v, place, env) for v, place in zip(op.outputs, instruction.places, strict=True))
            steps.append(
                MemoryStep(
                    inputs=self.read(op, instruction.reads, env),
                    outputs=outputs,
                    kind=kind_of(op),
                    fusible=is_fusible(op.primitive),
                    reduces_last=reduces_last(op),
                    half_precision=is_half_precision(op),
                    key=(op.key, instruction.results),
                )
            )
        elif isinstance(instruction, Pass):
            op = instruction.op
            inputs = self.read(op, instruction.reads, env)
            outputs = tuple(
                self.define(v, (p[0], UNREDUCED), env) for v, p in zip(op.outputs, instruction.reads, strict=True)
            )
            steps.append(MemoryStep(inputs=inputs, outputs=outputs, kind="optimization_barrier", fusible=False))
        elif isinstance(instruction, Loop):
            self.loop(instruction, env, steps)
        elif isinstance(instruction, HostCopy):
            at, waited_for = env[instruction.value, instruction.source], instruction.behind
            inputs = (at, *(env[key] for key in waited_for if key in env))
            output = self.define(instruction.value, instruction.target, env)
            steps.append(MemoryStep(inputs=inputs, outputs=(output,), kind="host_copy", fusible=False))
        elif not isinstance(instruction, Leave):
            self.crossing(instruction, env, steps)

    def attention(self, compute: Compute, env: dict[tuple[int, Place], int], steps: list[MemoryStep]) -> None:
        """A block of scores and one of weights, in 32 bits, beside the keys and values that have come round."""
        op, inputs = compute.op, self.read(compute.op, compute.reads, env)
        outputs = tuple(self.define(v, place, env) for v, place in zip(op.outputs, compute.places, strict=True))
        buffers: list[int] = []
        if compute.strategy is not None and compute.strategy.ring:
            for i, itemsize in ring.travelling(op.eqn):
                shape = op.eqn.invars[i].aval.shape
                buffers.append(self.new(local_bytes(shape, itemsize, compute.strategy.operands[i], self.mesh)))
            steps.append(
                MemoryStep(
                    inputs=inputs, outputs=tuple(buffers), kind="collective_permute", fusible=False, key=("ring", op.id)
                )
            )
        nbytes = ring.block_bytes(op.eqn)
        if compute.strategy is not None:
            nbytes //= compute.strategy.split * self.mesh.size(compute.strategy.ring)
        scores, weights = self.new(nbytes), self.new(nbytes)
        at = (*inputs, *buffers)
        for made, read in (((scores,), at), ((weights,), (*at, scores)), (outputs, (*at, weights))):
            steps.append(MemoryStep(inputs=read, outputs=made, kind=op.primitive, fusible=False, key=(op.id, made)))

    def crossing(
        self, instruction: Split | Accumulate | Stack, env: dict[tuple[int, Place], int], steps: list[MemoryStep]
    ) -> None:
        """The parts of a split value count as one value of the first part's size: they are outputs, counted apart."""
        inputs = self.read(instruction.op, (instruction.read,), env)
        (target,) = instruction.op.outputs
        if isinstance(instruction, Accumulate):
            inputs = (*inputs, env[target, instruction.sum_])
            place, kind = instruction.sum_, "add"
        else:
            place, kind = (instruction.result, UNREDUCED), "copy"
        steps.append(MemoryStep(inputs=inputs, outputs=(self.define(target, place, env),), kind=kind, fusible=True))

    def read(self, op: Op, reads: tuple[Place | None, ...], env: dict[tuple[int, Place], int]) -> tuple[int, ...]:
        return tuple(
            env[atom, place]
            for atom, place in zip(op.inputs, reads, strict=True)
            if isinstance(atom, int) and place is not None
        )

    def move(self, move: Move, env: dict[tuple[int, Place], int], steps: list[MemoryStep]) -> None:
        at = env[move.value, move.source]
        if move.apart:
            behind = self.new(self.nbytes[at])
            steps.append(MemoryStep(inputs=(at,), outputs=(behind,), kind="optimization_barrier", fusible=False))
            at = behind
        for step in move.steps:
            last = step is move.steps[-1]
            after = self.define(move.value, move.target, env) if last else self.new(self.local(move.value, step.after))
            local = step.kind in (StepKind.SLICE, StepKind.MASK)
            kind = "slice" if local else step.kind.name.lower()
            steps.append(
                MemoryStep(
                    inputs=(at,), outputs=(after,), kind=kind, fusible=local, key=(step.kind, step.before, step.after)
                )
            )
            at = after

    def loop(self, loop: Loop, env: dict[tuple[int, Place], int], steps: list[MemoryStep]) -> None:
        op = loop.op
        inputs = tuple(
            self.literal(steps) if place is None or not isinstance(atom, int) else env[atom, place]
            for atom, place in zip(op.inputs, loop.reads, strict=True)
        )
        bodies = [self.body(block, env) for block in loop.blocks]
        outputs = tuple(
            self.define(v, (layout, UNREDUCED), env) for v, layout in zip(op.outputs, loop.results, strict=True)
        )
        if op.kind is OpKind.COND:
            branches = tuple(
                MemoryStep(
                    inputs=inputs[1:],
                    outputs=outputs,
                    kind="branch",
                    fusible=False,
                    body=body,
                    body_inputs=inner,
                    body_outputs=out,
                )
                for inner, body, out in bodies
            )
            steps.append(MemoryStep(inputs=inputs, outputs=outputs, kind="cond", fusible=False, body=branches))
            return
        inner, body, out = bodies[-1]
        skipped = op.num_condition_consts if op.kind is OpKind.WHILE else 0
        steps.append(
            MemoryStep(
                inputs=inputs[skipped:],
                outputs=outputs,
                kind=op.kind.value,
                fusible=False,
                body=body,
                body_inputs=inner,
                body_outputs=out,
                num_constants=op.num_consts - skipped,
                num_carried=op.num_carry,
                trips=op.trips,
            )
        )

    def body(
        self, lowered: LoweredBlock, outer: dict[tuple[int, Place], int]
    ) -> tuple[tuple[int, ...], tuple[MemoryStep, ...], tuple[int, ...]]:
        env = dict(outer)
        steps: list[MemoryStep] = []
        inner = tuple(
            self.define(v, (layout, UNREDUCED), env)
            for v, layout in zip(lowered.block.inputs, lowered.inputs, strict=True)
        )
        self.block(lowered, env, steps)
        out = tuple(
            self.literal(steps) if place is None or not isinstance(atom, int) else env[atom, place]
            for atom, place in zip(lowered.block.outputs, lowered.outputs, strict=True)
        )
        return inner, tuple(steps), out


def place_names(
    graph: OpGraph, stands_for: dict[int, tuple[int, tuple[Layout, str]]], made_by: dict[int, str], mesh: LogicalMesh
) -> dict[int, str]:
    """What to call the values of a memory program in messages."""
    out = {}
    for number, (v, place) in stands_for.items():
        value = graph.values[v]
        what = value.name or f"{made_by.get(v, 'value')} {value.dtype}{list(value.shape)}"
        copy = "" if place[1] in ("raw", "placed") else f", copy for {place[1]}"
        out[number] = f"{what} {place[0].text(mesh)}{copy}"
    return out
