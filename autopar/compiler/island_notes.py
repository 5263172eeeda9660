"""Notes on the islands (`shard_map`) that a plan does not split over all of their axes."""

from __future__ import annotations

from autopar.common import jax_compat
from autopar.ir.graph import OpGraph
from autopar.kernels.islands import is_island, island_of
from autopar.lowering.decisions import ShardingPlan


def island_notes(graph: OpGraph, sharding: ShardingPlan) -> tuple[str, ...]:
    """One for each line of the step's code."""
    notes: dict[str, None] = {}
    for op in graph.ops():
        if not is_island(op.eqn):
            continue
        island, strategy = island_of(op.eqn), sharding.strategy.get(op.id)
        split = 1 if strategy is None else strategy.split
        if split < island.shards and sharding.mesh.num_devices > 1:
            sizes = ", ".join(f"{name} {n}" for name, n in island.axes)
            notes.setdefault(
                f"shard_map at {jax_compat.source_line(op.eqn)} ({sizes}) is split among {split} of its {island.shards}"
                " devices; each runs the other parts too"
            )
    return tuple(notes)
