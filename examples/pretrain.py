"""Pretrain a Llama on the sources of Python's standard library, byte by byte: all parts of a training run together.

    python examples/pretrain.py --folder runs/a                                  # all devices of one process
    python -m autopar.launch --processes 2 --devices-per-process 2 examples/pretrain.py --folder runs/a
    python -m autopar.launch --processes 2 --restarts 3 examples/pretrain.py --folder runs/a

The same command goes on where the run before ended, with any number of processes.
"""

import argparse
import os
import sysconfig
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState
from jax.experimental import multihost_utils

import autopar

BYTES = 256


class Attention(nn.Module):
    heads: int
    key_heads: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        size = x.shape[-1] // self.heads
        projection = lambda name, heads: nn.DenseGeneral((heads, size), use_bias=False, name=name)(x)  # noqa: E731
        q, k = rotary(projection("query", self.heads)), rotary(projection("key", self.key_heads))
        mixed = jax.nn.dot_product_attention(q, k, projection("value", self.key_heads), is_causal=True)
        return nn.DenseGeneral(x.shape[-1], axis=(-2, -1), use_bias=False, name="out")(mixed)


def rotary(x: jax.Array) -> jax.Array:
    """Rotary position embedding (Su et al., 2021) of an array (batch, length, heads, size)."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] / 10_000 ** (jnp.arange(half) / half)
    sin, cos = (f(angles)[None, :, None, :].astype(x.dtype) for f in (jnp.sin, jnp.cos))
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


class Llama(nn.Module):
    layers: int
    width: int
    heads: int

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(BYTES, self.width, name="embedding")(tokens)
        for i in range(self.layers):
            normed = nn.RMSNorm(name=f"attention_norm{i}")(x)
            x = x + Attention(self.heads, self.heads // 2, name=f"attention{i}")(normed)
            normed = nn.RMSNorm(name=f"mlp_norm{i}")(x)
            gate = nn.Dense(3 * self.width, use_bias=False, name=f"gate{i}")(normed)
            up = nn.Dense(3 * self.width, use_bias=False, name=f"up{i}")(normed)
            x = x + nn.Dense(self.width, use_bias=False, name=f"down{i}")(nn.silu(gate) * up)
        return nn.Dense(BYTES, use_bias=False, name="logits")(nn.RMSNorm(name="norm")(x))


def token_files(folder: Path) -> tuple[Path, Path]:
    """The bytes of the standard library's modules, for training and for evaluation; process 0 writes the files."""
    paths = folder / "train.bin", folder / "eval.bin"
    if jax.process_index() == 0 and not paths[1].exists():
        folder.mkdir(parents=True, exist_ok=True)
        sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        for path, part in zip(paths, (sources[10:], sources[:10]), strict=True):
            path.with_suffix(".new").write_bytes(b"\0".join(source.read_bytes() for source in part))
            os.replace(path.with_suffix(".new"), path)
    multihost_utils.sync_global_devices("token files")
    return paths


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/pretrain"), help="tokens, checkpoints and logs")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--length", type=int, default=128, help="tokens of an example")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--save-every", type=int, default=50)
    options = parser.parse_args()

    autopar.initialize()
    model, policy = Llama(options.layers, options.width, heads=4), autopar.precision(options.precision)
    schedule = optax.warmup_cosine_decay_schedule(0.0, 3e-3, options.steps // 10, options.steps)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.1))

    def create(key: jax.Array) -> TrainState:
        params = model.init(key, jnp.zeros((1, options.length), jnp.int32))["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=optimizer)

    def loss_of(params: dict, tokens: jax.Array) -> jax.Array:
        logits = model.apply({"params": params}, tokens[:, :-1]).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    @autopar.parallelize
    def train_step(state: TrainState, tokens: jax.Array) -> tuple[TrainState, dict]:
        loss, gradients = policy.value_and_grad(loss_of)(state.params, tokens)
        return state.apply_gradients(grads=gradients), {"loss": loss}

    @autopar.parallelize(plan=train_step, donate_argnums=())
    def eval_step(state: TrainState, tokens: jax.Array) -> jax.Array:
        return policy.value_and_grad(loss_of)(state.params, tokens)[0]

    train, evaluation = (
        autopar.data.tokens(path, length=options.length + 1, stride=options.length, dtype="uint8")
        for path in token_files(options.folder)
    )
    data = autopar.data.shard(train, train_step, batch_size=options.batch_size, seed=0, epochs=None)
    checkpoints = autopar.checkpoint.Checkpointer(options.folder / "checkpoints", every=options.save_every)
    state, start = checkpoints.restore_or(lambda: create(jax.random.key(0)), step=train_step, data=data)
    tokens_per_step = options.batch_size * options.length
    with autopar.Monitor(train_step, log=options.folder / "logs", tokens_per_step=tokens_per_step) as monitor:
        for i, batch in enumerate(monitor.batches(data), start):
            if i >= options.steps:
                break
            state, metrics = train_step(state, batch)
            monitor(i, metrics)
            with monitor.time("checkpoint"):
                checkpoints.save(i + 1, state, plan=train_step, data=data)
        with monitor.time("evaluation"):
            held_out = autopar.data.shard(evaluation, eval_step, batch_size=options.batch_size, seed=0, tail="drop")
            losses = [float(eval_step(state, batch)) for batch in held_out]
    checkpoints.close()
    if jax.process_index() == 0:
        print(f"held-out loss {np.mean(losses):.4f} nats a byte after {options.steps} steps")


if __name__ == "__main__":
    main()
