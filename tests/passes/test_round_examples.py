"""Examples that devices do not divide, split unevenly: in the graph, in the compiled program, and in its results."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.recipes import data_parallel, tensor_parallel, zero
from tests.small_steps import grouped

WIDTH = 16


def _parameters() -> dict[str, jax.Array]:
    keys = jax.random.split(jax.random.key(0), 2)
    matrices = {name: 0.1 * jax.random.normal(k, (WIDTH, WIDTH)) for name, k in zip("ab", keys, strict=True)}
    return {**matrices, "gain": jnp.ones(WIDTH)}


def _batch(examples: int) -> dict[str, jax.Array]:
    keys = jax.random.split(jax.random.key(1), 3)
    return {
        "x": jax.random.normal(keys[0], (examples, WIDTH)),
        "y": jax.random.normal(keys[1], (examples, WIDTH)),
        "tokens": jax.random.randint(keys[2], (examples, 6), 0, WIDTH),
    }


def _model(p: Any, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ p["a"]) @ p["b"] * p["gain"]


def _mean(p: Any, b: Any) -> jax.Array:
    return jnp.mean((_model(p, b["x"]) - b["y"]) ** 2)


def _statistics(p: Any, b: Any) -> jax.Array:
    h = _model(p, b["x"])
    h = (h - h.mean(0)) / jnp.sqrt(h.var(0) + 1e-3)
    return jnp.mean(h * b["y"]) + jnp.max(h) + jnp.mean(jnp.prod(1 + 0.1 * h, 0))


def _addressed(p: Any, b: Any) -> jax.Array:
    h = _model(p, b["x"])
    rows = h[jnp.argsort(b["x"][:, 0])] * b["y"] + h[jnp.argmax(h, 0)[:1]] + jnp.roll(h, 1, 0)
    return jnp.mean(rows) + jnp.mean(jnp.sort(h, 0) * b["y"]) + jnp.mean(jnp.cumsum(h, 0) * b["y"])


def _sorted_features(p: Any, b: Any) -> jax.Array:
    return jnp.mean(jnp.sort(_model(p, b["x"]), -1) * b["y"])


def _layers(p: Any, b: Any) -> jax.Array:
    def layer(h: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        keep = jax.random.bernoulli(jax.random.key(3), 0.7, h.shape)
        return jnp.tanh(jnp.where(keep, h, 0) @ w), jnp.sum(h)

    h, sums = jax.lax.scan(jax.checkpoint(layer), b["x"], jnp.stack([p["a"], p["b"]]))
    return jnp.mean((h * p["gain"] - b["y"]) ** 2) + 1e-3 * jnp.mean(sums)


def _language(p: Any, b: Any) -> jax.Array:
    logs = jax.nn.log_softmax(jnp.tanh(p["a"][b["tokens"]] @ p["b"]) @ p["a"].T)
    losses = -jnp.take_along_axis(logs, jnp.roll(b["tokens"], -1, 1)[..., None], -1)[..., 0]
    return jnp.sum(losses * (b["tokens"] % 3 > 0)) / jnp.sum(b["tokens"] % 3 > 0)


def _convolution(p: Any, b: Any) -> jax.Array:
    images, kernel = b["x"].reshape(-1, 4, 4, 1), p["a"].reshape(-1)[:27].reshape(3, 3, 1, 3)
    numbers = ("NHWC", "HWIO", "NHWC")
    h = jax.nn.relu(jax.lax.conv_general_dilated(images, kernel, (1, 1), "SAME", dimension_numbers=numbers))
    return jnp.mean(h.reshape(len(h), -1)[:, :WIDTH] @ p["b"] * p["gain"] * b["y"])


def _contrast(p: Any, b: Any) -> jax.Array:
    h = _model(p, b["x"])
    return -jnp.mean(jnp.diag(jax.nn.log_softmax(h @ h.T)))


LOSSES = (_mean, _statistics, _addressed, _sorted_features, _layers, _language, _convolution, _contrast)


def _step_of(loss: Any) -> Any:
    def train(params: Any, batch: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value

    return train


def _assert_equal(got: Any, want: Any) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def _products(step: Any, *args: Any) -> set[str]:
    text = step.lower(*args).compile().as_text()
    return set(re.findall(r"f32(\[[\d,]*\])\S* dot\(", text))


@pytest.mark.cases(3)
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__[1:])
@pytest.mark.parametrize("recipe", [data_parallel(), zero(3)], ids=["data", "zero3"])
def test_results_are_those_of_the_whole_batch(loss: Any, recipe: Any) -> None:
    train = _step_of(loss)
    step = autopar.parallelize(train, donate_argnums=0, plan=recipe)
    _assert_equal(step(_parameters(), _batch(13)), jax.jit(train)(_parameters(), _batch(13)))
    assert "the batch" in str(step.plan(_parameters(), _batch(13))).split("\n")[0]


@pytest.mark.parametrize(("recipe", "rows"), [(data_parallel(), 2), (zero(1), 2), (tensor_parallel(size=2), 4)])
def test_products_have_the_rows_of_the_largest_part(recipe: Any, rows: int) -> None:
    step = autopar.parallelize(_step_of(_mean), donate_argnums=0, plan=recipe)
    products = _products(step, _parameters(), _batch(13))
    assert any(text.startswith(f"[{rows},") for text in products)
    assert not any(text.startswith("[13,") for text in products)


def test_the_plan_says_how_examples_are_split_and_prices_the_largest_part() -> None:
    step = autopar.parallelize(_step_of(_mean), donate_argnums=0, plan=data_parallel())
    uneven, even = (step.plan(_parameters(), _batch(n)) for n in (13, 16))
    assert "13 examples are split unevenly: at most 2 on a device, of which 16 take as long" in uneven.record.notes
    assert uneven.predicted.step_time_s == pytest.approx(even.predicted.step_time_s, rel=0.02)


def test_predicted_memory_grows_as_that_of_the_compiled_program() -> None:
    def peaks(examples: int) -> tuple[int, int]:
        args = (_parameters(), _batch(examples))
        step = autopar.parallelize(_step_of(_mean), donate_argnums=0, plan=data_parallel())
        compiled = step.lower(*args).compile().memory_analysis()
        held = compiled.argument_size_in_bytes + compiled.temp_size_in_bytes
        return max(step.plan(*args).predicted.peak_bytes), held

    (uneven, uneven_held), (even, even_held) = peaks(13), peaks(16)
    assert uneven - even == pytest.approx(uneven_held - even_held, abs=0.1 * even_held)


def test_fewer_examples_than_devices_stay_whole() -> None:
    step = autopar.parallelize(_step_of(_mean), donate_argnums=0, plan=data_parallel())
    plan = step.plan(_parameters(), _batch(3))
    assert "8 devices do the same work" in str(plan)
    assert plan.record.uneven_over == 0


def test_a_shorter_batch_keeps_the_plan_and_is_split_unevenly() -> None:
    train = _step_of(_mean)
    step = autopar.parallelize(train, donate_argnums=0, plan=zero(3))
    step(_parameters(), _batch(16))
    _assert_equal(step(_parameters(), _batch(13)), jax.jit(train)(_parameters(), _batch(13)))
    assert any(text.startswith("[2,") for text in _products(step, _parameters(), _batch(13)))


def test_results_with_examples_are_whole() -> None:
    def predict(params: Any, batch: Any) -> Any:
        h = _model(params, batch["x"])
        return h, jnp.argmax(h, -1)

    step = autopar.parallelize(predict, donate_argnums=(), plan=data_parallel())
    got = step(_parameters(), _batch(13))
    _assert_equal(got, jax.jit(predict)(_parameters(), _batch(13)))
    assert all(array.sharding.is_fully_replicated for array in got)


def test_the_search_takes_the_faster_of_equal_and_unequal_parts() -> None:
    cluster = autopar.Cluster.parse("dgx-h100:8")
    large = {"a": jax.ShapeDtypeStruct((8192, 8192), jnp.float32), "b": jax.ShapeDtypeStruct((8192, 8192), jnp.float32)}
    params = {**large, "gain": jax.ShapeDtypeStruct((8192,), jnp.float32)}

    def plan(positions: int, examples: int, **options: Any) -> autopar.Plan:
        leaf = jax.ShapeDtypeStruct((examples, positions, 8192), jnp.float32)
        step = autopar.parallelize(_step_of(_mean), donate_argnums=0, cluster=cluster, **grouped(**options))
        return step.plan(params, {"x": leaf, "y": leaf})

    free, recipe = plan(2048, 12), plan(2048, 12, plan=data_parallel())
    assert free.predicted.step_time_s <= recipe.predicted.step_time_s * 1.001


def test_a_plan_of_unequal_parts_is_restored_from_its_file(tmp_path: Any) -> None:
    train = _step_of(_language)
    step = autopar.parallelize(train, donate_argnums=0, plan=zero(1))
    step.plan(_parameters(), _batch(13)).save(tmp_path / "plan.json")
    again = autopar.parallelize(train, donate_argnums=0, plan=autopar.Plan.load(tmp_path / "plan.json"))
    _assert_equal(again(_parameters(), _batch(13)), jax.jit(train)(_parameters(), _batch(13)))
