"""Every verb as a shell of the user runs it: what is right, what is wrong, into a pipe that closes, on a narrow
terminal, and as JSON.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest

from autopar.checkpoint import Checkpointer
from tests.small_steps import ROOT, TIMEOUT_S

pytestmark = pytest.mark.slow

JOB = """
import autopar
from tests.small_steps import mlp_batch, mlp_step, new_mlp_state


def job():
    limited = autopar.Search(memory_limit_bytes=100_000)
    return autopar.parallelize(mlp_step, search=limited), new_mlp_state(), mlp_batch()


def plain():
    return mlp_step, new_mlp_state(), mlp_batch()
"""
NARROW = 40
# By verb: arguments that are right, and arguments that are wrong with the status and a part of what is said then.
VERBS = {
    "plan": ("job.py:job --cluster local:2 --save again.json", "job.py:none", 1, "expected a function 'none'"),
    "explain": ("plan.json first", "plan.json nothing", 1, "nothing that is called 'nothing'"),
    "why-not": ("job.py:job zero(3) --cluster local:2", "job.py:job zero(", 1, "expected a call of combine, cut"),
    "diff": ("plan.json plan.json", "plan.json none.json", 1, "none.json: expected a plan in a file"),
    "report": ("plan.json page.html", "plan.json nowhere/page.html", 1, "expected a path in a folder that is there"),
    "compare": ("plan.json plan.json two.html", "plan.json", 2, "the following arguments are required"),
    "bench": (
        "job.py:job --cluster local:2 --recipes fsdp zero(1) plan.json --measure --report bench.html",
        "job.py:job --recipes zebra",
        1,
        "expected a call of combine",
    ),
    "fit": (
        "job.py:job --cluster local:2 --multiple 512 --report fit.html",
        "job.py:job --multiple few",
        2,
        "argument --multiple: invalid int value: 'few'",
    ),
    "verify": ("job.py:plain --cluster local:2", "job.py:plain --cluster dgx-1", 1, "cluster: expected local"),
    "tune": ("job.py:plain --cluster local:2", "job.py:plain --cluster dgx-h100", 1, "expected the devices here"),
    "measure": ("--devices 2 --save cluster.json", "--devices 99 --save cluster.json", 1, "99"),
    "doctor": ("", "--verbose", 2, "unrecognized arguments: --verbose"),
    "checkpoint show": ("run", "none", 1, "none"),
    "checkpoint export": ("run params.safetensors --select params", "run params.safetensors --select q", 1, "q"),
    "cache list": ("", "now", 2, "unrecognized arguments: now"),
    "cache clear": ("--kind plans", "--kind all", 2, "invalid choice: 'all'"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A job, its plan and a checkpoint."""
    path = tmp_path_factory.mktemp("verbs")
    (path / "job.py").write_text(JOB)
    checkpoints = Checkpointer(path / "run", every=1)
    checkpoints.save(1, {"params": {"w": jnp.ones((2, 3))}})
    checkpoints.close()
    made = run(path, "plan job.py:job --cluster local:2 --save plan.json")
    assert (made.returncode, made.stderr) == (0, "")
    return path


def run(folder: Path, arguments: str, pipe: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    """A command in a shell, whose status is that of autopar where it writes to a pipe."""
    environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "NO_COLOR", "FORCE_COLOR")}
    environment |= {"PYTHONPATH": str(ROOT), "AUTOPAR_CACHE_DIR": str(folder / "cache"), **variables}
    quoted = " ".join(f"'{argument}'" for argument in arguments.split())
    command = f"'{sys.executable}' -m autopar {quoted} {pipe}; exit ${{PIPESTATUS[0]}}"
    return subprocess.run(
        ["bash", "-c", command], cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S,
        check=False,
    )  # fmt: skip


def test_what_takes_long_says_that_it_goes_on(folder):
    done = run(folder, f"fit {VERBS['fit'][0]} --json")
    sizes = [row["batch"] for row in json.loads(done.stdout)["rows"]]
    told = [line for line in done.stderr.splitlines() if "(planned in" in line]
    assert sorted(int(line.split("batch ")[1].split(":")[0]) for line in told) == sizes


def test_these_are_all_verbs(folder):
    told = run(folder, "--help").stdout
    assert all(f"autopar {verb}" in told for verb in VERBS)


@pytest.mark.parametrize("verb", VERBS)
def test_a_reader_that_closes_the_pipe(folder, verb):
    done = run(folder, f"{verb} {VERBS[verb][0]}", "| head -n 1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert "Traceback" not in done.stderr
    assert "BrokenPipe" not in done.stderr


@pytest.mark.parametrize("verb", VERBS)
def test_json_alone_is_on_standard_output(folder, verb):
    done = run(folder, f"{verb} {VERBS[verb][0]} --json")
    assert done.returncode == 0, done.stderr
    assert isinstance(json.loads(done.stdout), dict)


@pytest.mark.parametrize("verb", VERBS)
def test_narrow_text(folder, verb):
    done = run(folder, f"{verb} {VERBS[verb][0]}", COLUMNS=str(NARROW))
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout
    lines = done.stdout.splitlines()
    assert lines
    # A word that is longer than the line is not broken.
    assert [line for line in lines if len(line) > NARROW and len(line.split()) > 1] == []


@pytest.mark.parametrize("verb", VERBS)
def test_what_is_wrong(folder, verb):
    _, arguments, status, told = VERBS[verb]
    done = run(folder, f"{verb} {arguments}")
    assert (done.returncode, done.stdout) == (status, "")
    assert told in done.stderr
    assert "Traceback" not in done.stderr
