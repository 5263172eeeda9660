"""Language models: decoders, encoders with decoders, state spaces; packed, padded and variable lengths."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.everyday.parts import (
    HEADS,
    LENGTH,
    VOCABULARY,
    WIDTH,
    attend,
    attention,
    attention_params,
    causal,
    decoded,
    decoder_params,
    dense,
    encoder_block,
    encoder_block_params,
    integers,
    joined,
    layer_norm,
    layer_norm_params,
    normal,
    rms_norm,
    rope,
    token_batch,
    trained,
)
from benchmarks.zoo.case import Case, PyTree
from benchmarks.zoo.training import cross_entropy, descend


def _dropout(key: jax.Array, x: jax.Array, rate: float = 0.1) -> jax.Array:
    keep = jax.random.bernoulli(key, 1 - rate, x.shape)
    return jnp.where(keep, x / (1 - rate), 0)


def nanogpt(batch: int = 8) -> Case:
    """Unrolled blocks, learned positions, a tied head, dropout, AdamW that decays matrices only after a warm-up."""
    layers = 2
    tx = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(
            optax.warmup_cosine_decay_schedule(1e-4, 1e-3, 10, 100),
            b2=0.95,
            weight_decay=0.1,
            mask=lambda params: jax.tree.map(lambda p: p.ndim >= 2, params),
        ),
    )

    def init(key: jax.Array) -> PyTree:
        keys = jax.random.split(key, layers + 3)
        params = {
            "wte": normal(keys[0], VOCABULARY, WIDTH),
            "wpe": normal(keys[1], LENGTH, WIDTH),
            "blocks": [encoder_block_params(k, WIDTH, HEADS) for k in keys[3:]],
            "ln_f": layer_norm_params(WIDTH),
        }
        return {"params": params, "opt": tx.init(params), "key": keys[2], "step": jnp.zeros((), jnp.int32)}

    def loss_fn(params: PyTree, tokens: jax.Array, key: jax.Array) -> jax.Array:
        x, y = tokens[:, :-1], tokens[:, 1:]
        t = x.shape[1]
        keys = jax.random.split(key, layers + 1)
        h = _dropout(keys[0], params["wte"][x] + params["wpe"][jnp.arange(t)])
        for block, k in zip(params["blocks"], keys[1:], strict=True):
            h = _dropout(k, encoder_block(block, h, causal(t)))
        logits = layer_norm(h, params["ln_f"]) @ params["wte"].T
        return cross_entropy(logits, y)

    def step(state: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
        key, dropout_key = jax.random.split(state["key"])
        loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch["tokens"], dropout_key)
        updates, opt = tx.update(grads, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        metrics = {"loss": loss, "grad_norm": optax.global_norm(grads)}
        return {"params": params, "opt": opt, "key": key, "step": state["step"] + 1}, metrics

    return Case(name="nanogpt", step=step, init=init, batch=token_batch(batch, LENGTH, VOCABULARY))


def _llama_params(key: jax.Array, layers: int, kv_heads: int) -> PyTree:
    dim = WIDTH // HEADS

    def layer(key: jax.Array) -> PyTree:
        k = jax.random.split(key, 7)
        return {
            "input_norm": jnp.ones(WIDTH),
            "q": normal(k[0], WIDTH, HEADS, dim),
            "k": normal(k[1], WIDTH, kv_heads, dim),
            "v": normal(k[2], WIDTH, kv_heads, dim),
            "o": normal(k[3], HEADS, dim, WIDTH),
            "post_norm": jnp.ones(WIDTH),
            "gate": normal(k[4], WIDTH, 2 * WIDTH),
            "up": normal(k[5], WIDTH, 2 * WIDTH),
            "down": normal(k[6], 2 * WIDTH, WIDTH),
        }

    a, b, c = jax.random.split(key, 3)
    return {
        "embed": normal(a, VOCABULARY, WIDTH),
        "layers": jax.vmap(layer)(jax.random.split(b, layers)),
        "norm": jnp.ones(WIDTH),
        "head": normal(c, WIDTH, VOCABULARY),
    }


def _llama_layer(x: jax.Array, p: PyTree, kv_heads: int) -> jax.Array:
    t = x.shape[1]
    positions = jnp.arange(t)[None]
    h = rms_norm(x, p["input_norm"])
    q = rope(jnp.einsum("btw,whd->bthd", h, p["q"]), positions)
    k = rope(jnp.einsum("btw,whd->bthd", h, p["k"]), positions)
    v = jnp.einsum("btw,whd->bthd", h, p["v"])
    k, v = (jnp.repeat(a, HEADS // kv_heads, axis=2) for a in (k, v))
    x = x + jnp.einsum("bthd,hdw->btw", attention(q, k, v, causal(t)), p["o"])
    h = rms_norm(x, p["post_norm"])
    return x + (jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"]


class MixedState(NamedTuple):
    """Master weights in float32; the forward pass reads bfloat16."""

    step: jax.Array
    params: PyTree
    opt_state: optax.OptState


def llama_bf16_scan_remat(batch: int = 8) -> Case:
    """A policy of types, scanned layers under `jax.checkpoint` that saves matmuls, z-loss, AdamW with clipping."""
    kv_heads = 2
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-4, b1=0.9, b2=0.95, weight_decay=0.1))

    def init(key: jax.Array) -> MixedState:
        params = _llama_params(key, 4, kv_heads)
        return MixedState(step=jnp.zeros((), jnp.int32), params=params, opt_state=tx.init(params))

    @partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable)
    def layer(x: jax.Array, p: PyTree) -> tuple[jax.Array, None]:
        return _llama_layer(x, p, kv_heads), None

    def loss_fn(params: PyTree, tokens: jax.Array) -> tuple[jax.Array, PyTree]:
        params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        x, _ = jax.lax.scan(layer, params["embed"][inputs], params["layers"])
        logits = (rms_norm(x, params["norm"]) @ params["head"]).astype(jnp.float32)
        normalizer = jax.nn.logsumexp(logits, axis=-1)
        picked = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
        nll, z = (normalizer - picked).mean(), 1e-4 * jnp.square(normalizer).mean()
        return nll + z, {"nll": nll, "z_loss": z}

    def step(state: MixedState, batch: PyTree) -> tuple[MixedState, PyTree]:
        (loss, aux), params, opt_state = descend(
            tx, loss_fn, state.params, state.opt_state, batch["tokens"], has_aux=True
        )
        return MixedState(step=state.step + 1, params=params, opt_state=opt_state), {"loss": loss, **aux}

    return Case(name="llama_bf16_scan_remat", step=step, init=init, batch=token_batch(batch, LENGTH, VOCABULARY))


def gemma(batch: int = 8) -> Case:
    """bfloat16, unrolled: layers see a window or everything in turn, capped scores and logits, norms of (1 + gain)."""
    layers, window, dim = 2, 4, WIDTH // HEADS
    tx = optax.adamw(1e-3)

    def layer_params(key: jax.Array) -> PyTree:
        k = jax.random.split(key, 4)
        return {
            "pre": jnp.zeros(WIDTH),
            "qkv": normal(k[0], 3, WIDTH, HEADS, dim),
            "o": normal(k[1], HEADS, dim, WIDTH),
            "post": jnp.zeros(WIDTH),
            "gating": normal(k[2], 2, WIDTH, 2 * WIDTH),
            "linear": normal(k[3], 2 * WIDTH, WIDTH),
        }

    def init(key: jax.Array) -> PyTree:
        keys = jax.random.split(key, layers + 1)
        return {
            "embedder": normal(keys[0], VOCABULARY, WIDTH),
            **{f"layer_{i}": layer_params(k) for i, k in enumerate(keys[1:])},
            "final_norm": jnp.zeros(WIDTH),
        }

    def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
        variance = jnp.mean(jnp.square(x.astype(jnp.float32)), axis=-1, keepdims=True)
        normed = (x * jax.lax.rsqrt(variance + 1e-6)).astype(jnp.float32)
        return (normed * (1 + scale.astype(jnp.float32))).astype(x.dtype)

    def softcap(x: jax.Array, cap: float) -> jax.Array:
        return jnp.tanh(x / cap) * cap

    def block(p: PyTree, x: jax.Array, mask: jax.Array) -> jax.Array:
        h = norm(x, p["pre"])
        q, k, v = jnp.einsum("btw,swhd->sbthd", h, p["qkv"])
        positions = jnp.arange(x.shape[1])[None]
        q, k = rope(q, positions) * dim**-0.5, rope(k, positions)
        scores = softcap(jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32), 50.0)
        weights = jax.nn.softmax(jnp.where(mask, scores, -2.3e38), axis=-1).astype(x.dtype)
        x = x + jnp.einsum("bqhd,hdw->bqw", jnp.einsum("bhqk,bkhd->bqhd", weights, v), p["o"])
        h = norm(x, p["post"])
        gate, up = jnp.einsum("btw,swf->sbtf", h, p["gating"])
        return x + (jax.nn.gelu(gate) * up) @ p["linear"]

    def loss_fn(params: PyTree, batch: PyTree) -> jax.Array:
        tokens = batch["tokens"]
        params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        t = inputs.shape[1]
        full = causal(t)
        local = full & ~jnp.tril(full, -window)
        x = params["embedder"][inputs] * jnp.asarray(WIDTH**0.5, jnp.bfloat16)
        for i in range(layers):
            x = block(params[f"layer_{i}"], x, full if i % 2 else local)
        logits = softcap((norm(x, params["final_norm"]) @ params["embedder"].T).astype(jnp.float32), 30.0)
        one_hot = jax.nn.one_hot(targets, VOCABULARY)
        return -jnp.mean(jnp.sum(jax.nn.log_softmax(logits) * one_hot, axis=-1))

    return trained("gemma", init, loss_fn, tx, token_batch(batch, LENGTH, VOCABULARY))


def mixtral(batch: int = 8) -> Case:
    """Two of four experts for each token, all computed and weighted; a z-loss of the router, scanned layers."""
    layers, experts, top_k = 2, 4, 2
    tx = optax.adamw(1e-3)

    def layer_params(key: jax.Array) -> PyTree:
        k = jax.random.split(key, 5)
        return {
            "norm1": jnp.ones(WIDTH),
            "attention": attention_params(k[0], WIDTH, HEADS),
            "norm2": jnp.ones(WIDTH),
            "router": normal(k[1], WIDTH, experts),
            "w1": normal(k[2], experts, WIDTH, WIDTH),
            "w3": normal(k[3], experts, WIDTH, WIDTH),
            "w2": normal(k[4], experts, WIDTH, WIDTH),
        }

    def init(key: jax.Array) -> PyTree:
        a, b = jax.random.split(key)
        return {
            "embed": normal(a, VOCABULARY, WIDTH),
            "layers": jax.vmap(layer_params)(jax.random.split(b, layers)),
            "norm": jnp.ones(WIDTH),
        }

    def layer(carry: tuple[jax.Array, jax.Array], p: PyTree) -> tuple[tuple[jax.Array, jax.Array], None]:
        x, z_loss = carry
        x = x + attend(p["attention"], rms_norm(x, p["norm1"]), mask=causal(x.shape[1]))
        h = rms_norm(x, p["norm2"])
        router_logits = h @ p["router"]
        weights, chosen = jax.lax.top_k(jax.nn.softmax(router_logits), top_k)
        weights = weights / weights.sum(-1, keepdims=True)
        gates = jnp.sum(jax.nn.one_hot(chosen, experts) * weights[..., None], axis=-2)
        inner = jax.nn.silu(jnp.einsum("btw,ewf->btef", h, p["w1"])) * jnp.einsum("btw,ewf->btef", h, p["w3"])
        x = x + jnp.einsum("btef,efw,bte->btw", inner, p["w2"], gates)
        return (x, z_loss + jnp.mean(jax.nn.logsumexp(router_logits, axis=-1) ** 2)), None

    def loss_fn(params: PyTree, batch: PyTree) -> tuple[jax.Array, PyTree]:
        tokens = batch["tokens"]
        x = params["embed"][tokens[:, :-1]]
        (x, z_loss), _ = jax.lax.scan(layer, (x, jnp.zeros(())), params["layers"])
        loss = cross_entropy(rms_norm(x, params["norm"]) @ params["embed"].T, tokens[:, 1:])
        return loss + 1e-3 * z_loss, {"router_z": z_loss}

    return trained("mixtral", init, loss_fn, tx, token_batch(batch, LENGTH, VOCABULARY), has_aux=True)


def mamba(batch: int = 8) -> Case:
    """Selective state spaces: a causal depthwise convolution, and the recurrence by `associative_scan`."""
    layers, inner, states = 2, 2 * WIDTH, 4
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))

    def layer_params(key: jax.Array) -> PyTree:
        k = jax.random.split(key, 6)
        return {
            "norm": jnp.ones(WIDTH),
            "in": normal(k[0], WIDTH, 2 * inner),
            "conv": normal(k[1], 4, 1, inner),
            "bc": normal(k[2], inner, 2 * states),
            "dt": normal(k[3], inner, inner),
            "dt_bias": jnp.full(inner, -2.0),
            "a_log": jnp.log(jnp.broadcast_to(jnp.arange(1.0, states + 1), (inner, states))),
            "d": jnp.ones(inner),
            "out": normal(k[5], inner, WIDTH),
        }

    def init(key: jax.Array) -> PyTree:
        keys = jax.random.split(key, layers + 1)
        return {"embed": normal(keys[0], VOCABULARY, WIDTH), "layers": [layer_params(k) for k in keys[1:]]}

    def mixer(p: PyTree, x: jax.Array) -> jax.Array:
        u, gate = jnp.split(x @ p["in"], 2, axis=-1)
        u = jax.lax.conv_general_dilated(
            u, p["conv"], (1,), [(3, 0)], dimension_numbers=("NWC", "WIO", "NWC"), feature_group_count=inner
        )
        u = jax.nn.silu(u)
        b, c = jnp.split(u @ p["bc"], 2, axis=-1)
        dt = jax.nn.softplus(u @ p["dt"] + p["dt_bias"])
        decay = jnp.exp(dt[..., None] * -jnp.exp(p["a_log"]))
        pushed = (dt * u)[..., None] * b[..., None, :]

        def combine(left: tuple, right: tuple) -> tuple:
            return left[0] * right[0], right[0] * left[1] + right[1]

        _, h = jax.lax.associative_scan(combine, (decay, pushed), axis=1)
        y = jnp.einsum("btis,bts->bti", h, c) + p["d"] * u
        return (y * jax.nn.silu(gate)) @ p["out"]

    def loss_fn(params: PyTree, batch: PyTree) -> jax.Array:
        tokens = batch["tokens"]
        x = params["embed"][tokens[:, :-1]]
        for p in params["layers"]:
            x = x + mixer(p, rms_norm(x, p["norm"]))
        return cross_entropy(x @ params["embed"].T, tokens[:, 1:])

    return trained("mamba", init, loss_fn, tx, token_batch(batch, LENGTH, VOCABULARY))


def rwkv(batch: int = 8) -> Case:
    """Token shift by a pad, and the weighted average of the past by a scan over time that carries its maximum."""
    layers = 2
    tx = optax.adam(1e-3)

    def layer_params(key: jax.Array) -> PyTree:
        k = jax.random.split(key, 7)
        names = ("key", "value", "receptance", "output")
        return {
            "ln1": layer_norm_params(WIDTH),
            "ln2": layer_norm_params(WIDTH),
            "mix": jnp.full((3, WIDTH), 0.5),
            "decay": jnp.linspace(-2.0, 1.0, WIDTH),
            "bonus": jnp.full(WIDTH, 0.3),
            **{name: normal(i, WIDTH, WIDTH) for name, i in zip(names, k[:4], strict=True)},
            "channel_key": normal(k[4], WIDTH, 2 * WIDTH),
            "channel_value": normal(k[5], 2 * WIDTH, WIDTH),
            "channel_receptance": normal(k[6], WIDTH, WIDTH),
        }

    def init(key: jax.Array) -> PyTree:
        keys = jax.random.split(key, layers + 2)
        return {
            "emb": normal(keys[0], VOCABULARY, WIDTH),
            "blocks": [layer_params(k) for k in keys[2:]],
            "head": normal(keys[1], WIDTH, VOCABULARY),
        }

    def shift(x: jax.Array) -> jax.Array:
        return jnp.pad(x, ((0, 0), (1, 0), (0, 0)))[:, :-1]

    def time_mix(p: PyTree, x: jax.Array) -> jax.Array:
        xk, xv, xr = (x * m + shift(x) * (1 - m) for m in p["mix"])
        k, v, r = xk @ p["key"], xv @ p["value"], jax.nn.sigmoid(xr @ p["receptance"])
        decay = -jnp.exp(p["decay"])

        def at(carry: tuple, kv: tuple) -> tuple:
            (num, den, top), (k, v) = carry, kv
            high = jnp.maximum(top, p["bonus"] + k)
            old, new = jnp.exp(top - high), jnp.exp(p["bonus"] + k - high)
            out = (old * num + new * v) / (old * den + new)
            high = jnp.maximum(top + decay, k)
            old, new = jnp.exp(top + decay - high), jnp.exp(k - high)
            return (old * num + new * v, old * den + new, high), out

        zeros = jnp.zeros_like(k[:, 0])
        _, wkv = jax.lax.scan(at, (zeros, zeros, zeros - 1e30), (k.swapaxes(0, 1), v.swapaxes(0, 1)))
        return (r * wkv.swapaxes(0, 1)) @ p["output"]

    def channel_mix(p: PyTree, x: jax.Array) -> jax.Array:
        k = jnp.square(jax.nn.relu(shift(x) @ p["channel_key"]))
        return jax.nn.sigmoid(x @ p["channel_receptance"]) * (k @ p["channel_value"])

    def loss_fn(params: PyTree, batch: PyTree) -> jax.Array:
        tokens = batch["tokens"]
        x = params["emb"][tokens[:, :-1]]
        for p in params["blocks"]:
            x = x + time_mix(p, layer_norm(x, p["ln1"]))
            x = x + channel_mix(p, layer_norm(x, p["ln2"]))
        return cross_entropy(x @ params["head"], tokens[:, 1:])

    return trained("rwkv", init, loss_fn, tx, token_batch(batch, LENGTH, VOCABULARY))


def _decoder_block_params(key: jax.Array) -> PyTree:
    a, b = jax.random.split(key)
    return encoder_block_params(a, WIDTH, HEADS) | {
        "cross": attention_params(b, WIDTH, HEADS),
        "norm3": layer_norm_params(WIDTH),
    }


def _decoder_block(p: PyTree, x: jax.Array, memory: jax.Array, memory_mask: jax.Array | None = None) -> jax.Array:
    x = x + attend(p["attention"], layer_norm(x, p["norm1"]), mask=causal(x.shape[1]))
    x = x + attend(p["cross"], layer_norm(x, p["norm3"]), memory=memory, mask=memory_mask)
    h = jax.nn.gelu(layer_norm(x, p["norm2"]) @ p["up"]["w"] + p["up"]["b"])
    return x + h @ p["down"]["w"] + p["down"]["b"]


def t5(batch: int = 8) -> Case:
    """Padded pairs, a bias by buckets of relative positions, two scans over layers, Adafactor, weights of tokens."""
    layers, buckets = 2, 8
    tx = optax.adafactor(1e-2, min_dim_size_to_factor=16)

    def init(key: jax.Array) -> PyTree:
        k = jax.random.split(key, 4)
        params = {
            "shared": normal(k[0], VOCABULARY, WIDTH),
            "relative": normal(k[1], buckets, HEADS),
            "encoder": jax.vmap(lambda k: encoder_block_params(k, WIDTH, HEADS))(jax.random.split(k[2], layers)),
            "decoder": jax.vmap(_decoder_block_params)(jax.random.split(k[3], layers)),
        }
        return params

    def encoder_layer(x: jax.Array, p: PyTree, bias: jax.Array, mask: jax.Array) -> jax.Array:
        h, a = layer_norm(x, p["norm1"]), p["attention"]
        q, k, v = (jnp.einsum("btw,whd->bthd", h, a[name]) for name in "qkv")
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) + bias
        weights = jax.nn.softmax(jnp.where(mask, scores, -1e9), axis=-1)
        x = x + jnp.einsum("bhqk,bkhd,hdw->bqw", weights, v, a["o"])
        h = jax.nn.relu(layer_norm(x, p["norm2"]) @ p["up"]["w"])
        return x + h @ p["down"]["w"]

    def loss_fn(params: PyTree, batch: PyTree) -> tuple[jax.Array, PyTree]:
        inputs, targets = batch["inputs"], batch["targets"]
        mask = (inputs > 0)[:, None, None, :]
        positions = jnp.arange(inputs.shape[1])
        distance = jnp.clip(positions[None] - positions[:, None] + buckets // 2, 0, buckets - 1)
        bias = params["relative"][distance].transpose(2, 0, 1)[None]
        x, _ = jax.lax.scan(
            lambda x, p: (encoder_layer(x, p, bias, mask), None), params["shared"][inputs], params["encoder"]
        )
        shifted = jnp.pad(targets, ((0, 0), (1, 0)))[:, :-1]
        y, _ = jax.lax.scan(
            lambda y, p: (_decoder_block(p, y, x, mask), None), params["shared"][shifted], params["decoder"]
        )
        logits = y @ params["shared"].T * WIDTH**-0.5
        weights = (targets > 0).astype(jnp.float32)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets) * weights
        loss = losses.sum() / weights.sum()
        hits = ((logits.argmax(-1) == targets) * weights).sum()
        return loss, {"accuracy": hits / weights.sum(), "tokens": weights.sum()}

    def make(seed: int) -> PyTree:
        random = np.random.default_rng(seed)
        made = {}
        for name, length in (("inputs", LENGTH), ("targets", LENGTH // 2)):
            lengths = random.integers(2, length + 1, (batch, 1))
            tokens = random.integers(1, VOCABULARY, (batch, length), dtype=np.int32)
            made[name] = np.where(np.arange(length) < lengths, tokens, 0).astype(np.int32)
        return made

    return trained("t5", init, loss_fn, tx, make, has_aux=True)


def packed(batch: int = 8) -> Case:
    """Several documents in a row: attention within segments, positions from their beginnings, padding without loss."""
    tx = optax.adamw(1e-3)

    def loss_fn(params: PyTree, batch: PyTree) -> tuple[jax.Array, PyTree]:
        tokens, segments = batch["tokens"], batch["segments"]
        x, y = tokens[:, :-1], tokens[:, 1:]
        inside = segments[:, :-1]
        t = x.shape[1]
        begins = jnp.pad(inside[:, 1:] != inside[:, :-1], ((0, 0), (1, 0)))
        starts = jax.lax.cummax(jnp.where(begins, jnp.arange(t), 0), axis=1)
        positions = jnp.arange(t) - starts
        mask = (inside[:, None, :, None] == inside[:, None, None, :]) & causal(t)
        weights = ((inside == segments[:, 1:]) & (inside > 0)).astype(jnp.float32)
        frequency = 100.0 ** (-jnp.arange(WIDTH) / WIDTH)
        h = params["embed"][x] + jnp.sin(positions[..., None] * frequency)
        h, _ = jax.lax.scan(jax.checkpoint(lambda h, p: (encoder_block(p, h, mask), None)), h, params["layers"])
        losses = optax.softmax_cross_entropy_with_integer_labels(h @ params["embed"].T, y)
        return (losses * weights).sum() / weights.sum(), {"tokens": weights.sum()}

    def make(seed: int) -> PyTree:
        random = np.random.default_rng(seed)
        cuts = np.sort(random.integers(1, LENGTH, (batch, 2)), axis=1)
        segments = 1 + (np.arange(LENGTH + 1)[None, :, None] >= cuts[:, None]).sum(-1)
        segments = np.where(np.arange(LENGTH + 1) >= LENGTH - random.integers(0, 3, (batch, 1)), 0, segments)
        return token_batch(batch, LENGTH, VOCABULARY)(seed) | {"segments": segments.astype(np.int32)}

    return trained("packed", partial(decoder_params, layers=2), loss_fn, tx, make, has_aux=True)


def chunked_vocabulary(batch: int = 8) -> Case:
    """The loss by chunks of positions in a scan that sums losses and tokens: no logits of the whole batch."""
    chunks = 4
    tx = optax.adamw(1e-3)

    def loss_fn(params: PyTree, batch: PyTree) -> jax.Array:
        tokens = batch["tokens"]
        x, y = tokens[:, :-1], tokens[:, 1:]
        h = decoded(params, x)
        h = h.reshape(*h.shape[:1], chunks, -1, WIDTH).swapaxes(0, 1)
        y = y.reshape(*y.shape[:1], chunks, -1).swapaxes(0, 1)

        @jax.checkpoint
        def chunk(sums: tuple[jax.Array, jax.Array], hy: tuple[jax.Array, jax.Array]) -> tuple:
            losses = optax.softmax_cross_entropy_with_integer_labels(hy[0] @ params["head"], hy[1])
            real = hy[1] > 0
            return (sums[0] + jnp.sum(losses * real), sums[1] + jnp.sum(real)), None

        (total, count), _ = jax.lax.scan(chunk, (jnp.zeros(()), jnp.zeros((), jnp.int32)), (h, y))
        return total / count

    init = partial(decoder_params, layers=2, head=True)
    return trained("chunked_vocabulary", init, loss_fn, tx, token_batch(batch, LENGTH, VOCABULARY))


def lstm_lengths(batch: int = 8) -> Case:
    """Sentences of variable length: a scan over time-major steps that keeps the state behind an end, then a class."""
    classes = 4
    tx = optax.chain(optax.clip(1.0), optax.rmsprop(1e-3))

    def init(key: jax.Array) -> PyTree:
        k = jax.random.split(key, 4)
        return {
            "embed": normal(k[0], VOCABULARY, WIDTH),
            "input": dense(k[1], WIDTH, 4 * WIDTH),
            "hidden": normal(k[2], WIDTH, 4 * WIDTH),
            "head": dense(k[3], WIDTH, classes),
        }

    def loss_fn(params: PyTree, batch: PyTree) -> tuple[jax.Array, PyTree]:
        tokens, lengths = batch["tokens"], batch["lengths"] + 1
        x = params["embed"][tokens] @ params["input"]["w"] + params["input"]["b"]

        def at(carry: tuple[jax.Array, jax.Array], xs: tuple[jax.Array, jax.Array]) -> tuple:
            (h, c), (x, t) = carry, xs
            i, f, g, o = jnp.split(x + h @ params["hidden"], 4, axis=-1)
            new_c = jax.nn.sigmoid(f + 1) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            new_h = jax.nn.sigmoid(o) * jnp.tanh(new_c)
            alive = (t < lengths)[:, None]
            return (jnp.where(alive, new_h, h), jnp.where(alive, new_c, c)), None

        zeros = jnp.zeros((tokens.shape[0], WIDTH))
        (h, _), _ = jax.lax.scan(at, (zeros, zeros), (x.swapaxes(0, 1), jnp.arange(tokens.shape[1])))
        logits = h @ params["head"]["w"] + params["head"]["b"]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
        return losses.mean(), {"accuracy": (logits.argmax(-1) == batch["labels"]).mean()}

    make = joined(
        integers(VOCABULARY, tokens=(batch, LENGTH)),
        integers(LENGTH, lengths=(batch,)),
        integers(classes, labels=(batch,)),
    )
    return trained("lstm_lengths", init, loss_fn, tx, make, has_aux=True)


STEPS = (
    nanogpt,
    llama_bf16_scan_remat,
    gemma,
    mixtral,
    mamba,
    rwkv,
    t5,
    packed,
    chunked_vocabulary,
    lstm_lengths,
)
