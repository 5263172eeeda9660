"""The intra-operator integer program of one graph on one mesh: built, solved, decoded."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

import numpy as np

from autopar import solver
from autopar.cost.cost_model import CostModel
from autopar.ir.constraints import Constraints
from autopar.ir.graph import FactorKind, Op, OpGraph
from autopar.ir.layout import Layout, replicated
from autopar.ir.pins import PinnedLayout
from autopar.ir.strategies import Strategy
from autopar.lowering.lower import Relaxation, ShardingPlan, SolverReport
from autopar.ops.attention.checks import check_heads, check_rings
from autopar.passes.fold_step import ONE_EACH, Weights
from autopar.passes.saved_arrays import offloaded_on, saved_arrays
from autopar.plan.options import NEARLY_EQUAL
from autopar.search.intra_op.build_choice_graph import SharedTables
from autopar.search.intra_op.choice_graph import ChoiceGraph
from autopar.search.intra_op.formulation import (
    charge_batch,
    charge_microbatching,
    classes_of,
    constrain,
    fix_layouts,
    largest_cost_s,
    price_constraints,
    to_solver,
)
from autopar.search.intra_op.masks import Masks
from autopar.search.intra_op.memory_prices import MemoryPrices, least_bytes, price_memory, priced_bytes, state_values
from autopar.search.intra_op.slack import ALL_EXPOSED, Exposure, discount_overlap, slacks_s

# Rounds of the solver: a time limit would make plans depend on the load of the machine. 161 programs that tables are
# too large for, of eight steps on up to 16 devices and on meshes of three axes, are all proven before the first round.
ROUNDS = 4


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveWeights:
    """The weights of an objective: the price of a byte of state, and the charged fraction of communication that
    computation can hide. The price also applies to values saved by `in_flight` micro-batches. What is decided under
    them has products in pieces over the `overlapped_axes`.
    """

    s_per_byte: float
    exposed_fraction: float
    in_flight: int = 0
    overlapped_axes: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GivenLayouts:
    """Layouts that the program does not choose.

    `fixed`: the one layout of an argument; `transfers`: the layout of the operand of a SEND operation; `arrivals`: the
    layout of a value from another stage; `pins`: requirements on the layouts of values; `idle`: mesh axes that split
    nothing. Arguments `in_host` are read from the memory of the host.
    """

    fixed: Mapping[int, Layout] = dataclasses.field(default_factory=dict)
    transfers: Mapping[int, Layout] = dataclasses.field(default_factory=dict)
    arrivals: Mapping[int, Layout] = dataclasses.field(default_factory=dict)
    pins: Mapping[int, PinnedLayout] = dataclasses.field(default_factory=dict)
    idle: frozenset[int] = frozenset()
    in_host: frozenset[int] = frozenset()


class IntraOp:
    """The integer program of one graph and mesh: built once, solved under many prices, and relaxed where it has to be.

    The steps are functions from program to program (`autopar.search.intra_op.formulation`). An instance also keeps the
    relaxation that a solution needed, for all later solutions.
    """

    def __init__(
        self,
        graph: OpGraph,
        model: CostModel,
        given: GivenLayouts | None = None,
        *,
        constraints: Constraints | None = None,
        paired_ops: Sequence[tuple[Op, Op]] = (),
        weights: Weights = ONE_EACH,
        tables: SharedTables | None = None,
    ) -> None:
        """`constraints` bind everything that is not `given`. Each pair of `paired_ops` shares its decisions. `weights`:
        of a graph whose repeated layers are folded. `tables` of the same graph and model are not built again.

        Raises: InvalidArgumentError for a pin that a value cannot have, UnsupportedError where the constraints require
        a split that the graph's attention cannot have.
        """
        given = given or GivenLayouts()
        self.graph, self.model, self.given = graph, model, given
        self.in_host = given.in_host | (constraints.in_host(graph) if constraints is not None else frozenset())
        offloads = constraints is not None and constraints.offloads_activations
        self.saved_in_host = offloaded_on(graph, model.device.platform)
        if offloads:
            self.saved_in_host |= saved_arrays(graph)
        self.overlapped_axes = constraints.overlapped_axes if constraints is not None else ()
        if constraints is not None:
            check_heads(graph, constraints.parts_of_heads(model.links.mesh))
            check_rings(graph, constraints.parts_of_rings(model.links.mesh))
        tables = tables or SharedTables(graph, model)
        self.costs = tables.costs
        ilp = tables.built(graph, constraints, weights, given.transfers, given.arrivals)
        self.choices = ilp.choices
        self.masks = Masks(graph, self.choices, constraints) if constraints is not None else None
        self.relaxation: Relaxation | None = None
        self._known_slacks_s: dict[bool, tuple[float, ...]] = {}
        ilp = fix_layouts(ilp, given.fixed)
        self._pinned = pinned_nodes(graph, self.choices, given.pins, without_axes(self.choices, given.idle))
        ilp = charge_batch(ilp, graph, model)
        self._free = charge_microbatching(ilp, graph, model)
        bound = constrain(self._free, self._pinned, self.masks)
        self.base = to_solver(bound)
        self.classes = classes_of(bound, paired_ops)

    @property
    def problem(self) -> solver.Problem:
        """Without prices, unfolded."""
        return self.base.problem

    def _slacks_s(self, before_loops: bool) -> tuple[float, ...]:
        """The slack of each resharding. `before_loops`: whether what a loop reads may hide before it."""
        if before_loops not in self._known_slacks_s:
            found = slacks_s(self.graph, self.choices, self._least_s, before_loops=before_loops)
            self._known_slacks_s[before_loops] = found
        return self._known_slacks_s[before_loops]

    @property
    def sends_before_loops(self) -> bool:
        """Whether anything can be sent that a loop reads."""
        return self._slacks_s(True) != self._slacks_s(False)

    def _relax(self, time_limit_s: float, rounds: int) -> None:
        """Drops as few of the contradicting constraints as make the problem solvable."""
        assert self.masks is not None
        priced = price_constraints(self._free, self._pinned, self.masks, largest_cost_s(self.problem))
        tied, undo = solver.tie(to_solver(priced).problem, self.classes)
        solution = solver.solve(tied, time_limit_s=time_limit_s, rounds=rounds)
        if solution.choice:
            self.relaxation = self.masks.relaxation(undo(solution.choice))
            self.base = to_solver(constrain(self._free, self._pinned, self.masks, self.relaxation))

    def solve(
        self,
        *,
        time_limit_s: float,
        prices: MemoryPrices | None = None,
        exposure: Exposure = ALL_EXPOSED,
        rounds: int = ROUNDS,
        cutoff_s: float = math.inf,
    ) -> solver.Solution:
        """Solves the folded problem; the choice of the solution is that of the unfolded problem. Contradicting
        constraints are relaxed, for this solution and all later ones.

        With prices, the objective includes the priced memory. `exposure` says what is charged of communication between
        operations that computation can hide (`slack`); communication within one node is charged fully. `rounds` end the
        search, as in `solver.solve`, for equal answers on machines of any speed; so
        does the proof that every choice takes `cutoff_s` or more.
        """
        solver_input = self.base if prices is None else price_memory(self.base, self.graph, prices)
        if exposure.fraction != 1.0:
            solver_input = discount_overlap(solver_input, self._slacks_s(exposure.before_loops), exposure.fraction)
        tied, undo = solver.tie(solver_input.problem, self.classes)
        solution = solver.solve(
            # A search ends once its choice is proven to be much nearer to the optimum than what counts as equal.
            tied,
            time_limit_s=time_limit_s,
            relative_gap=NEARLY_EQUAL / 10,
            rounds=rounds,
            cutoff=cutoff_s,
        )
        if solution.status is solver.Status.INFEASIBLE and self.masks is not None and self.relaxation is None:
            self._relax(time_limit_s, rounds)
            if self.relaxation is not None:
                return self.solve(
                    time_limit_s=time_limit_s,
                    prices=prices,
                    exposure=exposure,
                    rounds=rounds,
                    cutoff_s=cutoff_s,
                )
        return dataclasses.replace(solution, choice=undo(solution.choice) if solution.choice else ())

    def _least_s(self, op: Op) -> float:
        """Seconds of an operation under its fastest strategy, without its blocks."""
        if op.blocks:
            return 0.0
        if op.id not in self.choices.of_op:
            return self.costs.compute_s(op, None) if op.rule is not None else 0.0
        return self.costs.least_s(op, self.choices.of_op[op.id][1])

    def excess_s(self, graph: OpGraph, sharding: ShardingPlan) -> float:
        """Seconds that the operations of the micro-batches of a graph, this one or with some left out, take longer
        under decisions than each under its fastest strategy.
        """
        excess_s = 0.0
        for op in graph.ops():
            if op.section.repeats and op.id in self.choices.of_op and not op.blocks:
                excess_s += max(0.0, self.costs.compute_s(op, sharding.strategy[op.id]) - self._least_s(op))
        return excess_s

    def cost(self, choice: Sequence[int]) -> float:
        """Seconds of a choice, without prices."""
        return solver.evaluate(self.problem, choice)

    def priced_bytes(self, choice: Sequence[int], prices: MemoryPrices) -> float:
        """Bytes on one device that have a price, under a choice."""
        return priced_bytes(self.base, self.graph, prices, tuple(choice))

    def least_state_bytes(self) -> float:
        """Bytes of the state that a device holds at least, what lies in the memory of the host left out."""
        held = frozenset((v, state) for v, state in state_values(self.graph) if v not in self.in_host)
        return least_bytes(self.base, self.graph, held)

    def decode(self, solution: solver.Solution) -> ShardingPlan:
        """The decisions of a solution."""
        choice, choices = solution.choice, self.choices
        at = lambda site: site.layouts[choice[site.node]]  # noqa: E731
        report = SolverReport(
            status=solution.status.value,
            objective_s=solution.objective,
            bound_s=solution.bound,
            gap=solution.gap,
            nodes=len(choices.nodes),
            classes=len(set(self.classes)),
        )
        return ShardingPlan(
            mesh=choices.mesh,
            partials=choices.partials,
            strategy={op: strategies[choice[node]] for op, (node, strategies) in choices.of_op.items()},
            unreduced={v: at(site) for v, site in choices.unreduced.items()},
            reduced={v: at(site) for v, site in choices.reduced.items()},
            copies={key: at(site) for key, site in choices.copies.items()},
            report=report,
            transfer_layouts=dict(self.given.transfers),
            in_host=self.in_host,
            saved_in_host=self.saved_in_host,
            overlapped_axes=self.overlapped_axes,
            relaxation=self.relaxation,
        )


def pinned_nodes(
    graph: OpGraph,
    choices: ChoiceGraph,
    pins: Mapping[int, PinnedLayout],
    within: Mapping[int, np.ndarray] = MappingProxyType({}),
) -> dict[int, np.ndarray]:
    """For each pinned node, the strategies that its pins allow, of those of `within`."""
    allowed: dict[int, np.ndarray] = dict(within)
    for value, pin in pins.items():
        site = choices.reduced.get(value)
        if site is None:
            if not pin.is_wish and not pin.allows(replicated(len(graph.values[value].shape))):
                raise pin.impossible("it cannot be split")
            continue
        good = pin.allowed(site.layouts)
        if not good.any() and not pin.is_wish:
            raise pin.impossible("no strategy of its operation leaves it so")
        together = allowed[site.node] & good if site.node in allowed else good
        if together.any():
            allowed[site.node] = together
        elif not pin.is_wish:
            raise pin.impossible("another pin constrains an operation that is decided together with it")
    return made_as_pinned(choices, pins, allowed)


# Programs of which all layouts are pinned: what their operations do, as a partitioner has them do it.
#
# An operation makes its result as it is pinned, or sums of which the pinned result is made by a reduction. It keeps
# what all of its operands split of a factor that it sums over. Mesh axes without a pin split nothing.

Allowed = dict[int, np.ndarray]


def without_axes(choices: ChoiceGraph, idle: frozenset[int]) -> Allowed:
    """For each node, the strategies that split nothing over the `idle` mesh axes; nothing where there are none."""

    def spares(layouts: Sequence[Layout]) -> bool:
        return not any(idle & {*layout.sharded_axes, *layout.partial} for layout in layouts)

    allowed: Allowed = {}
    for number, node in enumerate(choices.nodes if idle else ()):
        good = np.ones(node.size, bool)
        if node.layouts:
            good &= [spares([layout]) for layout in node.layouts]
        for _, strategies in node.members:
            good &= [spares((*s.operands, *s.results)) and not idle & {*s.combined, *s.ring} for s in strategies]
        allowed[number] = good
    return allowed


def made_as_pinned(choices: ChoiceGraph, pins: Mapping[int, PinnedLayout], allowed: Allowed) -> Allowed:
    """For each node, of the strategies that are `allowed`, those under which values that are pinned `as_made` are made
    so; all of them where there would be none.
    """
    closed = {value: pin for value, pin in pins.items() if pin.as_made}
    if not closed:
        return allowed
    found = dict(allowed)

    def require(node: int, good: Sequence[bool]) -> None:
        together = found[node] & good if node in found else np.array(good, bool)
        if together.any():
            found[node] = together

    for value, pin in closed.items():
        if (raw := choices.unreduced.get(value)) is not None:
            require(raw.node, [pin.is_made_by(layout) for layout in raw.layouts])
    for number, node in enumerate(choices.nodes):
        for op, strategies in node.members:
            kept = list(_summed(op, pins))
            require(number, [_reads_as_pinned(strategy, kept) for strategy in strategies])
    return found


def _summed(op: Op, pins: Mapping[int, PinnedLayout]) -> Iterator[tuple[int, int, tuple[int, ...]]]:
    """(operand, dimension, mesh axes) of each factor that an operation sums over, where all operands that have it are
    pinned to the same axes.
    """
    if op.rule is None:
        return
    places: dict[int, list[tuple[int, int]]] = {}
    for i, dims in enumerate(op.rule.operands):
        for d, factors in enumerate(dims):
            if len(factors) == 1 and op.rule.factors[factors[0]].kind in (FactorKind.SUM, FactorKind.EXTREMUM):
                places.setdefault(factors[0], []).append((i, d))
    for at in places.values():
        wanted = {_axes(op, pins, i, d) for i, d in at}
        axes = wanted.pop()
        if axes and not wanted:
            yield from ((i, d, axes) for i, d in at)


def _axes(op: Op, pins: Mapping[int, PinnedLayout], operand: int, dim: int) -> tuple[int, ...] | None:
    atom = op.inputs[operand]
    pin = pins.get(atom) if isinstance(atom, int) else None
    return None if pin is None else pin.dims[dim]


def _reads_as_pinned(strategy: Strategy, kept: Sequence[tuple[int, int, tuple[int, ...]]]) -> bool:
    return all(strategy.operands[i].dims[d] == axes for i, d, axes in kept)
