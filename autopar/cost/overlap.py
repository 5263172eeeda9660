"""The time of a lowered step with overlap: its instructions on two streams, one for computation, one for collectives.

One simulation gives the number and the timeline (`autopar.cost.stream_simulator`). An in-place reduction by the
partitioner (`Compute.reduced`) is an all-reduce of its own once it is compiled, and asynchronous like any other. Copies
between the memories of a device and its host have a stream of their own where the compiler makes them asynchronous.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from msgspec.structs import replace

from autopar.common.trace_events import DEVICES, LINKS, Timeline
from autopar.common.trace_events import TraceEvent as Shown
from autopar.cost.cost_model import CostModel, NodeCosts, copied_s
from autopar.cost.inner_collectives import Moment
from autopar.cost.roofline import is_fusible
from autopar.cost.stream_simulator import KeptWork, Overlap, Ran, Stream, StreamEvent, StreamWork, run
from autopar.cost.usage import (
    CollectiveUse,
    host_copy_s,
    results_of,
    rounded_copies,
    use_of_step,
    uses_of_pieces,
    uses_of_reduction,
    uses_of_ring,
)
from autopar.hardware.collective_cost import CollectiveKind
from autopar.ir.graph import Op, OpGraph, OpKind
from autopar.ir.layout import LogicalMesh, axes_text, local_bytes
from autopar.lowering.instructions import (
    Accumulate,
    Compute,
    HostCopy,
    Instruction,
    Key,
    Leave,
    Loop,
    LoweredBlock,
    Move,
    Pass,
    Pieces,
    Split,
    Stack,
)


def timed(
    graph: OpGraph,
    lowered: LoweredBlock,
    model: CostModel,
    costs: NodeCosts | None = None,
    results: Sequence[Key] | None = None,
    overlap: Overlap | None = None,
) -> Ran:
    """A block on the clock of one device, all its runs in a step together.

    A loop runs iteration after iteration, each by the same rules; of a branch, the alternative that takes longest.
    `costs` of the same graph and model, where there are some already, save working them out again. `results`: what a
    part of a block hands on that is a program of its own; by default what the block does. `overlap`: by default the
    model's.
    """
    writer = _Writer(graph, model, costs or NodeCosts(graph, model), overlap)
    return writer.timed(lowered, results_of(lowered) if results is None else results)


def works_together(
    graph: OpGraph,
    parts: Sequence[tuple[Sequence[Instruction], int]],
    results: Sequence[Key],
    model: CostModel,
    costs: NodeCosts | None = None,
) -> list[StreamWork]:
    """Instructions of several parts of a step as one program, once each, for `timed_beside`: with each part how often
    it runs in a step, since that is what its operations count. `results`: what the program hands on.
    """
    writer = _Writer(graph, model, costs or NodeCosts(graph, model))
    together = [instruction for instructions, _ in parts for instruction in instructions]
    writer.rounded |= rounded_copies(graph, together, results, model)
    made: dict[int, int] = {}
    works: list[StreamWork] = []
    for instructions, runs in parts:
        begun = len(works)
        for instruction in instructions:
            writer.instruction(instruction, made, works)
        works[begun:] = [_scaled(work, 1 / runs) for work in works[begun:]]
    return works


def timed_beside(works: Sequence[Sequence[StreamWork]], model: CostModel) -> Ran:
    """The work of several programs as one, in which none reads what another makes."""
    apart = [_apart(work, number) for number, program in enumerate(works) for work in program]
    together = apart if len(works) > 1 else works[0]
    return run(together, model.overlap.combined_bytes, model.overlap.scattered_bytes)


def _apart(work: StreamWork, program: int) -> StreamWork:
    """Work with the values of one of several programs."""
    reads, makes = (tuple((program, value) for value in values) for values in (work.reads, work.makes))
    of = None if work.pieces_of is None else (program, work.pieces_of)
    return replace(work, reads=reads, makes=makes, pieces_of=of)


def _scaled(work: StreamWork, share: float) -> StreamWork:
    """A share of work's time and of what it sends."""
    if share == 1:
        return work
    inside = tuple(
        dataclasses.replace(
            ran,
            order=tuple(_scaled(each, share) for each in ran.order),
            starts_s=tuple(start_s * share for start_s in ran.starts_s),
            end_s=ran.end_s * share,
            compute_s=ran.compute_s * share,
            send_s=ran.send_s * share,
            host_s=ran.host_s * share,
        )
        for ran in work.inside
    )
    return replace(
        work,
        seconds=work.seconds * share,
        latency_s=work.latency_s * share,
        sent_bytes=work.sent_bytes * share,
        inside=inside,
    )


def crossing_s(graph: OpGraph, instruction: Split | Accumulate | Stack, model: CostModel) -> float:
    """Seconds of all runs, in a step, of what cuts, adds up or joins micro-batches."""
    layout = instruction.sum_[0] if isinstance(instruction, Accumulate) else instruction.result
    return instruction.op.count * copied_s(graph, instruction.op, layout, model)


def timeline_of(ran: Ran, mesh: LogicalMesh) -> Timeline:
    """A step as a timeline. Neighbours of one name are one event."""
    shown: dict[Stream, list[Shown]] = {Stream.COMPUTE: [], Stream.SEND: []}
    for event in ran.events():
        for (kind, axes, _), _ in event.causes[:1]:
            over = f"{kind.value} over {axes_text(mesh.axis_names[a] for a in axes)}"
            event = dataclasses.replace(event, name=event.name.replace(kind.value, over, 1))
        row = shown[event.stream]
        computes = event.stream is Stream.COMPUTE
        if computes and row and (row[-1].name, row[-1].end_s) == (event.name, event.start_s):
            row[-1] = _shown(event, row[-1].start_s)
        else:
            row.append(_shown(event, event.start_s))
    events = shown[Stream.COMPUTE] + shown[Stream.SEND]
    return Timeline(rows=("every device",), links=("collectives",), events=tuple(events))


def _shown(event: StreamEvent, start_s: float) -> Shown:
    if event.stream is Stream.COMPUTE:
        return Shown(DEVICES, 0, event.name, "compute", start_s, event.end_s)
    return Shown(LINKS, 0, event.name, "send", start_s, event.end_s, 0, int(event.sent_bytes))


class _Writer:
    """Instructions as work. Values are numbered: places as in all programs of a graph, so that equal instructions are
    equal work; what lies in between below zero, as is a place that is filled twice, which is two values.

    `made` in what follows: the value that lies in a place, by the number of the place.
    """

    def __init__(self, graph: OpGraph, model: CostModel, costs: NodeCosts, overlap: Overlap | None = None) -> None:
        self.graph, self.model, self.costs = graph, model, costs
        self.overlap = overlap or model.overlap
        self.num_new = 0
        self.rounded: set[Key] = set()

    def timed(self, lowered: LoweredBlock, results: Sequence[Key]) -> Ran:
        made: dict[int, int] = {}
        works: list[StreamWork] = []
        self.rounded |= rounded_copies(self.graph, lowered.instructions, results, self.model)
        for instruction in lowered.instructions:
            self.instruction(instruction, made, works)
        return run(works, self.overlap.combined_bytes, self.overlap.scattered_bytes)

    def new(self) -> int:
        self.num_new += 1
        return -self.num_new

    def places(self, keys: Iterable[Key]) -> tuple[int, ...]:
        """The numbers of places."""
        known = self.costs.numbers
        return tuple([known.setdefault(key, len(known)) for key in keys])

    def read(self, keys: Iterable[Key], made: dict[int, int]) -> tuple[int, ...]:
        """The values in places, of those that something makes."""
        return values_in(self.places(keys), made)

    def define(self, places: Iterable[int], made: dict[int, int]) -> tuple[int, ...]:
        """New values in places."""
        for place in places:
            made[place] = self.new() if place in made else place
        return tuple([made[place] for place in places])

    def instruction(self, instruction: Instruction, made: dict[int, int], works: list[StreamWork]) -> None:
        if isinstance(instruction, Compute):
            return self.compute(instruction, made, works)
        reads = self.read(instruction.keys_read, made)
        if isinstance(instruction, Move):
            self.move(instruction, reads, made, works)
        elif isinstance(instruction, Loop):
            inside = self.inside(instruction)
            sends = any(ran.send_s for ran in inside)
            works.append(
                StreamWork(
                    name=_named(instruction.op.place),
                    stream=Stream.BOTH if sends else Stream.COMPUTE,
                    seconds=sum(ran.end_s for ran in inside) + self.turns_s(instruction.op),
                    reads=reads,
                    makes=self.define(self.places(instruction.keys_made), made),
                    inside=inside,
                )
            )
        elif isinstance(instruction, Pass):
            makes = self.define(self.places(instruction.keys_made), made)
            for read, value in zip(instruction.keys_read, makes, strict=True):
                works.append(_renamed(self.read((read,), made), (value,)))
        elif isinstance(instruction, HostCopy):
            behind = self.read(instruction.behind, made)
            # Nothing waits for the copy of the next turn's slice; that of the first turn is left out.
            is_ahead = self.overlap.slices_ahead and instruction.trips > 1 and not instruction.to_host
            way = "to" if instruction.to_host else "from"
            works.append(
                StreamWork(
                    name=f"{way} the host's memory, {_named(instruction.module)}",
                    stream=Stream.HOST if self.model.overlap.host_copies else Stream.BOTH,
                    seconds=host_copy_s(self.graph, instruction, self.model),
                    reads=(*reads, *behind),
                    makes=(self.new(),) if is_ahead else self.define(self.places(instruction.keys_made), made),
                )
            )
        elif not isinstance(instruction, Leave):
            op = instruction.op
            works.append(
                StreamWork(
                    name=_named(op.place),
                    stream=Stream.COMPUTE,
                    seconds=crossing_s(self.graph, instruction, self.model),
                    reads=reads,
                    makes=self.define(self.places(instruction.keys_made), made),
                )
            )

    def compute(self, compute: Compute, made: dict[int, int], works: list[StreamWork]) -> None:
        if compute.pieces is not None:
            return self.in_pieces(compute, compute.pieces, made, works)
        op = compute.op
        kept = self.costs.works.get((op.id, op.count))
        if kept is None or kept.compute is not compute:
            kept = KeptWork(compute, self.places(compute.keys_read), self.places(compute.keys_made))
            self.costs.works[op.id, op.count] = kept
        reads, makes = values_in(kept.reads, made), self.define(kept.makes, made)
        if kept.work is not None and kept.work.reads == reads and kept.work.makes == makes:
            works.append(kept.work)
            return
        permutes = uses_of_ring(compute, self.model)
        summands = tuple(self.new() for _ in makes) if compute.reduced or permutes else makes
        placed = self.permutes(permutes, Moment.BEFORE, reads, works)
        work = StreamWork(
            name=_named(op.place),
            stream=Stream.COMPUTE,
            seconds=self.costs.compute_s(op, compute.strategy),
            reads=(*reads, *placed),
            makes=summands,
            is_light=is_fusible(op.primitive),
        )
        works.append(work)
        if not permutes and not compute.reduced:
            kept.work = work
        if permutes:
            arrived = self.permutes(permutes, Moment.BESIDE, (*reads, *placed), works)
            placed = self.permutes(permutes, Moment.AFTER, (*summands, *arrived), works)
            works.append(_renamed((*summands, *arrived, *placed), makes))
        if compute.reduced:
            uses = uses_of_reduction(self.graph, compute, self.model)
            for use, v, layout, summand, value in zip(uses, op.outputs, compute.results, summands, makes, strict=True):
                at = self.graph.values[v]
                nbytes = local_bytes(at.shape, at.itemsize, layout, self.model.links.mesh)
                works.append(self.collective(use, nbytes, (summand,), (value,), reduces=True))

    def in_pieces(self, compute: Compute, pieces: Pieces, made: dict[int, int], works: list[StreamWork]) -> None:
        """A product whose pieces are computed while others are sent, as `autopar.lowering.collective_matmul` orders
        them: the next piece is on its way beside each, and is read behind it.
        """
        op, strategy, n = compute.op, compute.strategy, self.model.links.mesh.size(pieces.axes)
        assert strategy is not None, "products in pieces are split"
        reads, begun = self.read(compute.keys_read, made), len(works)
        (use,) = uses_of_pieces(self.graph, compute, self.model)
        send = dataclasses.replace(use, count=use.count / (n - 1), time_s=use.time_s / (n - 1))
        product = StreamWork(
            name=_named(op.place),
            stream=Stream.COMPUTE,
            seconds=self.costs.piece_s(op, strategy, pieces),
            is_light=False,
        )
        is_sent: tuple[int, ...] = reads if pieces.operand is not None else ()
        arrived: tuple[int, ...] = ()
        outs: list[int] = []
        for k in range(n):
            sends = k + 1 < n
            if pieces.operand is not None and sends:
                on_its_way = self.new()
                works.append(self.collective(send, int(send.sent_bytes), is_sent, (on_its_way,), reduces=False))
            outs.append(self.new())
            waits_for = arrived if pieces.operand is not None else ()
            works.append(replace(product, reads=(*reads, *waits_for), makes=(outs[-1],)))
            if pieces.operand is not None and sends:
                arrived = (self.new(),)
                works.append(_renamed((on_its_way, outs[-1]), arrived))
                is_sent = arrived
            if pieces.operand is None:
                summed = self.new()
                works.append(_renamed((outs[-1], *arrived), (summed,)))
                outs[-1:] = [summed]
                if sends:
                    arrived = (self.new(),)
                    works.append(self.collective(send, int(send.sent_bytes), (summed,), arrived, reduces=False))
        works[begun:] = [replace(work, pieces_of=op.id) for work in works[begun:]]
        result: tuple[int, ...] = tuple(outs) if pieces.operand is not None else (outs[-1],)
        if compute.reduced:
            (use,), (layout,), (v,) = uses_of_reduction(self.graph, compute, self.model), compute.results, op.outputs
            value, whole = self.graph.values[v], self.new()
            nbytes = local_bytes(value.shape, value.itemsize, layout, self.model.links.mesh)
            works.append(self.collective(use, nbytes, result, (whole,), reduces=True))
            result = (whole,)
        works.append(_renamed(result, self.define(self.places(compute.keys_made), made)))
        if pieces.operand is not None and pieces.is_read_again:
            # What reads it behind this product needs all pieces.
            (place,) = self.places(k for k in compute.keys_read if k[0] == op.inputs[pieces.operand])
            made[place] = self.new()
            works.append(_renamed((*is_sent, *arrived), (made[place],)))

    def permutes(
        self,
        permutes: Sequence[tuple[Moment, CollectiveUse]],
        moment: Moment,
        reads: tuple[int, ...],
        works: list[StreamWork],
    ) -> tuple[int, ...]:
        """The arrays that a ring's permutes bring at one moment."""
        brought = []
        for use in (use for when, use in permutes if when is moment):
            brought.append(self.new())
            works.append(self.collective(use, int(use.sent_bytes), reads, (brought[-1],), reduces=False))
        return tuple(brought)

    def move(self, move: Move, reads: tuple[int, ...], made: dict[int, int], works: list[StreamWork]) -> None:
        value, mesh = self.graph.values[move.value], self.model.links.mesh
        at = reads
        for step in move.steps:
            after = (self.new(),)
            is_rounded = (move.value, move.target) in self.rounded
            use = use_of_step(value, step, move, self.model, is_rounded=is_rounded)
            if use is None:
                works.append(_renamed(at, after))
            else:
                nbytes = local_bytes(value.shape, value.itemsize, step.after, mesh)
                works.append(self.collective(use, nbytes, at, after, reduces=step.kind.reduces))
            at = after
        (place,) = self.places(move.keys_made)
        (made[place],) = at

    def collective(
        self, use: CollectiveUse, nbytes: int, reads: tuple[int, ...], makes: tuple[int, ...], reduces: bool
    ) -> StreamWork:
        links = self.model.links
        link = links.link(use.axes)
        apart = use.kind in self.model.overlap.kinds and link.is_asynchronous
        times = f"{use.count:g} " if use.count != 1 else ""
        return StreamWork(
            name=f"{times}{use.kind.value}, {_named(use.module)}",
            stream=Stream.SEND if apart else Stream.BOTH,
            seconds=use.time_s,
            reads=reads,
            makes=makes,
            nbytes=nbytes,
            sent_bytes=use.total_bytes,
            reduction=(use.kind, use.axes) if reduces else None,
            gather=use.axes if use.kind is CollectiveKind.ALL_GATHER else None,
            latency_s=min(use.time_s, links.time_s(use.kind, 0.0, use.axes) * use.count),
            causes=(((use.kind, use.axes, use.module), 1.0),),
        )

    def turns_s(self, loop: Op) -> float:
        """Seconds between the turns of a loop, all its runs together."""
        return 0.0 if loop.kind is OpKind.COND else loop.count * loop.trips * self.model.device.loop_turn_s

    def inside(self, loop: Loop) -> tuple[Ran, ...]:
        rans = tuple(self.timed(block, results_of(block)) for block in loop.blocks)
        if loop.op.kind is OpKind.COND:
            return (max(rans, key=lambda ran: ran.end_s),)
        return rans


def values_in(places: Sequence[int], made: Mapping[int, int]) -> tuple[int, ...]:
    """The values in places, of those that something makes."""
    return tuple([value for place in places if (value := made.get(place)) is not None])


def _renamed(reads: tuple[int, ...], makes: tuple[int, ...]) -> StreamWork:
    return StreamWork(name="", stream=Stream.NEITHER, seconds=0.0, reads=reads, makes=makes, is_light=True)


def _named(module: str) -> str:
    return module or "(no module)"
