"""Our predictions beside the programs that XLA's GPU and TPU compilers make, for hardware that is not here.

    python -m benchmarks.compiled_elsewhere                             every case, a process each; no GPU, no TPU
    python -m benchmarks.compiled_elsewhere gpu:h100:8 'gpt 4x2048'     only some targets, only some models
    python -m benchmarks.compiled_elsewhere --keep                      also keeps results/compiled_elsewhere.md

Needs `autopar[gpu]` and `autopar[tpu]`; a row without its compiler says so. What is compared: the bytes that a device
sends in a step, how many collectives send them, and the memory of a device.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from rich.console import Console
from rich.table import Table

from benchmarks.machine import description, markdown

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results" / "compiled_elsewhere.md"
TIMEOUT_S = 900.0

# Target -> the cluster to plan for, as the command line names it.
TARGETS = {
    "gpu:h100:8": "dgx-h100",
    "gpu:h100:2x8": "dgx-h100x2",
    "gpu:a100-40g:8": "dgx-a100-40g",
    "gpu:b200:8": "dgx-b200",
    "tpu:v5e:2x4": "tpu-v5e:2x4",
    "tpu:v5p:2x2x2": "tpu-v5p:2x2x2",
    "tpu:v6e:2x4": "tpu-v6e:2x4",
}


def plain(name: str) -> tuple[Callable, tuple, dict[str, Any]]:
    from benchmarks.plain_steps import STEPS

    case = STEPS[name]()
    return case.step, case.args, {"donate_argnums": (0, 1), "batch_argnums": (2,)}


def zoo(name: str, **sizes: Any) -> tuple[Callable, tuple, dict[str, Any]]:
    from benchmarks.memory_study import zoo

    return *zoo(name, **sizes), {}


_SMALL = {"layers": 4, "width": 256, "heads": 4, "vocabulary": 1024, "length": 256, "batch": 16}
_LARGE = {"layers": 4, "width": 2048, "heads": 16, "vocabulary": 32_768, "length": 1024, "batch": 32}
MODELS: dict[str, Callable[[], tuple[Callable, tuple, dict[str, Any]]]] = {
    "mlp 4x4096": lambda: plain("mlp"),
    "mlp 4x1024": lambda: zoo("mlp", layers=4, width=1024, features=512, classes=128, batch=4096),
    "one-layer gpt": lambda: plain("one_layer_gpt"),
    "one-layer moe": lambda: plain("one_layer_moe"),
    "gpt 4x256": lambda: zoo("gpt", **_SMALL),
    "gpt 4x2048": lambda: zoo("gpt", **_LARGE),
    "gpt 4x2048 bf16": lambda: zoo("gpt_bf16", **_LARGE),
}

# All models on one target of each kind, these on the others.
FULL, ELSEWHERE = ("gpu:h100:8", "tpu:v5e:2x4"), ("mlp 4x4096", "one-layer gpt", "gpt 4x2048")

COLUMNS = (
    "target", "model", "mesh", "sent, MB: predicted", "compiled", "ratio", "collectives: predicted -> compiled",
    "peak, MB: predicted", "compiled", "ratio", "plan, s", "compile, s",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One model on one target; `failure` in place of all figures. Of each pair the first is predicted."""

    target: str
    model: str
    mesh: str = ""
    sent_bytes: tuple[float, float] = (0.0, 0.0)
    counts: dict[str, tuple[float, float]] = dataclasses.field(default_factory=dict)
    peak_bytes: tuple[float, float] = (0.0, 0.0)
    plan_s: float = 0.0
    compile_s: float = 0.0
    failure: str = ""


def compare(target: str, model: str) -> Row:
    """Plans and compiles in this process."""
    import autopar
    from autopar.errors import MissingCompilerError
    from autopar.verification import compare_traffic, compile_for_target, peak_bytes
    from autopar.xla import collectives

    step, args, options = MODELS[model]()
    parallel = autopar.parallelize(step, cluster=autopar.Cluster.parse(TARGETS[target]), cache_dir=None, **options)
    begun = time.perf_counter()
    plan = parallel.plan(*args)
    planned = time.perf_counter()
    try:
        compiled = compile_for_target(parallel, target, *args)
    except MissingCompilerError as error:
        return Row(target=target, model=model, failure=error.hint.split(",")[0])
    compiled_at = time.perf_counter()
    sent, counts = compare_traffic(plan.predicted, collectives.traffic(collectives.collectives(compiled.as_text())))
    return Row(
        target=target,
        model=model,
        mesh="x".join(map(str, plan.mesh.axis_sizes)),
        sent_bytes=(sent[-1].predicted, sent[-1].compiled),
        counts={c.name: (c.predicted, c.compiled) for c in counts},
        peak_bytes=(float(max(plan.predicted.peak_bytes)), float(peak_bytes(compiled))),
        plan_s=planned - begun,
        compile_s=compiled_at - planned,
    )


def in_fresh_process(target: str, model: str) -> Row:
    command = [sys.executable, "-m", "benchmarks.compiled_elsewhere", "--child", target, model]
    empty = Row(target=target, model=model)
    try:
        child = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return dataclasses.replace(empty, failure=f"more than {TIMEOUT_S:.0f} s")
    if child.returncode:
        said = [line for line in child.stderr.splitlines() if line and not line.startswith(" ")]
        return dataclasses.replace(empty, failure=(said or ["died"])[-1][:160])
    return Row(**json.loads(child.stdout.splitlines()[-1]))


def installed(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def cells(row: Row) -> list[str]:
    if row.failure:
        return [row.target, row.model, row.failure]
    return [
        row.target, row.model, row.mesh,
        *_pair(row.sent_bytes),
        ", ".join(f"{kind} {predicted:g} -> {compiled:g}" for kind, (predicted, compiled) in row.counts.items()),
        *_pair(row.peak_bytes),
        f"{row.plan_s:.1f}", f"{row.compile_s:.1f}",
    ]  # fmt: skip


def _pair(values: tuple[float, float]) -> tuple[str, str, str]:
    predicted, compiled = values
    ratio = f"{predicted / compiled:.3f}" if compiled else "1" if not predicted else "-"
    return f"{predicted / 1e6:,.1f}", f"{compiled / 1e6:,.1f}", ratio


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("only", nargs="*", help=f"targets ({', '.join(TARGETS)}) or models ({', '.join(MODELS)})")
    parser.add_argument("--keep", action="store_true", help=f"keep the table in {RESULTS.relative_to(ROOT)}")
    parser.add_argument("--child", nargs=2, metavar=("TARGET", "MODEL"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(dataclasses.asdict(compare(*arguments.child))))
        return 0
    if unknown := [name for name in arguments.only if name not in TARGETS and name not in MODELS]:
        parser.error(f"no target or model {unknown[0]!r}")
    targets = [t for t in TARGETS if t in arguments.only] or list(TARGETS)
    models = [m for m in MODELS if m in arguments.only]
    rows = []
    for target in targets:
        for model in models or (MODELS if target in FULL else ELSEWHERE):
            rows.append(in_fresh_process(target, model))
            print(" | ".join(cells(rows[-1])), flush=True)
            if arguments.keep:
                keep(rows)  # row by row: all of them take long
    shown = Table(*COLUMNS)
    for row in rows:
        shown.add_row(*cells(row))
    Console(width=200).print(shown)
    return int(any(row.failure for row in rows))


def keep(rows: list[Row]) -> None:
    found = ((name, installed(name)) for name in ("jax-cuda13-pjrt", "libtpu"))
    versions = " Compilers: " + ", ".join(f"{name} {version}" for name, version in found) + "."
    RESULTS.write_text(
        "# Predictions beside programs compiled for hardware that is not here\n\n"
        f"`python -m benchmarks.compiled_elsewhere --keep`. {_NOTES}\n\n"
        f"{description()}{versions}\n\n{markdown(COLUMNS, [cells(row) for row in rows])}\n"
    )


_NOTES = """Sent: by one device in a step. Peak: arguments, results and temporaries of one device. A row's two
collectives of a kind are predicted and compiled; XLA combines several into one, which changes no byte.

Two things that a GPU's peak has and that are not predicted were found in the program of `mlp 4x1024`. Reductions that
XLA combines are copied into one buffer of up to 30 MiB: all that go into it wait for the last, and what comes out is
copied once more. And without a card to measure on, XLA often cuts the contraction of a small matrix product into 4 to
16 parts, whose results are there at once before they are added up (`XLA_FLAGS=--xla_gpu_enable_triton_gemm=false`
keeps it from that). The peaks of the larger MLPs, which are 9 to 15 % above the prediction, have not been looked into.

On TPU, XLA gathers some operands of matrix products after it has rounded them to bfloat16, which sends fewer bytes,
and fuses more than is modelled, which needs less memory."""


if __name__ == "__main__":
    sys.exit(main())
