"""Copies that a TPU's compiler sends in 16 bits: those that only matrix products at default precision read."""

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar import recipes

WIDTH, DEVICES = 256, 8
# What a device of eight sends to make one whole float32 weight on all of them.
GATHERED = WIDTH * WIDTH * 4 * (DEVICES - 1) / DEVICES


def gathered_bytes(cluster, precision=None, reads=lambda w: w):
    """Bytes of all-gathers by which the weights of two layers are made whole under ZeRO 3."""

    def step(weights, x):
        def loss(weights):
            h = jnp.dot(x, reads(weights[0]), precision=precision)
            return jnp.mean(jnp.dot(jnp.tanh(h), reads(weights[1]), precision=precision) ** 2)

        grads = jax.grad(loss)(weights)
        return [w - 0.1 * g for w, g in zip(weights, grads, strict=True)], {}

    weights = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * 2
    batch = jax.ShapeDtypeStruct((64 * DEVICES, WIDTH), jnp.float32)
    parallel = autopar.parallelize(step, plan=recipes.zero(3), cluster=cluster, cache_dir=None, show_progress=False)
    return parallel.plan(weights, batch).predicted.by_kind()["all-gather"][1]


@pytest.mark.parametrize(
    ("reads", "precision", "share"),
    [
        (lambda w: w, None, 0.5),
        (lambda w: w.T, None, 0.5),
        (lambda w: w, "highest", 1.0),
        # Two gathers of the weights for the sort, in 32 bits; three of what is sorted, which only products read.
        (lambda w: jnp.sort(w.ravel()).reshape(w.shape), None, (2 + 3 * 0.5) / 5),
    ],
    ids=["products", "transposed", "all 32 bits asked for", "read by others"],
)
def test_weights_of_products_are_gathered_in_half_their_bytes_on_tpu(reads, precision, share):
    on_gpu = gathered_bytes("dgx-h100", precision, reads)
    assert on_gpu % GATHERED == 0
    assert on_gpu > 0
    assert gathered_bytes("tpu-v5e:2x4", precision, reads) == share * on_gpu
