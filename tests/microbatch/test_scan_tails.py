"""Scans over layers that read whole sums over examples, such as casts of gradients: numbers against plain `jax.jit`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar import recipes
from autopar.errors import MixedExamplesError
from autopar.ir.graph import OpKind, Section, walk
from tests.microbatch.test_microbatch import WIDTH, check, examples
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


BODIES = [
    rms_norm, layer_norm, norm_with_a_gradient_of_its_own, gain_of_all_layers, gains_in_a_scan_of_a_scan,
    root_of_a_mean_square,
]  # fmt: skip
FORMS = ["scan", "scan remat", "loop", "loop remat"]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("body", BODIES)
def test_what_holds_for_layers_that_are_written_out_holds_in_a_scan(body, form):
    check(trained(through_layers(body, form)), params_of(), examples(12), 3)
