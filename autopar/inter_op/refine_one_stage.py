"""One stage that comes near the best is decided again: by itself, under data parallelism and ZeRO, with other charges.

The tables decide layers one by one, and add up what is sent. Only the simulation of a stage tells which decisions wait
least.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Protocol

from autopar.hardware.cluster import Cluster
from autopar.inter_op.other_numbers import OtherNumbers, Refined
from autopar.inter_op.pipeline_candidate import PipelineEstimate
from autopar.inter_op.search_space import own_meshes
from autopar.inter_op.stage_choice import StageChoice
from autopar.intra_op.baselines import baseline_bindings
from autopar.plan.context import PlanningContext

# One stage is decided again if it takes at most so many times as long as the best: the tables decide it too leanly.
REFINED_WITHIN = 1.15
BY_ITSELF = "decided by itself"  # one stage, whose decisions are not those of the tables


class Evaluated(Refined, Protocol):
    """What was evaluated of all pipelines, and how one stage is evaluated otherwise (`PipelineEvaluator`)."""

    context: PlanningContext
    cluster: Cluster
    # For (stages, micro-batches): the best, and its bytes by the tables.
    best_of: dict[tuple[int, int], tuple[PipelineEstimate, int]]


def refine_one_stage(evaluated: Evaluated, others: OtherNumbers, counts: Iterable[float]) -> None:
    """Evaluates the best pipeline of one stage under other decisions, where it comes near the best of all: as it
    recomputes, and without any recomputation, in the first number of micro-batches from its own on in which that may
    fit.

    In one micro-batch, what keeps all is a program without stages, of which those were weighed. `counts`: other
    fractions of hidden communication that are charged.
    """
    best = _near_the_best(evaluated)
    if best is None:
        return
    m, choice = best.num_microbatches, best.choice
    keeps_all = dataclasses.replace(choice, policies=("nothing",) * len(choice.policies))
    numbers: dict[StageChoice, int] = {}
    for saving in dict.fromkeys((keeps_all, choice)):  # what keeps all is mostly faster, and bounds the other
        known_to_fit = saving == choice and best.fits(evaluated.limit_bytes)
        number = m if known_to_fit else _first_that_may_fit(evaluated, others, m, saving)
        if number is not None:
            numbers[saving] = number
    weighed = [(1, keeps_all)] if evaluated.context.weighed_one_program else []
    for saving, number in numbers.items():
        for mesh in own_meshes(evaluated.cluster, choice.group_meshes[0]):
            own = dataclasses.replace(saving, group_meshes=(mesh,), terms=(), over_limit=())
            if (number, saving) not in weighed and evaluated.may_gain(number, saving):
                evaluated.refined(number, own, BY_ITSELF)
        of_recipes = _of_recipes(evaluated, others, number, saving)
        for name, binding in baseline_bindings(evaluated.cluster):
            if of_recipes is None or (of_recipes, saving) in weighed:
                continue
            if evaluated.may_gain(of_recipes, saving):
                evaluated.refined(of_recipes, saving, name, binding)
    for count in counts:
        terms = tuple(dataclasses.replace(t, exposed_fraction=count) for t in choice.terms)
        if numbers.get(choice) == m and terms != choice.terms and evaluated.may_gain(m, choice):
            evaluated.refined(m, dataclasses.replace(choice, terms=terms), f"hidden sends count {count:g}")


def _near_the_best(evaluated: Evaluated) -> PipelineEstimate | None:
    """The best of one stage: the best of all, or one that fits and takes little longer."""
    one_stage = [candidate for (stages, _), (candidate, _) in evaluated.best_of.items() if stages == 1]
    found = min(one_stage, key=lambda each: each.rank(evaluated.limit_bytes), default=None)
    if found is None or evaluated.best is None:
        return None
    if found.rank(evaluated.limit_bytes) <= evaluated.best.rank(evaluated.limit_bytes):
        return found
    is_near = found.step_time_s <= REFINED_WITHIN * evaluated.best.step_time_s
    return found if found.fits(evaluated.limit_bytes) and is_near else None


def _first_that_may_fit(evaluated: Evaluated, others: OtherNumbers, m: int, choice: StageChoice) -> int | None:
    """The first number of micro-batches, from m on, in which a choice may fit; None where there is none.

    Twice as many micro-batches need half of the memory at least, so that some numbers are left out.
    """
    least = m * 1.0
    for number in (n for n in others.numbers if n >= m):
        if evaluated.deadline.passed:
            return None
        if number < least or not others.admits(number, choice):
            continue
        needed_bytes = evaluated.least_bytes(number, choice)
        if needed_bytes <= evaluated.limit_bytes:
            return number
        least = number * needed_bytes / evaluated.limit_bytes
    return None


def _of_recipes(evaluated: Evaluated, others: OtherNumbers, m: int, choice: StageChoice) -> int | None:
    """The number of micro-batches of recipes where other decisions have m: fewer, where more devices share the examples
    and that may fit. None where recipes take too long, since devices repeat the work of others.
    """
    number = others.shared_by_most(m)
    if (
        number != m
        and not evaluated.deadline.passed
        and not others.take_too_long(number, evaluated.best)
        and others.admits(number, choice)
        and evaluated.least_bytes(number, choice) <= evaluated.limit_bytes
    ):
        return number
    return None if others.take_too_long(m, evaluated.best) else m
