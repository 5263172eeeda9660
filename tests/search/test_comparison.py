"""What notes say of the pipelines that were searched for."""

from types import SimpleNamespace

import pytest

from autopar.errors import BatchMismatchError
from autopar.ir.layout import LogicalMesh
from autopar.passes.smaller_step import num_examples
from autopar.search import comparison
from autopar.search.inter_op.decide_stages import StageChoice
from autopar.search.inter_op.pipeline_candidate import PipelineCandidate


def notes_of(stages, peak_bytes):
    choice = StageChoice(
        schedule="1f1b",
        chunks=1,
        first_layers=tuple(range(stages)),
        group_meshes=(LogicalMesh(axis_sizes=(4,)),) * stages,
        policies=("nothing",) * stages,
    )
    graph = SimpleNamespace(num_microbatches=1)
    staged = SimpleNamespace(step_time_s=1e-3, peak_bytes=(peak_bytes,), graph=graph)
    candidate = PipelineCandidate(staged=staged, choice=choice, weighed=(), hoist_casts=False)
    return comparison.notes(SimpleNamespace(rejections=(), candidates=(candidate,), limit_bytes=100))


@pytest.mark.parametrize(
    ("stages", "peak_bytes", "texts"),
    [
        (2, 50, ["the best pipeline would take 1 ms (2 stages on meshes 4, 1f1b)"]),
        (1, 50, []),
        (2, 500, ["the pipeline nearest to fitting needs 500 B on a device"]),
    ],
)
def test_one_stage_is_no_pipeline(stages, peak_bytes, texts):
    assert notes_of(stages, peak_bytes) == texts


@pytest.mark.parametrize(
    ("shape", "got"), [((), "no array with a dimension of examples"), ((0, 4), "a batch without examples")]
)
def test_the_reason_for_which_there_are_no_micro_batches_is_a_sentence_of_its_own(shape, got):
    dim = 0 if shape else None
    avals = (SimpleNamespace(shape=shape),)
    traced = SimpleNamespace(name="step", batch={0}, in_avals=avals, example_dim=lambda i: dim)
    with pytest.raises(BatchMismatchError) as caught:
        num_examples(traced)
    assert caught.value.got == got
