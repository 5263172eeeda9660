"""`python -m autopar`: planning for hardware that is not here, and reading saved plans."""

import dataclasses
import datetime
import email.message
import functools
import gc
import importlib.util
import json
import os
import re
import signal
import time

import pytest

import autopar
from autopar import commands
from autopar.__main__ import main
from autopar.benching import INTERRUPTED
from autopar.errors import InvalidArgumentError
from autopar.hardware.cluster import Cluster
from autopar.hardware.presets import H100
from autopar.recipes.parse import recipe_of
from autopar.recipes.ways import made_of
from autopar.step_files import shapes_only
from tests.small_steps import MLP_BATCH, MLP_STATE, ROOT, TIMEOUT_S, grouped, mlp_step, start_python

JOB = """
import jax
import jax.numpy as jnp

from sizes import WIDTH  # a neighbour of this file


def create(key):
    return {"w": jax.random.normal(key, (WIDTH, WIDTH))}


def train_step(state, batch):
    loss, grads = jax.value_and_grad(lambda p: jnp.mean((batch["x"] @ p["w"]) ** 2))(state)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), {"loss": loss}


def job():
    return train_step, create(jax.random.key(0)), {"x": jnp.zeros((64, WIDTH))}


def wrong():
    return train_step


def without_batch():
    return job()[:2]


def in_another_order():
    step, state, batch = job()
    return step, batch, state


number = 3
"""

VERBS = (
    "plan", "why-not", "bench", "lint", "fit", "explain", "diff", "report", "compare", "doctor", "verify", "tune",
    "measure", "cache list", "cache clear", "checkpoint show", "checkpoint export",
)  # fmt: skip


@pytest.fixture
def job(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "job.py").write_text(JOB)
    # 100,000 squared in float32 are 40 GB: a function that ran, instead of being traced, would not come back.
    (tmp_path / "sizes.py").write_text("WIDTH = 100_000")
    return tmp_path / "job.py"


def test_a_state_that_would_fit_nowhere_here_is_planned_for_other_hardware(job, tmp_path, capsys):
    saved = tmp_path / "plan.json"
    assert main(["plan", f"{job}:job", "--cluster", "dgx-h100", "--save", str(saved)]) == 0
    out = capsys.readouterr().out
    assert "Plan of train_step on dgx-h100" in out
    assert json.loads(saved.read_bytes())["plan"]["cluster"]["name"] == "dgx-h100"

    assert main(["explain", str(saved), "state"]) == 0
    assert "state['w']" in capsys.readouterr().out
    assert main(["diff", str(saved), str(saved)]) == 0


def test_a_step_that_runs_here_is_verified(job, capsys):
    (job.parent / "small.py").write_text(
        JOB.replace("from sizes import WIDTH  # a neighbour of this file", "WIDTH = 64")
    )
    assert main(["verify", f"{job.parent / 'small.py'}:job"]) == 0
    out = capsys.readouterr().out
    assert "verified on cpu x 8" in out
    assert "from plain jax.jit" in out


def test_a_step_that_runs_here_is_tuned(job, tmp_path, capsys):
    small, saved = job.parent / "small.py", tmp_path / "plan.json"
    small.write_text(JOB.replace("from sizes import WIDTH  # a neighbour of this file", "WIDTH = 64"))
    assert main(["tune", f"{small}:job", "--save", str(saved)]) == 0
    out = capsys.readouterr().out
    assert "timed on cpu x 8" in out
    assert "data_parallel()" in out
    assert any("timed on the devices" in note for note in json.loads(saved.read_bytes())["plan"]["notes"])


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--cluster", "dgx-h100", "--cluster: expected the devices here: local, local:4, or a .json file"),
        ("--save", "nowhere/plan.json", "--save: expected a path in a folder that is there, got nowhere/plan.json"),
        ("--save", ".", "--save: expected the path of a file, got ., a folder"),
    ],
)
def test_what_cannot_be_tuned_or_kept_is_said_before_it_runs(job, option, value, message, capsys):
    assert main(["tune", f"{job}:job", option, value]) == 1
    assert message in capsys.readouterr().err


def test_a_step_keeps_its_own_options_on_another_cluster(job, capsys):
    """One with a recipe cannot be tuned: it would be another step without."""
    text = JOB.replace("from sizes import WIDTH  # a neighbour of this file", "WIDTH = 64")
    with_recipe = "autopar.parallelize(train_step, plan=autopar.recipes.zero(1))"
    changed = text.replace("return train_step,", f"return {with_recipe},")
    assert changed != text, "else this shows nothing"
    (job.parent / "small.py").write_text(f"import autopar\n{changed}")
    assert main(["tune", f"{job.parent / 'small.py'}:job"]) == 1
    assert "got one with a recipe" in capsys.readouterr().err


def test_only_what_has_a_compiler_is_verified_from_afar(job, tmp_path, capsys):
    other = dataclasses.replace(H100, name="A card of tomorrow")
    Cluster.flat(8, device=other).save(tmp_path / "tomorrow.json")
    assert main(["verify", f"{job}:job", "--cluster", str(tmp_path / "tomorrow.json")]) == 1
    assert "--cluster: expected local, or hardware that there is a compiler for" in capsys.readouterr().err


def test_what_does_not_fit_is_an_error_with_words(job, capsys):
    assert main(["plan", f"{job}:job", "--cluster", "dgx-h100", "--memory-limit-bytes", "1000000"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("autopar: train_step, if every value were split over all 8 devices of dgx-h100: ")
    assert "expected at most 1 MB per device" in error


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("nowhere.py:job", "got no file 'nowhere.py'"),
        ("job.py", "job.py: expected FILE:FUNCTION, got a file, and no function in it"),
        ("job", "job: expected FILE:FUNCTION, got no colon"),
        ("job.py:other", "expected a function 'other', got none of that name"),
        ("job.py:number", "expected a function 'number'"),
        ("job.py:wrong", "expected a tuple of a step and its arguments, one or more, got a function"),
        ("job.py:without_batch", "every argument of train_step(state, batch), got train_step and 1 argument (missing"),
    ],
)
def test_wrong_functions_say_what_is_expected(job, monkeypatch, capsys, function, message):
    monkeypatch.chdir(job.parent)
    assert main(["plan", function, "--cluster", "dgx-h100"]) == 1
    assert message in capsys.readouterr().err


def test_an_error_of_the_step_itself_ends_with_what_it_was_called_with(job, monkeypatch):
    monkeypatch.chdir(job.parent)
    with pytest.raises(KeyError) as raised:
        main(["plan", "job.py:in_another_order", "--cluster", "dgx-h100"])
    told = "autopar: raised while train_step was traced with state: float32[64, 100000], batch: float32[100000, 100000]"
    assert told in raised.value.__notes__


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("h100x8", "dgx-h100x1 (8 devices) or dgx-h100x8 (64 devices)"),
        ("h100", "dgx-h100"),
        ("dgx-h10x2", "dgx-h100x2 (16 devices)"),
        ("gb200x72", "gb200-nvl72x1 (72 devices) or gb200-nvl72x72 (5184 devices)"),
        ("zebra", ""),
    ],
)
def test_a_name_near_that_of_a_cluster_is_told_by_it(given, meant):
    with pytest.raises(InvalidArgumentError) as raised:
        Cluster.parse(given)
    assert raised.value.hint == (
        f"did you mean {meant}?" if meant else "for other hardware make a Cluster(...) with its constants"
    )


def test_devices_of_several_hosts_are_no_cards_of_one():
    with pytest.raises(InvalidArgumentError, match=r"more are dgx-h100x8 \(64 devices\)"):
        Cluster.parse("dgx-h100:64")


@pytest.mark.parametrize(
    ("recipe", "hint"),
    [
        ("hybrid", "'hybrid sharded'?"),
        ("fsdpp", "'fsdp'?"),
        ("tp=8", "'combine(tp=8)'?"),
        ("megatron", "such as 'fsdp'"),
    ],
)
def test_ways_and_clusters_are_read_before_the_step_is_made(job, capsys, monkeypatch, recipe, hint):
    monkeypatch.setattr("autopar.commands.shapes_only", lambda *given: pytest.fail("made"))
    assert main(["bench", f"{job}:job", "--cluster", "dgx-h100", "--recipes", recipe]) == 1
    err = capsys.readouterr().err
    assert "expected 'data parallel', 'ZeRO-1'" in err
    assert "'hybrid sharded', 'tensor parallel', 'tensor and FSDP'" in err
    assert f"hint: {hint}" in err
    assert main(["bench", f"{job}:job", "--cluster", "h100x8"]) == 1
    assert "did you mean" in capsys.readouterr().err


def test_wrong_clusters_and_plans_say_what_is_expected(job, capsys):
    assert main(["plan", f"{job}:job", "--cluster", "dgx-1"]) == 1
    assert "cluster: expected local" in capsys.readouterr().err
    assert main(["explain", "nowhere.json", "state"]) == 1
    assert "nowhere.json: expected a plan in a file, got no such file" in capsys.readouterr().err


def test_no_command_prints_the_usage(capsys):
    with pytest.raises(SystemExit):
        main([])
    assert "usage: autopar" in capsys.readouterr().err


def small_job(job) -> str:
    path = job.parent / "small.py"
    path.write_text(JOB.replace("from sizes import WIDTH  # a neighbour of this file", "WIDTH = 64"))
    return f"{path}:job"


def test_a_cluster_file_that_is_not_there_is_named(job, capsys):
    assert main(["plan", f"{job}:job", "--cluster", "none.json"]) == 1
    assert "none.json: expected a cluster in a file, got no such file" in capsys.readouterr().err


def test_a_topology_that_does_not_exist_is_refused(job, capsys):
    assert main(["plan", f"{job}:job", "--cluster", "tpu-v5e:16x32"]) == 1
    assert "nearest: 16x16, 8x16" in capsys.readouterr().err


def test_sizes_are_taken_as_people_write_them(job, capsys):
    assert main(["plan", f"{job}:job", "--cluster", "dgx-h100", "--memory-limit-bytes", "1MB"]) == 1
    assert "expected at most 1 MB per device" in capsys.readouterr().err
    assert main(["plan", f"{job}:job", "--cluster", "dgx-h100", "--memory-limit-bytes", "much"]) == 1
    assert "expected a size, such as 80GB, 16GiB or 1000000, got 'much'" in capsys.readouterr().err


def test_sizes_and_clusters_are_text_in_python_too():
    options = {"cache_dir": None}
    plan = autopar.plan(
        mlp_step, MLP_STATE, MLP_BATCH, cluster="dgx-h100x2", **grouped(memory_limit_bytes="16GiB", **options)
    )
    assert plan.cluster == Cluster.preset("dgx-h100", hosts=2)
    assert plan.record.memory_limit_bytes == 16 * 2**30
    step = autopar.parallelize(mlp_step, cluster="tpu-v5e:2x4", **grouped(**options))
    assert step.plan(MLP_STATE, MLP_BATCH).cluster == Cluster.preset("tpu-v5e", topology="2x4")
    with pytest.raises(InvalidArgumentError, match=r"cluster: expected local, a \.json file"):
        autopar.parallelize(mlp_step, cluster="dgx-1")


def test_explain_without_a_match_names_near_ones(job, tmp_path, capsys):
    saved = tmp_path / "plan.json"
    assert main(["plan", small_job(job), "--cluster", "dgx-h100", "--save", str(saved)]) == 0
    capsys.readouterr()
    assert main(["explain", str(saved), "stat['w']"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "nothing that is called \"stat['w']\"; near names: state['w']" in err


def test_a_reader_that_has_read_enough_is_no_error(job):
    saving = f"import sys; sys.argv[1:] = ['plan', {small_job(job)!r}, '--cluster', 'dgx-h100']"
    code = f"{saving}\nfrom autopar.__main__ import main\nsys.exit(main())"
    child = start_python(code)
    assert child.stdout is not None
    assert child.stderr is not None
    child.stdout.close()
    try:
        assert child.stderr.read() in ("", "train_step: the plan of an earlier search, from the cache\n")
        assert child.wait(timeout=TIMEOUT_S) == 0
    finally:
        child.kill()
        child.stderr.close()


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is not None, reason="libtpu is installed")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_end_with_what_there_is_by_then(job, tmp_path, capsys, monkeypatch, number):
    """In the second way of `bench`, and in a verb that has nothing to show yet."""

    def interrupted(problem, way, **options):
        if (tmp_path / "bench.html").exists():
            signal.raise_signal(number)
        return made_of(problem, way, **options)

    monkeypatch.setattr("autopar.benching.made_of", interrupted)
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)]
    page = ["--report", str(tmp_path / "bench.html")]
    assert main(["bench", f"{job}:job", "--cluster", "dgx-h100", "--recipes", "fsdp", "dp", *page]) == 0
    assert f"data parallel: {INTERRUPTED}" in capsys.readouterr().out
    monkeypatch.setattr("autopar.benching.made_of", lambda *args, **options: signal.raise_signal(number))
    assert main(["bench", f"{job}:job", "--cluster", "dgx-h100"]) == 130
    assert capsys.readouterr().err.endswith("autopar: interrupted\n")
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)] == handlers


def test_a_signal_while_garbage_is_collected_is_not_lost(job, capsys, monkeypatch):
    """Python prints and forgets what a callback of the collection raises, such as jax's."""

    def collecting(phase, info):
        if phase == "stop":
            signal.raise_signal(signal.SIGTERM)
            gc.callbacks.remove(collecting)

    def waits(*args, **options):
        gc.callbacks.append(collecting)
        gc.collect()
        time.sleep(10)

    monkeypatch.setattr("autopar.benching.made_of", waits)
    begun_s = time.perf_counter()
    assert main(["bench", f"{job}:job", "--cluster", "dgx-h100"]) == 130
    assert time.perf_counter() - begun_s < 10
    assert capsys.readouterr().err.endswith("autopar: interrupted\n")


def test_a_compiler_that_is_missing_is_said_before_a_plan_is_searched_for(job, monkeypatch, capsys):
    def searched(*args):
        raise AssertionError("a plan is searched for")

    monkeypatch.setattr("autopar.execute.plan_sources.make_plan", searched)
    assert main(["verify", small_job(job), "--cluster", "tpu-v5e:2x4"]) == 1
    assert "got no module libtpu" in capsys.readouterr().err


# Reading plans, JSON


def out_of(capsys, *arguments: str) -> str:
    """What a verb prints."""
    assert main(list(arguments)) == 0
    return capsys.readouterr().out


@pytest.fixture
def saved(job, tmp_path, capsys) -> str:
    path = str(tmp_path / "plan.json")
    out_of(capsys, "plan", small_job(job), "--cluster", "dgx-h100", "--save", path)
    return path


def test_a_plan_as_json_and_with_every_row(job, capsys):
    named = ["plan", small_job(job), "--cluster", "dgx-h100"]
    made = json.loads(out_of(capsys, *named, "--json"))
    assert made["summary"]["devices"] == 8
    assert made["plan"]["step"] == "train_step"
    assert "tried on mesh" in out_of(capsys, *named, "--table")
    assert "tried on mesh" not in out_of(capsys, *named)


def test_what_was_written_and_what_was_not_searched_for_is_told(job, tmp_path, capsys):
    page, named = tmp_path / "page.html", ["plan", small_job(job), "--cluster", "dgx-a100-40g"]
    assert main([*named, "--report", str(page)]) == 0
    assert capsys.readouterr().out.endswith(f"\nWritten to {page}\n")
    assert main(named) == 0
    out, err = capsys.readouterr()
    assert "Written to" not in out
    assert "train_step: the plan of an earlier search, from the cache" in err


def test_a_plan_is_written_as_a_page(job, saved, tmp_path, capsys):
    page, other = tmp_path / "plan.html", tmp_path / "other.html"
    assert f"Written to {page}" in out_of(capsys, "report", saved, str(page))
    out_of(capsys, "plan", small_job(job), "--cluster", "dgx-h100", "--report", str(other))
    assert page.read_text() == other.read_text()
    assert page.read_text().startswith("<!DOCTYPE html>")
    both = tmp_path / "both.html"
    assert json.loads(out_of(capsys, "compare", saved, saved, str(both), "--json")) == {"page": str(both)}
    assert "Two plans of" in both.read_text()


def test_explanations_and_differences_as_json(saved, capsys):
    made = json.loads(out_of(capsys, "explain", saved, "state", "--json"))
    assert made["values"][0]["path"] == "state['w']"
    assert made["values"][0]["pieces"]
    assert json.loads(out_of(capsys, "diff", saved, saved, "--json")) == {"differences": []}


def test_what_a_recipe_would_give(job, capsys):
    named = ["why-not", small_job(job), "zero(3)", "--cluster", "dgx-h100"]
    made = json.loads(out_of(capsys, *named, "--json"))
    own = autopar.plan(
        *shapes_only(small_job(job))[:1],
        *shapes_only(small_job(job))[1],
        cluster="dgx-h100",
        plan=autopar.recipes.zero(3),
        cache_dir=None,
    )
    assert made["quantities"][0]["other"] == own.predicted.step_time_s
    assert made["instead"] in out_of(capsys, *named, "--effort", "quick").replace("\n", " ")


@pytest.mark.parametrize(
    ("text", "recipe"),
    [
        ("data_parallel", autopar.recipes.data_parallel()),
        ("tensor_parallel(size=8)", autopar.recipes.tensor_parallel(size=8)),
        (" cut(zero(1), stages=2) ", autopar.recipes.cut(autopar.recipes.zero(1), stages=2)),
        ("pipeline(2, 'gpipe')", autopar.recipes.pipeline(2, "gpipe")),
    ],
)
def test_recipes_are_read_from_text(text, recipe):
    assert recipe_of(text) == recipe


@pytest.mark.parametrize(
    "text",
    ["", "zero(", "zero", "3", "__import__('os')", "zero.x(1)", "zero(stage=open('x'))", "zero(**{})", "nothing()"],
)
def test_what_is_no_recipe_is_refused_and_not_run(text):
    with pytest.raises(InvalidArgumentError, match="expected a call of combine, cut, data_parallel"):
        recipe_of(text)


def test_a_wrong_argument_of_a_recipe_is_named():
    with pytest.raises(
        InvalidArgumentError, match=r"^recipes.tensor_parallel\(kind\): expected '1d'.* got 8\n.*size=8"
    ):
        recipe_of("tensor_parallel(8)")


@pytest.mark.slow
def test_the_largest_batch(job, capsys):
    made = json.loads(out_of(capsys, "fit", limited_job(job), "--cluster", "dgx-h100", "--json"))
    assert made["largest"]["dgx-h100"] > 8
    assert "the largest batch that fits is" in out_of(capsys, "fit", limited_job(job), "--cluster", "dgx-h100")
    assert main(["fit", limited_job(job), "--price", "dgx-h100"]) == 1
    assert "--price: expected CLUSTER=PRICE of an hour, got dgx-h100" in capsys.readouterr().err


def test_the_largest_batch_of_symbolic_shapes(job, capsys):
    named = limited_job(job)
    path = job.parent / "limited.py"
    shape = 'jax.ShapeDtypeStruct(jax.export.symbolic_shape("b, 64"), jnp.float32)'
    path.write_text(path.read_text().replace("jnp.zeros((64, WIDTH))", shape))
    options = ["--cluster", "local:2", "--multiple", "128", "--json"]
    made = json.loads(out_of(capsys, "fit", named, *options))
    assert made["largest"]["local:2"] >= 128
    assert main(["plan", named, "--cluster", "local:2"]) == 1
    assert "batch['x']: expected numbers as dimensions" in capsys.readouterr().err


ROWS = """
import jax
import jax.numpy as jnp
import autopar


def step(state, batch):
    value, grad = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(batch @ w) ** 2))(state)
    return state - grad, value


def job(examples, length):
    limited = autopar.parallelize(step, search=autopar.Search(memory_limit_bytes=3_000_000))
    return limited, jax.ShapeDtypeStruct((64, 64), "float32"), jax.ShapeDtypeStruct((examples, length, 64), "float32")
"""


def test_what_padding_costs(job, capsys):
    (job.parent / "rows.py").write_text(ROWS)
    (job.parent / "lengths.txt").write_text("100\n120\n250\n")
    named = [
        "fit",
        f"{job.parent / 'rows.py'}:job",
        "--cluster",
        "local:2",
        "--lengths",
        str(job.parent / "lengths.txt"),
    ]
    made = json.loads(out_of(capsys, *named, "--batch-arg", "examples", "--multiple", "8", "--json"))
    assert [(row["way"], row["lengths"]) for row in made["filled"]] == [
        ("padded", [256]), ("buckets", [128, 256]), ("packed", [256]),
    ]  # fmt: skip
    assert main(named) == 1
    assert "add --batch-arg NAME" in capsys.readouterr().err


def limited_job(job) -> str:
    """With little memory, so that batches are small."""
    path = job.parent / "limited.py"
    text = JOB.replace("from sizes import WIDTH  # a neighbour of this file", "WIDTH = 64")
    limited = "autopar.parallelize(train_step, search=autopar.Search(memory_limit_bytes=100_000))"
    path.write_text("import autopar\n" + text.replace("return train_step,", f"return {limited},"))
    return f"{path}:job"


def test_a_decorated_step_keeps_its_options_but_for_those_that_are_named(job, capsys):
    named = ["plan", limited_job(job), "--cluster", "dgx-h100", "--effort", "quick", "--json"]
    limits = [
        json.loads(out_of(capsys, *named, *options))["plan"]["memory_limit_bytes"]
        for options in ((), ("--memory-limit-bytes", "200kB"))
    ]
    assert limits == [100_000, 200_000]


def test_a_recipe_in_text_is_planned_and_verified(capsys, job):
    named = [small_job(job), "--recipe", "zero(3)"]
    made = json.loads(out_of(capsys, "plan", *named, "--cluster", "dgx-h100", "--json"))["plan"]
    assert made["recipe"] == "zero(3)"
    assert "numbers" in out_of(capsys, "verify", *named)


def test_recipes_in_text_are_timed_in_place_of_those_that_are_otherwise(capsys, job, monkeypatch):
    monkeypatch.setattr(autopar, "tune", functools.partial(autopar.tune, seconds=0.1))
    named = ["tune", small_job(job), "--recipe", "zero(3)", "--recipe", "tp", "--json"]
    names = {row["name"] for row in json.loads(out_of(capsys, *named))["rows"]}
    assert {"zero(3)", "tp"} <= names
    assert not names & {"data_parallel()", "zero(1)", "zero(2)"}


def test_a_recipe_keeps_the_arguments_of_a_decorated_step(capsys, tmp_path):
    (tmp_path / "job.py").write_text(
        "import autopar, jax.numpy as jnp\n"
        "step = autopar.parallelize(lambda batch, w: (w - batch.mean(0), batch.sum()),"
        " batch_argnums=0, donate_argnums=1)\n"
        "def job():\n    return step, jnp.ones((8, 4)), jnp.ones(4)\n"
    )
    made = out_of(capsys, "plan", f"{tmp_path}/job.py:job", "--cluster", "dgx-h100", "--recipe", "data_parallel()")
    assert "data_parallel()" in made


def _metadata_with(extra):
    told = email.message.Message()
    told["Provides-Extra"] = extra
    return told


def test_the_doctor_lists_every_extra_and_what_it_lacks(monkeypatch):
    required = ["numpy", 'orbax-checkpoint; extra == "train"', "no_such_thing>=2; extra == 'train'"]
    monkeypatch.setattr(commands.metadata, "requires", lambda name: required)
    monkeypatch.setattr(commands.metadata, "metadata", lambda name: _metadata_with("train"))
    found = {row.what: row.state for row in commands.diagnose().findings}
    assert found["extra train"] == "not installed (optional): without no_such_thing"


def test_the_doctor_says_what_there_is(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("AUTOPAR_CACHE_DIR", str(tmp_path / "none"))
    made = {row["what"]: row for row in json.loads(out_of(capsys, "doctor", "--json"))["findings"]}
    assert made["devices"]["state"] == "8 x cpu"
    assert made["measured"]["advice"].startswith("predictions use tables")
    assert "not there yet" in made["cache"]["state"]
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "plan-1.json").write_text("x")
    assert "1 plans, 0 measurements, 1 B" in out_of(capsys, "doctor")
    kept = tmp_path / "none" / "measured-cpu-2cores-1x8-jax1.json"
    kept.write_text("{}")
    os.utime(kept, (0, 0))
    written = datetime.datetime.fromtimestamp(0).isoformat(" ", "minutes")
    made = {row["what"]: row for row in json.loads(out_of(capsys, "doctor", "--json"))["findings"]}
    assert made["measurement"]["state"] == f"cpu-2cores-1x8-jax1, of {written}"


@pytest.mark.parametrize(
    "arguments",
    [
        ["--version"],
        ["--help"],
        *([*verb.split(), "--help"] for verb in VERBS),
    ],
)
def test_help_and_version_are_no_errors(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert out.startswith("autopar " if arguments == ["--version"] else "usage: autopar")
    verb = " ".join(arguments[:-1])
    assert not verb or (f"example: autopar {verb}" in out and "--json" in out)


def test_the_verbs_of_these_tests_are_all_that_there_are(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    out = capsys.readouterr().out
    told = re.findall(r"^    ([a-z-]+)(?: {2,}|$)", out, re.MULTILINE)
    assert sorted(told) == sorted({verb.split()[0] for verb in VERBS})


def test_the_page_on_the_command_line_has_every_verb():
    rows = re.findall(r"^\| (`.*?) \|", (ROOT / "docs" / "command-line.md").read_text(), re.MULTILINE)
    told = " ".join(re.findall(r"`(.*?)`", " ".join(rows)))
    assert [verb for verb in VERBS if verb not in told] == []


@pytest.mark.parametrize("verb", ["cache", "checkpoint"])
def test_help_of_verbs_with_verbs_of_their_own_has_an_example(verb, capsys):
    with pytest.raises(SystemExit):
        main([verb, "--help"])
    assert f"example: autopar {verb}" in capsys.readouterr().out


def test_wrong_arguments_are_another_status(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["plan"])
    assert ended.value.code == 2


def test_a_page_in_no_folder_is_refused_before_planning(job, capsys, monkeypatch):
    monkeypatch.setattr("autopar.commands.shapes_only", lambda *given: pytest.fail("planned"))
    assert main(["plan", f"{job}:job", "--report", "nowhere/plan.html"]) == 1
    assert "--report: expected a path in a folder that is there" in capsys.readouterr().err
