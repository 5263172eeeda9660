"""What holds the memory of a device, in the record of a plan."""

from __future__ import annotations

import dataclasses
import enum


class MemoryKind(enum.Enum):
    """The purpose of memory."""

    PARAMETER = "parameters"  # state that the forward pass reads
    OPTIMIZER = "optimizer state"  # other state: moments, master copies
    BATCH = "batch"
    OTHER = "other arguments and results"
    GRADIENT = "gradients"  # what the backward pass makes for the update, and its sums over micro-batches
    SAVED = "saved for backward"  # made by the forward pass, read by the backward pass
    COLLECTIVE = "collective buffers"  # what is gathered, or on its way from one layout to another
    NEW_STATE = "new state"  # beside the state that it replaces
    TEMPORARY = "temporaries"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MemoryHolder:
    """Equal arrays on one device, `count` of them and `nbytes` in total."""

    name: str
    kind: MemoryKind
    nbytes: int
    count: int = 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """Bytes on one device of a stage by purpose.

    Attributes:
        throughout: Memory held from the start to the end of a step: state, the batch, sums over micro-batches.
        at_peak: All memory at the peak.
        largest: The largest holders at the peak, largest first.
        course: The most bytes in each of equal parts of the program, in its order; of a step in one program only, as a
            pipeline's timeline has them by seconds.
    """

    throughout: dict[MemoryKind, int]
    at_peak: dict[MemoryKind, int]
    largest: tuple[MemoryHolder, ...]
    course: tuple[int, ...] = ()
