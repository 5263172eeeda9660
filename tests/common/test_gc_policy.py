"""The collector of cycles while a step is planned, and after."""

import gc

import jax
import pytest

import autopar
from autopar.common.progress import SELDOM, collected_seldom
from tests.small_steps import mlp_batch, mlp_state


@pytest.fixture(autouse=True)
def thresholds():
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    yield
    gc.set_threshold(*before)


def test_thresholds_come_back_behind_the_last_of_several():
    first, second = collected_seldom(), collected_seldom()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert gc.get_threshold() == SELDOM
    second.__exit__(None, None, None)
    assert gc.get_threshold() == (700, 10, 10)


def test_a_collector_that_is_off_stays_off():
    gc.set_threshold(0, 10, 10)
    with collected_seldom():
        assert gc.get_threshold()[0] == 0
    assert gc.get_threshold() == (0, 10, 10)


def test_planning_collects_seldom_and_leaves_nothing_behind_where_it_fails():
    seen = []

    def step(state, batch):
        seen.append(gc.get_threshold())
        raise ZeroDivisionError

    planned = autopar.parallelize(step, cluster=autopar.Cluster.flat(2), cache_dir=None)
    with pytest.raises(ZeroDivisionError):
        planned.plan(mlp_state(jax.random.key(0)), mlp_batch())
    assert seen[0] == SELDOM
    assert gc.get_threshold() == (700, 10, 10)
