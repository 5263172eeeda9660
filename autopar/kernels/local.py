"""The equations that run on each device's part by themselves, and what they do there."""

from __future__ import annotations

from typing import Any

from autopar.ir.graph import Rule
from autopar.ir.primitives import multiplications
from autopar.kernels.cudnn import cudnn_rule, cudnn_work, is_cudnn_attention
from autopar.kernels.custom_partitions import custom_partition_rule, is_custom_partition
from autopar.kernels.grouped import GroupedAdmits, grouped_admits, grouped_rule, is_grouped_product
from autopar.kernels.islands import IslandAdmits, is_island, island_of, island_rule
from autopar.kernels.opaque import is_opaque, opaque_rule, opaque_work
from autopar.kernels.operation import Admits, is_kernel, rule_of
from autopar.kernels.work import KernelWork, flops_in


def runs_locally(eqn: Any) -> bool:
    """Whether an equation is a program for one device's part, which the partitioner cannot split."""
    if eqn is None:
        return False
    known = is_grouped_product(eqn) or is_cudnn_attention(eqn)
    return known or is_kernel(eqn) or is_opaque(eqn) or is_island(eqn) or is_custom_partition(eqn)


def leaves_summands(eqn: Any) -> bool:
    """Whether each device's result is a summand as its own program makes it, where it sums over a split factor."""
    return is_kernel(eqn) or is_grouped_product(eqn)


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
    if is_cudnn_attention(eqn):
        return cudnn_rule(eqn)
    return opaque_rule(eqn) if is_opaque(eqn) else None


def admits(eqn: Any) -> Admits | IslandAdmits | GroupedAdmits | None:
    """What a strategy of such an equation is asked before it is one; None where every strategy is."""
    if is_kernel(eqn):
        return Admits(eqn.params["function"], tuple(v.aval.dtype for v in eqn.invars))
    if eqn is not None and is_grouped_product(eqn):
        return grouped_admits(eqn)
    return IslandAdmits(island_of(eqn)) if is_island(eqn) else None


def local_work(eqn: Any) -> KernelWork:
    """What it does on whole arrays."""
    if is_kernel(eqn):
        work: KernelWork = eqn.params["function"].work([v.aval for v in eqn.invars])
        return work
    if is_island(eqn):
        return KernelWork(flops=island_of(eqn).shards * flops_in(eqn.params["jaxpr"]))
    if is_custom_partition(eqn):
        return KernelWork(flops=flops_in(eqn.params["call"]))
    if is_grouped_product(eqn):
        return KernelWork(flops=2.0 * (multiplications(eqn) or 0.0))
    if is_cudnn_attention(eqn):
        return cudnn_work(eqn)
    return opaque_work(eqn)
