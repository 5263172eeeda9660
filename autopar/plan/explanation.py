"""Why a module or an argument lies as it does: its layout in words, who holds what, collectives, what binds it.

Other layouts of an argument are pinned, and the step is planned anew around each.
"""

from __future__ import annotations

import dataclasses
import difflib
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from autopar.common.paths import matches, parts_of, unfolded
from autopar.common.text import PLAIN, TextFormat, text_of_bytes, text_of_count, text_of_s
from autopar.errors import AutoparError, InvalidArgumentError, MemoryLimitError, UnsupportedError
from autopar.hardware import mesh_links
from autopar.ir.layout import Layout, LogicalMesh, axes_text, enumerate_layouts
from autopar.ir.pins import Pin, Pins
from autopar.plan import summary
from autopar.plan.comparison import Comparison
from autopar.plan.modules import NO_MODULE
from autopar.plan.options import PlanRequest
from autopar.plan.schema import ModuleRow, PlannedValue, PlanRecord

NEAREST_SHOWN = 5
# Of a value: parts that are named one by one; and of the arguments that are asked for, those that are drawn.
PARTS_SHOWN, DRAWN = 8, 3
# Of the memory limit: a peak above it leaves no room for whole copies of what is split.
NEARLY_FULL = 0.95
# Layouts that are planned for at most, those that differ in the fewest dimensions first.
MOST_PLANNED = 8
SHOWN = 3  # arguments, in an error


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A part of an array, as Python slices it, and the devices that hold it."""

    indices: str
    devices: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ExplainedValue:
    """An argument or result: `lies` is its layout in words, `pieces` which device holds which part."""

    path: str
    dtype: str
    shape: tuple[int, ...]
    kind: str
    layout: str
    lies: str
    device_bytes: int
    pieces: tuple[Piece, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """Another layout of an argument, with all else searched for anew. `why` says where its plan loses, or why it has
    none.
    """

    layout: str
    lies: str
    step_time_s: float | None
    peak_bytes: int | None
    why: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """What is called by a name in a plan. `alternatives` are other ways for the first of the values, the best first."""

    values: tuple[ExplainedValue, ...]
    modules: tuple[ModuleRow, ...]
    binds: tuple[str, ...]
    step_time_s: float
    alternatives: tuple[Alternative, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The explanation as plain values, as `json.dumps` takes them."""
        return msgspec.to_builtins(self)

    def text(self, text_format: TextFormat = PLAIN) -> str:
        """The explanation in lines."""
        lines = _of_values(_without_tied_results(self.values)) + _of_modules(self.modules)
        lines += [f"binds: {text}" for text in self.binds]
        for other in self.alternatives:
            lies = f"instead {other.lies}, {other.layout}"
            if other.step_time_s is None:
                lines.append(f"{lies}: {other.why}")
            else:
                more_s = other.step_time_s - self.step_time_s
                lines.append(
                    f"{lies}: step {text_of_s(other.step_time_s)} ({text_of_s(abs(more_s))} "
                    f"{'more' if more_s >= 0 else 'less'}), peak {text_of_bytes(other.peak_bytes or 0)}; {other.why}"
                )
        return text_format.broken(lines)

    __str__ = text


def explanation(record: PlanRecord, what: str) -> Explanation:
    """Everything about the modules and values whose path contains `what`, as it is or as tables fold it, or that it
    names as a pattern (`autopar.common.paths`).

    Raises: InvalidArgumentError where there is none.
    """
    values, modules = values_called(record, what), _modules_called(record, what)
    if not values and not modules:
        raise _nothing_called(record, what)
    return Explanation(
        values=tuple(_explained(record, value) for value in values),
        modules=tuple(modules),
        binds=_binds(record, values, modules),
        step_time_s=record.predicted.step_time_s,
    )


def values_called(record: PlanRecord, what: str) -> list[PlannedValue]:
    """The arguments and results that a name or pattern means."""
    called = unfolded(what)
    return [v for v in (*record.arguments, *record.results) if _is_called(called, v.path)]


def _modules_called(record: PlanRecord, what: str) -> list[ModuleRow]:
    called = unfolded(what)
    return [row for row in record.modules if _is_called(called, row.module) or (not row.module and called == NO_MODULE)]


def _is_called(what: str, path: str) -> bool:
    """Whether a path contains a name, with its numbers or without, or matches it as a pattern, down to any part."""
    if what in path or what in summary.folded(path) or matches(what, path):
        return True
    parts = parts_of(path)
    return any(matches(what, "/".join(parts[:depth])) for depth in range(1, len(parts) + 1))


def _nothing_called(record: PlanRecord, what: str) -> InvalidArgumentError:
    paths = dict.fromkeys(
        [row.module for row in record.modules if row.module] + [v.path for v in (*record.arguments, *record.results)]
    )
    # What is asked for is mostly the end of a path.
    ends = {"/".join(parts_of(path)[-n:]): path for path in paths for n in (3, 2, 1)} | {path: path for path in paths}
    near = dict.fromkeys(ends[end] for end in difflib.get_close_matches(what, list(ends), n=NEAREST_SHOWN, cutoff=0.6))
    some = "near names" if near else "for example"
    return InvalidArgumentError(
        where=f"explain({what!r})",
        expected="a module or an argument of the plan, or a part of its path",
        got=f"nothing that is called {what!r}; {some}: {', '.join(list(near or paths)[:NEAREST_SHOWN])}",
        hint="print the plan: each path that it shows can be explained",
    )


def _explained(record: PlanRecord, value: PlannedValue) -> ExplainedValue:
    mesh = summary.stage_mesh(record, value.stage)
    first = summary.first_device(record, value.stage)
    return ExplainedValue(
        path=value.path,
        dtype=value.dtype,
        shape=value.shape,
        kind=value.kind,
        layout=value.layout.text(mesh),
        lies=describe(value.layout, mesh) + summary.holders(record, [value]),
        device_bytes=value.nbytes // (value.layout.shards(mesh) * max(len(value.stages), 1)),
        pieces=() if value.stages else pieces_of(value.shape, value.layout, mesh, first),
    )


def describe(layout: Layout, mesh: LogicalMesh) -> str:
    """A layout in words."""
    if layout.is_replicated:
        return "whole on every device"
    parts = [
        f"dimension {d} split over {axes_text(mesh.axis_names[a] for a in axes)} ({mesh.size(axes)} ways)"
        for d, axes in enumerate(layout.dims)
        if axes
    ]
    return ", ".join(parts)


def pieces_of(shape: Sequence[int], layout: Layout, mesh: LogicalMesh, first_device: int) -> tuple[Piece, ...]:
    """The parts of an array in their order, and the devices that hold each."""
    held: dict[tuple[int, ...], list[int]] = {}
    for device, place in enumerate(itertools.product(*(range(n) for n in mesh.axis_sizes))):
        part = []
        for axes in layout.dims:
            index = 0
            for a in axes:
                index = index * mesh.axis_sizes[a] + place[a]
            part.append(index)
        held.setdefault(tuple(part), []).append(first_device + device)
    pieces = []
    for indices, devices in sorted(held.items()):
        texts = []
        for size, axes, index in zip(shape, layout.dims, indices, strict=True):
            length = size // mesh.size(axes)
            texts.append(f"{index * length}:{(index + 1) * length}" if axes else ":")
        pieces.append(Piece(indices=f"[{', '.join(texts)}]", devices=tuple(devices)))
    return tuple(pieces)


def _of_values(values: Sequence[ExplainedValue]) -> list[str]:
    """A line for each value, with a picture where they are few. Many whose paths differ in numbers only, such as those
    of layers, are one line.
    """
    if len(values) <= DRAWN:
        return [line for v in values for line in (_of_value(v.path, v), *_picture(v))]
    groups = summary.grouped(values, lambda v: (summary.folded(v.path), v.dtype, v.shape, v.kind, v.lies))
    lines = []
    for (folded, *_), alike in groups.items():
        paths = [f"{folded} ({len(alike)}x)"] if len(alike) > DRAWN else [v.path for v in alike]
        lines += [_of_value(path, alike[0]) for path in paths]
    return lines


def _without_tied_results(values: Sequence[ExplainedValue]) -> list[ExplainedValue]:
    """Values without the results that lie as the state that they replace, which the line on the state says."""
    state = {(parts_of(v.path)[1:], v.shape, v.lies) for v in values if v.kind == "state"}

    def is_tied(v: ExplainedValue) -> bool:
        parts = parts_of(v.path)
        return v.kind == "result" and any((parts[i:], v.shape, v.lies) in state for i in range(1, len(parts)))

    return [v for v in values if not is_tied(v)]


def _of_value(path: str, v: ExplainedValue) -> str:
    return f"{path}: {v.dtype}{list(v.shape)} {v.kind}, {v.lies}"


def _picture(value: ExplainedValue) -> list[str]:
    """Which devices hold what, where the array is split."""
    if len(value.pieces) < 2:
        return []
    lines = []
    for piece in value.pieces[:PARTS_SHOWN]:
        lines.append(f"  {piece.indices} on device{'s' if len(piece.devices) > 1 else ''} {_numbers(piece.devices)}")
    rest = len(value.pieces) - PARTS_SHOWN
    return [*lines, *([f"  and {rest} more parts"] if rest > 0 else [])]


def _numbers(devices: Sequence[int]) -> str:
    """Numbers of devices; the first of many."""
    texts = summary.ranges(devices)
    more = f" and {len(texts) - PARTS_SHOWN} more" if len(texts) > PARTS_SHOWN else ""
    return ", ".join(texts[:PARTS_SHOWN]) + more


def _of_modules(rows: Sequence[ModuleRow]) -> list[str]:
    """The lines of each module. Those that differ in the numbers in their names only, such as layers, are told once."""
    groups = summary.grouped(rows, lambda row: (summary.folded(row.module), *_of_module(row)))
    lines = []
    for (folded, first, *others), modules in groups.items():
        name = modules[0].module if len(modules) == 1 else f"{folded} ({len(modules)}x), each"
        lines += [f"{name or NO_MODULE}: {first}", *others]
    return lines


def _of_module(row: ModuleRow) -> list[str]:
    """What a module computes and sends; the first line is to stand behind its name."""
    lines = [f"{row.operations} operations, computes {text_of_s(row.compute_time_s)}"]
    lines += [f"  matrix product {split}" for split in row.splits]
    for c in row.collectives:
        lines.append(
            f"  sends: {text_of_count(c.count)} {c.kind} over {axes_text(c.axes)}, "
            f"{text_of_bytes(c.sent_bytes)} a device, {text_of_s(c.time_s)}, {text_of_s(c.exposed_s)} of it exposed"
        )
    if not row.collectives:
        lines.append("  sends nothing: its operands already have the layouts that it needs")
    return lines


def _binds(record: PlanRecord, values: Sequence[PlannedValue], modules: Sequence[ModuleRow]) -> tuple[str, ...]:
    """What other layouts would meet: full memory, the state that they are tied to, links between hosts."""
    texts = []
    full = summary.fullest(record)
    peak, limit = full.peak_bytes, full.limit_bytes
    if limit and peak >= NEARLY_FULL * limit:
        texts.append(f"memory: {text_of_bytes(peak)} of {text_of_bytes(limit)} are full at the peak")
    results = {value.path for value in record.results}
    if any(value.kind == "state" for value in values) and results:
        texts.append("the state: the next step reads it as this step leaves it, in one layout")
    axes = {(row.stage, c.axes) for row in modules for c in row.collectives}
    for value in values:
        names = summary.stage_mesh(record, value.stage).axis_names
        axes |= {(value.stage, tuple(names[a] for a in split)) for split in value.layout.dims if split}
    slow = sorted({axes_text(names) for stage, names in axes if _is_between_hosts(record, stage, names)})
    if slow:
        texts.append(f"the network: devices along {', '.join(slow)} are on several hosts")
    return tuple(texts)


def _is_between_hosts(record: PlanRecord, stage: int, names: Sequence[str]) -> bool:
    mesh = summary.stage_mesh(record, stage)
    sizes, axes = mesh.axis_sizes, tuple(mesh.axis_names.index(name) for name in names)
    return mesh_links.spread(sizes, axes, record.cluster.domain_devices).hosts > 1


def argument_called(record: PlanRecord, what: str, most: int) -> PlannedValue:
    """The first argument that a name means. Raises: InvalidArgumentError where it means modules or results only."""
    arguments = [value for value in values_called(record, what) if value in record.arguments]
    if arguments:
        return arguments[0]
    some = ", ".join(repr(summary.path_of(value.path)) for value in record.arguments[:SHOWN])
    raise InvalidArgumentError(
        where=f"explain({what!r}, alternatives={most})",
        expected=f"the name of an argument, of which other layouts can be planned, such as {some}",
        got="that of modules or results, whose layouts follow from those of the arguments",
        hint="leave alternatives out, or plan.why_not(recipe) for another way for all of them",
    )


def best_alternatives(
    record: PlanRecord, value: PlannedValue, replan: Callable[[PlanRequest], PlanRecord], most: int
) -> tuple[Alternative, ...]:
    """The best other layouts of an argument, on the same mesh. Layers that are alike have the same layout.

    Raises: UnsupportedError for a plan with stages.
    """
    if isinstance(most, bool) or not isinstance(most, int) or most < 0:
        raise InvalidArgumentError(
            where=f"explain({value.path!r}, alternatives=...)",
            expected="how many other layouts are shown, 0 or more",
            got=repr(most),
            hint="leave it out to plan for none",
        )
    if record.pipeline is not None:
        raise UnsupportedError(
            where=f"explain({value.path!r}, alternatives={most})",
            expected="a plan in one program",
            got=f"one of {len(record.pipeline.stages)} stages",
            hint="compare whole plans: plan.why_not(autopar.constrain(pins, recipe=autopar.recipes.pipeline(...)))",
        )
    mesh = summary.stage_mesh(record, 0)
    found = []
    for layout in other_layouts(value, mesh):
        request = PlanRequest(pins=pins_of(value.path, layout, mesh), memory_limit_bytes=record.memory_limit_bytes)
        found.append(_alternative(record, layout, request, replan))
    timed = sorted((a for a in found if a.step_time_s is not None), key=lambda a: a.step_time_s or 0.0)
    return (*timed, *(a for a in found if a.step_time_s is None))[:most]


def other_layouts(value: PlannedValue, mesh: LogicalMesh) -> list[Layout]:
    """The layouts to plan for: those with the fewest other dimensions first."""
    others = [layout for layout in enumerate_layouts(value.shape, mesh) if layout != value.layout]

    def distance(layout: Layout) -> int:
        return sum(a != b for a, b in zip(layout.dims, value.layout.dims, strict=True))

    return sorted(others, key=distance)[:MOST_PLANNED]


def pins_of(path: str, layout: Layout, mesh: LogicalMesh) -> Pins:
    """The pin of an argument, and of those of the same name in other layers, on this mesh."""
    dims = tuple(tuple(mesh.axis_names[a] for a in axes) for axes in layout.dims)
    sizes = tuple(zip(mesh.axis_names, mesh.axis_sizes, strict=True))
    return Pins(pins=(Pin(pattern=summary.path_of(summary.folded(path)), dims=dims),), axis_sizes=sizes)


def _alternative(
    record: PlanRecord, layout: Layout, request: PlanRequest, replan: Callable[[PlanRequest], PlanRecord]
) -> Alternative:
    mesh = summary.stage_mesh(record, 0)
    texts = {"layout": layout.text(mesh), "lies": describe(layout, mesh)}
    try:
        other = replan(request)
    except AutoparError as error:
        why = "does not fit" if isinstance(error, MemoryLimitError) else f"no plan: {error.where}: {error.got}"
        if isinstance(error, MemoryLimitError) and request.memory_limit_bytes:
            why += f" in {text_of_bytes(request.memory_limit_bytes)}"
        return Alternative(**texts, step_time_s=None, peak_bytes=None, why=why)
    why, peak_bytes = Comparison(plan=record, other=other).in_short, summary.fullest(other).peak_bytes
    return Alternative(**texts, step_time_s=other.predicted.step_time_s, peak_bytes=peak_bytes, why=why)
