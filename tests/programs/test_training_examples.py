"""The examples of whole training runs: in two processes, then on from there in one."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIMIT_S = 600


def run(*command: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    environment |= {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def losses(text: str) -> dict[int, float]:
    return {int(step): float(loss) for step, loss in re.findall(r"step (\d+)  loss (\S+)", text)}


@pytest.mark.slow
def test_a_run_of_two_processes_goes_on_in_one(tmp_path):
    folder = ["--folder", str(tmp_path), "--save-every", "10"]
    launcher = ["-m", "autopar.launch", "--processes", "2", "--devices-per-process", "2"]
    first = losses(run(*launcher, "examples/pretrain.py", *folder, "--steps", "20"))
    text = run("examples/pretrain.py", *folder, "--steps", "40")
    second = losses(text)
    assert sorted(first) == [9, 19]
    assert sorted(second) == [29, 39]
    assert min(second.values()) < first[9] < 5.6  # the logarithm of 256 bytes is 5.55
    assert "held-out loss" in text


@pytest.mark.extra("published")
def test_a_published_model_is_tuned(tmp_path):
    seen = losses(run("examples/finetune.py", "--folder", str(tmp_path), "--steps", "30"))
    assert sorted(seen) == [9, 19, 29]
    assert seen[29] < seen[9]
