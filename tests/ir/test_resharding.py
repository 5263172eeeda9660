"""Paths between layouts: literal ones, and what holds for all of them."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import autopar
from autopar.cost.cost_model import cost_model
from autopar.hardware.collective_cost import CollectiveKind, Link, sent_bytes
from autopar.ir.layout import Layout, LogicalMesh, replicated
from autopar.ir.resharding import MeshLinks, StepKind, fits, gather_and_slice, paths, paths_by_size

FAST = Link(latency_s=1e-7, bytes_per_s=1e10, overhead_s=1e-6, source="test")
SLOW = Link(latency_s=1e-7, bytes_per_s=1e9, overhead_s=1e-6, source="test")
EAGER = Link(latency_s=1e-7, bytes_per_s=1e10, overhead_s=0.0, source="test")
SQUARE = MeshLinks(mesh=LogicalMesh(axis_sizes=(2, 2)), links=(FAST, FAST))
UNEVEN = MeshLinks(mesh=LogicalMesh(axis_sizes=(2, 4)), links=(SLOW, FAST))
CUBE = MeshLinks(mesh=LogicalMesh(axis_sizes=(2, 2, 2)), links=(FAST, SLOW, FAST))


def layout(text):
    """The layout that `Layout.text` prints as this."""
    dims, partial = eval(text, {"P": lambda *dims, unreduced=(): (dims, unreduced)})
    axes = tuple(tuple("xyz".index(name) for name in dim or ()) for dim in dims)
    return Layout(axes, tuple(sorted("xyz".index(name) for name in partial)))


def steps_text(source, target, links=SQUARE):
    found = paths(len(layout(source).dims), links).steps(layout(source), layout(target))
    return [f"{s.kind.name.lower()} {''.join('xyz'[a] for a in s.axes)} {s.after.text(links.mesh)}" for s in found]


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        ('P("x", None)', 'P("x", None)', []),
        ('P(("x", "y"), None)', 'P("x", None)', ['all_gather y P("x", None)']),
        ('P(("x", "y"), None)', "P(None, None)", ["all_gather xy P(None, None)"]),
        (
            'P(("x", "y"), None)',
            'P("y", None)',
            ['collective_permute xy P(("y", "x"), None)', 'all_gather x P("y", None)'],
        ),
        ('P(("x", "y"), None)', 'P(("y", "x"), None)', ['collective_permute xy P(("y", "x"), None)']),
        ('P("x", None)', 'P(None, "x")', ['all_to_all x P(None, "x")']),
        ('P(("x", "y"), None)', 'P(None, ("x", "y"))', ['all_to_all xy P(None, ("x", "y"))']),
        ('P(("x", "y"), None)', 'P("x", "y")', ['all_to_all y P("x", "y")']),
        ("P(None, None)", 'P("x", "y")', ['slice x P("x", None)', 'slice y P("x", "y")']),
        ('P("x", None)', 'P(("x", "y"), None)', ['slice y P(("x", "y"), None)']),
        ('P(None, None, unreduced={"x"})', "P(None, None)", ["all_reduce x P(None, None)"]),
        ('P(None, None, unreduced={"x", "y"})', "P(None, None)", ["all_reduce xy P(None, None)"]),
        ('P(None, None, unreduced={"x"})', 'P("x", None)', ['reduce_scatter x P("x", None)']),
        ('P("y", None, unreduced={"x"})', 'P(("y", "x"), None)', ['reduce_scatter x P(("y", "x"), None)']),
        (
            'P(None, None, unreduced={"x", "y"})',
            'P("x", "y")',
            ['reduce_scatter x P("x", None, unreduced={"y"})', 'reduce_scatter y P("x", "y")'],
        ),
        (
            'P(None, None, unreduced={"x", "y"})',
            'P("x", None)',
            ['reduce_scatter x P("x", None, unreduced={"y"})', 'all_reduce y P("x", None)'],
        ),
        ("P(None, None)", 'P(None, None, unreduced={"x"})', ['mask x P(None, None, unreduced={"x"})']),
    ],
)
def test_paths_on_four_devices(source, target, expected):
    assert steps_text(source, target) == expected


def test_two_gathers_over_smaller_rings_are_cheaper_than_one_where_a_collective_costs_nothing_to_start():
    links = MeshLinks(mesh=SQUARE.mesh, links=(EAGER, EAGER))
    assert steps_text('P(("x", "y"), None)', "P(None, None)", links) == [
        'all_gather y P("x", None)',
        "all_gather x P(None, None)",
    ]  # 2 hops, not 3


def test_of_a_sum_over_a_slow_and_a_fast_axis_the_slow_one_carries_the_scattered_part_only():
    assert steps_text('P(None, unreduced={"x", "y"})', "P(None)", UNEVEN) == [
        'reduce_scatter y P("y", unreduced={"x"})',
        'all_reduce x P("y")',
        "all_gather y P(None)",
    ]


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

    assert sent('P("y", None)', "P(None, None)") == ("ALL_GATHER", 3 / 4 * 1024)
    assert sent('P(("x", "y"), None)', 'P("x", None)') == ("ALL_GATHER", 3 / 4 * 512)
    assert sent('P(None, None, unreduced={"y"})', "P(None, None)") == ("ALL_REDUCE", 2 * 3 / 4 * 1024)
    assert sent('P("x", None, unreduced={"y"})', 'P(("x", "y"), None)') == ("REDUCE_SCATTER", 3 / 4 * 512)
    assert sent('P("y", None)', 'P(None, "y")') == ("ALL_TO_ALL", 3 / 4 * 256)
    assert sent('P(("x", "y"), None)', 'P(("y", "x"), None)') == ("COLLECTIVE_PERMUTE", 128)


def test_a_collective_over_two_axes_runs_at_the_rate_of_the_slower():
    assert UNEVEN.link((0, 1)) == SLOW
    assert UNEVEN.link((1,)) == FAST


def test_a_backend_that_makes_all_reduces_of_reduce_scatters_is_charged_for_them():
    mesh = LogicalMesh(axis_sizes=(4,))
    (step,) = paths(1, MeshLinks(mesh=mesh, links=(FAST,))).steps(layout('P(None, unreduced={"x"})'), layout('P("x")'))
    scatters = MeshLinks(mesh=mesh, links=(FAST,))
    reduces = MeshLinks(mesh=mesh, links=(FAST,), as_all_reduce=frozenset({CollectiveKind.REDUCE_SCATTER}))
    assert scatters.as_compiled(step, 1024.0) == (CollectiveKind.REDUCE_SCATTER, 256.0)
    assert reduces.as_compiled(step, 1024.0) == (CollectiveKind.ALL_REDUCE, 1024.0)


def test_a_backend_that_gathers_all_devices_by_all_reduces_is_charged_for_them():
    mesh = LogicalMesh(axis_sizes=(4, 2))
    both, one = MeshLinks(mesh=mesh, links=(FAST, FAST)), frozenset({CollectiveKind.ALL_GATHER})
    for split, kind in (('P(("x", "y"))', CollectiveKind.ALL_REDUCE), ('P("x")', CollectiveKind.ALL_GATHER)):
        (step,) = paths(1, both).steps(layout(split), layout("P(None)"))
        assert both.as_compiled(step, 1024.0) == (CollectiveKind.ALL_GATHER, 1024.0)
        assert dataclasses.replace(both, as_all_reduce=one).as_compiled(step, 1024.0) == (kind, 1024.0)


def test_a_path_over_a_layout_that_does_not_divide_does_not_fit():
    mesh = LogicalMesh(axis_sizes=(2, 2))
    found = paths(2, SQUARE).steps(layout('P("y", "x")'), layout('P("x", "y")'))
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
    steps = gather_and_slice(layout('P("y", None)'), layout('P(None, "y", unreduced={"x"})'))
    assert [(s.kind, s.axes) for s in steps] == [
        (StepKind.ALL_GATHER, (1,)),
        (StepKind.MASK, (0,)),
        (StepKind.SLICE, (1,)),
    ]
    kept = gather_and_slice(layout('P("y", None, unreduced={"x"})'), layout('P(None, "y", unreduced={"x"})'))
    assert [s.kind for s in kept] == [StepKind.ALL_GATHER, StepKind.SLICE]


def test_gathering_makes_a_replicated_value_of_any():
    steps = gather_and_slice(layout('P(("x", "y"), None)'), replicated(2))
    assert [s.kind for s in steps] == [StepKind.ALL_GATHER]


def test_small_sums_are_reduced_by_a_tree_and_large_ones_in_parts():
    cluster = autopar.Cluster.preset("dgx-a100-80g", hosts=16)
    links = cost_model(cluster, LogicalMesh(axis_sizes=(32, 4))).links
    table = paths_by_size(2, links)

    def kinds(nbytes):
        return [
            s.kind.name for s in table.steps(layout('P(None, "y", unreduced={"x"})'), layout('P("x", "y")'), nbytes)
        ]

    assert kinds(1 << 16) == kinds(1 << 23) == ["ALL_REDUCE", "SLICE"]
    assert kinds(1 << 30) == ["REDUCE_SCATTER"]
    # Each size takes what is faster for it.
    i, j = (np.array(table.index[layout(text)]) for text in ('P(None, "y", unreduced={"x"})', 'P("x", "y")'))
    for nbytes in (1 << 16, 1 << 23, 1 << 30):
        each = [t.fixed_s[i, j] + nbytes * t.s_per_byte[i, j] for t in table.tables]
        assert table.seconds(i, j, nbytes, 1.0) == min(each)


def test_sums_of_gigabytes_over_hundreds_of_devices_are_reduced_in_parts_along_one_axis_after_the_other():
    cluster = autopar.Cluster.preset("dgx-h100", hosts=128)
    links = cost_model(cluster, LogicalMesh(axis_sizes=(64, 2, 8))).links
    source, target = layout('P("z", None, unreduced={"x", "y"})'), layout('P("z", ("x", "y"))')
    found = paths_by_size(2, links).steps(source, target, 4 << 30)
    assert [(s.kind, s.axes) for s in found] == [(StepKind.REDUCE_SCATTER, (0,)), (StepKind.REDUCE_SCATTER, (1,))]
