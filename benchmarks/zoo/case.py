"""What the zoo is made of: one training step with everything that is needed to run it."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

PyTree = Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A training step as its user would write it, for one device.

    Attributes:
        name: The key of the case in the registry.
        step: A pure function `step(state, batch) -> (state, metrics)`; `metrics["loss"]` is a scalar.
        init: `init(key) -> state`, from a typed key; it can be traced, so `jax.eval_shape(init, key)` costs no memory.
        batch: `batch(seed) -> pytree` of numpy arrays, the same for the same seed.
        tolerance: The difference from plain `jax.jit` that reassociating floating-point sums can explain after a
            few steps, as a fraction of a leaf's largest value.
        zero_gradient: A regular expression for the paths (`jax.tree_util.keystr`) of state leaves that stay zero but
            for rounding, so that their relative difference means nothing. Biases of attention keys are such: they
            move all scores of a query alike, which softmax does not see.
    """

    name: str
    step: Callable[[PyTree, PyTree], tuple[PyTree, PyTree]]
    init: Callable[[jax.Array], PyTree]
    batch: Callable[[int], PyTree]
    tolerance: float = 1e-5
    zero_gradient: str | None = None

    def shapes(self) -> tuple[PyTree, PyTree]:
        """(state, batch) as shapes."""
        batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), self.batch(0))
        return jax.eval_shape(self.init, jax.random.key(0)), batch
