"""The zoo's training steps, in parallel on 8 devices, against plain `jax.jit`."""

import jax
import pytest

import autopar
from benchmarks.zoo import CASES
from benchmarks.zoo.comparison import worst_difference
from tests.beside_jit import check_one_program, hosts_of_two

# One of each kind that is quick to plan and to compile.
QUICK = {
    "mlp",
    "mlp_multi_steps",
    "dropout",
    "bookkeeping",
    "loss_scaling",
    "fixed_point",
    "moe",
    "lstm",
    "nnx_model",
}


def quick_or_slow(names: list[str]) -> list:
    return [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.mark.cases(2)
@pytest.mark.parametrize("name", CASES)
def test_a_step_returns_a_state_like_the_one_it_took(name: str):
    case = CASES[name]()
    state = jax.eval_shape(case.init, jax.random.key(0))
    new_state, metrics = jax.eval_shape(case.step, state, case.batch(0))
    assert jax.tree.structure(new_state) == jax.tree.structure(state)
    for old, new in zip(jax.tree.leaves(state), jax.tree.leaves(new_state), strict=True):
        assert (new.shape, new.dtype) == (old.shape, old.dtype)
    assert metrics["loss"].shape == ()


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", quick_or_slow(list(CASES)))
def test_numbers_equal_those_of_one_device_where_all_that_can_be_is_split(name: str):
    check_one_program(CASES[name]())


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", ["mlp", "dropout"])
def test_a_state_born_sharded_has_the_values_of_one_born_whole(name: str):
    case = CASES[name]()
    step = autopar.parallelize(case.step, cluster=hosts_of_two(), cache_dir=None)
    shapes = jax.eval_shape(case.init, jax.random.key(0))
    plan = step.plan(shapes, case.batch(0))
    state = step.init(case.init, jax.random.key(0))
    assert jax.tree.map(lambda leaf: leaf.sharding, state) == plan.state_shardings
    assert worst_difference(case, jax.jit(case.init)(jax.random.key(0)), state).relative < 1e-6
