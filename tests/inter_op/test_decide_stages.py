"""Choices of stages in a few words, and the prices of memory under which they fit."""

from types import SimpleNamespace

import pytest

from autopar.inter_op.decide_stages import BuildLimits, StageChoice, fit_stages
from autopar.intra_op.ilp import ObjectiveWeights
from autopar.intra_op.memory_prices import FIRST_PRICE, MOST_PRICES
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
    ("changes", "fits", "simulated", "solved"),
    [
        (((0,), ()), (0, 0), [(0, 0)], 1),
        (((0, 4, 64), ()), (4, 0), [(0, 0), (4, 0)], 4),
        (((0, 4), (0, 1, 4)), (4, 4), [(0, 0), (4, 1), (4, 4)], 6),
        (((0, 1), (0,)), (1, 4), [(0, 0)], 1 + MOST_PRICES),
        (((0, 1), (0, 256)), (1, 300), [(0, 0), (1, 256)], 1 + MOST_PRICES),
    ],
    ids=["at once", "another decision", "two groups", "the same whatever the price", "none"],
)
def test_prices_rise_until_decisions_are_others(changes, fits, simulated, solved):
    """Two stages: each has another decision from some multiples of the first price on, and fits from one on."""
    first_price, seen, prices = FIRST_PRICE / 100, [], []

    def decide(terms):
        prices.append(terms)
        times = [round(at.s_per_byte / first_price) for at in terms]
        found = [max((n for n in of if n <= at), default=0) for of, at in zip(changes, times, strict=True)]
        return [(n, SimpleNamespace(report=SimpleNamespace(objective_s=1.0))) for n in found]

    def simulate(decisions):
        seen.append(tuple(n for n, _ in decisions))
        peaks = tuple(90 if n >= least else 110 for n, least in zip(seen[-1], fits, strict=True))
        return SimpleNamespace(step_time_s=1.0, peak_bytes=peaks)

    _, rounds = fit_stages(
        StageChoice(schedule="1f1b", chunks=1, first_layers=(0, 1), group_meshes=(PAIR, PAIR), policies=("nothing",)),
        SimpleNamespace(mesh_of_stage=(0, 1), in_flight=(1, 1), chunks=1),
        SimpleNamespace(decide=decide, cannot_fit=lambda *_: False),
        [ObjectiveWeights(s_per_byte=0.0, exposed_fraction=1.0)] * 2,
        BuildLimits(limit_bytes=100, time_limit_s=1.0),
        simulate,
    )
    assert seen == simulated
    assert len(prices) == solved
    assert len(rounds) == len(seen)
