"""Train a mixture of experts to predict the bytes of Python's standard library, on all devices at once.

    python examples/moe_text.py

Each byte goes to one of 8 experts. Dispatch is two einsums over (token, expert, slot), so that the compiler is free to
keep the experts on different devices.
"""

import sysconfig
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training.train_state import TrainState

import autopar

jax.config.update("jax_num_cpu_devices", 8)  # where there are no accelerators

STEPS = 100
BATCH, LENGTH = 32, 64
WIDTH, EXPERTS, SLOTS = 64, 8, 16  # slots of an expert for each sequence
BALANCE_WEIGHT = 0.01


class Experts(nn.Module):
    """(batch, length, width) to the same, and the loss that keeps the experts equally busy (Switch Transformer)."""

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        gates = nn.softmax(nn.Dense(EXPERTS, use_bias=False, name="router")(x))
        choice = jax.nn.one_hot(jnp.argmax(gates, axis=-1), EXPERTS)
        slot = jnp.sum((jnp.cumsum(choice, axis=1) - 1) * choice, axis=-1).astype(jnp.int32)
        # A token beyond the last slot has no entry: it passes by on the residual.
        dispatch = choice[..., None] * jax.nn.one_hot(slot, SLOTS)[:, :, None]

        initializer = nn.initializers.lecun_normal(batch_axis=0)
        inner = self.param("inner", initializer, (EXPERTS, WIDTH, 4 * WIDTH))
        outer = self.param("outer", initializer, (EXPERTS, 4 * WIDTH, WIDTH))
        hidden = nn.gelu(jnp.einsum("btes,btw,ewf->ebsf", dispatch, x, inner))
        combine = dispatch * jnp.max(gates, axis=-1)[..., None, None]
        balance = EXPERTS * jnp.mean(jnp.sum(choice.mean(axis=1) * gates.mean(axis=1), axis=-1))
        return jnp.einsum("btes,ebsf,efw->btw", combine, hidden, outer), balance


class Model(nn.Module):
    """Bytes (batch, length) to logits of the next byte."""

    @nn.compact
    def __call__(self, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = nn.Embed(256, WIDTH)(tokens) + self.param("positions", nn.initializers.normal(0.02), (LENGTH, WIDTH))
        balance = 0.0
        for _ in range(2):
            attention = nn.MultiHeadDotProductAttention(4, use_bias=False)
            x = x + attention(nn.LayerNorm()(x), mask=nn.make_causal_mask(tokens))
            y, layer_balance = Experts()(nn.LayerNorm()(x))
            x, balance = x + y, balance + layer_balance
        return nn.Dense(256)(nn.LayerNorm()(x)), balance


model = Model()


def create_state(key: jax.Array) -> TrainState:
    params = model.init(key, jnp.zeros((1, LENGTH), jnp.int32))
    return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(3e-3))


@autopar.parallelize
def train_step(state: TrainState, batch: dict[str, jax.Array]) -> tuple[TrainState, dict[str, jax.Array]]:
    def loss_fn(params: Any) -> tuple[jax.Array, jax.Array]:
        logits, balance = state.apply_fn(params, batch["tokens"])
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()
        return loss + BALANCE_WEIGHT * balance, loss

    grads, loss = jax.grad(loss_fn, has_aux=True)(state.params)
    return state.apply_gradients(grads=grads), {"loss": loss}


def main() -> None:
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = np.frombuffer(b"".join(path.read_bytes() for path in sources), np.uint8)

    state = train_step.init(create_state, jax.random.key(0))
    rng = np.random.default_rng(0)
    for number in range(1, STEPS + 1):
        starts = rng.integers(0, len(text) - LENGTH, (BATCH, 1))
        windows = text[starts + np.arange(LENGTH + 1)].astype(np.int32)
        batch = {"tokens": windows[:, :-1], "targets": windows[:, 1:]}
        state, metrics = train_step(state, train_step.put_batch(batch))
        if number % 20 == 0:
            print(f"step {number:3}  loss {metrics['loss']:.4f} nats per byte")
    print(train_step.plan(state, batch))


if __name__ == "__main__":
    main()
