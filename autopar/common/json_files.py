"""JSON files that people may have edited: a fault and its place, such as `$.plan.pipeline.stages[1].axis_sizes[0]`."""

from __future__ import annotations

import dataclasses
import re
from typing import Any, TypeVar

import msgspec

from autopar.errors import AutoparError

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


def first_layout_twice(tree: Any, place: str) -> Fault | None:
    """The first layout in decoded JSON that splits by a mesh axis twice."""
    if isinstance(tree, dict):
        dims, partial = tree.get("dims"), tree.get("partial", [])
        if isinstance(dims, list) and isinstance(partial, list):
            used = [axis for axes in dims if isinstance(axes, list) for axis in axes] + partial
            if len(set(map(str, used))) < len(used):
                return Fault(place=place, expected="every mesh axis once", got=f"dims {dims}, partial {partial}")
        items = [(f"{place}.{key}", value) for key, value in tree.items()]
    elif isinstance(tree, list):
        items = [(f"{place}[{i}]", value) for i, value in enumerate(tree)]
    else:
        items = []
    return next((fault for where, value in items if (fault := first_layout_twice(value, where)) is not None), None)
