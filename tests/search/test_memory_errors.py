"""Plans that do not fit: recipes with stages and micro-batches, pins, plans that are given, and free searches."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import autopar
from autopar.errors import MemoryLimitError
from autopar.recipes import combine, cut, data_parallel, pipeline, zero
from tests.small_steps import chain_step, grouped, slow_cluster

STATE = [jax.ShapeDtypeStruct((64, 64), jnp.float32) for _ in range(4)]
BATCH = {k: jax.ShapeDtypeStruct((16, 64), jnp.float32) for k in "xy"}
LIMIT_BYTES = 20_000


def planned(**options):
    options = {"cluster": slow_cluster(4), "cache_dir": None, **options}
    return autopar.plan(chain_step, STATE, BATCH, **grouped(**options))


def needed(plan):
    return max(plan.predicted.peak_bytes)


@pytest.mark.parametrize(
    ("options", "where", "helps"),
    [
        ({"plan": pipeline(2, num_microbatches=2)}, "stage 0 of 2", r"more micro-batches \(now 2\), more stages"),
        ({"plan": pipeline(2, "gpipe", num_microbatches=4)}, "stage 1 of 2", 'schedule="1f1b"'),
        ({"plan": pipeline(2, "interleaved", num_microbatches=4)}, "stage (0 and 2|1 and 3) of 4", 'schedule="1f1b"'),
        ({"plan": combine(dp=2, pp=2, num_microbatches=2)}, "stage 0 of 2", r"recipes.zero\(3\)"),
        ({"plan": data_parallel(), "num_microbatches": 2}, "stage 0 of 1", 'recompute="input"'),
        ({"plan": cut(zero(3), num_microbatches=2)}, "stage 0 of 1", "optimiser state"),
        ({"plan": autopar.constrain({"x": P()}, recipe=pipeline(2))}, "of 2", "more stages"),
        ({"num_microbatches": 2}, "stage 0 of 1", "no pipeline: "),
    ],
    ids=["1f1b", "gpipe", "interleaved", "grid", "micro-batches", "cut", "pins", "free"],
)
def test_a_step_in_micro_batches_that_does_not_fit_names_its_stage_its_tensors_and_what_helps(options, where, helps):
    with pytest.raises(MemoryLimitError, match=rf"chain_step, .*{where}.*over \(largest at the peak: .*") as caught:
        planned(**options, memory_limit_bytes=LIMIT_BYTES)
    assert caught.match(helps)
    assert caught.value.needed_bytes > caught.value.limit_bytes == LIMIT_BYTES
    assert len(caught.value.largest) == 5


def test_what_such_a_step_needs_is_enough():
    recipe = pipeline(2, num_microbatches=2)
    with pytest.raises(MemoryLimitError) as caught:
        planned(plan=recipe, memory_limit_bytes=LIMIT_BYTES)
    enough = planned(plan=recipe, memory_limit_bytes=caught.value.needed_bytes)
    assert needed(enough) == caught.value.needed_bytes


@pytest.mark.parametrize("recipe", [data_parallel(), pipeline(2, num_microbatches=2)], ids=["one program", "stages"])
def test_a_plan_that_is_given_is_held_against_a_limit_that_is_given_with_it(recipe):
    plan = planned(plan=recipe)
    asked = {"plan": plan, "cluster": None}
    assert needed(planned(**asked, memory_limit_bytes=needed(plan))) == needed(plan)
    with pytest.raises(MemoryLimitError, match=r"the plan of chain_step(.|\n)*a plan is run as it is") as caught:
        planned(**asked, memory_limit_bytes=needed(plan) - 1)
    assert caught.value.bytes_over == 1


def test_a_step_that_follows_another_is_held_against_its_own_limit():
    step = autopar.parallelize(chain_step, plan=data_parallel(), cluster=slow_cluster(4), cache_dir=None)
    step.plan(STATE, BATCH)

    def evaluate(params, batch):
        return chain_step(params, batch)[1]

    with pytest.raises(MemoryLimitError, match="evaluate on mesh"):
        autopar.parallelize(
            evaluate, plan=step, search=autopar.Search(memory_limit_bytes=LIMIT_BYTES), cache_dir=None
        ).plan(STATE, BATCH)
