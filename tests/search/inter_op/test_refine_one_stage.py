"""One stage that comes near the best is decided again, in numbers of micro-batches in which that may fit."""

from types import MappingProxyType, SimpleNamespace

import pytest

from autopar import Cluster
from autopar.ir.layout import LogicalMesh
from autopar.search.inter_op.decide_stages import StageChoice
from autopar.search.inter_op.one_stage import BY_ITSELF, MicrobatchCounts, refine_one_stage
from autopar.search.inter_op.pipeline_candidate import PipelineEstimate
from autopar.search.inter_op.search_space import NEAR_THE_BEST
from autopar.search.intra_op.ilp import ObjectiveWeights
from autopar.search.intra_op.mesh_searches import baseline_bindings

LIMIT_BYTES, EXAMPLES = 100, 64
ON = Cluster.preset("dgx-h100").submesh(1, 4)  # one mesh of one axis, one of two
RECOMPUTES = StageChoice(
    schedule="1f1b", chunks=1, first_layers=(0,), group_meshes=(LogicalMesh(axis_sizes=(4,)),), policies=("input",) * 2,
    terms=(ObjectiveWeights(s_per_byte=0.0, exposed_fraction=0.3),),
)  # fmt: skip
RECIPES = ("data parallelism", "ZeRO-1", "ZeRO-3")


def one_stage(m=16, step_time_s=4.0, peak_bytes=50, choice=RECOMPUTES):
    return PipelineEstimate(
        num_microbatches=m, choice=choice, step_time_s=step_time_s, peak_bytes=peak_bytes, to_beat_s=0.0
    )  # fmt: skip


def refined(
    found=None, *, best=None, least_bytes=None, least_s=0.0, weighed_one_program=False, counts=(), is_late=False,
    bounded=lambda seen, recomputes: False, held_bytes=MappingProxyType({}),
):  # fmt: skip
    """(name, micro-batches, whether it recomputes, the number of axes of its mesh) of what is evaluated, in order.

    `least_bytes` of what keeps all and of what recomputes, in one micro-batch: half of it in two. `bounded`: by what
    was evaluated so far, whether what recomputes, or what does not, cannot become the best. `held_bytes`: of recipes.
    """
    found, seen = found or one_stage(), []
    keeps, recomputes = least_bytes or (1, 1)

    def evaluate(m, choice, name, binding=None):
        seen.append((name, m, choice.policies == RECOMPUTES.policies, len(choice.group_meshes[0].axis_sizes)))

    fake = SimpleNamespace(
        context=SimpleNamespace(weighed_one_program=weighed_one_program), cluster=ON, limit_bytes=LIMIT_BYTES,
        best=best or found, best_of={(1, found.num_microbatches): (found, 0)}, refinements=[], refined=evaluate,
        deadline=SimpleNamespace(passed=is_late),
        may_gain=lambda m, choice: not bounded(seen, choice.policies == RECOMPUTES.policies),
        least_bytes=lambda m, choice: (recomputes if choice.policies == RECOMPUTES.policies else keeps) / m,
        recipes=lambda _: [(held_bytes.get(name, 0), name, binding) for name, binding in baseline_bindings(ON)],
        does_not_fit=lambda m, name, nbytes: seen.append((name, m, nbytes)),
    )  # fmt: skip
    others = MicrobatchCounts(
        numbers=(1, 2, 4, 8, 16, 32, 64), cut=lambda _: SimpleNamespace(layers=(0, 1)), num_examples=EXAMPLES,
        num_devices=ON.num_devices, least_s=least_s,
    )  # fmt: skip
    refine_one_stage(fake, others, counts)
    return seen


def all_ways(m, recomputes, m_of_recipes=None):
    """By itself on both meshes, and the recipes on the mesh of the best."""
    own = [(BY_ITSELF, m, recomputes, axes) for axes in (1, 2)]
    return own + [(name, m_of_recipes or m, recomputes, 1) for name in RECIPES]


def test_as_it_recomputes_and_without_any_recomputation():
    assert refined() == all_ways(16, False) + all_ways(16, True)


def test_recipes_that_hold_more_than_a_device_has_are_told_and_not_evaluated():
    seen = refined(held_bytes={"data parallelism": LIMIT_BYTES + 1, "ZeRO-1": LIMIT_BYTES})
    assert seen.count(("data parallelism", 16, LIMIT_BYTES + 1)) == 2  # as it recomputes and without
    assert [each for each in seen if each[0] == "data parallelism" and len(each) > 3] == []
    assert len([each for each in seen if each[0] == "ZeRO-1"]) == 2


def test_what_keeps_all_begins_where_it_may_fit():
    """It needs 100 bytes in 32 micro-batches."""
    assert refined(least_bytes=(3200, 1), least_s=1.9) == all_ways(32, False) + all_ways(16, True)
    assert refined(least_bytes=(100 * EXAMPLES + 64, 1)) == all_ways(16, True)


def test_what_does_not_fit_begins_where_it_may():
    found = one_stage(peak_bytes=200)
    assert refined(found, least_bytes=(10**6, 3200)) == all_ways(32, True)
    assert refined(found, least_bytes=(10**6, 10**6)) == []
    assert refined(found, least_bytes=(10**6, 3200), is_late=True) == []


def test_recipes_take_fewer_micro_batches_where_more_devices_have_examples():
    """One example is in one of 64 micro-batches: three of the four devices would repeat the work of the first."""
    found = one_stage(m=64)
    assert refined(found) == all_ways(64, False, 16) + all_ways(64, True, 16)


@pytest.mark.parametrize(("least_s", "recipes"), [(0.9, [64] * 6), (1.1, [])])
def test_recipes_that_need_too_much_in_fewer_are_left_out_where_repeated_work_takes_too_long(least_s, recipes):
    """In 16 micro-batches 200 bytes are needed. In 64, the work takes four times as long as when it is shared."""
    found = refined(one_stage(m=64), least_bytes=(3200, 3200), least_s=least_s)
    assert [m for name, m, _, _ in found if name in RECIPES] == recipes


def test_what_was_weighed_as_one_program_is_not_evaluated_again():
    assert refined(one_stage(m=1), weighed_one_program=True) == all_ways(1, True)


def test_what_is_far_from_the_best_stays_as_it_is():
    best = one_stage(m=8, step_time_s=4.0)
    assert refined(one_stage(step_time_s=4.0 * NEAR_THE_BEST * 1.01), best=best) == []
    assert refined(one_stage(step_time_s=4.0 * NEAR_THE_BEST * 0.99), best=best)


def test_what_cannot_become_the_best_is_left_out():
    """Once what keeps all is known by itself, nothing that computes as much, or more, is evaluated."""
    by_itself = (BY_ITSELF, 16, False, 1)
    assert refined(counts=(0.1,), bounded=lambda seen, _: by_itself in seen) == [by_itself]
    assert refined(bounded=lambda seen, recomputes: recomputes) == all_ways(16, False)


def test_other_charges_of_hidden_communication():
    expected = [("hidden sends count 0.1", 16, True, 1), ("hidden sends count 0", 16, True, 1)]
    assert refined(counts=(0.3, 0.1, 0.0))[-2:] == expected
    assert not [name for name, *_ in refined(counts=(0.3,)) if name.startswith("hidden")]
