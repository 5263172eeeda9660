"""`AttentionForm`: what an attention computes, as an expression of each product of a query and a key."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import jax.numpy as jnp

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
