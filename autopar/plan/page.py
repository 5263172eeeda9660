"""The pages of a plan, of two plans side by side, of ways to run a step, and of batches that fit: HTML with its style
and its script inside, from the templates.

Everything that comes from the user's program is text: Jinja2 escapes it in the page, and the data of the script are
JSON in which no character can end the element that holds them.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
from markupsafe import Markup

from autopar.common.text import (
    text_of_bytes,
    text_of_flops,
    text_of_interval_s,
    text_of_number,
    text_of_part,
    text_of_s,
)
from autopar.common.trace_events import DEVICES, Timeline, TraceEvent
from autopar.plan import bench, modules, rivals, summary
from autopar.plan.comparison import Comparison
from autopar.plan.drawing import drawing_of, link_loads
from autopar.plan.fit_data import FitRow, fit_values
from autopar.plan.modules import NO_MODULE, CollectiveRow, ModuleCost
from autopar.plan.rivals import advice_and_notes
from autopar.plan.schema import MemoryHolder, MemoryKind, ModuleRow, PlanRecord
from autopar.plan.summary import StateGroup

# The values that the page of a plan shows, computed from its record. Numbers, not text: the template writes them.


# Layouts as text in pieces, so that each mesh axis in them can have its colour.

# A mesh axis, as it stands in a layout in text: `P("data", None)`.
_AXIS = re.compile(r'"([^"]*)"')


@dataclasses.dataclass(frozen=True, slots=True)
class Token:
    """A piece of a layout as text; `axis` is the mesh axis that it names, or empty."""

    text: str
    axis: str = ""


def tokens_of(text: str) -> tuple[Token, ...]:
    """A text with layouts in it (`P("data", None) @ P(None, None)`) in pieces, each axis one of its own."""
    pieces = enumerate(_AXIS.split(text))
    return tuple(Token(piece, piece if i % 2 else "") for i, piece in pieces if piece)


# The memory of a plan as its page shows it: who holds the peak, and how the bytes of a device change over the step.

CURVE_POINTS = 240


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GroupMemory:
    """A group of devices: bytes by purpose at its peak, largest first, and the most bytes in each part of the step."""

    name: str
    peak_bytes: int
    at_peak: tuple[tuple[MemoryKind, int], ...]
    curve: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPanel:
    """`highest` is the number of the group with the highest peak, whose `holders` are named.

    The curves are over the seconds of the step where it has stages, else over the program in its order.
    """

    groups: tuple[GroupMemory, ...]
    highest: int
    holders: tuple[MemoryHolder, ...]
    is_over_seconds: bool


def memory_panel(record: PlanRecord) -> MemoryPanel:
    """The memory of each group of devices."""
    predicted = record.predicted
    tracks = summary.timeline_of(record).tracks.get("bytes", ())
    step_s = predicted.step_time_s
    groups = []
    uses = zip(summary.group_names(record), predicted.peak_bytes, predicted.memory, strict=True)
    for number, (name, peak_bytes, use) in enumerate(uses):
        curve = in_parts(tracks[number], step_s, CURVE_POINTS) if number < len(tracks) else use.course
        kinds = tuple((kind, use.at_peak[kind]) for kind in MemoryKind if use.at_peak.get(kind))
        groups.append(GroupMemory(name=name, peak_bytes=peak_bytes, at_peak=kinds, curve=curve))
    highest = summary.fullest(record).number
    return MemoryPanel(
        groups=tuple(groups),
        highest=highest,
        holders=predicted.memory[highest].largest,
        is_over_seconds=record.pipeline is not None,
    )


def in_parts(steps: Sequence[tuple[float, int]], end_s: float, parts: int) -> tuple[int, ...]:
    """The most of a quantity in each of equal parts of a time, from (second, value from then on)."""
    if not steps or end_s <= 0:
        return ()
    most = [0] * parts
    for number, (start_s, value) in enumerate(steps):
        stop_s = steps[number + 1][0] if number + 1 < len(steps) else end_s
        begin = min(int(start_s / end_s * parts), parts - 1)
        for part in range(begin, min(int(stop_s / end_s * parts), parts - 1) + 1):
            most[part] = max(most[part], value)
    return tuple(most)


# The timeline in few bytes: names once, times in whole parts of the step, events by row.

# A step in this many parts: events are drawn to a hundredth of a pixel on a screen of 10,000.
PARTS = 1_000_000


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TimelineRow:
    """A row of the timeline. `events` are (name, start, duration) in numbers of the tables and parts of the step;
    `busy` is the part of the step in which something runs.
    """

    name: str
    is_link: bool
    events: tuple[tuple[int, int, int], ...]
    busy: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TimelineData:
    """`names` of events with their `categories`, which have colours."""

    step_s: float
    names: tuple[str, ...]
    categories: tuple[str, ...]
    rows: tuple[TimelineRow, ...]


def timeline_data(record: PlanRecord) -> TimelineData:
    """The timeline of a record. Events without a length are left out."""
    timeline, step_s = summary.timeline_of(record), record.predicted.step_time_s
    numbers: dict[tuple[str, str], int] = {}
    by_row: dict[tuple[bool, int], list[TraceEvent]] = {}
    for event in timeline.events:
        if event.end_s > event.start_s:
            by_row.setdefault((event.process != DEVICES, event.row), []).append(event)
            numbers.setdefault((event.name, event.category), len(numbers))
    rows = []
    for (is_link, row), events in sorted(by_row.items()):
        placed = tuple(_placed(event, numbers[event.name, event.category], step_s) for event in events)
        busy = sum(event.end_s - event.start_s for event in events) / step_s if step_s else 0.0
        rows.append(TimelineRow(name=_row_name(timeline, is_link, row), is_link=is_link, events=placed, busy=busy))
    names, categories = tuple(name for name, _ in numbers), tuple(category for _, category in numbers)
    return TimelineData(step_s=step_s, names=names, categories=categories, rows=tuple(rows))


def _row_name(timeline: Timeline, is_link: bool, row: int) -> str:
    return timeline.links[row] if is_link else timeline.rows[row]


def _placed(event: TraceEvent, name: int, step_s: float) -> tuple[int, int, int]:
    start = round(event.start_s / step_s * PARTS) if step_s else 0
    stop = round(event.end_s / step_s * PARTS) if step_s else 0
    return name, start, stop - start


# The modules of a step as a tree, layers that are alike as one, with what each costs on one device.


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModuleNode:
    """A module, or layers that are alike, in the order of a walk through the tree.

    Attributes:
        path: The name without numbers, unique among the rows.
        name: Its last part.
        depth: Modules around it.
        has_children: Whether the next row is inside of it.
        cost: Of it and of all inside.
        share: Of the computing and waiting of the whole step.
        saved_bytes: What its backward pass reads, of one micro-batch, with all inside.
        splits: Layouts of its matrix products: one list, or several where layers or stages differ.
        axes: The mesh axes that split them.
        collectives: Its own.
        instances: The modules that the row stands for.
    """

    path: str
    name: str
    depth: int
    has_children: bool
    cost: ModuleCost
    share: float
    saved_bytes: float
    splits: tuple[tuple[str, ...], ...]
    axes: tuple[str, ...]
    collectives: tuple[CollectiveRow, ...]
    instances: tuple[ModuleRow, ...]


@dataclasses.dataclass(slots=True, kw_only=True)
class _Building:
    """A node while its rows are added."""

    children: dict[str, _Building] = dataclasses.field(default_factory=dict)
    rows: list[ModuleRow] = dataclasses.field(default_factory=list)


def module_tree(record: PlanRecord) -> tuple[ModuleNode, ...]:
    """The modules in the order of the step, each followed by those inside of it."""
    root = _Building()
    for row in record.modules:
        at = root
        for part in (summary.folded(row.module) or modules.NO_MODULE).split("/"):
            at = at.children.setdefault(part, _Building())
        at.rows.append(row)
    total_s = modules.cost_of(record, record.modules).seconds
    return tuple(_nodes(record, root, (), total_s))


def _nodes(record: PlanRecord, building: _Building, path: tuple[str, ...], total_s: float) -> list[ModuleNode]:
    out: list[ModuleNode] = []
    for name, child in building.children.items():
        inside = _nodes(record, child, (*path, name), total_s)
        out += [_node(record, child, (*path, name), total_s), *inside]
    return out


def _rows_within(building: _Building) -> list[ModuleRow]:
    return [*building.rows, *(row for child in building.children.values() for row in _rows_within(child))]


def _node(record: PlanRecord, building: _Building, path: tuple[str, ...], total_s: float) -> ModuleNode:
    within = _rows_within(building)
    cost = modules.cost_of(record, within)
    splits = tuple(dict.fromkeys(row.splits for row in building.rows if row.splits))
    pieces = (token.axis for split in splits for line in split for token in tokens_of(line))
    return ModuleNode(
        path="/".join(path),
        name=path[-1],
        depth=len(path) - 1,
        has_children=bool(building.children),
        cost=cost,
        share=cost.seconds / total_s if total_s else 0.0,
        saved_bytes=sum(row.saved_bytes for row in within),
        splits=splits,
        axes=tuple(sorted({axis for axis in pieces if axis})),
        collectives=modules.collectives_of(record, building.rows),
        instances=tuple(building.rows),
    )


# Candidates in the chart near the top of the page; the table behind it has all.
BARS_SHOWN = 8


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AxisRow:
    """A mesh axis: its name, its sizes and roles on the stages."""

    name: str
    sizes: tuple[int, ...]
    roles: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ArgumentRow:
    """Arguments that are alike. `tokens` is their layout, `why_whole` why it splits them less than others are split."""

    group: StateGroup
    pattern: str
    array: str
    tokens: tuple[Token, ...]
    why_whole: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BatchFacts:
    """The largest array of the batch, and how many tokens or examples that is; 0 where arrays differ in it."""

    array: str = ""
    number: int = 0
    unit: str = "examples"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CandidateRow:
    """A way to run the step that was weighed. `relative` is its time over the plan's."""

    source: str
    text: str
    step_time_s: float | None
    peak_bytes: int | None
    why: str
    is_plan: bool = False
    relative: float | None = None


def report_values(record: PlanRecord) -> dict[str, Any]:
    """The values of the page of a plan by the names that its template has for them."""
    full, candidates = summary.fullest(record), candidate_rows(record)
    return {
        "record": record,
        "where": summary.where(record.cluster),
        "step_time_s": record.predicted.step_time_s,
        "peak_bytes": full.peak_bytes,
        "limit_bytes": full.limit_bytes,
        "sent_bytes": sum(c.sent_bytes for c in modules.collectives_of(record, record.modules)),
        "host_bytes": max(record.predicted.host_bytes, default=0),
        "batch": batch_facts(record),
        "num_parameters": summary.num_parameters(record),
        "interval": summary.interval_text(record),
        "advantage": rivals.advantage(record),
        "tensor": rivals.tensor_parallelism(record),
        "axes": axis_rows(record),
        "stages": summary.stage_groups(record),
        "drawing": drawing_of(record),
        "loads": link_loads(record),
        "modules": module_tree(record),
        "costliest": modules.costliest(record),
        "arguments": argument_rows(record),
        "memory": memory_panel(record),
        "available": summary.memory_text(record),
        "timeline": timeline_data(record),
        "candidates": candidates,
        "bars": fastest(candidates),
        "notes": advice_and_notes(record),
    }


def axis_rows(record: PlanRecord) -> tuple[AxisRow, ...]:
    """The mesh axes that some stage has, with each size and role once."""
    stages = range(summary.num_stages(record))
    sizes: dict[str, dict[int, None]] = {}
    roles: dict[str, dict[str, None]] = {}
    for stage in stages:
        mesh = summary.stage_mesh(record, stage)
        for name, size, role in zip(mesh.axis_names, mesh.axis_sizes, summary.axis_roles(record, stage), strict=True):
            sizes.setdefault(name, {})[size] = None
            if role:
                roles.setdefault(name, {})[role] = None
    return tuple(
        AxisRow(name=name, sizes=tuple(found), roles=tuple(roles.get(name, ()))) for name, found in sizes.items()
    )


def candidate_rows(record: PlanRecord) -> tuple[CandidateRow, ...]:
    """The plan, and every way that was weighed beside it or left out, by time; those without a time last."""
    plan_s = record.predicted.step_time_s
    rows = [
        CandidateRow(
            source="the plan",
            text=rivals.chosen_recipe(record) or summary.sentence(record),
            step_time_s=plan_s,
            peak_bytes=summary.fullest(record).peak_bytes,
            why="",
            is_plan=True,
            relative=1.0 if plan_s else None,
        )
    ]
    for lost in record.rejected:
        # What the mesh of a program splits, where that was worked out: a mesh alone says nothing of it.
        is_split = lost.axis_roles and not lost.name
        splits = f": {summary.splits_text(lost.axis_sizes, lost.axis_roles)}" if is_split else ""
        times = (lost.step_time_s, lost.peak_bytes)
        rows.append(_candidate(lost.source, f"{lost.text}{splits}", times, lost.why, plan_s))
    return tuple(sorted(rows, key=_by_time))


def fastest(candidates: Sequence[CandidateRow]) -> tuple[CandidateRow, ...]:
    """The plan and the candidates next to it in time, as many as a chart holds."""
    timed = [row for row in candidates if row.step_time_s]
    others = sorted((row for row in timed if not row.is_plan), key=_by_time)[: BARS_SHOWN - 1]
    return tuple(sorted([*(row for row in timed if row.is_plan), *others], key=lambda row: row.step_time_s or 0.0))


def batch_facts(record: PlanRecord) -> BatchFacts:
    """The size of the batch: tokens are the elements of the largest array of whole numbers by example and position."""
    arrays = [value for value in record.arguments if value.kind == "batch"]
    if not arrays:
        return BatchFacts()
    largest = max(arrays, key=lambda value: math.prod(value.shape))
    array = summary.array_text(largest.dtype, largest.shape)
    tokens = [math.prod(v.shape) for v in arrays if len(v.shape) == 2 and v.dtype.startswith(("int", "uint"))]
    if tokens:
        return BatchFacts(array=array, number=max(tokens), unit="tokens")
    examples = {value.shape[0] for value in arrays if value.shape}
    return BatchFacts(array=array, number=examples.pop() if len(examples) == 1 else 0)


def argument_rows(record: PlanRecord) -> tuple[ArgumentRow, ...]:
    """The arguments, those that are alike as one row."""
    groups = summary.state_groups(record)
    state = [group for group in groups if group.kind == "state"]
    most = max((group.shards for group in state), default=1)
    # What is split the most, of the largest such group: state that takes less of a device is not worth a question.
    split_bytes = max((group.device_bytes for group in state if group.shards == most), default=0)
    asked = [group for group in state if group.shards < most and group.device_bytes >= split_bytes]
    return tuple(
        ArgumentRow(
            group=group,
            pattern=summary.path_of(group.name),
            array=summary.array_text(group.dtype, group.shape),
            tokens=tokens_of(group.lies),
            why_whole=_why_whole(record, group) if group in asked else "",
        )
        for group in groups
    )


def _why_whole(record: PlanRecord, group: StateGroup) -> str:
    """Why state is split less than other state: no dimension divides, or the search counts no gain. Not of a pipeline,
    of which each stage has a mesh of its own, and the latter not where a recipe or pins have decided.
    """
    if record.pipeline is not None or not group.shape:
        return ""
    mesh = summary.stage_mesh(record, 0)
    used = {axis for axes in group.dims for axis in axes}
    free = [axis for axis in range(len(mesh.axis_sizes)) if axis not in used]
    local = [n // math.prod(mesh.axis_sizes[a] for a in axes) for n, axes in zip(group.shape, group.dims, strict=True)]
    could = [(dim, axis) for axis in free for dim, n in enumerate(local) if n % mesh.axis_sizes[axis] == 0]
    names = " and ".join(f"{mesh.axis_names[axis]} ({mesh.axis_sizes[axis]})" for axis in free)
    if not could:
        return f"no dimension divides by {names}"
    if record.recipe or record.pinned is not None or rivals.chosen_recipe(record):
        return ""
    dim, axis = could[0]
    divides = f"dimension {dim} divides by {mesh.axis_names[axis]} ({mesh.axis_sizes[axis]})"
    price = f"plan.explain({summary.path_of(group.name)!r}, alternatives=3) prices it"
    return f"{divides}, by the search's costs without a gain: {price}"


def _by_time(row: CandidateRow) -> tuple[bool, bool, float]:
    return not row.is_plan, row.step_time_s is None, row.step_time_s or 0.0


def _candidate(source: str, text: str, numbers: Sequence[float | None], why: str, plan_s: float) -> CandidateRow:
    step_s, peak_bytes = numbers
    return CandidateRow(
        source=source,
        text=text or "all of them",
        step_time_s=step_s,
        peak_bytes=None if peak_bytes is None else int(peak_bytes),
        why=why,
        relative=step_s / plan_s if step_s is not None and plan_s else None,
    )


# The colours of categories of events, as the script has them, and what they mean.
_CATEGORIES = {
    "F": ("forward", "forward"),
    "B": ("backward", "backward"),
    "W": ("weight", "gradients of weights"),
    "compute": ("compute", "computation"),
    "send": ("send", "communication"),
}
_OTHERS = ("other", "once a step")
SHORTEST_S = 1e-6
# What could end a script element, or a line of JavaScript, in JSON.
_UNSAFE = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}


def page_of(record: PlanRecord) -> str:
    """The page of a plan."""
    return _render("report.html.j2", report_values(record))


def comparison_of(record: PlanRecord, other: PlanRecord) -> str:
    """The page of two plans of a step side by side."""
    return _render("compare.html.j2", {"found": Comparison(plan=record, other=other)})


def fitting_of(step: str, rows: Sequence[FitRow], multiples: Mapping[str, int]) -> str:
    """The page of `autopar.fit`."""
    return _render("fit.html.j2", fit_values(step, rows, multiples))


def bench_of(step: str, rows: Sequence[bench.BenchRow]) -> str:
    """The page of `autopar.bench`."""
    clusters = bench.by_cluster(rows)
    records = [way.record for cluster in clusters for way in cluster.ways if way.record is not None]
    values = {
        "step": step,
        "clusters": clusters,
        # The parts of steps in the order of their colours.
        "names": list(dict.fromkeys(share.name for record in records for share in summary.shares(record))),
        "is_measured": any(row.measured_s is not None for row in rows),
        "made_on": datetime.date.today().isoformat(),
    }
    return _render("bench.html.j2", values)


def _render(template: str, values: Mapping[str, Any]) -> str:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("autopar.plan"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "s": time_text,
        "b": text_of_bytes,
        "interval": text_of_interval_s,
        "flop": text_of_flops,
        "pct": text_of_part,
        "number": text_of_number,
        "tokens": tokens_of,
        "hue": hue,
        "curve": curve_points,
        "legend": timeline_legend,
        "purpose": purpose_number,
        "ticks": round_ticks,
        "timeline": timeline_json,
    }
    return environment.get_template(template).render(values, summary=summary, bench=bench, no_module=NO_MODULE)


def time_text(seconds: float) -> str:
    """`3.2 ms`; less than a microsecond, which no prediction resolves, is `< 1 us`."""
    return "< 1 us" if 0 < seconds < SHORTEST_S else text_of_s(seconds)


def hue(stage: int, groups: int) -> int:
    """The hue of a stage's colour, so that neighbours differ and the first and the last do too."""
    return round(205 + 290 * (stage % groups) / max(groups, 1)) % 360


def curve_points(curve: tuple[int, ...], top: float, width: float, height: float) -> str:
    """The points of an SVG polyline in steps, with `top` bytes at the upper edge."""
    points = []
    for i, value in enumerate(curve):
        y = height * (1 - value / top) if top else height
        points += [f"{width * i / len(curve):.1f},{y:.1f}", f"{width * (i + 1) / len(curve):.1f},{y:.1f}"]
    return " ".join(points)


def round_ticks(top: float) -> list[float]:
    """Numbers from 0 for an axis that ends at `top`: multiples of 1, 2 or 5 times a power of ten, four to eight."""
    if top <= 0:
        return [0.0]
    power = 10.0 ** math.floor(math.log10(top))
    step = next(power * part for part in (2.0, 1.0, 0.5, 0.2) if top / (power * part) >= 3)
    return [number * step for number in range(math.floor(top / step) + 1)]


def purpose_number(kind: MemoryKind) -> int:
    """The number of the colour that a purpose of memory has on all pages."""
    return list(MemoryKind).index(kind)


def timeline_legend(categories: Sequence[str]) -> list[tuple[str, str]]:
    """(colour, meaning) of the categories of events that there are, as the script colours them."""
    return list(dict.fromkeys(_CATEGORIES.get(category, _OTHERS) for category in categories))


def timeline_json(timeline: TimelineData) -> Markup:
    """The data of the timeline, for a script element. Starts are counted from the start before, to be short."""
    rows: list[dict[str, Any]] = []
    for row in timeline.rows:
        flat, last = [], 0
        for name, start, duration in sorted(row.events, key=lambda event: event[1]):
            flat += [name, start - last, duration]
            last = start
        rows.append({"name": row.name, "link": row.is_link, "busy": round(row.busy, 4), "events": flat})
    value = {
        "step_s": timeline.step_s,
        "parts": PARTS,
        "names": timeline.names,
        "categories": timeline.categories,
        "rows": rows,
    }
    return safe_json(value)


def safe_json(value: Any) -> Markup:
    """JSON that may stand in a script element: what it says is unchanged, and nothing in it ends the element."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    return Markup("".join(_UNSAFE.get(character, character) for character in text))
