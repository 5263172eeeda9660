"""What the plain-JAX twin of a kernel says about its factors: which of them each part computes by itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from autopar.ir.graph import FactorKind, Rule
from autopar.kernels.factors import KernelRule
from autopar.sharding.rules import rule_of_parts


def agreed(rule: KernelRule, twin: Callable[..., tuple[Any, ...]], avals: Sequence[Any]) -> KernelRule:
    """The rule with every factor whole that the twin does not keep apart: what it sums over, takes the largest of, or
    numbers (positions in a mask). What the user's rule sums over is left to the kernel.
    """
    known = rule_of_parts(twin, avals)
    kept = {name for name in rule.split - rule.summed if _is_kept(name, rule, known)}
    whole = frozenset(rule.names - kept - rule.summed) | rule.whole
    return dataclasses.replace(rule, whole=whole)


def _is_kept(name: str, rule: KernelRule, known: Rule) -> bool:
    """Whether a name's dimensions are one factor of the twin, which is passed on to every result."""
    arrays = zip((*rule.operands, *rule.results), (*known.operands, *known.results), strict=True)
    places = {factors for names, dims in arrays for x, factors in zip(names, dims, strict=True) if x == name}
    if len(places) != 1:
        return False
    (factors,) = places
    in_results = all(name in names for names in rule.results)
    return in_results and len(factors) <= 1 and all(known.factors[f].kind is FactorKind.PASS for f in factors)
