"""`PlanRequest`: all options of planning, from the public functions down to the search."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Sequence
from typing import Protocol

from autopar.errors import InvalidArgumentError
from autopar.ir.binding import Binding
from autopar.ir.layout import Layout
from autopar.ir.pins import Pins
from autopar.ir.traced_step import ExpertLoad, ShardingsInCode
from autopar.plan.schema import PlannedValue


class Attention(enum.StrEnum):
    """How attention that is found in a step is run."""

    AUTO = "auto"  # by the device's kernel where the step is then predicted to be faster, or else does not fit
    AS_WRITTEN = "as written"
    KERNEL = "kernel"  # by the device's kernel where that takes it, else as written
    BLOCKWISE = "blockwise"  # by the device's kernel where that takes it, else in blocks of queries


AS_WRITTEN, AUTO = "as written", "auto"  # of `PlanRequest.remat`


class Effort(enum.StrEnum):
    """How far a search goes on for a faster plan."""

    QUICK = "quick"
    DEFAULT = "default"
    THOROUGH = "thorough"

    @property
    def least_gain(self) -> float:
        """The share of a step's time that a better plan must be able to save for the search to go on."""
        return {Effort.QUICK: QUICK_GAIN, Effort.DEFAULT: NEARLY_EQUAL, Effort.THOROUGH: 0.0}[self]


def checked_effort(where: str, effort: object) -> Effort:
    """Raises: InvalidArgumentError for a word that names none."""
    if effort not in tuple(Effort):
        raise InvalidArgumentError(
            where=where,
            expected=" or ".join(repr(str(e)) for e in Effort),
            got=repr(effort),
            hint="leave it out to search until nothing worth looking for is left",
        )
    return Effort(str(effort))


def checked_time_limit_s(where: str, time_limit_s: object) -> float | None:
    """Raises: InvalidArgumentError for what is no number of seconds, 0 or more."""
    if time_limit_s is None:
        return None
    if isinstance(time_limit_s, bool) or not isinstance(time_limit_s, int | float) or not time_limit_s >= 0:
        raise InvalidArgumentError(
            where=where,
            expected="seconds, 0 or more, or None",
            got=repr(time_limit_s),
            hint="leave it out to let the search end by itself",
        )
    return time_limit_s


def checked_remat(names: str | Sequence[str]) -> str | tuple[str, ...]:
    """Raises: InvalidArgumentError for another word than "as written" and "auto", and for what is no list of names."""
    if isinstance(names, str) and names in (AS_WRITTEN, AUTO):
        return names
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise InvalidArgumentError(
            where="Search(remat=...)",
            expected=f"{AS_WRITTEN!r}, {AUTO!r}, or a list of names of jax.ad_checkpoint.checkpoint_name",
            got=repr(names),
            hint="leave it out to have the search decide",
        )
    return tuple(sorted(set(names)))


# Plans whose times differ by less count as equal, and of them that on fewer axes is taken, which is easier to read.
# Less than this is not searched for either. No recipe may be faster than the search by 0.01 %: this is half of it.
NEARLY_EQUAL = 5e-5
# Of a step: what is told as as fast, and not by how little it is slower.
AS_FAST = 1e-3
# What a quick search does not go on for: baselines on one axis take seconds and were up to 5 % faster than a mesh's.
QUICK_GAIN = 0.02
# Of a step: what must be gained at least by what takes long to search for or to compile, such as a third mesh axis,
# products in pieces, or one more program. Less is within what the models of these err by.
WORTHWHILE = 0.01


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FollowedStages:
    """The stages of another step's plan, whose state this step reads where it lies.

    Attributes:
        schedule: That of the other step, for a step with a backward pass of its own.
        group_axis_sizes: The mesh of each group of devices.
        leaves: The place of each leaf of that state, by its number among this step's.
    """

    schedule: str
    group_axis_sizes: tuple[tuple[int, ...], ...]
    leaves: tuple[tuple[int, PlannedValue], ...]

    @property
    def sliced(self) -> frozenset[int]:
        """The leaves of which each stage holds a slice."""
        return frozenset(leaf for leaf, value in self.leaves if value.stages)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """The options of planning. None, or the default, leaves a choice to the search.

    Attributes:
        memory_limit_bytes: Memory of one device that the plan may use.
        time_limit_s: Seconds after which planning ends with the best plan so far.
        max_mesh_axes: The most axes of the logical meshes that are tried.
        axis_sizes: The only logical mesh of a step in one program.
        fixed: Required layouts of argument leaves (by number).
        in_host: Argument leaves (by number) that come from the memory of the host.
        followed_stages: Stages of another step, of which `num_stages` and `chunks` are taken too.
        num_stages: Groups of devices of a pipeline; each runs `chunks` stages.
        num_microbatches: The number of parts of the batch.
        schedule: The order in which stages run micro-batches.
        chunks: Stages on each group of devices.
        recompute: The recomputation policy of each layer of a pipeline (`passes.remat.policies_of`).
        binding: The one mesh, with the uses of its axes.
        pins: Required layouts of some arguments and values.
        attention: How attention is run; under a recipe with a ring always in blocks.
        scan_recompute: As of `TracedStep`; None leaves it to the search.
        effort: How far the search goes on.
        constraints: What layouts that the step's code names are to the plan.
        per_microbatch: Patterns of modules that may mix the examples of a micro-batch.
        expert_load: How many rows each expert gets.
        compiler_options: XLA's options beside those that plans set themselves, or in their place; None: XLA's own.
        remat: The names that `jax.checkpoint` saves: as written, those of the fastest plan (auto), or these.
        defer_stages: Whether stages are not searched for where the step does not fit as one program: one stage in the
            fewest micro-batches may be the plan then.
        to_beat_s: Step time of a plan that is there; slower ones are not wanted.
        recipe: The name of the recipe that the request is of; it decides nothing.
    """

    memory_limit_bytes: int | None = None
    time_limit_s: float | None = None
    max_mesh_axes: int = 3
    axis_sizes: tuple[int, ...] | None = None
    fixed: tuple[tuple[int, Layout], ...] = ()
    in_host: tuple[int, ...] = ()
    followed_stages: FollowedStages | None = None
    num_stages: int | None = None
    num_microbatches: int | None = None
    schedule: str | None = None
    chunks: int | None = None
    recompute: str = "nothing"
    binding: Binding | None = None
    pins: Pins | None = None
    attention: Attention = Attention.AUTO
    scan_recompute: str | None = None
    effort: Effort = Effort.DEFAULT
    constraints: ShardingsInCode = ShardingsInCode.ADVICE
    per_microbatch: tuple[str, ...] = ()
    expert_load: ExpertLoad = ()
    compiler_options: tuple[tuple[str, bool | int | float | str | None], ...] = ()
    remat: str | tuple[str, ...] = AS_WRITTEN
    defer_stages: bool = False
    to_beat_s: float = math.inf
    recipe: str = dataclasses.field(default="", compare=False)

    @property
    def names_pipeline(self) -> bool:
        """Whether the request names stages, micro-batches or their schedule."""
        return any(n is not None for n in (self.num_stages, self.num_microbatches, self.schedule, self.chunks))

    @property
    def admits_one_program(self) -> bool:
        """Whether a step in one program meets the request: its whole batch is one micro-batch."""
        names_stages = any(n is not None for n in (self.num_stages, self.schedule, self.chunks))
        return not names_stages and self.num_microbatches in (None, 1)

    @property
    def is_built_as_asked(self) -> bool:
        """Whether the requested stages or micro-batches are built without a search, as a recipe or pins name them."""
        bound = self.binding is not None or self.pins is not None
        return self.num_stages is not None or (bound and not self.admits_one_program)

    @property
    def leaves_layouts_free(self) -> bool:
        """Whether the request leaves all layouts to the search."""
        return not self.fixed and self.axis_sizes is None and self.binding is None and self.pins is None

    def with_recipe(self, recipe: PlanRequest) -> PlanRequest:
        """This request under a recipe; pipeline options of this request take precedence."""
        own = {name: getattr(self, name) for name in ("num_stages", "num_microbatches", "schedule", "chunks")}
        parts = {name: getattr(recipe, name) for name in (*own, "recompute", "binding", "pins", "recipe")}
        requested = {name: value for name, value in own.items() if value is not None}
        return dataclasses.replace(self, **(parts | requested))


class HasRequest(Protocol):
    """A recipe."""

    @property
    def request(self) -> PlanRequest: ...
