"""What XLA makes for TPUs of kernels with a rule: those of jax in Pallas, on parts of a device's shapes."""

import math
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

import autopar
from autopar import recipes
from autopar.verification import compile_for_target

B, L, H, D, W, E = 8, 512, 8, 128, 256, 4


def causal(q, k, v):
    scores = jnp.einsum("bhqd,bhkd->bhqk", q, k, preferred_element_type=jnp.float32)
    scores = jnp.where(jnp.tril(jnp.ones((q.shape[2], k.shape[2]), bool)), scores, -1e30)
    return jnp.einsum("bhqk,bhkd->bhqd", jax.nn.softmax(scores).astype(q.dtype), v)


def flash(q, k, v):
    from jax.experimental.pallas.ops.tpu.flash_attention import flash_attention

    return flash_attention(q, k, v, causal=True)


def splash(q, k, v):
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask

    mask = splash_attention_mask.CausalMask((q.shape[2], k.shape[2]))
    masks = splash_attention_mask.MultiHeadMask([mask] * q.shape[1])
    return jax.vmap(splash_attention_kernel.make_splash_mha_single_device(masks))(q, k, v)


def grouped(x, w, sizes):
    from jax.experimental.pallas.ops.tpu.megablox import gmm

    return gmm(x, w, sizes, preferred_element_type=jnp.bfloat16)


def shapes(**of):
    return {name: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for name, shape in of.items()}


def attention_step(attention):
    def step(state, batch):
        def loss(state):
            q, k, v = (jnp.einsum("blw,whd->bhld", batch["x"], state[n]) for n in "qkv")
            return jnp.mean(jnp.square(attention(q, k, v).astype(jnp.float32)))

        return jax.tree.map(jnp.subtract, state, jax.grad(loss)(state))

    return step, shapes(q=(W, H, D), k=(W, H, D), v=(W, H, D)), shapes(x=(B, L, W))


def compiled(step, state, batch, recipe):
    made = autopar.parallelize(step, plan=recipe, cluster="tpu-v5e:2x4", cache_dir=None)
    return compile_for_target(made, "tpu:v5e:2x4", state, batch).as_text()


def kernel_results(text):
    """The shapes that the Pallas calls of a program make."""
    calls = re.findall(r"= (.*?) custom-call\(.*tpu_custom_call", text)
    return [shape for call in calls for shape in re.findall(r"\w+\[[\d,]*\]", call)]


@pytest.mark.extra("tpu")
@pytest.mark.parametrize("attention", [flash, splash], ids=["flash", "splash"])
@pytest.mark.parametrize("has_rule", [True, False], ids=["by a rule", "by its grid"])
@pytest.mark.parametrize(
    ("recipe", "part"),
    [(recipes.data_parallel(), (B // 8, H, L, D)), (recipes.tensor_parallel(), (B, H // 8, L, D))],
    ids=["examples", "heads"],
)
def test_attention_kernels_run_on_each_devices_heads_or_examples(attention, has_rule, recipe, part):
    rule = "b h q d, b h k d, b h k d -> b h q d"
    called = autopar.kernel(attention, rule, like=causal) if has_rule else attention
    text = compiled(*attention_step(called), recipe)
    sizes = {math.prod(map(int, re.findall(r"\d+", shape[4:]))) for shape in kernel_results(text) if "bf16" in shape}
    assert sizes == {math.prod(part)}
    whole = re.findall(rf"bf16\[{B},{H},{L},{D}\]\S* all-gather", text)
    assert not whole, "no operand of attention is gathered"


@pytest.mark.extra("tpu")
def test_a_grouped_product_is_split_over_its_columns():
    product = autopar.kernel(grouped, "m k, e k n, e -> m n", whole=("m", "k", "e"))

    def step(state, batch):
        sizes = jnp.full((E,), L // E, jnp.int32)

        def loss(state):
            return jnp.mean(jnp.square(product(batch["x"][0], state["w"], sizes).astype(jnp.float32)))

        return jax.tree.map(jnp.subtract, state, jax.grad(loss)(state))

    args = step, shapes(w=(E, W, 8 * D)), shapes(x=(1, L, W))
    columns = autopar.constrain({"state/w": PartitionSpec(None, None, "model")}, axis_sizes={"model": 8})
    assert f"bf16[{L},{D}]" in kernel_results(compiled(*args, columns))


@pytest.mark.extra("tpu")
def test_megablox_without_a_rule_is_split_over_its_columns():
    def step(state, batch):
        sizes = jnp.full((8,), L // 8, jnp.int32)

        def loss(state):
            return jnp.mean(jnp.square(grouped(batch["x"][0], state["w"], sizes).astype(jnp.float32)))

        return jax.tree.map(jnp.subtract, state, jax.grad(loss)(state))

    pins = autopar.constrain({"state/w": PartitionSpec(None, None, "model")}, axis_sizes={"model": 8})
    text = compiled(step, shapes(w=(8, W, 8 * D)), shapes(x=(1, L, W)), pins)
    assert f"bf16[{L},{D}]" in kernel_results(text)
    assert not re.findall(rf"bf16\[8,{W},{8 * D}\]\S* all-gather", text)
