"""Draws the figures of the pages from plans: `python docs/figures.py` writes docs/images/*.svg."""

import argparse
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt

import autopar
from autopar import recipes

plt.switch_backend("Agg")
plt.rcParams["svg.hashsalt"] = "autopar"  # the same file for the same plan
plt.rcParams["svg.fonttype"] = "none"  # text stays text

IMAGES = Path(__file__).parent / "images"
WIDTH, LAYERS, EXAMPLES = 1024, 8, 8192
STAGES, MICROBATCHES = 4, 8
# Of the tasks of a pipeline: forward, backward, gradients of weights, and what is once a step.
COLOURS = {"F": "#4e79a7", "B": "#f28e2b", "W": "#59a14f"}
ONCE = "#9c9c9c"

Tree = Any


def train_step(state: Tree, batch: Tree) -> tuple[Tree, dict[str, jax.Array]]:
    """Residual layers of two products."""

    def loss_fn(params: Tree) -> jax.Array:
        x = batch["x"]
        for i, layer in enumerate(params):
            with jax.named_scope(f"layer{i}"):
                x = x + jax.nn.gelu(x @ layer["up"]) @ layer["down"]
        return jnp.mean((x - batch["y"]) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(state)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), {"loss": loss}


def array(*dims: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, jnp.bfloat16)


def planned(recipe: recipes.Recipe | None, width: int = WIDTH) -> autopar.Plan:
    """The plan of the step for eight H100."""
    state = [{"up": array(width, 4 * width), "down": array(4 * width, width)} for _ in range(LAYERS)]
    batch = {"x": array(EXAMPLES, width), "y": array(EXAMPLES, width)}
    options = {"cluster": "dgx-h100", "plan": recipe, "cache_dir": None}
    return autopar.plan(train_step, state, batch, **options)


def tasks_of(plan: autopar.Plan) -> Iterator[tuple[int, str, float, float]]:
    """(row, kind, start, duration) of each task of a pipeline, in microseconds."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "step.json"
        plan.trace(path)
        events = json.loads(path.read_text())["traceEvents"]
    devices = next(e["pid"] for e in events if e["name"] == "process_name" and e["args"]["name"] == "devices")
    for event in events:
        if event["ph"] == "X" and event["pid"] == devices:
            yield event["tid"] - 1, event["cat"], event["ts"], event["dur"]


def draw_schedules() -> plt.Figure:
    """The predicted timeline of one pipeline under four schedules."""
    names = ("gpipe", "1f1b", "interleaved", "zb-h1")
    figure, axes = plt.subplots(len(names), 1, figsize=(9, 7), sharex=True, layout="constrained")
    for name, ax in zip(names, axes, strict=True):
        plan = planned(recipes.combine(pp=STAGES, dp=2, num_microbatches=MICROBATCHES, schedule=name))
        for row, kind, start_us, duration_us in tasks_of(plan):
            colour = COLOURS.get(kind, ONCE)
            ax.barh(row, duration_us, left=start_us, height=0.8, color=colour, edgecolor="white", linewidth=0.4)
        ax.set_title(f"{name}: {plan.predicted.step_time_s * 1e3:.2f} ms", loc="left", fontsize=10)
        ax.set_yticks(range(STAGES), [f"stage {i}" for i in range(STAGES)], fontsize=8)
        ax.invert_yaxis()
        ax.spines[["top", "right"]].set_visible(False)
    axes[-1].set_xlabel("microseconds of a step, predicted")
    handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in (*COLOURS.values(), ONCE)]
    figure.legend(
        handles, ["forward", "backward", "gradients of weights", "once a step"], ncols=4, loc="outside lower center"
    )
    return figure


def draw_recipes() -> plt.Figure:
    """Time and memory of one step under recipes, beside the search's own plan."""
    width = 4 * WIDTH
    plans = {
        "the search": planned(None, width),
        "data_parallel()": planned(recipes.data_parallel(), width),
        "zero(1)": planned(recipes.zero(1), width),
        "zero(3)": planned(recipes.zero(3), width),
        "tensor_parallel()": planned(recipes.tensor_parallel(), width),
        "pipeline(4)": planned(recipes.combine(pp=STAGES, num_microbatches=MICROBATCHES), width),
    }
    figure, (times, peaks) = plt.subplots(1, 2, figsize=(9, 3), sharey=True, layout="constrained")
    for ax, values, label in (
        (times, [plan.predicted.step_time_s * 1e3 for plan in plans.values()], "milliseconds of a step, predicted"),
        (peaks, [max(plan.predicted.peak_bytes) / 1e9 for plan in plans.values()], "peak of a device, GB"),
    ):
        colours = ["#f28e2b", *["#4e79a7"] * (len(plans) - 1)]
        bars = ax.barh(list(plans), values, color=colours)
        ax.bar_label(bars, fmt="%.1f", padding=3, fontsize=8)
        ax.set_xlabel(label)
        ax.spines[["top", "right"]].set_visible(False)
    times.invert_yaxis()
    return figure


FIGURES: dict[str, Callable[[], plt.Figure]] = {"schedules.svg": draw_schedules, "recipes.svg": draw_recipes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--into", type=Path, default=IMAGES, help="the folder to write to (docs/images)")
    folder = parser.parse_args().into
    for name, draw in FIGURES.items():
        draw().savefig(folder / name, metadata={"Date": None})
        print(f"Written to {folder / name}")


if __name__ == "__main__":
    main()
