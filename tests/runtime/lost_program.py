"""A program of several processes that trains a tiny model, one of which is killed or stopped at some moment.

A moment is a phase of the process ("starts" before it joins, "joins", "has joined", "makes the state", "first step",
"step 5", "ends") and a time into it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.in_processes import free_ports

ROOT = Path(__file__).parents[2]
WAIT_S = 150.0  # then they are ended
START_UP_S = 30  # jax waits so long for processes that do not come (300 s if it is not told)
STEPS = 15


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ended:
    """How a process ended: its exit code, seconds after the other was lost, and the error that names it."""

    code: int
    seconds: float
    error: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """What is done to which process."""

    processes: int
    stages: int
    victim: int
    signal: str
    phase: str
    after_s: float


def run(case: Case, folder: Path) -> tuple[str, list[Ended]] | None:
    """The phase in which the process was, and how the others ended; None where it had ended before its moment."""
    coordinator, *ports = free_ports(case.processes + 1)
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    environment |= {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": "1"}
    running, logs = [], [folder / f"log{i}" for i in range(case.processes)]
    for i, log in enumerate(logs):
        task = {
            "process": i,
            "processes": case.processes,
            "stages": case.stages,
            "coordinator": f"127.0.0.1:{coordinator}",
            "address": f"127.0.0.1:{ports[i]}",
        }
        command = [sys.executable, "-m", "tests.runtime.lost_program", json.dumps(task)]
        with log.open("w") as file:
            running.append(subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT, cwd=ROOT))
    victim = running[case.victim]
    try:
        deadline = time.monotonic() + 120.0
        reached = case.phase == "starts"
        while not reached and victim.poll() is None and time.monotonic() < deadline:
            reached = f"phase: {case.phase}\n" in logs[case.victim].read_text()
            time.sleep(0.01)
        time.sleep(case.after_s)
        if victim.poll() is not None or not reached:
            return None
        victim.send_signal(getattr(signal, case.signal))
        phase = (["starts", *re.findall("phase: (.*)\n", logs[case.victim].read_text())])[-1]
        lost_at = time.monotonic()
        others = {i: p for i, p in enumerate(running) if i != case.victim}
        seconds: dict[int, float] = {}
        while len(seconds) < len(others) and time.monotonic() < lost_at + WAIT_S:
            for i, p in others.items():
                if i not in seconds and p.poll() is not None:
                    seconds[i] = time.monotonic() - lost_at
            time.sleep(0.05)
        for i, p in others.items():
            if i not in seconds:
                p.send_signal(signal.SIGUSR1)  # its log tells where it stands
        time.sleep(1.0)
    finally:
        for p in running:
            p.send_signal(signal.SIGKILL)
            p.wait()
    return phase, [
        Ended(
            code=p.returncode,
            seconds=seconds.get(i, WAIT_S),
            error=error_in(logs[i].read_text(), case.victim, p.returncode),
        )
        for i, p in others.items()
    ]


def error_in(log: str, victim: int, code: int) -> str:
    """What an error of autopar says of a process, empty where none names it; "done" where none was needed any more."""
    named = re.search(rf"ProcessLostError: .*got process {victim} ([^\n]*)", log)
    if named is not None:
        return named[1]
    return "done" if "phase: ends\n" in log and code == 0 else ""


def child(task: dict) -> None:
    """Trains a tiny model, and says how far it is."""

    def phase(name: str) -> None:
        print(f"phase: {name}", flush=True)

    import faulthandler

    import jax

    import autopar

    faulthandler.register(signal.SIGUSR1, all_threads=True)
    jax.config.update("jax_num_cpu_devices", 2 if task["stages"] == 1 or task["processes"] == 2 else 1)
    jax.config.update("jax_cross_host_transfer_socket_address", task["address"])
    phase("joins")
    autopar.distributed.initialize(
        task["coordinator"], task["processes"], task["process"], initialization_timeout=START_UP_S
    )
    phase("has joined")
    jax.devices()
    from tests.small_steps import mlp_batch, mlp_state, mlp_step

    recipe = autopar.recipes.pipeline(2, "1f1b", num_microbatches=2) if task["stages"] == 2 else None
    step = autopar.parallelize(mlp_step, plan=recipe, batch="local", cache_dir=None)
    phase("makes the state")
    state = step.init(mlp_state, jax.random.key(0))
    for i in range(STEPS):
        phase(f"step {i}" if i else "first step")
        state, metrics = step(state, mlp_batch(8, seed=task["process"]))
        float(metrics["loss"])
        time.sleep(0.2)
    phase("ends")


if __name__ == "__main__":
    child(json.loads(sys.argv[1]))
