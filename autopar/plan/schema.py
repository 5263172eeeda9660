"""The record of a plan: values with layouts, decisions, predictions. Plain data, saved as versioned JSON."""

from __future__ import annotations

import dataclasses
import enum

from autopar.common.trace_events import Timeline
from autopar.hardware.cluster import Cluster
from autopar.hardware.step_errors import ONE_PROGRAM, PIPELINE, step_interval_s
from autopar.ir.layout import Layout
from autopar.ir.strategies import Strategy
from autopar.ir.traced_step import ExpertLoad
from autopar.lowering.lower import SolverReport

FORMAT_VERSION = 13
# Of an option of XLA.
OptionValue = bool | int | float | str
# Of 16, for each operation in `Decisions.operations`: one of 65,536 wrong operations has the right signature.
SIGNATURE_DIGITS = 4
NO_TIMELINE = Timeline(rows=(), links=(), events=())


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlannedValue:
    """An argument or a result of the step. `kind` is state, batch, constant, other or result.

    `layout` is on the mesh of `stage`, the first stage of a value that several stages read. With `stages`, each of them
    holds an equal slice along dimension 0, in this order, and the layout is that of a slice. `in_host`: the value is in
    the memory of the host before and after the step.
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
class Decisions:
    """Every choice, by the numbers of operations and values in the graph, which `operations` binds to its structure.

    Layouts and strategies are tables. `of_op` maps an operation to its strategy; `raw` and `placed` map a value to its
    unreduced and its reduced layout; `copies` holds (value, readers, layout); `wires` maps a SEND operation to the
    layout of its operand; `in_host` are the arguments in the memory of the host between steps, `saved_in_host` the
    values that are there between the forward and the backward pass; over the `overlapped_axes` products gather and
    scatter while they run. `operations` has
    `SIGNATURE_DIGITS` digits for each operation of `of_op` and `wires`, in the order of their numbers
    (`autopar.plan.codec`).
    """

    layouts: tuple[Layout, ...]
    strategies: tuple[Strategy, ...]
    of_op: dict[int, int]
    raw: dict[int, int]
    placed: dict[int, int]
    copies: tuple[tuple[int, str, int], ...]
    wires: dict[int, int] = dataclasses.field(default_factory=dict)
    in_host: tuple[int, ...] = ()
    saved_in_host: tuple[int, ...] = ()
    overlapped_axes: tuple[int, ...] = ()
    operations: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PredictedCollective:
    """Collectives of one kind over the same axes that one module causes. `sent_bytes` by each device in a step.

    `exposed_s`: of `time_s`, what no computation hides, which the step waits for. Combined collectives share their
    latency, so that it may be less than what follows from `time_s`.
    """

    kind: str
    axes: tuple[str, ...]
    module: str
    count: float
    sent_bytes: float
    time_s: float
    exposed_s: float


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
    """Equal arrays on one device, `count` of them and `nbytes` in total."""

    name: str
    kind: MemoryKind
    nbytes: int
    count: int = 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """Bytes on one device of a stage by purpose.

    Attributes:
        throughout: Memory held from the start to the end of a step: state, the batch, sums over micro-batches.
        at_peak: All memory at the peak.
        largest: The largest holders at the peak, largest first.
        course: The most bytes in each of equal parts of the program, in its order; of a step in one program only, as a
            pipeline's timeline has them by seconds.
    """

    throughout: dict[MemoryKind, int]
    at_peak: dict[MemoryKind, int]
    largest: tuple[MemoryHolder, ...]
    course: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """The predicted times and memory of a step.

    `peak_bytes`: per device, one number for each group of devices of a pipeline, else one; `memory`: its purposes;
    `flops`: of all devices, of which `jax.checkpoint` has `recomputed_flops` done again; `mfu`: without these, as they
    are none of the model's. `hidden_time_s`: computation that overlaps with
    communication within the mesh. A step in one program takes compute + collectives - hidden + host.
    `product_time_s`: of the computation, the matrix products and attention kernels; the rest waits for memory.
    `peak_rate_time_s`: of all operations at the peak rates of their types.

    For state and activations in the memory of the host: `host_bytes` kept by a device (one number for each group of
    devices, none without such arrays; of activations as many as there are at once), `host_copied_bytes` copied from and
    to the host in a step, and `host_time_s` of these copies; for a pipeline means over the devices.
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
    product_time_s: float
    peak_rate_time_s: float
    hidden_time_s: float = 0.0
    host_bytes: tuple[int, ...] = ()
    host_copied_bytes: float = 0.0
    host_time_s: float = 0.0
    recomputed_flops: float = 0.0

    @property
    def model_flops(self) -> float:
        """Without those that are done again."""
        return self.flops - self.recomputed_flops

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
class CandidateRecord:
    """A way to run the step: the plan, or one that is not, for the reason in `why`.

    `source`: of candidates; `text`: the way in short, empty where the whole source has none; `step_time_s` and
    `peak_bytes`: None where they are not known. Of a program: its mesh, the name of its constraints if it has any, and
    the roles of its mesh axes, none where that was not worked out. `num_microbatches`: of one stage that computes again
    only what the step itself does.
    """

    source: str
    text: str
    why: str = ""
    step_time_s: float | None = None
    peak_bytes: int | None = None
    num_microbatches: int | None = None
    axis_sizes: tuple[int, ...] = ()
    name: str = ""
    axis_roles: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModuleRow:
    """A module under the plan.

    `splits`: the layouts of the results of its matrix products (or of its largest results). Times per step on one
    device; `update_time_s` is the part of the update of its parameters in them. `saved_bytes`: the forward values that
    its backward pass reads, of one micro-batch on one device. `stage`: the stage of a pipeline that this part of the
    module is in.
    """

    module: str
    operations: int
    splits: tuple[str, ...]
    compute_time_s: float
    collectives: tuple[PredictedCollective, ...]
    update_time_s: float = 0.0
    saved_bytes: int = 0
    stage: int = 0

    @property
    def send_s(self) -> float:
        """Seconds of its collectives."""
        return sum(c.time_s for c in self.collectives)

    @property
    def exposed_s(self) -> float:
        """Seconds for which the step waits for its collectives."""
        return sum(c.exposed_s for c in self.collectives)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StageRecord:
    """One stage of a pipeline.

    `layers` are the names of its layers, the first of which has number `first_layer`. Its devices are neighbours from
    `first_device` on, as a mesh of `axis_sizes`. Times are those of one micro-batch, except `once_s`: operations before
    the first and after the last one. `peak_bytes` on one of its devices includes the other stages on the same devices.
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
    """The micro-batches and stages of a step. `recomputed[l]`: the recomputation policy of layer l; `scan_parts`: the
    number of parts of its scan over layers; `keeps_copies`: cheap copies of the state, such as parameters in half
    precision, are made once for all micro-batches; `joined`: the names of tasks that are one program with the first or
    the last micro-batch of their stage.
    """

    schedule: str
    num_microbatches: int
    chunks: int
    recomputed: tuple[str, ...]
    stages: tuple[StageRecord, ...]
    scan_parts: int = 1
    keeps_copies: bool = True
    joined: tuple[tuple[str, ...], ...] = ()
    timeline: Timeline


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PinRecord:
    """One pin: its pattern, its spec as Python writes it, and the number of leaves or modules that it matches.

    `alone_s`: the step time on the same mesh with this pin alone, where it was computed.
    """

    pattern: str
    spec: str
    count: int
    of: str
    alone_s: float | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PinsRecord:
    """The pins of a plan, and their cost.

    `free_step_time_s`: the predicted step time without pins, on the best mesh; None where no such plan was found.
    """

    pins: tuple[PinRecord, ...]
    step_time_s: float
    free_step_time_s: float | None

    @property
    def cost_s(self) -> float | None:
        """Seconds that the pins add to a step."""
        return None if self.free_step_time_s is None else self.step_time_s - self.free_step_time_s


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRecord:
    """A quantity that was measured, or read off a compiled program, beside its prediction, in one `unit` (s, bytes, or
    empty for numbers). `source`: tune or verify.
    """

    source: str
    name: str
    unit: str
    predicted: float
    measured: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlanRecord:
    """The saved part of a plan.

    With a `pipeline`, `axis_sizes` and `decisions` are empty: each stage has its own. `axis_roles`: for each stage, the
    roles of its mesh axes, which follow from its decisions (`autopar.search.write_plan`); `axis_names`: for each
    stage, their names, by a recipe, by pins or by these roles. `timeline`: that of a step in one program; a pipeline
    has its own.
    `attention_kernel`: attention that this kernel (`ops.attention.kernels.Kernel`) takes is one operation a pass of
    the graph; empty: it is as it is written.
    `scan_recompute`: what the bodies of scans in it save for the backward pass; empty: what the code saves.
    `stacked_over`: in it equal matrices of the update are stacked for so many devices; 0: each for itself.
    `uneven_over`: in it examples may be split unevenly over so many devices; 0: only as they divide.
    `per_microbatch`: patterns of modules that may mix the examples of a micro-batch.
    `expert_load`: how many rows each expert was taken to get.
    `row_blocks`: whether ragged products are made in blocks of rows where that takes less time.
    `least_step_time_s`: what a step takes under any plan, by the model of costs.
    `candidates`: the plan and the ways to run the step that lost against it. `measured`: what `autopar.tune` or
    `autopar.verify` found beside the predictions. `compiler_options`: XLA's options, for devices of the cluster's
    platform. `saved_names`: the names that `jax.checkpoint` saves in place of those of the code; None: as written.
    `exchange_options`: those of a pipeline's programs that run once a step, in place of some of the others.
    `recipe`: the call of `autopar.recipes` that asked for the plan; empty for a free search.
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
    candidates: tuple[CandidateRecord, ...]
    notes: tuple[str, ...]
    least_step_time_s: float
    axis_roles: tuple[tuple[str, ...], ...]
    pipeline: PipelineRecord | None = None
    axis_names: tuple[tuple[str, ...], ...] = ()
    attention_kernel: str = ""
    scan_recompute: str = ""
    stacked_over: int = 0
    uneven_over: int = 0
    per_microbatch: tuple[str, ...] = ()
    expert_load: ExpertLoad = ()
    row_blocks: bool = False
    timeline: Timeline = NO_TIMELINE
    pinned: PinsRecord | None = None
    measured: tuple[MeasuredRecord, ...] = ()
    compiler_options: dict[str, OptionValue] = dataclasses.field(default_factory=dict)
    saved_names: tuple[str, ...] | None = None
    recipe: str = ""
    exchange_options: dict[str, OptionValue] = dataclasses.field(default_factory=dict)

    @property
    def step_interval_s(self) -> tuple[float, float] | None:
        """(least, most) seconds of the step, as of `Plan.step_interval_s`."""
        if self.cluster.fits:
            return None
        kind = ONE_PROGRAM if self.pipeline is None else PIPELINE
        return step_interval_s(self.predicted.step_time_s, self.cluster.device, kind)

    @property
    def tried(self) -> tuple[CandidateRecord, ...]:
        """The programs, each on a logical mesh, and the meshes without one."""
        return tuple(c for c in self.candidates if c.axis_sizes)

    @property
    def weighed(self) -> tuple[CandidateRecord, ...]:
        """The others with a time: pipelines, one stage in micro-batches, and programs that save other values."""
        return tuple(c for c in self.candidates if not c.axis_sizes and c.step_time_s is not None)

    @property
    def rejected(self) -> tuple[CandidateRecord, ...]:
        """All but the plan."""
        return tuple(c for c in self.candidates if c.why)

    @property
    def own(self) -> tuple[CandidateRecord, ...]:
        """The plan among its candidates, then those that come to the same on the same mesh."""
        as_it = self.axis_sizes, self.predicted.step_time_s
        return tuple(
            sorted((c for c in self.candidates if (c.axis_sizes, c.step_time_s) == as_it), key=lambda c: bool(c.why))
        )

    @property
    def leaves(self) -> dict[int, PlannedValue]:
        """The leaves of the arguments by number."""
        return dict(enumerate(v for v in self.arguments if v.kind != "constant"))

    @property
    def sliced(self) -> frozenset[int]:
        """The leaves of the arguments of which each stage holds a slice."""
        return frozenset(i for i, v in self.leaves.items() if v.stages)
