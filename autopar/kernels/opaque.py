"""Calls of kernels without a rule around them: split as the user's entry, or the grid of a Pallas call, says.

All others run on whole arrays on every device, as nobody knows their factors.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from autopar.common import jax_compat, jax_local
from autopar.ir.graph import Rule
from autopar.kernels.factors import graph_rule
from autopar.kernels.known import entry_of, grid_under, known_work, name_of
from autopar.kernels.pallas_grid import Grid, call_on_part, grid_of, grid_rule, is_pallas_call
from autopar.kernels.work import KernelWork, call_work
from autopar.sharding.rules import replicated_rule

# Primitives that call code which XLA does not see into, and what users know them by.
CALLS = {"pallas_call": "a Pallas call", "ffi_call": "a foreign function (jax.ffi)", "tpu_custom_call": "a Mosaic call"}


def is_opaque(eqn: Any) -> bool:
    return eqn is not None and eqn.primitive.name in CALLS


class _SameEquation:
    """An equation by its identity: those of jax compare by what they hold."""

    def __init__(self, eqn: Any) -> None:
        self.eqn = eqn

    def __hash__(self) -> int:
        return id(self.eqn)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _SameEquation) and other.eqn is self.eqn


def known_grid(eqn: Any) -> Grid | None:
    """How a Pallas call may be split; None where nothing of it may be. Raises: InvalidArgumentError of its entry."""
    return _grid(_SameEquation(eqn), entry_of(eqn))


@functools.lru_cache(maxsize=4096)
def _grid(same: _SameEquation, entry: Any) -> Grid | None:
    return grid_under(entry, same.eqn) if entry is not None else grid_of(same.eqn)


def opaque_rule(eqn: Any) -> Rule:
    """What an entry or the grid says; else nothing may be split, with a note that says how to change that."""
    if is_pallas_call(eqn):
        grid = known_grid(eqn)
        if grid is not None:
            return grid_rule(grid, eqn)
    elif (entry := entry_of(eqn)) is not None:
        return graph_rule(entry.rule, [v.aval for v in eqn.invars], [v.aval for v in eqn.outvars])
    line = jax_compat.source_line(eqn)
    return replicated_rule(
        eqn,
        f"{CALLS[eqn.primitive.name]} without a rule{f', at {line},' if line else ''} runs whole on every device; "
        f"autopar.kernel(fun, rule=...) around the function that calls it, or autopar.known_kernel({name_of(eqn)!r}, "
        "rule), says how it may be split",
    )


def opaque_work(eqn: Any) -> KernelWork:
    """What a call does on whole arrays."""
    return known_work(eqn, call_work(eqn))


def run_opaque(eqn: Any, shapes: Sequence[Sequence[int]], parts: Sequence[Any]) -> list[Any]:
    """A call on one device's part of its operands. `shapes`: those of its results there."""
    if is_pallas_call(eqn):
        return call_on_part(known_grid(eqn), eqn, shapes, parts)
    return jax_compat.bind(jax_local.foreign_call_of(eqn, shapes), parts)
