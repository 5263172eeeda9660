"""Files: those of the cache directory, and JSON that people may have edited.

The cache has plans, rules and measurements; this is the one module that reads the environment for it. What is kept
saves time and is never needed: a file that cannot be read or written, or whose content is not what was written, is
named once in the log of this process, left aside, and what it held is made anew.

Errors of a JSON file name a fault and its place, such as `$.plan.pipeline.stages[1].axis_sizes[0]`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import re
import stat
import uuid
from pathlib import Path
from typing import TypeVar

import msgspec

from autopar.errors import AutoparError

logger = logging.getLogger("autopar")


def default_directory() -> Path | None:
    """`$AUTOPAR_CACHE_DIR`, else `autopar` in the user's cache directory; None for a user without a home directory."""
    if named := os.environ.get("AUTOPAR_CACHE_DIR"):
        return cache_directory(named)
    base = os.environ.get("XDG_CACHE_HOME", "")
    # Relative paths are invalid there and count as unset (XDG Base Directory Specification).
    home = cache_directory(base if os.path.isabs(base) else "~/.cache")
    return None if home is None else home / "autopar"


def cache_directory(path: str | Path) -> Path | None:
    """A directory with `~` written out; None, with a warning, where there is no home directory to write for it."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        warn_once(
            f"no cache: {path} needs a home directory, and this user has none; plans and sharding rules are made anew "
            "in every run (set AUTOPAR_CACHE_DIR, or HOME)"
        )
        return None


def read_whole(path: Path) -> bytes | None:
    """The content of a kept file; None where there is none, or, with a warning, one that cannot be read."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # reading a pipe would wait for ever
            leave_aside(path, "not a file")
            return None
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None  # writing it says what is wrong with the directory
    except (OSError, ValueError) as error:
        leave_aside(path, f"cannot be read ({_why(error)})")
        return None


def write_whole(path: Path, data: bytes) -> bool:
    """Writes a file whole or not at all, also beside other writers and readers of it, as readable as other new files
    are. Whether it was written; where not, a warning says so once for the directory.
    """
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(partial, "xb") as file:
                file.write(data)
            os.replace(partial, path)
        except BaseException:
            with contextlib.suppress(OSError):
                partial.unlink()
            raise
    except (OSError, ValueError) as error:
        warn_once(
            f"cache {path.parent}: cannot be written ({_why(error)}); what is missing there is made anew in every run"
        )
        return False
    return True


def leave_aside(path: Path, why: str) -> None:
    """Says, once, that a kept file counts as absent."""
    warn_once(f"cache {path}: {why}; left aside, what it held is made anew")


@functools.cache
def warn_once(message: str) -> None:
    """Logs a warning, the same one once in a process."""
    logger.warning("%s", message)


def _why(error: Exception) -> str:
    return (isinstance(error, OSError) and error.strerror) or str(error)


_T = TypeVar("_T")
_PLACE = re.compile(r"^(?P<what>.*) - at `(?:key` in `)?(?P<place>\$[^`]*)`$", re.DOTALL)
_EXPECTED = re.compile(r"^Expected (?P<expected>.*), got (?P<got>.*)$", re.DOTALL)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What is wrong in a file, and where in it. The place of text that is no JSON is the whole, `$`."""

    place: str
    expected: str
    got: str


class JsonFaultError(Exception):
    """What ends `decoded`; who reads the file says which file it is."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        super().__init__(f"{fault.place}: expected {fault.expected}, got {fault.got}")


def decoded(data: bytes, kind: type[_T], expected_kind: str, root: str = "$") -> _T:
    """JSON as a value of a type; `expected_kind` names the type in errors; `root` is the place of the data in its file.

    Raises: JsonFaultError.
    """
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        raise JsonFaultError(_invalid(error, root)) from error
    except msgspec.DecodeError as error:
        got = f"no JSON ({_lowered(str(error))})" if data else "an empty file"
        raise JsonFaultError(Fault(place=root, expected=expected_kind, got=got)) from error
    except UnicodeDecodeError as error:
        got = f"no JSON (byte {error.start} is not UTF-8)"
        raise JsonFaultError(Fault(place=root, expected=expected_kind, got=got)) from error
    except RecursionError as error:
        raise JsonFaultError(
            Fault(place=root, expected=expected_kind, got="lists in lists, too deep to be read")
        ) from error


def _invalid(error: msgspec.ValidationError, root: str) -> Fault:
    text, place = str(error), "$"
    if match := _PLACE.match(text):
        text, place = match["what"], match["place"]
    place = root + place[1:]
    cause = error.__cause__
    if isinstance(cause, AutoparError):  # a class refuses its fields
        return Fault(place=place, expected=cause.expected, got=cause.got)
    if match := _EXPECTED.match(text):
        return Fault(place=place, expected=match["expected"], got=match["got"])
    if missing := re.match(r"Object missing required field `(.*)`", text):
        return Fault(place=f"{place}.{missing[1]}", expected="a value", got="none: the field is missing")
    return Fault(place=place, expected="a value of the format", got=_lowered(text))


def _lowered(text: str) -> str:
    """A sentence to stand behind others: not of JSON, which is capital throughout."""
    return text if text[:2].isupper() else text[:1].lower() + text[1:]
