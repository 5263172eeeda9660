"""A lowered step as the prediction of memory reads it: steps of kernels, and which value each number stands for."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from msgspec.structs import replace

from autopar.cost import peak_memory
from autopar.cost.cost_model import CostModel
from autopar.cost.inner_collectives import parts_of_operands
from autopar.cost.roofline import kernel_under
from autopar.cost.usage import results_of, rounded_copies
from autopar.cost.xla_program import HOST_COPY, HOST_SLICE, SUM_OF_PIECES, MemoryStep, Tile, facts_of, transposed_alone
from autopar.ir.graph import HOST, UNREDUCED, Op, OpGraph, OpKind
from autopar.ir.layout import Layout, LogicalMesh, local_bytes
from autopar.ir.primitives import GROUPED_PRODUCT, MATRIX_PRODUCTS
from autopar.ir.resharding import StepKind
from autopar.ir.strategies import Strategy
from autopar.lowering.collective_matmul import Along
from autopar.lowering.instructions import (
    Accumulate,
    Compute,
    HostCopy,
    Instruction,
    Key,
    Leave,
    Loop,
    LoweredBlock,
    Move,
    Pass,
    Pieces,
    Place,
    Split,
    Stack,
)
from autopar.ops.attention import ring
from autopar.ops.attention.kernels import Kernel
from autopar.ops.attention.work import (
    block_bytes,
    held_in_steps,
    in_steps,
    order_of,
    row_bytes,
    travelling,
)
from autopar.ops.kernels.operation import bytes_in_blocks, is_kernel, masked_rows

# What a pass of attention that is one operation needs of memory, by the kernel that runs it.


def attention_steps(
    op: Op,
    strategy: Strategy | None,
    inputs: tuple[int, ...],
    outputs: tuple[int, ...],
    kernel: Kernel,
    mesh: LogicalMesh,
    nbytes: Mapping[int, int],
    new: Callable[[int], int],
) -> list[MemoryStep]:
    """A block of scores and one of weights, in 32 bits, beside the keys and values that have come round; of a kernel
    that keeps none, what it makes of each row beside its outputs. `new` makes a value of so many bytes.
    """
    steps: list[MemoryStep] = []
    buffers: list[int] = []
    same = op.key, strategy  # what another operation has that computes the same of the same operands
    split = 1 if strategy is None else strategy.split
    ring_size = 1 if strategy is None else mesh.size(strategy.ring)
    if strategy is not None and ring_size > 1:
        held = travelling(op.eqn)
        if in_steps(op.eqn, kernel, ring_size):
            held = (*held, *held_in_steps(op.eqn, order_of(op.eqn, ring_size)))
        for i, itemsize in held:
            shape = op.eqn.invars[i].aval.shape
            buffers.append(new(local_bytes(shape, itemsize, strategy.operands[i], mesh)))
        sent = tuple(buffers)
        steps.append(
            MemoryStep(inputs=inputs, outputs=sent, kind="collective_permute", fusible=False, key=("ring", *same))
        )
    at = (*inputs, *buffers)
    if not kernel.writes_scores:
        rows = new(row_bytes(op.eqn, kernel) // split)
        pairs: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = (((rows,), at), (outputs, (*at, rows)))
    else:
        block = block_bytes(op.eqn, split, ring_size)
        scores, weights = new(block), new(block)
        pairs = (((scores,), at), ((weights,), (*at, scores)), (outputs, (*at, weights)))
    for part, (made, read) in enumerate(pairs):
        key = part, *same
        steps.append(MemoryStep(inputs=read, outputs=made, kind=op.primitive, fusible=False, key=key))
    return steps


# What XLA's GPU compiler writes so that cuDNN, which pads both sides of a dimension alike, can run a convolution.
#
# A convolution whose sides differ reads a copy of its images with the padding in it, as strides of two over an even
# size need; so does one over dilated images. The gradient of a kernel reads a copy with as much more on one side, which
# is the same one where the other side has none, and is kept for it. The gradient of the images is made with their
# padding, and what reads it cuts that off.


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WrittenPadding:
    """What is added to the images, at each end of each of their dimensions, in a copy; and how many times its own size
    the result is. `dilation`: the distance of pixels in the copy.
    """

    added: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]
    copy_share: float
    result_share: float

    @property
    def is_copied(self) -> bool:
        return self.copy_share > 1.0


def written_padding(eqn: Any) -> WrittenPadding:
    """Of a `conv_general_dilated`.

    As XLA tells them apart (its `ConvRewriter`), the gradient of a kernel is a convolution by what is dilated or larger
    than what comes out, and that of images is one over dilated images.
    """
    params, numbers = eqn.params, eqn.params["dimension_numbers"]
    images, kernel, result = (v.aval.shape for v in (*eqn.invars[:2], *eqn.outvars))
    in_spatial, by_spatial, out_spatial = numbers.lhs_spec[2:], numbers.rhs_spec[2:], numbers.out_spec[2:]
    is_of_kernel = set(params["window_strides"]) | set(params["lhs_dilation"]) == {1} and (
        max(params["rhs_dilation"]) > 1
        or all(kernel[k] > result[o] for k, o in zip(by_spatial, out_spatial, strict=True))
    )
    added, dilation = [(0, 0)] * len(images), [1] * len(images)
    result_share = 1.0
    spatial = zip(in_spatial, by_spatial, out_spatial, strict=True)
    for i, (at, k, o) in enumerate(spatial):
        low, high = params["padding"][i]
        into, apart, stride = params["lhs_dilation"][i], params["rhs_dilation"][i], params["window_strides"][i]
        if is_of_kernel:
            reach = (kernel[k] - 1) * apart + (result[o] - 1) * stride + 1
            high = _nearest_high(low, reach - images[at] - low, apart)
            added[at] = max(low, 0) - max(min(low, high), 0), max(high, 0) - max(min(low, high), 0)
        elif into > 1 and stride == 1:
            width = (kernel[k] - 1) * apart + 1
            low = width - 1 - low
            high = _nearest_high(low, width + (images[at] - 1) * into - result[o] - low, into)
            result_share *= (result[o] + abs(high - low)) / result[o]
        elif low != high or into > 1:
            added[at], dilation[at] = (max(low, 0), max(high, 0)), into
    copied = math.prod(
        (n - 1) * step + 1 + sum(ends) for n, step, ends in zip(images, dilation, added, strict=True) if n
    )
    return WrittenPadding(
        added=tuple(added),
        dilation=tuple(dilation),
        copy_share=copied / max(1, math.prod(images)),
        result_share=result_share,
    )


def _nearest_high(low: int, least: int, stride: int) -> int:
    """The padding of the other side that is nearest to this one's, where a stride leaves a choice."""
    return min(max(low, least), least + stride - 1)


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
) -> peak_memory.MemoryEstimate:
    """The memory on one device of a part of a step that runs as a program of its own: beside its inputs and outputs it
    needs `temporary_bytes`.
    """
    program, _ = task_program(graph, instructions, inputs, outputs, model)
    return peak_memory.estimate(program, model.compiler)


def task_program(
    graph: OpGraph,
    instructions: Sequence[Instruction],
    inputs: Sequence[tuple[int, Place]],
    outputs: Sequence[tuple[int, Place]],
    model: CostModel,
    zeros: Sequence[tuple[int, Place]] = (),
    tied: Mapping[Key, Key] = MappingProxyType({}),
) -> tuple[peak_memory.MemoryProgram, dict[int, tuple[int, Place]]]:
    """A part of a step that runs as a program of its own, and which value in which place each number stands for.

    An input that is an output too (an accumulator) is updated in place. `zeros` are places that it fills with zeros
    before its instructions; the results that `tied` names take over the memory of the inputs in front of them.
    """
    writer = _MemoryWriter(graph, model)
    steps: list[MemoryStep] = []
    env: dict[tuple[int, Place], int] = {}
    arguments = {(value, place): writer.define(value, place, env) for value, place in inputs}
    writer.rounded |= rounded_copies(graph, instructions, outputs, model)
    writer.transposed |= transposed_alone(instructions)
    for value, place in zeros:
        number = writer.define(value, place, env)
        steps.append(MemoryStep(inputs=(), outputs=(number,), kind="broadcast_in_dim", fusible=True))
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
    made = dict(zip(outputs, results, strict=True))
    donated |= {arguments[old]: made[new] for old, new in tied.items() if old in arguments and new in made}
    program = peak_memory.MemoryProgram(
        steps=tuple(steps),
        nbytes=writer.nbytes,
        arguments=tuple(arguments.values()),
        results=tuple(results),
        donated=donated,
    )
    return program, writer.stands_for


class _MemoryWriter:
    def __init__(self, graph: OpGraph, model: CostModel) -> None:
        self.graph, self.model, self.mesh, self.device = graph, model, model.links.mesh, model.device
        self.rounded: set[tuple[int, Place]] = set()
        self.transposed: dict[int, Sequence[int]] = {}
        # The largest numbers of rows of the latest attention, and its kernel's array of them: where its own backward
        # pass is the next one, XLA takes them out of that array there.
        self.rows: tuple[int, tuple[int, ...]] = -1, ()
        self.nbytes: dict[int, int] = {}
        self.stands_for: dict[int, tuple[int, Place]] = {}
        self._facts: dict[str, tuple[str, bool, bool, bool]] = {}

    def facts(self, op: Op) -> tuple[str, bool, bool, bool]:
        """(kind, fusible, reduces_last, half_precision) of an equation; equal keys, equal facts."""
        if op.key not in self._facts:
            self._facts[op.key] = facts_of(op, self.model.compiler)
        return self._facts[op.key]

    def new(self, nbytes: int) -> int:
        self.nbytes[len(self.nbytes)] = nbytes
        return len(self.nbytes) - 1

    def local(self, value: int, layout: Layout) -> int:
        v = self.graph.values[value]
        return local_bytes(v.shape, v.itemsize, layout, self.mesh)

    def tiled(self, value: int, layout: Layout, tile: Tile) -> int:
        """Bytes of what a product makes, in tiles: the compiler writes it in the order of the transpose that alone
        reads it, or as it is.
        """
        v = self.graph.values[value]
        order = self.transposed.get(value, range(len(v.shape)))
        return tile.nbytes([v.split_shape[d] // self.mesh.size(layout.dims[d]) for d in order], v.itemsize)

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
        self.rounded |= rounded_copies(self.graph, lowered.instructions, results_of(lowered), self.model)
        self.transposed |= transposed_alone(lowered.instructions)
        for instruction in lowered.instructions:
            self.instruction(instruction, env, steps)

    def instruction(self, instruction: Instruction, env: dict[tuple[int, Place], int], steps: list[MemoryStep]) -> None:
        if isinstance(instruction, Move):
            self.move(instruction, env, steps)
        elif isinstance(instruction, Compute) and instruction.op.primitive in ring.PRIMITIVES:
            self.attention(instruction, env, steps)
        elif isinstance(instruction, Compute) and instruction.pieces is not None:
            self.in_pieces(instruction, instruction.pieces, env, steps)
        elif isinstance(instruction, Compute):
            self.equation(instruction, env, steps)
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
            is_ahead = self.model.overlap.slices_ahead and instruction.trips > 1 and not instruction.to_host
            kind = HOST_SLICE if is_ahead else HOST_COPY
            steps.append(MemoryStep(inputs=inputs, outputs=(output,), kind=kind, fusible=False))
        elif not isinstance(instruction, Leave):
            self.crossing(instruction, env, steps)

    def equation(self, compute: Compute, env: dict[tuple[int, Place], int], steps: list[MemoryStep]) -> None:
        op, compiler = compute.op, self.model.compiler
        inputs = [env[key] for key in compute.keys_read]
        outputs = tuple([self.define(v, place, env) for v, place in compute.keys_made])
        if compiler.tile is not None and op.primitive in MATRIX_PRODUCTS:
            for v, place, number in zip(op.outputs, compute.places, outputs, strict=True):
                self.nbytes[number] = self.tiled(v, place[0], compiler.tile)
        kind, fusible, last, half_precision = self.facts(op)
        if compiler.pads_convolutions and op.primitive == "conv_general_dilated":
            padding = written_padding(op.eqn)
            if padding.is_copied:
                images, copy = inputs[0], self.new(int(self.nbytes[inputs[0]] * padding.copy_share))
                steps.append(MemoryStep(inputs=(images,), outputs=(copy,), kind="pad", fusible=True, key=padding))
                inputs[0] = copy
            self.nbytes[outputs[0]] = int(self.nbytes[outputs[0]] * padding.result_share)
        self.mask_rows(compute, inputs, steps)
        order = self.model.order_cost(op)
        if order.rewritten_operand is not None:
            del inputs[order.rewritten_operand]
        is_program = is_kernel(op.eqn) and op.eqn.params["function"].is_program
        if is_program or op.primitive == GROUPED_PRODUCT:
            rows = self.new(self.rows_of_experts(compute) if is_program else self.rows_in_blocks(compute))
            same = "rows", op.key, compute.results
            steps.append(MemoryStep(inputs=tuple(inputs), outputs=(rows,), kind=kind, fusible=False, key=same))
            inputs.append(rows)
        steps.append(
            MemoryStep(
                inputs=tuple(inputs),
                outputs=outputs,
                kind=kind,
                fusible=fusible,
                reduces_last=last,
                half_precision=half_precision,
                key=(op.key, compute.results),
            )
        )
        if order.copied_itemsize or order.beside_itemsize:
            (value,), (made,), (key,) = op.outputs, outputs, compute.keys_made
            size = self.nbytes[made] // self.graph.values[value].itemsize
            self.nbytes[made] += size * order.beside_itemsize
            if order.copied_itemsize:
                env[key] = self.new(size * order.copied_itemsize)
                steps.append(MemoryStep(inputs=(made,), outputs=(env[key],), kind="order_copy", fusible=False))

    def mask_rows(self, compute: Compute, inputs: list[int], steps: list[MemoryStep]) -> None:
        """Puts masked copies in place of the rows that a ragged product reads."""
        eqn, platform = compute.op.eqn, self.model.device.platform.value
        copies = masked_rows(eqn, platform)
        for i, v in enumerate(eqn.invars if copies else ()):
            if v in copies:
                copy = self.new(self.nbytes[inputs[i]] * copies[v])
                key = "masked", compute.op.key, i
                steps.append(MemoryStep(inputs=(inputs[i],), outputs=(copy,), kind="select_n", fusible=False, key=key))
                inputs[i] = copy

    def parts(self, compute: Compute) -> Sequence[Any]:
        """A device's parts of the operands."""
        op, strategy = compute.op, compute.strategy
        whole = [v.aval for v in op.eqn.invars]
        return whole if strategy is None else parts_of_operands(op, strategy, self.model.links.mesh)

    def rows_in_blocks(self, compute: Compute) -> int:
        """Bytes of the rows of one turn of a ragged product in blocks of rows."""
        return int(bytes_in_blocks(compute.op.eqn, self.parts(compute)))

    def rows_of_experts(self, compute: Compute) -> int:
        """Bytes of the sorted rows of a pass of a mixture of experts, with room for those that other devices send."""
        avals = self.parts(compute)
        count = 1 if compute.strategy is None else self.model.links.mesh.size(compute.strategy.ring)
        held = compute.op.eqn.params["function"].held_bytes(avals, count, self.model.device.platform.value)
        return int(held)

    def in_pieces(
        self, compute: Compute, pieces: Pieces, env: dict[tuple[int, Place], int], steps: list[MemoryStep]
    ) -> None:
        """A product in pieces, beside its result: a piece of it that is put in its place, or, of a sum of pieces, the
        sum and the piece that is added to it, in 32 bits. Of what is scattered there are the sum of a part and the one
        that comes in. An operand that is read again is there whole from its first piece on.
        """
        (value,), (place,) = compute.op.outputs, compute.places
        inputs = self.read(compute.op, compute.reads, env)
        itemsize, n = self.graph.values[value].itemsize, self.mesh.size(pieces.axes)
        output = self.define(value, place, env)
        together, kinds = tuple[int, ...](), [compute.op.primitive] * 2
        if pieces.operand is None:
            self.nbytes[output] = self.local(value, pieces.step.after)
            beside = self.nbytes[output]
        elif Along.of(compute.op.eqn, pieces.operand, pieces.dim).result is None:
            beside = 2 * (self.nbytes[output] * max(4, itemsize) // itemsize)
            kinds[1] = SUM_OF_PIECES
        else:
            beside = self.nbytes[output] // n
        if pieces.operand is not None and pieces.is_read_again:
            operand, at = compute.op.inputs[pieces.operand], compute.reads[pieces.operand]
            together = (self.define(operand, at, env),) if isinstance(operand, int) and at is not None else ()
        buffer = self.new(beside)
        parts = ((buffer, *together), inputs), ((output,), (*inputs, buffer, *together))
        for kind, (made, read) in zip(kinds, parts, strict=True):
            steps.append(MemoryStep(inputs=read, outputs=made, kind=kind, fusible=False, key=(compute.op.id, made)))

    def attention(self, compute: Compute, env: dict[tuple[int, Place], int], steps: list[MemoryStep]) -> None:
        op, inputs = compute.op, self.read(compute.op, compute.reads, env)
        outputs = tuple(self.define(v, place, env) for v, place in zip(op.outputs, compute.places, strict=True))
        ring_size = 1 if compute.strategy is None else self.mesh.size(compute.strategy.ring)
        kernel = kernel_under(op, self.device, ring_size)
        made = attention_steps(op, compute.strategy, inputs, outputs, kernel, self.mesh, self.nbytes, self.new)
        if op.primitive == ring.FORWARD.name:
            self.rows = outputs[1], () if kernel.writes_scores else made[-2].outputs
        elif self.rows[0] == inputs[4]:  # after queries, keys, values and the result
            made[-2] = replace(made[-2], inputs=(*made[-2].inputs, *self.rows[1]))
        steps += made

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
        if move.in_pieces and move.steps[0].kind.reduces:
            env[move.value, move.target] = at  # as its product left it
        elif move.in_pieces:
            # Of the pieces that come in the next and the one after it.
            (step,) = move.steps
            after = env[move.value, move.target] = self.new(self.nbytes[at] * min(self.mesh.size(step.axes) - 1, 2))
            kind, key = "collective_permute", ("pieces", step)
            steps.append(MemoryStep(inputs=(at,), outputs=(after,), kind=kind, fusible=False, key=key))
        for step in move.steps if not move.in_pieces else ():
            last = step is move.steps[-1]
            after = self.define(move.value, move.target, env) if last else self.new(self.local(move.value, step.after))
            if (move.value, move.target) in self.rounded:
                self.nbytes[after] //= 2
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
        outputs = tuple(self.define(v, place, env) for v, place in loop.keys_made)
        for key, stack in zip(loop.keys_made, outputs, strict=True):
            self.nbytes[stack] //= 2 if key in self.rounded else 1
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
        entries = zip(lowered.block.inputs, lowered.entries(), strict=True)
        inner = tuple(self.define(v, place, env) for v, place in entries)
        self.block(lowered, env, steps)
        out = tuple(
            self.literal(steps) if place is None or not isinstance(atom, int) else env[atom, place]
            for atom, place in zip(lowered.block.outputs, lowered.outputs, strict=True)
        )
        return inner, tuple(steps), out
