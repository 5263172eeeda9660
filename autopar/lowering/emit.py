"""From instructions to a jax function on global arrays, every value pinned to the layout that the plan gives it.

A partial value over axes A is an array with one leading dimension of size |A|, split over A: each device holds its
summand. Linear operations run on it under `vmap`; reducing is a `shard_map` of `psum` or `psum_scatter`, and mesh axes
go to another dimension by one of `all_to_all`. Everything else is left to the partitioner between constraints that
leave it nothing to decide.
"""

from __future__ import annotations

import contextlib
import functools
import math
import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from autopar.common import jax_compat, loops
from autopar.frontend.build_graph import stack_of_module
from autopar.frontend.callbacks import guarded, is_callback
from autopar.ir.graph import HOST, UNREDUCED, Constant, OpGraph, OpKind, Role
from autopar.ir.jax_sharding import named_sharding, on_parts, partition_spec
from autopar.ir.layout import Layout, LogicalMesh, replicated
from autopar.ir.primitives import IN_EQUAL_PARTS, SCATTERS, looked_up_dim
from autopar.ir.resharding import ReshardStep, StepKind
from autopar.ir.strategies import replicated_strategy
from autopar.lowering.collective_matmul import gathered_product, scattered_product
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
    Pieces,
    Place,
    Split,
    Stack,
)
from autopar.ops.attention import execute, ring
from autopar.ops.attention.form import letters
from autopar.ops.attention.kernels import library_on
from autopar.ops.kernels.cudnn import is_cudnn_attention, run_cudnn
from autopar.ops.kernels.grouped import (
    WHOLE,
    Part,
    convolved_part,
    grouped_places,
    is_grouped,
    is_grouped_product,
    product_on_part,
)
from autopar.ops.kernels.islands import Spec, is_island, island_of, mesh_axes, run_parts
from autopar.ops.kernels.known import is_opaque, run_opaque
from autopar.ops.kernels.local import is_custom_partition, runs_locally
from autopar.ops.kernels.operation import is_kernel
from autopar.ops.kernels.row_exchange import Devices
from autopar.ops.kernels.scaled import is_scaled_product, run_scaled

# Gradients that lie in memory row by row, as the state does, in programs for TPUs.
#
# The gradient of a weight is a product and its transpose, which XLA's TPU compiler makes of the product by writing it
# column by column. From there it gives that order to the whole update: it copies the weight and its moments into
# columns before, and back into rows after, six copies of state that one order of the gradient saves. (Seen in programs
# that libtpu 0.0.42.1 compiles for v5e and v6e; a step of two such weights reads and writes a quarter less on v6e.)

# What lies without gaps in a TPU's tiles lies row by row where nobody says otherwise; of other arrays the compiler may
# put another dimension last.
_TILE = (8, 128)


def gradients_in_rows(graph: OpGraph, mesh: Mesh) -> frozenset[int]:
    """The matrices that operations of the top block make for the update, or to be added up for it; none where the
    devices are no TPUs.
    """
    if mesh.devices.flat[0].platform != "tpu":
        return frozenset()
    readers = (op for op in graph.block.ops if op.role is Role.UPDATE or op.kind is OpKind.ACCUMULATE)
    read = {v for op in readers for v in op.inputs if isinstance(v, int)}
    return frozenset(
        v
        for op in graph.block.ops
        if op.role is Role.BACKWARD and op.kind is OpKind.EQUATION
        for v in op.outputs
        if v in read and len(graph.values[v].shape) >= len(_TILE)
    )


def in_rows(array: Any, layout: Layout, mesh: Mesh) -> Any:
    """An array on the devices, each part of it laid out in memory row by row.

    Said on each device's part: a partitioner gathers what it does not know.
    """
    return on_parts(jax_compat.in_rows, mesh, [layout], layout)(array)


def in_whole_tiles(array: Any, layout: Layout, mesh: Mesh) -> Any:
    """The same, where each device's part fills whole tiles of a TPU; other arrays as they are."""
    sizes = [functools.reduce(lambda n, a: n * mesh.devices.shape[a], axes, 1) for axes in layout.dims]
    shape = array.shape[len(array.shape) - len(sizes) :]
    part = [n // split for n, split in zip(shape, sizes, strict=True)]
    fills = all(n % tile == 0 for n, tile in zip(part[-len(_TILE) :], _TILE, strict=True))
    return in_rows(array, layout, mesh) if fills else array


# Runs an operation that is a program for one device on each device's part: a kernel, or an island.


def run_on_parts(eqn: Any, reads: Sequence[Layout | None], results: Sequence[Layout], mesh: Mesh, operands: Any) -> Any:
    """The results of an equation whose operands lie as `reads` says (None: whole), as `results` says."""
    layouts = [at or replicated(len(v.aval.shape)) for at, v in zip(reads, eqn.invars, strict=True)]
    if is_custom_partition(eqn):  # its own function is asked how, by the partitioner
        return jax_compat.bind(eqn, operands)
    if is_island(eqn):
        return _run_island(eqn, layouts, results, mesh, operands)

    logical = LogicalMesh(axis_sizes=tuple(mesh.shape.values()))

    def local(*parts: Any) -> tuple[Any, ...]:
        made = _on_part(eqn, layouts, results, mesh, logical, parts)
        return tuple(a[None] if at.partial else a for a, at in zip(made, results, strict=True))

    return on_parts(local, mesh, layouts, results)(*operands)


def _on_part(
    eqn: Any, reads: Sequence[Layout], results: Sequence[Layout], mesh: Mesh, logical: LogicalMesh, parts: Sequence[Any]
) -> Sequence[Any]:
    """What one device makes of its parts of the operands."""
    if is_kernel(eqn):
        function = eqn.params["function"]
        if function.exchanged is None:
            return tuple(function(*parts))
        array, dim = function.exchanged
        axes = (*reads, *results)[array].dims[dim]
        names, platform = tuple(mesh.axis_names[a] for a in axes), mesh.devices.flat[0].platform
        others = tuple(name for name in mesh.axis_names if name not in names)
        devices = Devices(axes=names, count=logical.size(axes), platform=platform, others=others) if names else None
        return tuple(function.function(*parts, devices=devices))
    if is_opaque(eqn):
        shapes = [
            [n // logical.size(axes) for n, axes in zip(v.aval.shape, at.dims, strict=True)]
            for v, at in zip(eqn.outvars, results, strict=True)
        ]
        return run_opaque(eqn, shapes, parts)
    if is_cudnn_attention(eqn):
        return run_cudnn(eqn, parts)
    if is_scaled_product(eqn):
        return run_scaled(eqn, parts)
    if is_grouped_product(eqn):
        rows, groups = grouped_places(eqn)
        at = (*reads, *results)
        return product_on_part(eqn, parts, *(_part(at[i].dims[d], mesh, logical) for i, d in (rows, groups)))
    return jax_compat.bind(eqn, parts)


def _part(axes: Sequence[int], mesh: Mesh, logical: LogicalMesh) -> Part:
    """Which part of a dimension that is split over these axes the device that asks has."""
    names = tuple(mesh.axis_names[a] for a in axes)
    return (jax.lax.axis_index(names), logical.size(axes)) if names else WHOLE


def _run_island(eqn: Any, reads: Sequence[Layout], results: Sequence[Layout], mesh: Mesh, operands: Any) -> Any:
    """An island under the plan's devices, as a mesh with the island's names for the axes that stand for its own."""
    island = island_of(eqn)
    logical = LogicalMesh(axis_sizes=tuple(mesh.shape.values()))
    mapped = mesh_axes(island, (*reads, *results), logical)
    assert mapped is not None, "the strategy was admitted"
    names: dict[tuple[int, ...], str] = {axes: name for name, axes in mapped.items()}
    taken = {a for axes in names for a in axes}
    others = {(a,): f"_{name}" for a, name in enumerate(mesh.axis_names) if a not in taken}
    in_order = sorted([*names.items(), *others.items()])
    sizes = [logical.size(axes) for axes, _ in in_order]
    renamed = Mesh(mesh.devices.reshape(sizes), [name for _, name in in_order])

    def specs(of: Sequence[Spec]) -> tuple[PartitionSpec, ...]:
        return tuple(PartitionSpec(*(tuple(x for x in names if x in mapped) for names in spec)) for spec in of)

    run = jax.shard_map(
        lambda *parts: tuple(run_parts(eqn, island, mapped, parts)),
        mesh=renamed, in_specs=specs(island.operands), out_specs=specs(island.results), check_vma=False,
    )  # fmt: skip
    return run(*operands)


# Unevenly split arrays, filled up with zeros where a program takes equal parts only (`shard_map`, gathers).


def filled_up(array: Any, at: Layout, mesh: Mesh, parts: Layout | None = None) -> Any:
    """An array with zeros behind those dimensions that the mesh axes of its layout, or of `parts`, do not divide.

    A dimension that is split unevenly has room for them in its last parts: nothing is sent.
    """
    sizes = array.shape[1:] if at.partial else array.shape
    by = [math.prod(mesh.shape[mesh.axis_names[a]] for a in axes) for axes in (parts or at).dims]
    more = [(0, -n % k) for n, k in zip(sizes, by, strict=True)]
    if not any(m for _, m in more):
        return array
    filled = jnp.pad(array, [(0, 0), *more] if at.partial else more)
    return jax.lax.with_sharding_constraint(filled, named_sharding(at, mesh))


def cut_to(array: Any, shape: Sequence[int]) -> Any:
    """The first part of an array, without what was filled up in its operands."""
    return array if array.shape == tuple(shape) else jax.lax.slice(array, [0] * array.ndim, shape)


def params_of_filled(eqn: Any, operands: Sequence[Any], filled: Sequence[Any]) -> dict[str, Any]:
    """The parameters that an equation has otherwise on operands that are filled up.

    Zeros add nothing, and where they make rows of their own these are cut off. Of indices they repeat the first one.
    """
    shapes = [(before.shape, after.shape) for before, after in zip(operands, filled, strict=True)]
    if all(before == after for before, after in shapes):
        return {}
    if eqn.primitive.name in SCATTERS:
        return {"unique_indices": False, "indices_are_sorted": False}
    if eqn.primitive.name == "gather":  # a whole row stays one
        rows = zip(eqn.params["slice_sizes"], *shapes[0], strict=True)
        return {"slice_sizes": tuple(after if size == before else size for size, before, after in rows)}
    return {}


# Dynamic slices with clamped starts: XLA drops the clamp of a slice that a plan splits.
#
# A start that is out of range counts as the nearest start in range. A plan that splits the result slices it once more,
# and XLA's algebraic simplifier merges the two slices without the clamp of the first (openxla/xla, issue 49121): it
# reads the wrong rows. With starts in range both programs are equal.


def with_starts_in_range(eqn: Any, operands: Sequence[Any]) -> list[Any]:
    """The operands of an equation, with clamped starts where it slices an array or updates a slice of one."""
    if eqn is None or eqn.primitive.name not in ("dynamic_slice", "dynamic_update_slice"):
        return list(operands)
    is_update = eqn.primitive.name == "dynamic_update_slice"
    sizes = eqn.invars[1].aval.shape if is_update else eqn.params["slice_sizes"]
    arrays, starts = (list(operands[:2]), operands[2:]) if is_update else (list(operands[:1]), operands[1:])
    whole = eqn.invars[0].aval.shape
    return arrays + [_clamped(start, n - size) for start, n, size in zip(starts, whole, sizes, strict=True)]


def _clamped(start: Any, largest: int) -> jax.Array:
    dtype = jax.numpy.result_type(start)
    # A type too small for the largest start cannot hold one beyond it either.
    largest = min(largest, int(jax.numpy.iinfo(dtype).max))
    return jax.lax.clamp(np.asarray(0, dtype), jax.numpy.asarray(start, dtype), np.asarray(largest, dtype))


# Runs what XLA's partitioner gathers along other dimensions on each device's part: Fourier transforms, the largest of
# rows.


def largest_of_rows(instruction: Compute, operands: Sequence[Any], mesh: Mesh) -> list[Any]:
    """Runs a `top_k` on each device's own rows; unequal parts are left to the partitioner."""
    (place,), eqn = instruction.reads, instruction.op.eqn
    logical = LogicalMesh(axis_sizes=tuple(mesh.shape.values()))
    if place is None or not place[0].fits(eqn.invars[0].aval.shape, logical):
        return jax_compat.bind(eqn, operands)
    run = on_parts(lambda part: tuple(jax_compat.bind(eqn, [part])), mesh, [place[0]], instruction.results)
    return list(run(*operands))


def fourier_transform(instruction: Compute, operands: Sequence[Any], mesh: Mesh) -> list[Any]:
    """Runs an fft on each device's part, row by row; it takes any number of dimensions before those it transforms.

    XLA's partitioner gathers what it transforms, and its CPU compiler gives it layouts that its fft refuses.
    """
    (place,), (result,) = instruction.reads, instruction.results
    assert place is not None, "an array is transformed, no number"

    def local(part: Any) -> Any:
        (out,) = jax_compat.bind(instruction.op.eqn, [jax_compat.in_rows(part)])
        return jax_compat.in_rows(out)

    return [on_parts(local, mesh, [place[0]], result)(*operands)]


# Names for profilers: the operations of a compiled program, and its collectives, bear the user's modules.


_NUMBER = re.compile(r"/#(\d+)/")


def number_in(op_name: str) -> int | None:
    """The number of the operation of a graph whose emission gave this name to what XLA makes of it, if it is in it."""
    found = _NUMBER.findall(op_name)
    return int(found[-1]) if found else None


def named(instruction: Instruction, is_numbered: bool) -> contextlib.AbstractContextManager[None]:
    """The name scope of an instruction's module, as `jax.grad` names it; none around a loop, whose body has its own."""
    if isinstance(instruction, Move):
        stack = stack_of_module(instruction.module, instruction.role)
    elif isinstance(instruction, HostCopy):
        stack = instruction.module
    elif isinstance(instruction, Loop):
        return contextlib.nullcontext()
    else:
        stack = stack_of_module(instruction.op.place, instruction.op.role)
        stack += f"/#{instruction.op.id}" if is_numbered else ""
    return jax.named_scope(stack) if stack else contextlib.nullcontext()


# Partial values as arrays, with one leading dimension over the devices that hold summands: made, and reduced.


def as_sum(array: Any, before: Layout, after: Layout, mesh: Mesh) -> Any:
    """A whole value, or one that is partial over fewer axes, as a sum: the first device along the new axes holds it,
    the others hold zeros.
    """
    sizes = [mesh.shape[mesh.axis_names[a]] for a in before.partial]
    rest = array.shape[1:] if before.partial else array.shape
    array = array.reshape((*sizes, *rest))
    for position, axis in enumerate(after.partial):
        if axis not in before.partial:
            n = mesh.shape[mesh.axis_names[axis]]
            array = jnp.expand_dims(array, position)
            first = jax.lax.broadcasted_iota(
                jnp.int32, (*array.shape[:position], n, *array.shape[position + 1 :]), position
            )
            array = jnp.where(first == 0, array, jnp.zeros((), array.dtype))
    return jax.lax.with_sharding_constraint(array.reshape((-1, *rest)), named_sharding(after, mesh))


def reduced(array: Any, step: ReshardStep, mesh: Mesh) -> Any:
    """The sum of a partial value, on all devices or scattered along the dimension that the step splits."""
    names = tuple(mesh.axis_names[a] for a in step.axes)
    grown = [d for d, (b, a) in enumerate(zip(step.before.dims, step.after.dims, strict=True)) if a != b]

    def local(part: Any) -> Any:
        summand = part[0]
        if step.kind is StepKind.ALL_REDUCE:
            out = jax.lax.psum(summand, names)
        else:
            (d,) = grown
            out = jax.lax.psum_scatter(summand, names, scatter_dimension=d, tiled=True)
        return out[None] if step.after.partial else out

    summed = on_parts(local, mesh, [step.before], step.after)(filled_up(array, step.before, mesh, step.after))
    summed = cut_to(summed, (*summed.shape[: len(step.after.partial) and 1], *array.shape[1:]))
    return jax.lax.with_sharding_constraint(summed, named_sharding(step.after, mesh))


def exchanged(array: Any, step: ReshardStep, mesh: Mesh) -> Any:
    """A value whose mesh axes go from one dimension to another.

    Said on each device's part: where it has just gathered the array over other axes, the partitioner of jaxlib 0.12
    gathers it over these too. Parts of unequal sizes are left to it.
    """
    if filled_up(array, step.before, mesh) is not array or filled_up(array, step.after, mesh) is not array:
        return array
    dims = list(zip(step.before.dims, step.after.dims, strict=True))
    (shrunk,) = [d for d, (before, after) in enumerate(dims) if len(before) > len(after)]
    (grown,) = [d for d, (before, after) in enumerate(dims) if len(before) < len(after)]
    before, after = dims[shrunk]
    names, first = tuple(mesh.axis_names[a] for a in before[len(after) :]), len(step.before.partial) and 1
    local = functools.partial(
        jax.lax.all_to_all, axis_name=names, split_axis=first + grown, concat_axis=first + shrunk, tiled=True
    )
    return on_parts(local, mesh, [step.before], step.after)(array)


# Rows looked up in a table whose rows are split: each device finds those that it has, and zeros in place of others.
#
# So each has a summand of the result, which may be reduced in parts, over positions say. The partitioner does the same
# and reduces at once.


def local_rows(eqn: Any, table: Any, indices: Any, names: Sequence[str]) -> Any:
    """A device's summand of a gather. `table` are its rows; `names` the mesh axes that split them, major first."""
    numbers, mode = eqn.params["dimension_numbers"], eqn.params["mode"]
    dim, out = looked_up_dim(eqn), eqn.outvars[0].aval
    assert dim is not None, "another gather is no lookup in a table"
    size, on_each = eqn.invars[0].aval.shape[dim], table.shape[dim]
    # As int32, unsigned indices of 2^31 and more are negative: on CPUs plain jax.jit takes them for that too.
    at = indices.astype(jnp.int64 if indices.dtype.itemsize > jnp.dtype(jnp.int32).itemsize else jnp.int32)
    if mode == jax.lax.GatherScatterMode.CLIP:
        at = jnp.clip(at, 0, size - 1)
    here = at - jax.lax.axis_index(tuple(names)) * on_each

    def as_result_mask(mask: Any) -> Any:
        """A mask of indices, on the dimensions of the result that the indices have."""
        rest = iter(mask.shape[:-1])
        return mask.reshape([1 if d in numbers.offset_dims else next(rest) for d in range(len(out.shape))])

    rows = jax.lax.gather(
        table, jnp.clip(here, 0, on_each - 1), numbers, eqn.params["slice_sizes"], mode=jax.lax.GatherScatterMode.CLIP
    )
    rows = jnp.where(as_result_mask((here >= 0) & (here < on_each)), rows, jnp.zeros((), rows.dtype))
    if mode == jax.lax.GatherScatterMode.FILL_OR_DROP:
        given = eqn.params["fill_value"]
        fill = jnp.asarray(jnp.nan if given is None else given, rows.dtype)
        is_out_of_range = ((at < 0) | (at >= size)) & (jax.lax.axis_index(tuple(names)) == 0)
        rows = jnp.where(as_result_mask(is_out_of_range), fill, rows)
    return rows


Environment = dict[tuple[int, Place], Any]


class Emitter:
    """Evaluates lowered blocks on tracers.

    `groups` is the number of runs of neighbouring examples that a batch is cut into before it is cut into micro-batches
    (`tasks.groups_of_examples`). `is_numbered`: names for profilers bear the numbers of operations (`number_in`).
    `failures` are what callbacks raised in a program and nobody was told yet.
    """

    def __init__(self, graph: OpGraph, mesh: Mesh, groups: int = 1, *, is_numbered: bool = False) -> None:
        self.graph, self.mesh, self.groups, self.is_numbered = graph, mesh, groups, is_numbered
        self.failures: list[BaseException] = []
        self.gradients = gradients_in_rows(graph, mesh)

    def __call__(self, lowered: LoweredBlock, args: Sequence[Any]) -> list[Any]:
        """The outputs of the step for its inputs (constants first), both as global arrays."""
        return self.block(lowered, args, {})

    def block(self, lowered: LoweredBlock, args: Sequence[Any], outer: Environment) -> list[Any]:
        env = dict(outer)
        for value, place, array in zip(lowered.block.inputs, lowered.entries(), args, strict=True):
            env[value, place] = array if place[1] == HOST else self.pin(array, place[0])
        for instruction in lowered.instructions:
            self.run(instruction, env)
        return [
            self.literal(atom) if place is None else env[self.key(atom, place)]
            for atom, place in zip(lowered.block.outputs, lowered.outputs, strict=True)
        ]

    def key(self, atom: Any, place: Place) -> tuple[int, Place]:
        assert isinstance(atom, int), "literals have no place"
        return atom, place

    def literal(self, atom: Any) -> Any:
        assert isinstance(atom, Constant), "what has no place is a literal"
        return atom.literal.val

    def pin(self, array: Any, layout: Layout) -> Any:
        return jax.lax.with_sharding_constraint(array, named_sharding(layout, self.mesh))

    def run(self, instruction: Instruction, env: Environment) -> None:
        with named(instruction, self.is_numbered):
            self.evaluate(instruction, env)

    def evaluate(self, instruction: Instruction, env: Environment) -> None:
        if isinstance(instruction, Move):
            self.move(instruction, env)
        elif isinstance(instruction, Compute):
            self.compute(instruction, env)
        elif isinstance(instruction, Pass):
            values = [env[self.key(a, p)] for a, p in zip(instruction.op.inputs, instruction.reads, strict=True)]
            through = jax.lax.optimization_barrier(values)
            for value, place, array in zip(instruction.op.outputs, instruction.reads, through, strict=True):
                env[value, (place[0], UNREDUCED)] = self.pin(array, place[0])
        elif isinstance(instruction, Loop):
            self.loop(instruction, env)
        elif isinstance(instruction, HostCopy):
            self.host_copy(instruction, env)
        elif not isinstance(instruction, Leave):
            self.crossing(instruction, env)

    # Micro-batches

    def crossing(self, instruction: Split | Accumulate | Stack, env: Environment) -> None:
        """A value enters or leaves the loop over micro-batches. Of a split or stacked one there is a list of arrays."""
        (atom,), (target,) = instruction.op.inputs, instruction.op.outputs
        value = self.literal(atom) if instruction.read is None else env[self.key(atom, instruction.read)]
        if isinstance(instruction, Accumulate):
            key = target, instruction.sum_
            env[key] = self.pin(env[key] + value, instruction.sum_[0])
        elif isinstance(instruction, Split):
            env[target, (instruction.result, UNREDUCED)] = self.split(value, instruction)
        else:
            env[target, (instruction.result, UNREDUCED)] = self.stack(value, instruction)

    def split(self, array: Any, instruction: Split) -> list[Any]:
        """Each micro-batch takes an equal share of each group of neighbouring examples."""
        m, dim = self.graph.num_microbatches, instruction.op.dim
        before, size, after = array.shape[:dim], array.shape[dim], array.shape[dim + 1 :]
        parts = array.reshape((*before, self.groups, m, size // (self.groups * m), *after))
        taken = (jax.lax.index_in_dim(parts, k, dim + 1, keepdims=False) for k in range(m))
        return [self.pin(part.reshape((*before, size // m, *after)), instruction.result) for part in taken]

    def stack(self, arrays: Sequence[Any], instruction: Stack) -> Any:
        """The inverse of `split`."""
        m, dim = self.graph.num_microbatches, instruction.op.dim
        shape = arrays[0].shape
        before, size, after = shape[:dim], shape[dim], shape[dim + 1 :]
        parts = [a.reshape((*before, self.groups, size // self.groups, *after)) for a in arrays]
        joined = jnp.stack(parts, dim + 1).reshape((*before, m * size, *after))
        return self.pin(joined, instruction.result)

    def operands(self, instruction: Compute | Loop, env: Environment) -> list[Any]:
        return [
            self.literal(atom) if place is None else env[self.key(atom, place)]
            for atom, place in zip(instruction.op.inputs, instruction.reads, strict=True)
        ]

    # Computing

    def compute(self, instruction: Compute, env: Environment) -> None:
        if instruction.pieces is not None:
            return self.in_pieces(instruction, instruction.pieces, env)
        op = instruction.op
        operands = with_starts_in_range(op.eqn, self.operands(instruction, env))
        partial_in = [place is not None and bool(place[0].partial) for place in instruction.reads]
        if op.primitive == "fft":
            outs = fourier_transform(instruction, operands, self.mesh)
        elif op.primitive == "top_k":
            outs = largest_of_rows(instruction, operands, self.mesh)
        elif any(partial_in):
            axes = [0 if p else None for p in partial_in]
            outs = jax.vmap(lambda *xs: jax_compat.bind(op.eqn, xs), in_axes=axes, out_axes=0)(*operands)
        elif instruction.strategy is not None and is_grouped(op.eqn):
            outs = self.grouped_convolution(instruction, operands)
        elif runs_locally(op.eqn):
            reads = [place and place[0] for place in instruction.reads]
            outs = run_on_parts(op.eqn, reads, instruction.results, self.mesh, operands)
        elif instruction.written_out:
            outs = self.sum_by_hand(instruction, operands)
        elif op.primitive in ring.PRIMITIVES:
            outs = self.attention(instruction, operands)
        elif is_callback(op.eqn):
            outs = jax_compat.call_back(guarded(op.eqn, self.failures), operands)
        elif op.primitive in IN_EQUAL_PARTS:
            outs = self.in_equal_parts(instruction, operands)
        else:
            outs = jax_compat.bind(op.eqn, operands)
        for value, place, array in zip(op.outputs, instruction.places, outs, strict=True):
            if value in self.gradients:
                array = in_whole_tiles(array, place[0], self.mesh)
            env[value, place] = self.pin(array, place[0])

    def in_equal_parts(self, instruction: Compute, operands: list[Any]) -> list[Any]:
        """An operation of which XLA's partitioner takes equal parts only: of others it ends the process, or sends them
        where they are not needed.
        """
        eqn, strategy = instruction.op.eqn, instruction.strategy
        if strategy is None:
            return jax_compat.bind(eqn, operands)
        filled = [filled_up(a, at, self.mesh) for a, at in zip(operands, strategy.operands, strict=True)]
        (out,) = jax_compat.bind(eqn, filled, **params_of_filled(eqn, operands, filled))
        (result,), (of_all,) = instruction.results, eqn.outvars
        return [out if out.shape == of_all.aval.shape else cut_to(self.pin(out, result), of_all.aval.shape)]

    def in_pieces(self, instruction: Compute, pieces: Pieces, env: Environment) -> None:
        """A product that gathers an operand, of which there are the devices' own parts, or scatters its result."""
        operands, (key,) = self.operands(instruction, env), instruction.keys_made
        if pieces.operand is None:
            env[key] = self.pin(scattered_product(instruction, operands, self.mesh), pieces.step.after)
            return
        out, whole = gathered_product(instruction, operands, self.mesh)
        env[key] = self.pin(out, key[1][0])
        if whole is not None:
            atom, place = instruction.op.inputs[pieces.operand], instruction.reads[pieces.operand]
            (read,) = [k for k in instruction.keys_read if k == (atom, place)]
            env[read] = self.pin(whole, pieces.step.after)

    def sum_by_hand(self, instruction: Compute, operands: list[Any]) -> list[Any]:
        """Runs a summing operation on each device's part: the result is that device's summand.

        Only the summed axes are manual; along the others the partitioner splits the work as the operands lie.
        """
        assert instruction.strategy is not None, "a replicated operation has nothing to sum"
        op, (result,) = instruction.op, instruction.results
        axes = set(result.partial)
        names = frozenset(self.mesh.axis_names[a] for a in axes)
        touched = [any(axes.intersection(on) for on in layout.dims) for layout in instruction.strategy.operands]
        in_specs, uneven, places = [], [], []
        by_rows = [self.mesh.axis_names[a] for on in instruction.strategy.operands[0].dims for a in on if a in axes]
        # What the sum does not run over (the array that a scatter adds to) is itself a summand, of one device only.
        whole = [not t and op.primitive == "scatter-add" and i == 0 for i, t in enumerate(touched)]
        for array, layout, masked in zip(operands, instruction.strategy.operands, whole, strict=True):
            kept = Layout(tuple(tuple(a for a in on if a in axes) for on in layout.dims))
            if masked:
                array = as_sum(array, layout, Layout(layout.dims, result.partial), self.mesh)
                layout, kept = Layout(layout.dims, result.partial), Layout(kept.dims, result.partial)
            in_specs.append(partition_spec(kept, self.mesh.axis_names))
            places.append(layout)
            uneven.append(array)
        args = [filled_up(array, at, self.mesh) for array, at in zip(uneven, places, strict=True)]
        changed = params_of_filled(op.eqn, uneven, args)
        if not any(array.size for array in args):  # XLA's partitioner fails where all operands are empty
            (of_each,), parts = op.eqn.outvars, math.prod(self.mesh.shape[name] for name in names)
            return [jnp.zeros((parts, *of_each.aval.shape), of_each.aval.dtype)]

        def local(*parts: Any) -> Any:
            parts = tuple(p[0] if masked else p for p, masked in zip(parts, whole, strict=True))
            if op.primitive == "gather":
                return local_rows(op.eqn, parts[0], parts[1], by_rows)[None]
            (out,) = jax_compat.bind(op.eqn, parts, **changed)
            return out[None]

        out_spec = partition_spec(Layout((), result.partial), self.mesh.axis_names)
        run = jax.shard_map(
            local, mesh=self.mesh, in_specs=tuple(in_specs), out_specs=out_spec, axis_names=names, check_vma=False
        )
        summands = run(*args)
        return [cut_to(summands, (len(summands), *op.eqn.outvars[0].aval.shape))]

    def grouped_convolution(self, instruction: Compute, operands: list[Any]) -> list[Any]:
        """Runs a convolution in groups on each device's part; what it sums over devices is reduced, or left partial."""
        eqn, strategy, (result,) = instruction.op.eqn, instruction.strategy, instruction.results
        assert strategy is not None, "a replicated operation is not split"
        names = self.mesh.axis_names
        examples_dim = eqn.params["dimension_numbers"].out_spec[0]
        split = math.prod(self.mesh.shape[names[a]] for a in result.dims[examples_dim])
        examples = eqn.outvars[0].aval.shape[examples_dim] // split

        def local(*parts: Any) -> Any:
            out = convolved_part(eqn, parts, examples)
            if instruction.reduced:
                out = jax.lax.psum(out, tuple(names[a] for a in instruction.reduced))
            return out[None] if result.partial else out

        return [on_parts(local, self.mesh, strategy.operands, result)(*operands)]

    def attention(self, instruction: Compute, operands: list[Any]) -> list[Any]:
        """Runs attention on each device's part; where positions are split, keys and values go round."""
        op = instruction.op
        strategy = instruction.strategy or replicated_strategy(
            *(([v.aval.shape for v in of]) for of in (op.eqn.invars, op.eqn.outvars))
        )
        form, gradients = op.eqn.params["form"], op.eqn.params["gradients"]
        names, axes = letters(form, gradients)[0], {}
        for dims, layout in zip(names[:3], strategy.operands, strict=False):
            for letter, on in zip(dims, layout.dims, strict=True):
                axes[letter] = tuple(self.mesh.axis_names[a] for a in on)
        places = ring.Places(axes=axes, sizes=dict(self.mesh.shape))
        library = library_on(self.mesh.devices.flat[0])

        def local(*parts: Any) -> tuple[Any, ...]:
            return execute.run(form, gradients, places, parts, library)

        return list(on_parts(local, self.mesh, strategy.operands, strategy.results)(*operands))

    # The memory of the host

    def host_copy(self, copy: HostCopy, env: Environment) -> None:
        array, (layout, _) = env[copy.value, copy.source], copy.target
        waited_for = [env[key] for key in copy.behind if key in env]
        if waited_for:
            array, *_ = jax.lax.optimization_barrier((array, *waited_for))
        # The memory space alone: kinds of memories are known of devices that are here only.
        if copy.to_host:
            array = jax.device_put(in_rows(array, layout, self.mesh), jax.memory.Space.Host)
        else:
            # Else a compiler may choose another order for the update, and have the host's copy brought, transposed, and
            # sent back before it is read.
            array = in_rows(jax.device_put(array, jax.memory.Space.Device), layout, self.mesh)
        env[copy.value, copy.target] = array

    # Resharding

    def move(self, move: Move, env: Environment) -> None:
        array = env[move.value, move.source]
        if move.apart:
            array = jax.lax.optimization_barrier(array)
        # A gather in pieces begins with each device's own part; of a sum the product has scattered it.
        for step in move.steps if not move.in_pieces else ():
            array = self.step(array, step)
        env[move.value, move.target] = array

    def step(self, array: Any, step: ReshardStep) -> Any:
        if step.kind.reduces:
            return reduced(array, step, self.mesh)
        if step.kind is StepKind.MASK:
            return as_sum(array, step.before, step.after, self.mesh)
        if step.kind is StepKind.ALL_TO_ALL:
            array = exchanged(array, step, self.mesh)
        return self.pin(array, step.after)

    # Loops

    def loop(self, instruction: Loop, env: Environment) -> None:
        op, operands = instruction.op, self.operands(instruction, env)
        runs = [lambda args, lowered=lowered: self.block(lowered, args, env) for lowered in instruction.blocks]
        with jax_compat.context_of(op.eqn):  # such as metadata for XLA
            if op.kind is OpKind.SCAN:
                outs = self.scan(instruction, operands, runs[0])
            elif op.kind is OpKind.WHILE:
                k, n = op.num_condition_consts, op.num_consts
                avals = [v.aval for v in jax_compat.open_jaxpr(op.eqn.params["body_jaxpr"]).invars[n - k :]]
                outs = loops.while_loop(runs[0], runs[1], operands, (k, n - k), loops.like(avals))
            else:
                typed = loops.like([v.aval for v in op.eqn.outvars])
                outs = loops.cond(runs, operands, lambda made: list(map(self.pin, typed(made), instruction.results)))
        for key, array in zip(instruction.keys_made, outs, strict=True):
            env[key] = array if key[1][1] == HOST else self.pin(array, key[1][0])

    def scan(self, instruction: Loop, operands: list[Any], run: Any) -> Sequence[Any]:
        op = instruction.op
        k, c = op.num_consts, op.num_carry
        avals = [v.aval for v in jax_compat.open_jaxpr(op.eqn.params["jaxpr"]).invars[k : k + c]]
        operands[k : k + c] = self.first_carry(instruction, operands[k : k + c], avals)
        # Of turns in a row XLA makes room at once for what their own loops write, where a loop has room for one turn's.
        holds_loops = any(isinstance(inner, Loop) for inner in instruction.blocks[0].instructions)
        unroll = 1 if holds_loops else op.eqn.params["unroll"]
        how = {"length": op.trips, "reverse": op.eqn.params["reverse"], "unroll": unroll}
        outs = loops.scan(run, operands, (k, c), loops.like(avals), **how)
        # Of partial slices the summands of a device lie together, in front of the iterations.
        partial = [bool(layout.partial) for layout in instruction.results[c:]]
        return [*outs[:c], *(jnp.moveaxis(a, 1, 0) if p else a for a, p in zip(outs[c:], partial, strict=True))]

    def first_carry(self, instruction: Loop, arrays: Sequence[Any], avals: Sequence[Any]) -> list[Any]:
        """What a scan carries into its first iteration. Where its body adds partial sums to a literal, one device holds
        the literal and the others hold zeros.
        """
        k, started = instruction.op.num_consts, list(arrays)
        entries = zip(avals, instruction.reads[k:], instruction.blocks[0].entries()[k:], strict=False)
        for i, (aval, place, (layout, _)) in enumerate(entries):
            if place is None and layout.partial:
                whole = jax_compat.with_type(arrays[i], aval)
                started[i] = as_sum(whole, replicated(len(aval.shape)), layout, self.mesh)
        return started
