"""Steps that follow a step in stages read its state where it lies."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.errors import UnsupportedError
from autopar.execute.placement import has_sharding
from tests.small_steps import slow_cluster

OPTIONS = {"cluster": slow_cluster(8), "cache_dir": None}
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


@pytest.fixture(scope="module", params=["1f1b", "interleaved", "zb-v"])
def trained(request):
    recipe = autopar.recipes.combine(pp=2, dp=2, zero=3, num_microbatches=4, schedule=request.param)
    step = autopar.parallelize(train, plan=recipe, **(OPTIONS | {"cluster": slow_cluster(4)}))
    state, _ = step(step.init(init, jax.random.key(0)), batch_of(0))
    return step, state


@pytest.mark.cases(1)
def test_the_state_stays_where_it_is(trained, tmp_path):
    step, state = trained
    follower = autopar.parallelize(evaluate, plan=step, donate_argnums=(), cache_dir=None)
    plan, compiled = follower.plan(state, batch_of(1)), follower.compile(state, batch_of(1))
    assert plan.record.pipeline.schedule in ("inference", "inference-v")
    of_step, of_plan = ([s.first_device for s in p.record.pipeline.stages] for p in (step.latest_plan, plan))
    assert of_plan == of_step
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
    follower = autopar.parallelize(printing, plan=step, donate_argnums=(), cache_dir=None)
    loss = follower(state, batch_of(1))
    assert capfd.readouterr().out == f"loss {loss:.6f}\n"


@pytest.mark.cases(1)
def test_a_step_with_gradients_of_its_own_follows_too(trained):
    def gradient_norm(state, batch):
        gradients = jax.grad(loss_of)(state["params"], batch)
        return sum(jnp.sum(g**2) for g in jax.tree.leaves(gradients))

    step, state = trained
    follower = autopar.parallelize(gradient_norm, plan=step, donate_argnums=(), cache_dir=None)
    assert follower.plan(state, batch_of(1)).record.pipeline.schedule == step.latest_plan.record.pipeline.schedule
    np.testing.assert_allclose(follower(state, batch_of(1)), follower.plain(state, batch_of(1)), rtol=1e-5)


def test_layers_in_another_order_are_refused():
    def backwards(state, batch):
        return loss_of(state["params"][::-1], batch)

    recipe = autopar.recipes.pipeline(2, num_microbatches=4)
    step, shapes = autopar.parallelize(train, plan=recipe, **OPTIONS), jax.eval_shape(init, jax.random.key(0))
    step.plan(shapes, batch_of(0))
    follower = autopar.parallelize(backwards, plan=step, donate_argnums=(), cache_dir=None)
    with pytest.raises(UnsupportedError, match=r"in the order of the stages.*params.* on stage 1, read at stage 0"):
        follower.plan(shapes, batch_of(0))


def scanned_loss(params, batch):
    x, _ = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), batch["x"] * params["scale"], params["layers"])
    return jnp.mean((x @ params["head"] - batch["y"]) ** 2)


def train_scanned(state, batch):
    gradients = jax.grad(scanned_loss)(state["params"], batch)
    moments = jax.tree.map(lambda m, g: 0.9 * m + g, state["moments"], gradients)
    return {"params": jax.tree.map(lambda p, m: p - 0.1 * m, state["params"], moments), "moments": moments}


def init_scanned(layers):
    def create(key):
        keys = jax.random.split(key)
        stack = jax.random.normal(keys[0], (layers, WIDTH, WIDTH)) / 4
        params = {"scale": jnp.ones(WIDTH), "layers": stack, "head": jax.random.normal(keys[1], (WIDTH, WIDTH)) / 4}
        return {"params": params, "moments": jax.tree.map(jnp.zeros_like, params)}

    return create


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("layers", "stages"),
    [(4, 2), (3, 2), (4, 3)],
    ids=["a slice on each stage", "no slices: two do not divide 3", "slices on two of three stages"],
)
def test_slices_of_a_scan_stay_where_they_are(layers, stages, tmp_path):
    """The moments too, which an evaluation does not read, and the state of a step with gradients of its own."""
    recipe = autopar.recipes.combine(pp=stages, dp=2, zero=3, num_microbatches=4)
    step = autopar.parallelize(train_scanned, plan=recipe, **(OPTIONS | {"cluster": slow_cluster(2 * stages)}))
    state = step(step.init(init_scanned(layers), jax.random.key(0)), batch_of(0))

    def evaluate(state, batch):
        return scanned_loss(state["params"], batch)

    def gradient_norm(state, batch):
        gradients = jax.grad(scanned_loss)(state["params"], batch)
        return sum(jnp.sum(g**2) for g in jax.tree.leaves(gradients))

    for function in (evaluate, gradient_norm):
        follower = autopar.parallelize(function, plan=step, donate_argnums=(), cache_dir=None)
        plan, whole = follower.plan(state, batch_of(1)), jax.tree.map(np.asarray, state)
        assert plan.record.sliced == step.latest_plan.record.sliced
        assert bool(plan.record.sliced) == (layers % 2 == 0)
        for batch in (batch_of(1), batch_of(2, 8)):
            planned = zip(jax.tree.leaves(state), follower.compile(state, batch).leaf_shardings, strict=False)
            assert all(leaf.sharding.is_equivalent_to(sharding, len(leaf.shape)) for leaf, sharding in planned)
            np.testing.assert_allclose(follower(state, batch), function(whole, batch), rtol=1e-5)
        plan.save(tmp_path / "plan.json")
        loaded = autopar.parallelize(function, plan=autopar.Plan.load(tmp_path / "plan.json"), donate_argnums=())
        np.testing.assert_allclose(loaded(state, batch_of(1)), function(whole, batch_of(1)), rtol=1e-5)


def test_slices_without_a_scan_over_them_are_refused():
    def first_layer(state, batch):
        return jnp.mean((batch["x"] @ state["params"]["layers"][0] - batch["y"]) ** 2)

    step = autopar.parallelize(train_scanned, plan=autopar.recipes.pipeline(2, num_microbatches=4), **OPTIONS)
    shapes = jax.eval_shape(init_scanned(4), jax.random.key(0))
    step.plan(shapes, batch_of(0))
    follower = autopar.parallelize(first_layer, plan=step, donate_argnums=(), **OPTIONS)
    with pytest.raises(UnsupportedError, match=r"a scan over the layers of .*layers.* in slices on 2 stages"):
        follower.plan(shapes, batch_of(0))
