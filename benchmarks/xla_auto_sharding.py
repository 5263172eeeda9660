"""Our plans beside those of XLA's own auto-sharding pass: bytes sent, peak memory, time to decide.

    bash scripts/frozen_xla.sh                       makes both environments, then runs this in them
    bash scripts/frozen_xla.sh --keep                also keeps the table in results/xla_auto_sharding.md
    bash scripts/frozen_xla.sh one_layer_gpt --limit-s 1200

The pass is gone: jax dropped `AUTO` after 0.10.0, and OpenXLA the pass in 2026. It still runs with jax 0.10.0 and
libtpu 0.0.40, in an environment of its own (`FROZEN_PYTHON`; see `benchmarks.frozen_auto_sharding`). Both plan the
steps of `benchmarks.plain_steps` for the same slices and both programs are compiled for them, each by the libtpu of its
environment; what they send is read off their texts by one reader, memory is what the compiler says. Nothing is run.

The pass plans for the mesh that it is given, and may use twice the least memory that it finds possible. We choose the
mesh too, are told that all links are equal, so that plans rank by what they send, and are given the pass's peak as our
limit, so that memory is not traded for traffic on one side only.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from rich.console import Console
from rich.table import Table

from benchmarks.machine import description, markdown

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results" / "xla_auto_sharding.md"
# Step -> slice, mesh of the pass.
CASES = {
    "mlp": (("v5e:2x4", "2x4"),),
    "one_layer_gpt": (("v5e:2x4", "2x4"), ("v5p:2x2x2", "2x4")),
    "one_layer_moe": (("v5e:2x4", "2x4"),),
}
CLOCK_PER_PROCESSOR = 4.0  # on a machine that others use too
KINDS = ("all-reduce", "reduce-scatter", "all-gather", "all-to-all", "collective-permute")
COLUMNS = ("step", "slice", "planner", "mesh", "sent, MB", *KINDS, "peak, MB", "decided in, s", "of processor time, s")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """A planner's program for one step. Bytes are sent by one device in a step."""

    step: str
    topology: str
    planner: str
    mesh: str
    bytes_by_kind: dict[str, float] = dataclasses.field(default_factory=dict)
    peak_bytes: int = 0
    decided_s: tuple[float, float] = (0.0, 0.0)
    failure: str = ""


def _limited(limit_s: float) -> Callable[[], None]:
    """For a child to call first: the system ends it after so many seconds of the processor, however busy it is."""
    return lambda: resource.setrlimit(resource.RLIMIT_CPU, (int(limit_s), int(limit_s)))


def of_the_pass(step: str, topology: str, mesh: str, python: str, limit_s: float) -> Row:
    """Has the pass plan, in its own environment, and reads what came out."""
    from autopar.xla.aot_tpu import NO_SLICE

    empty = Row(step=step, topology=topology, planner="XLA's pass", mesh=mesh)
    with tempfile.TemporaryDirectory(prefix="xla-auto-sharding-") as folder:
        output = Path(folder) / "found.json"
        command = [python, "-m", "benchmarks.frozen_auto_sharding", step, topology, mesh, f"{limit_s:.0f}", str(output)]
        environment = {**os.environ, **NO_SLICE, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
        environment.pop("TPU_LIBRARY_PATH", None)  # our libtpu, which has no such pass: jax sets it on import
        try:
            child = subprocess.run(
                command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
                timeout=CLOCK_PER_PROCESSOR * limit_s, preexec_fn=_limited(limit_s),
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return dataclasses.replace(empty, failure=f"no plan in {CLOCK_PER_PROCESSOR * limit_s:.0f} s of the clock")
        if -child.returncode in (signal.SIGXCPU, signal.SIGKILL):
            return dataclasses.replace(empty, failure=f"no plan in {limit_s:.0f} s of processor time")
        if child.returncode:
            return dataclasses.replace(empty, failure=last_words(child.stderr))
        found = json.loads(output.read_text())
    with_pass, without = found["compile_with_pass_s"], found["compile_without_pass_s"]
    return dataclasses.replace(
        empty,
        bytes_by_kind=bytes_by_kind(found["text"]),
        peak_bytes=found["peak_bytes"],
        decided_s=(with_pass[0] - without[0], with_pass[1] - without[1]),
    )


def of_ours(step: str, topology: str, memory_limit_bytes: int | None) -> Row:
    """Plans and compiles in this process."""
    import autopar
    from autopar.verification import compile_for_target, peak_bytes
    from benchmarks.plain_steps import STEPS

    case = STEPS[step]()
    slice_ = autopar.Cluster.preset(f"tpu-{topology.partition(':')[0]}", topology=topology.partition(":")[2])
    parallel = autopar.parallelize(
        case.step,
        cluster=autopar.Cluster.flat(slice_.num_devices, device=slice_.device, links=(slice_.inside_host,)),
        donate_argnums=(0, 1),
        batch_argnums=(2,),
        memory_limit_bytes=memory_limit_bytes,
        cache_dir=None,
        show_progress=False,
    )
    begun = time.perf_counter(), time.process_time()
    plan = parallel.plan(*case.args)
    decided_s = time.perf_counter() - begun[0], time.process_time() - begun[1]
    compiled = compile_for_target(parallel, f"tpu:{topology}", *case.args)
    return Row(
        step=step,
        topology=topology,
        planner="ours",
        mesh="x".join(map(str, plan.mesh.axis_sizes)),
        bytes_by_kind=bytes_by_kind(compiled.as_text()),
        peak_bytes=peak_bytes(compiled),
        decided_s=decided_s,
    )


def of_ours_in_fresh_process(step: str, topology: str, memory_limit_bytes: int | None, limit_s: float) -> Row:
    """A fresh process has nothing compiled or traced before, as the pass's has not."""
    empty = Row(step=step, topology=topology, planner="ours", mesh="")
    asked = {"step": step, "topology": topology, "memory_limit_bytes": memory_limit_bytes}
    command = [sys.executable, "-m", "benchmarks.xla_auto_sharding", "--child", json.dumps(asked)]
    try:
        child = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=CLOCK_PER_PROCESSOR * limit_s
        )
    except subprocess.TimeoutExpired:
        return dataclasses.replace(empty, failure=f"no program in {CLOCK_PER_PROCESSOR * limit_s:.0f} s of the clock")
    if child.returncode:
        return dataclasses.replace(empty, failure=last_words(child.stderr))
    return Row(**json.loads(child.stdout.splitlines()[-1]))


def bytes_by_kind(text: str) -> dict[str, float]:
    from autopar.xla import collectives

    return {kind.value: sent for kind, sent in collectives.traffic(collectives.collectives(text)).bytes.items()}


def last_words(stderr: str) -> str:
    """The last line that is an error's, without what hangs below it."""
    lines = [line for line in stderr.splitlines() if line and not line.startswith(" ")]
    return (lines or ["died"])[-1][:160]


def cells(row: Row) -> list[str]:
    head = [row.step, row.topology, row.planner, row.mesh]
    if row.failure:
        return [*head, row.failure]
    return [
        *head,
        f"{sum(row.bytes_by_kind.values()) / 1e6:.1f}",
        *(f"{row.bytes_by_kind.get(kind, 0.0) / 1e6:.1f}" for kind in KINDS),
        f"{row.peak_bytes / 1e6:.0f}",
        *(f"{seconds:.0f}" for seconds in row.decided_s),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps", nargs="*", default=list(CASES), help=f"of {', '.join(CASES)}")
    parser.add_argument(
        "--limit-s", type=float, default=900.0, help="seconds of the processor for each plan (%(default)g)"
    )
    parser.add_argument("--keep", action="store_true", help=f"keep the table in {RESULTS.relative_to(ROOT)}")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(dataclasses.asdict(of_ours(**json.loads(arguments.child)))))
        return 0
    python = os.environ.get("FROZEN_PYTHON", "")
    if not Path(python).is_file():
        parser.error("FROZEN_PYTHON must name the Python of an environment with jax 0.10.0: see scripts/frozen_xla.sh")
    rows: list[Row] = []

    def add(row: Row) -> Row:
        rows.append(row)
        print(" | ".join(cells(row)), flush=True)
        if arguments.keep:
            keep(rows)  # row by row: all of them take long
        return row

    for step in arguments.steps:
        for topology, mesh in CASES[step]:
            theirs = add(of_the_pass(step, topology, mesh, python, arguments.limit_s))
            add(of_ours_in_fresh_process(step, topology, theirs.peak_bytes or None, arguments.limit_s))
    shown = Table(*COLUMNS)
    for row in rows:
        shown.add_row(*cells(row))
    Console(width=200).print(shown)
    return 0


def keep(rows: list[Row]) -> None:
    RESULTS.write_text(
        "# Beside XLA's auto-sharding pass\n\n"
        f"`bash scripts/frozen_xla.sh --keep`; the pass in jax 0.10.0 with libtpu 0.0.40. {_NOTES}\n\n"
        f"{description()}\n\n{markdown(COLUMNS, [cells(row) for row in rows])}\n"
    )


_NOTES = """Ours is told equal links, given the pass's peak as memory limit, and chooses the mesh. Sent: by one device
in a step, read off the compiled text of each; TPU's all-reduce fused with a slice counts as the reduce-scatter that it
runs as. Peak: what the compiler allocates. Decided in: ours from the call to the plan, tracing included; the pass's is
the time of compiling with it less that of compiling with the shardings that it chose."""


if __name__ == "__main__":
    sys.exit(main())
