"""Paths of arguments and modules, as JAX and printed plans write them, and patterns that match them.

A pattern is written in parts ("layers/*/attn/kernel"), matched against the end of a path: `*`, `?` and `[...]` stand
for characters of one part, `**` for any number of parts. A path as a plan prints it is a pattern too:
`state['layers'][*]['kernel']` (arguments in one row), `layer*/mlp (2x)` (modules in one row).
"""

from __future__ import annotations

import fnmatch
import functools
import re
from typing import Any

# The parts of a path as jax writes it: an attribute, a key, an index.
_PART = re.compile(r"\.(\w+)|\['([^']*)'\]|\[\"([^\"]*)\"\]|\[<flat index (\d+)>\]|\[([^\]]*)\]|^([^.\[]+)")
# The part of a scan over layers that a stage holds (`split_scan.scope_of`): no module of the step as it was written.
_SCAN_PART = re.compile(r"(^|/)layers(\.\d+)?\[[\d*]+:[\d*]+\](?=/|$)")
_FOLDED = re.compile(r" \(\d+x\)$")  # behind the name of modules that share a row of a table
# Flax numbers the modules of a class, Equinox writes the class's path in front.
_NUMBERED = re.compile(r"_\d+$")


def parts_of(path: str) -> tuple[str, ...]:
    """`state.params['layers'][0]` in parts: state, params, layers, 0."""
    return tuple(next(part for part in groups if part) for groups in _PART.findall(path) if any(groups))


def name_of_key(key: Any) -> Any:
    """The name or number in a key of a tree of JAX; None for one that has neither."""
    return next((getattr(key, of) for of in ("key", "name", "idx") if hasattr(key, of)), None)


def unfolded(name: str) -> str:
    """A name of a table without the number of modules in its row."""
    return _FOLDED.sub("", name)


def matches(pattern: str, path: str) -> bool:
    """Whether a pattern matches the end of a path, which is in parts with slashes between them."""
    parts = tuple(path.split("/"))[::-1]
    return any(_match(reading, parts) for reading in _readings(pattern))


def class_of(part: str) -> str:
    """The name of a module's class, of a part of its path."""
    return _NUMBERED.sub("", part).rsplit(".", 1)[-1]


def names_module(pattern: str, module: str) -> bool:
    """Whether a pattern names a module, or one that it is in. A class's name stands for its numbered modules too."""
    parts = module.split("/")
    plain = [class_of(part) for part in parts]
    prefixes = ("/".join(path[:n]) for path in (parts, plain) for n in range(1, len(parts) + 1))
    return any(matches(pattern, prefix) for prefix in prefixes)


def is_scan_part(name: str) -> bool:
    """Whether a part of a path is the name of a part of a scan over layers."""
    return bool(_SCAN_PART.fullmatch(name))


def without_scan_parts(path: str) -> str:
    """The path without the parts of scans over layers that autopar names (`layers[0:2]`, `layers.1[0:2]`)."""
    return _SCAN_PART.sub("", path).strip("/")


@functools.lru_cache(maxsize=256)
def _readings(pattern: str) -> tuple[tuple[str, ...], ...]:
    """The patterns, in parts from the end, that a text may stand for: itself, a name in which brackets are brackets
    (`layers[0:2]`), and what jax writes as a path.
    """
    text = unfolded(pattern).strip("/")
    readings = [text, text.replace("[", "[[]")]
    if module := without_scan_parts(text):
        readings.append(module.replace("[", "[[]") if module != text else text)
    if "".join(m[0] for m in _PART.finditer(text)) == text:
        readings.append("/".join(part.replace("[", "[[]") for part in parts_of(text)))
    return tuple(dict.fromkeys(tuple(reading.split("/"))[::-1] for reading in readings))


def _match(patterns: tuple[str, ...], parts: tuple[str, ...]) -> bool:
    if not patterns:
        return True
    if patterns[0] == "**":
        return any(_match(patterns[1:], parts[n:]) for n in range(len(parts) + 1))
    if not parts or not fnmatch.fnmatchcase(parts[0], patterns[0]):
        return False
    return _match(patterns[1:], parts[1:])
