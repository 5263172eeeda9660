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
        """What `make` returns for a step; `what` names all else that the result depends on."""
        options = (
            traced.attention_kernel,
            traced.scan_recompute,
            traced.per_microbatch,
            traced.stacked_over,
            traced.uneven_over,
        )
        key = id(traced.jaxpr), *options, what
        if key not in self._made:
            self._made[key] = traced.jaxpr, make()
        return self._made[key][1]
