"""The intra-operator ILP of one graph on one mesh: assembly, solution, decoding."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from autopar import solver
from autopar.attention.checks import check_heads, check_rings
from autopar.cost.cost_model import CostModel, NodeCosts, copied_s
from autopar.intra_op.choice_graph import ChoiceGraph, LayoutSite, Reshard, build_choice_graph
from autopar.intra_op.masks import SECONDS, Masks
from autopar.intra_op.slack import slacks_s
from autopar.intra_op.symmetry import fold, joined
from autopar.ir.graph import Op, OpGraph, OpKind, Section, read_by
from autopar.ir.layout import Layout, replicated
from autopar.ir.value_state import ALL, REDUCED, UNREDUCED
from autopar.lowering.decisions import Relaxation, ShardingPlan, SolverReport
from autopar.sharding.constraints import Constraints
from autopar.sharding.pins import PinnedLayout
from autopar.sharding.resharding import paths

# Rounds of the solver, instead of a clock, by which plans would depend on what else the machine does: for layers and
# stages (more find nothing better for GPT-3 on 28 meshes), and for the whole step on one mesh (58 programs of 18 steps
# are proved optimal in 32, 64 and 128 rounds alike).
ROUNDS, MESH_ROUNDS = 16, 64


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveWeights:
    """What is decided under: the price of a byte of state, and what counts of a send that computing can hide. What is
    saved for the backward passes of micro-batches `in_flight` has the price too.
    """

    s_per_byte: float
    exposed_fraction: float
    in_flight: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPrices:
    """What a byte on one device costs, in seconds, for the values (with their states) that crowd the memory.

    `copies` of a value count where it stands for the same value of several layers.
    """

    s_per_byte: float
    values: frozenset[tuple[int, str]]
    copies: Mapping[int, float] = dataclasses.field(default_factory=dict)


def held_values(graph: OpGraph) -> frozenset[tuple[int, str]]:
    """What lies in memory through the whole step in any case: state and sums over micro-batches, at home."""
    arguments = {v for i, v in enumerate(graph.block.inputs) if i not in graph.batch | graph.repeating}
    sums = {v for op in graph.block.ops if op.kind is OpKind.ACCUMULATE for v in op.outputs}
    return frozenset((v, UNREDUCED) for v in arguments | sums)


def state_values(graph: OpGraph) -> frozenset[tuple[int, str]]:
    """What may lie in memory through the whole step: state, sums over micro-batches, copies for all readers."""
    before = (op for op in graph.block.ops if op.section is Section.BEFORE and op.kind is not OpKind.SPLIT)
    values = {v for v, _ in held_values(graph)}.union(*(op.outputs for op in before))
    return frozenset((v, state) for v in values for state in (UNREDUCED, ALL))


def saved_values(graph: OpGraph) -> frozenset[tuple[int, str]]:
    """What lies in memory from the forward pass of a micro-batch to its backward pass."""
    made = {v for op in graph.block.ops if op.section is Section.FORWARD for v in op.outputs}
    behind = (op for op in graph.block.ops if op.section.is_backward)
    return frozenset((v, state) for op in behind for v in read_by(op) if v in made for state in (REDUCED, ALL))


class IntraOp:
    """The ILP of one graph and mesh; built once, solved for any memory limit."""

    def __init__(
        self,
        graph: OpGraph,
        model: CostModel,
        fixed: dict[int, Layout] | None = None,
        transfer_layouts: dict[int, Layout] | None = None,
        arrivals: dict[int, Layout] | None = None,
        constraints: Constraints | None = None,
        alike: Sequence[tuple[Op, Op]] = (),
        pins: Mapping[int, PinnedLayout] | None = None,
        in_host: frozenset[int] = frozenset(),
    ) -> None:
        """`fixed` gives arguments the one layout they may have, `transfer_layouts` SEND operations that of their
        operand, `arrivals` what comes from other stages the one in which it comes; `pins` say how values lie,
        `constraints` bind everything else. Arguments `in_host` come from the memory of the host, beside those that
        constraints keep there. Pairs of operations that are `alike` get the same decisions.

        Raises: InvalidArgumentError for a pin that a value cannot have, UnsupportedError where the constraints ask for
        what the graph's attention cannot do.
        """
        self.graph, self.model, self.fixed, self.transfer_layouts = graph, model, fixed or {}, transfer_layouts or {}
        self.constraints, self.pins = constraints, pins or {}
        self.in_host = in_host | (constraints.in_host(graph) if constraints is not None else frozenset())
        if constraints is not None:
            check_heads(graph, constraints.parts_of_heads(model.links.mesh))
            check_rings(graph, constraints.parts_of_rings(model.links.mesh))
        order_of = constraints.order_of if constraints is not None else None
        self.assembly: ChoiceGraph = build_choice_graph(
            graph, model.links.mesh, self.transfer_layouts, arrivals, order_of
        )
        self._costs = NodeCosts(graph, model)
        self._matrices: dict[tuple, np.ndarray] = {}
        self._numbers: dict[int, np.ndarray] = {}
        self._bound_matrices: dict[tuple, np.ndarray] = {}
        self._feeding: dict[int, Reshard] = {}  # by the position of its edge: the reshard that fills a copy node
        self._slacks_s: tuple[float, ...] | None = None
        self._sent: list[int] = []  # by the position of its edge, the number of the reshard
        self.masks = Masks(graph, self.assembly, constraints) if constraints is not None else None
        self.relaxation: Relaxation | None = None
        self.problem, classes = self._build()
        self.classes = joined(self.assembly, classes, alike) if alike else classes

    def _build(self, *, for_relaxing: bool = False) -> tuple[solver.Problem, tuple[int, ...]]:
        """The problem, and classes of its nodes. For relaxing it, constraints have prices instead of forbidding."""
        assembly = self.assembly
        self._feeding, self._sent = {}, []
        node_cost: list[np.ndarray] = []
        kinds: list[int] = []
        number: dict[tuple, int] = {}
        for node in assembly.nodes:
            cost, key = self._costs.of_members(node.members, node.size)
            node_cost.append(cost)
            kinds.append(number.setdefault((node.kind, node.size, node.layouts, *key), len(number)))
        for value, layout in self.fixed.items():
            if (home := assembly.reduced.get(value)) is not None:
                allowed = np.array([at == layout for at in home.layouts])
                node_cost[home.node] = np.where(allowed, node_cost[home.node], np.inf)
                kinds[home.node] = number.setdefault(("fixed", value), len(number))
        pinned = self._pinned_nodes()
        for position in self.graph.batch:
            # Each device takes its part of the batch in at least once: a whole batch everywhere is not for nothing.
            value = self.graph.block.inputs[position]
            if (home := assembly.reduced.get(value)) is not None:
                nbytes = self.graph.values[value].nbytes / self._shards(home.layouts)
                node_cost[home.node] = node_cost[home.node] + nbytes / self.model.device.memory_bytes_per_s
                kinds[home.node] = number.setdefault(("batch", kinds[home.node], value), len(number))
        for op in self.graph.block.ops:
            # Adding to a sum over micro-batches reads and writes it every time: parts of it are cheaper than the whole.
            if (
                op.kind in (OpKind.SPLIT, OpKind.ACCUMULATE)
                and (home := assembly.unreduced.get(op.outputs[0])) is not None
            ):
                copied = op.count * np.array([copied_s(self.graph, op, at, self.model) for at in home.layouts])
                node_cost[home.node] = node_cost[home.node] + copied
                kinds[home.node] = number.setdefault(("copied", kinds[home.node], copied.tobytes()), len(number))
        seconds = SECONDS / self._most_s() if for_relaxing else 0.0
        if for_relaxing:
            assert self.masks is not None
            for at, cost in enumerate(node_cost):
                price = self.masks.price_of_node(at) if at not in pinned else None
                node_cost[at] = seconds * cost + (0.0 if price is None else price)
        else:
            pinned = {**self._bound_nodes(), **pinned}  # where a pin speaks, no other constraint does
        for at, good in pinned.items():
            node_cost[at] = np.where(good, node_cost[at], np.inf)
            kinds[at] = number.setdefault(("bound", kinds[at], good.tobytes()), len(number))
        edges: list[solver.Edge] = []
        edge_kinds: list[int] = []
        matrix_number: dict[int, int] = {}
        for number_of_reshard, reshard in enumerate(assembly.reshards):
            matrix = self._matrix(reshard.value, reshard.source, reshard.target, reshard.count)
            matrix = (
                self._priced_ways(seconds * matrix, reshard)
                if for_relaxing
                else self._allowed_ways(matrix, number_of_reshard)
            )
            edge_kinds.append(matrix_number.setdefault(id(matrix), len(matrix_number)))
            if reshard.source.node == reshard.target.node:
                own = reshard.source.node
                node_cost[own] = node_cost[own] + np.diagonal(matrix)
            else:
                if assembly.nodes[reshard.target.node].kind == "copy":
                    self._feeding.setdefault(len(edges), reshard)
                self._sent.append(number_of_reshard)
                edges.append(solver.Edge(source=reshard.source.node, target=reshard.target.node, cost=matrix))
        problem = solver.Problem(
            node_cost=tuple(node_cost),
            edges=tuple(edges),
            limit_bytes=None,
            node_names=tuple(node.name for node in assembly.nodes),
        )
        return problem, fold(assembly, kinds, edge_kinds)

    def _pinned_nodes(self) -> dict[int, np.ndarray]:
        """For each node that pins speak of, which of its strategies they leave."""
        found: dict[int, np.ndarray] = {}
        for value, pin in self.pins.items():
            home = self.assembly.reduced.get(value)
            if home is None:
                if not pin.allows(replicated(len(self.graph.values[value].shape))):
                    raise pin.impossible("it cannot be split")
                continue
            good = pin.allowed(home.layouts)
            if not good.any():
                raise pin.impossible("no way to compute it leaves it so")
            found[home.node] = found[home.node] & good if home.node in found else good
            if not found[home.node].any():
                raise pin.impossible("another pin speaks of what is computed together with it")
        return found

    def _bound_nodes(self) -> dict[int, np.ndarray]:
        """For each node that the constraints bind, which of its strategies they leave."""
        if self.masks is None:
            return {}
        left = self.relaxation.nodes if self.relaxation is not None else {}
        return {node: left.get(node, mask.good) for node, mask in self.masks.nodes.items()}

    def _allowed_ways(self, matrix: np.ndarray, number: int) -> np.ndarray:
        """The costs of an edge, without the ways that the constraints forbid."""
        if self.masks is None or (self.relaxation is not None and number in self.relaxation.edges):
            return matrix
        allowed = self.masks.pairs(self.assembly.reshards[number])
        if allowed is None:
            return matrix
        key = (id(matrix), id(allowed))
        if key not in self._bound_matrices:
            self._bound_matrices[key] = np.where(allowed, matrix, np.inf)
        return self._bound_matrices[key]

    def _priced_ways(self, matrix: np.ndarray, reshard: Reshard) -> np.ndarray:
        """The costs of an edge for relaxing the problem."""
        assert self.masks is not None
        price = self.masks.price_of_edge(reshard)
        return matrix if price is None else matrix + price

    def _most_s(self) -> float:
        """More seconds than any choice costs."""
        costs = (*self.problem.node_cost, *(edge.cost for edge in self.problem.edges))
        return sum(float(np.max(cost, where=np.isfinite(cost), initial=0.0)) for cost in costs) or 1.0

    def _relax(self, time_limit_s: float, rounds: int) -> None:
        """Gives up as little of the constraints as makes the problem solvable, where they contradict themselves."""
        assert self.masks is not None
        problem, _ = self._build(for_relaxing=True)
        tied, undo = solver.tie(problem, self.classes)
        solution = solver.solve(tied, time_limit_s=time_limit_s, rounds=rounds)
        if solution.choice:
            self.relaxation = self.masks.relaxation(undo(solution.choice))
            self.problem, _ = self._build()

    def _matrix(self, value: int, source: LayoutSite, target: LayoutSite, count: float) -> np.ndarray:
        """Seconds of resharding for every pair of strategies; the same object for the same costs."""
        v = self.graph.values[value]
        widening = self.model.widening(v.dtype)
        key = (id(source.layouts), id(target.layouts), len(v.shape), v.nbytes, widening, count)
        if key not in self._matrices:
            table = paths(len(v.shape), self.model.links)
            rows, columns = self._indices(source.layouts)[:, None], self._indices(target.layouts)[None, :]
            seconds = table.fixed_s[rows, columns] + widening * v.nbytes * table.s_per_byte[rows, columns]
            self._matrices[key] = count * seconds
        return self._matrices[key]

    def _indices(self, layouts: tuple[Layout, ...]) -> np.ndarray:
        """The numbers of layouts in the table of paths of their rank."""
        if id(layouts) not in self._numbers:
            table = paths(len(layouts[0].dims), self.model.links)
            self._numbers[id(layouts)] = np.array([table.index[layout] for layout in layouts])
        return self._numbers[id(layouts)]

    def solve(
        self,
        *,
        time_limit_s: float,
        prices: MemoryPrices | None = None,
        exposed_fraction: float = 1.0,
        rounds: int = MESH_ROUNDS,
    ) -> solver.Solution:
        """Solves the folded problem; the solution's choice is that of the unfolded one. Constraints that contradict
        themselves are relaxed, for this solution and all later ones.

        With prices, the objective holds the priced memory too. Of what is sent between operations `exposed_fraction`
        counts for as long as there is computing to hide it (`slack`), but for what one node makes and reads. `rounds`
        end the search, as in `solver.solve`, for an answer that does not depend on how fast the machine is.
        """
        problem = self.problem if prices is None else self._priced(prices)
        if exposed_fraction != 1.0:
            sends, prices_of_copies = problem.edges[: len(self.problem.edges)], problem.edges[len(self.problem.edges) :]
            problem = dataclasses.replace(problem, edges=(*self._counted(sends, exposed_fraction), *prices_of_copies))
        tied, undo = solver.tie(problem, self.classes)
        solution = solver.solve(tied, time_limit_s=time_limit_s, rounds=rounds)
        if solution.status is solver.Status.INFEASIBLE and self.masks is not None and self.relaxation is None:
            self._relax(time_limit_s, rounds)
            if self.relaxation is not None:
                return self.solve(
                    time_limit_s=time_limit_s, prices=prices, exposed_fraction=exposed_fraction, rounds=rounds
                )
        return dataclasses.replace(solution, choice=undo(solution.choice) if solution.choice else ())

    def _counted(self, sends: Sequence[solver.Edge], exposed_fraction: float) -> list[solver.Edge]:
        """What is sent, at its cost with what can hide behind computing counted as it is said."""
        if self._slacks_s is None:
            self._slacks_s = slacks_s(self.graph, self.assembly, self._least_s)
        found: list[solver.Edge] = []
        counted: dict[tuple[int, float], np.ndarray] = {}  # one matrix for equal ones, as `solver.tie` wants them
        for edge, number in zip(sends, self._sent, strict=True):
            cost, slack_s = edge.cost, self._slacks_s[number]
            if slack_s and (id(cost), slack_s) not in counted:
                hidden = np.minimum(cost, slack_s, where=np.isfinite(cost), out=np.zeros_like(cost))
                counted[id(cost), slack_s] = cost - (1 - exposed_fraction) * hidden
            found.append(
                solver.Edge(source=edge.source, target=edge.target, cost=counted[id(cost), slack_s])
                if slack_s
                else edge
            )
        return found

    def _least_s(self, op: Op) -> float:
        """Seconds of an operation at its fastest, its blocks apart."""
        if op.blocks:
            return 0.0
        if op.id not in self.assembly.of_op:
            return self._costs.compute_s(op, None) if op.rule is not None else 0.0
        return self._costs.least_s(op, self.assembly.of_op[op.id][1])

    def cost(self, choice: Sequence[int]) -> float:
        """Seconds of a choice, without prices."""
        return solver.evaluate(self.problem, choice)[0]

    def priced_bytes(self, choice: Sequence[int], prices: MemoryPrices) -> float:
        """Bytes on one device that have a price, under a choice."""
        return (solver.evaluate(self._priced(prices), choice)[0] - self.cost(choice)) / prices.s_per_byte

    def _priced(self, prices: MemoryPrices) -> solver.Problem:
        """The problem with the bytes of `prices.values` added to its costs.

        A value in its home costs its bytes under each strategy of the node; a copy costs only where it differs from
        its source, so its price goes to the edge between the two. Nodes of one class share their price as they share
        their decision.
        """
        homes: dict[LayoutSite, float] = {}
        copies: dict[int, float] = {}
        for value, state in sorted(prices.values):  # sums of floats, in an order that no hash seed changes
            nbytes = self.graph.values[value].nbytes * prices.copies.get(value, 1.0)
            home = self._home(value, state)
            if home is None:
                continue
            if state in (UNREDUCED, REDUCED):
                homes[home] = homes.get(home, 0) + nbytes
            else:
                copies[home.node] = copies.get(home.node, 0) + nbytes
        shards = self._shards
        node_cost = list(self.problem.node_cost)
        for home, nbytes in homes.items():
            node_cost[home.node] = node_cost[home.node] + prices.s_per_byte * nbytes / shards(home.layouts)
        edges = list(self.problem.edges)
        for position, reshard in self._feeding.items():
            nbytes = copies.get(reshard.target.node, 0)
            if nbytes:
                matrix = prices.s_per_byte * nbytes * self._copied_share(reshard)
                edges.append(dataclasses.replace(edges[position], cost=matrix))
        return dataclasses.replace(self.problem, node_cost=tuple(node_cost), edges=tuple(edges))

    def _shards(self, layouts: tuple[Layout, ...]) -> np.ndarray:
        return np.array([layout.shards(self.assembly.mesh) for layout in layouts], np.float64)

    def _copied_share(self, reshard: Reshard) -> np.ndarray:
        """Which part of a value a copy holds on each device: nothing where it is its source under another name."""
        source, target = reshard.source.layouts, reshard.target.layouts
        differs = np.array([[a != b for b in target] for a in source], np.float64)
        return differs / self._shards(target)[None, :]

    def _home(self, value: int, state: str) -> LayoutSite | None:
        """The home that decides the size of a value in a state; None where nothing is to be decided."""
        if state == UNREDUCED:
            return self.assembly.unreduced.get(value)
        if state == REDUCED:
            return self.assembly.reduced.get(value)
        return self.assembly.copies.get((value, state))

    def decode(self, solution: solver.Solution) -> ShardingPlan:
        """The decisions that a choice of strategies stands for."""
        choice, assembly = solution.choice, self.assembly
        at = lambda home: home.layouts[choice[home.node]]  # noqa: E731
        report = SolverReport(
            status=solution.status.value,
            objective_s=solution.objective,
            bound_s=solution.bound,
            gap=solution.gap,
            nodes=len(assembly.nodes),
            classes=len(set(self.classes)),
        )
        return ShardingPlan(
            mesh=assembly.mesh,
            partials=assembly.partials,
            strategy={op: strategies[choice[node]] for op, (node, strategies) in assembly.of_op.items()},
            unreduced={v: at(home) for v, home in assembly.unreduced.items()},
            reduced={v: at(home) for v, home in assembly.reduced.items()},
            copies={key: at(home) for key, home in assembly.copies.items()},
            report=report,
            transfer_layouts=self.transfer_layouts,
            in_host=self.in_host,
            relaxation=self.relaxation,
        )
