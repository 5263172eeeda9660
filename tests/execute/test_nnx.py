"""NNX modules, optimizers, metrics and Rngs as arguments: changed in place, as under `nnx.jit`."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import autopar
from autopar import recipes
from autopar.errors import UnsupportedError
from autopar.tuning import tune
from tests.small_steps import assert_close, grouped, mlp_batch, slow_cluster


class Net(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(32, 64, use_bias=False, rngs=rngs), nnx.Linear(64, 16, rngs=rngs)])
        self.norm = nnx.BatchNorm(64, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.name = "net"

    def __call__(self, x):
        return self.layers[1](jnp.tanh(self.dropout(self.norm(self.layers[0](x)))))


def loss_fn(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def train(model, optimizer, batch):
    loss, grads = nnx.value_and_grad(loss_fn)(model, batch)
    optimizer.update(model, grads)
    return loss


ADAM = optax.adam(1e-2)  # once: it is part of the optimizer's graph, and two of them are not equal


def new_objects():
    model = Net(nnx.Rngs(0))
    return model, nnx.Optimizer(model, ADAM, wrt=nnx.Param)


def made(function=train, **options):
    return autopar.parallelize(function, **grouped(**{"cluster": slow_cluster(4), "cache_dir": None} | options))


def arrays(*objects):
    """The values of all variables, keys of random numbers as words."""
    leaves = jax.tree.leaves([nnx.state(x) for x in objects])
    return [jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x for x in leaves]


def assert_same_training(function, parallel, objects, expected, batches, tolerance=1e-5):
    reference = nnx.jit(function)
    for batch in batches:
        wanted, got = reference(*expected, *batch), parallel(*objects, *batch)
        assert_close(jax.tree.leaves(got), jax.tree.leaves(wanted), tolerance)
        assert_close(arrays(*objects), arrays(*expected), tolerance)


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "options", [{}, {"plan": recipes.zero(3)}, {"plan": recipes.tensor_parallel()}], ids=["searched", "zero", "tensor"]
)
def test_a_model_and_its_optimizer_train_in_place(options):
    objects = new_objects()
    kernel, model = objects[0].layers[0].kernel, objects[0]
    before = np.asarray(kernel[...])
    parallel = made(**options)
    assert_same_training(train, parallel, objects, new_objects(), [(mlp_batch(seed=s),) for s in range(3)])
    assert objects[0].layers[0].kernel is kernel  # the same variable, with a new array
    assert not np.array_equal(before, kernel[...])
    plan = parallel.plan(*objects, mlp_batch())
    paths = {v.path: v.kind for v in plan.record.arguments}
    assert paths["model.layers[0].kernel"] == "state"
    assert paths["batch['x']"] == "batch"
    assert "optimizer.step" in paths
    assert kernel[...].sharding.is_equivalent_to(plan.sharding("model.layers[0].kernel"), 2)
    assert len(parallel._plans) == 1
    assert model.name == "net"


def test_in_two_stages_with_micro_batches():
    def step(model, optimizer, batch):
        loss, grads = nnx.value_and_grad(lambda m: jnp.mean((m(batch["x"]) - batch["y"]) ** 2))(model)
        optimizer.update(model, grads)
        return loss

    def objects():
        model = nnx.Sequential(nnx.Linear(32, 64, rngs=nnx.Rngs(0)), jnp.tanh, nnx.Linear(64, 16, rngs=nnx.Rngs(1)))
        return model, nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)

    parallel = made(step, plan=recipes.pipeline(2, num_microbatches=2))
    assert_same_training(step, parallel, objects(), objects(), [(mlp_batch(seed=s),) for s in range(2)])


def test_what_nnx_jit_is_around_is_run_instead():
    parallel = made(nnx.jit(train))
    assert_same_training(train, parallel, new_objects(), new_objects(), [(mlp_batch(),)] * 2)
    with pytest.raises(UnsupportedError, match="in_shardings"):
        made(nnx.jit(train, in_shardings=(nnx.StateSharding({}), None, None)))


def test_the_state_is_born_sharded_and_a_batch_is_put():
    parallel = made()
    shapes = nnx.eval_shape(new_objects)
    plan = parallel.plan(*shapes, mlp_batch())
    objects = parallel.init(new_objects)
    for path, leaf in (
        ("layers[0].kernel", objects[0].layers[0].kernel),
        ("layers[1].bias", objects[0].layers[1].bias),
    ):
        assert leaf[...].sharding.is_equivalent_to(plan.sharding(f"model.{path}"), leaf[...].ndim), path
    batches = [(parallel.put_batch(mlp_batch(seed=s)),) for s in range(2)]
    assert_same_training(train, parallel, objects, new_objects(), batches)
    assert len(parallel._plans) == 1
    alone = parallel.init(lambda: Net(nnx.Rngs(0)))  # a part of the state
    assert alone.layers[0].kernel[...].sharding == objects[0].layers[0].kernel[...].sharding


def test_shardings_are_shown_in_states_that_nnx_knows():
    model, optimizer = new_objects()
    plan = made().plan(model, optimizer, mlp_batch())
    of_model, of_optimizer = plan.state_shardings
    assert isinstance(of_model, nnx.State)
    assert of_model["layers"][0]["kernel"].get_value() == plan.sharding("model.layers[0].kernel")
    nnx.update(model, jax.device_put(nnx.state(model), of_model))
    assert model.layers[0].kernel[...].sharding == plan.sharding("model.layers[0].kernel")
    assert isinstance(of_optimizer, nnx.State)


def test_metrics_and_several_batch_arguments():
    def step(model, optimizer, metrics, x, y):
        def loss_fn(model):
            return jnp.mean((model(x) - y) ** 2)

        loss, grads = nnx.value_and_grad(loss_fn)(model)
        metrics.update(loss=loss)
        optimizer.update(model, grads)

    def objects():
        return *new_objects(), nnx.MultiMetric(loss=nnx.metrics.Average("loss"))

    parallel, batch = made(step), mlp_batch()
    ours, expected = objects(), objects()
    assert_same_training(step, parallel, ours, expected, [(batch["x"], batch["y"])] * 2)
    assert_close(ours[2].compute()["loss"], expected[2].compute()["loss"])
    kinds = [v.kind for v in parallel.plan(*ours, batch["x"], batch["y"]).record.arguments]
    assert kinds.count("batch") == 2


def test_behind_a_single_object_arrays_with_as_many_rows_hold_the_examples():
    def step(optimizer, keys, x, y, weights):
        loss, grads = nnx.value_and_grad(lambda model: jnp.mean(weights @ (model(x) - y).T ** 2))(optimizer.model)
        optimizer.update(grads)
        return loss

    def objects():
        return (nnx.ModelAndOptimizer(Net(nnx.Rngs(0)), ADAM),)

    parallel, batch, keys = made(step), mlp_batch(), {"dropout": jax.random.PRNGKey(0), "noise": jax.random.PRNGKey(1)}
    arguments = keys, batch["x"], batch["y"], jnp.ones((3, 16))
    ours = objects()
    assert_same_training(step, parallel, ours, objects(), [arguments] * 2)
    record = parallel.plan(*ours, *arguments).record
    assert [v.path for v in record.arguments if v.kind == "batch"] == ["x", "y"]


def test_pairs_of_unsigned_numbers_behind_objects_hold_the_examples_where_nothing_else_does():
    def step(model, optimizer, pairs):
        return train(model, optimizer, {"x": jnp.tile(pairs, 16) / 10, "y": 0.0})

    pairs = jnp.arange(32, dtype=jnp.uint32).reshape(16, 2)
    record = made(step).plan(*new_objects(), pairs).record
    assert [v.path for v in record.arguments if v.kind == "batch"] == ["pairs"]


def test_objects_share_references_within_and_between_arguments():
    def step(one, both, batch):
        def loss_fn(both):
            return jnp.mean((both["two"](both["one"](batch["x"])) - batch["y"]) ** 2)

        loss, grads = nnx.value_and_grad(loss_fn)(both)
        nnx.update(both, jax.tree.map(lambda p, g: p - 0.1 * g, nnx.state(both, nnx.Param), grads))
        return loss, one(batch["x"]).sum()

    def objects():
        one = nnx.Linear(32, 64, rngs=nnx.Rngs(0))
        return one, nnx.Dict(one=one, two=nnx.Linear(64, 16, rngs=nnx.Rngs(1)))

    ours = objects()
    assert_same_training(step, made(step), ours, objects(), [(mlp_batch(),)] * 3)
    assert ours[0].kernel is ours[1]["one"].kernel


def test_an_evaluation_step_gives_nothing_back_and_follows(caplog):
    def evaluate(model, batch):
        model.eval()
        loss = loss_fn(model, batch)
        model.train()
        return loss

    model, optimizer = new_objects()
    parallel = made()
    parallel(model, optimizer, mlp_batch())
    follower = made(evaluate, plan=parallel, cluster=None)
    with caplog.at_level(logging.WARNING, "autopar"):
        before = model.layers[0].kernel[...]
        loss = follower(model, mlp_batch())
        assert model.layers[0].kernel[...] is before
        assert not before.is_deleted()
    assert not caplog.records
    assert_close(loss, nnx.jit(evaluate)(model, mlp_batch()))
    plan = follower.plan(model, mlp_batch())
    assert plan.sharding("model.layers[0].kernel").is_equivalent_to(before.sharding, 2)


def test_what_a_step_returns_may_be_an_object_of_its_arguments_or_a_new_one():
    def step(model, batch):
        model.norm.mean[...] += batch["x"].mean()
        return model, nnx.Param(batch["x"].sum())

    model = Net(nnx.Rngs(0))
    same, new = made(step)(model, mlp_batch())
    assert same is model
    assert_close(new[...], mlp_batch()["x"].sum())


def test_variables_that_a_step_makes_appear_in_the_object():
    class Seen(nnx.Module):
        def __init__(self):
            self.linear = nnx.Linear(32, 16, rngs=nnx.Rngs(0))

    def step(model, batch):
        model.mean = nnx.Intermediate(batch["x"].mean())
        return model.linear(batch["x"]).sum()

    ours, expected, parallel = Seen(), Seen(), made(step)
    for seed in range(2):
        batch = mlp_batch(seed=seed)
        assert_close(parallel(ours, batch), nnx.jit(step)(expected, batch), 1e-4)
        assert_close(ours.mean[...], expected.mean[...])


@pytest.mark.slow
def test_tune_leaves_the_objects_alone():
    objects, parallel = new_objects(), made()
    before = [np.asarray(x) for x in arrays(*objects)]
    assert tune(parallel, *objects, mlp_batch(), seconds=0.0).rows[0].measured_s
    for a, b in zip(arrays(*objects), before, strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_step_is_verified_after_calls_too():
    parallel, objects = made(), new_objects()
    parallel(*objects, mlp_batch())
    before = arrays(*objects)
    assert autopar.verify(parallel, *objects, mlp_batch()).difference < 1e-4
    assert_close(arrays(*objects), before)


@pytest.mark.cases(1)
@pytest.mark.parametrize("batch", [mlp_batch(), lambda n: jax.tree.map(lambda x: x[:1].repeat(n, 0), mlp_batch())])
def test_the_largest_batch_of_objects_is_found(batch):
    parallel = made(memory_limit_bytes="200kB")
    assert autopar.fit(parallel, *new_objects(), batch, clusters=[slow_cluster(4)]).largest() > 0


def test_verify_and_plain_leave_the_objects_alone():
    objects, parallel = new_objects(), made()
    before = [np.asarray(x) for x in arrays(*objects)]
    assert autopar.verify(parallel, *objects, mlp_batch()).difference < 1e-4
    assert_close(parallel.plain(*objects, mlp_batch()), nnx.jit(train)(*new_objects(), mlp_batch()))
    for a, b in zip(arrays(*objects), before, strict=True):
        np.testing.assert_array_equal(a, b)


def test_without_donation_the_old_arrays_live_on():
    objects, parallel = new_objects(), made(donate_argnums=())
    kernel = objects[0].layers[0].kernel[...]
    assert_same_training(train, parallel, objects, new_objects(), [(mlp_batch(),)])
    assert not kernel.is_deleted()


def test_an_nnx_state_is_a_tree_of_arrays_as_under_jit():
    graph, state = nnx.split(nnx.Linear(32, 16, rngs=nnx.Rngs(0)))

    def step(state, batch):
        def loss_fn(state):
            return jnp.mean((nnx.merge(graph, state)(batch["x"]) - batch["y"]) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(state)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), loss

    new, loss = made(step)(jax.tree.map(jnp.copy, state), mlp_batch())
    expected, wanted = jax.jit(step)(state, mlp_batch())
    assert isinstance(new, nnx.State)
    assert_close((new, loss), (expected, wanted))


def test_an_optimizer_that_the_step_leaves_as_it_is_is_named(caplog):
    with caplog.at_level(logging.WARNING, "autopar"):
        made(jax.jit(train)).plan(*new_objects(), mlp_batch())
    assert "changes nothing of the optimizer 'optimizer'" in caplog.text


def test_variables_hold_numbers_texts_and_trees_beside_arrays():
    class Counted(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(32, 16, rngs=rngs)
            self.size, self.name = nnx.Variable(3), nnx.Variable("x")
            self.seen = nnx.BatchStat({"a": jnp.zeros(()), "b": jnp.ones(2)})
            self.pair = nnx.Variable((jnp.zeros(()),))

        def __call__(self, x):
            self.seen["a"] = self.seen["a"] + 1
            return self.linear(x) * self.seen["b"][0]

    def step(model, batch):
        loss, grads = nnx.value_and_grad(loss_fn)(model, batch)
        kernel = model.linear.kernel
        kernel[...] = kernel[...] - 0.1 * grads["linear"]["kernel"][...]
        return loss

    model = Counted(nnx.Rngs(0))
    made(step)(model, mlp_batch())
    assert float(model.seen["a"]) == 1
    assert (model.size.get_value(), model.name.get_value()) == (3, "x")
