"""A traced step with all inputs of a search for its plan, for `autopar.tune`."""

from __future__ import annotations

import dataclasses
from typing import Any

from autopar.calls.step_options import StepOptions
from autopar.errors import InvalidArgumentError
from autopar.hardware.cluster import Cluster
from autopar.ir.traced_step import TracedStep
from autopar.plan.options import PlanRequest
from autopar.plan.plan import Trees
from autopar.sharding.rules import RuleBook


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlanningProblem:
    """The traced step, the cluster and the request of a search. `arguments` are without the static ones."""

    traced: TracedStep
    trees: Trees
    cluster: Cluster
    request: PlanRequest
    rules: RuleBook
    arguments: tuple[Any, ...]
    show_progress: bool


def check_leaves_plan_open(name: str, options: StepOptions) -> None:
    """Raises: InvalidArgumentError where a step already has a plan, a recipe or another step's layouts."""
    conflicts = {
        "a plan": options.plan is not None,
        "a recipe": options.has_recipe,
        "a step to follow": options.follow is not None,
    }
    for option, is_given in conflicts.items():
        if is_given:
            raise InvalidArgumentError(
                where=f"{name}, made by parallelize",
                expected="a step whose plan is searched for",
                got=f"one with {option}",
                hint="leave out plan of parallelize; a recipe is timed beside the search's plans with "
                "tune(step, ..., beside={'mine': recipe})",
            )
