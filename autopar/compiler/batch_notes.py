"""Notes on a batch that is not split, though devices then do the same work: the reason, and what to do."""

from __future__ import annotations

from collections.abc import Iterator

from autopar.ir.traced_step import TracedStep
from autopar.microbatch.example_axis import loops_over_first
from autopar.microbatch.smaller_step import example_leaves
from autopar.plan import summary
from autopar.plan.schema import PlanRecord


def batch_notes(traced: TracedStep, record: PlanRecord) -> Iterator[str]:
    """A note where several devices do the same work, and the examples cannot be split over them."""
    alike, wanted = max(summary.devices_alike(record, stage) for stage in range(summary.num_stages(record)))
    leaves = [i for i in sorted(traced.batch) if traced.in_avals[i].shape]
    if traced.uneven_over and record.pipeline is None and summary.splits_batch(record):
        leaf, dim = next(iter(example_leaves(traced).items()))
        examples = traced.in_avals[leaf].shape[dim]
        most, more = -(-examples // traced.uneven_over), -(-examples // traced.uneven_over) * traced.uneven_over
        yield f"{examples} examples are split unevenly: at most {most} on a device, of which {more} take as long"
    if alike == 1 or not leaves or not all(traced.in_avals[i].size for i in leaves):
        return
    by_loop = loops_over_first(traced) and not any(traced.example_dims.values())
    if by_loop or not any(traced.example_dim(i) is not None for i in leaves):
        reason = "a loop goes over its first dimension" if by_loop else "its leaves are said to hold no examples"
        yield (
            f"{summary.BATCH_WHOLE}: {reason}, and {alike} devices do the same work; name the dimension that counts "
            "examples: parallelize(batch_axis=...)"
        )
        return
    leaf, dim = next(iter(example_leaves(traced).items()))
    parts = 1 if record.pipeline is None else record.pipeline.num_microbatches
    each = traced.in_avals[leaf].shape[dim] // parts
    if each % wanted:
        of_each = f" of each of {parts} micro-batches" if parts > 1 else ""
        fewer, more = each // wanted * wanted * parts, -(-each // wanted) * wanted * parts
        yield (
            f"{summary.BATCH_WHOLE} over {wanted} devices, since {wanted} does not divide {each} examples{of_each}; "
            f"{alike} devices do the same work. Use a batch of {f'{fewer} or {more}' if fewer else more}, to which "
            "examples may be added that have weight zero in the loss"
        )
