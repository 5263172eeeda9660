"""How planning grows with layers, equal and distinct, and what steps without any repetition cost: time and memory.

    python -m benchmarks.planning_growth                    what the table does not have yet
    python -m benchmarks.planning_growth --again            all rows anew (ten minutes)
    python -m benchmarks.planning_growth "nested scans"     some, by a part of their names

Each step is planned for one DGX H100 in a fresh process with nothing cached, tracing included; no device is needed.
Memory is the largest that the process had, JAX and the trace in it. `equal layers` have one width, `distinct layers`
one each. Rows are kept in results/planning_growth.json, table and plot beside it (the plot needs `autopar[plots]`).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.machine import description, markdown, planning_processor_s
from benchmarks.row_processes import in_fresh_process, is_done, keep, load

RESULTS = Path(__file__).parent / "results" / "planning_growth.md"
ROWS, PLOT = RESULTS.with_suffix(".json"), RESULTS.with_suffix(".png")
CLUSTER = "dgx-h100"
LAYERS = {"equal layers": (12, 24, 48, 96), "distinct layers": (12, 24, 48)}
COLUMNS = ("step", "equations", "parameters", "shapes", "processor", "wall", "memory", "predicted step", "plan")
MEMORY_TARGET_BYTES, TIMEOUT_S = 1.5 * 2**30, 1800.0
EXAMPLES, ROWS_OF_A_CHAIN, WIDTH = 64, 8192, 256


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traced:
    """A step with the shapes of its state and its batch."""

    step: Callable[..., Any]
    state: Any
    batch: Any


def trained(loss: Callable[[Any, Any], Any], shapes: dict[str, tuple[int, ...]], batch: tuple[int, ...]) -> Traced:
    """Gradient descent on a loss; parameters of these shapes in float32."""
    import jax
    import jax.numpy as jnp

    def step(state: Any, batch: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(state, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, gradients), value

    state = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    return Traced(step=step, state=state, batch=jax.ShapeDtypeStruct(batch, jnp.float32))


def chain(widths: list[tuple[int, int]], work: int) -> Traced:
    """Layers of these (width, inner width), each of two products and so many other operations, drawn by a seed."""
    import jax
    import jax.numpy as jnp

    shapes = {}
    for i, (before, (width, inner)) in enumerate(zip([WIDTH, *(w for w, _ in widths)], widths, strict=False)):
        shapes |= {f"up{i}": (before, inner), f"down{i}": (inner, width), f"scale{i}": (width,)}
    drawn = random.Random(0)
    others = [
        jnp.tanh, jnp.sin, jax.nn.sigmoid, jnp.exp2, jnp.square, lambda x: x * 0.5, lambda x: x + 0.1,
        lambda x: x - x.mean(-1, keepdims=True), lambda x: jnp.flip(x, -1), lambda x: jnp.maximum(x, 0.0),
    ]  # fmt: skip
    picked = [[drawn.choice(others) for _ in range(work)] for _ in widths]

    def loss(params: Any, x: Any) -> Any:
        for i, operations in enumerate(picked):
            x = jnp.tanh(x @ params[f"up{i}"]) @ params[f"down{i}"] * params[f"scale{i}"]
            for operation in operations:
                x = operation(x)
        return jnp.mean(x**2)

    return trained(loss, shapes, (ROWS_OF_A_CHAIN, WIDTH))


def layers_of(kind: str, number: int) -> Traced:
    widths = [(WIDTH, 4 * WIDTH)] * number
    if kind == "distinct layers":
        widths = [(WIDTH + 8 * i, 4 * WIDTH + 16 * i) for i in range(number)]
    return chain(widths, work=6)


def many_shapes() -> Traced:
    """3,000 parameters in 500 shapes."""
    import jax.numpy as jnp

    shapes = {f"p{i}": (8 * (1 + i % 25), 8 * (1 + i // 25 % 20)) for i in range(3000)}

    def loss(params: Any, x: Any) -> Any:
        total = 0.0
        for name, (rows, columns) in shapes.items():
            total += jnp.tanh(x[:, :rows] @ params[name]).sum() / columns
        return total**2

    return trained(loss, shapes, (ROWS_OF_A_CHAIN, WIDTH))


def nested_scans() -> Traced:
    """Layers, in each of them a recurrence over positions, in each position three refinements."""
    import jax
    import jax.numpy as jnp

    shapes = {"inputs": (12, WIDTH, WIDTH), "states": (12, WIDTH, WIDTH), "refinements": (12, 3, WIDTH, WIDTH)}

    def layer(x: Any, p: Any) -> Any:
        def position(h: Any, x_t: Any) -> Any:
            h = jnp.tanh(x_t @ p["inputs"] + h @ p["states"])
            h, _ = jax.lax.scan(lambda h, w: (h + jnp.tanh(h @ w), None), h, p["refinements"])
            return h, h

        return jax.lax.scan(position, jnp.zeros_like(x[0]), x)[1], None

    def loss(params: Any, x: Any) -> Any:
        return jnp.mean(jax.lax.scan(layer, jnp.swapaxes(x, 0, 1), params)[0] ** 2)

    return trained(loss, shapes, (EXAMPLES, 128, WIDTH))


def experts() -> Traced:
    """A mixture of 64 experts."""
    import jax
    import jax.numpy as jnp
    import optax

    from benchmarks.zoo import CASES

    case = CASES["moe"](
        layers=6, width=512, heads=8, experts=64, vocabulary=32_000, length=1024, batch=EXAMPLES,
        dtype=jnp.bfloat16, optimizer=optax.adamw(1e-4),
    )  # fmt: skip
    state = jax.eval_shape(case.init, jax.random.key(0))
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), case.batch(0))
    return Traced(step=case.step, state=state, batch=batch)


def steps() -> dict[str, Callable[[], Traced]]:
    """By name."""
    made = {f"{n} {kind}": (lambda k=kind, n=n: layers_of(k, n)) for kind, numbers in LAYERS.items() for n in numbers}
    made["20,000 equations, none like another"] = lambda: chain(
        [(64 + 8 * (7 * i % 101), 64 + 8 * (11 * i % 211)) for i in range(300)], work=14
    )
    return made | {
        "3,000 parameters in 500 shapes": many_shapes, "64 experts": experts, "nested scans": nested_scans,
    }  # fmt: skip


def plan_once(name: str) -> dict[str, Any]:
    """Plans in this process."""
    import jax

    import autopar
    from autopar.common.jax_compat import jaxprs_in
    from autopar.plan.render import in_short

    traced = steps()[name]()

    def count(jaxpr: Any) -> int:
        return len(jaxpr.eqns) + sum(count(inner) for eqn in jaxpr.eqns for inner in jaxprs_in(eqn))

    leaves = jax.tree.leaves(traced.state)
    started_s, cpu_started_s = time.perf_counter(), planning_processor_s()
    plan = autopar.plan(
        traced.step, traced.state, traced.batch, cluster=autopar.Cluster.preset(CLUSTER), cache_dir=None,
        show_progress=False,
    )  # fmt: skip
    return {
        "cpu_s": planning_processor_s() - cpu_started_s,
        "wall_s": time.perf_counter() - started_s,
        "memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "equations": count(jax.make_jaxpr(traced.step)(traced.state, traced.batch).jaxpr),
        "parameters": len(leaves),
        "shapes": len({leaf.shape for leaf in leaves}),
        "step_time_s": plan.predicted.step_time_s,
        "plan": in_short(plan.record),
    }


def cells(name: str, row: dict[str, Any]) -> list[str]:
    if row.get("failure"):
        return [name, *[""] * 7, row["failure"]]
    limit = "" if row["memory_bytes"] <= MEMORY_TARGET_BYTES else " (not < 1.5)"
    return [
        name,
        f"{row['equations']:,}",
        f"{row['parameters']:,}",
        f"{row['shapes']:,}",
        f"{row['cpu_s']:.1f} s",
        f"{row['wall_s']:.1f} s",
        f"{row['memory_bytes'] / 2**30:.2f} GiB{limit}",
        f"{1e3 * row['step_time_s']:.4g} ms",
        row["plan"],
    ]


def plot(rows: dict[str, dict[str, Any]]) -> None:
    """Processor time and memory over layers, equal and distinct."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for kind, numbers in LAYERS.items():
        made = [(n, rows[f"{n} {kind}"]) for n in numbers if is_done(rows.get(f"{n} {kind}"))]
        left.plot([n for n, _ in made], [row["cpu_s"] for _, row in made], "o-", label=kind)
        right.plot([n for n, _ in made], [row["memory_bytes"] / 2**30 for _, row in made], "o-", label=kind)
    right.axhline(MEMORY_TARGET_BYTES / 2**30, color="grey", linestyle="--", linewidth=1)
    for axes, what in ((left, "planning, processor seconds"), (right, "memory of the process, GiB")):
        axes.set(xlabel="layers", ylabel=what, ylim=(0, None))
        axes.grid(alpha=0.3)
    left.legend()
    figure.savefig(PLOT, dpi=110)


def write(rows: dict[str, dict[str, Any]]) -> None:
    table = markdown(COLUMNS, [cells(name, rows[name]) for name in steps() if name in rows])
    plot(rows)
    RESULTS.write_text(
        "# Planning of steps without repetition, and with more and more layers\n\n"
        "`python -m benchmarks.planning_growth`: for one DGX H100, in fresh processes with nothing cached, tracing "
        f"included.\n\nThe last row: {description()}\n\n![time and memory]({PLOT.name})\n\n{table}\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"parts of: {', '.join(steps())}")
    parser.add_argument("--again", action="store_true", help="make rows anew that are kept")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        print(json.dumps(plan_once(arguments.names[0])))
        return
    rows = load(ROWS)
    for name in steps():
        wanted = not arguments.names or any(part in name for part in arguments.names)
        if wanted and (arguments.again or not is_done(rows.get(name))):
            rows[name] = in_fresh_process("benchmarks.planning_growth", ["--worker", name], TIMEOUT_S)
            print(" | ".join(cells(name, rows[name])), flush=True)
            keep(ROWS, rows)
            write(rows)


if __name__ == "__main__":
    main()
