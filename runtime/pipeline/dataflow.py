"""The dataflow of a pipeline: producers, readers and donation of each buffer, for each micro-batch.

An instance is a buffer of one micro-batch, (buffer, micro_batch), 0 where the buffer does not repeat; a node is a run
of a task, (task, micro_batch). An accumulator is a buffer that does not repeat and that repeating tasks take over and
make again: its updates are runs between its first state (an argument, or made by a BEFORE task) and its last.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from autopar.runtime.pipeline.program import Pipeline, Task, TaskKind, Transfer

Instance = tuple[int, int]
Node = tuple[int, int]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Dataflow:
    """A pipeline seen from its buffers.

    Attributes:
        maker: The task that makes a buffer (an accumulator: its first state); arguments and copies have none.
        copy_of: The transfer that makes a buffer.
        copies: The transfers that copy a buffer.
        readers: Tasks that take a buffer, updates of accumulators left out.
        updaters: Tasks that update an accumulator.
        donor: The task that takes over a buffer's memory, updates of accumulators left out.
    """

    pipeline: Pipeline
    num_microbatches: int
    maker: Mapping[int, int]
    copy_of: Mapping[int, int]
    copies: Mapping[int, tuple[int, ...]]
    readers: Mapping[int, tuple[int, ...]]
    updaters: Mapping[int, tuple[int, ...]]
    donor: Mapping[int, int]

    def instances(self, buffer: int, task: Task, micro_batch: int) -> Iterator[Instance]:
        """What a run of a task means by a buffer: one instance, or all of them."""
        if not self.pipeline.buffers[buffer].repeats:
            yield buffer, 0
        elif task.kind.repeats:
            yield buffer, micro_batch
        else:
            for i in range(self.num_microbatches):
                yield buffer, i

    def runs(self, task: int) -> Iterator[Node]:
        """All runs of a task."""
        for i in range(self.num_microbatches if self.pipeline.tasks[task].kind.repeats else 1):
            yield task, i

    def source_of(self, buffer: int) -> tuple[int, tuple[int, ...]]:
        """The buffer that a chain of copies begins with, and the transfers from there to this buffer."""
        chain: list[int] = []
        while buffer in self.copy_of:
            chain.append(self.copy_of[buffer])
            buffer = self.pipeline.transfers[chain[-1]].source
        return buffer, tuple(reversed(chain))


def dataflow(pipeline: Pipeline, num_microbatches: int) -> Dataflow:
    """Reads a pipeline's buffers off its tasks and transfers, and checks that each is made once and where it lies.

    A pipeline that is not well formed is the compiler's bug: AssertionError.
    """
    buffers, tasks = pipeline.buffers, pipeline.tasks
    maker: dict[int, int] = {}
    copy_of: dict[int, int] = {}
    copies: dict[int, list[int]] = {}
    readers: dict[int, list[int]] = {}
    updaters: dict[int, list[int]] = {}
    donor: dict[int, int] = {}
    for number, task in enumerate(tasks):
        donated = {task.inputs[i] for i in task.donated}
        for b in (*task.inputs, *task.outputs):
            assert buffers[b].mesh == task.mesh, f"task {task.name} on mesh {task.mesh} uses {_text(pipeline, b)}"
        updated = {b for b in donated if b in task.outputs and not buffers[b].repeats and task.kind.repeats}
        for b in dict.fromkeys(task.inputs):
            if b in updated:
                updaters.setdefault(b, []).append(number)
                continue
            readers.setdefault(b, []).append(number)
            if b in donated:
                assert b not in donor, f"both {tasks[donor[b]].name} and {task.name} take over {_text(pipeline, b)}"
                assert buffers[b].repeats or not task.kind.repeats, f"{task.name} takes {_text(pipeline, b)} over twice"
                donor[b] = number
        for b in task.outputs:
            if b not in updated:
                assert b not in maker, f"both {tasks[maker[b]].name} and {task.name} make {_text(pipeline, b)}"
                assert buffers[b].repeats or not task.kind.repeats, f"{task.name} makes {_text(pipeline, b)} again"
                maker[b] = number
    for number, transfer in enumerate(pipeline.transfers):
        source, target = buffers[transfer.source], buffers[transfer.target]
        assert source.repeats == target.repeats, f"{_transfer_text(pipeline, transfer)}: only one side repeats"
        assert source.mesh != target.mesh, f"{_transfer_text(pipeline, transfer)} stays on mesh {source.mesh}"
        assert transfer.target not in copy_of, f"two transfers make {_text(pipeline, transfer.target)}"
        copy_of[transfer.target] = number
        copies.setdefault(transfer.source, []).append(number)
    for b in range(len(buffers)):
        made = (b in maker) + (b in copy_of) + (b in pipeline.inputs)
        used = b in readers or b in updaters or b in copies or b in pipeline.outputs
        assert made == 1 or (not made and not used), f"{made} tasks, transfers or arguments make {_text(pipeline, b)}"
    for b in (*pipeline.inputs, *pipeline.outputs):
        assert not buffers[b].repeats, f"{_text(pipeline, b)} repeats and is an argument or a result"
    for b in pipeline.outputs:
        assert b not in donor, f"{tasks[donor[b]].name} takes over the result {_text(pipeline, b)}"
    for b in updaters:
        early = [tasks[t].name for t in readers.get(b, ()) if tasks[t].kind is not TaskKind.AFTER]
        assert not early, f"{early} read {_text(pipeline, b)} before all micro-batches are in it"
    return Dataflow(
        pipeline=pipeline,
        num_microbatches=num_microbatches,
        maker=MappingProxyType(maker),
        copy_of=MappingProxyType(copy_of),
        copies=_frozen(copies),
        readers=_frozen(readers),
        updaters=_frozen(updaters),
        donor=MappingProxyType(donor),
    )


def _frozen(lists: Mapping[int, Sequence[int]]) -> Mapping[int, tuple[int, ...]]:
    return MappingProxyType({key: tuple(value) for key, value in lists.items()})


def _text(pipeline: Pipeline, buffer: int) -> str:
    return f"buffer {buffer} ({pipeline.buffers[buffer].name}, mesh {pipeline.buffers[buffer].mesh})"


def _transfer_text(pipeline: Pipeline, transfer: Transfer) -> str:
    return f"transfer from {_text(pipeline, transfer.source)} to {_text(pipeline, transfer.target)}"
