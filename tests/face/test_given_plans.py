"""Plans that a step is given, follows, or that are used by hand."""

import jax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import autopar
from autopar.execute import collectives
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


def split_mlp(**options):
    """The MLP's step on a cluster that makes the search split it."""
    return autopar.parallelize(mlp_step, **grouped(**{"cluster": slow_cluster(), **options}))


def traffic(compiled):
    return collectives.traffic(collectives.collectives(compiled.as_text()))


def eval_step(state, batch):
    return mlp_loss(state, batch)


# An evaluation step


def test_follow_takes_over_the_layout_of_the_state():
    train = split_mlp()
    evaluate = autopar.parallelize(eval_step, plan=train, cluster=slow_cluster())
    state, _ = train(new_mlp_state(), mlp_batch())
    expected = mlp_loss(state, mlp_batch(8))
    plan = evaluate.plan(state, mlp_batch(8))
    for name, sharding in train.plan(MLP_STATE, MLP_BATCH).state_shardings.items():
        assert plan.sharding(f"state['{name}']").is_equivalent_to(sharding, MLP_STATE[name].ndim), name
    loss = evaluate(state, mlp_batch(8))
    assert float(loss) == pytest.approx(float(expected), rel=1e-5)
    assert not any(x.is_deleted() for x in state.values())


def test_follow_uses_the_cluster_of_the_step_it_follows():
    train = split_mlp(cluster=slow_cluster(4))
    evaluate = autopar.parallelize(eval_step, plan=train)
    state, _ = train(new_mlp_state(), mlp_batch())
    plan = evaluate.plan(state, mlp_batch())
    assert plan.cluster.num_devices == 4
    assert plan.mesh == train.plan(MLP_STATE, MLP_BATCH).mesh


def test_follow_before_there_is_a_plan_says_what_to_do():
    evaluate = autopar.parallelize(eval_step, plan=split_mlp())
    with pytest.raises(autopar.errors.InvalidArgumentError, match=r"mlp_step to have a plan.*none yet"):
        evaluate(new_mlp_state(), mlp_batch())


# Plans given and plans used by hand


def test_a_loaded_plan_runs_exactly_as_it_says(tmp_path):
    path = tmp_path / "plan.json"
    saved = split_mlp().plan(MLP_STATE, MLP_BATCH)
    saved.save(path)
    step = autopar.parallelize(mlp_step, plan=autopar.Plan.load(path), cache_dir=None)
    assert step.plan(MLP_STATE, MLP_BATCH).record == saved.record
    state, metrics = step(new_mlp_state(), mlp_batch())
    assert_close((state, metrics), mlp_step(new_mlp_state(), mlp_batch()))
    for name, leaf in state.items():
        assert leaf.sharding.is_equivalent_to(saved.state_shardings[name], leaf.ndim), name
    assert step.last_progress.spent_s.keys() == {"trace"}
    searched = split_mlp().compile(MLP_STATE, MLP_BATCH)
    assert traffic(step.compile(MLP_STATE, MLP_BATCH)) == traffic(searched)
    assert traffic(searched).total_bytes == saved.predicted.sent_bytes > 0


def test_given_plans_win_over_what_the_search_would_choose():
    replicated = autopar.parallelize(mlp_step).plan(MLP_STATE, MLP_BATCH)
    sharded = split_mlp().plan(MLP_STATE, MLP_BATCH)
    on_fast = autopar.parallelize(mlp_step, plan=sharded).compile(MLP_STATE, MLP_BATCH)
    on_slow = split_mlp(plan=replicated).compile(MLP_STATE, MLP_BATCH)
    assert traffic(on_slow).total_bytes == 0 < traffic(on_fast).total_bytes


def test_init_under_a_given_plan_before_the_first_call():
    plan = split_mlp().plan(MLP_STATE, MLP_BATCH)
    step = autopar.parallelize(mlp_step, plan=plan)
    state = step.init(mlp_state, jax.random.key(0))
    assert_close(step(state, mlp_batch()), mlp_step(new_mlp_state(), mlp_batch()))


def test_shardings_of_a_plan_with_ones_own_jit():
    plan = split_mlp().plan(MLP_STATE, MLP_BATCH)
    own = jax.jit(
        mlp_step,
        in_shardings=(plan.state_shardings, plan.batch_shardings),
        out_shardings=(plan.state_shardings, None),
    )
    state = jax.device_put(new_mlp_state(), plan.state_shardings)
    new, metrics = own(state, jax.device_put(mlp_batch(), plan.batch_shardings))
    assert_close((new, metrics), mlp_step(new_mlp_state(), mlp_batch()))
    for name, leaf in new.items():
        assert leaf.sharding.is_equivalent_to(plan.state_shardings[name], leaf.ndim), name


def test_the_sharding_of_a_path():
    plan = split_mlp().plan(MLP_STATE, MLP_BATCH)
    assert plan.sharding("state['first']") == plan.state_shardings["first"]
    assert plan.sharding("batch['x']") == plan.batch_shardings["x"]
    assert plan.sharding("state/first") == plan.state_shardings["first"]
    assert plan.sharding("result/1/loss").spec == PartitionSpec()
    assert isinstance(plan.sharding("result[1]['loss']"), NamedSharding)
    assert plan.sharding("result[1]['loss']").spec == PartitionSpec()
    with pytest.raises(autopar.errors.InvalidArgumentError, match=r"argument paths, such as state\['bias'\]"):
        plan.sharding("state['third']")


def test_a_loaded_plan_has_its_shardings_by_path(tmp_path):
    plan = split_mlp().plan(MLP_STATE, MLP_BATCH)
    plan.save(tmp_path / "plan.json")
    loaded = autopar.Plan.load(tmp_path / "plan.json")
    assert loaded.state_shardings == {f"state['{name}']": s for name, s in plan.state_shardings.items()}
    assert set(loaded.batch_shardings) == {"batch['x']", "batch['y']"}


# A step that parallelize made, planned for other hardware


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("own", "named", "expected"),
    [
        ({"plan": autopar.recipes.zero(3)}, {}, {"plan": autopar.recipes.zero(3)}),
        (
            {"plan": autopar.recipes.zero(3), "effort": "quick"},
            {"memory_limit_bytes": "1GB"},
            {"plan": autopar.recipes.zero(3), "effort": "quick", "memory_limit_bytes": "1GB"},
        ),
        (
            {"plan": autopar.recipes.zero(3)},
            {"plan": autopar.recipes.data_parallel()},
            {"plan": autopar.recipes.data_parallel()},
        ),
        ({"plan": autopar.recipes.zero(3)}, {"plan": None}, {}),
        ({"effort": "quick"}, {"num_microbatches": 2}, {"effort": "quick", "num_microbatches": 2}),
        ({"num_microbatches": 4}, {"schedule": "1f1b"}, {"num_microbatches": 4, "schedule": "1f1b"}),
        (
            {"num_microbatches": 4},
            {"plan": autopar.recipes.zero(3)},
            {"num_microbatches": 4, "plan": autopar.recipes.zero(3)},
        ),
        (
            {"num_microbatches": 4},
            {"plan": autopar.recipes.pipeline(2, num_microbatches=2)},
            {"plan": autopar.recipes.pipeline(2, num_microbatches=2)},
        ),
    ],
)
def test_a_step_is_planned_with_its_own_options(own, named, expected):
    quiet = {"cache_dir": None}
    found = autopar.plan(
        autopar.parallelize(mlp_step, **grouped(**own, **quiet)),
        MLP_STATE,
        MLP_BATCH,
        cluster="dgx-h100",
        **grouped(**named),
    )
    wanted = autopar.plan(mlp_step, MLP_STATE, MLP_BATCH, cluster="dgx-h100", **grouped(**expected, **quiet))
    assert found.record.decisions == wanted.record.decisions
    assert found.record.axis_names == wanted.record.axis_names


def test_wishes_are_added_to_a_step_with_a_recipe():
    made = autopar.parallelize(mlp_step, plan=autopar.recipes.zero(3))
    found = autopar.plan(made, MLP_STATE, MLP_BATCH, cluster="dgx-h100", search=autopar.Search(num_microbatches=2))
    assert found.record.pipeline.num_microbatches == 2
    assert found.record.recipe == "zero(3)"


def test_a_number_of_microbatches_beside_that_of_a_recipe_is_refused():
    made = autopar.parallelize(mlp_step, plan=autopar.recipes.pipeline(2, num_microbatches=4))
    with pytest.raises(autopar.errors.InvalidArgumentError, match="the recipe's 4 micro-batches, got 2"):
        autopar.plan(made, MLP_STATE, MLP_BATCH, cluster="dgx-h100", search=autopar.Search(num_microbatches=2))
