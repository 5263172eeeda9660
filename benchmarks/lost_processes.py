"""Kills or stops one process of a program of several, at random moments, and looks how the others end.

    python -m benchmarks.lost_processes                  # 50 programs, about 40 minutes on two cores
    python -m benchmarks.lost_processes --programs 5 --seed 7 --keep
    python -m benchmarks.lost_processes --again ends     # the rows of this phase in the kept table, at other moments

Each program trains a tiny model on CPU devices, after `autopar.distributed.initialize`. A moment is a phase of the
process, from its start to its end, and a time into it. `--keep` and `--again` write
benchmarks/results/lost_processes.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "lost_processes.md"

LIMIT_S = 60.0  # in which all others are to end
WAIT_S = 150.0  # then they are ended
START_UP_S = 30  # jax waits so long for processes that do not come (300 s if it is not told)
STEPS = 15
UNNAMED = "NOTHING"  # where an error should name the process
# Phases as a process says them, and for how long one may look at each before the process is killed.
PHASES = {
    "starts": 2.0,  # Python and imports: it never joins
    "joins": 1.0,
    "has joined": 1.0,  # looks for its devices
    "makes the state": 1.0,
    "first step": 8.0,  # traces, plans in process 0, compiles, runs
    "step 1": 2.0,
    "step 5": 2.0,
    "ends": 0.3,  # leaves jax's barrier
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ended:
    """How a process ended: its exit code, seconds after the other was lost, and the error that names it."""

    code: int
    seconds: float
    error: str

    @property
    def is_right(self) -> bool:
        return self.seconds <= LIMIT_S and bool(self.error)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """What is done to which process."""

    processes: int
    stages: int
    victim: int
    signal: str
    phase: str
    after_s: float


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for s in sockets:
            s.bind(("127.0.0.1", 0))
        return [s.getsockname()[1] for s in sockets]


def random_case(random_: random.Random) -> Case:
    processes, phase = random_.choice((2, 2, 3, 4)), random_.choice(list(PHASES))
    return Case(
        processes=processes,
        stages=random_.choice((1, 2)) if processes != 3 else 1,
        victim=random_.choice((0, random_.randrange(processes))),
        signal=random_.choice(("SIGKILL", "SIGSTOP")),
        phase=phase,
        after_s=random_.random() * PHASES[phase],
    )


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
        command = [sys.executable, "-m", "benchmarks.lost_processes", "--child", json.dumps(task)]
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


def row_of(case: Case, phase: str, others: Sequence[Ended]) -> str:
    """A row of Markdown: a program."""
    seconds = ", ".join(f"{e.seconds:.0f}" for e in others)
    codes = ", ".join(str(e.code) for e in others)
    said = "; ".join(dict.fromkeys(e.error if e.is_right else UNNAMED for e in others))
    return (
        f"| {case.processes} | {case.stages} | {case.victim} | {case.signal} | {phase} "
        f"| {seconds} | {codes} | {said[:160]} |"
    )


def keep(rows: Sequence[str], again: str | None = None) -> str:
    """Writes the table, and gives its summary."""
    seconds = [float(s) for row in rows for s in row.split(" | ")[5].split(", ")]
    unnamed = sum(UNNAMED in row for row in rows)
    text = (
        f"{len(rows)} programs, a process of each lost; {len(seconds)} others. In {unnamed} programs one did "
        f"not end within {LIMIT_S:.0f} s with an error that names it; the last ended after {max(seconds):.0f} s."
    )
    how = "`python -m benchmarks.lost_processes --keep`; `done`: it had run all its steps, and ended as it should."
    if again is not None:
        how += f" The rows of the phase {again!r} were made later, with `--again`."
    head = [
        "| processes | stages | lost | by | in phase | others ended after, s | exit codes | saying of it |",
        "|---|---|---|---|---|---|---|---|",
    ]
    RESULTS.write_text("\n".join(["# Processes that are lost", "", how, "", text, "", *head, *rows]) + "\n")
    return text


def kept_rows() -> list[str]:
    return [row for row in RESULTS.read_text().splitlines() if re.match(r"\| \d", row)]


def like(row: str, random_: random.Random) -> Case:
    """The case of a row, at another moment of its phase."""
    processes, stages, victim, name, phase = row.strip("| ").split(" | ")[:5]
    return Case(
        processes=int(processes),
        stages=int(stages),
        victim=int(victim),
        signal=name,
        phase=phase,
        after_s=random_.random() * PHASES[phase],
    )


def make_row(draw: Callable[[], Case]) -> str:
    """Runs a case, or the next where its process had ended before its moment."""
    while True:
        case = draw()
        with tempfile.TemporaryDirectory() as folder:
            ended = run(case, Path(folder))
            if ended is None:
                continue
            row = row_of(case, *ended)
            print(row, flush=True)
            if UNNAMED in row:
                print("\n".join(log.read_text()[-2500:] for log in sorted(Path(folder).iterdir())), flush=True)
            return row


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
    step = autopar.parallelize(mlp_step, plan=recipe, batch="local", cache_dir=None, show_progress=False)
    phase("makes the state")
    state = step.init(mlp_state, jax.random.key(0))
    for i in range(STEPS):
        phase(f"step {i}" if i else "first step")
        state, metrics = step(state, mlp_batch(8, seed=task["process"]))
        float(metrics["loss"])
        time.sleep(0.2)
    phase("ends")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--again", choices=list(PHASES), metavar="PHASE")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        child(json.loads(options.child))
        return
    random_ = random.Random(options.seed)
    if options.again:
        rows = [
            make_row(lambda row=row: like(row, random_)) if row.split(" | ")[4] == options.again else row
            for row in kept_rows()
        ]
        print(keep(rows, options.again))
        return
    rows = [make_row(lambda: random_case(random_)) for _ in range(options.programs)]
    if options.keep:
        print(keep(rows))


if __name__ == "__main__":
    main()
