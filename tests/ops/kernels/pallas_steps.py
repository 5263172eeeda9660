"""Steps that call Pallas kernels (in interpret mode), for the tests of kernels."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

import autopar

B, L, H, D, W = 8, 16, 4, 8, 16
BLOCK = 4  # of queries, which must divide a part's positions


def _attention_body(q_ref, k_ref, v_ref, o_ref):
    scores = q_ref[0, 0] @ k_ref[0, 0].T
    weights = jnp.exp(scores - jnp.max(scores, -1, keepdims=True))
    o_ref[0, 0] = (weights / jnp.sum(weights, -1, keepdims=True)) @ v_ref[0, 0]


def pallas_attention(q, k, v):
    """One head of one example and `BLOCK` queries at a time."""
    b, h, n, d = q.shape
    if n % BLOCK:
        raise ValueError(f"{n} queries are no blocks of {BLOCK}")
    rows = pl.BlockSpec((1, 1, BLOCK, d), lambda i, j, t: (i, j, t, 0))
    whole = pl.BlockSpec((1, 1, k.shape[2], d), lambda i, j, t: (i, j, 0, 0))
    return pl.pallas_call(
        _attention_body, grid=(b, h, n // BLOCK), in_specs=[rows, whole, whole], out_specs=rows,
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype), interpret=True,
    )(q, k, v)  # fmt: skip


def plain_attention(q, k, v):
    weights = jax.nn.softmax(jnp.einsum("bhqd,bhkd->bhqk", q, k))
    return jnp.einsum("bhqk,bhkd->bhqd", weights, v)


attention = autopar.kernel(pallas_attention, "b h q d, b h k d, b h k d -> b h q d", like=plain_attention)


def _scaled_body(x_ref, w_ref, o_ref, *, times):
    o_ref[...] = times * x_ref[...] * w_ref[...]


def _scaled(x, w, times):
    body = functools.partial(_scaled_body, times=times)
    return pl.pallas_call(body, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(
        x, jnp.broadcast_to(w, x.shape)
    )


@jax.custom_vjp
def pallas_scale(x, w):
    """Twice the product with a vector; its gradient is a kernel too, whose vector's part is a sum over rows."""
    return _scaled(x, w, 2.0)


def _scale_forward(x, w):
    return _scaled(x, w, 2.0), (x, w)


def _scale_backward(kept, change):
    x, w = kept
    return _scaled(change, w, 2.0), jnp.sum(2.0 * x * change, (0, 1))


pallas_scale.defvjp(_scale_forward, _scale_backward)
scale = autopar.kernel(pallas_scale, "b l w, w -> b l w")


def loss(state, batch, attention=attention, scale=scale):
    x = batch["x"]
    for p in state:
        q, k, v = (jnp.einsum("blw,whd->bhld", x, p[name]) for name in "qkv")
        x = x + jnp.einsum("bhld,hdw->blw", attention(q, k, v), p["o"])
        x = x + jnp.tanh(scale(x, p["scale"]) @ p["w"])
    return jnp.mean((x - batch["y"]) ** 2)


def train_step(state, batch):
    value, gradients = jax.value_and_grad(loss)(state, batch)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, gradients), value


def arguments(layers=2, examples=B):
    keys = iter(jax.random.split(jax.random.key(0), 32))
    sizes = {"q": (W, H, D), "k": (W, H, D), "v": (W, H, D), "o": (H, D, W), "w": (W, W), "scale": (W,)}
    state = [{name: 0.3 * jax.random.normal(next(keys), s) for name, s in sizes.items()} for _ in range(layers)]
    return state, {name: jax.random.normal(next(keys), (examples, L, W)) for name in "xy"}
