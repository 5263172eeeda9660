"""Debug callbacks of a step that is cut into micro-batches or stages: what they show becomes results of the step.

The programs of a pipeline run on parts of the devices, once a micro-batch. So a `jax.debug.print` or
`jax.debug.callback` leaves the step: its operands are further results, joined over micro-batches as all results are,
and Python is called with them when the step has run: once a step, with whole arrays, in the order of the code.
Callbacks inside of loops, branches and `jax.checkpoint`, and `io_callback` and `pure_callback`, stay where they are and
are refused (`callbacks.refuse_callbacks`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar.common import jax_compat, jax_local
from autopar.frontend.fingerprints import jaxpr_fingerprint
from autopar.ir.traced_step import TracedStep

_DEBUG = frozenset({"debug_callback", "debug_print"})


def with_callbacks_as_results(traced: TracedStep) -> TracedStep:
    """The step with the operands of its debug callbacks as further results; the same one where it has none."""
    closed = jax_local.closed(traced.jaxpr, traced.constants)
    cleaned, called = without_callbacks(closed)
    if not called:
        return traced
    jaxpr = jax_compat.open_jaxpr(cleaned)
    new = jaxpr.outvars[len(traced.out_avals) :]
    return dataclasses.replace(
        traced,
        jaxpr=jaxpr,
        out_avals=(*traced.out_avals, *(jax_compat.struct_of(v.aval) for v in new)),
        out_paths=(*traced.out_paths, *(f"callbacks[{i}]" for i in range(len(new)))),
        fingerprint=jaxpr_fingerprint(cleaned),
        retrace=lambda avals: without_callbacks(traced.retrace(avals))[0],
        callbacks=called,
    )


def call_with_results(traced: TracedStep, results: Sequence[Any]) -> Sequence[Any]:
    """The results of the step's own, after its callbacks were called with the further ones.

    Raises: what a callback raises.
    """
    own = len(results) - sum(literal is None for _, operands in traced.callbacks for literal in operands)
    further = iter([_on_one_device(array) for array in results[own:]])
    for eqn, operands in traced.callbacks:
        jax_compat.bind(eqn, [next(further) if literal is None else literal for literal in operands])
    jax.effects_barrier()
    return results[:own]


def _on_one_device(array: Any) -> Any:
    if jax_compat.is_key_dtype(array.dtype):
        numbers = jnp.asarray(np.asarray(jax.random.key_data(array)))
        return jax.random.wrap_key_data(numbers, impl=jax.random.key_impl(array))
    return jnp.asarray(np.asarray(array))


def without_callbacks(closed: Any) -> tuple[Any, tuple[tuple[Any, tuple[Any, ...]], ...]]:
    """(the jaxpr, with the operands of its callbacks as results; each callback, with those of its operands that are
    known, None for the others).
    """
    inner = jax_compat.open_jaxpr(closed)
    kept, called, new = [], [], []
    for eqn in inner.eqns:
        if eqn.primitive.name not in _DEBUG or eqn.params.get("partitioned"):
            kept.append(eqn)
            continue
        literals = [v.val if isinstance(v, jax_compat.Literal) else None for v in eqn.invars]
        called.append((eqn, tuple(literals)))
        new += [v for v in eqn.invars if not isinstance(v, jax_compat.Literal)]
    if not called:
        return closed, ()
    rewritten = jax_compat.with_equations(closed, kept, [*inner.outvars, *new], jax_compat.jaxpr_consts(closed))
    return rewritten, tuple(called)
