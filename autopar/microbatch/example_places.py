"""The dimension of each operand that holds the examples, and rules on it that many primitives share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

# Of each operand the dimension that holds the examples; None where it is the same for all of them.
Places = Sequence[int | None]
# Of each result that dimension; None where the result is a sum over examples, `SHARED` where it reads none of them.
Results = Sequence[int | None]
SHARED = -1
Rule = Callable[[Any, Places], Results]

COMBINES = "it combines examples"
BY_POSITION = "it addresses examples by their position in the batch"
IN_ORDER = "it puts examples in order"
SEVERAL = "it reads examples in several places"
AGAINST_OTHERS = "it holds examples against others"
UNKNOWN = "it is not known to keep examples apart"


class MixesExamples(Exception):
    """An equation does not keep examples independent; its text is the reason. Internal."""


def shape_of(variable: Any) -> tuple[int, ...]:
    return tuple(variable.aval.shape)


def rank_of(variable: Any) -> int:
    return len(variable.aval.shape)


def common_place(eqn: Any, places: Places) -> int:
    """The dimension that holds the examples in every operand except scalars."""
    dims = {place for v, place in zip(eqn.invars, places, strict=True) if shape_of(v)}
    if None in dims:
        raise MixesExamples(AGAINST_OTHERS)
    if len(dims) != 1:
        raise MixesExamples(SEVERAL)
    (dim,) = dims
    assert dim is not None
    return dim


def only_place(eqn: Any, places: Places, operand: int) -> int:
    """The dimension that holds the examples in one operand, the others being the same for all."""
    place = places[operand]
    if place is None or any(p is not None for i, p in enumerate(places) if i != operand):
        raise MixesExamples(SEVERAL if place is not None else COMBINES)
    return place


def named_dims(eqn: Any, name: str, rank: int) -> set[int]:
    """The dimensions that a parameter names, counted from the front."""
    value = eqn.params[name]
    return {int(a) % rank for a in (value if isinstance(value, (tuple, list)) else (value,))}


def elementwise(eqn: Any, places: Places) -> list[int]:
    """Element by element; scalars, and dimensions of size one, are combined with all examples."""
    dims = {place for place in places if place is not None}
    if len(dims) != 1:
        raise MixesExamples(SEVERAL)
    (dim,) = dims
    for v, place in zip(eqn.invars, places, strict=True):
        if place is None and shape_of(v) and shape_of(v)[dim] != 1:
            raise MixesExamples(AGAINST_OTHERS)
    return [dim for _ in eqn.outvars]


def along(name: str, reason: str = BY_POSITION) -> Rule:
    """Works along the dimensions of a parameter, which must not hold the examples; `reason`: what it would do there."""

    def rule(eqn: Any, places: Places) -> list[int]:
        dim = common_place(eqn, places)
        if dim in named_dims(eqn, name, rank_of(eqn.invars[0])):
            raise MixesExamples(reason)
        return [dim for _ in eqn.outvars]

    return rule


def reducing(name: str) -> Rule:
    """Drops the dimensions of a parameter."""

    def rule(eqn: Any, places: Places) -> list[int]:
        dim = common_place(eqn, places)
        dropped = named_dims(eqn, name, rank_of(eqn.invars[0]))
        if dim in dropped:
            raise MixesExamples(COMBINES)
        return [dim - sum(d < dim for d in dropped) for _ in eqn.outvars]

    return rule


def matrices(*ranks: int) -> Rule:
    """Linear algebra on the last dimensions of each operand: `ranks` are their numbers for each operand in order."""

    def rule(eqn: Any, places: Places) -> list[int]:
        dim = common_place(eqn, places)
        if any(dim >= rank_of(v) - rank for v, rank in zip(eqn.invars, ranks, strict=True)):
            raise MixesExamples(COMBINES)
        return [dim for _ in eqn.outvars]

    return rule


def windowed(eqn: Any, places: Places) -> list[int]:
    """A sliding window: along the examples it must cover one at a time."""
    dim, p = common_place(eqn, places), eqn.params
    is_single = p["window_dimensions"][dim] == 1 and tuple(p["padding"][dim]) == (0, 0)
    for name in ("window_strides", "base_dilation", "window_dilation"):
        is_single = is_single and p.get(name, {dim: 1})[dim] == 1
    if not is_single:
        raise MixesExamples(COMBINES)
    return [dim for _ in eqn.outvars]


def of_keys(rule: Rule) -> Rule:
    """Random numbers of one key for each example. Only threefry gives for many keys the numbers of each single key."""

    def keys(eqn: Any, places: Places) -> Results:
        if str(eqn.invars[0].aval.dtype) != "key<fry>":
            raise MixesExamples("what it makes of a key depends on the other keys")
        if places[0] is None:
            raise MixesExamples("it draws for all examples from one key")
        return rule(eqn, places)

    return keys
