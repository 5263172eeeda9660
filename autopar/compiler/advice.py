"""Source of candidates: the layouts that the step's code names, as one program on the code's own mesh."""

from __future__ import annotations

import dataclasses

from autopar.common.text import text_of_bytes, text_of_s
from autopar.cost.cost_model import cost_model
from autopar.errors import InvalidArgumentError
from autopar.intra_op.spmd_candidate import SpmdCandidate
from autopar.intra_op.spmd_search import search_mesh
from autopar.ir.traced_step import ShardingsInCode
from autopar.plan.context import Candidate, PlanningContext, Rejection
from autopar.plan.options import PlanRequest
from autopar.sharding.pins import PinsOnMesh, joined, on_meshes, pins_in_code

SOURCE = "shardings in the code"
NAME = "as the code has it"


def with_pins_of_code(context: PlanningContext) -> PlanningContext:
    """The context with the layouts of the code as pins, where they were asked for.

    Raises: InvalidArgumentError for layouts that no mesh has, and for requests beside which they cannot be kept.
    """
    request = context.request
    if request.constraints is not ShardingsInCode.PINS:
        return context
    pins = pins_in_code(context.graph, context.cluster.num_devices, is_wish=False)
    if pins is None:
        return context
    conflict = _conflict(request)
    if conflict:
        raise InvalidArgumentError(
            where="Search(constraints='pins')",
            expected="one program, whose layouts only the code and autopar.constrain name",
            got=f"{conflict}, and {pins.in_code[0][1].pattern}",
            hint="leave that out, or take Search(constraints='advice') or 'ignore'",
        )
    return dataclasses.replace(context, request=dataclasses.replace(request, pins=joined(request.pins, pins)))


def _conflict(request: PlanRequest) -> str:
    """What a request has that layouts of the code cannot be kept beside; empty for nothing."""
    found = {
        "stages or micro-batches": not request.admits_one_program,
        "a recipe with mesh axes of its own": request.binding is not None,
        "layouts of another step": bool(request.fixed) or request.axis_sizes is not None,
    }
    return next((text for text, is_there in found.items() if is_there), "")


def advised(context: PlanningContext) -> list[SpmdCandidate | Rejection]:
    """The program that keeps the layouts of the code wherever it can; nothing where the code names none, or where they
    are no advice.

    It is planned on the code's mesh, and completely, whatever is known to be faster: the plan says what it costs.
    """
    if context.request.constraints is not ShardingsInCode.ADVICE or not context.graph.written:
        return []
    conflict = _conflict(context.request) or ("pins" if context.request.pins is not None else "")
    if conflict:
        return [_not_weighed(f"{conflict} were requested")]
    if context.deadline.passed:
        return [_not_weighed(context.deadline.text)]
    try:
        pins = pins_in_code(context.graph, context.cluster.num_devices, is_wish=True)
        if pins is None:
            return []
        found = dataclasses.replace(pins.found(context.traced, context.graph), is_wish=True)
        meshes = on_meshes(found, context.cluster, context.request.max_mesh_axes, None, context.graph)
    except InvalidArgumentError as error:
        return [_not_weighed(f"{error.where}: expected {error.expected}, got {error.got}")]
    fewest = min(len(at.mesh.axis_sizes) for at in meshes)
    fresh = dataclasses.replace(context, results=(), to_beat_s=float("inf"))
    outcomes: list[SpmdCandidate | Rejection] = []
    with context.progress.pass_(SOURCE):
        for at in (at for at in meshes if len(at.mesh.axis_sizes) == fewest):
            model, time_s = cost_model(context.cluster, at.mesh), context.deadline.solve_s()
            outcome = search_mesh(fresh, model, at, folds=True, time_limit_s=time_s)
            if isinstance(outcome, SpmdCandidate):
                outcomes.append(dataclasses.replace(outcome, source=SOURCE, name=NAME))
            else:
                outcomes.append(dataclasses.replace(outcome, source=SOURCE))
    return outcomes


def _not_weighed(why: str) -> Rejection:
    return Rejection(source=SOURCE, why=f"the author's sharding was not weighed: {why}", is_note=True)


def advice_note(context: PlanningContext, chosen: Candidate) -> list[str]:
    """What the layouts of the code cost beside the plan."""
    ours = [c for c in context.candidates if isinstance(c, SpmdCandidate) and c.source == SOURCE]
    if not ours:
        return []
    best = min(ours, key=lambda c: (c.peak_bytes > context.limit_bytes, c.step_time_s))
    assert best.pins is not None, "what is planned from layouts of the code has them"
    kept, given = num_kept(best, best.pins, context)
    text = f"the author's sharding ({kept} of {given} values as written) costs {text_of_s(best.step_time_s)}"
    others = [c.step_time_s for c in context.candidates if c not in ours and c.peak_bytes <= context.limit_bytes]
    if chosen in ours:
        free = f"; the search's own takes {text_of_s(min(others))}" if others else ""
        return [f"{text} and is the plan{free}"]
    if best.peak_bytes > context.limit_bytes:
        text = f"{text} and is over the memory limit by {text_of_bytes(best.peak_bytes - context.limit_bytes)}"
    return [f"{text}; the plan takes {text_of_s(chosen.step_time_s)}"]


def num_kept(candidate: SpmdCandidate, pins: PinsOnMesh, context: PlanningContext) -> tuple[int, int]:
    """How many values lie as the code has it, and of how many it says so."""
    reduced = candidate.sharding.reduced
    wanted = pins.layouts(context.graph)
    kept = sum(pin.allows(reduced[v]) for v, pin in wanted.items() if v in reduced)
    return kept, len(pins.pinned.in_code)
