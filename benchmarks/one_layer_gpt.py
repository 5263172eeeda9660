"""One-layer GPT on a TPU v5p 2x2x2 slice that need not be here: what our plan sends, its peak memory, time to decide.

    python -m benchmarks.one_layer_gpt [--topology 2x2x2] [--links equal|torus] [--limit-mb 292]

Vocabulary 8192, width 1024, 16 heads, sequence 512, batch 16, float32, tied embedding, Adam. Needs the extra
`autopar[tpu]`. For comparison, measured in the same way: the best hand-written plan (data 4 x tensor 2) sends 142 MB a
device with a peak of 292 MB; XLA's auto-sharding pass, deleted in 2026, sent 254 MB and took 191 s to decide.
"""

from __future__ import annotations

import argparse
import os
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp

import autopar
from autopar.verification import compiled_elsewhere

VOCABULARY, WIDTH, HEADS, LENGTH, BATCH = 8192, 1024, 16, 512, 16
HEAD = WIDTH // HEADS


def shapes() -> tuple[dict, dict, tuple]:
    """(parameters, optimiser state, batch) as shapes."""

    def f32(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    params = {
        "embedding": f32(VOCABULARY, WIDTH), "position": f32(LENGTH, WIDTH), "norm_out": f32(WIDTH),
        "norm1": f32(WIDTH), "qkv": f32(WIDTH, 3, HEADS, HEAD), "out": f32(HEADS, HEAD, WIDTH), "norm2": f32(WIDTH),
        "up": f32(WIDTH, 4 * WIDTH), "down": f32(4 * WIDTH, WIDTH),
    }  # fmt: skip
    tokens = jax.ShapeDtypeStruct((BATCH, LENGTH), jnp.int32)
    return params, {"mu": params, "nu": params}, (tokens, tokens)


def norm(x: jax.Array, gain: jax.Array) -> jax.Array:
    centred = x - x.mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * gain


def loss_fn(p: dict, tokens: jax.Array, targets: jax.Array) -> jax.Array:
    x = p["embedding"][tokens] + p["position"]
    q, k, v = jnp.einsum("btd,dchk->cbhtk", norm(x, p["norm1"]), p["qkv"])
    scores = jnp.einsum("bhtk,bhsk->bhts", q, k) / HEAD**0.5
    scores = jnp.where(jnp.tril(jnp.ones((LENGTH, LENGTH), bool)), scores, -1e9)
    mixed = jnp.einsum("bhts,bhsk->bhtk", jax.nn.softmax(scores, -1), v)
    x = x + jnp.einsum("bhtk,hkd->btd", mixed, p["out"])
    x = x + jax.nn.gelu(norm(x, p["norm2"]) @ p["up"]) @ p["down"]
    logits = norm(x, p["norm_out"]) @ p["embedding"].T
    hot = jax.nn.one_hot(targets, VOCABULARY, dtype=logits.dtype)
    return jnp.mean(jax.nn.logsumexp(logits, -1) - jnp.sum(logits * hot, -1))


def train_step(params: dict, opt: dict, batch: tuple) -> tuple[dict, dict, jax.Array]:
    loss, grads = jax.value_and_grad(loss_fn)(params, *batch)
    mu = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, opt["mu"], grads)
    nu = jax.tree.map(lambda n, g: 0.95 * n + 0.05 * g**2, opt["nu"], grads)
    params = jax.tree.map(lambda p, m, n: p - 1e-3 * m / (jnp.sqrt(n) + 1e-8), params, mu, nu)
    return params, {"mu": mu, "nu": nu}, loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topology", default="2x2x2")
    parser.add_argument(
        "--links",
        choices=("equal", "torus"),
        default="equal",
        help="equal: every mesh axis has the same link, so that plans rank by what they send; torus: by wires",
    )
    parser.add_argument("--limit-mb", type=float, default=292.0, help="memory of one device that the plan may use")
    parser.add_argument("--save", help="where to keep the compiled program's text")
    args = parser.parse_args()
    cluster = autopar.Cluster.preset("tpu-v5p", topology=args.topology)
    if args.links == "equal":
        cluster = autopar.Cluster.flat(cluster.num_devices, device=cluster.device, links=(cluster.inside_host,))
    step = autopar.parallelize(
        train_step,
        cluster=cluster,
        donate_argnums=(0, 1),
        batch_argnums=(2,),
        memory_limit_bytes=int(args.limit_mb * 1e6),
        cache_dir=None,
    )
    begun = time.perf_counter()
    plan = step.plan(*shapes())
    decided_s = time.perf_counter() - begun
    print(plan)
    print(f"decided in {decided_s:.1f} s, tracing included: {step.last_progress.spent_s}")
    if args.save:
        compiled = compiled_elsewhere(step, f"tpu:v5p:{args.topology}", *shapes())
        with open(args.save, "w") as file:
            file.write(compiled.as_text())
    print(autopar.verify(step, *shapes(), compile_for=f"tpu:v5p:{args.topology}"))


if __name__ == "__main__":
    main()
