"""Calls of kernels without a rule: of their factors only those are known that `jax.vmap` gave to a Pallas call.

Every device runs them on arrays that are whole but for these.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autopar.common import jax_compat
from autopar.ir.graph import Factor, FactorKind, Rule
from autopar.kernels.vmapped_calls import mapped_axes
from autopar.sharding.rules import Dims

# Primitives that call code which XLA does not see into, and what users know them by.
CALLS = {"pallas_call": "a Pallas call", "ffi_call": "a foreign function (jax.ffi)", "tpu_custom_call": "a Mosaic call"}


def is_opaque(eqn: Any) -> bool:
    return eqn is not None and eqn.primitive.name in CALLS


def opaque_rule(eqn: Any) -> Rule:
    """Dimensions of `jax.vmap` may be split, with a note that says how to have more of it split."""
    axes = [axis for axis in mapped_axes(eqn) if axis.size > 1]
    factors = [Factor(axis.size, FactorKind.PASS) for axis in axes]

    def dims(var: Any, mapped: Sequence[int | None]) -> Dims:
        out: list[tuple[int, ...]] = []
        for d, n in enumerate(var.aval.shape):
            if d in mapped:
                out.append((mapped.index(d),))
            elif n == 1:
                out.append(())
            else:
                factors.append(Factor(n, FactorKind.FIXED))
                out.append((len(factors) - 1,))
        return tuple(out)

    operands = tuple(dims(v, [axis.operands[i] for axis in axes]) for i, v in enumerate(eqn.invars))
    results = tuple(dims(v, [axis.results[i] for axis in axes]) for i, v in enumerate(eqn.outvars))
    line = jax_compat.source_line(eqn)
    runs = "is split over dimensions of jax.vmap alone" if axes else "runs whole on every device"
    note = (
        f"{CALLS[eqn.primitive.name]} without a rule{f', at {line},' if line else ''} {runs}; "
        "autopar.kernel(fun, rule=...) around the function that calls it says how it may be split"
    )
    return Rule(tuple(factors), operands, results, note)
