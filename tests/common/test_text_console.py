"""Plans and reports as text are the same in a notebook, where rich shows what is printed instead of writing it."""

import contextlib
import io

import pytest
from rich.table import Table

import autopar
from autopar.common.text_console import text_console
from tests.small_steps import MLP_BATCH, MLP_STATE, mlp_step


@pytest.fixture
def in_notebook(monkeypatch):
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)


def test_text_lands_in_the_buffer(in_notebook):
    table = Table(box=None, pad_edge=False)
    table.add_column("what")
    table.add_row("this")
    buffer = io.StringIO()
    text_console(buffer, 20).print(table)
    assert buffer.getvalue().split() == ["what", "this"]


def test_a_plan_is_the_same_text_in_a_notebook(monkeypatch):
    plan = autopar.plan(mlp_step, MLP_STATE, MLP_BATCH, cluster="dgx-h100", effort="quick", show_progress=False)
    texts = str(plan), plan.table(), str(plan.why_not(autopar.recipes.data_parallel()))
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        assert texts == (str(plan), plan.table(), str(plan.why_not(autopar.recipes.data_parallel())))
    assert shown.getvalue() == ""
