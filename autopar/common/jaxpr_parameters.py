"""Jaxprs inside of equations and of other jaxprs, rewritten; what stays the same stays the same object."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from autopar.common import jax_compat


def with_jaxprs(value: Any, rewritten: Callable[[Any], Any]) -> Any:
    """A parameter of an equation with its jaxprs rewritten, be it one or a tuple or list with some."""
    if jax_compat.is_jaxpr(value):
        return rewritten(value)
    if not isinstance(value, (tuple, list)) or not any(map(jax_compat.is_jaxpr, value)):
        return value
    members = [rewritten(v) if jax_compat.is_jaxpr(v) else v for v in value]
    if all(a is b for a, b in zip(members, value, strict=True)):
        return value
    return type(value)(*members) if hasattr(value, "_fields") else type(value)(members)


def with_body(closed: Any, inner: Any) -> Any:
    """An open or closed jaxpr with another inside, and its own constants."""
    is_open = jax_compat.open_jaxpr(closed) is closed and not jax_compat.jaxpr_consts(closed)
    return inner if is_open else jax_compat.closed_like(closed, inner)
