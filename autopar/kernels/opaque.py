"""Calls of kernels without a rule: nobody knows their factors, so that every device runs them on whole arrays."""

from __future__ import annotations

from typing import Any

from autopar.common import jax_compat
from autopar.ir.graph import Rule
from autopar.sharding.rules import replicated_rule

# Primitives that call code which XLA does not see into, and what users know them by.
CALLS = {"pallas_call": "a Pallas call", "ffi_call": "a foreign function (jax.ffi)", "tpu_custom_call": "a Mosaic call"}


def is_opaque(eqn: Any) -> bool:
    return eqn is not None and eqn.primitive.name in CALLS


def opaque_rule(eqn: Any) -> Rule:
    """Nothing of it may be split, with a note that says how to change that."""
    line = jax_compat.source_line(eqn)
    return replicated_rule(
        eqn,
        f"{CALLS[eqn.primitive.name]} without a rule{f', at {line},' if line else ''} runs whole on every device; "
        "autopar.kernel(fun, rule=...) around the function that calls it says how it may be split",
    )
