"""The cache directory: plans, rules and measurements on disk. The one module that reads the environment for it.

What is kept saves time and is never needed: a file that cannot be read or written, or whose content is not what was
written, is named once in the log of this process, left aside, and what it held is made anew.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import stat
import uuid
from pathlib import Path

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
