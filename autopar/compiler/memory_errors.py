"""Errors of plans that exceed the memory limit: pipelines, gradient accumulation, and given plans."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.errors import MemoryLimitError
from autopar.plan.plan import Plan
from autopar.plan.summary import fullest

_NAMED = 5  # how many of the largest tensors an error names


def check_given_plan_fits(plan: Plan, limit_bytes: int | None) -> None:
    """Raises: MemoryLimitError for a given plan that exceeds a memory limit for which it was not made."""
    if limit_bytes is not None and not fits(plan, limit_bytes):
        raise _refusal(
            plan,
            f"the plan of {plan.record.step}",
            limit_bytes,
            "a plan is run as it is: make another one with this limit, or leave the limit out here",
        )


def fits(plan: Plan, limit_bytes: int) -> bool:
    full = fullest(plan.record, limit_bytes)
    assert full.limit_bytes is not None, "a limit was given"
    return full.peak_bytes <= full.limit_bytes


def pipeline_refusal(plan: Plan, limit_bytes: int, beside: Sequence[str] = ()) -> MemoryLimitError:
    """The error of a step whose plan in micro-batches or stages does not fit; `beside` are the other attempts."""
    pipeline = plan.record.pipeline
    assert pipeline is not None, "a plan in one program is refused before it is written down"
    ways = [f"more micro-batches (now {pipeline.num_microbatches})"]
    if len(pipeline.stages) > 1:
        ways += [] if pipeline.schedule == "1f1b" else [f'schedule="1f1b" (now "{pipeline.schedule}")']
        ways += [f"more stages (now {len(pipeline.stages)})"]
    ways += ["more devices, with state split over them (recipes.zero(3))"]
    ways += [] if "input" in pipeline.recomputed else ['recompute="input" of recipes.cut and recipes.combine']
    ways += ["a smaller optimiser state (Adafactor, bfloat16 moments)"]
    hint = "use " + ", ".join(ways[:-1]) + ", or " + ways[-1]
    return _refusal(plan, plan.record.step, limit_bytes, "; ".join([hint, *beside]))


def _refusal(plan: Plan, where: str, limit_bytes: int, hint: str) -> MemoryLimitError:
    full, pipeline = fullest(plan.record, limit_bytes), plan.record.pipeline
    if pipeline is not None:
        worst = list(dict.fromkeys(stage.first_device for stage in pipeline.stages))[full.number]
        stages = [str(q) for q, stage in enumerate(pipeline.stages) if stage.first_device == worst]
        where += f", stage {' and '.join(stages)} of {len(pipeline.stages)}"
    memory = plan.predicted.memory
    return MemoryLimitError(
        where=where,
        limit_bytes=full.limit_bytes or limit_bytes,
        needed_bytes=full.peak_bytes,
        largest=[(h.name, h.nbytes) for h in memory[full.number].largest[:_NAMED]] if memory else [],
        hint=hint,
    )
