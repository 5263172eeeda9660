"""Instances in the contest's form, made from training steps of the zoo, with memory that binds.

Few of the contest's instances are published. These have the sizes of the others: tens of thousands of nodes with few
strategies and little memory, and fewer nodes with many strategies on meshes of three axes. Nodes, edges and seconds are
those of the planner's integer program before equal layers are tied, which would make the instances small. Memory is
added: a value that leaves its node takes the bytes of its shard from the operation that makes it to the last one that
reads it; an argument takes its bytes throughout, and a result that takes over a donated argument's memory takes none.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from autopar import Cluster
from autopar.cost.cost_model import cost_model
from autopar.frontend.build_graph import build_graph
from autopar.frontend.tracing import trace
from autopar.intra_op.choice_graph import ChoiceGraph
from autopar.intra_op.formulation import shards
from autopar.intra_op.ilp import ROUNDS, IntraOp
from autopar.ir.graph import OpGraph, read_by
from autopar.ir.mesh import LogicalMesh
from autopar.sharding.rules import RuleBook
from autopar.solver import Edge, Problem, Use, solve
from benchmarks.zoo import CASES

UNIT_S = 1e-9  # one unit of a cost: the contest's costs are whole numbers


@dataclasses.dataclass(frozen=True, kw_only=True)
class Instance:
    """A step of the zoo on a mesh of devices like a cluster's.

    `memory`: where the limit lies between the least that is held at any peak (0) and the peak of the cheapest choice
    (1), so that it binds.
    """

    case: str
    sizes: dict[str, Any]
    cluster: str
    axis_sizes: tuple[int, ...]
    memory: float


_GPT = {"width": 1024, "heads": 16, "vocabulary": 51_200, "length": 1024, "batch": 64}
_LLAMA = {"width": 1024, "heads": 16, "kv_heads": 8, "feed_forward": 2816, "vocabulary": 32_000, "length": 1024}
_MOE = {"width": 1024, "heads": 16, "experts": 16, "vocabulary": 32_000, "length": 1024, "batch": 64}

INSTANCES = {
    "gpt-192": Instance(case="gpt", sizes={"layers": 192, **_GPT}, cluster="dgx-h100", axis_sizes=(8,), memory=0.1),
    "llama-128": Instance(
        case="llama", sizes={"layers": 128, "batch": 64, **_LLAMA}, cluster="dgx-a100-80g", axis_sizes=(8,), memory=0.1
    ),
    "gpt-48": Instance(case="gpt", sizes={"layers": 48, **_GPT}, cluster="dgx-h100", axis_sizes=(2, 4), memory=0.1),
    "moe-64": Instance(
        case="gshard_moe", sizes={"layers": 64, **_MOE}, cluster="p3.16xlarge", axis_sizes=(2, 4), memory=0.1
    ),
    "gpt-4-3d": Instance(
        case="gpt", sizes={"layers": 4, **_GPT}, cluster="dgx-h100", axis_sizes=(2, 2, 2), memory=0.1
    ),
    "resnet-3d": Instance(case="resnet", sizes={}, cluster="dgx-h100", axis_sizes=(2, 2, 2), memory=0.3),
    "unet-3d": Instance(case="unet", sizes={}, cluster="dgx-h100", axis_sizes=(2, 2, 2), memory=0.3),
}  # fmt: skip


def made(instance: Instance) -> Problem:
    """The problem of an instance; costs are whole, each node has at most one use."""
    case = CASES[instance.case](**instance.sizes)
    state = jax.eval_shape(case.init, jax.random.key(0))
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), case.batch(0))
    traced = trace(case.step, (state, batch), names=("state", "batch"), donate=(0,), batch=(1,))
    graph = build_graph(traced, RuleBook())
    model = cost_model(Cluster.preset(instance.cluster), LogicalMesh(axis_sizes=instance.axis_sizes))
    intra_op = IntraOp(graph, model)
    problem = _in_units(dataclasses.replace(intra_op.problem, uses=tuple(uses_of(graph, intra_op.choices))))
    cheapest = solve(problem, time_limit_s=math.inf, rounds=ROUNDS)
    least = least_bytes(problem.uses)
    limit = least + int(instance.memory * (cheapest.peak_bytes - least))
    return with_one_use_each(dataclasses.replace(problem, limit_bytes=limit))


def uses_of(graph: OpGraph, choices: ChoiceGraph) -> Iterator[Use]:
    """The bytes of every value that leaves its node, from where it is made to behind its last reader."""
    end = len(graph.block.ops) + 1
    node_of_op = {op.id: choices.of_op[op.id][0] for op in graph.block.ops if op.id in choices.of_op}
    start = dict.fromkeys(graph.block.inputs, 0)
    stop = dict.fromkeys(graph.block.inputs, end)
    leaves = set(graph.block.inputs)
    for position, op in enumerate(graph.block.ops, start=1):
        for value in read_by(op):
            site = choices.reduced.get(value)
            stop[value] = max(stop.get(value, 0), position + 1)
            if site is not None and node_of_op.get(op.id) != site.node:
                leaves.add(value)
        start.update(dict.fromkeys(op.outputs, position))
    results = [v for v in graph.block.outputs if isinstance(v, int)]
    taking_over = {graph.block.outputs[o] for i, o in graph.tied if graph.block.inputs[i] in graph.donated}
    stop.update((v, end) for v in results)
    leaves.update(results)
    for value in sorted(leaves - taking_over):
        site = choices.reduced.get(value)
        if site is not None and value in stop:
            nbytes = graph.values[value].nbytes / shards(site.layouts, choices.mesh)
            yield Use(node=site.node, start=start[value], stop=stop[value], bytes=nbytes.astype(np.int64))


def least_bytes(uses: tuple[Use, ...]) -> int:
    """Bytes that are held at the peak when each use is at its least; no choice does with less."""
    change: dict[int, int] = {}
    for use in uses:
        least = int(use.bytes.min())
        change[use.start] = change.get(use.start, 0) + least
        change[use.stop] = change.get(use.stop, 0) - least
    return int(np.cumsum([change[when] for when in sorted(change)]).max())


def with_one_use_each(problem: Problem) -> Problem:
    """The same problem in which a node has at most one use, as the contest's format demands: further ones are those of
    nodes that must choose as theirs does.
    """
    node_cost, edges, uses = list(problem.node_cost), list(problem.edges), []
    with_use: set[int] = set()
    for use in problem.uses:
        node = use.node
        if node in with_use:
            node_cost.append(np.zeros(len(problem.node_cost[node])))
            edges.append(Edge(source=node, target=len(node_cost) - 1, cost=_equal(len(node_cost[-1]))))
            use = dataclasses.replace(use, node=len(node_cost) - 1)
        with_use.add(node)
        uses.append(use)
    return Problem(node_cost=tuple(node_cost), edges=tuple(edges), uses=tuple(uses), limit_bytes=problem.limit_bytes)


@functools.cache
def _equal(strategies: int) -> np.ndarray:
    return np.where(np.eye(strategies, dtype=bool), 0.0, np.inf)


def _in_units(problem: Problem) -> Problem:
    whole: dict[int, np.ndarray] = {}
    for edge in problem.edges:
        whole.setdefault(id(edge.cost), np.round(edge.cost / UNIT_S))
    return dataclasses.replace(
        problem,
        node_cost=tuple(np.round(cost / UNIT_S) for cost in problem.node_cost),
        edges=tuple(dataclasses.replace(edge, cost=whole[id(edge.cost)]) for edge in problem.edges),
    )
