"""How long planning takes, and what memory: deep models on up to 16,384 devices, and steps without any repetition.

    python -m benchmarks.planning                       what the table does not have yet
    python -m benchmarks.planning --again 'gpt, 96' x2  rows whose names have all these parts

A plan is made in a fresh process with an empty cache, tracing included, and once more in another one with the cache
that the first has filled. Imports are not counted; no device is needed. Where no plan fits, finding that out is what is
timed. Rows are kept at once in results/planning.json, the table beside it.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.machine import description
from benchmarks.row_processes import Page, Rows, in_fresh_process, is_done

RESULTS = Path(__file__).parent / "results" / "planning.json"
COLUMNS = ("step", "cluster", "clock", "processor", "from the cache", "memory", "predicted step", "MFU", "plan", "made")
TIMEOUT_S = 1800.0
GPT = {"width": 768, "heads": 12, "vocabulary": 50_304, "length": 1024, "batch": 16}
# GPT-3 from Brown et al., "Language models are few-shot learners", 2020, table 2.1; 1T and the batch of both from
# Narayanan et al., "Efficient large-scale language model training on GPU clusters using Megatron-LM", 2021, table 1.
DEEP = {
    "GPT-3": {"layers": 96, "width": 12_288, "heads": 96, "vocabulary": 51_200, "length": 2048, "batch": 1536},
    "1T": {"layers": 128, "width": 25_600, "heads": 160, "vocabulary": 51_200, "length": 2048, "batch": 1536},
}
EXAMPLES, WIDTH = 256, 256  # of the steps without repetition
Traced = tuple[Callable[..., Any], tuple[Any, Any]]


def zoo(case: str, **sizes: Any) -> Traced:
    import optax

    from benchmarks.zoo import CASES

    made = CASES[case](**sizes, optimizer=optax.adamw(1e-4))
    return made.step, made.shapes()


def trained(loss: Callable[..., Any], shapes: dict[str, tuple[int, ...]]) -> Traced:
    """Plain gradient descent."""
    import jax
    import jax.numpy as jnp

    def step(params: Any, x: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, x)
        return jax.tree.map(lambda p, g: p - 1e-3 * g, params, grads), value

    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    return step, (params, jax.ShapeDtypeStruct((EXAMPLES, WIDTH), jnp.float32))


def chain(widths: list[tuple[int, int]], work: int) -> Traced:
    """Layers of these widths, outer and inner, each followed by some other operations drawn at random."""
    import jax
    import jax.numpy as jnp

    shapes: dict[str, tuple[int, ...]] = {}
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

    return trained(loss, shapes)


def many_shapes() -> Traced:
    """3,000 parameters in 500 shapes."""
    import jax.numpy as jnp

    shapes = {f"p{i}": (8 * (1 + i % 25), 8 * (1 + i // 25 % 20)) for i in range(3000)}

    def loss(params: Any, x: Any) -> Any:
        total = 0.0
        for name, (rows, columns) in shapes.items():
            total += jnp.tanh(x[:, :rows] @ params[name]).sum() / columns
        return total**2

    return trained(loss, shapes)


def llama() -> Traced:
    """The step of examples/llama.py that README.md plans."""
    import jax

    from examples import llama

    return llama.train_step.__wrapped__, jax.eval_shape(lambda: llama.job()[1:])


def steps() -> dict[str, tuple[Callable[[], Traced], tuple[str, ...]]]:
    """The steps by name, and the clusters that each is planned for."""
    hosts = ("dgx-h100", "dgx-h100x2", "dgx-h100x8")
    made: dict[str, tuple[Callable[[], Traced], tuple[str, ...]]] = {
        f"gpt, {n} layers": (lambda n=n: zoo("gpt", layers=n, **GPT), hosts) for n in (12, 96)
    }
    made["Llama 3 8B"] = llama, ("dgx-h100x8", "tpu-v5p:4x4x4")
    for model, sizes in DEEP.items():
        large = tuple(f"dgx-a100-80gx{n}" for n in (16, 128, 2048))
        made[f"{model}, unrolled"] = (lambda s=sizes: zoo("gpt", **s), large)
        made[f"{model}, scanned"] = (lambda s=sizes: zoo("gpt_scan_remat", **s), large)
    distinct = [(WIDTH + 8 * i, 4 * WIDTH + 16 * i) for i in range(48)]
    unlike = [(64 + 8 * (7 * i % 101), 64 + 8 * (11 * i % 211)) for i in range(300)]
    return made | {
        "48 distinct layers": (lambda: chain(distinct, work=6), hosts[:1]),
        "20,000 equations, none like another": (lambda: chain(unlike, work=14), hosts[:1]),
        "3,000 parameters in 500 shapes": (many_shapes, hosts[:1]),
    }


def plan_once(name: str, cluster: str, cache_dir: str) -> dict[str, Any]:
    """Plans in this process."""
    import autopar
    from autopar.errors import MemoryLimitError, SolverError
    from autopar.plan.render import in_short

    step, args = steps()[name][0]()
    parallel = autopar.parallelize(step, cluster=cluster, cache_dir=cache_dir)
    begun_s, processor_s = time.perf_counter(), time.process_time()
    try:
        plan = parallel.plan(*args)
        found = {"plan": in_short(plan.record), "step_time_s": plan.predicted.step_time_s, "mfu": plan.predicted.mfu}
    except (MemoryLimitError, SolverError) as error:
        found = {"plan": f"none: {error.got}"[:120]}
    return found | {
        "wall_s": time.perf_counter() - begun_s,
        "cpu_s": time.process_time() - processor_s,
        "memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "on": description(),
    }


def row_of(name: str, cluster: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as cache:
        row, again = (
            in_fresh_process("benchmarks.planning", ["--child", name, cluster, cache], TIMEOUT_S) for _ in range(2)
        )
    return row | ({"cached_s": again["wall_s"]} if is_done(again) and "step_time_s" in row else {})


def cells(name: str, rows: Rows) -> list[str]:
    row, named = rows[name], name.split(" | ")
    if not is_done(row):
        return [*named, row["failure"]]
    return [
        *named,
        f"{row['wall_s']:.1f} s",
        f"{row['cpu_s']:.1f} s",
        f"{row['cached_s']:.1f} s" if "cached_s" in row else "",
        f"{row['memory_bytes'] / 1e9:.1f} GB" if "memory_bytes" in row else "",
        f"{row['step_time_s']:.4g} s" if "step_time_s" in row else "",
        f"{row['mfu']:.0%}" if row.get("mfu") else "",
        row["plan"],
        row["on"].rstrip(".")[-10:],
    ]


HEAD = """# Planning time

`python -m benchmarks.planning`: in fresh processes; `from the cache` is another one that finds the plan on disk."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help="only rows whose names have all of these")
    parser.add_argument("--again", action="store_true", help="also rows that are kept already")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(plan_once(*arguments.child)))
        return 0
    names = [f"{name} | {cluster}" for name, (_, clusters) in steps().items() for cluster in clusters]
    page = Page(path=RESULTS, head=HEAD, columns=COLUMNS, order=names, cells=cells)
    chosen = [name for name in names if all(part in name for part in arguments.parts)]
    page.make(chosen, lambda name: row_of(*name.split(" | ")), arguments.again)
    return 0


if __name__ == "__main__":
    sys.exit(main())
