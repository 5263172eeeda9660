"""Where autopar keeps what outlives a program: plans, rules, measurements. The one place that reads the environment."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path


def default_directory() -> Path:
    """`$AUTOPAR_CACHE_DIR`, else `autopar` in the user's cache directory."""
    if named := os.environ.get("AUTOPAR_CACHE_DIR"):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "autopar"


def write_whole(path: Path, data: bytes) -> bool:
    """Writes a file whole or not at all; a directory that cannot be written keeps nothing. Whether it was written."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(data)
        os.replace(file.name, path)
        return True
    return False
