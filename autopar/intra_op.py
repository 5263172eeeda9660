"""The intra-operator pass: assembles the ILP of one mesh, solves it, and reads the decisions back."""

from __future__ import annotations

import dataclasses

import numpy as np

from autopar import solver
from autopar.assembly import Assembly, Home, Node, assemble
from autopar.cluster import DeviceKind
from autopar.costs import Work, flops_of, is_fusible, time_s
from autopar.folding import fold
from autopar.graph import Atom, Op, OpGraph, Role
from autopar.layout import Layout
from autopar.mesh import LogicalMesh
from autopar.partials import Partials
from autopar.resharding import MeshLinks, StepKind, paths
from autopar.strategies import Strategy


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """What times are computed from: the device, the mesh with its links, and how wide 16-bit sums are sent."""

    device: DeviceKind
    links: MeshLinks
    widens_16_bit_sums: bool

    def widening(self, dtype: str) -> float:
        """Bytes sent for each byte stored when a value of this type is reduced.

        XLA's CPU compiler promotes 16-bit floating-point reductions to 32 bits (its AllReducePromotion pass).
        """
        return 2.0 if self.widens_16_bit_sums and dtype in ("bfloat16", "float16") else 1.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SolverReport:
    """What the solver says of its answer. Times in seconds; `nodes` before and `classes` after folding."""

    status: str
    objective_s: float
    bound_s: float
    gap: float
    wall_s: float
    nodes: int
    classes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ShardingPlan:
    """The decisions for one graph on one mesh.

    `strategy[op.id]` of every operation that has a choice (the others are replicated); `raw`, `placed` and `copies` are
    layouts of values as in `Assembly`; a value that is in none of them is replicated.
    """

    mesh: LogicalMesh
    strategy: dict[int, Strategy]
    partials: Partials
    raw: dict[int, Layout]
    placed: dict[int, Layout]
    copies: dict[tuple[int, Role | None], Layout]
    report: SolverReport


class IntraOp:
    """The ILP of one graph and mesh; built once, solved for any memory limit."""

    def __init__(self, graph: OpGraph, mesh: LogicalMesh, model: CostModel) -> None:
        self.graph, self.model = graph, model
        self.assembly: Assembly = assemble(graph, mesh)
        self._costs = _NodeCosts(graph, model)
        self._matrices: dict[tuple, np.ndarray] = {}
        self.problem, self.classes = self._build()

    def _build(self) -> tuple[solver.Problem, tuple[int, ...]]:
        assembly = self.assembly
        node_cost, kinds, number = [], [], {}
        for node in assembly.nodes:
            cost, key = self._costs.of_node(node)
            node_cost.append(cost)
            kinds.append(number.setdefault(key, len(number)))
        edges, edge_kinds, matrix_number = [], [], {}
        for reshard in assembly.reshards:
            matrix = self._matrix(reshard.value, reshard.source, reshard.target, reshard.count)
            edge_kinds.append(matrix_number.setdefault(id(matrix), len(matrix_number)))
            if reshard.source.node == reshard.target.node:
                node = reshard.source.node
                node_cost[node] = node_cost[node] + np.diagonal(matrix)
            else:
                edges.append(solver.Edge(source=reshard.source.node, target=reshard.target.node, cost=matrix))
        problem = solver.Problem(
            node_cost=tuple(node_cost),
            edges=tuple(edges),
            limit_bytes=None,
            node_names=tuple(node.name for node in assembly.nodes),
        )
        return problem, fold(assembly, kinds, edge_kinds)

    def _matrix(self, value: int, source: Home, target: Home, count: float) -> np.ndarray:
        """Seconds of resharding for every pair of strategies; the same object for the same costs."""
        v = self.graph.values[value]
        widening = self.model.widening(v.dtype)
        key = (source.layouts, target.layouts, len(v.shape), v.nbytes, widening, count)
        if key not in self._matrices:
            table = paths(len(v.shape), self.model.links)
            rows = np.array([table.index[layout] for layout in source.layouts])[:, None]
            columns = np.array([table.index[layout] for layout in target.layouts])[None, :]
            per_byte = table.moved_s_per_byte[rows, columns] + widening * table.reduced_s_per_byte[rows, columns]
            self._matrices[key] = count * (table.fixed_s[rows, columns] + v.nbytes * per_byte)
        return self._matrices[key]

    def solve(self, *, uses: tuple[solver.Use, ...], limit_bytes: int | None, time_limit_s: float) -> solver.Solution:
        """Solves the folded problem; the solution's choice is that of the unfolded one."""
        problem = dataclasses.replace(self.problem, uses=uses, limit_bytes=limit_bytes)
        tied, undo = solver.tie(problem, self.classes)
        solution = solver.solve(tied, time_limit_s=time_limit_s)
        return dataclasses.replace(solution, choice=undo(solution.choice) if solution.choice else ())

    def decode(self, solution: solver.Solution) -> ShardingPlan:
        """The decisions that a choice of strategies stands for."""
        choice, assembly = solution.choice, self.assembly
        at = lambda home: home.layouts[choice[home.node]]  # noqa: E731
        report = SolverReport(
            status=solution.status.value,
            objective_s=solution.objective,
            bound_s=solution.bound,
            gap=solution.gap,
            wall_s=solution.wall_s,
            nodes=len(assembly.nodes),
            classes=len(set(self.classes)),
        )
        return ShardingPlan(
            mesh=assembly.mesh,
            partials=assembly.partials,
            strategy={op: strategies[choice[node]] for op, (node, strategies) in assembly.of_op.items()},
            raw={v: at(home) for v, home in assembly.raw.items()},
            placed={v: at(home) for v, home in assembly.placed.items()},
            copies={key: at(home) for key, home in assembly.copies.items()},
            report=report,
        )


class _NodeCosts:
    """Seconds of each strategy of a node, cached by what its operations are."""

    def __init__(self, graph: OpGraph, model: CostModel) -> None:
        self.graph, self.model = graph, model
        self._known: dict[tuple, np.ndarray] = {}

    def of_node(self, node: Node) -> tuple[np.ndarray, tuple]:
        """(cost of each strategy, key): nodes with equal keys have equal strategies and costs."""
        total = np.zeros(node.size)
        key: list[tuple] = [(node.kind, node.size, node.layouts)]
        for op, strategies in node.members:
            work = self._work(op)
            member = (work, id(strategies), op.count)
            if member not in self._known:
                self._known[member] = op.count * np.array([self._strategy_s(op, work, s) for s in strategies])
            total = total + self._known[member]
            key.append((op.primitive, *member))
        return total, tuple(key)

    def _work(self, op: Op) -> Work:
        return Work(
            flops=flops_of(op),
            dtype=self.graph.values[op.outputs[0]].dtype,
            operand_bytes=tuple(self._nbytes(a) for a in op.inputs),
            result_bytes=tuple(self._nbytes(v) for v in op.outputs),
            fusible=is_fusible(op.primitive),
        )

    def _nbytes(self, atom: Atom) -> int:
        return self.graph.values[atom].nbytes if isinstance(atom, int) else 0

    def _strategy_s(self, op: Op, work: Work, strategy: Strategy) -> float:
        mesh = self.model.links.mesh
        parts = tuple(layout.shards(mesh) for layout in strategy.operands)
        result_parts = tuple(layout.shards(mesh) for layout in strategy.results)
        seconds = time_s(work, strategy, (parts, result_parts), self.model.device)
        if strategy.combined:
            for v, n in zip(op.outputs, result_parts, strict=True):
                widening = self.model.widening(self.graph.values[v].dtype)
                nbytes = self.graph.values[v].nbytes / n * widening
                seconds += self.model.links.time_s(StepKind.ALL_REDUCE.value, nbytes, strategy.combined)
        return seconds
