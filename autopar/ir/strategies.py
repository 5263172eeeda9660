"""The strategies of one operation: each mesh axis is assigned to one of its factors, or to none.

A batch factor is data parallelism, a contracted one leaves partial sums, and so on: the sentence above spans them
all. A linear operation may also take partial operands and pass the partial state on.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence

import msgspec

from autopar.ir.graph import FactorKind, Rule
from autopar.ir.layout import Layout, LogicalMesh, replicated

Shapes = tuple[tuple[int, ...], ...]


class Strategy(msgspec.Struct, frozen=True, gc=False):
    """One way to split an operation.

    `operands` are the layouts it reads, `results` those it leaves, partial over axes given to a summed factor.
    `split` is among how many devices the work is divided. `combined` are axes over which the partitioner itself
    combines the results (max, min, integer sums, gathers from a split table): an all-reduce that cannot be put off.
    Over `ring` parts of operands go from device to device while the operation runs.
    """

    operands: tuple[Layout, ...]
    results: tuple[Layout, ...]
    split: int
    combined: tuple[int, ...] = ()
    ring: tuple[int, ...] = ()


def replicated_strategy(operands: Iterable[tuple[int, ...]], results: Iterable[tuple[int, ...]]) -> Strategy:
    """Every device does all of it: operands and results of these shapes are whole on each."""
    return Strategy(tuple(replicated(len(s)) for s in operands), tuple(replicated(len(s)) for s in results), split=1)


class Signature(msgspec.Struct, frozen=True, gc=False):
    """What the strategies of an operation depend on.

    `sums_partially`: results may be left partial. `linear`: sets of operands in which it is linear, when partial
    operands may reach it, else empty. `admits` of the shapes of operands and results on one device, and of all their
    layouts, says whether the operation takes them.
    """

    rule: Rule
    operand_shapes: Shapes
    result_shapes: Shapes
    sums_partially: bool
    linear: tuple[frozenset[int], ...] = ()
    admits: Callable[[Shapes, Shapes, tuple[Layout, ...], LogicalMesh], bool] | None = None


@functools.cache
def enumerate_strategies(signature: Signature, mesh: LogicalMesh, order: tuple[int, ...] = ()) -> tuple[Strategy, ...]:
    """All strategies on a mesh; the first one replicates everything. `order` as in `layout.enumerate_layouts`."""
    rule = signature.rule
    axes = [a for a in order or range(len(mesh.axis_sizes)) if mesh.axis_sizes[a] > 1]
    # There is nothing to split in a dimension of size 0.
    factors = [i for i, f in enumerate(rule.factors) if f.kind is not FactorKind.FIXED and f.size > 0]
    choices: list[int | frozenset[int] | None] = [None, *factors, *signature.linear]
    found: dict[Strategy, None] = {}
    for places in itertools.product(choices, repeat=len(axes)):
        by_factor: dict[int, tuple[int, ...]] = {}
        by_operands: dict[frozenset[int], tuple[int, ...]] = {}
        for axis, place in zip(axes, places, strict=True):
            if isinstance(place, frozenset):
                by_operands[place] = (*by_operands.get(place, ()), axis)
            elif place is not None:
                by_factor[place] = (*by_factor.get(place, ()), axis)
        strategy = _strategy(signature, mesh, by_factor, by_operands)
        if strategy is not None:
            found[strategy] = None
    return tuple(found)


def _strategy(
    signature: Signature,
    mesh: LogicalMesh,
    by_factor: dict[int, tuple[int, ...]],
    by_operands: dict[frozenset[int], tuple[int, ...]],
) -> Strategy | None:
    """The strategy that gives axes to factors and to partial operands, or None where it does not divide evenly."""
    rule = signature.rule
    summed: tuple[int, ...] = ()
    combined: tuple[int, ...] = ()
    ring: tuple[int, ...] = ()
    by_factor = _with_exchanged(rule, by_factor)
    for f, axes in by_factor.items():
        if rule.factors[f].kind is FactorKind.SUM and signature.sums_partially:
            summed += axes
        elif rule.factors[f].kind in (FactorKind.SUM, FactorKind.EXTREMUM):
            combined += axes
        elif rule.factors[f].kind in (FactorKind.RING, FactorKind.EXCHANGE):
            ring += axes
    passed = tuple(a for axes in by_operands.values() for a in axes)
    operands = []
    for i, (dims, shape) in enumerate(zip(rule.operands, signature.operand_shapes, strict=True)):
        partial: tuple[int, ...] = ()
        if by_operands:
            partial = tuple(sorted(a for members, axes in by_operands.items() if i in members for a in axes))
        layout = _layout(dims, shape, rule, mesh, by_factor, partial)
        if layout is None:
            return None
        operands.append(layout)
    results = []
    for dims, shape in zip(rule.results, signature.result_shapes, strict=True):
        # A result that has a summed factor is split there, and no summand (gradients of a kernel beside one another).
        left: tuple[int, ...] = ()
        if summed or passed:
            own = {a for dim in dims for f in dim for a in by_factor.get(f, ())}
            left = tuple(sorted({*summed, *passed} - own))
        layout = _layout(dims, shape, rule, mesh, by_factor, left)
        if layout is None:
            return None
        results.append(layout)
    if signature.admits is not None and not _is_admitted(signature, operands, results, mesh):
        return None
    split = mesh.size({a for axes in by_factor.values() for a in axes})
    return Strategy(tuple(operands), tuple(results), split, tuple(sorted(combined)), ring)


def _with_exchanged(rule: Rule, by_factor: dict[int, tuple[int, ...]]) -> dict[int, tuple[int, ...]]:
    """The axes of each factor, with those over which its parts are exchanged for those of another factor."""
    found = by_factor
    for f, axes in by_factor.items():
        if (along := rule.factors[f].along) >= 0:
            found = found | {along: tuple(sorted((*found.get(along, ()), *axes)))}
    return found


def _without_exchanged(rule: Rule, by_factor: dict[int, tuple[int, ...]]) -> dict[int, tuple[int, ...]]:
    """The inverse of `_with_exchanged`: each axis at one factor."""
    found = dict(by_factor)
    for f, axes in by_factor.items():
        along = rule.factors[f].along
        if along in found:
            found[along] = tuple(a for a in found[along] if a not in axes)
    return found


def _is_admitted(
    signature: Signature, operands: Sequence[Layout], results: Sequence[Layout], mesh: LogicalMesh
) -> bool:
    """Whether the operation takes the parts of one device."""
    sides = (
        tuple(
            tuple(n // mesh.size(on) for n, on in zip(shape, layout.dims, strict=True))
            for shape, layout in zip(shapes, layouts, strict=True)
        )
        for shapes, layouts in ((signature.operand_shapes, operands), (signature.result_shapes, results))
    )
    assert signature.admits is not None, "asked only where there is something to ask"
    read, made = sides
    return signature.admits(read, made, (*operands, *results), mesh)


def _layout(
    dims: Sequence[tuple[int, ...]],
    shape: tuple[int, ...],
    rule: Rule,
    mesh: LogicalMesh,
    by_factor: dict[int, tuple[int, ...]],
    partial: tuple[int, ...],
) -> Layout | None:
    out = []
    for factors, n in zip(dims, shape, strict=True):
        on: tuple[int, ...] = ()
        for position, f in enumerate(factors):
            axes = by_factor.get(f, ())
            if not axes and position + 1 == len(factors):
                continue  # the one factor of most dimensions, mostly not split
            parts, size = mesh.size(axes), rule.factors[f].split_size
            if size % parts:
                return None
            on += axes
            # A minor factor of a dimension can be split only where the major ones are split to single elements.
            if size != parts and any(by_factor.get(g) for g in factors[position + 1 :]):
                return None
        if on and n % mesh.size(on):
            return None
        out.append(on)
    return _laid(tuple(out), partial)


@functools.lru_cache(1 << 16)
def _laid(dims: tuple[tuple[int, ...], ...], partial: tuple[int, ...]) -> Layout:
    """A layout, the same object each time: thousands of strategies have few."""
    return Layout(dims, partial)


@functools.cache
def following(
    signature: Signature, operand: int, layouts: tuple[Layout, ...], mesh: LogicalMesh
) -> tuple[Strategy, ...] | None:
    """The strategy that each layout of one operand determines, or None where one of them determines none.

    An operation can follow an operand when every factor that it splits is a factor of that operand and no result is
    reduced: then its layouts are copies of the operand's and no choice is lost by merging the two.
    """
    rule = signature.rule
    in_operand = {f for dim in rule.operands[operand] for f in dim}
    for i, factor in enumerate(rule.factors):
        if i not in in_operand and factor.kind is not FactorKind.FIXED:
            return None
        if i in in_operand and factor.kind is not FactorKind.PASS:
            return None
    out = []
    for layout in layouts:
        strategy = follow_one(signature, operand, layout, mesh)
        if strategy is None:
            return None
        out.append(strategy)
    return tuple(out)


def follow_one(signature: Signature, operand: int, layout: Layout, mesh: LogicalMesh) -> Strategy | None:
    """The strategy under which an operation reads one operand in the given layout."""
    rule = signature.rule
    by_factor: dict[int, tuple[int, ...]] = {}
    for factors, axes in zip(rule.operands[operand], layout.dims, strict=True):
        *of_factors, rest = mesh.split([rule.factors[f].size for f in factors], axes)
        taken = {f: on for f, on in zip(factors, of_factors, strict=True) if on}
        if rest or any(rule.factors[f].kind is FactorKind.FIXED for f in taken):
            return None
        by_factor |= taken
    by_operands: dict[frozenset[int], tuple[int, ...]] = {}
    if layout.partial:
        members = [s for s in signature.linear if operand in s]
        if not members:
            return None
        by_operands[members[0]] = layout.partial
    strategy = _strategy(signature, mesh, by_factor, by_operands)
    return strategy if strategy is not None and strategy.operands[operand] == layout else None


def strategy_of(
    signature: Signature, operands: Sequence[Layout], results: Sequence[Layout], mesh: LogicalMesh
) -> Strategy | None:
    """The strategy that has these layouts, if there is one: each mesh axis is given to the factor that it splits."""
    rule = signature.rule
    described = (*zip(rule.operands, operands, strict=False), *zip(rule.results, results, strict=False))
    as_many = len(operands) == len(rule.operands) and len(results) == len(rule.results)
    if not as_many or any(len(dims) != len(layout.dims) for dims, layout in described):
        return None
    by_factor: dict[int, tuple[int, ...]] = {}
    for dims, layout in described:
        for factors, axes in zip(dims, layout.dims, strict=True):
            *of_factors, rest = mesh.split([rule.factors[f].size for f in factors], axes)
            taken = {f: on for f, on in zip(factors, of_factors, strict=True) if on}
            kinds = [rule.factors[f].kind for f in taken]
            if rest or FactorKind.FIXED in kinds or any(by_factor.setdefault(f, taken[f]) != taken[f] for f in taken):
                return None
    by_factor = _without_exchanged(rule, by_factor)
    reading: dict[int, list[int]] = {}
    for i, layout in enumerate(operands):
        for axis in layout.partial:
            reading.setdefault(axis, []).append(i)
    by_operands: dict[frozenset[int], tuple[int, ...]] = {}
    for axis, members in sorted(reading.items()):
        if frozenset(members) not in signature.linear:
            return None
        by_operands[frozenset(members)] = (*by_operands.get(frozenset(members), ()), axis)
    given = [axis for axes in (*by_factor.values(), *by_operands.values()) for axis in axes]
    if len(set(given)) < len(given):
        return None
    made = _strategy(signature, mesh, by_factor, by_operands)
    return made if made is not None and (made.operands, made.results) == (tuple(operands), tuple(results)) else None
