"""How many kernels each operation of a step ends, of those that are no products: each takes its time, however small.

Of a chain of elementwise operations the one whose result is written ends a kernel. Results of one size of which one is
computed from the other are written by one kernel, as new parameters are with the state of their optimizer. Of a loop
over stacked arrays, what each turn stacks up is a kernel, and a slice that a product reads is one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from autopar.cost.memory_facts import kind_of
from autopar.cost.roofline import is_fusible
from autopar.cost.xla_fusion import SLICE, STACK, written_values
from autopar.cost.xla_program import ALIASES, BARRIER, Compiler, MemoryStep
from autopar.ir.graph import Block, Op, OpGraph, OpKind, Value, read_by

_NO_SIZES: Mapping[int, int] = {}  # of a compiler that writes no operands of rows


def kernels_ended(graph: OpGraph, compiler: Compiler) -> Counter[int]:
    """Operations by number -> kernels that end with them in one run. What does not fuse ends one by itself, which is
    not among these.
    """
    found: Counter[int] = Counter()
    _count(graph.block, graph.values, compiler, (0, len(graph.block.outputs)), found)
    return found


def _count(
    block: Block, values: Sequence[Value], compiler: Compiler, looped: tuple[int, int], found: Counter[int]
) -> None:
    """`looped`: the first of a loop's inputs that is sliced, or zero, and the first of its results that is stacked."""
    first_sliced, first_stacked = looped
    steps = [_step(op) for op in block.ops]
    sliced = block.inputs[first_sliced:] if first_sliced else ()
    slices = [MemoryStep(inputs=(), outputs=(v,), kind=SLICE, fusible=True) for v in sliced]
    stacked = [v for v in block.outputs[first_stacked:] if isinstance(v, int)]
    stacks = [MemoryStep(inputs=(v,), outputs=(), kind=STACK, fusible=False) for v in stacked]
    results = frozenset(v for v in block.outputs[:first_stacked] if isinstance(v, int))
    written = written_values((*slices, *steps, *stacks), results, _NO_SIZES, compiler)
    ends = {step.outputs[0]: op.id for op, step in zip(block.ops, steps, strict=True) if _is_elementwise(step)}
    alone = _alone(steps, values, written.intersection(ends))
    found.update(ends[v] for v in alone)
    made_by = {v: op.id for op in block.ops for v in op.outputs}
    found.update(made_by[v] for v in stacked if v in made_by)
    unread = {v for v in sliced if v in written}
    for op in block.ops:
        for v in unread.intersection(read_by(op)):
            found[op.id] += 1
            unread.discard(v)
        for inner in op.blocks:
            is_scan = op.kind is OpKind.SCAN
            ends_of = (op.num_consts + op.num_carry, op.num_carry) if is_scan else (0, len(inner.outputs))
            _count(inner, values, compiler, ends_of, found)


def _alone(steps: Sequence[MemoryStep], values: Sequence[Value], written: set[int]) -> set[int]:
    """Those of the written values that no kernel writes beside another one of their size, which it computes of them."""
    alone = set(written)
    in_kernel = set(written)  # also what is computed on the way to one of them
    read_inside: set[int] = set()
    for step in reversed(steps):
        if step.kind in ALIASES:
            read_inside.update(v for v, out in zip(step.inputs, step.outputs, strict=False) if out in read_inside)
        elif _is_elementwise(step):
            (out,) = step.outputs
            if out in read_inside:
                alone.discard(out)
                in_kernel.add(out)
            if out in in_kernel:
                read_inside.update(v for v in step.inputs if values[v].size == values[out].size)
    return alone


def _step(op: Op) -> MemoryStep:
    is_equation = op.kind is OpKind.EQUATION
    kind = kind_of(op) if is_equation else BARRIER if op.kind is OpKind.BARRIER else op.kind.value
    return MemoryStep(
        inputs=read_by(op), outputs=op.outputs, kind=kind, fusible=is_equation and is_fusible(op.primitive)
    )


def _is_elementwise(step: MemoryStep) -> bool:
    return step.fusible and len(step.outputs) == 1 and step.kind not in ALIASES
