"""The pages of a plan, of two plans side by side, of ways to run a step, and of batches that fit: HTML with its style
and its script inside, from the templates.

Everything that comes from the user's program is text: Jinja2 escapes it in the page, and the data of the script are
JSON in which no character can end the element that holds them.
"""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
from markupsafe import Markup

from autopar.common.text import (
    text_of_bytes,
    text_of_flops,
    text_of_interval_s,
    text_of_number,
    text_of_part,
    text_of_s,
)
from autopar.plan import bench, summary
from autopar.plan.comparison import Comparison
from autopar.plan.modules import NO_MODULE
from autopar.plan.report.data import PARTS, TimelineData, report_values, tokens_of
from autopar.plan.report.fit_data import FitRow, fit_values
from autopar.plan.schema import MemoryKind, PlanRecord

# The colours of categories of events, as the script has them, and what they mean.
_CATEGORIES = {
    "F": ("forward", "forward"),
    "B": ("backward", "backward"),
    "W": ("weight", "gradients of weights"),
    "compute": ("compute", "computation"),
    "send": ("send", "communication"),
}
_OTHERS = ("other", "once a step")
SHORTEST_S = 1e-6
# What could end a script element, or a line of JavaScript, in JSON.
_UNSAFE = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}


def page_of(record: PlanRecord) -> str:
    """The page of a plan."""
    return _render("report.html.j2", report_values(record))


def comparison_of(record: PlanRecord, other: PlanRecord) -> str:
    """The page of two plans of a step side by side."""
    return _render("compare.html.j2", {"found": Comparison(plan=record, other=other)})


def fitting_of(step: str, rows: Sequence[FitRow], multiples: Mapping[str, int]) -> str:
    """The page of `autopar.fit`."""
    return _render("fit.html.j2", fit_values(step, rows, multiples))


def bench_of(step: str, rows: Sequence[bench.BenchRow]) -> str:
    """The page of `autopar.bench`."""
    clusters = bench.by_cluster(rows)
    records = [way.record for cluster in clusters for way in cluster.ways if way.record is not None]
    values = {
        "step": step,
        "clusters": clusters,
        # The parts of steps in the order of their colours.
        "names": list(dict.fromkeys(share.name for record in records for share in summary.shares(record))),
        "is_measured": any(row.measured_s is not None for row in rows),
        "made_on": datetime.date.today().isoformat(),
    }
    return _render("bench.html.j2", values)


def _render(template: str, values: Mapping[str, Any]) -> str:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("autopar.plan.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "s": time_text,
        "b": text_of_bytes,
        "interval": text_of_interval_s,
        "flop": text_of_flops,
        "pct": text_of_part,
        "number": text_of_number,
        "tokens": tokens_of,
        "hue": hue,
        "curve": curve_points,
        "legend": timeline_legend,
        "purpose": purpose_number,
        "ticks": round_ticks,
        "timeline": timeline_json,
    }
    return environment.get_template(template).render(values, summary=summary, bench=bench, no_module=NO_MODULE)


def time_text(seconds: float) -> str:
    """`3.2 ms`; less than a microsecond, which no prediction resolves, is `< 1 us`."""
    return "< 1 us" if 0 < seconds < SHORTEST_S else text_of_s(seconds)


def hue(stage: int, groups: int) -> int:
    """The hue of a stage's colour, so that neighbours differ and the first and the last do too."""
    return round(205 + 290 * (stage % groups) / max(groups, 1)) % 360


def curve_points(curve: tuple[int, ...], top: float, width: float, height: float) -> str:
    """The points of an SVG polyline in steps, with `top` bytes at the upper edge."""
    points = []
    for i, value in enumerate(curve):
        y = height * (1 - value / top) if top else height
        points += [f"{width * i / len(curve):.1f},{y:.1f}", f"{width * (i + 1) / len(curve):.1f},{y:.1f}"]
    return " ".join(points)


def round_ticks(top: float) -> list[float]:
    """Numbers from 0 for an axis that ends at `top`: multiples of 1, 2 or 5 times a power of ten, four to eight."""
    if top <= 0:
        return [0.0]
    power = 10.0 ** math.floor(math.log10(top))
    step = next(power * part for part in (2.0, 1.0, 0.5, 0.2) if top / (power * part) >= 3)
    return [number * step for number in range(math.floor(top / step) + 1)]


def purpose_number(kind: MemoryKind) -> int:
    """The number of the colour that a purpose of memory has on all pages."""
    return list(MemoryKind).index(kind)


def timeline_legend(categories: Sequence[str]) -> list[tuple[str, str]]:
    """(colour, meaning) of the categories of events that there are, as the script colours them."""
    return list(dict.fromkeys(_CATEGORIES.get(category, _OTHERS) for category in categories))


def timeline_json(timeline: TimelineData) -> Markup:
    """The data of the timeline, for a script element. Starts are counted from the start before, to be short."""
    rows: list[dict[str, Any]] = []
    for row in timeline.rows:
        flat, last = [], 0
        for name, start, duration in sorted(row.events, key=lambda event: event[1]):
            flat += [name, start - last, duration]
            last = start
        rows.append({"name": row.name, "link": row.is_link, "busy": round(row.busy, 4), "events": flat})
    value = {
        "step_s": timeline.step_s,
        "parts": PARTS,
        "names": timeline.names,
        "categories": timeline.categories,
        "rows": rows,
    }
    return safe_json(value)


def safe_json(value: Any) -> Markup:
    """JSON that may stand in a script element: what it says is unchanged, and nothing in it ends the element."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    return Markup("".join(_UNSAFE.get(character, character) for character in text))
