"""Steps that follow a step in stages read its state where it lies."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.calls.placement import has_sharding
from autopar.errors import UnsupportedError
from tests.small_steps import slow_cluster

OPTIONS = {"cluster": slow_cluster(8), "cache_dir": None, "show_progress": False}
WIDTH, LAYERS, BATCH = 16, 4, 16


def init(key):
    keys = jax.random.split(key, LAYERS)
    params = [{"w": jax.random.normal(k, (WIDTH, WIDTH)) / 4, "b": jnp.zeros(WIDTH)} for k in keys]
    return {"params": params, "moments": jax.tree.map(jnp.zeros_like, params)}


def loss_of(params, batch):
    x = batch["x"]
    for layer in params:
        x = x + jnp.tanh(x @ layer["w"] + layer["b"])
    return jnp.mean((x - batch["y"]) ** 2)


def train(state, batch):
    loss, gradients = jax.value_and_grad(loss_of)(state["params"], batch)
    moments = jax.tree.map(lambda m, g: 0.9 * m + g, state["moments"], gradients)
    return {"params": jax.tree.map(lambda p, m: p - 0.1 * m, state["params"], moments), "moments": moments}, loss


def evaluate(state, batch):
    return loss_of(state["params"], batch)


def batch_of(seed, size=BATCH):
    x, y = np.random.default_rng(seed).normal(size=(2, size, WIDTH)).astype(np.float32)
    return {"x": x, "y": y}


@pytest.fixture(scope="module", params=["1f1b", "interleaved"])
def trained(request):
    recipe = autopar.recipes.combine(pp=2, dp=2, zero=3, num_microbatches=4, schedule=request.param)
    step = autopar.parallelize(train, plan=recipe, **(OPTIONS | {"cluster": slow_cluster(4)}))
    state, _ = step(step.init(init, jax.random.key(0)), batch_of(0))
    return step, state


def test_the_state_stays_where_it_is(trained, tmp_path):
    step, state = trained
    follower = autopar.parallelize(evaluate, follow=step, donate_argnums=(), cache_dir=None, show_progress=False)
    plan, compiled = follower.plan(state, batch_of(1)), follower.compile(state, batch_of(1))
    assert plan.record.pipeline.schedule == "inference"
    assert len(plan.record.pipeline.stages) == len(step.latest_plan.record.pipeline.stages)
    leaves = jax.tree.leaves(state)  # the moments too, which no stage reads
    assert all(map(has_sharding, leaves, compiled.leaf_shardings))
    np.testing.assert_allclose(follower(state, batch_of(1)), follower.plain(state, batch_of(1)), rtol=1e-5)
    np.testing.assert_allclose(follower(state, batch_of(2, 8)), follower.plain(state, batch_of(2, 8)), rtol=1e-5)
    plan.save(tmp_path / "plan.json")
    loaded = autopar.parallelize(evaluate, plan=autopar.Plan.load(tmp_path / "plan.json"), donate_argnums=())
    np.testing.assert_allclose(loaded(state, batch_of(1)), follower.plain(state, batch_of(1)), rtol=1e-5)


def test_debug_callbacks_are_called_when_the_step_has_run(trained, capfd):
    def printing(state, batch):
        loss = evaluate(state, batch)
        jax.debug.print("loss {loss:.6f}", loss=loss)
        return loss

    step, state = trained
    follower = autopar.parallelize(printing, follow=step, donate_argnums=(), cache_dir=None, show_progress=False)
    loss = follower(state, batch_of(1))
    assert capfd.readouterr().out == f"loss {loss:.6f}\n"


def test_a_step_with_gradients_of_its_own_follows_too(trained):
    def gradient_norm(state, batch):
        gradients = jax.grad(loss_of)(state["params"], batch)
        return sum(jnp.sum(g**2) for g in jax.tree.leaves(gradients))

    step, state = trained
    follower = autopar.parallelize(gradient_norm, follow=step, donate_argnums=(), cache_dir=None, show_progress=False)
    assert follower.plan(state, batch_of(1)).record.pipeline.schedule == step.latest_plan.record.pipeline.schedule
    np.testing.assert_allclose(follower(state, batch_of(1)), follower.plain(state, batch_of(1)), rtol=1e-5)


def test_layers_in_another_order_are_refused():
    def backwards(state, batch):
        return loss_of(state["params"][::-1], batch)

    recipe = autopar.recipes.pipeline(2, num_microbatches=4)
    step, shapes = autopar.parallelize(train, plan=recipe, **OPTIONS), jax.eval_shape(init, jax.random.key(0))
    step.plan(shapes, batch_of(0))
    follower = autopar.parallelize(backwards, follow=step, donate_argnums=(), cache_dir=None, show_progress=False)
    with pytest.raises(UnsupportedError, match=r"in the order of the stages.*params.* on stage 1, read at stage 0"):
        follower.plan(shapes, batch_of(0))


def test_stages_in_a_v_are_refused():
    recipe = autopar.recipes.pipeline(2, "zb-v", num_microbatches=4)
    step, shapes = autopar.parallelize(train, plan=recipe, **OPTIONS), jax.eval_shape(init, jax.random.key(0))
    step.plan(shapes, batch_of(0))
    follower = autopar.parallelize(evaluate, follow=step, donate_argnums=(), **OPTIONS)
    with pytest.raises(UnsupportedError, match="schedule zb-v"):
        follower.plan(shapes, batch_of(0))


def test_slices_of_a_scan_are_refused():
    def scanned_loss(params, batch):
        x, _ = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), batch["x"], params)
        return jnp.mean((x - batch["y"]) ** 2)

    def train_scanned(params, batch):
        return params - 0.1 * jax.grad(scanned_loss)(params, batch)

    shapes = jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), jnp.float32)
    step = autopar.parallelize(train_scanned, plan=autopar.recipes.pipeline(2, num_microbatches=4), **OPTIONS)
    step.plan(shapes, batch_of(0))
    follower = autopar.parallelize(scanned_loss, follow=step, donate_argnums=(), **OPTIONS)
    with pytest.raises(UnsupportedError, match="a scan over layers"):
        follower.plan(shapes, batch_of(0))
