"""The note, first in a plan's text, on a batch that is not split though devices do the same work."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar import recipes
from autopar.common.text import text_of_s
from autopar.plan.options import PlanRequest
from autopar.search import planner
from tests.small_steps import grouped

WIDTH, STEPS = 64, 8


def trained(loss):
    def step(p, batch):
        return jax.tree.map(lambda p, g: p - 0.1 * g, p, jax.grad(loss)(p, batch)), {}

    return step


def mean(p, batch):
    return jnp.square(jnp.tanh(batch["x"] @ p)).mean()


def along_steps(p, batch):
    """A sum over time of the largest example; each time reads the last one."""
    start = jnp.zeros(WIDTH)
    return jax.lax.scan(lambda h, x: (jnp.tanh(h @ p + x.max(0)), None), start, batch["x"])[0].sum()


def plan_of(loss, shape, **options):
    args = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32), {"x": jax.ShapeDtypeStruct(shape, jnp.float32)}
    return autopar.plan(trained(loss), *args, cluster="dgx-h100", cache_dir=None, **grouped(**options))


@pytest.mark.parametrize("recipe", [recipes.data_parallel(), recipes.zero(1)])
def test_a_batch_of_fewer_examples_than_devices(recipe):
    plan = plan_of(mean, (3, WIDTH), plan=recipe)
    text = "the batch is not split over 8 devices, since 8 does not divide 3 examples; 8 devices do the same work."
    assert plan.record.notes[0].startswith(text)
    assert "a batch of 8," in plan.record.notes[0]
    assert " ".join(str(plan).split()).index(text) < str(plan).index("predicted")


def test_a_batch_that_is_split_unevenly():
    plan = plan_of(mean, (13, WIDTH), plan=recipes.data_parallel())
    assert plan.record.notes[0] == "13 examples are split unevenly: at most 2 on a device, of which 16 take as long"


def test_a_batch_that_the_search_leaves_whole():
    plan = plan_of(lambda p, batch: jnp.tanh(batch["x"] * p[0]).mean(), (13, WIDTH))
    assert plan.record.notes[0].startswith(
        "the batch is not split: with its examples split unevenly over 8 devices a step takes"
    )


def test_micro_batches_that_the_devices_do_not_divide():
    plan = plan_of(mean, (24, WIDTH), plan=recipes.cut(recipes.data_parallel(), num_microbatches=2))
    assert "since 8 does not divide 12 examples of each of 2 micro-batches" in plan.record.notes[0]
    assert "a batch of 16 or 32" in plan.record.notes[0]


def test_a_loop_over_the_first_dimension():
    plan = plan_of(along_steps, (STEPS, 16, WIDTH), plan=recipes.data_parallel())
    assert plan.record.notes[0].startswith("the batch is not split: a loop goes over its first dimension")
    assert "batch_axis" in plan.record.notes[0]


def test_a_loop_over_the_first_dimension_where_devices_share_the_work_otherwise():
    """ZeRO splits the matrices then, as no examples are known."""
    plan = plan_of(along_steps, (3, 16, WIDTH), plan=recipes.zero(3))
    assert "the matrices split over 8" in str(plan).replace("\n", " ")
    expected = "the batch is not split: a loop goes over its first dimension; name the dimension that counts examples"
    assert plan.record.notes[0].startswith(expected)


def test_no_note_where_the_batch_is_split():
    plan = plan_of(mean, (16, WIDTH), plan=recipes.data_parallel())
    assert not any(note.startswith("the batch is not split") for note in plan.record.notes)


def test_an_uneven_split_is_not_searched_for_where_a_bound_says_that_it_is_slower(monkeypatch):
    """The plan that leaves the batch whole is kept, and its note has the bound."""
    found = plan_of(lambda p, batch: jnp.tanh(batch["x"] * p[0]).mean(), (13, WIDTH))
    monkeypatch.setattr(planner, "uneven_parts", lambda *_: 8)
    searched = []

    def plans_of(step, request):
        searched.append(step.uneven_over)
        return (found,)

    def split(least_s):
        searched.clear()
        return planner.faster_split(Step(), PlanRequest(), 8, plans_of, lambda step: least_s)[0].record.notes[0]

    slower_s = 2 * found.predicted.step_time_s
    assert f"over 8 devices no step takes less than {text_of_s(slower_s)}" in split(slower_s)
    assert searched == [0]
    assert "over 8 devices a step takes" in split(0.0)
    assert searched == [0, 8]


@dataclasses.dataclass(frozen=True)
class Step:
    uneven_over: int = 0
