"""The integer program of one graph on one mesh as a value, and the steps that lead from the choice graph to the solver.

    ilp = build(graph, choices, model, costs)        (1) seconds of every strategy and of every resharding
    ilp = fix_layouts(ilp, fixed)                    (2) arguments that have one layout
    ilp = charge_batch(ilp, graph, model)            (3) each device takes its part of the batch in
    ilp = charge_microbatching(ilp, graph, model)    (4) cutting the batch, adding up over micro-batches
    ilp = constrain(ilp, allowed, masks, relaxation) (5) what pins and constraints forbid is infinite
    given = to_solver(ilp)                           (6) nodes and edges

Each step returns a new program. Behind the last one `memory_prices.price_memory` and `slack.discount_overlap` change
costs for one solution.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from statistics import fmean

import numpy as np
from scipy.cluster.hierarchy import DisjointSet

from autopar import solver
from autopar.cost.cost_model import CostModel, NodeCosts, copied_s
from autopar.cost.roofline import is_fusible
from autopar.ir.graph import Atom, Block, Op, OpGraph, OpKind, Role, read_by
from autopar.ir.layout import Layout, LogicalMesh
from autopar.ir.primitives import SUMMING
from autopar.ir.resharding import paths_by_size
from autopar.lowering.lower import Relaxation
from autopar.passes.fold_step import ONE_EACH, Weights
from autopar.search.intra_op.choice_graph import ChoiceGraph, Layouts, LayoutSite, Reshard
from autopar.search.intra_op.masks import GivenUp, Masks

# Symmetry: classes of equal nodes of a choice graph (repeated layers), which share one decision.
#
# Nodes get a colour from their operations, strategies and layouts, and then, round by round, from the colours of their
# neighbours (colour refinement). After a few rounds, corresponding nodes of repeated layers have equal colours, as they
# have equal neighbourhoods; nodes near the ends of the stack keep their own colours.


ROUNDS = 6  # how far a node looks: about half a transformer layer in each direction
SMALL = 150  # nodes up to which nothing is folded: such problems are solved whole


def fold(choices: ChoiceGraph, kinds: Sequence[int], edge_kinds: Sequence[int]) -> tuple[int, ...]:
    """A class for each node; nodes of one class share their decision.

    `kinds[n]` numbers what a node is (equal numbers: equal strategies and costs), `edge_kinds[e]` the cost matrix of
    each reshard.
    """
    n = len(choices.nodes)
    if n <= SMALL:
        return tuple(range(n))
    around: list[list[tuple[int, int, int]]] = [[] for _ in range(n)]
    for reshard, kind in zip(choices.reshards, edge_kinds, strict=True):
        source, target = reshard.source.node, reshard.target.node
        around[source].append((kind, 0, target))
        around[target].append((kind, 1, source))
    colours = list(kinds)
    for _ in range(ROUNDS):
        number: dict[tuple, int] = {}
        colours = [
            number.setdefault(
                (colours[i], tuple(sorted((kind, way, colours[j]) for kind, way, j in around[i]))), len(number)
            )
            for i in range(n)
        ]
    return tuple(colours)


def whole_nodes(choices: ChoiceGraph, copies: Mapping[int, float]) -> float:
    """About how many nodes a choice graph would have if the repeated layers of its graph were not folded.

    `copies` of a value: for how many values of the whole graph it stands.
    """
    weights: dict[int, list[float]] = {}
    homes = (*choices.unreduced.items(), *choices.reduced.items(), *((v, at) for (v, _), at in choices.copies.items()))
    for value, home in homes:
        weights.setdefault(home.node, []).append(copies.get(value, 1.0))
    return sum(fmean(weights.get(node, (1.0,))) for node in range(len(choices.nodes)))


def joined(choices: ChoiceGraph, classes: Sequence[int], paired_ops: Iterable[tuple[Op, Op]]) -> tuple[int, ...]:
    """The classes, with the classes of paired operations merged: of the operations, their results and their outside
    arguments, wherever both choose among the same strategies or layouts.
    """
    merged = DisjointSet(classes)
    label = {c: c for c in classes}  # of the set that a root leads; the order of the labels is that of the ILP's nodes

    def merge(class_a: int, class_b: int) -> None:
        root = merged[class_a]
        merged.merge(class_a, class_b)
        label[merged[class_a]] = label[root]

    def join(first: LayoutSite | None, second: LayoutSite | None) -> None:
        if first is not None and second is not None and first.layouts == second.layouts:
            nodes = choices.nodes[first.node], choices.nodes[second.node]
            if nodes[0].layouts and nodes[0].layouts == nodes[1].layouts:
                merge(classes[first.node], classes[second.node])

    produced = {v for pair in paired_ops for op in pair for v in op.outputs}
    readers: dict[int, list[str]] = {}
    for v, reader in choices.copies:
        readers.setdefault(v, []).append(reader)
    for a, b in paired_ops:
        if a.id in choices.of_op and b.id in choices.of_op:
            (first, strategies), (second, other_strategies) = choices.of_op[a.id], choices.of_op[b.id]
            if strategies == other_strategies:
                merge(classes[first], classes[second])
        inputs = [(x, y) for x, y in zip(a.inputs, b.inputs, strict=True) if isinstance(x, int) and isinstance(y, int)]
        outside = [(x, y) for x, y in inputs if x not in produced and y not in produced]
        for x, y in (*zip(a.outputs, b.outputs, strict=True), *outside):
            join(choices.unreduced.get(x), choices.unreduced.get(y))
            join(choices.reduced.get(x), choices.reduced.get(y))
            for reader in readers.get(x, ()):
                join(choices.copies.get((x, reader)), choices.copies.get((y, reader)))
    return tuple(label[merged[c]] for c in classes)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ilp:
    """The program before it goes to the solver.

    `node_cost[n][s]`: seconds of strategy s of node n. `node_key[n]`: equal for nodes of equal strategies and costs.
    `reshard_cost[r][s, t]`: seconds of reshard r from strategy s of its source to strategy t of its target; the same
    object for equal costs. Infinite: not allowed.
    """

    choices: ChoiceGraph
    node_cost: tuple[np.ndarray, ...]
    node_key: tuple[Hashable, ...]
    reshard_cost: tuple[np.ndarray, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SolverInput:
    """What the solver gets. `reshard_of_edge[e]` is the number of the reshard that edge e stands for; further edges,
    of prices, stand for none.
    """

    choices: ChoiceGraph
    problem: solver.Problem
    reshard_of_edge: tuple[int, ...]


def build(graph: OpGraph, choices: ChoiceGraph, model: CostModel, costs: NodeCosts, weights: Weights = ONE_EACH) -> Ilp:
    """Step (1): the seconds of every strategy and of every resharding. `weights`: of a graph with folded layers."""
    node_cost: list[np.ndarray] = []
    node_key: list[Hashable] = []
    number: dict[tuple, int] = {}
    for node in choices.nodes:
        cost, key = costs.of_members(node.members, node.size)
        node_cost.append(cost)
        node_key.append(number.setdefault((node.kind, node.size, node.layouts, *key), len(number)))
    reshard_s = _ReshardSeconds(graph, model, combinable(graph, weights) if model.overlap.combined_bytes else {})
    return Ilp(
        choices=choices,
        node_cost=tuple(node_cost),
        node_key=tuple(node_key),
        reshard_cost=tuple(reshard_s.of(reshard) for reshard in choices.reshards),
    )


class _ReshardSeconds:
    """Seconds of resharding for every pair of strategies, one object for equal costs.

    Collectives that the compiler combines have the latency of one together (rule (4) of `stream_simulator`): each of
    the `combinable` values has its share of it, by number, or by bytes where they fill more than one.
    """

    def __init__(self, graph: OpGraph, model: CostModel, combinable: Mapping[int, float]) -> None:
        self.graph, self.model, self.combinable = graph, model, combinable
        self._matrices: dict[tuple, np.ndarray] = {}
        self._numbers: dict[int, np.ndarray] = {}

    def of(self, reshard: Reshard) -> np.ndarray:
        v, source, target = self.graph.values[reshard.value], reshard.source, reshard.target
        widening, together = self.model.widening(v.dtype), self.combinable.get(reshard.value, 1.0)
        key = (id(source.layouts), id(target.layouts), len(v.shape), v.nbytes, widening, reshard.count, together)
        if key not in self._matrices:
            table = paths_by_size(len(v.shape), self.model.links)
            rows, columns = self._indices(source.layouts)[:, None], self._indices(target.layouts)[None, :]
            share = self._latency_share(v.nbytes * widening, reshard, together) if together > 1 else 1.0
            self._matrices[key] = reshard.count * table.seconds(rows, columns, v.nbytes, widening, share)
        return self._matrices[key]

    def _latency_share(self, nbytes: float, reshard: Reshard, together: float) -> np.ndarray:
        """The share of a collective's latency, a row for each strategy of the source: what is reduced lies whole there
        beside its other axes, and what is gathered is whole in the target.
        """
        mesh = self.model.links.mesh
        reduces = any(layout.partial for layout in reshard.source.layouts)
        held = shards(reshard.source.layouts, mesh)[:, None] if reduces else shards(reshard.target.layouts, mesh)[None]
        return np.clip(nbytes / held / self.model.overlap.combined_bytes, 1.0 / together, 1.0)

    def _indices(self, layouts: Layouts) -> np.ndarray:
        """The numbers of layouts in the table of paths of their rank."""
        if id(layouts) not in self._numbers:
            table = paths_by_size(len(layouts[0].dims), self.model.links)
            self._numbers[id(layouts)] = np.array([table.index[layout] for layout in layouts])
        return self._numbers[id(layouts)]


def combinable(graph: OpGraph, weights: Weights) -> dict[int, float]:
    """Values whose collectives the compiler may combine -> with how many, of those of one block: gradients, of which
    nobody but the update waits for the sum, or the end of the block; what passes read that is there from the start; and
    what the update makes of that.
    """
    found: dict[int, float] = {}

    def share(values: Iterable[int], sent: Collection[int]) -> None:
        found.update(dict.fromkeys(values, sum(weights.of_value.get(v, 1.0) for v in values if v in sent)))

    def of_block(block: Block, carried: Iterable[Atom]) -> None:
        is_light = {op.id: op.kind is OpKind.EQUATION and is_fusible(op.primitive) for op in block.ops}
        early = set(block.inputs)
        for op in block.ops:
            if is_light[op.id] and early.issuperset(read_by(op)):
                early.update(op.outputs)
        soon = {v for v in carried if isinstance(v, int)}  # what is waited for before the update, or in the next turn
        for op in reversed(block.ops):
            passes_on = is_light[op.id] or op.primitive == "reduce_sum"
            if op.role is not Role.UPDATE and not (passes_on and soon.isdisjoint(op.outputs)):
                soon.update(read_by(op))
        makers = [op for op in block.ops if op.role is not Role.UPDATE]
        sums = {v for op in makers if op.blocks or op.primitive in SUMMING for v in op.outputs}
        share([v for op in makers for v in op.outputs if v not in early and v not in soon], sums)
        share(early & soon, block.inputs)
        for op in block.ops:
            for inner in op.blocks:
                of_block(inner, inner.outputs[: op.num_carry] if op.kind is OpKind.SCAN else inner.outputs)

    of_block(graph.block, ())
    new = {v for _, target in graph.tied if isinstance(v := graph.block.outputs[target], int)}
    read = {v for op in graph.block.ops if op.role is not Role.UPDATE for v in read_by(op)}
    share([v for v, state in replaced_state(graph).items() if state in read and v not in found], new)
    return found


def replaced_state(graph: OpGraph) -> dict[int, int]:
    """Values of an update -> the argument in whose place they end, by way of operations on equal shapes: the average of
    parameters that is kept beside them reads new parameters, and replaces the old average.
    """
    block = graph.block
    results = ((block.outputs[target], block.inputs[source]) for source, target in graph.tied)
    replaced = {value: argument for value, argument in results if isinstance(value, int)}
    for op in reversed(block.ops):
        for value in op.outputs if op.role is Role.UPDATE and not op.blocks else ():
            if value in replaced:
                shape = graph.values[value].shape
                same = (a for a in op.inputs if isinstance(a, int) and graph.values[a].shape == shape)
                replaced |= {a: replaced[value] for a in same if a not in replaced}
    return replaced


def fix_layouts(ilp: Ilp, fixed: Mapping[int, Layout]) -> Ilp:
    """Step (2): restricts each of these arguments to its one layout."""
    node_cost, node_key = list(ilp.node_cost), list(ilp.node_key)
    for value, layout in fixed.items():
        if (site := ilp.choices.reduced.get(value)) is not None:
            allowed = np.array([at == layout for at in site.layouts])
            node_cost[site.node] = np.where(allowed, node_cost[site.node], np.inf)
            node_key[site.node] = ("fixed", value)
    return dataclasses.replace(ilp, node_cost=tuple(node_cost), node_key=tuple(node_key))


def charge_batch(ilp: Ilp, graph: OpGraph, model: CostModel) -> Ilp:
    """Step (3): each device reads its part of the batch at least once, so that a replicated batch costs more."""
    node_cost, node_key = list(ilp.node_cost), list(ilp.node_key)
    for position in graph.batch:
        value = graph.block.inputs[position]
        if (site := ilp.choices.reduced.get(value)) is not None:
            nbytes = graph.values[value].nbytes / shards(site.layouts, ilp.choices.mesh)
            node_cost[site.node] = node_cost[site.node] + nbytes / model.device.memory_bytes_per_s
            node_key[site.node] = ("batch", node_key[site.node], value)
    return dataclasses.replace(ilp, node_cost=tuple(node_cost), node_key=tuple(node_key))


def charge_microbatching(ilp: Ilp, graph: OpGraph, model: CostModel) -> Ilp:
    """Step (4): adding to a sum over micro-batches reads and writes the sum each time, so that a sharded sum is cheaper
    than a replicated one; likewise for splitting the batch.
    """
    node_cost, node_key = list(ilp.node_cost), list(ilp.node_key)
    for op in graph.block.ops:
        site = ilp.choices.unreduced.get(op.outputs[0]) if op.kind in (OpKind.SPLIT, OpKind.ACCUMULATE) else None
        if site is not None:
            copied = op.count * np.array([copied_s(graph, op, at, model) for at in site.layouts])
            node_cost[site.node] = node_cost[site.node] + copied
            node_key[site.node] = ("copied", node_key[site.node], copied.tobytes())
    return dataclasses.replace(ilp, node_cost=tuple(node_cost), node_key=tuple(node_key))


def constrain(
    ilp: Ilp, pinned: Mapping[int, np.ndarray], masks: Masks | None = None, relaxation: Relaxation | None = None
) -> Ilp:
    """Step (5): strategies and reshardings that pins and constraints forbid have infinite cost.

    `pinned[n][s]`: whether the pins allow strategy s of node n; a pin overrides all other constraints on its node. What
    `relaxation` drops of the constraints is allowed.
    """
    if masks is None:
        return _allow_nodes(ilp, pinned)
    relaxed = relaxation.nodes if relaxation is not None else {}
    bound = {node: relaxed.get(node, mask.good) for node, mask in masks.nodes.items()}
    opened = relaxation.edges if relaxation is not None else frozenset()
    masked_cost: dict[tuple[int, int], np.ndarray] = {}
    reshard_cost = list(ilp.reshard_cost)
    for number, (reshard, matrix) in enumerate(zip(ilp.choices.reshards, ilp.reshard_cost, strict=True)):
        allowed = masks.pairs(reshard) if number not in opened else None
        if allowed is not None:
            key = id(matrix), id(allowed)
            if key not in masked_cost:
                masked_cost[key] = np.where(allowed, matrix, np.inf)
            reshard_cost[number] = masked_cost[key]
    ilp = _allow_nodes(ilp, {**bound, **pinned})
    return dataclasses.replace(ilp, reshard_cost=tuple(reshard_cost))


def price_constraints(ilp: Ilp, pinned: Mapping[int, np.ndarray], masks: Masks, most_s: float) -> Ilp:
    """In place of step (5), to relax it: each dropped constraint has a price, and the seconds of the plan, at most
    `most_s`, break ties. Pins are kept.
    """
    seconds = GivenUp.SECONDS.price / most_s
    node_cost: list[np.ndarray] = []
    for node, cost in enumerate(ilp.node_cost):
        price = masks.price_of_node(node) if node not in pinned else None
        node_cost.append(seconds * cost + (0.0 if price is None else price))
    reshard_cost: list[np.ndarray] = []
    for reshard, cost in zip(ilp.choices.reshards, ilp.reshard_cost, strict=True):
        price = masks.price_of_edge(reshard)
        reshard_cost.append(seconds * cost if price is None else seconds * cost + price)
    priced = dataclasses.replace(ilp, node_cost=tuple(node_cost), reshard_cost=tuple(reshard_cost))
    return _allow_nodes(priced, pinned)


def _allow_nodes(ilp: Ilp, allowed: Mapping[int, np.ndarray]) -> Ilp:
    node_cost, node_key = list(ilp.node_cost), list(ilp.node_key)
    for node, good in allowed.items():
        node_cost[node] = np.where(good, node_cost[node], np.inf)
        node_key[node] = ("bound", node_key[node], good.tobytes())
    return dataclasses.replace(ilp, node_cost=tuple(node_cost), node_key=tuple(node_key))


def to_solver(ilp: Ilp) -> SolverInput:
    """Step (6): an edge for each resharding between two nodes; one within a node is a cost of its strategies."""
    node_cost = list(ilp.node_cost)
    edges: list[solver.Edge] = []
    reshard_of_edge: list[int] = []
    for number, (reshard, matrix) in enumerate(zip(ilp.choices.reshards, ilp.reshard_cost, strict=True)):
        source, target = reshard.source.node, reshard.target.node
        if source == target:
            node_cost[source] = node_cost[source] + np.diagonal(matrix)
        else:
            reshard_of_edge.append(number)
            edges.append(solver.Edge(source=source, target=target, cost=matrix))
    problem = solver.Problem(node_cost=tuple(node_cost), edges=tuple(edges))
    return SolverInput(choices=ilp.choices, problem=problem, reshard_of_edge=tuple(reshard_of_edge))


def classes_of(ilp: Ilp, paired_ops: Sequence[tuple[Op, Op]] = ()) -> tuple[int, ...]:
    """The class of each node: the nodes of one class share their decision, and so do the paired operations."""
    number: dict[Hashable, int] = {}
    kinds = [number.setdefault(key, len(number)) for key in ilp.node_key]
    matrix_number: dict[int, int] = {}
    edge_kinds = [matrix_number.setdefault(id(matrix), len(matrix_number)) for matrix in ilp.reshard_cost]
    classes = fold(ilp.choices, kinds, edge_kinds)
    return joined(ilp.choices, classes, paired_ops) if paired_ops else classes


def largest_cost_s(problem: solver.Problem) -> float:
    """An upper bound of the seconds of any choice."""
    costs = (*problem.node_cost, *(edge.cost for edge in problem.edges))
    return sum(float(np.max(cost, where=np.isfinite(cost), initial=0.0)) for cost in costs) or 1.0


def shards(layouts: Layouts, mesh: LogicalMesh) -> np.ndarray:
    """The number of shards of a value under each layout."""
    return np.array([layout.shards(mesh) for layout in layouts], np.float64)
