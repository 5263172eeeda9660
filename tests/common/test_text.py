"""Quantities as text; text follows the terminal, and is the same in a notebook, where rich shows what is printed."""

import contextlib
import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import termios

import pytest
from rich.table import Table

import autopar
from autopar.common.text import (
    TextConsole,
    TextFormat,
    bytes_of_text,
    text_of_bytes,
    text_of_flops,
    text_of_rate,
    text_of_s,
)
from tests.small_steps import MLP_BATCH, MLP_STATE, TIMEOUT_S, mlp_step


@pytest.fixture
def in_notebook(monkeypatch):
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)


def test_text_lands_in_the_buffer(in_notebook):
    table = Table(box=None, pad_edge=False)
    table.add_column("what")
    table.add_row("this")
    console = TextConsole(20)
    console.table(table)
    assert console.text().split() == ["what", "this"]


def test_a_plan_is_the_same_text_in_a_notebook(monkeypatch):
    plan = autopar.plan(
        mlp_step, MLP_STATE, MLP_BATCH, cluster="dgx-h100", search=autopar.Search(effort="quick", show_progress=False)
    )
    texts = str(plan), plan.table(), str(plan.why_not(autopar.recipes.data_parallel()))
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        assert texts == (str(plan), plan.table(), str(plan.why_not(autopar.recipes.data_parallel())))
    assert shown.getvalue() == ""


class Stream(io.StringIO):
    """A stream that is a terminal, of a width that it does not tell, or is none."""

    def __init__(self, is_terminal):
        super().__init__()
        self.is_terminal = is_terminal

    def isatty(self):
        return self.is_terminal


@pytest.mark.parametrize(
    ("is_terminal", "environment", "columns", "color"),
    [
        (False, {}, None, False),
        (True, {}, None, True),
        (True, {"NO_COLOR": "1"}, None, False),
        (True, {"NO_COLOR": ""}, None, True),
        (True, {"TERM": "dumb"}, None, False),
        (False, {"FORCE_COLOR": "1"}, None, True),
        (False, {"FORCE_COLOR": ""}, None, False),
        (True, {"FORCE_COLOR": "1", "NO_COLOR": "1"}, None, False),
        (True, {"FORCE_COLOR": "1", "TERM": "dumb"}, None, True),
        (False, {"COLUMNS": "70"}, 70, False),
        (False, {"COLUMNS": "many"}, None, False),
        (True, {"COLUMNS": "0"}, None, True),
        (True, {"COLUMNS": "7"}, 40, True),
    ],
)
def test_width_and_colours_are_those_of_the_stream(is_terminal, environment, columns, color):
    assert TextFormat.of_stream(Stream(is_terminal), environment) == TextFormat(columns=columns, color=color)


def table_of(*rows):
    table = Table("name", "what it holds", "n")
    for row in rows:
        table.add_row(*row)
    return table


def set_in(columns, *rows):
    console = TextConsole(100, TextFormat(columns=columns))
    console.table(table_of(*rows))
    return console.text().splitlines()


def test_a_narrow_table_breaks_between_words_and_at_last_becomes_records():
    row = ("a_long_name", "several short words that fill a line", "12")
    assert len(set_in(None, row)) == len(set_in(60, row)) == 5
    (broken,) = [line for line in set_in(40, row) if "a_long_name" in line]
    assert "│ several short" in broken
    assert max(map(len, set_in(40, row))) == 40
    assert set_in(29, row) == [
        "name a_long_name",
        "  what it holds  several",
        "                 short words",
        "                 that fill a",
        "                 line",
        "  n              12",
    ]


VERBS = """
import os
from autopar.__main__ import main

# The second time without colours, and with more than fits beside each other.
for options in ([], ["--table"]):
    main(["plan", {job!r}, "--cluster", "dgx-h100", "--effort", "quick", "--save", {plan!r}, *options])
    os.environ["NO_COLOR"] = "1"
main(["explain", {plan!r}, "w"])
main(["doctor"])
"""
JOB = """
from tests.small_steps import MLP_BATCH, MLP_STATE, mlp_step

def job():
    return mlp_step, MLP_STATE, MLP_BATCH
"""


def in_terminal(command, columns):
    """What a command writes to a terminal of so many columns."""
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "NO_COLOR", "FORCE_COLOR")}
    environment |= {"TERM": "xterm", "PYTHONPATH": os.pathsep.join(sys.path), "JAX_PLATFORMS": "cpu"}
    process = subprocess.Popen(command, stdout=its, stderr=subprocess.DEVNULL, env=environment)
    os.close(its)
    written = b""
    with contextlib.suppress(OSError):  # the other end is closed
        while part := os.read(ours, 65536):
            written += part
    os.close(ours)
    assert process.wait(TIMEOUT_S) == 0
    return written.decode().replace("\r\n", "\n")


@pytest.mark.slow
def test_the_command_line_follows_the_terminal(tmp_path):
    job, plan = tmp_path / "job.py", str(tmp_path / "plan.json")
    job.write_text(JOB)
    code = VERBS.format(job=f"{job}:job", plan=plan)
    coloured, _, plain = in_terminal([sys.executable, "-c", code], 60).partition("Plan of mlp_step on dgx-h100: 8")
    assert "\x1b[1m" in coloured
    assert "\x1b" not in plain
    lines = re.sub(r"\x1b\[[\d;]*m", "", coloured).splitlines() + plain.splitlines()
    assert max(map(len, lines)) <= 60
    words = " ".join(plain.split())
    assert "predictions use tables of constants, not these devices" in words
    assert "MFU" in words


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
