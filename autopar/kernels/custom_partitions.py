"""Calls of `jax.experimental.custom_partitioning`: their sharding rule (in Shardy's notation) is the operation's rule.

XLA asks the call's own function how it is split, once the layouts around it are those of the plan. Over a reduction
factor that function adds up the results. Factors that need replication or are permuted are whole.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from autopar.common import jax_compat, jax_local
from autopar.ir.graph import Factor, FactorKind, Rule
from autopar.sharding.rules import replicated_rule

NAME = "custom_partitioning"
_BATCHING = "…"  # at the front of a mapping: as many factors as there are dimensions more


def is_custom_partition(eqn: Any) -> bool:
    return eqn is not None and eqn.primitive.name == NAME


def custom_partition_rule(eqn: Any) -> Rule:
    """The factors that the call's sharding rule names; a rule that splits nothing, with a note, where it has none."""
    line = jax_compat.source_line(eqn)
    try:
        said = jax_local.sharding_rule_of(eqn)
    except Exception as error:  # the user's own code
        return replicated_rule(eqn, f"the sharding_rule of custom_partitioning at {line} raised {type(error).__name__}")
    if said is None:
        return replicated_rule(eqn, f"custom_partitioning at {line} has no sharding_rule; def_partition takes one")
    mappings = (*said.operand_mappings, *said.result_mappings)
    arrays = [
        _dimensions(mapping, v.aval.shape) for mapping, v in zip(mappings, (*eqn.invars, *eqn.outvars), strict=True)
    ]
    sizes = {str(name): int(n) for name, n in said.factor_sizes.items()}
    for names, v in zip(arrays, (*eqn.invars, *eqn.outvars), strict=True):
        sizes |= {dim[0]: n for dim, n in zip(names, v.aval.shape, strict=True) if len(dim) == 1}
    made = {name for names in arrays[len(eqn.invars) :] for dim in names for name in dim}
    fixed = {*said.need_replication_factors, *said.permutation_factors}

    def kind(name: str) -> FactorKind:
        if name in fixed or (name in made) == (name in said.reduction_factors):
            return FactorKind.FIXED
        return FactorKind.PASS if name in made else FactorKind.SUM

    number: dict[str, int] = {}
    factors: list[Factor] = []

    def dims(names: Sequence[tuple[str, ...]]) -> tuple[tuple[int, ...], ...]:
        out = []
        for dim in names:
            row = [name for name in dim if sizes[name] > 1]
            for name in row:
                if name not in number:
                    number[name] = len(factors)
                    factors.append(Factor(sizes[name], kind(name)))
            out.append(tuple(number[name] for name in row))
        return tuple(out)

    described = [dims(names) for names in arrays]
    for rows, v in zip(described, (*eqn.invars, *eqn.outvars), strict=True):
        if any(math.prod(factors[f].size for f in row) != n for row, n in zip(rows, v.aval.shape, strict=True)):
            return replicated_rule(eqn, f"the sharding_rule of custom_partitioning at {line} is not of these shapes")
    return Rule(tuple(factors), tuple(described[: len(eqn.invars)]), tuple(described[len(eqn.invars) :]))


def _dimensions(mapping: Sequence[Any], shape: Sequence[int]) -> list[tuple[str, ...]]:
    """The names of the factors of each dimension."""
    names = [(str(entry),) if isinstance(entry, str) else tuple(map(str, entry)) for entry in mapping]
    if names and names[0][0].startswith(_BATCHING):
        batching = names[0][0]
        rest = names[1:]
        return [*((f"{batching}{i}",) for i in range(len(shape) - len(rest))), *rest]
    return names
