"""The tables of constants."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, PartitionSpec

from autopar.cost.roofline import Work, time_s, transposed, transposing_s
from autopar.errors import InvalidArgumentError
from autopar.hardware import host_cpu, presets
from autopar.hardware.collective_cost import PLANNED_KINDS, CollectiveKind
from autopar.hardware.kinds import DeviceKind, Platform
from autopar.xla import collectives
from tests.hardware import published_measurements

KINDS = sorted({kind.name: kind for _, kind in presets.BY_JAX_NAME}.values(), key=lambda kind: kind.name)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_every_constant_has_a_source_and_a_sensible_unit(kind):
    assert kind.source
    assert 1e13 < kind.peak_flops_per_s("bfloat16") < 1e16
    assert 1e10 <= kind.memory_bytes < 1e12
    assert 5e11 < kind.memory_bytes_per_s <= kind.peak_memory_bytes_per_s < 1e13
    assert 0 < kind.launch_overhead_s < 1e-4
    assert 0.5 < kind.flops_efficiency <= 1


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        ("bfloat16", 989e12),
        ("float16", 989e12),
        ("float32", 494.5e12),
        ("float64", 67e12),
        ("float8_e4m3fn", 1979e12),
        ("int8", 1979e12),
        ("bool", 494.5e12),  # not in the table: as float32
    ],
)
def test_rates_by_dtype(dtype, expected):
    assert presets.H100.peak_flops_per_s(dtype) == pytest.approx(expected)
    # measured: bfloat16 and float32; three quarters of it in long runs. 8 bits reach the share of 16.
    share = 0.75 * (0.80 if dtype in ("bfloat16", "float16", "float8_e4m3fn", "int8") else 0.625)
    assert presets.H100.flops_per_s(dtype) == pytest.approx(expected * share)


def test_long_runs_leave_a_share_of_all_rates():
    device = dataclasses.replace(presets.H100, sustained_share=0.5)
    for dtype in ("bfloat16", "float32", "float8_e4m3fn"):
        whole = dataclasses.replace(device, sustained_share=1.0).flops_per_s(dtype)
        assert device.flops_per_s(dtype) == pytest.approx(whole / 2)
    with pytest.raises(InvalidArgumentError, match="sustained_share above zero"):
        dataclasses.replace(device, sustained_share=0.0)


# openxla's measured matrix products, of 256, 1024 and 4096 a side, and the largest, at 805 Tflop/s.
@pytest.mark.parametrize(
    ("device", "dtype", "flops", "seconds"),
    [
        (presets.H100, "bfloat16", 2 * 4 * 4096 * 2048 * 4096, 2 * 4 * 4096 * 2048 * 4096 / 804.7e12),
        (presets.H100, "bfloat16", 2 * 256**3, 5.4e-6),
        (presets.H100, "bfloat16", 2 * 1024**3, 8.5e-6),
        (presets.B200, "bfloat16", 2 * 1024**3, 7.46e-6),
        (presets.B200, "float32", 2 * 4096**3, 181.3e-6),
    ],
)
def test_overhead_and_efficiency_give_measured_times(device, dtype, flops, seconds):
    device = dataclasses.replace(device, sustained_share=1.0)  # in short runs
    predicted = device.launch_overhead_s + flops / device.flops_per_s(dtype) + device.fill_s(dtype)
    assert predicted == pytest.approx(seconds, rel=0.12)


@pytest.mark.parametrize("arch", published_measurements.LINKS)
def test_links_give_measured_times_from_1_mb(arch):
    timings = published_measurements.collective_timings()[arch]
    found = published_measurements.ratios(timings, published_measurements.LINKS[arch])
    assert np.median(np.abs(found - 1.0)) < 0.12
    # Permutes of 16 to 256 MB take 760 us over 64 GB200 and 430 over 72: one constant cannot have both.
    for kind in set(PLANNED_KINDS) - {CollectiveKind.COLLECTIVE_PERMUTE}:
        assert np.median(found[[t.kind is kind for t in timings]]) == pytest.approx(1.0, abs=0.15), kind


@pytest.mark.parametrize(("arch", "device"), published_measurements.DEVICES.items())
def test_products_take_measured_times(arch, device):
    measured = published_measurements.products(arch)
    assert np.median([abs(product.predicted_s(device) / product.seconds - 1) for product in measured]) < 0.15


@pytest.mark.parametrize(
    "point", published_measurements.published(), ids=lambda p: f"{p.what} {p.kind.value} {p.gb_per_s:.0f}"
)
def test_presets_give_published_rates(point):
    # Two measurements that contradict each other: XLA's table has 250 GB/s of 2 GB over two H100, and is followed.
    tolerance = 0.3 if (point.what, point.kind) == ("2 H100", CollectiveKind.ALL_REDUCE) else 0.2
    assert published_measurements.rate_gb_per_s(point) == pytest.approx(point.gb_per_s, rel=tolerance)


@pytest.mark.parametrize(
    ("constants", "kind", "expected_s"),
    [
        # a shard of 1 Gflop and 4 + 1 MB of operands, 10 MB in all
        ({}, {"is_product": True}, 1e-6 + 1e9 / 1e11),
        ({"packing_bytes_per_s": 1e9}, {}, 1e-6 + 1e9 / 1e11),
        ({"packing_bytes_per_s": 1e9}, {"is_product": True}, 1e-6 + 1e9 / 1e11 + 5e6 / 1e9),
        ({"packing_bytes_per_s": 1e12}, {"is_product": True}, 1e-6 + 1e9 / 1e11 + 5e6 / 1e12),
        ({"convolution_share": 0.5}, {"is_product": True}, 1e-6 + 1e9 / 1e11),
        ({"convolution_share": 0.5}, {"is_convolution": True}, 1e-6 + 1e9 / 0.5e11),
        ({"convolution_share": 0.5, "packing_bytes_per_s": 1e9}, {"is_convolution": True}, 1e-6 + 1e9 / 0.5e11),
    ],
)
def test_operands_of_products_are_packed_and_convolutions_reach_their_share(constants, kind, expected_s):
    device = dataclasses.replace(
        host_cpu.cpu_device(num_devices=1, cores=1, host_bytes=1),
        peak_flops=(("float32", 1e11),),
        peak_memory_bytes_per_s=1e11,
        launch_overhead_s=1e-6,
        **constants,
    )
    work = Work(
        flops=4e9,
        dtype="float32",
        operand_bytes=(8_000_000, 4_000_000),
        result_bytes=(10_000_000,),
        fusible=False,
        **kind,
    )
    assert time_s(work, 4, ((2, 4), (2,)), device) == pytest.approx(expected_s)


@pytest.mark.parametrize(
    ("row_bytes", "seconds"),
    [
        (50, 1e-3),  # shorter rows than were measured, and longer ones, as the nearest
        (100, 1e-3),
        (200, 4e-3),  # rows four times as long took sixteen times as long
        (400, 16e-3),
        (800, 16e-3),
    ],
)
def test_transposing_takes_what_was_measured(row_bytes, seconds):
    device = dataclasses.replace(presets.H100, transposing=((100.0, 1e-6), (400.0, 16e-6)))
    assert device.transposing_s(1000.0, row_bytes) == pytest.approx(seconds)
    assert presets.H100.transposing_s(1000.0, row_bytes) == 0.0


def on_memory(bytes_per_s, **changed):
    return dataclasses.replace(presets.H100, peak_memory_bytes_per_s=bytes_per_s, memory_efficiency=1.0, **changed)


@pytest.mark.parametrize(("array_bytes", "bytes_per_s"), [(50, 16.0), (100, 16.0), (200, 8.0), (400, 4.0), (800, 4.0)])
def test_memory_moves_at_the_rate_of_arrays_of_that_size(array_bytes, bytes_per_s):
    device = on_memory(4.0, memory_shares=((100.0, 4.0), (400.0, 1.0)))
    assert device.memory_s(32.0, array_bytes) == pytest.approx(32.0 / bytes_per_s)
    assert presets.H100.memory_s(32.0, array_bytes) == pytest.approx(32.0 / presets.H100.memory_bytes_per_s)


@pytest.mark.parametrize(
    ("fusible", "operand_parts", "result_parts", "expected_s"),
    [
        (False, (1, 1), (1,), (400 + 100 + 200) / 4.0),
        (False, (4, 1), (2,), (100 + 100 + 100) / 16.0),  # by the parts that a device has
        (True, (4, 1), (1,), 0.5 * 200 / 8.0),
    ],
)
def test_the_largest_array_of_an_operation_tells_its_rate(fusible, operand_parts, result_parts, expected_s):
    device = on_memory(4.0, memory_shares=((100.0, 4.0), (400.0, 1.0)), launch_overhead_s=0.0, float32_fill_s=0.0)
    work = Work(flops=0.0, dtype="float32", operand_bytes=(400, 100), result_bytes=(200,), fusible=fusible)
    assert time_s(work, 1, (operand_parts, result_parts), device) == pytest.approx(expected_s)


@pytest.mark.parametrize(
    ("mebibytes", "runs", "shared_by", "new_mebibytes"),
    [
        (33, 1, 8, 33),
        (33, 3, 8, 99),  # large blocks are new in every run
        (32, 1, 8, 32 - 64 / 8),
        (32, 3, 8, 32 - 64 / 8),  # of small ones what is not kept is new once a step
        (8, 3, 8, 0),
        (32, 3, 1, 0),
    ],
)
def test_memory_is_new_beyond_what_a_process_keeps(mebibytes, runs, shared_by, new_mebibytes):
    device = dataclasses.replace(presets.H100, fresh_bytes_per_s=2.0**20, shared_by=shared_by)
    assert host_cpu.page_fault_s(device, mebibytes * 2**20, runs) == pytest.approx(new_mebibytes)
    assert host_cpu.page_fault_s(presets.H100, mebibytes * 2**20, runs) == 0.0


@pytest.mark.parametrize(("shared_by", "num_devices", "slower"), [(8, 8, True), (8, 4, False), (1, 8, False)])
def test_one_program_on_all_that_share_processors_leaves_some_idle(shared_by, num_devices, slower):
    device = dataclasses.replace(presets.H100, shared_by=shared_by, dtype_efficiency=(("float32", 0.5),))
    left = host_cpu.in_one_program(device, num_devices)
    used = 0.905 if slower else 1.0
    for dtype in ("float32", "bfloat16"):
        assert left.flops_per_s(dtype) == pytest.approx(used * device.flops_per_s(dtype))
        assert left.peak_flops_per_s(dtype) == device.peak_flops_per_s(dtype)
    assert left.memory_s(1e6, 1e6) == pytest.approx(device.memory_s(1e6, 1e6) / used)


@pytest.mark.parametrize(
    ("mebibytes", "temporary_mebibytes", "shared_by", "new_mebibytes"),
    [(8, 0, 8, 0), (38, 0, 8, 10), (35, 5, 8, 32 / 3), (30, 20, 8, 10), (38, 40, 8, 10), (80, 0, 1, 16 / 3)],
)
def test_of_what_is_held_in_many_blocks_a_part_is_new(mebibytes, temporary_mebibytes, shared_by, new_mebibytes):
    device = dataclasses.replace(presets.H100, fresh_bytes_per_s=2.0**20, shared_by=shared_by)
    assert host_cpu.held_page_fault_s(device, mebibytes * 2**20, temporary_mebibytes * 2**20) == pytest.approx(
        new_mebibytes
    )
    assert host_cpu.held_page_fault_s(presets.H100, mebibytes * 2**20, 0) == 0.0


def test_an_operand_is_transposed_in_parts():
    device = dataclasses.replace(presets.H100, transposing=((100.0, 1e-6), (400.0, 16e-6)))
    work = Work(
        flops=0.0,
        dtype="float32",
        operand_bytes=(4000, 8000),
        result_bytes=(8,),
        fusible=False,
        transposed=((0, 400, 1.0), (1, 200, 3.0)),
    )
    assert transposing_s(work, (4, 8), (4, 1), device) == pytest.approx(1000 * 1e-6 + 3000 * 4e-6)
    assert transposing_s(work, (4, 8), (4, 1), presets.H100) == 0.0


def _convolved(numbers):
    return lambda x, y: jax.lax.conv_general_dilated(x, y, (1, 1), "SAME", dimension_numbers=numbers)


@pytest.mark.parametrize(
    ("function", "shapes", "expected"),
    [
        (lambda x, y: x @ y, ((8, 4), (4, 8)), ()),
        (lambda x, y: x.T @ y, ((4, 8), (4, 8)), ()),
        (lambda x, y: jnp.einsum("bmk,bkn->bmn", x, y), ((2, 8, 4), (2, 4, 8)), ()),
        (lambda x, y: jnp.einsum("bmk,bnk->bmn", x, y), ((2, 8, 4), (2, 8, 4)), ()),
        (lambda x, y: jax.lax.batch_matmul(jnp.swapaxes(x, 1, 2), y), ((2, 4, 8), (2, 4, 8)), ()),
        (
            lambda x, y: jax.lax.dot_general(x, y, (((1,), (1,)), ((0,), (0,)))),
            ((2, 4, 8), (2, 4, 8)),
            (0,),
        ),
        (
            lambda x, y: jax.lax.dot_general(x, y, (((1,), (1,)), ((0,), (0,)))),
            ((2, 4, 1), (2, 4, 8)),
            (),
        ),
        (_convolved(("NHWC", "HWIO", "NHWC")), ((2, 8, 8, 3), (3, 3, 3, 4)), ()),
        (_convolved(("NCHW", "HWIO", "NHWC")), ((2, 3, 8, 8), (3, 3, 3, 4)), (0,)),
        (_convolved(("CHWN", "IHWO", "HWNC")), ((3, 8, 8, 2), (3, 3, 3, 4)), (0,)),
        (_convolved(("NCHW", "OIHW", "NCHW")), ((2, 3, 8, 8), (4, 3, 3, 3)), (0, 1)),
    ],
)
def test_operands_that_are_transposed(function, shapes, expected):
    made = jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes))
    (eqn,) = (e for e in made.jaxpr.eqns if e.primitive.name in ("dot_general", "conv_general_dilated"))
    assert transposed(eqn) == expected


def test_a_device_needs_a_rate_for_float32():
    with pytest.raises(InvalidArgumentError, match=r"DeviceKind\('x'\).peak_flops: expected a rate for float32"):
        DeviceKind(
            name="x",
            peak_flops=(("bfloat16", 1e12),),
            memory_bytes=1,
            peak_memory_bytes_per_s=1.0,
            launch_overhead_s=0.0,
            flops_efficiency=1.0,
            memory_efficiency=1.0,
            source="test",
        )


def test_every_gpu_has_links():
    gpus = {kind.name for kind in KINDS if kind.platform is Platform.GPU}
    assert set(presets.GPU_LINKS) == gpus
    assert set(presets.TPU_ICI) == {kind.name for kind in KINDS if kind.platform is Platform.TPU}
    assert set(presets.GPU_LINKS) | set(presets.TPU_ICI) == {kind.name for kind in KINDS}
    assert host_cpu.cpu_device(num_devices=1, cores=1, host_bytes=1).platform is Platform.CPU


def test_virtual_cpu_devices_share_their_host():
    two, eight = (host_cpu.cpu_device(num_devices=n, cores=2, host_bytes=16_000_000_000) for n in (2, 8))
    assert two.flops_per_s("float32") == pytest.approx(4 * eight.flops_per_s("float32"))
    assert two.memory_bytes_per_s == pytest.approx(4 * eight.memory_bytes_per_s)
    assert (two.memory_bytes, eight.memory_bytes) == (8_000_000_000, 2_000_000_000)
    assert host_cpu.cpu_link(2).bytes_per_s == pytest.approx(4 * host_cpu.cpu_link(8).bytes_per_s)
    assert host_cpu.cpu_process_link(2).bytes_per_s < host_cpu.cpu_link(2).bytes_per_s


def test_the_cpu_backend_sends_bfloat16_as_32_bits():
    """What `widens_bfloat16` says of CPU devices, in the program that XLA makes."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("d",), axis_types=(AxisType.Auto,))
    step = jax.shard_map(
        lambda x: jax.lax.psum(x, "d"), mesh=mesh, in_specs=PartitionSpec("d"), out_specs=PartitionSpec()
    )
    text = jax.jit(step).lower(jax.ShapeDtypeStruct((64, 32), jnp.bfloat16)).compile().as_text()
    (found,) = collectives.collectives(text)
    assert host_cpu.cpu_device(num_devices=2, cores=2, host_bytes=2).widens_bfloat16
    assert (found.dtype, found.result_bytes) == ("f32", 32 * 32 * 4)
