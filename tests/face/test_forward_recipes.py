"""Recipes for steps without gradients: parameters are the arguments without examples, or what is closed over."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar import recipes
from benchmarks.zoo.data import next_token_batch
from benchmarks.zoo.gpt import GPT
from benchmarks.zoo.training import cross_entropy
from tests.small_steps import grouped, verified_step

LAYERS, WIDTH, HEADS, VOCABULARY, LENGTH, BATCH = 2, 64, 4, 64, 32, 16
TOLERANCE = 1e-5
MODEL = GPT(LAYERS, WIDTH, HEADS, VOCABULARY, LENGTH, False, False, jnp.float32)
TOKENS = next_token_batch(batch=BATCH, length=LENGTH, vocabulary=VOCABULARY)(0)
ACTIVATION_BYTES = 4 * BATCH * LENGTH * WIDTH


def evaluate(params, batch):
    logits = MODEL.apply(params, batch["tokens"])
    return {"loss": cross_entropy(logits, batch["targets"]), "best": jnp.argmax(logits, axis=-1)}


def parameters():
    return MODEL.init(jax.random.key(0), jnp.zeros((1, LENGTH), jnp.int32))


def verified(recipe, devices=8, function=evaluate, args=None, **options):
    options = {"donate_argnums": (), "cache_dir": None, **options}
    step = autopar.parallelize(function, plan=recipe, cluster=autopar.Cluster.local(devices), **grouped(**options))
    args = args or (jax.jit(parameters)(), TOKENS)
    made = verified_step(step, args, TOLERANCE)
    return {c.name: c.compiled for c in made.collectives}, step.plan(*args)


def layouts(plan, end):
    return {v.layout.text(plan.mesh) for v in plan.record.arguments if v.path.endswith(end)}


def test_data_parallelism_sends_nothing_but_the_loss():
    sent, plan = verified(recipes.data_parallel())
    assert sent["total"] < 10
    assert plan.groups() == {"data": [list(range(8))]}
    assert layouts(plan, "['tokens']") == {'P("data", None)'}
    assert all(not any(v.layout.dims) for v in plan.record.arguments if v.path.startswith("params"))


def test_tensor_parallelism_reduces_two_activations_a_layer():
    _, plan = verified(recipes.tensor_parallel("1d"), HEADS)
    reduced = [use for use in plan.predicted.collectives if "layer" in use.module]
    assert {use.kind for use in reduced} == {"all-reduce"}
    assert sum(use.count for use in reduced) == 2 * LAYERS
    once = 2 * (HEADS - 1) / HEADS * ACTIVATION_BYTES
    assert sum(use.sent_bytes for use in reduced) == pytest.approx(2 * LAYERS * once)
    assert layouts(plan, "['feed_forward_in']['kernel']") == {'P(None, "model")'}
    assert layouts(plan, "['feed_forward_out']['kernel']") == {'P("model", None)'}


def test_stages_run_an_evaluation_step():
    _, plan = verified(recipes.pipeline(2, "inference"))
    assert plan.record.pipeline.schedule == "inference"
    assert len(plan.record.pipeline.stages) == 2


@pytest.mark.slow
def test_stages_of_tensor_groups_run_an_evaluation_step():
    _, plan = verified(recipes.combine(pp=2, tp=2, schedule="inference"))
    assert set(plan.groups()) == {"data", "model", "pipeline"}
    assert layouts(plan, "['feed_forward_in']['kernel']") == {'P(None, "model")'}


@pytest.mark.slow
def test_zero_3_gathers_every_parameter_once():
    sent, _ = verified(recipes.zero(3))
    nbytes = sum(4 * x.size for x in jax.tree.leaves(jax.eval_shape(parameters)))
    # The table of tokens is read twice: by the embedding and by the last product.
    assert 7 / 8 * nbytes <= sent["all-gather"] <= 7 / 8 * (nbytes + 4 * VOCABULARY * WIDTH)


def test_weights_that_a_step_closes_over_are_split_like_arguments():
    random = np.random.default_rng(0)
    first, second = (random.normal(size=shape).astype(np.float32) for shape in ((16, 64), (64, 16)))

    def apply(batch):
        return batch + jnp.tanh(batch @ first) @ second

    sent, plan = verified(
        recipes.tensor_parallel(), 4, apply, (random.normal(size=(8, 16)).astype(np.float32),), batch_argnums=(0,)
    )
    weights = [v for v in plan.record.arguments if v.kind == "constant"]
    assert {v.shape: v.layout.text(plan.mesh) for v in weights} == {
        (16, 64): 'P(None, "model")',
        (64, 16): 'P("model", None)',
    }
    assert sent["all-reduce"] == sent["total"] == 2 * 3 / 4 * 4 * 8 * 16
