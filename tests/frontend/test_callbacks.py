"""Steps that call Python: once, with whole arrays, in the order of plain `jax.jit`, on several devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

import autopar
from autopar.errors import UnsupportedError
from tests.small_steps import assert_close, grouped, slow_cluster, verified_step

WIDTH = 32
SEEN: list[tuple[str, tuple[int, ...], float]] = []


def see(name, *arrays):
    SEEN.extend((name, tuple(np.shape(a)), float(np.sum(np.asarray(a, np.float64)))) for a in arrays)


def called(name, *arrays, ordered=False):
    jax.debug.callback(lambda *a: see(name, *a), *arrays, ordered=ordered)


def in_layers(x, weights):
    for i, w in enumerate(weights):
        x = jnp.tanh(x @ w)
        called(f"layer {i}", x, w)
    return x


def the_same_twice(x, weights):
    called("x", x)
    called("x", x)
    return jnp.tanh(x @ weights[0])


def ordered(x, weights):
    for i, w in enumerate(weights):
        called(f"layer {i}", x, ordered=True)
        x = jnp.tanh(x @ w)
    return x


def in_a_scan(x, weights):
    def body(x, w):
        called("body", x)
        jax.debug.callback(lambda x: see("ordered", x), x, ordered=True)
        return jnp.tanh(x @ w), None

    return jax.lax.scan(body, x, jnp.stack(weights))[0]


def in_a_branch_and_a_loop(x, weights):
    x = jnp.tanh(x @ weights[0])
    jax.lax.cond(x.sum() > -1e9, lambda x: called("branch", x), lambda x: None, x)
    return jax.lax.fori_loop(0, 2, lambda i, x: (called("loop", x), jnp.sin(x))[1], x)


def in_remat(x, weights):
    for w in weights:

        def layer(x, w=w):
            x = jnp.tanh(x @ w)
            called("remat", x)
            return jnp.sin(x)

        x = jax.checkpoint(layer)(x)
    return x


def no_callback(x, weights):
    for w in weights:
        x = jnp.tanh(x @ w)
    return x


def nothing(grads, loss):
    return grads, loss


def io(grads, loss):
    io_callback(lambda *a: see("io", *a), None, grads[0], loss)
    return grads, loss


def ordered_io(grads, loss):
    for g in grads:
        io_callback(lambda g: see("io", g), None, g, ordered=True)
    return grads, loss


def results(grads, loss):
    like = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)
    twice = jax.pure_callback(lambda g: (see("twice", g), 2 * np.asarray(g))[1], like, grads[0])
    thrice = jax.pure_callback(lambda g: (see("thrice", g), 3 * np.asarray(g))[1], like, grads[0])
    return [twice, thrice, io_callback(lambda g: (see("io", g), np.asarray(g))[1], like, grads[1])], loss


def training_step(forward, after=nothing):
    def step(weights, batch):
        def loss(weights):
            return jnp.mean((forward(batch["x"], weights) - batch["y"]) ** 2)

        value, grads = jax.value_and_grad(loss)(weights)
        grads, value = after(grads, value)
        return [w - 0.1 * g for w, g in zip(weights, grads, strict=True)], value

    return step


def arguments():
    random = np.random.default_rng(0)
    weights = random.normal(size=(3, WIDTH, WIDTH)).astype(np.float32) / 6
    x, y = random.normal(size=(2, 16, WIDTH)).astype(np.float32)
    return list(weights), {"x": x, "y": y}


def parallel(step, **options):
    options = {"cluster": slow_cluster(4), "cache_dir": None, "donate_argnums": (), **options}
    return autopar.parallelize(step, **grouped(**options))


def seen_by(step, args):
    SEEN.clear()
    made = jax.block_until_ready(step(*args))
    jax.effects_barrier()
    return made, list(SEEN)


@pytest.mark.cases(4)
@pytest.mark.parametrize("plan", [None, autopar.recipes.zero(3)], ids=["free", "zero"])
@pytest.mark.parametrize(
    ("forward", "after"),
    [
        (in_layers, nothing),
        (the_same_twice, nothing),
        (ordered, nothing),
        (in_a_scan, nothing),
        (in_a_branch_and_a_loop, nothing),
        (in_remat, nothing),
        (no_callback, io),
        (no_callback, ordered_io),
        (no_callback, results),
    ],
)
def test_a_callback_sees_what_it_sees_under_jit_as_often(forward, after, plan):
    step, args = training_step(forward, after), arguments()
    expected, expected_seen = seen_by(jax.jit(step), args)
    made = parallel(step, plan=plan)
    made.compile(*args)
    got, seen = seen_by(made, args)
    assert_close(got, expected)
    if forward is not ordered and after is not ordered_io:
        seen, expected_seen = sorted(seen), sorted(expected_seen)
    assert [s[:2] for s in seen] == [s[:2] for s in expected_seen]
    np.testing.assert_allclose([s[2] for s in seen], [s[2] for s in expected_seen], rtol=1e-3, atol=1e-3)


def test_what_is_gathered_for_callbacks_and_handed_on_is_predicted():
    verified_step(parallel(training_step(in_layers, results)), arguments(), 1e-5)


def test_prints_come_out_as_under_jit(capfd):
    def printing(x, weights):
        jax.debug.print("x {x:.3f}", x=x.sum())
        jax.debug.print("then {}", jnp.max(x).round(3), ordered=True)
        return jnp.tanh(x @ weights[0])

    step, args = training_step(printing), arguments()
    seen_by(jax.jit(step), args)
    expected = capfd.readouterr().out
    made = parallel(step)
    made.compile(*args)
    seen_by(made, args)
    assert sorted(capfd.readouterr().out.split("\n")) == sorted(expected.split("\n"))
    assert "x " in expected


CUT = pytest.mark.parametrize(
    "options",
    [{"plan": autopar.recipes.pipeline(2, num_microbatches=2)}, {"num_microbatches": 2}],
    ids=["stages", "micro-batches"],
)


@pytest.mark.cases(2)
@CUT
@pytest.mark.parametrize("forward", [in_layers, ordered])
def test_debug_callbacks_of_a_step_in_parts_see_what_they_see_under_jit(options, forward, capfd):
    """Once a step, whole arrays: activations, gradients, weights and numbers."""

    def after(grads, loss):
        called("gradient", grads[0], 3.0)
        jax.debug.print("loss {}", loss)
        return grads, loss

    step, args = training_step(forward, after), arguments()
    (expected, seen_under_jit), printed = seen_by(jax.jit(step), args), capfd.readouterr().out
    made = parallel(step, **options)
    for _ in range(2):
        got, seen = seen_by(made, args)
        assert_close(got, expected)
        assert [row[:2] for row in sorted(seen)] == [row[:2] for row in sorted(seen_under_jit)]
        np.testing.assert_allclose([r[2] for r in sorted(seen)], [r[2] for r in sorted(seen_under_jit)], atol=1e-4)
        shown = capfd.readouterr().out
        assert float(shown.split()[1]) == pytest.approx(float(printed.split()[1]), rel=1e-5)
        assert len(shown.split("\n")) == len(printed.split("\n"))
        if forward is ordered:  # those of the layers come in their order, before that of the gradient
            assert [row[0] for row in seen] == ["layer 0", "layer 1", "layer 2", "gradient", "gradient"]
    assert autopar.verify(made, *args).difference < 1e-5


@CUT
@pytest.mark.parametrize(
    ("forward", "after", "primitive"),
    [
        (in_a_scan, nothing, "debug_callback"),
        (in_remat, nothing, "debug_callback"),
        (no_callback, io, "io_callback"),
        (no_callback, results, "pure_callback"),
    ],
)
def test_other_callbacks_of_a_step_in_parts_are_refused_with_the_line(options, forward, after, primitive):
    with pytest.raises(
        UnsupportedError, match=rf"step, {primitive} at .*frontend/test_callbacks.py:\d+.*(\n.*)*one program"
    ):
        parallel(training_step(forward, after), **options).plan(*arguments())


@pytest.mark.parametrize("ordered", [False, True])
def test_what_a_callback_raises_is_raised_when_the_step_has_run(ordered):
    def check(loss):
        raise ArithmeticError("the loss is too large")

    def after(grads, loss):
        like = jax.ShapeDtypeStruct((), jnp.float32)
        jax.debug.callback(check, loss, ordered=ordered)
        return grads, loss + jax.pure_callback(check, like, loss)

    step = parallel(training_step(no_callback, after))
    for _ in range(2):
        with pytest.raises(ArithmeticError, match="too large"):
            step(*arguments())


def test_a_free_search_keeps_to_one_program():
    slow = slow_cluster(4)
    made = parallel(training_step(in_layers), cluster=slow).plan(*arguments())
    assert made.record.pipeline is None


def test_other_effects_are_refused_with_the_line():
    counter = jax.new_ref(jnp.zeros(()))

    def step(weights, batch):
        counter[...] += 1
        return weights, batch["x"].sum()

    with pytest.raises(UnsupportedError, match=r"step, \w+ at .*frontend/test_callbacks.py:\d+"):
        parallel(step).plan(*arguments())


def test_a_pure_callback_of_a_sum_over_all_examples():
    def step(state, batch):
        full = jax.pure_callback(
            lambda x: np.full(3, x, np.float32), jax.ShapeDtypeStruct((3,), jnp.float32), batch.sum()
        )
        return state, full

    made = autopar.parallelize(step, cluster="local:2", cache_dir=None)
    assert made(jnp.ones(2), jnp.ones((4, 8)))[1].tolist() == [32.0] * 3
