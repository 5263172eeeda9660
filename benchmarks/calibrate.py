"""Fits the few constants of a kind of device to published steps; errors row by row.

    python -m benchmarks.calibrate                              each kind, from the rows that were evaluated before
    python -m benchmarks.calibrate H100 --evaluate --short      evaluates its rows (minutes each), then fits
    python -m benchmarks.calibrate ... --keep                   also keeps results/calibration.md

A row is planned with the constants of `autopar.hardware.presets`, and once more with each constant a tenth higher. Near
by, the logarithm of its time is linear in those of the constants: least squares of the logarithms of predicted over
published times then give the constants, and once more without each row, which tells what that row would be predicted
as by the others. There must be two rows for each constant. Evaluations are kept in results/calibration.json; what is
fitted is not written anywhere else: put it into `autopar.hardware.presets`, with these rows as its source, and run
benchmarks.ledger again. Rows that are held out are never used.
"""

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from autopar.errors import AutoparError
from benchmarks.ledger import cluster_of, options_of, predicted
from benchmarks.machine import description, markdown
from benchmarks.published_rows import CLUSTERS, ROWS, Row

RESULTS = Path(__file__).parent / "results" / "calibration.md"
EVALUATED = RESULTS.with_suffix(".json")
STEP = 0.1  # by which each constant is raised
ROWS_PER_CONSTANT = 2

# Kind of device (as in `CLUSTERS`) -> the constants that are fitted, by their names in `DeviceKind`.
CONSTANTS: dict[str, tuple[str, ...]] = {
    "A100": ("flops_efficiency.float16",),
    "H100": ("sustained_share",),
    "H100 of 500 W": ("sustained_share", "flops_efficiency.float8"),
    "B200": ("sustained_share",),
    "GB300": ("sustained_share",),
    "TPU": ("sustained_share",),
    "TPU v6e": ("sustained_share",),
    "TPU7x": ("sustained_share",),
}
ROW_COLUMNS = ("row", "published", "predicted", "ratio", "fitted", "without it")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation:
    """A row's predicted seconds under constants, and the slope of their logarithm over that of each constant."""

    constants: dict[str, float]
    seconds: float
    slopes: dict[str, float]
    attention: str
    is_short: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fitted:
    """Constants, and for each row predicted over published time: with these, and with those of all other rows."""

    constants: dict[str, float]
    ratios: tuple[float, ...]
    left_out: tuple[float, ...]


class TooFewRowsError(ValueError):
    """More constants than rows can tell."""


def rows_of(kind: str) -> list[Row]:
    return [row for row in ROWS.values() if CLUSTERS[row.hardware][1] == kind and row.fitted]


def constants_of(row: Row, names: Sequence[str]) -> dict[str, float]:
    """The present values, of the row's device."""
    device = cluster_of(row).device
    values = {}
    for name in names:
        field, _, entry = name.partition(".")
        value = getattr(device, field)
        values[name] = device.flops_share(entry) if entry else value
    return values


def evaluated(row: Row, names: Sequence[str], *, short: bool) -> Evaluation:
    base = constants_of(row, names)
    before_s = predicted(row, short=short, constants=base).step_time_s
    slopes = {}
    for name, value in base.items():
        if name == "flops_efficiency.float8" and not row.float8:
            slopes[name] = 0.0
            continue
        after_s = predicted(row, short=short, constants=base | {name: value * (1 + STEP)}).step_time_s
        slopes[name] = math.log(after_s / before_s) / math.log(1 + STEP)
    return Evaluation(
        constants=base,
        seconds=before_s,
        slopes=slopes,
        attention=options_of(row).get("attention", "as written"),
        is_short=short,
    )


def fit(rows: Sequence[tuple[float, Evaluation]], names: Sequence[str]) -> Fitted:
    """Of (published seconds, evaluation) of each row, all evaluated with the same constants.

    Raises: TooFewRowsError.
    """
    if len(rows) < ROWS_PER_CONSTANT * len(names):
        raise TooFewRowsError(
            f"{len(names)} constants ({', '.join(names)}): expected {ROWS_PER_CONSTANT * len(names)} rows or more, "
            f"got {len(rows)}; evaluate more of them, or fit fewer constants"
        )
    slopes = np.array([[found.slopes[name] for name in names] for _, found in rows])
    off = np.array([math.log(found.seconds / published_s) for published_s, found in rows])

    def change(used: np.ndarray) -> np.ndarray:
        return np.linalg.lstsq(slopes[used], -off[used], rcond=None)[0]

    everything = np.arange(len(rows))
    whole = change(everything)
    left_out = [off[i] + slopes[i] @ change(everything[everything != i]) for i in everything]
    base = rows[0][1].constants
    return Fitted(
        constants={name: base[name] * math.exp(x) for name, x in zip(names, whole, strict=True)},
        ratios=tuple(np.exp(off + slopes @ whole)),
        left_out=tuple(np.exp(left_out)),
    )


def kind_report(kind: str, known: dict[str, Evaluation]) -> list[str]:
    """Lines: the constants, and a table of rows."""
    names = CONSTANTS[kind]
    rows = [(row, known[row.key]) for row in rows_of(kind) if row.key in known]
    lines = [f"## {kind}", ""]
    try:
        found = fit([(row.step_time_s, evaluation) for row, evaluation in rows], names)
    except TooFewRowsError as refused:
        return [*lines, f"Refused: {refused}.", ""]
    present = constants_of(rows[0][0], names)
    for name, value in found.constants.items():
        before = rows[0][1].constants[name]
        lines.append(f"- `{name}`: {before:.3f} when evaluated, {value:.3f} fitted; in the tables {present[name]:.3f}")
    table = [
        [
            row.key + (" (short)" if evaluation.is_short else ""),
            f"{row.step_time_s:.2f} s",
            f"{evaluation.seconds:.2f} s",
            f"{evaluation.seconds / row.step_time_s:.3f}",
            f"{fitted:.3f}",
            f"{left_out:.3f}",
        ]
        for (row, evaluation), fitted, left_out in zip(rows, found.ratios, found.left_out, strict=True)
    ]
    missing = [row.key for row in rows_of(kind) if row.key not in known]
    lines += ["", markdown(ROW_COLUMNS, table), ""]
    return [*lines, f"Not evaluated: {', '.join(missing)}.", ""] if missing else lines


def load() -> dict[str, Evaluation]:
    kept = json.loads(EVALUATED.read_text()) if EVALUATED.exists() else {}
    return {key: Evaluation(**values) for key, values in kept.items() if key in ROWS}


def evaluate(kinds: Sequence[str], parts: Sequence[str], *, short: bool) -> None:
    """Evaluates rows that are not kept yet, or whose constants are others now, one after the other."""
    for row in (row for kind in kinds for row in rows_of(kind)):
        names, known = CONSTANTS[CLUSTERS[row.hardware][1]], load()
        is_known = row.key in known and known[row.key].constants == constants_of(row, names)
        if is_known or (parts and not any(part in row.key for part in parts)):
            continue
        try:
            known[row.key] = evaluated(row, names, short=short)
        except AutoparError as error:
            print(f"{row.key}: {str(error).splitlines()[0]}", flush=True)
            continue
        print(f"{row.key}: {known[row.key].seconds / row.step_time_s:.3f} {known[row.key].slopes}", flush=True)
        values = {key: dataclasses.asdict(found) for key, found in sorted(known.items())}
        EVALUATED.write_text(json.dumps(values, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", help=f"of {', '.join(CONSTANTS)}; all by default")
    parser.add_argument("--evaluate", action="store_true", help="plan the rows that are not kept")
    parser.add_argument("--rows", nargs="+", default=(), help="evaluate only those whose names contain one of these")
    parser.add_argument("--short", action="store_true", help="as of benchmarks.ledger")
    parser.add_argument("--keep", action="store_true", help=f"write {RESULTS.name}")
    arguments = parser.parse_args()
    if unknown := sorted(set(arguments.kinds) - set(CONSTANTS)):
        parser.error(f"no kinds: {', '.join(unknown)}; there are {', '.join(CONSTANTS)}")
    kinds = arguments.kinds or list(CONSTANTS)
    if arguments.evaluate:
        evaluate(kinds, arguments.rows, short=arguments.short)
    print(report(kinds))
    if arguments.keep:  # the page has all kinds, whichever were asked for
        RESULTS.write_text(report(list(CONSTANTS)) + "\n")
    return 0


def report(kinds: Sequence[str]) -> str:
    """The page for some kinds of device."""
    known = load()
    return "\n".join(["# Calibration", "", description(), "", *(line for k in kinds for line in kind_report(k, known))])


if __name__ == "__main__":
    sys.exit(main())
