"""Steps in the form of each library's own guide: Linen's scan, NNX, Equinox, Haiku."""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax import nnx
from flax.training import train_state

from benchmarks.everyday.parts import (
    HEADS,
    LENGTH,
    VOCABULARY,
    WIDTH,
    causal,
    float_batch,
    integers,
    joined,
    token_batch,
)
from benchmarks.zoo.case import Case, PyTree
from benchmarks.zoo.training import cross_entropy, descend

LAYERS = 3


class LinenBlock(nn.Module):
    """What `nn.scan` repeats: (carry, broadcast mask) to (carry, nothing)."""

    dtype: Any = jnp.bfloat16

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array) -> tuple[jax.Array, None]:
        h = nn.RMSNorm(dtype=self.dtype)(x)
        x = x + nn.MultiHeadDotProductAttention(HEADS, dtype=self.dtype)(h, h, mask=mask)
        h = nn.RMSNorm(dtype=self.dtype)(x)
        h = nn.silu(nn.Dense(2 * WIDTH, dtype=self.dtype)(h)) * nn.Dense(2 * WIDTH, dtype=self.dtype)(h)
        return x + nn.Dense(WIDTH, dtype=self.dtype)(h), None


class LinenDecoder(nn.Module):
    """Tokens to logits; layers scanned under remat, their parameters stacked."""

    dtype: Any = jnp.bfloat16

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        embed = nn.Embed(VOCABULARY, WIDTH, dtype=self.dtype)
        x = embed(tokens) + self.param("positions", nn.initializers.normal(0.02), (LENGTH, WIDTH)).astype(self.dtype)
        layers = nn.scan(
            nn.remat(LinenBlock, prevent_cse=False),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=nn.broadcast,
            length=LAYERS,
        )
        x, _ = layers(self.dtype, name="layers")(x, nn.make_causal_mask(tokens))
        return embed.attend(nn.RMSNorm(dtype=self.dtype)(x)).astype(jnp.float32)


def linen_scan(batch: int = 8) -> Case:
    """A `TrainState`, bfloat16 by the modules' `dtype`, layers by `nn.scan` of `nn.remat`."""
    model = LinenDecoder()
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.linear_schedule(0, 1e-3, 10)))

    def init(key: jax.Array) -> train_state.TrainState:
        params = model.init(key, jnp.zeros((1, LENGTH), jnp.int32))["params"]
        return train_state.TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    def step(state: train_state.TrainState, batch: PyTree) -> tuple[Any, PyTree]:
        def loss_fn(params: PyTree) -> jax.Array:
            logits = state.apply_fn({"params": params}, batch["tokens"][:, :-1])
            return cross_entropy(logits, batch["tokens"][:, 1:])

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), {"loss": loss, "grad_norm": optax.global_norm(grads)}

    return Case(name="linen_scan", step=step, init=init, batch=token_batch(batch, LENGTH, VOCABULARY))


class NnxBlock(nnx.Module):
    """A pre-norm block with dropout."""

    def __init__(self, rngs: nnx.Rngs):
        self.norm1 = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, dropout_rate=0.1, decode=False, rngs=rngs)
        self.norm2 = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        x = x + self.attention(self.norm1(x), mask=mask)
        return x + self.dropout(self.down(nnx.gelu(self.up(self.norm2(x)))))


class NnxDecoder(nnx.Module):
    """Tokens to logits."""

    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.positions = nnx.Param(0.02 * jax.random.normal(rngs.params(), (LENGTH, WIDTH)))
        self.blocks = nnx.List([NnxBlock(rngs) for _ in range(2)])
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens) + self.positions[...]
        for block in self.blocks:
            x = block(x, causal(tokens.shape[1]))
        return self.embed.attend(self.norm(x))


def nnx_decoder(batch: int = 8) -> Case:
    """Model, `nnx.Optimizer` and `nnx.MultiMetric` in one state, merged and split again in the step."""
    tx = optax.adamw(1e-3)

    def create(key: jax.Array) -> tuple:
        model = NnxDecoder(nnx.Rngs(key))
        metrics = nnx.MultiMetric(loss=nnx.metrics.Average("loss"), accuracy=nnx.metrics.Accuracy())
        return model, nnx.Optimizer(model, tx, wrt=nnx.Param), metrics

    graph = nnx.graphdef(nnx.eval_shape(lambda: create(jax.random.key(0))))

    def init(key: jax.Array) -> PyTree:
        return nnx.state(create(key))

    def step(state: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
        model, optimizer, metrics = nnx.merge(graph, state)
        model.train()
        inputs, targets = batch["tokens"][:, :-1], batch["tokens"][:, 1:]

        def loss_fn(model: NnxDecoder) -> tuple[jax.Array, jax.Array]:
            logits = model(inputs)
            return cross_entropy(logits, targets), logits

        (loss, logits), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model)
        optimizer.update(model, grads)
        metrics.update(loss=loss, logits=logits, labels=targets)
        return nnx.state((model, optimizer, metrics)), {"loss": loss}

    return Case(name="nnx_decoder", step=step, init=init, batch=token_batch(batch, LENGTH, VOCABULARY))


class EquinoxState(NamedTuple):
    """The whole model, its activation functions too."""

    model: eqx.Module
    opt_state: optax.OptState


def equinox_mlp(batch: int = 8) -> Case:
    """`eqx.nn.MLP` itself in the state, mapped over the batch, `eqx.filter_value_and_grad`, `eqx.apply_updates`."""
    features, classes = 16, 10
    tx = optax.adam(1e-3)

    def init(key: jax.Array) -> EquinoxState:
        model = eqx.nn.MLP(features, classes, 32, depth=2, activation=jax.nn.gelu, key=key)
        return EquinoxState(model=model, opt_state=tx.init(eqx.filter(model, eqx.is_inexact_array)))

    @eqx.filter_value_and_grad
    def loss_fn(model: eqx.nn.MLP, x: jax.Array, y: jax.Array) -> jax.Array:
        logits = jax.vmap(model)(x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    def step(state: EquinoxState, batch: PyTree) -> tuple[EquinoxState, PyTree]:
        loss, grads = loss_fn(state.model, batch["x"], batch["labels"])
        params = eqx.filter(state.model, eqx.is_inexact_array)
        updates, opt_state = tx.update(grads, state.opt_state, params)
        return EquinoxState(model=eqx.apply_updates(state.model, updates), opt_state=opt_state), {"loss": loss}

    make = joined(float_batch(x=(batch, features)), integers(classes, labels=(batch,)))
    return Case(name="equinox_mlp", step=step, init=init, batch=make)


class HaikuState(NamedTuple):
    """With the key that each step splits."""

    params: hk.Params
    opt_state: optax.OptState
    rng: jax.Array


def haiku_transformer(batch: int = 8) -> Case:
    """`hk.transform` of a decoder: layers by `hk.experimental.layer_stack`, dropout by `hk.next_rng_key`."""
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))

    def block(x: jax.Array) -> jax.Array:
        def norm(name: str) -> Callable[[jax.Array], jax.Array]:
            return hk.LayerNorm(axis=-1, create_scale=True, create_offset=True, name=name)

        w_init = hk.initializers.VarianceScaling(1.0)
        h = norm("norm1")(x)
        attention = hk.MultiHeadAttention(HEADS, WIDTH // HEADS, w_init=w_init, model_size=WIDTH)
        x = x + hk.dropout(hk.next_rng_key(), 0.1, attention(h, h, h, mask=causal(x.shape[1])[None, None]))
        h = hk.Linear(WIDTH)(jax.nn.gelu(hk.Linear(2 * WIDTH)(norm("norm2")(x))))
        return x + hk.dropout(hk.next_rng_key(), 0.1, h)

    @hk.transform
    def network(tokens: jax.Array) -> jax.Array:
        positions = hk.get_parameter("positions", (LENGTH, WIDTH), init=hk.initializers.TruncatedNormal(0.02))
        x = hk.Embed(VOCABULARY, WIDTH)(tokens) + positions
        x = hk.experimental.layer_stack(2)(block)(x)
        return hk.Linear(VOCABULARY)(hk.LayerNorm(-1, True, True)(x))

    def init(key: jax.Array) -> HaikuState:
        init_key, rng = jax.random.split(key)
        params = network.init(init_key, jnp.zeros((1, LENGTH), jnp.int32))
        return HaikuState(params=params, opt_state=tx.init(params), rng=rng)

    def step(state: HaikuState, batch: PyTree) -> tuple[HaikuState, PyTree]:
        rng, step_rng = jax.random.split(state.rng)

        def loss_fn(params: hk.Params) -> jax.Array:
            logits = network.apply(params, step_rng, batch["tokens"][:, :-1])
            return cross_entropy(logits, batch["tokens"][:, 1:])

        loss, params, opt_state = descend(tx, loss_fn, state.params, state.opt_state)
        return HaikuState(params, opt_state, rng), {"loss": loss}

    return Case(name="haiku_transformer", step=step, init=init, batch=token_batch(batch, LENGTH, VOCABULARY))


STEPS = (linen_scan, nnx_decoder, equinox_mlp, haiku_transformer)
