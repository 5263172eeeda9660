"""Shardings that a step's own code names: dropped under a plan, with one note."""

import logging

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import autopar
from autopar.common import jax_compat
from autopar.frontend.drop_shardings import Removed, without_placements
from autopar.ir.traced_step import Placement
from tests.small_steps import assert_close, slow_cluster, verified_step

LAYERS, WIDTH = 4, 32


def user_mesh():
    return Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "model"))


def constrained(x, *spec):
    return jax.lax.with_sharding_constraint(x, NamedSharding(user_mesh(), P(*spec)))


def layers(constrain):
    def step(params, batch):
        def loss(params):
            x = batch["x"]
            for w in params:
                x = constrain(jnp.tanh(x @ w))
            return jnp.mean((x - batch["y"]) ** 2)

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return step


def scanned(constrain):
    def step(params, batch):
        def loss(stacked):
            body = jax.checkpoint(lambda x, w: (constrain(jnp.tanh(x @ w)), None))
            x, _ = jax.lax.scan(body, constrain(batch["x"]), stacked)
            return jnp.mean((x - batch["y"]) ** 2)

        value, grads = jax.value_and_grad(loss)(params)
        return params - 0.1 * grads, value

    return step


def arguments(stacked=False):
    random = np.random.default_rng(0)
    weights = random.normal(size=(LAYERS, WIDTH, WIDTH)).astype(np.float32) / 6
    x, y = random.normal(size=(2, 16, WIDTH)).astype(np.float32)
    return (weights if stacked else list(weights)), {"x": x, "y": y}


def parallel(step, plan=None):
    return autopar.parallelize(step, plan=plan, cluster=slow_cluster(4), cache_dir=None)


STAGES = autopar.recipes.pipeline(2, num_microbatches=2)


@pytest.mark.cases(1)
@pytest.mark.parametrize("plan", [None, STAGES], ids=["one program", "stages"])
@pytest.mark.parametrize("make", [layers, scanned])
def test_a_step_with_constraints_sends_what_it_sends_without_them(make, plan):
    args = arguments(stacked=make is scanned)
    step = parallel(make(lambda x: constrained(x, "model", "data")), plan)
    without = parallel(make(lambda x: x), plan)
    found = verified_step(step, args, 1e-5)
    assert found.total.predicted == pytest.approx(without.plan(*args).predicted.sent_bytes)
    assert_close(step(*args), jax.jit(make(lambda x: x))(*args))
    (note,) = [n for n in step.plan(*args).record.notes if "shardings" in n]
    assert "with_sharding_constraint; first at" in note
    assert "frontend/test_drop_shardings.py" in note
    assert "autopar.constrain" in note


def test_the_user_is_told_once(caplog):
    step = parallel(layers(lambda x: constrained(x, "data")))
    weights, batch = arguments()
    with caplog.at_level(logging.WARNING, logger="autopar"):
        step.plan(weights, batch)
        step.plan(weights, {k: v[:8] for k, v in batch.items()})
    assert sum("with_sharding_constraint" in r.getMessage() for r in caplog.records) == 1


def test_constraints_over_one_device_say_nothing():
    mesh = jax.make_mesh((1, 1), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def step(x):
        return jax.lax.with_sharding_constraint(jnp.sin(x), NamedSharding(mesh, P("data", "model")))

    closed, removed = without_placements(jax.make_jaxpr(step)(jnp.ones((8, 4))))
    assert [eqn.primitive.name for eqn in jax_compat.open_jaxpr(closed).eqns] == ["sin"]
    assert removed == Removed((), ())


@pytest.mark.cases(1)
@pytest.mark.parametrize("plan", [None, STAGES], ids=["one program", "stages"])
def test_specs_may_name_the_axes_of_a_mesh_that_is_set(plan):
    step = layers(lambda x: jax.lax.with_sharding_constraint(x, P("data", "model")))
    args = arguments()
    with jax.set_mesh(user_mesh()):
        found = parallel(step, plan)
        verified_step(found, args, 1e-5)
        assert_close(found(*args), jax.jit(step)(*args))


def test_typed_shardings_are_dropped_too():
    def step(params, batch):
        x = jax.sharding.reshard(batch["x"], P("data"))
        for w in params:
            x = jnp.einsum("bi,ij->bj", jnp.tanh(x), w, out_sharding=P("data", None))
        return params, jnp.mean(x)

    args = arguments()
    explicit = (jax.sharding.AxisType.Explicit,)
    with jax.set_mesh(jax.make_mesh((4,), ("data",), devices=jax.devices()[:4], axis_types=explicit)):
        assert_close(parallel(step)(*args), jax.jit(step)(*args))


def test_they_are_taken_out_of_every_body():
    @jax.custom_vjp
    def product(x, w):
        return constrained(x @ w, "data")

    product.defvjp(lambda x, w: (product(x, w), (x, w)), lambda r, g: (constrained(g @ r[1].T, "data"), r[0].T @ g))

    def function(x, w):
        x = jax.jit(lambda x: jnp.sin(constrained(x, "data")), in_shardings=NamedSharding(user_mesh(), P("data")))(x)
        x = jax.checkpoint(lambda x: jnp.tanh(constrained(x, "model")))(x)
        x = jax.lax.cond(x[0, 0] > 0, lambda x: constrained(x, "model"), lambda x: jnp.cos(x), x)
        x = jax.lax.fori_loop(0, 3, lambda i, x: constrained(x * 2, "data"), x)
        x = jax.lax.while_loop(lambda x: constrained(x, "model")[0, 0] < 1, lambda x: x + 1, x)
        x, _ = jax.lax.scan(lambda x, _: (constrained(x, "data") / 2, None), x, length=2)
        return jnp.sum(jax.device_put(product(x, w), NamedSharding(user_mesh(), P("data"))))

    args = np.ones((16, 16), np.float32) / 8, np.eye(16, dtype=np.float32)
    closed = jax_compat.plain_jaxpr(
        jax.value_and_grad(lambda x, w: function(jax.lax.stop_gradient(x), w), argnums=1), *args
    )
    made, found = without_placements(closed)
    text = str(made)
    assert "sharding_constraint" in str(closed)
    assert "device_put" in str(closed)
    assert not any(name in text for name in ("sharding_constraint", "device_put", "NamedSharding"))
    assert {p.name for p in found.placements} == {"with_sharding_constraint", "device_put", "shardings of jax.jit"}
    assert all("frontend/test_drop_shardings.py" in p.line for p in found.placements)
    run = lambda jaxpr: jax.core.eval_jaxpr(jax_compat.open_jaxpr(jaxpr), jax_compat.jaxpr_consts(jaxpr), *args)
    assert_close(run(made), run(closed))


def test_what_names_no_place_is_left_as_it_is():
    closed = jax.make_jaxpr(lambda x: jax.jit(lambda x: jax.device_put(x) + 1)(x))(1.0)
    assert without_placements(closed) == (closed, Removed((), ()))
    assert Placement("a", "b") == Placement("a", "b")


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        kernel_init = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("embed", "hidden"))
        x = nn.with_logical_constraint(x, ("batch", "embed"))
        x = nn.Dense(WIDTH, kernel_init=kernel_init)(x)
        return nn.tanh(nn.with_logical_constraint(x, ("batch", "hidden")))


@pytest.mark.cases(1)
@pytest.mark.parametrize("plan", [None, STAGES], ids=["one program", "stages"])
def test_flax_logical_constraints_and_partitioning_boxes(plan):
    model = nn.Sequential([Block() for _ in range(LAYERS)])
    _, batch = arguments()
    rules = (("batch", "data"), ("hidden", "model"), ("embed", None))

    def step(params, batch):
        def loss(params):
            return jnp.mean((model.apply(params, batch["x"]) - batch["y"]) ** 2)

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    with jax.set_mesh(user_mesh()), nn.logical_axis_rules(rules):
        params = jax.jit(model.init)(jax.random.key(0), batch["x"])
        found = parallel(step, plan)
        assert any("shardings" in note for note in found.plan(params, batch).record.notes)
        verified_step(found, (params, batch), 1e-5)


def test_a_linear_solver_keeps_the_tuple_of_its_programs():
    def solved(x):
        matrix = constrained(x.T @ x + jnp.eye(4), "data", None)
        return jax.scipy.sparse.linalg.cg(lambda v: constrained(matrix @ v, "data"), jnp.ones(4), maxiter=5)[0]

    x = jnp.arange(32.0).reshape(8, 4) / 32
    without, removed = without_placements(jax_compat.plain_jaxpr(solved, x))
    assert removed.written
    (got,) = jax.core.eval_jaxpr(without.jaxpr, without.consts, x)
    assert_close(got, solved(x))
