"""Small steps that random programs found (benchmarks/random_programs), as literal programs."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar import recipes
from autopar.errors import MemoryLimitError, UnsupportedError
from tests.small_steps import assert_close, grouped, slow_cluster, verified_step


def same_as_jit(step, state, batch, devices=4, tolerance=1e-5, **options):
    """Two steps give what plain `jax.jit` gives. Returns the parallel step."""
    parallel = autopar.parallelize(step, cluster=slow_cluster(devices), cache_dir=None, **grouped(**options))
    plain = jax.jit(step)
    expected, got = state, jax.tree.map(jnp.array, state)
    for _ in range(2):
        expected, wanted = plain(expected, batch)
        got, made = parallel(got, batch)
        assert_close((got, made), (expected, wanted), tolerance)
    return parallel


def one_position(state, batch):
    """Of all examples one position only: nothing that a micro-batch could do, everything is done once."""
    y = jax.lax.dynamic_index_in_dim(batch["x"], state["i"] % 8, axis=0, keepdims=False)
    return {"w": state["w"], "i": state["i"] + 1}, {"y": jnp.max(jnp.tanh(y @ state["w"]))}


@pytest.mark.parametrize(
    "options",
    [
        {"plan": recipes.combine(recompute="input")},
        {"plan": recipes.combine(zero=3, schedule="inference", num_microbatches=4)},
        {"num_microbatches": 2},
        {"memory_limit_bytes": 600},
    ],
)
def test_a_step_without_work_on_examples_is_one_stage(options):
    state = {"w": np.ones((4, 4), np.float32), "i": np.int32(0)}
    batch = {"x": np.arange(8 * 6 * 4, dtype=np.float32).reshape(8, 6, 4) / 100}
    same_as_jit(one_position, state, batch, **options)


def test_a_size_written_into_the_step_is_cut_with_the_batch():
    def step(w, x):
        y = jnp.tanh(x @ w)
        return w, jnp.mean(jnp.einsum("ab,ac->bc", y, jnp.ones((8, 4))))

    x = np.linspace(0.1, 1, 32, dtype=np.float32).reshape(8, 4)
    same_as_jit(step, np.eye(4, dtype=np.float32), x, num_microbatches=2)


@pytest.mark.parametrize("num_microbatches", [2, 8])
def test_a_branch_on_the_number_of_examples_is_that_of_the_whole_batch(num_microbatches):
    def step(w, x):
        if x.shape[0] > 4:
            x = jnp.sin(x)
        return w, jnp.mean(x @ w)

    x = np.linspace(0.1, 1, 32, dtype=np.float32).reshape(8, 4)
    same_as_jit(step, np.eye(4, dtype=np.float32), x, num_microbatches=num_microbatches)


def test_offloaded_state_that_is_also_a_result_stays_on_the_devices():
    def step(state, batch):
        return state, {"w": state["w"], "y": jnp.sin(batch)}

    state = {"w": np.ones((8, 4), np.float32), "m": np.ones((8, 4), np.float32)}
    batch = np.arange(16, dtype=np.float32).reshape(8, 2)
    parallel = same_as_jit(step, state, batch, plan=recipes.zero(1, offload="optimizer"))
    in_host = {v.path for v in parallel.plan(state, batch).record.arguments if v.in_host}
    assert in_host == {"state['m']"}


def test_offloaded_state_beside_a_literal_result():
    def step(state, x):
        grads = jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w)))(state["w"])
        m = 0.9 * state["m"] + grads
        return {"w": state["w"] - m, "m": m}, {"constant": 3}

    state = {name: np.ones((4, 4), np.float32) for name in ("w", "m")}
    same_as_jit(step, state, np.ones((8, 4), np.float32), plan=recipes.zero(1, offload="optimizer"))


def test_literal_results_of_a_pipeline_are_as_weak_as_those_of_jit():
    def step(w, x):
        return w, {"y": jnp.max(jnp.tanh(x @ w)), "rate": 1.5, "count": 3, "strong": jnp.float32(2)}

    w, x = np.ones((4, 4), np.float32), np.ones((8, 4), np.float32)
    parallel = same_as_jit(step, w, x, plan=recipes.combine(num_microbatches=2))
    weak = {name: jax.typeof(value).weak_type for name, value in parallel(w, x)[1].items()}
    assert weak == {name: jax.typeof(value).weak_type for name, value in jax.jit(step)(w, x)[1].items()}
    assert weak == {"y": False, "rate": True, "count": True, "strong": False}


def test_fourier_transforms_run_on_each_devices_part():
    """XLA's partitioner would gather all examples, in a layout that its own fft refuses to run on CPU devices."""

    def loss(w, x):
        spectrum = jnp.fft.rfft(jnp.tanh(x @ w["in"]), axis=-1) * w["filter"]
        return jnp.mean(jnp.fft.irfft(spectrum, n=6, axis=-1) ** 2)

    def step(w, x):
        return jax.tree.map(lambda p, g: p - 0.1 * g.conj(), w, jax.grad(loss)(w, x)), ()

    random = np.random.default_rng(0)
    w = {"in": random.normal(size=(4, 6)).astype(np.float32), "filter": np.full(4, 1 + 0.5j, np.complex64)}
    x = random.normal(size=(16, 9, 4)).astype(np.float32)
    parallel = same_as_jit(step, w, x, plan=recipes.data_parallel())
    verified_step(parallel, (w, x), tolerance=1e-5)
    programs = parallel.compile(w, x).as_text()
    assert "[4,9,4]" in programs
    assert not re.search(r"\[16,9,[46]\]\S* fft\(", programs)


@pytest.mark.cases(1)
@pytest.mark.parametrize("options", [{"memory_limit_bytes": 500}, {"plan": recipes.combine(num_microbatches=5)}])
def test_a_count_that_goes_up_before_the_micro_batches_is_there_for_them(options):
    """What picks a position is computed of the old count in each micro-batch, where memory is short."""

    def loss(w, i, x):
        y = jax.lax.conv_general_dilated(x, w, (2,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"))
        return jnp.mean(jax.lax.dynamic_index_in_dim(y, i % 4, axis=1, keepdims=False) ** 2)

    def step(state, x):
        grads = jax.grad(loss)(state["w"], state["i"], x)
        return {"w": state["w"] - 0.1 * grads, "i": state["i"] + 1}, ()

    parallel = autopar.parallelize(
        step, cluster=slow_cluster(2), cache_dir=None, **grouped(**{"memory_limit_bytes": 600, **options})
    )
    state = {"w": np.ones((2, 2, 4), np.float32), "i": np.int32(0)}
    with pytest.raises(MemoryLimitError):
        parallel.plan(state, np.ones((5, 8, 2), np.float32))


def test_attention_that_cannot_be_shared_is_named_by_its_line():
    def step(w, x):
        scores = jax.nn.softmax(jnp.einsum("blhe,bmhe->bhlm", x @ w, x), axis=-1)
        return w, jnp.einsum("bhlm,bmhe->blhe", scores, x)

    x = np.ones((8, 3, 2, 4), np.float32)
    ring = recipes.sequence_parallel("ring", size=2)
    parallel = autopar.parallelize(step, plan=ring, cluster=slow_cluster(4), cache_dir=None)
    line = step.__code__.co_firstlineno
    with pytest.raises(UnsupportedError, match=rf"test_found_at_random\.py:({line + 1}|{line + 2}):.*3 positions"):
        parallel.plan(np.ones((4, 4), np.float32), x)


def test_a_slice_that_starts_out_of_range_and_is_split():
    """XLA makes one slice of this one and of that of each device's part; it forgets that the first start is clamped."""

    def step(w, x):
        def loss(w):
            rows = jax.lax.dynamic_slice_in_dim(x, jnp.argmax(x) % 6, 2, axis=1)  # 5: the last that is in range is 4
            return jnp.mean(jnp.sum(rows, axis=-1) ** 2) + jnp.mean((x @ w) ** 2)

        out, grads = jax.value_and_grad(loss)(w)
        return w - 0.1 * grads, out

    x = np.random.default_rng(0).normal(size=(12, 6, 8, 3))
    x.reshape(-1)[143] = 10
    with jax.enable_x64():
        same_as_jit(step, np.ones((3, 2)), x, devices=8, plan=recipes.tensor_parallel("2.5d", depth=2))


def test_a_step_whose_only_layer_is_cheap_enough_for_every_stage():
    def step(state, x):
        y = jax.lax.associative_scan(lambda a, b: 0.5 * a + b, x, axis=1)
        return state, {"y": y, "most": jnp.max(y)}

    same_as_jit(step, {}, np.arange(144, dtype=np.float32).reshape(12, 12), devices=8, num_microbatches=2)


def test_arrays_without_elements_are_not_split():
    def step(w, x):
        def loss(w):
            # A scan over two positions makes products of shape [5, 0].
            y = jax.lax.associative_scan(lambda a, b: 0.5 * a + b, x, axis=1)
            return jnp.mean(jnp.tanh(y @ w) ** 2)

        return w - jax.grad(loss)(w), jnp.float32(0)

    w = np.arange(8, dtype=np.float32).reshape(2, 4) / 10
    same_as_jit(step, w, np.ones((5, 2), np.float32), devices=8, plan=recipes.tensor_parallel("3d"))
