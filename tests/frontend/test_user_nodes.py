"""States with classes that check, or compute on, what they hold: no shardings, shapes or None may get into them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar import recipes
from autopar.errors import UnsupportedError
from autopar.tuning import tune
from tests.small_steps import assert_close, grouped, mlp_batch, mlp_loss, new_mlp_state, python, slow_cluster


@jax.tree_util.register_pytree_node_class
class Scale:
    """As `jmp.DynamicLossScale`: the constructor takes arrays only, and computes on them."""

    def __init__(self, value, counter):
        self.value = jnp.asarray(value) * 1
        self.counter = jnp.asarray(counter) + 0
        assert self.value.shape == () == self.counter.shape

    def tree_flatten(self):
        return (self.value, self.counter), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Checked:
    """A state that checks its fields whenever it is put together."""

    params: dict
    scale: Scale

    def __post_init__(self):
        for name, leaf in self.params.items():
            if not isinstance(leaf, (jax.Array, np.ndarray)):
                raise TypeError(f"{name} is no array: {leaf!r}")


def step(state, batch):
    loss, grads = jax.value_and_grad(lambda p: mlp_loss(p, batch) * state.scale.value)(state.params)
    params = jax.tree.map(lambda p, g: p - 0.1 * g / state.scale.value, state.params, grads)
    scale = Scale(jnp.where(jnp.isfinite(loss), state.scale.value, state.scale.value / 2), state.scale.counter + 1)
    return Checked(params, scale), {"loss": loss}


def new_state():
    return Checked(new_mlp_state(), Scale(jnp.float32(4.0), jnp.int32(0)))


PLANS = {
    "searched": {},
    "zero": {"plan": recipes.zero(3)},
    "two_stages": {"plan": recipes.pipeline(2, num_microbatches=2)},
}


def made(**options):
    return autopar.parallelize(step, cluster=slow_cluster(4), cache_dir=None, **grouped(**options))


@pytest.mark.cases(1)
@pytest.mark.parametrize("options", PLANS.values(), ids=PLANS)
def test_a_state_whose_classes_take_arrays_only_trains(options):
    parallel, plain = made(**options), jax.jit(step)
    state, expected = parallel.init(new_state), new_state()
    for seed in range(3):
        state, metrics = parallel(state, mlp_batch(seed=seed))
        expected, wanted = plain(expected, mlp_batch(seed=seed))
        assert_close((state, metrics), (expected, wanted))
    state, _ = parallel(parallel.init(new_state), parallel.put_batch(mlp_batch()))  # laid out as the plan says
    assert int(state.scale.counter) == 1


def test_a_batch_may_be_such_a_class():
    def scaled(state, batch):
        params, scale = batch.params, batch.scale.value
        loss, grads = jax.value_and_grad(mlp_loss)(state, params)
        return jax.tree.map(lambda p, g: p - 0.1 * g * scale, state, grads), loss

    batch = Checked(mlp_batch(), Scale(jnp.float32(2.0), jnp.int32(0)))
    parallel = autopar.parallelize(scaled, cluster=slow_cluster(4), cache_dir=None)
    parallel.plan(new_mlp_state(), batch)
    expected = jax.jit(scaled)(new_mlp_state(), batch)
    assert_close(parallel(new_mlp_state(), parallel.put_batch(batch)), expected)


def test_verify_and_tune_take_such_states():
    parallel = made()
    assert autopar.verify(parallel, new_state(), mlp_batch()).difference < 1e-5
    assert tune(parallel, new_state(), mlp_batch(), seconds=0.0).rows[0].measured_s


def test_shardings_in_the_structure_of_such_a_state_are_refused_by_name():
    plan = made().plan(new_state(), mlp_batch())
    with pytest.raises(UnsupportedError, match=r"test_user_nodes\.Scale.*\n.*plan\.sharding\(path\)"):
        _ = plan.state_shardings
    assert plan.sharding(plan.record.arguments[0].path)
    assert set(plan.batch_shardings) == {"x", "y"}


@pytest.mark.slow
def test_the_plan_of_a_file_is_run_on_such_a_state():
    found = python(
        "import autopar, jax, tempfile, pathlib\n"
        "from tests.frontend.test_user_nodes import *\n"
        "path = pathlib.Path(tempfile.mkdtemp()) / 'plan.json'\n"
        "made().plan(new_state(), mlp_batch()).save(path)\n"
        "loaded = made(plan=autopar.Plan.load(path))\n"
        "print(loaded(loaded.init(new_state), mlp_batch())[0].scale.counter)\n"
    )
    assert found.stdout.strip() == "1", found.stderr
