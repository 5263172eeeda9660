"""Models of Tunix, in Flax NNX, with random weights: Llama 3 in a step of ours, others in that of its trainer."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.zoo.case import Case, PyTree
from benchmarks.zoo.published.huggingface import token_batch
from benchmarks.zoo.training import cross_entropy, momentum


def tunix_llama(
    *,
    layers: int = 2,
    width: int = 32,
    heads: int = 4,
    kv_heads: int = 2,
    vocabulary: int = 64,
    length: int = 16,
    batch: int = 8,
) -> Case:
    from flax import nnx
    from tunix.models.llama3.model import Llama3, ModelConfig

    config = ModelConfig(
        num_layers=layers,
        vocab_size=vocabulary,
        embed_dim=width,
        hidden_dim=2 * width,
        num_heads=heads,
        head_dim=width // heads,
        num_kv_heads=kv_heads,
        rope_theta=10_000,
        norm_eps=1e-5,
    )
    tx = momentum()
    graph = nnx.graphdef(nnx.eval_shape(lambda: Llama3(config, rngs=nnx.Rngs(0))))

    def init(key: jax.Array) -> PyTree:
        params = nnx.state(Llama3(config, rngs=nnx.Rngs(key)), nnx.Param)
        return {"params": params, "opt_state": tx.init(params)}

    def step(state: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
        tokens = batch["input_ids"]
        positions = jnp.broadcast_to(jnp.arange(length), tokens.shape)
        mask = jnp.broadcast_to(jnp.tril(jnp.ones((length, length), bool)), (tokens.shape[0], length, length))

        def loss_fn(params: PyTree) -> jax.Array:
            logits, _ = nnx.merge(graph, params)(tokens, positions, None, mask)
            return cross_entropy(logits, batch["labels"])

        loss, grads = jax.value_and_grad(loss_fn)(state["params"])
        updates, opt_state = tx.update(grads, state["opt_state"])
        return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}, {"loss": loss}

    return Case(
        name="tunix_llama",
        step=step,
        init=init,
        batch=token_batch(batch=batch, length=length, vocabulary=vocabulary, padded=False),
    )


def trainer_case(
    name: str,
    make: Callable[[Any], Any],
    *,
    vocabulary: int,
    length: int,
    batch: int,
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

    data = token_batch(batch=batch, length=length, vocabulary=vocabulary)
    return Case(name=name, step=step, init=init, batch=data)


def _qwen3(
    layers: int, vocabulary: int, *, width: int = 32, heads: int = 4, head_dim: int = 8, **options: Any
) -> Callable[..., Any]:
    """What makes a small Qwen3."""
    from tunix.models.qwen3.model import ModelConfig, Qwen3

    config = ModelConfig(
        num_layers=layers,
        vocab_size=vocabulary,
        embed_dim=width,
        hidden_dim=2 * width,
        num_heads=heads,
        head_dim=head_dim,
        num_kv_heads=2,
        rope_theta=10_000,
        norm_eps=1e-6,
        **options,
    )
    return functools.partial(_model, Qwen3, config)


def tunix_qwen3(*, layers: int = 2, vocabulary: int = 64, length: int = 16, batch: int = 8) -> Case:
    make = _qwen3(layers, vocabulary)
    return trainer_case("tunix_qwen3", make, vocabulary=vocabulary, length=length, batch=batch)


def tunix_qwen3_experts(*, layers: int = 2, vocabulary: int = 64, length: int = 16, batch: int = 8) -> Case:
    """With a mixture of experts, which Tunix computes densely on CPU devices."""
    make = _qwen3(layers, vocabulary, num_experts=4, num_experts_per_tok=2)
    return trainer_case("tunix_qwen3_experts", make, vocabulary=vocabulary, length=length, batch=batch)


def tunix_qwen3_splash(
    *,
    layers: int = 2,
    width: int = 32,
    vocabulary: int = 64,
    length: int = 128,
    batch: int = 8,
    split: int = 2,
    interpreted: bool = True,
) -> Case:
    """With splash attention inside of its `shard_map` over `split` devices; CPU devices need it `interpreted`."""
    make = _qwen3(
        layers,
        vocabulary,
        width=width,
        heads=2,
        head_dim=128,
        use_flash_attention=True,
        flash_attention_block_size=length,
    )
    around = functools.partial(_splash_on, split, interpreted)
    return trainer_case("tunix_qwen3_splash", make, vocabulary=vocabulary, length=length, batch=batch, around=around)


def tunix_gemma(*, layers: int = 2, vocabulary: int = 64, length: int = 16, batch: int = 8) -> Case:
    from tunix.models.gemma.model import Gemma, ModelConfig

    config = _resized(ModelConfig.gemma_2b(), layers, vocabulary)
    make = functools.partial(_model, Gemma, config)
    return trainer_case("tunix_gemma", make, vocabulary=vocabulary, length=length, batch=batch)


def tunix_gemma3(*, layers: int = 2, vocabulary: int = 64, length: int = 16, batch: int = 8) -> Case:
    """With sliding windows in the attention of all its layers but every sixth."""
    from tunix.models.gemma3.model import Gemma3, ModelConfig

    wide = {"sliding_window_size": length // 2, "param_dtype": jnp.float32}
    config = _resized(ModelConfig.gemma3_270m(), layers, vocabulary, **wide)
    make = functools.partial(_model, Gemma3, config)
    return trainer_case("tunix_gemma3", make, vocabulary=vocabulary, length=length, batch=batch)


def _model(kind: Any, config: Any, rngs: Any) -> Any:
    return kind(config, rngs=rngs)


def _resized(config: Any, layers: int, vocabulary: int, **others: Any) -> Any:
    return dataclasses.replace(
        config,
        num_layers=layers,
        num_embed=vocabulary,
        embed_dim=32,
        hidden_dim=64,
        num_heads=4,
        head_dim=8,
        num_kv_heads=2,
        **others,
    )


@contextlib.contextmanager
def _splash_on(split: int, interpreted: bool) -> Iterator[None]:
    """A mesh of `split` devices for Tunix's `shard_map`, and JAX's splash attention in interpret mode if asked for."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash

    make = functools.partial(splash.make_splash_mha, interpret=interpreted)
    devices = np.asarray(jax.devices()[:split]).reshape(split, 1)
    with mock.patch.object(splash, "make_splash_mha", make), jax.sharding.Mesh(devices, ("fsdp", "tp")):
        yield


CASES = (tunix_llama, tunix_qwen3, tunix_qwen3_experts, tunix_qwen3_splash, tunix_gemma, tunix_gemma3)
