"""The types of leaves by their names in a checkpoint, and numbers of Python as exact text."""

from __future__ import annotations

from typing import Any

import jax

NUMBERS = (bool, int, float, complex, str)  # a bool is an int too: the first that fits
_WRITTEN_OUT = 2**64  # larger whole numbers are written in hexadecimal, which Python reads at any length


def array_dtype(name: str) -> Any:
    """The type of an array. Raises: TypeError."""
    return jax.numpy.dtype(name)


def key_dtype(implementation: str) -> Any:
    """The type of random keys of an implementation. Raises: ValueError for one that is not registered."""
    return jax.eval_shape(lambda: jax.random.key(0, impl=implementation)).dtype


def type_of(number: Any) -> str:
    """The type of a number (or text) of Python."""
    return next(kind.__name__ for kind in NUMBERS if isinstance(number, kind))


def text_of(number: Any) -> str:
    """A number as text."""
    if isinstance(number, bool | str):
        return str(number)
    if isinstance(number, int):
        return str(number) if abs(number) < _WRITTEN_OUT else hex(number)
    if isinstance(number, float):
        return number.hex()
    return f"{number.real.hex()} {number.imag.hex()}"


def number_of(kind: str, text: str) -> Any:
    """The number of a type and a text. Raises: ValueError."""
    match kind:
        case "bool" if text in ("True", "False"):
            return text == "True"
        case "int":
            return int(text, 0)
        case "float":
            return float.fromhex(text)
        case "complex":
            real, _, imaginary = text.partition(" ")
            return complex(float.fromhex(real), float.fromhex(imaginary))
        case "str":
            return text
    raise ValueError(f"no number: {kind} {text[:20]!r}")
