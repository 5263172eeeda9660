"""The step with a scan over stacked layers in parts, as a jaxpr (`autopar.passes.split_scan`)."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from autopar.common import jax_compat
from autopar.frontend.pad_state import store, unstore
from autopar.ir.graph import FactorKind, Rule
from autopar.ir.padded import PaddedForm
from autopar.microbatch.example_places import MixesExamples
from autopar.microbatch.example_rules import places_of_results
from autopar.passes.scan_stacks import LOOPS, Stacks, major, rules_of
from autopar.sharding.rules import RuleBook, equation_key

_COMBINE = {
    "reduce_sum": jax.lax.add,
    "dot_general": jax.lax.add,
    "reduce_max": jax.lax.max,
    "reduce_min": jax.lax.min,
    "reduce_and": jax.lax.bitwise_and,
    "reduce_or": jax.lax.bitwise_or,
}


def scope_of(part: int, parts: int, trips: int) -> str:
    """How a part is called: by the trips that it takes, as Python writes a range."""
    start, stop = ranges(trips, parts)[part]
    return f"layers[{start}:{stop}]"


def ranges(trips: int, parts: int) -> tuple[tuple[int, int], ...]:
    """The first trip of each part, and the one behind its last: of equal ranges, but for the last; where it would have
    none, the first parts have one more than the others.
    """
    size, more = -(-trips // parts), trips % parts
    if size * (parts - 1) < trips:
        return tuple((part * size, min((part + 1) * size, trips)) for part in range(parts))
    stops = list(itertools.accumulate(trips // parts + (part < more) for part in range(parts)))
    return tuple(zip([0, *stops[:-1]], stops, strict=True))


def in_parts_of(stacks: Stacks, parts: int, rules: RuleBook) -> Any:
    """The closed jaxpr of the step whose stacked arguments, and the results that replace them, come in parts."""
    evaluation = _Evaluation(stacks, parts, rules_of(stacks.jaxpr, stacks.trips, rules))
    return jax.make_jaxpr(evaluation.run)(*evaluation.avals())


class _Evaluation:
    """Evaluates the flat jaxpr on tracers. A variable has its whole, its parts, or both once both were asked for."""

    def __init__(self, stacks: Stacks, parts: int, rules: Mapping[str, Rule]) -> None:
        self.stacks, self.parts, self.rules = stacks, parts, rules
        self.ranges = ranges(stacks.trips, parts)
        self.is_even = stacks.trips % parts == 0
        self.whole: dict[Any, Any] = {}
        self.apart: dict[Any, list[Any]] = {}
        self.slices: dict[tuple[Any, int, int], Any] = {}

    def avals(self) -> list[jax.ShapeDtypeStruct]:
        out = []
        for i, v in enumerate(self.stacks.jaxpr.invars):
            is_split = i in self.stacks.arguments
            shape = self.part_of(v.aval.shape, 0) if is_split else v.aval.shape
            aval = jax.ShapeDtypeStruct(shape, v.aval.dtype, weak_type=v.aval.weak_type)
            out += [aval] * (self.parts if is_split else 1)
        return out

    def divides(self, size: int) -> bool:
        """Whether a dimension can be in parts."""
        return size % (self.parts if self.is_even else self.stacks.trips) == 0

    def bounds(self, size: int, part: int) -> tuple[int, int]:
        """Where a part of a dimension begins and ends."""
        if self.is_even:
            return part * size // self.parts, (part + 1) * size // self.parts
        start, stop = self.ranges[part]
        return start * size // self.stacks.trips, stop * size // self.stacks.trips

    def part_of(self, shape: Sequence[int], part: int, dim: int = 0) -> tuple[int, ...]:
        start, stop = self.bounds(shape[dim], part)
        return (*shape[:dim], stop - start, *shape[dim + 1 :])

    def run(self, *args: Any) -> list[Any]:
        jaxpr, rest = self.stacks.jaxpr, iter(args)
        self.whole.update(zip(jaxpr.constvars, jax_compat.jaxpr_consts(self.stacks.closed), strict=True))
        for i, v in enumerate(jaxpr.invars):
            if i in self.stacks.arguments:
                self.apart[v] = [next(rest) for _ in range(self.parts)]
            else:
                self.whole[v] = next(rest)
        for position, eqn in enumerate(jaxpr.eqns):
            with jax_compat.standing_at(eqn):
                if position in self.stacks.scans:
                    self.scan(eqn)
                elif not self.in_parts(eqn):
                    outs = jax_compat.bind(eqn, [self.joined(a) for a in eqn.invars])
                    self.whole.update(zip(eqn.outvars, outs, strict=True))
        out: list[Any] = []
        for o, atom in enumerate(jaxpr.outvars):
            if o in self.stacks.results:
                out += [store(self.part(atom, p), self.form(atom.aval.shape, p)) for p in range(self.parts)]
            else:
                out.append(self.joined(atom))
        return out

    def form(self, shape: Sequence[int], part: int, stored: Sequence[int] | None = None) -> PaddedForm:
        """A part of a stack, and how it is stored: by default with as many layers as the first."""
        return PaddedForm(self.part_of(shape, part), tuple(stored or self.part_of(shape, 0)))

    def named(self, part: int) -> Any:
        return jax.named_scope(scope_of(part, self.parts, self.stacks.trips))

    def joined(self, atom: Any) -> Any:
        if isinstance(atom, jax_compat.Literal):
            return atom.val
        if atom not in self.whole:
            self.whole[atom] = jax.lax.concatenate([self.part(atom, part) for part in range(self.parts)], 0)
        return self.whole[atom]

    def part(self, atom: Any, part: int, dim: int = 0) -> Any:
        if not isinstance(atom, jax_compat.Literal) and dim == 0 and atom in self.apart:
            # What is stored padded is cut for each reader: it belongs to the pass that reads it.
            return unstore(self.apart[atom][part], self.form(atom.aval.shape, part, self.apart[atom][part].shape))
        key = (atom, part, dim)
        if key not in self.slices:
            start, stop = self.bounds(atom.aval.shape[dim], part)
            self.slices[key] = jax.lax.slice_in_dim(self.joined(atom), start, stop, axis=dim)
        return self.slices[key]

    def scan(self, eqn: Any) -> None:
        """One scan behind the other, in the order in which the whole one takes its trips."""
        consts, carried = jax_compat.scan_counts(eqn.params)
        fixed = [self.joined(a) for a in eqn.invars[:consts]]
        carry = [self.joined(a) for a in eqn.invars[consts : consts + carried]]
        stacked: dict[int, list[Any]] = {}
        order = range(self.parts)
        for part in reversed(order) if eqn.params["reverse"] else order:
            start, stop = self.ranges[part]
            unroll = min(eqn.params["unroll"], stop - start)
            shorter = eqn.replace(params={**eqn.params, "length": stop - start, "unroll": unroll})
            with self.named(part):
                xs = [self.part(a, part) for a in eqn.invars[consts + carried :]]
                outs = jax_compat.bind(shorter, [*fixed, *carry, *xs])
            carry, stacked[part] = outs[:carried], outs[carried:]
        self.whole.update(zip(eqn.outvars[:carried], carry, strict=True))
        for i, v in enumerate(eqn.outvars[carried:]):
            self.apart[v] = [stacked[part][i] for part in order]

    def in_parts(self, eqn: Any) -> bool:
        """Evaluates an equation part by part, where its operands are in parts and its rule allows it."""
        rule = self.rules.get(equation_key(eqn)) if eqn.primitive.name not in LOOPS else None
        factor = self.common_factor(eqn, rule) if rule is not None else None
        if rule is None or factor is None or not self.divides(rule.factors[factor].size):
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
        combines = kind in (FactorKind.SUM, FactorKind.EXTREMUM) and primitive in _COMBINE
        if not passes and not (combines and not any(factor in dim for dims in rule.results for dim in dims)):
            return False
        smaller = self.of_parts(eqn, places, passes)
        if smaller is None:
            return False
        results = []
        for part, small in enumerate(smaller):
            with self.named(part):
                results.append(jax_compat.bind(small, self.operands(eqn, places, part)))
        if passes:
            for i, v in enumerate(eqn.outvars):
                self.apart[v] = [outs[i] for outs in results]
        else:
            total = results[0][0]
            for outs in results[1:]:
                total = _COMBINE[primitive](total, outs[0])
            self.whole[eqn.outvars[0]] = total
        return True

    def common_factor(self, eqn: Any, rule: Rule) -> int | None:
        """The factor that the layers are in an equation; None where it has nothing in parts, or in several ways."""
        factors = {major(dims) for a, dims in zip(_hashable(eqn), rule.operands, strict=True) if a in self.apart}
        if factors:
            return factors.pop() if len(factors) == 1 else None
        made_of_nothing = eqn.primitive.name == "broadcast_in_dim" and self.stacks.holds(eqn.outvars[0])
        factor = major(rule.results[0]) if made_of_nothing else None
        return None if any(factor in dim for dims in rule.operands for dim in dims) else factor

    def operands(self, eqn: Any, places: Sequence[int | None], part: int) -> list[Any]:
        return [
            self.joined(a) if place is None else self.part(a, part, place)
            for a, place in zip(eqn.invars, places, strict=True)
        ]

    def shape_of(self, atom: Any, part: int, place: int | None) -> tuple[int, ...]:
        shape = tuple(atom.aval.shape)
        return shape if place is None else self.part_of(shape, part, place)

    def of_parts(self, eqn: Any, places: Sequence[int | None], passes: bool) -> list[Any] | None:
        """An equation as it is written for each part; None where that does not take what the parts are."""
        made: dict[tuple[Any, ...], Any] = {}  # by the shapes of operands and results, which most parts share
        found = []
        for part in range(self.parts):
            operands = tuple(self.shape_of(a, part, place) for a, place in zip(eqn.invars, places, strict=True))
            shapes = tuple(self.part_of(v.aval.shape, part) if passes else v.aval.shape for v in eqn.outvars)
            if (operands, shapes) not in made:
                small = _of_shape(eqn, shapes[0])
                if not _fits(small, operands, shapes):
                    return None
                made[operands, shapes] = small
            found.append(made[operands, shapes])
        return found


def _fits(small: Any, operands: Sequence[tuple[int, ...]], shapes: Sequence[tuple[int, ...]]) -> bool:
    """Whether an equation takes operands of these shapes and makes results of those."""
    variables = [jax.ShapeDtypeStruct(shape, a.aval.dtype) for shape, a in zip(operands, small.invars, strict=True)]
    try:
        outs = jax.eval_shape(lambda *args: jax_compat.bind(small, args), *variables)
    except (TypeError, ValueError):
        return False  # sizes in its parameters that are not known here
    return [tuple(o.shape) for o in outs] == list(shapes)


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
