"""The compiled loops bound to one problem's arrays. Importing this compiles nothing; making Loops does."""

from __future__ import annotations

from typing import Any

import numpy as np

from autopar.solver.ilp.flat_arrays import Flat

TREE_NODES = 300  # the largest tree of a move
SAFETY = 1e-9  # of the bound: sums of floats in another order differ by less


class Loops:
    """The compiled loops bound to one problem's arrays."""

    def __init__(self, flat: Flat):
        from autopar.solver.anytime import local_search, message_passing

        self.flat = flat
        self._messages: Any = message_passing  # numba's types do not know the arguments of what it compiles
        self._search: Any = local_search
        sizes = np.diff(flat.first)
        lengths = sizes[flat.source] + sizes[flat.target]
        self.head = np.concatenate([[0], np.cumsum(lengths)])[:-1].astype(np.int64)
        self.tail = self.head + sizes[flat.source]
        self.length = int(lengths.sum())
        self.work = np.zeros(2 * int(sizes.max(initial=1)) + 2)
        self.part = np.zeros(int(flat.first[-1]))
        self.belief = np.zeros(int(flat.first[-1]))
        self.theta = flat.cost.copy()
        self.unlimited = np.full(len(flat.room), 2**61, dtype=np.int64)

    def _graph(self, messages: np.ndarray) -> tuple:
        f = self.flat
        return (
            f.first,
            self.theta,
            f.source,
            f.target,
            f.start,
            f.matrix,
            f.near_first,
            f.near,
            self.head,
            self.tail,
            messages,
        )

    def _spans(self) -> tuple:
        f = self.flat
        return f.span_first, f.low, f.high, f.span_bytes, f.bytes

    def set_price(self, price: np.ndarray) -> None:
        """Make the sweeps, the bound and the decoding charge these prices."""
        self._messages.priced(self.flat.first, self.flat.cost, *self._spans(), price, self.theta)

    def sweep(self, messages: np.ndarray, pairs: int) -> None:
        """Passes back and forth."""
        for _ in range(pairs):
            self._messages.sweep(*self._graph(messages), False, self.work)
            self._messages.sweep(*self._graph(messages), True, self.work)

    def bound(self, messages: np.ndarray, price: np.ndarray) -> float:
        """The bound that messages and prices prove."""
        value = self._messages.bound(*self._graph(messages), self.part, self.belief)
        value -= float(price @ self.flat.room)
        return value - SAFETY * abs(value)

    def decode(self, messages: np.ndarray) -> np.ndarray:
        """A choice read off the messages; a sweep is made first."""
        choice = np.zeros(self.flat.nodes, dtype=np.int64)
        self._messages.sweep(*self._graph(messages), False, self.work)
        self._messages.decode(*self._graph(messages), True, self.work, choice)
        return choice

    def extra(self, messages: np.ndarray) -> np.ndarray:
        """How much the bound rises at least with each strategy."""
        extra = np.zeros(int(self.flat.first[-1]))
        self._messages.marginals(*self._graph(messages), extra)
        return extra

    def used(self, choice: np.ndarray) -> np.ndarray:
        """Bytes beyond the least in every row."""
        share = np.zeros(int(self.flat.first[-1]))
        share[self.flat.first[:-1] + choice] = 1.0
        return self._messages.usage(self.flat.first, *self._spans(), share, len(self.flat.room))

    def left(self, choice: np.ndarray) -> np.ndarray:
        """Bytes still free in every row."""
        return self.flat.room - np.rint(self.used(choice)).astype(np.int64)

    def cost(self, choice: np.ndarray) -> float:
        """Cost of a choice."""
        f = self.flat
        width = np.diff(f.first)[f.target]
        edges = f.matrix[f.start + choice[f.source] * width + choice[f.target]]
        return float(f.cost[f.first[:-1] + choice].sum() + edges.sum())

    def search(
        self, choice: np.ndarray, left: np.ndarray, price: np.ndarray, *, seed: int, moves: int, pull: float
    ) -> None:
        """Tree moves; choice and left are updated."""
        f = self.flat
        self._search.search(
            f.first, f.cost, f.source, f.target, f.start, f.matrix, f.near_first, f.near, *self._spans(),
            price, choice, left, seed % 2**32, moves, TREE_NODES, pull,
        )  # fmt: skip
