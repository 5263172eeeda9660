"""Splits a scan over stacked layers into scans over ranges of its trips, so that pipeline stages can divide it.

A step that scans over layers holds each kind of parameter in one array, the layer in front: (L, ...). So are their
gradients, the optimiser's state of them, and what the forward scan saves for the backward one. Here every such array
becomes `parts` arrays of L / parts layers each: scans run one behind the other, the operations between them (the
update, mostly) run on each part, and sums over layers become sums of the parts' sums. Where dimension 0 of a value goes
is read from the sharding rules. What cannot be done in parts is done on the parts joined.

The step that comes back takes and gives the state in parts, each an argument and a result of its own. Where the parts
do not divide the layers, all but the last take one number of layers and the last the rest; or, where nothing would be
left for it (4 layers in 3 parts), the first parts take one more than the others. A stack is then stored padded
(`uneven_forms`), so that its parts are of one shape: those that are smaller are cut where they enter the step, and
padded where they leave it.

Not cut: stacks with the layer behind the first dimension, scans inside of `jax.checkpoint`, steps in which several
scans share the work (an encoder and a decoder).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import jax

from autopar.common import jax_compat
from autopar.errors import InvalidArgumentError, UnsupportedError
from autopar.ir.padded import PaddedForm
from autopar.ir.traced_step import TracedStep
from autopar.passes.scan_in_parts import in_parts_of, ranges, scope_of
from autopar.passes.scan_stacks import Stacks, find_stacks
from autopar.sharding.rules import RuleBook


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


def uneven_forms(traced: TracedStep, parts: int, rules: RuleBook) -> dict[int, PaddedForm]:
    """The forms in which stacks of state are stored, by leaf, where so many parts do not divide their layers."""
    return _forms(find_stacks(traced, rules), parts)


def _forms(stacks: Stacks | None, parts: int) -> dict[int, PaddedForm]:
    if stacks is None or stacks.trips % parts == 0 or parts > stacks.trips:
        return {}
    trips = [stop - start for start, stop in ranges(stacks.trips, parts)]
    pads_last_alone = all(n == trips[0] for n in trips[:-1])
    shapes = {leaf: tuple(stacks.jaxpr.invars[leaf].aval.shape) for leaf in stacks.arguments}

    def form(shape: tuple[int, ...]) -> PaddedForm:
        of_trip = shape[0] // stacks.trips
        rows = () if pads_last_alone else tuple(of_trip * n for n in trips)
        return PaddedForm(shape, (of_trip * parts * trips[0], *shape[1:]), rows)

    return {leaf: form(shape) for leaf, shape in shapes.items()}


def split_scans(traced: TracedStep, parts: int, rules: RuleBook, sliced: frozenset[int] = frozenset()) -> SplitStep:
    """The step with the scan that holds most of its work, and all that is stacked as it is, in `parts` parts.

    `sliced`: leaves that lie in slices, of a step that need not return them. Without such a scan the step comes back as
    it was. Raises: InvalidArgumentError where a part would have no trips, or where the parts are unequal and the stacks
    are not stored for them; UnsupportedError where a step with `sliced` leaves has no scan over their layers.
    """
    whole = SplitStep(
        traced=traced,
        arguments=tuple(map(LeafSlice, range(len(traced.in_avals)))),
        results=tuple(map(LeafSlice, range(len(traced.out_avals)))),
    )
    stacks = find_stacks(traced, rules, sliced) if parts > 1 else None
    if stacks is None:
        if sliced:
            raise _no_scan(traced, min(sliced), parts)
        return whole
    if {leaf.leaf: leaf.form for leaf in traced.padded} != _forms(stacks, parts):
        raise InvalidArgumentError(
            where=f"{traced.name}: {stacks.name}",
            expected=f"the number of stages for which the state of its {stacks.trips} layers is padded",
            got=f"{parts} stages",
            hint="use the number of stages of the plan that made the state",
        )
    if parts > stacks.trips:
        raise InvalidArgumentError(
            where=f"{traced.name}: {stacks.name}",
            expected=f"at most as many stages as its {stacks.trips} layers",
            got=str(parts),
            hint=f"use a number of stages from 1 to {stacks.trips}",
        )
    return _cut(traced, stacks, parts, rules, sliced)


def trips_of(traced: TracedStep, rules: RuleBook, sliced: frozenset[int] = frozenset()) -> int:
    """The trips of the scan that `split_scans` would split; 0 where there is none."""
    stacks = find_stacks(traced, rules, sliced)
    return stacks.trips if stacks is not None else 0


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _cut(traced: TracedStep, stacks: Stacks, parts: int, rules: RuleBook, sliced: frozenset[int]) -> SplitStep:
    closed = in_parts_of(stacks, parts, rules)
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
        same = find_stacks(retraced, rules, sliced)
        assert same is not None, "a step on other shapes scans over the same layers"
        return in_parts_of(same, parts, rules)

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
        padded=(),
        pads_summands=False,
        in_paths=tuple(_path(traced.in_paths, piece, stacks.trips) for piece in arguments),
        out_paths=tuple(_path(traced.out_paths, piece, stacks.trips) for piece in results),
        argument_of=tuple(traced.argument_of[piece.leaf] for piece in arguments),
        donated=which(traced.donated),
        batch=which(traced.batch),
        example_dims={i: traced.example_dims[p.leaf] for i, p in enumerate(arguments) if p.leaf in traced.example_dims},
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


def _no_scan(traced: TracedStep, leaf: int, parts: int) -> UnsupportedError:
    return UnsupportedError(
        where=f"{traced.name}, follow",
        expected=f"a scan over the layers of {traced.in_paths[leaf]}, which lies in slices on {parts} stages",
        got="none that does most of the step's work",
        hint=f"leave follow out: {traced.name} then plans for itself, and its calls move the state",
    )


def one_part_a_group(step_name: str, trips: int, schedule: str, chunks: int) -> UnsupportedError:
    return UnsupportedError(
        where=f"the scan over {trips} layers of {step_name}",
        expected="a schedule with one stage on each group of devices",
        got=f"{schedule} with {chunks}",
        hint="use 1f1b or zb-h1, or write the layers out in a Python loop: the layers of an array that is stacked over "
        "them lie on the devices in order",
    )
