"""Python callbacks in a step: `jax.debug.print`, `jax.debug.callback`, `io_callback`, `pure_callback`.

In one program they behave as under plain `jax.jit`: a callback gets whole arrays, gathered before it, and runs once, on
the first device, which sends results to the others. Callbacks are never merged, and callbacks with effects are never
removed. An exception would end the program of that device while the others wait for it forever; therefore it is kept,
and raised after the step. In stages and micro-batches that are asked for, debug callbacks are called when the step has
run (below); others are refused: they would run once a micro-batch, with a part of it.

The programs of a pipeline run on parts of the devices, once a micro-batch. So a `jax.debug.print` or
`jax.debug.callback` leaves the step: its operands are further results, joined over micro-batches as all results are,
and Python is called with them when the step has run: once a step, with whole arrays, in the order of the code.
Callbacks inside of loops, branches and `jax.checkpoint`, and `io_callback` and `pure_callback`, stay where they are and
are refused (`refuse_callbacks`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar.common import jax_compat, jax_local
from autopar.errors import UnsupportedError
from autopar.frontend.fingerprints import jaxpr_fingerprint
from autopar.ir.traced_step import TracedStep

PRIMITIVES = frozenset({"debug_callback", "debug_print", "io_callback", "pure_callback"})


def is_callback(eqn: Any) -> bool:
    return eqn is not None and eqn.primitive.name in PRIMITIVES


def guarded(eqn: Any, failures: list[BaseException]) -> Any:
    """The equation of a callback that appends its exceptions to `failures` and returns zeros for them."""
    if "callback" not in eqn.params:
        return eqn
    callback: Callable[..., Any] = eqn.params["callback"]
    avals = [v.aval for v in eqn.outvars]

    def guard(*args: Any) -> Any:
        try:
            returned = callback(*args)
            results = [np.asarray(x) for x in jax.tree.leaves(returned)] if avals else []
            got = [(x.shape, x.dtype) for x in results]
            if got != [(a.shape, a.dtype) for a in avals]:
                raise TypeError(
                    f"{_place(eqn)}: expected {_text(avals)}, as the call says that it returns, got {_text(results)}"
                )
        except BaseException as error:  # whatever it is, the other devices wait
            failures.append(error)
            return [np.zeros(aval.shape, aval.dtype) for aval in avals]
        return results

    return eqn.replace(params={**eqn.params, "callback": guard})


def _place(eqn: Any) -> str:
    """The callback's name, and the line of its call."""
    callback = eqn.params["callback"]
    callback = getattr(callback, "callback_func", callback)  # what jax wraps it in
    line = jax_compat.source_line(eqn)
    name = f"{eqn.primitive.name} of {getattr(callback, '__name__', type(callback).__name__)}"
    return f"{name} at {line}" if line else name


def _text(arrays: Sequence[Any]) -> str:
    return ", ".join(f"{a.dtype}{list(a.shape)}" for a in arrays) or "nothing"


def raise_failures(results: Any, failures: list[BaseException]) -> None:
    """Waits until a step with callbacks has run. Raises: the exception of a callback."""
    jax.block_until_ready(results)
    jax.effects_barrier()
    if failures:
        first = failures[0]
        failures.clear()
        raise first


def check_effects(closed: Any, name: str) -> None:
    """Raises: UnsupportedError for effects other than those of callbacks, with the line of code."""
    if not closed.effects:
        return
    for eqn in _with_effects(jax_compat.open_jaxpr(closed)):
        if not is_callback(eqn):
            raise UnsupportedError(
                where=f"{name}, {eqn.primitive.name} at {jax_compat.source_line(eqn)}",
                expected="a function without side effects other than callbacks",
                got=_effects_of(eqn),
                hint="return what changes as a result, and take it as an argument",
            )


def _effects_of(eqn: Any) -> str:
    if any(jax_compat.is_reference(v.aval) for v in eqn.invars):
        return "a reference (jax.new_ref) that is made outside of it"
    return f"effects: {', '.join(sorted(map(str, eqn.effects)))}"


def any_callbacks(jaxpr: Any) -> bool:
    """Whether a step calls Python."""
    return next(_callbacks(jaxpr), None) is not None


def refuse_callbacks(jaxpr: Any, name: str) -> None:
    """Raises: UnsupportedError for a step with callbacks that is to be cut into micro-batches or stages."""
    for eqn in _callbacks(jaxpr):
        raise UnsupportedError(
            where=f"{name}, {eqn.primitive.name} at {jax_compat.source_line(eqn)}",
            expected="a step without callbacks, where it is cut into micro-batches or stages",
            got="a callback, which would be called once for each micro-batch, with a part of the examples",
            hint="run the step as one program (without stages and num_microbatches), or return what the callback shows;"
            " where stages or micro-batches are asked for, jax.debug.print and jax.debug.callback may stand outside of "
            "loops and jax.checkpoint",
        )


def _callbacks(jaxpr: Any) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        if is_callback(eqn):
            yield eqn
        for inner in jax_compat.jaxprs_in(eqn):
            yield from _callbacks(inner)


def _with_effects(jaxpr: Any) -> Iterator[Any]:
    """The innermost equations that have effects."""
    for eqn in jaxpr.eqns:
        if not eqn.effects:
            continue
        inner = [jaxpr_inside for jaxpr_inside in jax_compat.jaxprs_in(eqn) if jaxpr_inside.effects]
        for jaxpr_inside in inner:
            yield from _with_effects(jaxpr_inside)
        if not inner:
            yield eqn


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
