"""Steps, shapes and a cluster that make the search split small models; for the tests of the public face."""

import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.hardware import presets

ROOT = Path(__file__).parent.parent
TIMEOUT_S = 300.0  # of a child process, which is killed then


def slow_cluster(num_devices: int = 8) -> autopar.Cluster:
    """CPU devices so slow beside their links that even tiny products are worth splitting.

    They bear the name of CPU devices, as which they are compiled for: memory is predicted by that compiler's rules.
    """
    device = dataclasses.replace(
        presets.V100,
        name="CPU",
        peak_flops=tuple((dtype, rate / 1e4) for dtype, rate in presets.V100.peak_flops),
        peak_memory_bytes_per_s=presets.V100.peak_memory_bytes_per_s / 1e4,
    )
    return autopar.Cluster.flat(num_devices, device=device, links=(presets.NVLINK2,))


def grouped(**options: Any) -> dict[str, Any]:
    """Options of `parallelize`, with the fields of `autopar.Search` among them in one value."""
    names = {field.name for field in dataclasses.fields(autopar.Search)}
    fields = {name: options.pop(name) for name in names.intersection(options)}
    search = options.pop("search", autopar.Search()).updated(autopar.Search(**fields))
    return options | {"search": search}


def mlp_state(key: jax.Array) -> dict[str, jax.Array]:
    first, second = jax.random.split(key)
    return {
        "bias": jnp.zeros(64),
        "first": jax.random.normal(first, (32, 64)) / 8,
        "second": jax.random.normal(second, (64, 16)) / 8,
    }


def mlp_loss(state, batch):
    hidden = jnp.tanh(batch["x"] @ state["first"] + state["bias"])
    return jnp.mean((hidden @ state["second"] - batch["y"]) ** 2)


def mlp_step(state, batch):
    loss, grads = jax.value_and_grad(mlp_loss)(state, batch)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), {"loss": loss}


def mlp_batch(examples: int = 16, seed: int = 0) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {
        "x": random.normal(size=(examples, 32)).astype(np.float32),
        "y": random.normal(size=(examples, 16)).astype(np.float32),
    }


def shapes(tree):
    """The same tree with `jax.ShapeDtypeStruct`s."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), x.dtype), tree)


MLP_STATE = jax.eval_shape(mlp_state, jax.random.key(0))
MLP_BATCH = shapes(mlp_batch())


def new_mlp_state() -> dict[str, jax.Array]:
    return mlp_state(jax.random.key(0))


def assert_close(got, expected, tolerance: float = 1e-5) -> None:
    """Leaf by leaf, in units of the leaf's largest value."""
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=0, atol=tolerance * (np.abs(b).max() + 1e-30))


def python(code: str, *, cache: Path | None = None, devices: int = 8) -> subprocess.CompletedProcess[str]:
    """Runs code in a process of its own, which is killed when it takes too long."""
    with start_python(code, cache=cache, devices=devices) as child:
        try:
            out, err = child.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            child.kill()
            raise
    return subprocess.CompletedProcess(child.args, child.returncode, out, err)


def start_python(code: str, *, cache: Path | None = None, devices: int = 8) -> subprocess.Popen[str]:
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "PYTHONPATH": str(ROOT),
    }
    if cache is not None:
        environment["AUTOPAR_CACHE_DIR"] = str(cache)
    return subprocess.Popen(
        [sys.executable, "-c", code], env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A step with the shapes of its state, a function that makes the state, and a batch."""

    step: Callable[[Any, Any], Any]
    shapes: Any
    create: Callable[[jax.Array], Any]
    batch: Any


def transformer(layers: int = 2, width: int = 32, heads: int = 4, vocabulary: int = 64) -> Case:
    """A decoder in plain JAX, its modules named with `jax.named_scope`."""
    length, examples = 8, 16

    def create(key):
        keys = iter(jax.random.split(key, 1 + 4 * layers))

        def normal(*shape):
            return jax.random.normal(next(keys), shape) * shape[0] ** -0.5

        blocks = [
            {
                "qkv": normal(width, 3, heads, width // heads),
                "out": normal(width, width),
                "up": normal(width, 4 * width),
                "down": normal(4 * width, width),
            }
            for _ in range(layers)
        ]
        return {"embedding": normal(vocabulary, width), "blocks": blocks}

    def attention(p, x):
        q, k, v = jnp.moveaxis(jnp.einsum("bld,dthe->btlhe", x, p["qkv"]), 1, 0)
        scores = jnp.einsum("blhe,bmhe->bhlm", q, k) / (width // heads) ** 0.5
        scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -1e9)
        mixed = jnp.einsum("bhlm,bmhe->blhe", jax.nn.softmax(scores), v)
        return mixed.reshape(*mixed.shape[:2], width) @ p["out"]

    def normalised(x):
        return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)

    def loss_fn(params, batch):
        x = params["embedding"][batch["tokens"]]
        for i, p in enumerate(params["blocks"]):
            with jax.named_scope(f"layer{i}"):
                with jax.named_scope("attention"):
                    x = x + attention(p, normalised(x))
                with jax.named_scope("mlp"):
                    x = x + jax.nn.gelu(normalised(x) @ p["up"]) @ p["down"]
        logits = normalised(x) @ params["embedding"].T
        logits = jax.nn.log_softmax(logits)
        return -jnp.take_along_axis(logits, batch["targets"][..., None], -1).mean()

    def transformer_step(params, batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), {"loss": loss}

    tokens = np.random.default_rng(0).integers(0, vocabulary, (examples, length + 1)).astype(np.int32)
    return Case(
        step=transformer_step,
        shapes=jax.eval_shape(create, jax.random.key(0)),
        create=create,
        batch={"tokens": tokens[:, :-1], "targets": tokens[:, 1:]},
    )


def chain_loss(params, batch):
    """Of products one after the other."""
    x = batch["x"]
    for w in params:
        x = jnp.tanh(x @ w)
    return jnp.mean((x - batch["y"]) ** 2)


def chain_step(params, batch):
    """Products one after the other, by plain gradient descent."""
    value, grads = jax.value_and_grad(chain_loss)(params, batch)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def gated_step(params, batch):
    """Gated feed-forward layers: of the three products of each, the backward pass reads what the first two make."""

    def loss_of(params):
        x = batch["x"]
        for number, (gate, up, down) in enumerate(params):
            with jax.named_scope(f"layer{number}"):
                x = x + (jax.nn.silu(x @ gate) * (x @ up)) @ down
        return jnp.mean((x - batch["y"]) ** 2)

    loss, grads = jax.value_and_grad(loss_of)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


def verified(case, recipe, num_devices: int = 8):
    """A case under a recipe: it gives the numbers of plain `jax.jit` and sends the bytes that are predicted.

    Returns what `autopar.verify` found, and the plan.
    """
    step = autopar.parallelize(case.step, plan=recipe, cluster=autopar.Cluster.local(num_devices), cache_dir=None)
    args = jax.jit(case.init)(jax.random.key(0)), case.batch(0)
    return verified_step(step, args, case.tolerance), step.plan(*args)


def verified_step(step, args, tolerance: float):
    """What `autopar.verify` found of a step that gives the numbers of `jax.jit` and sends the bytes predicted."""
    made = autopar.verify(step, *args)
    assert made.difference <= tolerance, made
    assert made.total.predicted == pytest.approx(made.total.compiled, rel=0.01), str(made)
    return made
