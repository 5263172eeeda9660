"""Meshes and layouts: literal values."""

import pytest
from jax.sharding import PartitionSpec

from autopar.ir.jax_sharding import joint_mesh, stacked_spec
from autopar.ir.layout import (
    Layout,
    LogicalMesh,
    enumerate_layouts,
    enumerate_with_partial,
    factorisations,
    local_bytes,
    orderings,
    replicated,
)

MESH = LogicalMesh(axis_sizes=(2, 4))


def texts(layouts):
    return [layout.text(MESH) for layout in layouts]


def test_a_layout_reads_as_its_axes_by_name():
    assert Layout(((0,), (), (1,))).text(MESH) == 'P("x", None, "y")'
    assert Layout(((0, 1), ())).text(MESH) == 'P(("x", "y"), None)'
    assert Layout(((), ()), (0, 1)).text(MESH) == 'P(None, None, unreduced={"x", "y"})'
    assert Layout(()).text(MESH) == "P()"


def test_an_axis_stands_in_one_place_only():
    with pytest.raises(ValueError, match="a mesh axis twice"):
        Layout(((0,), (0,)))
    with pytest.raises(ValueError, match="a mesh axis twice"):
        Layout(((0,), ()), (0,))


def test_bytes_on_a_device_of_split_and_partial_values():
    assert local_bytes((8, 8), 4, Layout(((0,), (1,))), MESH) == 32
    assert local_bytes((8, 8), 4, Layout(((0, 1), ())), MESH) == 32
    assert local_bytes((8, 8), 4, Layout(((0,), ()), (1,)), MESH) == 128  # a summand is as large as the sum
    assert local_bytes((8, 8), 4, replicated(2), MESH) == 256


def test_a_layout_fits_where_every_dimension_divides():
    assert Layout(((0, 1), ())).fits((8, 3), MESH)
    assert not Layout(((0, 1), ())).fits((4, 3), MESH)
    assert not Layout(((), (0,))).fits((8, 3), MESH)


def test_reduced_drops_only_what_is_partial():
    assert Layout(((0,), ()), (1,)).reduced == Layout(((0,), ()))
    assert Layout(((), ()), (1,)).reduced.is_replicated
    assert not Layout(((), ()), (1,)).is_replicated


def test_every_layout_of_a_matrix_of_which_one_dimension_does_not_divide_by_the_larger_axis():
    assert texts(enumerate_layouts((8, 2), MESH)) == [
        "P(None, None)",
        'P("y", None)',
        'P("x", None)',
        'P(("x", "y"), None)',
        'P(None, "x")',
        'P("y", "x")',
    ]


def test_every_layout_of_a_vector_partial_ones_too():
    assert texts(enumerate_with_partial((4,), MESH)) == [
        "P(None)",
        'P("y")',
        'P(None, unreduced={"y"})',
        'P("x")',
        'P("x", unreduced={"y"})',
        'P(None, unreduced={"x"})',
        'P("y", unreduced={"x"})',
        'P(None, unreduced={"x", "y"})',
    ]


def test_another_order_of_axes_splits_a_dimension_the_other_way_round():
    assert texts(enumerate_layouts((8,), MESH, (1, 0))) == ["P(None)", 'P("x")', 'P("y")', 'P(("y", "x"))']


def test_axes_of_size_one_are_never_used():
    mesh = LogicalMesh(axis_sizes=(1, 2))
    assert [layout.text(mesh) for layout in enumerate_layouts((4,), mesh)] == ["P(None)", 'P("y")']


def test_a_scalar_has_one_layout():
    assert enumerate_layouts((), MESH) == (Layout(()),)


def test_meshes_of_eight_devices():
    assert [mesh.axis_sizes for mesh in factorisations(8)] == [(8,), (2, 4), (2, 2, 2)]
    assert [mesh.axis_sizes for mesh in factorisations(8, max_axes=2)] == [(8,), (2, 4)]
    assert [mesh.axis_sizes for mesh in factorisations(1)] == [(1,)]
    assert [mesh.axis_sizes for mesh in orderings(MESH)] == [(2, 4), (4, 2)]
    assert [mesh.axis_sizes for mesh in orderings(LogicalMesh(axis_sizes=(2, 2)))] == [(2, 2)]


def test_size_of_axes_together():
    assert (MESH.num_devices, MESH.size(()), MESH.size((1,)), MESH.size((0, 1))) == (8, 1, 4, 8)
    assert str(MESH) == "2x4"
    assert str(LogicalMesh(axis_sizes=(2, 4), names=("data", "model"))) == "data=2 x model=4"


def test_the_axis_of_stages_is_none_of_a_stage_s_own():
    mesh = LogicalMesh(axis_sizes=(2,), names=("stage",))
    joint, spec = joint_mesh(mesh, [0, 2]), stacked_spec(Layout(((0,), ())), mesh.axis_names)
    assert (joint.axis_names, spec) == (("stage1", "stage"), PartitionSpec(("stage1", "stage")))
