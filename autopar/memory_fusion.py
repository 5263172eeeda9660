"""Which values XLA writes to memory: operations grouped into kernels.

An elementwise operation is computed inside the kernels that read it, again in each of them where it is cheap, and is never
written. Written are: results of operations that do not fuse (matrix products, convolutions, gathers, sorts, loops), what
such operations read, and what is expensive (an exponential, a reduction) and read by several kernels. Reshapes are names for
the same memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping, Sequence

# Computed once and kept rather than computed again in each kernel that reads it (XLA's InstructionFusion::IsExpensive).
EXPENSIVE = frozenset(
    {
        "exp", "exp2", "expm1", "log", "log1p", "tanh", "sinh", "cosh", "tan", "sin", "cos", "asin", "acos", "atan",
        "asinh", "acosh", "atanh", "atan2", "logistic", "erf", "erfc", "erf_inv", "pow", "sqrt", "rsqrt", "cbrt", "rem",
        "lgamma", "digamma", "igamma", "random_bits", "threefry2x32", "random_gamma",
    }
)  # fmt: skip
REDUCTIONS = frozenset(
    {"reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "reduce_xor", "argmax", "argmin"}
)
MATRIX_PRODUCTS = frozenset({"dot_general", "conv_general_dilated"})
RANDOM_BITS = frozenset({"random_bits", "threefry2x32"})
# New names for memory that is already there.
ALIASES = frozenset({"reshape", "squeeze", "expand_dims", "copy", "bitcast_convert_type", "optimization_barrier"})
BARRIER = "optimization_barrier"
# Kernels that are not elementwise but compute what they read on the way in.
ABSORBING = REDUCTIONS | {"dynamic_update_slice", "scatter", "scatter-add", "scatter_add", "concatenate", "pad", "stack"}
# Elementwise operations whose operands jax broadcasts by itself.
ARITHMETIC = frozenset({"add", "sub", "mul", "div", "max", "min", "add_any", "pow", "rem", "atan2"})
# An operand this much smaller than the result, and larger than a scalar, has been broadcast (types differ by up to 8).
BROADCAST_RATIO, SCALAR_BYTES = 16, 16
SLICE, STACK = "slice_of_stacked", "stack"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Compiler:
    """What differs between XLA's compilers.

    Attributes:
        breadth_first: Runs kernels in the order in which they become ready, whatever memory that needs.
        keeps_barriers: Recomputes what `jax.checkpoint` says; else finds that it has computed it before, and keeps it.
        writes_row_operands: Computes a reduction over the last dimension, what is made of its result and what leads to it
            in one kernel of a library that takes neither broadcasts nor values with other readers from outside: these are written.
        products_absorb: Computes what a matrix product reads on the way in, however expensive, again for each product.
        products_round: Keeps what only matrix products read, and made, in 16 bits: all that their default precision looks at.
        widens_half_precision: Copies the 16-bit operands of matrix products to 32 bits.
    """

    breadth_first: bool
    keeps_barriers: bool
    writes_row_operands: bool
    products_absorb: bool
    products_round: bool
    widens_half_precision: bool


CPU = Compiler(
    breadth_first=True,
    keeps_barriers=True,
    writes_row_operands=True,
    products_absorb=False,
    products_round=False,
    widens_half_precision=True,
)
GPU = Compiler(
    breadth_first=False,
    keeps_barriers=True,
    writes_row_operands=False,
    products_absorb=False,
    products_round=False,
    widens_half_precision=False,
)
TPU = dataclasses.replace(GPU, products_absorb=True, products_round=True)


def compiler_for(platform: str, jax_version: tuple[int, ...]) -> Compiler:
    """XLA's compiler for a platform as jax names it: `cpu`, `gpu` (`cuda`, `rocm`) or `tpu`.

    Raises:
        ValueError: Another platform.
    """
    match platform:
        case "cpu":
            # Up to jax 0.10 the CPU compiler undoes rematerialisation.
            return CPU if jax_version >= (0, 11) else dataclasses.replace(CPU, keeps_barriers=False)
        case "gpu" | "cuda" | "rocm":
            return GPU
        case "tpu":
            return TPU
        case _:
            raise ValueError(f"expected the platform cpu, gpu, cuda, rocm or tpu, got {platform!r}")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One operation. Sizes of its values are per device, after sharding; ids are unique in the whole program.

    Attributes:
        kind: Name of the jax primitive.
        fusible: Elementwise, or moving or making values: XLA can compute it inside the kernels that read it.
        body: For a loop its body. For a `cond` one step of kind `branch` for each branch, with a body of its own.
        trips: How often the body runs.
        body_inputs: Names of the inputs inside of the body, one for each of `inputs`, in jax's order: constants, carried
            values, stacked values of which each turn reads one slice.
        body_outputs: What the body hands back, one for each of `outputs`: carried values, slices to be stacked.
        num_constants: How many of the inputs are constants of the loop.
        num_carried: How many of the inputs, and of the outputs, are carried from turn to turn.
        reduces_last: For a reduction, whether it runs over the last dimension.
        half_precision: Its inputs are 16-bit floats, of which a CPU's matrix products need 32-bit copies.
        key: Steps with equal keys and equal inputs compute the same. None is equal to nothing.
    """

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    kind: str
    fusible: bool
    body: tuple[Step, ...] = ()
    trips: int = 1
    body_inputs: tuple[int, ...] = ()
    body_outputs: tuple[int, ...] = ()
    num_constants: int = 0
    num_carried: int = 0
    reduces_last: bool = True
    half_precision: bool = False
    key: Hashable = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """Operations that XLA runs as one. It reads and writes only values that are in memory.

    `in_place`: an output may take the memory of an input of the same size that dies here. `after`: kernels' outputs
    that must be there first although they are not read (barriers). `behind_others`: of kernels that become ready together
    this one runs last. `twice`: inputs or outputs that take their memory twice over. `halves`: inputs that could be kept in
    half their memory as far as this kernel cares.
    """

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    kind: str
    in_place: bool
    after: tuple[int, ...] = ()
    behind_others: bool = False
    twice: tuple[int, ...] = ()
    halves: tuple[int, ...] = ()
    blocks: tuple[tuple[Kernel, ...], ...] = ()
    block_results: tuple[int, ...] = ()


def with_broadcasts(steps: Sequence[Step], nbytes: Mapping[int, int]) -> tuple[tuple[Step, ...], dict[int, int]]:
    """Spells out the broadcast of each operand that is smaller than the result, once for all operations that need it.

    Returns the steps, and for each new value (ids below zero) the value whose size it has.
    """
    like: dict[int, int] = {}
    return _spelled_out(steps, nbytes, like), like


def _spelled_out(steps: Sequence[Step], nbytes: Mapping[int, int], like: dict[int, int]) -> tuple[Step, ...]:
    done: list[Step] = []
    known: dict[tuple[int, int], int] = {}
    alias: dict[int, int] = {}
    for step in steps:
        if step.kind in ALIASES:
            for v, out in zip(step.inputs, step.outputs, strict=False):
                alias[out] = alias.get(v, v)
        elif step.body:
            step = dataclasses.replace(step, body=_spelled_out(step.body, nbytes, like))
        elif step.kind in ARITHMETIC:
            (out,) = step.outputs
            inputs = list(step.inputs)
            for i, v in enumerate(inputs):
                if SCALAR_BYTES < nbytes[v] <= nbytes[out] // BROADCAST_RATIO:
                    key = (alias.get(v, v), nbytes[out])
                    if key not in known:
                        known[key] = -1 - len(like)
                        like[known[key]] = out
                        done.append(Step(inputs=(v,), outputs=(known[key],), kind="broadcast_in_dim", fusible=True))
                    inputs[i] = known[key]
            if inputs != list(step.inputs):
                step = dataclasses.replace(step, inputs=tuple(inputs))
        done.append(step)
    return tuple(done)


def without_recomputation(steps: Sequence[Step]) -> tuple[Step, ...]:
    """Drops barriers, and steps that compute again what an earlier step has computed."""
    done: list[Step] = []
    same: dict[int, int] = {}
    known: dict[Hashable, tuple[int, ...]] = {}
    for step in steps:
        inputs = tuple(same.get(v, v) for v in step.inputs)
        if step.kind == BARRIER:
            same.update(zip(step.outputs, inputs, strict=True))
            continue
        if step.key is not None:
            before = known.setdefault((step.key, inputs), step.outputs)
            if before is not step.outputs:
                same.update(zip(step.outputs, before, strict=True))
                continue
        if step.body:
            step = dataclasses.replace(step, body=without_recomputation(step.body))
        done.append(step if inputs == step.inputs else dataclasses.replace(step, inputs=inputs))
    return tuple(done)


def kernels(
    steps: Sequence[Step],
    arguments: Sequence[int],
    results: Sequence[int],
    nbytes: Mapping[int, int],
    compiler: Compiler,
) -> tuple[Kernel, ...]:
    """The kernels of a program in program order; values are named by the memory they are in."""
    return _block(tuple(steps), frozenset(results), nbytes, {}, compiler)


def _block(
    steps: tuple[Step, ...],
    results: frozenset[int],
    nbytes: Mapping[int, int],
    memory: dict[int, int],
    compiler: Compiler,
) -> tuple[Kernel, ...]:
    """`memory` names for each alias the value whose memory it is."""
    written = _written(steps, results, nbytes, compiler)
    transposed = {step.inputs[0] for step in steps if step.kind == "transpose"}
    found: list[Kernel] = []
    reads: dict[int, tuple[int, ...]] = {}  # what a value that is not written is computed from
    behind: dict[int, tuple[int, ...]] = {}  # what must have happened before a value may be computed
    for step in steps:
        inputs: dict[int, None] = {}
        after: dict[int, None] = {}
        for v in step.inputs:
            if v in reads:
                inputs.update(dict.fromkeys(reads[v]))
            else:
                inputs[memory.get(v, v)] = None
            if v in behind:
                after.update(dict.fromkeys(behind[v]))
        if step.kind in ALIASES and (step.kind == BARRIER or step.outputs[0] not in results):
            if step.kind == BARRIER:
                after.update(inputs)
            for v, out in zip(step.inputs, step.outputs, strict=False):
                if v in reads:
                    reads[out] = reads[v]
                else:
                    memory[out] = memory.get(v, v)
                if after:
                    behind[out] = tuple(after)
        elif step.outputs and not any(v in written for v in step.outputs):
            for out in step.outputs:
                reads[out] = tuple(inputs)
                if after:
                    behind[out] = tuple(after)
        else:
            blocks, block_results = _blocks(step, nbytes, memory, compiler)
            found.append(
                Kernel(
                    inputs=tuple(inputs),
                    outputs=step.outputs,
                    kind=step.kind,
                    in_place=step.fusible or bool(step.body) or step.kind in ABSORBING,
                    after=tuple(after),
                    # Folding the transpose of a weight's gradient into its matrix product makes that one a later instruction.
                    behind_others=step.kind in MATRIX_PRODUCTS and step.outputs[0] in transposed,
                    twice=_twice(step, tuple(inputs), compiler),
                    halves=_halves(step, reads, memory, compiler),
                    blocks=blocks,
                    block_results=block_results,
                )
            )
    return tuple(found)


def _halves(
    step: Step, reads: Mapping[int, tuple[int, ...]], memory: Mapping[int, int], compiler: Compiler
) -> tuple[int, ...]:
    """Inputs of a matrix product that it reads as they are, where 16 bits of each element would do."""
    if step.kind not in MATRIX_PRODUCTS or step.half_precision or not compiler.products_round:
        return ()
    return tuple(memory.get(v, v) for v in step.inputs if v not in reads)


def _twice(step: Step, inputs: tuple[int, ...], compiler: Compiler) -> tuple[int, ...]:
    """What a kernel needs two buffers for where its program names one."""
    if step.kind in RANDOM_BITS:
        return step.outputs  # two words of the generator's state, of which each bit is made where it is read
    if step.kind in MATRIX_PRODUCTS and step.half_precision and compiler.widens_half_precision:
        return inputs
    return ()


def _blocks(
    step: Step, nbytes: Mapping[int, int], memory: dict[int, int], compiler: Compiler
) -> tuple[tuple[tuple[Kernel, ...], ...], tuple[int, ...]]:
    """The kernels of a loop's body or of each branch, and what they hand back."""
    if not step.body:
        return (), ()
    branches = step.body if step.kind == "cond" else (step,)
    blocks = []
    for branch in branches:
        is_loop = branch.kind != "branch"
        first_sliced = branch.num_constants + branch.num_carried if is_loop else len(branch.inputs)
        body: list[Step] = []
        for i, (outer, inner) in enumerate(zip(branch.inputs, branch.body_inputs, strict=True)):
            if i >= first_sliced:
                body.append(Step(inputs=(outer,), outputs=(inner,), kind=SLICE, fusible=True))
            elif i < branch.num_constants or not is_loop:
                memory[inner] = memory.get(outer, outer)
        body += branch.body
        num_kept = branch.num_carried if is_loop else len(branch.body_outputs)
        body += [Step(inputs=(v,), outputs=(), kind=STACK, fusible=False) for v in branch.body_outputs[num_kept:]]
        kept = frozenset(branch.body_outputs[:num_kept])
        blocks.append(_block(tuple(body), kept, nbytes, memory, compiler))
    return tuple(blocks), tuple(v for b in branches for v in b.body_outputs)


def _written(
    steps: tuple[Step, ...], results: frozenset[int], nbytes: Mapping[int, int], compiler: Compiler
) -> set[int]:
    """Values that go to memory, found from the last step to the first."""
    written = set(results)
    absorbing = ABSORBING | MATRIX_PRODUCTS if compiler.products_absorb else ABSORBING
    readers: dict[int, set[int]] = {}  # the kernels that a value is read by, as the index of their last step
    unfused: set[int] = set()  # read by a kernel that cannot compute it on the way in
    uses: dict[int, int] = {}
    arithmetic: dict[int, int] = {}
    reductions: set[int] = set()
    row_broadcasts = _row_broadcasts(steps, nbytes) if compiler.writes_row_operands else set()
    into_rows: set[int] = set()  # values that arithmetic carries into a reduction over the last dimension
    for index in range(len(steps) - 1, -1, -1):
        step = steps[index]
        out = step.outputs[0] if step.outputs else None
        if step.kind in ALIASES:
            for v, o in zip(step.inputs, step.outputs, strict=False):
                if o in results:
                    written.add(v)
                if o in unfused or step.kind == BARRIER:
                    unfused.add(v)
                if o in into_rows:
                    into_rows.add(v)
                readers.setdefault(v, set()).update(readers.get(o, ()))
                uses[v] = uses.get(v, 0) + uses.get(o, 0)
                arithmetic[v] = arithmetic.get(v, 0) + arithmetic.get(o, 0)
            continue
        into = {index}
        if step.fusible and len(step.outputs) == 1 and out is not None:
            kernels_of = readers.get(out, set())
            keep = out in results or out in unfused or not kernels_of
            keep = keep or (len(kernels_of) > 1 and step.kind in EXPENSIVE and not compiler.products_absorb)
            if not keep and compiler.writes_row_operands:
                keep = uses[out] > 1 and not kernels_of.isdisjoint(reductions)
                keep = keep or (step.kind == "broadcast_in_dim" and arithmetic.get(out, 0) > 1 and out in into_rows)
            if keep:
                written.add(out)
            else:
                into = kernels_of
        else:
            written.update(step.outputs)
            if step.kind in REDUCTIONS:
                reductions.add(index)
        absorbs = step.fusible or step.kind in absorbing
        if step.kind in REDUCTIONS:
            rows = step.reduces_last
        else:
            rows = step.fusible and (out in into_rows or not row_broadcasts.isdisjoint(step.inputs))
        for v in step.inputs:
            readers.setdefault(v, set()).update(into)
            uses[v] = uses.get(v, 0) + 1
            if step.kind in ARITHMETIC:
                arithmetic[v] = arithmetic.get(v, 0) + 1
            if rows:
                into_rows.add(v)
            if not absorbs:
                unfused.add(v)
    return written


def _row_broadcasts(steps: tuple[Step, ...], nbytes: Mapping[int, int]) -> set[int]:
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
