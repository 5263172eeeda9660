"""The options of a search."""

from __future__ import annotations

import dataclasses

from autopar.common.deadline import Deadline
from autopar.ir.layout import Layout
from autopar.sharding.constraints import Binding
from autopar.sharding.pins import Pins


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PipelineOptions:
    """What may be asked of a pipeline; None where it is for the search to choose."""

    num_stages: int | None = None
    num_microbatches: int | None = None
    schedule: str | None = None
    chunks: int | None = None

    @property
    def is_asked(self) -> bool:
        """Whether anything but the search's own choice was asked for."""
        return self != PipelineOptions()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """What may be asked of the search.

    `max_mesh_axes` bounds the logical meshes that are tried, `axis_sizes` names the only one. `fixed` gives argument
    leaves (by number) a layout that they must have; those `in_host` come from the memory of the host. `binding` is a
    mesh whose axes have their uses, `recompute` what each layer of a pipeline recomputes (`Recompute`), `pins` say how
    some arguments and values lie. `deadline` is when `time_limit_s` is over, set when planning begins.
    """

    memory_limit_bytes: int | None = None
    time_limit_s: float | None = None
    max_mesh_axes: int = 3
    axis_sizes: tuple[int, ...] | None = None
    fixed: tuple[tuple[int, Layout], ...] = ()
    in_host: tuple[int, ...] = ()
    pipeline: PipelineOptions = dataclasses.field(default_factory=PipelineOptions)
    binding: Binding | None = None
    recompute: str = "nothing"
    pins: Pins | None = None
    deadline: Deadline = dataclasses.field(default=Deadline(), repr=False, compare=False)

    @property
    def is_free(self) -> bool:
        """Whether nothing is said of how the step lies on the devices."""
        return not self.fixed and self.axis_sizes is None and self.binding is None and self.pins is None
