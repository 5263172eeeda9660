"""Answers of the search over stages: the order in which they are built, what they come to, and why there are none."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Sequence

from autopar.inter_op.microbatch_walk import Tried
from autopar.inter_op.stage_choice import choice_of
from autopar.inter_op.stage_costs import PricedOption
from autopar.solver import NoStages, StagePlan, StageProblem, fullness

_NUMBER = re.compile(r"\d+(?:,\d+)*")


def in_turn(plans: Iterable[tuple[Hashable, float, int]]) -> list[int]:
    """The numbers of plans given as (kind, seconds, number): the fastest of each kind, fastest first, then each second,
    and so on.
    """
    turn: dict[Hashable, int] = {}
    by_turn: list[tuple[int, int]] = []
    for kind, _, number in sorted(plans, key=lambda plan: plan[1]):
        turn[kind] = turn.get(kind, -1) + 1
        by_turn.append((turn[kind], number))
    return [number for _, number in sorted(by_turn, key=lambda entry: entry[0])]


def why_no_pipeline(answers: Sequence[StagePlan | NoStages]) -> str:
    """The reasons of the problems that have no plan."""
    reasons: dict[str, tuple[list[int], str]] = {}
    for answer in answers:
        if isinstance(answer, NoStages):  # of reasons that differ in numbers alone that with the smallest
            numbers = [int(n.replace(",", "")) for n in _NUMBER.findall(answer.reason)]
            kind = _NUMBER.sub("", answer.reason)
            reasons[kind] = min(reasons.get(kind, (numbers, answer.reason)), (numbers, answer.reason))
    return "; ".join(reason for _, reason in reasons.values()) or "no pipeline was near the plan without stages"


def by_tables(problem: StageProblem, answer: StagePlan, options: tuple[PricedOption, ...]) -> Tried:
    """One stage that was not built."""
    return Tried(
        step_time_s=answer.step_time_s,
        most_bytes=round(fullness(problem, answer.stages) * problem.limit_bytes),
        policies=tuple(choice_of(problem, answer, options).policies),
    )
