"""Layers of Flax in the forms that its users combine: NNX under scan with dropout, Linen with float8 products."""

import jax
import jax.numpy as jnp
import optax

from benchmarks.zoo.case import Case, PyTree
from benchmarks.zoo.published.sizes import HEADS, LAYERS, LENGTH, VOCABULARY, WIDTH, next_tokens
from benchmarks.zoo.training import cross_entropy, momentum


def nnx_scanned_transformer() -> Case:
    """Three layers made by `nnx.vmap` and run by `nnx.scan`, each with dropout from random streams of its own."""
    from flax import nnx

    class Block(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
            self.attention = nnx.MultiHeadAttention(
                num_heads=HEADS, in_features=WIDTH, decode=False, dropout_rate=0.1, deterministic=False, rngs=rngs
            )
            self.wide_norm = nnx.LayerNorm(WIDTH, rngs=rngs)
            self.up, self.down = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs), nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)
            self.dropout = nnx.Dropout(0.1, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            x = x + self.attention(self.norm(x), mask=nnx.make_causal_mask(x[..., 0]))
            return x + self.dropout(self.down(nnx.gelu(self.up(self.wide_norm(x)))))

    class Transformer(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            @nnx.split_rngs(splits=3)
            @nnx.vmap(in_axes=(0,), out_axes=0)
            def blocks(rngs: nnx.Rngs) -> Block:
                return Block(rngs)

            self.embedding = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
            self.blocks = blocks(rngs)
            self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
            self.head = nnx.Linear(WIDTH, VOCABULARY, rngs=rngs)

        def __call__(self, tokens: jax.Array) -> jax.Array:
            @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
            def run(x: jax.Array, block: Block) -> jax.Array:
                return block(x)

            return self.head(self.norm(run(self.embedding(tokens), self.blocks)))

    def create(key: jax.Array) -> tuple[Transformer, nnx.Optimizer]:
        model = Transformer(nnx.Rngs(key))
        return model, nnx.Optimizer(model, momentum(), wrt=nnx.Param)

    graph = nnx.graphdef(nnx.eval_shape(lambda: create(jax.random.key(0))))

    def step(state: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
        model, optimizer = nnx.merge(graph, state)
        loss, grads = nnx.value_and_grad(lambda model: cross_entropy(model(batch["tokens"]), batch["targets"]))(model)
        optimizer.update(model, grads)
        return nnx.state((model, optimizer)), {"loss": loss}

    return Case(
        name="nnx_scanned_transformer",
        step=step,
        init=lambda key: nnx.state(create(key)),
        batch=next_tokens,
        zero_gradient=r"\['key'\]\['bias'\]",
    )


def linen_float8() -> Case:
    """Dense layers with `Fp8DotGeneralOp`: scales from a history of the largest numbers, kept as if gradients."""
    from flax import linen as nn
    from flax.linen.fp8_ops import Fp8DotGeneralOp

    class Network(nn.Module):
        @nn.compact
        def __call__(self, tokens: jax.Array) -> jax.Array:
            x = nn.Embed(VOCABULARY, WIDTH)(tokens)
            for _ in range(LAYERS):
                h = nn.Dense(4 * WIDTH, dot_general_cls=Fp8DotGeneralOp)(nn.LayerNorm()(x))
                x = x + nn.Dense(WIDTH, dot_general_cls=Fp8DotGeneralOp)(nn.gelu(h))
            return nn.Dense(VOCABULARY)(nn.LayerNorm()(x))

    model, tx = Network(), momentum()

    def init(key: jax.Array) -> PyTree:
        variables = model.init(key, jnp.zeros((1, LENGTH), jnp.int32))
        return {**variables, "opt_state": tx.init(variables["params"])}

    def step(state: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
        def loss_fn(params: PyTree, scales: PyTree) -> jax.Array:
            logits = model.apply({"params": params, "_overwrite_with_gradient": scales}, batch["tokens"])
            return cross_entropy(logits, batch["targets"])

        params, scales = state["params"], state["_overwrite_with_gradient"]
        loss, (grads, scales) = jax.value_and_grad(loss_fn, argnums=(0, 1))(params, scales)
        updates, opt_state = tx.update(grads, state["opt_state"])
        params = optax.apply_updates(params, updates)
        return {"params": params, "_overwrite_with_gradient": scales, "opt_state": opt_state}, {"loss": loss}

    return Case(
        name="linen_float8",
        step=step,
        init=init,
        batch=next_tokens,
    )
