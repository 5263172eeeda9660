"""Whether a graph over micro-batches does the work on all examples outside of the loop."""

from __future__ import annotations

from collections.abc import Collection

from autopar.ir.graph import OpGraph, OpKind, Section, read_by
from autopar.microbatch.microbatch_analysis import is_heavy


def works_on_all_at_once(graph: OpGraph, examples: int, batch: Collection[int]) -> bool:
    """Whether products before or after the loop read the examples of the whole batch, as where these are shuffled.

    Args:
        examples: Their number: what has no such dimension is a few numbers of them all, as a mean is.
        batch: The inputs of the graph that hold them.
    """
    if graph.num_microbatches == 1:
        return False
    of_batch = {graph.block.inputs[i] for i in batch}
    for op in graph.block.ops:
        if op.section not in (Section.BEFORE, Section.AFTER) or op.kind is OpKind.SPLIT:
            continue
        read = of_batch.intersection(read_by(op))
        if not read:
            continue
        if is_heavy(op) and any(examples in graph.values[v].shape for v in read):
            return True
        of_batch.update(op.outputs)
    return False
