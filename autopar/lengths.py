"""Sequences of several lengths as batches: padded to the longest, in buckets of lengths, or packed into rows."""

from __future__ import annotations

import bisect
import collections
import dataclasses
from collections.abc import Sequence

import numpy as np

from autopar.errors import InvalidArgumentError

# Lengths are padded to multiples of this: a tile of attention kernels and of matrix units.
LENGTH_UNIT = 128


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FilledRow:
    """One way to make batches of a sample of sequences, on a cluster.

    Attributes:
        way: "padded", "buckets" or "packed".
        lengths: Of the rows of a batch, of each bucket.
        batches: Rows of a batch, of each bucket.
        step_times_s: Of a step, of each bucket.
        padding: The share of all positions that hold no token.
        tokens_per_s: Tokens of sequences, without padding, a second of the whole cluster.
    """

    cluster: str
    way: str
    lengths: tuple[int, ...]
    batches: tuple[int, ...]
    step_times_s: tuple[float, ...]
    padding: float
    tokens_per_s: float


def checked_lengths(where: str, lengths: Sequence[int]) -> np.ndarray:
    """The lengths as an array of integers. Raises: InvalidArgumentError where one is none, or is not positive."""
    try:
        found = np.asarray(lengths)
    except ValueError:  # lists of several lengths
        found = np.empty((0, 0))
    is_row = found.ndim == 1 and found.size > 0
    if is_row and np.issubdtype(found.dtype, np.integer) and found.min() > 0:
        return found.astype(np.int64)
    numbers = f"{found.dtype} numbers, the least {found.min()}" if is_row else "none in a row"
    raise InvalidArgumentError(
        where=where,
        expected="the lengths of some sequences of the data, whole positive numbers",
        got=numbers,
        hint="give the tokens of each sequence of a sample: lengths=[len(tokens) for tokens in sample]",
    )


def rounded_up(length: int) -> int:
    return -(-length // LENGTH_UNIT) * LENGTH_UNIT


def bucket_lengths(lengths: np.ndarray, most: int) -> tuple[int, ...]:
    """The lengths of at most so many buckets, each of which takes the sequences up to its length, with the least
    padding, in rising order. The last is that of the longest sequence, rounded up.

    Exact: of all divisions of the rounded lengths into runs, by dynamic programming.
    """
    sizes, counts = np.unique(-(-lengths // LENGTH_UNIT) * LENGTH_UNIT, return_counts=True)
    num, up_to = len(sizes), np.concatenate([[0], np.cumsum(counts)])
    # By the number of lengths that buckets so far take, their fewest positions; and where the last of them begins.
    best, begins = np.array([0.0] + [np.inf] * num), list[np.ndarray]()
    for _ in range(min(most, num)):
        positions = best[:-1, None] + np.where(np.tri(num).T, (up_to[None, 1:] - up_to[:-1, None]) * sizes, np.inf)
        begins.append(positions.argmin(axis=0))
        best = np.concatenate([[np.inf], positions.min(axis=0)])
    found: list[int] = []
    end = num
    for begin in reversed(begins):
        found.append(int(sizes[end - 1]))
        end = int(begin[end - 1])
    return tuple(reversed(found))


def packed_rows(lengths: np.ndarray, row: int) -> int:
    """The rows of so many positions that all sequences fill, each whole in one of them: the longest first, each into
    the row with the least room that takes it. At most 11/9 of the fewest (Johnson et al., SIAM J. Comput. 3(4), 1974).
    """
    count, rooms, rows_with = 0, list[int](), collections.Counter[int]()  # distinct rooms that some row has, sorted
    for length in np.sort(lengths)[::-1].tolist():
        at = bisect.bisect_left(rooms, length)
        room = row if at == len(rooms) else rooms[at]
        if at == len(rooms):
            count += 1
        else:
            rows_with[room] -= 1
            if not rows_with[room]:
                rooms.pop(at)
        left = room - length
        if left and not rows_with[left]:
            bisect.insort(rooms, left)
        rows_with[left] += bool(left)
    return count
