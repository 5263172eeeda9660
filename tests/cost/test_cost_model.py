"""The costs of a mesh that is laid over a cluster."""

import pytest

from autopar.cost.cost_model import cost_model
from autopar.hardware.cluster import Cluster
from autopar.ir.mesh import LogicalMesh


@pytest.mark.parametrize(
    ("cluster", "by_all_reduce"),
    [("tpu-v5p:2x2x2", True), ("tpu-v5p:2x2x1", False), ("tpu-v5e:2x4", False), ("dgx-h100", False)],
)
def test_only_on_a_torus_of_three_dimensions_a_scatter_over_all_devices_is_an_all_reduce(cluster, by_all_reduce):
    cluster = Cluster.parse(cluster)
    links = cost_model(cluster, LogicalMesh(axis_sizes=(cluster.num_devices,))).links
    assert links.scatters_by_all_reduce is by_all_reduce
