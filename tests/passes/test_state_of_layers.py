"""State of layers beside their parameters: counts, averages, factors. What belongs to a layer lies with its stage."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autopar
from autopar import recipes
from autopar.checkpoint import Checkpointer
from tests.small_steps import assert_close

LAYERS, WIDTH, BATCH = 4, 8, 8
ADAM = optax.adam(1e-2)


def make_batch(seed=0):
    return {"x": np.random.default_rng(seed).normal(size=(BATCH, WIDTH)).astype(np.float32)}


def make_weights():
    return jax.random.normal(jax.random.key(0), (LAYERS, WIDTH, WIDTH)) / 3


def gradient(w, batch, wrap=lambda body: body):
    def loss(w):
        x, _ = jax.lax.scan(wrap(lambda x, w: (x + jnp.tanh(x @ w), None)), batch["x"], w)
        return jnp.mean(x**2)

    return jax.value_and_grad(loss)(w)


def adam_of_each_layer():
    def step(state, batch):
        loss, g = gradient(state["w"], batch)
        updates, opt = jax.vmap(ADAM.update)(g, state["opt"])
        return {"w": state["w"] + updates, "opt": opt}, loss

    return step, lambda: {"w": make_weights(), "opt": jax.vmap(ADAM.init)(make_weights())}


def loss_scale_of_each_layer():
    """With an average of the weights, and under `jax.checkpoint`."""

    def step(state, batch):
        loss, g = gradient(state["w"], batch, jax.checkpoint)
        scale, good = state["scale"], state["good"]
        is_finite = jnp.isfinite(g * scale[:, None, None]).all((1, 2))
        w = jnp.where(is_finite[:, None, None], state["w"] - 0.1 * g, state["w"])
        grows = is_finite & (good >= 1)
        scale = jnp.where(is_finite, jnp.where(grows, 2 * scale, scale), scale / 2)
        average = 0.9 * state["average"] + 0.1 * w
        return {"w": w, "average": average, "scale": scale, "good": jnp.where(grows, 0, good + is_finite)}, loss

    return step, lambda: {
        "w": make_weights(),
        "average": make_weights(),
        "scale": jnp.full(LAYERS, 8.0),
        "good": jnp.zeros(LAYERS, jnp.int32),
    }


def factor_of_each_layer(update):
    """A statistic of a layer's gradient and its count, as of Shampoo, for one layer after the other or all at once."""

    def of_layer(args):
        w, g, factor, count = args
        factor = 0.9 * factor + g @ g.T
        values, vectors = jnp.linalg.eigh(factor + 0.01 * jnp.eye(WIDTH))
        return w - 0.01 / (count + 1) * ((vectors * values**-0.25) @ vectors.T @ g), factor, count + 1

    def step(state, batch):
        loss, g = gradient(state["w"], batch)
        w, factor, count = update(of_layer, (state["w"], g, state["factor"], state["count"]))
        return {"w": w, "factor": factor, "count": count}, loss

    return step, lambda: {
        "w": make_weights(),
        "factor": jnp.zeros((LAYERS, WIDTH, WIDTH)),
        "count": jnp.zeros(LAYERS, jnp.int32),
    }


def leaf_that_no_layer_reads():
    """Adafactor's statistics of each leaf, also of one that the scan's body does not read; and an average."""
    tx = optax.adafactor(1e-2, min_dim_size_to_factor=WIDTH)

    def step(state, batch):
        def loss_fn(params):
            x, _ = jax.lax.scan(lambda x, p: (x + jnp.tanh(x @ p["w"]), None), batch["x"], params)
            return jnp.mean(x**2)

        loss, g = jax.value_and_grad(loss_fn)(state["params"])
        updates, opt = tx.update(g, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        average = optax.incremental_update(params, state["average"], 0.1)
        return {"params": params, "opt": opt, "average": average}, loss

    def init():
        params = {"w": make_weights(), "b": jnp.ones((LAYERS, WIDTH))}
        return {"params": params, "opt": tx.init(params), "average": jax.tree.map(jnp.copy, params)}

    return step, init


def in_blocks(function, args):
    return jax.lax.map(function, args, batch_size=2)


def all_at_once(function, args):
    return jax.vmap(function)(args)


KINDS = {
    "adam": adam_of_each_layer,
    "loss scale": loss_scale_of_each_layer,
    "map": lambda: factor_of_each_layer(jax.lax.map),
    "blocks": lambda: factor_of_each_layer(in_blocks),
    "vmap": lambda: factor_of_each_layer(all_at_once),
}
UNREAD = {"unread": leaf_that_no_layer_reads}


def check(kind, plan):
    plain, init = (KINDS | UNREAD)[kind]()
    step = autopar.parallelize(plain, plan=plan, cache_dir=None)
    state, expected = init(), init()
    for seed in range(2):
        state, loss = step(state, make_batch(seed))
        expected, expected_loss = jax.jit(plain)(expected, make_batch(seed))
    assert_close(jax.tree.map(np.asarray, (state, loss)), jax.tree.map(np.asarray, (expected, expected_loss)))
    return {v.path: v.stages for v in step.plan(state, make_batch()).record.arguments if v.kind == "state"}


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.slow if kind == "map" else ()) for kind in KINDS]
)
def test_state_of_a_layer_goes_with_its_stage(kind):
    stages = check(kind, recipes.pipeline(2, num_microbatches=2))
    assert set(stages.values()) == {(0, 1)}


def test_a_leaf_that_no_layer_reads():
    """It belongs to no layer, so it is whole somewhere; what the layers read is with them all the same."""
    stages = check("unread", recipes.pipeline(2, num_microbatches=2))
    assert stages["state['params']['w']"] == stages["state['average']['w']"] == (0, 1)


def test_counts_of_one_layer_a_stage():
    assert set(check("adam", recipes.pipeline(4, num_microbatches=2)).values()) == {(0, 1, 2, 3)}


@pytest.mark.parametrize("schedule", ["zb-v", pytest.param("interleaved", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["loss scale", pytest.param("blocks", marks=pytest.mark.slow)])
def test_state_of_layers_of_several_stages_on_a_group(kind, schedule):
    stages = check(kind, recipes.pipeline(2, schedule, num_microbatches=4))
    assert len({len(of) for of in stages.values()}) == 1
    assert all(len(of) == 2 for of in stages.values())


def test_what_mixes_layers_is_computed_on_all_of_them():
    """The mean over layers of a statistic of each, which every layer's update reads."""
    plain, init = adam_of_each_layer()

    def step(state, batch):
        new, loss = plain({"w": state["w"], "opt": state["opt"]}, batch)
        seen = 0.5 * state["seen"] + jnp.sum(jnp.abs(new["w"]), (1, 2))
        return new | {"seen": jnp.sort(seen) - jnp.roll(seen, 1)}, loss

    def more():
        return init() | {"seen": jnp.arange(LAYERS, dtype=jnp.float32)}

    parallel = autopar.parallelize(step, plan=recipes.pipeline(2, num_microbatches=2))
    got, expected = parallel(more(), make_batch()), jax.jit(step)(more(), make_batch())
    assert_close(jax.tree.map(np.asarray, got), jax.tree.map(np.asarray, expected))


def test_a_run_under_a_schedule_with_several_stages_on_a_group_goes_on_under_others(tmp_path):
    """The state is one array for each leaf, with its layers in order: a checkpoint knows nothing of stages."""
    plain, init = adam_of_each_layer()
    expected = init()
    for seed in range(2):
        expected, _ = jax.jit(plain)(expected, make_batch(seed))
    plans = recipes.pipeline(2, "zb-v", num_microbatches=4), recipes.data_parallel()
    steps = [autopar.parallelize(plain, plan=plan, cache_dir=None) for plan in plans]
    state, _ = steps[0](steps[0].init(init), make_batch(0))
    assert isinstance(state["w"], jax.Array)
    np.testing.assert_allclose(state["w"][1:3], jax.jit(plain)(init(), make_batch(0))[0]["w"][1:3], rtol=1e-5)
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, state, plan=steps[0])
        checkpoints.wait()
        for step in steps:
            step.plan(jax.eval_shape(init), make_batch(0))
            restored = checkpoints.restore(like=jax.eval_shape(init), step=step)
            state, _ = step(restored, make_batch(1))
            assert_close(jax.tree.map(np.asarray, state), jax.tree.map(np.asarray, expected))
