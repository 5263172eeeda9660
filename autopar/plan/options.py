"""`PlanRequest`: all options of planning, from the public functions down to the search."""

from __future__ import annotations

import dataclasses

from autopar.ir.layout import Layout
from autopar.sharding.constraints import Binding
from autopar.sharding.pins import Pins


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """What is asked of a plan. None, or the default, leaves a choice to the search.

    Attributes:
        memory_limit_bytes: Memory of one device that the plan may use.
        time_limit_s: Seconds after which planning ends with the best plan so far.
        max_mesh_axes: The most axes of the logical meshes that are tried.
        axis_sizes: The only logical mesh of a step in one program.
        fixed: Layouts that argument leaves (by number) must have.
        in_host: Argument leaves (by number) that come from the memory of the host.
        num_stages: Groups of devices of a pipeline; each runs `chunks` stages.
        num_microbatches: Into how many parts the batch is cut.
        schedule: In which order stages run micro-batches.
        chunks: Stages on each group of devices.
        recompute: What each layer of a pipeline recomputes in its backward pass (`Recompute`).
        binding: The one mesh, with the uses of its axes.
        pins: How some arguments and values lie.
    """

    memory_limit_bytes: int | None = None
    time_limit_s: float | None = None
    max_mesh_axes: int = 3
    axis_sizes: tuple[int, ...] | None = None
    fixed: tuple[tuple[int, Layout], ...] = ()
    in_host: tuple[int, ...] = ()
    num_stages: int | None = None
    num_microbatches: int | None = None
    schedule: str | None = None
    chunks: int | None = None
    recompute: str = "nothing"
    binding: Binding | None = None
    pins: Pins | None = None

    @property
    def names_pipeline(self) -> bool:
        """Whether anything is said of stages, micro-batches or their schedule."""
        return any(n is not None for n in (self.num_stages, self.num_microbatches, self.schedule, self.chunks))

    @property
    def admits_one_program(self) -> bool:
        """Whether a step in one program is what was asked for: its whole batch is one micro-batch."""
        names_stages = any(n is not None for n in (self.num_stages, self.schedule, self.chunks))
        return not names_stages and self.num_microbatches in (None, 1)

    @property
    def is_built_as_asked(self) -> bool:
        """Whether stages or micro-batches are built as a recipe, or pins, ask for them, without a search for others."""
        bound = self.binding is not None or self.pins is not None
        return self.num_stages is not None or (bound and not self.admits_one_program)

    @property
    def leaves_layouts_free(self) -> bool:
        """Whether nothing is said of how the step lies on the devices."""
        return not self.fixed and self.axis_sizes is None and self.binding is None and self.pins is None

    def with_recipe(self, recipe: PlanRequest) -> PlanRequest:
        """This request under a recipe; what this one says of a pipeline stands."""
        asked = {name: getattr(self, name) for name in ("num_stages", "num_microbatches", "schedule", "chunks")}
        parts = {name: getattr(recipe, name) for name in (*asked, "recompute", "binding", "pins")}
        given = {name: value for name, value in asked.items() if value is not None}
        return dataclasses.replace(self, **(parts | given))
