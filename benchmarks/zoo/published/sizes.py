"""The sizes of published models, as small as their structure lets them be, and batches of these sizes."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.zoo.case import Case, PyTree
from benchmarks.zoo.data import Batch, next_token_batch, vector_batch

LAYERS, WIDTH, HEADS, KV_HEADS, VOCABULARY, LENGTH, BATCH = 2, 32, 4, 2, 64, 16, 8
FEATURES, CLASSES = 32, 16  # of vectors
EXPERTS, TOP_K = 4, 2

next_tokens = next_token_batch(batch=BATCH, length=LENGTH, vocabulary=VOCABULARY)
vectors = vector_batch(batch=16, features=FEATURES, classes=CLASSES)


def token_batch(
    *, batch: int = BATCH, length: int = LENGTH, vocabulary: int = VOCABULARY, padded: bool = True
) -> Callable[[int], Batch]:
    """Tokens, and other tokens as labels; `padded`: with a mask, by which the second half of the batch is padded."""

    def make(seed: int) -> Batch:
        rng = np.random.default_rng(seed)
        tokens, labels = rng.integers(0, vocabulary, (2, batch, length), dtype=np.int32)
        if not padded:
            return {"input_ids": tokens, "labels": labels}
        mask = np.ones((batch, length), np.int32)
        mask[batch // 2 :, length // 2 :] = 0
        return {"input_ids": tokens, "attention_mask": mask, "labels": labels}

    return make


tokens, padded_tokens = token_batch(padded=False), token_batch()


def skewed(case: Case) -> Case:
    """A mixture of experts with a router that sends nearly every token to the first expert: all embeddings, and the
    router's weights of this expert, are moved along one direction. By more, sums would cancel.
    """

    def moved(leaf: jax.Array) -> jax.Array:
        shape = getattr(leaf, "shape", ())
        if shape == (VOCABULARY, WIDTH):
            return leaf + jnp.std(leaf)  # momentum stays zero
        if shape == (WIDTH, EXPERTS):
            return leaf.at[:, 0].add(0.2 * jnp.any(leaf != 0))
        return leaf

    def init(key: jax.Array) -> PyTree:
        return jax.tree.map(moved, case.init(key))

    return dataclasses.replace(case, name=f"{case.name}_skewed", init=init)
