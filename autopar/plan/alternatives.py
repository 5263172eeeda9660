"""Other layouts of an argument: each is pinned, and the step planned anew around it."""

from __future__ import annotations

from collections.abc import Callable

from autopar.common.units import text_of_bytes
from autopar.errors import AutoparError, InvalidArgumentError, MemoryLimitError, UnsupportedError
from autopar.ir.layout import Layout, enumerate_layouts
from autopar.ir.mesh import LogicalMesh
from autopar.plan import summary
from autopar.plan.explanation import Alternative, describe, values_called
from autopar.plan.options import PlanRequest
from autopar.plan.schema import PlannedValue, PlanRecord
from autopar.sharding.pins import Pin, Pins

# Layouts that are planned for at most, those that differ in the fewest dimensions first.
MOST_PLANNED = 8
SHOWN = 3  # arguments, in an error


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


def alternatives(
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
        found.append(_alternative(layout, mesh, request, replan))
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
    layout: Layout, mesh: LogicalMesh, request: PlanRequest, replan: Callable[[PlanRequest], PlanRecord]
) -> Alternative:
    texts = {"layout": layout.text(mesh), "lies": describe(layout, mesh)}
    try:
        made = replan(request).predicted
    except AutoparError as error:
        why = "does not fit" if isinstance(error, MemoryLimitError) else f"no plan: {error.where}: {error.got}"
        if isinstance(error, MemoryLimitError) and request.memory_limit_bytes:
            why += f" in {text_of_bytes(request.memory_limit_bytes)}"
        return Alternative(**texts, step_time_s=None, peak_bytes=None, why=why)
    return Alternative(**texts, step_time_s=made.step_time_s, peak_bytes=max(made.peak_bytes))
