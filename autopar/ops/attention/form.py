"""`AttentionForm`: what an attention computes, as an expression of each product of a query and a key; and what it
hides.

A mask is found where what it hides depends on the distance of a query's and a key's position alone. The expression is
read, not its spelling: comparisons of positions whose difference is a multiple of the distance, and what is computed of
them. It is then evaluated for every distance, so what is found holds for all positions.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import jax.numpy as jnp
import numpy as np

# The label of the positions of keys; those of queries have another one.
KEY = "k"
# A dimension of size one that counts nothing.
NONE = "_"

# What is computed of a score, element by element: ("score",), ("iota", label, type), ("array", number of the operand),
# ("const", number, type), else (primitive, parameters, operands...).
Expression = tuple[Any, ...]

# Primitives that may stand in an expression, by the function of NumPy, and of jax.numpy, that computes them.
ELEMENTWISE = {
    "abs": "abs", "add": "add", "add_any": "add", "and": "bitwise_and", "div": "divide", "eq": "equal",
    "ge": "greater_equal", "gt": "greater", "le": "less_equal", "lt": "less", "max": "maximum", "min": "minimum",
    "mul": "multiply", "ne": "not_equal", "neg": "negative", "not": "logical_not", "or": "bitwise_or",
    "sub": "subtract", "select_n": "where",
}  # fmt: skip


def computed(primitive: str, operands: Sequence[Any], numpy: ModuleType) -> Any:
    """What a primitive of `ELEMENTWISE` makes of its operands, in NumPy or in jax.numpy."""
    if primitive == "select_n":  # the operand for False comes first
        which, no, yes = operands
        operands = which, yes, no
    return getattr(numpy, ELEMENTWISE[primitive])(*operands)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AttentionForm:
    """What an attention computes: softmax over the keys of an expression of query times key, times value.

    Each string names the dimensions of an array, one letter each. `position` is the letter of the queries' positions;
    `rows` those of a row of scores, which its maximum and sum have. `arrays` are those that `score` reads (masks), and
    `sources` of each of them the first one that is the same array (segments of queries, and of keys).
    """

    query: str
    key: str
    value: str
    out: str
    rows: str
    position: str
    score: Expression
    arrays: tuple[str, ...]
    sources: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Gradients:
    """The dimensions of the gradients of an attention's result, queries, keys and values."""

    out: str
    query: str
    key: str
    value: str


def letters(form: AttentionForm, gradients: Gradients | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The dimensions of (operands, results): of the forward pass, or with gradients of the backward pass."""
    if gradients is None:
        return (form.query, form.key, form.value, *form.arrays), (form.out, form.rows, form.rows)
    operands = (form.query, form.key, form.value, form.out, form.rows, form.rows, gradients.out, *form.arrays)
    return operands, (gradients.query, gradients.key, gradients.value)


def sizes_of(eqn: Any) -> dict[str, int]:
    """How large each lettered dimension of an equation is."""
    operands, results = letters(eqn.params["form"], eqn.params["gradients"])
    return {
        letter: n
        for names, var in zip((*operands, *results), (*eqn.invars, *eqn.outvars), strict=True)
        for letter, n in zip(names, var.aval.shape, strict=True)
    }


def goes_round(eqn: Any) -> bool:
    """Whether devices in a ring can share the positions of a pass: there are as many of queries as of keys."""
    sizes = sizes_of(eqn)
    return sizes[eqn.params["form"].position] == sizes[KEY]


def exact_type(query: Any) -> Any:
    """The type of scores and sums: 32 bits at least."""
    return jnp.promote_types(query.dtype, jnp.float32)


def has_score(node: Expression) -> bool:
    """Whether an expression reads the score."""
    return node[0] == "score" or any(isinstance(part, tuple) and has_score(part) for part in node if part != ())


def counted(node: Expression) -> set[str]:
    """The letters of the dimensions along which an expression counts."""
    if node[0] == "iota":
        return {node[1]}
    return set().union(*(counted(part) for part in node if isinstance(part, tuple) and part))


# A weight is zero where its score is so far below others: exp(-104) is the smallest 32-bit number.
HIDDEN = -1e4
_ROUNDING = 1e-6
COMPARISONS = frozenset({"eq", "ne", "ge", "gt", "le", "lt"})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DistanceMask:
    """Scores are `scale` times the product of query and key, but for hidden ones. `causal`: a query sees its own
    position and those before it, else all; of these the last `window` ones, where that is less. `segments`: of these a
    query sees those of its own segment, by the numbers of the arrays that have the segments of queries and of keys.
    `shown`: a condition on the number of a segment; the rows of others see nothing, so that their weights are equal.
    """

    scale: float
    causal: bool
    window: int | None = None
    segments: tuple[int, int] | None = None
    shown: Expression | None = None


@functools.cache
def distance_mask(form: AttentionForm, positions: int) -> DistanceMask | None:
    """The mask of attention over so many positions; None where scores are computed in another way."""
    segments = _segments(form) if form.arrays else None
    conditions = _conditions(form.score)
    score = _with_segments(form.score, same=True)
    if (form.arrays and segments is None) or len(conditions) > 1 or not _by_distance(score, form.position):
        return None
    distance = np.arange(-positions + 1, positions)
    query = np.maximum(distance, 0)
    at = {form.position: query, KEY: query - distance}
    none, one, two = (evaluated(score, at, x) for x in (0.0, 1.0, 2.0))
    hidden = two <= HIDDEN
    none, one, two = (of[~hidden] for of in (none, one, two))
    if not one.size or np.any(none) or not np.allclose(two, 2.0 * one[0], rtol=_ROUNDING, atol=0.0):
        return None
    if not np.allclose(one, one[0], rtol=_ROUNDING, atol=0.0):
        return None
    causal, seen = bool(hidden[distance < 0].all()), int(np.sum(~hidden))
    if not np.array_equal(hidden, (distance < 0) | (distance >= seen) if causal else np.zeros_like(hidden)):
        return None
    between = [_with_segments(form.score, same=False, shown=shown) for shown in (True, False)] if segments else []
    if not all(np.all(evaluated(score, at, 2.0) <= HIDDEN) for score in between):
        return None
    unseen = np.stack([evaluated(_with_segments(form.score, same=True, shown=False), at, x) for x in (0.0, 2.0)])
    if conditions and not (-np.inf < unseen[0, 0] <= HIDDEN and np.all(unseen == unseen[0, 0])):
        return None
    window, shown = seen if causal and seen < positions else None, next(iter(conditions), None)
    return DistanceMask(scale=float(one[0]), causal=causal, window=window, segments=segments, shown=shown)


def _segments(form: AttentionForm) -> tuple[int, int] | None:
    """The arrays of a form where they are the segments of queries and of keys, the same array twice: then each query is
    of the segment of the key of its own position.
    """
    same = list(form.sources) == [0] * len(form.arrays)
    of_query = [i for i, names in enumerate(form.arrays) if form.position in names]
    of_key = [i for i, names in enumerate(form.arrays) if KEY in names]
    if not same or len(of_query) != 1 or len(of_key) != 1 or len(form.arrays) != 2:
        return None
    (i,), (j,) = of_query, of_key
    return (i, j) if form.arrays[i].replace(form.position, KEY) == form.arrays[j] else None


def _with_segments(node: Expression, *, same: bool, shown: bool = True) -> Expression:
    """An expression with each comparison of two arrays as it is inside of a segment, or between two, and the condition
    on a segment as it is.
    """
    match node:
        case ("eq" | "ne" as name, (), ("array", _), ("array", _)):
            return ("const", same if name == "eq" else not same, "bool")
        case ("score",) | ("iota", _, _) | ("array", _) | ("const", _, _):
            return node
    if _is_condition(node):
        return ("const", shown, "bool")
    return (*node[:2], *(_with_segments(operand, same=same, shown=shown) for operand in node[2:]))


def _conditions(node: Expression) -> set[Expression]:
    """The comparisons of an expression of a segment's number with another number."""
    if node[0] in ("score", "iota", "array", "const"):
        return set()
    if _is_condition(node):
        return {node}
    return set().union(*map(_conditions, node[2:]))


def _is_condition(node: Expression) -> bool:
    return node[0] in COMPARISONS and sorted(operand[0] for operand in node[2:]) == ["array", "const"]


def holds(condition: Expression, segments: Any) -> Any:
    """Whether a condition on a segment's number holds, for each of these."""
    (_, number, dtype), *_ = (operand for operand in condition[2:] if operand[0] == "const")
    number = jnp.asarray(number, dtype)
    return computed(condition[0], [number if node[0] == "const" else segments for node in condition[2:]], jnp)


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
        case ("mul", (), left, right):
            one, other = linear(left), linear(right)
            if one is None or other is None or ({*one} - {""} and {*other} - {""}):
                return None
            sloped, factor = (one, other) if {*one} - {""} else (other, one)
            return linear_sum({}, sloped, factor.get("", 0.0))
    return None


def linear_sum(one: dict[str, float], other: dict[str, float], times: float) -> dict[str, float]:
    return {letter: one.get(letter, 0.0) + times * other.get(letter, 0.0) for letter in {*one, *other}}
