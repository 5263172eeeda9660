"""Tables as text."""

from __future__ import annotations

import io

from rich.console import Console


def text_console(buffer: io.StringIO, columns: int) -> Console:
    """A console that writes plain text into a buffer; in a notebook too, where rich would show it instead."""
    return Console(file=buffer, width=columns, no_color=True, highlight=False, force_jupyter=False)
