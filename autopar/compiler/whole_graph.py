"""The graph of a step on its whole batch as one program, built once for all that plan it."""

from __future__ import annotations

import dataclasses
import math

from autopar.attention.checks import score_products
from autopar.attention.kernels import Kernel, library_of
from autopar.attention.notes import chosen_note
from autopar.cost.least_time import least_time_s
from autopar.cost.roofline import flops_of
from autopar.frontend.build_graph import build_graph
from autopar.hardware.cluster import Cluster
from autopar.hardware.kinds import Platform
from autopar.ir.graph import OpGraph
from autopar.ir.primitives import ATTENTION_PASSES
from autopar.ir.traced_step import TracedStep
from autopar.passes.graph_views import GraphViews
from autopar.passes.round_examples import round_examples
from autopar.passes.stack_updates import stack_updates
from autopar.plan.options import Attention, PlanRequest
from autopar.plan.step_graphs import StepGraphs
from autopar.sharding.rules import RuleBook


def program_graph(traced: TracedStep, rules: RuleBook) -> OpGraph:
    """The step's graph, with equal matrices of its update stacked, and its examples rounded up, where the step says so.

    Raises: as `build_graph`.
    """
    graph = build_graph(traced, rules)
    if traced.stacked_over:
        graph = stack_updates(graph, traced.stacked_over, flops_of, rules)
    return _rounded(graph, traced)


def _rounded(graph: OpGraph, traced: TracedStep) -> OpGraph:
    return round_examples(graph, traced.uneven_over) if traced.uneven_over else graph


def whole_graph(traced: TracedStep, rules: RuleBook, graphs: StepGraphs) -> GraphViews:
    """The views of the step's graph, kept in `graphs`. Raises: UnsupportedError as `build_graph`."""
    return graphs.of(traced, "whole", lambda: GraphViews(program_graph(traced, rules), flops_of))


def least_s_of(traced: TracedStep, cluster: Cluster, rules: RuleBook, graphs: StepGraphs) -> float:
    """Seconds that the step takes under any plan, by what its graph computes."""
    plain = whole_graph(traced, rules, graphs)
    return graphs.of(traced, ("least time", cluster), lambda: least_time_s(plain.graph, cluster))


def has_rings(request: PlanRequest) -> bool:
    """Whether the recipe of a request has attention go round a ring."""
    return request.binding is not None and request.binding.blockwise_attention


# The share of a step's computing that a kernel must save for attention not to stay as it is written: programs in blocks
# that were predicted equal took 1.6 % less and 2.0 % more on an H200 (`benchmarks/results/accelerator.md`).
WORTH_A_KERNEL = 0.02


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AttentionWay:
    """A way to run attention, the least time of a step in it (inf: it is taken only where nothing else fits), and the
    note of a plan in which it was chosen.
    """

    attention: Attention
    least_s: float = 0.0
    note: str = ""


def attention_ways(
    traced: TracedStep, request: PlanRequest, cluster: Cluster, rules: RuleBook, graphs: StepGraphs
) -> tuple[AttentionWay, ...]:
    """The ways to run attention that a request leaves open: first the fastest where memory is ample, then those that
    need less memory.

    Virtual CPU devices, whose compiler has no kernel, run blocks where nothing else fits.
    """
    if request.attention is not Attention.AUTO or has_rings(request):
        return (AttentionWay(attention=request.attention),)
    traced = dataclasses.replace(traced, per_microbatch=request.per_microbatch)
    library = library_of(cluster.device)
    written = AttentionWay(attention=Attention.AS_WRITTEN, least_s=least_s_of(traced, cluster, rules, graphs))
    if next(score_products(whole_graph(traced, rules, graphs).annotated), None) is None:
        return (written,)
    if cluster.device.platform is Platform.CPU:
        note = chosen_note(Kernel.BLOCKS, None)
        return written, AttentionWay(attention=Attention.BLOCKWISE, least_s=math.inf, note=note)
    ways = [written]
    for kernel in dict.fromkeys((library, Kernel.BLOCKS)):
        attention = Attention.BLOCKWISE if kernel is Kernel.BLOCKS else Attention.KERNEL
        step = dataclasses.replace(traced, attention_kernel=kernel.name)
        if not any(op.primitive in ATTENTION_PASSES for op in whole_graph(step, rules, graphs).graph.ops()):
            continue  # the kernel takes none
        least_s = least_s_of(step, cluster, rules, graphs)
        note = chosen_note(kernel, written.least_s - least_s)
        ways.append(AttentionWay(attention=attention, least_s=least_s, note=note))
        if next(score_products(whole_graph(step, rules, graphs).annotated), None) is None:
            break  # nothing is left to blocks
    fastest = min(range(len(ways)), key=lambda i: ways[i].least_s * (1 - WORTH_A_KERNEL if i == 0 else 1))
    return tuple(ways[fastest:])


def _kernel_of(way: Attention, library: Kernel) -> str:
    """As `TracedStep.attention_kernel`."""
    if way is Attention.AS_WRITTEN or (way is Attention.KERNEL and library is Kernel.BLOCKS):
        return ""
    return (Kernel.BLOCKS if way is Attention.BLOCKWISE else library).name


def as_requested(
    traced: TracedStep, request: PlanRequest, cluster: Cluster, rules: RuleBook, graphs: StepGraphs
) -> TracedStep:
    """The step with its attention and the modules that are taken per micro-batch as a request has them."""
    way = Attention.BLOCKWISE if has_rings(request) else request.attention
    if way is Attention.AUTO:
        way = attention_ways(traced, request, cluster, rules, graphs)[0].attention
    kernel = _kernel_of(way, library_of(cluster.device))
    return dataclasses.replace(traced, attention_kernel=kernel, per_microbatch=request.per_microbatch)


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
