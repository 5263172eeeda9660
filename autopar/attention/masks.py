"""What an expression of scores hides, where that depends on the distance of a query's and a key's position alone.

The expression is read, not its spelling: comparisons of positions whose difference is a multiple of the distance, and
what is computed of them. It is then evaluated for every distance, so what is found holds for all positions.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np

from autopar.attention.form import KEY, AttentionForm, Expression, computed

# A weight is zero where its score is so far below others: exp(-104) is the smallest 32-bit number.
HIDDEN = -1e4
_ROUNDING = 1e-6
COMPARISONS = frozenset({"eq", "ne", "ge", "gt", "le", "lt"})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DistanceMask:
    """Scores are `scale` times the product of query and key, but for hidden ones. `causal`: a query sees its own
    position and those before it, else all.
    """

    scale: float
    causal: bool


@functools.cache
def distance_mask(form: AttentionForm, positions: int) -> DistanceMask | None:
    """The mask of attention over so many positions; None where scores are computed in another way."""
    if form.arrays or not _by_distance(form.score, form.position):
        return None
    distance = np.arange(-positions + 1, positions)
    query = np.maximum(distance, 0)
    at = {form.position: query, KEY: query - distance}
    none, one, two = (evaluated(form.score, at, x) for x in (0.0, 1.0, 2.0))
    hidden = two <= HIDDEN
    none, one, two = (of[~hidden] for of in (none, one, two))
    if not one.size or np.any(none) or not np.allclose(two, 2.0 * one[0], rtol=_ROUNDING, atol=0.0):
        return None
    if not np.allclose(one, one[0], rtol=_ROUNDING, atol=0.0):
        return None
    causal = bool(np.array_equal(hidden, distance < 0))
    return DistanceMask(scale=float(one[0]), causal=causal) if causal or not hidden.any() else None


def evaluated(node: Expression, at: dict[str, np.ndarray], score: float) -> np.ndarray:
    """The values of an expression at pairs of positions, of one product of query and key."""
    shape = at[KEY].shape

    @functools.cache
    def value(node: Expression) -> Any:
        match node:
            case ("score",):
                return np.full(shape, score)
            case ("iota", letter, _):
                return at[letter]
            case ("const", number, dtype):
                return np.asarray(number, np.float64 if np.dtype(dtype).kind in "fV" else dtype)
            case ("convert_element_type", (dtype,), operand):
                inner = value(operand)
                return inner.astype(np.float64 if np.dtype(dtype).kind in "fV" else dtype)
            case ("integer_pow", (power,), operand):
                return value(operand) ** power
            case (primitive, (), *operands):
                return computed(primitive, [value(o) for o in operands], np)
        raise AssertionError(f"no expression: {node}")

    return np.broadcast_to(value(node), shape).astype(np.float64)


def _by_distance(node: Expression, position: str) -> bool:
    """Whether an expression depends on positions by their distance only."""
    if node[0] in ("score", "const"):
        return True
    if node[0] == "array":
        return False
    if (sloped := linear(node)) is not None and is_distance(sloped, position):
        return True
    if node[0] == "iota":
        return False
    operands = node[2:]
    if node[0] in COMPARISONS:
        left, right = map(linear, operands)
        if left is not None and right is not None:
            return is_distance(linear_sum(left, right, -1.0), position)
    return all(_by_distance(operand, position) for operand in operands)


def is_distance(sloped: dict[str, float], position: str) -> bool:
    """Whether a number that is linear in positions is a multiple of their distance, and a constant."""
    by_letter = {letter: n for letter, n in sloped.items() if letter and n}
    return by_letter.get(position, 0.0) == -by_letter.get(KEY, 0.0) and set(by_letter) <= {position, KEY}


def linear(node: Expression) -> dict[str, float] | None:
    """What a number that is linear in positions counts of each ("" for the constant); None for other expressions."""
    match node:
        case ("iota", letter, _):
            return {letter: 1.0}
        case ("const", int() | float() as number, _):
            return {"": float(number)}
        case ("convert_element_type", (dtype,), operand) if np.dtype(dtype).kind in "iufV":
            return linear(operand)
        case ("neg", (), operand):
            inner = linear(operand)
            return None if inner is None else linear_sum({}, inner, -1.0)
        case ("add" | "sub" as name, (), left, right):
            one, other = linear(left), linear(right)
            return None if one is None or other is None else linear_sum(one, other, 1.0 if name == "add" else -1.0)
    return None


def linear_sum(one: dict[str, float], other: dict[str, float], times: float) -> dict[str, float]:
    return {letter: one.get(letter, 0.0) + times * other.get(letter, 0.0) for letter in {*one, *other}}
