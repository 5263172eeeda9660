"""Ragged products in blocks of rows: equal to the primitive, chosen by time, in steps and in programs for GPUs."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar import recipes
from autopar.common import jax_compat
from autopar.execute import aot
from autopar.hardware import presets
from autopar.ops.kernels import grouped
from autopar.ops.kernels.grouped import (
    ProductShape,
    RowBlocks,
    Turns,
    blocks_of,
    in_blocks,
    product_of_rows,
    sum_over_rows,
    with_room,
)
from autopar.ops.kernels.operation import DenseWork, bytes_in_blocks, dense_work, held_bytes
from tests.ops.kernels import test_grouped
from tests.ops.kernels.ragged_steps import batch, scattered, shared, state, step
from tests.small_steps import assert_close, slow_cluster

M, K, N, E = 24, 4, 6, 3
product = jax.lax.ragged_dot


def of_rows(x, w, cotangent, sizes):
    return jax.linear_transpose(lambda x: product(x, w, sizes), x)(cotangent)[0]


def of_matrices(x, w, cotangent, sizes):
    return jax.linear_transpose(lambda w: product(x, w, sizes), w)(cotangent)[0]


def forward(x, w, cotangent, sizes):
    return product(x, w, sizes)


PRODUCTS = {f.__name__: f for f in (forward, of_rows, of_matrices)}


def equation(function, *args, device=presets.H100):
    """The ragged product of a function, as it is made for a device."""
    equations = jax_compat.equations_in(jax_compat.plain_jaxpr(function, *args))
    return in_blocks(next(e for e in equations if e.primitive.name == "ragged_dot_general"), device)


def shapes(rows, inner, columns, groups, dtype=jnp.bfloat16):
    of = ((rows, inner), (groups, inner, columns), (rows, columns))
    return *(jax.ShapeDtypeStruct(shape, dtype) for shape in of), jax.ShapeDtypeStruct((groups,), jnp.int32)


def in_blocks_of(monkeypatch, rows, everywhere=False, least_groups=2):
    """All products in blocks of so many rows; on all devices, where asked."""
    monkeypatch.setattr(RowBlocks, "block", lambda self, shape: rows)
    monkeypatch.setattr(RowBlocks, "least_groups", lambda self, shape, block: min(least_groups, shape.groups))
    if everywhere:
        monkeypatch.setattr(grouped, "is_dense", lambda eqn, platform: True)


# Their numbers


SIZES = [(8, 8, 8), (0, 24, 0), (5, 0, 19), (1, 2, 3), (0, 0, 0)]


@pytest.mark.parametrize(("rows", "least_groups"), [(1, 2), (5, 1), (5, 2), (5, 3), (24, 2), (128, 2)])
@pytest.mark.parametrize("function", PRODUCTS)
def test_products_in_blocks_are_those_of_the_primitive(function, rows, least_groups, monkeypatch):
    """Rows behind those of all groups, and matrices of groups without rows, are zero."""
    in_blocks_of(monkeypatch, rows, least_groups=least_groups)
    numbers = np.random.default_rng(0)
    arrays = [jnp.asarray(numbers.normal(size=a.shape), jnp.float32) for a in shapes(M, K, N, E)[:3]]
    eqn = equation(PRODUCTS[function], *arrays, jnp.array(SIZES[0], jnp.int32))
    assert blocks_of(eqn) is not None
    expected, made = jax.jit(PRODUCTS[function]), jax.jit(functools.partial(jax_compat.bind, eqn))
    for sizes in SIZES:
        args = [*arrays, jnp.array(sizes, jnp.int32)]
        operands = [next(a for a in args if a.shape == v.aval.shape) for v in eqn.invars]
        (result,) = made(operands)
        np.testing.assert_allclose(result, expected(*args), rtol=1e-5, atol=1e-5, err_msg=str(sizes))


@pytest.mark.parametrize(
    ("dtype", "options"),
    [(jnp.bfloat16, {}), (jnp.bfloat16, {"preferred_element_type": jnp.float32}), (jnp.float16, {}),
     (jnp.float32, {"precision": jax.lax.Precision.HIGHEST}), (jnp.int8, {"preferred_element_type": jnp.int32})],
)  # fmt: skip
@pytest.mark.parametrize("sums", [False, True])
def test_types_are_those_of_the_primitive_and_sums_are_rounded_once(dtype, options, sums, monkeypatch):
    in_blocks_of(monkeypatch, 1)  # as many turns as rows
    rows = (((0,), (0,)), ((), ())), [0], []
    numbers = jax.lax.RaggedDotDimensionNumbers(*(rows if sums else ((((1,), (1,)), ((), ())), [0], [0])))
    values, (x, w, c, _) = np.random.default_rng(0), shapes(M, K, N, E)
    args = [jnp.asarray(values.integers(1, 9, a.shape), dtype) for a in ((x, c) if sums else (x, w))]
    args.append(jnp.array([20, 1, 3], jnp.int32))
    run = functools.partial(jax.lax.ragged_dot_general, ragged_dot_dimension_numbers=numbers, **options)
    expected, eqn = jax.jit(run)(*args), equation(run, *args)
    (made,) = jax.jit(functools.partial(jax_compat.bind, eqn))(args)
    assert made.dtype == expected.dtype
    np.testing.assert_array_equal(np.asarray(made, np.float64), np.asarray(expected, np.float64))


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(4,), (2, 2)], ids=str)
def test_every_split_of_a_product_in_blocks_computes_the_same(sizes, monkeypatch):
    in_blocks_of(monkeypatch, 5, everywhere=True)
    test_grouped.test_every_split_of_a_product_computes_the_same(test_grouped.ragged, sizes)


# Which are in blocks


def chosen(function, device, *sizes):
    of = blocks_of(equation(PRODUCTS[function], *shapes(*sizes), device=device))
    return of is not None and of[0].block(of[1])


@pytest.mark.parametrize(
    ("function", "device", "expected"),
    [
        ("forward", presets.H100, 256), ("of_rows", presets.H100, 256), ("of_matrices", presets.H100, 1024),
        ("forward", presets.TPU_V5P, False), ("of_rows", presets.TPU_V5P, False),
        ("of_matrices", presets.TPU_V5P, 1024),
        *((function, slow_cluster(1).device, False) for function in PRODUCTS),
    ],
)  # fmt: skip
def test_what_xla_makes_dense_is_in_blocks(function, device, expected):
    assert chosen(function, device, 16384, 4096, 14336, 8) is expected or expected


@pytest.mark.parametrize("function", PRODUCTS)
def test_products_of_one_group_and_small_ones_stay_as_they_are_written(function):
    assert chosen(function, presets.H100, 16384, 4096, 14336, 1) is None
    assert chosen(function, presets.H100, 256, 64, 64, 8) is None


def test_complex_numbers_and_algorithms_stay_as_they_are_written():
    algorithm = functools.partial(product, precision=jax.lax.DotAlgorithmPreset.BF16_BF16_F32)
    for function, dtype in ((product, jnp.complex64), (algorithm, jnp.bfloat16)):
        x, w, _, sizes = shapes(M, K, N, E, dtype)
        assert equation(function, x, w, sizes).primitive.name == "ragged_dot_general"


@pytest.mark.parametrize("groups", [8, 64, 256])
@pytest.mark.parametrize("sums_rows", [False, True])
def test_the_block_is_the_fastest_and_takes_less_time_than_a_dense_product(groups, sums_rows, monkeypatch):
    shape = ProductShape(
        rows=65536, inner=2048, columns=768, groups=groups, sums_rows=sums_rows,
        dtype=jnp.dtype(jnp.bfloat16), made=jnp.dtype(jnp.bfloat16),
    )  # fmt: skip
    blocks = RowBlocks(device=presets.H100)
    own_s = shape.flops / presets.H100.flops_per_s("bfloat16")
    chosen_s = blocks.time_s(shape)
    assert own_s < chosen_s < groups * own_s  # XLA's multiplies with the matrices of all groups
    assert chosen_s < blocks.time_s(shape, skew=2.0) < 2 * chosen_s  # the largest group has as many rows as two
    for rows in (128, 256, 512, 1024, 2048, 65536):
        monkeypatch.setattr(RowBlocks, "block", lambda self, shape, rows=rows: rows)
        assert chosen_s <= blocks.time_s(shape)


@pytest.mark.parametrize("function", ["forward", "of_matrices"])
def test_room_that_is_not_filled_makes_no_larger_blocks(function):
    """Where devices exchange rows there is room for twice as many as come."""
    of, shape = blocks_of(equation(PRODUCTS[function], *shapes(65536, 2048, 768, 64)))
    roomy, wide = blocks_of(with_room(equation(PRODUCTS[function], *shapes(2 * 65536, 2048, 768, 64)), 2))
    assert roomy.block(wide) == of.block(shape)
    assert of.time_s(shape) <= roomy.time_s(wide) < 1.2 * of.time_s(shape)  # but for the zeros of a larger result
    assert roomy.time_s(wide, load=2.0) == of.time_s(wide) > 1.4 * of.time_s(shape)


@pytest.mark.parametrize("function", ["forward", "of_matrices"])
def test_few_groups_with_rows_left_are_multiplied_by_themselves(function):
    """A turn of all groups is left for those of one where these take less time."""
    of, shape = blocks_of(equation(PRODUCTS[function], *shapes(65536, 2048, 768, 64)))
    assert 1 < of.least_groups(shape, of.block(shape)) < 64


# Their memory and their work


@pytest.mark.parametrize(
    ("function", "dtype", "beside"),
    [
        ("forward", jnp.float32, 4 * 3 * 5 * (K + N)),  # rows of a turn, and what they make
        ("of_rows", jnp.bfloat16, 2 * 3 * 5 * (K + N)),
        ("of_matrices", jnp.float32, 4 * 3 * 5 * (K + N)),
        ("of_matrices", jnp.bfloat16, 4 * 3 * K * N + 2 * 3 * (5 * (K + N) - K * N)),  # sums in 32 bits
    ],
)
def test_a_product_in_blocks_holds_the_rows_of_a_turn(function, dtype, beside, monkeypatch):
    in_blocks_of(monkeypatch, 5)
    eqn = equation(PRODUCTS[function], *shapes(M, K, N, E, dtype))
    assert bytes_in_blocks(eqn) == beside
    program = jax.make_jaxpr(lambda *args: jax_compat.bind(eqn, args))(*(v.aval for v in eqn.invars))
    assert held_bytes(program, "gpu") == beside


def test_work_in_blocks_is_no_dense_work():
    eqn = equation(product, *(shapes(16384, 4096, 14336, 8)[i] for i in (0, 1, 3)))
    own = 2 * 16384 * 4096 * 14336
    of, shape = blocks_of(eqn)
    assert dense_work([eqn], "gpu") == DenseWork(0.0, own, 0.0, of.time_s(shape))
    assert dense_work([eqn], "gpu", split=2).blocks_s < 0.7 * of.time_s(shape)
    assert dense_work([eqn], "gpu", skew_of=lambda groups: groups / 4).blocks_s == of.time_s(shape, skew=2.0)


# Steps


def equals_jit(function, args, devices, **options):
    made = autopar.parallelize(function, cluster=slow_cluster(devices), cache_dir=None, **options)
    assert_close(made(*jax.tree.map(jnp.copy, args)), jax.jit(function)(*args))
    return made


WAYS = [
    (recipes.expert_parallel(), 2, 1, dict(skew=100.0)),
    (None, 1, 2, dict(scanned=True, checkpoint=True)),
    (recipes.expert_parallel(), 4, 2, {}),
    (recipes.combine(ep=2, tp=2), 4, 2, dict(scanned=True)),
    (recipes.combine(dp=2, zero=3), 2, 2, dict(scanned=True)),
    (recipes.expert_parallel(), 8, 2, dict(checkpoint=True, skew=100.0)),
    (recipes.combine(pp=2, ep=2, num_microbatches=2), 8, 2, {}),
    (recipes.combine(pp=2, num_microbatches=2), 2, 2, dict(skew=100.0)),
]


@pytest.mark.parametrize(
    ("recipe", "devices", "layers", "way"),
    [pytest.param(*row, marks=[] if i < 1 else pytest.mark.slow) for i, row in enumerate(WAYS)],
)
def test_a_mixture_in_blocks_equals_plain_jit(recipe, devices, layers, way, monkeypatch):
    in_blocks_of(monkeypatch, 3, everywhere=True)
    equals_jit(step(scattered, **way), (state(layers), batch()), devices, plan=recipe)


@pytest.mark.slow
def test_a_mixture_in_blocks_beside_a_shared_expert_equals_plain_jit(monkeypatch):
    in_blocks_of(monkeypatch, 3, everywhere=True)
    equals_jit(step(shared), (state(2), batch()), 4, plan=recipes.expert_parallel())


@pytest.mark.parametrize("devices", [1, pytest.param(8, marks=pytest.mark.slow)])
def test_products_in_blocks_that_stand_alone_equal_plain_jit(devices, monkeypatch):
    in_blocks_of(monkeypatch, 7, everywhere=True)
    equals_jit(test_grouped.step(test_grouped.ragged), test_grouped.arguments(), devices)


# Programs for GPUs


@pytest.mark.slow
@pytest.mark.skipif(not aot.has_gpu_compiler(), reason="needs the CUDA plugin (autopar[gpu])")
@pytest.mark.parametrize("function", PRODUCTS)
def test_programs_for_gpus_hold_the_rows_of_a_turn_and_copy_no_matrix(function):
    rows, inner, columns, groups = 16384, 1024, 2048, 32
    eqn = equation(PRODUCTS[function], *shapes(rows, inner, columns, groups))
    where = jax.sharding.NamedSharding(aot.target_mesh("gpu:h100:1", (1,), ("x",)), jax.sharding.PartitionSpec())
    operands = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, sharding=where) for v in eqn.invars]
    program = jax.jit(lambda *args: jax_compat.bind(eqn, args)).lower(*operands).compile()
    held = program.memory_analysis().temp_size_in_bytes
    assert held == pytest.approx(bytes_in_blocks(eqn), rel=0.07)
    made = [math.prod(map(int, dims.split(","))) for dims in re.findall(r"bf16\[([\d,]+)\]", program.as_text())]
    assert max(made) == groups * inner * columns  # the matrices, and no masked rows
    assert len(re.findall(r" while\(", program.as_text())) == 2  # of all groups, and of one


# What a plan says


@pytest.mark.parametrize(
    ("rows", "said"),
    [(3, "is made in blocks of the rows of each group where that takes less time: XLA for GPUs multiplies each row"),
     pytest.param(
         None, "XLA for GPUs multiplies each row with the matrices of all groups that a device has (predicted so)",
         marks=pytest.mark.slow,
     )],
    ids=["in blocks", "as written"],
)  # fmt: skip
def test_a_plan_says_how_ragged_products_are_made(rows, said, monkeypatch):
    in_blocks_of(monkeypatch, rows)
    made = autopar.parallelize(step(scattered), cluster="dgx-h100:1", cache_dir=None)
    (note,) = (note for note in made.plan(state(1), batch()).record.notes if "ragged_dot_general" in note)
    assert said in note


@pytest.mark.parametrize("sizes", [[5, 5, 5], [12, 0, 0], [0, 11, 3]])
@pytest.mark.parametrize("sums", [False, True])
def test_groups_that_ask_for_more_rows_than_there_are_end_with_the_rows(sizes, sums):
    rows, sizes = jax.random.normal(jax.random.key(0), (10, 3)), jnp.array(sizes)
    turns = Turns(block=4, least_groups=1)
    if sums:
        right = jax.random.normal(jax.random.key(1), (10, 2))
        numbers = jax.lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
        expected = jax.lax.ragged_dot_general(rows, right, sizes, numbers)
        found = sum_over_rows(rows, right, sizes, turns, jnp.dtype("float32"))
    else:
        matrices = jax.random.normal(jax.random.key(1), (3, 3, 2))
        expected = jax.lax.ragged_dot(rows, matrices, sizes)
        found = product_of_rows(rows, matrices, sizes, turns, (0, 1))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
