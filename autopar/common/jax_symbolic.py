"""Dimensions that are expressions, as `jax.export.symbolic_shape` makes them: variables, constraints, values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def variables_of(shape: Sequence[Any]) -> set[str]:
    """The variables in the dimensions of a shape; none where all of them are numbers."""
    return {name for size in shape if _is_expression(size) for name in size._get_vars()}


def evaluated(shape: Sequence[Any], values: Mapping[str, int]) -> tuple[int, ...]:
    """A shape with numbers for its variables. Raises: ValueError for numbers that its constraints exclude."""
    sizes = []
    for size in shape:
        if _is_expression(size):
            _check_constraints(size, values)
            sizes.append(int(size._evaluate(values)))
        else:
            sizes.append(int(size))
    return tuple(sizes)


def _is_expression(size: Any) -> bool:
    # Here, as numbers are what nearly every dimension is, and jax.export is not loaded with jax.
    from jax.export import is_symbolic_dim

    return not isinstance(size, int) and is_symbolic_dim(size)


def _check_constraints(size: Any, values: Mapping[str, int]) -> None:
    """Raises: ValueError with a constraint of the scope that does not hold."""
    for constraint in size.scope._explicit_constraints:
        difference = constraint.diff
        if _is_expression(difference):
            if not set(difference._get_vars()) <= set(values):
                continue  # of variables that are not in the shape
            difference = int(difference._evaluate(values))
        if difference < 0 or (constraint.cmp.name == "EQ" and difference):
            raise ValueError(constraint.debug_str)
