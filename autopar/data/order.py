"""Which examples are in which batch: numbers only, the same in all processes, whatever their number.

The examples of an epoch are permuted by seed and epoch, as `torch.utils.data.DistributedSampler` does, by Grain's index
shuffle: the place of one example is computed alone, so that the order of any number of examples takes no memory.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

import numpy as np

from autopar.data.libraries import grain_library


class Tail(enum.StrEnum):
    """What happens to the last examples of an epoch, where they are fewer than a batch."""

    PAD = "pad"  # the batch is filled with the first examples of the epoch
    DROP = "drop"  # they are left out
    MASK = "mask"  # as PAD, and each batch says which of its examples count
    SHORT = "short"  # the batch is shorter


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A batch of an epoch: the numbers of its examples, of which the first `num_real` count."""

    examples: np.ndarray
    num_real: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """The order of all examples. `seed` None leaves them in the order of the source."""

    num_examples: int
    batch_size: int
    seed: int | None
    tail: Tail

    @property
    def batches_per_epoch(self) -> int:
        whole, rest = divmod(self.num_examples, self.batch_size)
        return whole + bool(rest and self.tail != Tail.DROP)

    def batch(self, epoch: int, number: int) -> Batch:
        """Batch `number` of an epoch."""
        assert 0 <= number < self.batches_per_epoch, f"there is no batch {number} in {self}"
        first = number * self.batch_size
        num_real = min(self.batch_size, self.num_examples - first)
        count = num_real if self.tail == Tail.SHORT else self.batch_size
        places = np.arange(first, first + count) % self.num_examples
        return Batch(examples=self._examples_at(epoch, places), num_real=num_real)

    def _examples_at(self, epoch: int, places: np.ndarray) -> np.ndarray:
        if self.seed is None or self.num_examples == 1:
            return places
        shuffled = _shuffled(self.num_examples, self.seed, epoch)
        return np.array([shuffled[int(place)] for place in places], np.int64)


def _shuffled(num_examples: int, seed: int, epoch: int) -> Any:
    """The numbers of examples at the places of an epoch, a `grain.MapDataset`."""
    # Grain adds the epoch to the seed, so that an epoch of one seed were the next epoch of the seed before.
    mixed = int(np.random.SeedSequence((seed, epoch)).generate_state(1)[0])
    return grain_library().MapDataset.range(num_examples).shuffle(seed=mixed)
