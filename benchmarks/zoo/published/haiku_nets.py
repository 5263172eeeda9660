"""Networks that come with dm-haiku, and a transformer of its attention module."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from benchmarks.zoo.case import Case, PyTree
from benchmarks.zoo.data import Batch, image_batch
from benchmarks.zoo.published.sizes import BATCH, HEADS, LAYERS, LENGTH, VOCABULARY, WIDTH, next_tokens
from benchmarks.zoo.training import cross_entropy, momentum


def haiku_case(
    *, name: str, loss: Callable[[PyTree], jax.Array], batch: Callable[[int], Batch], tolerance: float = 1e-5
) -> Case:
    """A training step of `loss(batch)`, which calls Haiku modules."""
    import haiku as hk

    tx = momentum()
    network = hk.transform_with_state(loss)

    def init(key: jax.Array) -> PyTree:
        params_key, next_key = jax.random.split(key)
        params, state = network.init(params_key, batch(0))
        return {"params": params, "state": state, "opt_state": tx.init(params), "key": next_key}

    def step(state: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
        next_key, key = jax.random.split(state["key"])
        (value, network_state), grads = jax.value_and_grad(network.apply, has_aux=True)(
            state["params"], state["state"], key, batch
        )
        updates, opt_state = tx.update(grads, state["opt_state"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "state": network_state, "opt_state": opt_state, "key": next_key}, {"loss": value}

    return Case(name=name, step=step, init=init, batch=batch, tolerance=tolerance)


def hk_resnet() -> Case:
    """`hk.nets.ResNet`, narrow and shallow."""
    import haiku as hk

    classes = 10

    def loss(batch: PyTree) -> jax.Array:
        network = hk.nets.ResNet((1, 1, 1, 1), classes, bottleneck=False, channels_per_group=(8, 16, 16, 32))
        return cross_entropy(network(batch["images"], is_training=True), batch["labels"])

    # Many BatchNorms of few values in a row amplify rounding. Of larger images some input of a ReLU is zero but for
    # rounding, and gradients differ by 9 % (in float64 by 1e-14).
    make_batch = image_batch(batch=32, image=16, channels=3, classes=classes)
    return haiku_case(name="hk_resnet", loss=loss, batch=make_batch, tolerance=1e-4)


def hk_transformer() -> Case:
    """Causal language model with dropout."""
    import haiku as hk

    def norm(x: jax.Array) -> jax.Array:
        return hk.LayerNorm(axis=-1, create_scale=True, create_offset=True)(x)

    def loss(batch: PyTree) -> jax.Array:
        initializer = hk.initializers.VarianceScaling(2 / LAYERS)
        positions = hk.get_parameter("positions", (LENGTH, WIDTH), init=hk.initializers.TruncatedNormal(0.02))
        x = hk.Embed(VOCABULARY, WIDTH)(batch["tokens"]) + positions
        mask = jnp.tril(jnp.ones((1, 1, LENGTH, LENGTH)))
        for _ in range(LAYERS):
            attention = hk.MultiHeadAttention(
                HEADS, WIDTH // HEADS, w_init=initializer, with_bias=False, model_size=WIDTH
            )
            h = norm(x)
            x = x + hk.dropout(hk.next_rng_key(), 0.1, attention(h, h, h, mask=mask))
            x = x + hk.dropout(hk.next_rng_key(), 0.1, hk.nets.MLP((4 * WIDTH, WIDTH))(norm(x)))
        return cross_entropy(hk.Linear(VOCABULARY)(norm(x)), batch["targets"])

    return haiku_case(name="hk_transformer", loss=loss, batch=next_tokens)


def hk_vq_vae() -> Case:
    """Autoencoder whose code book is a moving average in the state, updated from the nearest vectors' counts."""
    import haiku as hk

    width, codes, channels = 16, 32, 3

    def loss(batch: PyTree) -> jax.Array:
        images = batch["images"]
        hidden = jax.nn.relu(hk.Conv2D(width, 4, stride=2)(images))
        quantizer = hk.nets.VectorQuantizerEMA(width, codes, commitment_cost=0.25, decay=0.99)
        quantized = quantizer(hk.Conv2D(width, 3)(hidden), is_training=True)
        decoded = hk.Conv2DTranspose(channels, 4, stride=2)(jax.nn.relu(hk.Conv2D(width, 3)(quantized["quantize"])))
        return jnp.mean((decoded - images) ** 2) + quantized["loss"]

    make_batch = image_batch(batch=BATCH, image=16, channels=channels, classes=1)
    return haiku_case(name="hk_vq_vae", loss=loss, batch=make_batch)
