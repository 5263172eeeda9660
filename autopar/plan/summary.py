"""A plan in short: what was chosen, what the step loses and to what, and what is alike as one row. Values only.

`autopar.plan.render_summary` writes it as text, `autopar.plan.page` as a page.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

import msgspec

from autopar.common.paths import parts_of
from autopar.common.text import text_of_bytes, text_of_flops, text_of_interval_s, text_of_s
from autopar.common.trace_events import Timeline
from autopar.hardware.cluster import Cluster
from autopar.ir.layout import LogicalMesh
from autopar.passes.remat import name_of
from autopar.plan.schema import MemoryKind, ModuleRow, PlannedValue, PlanRecord, Predicted

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)
SPLITS_NAMED = 2  # groups of unlike stages that the sentence describes
IN_HOST = ", in host memory"  # after a layout
AT_PEAK_RATE = "arithmetic at the devices' peak rate"
PRODUCTS = "matrix products below the peak rate"
BUBBLE, WAITING = "bubble of the pipeline", "waiting"
HOST_COPIES = "copies from and to the host"
MEMORY_BOUND, COLLECTIVES = "operations bound by memory", "exposed collectives"
# Of the step: less of it is no line of its own in what is lost.
LEAST_LOSS = 0.001
ROUNDED_AWAY = 0.005  # of the step: what would be written as 0 %
LINK = " to "  # between the two ends of a link of a timeline
_NUMBER = re.compile(r"\d+")
SHARDED = "sharded data"
# State counts as split where a device holds at most so many times its share: what devices do not divide is small.
ABOUT = 1.05
# Matrices count as split where a device holds at most so many times its share of the state: vectors, and what few read,
# may be whole on each.
MOSTLY = 2.0
# A note that begins so stands first: it says why devices do the same work.
BATCH_WHOLE = "the batch is not split"
# What an axis of each role splits; an axis that splits nothing has none.
DATA, TENSOR = "data", "tensor"  # the roles of an axis that splits the batch alone, and of one that splits matrices
STATE = "state"  # of an axis over which devices do the same work, each holding a part of the state
_SPLITS = {
    DATA: "the batch",
    SHARDED: "the batch and the state",
    STATE: "the state",
    TENSOR: "the matrices",
    "sequence": "the sequences",
    "expert": "the experts",
    "stack": "the stacked matrices",
}
_AXIS_NAMES = {SHARDED: "data", TENSOR: "model"}  # of the other roles: as the role


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """A part of the step time. `is_loss`: all but arithmetic at the devices' peak rate."""

    name: str
    seconds: float
    is_loss: bool = True


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fullest:
    """The group of devices that comes nearest to its memory limit. `number`: among those of `Predicted.peak_bytes`."""

    number: int
    peak_bytes: int
    limit_bytes: int | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StageGroup:
    """Neighbouring stages that are alike, `first` to `last`. Seconds and bytes are the largest among them."""

    first: int
    last: int
    layers: int
    mesh: LogicalMesh
    roles: tuple[str, ...]
    recomputed: tuple[str, ...]
    forward_s: float
    backward_s: float
    in_flight: int
    peak_bytes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StateGroup:
    """Arrays that are alike: layers, and the moments of parameters, `count` in all.

    The device that holds the most of them has `device_count`, in whole or in part, in `device_bytes`: others of a
    pipeline may have none. `shards`: the parts into which `dims`, the mesh axes of each dimension, split each.
    """

    name: str
    kind: str
    count: int
    device_count: int
    shape: tuple[int, ...]
    dtype: str
    layout: str
    in_host: bool
    device_bytes: int
    shards: int
    dims: tuple[tuple[int, ...], ...]

    @property
    def lies(self) -> str:
        """The layout, and whether the arrays are in the memory of the host."""
        return f"{self.layout}{IN_HOST if self.in_host else ''}"

    @property
    def count_text(self) -> str:
        """`96`, or `8 of 96` where the device has no more."""
        return str(self.count) if self.device_count == self.count else f"{self.device_count} of {self.count}"


def grouped(items: Iterable[T], key_of: Callable[[T], K]) -> dict[K, list[T]]:
    """What is alike together, in order of appearance, by what it has in common."""
    groups: dict[K, list[T]] = {}
    for item in items:
        groups.setdefault(key_of(item), []).append(item)
    return groups


def folded(path: str) -> str:
    """A path without its numbers, so that repeated layers have one name."""
    return _NUMBER.sub("*", path)


def path_of(name: str) -> str:
    """A folded path as a pattern: in parts with slashes between them, which `explain` and `constrain` take."""
    return "/".join(parts_of(name)) or name


def array_text(dtype: str, shape: Sequence[int]) -> str:
    """`float32[128, 64]`, as jax writes it."""
    return f"{dtype}{list(shape)}"


def num_parameters(record: PlanRecord) -> int:
    """The elements of the parameters; 0 where the paths of the state do not tell them from what the optimizer keeps.

    Of arrays whose paths end alike those with the shortest paths are parameters, the others are their moments. Their
    bytes must be those that the plan counts as parameters.
    """
    arrays = (value for value in record.arguments if value.kind == "state" and value.shape)
    found: list[PlannedValue] = []
    for values in grouped(arrays, lambda value: (parts_of(value.path)[-1:], value.shape)).values():
        shortest = min(len(parts_of(value.path)) for value in values)
        found += [value for value in values if len(parts_of(value.path)) == shortest]
    counted = max((use.throughout.get(MemoryKind.PARAMETER, 0) for use in record.predicted.memory), default=0)
    if not found or abs(_on_fullest(record, found)[1] - counted) > (ABOUT - 1) * counted:
        return 0
    return sum(math.prod(value.shape) for value in found)


def where(cluster: Cluster) -> str:
    """The name of a cluster, with its hosts where it has several: `dgx-h100, 8 hosts of 8`."""
    return f"{cluster.name}{_hosts(cluster)}"


def devices_text(cluster: Cluster) -> str:
    """`64 x H100, 8 hosts of 8`."""
    return f"{cluster.num_devices:,} x {cluster.device.name}{_hosts(cluster)}"


def _hosts(cluster: Cluster) -> str:
    return f", {cluster.num_hosts:,} hosts of {cluster.devices_per_host}" if cluster.num_hosts > 1 else ""


def in_short(record: PlanRecord) -> str:
    """What a plan splits, or its stages, in a few words."""
    pipeline = record.pipeline
    if pipeline is None:
        return _splits(record, 0)
    if len(pipeline.stages) == 1:
        return f"{_splits(record, 0)}, {pipeline.num_microbatches} micro-batches"
    return f"{len(pipeline.stages)} stages, {pipeline.num_microbatches} micro-batches, {pipeline.schedule}"


def memory_text(record: PlanRecord) -> str:
    """Which part of the memory of a device the limit is, as a sentence; empty where there is no limit, or it is all."""
    limit_bytes, memory_bytes = record.memory_limit_bytes, record.cluster.device.memory_bytes
    if limit_bytes is None or limit_bytes >= memory_bytes:
        return ""
    part = f"{limit_bytes / memory_bytes:.0%}".replace("%", " %")
    return f"{text_of_bytes(limit_bytes)} are available: {part} of the {text_of_bytes(memory_bytes)} of a device."


def stage_mesh(record: PlanRecord, stage: int) -> LogicalMesh:
    """The mesh of a stage, or of the whole step."""
    sizes = record.axis_sizes if record.pipeline is None else record.pipeline.stages[stage].axis_sizes
    return LogicalMesh(axis_sizes=sizes, names=record.axis_names[stage] if record.axis_names else ())


def first_device(record: PlanRecord, stage: int) -> int:
    """The number of a stage's first device, which its group of devices is known by."""
    return 0 if record.pipeline is None else record.pipeline.stages[stage].first_device


def num_stages(record: PlanRecord) -> int:
    """The stages of a pipeline; 1 for one program."""
    return 1 if record.pipeline is None else len(record.pipeline.stages)


def device_groups(record: PlanRecord) -> dict[int, int]:
    """The groups of devices that run stages: the first device of each, and their number."""
    stages = range(num_stages(record))
    return {first_device(record, stage): stage_mesh(record, stage).num_devices for stage in stages}


def num_devices(record: PlanRecord) -> int:
    """The devices that the plan uses."""
    return sum(device_groups(record).values())


def meshes_text(record: PlanRecord) -> str:
    """The mesh, or those of all stages with their schedule and micro-batches."""
    meshes = ", ".join(str(stage_mesh(record, stage)) for stage in range(num_stages(record)))
    pipeline = record.pipeline
    return meshes if pipeline is None else f"{meshes}; {pipeline.schedule}, {pipeline.num_microbatches} micro-batches"


def group_names(record: PlanRecord) -> list[str]:
    """The stages of each group of devices."""
    if record.pipeline is None:
        return ["the mesh"]
    groups = len(record.predicted.peak_bytes)
    stages = grouped(range(num_stages(record)), lambda stage: first_device(record, stage))
    assert len(stages) == groups, f"{len(stages)} groups of devices have {groups} peaks"
    return [f"stage {', '.join(map(str, numbers))}" for numbers in stages.values()]


def fullest(record: PlanRecord, limit_bytes: int | None = None) -> Fullest:
    """The fullest group of devices, with the plan's limit, or with another one."""
    limit_bytes = record.memory_limit_bytes if limit_bytes is None else limit_bytes
    peaks = record.predicted.peak_bytes
    number = max(range(len(peaks)), key=peaks.__getitem__)
    return Fullest(number=number, peak_bytes=peaks[number], limit_bytes=limit_bytes)


def timeline_of(record: PlanRecord) -> Timeline:
    """The simulated pipeline, its rows by the stages that a group of devices has, or the instructions on two streams
    where the step is one program.
    """
    if record.pipeline is None:
        return record.timeline
    timeline, names = record.pipeline.timeline, group_names(record)
    if len(names) != len(timeline.rows):  # in an edited file
        return timeline
    called = dict(zip(timeline.rows, names, strict=True))
    links = (LINK.join(called.get(end, end) for end in link.split(LINK)) for link in timeline.links)
    return msgspec.structs.replace(timeline, rows=tuple(names), links=tuple(links))


def stage_share(record: PlanRecord, stage: int) -> float:
    """The part of the plan's devices that run a stage: the weight of its seconds in means over the devices."""
    return stage_mesh(record, stage).num_devices / num_devices(record)


def sentence(record: PlanRecord, named: int = SPLITS_NAMED) -> str:
    """What was chosen: stages and their devices, and what each mesh axis splits, in so many groups of unlike stages."""
    pipeline = record.pipeline
    if pipeline is None:
        devices = num_devices(record)
        if devices == 1:
            return "One program on one device."
        return f"One program on {devices} devices: {_splits(record, 0)}."
    groups = grouped(range(len(pipeline.stages)), lambda stage: _splits(record, stage))
    sizes = sorted({stage_mesh(record, s).num_devices for s in range(len(pipeline.stages))})
    of_each = " or ".join(map(str, sizes)) + (" devices" if sizes != [1] else " device")
    on = f", {pipeline.chunks} on each group of devices" if pipeline.chunks > 1 else ""
    opening = f"{len(pipeline.stages)} stages of {of_each}{on}"
    if len(groups) == 1:
        inside = f"inside each, {next(iter(groups))}"
    else:
        told = list(groups.items())[:named]
        inside = "; ".join(f"in {stages_text(stages)}, {splits}" for splits, stages in told)
        if len(groups) > len(told):
            others = len(groups) - len(told)
            inside += f"; {others} other way{'s' if others > 1 else ''} in the rest"
    batches = f"{pipeline.num_microbatches} micro-batches" if pipeline.num_microbatches > 1 else "the whole batch"
    if len(pipeline.stages) == 1:
        return f"One program on {of_each}, over {batches}: {_splits(record, 0)}."
    return f"{opening}, {batches} in schedule {pipeline.schedule}; {inside}."


def ranges(numbers: Sequence[int]) -> list[str]:
    """Ascending numbers, neighbours as ranges: `0-3`, `5`."""
    runs = [[number for _, number in run] for _, run in itertools.groupby(enumerate(numbers), lambda p: p[1] - p[0])]
    return [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]


def stages_text(stages: Sequence[int]) -> str:
    """Stages 0-3, 5."""
    return f"stage{'s' if len(stages) > 1 else ''} {', '.join(ranges(stages))}"


def place(record: PlanRecord, values: Sequence[PlannedValue]) -> str:
    """The layout of values that are alike, and who holds them."""
    return values[0].layout.text(stage_mesh(record, values[0].stage)) + holders(record, values)


def holders(record: PlanRecord, values: Sequence[PlannedValue]) -> str:
    """The stages that hold values that are alike, and whether these are in the memory of the host, in words."""
    text = ""
    if record.pipeline is not None:
        stages = sorted({stage for value in values for stage in value.stages or (value.stage,)})
        text = f"{', in parts' if values[0].stages else ''} on {stages_text(stages)}"
    return f"{text}{IN_HOST}" if values[0].in_host else text


def axis_names_of(roles: Sequence[str], given: Sequence[str] = ()) -> tuple[str, ...]:
    """Names of mesh axes: those that are given, else those of their roles, each once (data, data2). Where one splits
    the batch and the state, another that splits the batch alone is one of replicas.
    """
    words = {**_AXIS_NAMES, DATA: "replica"} if SHARDED in roles else _AXIS_NAMES
    names = list(given) or [""] * len(roles)
    for axis, role in enumerate(roles):
        if not names[axis]:
            word = words.get(role, role or "replica")
            numbered = (word, *(f"{word}{n}" for n in range(2, len(roles) + len(names) + 1)))
            names[axis] = next(name for name in numbered if name not in names)
    return tuple(names)


def axis_roles(record: PlanRecord, stage: int) -> tuple[str, ...]:
    """The role of each mesh axis of a stage; empty where it splits nothing."""
    return record.axis_roles[stage]


def _splits(record: PlanRecord, stage: int) -> str:
    """What the mesh axes of a stage split, and over how many devices."""
    mesh = stage_mesh(record, stage)
    return splits_text(mesh.axis_sizes, axis_roles(record, stage), _held_of_state(record, stage))


def splits_batch(record: PlanRecord) -> bool:
    """Whether a mesh axis splits the batch."""
    stages = range(num_stages(record))
    return any({DATA, SHARDED} & set(_ways(stage_mesh(record, s).axis_sizes, axis_roles(record, s))) for s in stages)


def _ways(sizes: Sequence[int], roles: Sequence[str]) -> dict[str, int]:
    """Role -> over how many devices it splits."""
    ways: dict[str, int] = {}
    for role, size in zip(roles, sizes, strict=True):
        if size > 1 and role in _SPLITS:
            ways[role] = ways.get(role, 1) * size
    return ways


def devices_alike(record: PlanRecord, stage: int) -> tuple[int, int]:
    """(how many devices of a stage do the same work, over how many its examples would be split if none did)."""
    mesh = stage_mesh(record, stage)
    ways = _ways(mesh.axis_sizes, axis_roles(record, stage))
    others = math.prod(n for role, n in ways.items() if role not in (DATA, SHARDED, STATE))
    return _alike(mesh.axis_sizes, ways), mesh.num_devices // others


def _alike(sizes: Sequence[int], ways: Mapping[str, int]) -> int:
    """How many devices do the same work."""
    return math.prod(sizes) // math.prod(n for role, n in ways.items() if role != STATE)


def splits_text(sizes: Sequence[int], roles: Sequence[str], held: float = 0.0) -> str:
    """What mesh axes of these sizes and roles split. `held`: the part of the state that a device holds, which is told
    where it is more than an even split would leave it.
    """
    ways = _ways(sizes, roles)
    named = {role: f"{_SPLITS[role]} split over {n}" for role, n in ways.items()}
    part = f"{held:.0%}" if held >= 0.1 else f"{held:.1%}"
    if SHARDED in ways:
        sharded, is_split = ways[SHARDED], held <= math.prod(ways.values()) ** -1 * ABOUT
        state = "the state" if is_split else f"the state in part ({part} of it a device)"
        if DATA in ways:
            del named[DATA]
            named[SHARDED] = f"the batch split over {ways[DATA] * sharded}, over {sharded} of them {state} too"
        elif not is_split:
            named[SHARDED] = f"the batch split over {sharded} and {state}"
    elif TENSOR in ways and held > MOSTLY / ways[TENSOR]:
        named[TENSOR] = f"a part of {named[TENSOR]} ({part} of the state a device)"
    parts = list(named.values())
    if (alike := _alike(sizes, ways)) > 1:
        parts.append(f"{'groups of ' if ways.keys() - {STATE} else ''}{alike} devices do the same work")
    return ", ".join(parts) or "nothing is split"


def _held_of_state(record: PlanRecord, stage: int) -> float:
    """The part of a stage's state that one of its devices holds."""
    mesh, whole, held = stage_mesh(record, stage), 0.0, 0.0
    for value in record.arguments:
        stages = value.stages or (value.stage,)
        if value.kind == "state" and stage in stages:
            whole += value.nbytes / len(stages)
            held += value.nbytes / len(stages) / value.layout.shards(mesh)
    return held / whole if whole else 0.0


def exposed_s(record: PlanRecord, modules: Sequence[ModuleRow]) -> float:
    """Seconds for which the step waits for the collectives of modules, the mean over the devices."""
    return sum(stage_share(record, row.stage) * row.exposed_s for row in modules)


def flops_text(predicted: Predicted) -> str:
    """The model's operations, those that `jax.checkpoint` has done again, and the utilisation."""
    again = f" and {text_of_flops(predicted.recomputed_flops)} recomputed" if predicted.recomputed_flops else ""
    return f"{text_of_flops(predicted.model_flops)}{again}, MFU {predicted.mfu:.1%}"


def interval_text(record: PlanRecord) -> str:
    """` (1.9 to 2.4 s)`, after a step time; empty where the errors of predictions are not known."""
    ends_s = record.step_interval_s
    return "" if ends_s is None else f" ({text_of_interval_s(ends_s)})"


def shares(record: PlanRecord) -> tuple[Share, ...]:
    """The step time in parts, in order: arithmetic at the peak rate, then each loss. Parts of no length are left out.

    The computation that hides communication counts once, as computation. Of a pipeline all parts are means over the
    devices.
    """
    predicted = record.predicted
    step_s, compute_s = predicted.step_time_s, predicted.compute_time_s
    useful_s = min(predicted.peak_rate_time_s, compute_s)
    products_s, waits_s = max(predicted.product_time_s, useful_s), exposed_s(record, record.modules)
    bubble_s = predicted.bubble_fraction * step_s
    host_s = min(predicted.host_time_s, max(0.0, step_s - compute_s - bubble_s - waits_s))
    parts = [
        Share(name=AT_PEAK_RATE, seconds=useful_s, is_loss=False),
        Share(name=PRODUCTS, seconds=products_s - useful_s),
        Share(name=MEMORY_BOUND, seconds=compute_s - products_s),
        Share(name=COLLECTIVES, seconds=waits_s),
        Share(name=HOST_COPIES, seconds=host_s),
        Share(name=BUBBLE, seconds=bubble_s),
    ]
    rest_s = step_s - sum(part.seconds for part in parts)
    parts.append(Share(name=WAITING, seconds=rest_s))
    return tuple(part for part in parts if part.seconds > LEAST_LOSS * step_s)


def lost(record: PlanRecord) -> str:
    """The step time in parts, the largest loss first."""
    parts, step_s = shares(record), record.predicted.step_time_s
    if not parts:
        return "The step takes no time."
    gained = [s for s in parts if not s.is_loss]
    losses = sorted((s for s in parts if s.is_loss), key=lambda s: -s.seconds)
    told = [f"{s.seconds / step_s:.0%} {s.name}" for s in gained]
    for s in losses:
        part = f"{s.seconds / step_s:.0%}" if s.seconds >= ROUNDED_AWAY * step_s else "less than 1%"
        told.append(f"{part} {s.name} ({text_of_s(s.seconds)})")
    return f"Of the step: {', '.join(told)}."


def stage_groups(record: PlanRecord) -> tuple[StageGroup, ...]:
    """The stages of a pipeline, neighbours that are alike as one."""
    pipeline = record.pipeline
    if pipeline is None:
        return ()
    rows = []
    for number, stage in enumerate(pipeline.stages):
        policies = pipeline.recomputed[stage.first_layer : stage.first_layer + len(stage.layers)]
        rows.append(
            StageGroup(
                first=number,
                last=number,
                layers=len(stage.layers),
                mesh=stage_mesh(record, number),
                roles=axis_roles(record, number),
                recomputed=tuple(dict.fromkeys(map(name_of, policies))),
                forward_s=stage.forward_s,
                backward_s=stage.backward_s + stage.weight_s,
                in_flight=stage.in_flight,
                peak_bytes=stage.peak_bytes,
            )
        )
    grouped = itertools.groupby(rows, lambda r: (r.layers, r.mesh, r.roles, r.recomputed))
    return tuple(_joined(list(alike)) for _, alike in grouped)


def _joined(alike: Sequence[StageGroup]) -> StageGroup:
    return dataclasses.replace(
        alike[0],
        last=alike[-1].last,
        forward_s=max(r.forward_s for r in alike),
        backward_s=max(r.backward_s for r in alike),
        in_flight=max(r.in_flight for r in alike),
        peak_bytes=max(r.peak_bytes for r in alike),
    )


def state_groups(record: PlanRecord) -> tuple[StateGroup, ...]:
    """The arguments, those that are alike as one, largest first.

    Alike are layers, and moments beside their parameters: their paths end alike, and shape, type and layout are equal.
    Their name is a pattern that matches the parameters among them.
    """

    def key_of(v: PlannedValue) -> tuple:
        lies = v.layout.text(stage_mesh(record, v.stage))
        return parts_of(folded(v.path))[-2:], v.kind, v.shape, v.dtype, lies, v.in_host

    rows = []
    for (_, kind, shape, dtype, lies, in_host), values in grouped(record.arguments, key_of).items():
        device_count, device_bytes = _on_fullest(record, values)
        rows.append(
            StateGroup(
                name=common_name([value.path for value in values]),
                kind=kind,
                count=len(values),
                device_count=device_count,
                shape=shape,
                dtype=dtype,
                layout=lies,
                in_host=in_host,
                device_bytes=device_bytes,
                shards=values[0].layout.shards(stage_mesh(record, values[0].stage)),
                dims=values[0].layout.dims,
            )
        )
    return tuple(sorted(rows, key=lambda row: -row.device_bytes))


def common_name(paths: Sequence[str]) -> str:
    """The shortest path, which is that of a parameter and not of its moments; a part in which several of the shortest
    differ is `*`.
    """
    if len(paths) == 1:
        return paths[0]
    by_path = {folded(path): parts_of(folded(path)) for path in paths}
    length = min(map(len, by_path.values()))
    shortest = {path: parts for path, parts in by_path.items() if len(parts) == length}
    if len(shortest) == 1:
        return next(iter(shortest))
    return "/".join(names[0] if len(set(names)) == 1 else "*" for names in zip(*shortest.values(), strict=True))


def _on_fullest(record: PlanRecord, values: Sequence[PlannedValue]) -> tuple[int, int]:
    """(number, bytes) of values on the device that holds the most of them."""
    by_group: dict[int, tuple[int, int]] = {}
    for value in values:
        mesh, stages = stage_mesh(record, value.stage), value.stages or (value.stage,)
        for stage in stages:
            group, nbytes = first_device(record, stage), value.nbytes // (value.layout.shards(mesh) * len(stages))
            count, total = by_group.get(group, (0, 0))
            by_group[group] = count + 1, total + nbytes
    return max(by_group.values(), key=lambda held: held[1])
