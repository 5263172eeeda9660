"""2D, 2.5D and 3D tensor parallelism: what a linear layer sends is what the literature says, to the byte.

The figures are those of the documentation of Colossal-AI ("1D, 2D, 2.5D and 3D tensor parallelism"), for the forward
and backward pass of a linear layer on rings: 6(q-1)/q in 2D and 3(q-1)(d+1)/(dq) in 2.5D of what a device multiplies
with (a q-th of a tensor), 6(q-1)/q^3 of a tensor in 3D, where input, weight and output are equally large. An all-gather
sends what the broadcasts of SUMMA send, and a reduce-scatter what its sums do, so that the figures are met and not only
bounds.
"""

import dataclasses
import itertools
import math

import jax
import numpy as np
import pytest

import autopar
from autopar import recipes
from autopar.errors import InvalidArgumentError
from benchmarks.zoo import CASES
from tests.small_steps import chain_step, slow_cluster

EXAMPLES, Q, DEPTH = 32, 2, 2
SQUARE, SQUARES, CUBE = (
    recipes.tensor_parallel("2d"),
    recipes.tensor_parallel("2.5d", depth=DEPTH),
    recipes.tensor_parallel("3d"),
)


def bandwidth_cluster(devices):
    """Collectives take as long as their bytes do."""
    cluster = slow_cluster(devices)
    (link,) = cluster.axis_links((devices,))
    link = dataclasses.replace(link, latency_s=1e-12, overhead_s=0.0, detail=None)
    return autopar.Cluster.flat(devices, device=cluster.device, links=(link,))


def sent(recipe, devices, widths):
    """Bytes by kind that a chain of layers of these widths sends, as compiled."""
    step = autopar.parallelize(chain_step, plan=recipe, cluster=bandwidth_cluster(devices), cache_dir=None)
    random = np.random.default_rng(0)
    params = [random.normal(size=shape).astype(np.float32) / 8 for shape in itertools.pairwise(widths)]
    batch = {
        "x": random.normal(size=(EXAMPLES, widths[0])).astype(np.float32),
        "y": random.normal(size=(EXAMPLES, widths[-1])).astype(np.float32),
    }
    made = autopar.verify(step, params, batch)
    assert made.difference <= 1e-5, made
    # The loss, a number of four bytes, is predicted as one sum over all devices; XLA sums over an axis at a time.
    assert all(row.predicted == pytest.approx(row.compiled, abs=8) for row in made.collectives), made
    return {row.name: row.compiled for row in made.collectives}


def of_two_more_layers(recipe, devices, a, b):
    """Bytes by kind that (examples, a) to (examples, b) and back to a sends, forward and backward."""
    fewer, more = sent(recipe, devices, (a, b, a)), sent(recipe, devices, (a, b, a, b, a))
    difference = {name: more[name] - fewer[name] for name in more}
    return {name: nbytes for name, nbytes in difference.items() if nbytes and name != "total"}


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("recipe", "devices", "figure", "of_bytes", "depth_sum"),
    [
        (SQUARE, 4, 6 * (Q - 1) / Q, 32 * 32 * 4 / Q, 0),
        # The figure leaves out that depth sums each gradient, blocks of 1/q^2, as data parallelism does.
        (SQUARES, 8, 3 * (Q - 1) * (DEPTH + 1) / (DEPTH * Q), 32 * 32 * 4 / Q, 2 * (DEPTH - 1) / DEPTH / Q),
        (CUBE, 8, 6 * (Q - 1) / Q**3, 32 * 32 * 4, 0),
    ],
    ids=["2d", "2.5d", "3d"],
)
def test_a_linear_layer_sends_what_the_literature_says(recipe, devices, figure, of_bytes, depth_sum):
    found = of_two_more_layers(recipe, devices, 32, 32)
    assert found.pop("all-reduce", 0) == pytest.approx(2 * depth_sum * of_bytes)
    assert sum(found.values()) == pytest.approx(2 * figure * of_bytes)


@pytest.mark.parametrize(
    ("recipe", "devices", "figure", "tensors"),
    [
        (SQUARE, 16, 6 * 3 / 4, 1 / 4),
        (SQUARES, 18, 3 * 2 * 3 / (2 * 3), 1 / 3),
        (CUBE, 27, 6 * 2 / 27, 1),
    ],
    ids=["2d", "2.5d", "3d"],
)
def test_larger_squares_and_cubes_are_planned_to_send_so_too(recipe, devices, figure, tensors):
    n = 432

    def planned(layers):
        params = [jax.ShapeDtypeStruct((n, n), np.float32)] * layers
        batch = {name: jax.ShapeDtypeStruct((n, n), np.float32) for name in "xy"}
        plan = autopar.plan(
            chain_step,
            params,
            batch,
            cluster=bandwidth_cluster(devices),
            plan=recipe,
            cache_dir=None,
        )
        return sum(use.sent_bytes for use in plan.predicted.collectives if use.kind != "all-reduce")

    assert planned(4) - planned(2) == pytest.approx(2 * figure * tensors * n * n * 4)


def test_a_square_gathers_both_operands_twice_and_scatters_both_gradients():
    a, b = 32, 64
    tensors = 4 * (EXAMPLES * a + a * b + EXAMPLES * b + b * a)  # the inputs and the weights of both layers
    once = (Q - 1) / Q * tensors / Q
    assert of_two_more_layers(SQUARE, 4, a, b) == {"all-gather": 2 * once, "reduce-scatter": once}


def test_squares_have_parts_of_the_examples_and_sum_the_gradients_of_weights():
    a, b = 32, 64
    inputs, weights = 4 * (EXAMPLES * a + EXAMPLES * b), 4 * (a * b + b * a)
    once = (Q - 1) / Q * (inputs / DEPTH + weights) / Q
    summed = 2 * (DEPTH - 1) / DEPTH * weights / Q**2
    expected = {"all-gather": 2 * once, "reduce-scatter": once, "all-reduce": summed}
    assert of_two_more_layers(SQUARES, 8, a, b) == expected


def test_a_cube_gathers_and_scatters_each_tensor_once():
    a, b = 32, 64
    tensors = 4 * (EXAMPLES * a + a * b + EXAMPLES * b + EXAMPLES * b + b * a + EXAMPLES * a)  # with the results
    once = (Q - 1) / Q**3 * tensors
    assert of_two_more_layers(CUBE, 8, a, b) == {"all-gather": once, "reduce-scatter": once}


GPT = CASES["gpt"](layers=2, width=64, length=32, batch=16)
MOE = CASES["moe"](batch=16)
GROUPS = {"row": [[0, 2], [1, 3], [4, 6], [5, 7]], "column": [[0, 1], [2, 3], [4, 5], [6, 7]]}
OVER_FOUR_APART = [[0, 4], [1, 5], [2, 6], [3, 7]]


@pytest.mark.cases(1)
@pytest.mark.parametrize("case", [GPT, pytest.param(MOE, marks=pytest.mark.slow)], ids=["gpt", "moe"])
@pytest.mark.parametrize(
    ("recipe", "first_axis", "parts"),
    [
        (recipes.tensor_parallel("2d", size=4), "data", Q**2),
        (SQUARES, "depth", Q**2),
        (CUBE, "depth", Q**3),
    ],
    ids=["2d", "2.5d", "3d"],
)
def test_models_on_eight_devices_equal_plain_jit(case, recipe, first_axis, parts):
    step = autopar.parallelize(case.step, plan=recipe, cluster=autopar.Cluster.local(8), cache_dir=None)
    args = jax.jit(case.init)(jax.random.key(0)), case.batch(0)
    made, plan = autopar.verify(step, *args), step.plan(*args)
    assert made.difference <= case.tolerance, made
    assert all(row.predicted == pytest.approx(row.compiled, rel=0.01) for row in made.collectives), made
    assert plan.groups() == {first_axis: OVER_FOUR_APART, **GROUPS}
    state = [v for v in plan.record.arguments if v.kind == "state"]
    here = sum(math.prod(v.shape) / v.layout.shards(plan.mesh) for v in state)
    # The row of a cube does not split what layers hand on: biases, positions and routers are in fewer parts there.
    assert here / sum(math.prod(v.shape) for v in state) == pytest.approx(1 / parts, rel=0.05)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"kind": "2d", "size": 8}, "a square"),
        ({"kind": "2.5d", "size": 6, "depth": 2}, "2 times a square"),
        ({"kind": "3d", "size": 4}, "a cube"),
        ({"kind": "2.5d"}, "a depth"),
        ({"kind": "2d", "depth": 2}, "a depth"),
        ({"kind": "2.5d", "depth": 0}, "positive"),
    ],
)
def test_devices_that_make_no_square_or_cube(options, expected):
    with pytest.raises(InvalidArgumentError, match=expected):
        recipes.tensor_parallel(**options)


def test_all_devices_must_make_the_square_where_no_size_is_given():
    step = autopar.parallelize(chain_step, plan=SQUARE, cluster=slow_cluster(8), cache_dir=None)
    batch = {"x": np.ones((8, 8), np.float32), "y": np.ones((8, 8), np.float32)}
    with pytest.raises(InvalidArgumentError, match=r"equal size \(row, column\)"):
        step.plan([np.ones((8, 8), np.float32)], batch)


def test_a_mesh_has_no_axis_for_copies_of_a_cube():
    step = autopar.parallelize(
        chain_step,
        plan=recipes.tensor_parallel("3d", size=8),
        cluster=slow_cluster(16),
        cache_dir=None,
    )
    batch = {"x": np.ones((8, 8), np.float32), "y": np.ones((8, 8), np.float32)}
    with pytest.raises(InvalidArgumentError, match="at most 3 mesh axes"):
        step.plan([np.ones((8, 8), np.float32)], batch)
