"""Plans on disk: read by the next process, never trusted when damaged, never mixed up."""

import json

import jax
import pytest

import autopar
from autopar import Cluster
from benchmarks.zoo import CASES
from tests.small_steps import (
    MLP_BATCH,
    MLP_STATE,
    TIMEOUT_S,
    assert_close,
    grouped,
    mlp_batch,
    mlp_step,
    new_mlp_state,
    python,
    shapes,
    slow_cluster,
    start_python,
)

# Prints what a process did: the passes of the compiler, and the plan's choices.
PLANNING = """
import json, logging
import autopar
from tests.small_steps import MLP_BATCH, MLP_STATE, mlp_step, slow_cluster
step = autopar.parallelize(mlp_step, cluster=slow_cluster(2))
plan = step.plan(MLP_STATE, MLP_BATCH)
print(json.dumps({"passes": list(step.last_progress.spent_s), "plan": str(plan)}))
"""


def cached(directory) -> list[str]:
    return sorted(path.name for path in directory.glob("plan-*.json"))


def step_with(directory, function=mlp_step, **options):
    return autopar.parallelize(function, **grouped(**{"cluster": slow_cluster(2), "cache_dir": directory, **options}))


def searched(step) -> bool:
    return any(name.startswith("mesh") for name in step.last_progress.spent_s)


def test_a_second_process_reads_the_plan_and_does_not_search(tmp_path):
    first, second = (python(PLANNING, cache=tmp_path) for _ in range(2))
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    one, other = json.loads(first.stdout), json.loads(second.stdout)
    assert "mesh 2" in one["passes"]
    assert other["passes"] == ["trace", "cache"]
    assert other["plan"] == one["plan"]
    assert len(cached(tmp_path)) == 1


@pytest.mark.parametrize(
    ("name", "sizes", "others"),
    [
        pytest.param(
            "gpt", {"layers": 4}, [{"layers": 4, "vocabulary": 128}, {"layers": 3}], marks=pytest.mark.slow, id="gpt"
        ),
        ("mlp", {"layers": 3, "width": 512}, [{"layers": 3, "width": 256}, {"layers": 5, "width": 512}]),
    ],
)
def test_a_plan_is_the_same_file_whatever_was_planned_before(tmp_path, name, sizes, others):
    """With an empty cache, and with that of a model of another head or of fewer layers, in the same process too."""

    def saved(directory, its_sizes) -> bytes:
        case = CASES[name](**its_sizes)
        state = jax.eval_shape(case.init, jax.random.key(0))
        step = step_with(directory, case.step, cluster=Cluster.preset("dgx-h100").submesh(1, 4))
        plan = step.plan(state, shapes(case.batch(0)))
        assert searched(step)
        plan.save(tmp_path / "plan.json")
        return (tmp_path / "plan.json").read_bytes()

    alone = saved(None, sizes)
    for other in others:
        saved(tmp_path / "cache", other)
    assert saved(tmp_path / "cache", sizes) == alone


@pytest.mark.slow
def test_two_processes_at_once_leave_one_whole_plan(tmp_path):
    children = [start_python(PLANNING, cache=tmp_path) for _ in range(2)]
    try:
        outputs = [child.communicate(timeout=TIMEOUT_S) for child in children]
    finally:
        for child in children:
            child.kill()
    assert [child.returncode for child in children] == [0, 0], outputs
    (name,) = cached(tmp_path)
    assert autopar.Plan.load(tmp_path / name).record.step == "mlp_step"
    assert not list(tmp_path.glob("tmp*"))
    step = step_with(tmp_path)
    assert str(step.plan(MLP_STATE, MLP_BATCH)) in [json.loads(out)["plan"] for out, _ in outputs]
    assert not searched(step)


def test_the_plan_that_is_read_is_the_plan_that_was_found(tmp_path):
    found = step_with(tmp_path).plan(MLP_STATE, MLP_BATCH)
    step = step_with(tmp_path)
    read = step.plan(MLP_STATE, MLP_BATCH)
    assert not searched(step)
    assert read.record == found.record
    assert read.state_shardings == found.state_shardings
    assert_close(step(new_mlp_state(), mlp_batch()), mlp_step(new_mlp_state(), mlp_batch()))


def test_without_a_directory_nothing_is_written_or_read(tmp_path, monkeypatch):
    monkeypatch.setenv("AUTOPAR_CACHE_DIR", str(tmp_path / "default"))
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        step = step_with(None)
        step(new_mlp_state(), mlp_batch())
        assert searched(step)
    assert list(tmp_path.iterdir()) == []


def test_the_environment_names_the_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("AUTOPAR_CACHE_DIR", str(tmp_path / "named"))
    autopar.parallelize(mlp_step, cluster=slow_cluster(2)).plan(MLP_STATE, MLP_BATCH)
    assert len(cached(tmp_path / "named")) == 1


@pytest.mark.parametrize("damage", [b"", b"{", b"{}", b"null", b'{"format_version": 0}'], ids=repr)
def test_a_damaged_file_is_planned_anew(damage, tmp_path):
    step_with(tmp_path).plan(MLP_STATE, MLP_BATCH)
    (name,) = cached(tmp_path)
    (tmp_path / name).write_bytes(damage)
    step = step_with(tmp_path)
    plan = step.plan(MLP_STATE, MLP_BATCH)
    assert searched(step)
    assert autopar.Plan.load(tmp_path / name).record == plan.record


def test_a_file_with_a_damaged_byte_is_planned_anew(tmp_path):
    step_with(tmp_path).plan(MLP_STATE, MLP_BATCH)
    (name,) = cached(tmp_path)
    content = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(content.replace(b"mlp_step", b"\xedlp_step", 1))
    step = step_with(tmp_path)
    step.plan(MLP_STATE, MLP_BATCH)
    assert searched(step)


def test_damaged_rules_are_asked_for_anew(tmp_path):
    step_with(tmp_path).plan(MLP_STATE, MLP_BATCH)
    for path in tmp_path.glob("rules-*"):
        path.write_bytes(path.read_bytes()[:100])
    (name,) = cached(tmp_path)
    (tmp_path / name).unlink()
    step = step_with(tmp_path)
    assert_close(step(new_mlp_state(), mlp_batch()), mlp_step(new_mlp_state(), mlp_batch()))
    (rules,) = tmp_path.glob("rules-*")
    assert json.loads(rules.read_text())


def test_a_directory_that_cannot_be_made_is_no_error(tmp_path):
    (tmp_path / "file").write_text("in the way")
    step = step_with(tmp_path / "file" / "cache")
    assert_close(step(new_mlp_state(), mlp_batch()), mlp_step(new_mlp_state(), mlp_batch()))


OTHERS = {
    "cluster": {"cluster": slow_cluster(4)},
    "memory limit": {"memory_limit_bytes": 1_000_000_000},
    "donation": {"donate_argnums": ()},
    "batch": {"batch_argnums": ()},
    "time limit": {"time_limit_s": 7.0},
}


@pytest.mark.parametrize("what", OTHERS)
def test_other_options_have_a_plan_of_their_own(what, tmp_path):
    step_with(tmp_path).plan(MLP_STATE, MLP_BATCH)
    step = step_with(tmp_path, **OTHERS[what])
    step.plan(MLP_STATE, MLP_BATCH)
    assert searched(step)
    assert len(cached(tmp_path)) == 2


def test_other_shapes_and_another_step_have_plans_of_their_own(tmp_path):
    def other(state, batch):
        new, metrics = mlp_step(state, batch)
        return new, {"loss": metrics["loss"] + 1}

    step_with(tmp_path).plan(MLP_STATE, MLP_BATCH)
    step_with(tmp_path).plan(MLP_STATE, shapes(mlp_batch(8)))
    step_with(tmp_path, other).plan(MLP_STATE, MLP_BATCH)
    assert len(cached(tmp_path)) == 3


def test_another_constant_has_a_plan_of_its_own(tmp_path):
    for value in (1.0, 2.0):
        table = jax.numpy.full((32,), value)

        def step(state, batch, table=table):
            return mlp_step(state, batch | {"x": batch["x"] * table})

        step_with(tmp_path, lambda state, batch, step=step: step(state, batch)).plan(MLP_STATE, MLP_BATCH)
    assert len(cached(tmp_path)) == 2


def test_a_plan_of_the_cache_bears_the_names_of_its_own_step(tmp_path):
    def other(state, batch):
        new, metrics = mlp_step(state, batch)
        return new, {"mean_error": metrics["loss"]}

    step_with(tmp_path).plan(MLP_STATE, MLP_BATCH)
    plan = step_with(tmp_path, other).plan(MLP_STATE, MLP_BATCH)
    assert plan.record.step == "other"
    assert "result[1]['mean_error']" in [v.path for v in plan.record.results]


def test_a_plan_of_the_cache_bears_the_modules_of_its_own_step(tmp_path):
    def named(name):
        def mlp_step_named(state, batch):
            with jax.named_scope(name):
                return mlp_step(state, batch)

        return step_with(tmp_path, mlp_step_named).plan(MLP_STATE, MLP_BATCH)

    named("encoder")
    assert "decoder" in {row.module for row in named("decoder").record.modules}
    assert len(cached(tmp_path)) == 2
