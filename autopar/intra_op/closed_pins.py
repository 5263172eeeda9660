"""Programs of which all layouts are pinned: what their operations do, as a partitioner has them do it.

An operation makes its result as it is pinned, or sums of which the pinned result is made by a reduction. It keeps what
all of its operands split of a factor that it sums over. Mesh axes without a pin split nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from autopar.intra_op.choice_graph import ChoiceGraph
from autopar.ir.graph import FactorKind, Op
from autopar.ir.layout import Layout
from autopar.sharding.pins import PinnedLayout
from autopar.sharding.strategies import Strategy

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
