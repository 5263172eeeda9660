"""The timeline of a simulated program."""

from __future__ import annotations

from autopar.common.trace_events import DEVICES, LINKS, Timeline, TraceEvent
from autopar.runtime.pipeline.program import Joined, Program, Run, Send, runs_of
from autopar.runtime.simulation.simulator import Simulation


def timeline_of(simulation: Simulation, program: Program) -> Timeline:
    """What each mesh and each link does and when: "F 3" is the forward pass of micro-batch 3."""
    pipeline = program.pipeline
    links: dict[tuple[int, int], int] = {}
    events: list[TraceEvent] = []
    for instruction, start_s, end_s in zip(program.instructions, simulation.starts_s, simulation.ends_s, strict=True):
        if isinstance(instruction, Run | Joined):
            runs = [(pipeline.tasks[number], i) for number, i in runs_of(instruction)]
            name = " + ".join(f"{task.kind.value} {i}" if task.kind.repeats else task.name for task, i in runs)
            task = next((task for task, _ in runs if task.kind.repeats), runs[0][0])
            events.append(TraceEvent(DEVICES, task.mesh, name, task.kind.value, start_s, end_s, task.stage))
        elif isinstance(instruction, Send):
            transfers = [pipeline.transfers[t] for t in instruction.transfers]
            source, target = (pipeline.buffers[b] for b in (transfers[0].source, transfers[0].target))
            row = links.setdefault((source.mesh, target.mesh), len(links))
            name = f"send {instruction.micro_batch}" if source.repeats else "send"
            sent = sum(t.nbytes for t in transfers)
            events.append(TraceEvent(LINKS, row, name, "send", start_s, end_s, 0, sent))
    return Timeline(
        rows=tuple(f"mesh {mesh}" for mesh in range(len(simulation.busy_s))),
        links=tuple(f"mesh {a} to mesh {b}" for a, b in links),
        events=tuple(events),
        tracks={"bytes": simulation.bytes_over_time, "in flight": simulation.in_flight_over_time},
    )
