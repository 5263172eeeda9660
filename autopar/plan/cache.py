"""The disk cache of sharding rules and plans."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import msgspec

from autopar.common.files import leave_aside, read_whole, write_whole
from autopar.common.jax_compat import lowering_flags
from autopar.errors import AutoparError
from autopar.ir.graph import Rule
from autopar.ir.rules import RuleBook
from autopar.plan.plan import checksum, decode, encode
from autopar.plan.schema import PlanRecord

# The version of everything that decides what a plan is. Change it when strategies, costs, rules or files change.
SEARCH_VERSION = 138


def plan_key(parts: Sequence[object]) -> str:
    """A file name: a hash of everything that a plan depends on."""
    text = "\n".join(map(repr, (*parts, SEARCH_VERSION, jax.__version__)))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


# The rules that this process has learned, by the name of the file of rules: a few hundred bytes for each distinct
# equation.
_LEARNED: dict[str, dict[str, Rule]] = {}


class DiskCache:
    """Plans and rules under one directory; None keeps nothing. Damaged files count as absent, with a warning."""

    def __init__(self, directory: Path | None) -> None:
        self.directory = directory

    def load_plan(self, key: str, check: Callable[[PlanRecord], None] = lambda record: None) -> PlanRecord | None:
        """The plan that was saved under a key, unless `check` raises an error of autopar's for it."""
        path = self._path(f"plan-{key}.json")
        data = read_whole(path) if path is not None else None
        if path is None or data is None:
            return None
        try:
            record = decode(data, str(path), key)
            check(record)
        except AutoparError as error:
            leave_aside(path, f"expected {error.expected}, got {error.got}")
            return None
        return record

    def save_plan(self, key: str, record: PlanRecord) -> None:
        self._write(f"plan-{key}.json", encode(record, key))

    def load_rules(self) -> RuleBook:
        """The rules that were saved, and what this process has learned beside them."""
        return RuleBook(self._saved_rules(), _LEARNED.setdefault(_rules_name(), {}))

    def _saved_rules(self) -> dict[str, Rule]:
        path = self._path(_rules_name())
        data = read_whole(path) if path is not None else None
        if path is None or data is None:
            return {}
        try:
            file = msgspec.json.decode(data, type=_Rules)
            if checksum(bytes(file.rules)) != file.checksum:
                leave_aside(path, "expected rules as they were saved, got changed ones (checksum)")
                return {}
            return msgspec.json.decode(file.rules, type=dict[str, Rule])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            leave_aside(path, f"expected sharding rules, got none ({error})")
            return {}

    def save_rules(self, rules: RuleBook) -> None:
        """Writes the rules if any was asked for since they were loaded."""
        if rules.asked:
            body = msgspec.json.encode(rules.known)
            self._write(_rules_name(), msgspec.json.encode(_Rules(checksum=checksum(body), rules=msgspec.Raw(body))))

    def _path(self, name: str) -> Path | None:
        return None if self.directory is None else self.directory / name

    def _write(self, name: str, data: bytes) -> None:
        path = self._path(name)
        if path is not None:
            write_whole(path, data)


class _Rules(msgspec.Struct):
    checksum: str
    rules: msgspec.Raw


def _rules_name() -> str:
    """Rules are read from how equations are lowered, which follows jax's configuration."""
    flags = hashlib.sha256(repr(lowering_flags()).encode()).hexdigest()[:8]
    return f"rules-jax{jax.__version__}-{SEARCH_VERSION}-{flags}.json"
