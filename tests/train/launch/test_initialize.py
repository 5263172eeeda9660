"""`autopar.initialize`: alone, under the launcher, under Slurm and Open MPI; real processes are slow tests."""

import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest

import autopar
from autopar.common.launched import VARIABLES
from autopar.errors import InvalidArgumentError
from autopar.initialization import binding
from autopar.train.launch.placement import free_ports
from tests.train.launch.launching import ROOT, launch

TRAIN = """
import os, signal, sys, time
import jax
import jax.numpy as jnp
import numpy as np
import autopar

autopar.initialize(initialization_timeout=60)
autopar.initialize()  # does nothing
who = jax.process_index()


@autopar.parallelize(
    plan=autopar.recipes.data_parallel(), batch="global", cache_dir=None
)
def step(weights, batch):
    loss, gradient = jax.value_and_grad(lambda w: jnp.mean((batch @ w) ** 2))(weights)
    return weights - 0.1 * gradient, {"loss": loss}


print("devices", len(jax.local_devices()), "of", len(jax.devices()), flush=True)
weights = step.init(lambda: jnp.ones((8, 8)))
restart = int(os.environ.get("AUTOPAR_RESTART", 0))
for i in range(12):
    if restart == 0 and i == 6 and sys.argv[1:] == ["kill", str(who)]:
        os.kill(os.getpid(), signal.SIGKILL)
    if i == 6 and sys.argv[1:] == ["raise", str(who)]:
        raise ValueError("no data")
    if i == 6 and sys.argv[1:] == ["sleep", str(who)]:
        time.sleep(600)
    weights, metrics = step(weights, np.full((16, 8), 0.1 * (i + 1), np.float32))
    print(f"step {i} {float(metrics['loss']):.5f}", flush=True)
    time.sleep(0.1)
"""


@pytest.fixture
def script(tmp_path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(TRAIN)
    return path


def losses(text: str) -> list[float]:
    return [float(line.split()[-1]) for line in steps(text)]


def steps(text: str) -> list[str]:
    """Lines on steps, without the numbers of processes."""
    return [line.split("] ")[-1] for line in text.splitlines() if "step " in line and "Error" not in line]


def alone(script: Path, **variables: str) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if name not in (*VARIABLES, "XLA_FLAGS")}
    environment |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)} | variables
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, script], env=environment, stdout=pipe, stderr=subprocess.STDOUT, text=True)


def test_a_single_process_joins_nobody(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    autopar.initialize()
    assert jax.process_count() == 1


def test_who_has_joined_joins_no_second_time(monkeypatch):
    launched = {"AUTOPAR_COORDINATOR": "127.0.0.1:9", "AUTOPAR_NUM_PROCESSES": "2", "AUTOPAR_PROCESS_ID": "1"}
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("autopar.common.jax_distributed.shared_store", object)
    monkeypatch.setattr("autopar.distributed.initialize", lambda *_, **__: pytest.fail("joined again"))
    autopar.initialize()


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"AUTOPAR_COORDINATOR": "127.0.0.1:9"}, "AUTOPAR_NUM_PROCESSES"),
        (
            {"AUTOPAR_COORDINATOR": "a:9", "AUTOPAR_NUM_PROCESSES": "2", "AUTOPAR_PROCESS_ID": "x"},
            "AUTOPAR_PROCESS_ID=x",
        ),
    ],
    ids=["missing", "no number"],
)
def test_wrong_variables_are_refused(monkeypatch, variables, said):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InvalidArgumentError, match=said):
        autopar.initialize()


def test_process_0_listens_on_loopback_where_nobody_else_comes_from(monkeypatch):
    assert binding("localhost:80") == {"coordinator_bind_address": "127.0.0.1:80"}
    assert binding("127.0.0.1:80") == {"coordinator_bind_address": "127.0.0.1:80"}
    assert binding("10.0.0.1:80") == {}
    monkeypatch.setenv("JAX_COORDINATOR_BIND_ADDRESS", "0.0.0.0:80")
    assert binding("127.0.0.1:80") == {}


@pytest.mark.slow
def test_the_same_script_runs_alone_and_in_processes_of_several_devices(script):
    process = alone(script)
    expected, _ = process.communicate(timeout=100)
    assert len(steps(expected)) == 12, expected
    for processes, devices in ((2, 2), (1, 4)):
        ended = launch("--processes", processes, "--devices-per-process", devices, script, limit_s=100.0)
        assert ended.code == 0, ended.stderr
        assert f"[0] devices {devices} of {processes * devices}" in ended.stdout
        for process_number in range(processes):
            own = "\n".join(line for line in ended.stdout.splitlines() if line.startswith(f"[{process_number}] step"))
            # Of four devices the sums are of another order: float32 differs in its last bit.
            assert losses(own) == pytest.approx(losses(expected), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_process_that_is_killed_is_named_and_all_start_again(script, victim):
    ended = launch("--processes", 2, "--restarts", 1, script, "kill", victim, limit_s=120.0)
    assert ended.code == 0, ended.stderr
    assert f"process {victim} failed first: killed by SIGKILL" in ended.stderr
    assert f"got process {victim}" in ended.stderr
    assert "starts 2 processes again in 1 s (restart 1)" in ended.stderr


@pytest.mark.slow
def test_an_exception_is_on_top_though_its_process_ends_last(script):
    ended = launch("--processes", 2, script, "raise", 1, limit_s=120.0)
    assert ended.code == 1
    report = ended.stderr[ended.stderr.index("autopar.launch: ") :].splitlines()
    assert report[0] == "autopar.launch: process 1 failed first: exit code 1"
    assert report[-2] == "autopar.launch:   [1] ValueError: no data"
    assert "got process 1 ended on an exception" in ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_process_that_is_alive_but_stuck_is_named_within_a_minute(script, victim):
    ended = launch("--processes", 2, script, "sleep", victim, limit_s=120.0)
    assert ended.code == 1
    assert f"process {victim} failed first" in ended.stderr
    assert f"got process {victim} is alive but has stood still for 4" in ended.stderr
    assert re.search(r"train\.py:\d+ in <module>", ended.stderr)
    assert ended.seconds < 75.0  # with its start


@pytest.mark.slow
@pytest.mark.parametrize("manager", ["slurm", "open mpi"])
def test_processes_of_a_cluster_find_each_other(script, manager):
    number = free_ports(1)[0] % 4096  # of the job; JAX makes a port of it
    running = []
    for i in range(2):
        slurm = {
            "SLURM_JOB_ID": str(number),
            "SLURM_STEP_NODELIST": "localhost",
            "SLURM_NTASKS": "2",
            "SLURM_PROCID": str(i),
            "SLURM_LOCALID": str(i),
        }
        ompi = {
            "OMPI_MCA_orte_hnp_uri": f"{number * 4096}.0;tcp://127.0.0.1:34911",
            "OMPI_COMM_WORLD_SIZE": "2",
            "OMPI_COMM_WORLD_RANK": str(i),
            "OMPI_COMM_WORLD_LOCAL_RANK": str(i),
        }
        running.append(alone(script, **(slurm if manager == "slurm" else ompi)))
    try:
        texts = [process.communicate(timeout=100)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0, 0], texts
    assert all("devices 1 of 2" in text for text in texts)
    assert steps(texts[0]) == steps(texts[1])
