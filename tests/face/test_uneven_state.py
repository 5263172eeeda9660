"""ZeRO where all devices divide no dimension of the state: fewer of them share it out, and results are those of jit."""

import jax
import numpy as np
import pytest

import autopar
from autopar import recipes
from autopar.checkpoint import Checkpointer
from tests.face.uneven_model import batch_of, device_share, init, loss, step
from tests.small_steps import grouped

COPY = lambda tree: jax.tree.map(lambda x: x.copy(), tree)


def parallel(recipe, function=step, **options):
    return autopar.parallelize(function, plan=recipe, cache_dir=None, **grouped(**options))


def assert_equal(tree, expected):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-5, atol=1e-6), tree, expected
    )


@pytest.fixture(scope="module")
def trained():
    """A state after two steps of plain jit, and the last loss."""
    state, value = init(), None
    for i in range(2):
        state, value = jax.jit(step)(state, batch_of(i))
    return state, value


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "recipe",
    [recipes.zero(1), recipes.combine(zero=2, num_microbatches=2), recipes.combine(zero=3, num_microbatches=2)],
    ids=["1", "2", "3"],
)
def test_devices_in_pairs_share_the_state_and_results_are_those_of_jit(recipe, trained):
    """Of 8 devices two divide the widths: they share the state out, and each pair has a copy."""
    parallel_step, state = parallel(recipe), init()
    for i in range(2):
        state, value = parallel_step(state, batch_of(i))
    assert_equal((state, value), trained)
    shared = state if recipe.request.binding == recipes.zero(3).request.binding else state["opt"]
    assert device_share(shared) <= 1.01 / 2
    made = autopar.verify(parallel_step, state, batch_of(2))
    assert made.difference <= 1e-5
    total = next(c for c in made.collectives if c.name == "total")
    assert total.predicted == pytest.approx(total.compiled, rel=1e-6)
    plan = parallel_step.plan(state, batch_of(0))
    assert plan.mesh.axis_names[:2] == ("data group", "data")
    assert plan.mesh.axis_sizes == (4, 2)
    assert any("data group axis of 4 devices: arrays are split over fewer devices" in n for n in plan.record.notes)


def test_the_state_goes_through_checkpoints_and_to_other_steps(tmp_path, trained):
    zero, copies = parallel(recipes.zero(3)), parallel(recipes.data_parallel())
    zero.plan(jax.eval_shape(init), batch_of(0))
    state = zero.init(init)  # each device makes its part
    assert device_share(state["params"]) <= 1.01 / 2
    state, _ = zero(state, batch_of(0))
    with Checkpointer(tmp_path) as saves:
        saves.save(1, state, plan=zero)
        saves.wait()
        again = saves.restore(like=jax.eval_shape(init), step=zero)
        plain = saves.restore(like=jax.eval_shape(init))
    assert device_share(again["params"]) <= 1.01 / 2
    assert_equal(plain, state)
    evaluate = parallel(zero, lambda state, batch: loss(state["params"], batch), donate_argnums=())
    np.testing.assert_allclose(evaluate(again, batch_of(1)), jax.jit(loss)(plain["params"], batch_of(1)), rtol=1e-5)
    assert_equal(copies(COPY(again), batch_of(1)), trained)
    assert_equal(zero(again, batch_of(1)), trained)


def test_a_plan_of_a_file_keeps_the_state_as_it_says(tmp_path, trained):
    plan = parallel(recipes.zero(1)).plan(jax.eval_shape(init), batch_of(0))
    plan.save(tmp_path / "plan.json")
    state = init()
    loaded = parallel(autopar.Plan.load(tmp_path / "plan.json"))
    for i in range(2):
        state, value = loaded(state, batch_of(i))
    assert_equal((state, value), trained)
    assert device_share(state["opt"]) <= 1.01 / 2
