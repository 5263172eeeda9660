"""What is kept on disk between runs: sharding rules and plans."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import jax
import msgspec

from autopar.errors import PlanFormatError
from autopar.graph import Rule
from autopar.record import PlanRecord, decode, encode
from autopar.rules import RuleBook
from autopar.user_cache import write_whole

# The version of everything that decides what a plan is. Change it when strategies, costs or rules change.
SEARCH_VERSION = 30


def plan_key(parts: Sequence[object]) -> str:
    """A file name for what a plan depends on."""
    text = "\n".join(map(repr, (*parts, SEARCH_VERSION, jax.__version__, _solver_version())))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _solver_version() -> str:
    return metadata.version("ortools")


class DiskCache:
    """Plans and rules under one directory; None keeps nothing. A damaged file counts as absent."""

    def __init__(self, directory: Path | None) -> None:
        self.directory = directory

    def load_plan(self, key: str) -> PlanRecord | None:
        path = self._path(f"plan-{key}.json")
        if path is None or not path.exists():
            return None
        try:
            return decode(path.read_bytes(), str(path))
        except PlanFormatError:
            return None

    def save_plan(self, key: str, record: PlanRecord) -> None:
        self._write(f"plan-{key}.json", encode(record))

    def load_rules(self) -> RuleBook:
        path = self._path(f"rules-jax{jax.__version__}-{SEARCH_VERSION}.json")
        if path is None or not path.exists():
            return RuleBook()
        try:
            return RuleBook(msgspec.json.decode(path.read_bytes(), type=dict[str, Rule]))
        except msgspec.DecodeError:
            return RuleBook()

    def save_rules(self, rules: RuleBook) -> None:
        """Writes the rules if any was asked for since they were loaded."""
        if rules.asked:
            self._write(f"rules-jax{jax.__version__}-{SEARCH_VERSION}.json", msgspec.json.encode(rules.known))

    def _path(self, name: str) -> Path | None:
        return None if self.directory is None else self.directory / name

    def _write(self, name: str, data: bytes) -> None:
        path = self._path(name)
        if path is not None:
            write_whole(path, data)
