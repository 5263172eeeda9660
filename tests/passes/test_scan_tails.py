"""Scans over layers that read whole sums over examples, such as casts of gradients: numbers against plain `jax.jit`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar import recipes
from autopar.errors import MixedExamplesError
from autopar.ir.graph import OpKind, Section, walk
from autopar.passes.microbatch import micro_batched
from autopar.passes.plain_loop import run_graph
from tests.passes.test_microbatch import RULES, WIDTH, check, examples, traced
from tests.small_steps import assert_close

LAYERS = 4
LOW = jnp.bfloat16
SHAPES = {"gain": (LAYERS, WIDTH), "bias": (LAYERS, WIDTH), "up": (LAYERS, WIDTH, WIDTH), "shared": (WIDTH,)}


def params_of(dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(3), len(SHAPES))
    drawn = {name: 0.4 * jax.random.normal(k, shape) for k, (name, shape) in zip(keys, SHAPES.items(), strict=True)}
    return jax.tree.map(lambda p: p.astype(dtype), drawn | {"gain": 1 + drawn["gain"]})


def through_layers(body, form):
    """A loss whose layers are scanned or written out, and computed again or not."""

    def loss(p, x):
        layer = jax.checkpoint(body) if "remat" in form else body
        stacked = {name: p[name] for name in ("gain", "bias", "up")}
        if "scan" in form:
            h, out = jax.lax.scan(lambda h, w: layer(h, w, p["shared"]), x, stacked)
        else:
            outs = []
            h = x
            for i in range(LAYERS):
                h, out = layer(h, jax.tree.map(lambda a, i=i: a[i], stacked), p["shared"])
                outs.append(out)
            out = jax.tree.map(lambda *xs: jnp.stack(xs), *outs)
        return jnp.square(h.astype(jnp.float32)).mean(), out

    return loss


def trained(loss):
    def step(p, b):
        (value, out), grads = jax.value_and_grad(loss, has_aux=True)(p, b["x"])
        return jax.tree.map(lambda w, g: w - 0.1 * g, p, grads), {"loss": value, "out": out, "grads": grads}

    return step


def rms_norm(h, w, shared):
    """The gain is cast, and used in float32: its gradient is a sum in float32, cast down and up again."""
    scale = jax.lax.rsqrt(jnp.square(h).mean(-1, keepdims=True) + 1e-6)
    return h + jnp.tanh((h * scale * w["gain"].astype(LOW)) @ w["up"]), None


def layer_norm(h, w, shared):
    centred = h - h.mean(-1, keepdims=True)
    normal = centred * jax.lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + 1e-6)
    return h + jnp.tanh((normal * w["gain"].astype(LOW) + w["bias"].astype(LOW)) @ w["up"]), None


@jax.custom_vjp
def scaled(h, gain):
    return h * gain


scaled.defvjp(lambda h, gain: (h * gain, (h, gain)), lambda r, g: (g * r[1], (g * r[0]).sum(0).astype(r[1].dtype)))


def norm_with_a_gradient_of_its_own(h, w, shared):
    return h + jnp.tanh(scaled(h, w["gain"].astype(LOW)) @ w["up"]), None


def gain_of_all_layers(h, w, shared):
    """The scan carries the sum of the layers' gradients, in the narrow type."""
    return h + jnp.tanh((h * shared.astype(LOW) + w["bias"]) @ w["up"]), None


def gains_in_a_scan_of_a_scan(h, w, shared):
    def inner(h, gain):
        return h + 0.3 * jnp.tanh(h * gain.astype(LOW)) * shared.astype(LOW), None

    h, _ = jax.lax.scan(inner, jnp.tanh(h @ w["up"]), jnp.stack([w["gain"], w["bias"]]))
    return h, None


def root_of_a_mean_square(h, w, shared):
    """What is returned of each layer is not linear in a sum over examples."""
    h = h + jnp.tanh((h * w["gain"].astype(LOW)) @ w["up"])
    return h, {"rms": jnp.sqrt(jnp.square(h).mean()) * jnp.square(w["up"]).sum(), "most": jnp.abs(h.mean(0)).max()}


def largest_of_all_examples(h, w, shared):
    """Metrics that mix examples other than by sums, of what is carried and of what a layer makes."""
    made = jnp.tanh((h * w["gain"].astype(LOW)) @ w["up"])
    where = jnp.argmax(made[:, 0])
    return h + made, {
        "before": h.max(), "after": jnp.abs(made).max(0), "where": where, "row": h[where],
        "ordered": jnp.sort(made[:, 1]), "beside": made - made.max(0), "running": jnp.cumsum(h, 0),
    }  # fmt: skip


BODIES = [
    rms_norm, layer_norm, norm_with_a_gradient_of_its_own, gain_of_all_layers, gains_in_a_scan_of_a_scan,
    root_of_a_mean_square, largest_of_all_examples,
]  # fmt: skip
FORMS = ["scan", "scan remat", "loop", "loop remat"]


@pytest.mark.cases(1)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("body", BODIES)
def test_what_holds_for_layers_that_are_written_out_holds_in_a_scan(body, form):
    check(trained(through_layers(body, form)), params_of(), examples(12), 3)


def test_the_tail_stands_behind_the_loop_and_reads_sums_in_the_wide_type():
    graph = check(trained(through_layers(rms_norm, "scan")), params_of(), examples(12), 3)
    (tail,) = [op for op in graph.block.ops if op.kind is OpKind.SCAN and op.section is Section.AFTER]
    assert "dot_general" not in {op.primitive for op in walk(tail.blocks[0])}
    summed = {v for op in graph.block.ops if op.kind is OpKind.ACCUMULATE for v in op.outputs}
    assert {graph.values[v].dtype for v in tail.inputs if v in summed} == {"float32"}


def test_half_precision_that_is_too_narrow_for_a_sum():
    """Infinite where the gradient of all examples is, which those of micro-batches are not."""

    def body(h, w, shared):
        return h + 1e-3 * jnp.tanh((h * w["gain"].astype(jnp.float16)) @ w["up"]), None

    def step(p, b):
        grads = jax.grad(lambda p: 3e8 * through_layers(body, "scan")(p, b["x"])[0])(p)
        return p, grads["gain"]

    p, b = params_of(), examples(12)
    _, expected = jax.jit(step)(p, b)
    graph = micro_batched(traced(step, p, b), 3, RULES)
    gains = run_graph(graph, [jnp.asarray(x) for x in jax.tree.leaves((p, b))])[-1]
    assert 0 < np.isinf(expected).sum() < expected.size
    np.testing.assert_allclose(gains, expected, rtol=2e-3)


def test_a_sum_that_examples_read_is_refused_by_its_line():
    def body(h, w, shared):
        return h @ w["up"] / jnp.sqrt(jnp.square(h).mean()), None

    with pytest.raises(MixedExamplesError, match=r"test_scan_tails.py.*\n?.*sqrt mixes the examples"):
        check(trained(through_layers(body, "scan")), params_of(), examples(12), 3)


@pytest.mark.xfail(
    bool(jax.config.jax_remat3),
    reason="jax_remat3 hands the metric's cotangent back as an array of zeros, so that the gradient reads its maximum",
    raises=MixedExamplesError,
)
def test_a_metric_that_mixes_examples_is_carried_and_made_in_a_scan_of_a_scan():
    def loss(p, x):
        def layer(carry, w):
            h, most = carry
            h = h + jnp.tanh(h @ w["up"])

            def head(x, gain):
                return x * gain, (x * gain).max()

            h, each = jax.lax.scan(head, h, jnp.stack([w["gain"], w["bias"]]))
            return (h, jnp.maximum(most, h.max())), each

        stacked = {name: p[name] for name in ("gain", "bias", "up")}
        (h, most), each = jax.lax.scan(jax.checkpoint(layer), (x, -jnp.inf), stacked)
        return jnp.square(h).mean(), (most, each)

    check(trained(loss), params_of(), examples(12), 3)


@pytest.mark.cases(3)
@pytest.mark.parametrize("form", FORMS)
def test_a_layers_own_loss_over_the_number_of_labels(form):
    """The number is of the batch alone: it is known before the loop, where the layer is computed again too."""

    def step(p, b):
        def layer(h, w):
            h = h + jnp.tanh(h @ w)
            counted = b["label"] > 0
            mean = jnp.where(counted, jnp.square(h).mean(-1), 0).sum() / jnp.maximum(counted.sum(), 1)
            return h, mean

        layer = jax.checkpoint(layer) if "remat" in form else layer

        def loss(p, x):
            if "scan" in form:
                return jax.lax.scan(layer, x, p["up"])[1].sum(), None
            total = 0.0
            for i in range(LAYERS):
                x, own = layer(x, p["up"][i])
                total += own
            return total, None

        return trained(loss)(p, b)

    check(step, params_of(), examples(12), 3)


@pytest.mark.parametrize("form", FORMS)
def test_what_later_layers_read_of_all_examples_is_refused_by_its_line(form):
    def body(h, w, shared):
        return jnp.tanh((h - h.max(0)) @ w["up"]), None

    with pytest.raises(MixedExamplesError, match=r"test_scan_tails.py.*\n?.*reduce_max mixes the examples"):
        check(trained(through_layers(body, form)), params_of(), examples(12), 3)


@pytest.mark.parametrize("form", FORMS)
def test_what_calls_a_function_of_jax_behind_the_layers_is_refused_by_its_line(form):
    """Where scanned layers are cut into parts too: jax keeps the trace of `jnp.roll`, whose slices have no line."""

    def layer(h, w):
        return h + jnp.tanh(h @ w), None

    layer = jax.checkpoint(layer) if "remat" in form else layer

    def loss(p, h):
        if "scan" in form:
            h, _ = jax.lax.scan(layer, h, p["up"])
        else:
            for i in range(LAYERS):
                h, _ = layer(h, p["up"][i])
        return jnp.square(jnp.roll(h, 1, axis=0) @ p["up"][0]).mean(), None

    step = trained(loss)
    parallel = autopar.parallelize(step, plan=recipes.pipeline(2, num_microbatches=2), cache_dir=None)
    with pytest.raises(MixedExamplesError, match="slice mixes the examples") as caught:
        parallel.plan(params_of(), examples(8))
    assert "test_scan_tails.py" in caught.value.where


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [
    recipes.cut(recipes.zero(3), num_microbatches=4), recipes.pipeline(2, num_microbatches=2)
])  # fmt: skip
@pytest.mark.parametrize("body", BODIES[:-2])
@pytest.mark.parametrize("form", ["scan", "scan remat"])
def test_on_devices(form, body, recipe):
    step, args = trained(through_layers(body, form)), (params_of(), examples(16))
    parallel = autopar.parallelize(step, plan=recipe, cache_dir=None)
    assert_close(parallel(*jax.tree.map(jnp.copy, args)), jax.jit(step)(*args))


def test_a_sum_over_inputs_that_each_layer_returns():
    """It is known in front of the loop, and the layers return it beside what they make of examples."""

    def step(p, b):
        def loss(p):
            def layer(h, w):
                return h + jnp.tanh(h @ w), (b["label"].sum(), jnp.any(b["label"] == 1))

            h, counts = jax.lax.scan(layer, b["x"], p["up"])
            return jnp.square(h).mean(), counts

        (value, counts), grads = jax.value_and_grad(loss, has_aux=True)(p)
        return jax.tree.map(lambda w, g: w - 0.1 * g, p, grads), {"loss": value, "counts": counts}

    check(step, params_of(), examples(12), 3)
