"""Cases again under other optimisers, whose state and update differ in shape from momentum's."""

import optax

from benchmarks.zoo.case import Case
from benchmarks.zoo.gpt import gpt
from benchmarks.zoo.gpt_scan import gpt_scan
from benchmarks.zoo.mlp import mlp
from benchmarks.zoo.training import momentum


def gpt_adamw(**sizes) -> Case:
    """AdamW under a warm-up and cosine schedule, gradients clipped by their global norm."""
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-3, warmup_steps=2, decay_steps=100)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.1))
    return gpt(optimizer=optimizer, name="gpt_adamw", **sizes)


def gpt_adafactor(*, width: int = 128, vocabulary: int = 256, **sizes) -> Case:
    """Adafactor keeps row and column means instead of a second moment for matrices of at least 128 by 128."""
    optimizer = optax.adafactor(1e-3)
    return gpt_scan(width=width, vocabulary=vocabulary, optimizer=optimizer, name="gpt_adafactor", **sizes)


def mlp_multi_steps(**sizes) -> Case:
    """Gradients of two steps are averaged before the parameters move: a `lax.cond` on the state."""
    optimizer = optax.MultiSteps(momentum(), every_k_schedule=2).gradient_transformation()
    return mlp(optimizer=optimizer, name="mlp_multi_steps", **sizes)
