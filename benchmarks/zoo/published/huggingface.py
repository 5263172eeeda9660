"""Flax models of Hugging Face transformers 4 (the last with Flax models is 4.57), with random weights and dropout."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.zoo.case import Case, PyTree
from benchmarks.zoo.data import Batch
from benchmarks.zoo.published.sizes import (
    BATCH,
    HEADS,
    KV_HEADS,
    LAYERS,
    LENGTH,
    VOCABULARY,
    WIDTH,
    padded_tokens,
)
from benchmarks.zoo.training import cross_entropy, descend, momentum

IMAGE, PATCH, CLASSES = 16, 4, 10
MEL_BINS, FRAMES = 8, 32
# Sizes by the names that most configurations have for them, and that those of encoders with decoders have.
TOWER = {
    "hidden_size": WIDTH, "intermediate_size": 4 * WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
}  # fmt: skip
BOTH_TOWERS = {
    f"{part}_{name}": size
    for part in ("encoder", "decoder")
    for name, size in (("layers", LAYERS), ("attention_heads", HEADS), ("ffn_dim", 4 * WIDTH))
}
KEY_BIAS = r"\['(key|k_proj)'\]\['bias'\]"


def huggingface_case(
    *,
    name: str,
    model: PyTree,
    input_shape: tuple = (1, LENGTH),
    batch: Callable[[int], Batch] = padded_tokens,
    loss: Callable[[PyTree, jax.Array], jax.Array] | None = None,
    around: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
) -> Case:
    """A training step of `model`, which was made with `_do_init=False`.

    Args:
        batch: Makes the keyword arguments of the model, and "labels".
        loss: A function of the model's outputs and the labels; cross-entropy of the logits where it is not given.
        around: Makes the context that the model runs in.
    """
    tx = momentum()

    def init(key: jax.Array) -> PyTree:
        params_key, dropout_key = jax.random.split(key)
        with around():
            params = model.init_weights(params_key, input_shape)
        return {"params": params, "opt_state": tx.init(params), "key": dropout_key}

    def step(state: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
        next_key, dropout_key = jax.random.split(state["key"])

        def loss_fn(params: PyTree) -> jax.Array:
            inputs = {name: value for name, value in batch.items() if name != "labels"}
            with around():
                outputs = model(**inputs, params=params, dropout_rng=dropout_key, train=True)
            if loss is not None:
                return loss(outputs, batch["labels"])
            return cross_entropy(outputs.logits, batch["labels"])

        value, params, opt_state = descend(tx, loss_fn, state["params"], state["opt_state"])
        return {"params": params, "opt_state": opt_state, "key": next_key}, {"loss": value}

    return Case(name=name, step=step, init=init, batch=batch, zero_gradient=KEY_BIAS)


def shifted_batch(seed: int) -> Batch:
    """Tokens, and for the decoder the labels one place later."""
    made = padded_tokens(seed)
    return {**made, "decoder_input_ids": np.roll(made["labels"], 1, axis=1)}


def hf_gpt2() -> Case:
    from transformers import FlaxGPT2LMHeadModel, GPT2Config

    config = GPT2Config(vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS)
    return huggingface_case(name="hf_gpt2", model=FlaxGPT2LMHeadModel(config, _do_init=False))


def hf_llama() -> Case:
    """Rotary positions, gated feed-forward, several query heads to a key head."""
    from transformers import FlaxLlamaForCausalLM, LlamaConfig

    sizes = TOWER | {"intermediate_size": 2 * WIDTH, "num_key_value_heads": KV_HEADS}
    config = LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=LENGTH, **sizes)
    model = FlaxLlamaForCausalLM(config, input_shape=(1, LENGTH), _do_init=False)
    return huggingface_case(name="hf_llama", model=model)


def hf_bert() -> Case:
    from transformers import BertConfig, FlaxBertForMaskedLM

    config = BertConfig(vocab_size=VOCABULARY, max_position_embeddings=LENGTH, **TOWER)
    model = FlaxBertForMaskedLM(config, input_shape=(1, LENGTH), _do_init=False)
    return huggingface_case(name="hf_bert", model=model)


def hf_bart() -> Case:
    """Encoder and decoder."""
    from transformers import BartConfig, FlaxBartForConditionalGeneration

    config = BartConfig(vocab_size=VOCABULARY, d_model=WIDTH, max_position_embeddings=LENGTH, **BOTH_TOWERS)
    model = FlaxBartForConditionalGeneration(config, input_shape=(1, LENGTH), _do_init=False)
    return huggingface_case(name="hf_bart", model=model, batch=shifted_batch)


def hf_vit() -> Case:
    from transformers import FlaxViTForImageClassification, ViTConfig

    config = ViTConfig(image_size=IMAGE, patch_size=PATCH, num_labels=CLASSES, **TOWER)
    shape = (1, IMAGE, IMAGE, 3)

    def make_batch(seed: int) -> Batch:
        rng = np.random.default_rng(seed)
        images = rng.standard_normal((BATCH, 3, IMAGE, IMAGE), dtype=np.float32)
        return {"pixel_values": images, "labels": rng.integers(0, CLASSES, BATCH, dtype=np.int32)}

    model = FlaxViTForImageClassification(config, input_shape=shape, _do_init=False)
    return huggingface_case(name="hf_vit", model=model, input_shape=shape, batch=make_batch)


def hf_whisper() -> Case:
    """Speech recognition: convolutions over the frames, then encoder and decoder."""
    from transformers import FlaxWhisperForConditionalGeneration, WhisperConfig

    config = WhisperConfig(
        vocab_size=VOCABULARY,
        num_mel_bins=MEL_BINS,
        d_model=WIDTH,
        max_source_positions=FRAMES // 2,
        max_target_positions=LENGTH,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        dropout=0.1,
        **BOTH_TOWERS,
    )
    shape = (1, MEL_BINS, FRAMES)

    def make_batch(seed: int) -> Batch:
        rng = np.random.default_rng(seed)
        labels = rng.integers(0, VOCABULARY, (BATCH, LENGTH), dtype=np.int32)
        features = rng.standard_normal((BATCH, MEL_BINS, FRAMES), dtype=np.float32)
        return {"input_features": features, "decoder_input_ids": np.roll(labels, 1, axis=1), "labels": labels}

    model = FlaxWhisperForConditionalGeneration(config, input_shape=shape, _do_init=False)
    return huggingface_case(name="hf_whisper", model=model, input_shape=shape, batch=make_batch)


def hf_clip() -> Case:
    """Images against texts: every example of the batch is compared with every other."""
    from transformers import CLIPConfig, FlaxCLIPModel

    tower = TOWER | {"num_hidden_layers": 1}
    config = CLIPConfig(
        text_config={**tower, "vocab_size": VOCABULARY, "max_position_embeddings": LENGTH},
        vision_config={**tower, "image_size": IMAGE, "patch_size": PATCH},
        projection_dim=WIDTH,
    )
    shapes = ((1, LENGTH), (1, IMAGE, IMAGE, 3))

    def make_batch(seed: int) -> Batch:
        rng = np.random.default_rng(seed)
        return {
            "input_ids": rng.integers(0, VOCABULARY, (BATCH, LENGTH), dtype=np.int32),
            "pixel_values": rng.standard_normal((BATCH, 3, IMAGE, IMAGE), dtype=np.float32),
            "labels": np.arange(BATCH, dtype=np.int32),
        }

    def contrastive_loss(outputs: PyTree, pairs: jax.Array) -> jax.Array:
        losses = (cross_entropy(outputs.logits_per_image, pairs), cross_entropy(outputs.logits_per_text, pairs))
        return jnp.mean(jnp.stack(losses))

    model = FlaxCLIPModel(config, input_shape=shapes, _do_init=False)
    return huggingface_case(name="hf_clip", model=model, input_shape=shapes, batch=make_batch, loss=contrastive_loss)


def hf_t5() -> Case:
    """Encoder and decoder, whose relative positions are a table that the first layer of each reads for all."""
    from transformers import FlaxT5ForConditionalGeneration, T5Config

    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=WIDTH,
        d_kv=WIDTH // HEADS,
        d_ff=4 * WIDTH,
        num_layers=LAYERS,
        num_heads=HEADS,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=LENGTH,
        decoder_start_token_id=0,
    )
    with _clip_by_former_names():
        model = FlaxT5ForConditionalGeneration(config, input_shape=(1, LENGTH), _do_init=False)
    return huggingface_case(name="hf_t5", model=model, batch=shifted_batch, around=_clip_by_former_names)


@contextlib.contextmanager
def _clip_by_former_names() -> Iterator[None]:
    """`jnp.clip` with the argument `a_max`, as jax had it when T5 was written."""
    clip = jnp.clip

    @functools.wraps(clip)
    def former(array: jax.Array, a_min: PyTree = None, a_max: PyTree = None, **others: PyTree) -> jax.Array:
        return clip(array, others.pop("min", a_min), others.pop("max", a_max))

    with mock.patch.object(jnp, "clip", former):
        yield
