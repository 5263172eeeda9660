"""The tables of one accelerator put to the test (`benchmarks.accelerator`)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from benchmarks import row_processes
from benchmarks.machine import markdown

MODEL_COLUMNS = (
    "model", "difference from jit", "small, without rounding", "predicted, ms: preset", "with measured constants",
    "by the step's own times", "measured, ms", "ratio", "ratio with measured constants", "ratio by its own times",
    "jax.jit, ms", "over jit", "peak, MB: predicted",
    "compiled", "device's", "ratio", "in the host",
)  # fmt: skip


def model_cells(name: str, row: dict[str, Any]) -> list[str]:
    if not_run := row.get("failure"):
        return [name, not_run]
    measured_s, by_preset = row["measured_s"], row["predicted_s"]["preset"]
    by_measured, by_step = (row["predicted_s"].get(of) for of in ("measured", "step"))
    peak = row["device_bytes"] or row["compiled_bytes"]
    within = "within" if row["difference"] <= row["tolerance"] else "NOT within"
    return [
        name,
        f"{row['difference']:.1e} ({within} {row['tolerance']:.0e})",
        _unrounded(row),
        f"{by_preset * 1e3:.2f}",
        f"{by_measured * 1e3:.2f}" if by_measured else "-",
        f"{by_step * 1e3:.2f}" if by_step else "-",
        f"{measured_s * 1e3:.2f}",
        f"{by_preset / measured_s:.2f}",
        f"{by_measured / measured_s:.2f}" if by_measured else "-",
        f"{by_step / measured_s:.2f}" if by_step else "-",
        f"{row['jit_s'] * 1e3:.2f}",
        f"{measured_s / row['jit_s'] - 1:+.1%}",
        f"{row['predicted_bytes'] / 1e6:,.1f}",
        f"{row['compiled_bytes'] / 1e6:,.1f}",
        f"{row['device_bytes'] / 1e6:,.1f}" if row["device_bytes"] else "not told",
        f"{row['predicted_bytes'] / peak:.2f}",
        f"{row['host_bytes'] / 1e6:,.1f}",
    ]


def _unrounded(row: dict[str, Any]) -> str:
    return f"{row['unrounded']:.1e}" if "unrounded" in row else "not run"


def report(rows: row_processes.Rows, names: Sequence[str]) -> str:
    """The tables of what was kept of these rows."""
    devices = dict.fromkeys(
        f"{row['device']}: {re.sub(_LOAD, '', row['on'])}" for row in rows.values() if "device" in row
    )
    models = [name for name in names if name in rows and name not in _OTHER]
    sizes = "sizes for a CPU, no figures to quote" if any(row.get("small") for row in rows.values()) else "full sizes"
    later = sorted({row["predicted_later"] for row in rows.values() if "predicted_later" in row})
    parts = [
        "# One accelerator",
        f"`python -m benchmarks.accelerator`, {sizes}. A row's process ran on:",
        "\n".join(f"- {device}" for device in devices),
        "Time of a step, median of turns; ratios are predicted over measured. The device's peak is its own counter; "
        "where it keeps none, the ratio is to what the compiler allocates. Without rounding: the sizes for a CPU in "
        'float32, products with `jax.default_matmul_precision("highest")`.',
        *(f"Predictions were made again after the run, by {version}." for version in later),
        markdown(MODEL_COLUMNS, [model_cells(name, rows[name]) for name in models]),
        "\n".join(f"- {name}: {rows[name]['sizes']}" for name in models if "sizes" in rows[name]),
    ]
    for name in (name for name in _OTHER if name in rows):
        parts += [f"## {name}", _text(name, rows[name])]
    for name in models:
        if profile := rows[name].get("profile"):
            parts += [f"## Profile of {name}", f"```text\n{profile}\n```"]
    return "\n\n".join(parts) + "\n"


_OTHER = ("constants", "tune", "other sizes")
_LOAD = r" \(load [^)]*\)"


def _text(name: str, row: dict[str, Any]) -> str:
    if row.get("failure"):
        return row["failure"]
    if name == "constants":
        cells = [[what, "-" if a is None else f"{a:.4g}", f"{b:.4g}"] for what, (a, b) in row["constants"].items()]
        return markdown(("constant", "preset", "measured"), cells) + f"\n\n```text\n{row['report']}\n```"
    if name == "other sizes":
        cells = [
            [each["change"], *(f"{each[of] * 1e3:.2f}" for of in ("measured", "preset", "step"))]
            + [f"{each[of] / each['measured']:.2f}" for of in ("preset", "step")]
            for each in row["steps"]
        ]
        columns = ("gpt", "measured, ms", "predicted, ms: preset", "by its step as timed", "ratio", "ratio as timed")
        return markdown(columns, cells) + f"\n\n```text\n{row['report']}\n```"
    return f"```text\n{row['tuning']}\n```\n\n{row['took_s']:.0f} s in all."
