"""What several plans of one traced step have in common, worked out for the first of them."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from autopar.ir.traced_step import TracedStep

T = TypeVar("T")


class StepGraphs:
    """Graphs of steps, by the step and by what else they depend on. One search makes its own; plans of the same step
    under many requests share one.
    """

    def __init__(self) -> None:
        # With the jaxpr, so that its id stays its own.
        self._made: dict[Hashable, tuple[Any, Any]] = {}

    def of(self, traced: TracedStep, what: Hashable, make: Callable[[], T]) -> T:
        """What `make` returns for a step as it is stored; `what` names all else that the result depends on."""
        stored = traced.blockwise_attention, traced.padded, traced.pads_summands, traced.per_microbatch
        key = id(traced.jaxpr), *stored, traced.stacked_over, traced.uneven_over, what
        if key not in self._made:
            self._made[key] = traced.jaxpr, make()
        return self._made[key][1]
