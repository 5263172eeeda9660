"""`jax_debug_nans` and `jax_debug_infs`: a step with results that are not finite is run again, operation by operation.

The error names the operation that made the first such number, by its module and line. Donated arguments are copied
before each call, so that the step can run again.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar.common import jax_compat
from autopar.errors import NonFiniteError
from autopar.execute.placement import on_default_device
from autopar.frontend.build_graph import module_path, stack_of
from autopar.ir.traced_step import TracedStep


def is_on() -> bool:
    return any(jax_compat.looks_for_nans_and_infs())


@contextlib.contextmanager
def switched_off() -> Iterator[None]:
    """Switches off JAX's own checks of single operations."""
    with jax.debug_nans(False), jax.debug_infs(False):
        yield


_looks_inside = contextvars.ContextVar("looks inside of a step whose results are finite", default=False)


@contextlib.contextmanager
def inside_too() -> Iterator[None]:
    """Has `check` look at the operations where all results are finite, as those of a step that was skipped are."""
    before = _looks_inside.set(True)
    try:
        yield
    finally:
        _looks_inside.reset(before)


def check(traced: TracedStep, leaves: Sequence[Any], results: Sequence[Any]) -> None:
    """Raises: NonFiniteError for NaNs or infinities in the results, as far as jax's configuration asks for."""
    nans, infs = jax_compat.looks_for_nans_and_infs()
    look = _NonFiniteSearch(nans, infs)
    bad = next((i for i, x in enumerate(results) if look.at(x)), None)
    if bad is None and not _looks_inside.get():
        return
    bad_argument = next((path for path, x in zip(traced.in_paths, leaves, strict=True) if look.at(x)), None)
    location = None
    with switched_off():
        if bad_argument is None and jax.process_count() == 1:
            arguments = [*map(jnp.asarray, traced.constants), *map(on_default_device, leaves)]
            location = look.first(traced.jaxpr, arguments, "")
    option = "jax_debug_nans" if nans else "jax_debug_infs"
    if bad is None and bad_argument is None and location is None:
        return
    result = "no result" if bad is None else traced.out_paths[bad]
    if bad_argument is not None:
        where, got, hint = (
            bad_argument,
            f"{look.at(leaves[traced.in_paths.index(bad_argument)])} in it",
            "look for where it was made",
        )
    elif location is not None:
        eqn, stack, kind = location
        module, line = module_path(stack), jax_compat.source_line(eqn)
        where = " at ".join(filter(None, (module, line))) or traced.name
        got = f"{kind} made by {eqn.primitive.name} of {_shapes(eqn)}; it shows in {result}"
        hint = "this operation made the first one; its operands are finite"
    else:
        assert bad is not None, "otherwise nothing was found"
        where, got = f"{traced.name}, {result}", f"{look.at(results[bad])} in it"
        hint = "in a program of one process the operation that made it is named"
        if jax.process_count() == 1:
            hint = "operation by operation on one device there is none: it comes from the order of sums"
    raise NonFiniteError(where=where, expected=f"finite numbers ({option} is set)", got=got, hint=hint)


def _shapes(eqn: Any) -> str:
    return ", ".join(v.aval.str_short() for v in eqn.invars) or "nothing"


class _NonFiniteSearch:
    """Finds the first operation whose result is not finite."""

    def __init__(self, nans: bool, infs: bool) -> None:
        self._nans, self._infs = nans, infs

    def at(self, x: Any) -> str:
        """`nan`, `inf`, or an empty string."""
        dtype = getattr(x, "dtype", np.result_type(type(x)))
        if jax_compat.is_key_dtype(dtype) or not jax.dtypes.issubdtype(dtype, np.inexact):
            return ""
        parts = [shard.data for shard in x.addressable_shards] if isinstance(x, jax.Array) else [x]
        with switched_off():
            if self._nans and any(bool(jnp.isnan(part).any()) for part in parts):
                return "nan"
            return "inf" if self._infs and any(bool(jnp.isinf(part).any()) for part in parts) else ""

    def first(self, jaxpr: Any, args: Sequence[Any], stack: str) -> tuple[Any, str, str] | None:
        """(equation, name stack, nan or inf) of the first result that is not finite."""
        location = self._run(jaxpr, args, stack)
        return location if isinstance(location, tuple) else None

    def _run(self, jaxpr: Any, args: Sequence[Any], stack: str) -> tuple[Any, str, str] | list[Any]:
        """The results of a jaxpr, constants first among `args`, or what `first` gives."""
        env: dict[Any, Any] = dict(zip((*jaxpr.constvars, *jaxpr.invars), args, strict=True))

        def read(atom: Any) -> Any:
            return atom.val if isinstance(atom, jax_compat.Literal) else env[atom]

        for eqn in jaxpr.eqns:
            operands = [read(v) for v in eqn.invars]
            out = jax_compat.bind(eqn, operands)
            kind = next(filter(None, map(self.at, out)), "")
            if kind and not any(map(self.at, operands)):
                full_stack = stack_of(eqn, stack)
                return self._inside(eqn, operands, full_stack) or (eqn, full_stack, kind)
            env.update(zip(eqn.outvars, out, strict=True))
        return [read(v) for v in jaxpr.outvars]

    def _inside(self, eqn: Any, operands: Sequence[Any], stack: str) -> tuple[Any, str, str] | None:
        """The operation within an equation that contains others; None where there is none, or none is found."""
        name, params = eqn.primitive.name, eqn.params
        if name == "scan":
            return self._inside_scan(params, operands, stack)
        if name == "cond":
            branch = params["branches"][int(operands[0])]
            return self.first(jax_compat.open_jaxpr(branch), _with_consts(branch, operands[1:]), stack)
        called = jax_compat.called_jaxpr(eqn)
        if called is None:
            return None
        return self.first(jax_compat.open_jaxpr(called), _with_consts(called, operands), stack)

    def _inside_scan(self, params: Any, operands: Sequence[Any], stack: str) -> tuple[Any, str, str] | None:
        num_consts, num_carry = jax_compat.scan_counts(params)
        consts, carry = list(operands[:num_consts]), list(operands[num_consts : num_consts + num_carry])
        xs, body = operands[num_consts + num_carry :], params["jaxpr"]
        order = range(params["length"])
        for i in reversed(order) if params["reverse"] else order:
            step = self._run(
                jax_compat.open_jaxpr(body), _with_consts(body, [*consts, *carry, *(x[i] for x in xs)]), stack
            )
            if isinstance(step, tuple):
                return step
            carry = step[:num_carry]
        return None


def _with_consts(jaxpr: Any, operands: Sequence[Any]) -> list[Any]:
    return [*jax_compat.jaxpr_consts(jaxpr), *operands]
