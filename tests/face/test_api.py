"""The decorator: planning, compiling, running, and using a plan by hand."""

import copy
import functools
import logging

import flax.linen
import flax.training.train_state
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import autopar
from tests.small_steps import (
    MLP_BATCH,
    MLP_STATE,
    assert_close,
    grouped,
    mlp_batch,
    mlp_loss,
    mlp_state,
    mlp_step,
    new_mlp_state,
    slow_cluster,
)

REPLANNED = "planning again"


def split_mlp(**options):
    """The MLP's step on a cluster that makes the search split it."""
    return autopar.parallelize(mlp_step, **grouped(**{"cluster": slow_cluster(), **options}))


def split(step, **options):
    """A step like the MLP's, on that cluster."""
    return autopar.parallelize(step, cluster=slow_cluster(), **grouped(**options))


def held_bytes(array: jax.Array) -> int:
    """The most bytes of an array that one device holds."""
    return max(shard.data.nbytes for shard in array.addressable_shards)


# The decorator


def test_without_arguments():
    step = autopar.parallelize(mlp_step)
    assert_close(step(new_mlp_state(), mlp_batch()), mlp_step(new_mlp_state(), mlp_batch()))


def test_shapes_of_results_need_no_plan():
    step = autopar.parallelize(mlp_step)
    shapes = step.eval_shape(MLP_STATE, batch=MLP_BATCH)
    assert shapes == jax.eval_shape(mlp_step, MLP_STATE, MLP_BATCH)
    assert step.latest_plan is None


def test_shapes_of_results_of_a_step_on_objects():
    def step(layer: nnx.Linear, x: jax.Array) -> jax.Array:
        layer.bias[...] += 1.0
        return layer(x)

    layer, x = nnx.Linear(4, 2, rngs=nnx.Rngs(0)), jax.ShapeDtypeStruct((8, 4), jnp.bfloat16)
    shape = autopar.parallelize(step).eval_shape(layer, x)
    assert (shape.shape, shape.dtype) == ((8, 2), jnp.float32)
    assert not layer.bias[...].any()


def test_with_arguments():
    @autopar.parallelize(cluster=slow_cluster())
    def step(state, batch):
        return mlp_step(state, batch)

    assert_close(step(new_mlp_state(), mlp_batch()), mlp_step(new_mlp_state(), mlp_batch()))


def test_the_step_looks_like_its_function():
    @autopar.parallelize
    def train(state, batch):
        """Trains."""
        return mlp_step(state, batch)

    assert (train.__name__, train.__doc__) == ("train", "Trains.")


def test_a_copy_of_a_step_is_the_step_as_of_any_function():
    step = split_mlp()
    step(new_mlp_state(), mlp_batch())
    assert copy.deepcopy({"step": step})["step"] is step


def test_a_partial_can_be_parallelized():
    step = autopar.parallelize(functools.partial(mlp_step), cluster=slow_cluster())
    assert_close(step(new_mlp_state(), mlp_batch()), mlp_step(new_mlp_state(), mlp_batch()))


def test_an_object_that_is_called_can_be_parallelized():
    class Trainer:
        def __call__(self, state, batch):
            return mlp_step(state, batch)

    step = autopar.parallelize(Trainer(), cluster=slow_cluster())
    assert_close(step(new_mlp_state(), mlp_batch()), mlp_step(new_mlp_state(), mlp_batch()))


# Planning and compiling without running


def test_plans_of_arrays_and_of_shapes_are_equal():
    from_arrays = split_mlp(cache_dir=None).plan(new_mlp_state(), mlp_batch())
    from_shapes = split_mlp(cache_dir=None).plan(MLP_STATE, MLP_BATCH)
    assert str(from_arrays.record.decisions) == str(from_shapes.record.decisions)
    assert from_arrays.record.arguments == from_shapes.record.arguments


def test_planning_runs_nothing():
    step = split_mlp(cache_dir=None)
    before = {id(x) for x in jax.live_arrays()}
    step.plan(MLP_STATE, MLP_BATCH)
    assert [x.shape for x in jax.live_arrays() if id(x) not in before] == []


def test_the_plan_splits_what_is_worth_splitting():
    plan = split_mlp().plan(MLP_STATE, MLP_BATCH)
    assert plan.mesh.num_devices == 8
    assert any(not s.is_fully_replicated for s in jax.tree.leaves(plan.state_shardings))


def test_compiled_ahead_of_time_the_call_compiles_nothing_more():
    step = split_mlp()
    compiled = step.compile(MLP_STATE, MLP_BATCH)
    step(new_mlp_state(), mlp_batch())
    assert step.compile(MLP_STATE, MLP_BATCH) is compiled
    assert "all-reduce" in compiled.as_text()


def test_planning_for_devices_that_are_not_here_allocates_nothing():
    cluster = autopar.Cluster.preset("dgx-h100", hosts=16)
    huge = {
        "bias": jax.ShapeDtypeStruct((65536,), "float32"),
        "first": jax.ShapeDtypeStruct((65536, 65536), "float32"),
        "second": jax.ShapeDtypeStruct((65536, 65536), "float32"),
    }
    batch = {name: jax.ShapeDtypeStruct((4096, 65536), "float32") for name in "xy"}
    before = {id(x) for x in jax.live_arrays()}
    plan = autopar.plan(mlp_step, huge, batch, cluster=cluster)
    assert plan.mesh.num_devices == 128
    assert not plan.state_shardings["first"].is_fully_replicated
    assert isinstance(plan.state_shardings["first"].mesh, jax.sharding.AbstractMesh)
    assert [x.shape for x in jax.live_arrays() if id(x) not in before] == []


# Running


def test_several_steps_equal_plain_jit():
    step, plain = split_mlp(), jax.jit(mlp_step)
    state, expected = step.init(mlp_state, jax.random.key(0)), new_mlp_state()
    for seed in range(3):
        state, metrics = step(state, mlp_batch(seed=seed))
        expected, expected_metrics = plain(expected, mlp_batch(seed=seed))
        assert_close(metrics, expected_metrics)
    assert_close(state, expected)


def test_results_lie_as_the_plan_says():
    step = split_mlp()
    state, _ = step(new_mlp_state(), mlp_batch())
    wanted = step.plan(MLP_STATE, MLP_BATCH).state_shardings
    for name, leaf in state.items():
        assert leaf.sharding.is_equivalent_to(wanted[name], leaf.ndim), name


def test_numpy_arguments():
    step = split_mlp()
    host_state = jax.tree.map(np.asarray, new_mlp_state())
    assert_close(step(host_state, mlp_batch()), mlp_step(new_mlp_state(), mlp_batch()))


def test_numpy_float64_counts_as_float32_as_in_jax():
    step = split_mlp()
    wide = jax.tree.map(lambda x: x.astype(np.float64), mlp_batch())
    for _ in range(2):
        state, _ = step(new_mlp_state(), wide)
        assert_close(state, mlp_step(new_mlp_state(), mlp_batch())[0])


@pytest.mark.parametrize("scale", [3, 3.0, True, np.float32(3), np.int64(3)])
def test_python_scalars(scale):
    def step(state, batch, scale):
        return jax.tree.map(lambda p: p * scale, state), {"sum": batch["x"].sum() * scale}

    parallel = autopar.parallelize(step, cluster=slow_cluster(), donate_argnums=())
    for _ in range(2):
        got = parallel(new_mlp_state(), mlp_batch(), scale)
        expected = jax.jit(step)(new_mlp_state(), mlp_batch(), scale)
        assert_close(got, expected)
        assert jax.tree.map(lambda x: x.dtype, got) == jax.tree.map(lambda x: x.dtype, expected)


def test_a_scalar_in_the_state_is_planned_once(caplog):
    def step(state, batch):
        return {"count": state["count"] + 1, "w": state["w"] * batch["x"].mean()}, None

    parallel = autopar.parallelize(step, cluster=slow_cluster())
    state = {"count": 0, "w": jnp.ones(16)}
    with caplog.at_level(logging.WARNING, logger="autopar"):
        for _ in range(3):
            state, _ = parallel(state, mlp_batch())
    assert int(state["count"]) == 3
    assert REPLANNED not in caplog.text


def test_static_argument_each_value_is_a_step_of_its_own():
    def step(state, batch, kind):
        assert isinstance(kind, str)
        return state, {"loss": mlp_loss(state, batch) * (2.0 if kind == "double" else 1.0)}

    parallel = autopar.parallelize(step, cluster=slow_cluster(), static_argnums=2, donate_argnums=())
    state, batch = new_mlp_state(), mlp_batch()
    single = parallel(state, batch, "single")[1]["loss"]
    double = parallel(state, batch, "double")[1]["loss"]
    again = parallel(state, batch, "single")[1]["loss"]
    assert float(double) == pytest.approx(2 * float(single), rel=1e-6)
    assert float(again) == float(single)


def test_argument_numbers_count_from_the_last_as_in_jit():
    def step(state, batch, mode):
        assert mode in ("train", "test")
        new, metrics = mlp_step(state, batch)
        return (new if mode == "train" else state), metrics

    parallel = split(step, static_argnums=-1, batch_argnums=-2, donate_argnums=(-3,))
    assert_close(parallel(new_mlp_state(), mlp_batch(), "train"), mlp_step(new_mlp_state(), mlp_batch()))
    state, _ = parallel(new_mlp_state(), mlp_batch(), "test")
    assert_close(state, new_mlp_state())


def test_static_argument_in_front():
    def step(kind, state, batch):
        assert kind == "train"
        return mlp_step(state, batch)

    parallel = autopar.parallelize(step, cluster=slow_cluster(), static_argnums=0, donate_argnums=1, batch_argnums=2)
    state = new_mlp_state()
    assert_close(parallel("train", state, mlp_batch()), mlp_step(new_mlp_state(), mlp_batch()))
    plan = parallel.plan("train", MLP_STATE, MLP_BATCH)
    assert set(plan.state_shardings) == {"bias", "first", "second"}
    assert set(plan.batch_shardings) == {"x", "y"}


@pytest.mark.parametrize("decorates", [False, True])
def test_a_step_made_before_keeps_the_roles_of_its_arguments(decorates):
    def step(kind, state, batch):
        assert kind == "train"
        return mlp_step(state, batch)

    made = autopar.parallelize(step, cluster=slow_cluster(), static_argnames="kind", donate_argnums=1, batch_argnums=2)
    recipe = autopar.recipes.data_parallel()
    again = (
        autopar.parallelize(plan=recipe, cluster=slow_cluster())(made)
        if decorates
        else autopar.parallelize(made, plan=recipe, cluster=slow_cluster())
    )
    plan = again.plan("train", MLP_STATE, MLP_BATCH)
    assert set(plan.state_shardings) == {"bias", "first", "second"}
    assert set(plan.batch_shardings) == {"x", "y"}
    other = autopar.parallelize(made, cluster=slow_cluster(), donate_argnums=()).plan("train", MLP_STATE, MLP_BATCH)
    assert set(other.batch_shardings) == {"x", "y"}
    assert not other.state_shardings


def test_keyword_arguments():
    step = split_mlp()
    expected = mlp_step(new_mlp_state(), mlp_batch())
    assert_close(step(new_mlp_state(), batch=mlp_batch()), expected)
    assert_close(step(batch=mlp_batch(), state=new_mlp_state()), expected)


def test_arguments_with_defaults():
    def step(state, batch, scale=2.0):
        return {"loss": mlp_loss(state, batch) * scale}

    parallel = autopar.parallelize(step, cluster=slow_cluster(), donate_argnums=())
    state, batch = new_mlp_state(), mlp_batch()
    loss = float(mlp_loss(state, batch))
    calls = [
        lambda: parallel(state, batch),
        lambda: parallel(state, batch, scale=3.0),
        lambda: parallel(state, batch, 4.0),
    ]
    for call, scale in (*zip(calls, (2, 3, 4), strict=True), (calls[0], 2)):
        assert float(call()["loss"]) == pytest.approx(scale * loss, rel=1e-5)


def test_several_outputs_of_every_kind():
    def step(state, batch):
        new, metrics = mlp_step(state, batch)
        return new, metrics["loss"], (batch["x"] + 1, None), {"constant": 3, "key": jax.random.key(1)}

    got = split(step)(new_mlp_state(), mlp_batch())
    expected = step(new_mlp_state(), mlp_batch())
    assert_close(got[0], expected[0])
    assert float(got[1]) == pytest.approx(float(expected[1]), rel=1e-5)
    assert_close(got[2], expected[2])
    assert int(got[3]["constant"]) == 3
    assert jax.random.key_data(got[3]["key"]).tolist() == jax.random.key_data(jax.random.key(1)).tolist()


def test_several_batch_arguments():
    def step(state, x, y):
        return mlp_step(state, {"x": x, "y": y})

    parallel = split(step, batch_argnums=(1, 2))
    batch = mlp_batch()
    plan = parallel.plan(MLP_STATE, batch["x"], batch["y"])
    assert [len(s.spec) <= 2 for s in plan.batch_shardings] == [True, True]
    x, y = parallel.put_batch((batch["x"], batch["y"]))
    assert x.sharding.is_equivalent_to(plan.batch_shardings[0], 2)
    assert_close(parallel(new_mlp_state(), x, y), mlp_step(new_mlp_state(), batch))


# State and batch


def test_init_before_the_plan_leaves_no_device_with_a_whole_large_leaf():
    def create(key):
        return {"w": jax.random.normal(key, (512, 256)), "odd": jnp.zeros((3, 5))}

    state = split_mlp().init(create, jax.random.key(0))
    assert held_bytes(state["w"]) == state["w"].nbytes // 8
    np.testing.assert_array_equal(np.asarray(state["w"]), np.asarray(create(jax.random.key(0))["w"]))


def test_init_after_the_plan_follows_it():
    step = split_mlp()
    plan = step.plan(MLP_STATE, MLP_BATCH)
    state = step.init(mlp_state, jax.random.key(0))
    for name, leaf in state.items():
        assert leaf.sharding.is_equivalent_to(plan.state_shardings[name], leaf.ndim), name
    is_split = [name for name, s in plan.state_shardings.items() if not s.is_fully_replicated]
    assert is_split
    assert all(held_bytes(state[name]) < state[name].nbytes for name in is_split)


def test_a_state_whose_large_leaves_have_to_be_split_is_never_whole_on_a_device():
    step = split_mlp(memory_limit_bytes=9_000)  # the state has 12.5 kB
    state = step.init(mlp_state, jax.random.key(0))
    for _ in range(2):
        state, _ = step(state, mlp_batch())
        assert held_bytes(state["first"]) < state["first"].nbytes
        assert held_bytes(state["second"]) < state["second"].nbytes


def test_put_batch_before_the_plan_changes_nothing():
    batch = mlp_batch()
    assert split_mlp().put_batch(batch) is batch


def test_put_batch_after_the_plan_lays_it_out():
    step = split_mlp()
    plan = step.plan(MLP_STATE, MLP_BATCH)
    batch = step.put_batch(mlp_batch())
    for name, leaf in batch.items():
        assert leaf.sharding.is_equivalent_to(plan.batch_shardings[name], leaf.ndim), name
    assert_close(step(new_mlp_state(), batch), mlp_step(new_mlp_state(), mlp_batch()))


def test_put_batch_of_another_size_waits_for_its_plan():
    step = split_mlp()
    step.plan(MLP_STATE, MLP_BATCH)
    batch = step.put_batch(mlp_batch(8))
    assert_close(step(new_mlp_state(), batch), mlp_step(new_mlp_state(), mlp_batch(8)))


def test_donated_arrays_are_gone_and_their_memory_is_reused():
    step = split_mlp()
    compiled = step.compile(MLP_STATE, MLP_BATCH)
    state = step.init(mlp_state, jax.random.key(0))
    one_device = sum(held_bytes(x) for x in state.values())
    assert compiled.memory_analysis().alias_size_in_bytes == one_device
    assert compiled.cost_analysis()["flops"] > 0
    new, _ = step(state, mlp_batch())
    assert all(x.is_deleted() for x in state.values())
    assert not any(x.is_deleted() for x in new.values())


def test_without_donation_arguments_survive():
    step = split_mlp(donate_argnums=())
    assert step.compile(MLP_STATE, MLP_BATCH).memory_analysis().alias_size_in_bytes == 0
    state = step.init(mlp_state, jax.random.key(0))
    assert_close(step(state, mlp_batch()), step(state, mlp_batch()), tolerance=0)


# New shapes


def test_new_shapes_plan_again_and_say_so(caplog):
    step = split_mlp()
    with caplog.at_level(logging.WARNING, logger="autopar"):
        state, _ = step(new_mlp_state(), mlp_batch(8))
        assert REPLANNED not in caplog.text
        step(state, mlp_batch(16))  # a shorter batch would keep the plan's layouts
    assert [r.getMessage() for r in caplog.records if REPLANNED in r.getMessage()] == [
        "mlp_step: arguments of new shapes or types: planning again"
    ]


def test_two_shapes_work_alternately_and_are_planned_once_each(caplog):
    step, plain = split_mlp(), jax.jit(mlp_step)
    state, expected = new_mlp_state(), new_mlp_state()
    with caplog.at_level(logging.WARNING, logger="autopar"):
        for examples in (8, 16, 8, 16, 8):
            state, metrics = step(state, mlp_batch(examples))
            expected, expected_metrics = plain(expected, mlp_batch(examples))
            assert_close(metrics, expected_metrics)
    assert_close(state, expected)
    assert caplog.text.count(REPLANNED) == 1


# Constants


def test_large_constants_are_sharded_arguments_of_the_program():
    table = jnp.asarray(np.random.default_rng(0).normal(size=(4096, 64)), jnp.float32)

    def step(state, batch):
        return state, (batch["x"] @ table.T).sum()

    parallel = split(step, memory_limit_bytes=600_000)  # the table has 1 MB
    batch = {"x": np.ones((8, 64), np.float32)}
    compiled = parallel.compile({"w": jnp.ones(8)}, batch)
    (constant,) = compiled.constants
    assert constant.shape == (4096, 64)
    assert held_bytes(constant) < constant.nbytes
    assert len(compiled.as_text()) < 200_000
    assert "f32[4096,64]{1,0} constant" not in compiled.as_text()
    got = parallel({"w": jnp.ones(8)}, batch)[1]
    assert float(got) == pytest.approx(float((batch["x"] @ np.asarray(table).T).sum()), rel=1e-4)


# States of libraries


class LinenNet(flax.linen.Module):
    @flax.linen.compact
    def __call__(self, x):
        return flax.linen.Dense(16)(jnp.tanh(flax.linen.Dense(64)(x)))


def test_a_flax_train_state():
    def create(key):
        params = LinenNet().init(key, jnp.zeros((1, 32)))
        return flax.training.train_state.TrainState.create(
            apply_fn=LinenNet().apply, params=params, tx=optax.adam(1e-3)
        )

    def train_step(state, batch):
        def loss_fn(params):
            return jnp.mean((state.apply_fn(params, batch["x"]) - batch["y"]) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), {"loss": loss}

    step = split(train_step)
    state = step.init(create, jax.random.key(0))
    expected = jax.jit(train_step)(create(jax.random.key(0)), mlp_batch())
    got = step(state, mlp_batch())
    assert_close(got[0].params, expected[0].params)
    assert int(got[0].step) == 1
    plan = step.plan(got[0], mlp_batch())
    kernel = got[0].params["params"]["Dense_0"]["kernel"]
    assert kernel.sharding.is_equivalent_to(plan.sharding("state.params['params']['Dense_0']['kernel']"), 2)


def test_an_nnx_state():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.first, self.second = nnx.Linear(32, 64, rngs=rngs), nnx.Linear(64, 16, rngs=rngs)

        def __call__(self, x):
            return self.second(jnp.tanh(self.first(x)))

    graphdef = nnx.graphdef(Net(nnx.Rngs(0)))

    def create(key):
        return nnx.state(Net(nnx.Rngs(key)))

    def train_step(state, batch):
        def loss_fn(state):
            return jnp.mean((nnx.merge(graphdef, state)(batch["x"]) - batch["y"]) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(state)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), {"loss": loss}

    step = split(train_step)
    state = step.init(create, jax.random.key(0))
    expected = jax.jit(train_step)(create(jax.random.key(0)), mlp_batch())
    assert_close(step(state, mlp_batch()), expected)


def test_typed_keys_in_the_state():
    def step(state, batch):
        key, now = jax.random.split(state["key"])
        return {"key": key, "w": state["w"] + jax.random.normal(now, (64,)) * batch["x"].mean()}, None

    parallel = split(step)
    state = {"key": jax.random.key(3), "w": jnp.zeros(64)}
    expected = jax.jit(step)(state, mlp_batch())[0]
    got = parallel(state, mlp_batch())[0]
    assert_close(got["w"], expected["w"])
    assert jax.random.key_data(got["key"]).tolist() == jax.random.key_data(expected["key"]).tolist()


def test_a_state_with_an_optax_chain_and_nothing_in_it():
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))

    def step(state, batch):
        loss, grads = jax.value_and_grad(mlp_loss)(state["params"], batch)
        updates, opt = optimizer.update(grads, state["opt"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss

    state = {"params": new_mlp_state(), "opt": optimizer.init(new_mlp_state())}
    expected = jax.jit(step)(state, mlp_batch())
    got = split(step)(state, mlp_batch())
    assert_close(got, expected)
