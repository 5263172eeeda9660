"""`autopar.measure`: times a step on one device, kind of operations by kind, for predictions on any number of them.

The step runs as it is planned for one device. The clock gives its time, the profiler the share of each kernel: programs
that are profiled bear the numbers of the graph's operations, so that each kernel is known to run these. Idle time
between kernels is spread evenly over all their runs, but for the time that the model has between the turns of loops.
Of operations of one kind (`timed_kinds`) the times by the device's constants and as they ran are kept beside one
another, by size; the cost model reads the ones off the others for parts of any size.

Not timed: collectives, which `Cluster.measure` times between several devices, and operations in branches that are not
the longest.
"""

from __future__ import annotations

import dataclasses
import math
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
from rich.table import Table

from autopar.common import jax_compat
from autopar.common.progress import Progress
from autopar.common.text import PLAIN, TextConsole, TextFormat, text_of_bytes, text_of_s
from autopar.cost.cost_model import NodeCosts, cost_model, timed_kinds
from autopar.cost.kernel_traffic import is_in_kernels
from autopar.cost.overlap import timed
from autopar.cost.usage import compute_times_s
from autopar.errors import InvalidArgumentError, MemoryLimitError, UnsupportedError
from autopar.execute import parse
from autopar.execute.compiled_step import build, lower_whole
from autopar.execute.plan_sources import PlanningProblem
from autopar.frontend.static_leaves import set_apart
from autopar.hardware.cluster import Cluster
from autopar.hardware.kinds import DeviceKind, OperationTimes, Platform
from autopar.hardware.measurement import FitQuality
from autopar.ir.graph import Op, OpKind
from autopar.ir.primitives import MATRIX_PRODUCTS
from autopar.lowering.emit import number_in
from autopar.plan.plan import Plan
from autopar.search.materialize import make_function
from autopar.search.planner import make_plan
from autopar.step import Step
from autopar.step_views import alone_on, check_is_step, cluster_of, planning_problem_of, save_rules
from autopar.train.monitoring.step_profile import (
    RECORDED_PROGRAM_OPTIONS,
    DeviceEvent,
    length_s,
    operations_of,
    recorded,
)
from autopar.tuning import alternate, check_one_process, turn_of

COLUMNS = 120
OF_STEP = "step "  # `FitQuality.what` of a step's operations, before its name
RECORDED_TURNS = 3  # as `turn_of` has them: a few steps in succession
# In place of the kind of operations: kernels that bear the number of none, such as copies that XLA adds.
NO_OPERATION = "no operation"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KindTime:
    """Operations of a kind in a step: how often they run, and the seconds that they take together."""

    kind: str
    runs: float
    predicted_s: float
    measured_s: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepMeasurement:
    """A step as it was timed on one device.

    Attributes:
        step: Its name.
        cluster: The cluster that the step was for, whose device has the times of the step's operations.
        plan: For one device, by its constants alone.
        measured_s: Median seconds of a step.
        corrected_s: Seconds of the same program as the cluster with these times predicts it.
        kinds: By kind of operation, those that take longest first.
    """

    step: str
    cluster: Cluster
    plan: Plan
    measured_s: float
    corrected_s: float
    kinds: tuple[KindTime, ...]

    @property
    def predicted_s(self) -> float:
        """Seconds of the step by the constants of the device alone."""
        return self.plan.predicted.step_time_s

    def to_dict(self) -> dict[str, Any]:
        """The times as values for JSON."""
        numbers = {name: getattr(self, name) for name in ("step", "predicted_s", "measured_s", "corrected_s")}
        return {**numbers, "kinds": [dataclasses.asdict(kind) for kind in self.kinds]}

    def text(self, text_format: TextFormat = PLAIN) -> str:
        """The times as a table."""
        console = TextConsole(COLUMNS, text_format)
        rows = Table(f"{self.step} on one {self.cluster.device.name}", "runs", "by constants", "measured", "ratio")
        for row in self.kinds:
            ratio = f"{row.predicted_s / row.measured_s:.2f}" if row.measured_s and row.predicted_s else ""
            rows.add_row(row.kind, f"{row.runs:g}", text_of_s(row.predicted_s), text_of_s(row.measured_s), ratio)
        rows.add_row("step", "", text_of_s(self.predicted_s), text_of_s(self.measured_s), self._ratio(self.predicted_s))
        console.table(rows)
        sentence = f"with these times the step is predicted to take {text_of_s(self.corrected_s)}"
        console.line(f"{sentence}, {self._ratio(self.corrected_s)} of the measured time")
        return console.text()

    def _ratio(self, predicted_s: float) -> str:
        return f"{predicted_s / self.measured_s:.2f}"

    __str__ = text


def measure(step: Step, *args: Any, seconds: float = 10.0) -> StepMeasurement:
    """Times a step on the first device, and the kinds of its operations there.

    The cluster of the result predicts steps of such devices, any number of them, by the times of these operations;
    other operations by the constants that the step's cluster has. The step is planned for one device by a free search,
    whatever plan or recipe it has.

    Args:
        step: A step of `autopar.parallelize`.
        args: Its arguments, arrays. They survive: the device holds one more state than the given one. Where that is too
            much, pass one in the memory of the host (`jax.device_get(state)`).
        seconds: Approximate duration of the timed steps, without compilation.

    Raises: InvalidArgumentError where the step does not fit into one device, whole and in one micro-batch, for several
    virtual devices of a CPU, and for a cluster of other devices; UnsupportedError in a program of several processes
    and for a profile without times of the step's operations; the errors of planning, compiling and running.
    """
    check_is_step("autopar.measure", step)
    check_one_process("autopar.measure")
    cluster = cluster_of(step)
    check_cluster(cluster)
    # Without times that an earlier step left.
    cluster = dataclasses.replace(
        cluster,
        device=dataclasses.replace(cluster.device, operation_times=()),
        fits=tuple(fit for fit in cluster.fits if not fit.what.startswith(OF_STEP)),
    )
    problem = planning_problem_of(alone_on(step, cluster.submesh(1, 1)), *args)
    progress = Progress(f"autopar measure {step.__name__}", show=problem.show_progress)
    plan = _plan(problem, progress)
    (took_s,) = alternate([turn_of(build(problem.traced, plan, problem.rules, progress), problem.arguments)], seconds)
    if isinstance(took_s, Exception):
        raise took_s
    save_rules(step)
    return _measurement(cluster, _recorded(problem, plan), statistics.median(took_s))


def check_cluster(cluster: Cluster) -> None:
    """Raises: InvalidArgumentError for a cluster of other devices than those here, and where one stands for several."""
    here, device = _name_here(), cluster.device
    is_shared = device.platform is Platform.CPU and cluster.num_devices > 1
    if here in (device.platform, device.name) and not is_shared:
        return
    raise InvalidArgumentError(
        where="autopar.measure",
        expected=f"devices of one kind that are here ({here}), on a CPU one device",
        got=f"{cluster.num_devices} x {device.name}" + (", which share the cores of one host" if is_shared else ""),
        hint="parallelize(..., cluster=Cluster.local(1)), or autopar measure --devices 1",
    )


def _name_here() -> str:
    """The first device's name in the tables; the platform alone of a CPU, and of a device that no table has."""
    platform = jax.devices()[0].platform
    if platform == Platform.CPU:
        return platform
    try:
        return Cluster.local(1, measured=False).device.name
    except InvalidArgumentError:
        return platform


def check_arguments(name: str, arguments: Any, cluster: Cluster) -> None:
    """Raises: InvalidArgumentError for arguments, or their shapes, that alone are too large for one device."""
    nbytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(set_apart(arguments)))
    if nbytes > cluster.device.memory_bytes:
        raise _too_large(name, f"arguments of {text_of_bytes(nbytes)} on {text_of_bytes(cluster.device.memory_bytes)}")


def _plan(problem: PlanningProblem, progress: Progress) -> Plan:
    """The plan for one device: one program, all state on it. Raises: InvalidArgumentError where that is too much."""
    inputs = problem.traced, problem.trees, problem.cluster, problem.request, problem.rules
    try:
        plan = make_plan(*inputs, progress)
    except MemoryLimitError as error:
        needed, limit = text_of_bytes(error.needed_bytes), text_of_bytes(error.limit_bytes)
        raise _too_large(problem.traced.name, f"one that needs {needed} of {limit}") from error
    if any(plan.predicted.host_bytes):
        raise _too_large(problem.traced.name, "state or activations in the memory of the host")
    return plan


def _too_large(name: str, got: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        where=f"autopar.measure({name}, ...)",
        expected="a step that fits into the memory of one device",
        got=got,
        hint="give it fewer layers or examples (--arg layers=4, if the function takes them): the same kinds of "
        "operations are timed",
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RecordedProgram:
    """A step's program in the profile: its instructions, and the part of their seconds that is left where those that
    ran side by side count once.

    `seconds_by` predicts the program on a device: the seconds of a step, and of each operation in it.
    """

    name: str
    plan: Plan
    ops: Mapping[int, Op]
    ran: Sequence[RanInstruction]
    side_by_side: float
    seconds_by: Callable[[DeviceKind], tuple[float, dict[int, float]]]


def _recorded(problem: PlanningProblem, plan: Plan) -> RecordedProgram:
    """Runs the step under the profiler as a program whose names bear the numbers of operations."""
    traced, mesh, rules = problem.traced, plan.concrete_mesh(), problem.rules
    options = RECORDED_PROGRAM_OPTIONS.get(jax.default_backend(), {})
    with jax_compat.names_in_cache_key():
        program = lower_whole(traced, plan.with_compiler_options(options), mesh, rules, is_numbered=True).compile()
    turn = turn_of(program, problem.arguments)
    turn()  # a program's first run is slower, and on a GPU hides kernels
    with recorded() as events:
        steps = sum(1 + len(turn()) for _ in range(RECORDED_TURNS))
    made = make_function(traced, plan, mesh, rules)

    def seconds_by(device: DeviceKind) -> tuple[float, dict[int, float]]:
        model = cost_model(dataclasses.replace(plan.cluster, device=device), plan.mesh)
        costs = NodeCosts(made.graph, model)
        step_s = timed(made.graph, made.lowered, model, costs).end_s
        return step_s, compute_times_s(made.graph, made.lowered, model, costs)

    ran, side_by_side = ran_instructions(events(), program.as_text(), steps)
    if not any(each.numbers for each in ran):
        raise _without_names(
            traced.name, f"{len(ran)} instructions without" if ran else "none of the step's operations"
        )
    return RecordedProgram(
        name=traced.name,
        plan=plan,
        ops={op.id: op for op in made.graph.ops()},
        ran=ran,
        side_by_side=side_by_side,
        seconds_by=seconds_by,
    )


def _without_names(name: str, got: str) -> UnsupportedError:
    return UnsupportedError(
        where=f"autopar.measure({name}, ...)",
        expected="a profile of the step in which operations bear their names",
        got=got,
        hint="look whether another program profiles this device, and whether step.profile shows the step",
    )


def _measurement(cluster: Cluster, program: RecordedProgram, step_s: float) -> StepMeasurement:
    """The times of operations that add up to the seconds of a step by the clock.

    Raises: UnsupportedError where no time is of an operation that is predicted to take any.
    """
    predicted_step_s, predicted_s = program.seconds_by(cluster.device)
    beside_s = max(0.0, predicted_step_s - sum(predicted_s.values()))
    ran = with_products(program.ran, program.ops)
    if not any(each.seconds and any(predicted_s.get(n) for n in each.numbers) for each in ran):
        raise _without_names(program.name, "no time of one that is predicted to take any")
    ran = on_the_clock(ran, program.side_by_side, step_s, beside_s)
    measured_s, of_none_s = seconds_of_operations(ran, predicted_s)
    kinds = _kinds(program.ops, predicted_s, measured_s, of_none_s)
    measured_s = with_shares_of(of_none_s, program.ops, predicted_s, measured_s)
    times = operation_times(program.ops, predicted_s, measured_s)
    device = dataclasses.replace(cluster.device, operation_times=times)
    corrected_s, by_operation_s = program.seconds_by(device)
    fit = _fit(program, measured_s, by_operation_s)
    return StepMeasurement(
        step=program.name,
        cluster=dataclasses.replace(cluster, device=device, fits=(*cluster.fits, fit)),
        plan=program.plan,
        measured_s=step_s,
        corrected_s=corrected_s,
        kinds=kinds,
    )


def _fit(program: RecordedProgram, measured_s: Mapping[int, float], corrected_s: Mapping[int, float]) -> FitQuality:
    """How well the times of kinds give back those of single operations, of products and kernels where there are any."""
    ratios = {n: corrected_s[n] / s for n, s in measured_s.items() if s and corrected_s[n]}
    alone = {n: ratio for n, ratio in ratios.items() if not is_in_kernels(program.ops[n])} or ratios
    worst = max(alone, key=lambda n: abs(math.log(alone[n])))
    return FitQuality(
        what=f"{OF_STEP}{program.name}",
        constants=f"{len({timed_kinds(program.ops[n])[0] for n in ratios})} kinds of operations",
        points=len(alone),
        median_error=statistics.median(abs(ratio - 1) for ratio in alone.values()),
        worst=f"{timed_kinds(program.ops[worst])[-1]}: {alone[worst]:.2f} of its time",
    )


def _kinds(
    ops: Mapping[int, Op], predicted_s: Mapping[int, float], measured_s: Mapping[int, float], of_none_s: float
) -> tuple[KindTime, ...]:
    numbers: dict[str, list[int]] = defaultdict(list)
    for n in predicted_s:
        numbers[timed_kinds(ops[n])[-1]].append(n)
    rows = [
        KindTime(
            kind=kind,
            runs=sum(ops[n].count for n in of_kind),
            predicted_s=sum(predicted_s[n] for n in of_kind),
            measured_s=sum(measured_s[n] for n in of_kind),
        )
        for kind, of_kind in numbers.items()
    ]
    rows.append(KindTime(kind=NO_OPERATION, runs=0, predicted_s=0.0, measured_s=of_none_s))
    return tuple(sorted(rows, key=lambda row: -row.measured_s))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RanInstruction:
    """An instruction of a compiled program in a step: the operations of which it is, whether it multiplies matrices (or
    convolves), how often and how long it ran.
    """

    numbers: frozenset[int]
    multiplies: bool
    runs: float
    seconds: float


def on_the_clock(
    ran: Sequence[RanInstruction], side_by_side: float, step_s: float, beside_s: float
) -> list[RanInstruction]:
    """Instructions whose seconds add up to those of a step by the clock, less those that the model has beside
    operations, which nothing runs in. Recording takes time too, and instructions that ran side by side count once.
    """
    total_s = sum(each.seconds for each in ran)
    busy_s = min(total_s * side_by_side, step_s)
    share = busy_s / total_s
    idle_s = max(0.0, step_s - busy_s - beside_s) / sum(each.runs for each in ran)
    return [dataclasses.replace(each, seconds=each.seconds * share + each.runs * idle_s) for each in ran]


def ran_instructions(events: Sequence[DeviceEvent], text: str, steps: int) -> tuple[list[RanInstruction], float]:
    """The instructions of a program whose names bear the numbers of operations, by the events of so many steps, and the
    part of their seconds that is left where those that ran side by side count once.
    """
    module, operations = parse.parse(text), operations_of(text)
    by_name = {i.name: i for c in module.computations.values() for i in c.instructions.values()}
    known = [event for event in events if (event.program, event.operation) in operations]
    runs: dict[str, list[float]] = defaultdict(list)
    for event in known:
        runs[event.operation].append(event.end_s - event.start_s)
    found = []
    for name, took in runs.items():
        of_step = len(took) / steps
        seconds = of_step * statistics.median(took)  # other work of the machine falls on some of the runs
        parts = list(_with_called(by_name[name], module))
        found.append(
            RanInstruction(
                numbers=frozenset(n for part in parts if (n := number_in(part.op_name)) is not None),
                multiplies=any(part.opcode in _PRODUCTS or _LIBRARY_PRODUCT.search(part.rest) for part in parts),
                runs=of_step,
                seconds=seconds,
            )
        )
    total_s = sum(map(sum, runs.values()))
    return found, length_s(known) / total_s if total_s else 1.0


def _with_called(instruction: parse.Instruction, module: parse.Module) -> Iterator[parse.Instruction]:
    """An instruction and those of the computations that it calls."""
    yield instruction
    for name in (name for attribute in _CALLED for name in instruction.called(attribute)):
        for inner in module.computations[name].instructions.values():
            yield from _with_called(inner, module)


_CALLED = ("calls", "to_apply", "called_computations")
_PRODUCTS = ("dot", "convolution")
_LIBRARY_PRODUCT = re.compile(r'custom_call_target="__(?:cublas|cudnn\$conv|onednn)')


def with_products(ran: Iterable[RanInstruction], ops: Mapping[int, Op]) -> list[RanInstruction]:
    """Instructions that multiply with the number of a product, and others without.

    XLA transposes the operands of a product in place of its result, and names it by the transpose: the product is the
    nearest one among the operations of which the named one was computed. One that it cut into parts may have no name:
    it is one of the products that no other instruction is. An instruction that prepares operands, or adds up parts of
    results, bears the number of the product, and has it where it has no other.
    """
    made_by = {v: number for number, op in ops.items() for v in op.outputs}
    products = frozenset(number for number, op in ops.items() if op.primitive in MATRIX_PRODUCTS)

    def producers(numbers: frozenset[int]) -> frozenset[int]:
        read = (made_by.get(atom) for n in numbers for atom in ops[n].inputs if isinstance(atom, int))
        return frozenset(n for n in read if n is not None and ops[n].kind is OpKind.EQUATION)

    found = []
    for each in ran:
        numbers = nearest = each.numbers.intersection(ops)
        while each.multiplies and nearest and not numbers & products:
            nearest = producers(nearest)
            numbers |= nearest & products
        if not each.multiplies:
            numbers = numbers - products or numbers
        found.append(dataclasses.replace(each, numbers=numbers))
    unseen = products.difference(*(each.numbers for each in found))
    return [
        dataclasses.replace(each, numbers=each.numbers | unseen)
        if each.multiplies and not each.numbers & products
        else each
        for each in found
    ]


def seconds_of_operations(
    ran: Iterable[RanInstruction], predicted_s: Mapping[int, float]
) -> tuple[dict[int, float], float]:
    """(seconds of each operation in a step, those of instructions of no operation that has a prediction). Operations
    that run as one share its time as their predictions stand; one that several compute again has a part of its
    prediction in each.
    """
    ran = list(ran)
    copies = Counter(number for each in ran for number in each.numbers)
    found, of_none_s = dict.fromkeys(predicted_s, 0.0), 0.0
    for each in ran:
        parts = {n: predicted_s[n] / copies[n] for n in each.numbers if predicted_s.get(n)}
        total_s = sum(parts.values())
        of_none_s += 0.0 if parts else each.seconds
        for number, part_s in parts.items():
            found[number] += each.seconds * part_s / total_s
    return found, of_none_s


def with_shares_of(
    of_none_s: float, ops: Mapping[int, Op], predicted_s: Mapping[int, float], measured_s: Mapping[int, float]
) -> dict[int, float]:
    """Measured seconds with those of no operation among them: copies, which belong to operations that move bytes. They
    go to the parts of kernels as their predictions stand, and to all operations where there are none.
    """
    moving = {n: s for n, s in predicted_s.items() if is_in_kernels(ops[n])}
    moving = moving if any(moving.values()) else dict(predicted_s)
    total_s = sum(moving.values())
    return {n: s + of_none_s * moving.get(n, 0.0) / total_s for n, s in measured_s.items()}


def operation_times(
    ops: Mapping[int, Op], predicted_s: Mapping[int, float], measured_s: Mapping[int, float]
) -> tuple[OperationTimes, ...]:
    """By kind of operation, seconds of one run as predicted and as measured, both of a step; operations of one size
    together, and all those of a kind that are parts of kernels: of these one predicts no kernel. Kinds of which nothing
    was measured are left out.
    """
    sizes: dict[str, dict[float, list[int]]] = defaultdict(lambda: defaultdict(list))
    for number, seconds in predicted_s.items():
        op = ops[number]
        if seconds > 0:
            for kind in timed_kinds(op):
                sizes[kind][0.0 if is_in_kernels(op) else seconds / op.count].append(number)
    found = []
    for kind, of_kind in sizes.items():
        points = []
        for numbers in of_kind.values():
            runs = sum(ops[n].count for n in numbers)
            points.append((sum(predicted_s[n] for n in numbers), sum(measured_s[n] for n in numbers), runs))
        points.sort(key=lambda point: point[0] / point[2])
        if any(measured for _, measured, _ in points):
            at = tuple(predicted / runs for predicted, _, runs in points)
            found.append(OperationTimes(kind=kind, predicted_s=at, measured_s=_not_descending(points)))
    return tuple(found)


def _not_descending(points: Sequence[tuple[float, float, float]]) -> tuple[float, ...]:
    """Measured seconds of one run of each size: neighbours whose larger one takes less time have their mean, so that
    the seconds of all together stay (pool adjacent violators: Ayer et al., 1955). So do a size that was not seen, since
    XLA made its operations a part of others, and the next larger one: nothing takes no time.
    """
    pools: list[list[tuple[float, float]]] = []
    mean = lambda pool: sum(seconds for seconds, _ in pool) / sum(runs for _, runs in pool)  # noqa: E731
    for _, seconds, runs in points:
        pools.append([(seconds, runs)])
        while len(pools) > 1 and (mean(pools[-2]) >= mean(pools[-1]) or not mean(pools[-2])):
            pools[-2:] = [[*pools[-2], *pools[-1]]]
    return tuple(mean(pool) for pool in pools for _ in pool)
