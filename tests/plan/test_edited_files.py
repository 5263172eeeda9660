"""Plan and cluster files that people or disks have changed: an error with the place, or a plan that works."""

import copy
import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import jax
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import autopar
from autopar import errors
from autopar.plan.comparison import Comparison
from autopar.plan.page import page_of
from tests.small_steps import (
    MLP_BATCH,
    MLP_STATE,
    chain_step,
    mlp_batch,
    mlp_step,
    new_mlp_state,
    shapes,
    slow_cluster,
    transformer,
)

Json = Any
SEEDS = st.integers(0, 2**32 - 1)  # of edits that are drawn evenly: examples of hypothesis itself are mostly small
KINDS = ("one program", "pipeline", "pins")


def made(kind: str) -> autopar.Plan:
    if kind == "one program":
        return autopar.parallelize(mlp_step, cluster=slow_cluster(4), cache_dir=None).plan(MLP_STATE, MLP_BATCH)
    case = transformer()
    recipe = {
        "pipeline": autopar.recipes.pipeline(2, num_microbatches=2),
        "pins": autopar.constrain({"blocks/*/up": P(None, "model")}, recipe=autopar.recipes.tensor_parallel(size=2)),
    }[kind]
    step = autopar.parallelize(case.step, plan=recipe, cluster=autopar.Cluster.local(4), cache_dir=None)
    return step.plan(case.shapes, shapes(case.batch))


@pytest.fixture(scope="module", params=KINDS)
def saved(request, tmp_path_factory) -> tuple[autopar.Plan, bytes]:
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    plan = made(request.param)
    plan.save(path)
    return plan, path.read_bytes()


def sealed(content: Json) -> bytes:
    """A plan file with the checksum of what is in it, so that only its content speaks."""
    body = json.dumps(content["plan"]).encode()
    return (
        json.dumps(content | {"plan": None, "checksum": hashlib.sha256(body).hexdigest()})
        .encode()
        .replace(b'"plan": null', b'"plan": ' + body)
    )


@pytest.mark.cases(2)
def test_sealing_an_unchanged_plan_changes_nothing(saved, tmp_path):
    plan, data = saved
    (tmp_path / "plan.json").write_bytes(sealed(json.loads(data)))
    assert autopar.Plan.load(tmp_path / "plan.json").record == plan.record


# Edits


NUMBERS = [0, 1, 2, 3, 7, -1, -5, 10**6, 2**63, 10**400, 0.5, -0.5, 1e300, 1e-320]
OTHERS = [None, True, "", "x", "\x1b[31m", "all", [], {}, [[]], {"dims": [[0], [0]]}, "9" * 30]


EDITS = ["number", "near", "other", "delete", "duplicate", "rename", "swap"]


def edited(random: Random, tree: Json) -> Json:
    """A copy of JSON with one thing in it changed, at a place that is found by going down at random."""
    while (changed := _maybe_edited(random, copy.deepcopy(tree))) == tree:
        pass
    return changed


def _maybe_edited(random: Random, tree: Json) -> Json:
    parent: Json = None
    key: Any = None
    node = tree
    while isinstance(node, (dict, list)) and node:
        parent = node
        key = random.choice(sorted(node)) if isinstance(node, dict) else random.randint(0, len(node) - 1)
        node = node[key]
        if random.randint(0, 7) == 0:
            break
    what = random.choice(EDITS)
    if what == "number":
        parent[key] = random.choice(NUMBERS)
    elif what == "near" and isinstance(node, (int, float)) and not isinstance(node, bool):
        parent[key] = node + random.choice([-1, 1, -2, 2, 8])
    elif what == "other":
        parent[key] = random.choice(OTHERS)
    elif what == "delete":
        del parent[key]
    elif what == "duplicate" and isinstance(parent, list):
        parent.insert(key, copy.deepcopy(node))
    elif what == "rename" and isinstance(parent, dict):
        parent[random.choice(["x", "0", "-3", "99999", "split"])] = parent.pop(key)
    elif what == "swap" and isinstance(parent, list) and len(parent) > 1:
        parent[key], parent[key - 1] = parent[key - 1], parent[key]
    return tree


def spoilt(random: Random, data: bytes) -> bytes:
    """Text that is cut, has a wrong byte or is nested a hundred thousand times."""
    at = random.randint(0, len(data) - 1)
    what = random.choice(["cut", "byte", "deep", "nan"])
    if what == "cut":
        return data[:at]
    if what == "byte":
        return data[:at] + b"\xff" + data[at:]
    depth = 100_000
    deep = b"[" * depth + b"]" * depth if what == "deep" else b"NaN"
    numbers = list(re.finditer(rb"(?<=[:,\[])\d+(?=[,\]}])", data))
    found = numbers[random.randint(0, len(numbers) - 1)]
    return data[: found.start()] + deep + data[found.end() :]


def assert_error_has_a_place(error: errors.PlanFormatError) -> None:
    assert "plan.json" in error.where
    whole = error.expected == "a plan saved by autopar" or error.expected.startswith("format version")
    assert "$." in error.where or whole, str(error)
    assert error.hint


def works(plan: autopar.Plan, original: autopar.Plan, folder: Path) -> None:
    """All that can be asked of a plan without its step."""
    assert "Plan of" in str(plan)
    assert "Plan of" in plan.table()
    assert json.dumps(plan.to_dict())
    assert page_of(plan.record)
    assert str(Comparison(plan=original.record, other=plan.record))
    assert repr(plan)
    for value in (*plan.record.arguments, *plan.record.results):
        plan.sharding_of(value)
        assert value.path in plan.explain(value.path)
    for row in plan.record.modules:
        assert plan.explain(row.module)
    assert plan.groups()
    assert plan.state_shardings is not None
    plan.diff(original)
    original.diff(plan)
    plan.trace(folder / "trace.json")
    plan.save(folder / "again.json")
    assert autopar.Plan.load(folder / "again.json").record == plan.record


@pytest.mark.cases(2)
def test_changed_files_are_refused(saved, tmp_path):
    _, data = saved
    path = tmp_path / "plan.json"

    @settings(max_examples=34, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(seed=SEEDS)
    def check(seed: int) -> None:
        random = Random(seed)
        content = json.loads(data)
        is_edited = random.randint(0, 3) > 0
        changed = json.dumps(content | {"plan": edited(random, content["plan"])}).encode()
        path.write_bytes(changed if is_edited else spoilt(random, data))
        with pytest.raises(errors.PlanFormatError) as caught:
            autopar.Plan.load(path)
        assert_error_has_a_place(caught.value)

    check()


# Places


def place_of(content: Json, folder: Path) -> tuple[str, errors.PlanFormatError]:
    path = folder / "plan.json"
    path.write_bytes(sealed(content))
    with pytest.raises(errors.PlanFormatError) as caught:
        autopar.Plan.load(path)
    return caught.value.where.removeprefix(f"{path}, "), caught.value


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory) -> bytes:
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    made("pipeline").save(path)
    return path.read_bytes()


PLACES: dict[str, tuple[Callable[[Json], Any], str]] = {
    "$.plan.arguments[1].shape[0]": (lambda plan: plan["arguments"][1].update(shape=["a"]), "expected `int`, got"),
    "$.plan.step": (lambda plan: plan.pop("step"), "expected a value, got none: the field is missing"),
    "$.plan.cluster.device": (
        lambda plan: plan["cluster"]["device"].update(memory_bytes=0), "expected memory_bytes above zero, got 0",
    ),
    "$.plan.results[0].layout": (
        lambda plan: plan["results"][0].update(layout={"dims": [[0], [0]]}), "got a mesh axis twice",
    ),
}  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
def test_the_place_of_an_edit_is_named(place, pipeline, tmp_path):
    content = json.loads(pipeline)
    edit, message = PLACES[place]
    edit(content["plan"])
    found, error = place_of(content, tmp_path)
    assert found == place
    assert message in str(error)


def test_an_edit_without_a_new_checksum_is_refused_with_its_place_too(pipeline, tmp_path):
    content = json.loads(pipeline)
    content["plan"]["pipeline"]["stages"][0]["layers"] = 7
    (tmp_path / "plan.json").write_text(json.dumps(content))
    with pytest.raises(errors.PlanFormatError, match=r"stages\[0\]\.layers: .*changed since it was saved \(checksum\)"):
        autopar.Plan.load(tmp_path / "plan.json")


# Clusters


def test_edited_clusters_are_refused_with_the_place_or_work(tmp_path):
    path = tmp_path / "cluster.json"
    slow_cluster(4).save(path)
    content, places = json.loads(path.read_bytes()), []

    @settings(max_examples=100, deadline=None, database=None)
    @given(seed=SEEDS)
    def check(seed: int) -> None:
        random = Random(seed)
        path.write_text(json.dumps(content | {"cluster": edited(random, content["cluster"])}))
        try:
            cluster = autopar.Cluster.load(path)
        except errors.InvalidArgumentError as error:
            places.append(error.where)
        else:
            assert cluster.num_devices >= 1
            assert cluster.device.memory_s(1e6) > 0

    check()
    assert len(places) > 20
    assert all("$.cluster" in place for place in places)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"num_hosts": 1', '"num_hosts": 0', r"\$\.cluster: expected one host or more"),
        (
            '"devices_per_host": 4',
            '"devices_per_host": "4"',
            r"\$\.cluster\.devices_per_host: expected `int`, got `str`",
        ),
        (
            '"memory_efficiency": ',
            '"memory_efficiency": -',
            r"\$\.cluster\.device: expected memory_efficiency above zero",
        ),
    ],
)
def test_the_place_in_a_cluster_file_is_named(old, new, message, tmp_path):
    path = tmp_path / "cluster.json"
    slow_cluster(4).save(path)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(errors.InvalidArgumentError, match=message):
        autopar.Cluster.load(path)


def test_a_cluster_file_that_is_not_there_says_so(tmp_path):
    with pytest.raises(errors.InvalidArgumentError, match="expected a cluster in a file, got no such file"):
        autopar.Cluster.load(tmp_path / "none.json")


# Beside the step


def new_chain() -> list[jax.Array]:
    return [
        jax.random.normal(jax.random.key(i), (n, m)) * n**-0.5
        for i, (n, m) in enumerate([(32, 64), (64, 64), (64, 16)])
    ]


STEPS = {"one program": (mlp_step, new_mlp_state, mlp_batch), "pipeline": (chain_step, new_chain, mlp_batch)}


def called_with(kind: str) -> tuple[Callable[..., Any], Any, Any]:
    step, state, batch = STEPS[kind]
    return step, state(), batch()


@pytest.fixture(scope="module", params=STEPS)
def small(request, tmp_path_factory) -> tuple[str, autopar.Plan, bytes]:
    """A plan of a step that compiles in half a second."""
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    recipe = autopar.recipes.pipeline(2, num_microbatches=2) if request.param == "pipeline" else None
    function, state, batch = called_with(request.param)
    step = autopar.parallelize(function, plan=recipe, cluster=slow_cluster(4), cache_dir=None)
    plan = step.plan(state, batch)
    plan.save(path)
    return request.param, plan, path.read_bytes()


def another(layouts: Json, index: int) -> int:
    """A layout of as many dimensions as that one."""
    rank = len(layouts[index]["dims"])
    return next(i for i, at in enumerate(layouts) if i != index and len(at["dims"]) == rank and not at["partial"])


def other_layout_of_argument(plan: Json) -> None:
    argument = next(value for value in plan["arguments"] if value["path"] == "state['first']")
    dims = argument["layout"]["dims"]
    argument["layout"]["dims"] = [[], [0]] if dims != [[], [0]] else [[0], []]


def other_home(plan: Json) -> None:
    made = plan["decisions"]
    value = max(made["raw"], key=int)
    made["raw"][value] = another(made["layouts"], made["raw"][value])


def forged_sum(plan: Json) -> None:
    """A product of whole matrices whose results are said to be summands: it would be added up once for each device."""
    made = plan["decisions"]
    sums = (s for s in made["strategies"] if s["results"][0]["partial"])
    strategy = next(s for s in sums if len(s["operands"]) == 2)
    strategy["operands"] = [{"dims": [[], []], "partial": []}] * 2
    strategy["split"] = 1


MISMATCHES: dict[str, tuple[str, Callable[[Json], Any], str]] = {
    r"\$\.plan\.arguments\[\d+\]\.layout": ("one program", other_layout_of_argument, "Layout"),
    r"\$\.plan\.decisions\.raw\.\d+": ("one program", other_home, ""),
    r"\$\.plan\.decisions\.of_op\.\d+": ("one program", forged_sum, "expected a way to split dot_general"),
    r"\$\.plan\.arguments\[0\]\.dtype": (
        "one program", lambda plan: plan["arguments"][0].update(dtype="int8"), "expected float32, got int8",
    ),
    r"\$\.plan\.pipeline\.schedule": (
        "pipeline", lambda plan: plan["pipeline"].update(schedule="none"), "expected one of gpipe",
    ),
    r"\$\.plan\.pipeline\.num_microbatches": (
        "pipeline", lambda plan: plan["pipeline"].update(num_microbatches=3), "",
    ),
    r"\$\.plan\.pipeline\.stages\[1\]\.layers": (
        "pipeline", lambda plan: plan["pipeline"]["stages"][1]["layers"].__setitem__(0, "mine"), "got mine",
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("small", "place"), [(kind, place) for place, (kind, *_) in MISMATCHES.items()], indirect=["small"]
)
def test_the_place_of_an_edit_that_shows_beside_the_step_is_named(place, small, tmp_path):
    kind, edit, message = MISMATCHES[place]
    content = json.loads(small[2])
    edit(content["plan"])
    (tmp_path / "plan.json").write_bytes(sealed(content))
    plan = autopar.Plan.load(tmp_path / "plan.json")
    function, state, batch = called_with(kind)
    step = autopar.parallelize(function, plan=plan, cache_dir=None)
    with pytest.raises(errors.PlanMismatchError, match=rf"plan of {function.__name__}, {place}: ") as caught:
        step(state, batch)
    assert message in str(caught.value)
