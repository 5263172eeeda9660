"""A check of the matrices that an axis splits along a dimension of its own, such as experts."""

from __future__ import annotations

from autopar.errors import InvalidArgumentError
from autopar.ir.graph import Dimension, OpGraph, Purpose


def check_owned(graph: OpGraph, axis: str, parts: int, what: Dimension) -> None:
    """Raises: InvalidArgumentError where a step has no matrices with the dimension, or the parts do not divide it."""
    sizes = {
        value.name: n
        for value in graph.values
        if value.purpose is Purpose.MATRIX
        for n, names in zip(value.shape, value.dimensions, strict=True)
        if what in names
    }
    odd = next((name for name, n in sizes.items() if n % parts), None)
    if odd is not None:
        raise InvalidArgumentError(
            where=f"recipe, {axis} axis of {parts} devices",
            expected=f"a number of {what.value}s that divides by {parts}",
            got=f"{sizes[odd]} in {odd}",
            hint=f"choose a size that divides the number of {what.value}s",
        )
    if not sizes:
        raise InvalidArgumentError(
            where=f"recipe, {axis} axis of {parts} devices",
            expected=f"a step with matrices of several {what.value}s",
            got="none: no product of weights keeps a dimension apart that counts neither examples nor positions",
            hint=f"leave the {axis} axis out, or write the {what.value}s as one array, (number, ...), in one einsum",
        )
