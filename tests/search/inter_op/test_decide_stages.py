"""Choices of stages in a few words, and their decisions where memory is short."""

import math
from types import SimpleNamespace

import pytest

from autopar.ir.layout import LogicalMesh
from autopar.search.inter_op.decide_stages import BuildLimits, StageChoice, fit_stages
from autopar.search.intra_op.ilp import ObjectiveWeights
from autopar.search.intra_op.memory_prices import FIRST_PRICE, PRICE_RISE

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


def fitted(peak_bytes, **limits):
    """(the decisions that are taken, those that are simulated in turn, the peaks of the rounds), of one stage whose
    decisions under the nth price have the number n and need `peak_bytes[n]` of 100; `limits`: of `BuildLimits`.
    """
    first_price, seen = FIRST_PRICE / 100, []

    def decide(terms):
        rises = round(math.log(max(terms[0].s_per_byte / first_price, 1), PRICE_RISE))
        number = (terms[0].s_per_byte > 0) + (terms[0].in_flight > 0) + rises
        return [(number, SimpleNamespace(report=SimpleNamespace(objective_s=1.0)))]

    def simulated(decisions):
        ((number, _),) = decisions
        seen.append(number)
        return SimpleNamespace(number=number, step_time_s=1.0 + number, peak_bytes=(peak_bytes[number],))

    pipeline, rounds = fit_stages(
        StageChoice(schedule="1f1b", chunks=1, first_layers=(0,), group_meshes=(PAIR,), policies=("nothing",)),
        SimpleNamespace(mesh_of_stage=(0,), in_flight=(1,), chunks=1),
        SimpleNamespace(decide=decide, cannot_fit=lambda *_: False),
        [ObjectiveWeights(s_per_byte=0.0, exposed_fraction=1.0)],
        BuildLimits(limit_bytes=100, time_limit_s=1.0, **limits),
        simulated,
    )
    return pipeline.number, seen, [each.peak_bytes[0] for each in rounds]


@pytest.mark.parametrize(
    ("peak_bytes", "limits", "found"),
    [
        ([90], {}, (0, [0], [90])),
        ([150, 130, 90], {}, (2, [0, 1, 2], [150, 130, 90])),
        # The highest price says that one of those between may do: the lowest that does, whose rounds are kept.
        ([150, 140, 130, 120, 90, 80, 70], {}, (4, [0, 1, 2, 6, 3, 4], [150, 140, 130, 120, 90])),
        # It says that none does.
        ([150, 140, 130, 120, 118, 117, 116], {}, (6, [0, 1, 2, 6], [150, 140, 130, 116])),
        ([150, 90], {"most_bytes": 140}, (0, [0], [150])),
        ([150, 90], {"to_beat_s": 1.0}, (0, [0], [150])),
        ([150, 90], {"decides_again": False}, (0, [0], [150])),
    ],
)
def test_what_exceeds_the_memory_is_decided_under_rising_prices(peak_bytes, limits, found):
    assert fitted(peak_bytes, **limits) == found
