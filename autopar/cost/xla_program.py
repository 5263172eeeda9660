"""The operations of a program for the memory prediction, and the differences between XLA's compilers."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence

import jax.numpy as jnp
import msgspec
import numpy as np
from msgspec.structs import replace

from autopar.cost.roofline import is_fusible
from autopar.hardware.kinds import Platform
from autopar.ir.graph import REDUCED, RETURNED, UNREDUCED, Op, OpGraph
from autopar.ir.layout import Layout, LogicalMesh
from autopar.lowering.instructions import Compute, Instruction, Move

# Computed once and kept rather than computed again in each kernel that reads it (XLA's InstructionFusion::IsExpensive).
EXPENSIVE = frozenset(
    {
        "exp", "exp2", "expm1", "log", "log1p", "tanh", "sinh", "cosh", "tan", "sin", "cos", "asin", "acos", "atan",
        "asinh", "acosh", "atanh", "atan2", "logistic", "erf", "erfc", "erf_inv", "pow", "sqrt", "rsqrt", "cbrt", "rem",
        "lgamma", "digamma", "igamma", "random_bits", "threefry2x32", "random_gamma",
    }
)  # fmt: skip
REDUCTIONS = frozenset(
    {
        "reduce_sum",
        "reduce_max",
        "reduce_min",
        "reduce_prod",
        "reduce_and",
        "reduce_or",
        "reduce_xor",
        "argmax",
        "argmin",
    }
)
RANDOM_BITS = frozenset({"random_bits", "threefry2x32"})
COLLECTIVES = frozenset({"all_gather", "all_reduce", "all_to_all", "collective_permute", "reduce_scatter"})
# New names for memory that is already there.
ALIASES = frozenset(
    {"reshape", "squeeze", "expand_dims", "copy", "bitcast_convert_type", "optimization_barrier", "name"}
)
BARRIER = "optimization_barrier"
HOST_COPY = "host_copy"  # from or to the memory of the host; reads what it waits for, too
HOST_SLICE = "host_slice"  # such a copy for a turn of a scan, beside which that for the next turn is on its way
SUM_OF_PIECES = "sum of pieces"  # of products: reads what they read, and sums in 32 bits whatever these are
# Kernels that are not elementwise but compute what they read on the way in.
ABSORBING = REDUCTIONS | {
    "dynamic_update_slice",
    "scatter",
    "scatter-add",
    "scatter_add",
    "concatenate",
    "pad",
    "stack",
}
# Elementwise operations whose operands jax broadcasts by itself.
ARITHMETIC = frozenset({"add", "sub", "mul", "div", "max", "min", "add_any", "pow", "rem", "atan2"})
# An operand this much smaller than the result, and larger than a scalar, has been broadcast (types differ by up to 8).
BROADCAST_RATIO, SCALAR_BYTES = 16, 16


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """The pieces in which an array lies in memory: so many of its next to last dimension, and of its last."""

    rows: int
    columns: int

    def nbytes(self, shape: Sequence[int], itemsize: int) -> int:
        """Bytes of an array whose last two dimensions are filled up to whole tiles; a tile of few rows is as low."""
        if len(shape) < 2:
            return math.prod(shape) * itemsize
        *before, rows, columns = shape
        height = min(self.rows, 1 << (rows - 1).bit_length())
        filled = -(-rows // height) * height * -(-columns // self.columns) * self.columns
        return math.prod(before) * filled * itemsize


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Compiler:
    """What differs between XLA's compilers.

    Attributes:
        breadth_first: Runs kernels in the order in which they become ready, whatever memory that needs.
        keeps_barriers: Recomputes what `jax.checkpoint` says; else finds that it has computed it before, and keeps it.
        writes_row_operands: Computes a reduction over the last dimension, what is made of its result and what leads to
            it in one kernel of a library, for which broadcasts, and values that others read too, are written first.
        keeps: What is computed once and kept where several kernels read it, and not computed again in each of them.
        products_absorb: Computes what a matrix product reads on the way in; what several products read only where that
            moves fewer bytes than to write it once.
        gathers_absorb: Computes what a gather reads on the way in: of log-probabilities those of the targets only.
        products_convert: Writes the result of a matrix product in the type to which alone it is converted.
        products_shift: Takes the softmax's maximum, and what arithmetic in a wider type stands before it, into the
            kernel of the product that makes the scores, which writes scores less their maximum.
        sinks_broadcasts: Makes the broadcasts that a loop reads inside of its body, where they are not written.
        scatters_select: Makes of one number that is scattered into each row a comparison with its column.
        products_round: Keeps what only matrix products read, and made, in the 16 bits that their precision looks at.
        widens_half_precision: Keeps the 16-bit operands and results of matrix products in 32 bits.
        copies_gathered_state: Copies state at the start of the step, and back at its end, where its new value comes
            out of a collective.
        pads_convolutions: Writes the padding of images and gradients that its library does not know
            (`memory_program`).
        keeps_product_order: Leaves what products make, and what is made of it element by element, in the order of
            dimensions in which the first of them makes it; what other products make in another is copied
            (`autopar.ops.attention.score_kernels`).
        row_kernels: Runs a reduction over the last dimension and what is made of its result and its operand as one
            kernel, a row at a time (a softmax, its gradient, a norm), which writes to no memory that it reads.
        reduces_late: Does not hurry the reductions of a layer that is computed again, though they would free memory:
            they run in program order or at the end of its backward pass (seen in programs for 8 and 256 chips of v5e).
        tile: Of the results of matrix products; None where arrays lie without gaps.
        vector_memory_bytes: What a device keeps of values in memory of its own for them (TPU).
        vector_memory_turns: How many times the bytes of that memory other kernels may move between two that make or
            read a value which lies there. XLA weighs times; of 1 to 16 turns, 4 to 7 come nearest to what small steps
            take on v5e, v5p and v6e (`benchmarks.compiled_elsewhere`).
    """

    breadth_first: bool
    keeps_barriers: bool
    writes_row_operands: bool
    keeps: frozenset[str]
    products_absorb: bool
    products_convert: bool
    products_shift: bool
    sinks_broadcasts: bool
    scatters_select: bool
    gathers_absorb: bool
    products_round: bool
    widens_half_precision: bool
    copies_gathered_state: bool
    pads_convolutions: bool
    keeps_product_order: bool
    row_kernels: bool
    reduces_late: bool
    tile: Tile | None = None
    vector_memory_bytes: int = 0
    vector_memory_turns: int = 0


CPU = Compiler(
    breadth_first=True,
    keeps_barriers=True,
    writes_row_operands=True,
    keeps=EXPENSIVE,
    products_absorb=False,
    products_convert=False,
    products_shift=False,
    sinks_broadcasts=False,
    scatters_select=False,
    gathers_absorb=False,
    products_round=False,
    widens_half_precision=True,
    copies_gathered_state=False,
    pads_convolutions=False,
    keeps_product_order=False,
    row_kernels=False,
    reduces_late=False,
)
GPU = Compiler(
    breadth_first=False,
    keeps_barriers=True,
    writes_row_operands=False,
    keeps=frozenset({"tanh"}),  # the dearest of them: an exponential is computed again
    products_absorb=False,
    products_convert=False,
    products_shift=False,
    sinks_broadcasts=False,
    scatters_select=False,
    gathers_absorb=True,
    products_round=False,
    widens_half_precision=False,
    copies_gathered_state=False,
    pads_convolutions=True,
    keeps_product_order=True,
    row_kernels=True,
    reduces_late=False,
)
TPU = dataclasses.replace(
    GPU,
    keeps=frozenset(),
    products_absorb=True,
    gathers_absorb=False,
    products_convert=True,
    products_shift=True,
    sinks_broadcasts=True,
    scatters_select=True,
    products_round=True,
    copies_gathered_state=True,
    pads_convolutions=False,
    keeps_product_order=False,
    row_kernels=False,
    reduces_late=True,
    tile=Tile(rows=8, columns=128),
    vector_memory_turns=6,
)


def compiler_for(platform: Platform, jax_version: tuple[int, ...]) -> Compiler:
    """XLA's compiler for a platform."""
    match platform:
        case Platform.CPU:
            # Up to jax 0.10 the CPU compiler undoes rematerialisation.
            return CPU if jax_version >= (0, 11) else dataclasses.replace(CPU, keeps_barriers=False)
        case Platform.GPU:
            return GPU
        case Platform.TPU:
            return TPU


class MemoryStep(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """One operation. Sizes of its values are per device, after sharding; ids are unique in the whole program.

    Attributes:
        kind: Name of the jax primitive.
        fusible: Elementwise, or moving or making values: XLA can compute it inside the kernels that read it.
        body: For a loop its body. For a `cond` one step of kind `branch` for each branch, with a body of its own.
        trips: How often the body runs.
        body_inputs: Names of the inputs inside of the body, one for each of `inputs`, in jax's order: constants,
            carried values, stacked values of which each turn reads one slice.
        body_outputs: What the body hands back, one for each of `outputs`: carried values, slices to be stacked.
        num_constants: How many of the inputs are constants of the loop.
        num_carried: How many of the inputs, and of the outputs, are carried from turn to turn.
        reduces_last: For a reduction, whether it runs over the last dimension.
        half_precision: Its inputs and outputs are 16-bit floats, which a CPU's matrix products read and write in 32.
        key: Steps with equal keys and equal inputs compute the same. None is equal to nothing.
    """

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    kind: str
    fusible: bool
    body: tuple[MemoryStep, ...] = ()
    trips: int = 1
    body_inputs: tuple[int, ...] = ()
    body_outputs: tuple[int, ...] = ()
    num_constants: int = 0
    num_carried: int = 0
    reduces_last: bool = True
    half_precision: bool = False
    key: Hashable = None


def with_broadcasts(
    steps: Sequence[MemoryStep], nbytes: Mapping[int, int], like: dict[int, int]
) -> tuple[MemoryStep, ...]:
    """Spells out the broadcast of each operand that is smaller than the result, once for all operations that need it.

    New values get ids below zero; `like` gains for each the value of the program whose size it has.
    """
    done: list[MemoryStep] = []
    known: dict[tuple[int, int], int] = {}
    alias: dict[int, int] = {}
    for step in steps:
        if step.kind in ALIASES:
            for v, out in zip(step.inputs, step.outputs, strict=False):
                alias[out] = alias.get(v, v)
        elif step.body:
            step = replace(step, body=with_broadcasts(step.body, nbytes, like))
        elif step.kind in ARITHMETIC:
            (out,) = step.outputs
            inputs = list(step.inputs)
            for i, v in enumerate(inputs):
                if SCALAR_BYTES < nbytes[v] <= nbytes[out] // BROADCAST_RATIO:
                    key = (alias.get(v, v), nbytes[out])
                    if key not in known:
                        known[key] = -1 - len(like)
                        like[known[key]] = like.get(out, out)
                        done.append(
                            MemoryStep(inputs=(v,), outputs=(known[key],), kind="broadcast_in_dim", fusible=True)
                        )
                    inputs[i] = known[key]
            if inputs != list(step.inputs):
                step = replace(step, inputs=tuple(inputs))
        done.append(step)
    return tuple(done)


def without_recomputation(
    steps: Sequence[MemoryStep], results: Sequence[int], compiler: Compiler
) -> tuple[MemoryStep, ...]:
    """Drops steps that compute again what an earlier step has computed, unless a kept barrier hides that.

    Steps that make `results` stay.
    """
    kept = frozenset(results)
    done: list[MemoryStep] = []
    same: dict[int, int] = {}
    known: dict[Hashable, tuple[int, ...]] = {}
    for step in steps:
        inputs = tuple(same.get(v, v) for v in step.inputs)
        if step.kind == BARRIER and not compiler.keeps_barriers:
            same.update(zip(step.outputs, inputs, strict=True))
            continue
        if step.key is not None:
            before = known.setdefault((step.key, inputs), step.outputs)
            if before is not step.outputs and kept.isdisjoint(step.outputs):
                same.update(zip(step.outputs, before, strict=True))
                continue
        if step.body:
            step = replace(step, body=without_recomputation(step.body, step.body_outputs, compiler))
        done.append(step if inputs == step.inputs else replace(step, inputs=inputs))
    return tuple(done)


def facts_of(op: Op, compiler: Compiler) -> tuple[str, bool, bool, bool]:
    """(kind, fusible, reduces_last, half_precision) of an equation, as of `xla_program.MemoryStep`."""
    if compiler.scatters_select and puts_one_in_each_row(op):
        return "select_n", True, reduces_last(op), is_half_precision(op)
    return kind_of(op), is_fusible(op.primitive), reduces_last(op), is_half_precision(op)


# Over dimensions of size one they are reshapes.
_RESHAPING = frozenset({"broadcast_in_dim", "reduce_sum", "reduce_max", "reduce_min", "reduce_prod"})


def kind_of(op: Op) -> str:
    """The primitive's name; a broadcast or a reduction of dimensions of size one only is a reshape."""
    if op.primitive in _RESHAPING and op.eqn.outvars[0].aval.size == op.eqn.invars[0].aval.size:
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


def puts_one_in_each_row(op: Op) -> bool:
    """Whether a scatter puts one number into each row, as the gradient of `take_along_axis` of one index a row does."""
    if op.primitive not in ("scatter-add", "scatter"):
        return False
    numbers, (operand, indices, _) = op.eqn.params["dimension_numbers"], (v.aval.shape for v in op.eqn.invars)
    last = len(operand) - 1
    return (
        numbers.update_window_dims == ()
        and (*numbers.operand_batching_dims, *numbers.inserted_window_dims) == tuple(range(last + 1))
        and numbers.scatter_dims_to_operand_dims == (last,)
        and math.prod(indices) == math.prod(operand[:-1])
    )


def transposed_alone(instructions: Sequence[Instruction]) -> dict[int, Sequence[int]]:
    """The values that a transpose reads and nothing else computes with, and its order of their dimensions."""
    reads: Counter[int] = Counter()
    order: dict[int, Sequence[int]] = {}
    for instruction in instructions:
        if not isinstance(instruction, Move):
            reads.update(value for value, _ in instruction.keys_read)
        if isinstance(instruction, Compute) and instruction.op.primitive == "transpose":
            order |= {value: instruction.op.eqn.params["permutation"] for value, _ in instruction.keys_read}
    return {value: dims for value, dims in order.items() if reads[value] == 1}


def place_names(
    graph: OpGraph, stands_for: dict[int, tuple[int, tuple[Layout, str]]], made_by: dict[int, str], mesh: LogicalMesh
) -> dict[int, str]:
    """What to call the values of a memory program in messages."""
    out = {}
    for number, (v, place) in stands_for.items():
        value = graph.values[v]
        what = value.name or f"{made_by.get(v, 'value')} {value.dtype}{list(value.shape)}"
        copy = "" if place[1] in (UNREDUCED, REDUCED) else f", copy for {place[1]}"
        copy = f", {place[1]}" if place[1] == RETURNED else copy
        out[number] = f"{what} {place[0].text(mesh)}{copy}"
    return out
