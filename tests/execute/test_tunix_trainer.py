"""Tunix's `PeftTrainer` under autopar, as docs/from-trainers.md has it (extra: tunix)."""

import functools

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import autopar
from tests.small_steps import assert_close

VOCABULARY, EXAMPLES, LENGTH = 64, 8, 16


def trainer_of():
    from tunix.models.llama3 import model as llama
    from tunix.sft.peft_trainer import PeftTrainer, TrainingConfig
    from tunix.sft.utils import build_positions_from_mask, make_causal_attn_mask

    config = llama.ModelConfig(
        num_layers=2, vocab_size=VOCABULARY, embed_dim=32, hidden_dim=64, num_heads=4, head_dim=8, num_kv_heads=2,
        rope_theta=10_000, norm_eps=1e-5,
    )  # fmt: skip

    def inputs_of(batch):
        mask = batch["mask"] != 0
        tokens = {"input_tokens": batch["tokens"], "input_mask": mask}
        return tokens | {"positions": build_positions_from_mask(mask), "attention_mask": make_causal_attn_mask(mask)}

    model = llama.Llama3(config, rngs=nnx.Rngs(0))
    drawn = jax.tree.map(lambda x: 0.2 * jax.random.normal(jax.random.key(x.size), x.shape), nnx.state(model))
    nnx.update(model, drawn)  # its own weights are zeros in part
    trainer = PeftTrainer(model, optax.sgd(0.1, 0.9), TrainingConfig(eval_every_n_steps=10, max_steps=2))
    return trainer.with_gen_model_input_fn(inputs_of)


def test_the_trainer_trains_as_before():
    pytest.importorskip("tunix")
    tokens = np.random.default_rng(0).integers(VOCABULARY, size=(EXAMPLES, LENGTH)).astype(np.int32)
    batches = [{"tokens": tokens, "mask": np.ones_like(tokens)}] * 2
    plain, split = trainer_of(), trainer_of()
    plain.train(batches)

    step = autopar.parallelize(split._train_step, plan="zero(3)", cache_dir=None)
    split.create_train_step_fn = functools.partial(functools.partial, step, split.model, split.optimizer)
    split.train(batches, skip_jit=True)
    assert split.train_steps == 2
    assert_close(nnx.state((split.model, split.optimizer)), nnx.state((plain.model, plain.optimizer)))
    assert max(len(leaf.sharding.device_set) for leaf in jax.tree.leaves(nnx.state(split.model))) == jax.device_count()
