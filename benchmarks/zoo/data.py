"""Random batches of the usual shapes, as numpy arrays."""

from collections.abc import Callable

import numpy as np

Batch = dict[str, np.ndarray]


def next_token_batch(*, batch: int, length: int, vocabulary: int) -> Callable[[int], Batch]:
    """Tokens and the tokens that follow them, int32 (batch, length)."""

    def make(seed: int) -> Batch:
        tokens = np.random.default_rng(seed).integers(0, vocabulary, (batch, length + 1), dtype=np.int32)
        return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}

    return make


def image_batch(*, batch: int, image: int, channels: int, classes: int) -> Callable[[int], Batch]:
    """Images, float32 (batch, image, image, channels), and labels, int32 (batch,)."""

    def make(seed: int) -> Batch:
        rng = np.random.default_rng(seed)
        images = rng.standard_normal((batch, image, image, channels), dtype=np.float32)
        return {"images": images, "labels": rng.integers(0, classes, (batch,), dtype=np.int32)}

    return make


def vector_batch(*, batch: int, features: int, classes: int) -> Callable[[int], Batch]:
    """Feature vectors, float32 (batch, features), and labels, int32 (batch,)."""

    def make(seed: int) -> Batch:
        rng = np.random.default_rng(seed)
        inputs = rng.standard_normal((batch, features), dtype=np.float32)
        return {"inputs": inputs, "labels": rng.integers(0, classes, (batch,), dtype=np.int32)}

    return make
