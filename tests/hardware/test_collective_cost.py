"""Bytes and seconds of collectives: closed forms, and the programs that XLA compiles."""

import dataclasses

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, PartitionSpec

from autopar.errors import InvalidArgumentError
from autopar.execute import collectives
from autopar.hardware import presets
from autopar.hardware.collective_cost import (
    PLANNED_KINDS,
    CollectiveKind,
    Fabric,
    Link,
    SwitchDetail,
    sent_bytes,
    steps,
    time_s,
)

MEGABYTE = 1_000_000.0
LINK = Link(latency_s=1e-6, bytes_per_s=1e9, overhead_s=5e-6, source="test")


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (CollectiveKind.ALL_REDUCE, 2 * 7 / 8 * MEGABYTE),
        (CollectiveKind.ALL_GATHER, 7 / 8 * MEGABYTE),
        (CollectiveKind.ALL_TO_ALL, 7 / 8 * MEGABYTE),
        (CollectiveKind.REDUCE_SCATTER, 7 * MEGABYTE),
        (CollectiveKind.COLLECTIVE_PERMUTE, MEGABYTE),
    ],
)
def test_ring_bytes_over_eight_devices(kind, expected):
    assert sent_bytes(kind, MEGABYTE, 8) == pytest.approx(expected, rel=1e-15)


@pytest.mark.parametrize("kind", CollectiveKind)
def test_one_device_sends_nothing_in_no_time(kind):
    assert sent_bytes(kind, MEGABYTE, 1) == 0
    for fabric in Fabric:
        link = Link(latency_s=1e-6, bytes_per_s=1e9, overhead_s=5e-6, fabric=fabric, source="test")
        assert time_s(kind, MEGABYTE, 1, link) == 0


@pytest.mark.parametrize("n", [2, 3, 4, 16])
def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather(n):
    scatter = sent_bytes(CollectiveKind.REDUCE_SCATTER, MEGABYTE / n, n)
    gather = sent_bytes(CollectiveKind.ALL_GATHER, MEGABYTE, n)
    assert sent_bytes(CollectiveKind.ALL_REDUCE, MEGABYTE, n) == pytest.approx(scatter + gather)


@pytest.mark.parametrize("kind", PLANNED_KINDS)
@pytest.mark.parametrize("fabric", Fabric)
def test_arrays_give_what_numbers_give(kind, fabric):
    link = Link(latency_s=2e-6, bytes_per_s=3e9, overhead_s=1e-6, fabric=fabric, source="test")
    sizes, counts = np.array([0.0, 10.0, 1e9]), np.array([[1], [2], [8]])
    table = time_s(kind, sizes, counts, link)
    assert table.shape == (3, 3)
    for row, n in enumerate(counts[:, 0]):
        for column, size in enumerate(sizes):
            assert table[row, column] == time_s(kind, size, n, link)


@pytest.mark.parametrize(
    ("fabric", "kind", "expected"),
    [
        (Fabric.SWITCHED, CollectiveKind.ALL_REDUCE, 6),  # a tree, up and down: 2 log2(8)
        (Fabric.SWITCHED, CollectiveKind.ALL_GATHER, 7),
        (Fabric.SWITCHED, CollectiveKind.COLLECTIVE_PERMUTE, 1),
        (Fabric.TORUS, CollectiveKind.ALL_REDUCE, 14),
        (Fabric.TORUS, CollectiveKind.REDUCE_SCATTER, 7),
        (Fabric.SHARED_MEMORY, CollectiveKind.ALL_REDUCE, 7),
        (Fabric.SHARED_MEMORY, CollectiveKind.COLLECTIVE_PERMUTE, 7),
    ],
)
def test_steps_over_eight_devices(fabric, kind, expected):
    assert steps(kind, 8, fabric) == pytest.approx(expected)


def test_time_is_overhead_and_steps_and_bytes():
    seconds = time_s(CollectiveKind.ALL_GATHER, 8 * MEGABYTE, 8, LINK)
    assert seconds == pytest.approx(5e-6 + 7 * 1e-6 + 7 * MEGABYTE / 1e9)


def switched(**detail: float) -> Link:
    return Link(latency_s=1e-6, bytes_per_s=1e9, overhead_s=5e-6, source="test", detail=SwitchDetail(**detail))


@pytest.mark.parametrize(
    ("detail", "kind", "n", "expected_s"),
    [
        # 7 parts of 1 MB travel, one stays
        ({"kept_bytes_per_s": 2e9}, CollectiveKind.ALL_GATHER, 8, 5e-6 + 7 * 1e-6 + 7e6 / 1e9 + 1e6 / 2e9),
        # twice round the ring: 14 parts travel, two stay; 2 log2(8) steps
        ({"kept_bytes_per_s": 2e9}, CollectiveKind.ALL_REDUCE, 8, 5e-6 + 6 * 1e-6 + 14e6 / 1e9 + 2e6 / 2e9),
        # a reduce-scatter's result is the part that stays
        ({"kept_bytes_per_s": 2e9}, CollectiveKind.REDUCE_SCATTER, 3, 5e-6 + 2 * 1e-6 + 16e6 / 1e9 + 8e6 / 2e9),
        # the switch adds 8 MB up in 10 ms, the ring in 14
        ({"switch_bytes_per_s": 0.8e9}, CollectiveKind.ALL_REDUCE, 8, 5e-6 + 6 * 1e-6 + 10e-3),
        # over two devices the ring is faster: 8 ms
        ({"switch_bytes_per_s": 0.8e9}, CollectiveKind.ALL_REDUCE, 2, 5e-6 + 2 * 1e-6 + 8e-3),
        ({"switch_bytes_per_s": 0.8e9}, CollectiveKind.ALL_GATHER, 8, 5e-6 + 7 * 1e-6 + 7e-3),
        # a step of the tree takes 4 us: 14 steps round the ring are faster than 6 of these
        ({"tree_latency_s": 4e-6}, CollectiveKind.ALL_REDUCE, 8, 5e-6 + 14 * 1e-6 + 14e-3),
        # 12 steps of the tree are faster than 126 round the ring
        ({"tree_latency_s": 4e-6}, CollectiveKind.ALL_REDUCE, 64, 5e-6 + 12 * 4e-6 + 2 * 63 / 64 * 8e-3),
    ],
)
def test_what_more_is_known_of_a_switched_link(detail, kind, n, expected_s):
    assert time_s(kind, 8 * MEGABYTE, n, switched(**detail)) == pytest.approx(expected_s, rel=1e-12)


@pytest.mark.parametrize(
    ("megabytes", "expected_s"),
    [(1, 10e-3), (2, 20e-3), (10, 30e-3), (30, 30e-3), (40, 40e-3)],  # few channels; more and more; all
)
def test_a_permute_is_given_more_channels_when_it_is_large(megabytes, expected_s):
    link = switched(pair_bytes_per_s=0.1e9, pair_ramp_s=30e-3)
    seconds = time_s(CollectiveKind.COLLECTIVE_PERMUTE, megabytes * MEGABYTE, 8, link)
    assert seconds == pytest.approx(5e-6 + 1e-6 + expected_s, rel=1e-12)


@pytest.mark.parametrize("kind", PLANNED_KINDS)
@pytest.mark.parametrize("link", [presets.NVLINK4, presets.NVLINK5, presets.NVLINK5_NVL72], ids=lambda x: x.source)
def test_more_bytes_never_take_less_time(kind, link):
    sizes, counts = np.geomspace(1.0, 1e11, 200), np.array([[2], [3], [4], [8], [16], [72]])
    assert (np.diff(time_s(kind, sizes, counts, link), axis=1) >= 0).all()


@pytest.mark.parametrize("wrong", [{"kept_bytes_per_s": 0.0}, {"tree_latency_s": -1.0}, {"pair_bytes_per_s": 1e9}])
def test_a_detail_has_sensible_constants(wrong):
    with pytest.raises(InvalidArgumentError, match="constants above zero, pair_bytes_per_s and pair_ramp_s both"):
        SwitchDetail(**wrong)


def test_only_a_switched_link_has_such_a_detail():
    with pytest.raises(InvalidArgumentError, match="a detail on a switched fabric only"):
        Link(latency_s=0.0, bytes_per_s=1e9, source="test", fabric=Fabric.TORUS, detail=SwitchDetail())


def test_an_all_to_all_on_a_ring_takes_a_quarter_of_gathering_the_whole_array():
    ring = Link(latency_s=0.0, bytes_per_s=90e9, fabric=Fabric.TORUS, source="test")
    n, whole = 16, 16 * MEGABYTE
    gather = time_s(CollectiveKind.ALL_GATHER, whole, n, ring) * n / (n - 1)  # the closed form leaves (n-1)/n out
    assert time_s(CollectiveKind.ALL_TO_ALL, whole / n, n, ring) == pytest.approx(gather / 4)


@pytest.mark.parametrize("fabric", [Fabric.TORUS, Fabric.SWITCHED])
def test_a_ragged_all_to_all_takes_as_long_as_an_even_one(fabric):
    rates = ((CollectiveKind.ALL_TO_ALL, 1e8),) if fabric is Fabric.SWITCHED else ()
    link = Link(latency_s=1e-6, bytes_per_s=1e9, fabric=fabric, kind_bytes_per_s=rates, source="test")
    ragged, even = CollectiveKind.RAGGED_ALL_TO_ALL, CollectiveKind.ALL_TO_ALL
    assert time_s(ragged, MEGABYTE, 16, link) == time_s(even, MEGABYTE, 16, link)


def test_an_all_to_all_on_two_rings_goes_half_as_far():
    one = Link(latency_s=0.0, bytes_per_s=180e9, fabric=Fabric.TORUS, source="test")
    two = Link(latency_s=0.0, bytes_per_s=180e9, fabric=Fabric.TORUS, rings=2, source="test")
    # distance n/4 = 64 wires in one ring of 256; 2 * 16/4 = 8 in a torus of 16 x 16
    ratio = time_s(CollectiveKind.ALL_TO_ALL, 1e9, 256, one) / time_s(CollectiveKind.ALL_TO_ALL, 1e9, 256, two)
    assert ratio == pytest.approx(8)


def over_hosts(*apart: tuple[CollectiveKind, float]) -> Link:
    return Link(
        latency_s=1e-6,
        bytes_per_s=2e9,
        overhead_s=5e-6,
        source="test",
        kind_bytes_per_s=apart,
    )


@pytest.mark.parametrize(
    ("kind", "expected_s"),
    [
        (CollectiveKind.ALL_TO_ALL, 5e-6 + 7 * 1e-6 + 7e6 / 0.5e9),  # at its own rate
        (CollectiveKind.ALL_GATHER, 5e-6 + 7 * 1e-6 + 7e6 / 2e9),  # at that of all others
    ],
)
def test_a_kind_of_collective_may_have_its_own_rate(kind, expected_s):
    link = over_hosts((CollectiveKind.ALL_TO_ALL, 0.5e9))
    assert time_s(kind, 8 * MEGABYTE, 8, link) == pytest.approx(expected_s, rel=1e-12)


def test_a_torus_has_no_rates_of_single_kinds():
    apart = over_hosts((CollectiveKind.ALL_TO_ALL, 0.5e9))
    with pytest.raises(InvalidArgumentError, match="rates of single kinds on another fabric than a torus"):
        dataclasses.replace(apart, fabric=Fabric.TORUS)


@pytest.mark.parametrize(
    "wrong",
    [
        {"bytes_per_s": 0.0},
        {"latency_s": -1.0},
        {"overhead_s": -1e-9},
        {"kind_bytes_per_s": ((CollectiveKind.ALL_REDUCE, 0.0),)},
    ],
)
def test_a_link_has_sensible_constants(wrong):
    with pytest.raises(InvalidArgumentError, match="bytes_per_s above zero"):
        Link(**{"latency_s": 1e-6, "bytes_per_s": 1e9, "source": "test", **wrong})


def collective(kind: CollectiveKind, n: int):
    match kind:
        case CollectiveKind.ALL_REDUCE:
            return lambda x: jax.lax.psum(x, "d")
        case CollectiveKind.ALL_GATHER:
            return lambda x: jax.lax.all_gather(x, "d", tiled=True)
        case CollectiveKind.REDUCE_SCATTER:
            return lambda x: jax.lax.psum_scatter(x, "d", tiled=True)
        case CollectiveKind.ALL_TO_ALL:
            return lambda x: jax.lax.all_to_all(x, "d", 1, 0, tiled=True)
        case CollectiveKind.COLLECTIVE_PERMUTE:
            return lambda x: jax.lax.ppermute(x, "d", [(i, (i + 1) % n) for i in range(n)])


@pytest.mark.parametrize("kind", PLANNED_KINDS)
@pytest.mark.parametrize("n", [2, 8])
def test_compiled_programs_send_the_same_bytes(kind, n):
    mesh = Mesh(np.array(jax.devices()[:n]), ("d",), axis_types=(AxisType.Auto,))
    function = jax.shard_map(
        collective(kind, n), mesh=mesh, in_specs=PartitionSpec("d"), out_specs=PartitionSpec("d"), check_vma=False
    )
    text = jax.jit(function).lower(jax.ShapeDtypeStruct((64, 32), np.float32)).compile().as_text()
    (found,) = collectives.collectives(text)
    assert str(found.kind) == str(kind)
    assert found.sent_bytes_per_device == pytest.approx(float(sent_bytes(kind, found.result_bytes, n)))
