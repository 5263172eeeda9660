"""`benchmarks.accelerator` on a CPU device, and the rows of processes that it keeps one by one."""

import json
import os
import subprocess
import sys

import pytest

from benchmarks import accelerator, row_processes


def run(results, *arguments):
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "benchmarks.accelerator", *arguments, "--small", "--results", str(results)]
    return subprocess.run(command, cwd=row_processes.ROOT, env=environment, capture_output=True, text=True, timeout=600)


@pytest.mark.slow
def test_a_model_on_a_cpu_device_is_measured_and_kept_and_not_run_again(tmp_path):
    first = run(tmp_path, "lstm")
    assert first.returncode == 0, first.stdout + first.stderr
    kept = json.loads((tmp_path / "accelerator.json").read_text())
    assert list(kept) == ["lstm"]
    row = kept["lstm"]
    assert row["difference"] <= row["tolerance"] == 1e-5
    assert row["measured_s"] > 0
    assert row["predicted_s"].keys() == {"preset", "step"}
    assert all(seconds > 0 for seconds in row["predicted_s"].values())
    assert "dot_general of float32" in {times["kind"] for times in row["operation_times"]}
    assert row["predicted_bytes"] == pytest.approx(row["compiled_bytes"], rel=0.25)
    assert row["device_bytes"] is None
    assert row["device"] == "cpu (cpu)"
    assert "| lstm | " in (tmp_path / "accelerator.md").read_text()
    assert "lstm: done" in first.stdout
    assert "lstm: done" not in run(tmp_path, "lstm").stdout


def test_every_model_with_attention_has_both_rows():
    assert accelerator.ROWS == (
        "constants", "gpt", "gpt blockwise", "llama", "llama blockwise", "moe", "moe blockwise", "bert",
        "bert blockwise", "resnet", "lstm", "offload", "tune", "other sizes",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("row", "kept"),
    [
        (None, False),
        ({"measured_s": 1.0, "small": True}, True),
        ({"measured_s": 1.0, "small": False}, False),
        ({"failure": "died"}, False),
    ],
)
def test_what_failed_or_has_other_sizes_is_run_again(row, kept):
    assert accelerator.is_kept(row, small=True) is kept


def test_a_process_that_dies_leaves_its_last_words(tmp_path):
    assert row_processes.in_fresh_process("benchmarks.no_such_module", [], 60.0) == {
        "failure": f"{sys.executable}: No module named benchmarks.no_such_module"
    }


def test_a_process_that_takes_too_long_is_ended():
    assert row_processes.in_fresh_process("http.server", ["0"], 1.0) == {"failure": "more than 1 s"}


def test_rows_are_kept_whole_and_a_failed_row_is_not_done(tmp_path):
    path = tmp_path / "deeper" / "rows.json"
    assert row_processes.load(path) == {}
    rows = {"a": {"value": 1}, "b": {"failure": "died"}}
    row_processes.keep(path, rows)
    assert row_processes.load(path) == rows
    assert [path.name] == [p.name for p in path.parent.iterdir()]
    assert [row_processes.is_done(rows.get(name)) for name in ("a", "b", "c")] == [True, False, False]
