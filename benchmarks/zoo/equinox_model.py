"""An Equinox model: arrays travel in the state, everything else of the model is closed over."""

import equinox as eqx
import jax
import jax.numpy as jnp

from benchmarks.zoo.case import Case, PyTree
from benchmarks.zoo.data import next_token_batch
from benchmarks.zoo.training import cross_entropy, momentum


class Decoder(eqx.Module):
    """Tokens (length,) to logits (length, vocabulary): one example, as Equinox's layers are written."""

    embedding: eqx.nn.Embedding
    attention: eqx.nn.MultiheadAttention
    attention_norm: eqx.nn.LayerNorm
    feed_forward: eqx.nn.MLP
    feed_forward_norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear

    def __init__(self, *, width: int, heads: int, vocabulary: int, key: jax.Array):
        embedding_key, attention_key, feed_forward_key, head_key = jax.random.split(key, 4)
        self.embedding = eqx.nn.Embedding(vocabulary, width, key=embedding_key)
        self.attention = eqx.nn.MultiheadAttention(heads, width, key=attention_key)
        self.attention_norm = eqx.nn.LayerNorm(width)
        self.feed_forward = eqx.nn.MLP(width, width, 4 * width, depth=1, activation=jax.nn.gelu, key=feed_forward_key)
        self.feed_forward_norm = eqx.nn.LayerNorm(width)
        self.head = eqx.nn.Linear(width, vocabulary, use_bias=False, key=head_key)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = jax.vmap(self.embedding)(tokens)
        h = jax.vmap(self.attention_norm)(x)
        x = x + self.attention(h, h, h, mask=jnp.tril(jnp.ones((len(tokens), len(tokens)), bool)))
        x = x + jax.vmap(self.feed_forward)(jax.vmap(self.feed_forward_norm)(x))
        return jax.vmap(self.head)(x)


def equinox_model(*, width: int = 32, heads: int = 4, vocabulary: int = 64, length: int = 16, batch: int = 8) -> Case:
    """The batch dimension comes from `jax.vmap` over the whole model."""
    tx = momentum()

    def create(key: jax.Array) -> Decoder:
        return Decoder(width=width, heads=heads, vocabulary=vocabulary, key=key)

    model_shape = eqx.filter_eval_shape(create, jax.random.key(0))
    static = eqx.filter(model_shape, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct), inverse=True)

    def init(key: jax.Array) -> PyTree:
        params = eqx.filter(create(key), eqx.is_array)
        return params, tx.init(params)

    def step(state: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
        @eqx.filter_value_and_grad
        def loss_fn(model: Decoder) -> jax.Array:
            return cross_entropy(jax.vmap(model)(batch["tokens"]), batch["targets"])

        params, opt_state = state
        loss, grads = loss_fn(eqx.combine(params, static))
        updates, opt_state = tx.update(grads, opt_state, params)
        return (eqx.apply_updates(params, updates), opt_state), {"loss": loss}

    make_batch = next_token_batch(batch=batch, length=length, vocabulary=vocabulary)
    return Case(name="equinox_model", step=step, init=init, batch=make_batch)
