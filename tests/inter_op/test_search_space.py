"""Which numbers of stages a scan over layers is searched in, and what is said of the others."""

from types import SimpleNamespace

from autopar import Cluster
from autopar.inter_op.search_space import stage_numbers, uneven_stages


def test_stages_divide_the_layers_of_a_scan():
    cluster = Cluster.preset("dgx-h100", hosts=2)
    six = SimpleNamespace(parts=6, trips=6)
    assert stage_numbers(six, cluster) == [1, 2]
    (rejection,) = uneven_stages(six, cluster)
    assert rejection.text == "4 stages of the scan's layers"
    assert "padded" in rejection.why
    assert not rejection.is_note


def test_nothing_is_said_where_all_divide_or_nothing_is_scanned():
    cluster = Cluster.preset("dgx-h100")
    assert uneven_stages(SimpleNamespace(parts=8, trips=8), cluster) == []
    assert uneven_stages(SimpleNamespace(parts=1, trips=0), cluster) == []
