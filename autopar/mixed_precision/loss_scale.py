"""A dynamic loss scale, as a part of the state: three arrays of a number each.

Gradients below 6e-8 vanish in float16. The loss is multiplied by a scale, and the gradients are divided by it. Where
they overflow, the step is left out and the scale halved; after `period` steps without, it is doubled (Micikevicius et
al., "Mixed precision training", 2018).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from autopar.errors import InvalidArgumentError
from autopar.mixed_precision.float8 import is_scaling

T = TypeVar("T")

# As jmp begins: half of the largest power of two that float16 has, so that the loss' own gradient does not overflow.
FIRST = 2.0**15
# As in jmp, PyTorch (`torch.amp.GradScaler`) and the paper.
PERIOD, FACTOR = 2000, 2.0


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("value", "num_finite"), meta_fields=("period", "factor", "least")
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class LossScale:
    """The scale, and how many steps in a row were finite since it changed."""

    value: jax.Array
    num_finite: jax.Array
    period: int = PERIOD
    factor: float = FACTOR
    least: float = 1.0

    @classmethod
    def create(
        cls, first: float = FIRST, *, period: int = PERIOD, factor: float = FACTOR, least: float = 1.0
    ) -> LossScale:
        """`first`: the scale at first. It is multiplied by `factor` after `period` finite steps, divided by it after
        one that is not, down to `least`. Raises: InvalidArgumentError.
        """
        if not (math.inf > first >= least > 0 and period >= 1 and math.inf > factor > 1):
            raise InvalidArgumentError(
                where="init_loss_scale", expected="finite first >= least > 0, period >= 1 and factor > 1",
                got=f"first={first}, least={least}, period={period}, factor={factor}",
                hint="leave them out to begin at 2**15 and to double it after 2000 finite steps",
            )  # fmt: skip
        value, count = jnp.float32(first), jnp.int32(0)
        return cls(value=value, num_finite=count, period=period, factor=float(factor), least=float(least))

    def scale(self, loss: Any) -> Any:
        return jax.tree.map(lambda x: x * self.value.astype(x.dtype), loss)

    def unscale(self, gradients: T) -> T:
        """Gradients of the scaled loss as those of the loss. What float8 scales by is no gradient."""
        inverse = 1 / self.value

        def leaf(path: Any, x: Any) -> Any:
            if is_scaling(path):
                return x
            wide = jnp.promote_types(x.dtype, jnp.float32)  # the inverse of a large scale is 0 in float16
            return (x.astype(wide) * inverse).astype(x.dtype)

        return jax.tree_util.tree_map_with_path(leaf, gradients)

    def adjust(self, finite: jax.Array) -> LossScale:
        """The scale of the next step, after one whose gradients were finite or not."""
        is_due = self.num_finite + 1 >= self.period
        larger = self.value * self.factor
        grown = jnp.where(is_due & jnp.isfinite(larger), larger, self.value)
        reduced = jnp.maximum(self.value / self.factor, self.least)
        count = jnp.where(finite & ~is_due, self.num_finite + 1, 0)
        return dataclasses.replace(self, value=jnp.where(finite, grown, reduced), num_finite=count)
