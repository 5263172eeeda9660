"""Optimizers that work on whole matrices, beside AdamW: the predicted step, its collectives, and planning.

    python -m benchmarks.matrix_optimizers                    what the table does not have yet
    python -m benchmarks.matrix_optimizers --again            all rows anew (ten minutes)
    python -m benchmarks.matrix_optimizers muon "8 layers"    rows whose names have all these parts

A decoder of width 4,096 on eight H100, its layers written out or scanned, planned in fresh processes with nothing
cached, tracing included; no device is needed. `least` is the AdamW step of the same model, and what the optimizer
multiplies at the rate of its products, shared out evenly: no plan can take less. Rows are kept in
results/matrix_optimizers.json, the table beside it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from benchmarks.machine import description, markdown, planning_processor_s
from benchmarks.row_processes import in_fresh_process, is_done, keep, load

RESULTS = Path(__file__).parent / "results" / "matrix_optimizers.md"
ROWS = RESULTS.with_suffix(".json")
COLUMNS = ("optimizer, layers, plan", "step", "of AdamW's", "least", "collectives", "planning, processor", "plan")
CLUSTER, WIDTH, HEADS, VOCABULARY, EXAMPLES, LENGTH = "dgx-h100", 4096, 32, 32_000, 64, 2048
TIMEOUT_S = 900.0
_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


class _Matrices(NamedTuple):
    """The state of an optimizer: for each matrix a tuple of arrays, and the number of steps."""

    of_matrix: Any
    count: Any


def on_matrices(
    init: Callable[[Any], tuple[Any, ...]],
    update: Callable[[Any, tuple[Any, ...], Any], tuple[Any, tuple[Any, ...]]],
    learning_rate: float,
) -> optax.GradientTransformation:
    """An optimizer that treats each matrix alone, those of stacked layers (dimensions in front) too, and everything
    else by AdamW. `update(gradient, state, count)` returns the direction and the new state.
    """

    def over_layers(function: Callable[..., Any], rank: int, layered: tuple[int | None, ...]) -> Callable[..., Any]:
        for _ in range(rank - 2):
            function = jax.vmap(function, in_axes=layered)
        return function

    def init_all(params: Any) -> _Matrices:
        return _Matrices(jax.tree.map(lambda p: over_layers(init, p.ndim, (0,))(p), params), jnp.zeros((), jnp.int32))

    def update_all(grads: Any, state: _Matrices, params: Any = None) -> tuple[Any, _Matrices]:
        count = state.count + 1
        pairs = jax.tree.map(
            lambda g, s: over_layers(update, g.ndim, (0, 0, None))(g, s, count), grads, state.of_matrix
        )
        updates = jax.tree.map(lambda g, pair: -learning_rate * pair[0], grads, pairs)
        return updates, _Matrices(jax.tree.map(lambda g, pair: pair[1], grads, pairs), count)

    matrices = optax.GradientTransformation(init_all, update_all)
    return optax.partition({"matrix": matrices, "other": optax.adamw(learning_rate)}, _labels)


def _labels(params: Any) -> Any:
    return jax.tree_util.tree_map_with_path(lambda path, p: "matrix" if "layers" in str(path[0]) else "other", params)


def muon(learning_rate: float = 1e-3, dtype: Any = jnp.float32) -> optax.GradientTransformation:
    """Momentum made orthogonal by five iterations of Newton and Schulz, in this type (Jordan et al., 2024)."""
    a, b, c = _NEWTON_SCHULZ

    def update(gradient: Any, state: tuple[Any, ...], _: Any) -> tuple[Any, tuple[Any, ...]]:
        momentum = 0.95 * state[0] + gradient
        x = (gradient + 0.95 * momentum).astype(dtype)
        tall = x.shape[0] > x.shape[1]
        x = x.T if tall else x
        x = x / (jnp.linalg.norm(x) + 1e-7)
        for _ in range(5):
            gram = x @ x.T
            x = a * x + (b * gram + c * gram @ gram) @ x
        return (x.T if tall else x).astype(gradient.dtype), (momentum,)

    return on_matrices(lambda p: (jnp.zeros_like(p),), update, learning_rate)


def shampoo(learning_rate: float = 1e-3, damping: float = 1e-4) -> optax.GradientTransformation:
    """Gradients between the inverse fourth roots of their second moments (Gupta et al., 2018)."""

    def inverse_root(moment: Any) -> Any:
        values, vectors = jnp.linalg.eigh(moment)
        return (vectors * jnp.maximum(values, 1e-6) ** -0.25) @ vectors.T

    def update(gradient: Any, state: tuple[Any, ...], _: Any) -> tuple[Any, tuple[Any, ...]]:
        left, right = state[0] + gradient @ gradient.T, state[1] + gradient.T @ gradient
        return inverse_root(left) @ gradient @ inverse_root(right), (left, right)

    return on_matrices(lambda p: tuple(damping * jnp.eye(n, dtype=p.dtype) for n in p.shape), update, learning_rate)


def soap(learning_rate: float = 1e-3, damping: float = 1e-4, epsilon: float = 1e-8) -> optax.GradientTransformation:
    """Adam in the basis of the eigenvectors of Shampoo's moments, which one QR decomposition a step follows (Vyas et
    al., 2024).
    """

    def init(p: Any) -> tuple[Any, ...]:
        rows, columns = (jnp.eye(n, dtype=p.dtype) for n in p.shape)
        return (damping * rows, damping * columns, rows, columns, jnp.zeros_like(p), jnp.zeros_like(p))

    def update(gradient: Any, state: tuple[Any, ...], count: Any) -> tuple[Any, tuple[Any, ...]]:
        left, right, of_rows, of_columns, mean, square = state
        left = 0.95 * left + 0.05 * gradient @ gradient.T
        right = 0.95 * right + 0.05 * gradient.T @ gradient
        mean = 0.95 * mean + 0.05 * gradient
        square = 0.95 * square + 0.05 * (of_rows.T @ gradient @ of_columns) ** 2
        rotated = of_rows.T @ mean @ of_columns
        step = of_rows @ (rotated / (1 - 0.95**count) / (jnp.sqrt(square / (1 - 0.95**count)) + epsilon)) @ of_columns.T
        of_rows, of_columns = (jnp.linalg.qr(m @ q)[0] for m, q in ((left, of_rows), (right, of_columns)))
        return step, (left, right, of_rows, of_columns, mean, square)

    return on_matrices(init, update, learning_rate)


OPTIMIZERS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "adamw": lambda: optax.adamw(1e-3),
    "optax muon": lambda: optax.contrib.muon(1e-3, muon_weight_dimension_numbers=_dimension_numbers),
    "muon in bfloat16": lambda: muon(dtype=jnp.bfloat16),
    "shampoo": shampoo,
    "soap": soap,
}


def _dimension_numbers(params: Any) -> Any:
    """Of matrices of layers, stacked or not, the last two dimensions; the embedding goes with AdamW."""
    numbers = optax.contrib.MuonDimensionNumbers(-2, -1)
    return jax.tree_util.tree_map_with_path(
        lambda path, p: numbers if "layers" in str(path[0]) and p.ndim > 1 else None, params
    )


class Sizes(NamedTuple):
    layers: int
    width: int = WIDTH
    heads: int = HEADS
    vocabulary: int = VOCABULARY


def init(sizes: Sizes, optimizer: optax.GradientTransformation, *, scanned: bool, key: Any) -> dict[str, Any]:
    """Parameters and the optimizer's state."""
    w = sizes.width
    shapes = {"q": (w, w), "k": (w, w), "v": (w, w), "o": (w, w), "up": (w, 4 * w), "down": (4 * w, w)}

    def layer(key: Any) -> dict[str, Any]:
        keys = jax.random.split(key, len(shapes))
        return {n: jax.random.normal(k, s) * s[0] ** -0.5 for k, (n, s) in zip(keys, shapes.items(), strict=True)}

    first, *keys = jax.random.split(key, 1 + sizes.layers)
    layers = jax.vmap(layer)(jnp.stack(keys)) if scanned else [layer(k) for k in keys]
    params = {"embedding": jax.random.normal(first, (sizes.vocabulary, w)), "layers": layers}
    return {"params": params, "optimizer": optimizer.init(params)}


def make_step(
    sizes: Sizes, optimizer: optax.GradientTransformation, *, scanned: bool, dtype: Any
) -> Callable[..., Any]:
    """A training step of a decoder whose products are in this type."""

    def normal(x: Any) -> Any:
        return x * jax.lax.rsqrt(jnp.mean(x.astype(jnp.float32) ** 2, -1, keepdims=True) + 1e-6).astype(x.dtype)

    def layer(x: Any, p: Any) -> Any:
        h = normal(x)
        q, k, v = ((h @ p[n]).reshape(*h.shape[:2], sizes.heads, -1) for n in "qkv")
        x = x + jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(h.shape) @ p["o"]
        return x + jax.nn.gelu(normal(x) @ p["up"]) @ p["down"]

    def loss_of(params: Any, tokens: Any) -> Any:
        params = jax.tree.map(lambda p: p.astype(dtype), params)
        x = params["embedding"][tokens["inputs"]]
        block = jax.checkpoint(layer)
        if scanned:
            x, _ = jax.lax.scan(lambda x, p: (block(x, p), None), x, params["layers"])
        else:
            for p in params["layers"]:
                x = block(x, p)
        logits = (normal(x) @ params["embedding"].T).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens["targets"]).mean()

    def step(state: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_of)(state["params"], batch)
        updates, new = optimizer.update(grads, state["optimizer"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "optimizer": new}, {"loss": loss}

    return step


def names() -> list[str]:
    return [
        f"{optimizer}, {layers} layers {form}, {plan}"
        for layers, form in ((4, "unrolled"), (8, "unrolled"), (8, "scanned"), (12, "scanned"))
        for plan in ("zero-3", "free")
        for optimizer in OPTIMIZERS
    ]


def plan_once(name: str) -> dict[str, Any]:
    """Plans in this process."""
    import autopar
    from autopar.plan.render import in_short

    optimizer_name, layers, plan_name = name.split(", ")
    sizes, scanned = Sizes(layers=int(layers.split()[0])), layers.endswith("scanned")
    optimizer = OPTIMIZERS[optimizer_name]()
    state = jax.eval_shape(lambda key: init(sizes, optimizer, scanned=scanned, key=key), jax.random.key(0))
    tokens = jax.ShapeDtypeStruct((EXAMPLES, LENGTH), jnp.int32)
    step = make_step(sizes, optimizer, scanned=scanned, dtype=jnp.bfloat16)
    recipe = {"plan": autopar.recipes.zero(3)} if plan_name == "zero-3" else {}
    cpu_started_s = planning_processor_s()
    plan = autopar.plan(
        step, state, {"inputs": tokens, "targets": tokens}, cluster=autopar.Cluster.preset(CLUSTER), cache_dir=None,
        show_progress=False, attention="blockwise", **recipe,
    )  # fmt: skip
    return {
        "cpu_s": planning_processor_s() - cpu_started_s,
        "step_time_s": plan.predicted.step_time_s,
        "update_s": least_update_s(step, state, {"inputs": tokens, "targets": tokens}),
        "collectives": sum(row.count for row in plan.predicted.collectives),
        "plan": in_short(plan.record),
    }


def least_update_s(step: Callable[..., Any], state: Any, batch: Any) -> float:
    """Seconds of the products and decompositions of the update, shared out evenly."""
    import autopar
    from autopar.cost.cost_model import NodeCosts, cost_model
    from autopar.cost.roofline import launches_of
    from autopar.frontend.build_graph import build_graph
    from autopar.frontend.tracing import trace
    from autopar.ir.graph import Role
    from autopar.ir.mesh import LogicalMesh
    from autopar.ir.primitives import MATRIX_PRODUCTS
    from autopar.sharding.rules import RuleBook

    graph = build_graph(trace(step, (state, batch), names=("state", "batch"), donate=(0,), batch=(1,)), RuleBook())
    cluster = autopar.Cluster.preset(CLUSTER)
    costs = NodeCosts(graph, cost_model(cluster, LogicalMesh(axis_sizes=(cluster.num_devices,))))
    heavy = (
        op for op in graph.ops() if op.role is Role.UPDATE and (op.primitive in MATRIX_PRODUCTS or launches_of(op))
    )
    return sum(costs.compute_s(op, None) for op in heavy if op.rule is not None) / cluster.num_devices


def cells(name: str, rows: dict[str, dict[str, Any]]) -> list[str]:
    row, adamw = rows[name], rows.get(", ".join(["adamw", *name.split(", ")[1:]]), {})
    if row.get("failure"):
        return [name, *[""] * 5, row["failure"]]
    known = bool(adamw) and not adamw.get("failure")
    return [
        name,
        f"{1e3 * row['step_time_s']:.4g} ms",
        f"{row['step_time_s'] / adamw['step_time_s']:.2f}" if known else "",
        f"{1e3 * (adamw['step_time_s'] + row['update_s']):.4g} ms" if known else "",
        f"{row['collectives']:.0f}",
        f"{row['cpu_s']:.1f} s",
        row["plan"],
    ]


def write(rows: dict[str, dict[str, Any]]) -> None:
    table = markdown(COLUMNS, [cells(name, rows) for name in names() if name in rows])
    RESULTS.write_text(
        "# Optimizers that work on whole matrices\n\n`python -m benchmarks.matrix_optimizers`: a decoder of width "
        f"{WIDTH:,} on {CLUSTER}, {EXAMPLES} sequences of {LENGTH:,} tokens. `least`: the AdamW step and the products "
        f"and decompositions of the optimizer, shared out evenly.\n\nThe last row: {description()}\n\n{table}\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help="parts that the names of rows have")
    parser.add_argument("--again", action="store_true", help="make rows anew that are kept")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        print(json.dumps(plan_once(arguments.parts[0])))
        return
    rows = load(ROWS)
    for name in names():
        wanted = all(part in name for part in arguments.parts)
        if wanted and (arguments.again or not is_done(rows.get(name))):
            rows[name] = in_fresh_process("benchmarks.matrix_optimizers", ["--worker", name], TIMEOUT_S)
            print(" | ".join(cells(name, rows)), flush=True)
            keep(ROWS, rows)
            write(rows)


if __name__ == "__main__":
    main()
