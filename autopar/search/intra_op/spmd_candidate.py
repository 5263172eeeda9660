"""`SpmdCandidate`: the decisions of one SPMD program, lowered, with exact memory and time."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from autopar.cost import peak_memory
from autopar.cost.cost_model import CostModel, NodeCosts
from autopar.cost.memory_program import memory_program
from autopar.cost.overlap import timed
from autopar.cost.stream_simulator import Ran
from autopar.cost.usage import compute_times_s
from autopar.cost.xla_program import Compiler
from autopar.ir.graph import ALL, OpGraph, Role, values_of
from autopar.ir.partial_sums import Partials
from autopar.ir.pins import PinsOnMesh
from autopar.lowering.host_copies import with_host_copies
from autopar.lowering.instructions import LoweredBlock
from autopar.lowering.lower import ShardingPlan, lower
from autopar.passes.fold_step import FoldedStep
from autopar.plan.schema import CandidateRecord

# Decisions for a folded graph, unfolded to those for the whole one.

_READERS = (ALL, *(role.value for role in Role))


def unfold(plan: ShardingPlan, partials: Partials, graph: OpGraph, step: FoldedStep) -> ShardingPlan:
    """The decisions for the whole graph: everything is decided as its counterpart in the folded one.

    This also holds for the layouts of an operation's own operands and results: its counterpart has the same structure,
    and its results lie as those of its counterpart do. `partials` are those of the whole graph.
    """
    values = list(values_of(graph.block))
    like = step.value_of
    return dataclasses.replace(
        plan,
        partials=partials,
        strategy={op.id: plan.strategy[step.op_of[op.id]] for op in graph.ops() if step.op_of[op.id] in plan.strategy},
        unreduced={v: plan.unreduced[like[v]] for v in values if like[v] in plan.unreduced},
        reduced={v: plan.reduced[like[v]] for v in values if like[v] in plan.reduced},
        copies={
            (v, readers): plan.copies[like[v], readers]
            for v in values
            for readers in _READERS
            if (like[v], readers) in plan.copies
        },
        in_host=frozenset(v for v in graph.block.inputs if like[v] in plan.in_host),
        saved_in_host=frozenset(v for v in values if like[v] in plan.saved_in_host),
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SpmdCandidate:
    """The decisions of one program on one mesh, lowered, with exact memory and time.

    `ran` is its simulation and `compute_s` the seconds of each operation, by its number, without collectives.
    `shared_out_s` is the step time without communication if every operation were split over all devices, each of which
    still runs its kernels. `hidden_s`: the least objective on its mesh where of sends that can hide only a part counts,
    if it is known. `name` names the constraints of a baseline.
    """

    model: CostModel
    sharding: ShardingPlan
    lowered: LoweredBlock
    estimate: peak_memory.MemoryEstimate
    ran: Ran = dataclasses.field(repr=False)
    compute_s: Mapping[int, float] = dataclasses.field(repr=False)
    step_time_s: float
    shared_out_s: float
    hidden_s: float | None = None
    pins: PinsOnMesh | None = None
    source: str = "logical meshes"
    name: str = ""

    @property
    def num_microbatches(self) -> None:
        """None: it is no pipeline."""

    @property
    def peak_bytes(self) -> int:
        return self.estimate.peak_bytes

    @property
    def text(self) -> str:
        return f"mesh {self.sharding.mesh}" + (f", {self.name}" if self.name else "")

    @property
    def record(self) -> CandidateRecord:
        """What a plan keeps of it."""
        return CandidateRecord(
            source=self.source, text=self.text, step_time_s=self.step_time_s, peak_bytes=self.peak_bytes,
            axis_sizes=self.sharding.mesh.axis_sizes, name=self.name,
        )  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TimedSharding:
    """Decisions for a graph on one mesh, lowered and on the clock; `costs` are of the same graph and mesh."""

    sharding: ShardingPlan
    lowered: LoweredBlock
    ran: Ran
    costs: NodeCosts


def timed_sharding(
    graph: OpGraph, model: CostModel, sharding: ShardingPlan, costs: NodeCosts | None = None
) -> TimedSharding:
    """Lowers decisions and reads off how long they take."""
    costs = costs or NodeCosts(graph, model)
    lowered = with_host_copies(graph, lower(graph, sharding, model.links, costs.equations), sharding)
    return TimedSharding(sharding=sharding, lowered=lowered, ran=timed(graph, lowered, model, costs), costs=costs)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProgramMemory:
    """The memory of a lowered program: its values over time, their estimate, and the value and state of each."""

    program: peak_memory.MemoryProgram
    estimate: peak_memory.MemoryEstimate
    stands_for: dict[int, tuple[int, Any]]


def memory_of(graph: OpGraph, lowered: LoweredBlock, model: CostModel) -> ProgramMemory:
    """The exact memory of a lowered program."""
    program, stands_for = memory_program(graph, lowered, model)
    estimate = peak_memory.estimate(program, model.compiler)
    return ProgramMemory(program=program, estimate=estimate, stands_for=stands_for)


def evaluated(graph: OpGraph, model: CostModel, sharding: ShardingPlan) -> SpmdCandidate:
    """Lowers decisions, and computes their exact memory and time."""
    return with_memory(graph, model, timed_sharding(graph, model, sharding))[0]


def with_memory(graph: OpGraph, model: CostModel, found: TimedSharding) -> tuple[SpmdCandidate, ProgramMemory]:
    """The candidate of a timed sharding, and its memory over time, which is large: no candidate keeps it."""
    sharding, lowered, ran = found.sharding, found.lowered, found.ran
    memory = memory_of(graph, lowered, model)
    seconds = compute_times_s(graph, lowered, model, found.costs)
    candidate = SpmdCandidate(
        model=model,
        sharding=sharding,
        lowered=lowered,
        estimate=memory.estimate,
        ran=ran,
        compute_s=seconds,
        step_time_s=ran.end_s,
        shared_out_s=_shared_out_s(graph, seconds, found),
    )
    return candidate, memory


def _shared_out_s(graph: OpGraph, seconds: Mapping[int, float], found: TimedSharding) -> float:
    num_devices, strategies = found.sharding.mesh.num_devices, found.sharding.strategy
    shared_s = 0.0
    for op in graph.ops():
        if op.id in seconds:
            split = strategies[op.id].split if op.id in strategies else 1
            shared_s += max(seconds[op.id] * split / num_devices, found.costs.shared_s(op, num_devices))
    return shared_s


def over_limit_values(memory: ProgramMemory, compiler: Compiler, limit_bytes: int) -> frozenset[tuple[int, str]]:
    """The values, with their states, that are alive while the memory is over the limit."""
    ranges = peak_memory.live_ranges(memory.program, compiler)
    nbytes = memory.program.nbytes
    change: dict[int, int] = {}
    for r in ranges:
        size = int(r.share * nbytes[r.value])
        change[r.start] = change.get(r.start, 0) + size
        change[r.stop] = change.get(r.stop, 0) - size
    positions = sorted(change)
    over, live = [], 0
    for position, next_position in zip(positions, [*positions[1:], positions[-1] + 1], strict=True):
        live += change[position]
        if live > limit_bytes:
            over.append((position, next_position))
    values = set()
    for r in ranges:
        if r.value in memory.stands_for and any(r.start < stop and start < r.stop for start, stop in over):
            value, (_, state) = memory.stands_for[r.value]
            values.add((value, state))
    return frozenset(values)
