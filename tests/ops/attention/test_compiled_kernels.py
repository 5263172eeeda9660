"""What XLA's compilers for GPUs and TPUs make of attention: read from programs for hardware that is not here."""

import math
import re

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar import recipes
from autopar.cost.peak_memory import allocated_bytes
from autopar.hardware.collective_cost import CollectiveKind
from autopar.verification import compile_for_target, traffic_of

B, L, H, D, W = 8, 1536, 4, 128, 256


def train_step(state, batch):
    def loss(state):
        q, k, v = (jnp.einsum("blw,whd->blhd", batch["x"], p) for p in state)
        return jnp.mean(jnp.sin(jax.nn.dot_product_attention(q, k, v, is_causal=True).astype(jnp.float32)))

    return jax.tree.map(jnp.subtract, state, jax.grad(loss)(state))


def compiled(attention, cluster, target, plan=None):
    args = (
        [jax.ShapeDtypeStruct((W, heads, D), jnp.bfloat16) for heads in (H, H // 2, H // 2)],
        {"x": jax.ShapeDtypeStruct((B, L, W), jnp.bfloat16)},
    )
    step = autopar.parallelize(
        train_step,
        plan=plan or recipes.data_parallel(),
        search=autopar.Search(attention=attention),
        cluster=cluster,
        cache_dir=None,
    )
    return step.plan(*args), compile_for_target(step, target, *args)


def scores_written(text):
    """Arrays of as many numbers as a device has scores that the entry computation makes."""
    made = r"(?:bf16|f32)\[([\d,]+)\]\S* (?:fusion|custom-call|dot|get-tuple-element)\("
    sizes = [math.prod(map(int, shape.split(","))) for shape in re.findall(made, text[text.index("ENTRY") :])]
    return sizes.count(H * L * L)


@pytest.mark.extra("gpu")
def test_on_gpus_cudnn_runs_blockwise_attention_and_the_predicted_peak_is_that_of_the_compiler():
    plan, made = compiled("blockwise", "dgx-h100", "gpu:h100:8")
    text = made.as_text()
    assert scores_written(text) == 0
    assert {"__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"} <= set(re.findall(r'target="([^"]*)"', text))
    assert max(plan.predicted.peak_bytes) == pytest.approx(allocated_bytes(made.executable), rel=0.1)


def cross_step(state, batch):
    """Attention of the positions of an image to those of a text, of which there are a sixth."""

    def loss(state):
        q = jnp.einsum("blw,whd->blhd", batch["x"], state[0])
        k, v = (jnp.einsum("btw,whd->bthd", batch["text"], p) for p in state[1:])
        return jnp.mean(jnp.sin(jax.nn.dot_product_attention(q, k, v).astype(jnp.float32)))

    return jax.tree.map(jnp.subtract, state, jax.grad(loss)(state))


@pytest.mark.parametrize(
    ("cluster", "target", "kernels"),
    [
        pytest.param(
            "dgx-h100",
            "gpu:h100:8",
            {"__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"},
            marks=pytest.mark.extra("gpu"),
        ),
        pytest.param("tpu-v5e:2x4", "tpu:v5e:2x4", {"tpu_custom_call"}, marks=pytest.mark.extra("tpu")),
    ],
)
def test_kernels_run_attention_of_fewer_keys_than_queries(cluster, target, kernels):
    args = (
        [jax.ShapeDtypeStruct((W, H, D), jnp.bfloat16)] * 3,
        {
            "x": jax.ShapeDtypeStruct((B, L, W), jnp.bfloat16),
            "text": jax.ShapeDtypeStruct((B, L // 6, W), jnp.bfloat16),
        },
    )
    step = autopar.parallelize(
        cross_step,
        plan=recipes.data_parallel(),
        search=autopar.Search(attention="blockwise"),
        cluster=cluster,
        cache_dir=None,
    )
    made, plan = compile_for_target(step, target, *args), step.plan(*args)
    assert kernels <= set(re.findall(r'target="([^"]*)"', made.as_text()))
    assert max(plan.predicted.peak_bytes) == pytest.approx(allocated_bytes(made.executable), rel=0.15)


@pytest.mark.extra("gpu")
@pytest.mark.parametrize("size", [2, 4, 8])
def test_on_gpus_cudnn_runs_each_step_of_a_ring(size):
    """The step of the own keys, and both kinds of the others', of which there is one more in a loop; bytes and memory
    are those predicted.
    """
    plan, made = compiled(
        "blockwise", "dgx-h100", "gpu:h100:8", recipes.combine(dp=8 // size, sp=size, sequence="ring")
    )
    text = made.as_text()
    assert scores_written(text) == 0
    assert text.count('target="__cudnn$fmhaSoftmax"') == (3 if size == 2 else 5)
    _, sent = plan.predicted.by_kind()["collective-permute"]
    assert traffic_of(made).bytes[CollectiveKind.COLLECTIVE_PERMUTE] == sent
    assert max(plan.predicted.peak_bytes) == pytest.approx(allocated_bytes(made.executable), rel=0.1)


@pytest.mark.extra("gpu")
def test_on_gpus_scores_are_written_where_attention_is_as_written():
    """Scores, weights, and both gradients, which `score_kernels` counts; and weights of groups of heads with their
    dimensions elsewhere, which it does not.
    """
    _, made = compiled("as written", "dgx-h100", "gpu:h100:8")
    assert scores_written(made.as_text()) == 4 + 2


@pytest.mark.extra("gpu")
def test_on_gpus_gradients_of_weights_of_grouped_heads_are_copied_in_32_bits():
    """As `score_kernels` has it: of (group, queries, keys) one copy in the order of the scores, (keys, queries, group),
    and weights as (group, queries, keys) beside the gradients of scores.
    """

    def step(state, batch):
        def loss(state):
            wq, wk, wv = state
            q = jnp.einsum("blw,wkgh->blkgh", batch["x"], wq)
            k, v = (jnp.einsum("blw,wkh->blkh", batch["x"], p) for p in (wk, wv))
            scores = jnp.einsum("bqkgh,bskh->bkgqs", q, k).astype(jnp.float32)
            weights = jax.nn.softmax(scores).astype(q.dtype)
            return jnp.mean(jnp.sin(jnp.einsum("bkgqs,bskh->bqkgh", weights, v).astype(jnp.float32)))

        return jax.tree.map(jnp.subtract, state, jax.grad(loss)(state))

    state = [jax.ShapeDtypeStruct((W, H // 2, *group, D), jnp.bfloat16) for group in ((2,), (), ())]
    batch = {"x": jax.ShapeDtypeStruct((B, L, W), jnp.bfloat16)}
    step = autopar.parallelize(
        step,
        plan=recipes.data_parallel(),
        search=autopar.Search(attention="as written"),
        cluster="dgx-h100",
        cache_dir=None,
    )
    text = compile_for_target(step, "gpu:h100:8", state, batch).as_text()
    in_scores_order, in_weights_order = f"[1,{H // 2},{L},{L},2]", f"[1,{H // 2},2,{L},{L}]"
    made = [line.split(" fusion(")[0] for line in text.splitlines() if " fusion(" in line and "transpose" in line]
    assert sum(f"= f32{in_scores_order}" in line for line in made) == 1
    assert sum(f"bf16{in_scores_order}" in line and f"bf16{in_weights_order}" in line for line in made) == 1


@pytest.mark.extra("tpu")
def test_on_tpus_a_kernel_of_pallas_runs_blockwise_attention():
    _, made = compiled("blockwise", "tpu-v5e:2x4", "tpu:v5e:2x4")
    text = made.as_text()
    assert scores_written(text) == 0
    assert "tpu_custom_call" in text
