"""The loops and branches of JAX around other bodies than they were traced with: functions of lists of arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from autopar.common.jax_compat import with_type

Run = Callable[[list[Any]], Sequence[Any]]
Typed = Callable[[Sequence[Any]], list[Any]]  # what is carried, of the types that it is carried in


def like(avals: Sequence[Any]) -> Typed:
    """Carried values with the weak types and dtypes of the traced loop (a literal has neither)."""
    return lambda arrays: [
        a if hasattr(a, "aval") and a.aval.weak_type == aval.weak_type else with_type(a, aval)
        for a, aval in zip(arrays, avals, strict=True)
    ]


def scan(run: Run, operands: Sequence[Any], counts: tuple[int, int], typed: Typed, **how: Any) -> list[Any]:
    """The results of a scan, of so many constants and carried values. `how`: its length, `reverse` and `unroll`."""
    k, n = counts[0], sum(counts)

    def body(carry: list[Any], slices: list[Any]) -> tuple[list[Any], Sequence[Any]]:
        outs = run([*operands[:k], *carry, *slices])
        return typed(outs[: n - k]), outs[n - k :]

    carry, stacked = jax.lax.scan(body, typed(operands[k:n]), list(operands[n:]), **how)
    return [*carry, *stacked]


def while_loop(condition: Run, body: Run, operands: Sequence[Any], counts: tuple[int, int], typed: Typed) -> list[Any]:
    """The carried values behind a loop, of so many constants of its condition and its body, that goes on while the
    condition of any example holds; others stay as they are.

    The condition is a truth value, or an array of them whose dimensions are the first ones of everything carried.
    """
    k, n = counts[0], sum(counts)

    def holds(carry: list[Any]) -> Any:
        return condition([*operands[:k], *carry])[0]

    def step(carry: list[Any]) -> list[Any]:
        return typed(body([*operands[k:n], *carry]))

    def step_of_some(carry: list[Any]) -> list[Any]:
        going = holds(carry)
        return [_where(going, new, old) for new, old in zip(step(carry), carry, strict=True)]

    first = typed(operands[n:])
    if not jax.eval_shape(holds, first).shape:
        return jax.lax.while_loop(holds, step, first)
    return jax.lax.while_loop(lambda carry: jnp.any(holds(carry)), step_of_some, first)


def _where(holds: Any, new: Any, old: Any) -> Any:
    return jax.lax.select(jax.lax.broadcast_in_dim(holds, new.shape, range(holds.ndim)), new, old)


def cond(runs: Sequence[Run], operands: Sequence[Any], typed: Typed) -> list[Any]:
    """The results of the branch that the first operand says, a number or a truth value."""
    index, *rest = operands
    branches = [lambda *args, run=run: typed(run([*args])) for run in runs]
    return list(jax.lax.switch(index.astype(jnp.int32) if index.dtype == jnp.bool_ else index, branches, *rest))
