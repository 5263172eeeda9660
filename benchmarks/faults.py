"""Kills, stops and resizes a training run under the launcher, at random moments, and looks how it goes on.

    python -m benchmarks.faults                                      # 20 kills, 5 stops, 2 elastic runs
    python -m benchmarks.faults --kills 3 --stops 0 --elastic 0 --seed 7
    python -m benchmarks.faults --keep

The program is `benchmarks.faults_training`, on CPU devices. It must end with success, with the losses of an undisturbed
run: to the last bit for the same number of processes, to 1e-5 where the number changes. Of each fault the table has the
seconds until the other processes had ended, and until the next start had ended a step. How processes end that no
launcher watches is measured by `benchmarks.lost_processes`. `--keep` writes benchmarks/results/faults.md.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.machine import description, markdown

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "faults.md"
COLUMNS = ("processes", "fault", "process", "moment", "others ended after, s", "next step after, s", "named as first")

PROCESSES = 2
STEPS = 120
LIMIT_S = 60.0  # in which the others are to end
RUN_LIMIT_S = 900.0
LATEST_S = 9.0  # a fault comes at most so long after a start: it begins to train after about 5 s
IN_A_SAVE = 0.25  # of the kills
SIGNALS = ("SIGKILL", "SIGKILL", "SIGKILL", "SIGSEGV", "SIGABRT")
TOLERANCE = 1e-5


@dataclasses.dataclass(kw_only=True)
class Fault:
    """One fault, and what came of it. `moment` is seconds after a start of the processes, or "save"."""

    processes: int
    name: str
    process: int
    moment: str
    ended_s: float | None = None
    resumed_s: float | None = None
    named: bool = False

    @property
    def is_right(self) -> bool:
        return self.ended_s is not None and self.ended_s <= LIMIT_S and self.named

    def row(self) -> list[str]:
        seconds = ["never" if s is None else f"{s:.0f}" for s in (self.ended_s, self.resumed_s)]
        return [str(self.processes), self.name, str(self.process), self.moment, *seconds, "yes" if self.named else "NO"]


class Run:
    """The program under the launcher."""

    def __init__(self, folder: Path, processes: int, *options: str) -> None:
        self.folder = folder
        environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
        environment |= {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
        program = [str(ROOT / "benchmarks" / "faults_training.py"), str(folder), str(STEPS)]
        self._log = folder / "log"
        with self._log.open("w") as log:
            self._popen = subprocess.Popen(
                [sys.executable, "-m", "autopar.launch", "--processes", str(processes), *options, *program],
                env=environment,
                cwd=ROOT,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    @property
    def code(self) -> int | None:
        return self._popen.poll()

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def children(self) -> dict[int, int]:
        """The process numbers of running processes, with their pids."""
        found = {}
        with contextlib.suppress(OSError):
            for pid in Path(f"/proc/{self._popen.pid}/task/{self._popen.pid}/children").read_text().split():
                with contextlib.suppress(OSError, ValueError):  # it has just been started, or has ended
                    environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                    (number,) = [e.split(b"=")[1] for e in environment if e.startswith(b"AUTOPAR_PROCESS_ID=")]
                    if is_running(int(pid)):
                        found[int(number)] = int(pid)
        return found

    def losses(self) -> list[tuple[int, float, int, int]]:
        """(step, loss, processes, restart) in the order in which they were seen; a line may have been cut off."""
        try:
            lines = (self.folder / "losses").read_text().splitlines(keepends=True)
        except OSError:
            return []
        parts = [line.split() for line in lines if line.endswith("\n")]
        return [(int(step), float.fromhex(loss), int(count), int(restart)) for step, loss, count, restart in parts]

    def wait(self) -> int:
        return self._popen.wait(RUN_LIMIT_S)

    def end(self) -> None:
        self._popen.kill()
        self._popen.wait()


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def await_(condition: Callable[[], bool], limit_s: float) -> float | None:
    """Seconds until it held; None where it has not in time."""
    begun = time.monotonic()
    while not condition():
        if time.monotonic() > begun + limit_s:
            return None
        time.sleep(0.005)
    return time.monotonic() - begun


@contextlib.contextmanager
def running(processes: int, *options: str, cache: Path | None = None) -> Iterator[Run]:
    with tempfile.TemporaryDirectory(prefix="autopar-faults-") as folder:
        if cache is not None:  # one plan for all: the same losses to the last bit
            (Path(folder) / "cache").symlink_to(cache)
        run = Run(Path(folder), processes, *options)
        try:
            yield run
        finally:
            run.end()


def disturb(run: Run, processes: int, name: str, random_: random.Random) -> Fault | None:
    """Does one fault, and waits until the program goes on; None where it ended before."""
    if (
        await_(lambda: len(run.children()) == processes or run.code is not None, LIMIT_S) is None
        or run.code is not None
    ):
        return None
    in_a_save = name != "SIGSTOP" and random_.random() < IN_A_SAVE
    moment_s = random_.random() * LATEST_S
    if in_a_save:
        (run.folder / "saving").unlink(missing_ok=True)
        await_(lambda: (run.folder / "saving").exists() or run.code is not None, LIMIT_S)
        time.sleep(random_.random() * 0.1)
    else:
        time.sleep(moment_s)
    children = run.children()
    if run.code is not None or len(children) < processes:
        return None
    victim = random_.choice((0, random_.randrange(processes)))
    fault = Fault(processes=processes, name=name, process=victim, moment="save" if in_a_save else f"{moment_s:.1f}")
    before, said = len(run.losses()), run.log.count("failed first")
    last_restart = max((restart for *_, restart in run.losses()), default=-1)
    os.kill(children[victim], getattr(signal, name))
    begun = time.monotonic()
    others = [pid for process, pid in children.items() if process != victim]
    fault.ended_s = await_(lambda: not any(map(is_running, others)), 2 * LIMIT_S)
    await_(lambda: run.log.count("failed first") > said or run.code is not None, LIMIT_S)
    fault.named = f"process {victim} failed first" in (
        run.log.split("autopar.launch: starts")[said] if said else run.log
    )
    await_(lambda: run.code is not None or any(r > last_restart for *_, r in run.losses()[before:]), 2 * LIMIT_S)
    fault.resumed_s = time.monotonic() - begun
    return fault


def check(run: Run, undisturbed: dict[int, float], tolerance: float) -> str:
    """What is wrong with the losses of a run that has ended; empty where nothing is."""
    code = run.wait()
    if code != 0:
        return f"exit code {code}\n{run.log[-3000:]}"
    seen: set[int] = set()
    for step, loss, _, _ in run.losses():
        if abs(loss - undisturbed[step]) > tolerance * abs(undisturbed[step]):
            return f"step {step}: loss {loss!r} instead of {undisturbed[step]!r}"
        seen.add(step)
    missing = set(range(STEPS)) - seen
    # A step may end without process 0 having written it down; the next steps show that it was right.
    return f"steps {sorted(missing)} were not seen" if len(missing) > STEPS // 10 else ""


def undisturbed_losses(processes: int, cache: Path) -> dict[int, float]:
    with running(processes, cache=cache) as run:
        assert run.wait() == 0, run.log
        return {step: loss for step, loss, _, _ in run.losses()}


def disturbed(count: int, names: tuple[str, ...], cache: Path, random_: random.Random) -> tuple[list[Fault], list[str]]:
    """Faults in runs, several in each, and what was wrong with the losses."""
    undisturbed = undisturbed_losses(PROCESSES, cache)
    faults: list[Fault] = []
    wrong: list[str] = []
    while len(faults) < count:
        with running(PROCESSES, "--restarts", "100", cache=cache) as run:
            while run.code is None and len(faults) < count:
                fault = disturb(run, PROCESSES, random_.choice(names), random_)
                if fault is not None:
                    faults.append(fault)
                    print(" | ".join(fault.row()), flush=True)
                    if not fault.is_right:
                        print(run.log[-4000:], flush=True)
            wrong.append(check(run, undisturbed, 0.0))
            print("a run has ended", wrong[-1] or "with the losses of an undisturbed one", flush=True)
    return faults, [w for w in wrong if w]


def elastic(count: int, cache: Path, random_: random.Random) -> tuple[list[str], list[str]]:
    """Runs of 4, 2 and again 4 processes: a line on each, and what was wrong."""
    undisturbed, told, wrong = undisturbed_losses(4, cache), [], []
    for _ in range(count):
        with (
            tempfile.NamedTemporaryFile("w", suffix=".size") as size,
            running(4, "--elastic", "2:4", "--size-file", size.name, cache=cache) as run,
        ):
            for restart, (number, share) in enumerate(((2, 1 / 3), (4, 2 / 3))):
                at = int(STEPS * (share + (random_.random() - 0.5) / 5))
                await_(lambda r=restart, at=at: run.code is not None or has_reached(run, r, at), RUN_LIMIT_S)
                Path(size.name).write_text(f"{number}\n")
            wrong.append(check(run, undisturbed, TOLERANCE) or unlike_4_2_4(run))
            losses = run.losses()
            largest = max(abs(loss - undisturbed[s]) / abs(undisturbed[s]) for s, loss, _, _ in losses)
            firsts = {restart: (s, n) for s, _, n, restart in reversed(losses)}
            begins = ", ".join(f"{n} from step {s}" for _, (s, n) in sorted(firsts.items()))
            told.append(f"processes: {begins}; losses differ by at most {largest:.1e}")
            print(told[-1], wrong[-1] or "right", flush=True)
    return told, [w for w in wrong if w]


def has_reached(run: Run, restart: int, step: int) -> bool:
    return any(s >= step and r == restart for s, _, _, r in run.losses())


def unlike_4_2_4(run: Run) -> str:
    numbers = [number for _, number in sorted({(r, number) for _, _, number, r in run.losses()})]
    return "" if numbers == [4, 2, 4] else f"ran in {numbers} processes"


def page(faults: list[Fault], told: list[str], wrong: list[str]) -> str:
    in_time = [f for f in faults if f.is_right]
    longest_s = max((f.ended_s or float("inf") for f in faults), default=0.0)
    lines = [
        "# Faults under the launcher",
        "",
        f"`python -m benchmarks.faults {' '.join(sys.argv[1:])}`; {description()}",
        "",
        f"{len(faults)} faults, {len(in_time)} of which ended all other processes within {LIMIT_S:.0f} s with the lost "
        f"one named as first; the longest time was {longest_s:.0f} s. Runs whose losses were not those of an "
        f"undisturbed one: {len(wrong)}{': ' + '; '.join(wrong) if wrong else ''}.",
        "",
        *(f"- {line}" for line in told),
        "",
        markdown(COLUMNS, [fault.row() for fault in faults]),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--stops", type=int, default=5)
    parser.add_argument("--elastic", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", action="store_true")
    options = parser.parse_args()
    random_ = random.Random(options.seed)
    faults: list[Fault] = []
    told: list[str] = []
    wrong: list[str] = []
    with tempfile.TemporaryDirectory(prefix="autopar-faults-cache-") as cache:
        for count, names in ((options.kills, SIGNALS), (options.stops, ("SIGSTOP",))):
            if count:
                found, differing = disturbed(count, names, Path(cache), random_)
                faults, wrong = faults + found, wrong + differing
        if options.elastic:
            told, differing = elastic(options.elastic, Path(cache), random_)
            wrong += differing
    text = page(faults, told, wrong)
    print(text)
    if options.keep:
        RESULTS.write_text(text)


if __name__ == "__main__":
    main()
