"""A simulated step as a trace that Perfetto and chrome://tracing show (the Trace Event Format of Chrome).

A row for each mesh with its tasks, "F 3" the forward pass of micro-batch 3; a row for each link with its Sends; and
for each mesh a track with the bytes on one of its devices and one with what is in flight.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .program import Program, Run, Send, TaskKind
from .simulator import Simulation

_MESHES, _LINKS = 0, 1
_US = 1e6
# Names of Chrome's palette, so that passes can be told apart at a glance.
_COLOURS = {
    TaskKind.BEFORE: "grey",
    TaskKind.FORWARD: "thread_state_running",
    TaskKind.BACKWARD: "thread_state_runnable",
    TaskKind.WEIGHT: "thread_state_iowait",
    TaskKind.AFTER: "grey",
}


def trace_events(simulation: Simulation, program: Program) -> dict[str, Any]:
    """The trace as the value to be written as JSON; times in microseconds."""
    pipeline = program.pipeline
    links: dict[tuple[int, int], int] = {}
    events: list[dict[str, Any]] = []
    for at, step in enumerate(program.instructions):
        span = {"ts": simulation.starts_s[at] * _US, "dur": (simulation.ends_s[at] - simulation.starts_s[at]) * _US}
        if isinstance(step, Run):
            task = pipeline.tasks[step.task]
            repeats = task.kind.repeats
            events.append(
                {
                    "name": f"{task.kind.value} {step.micro_batch}" if repeats else task.name,
                    "ph": "X",
                    "pid": _MESHES,
                    "tid": task.mesh,
                    "cat": task.kind.value,
                    "cname": _COLOURS[task.kind],
                    "args": {"task": task.name, "stage": task.stage, "instruction": at},
                    **span,
                }
            )
        elif isinstance(step, Send):
            transfers = [pipeline.transfers[t] for t in step.transfers]
            link = (pipeline.buffers[transfers[0].source].mesh, pipeline.buffers[transfers[0].target].mesh)
            repeats = pipeline.buffers[transfers[0].source].repeats
            events.append(
                {
                    "name": f"send {step.micro_batch}" if repeats else "send",
                    "ph": "X",
                    "pid": _LINKS,
                    "tid": links.setdefault(link, len(links)),
                    "cat": "send",
                    "args": {
                        "buffers": [pipeline.buffers[t.source].name for t in transfers],
                        "bytes": sum(t.nbytes for t in transfers),
                        "instruction": at,
                    },
                    **span,
                }
            )
    names = [_name("process_name", _MESHES, 0, "meshes"), _name("process_name", _LINKS, 0, "links")]
    names += [_name("thread_name", _MESHES, mesh, f"mesh {mesh}") for mesh in range(len(simulation.busy_s))]
    names += [_name("thread_name", _LINKS, row, f"mesh {a} to mesh {b}") for (a, b), row in links.items()]
    tracks = {"bytes": simulation.bytes_over_time, "in flight": simulation.in_flight_over_time}
    counters = [
        {"name": f"{what}, mesh {mesh}", "ph": "C", "pid": _MESHES, "ts": when * _US, "args": {what: value}}
        for what, each in tracks.items()
        for mesh, steps in enumerate(each)
        for when, value in steps
    ]
    return {"traceEvents": [*names, *events, *counters], "displayTimeUnit": "ms"}


def write_trace(path: str | Path, simulation: Simulation, program: Program) -> None:
    """Writes the trace to a file, to be opened at https://ui.perfetto.dev."""
    Path(path).write_text(json.dumps(trace_events(simulation, program)))


def _name(what: str, process: int, row: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": process, "tid": row, "args": {"name": name}}
