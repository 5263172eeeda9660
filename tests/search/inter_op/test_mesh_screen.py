"""Which meshes the search over stages makes no tables for."""

import dataclasses
from types import SimpleNamespace

import autopar
from autopar import Cluster
from autopar.search.inter_op import stage_problems
from autopar.search.inter_op.stage_problems import MUCH_SLOWER, DecidedOptions, MeshScreen
from tests.search.inter_op.test_search import arguments
from tests.search.inter_op.test_stage_costs import LIMITS, cluster, cut
from tests.small_steps import chain_step


def ran(end_s, busy_s=None):
    return SimpleNamespace(end_s=end_s, busy_s=end_s if busy_s is None else busy_s)


def test_a_mesh_much_slower_than_another_of_its_size_is_left_out():
    screen = MeshScreen(num_devices=16)
    assert screen.pays(4, ran(MUCH_SLOWER), 1.0)
    assert not screen.pays(4, ran(1.01 * MUCH_SLOWER), 1.0)
    assert screen.has_left_out
    assert not screen.has_left_out_for_pipeline  # none is known


def test_what_takes_all_devices_is_never_left_out():
    assert MeshScreen(num_devices=16, longest_s=1.0).pays(16, ran(100.0), 1.0)


def test_once_a_pipeline_is_known_a_mesh_must_not_take_many_more_seconds_of_a_device_than_others_there():
    screen = MeshScreen(num_devices=16)
    screen.saw(2, 8.0)
    slow = 1.01 * MUCH_SLOWER * 16 / 4
    assert screen.pays(4, ran(slow), slow)
    screen.longest_s = 100.0
    assert not screen.pays(4, ran(slow), slow)
    assert screen.has_left_out
    assert screen.pays(4, ran(0.99 * slow), 0.99 * slow)


def test_other_devices_must_make_up_for_a_slow_stage():
    """All layers take 16 seconds of a device at least: one second of 16 devices."""
    screen = MeshScreen(num_devices=16)
    screen.saw(2, 8.0)
    screen.longest_s = 1.2  # 10 of the devices do three quarters of the layers in that: a quarter takes 4.8 s here
    assert screen.pays(6, ran(4.7), 4.7)
    assert not screen.pays(6, ran(4.9), 4.9)
    assert screen.pays(6, ran(4.9, busy_s=4.7), 4.9)  # it might overlap
    screen.longest_s = 1.7  # the others are fast enough by themselves
    assert screen.pays(6, ran(4.9), 4.9)


def test_equal_stages_are_as_slow_as_one_of_them():
    screen = MeshScreen(num_devices=16, are_equal=True, longest_s=1.5)
    screen.saw(2, 8.0)
    assert screen.pays(8, ran(2.9), 2.9)  # two of them
    assert not screen.pays(8, ran(3.1), 3.1)


def test_where_no_mesh_of_a_size_pays_none_of_its_multiples_is_decided_but_of_all_devices():
    step, on = cut(8), dataclasses.replace(cluster(), num_hosts=8)
    screen = MeshScreen(num_devices=16, longest_s=1e-9)  # less than any pipeline takes
    decided = DecidedOptions()
    found = stage_problems.tables(step, on, [2, 4, 8, 16], LIMITS, decided, screen=screen)
    assert {o.mesh.num_devices for o in found} == {key[0].num_devices for key in decided} == {16}
    assert screen.has_left_out


def test_no_table_is_made_for_a_mesh_that_is_left_out():
    step, on = cut(8), cluster()
    every = stage_problems.tables(step, on, [2, 4], LIMITS, DecidedOptions())
    seen = []

    @dataclasses.dataclass(slots=True, kw_only=True)
    class OnlyAll(MeshScreen):
        def pays(self, num_devices, ran, fastest_s):
            seen.append((num_devices, ran.end_s, fastest_s))
            return num_devices == self.num_devices

    decided = DecidedOptions()
    found = stage_problems.tables(step, on, [2, 4], LIMITS, decided, screen=OnlyAll(num_devices=4))
    assert {o.mesh.num_devices for o in every} == {2, 4}
    assert [o.option.name for o in found] == [o.option.name for o in every if o.mesh.num_devices == 4]
    assert {key[0].num_devices for key in decided} == {4}  # what is left out may be decided for larger micro-batches
    assert all(fastest_s <= end_s for _, end_s, fastest_s in seen)


def test_a_thorough_search_leaves_no_mesh_out(monkeypatch):
    made = []

    class Noted(MeshScreen):
        def __init__(self, **fields):
            made.append(fields)
            super().__init__(**fields)

    monkeypatch.setattr("autopar.search.inter_op.search.MeshScreen", Noted)
    for effort, screens in (("default", 1), ("thorough", 0)):
        made.clear()
        autopar.plan(
            chain_step,
            *arguments(4, 64, 32),
            cluster=Cluster.flat(4),
            search=autopar.Search(num_microbatches=4, effort=effort),
            cache_dir=None,
        )
        assert (len(made) > 0) == screens


def test_one_stage_alone_is_left_out_for_the_work_of_its_devices():
    screen = MeshScreen(num_devices=16, is_of_one=True, longest_s=1.0)
    assert screen.pays(16, ran(2.0, busy_s=1.0), 1.0)
    assert not screen.pays(16, ran(2.0, busy_s=1.1), 1.0)
