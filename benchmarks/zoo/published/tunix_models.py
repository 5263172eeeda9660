"""Llama 3 of Tunix, in Flax NNX, with random weights."""

import jax
import jax.numpy as jnp
import optax

from benchmarks.zoo.case import Case, PyTree
from benchmarks.zoo.published.huggingface import token_batch
from benchmarks.zoo.training import cross_entropy, momentum


def tunix_llama(
    *,
    layers: int = 2,
    width: int = 32,
    heads: int = 4,
    kv_heads: int = 2,
    vocabulary: int = 64,
    length: int = 16,
    batch: int = 8,
) -> Case:
    from flax import nnx
    from tunix.models.llama3.model import Llama3, ModelConfig

    config = ModelConfig(
        num_layers=layers,
        vocab_size=vocabulary,
        embed_dim=width,
        hidden_dim=2 * width,
        num_heads=heads,
        head_dim=width // heads,
        num_kv_heads=kv_heads,
        rope_theta=10_000,
        norm_eps=1e-5,
    )
    tx = momentum()
    graph = nnx.graphdef(nnx.eval_shape(lambda: Llama3(config, rngs=nnx.Rngs(0))))

    def init(key: jax.Array) -> PyTree:
        params = nnx.state(Llama3(config, rngs=nnx.Rngs(key)), nnx.Param)
        return {"params": params, "opt_state": tx.init(params)}

    def step(state: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
        tokens = batch["input_ids"]
        positions = jnp.broadcast_to(jnp.arange(length), tokens.shape)
        mask = jnp.broadcast_to(jnp.tril(jnp.ones((length, length), bool)), (tokens.shape[0], length, length))

        def loss_fn(params: PyTree) -> jax.Array:
            logits, _ = nnx.merge(graph, params)(tokens, positions, None, mask)
            return cross_entropy(logits, batch["labels"])

        loss, grads = jax.value_and_grad(loss_fn)(state["params"])
        updates, opt_state = tx.update(grads, state["opt_state"])
        return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}, {"loss": loss}

    return Case(
        name="tunix_llama",
        step=step,
        init=init,
        batch=token_batch(batch=batch, length=length, vocabulary=vocabulary, padded=False),
    )


CASES = (tunix_llama,)
