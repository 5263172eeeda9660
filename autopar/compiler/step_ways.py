"""The ways to write a step among which a search chooses: attention by a kernel, recomputation in scans over layers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from autopar.attention.checks import score_products
from autopar.attention.kernels import Kernel, library_of
from autopar.attention.notes import chosen_note
from autopar.common.units import text_of_s
from autopar.compiler.whole_graph import whole_graph
from autopar.cost.least_time import least_time_s
from autopar.frontend.recompute_in_scans import Recompute
from autopar.hardware.cluster import Cluster
from autopar.hardware.kinds import Platform
from autopar.ir.graph import OpKind
from autopar.ir.primitives import ATTENTION_PASSES
from autopar.ir.traced_step import TracedStep
from autopar.plan.options import Attention, PlanRequest
from autopar.plan.step_graphs import StepGraphs
from autopar.sharding.rules import RuleBook

# The share of a step's computing that a kernel must save for attention not to stay as it is written: programs in blocks
# that were predicted equal took 1.6 % less and 2.0 % more on an H200 (`benchmarks/results/accelerator.md`).
WORTH_A_KERNEL = 0.02


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepWay:
    """A way to write a step.

    Attributes:
        attention: The program of attention.
        scan_recompute: As of `TracedStep`.
        least_s: The least time of a step in it; inf: it is taken only where nothing else fits.
        notes: Those of a plan in which it was chosen.
    """

    attention: Attention
    scan_recompute: str = ""
    least_s: float = 0.0
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
        """First the fastest where memory is ample, then those that need less memory; of a recipe the first alone."""
        for way in self.of_attention():
            yield way
            if self.request.is_built_as_asked or self.request.binding is not None:
                return
            yield from self.recomputing(way)

    def step(self, way: StepWay) -> TracedStep:
        """The step as a way has it."""
        return dataclasses.replace(
            self.traced,
            attention_kernel=_kernel_of(way.attention, library_of(self.cluster.device)),
            scan_recompute=way.scan_recompute,
            per_microbatch=self.request.per_microbatch,
        )

    def least_s(self, way: StepWay) -> float:
        return least_s_of(self.step(way), self.cluster, self.rules, self.graphs)

    def of_attention(self) -> tuple[StepWay, ...]:
        """Those of attention alone, in the same order.

        Virtual CPU devices, whose compiler has no kernel, run blocks where nothing else fits.
        """
        request, again = self.request, scan_recompute_of(self.request)
        asked = Attention.BLOCKWISE if has_rings(request) else request.attention
        if asked is not Attention.AUTO:
            return (StepWay(attention=asked, scan_recompute=again),)
        written = StepWay(attention=Attention.AS_WRITTEN, scan_recompute=again)
        written = dataclasses.replace(written, least_s=self.least_s(written))
        views = whole_graph(self.step(written), self.rules, self.graphs)
        if next(score_products(views.annotated), None) is None:
            return (written,)
        in_blocks = dataclasses.replace(written, attention=Attention.BLOCKWISE)
        if self.cluster.device.platform is Platform.CPU:
            notes = (chosen_note(Kernel.BLOCKS, None),)
            return written, dataclasses.replace(in_blocks, least_s=math.inf, notes=notes)
        ways, library = [written], library_of(self.cluster.device)
        for kernel in dict.fromkeys((library, Kernel.BLOCKS)):
            of_kernel = dataclasses.replace(written, attention=Attention.KERNEL)
            way = in_blocks if kernel is Kernel.BLOCKS else of_kernel
            views = whole_graph(self.step(way), self.rules, self.graphs)
            if not any(op.primitive in ATTENTION_PASSES for op in views.graph.ops()):
                continue  # the kernel takes none
            least_s = self.least_s(way)
            notes = (chosen_note(kernel, written.least_s - least_s),)
            ways.append(dataclasses.replace(way, least_s=least_s, notes=notes))
            if next(score_products(views.annotated), None) is None:
                break  # nothing is left to blocks
        fastest = min(range(len(ways)), key=lambda i: ways[i].least_s * (1 - WORTH_A_KERNEL if i == 0 else 1))
        return tuple(ways[fastest:])

    def recomputing(self, way: StepWay) -> Iterator[StepWay]:
        """A way with recomputation in scans over layers, the cheaper first, where a request leaves that open."""
        if self.request.recompute != Recompute.NOTHING.value or way.scan_recompute:
            return
        plain = whole_graph(self.step(way), self.rules, self.graphs).graph
        if all(op.kind is not OpKind.SCAN for op in plain.ops()):
            return
        for policy in (Recompute.CHEAP, Recompute.ALL):
            again = dataclasses.replace(way, scan_recompute=policy.value)
            graph = whole_graph(self.step(again), self.rules, self.graphs).graph
            if len(graph.values) > len(plain.values):
                least_s = self.least_s(again)
                kept = "results of matrix products" if policy is Recompute.CHEAP else "the input of a layer"
                note = (
                    f"of scans over layers {kept} alone are kept for the backward pass, which computes the rest again: "
                    f"computing takes {text_of_s(least_s - self.least_s(way))} more of a step"
                )
                yield dataclasses.replace(again, least_s=max(least_s, way.least_s), notes=(*way.notes, note))


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
