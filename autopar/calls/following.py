"""`parallelize(follow=step)`: the layouts of another step's state, as options of the search."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from autopar.errors import InvalidArgumentError, UnsupportedError
from autopar.ir.traced_step import TracedStep
from autopar.plan.options import PlanRequest
from autopar.plan.plan import Plan


@dataclasses.dataclass(frozen=True, slots=True)
class FollowedStep:
    """The step that another one follows: its name, and a function to its latest plan, None before it has one."""

    name: str
    latest_plan: Callable[[], Plan | None]


def with_followed_layouts(request: PlanRequest, followed: FollowedStep, traced: TracedStep, name: str) -> PlanRequest:
    """The request with the mesh of a followed step's plan and its layouts for the leaves of its state.

    The leaves are the arguments of consecutive numbers with the state's shapes; else, where a step takes a part of the
    state (the model of a model and its optimizer), those of equal path, shape and type.
    Raises: InvalidArgumentError where the followed step has no plan or no argument matches its state; UnsupportedError
    where its plan has stages.
    """
    where = f"{name}, follow={followed.name}"
    plan = followed.latest_plan()
    if plan is None:
        raise InvalidArgumentError(
            where=where,
            expected=f"{followed.name} to have a plan",
            got="none yet",
            hint=f"call {followed.name}, or {followed.name}.plan(state, batch), before {name}",
        )
    if plan.record.pipeline is not None:
        raise UnsupportedError(
            where=where,
            expected="a step that runs as one program on all devices",
            got=f"one whose state lies on {len(plan.record.pipeline.stages)} stages",
            hint=f"leave follow out: {name} then plans for itself, and its calls move the state to where it wants it",
        )
    state = [v for v in plan.record.arguments if v.kind == "state"]
    avals = traced.in_avals
    shapes = [(v.shape, v.dtype) for v in state]
    for first in range(len(avals) - len(state) + 1):
        window = avals[first : first + len(state)]
        if [(tuple(a.shape), str(a.dtype)) for a in window] == shapes:
            fixed = tuple((first + i, v.layout) for i, v in enumerate(state))
            in_host = tuple(first + i for i, v in enumerate(state) if v.in_host)
            return dataclasses.replace(request, axis_sizes=plan.record.axis_sizes, fixed=fixed, in_host=in_host)
    by_path = {(v.path, v.shape, v.dtype): v for v in state}
    leaves = enumerate(zip(traced.in_paths, avals, strict=True))
    matched = [(i, by_path.get((path, tuple(a.shape), str(a.dtype)))) for i, (path, a) in leaves]
    if any(v is not None for _, v in matched):
        fixed = tuple((i, v.layout) for i, v in matched if v is not None)
        in_host = tuple(i for i, v in matched if v is not None and v.in_host)
        return dataclasses.replace(request, axis_sizes=plan.record.axis_sizes, fixed=fixed, in_host=in_host)
    raise InvalidArgumentError(
        where=where,
        expected=f"an argument with the {len(state)} state leaves of {followed.name}",
        got=f"arguments with {len(avals)} leaves of other shapes",
        hint="pass the same state object to both steps",
    )
