"""`parallelize(evaluate, plan=step)`: the layouts of another step's state, as options of the search."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from autopar.errors import InvalidArgumentError
from autopar.ir.traced_step import TracedStep
from autopar.plan.options import FollowedStages, PlanRequest
from autopar.plan.plan import Plan
from autopar.plan.schema import PipelineRecord, PlannedValue


@dataclasses.dataclass(frozen=True, slots=True)
class FollowedStep:
    """The step that another one follows: its name, and a function to its latest plan, None before it has one."""

    name: str
    latest_plan: Callable[[], Plan | None]


def with_followed_layouts(request: PlanRequest, followed: FollowedStep, traced: TracedStep, name: str) -> PlanRequest:
    """The request with the mesh of a followed step's plan, or its stages, and its layouts for the leaves of its state.

    The leaves are the arguments of consecutive numbers with the state's shapes; else, where a step takes a part of the
    state (the model of a model and its optimizer), those of equal path, shape and type.
    Raises: InvalidArgumentError where the followed step has no plan or no argument matches its state.
    """
    where = f"{name}, plan={followed.name}"
    plan = followed.latest_plan()
    if plan is None:
        raise InvalidArgumentError(
            where=where,
            expected=f"{followed.name} to have a plan",
            got="none yet",
            hint=f"call {followed.name}, or {followed.name}.plan(state, batch), before {name}",
        )
    matched = _matched(plan, traced)
    if not matched:
        state = [v for v in plan.record.arguments if v.kind == "state"]
        raise InvalidArgumentError(
            where=where,
            expected=f"an argument with the {len(state)} state leaves of {followed.name}",
            got=f"arguments with {len(traced.in_avals)} leaves of other shapes",
            hint="pass the same state object to both steps",
        )
    in_host = tuple(i for i, v in matched if v.in_host)
    request = dataclasses.replace(request, in_host=in_host)
    if plan.record.pipeline is not None:
        return _with_stages(request, plan.record.pipeline, matched)
    fixed = tuple((i, v.layout) for i, v in matched)
    return dataclasses.replace(request, axis_sizes=plan.record.axis_sizes, fixed=fixed)


def _matched(plan: Plan, traced: TracedStep) -> tuple[tuple[int, PlannedValue], ...]:
    """The leaves of the followed state among those of a step, by number."""
    state, avals = [v for v in plan.record.arguments if v.kind == "state"], traced.in_avals
    shapes = [(v.shape, v.dtype) for v in state]
    for first in range(len(avals) - len(state) + 1):
        if [(tuple(a.shape), str(a.dtype)) for a in avals[first : first + len(state)]] == shapes:
            return tuple((first + i, v) for i, v in enumerate(state))
    by_path = {(v.path, v.shape, v.dtype): v for v in state}
    leaves = enumerate(zip(traced.in_paths, avals, strict=True))
    found = [(i, by_path.get((path, tuple(a.shape), str(a.dtype)))) for i, (path, a) in leaves]
    return tuple((i, v) for i, v in found if v is not None)


def _with_stages(
    request: PlanRequest, pipeline: PipelineRecord, matched: tuple[tuple[int, PlannedValue], ...]
) -> PlanRequest:
    """The request for the stages of a followed plan."""
    groups = pipeline.stages[: len(pipeline.stages) // pipeline.chunks]
    followed = FollowedStages(
        schedule=pipeline.schedule,
        group_axis_sizes=tuple(stage.axis_sizes for stage in groups),
        leaves=matched,
    )
    return dataclasses.replace(request, followed_stages=followed, num_stages=len(groups), chunks=pipeline.chunks)
