"""What each threshold and weight of the planner does at half and at double: predicted times and planning time.

    python -m benchmarks.thresholds                          all of them, about half an hour
    python -m benchmarks.thresholds MOST_BUILT "sources.*"   some, by name or by module and name
    python -m benchmarks.thresholds --keep                   also keeps the table in results/thresholds.md

Every number of the planner's packages that decides between plans, or how long is searched, has a row in that table: a
new one is written there by hand, with what it decides and what it was chosen by. A constant is set to half and to
double, in the module that has it and in those that import it, and a few steps are planned: the table has the largest
ratio of predicted times, and the ratio of processor seconds, against the value as it is. Facts about hardware are no
thresholds: they stand with their sources in `autopar/hardware`.
"""

import argparse
import dataclasses
import fnmatch
import importlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.machine import description, kept_rows, markdown

RESULTS = Path(__file__).parent / "results" / "thresholds.md"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Threshold:
    """A constant: its module under autopar and its name, the decision it takes, and where its value comes from."""

    key: str
    decides: str
    chosen: str

    @property
    def module(self) -> str:
        return f"autopar.{self.key.rpartition('.')[0]}"

    @property
    def name(self) -> str:
        return self.key.rpartition(".")[2]

    @property
    def value(self) -> float:
        return getattr(importlib.import_module(self.module), self.name)


def thresholds() -> list[Threshold]:
    """The rows of the kept table."""
    return [Threshold(key=row[0].strip("`"), decides=row[2], chosen=row[3]) for row in kept_rows(RESULTS)]


def _steps() -> dict[str, Callable[[], Any]]:
    """Small steps whose plans differ in kind: planned in some seconds together."""
    import jax
    import jax.numpy as jnp

    import autopar
    from autopar.hardware import presets
    from benchmarks.zoo import CASES

    def chain(params: Any, batch: Any) -> Any:
        def loss(params: Any) -> Any:
            x = batch["x"]
            for w in params:
                x = jnp.tanh(x @ w)
            return jnp.mean((x - batch["y"]) ** 2)

        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))

    link = autopar.Cluster.preset("dgx-h100").inside_host
    hosts = autopar.Cluster(
        name="two hosts", device=presets.H100, num_hosts=2, devices_per_host=2, inside_host=link,
        between_hosts=dataclasses.replace(link, bytes_per_s=5e9, detail=None, source="made up: 40 Gb/s"),
    )  # fmt: skip
    f32 = jnp.float32
    examples = jax.ShapeDtypeStruct((32_768, 16_384), f32)
    args = ([jax.ShapeDtypeStruct((16_384, 16_384), f32)] * 8, {"x": examples, "y": examples})

    def zoo(name: str, on: Any, search: autopar.Search | None, plan: Any = None, **sizes: Any) -> Callable[[], Any]:
        case = CASES[name](**sizes)
        given = (jax.eval_shape(case.init, jax.random.key(0)), case.batch(0))
        return lambda: autopar.plan(case.step, *given, cluster=on, cache_dir=None, search=search, plan=plan)

    four = autopar.Cluster.preset("dgx-h100").submesh(1, 4)
    small_gpt = dict(layers=2, width=128, heads=4, vocabulary=1024, length=64, batch=8)
    scanned_gpt = dict(layers=8, width=512, heads=8, vocabulary=1024, length=1024, batch=16)
    return {
        "two stages": lambda: autopar.plan(chain, *args, cluster=hosts, cache_dir=None),
        "micro-batches in 3 MB": zoo(
            "mlp", four, autopar.Search(memory_limit_bytes=3_000_000), layers=2, width=512, batch=2048
        ),
        "gpt": zoo("gpt", "p3.16xlarge", None, **small_gpt),
        "gpt in 15 MB": zoo("gpt", four, autopar.Search(memory_limit_bytes=15_000_000), **small_gpt),
        "scanned gpt in 1.2 GB": zoo(
            "gpt_scan", "dgx-h100:1", autopar.Search(memory_limit_bytes=1_200_000_000), **scanned_gpt
        ),
        "tensor parallel": zoo("gpt", four, None, plan=autopar.recipes.tensor_parallel(), **small_gpt),
        "moe": zoo("gshard_moe", "p3.16xlarge", None),
    }


@contextmanager
def changed(threshold: Threshold, value: float) -> Iterator[None]:
    """The constant with another value, wherever it has been imported to."""
    home, old = importlib.import_module(threshold.module), threshold.value
    imported_from = f"from {threshold.module} import "
    places = [home]
    for module in [m for name, m in sys.modules.items() if name.startswith("autopar.") and m is not None]:
        file = getattr(module, "__file__", None)
        if module is home or not file or getattr(module, threshold.name, None) is not old:
            continue
        if imported_from in Path(file).read_text():
            places.append(module)
    for module in places:
        setattr(module, threshold.name, value)
    try:
        yield
    finally:
        for module in places:
            setattr(module, threshold.name, old)


def planned(steps: dict[str, Callable[[], Any]]) -> tuple[dict[str, float], float]:
    """(predicted seconds of each step, infinite where it has no plan; processor seconds of planning)"""
    from autopar.errors import AutoparError

    times_s, start_s = {}, time.process_time()
    for name, plan in steps.items():
        try:
            times_s[name] = plan().predicted.step_time_s
        except AutoparError:
            times_s[name] = float("inf")
    return times_s, time.process_time() - start_s


def cells(threshold: Threshold, steps: dict[str, Callable[[], Any]], base: tuple[dict[str, float], float]) -> list[str]:
    row = [f"`{threshold.key}`", f"{threshold.value:g}", threshold.decides, threshold.chosen]
    for factor in (0.5, 2.0):
        value = threshold.value * factor
        value = max(1, round(value)) if isinstance(threshold.value, int) else value
        with changed(threshold, value):
            times_s, cpu_s = planned(steps)
        ratios = {name: 1.0 if times_s[name] == base[0][name] else times_s[name] / base[0][name] for name in steps}
        worst = max(ratios, key=lambda name: abs(ratios[name] - 1))
        moved = "" if abs(ratios[worst] - 1) < 1e-6 else f" ({worst})"
        row.append(f"{ratios[worst]:.3f}{moved}, planning {cpu_s / base[1]:.2f}")
    return row


COLUMNS = ("constant", "value", "decides", "chosen by", "at half", "at double")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="names, or patterns of module and name")
    parser.add_argument("--keep", action="store_true", help=f"keep the table in results/{RESULTS.name}")
    args = parser.parse_args()
    patterns = args.names or ["*"]
    known = thresholds()
    chosen = [t for t in known if any(fnmatch.fnmatch(t.key, f"*{pattern}") for pattern in patterns)]
    steps = _steps()
    planned(steps)  # compiles the loops of the solver
    runs = [planned(steps) for _ in range(3)]
    base = runs[0][0], statistics.median(cpu_s for _, cpu_s in runs)
    print(f"{base[1]:.1f} s of planning; predicted: {base[0]}", flush=True)
    rows = {}
    for threshold in chosen:
        row = cells(threshold, steps, base)
        rows[row[0]] = row
        print(" | ".join(row), flush=True)
    if args.keep:
        kept = [rows.get(row[0], row) for row in kept_rows(RESULTS)]
        RESULTS.write_text(
            "# Thresholds of the planner\n\n`python -m benchmarks.thresholds --keep`: the predicted time of the step "
            "that changes most, as a part of that with the value as it is, and processor time of planning all steps "
            f"({', '.join(steps)}), where a constant is halved and doubled.\n\n{description()}\n\n"
            + markdown(COLUMNS, kept)
            + "\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
