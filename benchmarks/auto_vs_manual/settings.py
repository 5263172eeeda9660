"""A setting of a recipe, an attempt at it, and what that came to."""

import dataclasses
from collections.abc import Generator

from autopar.hardware.cluster import Cluster
from autopar.ir.traced_step import TracedStep
from autopar.plan.options import PlanRequest
from benchmarks.auto_vs_manual.models import Model

RECOMPUTE = ("nothing", "matmuls", "input")  # in the order of what they save


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """A model's step, traced, on a cluster."""

    model: Model
    traced: TracedStep
    cluster: Cluster

    @property
    def examples(self) -> int:
        return self.model.sizes["batch"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attempt:
    """One plan to be made. `frontier`: it is one of settings without stages of which the fastest that fits is looked
    for, so that an estimate or a bound may do for one that is slower or does not fit.
    """

    text: str
    options: PlanRequest
    frontier: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """What an attempt came to; no time where a plan was refused for the memory it needs. `too_slow`: the time is a
    lower bound, which other settings are below, of this recomputation in any number of micro-batches.
    """

    step_time_s: float
    peak_bytes: int
    limit_bytes: int
    too_slow: bool = False

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= self.limit_bytes

    def rank(self) -> tuple[bool, float]:
        """Smaller is better: what fits first, then what is faster; of what does not fit, the smaller."""
        return not self.fits, self.step_time_s if self.fits else float(self.peak_bytes)


Walk = Generator[Attempt, Outcome | None, None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Point:
    """One setting: devices that share each matrix, stages, ZeRO, examples of a copy in a micro-batch, recomputation."""

    tp: int = 1
    pp: int = 1
    zero: int = 0
    examples: int
    recompute: str

    def num_microbatches(self, problem: Problem) -> int | None:
        """None where the batch cannot be cut so."""
        together = problem.cluster.num_devices // (self.tp * self.pp) * self.examples
        return problem.examples // together if problem.examples % together == 0 else None

    def saves_more(self, other: "Point") -> bool:
        """Whether the same setting needs less memory than another, or as much, by micro-batches and recomputation."""
        same = (self.tp, self.pp, self.zero) == (other.tp, other.pp, other.zero)
        level = RECOMPUTE.index
        return same and self.examples <= other.examples and level(self.recompute) >= level(other.recompute)

    def text(self, m: int) -> str:
        """The setting in words, which has m micro-batches."""
        parts = [f"tp {self.tp}"] * (self.tp > 1) + [f"{self.pp} stages"] * (self.pp > 1)
        parts += [f"ZeRO {self.zero}"] * (self.zero > 0) + [f"{m} micro-batches"] * (m > 1)
        parts += [f"recompute {self.recompute}"] * (self.recompute != "nothing")
        return ", ".join(parts) or "one program"
