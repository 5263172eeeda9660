"""Constraints as masks over the choices of an ILP, and their relaxation where they contradict each other.

Constraints allow some strategies of each node and some reshardings of each edge, and require values to be split over
mesh axes. A requirement applies where the node has a strategy that meets it. Requirements can contradict each other: a
matrix must be split by columns, and a reader of the result separates the columns. Then the relaxation drops as few
requirements as possible, and their values stay whole. Before that, it permits forbidden reshardings, if that helps.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Sequence

import numpy as np

from autopar.ir.constraints import Constraints
from autopar.ir.graph import ALL, OpGraph, Purpose, Role, Value
from autopar.ir.layout import Layout, replicated
from autopar.lowering.lower import Relaxation
from autopar.ops.kernels.operation import NAME as KERNEL
from autopar.search.intra_op.choice_graph import ChoiceGraph, Reshard


class GivenUp(enum.IntEnum):
    """What a relaxation gives up, the dearest first: weights kept in parts that are gathered over the axis that has
    them, a value computed whole, a value kept whole, the plan's time (as a part of the longest that a choice could
    take), a way that is opened. A hundred of one are as dear as one of those before.
    """

    GATHERED = enum.auto()
    COMPUTED_WHOLE = enum.auto()
    KEPT_WHOLE = enum.auto()
    SECONDS = enum.auto()
    OPENED = enum.auto()

    @property
    def price(self) -> float:
        """Two orders of magnitude between one and the next."""
        return 100.0**-self


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """The requirement to split a value over a mesh axis where a node computes or keeps it; its strategies."""

    value: int
    axis: int
    granted: np.ndarray
    is_kept: bool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NodeMask:
    """The allowed strategies of a node, and its requirements, all of which some allowed strategy meets."""

    allowed: np.ndarray
    wishes: tuple[Wish, ...]

    @property
    def good(self) -> np.ndarray:
        return np.all([self.allowed, *(wish.granted for wish in self.wishes)], axis=0)


class Masks:
    """The masks of the nodes and edges of a choice graph under constraints."""

    def __init__(self, graph: OpGraph, choices: ChoiceGraph, constraints: Constraints) -> None:
        self.graph, self.choices, self.constraints = graph, choices, constraints
        self._total_bytes = sum(v.nbytes for v in graph.values)
        self._allowed: dict[tuple, np.ndarray] = {}
        self._wishes: dict[tuple, list[tuple[int, np.ndarray]]] = {}
        self._pairs: dict[tuple, np.ndarray] = {}
        # Constraints treat values with equal ones of these alike, whose numbers are quicker to compare.
        numbers: dict[tuple, int] = {}
        kinds = ((v.dimensions, v.sides, v.purpose) for v in graph.values)
        self._kinds = [numbers.setdefault(kind, len(numbers)) for kind in kinds]
        self.nodes = self._nodes()

    def _nodes(self) -> dict[int, NodeMask]:
        """The mask of each constrained node. A split is required where the node has a strategy for it."""
        bound, choices = self.constraints, self.choices
        allowed_at: dict[int, np.ndarray] = {}
        wished_at: dict[int, list[list[Wish]]] = {}

        def bind(node: int, allowed: np.ndarray, wishes: list[Wish]) -> None:
            if choices.nodes[node].kind != "transfer":
                allowed_at[node] = allowed_at[node] & allowed if node in allowed_at else allowed
                wished_at.setdefault(node, []).append(wishes)

        for homes in (choices.unreduced, choices.reduced):
            for value, home in homes.items():
                wishes = self._wished(value, home.layouts, bound.must_lie_split, is_kept=True)
                bind(home.node, self._good(value, home.layouts), wishes)
        for (value, readers), home in choices.copies.items():
            # A copy for readers of all roles is kept between the passes, like the value itself.
            is_kept = readers == ALL
            wishes = self._wished(value, home.layouts, bound.must_be_copied_split, is_kept=True) if is_kept else []
            bind(home.node, self._good(value, home.layouts), wishes)
        updating = Role.UPDATE if self.graph.forward_role is Role.FORWARD else None
        for op in self.graph.ops():
            if op.id not in choices.of_op:
                continue
            node, strategies = choices.of_op[op.id]
            allowed = np.ones(len(strategies), bool)
            if op.primitive == KERNEL:
                allowed &= np.array([bound.may_exchange(strategy.ring) for strategy in strategies])
            wishes = []
            meets = any(isinstance(a, int) and self.graph.values[a].purpose is Purpose.ACTIVATION for a in op.inputs)
            for i, atom in enumerate(op.inputs):
                # The update may read a part of whatever is there: what it makes decides.
                if isinstance(atom, int) and op.role is not updating:
                    layouts = choices.operand_layouts(strategies, i)
                    allowed = allowed & self._good(atom, layouts)
                    if meets:
                        allowed = allowed & self._good(atom, layouts, bound.meets_activations)
                    wishes += self._wished(atom, layouts, bound.must_be_read_split, is_kept=False)
            for i, atom in enumerate(op.outputs):
                layouts = choices.result_layouts(strategies, i)
                allowed = allowed & self._good(atom, layouts)
                wishes += self._wished(atom, layouts, bound.must_lie_split, is_kept=False)
            bind(node, allowed, wishes)
        masks: dict[int, NodeMask] = {}
        for node, allowed in allowed_at.items():
            good, granted = allowed, list[Wish]()
            for wishes in wished_at[node]:
                combined = np.all([good, *(wish.granted for wish in wishes)], axis=0)
                if wishes and combined.any():
                    good, granted = combined, [*granted, *wishes]
            masks[node] = NodeMask(allowed=allowed, wishes=tuple(granted))
        return masks

    def _good(
        self, value: int, layouts: tuple[Layout, ...], allows: Callable[..., np.ndarray] | None = None
    ) -> np.ndarray:
        """Which layouts of a value the constraints allow."""
        key = (id(layouts), self._kinds[value], allows.__name__ if allows is not None else "")
        if key not in self._allowed:
            self._allowed[key] = (allows or self.constraints.allowed)(self.graph.values[value], layouts)
        return self._allowed[key]

    def _wished(
        self, value: int, layouts: tuple[Layout, ...], required: Callable[[Value], Sequence[bool]], is_kept: bool
    ) -> list[Wish]:
        key = (id(layouts), self._kinds[value], required.__name__)
        if key not in self._wishes:
            v = self.graph.values[value]
            self._wishes[key] = self.constraints.split(v, layouts, required(v))
        return [Wish(value=value, axis=a, granted=g, is_kept=is_kept) for a, g in self._wishes[key]]

    def pairs(self, reshard: Reshard) -> np.ndarray | None:
        """The allowed reshardings of an edge, a row for each strategy of its source; None: all are allowed."""
        # New state is laid as the old one, whatever it was before: a statistic of the batch comes as an activation.
        if self.choices.nodes[reshard.target.node].kind in ("transfer", "argument"):
            return None
        return self._pairs_of(reshard, self.constraints.may_become)

    def _pairs_of(self, reshard: Reshard, holds: Callable[..., np.ndarray]) -> np.ndarray:
        v, sources = self.graph.values[reshard.value], reshard.source.layouts
        is_transfer = self.choices.nodes[reshard.source.node].kind == "transfer"
        kind = self._kinds[reshard.value]
        key = (is_transfer or id(sources), id(reshard.target.layouts), kind, holds.__name__)
        if is_transfer:  # how a value crosses between stages binds nobody: it is as good as whole
            sources = (replicated(len(v.shape)),)
        if key not in self._pairs:
            self._pairs[key] = holds(v, sources, reshard.target.layouts)
        return self._pairs[key]

    # Giving up

    def price_of_node(self, node: int) -> np.ndarray | None:
        """The penalty of each strategy of a node; inf where it is forbidden, None where the node is not constrained."""
        mask = self.nodes.get(node)
        if mask is None:
            return None
        price = np.where(mask.allowed, 0.0, np.inf)
        for wish in mask.wishes:
            what = GivenUp.KEPT_WHOLE if wish.is_kept else GivenUp.COMPUTED_WHOLE
            price = price + np.where(wish.granted, 0.0, what.price * (1 + self._part(wish.value)))
        return price

    def price_of_edge(self, reshard: Reshard) -> np.ndarray | None:
        """The penalty of each resharding of an edge; None where all are allowed."""
        allowed = self.pairs(reshard)
        if allowed is None:
            return None
        price = np.where(allowed, 0.0, GivenUp.OPENED.price)
        if self.choices.nodes[reshard.source.node].kind != "transfer":
            gathers = self._pairs_of(reshard, self.constraints.gathers_weights)
            price = price + np.where(gathers, GivenUp.GATHERED.price, 0.0)
        return price

    def _part(self, value: int) -> float:
        return self.graph.values[value].nbytes / self._total_bytes

    def relaxation(self, choice: Sequence[int]) -> Relaxation:
        """The constraints that a choice drops: values whose requirements it does not meet stay whole, and the
        reshardings that it takes are permitted.
        """
        nodes: dict[int, np.ndarray] = {}
        left_whole: dict[tuple[int, int], None] = {}
        for node, mask in self.nodes.items():
            given_up = [wish for wish in mask.wishes if not wish.granted[choice[node]]]
            if not given_up:
                continue
            granted = [wish.granted for wish in mask.wishes if wish.granted[choice[node]]]
            nodes[node] = np.all([mask.allowed, *granted, *(~wish.granted for wish in given_up)], axis=0)
            left_whole.update(dict.fromkeys((wish.value, wish.axis) for wish in given_up if not wish.is_kept))
        edges: list[int] = []
        for number, reshard in enumerate(self.choices.reshards):
            allowed = self.pairs(reshard)
            if allowed is not None:
                source = choice[reshard.source.node] if len(allowed) > 1 else 0
                if not allowed[source, choice[reshard.target.node]]:
                    edges.append(number)
        resharded = dict.fromkeys(self.choices.reshards[number].value for number in edges)
        return Relaxation(nodes=nodes, edges=frozenset(edges), whole=tuple(left_whole), cut=tuple(resharded))
