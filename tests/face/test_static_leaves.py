"""Leaves that are no arrays, as Equinox models have them: static, as under `eqx.filter_jit`."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autopar
from autopar import recipes
from autopar.checkpoint import Checkpointer
from autopar.errors import InvalidArgumentError
from autopar.frontend.static_leaves import RawLeaves, StaticLeaf, set_apart
from tests.small_steps import grouped

OPTIMIZER = optax.adam(1e-2)


class Net(eqx.Module):
    mlp: eqx.nn.MLP
    dropout: eqx.nn.Dropout
    heads: int

    def __call__(self, x):
        return self.mlp(self.dropout(x.reshape(self.heads, -1)).reshape(-1))


def new_state(key):
    mlp = eqx.nn.MLP(8, 4, 16, 2, key=key)
    model = Net(mlp, eqx.nn.Dropout(0.5, inference=True), 2)
    return {"model": model, "optimizer": OPTIMIZER.init(eqx.filter(model, eqx.is_array)), "name": "net", "count": 0}


def train_step(state, batch):
    def loss_of(model):
        predicted = jax.vmap(model)(batch["x"])
        return jnp.mean(batch["loss"](predicted - batch["y"]))

    model = state["model"]
    loss, gradients = eqx.filter_value_and_grad(loss_of)(model)
    updates, optimizer = OPTIMIZER.update(gradients, state["optimizer"])
    model = eqx.apply_updates(model, updates)
    new = {"model": model, "optimizer": optimizer, "name": state["name"], "count": state["count"] + 1}
    return new, {"loss": loss, "activation": model.mlp.activation}


def new_batch():
    x = jax.random.normal(jax.random.key(1), (16, 8))
    return {"x": x, "y": jnp.ones((16, 4)), "loss": jnp.square}


def arrays_of(tree):
    return [leaf for leaf in jax.tree.leaves(tree) if hasattr(leaf, "shape")]


def small(function=train_step, **options):
    return autopar.parallelize(function, cache_dir=None, **grouped(**options))


@pytest.fixture(scope="module")
def expected():
    state = new_state(jax.random.key(0)) | {"count": jnp.asarray(0)}
    for _ in range(3):
        state, metrics = eqx.filter_jit(train_step)(state, new_batch())
    return state, metrics


WAYS = {
    "free": {},
    "micro-batches": {"num_microbatches": 2},
    "zero": {"plan": recipes.zero(3)},
    "stages": {"plan": recipes.pipeline(2)},
}


@pytest.mark.cases(1)
@pytest.mark.parametrize("way", WAYS)
def test_a_model_that_holds_functions_trains_as_under_filter_jit(way, expected):
    step = small(**WAYS[way])
    state = step.init(new_state, jax.random.key(0))
    assert (state["name"], state["model"].heads, state["model"].dropout.inference) == ("net", 2, True)
    for _ in range(3):
        state, metrics = step(state, new_batch())
    for ours, theirs in zip(arrays_of(state), arrays_of(expected[0]), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    assert metrics["activation"] is expected[1]["activation"]
    assert state["model"].mlp.activation is jax.nn.relu
    assert state["model"].dropout.p == 0.5
    assert type(state["model"].dropout.p) is float
    assert int(state["count"]) == 3, "a number outside of Equinox modules is an array"
    assert step._fast is not None
    assert len(step._plans) == 1


def test_another_static_leaf_is_another_program():
    step = small(lambda state, batch: (state + batch["f"](batch["x"]).sum(), batch["f"].__name__))
    x = jnp.arange(4.0)
    for f in (jnp.sin, jnp.cos, jnp.cos, jnp.sin):
        total, name = step(jnp.zeros(()), {"x": x, "f": f})
        assert float(total) == pytest.approx(float(f(x).sum()), rel=1e-6)
        assert name == f.__name__
    assert len(step._plans) == 2


def test_plans_states_and_batches_keep_the_structure(tmp_path):
    step, batch = small(), new_batch()
    state = step.init(new_state, jax.random.key(0))
    plan = step.plan(state, batch)
    assert jax.tree.structure(plan.state_shardings) == jax.tree.structure(state)
    plan.save(tmp_path / "plan.json")
    followed = small(plan=autopar.Plan.load(tmp_path / "plan.json"))
    placed = step.put_batch(batch)
    assert placed["loss"] is jnp.square
    ours, theirs = step(new_state(jax.random.key(0)), placed)[0], followed(new_state(jax.random.key(0)), batch)[0]
    for a, b in zip(arrays_of(ours), arrays_of(theirs), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_state_with_static_leaves_is_saved_and_restored(tmp_path):
    step = small()
    state, _ = step(step.init(new_state, jax.random.key(0)), new_batch())
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, state)
        checkpoints.wait()
        like = new_state(jax.random.key(5))
        ways = {"step": step}, {"like": like}, {"plan": step.latest_plan}
        restored = [checkpoints.restore(1, **way) for way in ways]
        restored.append(checkpoints.restore_or(new_state, jax.random.key(5), step=step)[0])
    for found in restored:
        assert jax.tree.structure(found) == jax.tree.structure(state)
        assert found["model"].mlp.activation is jax.nn.relu
        assert found["name"] == "net"
        for a, b in zip(arrays_of(found), arrays_of(state), strict=True):
            np.testing.assert_array_equal(a, b)
    assert restored[0]["model"].mlp.layers[0].weight.sharding.num_devices == 8
    assert [type(x) for x in jax.tree.leaves(restored[0])] == [type(x) for x in jax.tree.leaves(state)]


def test_verify_tune_and_fit_take_such_states():
    step, state, batch = small(), new_state(jax.random.key(0)), new_batch()
    assert not autopar.verify(step, state, batch).differs
    assert autopar.tune(step, state, batch, beside={}, most=1, seconds=0.01).plan.record.step == "train_step"
    cluster = autopar.Cluster.preset("tpu-v5e", topology="2x2")
    assert autopar.fit(train_step, state, batch, clusters=cluster, multiple=2**23).largest() >= 2**23


def test_a_static_leaf_that_changes_is_named(caplog):
    class Counting(eqx.Module):
        weights: jax.Array
        count: int

    step = small(lambda state, x: (Counting(state.weights - x.sum(), state.count + 1), x.sum()))
    step(Counting(jnp.ones(3), 4), jnp.ones(3))
    assert "state.count is static, 4, and result[0].count is 5; what changes has to be an array" in caplog.text


def test_what_has_no_hash_is_refused_by_its_path():
    with pytest.raises(InvalidArgumentError, match=r"batch\['names'\]: expected an array.*got set") as caught:
        small()(new_state(jax.random.key(0)), new_batch() | {"names": {"a"}})
    assert "frozen dataclass" in caught.value.hint


def test_positions_of_static_leaves_among_those_that_are_passed():
    args = ({"a": jnp.zeros(2), "f": jnp.sin}, set_apart([jnp.cos, np.ones(2)]), "text")
    raw = RawLeaves.of(args)
    leaves = jax.tree.leaves(args)
    assert raw.static == ((1, StaticLeaf(jnp.sin)), (3, StaticLeaf("text")))
    assert list(map(np.shape, raw.dynamic(leaves))) == [(2,), (2,)]
    assert raw.dynamic([leaves[0], jnp.cos, *leaves[2:]]) is None


@pytest.mark.parametrize(("first", "second"), [(1, 1.0), (1, True), ("a", "b"), (jnp.sin, jnp.cos)])
def test_static_leaves_of_other_types_differ(first, second):
    assert StaticLeaf(first) == StaticLeaf(first) != StaticLeaf(second)
    assert StaticLeaf(float("nan")) != StaticLeaf(0.0)
