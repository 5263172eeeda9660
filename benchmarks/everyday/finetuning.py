"""Training that begins with a trained model, or with fewer bits: teachers, adapters, quantised weights, float8."""

import math
import statistics
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.everyday.parts import (
    LENGTH,
    VOCABULARY,
    WIDTH,
    causal,
    decoded,
    decoder_params,
    encoder_block,
    normal,
    rms_norm,
    token_batch,
    trained,
)
from benchmarks.zoo.case import Case, PyTree
from benchmarks.zoo.float8 import float8_product
from benchmarks.zoo.training import cross_entropy

LAYERS = 2


def distillation(batch: int = 8) -> Case:
    """A small decoder learns the labels and the softened outputs of a larger one, which stays as it is."""
    temperature, share = 2.0, 0.5
    tx = optax.adamw(1e-3)

    def logits_of(params: PyTree, tokens: jax.Array) -> jax.Array:
        return decoded(params, tokens) @ params["embed"].T

    def loss_fn(student: PyTree, teacher: PyTree, batch: PyTree) -> tuple[jax.Array, PyTree]:
        inputs, targets = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
        taught = jax.nn.softmax(jax.lax.stop_gradient(logits_of(teacher, inputs)) / temperature)
        logits = logits_of(student, inputs)
        logs = jax.nn.log_softmax(logits / temperature)
        soft = optax.kl_divergence(logs, taught).mean() * temperature**2
        hard = cross_entropy(logits, targets)
        return share * soft + (1 - share) * hard, {"soft": soft, "hard": hard}

    return trained(
        "distillation",
        partial(decoder_params, layers=1),
        loss_fn,
        tx,
        token_batch(batch, LENGTH, VOCABULARY),
        has_aux=True,
        frozen=partial(decoder_params, layers=4),
    )


def lora(batch: int = 8) -> Case:
    """Adapters of rank 4 beside every matrix of frozen scanned layers, which get a gradient of their own alone."""
    rank, alpha = 4, 8.0
    tx = optax.adamw(1e-3)
    make_base = partial(decoder_params, layers=LAYERS)

    def adapters_of(key: jax.Array) -> PyTree:
        base = jax.eval_shape(make_base, key)

        def adapter(w: jax.ShapeDtypeStruct, key: jax.Array) -> PyTree:
            layers, inputs, *rest = w.shape
            outputs = math.prod(rest)
            return {"a": normal(key, layers, inputs, rank), "b": jnp.zeros((layers, rank, outputs))}

        matrices = {name: base["layers"]["attention"][name] for name in "qkv"} | {
            name: base["layers"][name]["w"] for name in ("up", "down")
        }
        keys = jax.random.split(key, len(matrices))
        return {name: adapter(w, k) for (name, w), k in zip(matrices.items(), keys, strict=True)}

    def merged(w: jax.Array, adapter: PyTree) -> jax.Array:
        return w + (alpha / rank * adapter["a"] @ adapter["b"]).reshape(w.shape)

    def loss_fn(adapters: PyTree, base: PyTree, batch: PyTree) -> jax.Array:
        inputs, targets = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
        mask = causal(inputs.shape[1])

        def layer(x: jax.Array, pair: tuple[PyTree, PyTree]) -> tuple[jax.Array, None]:
            p, lora = pair
            attention = p["attention"] | {name: merged(p["attention"][name], lora[name]) for name in "qkv"}
            dense = {name: p[name] | {"w": merged(p[name]["w"], lora[name])} for name in ("up", "down")}
            return encoder_block(p | dense | {"attention": attention}, x, mask), None

        x, _ = jax.lax.scan(layer, base["embed"][inputs], (base["layers"], adapters))
        return cross_entropy(x @ base["embed"].T, targets)

    return trained("lora", adapters_of, loss_fn, tx, token_batch(batch, LENGTH, VOCABULARY), frozen=make_base)


# Where 16 numbers between -1 and 1 lie that cut a normal distribution into equal parts.
_LEVELS = np.array([statistics.NormalDist().inv_cdf(x) for x in np.linspace(0.02, 0.98, 16)])
LEVELS = (_LEVELS / _LEVELS[-1]).astype(np.float32)


def qlora(batch: int = 8) -> Case:
    """Frozen matrices as codes of four bits with a scale for each block of 16, made bfloat16 where they are read."""
    rank, block = 4, 16
    tx = optax.adamw(1e-3)
    shapes = {"wq": (WIDTH, WIDTH), "wv": (WIDTH, WIDTH), "up": (WIDTH, 2 * WIDTH), "down": (2 * WIDTH, WIDTH)}

    def quantize(w: jax.Array) -> PyTree:
        blocks = w.reshape(-1, block)
        scale = jnp.abs(blocks).max(-1, keepdims=True)
        codes = jnp.abs((blocks / scale)[..., None] - LEVELS).argmin(-1)
        return {"codes": codes.astype(jnp.uint4), "scale": scale.astype(jnp.bfloat16)}

    def dequantize(q: PyTree, shape: tuple[int, ...]) -> jax.Array:
        levels = jnp.asarray(LEVELS, jnp.bfloat16)
        return (levels[q["codes"].astype(jnp.int32)] * q["scale"]).reshape(shape)

    def of_layers(key: jax.Array, made: Callable[[jax.Array, tuple[int, int]], PyTree]) -> list[PyTree]:
        """Of each layer what is `made` for each of the shapes."""
        keys = jax.random.split(key, (LAYERS, len(shapes)))
        return [{n: made(k, s) for (n, s), k in zip(shapes.items(), of, strict=True)} for of in keys]

    def base(key: jax.Array) -> PyTree:
        a, b = jax.random.split(key)
        embed = normal(a, VOCABULARY, WIDTH).astype(jnp.bfloat16)
        return {"embed": embed, "layers": of_layers(b, lambda key, shape: quantize(normal(key, *shape)))}

    def adapters_of(key: jax.Array) -> PyTree:
        return of_layers(key, lambda key, s: {"a": normal(key, s[0], rank), "b": jnp.zeros((rank, s[1]))})

    def linear(x: jax.Array, q: PyTree, lora: PyTree, shape: tuple[int, ...]) -> jax.Array:
        a, b = lora["a"].astype(x.dtype), lora["b"].astype(x.dtype)
        return x @ dequantize(q, shape) + 2.0 * (x @ a) @ b

    def loss_fn(adapters: PyTree, base: PyTree, batch: PyTree) -> jax.Array:
        tokens = batch["tokens"]
        x = base["embed"][tokens[:, :-1]]
        for q, lora in zip(base["layers"], adapters, strict=True):

            @jax.checkpoint
            def layer(x: jax.Array, q: PyTree, lora: PyTree) -> jax.Array:
                h = rms_norm(x, jnp.ones(WIDTH))
                queries, values = (linear(h, q[n], lora[n], shapes[n]) for n in ("wq", "wv"))
                scores = jnp.einsum("bqd,bkd->bqk", queries, h).astype(jnp.float32) / WIDTH**0.5
                weights = jax.nn.softmax(jnp.where(causal(x.shape[1]), scores, -1e30)).astype(x.dtype)
                x = x + weights @ values
                h = jax.nn.silu(linear(rms_norm(x, jnp.ones(WIDTH)), q["up"], lora["up"], shapes["up"]))
                return x + linear(h, q["down"], lora["down"], shapes["down"])

            x = layer(x, q, lora)
        return cross_entropy(x @ base["embed"].T, tokens[:, 1:])

    return trained("qlora", adapters_of, loss_fn, tx, token_batch(batch, LENGTH, VOCABULARY), frozen=base)


def fp8(batch: int = 8) -> Case:
    """Matmuls of float8 operands scaled by their largest number, of the batch too; norms and the loss in float32."""
    tx = optax.adamw(1e-3)

    def init(key: jax.Array) -> PyTree:
        a, *keys = jax.random.split(key, LAYERS + 1)

        def layer(key: jax.Array) -> PyTree:
            b, c = jax.random.split(key)
            return {"gain": jnp.ones(WIDTH), "up": normal(b, WIDTH, 2 * WIDTH), "down": normal(c, 2 * WIDTH, WIDTH)}

        return {"embed": normal(a, VOCABULARY, WIDTH), "layers": [layer(k) for k in keys]}

    def loss_fn(params: PyTree, batch: PyTree) -> jax.Array:
        tokens = batch["tokens"]
        x = params["embed"][tokens[:, :-1]].astype(jnp.bfloat16)
        for p in params["layers"]:
            h = float8_product(rms_norm(x, p["gain"]), p["up"].astype(jnp.bfloat16), 1)
            x = x + float8_product(jax.nn.silu(h), p["down"].astype(jnp.bfloat16), 1)
        return cross_entropy(x @ params["embed"].T.astype(jnp.bfloat16), tokens[:, 1:])

    return trained("fp8", init, loss_fn, tx, token_batch(batch, LENGTH, VOCABULARY))


STEPS = (distillation, lora, qlora, fp8)
