"""Products of float8 operands, each scaled as a whole ("tensorwise" scaling).

Micikevicius et al., "FP8 formats for deep learning", 2022: operands of the forward pass in e4m3, gradients in e5m2,
sums in 32 bits. Each operand is divided by a scale that brings its largest number to the largest of its type: computed
anew in every step, as torchao's "tensorwise" float8 training does, or given, as Transformer Engine's "delayed scaling"
takes that of earlier steps. The largest numbers of this step, for the next one, are left out: its casts find them.
"""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

SMALLEST = 1e-12  # the largest number of an array of zeros, to divide by


def scaled(x: jax.Array, dtype: DTypeLike, scale: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
    """(the array in 8 bits, what each of its numbers has to be multiplied with)."""
    if scale is not None:
        return (x / scale.astype(x.dtype)).astype(dtype), scale
    largest = jnp.maximum(jnp.max(jnp.abs(x)).astype(jnp.float32), SMALLEST)
    scale = largest / float(jnp.finfo(dtype).max)
    return (x / scale.astype(x.dtype)).astype(dtype), scale


@jax.custom_vjp
def _two_dimensional(x: jax.Array, w: jax.Array, scales: jax.Array | None) -> jax.Array:
    return _forward(x, w, scales)[0]


def _forward(x: jax.Array, w: jax.Array, scales: jax.Array | None) -> tuple[jax.Array, tuple]:
    of_x, of_w = (None, None) if scales is None else (scales[0], scales[1])
    (x8, x_scale), (w8, w_scale) = scaled(x, jnp.float8_e4m3fn, of_x), scaled(w, jnp.float8_e4m3fn, of_w)
    product = jax.lax.dot_general(x8, w8, (((x.ndim - 1,), (0,)), ((), ())), preferred_element_type=x.dtype)
    return product * (x_scale * w_scale).astype(x.dtype), (x8, x_scale, w8, w_scale, scales)


def _backward(saved: tuple, gradient: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    x8, x_scale, w8, w_scale, scales = saved
    g8, g_scale = scaled(gradient, jnp.float8_e5m2, None if scales is None else scales[2])
    last, rest = gradient.ndim - 1, tuple(range(gradient.ndim - 1))
    to_x = jax.lax.dot_general(g8, w8, (((last,), (1,)), ((), ())), preferred_element_type=gradient.dtype)
    to_w = jax.lax.dot_general(x8, g8, ((rest, rest), ((), ())), preferred_element_type=gradient.dtype)
    scale_x, scale_w = (g_scale * w_scale).astype(gradient.dtype), (g_scale * x_scale).astype(gradient.dtype)
    return to_x * scale_x, to_w * scale_w, None if scales is None else jnp.zeros_like(scales)


_two_dimensional.defvjp(_forward, _backward)


def float8_product(x: jax.Array, w: jax.Array, summed: int, scales: jax.Array | None = None) -> jax.Array:
    """`jnp.tensordot(x, w, summed)` over the last `summed` dimensions of x and the first of w.

    `scales`: of x, w and the gradient; None computes them.
    """
    flat_x = x.reshape(*x.shape[: x.ndim - summed], -1)
    flat_w = w.reshape(flat_x.shape[-1], -1)
    return _two_dimensional(flat_x, flat_w, scales).reshape(*x.shape[: x.ndim - summed], *w.shape[summed:])
