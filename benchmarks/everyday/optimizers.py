"""Optimizers and ways of accumulating, each with the model that it is often shown with."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from benchmarks.everyday.parts import (
    LENGTH,
    VOCABULARY,
    WIDTH,
    apply_mlp,
    decoded,
    decoder_params,
    float_batch,
    integers,
    joined,
    mlp,
    normal,
    token_batch,
    trained,
)
from benchmarks.zoo.case import Case, PyTree
from benchmarks.zoo.training import cross_entropy, descend

make_decoder = partial(decoder_params, layers=2, scanned=False, head=True)


def _decoder_loss(params: PyTree, batch: PyTree) -> jax.Array:
    tokens = batch["tokens"]
    return cross_entropy(decoded(params, tokens[:, :-1]) @ params["head"], tokens[:, 1:])


def _classes(batch: int) -> object:
    return joined(float_batch(x=(batch, 16)), integers(10, labels=(batch,)))


def _mlp_loss(params: PyTree, batch: PyTree) -> jax.Array:
    logits = apply_mlp(params, batch["x"], jnp.tanh)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()


def muon(batch: int = 8) -> Case:
    """Newton and Schulz's iteration of the momentum of each matrix of the blocks; AdamW for the rest."""

    def orthogonal(m: jax.Array) -> jax.Array:
        a, b, c = 3.4445, -4.7750, 2.0315
        x = m.reshape(m.shape[0], -1)
        tall = x.shape[0] > x.shape[1]
        x = x.T if tall else x
        x = x / (jnp.linalg.norm(x) + 1e-7)
        for _ in range(5):
            gram = x @ x.T
            x = a * x + (b * gram + c * gram @ gram) @ x
        x = x.T if tall else x
        return x.reshape(m.shape) * max(1, x.shape[0] / x.shape[1]) ** 0.5

    def by_newton_schulz(momentum: float = 0.95) -> optax.GradientTransformation:
        def update(grads: PyTree, velocity: PyTree, params: PyTree | None = None) -> tuple[PyTree, PyTree]:
            velocity = jax.tree.map(lambda v, g: momentum * v + g, velocity, grads)
            return jax.tree.map(lambda g, v: orthogonal(g + momentum * v), grads, velocity), velocity

        return optax.GradientTransformation(lambda params: jax.tree.map(jnp.zeros_like, params), update)

    def labels(params: PyTree) -> PyTree:
        def label(path: tuple, p: jax.Array) -> str:
            return "muon" if path[0].key == "blocks" and p.ndim >= 2 else "adamw"

        return jax.tree_util.tree_map_with_path(label, params)

    matrices = optax.chain(by_newton_schulz(), optax.add_decayed_weights(0.01), optax.scale(-0.02))
    tx = optax.multi_transform({"muon": matrices, "adamw": optax.adamw(1e-3)}, labels)

    return trained("muon", make_decoder, _decoder_loss, tx, token_batch(batch, LENGTH, VOCABULARY))


class SoapMatrix(NamedTuple):
    """Of one matrix: both factors of Shampoo, their bases, and Adam's moments in these."""

    left: jax.Array
    right: jax.Array
    left_basis: jax.Array
    right_basis: jax.Array
    m: jax.Array
    v: jax.Array


def soap(batch: int = 8) -> Case:
    """Adam in the bases of Shampoo's factors, which a step of the power iteration (a matmul and a QR) follows."""
    rate, b1, b2, shampoo = 3e-3, 0.95, 0.95, 0.95

    def begin(p: jax.Array) -> SoapMatrix:
        rows, columns = p.shape
        zeros, eye = jnp.zeros_like(p), jnp.eye
        return SoapMatrix(
            left=1e-3 * eye(rows), right=1e-3 * eye(columns), left_basis=eye(rows), right_basis=eye(columns),
            m=zeros, v=zeros,
        )  # fmt: skip

    def update(g: jax.Array, s: SoapMatrix, count: jax.Array) -> tuple[jax.Array, SoapMatrix]:
        left = shampoo * s.left + (1 - shampoo) * g @ g.T
        right = shampoo * s.right + (1 - shampoo) * g.T @ g
        m = b1 * s.m + (1 - b1) * g
        g_rotated, m_rotated = (s.left_basis.T @ x @ s.right_basis for x in (g, m))
        v = b2 * s.v + (1 - b2) * g_rotated**2
        direction = (m_rotated / (1 - b1**count)) / (jnp.sqrt(v / (1 - b2**count)) + 1e-8)
        step = -rate * s.left_basis @ direction @ s.right_basis.T
        left_basis, _ = jnp.linalg.qr(left @ s.left_basis)
        right_basis, _ = jnp.linalg.qr(right @ s.right_basis)
        return step, SoapMatrix(left, right, left_basis, right_basis, m, v)

    def init(key: jax.Array) -> PyTree:
        a, b, c = jax.random.split(key, 3)
        params = {"in": normal(a, 16, WIDTH), "hidden": normal(b, WIDTH, WIDTH), "out": normal(c, WIDTH, 10)}
        return {"params": params, "soap": {n: begin(p) for n, p in params.items()}, "count": jnp.zeros((), jnp.int32)}

    def loss_fn(params: PyTree, batch: PyTree) -> jax.Array:
        h = jnp.tanh(jnp.tanh(batch["x"] @ params["in"]) @ params["hidden"])
        return optax.softmax_cross_entropy_with_integer_labels(h @ params["out"], batch["labels"]).mean()

    def step(state: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
        loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch)
        count = state["count"] + 1
        found = {n: update(g, state["soap"][n], count) for n, g in grads.items()}
        params = {n: p + found[n][0] for n, p in state["params"].items()}
        return {"params": params, "soap": {n: s for n, (_, s) in found.items()}, "count": count}, {"loss": loss}

    return Case(name="soap", step=step, init=init, batch=_classes(batch))


def schedule_free(batch: int = 8) -> Case:
    """optax's schedule-free AdamW, and how far its averaged parameters are from those that are trained."""
    tx = optax.contrib.schedule_free_adamw(learning_rate=1e-2, warmup_steps=5)

    def init(key: jax.Array) -> PyTree:
        params = mlp(key, (16, 32, 32, 10))
        return {"params": params, "opt_state": tx.init(params)}

    def step(state: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
        loss, params, opt_state = descend(tx, _mlp_loss, state["params"], state["opt_state"], batch)
        averaged = optax.contrib.schedule_free_eval_params(opt_state, params)
        distance = optax.global_norm(jax.tree.map(jnp.subtract, averaged, params))
        return {"params": params, "opt_state": opt_state}, {"loss": loss, "distance": distance}

    return Case(name="schedule_free", step=step, init=init, batch=_classes(batch))


def lbfgs(batch: int = 8) -> Case:
    """optax's L-BFGS: its line search calls the loss of the whole batch again."""
    tx = optax.lbfgs(memory_size=4, linesearch=optax.scale_by_zoom_linesearch(max_linesearch_steps=5))

    def init(key: jax.Array) -> PyTree:
        params = mlp(key, (16, 32, 10))
        return params, tx.init(params)

    def step(state: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
        params, opt_state = state

        def loss_fn(params: PyTree) -> jax.Array:
            return _mlp_loss(params, batch)

        value, grads = optax.value_and_grad_from_state(loss_fn)(params, state=opt_state)
        updates, opt_state = tx.update(grads, opt_state, params, value=value, grad=grads, value_fn=loss_fn)
        return (optax.apply_updates(params, updates), opt_state), {"loss": value}

    return Case(name="lbfgs", step=step, init=init, batch=_classes(batch))


def multi_steps_ema(batch: int = 8) -> Case:
    """`optax.MultiSteps` over two calls, frozen embeddings by a mask, an EMA of parameters with its bias corrected."""
    frozen = {"embed": True, "blocks": False, "head": False}
    tx = optax.MultiSteps(
        optax.chain(
            optax.masked(optax.set_to_zero(), frozen),
            optax.clip_by_global_norm(1.0),
            optax.lion(1e-3, weight_decay=0.1),
        ),
        every_k_schedule=2,
    )
    ema = optax.ema(0.99)

    def init(key: jax.Array) -> PyTree:
        params = make_decoder(key)
        return {"params": params, "opt_state": tx.init(params), "ema": ema.init(params)}

    def step(state: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
        loss, params, opt_state = descend(tx, _decoder_loss, state["params"], state["opt_state"], batch)
        averaged, ema_state = ema.update(params, state["ema"])
        metrics = {"loss": loss, "distance": optax.global_norm(jax.tree.map(jnp.subtract, averaged, params))}
        return {"params": params, "opt_state": opt_state, "ema": ema_state}, metrics

    return Case(name="multi_steps_ema", step=step, init=init, batch=token_batch(batch, LENGTH, VOCABULARY))


def own_accumulation(batch: int = 8) -> Case:
    """The batch comes in four parts, (part, example, token): a scan over parts sums gradients before one update."""
    parts = 4
    tx = optax.adamw(1e-3)

    def init(key: jax.Array) -> PyTree:
        params = decoder_params(key, 2, head=True)
        # Each layer has an optimizer state of its own, its count too.
        opt_state = {"layers": jax.vmap(tx.init)(params["layers"]), "rest": tx.init(_rest(params))}
        return {"params": params, "opt_state": opt_state}

    def _rest(params: PyTree) -> PyTree:
        return {name: p for name, p in params.items() if name != "layers"}

    def loss_fn(params: PyTree, tokens: jax.Array) -> jax.Array:
        return _decoder_loss(params, {"tokens": tokens})

    def step(state: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
        params = state["params"]

        def accumulate(sums: tuple, tokens: jax.Array) -> tuple:
            loss, grads = jax.value_and_grad(loss_fn)(params, tokens)
            return (sums[0] + loss, jax.tree.map(jnp.add, sums[1], grads)), None

        zeros = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
        (loss, grads), _ = jax.lax.scan(accumulate, zeros, batch["tokens"])
        grads = jax.tree.map(lambda g: g / parts, grads)
        layers, layers_state = jax.vmap(tx.update)(grads["layers"], state["opt_state"]["layers"], params["layers"])
        rest, rest_state = tx.update(_rest(grads), state["opt_state"]["rest"], _rest(params))
        params = optax.apply_updates(params, rest | {"layers": layers})
        return {"params": params, "opt_state": {"layers": layers_state, "rest": rest_state}}, {"loss": loss / parts}

    def make(seed: int) -> PyTree:
        tokens = token_batch(parts * batch, LENGTH, VOCABULARY)(seed)["tokens"]
        return {"tokens": tokens.reshape(parts, batch, -1)}

    return Case(name="own_accumulation", step=step, init=init, batch=make)


STEPS = (muon, soap, schedule_free, lbfgs, multi_steps_ema, own_accumulation)
