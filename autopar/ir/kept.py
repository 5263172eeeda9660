"""What was found for a graph, kept as long as the graph lives."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Generic, TypeVar

from autopar.ir.graph import Block, OpGraph, Value

Found = TypeVar("Found")


class KeptWithGraphs(Generic[Found]):
    """Of each graph what was found last, of something else beside it. It must not hold the graph's block."""

    def __init__(self) -> None:
        self._of: dict[int, tuple[weakref.ref[Block], Sequence[Value], Hashable, Found]] = {}

    def __len__(self) -> int:
        return len(self._of)

    def of(self, graph: OpGraph, key: Hashable, find: Callable[[], Found]) -> Found:
        """What is kept of a graph and this key; `find` finds it."""
        number, known = id(graph.block), self._of.get(id(graph.block))
        if known is not None and known[0]() is graph.block and known[1] is graph.values and known[2] == key:
            return known[3]
        found = find()
        block = weakref.ref(graph.block, lambda _: self._of.pop(number, None))
        self._of[number] = block, graph.values, key, found
        return found
