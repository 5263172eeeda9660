"""Pipeline schedules against the formulas and the rates of their papers: python -m benchmarks.schedules [--write]

Without devices: the lists are placed on a clock. Every p from 2 to 16, m from p to 64 and v from 1 to 4 is compared
with the formulas; with the times that arXiv:2401.10241 measured, its bubble rates are computed again. --write also puts
the tables in benchmarks/results/schedules.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from autopar.runtime.pipeline.standard_schedules import Times, make_schedule, peak_in_flight, place
from benchmarks.machine import markdown

RESULTS = Path(__file__).parent / "results" / "schedules.md"


class Row(NamedTuple):
    """Measured milliseconds and published bubble rates. Times of a stage, transfers between neighbours."""

    model: str
    p: int
    m: int
    forward_ms: float
    backward_ms: float
    weight_ms: float
    transfer_ms: float
    rate_1f1b: float
    rate_zb_h1: float

    def __str__(self) -> str:
        return f"{self.model}-m{self.m}"


# Zero Bubble Pipeline Parallelism, arXiv:2401.10241: Table 9 (times) and Table 5 (rates of 1F1B, ZB-H1 and ZB-1p; the
# last two are equal in every row).
ZERO_BUBBLE_ROWS = (
    Row("1.5B", 8, 24, 18.522, 18.086, 9.337, 0.601, 0.2431, 0.1585),
    Row("1.5B", 8, 32, 18.513, 18.086, 9.331, 0.626, 0.1985, 0.1242),
    Row("1.5B", 8, 64, 18.546, 18.097, 9.321, 0.762, 0.1240, 0.0674),
    Row("6.2B", 8, 24, 29.718, 29.444, 19.927, 0.527, 0.2347, 0.1323),
    Row("6.2B", 8, 32, 29.802, 29.428, 19.530, 0.577, 0.1898, 0.1045),
    Row("6.2B", 8, 64, 29.935, 29.621, 19.388, 0.535, 0.1091, 0.0554),
    Row("14.6B", 16, 48, 11.347, 11.248, 8.132, 0.377, 0.2552, 0.1397),
    Row("14.6B", 16, 64, 11.307, 11.254, 8.101, 0.379, 0.2082, 0.1088),
    Row("14.6B", 16, 128, 11.325, 11.308, 8.109, 0.378, 0.1251, 0.0576),
    Row("28.3B", 32, 96, 10.419, 10.207, 7.715, 0.408, 0.2646, 0.1421),
    Row("28.3B", 32, 128, 10.408, 10.204, 7.703, 0.408, 0.2168, 0.1106),
    Row("28.3B", 32, 256, 10.402, 10.248, 7.698, 0.460, 0.1352, 0.0594),
)


class Expected(NamedTuple):
    """What the formulas say of a schedule; in flight on the worst stage, in micro-batches."""

    name: str
    chunks: int
    bubble_s: float
    bubble_formula: str
    in_flight: float
    in_flight_formula: str


def expectations(p: int, m: int, times: Times | None = None) -> Iterator[Expected]:
    """The schedules whose formulas hold for p stages and m >= p micro-batches, F >= W and B >= W, no transfer time.

    `times` are of a stage; several stages on a group count as one p-th of the model together.
    """
    f, b, w, _ = dataclasses.astuple(times or Times())
    full = (p - 1) * (f + b + w)
    yield Expected("gpipe", 1, full, "(p-1)(F+B+W)", m, "m")
    yield Expected("1f1b", 1, full, "(p-1)(F+B+W)", p, "p")
    yield Expected("eager-1f1b", 1, full, "(p-1)(F+B+W)", min(2 * p - 1, m), "min(2p-1, m)")
    for v in range(1, 5):
        if m % p == 0:
            # The chunks take as long as stages do here, so that the group's share F is v times the chunk's.
            in_flight = min(p + (p - 1) / v, m)
            yield Expected("interleaved", v, full, "(p-1)(F+B+W)/v", in_flight, "min(p+(p-1)/v, m)")
    yield Expected("zb-h1", 1, (p - 1) * (f + b - w), "(p-1)(F+B-W)", p, "p")
    if m >= 2 * p - 1:
        yield Expected("zb-h2", 1, (p - 1) * (f + b - 2 * w), "(p-1)(F+B-2W), m >= 2p-1", 2 * p - 1, "2p-1")
    if m >= 2 * p:
        yield Expected("zb-v", 2, 0.0, "0 for F=B=W, m >= 2p", p, "p")
    yield Expected("inference", 1, 0.0, "0", 0, "0")


def zero_bubble_rate(name: str, row: Row) -> float:
    """(cost - m(F+B+W)) / cost, cost the longest span of a stage; every transfer of a list in order is waited for."""
    times = Times(
        forward_s=row.forward_ms / 1e3,
        backward_s=row.backward_ms / 1e3,
        weight_s=row.weight_ms / 1e3,
        transfer_s=row.transfer_ms / 1e3,
    )
    return place(make_schedule(name, row.p, row.m, times=times), times).bubble_rate


def formula_rows() -> Iterator[list[str]]:
    """For each schedule: the formulas, how many sizes were tried, the largest differences, one size in figures."""
    found: dict[tuple[str, int], list[tuple[Expected, int, int, float, float]]] = {}
    for p in range(2, 17):
        for m in range(p, 65):
            for expected in expectations(p, m):
                schedule = make_schedule(expected.name, p, m, expected.chunks)
                peaks = peak_in_flight(schedule)
                assert peaks == schedule.in_flight, f"{expected.name} with p={p}, m={m} holds {peaks}"
                held = float(max(schedule.in_flight_microbatches))
                sizes = found.setdefault((expected.name, expected.chunks), [])
                sizes.append((expected, p, m, place(schedule).bubble_s, held))
    for (name, chunks), sizes in found.items():
        bubble_off = max(abs(bubble - e.bubble_s) for e, _, _, bubble, _ in sizes)
        held_off = max(abs(held - e.in_flight) for e, _, _, _, held in sizes)
        shown = next((s for s in sizes if s[1:3] == (8, 32)), sizes[-1])
        yield [
            f"{name}, v={chunks}" if chunks > 1 or name == "interleaved" else name,
            shown[0].bubble_formula,
            f"{shown[3]:g}",
            shown[0].in_flight_formula,
            f"{shown[4]:g}",
            f"{len(sizes):,}",
            f"{bubble_off:.1e}",
            f"{held_off:.1e}",
        ]


def published_rows() -> Iterator[list[str]]:
    for row in ZERO_BUBBLE_ROWS:
        size = [row.model, str(row.p), str(row.m)]
        for name, shown, published in (
            ("1f1b", "1F1B", row.rate_1f1b),
            ("zb-h1", "ZB-H1, ZB-1p", row.rate_zb_h1),
        ):
            rate = zero_bubble_rate(name, row)
            yield [*size, shown, f"{published:.4f}", f"{rate:.4f}", f"{rate - published:+.5f}"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables, and write them when asked to."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.schedules", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.name} as well")
    options = parser.parse_args(arguments)
    formulas = markdown(
        [
            "schedule",
            "bubble",
            "p=8, m=32, F=B=W=1",
            "in flight, worst stage",
            "p=8, m=32",
            "sizes (p, m)",
            "largest difference, bubble",
            "in flight",
        ],
        list(formula_rows()),
    )
    published = markdown(
        ["model", "p", "m", "schedule", "published", "simulated", "difference"], list(published_rows())
    )
    text = f"""# Schedules

No device, no measurement: lists placed on a clock, the same on every machine.

## Formulas

Every p from 2 to 16 and m from p to 64 where the formula holds (interleaved: p divides m). A chunk takes F=B=W=1, so
that F of a group with v chunks is v. Bubble: idle time between first and last task of the group that idles most.

{formulas}

## Published bubble rates

arXiv:2401.10241, Tables 5 and 9: (cost - m(F+B+W)) / cost with the times measured there; cost is the longest time of a
stage from its first to its last task. A transfer delays what needs it by its whole time and holds up neither stage.

{published}
"""
    print(text)
    if options.write:
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
