"""Values cross between meshes from any layout to any other: the numbers stay, and each byte crosses once."""

import itertools
import math
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar.ir.jax_sharding import named_sharding, submesh
from autopar.ir.layout import Layout, LogicalMesh, enumerate_layouts, replicated
from autopar.runtime.cross_mesh import End, Hop, common_grid, grid_of, refined, regrid, wire_layouts
from autopar.runtime.transfers import Crossing, crosser, crossing

MESHES = [LogicalMesh(axis_sizes=s) for s in ((1,), (2,), (3,), (4,), (8,), (2, 2), (2, 4), (4, 2))]
SHAPES = ((24, 16), (6, 4), (8,), (5,), (), (2, 3, 4))
PAIRS = list(itertools.product(MESHES, MESHES))


def places_of(layout, mesh):
    """For each device, the index of its piece along each dimension."""
    sizes = grid_of(layout, mesh)
    found = []
    for device in itertools.product(*map(range, mesh.axis_sizes)):
        place = []
        for axes in layout.dims:
            coordinates = [device[a] for a in axes]
            place.append(int(np.ravel_multi_index(coordinates, [mesh.axis_sizes[a] for a in axes])) if axes else 0)
        found.append(tuple(place))
    assert len(set(found)) == math.prod(sizes)
    return found


def part(array, grid, place):
    """The piece of an array at a place of a grid."""
    sizes = [n // g for n, g in zip(array.shape, grid, strict=True)]
    return array[(..., *(slice(p * n, (p + 1) * n) for p, n in zip(place, sizes, strict=True)))]


def carry(array, source, source_mesh, target, target_mesh):
    """What each device of the target holds after the hops, on numpy arrays."""
    grids = regrid(source, source_mesh, target, target_mesh)
    held = [part(array, grid_of(source, source_mesh), p) for p in places_of(source, source_mesh)]
    numbers = list(itertools.product(*map(range, grids.cuts)))
    shards = [
        np.full([n // g for n, g in zip(array.shape, grid_of(target, target_mesh), strict=True)], -1)
        for _ in range(target_mesh.num_devices)
    ]
    into = list(itertools.product(*map(range, grids.joins)))
    for hops in grids.rounds:
        for hop in hops:
            sent = part(held[hop.sender], grids.cuts, numbers[hop.sent])
            part(shards[hop.receiver], grids.joins, into[hop.taken])[...] = sent
    return shards


@pytest.mark.parametrize(("source_mesh", "target_mesh"), PAIRS, ids=str)
def test_hops_between_all_layouts(source_mesh, target_mesh):
    for shape in SHAPES:
        array = np.arange(math.prod(shape)).reshape(shape)
        layouts = itertools.product(enumerate_layouts(shape, source_mesh), enumerate_layouts(shape, target_mesh))
        for source, target in layouts:
            shards = carry(array, source, source_mesh, target, target_mesh)
            for shard, place in zip(shards, places_of(target, target_mesh), strict=True):
                np.testing.assert_array_equal(shard, part(array, grid_of(target, target_mesh), place))


@pytest.mark.parametrize(("source_mesh", "target_mesh"), PAIRS, ids=str)
def test_rounds_are_as_few_as_can_be_and_no_device_sends_twice_in_one(source_mesh, target_mesh):
    for shape in SHAPES:
        layouts = itertools.product(enumerate_layouts(shape, source_mesh), enumerate_layouts(shape, target_mesh))
        for source, target in layouts:
            rounds = regrid(source, source_mesh, target, target_mesh).rounds
            hops = [h for found in rounds for h in found]
            sends = [sum(h.sender == d for h in hops) for d in range(source_mesh.num_devices)]
            takes = [sum(h.receiver == d for h in hops) for d in range(target_mesh.num_devices)]
            assert len(rounds) == max(sends + takes)
            for found in rounds:
                assert len({h.sender for h in found}) == len({h.receiver for h in found}) == len(found)


@pytest.mark.parametrize(("source_mesh", "target_mesh"), PAIRS, ids=str)
def test_wires_carry_each_byte_once_over_balanced_links(source_mesh, target_mesh):
    """Wherever the value divides among all devices of both meshes."""
    n = math.lcm(source_mesh.num_devices, target_mesh.num_devices)
    for shape in ((2 * n, 3), (3, n), (n,), (5 * n, 2, n)):
        source, target = wire_layouts(shape, source_mesh, target_mesh)
        grids = regrid(source, source_mesh, target, target_mesh)
        fine = math.prod(common_grid(grid_of(source, source_mesh), grid_of(target, target_mesh)))
        hops = [h for found in grids.rounds for h in found]
        assert len(hops) == fine
        for ends, devices in (
            ([h.sender for h in hops], source_mesh.num_devices),
            ([h.receiver for h in hops], target_mesh.num_devices),
        ):
            assert {ends.count(d) for d in range(devices)} == {fine // devices}


def test_what_does_not_divide_crosses_once_for_each_copy_on_the_target():
    for source_mesh, target_mesh in PAIRS:
        for shape in SHAPES:
            source, target = wire_layouts(shape, source_mesh, target_mesh)
            grids = regrid(source, source_mesh, target, target_mesh)
            fine = math.prod(common_grid(grid_of(source, source_mesh), grid_of(target, target_mesh)))
            assert sum(map(len, grids.rounds)) == fine * (target_mesh.num_devices // target.shards(target_mesh))
            most = max(layout.shards(target_mesh) for layout in enumerate_layouts(shape, target_mesh))
            assert target.shards(target_mesh) == most


def test_hops_literal():
    """Two halves to four quarters: each half is cut in two, in each of two rounds both devices send."""
    two, four = LogicalMesh(axis_sizes=(2,)), LogicalMesh(axis_sizes=(4,))
    split = Layout(((0,),))
    grids = regrid(split, two, split, four)
    assert (grids.cuts, grids.joins) == ((2,), (1,))
    assert {frozenset(found) for found in grids.rounds} == {
        frozenset({Hop(sender=0, sent=a, receiver=a, taken=0), Hop(sender=1, sent=b, receiver=2 + b, taken=0)})
        for a, b in ((0, grids.rounds[0][1].sent), (1, grids.rounds[1][1].sent))
    }


def test_near_devices_are_chosen_among_copies():
    four = LogicalMesh(axis_sizes=(4,))
    grids = regrid(replicated(0), four, replicated(0), four, near=lambda sender, receiver: sender == 3 - receiver)
    assert {(h.sender, h.receiver) for found in grids.rounds for h in found} == {(3, 0), (2, 1), (1, 2), (0, 3)}


def test_refined_layouts_keep_what_is_split():
    mesh = LogicalMesh(axis_sizes=(2, 2))
    held = Layout(((1,), ()))
    source, target = refined((8, 8), (held, mesh), (replicated(2), mesh))
    assert source.dims[0][:1] == (1,)
    assert grid_of(source, mesh) == grid_of(target, mesh)
    assert source.shards(mesh) == target.shards(mesh) == 4


def end(layout, mesh, first_device):
    devices = submesh(mesh, first_device)
    return End(layout=layout, logical=mesh, mesh=devices, sharding=named_sharding(layout, devices))


def elements_put(way: Crossing, shape):
    """How many elements the puts of a crossing carry."""
    if way.is_direct:
        return math.prod(way.target.shard_shape(shape)) * way.target.mesh.size
    return sum(len(leg.senders) * math.prod(leg.put_to.shard_shape(leg.shape)) for leg in way.legs)


def check(arrived, array, sharding):
    assert arrived.sharding == sharding
    for shard in arrived.addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), array[shard.index])


def finer(layout, shape, mesh):
    """The layouts that split a value at least as a layout does."""
    found = enumerate_layouts(shape, mesh)
    return [f for f in found if all(set(a) <= set(b) for a, b in zip(layout.dims, f.dims, strict=True))]


FITTING = [(a, b) for a, b in PAIRS if a.num_devices + b.num_devices <= 8]


@pytest.mark.cases(8)
@pytest.mark.parametrize(("source_mesh", "target_mesh"), FITTING, ids=str)
def test_numbers_stay_between_any_layouts(source_mesh, target_mesh):
    """On devices, many values in one call, with puts through the host forbidden."""
    choice = random.Random(f"{source_mesh} {target_mesh}")
    ends, arrays = [], []
    for shape in SHAPES:
        for _ in range(2):
            source = choice.choice(enumerate_layouts(shape, source_mesh))
            target = choice.choice(enumerate_layouts(shape, target_mesh))
            ends.append((end(source, source_mesh, 0), end(target, target_mesh, source_mesh.num_devices)))
            arrays.append(np.arange(math.prod(shape), dtype=np.float32).reshape(shape))
    ways = [crossing(a.shape, a.dtype, *pair) for a, pair in zip(arrays, ends, strict=True)]
    held = [jax.device_put(a, source.sharding) for a, (source, _) in zip(arrays, ends, strict=True)]
    with jax.transfer_guard("disallow"):
        arrived = jax.block_until_ready(crosser(ways)(held))
    for found, array, (_, target), way in zip(arrived, arrays, ends, ways, strict=True):
        check(found, array, target.sharding)
        most = max(layout.shards(target_mesh) for layout in finer(target.layout, array.shape, target_mesh))
        assert elements_put(way, array.shape) == array.size * target_mesh.num_devices // most


@pytest.mark.parametrize(("sizes", "other"), [((1,), (4,)), ((2,), (4,)), ((4,), (2,)), ((2, 2), (2,)), ((4,), (4,))])
def test_replicated_values_cross_once_and_are_gathered(sizes, other):
    source_mesh, target_mesh = LogicalMesh(axis_sizes=sizes), LogicalMesh(axis_sizes=other)
    array = np.arange(64, dtype=np.float32).reshape(16, 4)
    source, target = end(replicated(2), source_mesh, 0), end(replicated(2), target_mesh, 4)
    way = crossing(array.shape, array.dtype, source, target)
    assert elements_put(way, array.shape) == array.size
    (arrived,) = crosser([way])([jax.device_put(array, source.sharding)])
    check(arrived, array, target.sharding)


def test_the_same_axis_names_in_another_order_are_another_layout():
    source_mesh = LogicalMesh(axis_sizes=(2, 2), names=("data", "model"))
    target_mesh = LogicalMesh(axis_sizes=(2, 2), names=("model", "data"))
    source, target = end(Layout(((0,), (1,))), source_mesh, 0), end(Layout(((1,), (0,))), target_mesh, 4)
    assert source.sharding.spec == target.sharding.spec
    array = np.arange(16, dtype=np.float32).reshape(4, 4)
    (arrived,) = crosser([crossing(array.shape, array.dtype, source, target)])([jax.device_put(array, source.sharding)])
    check(arrived, array, target.sharding)


def test_random_keys_cross():
    two, four = LogicalMesh(axis_sizes=(2,)), LogicalMesh(axis_sizes=(4,))
    keys = jax.random.split(jax.random.key(1), 8)
    source, target = end(Layout(((0,),)), two, 0), end(Layout(((0,),)), four, 2)
    (arrived,) = crosser([crossing((8,), keys.dtype, source, target)])([jax.device_put(keys, source.sharding)])
    assert arrived.sharding == target.sharding
    np.testing.assert_array_equal(jax.random.key_data(arrived), jax.random.key_data(keys))


@pytest.mark.cases(2)
@pytest.mark.parametrize(("sizes", "other"), [((2,), (4,)), ((4,), (2,)), ((2, 2), (4,)), ((4,), (4,))])
def test_sending_waits_for_nothing(sizes, other):
    """The call returns while what is sent is still being computed."""
    source_mesh, target_mesh = LogicalMesh(axis_sizes=sizes), LogicalMesh(axis_sizes=other)
    shape = (1024, 1024)
    leaves, arrives = wire_layouts(shape, source_mesh, target_mesh)
    source, target = end(leaves, source_mesh, 0), end(arrives, target_mesh, 4)
    send = crosser([crossing(shape, np.float32, source, target)])
    compute = jax.jit(
        lambda x: jax.lax.fori_loop(0, 12, lambda _, y: jnp.tanh(y @ y), x), out_shardings=source.sharding
    )
    array = jax.device_put(np.full(shape, 1e-3, np.float32), source.sharding)
    jax.block_until_ready(send([compute(array)]))  # compiles
    made = compute(array)
    (arrived,) = send([made])
    assert not arrived.is_ready()
    np.testing.assert_array_equal(np.asarray(arrived), np.asarray(made))
