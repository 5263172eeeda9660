"""What the cache directory holds, and clearing it: `autopar cache`."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Collection
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec
from rich.markup import escape
from rich.table import Table

from autopar.common.text import PLAIN, TextConsole, TextFormat, text_of_bytes
from autopar.errors import InvalidArgumentError

COLUMNS, NAME_COLUMNS = 100, 32


class Kind(StrEnum):
    """The kinds of kept files."""

    PLANS = "plans"
    RULES = "rules"
    MEASUREMENTS = "measurements"


# How the names of files of each kind begin. Other files in the directory are not autopar's: none is told or removed.
BEGINNINGS = {Kind.PLANS: "plan-", Kind.RULES: "rules-", Kind.MEASUREMENTS: "measured-"}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KeptFile:
    """`what` a file is about: of a plan, its step and cluster; else empty. `written`: in local time, ISO 8601."""

    kind: Kind
    path: str
    what: str
    size_bytes: int
    written: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """The files of a cache directory, which is None for a user without one. `removed`: they were there."""

    directory: str | None
    files: tuple[KeptFile, ...]
    removed: bool = False

    def of_kind(self, kind: Kind) -> tuple[KeptFile, ...]:
        """The files of one kind."""
        return tuple(file for file in self.files if file.kind == kind)

    def to_dict(self) -> dict[str, Any]:
        """The files as plain values, as `json.dumps` takes them."""
        rows = [msgspec.to_builtins(file) for file in self.files]
        return {"directory": self.directory, "removed" if self.removed else "files": rows}

    def text(self, text_format: TextFormat = PLAIN) -> str:
        """The files as a table."""
        if self.directory is None:
            return text_format.broken(["No cache: this user has no home directory (set AUTOPAR_CACHE_DIR)"])
        counts = [(kind, self.of_kind(kind)) for kind in Kind]
        told = ", ".join(f"{len(files)} {kind} ({text_of_bytes(_size(files))})" for kind, files in counts if files)
        if not self.files:
            return text_format.broken([f"{self.directory}: nothing {'to remove' if self.removed else 'is kept'}"])
        if self.removed:
            return text_format.broken([f"{self.directory}: removed {told}"])
        table = Table(box=None, pad_edge=False, header_style="")
        table.add_column("kind")
        table.add_column("file", no_wrap=True, max_width=NAME_COLUMNS)
        for name in ("what", "size", "written"):
            table.add_column(name)
        for file in self.files:
            cells = (file.kind, Path(file.path).name, file.what, text_of_bytes(file.size_bytes), file.written)
            table.add_row(*map(escape, cells))
        console = TextConsole(COLUMNS, text_format)
        console.long_line(f"{self.directory}: {told}")
        console.table(table)
        return console.text()

    __str__ = text


def kept_in(directory: Path | None) -> Kept:
    """The files that autopar keeps in a directory, by kind and by age, newest first."""
    if directory is None:
        return Kept(directory=None, files=())
    found = []
    for kind, beginning in BEGINNINGS.items():
        paths = [path for path in directory.glob(f"{beginning}*.json") if path.is_file()]
        for path in sorted(paths, key=lambda path: (-path.stat().st_mtime, path.name)):
            found.append(_kept_file(kind, path))
    return Kept(directory=str(directory), files=tuple(found))


def clear(directory: Path | None, kinds: Collection[Kind]) -> Kept:
    """Removes the files of some kinds, and tells which they were. Raises: InvalidArgumentError for a file that cannot
    be removed, with those before it gone.
    """
    kept = kept_in(directory)
    files = tuple(file for file in kept.files if file.kind in kinds)
    for file in files:
        try:
            Path(file.path).unlink(missing_ok=True)  # another process may have been faster
        except OSError as error:
            raise InvalidArgumentError(
                where="autopar cache clear", expected="a directory whose files can be removed",
                got=f"{file.path}: {error.strerror}", hint="see who owns it, or choose another one: AUTOPAR_CACHE_DIR",
            ) from error  # fmt: skip
    return dataclasses.replace(kept, files=files, removed=True)


class _ClusterName(msgspec.Struct):
    name: str


class _PlanHead(msgspec.Struct):
    step: str
    cluster: _ClusterName


class _PlanFile(msgspec.Struct):
    plan: _PlanHead


def _kept_file(kind: Kind, path: Path) -> KeptFile:
    status = path.stat()
    written = datetime.datetime.fromtimestamp(status.st_mtime).isoformat(" ", "minutes")
    what = _what(path) if kind == Kind.PLANS else ""
    return KeptFile(kind=kind, path=str(path), what=what, size_bytes=status.st_size, written=written)


def _what(path: Path) -> str:
    """What a plan is of. A damaged one, which counts as absent when it is looked for, is said to be that."""
    try:
        head = msgspec.json.decode(path.read_bytes(), type=_PlanFile).plan
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return "cannot be read"
    return f"{head.step} on {head.cluster.name}"


def _size(files: Collection[KeptFile]) -> int:
    return sum(file.size_bytes for file in files)
