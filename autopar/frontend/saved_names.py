"""A step of which the regions of `jax.checkpoint` save other named values than the code's policies say."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

import jax

from autopar.common import jax_compat
from autopar.errors import InvalidArgumentError, UnsupportedError
from autopar.frontend.callbacks import without_callbacks
from autopar.frontend.fingerprints import jaxpr_fingerprint
from autopar.ir.traced_step import TracedStep


def names_of(traced: TracedStep) -> tuple[str, ...]:
    """The names that `checkpoint_name` gives to values of a step, in alphabetical order."""
    named = (eqn for eqn in jax_compat.equations_in(traced.jaxpr) if eqn.primitive.name == jax_compat.NAME)
    return tuple(sorted({str(eqn.params["name"]) for eqn in named if not jax_compat.is_in_host_memory(eqn)}))


def checked_names(traced: TracedStep, names: Sequence[str]) -> tuple[str, ...]:
    """Raises: InvalidArgumentError for names that no value of the step has."""
    known = names_of(traced)
    if unknown := [name for name in names if name not in known]:
        raise InvalidArgumentError(
            where=f"Search(remat=...) of {traced.name}",
            expected=f"names that jax.ad_checkpoint.checkpoint_name gives in the step: {', '.join(known) or 'none'}",
            got=", ".join(unknown),
            hint="leave them out, or name a value: x = checkpoint_name(x, 'name')",
        )
    return tuple(names)


def saving(traced: TracedStep, names: Collection[str]) -> TracedStep:
    """The step traced again, with these names saved and no others; the same function, arguments and results.

    Raises: UnsupportedError for a function whose two traces differ in more than that, or that cannot be traced again.
    """
    saved = frozenset(names)
    if traced.trace_again is None or not traced.is_pure():
        raise UnsupportedError(
            where=f"Search(remat=...) of {traced.name}",
            expected="a function that is traced again with other saved names",
            got="one that gives another computation each time",
            hint='make it pure, or leave the saved names as written: Search(remat="as written")',
        )
    with jax_compat.saved_names(saved):
        closed, removed = traced.trace_again(traced.in_avals)
    callbacks = traced.callbacks
    if callbacks:
        closed, callbacks = without_callbacks(closed)

    def retrace(avals: Sequence[jax.ShapeDtypeStruct]) -> Any:
        traced.is_pure()  # which traces the step as it is written
        with jax_compat.saved_names(saved):
            return traced.retrace(avals)

    return dataclasses.replace(
        traced,
        jaxpr=jax_compat.open_jaxpr(closed),
        constants=tuple(jax_compat.jaxpr_consts(closed)),
        placements=removed.placements,
        written=removed.written,
        callbacks=callbacks,
        fingerprint=jaxpr_fingerprint(closed),
        retrace=retrace,
        saved_names=tuple(sorted(saved)),
    )
