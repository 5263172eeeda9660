"""The parts of a pipelined step, and the totally ordered list of instructions that runs it.

The same list is executed (by every process, each doing what is local to it) and simulated. Nothing here knows jax: a
task is a name for a compiled function, a buffer a name for the array that a task makes.
"""

from __future__ import annotations

import dataclasses

from autopar.common.records import HashedById


class TaskKind(HashedById):
    """What a task does. FORWARD, BACKWARD and WEIGHT run once a micro-batch, the others once a step."""

    BEFORE = "before"
    FORWARD = "F"
    BACKWARD = "B"
    WEIGHT = "W"
    AFTER = "after"

    @property
    def repeats(self) -> bool:
        return self in (TaskKind.FORWARD, TaskKind.BACKWARD, TaskKind.WEIGHT)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Buffer:
    """An array that lies on one mesh. `repeats`: there is one for each micro-batch, else one for the step.

    `nbytes` on one device.
    """

    name: str
    mesh: int
    nbytes: int
    repeats: bool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A function compiled for one mesh. `inputs` and `outputs` are numbers of buffers, in the function's order.

    A task that runs once and names a repeating buffer takes, or makes, all of its micro-batches: they stand one after
    the other in place of the buffer. `donated` are positions in `inputs` whose memory the task takes over: those
    buffers end with it. An accumulator is a buffer that does not repeat and that a repeating task both takes (donated)
    and makes: each run makes the next state of the same buffer. `index` orders the tasks of one kind on one stage.
    """

    name: str
    stage: int
    mesh: int
    kind: TaskKind
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    donated: tuple[int, ...] = ()
    index: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """Copies a buffer to another mesh, once for each micro-batch where it repeats (source and target alike).

    `nbytes` over the busiest link.
    """

    source: int
    target: int
    nbytes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """Everything that runs in a step, without an order. `inputs` are the step's arguments, `outputs` its results.

    Arguments are buffers that no task makes; results are never freed. `kept` are arguments that the caller holds on to,
    so that freeing them gives nothing back.
    """

    buffers: tuple[Buffer, ...]
    tasks: tuple[Task, ...]
    transfers: tuple[Transfer, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    kept: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """Runs a task. Slots hold arrays; `outputs` may be slots that `inputs` name (donated).

    `micro_batch` is 0 for a task that runs once.
    """

    task: int
    micro_batch: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Joined:
    """Runs of one mesh, one behind the other, as one program: the compiler orders all that they do.

    `task` numbers it behind the pipeline's tasks, `parts` are its runs: (task, micro-batch). `reads` and `makes` are
    the buffers and their micro-batches in the slots `inputs` and `outputs`; what the runs hand to each other, and
    nobody else reads, has no slot. `donated` are positions in `inputs`.
    """

    task: int
    parts: tuple[tuple[int, int], ...]
    reads: tuple[tuple[int, int], ...]
    inputs: tuple[int, ...]
    makes: tuple[tuple[int, int], ...]
    outputs: tuple[int, ...]
    donated: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Send:
    """Copies arrays between two meshes, all in one call: `transfers[i]` from slot `sources[i]` to `targets[i]`.

    `micro_batch` is 0 where the buffers do not repeat.
    """

    transfers: tuple[int, ...]
    micro_batch: int
    sources: tuple[int, ...]
    targets: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Free:
    """Drops the arrays of slots. Slots may be used again afterwards."""

    slots: tuple[int, ...]


Instruction = Run | Joined | Send | Free


def runs_of(instruction: Instruction) -> tuple[tuple[int, int], ...]:
    """The runs of an instruction: (task, micro-batch)."""
    if isinstance(instruction, Run):
        return ((instruction.task, instruction.micro_batch),)
    return instruction.parts if isinstance(instruction, Joined) else ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """The list. `input_slots` and `output_slots` go with the pipeline's inputs and outputs.

    A slot holds arrays of one mesh only, from the first instruction to the last.
    """

    pipeline: Pipeline
    num_microbatches: int
    instructions: tuple[Instruction, ...]
    num_slots: int
    input_slots: tuple[int, ...]
    output_slots: tuple[int, ...]

    @property
    def joined(self) -> tuple[Joined, ...]:
        """Those of the list, by number."""
        return tuple(i for i in self.instructions if isinstance(i, Joined))
