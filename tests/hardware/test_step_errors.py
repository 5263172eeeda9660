"""Intervals of step times: the jackknife by brute force, the errors that are taken, and where a plan shows them."""

import dataclasses
import itertools
import math
import statistics

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.common.text import text_of_interval_s
from autopar.hardware import presets, step_errors
from autopar.hardware.step_errors import LEAST_ROWS, ONE_PROGRAM, PIPELINE, StepErrors, interval, quantile
from autopar.hardware.step_errors import step_interval_s as interval_s
from benchmarks.ledger_page import errors_of, load, told

OPTIONS = {"cache_dir": None}
STATE, BATCH = jax.ShapeDtypeStruct((64, 64), jnp.float32), jax.ShapeDtypeStruct((64, 64), jnp.float32)


def step(w, x):
    return w - 0.1 * jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)


def test_the_interval_is_the_jackknifes():
    errors = [0.31, -0.12, 0.05, 0.02, -0.03, 0.11, 0.4, -0.2, 0.07, 0.01, 0.15]
    distances = []
    for i, error in enumerate(errors):
        others = sorted(errors[:i] + errors[i + 1 :])
        distances.append(abs(error - (others[4] + others[5]) / 2))
    # The first distance that at least nine tenths of 12 ranks reach: the 11th of 11.
    assert interval(errors) == pytest.approx((0.05 - max(distances), 0.05 + max(distances)))
    assert statistics.median(errors) == 0.05


def test_nine_of_ten_of_equally_likely_ranks_lie_below_the_quantile():
    for count in (9, 19, 29, 100):
        value = quantile(list(range(1, count + 1)))
        assert (value - 1) / (count + 1) < 0.9 <= value / (count + 1)
    assert quantile(range(8)) is None


def test_few_errors_have_no_interval():
    assert interval([0.1] * (LEAST_ROWS - 1)) is None
    assert interval([0.1] * LEAST_ROWS) == pytest.approx((0.1, 0.1))


def test_a_card_of_few_rows_has_the_errors_of_all_cards_of_that_kind():
    table = StepErrors(
        errors={"A": {ONE_PROGRAM: [0.1] * 9, PIPELINE: [0.2]}, "B": {ONE_PROGRAM: [0.3] * 8, PIPELINE: [0.4]}},
        ratios=[],
    )
    assert table.like("A", ONE_PROGRAM) == [0.1] * 9
    assert table.like("B", ONE_PROGRAM) == table.like("none", ONE_PROGRAM) == [0.1] * 9 + [0.3] * 8
    assert table.like("A", PIPELINE) == [0.2, 0.4]


def test_the_table_of_the_package_is_that_of_the_kept_rows():
    assert errors_of(told(load())) == step_errors.kept()


def test_every_accelerator_has_an_interval_and_a_cpu_none():
    for device, kind in itertools.product((presets.H100, presets.TPU_V6E, presets.MI300X), (ONE_PROGRAM, PIPELINE)):
        low, high = interval_s(2.0, device, kind)
        assert 0.5 < low < high < 8
    assert interval_s(2.0, presets.cpu_device(num_devices=1, cores=1, host_bytes=1 << 30), ONE_PROGRAM) is None


@pytest.mark.parametrize(
    ("ends_s", "text"),
    [
        ((1.94, 2.449), "1.9 to 2.4 s"),
        ((0.96, 1.2), "960 ms to 1.2 s"),
        ((11.9, 15.2), "12 to 15 s"),
        ((1, 2), "1 to 2 s"),
    ],
)
def test_intervals_have_two_digits_and_one_unit(ends_s, text):
    assert text_of_interval_s(ends_s) == text


def test_plans_show_the_interval(tmp_path):
    plan = autopar.plan(step, STATE, BATCH, cluster="dgx-h100", **OPTIONS)
    low, high = plan.step_interval_s
    least, most = interval(step_errors.kept().like(presets.H100.name, ONE_PROGRAM))
    assert math.log(low / plan.predicted.step_time_s) == pytest.approx(least)
    assert math.log(high / plan.predicted.step_time_s) == pytest.approx(most)
    text = text_of_interval_s((low, high))
    assert f"predicted ({text}); peak" in str(plan)
    assert f"predicted ({text}): compute" in plan.table()
    plan.report(tmp_path / "plan.html")
    assert f"({text}) in nine of ten runs" in (tmp_path / "plan.html").read_text()
    assert plan.to_dict()["summary"]["step_interval_s"] == (low, high)


def test_plans_of_cpus_and_of_measured_constants_have_none():
    assert autopar.plan(step, STATE, BATCH, cluster="local:1", **OPTIONS).step_interval_s is None
    plan = autopar.plan(step, STATE, BATCH, cluster="dgx-h100", **OPTIONS)
    fit = autopar.hardware.measurement.FitQuality(
        **{f.name: 0 for f in dataclasses.fields(autopar.hardware.measurement.FitQuality)}
    )
    measured = dataclasses.replace(plan.record, cluster=dataclasses.replace(plan.cluster, fits=(fit,)))
    assert measured.step_interval_s is None


def test_the_interval_is_no_part_of_a_plan(tmp_path, monkeypatch):
    plan = autopar.plan(step, STATE, BATCH, cluster="dgx-h100", **OPTIONS)
    plan.save(tmp_path / "plan.json")
    before = (tmp_path / "plan.json").read_bytes()
    other = StepErrors(errors={}, ratios=[])
    monkeypatch.setattr(step_errors, "kept", lambda: other)
    assert plan.step_interval_s is None
    plan.save(tmp_path / "plan.json")
    assert (tmp_path / "plan.json").read_bytes() == before
    assert autopar.Plan.load(tmp_path / "plan.json").record == plan.record
