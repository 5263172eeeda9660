"""orbax without its words: it says a lot, and absl puts a handler on the root logger with the first one."""

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
    return orbax.checkpoint


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
