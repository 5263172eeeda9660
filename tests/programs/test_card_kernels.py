"""`benchmarks.card_kernels`: its steps run on what they return, at both sizes, and a row of it on a CPU device."""

import os
import subprocess
import sys

import jax
import pytest

from benchmarks import card_kernels, row_processes


@pytest.mark.parametrize("name", card_kernels.STEPS)
def test_a_step_returns_arrays_like_its_operands(name):
    kernels = card_kernels.STEPS[name]()
    for made in (kernels, kernels.smaller()):
        operands = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in made.operands]
        results = jax.eval_shape(made.step, *operands)
        assert [(x.shape, x.dtype) for x in results] == [(x.shape, x.dtype) for x in operands]
    assert kernels.smaller().operands != kernels.operands or not kernels.shortened


@pytest.mark.slow
def test_a_row_is_predicted_measured_and_kept(tmp_path):
    command = [
        sys.executable,
        "-m",
        "benchmarks.card_kernels",
        "scaled",
        "--small",
        "--keep",
        str(tmp_path / "page.md"),
    ]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, cwd=row_processes.ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("scaled | float32[128, 8192] | ")
    assert "| scaled | float32[128, 8192] | " in (tmp_path / "page.md").read_text()
