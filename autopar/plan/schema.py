"""The record of a plan: values with layouts, decisions, predictions. Plain data, saved as versioned JSON."""

from __future__ import annotations

import dataclasses
import enum

from autopar.common.trace_events import Timeline
from autopar.hardware.cluster import Cluster
from autopar.ir.layout import Layout
from autopar.lowering.decisions import SolverReport

FORMAT_VERSION = 7
# Of 16, for each operation in `Decisions.operations`: one of 65,536 wrong operations has the right signature.
SIGNATURE_DIGITS = 4
NO_TIMELINE = Timeline(rows=(), links=(), events=())


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlannedValue:
    """An argument or a result of the step. `kind` is state, batch, constant, other or result.

    `stage` is the one whose mesh the layout is on; the first one for what several stages read. Where `stages` are
    given, each of them holds an equal part along dimension 0, in this order, and the layout is that of a part. What is
    `in_host` lies in the memory of the host before and after the step.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    kind: str
    layout: Layout
    stage: int = 0
    stages: tuple[int, ...] = ()
    in_host: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStrategy:
    """A strategy, its layouts as indices into `Decisions.layouts`."""

    operands: tuple[int, ...]
    results: tuple[int, ...]
    split: int
    combined: tuple[int, ...]
    ring: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Decisions:
    """Every choice, by the numbers of operations and values in the graph, which `operations` binds to its structure.

    Layouts and strategies are tables; `of_op` maps an operation to its strategy; `raw`, `placed` map a value to its
    layout, `copies` holds (value, readers, layout), `wires` the layout in which an operation sends its operand to
    another stage; `in_host` are the arguments that lie in the memory of the host between steps. `operations` has
    `SIGNATURE_DIGITS` digits for each operation of `of_op` and `wires`, in the order of their numbers
    (`autopar.plan.signatures`).
    """

    layouts: tuple[Layout, ...]
    strategies: tuple[PlannedStrategy, ...]
    of_op: dict[int, int]
    raw: dict[int, int]
    placed: dict[int, int]
    copies: tuple[tuple[int, str, int], ...]
    wires: dict[int, int] = dataclasses.field(default_factory=dict)
    in_host: tuple[int, ...] = ()
    operations: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PredictedCollective:
    """Collectives of one kind over the same axes that one module causes. `sent_bytes` by each device in a step."""

    kind: str
    axes: tuple[str, ...]
    module: str
    count: float
    sent_bytes: float
    time_s: float


class MemoryKind(enum.Enum):
    """The purpose of memory."""

    PARAMETER = "parameters"  # state that the forward pass reads
    OPTIMIZER = "optimizer state"  # other state: moments, master copies
    BATCH = "batch"
    OTHER = "other arguments and results"
    GRADIENT = "gradients"  # what the backward pass makes for the update, and its sums over micro-batches
    SAVED = "saved for backward"  # made by the forward pass, read by the backward pass
    COLLECTIVE = "collective buffers"  # what is gathered, or on its way from one layout to another
    NEW_STATE = "new state"  # beside the state that it replaces
    TEMPORARY = "temporaries"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MemoryHolder:
    """Arrays on one device that are alike, `count` of them and `nbytes` together."""

    name: str
    kind: MemoryKind
    nbytes: int
    count: int = 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """Bytes on one device of a stage by purpose.

    Attributes:
        throughout: Of what is there from the start to the end of a step: state, the batch, sums over micro-batches.
        at_peak: Of everything, when most is held.
        largest: The largest holders at the peak, largest first.
    """

    throughout: dict[MemoryKind, int]
    at_peak: dict[MemoryKind, int]
    largest: tuple[MemoryHolder, ...]

    @property
    def model_state_bytes(self) -> int:
        """Parameters, optimizer state, and the gradients that are summed over micro-batches."""
        kinds = (MemoryKind.PARAMETER, MemoryKind.OPTIMIZER, MemoryKind.GRADIENT)
        return sum(self.throughout.get(kind, 0) for kind in kinds)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """The predicted times and memory of a step.

    `peak_bytes` per device, one number for each group of devices (of a pipeline; else one), and `memory` what they are
    held for; `flops` of all devices; `allocation_time_s` what it waits for memory; `hidden_time_s` for how long
    something is computed while something else is sent within the mesh. A step in one program takes compute +
    collectives - hidden + allocation + host.

    Of state in the memory of the host, `host_bytes` are what a device keeps there (one number for each group of
    devices, none where there is no such state), `host_copied_bytes` what it copies from there and back in a step, and
    `host_time_s` how long it does so; of a pipeline means over the devices.
    """

    step_time_s: float
    compute_time_s: float
    collective_time_s: float
    peak_bytes: tuple[int, ...]
    flops: float
    mfu: float
    bubble_fraction: float
    collectives: tuple[PredictedCollective, ...]
    memory: tuple[MemoryUse, ...]
    allocation_time_s: float = 0.0
    hidden_time_s: float = 0.0
    host_bytes: tuple[int, ...] = ()
    host_copied_bytes: float = 0.0
    host_time_s: float = 0.0

    @property
    def sent_bytes(self) -> float:
        """Bytes that each device sends in a step."""
        return sum(c.sent_bytes for c in self.collectives)

    def by_kind(self) -> dict[str, tuple[float, float]]:
        """Kind of collective -> (count, bytes sent by each device), per step."""
        out: dict[str, tuple[float, float]] = {}
        for c in self.collectives:
            count, sent = out.get(c.kind, (0.0, 0.0))
            out[c.kind] = (count + c.count, sent + c.sent_bytes)
        return out


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MeshTrial:
    """One logical mesh that was tried. Without a plan, the time is None and `status` says why.

    `name` says what the plan was held to, where it was.
    """

    axis_sizes: tuple[int, ...]
    step_time_s: float | None
    peak_bytes: int | None
    status: str
    name: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModuleRow:
    """A module under the plan.

    `splits`: how the results of its matrix products (or its largest results) lie. Times per step on one device.
    `saved_bytes`: what its backward pass reads of the forward pass, of one micro-batch on one device.
    """

    module: str
    operations: int
    splits: tuple[str, ...]
    compute_time_s: float
    collectives: tuple[PredictedCollective, ...]
    saved_bytes: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StageRecord:
    """One stage of a pipeline.

    `layers` are the names of the layers it holds, the first of them number `first_layer`; its devices are neighbours
    from `first_device` on, used as a mesh of `axis_sizes`. Times are of one micro-batch, but for `once_s`: what runs
    before the first and after the last one. `peak_bytes` on one of its devices, with all that other stages on the same
    devices hold.
    """

    first_layer: int
    layers: tuple[str, ...]
    first_device: int
    axis_sizes: tuple[int, ...]
    decisions: Decisions
    solver: SolverReport
    forward_s: float
    backward_s: float
    weight_s: float
    once_s: float
    peak_bytes: int
    in_flight: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PipelineRecord:
    """How a step is cut into micro-batches and stages. `recomputed[l]`: what layer l keeps for its backward pass;
    `scan_parts`: into how many its scan over layers is cut; `keeps_copies`: what is cheap to make of the state, such as
    parameters in half precision, is made once for all micro-batches."""

    schedule: str
    num_microbatches: int
    chunks: int
    recomputed: tuple[str, ...]
    stages: tuple[StageRecord, ...]
    scan_parts: int = 1
    keeps_copies: bool = True
    timeline: Timeline


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PipelineTrial:
    """One way to cut the step that was weighed: its stages in short, and the time it would take."""

    text: str
    step_time_s: float
    peak_bytes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RejectionRecord:
    """A way to run the step that was not taken: the source of candidates that had it, the way in short (empty: the
    whole source), the reason, and what it would take where that is known.
    """

    source: str
    text: str
    why: str
    step_time_s: float | None = None
    peak_bytes: int | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PinRecord:
    """One pin: its pattern, its spec as Python writes it, and how many leaves or modules it names.

    `alone_s` is what the step would take on the same mesh with this pin alone, where that was worked out.
    """

    pattern: str
    spec: str
    count: int
    of: str
    alone_s: float | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PinsRecord:
    """What a plan was made to hold to, and what that costs.

    `free_step_time_s` is what the step is predicted to take without pins, on the mesh that is best then; None where no
    such plan was found.
    """

    pins: tuple[PinRecord, ...]
    step_time_s: float
    free_step_time_s: float | None

    @property
    def cost_s(self) -> float | None:
        """Seconds that the pins add to a step."""
        return None if self.free_step_time_s is None else self.step_time_s - self.free_step_time_s


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlanRecord:
    """Everything of a plan that is saved.

    Of a plan with a `pipeline`, `axis_sizes` and `decisions` are empty: each stage has its own. `axis_names` says what
    the axes are for (data, tensor), in a plan that was made by a recipe, or what pins call them; `axis_roles`, of each
    stage, what they turned out to do (`autopar.compiler.axis_roles`). `timeline` is that of
    a step in one program; a pipeline has its own. The graph of a step with `blockwise_attention` is another one, and
    decisions are by its numbers. `rejected` are the ways to run the step that lost against this plan.
    """

    format_version: int
    step: str
    fingerprint: str
    cluster: Cluster
    axis_sizes: tuple[int, ...]
    memory_limit_bytes: int | None
    arguments: tuple[PlannedValue, ...]
    results: tuple[PlannedValue, ...]
    decisions: Decisions
    predicted: Predicted
    solver: SolverReport
    modules: tuple[ModuleRow, ...]
    tried: tuple[MeshTrial, ...]
    notes: tuple[str, ...]
    pipeline: PipelineRecord | None = None
    weighed: tuple[PipelineTrial, ...] = ()
    axis_names: tuple[str, ...] = ()
    axis_roles: tuple[tuple[str, ...], ...] = ()
    blockwise_attention: bool = False
    timeline: Timeline = NO_TIMELINE
    pinned: PinsRecord | None = None
    rejected: tuple[RejectionRecord, ...] = ()
