"""Notes of a plan: batches that are whole or split unevenly, shard_map regions, the memory of the host, recomputation,
and arrays that a recipe left whole.
"""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from autopar.common import jax_compat
from autopar.common.text import text_of_bytes, text_of_part
from autopar.cost import peak_memory
from autopar.cost.peak_memory import MemoryProgram
from autopar.hardware.kinds import Platform
from autopar.ir.binding import Binding
from autopar.ir.constraints import Constraints
from autopar.ir.graph import Block, Dimension, Op, OpGraph, OpKind, Purpose, Role, Value, read_by
from autopar.ir.layout import Layout, local_bytes, replicated
from autopar.ir.primitives import GROUPED_PRODUCT, MATRIX_PRODUCTS, RAGGED_PRODUCT
from autopar.ir.traced_step import TracedStep
from autopar.lowering.instructions import LoweredBlock, host_copies_in
from autopar.lowering.lower import ShardingPlan
from autopar.ops.kernels.islands import is_island, island_of
from autopar.ops.kernels.local import dense_work_of
from autopar.ops.kernels.operation import NAME as KERNEL
from autopar.passes.example_axis import loops_over_first
from autopar.passes.saved_arrays import offloaded_on
from autopar.passes.smaller_step import example_leaves
from autopar.passes.split_scan import SplitStep
from autopar.plan import summary
from autopar.plan.schema import PlanRecord
from autopar.search.inter_op.staged import PlannedStage
from autopar.search.intra_op.spmd_candidate import SpmdCandidate

# Notes on a batch that is not split, though devices then do the same work: the reason, and what to do.


def batch_notes(traced: TracedStep, record: PlanRecord) -> Iterator[str]:
    """A note where several devices do the same work, and the examples cannot be split over them."""
    alike, wanted = max(summary.devices_alike(record, stage) for stage in range(summary.num_stages(record)))
    leaves = [i for i in sorted(traced.batch) if traced.in_avals[i].shape]
    if traced.uneven_over and record.pipeline is None and summary.splits_batch(record):
        leaf, dim = next(iter(example_leaves(traced).items()))
        examples = traced.in_avals[leaf].shape[dim]
        most, more = -(-examples // traced.uneven_over), -(-examples // traced.uneven_over) * traced.uneven_over
        yield f"{examples} examples are split unevenly: at most {most} on a device, of which {more} take as long"
    by_loop = loops_over_first(traced) and not any(traced.example_dims.values())
    is_whole = by_loop and summary.stage_mesh(record, 0).num_devices > 1 and not summary.splits_batch(record)
    if (alike == 1 and not is_whole) or not leaves or not all(traced.in_avals[i].size for i in leaves):
        return
    if by_loop or not any(traced.example_dim(i) is not None for i in leaves):
        reason = "a loop goes over its first dimension" if by_loop else "its leaves are said to hold no examples"
        same = f", and {alike} devices do the same work" if alike > 1 else ""
        dimension = "name the dimension that counts examples: parallelize(batch_axis=...)"
        yield f"{summary.BATCH_WHOLE}: {reason}{same}; {dimension}"
        return
    leaf, dim = next(iter(example_leaves(traced).items()))
    parts = 1 if record.pipeline is None else record.pipeline.num_microbatches
    each = traced.in_avals[leaf].shape[dim] // parts
    if each % wanted:
        of_each = f" of each of {parts} micro-batches" if parts > 1 else ""
        fewer, more = each // wanted * wanted * parts, -(-each // wanted) * wanted * parts
        yield (
            f"{summary.BATCH_WHOLE} over {wanted} devices, since {wanted} does not divide {each} examples{of_each}; "
            f"{alike} devices do the same work. Use a batch of {f'{fewer} or {more}' if fewer else more}, to which "
            "examples may be added that have weight zero in the loss"
        )


# Notes on the islands (`shard_map`) that a plan does not split over all of their axes.


def island_notes(graph: OpGraph, sharding: ShardingPlan) -> tuple[str, ...]:
    """One for each line of the step's code."""
    notes: dict[str, None] = {}
    for op in graph.ops():
        if not is_island(op.eqn):
            continue
        island, strategy = island_of(op.eqn), sharding.strategy.get(op.id)
        split = 1 if strategy is None else strategy.split
        if split < island.shards and sharding.mesh.num_devices > 1:
            sizes = ", ".join(f"{name} {n}" for name, n in island.axes)
            notes.setdefault(
                f"shard_map at {jax_compat.source_line(op.eqn)} ({sizes}) is split among {split} of its {island.shards}"
                " devices; each runs the other parts too"
            )
    return tuple(notes)


# Notes on what the step's code sends to the memory of the host and the plan keeps on the devices.

_BRANCHES = frozenset({OpKind.COND, OpKind.WHILE})


def offload_notes(programs: Iterable[tuple[OpGraph, LoweredBlock]], platform: Platform) -> tuple[str, ...]:
    """One for each line of the step's code, with the reason."""
    notes: dict[str, None] = {}
    for graph, lowered in programs:
        gone = {copy.value for copy in host_copies_in(lowered) if copy.to_host}
        for op, kinds in _within(graph.block, frozenset()):
            if jax_compat.is_in_host_memory(op.eqn) and gone.isdisjoint(op.outputs):
                line = jax_compat.source_line(op.eqn)
                at = f" at {line}" if line else ""
                why = _why(graph, op, kinds, platform)
                notes.setdefault(f"what the code sends to the memory of the host{at} stays on the devices: {why}")
    return tuple(notes)


def _within(block: Block, kinds: frozenset[OpKind]) -> Iterator[tuple[Op, frozenset[OpKind]]]:
    """Each operation, and the kinds of those that it is inside of."""
    for op in block.ops:
        yield op, kinds
        for inner in op.blocks:
            yield from _within(inner, kinds | {op.kind})


def _why(graph: OpGraph, op: Op, kinds: frozenset[OpKind], platform: Platform) -> str:
    if kinds & _BRANCHES:
        return "a branch or a while loop makes it, and only what is made outside of these goes there"
    read = {v for other in graph.ops() if other.role is Role.BACKWARD for v in read_by(other)}
    if not kinds and (op.role is not Role.FORWARD or read.isdisjoint(op.outputs)):
        return "no backward pass reads it, and only what the forward pass makes for the backward pass goes there"
    if not kinds and offloaded_on(graph, platform).isdisjoint(op.outputs):
        return (
            "it belongs to layers that are written out, and in a program for TPU that holds both passes it would be "
            "back early; what a scan over layers stacks up does go there"
        )
    return "the plan leaves its sum over devices open there, or no backward pass reads what is stacked up of it"


# What the step would take without `jax.checkpoint`, by the costs of its plan: for those who have the memory.

# Of the step: less is within what costs are known. Of the memory: operations stand in the order of the step with
# `jax.checkpoint`, so that the peak without it is known to an eighth or so.
LEAST_SPARED, MOST_FILLED = 0.02, 0.8


def recomputation_notes(
    graph: OpGraph, best: SpmdCandidate, program: MemoryProgram, limit_bytes: int | None
) -> tuple[str, ...]:
    """That the step fits without `jax.checkpoint` in the layouts of the plan, and the seconds that this spares; nothing
    where it does not fit.

    Where nothing is recomputed in a loop, the peak is that of the same program with each value computed once. What a
    loop recomputes it would keep for all its trips, at most each value that other operations read.
    """
    if limit_bytes is None or not any(op.recomputes for op in graph.ops()):
        return ()
    spared_s, (kept_bytes, copies) = _recomputing_s(graph, best), _kept_in_loops(graph, best.sharding)
    compiler, about = dataclasses.replace(best.model.compiler, keeps_barriers=False), "about"
    peak_bytes = peak_memory.estimate(program, compiler).peak_bytes
    if kept_bytes:
        peak_bytes, about = peak_bytes + kept_bytes, "at most"
        # Each slice is written into the stack of all trips, read from it, and written as the value of its own trip.
        spared_s -= best.model.device.memory_s(3 * kept_bytes) + copies * best.model.device.small_kernel_s
    if spared_s <= LEAST_SPARED * best.step_time_s or peak_bytes > MOST_FILLED * limit_bytes:
        return ()
    part = text_of_part(spared_s / best.step_time_s)
    peak = f"peak {about} {text_of_bytes(peak_bytes)} of the {text_of_bytes(limit_bytes)} available"
    return (f"without jax.checkpoint the step would fit in the same layouts, {peak}, and take about {part} less time",)


def _recomputing_s(graph: OpGraph, best: SpmdCandidate) -> float:
    """Seconds of what is computed again, each operation as in the forward pass: what more it takes the second time, as
    it writes for the backward pass, the first one would.
    """
    first_s: dict[str, float] = collections.defaultdict(float)
    again_s: dict[str, float] = collections.defaultdict(float)
    for op in graph.ops():
        of = again_s if op.recomputes else first_s
        if op.recomputes or op.role is Role.FORWARD:
            of[op.key] += best.compute_s.get(op.id, 0.0)
    return sum(min(seconds, first_s[key]) for key, seconds in again_s.items())


def _kept_in_loops(graph: OpGraph, sharding: ShardingPlan) -> tuple[int, float]:
    """(bytes on one device, kernels that copy them) of what loops would keep rather than compute again: what others
    read of it, for all trips. A kernel writes each slice; one reads it where products do, others read the stack.
    """
    outside = {op.id for op in graph.block.ops}
    again = [op for op in graph.ops() if op.recomputes and op.id not in outside]
    read = {v for op in graph.ops() if not op.recomputes for v in read_by(op)} if again else set()
    products = [op for op in graph.ops() if not op.recomputes and op.primitive in MATRIX_PRODUCTS]
    of_products = {v for op in products for v in read_by(op)}
    kept = [(op.count, v) for op in again for v in op.outputs if v in read]
    kept_bytes = sum(int(count * _bytes_on_device(graph.values[v], sharding)) for count, v in kept)
    return kept_bytes, sum(count * (1 + (v in of_products)) for count, v in kept)


def _bytes_on_device(value: Value, sharding: ShardingPlan) -> int:
    layout = sharding.reduced.get(value.id)
    return value.nbytes if layout is None else local_bytes(value.shape, value.itemsize, layout, sharding.mesh)


# Arrays that a recipe left whole, or split where its source does not, and the dimension that prevented it.

# Of the arrays of a note so many are named; those of repeated layers are one.
NAMED = 4
_NUMBER = re.compile(r"\d+")
_PIECE = re.compile(r"\d+|\D+")
_WEIGHTS = (Purpose.MATRIX, Purpose.MATRIX_COPY)


def stack_notes(step: SplitStep) -> tuple[str, ...]:
    """A note on each scan over layers whose state lies on fewer stages than run it."""
    return tuple(
        f"the arrays of {stack.trips} layers of a scan lie in {stack.state_parts} equal "
        f"{'part, on one stage' if stack.state_parts == 1 else 'parts, on as many stages'}, since {len(stack.scopes)} "
        "stages do not divide them: the others are sent what they read of them once a step"
        for stack in step.stacks
        if stack.state_parts
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """A step, or a stage of one, with annotated values, and its decisions under a recipe's constraints."""

    graph: OpGraph
    arguments: Sequence[int]
    sharding: ShardingPlan
    constraints: Constraints


def bound_step(graph: OpGraph, candidate: SpmdCandidate, binding: Binding) -> Bound:
    """The step of one program."""
    _, constraints = binding.on(candidate.sharding.mesh.num_devices)
    return Bound(graph=graph, arguments=graph.block.inputs, sharding=candidate.sharding, constraints=constraints)


def bound_stages(stages: Iterable[PlannedStage], constraints: Constraints) -> list[Bound]:
    """The stages of a pipeline."""
    return [
        Bound(
            graph=planned.stage.graph,
            arguments=planned.stage.graph.block.inputs[: len(planned.stage.arguments)],
            sharding=planned.sharding,
            constraints=constraints,
        )
        for planned in stages
    ]


def recipe_notes(bounds: Sequence[Bound]) -> tuple[str, ...]:
    """A note for each axis and reason: arguments that stay whole although the recipe splits such arguments, and
    activations that are computed whole, or resharded between operations.
    """
    arrays_of: dict[tuple[str, str], dict[str, list[str]]] = {}
    noted: set[tuple[str, str]] = set()
    for bound in bounds:
        for axis, why, at, text in (*_whole_arguments(bound), *_given_up(bound)):
            if (axis, at) not in noted:
                noted.add((axis, at))
                arrays = arrays_of.setdefault((axis, why), {})
                arrays.setdefault(_NUMBER.sub("*", at) + text, []).append(at + text)
    return tuple(f"recipe, {axis}: {why}: {_listed(arrays)}" for (axis, why), arrays in arrays_of.items())


def _listed(arrays: Mapping[str, Sequence[str]]) -> str:
    texts = [texts[0] if len(texts) == 1 else f"{_starred(texts)} ({len(texts)}x)" for texts in arrays.values()]
    more = f", and {len(texts) - NAMED} more" if len(texts) > NAMED else ""
    return ", ".join(texts[:NAMED]) + more


def _starred(texts: Sequence[str]) -> str:
    """Texts that differ only in numbers as one text, with stars for the numbers."""
    pieces = zip(*(_PIECE.findall(text) for text in texts), strict=True)
    return "".join(at[0] if len(set(at)) == 1 else "*" for at in pieces)


_Note = tuple[str, str, str, str]  # axis, reason, what it is called, its shape and what of it matters


def _whole_arguments(bound: Bound) -> Iterator[_Note]:
    for v in bound.arguments:
        value = bound.graph.values[v]
        if value.size == 1 or value.rounded:  # each device takes its part of what does not divide
            continue
        layout = bound.sharding.reduced.get(v, replicated(len(value.shape)))
        for axis, (use, parts) in enumerate(zip(bound.constraints.axes, bound.sharding.mesh.axis_sizes, strict=True)):
            if parts > 1 and value.purpose in use.must_shard and axis not in layout.sharded_axes:
                reason = _reason(bound, value, layout, axis)
                if reason is not None:
                    yield (
                        f"{use.name} axis of {parts} devices",
                        reason[0],
                        summary.path_of(value.name),
                        f" {list(value.shape)}{reason[1]}",
                    )


def _reason(bound: Bound, value: Value, layout: Layout, axis: int) -> tuple[str, str] | None:
    """The reason for an argument's not being split over an axis, and its dimensions; None: the
    recipe does not apply.
    """
    use, mesh = bound.constraints.axes[axis], bound.sharding.mesh
    parts = mesh.axis_sizes[axis]
    may = [d for d, n in enumerate(value.shape) if n > 1 and bound.constraints.may_split(use, value, d)]
    if not may:
        if value.purpose in _WEIGHTS and use.unnamed:
            return "matrices stay whole, whose dimensions are not known to be heads or widths inside of a layer", ""
        if value.purpose is Purpose.BATCH and Dimension.EXAMPLE in use.dimensions:
            return "parts of the batch stay whole, which are not known to hold examples (batch_axis)", ""
        return None
    stay = "are split over fewer devices" if layout.sharded_axes else "stay whole"
    if not any(value.shape[d] % (parts * mesh.size(layout.dims[d])) == 0 for d in may):
        sizes = ", ".join(f"dimension {d}: {value.shape[d]}" for d in may)
        return f"arrays {stay}, since {parts} does not divide what is to be split", f" ({sizes})"
    return f"arrays {stay}, although they divide, since what reads them cannot be split so", ""


def _given_up(bound: Bound) -> Iterator[_Note]:
    relaxed, values = bound.sharding.relaxation, bound.graph.values
    if relaxed is None:
        return
    makers = {v: f"{op.place}/{op.primitive}".lstrip("/") for op in bound.graph.ops() for v in op.outputs}
    names = [
        f"{u.name} axis of {n} devices"
        for u, n in zip(bound.constraints.axes, bound.sharding.mesh.axis_sizes, strict=True)
    ]
    for v, axis in relaxed.whole:
        if values[v].purpose is Purpose.ACTIVATION and v in makers:
            why = "activations are computed whole, since the operations between them cannot be split so"
            yield names[axis], why, makers[v], f" {list(values[v].shape)}"
    for v in relaxed.cut:
        if v in makers:
            why = (
                "activations are gathered and cut anew, since what makes them and what reads them are split differently"
            )
            yield " and ".join(names), why, makers[v], f" {list(values[v].shape)}"


def ragged_notes(graph: OpGraph, platform: Platform) -> tuple[str, ...]:
    """Notes on ragged products that XLA multiplies with the matrices of all groups, as written and in blocks of rows,
    where there are any.
    """
    ops = (op for op in graph.ops() if op.primitive in (RAGGED_PRODUCT, GROUPED_PRODUCT, KERNEL))
    works = [dense_work_of(op.eqn, platform.value) for op in ops]
    xla, notes = f"XLA for {platform.value.upper()}s multiplies", []
    which = "each row" if platform is Platform.GPU else "each row, for the gradient of the matrices,"
    all_groups = "with the matrices of all groups that a device has"
    if any(work.blocks_s for work in works):
        notes.append(
            f"{RAGGED_PRODUCT} is made in blocks of the rows of each group where that takes less time: {xla} {which} "
            f"{all_groups}"
        )
    if any(work.flops for work in works):
        notes.append(f"{RAGGED_PRODUCT}: {xla} {which} {all_groups} (predicted so)")
    return tuple(notes)
