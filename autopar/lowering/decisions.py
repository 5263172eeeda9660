"""`ShardingPlan`, the decisions for one graph on one mesh: written by a search, read by lowering."""

from __future__ import annotations

import dataclasses

import numpy as np

from autopar.ir.layout import Layout
from autopar.ir.mesh import LogicalMesh
from autopar.sharding.partial_sums import Partials
from autopar.sharding.strategies import Strategy


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SolverReport:
    """What the solver says of its answer. `nodes` before and `classes` after folding."""

    status: str
    objective_s: float
    bound_s: float
    gap: float
    nodes: int
    classes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Relaxation:
    """What was given up: for a node the strategies that are left, the numbers of reshards whose ways are all open, and
    for notes the values (with the number of the axis) that are computed whole, or cut where they should not be.
    """

    nodes: dict[int, np.ndarray]
    edges: frozenset[int]
    whole: tuple[tuple[int, int], ...] = ()
    cut: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ShardingPlan:
    """The decisions for one graph on one mesh.

    `strategy[op.id]` of every operation that has a choice (the others are replicated); `unreduced`, `reduced` and
    `copies` are layouts of values as in `ChoiceGraph`; a value that is in none of them is replicated.
    `transfer_layouts[op.id]` is the layout in which a value leaves for another stage. Arguments that are `in_host` lie
    in the memory of the host between steps; values that are `saved_in_host` are there between the forward and the
    backward pass. `relaxation` is what was given up of constraints.
    """

    mesh: LogicalMesh
    strategy: dict[int, Strategy]
    partials: Partials
    unreduced: dict[int, Layout]
    reduced: dict[int, Layout]
    copies: dict[tuple[int, str], Layout]
    report: SolverReport
    transfer_layouts: dict[int, Layout] = dataclasses.field(default_factory=dict)
    in_host: frozenset[int] = frozenset()
    saved_in_host: frozenset[int] = frozenset()
    overlapped_axes: tuple[int, ...] = ()
    relaxation: Relaxation | None = None
