"""Micro-batches of a step without stages: tasks that the host hands out, beside one program with a loop over them.

    python -m benchmarks.one_program                    8 virtual CPU devices: times, memory, results
    python -m benchmarks.one_program gpu:h100:8         compiled for hardware that is not here: memory and overlap
    ... --models gpt_adamw moe --recipes 'zero(3)'      some of the rows

Both run the instructions of one plan. As tasks they are those of `autopar.executables.compiled_pipeline`. As one
program all micro-batches but the last are a `lax.scan` that carries the sums over micro-batches; the last one, the
exchange of gradients and the update stand behind it. `barrier`: what all micro-batches read passes a barrier in each,
so that the compiler does not gather it once for all of them.

Memory: what XLA allocates for a device; of tasks their buffers by the instruction list, with temporaries as compiled.
Sent: bytes of the results of all collectives of a step. Exposed: the part of them beside whose transfer nothing runs,
in the order that is compiled.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

import autopar
from autopar.compiler.materialize import make_staged
from autopar.cost.peak_memory import allocated_bytes
from autopar.executables.compiled_pipeline import aval_of, lower_joined, lower_tasks, sharding_of, stage_meshes
from autopar.frontend.tracing import trace
from autopar.inter_op.staged import StagedStep
from autopar.inter_op.tasks import groups_of_examples, layout_of, shape_of
from autopar.lowering.emit import Emitter
from autopar.lowering.instructions import Key, Split, Stack
from autopar.runtime.program import TaskKind
from autopar.runtime.simulator import simulate
from autopar.sharding.rules import RuleBook
from autopar.xla import aot, collectives, parse
from benchmarks.machine import description, markdown
from benchmarks.zoo import CASES
from benchmarks.zoo.case import Case

DEVICES = 8
MICROBATCHES = 4
CLUSTERS = {"gpu:h100:8": "dgx-h100", "tpu:v5p:2x2x2": "tpu-v5p:2x2x2", "tpu:v6e:2x4": "tpu-v6e:2x4"}
_SMALL = {"layers": 4, "width": 256, "heads": 4, "vocabulary": 1024, "length": 128, "batch": 64}
_LARGE = {"layers": 4, "width": 2048, "heads": 16, "vocabulary": 32_768, "length": 1024, "batch": 64}
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gpt_adamw": ("gpt_adamw", _SMALL, _LARGE),
    "gpt_scan_remat": ("gpt_scan_remat", _SMALL, _LARGE),
    "moe": ("moe", _SMALL | {"layers": 2}, _LARGE | {"layers": 2}),
    "mlp": (
        "mlp",
        {"layers": 4, "width": 512, "features": 256, "classes": 128, "batch": 4096},
        {"layers": 8, "width": 8192, "features": 8192, "classes": 1024, "batch": 32_768},
    ),
}
RECIPES = {
    "data_parallel": autopar.recipes.data_parallel(),
    "zero(1)": autopar.recipes.zero(1),
    "zero(3)": autopar.recipes.zero(3),
}


class _Stacked(Emitter):
    """Micro-batches of a value as one array with a dimension for them in front."""

    def split(self, array: Any, instruction: Split) -> Any:
        m, dim = self.graph.num_microbatches, instruction.op.dim
        before, size, after = array.shape[:dim], array.shape[dim], array.shape[dim + 1 :]
        parts = jnp.moveaxis(array.reshape((*before, self.groups, m, size // (self.groups * m), *after)), dim + 1, 0)
        layout = dataclasses.replace(instruction.result, dims=((), *instruction.result.dims))
        return self.pin(parts.reshape((m, *before, size // m, *after)), layout)

    def stack(self, arrays: Any, instruction: Stack) -> Any:
        return super().stack(list(arrays), instruction)


def one_program(staged: StagedStep, mesh: Mesh, *, barrier: bool = False) -> Any:
    """The lowered program of a step in one stage, on the inputs of its pipeline."""
    program, stage = staged.staged, staged.stages[0].lowered
    pipeline, graph = program.pipeline, stage.stage.graph
    m = graph.num_microbatches
    emitter = _Stacked(graph, mesh, groups_of_examples([stage]))
    tasks = list(zip(program.tasks, pipeline.tasks, strict=True))
    before = [pair for pair in tasks if pair[0].kind is TaskKind.BEFORE]
    inside = [pair for pair in tasks if pair[0].kind.repeats]
    after = [pair for pair in tasks if pair[0].kind is TaskKind.AFTER]

    def run(pairs: Any, held: dict[int, Any]) -> None:
        for task, linked in pairs:
            env: dict[Key, Any] = {key: held[b] for key, b in zip(task.inputs, linked.inputs, strict=True)}
            for key in task.zeros:
                shape = shape_of(graph, key, stage.mesh)
                env[key] = emitter.pin(jnp.zeros(shape, graph.values[key[0]].dtype), layout_of(key))
            for instruction in task.instructions:
                emitter.run(instruction, env)
            held.update((b, env[key]) for key, b in zip(task.outputs, linked.outputs, strict=True))

    repeats = {b for b, buffer in enumerate(pipeline.buffers) if buffer.repeats}
    taken = {b for _, linked in inside for b in linked.inputs}
    made = {b for _, linked in inside for b in linked.outputs}
    carried = sorted((taken & made) - repeats)
    wanted = sorted({b for _, linked in after for b in linked.inputs} & made & repeats)

    def step(*inputs: Any) -> Any:
        held = dict(zip(pipeline.inputs, inputs, strict=True))
        run(before, held)
        slices = {b: held.pop(b) for b in sorted(taken & repeats & set(held))}

        def body(carry: list[Any], i: Any) -> tuple[list[Any], list[Any]]:
            whole = {b: x for b, x in held.items() if b not in carried}
            if barrier:
                whole, carry = jax.lax.optimization_barrier((whole, carry))
            inner = {**whole, **dict(zip(carried, carry, strict=True)), **{b: part(x, i) for b, x in slices.items()}}
            run(inside, inner)
            return [inner[b] for b in carried], [inner[b] for b in wanted]

        def part(array: Any, i: Any) -> Any:
            return jax.lax.dynamic_index_in_dim(array, i, 0, keepdims=False)

        carry = [held[b] for b in carried]
        outs: list[list[Any]] = []
        if m > 1:
            carry, ys = jax.lax.scan(body, carry, jnp.arange(m - 1))
            outs.append(ys)
        carry, ys = body(carry, m - 1)
        outs.append([y[None] for y in ys])
        held.update(zip(carried, carry, strict=True))
        held.update((b, jnp.concatenate(parts)) for b, parts in zip(wanted, zip(*outs, strict=True), strict=True))
        run(after, held)
        return [held[b] for b in pipeline.outputs]

    keys = program.key_of
    results = set(pipeline.outputs)
    donated = tuple(i for i, b in enumerate(pipeline.inputs) if b not in pipeline.kept and b not in results)
    jitted = jax.jit(
        step,
        in_shardings=tuple(sharding_of(keys[b], mesh) for b in pipeline.inputs),
        out_shardings=[sharding_of(keys[b], mesh) for b in pipeline.outputs],
        donate_argnums=donated,
    )
    return jitted.lower(*(aval_of(stage, keys[b]) for b in pipeline.inputs))


def tasks_peak_bytes(staged: StagedStep, executables: Any) -> int:
    temporary = [e.memory_analysis().temp_size_in_bytes for e in executables]
    task_s = (*staged.task_s, *(task.seconds for task in staged.joined))
    return max(simulate(staged.program(), task_s, staged.transfer_s, temporary).peak_bytes)


_SENDS = ("all-gather", "all-reduce", "reduce-scatter", "collective-permute", "all-to-all", "ragged-all-to-all")
_WORKS = ("fusion", "dot", "convolution", "custom-call", "while", "call")


@dataclasses.dataclass(kw_only=True)
class Sent:
    """Bytes of the results of collectives in a step, and those of them beside which nothing runs."""

    nbytes: float = 0.0
    exposed_bytes: float = 0.0

    def add(self, other: Sent, times: int = 1) -> None:
        self.nbytes += times * other.nbytes
        self.exposed_bytes += times * other.exposed_bytes


def sent_by(module: parse.Module, name: str) -> Sent:
    """What a computation sends, as the compiler has scheduled it, with the bodies of its loops."""
    found, work = Sent(), 0
    running: dict[str, tuple[float, int]] = {}
    for instruction in module.computations[name].instructions.values():
        opcode = instruction.opcode
        kind = opcode.removesuffix("-start").removesuffix("-done")
        marks = _marks(module, instruction) if opcode in ("fusion", "async-start", "async-done") else ""
        if marks == "start" or (kind in _SENDS and opcode.endswith("-start")):
            running[instruction.name] = _nbytes(instruction), work
        elif marks == "done" or (kind in _SENDS and opcode.endswith("-done")):
            nbytes, begun = next((running.pop(o) for o in instruction.operands if o in running), (0.0, -1))
            nbytes = nbytes or _nbytes(instruction)
            found.add(Sent(nbytes=nbytes, exposed_bytes=nbytes if begun == work else 0.0))
        elif kind in _SENDS:
            found.add(Sent(nbytes=_nbytes(instruction), exposed_bytes=_nbytes(instruction)))
        elif opcode == "while":
            (body,) = instruction.called("body")
            found.add(sent_by(module, body), collectives.trip_count(module, instruction) or 1)
            work += 1
        elif opcode in _WORKS:
            work += 1
    return found


def _marks(module: parse.Module, instruction: parse.Instruction) -> str:
    """Whether a fusion of the TPU compiler starts a collective, or waits for one."""
    for name in instruction.called("calls"):
        text = [i.rest for i in module.computations[name].instructions.values() if i.opcode == "custom-call"]
        for mark in ("Start", "Done"):
            if any(f'custom_call_target="AsyncCollective{mark}"' in rest for rest in text):
                return mark.lower()
    return ""


def _nbytes(instruction: parse.Instruction) -> float:
    """The largest array of the result: of a start, which has its operands too, about what is sent."""
    return float(max((a.nbytes for a in instruction.arrays), default=0))


def sent(text: str) -> Sent:
    module = parse.parse(text)
    return sent_by(module, module.entry)


def planned(model: str, recipe: str, cluster: Any, *, large: bool) -> tuple[Case, dict[str, Any]]:
    """(case, options of `autopar.parallelize`)"""
    name, small_sizes, large_sizes = MODELS[model]
    case = CASES[name](**(large_sizes if large else small_sizes))
    options = {
        "plan": RECIPES[recipe], "search": autopar.Search(num_microbatches=MICROBATCHES),
        "cluster": cluster, "cache_dir": None,
    }  # fmt: skip
    return case, options


def medians_s(calls: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    for call in calls.values():
        call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds):
        for name in list(calls)[:: 1 if number % 2 else -1]:
            begun_s = time.perf_counter()
            calls[name]()
            times[name].append(time.perf_counter() - begun_s)
    return {name: statistics.median(of) for name, of in times.items()}


def here(model: str, recipe: str, rounds: int) -> list[str]:
    """One row on the devices of this program."""
    case, options = planned(model, recipe, autopar.Cluster.local(DEVICES), large=False)
    state, batch = case.init(jax.random.key(0)), case.batch(0)
    pipeline = autopar.parallelize(case.step, **options).compile(state, batch)
    staged, (mesh,) = pipeline.staged, stage_meshes(pipeline.staged)
    options_of = pipeline.plan.compiler_options_on(mesh.devices.flat[0])
    programs = {
        name: one_program(staged, mesh, barrier=barrier).compile(options_of)
        for name, barrier in (("loop", False), ("barrier", True))
    }
    leaves = jax.tree.leaves((state, batch))
    placed = [jax.device_put(np.asarray(x), s) for x, s in zip(leaves, pipeline.leaf_shardings, strict=True)]
    inputs_of = pipeline.leaf_of_input
    fixed = dict(pipeline.fixed)

    def inputs() -> list[Any]:
        arrays = [fixed[i] if leaf < 0 else jnp.copy(placed[leaf]) for i, leaf in enumerate(inputs_of)]
        return jax.block_until_ready(arrays)

    def as_tasks() -> Any:
        return jax.block_until_ready(pipeline.executor(inputs()))

    calls: dict[str, Callable[[], Any]] = {"copies": inputs, "tasks": as_tasks}
    calls |= {name: lambda p=p: jax.block_until_ready(p(*inputs())) for name, p in programs.items()}
    right = as_tasks()
    worst = {name: max(difference(a, b) for a, b in zip(right, calls[name](), strict=True)) for name in programs}
    found_s = medians_s(calls, rounds)
    peaks = {"tasks": tasks_peak_bytes(staged, pipeline.executables)}
    peaks |= {name: allocated_bytes(p.memory_analysis()) for name, p in programs.items()}
    ms = {name: 1e3 * (s - found_s["copies"]) for name, s in found_s.items()}
    return [
        model, recipe, *(f"{ms[name]:.1f}" for name in peaks), *(f"{n / 1e6:.1f}" for n in peaks.values()),
        *(f"{w:.0e}" for w in worst.values()),
    ]  # fmt: skip


def difference(a: Any, b: Any) -> float:
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return float(np.max(np.abs(a - b), initial=0.0) / max(1e-30, float(np.max(np.abs(a), initial=0.0))))


def elsewhere(target: str, model: str, recipe: str) -> list[str]:
    """One row as compiled for hardware that is not here."""
    case, options = planned(model, recipe, autopar.Cluster.parse(CLUSTERS[target]), large=True)
    state = jax.eval_shape(case.init, jax.random.key(0))
    batch = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), case.batch(0))
    plan = autopar.plan(case.step, state, batch, **options)
    traced = trace(case.step, (state, batch), names=("state", "batch"), donate=(0,), batch=(1,))
    staged = make_staged(traced, plan, RuleBook())
    at = staged.submeshes[0].mesh
    mesh = aot.target_mesh(target, at.axis_sizes, at.axis_names)
    device = mesh.devices.flat[0]
    program, lowered = staged.program(), [p.lowered for p in staged.stages]
    tasks = lower_tasks(staged.staged, lowered, [mesh]) + lower_joined(staged.staged, program, lowered, [mesh], {})
    options_of = [plan.compiler_options_on(device, exchanges=t.only_exchanges) for t in staged.staged.tasks]
    options_of += [plan.compiler_options_on(device) for _ in program.joined]
    executables = [t.compile(o) for t, o in zip(tasks, options_of, strict=True)]
    m = MICROBATCHES
    joined = [number for each in program.joined for number, _ in each.parts]
    runs = [
        (m if task.kind.repeats else 1) - joined.count(number) for number, task in enumerate(staged.staged.tasks)
    ] + [1] * len(program.joined)
    all_sent = {"tasks": Sent()}
    for executable, times in zip(executables, runs, strict=True):
        all_sent["tasks"].add(sent(executable.as_text()), times)
    peaks = {"tasks": tasks_peak_bytes(staged, executables)}
    for name, barrier in (("loop", False), ("barrier", True)):
        one = one_program(staged, mesh, barrier=barrier).compile(plan.compiler_options_on(device))
        peaks[name], all_sent[name] = allocated_bytes(one.memory_analysis()), sent(one.as_text())
    return [
        target, model, recipe, *(f"{n / 1e9:.2f}" for n in peaks.values()),
        *(f"{s.nbytes / 1e9:.2f} ({s.exposed_bytes / max(s.nbytes, 1):.0%})" for s in all_sent.values()),
        f"{plan.predicted.peak_bytes[0] / 1e9:.2f}",
    ]  # fmt: skip


HERE = ("model", "recipe", "tasks, ms", "loop", "barrier", "tasks, MB", "loop", "barrier", "loop differs by", "barrier")
ELSEWHERE = (
    "target", "model", "recipe", "tasks, GB", "loop", "barrier", "tasks: GB in collectives (exposed)", "loop",
    "barrier", "predicted, GB",
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", nargs="?", choices=list(CLUSTERS), help="hardware that is not here")
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES))
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    rows = []
    for model in args.models:
        for recipe in args.recipes:
            row = elsewhere(args.target, model, recipe) if args.target else here(model, recipe, args.rounds)
            print(" | ".join(row), flush=True)
            rows.append(row)
    print(markdown(ELSEWHERE if args.target else HERE, rows), description(), sep="\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
