"""Train a byte-level GPT on the sources of Python's standard library, on all devices at once.

    python examples/train_gpt.py
    python examples/train_gpt.py --layers 8 --width 512 --devices 4
    python examples/train_gpt.py --stages 2 --microbatches 4 --trace step.json
    JAX_PLATFORMS=cuda python examples/train_gpt.py --batch 64 --length 512

Where there are no accelerators it runs on 8 virtual CPU devices. At the end it prints the plan, and its final loss
beside that of `jax.jit` on one device from the same seed and batches.
"""

import argparse
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training.train_state import TrainState
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import autopar

VOCABULARY = 256  # bytes

Batch = dict[str, np.ndarray]


class Block(nn.Module):
    heads: int

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        h = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(self.heads, use_bias=False)(h, mask=mask)
        h = nn.gelu(nn.Dense(4 * x.shape[-1])(nn.LayerNorm()(x)))
        return x + nn.Dense(x.shape[-1])(h)


class GPT(nn.Module):
    layers: int
    width: int
    heads: int
    length: int

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        embedding = nn.Embed(VOCABULARY, self.width)
        x = embedding(tokens) + nn.Embed(self.length, self.width)(jnp.arange(tokens.shape[1]))
        mask = nn.make_causal_mask(tokens)
        for _ in range(self.layers):
            x = Block(self.heads)(x, mask)
        return embedding.attend(nn.LayerNorm()(x))


def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
    """Written for one device."""

    def loss_fn(params: Any) -> jax.Array:
        logits = state.apply_fn(params, batch["tokens"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), {"loss": loss}


def standard_library() -> np.ndarray:
    """The sources of Python's own top-level modules, one after the other, as bytes."""
    folder = Path(sysconfig.get_path("stdlib"))
    return np.frombuffer(b"".join(path.read_bytes() for path in sorted(folder.glob("*.py"))), np.uint8)


def batches(text: np.ndarray, *, steps: int, batch: int, length: int, seed: int) -> Iterator[Batch]:
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        starts = rng.integers(0, len(text) - length, (batch, 1))
        windows = text[starts + np.arange(length + 1)].astype(np.int32)
        yield {"tokens": windows[:, :-1], "targets": windows[:, 1:]}


def train(
    title: str, step: Callable, state: TrainState, data: Iterator[Batch], put: Callable, steps: int
) -> tuple[TrainState, float]:
    """Runs `step` over `data`, shows loss and speed, and returns the last state and loss."""
    columns = (
        TextColumn("{task.description:>8}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.4f}  {task.fields[speed]:,.0f} tokens/s"),
        TimeRemainingColumn(),
    )
    with Progress(*columns) as progress:
        task = progress.add_task(title, total=steps, loss=float("nan"), speed=0.0)
        for number, batch in enumerate(data):
            state, metrics = step(state, put(batch))
            loss = float(metrics["loss"])
            if number == 0:  # compiles, so its time says nothing of the speed
                start_s, speed = time.perf_counter(), 0.0
            else:
                speed = number * batch["tokens"].size / (time.perf_counter() - start_s)
            progress.update(task, advance=1, loss=loss, speed=speed)
    return state, loss


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--batch", type=int, default=16, help="sequences per step")
    parser.add_argument("--length", type=int, default=128, help="bytes per sequence")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--devices", type=int, help="how many to use (default: all; 8 where they are virtual)")
    parser.add_argument(
        "--stages", default="auto", help="stages of a pipeline: a number, or auto to let the search say"
    )
    parser.add_argument("--schedule", default="1f1b", help="in which order the stages run micro-batches")
    parser.add_argument("--microbatches", type=int, default=4, help="parts of the batch, where --stages is a number")
    parser.add_argument("--trace", help="write the predicted step as a timeline for ui.perfetto.dev")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    jax.config.update("jax_num_cpu_devices", args.devices or 8)  # before jax starts; accelerators are not affected

    model = GPT(args.layers, args.width, args.heads, args.length)
    schedule = optax.warmup_cosine_decay_schedule(0.0, args.learning_rate, args.steps // 10, args.steps)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))

    def create_state(key: jax.Array) -> TrainState:
        params = model.init(key, jnp.zeros((1, args.length), jnp.int32))
        return TrainState.create(apply_fn=model.apply, params=params, tx=optimizer)

    text = standard_library()

    def data() -> Iterator[Batch]:
        return batches(text, steps=args.steps, batch=args.batch, length=args.length, seed=args.seed)

    recipe = None
    if args.stages != "auto":
        recipe = autopar.recipes.pipeline(int(args.stages), args.schedule, num_microbatches=args.microbatches)
    parallel_step = autopar.parallelize(train_step, plan=recipe, cluster=autopar.Cluster.local(args.devices))
    state = parallel_step.init(create_state, jax.random.key(args.seed))
    state, loss = train("parallel", parallel_step, state, data(), parallel_step.put_batch, args.steps)

    plain_step = jax.jit(train_step, donate_argnums=0)
    plain_state = jax.jit(create_state)(jax.random.key(args.seed))
    _, plain_loss = train("one", plain_step, plain_state, data(), lambda batch: batch, args.steps)

    plan = parallel_step.plan(state, next(data()))
    print(plan)
    if args.trace:
        plan.trace(args.trace)
    print(f"final loss: {loss:.5f} in parallel, {plain_loss:.5f} by jax.jit on one device")


if __name__ == "__main__":
    main()
