"""Rows of a benchmark that run in processes of their own and are kept one by one: a run that is cut off goes on.

A row is a JSON object under a name. A row that failed holds `failure`, why in a line, and is run again the next time.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
Rows = dict[str, dict[str, Any]]
_SHOWN_CHARACTERS = 4000  # of what a process that failed has written


def load(path: Path) -> Rows:
    """The kept rows by name; none where there is no file."""
    return json.loads(path.read_text()) if path.exists() else {}


def keep(path: Path, rows: Rows) -> None:
    """Replaces the file as a whole, so that a run that dies meanwhile leaves the old rows or the new ones."""
    path.parent.mkdir(parents=True, exist_ok=True)
    written = path.with_suffix(".new")
    written.write_text(json.dumps(rows, indent=1) + "\n")
    written.replace(path)


def is_done(row: Mapping[str, Any] | None) -> bool:
    return row is not None and not row.get("failure")


def in_fresh_process(
    module: str, arguments: Sequence[str], timeout_s: float, environment: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """What `python -m module arguments` prints as its last line, a JSON object; or {"failure": why it did not}.

    What a process that fails has written to its stderr goes to this one's.
    """
    command = [sys.executable, "-m", module, *arguments]
    given = {**os.environ, **(environment or {})}
    try:
        child = subprocess.run(
            command, cwd=ROOT, env=given, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        return {"failure": f"more than {timeout_s:.0f} s"}
    if child.returncode:
        print(child.stderr[-_SHOWN_CHARACTERS:], file=sys.stderr, flush=True)
        said = [line for line in child.stderr.splitlines() if line and not line.startswith(" ")]
        return {"failure": (said or [f"died with status {child.returncode}"])[-1][:200]}
    return json.loads(child.stdout.splitlines()[-1])
