"""The changes that `autopar.lint` plans: each is priced by the program that a step is with it."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from autopar.attention.kernels import library_of
from autopar.attention.match import large_scores, obstacle
from autopar.common.paths import parts_of
from autopar.common.progress import Progress
from autopar.common.text import text_of_bytes, text_of_s
from autopar.errors import AutoparError
from autopar.frontend.jit_shardings import JitShardings
from autopar.frontend.recompute_in_scans import Recompute
from autopar.frontend.tracing import tie_state
from autopar.hardware.kinds import Platform
from autopar.ir.graph import Purpose
from autopar.ir.layout import spec_text
from autopar.ir.traced_step import TracedStep
from autopar.lint_report import CHANGES, Change
from autopar.manual.given_layouts import GivenLayouts, GivenPlan, handed_on, plan_as_given
from autopar.manual.walks import Problem
from autopar.plan import summary
from autopar.plan.context import StepGraphs
from autopar.plan.options import AS_FAST, WORTHWHILE, Attention, PlanRequest
from autopar.plan.plan import Plan
from autopar.sharding.pins import Pin

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
