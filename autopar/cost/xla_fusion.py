"""A model of XLA's fusion: operations grouped into kernels, and which values are written to memory.

An elementwise operation is computed inside the kernels that read it, again in each of them where it is cheap, and is
never written. Written are: results of operations that do not fuse (matrix products, convolutions, gathers, sorts,
loops), the operands of such operations, and expensive results (an exponential, a reduction) with several readers.
Reshapes are names for the same memory.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec
from msgspec.structs import replace

from autopar.cost.xla_program import (
    ABSORBING,
    ALIASES,
    ARITHMETIC,
    BARRIER,
    HOST_SLICE,
    RANDOM_BITS,
    REDUCTIONS,
    SCALAR_BYTES,
    SUM_OF_PIECES,
    Compiler,
    MemoryStep,
)
from autopar.ir.primitives import MATRIX_PRODUCTS

# Steps that are put at the ends of a loop's body: a turn's slice of a stacked input, a slice put into a stacked result.
SLICE, STACK = "slice_of_stacked", "stack"
SEVERAL = -1  # in place of the one kernel that reads a value


class Kernel(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Operations that XLA runs as one. It reads and writes only values that are in memory.

    Attributes:
        in_place: An output may take the memory of an input of the same size that dies here.
        reduces_rows: A reduction over the last dimension.
        read_by_rows: Inputs whose memory no output may take all the same.
        after: Outputs of other kernels that must be there first although they are not read (barriers).
        begins_again: The first behind a barrier of several values, as a layer begins that is computed again.
        behind_others: Of kernels that become ready together this one runs last.
        twice: Inputs or outputs that take their memory twice over.
        halves: Inputs that could be kept in half their memory as far as this kernel cares.
        blocks: The kernels of a loop's body, or of each branch.
        block_results: What a loop's body hands on to the next turn.
        block_carried: The loop's carried values, as the body calls them at its start.
    """

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    kind: str
    in_place: bool
    reduces_rows: bool = False
    read_by_rows: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    begins_again: bool = False
    behind_others: bool = False
    twice: tuple[int, ...] = ()
    halves: tuple[int, ...] = ()
    blocks: tuple[tuple[Kernel, ...], ...] = ()
    block_results: tuple[int, ...] = ()
    block_carried: tuple[int, ...] = ()


def kernels(
    steps: Sequence[MemoryStep],
    arguments: Sequence[int],
    results: Sequence[int],
    nbytes: Mapping[int, int],
    compiler: Compiler,
) -> tuple[Kernel, ...]:
    """The kernels of a program in program order; values are named by the memory they are in."""
    return _block(tuple(steps), frozenset(results), nbytes, {}, compiler)


@dataclasses.dataclass(slots=True)
class _Sources:
    """Where the values of a block come from, as far as its steps have been read.

    `memory[v]`: for an alias the value whose memory it is. `reads[v]`: for a value that is not written, the values in
    memory that it is computed from. `behind[v]`: kernels' outputs that must be there before v may be computed.
    """

    memory: dict[int, int]
    reads: dict[int, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    behind: dict[int, tuple[int, ...]] = dataclasses.field(default_factory=dict)

    def of(self, step: MemoryStep) -> tuple[list[int], list[int]]:
        """The values in memory that a kernel of this step would read, and those that it would wait for."""
        inputs: list[int] = []
        after: list[int] = []
        for v in step.inputs:
            if v in self.reads:
                inputs += self.reads[v]
            else:
                inputs.append(self.memory.get(v, v))
            if v in self.behind:
                after += self.behind[v]
        if len(inputs) > 1:
            inputs = list(dict.fromkeys(inputs))
        if after:
            after = list(dict.fromkeys(after))
        return inputs, after

    def rename(self, step: MemoryStep, after: list[int]) -> None:
        """The outputs of this step are its inputs under other names."""
        for v, out in zip(step.inputs, step.outputs, strict=False):
            if v in self.reads:
                self.reads[out] = self.reads[v]
            else:
                self.memory[out] = self.memory.get(v, v)
            if after:
                self.behind[out] = tuple(after)

    def inline(self, step: MemoryStep, inputs: list[int], after: list[int]) -> None:
        """The outputs of this step are computed where they are read."""
        for out in step.outputs:
            self.reads[out] = tuple(inputs)
            if after:
                self.behind[out] = tuple(after)


def _block(
    steps: tuple[MemoryStep, ...],
    results: frozenset[int],
    nbytes: Mapping[int, int],
    memory: dict[int, int],
    compiler: Compiler,
) -> tuple[Kernel, ...]:
    """`memory` names for each alias the value whose memory it is."""
    written = written_values(steps, results, nbytes, compiler)
    transposed = {step.inputs[0] for step in steps if step.kind == "transpose"}
    found: list[Kernel] = []
    sources = _Sources(memory)
    begins_again = False
    by_products = _read_by_products(steps) if compiler.products_absorb else {}
    for step in steps:
        inputs, after = sources.of(step)
        begins_again = begins_again or (step.kind == BARRIER and len(step.inputs) > 1)
        if step.kind in ALIASES and (step.kind == BARRIER or step.outputs[0] not in results):
            sources.rename(step, list(dict.fromkeys(after + inputs)) if step.kind == BARRIER else after)
            continue
        is_fused = bool(step.outputs) and written.isdisjoint(step.outputs)
        is_for_products = is_fused and _is_worth_writing(step, inputs, by_products, nbytes)
        if is_fused and not is_for_products:
            sources.inline(step, inputs, after)
        else:
            blocks, block_results, block_carried = _blocks(step, nbytes, memory, compiler)
            found.append(
                Kernel(
                    inputs=tuple(inputs),
                    outputs=step.outputs,
                    kind=step.kind,
                    # What is written for several products takes no memory that is read for it (seen on TPU).
                    in_place=(step.fusible or bool(step.body) or step.kind in ABSORBING) and not is_for_products,
                    reduces_rows=step.kind in REDUCTIONS and step.reduces_last,
                    after=tuple(after),
                    begins_again=begins_again,
                    # XLA folds the transpose of a weight's gradient into its product, which is made anew by that.
                    behind_others=step.kind in MATRIX_PRODUCTS and step.outputs[0] in transposed,
                    twice=_twice(step, tuple(inputs), compiler),
                    halves=_halves(step, sources.reads, memory, compiler),
                    blocks=blocks,
                    block_results=block_results,
                    block_carried=block_carried,
                )
            )
            begins_again = False
    if compiler.products_convert:
        found = _with_converted_products(found, results)
    return _with_row_kernels(found) if compiler.row_kernels else tuple(found)


def _read_by_products(steps: Sequence[MemoryStep]) -> Counter[int]:
    """By how many products a value is read, as it is or with its dimensions in another order."""
    source: dict[int, int] = {}
    found: Counter[int] = Counter()
    for step in steps:
        if step.kind == "transpose" or step.kind in ALIASES:
            source |= {out: source.get(v, v) for v, out in zip(step.inputs, step.outputs, strict=False)}
        elif step.kind in MATRIX_PRODUCTS:
            found.update({source.get(v, v) for v in step.inputs})
    return found


def _is_worth_writing(
    step: MemoryStep, inputs: Sequence[int], by_products: Mapping[int, int], nbytes: Mapping[int, int]
) -> bool:
    """Whether products move fewer bytes when they read this result than when each computes it on the way in.

    Of an input that is larger than the result in 32 bits a part is read, as of what is sliced.
    """
    n, result = by_products.get(step.outputs[0], 0), nbytes[step.outputs[0]]
    read = sum(min(nbytes[v], 2 * result) for v in inputs)
    return n > 1 and n * read > read + (1 + n) * result


def _with_converted_products(kernels: Sequence[Kernel], results: frozenset[int]) -> list[Kernel]:
    """Leaves out conversions of what matrix products make for nothing else: the products write what is made of it.

    The largest of converted numbers is found among those that are not.
    """
    readers: Counter[int] = Counter(results)
    inside = list(kernels)
    while inside:
        kernel = inside.pop()
        readers.update((*kernel.inputs, *kernel.after, *kernel.block_results))
        inside += [k for block in kernel.blocks for k in block]
    alone = {v for k in kernels if k.kind in MATRIX_PRODUCTS for v in k.outputs if readers[v] == 1}
    converting = (k for k in kernels if k.kind == "convert_element_type" and len(k.inputs) == 1)
    in_order = {v for k in kernels if k.kind in ("reduce_max", "reduce_min", "argmax", "argmin") for v in k.inputs}
    wide = {k.inputs: k.outputs for k in converting if alone.issuperset(k.inputs) and in_order.isdisjoint(k.outputs)}
    left_out = frozenset(wide.values())
    return [
        replace(kernel, outputs=wide.get(kernel.outputs, kernel.outputs))
        for kernel in kernels
        if kernel.outputs not in left_out
    ]


def _with_row_kernels(kernels: Sequence[Kernel]) -> tuple[Kernel, ...]:
    """Marks what is read by rows: by a reduction over the last dimension, and by the one kernel that its result is for.

    The two are one kernel. (Where several read the result, as those of a loss, it is made once by a kernel of its own.)
    """
    readers = Counter(v for kernel in kernels for v in kernel.inputs)
    rows = {k.outputs[0]: k.inputs for k in kernels if k.reduces_rows and readers[k.outputs[0]] == 1}
    return tuple(
        replace(kernel, read_by_rows=tuple(v for r in kernel.inputs for v in rows.get(r, ())))
        if any(r in rows for r in kernel.inputs)
        else kernel
        for kernel in kernels
    )


def _halves(
    step: MemoryStep, reads: Mapping[int, tuple[int, ...]], memory: Mapping[int, int], compiler: Compiler
) -> tuple[int, ...]:
    """Inputs of a matrix product that it reads as they are, where 16 bits of each element would do."""
    if step.kind not in MATRIX_PRODUCTS or step.half_precision or not compiler.products_round:
        return ()
    return tuple(memory.get(v, v) for v in step.inputs if v not in reads)


def _twice(step: MemoryStep, inputs: tuple[int, ...], compiler: Compiler) -> tuple[int, ...]:
    """What a kernel needs two buffers for where its program names one."""
    if step.kind == HOST_SLICE:
        return step.outputs
    if step.kind in RANDOM_BITS:
        return step.outputs  # two words of the generator's state, of which each bit is made where it is read
    if step.kind in MATRIX_PRODUCTS and step.half_precision and compiler.widens_half_precision:
        return inputs + step.outputs
    return ()


def _blocks(
    step: MemoryStep, nbytes: Mapping[int, int], memory: dict[int, int], compiler: Compiler
) -> tuple[tuple[tuple[Kernel, ...], ...], tuple[int, ...], tuple[int, ...]]:
    """The kernels of a loop's body or of each branch, what they hand back, and what a loop carries."""
    if not step.body:
        return (), (), ()
    branches = step.body if step.kind == "cond" else (step,)
    blocks, handed_back, carried = [], [], []
    for branch in branches:
        is_loop = branch.kind != "branch"
        first_sliced = branch.num_constants + branch.num_carried if is_loop else len(branch.inputs)
        body: list[MemoryStep] = []
        for i, (outer, inner) in enumerate(zip(branch.inputs, branch.body_inputs, strict=True)):
            if i >= first_sliced:
                body.append(MemoryStep(inputs=(outer,), outputs=(inner,), kind=SLICE, fusible=True))
            elif is_loop and i >= branch.num_constants:
                carried.append(inner)
            else:
                memory[inner] = memory.get(outer, outer)
        body += branch.body
        num_kept = branch.num_carried if is_loop else len(branch.body_outputs)
        body += [MemoryStep(inputs=(v,), outputs=(), kind=STACK, fusible=False) for v in branch.body_outputs[num_kept:]]
        kept = branch.body_outputs[:num_kept]
        blocks.append(_block(tuple(body), frozenset(kept), nbytes, memory, compiler))
        if is_loop:
            handed_back += [memory.get(v, v) for v in kept]
    return tuple(blocks), tuple(handed_back), tuple(carried)


def written_values(
    steps: Sequence[MemoryStep], results: frozenset[int], nbytes: Mapping[int, int], compiler: Compiler
) -> set[int]:
    """Values that go to memory, found from the last step to the first."""
    written = set(results)
    absorbing = _absorbing(compiler)
    reader: dict[int, int] = {}  # the kernel that a value is read by, as the index of its last step, or SEVERAL
    by_reduction: set[int] = set()  # read by a kernel that is a reduction
    unfused: set[int] = set()  # read by a kernel that cannot compute it on the way in
    uses: dict[int, int] = {}
    arithmetic: dict[int, int] = {}
    row_broadcasts = _row_broadcasts(steps, nbytes) if compiler.writes_row_operands else set()
    into_rows: set[int] = set()  # values that arithmetic carries into a reduction over the last dimension
    for index in range(len(steps) - 1, -1, -1):
        step = steps[index]
        kind = step.kind
        out = step.outputs[0] if step.outputs else -1
        if kind in ALIASES:
            for v, o in zip(step.inputs, step.outputs, strict=False):
                if o in results:
                    written.add(v)
                for marked in (unfused, into_rows, by_reduction):
                    if o in marked:
                        marked.add(v)
                if kind == BARRIER:
                    unfused.add(v)
                if o in reader:
                    reader[v] = reader[o] if reader.get(v, reader[o]) == reader[o] else SEVERAL
                uses[v] = uses.get(v, 0) + uses.get(o, 0)
                arithmetic[v] = arithmetic.get(v, 0) + arithmetic.get(o, 0)
            continue
        into, is_reduction = index, kind in REDUCTIONS
        if step.fusible and len(step.outputs) == 1:
            keep = out in results or out in unfused or out not in reader
            keep = keep or (reader[out] == SEVERAL and kind in compiler.keeps)
            if not keep and compiler.writes_row_operands:
                keep = uses[out] > 1 and out in by_reduction
                keep = keep or (kind == "broadcast_in_dim" and arithmetic.get(out, 0) > 1 and out in into_rows)
            if keep:
                written.add(out)
            else:
                into, is_reduction = reader[out], out in by_reduction
        else:
            written.update(step.outputs)
        absorbs = step.fusible or kind in absorbing
        rows = step.fusible and (out in into_rows or not row_broadcasts.isdisjoint(step.inputs))
        rows = step.reduces_last if kind in REDUCTIONS else rows
        for v in step.inputs:
            reader[v] = into if reader.get(v, into) == into else SEVERAL
            uses[v] = uses.get(v, 0) + 1
            if is_reduction:
                by_reduction.add(v)
            if kind in ARITHMETIC:
                arithmetic[v] = arithmetic.get(v, 0) + 1
            if rows:
                into_rows.add(v)
            if not absorbs:
                unfused.add(v)
    return written


def _absorbing(compiler: Compiler) -> frozenset[str]:
    """Kernels that are not elementwise and compute what they read on the way in."""
    products = MATRIX_PRODUCTS | {SUM_OF_PIECES} if compiler.products_absorb else frozenset()
    return ABSORBING | products | ({"gather"} if compiler.gathers_absorb else frozenset())


def _row_broadcasts(steps: Sequence[MemoryStep], nbytes: Mapping[int, int]) -> set[int]:
    """Broadcasts of what reductions over the last dimension gave."""
    per_row: set[int] = set()
    broadcasts: set[int] = set()
    for step in steps:
        if not step.outputs:
            continue
        out = step.outputs[0]
        if step.kind in REDUCTIONS:
            if step.reduces_last and nbytes[out] > SCALAR_BYTES:
                per_row.add(out)
        elif (step.fusible or step.kind in ALIASES) and not per_row.isdisjoint(step.inputs):
            if step.kind == "broadcast_in_dim":
                broadcasts.add(out)
            elif all(nbytes[out] <= 2 * nbytes[v] for v in step.inputs if v in per_row):
                per_row.add(out)
    return broadcasts
