"""Plan files: JSON with a version and a checksum, so that a damaged plan never runs as another one."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec

from autopar.attention.kernels import Kernel
from autopar.common.files import Fault, JsonFaultError, decoded, first_layout_twice
from autopar.common.trace_events import DEVICES, LINKS, Timeline
from autopar.errors import InvalidArgumentError, PlanFormatError
from autopar.hardware.cluster import part_number
from autopar.hardware.collective_cost import PLANNED_KINDS
from autopar.ir.layout import Layout
from autopar.ir.mesh import AXIS_NAMES, LogicalMesh
from autopar.plan.schema import (
    FORMAT_VERSION,
    SIGNATURE_DIGITS,
    Decisions,
    PipelineRecord,
    PlannedValue,
    PlanRecord,
    PredictedCollective,
)
from autopar.plan.summary import device_groups, num_stages, stage_mesh

# Validity of a plan record, whatever its step: ranges of numbers, meshes, layouts, table indices.
#
# `first_fault` returns the first violation. Checks that need the traced step run where the plan is made into a function
# (`autopar.compiler.check_decisions`).

# No number of a plan is larger: of integers what other programs read as such, of others far more than seconds, bytes
# and arithmetic operations of a step can be.
LARGEST_INTEGER, LARGEST = 2**63 - 1, 1e30
# What sums of seconds may lack to zero by rounding.
ROUNDING = 1e-9

KINDS = ("state", "batch", "constant", "other")
READERS = ("all", "forward", "backward", "update")
COLLECTIVES = tuple(kind.value for kind in PLANNED_KINDS)


def first_fault(record: PlanRecord) -> Fault | None:
    """The first fault of a record, with its place in the file; None for a valid record."""
    checks = (_numbers, _axis_names, _meshes, _values, _all_decisions, _predicted, _written, _pipeline, _timelines)
    return next((fault for check in checks for fault in check(record)), None)


def _range(n: int) -> str:
    return f"one of 0 to {n - 1}" if n else "none, as there is nothing to number"


def _outside(place: str, indices: Iterable[int], n: int) -> Iterator[Fault]:
    """The faults of indices into a table of n rows."""
    for i, index in enumerate(indices):
        if not 0 <= index < n:
            yield Fault(place=f"{place}[{i}]", expected=_range(n), got=str(index))


def _numbers(record: PlanRecord) -> Iterator[Fault]:
    if record.format_version != FORMAT_VERSION:
        got = str(record.format_version)
        yield Fault(place="$.plan.format_version", expected=str(FORMAT_VERSION), got=got)
    fault = _out_of_range(record)
    if fault is not None:
        place, number = fault
        yield Fault(
            place=f"$.plan{place}", expected="a number of zero or more, and of a usual size", got=f"{number:.8g}"
        )


def _out_of_range(value: Any) -> tuple[str, float] | None:
    """(place, number) of the first number that is negative or larger than any in a plan."""
    kind = type(value)
    if kind is int:
        return (
            None if 0 <= value <= LARGEST_INTEGER else ("", float(min(max(value, -LARGEST_INTEGER), LARGEST_INTEGER)))
        )
    if kind is float:
        return None if -ROUNDING <= value <= LARGEST else ("", value)
    if kind is str or kind is bool or value is None:
        return None
    items: Iterable[tuple[str, Any]] = ()
    if kind is tuple:
        for i, item in enumerate(value):
            if (fault := _out_of_range(item)) is not None:
                return f"[{i}]{fault[0]}", fault[1]
        return None
    if kind is dict:
        keys = ((f".{key}", key) for key in value)
        items = (*keys, *((f".{key}", item) for key, item in value.items()))
    elif isinstance(value, msgspec.Struct):
        # The events of a timeline are lists in the file.
        listed, names = value.__struct_config__.array_like, value.__struct_fields__
        items = ((f"[{i}]" if listed else f".{name}", getattr(value, name)) for i, name in enumerate(names))
    elif dataclasses.is_dataclass(value):
        items = ((f".{name}", getattr(value, name)) for name in value.__dataclass_fields__)
    for place, item in items:
        if (fault := _out_of_range(item)) is not None:
            return f"{place}{fault[0]}", fault[1]
    return None


def _mesh(place: str, sizes: Sequence[int]) -> Iterator[Fault]:
    if not 1 <= len(sizes) <= len(AXIS_NAMES):
        yield Fault(place=place, expected=f"1 to {len(AXIS_NAMES)} mesh axes", got=f"{len(sizes)}")
    for i, n in enumerate(sizes):
        if n < 1:
            yield Fault(place=f"{place}[{i}]", expected="one device or more along a mesh axis", got=str(n))


def _meshes(record: PlanRecord) -> Iterator[Fault]:
    pipeline, devices = record.pipeline, record.cluster.num_devices
    if record.memory_limit_bytes == 0:
        yield Fault(place="$.plan.memory_limit_bytes", expected="bytes of a device, or null", got="0")
    for i, trial in enumerate(record.tried):
        yield from _mesh(f"$.plan.tried[{i}].axis_sizes", trial.axis_sizes)
        if trial.axis_roles and len(trial.axis_roles) != len(trial.axis_sizes):
            expected = f"none, or one for each of {len(trial.axis_sizes)} axes"
            yield Fault(place=f"$.plan.tried[{i}].axis_roles", expected=expected, got=", ".join(trial.axis_roles))
    if pipeline is None:
        place = "$.plan.axis_sizes"
        yield from _mesh(place, record.axis_sizes)
        if math.prod(record.axis_sizes) != devices:
            got = f"{list(record.axis_sizes)}"
            yield Fault(place=place, expected=f"a mesh of the cluster's {devices} devices", got=got)
        try:
            record.cluster.axis_links(record.axis_sizes)
        except InvalidArgumentError as error:
            yield Fault(place=place, expected=error.expected, got=error.got)
        return
    if record.axis_sizes:
        yield Fault(
            place="$.plan.axis_sizes", expected="none: each stage has its own", got=f"{list(record.axis_sizes)}"
        )
    if not pipeline.stages:
        yield Fault(place="$.plan.pipeline.stages", expected="one stage or more", got="none")
    groups: dict[int, tuple[int, ...]] = {}
    for number, stage in enumerate(pipeline.stages):
        place = f"$.plan.pipeline.stages[{number}]"
        yield from _mesh(f"{place}.axis_sizes", stage.axis_sizes)
        sizes = groups.setdefault(stage.first_device, stage.axis_sizes)
        if sizes != stage.axis_sizes:
            expected = f"{list(sizes)}, as of the other stage from device {stage.first_device} on"
            yield Fault(place=f"{place}.axis_sizes", expected=expected, got=f"{list(stage.axis_sizes)}")
        last = stage.first_device + math.prod(stage.axis_sizes)
        over = [first for first in groups if stage.first_device < first < last]
        over += [f for f, s in groups.items() if f < stage.first_device < f + math.prod(s)]
        if last > devices or over:
            expected = f"devices of its own, of the {devices} of the cluster"
            yield Fault(
                place=f"{place}.first_device", expected=expected, got=f"devices {stage.first_device} to {last - 1}"
            )
            continue
        try:
            part_number(record.cluster, stage.first_device, math.prod(stage.axis_sizes))
        except InvalidArgumentError as error:
            yield Fault(place=f"{place}.first_device", expected=error.expected, got=error.got)


def _values(record: PlanRecord) -> Iterator[Fault]:
    for name, values, kinds in (("arguments", record.arguments, KINDS), ("results", record.results, ("result",))):
        for i, value in enumerate(values):
            yield from _value(record, value, f"$.plan.{name}[{i}]", kinds)


def _value(record: PlanRecord, value: PlannedValue, place: str, kinds: Sequence[str]) -> Iterator[Fault]:
    stages, known_stages = value.stages, num_stages(record)
    if value.kind not in kinds:
        yield Fault(place=f"{place}.kind", expected=" or ".join(kinds), got=repr(value.kind))
    yield from _outside(f"{place}.stages", stages, known_stages if record.pipeline is not None else 0)
    if not 0 <= value.stage < known_stages:
        yield Fault(place=f"{place}.stage", expected=_range(known_stages), got=str(value.stage))
    mesh, shape = stage_mesh(record, value.stage), value.shape
    if stages:
        if len(set(stages)) < len(stages) or len(stages) < 2:
            yield Fault(place=f"{place}.stages", expected="two different stages or more", got=f"{list(stages)}")
        if stages[0] != value.stage or len({stage_mesh(record, stage) for stage in stages}) > 1:
            expected = f"stages on equal meshes, stage {value.stage} first"
            yield Fault(place=f"{place}.stages", expected=expected, got=f"{list(stages)}")
        if not shape or shape[0] % len(stages):
            expected = f"a dimension 0 that divides by the {len(stages)} stages"
            yield Fault(place=f"{place}.shape", expected=expected, got=f"{list(shape)}")
        shape = (shape[0] // len(stages), *shape[1:])
    if value.layout.partial:
        yield Fault(place=f"{place}.layout.partial", expected="none", got=f"{list(value.layout.partial)}")
    yield from _layout(f"{place}.layout", value.layout, mesh)
    if len(value.layout.dims) != len(shape):
        expected = f"one entry for each of {len(shape)} dimensions"
        yield Fault(place=f"{place}.layout.dims", expected=expected, got=str(len(value.layout.dims)))
    if not value.layout.fits(shape, mesh):
        expected = f"a split of shape {list(shape)} into equal parts on mesh {mesh}"
        yield Fault(place=f"{place}.layout.dims", expected=expected, got=value.layout.text(mesh))


def _layout(place: str, layout: Layout, mesh: LogicalMesh) -> Iterator[Fault]:
    n = len(mesh.axis_sizes)
    for d, axes in enumerate(layout.dims):
        yield from _outside(f"{place}.dims[{d}]", axes, n)
    yield from _outside(f"{place}.partial", layout.partial, n)


def _all_decisions(record: PlanRecord) -> Iterator[Fault]:
    if record.pipeline is None:
        yield from _decisions("$.plan.decisions", record.decisions, stage_mesh(record, 0))
        return
    if record.decisions != Decisions(layouts=(), strategies=(), of_op={}, raw={}, placed={}, copies=()):
        yield Fault(place="$.plan.decisions", expected="none: each stage has its own", got="some")
    for number, stage in enumerate(record.pipeline.stages):
        place = f"$.plan.pipeline.stages[{number}].decisions"
        yield from _decisions(place, stage.decisions, stage_mesh(record, number))


def _decisions(place: str, decisions: Decisions, mesh: LogicalMesh) -> Iterator[Fault]:
    num_layouts, num_axes = len(decisions.layouts), len(mesh.axis_sizes)
    for i, layout in enumerate(decisions.layouts):
        yield from _layout(f"{place}.layouts[{i}]", layout, mesh)
    for i, s in enumerate(decisions.strategies):
        row = f"{place}.strategies[{i}]"
        yield from _outside(f"{row}.operands", s.operands, num_layouts)
        yield from _outside(f"{row}.results", s.results, num_layouts)
        yield from _outside(f"{row}.combined", s.combined, num_axes)
        yield from _outside(f"{row}.ring", s.ring, num_axes)
        if s.split < 1 or mesh.num_devices % s.split:
            expected = f"a number of parts that divides the {mesh.num_devices} devices"
            yield Fault(place=f"{row}.split", expected=expected, got=str(s.split))
    tables = (
        ("of_op", decisions.of_op, len(decisions.strategies)), ("raw", decisions.raw, num_layouts),
        ("placed", decisions.placed, num_layouts), ("wires", decisions.wires, num_layouts),
    )  # fmt: skip
    for name, numbered, n in tables:
        for key, index in numbered.items():
            if not 0 <= index < n:
                yield Fault(place=f"{place}.{name}.{key}", expected=_range(n), got=str(index))
    digits = SIGNATURE_DIGITS * len({*decisions.of_op, *decisions.wires})
    if not re.fullmatch(f"[0-9a-f]{{{digits}}}", decisions.operations):
        got = f"{len(decisions.operations)} characters"
        yield Fault(place=f"{place}.operations", expected=f"{digits} digits of 0 to 9 and a to f", got=got)
    for i, (_, readers, index) in enumerate(decisions.copies):
        if readers not in READERS:
            yield Fault(place=f"{place}.copies[{i}][1]", expected=" or ".join(READERS), got=repr(readers))
        if not 0 <= index < num_layouts:
            yield Fault(place=f"{place}.copies[{i}][2]", expected=_range(num_layouts), got=str(index))


def _predicted(record: PlanRecord) -> Iterator[Fault]:
    predicted, groups = record.predicted, len(device_groups(record))
    lengths = {"peak_bytes": predicted.peak_bytes, "memory": predicted.memory, "host_bytes": predicted.host_bytes}
    for name, per_group in lengths.items():
        if len(per_group) != groups and (name != "host_bytes" or per_group):
            expected = f"one entry for each of {groups} group(s) of devices"
            yield Fault(place=f"$.plan.predicted.{name}", expected=expected, got=str(len(per_group)))
    axes = [stage_mesh(record, stage).axis_names for stage in range(num_stages(record))]
    known = tuple(dict.fromkeys(name for names in axes for name in names))
    yield from _collectives("$.plan.predicted.collectives", predicted.collectives, known)
    for i, row in enumerate(record.modules):
        if not 0 <= row.stage < len(axes):
            yield Fault(place=f"$.plan.modules[{i}].stage", expected=_range(len(axes)), got=str(row.stage))
        else:
            yield from _collectives(f"$.plan.modules[{i}].collectives", row.collectives, axes[row.stage])


def _written(record: PlanRecord) -> Iterator[Fault]:
    """Of the way in which the step is written. What its scans save is told by the step (`choice_of`)."""
    kernels = ("", *(kernel.name for kernel in Kernel))
    if record.attention_kernel not in kernels:
        expected, got = " or ".join(map(repr, kernels)), repr(record.attention_kernel)
        yield Fault(place="$.plan.attention_kernel", expected=expected, got=got)


def _collectives(place: str, collectives: Sequence[PredictedCollective], names: Sequence[str]) -> Iterator[Fault]:
    for i, collective in enumerate(collectives):
        if collective.kind not in COLLECTIVES:
            yield Fault(place=f"{place}[{i}].kind", expected=" or ".join(COLLECTIVES), got=repr(collective.kind))
        for j, axis in enumerate(collective.axes):
            if axis not in names:
                yield Fault(place=f"{place}[{i}].axes[{j}]", expected=" or ".join(names), got=repr(axis))


def _axis_names(record: PlanRecord) -> Iterator[Fault]:
    stages = num_stages(record)
    for field, entries in (("axis_names", record.axis_names), ("axis_roles", record.axis_roles)):
        if entries and len(entries) != stages:
            expected = f"one entry for each of {stages} stage(s)"
            yield Fault(place=f"$.plan.{field}", expected=expected, got=str(len(entries)))
        for stage, names in enumerate(entries[:stages]):
            place, sizes = f"$.plan.{field}[{stage}]", _axis_sizes(record, stage)
            if len(names) != len(sizes):
                expected = f"a name for each of the {len(sizes)} axes of mesh {'x'.join(map(str, sizes))}"
                yield Fault(place=place, expected=expected, got=", ".join(names) or "none")
            elif field == "axis_names" and not _are_names(names):
                yield Fault(place=place, expected="a name of its own for each mesh axis", got=", ".join(names))


def _axis_sizes(record: PlanRecord, stage: int) -> tuple[int, ...]:
    return record.axis_sizes if record.pipeline is None else record.pipeline.stages[stage].axis_sizes


def _are_names(names: Sequence[str]) -> bool:
    return all(names) and len(set(names)) == len(names)


def _pipeline(record: PlanRecord) -> Iterator[Fault]:
    pipeline, place = record.pipeline, "$.plan.pipeline"
    if pipeline is None:
        return
    for name in ("num_microbatches", "chunks", "scan_parts"):
        if getattr(pipeline, name) < 1:
            yield Fault(place=f"{place}.{name}", expected="one or more", got=str(getattr(pipeline, name)))
    groups = len(device_groups(record))
    if pipeline.chunks * groups != len(pipeline.stages):
        expected = f"{len(pipeline.stages)} stages on {groups} group(s) of devices, as many on each"
        yield Fault(place=f"{place}.chunks", expected=expected, got=f"{pipeline.chunks} on each")
    yield from _layers(pipeline)


def _layers(pipeline: PipelineRecord) -> Iterator[Fault]:
    first = 0
    for number, stage in enumerate(pipeline.stages):
        place = f"$.plan.pipeline.stages[{number}]"
        if stage.first_layer != first:
            got = str(stage.first_layer)
            yield Fault(place=f"{place}.first_layer", expected=f"{first}, behind the last stage's layers", got=got)
        if not stage.layers:
            yield Fault(place=f"{place}.layers", expected="one layer or more", got="none")
        first += len(stage.layers)
    if len(pipeline.recomputed) != first:
        expected = f"one entry for each of {first} layers"
        yield Fault(place="$.plan.pipeline.recomputed", expected=expected, got=str(len(pipeline.recomputed)))


def _timelines(record: PlanRecord) -> Iterator[Fault]:
    yield from _timeline("$.plan.timeline", record.timeline)
    if record.pipeline is not None:
        yield from _timeline("$.plan.pipeline.timeline", record.pipeline.timeline)


def _timeline(place: str, timeline: Timeline) -> Iterator[Fault]:
    rows = {DEVICES: len(timeline.rows), LINKS: len(timeline.links)}
    for i, event in enumerate(timeline.events):
        if event.process not in rows:
            yield Fault(place=f"{place}.events[{i}][0]", expected=_range(len(rows)), got=str(event.process))
        elif not 0 <= event.row < rows[event.process]:
            yield Fault(place=f"{place}.events[{i}][1]", expected=_range(rows[event.process]), got=str(event.row))
    for name, per_row in timeline.tracks.items():
        if len(per_row) > len(timeline.rows):
            expected = f"at most one entry for each of {len(timeline.rows)} rows"
            yield Fault(place=f"{place}.tracks.{name}", expected=expected, got=str(len(per_row)))


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
    `$.plan.pipeline.stages[1].axis_sizes[0]`) where the plan is no longer valid.
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
    record = _record(bytes(file.plan))
    if isinstance(record, Fault):
        raise PlanFormatError(
            where=f"{where}, {record.place}", expected=record.expected, got=f"{record.got}{changed}", hint=_HINT
        )
    if changed:
        raise PlanFormatError(
            where=f"{where}, $.plan", expected="a plan as it was saved", got="a changed one (checksum)", hint=_HINT
        )
    return record


def _record(body: bytes) -> PlanRecord | Fault:
    """The plan, or its first fault."""
    try:
        record = decoded(body, PlanRecord, "a plan", "$.plan")
    except JsonFaultError as error:
        return error.fault
    except AssertionError as error:  # of a layout, which says no place
        fault = None
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            fault = first_layout_twice(msgspec.json.decode(body), "$.plan")
        return fault or Fault(place="$.plan", expected="layouts of a mesh", got=str(error))
    return first_fault(record) or record


def checksum(body: bytes) -> str:
    """Digits that tell whether a file was changed."""
    return hashlib.sha256(body).hexdigest()
