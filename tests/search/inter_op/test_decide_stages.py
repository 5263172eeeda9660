"""Choices of stages in a few words."""

import pytest

from autopar.ir.layout import LogicalMesh
from autopar.search.inter_op.decide_stages import StageChoice

PAIR, FOUR = LogicalMesh(axis_sizes=(2,)), LogicalMesh(axis_sizes=(2, 2))


@pytest.mark.parametrize(
    ("meshes", "policies", "m", "text"),
    [
        ((PAIR,), ("nothing",), 1, f"mesh {PAIR}"),
        ((PAIR,), ("input", "matmuls"), 4, f"4 micro-batches, mesh {PAIR}, recompute input and matmuls"),
        (
            (PAIR, PAIR),
            ("nothing", "input"),
            2,
            f"2 micro-batches, 2 stages on meshes {PAIR}, 1f1b, recompute input",
        ),
        ((PAIR, PAIR, FOUR), ("nothing",) * 3, 1, f"3 stages on meshes 2 of {PAIR}, 1 of {FOUR}, 1f1b"),
    ],
)
def test_a_choice_in_words(meshes, policies, m, text):
    choice = StageChoice(
        schedule="1f1b",
        chunks=1,
        first_layers=tuple(range(len(meshes))),
        group_meshes=meshes,
        policies=policies,
    )
    assert choice.text(m) == text
