"""The step with a scan over stacked layers in parts, as a jaxpr (`autopar.passes.split_scan`)."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax

from autopar.common import jax_compat
from autopar.frontend.build_graph import role_of
from autopar.frontend.pad_state import store, unstore
from autopar.ir.graph import FactorKind, Role, Rule
from autopar.ir.padded import PaddedForm
from autopar.microbatch.example_places import MixesExamples
from autopar.microbatch.example_rules import places_of_results
from autopar.passes.scan_stacks import COMBINE, LOOPS, StackedStep, Stacks, major, rules_of
from autopar.sharding.rules import RuleBook, equation_key


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
        self.stored: set[Any] = set()  # arguments, which may be stored padded
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
                self.stored.add(v)
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
                stored_shape = cut.shape_of(atom.aval.shape, cut.stored[0])
                for trips in cut.stored:
                    form = PaddedForm(cut.shape_of(atom.aval.shape, trips), stored_shape)
                    out.append(store(self.part(atom, cut, trips), form))
            else:
                out.append(self.joined(atom))
        return out

    def joined(self, atom: Any) -> Any:
        if isinstance(atom, jax_compat.Literal):
            return atom.val
        if atom not in self.whole:
            pieces = [self.piece(atom, n) for n in range(len(self.apart[atom].ranges))]
            self.whole[atom] = jax.lax.concatenate(pieces, 0) if len(pieces) > 1 else pieces[0]
        return self.whole[atom]

    def piece(self, atom: Any, number: int) -> Any:
        at = self.apart[atom]
        if atom not in self.stored:
            return at.pieces[number]
        # What is stored padded is cut for each reader: it belongs to the pass that reads it.
        shape = at.of.shape_of(atom.aval.shape, at.ranges[number])
        return unstore(at.pieces[number], PaddedForm(shape, at.pieces[number].shape))

    def part(self, atom: Any, cut: StackParts, trips: tuple[int, int], dim: int = 0) -> Any:
        """The part of a value that belongs to these trips, cut out of the parts in which it is."""
        at = None if isinstance(atom, jax_compat.Literal) or dim else self.apart.get(atom)
        if at is not None and at.of is cut and trips in at.ranges:
            return self.piece(atom, at.ranges.index(trips))
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
                found.append(jax.lax.slice_in_dim(self.piece(atom, number), a - first, b - first))
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
