"""A step as it ran beside the step that the plan predicted: lanes, modules, and both in one timeline.

JAX's profiler records one event for each run of an HLO operation. The compiled program's text says which collective or
computation an operation is, and of which of the user's modules.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import re
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from autopar.common.text import text_of_s
from autopar.common.trace_events import Timeline, TraceEvent, chrome_trace
from autopar.execute import parse
from autopar.frontend.build_graph import module_path, split_stack
from autopar.hardware.collective_cost import CollectiveKind
from autopar.plan import summary
from autopar.plan.schema import PlanRecord

# XLA's options for programs whose runs are recorded, by JAX's name of the backend. A kernel in a CUDA graph bears the
# name of the graph and not of its operation, so that programs for a GPU are without graphs.
RECORDED_PROGRAM_OPTIONS: Mapping[str, Mapping[str, str]] = {"gpu": {"xla_gpu_enable_command_buffer": ""}}

_DEVICE_PLANE = re.compile(r"^/device:\w+:(\d+)")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeviceEvent:
    """A run of an operation. `device` counts the devices of this process; `run` tells apart runs of one program."""

    device: int
    program: str
    run: int
    operation: str
    start_s: float
    end_s: float


@contextlib.contextmanager
def recorded() -> Iterator[Callable[[], list[DeviceEvent]]]:
    """Records what runs inside; the function returns the events once the context is left."""
    with tempfile.TemporaryDirectory(prefix="autopar-profile-") as folder:
        events: list[DeviceEvent] = []
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0
        jax.profiler.start_trace(folder, profiler_options=options)
        try:
            yield lambda: events
        finally:
            jax.profiler.stop_trace()
            with warnings.catch_warnings():
                # Of classes of jaxlib without a module's name (0.12): as an error the warning would end the process.
                warnings.simplefilter("ignore", DeprecationWarning)
                for path in sorted(Path(folder).rglob("*.xplane.pb")):
                    events += events_of(jax.profiler.ProfileData.from_file(str(path)))


def events_of(profile: Any) -> list[DeviceEvent]:
    """The events of HLO operations, by their starts.

    GPUs and TPUs have a plane each; CPU devices share the host's plane, and their events bear the device's number.
    """
    found = []
    for plane in profile.planes:
        at = _DEVICE_PLANE.match(plane.name)
        for line in plane.lines:
            for event in line.events:
                stats = dict(event.stats)
                if "hlo_op" not in stats:
                    continue
                start_s = event.start_ns * 1e-9
                found.append(
                    DeviceEvent(
                        device=int(at[1]) if at else int(stats.get("device_ordinal", 0)),
                        program=str(stats.get("hlo_module", "")),
                        run=int(stats.get("run_id", 0)),
                        operation=str(stats["hlo_op"]),
                        start_s=start_s,
                        end_s=start_s + event.duration_ns * 1e-9,
                    )
                )
    return sorted(found, key=lambda e: (e.start_s, e.device))


COMPUTE, HOST_COPY = "compute", "copy to or from the host"
_MODULE = re.compile(r"^HloModule ([\w.\-]+)", re.MULTILINE)
# Operations that only hold others, which have events of their own.
_CONTAINERS = ("while", "conditional", "call")
_OURS = re.compile(r"^(?:shard_map|branch_\d+_fun)$")
_KINDS = {str(kind): str(kind) for kind in CollectiveKind}
_COLLECTIVES = _KINDS | {f"{name}-{end}": name for name in _KINDS for end in ("start", "done")}
_BETWEEN_STAGES = ("send", "recv", "send-done", "recv-done")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProgramOperation:
    """`kind` is COMPUTE, HOST_COPY or the name of a collective; `module` is empty for work of no module."""

    kind: str
    module: str


def operations_of(text: str) -> Mapping[tuple[str, str], ProgramOperation]:
    """The operations of compiled programs, by (program, operation), without those that only hold others."""
    found = {}
    starts = [match.start() for match in _MODULE.finditer(text)]
    for start, end in zip(starts, [*starts[1:], len(text)], strict=True):
        name = _MODULE.match(text[start:end])
        assert name is not None, "the text begins with the header"
        for computation in parse.parse(text[start:end]).computations.values():
            for instruction in computation.instructions.values():
                if instruction.opcode not in _CONTAINERS:
                    found[name[1], instruction.name] = ProgramOperation(
                        kind=_kind(instruction.opcode), module=module_of(instruction.op_name)
                    )
    return found


def module_of(op_name: str) -> str:
    """The user's module in JAX's path of an operation: `jit(step)/jvp(M)/layer0/dot_general` is of `M/layer0`."""
    parts = split_stack(op_name)
    return module_path("/".join(part for part in parts[1:-1] if not _OURS.match(part)))


def _kind(opcode: str) -> str:
    if opcode in _BETWEEN_STAGES:
        return HOST_COPY
    return _COLLECTIVES.get(opcode, COMPUTE)


ROWS_SHOWN = 10
Span = tuple[float, float]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """Seconds of a step that a device spends with something, as the plan predicted and as they were."""

    name: str
    predicted_s: float | None
    measured_s: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModuleTime:
    """Seconds that a device spends with a module's computation, or with its collectives of one kind."""

    module: str
    kind: str
    predicted_s: float
    measured_s: float

    @property
    def difference_s(self) -> float:
        return self.measured_s - self.predicted_s


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepProfile:
    """A measured step beside its plan.

    `results` are what the step returned. `lanes` and `modules` are means over the devices of this process; modules are
    in the order of their differences, largest first. `predicted` and `measured` are timelines.
    """

    results: Any
    step: str
    lanes: tuple[Lane, ...]
    modules: tuple[ModuleTime, ...]
    predicted: Timeline
    measured: Timeline

    def save(self, path: str | Path) -> None:
        """Writes both timelines as one file for https://ui.perfetto.dev, predicted and measured lanes by name."""
        events = []
        for number, (title, timeline) in enumerate((("predicted", self.predicted), ("measured", self.measured))):
            for event in chrome_trace(timeline, first_process=1 + 2 * number)["traceEvents"]:
                if event["name"] == "process_name":
                    event["args"] = {"name": f"{title} {event['args']['name']}"}
                events.append(event)
        Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))

    def to_dict(self) -> dict[str, Any]:
        """Lanes and modules as values for JSON."""
        return {
            "step": self.step,
            "lanes": [dataclasses.asdict(lane) for lane in self.lanes],
            "modules": [dataclasses.asdict(module) for module in self.modules],
        }

    def __str__(self) -> str:
        lanes = Table("lane", "predicted", "measured", title=f"Profile of {self.step}", title_justify="left")
        for lane in self.lanes:
            predicted = "" if lane.predicted_s is None else text_of_s(lane.predicted_s)
            lanes.add_row(lane.name, predicted, text_of_s(lane.measured_s))
        rows = Table("module", "", "predicted", "measured", title="The largest differences", title_justify="left")
        for row in self.modules[:ROWS_SHOWN]:
            rows.add_row(row.module or "(no module)", row.kind, text_of_s(row.predicted_s), text_of_s(row.measured_s))
        console = Console(width=100, record=True, file=io.StringIO(), highlight=False, markup=False)
        console.print(lanes)
        console.print(rows)
        return "\n".join(line.rstrip() for line in console.export_text().splitlines())


def profiled(record: PlanRecord, text: str, step: Callable[..., Any], args: Sequence[Any]) -> StepProfile:
    """Runs a step under the profiler once its arguments are there. `text` is that of its compiled programs."""
    jax.block_until_ready(args)
    with recorded() as events:
        results = step(*args)
        jax.block_until_ready(results)
    return step_profile(record, operations_of(text), events(), results)


def step_profile(
    record: PlanRecord,
    operations: Mapping[tuple[str, str], ProgramOperation],
    events: Sequence[DeviceEvent],
    results: Any,
) -> StepProfile:
    """What the events of one step show. Events of other programs, and of operations that hold others, are left out."""
    known = [(e, operations[e.program, e.operation]) for e in events if (e.program, e.operation) in operations]
    return StepProfile(
        results=results,
        step=record.step,
        lanes=_lanes(record, known),
        modules=_modules(record, known),
        predicted=summary.timeline_of(record),
        measured=_timeline(known),
    )


Known = Sequence[tuple[DeviceEvent, ProgramOperation]]


def _lanes(record: PlanRecord, known: Known) -> tuple[Lane, ...]:
    predicted = record.predicted
    devices = sorted({e.device for e, _ in known})
    compute, collectives, either, whole = [], [], [], []
    for device in devices:
        own = [(e, op) for e, op in known if e.device == device]
        compute.append(length_s(e for e, op in own if op.kind == COMPUTE))
        collectives.append(length_s(e for e, op in own if op.kind != COMPUTE))
        either.append(length_s(e for e, _ in own))
    if known:
        whole.append(max(e.end_s for e, _ in known) - min(e.start_s for e, _ in known))
    step_s, compute_s, collectives_s, busy_s = map(_mean, (whole, compute, collectives, either))
    exposed_s = summary.exposed_s(record, record.modules)
    return (
        Lane(name="step", predicted_s=predicted.step_time_s, measured_s=step_s),
        Lane(name="computation", predicted_s=predicted.compute_time_s, measured_s=compute_s),
        Lane(name="collectives", predicted_s=predicted.collective_time_s, measured_s=collectives_s),
        Lane(name="collectives that nothing hides", predicted_s=exposed_s, measured_s=busy_s - compute_s),
        Lane(
            name="no work on a device",
            predicted_s=predicted.bubble_fraction * predicted.step_time_s,
            measured_s=step_s - busy_s,
        ),
    )


def _modules(record: PlanRecord, known: Known) -> tuple[ModuleTime, ...]:
    predicted: dict[tuple[str, str], float] = {}
    for row in record.modules:
        for kind, seconds in [(COMPUTE, row.compute_time_s), *((c.kind, c.time_s) for c in row.collectives)]:
            predicted[row.module, kind] = predicted.get((row.module, kind), 0.0) + seconds
    spans: dict[tuple[str, str], dict[int, list[Span]]] = {}
    for event, op in known:
        by_device = spans.setdefault((op.module, op.kind), {})
        by_device.setdefault(event.device, []).append((event.start_s, event.end_s))
    measured = {key: _mean([_length(s) for s in by_device.values()]) for key, by_device in spans.items()}
    keys = dict.fromkeys([*predicted, *measured])
    rows = [
        ModuleTime(module=m, kind=k, predicted_s=predicted.get((m, k), 0.0), measured_s=measured.get((m, k), 0.0))
        for m, k in keys
    ]
    return tuple(sorted(rows, key=lambda row: -abs(row.difference_s)))


def _timeline(known: Known) -> Timeline:
    """A row for the computation of each device, and a link's for its collectives. The first event starts at 0."""
    start_s = min((e.start_s for e, _ in known), default=0.0)
    devices = sorted({e.device for e, _ in known})
    runs = _runs(event for event, _ in known)
    events = [
        TraceEvent(
            process=0 if op.kind == COMPUTE else 1,
            row=devices.index(event.device),
            name=(op.module or event.operation) if op.kind == COMPUTE else f"{op.kind} {op.module}".strip(),
            category=_task(event, runs[event.program, event.device]),
            start_s=event.start_s - start_s,
            end_s=event.end_s - start_s,
        )
        for event, op in known
    ]
    names = tuple(f"device {device}" for device in devices)
    return Timeline(rows=names, links=names, events=tuple(events))


def _runs(events: Iterable[DeviceEvent]) -> dict[tuple[str, int], list[int]]:
    """The runs of each program on each device, in their order: of a pipeline's task those of the micro-batches."""
    found: dict[tuple[str, int], list[int]] = {}
    for event in sorted(events, key=lambda e: e.start_s):
        runs = found.setdefault((event.program, event.device), [])
        if event.run not in runs:
            runs.append(event.run)
    return found


def _task(event: DeviceEvent, runs: Sequence[int]) -> str:
    """`F of stage 0, micro-batch 2`; only the program where it runs once."""
    name = event.program.removeprefix("jit_").replace("_", " ")
    return f"{name}, micro-batch {runs.index(event.run)}" if len(runs) > 1 else name


def length_s(events: Iterable[DeviceEvent]) -> float:
    """Seconds in which any of these events of one device ran."""
    return _length((event.start_s, event.end_s) for event in events)


def _length(spans: Iterable[Span]) -> float:
    """The length of the union of intervals."""
    total = 0.0
    end = float("-inf")
    for start_s, end_s in sorted(spans):
        total += max(0.0, end_s - max(start_s, end))
        end = max(end, end_s)
    return total


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
