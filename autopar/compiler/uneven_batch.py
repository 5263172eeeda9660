"""A batch that devices do not divide: planned with its examples split unevenly too, and the faster plan taken."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from autopar.common.deadline import Deadline
from autopar.common.units import text_of_s
from autopar.errors import MemoryLimitError
from autopar.ir.traced_step import TracedStep
from autopar.plan import summary
from autopar.plan.options import PlanRequest
from autopar.plan.plan import Plan

Plans = tuple[Plan, ...]


def uneven_parts(traced: TracedStep, request: PlanRequest, num_devices: int) -> int:
    """Over how many devices a request may split the examples of a step, where these are more and do not divide; else 0.

    Layouts that are asked for, and micro-batches, are in equal parts.
    """
    has_layouts = request.pins is not None or bool(request.fixed)
    if has_layouts or request.names_pipeline or traced.uneven_over or request.followed_stages is not None:
        return 0
    dims = ((i, traced.example_dim(i)) for i in traced.batch)
    sizes = {traced.in_avals[i].shape[dim] for i, dim in dims if dim is not None}
    parts = num_devices if request.binding is None else request.binding.example_parts(num_devices)
    (examples,) = sizes if len(sizes) == 1 else (0,)
    return parts if examples > parts and examples % parts else 0


def faster_split(
    traced: TracedStep, request: PlanRequest, num_devices: int, plans_of: Callable[[TracedStep, PlanRequest], Plans]
) -> Plans:
    """The plans of a step with its examples split unevenly, or in equal parts, whichever are faster; under a recipe
    that splits examples, the former. `plans_of` makes those of a step as it is split.

    Raises: as `plans_of`; MemoryLimitError where neither fits.
    """
    parts = uneven_parts(traced, request, num_devices)
    if not parts:
        return plans_of(traced, request)
    uneven = dataclasses.replace(traced, uneven_over=parts)
    if request.binding is not None:
        return plans_of(uneven, request)
    deadline, refused = Deadline.after(request.time_limit_s), None
    plans: Plans = ()
    try:
        plans = plans_of(traced, request)
    except MemoryLimitError as error:
        refused = error
    if plans and deadline.passed:
        return plans
    left_s = None if request.time_limit_s is None else deadline.left_s
    try:
        others = plans_of(uneven, dataclasses.replace(request, time_limit_s=left_s))
    except MemoryLimitError:
        if refused is not None:
            raise refused from None
        return plans
    step_s = others[0].predicted.step_time_s
    if not plans or step_s < plans[0].predicted.step_time_s:
        return others
    notes = plans[0].record.notes
    if not any(note.startswith(summary.BATCH_WHOLE) for note in notes):
        return plans
    why = (
        f"{summary.BATCH_WHOLE}: with its examples split unevenly over {parts} devices a step takes {text_of_s(step_s)}"
    )
    kept = [why if note.startswith(summary.BATCH_WHOLE) else note for note in notes]
    best = dataclasses.replace(plans[0], record=dataclasses.replace(plans[0].record, notes=tuple(kept)))
    return (best, *plans[1:])
