"""Pins: what is pinned lies so in the plan and in the compiled program, the search completes it, and it has a price."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import autopar
from autopar import recipes
from autopar.common.paths import matches, parts_of
from autopar.errors import InvalidArgumentError
from autopar.frontend.build_graph import build_graph
from autopar.frontend.tracing import trace
from autopar.ir.rules import RuleBook
from benchmarks.zoo import CASES
from tests.small_steps import grouped, slow_cluster, verified_step

WIDTH = 32


def layers_init(key):
    def layer(key):
        wide, narrow = jax.random.split(key)
        return {
            "in": {"kernel": jax.random.normal(wide, (WIDTH, 4 * WIDTH)) / 8, "bias": jnp.zeros(4 * WIDTH)},
            "out": {"kernel": jax.random.normal(narrow, (4 * WIDTH, WIDTH)) / 8},
        }

    params = {"layers": [layer(k) for k in jax.random.split(key, 2)]}
    return {"params": params, "momentum": jax.tree.map(jnp.zeros_like, params)}


def layers_loss(params, batch):
    x = batch["x"]
    for i, layer in enumerate(params["layers"]):
        with jax.named_scope(f"layer{i}"):
            with jax.named_scope("in"):
                hidden = jnp.tanh(x @ layer["in"]["kernel"] + layer["in"]["bias"])
            with jax.named_scope("out"):
                x = x + hidden @ layer["out"]["kernel"]
    return jnp.mean((x - batch["y"]) ** 2)


def layers_step(state, batch):
    loss, grads = jax.value_and_grad(layers_loss)(state["params"], batch)
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, state["momentum"], grads)
    return {"params": jax.tree.map(lambda p, m: p - 0.1 * m, state["params"], momentum), "momentum": momentum}, loss


def layers_batch():
    random = np.random.default_rng(0)
    return {name: random.normal(size=(16, WIDTH)).astype(np.float32) for name in "xy"}


STATE = jax.eval_shape(layers_init, jax.random.key(0))
COLUMNS = {"layers/*/in/kernel": P(None, "model")}


def made_step(plan, cluster=None, **options):
    return autopar.parallelize(
        layers_step, plan=plan, cluster=cluster or slow_cluster(), cache_dir=None, **grouped(**options)
    )


def planned(pins, *, cluster=None, options=None, **wishes):
    return made_step(autopar.constrain(pins, **wishes), cluster, **(options or {})).plan(STATE, layers_batch())


def verified(step):
    return verified_step(step, (jax.jit(layers_init)(jax.random.key(0)), layers_batch()), 1e-5)


def lie(plan, end):
    """The layouts of the arguments with such a path."""
    found = {}
    for v in plan.record.arguments:
        if "/".join(parts_of(v.path)).endswith(end):
            found[v.path] = plan.sharding_of(v).spec
    assert found
    return set(found.values())


def test_paths_in_parts():
    assert parts_of("state.params['layers'][0]['it.s']") == ("state", "params", "layers", "0", "it.s")
    assert parts_of("""state[<flat index 3>].mu["o'n"]""") == ("state", "3", "mu", "o'n")


@pytest.mark.parametrize(
    ("pattern", "matching"),
    [
        ("kernel", True),
        ("layers/*/in/kernel", True),
        ("layers/[12]/*/kernel", False),
        ("state/**/kernel", True),
        ("**/in/**", True),
        ("layers/kernel", False),
        ("params/layers", False),
        ("ker*", True),
    ],
)
def test_patterns_match_the_end_of_a_path(pattern, matching):
    assert matches(pattern, "state/params/layers/0/in/kernel") is matching


def test_pinned_arguments_lie_so_in_plan_and_program_and_the_rest_is_completed():
    step = made_step(autopar.constrain({**COLUMNS, "batch/*": P("data")}, axis_sizes={"model": 4}))
    plan = step.plan(STATE, layers_batch())
    assert lie(plan, "in/kernel") == {P(None, "model")}
    assert lie(plan, "x") == {P("data")}
    groups = plan.groups()
    assert len(groups["model"][0]) == 4
    assert len(groups["data"][0]) == 2
    verified(step)
    mesh = Mesh(np.array(jax.devices()).reshape(plan.mesh.axis_sizes), plan.mesh.axis_names)
    (_, *leaves), _ = step.compile(STATE, layers_batch()).executable.input_shardings
    state, batch = jax.tree.unflatten(jax.tree.structure((STATE, layers_batch())), leaves)
    for tree in (state["params"], state["momentum"]):
        for layer in tree["layers"]:
            assert layer["in"]["kernel"].is_equivalent_to(NamedSharding(mesh, P(None, "model")), 2)
    assert batch["x"].is_equivalent_to(NamedSharding(mesh, P("data")), 2)


def test_sizes_that_are_not_given_are_searched_for():
    plan = planned({"in/kernel": P("model")})
    assert lie(plan, "in/kernel") == {P("model")}
    assert {t.axis_sizes for t in plan.record.tried} >= {(8,), (2, 4)}
    sizes = dict(zip(plan.mesh.axis_names, plan.mesh.axis_sizes, strict=True))
    assert sizes["model"] > 1


def test_an_axis_with_a_size_that_no_pin_has_is_left_to_the_search_and_named():
    plan = planned(COLUMNS, axis_sizes={"modle": 4})
    assert sorted(plan.mesh.axis_sizes) == [2, 4]
    assert any("no pin has modle=4 of axis_sizes" in note for note in plan.record.notes)


def test_the_first_of_two_axes_of_a_dimension_is_the_slower_one():
    plan = planned({"in/kernel": P(("b", "a"))}, axis_sizes={"a": 2, "b": 4})
    assert lie(plan, "in/kernel") == {P(("b", "a"))}
    with pytest.raises(InvalidArgumentError, match="before another"):
        planned({"in/kernel": P(("b", "a")), "out/kernel": P(("a", "b"))})


def test_what_is_unconstrained_is_for_the_search():
    free = planned({"in/kernel": P(P.UNCONSTRAINED, "model")}, axis_sizes={"model": 2})
    held = planned({"in/kernel": P(None, "model")}, axis_sizes={"model": 2})
    assert free.predicted.step_time_s <= held.predicted.step_time_s
    (pin,) = free.record.pinned.pins
    assert pin.spec == 'P(P.UNCONSTRAINED, "model")'


def test_a_pattern_of_modules_pins_their_results():
    pins = {"layer*/in": P("data", "model")}
    step = made_step(autopar.constrain(pins, axis_sizes={"data": 2, "model": 4}))
    plan = step.plan(STATE, layers_batch())
    (pin,) = plan.record.pinned.pins
    assert (pin.count, pin.of) == (2, "modules")
    traced = trace(layers_step, (STATE, layers_batch()), names=("state", "batch"), donate=(0,), batch=(1,))
    made = plan.record.decisions
    axis = {name: a for a, name in enumerate(plan.mesh.axis_names)}
    results = [op.outputs[0] for op in build_graph(traced, RuleBook()).ops() if op.primitive == "tanh"]
    assert [made.layouts[made.placed[v]].dims for v in results] == [((axis["data"],), (axis["model"],))] * 2
    verified(step)


def test_the_plan_says_what_pins_cost():
    # Split over their rows, all kernels are gathered or make partial sums: the search would not do that by itself.
    pins = {"in/kernel": P("model"), "in/bias": P("model")}
    plan = planned(pins, axis_sizes={"model": 8})
    free = made_step(None).plan(STATE, layers_batch())
    cost = plan.record.pinned
    assert cost.step_time_s == plan.predicted.step_time_s
    assert cost.free_step_time_s == pytest.approx(free.predicted.step_time_s)
    assert cost.cost_s > 0
    assert all(cost.free_step_time_s <= pin.alone_s <= cost.step_time_s * 1.005 for pin in cost.pins)
    assert [pin.count for pin in cost.pins] == [4, 4]
    assert "pins on model=8: step" in plan.table()
    assert "without them: they cost" in plan.table()


def test_a_pinned_plan_is_saved_with_its_pins(tmp_path):
    plan = planned(COLUMNS, axis_sizes={"model": 8})
    plan.save(tmp_path / "plan.json")
    loaded = autopar.Plan.load(tmp_path / "plan.json")
    assert loaded.record.pinned == plan.record.pinned
    step = made_step(loaded)
    verified(step)


def test_pins_hold_in_the_stages_that_a_recipe_asks_for():
    recipe = recipes.pipeline(2, num_microbatches=4)
    step = made_step(autopar.constrain(COLUMNS, axis_sizes={"model": 4}, recipe=recipe))
    plan = step.plan(STATE, layers_batch())
    assert len(plan.record.pipeline.stages) == 2
    assert lie(plan, "in/kernel") == {P(None, "model")}
    assert plan.record.pinned.free_step_time_s is not None
    verified(step)


def test_pins_hold_where_the_batch_is_cut():
    plan = planned(COLUMNS, axis_sizes={"model": 4}, options={"num_microbatches": 2})
    assert plan.record.pipeline.num_microbatches == 2
    assert lie(plan, "in/kernel") == {P(None, "model")}


def test_pins_go_before_the_recipe_that_completes_them():
    step = made_step(autopar.constrain({"in/bias": P("data")}, recipe=recipes.combine(tp=2)))
    plan = step.plan(STATE, layers_batch())
    assert lie(plan, "in/bias") == {P("data")}
    assert lie(plan, "in/kernel") == {P(None, "model")}
    assert lie(plan, "out/kernel") == {P("model")}
    verified(step)
    with pytest.raises(InvalidArgumentError, match=r"own mesh axes.*data, model"):
        planned({"in/kernel": P("rows")}, recipe=recipes.combine(tp=2))


def test_pins_of_a_recipe_hold_beside_more():
    recipe = autopar.constrain({"in/bias": P("model")}, axis_sizes={"model": 4})
    plan = planned({"in/kernel": P(None, "model")}, recipe=recipe)
    assert lie(plan, "in/bias") == {P("model")}
    assert lie(plan, "in/kernel") == {P(None, "model")}
    assert sorted(plan.mesh.axis_sizes) == [2, 4]


@pytest.mark.parametrize("plan", [None, autopar.constrain(COLUMNS, axis_sizes={"model": 4})], ids=["search", "pins"])
def test_links_that_are_given_for_each_axis_leave_meshes_of_as_many(plan):
    fast, slow = (autopar.Link(latency_s=1e-6, bytes_per_s=rate, source="test") for rate in (2e11, 1e9))
    found = made_step(plan, autopar.Cluster.flat(8, links=(slow, fast))).plan(STATE, layers_batch())
    assert len(found.mesh.axis_sizes) in (1, 2)


def test_one_device_leaves_nothing_to_split():
    plan = planned(COLUMNS, cluster=slow_cluster(1))
    assert lie(plan, "in/kernel") == {P()}


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: autopar.constrain({}), "dictionary from patterns"),
        (lambda: autopar.constrain({"kernel": ("model",)}), "PartitionSpec"),
        (lambda: autopar.constrain({"kernel": P("model", "model")}), "'model' twice"),
        (lambda: autopar.constrain({"kernel": P("model")}, axis_sizes={"model": 0}), "positive whole number"),
        (lambda: autopar.constrain({"kernel": P("a", "b"), "bias": P(("c", "d"))}), "at most 3 mesh axes"),
        (lambda: autopar.constrain({"kernel": P("a")}, recipe="zero"), "a recipe, or None"),
        (lambda: autopar.constrain({"kernel": P("a", unreduced={"b"})}), "how the dimensions are split"),
        (
            lambda: autopar.constrain({"kernel": P("a")}, recipe=autopar.constrain({"kernel": P("b")})),
            r"pattern 'kernel': expected P\(.b.\), as the recipe has it, got P\(.a.\)",
        ),
        (
            lambda: planned(
                COLUMNS, axis_sizes={"model": 2}, recipe=autopar.constrain(COLUMNS, axis_sizes={"model": 4})
            ),
            "axis_sizes 'model': expected 4, as the recipe has it, got 2",
        ),
        (lambda: planned({"layers/*/inn/kernel": P("model")}), "closest: state/.*/in/kernel"),
        (lambda: planned({"in/bias": P(None, "model")}), r"at most 1 dimension.*, for shape \(128,\)"),
        (lambda: planned({"layer0/in": P(None, None, "model")}), "result of layer0/in"),
        (lambda: planned({"in/kernel": P("a", "b")}, axis_sizes={"a": 3}), "8 devices can have"),
        (lambda: planned({"in/kernel": P("a")}, cluster=slow_cluster(3)), r"divides by the 3 devices.*\n*.*"),
        (lambda: planned({"in/kernel": P("a"), "0/in/kernel": P(None, "a")}), "one spec"),
        (lambda: planned(COLUMNS, options={"schedule": "1f1b"}), "name the stages"),
    ],
)
def test_wrong_pins_are_named(make, says):
    with pytest.raises(InvalidArgumentError, match=says):
        make()


@pytest.mark.slow
def test_pinned_attention_of_a_transformer_equals_plain_jit():
    case = CASES["gpt"](layers=2, width=64, length=32, batch=16)
    pins = {"layer*/self_attention/*/kernel": P(None, "model"), "GPT/layer*": P("data")}
    for recipe in (None, recipes.pipeline(2), recipes.pipeline(2, "zb-h1")):
        plan = autopar.constrain(pins, axis_sizes={"model": 2}, recipe=recipe)
        step = autopar.parallelize(case.step, plan=plan, cache_dir=None)
        state = jax.jit(case.init)(jax.random.key(0))
        made = autopar.verify(step, state, case.batch(0))
        assert made.difference <= case.tolerance, made
        assert lie(step.plan(state, case.batch(0)), "query/kernel") == {P(None, "model")}
