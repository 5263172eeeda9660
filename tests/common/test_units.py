"""Quantities as text."""

import pytest

from autopar.common.text import bytes_of_text, text_of_bytes, text_of_flops, text_of_rate, text_of_s


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"), (0.4, "0.4 B"), (999, "999 B"), (1000, "1 kB"), (412e6, "412 MB"), (83.24e9, "83.2 GB"),
        (999_499, "999 kB"), (999_960, "1 MB"), (1.5e12, "1.5 TB"), (2.504e15, "2500 TB"), (-3.2e9, "-3.2 GB"),
    ],
)  # fmt: skip
def test_bytes(nbytes, text):
    assert text_of_bytes(nbytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (2e-9, "2 ns"),
        (8.76e-6, "8.76 us"),
        (0.0009999, "1 ms"),
        (0.5, "500 ms"),
        (5400, "5400 s"),
        (1e-15, "0 s"),
        (-1e-17, "0 s"),
    ],
)
def test_seconds(seconds, text):
    assert text_of_s(seconds) == text


def test_arithmetic():
    assert text_of_flops(3.561e15) == "3.56 PFLOP"
    assert text_of_flops(0) == "0 FLOP"


def test_rates():
    assert text_of_rate(30e9, "flop") == "30 Gflop/s"
    assert text_of_rate(25e9 / 8, "B") == "3.12 GB/s"
    assert text_of_rate(7, "step") == "7 step/s"


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("80GB", 80_000_000_000),
        ("16GiB", 16 * 2**30),
        ("1.5 MB", 1_500_000),
        ("2k", 2000),
        ("1000000", 1_000_000),
        ("7 B", 7),
        ("0GB", 0),
        ("GB", None),
        ("-1GB", None),
        ("80 gigabytes", None),
        ("8iB", None),
    ],
)
def test_sizes_that_people_write(text, nbytes):
    assert bytes_of_text(text) == nbytes
