"""`autopar.lint`: a step that stays on `jax.jit`, in its author's own shardings: what they cost, and what would pay."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from autopar.api import parallelize
from autopar.attention.match import large_scores
from autopar.benching import as_cluster, problem_of
from autopar.calls import nnx_objects
from autopar.common.progress import Progress, rare_garbage_collection
from autopar.compiler.planner import make_plan
from autopar.errors import AutoparError, InvalidArgumentError, UnsupportedError
from autopar.frontend.jit_shardings import JitShardings, dims_of, jit_shardings_of, named_sharding
from autopar.frontend.tracing import abstract, tie_state
from autopar.hardware.cluster import Cluster
from autopar.ir.layout import spec_text
from autopar.ir.mesh import AXIS_NAMES
from autopar.ir.traced_step import ShardingsInCode, TracedStep
from autopar.lint_changes import Planned, axes_of, changes_of, state_of
from autopar.lint_report import Computed, Held, Lint, Sent
from autopar.manual.given_layouts import ByLine, GivenLayouts, GivenPlan, by_line, laid_anew
from autopar.manual.walks import Problem
from autopar.plan import summary
from autopar.plan.context import StepGraphs
from autopar.plan.modules import collective_rows
from autopar.plan.options import Attention, Effort, PlanRequest
from autopar.plan.plan import Plan
from autopar.sharding.pins import Pin
from autopar.step import Step
from autopar.step_views import function_of, on_cluster

# Rows of a table; the part of a step, or of the limit of memory, from which on a row is told.
ROWS, LEAST = 6, 0.002


@rare_garbage_collection()
def lint(
    step: Step | Callable[..., Any],
    *args: Any,
    cluster: Cluster | str | None = None,
    search: bool = True,
    effort: str = "quick",
) -> Lint:
    """Plans a step in the shardings that its author gave it, and says what these cost and what would pay.

    Shardings of arguments are those of the step's own `jax.jit`, else those of the arrays or shapes; where any is
    given, arguments without one are whole on each device. Results have those of `jax.jit`, and state goes out as it
    comes in. Constraints in the code (`with_sharding_constraint`) are kept. All else lies as a partitioner lays it.

    Args:
        step: A function, mostly `jax.jit(step, in_shardings=..., donate_argnums=...)`, or a step of `parallelize`.
        args: Its arguments, arrays or shapes (`jax.ShapeDtypeStruct`), which may have shardings.
        cluster: The hardware to plan for, also as text; None: the devices of this program.
        search: Whether the search plans the step too, without any of these shardings.
        effort: How far searches go on, as of `autopar.Search`.

    Raises: InvalidArgumentError for a step without shardings, and for a mesh of another size than the cluster;
    UnsupportedError.
    """
    hardware = Cluster.local() if cluster is None else as_cluster(cluster)
    args = nnx_objects.split(args)
    jit = _shardings_of(step, args)
    problem = problem_of(on_cluster(_step_of(step, args, jit), hardware), *args)
    given = _given(problem, jit)
    problem = laid_anew(problem, given)
    own = Planned(problem=problem, given=given, request=_as_written(problem, Effort(effort)))
    name = cluster if isinstance(cluster, str) else hardware.name
    progress = Progress(f"{problem.traced.name} on {name}", show=True)
    with progress.pass_("as it is"):
        made = own.plan()
        plan, lines = made.plan(), by_line(made)
    changes, without_gain = changes_of(own, made, jit, progress)
    with progress.pass_("the search's plan"):
        found, why = _searched(problem, Effort(effort)) if search else (None, "")
    return Lint(
        plan=plan,
        cluster=name,
        axes=given.axes,
        notes=tuple(_notes(made, given, jit)),
        collectives=_sent(lines),
        alike=_alike(lines),
        whole=_whole(made, plan, lines),
        peak_line=lines.peak_line,
        largest=_largest(lines),
        recomputed=tuple(note for note in plan.record.notes if note.startswith("without jax.checkpoint")),
        scores=_scores(made, plan, lines),
        changes=changes,
        without_gain=without_gain,
        search=found,
        why_no_search=why,
    )


def _as_written(problem: Problem, effort: Effort) -> PlanRequest:
    """The step as its code has it: its attention, what it recomputes."""
    return dataclasses.replace(
        problem.request,
        attention=Attention.AS_WRITTEN,
        scan_recompute="",
        constraints=ShardingsInCode.IGNORE,
        effort=effort,
    )


# What the author gave: shardings, a mesh, donated arguments.


def _shardings_of(step: Step | Callable[..., Any], args: Sequence[Any]) -> JitShardings:
    if any(map(nnx_objects.is_split, args)):  # `nnx.jit` does not tell its shardings
        own = tuple(named_sharding(getattr(leaf, "sharding", None)) for leaf in jax.tree.leaves(tuple(args)))
        return JitShardings(arguments=own, results=(), donated=(False,) * len(own), out_tree=None, is_jit=False)
    return jit_shardings_of(function_of(step) if isinstance(step, Step) else step, args)


def _step_of(step: Step | Callable[..., Any], args: Sequence[Any], jit: JitShardings) -> Step:
    """The step with its own options; of `jax.jit` with what that donates, and with the arguments that it does not
    return as its batch.
    """
    if isinstance(step, Step):
        return step
    if jit.out_tree is None:
        return parallelize(step, cache_dir=None)
    counts = [len(jax.tree.leaves(arg)) for arg in args]
    owner = [i for i, n in enumerate(counts) for _ in range(n)]
    returned = {owner[leaf] for leaf in _replaced(args, jit.out_tree)}
    # Frozen parameters are not returned either, and keys have no examples: the batch comes behind the parameters.
    others = {i: jax.tree.leaves(arg) for i, arg in enumerate(args) if i not in returned}
    with_examples = [i for i, leaves in others.items() if any(_has_examples(leaf) for leaf in leaves)]
    donated = tuple(sorted({owner[i] for i, is_donated in enumerate(jit.donated) if is_donated}))
    return parallelize(
        step,
        cache_dir=None,
        donate_argnums=donated if jit.is_jit else tuple(sorted(returned)),
        batch_argnums=tuple(_batch_arguments(others, with_examples)),
    )


def _has_examples(leaf: Any) -> bool:
    """Whether an array may hold examples: it is no number, and no key."""
    shape, dtype = tuple(getattr(leaf, "shape", ())), getattr(leaf, "dtype", None)
    is_key = dtype is not None and (
        jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key) or (shape, dtype) == ((2,), "uint32")
    )
    return bool(shape) and not is_key


def _batch_arguments(others: Mapping[int, Sequence[Any]], candidates: Sequence[int]) -> Iterator[int]:
    """The last of the `candidates`, and those right before it with as many examples."""
    number = None
    for i in reversed(candidates):
        leading = next(leaf.shape[0] for leaf in others[i] if _has_examples(leaf))
        if number not in (None, leading):
            return
        number = leading
        yield i


def _replaced(args: Sequence[Any], results: Any) -> dict[int, int]:
    """The result leaf that replaces an argument leaf, donated or not."""
    inputs = [abstract(leaf, "an argument") for leaf in jax.tree.leaves(tuple(args))]
    return tie_state(args, range(len(args)), jax.tree.structure(results), inputs, jax.tree.leaves(results))


def _given(problem: Problem, jit: JitShardings) -> GivenLayouts:
    """The author's mesh and layouts. Raises: InvalidArgumentError; UnsupportedError."""
    traced = problem.traced
    named = [s for s in (*jit.arguments, *jit.results) if s is not None]
    sizes = dict(named[0].mesh.shape) if named else {}
    for _, written in traced.written:
        sizes = sizes or dict(written.axis_sizes)
    if not sizes:
        raise InvalidArgumentError(
            where=traced.name,
            expected="shardings: in_shardings of jax.jit, arguments with a NamedSharding, or with_sharding_constraint",
            got="none",
            hint="give some, or ask for a plan without any: autopar plan FILE:FUNCTION",
        )
    axes = tuple((name, n) for name, n in sizes.items() if n > 1)
    _check_mesh(traced, sizes, axes, problem.cluster)
    other = next((s for s in named if dict(s.mesh.shape) != sizes), None)
    if other is not None:
        raise UnsupportedError(
            where=traced.name, expected=f"shardings over one mesh, {sizes}", got=f"one over {dict(other.mesh.shape)}",
            hint="write all shardings over one mesh",
        )  # fmt: skip

    def pin(path: str, sharding: Any, rank: int) -> Pin:
        dims = dims_of(sharding.spec, rank) if sharding is not None else ((),) * rank
        # An axis of one device splits nothing.
        return Pin(pattern=path, dims=tuple(d and tuple(axis for axis in d if sizes[axis] > 1) for d in dims))

    arguments = {
        i: pin(traced.in_paths[i], s, len(traced.in_avals[i].shape))
        for i, s in enumerate(jit.arguments)
        if any(jit.arguments)
    }
    results = {o: dataclasses.replace(arguments[i]) for i, o in state_of(problem, jit).items() if i in arguments}
    results |= {
        o: pin(traced.out_paths[o], s, len(traced.out_avals[o].shape))
        for o, s in enumerate(jit.results)
        if s is not None
    }
    return GivenLayouts(
        axes=_in_order(traced.name, axes, (*arguments.values(), *results.values())),
        arguments=arguments,
        results=results,
    )


def _in_order(name: str, axes: Sequence[tuple[str, int]], pins: Sequence[Pin]) -> tuple[tuple[str, int], ...]:
    """The mesh axes, in their order or another, so that of two that split one dimension the major one comes first."""
    several = [list(of_dim) for pin in pins for of_dim in pin.dims if of_dim]
    for order in itertools.permutations(axes):
        place = {axis: i for i, (axis, _) in enumerate(order)}
        if all([place[a] for a in of_dim] == sorted(place[a] for a in of_dim) for of_dim in several):
            return tuple(order)
    raise UnsupportedError(
        where=f"the shardings of {name}",
        expected="one order in which mesh axes split dimensions together",
        got=", ".join(dict.fromkeys(str(tuple(of_dim)) for of_dim in several if len(of_dim) > 1)),
        hint="write the axes of every dimension in the order of the mesh",
    )


def _check_mesh(traced: TracedStep, sizes: Mapping[str, int], axes: Sequence[Any], cluster: Cluster) -> None:
    num_devices = math.prod(sizes.values())
    if num_devices != cluster.num_devices:
        raise InvalidArgumentError(
            where=f"{traced.name}, --cluster",
            expected=f"a cluster of {num_devices} devices, those of the mesh {dict(sizes)} of the step's shardings",
            got=f"{cluster.name} of {cluster.num_devices}",
            hint="make the mesh for the cluster, or name a cluster of as many devices",
        )
    if len(axes) > len(AXIS_NAMES):
        raise UnsupportedError(
            where=f"the mesh of {traced.name}",
            expected=f"at most {len(AXIS_NAMES)} axes of more than one device",
            got=", ".join(f"{name}={n}" for name, n in axes),
            hint="join axes that stand together in every spec",
        )


def _searched(problem: Problem, effort: Effort) -> tuple[Plan | None, str]:
    """The plan of the search, or why there is none."""
    request = dataclasses.replace(problem.request, effort=effort, constraints=ShardingsInCode.IGNORE)
    graphs = StepGraphs()  # those of the given layouts reduce each sum at once
    silent = Progress("", show=False)
    try:
        return make_plan(problem.traced, problem.trees, problem.cluster, request, problem.rules, silent, graphs), ""
    except AutoparError as error:
        return None, f"{error.where}: {error.got}"


# What is read off the plan, by lines of the code.


def _notes(made: GivenPlan, given: GivenLayouts, jit: JitShardings) -> Iterator[str]:
    if made.kept < made.named:
        yield (
            f"{made.named - made.kept} of {made.named} layouts of results and of constraints in the code hold where "
            "their values are read, not where they are made"
        )
    idle = [f"{name}={n}" for name, n in given.axes if name not in _named_axes(made, given)]
    if idle:
        yield f"No sharding names {' or '.join(idle)}: the devices along it do the same work"
    if not given.arguments:
        yield "No argument has a sharding: the search lays them, in place of XLA"
    moved = [
        (o, given.arguments[i])
        for i, o in made.context.traced.tied.items()
        if i in given.arguments and o in given.results and given.results[o].dims != given.arguments[i].dims
    ]
    for o, pin in moved[:1]:
        out = spec_text(given.results[o].dims)
        more = f" (and {len(moved) - 1} more)" if len(moved) > 1 else ""
        yield (
            f"{pin.pattern} comes in as {spec_text(pin.dims)} and goes out as {out}{more}: the next call compiles "
            "anew, or moves it; give in_shardings and out_shardings one layout"
        )
    if not jit.is_jit and jit.out_tree is not None:
        yield "The step is no jax.jit: its state is taken to be donated"


def _named_axes(made: GivenPlan, given: GivenLayouts) -> set[str]:
    at = given.on(made.context.views, made.context.traced)
    return set(at.pinned.pins.used)


def _sent(lines: ByLine) -> tuple[Sent, ...]:
    """The collectives that a line causes, those that the step waits for the longest first."""
    record = lines.plan.record
    rows = sorted(
        collective_rows(record, record.modules, lambda c, module: (c.kind, c.axes, module)),
        key=lambda row: (-row.waited_s, -row.time_s),
    )
    return tuple(
        Sent(
            kind=row.kind,
            axes=row.axes,
            line=lines.text(row.module),
            count=row.count,
            sent_bytes=row.sent_bytes,
            time_s=row.time_s,
            exposed_s=row.waited_s,
        )
        for row in rows[:ROWS]
    )


def _alike(lines: ByLine) -> tuple[Computed, ...]:
    """The lines that several devices compute alike, by what sharing them would save."""
    candidate, seconds = lines.candidate, collections.defaultdict[tuple[str, int], float](float)
    num_devices = candidate.sharding.mesh.num_devices
    for op in lines.graph.ops():
        if op.id in candidate.compute_s and op.id in candidate.sharding.strategy:
            copies = num_devices // candidate.sharding.strategy[op.id].split
            seconds[op.module, copies] += candidate.compute_s[op.id]
    rows = [Computed(line=lines.text(m), seconds=s, copies=n) for (m, n), s in seconds.items() if n > 1]
    told = [row for row in rows if row.spare_s >= LEAST * candidate.step_time_s]
    return tuple(sorted(told, key=lambda row: -row.spare_s)[:ROWS])


def _largest(lines: ByLine) -> tuple[Held, ...]:
    """The largest arrays at the peak."""
    return tuple(sorted(_at_peak(lines), key=lambda row: -row.nbytes)[:ROWS])


def _at_peak(lines: ByLine) -> list[Held]:
    """What is alive at the peak: arguments by path, else the lines that make them; arrays that are alike as one."""
    graph, mesh = lines.graph, lines.candidate.sharding.mesh
    makers = {v: f"{op.primitive} at {lines.text(op.module)}" for op in graph.ops() for v in op.outputs}
    sums: dict[tuple[str, str, str, int], list[int]] = {}
    for number, nbytes in lines.memory.estimate.at_peak:
        if number not in lines.memory.stands_for or not nbytes:
            continue
        v, (layout, _) = lines.memory.stands_for[number]
        value = graph.values[v]
        name = summary.path_of(summary.folded(value.name)) if value.name else makers.get(v, "a value")
        spec = spec_text(axes_of(lines.plan, layout.dims))
        array = summary.array_text(value.dtype, value.shape)
        copies = mesh.num_devices // layout.shards(mesh) if not layout.partial else 1
        sums.setdefault((name, array, spec, copies), []).append(nbytes)
    return [
        Held(name=name, array=array, spec=spec, copies=copies, count=len(sizes), nbytes=sum(sizes))
        for (name, array, spec, copies), sizes in sums.items()
    ]


def _whole(made: GivenPlan, plan: Plan, lines: ByLine) -> tuple[Held, ...]:
    """What several devices hold alike and could split: arguments, and arrays at the peak."""
    mesh, least = made.candidate.sharding.mesh, LEAST * made.context.limit_bytes
    rows = []
    for group in summary.state_groups(plan.record):
        copies = mesh.num_devices // group.shards
        if group.kind != "constant" and any(size % copies == 0 for size in group.shape):
            rows.append(
                Held(
                    name=summary.path_of(group.name),
                    array=summary.array_text(group.dtype, group.shape),
                    spec=spec_text(axes_of(plan, group.dims)),
                    count=group.count,
                    nbytes=group.device_bytes,
                    copies=copies,
                )
            )
    rows += [row for row in _at_peak(lines) if " at " in row.name]
    told = [row for row in rows if row.copies > 1 and row.spare_bytes >= least]
    return tuple(sorted(told, key=lambda row: -row.spare_bytes)[:ROWS])


def _scores(made: GivenPlan, plan: Plan, lines: ByLine) -> tuple[str, ...]:
    """The lines of attention whose scores go through memory, and the plan's note on it."""
    large = {op.id for op in large_scores(made.context.views.annotated)}
    at = dict.fromkeys(lines.text(op.module) for op in lines.graph.ops() if op.id in large)
    notes = (note for note in plan.record.notes if note.startswith("attention runs as it is written"))
    return (*list(at)[:ROWS], *notes) if at else ()
