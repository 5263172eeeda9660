"""Steps for `autopar bench` beside those of examples/: ResNet-50 and a mixture of experts, written for one device.

python -m autopar bench benchmarks.bench_steps:resnet50 --cluster dgx-a100-80g
python -m autopar bench benchmarks.bench_steps:mixture --cluster dgx-a100-80g
XLA_FLAGS=--xla_force_host_platform_device_count=8 python -m autopar bench benchmarks.bench_steps:small_gpt --measure
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax.training import train_state

from benchmarks.zoo.case import PyTree
from benchmarks.zoo.gpt import gpt
from benchmarks.zoo.moe import gshard_moe

Job = tuple[Any, PyTree, PyTree]


class Bottleneck(nn.Module):
    width: int
    stride: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        conv = partial(nn.Conv, use_bias=False, dtype=jnp.bfloat16)
        norm = partial(nn.BatchNorm, use_running_average=False, dtype=jnp.bfloat16)
        y = nn.relu(norm()(conv(self.width, (1, 1))(x)))
        y = nn.relu(norm()(conv(self.width, (3, 3), (self.stride, self.stride))(y)))
        y = norm()(conv(4 * self.width, (1, 1))(y))
        if y.shape != x.shape:
            x = norm()(conv(4 * self.width, (1, 1), (self.stride, self.stride))(x))
        return nn.relu(x + y)


class ResNet50(nn.Module):
    """Of He et al., "Deep residual learning for image recognition", 2016; the stride is in the 3 x 3 convolution."""

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        x = nn.Conv(64, (7, 7), (2, 2), use_bias=False, dtype=jnp.bfloat16)(images)
        x = nn.relu(nn.BatchNorm(use_running_average=False, dtype=jnp.bfloat16)(x))
        x = nn.max_pool(x, (3, 3), (2, 2), padding="SAME")
        for stage, blocks in enumerate((3, 4, 6, 3)):
            for block in range(blocks):
                x = Bottleneck(64 * 2**stage, stride=2 if stage and not block else 1)(x)
        return nn.Dense(1000, dtype=jnp.float32)(jnp.mean(x, axis=(1, 2)))


class TrainState(train_state.TrainState):
    batch_stats: PyTree


def _resnet_step(state: TrainState, batch: PyTree) -> tuple[TrainState, PyTree]:
    def loss_fn(params: PyTree) -> tuple[jax.Array, PyTree]:
        variables = {"params": params, "batch_stats": state.batch_stats}
        logits, updates = state.apply_fn(variables, batch["images"], mutable=["batch_stats"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
        return losses.mean(), updates["batch_stats"]

    (loss, batch_stats), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    return state.apply_gradients(grads=grads, batch_stats=batch_stats), {"loss": loss}


def resnet50(examples: int = 2048) -> Job:
    """ResNet-50 on images of 224 x 224 in bfloat16, with statistics of the whole batch."""
    model = ResNet50()
    variables = model.init(jax.random.key(0), jnp.zeros((1, 224, 224, 3)))
    state = TrainState.create(apply_fn=model.apply, tx=optax.sgd(0.1, momentum=0.9), **variables)
    batch = {"images": jnp.zeros((examples, 224, 224, 3)), "labels": jnp.zeros(examples, jnp.int32)}
    return _resnet_step, state, batch


def mixture(examples: int = 256, length: int = 1024) -> Job:
    """The mixture of experts with 2.4 billion parameters of Alpa's evaluation (OSDI 2022, table 6), in bfloat16, with
    momentum.
    """
    sizes = {"layers": 16, "width": 1024, "heads": 16, "experts": 16, "vocabulary": 32_000}
    case = gshard_moe(**sizes, batch=examples, length=length, dtype=jnp.bfloat16)
    tokens = jnp.zeros((examples, length), jnp.int32)
    return case.step, case.init(jax.random.key(0)), {"tokens": tokens, "targets": tokens}


def small_gpt(examples: int = 32, length: int = 128) -> Job:
    """A GPT that runs in a few tenths of a second on the processors of one machine, for `--measure`."""
    sizes = {"layers": 4, "width": 256, "heads": 8, "vocabulary": 1024}
    case = gpt(**sizes, length=length, batch=examples)
    return case.step, case.init(jax.random.key(0)), case.batch(0)
