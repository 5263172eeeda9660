"""The result of a calibration: constants, their timings, the quality of the fit; its text and its file.

A file is named by what the constants depend on (`MeasuredOn`), so that each kind of device, number of devices and
version of jax has its own.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.markup import escape
from rich.table import Table

from autopar.common.files import JsonFaultError, decoded, default_directory, leave_aside, read_whole, write_whole
from autopar.common.text import PLAIN, TextConsole, TextFormat, text_of_bytes, text_of_s
from autopar.hardware.collective_cost import Link, time_s
from autopar.hardware.fit import Timing
from autopar.hardware.kinds import DeviceKind

_FORMAT_VERSION = 9
# In a file: no line is broken.
OWN_COLUMNS = 1000


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FitQuality:
    """How well measured constants give back the timings that they were fitted to.

    Attributes:
        what: `links inside a host`, `float32 products`.
        constants: The constants, as text.
        points: Number of timings.
        median_error: Median of |predicted / measured - 1|.
        worst: The timing furthest off, as text.
    """

    what: str
    constants: str
    points: int
    median_error: float
    worst: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredOn:
    """What measured constants hold for. `cores`: of the host, where devices share them (CPU), else 0."""

    platform: str
    device_kind: str
    num_hosts: int
    devices_per_host: int
    jax_version: str
    cores: int

    @property
    def file_name(self) -> str:
        kind = re.sub(r"[^A-Za-z0-9]+", "-", self.device_kind).strip("-")
        on_cores = f"-{self.cores}cores" if self.cores else ""
        shape = f"{self.num_hosts}x{self.devices_per_host}"
        return f"measured-{self.platform}-{kind}{on_cores}-{shape}-jax{self.jax_version}.json"

    def covers(self, other: MeasuredOn) -> bool:
        """Whether constants of these devices hold for `other`.

        CPU devices share their host, so that what one of 8 reaches says nothing of one of 4. Other devices have cores
        and memory of their own: what was measured over many holds for fewer of them.
        """
        if self.cores or other.cores:
            return self == other
        enough = self.num_hosts >= other.num_hosts and self.devices_per_host >= other.devices_per_host
        return (
            enough
            and dataclasses.replace(self, num_hosts=other.num_hosts, devices_per_host=other.devices_per_host) == other
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Constants of devices and links as measured, and what they were fitted to.

    Attributes:
        on: The devices.
        device: With measured rates.
        inside_host, between_hosts: Links; those that could not be measured (one device, one host) as the tables say.
        timings: Collectives over devices of one host.
        timings_between: Collectives over one device of each host.
        fits: How good the constants are.
        conditions: When, and how busy the machine was.
    """

    on: MeasuredOn
    device: DeviceKind
    inside_host: Link
    between_hosts: Link
    timings: tuple[Timing, ...]
    timings_between: tuple[Timing, ...]
    fits: tuple[FitQuality, ...]
    conditions: str

    def save(self, directory: Path | None = None) -> Path | None:
        """Writes it to where `saved_for` looks; None where that cannot be written."""
        stored = _Stored(format_version=_FORMAT_VERSION, checksum=_checksum(self), measurement=self)
        directory = directory or default_directory()
        if directory is None:
            return None
        path = directory / self.on.file_name
        data = msgspec.json.format(msgspec.json.encode(stored), indent=2) + b"\n"
        return path if write_whole(path, data) else None

    def text(self, text_format: TextFormat = PLAIN) -> str:
        """The constants and the timings as tables."""
        console = TextConsole(OWN_COLUMNS, text_format)
        count = self.on.num_hosts * self.on.devices_per_host
        hosts = f"{self.on.num_hosts} hosts of {self.on.devices_per_host}" if self.on.num_hosts > 1 else "one host"
        measured = f"Measured {count} x {self.device.name} ({hosts}), jax {self.on.jax_version}; {self.conditions}"
        console.long_line(f"{measured}\n")
        columns = ("what", "constants", "timings", "median error", "furthest off")
        rows = [(f.what, f.constants, str(f.points), f"{f.median_error:.0%}", f.worst) for f in self.fits]
        console.table(_table([columns, *rows]))
        for title, timings, link in (
            ("Inside a host", self.timings, self.inside_host),
            ("Between hosts", self.timings_between, self.between_hosts),
        ):
            if timings:
                console.long_line(f"\n{title}: measured time, and what the constants give as a multiple of it\n")
                console.table(_table(_pivot(timings, link)))
        return console.text()

    __str__ = text


def saved_for(on: MeasuredOn) -> Measurement | None:
    """The saved measurement that holds for these devices, that of the fewest devices if several do.

    A file that is damaged or of another format counts as absent, with a warning.
    """
    folder = default_directory()
    if folder is None:
        return None
    pattern = re.sub(r"-\d+x\d+-jax", "-*x*-jax", on.file_name)
    try:
        paths = sorted(folder.glob(pattern))
    except OSError as error:
        leave_aside(folder, f"cannot be read ({error.strerror})")
        return None
    found = [m for m in map(_read, paths) if m is not None and m.on.covers(on)]
    return min(found, key=lambda m: m.on.num_hosts * m.on.devices_per_host, default=None)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Stored:
    """`checksum` is missing in files that were written before there was one."""

    format_version: int
    checksum: str | None = None
    measurement: Measurement


def _read(path: Path) -> Measurement | None:
    data = read_whole(path)
    if data is None:
        return None
    try:
        stored = decoded(data, _Stored, "a measurement")
    except JsonFaultError as error:
        leave_aside(path, str(error))
        return None
    if stored.format_version != _FORMAT_VERSION:
        leave_aside(path, f"format version {stored.format_version}, not {_FORMAT_VERSION}")
        return None
    if stored.checksum is not None and stored.checksum != _checksum(stored.measurement):
        leave_aside(path, "changed since it was measured (checksum)")
        return None
    return stored.measurement


def _checksum(measurement: Measurement) -> str:
    as_read = msgspec.json.decode(msgspec.json.encode(measurement), type=Measurement)  # 1 and 1.0 are written apart
    return hashlib.sha256(msgspec.json.encode(as_read)).hexdigest()


def _pivot(timings: Sequence[Timing], link: Link) -> list[tuple[str, ...]]:
    """A row for each kind and number of bytes handled, a column for each number of devices."""
    counts = sorted({t.n for t in timings})
    rows: dict[tuple[str, int], dict[int, str]] = {}
    for t in timings:
        ratio = float(time_s(t.kind, t.result_bytes, t.n, link)) / t.seconds
        handled = int(t.result_bytes * (t.n if t.kind == "reduce-scatter" else 1))
        rows.setdefault((t.kind.value, handled), {})[t.n] = f"{text_of_s(t.seconds)} ({ratio:.2f})"
    header = ("collective", "array", *(f"{n} devices" for n in counts))
    return [header, *((k, text_of_bytes(b), *(row.get(n, "") for n in counts)) for (k, b), row in rows.items())]


def _table(rows: Sequence[Sequence[str]]) -> Table:
    """The first row over the others."""
    table = Table(*map(escape, rows[0]), box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="")
    for row in rows[1:]:
        table.add_row(*map(escape, row))
    return table
