"""Copies of a model whose number divides few dimensions of its state share it in groups."""

import jax

import autopar
from autopar import recipes
from autopar.sharding.state_groups import group_size
from benchmarks.zoo import CASES
from tests.small_steps import slow_cluster

MLP = CASES["mlp"](batch=36)


def test_groups_are_of_the_size_at_which_a_device_has_the_least():
    assert group_size([(8192, 8192), (8192,)], 48) == 16
    assert group_size([(12_288, 12_288), (12_288,)], 48) == 48
    assert group_size([(7, 5)], 48) == 48
    assert group_size([(48, 10), (64, 30)], 48) == 16  # 16 divides both, 48 the smaller one


def planned(recipe):
    return autopar.plan(
        MLP.step, jax.eval_shape(MLP.init, jax.random.key(0)), MLP.batch(0), plan=recipe, cluster=slow_cluster(6),
        cache_dir=None, show_progress=False,
    )  # fmt: skip


def test_zero_on_a_number_that_divides_little_is_hybrid_sharding_and_says_so():
    plan, hybrid = planned(recipes.zero(1)), planned(recipes.zero(1, size=2))
    assert plan.groups() == hybrid.groups() == {"replica": [[0, 2, 4], [1, 3, 5]], "data": [[0, 1], [2, 3], [4, 5]]}
    assert plan.record.decisions == hybrid.record.decisions
    (note,) = (note for note in plan.record.notes if "groups of" in note)
    assert note.startswith("recipe, data axis of 6 devices: few arrays")
    assert "3 groups of 2 devices have a copy of it each" in note
    assert not any("groups of" in note for note in hybrid.record.notes)
