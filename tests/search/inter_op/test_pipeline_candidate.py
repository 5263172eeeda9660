"""What is built of a pipeline of one stage that was estimated."""

import math

import pytest

from autopar.search.inter_op.decide_stages import Round
from autopar.search.inter_op.pipeline_candidate import PipelineEstimate
from autopar.search.intra_op.ilp import ObjectiveWeights

LIMIT_BYTES, ERROR = 100, 0.06


def rounds_of(*peaks):
    """Rounds of decisions by rising prices of a byte, the first at price 0."""
    terms = (ObjectiveWeights(s_per_byte=float(at), exposed_fraction=0.3) for at in range(len(peaks)))
    return tuple(Round(terms=(each,), peak_bytes=(peak,)) for each, peak in zip(terms, peaks, strict=True))


@pytest.mark.parametrize(
    ("peaks", "first"),
    [
        ((90,), 0),
        ((200, 150, 90), 2),
        ((200, 105, 90), 1),  # which may fit, as far off as estimates may be
        ((200, 107, 90), 2),
        ((105, 105, 104), 2),  # none fits by the estimate
        ((104, 105, 105), 0),
        ((), None),
    ],
)
def test_the_first_decisions_that_may_fit_are_built_first(peaks, first):
    rounds = rounds_of(*peaks)
    estimate = PipelineEstimate(
        num_microbatches=4, choice=None, step_time_s=1.0, peak_bytes=peaks[-1] if peaks else 90, to_beat_s=math.inf,
        rounds=rounds,
    )  # fmt: skip
    assert estimate.first_to_build(LIMIT_BYTES, ERROR) == (None if first is None else rounds[first])
