"""What the kernels of elementwise operations and reductions read and write, operation by operation, as XLA fuses them.

A value goes to memory where a kernel ends (`xla_fusion`). Each kernel reads once what it needs of memory: the first of
its operations that reads a value counts for it. Of an operation that is computed in several kernels each counts.

Operations are in one kernel besides where

- results of one size are computed one from the other, as new parameters are from the state of their optimizer;
- kernels of one size, none of which needs a result of the other, read the same array, as the sums of a norm do.

The bytes are those that XLA's cost analysis counts for programs compiled for H100, within some per cent, and on an H200
and an H100 such kernels take 0.9 to 1.1 of that at the rate of copies (`benchmarks.card_kernels`).
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping, Sequence

from autopar.cost.memory_facts import kind_of, reduces_last
from autopar.cost.roofline import is_fusible
from autopar.cost.xla_fusion import SLICE, STACK, written_values
from autopar.cost.xla_program import ALIASES, BARRIER, REDUCTIONS, Compiler, MemoryStep
from autopar.ir.graph import Block, Op, OpGraph, OpKind, Value, read_by

_NONE: frozenset[int] = frozenset()
_NO_SIZES: Mapping[int, int] = {}  # of a compiler that writes no operands of rows
_PARTS = frozenset({"slice", "dynamic_slice"})  # they read no more than they make


@dataclasses.dataclass(slots=True)
class Traffic:
    """What an operation adds to the kernels that it is computed in, in one run, before it is split.

    Attributes:
        ended: Kernels that end with it; of a product, or what else XLA calls a library for, those beside its own.
        nbytes: What it reads of memory and writes to it; of a product, or what else XLA calls a library for, zero.
    """

    ended: int = 0
    nbytes: float = 0.0


NO_TRAFFIC = Traffic()


def kernel_traffic(graph: OpGraph, compiler: Compiler) -> Mapping[int, Traffic]:
    """By the numbers of operations; those without any are left out."""
    found: dict[int, Traffic] = defaultdict(Traffic)
    _of_block(graph.block, graph.values, compiler, (0, len(graph.block.outputs)), found)
    return dict(found)


def is_in_kernels(op: Op) -> bool:
    """Whether an operation's traffic is that of the kernels of which it is a part."""
    return op.kind is OpKind.EQUATION and (is_fusible(op.primitive) or op.primitive in REDUCTIONS)


def _of_block(
    block: Block, values: Sequence[Value], compiler: Compiler, looped: tuple[int, int], found: dict[int, Traffic]
) -> None:
    """`looped`: the first of a loop's inputs that is sliced, or zero, and the first of its results that is stacked."""
    first_sliced, first_stacked = looped
    steps = [_step(op) for op in block.ops]
    sliced = block.inputs[first_sliced:] if first_sliced else ()
    slices = [MemoryStep(inputs=(v,), outputs=(v,), kind=SLICE, fusible=True) for v in sliced]
    stacked = [v for v in block.outputs[first_stacked:] if isinstance(v, int)]
    stacks = [MemoryStep(inputs=(v,), outputs=(), kind=STACK, fusible=False) for v in stacked]
    results = frozenset(v for v in block.outputs[:first_stacked] if isinstance(v, int))
    written = written_values((*slices, *steps, *stacks), results, _NO_SIZES, compiler)
    kernels = _Kernels.of(block, steps, values, written, results, compiler)
    for v in kernels.last:
        found[kernels.made_by[v]].ended += 1
    for v in stacked:
        if v in kernels.made_by:
            found[kernels.made_by[v]].ended += 1
    unread = {v for v in sliced if v in written}
    for op, nbytes in zip(block.ops, kernels.moved_bytes(block.ops, steps, values), strict=True):
        if nbytes:
            found[op.id].nbytes += nbytes
        for v in unread.intersection(read_by(op)):
            found[op.id].ended += 1
            unread.discard(v)
        for inner in op.blocks:
            is_scan = op.kind is OpKind.SCAN
            ends_of = (op.num_consts + op.num_carry, op.num_carry) if is_scan else (0, len(inner.outputs))
            _of_block(inner, values, compiler, ends_of, found)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Kernels:
    """The kernels of a block.

    Attributes:
        made_by: Value -> the operation that makes it, by its number.
        last: Results of elementwise operations and reductions that end kernels: of each kernel one.
        memory: Value -> the one in memory that it is another name of; without those that are in no memory.
        kernels: For each operation the kernels in which it is computed, by the number of the operation that ends each.
        ends: Value that is written -> the kernel that writes it.
    """

    made_by: Mapping[int, int]
    last: Sequence[int]
    memory: Mapping[int, int]
    kernels: Sequence[frozenset[int]]
    ends: Mapping[int, int]

    @staticmethod
    def of(block: Block, steps: Sequence[MemoryStep], values: Sequence[Value], written: set[int], results: frozenset[int], compiler: Compiler
    ) -> _Kernels:
        ops = block.ops
        memory = {v: v for v in block.inputs}
        read: dict[int, frozenset[int]] = {}  # of memory, on the way to a value that is in none
        for step in steps:
            if step.kind in ALIASES:
                for v, out in zip(step.inputs, step.outputs, strict=False):
                    if v in memory:
                        memory[out] = memory[v]
                    else:
                        read[out] = read.get(v, _NONE)
                continue
            memory |= {v: v for v in step.outputs if v in written}
            if _is_elementwise(step) or step.kind in REDUCTIONS:
                read[step.outputs[0]] = frozenset().union(
                    *((memory[v],) if v in memory else read.get(v, _NONE) for v in step.inputs)
                )
        ends, last = _ends(ops, steps, values, written)
        read_by_kernel: dict[int, set[int]] = defaultdict(set)
        for v, kernel in ends.items():
            read_by_kernel[kernel] |= read[v]
        readers: dict[int, set[int]] = defaultdict(set)
        kernels: list[set[int]] = []
        by_rows: set[int] = set()
        for op, step in zip(reversed(ops), reversed(steps), strict=True):
            if step.kind in ALIASES:
                for v, out in zip(step.inputs, step.outputs, strict=False):
                    readers[v] |= readers[out]
                kernels.append(set())
                continue
            own = {ends[v] for v in step.outputs if v in ends}
            if step.kind in REDUCTIONS:
                (out,) = step.outputs
                wide = {v for v in read[out] if values[v].size >= values[step.inputs[0]].size}
                if (
                    compiler.row_kernels
                    and out not in results
                    and reduces_last(op)
                    and readers[out]
                    and all(wide and wide <= read_by_kernel[k] for k in readers[out])
                ):
                    memory.pop(out)
                    by_rows |= readers[out]
                else:
                    ends[out] = op.id
                    own = {op.id}
                    last.append(out)
            computed_in = own or (readers[step.outputs[0]] if len(step.outputs) == 1 and is_in_kernels(op) else {op.id})
            for v in step.inputs:
                readers[v] |= computed_in
            kernels.append(set(computed_in))
        kernels.reverse()
        same = _siblings(ops, steps, values, memory, {v: k for v, k in ends.items() if k not in by_rows})
        made_by = {v: op.id for op in ops for v in op.outputs}
        return _Kernels(
            made_by=made_by,
            last=[v for v in last if ends[v] not in same],
            memory=memory,
            kernels=[frozenset(same.get(k, k) for k in each) for each in kernels],
            ends={v: same.get(k, k) for v, k in ends.items()},
        )

    def moved_bytes(self, ops: Sequence[Op], steps: Sequence[MemoryStep], values: Sequence[Value]) -> list[float]:
        """Of each operation, what it reads first in each of its kernels, and what it writes."""
        known: set[tuple[int, int]] = set()
        found = []
        for op, step, kernels in zip(ops, steps, self.kernels, strict=True):
            nbytes = 0.0
            if is_in_kernels(op) and step.kind not in ALIASES:
                for v in dict.fromkeys(self.memory[v] for v in step.inputs if v in self.memory):
                    reading = [k for k in kernels if (v, k) not in known and self.ends.get(v) != k]
                    known.update((v, k) for k in reading)
                    size = values[v].nbytes
                    if step.kind in _PARTS:
                        size = min(size, values[step.outputs[0]].nbytes)
                    nbytes += len(reading) * size
                nbytes += sum(values[v].nbytes for v in step.outputs if v in self.ends)
            found.append(nbytes)
        return found


def _ends(
    ops: Sequence[Op], steps: Sequence[MemoryStep], values: Sequence[Value], written: set[int]
) -> tuple[dict[int, int], list[int]]:
    """(value that elementwise operations and reductions write -> the operation that ends its kernel; of elementwise
    operations those values that end one)

    A value is written beside another one of its size where that is computed of it.
    """
    ends: dict[int, int] = {}
    last: list[int] = []
    inside: dict[int, int] = {}  # read on the way to what ends a kernel -> that kernel
    for op, step in zip(reversed(ops), reversed(steps), strict=True):
        if step.kind in ALIASES:
            inside |= {v: inside[out] for v, out in zip(step.inputs, step.outputs, strict=False) if out in inside}
        elif _is_elementwise(step):
            (out,) = step.outputs
            if out in inside:
                kernel = inside[out]
            elif out in written:
                kernel = op.id
                last.append(out)
            else:
                continue
            if out in written:
                ends[out] = kernel
            for v in step.inputs:
                if values[v].size == values[out].size:
                    inside.setdefault(v, kernel)
    return ends, last


def _siblings(
    ops: Sequence[Op],
    steps: Sequence[MemoryStep],
    values: Sequence[Value],
    memory: Mapping[int, int],
    ends: Mapping[int, int],
) -> dict[int, int]:
    """Kernel -> the one that it is a part of. Of one size and depth none needs what another one makes."""
    depth: dict[int, int] = {}
    sources: dict[int, frozenset[int]] = {}
    kernel_of: dict[tuple[object, int], int] = {}
    same: dict[int, int] = {}
    for op, step in zip(ops, steps, strict=True):
        behind = max((depth.get(v, 0) for v in step.inputs), default=0)
        if step.kind in ALIASES:
            for v, out in zip(step.inputs, step.outputs, strict=False):
                depth[out], sources[out] = depth.get(v, 0), sources.get(v, frozenset())
            continue
        read = frozenset(
            x for v in step.inputs for x in ((memory[v],) if v in memory else sources.get(v, frozenset()))
        )
        out = step.outputs[0] if step.outputs else None
        if out is None or out not in ends:
            is_fused = is_in_kernels(op)
            for v in step.outputs:
                depth[v], sources[v] = behind if is_fused else behind + 1, read if is_fused else frozenset()
            continue
        depth[out] = behind + 1
        shape = values[step.inputs[0]].shape if step.kind in REDUCTIONS else values[out].shape
        form = (shape, op.eqn.params.get("axes"), behind) if step.kind in REDUCTIONS else (shape, behind)
        size = values[step.inputs[0]].size if step.kind in REDUCTIONS else values[out].size
        for v in read:
            if values[v].size == size:
                before = kernel_of.setdefault((form, v), ends[out])
                same.setdefault(ends[out], same.get(before, before))
    return same


def _step(op: Op) -> MemoryStep:
    is_equation = op.kind is OpKind.EQUATION
    kind = kind_of(op) if is_equation else BARRIER if op.kind is OpKind.BARRIER else op.kind.value
    return MemoryStep(
        inputs=read_by(op), outputs=op.outputs, kind=kind, fusible=is_equation and is_fusible(op.primitive)
    )


def _is_elementwise(step: MemoryStep) -> bool:
    return step.fusible and len(step.outputs) == 1 and step.kind not in ALIASES
