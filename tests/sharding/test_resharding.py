"""Paths between layouts: literal ones, and what holds for all of them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import autopar
from autopar.cost.cost_model import cost_model
from autopar.hardware.collective_cost import CollectiveKind, Link, sent_bytes
from autopar.ir.layout import Layout, replicated
from autopar.ir.mesh import LogicalMesh
from autopar.sharding.resharding import MeshLinks, StepKind, fits, gather_and_slice, paths, paths_by_size

FAST = Link(latency_s=1e-7, bytes_per_s=1e10, overhead_s=1e-6, source="test")
SLOW = Link(latency_s=1e-7, bytes_per_s=1e9, overhead_s=1e-6, source="test")
EAGER = Link(latency_s=1e-7, bytes_per_s=1e10, overhead_s=0.0, source="test")
SQUARE = MeshLinks(mesh=LogicalMesh(axis_sizes=(2, 2)), links=(FAST, FAST))
UNEVEN = MeshLinks(mesh=LogicalMesh(axis_sizes=(2, 4)), links=(SLOW, FAST))
CUBE = MeshLinks(mesh=LogicalMesh(axis_sizes=(2, 2, 2)), links=(FAST, SLOW, FAST))


def layout(text):
    """The layout that `Layout.text` prints as this."""
    inside, _, behind = text.partition("]")
    places = [p.strip() for p in inside.strip("[").split(",")] if inside != "[" else []
    return Layout(
        tuple(tuple("xyz".index(c) for c in place if c != "-") for place in places),
        tuple("xyz".index(c) for c in behind.split("+")[1:] for c in c.strip()),
    )


def steps_text(source, target, links=SQUARE):
    found = paths(len(layout(source).dims), links).steps(layout(source), layout(target))
    return [f"{s.kind.name.lower()} {''.join('xyz'[a] for a in s.axes)} {s.after.text(links.mesh)}" for s in found]


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        ("[x, -]", "[x, -]", []),
        ("[xy, -]", "[x, -]", ["all_gather y [x, -]"]),
        ("[xy, -]", "[-, -]", ["all_gather xy [-, -]"]),
        ("[xy, -]", "[y, -]", ["collective_permute xy [yx, -]", "all_gather x [y, -]"]),
        ("[xy, -]", "[yx, -]", ["collective_permute xy [yx, -]"]),
        ("[x, -]", "[-, x]", ["all_to_all x [-, x]"]),
        ("[xy, -]", "[-, xy]", ["all_to_all xy [-, xy]"]),
        ("[xy, -]", "[x, y]", ["all_to_all y [x, y]"]),
        ("[-, -]", "[x, y]", ["slice x [x, -]", "slice y [x, y]"]),
        ("[x, -]", "[xy, -]", ["slice y [xy, -]"]),
        ("[-, -] +x", "[-, -]", ["all_reduce x [-, -]"]),
        ("[-, -] +x +y", "[-, -]", ["all_reduce xy [-, -]"]),
        ("[-, -] +x", "[x, -]", ["reduce_scatter x [x, -]"]),
        ("[y, -] +x", "[yx, -]", ["reduce_scatter x [yx, -]"]),
        ("[-, -] +x +y", "[x, y]", ["reduce_scatter x [x, -] +y", "reduce_scatter y [x, y]"]),
        ("[-, -] +x +y", "[x, -]", ["reduce_scatter x [x, -] +y", "all_reduce y [x, -]"]),
        ("[-, -]", "[-, -] +x", ["mask x [-, -] +x"]),
    ],
)
def test_paths_on_four_devices(source, target, expected):
    assert steps_text(source, target) == expected


def test_two_gathers_over_smaller_rings_are_cheaper_than_one_where_a_collective_costs_nothing_to_start():
    links = MeshLinks(mesh=SQUARE.mesh, links=(EAGER, EAGER))
    assert steps_text("[xy, -]", "[-, -]", links) == ["all_gather y [x, -]", "all_gather x [-, -]"]  # 2 hops, not 3


def test_of_a_sum_over_a_slow_and_a_fast_axis_the_slow_one_carries_the_scattered_part_only():
    assert steps_text("[-] +x +y", "[-]", UNEVEN) == ["reduce_scatter y [y] +x", "all_reduce x [y]", "all_gather y [-]"]


LINKS = [SQUARE, UNEVEN, CUBE]


@st.composite
def journeys(draw, stops):
    """A mesh, a table of paths, and some of its layouts."""
    links = draw(st.sampled_from(LINKS))
    rank = draw(st.integers(0, 2))
    table = paths(rank, links)
    numbers = st.integers(0, len(table.layouts) - 1)
    return links, table, [table.layouts[draw(numbers)] for _ in range(stops)]


def places(layout):
    """Where each axis stands: (dimension, position) or partial."""
    found = {a: (d, i) for d, axes in enumerate(layout.dims) for i, a in enumerate(axes)}
    return found | dict.fromkeys(layout.partial, "partial")


@settings(deadline=None, derandomize=True, max_examples=150)
@given(journeys(stops=2))
def test_a_path_starts_at_its_source_and_ends_at_its_target(journey):
    _, table, (source, target) = journey
    at = source
    for step in table.steps(source, target):
        assert step.before == at
        at = step.after
    assert at == target


@settings(deadline=None, derandomize=True, max_examples=150)
@given(journeys(stops=2))
def test_a_step_moves_only_the_axes_that_it_names(journey):
    _, table, (source, target) = journey
    for step in table.steps(source, target):
        before, after = places(step.before), places(step.after)
        moved = {a for a in {*before, *after} if before.get(a) != after.get(a)}
        assert set() < moved <= set(step.axes)
        changed = [d for d, (b, a) in enumerate(zip(step.before.dims, step.after.dims, strict=True)) if b != a]
        partial_change = step.before.partial != step.after.partial
        assert (len(changed), partial_change) == {
            StepKind.ALL_REDUCE: (0, True),
            StepKind.REDUCE_SCATTER: (1, True),
            StepKind.MASK: (0, True),
            StepKind.ALL_GATHER: (1, False),
            StepKind.SLICE: (1, False),
            StepKind.COLLECTIVE_PERMUTE: (1, False),
            StepKind.ALL_TO_ALL: (2, False),
        }[step.kind]


@settings(deadline=None, derandomize=True, max_examples=150)
@given(journeys(stops=2), st.sampled_from([0, 4096, 1 << 20, 1 << 30]))
def test_time_of_a_path_is_the_sum_of_its_steps(journey, nbytes):
    links, table, (source, target) = journey
    i, j = table.index[source], table.index[target]
    expected = 0.0
    for step in table.steps(source, target):
        collective = links.as_compiled(step, nbytes)
        if collective is not None:
            expected += links.time_s(*collective, step.axes)
    assert table.fixed_s[i, j] + nbytes * table.s_per_byte[i, j] == pytest.approx(expected, rel=1e-9, abs=1e-15)


@pytest.mark.parametrize("links", LINKS, ids=lambda links: str(links.mesh))
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_no_detour_is_cheaper_than_the_path(links, rank):
    table = paths(rank, links)
    seconds = table.fixed_s + (1 << 20) * table.s_per_byte
    assert np.isfinite(seconds).all()
    assert (np.diagonal(seconds) == 0).all()
    through = np.min(seconds[:, :, None] + seconds[None, :, :], axis=1)
    # A step that stays on the device is charged a picosecond, so that paths without needless steps are preferred.
    assert (seconds <= through + 1e-11).all()


def test_bytes_that_each_step_sends():
    value_bytes = 1024.0  # on a mesh of x=2 by y=4

    def sent(source, target):
        (step,) = paths(2, UNEVEN).steps(layout(source), layout(target))
        kind, result_bytes = UNEVEN.as_compiled(step, value_bytes)
        return step.kind.name, float(sent_bytes(kind, result_bytes, UNEVEN.mesh.size(step.axes)))

    assert sent("[y, -]", "[-, -]") == ("ALL_GATHER", 3 / 4 * 1024)
    assert sent("[xy, -]", "[x, -]") == ("ALL_GATHER", 3 / 4 * 512)
    assert sent("[-, -] +y", "[-, -]") == ("ALL_REDUCE", 2 * 3 / 4 * 1024)
    assert sent("[x, -] +y", "[xy, -]") == ("REDUCE_SCATTER", 3 / 4 * 512)
    assert sent("[y, -]", "[-, y]") == ("ALL_TO_ALL", 3 / 4 * 256)
    assert sent("[xy, -]", "[yx, -]") == ("COLLECTIVE_PERMUTE", 128)


def test_a_collective_over_two_axes_runs_at_the_rate_of_the_slower():
    assert UNEVEN.link((0, 1)) == SLOW
    assert UNEVEN.link((1,)) == FAST


def test_a_backend_that_makes_all_reduces_of_reduce_scatters_is_charged_for_them():
    mesh = LogicalMesh(axis_sizes=(4,))
    (step,) = paths(1, MeshLinks(mesh=mesh, links=(FAST,))).steps(layout("[-] +x"), layout("[x]"))
    scatters = MeshLinks(mesh=mesh, links=(FAST,))
    reduces = MeshLinks(mesh=mesh, links=(FAST,), scatters_by_all_reduce=True)
    assert scatters.as_compiled(step, 1024.0) == (CollectiveKind.REDUCE_SCATTER, 256.0)
    assert reduces.as_compiled(step, 1024.0) == (CollectiveKind.ALL_REDUCE, 1024.0)


def test_a_path_over_a_layout_that_does_not_divide_does_not_fit():
    mesh = LogicalMesh(axis_sizes=(2, 2))
    found = paths(2, SQUARE).steps(layout("[y, x]"), layout("[x, y]"))
    assert fits(found, (4, 4), mesh)
    assert not fits(found, (2, 2), mesh)


@settings(deadline=None, derandomize=True, max_examples=100)
@given(journeys(stops=2))
def test_gathering_and_slicing_leads_everywhere_through_nothing_split_finer(journey):
    _, _, (source, target) = journey
    at = source
    for step in gather_and_slice(source, target):
        assert step.before == at
        at = step.after
        assert all(on in ((), source.dims[d], target.dims[d]) for d, on in enumerate(at.dims)), (
            "each dimension is whole, or as in the source or in the target"
        )
        assert set(at.partial) <= {*source.partial, *target.partial}
    assert at == target


def test_where_nothing_divides_on_the_way_a_summand_is_made_of_what_is_whole():
    steps = gather_and_slice(layout("[y, -]"), layout("[-, y] +x"))
    assert [(s.kind, s.axes) for s in steps] == [
        (StepKind.ALL_GATHER, (1,)),
        (StepKind.MASK, (0,)),
        (StepKind.SLICE, (1,)),
    ]
    kept = gather_and_slice(layout("[y, -] +x"), layout("[-, y] +x"))
    assert [s.kind for s in kept] == [StepKind.ALL_GATHER, StepKind.SLICE]


def test_gathering_makes_a_replicated_value_of_any():
    steps = gather_and_slice(layout("[xy, -]"), replicated(2))
    assert [s.kind for s in steps] == [StepKind.ALL_GATHER]


def test_small_sums_are_reduced_by_a_tree_and_large_ones_in_parts():
    cluster = autopar.Cluster.preset("dgx-a100-80g", hosts=16)
    links = cost_model(cluster, LogicalMesh(axis_sizes=(32, 4))).links
    table = paths_by_size(2, links)

    def kinds(nbytes):
        return [s.kind.name for s in table.steps(layout("[-, y] +x"), layout("[x, y]"), nbytes)]

    assert kinds(1 << 16) == kinds(1 << 23) == ["ALL_REDUCE", "SLICE"]
    assert kinds(1 << 30) == ["REDUCE_SCATTER"]
    # Each size takes what is faster for it.
    i, j = (np.array(table.index[layout(text)]) for text in ("[-, y] +x", "[x, y]"))
    for nbytes in (1 << 16, 1 << 23, 1 << 30):
        each = [t.fixed_s[i, j] + nbytes * t.s_per_byte[i, j] for t in table.tables]
        assert table.seconds(i, j, nbytes, 1.0) == min(each)


def test_sums_of_gigabytes_over_hundreds_of_devices_are_reduced_in_parts_along_one_axis_after_the_other():
    cluster = autopar.Cluster.preset("dgx-h100", hosts=128)
    links = cost_model(cluster, LogicalMesh(axis_sizes=(64, 2, 8))).links
    source, target = layout("[z, -] +xy"), layout("[z, xy]")
    found = paths_by_size(2, links).steps(source, target, 4 << 30)
    assert [(s.kind, s.axes) for s in found] == [(StepKind.REDUCE_SCATTER, (0,)), (StepKind.REDUCE_SCATTER, (1,))]
