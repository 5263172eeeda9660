"""The cluster as a drawing: hosts with their devices, coloured by stage, and the load of the links between them."""

from __future__ import annotations

import dataclasses
import math

from autopar.common.trace_events import LINKS, Timeline
from autopar.hardware import mesh_links
from autopar.ir.layout import axes_text
from autopar.plan import summary
from autopar.plan.schema import PlanRecord

INSIDE, BETWEEN = "in one host", "across hosts"
BETWEEN_STAGES = "what stages send each other"
# Clusters with more devices are drawn by host.
MOST_DEVICES_DRAWN = 2048
# In units of the drawing: a device, what is between devices and hosts, the strip of a host's link.
DEVICE, GAP, STRIP = 10, 3, 4
# A drawing is about this many times as wide as high.
ASPECT = 2.5
# Of the busiest connection of stages: less load is not drawn.
LEAST_DRAWN = 0.02


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LinkLoad:
    """What a step sends over a link, by one device: `busy` is the part of the step in which it sends."""

    where: str
    what: str
    sent_bytes: float
    time_s: float
    busy: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeviceBox:
    """A device, or a whole host; `stages` are those that it runs, none where the plan leaves it idle."""

    x: float
    y: float
    width: float
    height: float
    name: str
    stages: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HostBox:
    """A host. `busy`: the part of the step in which the link inside of it sends for its collectives."""

    x: float
    y: float
    width: float
    height: float
    name: str
    busy: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """What the devices of two stages send each other. `share` is of the busiest such connection."""

    x1: float
    y1: float
    x2: float
    y2: float
    share: float
    name: str
    nbytes: int
    busy: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """Boxes and lines in a coordinate system from 0 to `width` and `height`."""

    width: float
    height: float
    hosts: tuple[HostBox, ...]
    devices: tuple[DeviceBox, ...]
    wires: tuple[Wire, ...]
    num_groups: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Grid:
    """Where hosts and their devices stand."""

    columns: int
    host_columns: int
    per_host: int

    @property
    def host_width(self) -> float:
        return self.host_columns * (DEVICE + GAP) + GAP

    @property
    def host_height(self) -> float:
        return -(-self.per_host // self.host_columns) * (DEVICE + GAP) + GAP + STRIP

    def host(self, number: int) -> tuple[float, float]:
        row, column = divmod(number, self.columns)
        return column * (self.host_width + GAP) + GAP, row * (self.host_height + GAP) + GAP

    def device(self, number: int) -> tuple[float, float]:
        host, place = divmod(number, self.per_host)
        x, y = self.host(host)
        row, column = divmod(place, self.host_columns)
        return x + GAP + column * (DEVICE + GAP), y + GAP + row * (DEVICE + GAP)


def stages_of_devices(record: PlanRecord) -> dict[int, tuple[int, ...]]:
    """The stages that each device runs, by its number; devices that the plan leaves idle have none."""
    out: dict[int, tuple[int, ...]] = {}
    for stage in range(summary.num_stages(record)):
        first = summary.first_device(record, stage)
        for device in range(first, first + summary.stage_mesh(record, stage).num_devices):
            out[device] = (*out.get(device, ()), stage)
    return out


def drawing_of(record: PlanRecord) -> Drawing:
    """The cluster of a plan, with the stages on it."""
    cluster, runs = record.cluster, stages_of_devices(record)
    per_host = cluster.devices_per_host
    host_columns = max(1, math.ceil(math.sqrt(per_host)))
    if per_host > 2 and per_host % 4 == 0:
        host_columns = 4 * math.ceil(math.sqrt(per_host / 8))
    grid = _Grid(columns=1, host_columns=host_columns, per_host=per_host)
    columns = max(1, round(math.sqrt(cluster.num_hosts * ASPECT * grid.host_height / grid.host_width)))
    grid = dataclasses.replace(grid, columns=min(columns, cluster.num_hosts))
    inside = sum(load.busy for load in link_loads(record) if load.where == INSIDE and load.what != BETWEEN_STAGES)
    hosts = []
    for number in range(cluster.num_hosts):
        x, y = grid.host(number)
        used = any(device in runs for device in range(number * per_host, (number + 1) * per_host))
        hosts.append(
            HostBox(
                x=x,
                y=y,
                width=grid.host_width,
                height=grid.host_height,
                name=f"host {number}",
                busy=min(inside, 1.0) if used else 0.0,
            )
        )
    rows = -(-cluster.num_hosts // grid.columns)
    return Drawing(
        width=grid.columns * (grid.host_width + GAP) + GAP,
        height=rows * (grid.host_height + GAP) + GAP,
        hosts=tuple(hosts),
        devices=_device_boxes(record, grid, runs),
        wires=_wires(record, grid),
        num_groups=len(summary.device_groups(record)),
    )


def _device_boxes(record: PlanRecord, grid: _Grid, runs: dict[int, tuple[int, ...]]) -> tuple[DeviceBox, ...]:
    cluster, boxes = record.cluster, []
    if cluster.num_devices <= MOST_DEVICES_DRAWN:
        for device in range(cluster.num_devices):
            x, y = grid.device(device)
            stages = runs.get(device, ())
            boxes.append(DeviceBox(x=x, y=y, width=DEVICE, height=DEVICE, name=f"device {device}", stages=stages))
        return tuple(boxes)
    for host in range(cluster.num_hosts):
        x, y = grid.host(host)
        devices = range(host * grid.per_host, (host + 1) * grid.per_host)
        stages = tuple(dict.fromkeys(stage for device in devices for stage in runs.get(device, ())))
        size = grid.host_width - 2 * GAP, grid.host_height - 2 * GAP - STRIP
        boxes.append(DeviceBox(x=x + GAP, y=y + GAP, width=size[0], height=size[1], name=f"host {host}", stages=stages))
    return tuple(boxes)


def link_loads(record: PlanRecord) -> tuple[LinkLoad, ...]:
    """What the collectives of each mesh axis send in a step, over which link, and what stages send each other.

    Of a pipeline, all are means over all devices.
    """
    step_s = record.predicted.step_time_s
    loads: dict[tuple[str, str], list[float]] = {}
    for row in record.modules:
        mesh = summary.stage_mesh(record, row.stage)
        share = summary.stage_share(record, row.stage)
        for c in row.collectives:
            axes = tuple(mesh.axis_names.index(name) for name in c.axes)
            spread = mesh_links.spread(mesh.axis_sizes, axes, record.cluster.domain_devices)
            where = INSIDE if spread.hosts == 1 else BETWEEN
            total = loads.setdefault((where, f"collectives over {axes_text(c.axes)}"), [0.0, 0.0])
            total[0] += share * c.sent_bytes
            total[1] += share * c.time_s
    for where, (sent, s) in _sent_between_stages(record).items():
        loads[where, BETWEEN_STAGES] = [sent, s]
    rows = [
        LinkLoad(where=where, what=what, sent_bytes=sent, time_s=s, busy=s / step_s if step_s else 0.0)
        for (where, what), (sent, s) in loads.items()
    ]
    return tuple(sorted(rows, key=lambda row: -row.time_s))


def _sent_between_stages(record: PlanRecord) -> dict[str, tuple[float, float]]:
    """(bytes, seconds) that a device sends to those of other stages, by where they go: the mean over all devices.

    A transfer counts the bytes of one device of a group, all of which send theirs at once.
    """
    if record.pipeline is None:
        return {}
    groups, domain = sorted(summary.device_groups(record).items()), record.cluster.domain_devices
    found: dict[str, tuple[float, float]] = {}
    for row, (nbytes, seconds) in _sent_over_links(summary.timeline_of(record)).items():
        ends = _ends(record.pipeline.timeline.links[row], len(groups))
        if ends is None:
            continue
        (first, devices), (other, others) = groups[ends[0]], groups[ends[1]]
        hosts = {device // domain for device in (first, first + devices - 1, other, other + others - 1)}
        where, share = INSIDE if len(hosts) == 1 else BETWEEN, devices / summary.num_devices(record)
        before = found.get(where, (0.0, 0.0))
        found[where] = before[0] + share * nbytes, before[1] + share * seconds
    return found


def _sent_over_links(timeline: Timeline) -> dict[int, tuple[float, float]]:
    """(bytes, seconds) of the sends over each link of a timeline."""
    sent: dict[int, tuple[float, float]] = {}
    for event in timeline.events:
        if event.process == LINKS:
            nbytes, seconds = sent.get(event.row, (0.0, 0.0))
            sent[event.row] = nbytes + event.nbytes, seconds + event.end_s - event.start_s
    return sent


def _wires(record: PlanRecord, grid: _Grid) -> tuple[Wire, ...]:
    """The sends between the groups of devices of a pipeline, from its timeline."""
    pipeline = record.pipeline
    if pipeline is None:
        return ()
    step_s, timeline = record.predicted.step_time_s, summary.timeline_of(record)
    sent = _sent_over_links(timeline)
    most = max((nbytes for nbytes, _ in sent.values()), default=0.0)
    firsts = sorted(summary.device_groups(record).items())
    centres = [_centre(grid, first, devices) for first, devices in firsts]
    wires = []
    for row, (nbytes, seconds) in sent.items():
        ends = _ends(pipeline.timeline.links[row], len(centres))
        if ends is not None and most and nbytes >= LEAST_DRAWN * most:
            (x1, y1), (x2, y2) = centres[ends[0]], centres[ends[1]]
            busy = seconds / step_s if step_s else 0.0
            name = timeline.links[row]
            wires.append(
                Wire(x1=x1, y1=y1, x2=x2, y2=y2, share=nbytes / most, name=name, nbytes=int(nbytes), busy=busy)
            )
    return tuple(wires)


def _ends(name: str, groups: int) -> tuple[int, int] | None:
    """The groups of `mesh 0 to mesh 3`, as the simulation names what they send each other."""
    one, _, other = name.partition(summary.LINK)
    numbers = [text.rpartition(" ")[2] for text in (one, other)]
    if not all(number.isdigit() and int(number) < groups for number in numbers):
        return None
    return int(numbers[0]), int(numbers[1])


def _centre(grid: _Grid, first: int, devices: int) -> tuple[float, float]:
    places = [grid.device(device) for device in (first, first + devices - 1)]
    return sum(x for x, _ in places) / 2 + DEVICE / 2, sum(y for _, y in places) / 2 + DEVICE / 2
