"""`Plan`, the public face of a plan: shardings, text, files."""

from __future__ import annotations

import dataclasses
import hashlib
import html
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import msgspec
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from autopar.common.files import Fault, JsonFaultError, decoded
from autopar.common.trace_events import write_trace
from autopar.errors import InvalidArgumentError, MemoryLimitError, PlanFormatError, UnsupportedError
from autopar.frontend.static_leaves import set_apart
from autopar.hardware.cluster import Cluster
from autopar.ir.jax_sharding import (
    HOST_MEMORY,
    abstract_joint_mesh,
    abstract_mesh,
    check_host_memory,
    concrete_mesh,
    joint_mesh,
    partition_spec,
    stacked_spec,
    submesh,
)
from autopar.ir.layout import LogicalMesh
from autopar.plan import modules, render, render_summary, rivals, summary
from autopar.plan.comparison import Comparison
from autopar.plan.explanation import Explanation, argument_called, best_alternatives, explanation, values_called
from autopar.plan.options import HasRequest, PlanRequest
from autopar.plan.schema import FORMAT_VERSION, OptionValue, PlannedValue, PlanRecord, Predicted

# Plan files: JSON with a version and a checksum, so that a damaged plan never runs as another one.
#
# Whether a plan is one of its step shows where it is made into a function (`autopar.search.check_decisions`).


_HINT = (
    "plan anew (step.plan(...).save(path)); what a plan must hold to is said with autopar.constrain, not by editing it"
)


class _File(msgspec.Struct, omit_defaults=True):
    """`key` is the cache key of a plan of the cache; files that users save have none."""

    format_version: int
    checksum: str = ""
    key: str = ""
    plan: msgspec.Raw = msgspec.Raw(b"")


def encode(record: PlanRecord, key: str = "") -> bytes:
    """JSON with the format's version and a checksum, and the key if the plan is in the cache."""
    body = msgspec.json.encode(record)
    file = _File(format_version=FORMAT_VERSION, checksum=checksum(body), key=key, plan=msgspec.Raw(body))
    return msgspec.json.encode(file)


def decode(data: bytes, where: str, key: str | None = None) -> PlanRecord:
    """The plan of a file, which is named by `where`; with a key, only a plan that was saved under it.

    Raises: PlanFormatError for another format version, and for a changed file; the error names the place (such as
    `$.plan.pipeline.stages[1].axis_sizes[0]`) of a value that no plan has there.
    """
    try:
        file = decoded(data, _File, "a plan saved by autopar")
    except JsonFaultError as error:
        fault = error.fault
        got = fault.got if fault.place == "$" else f"{fault.got} at {fault.place}, where {fault.expected} is expected"
        raise PlanFormatError(where=where, expected="a plan saved by autopar", got=got, hint=_HINT) from error
    if file.format_version != FORMAT_VERSION:
        raise PlanFormatError(
            where=where,
            expected=f"format version {FORMAT_VERSION}",
            got=f"format version {file.format_version}",
            hint="make the plan anew (step.plan(...).save(path)); plans are cheap to find and are cached on disk",
        )
    if key is not None and file.key != key:
        raise PlanFormatError(
            where=where, expected=f"the plan of key {key}", got=f"that of key {file.key!r}", hint=_HINT
        )
    changed = "" if checksum(bytes(file.plan)) == file.checksum else "; it was changed since it was saved (checksum)"
    fault = Fault(place="$.plan", expected="a plan as it was saved", got="another one")
    try:
        record = decoded(bytes(file.plan), PlanRecord, "a plan", "$.plan")
        if not changed:
            return record
    except JsonFaultError as error:
        fault = error.fault
    raise PlanFormatError(
        where=f"{where}, {fault.place}", expected=fault.expected, got=f"{fault.got}{changed}", hint=_HINT
    )


def checksum(body: bytes) -> str:
    """Digits that tell whether a file was changed."""
    return hashlib.sha256(body).hexdigest()


# Of a plan as plain values. The decisions are numbers of operations, of use to `Plan.load` only; the timeline is
# `Plan.trace`'s.
LEFT_OUT = ("decisions", "timeline")


def dict_of(record: PlanRecord) -> dict[str, Any]:
    """Dictionaries, lists, text and numbers, as `json.dumps` takes them. `summary` is what the plan prints."""
    return {
        "summary": {
            "sentence": summary.sentence(record),
            "devices": summary.num_devices(record),
            "step_time_s": record.predicted.step_time_s,
            "step_interval_s": record.step_interval_s,
            "peak_bytes": summary.fullest(record).peak_bytes,
            "memory_limit_bytes": record.memory_limit_bytes,
            "shares": _dicts(summary.shares(record)),
            "costliest_collectives": _dicts(modules.costliest(record)),
            "stages": _dicts(summary.stage_groups(record)),
            "arguments": _dicts(summary.state_groups(record)),
            "baselines": _dicts(rivals.rivals(record)),
            "advantage": rivals.advantage(record),
            "recipe": record.recipe,
            "tensor_parallelism": rivals.tensor_parallelism(record),
        },
        "plan": _without(msgspec.to_builtins(record)),
    }


def _dicts(rows: Any) -> list[dict[str, Any]]:
    return [msgspec.to_builtins(dataclasses.asdict(row)) for row in rows]


def _without(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without(inner) for name, inner in value.items() if name not in LEFT_OUT}
    return [_without(inner) for inner in value] if isinstance(value, list) else value


# More memory than any device has, for plans whose need of it is asked for.
UNLIMITED_BYTES = 2**60


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Trees:
    """The structure of a step's flat arguments: one tree for each dynamic argument, and their names."""

    arguments: tuple[Any, ...]
    names: tuple[str, ...]
    donated: frozenset[int]
    batch: frozenset[int]


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """A plan for one step. `record` is the saved part; `trees` and `replan` are known when the plan comes from a step.

    A plan that was loaded from a file has no trees until it is given to a step: its shardings are dictionaries by path.
    `replan` plans the same step on the same cluster anew, as requested.
    """

    record: PlanRecord
    trees: Trees | None = None
    replan: Callable[[PlanRequest], Plan] | None = dataclasses.field(default=None, compare=False, repr=False)

    @property
    def predicted(self) -> Predicted:
        return self.record.predicted

    @property
    def step_interval_s(self) -> tuple[float, float] | None:
        """(least, most) seconds of the step, meant to hold nine of ten runs, by the errors of predictions of published
        runs (`autopar.hardware.step_errors`). None on virtual devices of a CPU, and by measured constants: the errors
        are those of the tables.
        """
        return self.record.step_interval_s

    @property
    def gap(self) -> float:
        """The share of the step's time that any other plan could save at most, by the model of costs. This bound is
        proven, but a loose one. It is all but computation that every device has its share of, as if nothing were sent
        and each device's part of a kernel took its part of the time. Hence a plan may be the best and its gap large,
        above all of a small step, whose kernels take their time however small they are: 7/8 of a step that runs whole
        on each of eight devices.
        """
        return max(0.0, 1 - self.record.least_step_time_s / self.predicted.step_time_s)

    @property
    def cluster(self) -> Cluster:
        return self.record.cluster

    @property
    def mesh(self) -> LogicalMesh:
        """The logical mesh; of a pipeline, that of its first stage."""
        return self.stage_mesh(0)[0]

    def stage_mesh(self, stage: int) -> tuple[LogicalMesh, int]:
        """(mesh of a stage, its first device)."""
        return summary.stage_mesh(self.record, stage), summary.first_device(self.record, stage)

    @property
    def compiler_options(self) -> dict[str, OptionValue]:
        """XLA's options for the cluster's devices, those on which the prediction rests and those that were given."""
        return dict(self.record.compiler_options)

    @property
    def exchange_options(self) -> dict[str, OptionValue]:
        """XLA's options for a pipeline's programs that run once a step, in place of those of `compiler_options`."""
        return dict(self.record.exchange_options)

    def compiler_options_on(self, device: Any, *, exchanges: bool = False) -> dict[str, OptionValue]:
        """The options that the compiler for a device gets: none for another platform than the cluster's. `exchanges`:
        for a program of a pipeline that runs once a step and only exchanges.
        """
        platform = "gpu" if device.platform in ("cuda", "rocm") else device.platform
        if platform != self.cluster.device.platform:
            return {}
        return self.compiler_options | (self.exchange_options if exchanges else {})

    def with_compiler_options(self, options: Mapping[str, OptionValue]) -> Plan:
        """The plan with these of XLA's options beside its own, or in their place."""
        record = dataclasses.replace(self.record, compiler_options={**self.record.compiler_options, **options})
        return dataclasses.replace(self, record=record)

    def with_note(self, note: str) -> Plan:
        """The plan with one more note, unless it has it."""
        notes = dict.fromkeys((*self.record.notes, note))
        return dataclasses.replace(self, record=dataclasses.replace(self.record, notes=tuple(notes)))

    def groups(self) -> dict[str, list[list[int]]]:
        """The devices, by number, that work together along each mesh axis, and along the stages of a pipeline.

        An axis has the name that a recipe or pins gave it, else one by what it splits: `data`, `model`, `sequence`,
        `expert`, `stack` (matrices among which no router chooses), `state` (that alone), `replica` (the batch, beside a
        data axis that splits the state too; or nothing). A second axis of a name has a number: `data2`. Only stages on
        equal meshes have pipeline groups.
        """
        places = dict.fromkeys(self.stage_mesh(stage) for stage in range(summary.num_stages(self.record)))
        groups: dict[str, list[list[int]]] = {}
        for mesh, first in places:
            devices = first + np.arange(mesh.num_devices).reshape(mesh.axis_sizes)
            for axis, name in enumerate(mesh.axis_names):
                rows = np.moveaxis(devices, axis, -1).reshape(-1, mesh.axis_sizes[axis])
                groups.setdefault(name, []).extend(rows.tolist())
        if len(places) > 1 and len({mesh for mesh, _ in places}) == 1:
            firsts = [first for _, first in places]
            groups["pipeline"] = [[first + i for first in firsts] for i in range(self.mesh.num_devices)]
        return groups

    def jax_mesh(self, stage: int = 0) -> Mesh | AbstractMesh:
        """The mesh of a stage over this program's devices, or an abstract one where there are too few."""
        mesh, first_device = self.stage_mesh(stage)
        enough = len(jax.devices()) >= first_device + mesh.num_devices
        return submesh(mesh, first_device) if enough else abstract_mesh(mesh)

    def _joint_mesh(self, stages: Sequence[int]) -> Mesh | AbstractMesh:
        """The meshes of several stages as one, over this program's devices where there are enough."""
        mesh = self.stage_mesh(stages[0])[0]
        firsts = [self.stage_mesh(stage)[1] for stage in stages]
        if len(jax.devices()) < max(firsts) + mesh.num_devices:
            return abstract_joint_mesh(mesh, len(stages))
        return joint_mesh(mesh, firsts)

    def concrete_mesh(self) -> Mesh:
        """The mesh over this program's devices. Raises: NotEnoughDevicesError."""
        self.check_devices()
        return concrete_mesh(self.mesh)

    def check_devices(self) -> None:
        """Raises: NotEnoughDevicesError where this program has fewer devices than the plan, UnsupportedError where the
        plan keeps arrays in the memory of the host and the devices cannot.
        """
        stages = range(summary.num_stages(self.record))
        largest = max((self.stage_mesh(s) for s in stages), key=lambda at: at[1] + at[0].num_devices)
        submesh(*largest)
        stages_of = () if self.record.pipeline is None else self.record.pipeline.stages
        saves = any(decisions.saved_in_host for decisions in (self.record.decisions, *(s.decisions for s in stages_of)))
        if saves or any(value.in_host for value in self.record.arguments):
            check_host_memory(f"plan of {self.record.step}", jax.local_devices()[0])

    # Shardings

    def sharding(self, path: str) -> NamedSharding:
        """The sharding of an argument or result, by its path: `state['params']['w']`, or `state/params/w` as the plan
        prints it.

        Raises: InvalidArgumentError when there is no such path.
        """
        for value in (*self.record.arguments, *self.record.results):
            if path in (value.path, summary.path_of(value.path)):
                return self.sharding_of(value)
        known = [v.path for v in self.record.arguments]
        raise InvalidArgumentError(
            where=f"plan.sharding({path!r})",
            expected=f"one of the {len(known)} argument paths, such as {', '.join(known[:3])}",
            got=repr(path),
            hint="plan.table() has them all; numbers stand in place of *, which is all layers in a row",
        )

    @property
    def state_shardings(self) -> Any:
        """Shardings of the donated argument, in its structure (a tuple for several donated arguments).

        Raises: UnsupportedError where a class in it accepts only arrays; `sharding(path)` gives them one by one.
        """
        return self._argument_shardings("state", self.trees.donated if self.trees else frozenset())

    @property
    def batch_shardings(self) -> Any:
        """Shardings of the batch argument, in its structure (a tuple for several batch arguments).

        Raises: UnsupportedError where a class in it accepts only arrays; `sharding(path)` gives them one by one.
        """
        return self._argument_shardings("batch", self.trees.batch if self.trees else frozenset())

    def argument_leaves(self, arguments: frozenset[int]) -> list[PlannedValue]:
        """The leaves of some of the dynamic arguments, by their numbers."""
        assert self.trees is not None, "only a plan bound to a step knows its arguments"
        leaves = iter([v for v in self.record.arguments if v.kind != "constant"])
        leaf_of_argument = [
            (i, next(leaves)) for i, tree in enumerate(self.trees.arguments) for _ in range(tree.num_leaves)
        ]
        return [leaf for i, leaf in leaf_of_argument if i in arguments]

    def _argument_shardings(self, kind: str, arguments: frozenset[int]) -> Any:
        if self.trees is None:
            return {v.path: self.sharding_of(v) for v in self.record.arguments if v.kind == kind}
        trees = []
        for i in sorted(arguments):
            shardings = [self.sharding_of(v) for v in self.argument_leaves(frozenset({i}))]
            where = f"plan.{kind}_shardings of {self.record.step}, argument {self.trees.names[i]!r}"
            trees.append(shardings_in(self.trees.arguments[i], shardings, where))
        return trees[0] if len(trees) == 1 else tuple(trees)

    def sharding_of(self, value: PlannedValue) -> NamedSharding:
        """The sharding of an argument or result on its stage's devices; of slices, on those of several stages."""
        mesh = self.stage_mesh(value.stage)[0]
        if value.stages:
            joint = self._joint_mesh(value.stages)
            sharding = NamedSharding(joint, stacked_spec(value.layout, mesh.axis_names))
        else:
            sharding = NamedSharding(self.jax_mesh(value.stage), partition_spec(value.layout, mesh.axis_names))
        return sharding.with_memory_kind(HOST_MEMORY) if value.in_host else sharding

    # Files and text

    def save(self, path: str | Path) -> None:
        """Writes JSON that `load` reads."""
        Path(path).write_bytes(encode(self.record))

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Reads a plan that `save` wrote.

        Raises: PlanFormatError for another format version or a file that was changed, with the place in it.
        """
        return cls(decode(Path(path).read_bytes(), str(path)))

    def trace(self, path: str | Path) -> None:
        """Writes the predicted step as a timeline, for https://ui.perfetto.dev.

        A pipeline has a row for each group of devices, and for each link between them. A plan without stages has one
        row for the computation of every device, and one for its communication. The last event ends at the step time.
        """
        write_trace(path, summary.timeline_of(self.record))

    def report(self, path: str | Path) -> None:
        """Writes the plan as one page for a browser, which needs no network and no other file.

        It shows the choice in a sentence, the stages on the cluster, modules, arguments, memory, the timeline, what was
        weighed and why it lost, and measurements where `autopar.tune` or `autopar.verify` made some.
        """
        Path(path).write_text(_pages().page_of(self.record), encoding="utf-8")

    def compare(self, other: Plan, path: str | Path) -> None:
        """Writes this plan and another one of the step side by side, as one page for a browser."""
        Path(path).write_text(_pages().comparison_of(self.record, other.record), encoding="utf-8")

    def explain(self, what: str, *, alternatives: int = 0) -> str:
        """The layouts, collectives and costs of a module or an argument, and what binds them, as text.

        `what` is a path that the plan shows, a part of it, or a pattern as `autopar.constrain` takes. With
        `alternatives`, the first argument among them gets other layouts, around each of which the step is planned anew
        (which takes as long as planning, several times), and the best so many are shown. Raises: as `explanation`.
        """
        found = self.explanation(what, alternatives=alternatives)
        has_others = self.replan is not None and self.record.pipeline is None and not alternatives
        if has_others and any(value in self.record.arguments for value in values_called(self.record, what)):
            return f"{found}\nwhy not another layout: plan.explain({what!r}, alternatives=3) plans again for each"
        return str(found)

    def explanation(self, what: str, *, alternatives: int = 0) -> Explanation:
        """What `explain` says, as values.

        Raises: InvalidArgumentError where nothing is called so, or for alternatives no argument; for these
        UnsupportedError for a plan with stages, and one of a file that is not bound to its step.
        """
        found = explanation(self.record, what)
        if not alternatives:
            return found
        argument = argument_called(self.record, what, alternatives)
        replan = self._replan("explain(..., alternatives=...)")
        others = best_alternatives(self.record, argument, lambda request: replan(request).record, alternatives)
        return dataclasses.replace(found, alternatives=others)

    def why_not(self, instead: HasRequest) -> Comparison:
        """The plan that a recipe or pins would give, beside this one: time, memory, bytes and modules, in numbers.

        `instead` is a recipe of `autopar.recipes`, or pins of `autopar.constrain`. The step is planned anew under it,
        within the memory limit of this plan; where nothing fits, without one, so that the excess is known.

        Raises: UnsupportedError for a plan of a file that is not bound to its step; the errors of planning.
        """
        replan = self._replan("why_not")
        if not isinstance(getattr(instead, "request", None), PlanRequest):
            raise InvalidArgumentError(
                where=f"why_not, plan of {self.record.step}",
                expected="a recipe of autopar.recipes, or autopar.constrain(pins)",
                got=f"{type(instead).__name__} ({instead!r:.40})",
                hint="such as plan.why_not(autopar.recipes.tensor_parallel())",
            )
        limited = dataclasses.replace(instead.request, memory_limit_bytes=self.record.memory_limit_bytes)
        try:
            other = replan(limited)
        except MemoryLimitError:
            other = replan(dataclasses.replace(limited, memory_limit_bytes=UNLIMITED_BYTES))
        return Comparison(plan=self.record, other=other.record)

    def _replan(self, method: str) -> Callable[[PlanRequest], Plan]:
        """Raises: UnsupportedError for a plan of a file that is not bound to its step."""
        if self.replan is None:
            raise UnsupportedError(
                where=f"{method}, plan of {self.record.step}",
                expected="a plan that knows its step",
                got="one from a file",
                hint=f"bind it: autopar.parallelize(fun, plan=plan).plan(*args).{method.partition('(')[0]}(...)",
            )
        return self.replan

    def diff(self, other: Plan) -> str:
        """The differences of two plans of a step: meshes, arguments, collectives and predictions, as text."""
        return Comparison(plan=self.record, other=other.record).difference_text()

    def table(self) -> str:
        """The whole plan as text: every stage, argument, module, collective and holder of memory."""
        return render.table(self.record)

    def to_dict(self) -> dict[str, Any]:
        """The plan as dictionaries, lists, text and numbers: `summary`, what `print` shows, and `plan`, its record
        without decisions and timelines, which `save` and `trace` write.
        """
        return dict_of(self.record)

    def __reduce__(self) -> tuple[type[Plan], tuple[PlanRecord, Trees | None]]:
        """A copy in another process knows its step's arguments, not how to plan it."""
        return Plan, (self.record, self.trees)

    def __str__(self) -> str:
        return render_summary.screen(self.record)

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return f'<pre style="line-height:1.3">{html.escape(str(self))}</pre>'

    def __repr__(self) -> str:
        if self.record.pipeline is not None:
            return f"<Plan of {self.record.step} on {self.cluster.name}, {len(self.record.pipeline.stages)} stages>"
        return f"<Plan of {self.record.step} on {self.cluster.name}, mesh {self.mesh}>"


def _pages() -> ModuleType:
    """The pages, whose templates nothing else needs: they are not loaded with autopar."""
    from autopar.plan import page

    return page


# Shardings in the structure of a user's tree, for the public API only: internally, all values are lists of leaves.
#
# The constructor of a user's node runs whenever a tree is rebuilt. A constructor that checks its leaves, or computes
# with them, accepts arrays and tracers but no shardings.


def shardings_in(tree: Any, shardings: Sequence[Any], where: str) -> Any:
    """The shardings of a tree's leaves in the structure of the tree.

    Raises: UnsupportedError that names the class whose constructor does not accept them.
    """
    holds, trees = _put_in(tree, shardings)
    if holds:
        return trees
    raise UnsupportedError(
        where=where,
        expected="classes whose constructors take shardings in place of arrays",
        got=f"{_refusing(tree, shardings)}, whose constructor takes arrays only",
        hint="take plan.sharding(path) of each leaf, with the paths that the plan prints (plan.record.arguments), or "
        "device_put the leaves of jax.tree.leaves; step.init and calls of the step need no tree of shardings",
    )


def _refusing(tree: Any, shardings: Sequence[Any]) -> str:
    """The innermost class of a tree that does not hold its shardings as they are."""
    first = 0
    for child in tree.children():
        if refusing := _refusing(child, shardings[first : first + child.num_leaves]):
            return refusing
        first += child.num_leaves
    node = tree.node_data()
    if node is None or _put_in(tree, shardings)[0]:
        return ""
    return f"{node[0].__module__}.{node[0].__qualname__}"


def _put_in(tree: Any, shardings: Sequence[Any]) -> tuple[bool, Any]:
    """(whether a tree holds shardings as they are, the tree with them)."""
    try:
        filled = jax.tree.unflatten(tree, shardings)
        leaves = jax.tree.leaves(set_apart(filled))
    except Exception:  # whatever a user's constructor raises
        return False, None
    return len(leaves) == len(shardings) and all(a is b for a, b in zip(leaves, shardings, strict=True)), filled
