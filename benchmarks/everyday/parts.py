"""What several steps share: random arrays of their usual shapes, norms, attention, losses, the usual step."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.zoo.case import Case, PyTree
from benchmarks.zoo.training import descend

VOCABULARY, WIDTH, HEADS, LENGTH = 64, 32, 4, 16  # of language models


def token_batch(batch: int, length: int, vocabulary: int) -> Callable[[int], dict[str, np.ndarray]]:
    """Sequences of `length + 1` tokens, int32: the step slices them into inputs and targets."""

    def make(seed: int) -> dict[str, np.ndarray]:
        random = np.random.default_rng(seed)
        return {"tokens": random.integers(0, vocabulary, (batch, length + 1), dtype=np.int32)}

    return make


def float_batch(**shapes: Sequence[int]) -> Callable[[int], dict[str, np.ndarray]]:
    """Normal float32 arrays by name."""

    def make(seed: int) -> dict[str, np.ndarray]:
        random = np.random.default_rng(seed)
        return {name: random.standard_normal(tuple(shape), dtype=np.float32) for name, shape in shapes.items()}

    return make


def joined(*makers: Callable[[int], dict[str, np.ndarray]]) -> Callable[[int], dict[str, np.ndarray]]:
    """One batch with the leaves of several."""
    return lambda seed: {name: leaf for make in makers for name, leaf in make(seed).items()}


def integers(below: int, **shapes: Sequence[int]) -> Callable[[int], dict[str, np.ndarray]]:
    """int32 arrays by name."""

    def make(seed: int) -> dict[str, np.ndarray]:
        random = np.random.default_rng(seed + 100)
        return {name: random.integers(0, below, tuple(shape), dtype=np.int32) for name, shape in shapes.items()}

    return make


def normal(key: jax.Array, *shape: int, scale: float = 0.1) -> jax.Array:
    return scale * jax.random.normal(key, shape)


def dense(key: jax.Array, inputs: int, outputs: int) -> dict[str, jax.Array]:
    return {"w": jax.random.normal(key, (inputs, outputs)) / inputs**0.5, "b": jnp.zeros(outputs)}


def mlp(key: jax.Array, sizes: Sequence[int]) -> list[dict[str, jax.Array]]:
    keys = jax.random.split(key, len(sizes) - 1)
    return [dense(k, i, o) for k, i, o in zip(keys, sizes[:-1], sizes[1:], strict=True)]


def apply_mlp(layers: PyTree, x: jax.Array, activation: Callable[[jax.Array], jax.Array] = jax.nn.relu) -> jax.Array:
    for layer in layers[:-1]:
        x = activation(x @ layer["w"] + layer["b"])
    return x @ layers[-1]["w"] + layers[-1]["b"]


def rms_norm(x: jax.Array, gain: jax.Array, epsilon: float = 1e-6) -> jax.Array:
    """Computed in float32, in the type of `x` afterwards."""
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + epsilon)
    return (wide * gain).astype(x.dtype)


def layer_norm(x: jax.Array, p: PyTree, epsilon: float = 1e-5) -> jax.Array:
    mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(variance + epsilon) * p["scale"] + p["bias"]


def layer_norm_params(width: int) -> dict[str, jax.Array]:
    return {"scale": jnp.ones(width), "bias": jnp.zeros(width)}


def rope(x: jax.Array, positions: jax.Array, base: float = 10_000.0) -> jax.Array:
    """Rotates halves of the last dimension of (batch, time, head, dimension) by positions (batch or 1, time)."""
    half = x.shape[-1] // 2
    frequency = base ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = positions[..., None, None] * frequency
    sin, cos = jnp.sin(angle).astype(x.dtype), jnp.cos(angle).astype(x.dtype)
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def attention(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array | None = None) -> jax.Array:
    """(batch, time, head, dimension); the mask is true where a query sees a key, and scores are float32."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32) / q.shape[-1] ** 0.5
    if mask is not None:
        scores = jnp.where(mask, scores, -1e30)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, axis=-1).astype(v.dtype), v)


def causal(length: int) -> jax.Array:
    return jnp.tril(jnp.ones((length, length), bool))


def attention_params(key: jax.Array, width: int, heads: int) -> dict[str, jax.Array]:
    keys = jax.random.split(key, 4)
    shape = (width, heads, width // heads)
    return {name: normal(k, *shape) for name, k in zip("qkv", keys[:3], strict=True)} | {
        "o": normal(keys[3], *shape[1:], width)
    }


def attend(p: PyTree, x: jax.Array, memory: jax.Array | None = None, mask: jax.Array | None = None) -> jax.Array:
    """Attention of `x` to itself or to a memory, with its four projections."""
    seen = x if memory is None else memory
    q = jnp.einsum("btw,whd->bthd", x, p["q"])
    k, v = jnp.einsum("btw,whd->bthd", seen, p["k"]), jnp.einsum("btw,whd->bthd", seen, p["v"])
    return jnp.einsum("bthd,hdw->btw", attention(q, k, v, mask), p["o"])


def encoder_block_params(key: jax.Array, width: int, heads: int) -> PyTree:
    """Of a pre-norm transformer block."""
    a, b, c = jax.random.split(key, 3)
    return {
        "norm1": layer_norm_params(width),
        "attention": attention_params(a, width, heads),
        "norm2": layer_norm_params(width),
        "up": dense(b, width, 4 * width),
        "down": dense(c, 4 * width, width),
    }


def encoder_block(p: PyTree, x: jax.Array, mask: jax.Array | None = None) -> jax.Array:
    x = x + attend(p["attention"], layer_norm(x, p["norm1"]), mask=mask)
    h = jax.nn.gelu(layer_norm(x, p["norm2"]) @ p["up"]["w"] + p["up"]["b"])
    return x + h @ p["down"]["w"] + p["down"]["b"]


def decoder_params(key: jax.Array, layers: int, *, scanned: bool = True, head: bool = False) -> PyTree:
    """Of a decoder of pre-norm blocks, "layers" that are stacked for a scan or a list of "blocks"."""
    a, b, c = jax.random.split(key, 3)
    keys = jax.random.split(b, layers)
    params = {"embed": normal(a, VOCABULARY, WIDTH)} | ({"head": normal(c, WIDTH, VOCABULARY)} if head else {})
    if scanned:
        return params | {"layers": jax.vmap(lambda k: encoder_block_params(k, WIDTH, HEADS))(keys)}
    return params | {"blocks": [encoder_block_params(k, WIDTH, HEADS) for k in keys]}


def decoded(params: PyTree, tokens: jax.Array) -> jax.Array:
    """What the head of a decoder reads; positions are added where it has them."""
    x, mask = params["embed"][tokens], causal(tokens.shape[-1])
    if "positions" in params:
        x = x + params["positions"][: tokens.shape[-1]]
    if "layers" in params:
        return jax.lax.scan(lambda x, p: (encoder_block(p, x, mask), None), x, params["layers"])[0]
    for p in params["blocks"]:
        x = encoder_block(p, x, mask)
    return x


def trained(
    name: str,
    init_params: Callable[[jax.Array], PyTree],
    loss_fn: Callable[..., Any],
    tx: optax.GradientTransformation,
    batch: Callable[[int], PyTree],
    *,
    has_aux: bool = False,
    has_key: bool = False,
    frozen: Callable[[jax.Array], PyTree] | None = None,
) -> Case:
    """The usual step: an update by gradients of `loss_fn(params, batch)`, whose metrics come too where it `has_aux`.

    With `frozen` a part of the state stays as it makes it, and the loss takes that second; where it `has_key`, the
    state has a random key, and the loss takes what each step splits off it last.
    """

    def init(key: jax.Array) -> PyTree:
        params_key, *keys = jax.random.split(key, 3) if frozen or has_key else (key,)
        params = init_params(params_key)
        state = {"params": params, "opt_state": tx.init(params)}
        state |= {"frozen": frozen(keys[0])} if frozen else {}
        return state | ({"key": keys[1]} if has_key else {})

    def step(state: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
        given = [state["frozen"], batch] if frozen else [batch]
        if has_key:
            key, of_step = jax.random.split(state["key"])
            state, given = state | {"key": key}, [*given, of_step]
        found, params, opt_state = descend(tx, loss_fn, state["params"], state["opt_state"], *given, has_aux=has_aux)
        loss, metrics = found if has_aux else (found, {})
        return state | {"params": params, "opt_state": opt_state}, {"loss": loss, **metrics}

    return Case(name=name, step=step, init=init, batch=batch)
