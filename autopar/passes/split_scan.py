"""Splits scans over stacked layers into scans over ranges of their trips, so that pipeline stages can divide them.

A step that scans over layers holds each kind of parameter in one array, the layer in front: (L, ...). So are their
gradients, the optimiser's state of them, and what the forward scan saves for the backward one. Here every such array
becomes `parts` arrays of L / parts layers each: scans run one behind the other, the operations between them (the
update, mostly) run on each part, and sums over layers become sums of the parts' sums. Where dimension 0 of a value goes
is read from the sharding rules. What cannot be done in parts is done on the parts joined.

A step with several scans over layers of their own (an encoder and a decoder) has the parts shared out among them, by
their arithmetic; those with too little for a part stay whole.

The step that comes back takes and gives the state in parts, each an argument and a result of its own, on one group of
devices each. Where a group has several stages, it has one part of the state all the same, of neighbouring layers, so
that a leaf is one array; what the scans of other groups read of it is sent to them once a step, and the gradients are
sent back.

Where the parts do not divide the layers, all but the last take one number of layers and the last the rest; or, where
nothing would be left for it (4 layers in 3 parts), the first parts take one more than the others. A stack is then
stored padded (`uneven_forms`), so that its parts are of one shape: those that are smaller are cut where they enter the
step, and padded where they leave it.

Not cut: stacks with the layer behind the first dimension, scans inside of `jax.checkpoint`.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from scipy.optimize import linear_sum_assignment

from autopar.common import jax_compat
from autopar.errors import InvalidArgumentError, UnsupportedError
from autopar.ir.padded import PaddedForm
from autopar.ir.traced_step import TracedStep
from autopar.passes.scan_in_parts import StackParts, in_parts_of, ranges
from autopar.passes.scan_stacks import StackedStep, Stacks, all_stacks, find_stacks
from autopar.sharding.rules import RuleBook


@dataclasses.dataclass(frozen=True, slots=True)
class LeafSlice:
    """An argument or a result of a split step: slice `part` of `parts` along dimension 0 of a leaf."""

    leaf: int
    part: int = 0
    parts: int = 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SplitStack:
    """A scan over `trips` layers in parts, which are called `scopes`: the last part of the module path of each. `work`:
    the matrix products in it, in multiplications.
    """

    trips: int
    work: float
    scopes: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SplitStep:
    """A step with its scans over layers in parts; without any, the step as it was.

    `traced` is the step on pieces: all that is numbered by leaves is numbered by pieces, but for its trees, which are
    those of the step as it was. `arguments` and `results` say what each piece is, and `part_of_argument` with which
    part of the scans each argument lies; None for others than state of the layers. In fewer parts than `least_parts`
    the scans stay whole.
    """

    traced: TracedStep
    arguments: tuple[LeafSlice, ...]
    results: tuple[LeafSlice, ...]
    part_of_argument: tuple[int | None, ...]
    stacks: tuple[SplitStack, ...] = ()
    least_parts: int = 2

    @property
    def scopes(self) -> tuple[str, ...]:
        """The names of all parts, in the order of the forward pass."""
        return tuple(scope for stack in self.stacks for scope in stack.scopes)

    @property
    def parts(self) -> int:
        return max(1, len(self.scopes))

    @property
    def trips(self) -> int:
        """The layers of all stacks."""
        return sum(stack.trips for stack in self.stacks)

    @property
    def is_even(self) -> bool:
        """Whether all parts of a stack have as many layers."""
        return all(stack.trips % len(stack.scopes) == 0 for stack in self.stacks)

    def divides(self, parts: int) -> bool:
        """Whether so many parts, or one for all layers, would have as many layers each."""
        if parts < self.least_parts:
            return parts == 1
        counts = _parts_of_stacks(self.stacks, parts) if parts <= self.trips else ()
        return bool(counts) and all(not n or s.trips % n == 0 for s, n in zip(self.stacks, counts, strict=True))


def uneven_forms(traced: TracedStep, parts: int, rules: RuleBook, groups: Sequence[int] = ()) -> dict[int, PaddedForm]:
    """The forms in which stacks of state are stored, by leaf, where so many parts do not divide their layers."""
    found = find_stacks(traced, rules)
    if found is None or parts > sum(stacks.trips for stacks in found.stacks):
        return {}
    return _forms(found, _cuts(found, parts, groups))


def _forms(step: StackedStep, cuts: Sequence[StackParts]) -> dict[int, PaddedForm]:
    forms = {}
    for cut in cuts:
        trips = [stop - start for start, stop in cut.stored]
        if len(set(trips)) == 1:
            continue
        pads_last_alone = all(n == trips[0] for n in trips[:-1])
        for leaf in cut.stacks.arguments:
            shape = tuple(step.jaxpr.invars[leaf].aval.shape)
            of_trip = shape[0] // cut.stacks.trips
            rows = () if pads_last_alone else tuple(of_trip * n for n in trips)
            forms[leaf] = PaddedForm(shape, (of_trip * len(trips) * trips[0], *shape[1:]), rows)
    return forms


def split_scans(
    traced: TracedStep,
    parts: int,
    rules: RuleBook,
    sliced: frozenset[int] = frozenset(),
    groups: Sequence[int] = (),
) -> SplitStep:
    """The step with the scans that hold most of its work, and all that is stacked as they are, in `parts` parts.

    `sliced`: leaves that lie in slices, of a step that need not return them. `groups`: the group of devices of each
    part, by default one of its own. Without such scans the step comes back as it was.

    Raises: InvalidArgumentError where a part would have no trips, or where the parts are unequal and the stacks are not
    stored for them; UnsupportedError where a step with `sliced` leaves has no scan over their layers.
    """
    found = find_stacks(traced, rules, sliced) if parts > 1 else None
    if found is None and sliced:
        raise _no_scan(traced, min(sliced), parts)
    cuts = _cuts(found, parts, groups) if found is not None else ()
    if found is None or not cuts:
        arguments, results = (tuple(map(LeafSlice, range(len(of)))) for of in (traced.in_avals, traced.out_avals))
        nowhere = (None,) * len(arguments)
        return SplitStep(traced=traced, arguments=arguments, results=results, part_of_argument=nowhere)
    _check_parts(traced, found, parts)
    if {leaf.leaf: leaf.form for leaf in traced.padded} != _forms(found, cuts):
        raise InvalidArgumentError(
            where=f"{traced.name}: {found.stacks[0].name}",
            expected=f"the number of stages for which the state of its {found.stacks[0].trips} layers is padded",
            got=f"{parts} stages",
            hint="use the number of stages of the plan that made the state",
        )
    return _cut(traced, found, cuts, rules, sliced, groups or tuple(range(parts)))


def finest_parts(traced: TracedStep, rules: RuleBook, most: int) -> int:
    """The largest number of parts, up to about `most`, that divide the layers of the scans that `split_scans` would
    split; 1 where there is none.
    """
    found = find_stacks(traced, rules)
    stacks = found.stacks if found is not None else ()
    return sum(max(d for d in divisors(s.trips) if d <= most // len(stacks)) for s in stacks) or 1


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _check_parts(traced: TracedStep, found: StackedStep, parts: int) -> None:
    trips = sum(stacks.trips for stacks in found.stacks)
    if parts > trips:
        raise InvalidArgumentError(
            where=f"{traced.name}: {found.stacks[0].name}",
            expected=f"at most as many stages as its {trips} layers",
            got=str(parts),
            hint=f"use a number of stages from 1 to {trips}",
        )


def _cuts(found: StackedStep, parts: int, groups: Sequence[int] = ()) -> tuple[StackParts, ...]:
    """The parts of each stack that is cut, in the order of the forward pass; none where other loops have more of the
    work than the stacks, and all of them are enough for so many stages.
    """
    if parts < _least_parts(found):
        return ()
    groups = groups or tuple(range(parts))
    cuts, first = [], 0
    for number, (stacks, count) in enumerate(zip(found.stacks, _parts_of_stacks(found.stacks, parts), strict=True)):
        if count:
            stored = ranges(stacks.trips, len(set(groups[first : first + count])))
            name = "layers" if not number else f"layers.{number + 1}"
            cuts.append(StackParts(stacks=stacks, ranges=ranges(stacks.trips, count), stored=stored, name=name))
        first += count
    return tuple(cuts)


def _least_parts(found: StackedStep) -> int:
    num_loops, work_of_loops = found.loops
    return num_loops + len(found.stacks) + 1 if work_of_loops > sum(s.work for s in found.stacks) else 2


def _parts_of_stacks(stacks: Sequence[Stacks | SplitStack], parts: int) -> tuple[int, ...]:
    """How many of the parts each stack gets: equal ranges before others, then the least work of the longest part. A
    stack of none is whole, with the part in front of it.
    """
    if len(stacks) == 1:
        return (parts,)

    def rank(counts: tuple[int, ...]) -> tuple[bool, float, int]:
        loads: list[float] = []
        waiting = 0.0  # in front of the first part
        for s, n in zip(stacks, counts, strict=True):
            if n:
                loads += [s.work * (stop - start) / s.trips for start, stop in ranges(s.trips, n)]
                loads[-n] += waiting
                waiting = 0.0
            elif loads:
                loads[-1] += s.work
            else:
                waiting += s.work
        uneven = any(n and s.trips % n for s, n in zip(stacks, counts, strict=True))
        return uneven, max(loads), -min(counts)

    bounds = itertools.combinations_with_replacement(range(parts + 1), len(stacks) - 1)
    shared_out = (tuple(b - a for a, b in itertools.pairwise((0, *inner, parts))) for inner in bounds)
    possible = [c for c in shared_out if all(n <= s.trips for s, n in zip(stacks, c, strict=True))]
    return min(possible, key=rank, default=(parts,) * len(stacks))


def _parts_with_state(cut: StackParts, groups: Sequence[int], first: int) -> list[int]:
    """The part of the scans with which each part of the state lies, on a group of devices of its own: one that reads
    most of it. `first`: the number of the stack's first part.
    """
    own = sorted(set(groups[first : first + len(cut.ranges)]))
    read = np.zeros((len(cut.stored), len(own)))
    nearest: dict[tuple[int, int], tuple[int, int]] = {}  # (layers that are read, - part), by state and group
    for (i, (start, stop)), (q, (a, b)) in itertools.product(enumerate(cut.stored), enumerate(cut.ranges, first)):
        group, layers = own.index(groups[q]), max(0, min(b, stop) - max(a, start))
        read[i, group] += layers
        nearest[i, group] = max(nearest.get((i, group), (0, -q)), (layers, -q))
    chosen = linear_sum_assignment(read, maximize=True)[1]
    return [-nearest[i, int(group)][1] for i, group in enumerate(chosen)]


def _cut(
    traced: TracedStep,
    found: StackedStep,
    cuts: Sequence[StackParts],
    rules: RuleBook,
    sliced: frozenset[int],
    groups: Sequence[int],
) -> SplitStep:
    closed = in_parts_of(found, cuts, rules)
    jaxpr = jax_compat.open_jaxpr(closed)
    arguments = _pieces(len(traced.in_avals), {leaf: cut for cut in cuts for leaf in cut.stacks.arguments})
    results = _pieces(len(traced.out_avals), {leaf: cut for cut in cuts for leaf in cut.stacks.results})
    number = {piece: i for i, (piece, _) in enumerate(results)}

    def which(leaves: Iterable[int]) -> frozenset[int]:
        chosen = set(leaves)
        return frozenset(i for i, (piece, _) in enumerate(arguments) if piece.leaf in chosen)

    split_step = dataclasses.replace(
        traced,
        jaxpr=jaxpr,
        constants=tuple(jax_compat.jaxpr_consts(closed)),
        in_avals=tuple(
            jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, weak_type=v.aval.weak_type) for v in jaxpr.invars
        ),
        out_avals=tuple(jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in jaxpr.outvars),
        padded=(),
        pads_summands=False,
        in_paths=tuple(_path(traced.in_paths, *piece) for piece in arguments),
        out_paths=tuple(_path(traced.out_paths, *piece) for piece in results),
        argument_of=tuple(traced.argument_of[piece.leaf] for piece, _ in arguments),
        donated=which(traced.donated),
        batch=which(traced.batch),
        example_dims={
            i: traced.example_dims[piece.leaf]
            for i, (piece, _) in enumerate(arguments)
            if piece.leaf in traced.example_dims
        },
        tied={
            i: number[dataclasses.replace(piece, leaf=traced.tied[piece.leaf])]
            for i, (piece, _) in enumerate(arguments)
            if piece.leaf in traced.tied
        },
        retrace=_retracing(traced, cuts, [piece for piece, _ in arguments], rules, sliced),
    )
    firsts = [0, *itertools.accumulate(len(cut.ranges) for cut in cuts)]
    state_at = {cut.name: _parts_with_state(cut, groups, first) for cut, first in zip(cuts, firsts, strict=False)}
    return SplitStep(
        traced=split_step,
        arguments=tuple(piece for piece, _ in arguments),
        results=tuple(piece for piece, _ in results),
        part_of_argument=tuple(state_at[cut.name][piece.part] if cut is not None else None for piece, cut in arguments),
        stacks=tuple(
            SplitStack(trips=cut.stacks.trips, work=cut.stacks.work, scopes=tuple(map(cut.scope, cut.ranges)))
            for cut in cuts
        ),
        least_parts=_least_parts(found),
    )


def _retracing(
    traced: TracedStep,
    cuts: Sequence[StackParts],
    arguments: Sequence[LeafSlice],
    rules: RuleBook,
    sliced: frozenset[int],
) -> Callable[[Sequence[jax.ShapeDtypeStruct]], Any]:
    """Traces the whole step on shapes that fit the pieces', and cuts it the same way."""

    def retrace(avals: Sequence[jax.ShapeDtypeStruct]) -> Any:
        whole_avals = {
            piece.leaf: jax.ShapeDtypeStruct(
                (piece.parts * a.shape[0], *a.shape[1:]) if piece.parts > 1 else a.shape, a.dtype, weak_type=a.weak_type
            )
            for piece, a in zip(arguments, avals, strict=True)
        }
        again = traced.retrace([whole_avals[i] for i in range(len(traced.in_avals))])
        inner = jax_compat.open_jaxpr(again)
        retraced = dataclasses.replace(
            traced,
            jaxpr=inner,
            constants=tuple(jax_compat.jaxpr_consts(again)),
            in_avals=tuple(v.aval for v in inner.invars),
            out_avals=tuple(v.aval for v in inner.outvars),
        )
        found = all_stacks(retraced, rules, sliced)
        assert found is not None, "a step on other shapes scans over the same layers"
        same = {stacks.arguments: stacks for stacks in found.stacks}
        return in_parts_of(found, [dataclasses.replace(cut, stacks=same[cut.stacks.arguments]) for cut in cuts], rules)

    return retrace


def _pieces(num_leaves: int, cuts: Mapping[int, StackParts]) -> tuple[tuple[LeafSlice, StackParts | None], ...]:
    """The pieces of all leaves, each with the stack that it is of."""
    out: list[tuple[LeafSlice, StackParts | None]] = []
    for leaf in range(num_leaves):
        cut = cuts.get(leaf)
        n = len(cut.stored) if cut is not None else 1
        out += [(LeafSlice(leaf, part, n), cut) for part in range(n)]
    return tuple(out)


def _path(paths: Sequence[str], piece: LeafSlice, cut: StackParts | None) -> str:
    if piece.parts == 1 or cut is None:
        return paths[piece.leaf]
    return f"{paths[piece.leaf]}.{cut.scope(cut.stored[piece.part])}"


def _no_scan(traced: TracedStep, leaf: int, parts: int) -> UnsupportedError:
    return UnsupportedError(
        where=f"{traced.name}, follow",
        expected=f"a scan over the layers of {traced.in_paths[leaf]}, which lies in slices on {parts} stages",
        got="none that does most of the step's work",
        hint=f"leave follow out: {traced.name} then plans for itself, and its calls move the state",
    )
