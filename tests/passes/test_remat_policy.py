"""Texts that say what each layer recomputes."""

from importlib import metadata

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar import recipes
from autopar.errors import InvalidArgumentError
from autopar.frontend.recompute_in_scans import is_by_value
from autopar.passes.remat import is_policy, policies_of
from tests.small_steps import assert_close, gated_step, transformer


@pytest.mark.parametrize(
    ("text", "policies"),
    [
        ("nothing", ["nothing"] * 5),
        ("input", ["input"] * 5),
        ("matmuls every 2", ["nothing", "matmuls", "nothing", "matmuls", "nothing"]),
        ("input every 3", ["nothing", "nothing", "input", "nothing", "nothing"]),
        ("input every 9", ["nothing"] * 5),
        ("half matmuls", ["half matmuls"] * 5),
        ("half matmuls every 4", ["nothing", "nothing", "nothing", "half matmuls", "nothing"]),
    ],
)
def test_policies_of_five_layers(text, policies):
    assert list(policies_of(text, 5)) == policies


@pytest.mark.parametrize("text", ["all", "every 2", "input every 0", "input every two", "input every 2 layers", ""])
def test_no_policy(text):
    assert not is_policy(text)
    with pytest.raises(InvalidArgumentError, match=r"recipes.combine\(recompute=...\).* every 2"):
        recipes.combine(recompute=text)


def test_every_second_layer_is_between_none_and_all():
    case = transformer()
    state = jax.jit(case.create)(jax.random.key(0))
    plans = {}
    for text in ("nothing", "input every 2", "input"):
        step = autopar.parallelize(
            case.step,
            plan=recipes.combine(dp=4, num_microbatches=2, recompute=text),
            cluster=autopar.Cluster.local(4),
            cache_dir=None,
        )
        plans[text] = step.plan(case.shapes, case.batch).record
        if text == "input every 2":
            got = step(jax.tree.map(np.array, state), case.batch)
    assert_close(got, jax.jit(case.step)(state, case.batch))
    recomputed = plans["input every 2"].pipeline.recomputed
    assert {"nothing", "input"} == set(recomputed)
    assert recomputed == policies_of("input every 2", len(recomputed))
    times = [plan.predicted.compute_time_s for plan in plans.values()]
    assert times == sorted(times)
    assert len(set(times)) == 3


WIDTH, HIDDEN, EXAMPLES, LAYERS, MICROBATCHES = 32, 64, 2048, 4, 4


def gated(text):
    """(what was verified, the plan, products in the compiled stages) of two stages under a policy."""
    random = np.random.default_rng(0)
    sizes = ((WIDTH, HIDDEN), (WIDTH, HIDDEN), (HIDDEN, WIDTH))
    params = [tuple(random.normal(size=s).astype(np.float32) / 8 for s in sizes) for _ in range(LAYERS)]
    batch = {name: random.normal(size=(EXAMPLES, WIDTH)).astype(np.float32) for name in "xy"}
    step = autopar.parallelize(
        gated_step,
        plan=recipes.combine(pp=2, num_microbatches=MICROBATCHES, schedule="gpipe", recompute=text),
        cluster=autopar.Cluster.local(2),
        cache_dir=None,
    )
    found = autopar.verify(step, params, batch)
    assert found.difference is not None
    assert found.difference < 1e-5
    return found, step.plan(params, batch).record, "".join(step.compile(params, batch).as_text()).count(" dot(")


# Arrays that are there again while the backward pass of a layer runs: as predicted, and as compiled. Those of jaxlib
# 0.12 share memory with others, of which the prediction knows one.
BEFORE_0_12 = tuple(map(int, metadata.version("jaxlib").split(".")[:2])) < (0, 12)
THERE_AGAIN = (2, 2) if BEFORE_0_12 else (1, 0)


def test_every_second_product_is_computed_again_with_the_memory_and_time_that_are_predicted():
    """The gate is kept and what it multiplies is computed again: in each layer a product more, an array less."""
    policies = ("nothing", "matmuls", "half matmuls", "input")
    found, records, products = map(dict, zip(*([(t, x) for x in gated(t)] for t in policies), strict=True))
    for text, verified in found.items():
        assert verified.peak.ratio == pytest.approx(1.0, abs=0.1), text
    assert products["matmuls"] == products["nothing"]
    assert products["half matmuls"] == products["nothing"] + LAYERS
    assert products["input"] == products["nothing"] + 2 * LAYERS + 1  # and the one whose result the loss reads
    array = EXAMPLES // MICROBATCHES * HIDDEN * 4  # of one micro-batch; all wait in each stage of half the layers
    peaks = {text: records[text].predicted.peak_bytes[0] for text in policies}
    held = MICROBATCHES * LAYERS // 2 * array
    assert peaks["matmuls"] - peaks["half matmuls"] == pytest.approx(held - THERE_AGAIN[0] * array, rel=0.05)
    compiled = [found[text].peak.compiled for text in ("matmuls", "half matmuls")]
    assert compiled[0] - compiled[1] == pytest.approx(held - THERE_AGAIN[1] * array, rel=0.05)
    times = {text: records[text].predicted.product_time_s for text in policies}
    for text in policies:  # all products are equally large
        assert times[text] / times["nothing"] == pytest.approx(products[text] / products["nothing"], rel=1e-3), text


def test_a_search_for_stages_keeps_every_second_product():
    """Where the gates of all layers fit, and what they multiply does not, a product a layer is computed again."""
    wide = [tuple(jax.ShapeDtypeStruct(s, jnp.float32) for s in ((256, 8192), (256, 8192), (8192, 256)))] * 8
    batch = {name: jax.ShapeDtypeStruct((4096, 256), jnp.float32) for name in "xy"}

    def planned(limit_bytes=None):
        step = autopar.parallelize(
            gated_step,
            cluster=autopar.Cluster.preset("dgx-h100").submesh(1, 2),
            cache_dir=None,
            search=autopar.Search(num_microbatches=8, schedule="1f1b", memory_limit_bytes=limit_bytes),
        )
        return step.plan(wide, batch).record

    tight = planned(int(0.4 * max(planned().predicted.peak_bytes)))
    assert any(map(is_by_value, tight.pipeline.recomputed))
    recipe = recipes.combine(pp=2, num_microbatches=8, schedule="1f1b", recompute="input")
    plain = autopar.parallelize(
        gated_step, plan=recipe, cluster=autopar.Cluster.preset("dgx-h100").submesh(1, 2), cache_dir=None
    ).plan(wide, batch)
    assert tight.predicted.step_time_s < plain.predicted.step_time_s
