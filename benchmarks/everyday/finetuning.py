"""Training that begins with a trained model, or with fewer bits: teachers, adapters, quantised weights, float8."""

import statistics

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.everyday.parts import (
    causal,
    encoder_block,
    encoder_block_params,
    normal,
    rms_norm,
    token_batch,
    trained,
)
from benchmarks.zoo.case import Case, PyTree
from benchmarks.zoo.float8 import float8_product
from benchmarks.zoo.training import cross_entropy, descend

VOCABULARY, WIDTH, HEADS, LENGTH, LAYERS = 64, 32, 4, 16, 2


def _decoder_params(key: jax.Array, layers: int) -> PyTree:
    a, b = jax.random.split(key)
    stacked = jax.vmap(lambda k: encoder_block_params(k, WIDTH, HEADS))(jax.random.split(b, layers))
    return {"embed": normal(a, VOCABULARY, WIDTH), "layers": stacked}


def _logits(params: PyTree, tokens: jax.Array) -> jax.Array:
    mask = causal(tokens.shape[1])
    x, _ = jax.lax.scan(lambda x, p: (encoder_block(p, x, mask), None), params["embed"][tokens], params["layers"])
    return x @ params["embed"].T


def distillation(batch: int = 8) -> Case:
    """A small decoder learns the labels and the softened outputs of a larger one, which stays as it is."""
    temperature, share = 2.0, 0.5
    tx = optax.adamw(1e-3)

    def init(key: jax.Array) -> PyTree:
        a, b = jax.random.split(key)
        student = _decoder_params(a, 1)
        return {"student": student, "teacher": _decoder_params(b, 4), "opt_state": tx.init(student)}

    def step(state: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
        inputs, targets = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
        taught = jax.nn.softmax(jax.lax.stop_gradient(_logits(state["teacher"], inputs)) / temperature)

        def loss_fn(student: PyTree) -> tuple[jax.Array, PyTree]:
            logits = _logits(student, inputs)
            logs = jax.nn.log_softmax(logits / temperature)
            soft = optax.kl_divergence(logs, taught).mean() * temperature**2
            hard = cross_entropy(logits, targets)
            return share * soft + (1 - share) * hard, {"soft": soft, "hard": hard}

        (loss, aux), student, opt_state = descend(tx, loss_fn, state["student"], state["opt_state"], has_aux=True)
        return state | {"student": student, "opt_state": opt_state}, {
            "loss": loss,
            **aux,
        }

    return Case(name="distillation", step=step, init=init, batch=token_batch(batch, LENGTH, VOCABULARY))


def lora(batch: int = 8) -> Case:
    """Adapters of rank 4 beside every matrix of frozen scanned layers, which get a gradient of their own alone."""
    rank, alpha = 4, 8.0
    tx = optax.adamw(1e-3)

    def init(key: jax.Array) -> PyTree:
        a, b = jax.random.split(key)
        base = _decoder_params(a, LAYERS)

        def adapter(w: jax.Array, key: jax.Array) -> PyTree:
            layers, inputs = w.shape[:2]
            outputs = w[0, 0].size
            return {"a": normal(key, layers, inputs, rank), "b": jnp.zeros((layers, rank, outputs))}

        matrices = {name: base["layers"]["attention"][name] for name in "qkv"} | {
            name: base["layers"][name]["w"] for name in ("up", "down")
        }
        keys = dict(zip(matrices, jax.random.split(b, len(matrices)), strict=True))
        adapters = {name: adapter(w, keys[name]) for name, w in matrices.items()}
        return {"base": base, "adapters": adapters, "opt_state": tx.init(adapters)}

    def merged(w: jax.Array, adapter: PyTree) -> jax.Array:
        return w + (alpha / rank * adapter["a"] @ adapter["b"]).reshape(w.shape)

    def loss_fn(adapters: PyTree, base: PyTree, tokens: jax.Array) -> jax.Array:
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        mask = causal(inputs.shape[1])

        def layer(x: jax.Array, pair: tuple[PyTree, PyTree]) -> tuple[jax.Array, None]:
            p, lora = pair
            attention = p["attention"] | {name: merged(p["attention"][name], lora[name]) for name in "qkv"}
            dense = {name: p[name] | {"w": merged(p[name]["w"], lora[name])} for name in ("up", "down")}
            return encoder_block(p | dense | {"attention": attention}, x, mask), None

        x, _ = jax.lax.scan(layer, base["embed"][inputs], (base["layers"], adapters))
        return cross_entropy(x @ base["embed"].T, targets)

    def step(state: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
        loss, adapters, opt_state = descend(
            tx, loss_fn, state["adapters"], state["opt_state"], state["base"], batch["tokens"]
        )
        return {"base": state["base"], "adapters": adapters, "opt_state": opt_state}, {"loss": loss}

    return Case(name="lora", step=step, init=init, batch=token_batch(batch, LENGTH, VOCABULARY))


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

    def init(key: jax.Array) -> PyTree:
        a, b, *keys = jax.random.split(key, LAYERS + 2)

        def layer(key: jax.Array) -> PyTree:
            k = jax.random.split(key, len(shapes))
            return {n: quantize(normal(i, *s)) for (n, s), i in zip(shapes.items(), k, strict=True)}

        def adapter(key: jax.Array) -> PyTree:
            k = jax.random.split(key, len(shapes))
            return {
                n: {"a": normal(i, s[0], rank), "b": jnp.zeros((rank, s[1]))}
                for (n, s), i in zip(shapes.items(), k, strict=True)
            }

        base = {"embed": normal(a, VOCABULARY, WIDTH).astype(jnp.bfloat16), "layers": [layer(k) for k in keys]}
        adapters = [adapter(k) for k in jax.random.split(b, LAYERS)]
        return {"base": base, "adapters": adapters, "opt_state": tx.init(adapters)}

    def linear(x: jax.Array, q: PyTree, lora: PyTree, shape: tuple[int, ...]) -> jax.Array:
        a, b = lora["a"].astype(x.dtype), lora["b"].astype(x.dtype)
        return x @ dequantize(q, shape) + 2.0 * (x @ a) @ b

    def loss_fn(adapters: PyTree, base: PyTree, tokens: jax.Array) -> jax.Array:
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

    def step(state: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
        loss, adapters, opt_state = descend(
            tx, loss_fn, state["adapters"], state["opt_state"], state["base"], batch["tokens"]
        )
        return {**state, "adapters": adapters, "opt_state": opt_state}, {"loss": loss}

    return Case(name="qlora", step=step, init=init, batch=token_batch(batch, LENGTH, VOCABULARY))


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
