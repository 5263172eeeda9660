"""`jax.lax.while_loop` with a condition for each of several examples, as `vmap` makes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def while_any(
    condition: Callable[[list[Any]], Any], body: Callable[[list[Any]], list[Any]], carry: list[Any]
) -> list[Any]:
    """The carried values behind a loop that goes on while the condition of any example holds; others stay as they are.

    The condition is a truth value, or an array of them whose dimensions are the first ones of everything carried.
    """

    def step(carry: list[Any]) -> list[Any]:
        made, holds = body(carry), condition(carry)
        return [_where(holds, new, old) for new, old in zip(made, carry, strict=True)] if holds.shape else made

    return jax.lax.while_loop(lambda carry: jnp.any(condition(carry)), step, carry)


def _where(holds: Any, new: Any, old: Any) -> Any:
    return jax.lax.select(jax.lax.broadcast_in_dim(holds, new.shape, range(holds.ndim)), new, old)
