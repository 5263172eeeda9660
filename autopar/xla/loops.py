"""Trip counts of the `while` loops of a compiled XLA program.

XLA writes a known number into the instruction's backend configuration. Elsewhere (TPU) the count follows from the text:
a carried integer starts at a constant, is compared with a constant in the condition, and incremented by a constant in
the body.
"""

from __future__ import annotations

import dataclasses
import re

from autopar.xla import parse

_SAME_VALUE = frozenset({"copy", "bitcast", "convert", "reshape", "copy-done", "optimization-barrier"})
_SCALAR = re.compile(r"^(?:[su]\d+|pred)\[\]")
_INTEGER = re.compile(r"^-?\d+$")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Carried:
    """The loop's value number `index` at the start of a turn, plus a constant."""

    index: int
    plus: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Compare:
    direction: str
    left: _Value
    right: _Value


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Loop:
    """The whole carried tuple."""


_Value = int | _Carried | _Compare | _Loop | None


def trip_count(module: parse.Module, loop: parse.Instruction) -> int | None:
    """The trip count of a `while` instruction, or None where the text does not determine it."""
    if m := re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop.rest):
        return int(m.group(1))
    (condition,), (body,) = loop.called("condition"), loop.called("body")
    test = _evaluate(module, condition, {0: _Loop()})
    if not isinstance(test, _Compare):
        return None
    left, right, direction = test.left, test.right, test.direction
    if isinstance(right, _Carried) and not isinstance(left, _Carried):
        left, right, direction = right, left, {"LT": "GT", "LE": "GE", "GT": "LT", "GE": "LE"}.get(direction, direction)
    if not isinstance(left, _Carried):
        return None
    if isinstance(right, _Carried):  # a bound that is carried along
        right = _initial(module, loop, right.index)
    start, step = _initial(module, loop, left.index), _carried_on(module, body, left.index)
    if isinstance(start, int) and isinstance(right, int) and isinstance(step, _Carried) and step.index == left.index:
        return _turns(start + left.plus, right, step.plus, direction)
    return None


def _turns(start: int, bound: int, step: int, direction: str) -> int | None:
    if direction in ("GT", "GE"):
        start, bound, step, direction = -start, -bound, -step, {"GT": "LT", "GE": "LE"}[direction]
    if direction == "LE":
        bound, direction = bound + 1, "LT"
    if step <= 0 or direction not in ("LT", "NE"):
        return None
    if direction == "NE" and (bound - start) % step:
        return None
    return max(0, -((start - bound) // step))


def _initial(module: parse.Module, loop: parse.Instruction, index: int) -> _Value:
    """The constant with which value `index` of the loop starts."""
    holder = next(c for c in module.computations.values() if c.instructions.get(loop.name) is loop)
    start = holder.instructions[loop.operands[0]]
    if start.opcode != "tuple":
        return None
    return _value(module, holder, start.operands[index], {}, {})


def _carried_on(module: parse.Module, body: str, index: int) -> _Value:
    """Value `index` after a turn."""
    computation = module.computations[body]
    if computation.root.opcode != "tuple":
        return None
    return _value(module, computation, computation.root.operands[index], {0: _Loop()}, {})


def _evaluate(module: parse.Module, name: str, arguments: dict[int, _Value]) -> _Value:
    """The result of a computation as far as it is scalars and the loop's carried values."""
    computation = module.computations[name]
    return _value(module, computation, computation.root.name, arguments, {})


def _value(
    module: parse.Module,
    computation: parse.Computation,
    name: str,
    arguments: dict[int, _Value],
    values: dict[str, _Value],
) -> _Value:
    """A value of a computation for these arguments; `values` holds those that are already known."""
    if name not in values:
        instruction = computation.instructions.get(name)
        values[name] = None
        if instruction is not None and (instruction.opcode == "parameter" or _SCALAR.match(instruction.shape_text)):
            values[name] = _scalar(module, computation, instruction, arguments, values)
    return values[name]


def _scalar(
    module: parse.Module,
    computation: parse.Computation,
    instruction: parse.Instruction,
    arguments: dict[int, _Value],
    values: dict[str, _Value],
) -> _Value:
    def operand(i: int) -> _Value:
        return _value(module, computation, instruction.operands[i], arguments, values)

    match instruction.opcode:
        case "constant":
            text = instruction.argument_text.strip()
            return int(text) if _INTEGER.match(text) else None
        case "parameter":
            return arguments.get(int(instruction.operands[0]))
        case "get-tuple-element":
            index = _attribute(instruction, r"index=(\d+)")
            return _Carried(index=int(index), plus=0) if isinstance(operand(0), _Loop) else None
        case "add":
            return _sum(operand(0), operand(1), 1)
        case "subtract":
            return _sum(operand(0), operand(1), -1)
        case "compare":
            direction = _attribute(instruction, r"direction=(\w+)")
            return _Compare(direction=direction, left=operand(0), right=operand(1))
        case "fusion" | "call":
            called = instruction.called("calls") or instruction.called("to_apply")
            inner = {i: operand(i) for i in range(len(instruction.operands))}
            return _evaluate(module, called[0], inner) if called else None
        case opcode if opcode in _SAME_VALUE:
            return operand(0)
        case _:
            return None


def _attribute(instruction: parse.Instruction, pattern: str) -> str:
    m = re.search(pattern, instruction.attributes)
    assert m, f"expected {pattern} in the attributes of {instruction.name}, got {instruction.attributes[:200]!r}"
    return m.group(1)


def _sum(left: _Value, right: _Value, sign: int) -> _Value:
    if isinstance(left, int) and isinstance(right, int):
        return left + sign * right
    if isinstance(left, _Carried) and isinstance(right, int):
        return _Carried(index=left.index, plus=left.plus + sign * right)
    if isinstance(left, int) and isinstance(right, _Carried) and sign == 1:
        return _Carried(index=right.index, plus=left + right.plus)
    return None
