"""Seconds, bytes, arithmetic and rates as text: three digits and a unit, in powers of 1000 as data sheets count."""

from __future__ import annotations

import re
from collections.abc import Sequence

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
