"""Layouts as text in pieces, so that each mesh axis in them can have its colour."""

from __future__ import annotations

import dataclasses
import re

from autopar.ir.mesh import AXIS_NAMES

# An axis, as it stands inside the brackets of a layout in text: `[x, -, yz] +x`.
_BRACKETS = re.compile(r"(\[[xyz, -]*\]|\+[xyz])")


@dataclasses.dataclass(frozen=True, slots=True)
class Token:
    """A piece of a layout as text; `axis` is the mesh axis that it names, or empty."""

    text: str
    axis: str = ""


def tokens_of(text: str) -> tuple[Token, ...]:
    """A text with layouts in it (`[x, -] @ [-, -] +x`) in pieces, each axis in a layout one of its own."""
    tokens: list[Token] = []
    for piece in _BRACKETS.split(text):
        if not _BRACKETS.fullmatch(piece):
            _append(tokens, piece)
            continue
        for character in piece:
            if character in AXIS_NAMES:
                tokens.append(Token(character, character))
            else:
                _append(tokens, character)
    return tuple(tokens)


def _append(tokens: list[Token], text: str) -> None:
    """Adds text, to the last piece where that is no axis."""
    if tokens and not tokens[-1].axis:
        tokens[-1] = Token(tokens[-1].text + text)
    elif text:
        tokens.append(Token(text))
