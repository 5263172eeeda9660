"""The ledger of published rows: coverage, ratios and summaries of literal tables."""

import collections
import dataclasses
import math

import pytest

from autopar.hardware.step_errors import ONE_PROGRAM, PIPELINE
from benchmarks.ledger_page import (
    Entry,
    Search,
    Told,
    by_card,
    cells,
    coverage,
    errors_of,
    left_out_interval,
    page,
    told,
)
from benchmarks.published_rows import LEFT_OUT, ROWS

ONE = ROWS["torchtitan 8B on 8 H100"]


def entry(**values):
    return Entry(device="H100", attention="blockwise", search_version=7, made_on="2026-01-02", **values)


def rows(*errors: float, **values) -> list[Told]:
    return [
        Told(row=dataclasses.replace(ONE, name=f"{i} {values}", **values), device="H100", error=error)
        for i, error in enumerate(errors)
    ]


def test_coverage_counts_errors_inside_of_their_intervals():
    found = [(0.1, (0.0, 0.2)), (0.2, (0.0, 0.2)), (0.3, (0.0, 0.2)), (-0.1, (0.0, 0.2)), (0.5, None)]
    assert coverage(found) == (2, 4)


def test_a_rows_interval_is_by_the_errors_of_others():
    found = rows(*[0.1] * 9, 0.9)
    # Of nine equal ones the interval is a point; of eight of them and the far one it reaches as far.
    assert left_out_interval(found[-1], found) == pytest.approx((0.1, 0.1))
    assert left_out_interval(found[0], found) == pytest.approx((-0.7, 0.9))
    assert coverage((one.error, left_out_interval(one, found)) for one in found) == (9, 10)


def test_errors_of_ratios_are_those_of_rows_of_one_release_model_precision_and_card():
    found = [*rows(0.1, 0.3), *rows(0.7, float8=True), *rows(0.5, pp=2), *rows(9.0, compiled=False)]
    found += [dataclasses.replace(one, device="H200") for one in rows(0.2)]
    found += [*rows(0.4, model=dataclasses.replace(ONE.model, layers=1)), *rows(0.6, release="26.06")]
    errors = errors_of(found)
    of_h100 = {ONE_PROGRAM: [0.1, 0.3, 0.7, 0.4, 0.6], PIPELINE: [0.5]}
    assert errors.errors == {"H100": of_h100, "H200": {ONE_PROGRAM: [0.2]}}
    assert errors.ratios == pytest.approx([0.2, 0.2, 0.4])


def test_fitted_and_held_out_rows_are_summed_up_apart():
    found = [*rows(math.log(1 / 1.05), fitted=True), *rows(*(math.log(1 / x) for x in (0.5, 1.08, 0.98)), fitted=False)]
    fitted, held_out, *_ = by_card(found)
    assert fitted == ["H100", ONE_PROGRAM, "fitted", "1", "5.0 %", "1 (100 %)", "1.050", "1.050"]
    assert held_out == ["H100", ONE_PROGRAM, "held out", "3", "8.0 %", "2 (67 %)", "0.500", "0.980"]


def test_a_row_that_is_refused_keeps_its_reason():
    row = ROWS["torchtitan 8B on 8 H100"]
    assert cells(row, entry(why="no plan fits"))[-2:] == ["none", "no plan fits"]
    assert told({row.key: entry(why="no plan fits")}) == []
    assert "no plan fits" in page({row.key: entry(why="no plan fits")})


def test_the_page_names_sources_and_rows_that_are_left_out():
    row = ROWS["megatron-bridge 25.09 8B on 8 H100 FP8"]
    text = page({row.key: entry(step_time_s=row.step_time_s * 1.2, planned_s=3.0)})
    assert f"- megatron-bridge: {row.source}." in text
    assert "held out" in text
    assert "| 1.200 |" in text
    assert "2026-01-02, version 7" in text
    assert all(f"- {name}: {why}" in text for name, why in LEFT_OUT.items())


def test_the_search_stands_beside_the_published_plan():
    made = Search(
        published_plan_s=6.0, step_time_s=4.0, planned_s=9.0, plan="One program", search_version=8,
        made_on="2026-01-03",
    )  # fmt: skip
    text = page({ONE.key: entry(step_time_s=2.0, search=made)})
    assert f"| {ONE.key} | 6.00 s | 4.00 s | 1.500x | One program | 9 s | 2026-01-03, version 8 |" in text
    assert "free search" not in page({ONE.key: entry(step_time_s=2.0)})


def test_at_most_half_of_the_rows_of_2026_of_a_card_are_fitted():
    tables = {"megatron-bridge", "mlperf v5.0", "tpu-recipes", "gpu-recipes"}
    of_card = collections.defaultdict(list)
    for row in ROWS.values():
        if row.table in tables:
            of_card[row.hardware].append(row.fitted)
    assert set(of_card) > {"TPU v6e", "H100"}
    assert all(sum(fitted) <= len(fitted) / 2 for fitted in of_card.values())
    assert all(row.compiled for row in ROWS.values() if row.fitted)
