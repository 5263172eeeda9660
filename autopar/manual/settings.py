"""A step on a cluster, a setting of a recipe for it, an attempt at it, and what that came to."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator

from autopar.hardware.cluster import Cluster
from autopar.ir.traced_step import TracedStep
from autopar.plan.context import StepGraphs
from autopar.plan.options import PlanRequest
from autopar.plan.plan import Trees
from autopar.recipes import Recipe
from autopar.sharding.rules import RuleBook

RECOMPUTE = ("nothing", "matmuls", "input")  # in the order of what they save


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A traced step on a cluster. `request` is what holds for all plans of it, such as a memory limit; `examples` those
    of the batch, `experts` what a number of devices has to divide that shares experts (1: the step has none);
    `attends`: it has attention, whose positions can be shared. Plans of the step share `graphs`. `whole_fits`: a
    program of the whole batch is known to fit, so that others are likely to.
    """

    traced: TracedStep
    trees: Trees
    cluster: Cluster
    examples: int
    experts: int = 1
    attends: bool = True
    whole_fits: bool = False
    request: PlanRequest = dataclasses.field(default_factory=PlanRequest)
    rules: RuleBook = dataclasses.field(default_factory=RuleBook)
    graphs: StepGraphs = dataclasses.field(default_factory=StepGraphs)

    def under(self, recipe: Recipe) -> PlanRequest:
        """The request of a plan under a recipe."""
        return self.request.with_recipe(recipe.request)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One plan to be made. `frontier`: it is one of settings without stages of which the fastest that fits is looked
    for, so that an estimate or a bound may do for one that is slower or does not fit.
    """

    text: str
    options: PlanRequest
    frontier: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What an attempt came to; no time where a plan was refused for the memory it needs. `too_slow`: the time is a
    lower bound, which other settings are below, of this recomputation in any number of micro-batches. `of_state`: the
    peak is that of the state alone, which every number of micro-batches and all recomputation have. `work_s`: of a plan
    with stages the seconds in which a device waits for no other stage, in the mean.
    """

    step_time_s: float
    peak_bytes: int
    limit_bytes: int
    too_slow: bool = False
    of_state: bool = False
    work_s: float = 0.0

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= self.limit_bytes

    def rank(self) -> tuple[int, float]:
        """Smaller is better: what fits first, then what is faster; of what does not fit, the smaller; last what is
        known to exceed the memory by its state alone, whose peak is higher than that.
        """
        return (0, self.step_time_s) if self.fits else (1 + self.of_state, float(self.peak_bytes))


Walk = Generator[Attempt, Outcome | None, None]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One setting: devices that share each matrix, or each sequence, stages, ZeRO (`zero_size`: among so many devices,
    0 for all), examples of a copy in a micro-batch, recomputation, and the schedule of stages where it is not 1F1B.
    """

    tp: int = 1
    sp: int = 1
    pp: int = 1
    zero: int = 0
    zero_size: int = 0
    examples: int
    recompute: str
    schedule: str = ""

    def num_microbatches(self, problem: Problem) -> int | None:
        """None where the batch cannot be cut so, or the step names another number of micro-batches."""
        together = problem.cluster.num_devices // (self.tp * self.sp * self.pp) * self.examples
        number, rest = divmod(problem.examples, together)
        named = problem.request.num_microbatches
        return number if not rest and named in (None, number) else None

    def saves_more(self, other: Point) -> bool:
        """Whether the same setting needs less memory than another, or as much, by micro-batches and recomputation."""
        own, others = ((p.tp, p.sp, p.pp, p.zero, p.schedule) for p in (self, other))
        level = RECOMPUTE.index
        return own == others and self.examples <= other.examples and level(self.recompute) >= level(other.recompute)

    def needs_no_saving(self, other: Point) -> bool:
        """Whether the same setting saves more than another, which fits, and is not faster for it: with stages smaller
        micro-batches of the same recomputation leave smaller bubbles.
        """
        return self.saves_more(other) and (self.pp == 1 or self.recompute != other.recompute)

    def text(self, m: int) -> str:
        """The setting in words, which has m micro-batches."""
        stages = "groups of interleaved stages" if self.schedule == "interleaved" else "stages"
        among = f" in groups of {self.zero_size}" if self.zero_size else ""
        parts = (
            [f"tp {self.tp}"] * (self.tp > 1)
            + [f"sp {self.sp}"] * (self.sp > 1)
            + [f"{self.pp} {stages}"] * (self.pp > 1)
        )
        parts += [f"ZeRO {self.zero}{among}"] * (self.zero > 0) + [f"{m} micro-batches"] * (m > 1)
        parts += [self.schedule] * (self.schedule not in ("", "interleaved"))
        parts += [f"recompute {self.recompute}"] * (self.recompute != "nothing")
        return ", ".join(parts) or "whole batch"
