"""Choices of stages in a few words, and the prices of memory under which they fit."""

from types import SimpleNamespace

import pytest

from autopar.inter_op.decide_stages import BuildLimits, StageChoice, fit_stages
from autopar.intra_op.ilp import ObjectiveWeights
from autopar.intra_op.memory_prices import FIRST_PRICE
from autopar.ir.layout import LogicalMesh

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


@pytest.mark.parametrize(
    ("fits_from", "peak_error", "weighed"),
    [(0, 0.0, [0]), (4, 0.0, [0, 256, 1, 1, 4]), (300, 0.0, [0, 256]), (300, 0.2, [0, 256, 1, 1, 4, 16, 64, 256])],
    ids=["at once", "at the third price", "at none", "at none, as an estimate says"],
)
def test_the_last_price_is_tried_before_those_between(fits_from, peak_error, weighed):
    """One stage of 110 bytes fits into 100 from some multiple of the first price on."""
    first_price, prices = FIRST_PRICE / 100, []

    def decide(terms):
        price = terms[0].s_per_byte
        return [((price, terms[0].in_flight), SimpleNamespace(price=price, report=SimpleNamespace(objective_s=1.0)))]

    def simulated(decisions):
        ((_, plan),) = decisions
        prices.append(round(plan.price / first_price))
        return SimpleNamespace(step_time_s=1.0, peak_bytes=(90 if prices[-1] >= fits_from else 110,))

    found, rounds = fit_stages(
        StageChoice(schedule="1f1b", chunks=1, first_layers=(0,), group_meshes=(PAIR,), policies=("nothing",)),
        SimpleNamespace(mesh_of_stage=(0,), in_flight=(1,), chunks=1),
        SimpleNamespace(decide=decide, cannot_fit=lambda *_: False),
        [ObjectiveWeights(s_per_byte=0.0, exposed_fraction=1.0)],
        BuildLimits(limit_bytes=100, time_limit_s=1.0),
        simulated,
        peak_error=peak_error,
    )
    assert prices == weighed
    assert found.peak_bytes == (90 if fits_from < 300 else 110,)
    assert rounds[-1].terms[0].s_per_byte == pytest.approx(weighed[-1] * first_price)
    assert len(rounds) == len(weighed) - (len(weighed) > 2)
