"""Hybrid sharding (HSDP): groups of neighbours share the state, the groups are copies of it.

A device sends what the literature says: between groups only an all-reduce of its own part of the gradients.
"""

import jax
import pytest

import autopar
from autopar import recipes
from autopar.errors import InvalidArgumentError
from autopar.execute.collectives import collectives
from autopar.hardware.collective_cost import CollectiveKind
from autopar.search.intra_op.mesh_searches import baseline_bindings
from benchmarks.zoo import CASES
from tests.execute.spanned_axes import spanned_axes
from tests.small_steps import verified

MLP = CASES["mlp"](batch=32)
GPT = CASES["gpt"](layers=2, width=64, length=32, batch=16)
MOE = CASES["moe"](batch=16)
KINDS = (CollectiveKind.ALL_REDUCE, CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_GATHER)
LOSS_BYTES = 64  # what sums of single numbers over all devices send at most
ACROSS, WITHIN = [[0, 4], [1, 5], [2, 6], [3, 7]], [[0, 1, 2, 3], [4, 5, 6, 7]]


def sent(made):
    return {c.name: c.compiled for c in made.collectives}


def parameter_bytes(case):
    state = jax.eval_shape(case.init, jax.random.key(0))
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state.params))


@pytest.mark.slow
@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_only_parts_of_gradients_go_between_groups_in_the_compiled_program(stage):
    step = autopar.parallelize(GPT.step, plan=recipes.zero(stage, size=4), cache_dir=None)
    text = step.lower(jax.eval_shape(GPT.init, jax.random.key(0)), GPT.batch(0)).compile().as_text()
    large = [c for c in collectives(text) if c.sent_bytes_per_device > LOSS_BYTES]
    spans = {kind: {spanned_axes(c, {"replica": 2, "data": 4}) for c in large if c.kind is kind} for kind in KINDS}
    assert spans == {
        CollectiveKind.ALL_REDUCE: {("replica",)},
        CollectiveKind.REDUCE_SCATTER: {("data",)},
        CollectiveKind.ALL_GATHER: {("data",)},
    }
    assert {c.kind for c in large} == set(KINDS)


@pytest.mark.cases(1)
@pytest.mark.parametrize("microbatches", [None, 2])
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("case", [MLP, pytest.param(GPT, marks=pytest.mark.slow)], ids=["mlp", "gpt"])
def test_each_device_sends_its_part_of_the_gradients_to_the_other_groups(case, stage, microbatches):
    recipe = recipes.combine(zero=stage, zero_size=4, num_microbatches=microbatches)
    made, plan = verified(case, recipe, 8)
    assert plan.groups() == {"replica": ACROSS, "data": WITHIN}
    once = parameter_bytes(case)
    # Within a group the gradients are summed in parts, of ZeRO-2 and 3 those of each micro-batch; what is left goes
    # over the groups once in a step, and is a fourth of a whole all-reduce.
    times = microbatches if microbatches and stage > 1 else 1
    assert sent(made)["reduce-scatter"] == pytest.approx(times * 3 / 4 * once, rel=0.001)
    assert sent(made)["all-reduce"] == pytest.approx(2 * 1 / 2 * once / 4, rel=0.001)


@pytest.mark.slow
def test_state_is_shared_by_the_devices_of_a_group_alone():
    _, plan = verified(GPT, recipes.zero(3, size=4), 8)
    state = [v for v in plan.record.arguments if v.kind == "state" and max(v.shape, default=0) > 3]
    assert {axis for v in state for axes in v.layout.dims for axis in axes} == {1}
    assert all(any(v.layout.dims) for v in state)


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("options", "groups"),
    [
        (
            {"pp": 2, "num_microbatches": 2, "zero_size": 2},
            {"replica": [[0, 2], [1, 3], [4, 6], [5, 7]], "data": [[0, 1], [2, 3], [4, 5], [6, 7]]},
        ),
        (
            {"tp": 2, "zero_size": 2},
            {"replica": ACROSS, "data": [[0, 2], [1, 3], [4, 6], [5, 7]]},
        ),
        # The devices that share a sequence share the state too.
        pytest.param(
            {"sp": 2, "zero_size": 4},
            {"replica": ACROSS, "data": [[0, 2], [1, 3], [4, 6], [5, 7]]},
            marks=pytest.mark.slow,
        ),
        pytest.param({"sp": 4, "zero_size": 4}, {"replica": ACROSS}, marks=pytest.mark.slow),
        pytest.param({"dp": 8, "zero_size": 4}, {"replica": ACROSS, "data": WITHIN}, marks=pytest.mark.slow),
        pytest.param({"zero_size": 8}, {"data": [list(range(8))]}, marks=pytest.mark.slow),
    ],
    ids=["stages", "tensor", "sequence", "sequence alone", "dp", "all devices"],
)
def test_beside_other_kinds_of_parallelism(options, groups):
    _, plan = verified(GPT, recipes.combine(zero=3, **options), 8)
    found = plan.groups()
    assert {name: found[name] for name in ("replica", "data") if name in found} == groups


@pytest.mark.slow
def test_experts_in_parts_of_a_group():
    _, plan = verified(MOE, recipes.combine(ep=2, zero=1, zero_size=4), 8)
    assert plan.groups() == {
        "replica": ACROSS,
        "data": [[0, 2], [1, 3], [4, 6], [5, 7]],
        "expert": [[0, 1], [2, 3], [4, 5], [6, 7]],
    }


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: recipes.combine(zero_size=4), "stage of ZeRO"),
        (lambda: recipes.zero(3, size=0), r"recipes.zero\(size=...\): expected a positive whole number"),
        (lambda: recipes.zero(0, size=4), r"recipes.zero\(size=...\): expected a stage of ZeRO"),
        (lambda: recipes.zero(1, offload="opt"), r"recipes.zero\(offload=...\): expected 'nothing'"),
        (lambda: recipes.zero(1, gather="never"), r"recipes.zero\(gather=...\): expected 'after'"),
        (lambda: recipes.combine(zero=1, sp=4, zero_size=2), r"a multiple of ep \* sp"),
        (lambda: recipes.combine(zero=1, dp=6, zero_size=4), "make up the 6 copies"),
    ],
)
def test_sizes_that_cannot_be(make, message):
    with pytest.raises(InvalidArgumentError, match=message):
        make()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"zero_size": 3}, "make up the 8 devices"),
        ({"sp": 2, "tp": 2, "zero_size": 4, "dp": 4}, "make up the 8 devices"),
    ],
)
def test_sizes_that_the_devices_do_not_make(options, message):
    step = autopar.parallelize(GPT.step, plan=recipes.combine(zero=1, **options), cache_dir=None)
    with pytest.raises(InvalidArgumentError, match=message):
        step.plan(jax.eval_shape(GPT.init, jax.random.key(0)), GPT.batch(0))


def test_four_axes_are_too_many():
    recipe = recipes.combine(zero=3, sp=2, tp=2, zero_size=4)
    cluster = autopar.Cluster.preset("dgx-h100", hosts=2)
    with pytest.raises(InvalidArgumentError, match="at most 3 mesh axes"):
        autopar.plan(
            GPT.step, jax.eval_shape(GPT.init, jax.random.key(0)), GPT.batch(0),
            cluster=cluster, plan=recipe, cache_dir=None,
        )  # fmt: skip


def test_the_search_tries_it_where_there_are_several_hosts():
    def names(hosts):
        return [name for name, _ in baseline_bindings(autopar.Cluster.preset("dgx-h100", hosts=hosts))]

    assert [name for name in names(2) if name not in names(1)] == ["ZeRO-1 in groups of 8", "ZeRO-3 in groups of 8"]
