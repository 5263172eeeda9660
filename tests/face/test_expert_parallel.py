"""Expert parallelism: all-to-alls as GShard and DeepSpeed-MoE have them, and the numbers of plain `jax.jit`."""

import jax
import pytest

import autopar
from autopar import recipes
from autopar.errors import InvalidArgumentError
from autopar.ir.graph import Dimension, Purpose, Value
from autopar.ir.layout import Layout
from benchmarks.zoo import CASES
from tests.small_steps import verified

LAYERS, WIDTH, EXPERTS, SLOTS, BATCH = 1, 32, 8, 5, 16  # slots of an expert for each sequence: 1.25 * 2 * 16 / 8
MOE = CASES["moe"](layers=LAYERS, width=WIDTH, experts=EXPERTS, batch=BATCH)
DEEPER = CASES["moe"](layers=2, width=WIDTH, experts=EXPERTS, batch=BATCH)
MOST_SCALARS = 100  # bytes of losses that are summed over devices


def sent_and_plan(recipe, devices=8, case=MOE):
    made, plan = verified(case, recipe, devices)
    return {c.name: c.compiled for c in made.collectives if c.compiled > MOST_SCALARS}, plan


def parameter_bytes():
    """(of experts, of everything else)."""
    params = jax.eval_shape(MOE.init, jax.random.key(0)).params
    sizes = {path: 4 * x.size for path, x in jax.tree_util.tree_flatten_with_path(params)[0]}
    experts = sum(n for path, n in sizes.items() if "expert_" in jax.tree_util.keystr(path))
    return experts, sum(sizes.values()) - experts


def dispatched_bytes(copies, parts):
    """What each device sends: its share of (expert, sequence, slot, width), in float32, but for what it keeps; to the
    experts and back, forward and backward.
    """
    share = 4 * EXPERTS * BATCH * SLOTS * WIDTH / (copies * parts)
    return 4 * LAYERS * (parts - 1) / parts * share


def reduced(nbytes, devices):
    return 2 * (devices - 1) / devices * nbytes


def experts_of(plan):
    """The layouts of the experts' matrices and of their momentum."""
    return {v.layout.text(plan.mesh) for v in plan.record.arguments if "expert_" in v.path}


def test_experts_on_all_devices_exchange_tokens_and_reduce_no_gradients():
    sent, plan = sent_and_plan(recipes.expert_parallel())
    _, others = parameter_bytes()
    assert sent == pytest.approx(
        {
            "all-to-all": dispatched_bytes(1, 8),
            "all-reduce": reduced(others, 8),
            "total": dispatched_bytes(1, 8) + reduced(others, 8),
        },
        abs=MOST_SCALARS,
    )
    assert sum(use.count for use in plan.predicted.collectives if use.kind == "all-to-all") == 4 * LAYERS
    assert plan.groups() == {"expert": [list(range(8))]}
    assert experts_of(plan) == {'P("expert", None, None)'}


def test_gradients_of_experts_are_reduced_over_the_copies_only():
    sent, plan = sent_and_plan(recipes.expert_parallel(4))
    experts, others = parameter_bytes()
    assert sent["all-to-all"] == pytest.approx(dispatched_bytes(2, 4))
    assert sent["all-reduce"] == pytest.approx(reduced(experts / 4, 2) + reduced(others, 8), abs=MOST_SCALARS)
    assert set(sent) == {"all-to-all", "all-reduce", "total"}
    assert plan.groups() == {"data": [[0, 4], [1, 5], [2, 6], [3, 7]], "expert": [[0, 1, 2, 3], [4, 5, 6, 7]]}
    assert experts_of(plan) == {'P("expert", None, None)'}


@pytest.mark.slow
def test_zero_shares_out_experts_over_copies_and_the_rest_over_all():
    sent, plan = sent_and_plan(recipes.combine(ep=4, zero=1))
    experts, others = parameter_bytes()
    once = 0.5 * experts / 4 + 7 / 8 * others
    assert sent["all-to-all"] == pytest.approx(dispatched_bytes(2, 4))
    assert sent["reduce-scatter"] == pytest.approx(once)
    assert sent["all-gather"] == pytest.approx(once)
    momentum = [v for v in plan.record.arguments if ".trace" in v.path]
    assert all(v.layout.shards(plan.mesh) == 8 for v in momentum)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{}, {"zero": 3}, {"zero": 2, "num_microbatches": 2}, {"pp": 2}, {"tp": 2}], ids=str
)
def test_experts_beside_everything_else(options):
    sent, plan = sent_and_plan(recipes.combine(ep=2, **options), case=DEEPER)
    assert sent["all-to-all"] >= 2 * dispatched_bytes(4, 2)
    of_first = [v for v in plan.record.arguments if "expert_" in v.path and "[0]" in v.path]
    axis = plan.mesh.axis_names.index("expert")
    assert of_first
    assert all(v.layout.dims[0] == (axis,) for v in of_first)


@pytest.mark.slow
def test_experts_tensors_and_stages_together():
    _, plan = sent_and_plan(recipes.combine(ep=2, tp=2, pp=2), case=DEEPER)
    assert plan.groups() == {
        "expert": [[0, 2], [1, 3], [4, 6], [5, 7]],
        "model": [[0, 1], [2, 3], [4, 5], [6, 7]],
        "pipeline": [[0, 4], [1, 5], [2, 6], [3, 7]],
    }


@pytest.mark.parametrize(
    ("case", "recipe", "says"),
    [
        (CASES["mlp"](batch=32), recipes.expert_parallel(), "several experts"),
        (CASES["mlp"](batch=32), recipes.combine(ep=2, num_microbatches=2), "several experts"),
        (CASES["moe"](layers=1, experts=6), recipes.combine(ep=4), r"divides by 4, got 6 in .*expert_in"),
    ],
)
def test_steps_without_experts_or_with_an_odd_number_of_them(case, recipe, says):
    step = autopar.parallelize(case.step, plan=recipe, cache_dir=None)
    with pytest.raises(InvalidArgumentError, match=says):
        step.plan(jax.eval_shape(case.init, jax.random.key(0)), case.batch(0))


def of(purpose, *dimensions):
    names = tuple(frozenset(d) for d in dimensions)
    return Value(id=0, shape=(8,) * len(names), dtype="float32", itemsize=4, dimensions=names, purpose=purpose)


def test_what_the_expert_axis_may_split():
    _, bound = recipes.expert_parallel().request.binding.on(8)
    experts, width = {Dimension.EXPERT}, set()
    weights, gate = of(Purpose.MATRIX, experts, width), of(Purpose.PARAMETER, width, width)
    assert bound.allows(weights, Layout(((0,), ())))
    assert not bound.allows(weights, Layout(((), (0,))))
    assert not bound.allows(gate, Layout(((), (0,))))
    tokens = of(Purpose.ACTIVATION, {Dimension.EXAMPLE}, experts)
    assert bound.allows(tokens, Layout(((0,), ())))
    assert bound.allows(tokens, Layout(((), (0,))))
    # Of what counts examples no sum over the axis waits; of gradients, and of the loss, it may.
    assert not bound.allows(tokens, Layout(((), ()), (0,)))
    assert bound.allows(of(Purpose.GRADIENT, width), Layout(((),), (0,)))
    assert bound.allows(of(Purpose.ACTIVATION), Layout((), (0,)))


@pytest.mark.parametrize("make", [lambda: recipes.expert_parallel(0), lambda: recipes.combine(ep=0)])
def test_wrong_sizes_are_named(make):
    with pytest.raises(InvalidArgumentError, match="positive whole number"):
        make()
