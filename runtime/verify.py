"""Verification of a schedule, and of its program, without running them.

Of a schedule:
(1) complete: each group's list has each task of its stages exactly once for each micro-batch, and nothing else;
(2) free of deadlock: each group walking its list and waiting for its neighbours, all come to the end;
(3) bounded: no group has more in flight than promised.

Of a program, whose instructions all processes walk in the same order, each doing what is local to it:
(4) complete: each run of each task, and each transfer of each micro-batch, exactly once;
(5) in order: every slot that is read holds the array meant, on the right mesh. Reads thus follow writes in one order
    that all share, so that the first instruction not yet done can always go on: no deadlock, even if a Send holds up
    both sides;
(6) faithful: on each mesh the runs stand as in the schedule's list;
(7) clean: a slot holds arrays of one mesh only, none is written while it holds an array, none is freed twice, none
    read after it was freed or its memory taken over; at the end the results are there, each where the program says,
    and nothing else is;
(8) bounded: no mesh has more in flight than promised.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from autopar.errors import ScheduleError
from autopar.runtime.emit import runs_of_mesh
from autopar.runtime.program import (
    Dataflow,
    Free,
    Instance,
    Instruction,
    Joined,
    Node,
    Program,
    Run,
    Send,
    dataflow,
    num_meshes,
    program_peak_in_flight,
    runs_of,
)
from autopar.runtime.schedule import PipelineSchedule, Slot, peak_in_flight, place


def verify_schedule(schedule: PipelineSchedule) -> None:
    """Checks (1) to (3).

    Raises:
        ScheduleError: Says which does not hold, and where.
    """
    where = f"schedule {schedule.name}"
    if len(schedule.mesh_of_stage) != schedule.num_stages or len(schedule.in_flight) != schedule.num_groups:
        raise _error(
            where,
            f"a group for each of {schedule.num_stages} stages, a promise for each of {schedule.num_groups} groups",
            f"{len(schedule.mesh_of_stage)} and {len(schedule.in_flight)}",
        )
    for group, todo in enumerate(schedule.lists):
        wanted = {
            Slot(kind, stage, i)
            for stage in range(schedule.num_stages)
            if schedule.mesh_of_stage[stage] == group
            for kind in schedule.kinds
            for i in range(schedule.num_microbatches)
        }
        _check_exactly_once(f"{where}, group {group}", wanted, todo)
    place(schedule)
    for group, (peak, promised) in enumerate(zip(peak_in_flight(schedule), schedule.in_flight, strict=True)):
        if peak > promised:
            raise _error(f"{where}, group {group}", f"at most {promised} in flight", str(peak))


def verify_program(program: Program, schedule: PipelineSchedule) -> None:
    """Checks (4) to (8).

    Raises:
        ScheduleError: Says which does not hold, and at which instruction.
    """
    if program.num_microbatches != schedule.num_microbatches:
        raise _error("program", f"{schedule.num_microbatches} micro-batches", str(program.num_microbatches))
    flow = dataflow(program.pipeline, program.num_microbatches)
    _check_complete(program, flow)
    _check_arrays(program, flow)
    _check_order(program, schedule)
    peaks = program_peak_in_flight(program)
    for mesh, peak in enumerate(peaks):
        promised = 0 if mesh >= schedule.num_groups else schedule.in_flight[mesh]
        if peak > promised:
            raise _error(f"mesh {mesh} of the program", f"at most {promised} in flight", str(peak))


def _check_complete(program: Program, flow: Dataflow) -> None:
    """(4)"""
    pipeline, m = program.pipeline, program.num_microbatches
    runs = [run for step in program.instructions for run in runs_of(step)]
    _check_exactly_once("runs of the program", {n for t in range(len(pipeline.tasks)) for n in flow.runs(t)}, runs)
    sends = [(t, step.micro_batch) for step in program.instructions if isinstance(step, Send) for t in step.transfers]
    wanted = {
        (t, i)
        for t, transfer in enumerate(pipeline.transfers)
        for i in range(m if pipeline.buffers[transfer.source].repeats else 1)
    }
    _check_exactly_once("transfers of the program", wanted, sends)


@dataclasses.dataclass(frozen=True, slots=True)
class _Array:
    """What a slot holds. `updates` of an accumulator: those that are in it."""

    instance: Instance
    updates: int = 0


def _check_arrays(program: Program, flow: Dataflow) -> None:
    """(5) and (7)"""
    pipeline = program.pipeline
    held: dict[int, _Array] = {
        slot: _Array((b, 0)) for b, slot in zip(pipeline.inputs, program.input_slots, strict=True)
    }
    if len(held) != len(pipeline.inputs):
        raise _error("arguments of the program", "a slot for each", "one slot for several")
    for at, step in enumerate(program.instructions):
        checker = _Step(program, flow, at, step, held)
        if isinstance(step, Run):
            checker.run(step)
        elif isinstance(step, Joined):
            checker.joined(step)
        elif isinstance(step, Send):
            checker.send(step)
        else:
            for slot in step.slots:
                checker.drop(slot)
    for b, slot in zip(pipeline.outputs, program.output_slots, strict=True):
        wanted = _final(flow, (b, 0))
        if held.get(slot) != wanted:
            raise _error(
                f"result {pipeline.buffers[b].name}", f"it in slot {slot}", _held_text(program, held.get(slot))
            )
    mesh_of: dict[int, set[int]] = collections.defaultdict(set)
    for slot, mesh in _slot_meshes(program):
        mesh_of[slot].add(mesh)
    shared = {slot: meshes for slot, meshes in mesh_of.items() if len(meshes) > 1}
    if shared:
        slot, meshes = next(iter(shared.items()))
        raise _error(f"slot {slot} of the program", "arrays of one mesh", f"meshes {sorted(meshes)}")
    leaked = set(held) - set(program.output_slots)
    if leaked:
        names = [f"{_held_text(program, held[slot])} in slot {slot}" for slot in sorted(leaked)]
        raise _error("end of the program", "nothing but the results", ", ".join(names))
    if any(slot >= program.num_slots for slot in _slots(program)):
        raise _error("slots of the program", f"numbers below {program.num_slots}", str(max(_slots(program))))


@dataclasses.dataclass(frozen=True, slots=True)
class _Step:
    """One instruction, applied to what the slots hold."""

    program: Program
    flow: Dataflow
    at: int
    step: Instruction
    held: dict[int, _Array]

    def run(self, step: Run) -> None:
        task = self.program.pipeline.tasks[step.task]
        updated = {b for b in task.inputs if step.task in self.flow.updaters.get(b, ())}
        wanted = [x for b in task.inputs for x in self.flow.instances(b, task, step.micro_batch)]
        made = [x for b in task.outputs for x in self.flow.instances(b, task, step.micro_batch)]
        self.check_number("inputs", len(wanted), len(step.inputs))
        self.check_number("outputs", len(made), len(step.outputs))
        updates: dict[int, int] = {}
        for x, slot in zip(wanted, step.inputs, strict=True):
            if x[0] in updated:
                there = self.held.get(slot)
                if there is None or there.instance != x:
                    raise self.error(f"{self.name(x)} in slot {slot}", _held_text(self.program, there))
                updates[x[0]] = there.updates
            else:
                self.read(x, slot)
        donated = {task.inputs[i] for i in task.donated}
        for x, slot in dict.fromkeys(zip(wanted, step.inputs, strict=True)):
            if x[0] in donated:
                del self.held[slot]
        for x, slot in zip(made, step.outputs, strict=True):
            self.write(slot, _Array(x, updates[x[0]] + 1 if x[0] in updated else 0))

    def joined(self, step: Joined) -> None:
        """Its runs, one after the other, on what its slots hold and on what they hand to each other."""
        self.check_number("inputs", len(step.reads), len(step.inputs))
        self.check_number("outputs", len(step.makes), len(step.outputs))
        tasks, updaters = self.program.pipeline.tasks, self.flow.updaters
        there: dict[Instance, int] = {}
        for x, slot in zip(step.reads, step.inputs, strict=True):
            held = self.held.get(slot)
            if held is None or held.instance != x:
                raise self.error(f"{self.name(x)} in slot {slot}", _held_text(self.program, held))
            there[x] = held.updates
        for number, micro_batch in step.parts:
            task = tasks[number]
            for x in (x for b in task.inputs for x in self.flow.instances(b, task, micro_batch)):
                wanted = there.get(x, 0) if number in updaters.get(x[0], ()) else _final(self.flow, x).updates
                if there.get(x) != wanted:
                    raise self.error(f"{self.name(x)} for {task.name}, {wanted} updates in it", str(there.get(x)))
            for x in (x for b in task.outputs for x in self.flow.instances(b, task, micro_batch)):
                there[x] = there[x] + 1 if number in updaters.get(x[0], ()) else 0
        for position in step.donated:
            del self.held[step.inputs[position]]
        for x, slot in zip(step.makes, step.outputs, strict=True):
            self.write(slot, _Array(x, there[x]))

    def send(self, step: Send) -> None:
        transfers = [self.program.pipeline.transfers[t] for t in step.transfers]
        buffers = self.program.pipeline.buffers
        self.check_number("sources", len(transfers), len(step.sources))
        self.check_number("targets", len(transfers), len(step.targets))
        links = {(buffers[t.source].mesh, buffers[t.target].mesh) for t in transfers}
        if len(links) != 1:
            raise self.error("one pair of meshes", str(sorted(links)))
        for transfer, source, target in zip(transfers, step.sources, step.targets, strict=True):
            self.read((transfer.source, step.micro_batch), source)
            self.write(target, _Array((transfer.target, step.micro_batch)))

    def drop(self, slot: int) -> None:
        if slot not in self.held:
            raise self.error(f"an array in slot {slot}, to free", "nothing")
        del self.held[slot]

    def read(self, instance: Instance, slot: int) -> None:
        wanted = _final(self.flow, instance)
        if self.held.get(slot) != wanted:
            raise self.error(f"{self.name(instance)} in slot {slot}", _held_text(self.program, self.held.get(slot)))

    def write(self, slot: int, array: _Array) -> None:
        if slot in self.held:
            raise self.error(
                f"slot {slot} empty, for {self.name(array.instance)}", _held_text(self.program, self.held[slot])
            )
        self.held[slot] = array

    def check_number(self, what: str, expected: int, got: int) -> None:
        if expected != got:
            raise self.error(f"{expected} {what}", str(got))

    def name(self, instance: Instance) -> str:
        return f"{self.program.pipeline.buffers[instance[0]].name} of micro-batch {instance[1]}"

    def error(self, expected: str, got: str) -> ScheduleError:
        tasks = self.program.pipeline.tasks
        name = f" of {tasks[self.step.task].name}" if isinstance(self.step, Run) else ""
        return _error(f"instruction {self.at}, {type(self.step).__name__}{name}", expected, got)


def _final(flow: Dataflow, instance: Instance) -> _Array:
    """What all readers of an array but its updates expect."""
    updaters = flow.updaters.get(instance[0], ())
    return _Array(instance, len(updaters) * flow.num_microbatches)


def _check_order(program: Program, schedule: PipelineSchedule) -> None:
    """(6)"""
    tasks = program.pipeline.tasks
    there: list[list[Node]] = [[] for _ in range(max(num_meshes(program), schedule.num_groups))]
    for step in program.instructions:
        for task, micro_batch in runs_of(step):
            if tasks[task].kind.repeats:
                there[tasks[task].mesh].append((task, micro_batch))
    for mesh, wanted in enumerate(runs_of_mesh(program.pipeline, schedule)):
        for node, expected in zip(there[mesh], wanted, strict=True):
            if node != expected:
                texts = [f"{tasks[t].name} of micro-batch {i}" for t, i in (expected, node)]
                raise _error(f"order on mesh {mesh}", f"{texts[0]}, as schedule {schedule.name} has it", texts[1])


def _check_exactly_once(where: str, wanted: Collection[tuple[Any, ...]], there: Iterable[tuple[Any, ...]]) -> None:
    count = collections.Counter(there)
    missing, more = set(wanted) - set(count), {item: n for item, n in count.items() if n > 1 or item not in wanted}
    if missing:
        raise _error(
            where, f"all of {len(wanted)}", f"{len(missing)} missing, first {_item_text(min(missing, key=repr))}"
        )
    if more:
        item, n = next(iter(more.items()))
        raise _error(where, "each once and no others", f"{_item_text(item)} {n} times")


def _item_text(item: tuple[Any, ...]) -> str:
    return str(item) if isinstance(item, Slot) else f"number {item[0]} for micro-batch {item[1]}"


def _held_text(program: Program, array: _Array | None) -> str:
    if array is None:
        return "nothing"
    buffer, micro_batch = array.instance
    after = f" after {array.updates} updates" if array.updates else ""
    return f"{program.pipeline.buffers[buffer].name} of micro-batch {micro_batch}{after}"


def _slot_meshes(program: Program) -> Iterator[tuple[int, int]]:
    """(slot, mesh) of everything written."""
    pipeline = program.pipeline
    for b, slot in zip(pipeline.inputs, program.input_slots, strict=True):
        yield slot, pipeline.buffers[b].mesh
    for step in program.instructions:
        if isinstance(step, Run):
            yield from ((slot, pipeline.tasks[step.task].mesh) for slot in step.outputs)
        elif isinstance(step, Joined):
            yield from ((slot, pipeline.tasks[step.parts[0][0]].mesh) for slot in step.outputs)
        elif isinstance(step, Send):
            for t, slot in zip(step.transfers, step.targets, strict=True):
                yield slot, pipeline.buffers[pipeline.transfers[t].target].mesh


def _slots(program: Program) -> set[int]:
    found = {*program.input_slots, *program.output_slots}
    for step in program.instructions:
        if isinstance(step, Run | Joined):
            found |= {*step.inputs, *step.outputs}
        elif isinstance(step, Send):
            found |= {*step.sources, *step.targets}
        elif isinstance(step, Free):
            found |= {*step.slots}
    return found


def _error(where: str, expected: str, got: str) -> ScheduleError:
    hint = "a bug of whoever wrote the schedule, or of `emit`: please report it with the schedule's name and numbers"
    return ScheduleError(where=where, expected=expected, got=got, hint=hint)
