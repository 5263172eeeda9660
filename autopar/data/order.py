"""Which examples are in which batch: numbers only, the same in all processes, whatever their number.

The examples of an epoch are permuted by seed and epoch, as `torch.utils.data.DistributedSampler` does. Where they are
many, by Grain's index shuffle: each place is computed alone, so that the order of all examples takes no memory.
"""

from __future__ import annotations

import dataclasses
import enum
import functools

import numpy as np

from autopar.data.libraries import grain_library

_ROUNDS = 4  # of the cipher that permutes, as Grain's own shuffle has
# The cipher's smallest block has 16 bits. For fewer numbers it is run again and again until it gives one of them, which
# takes milliseconds an example for some tens of them; so few are sorted by random keys instead.
SORTED_EXAMPLES = 2**16


class Tail(enum.StrEnum):
    """What happens to the last examples of an epoch, where they are fewer than a batch."""

    PAD = "pad"  # the batch is filled with the first examples of the epoch
    DROP = "drop"  # they are left out
    MASK = "mask"  # as PAD, and each batch says which of its examples count
    SHORT = "short"  # the batch is shorter


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

    def num_rows(self, batch: int) -> int:
        """The rows of a batch of an epoch."""
        return self.num_real(batch) if self.tail == Tail.SHORT else self.batch_size

    def num_real(self, batch: int) -> int:
        """How many of its rows count: the first ones."""
        assert 0 <= batch < self.batches_per_epoch, f"there is no batch {batch} in {self}"
        return min(self.batch_size, self.num_examples - batch * self.batch_size)

    def examples(self, epoch: int, batch: int, rows: np.ndarray) -> np.ndarray:
        """The numbers of the examples in some rows of a batch."""
        places = (batch * self.batch_size + rows) % self.num_examples
        if self.seed is None:
            return places
        if self.num_examples <= SORTED_EXAMPLES:
            return _sorted_by_key(self.num_examples, self.seed, epoch)[places]
        # Grain's `MapDataset.shuffle` adds the epoch to the seed: an epoch of one seed is the next one of the seed
        # before. Mixed, all of them differ.
        mixed = int(np.random.SeedSequence((self.seed, epoch)).generate_state(1)[0])
        shuffled = grain_library().experimental.index_shuffle
        last = self.num_examples - 1
        return np.array([shuffled(int(i), max_index=last, seed=mixed, rounds=_ROUNDS) for i in places], np.int64)


@functools.lru_cache(maxsize=4)
def _sorted_by_key(num_examples: int, seed: int, epoch: int) -> np.ndarray:
    keys = np.random.SeedSequence((seed, epoch)).generate_state(num_examples, np.uint64)
    return np.argsort(keys, kind="stable")
