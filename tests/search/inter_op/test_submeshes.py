"""The devices of stages, and the links between them."""

from autopar.hardware.cluster import Cluster
from autopar.ir.layout import LogicalMesh
from autopar.search.inter_op.staged import Submesh, link_between, place


def test_links_inside_a_host_and_between_hosts():
    cluster, pair = Cluster.parse("dgx-h100x2"), LogicalMesh(axis_sizes=(2,))
    first, second, of_next_host = (Submesh(first_device=n, mesh=pair) for n in (0, 6, 8))
    assert link_between(first, second, cluster) == cluster.inside_host
    assert link_between(second, of_next_host, cluster) == cluster.between_hosts


def test_larger_groups_are_placed_first_whatever_their_order():
    meshes = [LogicalMesh(axis_sizes=(n,)) for n in (1, 4, 1, 2)]
    assert [s.first_device for s in place(meshes, (0, 1, 2, 3, 0))] == [6, 0, 7, 4, 6]
