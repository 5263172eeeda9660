"""Models of Keras 3 and of KerasHub with the jax backend, through `stateless_call` and `stateless_apply`."""

import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.zoo.case import Case, PyTree
from benchmarks.zoo.data import Batch, image_batch
from benchmarks.zoo.published.sizes import (
    EXPERTS,
    HEADS,
    KV_HEADS,
    LAYERS,
    LENGTH,
    TOP_K,
    VOCABULARY,
    WIDTH,
    next_tokens,
    skewed,
)

# Keras reads it once, when it is imported.
os.environ.setdefault("KERAS_BACKEND", "jax")


def keras_case(
    *,
    name: str,
    create: Callable[[], PyTree],
    batch: Callable[[int], Batch] = next_tokens,
    inputs: str = "tokens",
    labels: str = "targets",
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
            logits, updated, losses = model.stateless_call(
                trainable, non_trainable, batch[inputs], training=True, return_losses=True
            )
            return loss_of(batch[labels], logits) + sum(losses), updated

        trainable, non_trainable, optimizer_variables = state
        (loss, non_trainable_updated), grads = jax.value_and_grad(loss_fn, has_aux=True)(trainable)
        trainable, optimizer_variables = optimizer.stateless_apply(optimizer_variables, grads, trainable)
        return [trainable, non_trainable_updated, optimizer_variables], {"loss": loss}

    return Case(name=name, step=step, init=init, batch=batch)


def keras_convnet() -> Case:
    """A functional model with BatchNorm, dropout and a skip connection."""
    import keras
    from keras import layers

    width, image, classes = 16, 16, 10

    def create() -> PyTree:
        inputs = keras.Input((image, image, 3))
        x = layers.Conv2D(width, 3, padding="same", use_bias=False)(inputs)
        x = skip = layers.ReLU()(layers.BatchNormalization()(x))
        x = layers.SeparableConv2D(width, 3, padding="same")(x)
        x = layers.Dropout(0.1)(layers.GlobalAveragePooling2D()(layers.Add()([x, skip])))
        return keras.Model(inputs, layers.Dense(classes)(x))

    make_batch = image_batch(batch=16, image=image, channels=3, classes=classes)
    return keras_case(name="keras_convnet", create=create, batch=make_batch, inputs="images", labels="labels")


def keras_transformer() -> Case:
    """Causal language model of Keras's attention layers, with dropout."""
    import keras
    from keras import layers

    def create() -> PyTree:
        tokens = keras.Input((LENGTH,), dtype="int32")
        x = layers.Embedding(VOCABULARY, WIDTH)(tokens)
        for _ in range(LAYERS):
            attention = layers.MultiHeadAttention(HEADS, WIDTH // HEADS, dropout=0.1, use_bias=False)
            h = layers.LayerNormalization()(x)
            x = layers.Add()([x, attention(h, h, use_causal_mask=True)])
            h = layers.Dense(4 * WIDTH, activation="gelu")(layers.LayerNormalization()(x))
            x = layers.Add()([x, layers.Dropout(0.1)(layers.Dense(WIDTH)(h))])
        return keras.Model(tokens, layers.Dense(VOCABULARY)(layers.LayerNormalization()(x)))

    return keras_case(name="keras_transformer", create=create)


def _hub(name: str, backbone: str, **options: Any) -> Case:
    """A decoder of KerasHub's with a mixture of experts, all of which compute all tokens; the router's weights select
    among their results.
    """
    import keras
    import keras_hub

    def create() -> PyTree:
        sizes = {
            "vocabulary_size": VOCABULARY, "num_layers": LAYERS, "num_query_heads": HEADS, "hidden_dim": WIDTH,
            "num_key_value_heads": KV_HEADS, "num_experts": EXPERTS,
        }  # fmt: skip
        made = getattr(keras_hub.models, backbone)(**sizes | options)
        tokens = keras.Input((LENGTH,), dtype="int32")
        padding = keras.ops.ones_like(tokens)
        hidden = made({"token_ids": tokens, "padding_mask": padding})
        return keras.Model(tokens, made.token_embedding(hidden, reverse=True))

    return keras_case(name=name, create=create)


def keras_hub_mixtral() -> Case:
    return _hub("keras_hub_mixtral", "MixtralBackbone", intermediate_dim=2 * WIDTH, sliding_window=LENGTH)


def keras_hub_mixtral_skewed() -> Case:
    return skewed(keras_hub_mixtral())


def keras_hub_qwen_moe() -> Case:
    """With a shared expert, and the loss that balances experts over all tokens of the batch."""
    return _hub(
        "keras_hub_qwen_moe", "QwenMoeBackbone", intermediate_dim=2 * WIDTH, moe_intermediate_dim=WIDTH,
        shared_expert_intermediate_dim=WIDTH, top_k=TOP_K, tie_word_embeddings=True,
    )  # fmt: skip


def keras_hub_qwen3_moe() -> Case:
    """With normalised weights of the experts chosen, and the loss that balances experts."""
    return _hub(
        "keras_hub_qwen3_moe", "Qwen3MoeBackbone", intermediate_dim=2 * WIDTH, moe_intermediate_dim=WIDTH, head_dim=8,
        top_k=TOP_K, norm_top_k_prob=True, tie_word_embeddings=True,
    )  # fmt: skip


def keras_hub_gpt_oss() -> Case:
    """With gate and up in one matrix, column by column, and a bias of each expert."""
    return _hub("keras_hub_gpt_oss", "GptOssBackbone", intermediate_dim=WIDTH, sliding_window=LENGTH)
