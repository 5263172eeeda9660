"""Which values XLA writes to memory: operations grouped into kernels.

An elementwise operation is computed inside the kernels that read it, again in each of them where it is cheap, and is never
written. Written are: results of operations that do not fuse (matrix products, convolutions, gathers, sorts, loops), what
such operations read, and what is expensive (an exponential, a reduction) and read by several kernels. Reshapes are names for
the same memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

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


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """Operations that XLA runs as one. It reads and writes only values that are in memory.

    `in_place`: an output may take the memory of an input of the same size that dies here. `after`: kernels' outputs
    that must be there first although they are not read (barriers).
    """

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    kind: str
    in_place: bool
    after: tuple[int, ...] = ()
    blocks: tuple[tuple[Kernel, ...], ...] = ()
    block_results: tuple[int, ...] = ()


def with_broadcasts(
    steps: Sequence[Step], nbytes: Mapping[int, int]
) -> tuple[tuple[Step, ...], dict[int, int]]:
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


def kernels(
    steps: Sequence[Step], arguments: Sequence[int], results: Sequence[int], nbytes: Mapping[int, int]
) -> tuple[Kernel, ...]:
    """The kernels of a program in program order; values are named by the memory they are in."""
    memory: dict[int, int] = {}
    return _block(tuple(steps), frozenset(results), nbytes, memory)


def _block(
    steps: tuple[Step, ...], results: frozenset[int], nbytes: Mapping[int, int], memory: dict[int, int]
) -> tuple[Kernel, ...]:
    written = _written(steps, results, nbytes)
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
        if step.kind in ALIASES and not (step.kind != BARRIER and step.outputs[0] in results):
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
            blocks, block_results = _blocks(step, nbytes, memory)
            found.append(
                Kernel(
                    inputs=tuple(inputs),
                    outputs=step.outputs,
                    kind=step.kind,
                    in_place=step.fusible or bool(step.body) or step.kind in ABSORBING,
                    after=tuple(after),
                    blocks=blocks,
                    block_results=block_results,
                )
            )
    return tuple(found)


def _blocks(
    step: Step, nbytes: Mapping[int, int], memory: dict[int, int]
) -> tuple[tuple[tuple[Kernel, ...], ...], tuple[int, ...]]:
    """The kernels of a loop's body or of each branch."""
    if not step.body:
        return (), ()
    branches = step.body if step.kind == "cond" else (step,)
    blocks = []
    for branch in branches:
        sliced = branch.num_constants + branch.num_carried if branch.kind != "branch" else len(branch.inputs)
        body: list[Step] = []
        for i, (outer, inner) in enumerate(zip(branch.inputs, branch.body_inputs, strict=True)):
            if i < branch.num_constants or branch.kind == "branch":
                memory[inner] = memory.get(outer, outer)
            elif i >= sliced:
                body.append(Step(inputs=(outer,), outputs=(inner,), kind=SLICE, fusible=True))
        body += branch.body
        stacked = branch.body_outputs[branch.num_carried :] if branch.kind != "branch" else ()
        body += [Step(inputs=(v,), outputs=(), kind=STACK, fusible=False) for v in stacked]
        carried = branch.body_outputs[: branch.num_carried] if branch.kind != "branch" else branch.body_outputs
        blocks.append(_block(tuple(body), frozenset(carried), nbytes, memory))
    return tuple(blocks), tuple(v for b in branches for v in b.body_outputs)


def _written(steps: tuple[Step, ...], results: frozenset[int], nbytes: Mapping[int, int]) -> set[int]:
    """Values that go to memory, found from the last step to the first."""
    written = set(results)
    # For each value the kernels that read it: None for one that cannot compute it on the way in.
    readers: dict[int, set[int]] = {}
    unfused: set[int] = set()
    uses: dict[int, int] = {}
    arithmetic: dict[int, int] = {}
    into_rows: set[int] = set()  # values that arithmetic carries into a reduction over the last dimension
    reductions: set[int] = set()
    for index in range(len(steps) - 1, -1, -1):
        step = steps[index]
        out = step.outputs[0] if step.outputs else -1
        if step.kind in ALIASES:
            for v, o in zip(step.inputs, step.outputs, strict=False):
                if o in results:
                    written.add(v)
                if o in unfused:
                    unfused.add(v)
                readers.setdefault(v, set()).update(readers.get(o, ()))
                uses[v] = uses.get(v, 0) + uses.get(o, 0)
                if o in into_rows:
                    into_rows.add(v)
            continue
        into = {index}
        if step.fusible and len(step.outputs) == 1:
            kernels_of = readers.get(out, set())
            keep = out in results or out in unfused or not kernels_of
            if not keep and len(kernels_of) > 1 and step.kind in EXPENSIVE:
                keep = True
            if not keep and uses[out] > 1 and not kernels_of.isdisjoint(reductions):
                keep = True
            if not keep and step.kind == "broadcast_in_dim" and arithmetic.get(out, 0) > 1 and out in into_rows:
                keep = True
            if keep:
                written.add(out)
            else:
                into = kernels_of
        else:
            written.update(step.outputs)
            if step.kind in REDUCTIONS:
                reductions.add(index)
        rows = step.reduces_last if step.kind in REDUCTIONS else (out in into_rows and step.fusible)
        absorbs = step.fusible or step.kind in ABSORBING
        for v in step.inputs:
            readers.setdefault(v, set()).update(into)
            uses[v] = uses.get(v, 0) + 1
            if rows:
                into_rows.add(v)
            if step.kind in ARITHMETIC:
                arithmetic[v] = arithmetic.get(v, 0) + 1
            if not absorbs:
                unfused.add(v)
    return written
