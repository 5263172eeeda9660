"""Recomputation in some of the layers of one stage, against every number of them."""

import dataclasses
from types import SimpleNamespace

import pytest

from autopar.ir.layout import LogicalMesh
from autopar.search.inter_op.decide_stages import StageChoice
from autopar.search.inter_op.one_stage import recompute_in_some_layers
from autopar.search.inter_op.pipeline_candidate import PipelineEstimate
from autopar.search.inter_op.stage_costs import LayerPolicies

LAYERS = 8
KEPT_BYTES = {"nothing": 10, "by value": 4, "input": 1}  # of a layer
LAYER_S = {"nothing": 1.0, "by value": 1.2, "input": 1.5}


def choice(*policies):
    return StageChoice(
        schedule="1f1b", chunks=1, first_layers=(0,), group_meshes=(LogicalMesh(axis_sizes=(2,)),), policies=policies
    )


class Evaluated:
    """An evaluator of pipelines whose layers take and keep what their policies do."""

    def __init__(self, limit_bytes, best_s, tried):
        self.limit_bytes = limit_bytes
        self.context, self.deadline = SimpleNamespace(program_fits=False), SimpleNamespace(passed=False)
        several = dataclasses.replace(choice(*["input"] * LAYERS), first_layers=(0, 4))
        self.best = dataclasses.replace(self.of(several), step_time_s=best_s, peak_bytes=limit_bytes)
        self.best_of = {(2, 1): (self.best, 0), (1, 1): (self.of(choice(*[tried] * LAYERS)), 0)}

    def of(self, chosen):
        peak_bytes = sum(KEPT_BYTES[policy] for policy in chosen.policies)
        step_time_s = sum(LAYER_S[policy] for policy in chosen.policies)
        return PipelineEstimate(
            num_microbatches=1, choice=chosen, step_time_s=step_time_s, peak_bytes=peak_bytes, to_beat_s=0.0
        )

    def as_it_is(self, m, chosen, binding):
        return self.of(chosen)

    def refined(self, m, chosen, name, binding):
        found = self.of(chosen)
        self.best = min(self.best, found, key=lambda each: each.rank(self.limit_bytes))
        return found


POLICIES = LayerPolicies(
    names=tuple(KEPT_BYTES),
    of_layers=tuple((name,) * LAYERS for name in KEPT_BYTES),
    kept_bytes=tuple(LAYERS * nbytes for nbytes in KEPT_BYTES.values()),
    again=({}, {}, {}),
)


@pytest.mark.parametrize(("limit_bytes", "again"), [(70, ("by value", 2)), (50, ("by value", 5)), (20, ("input", 4))])
def test_what_is_faster_than_the_best_and_does_not_fit_recomputes_in_as_few_layers_as_do(limit_bytes, again):
    evaluated = Evaluated(limit_bytes, best_s=100.0, tried="nothing")
    recompute_in_some_layers(evaluated, None, [POLICIES])
    name, number = again
    assert evaluated.best.choice.policies.count(name) == number
    assert evaluated.best.peak_bytes <= limit_bytes


def test_what_is_as_fast_as_the_best_is_left_as_it_is():
    evaluated = Evaluated(70, best_s=8.0, tried="nothing")
    before = evaluated.best
    recompute_in_some_layers(evaluated, None, [POLICIES])
    assert evaluated.best is before
