"""A recipe as a value, and the request of a plan that it makes."""

from __future__ import annotations

import dataclasses

from autopar.errors import InvalidArgumentError
from autopar.plan.options import PlanRequest
from autopar.recipes.checks import check_number, check_schedule


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Constraints of a plan; the search chooses the rest. Made by the functions of `autopar.recipes`."""

    request: PlanRequest = dataclasses.field(default_factory=PlanRequest)


def plan_request(recipe: Recipe, num_microbatches: int | str, schedule: str) -> PlanRequest:
    """A recipe's request, with the micro-batches of `parallelize` where it has none, and its schedule in place of its
    own.

    Raises: InvalidArgumentError, also for two numbers of micro-batches.
    """
    request = recipe.request
    if num_microbatches != "auto":
        where, hint = "parallelize(num_microbatches=...)", "1 cuts nothing, 'auto' leaves the number to the search"
        number = check_number(where, num_microbatches, expected="a positive whole number, or 'auto'", hint=hint)
        if request.num_microbatches not in (None, number):
            raise InvalidArgumentError(
                where="parallelize(plan=..., num_microbatches=...)",
                expected=f"the recipe's {request.num_microbatches} micro-batches",
                got=str(number),
                hint="give the number once, to the recipe or to parallelize",
            )
        request = dataclasses.replace(request, num_microbatches=number)
    if schedule != "auto":
        check_schedule("parallelize(schedule=...)", schedule)
        request = dataclasses.replace(request, schedule=schedule)
    return request
