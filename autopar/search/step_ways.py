"""The ways to write a step among which a search chooses, and the graph of the step in each.

Attention runs by a kernel, in blocks or as it is written, and scans over layers compute more or less again. The graph
of the whole batch as one program is built once for all that plan it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from autopar.common.text import text_of_bytes, text_of_s
from autopar.cost.cost_model import least_time_s
from autopar.cost.roofline import flops_of
from autopar.frontend.build_graph import by_kernel, graph_as_written, saving_in_scans
from autopar.frontend.recompute_in_scans import Recompute
from autopar.hardware.cluster import Cluster
from autopar.hardware.kinds import Platform
from autopar.ir.graph import OpGraph, Role, read_by
from autopar.ir.primitives import ATTENTION_PASSES
from autopar.ir.rules import RuleBook
from autopar.ir.traced_step import TracedStep
from autopar.ops.attention.checks import score_products
from autopar.ops.attention.kernels import Kernel, library_of
from autopar.ops.attention.match import chosen_note
from autopar.passes.fold_step import GraphViews
from autopar.passes.round_examples import round_examples
from autopar.passes.saved_arrays import offloaded_by_policy, waiting_in_host
from autopar.passes.stack_updates import stack_updates
from autopar.plan.context import StepGraphs
from autopar.plan.options import Attention, PlanRequest
from autopar.search.intra_op.saved_values import LayerValues, SavedChoice


def program_graph(traced: TracedStep, rules: RuleBook, graphs: StepGraphs | None = None) -> OpGraph:
    """The step's graph, with equal matrices of its update stacked, and its examples rounded up, where the step says so.
    `graphs` keeps the graph as it is written, and with passes of a kernel.

    Raises: as `build_graph`.
    """
    graphs = graphs or StepGraphs()
    plain = dataclasses.replace(traced, scan_recompute="", stacked_over=0, uneven_over=0)
    written = dataclasses.replace(plain, attention_kernel="")
    graph = graphs.of(written, "as written", lambda: graph_as_written(written, rules))

    def with_kernel() -> OpGraph:
        if not plain.attention_kernel:
            return graph
        # The semantics of the equal layers of the graph as it is written are those of one: kernels ask for them too.
        named = dataclasses.replace(graph, values=whole_graph(written, rules, graphs).annotated.values)
        return by_kernel(graph, plain.attention_kernel, rules, named)

    graph = graphs.of(plain, "by kernel", with_kernel)
    graph = saving_in_scans(graph, traced.scan_recompute, rules)
    if traced.stacked_over:
        graph = stack_updates(graph, traced.stacked_over, flops_of, rules)
    return _rounded(graph, traced)


def _rounded(graph: OpGraph, traced: TracedStep) -> OpGraph:
    return round_examples(graph, traced.uneven_over) if traced.uneven_over else graph


def whole_graph(traced: TracedStep, rules: RuleBook, graphs: StepGraphs) -> GraphViews:
    """The views of the step's graph, kept in `graphs`. Raises: UnsupportedError as `build_graph`."""
    return graphs.of(traced, "whole", lambda: GraphViews(program_graph(traced, rules, graphs), flops_of))


def stacked_step(traced: TracedStep, num_devices: int, rules: RuleBook, graphs: StepGraphs) -> TracedStep:
    """The step with equal matrices of its update stacked for so many devices, where it has any."""
    if num_devices == 1:
        return traced
    plain, stacked = whole_graph(traced, rules, graphs), dataclasses.replace(traced, stacked_over=num_devices)
    even = plain
    if traced.uneven_over:
        even = whole_graph(dataclasses.replace(traced, uneven_over=0), rules, graphs)

    def views() -> GraphViews:
        graph = stack_updates(even.graph, num_devices, flops_of, rules)
        return plain if graph is even.graph else GraphViews(_rounded(graph, traced), flops_of)

    return traced if graphs.of(stacked, "whole", views) is plain else stacked


# The share of a step's computing that a kernel must save for attention not to stay as it is written: programs in blocks
# that were predicted equal took 1.6 % less and 2.0 % more on an H200 (`benchmarks/results/accelerator.md`). The same
# share must be saved by values that wait in the memory of the hosts, whose copies no card has timed.
WORTH_A_KERNEL = 0.02


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepWay:
    """A way to write a step.

    Attributes:
        attention: The program of attention.
        scan_recompute: As of `TracedStep`.
        least_s: The least time of a step in it; inf: it is taken only where nothing else fits.
        saved_bytes: What the backward pass reads of the forward pass of the whole batch, over all devices.
        sends: Whether values wait for the backward pass in the memory of the hosts.
        kept_bytes: Of the `saved_bytes` those of scans over layers that were chosen by value; None: none were.
        notes: Those of a plan in which it was chosen.
    """

    attention: Attention
    scan_recompute: str = ""
    least_s: float = 0.0
    saved_bytes: float = 0.0
    sends: bool = False
    kept_bytes: float | None = None
    notes: tuple[str, ...] = ()

    def of(self, request: PlanRequest) -> PlanRequest:
        """The request for this way."""
        return dataclasses.replace(request, attention=self.attention, scan_recompute=self.scan_recompute)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepWays:
    """The ways to write a step that a request leaves open, for a cluster. `graphs` keeps their graphs."""

    traced: TracedStep
    request: PlanRequest
    cluster: Cluster
    rules: RuleBook
    graphs: StepGraphs

    def __iter__(self) -> Iterator[StepWay]:
        """First the fastest, of a step with scans of those that need no more memory than the code, as what scans stack
        takes time too; then the others by their least times, then other attention; of a recipe the first alone.
        """
        first, *others = self.of_attention()
        if self.request.is_built_as_asked or self.request.binding is not None:
            yield first
            return
        if self.cluster.device.platform is Platform.CPU:
            yield first
            yield from sorted(self.recomputing(first), key=lambda way: way.least_s)
        else:
            ways = [first, *self.recomputing(first)]
            has_scans = any(op.blocks for op in whole_graph(self.step(first), self.rules, self.graphs).graph.block.ops)
            may_be_first = [way for way in ways if not has_scans or way.saved_bytes <= first.saved_bytes]
            start = min(may_be_first, key=lambda way: way.least_s * (1 - WORTH_A_KERNEL if way is first else 1))
            yield start
            yield from sorted((way for way in ways if way is not start), key=lambda way: way.least_s)
        for way in others:
            yield way
            yield from self.recomputing(way)

    def step(self, way: StepWay) -> TracedStep:
        """The step as a way has it."""
        return dataclasses.replace(
            self.traced,
            attention_kernel=_kernel_of(way.attention, library_of(self.cluster.device)),
            scan_recompute=way.scan_recompute,
            per_microbatch=self.request.per_microbatch,
            expert_load=self.request.expert_load,
            row_blocks=self.cluster.device,
        )

    def least_s(self, way: StepWay) -> float:
        return least_s_of(self.step(way), self.cluster, self.rules, self.graphs)

    def measured(self, way: StepWay) -> StepWay:
        graph = whole_graph(self.step(way), self.rules, self.graphs).graph
        return dataclasses.replace(way, least_s=self.least_s(way), saved_bytes=bytes_saved(graph))

    def of_attention(self) -> tuple[StepWay, ...]:
        """Those of attention alone, in the same order.

        Virtual CPU devices, whose compiler has no kernel, run blocks where nothing else fits.
        """
        request, again = self.request, scan_recompute_of(self.request)
        asked = Attention.BLOCKWISE if has_rings(request) else request.attention
        if asked is not Attention.AUTO:
            return (self.measured(StepWay(attention=asked, scan_recompute=again)),)
        written = self.measured(StepWay(attention=Attention.AS_WRITTEN, scan_recompute=again))
        views = whole_graph(self.step(written), self.rules, self.graphs)
        if next(score_products(views.annotated), None) is None:
            return (written,)
        in_blocks = dataclasses.replace(written, attention=Attention.BLOCKWISE)
        if self.cluster.device.platform is Platform.CPU:
            graph = whole_graph(self.step(in_blocks), self.rules, self.graphs).graph
            notes = (chosen_note(Kernel.BLOCKS, None, graph),)
            return written, dataclasses.replace(self.measured(in_blocks), least_s=math.inf, notes=notes)
        ways, library = [written], library_of(self.cluster.device)
        kernels = [*dict.fromkeys((library, Kernel.BLOCKS))]
        for kernel in kernels:
            of_kernel = dataclasses.replace(written, attention=Attention.KERNEL)
            way = in_blocks if kernel is Kernel.BLOCKS else of_kernel
            views = whole_graph(self.step(way), self.rules, self.graphs)
            if not any(op.primitive in ATTENTION_PASSES for op in views.graph.ops()):
                continue  # the kernel takes none
            way = self.measured(way)
            notes = (chosen_note(kernel, written.least_s - way.least_s, views.graph),)
            ways.append(dataclasses.replace(way, notes=notes))
            if kernel is not kernels[-1] and next(score_products(views.annotated), None) is None:
                break  # nothing is left to blocks
        fastest = min(range(len(ways)), key=lambda i: ways[i].least_s * (1 - WORTH_A_KERNEL if i == 0 else 1))
        return tuple(ways[fastest:])

    def recomputing(self, way: StepWay) -> Iterator[StepWay]:
        """A way with more and with less recomputation, where a request leaves that open: in scans over layers value by
        value, and none at all where the code asks for some. What the code offloads stays so.
        """
        if self.request.scan_recompute is not None or self.traced.saved_names is not None:
            return
        plain = whole_graph(self.step(way), self.rules, self.graphs).graph
        if offloaded_by_policy(plain):
            return
        recomputes = any(op.recomputes for op in plain.ops())
        nothing = [SavedChoice(text=Recompute.NOTHING.value)] if recomputes else []
        choices = {choice.text: choice for choice in (*nothing, *self.layer_values(way).choices())}
        others = [self._saving(choice, way) for choice in choices.values()]
        least_bytes = {True: math.inf, False: math.inf}  # of those with values in the memory of the hosts, and without
        for other in sorted(others, key=lambda other: (other.least_s, other.saved_bytes)):
            # What takes longer than another and saves as much is left out.
            if other.saved_bytes < least_bytes[other.sends] and other.saved_bytes != way.saved_bytes:
                yield other
            least_bytes[other.sends] = min(least_bytes[other.sends], other.saved_bytes)

    def layer_values(self, way: StepWay) -> LayerValues:
        step = self.step(way)
        plain = whole_graph(step, self.rules, self.graphs).graph
        return self.graphs.of(step, ("layer values", self.cluster), lambda: LayerValues.of_scans(plain, self.cluster))

    def within(self, near: StepWay, most_bytes: float) -> StepWay | None:
        """The fastest way that saves so many bytes at most, like one by value that saves fewer; None: it is that."""
        assert near.kept_bytes is not None, "a way by value"
        way = next(way for way in self.of_attention() if way.attention is near.attention)
        kept_bytes = near.kept_bytes + most_bytes - near.saved_bytes
        choice = self.layer_values(way).choice_within(kept_bytes, sends=near.sends)
        return self._saving(choice, way) if choice.text != near.scan_recompute else None

    def _saving(self, choice: SavedChoice, way: StepWay) -> StepWay:
        """A way with this in the place of what it saves. What is sent to the hosts must be worth it, as kernels are."""
        text, largest = choice.text, choice.largest
        kept_bytes = choice.kept_bytes if text != Recompute.NOTHING.value else None
        other = self.measured(dataclasses.replace(way, scan_recompute=text, kept_bytes=kept_bytes))
        graph = whole_graph(self.step(other), self.rules, self.graphs).graph
        change_s, in_host_bytes = other.least_s - way.least_s, bytes_saved(graph, in_host=True)
        change = f"{text_of_s(abs(change_s))} {'more' if change_s > 0 else 'less'} of a step than as the code has it"
        if text == Recompute.NOTHING.value:
            saved = "computes nothing again, as memory is free"
        else:
            named = f" (the largest: {', '.join(largest)})" if largest else ""
            of_hosts = f" and {text_of_bytes(in_host_bytes)} from the memory of the hosts" if in_host_bytes else ""
            saved = (
                f"of scans over layers reads {text_of_bytes(other.saved_bytes)}{of_hosts}, over all devices"
                f"{named}, and computes the rest again"
            )
        notes = (*way.notes, f"the backward pass {saved}: computing takes {change}")
        least_s = math.inf if way.least_s == math.inf else other.least_s
        if in_host_bytes:
            least_s /= 1 - WORTH_A_KERNEL
        return dataclasses.replace(other, least_s=least_s, sends=in_host_bytes > 0, notes=notes)


def bytes_saved(graph: OpGraph, *, in_host: bool = False) -> int:
    """Bytes of the values of the forward pass that the backward pass reads, over all devices, or of those `in_host`
    memory; of passes in a loop, those of one turn.
    """
    waiting = waiting_in_host(graph, offloaded_by_policy(graph))
    blocks, total = [graph.block], 0
    while blocks:
        ops = blocks.pop().ops
        made = {v for op in ops if op.role is Role.FORWARD for v in op.outputs}
        read = {v for op in ops if op.role is Role.BACKWARD for v in read_by(op)}
        total += sum(graph.values[v].nbytes for v in made & read if (v in waiting) is in_host)
        blocks += (block for op in ops for block in op.blocks)
    return total


def least_s_of(traced: TracedStep, cluster: Cluster, rules: RuleBook, graphs: StepGraphs) -> float:
    """Seconds that the step takes under any plan, by what its graph computes."""
    plain = whole_graph(traced, rules, graphs)
    return graphs.of(traced, ("least time", cluster), lambda: least_time_s(plain.graph, cluster))


def scan_recompute_of(request: PlanRequest) -> str:
    """As `TracedStep.scan_recompute`: a policy that a recipe gives to every layer holds in scans over layers too.

    Stages that keep their input alone compute whole scans again instead, and hold no input of their layers.
    """
    in_scans = [Recompute.CHEAP.value, Recompute.HALF.value]
    if (request.num_stages or 1) * (request.chunks or 1) == 1:
        in_scans.append(Recompute.ALL.value)
    return request.scan_recompute or (request.recompute if request.recompute in in_scans else "")


def has_rings(request: PlanRequest) -> bool:
    """Whether the recipe of a request has attention go round a ring."""
    return request.binding is not None and request.binding.blockwise_attention


def _kernel_of(way: Attention, library: Kernel) -> str:
    """As `TracedStep.attention_kernel`."""
    if way is Attention.AS_WRITTEN or (way is Attention.KERNEL and library is Kernel.BLOCKS):
        return ""
    return (Kernel.BLOCKS if way is Attention.BLOCKWISE else library).name


def as_requested(
    traced: TracedStep, request: PlanRequest, cluster: Cluster, rules: RuleBook, graphs: StepGraphs
) -> TracedStep:
    """The step in the way of a request, the first of those that it leaves open."""
    ways = StepWays(traced=traced, request=request, cluster=cluster, rules=rules, graphs=graphs)
    return ways.step(next(iter(ways)))
