"""Models of Tunix, in Flax NNX, with random weights: Llama 3 in a step of ours, others in that of its trainer."""

import contextlib
import dataclasses
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.zoo.case import Case, PyTree
from benchmarks.zoo.data import Batch
from benchmarks.zoo.published.sizes import (
    EXPERTS,
    HEADS,
    KV_HEADS,
    LAYERS,
    LENGTH,
    TOP_K,
    VOCABULARY,
    WIDTH,
    padded_tokens,
    skewed,
    token_batch,
    tokens,
)
from benchmarks.zoo.training import cross_entropy, momentum, training_case


def tunix_llama() -> Case:
    from flax import nnx
    from tunix.models.llama3.model import Llama3, ModelConfig

    config = ModelConfig(
        num_layers=LAYERS,
        vocab_size=VOCABULARY,
        embed_dim=WIDTH,
        hidden_dim=2 * WIDTH,
        num_heads=HEADS,
        head_dim=WIDTH // HEADS,
        num_kv_heads=KV_HEADS,
        rope_theta=10_000,
        norm_eps=1e-5,
    )
    graph = nnx.graphdef(nnx.eval_shape(lambda: Llama3(config, rngs=nnx.Rngs(0))))

    def loss(params: PyTree, batch: PyTree) -> jax.Array:
        read = batch["input_ids"]
        positions = jnp.broadcast_to(jnp.arange(LENGTH), read.shape)
        mask = jnp.broadcast_to(jnp.tril(jnp.ones((LENGTH, LENGTH), bool)), (read.shape[0], LENGTH, LENGTH))
        logits, _ = nnx.merge(graph, params)(read, positions, None, mask)
        return cross_entropy(logits, batch["labels"])

    return training_case(
        name="tunix_llama",
        init_params=lambda key: nnx.state(Llama3(config, rngs=nnx.Rngs(key)), nnx.Param),
        loss=loss,
        batch=tokens,
    )


def trainer_case(
    name: str,
    make: Callable[[Any], Any],
    batch: Callable[[int], Batch] = padded_tokens,
    around: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
) -> Case:
    """The training step of Tunix's `PeftTrainer` on a model; `make` takes its random numbers."""
    from flax import nnx
    from tunix.sft.peft_trainer import PeftTrainer, TrainingConfig
    from tunix.sft.utils import build_positions_from_mask, make_causal_attn_mask

    tx = momentum()

    def inputs_of(batch: PyTree) -> PyTree:
        mask = batch["attention_mask"] != 0
        return {
            "input_tokens": batch["input_ids"],
            "input_mask": mask,
            "positions": build_positions_from_mask(mask),
            "attention_mask": make_causal_attn_mask(mask),
        }

    trainer = PeftTrainer(make(nnx.Rngs(0)), tx, TrainingConfig(eval_every_n_steps=1, max_steps=1))
    train_step = trainer.with_gen_model_input_fn(inputs_of).create_train_step_fn()
    graph, _ = nnx.split((trainer.model, trainer.optimizer))

    def init(key: jax.Array) -> PyTree:
        """Random weights, as its own are zeros in part, to be replaced by those of a checkpoint."""
        model = make(nnx.Rngs(0))
        params = nnx.state(model, nnx.Param)
        leaves, tree = jax.tree.flatten(params)
        keys = jax.random.split(key, len(leaves))
        drawn = [x if x.ndim == 1 else 0.2 * jax.random.normal(k, x.shape) for x, k in zip(leaves, keys, strict=True)]
        nnx.update(model, jax.tree.unflatten(tree, drawn))
        return nnx.state((model, nnx.Optimizer(model, tx, wrt=nnx.Param)))

    def step(state: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
        model, optimizer = nnx.merge(graph, state)
        with around():
            loss, _, norm = train_step(model, optimizer, batch)
        return nnx.state((model, optimizer)), {"loss": loss, "gradient_norm": norm}

    return Case(name=name, step=step, init=init, batch=batch)


def _qwen3(
    *, vocabulary: int = VOCABULARY, width: int = WIDTH, heads: int = HEADS, head_dim: int = 8, **options: Any
) -> Callable[[Any], Any]:
    """What makes a small Qwen3."""
    from tunix.models.qwen3.model import ModelConfig, Qwen3

    config = ModelConfig(
        num_layers=LAYERS,
        vocab_size=vocabulary,
        embed_dim=width,
        hidden_dim=2 * width,
        num_heads=heads,
        head_dim=head_dim,
        num_kv_heads=KV_HEADS,
        rope_theta=10_000,
        norm_eps=1e-6,
        **options,
    )
    return lambda rngs: Qwen3(config, rngs=rngs)


def tunix_qwen3() -> Case:
    return trainer_case("tunix_qwen3", _qwen3())


def tunix_qwen3_experts() -> Case:
    """With a mixture of experts, which Tunix computes densely on CPU devices."""
    return trainer_case("tunix_qwen3_experts", _qwen3(num_experts=EXPERTS, num_experts_per_tok=TOP_K))


def tunix_qwen3_megablox() -> Case:
    """With a mixture of experts by megablox, in interpret mode, inside of Tunix's `shard_map` of one device."""
    make = _qwen3(num_experts=EXPERTS, num_experts_per_tok=TOP_K)
    return trainer_case("tunix_qwen3_megablox", make, around=_megablox_on_one_device)


def tunix_qwen3_megablox_skewed() -> Case:
    return skewed(tunix_qwen3_megablox())


def tunix_qwen3_splash(
    *,
    width: int = WIDTH,
    vocabulary: int = VOCABULARY,
    length: int = 128,
    split: int = 2,
    interpreted: bool = True,
) -> Case:
    """With splash attention inside of its `shard_map` over `split` devices; CPU devices need it `interpreted`."""
    flash = {"use_flash_attention": True, "flash_attention_block_size": length}
    make = _qwen3(vocabulary=vocabulary, width=width, heads=2, head_dim=128, **flash)
    around = functools.partial(_splash_on, split, interpreted)
    return trainer_case("tunix_qwen3_splash", make, token_batch(length=length, vocabulary=vocabulary), around)


def tunix_gemma() -> Case:
    from tunix.models.gemma.model import Gemma, ModelConfig

    config = _resized(ModelConfig.gemma_2b())
    return trainer_case("tunix_gemma", lambda rngs: Gemma(config, rngs=rngs))


def tunix_gemma3() -> Case:
    """With sliding windows in the attention of all its layers but every sixth."""
    from tunix.models.gemma3.model import Gemma3, ModelConfig

    config = _resized(ModelConfig.gemma3_270m(), sliding_window_size=LENGTH // 2, param_dtype=jnp.float32)
    return trainer_case("tunix_gemma3", lambda rngs: Gemma3(config, rngs=rngs))


def tunix_gemma4_experts() -> Case:
    """With a mixture of experts by ragged products beside the dense layer; gate and up are one matrix.

    What scales the last layer's result has no gradient, for the norm after it undoes it.
    """
    from tunix.models.gemma4.model import Gemma4, ModelConfig

    config = _resized(
        ModelConfig.gemma4_26b_a4b(),
        global_key_size=8,
        num_global_kv_heads=1,
        sliding_window_size=LENGTH // 2,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        expert_dim=WIDTH,
        moe_dense_hidden_dim=2 * WIDTH,
        param_dtype=jnp.float32,
        dtype=jnp.float32,
    )
    case = trainer_case("tunix_gemma4_experts", lambda rngs: Gemma4(config, rngs=rngs))
    return dataclasses.replace(case, zero_gradient=rf"\['layers'\]\[{LAYERS - 1}\]\['skip_scale'\]")


def _resized(config: Any, **others: Any) -> Any:
    return dataclasses.replace(
        config,
        num_layers=LAYERS,
        num_embed=VOCABULARY,
        embed_dim=WIDTH,
        hidden_dim=2 * WIDTH,
        num_heads=HEADS,
        head_dim=8,
        num_kv_heads=KV_HEADS,
        **others,
    )


@contextlib.contextmanager
def _megablox_on_one_device() -> Iterator[None]:
    """A mesh of one device for Tunix's `shard_map`, which the model takes for a TPU, and megablox in interpret mode."""
    from tunix.models.qwen3 import model

    seen = types.ModuleType("jax")
    vars(seen).update(vars(jax), devices=lambda: [types.SimpleNamespace(platform="tpu")])
    gmm = functools.partial(model.megablox.gmm, interpret=True)
    one = jax.sharding.Mesh(np.asarray(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    with mock.patch.object(model, "jax", seen), mock.patch.object(model.megablox, "gmm", gmm), one:
        yield


@contextlib.contextmanager
def _splash_on(split: int, interpreted: bool) -> Iterator[None]:
    """A mesh of `split` devices for Tunix's `shard_map`, and JAX's splash attention in interpret mode if asked for."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash

    make = functools.partial(splash.make_splash_mha, interpret=interpreted)
    devices = np.asarray(jax.devices()[:split]).reshape(split, 1)
    with mock.patch.object(splash, "make_splash_mha", make), jax.sharding.Mesh(devices, ("fsdp", "tp")):
        yield
