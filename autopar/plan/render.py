"""A plan as text: tables."""

from __future__ import annotations

import math

from rich.markup import escape
from rich.table import Table

from autopar.common.text import PLAIN, TextConsole, TextFormat, text_of_bytes, text_of_s
from autopar.ir.layout import axes_text
from autopar.passes.remat import name_of
from autopar.plan.modules import NO_MODULE, by_axes, collective_rows, cost_of
from autopar.plan.schema import CandidateRecord, MemoryKind, PinsRecord, PipelineRecord, PlannedValue, PlanRecord
from autopar.plan.summary import (
    device_groups,
    flops_text,
    folded,
    fullest,
    group_names,
    grouped,
    interval_text,
    place,
    stage_mesh,
    stage_share,
)

WIDTH = 140  # columns of the printed plan
LARGEST_SHOWN = 6


def table(record: PlanRecord, text_format: TextFormat = PLAIN) -> str:
    """The whole plan: stages or mesh, state and batch, modules with their communication, memory, time."""
    out = TextConsole(WIDTH, text_format)
    predicted, full = record.predicted, fullest(record)
    if record.pipeline is None:
        mesh = stage_mesh(record, 0)
        out.long_line(f"Plan of {record.step} on {record.cluster.name}: {mesh.num_devices} device(s), mesh {mesh}")
    else:
        out.long_line(_pipeline_line(record, record.pipeline))
    out.long_line(
        f"step {text_of_s(predicted.step_time_s)} predicted{interval_text(record)}: "
        f"compute {text_of_s(predicted.compute_time_s)}, "
        f"collectives {text_of_s(predicted.collective_time_s)}"
        + (f", {text_of_s(predicted.hidden_time_s)} of it hidden" if predicted.hidden_time_s else "")
        + "; "
        + (f"bubble {predicted.bubble_fraction:.1%}; " if record.pipeline is not None else "")
        + f"{flops_text(predicted)}; "
        f"peak {text_of_bytes(full.peak_bytes)} a device"
        + (f" of {text_of_bytes(full.limit_bytes)}" if full.limit_bytes else "")
    )
    if predicted.host_bytes:
        out.long_line(
            f"host memory: {text_of_bytes(max(predicted.host_bytes))} a device, of which each step copies "
            f"{text_of_bytes(predicted.host_copied_bytes)}, there and back, in {text_of_s(predicted.host_time_s)}"
        )
    out.long_line(
        f"solver: {record.solver.status}, gap {record.solver.gap:.2%}, {record.solver.nodes} choices folded to "
        f"{record.solver.classes}"
    )
    if record.recipe:
        out.long_line(f"recipe: {record.recipe}")
    if record.compiler_options:
        out.long_line(
            "compiler options: " + ", ".join(f"{name}={value}" for name, value in record.compiler_options.items())
        )
    if record.exchange_options:
        out.long_line(
            "of programs that run once a step: "
            + ", ".join(f"{name}={value}" for name, value in record.exchange_options.items())
        )
    if record.pipeline is not None:
        out.table(_stages_table(record, record.pipeline))
    out.table(_values_table(record))
    out.table(_modules_table(record))
    out.table(_collectives_table(record))
    out.table(_memory_table(record))
    out.table(_largest_table(record))
    if len(record.tried) > 1:
        for line in _tried_lines(record):
            out.long_line(line)
    if record.pinned is not None:
        _pins_lines(out, record, record.pinned)
    for way in record.weighed:
        time, peak = text_of_s(way.step_time_s or 0.0), text_of_bytes(way.peak_bytes or 0)
        out.long_line(f"weighed: {way.text}: {time}, peak {peak}")
    for note in record.notes:
        out.long_line(f"note: {note}")
    return out.text()


def _tried_lines(record: PlanRecord) -> list[str]:
    """The ways that were tried on each mesh, the fastest first; on the mesh of the plan the plan itself."""
    lines = []
    for sizes, trials in grouped(record.tried, lambda trial: trial.axis_sizes).items():
        step_s = record.predicted.step_time_s if sizes == record.axis_sizes else None
        own = next((t for t in trials if t.step_time_s == step_s), None) if step_s is not None else None
        texts = [_trial_text(t) for t in sorted(trials, key=_by_time) if t is not own]
        if step_s is not None:
            name = f"{own.name}, " if own is not None and own.name else ""
            texts.insert(0, f"{text_of_s(step_s)} ({name}the plan)")
        lines.append(f"tried on mesh {'x'.join(map(str, sizes))}: {', '.join(texts)}")
    return lines


def _by_time(trial: CandidateRecord) -> float:
    return math.inf if trial.step_time_s is None else trial.step_time_s


def _trial_text(trial: CandidateRecord) -> str:
    name = f" ({trial.name})" if trial.name else ""
    return (trial.why if trial.step_time_s is None else text_of_s(trial.step_time_s)) + name


def _pins_lines(out: TextConsole, record: PlanRecord, pinned: PinsRecord) -> None:
    """The pins, the mesh, and their cost."""
    without = "no plan was found without them"
    if pinned.free_step_time_s is not None and pinned.cost_s is not None:
        without = f"{text_of_s(pinned.free_step_time_s)} without them: they cost {text_of_s(pinned.cost_s)}"
    out.long_line(f"pins on {stage_mesh(record, 0)}: step {text_of_s(pinned.step_time_s)} with them, {without}")
    for pin in pinned.pins:
        alone = f", {text_of_s(pin.alone_s)} on this mesh with this pin alone" if pin.alone_s is not None else ""
        out.long_line(f"  {pin.pattern}: {pin.spec}, {pin.count} {pin.of}{alone}")


def _pipeline_line(record: PlanRecord, pipeline: PipelineRecord) -> str:
    sizes = device_groups(record)
    chunks = f", {pipeline.chunks} on each of {len(sizes)} groups of devices" if pipeline.chunks > 1 else ""
    return (
        f"Plan of {record.step} on {record.cluster.name}: {sum(sizes.values())} device(s), "
        f"{len(pipeline.stages)} stage(s){chunks}, schedule {pipeline.schedule}, "
        f"{pipeline.num_microbatches} micro-batch(es)"
        + ("" if pipeline.keeps_copies else ", copies of the state made in each anew")
        + "".join(f"; one program: {' + '.join(names)}" for names in pipeline.joined)
    )


def _stages_table(record: PlanRecord, pipeline: PipelineRecord) -> Table:
    rows = Table(
        "stage", "layers", "devices", "mesh", "recompute", "forward", "backward", "once a step", "in flight", "peak"
    )
    for number, stage in enumerate(pipeline.stages):
        mesh = stage_mesh(record, number)
        names = [stage.layers[0], stage.layers[-1]] if len(stage.layers) > 1 else list(stage.layers)
        last = stage.first_device + mesh.num_devices - 1
        policies = pipeline.recomputed[stage.first_layer : stage.first_layer + len(stage.layers)]
        backward = text_of_s(stage.backward_s) + (f" + {text_of_s(stage.weight_s)}" if stage.weight_s else "")
        cells = (
            str(number),
            f"{len(stage.layers)}: {' .. '.join(names)}",
            f"{stage.first_device}-{last}" if last > stage.first_device else str(last),
            str(mesh),
            ", ".join(dict.fromkeys(map(name_of, policies))),
            text_of_s(stage.forward_s),
            backward,
            text_of_s(stage.once_s),
            str(stage.in_flight),
            text_of_bytes(stage.peak_bytes),
        )
        rows.add_row(*map(escape, cells))
    return rows


def _values_table(record: PlanRecord) -> Table:
    rows = Table("arguments", "kind", "n", "shape", "layout", "per device", title=None)

    def key_of(v: PlannedValue) -> tuple:
        return folded(v.path), v.kind, v.shape, v.layout, v.stage, v.stages, v.in_host

    for (_, kind, shape, layout, stage, stages, _), values in grouped(record.arguments, key_of).items():
        mesh = stage_mesh(record, stage)
        name = values[0].path if len(values) == 1 else folded(values[0].path)
        local = sum(v.nbytes for v in values) // (layout.shards(mesh) * max(len(stages), 1))
        shape_text = "x".join(map(str, shape)) or "scalar"
        lies = place(record, values)
        row = (name, kind, str(len(values)), f"{shape_text} {values[0].dtype}", lies, text_of_bytes(local))
        rows.add_row(*map(escape, row))
    return rows


def _modules_table(record: PlanRecord) -> Table:
    """Modules, those that are alike as one; numbers are means over the devices."""
    rows_shown = Table(
        "module", "matrix products: operands -> result", "sends (per device and step)", "compute", "send", "keeps"
    )
    shown = (row for row in record.modules if row.collectives or row.splits)
    for (pattern, splits), rows in grouped(shown, lambda row: (folded(row.module), row.splits)).items():
        cost = cost_of(record, rows)
        lines = [
            f"{c.count_text} {c.kind} {axes_text(c.axes)} {text_of_bytes(c.sent_bytes)}{c.where_text}"
            for c in collective_rows(record, rows, by_axes)
        ]
        name = (rows[0].module or NO_MODULE) if len(rows) == 1 else f"{pattern or NO_MODULE} ({len(rows)}x)"
        cells = (
            name,
            "\n".join(splits) or "-",
            "\n".join(lines) or "nothing",
            text_of_s(cost.compute_s),
            text_of_s(cost.send_s),
            text_of_bytes(sum(stage_share(record, row.stage) * row.saved_bytes for row in rows)),
        )
        rows_shown.add_row(*map(escape, cells))
    return rows_shown


def _collectives_table(record: PlanRecord) -> Table:
    rows = Table("collective", "over", "per step", "sent per device", "time")
    for c in collective_rows(record, record.modules, by_axes):
        count = f"{c.count_text}{c.where_text}"
        rows.add_row(c.kind, axes_text(c.axes), count, text_of_bytes(c.sent_bytes), text_of_s(c.time_s))
    return rows


def _memory_table(record: PlanRecord) -> Table:
    """The memory of each group of devices at its peak; kinds that no group holds have no column."""
    uses = record.predicted.memory
    kinds = [kind for kind in MemoryKind if any(kind in use.at_peak for use in uses)]
    rows = Table("a device of", *(kind.value for kind in kinds), "peak")
    for use, peak_bytes, name in zip(uses, record.predicted.peak_bytes, group_names(record), strict=True):
        rows.add_row(name, *(text_of_bytes(use.at_peak.get(kind, 0)) for kind in kinds), text_of_bytes(peak_bytes))
    return rows


def _largest_table(record: PlanRecord) -> Table:
    """The largest holders at the highest peak."""
    at = fullest(record).number
    rows = Table(f"largest at the peak of {group_names(record)[at]}", "kind", "n", "bytes")
    for holder in record.predicted.memory[at].largest[:LARGEST_SHOWN]:
        rows.add_row(escape(holder.name), holder.kind.value, str(holder.count), text_of_bytes(holder.nbytes))
    return rows


def in_short(record: PlanRecord) -> str:
    """A plan in a few words: those of its candidate."""
    if record.pipeline is not None:
        pipeline = record.pipeline
        default = f"{pipeline.num_microbatches} micro-batches, {len(pipeline.stages)} stages"
        return next((c.text for c in record.own), default)
    return ", ".join([f"mesh {stage_mesh(record, 0)}", *[c.name for c in record.own if c.name][:1]])
