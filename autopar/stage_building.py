"""A choice of stages worked out: recomputation, one graph and one set of decisions for each stage, their program."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from autopar.alike import Shape, carried_over, shape_of
from autopar.cluster import Cluster
from autopar.constraints import Constraints
from autopar.errors import UnsupportedError
from autopar.graph import OpGraph, OpKind
from autopar.intra_op import CostModel, ShardingPlan
from autopar.layers import Layers
from autopar.layout import Layout, replicated
from autopar.mesh import LogicalMesh
from autopar.micro_batches import micro_batched
from autopar.pipelining import (
    Staged,
    Submesh,
    check_directions,
    cut_stages,
    layers_of,
    model_of,
    schedule_of,
    solve_stage,
    stage_program,
    wires_of,
)
from autopar.recomputation import Recompute, rematerialise
from autopar.rules import RuleBook
from autopar.runtime.schedules import Schedule
from autopar.scan_cutting import CutStep
from autopar.sinking import sunk
from autopar.stage_graphs import StageGraph


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A step cut into micro-batches and layers; `step` is what was cut into micro-batches."""

    step: CutStep
    graph: OpGraph
    layers: Layers


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Stages to build: the first layer of each, the mesh of each group of devices, what each layer recomputes, and the
    price of a byte of state on each stage.
    """

    schedule: str
    chunks: int
    first_layers: tuple[int, ...]
    group_meshes: tuple[LogicalMesh, ...]
    policies: tuple[str, ...]
    prices_s_per_byte: tuple[float, ...]

    @property
    def text(self) -> str:
        meshes = [f"{n} x {mesh}" for mesh, n in _runs(self.group_meshes)]
        again = {p for p in self.policies if p != "nothing"}
        kept = f", recompute {' and '.join(sorted(again))}" if again else ""
        return f"{len(self.first_layers)} stages on {' + '.join(meshes)}, {self.schedule}{kept}"


def cut_layers(step: CutStep, num_microbatches: int, rules: RuleBook, whole: OpGraph | None = None) -> Cut:
    """A step cut into micro-batches and layers; `whole` is its graph with all scans whole, if it is there already."""
    graph = sunk(micro_batched(step.traced, num_microbatches, rules, whole if step.parts == 1 else None))
    return Cut(step=step, graph=graph, layers=layers_of(graph))


def layers_of_pieces(cut: Cut) -> tuple[int, ...]:
    """The first layer of each stage where each holds one part of a scan over layers.

    Raises: UnsupportedError where the layers do not follow the parts.
    """
    layer_of = {op: number for number, ops in enumerate(cut.layers.ops) for op in ops}
    scans = {
        op.module.split("/")[-1]: layer_of[op.id]
        for op in cut.graph.block.ops
        if op.kind is OpKind.SCAN and op.id in layer_of
    }
    firsts = [0, *(scans.get(scope, 0) for scope in cut.step.scopes[1:])]
    if sorted(set(firsts)) != firsts:
        raise UnsupportedError(
            where=f"the scan over {cut.step.trips} layers of {cut.step.traced.name}",
            expected="parts that follow one another in the forward pass",
            got=f"parts in layers {firsts}",
            hint="use fewer stages, or write the layers out in a Python loop",
        )
    return tuple(firsts)


def pieces_of(cut: Cut) -> dict[int, int]:
    """The leaf, by the position in the graph's inputs, of each piece of a leaf."""
    first = len(cut.graph.constants)
    return {first + i: piece.leaf for i, piece in enumerate(cut.step.arguments) if piece.parts > 1}


def recomputed(cut: Cut, policies: Sequence[str]) -> OpGraph:
    """The graph in which each layer keeps what its policy says."""
    if all(p == "nothing" for p in policies):
        return cut.graph
    return rematerialise(cut.graph, cut.layers, [Recompute(p) for p in policies])


def place(group_meshes: Sequence[LogicalMesh], schedule: Schedule) -> list[Submesh]:
    """The devices of each stage: larger groups first, so that no group lies across hosts that it does not fill."""
    order = sorted(range(len(group_meshes)), key=lambda g: -group_meshes[g].num_devices)
    firsts = [0, *itertools.accumulate(group_meshes[g].num_devices for g in order)]
    first_of = dict(zip(order, firsts, strict=False))
    groups = [Submesh(first_device=first_of[g], mesh=mesh) for g, mesh in enumerate(group_meshes)]
    return [groups[g] for g in schedule.mesh_of_stage]


def decide(
    stages: Sequence[StageGraph],
    models: Sequence[CostModel],
    meshes: Sequence[LogicalMesh],
    prices_s_per_byte: Sequence[float],
    time_limit_s: float,
    pieces: Mapping[int, int],
    constraints: Constraints | None = None,
) -> list[ShardingPlan]:
    """Each stage's decisions; stages that are alike, on meshes that are alike, share them. Constraints bind all.

    `pieces` names the leaf that an input of the step is a piece of: all pieces of a leaf get the layout that the stage
    in the middle, which is like most others, chooses for its own.
    """
    known: dict[Any, tuple[ShardingPlan, Shape]] = {}
    layouts: dict[int, Layout] = {}
    found: dict[int, ShardingPlan] = {}
    all_wires = wires_of(stages, meshes, constraints)
    middle = len(stages) // 2
    for at in sorted(range(len(stages)), key=lambda q: (bool(pieces) and q != middle, q)):
        stage, model, wires, price = stages[at], models[at], all_wires[at], prices_s_per_byte[at]
        leaf_of = {v: pieces[p] for p, v in zip(stage.arguments, stage.graph.block.inputs, strict=False) if p in pieces}
        fixed = {v: layouts[leaf] for v, leaf in leaf_of.items() if leaf in layouts}
        shape = shape_of(stage.graph)
        number = {v: i for i, v in enumerate(shape.values)}
        op_number = {op: i for i, op in enumerate(shape.ops)}
        received = tuple(sorted((number[v], layout) for v, layout in wires[0].items() if v in number))
        sent = tuple(sorted((op_number[op], layout) for op, layout in wires[1].items()))
        given = tuple(sorted((number[v], layout) for v, layout in fixed.items()))
        key = (shape.key, model.links, str(received), str(sent), price, str(given))
        if key not in known:
            known[key] = solve_stage(stage, model, wires, time_limit_s, price, fixed, constraints), shape
            found[at] = known[key][0]
        else:
            found[at] = carried_over(*known[key], shape, stage.graph)
        for v, leaf in leaf_of.items():
            layouts.setdefault(leaf, found[at].placed.get(v, replicated(len(stage.graph.values[v].shape))))
    return [found[at] for at in range(len(stages))]


# A stage that needs more memory than there is is decided anew with a higher price on the bytes of its state: how often,
# the first such price (as a part of its objective divided by the memory) and by how much it rises.
LEANER, FIRST_PRICE, PRICE_RISE = 3, 0.3, 10.0


def build(
    cut: Cut,
    choice: Choice,
    cluster: Cluster,
    limit_bytes: int,
    time_limit_s: float,
    constraints: Constraints | None = None,
) -> Staged:
    """Works a choice out: recomputation, stages, decisions, instructions, tasks, the list, its simulation.

    Stages that do not fit into the memory are decided anew, leaner each time, a few times at most.
    """
    graph = recomputed(cut, choice.policies)
    num_stages = len(choice.first_layers)
    schedule = schedule_of(choice.schedule, num_stages, graph.num_microbatches, choice.chunks)
    check_directions(graph, schedule)
    stages = cut_stages(graph, cut.layers, choice.first_layers, schedule.splits_backward, num_stages)
    submeshes = place(choice.group_meshes, schedule)
    models = [model_of(cluster, s.mesh) for s in submeshes]
    meshes = [s.mesh for s in submeshes]
    prices = list(choice.prices_s_per_byte)
    for leaner in range(LEANER + 1):
        shardings = decide(stages, models, meshes, prices, time_limit_s, pieces_of(cut), constraints)
        staged = stage_program(
            cut.step, graph, cut.layers, choice.first_layers, stages, models, shardings, submeshes, schedule, cluster
        )
        peak_bytes = staged.simulation.peak_bytes
        over = [q for q, group in enumerate(schedule.mesh_of_stage) if peak_bytes[group] > limit_bytes]
        if not over or leaner == LEANER:
            break
        for q in over:
            dear = FIRST_PRICE * shardings[q].report.objective_s / limit_bytes
            prices[q] = max(dear, prices[q] * PRICE_RISE)
    return staged


def evened(cut: Cut, choice: Choice) -> Choice:
    """A choice for a step with its scan in small parts, for the step with one part on each stage: all stages are like
    the middle one was.
    """
    num_stages = len(choice.first_layers)
    middle = num_stages // 2
    policy = choice.policies[choice.first_layers[middle]]
    return dataclasses.replace(
        choice,
        first_layers=layers_of_pieces(cut) if cut.step.parts > 1 else (0,),
        group_meshes=(choice.group_meshes[middle],) * num_stages,
        policies=(policy,) * len(cut.layers),
        prices_s_per_byte=(choice.prices_s_per_byte[middle],) * num_stages,
    )


def _runs(meshes: Sequence[LogicalMesh]) -> list[tuple[LogicalMesh, int]]:
    return [(mesh, len(list(group))) for mesh, group in itertools.groupby(meshes)]
