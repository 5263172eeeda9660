"""What the runtime adds to jax's own calls, for each instruction of a pipelined step: tiny tasks, many micro-batches.

    python -m benchmarks.dispatch                 the table
    python -m benchmarks.dispatch --keep          also keeps it in results/dispatch.md

All times are processor time of the calling thread, medians over steps. `jax` is the time inside of the compiled
programs, called with the same arrays; the rest of a RUN is what the executor adds. Each SEND is one `jax.device_put`
with what stands around it, each FREE drops the last reference to arrays: that is jax giving back their memory.
"""

import os

if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):  # before jax starts
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import argparse
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

import autopar
from autopar.executables.compiled_pipeline import CompiledPipeline, routes, stage_meshes
from autopar.runtime.execution.execute import Action, action_of
from autopar.runtime.pipeline.program import Free, Instruction, Run
from benchmarks.machine import description, markdown
from benchmarks.overhead import mlp, mlp_step

RESULTS = Path(__file__).parent / "results" / "dispatch.md"
TARGET_US = 150.0
WIDTH = 16
COLUMNS = (
    "step",
    "instructions",
    "step, us",
    "a RUN, us",
    "of it jax, us",
    "added to jax's call, us",
    "a SEND, us",
    "a FREE, us",
    "all but jax's calls of programs, us per RUN",
)


class Timed:
    """A compiled program that notes how long its calls take."""

    def __init__(self, executable: Callable[..., Any]) -> None:
        self.executable = executable
        self.spent_s = 0.0

    def __call__(self, *arrays: Any) -> Any:
        begun = time.thread_time()
        made = self.executable(*arrays)
        self.spent_s = time.thread_time() - begun
        return made


class Walk:
    """Steps of a compiled pipeline: as users call it, and instruction by instruction with a clock."""

    def __init__(self, compiled: CompiledPipeline, state: Any, batch: Any) -> None:
        assert not compiled.copies, "every argument is read by one stage"
        assert not compiled.fixed, "there are no constants"
        self.compiled, self.program = compiled, compiled.executor.program
        self.state, self.batch = jax.device_put((state, batch), compiled.shardings)
        self.timed = [Timed(e) for e in compiled.executables]
        ways = routes(compiled.staged, stage_meshes(compiled.staged))
        made: dict[Instruction, Action | None] = {}
        for i in self.program.instructions:  # equal instructions are one action: a Send compiles nothing twice
            made.setdefault(i, action_of(i, self.timed, ways))
        self.actions = [made[i] for i in self.program.instructions]

    def step_s(self) -> float:
        begun = time.thread_time()
        self.state, _ = self.compiled(self.state, self.batch)
        spent = time.thread_time() - begun
        jax.block_until_ready(self.state)
        return spent

    def clocked(self) -> dict[str, list[float]]:
        """Seconds of each instruction by its kind; `jax` within those of `Run`."""
        spent = defaultdict(list)
        slots: list[Any] = [None] * self.program.num_slots
        leaves = jax.tree.leaves((self.state, self.batch))
        for slot, leaf in zip(self.program.input_slots, self.compiled.leaf_of_input, strict=True):
            slots[slot] = leaves[leaf]
        del leaves
        self.state = None
        for instruction, action in zip(self.program.instructions, self.actions, strict=True):
            assert action is not None, "one process does everything"
            begun = time.thread_time()
            action(slots)
            spent[type(instruction).__name__].append(time.thread_time() - begun)
            if isinstance(instruction, Run):
                spent["jax"].append(self.timed[instruction.task].spent_s)
        results: list[Any] = [None] * len(self.program.output_slots)
        for position, slot in zip(self.compiled.staged.staged.results, self.program.output_slots, strict=True):
            results[position] = slots[slot]
        self.state, _ = jax.tree.unflatten(self.compiled.traced.out_tree, results)
        jax.block_until_ready(self.state)
        return spent


def clock_s() -> float:
    """What two readings of the clock cost, which is in every time."""
    times = []
    for _ in range(1000):
        begun = time.thread_time()
        times.append(time.thread_time() - begun)
    return statistics.median(times)


def measure(stages: int, devices: int, layers: int, microbatches: int, repeats: int) -> list[str]:
    state, batch = mlp(WIDTH, layers, 8 * microbatches)
    step = autopar.parallelize(
        mlp_step,
        plan=autopar.recipes.pipeline(stages, "1f1b", num_microbatches=microbatches),
        cluster=autopar.Cluster.local(num_devices=stages * devices),
        cache_dir=None,
        show_progress=False,
    )
    compiled = step.compile(state, batch)
    assert isinstance(compiled, CompiledPipeline)
    walk = Walk(compiled, state, batch)
    for _ in range(3):
        walk.step_s()
        walk.clocked()
    whole, kinds = [], defaultdict(list)
    for _ in range(repeats):
        whole.append(walk.step_s())
        for kind, times in walk.clocked().items():
            kinds[kind].append(times)
    clock = clock_s()
    # The median over the steps of each instruction, then the mean over instructions.
    us = {
        kind: statistics.mean(statistics.median(t) - clock for t in zip(*steps, strict=True)) * 1e6
        for kind, steps in kinds.items()
    }
    runs, sends = len(kinds["Run"][0]), len(kinds.get("Send", [[]])[0])
    added = us["Run"] - us["jax"] - clock * 1e6  # the inner clock's readings are inside the outer one's
    step_us = statistics.median(whole) * 1e6
    frees = sum(isinstance(i, Free) for i in walk.program.instructions)
    beyond = (step_us - us["jax"] * runs) / runs
    row = [
        f"{layers} layers, {stages} stage{'s' * (stages > 1)} on {devices} devices, {microbatches} micro-batches",
        f"{runs} RUN, {sends} SEND, {frees} FREE",
        f"{step_us:.0f}",
        f"{us['Run'] - clock * 1e6:.1f}",
        f"{us['jax']:.1f}",
        f"{added:.1f}",
        f"{us['Send']:.1f}" if sends else "",
        f"{us['Free']:.1f}",
        f"{beyond:.1f} ({'<' if beyond < TARGET_US else 'not <'} {TARGET_US:.0f})",
    ]
    print(" | ".join(row), flush=True)
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--keep", action="store_true", help=f"keep the table in results/{RESULTS.name}")
    arguments = parser.parse_args()
    rows = [
        measure(1, 4, 4, 64, arguments.repeats),
        measure(2, 4, 8, 64, arguments.repeats),
        measure(2, 4, 32, 32, arguments.repeats),
        measure(2, 1, 8, 64, arguments.repeats),
    ]
    table = Table(*COLUMNS)
    for row in rows:
        table.add_row(*row)
    Console(width=160).print(table)
    if arguments.keep:
        RESULTS.write_text(
            "# What dispatching a pipelined step costs\n\n"
            f"`python -m benchmarks.dispatch --repeats {arguments.repeats} --keep`, virtual CPU devices, an MLP of "
            f"width {WIDTH}.\n\n{description()}\n\n"
            "Processor time of the calling thread, medians. A RUN is one call of a compiled program on its stage's "
            "devices; a FREE drops about ten arrays. The last column is everything that a step costs this thread "
            "beyond jax's own calls of the compiled programs (SENDs, FREEs, the executor, the step's arguments and "
            f"results), for each RUN.\n\n{markdown(COLUMNS, rows)}\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
