"""Predicted against measured time of a step, with constants measured on the same machine in the same run.

    python -m benchmarks.predicted_time                     six models on all devices (8 virtual ones on CPU) and on one
    python -m benchmarks.predicted_time --models gpt moe    some of them
    python -m benchmarks.predicted_time --cluster c.json    with constants of a file that `autopar measure` made
    python -m benchmarks.predicted_time --gpt 125M 1.3B     GPTs on one device: time, peak memory, overhead over jax.jit
    python -m benchmarks.predicted_time --processor-time    on a CPU that others use too: processor time for wall time
    python -m benchmarks.predicted_time --keep              also keeps the tables in results/predicted_time.md

Steps run under the plan that the search finds. All models take turns, so that what else the machine does falls on all
of them; a turn is a few steps in a row, as in training, of which the first, that finds the caches full of another
model's data, does not count; medians. A matrix product is timed right after the constants and takes its turns too: that
tells by how much the machine's speed changed meanwhile, and what the ratio is at the speed that it had. Beside the wall
time stands the processor time of the whole process divided by the cores: where it is much less than the wall time, the
devices waited, for each other or for other work on the machine.
"""

import os

if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):  # before jax starts; for CPU only
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()

import argparse
import dataclasses
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax
import optax
from rich.console import Console
from rich.table import Table

import autopar
from autopar.cost.peak_memory import allocated_bytes
from autopar.hardware import calibrate, discovery
from autopar.hardware.microbenchmarks import DeviceClock
from autopar.hardware.timed_runs import MatmulRun
from autopar.plan.schema import Predicted
from benchmarks.machine import description, markdown
from benchmarks.zoo.case import Case
from benchmarks.zoo.gpt import gpt, gpt_bf16
from benchmarks.zoo.lstm import lstm
from benchmarks.zoo.mlp import mlp
from benchmarks.zoo.moe import moe
from benchmarks.zoo.resnet import resnet
from benchmarks.zoo.vit import vit

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results" / "predicted_time.md"
TARGET = 0.25  # how far the prediction may be off, as a part of the measured time

MODELS: dict[str, Callable[[], Case]] = {
    "mlp": lambda: mlp(layers=4, width=1024, features=512, classes=256, batch=1024),
    "gpt": lambda: gpt(layers=4, width=256, heads=8, vocabulary=2048, length=128, batch=16),
    "resnet": lambda: resnet(widths=(32, 64), blocks=2, image=32, batch=64),
    "moe": lambda: moe(layers=2, width=256, heads=8, experts=8, vocabulary=1024, length=64, batch=16),
    "lstm": lambda: lstm(width=512, features=128, length=64, batch=128),
    "vit": lambda: vit(layers=4, width=256, heads=8, image=64, patch=8, batch=32),
}

# GPT-3's sizes (arXiv 2005.14165, table 2.1): layers, width, heads.
GPT_SIZES = {
    "125M": (12, 768, 12),
    "350M": (24, 1024, 16),
    "760M": (24, 1536, 16),
    "1.3B": (24, 2048, 16),
}
GPT_VOCABULARY, GPT_LENGTH, GPT_BATCH = 50_304, 1_024, 8
LONGEST_STEP_S = 20.0  # a GPT whose step is predicted to take longer is not run


def processor_s() -> float:
    """What the process would have taken if it had had all cores to itself and never waited."""
    return time.process_time() / (os.cpu_count() or 1)


# Steps of a turn after the one that does not count.
STEPS_IN_A_ROW = 2


class Running:
    """A step that runs again and again, each time on the state that it returned."""

    def __init__(self, step: Callable[..., Any], state: Any, batch: Any) -> None:
        self.step, self.state, self.batch = step, state, batch
        self.wall_s: list[float] = []
        self.processor_s: list[float] = []

    def run(self) -> None:
        for number in range(1 + STEPS_IN_A_ROW):
            wall, processor = time.perf_counter(), processor_s()
            self.state, metrics = self.step(self.state, self.batch)
            jax.block_until_ready((self.state, metrics))
            if number:
                self.wall_s.append(time.perf_counter() - wall)
                self.processor_s.append(processor_s() - processor)


class Product:
    """A matrix product on all devices at once, of a kind that the constants came from."""

    def __init__(self, num_devices: int, now: Callable[[], float]) -> None:
        devices, found = discovery.chosen(num_devices)
        in_step = found.devices_per_host if devices[0].platform == "cpu" else 1
        self.timed = MatmulRun(dtype="float32", width=512, in_step=in_step)
        self.clock = DeviceClock(devices, found.num_hosts, now)
        self.clock.prepare(self.timed)
        self.first_s = statistics.median([self.clock.sample(self.timed) for _ in range(9)])
        self.wall_s: list[float] = []
        self.processor_s: list[float] = []

    def run(self) -> None:
        self.clock.sample(self.timed)  # its operands are in the caches, as they were the first time
        self.wall_s.append(self.clock.sample(self.timed))

    @property
    def speed(self) -> float:
        """Of the machine between the steps, as a part of what it was when the constants were measured."""
        return self.first_s / statistics.median(self.wall_s)

    def __str__(self) -> str:
        first_ms, later_ms = self.first_s * 1e3, statistics.median(self.wall_s) * 1e3
        return (
            f"A product of {self.timed.width} a side took {first_ms:.2f} ms after the constants were measured and "
            f"{later_ms:.2f} ms between the steps: the machine ran at {self.speed:.2f} of its speed."
        )


class Turn(Protocol):
    """What runs in turn with others, and keeps what its turns took."""

    wall_s: list[float]
    processor_s: list[float]

    def run(self) -> None: ...


def take_turns(running: Sequence[Turn], rounds: int, warm_up: int = 2) -> None:
    """Each has one turn a round, the order turned round each time."""
    for number in range(warm_up + rounds):
        if number == warm_up:
            for one in running:
                one.wall_s, one.processor_s = [], []
        for one in running if number % 2 else reversed(running):
            one.run()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Planned:
    """A model's step under its plan on some devices."""

    name: str
    plan: autopar.Plan
    running: Running

    @property
    def predicted(self) -> Predicted:
        return self.plan.predicted

    def row(self, by_processor: bool, speed: float) -> list[str]:
        wall, quick = statistics.median(self.running.wall_s), statistics.quantiles(self.running.wall_s, n=10)[0]
        processor = statistics.median(self.running.processor_s)
        ratio = self.predicted.step_time_s / (processor if by_processor else wall)
        pipeline = self.plan.record.pipeline
        mesh = str(self.plan.mesh) if pipeline is None else f"{len(pipeline.stages)} stages"
        return [
            self.name,
            mesh,
            f"{self.predicted.step_time_s * 1e3:.1f}",
            f"{self.predicted.compute_time_s * 1e3:.1f} + {self.predicted.collective_time_s * 1e3:.1f}",
            f"{wall * 1e3:.1f}",
            f"{quick * 1e3:.1f}",
            f"{processor * 1e3:.1f}",
            f"{ratio:.2f} ({'within' if abs(ratio - 1) <= TARGET else 'not within'} {TARGET:.0%})",
            f"{ratio / speed:.2f}",
        ]


COLUMNS = (
    "model",
    "plan",
    "predicted, ms",
    "compute + collectives, ms",
    "measured, ms",
    "fastest tenth, ms",
    "processor time / cores, ms",
    "predicted / measured",
    "at the speed meanwhile",
)


def planned(name: str, cluster: autopar.Cluster) -> Planned:
    case = MODELS[name]()
    step = autopar.parallelize(case.step, cluster=cluster, cache_dir=None, show_progress=False)
    batch = case.batch(0)
    plan = step.plan(jax.eval_shape(case.init, jax.random.key(0)), batch)
    state = step.init(case.init, jax.random.key(0))
    return Planned(name=name, plan=plan, running=Running(step, state, step.put_batch(batch)))


def compare(
    names: Sequence[str], cluster: autopar.Cluster, rounds: int, by_processor: bool
) -> tuple[list[list[str]], str]:
    """(a row for each model, what became of the machine's speed)."""
    product = Product(cluster.num_devices, processor_s if by_processor else time.perf_counter)
    models = [planned(name, cluster) for name in names]
    take_turns([*(model.running for model in models), product], rounds)
    return [model.row(by_processor, product.speed) for model in models], str(product)


# GPTs on one device

GPT_COLUMNS = (
    "GPT",
    "predicted, ms",
    "measured, ms",
    "predicted / measured",
    "jax.jit, ms",
    "overhead over jax.jit",
    "predicted peak, GB",
    "compiled peak, GB",
    "device's peak, GB",
)


def gpt_row(size: str, cluster: autopar.Cluster, rounds: int) -> list[str]:
    """One GPT under autopar and under plain `jax.jit`, in turns. Run the sizes from small to large: the device's own
    peak is that of all that ran before.
    """
    layers, width, heads = GPT_SIZES[size]
    case = gpt_bf16(
        layers=layers,
        width=width,
        heads=heads,
        vocabulary=GPT_VOCABULARY,
        length=GPT_LENGTH,
        batch=GPT_BATCH,
        optimizer=optax.adamw(1e-4),
    )
    step = autopar.parallelize(case.step, cluster=cluster, cache_dir=None, show_progress=False)
    batch = case.batch(0)
    plan = step.plan(jax.eval_shape(case.init, jax.random.key(0)), batch)
    if plan.predicted.step_time_s > LONGEST_STEP_S:
        raise autopar.errors.InvalidArgumentError(
            where=f"--gpt {size}",
            expected=f"a model whose step takes {LONGEST_STEP_S:.0f} s at most on a {cluster.device.name}",
            got=f"{plan.predicted.step_time_s:.0f} s, as predicted",
            hint="run it on a GPU, or choose a smaller size",
        )
    compiled = step.compile(jax.eval_shape(case.init, jax.random.key(0)), batch)
    own = Running(step, step.init(case.init, jax.random.key(0)), step.put_batch(batch))
    take_turns([own], 1)
    device_peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    plain = jax.jit(case.step, donate_argnums=0)
    put = jax.device_put(batch, jax.devices()[0])
    by_hand = Running(plain, jax.jit(case.init)(jax.random.key(0)), put)
    take_turns([own, by_hand], rounds)
    wall, jit = statistics.median(own.wall_s), statistics.median(by_hand.wall_s)
    predicted = plan.predicted
    return [
        size,
        f"{predicted.step_time_s * 1e3:.1f}",
        f"{wall * 1e3:.1f}",
        f"{predicted.step_time_s / wall:.2f}",
        f"{jit * 1e3:.1f}",
        f"{wall / jit - 1:+.1%}",
        f"{max(predicted.peak_bytes) / 1e9:.2f}",
        f"{allocated_bytes(compiled.memory_analysis()) / 1e9:.2f}",
        "not told" if device_peak is None else f"{device_peak / 1e9:.2f}",
    ]


def show(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table = Table(*columns)
    for row in rows:
        table.add_row(*row)
    Console(width=160).print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--devices", type=int, help="devices that the plans are for (default: all), beside one alone")
    parser.add_argument("--cluster", metavar="FILE.json", help="constants for all devices, instead of measuring now")
    parser.add_argument("--no-single", action="store_true", help="leave out the steps on one device")
    parser.add_argument("--gpt", nargs="+", choices=list(GPT_SIZES), help="GPTs on one device, nothing else")
    parser.add_argument(
        "--processor-time", action="store_true", help="on CPU: processor time / cores counts, not wall time"
    )
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--keep", action="store_true", help=f"keep the tables in {RESULTS.relative_to(ROOT)}")
    arguments = parser.parse_args()
    reports: list[str] = []
    notes: list[str] = []
    tables: list[tuple[str, Sequence[str], list[list[str]]]] = []

    def measured(count: int | None) -> autopar.Cluster:
        now = processor_s if arguments.processor_time else time.perf_counter
        measurement = calibrate.measure(count, clock=lambda devices, found: DeviceClock(devices, found.num_hosts, now))
        reports.append(str(measurement))
        print(reports[-1], flush=True)
        return autopar.Cluster.of_measurement(measurement, count)

    if arguments.gpt:
        cluster = measured(1)
        order = [size for size in GPT_SIZES if size in arguments.gpt]
        try:
            rows = [gpt_row(size, cluster, arguments.rounds) for size in order]
        except autopar.errors.AutoparError as error:
            print(f"refused: {error}", file=sys.stderr)
            return 1
        title = f"GPTs on one device, {GPT_BATCH} sequences of {GPT_LENGTH} tokens, bfloat16, AdamW"
        tables.append((title, GPT_COLUMNS, rows))
        show(GPT_COLUMNS, rows)
    else:
        # One device first, before the steps: where much memory was free before, the next block would not be new.
        alone = () if arguments.no_single else (measured(1),)
        every = autopar.Cluster.load(arguments.cluster) if arguments.cluster else measured(arguments.devices)
        for cluster in (every, *alone):
            where = f"On {cluster.num_devices} devices" if cluster is every else "On one device"
            rows, speed = compare(arguments.models, cluster, arguments.rounds, arguments.processor_time)
            notes.append(f"{where}: {speed}")
            print(notes[-1], flush=True)
            tables.append((where, COLUMNS, rows))
            show(COLUMNS, rows)
    if arguments.keep:
        command = " ".join(["python -m benchmarks.predicted_time", *sys.argv[1:]])
        parts = [f"## {title}\n\n{markdown(columns, rows)}\n" for title, columns, rows in tables]
        parts += [f"{note}\n" for note in notes]
        parts += [f"## Constants\n\n```text\n{report}\n```\n" for report in reports]
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(
            f"# Predicted time of a step\n\n`{command}`, {jax.devices()[0].device_kind}.\n\n{description()}\n\n"
            + "\n".join(parts)
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
