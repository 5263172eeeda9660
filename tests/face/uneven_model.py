"""A model with tied embeddings of sizes that two devices divide and no four, clipped and decayed by AdamW."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import optax

VOCABULARY, WIDTH, HIDDEN, EXAMPLES = 257, 50, 130, 96
OPTIMIZER = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2, eps=1e-2))


def loss(params, batch):
    hidden = params["table"][batch["tokens"]]
    hidden = hidden + jnp.tanh(hidden @ params["up"] + params["bias"]) @ params["down"]
    scores = jax.nn.log_softmax(hidden @ params["table"].T)
    return -jnp.mean(jnp.take_along_axis(scores, batch["next"][:, None], 1))


def step(state, batch):
    value, gradients = jax.value_and_grad(loss)(state["params"], batch)
    updates, opt = OPTIMIZER.update(gradients, state["opt"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, value


def init():
    keys = iter(jax.random.split(jax.random.key(0), 3))
    params = {
        "table": jax.random.normal(next(keys), (VOCABULARY, WIDTH)) * 0.3,
        "up": jax.random.normal(next(keys), (WIDTH, HIDDEN)) * 0.2,
        "bias": jnp.zeros(HIDDEN),
        "down": jax.random.normal(next(keys), (HIDDEN, WIDTH)) * 0.2,
    }
    return {"params": params, "opt": OPTIMIZER.init(params)}


def batch_of(number):
    tokens = (np.arange(EXAMPLES) * 7 + number) % VOCABULARY
    return {"tokens": tokens, "next": (tokens * 5 + 1) % VOCABULARY}


def device_share(tree):
    """The largest part of the bytes of a tree that one device holds."""
    held = collections.Counter()
    for leaf in jax.tree.leaves(tree):
        for shard in leaf.addressable_shards:
            held[shard.device] += shard.data.nbytes
    return max(held.values()) / sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
