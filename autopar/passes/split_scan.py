"""Splits a scan over stacked layers into scans over equal ranges of its trips, so that pipeline stages can divide it.

A step that scans over layers holds each kind of parameter in one array, the layer in front: (L, ...). So are their
gradients, the optimiser's state of them, and what the forward scan saves for the backward one. Here every such array
becomes `parts` arrays of L / parts layers each: scans run one behind the other, the operations between them (the
update, mostly) run on each part, and sums over layers become sums of the parts' sums. Where dimension 0 of a value goes
is read from the sharding rules. What cannot be done in parts is done on the parts joined.

The step that comes back takes and gives the state in parts, each an argument and a result of its own.

Not cut: stacks with the layer behind the first dimension, scans inside of `jax.checkpoint`, steps in which several
scans share the work (an encoder and a decoder).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax

from autopar.common import jax_compat
from autopar.errors import InvalidArgumentError, UnsupportedError
from autopar.ir.graph import FactorKind, Rule
from autopar.ir.traced_step import TracedStep
from autopar.microbatch.example_places import MixesExamples
from autopar.microbatch.example_rules import places_of_results
from autopar.passes.scan_stacks import LOOPS, Stacks, find_stacks, major, rules_of
from autopar.sharding.rules import RuleBook, equation_key

_COMBINE = {
    "reduce_sum": jax.lax.add,
    "dot_general": jax.lax.add,
    "reduce_max": jax.lax.max,
    "reduce_min": jax.lax.min,
    "reduce_and": jax.lax.bitwise_and,
    "reduce_or": jax.lax.bitwise_or,
}


@dataclasses.dataclass(frozen=True, slots=True)
class LeafSlice:
    """An argument or a result of a split step: slice `part` of `parts` along dimension 0 of a leaf."""

    leaf: int
    part: int = 0
    parts: int = 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SplitStep:
    """A step with its scan over `trips` layers in `parts` parts; with one part, the step as it was.

    `traced` is the step on pieces: all that is numbered by leaves is numbered by pieces, but for its trees, which are
    those of the step as it was. `arguments` and `results` say what each piece is.
    """

    traced: TracedStep
    arguments: tuple[LeafSlice, ...]
    results: tuple[LeafSlice, ...]
    parts: int = 1
    trips: int = 0

    @property
    def scopes(self) -> tuple[str, ...]:
        """The last part of the module path of each part's scan."""
        return tuple(scope_of(part, self.parts, self.trips) for part in range(self.parts))


def scope_of(part: int, parts: int, trips: int) -> str:
    """How a part is called: by the trips that it takes, as Python writes a range."""
    size = trips // parts
    return f"layers[{part * size}:{(part + 1) * size}]"


def split_scans(traced: TracedStep, parts: int, rules: RuleBook) -> SplitStep:
    """The step with the scan that holds most of its work, and all that is stacked as it is, in `parts` parts.

    Without such a scan the step comes back as it was. Raises: InvalidArgumentError when `parts` does not divide the
    trips.
    """
    whole = SplitStep(
        traced=traced,
        arguments=tuple(map(LeafSlice, range(len(traced.in_avals)))),
        results=tuple(map(LeafSlice, range(len(traced.out_avals)))),
    )
    if parts == 1 or (stacks := find_stacks(traced, rules)) is None:
        return whole
    if stacks.trips % parts:
        raise InvalidArgumentError(
            where=f"{traced.name}: {stacks.name}",
            expected=f"a number of stages that divides its {stacks.trips} layers",
            got=str(parts),
            hint=f"use a number of stages from {', '.join(map(str, divisors(stacks.trips)))}",
        )
    return _cut(traced, stacks, parts, rules)


def trips_of(traced: TracedStep, rules: RuleBook) -> int:
    """The trips of the scan that `split_scans` would split; 0 where there is none."""
    stacks = find_stacks(traced, rules)
    return stacks.trips if stacks is not None else 0


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _cut(traced: TracedStep, stacks: Stacks, parts: int, rules: RuleBook) -> SplitStep:
    closed = _in_parts(stacks, parts, rules)
    jaxpr = jax_compat.open_jaxpr(closed)
    arguments = _pieces(len(traced.in_avals), stacks.arguments, parts)
    results = _pieces(len(traced.out_avals), stacks.results, parts)
    number = {piece: i for i, piece in enumerate(results)}

    def retrace(avals: Sequence[jax.ShapeDtypeStruct]) -> Any:
        """Traces the whole step on shapes that fit the pieces', and cuts it the same way."""
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
        same = find_stacks(retraced, rules)
        assert same is not None, "a step on other shapes scans over the same layers"
        return _in_parts(same, parts, rules)

    def which(leaves: Iterable[int]) -> frozenset[int]:
        chosen = set(leaves)
        return frozenset(i for i, piece in enumerate(arguments) if piece.leaf in chosen)

    split_step = dataclasses.replace(
        traced,
        jaxpr=jaxpr,
        constants=tuple(jax_compat.jaxpr_consts(closed)),
        in_avals=tuple(
            jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, weak_type=v.aval.weak_type) for v in jaxpr.invars
        ),
        out_avals=tuple(jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in jaxpr.outvars),
        in_paths=tuple(_path(traced.in_paths, piece, stacks.trips) for piece in arguments),
        out_paths=tuple(_path(traced.out_paths, piece, stacks.trips) for piece in results),
        argument_of=tuple(traced.argument_of[piece.leaf] for piece in arguments),
        donated=which(traced.donated),
        batch=which(traced.batch),
        tied={
            i: number[dataclasses.replace(piece, leaf=traced.tied[piece.leaf])]
            for i, piece in enumerate(arguments)
            if piece.leaf in traced.tied
        },
        retrace=retrace,
    )
    return SplitStep(traced=split_step, arguments=arguments, results=results, parts=parts, trips=stacks.trips)


def _pieces(num_leaves: int, cut: frozenset[int], parts: int) -> tuple[LeafSlice, ...]:
    copies = [parts if leaf in cut else 1 for leaf in range(num_leaves)]
    return tuple(LeafSlice(leaf, part, n) for leaf, n in enumerate(copies) for part in range(n))


def _path(paths: Sequence[str], piece: LeafSlice, trips: int) -> str:
    if piece.parts == 1:
        return paths[piece.leaf]
    return f"{paths[piece.leaf]}.{scope_of(piece.part, piece.parts, trips)}"


def _in_parts(stacks: Stacks, parts: int, rules: RuleBook) -> Any:
    """The closed jaxpr of the step whose stacked arguments, and the results that replace them, come in parts."""
    evaluation = _Evaluation(stacks, parts, rules_of(stacks.jaxpr, stacks.trips, rules))
    return jax.make_jaxpr(evaluation.run)(*evaluation.avals())


class _Evaluation:
    """Evaluates the flat jaxpr on tracers. A variable has its whole, its parts, or both once both were asked for."""

    def __init__(self, stacks: Stacks, parts: int, rules: Mapping[str, Rule]) -> None:
        self.stacks, self.parts, self.rules = stacks, parts, rules
        self.whole: dict[Any, Any] = {}
        self.apart: dict[Any, list[Any]] = {}
        self.slices: dict[tuple[Any, int, int], Any] = {}

    def avals(self) -> list[jax.ShapeDtypeStruct]:
        out = []
        for i, v in enumerate(self.stacks.jaxpr.invars):
            is_split = i in self.stacks.arguments
            shape = self.part_of(v.aval.shape) if is_split else v.aval.shape
            aval = jax.ShapeDtypeStruct(shape, v.aval.dtype, weak_type=v.aval.weak_type)
            out += [aval] * (self.parts if is_split else 1)
        return out

    def part_of(self, shape: Sequence[int], dim: int = 0) -> tuple[int, ...]:
        return (*shape[:dim], shape[dim] // self.parts, *shape[dim + 1 :])

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
            out += [self.part(atom, p) for p in range(self.parts)] if o in self.stacks.results else [self.joined(atom)]
        return out

    def named(self, part: int) -> Any:
        return jax.named_scope(scope_of(part, self.parts, self.stacks.trips))

    def joined(self, atom: Any) -> Any:
        if isinstance(atom, jax_compat.Literal):
            return atom.val
        if atom not in self.whole:
            self.whole[atom] = jax.lax.concatenate(self.apart[atom], 0)
        return self.whole[atom]

    def part(self, atom: Any, part: int, dim: int = 0) -> Any:
        if not isinstance(atom, jax_compat.Literal) and dim == 0 and atom in self.apart:
            return self.apart[atom][part]
        key = (atom, part, dim)
        if key not in self.slices:
            size = atom.aval.shape[dim] // self.parts
            self.slices[key] = jax.lax.slice_in_dim(self.joined(atom), part * size, (part + 1) * size, axis=dim)
        return self.slices[key]

    def scan(self, eqn: Any) -> None:
        """One scan behind the other, in the order in which the whole one takes its trips."""
        consts, carried = jax_compat.scan_counts(eqn.params)
        fixed = [self.joined(a) for a in eqn.invars[:consts]]
        carry = [self.joined(a) for a in eqn.invars[consts : consts + carried]]
        size = self.stacks.trips // self.parts
        shorter = eqn.replace(params={**eqn.params, "length": size, "unroll": min(eqn.params["unroll"], size)})
        stacked: dict[int, list[Any]] = {}
        order = range(self.parts)
        for part in reversed(order) if eqn.params["reverse"] else order:
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
        if rule is None or factor is None or rule.factors[factor].size % self.parts:
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
        shapes = [self.part_of(v.aval.shape) if passes else v.aval.shape for v in eqn.outvars]
        small = _of_shape(eqn, shapes[0])
        if not self.fits(small, places, shapes):
            return False
        results = []
        for part in range(self.parts):
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

    def fits(self, small: Any, places: Sequence[int | None], shapes: Sequence[tuple[int, ...]]) -> bool:
        """Whether an equation, written for a part, takes operands of a part's shapes and makes results of theirs."""
        variables = [
            jax.ShapeDtypeStruct(a.aval.shape if place is None else self.part_of(a.aval.shape, place), a.aval.dtype)
            for a, place in zip(small.invars, places, strict=True)
        ]
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


def one_part_a_group(step: SplitStep, schedule: str, chunks: int) -> UnsupportedError:
    return UnsupportedError(
        where=f"the scan over {step.trips} layers of {step.traced.name}",
        expected="a schedule with one stage on each group of devices",
        got=f"{schedule} with {chunks}",
        hint="use 1f1b or zb-h1, or write the layers out in a Python loop: the layers of an array that is stacked over "
        "them lie on the devices in order",
    )
