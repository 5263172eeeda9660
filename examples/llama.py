"""Llama 3 8B and its training step, written for one device: the step that README.md plans for 64 GPUs.

autopar plan examples/llama.py:job --cluster dgx-h100x8 --report plan.html
autopar lint examples/llama.py:by_hand --cluster dgx-h100
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training.train_state import TrainState
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import autopar

BFLOAT16 = {"use_bias": False, "dtype": jnp.bfloat16}


def rotary(x: jax.Array) -> jax.Array:
    """Rotary position embedding (Su et al., 2021) of an array (batch, length, heads, size)."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] / 500_000 ** (jnp.arange(half) / half)
    sin, cos = (f(angles)[None, :, None, :].astype(x.dtype) for f in (jnp.sin, jnp.cos))
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


class Layer(nn.Module):
    heads: int
    kv_heads: int
    feed_forward: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        width = x.shape[-1]
        normed = nn.RMSNorm(name="attention_norm")(x)
        query = nn.DenseGeneral((self.heads, width // self.heads), name="query", **BFLOAT16)(normed)
        key = nn.DenseGeneral((self.kv_heads, width // self.heads), name="key", **BFLOAT16)(normed)
        value = nn.DenseGeneral((self.kv_heads, width // self.heads), name="value", **BFLOAT16)(normed)
        mixed = jax.nn.dot_product_attention(rotary(query), rotary(key), value, is_causal=True)
        x = x + nn.DenseGeneral(width, axis=(-2, -1), name="out", **BFLOAT16)(mixed)
        normed = nn.RMSNorm(name="mlp_norm")(x)
        gate = nn.silu(nn.Dense(self.feed_forward, name="gate", **BFLOAT16)(normed))
        up = nn.Dense(self.feed_forward, name="up", **BFLOAT16)(normed)
        return x + nn.Dense(width, name="down", **BFLOAT16)(gate * up)


class Llama(nn.Module):
    layers: int
    width: int
    heads: int
    kv_heads: int
    feed_forward: int
    vocabulary: int
    scanned: bool = False

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(self.vocabulary, self.width, dtype=jnp.bfloat16, name="embedding")(tokens)
        sizes = self.heads, self.kv_heads, self.feed_forward
        if self.scanned:  # one array for each matrix of all layers
            of_layers = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}, "length": self.layers}
            body = nn.remat(lambda layer, x, _: (layer(x), None), prevent_cse=False)
            x, _ = nn.scan(body, **of_layers)(Layer(*sizes, name="layers"), x, None)
        else:
            for i in range(self.layers):
                x = nn.remat(Layer)(*sizes, name=f"layer{i}")(x)
        return nn.Dense(self.vocabulary, name="head", **BFLOAT16)(nn.RMSNorm(name="norm")(x))


@autopar.parallelize
def train_step(state: TrainState, batch: dict[str, jax.Array]) -> tuple[TrainState, dict[str, jax.Array]]:
    def loss_fn(params: Any) -> jax.Array:
        logits = state.apply_fn(params, batch["tokens"]).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), {"loss": loss}


def job(
    layers: int = 32,
    width: int = 4096,
    heads: int = 32,
    kv_heads: int = 8,
    feed_forward: int = 14_336,
    vocabulary: int = 128_256,
    examples: int = 128,
    length: int = 8192,
    scanned: bool = False,
) -> tuple[Any, TrainState, dict[str, jax.Array]]:
    """The step, its state and a batch: of Llama 3 8B, where nothing else is asked for. `scanned`: its layers are the
    iterations of a loop.
    """
    model = Llama(layers, width, heads, kv_heads, feed_forward, vocabulary, scanned)
    params = model.init(jax.random.key(0), jnp.zeros((1, 8), jnp.int32))
    state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.adamw(3e-4))
    tokens = jnp.zeros((examples, length), jnp.int32)
    return train_step, state, {"tokens": tokens, "targets": tokens}


# The step on plain `jax.jit`, its matrices split by hand: by the end of the path of a parameter. Moments lie as their
# parameters do.
SPECS = {
    "query/kernel": P(None, "model", None),
    "key/kernel": P(None, "model", None),
    "value/kernel": P(None, "model", None),
    "out/kernel": P("model", None, None),
    "gate/kernel": P(None, "model"),
    "up/kernel": P(None, "model"),
    "down/kernel": P("model", None),
    "embedding/embedding": P("model", None),
    "head/kernel": P(None, "model"),
}


def by_hand(model: int = 4, devices: int = 8, scanned: bool = True, **sizes: Any) -> tuple[Any, ...]:
    """The step under `jax.jit` on a mesh, its state and a batch; sizes as of `job`."""
    _, state, batch = job(**{"examples": 16, "length": 4096, "scanned": scanned} | sizes)
    mesh = Mesh(np.array(jax.devices()[:devices]).reshape(-1, model), ("data", "model"))

    def sharding_of(path: Any, _: Any) -> NamedSharding:
        names = [str(getattr(key, "key", getattr(key, "name", ""))) for key in path]
        spec = SPECS.get("/".join(names[-2:]), P())
        stacked = "layers" in names and len(spec) > 0
        return NamedSharding(mesh, P(None, *spec) if stacked else spec)

    of_state = jax.tree_util.tree_map_with_path(sharding_of, state)
    in_shardings = of_state, NamedSharding(mesh, P("data"))
    step = jax.jit(train_step.__wrapped__, in_shardings=in_shardings, out_shardings=(of_state, None), donate_argnums=0)
    return step, state, batch
