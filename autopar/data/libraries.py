"""The library that reads data, imported where it is needed: `import autopar` does without."""

from __future__ import annotations

import importlib
from typing import Any


def grain_library() -> Any:
    """The module `grain`. Raises: ImportError, which says how to install it."""
    try:
        return importlib.import_module("grain")
    except ImportError as error:
        raise ImportError(
            f"autopar.data reads through Grain, which is not here: pip install grain ({error})"
        ) from error
