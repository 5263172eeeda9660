"""`Search(attention="blockwise")`: equal to plain `jax.jit` under every kind of plan, without scores in memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar import recipes
from autopar.errors import InvalidArgumentError, UnsupportedError
from autopar.ops.attention import ring
from tests.ops.attention.test_match import BATCH, causal, dropped, numbers, trained
from tests.programs.test_found_at_random import same_as_jit

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
        train_step,
        plan=recipe,
        search=autopar.Search(attention=attention),
        cluster=autopar.Cluster.local(devices, measured=False),
        cache_dir=None,
    )


@pytest.mark.cases(1)
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
    assert step.plan(state, batch).record.attention_kernel
    expected = jax.jit(train_step)(state, batch)
    got = step(jax.tree.map(jnp.copy, state), step.put_batch(batch) if devices > 1 else batch)
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(got), strict=True):
        np.testing.assert_allclose(b, a, atol=1e-5 * float(abs(a).max()))


def test_queries_in_blocks_compute_the_same(monkeypatch):
    """Four blocks of queries: the last ones' positions, masks and gradients are those of the whole."""
    monkeypatch.setattr(ring, "QUERY_BLOCK", L // 4)
    state, batch = arguments()
    expected = jax.jit(train_step)(state, batch)
    step = parallel(None, 1)
    got = step(jax.tree.map(jnp.copy, state), batch)
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(got), strict=True):
        np.testing.assert_allclose(b, a, atol=1e-5 * float(abs(a).max()))


@pytest.mark.slow
def test_without_a_kernel_the_default_is_attention_as_it_is_written():
    assert not parallel(None, 2, "auto").plan(*arguments()).record.attention_kernel


def test_attention_that_is_not_found_is_named_and_computes_the_same():
    step = autopar.parallelize(
        trained(dropped),
        search=autopar.Search(attention="blockwise"),
        cluster=autopar.Cluster.local(2, measured=False),
        cache_dir=None,
    )
    args = numbers()
    notes = step.plan(*args).record.notes
    (note,) = [note for note in notes if "scores" in note]
    assert note.startswith(
        "1 product of scores stays as it is written (state/k): XLA in blocks of queries does not take"
    )
    assert "reduce_sum at " in note
    assert "(dropped)" in note
    expected = jax.jit(trained(dropped))(*args)
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(step(*args)), strict=True):
        np.testing.assert_allclose(b, a, atol=1e-5 * float(abs(a).max()))


def test_attention_that_stays_beside_attention_that_is_found_is_named():
    def both(q, k, v, batch):
        return causal(q, dropped(q, k, v, batch), v, batch)

    step = autopar.parallelize(
        trained(both),
        search=autopar.Search(attention="blockwise"),
        cluster=autopar.Cluster.local(2, measured=False),
        cache_dir=None,
    )
    assert BATCH
    assert any(n.startswith("1 product of scores stays as it is written") for n in step.plan(*numbers()).record.notes)


def test_other_words_for_attention_are_refused():
    with pytest.raises(InvalidArgumentError, match=r"'auto' or 'as written' or 'kernel' or 'blockwise'.*'flash'"):
        parallel(None, 2, "flash")


def assert_blockwise_equals_jit(step, state, batch):
    blockwise = autopar.parallelize(
        step, search=autopar.Search(attention="blockwise"), cluster=autopar.Cluster.local(2), cache_dir=None,
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


POLICIES = jax.checkpoint_policies


def decoder_step(policy):
    """Layers under a policy, weights cast before all of them, and tokens that are shifted in the step.

    Packed sequences: a position sees those before it of its own segment.
    """

    def one_layer(x, p, segments):
        q, k, v = (jnp.einsum("blw,whd->blhd", x, p[name]) for name in "qkv")
        k, v = (jnp.repeat(a, q.shape[2] // a.shape[2], axis=2) for a in (k, v))
        seen = (segments[:, :, None] == segments[:, None, :]) & jnp.tril(jnp.ones((x.shape[1],) * 2, bool))
        scores = jnp.where(seen[:, None], jnp.einsum("bqhd,bkhd->bhqk", q, k) / 2, -1e30)
        made = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores).astype(v.dtype), v)
        x = x + jnp.einsum("bqhd,hdw->bqw", made, p["o"])
        return x + jnp.tanh(x @ p["w"])

    def step(state, batch):
        def loss(state):
            tokens, segments, targets = batch["tokens"][:, :-1], batch["segments"][:, :-1], batch["tokens"][:, 1:]
            layers = jax.tree.map(lambda a: a.astype(policy["dtype"]), state["layers"])
            x = (state["table"][tokens] + state["places"][: tokens.shape[1]]).astype(policy["dtype"])
            for p in layers:
                x = jax.checkpoint(one_layer, policy=policy["saved"])(x, p, segments)
            logits = (x @ state["table"].T.astype(x.dtype)).astype(jnp.float32)
            of_targets = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1)[..., 0]
            return -jnp.sum(of_targets * (segments > 0)) / jnp.sum(segments > 0)

        value, gradients = jax.value_and_grad(loss)(state)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, gradients), value

    return step


def decoder_arguments(layers, examples, length, width):
    def normal(key, *sizes):
        return 0.3 * jax.random.normal(key, sizes)

    keys = iter(jax.random.split(jax.random.key(0), 6 * layers + 4))
    sizes = {"q": (width, H, D), "k": (width, H // 2, D), "v": (width, H // 2, D), "o": (H, D, width)} | {
        "w": (width, width)
    }
    state = {
        "table": normal(next(keys), 32, width),
        "places": normal(next(keys), length, width),
        "layers": [{name: normal(next(keys), *size) for name, size in sizes.items()} for _ in range(layers)],
    }
    tokens = jax.random.randint(next(keys), (examples, length + 1), 0, 32)
    segments = jnp.broadcast_to(jnp.arange(length + 1) // (length // 2) + 1, tokens.shape)
    return state, {"tokens": tokens, "segments": segments}


@pytest.mark.slow
@pytest.mark.parametrize("saved", [POLICIES.dots_with_no_batch_dims_saveable, POLICIES.dots_saveable])
def test_many_layers_under_a_policy_are_planned(saved):
    args = jax.eval_shape(lambda: decoder_arguments(layers=8, examples=8, length=1024, width=256))
    step = decoder_step({"saved": saved, "dtype": jnp.bfloat16})
    plan = autopar.plan(step, *args, cluster="dgx-h100", cache_dir=None, search=autopar.Search(attention="blockwise"))
    assert plan.predicted.step_time_s < 1e-2
    assert not any("attention" in note for note in plan.record.notes)


@pytest.mark.parametrize(
    "options",
    [
        {"plan": recipes.sequence_parallel("ring")},
        pytest.param({"plan": recipes.sequence_parallel("ulysses")}, marks=pytest.mark.slow),
        pytest.param({"plan": recipes.sequence_parallel("megatron")}, marks=pytest.mark.slow),
        pytest.param({"plan": recipes.sequence_parallel("ring", size=2)}, marks=pytest.mark.slow),
        pytest.param({"attention": "blockwise"}, marks=pytest.mark.slow),
    ],
)
def test_sequences_that_are_shifted_in_the_step_are_shared(options):
    step = decoder_step({"saved": POLICIES.dots_saveable, "dtype": jnp.float32})
    same_as_jit(step, *decoder_arguments(layers=1, examples=4, length=8, width=16), devices=4, **options)


def _attends(length: int) -> autopar.Plan:
    def step(state, batch):
        def loss(w):
            heads = jnp.einsum("bte,ehd->bthd", batch["x"], w)
            return jnp.mean(jax.nn.dot_product_attention(heads, heads, heads) ** 2)

        return state - 0.1 * jax.grad(loss)(state), None

    batch = {"x": jax.ShapeDtypeStruct((8, length, 16), jnp.float32)}
    state = jax.ShapeDtypeStruct((16, 2, 8), jnp.float32)
    return autopar.plan(step, state, batch, cluster="dgx-h100", search=autopar.Search(attention="as written"))


def test_notes_name_scores_that_are_larger_than_queries_and_keys():
    (note,) = [note for note in _attends(256).record.notes if "attention" in note]
    assert note.startswith("attention runs as it is written: its scores, up to 4.19 MB over all devices")
    assert note.endswith("cuDNN's fused attention does not take float32 (bfloat16 or float16)")
    assert not [note for note in _attends(8).record.notes if "attention" in note]


def cross_step(state, batch):
    """A layer over an image whose positions look at those of a text, of which there are fewer, but for its padding."""

    def layer(x, p):
        q = jnp.einsum("blw,whd->blhd", x, p["q"])
        k, v = (jnp.einsum("btw,whd->bthd", batch["text"], p[name]) for name in "kv")
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / D**0.5
        scores = jnp.where(batch["given"][:, None, None], scores, -1e30)
        made = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)
        return x + jnp.einsum("bqhd,hdw->bqw", made, p["o"])

    def loss(state):
        x, _ = jax.lax.scan(lambda x, p: (jax.checkpoint(layer)(x, p), None), batch["x"], state)
        return jnp.mean(x**2)

    value, gradients = jax.value_and_grad(loss)(state)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, gradients), value


def cross_arguments(layers=2, text=6):
    keys = iter(jax.random.split(jax.random.key(0), 8))
    sizes = {"q": (W, H, D), "k": (W, H, D), "v": (W, H, D), "o": (H, D, W)}
    state = {name: 0.3 * jax.random.normal(next(keys), (layers, *size)) for name, size in sizes.items()}
    batch = {"x": jax.random.normal(next(keys), (B, L, W)), "text": jax.random.normal(next(keys), (B, text, W))}
    return state, batch | {"given": jnp.arange(text) < 1 + jnp.arange(B)[:, None] % text}


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe",
    [
        None,
        recipes.tensor_parallel(),
        recipes.combine(zero=3, num_microbatches=2),
        recipes.pipeline(2, num_microbatches=2),
        recipes.sequence_parallel("ulysses"),
    ],
    ids=["search", "tensor", "zero 3", "stages", "heads"],
)
def test_fewer_keys_than_queries_compute_the_same_without_scores(recipe):
    step, args = (
        autopar.parallelize(
            cross_step,
            plan=recipe,
            search=autopar.Search(attention="blockwise"),
            cluster=autopar.Cluster.local(4, measured=False),
            cache_dir=None,
        ),
        cross_arguments(),
    )
    assert not [note for note in step.plan(*args).record.notes if "attention" in note]
    expected, got = jax.jit(cross_step)(*args), step(*args)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_a_ring_refuses_fewer_keys_than_queries():
    step = autopar.parallelize(
        cross_step, plan=recipes.sequence_parallel("ring"), cluster=autopar.Cluster.local(2), cache_dir=None,
    )  # fmt: skip
    with pytest.raises(UnsupportedError, match=r"as many positions of queries as of keys.*16 of queries and 6 of keys"):
        step.plan(*cross_arguments())


def test_a_matrix_whose_columns_become_positions_is_no_attention():
    """Patches that are put together to an image: each column of the last matrix is a pixel of its patch."""

    def step(state, batch):
        def loss(state):
            patches = batch["x"].reshape(B, 4, 2, 4, 2).transpose(0, 1, 3, 2, 4).reshape(B, 16, 4)
            made = jnp.tanh(patches @ state["in"]) @ state["out"]
            image = made.reshape(B, 4, 4, 2, 2).transpose(0, 1, 3, 2, 4).reshape(B, 8, 8)
            return jnp.mean((image - batch["x"]) ** 2)

        return jax.tree.map(lambda p, g: p - 0.1 * g, state, jax.grad(loss)(state))

    args = (
        {"in": jax.ShapeDtypeStruct((4, 32), "float32"), "out": jax.ShapeDtypeStruct((32, 4), "float32")},
        {"x": jax.ShapeDtypeStruct((B, 8, 8), "float32")},
    )
    plan = autopar.plan(step, *args, cluster=autopar.Cluster.local(2), cache_dir=None)
    assert not [note for note in plan.record.notes if "attention" in note]
    with pytest.raises(UnsupportedError, match="a step with attention"):
        autopar.plan(
            step, *args, cluster=autopar.Cluster.local(2), plan=recipes.sequence_parallel("ulysses"), cache_dir=None,
        )  # fmt: skip
