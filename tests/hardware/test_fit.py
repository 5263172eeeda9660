"""Constants found again in timings that were made from them."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.errors import InvalidArgumentError
from autopar.hardware.collective_cost import PLANNED_KINDS, CollectiveKind, Fabric, Link, SwitchDetail, time_s
from autopar.hardware.fit import Timing, fit_link, fit_rate

SIZES = [2.0**power for power in range(10, 31, 2)]


def timings_of(link: Link, counts: tuple[int, ...] = (2, 4, 8)) -> list[Timing]:
    return [
        Timing(kind=kind, result_bytes=size, n=n, seconds=float(time_s(kind, size, n, link)))
        for kind in PLANNED_KINDS
        for n in counts
        for size in SIZES
    ]


@pytest.mark.cases(1)
@pytest.mark.parametrize("fabric", Fabric)
@settings(deadline=None, derandomize=True, max_examples=40)
@given(overhead_us=st.floats(1, 100), latency_us=st.floats(0.5, 20), gb_per_s=st.floats(1, 900))
def test_the_constants_of_a_link_are_found_again(fabric, overhead_us, latency_us, gb_per_s):
    link = Link(
        overhead_s=overhead_us * 1e-6,
        latency_s=latency_us * 1e-6,
        bytes_per_s=gb_per_s * 1e9,
        fabric=fabric,
        source="test",
    )
    fit = fit_link(timings_of(link), fabric=fabric, source="fitted")
    assert fit.link.overhead_s == pytest.approx(link.overhead_s, rel=1e-4)
    assert fit.link.latency_s == pytest.approx(link.latency_s, rel=1e-4)
    assert fit.link.bytes_per_s == pytest.approx(link.bytes_per_s, rel=1e-4)
    assert (fit.link.fabric, fit.link.source) == (fabric, "fitted")
    assert fit.median_error < 1e-6
    assert fit.link.detail is None  # nothing that the timings do not show


@pytest.mark.slow
@settings(deadline=None, derandomize=True, max_examples=40)
@given(kept_gb_per_s=st.floats(100, 1000), tree_us=st.floats(6, 20), pair_gb_per_s=st.floats(5, 50))
def test_the_detail_of_a_switched_link_is_found_again(kept_gb_per_s, tree_us, pair_gb_per_s):
    detail = SwitchDetail(
        kept_bytes_per_s=kept_gb_per_s * 1e9,
        switch_bytes_per_s=150e9,  # a ring of 8 reaches 200 / 1.75 = 114
        tree_latency_s=tree_us * 1e-6,
        pair_bytes_per_s=pair_gb_per_s * 1e9,
        pair_ramp_s=1e-3,
    )
    link = Link(overhead_s=2e-5, latency_s=3e-6, bytes_per_s=200e9, source="test", detail=detail)
    fit = fit_link(timings_of(link, (2, 4, 8, 16, 64)), fabric=Fabric.SWITCHED, source="test")
    assert fit.median_error < 1e-6
    assert fit.link.bytes_per_s == pytest.approx(200e9, rel=1e-4)
    for name in ("kept_bytes_per_s", "switch_bytes_per_s", "tree_latency_s", "pair_bytes_per_s", "pair_ramp_s"):
        assert getattr(fit.link.detail, name) == pytest.approx(getattr(detail, name), rel=1e-4), name


@pytest.mark.cases(10)
@pytest.mark.parametrize("seed", range(20))  # about one seed in 40 moves a constant by more
def test_noise_of_a_tenth_moves_the_constants_by_less(seed):
    link = Link(overhead_s=2e-5, latency_s=3e-6, bytes_per_s=2e11, source="test")
    noise = np.exp(np.random.default_rng(seed).normal(0.0, 0.1, len(timings_of(link))))
    noisy = [dataclasses.replace(t, seconds=t.seconds * f) for t, f in zip(timings_of(link), noise, strict=True)]
    fit = fit_link(noisy, fabric=Fabric.SWITCHED, source="test")
    for kind in PLANNED_KINDS:
        for size in (1e4, 1e7, 1e9):
            assert time_s(kind, size, 8, fit.link) == pytest.approx(float(time_s(kind, size, 8, link)), rel=0.1)


def test_outliers_are_left_alone_and_the_worst_is_named():
    link = Link(overhead_s=2e-5, latency_s=3e-6, bytes_per_s=2e11, source="test")
    timings = timings_of(link)
    for i in range(0, len(timings), 5):  # every fifth took four times as long
        timings[i] = dataclasses.replace(timings[i], seconds=4 * timings[i].seconds)
    late = Timing(kind=CollectiveKind.ALL_GATHER, result_bytes=1e6, n=8, seconds=1.0)
    fit = fit_link([*timings, late], fabric=Fabric.SWITCHED, source="test")
    assert fit.link.bytes_per_s == pytest.approx(2e11, rel=1e-4)
    assert fit.link.latency_s == pytest.approx(3e-6, rel=1e-4)
    assert fit.worst[0] == late
    assert fit.worst[1] == pytest.approx(float(time_s(late.kind, 1e6, 8, link)), rel=1e-4)  # of one second


def test_one_kind_over_one_number_of_devices_gives_its_own_times_back():
    link = Link(overhead_s=2e-5, latency_s=3e-6, bytes_per_s=2e11, source="test")
    timings = [t for t in timings_of(link) if t.kind is CollectiveKind.ALL_GATHER and t.n == 4]
    assert fit_link(timings, fabric=Fabric.SWITCHED, source="test").median_error < 1e-6


def test_a_link_always_takes_time_to_send():
    """Times that follow the part kept, S / n, leave nothing to the parts sent: that is no link."""
    timings = [
        Timing(kind=CollectiveKind.ALL_GATHER, result_bytes=size, n=n, seconds=2e-5 + size / n / 1e11)
        for n in (2, 4, 8)
        for size in SIZES
    ]
    link = fit_link(timings, fabric=Fabric.SWITCHED, source="test").link
    assert 1e10 < link.bytes_per_s < 1e12


@settings(deadline=None, derandomize=True, max_examples=40)
@given(overhead_us=st.floats(0.1, 100), rate=st.floats(1e9, 1e15))
def test_overhead_and_rate_are_found_again(overhead_us, rate):
    # work of a tenth to a thousand times what the rate does in the overhead
    points = [(factor * overhead_us * 1e-6 * rate, overhead_us * 1e-6 * (1 + factor)) for factor in (0.1, 1, 30, 1000)]
    fit = fit_rate(points)
    assert fit.overhead_s == pytest.approx(overhead_us * 1e-6, rel=1e-4)
    assert fit.rate_per_s == pytest.approx(rate, rel=1e-4)
    assert fit.median_error < 1e-6


def test_a_rate_without_overhead_has_none_below_zero():
    fit = fit_rate([(1e6, 0.9e-3), (2e6, 2e-3), (4e6, 4e-3), (8e6, 8e-3)])  # a line through them starts below zero
    assert fit.overhead_s == 0.0
    assert fit.rate_per_s == pytest.approx(1e9)
    assert fit.worst == ((1e6, 0.9e-3), pytest.approx(1 / 0.9))


ONE = Timing(kind=CollectiveKind.ALL_REDUCE, result_bytes=1e6, n=1, seconds=1e-5)
STILL = Timing(kind=CollectiveKind.ALL_REDUCE, result_bytes=1e6, n=2, seconds=0.0)
EMPTY = Timing(kind=CollectiveKind.ALL_REDUCE, result_bytes=0.0, n=2, seconds=1e-5)


@pytest.mark.parametrize(
    ("timings", "message"),
    [
        ([], "got none"),
        ([ONE], "two devices or more"),
        ([STILL], "that took time"),
        ([EMPTY], "times that grow with the size"),
    ],
)
def test_timings_that_tell_nothing_are_refused(timings, message):
    with pytest.raises(InvalidArgumentError, match=message):
        fit_link(timings, fabric=Fabric.SWITCHED, source="test")


@pytest.mark.parametrize(
    ("points", "message"),
    [
        ([(1.0, 1.0)], "two different amounts of work"),
        ([(1.0, 0.0), (2.0, 1.0)], "that took time"),
        ([(1.0, 2.0), (100.0, 1.0)], "grow with the work"),
    ],
)
def test_points_that_tell_nothing_are_refused(points, message):
    with pytest.raises(InvalidArgumentError, match=message):
        fit_rate(points)
