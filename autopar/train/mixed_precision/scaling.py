"""Scales for narrow types: a dynamic loss scale, and those of float8 operands.

The loss scale is a part of the state: three arrays of a number each. Gradients below 6e-8 vanish in float16. The loss
is multiplied by a scale, and the gradients are divided by it. Where they overflow, the step is left out and the scale
halved; after `period` steps without, it is doubled (Micikevicius et al., "Mixed precision training", 2018).

Products of float8 operands are Flax's with delayed scaling, and one without variables, scaled by the present numbers.
Micikevicius et al., "FP8 formats for deep learning", 2022: operands of the forward pass in e4m3, gradients in e5m2.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from autopar.common import jax_compat
from autopar.errors import InvalidArgumentError

# Flax's collection of scales and histories (`flax.linen.fp8_ops.OVERWRITE_WITH_GRADIENT`).
SCALING = "_overwrite_with_gradient"
SMALLEST = 1e-12  # the largest number of an array of zeros, to divide by

Dimensions = tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]]


def delayed_scaling() -> Any:
    """Flax's module of a float8 product."""
    from flax.linen import fp8_ops

    return fp8_ops.Fp8DirectDotGeneralOp


def is_scaling(path: Sequence[Any]) -> bool:
    """Whether a leaf, by its path, is what Flax scales by: it has its own type, and its gradient is its next value."""
    return any(getattr(key, "key", None) == SCALING for key in path)


def check_has_products(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raises: InvalidArgumentError where no product has float8 operands."""
    jaxpr = jax_compat.open_jaxpr(jax_compat.plain_jaxpr(function, *args, **kwargs))
    for eqn in jax_compat.equations_in(jaxpr):
        if eqn.primitive.name == "dot_general" and all(v.aval.dtype.itemsize == 1 for v in eqn.invars[:2]):
            return
    raise InvalidArgumentError(
        where="value_and_grad under autopar.precision('fp8')",
        expected="matrix products with float8 operands",
        got="none in the function: a policy cannot tell which products may have them",
        hint="build Flax Linen modules with dot_general_cls=policy.dot_general_cls, NNX modules and other code with "
        "dot_general=policy.dot_general; or take 'bf16'",
    )


def float8_dot_general(
    lhs: Any,
    rhs: Any,
    dimension_numbers: Dimensions,
    precision: Any = None,
    preferred_element_type: Any = None,
    **_: Any,
) -> jax.Array:
    """A product of float8 operands, each divided by its largest number in this step; `precision` has no meaning."""
    lhs, rhs = jnp.asarray(lhs), jnp.asarray(rhs)
    dtype = jnp.dtype(preferred_element_type or jnp.promote_types(lhs.dtype, rhs.dtype))
    contracted, batched = dimension_numbers
    dims = tuple(map(tuple, contracted)), tuple(map(tuple, batched))
    return _product(lhs.astype(dtype), rhs.astype(dtype), dims, dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _product(lhs: Any, rhs: Any, dims: Any, dtype: Any) -> Any:
    return _forward(lhs, rhs, dims, dtype)[0]


def _forward(lhs: Any, rhs: Any, dims: Any, dtype: Any) -> tuple[Any, Any]:
    (x, x_scale), (y, y_scale) = _scaled(lhs, jnp.float8_e4m3fn), _scaled(rhs, jnp.float8_e4m3fn)
    product = jax.lax.dot_general(x, y, dims, preferred_element_type=dtype)
    return product * (x_scale * y_scale).astype(dtype), (x, x_scale, y, y_scale)


def _backward(dims: Any, dtype: Any, saved: Any, cotangent: Any) -> tuple[Any, Any]:
    x, x_scale, y, y_scale = saved
    g, g_scale = _scaled(cotangent, jnp.float8_e5m2)
    from flax.linen import fp8_ops

    options: dict[str, Any] = dict(dimension_numbers=dims, precision=None, preferred_element_type=dtype)
    to_x = fp8_ops.dot_general_transpose_lhs(g, x, y, **options)
    to_y = fp8_ops.dot_general_transpose_rhs(g, x, y, **options)
    return to_x * (g_scale * y_scale).astype(dtype), to_y * (g_scale * x_scale).astype(dtype)


_product.defvjp(_forward, _backward)


def _scaled(x: Any, dtype: Any) -> tuple[Any, Any]:
    """(the array in 8 bits, what each of its numbers has to be multiplied with)."""
    largest = jnp.maximum(jnp.max(jnp.abs(x)).astype(jnp.float32), SMALLEST)
    scale = largest / float(jnp.finfo(dtype).max)
    return (x / scale.astype(x.dtype)).astype(dtype), scale


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
