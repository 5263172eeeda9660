"""The rule of a kernel in text: `"b h q d, b h k d -> b h q d"` names the factor of each dimension.

A name stands for the same factor wherever it stands. A name in brackets (`[k]`) in any array, or among `whole`, is
whole in all of them; so is `_`, a dimension without a name. Over a factor that is `summed` each device's result is a
summand of the whole. Every other factor may be split, and then stands in every result.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence
from typing import Any

from autopar.errors import InvalidArgumentError
from autopar.ir.graph import Factor, FactorKind, Rule
from autopar.ir.primitives import is_inexact

UNNAMED = "_"
_NAME = re.compile(r"[A-Za-z]\w*|_")
_BRACKETS = re.compile(r"\[(.*)\]|([^\[\]]*)")
Names = tuple[str, ...]
_HINT = 'write it as "b h q [d], b h [k] [d] -> b h q [d]": one name for each dimension, commas between arrays'


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KernelRule:
    """The factor of each dimension of operands and results; `whole` may not be split, `summed` leave summands."""

    operands: tuple[Names, ...]
    results: tuple[Names, ...]
    whole: frozenset[str]
    summed: frozenset[str] = frozenset()

    @property
    def names(self) -> frozenset[str]:
        return frozenset(name for names in (*self.operands, *self.results) for name in names)

    @property
    def split(self) -> frozenset[str]:
        """The factors that may be split."""
        return self.names - self.whole

    def __str__(self) -> str:
        def text(names: Names) -> str:
            return " ".join(f"[{x}]" if x in self.whole and x != UNNAMED else x for x in names)

        arrays = (", ".join(map(text, side)) for side in (self.operands, self.results))
        summed = f", summed over {' '.join(sorted(self.summed))}" if self.summed else ""
        return " -> ".join(arrays) + summed


def parse(text: str, whole: Iterable[str], summed: Iterable[str], where: str) -> KernelRule:
    """The rule that a text says. Raises: InvalidArgumentError."""
    sides = text.split("->")
    if len(sides) != 2:
        raise _error(where, "a rule with one arrow between operands and results", repr(text), _HINT)
    marked = {*whole, *re.findall(r"\[(\w+)\]", text), UNNAMED}
    operands, results = ([_names(part, where) for part in side.split(",")] for side in sides)
    rule = KernelRule(
        operands=tuple(operands), results=tuple(results), whole=frozenset(marked), summed=frozenset(summed)
    )
    unknown = sorted((rule.whole | rule.summed) - rule.names - {UNNAMED})
    if unknown:
        raise _error(where, f"names of the rule {text!r}", ", ".join(unknown), "whole and summed name factors of it")
    for name in sorted(rule.summed):
        if name in rule.whole:
            raise _error(where, f"factor {name!r} whole or summed", "both", "leave out one of the two")
        if all(name in names for names in rule.results):
            raise _error(
                where,
                f"a result without the factor {name!r}, as it is summed over",
                f"the rule {text!r}",
                "leave it out of summed= where each part makes its part of the result",
            )
    made = frozenset(x for names in rule.results for x in names) - {x for names in rule.operands for x in names}
    return dataclasses.replace(rule, whole=rule.whole | made)


def _names(text: str, where: str) -> Names:
    parts = [_BRACKETS.fullmatch(part) or part for part in text.split()]
    names = tuple(part if isinstance(part, str) else part[1] or part[2] or "" for part in parts)
    for name in names:
        if not _NAME.fullmatch(name):
            raise _error(
                where, "names of letters, digits and underscores, each alone or in brackets", repr(name), _HINT
            )
        if name != UNNAMED and names.count(name) > 1:
            raise _error(where, "each factor once in an array", f"{name!r} twice in {text.strip()!r}", _HINT)
    return names


def check_results(rule: KernelRule, where: str) -> None:
    """Raises: InvalidArgumentError where a factor that may be split is missing in a result."""
    for name in sorted(rule.split - rule.summed):
        if any(name not in names for names in rule.results):
            raise _error(
                where,
                f"factor {name!r} in every result, as it may be split",
                f"the rule {rule}",
                f"mark it [{name}] where the kernel needs it whole, name it in summed=({name!r},) where each part "
                "of it gives a summand of the result, or give a twin (like=) that says which it is",
            )


def sizes_of(rule: KernelRule, shapes: Sequence[Sequence[int]], where: str) -> dict[str, int]:
    """The size of each factor from the shapes of operands, or of operands and results. Raises: InvalidArgumentError."""
    arrays = (*rule.operands, *rule.results)
    if len(shapes) not in (len(rule.operands), len(arrays)):
        got = f"{len(shapes)} (the rule: {rule})"
        raise _error(where, f"{len(rule.operands)} operands and {len(rule.results)} results", got, _HINT)
    sizes: dict[str, int] = {}
    for number, (names, shape) in enumerate(zip(arrays, shapes, strict=False)):
        kind = "operand" if number < len(rule.operands) else "result"
        at = number if number < len(rule.operands) else number - len(rule.operands)
        if len(names) != len(shape):
            expected = f"{len(names)} dimensions ({' '.join(names)}) of {kind} {at}"
            raise _error(where, expected, f"shape {list(shape)}", _HINT)
        for name, n in zip(names, shape, strict=True):
            if name != UNNAMED and sizes.setdefault(name, n) != n:
                expected = f"factor {name!r} of size {sizes[name]} in {kind} {at} as before"
                raise _error(where, expected, f"shape {list(shape)}", "give dimensions of other sizes other names")
    return sizes


def kind_of(rule: KernelRule, name: str, results: Sequence[Any]) -> FactorKind:
    """What becomes of the results, of these types, where a factor is split."""
    if name in rule.whole:
        return FactorKind.FIXED
    if name not in rule.summed or all(name in names for names in rule.results):
        return FactorKind.PASS  # a residual without it depends on nothing that has it
    # Sums in any order are of floating point only.
    return FactorKind.SUM if all(is_inexact(a.dtype) for a in results) else FactorKind.FIXED


def graph_rule(rule: KernelRule, operands: Sequence[Any], results: Sequence[Any]) -> Rule:
    """The rule of the operation in a graph, for operands and results of these shapes and types."""
    number: dict[str, int] = {}
    factors: list[Factor] = []

    def dims(names: Names, shape: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        out: list[tuple[int, ...]] = []
        for name, n in zip(names, shape, strict=True):
            if n == 1:
                out.append(())
                continue
            if name == UNNAMED or name not in number:
                number[name] = len(factors)
                factors.append(Factor(n, kind_of(rule, name, results)))
            out.append((number[name],))
        return tuple(out)

    read = tuple(dims(names, aval.shape) for names, aval in zip(rule.operands, operands, strict=True))
    made = tuple(dims(names, aval.shape) for names, aval in zip(rule.results, results, strict=True))
    return Rule(tuple(factors), read, made)


def _error(where: str, expected: str, got: str, hint: str) -> InvalidArgumentError:
    return InvalidArgumentError(where=where, expected=expected, got=got, hint=hint)
