"""cuDNN's attention as jax calls it: split over examples and heads; traced, and compiled ahead of time for H100s."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax._src.cudnn import fused_attention_stablehlo

import autopar
from autopar import recipes
from autopar.common import jax_compat
from autopar.ir.graph import FactorKind
from autopar.ops.kernels.cudnn import NAMES, is_cudnn_attention
from autopar.ops.kernels.local import local_rule, local_work
from autopar.passes.example_rules import MixesExamples, places_of_results
from autopar.verification import compile_for_target

B, L, H, D, W = 8, 256, 8, 64, 128


@pytest.fixture(autouse=True)
def cudnn(monkeypatch):
    """Jax looks for the library when it traces; it is called only where the program runs."""
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91000)


def attention(q, k, v, **options):
    return jax.nn.dot_product_attention(q, k, v, implementation="cudnn", **options)


def calls(key_heads, **options):
    shapes = [jax.ShapeDtypeStruct((B, L, n, D), jnp.bfloat16) for n in (H, key_heads, key_heads)]
    of = lambda *args: jnp.sum(attention(*args, **options).astype(jnp.float32))
    return [
        e
        for e in jax_compat.equations_in(jax.make_jaxpr(jax.grad(of, (0, 1, 2)))(*shapes))
        if e.primitive.name in NAMES
    ]


def split(rule):
    return [f.size for f in rule.factors if f.kind is FactorKind.PASS]


@pytest.mark.parametrize("key_heads", [8, 2])
def test_examples_and_key_heads_may_be_split(key_heads):
    forward, backward = calls(key_heads, is_causal=True)
    assert split(local_rule(forward)) == split(local_rule(backward)) == [B, key_heads]
    # Dimensions of queries: examples, positions, key heads with their queries, features.
    (examples, _, heads, _), *_ = local_rule(forward).operands
    sizes = [f.size for f in local_rule(forward).factors]
    assert ([sizes[f] for f in examples], sizes[heads[0]]) == ([B], key_heads)
    assert len(heads) == (1 if key_heads == H else 2)
    assert local_work(forward).flops == 4 * B * H * L * L * D / 2
    assert local_work(backward).flops == 10 * B * H * L * L * D / 2


def test_examples_are_independent():
    forward, _ = calls(H)
    places = [0, 0, 0, *[None] * 7]
    assert places_of_results(forward, places) == [0, 0]
    with pytest.raises(MixesExamples):
        places_of_results(forward, [1, 1, 1, *[None] * 7])


def test_a_bias_of_all_examples_is_not_split_over_them_and_its_gradient_is_left_whole():
    forward, backward = calls(H, bias=jnp.zeros((1, H, L, L), jnp.bfloat16))
    queries, *_, bias = local_rule(forward).operands[:4]
    assert bias[:2] == ((), queries[2])
    assert split(local_rule(forward)) == [B, H]
    assert len(backward.outvars) == 4
    assert not is_cudnn_attention(backward)


def triton(q, k, v):
    from jax.experimental.pallas.ops.gpu.attention import mha

    return mha(q, k, v, None, causal=True)


@pytest.mark.extra("gpu")
@pytest.mark.parametrize("of", [attention, triton], ids=["cuDNN", "Triton"])
@pytest.mark.parametrize(
    ("recipe", "part"),
    [(recipes.data_parallel(), (B // 8, L, H, D)), (recipes.tensor_parallel(), (B, L, H // 8, D))],
    ids=["examples", "heads"],
)
def test_compiled_for_h100s_each_device_has_its_examples_or_heads(of, recipe, part):
    if of is triton and jax.__version_info__ >= (0, 12):
        pytest.skip("Pallas of jax 0.12 looks for a card when it is compiled")

    def step(state, batch):
        def loss(state):
            q, k, v = (jnp.einsum("blw,whd->blhd", batch["x"], state[n]) for n in "qkv")
            return jnp.mean(jnp.square(of(q, k, v).astype(jnp.float32)))

        return jax.tree.map(jnp.subtract, state, jax.grad(loss)(state))

    state = {n: jax.ShapeDtypeStruct((W, H, D), jnp.bfloat16) for n in "qkv"}
    batch = {"x": jax.ShapeDtypeStruct((B, L, W), jnp.bfloat16)}
    made = autopar.parallelize(step, plan=recipe, cluster="dgx-h100", cache_dir=None)
    text = compile_for_target(made, "gpu:h100:8", state, batch).as_text()
    called = re.findall(r"= (\(.*?\)|\S+) custom-call\(.*custom_call_target=\"__(?:cudnn|gpu\$xla)", text)
    made_by = {tuple(sorted(map(int, s.split(",")))) for call in called for s in re.findall(r"bf16\[([\d,]+)\]", call)}
    assert made_by == {tuple(sorted(part))}
    assert "all-gather" not in text
