"""Flax models of Hugging Face transformers 4 (the last with Flax models is 4.57), with random weights and dropout."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.zoo.case import Case, PyTree
from benchmarks.zoo.data import Batch
from benchmarks.zoo.training import cross_entropy, momentum

KEY_BIAS = r"\['(key|k_proj)'\]\['bias'\]"


def huggingface_case(
    *,
    name: str,
    model: PyTree,
    input_shape: tuple,
    batch: Callable[[int], Batch],
    loss: Callable[[PyTree, jax.Array], jax.Array],
    around: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
) -> Case:
    """A training step of `model`, which was made with `_do_init=False`.

    Args:
        batch: Makes the keyword arguments of the model, and "labels".
        loss: A function of the model's outputs and the labels.
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
            return loss(outputs, batch["labels"])

        value, grads = jax.value_and_grad(loss_fn)(state["params"])
        updates, opt_state = tx.update(grads, state["opt_state"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt_state": opt_state, "key": next_key}, {"loss": value}

    return Case(name=name, step=step, init=init, batch=batch, zero_gradient=KEY_BIAS)


def label_loss(outputs: PyTree, labels: jax.Array) -> jax.Array:
    return cross_entropy(outputs.logits, labels)


def token_batch(*, batch: int, length: int, vocabulary: int, padded: bool = True) -> Callable[[int], Batch]:
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


def hf_gpt2(
    *, layers: int = 2, width: int = 32, heads: int = 4, vocabulary: int = 64, length: int = 16, batch: int = 8
) -> Case:
    from transformers import FlaxGPT2LMHeadModel, GPT2Config

    config = GPT2Config(vocab_size=vocabulary, n_positions=length, n_embd=width, n_layer=layers, n_head=heads)
    return huggingface_case(
        name="hf_gpt2",
        model=FlaxGPT2LMHeadModel(config, _do_init=False),
        input_shape=(1, length),
        batch=token_batch(batch=batch, length=length, vocabulary=vocabulary),
        loss=label_loss,
    )


def hf_llama(
    *,
    layers: int = 2,
    width: int = 32,
    heads: int = 4,
    key_value_heads: int = 2,
    vocabulary: int = 64,
    length: int = 16,
    batch: int = 8,
) -> Case:
    """Rotary positions, gated feed-forward, several query heads to a key head."""
    from transformers import FlaxLlamaForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
        max_position_embeddings=length,
    )
    return huggingface_case(
        name="hf_llama",
        model=FlaxLlamaForCausalLM(config, input_shape=(1, length), _do_init=False),
        input_shape=(1, length),
        batch=token_batch(batch=batch, length=length, vocabulary=vocabulary),
        loss=label_loss,
    )


def hf_bert(
    *, layers: int = 2, width: int = 32, heads: int = 4, vocabulary: int = 64, length: int = 16, batch: int = 8
) -> Case:
    from transformers import BertConfig, FlaxBertForMaskedLM

    config = BertConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        max_position_embeddings=length,
    )
    return huggingface_case(
        name="hf_bert",
        model=FlaxBertForMaskedLM(config, input_shape=(1, length), _do_init=False),
        input_shape=(1, length),
        batch=token_batch(batch=batch, length=length, vocabulary=vocabulary),
        loss=label_loss,
    )


def hf_bart(
    *, layers: int = 2, width: int = 32, heads: int = 4, vocabulary: int = 64, length: int = 16, batch: int = 8
) -> Case:
    """Encoder and decoder."""
    from transformers import BartConfig, FlaxBartForConditionalGeneration

    config = BartConfig(
        vocab_size=vocabulary,
        d_model=width,
        encoder_layers=layers,
        decoder_layers=layers,
        encoder_attention_heads=heads,
        decoder_attention_heads=heads,
        encoder_ffn_dim=4 * width,
        decoder_ffn_dim=4 * width,
        max_position_embeddings=length,
    )
    make_tokens = token_batch(batch=batch, length=length, vocabulary=vocabulary)

    def make_batch(seed: int) -> Batch:
        tokens = make_tokens(seed)
        return {**tokens, "decoder_input_ids": np.roll(tokens["labels"], 1, axis=1)}

    return huggingface_case(
        name="hf_bart",
        model=FlaxBartForConditionalGeneration(config, input_shape=(1, length), _do_init=False),
        input_shape=(1, length),
        batch=make_batch,
        loss=label_loss,
    )


def hf_vit(
    *,
    layers: int = 2,
    width: int = 32,
    heads: int = 4,
    image: int = 16,
    patch: int = 4,
    classes: int = 10,
    batch: int = 8,
) -> Case:
    from transformers import FlaxViTForImageClassification, ViTConfig

    config = ViTConfig(
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        image_size=image,
        patch_size=patch,
        num_labels=classes,
    )

    def make_batch(seed: int) -> Batch:
        rng = np.random.default_rng(seed)
        images = rng.standard_normal((batch, 3, image, image), dtype=np.float32)
        return {"pixel_values": images, "labels": rng.integers(0, classes, batch, dtype=np.int32)}

    return huggingface_case(
        name="hf_vit",
        model=FlaxViTForImageClassification(config, input_shape=(1, image, image, 3), _do_init=False),
        input_shape=(1, image, image, 3),
        batch=make_batch,
        loss=label_loss,
    )


def hf_whisper(
    *,
    layers: int = 2,
    width: int = 32,
    heads: int = 4,
    vocabulary: int = 64,
    mel_bins: int = 8,
    frames: int = 32,
    length: int = 16,
    batch: int = 8,
) -> Case:
    """Speech recognition: convolutions over the frames, then encoder and decoder."""
    from transformers import FlaxWhisperForConditionalGeneration, WhisperConfig

    config = WhisperConfig(
        vocab_size=vocabulary,
        num_mel_bins=mel_bins,
        d_model=width,
        encoder_layers=layers,
        decoder_layers=layers,
        encoder_attention_heads=heads,
        decoder_attention_heads=heads,
        encoder_ffn_dim=4 * width,
        decoder_ffn_dim=4 * width,
        max_source_positions=frames // 2,
        max_target_positions=length,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        dropout=0.1,
    )

    def make_batch(seed: int) -> Batch:
        rng = np.random.default_rng(seed)
        labels = rng.integers(0, vocabulary, (batch, length), dtype=np.int32)
        return {
            "input_features": rng.standard_normal((batch, mel_bins, frames), dtype=np.float32),
            "decoder_input_ids": np.roll(labels, 1, axis=1),
            "labels": labels,
        }

    return huggingface_case(
        name="hf_whisper",
        model=FlaxWhisperForConditionalGeneration(config, input_shape=(1, mel_bins, frames), _do_init=False),
        input_shape=(1, mel_bins, frames),
        batch=make_batch,
        loss=label_loss,
    )


def hf_clip(
    *,
    layers: int = 1,
    width: int = 32,
    heads: int = 4,
    vocabulary: int = 64,
    length: int = 16,
    image: int = 16,
    patch: int = 4,
    batch: int = 8,
) -> Case:
    """Images against texts: every example of the batch is compared with every other."""
    from transformers import CLIPConfig, FlaxCLIPModel

    tower = {
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
    }
    config = CLIPConfig(
        text_config={**tower, "vocab_size": vocabulary, "max_position_embeddings": length},
        vision_config={**tower, "image_size": image, "patch_size": patch},
        projection_dim=width,
    )
    input_shape = ((1, length), (1, image, image, 3))

    def make_batch(seed: int) -> Batch:
        rng = np.random.default_rng(seed)
        return {
            "input_ids": rng.integers(0, vocabulary, (batch, length), dtype=np.int32),
            "pixel_values": rng.standard_normal((batch, 3, image, image), dtype=np.float32),
            "labels": np.arange(batch, dtype=np.int32),
        }

    def contrastive_loss(outputs: PyTree, pairs: jax.Array) -> jax.Array:
        losses = (cross_entropy(outputs.logits_per_image, pairs), cross_entropy(outputs.logits_per_text, pairs))
        return jnp.mean(jnp.stack(losses))

    return huggingface_case(
        name="hf_clip",
        model=FlaxCLIPModel(config, input_shape=input_shape, _do_init=False),
        input_shape=input_shape,
        batch=make_batch,
        loss=contrastive_loss,
    )


def hf_t5(
    *, layers: int = 2, width: int = 32, heads: int = 4, vocabulary: int = 64, length: int = 16, batch: int = 8
) -> Case:
    """Encoder and decoder, whose relative positions are a table that the first layer of each reads for all."""
    from transformers import FlaxT5ForConditionalGeneration, T5Config

    config = T5Config(
        vocab_size=vocabulary,
        d_model=width,
        d_kv=width // heads,
        d_ff=4 * width,
        num_layers=layers,
        num_heads=heads,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=length,
        decoder_start_token_id=0,
    )
    make_tokens = token_batch(batch=batch, length=length, vocabulary=vocabulary)

    def make_batch(seed: int) -> Batch:
        tokens = make_tokens(seed)
        return {**tokens, "decoder_input_ids": np.roll(tokens["labels"], 1, axis=1)}

    with _clip_by_former_names():
        model = FlaxT5ForConditionalGeneration(config, input_shape=(1, length), _do_init=False)
    return huggingface_case(
        name="hf_t5",
        model=model,
        input_shape=(1, length),
        batch=make_batch,
        loss=label_loss,
        around=_clip_by_former_names,
    )


@contextlib.contextmanager
def _clip_by_former_names() -> Iterator[None]:
    """`jnp.clip` with the argument `a_max`, as jax had it when T5 was written."""
    clip = jnp.clip

    @functools.wraps(clip)
    def former(array: jax.Array, a_min: PyTree = None, a_max: PyTree = None, **others: PyTree) -> jax.Array:
        return clip(array, others.pop("min", a_min), others.pop("max", a_max))

    with mock.patch.object(jnp, "clip", former):
        yield


CASES = (hf_gpt2, hf_llama, hf_bert, hf_bart, hf_vit, hf_whisper, hf_clip, hf_t5)
