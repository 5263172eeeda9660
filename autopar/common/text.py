"""Text: numbers with units, and lines and tables as wide as a terminal and coloured where it shows colours.

Numbers have three digits; units are powers of 1000, as data sheets count.
"""

from __future__ import annotations

import dataclasses
import io
import os
import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import TextIO

from rich.cells import cell_len
from rich.color import ColorSystem
from rich.console import Console
from rich.padding import Padding
from rich.style import Style
from rich.table import Table
from rich.text import Text

_TIMES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))
_SIZES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))
LEAST_S = 1e-12  # less is what sums leave by rounding
_COUNTS = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1.0, ""))


_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(?:([kmgtp]?)(i?)b?)?\s*", re.IGNORECASE)


def bytes_of_text(text: str) -> int | None:
    """Bytes of `80GB` (powers of 1000), `16GiB` (powers of 1024) or `1000000`; None for what is no size."""
    match = _SIZE.fullmatch(text)
    if match is None or (match[3] and not match[2]):
        return None
    power = "kmgtp".find((match[2] or "").lower()) + 1 if match[2] else 0
    return round(float(match[1]) * (1024 if match[3] else 1000) ** power)


def text_of_s(seconds: float) -> str:
    """`3.2 ms`; what is below `LEAST_S` is `0 s`."""
    return _scaled(seconds, _TIMES) if abs(seconds) >= LEAST_S else "0 s"


def text_of_limit(time_limit_s: float) -> str:
    """`within 3.2 s`; of a search that only its number of tries ends `within the solver's tries`."""
    return f"within {text_of_s(time_limit_s)}" if time_limit_s < float("inf") else "within the solver's tries"


def text_of_interval_s(ends_s: tuple[float, float]) -> str:
    """`1.9 to 2.4 s`, `960 ms to 1.2 s`: two digits."""
    low, high = (_scaled(float(f"{end:.2g}"), _TIMES) for end in ends_s)
    return f"{low.removesuffix(f' {high.split()[1]}')} to {high}"


def text_of_bytes(nbytes: float) -> str:
    """`3.2 GB`."""
    return _scaled(nbytes, _SIZES)


def text_of_flops(flops: float) -> str:
    """`3.2 GFLOP`."""
    return _scaled(flops, [(size, f"{prefix}FLOP") for size, prefix in _COUNTS])


def text_of_rate(per_s: float, unit: str) -> str:
    """`3.2 Gflop/s`, of the unit `flop`."""
    return _scaled(per_s, [(size, f"{prefix}{unit}/s") for size, prefix in _COUNTS])


def text_of_part(part: float) -> str:
    """`3.2 %`, `47 %`; a part below a thousandth is `< 0.1 %`."""
    if 0 < part < 0.001:
        return "< 0.1 %"
    digits = 1 if abs(part) < 0.0995 else 0
    return f"{part:.{digits}%}".replace("%", " %")


def text_of_count(number: float) -> str:
    """`0.25`, `13.5`, `1,536`: of what is counted, which may be a mean."""
    return f"{number:.3g}" if number < 100 else f"{number:,.0f}"


def text_of_number(number: float) -> str:
    """`8.03 billion`, `489,900`: of parameters and tokens."""
    for size, name in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million")):
        if number >= 0.9995 * size:
            return f"{number / size:.3g} {name}"
    return text_of_count(number)


def _scaled(value: float, units: Sequence[tuple[float, str]]) -> str:
    """In the largest unit of which there is one, as rounded: 999,960 bytes are 1 MB, not 1000 kB."""
    for size, name in units:
        rounded = float(f"{value / size:.3g}")
        if abs(rounded) >= 1 or (size, name) == units[-1]:
            break
    return f"{rounded:.0f} {name}" if abs(rounded) >= 1000 else f"{rounded:.3g} {name}"


# A terminal that says it is narrower has no room for a name beside a number; it breaks the lines itself.
LEAST_COLUMNS = 40


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TextFormat:
    """How a text is set. `columns`: its width, None for the one that each text has by itself. `color`: with the escape
    codes of ECMA-48 for bold, dim and colours.
    """

    columns: int | None = None
    color: bool = False

    @classmethod
    def of_stream(cls, stream: TextIO, environment: Mapping[str, str]) -> TextFormat:
        """The format for a stream.

        Width: the variable COLUMNS, else that of the terminal. Colours: never with NO_COLOR (no-color.org), always with
        FORCE_COLOR (force-color.org), else on terminals, except where TERM is "dumb". A variable that is empty counts
        as absent.
        """
        is_terminal = stream.isatty()
        told = environment.get("COLUMNS", "")
        columns = int(told) if told.isdecimal() else _terminal_columns(stream) if is_terminal else 0
        color = is_terminal and environment.get("TERM") != "dumb"
        if environment.get("FORCE_COLOR"):
            color = True
        if environment.get("NO_COLOR"):
            color = False
        return cls(columns=max(columns, LEAST_COLUMNS) if columns > 0 else None, color=color)

    def width(self, own: int) -> int:
        """The columns of a text that has `own` by itself."""
        return own if self.columns is None else self.columns

    def styled(self, text: str, style: str) -> str:
        """A line in a style of rich, such as "bold"."""
        return Style.parse(style).render(text, color_system=ColorSystem.STANDARD) if self.color and text else text

    def broken(self, lines: Sequence[str], *, hanging: int | None = None) -> str:
        """Lines as one text, broken between words where a width is asked for. The rest of a line begins at column
        `hanging`, None for two right of its beginning.
        """
        if self.columns is None:
            return "\n".join(lines)
        broken: list[str] = []
        for line in lines:
            begin = len(line) - len(line.lstrip()) + 2 if hanging is None else hanging
            indent = " " * min(begin, self.columns // 2)
            broken += textwrap.wrap(line, self.columns, subsequent_indent=indent, break_on_hyphens=False) or [""]
        return "\n".join(broken)


PLAIN = TextFormat()


class TextConsole:
    """Collects lines and tables as one text.

    In a notebook too, where rich would show them instead. A table whose longest words do not fit beside each other is
    written as records: the first cell of a row, and below it a line for each of the others.
    """

    def __init__(self, own_columns: int, text_format: TextFormat = PLAIN) -> None:
        self._format, self._own_columns = text_format, own_columns
        self.columns = text_format.width(own_columns)
        self._buffer = io.StringIO()
        self._console = Console(
            file=self._buffer,
            width=self.columns,
            color_system="standard" if text_format.color else None,
            force_terminal=text_format.color,
            no_color=not text_format.color,
            highlight=False,
            force_jupyter=False,
        )

    def line(self, text: str, *, style: str | None = None) -> None:
        """A paragraph, broken between words."""
        self._console.print(Text(text, style=style or ""))

    def long_line(self, text: str) -> None:
        """A line that is broken only where a width was asked for."""
        self._console.print(Text(text), soft_wrap=self._format.columns is None)

    def table(self, rows: Table) -> None:
        """A table; its cells are markup of rich."""
        columns = [[self._console.render_str(str(cell)) for cell in (c.header, *c.cells)] for c in rows.columns]
        # Rich measures within the width of its options, where everything fits.
        unbounded = self._console.options.update_width(sum(text.cell_len + 4 for texts in columns for text in texts))
        measured = self._console.measure(rows, options=unbounded)
        if self.columns >= min(self._own_columns, measured.maximum):
            self._console.print(rows)
        elif measured.minimum <= self.columns:
            for column, width in zip(rows.columns, _widths(columns, self.columns - measured.minimum), strict=True):
                column.width, column.overflow = width, "fold"
            self._console.print(rows)
        else:
            self._records(columns)

    def _records(self, columns: Sequence[Sequence[Text]]) -> None:
        (first_name, *names), *rows = zip(*columns, strict=True)
        for first, *others in rows:
            self._console.print(Text.assemble((first_name.plain, "bold"), " " if first_name else "", first))
            record = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
            record.add_column(no_wrap=True)
            record.add_column(overflow="fold")
            for name, text in zip(names, others, strict=True):
                if text:
                    record.add_row(name, text)
            self._console.print(Padding(record, (0, 0, 0, 2)))

    def text(self) -> str:
        """All that was written, without spaces at the ends of lines."""
        return "\n".join(line.rstrip() for line in self._buffer.getvalue().splitlines())


def _widths(columns: Sequence[Sequence[Text]], free: int) -> list[int]:
    """The widths of columns: their longest words, and `free` more, first for those that need the least. Rich breaks
    words where it has to make a table narrower.
    """
    widths = [max(cell_len(word) for text in texts for word in (*text.plain.split(), "")) for texts in columns]
    wanted = [max(cell_len(line) for text in texts for line in (*text.plain.split("\n"), "")) for texts in columns]
    for i in sorted(range(len(widths)), key=lambda i: wanted[i] - widths[i]):
        more = min(wanted[i] - widths[i], free)
        widths[i], free = widths[i] + more, free - more
    return widths


def _terminal_columns(stream: TextIO) -> int:
    """The columns of the terminal behind a stream; 0 where it does not say."""
    try:
        return os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):
        return 0
