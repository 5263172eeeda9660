"""Copies between the memories of devices and hosts, as the decisions of a plan ask for them."""

from __future__ import annotations

from autopar.ir.graph import OpGraph
from autopar.lowering.activation_offload import with_saved_in_host
from autopar.lowering.decisions import ShardingPlan
from autopar.lowering.host_offload import with_state_in_host
from autopar.lowering.instructions import LoweredBlock
from autopar.lowering.stack_offload import with_stacks_in_host
from autopar.passes.saved_arrays import offloaded_by_policy


def with_host_copies(graph: OpGraph, lowered: LoweredBlock, sharding: ShardingPlan) -> LoweredBlock:
    """The same step with some of its state in the memory of the host before and after it, and some of what it saves for
    the backward pass there in between.
    """
    if sharding.in_host:
        lowered = with_state_in_host(graph, lowered, sharding.in_host, sharding.mesh)
    if sharding.saved_in_host:
        lowered = with_stacks_in_host(lowered, sharding.saved_in_host)
        by_policy = offloaded_by_policy(graph)
        lowered = with_saved_in_host(graph, lowered, sharding.saved_in_host, sharding.mesh, by_policy)
    return lowered
