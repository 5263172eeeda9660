"""`parallelize(attention="blockwise")`: equal to plain `jax.jit` under every kind of plan, without scores in memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar import recipes
from autopar.attention import query_blocks
from autopar.errors import InvalidArgumentError
from tests.attention.test_match import BATCH, causal, dropped, numbers, trained

B, L, H, D, W = 8, 16, 4, 4, 16


def layer(x, p):
    q, k, v = (jnp.einsum("blw,whd->blhd", x, p[name]) for name in "qkv")
    k, v = (jnp.repeat(a, H // a.shape[2], axis=2) for a in (k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / D**0.5
    scores = jnp.where(jnp.tril(jnp.ones((L, L), bool)), scores, -1e30)
    made = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)
    x = x + jnp.einsum("bqhd,hdw->bqw", made, p["o"])
    return x + jnp.tanh(x @ p["w"])


def train_step(state, batch):
    def loss(state):
        x = batch["x"]
        for p in state:
            x = jax.checkpoint(layer)(x, p)
        return jnp.mean((x - batch["y"]) ** 2)

    value, gradients = jax.value_and_grad(loss)(state)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, gradients), value


def arguments():
    keys = iter(jax.random.split(jax.random.key(0), 32))
    sizes = {"q": (W, H, D), "k": (W, H // 2, D), "v": (W, H // 2, D), "o": (H, D, W), "w": (W, W)}
    state = [{name: 0.3 * jax.random.normal(next(keys), s) for name, s in sizes.items()} for _ in range(2)]
    return state, {name: jax.random.normal(next(keys), (B, L, W)) for name in "xy"}


def parallel(recipe, devices, attention="blockwise"):
    return autopar.parallelize(
        train_step, plan=recipe, attention=attention, cluster=autopar.Cluster.local(devices, measured=False),
        cache_dir=None, show_progress=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("recipe", "devices"),
    [
        (None, 1),
        (None, 2),
        pytest.param(None, 4, marks=pytest.mark.slow),
        (recipes.zero(3), 4),
        (recipes.tensor_parallel(), 2),
        (recipes.pipeline(2, num_microbatches=2), 4),
        (recipes.sequence_parallel("ring"), 8),
        (recipes.combine(dp=2, sp=2, tp=2, sequence="ring"), 8),
        (recipes.combine(sp=4, pp=2, num_microbatches=2, sequence="ring"), 8),
    ],
    ids=[
        "one device",
        "two devices",
        "four devices",
        "zero 3",
        "tensor parallel",
        "two stages",
        "a ring",
        "three kinds",
        "rings of stages",
    ],
)
def test_every_plan_computes_what_plain_jit_does(recipe, devices):
    state, batch = arguments()
    step = parallel(recipe, devices)
    assert step.plan(state, batch).record.blockwise_attention
    expected = jax.jit(train_step)(state, batch)
    got = step(jax.tree.map(jnp.copy, state), step.put_batch(batch) if devices > 1 else batch)
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(got), strict=True):
        np.testing.assert_allclose(b, a, atol=1e-5 * float(abs(a).max()))


def test_queries_in_blocks_compute_the_same(monkeypatch):
    """Four blocks of queries: the last ones' positions, masks and gradients are those of the whole."""
    monkeypatch.setattr(query_blocks, "QUERY_BLOCK", L // 4)
    state, batch = arguments()
    expected = jax.jit(train_step)(state, batch)
    step = parallel(None, 1)
    got = step(jax.tree.map(jnp.copy, state), batch)
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(got), strict=True):
        np.testing.assert_allclose(b, a, atol=1e-5 * float(abs(a).max()))


def test_the_default_runs_attention_as_it_is_written():
    assert not parallel(None, 2, "as written").plan(*arguments()).record.blockwise_attention


def test_attention_that_is_not_found_is_named_and_computes_the_same():
    step = autopar.parallelize(
        trained(dropped), attention="blockwise", cluster=autopar.Cluster.local(2, measured=False), cache_dir=None,
        show_progress=False,
    )  # fmt: skip
    args = numbers()
    notes = step.plan(*args).record.notes
    assert "attention='blockwise': no attention was found that can be done in blocks" in notes
    expected = jax.jit(trained(dropped))(*args)
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(step(*args)), strict=True):
        np.testing.assert_allclose(b, a, atol=1e-5 * float(abs(a).max()))


def test_attention_that_stays_beside_attention_that_is_found_is_named():
    def both(q, k, v, batch):
        return causal(q, dropped(q, k, v, batch), v, batch)

    step = autopar.parallelize(
        trained(both), attention="blockwise", cluster=autopar.Cluster.local(2, measured=False), cache_dir=None,
        show_progress=False,
    )  # fmt: skip
    assert BATCH
    (note,) = [n for n in step.plan(*numbers()).record.notes if n.startswith("attention='blockwise'")]
    assert note.startswith("attention='blockwise': 1 products of scores stay as they are written")


def test_other_words_for_attention_are_refused():
    with pytest.raises(InvalidArgumentError, match=r"'as written' or 'blockwise'.*'flash'"):
        parallel(None, 2, "flash")


def assert_blockwise_equals_jit(step, state, batch):
    blockwise = autopar.parallelize(
        step, attention="blockwise", cluster=autopar.Cluster.local(2), cache_dir=None, show_progress=False,
        donate_argnums=(),
    )  # fmt: skip
    expected = jax.jit(step)(state, batch)
    for a, b in zip(jax.tree.leaves(blockwise(state, batch)), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_a_softmax_over_as_many_queries_as_keys():
    """Its result weighs values as the gradient of values is weighed: what it is computed of may not read it."""

    def step(state, batch):
        def loss(state):
            q, k, v = (jnp.einsum("blw,whd->blhd", batch["x"], state[name]) for name in "qkv")
            weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k), axis=-2)
            return jnp.square(jnp.einsum("bhqk,bkhd->bqhd", weights, v)).mean()

        value, gradients = jax.value_and_grad(loss)(state)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, gradients), value

    keys = jax.random.split(jax.random.key(0), 4)
    state = {name: 0.3 * jax.random.normal(key, (W, H, D)) for name, key in zip("qkv", keys, strict=False)}
    batch = {"x": jax.random.normal(keys[3], (B, L, W))}
    assert_blockwise_equals_jit(step, state, batch)


def test_layers_in_a_scan_that_carries_a_number():
    """What a scan begins with may be a literal."""

    def step(state, batch):
        def loss(state):
            def body(carry, p):
                x, number = carry
                return (layer(x, p), number + 1), None

            (x, number), _ = jax.lax.scan(body, (batch["x"], 0), state)
            return jnp.mean((x - batch["y"]) ** 2), number

        (value, number), gradients = jax.value_and_grad(loss, has_aux=True)(state)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, gradients), (value, number)

    layers, batch = arguments()
    state = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)
    assert_blockwise_equals_jit(step, state, batch)
