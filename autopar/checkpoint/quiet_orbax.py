"""orbax without its words, and without what it leaves behind.

It says a lot, and absl puts a handler on the root logger with the first word. Twice for each checkpoint it asks
Tensorstore how many bytes were written, as Python objects, of which Tensorstore's Python package releases none (0.1.86:
about 130 lists and dictionaries each time).
"""

from __future__ import annotations

import logging
import sys
from types import ModuleType
from typing import Any


def quiet_orbax() -> Any:
    """`orbax.checkpoint`, imported. Raises: ModuleNotFoundError."""
    handlers = list(logging.root.handlers)
    import orbax.checkpoint

    for handler in [handler for handler in logging.root.handlers if handler not in handlers]:
        logging.root.removeHandler(handler)
    for module in [module for name, module in sys.modules.copy().items() if name.startswith("orbax.")]:
        spoken = getattr(module, "logging", None)
        if isinstance(spoken, ModuleType) and spoken.__name__ == "absl.logging":
            vars(module)["logging"] = _Quiet(spoken)
    counting = sys.modules.get("orbax.checkpoint._src.serialization.tensorstore_utils")
    if hasattr(counting, _COUNTS):
        vars(counting)[_COUNTS] = _raw_bytes
    return orbax.checkpoint


_COUNTS = "get_tensorstore_raw_bytes"


def _raw_bytes(direction: Any = None) -> int:
    """The bytes that Tensorstore wrote or read so far, from its metrics as lines of text."""
    import tensorstore

    suffix = "_bytes_read" if getattr(direction, "value", "write") == "read" else "_bytes_written"
    lines = tensorstore.experimental_collect_prometheus_format_metrics("/tensorstore/kvstore/")
    rows = (line.split() for line in lines if not line.startswith("#"))
    return sum(int(float(row[1])) for row in rows if row[0].endswith(suffix))


class _Quiet:
    """absl's logging as orbax has it from now on: errors go to the logger `orbax`, and nothing else goes anywhere."""

    def __init__(self, absl_logging: ModuleType) -> None:
        self._absl_logging = absl_logging

    def __getattr__(self, name: str) -> Any:
        if name in ("error", "exception", "critical"):
            return getattr(logging.getLogger("orbax"), name)
        found = getattr(self._absl_logging, name)
        return _nothing if callable(found) and name.islower() else found


def _nothing(*_: Any, **__: Any) -> bool:
    return False
