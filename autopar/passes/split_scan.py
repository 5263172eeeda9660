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
nothing would be left for it (4 layers in 3 parts), the first parts take one more than the others. The parts of one
array are of one size, so the state then lies in fewer parts, as many as divide the layers, on as many groups.

Not cut: stacks with the layer behind the first dimension, scans inside of `jax.checkpoint`.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from autopar.common import jax_compat
from autopar.errors import InvalidArgumentError, UnsupportedError
from autopar.frontend.build_graph import role_of
from autopar.ir.graph import FactorKind, Role, Rule
from autopar.ir.rules import RuleBook, equation_key
from autopar.ir.traced_step import TracedStep
from autopar.passes.example_rules import MixesExamples, places_of_results
from autopar.passes.scan_stacks import COMBINE, LOOPS, StackedStep, Stacks, all_stacks, find_stacks, major, rules_of

# The step with a scan over stacked layers in parts, as a jaxpr.


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StackParts:
    """The parts of a stack: `ranges`, the trips that the scans of the passes take one behind the other, and `stored`,
    the layers of the state that lie together. The parts are called `name`, with their ranges.
    """

    stacks: Stacks
    ranges: tuple[tuple[int, int], ...]
    stored: tuple[tuple[int, int], ...]
    name: str = "layers"

    def bounds(self, size: int, trips: tuple[int, int]) -> tuple[int, int]:
        """Where the part of a dimension begins and ends that belongs to these trips."""
        start, stop = trips
        return start * size // self.stacks.trips, stop * size // self.stacks.trips

    def divides(self, size: int, ranges: Sequence[tuple[int, int]]) -> bool:
        """Whether a dimension can be in these parts."""
        return all(stop * size % self.stacks.trips == 0 for _, stop in ranges)

    def shape_of(self, shape: Sequence[int], trips: tuple[int, int], dim: int = 0) -> tuple[int, ...]:
        start, stop = self.bounds(shape[dim], trips)
        return (*shape[:dim], stop - start, *shape[dim + 1 :])

    def scope(self, trips: tuple[int, int]) -> str:
        """How a part is called: by the trips that it takes, as Python writes a range."""
        return f"{self.name}[{trips[0]}:{trips[1]}]"


def ranges(trips: int, parts: int) -> tuple[tuple[int, int], ...]:
    """The first trip of each part, and the one behind its last: of equal ranges, but for the last; where it would have
    none, the first parts have one more than the others.
    """
    size, more = -(-trips // parts), trips % parts
    if size * (parts - 1) < trips:
        return tuple((part * size, min((part + 1) * size, trips)) for part in range(parts))
    stops = list(itertools.accumulate(trips // parts + (part < more) for part in range(parts)))
    return tuple(zip([0, *stops[:-1]], stops, strict=True))


def _equal_ranges(trips: int, most: int) -> tuple[tuple[int, int], ...]:
    """Equal ranges of all trips, as many of up to `most` as divide them."""
    return ranges(trips, max(d for d in divisors(trips) if d <= most))


def in_parts_of(step: StackedStep, cuts: Sequence[StackParts], rules: RuleBook) -> Any:
    """The closed jaxpr of the step whose stacked arguments, and the results that replace them, come in parts."""
    evaluation = _Evaluation(step, cuts, rules_of(step.jaxpr, rules))
    return jax.make_jaxpr(evaluation.run)(*evaluation.avals())


class _Apart(NamedTuple):
    """A value in parts along dimension 0: of a stack, in these ranges of its trips."""

    of: StackParts
    ranges: tuple[tuple[int, int], ...]
    pieces: Sequence[Any]


class _Evaluation:
    """Evaluates the flat jaxpr on tracers. A variable has its whole, its parts, or both once both were asked for."""

    def __init__(self, step: StackedStep, cuts: Sequence[StackParts], rules: Mapping[str, Rule]) -> None:
        self.step, self.cuts, self.rules = step, cuts, rules
        self.cut_of = {leaf: cut for cut in cuts for leaf in cut.stacks.arguments}
        self.cut_of_result = {o: cut for cut in cuts for o in cut.stacks.results}
        self.cut_of_scan = {position: cut for cut in cuts for position in cut.stacks.scans}
        self.whole: dict[Any, Any] = {}
        self.apart: dict[Any, _Apart] = {}
        self.slices: dict[tuple[Any, tuple[int, int], int], Any] = {}
        roles = {role_of(jax_compat.name_stack(eqn)) for eqn in step.jaxpr.eqns}
        self.has_update = Role.FORWARD in roles

    def avals(self) -> list[jax.ShapeDtypeStruct]:
        out = []
        for i, v in enumerate(self.step.jaxpr.invars):
            cut = self.cut_of.get(i)
            shape = cut.shape_of(v.aval.shape, cut.stored[0]) if cut is not None else v.aval.shape
            aval = jax.ShapeDtypeStruct(shape, v.aval.dtype, weak_type=v.aval.weak_type)
            out += [aval] * (len(cut.stored) if cut is not None else 1)
        return out

    def run(self, *args: Any) -> list[Any]:
        jaxpr, rest = self.step.jaxpr, iter(args)
        self.whole.update(zip(jaxpr.constvars, jax_compat.jaxpr_consts(self.step.closed), strict=True))
        for i, v in enumerate(jaxpr.invars):
            if (cut := self.cut_of.get(i)) is not None:
                self.apart[v] = _Apart(cut, cut.stored, [next(rest) for _ in cut.stored])
            else:
                self.whole[v] = next(rest)
        for position, eqn in enumerate(jaxpr.eqns):
            with jax_compat.standing_at(eqn):
                if not self.scan(position, eqn) and not self.in_parts(eqn):
                    outs = jax_compat.bind(eqn, [self.joined(a) for a in eqn.invars])
                    self.whole.update(zip(eqn.outvars, outs, strict=True))
        out: list[Any] = []
        for o, atom in enumerate(jaxpr.outvars):
            if (cut := self.cut_of_result.get(o)) is not None:
                out += [self.part(atom, cut, trips) for trips in cut.stored]
            else:
                out.append(self.joined(atom))
        return out

    def joined(self, atom: Any) -> Any:
        if isinstance(atom, jax_compat.Literal):
            return atom.val
        if atom not in self.whole:
            pieces = self.apart[atom].pieces
            self.whole[atom] = jax.lax.concatenate(pieces, 0) if len(pieces) > 1 else pieces[0]
        return self.whole[atom]

    def part(self, atom: Any, cut: StackParts, trips: tuple[int, int], dim: int = 0) -> Any:
        """The part of a value that belongs to these trips, cut out of the parts in which it is."""
        at = None if isinstance(atom, jax_compat.Literal) or dim else self.apart.get(atom)
        if at is not None and at.of is cut and trips in at.ranges:
            return at.pieces[at.ranges.index(trips)]
        key = (atom, trips, dim)
        if key not in self.slices:
            if at is not None and at.of is cut:
                self.slices[key] = self.across(atom, trips)
            else:
                start, stop = cut.bounds(atom.aval.shape[dim], trips)
                self.slices[key] = jax.lax.slice_in_dim(self.joined(atom), start, stop, axis=dim)
        return self.slices[key]

    def across(self, atom: Any, trips: tuple[int, int]) -> Any:
        """A part that is no part of those in which the value is, of slices of these."""
        at, size = self.apart[atom], atom.aval.shape[0]
        found = []
        for number, (start, stop) in enumerate(at.ranges):
            inside = max(start, trips[0]), min(stop, trips[1])
            if inside[0] < inside[1]:
                (a, b), (first, _) = at.of.bounds(size, inside), at.of.bounds(size, (start, stop))
                found.append(jax.lax.slice_in_dim(at.pieces[number], a - first, b - first))
        return jax.lax.concatenate(found, 0) if len(found) > 1 else found[0]

    def ranges_of(self, eqn: Any, cut: StackParts, operands: Sequence[Any]) -> tuple[tuple[int, int], ...]:
        """The parts in which an equation is evaluated: those in which its operands are; of several the state's in the
        update, else the passes'.
        """
        found = {self.apart[a].ranges for a in operands if a in self.apart}
        if len(found) == 1:
            return found.pop()
        return cut.stored if self.is_update(eqn) else cut.ranges

    def is_update(self, eqn: Any) -> bool:
        return self.has_update and role_of(jax_compat.name_stack(eqn)) is Role.UPDATE

    def scan(self, position: int, eqn: Any) -> bool:
        """Evaluates a scan over layers as one scan behind the other, in the order in which the whole one takes its
        trips, where it is one that can be cut.
        """
        cut, length = self.cut_of_scan.get(position), eqn.params.get("length", 0)
        if cut is None:
            return False
        consts, carried = jax_compat.scan_counts(eqn.params)
        ranges_ = self.ranges_of(eqn, cut, _hashable(eqn)) if self.is_update(eqn) else cut.ranges
        if not cut.divides(length, ranges_):
            return False
        fixed = [self.joined(a) for a in eqn.invars[:consts]]
        carry = [self.joined(a) for a in eqn.invars[consts : consts + carried]]
        stacked: dict[tuple[int, int], list[Any]] = {}
        for trips in reversed(ranges_) if eqn.params["reverse"] else ranges_:
            start, stop = cut.bounds(length, trips)
            unroll = min(eqn.params["unroll"], stop - start)
            shorter = eqn.replace(params={**eqn.params, "length": stop - start, "unroll": unroll})
            with jax.named_scope(cut.scope(trips)):
                xs = [self.part(a, cut, trips) for a in eqn.invars[consts + carried :]]
                outs = jax_compat.bind(shorter, [*fixed, *carry, *xs])
            carry, stacked[trips] = outs[:carried], outs[carried:]
        self.whole.update(zip(eqn.outvars[:carried], carry, strict=True))
        for i, v in enumerate(eqn.outvars[carried:]):
            self.apart[v] = _Apart(cut, ranges_, [stacked[trips][i] for trips in ranges_])
        return True

    def in_parts(self, eqn: Any) -> bool:
        """Evaluates an equation part by part, where its operands are in parts and its rule allows it."""
        rule = self.rules.get(equation_key(eqn)) if eqn.primitive.name not in LOOPS else None
        cut = self.common_cut(eqn) if rule is not None else None
        factor = self.common_factor(eqn, rule) if rule is not None and cut is not None else None
        if rule is None or cut is None or factor is None:
            return False
        ranges_ = self.ranges_of(eqn, cut, _hashable(eqn))
        if not cut.divides(rule.factors[factor].size, ranges_):
            return False
        places = [_place(dims, factor) for dims in rule.operands]
        inside = [any(factor in dim for dim in dims) for dims in rule.operands]
        if any(there and place is None for there, place in zip(inside, places, strict=True)):
            return False
        if any(place not in (None, 0) and a in self.apart for place, a in zip(places, _hashable(eqn), strict=True)):
            return False
        targets = [_place(dims, factor) for dims in rule.results]
        kind, primitive = rule.factors[factor].kind, eqn.primitive.name
        passes = kind is FactorKind.PASS and all(place == 0 for place in targets) and _keeps_apart(eqn, places)
        combines = kind in (FactorKind.SUM, FactorKind.EXTREMUM) and primitive in COMBINE
        if not passes and not (combines and not any(factor in dim for dims in rule.results for dim in dims)):
            return False
        smaller = _of_parts(eqn, cut, ranges_, places, passes)
        if smaller is None:
            return False
        results = []
        for trips, small in zip(ranges_, smaller, strict=True):
            with jax.named_scope(cut.scope(trips)):
                results.append(jax_compat.bind(small, self.operands(eqn, cut, places, trips)))
        if passes:
            for i, v in enumerate(eqn.outvars):
                self.apart[v] = _Apart(cut, ranges_, [outs[i] for outs in results])
        else:
            total = results[0][0]
            for outs in results[1:]:
                total = COMBINE[primitive](total, outs[0])
            self.whole[eqn.outvars[0]] = total
        return True

    def common_cut(self, eqn: Any) -> StackParts | None:
        """The stack whose parts an equation reads, or makes of nothing; None where there is none, or several."""
        cuts = [self.apart[a].of for a in _hashable(eqn) if a in self.apart]
        if not cuts and eqn.primitive.name == "broadcast_in_dim":
            cuts = [cut for cut in self.cuts if eqn.outvars[0] in cut.stacks.stacked]
        return cuts[0] if cuts and all(cut is cuts[0] for cut in cuts) else None

    def common_factor(self, eqn: Any, rule: Rule) -> int | None:
        """The factor that the layers are in an equation; None where it has them in several ways."""
        factors = {major(dims) for a, dims in zip(_hashable(eqn), rule.operands, strict=True) if a in self.apart}
        if factors:
            return factors.pop() if len(factors) == 1 else None
        factor = major(rule.results[0])
        return None if any(factor in dim for dims in rule.operands for dim in dims) else factor

    def operands(self, eqn: Any, cut: StackParts, places: Sequence[int | None], trips: tuple[int, int]) -> list[Any]:
        return [
            self.joined(a) if place is None else self.part(a, cut, trips, place)
            for a, place in zip(eqn.invars, places, strict=True)
        ]


def _of_parts(
    eqn: Any,
    cut: StackParts,
    ranges_: Sequence[tuple[int, int]],
    places: Sequence[int | None],
    passes: bool,
) -> list[Any] | None:
    """An equation as it is written for each part; None where that does not take what the parts are."""

    def shape_of(atom: Any, trips: tuple[int, int], place: int | None) -> tuple[int, ...]:
        shape = tuple(atom.aval.shape)
        return shape if place is None else cut.shape_of(shape, trips, place)

    made: dict[tuple[Any, ...], Any] = {}  # by the shapes of operands and results, which most parts share
    found = []
    for trips in ranges_:
        operands = tuple(shape_of(a, trips, place) for a, place in zip(eqn.invars, places, strict=True))
        shapes = tuple(shape_of(v, trips, 0 if passes else None) for v in eqn.outvars)
        if (operands, shapes) not in made:
            small = _of_shape(eqn, shapes[0])
            if not _fits(small, operands, shapes):
                return None
            made[operands, shapes] = small
        found.append(made[operands, shapes])
    return found


def _fits(small: Any, operands: Sequence[tuple[int, ...]], shapes: Sequence[tuple[int, ...]]) -> bool:
    """Whether an equation takes operands of these shapes and makes results of those."""
    try:
        made = jax_compat.shapes_made(small, operands)
    except (TypeError, ValueError):
        return False  # sizes in its parameters that are not known here
    return made == list(shapes)


def _hashable(eqn: Any) -> list[Any]:
    """The operands of an equation, literals (which cannot be looked up) as None."""
    return [None if isinstance(a, jax_compat.Literal) else a for a in eqn.invars]


def _place(dims: tuple[tuple[int, ...], ...], factor: int) -> int | None:
    """The dimension whose major part is a factor."""
    return next((d for d, dim in enumerate(dims) if dim and dim[0] == factor), None)


def _keeps_apart(eqn: Any, places: Sequence[int | None]) -> bool:
    """Whether each layer's slice of the results depends on that layer's slice of the operands alone."""
    if all(place is None for place in places) or eqn.primitive.name == "reshape":
        return True
    try:
        return not any(places_of_results(eqn, places))
    except MixesExamples:
        return False


def _of_shape(eqn: Any, shape: tuple[int, ...]) -> Any:
    """The equation with the sizes in its parameters, where they are those of its result."""
    params = dict(eqn.params)
    if eqn.primitive.name == "broadcast_in_dim":
        params["shape"] = shape
    elif eqn.primitive.name == "reshape":
        params["new_sizes"] = shape
    elif eqn.primitive.name == "slice" and params["start_indices"][0] == 0 and not params["strides"]:
        params["limit_indices"] = (shape[0], *params["limit_indices"][1:])
    return eqn.replace(params=params)


@dataclasses.dataclass(frozen=True, slots=True)
class LeafSlice:
    """An argument or a result of a split step: slice `part` of `parts` along dimension 0 of a leaf."""

    leaf: int
    part: int = 0
    parts: int = 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SplitStack:
    """A scan over `trips` layers in parts, which are called `scopes`: the last part of the module path of each. `work`:
    the matrix products in it, in multiplications. `state_parts`: the parts of the layers' state, where they are fewer
    than the groups of devices; else 0.
    """

    trips: int
    work: float
    scopes: tuple[str, ...]
    state_parts: int = 0


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

    Raises: InvalidArgumentError where a part would have no trips; UnsupportedError where a step with `sliced` leaves
    has no scan over their layers.
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
            stored = _equal_ranges(stacks.trips, len(set(groups[first : first + count])))
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
    from scipy.optimize import linear_sum_assignment  # takes a third of a second to import

    own = sorted(set(groups[first : first + len(cut.ranges)]))
    read = np.zeros((len(cut.stored), len(own)))
    nearest: dict[tuple[int, int], tuple[int, int]] = {}  # (layers that are read, - part), by state and group
    for (i, (start, stop)), (q, (a, b)) in itertools.product(enumerate(cut.stored), enumerate(cut.ranges, first)):
        group, layers = own.index(groups[q]), max(0, min(b, stop) - max(a, start))
        read[i, group] += layers
        nearest[i, group] = max(nearest.get((i, group), (0, -q)), (layers, -q))
    chosen = linear_sum_assignment(read, maximize=True)[1]
    return [-nearest[i, int(group)][1] for i, group in enumerate(chosen)]


def _split_stack(cut: StackParts, groups: Sequence[int], first: int) -> SplitStack:
    own = set(groups[first : first + len(cut.ranges)])
    return SplitStack(
        trips=cut.stacks.trips,
        work=cut.stacks.work,
        scopes=tuple(map(cut.scope, cut.ranges)),
        state_parts=len(cut.stored) if len(cut.stored) < len(own) else 0,
    )


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
        stacks=tuple(_split_stack(cut, groups, first) for cut, first in zip(cuts, firsts, strict=False)),
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
        where=f"{traced.name}, plan",
        expected=f"a scan over the layers of {traced.in_paths[leaf]}, which lies in slices on {parts} stages",
        got="none that does most of the step's work",
        hint=f"leave plan out: {traced.name} then plans for itself, and its calls move the state",
    )
