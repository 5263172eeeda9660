"""The equations that run on each device's part by themselves, and what they do there."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from autopar.common import jax_compat, jax_local
from autopar.ir.graph import Factor, FactorKind, Rule
from autopar.ir.primitives import multiplications
from autopar.ir.rules import replicated_rule
from autopar.ops.kernels.cudnn import cudnn_rule, cudnn_work, is_cudnn_attention
from autopar.ops.kernels.grouped import GroupedAdmits, grouped_admits, grouped_rule, is_grouped_product
from autopar.ops.kernels.islands import IslandAdmits, is_island, island_of, island_rule
from autopar.ops.kernels.known import is_opaque, opaque_rule, opaque_work
from autopar.ops.kernels.operation import Admits, DenseWork, KernelWork, dense_work, flops_in, is_kernel, rule_of
from autopar.ops.kernels.scaled import is_scaled_product, scaled_rule

# Calls of `jax.experimental.custom_partitioning`: their sharding rule (in Shardy's notation) is the operation's rule.
#
# XLA asks the call's own function how it is split, once the layouts around it are those of the plan. Over a reduction
# factor that function adds up the results. Factors that need replication or are permuted are whole.

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

    described = [(names, v.aval.shape) for names, v in zip(arrays, (*eqn.invars, *eqn.outvars), strict=True)]
    if any(math.prod(sizes[x] for x in dim) != n for array in described for dim, n in zip(*array, strict=True)):
        return replicated_rule(eqn, f"the sharding_rule of custom_partitioning at {line} is not of these shapes")
    operands, results = described[: len(eqn.invars)], described[len(eqn.invars) :]
    return Rule.by_names(operands, results, lambda name, _: Factor(sizes[name], kind(name)))


def _dimensions(mapping: Sequence[Any], shape: Sequence[int]) -> list[tuple[str, ...]]:
    """The names of the factors of each dimension."""
    names = [(str(entry),) if isinstance(entry, str) else tuple(map(str, entry)) for entry in mapping]
    if names and names[0][0].startswith(_BATCHING):
        batching = names[0][0]
        rest = names[1:]
        return [*((f"{batching}{i}",) for i in range(len(shape) - len(rest))), *rest]
    return names


# All of them


def runs_locally(eqn: Any) -> bool:
    """Whether an equation is a program for one device's part, which the partitioner cannot split."""
    if eqn is None:
        return False
    known = is_grouped_product(eqn) or is_scaled_product(eqn) or is_cudnn_attention(eqn)
    return known or is_kernel(eqn) or is_opaque(eqn) or is_island(eqn) or is_custom_partition(eqn)


def leaves_summands(eqn: Any) -> bool:
    """Whether each device's result is a summand as its own program makes it, where it sums over a split factor."""
    return is_kernel(eqn) or is_grouped_product(eqn) or is_scaled_product(eqn)


def local_rule(eqn: Any) -> Rule | None:
    """The rule of an equation that is a program for one device's part; None for others.

    Raises: UnsupportedError for islands that are not taken.
    """
    if is_kernel(eqn):
        return rule_of(eqn)
    if is_island(eqn):
        return island_rule(eqn)
    if is_custom_partition(eqn):
        return custom_partition_rule(eqn)
    if is_grouped_product(eqn):
        return grouped_rule(eqn)
    if is_scaled_product(eqn):
        return scaled_rule(eqn)
    if is_cudnn_attention(eqn):
        return cudnn_rule(eqn)
    return opaque_rule(eqn) if is_opaque(eqn) else None


def admits(eqn: Any) -> Admits | IslandAdmits | GroupedAdmits | None:
    """What a strategy of such an equation is asked before it is one; None where every strategy is."""
    if is_kernel(eqn):
        function = eqn.params["function"]
        return None if function.takes_any_part else Admits(function, tuple(v.aval.dtype for v in eqn.invars))
    if eqn is not None and is_grouped_product(eqn):
        return grouped_admits(eqn)
    return IslandAdmits(island_of(eqn)) if is_island(eqn) else None


def busiest_of(eqn: Any, count: int) -> float:
    """What the busiest of `count` devices that share a kernel's exchanged factor does, as a multiple of its share."""
    return float(eqn.params["function"].busiest(count)) if is_kernel(eqn) else 1.0


def local_work(eqn: Any) -> KernelWork:
    """What it does on whole arrays."""
    if is_kernel(eqn):
        work: KernelWork = eqn.params["function"].work([v.aval for v in eqn.invars])
        return work
    if is_island(eqn):
        return KernelWork(flops=island_of(eqn).shards * flops_in(eqn.params["jaxpr"]))
    if is_custom_partition(eqn):
        return KernelWork(flops=flops_in(eqn.params["call"]))
    if is_grouped_product(eqn) or is_scaled_product(eqn):
        return KernelWork(flops=2.0 * (multiplications(eqn) or 0.0))
    if is_cudnn_attention(eqn):
        return cudnn_work(eqn)
    return opaque_work(eqn)


def dense_work_of(eqn: Any, platform: str, split: int = 1) -> DenseWork:
    """Of whole arrays, what `local_work` has of its ragged products once and devices do with each group's matrix; of
    those in blocks of rows, what one of `split` devices does.
    """
    if is_kernel(eqn):
        work: DenseWork = eqn.params["function"].dense_work([v.aval for v in eqn.invars], platform, split)
        return work
    return dense_work((eqn,), platform, split)
