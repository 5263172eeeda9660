"""Products of 8 and 4 bits and of complex numbers: equal to plain `jax.jit`, priced and sent in their own types."""

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar import recipes
from autopar.hardware.presets import H100, TPU_V5E
from tests.programs.type_steps import INNER, LAYERS, PRODUCTS, WIDTH, arguments, training_step
from tests.small_steps import assert_close, slow_cluster

PARAMETERS = 2 * LAYERS * WIDTH * INNER
RECIPES = {
    "free": None,
    "data_parallel": recipes.data_parallel(),
    "zero": recipes.zero(3),
    "tensor_parallel": recipes.tensor_parallel(),
    "pipeline": recipes.pipeline(2, num_microbatches=2),
}
FAST = {("float8", "free", 4), ("float8", "pipeline", 2), ("int8", "pipeline", 2), ("complex64", "free", 4)}
DEVICES = {"free": (1, 2, 4, 8), "data_parallel": (4,), "zero": (4,), "tensor_parallel": (4,), "pipeline": (2, 4)}
CASES = [
    pytest.param(dtype, name, devices, marks=() if (dtype, name, devices) in FAST else pytest.mark.slow)
    for dtype in PRODUCTS
    for name, counts in DEVICES.items()
    for devices in counts
]


def parallel(dtype, name, devices):
    return autopar.parallelize(
        training_step(PRODUCTS[dtype]), plan=RECIPES[name], cluster=slow_cluster(devices), cache_dir=None,
    )  # fmt: skip


@pytest.mark.cases(1)
@pytest.mark.parametrize(("dtype", "name", "devices"), CASES)
def test_steps_equal_plain_jit(dtype, name, devices):
    args = arguments()
    made = parallel(dtype, name, devices)
    assert_close(made(*jax.tree.map(jnp.copy, args)), jax.jit(training_step(PRODUCTS[dtype]))(*args))


def test_matrices_are_gathered_in_8_bits():
    """Twice a step, forward and backward: the cast is moved before the gather."""
    sent = parallel("float8", "zero", 4).plan(*arguments()).predicted.by_kind()
    in_8_bits = 2 * PARAMETERS * 3 / 4
    assert sent["all-gather"][1] <= in_8_bits
    assert sent["reduce-scatter"][1] == pytest.approx(4 * PARAMETERS * 3 / 4)  # gradients of the masters


@pytest.mark.parametrize(("device", "rates"), [(H100, (2, 2, 1, 0.5)), (TPU_V5E, (2, 2, 1, 1))])
def test_products_run_at_the_rate_of_their_type(device, rates):
    of_int8, of_int4, of_bfloat16, of_float32 = rates
    bfloat16 = device.peak_flops_per_s("bfloat16")
    assert device.peak_flops_per_s("int8") == pytest.approx(of_int8 * bfloat16, rel=0.01)
    assert device.peak_flops_per_s("int4") == pytest.approx(of_int4 * bfloat16, rel=0.01)
    assert of_bfloat16 == 1
    assert device.peak_flops_per_s("float32") == pytest.approx(of_float32 * bfloat16, rel=0.01)
