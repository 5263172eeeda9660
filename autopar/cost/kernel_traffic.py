"""What the kernels of elementwise operations and reductions read and write, operation by operation, as XLA fuses them.

A value goes to memory where a kernel ends (`xla_fusion`). Each kernel reads once what it needs of memory: the first of
its operations that reads a value counts for it. Of an operation that is computed in several kernels each counts.

Operations are in one kernel besides where

- results of one size are computed one from the other, as new parameters are from the state of their optimizer;
- reductions of one size over the same dimensions read the same array, and none needs what another one makes;
- a reduction over the last dimension is for kernels that read its rows anyhow and make rows: these run a row at a time,
  as those of a softmax, a norm, and their gradients do. (What only sums, as a loss does, takes its maximum first.)

A product multiplies its result with one number before it writes it, as the scales of operands of 8 bits have it, where
nobody reads the result without (programs for an H100, jaxlib 0.10.2).

XLA's cost analysis counts 1.00 to 1.06 times these bytes in steps of a GPT, a BERT and a mixture of experts, compiled
for an H100. What that counts takes 0.89 to 1.13 times as long on an H200, at 0.82 of its memory's peak rate, in ten of
twelve steps of one or few operations.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from autopar.cost.roofline import is_fusible
from autopar.cost.xla_fusion import SLICE, STACK, written_values
from autopar.cost.xla_program import ALIASES, BARRIER, REDUCTIONS, Compiler, MemoryStep, kind_of, reduces_last
from autopar.ir.graph import Block, Op, OpGraph, OpKind, Value, read_by, scaled_by_one_number
from autopar.ir.kept import KeptWithGraphs
from autopar.ir.primitives import MATRIX_PRODUCTS

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


_known: KeptWithGraphs[Mapping[int, Traffic]] = KeptWithGraphs()  # a graph is laid over many meshes


def kernel_traffic(graph: OpGraph, compiler: Compiler) -> Mapping[int, Traffic]:
    """By the numbers of operations; those without any are left out."""
    return _known.of(graph, compiler, lambda: _found(graph, compiler))


def _found(graph: OpGraph, compiler: Compiler) -> Mapping[int, Traffic]:
    found: dict[int, Traffic] = defaultdict(Traffic)
    _of_block(graph.block, graph.values, compiler, (None, len(graph.block.outputs)), found)
    return dict(found)


def is_in_kernels(op: Op) -> bool:
    """Whether an operation's traffic is that of the kernels of which it is a part."""
    return op.kind is OpKind.EQUATION and bool(op.outputs) and (is_fusible(op.primitive) or op.primitive in REDUCTIONS)


def _of_block(
    block: Block, values: Sequence[Value], compiler: Compiler, looped: tuple[int | None, int], found: dict[int, Traffic]
) -> None:
    """`looped`: the first of a loop's inputs that is sliced, or None, and the first of its results that is stacked."""
    first_sliced, first_stacked = looped
    steps = _steps(block, values)
    sliced = block.inputs[first_sliced:] if first_sliced is not None else ()
    slices = [MemoryStep(inputs=(v,), outputs=(v,), kind=SLICE, fusible=True) for v in sliced]
    named = {
        out: v
        for step in steps
        if step.kind in ALIASES and step.kind != BARRIER
        for v, out in zip(step.inputs, step.outputs, strict=False)
    }
    stacked = []
    for v in block.outputs[first_stacked:]:
        while isinstance(v, int) and v in named:
            v = named[v]
        if isinstance(v, int):  # no literal
            stacked.append(v)
    stacks = [MemoryStep(inputs=(v,), outputs=(), kind=STACK, fusible=False) for v in stacked]
    results = frozenset(v for v in block.outputs[:first_stacked] if isinstance(v, int))
    written = written_values((*slices, *steps, *stacks), results, _NO_SIZES, compiler)
    # The kernel that makes what is stacked writes it to its place; what goes to memory besides is copied there.
    stacked_later = written.intersection(stacked)
    wanted = results.union(stacked)
    written.update(stacked)
    kernels = _kernels(block, steps, values, written, wanted, compiler)
    if worth_writing := _worth_writing(steps, values, kernels):
        kernels = _kernels(block, steps, values, written | worth_writing, wanted, compiler)
    made_by = {v: op.id for op in block.ops for v in op.outputs}
    for v in (*kernels.last, *(v for v in stacked_later if v in made_by)):
        found[made_by[v]].ended += 1
    for v in stacked_later.intersection(made_by):
        found[made_by[v]].nbytes += 2 * values[v].nbytes
    unread = {v for v in sliced if v in written}
    for op, nbytes in zip(block.ops, kernels.moved_bytes(block.ops, steps, values), strict=True):
        if nbytes:
            found[op.id].nbytes += nbytes
        for v in unread.intersection(read_by(op)):
            found[op.id].ended += 1
            unread.discard(v)
        for inner in op.blocks:
            is_scan = op.kind is OpKind.SCAN
            ends_of = (op.num_consts + op.num_carry, op.num_carry) if is_scan else (None, len(inner.outputs))
            _of_block(inner, values, compiler, ends_of, found)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Kernels:
    """The kernels of a block, each named by an operation that ends it.

    Attributes:
        memory: Value -> the one in memory that it is another name of; without those that are in no memory.
        of_ops: For each operation the kernels in which it is computed.
        ends: Value that is written -> the kernel that writes it.
        last: Results of elementwise operations and reductions that end kernels: of each kernel one.
    """

    memory: Mapping[int, int]
    of_ops: Sequence[frozenset[int]]
    ends: Mapping[int, int]
    last: Sequence[int]

    def moved_bytes(self, ops: Sequence[Op], steps: Sequence[MemoryStep], values: Sequence[Value]) -> list[float]:
        """Of each operation, what it reads first in each of its kernels, and what it writes."""
        known: dict[tuple[int, int], float] = {}  # the most of a value that a kernel has read
        found = []
        # A gather computes on the way what it takes, of results in 16 bits from up to 32.
        taken = {op.id: 2 * values[op.outputs[0]].nbytes for op in ops if op.primitive == "gather"}
        for op, step, kernels in zip(ops, steps, self.of_ops, strict=True):
            nbytes = 0.0
            if is_in_kernels(op) and step.kind not in ALIASES:
                for v in dict.fromkeys(self.memory[v] for v in step.inputs if v in self.memory):
                    size = float(values[v].nbytes)
                    part = min(size, values[step.outputs[0]].nbytes) if step.kind in _PARTS else size
                    for k in kernels:
                        if self.ends.get(v) != k:
                            before = known.get((v, k), 0.0)
                            most = min(size, before + part, taken.get(k, size))
                            known[v, k] = max(before, most)
                            nbytes += known[v, k] - before
                nbytes += sum(values[v].nbytes for v in step.outputs if v in self.ends)
            found.append(nbytes)
        return found


def _kernels(
    block: Block, steps: Sequence[MemoryStep], values: Sequence[Value], written: set[int], results: frozenset[int],
    compiler: Compiler,
) -> _Kernels:  # fmt: skip
    memory, read = _names(block, steps, values, written)
    ends, last = _ends(block.ops, steps, values, written)
    read_by_kernel: dict[int, set[int]] = defaultdict(set)
    for v, kernel in ends.items():
        read_by_kernel[kernel] |= read[v]
    readers = _Readers()
    of_ops: list[frozenset[int]] = []
    by_rows: set[int] = set()  # kernels that run a reduction over the last dimension on the way, a row at a time
    for op, step in zip(reversed(block.ops), reversed(steps), strict=True):
        if step.kind in ALIASES:
            for v, out in zip(step.inputs, step.outputs, strict=False):
                readers.add(v, readers.of(out))
            of_ops.append(_NONE)
            continue
        computed_in = _NONE.union(ends[v] for v in step.outputs if v in ends)
        if step.kind in REDUCTIONS:
            (out,) = step.outputs
            rows = {v for v in read[out] if values[v].size >= values[step.inputs[0]].size}
            reads_rows = rows and all(rows <= read_by_kernel[k] for k in readers.of(out))
            if compiler.row_kernels and reduces_last(op) and out not in results and reads_rows and readers.of(out):
                memory.pop(out, None)
                by_rows |= readers.of(out)
            else:
                ends[out] = op.id
                computed_in = frozenset({op.id})
                last.append(out)
        if not computed_in and len(step.outputs) == 1 and is_in_kernels(op):
            computed_in = readers.of(step.outputs[0])
        elif not computed_in:
            computed_in = frozenset({op.id})
            if is_in_kernels(op):
                ends.update(dict.fromkeys(step.outputs, op.id))
                last.append(step.outputs[0])
        for v in step.inputs:
            readers.add(v, computed_in)
        of_ops.append(computed_in)
    of_ops.reverse()
    same = _siblings(block.ops, steps, values, read, {v: k for v, k in ends.items() if k not in by_rows})
    named = {id(kernels): kernels for kernels in of_ops}
    of_one = {number: frozenset(same.get(k, k) for k in kernels) for number, kernels in named.items()}
    return _Kernels(
        memory=memory,
        of_ops=[of_one[id(kernels)] for kernels in of_ops],
        ends={v: same.get(k, k) for v, k in ends.items()},
        last=[v for v in last if ends[v] not in same],
    )


class _Readers:
    """Value -> the kernels that read it. A value that one operation reads shares the set of that: sums of thousands of
    terms, each computed wherever their result is, would else have as many sets of as many kernels.
    """

    def __init__(self) -> None:
        self._of: dict[int, frozenset[int] | set[int]] = {}

    def of(self, v: int) -> frozenset[int]:
        found = self._of.get(v, _NONE)
        return found if isinstance(found, frozenset) else frozenset(found)

    def add(self, v: int, kernels: frozenset[int]) -> None:
        before = self._of.get(v, _NONE)
        if not before:
            self._of[v] = kernels
        elif isinstance(before, set):
            before |= kernels
        elif before is not kernels:
            self._of[v] = {*before, *kernels}


def _worth_writing(steps: Sequence[MemoryStep], values: Sequence[Value], kernels: _Kernels) -> set[int]:
    """Values that are computed in several kernels, but which these read with fewer bytes once they are in memory: the
    sums of layers, each of which would else read the results of all layers before.
    """
    found: set[int] = set()
    read: dict[int, frozenset[int]] = {}

    def read_for(v: int) -> frozenset[int]:
        return frozenset({kernels.memory[v]}) if v in kernels.memory else read.get(v, _NONE)

    for step, computed_in in zip(steps, kernels.of_ops, strict=True):
        if step.kind in ALIASES:
            read |= {out: read_for(v) for v, out in zip(step.inputs, step.outputs, strict=False)}
        elif step.outputs and step.outputs[0] not in kernels.memory:
            (out,), n = step.outputs, len(computed_in)
            read[out] = _NONE.union(*map(read_for, step.inputs))
            if n == 1 or not _is_elementwise(step):
                continue
            own_bytes = values[out].nbytes
            read_bytes = sum(min(values[v].nbytes, 2 * own_bytes) for v in read[out])
            if n * read_bytes > read_bytes + (1 + n) * own_bytes:
                found.add(out)
                read[out] = frozenset({out})
    return found


def _names(
    block: Block, steps: Sequence[MemoryStep], values: Sequence[Value], written: set[int]
) -> tuple[dict[int, int], dict[int, frozenset[int]]]:
    """(value -> the one in memory that it is another name of; result of an elementwise operation or a reduction -> the
    arrays that are read of memory for it: of a sum of thousands of numbers each result behind it would else have all)
    """
    memory = {v: v for v in block.inputs}
    read: dict[int, frozenset[int]] = {}
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
            found = frozenset(memory[v] for v in step.inputs if v in memory and values[memory[v]].size > 1)
            for v in step.inputs:
                more = _NONE if v in memory else read.get(v, _NONE)
                found = found | more if found and more else found or more
            read[step.outputs[0]] = found
    return memory, read


def _ends(
    ops: Sequence[Op], steps: Sequence[MemoryStep], values: Sequence[Value], written: set[int]
) -> tuple[dict[int, int], list[int]]:
    """(value that an elementwise operation writes -> the operation that ends its kernel; of each kernel its last value)

    A value is written beside another one of its size where that is computed of it.
    """
    behind = _kernels_behind(ops, steps)
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
                if behind.get(v, 0) == behind[out] and values[v].size == values[out].size:
                    inside.setdefault(v, kernel)
    return ends, last


def _kernels_behind(ops: Sequence[Op], steps: Sequence[MemoryStep]) -> dict[int, int]:
    """Value -> how many products, barriers, reductions over other dimensions than the last, and other kernels that take
    nothing in, come one after the other before it. No kernel has values with different numbers.
    """
    found: dict[int, int] = {}
    for op, step in zip(ops, steps, strict=True):
        if step.kind in ALIASES and step.kind != BARRIER:
            found |= {out: found.get(v, 0) for v, out in zip(step.inputs, step.outputs, strict=False)}
            continue
        is_row = step.kind not in REDUCTIONS or reduces_last(op)
        most = max((found.get(v, 0) for v in step.inputs), default=0)
        found |= dict.fromkeys(step.outputs, most + (not (is_in_kernels(op) and is_row)))
    return found


def _siblings(
    ops: Sequence[Op],
    steps: Sequence[MemoryStep],
    values: Sequence[Value],
    read: Mapping[int, frozenset[int]],
    ends: Mapping[int, int],
) -> dict[int, int]:
    """Reduction -> the one whose kernel it is in. Of equally many kernels behind the arguments neither needs the other.

    Args:
        read: As `_names` gives it.
        ends: Without kernels that run a row at a time.
    """
    behind: dict[int, int] = {}
    first: dict[tuple[object, ...], int] = {}
    same: dict[int, int] = {}
    for op, step in zip(ops, steps, strict=True):
        if step.kind in ALIASES:
            behind |= {out: behind.get(v, 0) for v, out in zip(step.inputs, step.outputs, strict=False)}
            continue
        depth = max((behind.get(v, 0) for v in step.inputs), default=0)
        if step.kind in REDUCTIONS and step.outputs[0] in ends:
            operand = values[step.inputs[0]]
            for v in read[step.outputs[0]]:
                if values[v].size == operand.size:
                    before = first.setdefault((operand.shape, op.eqn.params.get("axes"), depth, v), op.id)
                    if before != op.id:
                        same.setdefault(op.id, same.get(before, before))
        is_kernel = not is_in_kernels(op) or any(v in ends for v in step.outputs)
        behind |= dict.fromkeys(step.outputs, depth + is_kernel)
    return same


def _steps(block: Block, values: Sequence[Value]) -> list[MemoryStep]:
    steps = [_step(op) for op in block.ops]
    reads = Counter(v for op in block.ops for v in read_by(op))
    reads.update(v for v in block.outputs if isinstance(v, int))
    products = {op.outputs[0] for op in block.ops if op.primitive in MATRIX_PRODUCTS and reads[op.outputs[0]] == 1}
    for i, op in enumerate(block.ops):
        product = scaled_by_one_number(op, values)
        if product in products:
            steps[i] = MemoryStep(inputs=(product,), outputs=op.outputs, kind="reshape", fusible=True)
    return steps


def _step(op: Op) -> MemoryStep:
    is_equation = op.kind is OpKind.EQUATION
    kind = kind_of(op) if is_equation else BARRIER if op.kind is OpKind.BARRIER else op.kind.value
    # What a barrier hands on stands where it took it; -1 stands for literals.
    inputs = tuple(a if isinstance(a, int) else -1 for a in op.inputs) if kind == BARRIER else read_by(op)
    return MemoryStep(inputs=inputs, outputs=op.outputs, kind=kind, fusible=is_equation and is_fusible(op.primitive))


def _is_elementwise(step: MemoryStep) -> bool:
    return step.fusible and len(step.outputs) == 1 and step.kind not in ALIASES
