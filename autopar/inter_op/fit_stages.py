"""Decisions of the stages of a pipeline that fit into the memory: decided again under higher prices of a byte."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from autopar.cost.cost_model import CostModel
from autopar.inter_op.decide_stages import StageDecider
from autopar.inter_op.layer_decisions import lowest_price
from autopar.inter_op.stage_choice import StageChoice
from autopar.intra_op.ilp import ObjectiveWeights
from autopar.intra_op.memory_prices import FIRST_PRICE, MOST_PRICES, PRICE_RISE
from autopar.lowering.lower import ShardingPlan
from autopar.runtime.standard_schedules import PipelineSchedule
from autopar.sharding.constraints import Constraints


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BuildLimits:
    """The memory of a device, the seconds that a solver may take, and the time of a step from which on a pipeline is of
    no use, so that nothing need be done to make it fit. `decides_again`: whether stages that exceed the memory are
    decided again.
    """

    limit_bytes: int
    time_limit_s: float
    to_beat_s: float = math.inf
    decides_again: bool = True


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """The weights of each stage in one round of decisions, and the peak of each group of devices under them."""

    terms: tuple[ObjectiveWeights, ...]
    peak_bytes: tuple[int, ...]


# For each stage, the number of its decisions and these: stages of equal numbers have the same.
StageDecisions = Sequence[tuple[int, ShardingPlan]]


class Simulated(Protocol):
    """A pipeline on the clock: its time, and the peak of each group of devices."""

    @property
    def step_time_s(self) -> float: ...

    @property
    def peak_bytes(self) -> Sequence[int]: ...


Pipeline = TypeVar("Pipeline", bound=Simulated)


def fit_stages(
    choice: StageChoice,
    schedule: PipelineSchedule,
    decider: StageDecider,
    terms: list[ObjectiveWeights],
    limits: BuildLimits,
    simulated: Callable[[StageDecisions], Pipeline],
    of_whole: float = 1.0,
) -> tuple[Pipeline, tuple[Round, ...]]:
    """The pipeline under the first decisions that fit, else under the last ones; and the rounds that led to it.

    Stages that exceed the memory are decided again with a higher price on the bytes of their state, then with that
    price also on values saved for backward passes, then with higher prices on both, `MOST_PRICES` times at most, unless
    their state exceeds it whatever is decided, or the step takes too long already. `of_whole`: how many times as much
    state, and time, the whole step has as the stages that are decided.
    """
    numbers: list[int] = []
    rounds: list[Round] = []
    for left in reversed(range(MOST_PRICES + 1 if limits.decides_again else 1)):
        decisions = decider.decide(terms)
        before, numbers = numbers, [number for number, _ in decisions]
        if numbers != before:
            pipeline = simulated(decisions)
        rounds.append(Round(terms=tuple(terms), peak_bytes=tuple(pipeline.peak_bytes)))
        over = [q for q, group in enumerate(schedule.mesh_of_stage) if pipeline.peak_bytes[group] > limits.limit_bytes]
        if not over or not left or pipeline.step_time_s >= limits.to_beat_s:
            break
        if any(decider.cannot_fit(q, limits.limit_bytes / of_whole) for q in over):
            break
        for q in over:
            dear = FIRST_PRICE * decisions[q][1].report.objective_s * of_whole / limits.limit_bytes
            known_s_per_byte = choice.terms[q].s_per_byte if choice.terms else dear
            in_flight = schedule.in_flight[schedule.mesh_of_stage[q]] // schedule.chunks
            terms[q] = _leaner(terms[q], known_s_per_byte, dear, in_flight)
    return pipeline, tuple(rounds)


def first_terms(
    choice: StageChoice, models: Sequence[CostModel], constraints: Constraints | None
) -> list[ObjectiveWeights]:
    """The first weights of each stage: the lowest price of a byte, unless it is known that its state alone does not fit
    under it, or that its saved values have a price.

    Under a recipe, hideable communication is charged fully: the plan is that of the recipe's source.
    """
    lowest = [lowest_price(model) for model in models]
    if not choice.terms:
        fractions = [model.exposed_fraction if constraints is None else 1.0 for model in models]
        return [ObjectiveWeights(s_per_byte=p, exposed_fraction=f) for p, f in zip(lowest, fractions, strict=True)]
    return [
        terms if over_limit or terms.in_flight else dataclasses.replace(terms, s_per_byte=price)
        for terms, over_limit, price in zip(choice.terms, choice.over_limit, lowest, strict=True)
    ]


def _leaner(terms: ObjectiveWeights, sufficient_price: float, first_price: float, in_flight: int) -> ObjectiveWeights:
    """Weights under which a stage needs less memory: the price that is known to suffice, then that price also on the
    values saved for the micro-batches in flight, then higher prices.
    """
    if terms.s_per_byte < sufficient_price:
        return dataclasses.replace(terms, s_per_byte=sufficient_price)
    if not terms.in_flight:
        return dataclasses.replace(terms, in_flight=_rounded_up(in_flight))
    return dataclasses.replace(terms, s_per_byte=max(first_price, terms.s_per_byte * PRICE_RISE))


def _rounded_up(n: int) -> int:
    """The next power of two, so that stages that differ only in the micro-batches in flight are decided together."""
    return 1 << max(0, n - 1).bit_length()
