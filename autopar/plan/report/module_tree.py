"""The modules of a step as a tree, layers that are alike as one, with what each costs on one device."""

from __future__ import annotations

import dataclasses

from autopar.plan import collective_rows, summary
from autopar.plan.collective_rows import CollectiveRow
from autopar.plan.report.layout_tokens import tokens_of
from autopar.plan.schema import ModuleRow, PlanRecord

NO_MODULE = "(no module)"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """One of the modules of a row, in one stage."""

    name: str
    stage: int
    compute_s: float
    send_s: float
    exposed_s: float | None
    saved_bytes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModuleNode:
    """A module, or layers that are alike, in the order of a walk through the tree.

    Attributes:
        path: The name without numbers, unique among the rows.
        name: Its last part.
        depth: Modules around it.
        has_children: Whether the next row is inside of it.
        compute_s, send_s: Of it and of all inside, on one device in a step; of a pipeline, means over the devices.
        exposed_s: Of the sending, what the step waits for; None where that is not recorded, and all of it counts.
        share: Of the computing and waiting of the whole step.
        own_s: Its own seconds, without those of the modules inside.
        saved_bytes: What its backward pass reads, of one micro-batch, with all inside.
        splits: Layouts of its matrix products: one list, or several where layers or stages differ.
        axes: The mesh axes that split them.
        collectives: Its own.
        instances: The modules that the row stands for.
    """

    path: str
    name: str
    depth: int
    has_children: bool
    compute_s: float
    send_s: float
    exposed_s: float | None
    share: float
    own_s: float
    saved_bytes: float
    splits: tuple[tuple[str, ...], ...]
    axes: tuple[str, ...]
    collectives: tuple[CollectiveRow, ...]
    instances: tuple[Instance, ...]

    @property
    def waited_s(self) -> float:
        return self.send_s if self.exposed_s is None else self.exposed_s


@dataclasses.dataclass(slots=True, kw_only=True)
class _Building:
    """A node while its rows are added."""

    children: dict[str, _Building] = dataclasses.field(default_factory=dict)
    rows: list[ModuleRow] = dataclasses.field(default_factory=list)


def module_tree(record: PlanRecord) -> tuple[ModuleNode, ...]:
    """The modules in the order of the step, each followed by those inside of it."""
    root = _Building()
    for row in record.modules:
        at = root
        for part in (summary.folded(row.module) or NO_MODULE).split("/"):
            at = at.children.setdefault(part, _Building())
        at.rows.append(row)
    total_s = sum(_seconds(record, row) for row in record.modules)
    return tuple(_nodes(record, root, (), total_s))


def _nodes(record: PlanRecord, building: _Building, path: tuple[str, ...], total_s: float) -> list[ModuleNode]:
    out: list[ModuleNode] = []
    for name, child in building.children.items():
        inside = _nodes(record, child, (*path, name), total_s)
        out += [_node(record, child, (*path, name), total_s), *inside]
    return out


def _rows_within(building: _Building) -> list[ModuleRow]:
    return [*building.rows, *(row for child in building.children.values() for row in _rows_within(child))]


def _node(record: PlanRecord, building: _Building, path: tuple[str, ...], total_s: float) -> ModuleNode:
    within = _rows_within(building)
    compute_s = sum(summary.stage_share(record, row.stage) * row.compute_time_s for row in within)
    send_s = sum(summary.stage_share(record, row.stage) * row.send_s for row in within)
    exposed_s = summary.exposed_s(record, within)
    splits = tuple(dict.fromkeys(row.splits for row in building.rows if row.splits))
    pieces = (token.axis for split in splits for line in split for token in tokens_of(line))
    return ModuleNode(
        path="/".join(path),
        name=path[-1],
        depth=len(path) - 1,
        has_children=bool(building.children),
        compute_s=compute_s,
        send_s=send_s,
        exposed_s=exposed_s,
        share=(compute_s + (send_s if exposed_s is None else exposed_s)) / total_s if total_s else 0.0,
        own_s=sum(_seconds(record, row) for row in building.rows),
        saved_bytes=sum(row.saved_bytes for row in within),
        splits=splits,
        axes=tuple(sorted({axis for axis in pieces if axis})),
        collectives=collective_rows.collectives_of(record, building.rows),
        instances=tuple(
            Instance(
                name=row.module or NO_MODULE,
                stage=row.stage,
                compute_s=row.compute_time_s,
                send_s=row.send_s,
                exposed_s=row.exposed_s,
                saved_bytes=row.saved_bytes,
            )
            for row in building.rows
        ),
    )


def _seconds(record: PlanRecord, row: ModuleRow) -> float:
    return summary.stage_share(record, row.stage) * (row.compute_time_s + _waited_s(row))


def _waited_s(row: ModuleRow) -> float:
    return row.send_s if row.exposed_s is None else row.exposed_s
