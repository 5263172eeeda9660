"""Keras 3 models with the jax backend, through `stateless_call` and `stateless_apply`."""

import os
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.zoo.case import Case, PyTree
from benchmarks.zoo.data import Batch, image_batch, next_token_batch

# Keras reads it once, when it is imported.
os.environ.setdefault("KERAS_BACKEND", "jax")


def keras_case(
    *, name: str, create: Callable[[], PyTree], batch: Callable[[int], Batch], inputs: str, labels: str
) -> Case:
    """A training step of the model that `create` makes, from the entries `inputs` and `labels` of the batch.

    Keras initialises variables when it makes a model, so `init` hands out those values and takes nothing from its key.
    """
    import keras

    keras.utils.set_random_seed(0)
    model = create()
    optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
    optimizer.build(model.trainable_variables)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    variables = (model.trainable_variables, model.non_trainable_variables, optimizer.variables)
    values = [[np.asarray(variable.value) for variable in group] for group in variables]

    def init(key: jax.Array) -> PyTree:
        del key
        return jax.tree.map(jnp.asarray, values)

    def step(state: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
        def loss_fn(trainable: PyTree) -> tuple[jax.Array, PyTree]:
            logits, updated = model.stateless_call(trainable, non_trainable, batch[inputs], training=True)
            return loss_of(batch[labels], logits), updated

        trainable, non_trainable, optimizer_variables = state
        (loss, non_trainable_updated), grads = jax.value_and_grad(loss_fn, has_aux=True)(trainable)
        trainable, optimizer_variables = optimizer.stateless_apply(optimizer_variables, grads, trainable)
        return [trainable, non_trainable_updated, optimizer_variables], {"loss": loss}

    return Case(name=name, step=step, init=init, batch=batch)


def keras_convnet(*, width: int = 16, image: int = 16, classes: int = 10, batch: int = 16) -> Case:
    """A functional model with BatchNorm, dropout and a skip connection."""
    import keras
    from keras import layers

    def create() -> PyTree:
        inputs = keras.Input((image, image, 3))
        x = layers.Conv2D(width, 3, padding="same", use_bias=False)(inputs)
        x = skip = layers.ReLU()(layers.BatchNormalization()(x))
        x = layers.SeparableConv2D(width, 3, padding="same")(x)
        x = layers.Dropout(0.1)(layers.GlobalAveragePooling2D()(layers.Add()([x, skip])))
        return keras.Model(inputs, layers.Dense(classes)(x))

    make_batch = image_batch(batch=batch, image=image, channels=3, classes=classes)
    return keras_case(name="keras_convnet", create=create, batch=make_batch, inputs="images", labels="labels")


def keras_transformer(
    *, layers: int = 2, width: int = 32, heads: int = 4, vocabulary: int = 64, length: int = 16, batch: int = 8
) -> Case:
    """Causal language model of Keras's attention layers, with dropout."""
    import keras
    from keras import layers as keras_layers

    def create() -> PyTree:
        tokens = keras.Input((length,), dtype="int32")
        x = keras_layers.Embedding(vocabulary, width)(tokens)
        for _ in range(layers):
            attention = keras_layers.MultiHeadAttention(heads, width // heads, dropout=0.1, use_bias=False)
            h = keras_layers.LayerNormalization()(x)
            x = keras_layers.Add()([x, attention(h, h, use_causal_mask=True)])
            h = keras_layers.Dense(4 * width, activation="gelu")(keras_layers.LayerNormalization()(x))
            x = keras_layers.Add()([x, keras_layers.Dropout(0.1)(keras_layers.Dense(width)(h))])
        return keras.Model(tokens, keras_layers.Dense(vocabulary)(keras_layers.LayerNormalization()(x)))

    make_batch = next_token_batch(batch=batch, length=length, vocabulary=vocabulary)
    return keras_case(name="keras_transformer", create=create, batch=make_batch, inputs="tokens", labels="targets")


CASES = (keras_convnet, keras_transformer)
