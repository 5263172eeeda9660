"""Random programs under every way of planning, against plain `jax.jit`.

    python -m benchmarks.random_programs --programs 1000 --seed 0 --keep    the table in results/random_programs.md
    python -m benchmarks.random_programs --programs 1 --seed 17             what becomes of program 17
    python -m benchmarks.random_programs --show 17                          its source
    python -m benchmarks.random_programs --shrink 17                        the smallest program that still fails
    ... --rules             graphs of micro-batches run on one device, without plans: much faster
    ... --forms layers      each program as layers: scanned, unrolled, checkpointed, and with cast parameters

Each program runs under the free search and some modes drawn by its seed: recipes, pins, schedules with 1 or 2 stages
and 1 to 4 micro-batches, 60 % of the free plan's memory, x64; on 2, 4 or 8 virtual CPU devices. Programs run in
processes of their own, 20 in each, so that one that aborts or hangs is a row and not the end.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

DEVICES = 8
os.environ.setdefault("JAX_PLATFORMS", "cpu")

from benchmarks.machine import CHEAP_COMPILATION, description, markdown  # noqa: E402
from benchmarks.random_programs.forms import FORMS  # noqa: E402
from benchmarks.random_programs.generator import generate  # noqa: E402
from benchmarks.random_programs.modes import KINDS, Mode, Outcome, modes_of, modes_of_rules, work  # noqa: E402
from benchmarks.random_programs.program import Program  # noqa: E402
from benchmarks.row_processes import JobProcess  # noqa: E402

os.environ.setdefault("XLA_FLAGS", f"{CHEAP_COMPILATION} --xla_force_host_platform_device_count={DEVICES}")
RESULTS = Path(__file__).parent.parent / "results" / "random_programs.md"
TIMEOUT_S = 240.0  # of one run of one program
PROGRAMS_IN_A_PROCESS = 20


class Worker:
    """A process that runs programs, started again after one that it does not survive."""

    def __init__(self) -> None:
        self._process = JobProcess(work, TIMEOUT_S)
        self._seeds: set[int] = set()

    def run(self, program: Program, mode: Mode) -> Outcome:
        if len(self._seeds | {program.seed}) > PROGRAMS_IN_A_PROCESS:
            self.close()
        self._seeds.add(program.seed)
        start_s = time.perf_counter()
        found = self._process.run((program, mode))
        if "failure" in found:
            self._seeds.clear()
            found = {"kind": "crash", "reason": found["failure"]}
        return Outcome(**found, seconds=time.perf_counter() - start_s)

    def close(self) -> None:
        self._process.close()
        self._seeds.clear()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    seed: int
    form: str
    mode: Mode
    outcome: Outcome


Modes = Callable[[Program], list[Mode]]


def run_all(seeds: Sequence[int], forms: Sequence[str], modes: Modes, workers: int) -> list[Row]:
    """Runs programs, some at a time; prints what is not equal."""
    here = threading.local()  # of each thread, its process

    def rows_of(seed: int) -> list[Row]:
        if not hasattr(here, "worker"):
            here.worker = Worker()
        rows = []
        for program in (generate(seed, form) for form in forms):
            for mode in modes(program):
                outcome = here.worker.run(program, mode)
                rows.append(Row(seed=seed, form=program.form, mode=mode, outcome=outcome))
                _report(rows[-1])
        return rows

    with ThreadPoolExecutor(workers) as pool:
        return [row for rows in pool.map(rows_of, seeds) for row in rows]


def _report(row: Row) -> None:
    if row.outcome.kind != "equal" or row.outcome.seconds > 60:
        text = f"{row.outcome.kind:8} seed {row.seed} {row.form} [{row.mode.text}] {row.outcome.seconds:.0f} s"
        print(f"{text} {row.outcome.reason}", flush=True)


def counts_of(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """The table: modes by outcomes, then forms where there are several, and seconds of a run."""
    columns = ["mode", "runs", *KINDS, "mean s"]
    by_mode: dict[str, list[Row]] = collections.defaultdict(list)
    for row in rows:
        if row.outcome.kind != "invalid":
            by_mode[row.mode.name].append(row)
    table = [[name, *_counts(some)] for name, some in sorted(by_mode.items())]
    valid = [row for some in by_mode.values() for row in some]
    forms = list(dict.fromkeys(row.form for row in valid))
    table += [[form, *_counts([row for row in valid if row.form == form])] for form in forms if len(forms) > 1]
    return columns, [*table, ["all", *_counts(valid)]]


def _counts(rows: Sequence[Row]) -> list[str]:
    kinds = collections.Counter(row.outcome.kind for row in rows)
    mean_s = sum(row.outcome.seconds for row in rows) / max(len(rows), 1)
    return [str(len(rows)), *(str(kinds[kind]) for kind in KINDS), f"{mean_s:.1f}"]


def unlike_other_forms(rows: Sequence[Row]) -> list[Row]:
    """What is refused in one form of a program and equal in another, under the same options."""
    same: dict[tuple[int, str], list[Row]] = collections.defaultdict(list)
    for row in rows:
        same[row.seed, row.mode.text].append(row)
    unlike = [some for some in same.values() if {"equal", "refused"} <= {row.outcome.kind for row in some}]
    return [row for some in unlike for row in some if row.outcome.kind == "refused"]


def page(rows: Sequence[Row], args: argparse.Namespace, seconds: float) -> str:
    columns, table = counts_of(rows)
    programs = len({row.seed for row in rows})
    failures = [row for row in rows if row.outcome.failed]
    refusals = collections.Counter(_kind_of_refusal(row) for row in rows if row.outcome.kind == "refused")
    unlike = unlike_other_forms(rows)
    forms = (f" --forms {args.forms}" if args.forms != "plain" else "") + (" --rules" if args.rules else "")
    return "\n".join(
        [
            "# Random programs against plain jax.jit",
            "",
            f"`python -m benchmarks.random_programs --programs {programs} --seed {args.seed}{forms}`:",
            f"{programs} programs, {len(rows)} runs of 2 steps each, {seconds / 60:.0f} minutes. Equal: whole numbers",
            "and NaNs the same, floats within 8 times what rounding of the arguments makes of them and 32 units",
            "in the last place of the leaf's largest. Refused: an error of autopar that names a line of code, or is",
            f"about the options alone (memory, sizes). {description()}",
            "",
            markdown(columns, table),
            "",
            "## Failures",
            "",
            *(
                f"- seed {row.seed} {row.form}, {row.mode.text}: {row.outcome.kind}: {row.outcome.reason[:300]}"
                for row in sorted(failures, key=lambda row: row.seed)
            ),
            *([] if failures else ["None."]),
            "",
            *(["## Refused in one form, equal in another", ""] if unlike else []),
            *(f"- seed {row.seed} {row.form}, {row.mode.text}: {row.outcome.reason[:200]}" for row in unlike[:40]),
            *([""] if unlike else []),
            "## Refusals",
            "",
            *(f"- {count} x {text}" for text, count in refusals.most_common(40)),
            "",
        ]
    )


def _kind_of_refusal(row: Row) -> str:
    """The error without what is the program's own: names, numbers, lines."""
    text = re.sub(r"/\S*/program_\w+\.py:\d+", "LINE", row.outcome.reason)
    return re.sub(r"\d+(\.\d+)?", "N", text)[:160]


def shrink(seed: int, form: str, modes: Modes) -> None:
    """Prints the smallest program found that fails as the program of a seed does."""
    program, worker = generate(seed, form), Worker()
    try:
        for mode in modes(program):
            outcome = worker.run(program, mode)
            print(f"# {mode.text}: {outcome.kind} {outcome.reason}", flush=True)
            if outcome.failed:
                smallest = shrunk(program, mode, outcome, worker)
                print(f"# with {mode.text}\n{smallest.source}")
                return
    finally:
        worker.close()


def shrunk(program: Program, mode: Mode, outcome: Outcome, worker: Worker) -> Program:
    """Takes the first smaller variant that fails in the same way, until there is none."""
    sign = _sign(outcome)
    while True:
        for variant in program.variants():
            if len(variant.source) >= len(program.source):
                continue
            if not (variant.loss or variant.outputs or variant.updates):
                continue
            if _sign(worker.run(variant, mode)) == sign:
                program = variant
                print(f"# {len(program.statements)} statements", flush=True)
                break
        else:
            return program


def _sign(outcome: Outcome) -> tuple[str, str]:
    """What makes two failures the same: the kind, and the exception's type or how the process ended."""
    if outcome.kind == "wrong":
        return outcome.kind, ""
    return outcome.kind, outcome.reason.split(":")[0][:40]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="of the first program; the others count on")
    parser.add_argument("--forms", default="plain", help=f"'layers', or some of {', '.join(FORMS)}")
    parser.add_argument("--drawn", type=int, default=3, help="modes of each program beside the free search")
    parser.add_argument("--rules", action="store_true", help="graphs of micro-batches on one device, without plans")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--keep", action="store_true", help=f"writes results/{RESULTS.name}")
    parser.add_argument("--show", type=int, metavar="SEED")
    parser.add_argument("--shrink", type=int, metavar="SEED")
    args = parser.parse_args()
    forms = FORMS[1:] if args.forms == "layers" else args.forms.split(",")
    if not set(forms) <= set(FORMS):
        parser.error(f"--forms {args.forms}: expected 'layers', or some of {', '.join(FORMS)}")

    def modes(program: Program) -> list[Mode]:
        return modes_of_rules(program) if args.rules else modes_of(program, args.drawn)

    if args.show is not None:
        program = generate(args.show, forms[0])
        print(program.source, *(f"# {mode.text}" for mode in modes(program)), sep="\n")
        return 0
    if args.shrink is not None:
        shrink(args.shrink, forms[0], modes)
        return 0
    start_s = time.perf_counter()
    seeds = range(args.seed, args.seed + args.programs)
    rows = run_all(seeds, forms, modes, args.workers)
    text = page(rows, args, time.perf_counter() - start_s)
    print(text)
    if args.keep:
        RESULTS.write_text(text)
    return 1 if any(row.outcome.failed for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
