"""What a lowered step uses: collectives, the memory of the host and copies to it, seconds of computation by operation.

Some values are sent in 16 bits although they are kept in 32: copies that only matrix products read. A TPU's matrix
units take bfloat16, and at default precision XLA rounds the 32-bit operands of a product to it. Where a copy of a value
on other devices is read by such products only, XLA rounds before it sends: half the bytes go over the links, and the
copy takes half the memory. So it does in the turns of scans, of what they read in every turn, and of copies that they
stack up (seen in programs of an LSTM for v5e, v5p and v6e, libtpu 0.0.42.1).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import jax

from autopar.cost.cost_model import CostModel, NodeCosts
from autopar.cost.inner_collectives import Moment, island_collectives, ring_permutes
from autopar.hardware.collective_cost import CollectiveKind, sent_bytes
from autopar.ir.graph import HOST, Op, OpGraph, OpKind, Value
from autopar.ir.layout import Layout, LogicalMesh, local_bytes
from autopar.ir.primitives import ATTENTION_PASSES
from autopar.ir.resharding import MeshLinks, ReshardStep
from autopar.ir.strategies import Strategy
from autopar.lowering.instructions import (
    Compute,
    HostCopy,
    Instruction,
    Key,
    Loop,
    LoweredBlock,
    Move,
    host_copies_in,
)
from autopar.ops.kernels.operation import is_kernel


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveUse:
    """One collective of the step: `sent_bytes` by each device in one run, `count` runs a step, `module` its cause."""

    kind: CollectiveKind
    axes: tuple[int, ...]
    sent_bytes: float
    count: float
    time_s: float
    module: str
    value: str

    @property
    def total_bytes(self) -> float:
        return self.sent_bytes * self.count


def predicted_collectives(graph: OpGraph, lowered: LoweredBlock, model: CostModel) -> tuple[CollectiveUse, ...]:
    """Every collective of a lowered step, in program order. Of a branch, the alternative that sends most."""
    rounded = rounded_copies(graph, lowered.instructions, results_of(lowered), model)
    return tuple(_uses_of(graph, lowered, model, rounded))


def _uses_of(graph: OpGraph, lowered: LoweredBlock, model: CostModel, rounded: frozenset[Key]) -> list[CollectiveUse]:
    found: list[CollectiveUse] = []
    for instruction in lowered.instructions:
        if isinstance(instruction, Move):
            value, is_rounded = graph.values[instruction.value], (instruction.value, instruction.target) in rounded
            for step in instruction.steps:
                use = use_of_step(value, step, instruction, model, is_rounded=is_rounded)
                if use is not None:
                    found.append(use)
        elif isinstance(instruction, Compute) and (instruction.reduced or instruction.pieces is not None):
            found += uses_of_pieces(graph, instruction, model)
            found += uses_of_reduction(graph, instruction, model)
        elif isinstance(instruction, Compute):
            found += [use for _, use in uses_of_ring(instruction, model)]
        elif isinstance(instruction, Loop):
            inner = [_uses_of(graph, block, model, rounded) for block in instruction.blocks]
            if instruction.op.kind is OpKind.COND:
                found += max(inner, key=lambda uses: sum(u.total_bytes for u in uses))
            else:
                found += [use for uses in inner for use in uses]
    return found


def results_of(lowered: LoweredBlock) -> list[Key]:
    """What a block hands on, and where it lies."""
    outputs = zip(lowered.block.outputs, lowered.outputs, strict=True)
    return [(atom, place) for atom, place in outputs if isinstance(atom, int) and place is not None]


def use_of_step(
    value: Value, step: ReshardStep, move: Move, model: CostModel, *, is_rounded: bool
) -> CollectiveUse | None:
    """The collective of one step of a resharding; None for a step that stays on the device, or that products do while
    they run (`uses_of_pieces`).

    `is_rounded`: what is sent goes in 16 bits (`rounded_copies`).
    """
    if move.in_pieces:
        return None
    links = model.links
    nbytes = value.nbytes * model.widening(value.dtype) * (0.5 if is_rounded else 1.0)
    collective = links.as_compiled(step, nbytes)
    if collective is None:
        return None
    kind, result_bytes = collective
    return _runs_of(kind, step.axes, result_bytes, move.count, links, module=move.module, value=_name_of(value))


def uses_of_pieces(graph: OpGraph, compute: Compute, model: CostModel) -> list[CollectiveUse]:
    """The permutes by which pieces of an operand, or of the result, of a product go round; none where it runs whole.
    Pieces that are sent in place are copies: no kernel of a collective is launched for them, but one of the device
    itself.
    """
    pieces, links, op = compute.pieces, model.links, compute.op
    if pieces is None:
        return []
    atom = op.outputs[0] if pieces.operand is None else op.inputs[pieces.operand]
    assert isinstance(atom, int), "literals are not sent"
    value = graph.values[atom]
    part = pieces.step.after if pieces.operand is None else pieces.step.before
    nbytes = local_bytes(value.shape, value.itemsize, part, links.mesh) * model.widening(value.dtype)
    count = op.count * (links.mesh.size(pieces.axes) - 1)
    link = links.link(pieces.axes)
    time_s = links.time_s(CollectiveKind.COLLECTIVE_PERMUTE, nbytes, pieces.step.axes)
    if link.sends_in_place:
        time_s += min(0.0, model.device.launch_overhead_s - link.overhead_s)
    return [
        CollectiveUse(
            kind=CollectiveKind.COLLECTIVE_PERMUTE,
            axes=pieces.step.axes,
            sent_bytes=nbytes,
            count=count,
            time_s=time_s * count,
            module=op.place,
            value=_name_of(value),
        )
    ]


def uses_of_reduction(graph: OpGraph, compute: Compute, model: CostModel) -> list[CollectiveUse]:
    """The all-reduces that the partitioner makes of an operation with a split reduced factor."""
    mesh, op = model.links.mesh, compute.op
    if not compute.reduced:
        return []
    out = []
    for v, layout in zip(op.outputs, compute.results, strict=True):
        value = graph.values[v]
        nbytes = local_bytes(value.shape, value.itemsize, layout, mesh) * model.widening(value.dtype)
        kind, axes = CollectiveKind.ALL_REDUCE, compute.reduced
        out.append(_runs_of(kind, axes, nbytes, op.count, model.links, module=op.place, value=_name_of(value)))
    return out


def uses_of_island(op: Op, strategy: Strategy, model: CostModel) -> list[CollectiveUse]:
    """The collectives that an island is written with; none of other operations."""
    links, uses = model.links, []
    for sent in island_collectives(op, strategy, links.mesh, model.device.platform.value):
        nbytes, count = sent.result_bytes * model.widening(sent.dtype), op.count * sent.count
        value = f"{sent.dtype} {'rows of experts' if is_kernel(op.eqn) else 'in shard_map'}"
        use = _runs_of(sent.kind, sent.axes, nbytes, count, links, module=op.place, value=value)
        waited_s = links.time_s(sent.kind, nbytes * sent.busiest, sent.axes) * count
        uses.append(dataclasses.replace(use, time_s=waited_s))
    return uses


def uses_of_ring(compute: Compute, model: CostModel) -> list[tuple[Moment, CollectiveUse]]:
    """The permutes by which parts of an operation's operands go round the devices that split it, and those by which
    positions change places before and after; and what an island sends, as if that came before it.
    """
    op, strategy = compute.op, compute.strategy
    if strategy is None:
        return []
    if op.primitive not in ATTENTION_PASSES:
        return [(Moment.BEFORE, use) for use in uses_of_island(op, strategy, model)]
    return [
        (
            permute.moment,
            CollectiveUse(
                kind=CollectiveKind.COLLECTIVE_PERMUTE,
                axes=strategy.ring,
                sent_bytes=permute.sent_bytes,
                count=op.count * permute.count,
                time_s=op.count * permute.time_s,
                module=op.place,
                value=permute.array,
            ),
        )
        for permute in ring_permutes(op, strategy, model.device, model.links)
    ]


def _runs_of(
    kind: CollectiveKind,
    axes: tuple[int, ...],
    result_bytes: float,
    count: float,
    links: MeshLinks,
    *,
    module: str,
    value: str,
) -> CollectiveUse:
    """So many runs of a collective with a result of so many bytes."""
    return CollectiveUse(
        kind=kind,
        axes=axes,
        sent_bytes=float(sent_bytes(kind, result_bytes, links.mesh.size(axes))),
        count=count,
        time_s=links.time_s(kind, result_bytes, axes) * count,
        module=module,
        value=value,
    )


def _name_of(value: Value) -> str:
    return value.name or f"{value.dtype}{list(value.shape)}"


# They only move what they read: rounding before is rounding after.
_MOVING = frozenset({"transpose", "reshape", "squeeze", "expand_dims"})


def rounded_copies(
    graph: OpGraph, instructions: Sequence[Instruction], results: Iterable[Key], model: CostModel
) -> frozenset[Key]:
    """The copies that moves among these instructions make in 16 bits, in the bodies of their scans too, and the stacks
    that scans make of such copies; `results` are read by others too.
    """
    rounded: set[Key] = set()
    if model.compiler.products_round:
        _Readers(elsewhere=set(results)).mark(graph, instructions, rounded)
    return frozenset(rounded)


@dataclasses.dataclass(frozen=True, slots=True)
class _Readers:
    """The places that products read which round, and those that something else reads."""

    elsewhere: set[Key]
    in_products: set[Key] = dataclasses.field(default_factory=set)

    def round(self, key: Key) -> bool:
        return key in self.in_products and key not in self.elsewhere

    def mark(self, graph: OpGraph, instructions: Sequence[Instruction], rounded: set[Key]) -> None:
        """Adds the copies of these instructions that are rounded, last ones first."""
        for instruction in reversed(instructions):
            if isinstance(instruction, Move):
                key = instruction.value, instruction.target
                wide = graph.values[instruction.value].dtype == "float32"
                rounds = wide and self.round(key) and not any(step.kind.reduces for step in instruction.steps)
                if rounds:
                    rounded.add(key)
                (self.in_products if rounds else self.elsewhere).update(instruction.keys_read)
            elif isinstance(instruction, Compute) and _rounds(instruction.op):
                self.in_products.update(instruction.keys_read)
            elif isinstance(instruction, Compute) and instruction.op.primitive in _MOVING:
                (made,) = instruction.keys_made
                (self.in_products if self.round(made) else self.elsewhere).update(instruction.keys_read)
            elif isinstance(instruction, Loop) and instruction.op.kind is OpKind.SCAN:
                self.scan(graph, instruction, rounded)
            else:
                self.elsewhere.update(instruction.keys_read)

    def scan(self, graph: OpGraph, loop: Loop, rounded: set[Key]) -> None:
        """A scan: its stacks are made of what the body leaves, and read as the body reads their slices."""
        (body,), op = loop.blocks, loop.op
        first, made = op.num_consts + op.num_carry, dict(enumerate(loop.keys_made))
        left = zip(body.block.outputs, body.outputs, strict=True)
        ends = {i: (atom, place) for i, (atom, place) in enumerate(left) if isinstance(atom, int) and place is not None}
        stacked = {i: key for i, key in ends.items() if i >= op.num_carry and self.round(made[i])}
        inside = _Readers({key for i, key in ends.items() if i not in stacked}, set(stacked.values()))
        inside.mark(graph, body.instructions, rounded)
        rounded.update(made[i] for i, key in stacked.items() if key in rounded)
        entries, operands = zip(body.block.inputs, body.entries(), strict=True), set[Key]()
        for position, (entry, v, place) in enumerate(zip(entries, op.inputs, loop.reads, strict=True)):
            if isinstance(v, int) and place is not None:
                operands.add((v, place))
                is_carried = op.num_consts <= position < first
                rounds = not is_carried and inside.round(entry)
                (self.in_products if rounds else self.elsewhere).add((v, place))
        self.elsewhere.update(set(loop.keys_read) - operands)


def _rounds(op: Op) -> bool:
    """A matrix product at default precision."""
    if op.primitive != "dot_general":
        return False
    precision = op.eqn.params.get("precision")
    wanted = precision if isinstance(precision, tuple) else (precision,)
    return all(p in (None, jax.lax.Precision.DEFAULT) for p in wanted)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HostUse:
    """What one device keeps in the memory of its host, and copies from there and back in a step. `saved_bytes`: of one
    micro-batch (else of the step), between the passes.
    """

    kept_bytes: int
    saved_bytes: int
    copied_bytes: int
    time_s: float


def host_use(graph: OpGraph, lowered: LoweredBlock, model: CostModel) -> HostUse:
    """Of the state that a lowered step finds in the memory of the host, and the activations that it saves there."""
    mesh = model.links.mesh

    def local(value: int, layout: Layout) -> int:
        v = graph.values[value]
        return local_bytes(v.shape, v.itemsize, layout, mesh)

    entries = zip(lowered.block.inputs, lowered.entries(), strict=True)
    copies = list(host_copies_in(lowered))
    outputs = zip(lowered.block.outputs, lowered.outputs, strict=True)
    new_state = {(atom, place) for atom, place in outputs if isinstance(atom, int)}
    saved = [t for t in copies if t.to_host and (t.value, t.target) not in new_state]
    return HostUse(
        kept_bytes=sum(local(v, layout) for v, (layout, state) in entries if state == HOST),
        saved_bytes=sum(t.trips * local(t.value, t.target[0]) for t in saved),
        copied_bytes=sum(_runs(graph, t) * local(t.value, t.target[0]) for t in copies),
        time_s=sum(host_copy_s(graph, t, model) for t in copies),
    )


def passing_bytes(graph: OpGraph, instructions: Sequence[Instruction], mesh: LogicalMesh) -> int:
    """Bytes of what a device sends to the memory of its host and brings back within a part of a step."""
    read = {key for instruction in instructions for key in instruction.keys_read}
    made = {key for instruction in instructions for key in instruction.keys_made if key[1][1] == HOST}
    values = ((graph.values[value], layout) for value, (layout, _) in made & read)
    return sum(local_bytes(v.shape, v.itemsize, layout, mesh) for v, layout in values)


def host_copy_s(graph: OpGraph, copy: HostCopy, model: CostModel) -> float:
    """Seconds of all runs, in a step, of a copy from the memory of the host, or to it."""
    value = graph.values[copy.value]
    nbytes = local_bytes(value.shape, value.itemsize, copy.target[0], model.links.mesh)
    return _runs(graph, copy) * model.device.host_copy_s(nbytes)


def _runs(graph: OpGraph, copy: HostCopy) -> int:
    return copy.trips * (graph.num_microbatches if copy.section.repeats else 1)


def compute_times_s(
    graph: OpGraph, lowered: LoweredBlock, model: CostModel, costs: NodeCosts | None = None
) -> dict[int, float]:
    """Seconds that one device computes each operation (by its number) in a step, collectives left out.

    Of a branch, the alternative that takes longest. `costs` of the same graph and model are not computed again.
    """
    costs = costs or NodeCosts(graph, model)

    def of_block(block: LoweredBlock) -> dict[int, float]:
        out: dict[int, float] = {}
        for instruction in block.instructions:
            if isinstance(instruction, Compute):
                out[instruction.op.id] = costs.compute_s(instruction.op, instruction.strategy)
            elif isinstance(instruction, Loop):
                inner = [of_block(b) for b in instruction.blocks]
                if instruction.op.kind is OpKind.COND:
                    inner = [max(inner, key=lambda seconds: sum(seconds.values()))]
                for seconds in inner:
                    out.update(seconds)
        return out

    return of_block(lowered)
