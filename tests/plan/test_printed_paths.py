"""What a plan shows is what `explain` and `constrain` take; groups say what the axes of a search do."""

import functools

import jax
import pytest
from jax.sharding import PartitionSpec as P
from rich.text import Text

import autopar
from autopar import errors
from autopar.common.paths import matches, parts_of, without_scan_parts
from autopar.frontend.build_graph import build_graph
from autopar.hardware.cluster import Cluster
from autopar.ir.rules import RuleBook
from autopar.plan import modules, render, render_summary, summary
from benchmarks.zoo import CASES
from tests.small_steps import grouped, shapes, slow_cluster, transformer

PLANS = {"one program": None, "stages": autopar.recipes.pipeline(2, num_microbatches=2)}


@functools.cache
def planned(name: str, how: str):
    case = CASES[name]()
    step = autopar.parallelize(case.step, plan=PLANS[how], cluster=slow_cluster(4), cache_dir=None)
    args = jax.eval_shape(case.init, jax.random.key(0)), case.batch(0)
    return step, args, step.plan(*args)


def shown(table) -> list[str]:
    """The names in the first column."""
    return [Text.from_markup(cell).plain for cell in table.columns[0].cells]


@pytest.mark.cases(1)
@pytest.mark.parametrize("how", PLANS)
@pytest.mark.parametrize("name", ["mlp", "gpt_scan", "moe"])
def test_every_path_that_is_printed_is_taken_by_explain_and_constrain(name, how):
    step, args, plan = planned(name, how)
    arguments = shown(render._values_table(plan.record))
    modules = shown(render._modules_table(plan.record))
    assert arguments
    assert modules
    for path in (*arguments, *modules):
        assert plan.explain(path)
    traced, _ = step._traced(args)
    graph = build_graph(traced, RuleBook())
    for path in arguments:
        pinned = autopar.constrain({path: P()}).request.pins.found(traced, graph)
        named = [plan.record.arguments[i].path for i in pinned.leaves]
        assert len(named) >= 1
        assert not pinned.modules
    for path in modules:
        # The whole of a scan without a module of its own is named by the layers of a stage: there is nothing to pin.
        if not path.startswith((render.NO_MODULE, "layers[*:*] (")):
            assert autopar.constrain({path: P()}).request.pins.found(traced, graph).modules


@pytest.mark.parametrize("how", PLANS)
@pytest.mark.parametrize("name", ["mlp", "gpt_scan", "moe"])
def test_a_screen_has_a_plan_and_its_names_are_explained(name, how):
    _, _, plan = planned(name, how)
    lines = str(plan).splitlines()
    assert len(lines) <= render_summary.LINES
    assert max(map(len, lines)) <= render_summary.COLUMNS
    for row in summary.state_groups(plan.record):
        assert plan.explain(summary.path_of(row.name))
    for row in modules.costliest(plan.record):
        assert plan.explain(row.module or render.NO_MODULE)


def test_patterns_of_constrain_are_taken_by_explain():
    _, _, plan = planned("mlp", "one program")
    path = plan.record.arguments[0].path
    parts = "/".join(parts_of(path))
    assert plan.explain(parts).startswith(f"{path}: ")
    assert plan.explain(f"**/{parts.rpartition('/')[2]}").startswith(f"{path}: ")


@pytest.mark.parametrize(
    ("pattern", "path", "is_named"),
    [
        ("state['layers'][*]['w']", "state/layers/3/w", True),
        ("state['layers'][0]['w']", "state/layers/3/w", False),
        ("state.params['w']", "state/params/w", True),
        ("state[0].mu['mlp/linear']", "state/0/mu/mlp/linear", True),
        ("layer*/mlp (2x)", "layer1/mlp", True),
        ("layers[0:2]", "decoder/layers[0:2]", True),
        ("decoder/layers[0:2]/mlp", "decoder/mlp", True),
        ("decoder/layers[*:*]/mlp (2x)", "decoder/mlp", True),
        ("layers/[0-3]/w", "layers/2/w", True),
        ("layers/[0-3]/w", "layers/4/w", False),
    ],
)
def test_paths_as_jax_writes_them_are_patterns(pattern, path, is_named):
    assert matches(pattern, path) is is_named


def test_a_pin_by_a_printed_path_is_held():
    case = transformer()
    step = autopar.parallelize(
        case.step,
        plan=autopar.constrain({"params['blocks'][*]['up']": P(None, "model")}),
        cluster=slow_cluster(4),
        cache_dir=None,
    )
    plan = step.plan(case.shapes, shapes(case.batch))
    axis = plan.mesh.axis_names.index("model")
    pinned = [v.layout.dims for v in plan.record.arguments if v.path.endswith("['up']")]
    assert pinned == [((), (axis,))] * 2


def test_operands_of_stages_on_one_device_are_shown():
    case = transformer()
    recipe = autopar.recipes.pipeline(4, num_microbatches=4)
    step = autopar.parallelize(case.step, plan=recipe, cluster=slow_cluster(4), cache_dir=None)
    text = step.plan(case.shapes, shapes(case.batch)).explain("layer0/mlp")
    assert "matrix product forward: P(None, None, None) @ P(None, None) -> P(None, None, None)" in text


# Groups


def groups(cluster: Cluster, **options) -> dict[str, list[list[int]]]:
    case = transformer()
    step = autopar.parallelize(case.step, cluster=cluster, cache_dir=None, **grouped(**options))
    return step.plan(case.shapes, shapes(case.batch)).groups()


def test_groups_of_a_search_say_what_their_axes_do():
    assert set(groups(slow_cluster(8))) == {"model", "data"}


def test_groups_of_stages_say_what_their_axes_do():
    recipe = autopar.recipes.pipeline(2, num_microbatches=2)
    assert groups(Cluster.local(4), plan=recipe) == {"data": [[0, 1], [2, 3]], "pipeline": [[0, 2], [1, 3]]}


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("name", "recipe", "roles"),
    [
        ("mlp", autopar.recipes.data_parallel(), {"data"}),
        ("mlp", autopar.recipes.zero(3), {"sharded data"}),
        ("gpt_scan", autopar.recipes.tensor_parallel(), {"tensor"}),
        ("moe", autopar.recipes.expert_parallel(), {"expert"}),
        ("gpt_scan", autopar.recipes.sequence_parallel("ulysses"), {"sequence"}),
    ],
)
def test_roles_that_are_read_off_a_plan_are_those_of_the_recipe_that_made_it(name, recipe, roles):
    case = CASES[name]()
    step = autopar.parallelize(case.step, plan=recipe, cluster=slow_cluster(4), cache_dir=None)
    plan = step.plan(jax.eval_shape(case.init, jax.random.key(0)), case.batch(0))
    assert {role for stage in plan.record.axis_roles for role in stage} == roles


def test_what_is_called_by_no_name_is_refused_with_near_ones():
    _, _, plan = planned("mlp", "one program")
    with pytest.raises(errors.InvalidArgumentError, match="nothing that is called 'zzz'"):
        plan.explain("zzz")


@pytest.mark.parametrize("path", ["layers[0:2]/block", "encoder/layers.2[4:8]/block", "layers.2[0:1]"])
def test_parts_of_scans_are_no_modules_of_the_step(path):
    """A pattern copied from a plan names the module in the step, of the first loop over layers or another one."""
    plain = without_scan_parts(path)
    assert ":" not in plain
    assert not plain or matches(path, plain)
