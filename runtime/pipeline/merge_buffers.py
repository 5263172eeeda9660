"""A pipeline with fewer buffers: those produced, read, sent and freed alike are merged.

For the simulation, the hundred arrays that a forward task keeps for its backward task are one buffer of their total
size. The order of runs and Sends, their times and the memory are those of the pipeline itself.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

from autopar.runtime.pipeline.program import Buffer, Pipeline, Task, Transfer


def merged(pipeline: Pipeline, transfer_s: Sequence[float]) -> tuple[Pipeline, tuple[float, ...]]:
    """(the smaller pipeline, seconds of each of its transfers). Tasks keep their numbers."""
    groups = groups_of(pipeline)
    buffers: list[Buffer | None] = [None] * (max(groups, default=-1) + 1)
    for b, g in zip(pipeline.buffers, groups, strict=True):
        before = buffers[g]
        nbytes = b.nbytes + (before.nbytes if before is not None else 0)
        name = before.name if before is not None else b.name
        buffers[g] = Buffer(name=name, mesh=b.mesh, nbytes=nbytes, repeats=b.repeats)
    tasks = []
    for task in pipeline.tasks:
        inputs = tuple(dict.fromkeys(groups[b] for b in task.inputs))
        donated = {groups[task.inputs[i]] for i in task.donated}
        tasks.append(
            Task(
                name=task.name,
                stage=task.stage,
                mesh=task.mesh,
                kind=task.kind,
                inputs=inputs,
                outputs=tuple(dict.fromkeys(groups[b] for b in task.outputs)),
                donated=tuple(i for i, g in enumerate(inputs) if g in donated),
                index=task.index,
            )
        )
    sent: dict[tuple[int, int], list[float]] = {}
    for transfer, seconds in zip(pipeline.transfers, transfer_s, strict=True):
        total = sent.setdefault((groups[transfer.source], groups[transfer.target]), [0.0, 0.0])
        total[0] += transfer.nbytes
        total[1] += seconds
    smaller = Pipeline(
        buffers=tuple(b for b in buffers if b is not None),
        tasks=tuple(tasks),
        transfers=tuple(Transfer(source=a, target=b, nbytes=int(n)) for (a, b), (n, _) in sent.items()),
        inputs=tuple(dict.fromkeys(groups[b] for b in pipeline.inputs)),
        outputs=tuple(dict.fromkeys(groups[b] for b in pipeline.outputs)),
        kept=tuple(dict.fromkeys(groups[b] for b in pipeline.kept)),
    )
    return smaller, tuple(seconds for _, seconds in sent.values())


def groups_of(pipeline: Pipeline) -> tuple[int, ...]:
    """For each buffer the one that it is part of in the smaller pipeline.

    Buffers are one that are made, read and donated by the same tasks, copied from one and copied to the same: parts of
    what one task hands to two meshes are not one with parts that it hands to one of these alone.
    """
    targets: list[list[int]] = [[] for _ in pipeline.buffers]
    source: list[int | None] = [None] * len(pipeline.buffers)
    for transfer in pipeline.transfers:
        targets[transfer.source].append(transfer.target)
        source[transfer.target] = transfer.source
    groups = _numbered(_uses(pipeline))
    while True:
        finer = _numbered(
            (
                group,
                groups[copied] if (copied := source[b]) is not None else None,
                tuple(sorted({groups[target] for target in targets[b]})),
            )
            for b, group in enumerate(groups)
        )
        if finer == groups:
            return groups
        groups = finer


def _numbered(keys: Iterable[Hashable]) -> tuple[int, ...]:
    """Equal keys by the same number, in the order of their first appearance."""
    number: dict[Hashable, int] = {}
    return tuple(number.setdefault(key, len(number)) for key in keys)


def _uses(pipeline: Pipeline) -> list[Hashable]:
    """For each buffer where it lies and what tasks do with it."""
    makers: list[list[int]] = [[] for _ in pipeline.buffers]
    readers: list[list[int]] = [[] for _ in pipeline.buffers]
    donors: list[list[int]] = [[] for _ in pipeline.buffers]
    for number, task in enumerate(pipeline.tasks):
        for b in task.outputs:
            makers[b].append(number)
        for b in task.inputs:
            readers[b].append(number)
        for i in task.donated:
            donors[task.inputs[i]].append(number)
    outside = [set(pipeline.inputs), set(pipeline.outputs), set(pipeline.kept)]
    return [
        (b.mesh, b.repeats, tuple(makers[i]), tuple(readers[i]), tuple(donors[i]), *(i in those for those in outside))
        for i, b in enumerate(pipeline.buffers)
    ]
