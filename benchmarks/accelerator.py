"""One accelerator put to the test: results, times, memory and constants, measured on the card beside what is predicted.

    python -m benchmarks.accelerator                        all rows, on the first device that jax finds
    python -m benchmarks.accelerator gpt 'gpt blockwise'    some of them
    python -m benchmarks.accelerator --small                sizes for a CPU: whether it works, no figures to quote
    python -m benchmarks.accelerator --results DIR          keeps the tables there, and not in benchmarks/results
    python -m benchmarks.accelerator --again                also rows that are kept already
    python -m benchmarks.accelerator --predict dgx-h100:1   only the predictions of kept rows anew, on any machine

Rows: `constants`, those that are measured beside those of the preset; six models, those with attention as they are
written and with blockwise attention: results against plain `jax.jit`, time and memory of a step, predicted and
measured; `offload`, the optimiser's state in the memory of the host; `tune`; `other sizes`, a model predicted by the
times of its step at other sizes. Steps are predicted by the preset's constants, by measured ones, and by the preset
with the times of the step's own operations (`autopar.measure`, which takes the place of a profile).

Every row runs in a process of its own, one after the other, so that one process at a time holds the device and a row
that dies takes no other with it. It is kept at once, in accelerator.json, and the tables in accelerator.md beside it: a
run that is cut off goes on where it was. No row is begun once the run has taken `--budget` seconds.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import optax

import autopar
from autopar.cost.peak_memory import allocated_bytes
from autopar.hardware import calibrate
from autopar.hardware.kinds import DeviceKind, OperationTimes
from autopar.plan.cache import SEARCH_VERSION
from benchmarks import accelerator_tables, row_processes
from benchmarks.machine import description
from benchmarks.zoo import CASES
from benchmarks.zoo.case import Case
from benchmarks.zoo.comparison import Difference, worst_difference

RESULTS = Path(__file__).parent / "results"
# Memory is taken as it is needed, so that what a row measures is what its step needs.
ENVIRONMENT = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
# XLA times many kernels for each product of a program, which takes most of a row's time on a GPU. With a folder for
# what it finds, a product is tuned once in a run: a step and plain `jax.jit` are made of the same kernels.
TUNED_KERNELS = "--xla_gpu_per_fusion_autotune_cache_dir="
TIMEOUT_S, SMALL_TIMEOUT_S = 180.0, 900.0  # of one row: on a card, on a CPU that others use too
BUDGET_S = 570.0  # a command on a lent card may take ten minutes
ROUNDS, STEPS_IN_A_ROW = 10, 2  # turns, and steps of each after one that does not count
TUNE_S = 10.0
UNROUNDED_STEPS = 3
WARM_UP_S = 2.0  # of steps before any is timed: a card's power and clock are then those of a long run


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """A case of the zoo, at a size whose step takes 5 to 50 ms on an H100, and at one for a CPU.

    `float32`: the same model in float32, where `case` is not.
    """

    case: str
    large: dict[str, Any]
    small: dict[str, Any]
    has_attention: bool = False
    float32: str | None = None

    def make(self, small: bool) -> Case:
        return CASES[self.case](**(self.small if small else self.large))

    def sizes(self, small: bool) -> str:
        given = self.small if small else self.large
        return ", ".join(f"{name} {value}" for name, value in given.items() if name not in ("optimizer", "dtype"))


_SMALL = dict(layers=2, width=64, heads=4, vocabulary=256, length=64, batch=4)
# An update is m / (sqrt(v) + eps). With an eps far below a gradient it is the gradient's sign, which rounding decides
# where a bias has next to none: by 1.1 of the largest in two steps of a bfloat16 GPT beside the same in float32.
_ADAMW = optax.adamw(1e-4, eps=1e-3)
MODELS = {
    # Four layers of the width of GPT-3 Medium (arXiv 2005.14165, table 2.1).
    "gpt": Model(
        case="gpt_bf16",
        large=dict(layers=4, width=1024, heads=16, vocabulary=50_304, length=1024, batch=8, optimizer=_ADAMW),
        small=_SMALL,
        has_attention=True,
        float32="gpt",
    ),
    # Llama 3 in small: layers under one scan, each recomputed, four queries to a key; scores of the whole sequence.
    "llama": Model(
        case="llama",
        large=dict(
            layers=8, width=1024, heads=16, kv_heads=4, feed_forward=3584, vocabulary=32_768, length=2048, batch=4,
            block=2048, scan=True, dtype=jnp.bfloat16, optimizer=_ADAMW, tolerance=5e-2,
        ),
        small=dict(
            layers=2, width=64, heads=4, kv_heads=2, feed_forward=192, vocabulary=256, length=64, batch=4, block=64,
            scan=True,
        ),
        has_attention=True,
    ),
    "moe": Model(
        case="moe",
        large=dict(layers=2, width=1024, heads=16, experts=8, vocabulary=16_384, length=512, batch=8),
        small=_SMALL | dict(experts=4),
        has_attention=True,
    ),
    "bert": Model(
        case="bert",
        large=dict(layers=3, width=1024, heads=16, vocabulary=30_522, length=512, batch=8),
        small=_SMALL,
        has_attention=True,
    ),
    "resnet": Model(
        case="resnet",
        large=dict(widths=(64, 128, 256, 512), blocks=2, image=64, batch=256),
        small=dict(widths=(8, 16), blocks=1, image=16, batch=8),
    ),
    "lstm": Model(
        case="lstm",
        large=dict(width=1024, features=256, length=128, batch=256),
        small=dict(width=32, features=8, length=16, batch=8),
    ),
}  # fmt: skip
BLOCKWISE, OFFLOAD, OTHER_SIZES = " blockwise", "offload", "other sizes"
ROWS = (
    "constants",
    *(row for name, model in MODELS.items() for row in (name, *([name + BLOCKWISE] * model.has_attention))),
    OFFLOAD,
    "tune",
    OTHER_SIZES,
)


class Running:
    """A step that runs again and again, each time on the state that it returned."""

    def __init__(self, step: Callable[..., Any], state: Any, batch: Any) -> None:
        self.step, self.state, self.batch = step, state, batch
        self.wall_s: list[float] = []

    def run(self) -> None:
        for number in range(1 + STEPS_IN_A_ROW):
            begun_s = time.perf_counter()
            self.state, metrics = self.step(self.state, self.batch)
            jax.block_until_ready((self.state, metrics))
            if number:
                self.wall_s.append(time.perf_counter() - begun_s)


def take_turns(running: Sequence[Running], rounds: int) -> None:
    """What else the machine does falls on all of them. The first round, which compiles, does not count."""
    for number in range(1 + rounds):
        for one in running:
            one.run()
            if not number:
                one.wall_s.clear()


def preset() -> autopar.Cluster:
    return autopar.Cluster.local(1, measured=False)


def constants(measured_to: Path) -> dict[str, Any]:
    """Measures now; the cluster with what was measured goes to a file, by which the rows of models predict too."""
    measurement = calibrate.measure(1)
    autopar.Cluster.of_measurement(measurement, 1).save(measured_to)
    now, before = (constants_of(device) for device in (measurement.device, preset().device))
    return {"constants": {name: [before.get(name), value] for name, value in now.items()}, "report": str(measurement)}


def constants_of(device: DeviceKind) -> dict[str, float]:
    found = {f"{dtype} products, TFLOP/s": device.flops_per_s(dtype) / 1e12 for dtype, _ in device.peak_flops}
    found["memory, GB/s"] = device.memory_bytes_per_s / 1e9
    found["launch, us"] = device.launch_overhead_s * 1e6
    found["filling the matrix units in float32, us"] = device.float32_fill_s * 1e6
    found["convolutions, part of products' rate"] = device.convolution_share
    if device.host_link_bytes_per_s is not None:
        found["link to the host, GB/s"] = device.host_link_bytes_per_s / 1e9
    return found


def _model_of(name: str) -> tuple[Model, dict[str, Any]]:
    """The model of a row, and the options of `autopar.parallelize`."""
    if name == OFFLOAD:
        return MODELS["gpt"], {"plan": autopar.recipes.combine(offload="optimizer")}
    options = {"search": autopar.Search(attention="blockwise")} if name.endswith(BLOCKWISE) else {}
    return MODELS[name.removesuffix(BLOCKWISE)], options


def model_row(name: str, small: bool, measured: Path) -> dict[str, Any]:
    model, options = _model_of(name)
    row = compared(model.make(small), options, measured)
    return row | unrounded(model, options) | {"sizes": model.sizes(small)}


def unrounded(model: Model, options: dict[str, Any]) -> dict[str, Any]:
    """How far the small model in float32 is from plain `jax.jit` after some steps, with products that round nothing:
    those of bfloat16 and TF32 round differently in two programs, which a mixture's choice of experts multiplies.
    """
    with jax.default_matmul_precision("highest"):
        optimizer = {name: value for name, value in model.large.items() if name == "optimizer"}
        case = CASES[model.float32 or model.case](**model.small | optimizer)
        step = autopar.parallelize(case.step, cluster=preset(), cache_dir=None, **options)
        state, key = step.init(case.init, jax.random.key(0)), jax.random.key(0)
        for seed in range(UNROUNDED_STEPS):
            state, metrics = step(state, step.put_batch(case.batch(seed)))
        results = state, metrics
        plain, state = jax.jit(case.step, donate_argnums=0), jax.jit(case.init)(key)
        for seed in range(UNROUNDED_STEPS):
            state, metrics = plain(state, jax.device_put(case.batch(seed)))
    worst = _worst(case, (state, metrics), results)
    return {"unrounded": worst.relative, "unrounded_leaf": worst.path}


def _worst(case: Case, expected: tuple[Any, Any], results: tuple[Any, Any]) -> Difference:
    pairs = zip(expected, results, strict=True)
    return max((worst_difference(case, a, b) for a, b in pairs), key=lambda difference: difference.relative)


def compared(case: Case, options: dict[str, Any], measured: Path) -> dict[str, Any]:
    """A case under a plan beside plain `jax.jit`: results after two steps, memory, and time in turns."""
    parallelize = functools.partial(autopar.parallelize, case.step, cache_dir=None, **options)
    shapes, key = jax.eval_shape(case.init, jax.random.key(0)), jax.random.key(0)
    step = parallelize(cluster=preset())
    plan = step.plan(shapes, case.batch(0))
    compiled = step.compile(shapes, case.batch(0))
    state = step.init(case.init, key)
    for seed in range(2):
        state, metrics = step(state, step.put_batch(case.batch(seed)))
    jax.block_until_ready((state, metrics))
    device_peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")  # before anything else runs
    results = jax.tree.map(jnp.copy, (state, metrics))
    own = Running(step, state, step.put_batch(case.batch(0)))

    plain = jax.jit(case.step, donate_argnums=0)
    state = jax.jit(case.init)(key)
    for seed in range(2):
        state, metrics = plain(state, jax.device_put(case.batch(seed)))
    worst = _worst(case, (state, metrics), results)
    by_hand = Running(plain, state, jax.device_put(case.batch(0)))
    del results, state, metrics
    begun = time.perf_counter()
    while time.perf_counter() - begun < WARM_UP_S:
        own.run()
    take_turns([own, by_hand], ROUNDS)
    del by_hand.state  # what follows needs its memory
    of_step = autopar.measure(step, own.state, own.batch, seconds=0)
    clusters = {"step": of_step.cluster} | ({"measured": autopar.Cluster.load(measured)} if measured.exists() else {})
    predicted_s = {"preset": plan.predicted.step_time_s}
    for of, cluster in clusters.items():
        predicted_s[of] = parallelize(cluster=cluster).plan(shapes, case.batch(0)).predicted.step_time_s
    return {
        "difference": worst.relative,
        "leaf": worst.path,
        "tolerance": case.tolerance,
        "predicted_s": predicted_s,
        "measured_s": statistics.median(own.wall_s),
        "jit_s": statistics.median(by_hand.wall_s),
        "predicted_bytes": max(plan.predicted.peak_bytes),
        "compiled_bytes": allocated_bytes(compiled.executable),
        "device_bytes": device_peak,
        "host_bytes": sum(plan.predicted.host_bytes),
        "profile": str(of_step),
        "operation_times": msgspec.to_builtins(of_step.cluster.device.operation_times),
    }


def other_sizes(small: bool) -> dict[str, Any]:
    """A GPT timed at its sizes, and predicted at others by the times of its operations; all are run in turns."""
    model = MODELS["gpt"]
    given = model.small if small else model.large
    changes = ({}, *({name: scaled(given[name])} for name in ("batch", "layers") for scaled in (_half, _double)))
    running, plans = [], []
    for change in changes:
        case = CASES[model.case](**given | change)
        step = autopar.parallelize(case.step, cluster=preset(), cache_dir=None)
        running.append(Running(step, step.init(case.init, jax.random.key(0)), step.put_batch(case.batch(0))))
        plans.append(functools.partial(autopar.parallelize, case.step, cache_dir=None))
    of_step = autopar.measure(running[0].step, running[0].state, running[0].batch, seconds=0)
    take_turns(running, ROUNDS)
    rows = []
    for change, one, parallelize in zip(changes, running, plans, strict=True):
        times = {"measured": statistics.median(one.wall_s)}
        for of, cluster in (("preset", preset()), ("step", of_step.cluster)):
            times[of] = parallelize(cluster=cluster).plan(one.state, one.batch).predicted.step_time_s
        rows.append({"change": ", ".join(f"{name} {n}" for name, n in change.items()) or "as timed", **times})
    return {"steps": rows, "report": str(of_step)}


def _half(size: int) -> int:
    return size // 2


def _double(size: int) -> int:
    return size * 2


def predict_again(rows: row_processes.Rows, cluster: autopar.Cluster, measured: Path) -> None:
    """Replaces the predictions of rows of full sizes that ran on such a device by those of today."""
    clusters = {"preset": cluster} | ({"measured": autopar.Cluster.load(measured)} if measured.exists() else {})
    for name, row in rows.items():
        if not (row_processes.is_done(row) and "predicted_s" in row) or row["small"]:
            continue
        model, options = _model_of(name)
        # A row is of the sizes with which it ran.
        given = re.findall(r"(\w+) (\d+)(?=[,;]|$)", row["sizes"])
        sizes = model.large | {what: int(n) for what, n in given}
        case = CASES[model.case](**sizes)
        shapes = jax.eval_shape(case.init, jax.random.key(0))
        times = msgspec.convert(row.get("operation_times", ()), tuple[OperationTimes, ...])
        of_step = {"step": with_operation_times(cluster, times)} if times else {}
        for of, at in (clusters | of_step).items():
            step = autopar.parallelize(case.step, cluster=at, cache_dir=None, **options)
            predicted = step.plan(shapes, case.batch(0)).predicted
            row["predicted_s"][of] = predicted.step_time_s
            if of == "preset":
                row["predicted_bytes"], row["host_bytes"] = max(predicted.peak_bytes), sum(predicted.host_bytes)
        row["predicted_later"] = f"search version {SEARCH_VERSION}"
        print(f"{name}: {row['predicted_s']['preset'] / row['measured_s']:.2f}", flush=True)


def with_operation_times(cluster: autopar.Cluster, times: tuple[OperationTimes, ...]) -> autopar.Cluster:
    return dataclasses.replace(cluster, device=dataclasses.replace(cluster.device, operation_times=times))


def tune(small: bool) -> dict[str, Any]:
    case = MODELS["gpt"].make(small)
    step = autopar.parallelize(case.step, cluster=preset(), cache_dir=None)
    state = jax.jit(case.init)(jax.random.key(0))
    begun = time.perf_counter()
    tuning = autopar.tune(step, state, case.batch(0), most=4, seconds=1.0 if small else TUNE_S)
    return {"tuning": str(tuning), "took_s": time.perf_counter() - begun}


def run_row(name: str, small: bool, measured: Path) -> dict[str, Any]:
    match name:
        case "constants":
            return constants(measured)
        case "tune":
            return tune(small)
        case "other sizes":
            return other_sizes(small)
    return model_row(name, small, measured)


def child(name: str, small: bool, measured: Path) -> dict[str, Any]:
    device = jax.devices()[0]
    begun = time.perf_counter()
    found = run_row(name, small, measured)
    return {
        **found,
        "device": f"{device.device_kind} ({device.platform})",
        "on": description(),
        "small": small,
        "row_s": time.perf_counter() - begun,
    }


def is_kept(row: dict[str, Any] | None, small: bool) -> bool:
    """Whether a row has been measured at these sizes."""
    return row is not None and row_processes.is_done(row) and row["small"] == small


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"of {', '.join(ROWS)}")
    parser.add_argument("--small", action="store_true", help="sizes for a CPU")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIR")
    parser.add_argument("--again", action="store_true", help="also rows that are kept already")
    parser.add_argument("--budget", type=float, default=BUDGET_S, metavar="SECONDS")
    parser.add_argument("--kernels", type=Path, metavar="DIR", help="of kernels that XLA chose, to go on with")
    parser.add_argument("--predict", metavar="CLUSTER", help="of one device, such as dgx-h100:1: runs nothing")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.rows if name not in ROWS]:
        parser.error(f"no row {unknown[0]!r}; there are {', '.join(ROWS)}")
    # Measured constants are of one device and one version of jax: kept beside the rows that used them, for this run.
    measured = arguments.results / "accelerator_cluster.json"
    if arguments.child:
        print(json.dumps(child(arguments.child, arguments.small, measured)))
        return 0
    if arguments.predict:
        path = arguments.results / "accelerator.json"
        rows = row_processes.load(path)
        predict_again(rows, autopar.Cluster.parse(arguments.predict), measured)
        keep(path, rows)
        return 0
    with tempfile.TemporaryDirectory(prefix="autopar-kernels-") as folder:
        return run_rows(arguments, measured, (arguments.kernels or Path(folder)).absolute())


def keep(path: Path, rows: row_processes.Rows) -> None:
    row_processes.keep(path, rows)
    path.with_suffix(".md").write_text(accelerator_tables.report(rows, ROWS))


def run_rows(arguments: argparse.Namespace, measured: Path, kernels: Path) -> int:
    path, begun = arguments.results / "accelerator.json", time.perf_counter()
    for folder in (kernels, arguments.results):
        folder.mkdir(parents=True, exist_ok=True)
    environment = ENVIRONMENT | {
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {TUNED_KERNELS}{kernels}",
        "JAX_COMPILATION_CACHE_DIR": str(kernels / "programs"),
    }
    rows = row_processes.load(path)
    for name in arguments.rows or ROWS:
        if not arguments.again and is_kept(rows.get(name), arguments.small):
            continue
        left_s = arguments.budget - (time.perf_counter() - begun)
        if left_s <= 0:
            print(f"{arguments.budget:.0f} s have passed: {name} and what follows is left for another run")
            break
        given = ["--child", name, "--results", str(arguments.results), *(["--small"] * arguments.small)]
        timeout_s = min(SMALL_TIMEOUT_S if arguments.small else TIMEOUT_S, left_s)
        rows[name] = row_processes.in_fresh_process("benchmarks.accelerator", given, timeout_s, environment)
        keep(path, rows)
        print(f"{name}: {rows[name].get('failure') or 'done'}", flush=True)
    print(accelerator_tables.report(rows, ROWS))
    return int(any(row.get("failure") for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
