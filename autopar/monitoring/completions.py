"""When the steps of a run end on the devices: a thread waits for their metrics, so that the training loop does not."""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepCall:
    """A step as the loop called it. Times are those of `time.perf_counter`.

    Attributes:
        called_s: When its program was given to the devices; None where that is not known.
        data_s: The time that the loop waited for its batch.
        other_s: The time that went to something else since the step before: a checkpoint, an evaluation, a new plan.
    """

    step: int
    called_s: float | None
    data_s: float
    other_s: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A step that has ended."""

    call: StepCall
    ended_s: float
    metrics: Mapping[str, float]


class Completions:
    """Hands on the end of each step, in order, from a thread of its own."""

    def __init__(self, ended: Callable[[Completion], None]) -> None:
        self._ended = ended
        self._waiting: queue.SimpleQueue[tuple[StepCall, Any] | None] = queue.SimpleQueue()
        self._failed: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="autopar monitor", daemon=True)
        self._thread.start()

    def add(self, call: StepCall, metrics: Any) -> None:
        """A step that was called, and what it returned for the log. Raises: what an earlier `ended` raised."""
        if self._failed is not None:
            failed, self._failed = self._failed, None
            raise failed
        self._waiting.put((call, metrics))

    def close(self, timeout_s: float | None = None) -> None:
        """Waits for the steps that were called, at most `timeout_s`. Raises: what `ended` raised."""
        if self._thread.is_alive():
            self._waiting.put(None)
            self._thread.join(timeout_s)
        if self._failed is not None:
            failed, self._failed = self._failed, None
            raise failed

    def _run(self) -> None:
        while (item := self._waiting.get()) is not None:
            call, metrics = item
            for leaf in jax.tree.leaves(metrics):
                _wait(leaf)
            ended_s = time.perf_counter()
            try:
                self._ended(Completion(call=call, ended_s=ended_s, metrics=numbers_of(metrics)))
            except Exception as error:  # raised where the loop waits
                self._failed = error


def _wait(leaf: Any) -> None:
    """Waits for an array. One that is a part of the state may be donated to the next step meanwhile; and of a step that
    failed the loop sees the error.
    """
    if isinstance(leaf, jax.Array):
        with contextlib.suppress(RuntimeError):
            leaf.block_until_ready()


def numbers_of(metrics: Any) -> dict[str, float]:
    """The scalars of a tree by their paths (`loss`, `norms/gradients`); other leaves are left out."""
    found = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(metrics)[0]:
        value = _scalar(leaf)
        if value is not None:
            found[jax.tree_util.keystr(path, simple=True, separator="/") or "loss"] = value
    return found


def _scalar(leaf: Any) -> float | None:
    """A number, or None for what is none, is gone, or lies on the devices of other processes only."""
    if isinstance(leaf, jax.Array):
        if leaf.shape or jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.extended):
            return None
        if not leaf.is_fully_addressable:
            if not leaf.is_fully_replicated or not leaf.addressable_shards:
                return None
            leaf = leaf.addressable_data(0)
    elif not isinstance(leaf, (bool, int, float, np.generic)):
        return None
    try:
        return None if np.iscomplexobj(leaf) else float(leaf)
    except RuntimeError:  # it was donated to a later step, or its own has failed
        return None
