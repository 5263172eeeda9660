"""What every pipeline of a step holds through its micro-batches, and whether the devices of a cluster can."""

from __future__ import annotations

from autopar.common.units import text_of_bytes
from autopar.hardware.cluster import Cluster
from autopar.hardware.cluster_parts import memory_shares
from autopar.ir.graph import OpGraph
from autopar.passes.assign_stages import sums_in_place


def held_bytes(graph: OpGraph) -> int:
    """Bytes that all devices together hold through the last micro-batch, however its layers are cut into stages and
    sharded: the state, which the update reads, and the sums of the micro-batches before, if there are any.
    """
    state = (v for position, v in enumerate(graph.block.inputs) if position not in graph.batch)
    sums = sums_in_place(graph) if graph.num_microbatches > 1 else ()
    return sum(graph.values[v].nbytes for v in (*state, *sums))


def why_too_large(graph: OpGraph, cluster: Cluster, limit_bytes: int) -> str | None:
    """Why no pipeline of this graph fits into `limit_bytes` on each device (of the smallest kind); None where one may
    fit.
    """
    of_parts = zip(cluster.parts, memory_shares(cluster), strict=True)
    in_devices = sum(part.num_devices * share for part, share in of_parts) or cluster.num_devices
    held = held_bytes(graph)
    if held <= limit_bytes * in_devices:
        return None
    return (
        f"the state and the sums of {graph.num_microbatches} micro-batches, split over all devices, take "
        f"{text_of_bytes(held / in_devices)} on each"
    )
