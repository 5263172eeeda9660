"""Attention kernels of other libraries, called through jax's private names: cuDNN's on GPUs, Pallas's on TPUs.

All take queries, keys and values as (examples, heads, positions, width), with as many heads of queries as of keys or a
multiple, and give or take of each row of scores its largest and the sum of its exponentials over that of the largest.
They are imported when they are called: jax loads neither of them otherwise.
"""

from __future__ import annotations

import importlib
from typing import Any

import jax.numpy as jnp


def _cudnn() -> Any:
    return importlib.import_module("jax._src.cudnn.fused_attention_stablehlo")


def _flash() -> Any:
    return importlib.import_module("jax.experimental.pallas.ops.tpu.flash_attention")


def cudnn_forward(q: Any, k: Any, v: Any, *, scale: float, causal: bool) -> tuple[Any, Any, Any]:
    """(result, largest, total): cuDNN gives the logarithm of a row's sum, which stands for the largest of total one."""
    cudnn = _cudnn()
    out, log_sum = cudnn._dot_product_attention_fwd_impl(
        q, k, v, *_cudnn_nothing(q), is_training=True, **_cudnn_options(scale, causal)
    )
    return out, log_sum, jnp.ones_like(log_sum)


def cudnn_backward(
    q: Any, k: Any, v: Any, saved: tuple[Any, Any, Any], change: Any, *, scale: float, causal: bool
) -> tuple[Any, Any, Any]:
    """The gradients of queries, keys and values, from what the forward pass gave (`saved`)."""
    cudnn, (out, largest, total) = _cudnn(), saved
    log_sum = largest + jnp.log(total)
    q_change, k_change, v_change = cudnn._dot_product_attention_bwd_impl(
        q, k, v, *_cudnn_nothing(q), log_sum, out, change.astype(q.dtype), **_cudnn_options(scale, causal)
    )
    return q_change, k_change, v_change


def _cudnn_nothing(q: Any) -> tuple[Any, ...]:
    """No bias, no lengths, no offsets, no pages."""
    return tuple(jnp.zeros(0, dtype=q.dtype) for _ in range(7))


def _cudnn_options(scale: float, causal: bool) -> dict[str, Any]:
    cudnn = _cudnn()
    return {
        "scale": scale, "seed": 42, "dropout_rate": 0.0, "variadic_args": (False, False),
        "mask_type": cudnn.MaskType.CAUSAL if causal else cudnn.MaskType.NO_MASK,
        "layout": cudnn.AttentionLayout.BNTH.value, "sliding_window_length": None,
    }  # fmt: skip


def tpu_forward(q: Any, k: Any, v: Any, *, scale: float, causal: bool) -> tuple[Any, Any, Any]:
    """(result, largest, total)."""
    flash = _flash()
    k, v = (_repeated(a, q) for a in (k, v))
    n, of_keys = tpu_block(q.shape[2]), tpu_block(k.shape[2])
    out, total, largest = flash._flash_attention_impl(
        q, k, v, None, None, True, causal, scale, 1, n, of_keys, of_keys, False
    )
    return out, largest, total


def tpu_backward(
    q: Any, k: Any, v: Any, saved: tuple[Any, Any, Any], change: Any, *, scale: float, causal: bool
) -> tuple[Any, Any, Any]:
    """The gradients of queries, keys and values, from what the forward pass gave (`saved`)."""
    flash, (out, largest, total) = _flash(), saved
    shared = k.shape
    k, v = (_repeated(a, q) for a in (k, v))
    change = change.astype(q.dtype)
    along = jnp.sum(out.astype(jnp.float32) * change.astype(jnp.float32), axis=-1)
    n, of_keys = tpu_block(q.shape[2]), tpu_block(k.shape[2])
    common = {"sm_scale": scale, "causal": causal, "mask_value": flash.DEFAULT_MASK_VALUE, "debug": False}
    blocks = {"block_q_major": n, "block_k_major": of_keys, "block_k": of_keys}
    args = (q, k, v, None, None, total, largest, change, along)
    k_change, v_change = flash._flash_attention_bwd_dkv(*args, **blocks, block_q=n, **common)
    q_change, _ = flash._flash_attention_bwd_dq(*args, **blocks, **common)
    return q_change, _gathered(k_change, shared), _gathered(v_change, shared)


def tpu_block(positions: int) -> int:
    """Positions of a block: the most of jax's own benchmarks' that divide those of an array."""
    return next(n for n in (512, 256, 128) if positions % n == 0)


def _repeated(a: Any, q: Any) -> Any:
    """Keys or values once for each head of queries."""
    return jnp.repeat(a, q.shape[1] // a.shape[1], axis=1)


def _gathered(change: Any, shape: tuple[int, ...]) -> Any:
    """Gradients of repeated keys or values, added up in 32 bits."""
    examples, heads, positions, width = shape
    grouped = change.reshape((examples, heads, -1, positions, width))
    return jnp.sum(grouped, axis=2, dtype=jnp.float32).astype(change.dtype)
