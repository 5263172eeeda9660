"""`autopar.verify`: compares a plan with the compiled program, and the results with plain `jax.jit`.

How far rounding alone goes is seen from arguments that are moved by a unit in their last place.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.table import Table

from autopar.common import jax_compat
from autopar.common.text import PLAIN, TextConsole, TextFormat
from autopar.cost.peak_memory import allocated_bytes, allocated_for_temporaries
from autopar.cost.usage import passing_bytes
from autopar.execute import aot, collectives, nnx_objects
from autopar.execute.compiled_pipeline import CompiledPipeline
from autopar.execute.compiled_step import Compiled, CompiledStep, LoweredWhole
from autopar.execute.placement import copy_of
from autopar.execute.step_leaves import results_in_tree
from autopar.frontend.static_leaves import set_apart
from autopar.ir.rules import RuleBook
from autopar.ops.kernels.check_rules import check_rules, check_twins, half_of_digits
from autopar.passes.microbatch import micro_batched
from autopar.passes.plain_loop import run_graph
from autopar.plan.plan import Plan
from autopar.plan.schema import MeasuredRecord, Predicted
from autopar.runtime.simulator import simulate
from autopar.search.materialize import with_options_of
from autopar.step import Step
from autopar.step_views import call_split, check_is_step, lower_on


def moved(args: Any, seed: int) -> Any:
    """The arguments with each number of their floating-point arrays moved by a unit in its last place, up or down."""
    random = np.random.default_rng(seed)

    def leaf(x: Any) -> Any:
        is_array = isinstance(x, jax.Array | np.ndarray)
        if not is_array or jax_compat.is_key_dtype(x.dtype) or not jnp.issubdtype(x.dtype, jnp.inexact):
            return x
        values = np.asarray(x)
        wide = values.astype(np.complex128 if values.dtype.kind == "c" else np.float64)
        unit = float(jnp.finfo(values.dtype).eps)
        return (wide * (1 + unit * random.choice((-1.0, 1.0), values.shape))).astype(values.dtype)

    return jax.tree.map(leaf, args)


COLUMNS = 100
TRIES = 3  # of moving the arguments by a unit in their last place


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One quantity, predicted and as compiled."""

    name: str
    predicted: float
    compiled: float

    @property
    def ratio(self) -> float:
        """Predicted over compiled; 1 where both are zero."""
        if self.compiled == 0:
            return 1.0 if self.predicted == 0 else float("inf")
        return self.predicted / self.compiled


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DifferingLeaf:
    """A result that differs by more than half of its digits, relative to its largest value, and how far the step that
    it is compared with moves it where the arguments move by a unit in their last place. The first steps of Adam, which
    divide a gradient near zero by its own size, move parameters so.
    """

    path: str
    difference: float
    moved: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """The comparison of a plan with its compiled program.

    `collectives`: bytes that each device sends in a step, by kind, and their sum (`total`); `counts`: their numbers.
    For a pipeline both are sums over its stages, of one device of each, within the stage. `peak`: bytes of one device;
    for a pipeline, of the stage with the largest peak. `difference`: the largest difference of a result leaf from plain
    `jax.jit`, divided by that leaf's largest value, with the leaf's path; None where the numbers could not be compared
    (shapes only, or compiled for other hardware). `rounding`: the difference up to which half of the digits agree of
    the coarsest floating-point type that the step computes in. `differing`: the leaves beyond it, with how far rounding
    of the arguments moves each. `unchecked`: the factors of kernels that could not be run in parts here, with the
    reason. `per_microbatch`: the patterns of modules that the plan takes per micro-batch;
    where there are any, the numbers are compared with a plain loop over micro-batches instead. `plan`: the
    plan, whose page shows the comparison.
    """

    target: str
    collectives: tuple[Compared, ...]
    counts: tuple[Compared, ...]
    peak: Compared
    difference: float | None
    worst_leaf: str
    rounding: float
    differing: tuple[DifferingLeaf, ...]
    unchecked: tuple[str, ...]
    per_microbatch: tuple[str, ...]
    plan: Plan

    @property
    def total(self) -> Compared:
        return self.collectives[-1]

    @property
    def differs(self) -> bool:
        """Whether the numbers differ by more than rounding explains. Rounding to integers inside of a step may too."""
        return self.difference is not None and not self.difference <= self.rounding

    def text(self, text_format: TextFormat = PLAIN) -> str:
        """The comparison as a table."""
        console = TextConsole(COLUMNS, text_format)
        rows = Table(f"verified on {self.target}", "predicted", "compiled", "ratio")
        for row in self.collectives:
            rows.add_row(f"{row.name}, bytes", f"{row.predicted:,.0f}", f"{row.compiled:,.0f}", f"{row.ratio:.4f}")
        for row in self.counts:
            rows.add_row(f"{row.name}, count", f"{row.predicted:g}", f"{row.compiled:g}", f"{row.ratio:.3f}")
        peak = self.peak
        rows.add_row("peak memory, bytes", f"{peak.predicted:,.0f}", f"{peak.compiled:,.0f}", f"{peak.ratio:.3f}")
        console.table(rows)
        if self.difference is not None:
            other = "a plain loop over micro-batches" if self.per_microbatch else "plain jax.jit"
            found = f"at most {self.difference:.2e} of a leaf's largest value from {other} ({self.worst_leaf})"
            if self.differs:
                console.line(f"numbers differ: {found}; half of the digits are {self.rounding:.1e}")
                if self.differing:
                    console.line(self._of_moved(other))
            else:
                console.line(f"numbers: {found}")
        for kernel in self.unchecked:
            console.line(f"not checked in parts: {kernel}")
        return console.text()

    def _of_moved(self, other: str) -> str:
        """Whether rounding alone moves the leaves that differ as far."""
        leaf = max(self.differing, key=lambda leaf: leaf.difference / leaf.moved if leaf.moved else float("inf"))
        moves = f"where the arguments move by a unit in their last place, {other} moves {leaf.path} by {leaf.moved:.2e}"
        if leaf.difference <= leaf.moved:
            return f"rounding alone goes as far: {moves}, which differs by {leaf.difference:.2e}"
        return f"rounding alone does not go as far: {moves}, and it differs by {leaf.difference:.2e}"

    __str__ = text


def verify(step: Step, *args: Any, compile_for: str | None = None) -> Verification:
    """Compares the plan of a step with its compiled program, and its results with plain `jax.jit`.

    Args:
        step: What `autopar.parallelize` made.
        args: Its arguments, arrays or shapes (`jax.ShapeDtypeStruct`; then no numbers are compared). Nothing is
            donated.
        compile_for: Hardware that need not be here, such as "tpu:v5e:2x4" (needs the extra `autopar[tpu]`) or
            "gpu:h100:2x8", two hosts of eight (needs `autopar[gpu]`).

    Results that differ are no error: the text says `numbers differ`, and `differs` is true. Kernels (`autopar.kernel`)
    are also compared on random operands: with their twins, and, where the step is compiled for the devices here, with
    themselves in parts along each factor that their rules let devices split, whether this plan does so or not.

    Raises: what planning and compiling raise; InvalidArgumentError where a kernel does not compute what its twin
    computes, or what its parts do.
    """
    check_is_step("autopar.verify", step)
    args = nnx_objects.split(args)
    compiled: CompiledStep
    if compile_for is None:
        compiled, target = step.compile(*args), f"{jax.default_backend()} x {step.plan(*args).cluster.num_devices}"
    else:
        compiled, target = compile_for_target(step, compile_for, *args), compile_for
    collectives, counts = compare_traffic(compiled.plan.predicted, traffic_of(compiled))
    peak = Compared(
        name="peak",
        predicted=float(max(compiled.plan.predicted.peak_bytes) + host_state_bytes(compiled)),
        compiled=float(peak_bytes(compiled)),
    )
    patterns, rounding = mixing_modules(compiled), rounding_of(compiled.traced.jaxpr)
    arrays = all(not isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(args))
    check_twins(compiled.traced.jaxpr)
    unchecked = check_rules(compiled.traced.jaxpr) if compile_for is None else ()
    differences: dict[str, float] = {}
    differing: tuple[DifferingLeaf, ...] = ()
    if compile_for is None and arrays:
        differences = compare_numbers(step, compiled, args)
        beyond = {path: off for path, off in differences.items() if not off <= rounding}
        differing = beside_moved(step, compiled, args, beyond) if beyond else ()
    worst = max(differences, key=lambda path: differences[path], default="")
    return Verification(
        target=target,
        collectives=collectives,
        counts=counts,
        peak=peak,
        difference=differences.get(worst),
        worst_leaf=worst,
        rounding=rounding,
        differing=differing,
        unchecked=unchecked,
        per_microbatch=patterns,
        plan=with_measured(compiled.plan, (*collectives, peak), counts),
    )


def with_measured(plan: Plan, sizes: Sequence[Compared], counts: Sequence[Compared]) -> Plan:
    """The plan with what the compiled program has beside the predictions, bytes and numbers."""
    rows = []
    for compared, unit, what in ((sizes, "bytes", "bytes of a device"), (counts, "", "number")):
        for row in compared:
            measured = MeasuredRecord(
                source="verify", name=f"{row.name}, {what}", unit=unit, predicted=row.predicted, measured=row.compiled
            )
            rows.append(measured)
    record = dataclasses.replace(plan.record, measured=(*plan.record.measured, *rows))
    return dataclasses.replace(plan, record=record)


def compile_for_target(step: Step, target: str, *args: Any) -> Compiled:
    """A step compiled under its plan for hardware that need not be here: its text and memory, nothing to run.

    Raises: as `lower_for_target`.
    """
    return lower_for_target(step, target, *args).compile()


def lower_for_target(step: Step, target: str, *args: Any) -> LoweredWhole:
    """A step lowered under its plan for hardware that need not be here.

    Raises: what `autopar.execute.aot.target_mesh` raises, and what planning raises.
    """
    aot.target_devices(target)  # a compiler that is missing is said before a plan is searched for
    plan = step.plan(*args)
    return lower_on(step, aot.target_mesh(target, plan.mesh.axis_sizes, plan.mesh.axis_names), *args)


def traffic_of(compiled: CompiledStep) -> collectives.Traffic:
    """The collectives of a compiled step; of a pipeline those of each task, as often as it runs."""
    if isinstance(compiled, Compiled):
        return collectives.traffic(collectives.collectives(compiled.as_text()))
    sent: list[collectives.Collective] = []
    staged = compiled.staged
    in_joined = Counter(number for joined in staged.joined for number, _ in joined.parts)
    every = [staged.schedule.num_microbatches if task.kind.repeats else 1 for task in staged.staged.tasks]
    times = [*(runs - in_joined[number] for number, runs in enumerate(every)), *(1 for _ in staged.joined)]
    for runs, executable in zip(times, compiled.executables, strict=True):
        sent += [dataclasses.replace(c, count=c.count * runs) for c in collectives.collectives(executable.as_text())]
    return collectives.traffic(tuple(sent))


def peak_bytes(compiled: CompiledStep) -> int:
    """Memory of one device as compiled; of a pipeline its buffers, with the temporaries of its tasks as compiled."""
    if isinstance(compiled, Compiled):
        return allocated_bytes(compiled.executable)
    staged = compiled.staged
    temporary = [allocated_for_temporaries(executable) for executable in compiled.executables]
    task_s = (*staged.task_s, *(task.seconds for task in staged.joined))
    return max(simulate(compiled.executor.program, task_s, staged.transfer_s, temporary).peak_bytes)


def host_state_bytes(compiled: CompiledStep) -> int:
    """Bytes in host memory that the compiler counts as device memory, as XLA does on CPU."""
    if isinstance(compiled, CompiledPipeline):
        # Neither side counts what waits between tasks. What a task itself brings back, the compiler counts.
        tasks = zip(compiled.staged.staged.tasks, compiled.executables, strict=False)
        in_one = [task for task, executable in tasks if not _has_host_memory(executable.memory_analysis())]
        stages = [planned.lowered for planned in compiled.staged.stages]
        kept = (passing_bytes(stages[t.stage].stage.graph, t.instructions, stages[t.stage].mesh) for t in in_one)
        return max(kept, default=0)
    return 0 if _has_host_memory(compiled.memory_analysis()) else sum(compiled.plan.predicted.host_bytes)


def _has_host_memory(stats: Any) -> bool:
    return bool(stats.host_argument_size_in_bytes or stats.host_temp_size_in_bytes or stats.host_output_size_in_bytes)


def compare_traffic(
    predicted: Predicted, compiled: collectives.Traffic
) -> tuple[tuple[Compared, ...], tuple[Compared, ...]]:
    """(bytes by kind and in all, counts by kind): predicted beside compiled."""
    expected = predicted.by_kind()
    kinds = dict.fromkeys((*expected, *(k.value for k in compiled.count)))
    sent = {k.value: b for k, b in compiled.bytes.items()}
    count = {k.value: n for k, n in compiled.count.items()}
    collectives = [Compared(name=k, predicted=expected.get(k, (0.0, 0.0))[1], compiled=sent.get(k, 0.0)) for k in kinds]
    collectives.append(Compared(name="total", predicted=predicted.sent_bytes, compiled=compiled.total_bytes))
    counts = [Compared(name=k, predicted=expected.get(k, (0.0, 0.0))[0], compiled=count.get(k, 0)) for k in kinds]
    return tuple(collectives), tuple(counts)


def compare_numbers(step: Step, compiled: CompiledStep, args: Sequence[Any]) -> dict[str, float]:
    """By path of a result leaf, its relative difference from plain `jax.jit`. The arguments survive.

    Where modules are taken per micro-batch it is that from a plain loop over micro-batches.
    """
    return _differences(compiled, as_written(step, compiled, args), call_split(step, copy_of(args)))


def beside_moved(
    step: Step, compiled: CompiledStep, args: Sequence[Any], beyond: Mapping[str, float]
) -> tuple[DifferingLeaf, ...]:
    """The leaves that differ, with how far they move where the arguments do: the most of some tries."""
    expected = as_written(step, compiled, args)
    tries = [_differences(compiled, expected, as_written(step, compiled, moved(args, seed))) for seed in range(TRIES)]
    return tuple(
        DifferingLeaf(path=path, difference=off, moved=max(found[path] for found in tries))
        for path, off in beyond.items()
    )


def as_written(step: Step, compiled: CompiledStep, args: Sequence[Any]) -> Any:
    """The results of plain `jax.jit`, or of a loop over micro-batches where modules are taken in each of them."""
    return in_a_loop(step, compiled, args) if mixing_modules(compiled) else step.plain(*args)


def _differences(compiled: CompiledStep, expected: Any, got: Any) -> dict[str, float]:
    paths = compiled.traced.out_paths[: compiled.traced.out_tree.num_leaves]
    differences: dict[str, float] = {}
    leaves_of = [jax.tree.leaves(set_apart(results)) for results in (expected, got)]
    for path, a, b in zip(paths, *leaves_of, strict=True):
        differences[path] = max(leaf_difference(a, b), differences.get(path, 0.0))
    return differences


def rounding_of(jaxpr: Any) -> float:
    """The relative difference at which half of the digits agree of the coarsest floating-point type in a step."""
    types = {v.aval.dtype for eqn in jax_compat.equations_in(jaxpr) for v in eqn.outvars if hasattr(v.aval, "dtype")}
    return max((half_of_digits(t) for t in types), default=0.0)


def mixing_modules(compiled: CompiledStep | LoweredWhole) -> tuple[str, ...]:
    """The patterns of modules that mix the examples of a micro-batch in the plan; none in one program."""
    return compiled.staged.graph.per_microbatch if isinstance(compiled, CompiledPipeline) else ()


def in_a_loop(step: Step, compiled: CompiledStep, args: Sequence[Any]) -> Any:
    """The results of a plain loop over the micro-batches of a plan on one device: gradient accumulation."""
    assert isinstance(compiled, CompiledPipeline), "one program has no micro-batches"
    traced = with_options_of(compiled.plan, compiled.traced)
    graph = micro_batched(traced, compiled.staged.graph.num_microbatches, RuleBook())
    leaves = step.plain_leaves(*args)
    return results_in_tree(traced, jax.jit(lambda xs: run_graph(graph, xs))(leaves))


def leaf_difference(expected: Any, got: Any) -> float:
    """Largest absolute difference of two arrays over the largest finite value of the expected one; 0 for equal ones.

    Values that are not finite must stand in the same places, else the difference is infinite.
    """
    if jax_compat.is_key_dtype(expected.dtype):
        expected, got = jax.random.key_data(expected), jax.random.key_data(got)
    a, b = np.asarray(expected), np.asarray(got)
    if a.dtype.kind in "biu":
        a, b = a.astype(np.float64), b.astype(np.float64)
    wide = np.complex128 if a.dtype.kind == "c" else np.float64
    a, b = a.astype(wide), b.astype(wide)
    finite = np.isfinite(a)
    if not np.array_equal(finite, np.isfinite(b)) or not np.array_equal(a[~finite], b[~finite], equal_nan=True):
        return float("inf")
    if not finite.any():
        return 0.0
    scale = float(np.abs(a[finite]).max())
    difference = float(np.abs(a[finite] - b[finite]).max())
    return difference / scale if scale else difference
