"""High-level primitives and references are expanded before a step is planned."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import autopar
from autopar import recipes
from autopar.common import jax_compat
from autopar.errors import InvalidArgumentError, UnsupportedError
from autopar.frontend.saved_names import names_of, saving
from autopar.frontend.tracing import trace
from tests.small_steps import grouped

WIDTH = 8
STATE = [{"up": jnp.full((WIDTH, 2 * WIDTH), 0.1), "down": jnp.full((2 * WIDTH, WIDTH), 0.05)} for _ in range(2)]
BATCH = jax.random.normal(jax.random.key(0), (16, WIDTH))


@jax.custom_vjp
def square(x):
    return x * x


square.defvjp(lambda x: (x * x, x), lambda x, g: (2 * x * g,))


def layer(x, w):
    hidden = checkpoint_name(jax.nn.gelu(x.astype(w["up"].dtype) @ w["up"]), "hidden")
    return x + square(hidden @ w["down"])


def step_of(policy, form, dtype):
    one = layer if policy == "none" else jax.checkpoint(layer, policy=policy)

    def step(state, x):
        def loss(state):
            state = jax.tree.map(lambda w: w.astype(dtype), state)
            if form == "scan":
                stacked = jax.tree.map(lambda *w: jnp.stack(w), *state)
                return jnp.mean(jax.lax.scan(lambda x, w: (one(x, w), None), x.astype(dtype), stacked)[0] ** 2)
            y = x.astype(dtype)
            for w in state:
                y = one(y, w)
            return jnp.mean(y.astype(jnp.float32) ** 2)

        value, gradients = jax.value_and_grad(loss)(state)
        return jax.tree.map(lambda w, g: w - 0.1 * g, state, gradients), value

    return step


@pytest.fixture(params=[("jax_remat3",), ("jax_remat3", "jax_custom_vjp3")], ids=["remat3", "remat3, custom_vjp3"])
def flags(request):
    before = {name: getattr(jax.config, name) for name in request.param}
    for name in before:
        jax.config.update(name, True)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


def small(function, **options):
    return autopar.parallelize(function, cache_dir=None, **grouped(**options))


def assert_equals_jit(function, state, batch, rtol=1e-5, **options):
    got = small(function, **options)(jax.tree.map(jnp.array, state), batch)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(jax.jit(function)(state, batch)), strict=True):
        np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=rtol, atol=1e-6)


POLICIES = {
    "none": "none",
    "nothing": None,
    "names": jax.checkpoint_policies.save_only_these_names("hidden"),
    "products": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}


@pytest.mark.cases(4)
@pytest.mark.parametrize("form", ["unrolled", "scan"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.usefixtures("flags")
def test_regions_of_the_coming_checkpoint_are_plain_equations(policy, form):
    function = step_of(POLICIES[policy], form, "float32")
    traced = trace(function, (STATE, BATCH), names=("state", "batch"), donate=(0,), batch=(1,))
    assert "call_hi_primitive" not in str(traced.jaxpr)
    assert not getattr(traced.jaxpr, "is_high", False)
    got = jax.core.eval_jaxpr(traced.jaxpr, traced.constants, *jax.tree.leaves((STATE, BATCH)))
    for a, b in zip(got, jax.tree.leaves(jax.jit(function)(STATE, BATCH)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("policy", "form", "dtype", "options"),
    [
        ("nothing", "unrolled", "float32", {}),
        ("names", "unrolled", "float32", {"num_microbatches": 2}),
        ("products", "scan", "float32", {"num_microbatches": 2}),
        ("nothing", "unrolled", "bfloat16", {"num_microbatches": 2}),
        ("names", "unrolled", "float32", {"plan": recipes.pipeline(2)}),
        ("nothing", "scan", "float32", {"num_microbatches": 2}),
    ],
)
@pytest.mark.usefixtures("flags")
def test_such_steps_run_whole_in_micro_batches_and_in_stages(policy, form, dtype, options):
    function = step_of(POLICIES[policy], form, dtype)
    assert_equals_jit(function, STATE, BATCH, rtol=1e-5 if dtype == "float32" else 2e-2, **options)


@pytest.mark.parametrize("form", ["unrolled", "scan"])
@pytest.mark.usefixtures("flags")
@pytest.mark.skipif(not jax_compat.ASKS_POLICIES, reason="jax_remat3 of this jax knows no policy of others")
def test_names_are_saved_by_request_under_the_coming_checkpoint_too(form):
    function = step_of(None, form, "float32")
    traced = trace(function, (STATE, BATCH), names=("state", "batch"), donate=(0,), batch=(1,))
    assert names_of(traced) == ("hidden",)
    none, hidden = (len(list(jax_compat.equations_in(saving(traced, names).jaxpr))) for names in ((), ("hidden",)))
    assert hidden < none  # what comes after the products of `up` is not computed again
    if form == "unrolled":
        assert_equals_jit(function, STATE, BATCH, remat=["hidden"])


def with_references(state, x):
    total = jax.new_ref(jnp.zeros(()))

    def loss(state):
        hidden = jax.new_ref(jnp.zeros((*x.shape[:-1], 2 * WIDTH)))
        hidden[...] = jnp.tanh(x @ state["up"])
        return jnp.mean((hidden[...] @ state["down"] - x) ** 2)

    value, gradients = jax.value_and_grad(loss)(state)

    def norm(carry, g):
        total[...] += jnp.sum(g**2)
        return carry, None

    jax.lax.scan(norm, 0, gradients["up"])
    return jax.tree.map(jnp.subtract, state, gradients), (value, jax.freeze(total))


@pytest.mark.parametrize("options", [{}, {"num_microbatches": 2}], ids=["whole", "micro-batches"])
def test_references_of_a_step_are_values(options):
    assert_equals_jit(with_references, STATE[0], BATCH, **options)


def test_references_from_outside_are_refused_by_their_line():
    outside = jax.new_ref(jnp.zeros(WIDTH))

    def step(state, x):
        outside[...] = x.sum(0)
        return state, x.sum()

    with pytest.raises(UnsupportedError, match=r"test_lowered.py.*got a reference \(jax.new_ref\)") as caught:
        small(step)(STATE, BATCH)
    assert "take it as an argument" in caught.value.hint
    with pytest.raises(InvalidArgumentError, match="batch: expected an array, got a reference"):
        small(lambda state, batch: (state, batch[...].sum()))(STATE, jax.new_ref(BATCH))
