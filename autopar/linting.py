"""`autopar.lint`: a step that stays on `jax.jit`, in its author's own shardings: what they cost, and what would pay."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from autopar.api import parallelize
from autopar.benching import as_cluster, problem_of
from autopar.common.paths import parts_of
from autopar.common.progress import Progress, rare_garbage_collection
from autopar.common.text import text_of_bytes, text_of_s
from autopar.errors import AutoparError, InvalidArgumentError, UnsupportedError
from autopar.execute import nnx_objects
from autopar.frontend.jit_shardings import JitShardings, jit_shardings_of, named_sharding
from autopar.frontend.recompute_in_scans import Recompute
from autopar.frontend.tracing import abstract, tie_state
from autopar.hardware.cluster import Cluster
from autopar.hardware.kinds import Platform
from autopar.ir.graph import Purpose
from autopar.ir.jax_sharding import dims_of
from autopar.ir.layout import AXIS_NAMES, spec_text
from autopar.ir.pins import Pin
from autopar.ir.traced_step import ShardingsInCode, TracedStep
from autopar.lint_report import CHANGES, Change, Computed, Held, Lint, Sent
from autopar.ops.attention.kernels import library_of
from autopar.ops.attention.match import large_scores, obstacle
from autopar.plan import summary
from autopar.plan.context import StepGraphs
from autopar.plan.modules import collective_rows
from autopar.plan.options import AS_FAST, WORTHWHILE, Attention, Effort, PlanRequest
from autopar.plan.plan import Plan
from autopar.recipes.given_layouts import ByLine, GivenLayouts, GivenPlan, by_line, handed_on, laid_anew, plan_as_given
from autopar.recipes.walks import Problem
from autopar.search.planner import make_plan
from autopar.step import Step
from autopar.step_views import function_of, on_cluster

# The changes that `autopar.lint` plans: each is priced by the program that a step is with it.


# Of the peak: what a change has to save that saves no time. Of the limit of memory: what layouts have to spare.
WORTH_BYTES, LEAST_SPARED = 0.05, 0.0005
Dims = tuple[tuple[str, ...] | None, ...]


def state_of(problem: Problem, jit: JitShardings) -> Mapping[int, int]:
    """The result leaf that replaces a leaf of the state."""
    traced = problem.traced
    if jit.out_tree is None:
        return traced.tied
    args = [jax.tree.unflatten(tree, range(tree.num_leaves)) for tree in traced.in_tree.children()]
    return {**tie_state(args, range(len(args)), traced.out_tree, traced.in_avals, traced.out_avals), **traced.tied}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """What is planned: a step in layouts, under a request."""

    problem: Problem
    given: GivenLayouts
    request: PlanRequest

    def plan(self) -> GivenPlan:
        return plan_as_given(self.problem, self.given, self.request)

    def asking(self, **fields: Any) -> Planned:
        return dataclasses.replace(self, request=dataclasses.replace(self.request, **fields))

    def laying(self, **fields: Any) -> Planned:
        return dataclasses.replace(self, given=dataclasses.replace(self.given, **fields))

    def donating(self, tied: Mapping[int, int]) -> Planned:
        donated = self.problem.traced.donated | frozenset(tied)
        traced = dataclasses.replace(self.problem.traced, donated=donated, tied=dict(tied))
        return dataclasses.replace(self, problem=dataclasses.replace(self.problem, traced=traced, graphs=StepGraphs()))

    def with_arguments(self, arguments: Mapping[int, Pin], state: Mapping[int, int]) -> Planned:
        """Other layouts of some arguments, and of the results that replace them."""
        results = {state[i]: pin for i, pin in arguments.items() if i in state}
        return self.laying(arguments={**self.given.arguments, **arguments}, results={**self.given.results, **results})


def axes_of(plan: Plan, dims: Sequence[Sequence[int]]) -> list[tuple[str, ...]]:
    names = plan.mesh.axis_names
    return [tuple(names[a] for a in axes) for axes in dims]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Candidate:
    """A change that is planned: `apply` makes it, to the layouts of the leaves of arguments that it `lays`."""

    text: str
    apply: Callable[[Planned], Planned]
    lays: frozenset[int] = frozenset()
    specs: tuple[tuple[str, str], ...] = ()


def changes_of(
    own: Planned, made: GivenPlan, jit: JitShardings, progress: Progress
) -> tuple[tuple[Change, ...], tuple[str, ...]]:
    """The changes that pay, the best first, behind the first few of them together; and the texts of the others."""
    found: list[tuple[Change, _Candidate]] = []
    without_gain: list[str] = []
    step_s = made.step_time_s
    for candidate in _candidates(own, made, jit):
        try:
            with progress.pass_(candidate.text):
                plan = candidate.apply(own).plan()
        except AutoparError as error:
            without_gain.append(f"{candidate.text} (no plan: {error.where}: {error.got})")
            continue
        change = _change(candidate, made, plan)
        saves_bytes = change.less_bytes >= WORTH_BYTES * made.peak_bytes and change.less_s > -WORTHWHILE * step_s
        pays = change.less_s >= WORTHWHILE * step_s or saves_bytes
        if (plan.fits and pays) or (not made.fits and change.less_bytes > 0):
            found.append((change, candidate))
        else:
            more = f"{text_of_s(abs(change.less_s))} {'less' if change.less_s > 0 else 'more'}"
            more = "as fast" if abs(change.less_s) <= AS_FAST * step_s else more
            memory = f"{text_of_bytes(abs(change.less_bytes))} {'less' if change.less_bytes >= 0 else 'more'}"
            without_gain.append(f"{candidate.text} ({more}, {memory}{'' if plan.fits else ': does not fit'})")

    def rank(row: tuple[Change, _Candidate]) -> tuple[bool, float, int]:
        change = row[0]
        is_faster = abs(change.less_s) > AS_FAST * step_s
        return not change.fits, -change.less_s if is_faster else 0.0, -change.less_bytes

    found = [row for row in found if not any(_is_simpler(other, row[0], step_s) for other, _ in found)]
    found.sort(key=rank)
    changes = [change for change, _ in found]
    with progress.pass_("changes together"):
        changes += _together(own, made, [candidate for _, candidate in found[:CHANGES]])
    return tuple(changes), tuple(without_gain)


def _is_simpler(other: Change, change: Change, step_s: float) -> bool:
    """Whether another change comes to the same with fewer specs."""
    is_as_fast = abs(other.step_time_s - change.step_time_s) <= AS_FAST * step_s
    is_as_small = abs(other.peak_bytes - change.peak_bytes) <= WORTHWHILE * change.peak_bytes
    return len(other.specs) < len(change.specs) and is_as_fast and is_as_small


def _change(candidate: _Candidate, made: GivenPlan, plan: GivenPlan, *, is_sum: bool = False) -> Change:
    return Change(
        text=candidate.text,
        step_time_s=plan.step_time_s,
        peak_bytes=plan.peak_bytes,
        less_s=made.step_time_s - plan.step_time_s,
        less_bytes=made.peak_bytes - plan.peak_bytes,
        fits=plan.fits,
        specs=candidate.specs,
        is_sum=is_sum,
    )


def _together(own: Planned, made: GivenPlan, candidates: Sequence[_Candidate]) -> list[Change]:
    """Several changes as one, of those that lay the same leaves the best."""
    planned, taken, lays = own, list[_Candidate](), set[int]()
    for candidate in candidates:
        if not lays & candidate.lays:
            planned, taken, lays = candidate.apply(planned), [*taken, candidate], lays | candidate.lays
    if len(taken) < 2:
        return []
    try:
        plan = planned.plan()
    except AutoparError:
        return []
    return [_change(_Candidate(text=" + ".join(c.text for c in taken), apply=Planned.asking), made, plan, is_sum=True)]


def _candidates(own: Planned, made: GivenPlan, jit: JitShardings) -> Iterator[_Candidate]:
    """The changes that are planned, each with the specs to paste."""
    state = state_of(own.problem, jit)
    annotated, device = made.context.views.annotated, made.context.cluster.device
    kernel = library_of(device)
    taken = (op for op in large_scores(annotated) if not obstacle(annotated, op, kernel))
    if device.platform is not Platform.CPU and next(taken, None) is not None:
        yield _Candidate(text=f"attention by {kernel.value}", apply=lambda p: p.asking(attention=Attention.KERNEL))
    if any(op.recomputes for op in made.context.graph.ops()):
        nothing = Recompute.NOTHING.value
        yield _Candidate(
            text="no recomputation (leave out jax.checkpoint)", apply=lambda p: p.asking(scan_recompute=nothing)
        )
    if not state.keys() <= own.problem.traced.donated:
        numbers = tuple(dict.fromkeys(own.problem.traced.argument_of[i] for i in sorted(state)))
        yield _Candidate(
            text=f"donate the state: jax.jit(..., donate_argnums={numbers})", apply=lambda p: p.donating(state)
        )
    yield from _spread(own, made, state)
    if own.given.keeps_code and own.problem.traced.written:
        yield _Candidate(text="without the constraints in the code", apply=lambda p: p.laying(keeps_code=False))
    if own.given.arguments:
        yield from _handing_on(made, _axes_of_examples(own.problem.traced, own.given.arguments))
        with contextlib.suppress(AutoparError):  # the step has no plan with layouts of its arguments free
            yield from _as_searched(own, state)


def _handing_on(made: GivenPlan, axes: tuple[str, ...]) -> Iterator[_Candidate]:
    """The examples of what layers hand on stay split over these axes."""
    values = handed_on(made.context.views.annotated, axes) if axes else {}
    if values:
        spec = spec_text(next(iter(values.values())).dims)
        yield _Candidate(
            text=f"with_sharding_constraint(x, {spec}) on what each layer hands on",
            apply=lambda p: p.laying(examples=axes),
            lays=frozenset({-1}),
        )


def _axes_of_examples(traced: TracedStep, arguments: Mapping[int, Pin]) -> tuple[str, ...]:
    """The axes over which the batch splits its examples."""
    dims = ((i, traced.example_dim(i)) for i in sorted(traced.batch) if i in arguments)
    return next((axes for i, d in dims if d is not None and (axes := arguments[i].dims[d])), ())


def _as_searched(own: Planned, state: Mapping[int, int]) -> Iterator[_Candidate]:
    """The arguments as a search on the author's mesh lays them, all else as the partitioner does; also with the
    examples of what layers hand on split as that search splits them.
    """
    free = own.laying(arguments={}, results={}, keeps_code=False, propagates=False).plan()
    plan, traced = free.plan(), free.context.traced
    leaves = [value for value in plan.record.arguments if value.kind != "constant"]
    found = {i: Pin(pattern=v.path, dims=tuple(axes_of(plan, v.layout.dims))) for i, v in enumerate(leaves)}
    text = "arguments as the search lays them on this mesh"
    yield _laid(f"{text}, no constraints in the code", found, state)
    axes = _searched_examples(free, plan)
    for i in traced.batch:
        dim = traced.example_dim(i)
        if dim is not None and axes and traced.in_avals[i].shape[dim] % free.candidate.sharding.mesh.num_devices == 0:
            found[i] = dataclasses.replace(
                found[i], dims=tuple(axes if d == dim else () for d in range(len(found[i].dims)))
            )
    for handing in _handing_on(free, axes):
        laid = _laid(f"{text}, {handing.text}", found, state)
        both = functools.partial(_applied, laid, handing)
        yield dataclasses.replace(laid, apply=both, lays=laid.lays | handing.lays)


def _applied(first: _Candidate, second: _Candidate, planned: Planned) -> Planned:
    return second.apply(first.apply(planned))


def _laid(text: str, found: Mapping[int, Pin], state: Mapping[int, int]) -> _Candidate:
    found = dict(found)
    return _Candidate(
        text=text,
        apply=lambda p: p.laying(keeps_code=False).with_arguments(found, state),
        lays=frozenset(found),
        specs=_folded_specs(found.values()),
    )


def _searched_examples(free: GivenPlan, plan: Plan) -> tuple[str, ...]:
    """The axes over which most of what layers hand on is split by its examples."""
    lies, counts = free.candidate.sharding.reduced, collections.Counter[tuple[str, ...]]()
    for v, pin in handed_on(free.context.views.annotated, ("examples",)).items():
        if v in lies:
            counts[axes_of(plan, lies[v].dims)[pin.dims.index(("examples",))]] += 1
    return max(counts, key=lambda axes: counts[axes], default=())


def _spread(own: Planned, made: GivenPlan, state: Mapping[int, int]) -> Iterator[_Candidate]:
    """Each mesh axis over which arrays of the batch, of the optimizer or of the state are held alike splits them, where
    that is much of the memory or work.
    """
    context, arguments, sizes = made.context, own.given.arguments, dict(own.given.axes)
    annotated = context.views.annotated
    inputs = annotated.block.inputs[len(annotated.constants) :]
    of_optimizer = [i for i in state if annotated.values[inputs[i]].purpose is Purpose.OPTIMIZER]
    kinds = {
        "the batch": sorted(context.traced.batch - state.keys()),
        "the optimizer's state": of_optimizer,
        "the whole state": list(state) if len(of_optimizer) < len(state) else [],
    }
    for kind, leaves in kinds.items():
        for axis, n in own.given.axes:
            split: dict[int, Pin] = {}
            spare_bytes = 0.0
            for i in (i for i in leaves if i in arguments):
                aval = context.traced.in_avals[i]
                dim = context.traced.example_dim(i) if kind == "the batch" else None
                dims = _with_axis(arguments[i].dims, aval.shape, axis, n, sizes, dim)
                if dims is not None:
                    split[i] = dataclasses.replace(arguments[i], dims=dims)
                    value = annotated.values[inputs[i]]
                    spare_bytes += value.nbytes / _shards(arguments[i].dims, sizes) * (1 - 1 / n)
            if split and (kind == "the batch" or spare_bytes >= LEAST_SPARED * context.limit_bytes):
                yield _Candidate(
                    text=f"{kind} over {axis}",
                    apply=functools.partial(Planned.with_arguments, arguments=split, state=state),
                    lays=frozenset(split),
                    specs=_folded_specs(split.values()),
                )


def _shards(dims: Dims, sizes: Mapping[str, int]) -> int:
    return math.prod(sizes[axis] for axes in dims for axis in axes or ())


def _with_axis(
    dims: Dims, shape: Sequence[int], axis: str, n: int, sizes: Mapping[str, int], dim: int | None
) -> Dims | None:
    """A layout with one more axis, on the largest dimension that divides, or on the one named; None where it has it."""
    if any(axes is None or axis in axes for axes in dims):
        return None
    local = []
    for size, axes in zip(shape, dims, strict=True):
        for name in axes or ():
            size //= sizes[name]
        local.append(size)
    fitting = [d for d, size in enumerate(local) if size and size % n == 0 and dim in (None, d)]
    if not fitting:
        return None
    largest, order = max(fitting, key=lambda d: local[d]), list(sizes)
    return tuple(
        tuple(sorted((*(axes or ()), axis), key=order.index)) if d == largest else axes for d, axes in enumerate(dims)
    )


def _folded_specs(pins: Any) -> tuple[tuple[str, str], ...]:
    """The spec of each path, those of repeated layers and of moments alike as one, those that split nothing last."""
    alike: dict[tuple[Any, str], list[str]] = {}
    for pin in pins:
        end = parts_of(summary.folded(pin.pattern))[-2:]
        alike.setdefault((end, spec_text(pin.dims)), []).append(pin.pattern)
    named = [(summary.path_of(summary.common_name(paths)), spec, paths) for (_, spec), paths in alike.items()]
    times = collections.Counter(name for name, _, _ in named)
    rows = [(name, spec) for name, spec, _ in named if times[name] == 1]
    # Lists of arrays, as some trainers have them: no pattern tells one from another.
    rows += [(summary.path_of(path), spec) for name, spec, paths in named if times[name] > 1 for path in paths]
    return tuple(sorted(rows, key=lambda row: '"' not in row[1]))


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
        key=lambda row: (-row.exposed_s, -row.time_s),
    )
    return tuple(
        Sent(
            kind=row.kind,
            axes=row.axes,
            line=lines.text(row.module),
            count=row.count,
            sent_bytes=row.sent_bytes,
            time_s=row.time_s,
            exposed_s=row.exposed_s,
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
