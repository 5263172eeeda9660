"""Models of images, alone and beside text: classifiers, and self-supervision with teachers, masks, and queues."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax.training import train_state

from benchmarks.everyday.parts import (
    apply_mlp,
    dense,
    encoder_block,
    encoder_block_params,
    float_batch,
    integers,
    joined,
    layer_norm,
    layer_norm_params,
    mlp,
    normal,
    trained,
)
from benchmarks.zoo.case import Case, PyTree
from benchmarks.zoo.training import descend

IMAGE, PATCH, WIDTH, HEADS, CLASSES = 16, 4, 32, 4, 10
PATCHES = (IMAGE // PATCH) ** 2


def _patches(images: jax.Array) -> jax.Array:
    """(batch, patch, values)."""
    b, h, w, c = images.shape
    x = images.reshape(b, h // PATCH, PATCH, w // PATCH, PATCH, c)
    return x.transpose(0, 1, 3, 2, 4, 5).reshape(b, -1, PATCH * PATCH * c)


class Encoder(nn.Module):
    """A pre-norm block."""

    rate: float

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool) -> jax.Array:
        h = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(HEADS, dropout_rate=self.rate)(h, h, deterministic=not train)
        h = nn.Dense(2 * WIDTH)(nn.LayerNorm()(x))
        h = nn.Dropout(self.rate, deterministic=not train)(nn.gelu(h))
        return x + nn.Dense(WIDTH)(h)


class ViT(nn.Module):
    """Images to logits, from a class token."""

    layers: int = 2
    rate: float = 0.1

    @nn.compact
    def __call__(self, images: jax.Array, *, train: bool) -> jax.Array:
        x = nn.Conv(WIDTH, (PATCH, PATCH), strides=(PATCH, PATCH), padding="VALID", name="embedding")(images)
        x = x.reshape(x.shape[0], -1, WIDTH)
        cls = self.param("cls", nn.initializers.zeros, (1, 1, WIDTH))
        x = jnp.concatenate([jnp.tile(cls, (x.shape[0], 1, 1)), x], axis=1)
        x = x + self.param("positions", nn.initializers.normal(0.02), (1, x.shape[1], WIDTH))
        for _ in range(self.layers):
            x = Encoder(self.rate)(x, train=train)
        return nn.Dense(CLASSES, name="head")(nn.LayerNorm()(x)[:, 0])


def vit(batch: int = 8) -> Case:
    """Linen with a `TrainState`, dropout keys folded from the step's number, smoothed labels, mixed-up images."""
    model = ViT()
    tx = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(optax.cosine_decay_schedule(1e-3, 100), weight_decay=0.05),
    )

    def init(key: jax.Array) -> train_state.TrainState:
        params = model.init(key, jnp.zeros((1, IMAGE, IMAGE, 3)), train=False)["params"]
        return train_state.TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    def step(state: train_state.TrainState, batch: PyTree) -> tuple[Any, PyTree]:
        dropout_key, mix_key = jax.random.split(jax.random.fold_in(jax.random.key(17), state.step))

        def loss_fn(params: PyTree) -> tuple[jax.Array, jax.Array]:
            share = jax.random.beta(mix_key, 0.8, 0.8)
            images = share * batch["images"] + (1 - share) * jnp.flip(batch["images"], axis=2)
            logits = state.apply_fn({"params": params}, images, train=True, rngs={"dropout": dropout_key})
            labels = optax.smooth_labels(jax.nn.one_hot(batch["labels"], CLASSES), 0.1)
            return optax.softmax_cross_entropy(logits, labels).mean(), logits

        (loss, logits), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        accuracy = jnp.mean(jnp.argmax(logits, -1) == batch["labels"])
        return state.apply_gradients(grads=grads), {"loss": loss, "accuracy": accuracy}

    return Case(name="vit", step=step, init=init, batch=_labelled(batch))


def _labelled(batch: int) -> Any:
    return joined(float_batch(images=(batch, IMAGE, IMAGE, 3)), integers(CLASSES, labels=(batch,)))


def _encoder_params(key: jax.Array, layers: int, inputs: int) -> PyTree:
    keys = jax.random.split(key, layers + 2)
    return {
        "embed": dense(keys[0], inputs, WIDTH),
        "positions": normal(keys[1], PATCHES, WIDTH, scale=0.02),
        "blocks": [encoder_block_params(k, WIDTH, HEADS) for k in keys[2:]],
        "norm": layer_norm_params(WIDTH),
    }


def _encode(p: PyTree, images: jax.Array) -> jax.Array:
    """Images to (batch, patch, width)."""
    x = _patches(images) @ p["embed"]["w"] + p["embed"]["b"] + p["positions"]
    for block in p["blocks"]:
        x = encoder_block(block, x)
    return layer_norm(x, p["norm"])


def mae(batch: int = 8) -> Case:
    """Three of four patches are hidden, by the order of noise; the decoder restores them, the loss is of them alone."""
    kept = PATCHES // 4
    tx = optax.adamw(1e-3, b2=0.95, weight_decay=0.05)

    def init(key: jax.Array) -> PyTree:
        a, b, c, d = jax.random.split(key, 4)
        return {
            "encoder": _encoder_params(a, 2, 3 * PATCH**2),
            "to_decoder": dense(b, WIDTH, WIDTH),
            "mask_token": jnp.zeros((1, 1, WIDTH)),
            "decoder": _encoder_params(c, 1, WIDTH),
            "head": dense(d, WIDTH, 3 * PATCH**2),
        }

    def forward(params: PyTree, target: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        enc = params["encoder"]
        x = target @ enc["embed"]["w"] + enc["embed"]["b"] + enc["positions"]
        noise = jax.random.uniform(key, x.shape[:2])
        shuffle = jnp.argsort(noise, axis=1)
        restore = jnp.argsort(shuffle, axis=1)
        x = jnp.take_along_axis(x, shuffle[:, :kept, None], axis=1)
        for block in enc["blocks"]:
            x = encoder_block(block, x)
        x = layer_norm(x, enc["norm"]) @ params["to_decoder"]["w"] + params["to_decoder"]["b"]
        hidden = jnp.broadcast_to(params["mask_token"], (x.shape[0], PATCHES - kept, WIDTH))
        x = jnp.take_along_axis(jnp.concatenate([x, hidden], axis=1), restore[..., None], axis=1)
        x = x + params["decoder"]["positions"]
        for block in params["decoder"]["blocks"]:
            x = encoder_block(block, x)
        return x @ params["head"]["w"] + params["head"]["b"], (restore >= kept).astype(jnp.float32)

    def loss_fn(params: PyTree, batch: PyTree, key: jax.Array) -> jax.Array:
        target = _patches(batch["images"])
        prediction, mask = forward(params, target, key)
        mean, var = target.mean(-1, keepdims=True), target.var(-1, keepdims=True)
        error = jnp.square(prediction - (target - mean) / jnp.sqrt(var + 1e-6)).mean(-1)
        return (error * mask).sum() / mask.sum()

    make = float_batch(images=(batch, IMAGE, IMAGE, 3))
    return trained("mae", init, loss_fn, tx, make, has_key=True)


def clip(batch: int = 8) -> Case:
    """Two encoders, a learned temperature that is clipped, and each pair against all others of the batch."""
    vocabulary, length = 64, 12
    tx = optax.adamw(1e-3, b2=0.98, eps=1e-6, weight_decay=0.2)

    def init(key: jax.Array) -> PyTree:
        k = jax.random.split(key, 6)
        params = {
            "image": _encoder_params(k[0], 1, 3 * PATCH**2),
            "text": {
                "tokens": normal(k[1], vocabulary, WIDTH),
                "positions": normal(k[2], length, WIDTH),
                "block": encoder_block_params(k[3], WIDTH, HEADS),
            },
            "image_out": normal(k[4], WIDTH, 16),
            "text_out": normal(k[5], WIDTH, 16),
            "logit_scale": jnp.log(1 / 0.07),
        }
        return {"params": params, "opt_state": tx.init(params)}

    def loss_fn(params: PyTree, batch: PyTree) -> jax.Array:
        images = _encode(params["image"], batch["images"]).mean(1) @ params["image_out"]
        text, tokens = params["text"], batch["tokens"]
        h = encoder_block(text["block"], text["tokens"][tokens] + text["positions"])
        texts = h[jnp.arange(tokens.shape[0]), tokens.argmax(-1)] @ params["text_out"]
        images = images / jnp.linalg.norm(images, axis=-1, keepdims=True)
        texts = texts / jnp.linalg.norm(texts, axis=-1, keepdims=True)
        logits = jnp.exp(params["logit_scale"]) * images @ texts.T
        labels = jnp.arange(logits.shape[0])
        both = (optax.softmax_cross_entropy_with_integer_labels(x, labels).mean() for x in (logits, logits.T))
        return sum(both) / 2

    def step(state: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
        loss, params, opt_state = descend(tx, loss_fn, state["params"], state["opt_state"], batch)
        params["logit_scale"] = jnp.clip(params["logit_scale"], 0, jnp.log(100.0))
        return {"params": params, "opt_state": opt_state}, {"loss": loss}

    make = joined(float_batch(images=(batch, IMAGE, IMAGE, 3)), integers(vocabulary, tokens=(batch, length)))
    return Case(name="clip", step=step, init=init, batch=make)


def dino(batch: int = 8) -> Case:
    """A student against its own average over time: a teacher's sharpened output, less the running centre of it."""
    outputs = 32
    tx = optax.adamw(1e-3)

    def init(key: jax.Array) -> PyTree:
        a, b = jax.random.split(key)
        student = {"encoder": _encoder_params(a, 2, 3 * PATCH**2), "head": mlp(b, (WIDTH, 64, outputs))}
        return {
            "student": student,
            "teacher": jax.tree.map(jnp.copy, student),
            "center": jnp.zeros((1, outputs)),
            "opt_state": tx.init(student),
            "step": jnp.zeros((), jnp.int32),
        }

    def forward(params: PyTree, images: jax.Array) -> jax.Array:
        return apply_mlp(params["head"], _encode(params["encoder"], images).mean(1), jax.nn.gelu)

    def step(state: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
        views = [batch["first"], batch["second"]]
        targets = [forward(state["teacher"], view) for view in views]
        sharp = [jax.lax.stop_gradient(jax.nn.softmax((t - state["center"]) / 0.04)) for t in targets]

        def loss_fn(student: PyTree) -> jax.Array:
            logs = [jax.nn.log_softmax(forward(student, view) / 0.1) for view in views]
            pairs = [(t, s) for i, t in enumerate(sharp) for j, s in enumerate(logs) if i != j]
            return sum(-jnp.sum(t * s, axis=-1).mean() for t, s in pairs) / len(pairs)

        loss, student, opt_state = descend(tx, loss_fn, state["student"], state["opt_state"])
        momentum = 1 - 0.004 * (jnp.cos(jnp.pi * state["step"] / 100) + 1) / 2
        new = {
            "student": student,
            "teacher": jax.tree.map(lambda t, s: momentum * t + (1 - momentum) * s, state["teacher"], student),
            "center": 0.9 * state["center"] + 0.1 * jnp.concatenate(targets).mean(0, keepdims=True),
            "opt_state": opt_state,
            "step": state["step"] + 1,
        }
        return new, {"loss": loss}

    shape = (batch, IMAGE, IMAGE, 3)
    return Case(name="dino", step=step, init=init, batch=float_batch(first=shape, second=shape))


def moco(batch: int = 8) -> Case:
    """Queries against keys of a slow encoder and a queue of earlier keys, into which the new ones are written."""
    outputs, queue_size = 16, 4 * batch
    tx = optax.sgd(0.03, momentum=0.9)

    def init(key: jax.Array) -> PyTree:
        a, b, c = jax.random.split(key, 3)
        query = {"encoder": _encoder_params(a, 1, 3 * PATCH**2), "head": dense(b, WIDTH, outputs)}
        queue = jax.random.normal(c, (queue_size, outputs))
        return {
            "query": query,
            "key": jax.tree.map(jnp.copy, query),
            "queue": queue / jnp.linalg.norm(queue, axis=-1, keepdims=True),
            "pointer": jnp.zeros((), jnp.int32),
            "opt_state": tx.init(query),
        }

    def embed(params: PyTree, images: jax.Array) -> jax.Array:
        x = _encode(params["encoder"], images).mean(1) @ params["head"]["w"] + params["head"]["b"]
        return x / jnp.linalg.norm(x, axis=-1, keepdims=True)

    def step(state: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
        slow = optax.incremental_update(state["query"], state["key"], 0.001)
        keys = jax.lax.stop_gradient(embed(slow, batch["second"]))

        def loss_fn(params: PyTree) -> jax.Array:
            q = embed(params, batch["first"])
            positive = jnp.einsum("bd,bd->b", q, keys)[:, None]
            logits = jnp.concatenate([positive, q @ state["queue"].T], axis=1) / 0.07
            return -jax.nn.log_softmax(logits)[:, 0].mean()

        loss, query, opt_state = descend(tx, loss_fn, state["query"], state["opt_state"])
        queue = jax.lax.dynamic_update_slice(state["queue"], keys, (state["pointer"], 0))
        new = {
            "query": query,
            "key": slow,
            "queue": queue,
            "pointer": (state["pointer"] + keys.shape[0]) % queue_size,
            "opt_state": opt_state,
        }
        return new, {"loss": loss}

    shape = (batch, IMAGE, IMAGE, 3)
    return Case(name="moco", step=step, init=init, batch=float_batch(first=shape, second=shape))


STEPS = (vit, mae, clip, dino, moco)
