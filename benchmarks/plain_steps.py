"""One-layer models in nothing but jax, for `benchmarks.compiled_elsewhere`.

All are `step(params, moments, batch) -> (params, moments, loss)` with Adam, in float32, as large as a layer of a real
model: what a planner decides shows, and programs compile in seconds.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

VOCABULARY, WIDTH, HEADS, LENGTH, BATCH = 8192, 1024, 16, 512, 16
HEAD = WIDTH // HEADS
EXPERTS, CAPACITY_FACTOR = 8, 1.25


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlainStep:
    """A step and the shapes of its arguments: parameters, moments (both donated), batch."""

    step: Callable
    args: tuple


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def with_adam(loss: Callable, params: dict, moments: dict, batch: tuple) -> tuple[dict, dict, jax.Array]:
    value, grads = jax.value_and_grad(loss)(params, *batch)
    mu = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, moments["mu"], grads)
    nu = jax.tree.map(lambda n, g: 0.95 * n + 0.05 * g**2, moments["nu"], grads)
    params = jax.tree.map(lambda p, m, n: p - 1e-3 * m / (jnp.sqrt(n) + 1e-8), params, mu, nu)
    return params, {"mu": mu, "nu": nu}, value


def _case(loss: Callable, params: dict, batch: tuple) -> PlainStep:
    @functools.wraps(loss)
    def step(params: dict, moments: dict, batch: tuple) -> tuple[dict, dict, jax.Array]:
        return with_adam(loss, params, moments, batch)

    return PlainStep(step=step, args=(params, {"mu": params, "nu": params}, batch))


def norm(x: jax.Array, gain: jax.Array) -> jax.Array:
    centred = x - x.mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * gain


def attention(x: jax.Array, p: dict) -> jax.Array:
    q, k, v = jnp.einsum("btd,dchk->cbhtk", norm(x, p["norm1"]), p["qkv"])
    scores = jnp.einsum("bhtk,bhsk->bhts", q, k) / HEAD**0.5
    scores = jnp.where(jnp.tril(jnp.ones((LENGTH, LENGTH), bool)), scores, -1e9)
    mixed = jnp.einsum("bhts,bhsk->bhtk", jax.nn.softmax(scores, -1), v)
    return jnp.einsum("bhtk,hkd->btd", mixed, p["out"])


def next_token_loss(x: jax.Array, embedding: jax.Array, targets: jax.Array) -> jax.Array:
    logits = x @ embedding.T
    hot = jax.nn.one_hot(targets, VOCABULARY, dtype=logits.dtype)
    return jnp.mean(jax.nn.logsumexp(logits, -1) - jnp.sum(logits * hot, -1))


_ATTENTION_PARAMS = {
    "embedding": f32(VOCABULARY, WIDTH), "position": f32(LENGTH, WIDTH), "norm_out": f32(WIDTH),
    "norm1": f32(WIDTH), "qkv": f32(WIDTH, 3, HEADS, HEAD), "out": f32(HEADS, HEAD, WIDTH), "norm2": f32(WIDTH),
}  # fmt: skip
_TOKENS = jax.ShapeDtypeStruct((BATCH, LENGTH), jnp.int32)


def one_layer_gpt() -> PlainStep:
    """Vocabulary 8192, width 1024, 16 heads, sequence 512, batch 16, tied embedding."""

    def loss(p: dict, tokens: jax.Array, targets: jax.Array) -> jax.Array:
        x = p["embedding"][tokens] + p["position"]
        x = x + attention(x, p)
        x = x + jax.nn.gelu(norm(x, p["norm2"]) @ p["up"]) @ p["down"]
        return next_token_loss(norm(x, p["norm_out"]), p["embedding"], targets)

    params = {**_ATTENTION_PARAMS, "up": f32(WIDTH, 4 * WIDTH), "down": f32(4 * WIDTH, WIDTH)}
    return _case(loss, params, (_TOKENS, _TOKENS))


def one_layer_moe() -> PlainStep:
    """The same with eight experts in place of the last two matrices.

    Each token goes to the one expert that its router prefers, as far as that has room for the tokens of a sequence
    (W. Fedus et al., "Switch Transformers", 2021, section 2), dispatched by einsum. No loss balances the experts.
    """
    slots = round(CAPACITY_FACTOR * LENGTH / EXPERTS)

    def experts(x: jax.Array, p: dict) -> jax.Array:
        gates = jax.nn.softmax(x @ p["router"])
        chosen = jax.nn.one_hot(jnp.argmax(gates, -1), EXPERTS)
        place = (jnp.cumsum(chosen, axis=1) - 1) * chosen
        dispatch = chosen[..., None] * jax.nn.one_hot(place.astype(jnp.int32), slots)
        inputs = jnp.einsum("btes,btd->ebsd", dispatch, x)
        hidden = jax.nn.gelu(jnp.einsum("ebsd,edf->ebsf", inputs, p["up"]))
        outputs = jnp.einsum("ebsf,efd->ebsd", hidden, p["down"])
        return jnp.einsum("btes,bte,ebsd->btd", dispatch, gates, outputs)

    def loss(p: dict, tokens: jax.Array, targets: jax.Array) -> jax.Array:
        x = p["embedding"][tokens] + p["position"]
        x = x + attention(x, p)
        x = x + experts(norm(x, p["norm2"]), p)
        return next_token_loss(norm(x, p["norm_out"]), p["embedding"], targets)

    params = {
        **_ATTENTION_PARAMS,
        "router": f32(WIDTH, EXPERTS), "up": f32(EXPERTS, WIDTH, 4 * WIDTH), "down": f32(EXPERTS, 4 * WIDTH, WIDTH),
    }  # fmt: skip
    return _case(loss, params, (_TOKENS, _TOKENS))


STEPS: dict[str, Callable[[], PlainStep]] = {"one_layer_gpt": one_layer_gpt, "one_layer_moe": one_layer_moe}
