"""Networks that come with dm-haiku, and a transformer of its attention module."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from benchmarks.zoo.case import Case, PyTree
from benchmarks.zoo.data import Batch, image_batch, next_token_batch
from benchmarks.zoo.training import cross_entropy, momentum


def haiku_case(
    *,
    name: str,
    loss: Callable[[PyTree], jax.Array],
    batch: Callable[[int], Batch],
    tolerance: float = 1e-5,
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


def hk_resnet(
    *,
    blocks: tuple[int, int, int, int] = (1, 1, 1, 1),
    channels: tuple[int, int, int, int] = (8, 16, 16, 32),
    image: int = 32,
    classes: int = 10,
    batch: int = 32,
) -> Case:
    """`blocks=(2, 2, 2, 2), channels=(64, 128, 256, 512), image=224, classes=1000` is `hk.nets.ResNet18`."""
    import haiku as hk

    def loss(batch: PyTree) -> jax.Array:
        network = hk.nets.ResNet(blocks, classes, bottleneck=False, channels_per_group=channels)
        return cross_entropy(network(batch["images"], is_training=True), batch["labels"])

    make_batch = image_batch(batch=batch, image=image, channels=3, classes=classes)
    # Many BatchNorms of few values in a row amplify rounding.
    return haiku_case(name="hk_resnet", loss=loss, batch=make_batch, tolerance=1e-4)


def hk_transformer(
    *, layers: int = 2, width: int = 32, heads: int = 4, vocabulary: int = 64, length: int = 16, batch: int = 8
) -> Case:
    """Causal language model with dropout."""
    import haiku as hk

    def norm(x: jax.Array) -> jax.Array:
        return hk.LayerNorm(axis=-1, create_scale=True, create_offset=True)(x)

    def loss(batch: PyTree) -> jax.Array:
        initializer = hk.initializers.VarianceScaling(2 / layers)
        positions = hk.get_parameter("positions", (length, width), init=hk.initializers.TruncatedNormal(0.02))
        x = hk.Embed(vocabulary, width)(batch["tokens"]) + positions
        mask = jnp.tril(jnp.ones((1, 1, length, length)))
        for _ in range(layers):
            attention = hk.MultiHeadAttention(
                heads, width // heads, w_init=initializer, with_bias=False, model_size=width
            )
            h = norm(x)
            x = x + hk.dropout(hk.next_rng_key(), 0.1, attention(h, h, h, mask=mask))
            x = x + hk.dropout(hk.next_rng_key(), 0.1, hk.nets.MLP((4 * width, width))(norm(x)))
        return cross_entropy(hk.Linear(vocabulary)(norm(x)), batch["targets"])

    make_batch = next_token_batch(batch=batch, length=length, vocabulary=vocabulary)
    return haiku_case(name="hk_transformer", loss=loss, batch=make_batch)


def hk_vq_vae(*, width: int = 16, codes: int = 32, image: int = 16, channels: int = 3, batch: int = 8) -> Case:
    """Autoencoder whose code book is a moving average in the state, updated from the nearest vectors' counts."""
    import haiku as hk

    def loss(batch: PyTree) -> jax.Array:
        images = batch["images"]
        hidden = jax.nn.relu(hk.Conv2D(width, 4, stride=2)(images))
        quantizer = hk.nets.VectorQuantizerEMA(width, codes, commitment_cost=0.25, decay=0.99)
        quantized = quantizer(hk.Conv2D(width, 3)(hidden), is_training=True)
        decoded = hk.Conv2DTranspose(channels, 4, stride=2)(jax.nn.relu(hk.Conv2D(width, 3)(quantized["quantize"])))
        return jnp.mean((decoded - images) ** 2) + quantized["loss"]

    make_batch = image_batch(batch=batch, image=image, channels=channels, classes=1)
    return haiku_case(name="hk_vq_vae", loss=loss, batch=make_batch)


CASES = (hk_resnet, hk_transformer, hk_vq_vae)
