"""Which devices' keys come to a device in a ring, and in which order positions lie on the devices.

Under a causal mask, positions in order would leave the last device with all steps and the first with one. Of 2 p parts
of the positions each device therefore takes one from the front and the one as far from the end (Brandon et al.,
"Striped Attention", 2023; the order of zigzag in Zhu, "ring-flash-attention", 2024). Under a window, positions stay in
order, and keys go only as far as the window reaches, unless fewer scores are computed in the balanced order.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
from jax import lax

from autopar.attention.form import AttentionForm
from autopar.attention.visibility import visibility


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RingOrder:
    """Steps of a ring of `count` devices beside that of a device's own keys, on all devices the same.

    In `ahead` steps come the keys of the devices before, the next one first (all others' where that is count - 1); in
    `behind` steps those of the devices behind. `balanced`: each device has a part from the front and one from the end.
    """

    count: int
    ahead: int
    behind: int = 0
    balanced: bool = False

    @property
    def steps(self) -> int:
        return self.ahead + self.behind

    @property
    def is_whole(self) -> bool:
        """Whether the keys of all devices come."""
        return self.ahead == self.count - 1

    @property
    def computed_share(self) -> float:
        """The part of all blocks of scores that is computed: of a balanced ring half of each step but the first."""
        return (1.0 + self.steps / (2.0 if self.balanced else 1.0)) / self.count


@functools.cache
def ring_order(form: AttentionForm, positions: int, count: int) -> RingOrder:
    """The order with the fewest scores, then the fewest steps. `positions` are those of a device.

    Where all that a row has may be hidden by a number, that is what its weights are of: all scores are computed.
    """
    whole = RingOrder(count=count, ahead=count - 1)
    if count == 1 or not (seen := visibility(form, positions * count)).leaves_rows:
        return whole
    # Between positions of devices j apart lie from j - 1 to j + 1 devices' positions, exclusive.
    reach = [((j - 1) * positions + 1, (j + 1) * positions - 1) for j in range(1, count)]
    ahead = max((j for j, (near, far) in enumerate(reach, 1) if seen.between(near, far)), default=0)
    behind = max((j for j, (near, far) in enumerate(reach, 1) if seen.between(-far, -near)), default=0)
    in_order = RingOrder(count=count, ahead=ahead, behind=behind) if ahead + behind < count - 1 else whole
    if behind or positions % 2:
        return in_order
    balanced = dataclasses.replace(whole, balanced=True)
    return min(in_order, balanced, key=lambda order: (order.computed_share, order.steps))


def exchanges(count: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """(source, target) of the first half of each of so many devices' positions, and of the second.

    Of 2 p parts, device i has parts 2 i and 2 i + 1 and takes i and 2 p - 1 - i, of which one has an even number.
    """

    def taker(part: int) -> int:
        return min(part, 2 * count - 1 - part)

    return [(i, taker(2 * i)) for i in range(count)], [(i, taker(2 * i + 1)) for i in range(count)]


@dataclasses.dataclass(frozen=True, slots=True)
class Positions:
    """Runs of equally many neighbouring positions: where each begins, which may be known on the device only."""

    starts: tuple[Any, ...]
    length: int

    @staticmethod
    def of_device(order: RingOrder, device: Any, positions: int) -> Positions:
        """Those that a device has while the ring runs."""
        if not order.balanced:
            return Positions((device * positions,), positions)
        half = positions // 2
        return Positions((device * half, (2 * order.count - 1 - device) * half), half)

    def numbers(self) -> Any:
        return jnp.concatenate([start + jnp.arange(self.length) for start in self.starts])

    def taken(self, array: Any, axis: int) -> Any:
        """Of an array of all positions those of the runs."""
        if array.shape[axis] == self.length * len(self.starts):
            return array
        parts = [lax.dynamic_slice_in_dim(array, start, self.length, axis) for start in self.starts]
        return jnp.concatenate(parts, axis) if len(parts) > 1 else parts[0]

    def half(self, which: int) -> Positions:
        """The first (0) or the second (1) of two runs."""
        return Positions(self.starts[which : which + 1], self.length)
