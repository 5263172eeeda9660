"""The kept rows of the ledger, their errors, and the page.

`results/ledger.json` keeps each row as it was predicted last. From it come `results/ledger.md` and the errors of
`autopar.hardware.step_errors`.
"""

import dataclasses
import itertools
import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from autopar.hardware import step_errors
from autopar.hardware.step_errors import LEAST_ROWS, LEVEL, StepErrors, interval, quantile
from autopar.plan.cache import SEARCH_VERSION
from benchmarks.machine import description, markdown
from benchmarks.published_rows import LEFT_OUT, ROWS, Row

PAGE = Path(__file__).parent / "results" / "ledger.md"
KEPT = PAGE.with_suffix(".json")
GIBIBYTE = 1 << 30
SHORT = (2, 4)  # layers of the models of rows marked (short)
TARGET = 0.10
COLUMNS = (
    "row", "card", "kind", "", "recomputes", "tp x cp x pp x dp", "micro-batches", "attention", "published",
    "predicted", "ratio", "interval", "memory published", "predicted", "planned in", "made",
)  # fmt: skip
SEARCH_COLUMNS = ("row", "published plan", "free search", "factor", "plan of the search", "planned in", "made")
CARD_COLUMNS = ("card", "kind", "", "rows", "median error", "within 10 %", "worst ratio", "median ratio")


ABOUT = (
    "A row is fitted where a constant of its card was fitted to it, or may have been; all others are held out. A ratio "
    "is predicted over published time. Rows keep the day and the search version of their prediction. Published memory "
    "of torchtitan is the memory that PyTorch's allocator had reserved, with logits in float32 for the loss (but for "
    "the H200s, where it is compiled); predicted is the memory that lives at once. Rows may use the memory that the "
    "driver, or the compiler, reports of their devices: the published runs fitted."
)
KNOWN = (
    "B200, GB200 and GB300: Megatron-Bridge's runs became faster, and some slower, from release to release in the same "
    "configuration, which no constant of a card knows: 70B in float8 on 64 GB200 reads 4,040 to 4,357 tokens a second "
    "and card under 25.11 to 26.04.01, on 64 GB300 4,520 to 5,248, 405B on 256 GB200 793 to 864, on 256 GB300 988 to "
    "1,048. The ratios of one prediction lie as far apart. The one row of GB300 beyond 10 % is 70B under 25.11 (0.86): "
    "the same ran 11 % faster under 26.02 and 16 % under 26.02.01; the release's notes name no reason. 405B in float8 "
    "became 6 % faster from 26.02 to 26.06, so that its prediction is 2 to 4 % slow at first and 8 to 10 % at last: "
    "later recipes gather parameters beside the optimizer's step (overlap_param_gather_with_optimizer_step).",
    "MXFP8: scales of blocks of 32 numbers are predicted as those of whole operands. In the sources they cost 2 to 6 % "
    "of 8B and 1 to 10 % of 405B, partly in another layout; these rows come out at 0.92 to 1.03.",
    "405B on 128 GB200 in MXFP8 under 25.09 (0.79): B200 runs the same configuration 8 % faster there (622 tokens a "
    "second and card to 578) over slower links. Later releases have no such run, and the notes name no reason.",
    "405B on 1,024 H100 in float8: 1.08 under 26.02, 1.14 under 26.04.01 and 26.06, which run the same configuration "
    "5 % faster (311, 328 and 326 tokens a second and card).",
    "B200: runs of early 2025 (MLPerf's under NGC 25.04, MaxText's on A4) come out at 0.93 to 0.95. MLPerf's "
    "configurations for GB200 and for H100, which comes out at 0.98 to 1.06, overlap the same products and "
    "collectives, but for the gather of parameters beside the optimizer, which is off on GB200.",
    "GB300: the share of long runs is fitted to 8B and 70B, which want the same (0.955 and 0.954), and lies above "
    "B200's.",
    "405B on TPU7x: the inputs of layers go to the host's memory and come back, 101 GB a device each way, 12.7 s at 16 "
    "GB/s a device, of which the step waits for none: libtpu 0.0.42.1 has such copies run beside computing under the "
    "options of these runs, and under xla_tpu_host_transfer_overlap_limit. The rate is not published: it is half of "
    "v6e's for each of a chip's two devices. The share of long runs of TPU7x (0.864) is fitted to 70B on 64 chips and "
    "to 405B in bfloat16, each of which is predicted within 0.5 % with the share that the other wants, after all six "
    "rows had been seen. AI-Hypercomputer's microbenchmarks have matrix products of 32,768 a side at 956 Tflop/s a "
    "device, 0.83 of the peak, where this share and that of large products come to 0.78.",
    "405B on v6e: the one run there over two slices, and with separate kernels for the gradients of queries and of "
    "keys and values; its copies to the host, 34 GB each way at 32 GB/s, hide behind layers. The reason is not known.",
    "H100, context parallelism over four and eight cards in torchtitan (0.80, 0.78): slower than over two by more than "
    "its rings send; the reason is not known.",
)
BESIDE = "## The free search beside the published plans"
ABOUT_SEARCH = (
    "`python -m benchmarks.ledger ROW --search`: the step of a row on its cluster and in its memory, under its "
    "published plan and by the free search, both with all layers and by one model of costs. Above 1 the search is "
    "faster. Runs of one configuration under other releases have the same search. Rows without a search are not in "
    "the table. `short`: by a line through the published plans of two smaller models, whose memory is not told. With "
    "all layers those of 32B on 64 v5p, 1.7B on 32 A100 and 70B on 64 GB200 and 64 GB300 need more memory than there "
    "is, by the model: 124 GB of 103, 91 of 85, of which 39 are masks of dropout, and of GB200 333 of 192. There the "
    "runs keep activations of 40 and of 20 layers in the hosts' memory, which costs them nothing here; the search "
    "keeps values there too, with their copies. The search of 405B on 128 B200 takes two chunks of stages on a group "
    "of devices, and is 0.8 % slower than the published plan: it is the one that is slower."
)
ABOUT_INTERVALS = (
    f"Each row has its interval of `plan.step_interval_s`, for {10 * LEVEL:.0f} of 10 runs, with its own error left "
    "out: from the errors of its card and kind of step, or of that kind on all cards where there are fewer than "
    f"{LEAST_ROWS}."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Search:
    """The step of a row, of all its layers, on its cluster and in its memory: seconds under the published plan and by
    the free search, in one version; the latter's processor time, and its plan. `published_is_short`: the former of
    models of fewer layers.
    """

    published_plan_s: float
    published_is_short: bool = False
    step_time_s: float
    planned_s: float
    plan: str
    search_version: int
    made_on: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """A row as it was predicted: seconds of a step, and bytes of the fullest device; no bytes of models of fewer
    layers, for where the peak lies depends on their number. `planned_s`: processor time. `why`: the reason for none.
    `search`: the free search beside it.
    """

    device: str
    attention: str
    search_version: int
    made_on: str
    step_time_s: float | None = None
    peak_bytes: float | None = None
    planned_s: float = 0.0
    is_short: bool = False
    why: str = ""
    search: Search | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Told:
    """A row that has a prediction. `error`: logarithm of published over predicted time."""

    row: Row
    device: str
    error: float

    @property
    def mark(self) -> str:
        return "fitted" if self.row.fitted else "held out"

    @property
    def ratio(self) -> float:
        """Predicted over published time."""
        return math.exp(-self.error)


def load() -> dict[str, Entry]:
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    return {
        key: Entry(**values | {"search": Search(**values["search"]) if values.get("search") else None})
        for key, values in kept.items()
        if key in ROWS
    }


def save(kept: Mapping[str, Entry]) -> None:
    """Writes the kept rows, the page, and the errors of the package."""
    in_order = {key: kept[key] for key in ROWS if key in kept}
    KEPT.write_text(json.dumps({key: dataclasses.asdict(entry) for key, entry in in_order.items()}, indent=1) + "\n")
    errors = errors_of(told(in_order))
    step_errors.TABLE.write_bytes(msgspec.json.format(msgspec.json.encode(errors), indent=1) + b"\n")
    PAGE.write_text(page(in_order))


def told(kept: Mapping[str, Entry]) -> list[Told]:
    """The rows that have a prediction."""
    return [
        Told(row=ROWS[key], device=entry.device, error=math.log(ROWS[key].step_time_s / entry.step_time_s))
        for key, entry in kept.items()
        if entry.step_time_s is not None
    ]


def _shared(one: Told) -> tuple[object, ...]:
    """Two rows that share these differ as two plans of a step do."""
    row = one.row
    return one.device, row.table, row.release, row.model, row.float8, row.block_scales


def errors_of(found: Sequence[Told]) -> StepErrors:
    """The errors by device and kind of step, and those of ratios: of two rows of one table, release, model, precision
    and device, for two plans too run under one system. Rows of eager programs are left out: they are predicted as
    compiled.
    """
    compiled = [one for one in found if one.row.compiled]
    errors: dict[str, dict[str, list[float]]] = {}
    for one in compiled:
        errors.setdefault(one.device, {}).setdefault(one.row.kind, []).append(round(one.error, 4))
    ratios = [
        round(abs(one.error - other.error), 4)
        for one, other in itertools.combinations(compiled, 2)
        if _shared(one) == _shared(other)
    ]
    return StepErrors(errors=errors, ratios=sorted(ratios))


def left_out_interval(one: Told, found: Sequence[Told]) -> tuple[float, float] | None:
    """The interval of a row's error by the errors of all others."""
    others = errors_of([other for other in found if other.row.key != one.row.key])
    return interval(others.like(one.device, one.row.kind))


def coverage(errors: Iterable[tuple[float, tuple[float, float] | None]]) -> tuple[int, int]:
    """(errors inside of their intervals, errors that have one)."""
    inside = [between[0] <= error <= between[1] for error, between in errors if between is not None]
    return sum(inside), len(inside)


def cells(row: Row, entry: Entry, between: tuple[float, float] | None = None) -> list[str]:
    """A row of the page; `between`: the interval of its error."""
    shown = [
        row.key,
        entry.device,
        row.kind,
        "fitted" if row.fitted else "held out",
        row.recompute,
        f"{row.tp} x {row.cp} x {row.pp} x {row.dp}",
        f"{row.num_microbatches} of {row.micro_batch}",
        entry.attention,
        f"{row.step_time_s:.2f} s",
    ]
    if entry.step_time_s is None:
        return [*shown, "none", entry.why]
    ends = () if between is None else tuple(f"{entry.step_time_s * math.exp(end):.3g}" for end in between)
    return [
        *shown,
        f"{entry.step_time_s:.2f} s",
        f"{entry.step_time_s / row.step_time_s:.3f}",
        f"{' to '.join(ends)} s" if ends else "",
        f"{row.memory_gib:.0f} GiB" if row.memory_gib else "",
        "" if entry.peak_bytes is None else f"{entry.peak_bytes / GIBIBYTE:.0f} GiB",
        f"{entry.planned_s:.0f} s" + (" (short)" if entry.is_short else ""),
        f"{entry.made_on}, version {entry.search_version}",
    ]


def _beside(key: str, search: Search) -> list[str]:
    return [
        key,
        f"{search.published_plan_s:.2f} s" + (" (short)" if search.published_is_short else ""),
        f"{search.step_time_s:.2f} s",
        f"{search.published_plan_s / search.step_time_s:.3f}x",
        search.plan,
        f"{search.planned_s:.0f} s",
        f"{search.made_on}, version {search.search_version}",
    ]


def _summary(found: Sequence[Told]) -> list[str]:
    """Number, median error, share within the target, worst and median of the ratios."""
    ratios = [one.ratio for one in found]
    errors = [abs(ratio - 1) for ratio in ratios]
    within = sum(error <= TARGET for error in errors)
    return [
        str(len(found)),
        f"{statistics.median(errors):.1%}".replace("%", " %"),
        f"{within} ({within / len(found):.0%})".replace("%", " %"),
        f"{max(ratios, key=lambda ratio: abs(math.log(ratio))):.3f}",
        f"{statistics.median(ratios):.3f}",
    ]


def by_card(found: Sequence[Told]) -> list[list[str]]:
    """The summaries by card, kind and mark, then those of all cards."""
    cards = dict.fromkeys(one.device for one in found)
    lines = [
        [card, kind, mark, *_summary(same)]
        for card in cards
        for kind in (step_errors.ONE_PROGRAM, step_errors.PIPELINE, "all")
        for mark in ("fitted", "held out")
        if (same := [o for o in found if (o.device, o.mark) == (card, mark) and kind in (o.row.kind, "all")])
        and (kind != "all" or len({o.row.kind for o in same}) > 1)
    ]
    total = [
        ["all cards", kind, mark, *_summary(same)]
        for kind in (step_errors.ONE_PROGRAM, step_errors.PIPELINE, "all")
        for mark in ("fitted", "held out")
        if (same := [one for one in found if one.mark == mark and kind in (one.row.kind, "all")])
    ]
    return lines + total


def _coverage_lines(found: Sequence[Told]) -> list[list[str]]:
    lines = []
    for mark in ("held out", "fitted"):
        for card in (*dict.fromkeys(one.device for one in found), "all cards"):
            same = [one for one in found if one.mark == mark and card in (one.device, "all cards")]
            inside, count = coverage((one.error, left_out_interval(one, found)) for one in same)
            if count:
                lines.append([mark, card, f"{inside} of {count}", f"{inside / count:.0%}".replace("%", " %")])
    return lines


def page(kept: Mapping[str, Entry]) -> str:
    """The whole page."""
    found = told(kept)
    between = {one.row.key: left_out_interval(one, found) for one in found}
    width = quantile(errors_of(found).ratios)
    resolved = "none" if width is None else f"{math.exp(width) - 1:.0%}".replace("%", " %")
    sources = dict.fromkeys((ROWS[key].table, ROWS[key].source) for key in kept)
    notes = {ROWS[key].note: [k for k in kept if ROWS[k].note == ROWS[key].note] for key in kept if ROWS[key].note}
    beside = [_beside(key, entry.search) for key, entry in kept.items() if entry.search is not None]
    missing = [f"- {key}: not predicted yet." for key in ROWS if key not in kept]
    parts = [
        "# Ledger of published step times",
        f"Written by `python -m benchmarks.ledger --keep`, search version {SEARCH_VERSION}: {description()}",
        f"{ABOUT} Rows marked (short) come from models of {SHORT[0]} and {SHORT[1]} layers.",
        "## By card and kind of step",
        markdown(CARD_COLUMNS, by_card(found)),
        "## Intervals",
        f"{ABOUT_INTERVALS} Two rows of one source, release, model, precision and card differ in their errors by "
        f"less than {resolved} in nine of ten of {len(errors_of(found).ratios)} pairs: `bench` calls ways within it "
        "equal within the error.",
        markdown(("rows", "card", "inside", "share"), _coverage_lines(found)),
        "## Reasons of errors",
        "\n".join(f"- {known}" for known in KNOWN),
        "## Rows",
        markdown(COLUMNS, [cells(ROWS[key], entry, between.get(key)) for key, entry in kept.items()]),
        *((BESIDE, ABOUT_SEARCH, markdown(SEARCH_COLUMNS, beside)) if beside else ()),
        "## Sources",
        "\n".join(f"- {table}: {source}." for table, source in sources),
        "## Notes on rows",
        "\n".join(f"- {', '.join(keys)}: {note}." for note, keys in notes.items()),
        "## Rows left out",
        "\n".join([*(f"- {name}: {why}" for name, why in LEFT_OUT.items()), *missing]),
    ]
    return "\n\n".join(parts) + "\n"
