"""Which numbers of stages a scan over layers is searched in, and what is said of the others; numbers of chunks."""

from autopar import Cluster
from autopar.ir.layout import LogicalMesh
from autopar.passes.split_scan import SplitStack, SplitStep
from autopar.plan.options import PlanRequest
from autopar.search.inter_op.search_space import chunk_numbers, own_meshes, stage_numbers, uneven_stages


def in_parts(*trips):
    """A step whose scans are in one part for each layer, and have as much arithmetic as layers."""
    stacks = tuple(SplitStack(trips=n, work=float(n), scopes=tuple(f"layers[{i}]" for i in range(n))) for n in trips)
    return SplitStep(traced=None, arguments=(), results=(), part_of_argument=(), stacks=stacks)


def test_stages_divide_the_layers_of_a_scan():
    cluster = Cluster.preset("dgx-h100", hosts=2)
    six = in_parts(6)
    assert stage_numbers(six, cluster) == [1, 2]
    (rejection,) = uneven_stages(six, cluster)
    assert rejection.text == "4 stages of the scan's layers"
    assert "do not divide the 6 layers" in rejection.why
    assert not rejection.is_note


def test_nothing_is_said_where_all_divide_or_nothing_is_scanned():
    cluster = Cluster.preset("dgx-h100")
    assert uneven_stages(in_parts(8), cluster) == []
    assert uneven_stages(in_parts(), cluster) == []


def test_stages_of_several_on_a_group_divide_the_layers_too():
    cluster = Cluster.preset("dgx-h100")
    assert stage_numbers(in_parts(8), cluster) == [1, 2, 4, 8]
    assert stage_numbers(in_parts(8), cluster, chunks=2) == [1, 2, 4]
    assert stage_numbers(in_parts(12), cluster, chunks=3) == [1, 2, 4]


def test_stages_divide_the_layers_of_each_of_several_scans():
    cluster = Cluster.preset("dgx-h100")
    assert stage_numbers(in_parts(4, 4), cluster) == [1, 2, 4, 8]
    assert stage_numbers(in_parts(3, 3), cluster) == [1, 2, 4]  # in four, one scan is whole
    assert stage_numbers(in_parts(5, 5), cluster) == [1, 2]


def test_chunks_go_as_far_as_two_groups_have_layers():
    free = PlanRequest()
    assert chunk_numbers(free, "interleaved", 128) == (2, 3, 4, 5, 6, 7, 8)
    assert chunk_numbers(free, "interleaved", 9) == (2, 3, 4)
    assert chunk_numbers(free, "interleaved", 3) == (2,)
    assert chunk_numbers(PlanRequest(chunks=3), "interleaved", 128) == (3,)
    assert chunk_numbers(free, "1f1b", 128) == (1,)


def test_one_stage_is_decided_on_all_of_few_meshes():
    best = LogicalMesh(axis_sizes=(8,))
    on_a_host = own_meshes(Cluster.preset("dgx-h100"), best)
    assert [mesh.axis_sizes for mesh in on_a_host] == [(8,), (2, 4)]
    assert len(own_meshes(Cluster.preset("dgx-h100", hosts=64), best)) == 4
    assert own_meshes(Cluster.preset("gb200-nvl72"), best) == [best]
