"""Multi-head latent attention: keys wider than values, a part of each shared by all heads."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask

import autopar
from autopar import recipes
from tests.programs.latent_attention import mla
from tests.small_steps import slow_cluster


def splash(query, key, value):
    mask = splash_attention_mask.CausalMask((query.shape[1], key.shape[1]))
    masks = splash_attention_mask.MultiHeadMask([mask] * query.shape[2])
    kernel = splash_attention_kernel.make_splash_mha_single_device(masks, interpret=True)
    by_head = (jnp.moveaxis(a, 2, 1) for a in (query * query.shape[-1] ** -0.5, key, value))
    return jnp.moveaxis(jax.vmap(kernel)(*by_head), 1, 2)


def verified(case, recipe, devices, attention):
    """What `autopar.verify` found; the attention that was found in the graph."""
    step = autopar.parallelize(
        case.step,
        plan=recipe,
        cluster=slow_cluster(devices),
        cache_dir=None,
        search=autopar.Search(attention=attention),
    )
    found = autopar.verify(step, case.init(jax.random.key(0)), case.batch(0))
    assert not [n for n in found.plan.record.notes if n.startswith("attention") or "Pallas call" in n]
    assert found.difference < case.tolerance
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "devices", "attention"),
    [
        (recipes.tensor_parallel(), 4, "blockwise"),
        pytest.param(recipes.tensor_parallel(), 4, "as written", marks=pytest.mark.slow),
        pytest.param(None, 4, "blockwise", marks=pytest.mark.slow),
        pytest.param(recipes.sequence_parallel("ulysses"), 4, "blockwise", marks=pytest.mark.slow),
        pytest.param(recipes.sequence_parallel("ring"), 4, "blockwise", marks=pytest.mark.slow),
        pytest.param(recipes.pipeline(2, num_microbatches=2), 2, "blockwise", marks=pytest.mark.slow),
    ],
)
def test_it_computes_what_plain_jit_does(recipe, devices, attention):
    found = verified(mla(), recipe, devices, attention)
    if recipe == recipes.tensor_parallel():  # one sum behind each half of a layer: heads are split, not their widths
        assert found.total.predicted == found.total.compiled


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [recipes.tensor_parallel(), recipes.sequence_parallel("ulysses")])
def test_its_heads_are_split_in_a_kernel_too(recipe):
    case = mla(layers=1, heads=2, plain=64, rotated=64, value=128, length=256, batch=2, core=splash)
    verified(case, recipe, 2, "as written")
