"""Every published model under every recipe against plain `jax.jit`: equal, refused by an error of autopar's, or broken.

    python -m benchmarks.published_recipes                                 what the table does not have yet
    python -m benchmarks.published_recipes hf_gpt2 --devices 8 --again     these rows anew
    python -m benchmarks.published_recipes --show                          the table as it stands

Cases run in processes of their own. Rows are kept one after the other in benchmarks/results/published_recipes.json, and
the table in published_recipes.md beside it; so a run that was stopped goes on where it was.
"""

import argparse
import collections
import dataclasses
import functools
import importlib.util
import json
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

import autopar
from autopar import recipes
from autopar.verification import in_a_loop
from benchmarks.machine import markdown, without_folders
from benchmarks.row_processes import JobProcess
from benchmarks.zoo.case import Case, PyTree
from benchmarks.zoo.comparison import worst_difference
from benchmarks.zoo.published import PUBLISHED

RESULTS = Path(__file__).parent / "results" / "published_recipes.json"
DEVICES = (4, 8, 2, 1)
STEPS = 2
# The modules that mix examples, of cases that do: in stages they are taken per micro-batch (`IN_LOOPS`), and results
# are compared with a plain loop over micro-batches.
PER_MICROBATCH = {
    "eqx_batch_norm": ("BatchNorm",),
    "hf_clip": ("**",),
    "hk_resnet": ("*batchnorm*",),
    "keras_convnet": ("batch_normalization",),
    "keras_hub_mixtral": ("**",),  # the loss that balances experts
    "keras_hub_mixtral_skewed": ("**",),
    "keras_hub_qwen3_moe": ("**",),
    "keras_hub_qwen_moe": ("**",),
    "linen_float8": ("Fp8DotGeneralOp_*",),
    "ott_sinkhorn": ("**",),
    "qwix_int8": ("Dense_*",),
}
STAGES_PER_MICROBATCH = "two stages, per micro-batch"
EXPERTS_IN_STAGES = "experts in two stages"
IN_LOOPS = (STAGES_PER_MICROBATCH, EXPERTS_IN_STAGES)
TIMEOUT_S = 900.0  # of one row
FREE = "free"
RECIPES = {
    FREE: None,
    "two stages": recipes.pipeline(2, num_microbatches=2),
    STAGES_PER_MICROBATCH: recipes.pipeline(2, num_microbatches=2),
    "data_parallel()": recipes.data_parallel(),
    "zero(1)": recipes.zero(1),
    "zero(3)": recipes.zero(3),
    "tensor_parallel()": recipes.tensor_parallel(),
}
# Of mixtures of experts alone; by the numbers of devices that each is run on. There are four experts.
EXPERT_RECIPES = {
    "expert_parallel()": ((1, 2, 4), recipes.expert_parallel()),
    "expert_parallel(4)": ((8,), recipes.expert_parallel(4)),
    "experts and tensor_parallel": ((4, 8), recipes.combine(ep=2, tp=2)),
    "experts and zero(3)": ((2, 4, 8), recipes.combine(ep=2, zero=3)),
    EXPERTS_IN_STAGES: ((4, 8), recipes.combine(pp=2, ep=2, num_microbatches=2)),
}
RECIPES |= {name: recipe for name, (_, recipe) in EXPERT_RECIPES.items()}
MIXTURES = (
    "keras_hub_gpt_oss", "keras_hub_mixtral", "keras_hub_mixtral_skewed", "keras_hub_qwen3_moe", "keras_hub_qwen_moe",
    "levanter_mixtral", "tunix_gemma4_experts", "tunix_qwen3_experts", "tunix_qwen3_megablox",
    "tunix_qwen3_megablox_skewed",
)  # fmt: skip
EQUAL, WRONG, REFUSED, BROKEN = "equal", "WRONG", "refused", "BROKEN"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """`said` is the first line of an error, or for what is wrong the leaf that differs most; `notes` of the recipe."""

    case: str
    devices: int
    recipe: str
    outcome: str
    difference: float = 0.0
    seconds: float = 0.0
    said: str = ""
    notes: tuple[str, ...] = ()

    @property
    def key(self) -> tuple[str, int, str]:
        return self.case, self.devices, self.recipe


def run_row(case: Case, expected: tuple[PyTree, list[PyTree], PyTree], devices: int, recipe: str) -> Row:
    """Two steps under a recipe."""
    begun_s = time.perf_counter()
    initial, expected_metrics, expected_state = expected
    per_microbatch = PER_MICROBATCH.get(case.name, ()) if recipe in IN_LOOPS else ()

    def row(outcome: str, **values: object) -> Row:
        seconds = round(time.perf_counter() - begun_s, 1)
        return Row(case=case.name, devices=devices, recipe=recipe, outcome=outcome, seconds=seconds, **values)

    try:
        step = autopar.parallelize(
            case.step,
            plan=RECIPES[recipe],
            cluster=autopar.Cluster.local(devices, measured=False),
            cache_dir=None,
            search=autopar.Search(per_microbatch=per_microbatch),
        )
        if per_microbatch:
            expected_metrics, expected_state = in_loops(case, step, initial)
        state, worst, leaf = jax.tree.map(lambda x: x.copy(), initial), 0.0, ""
        notes = [n for n in step.plan(state, case.batch(0)).record.notes if n.startswith("recipe")]
        for seed, metrics in enumerate(expected_metrics):
            state, found = step(state, step.put_batch(case.batch(seed)))
            worst = max(worst, worst_difference(case, metrics, found).relative)
        of_state = worst_difference(case, expected_state, state)
    except Exception as error:
        outcome = REFUSED if isinstance(error, autopar.errors.AutoparError) else BROKEN
        said = str(error).strip().splitlines() or [""]
        said_of = without_folders(said[0])
        return row(outcome, said=f"{type(error).__name__}: {said_of}"[:300])
    if of_state.relative > worst:
        worst, leaf = of_state.relative, of_state.path
    return row(EQUAL if worst <= case.tolerance else WRONG, difference=worst, said=leaf, notes=tuple(notes))


def in_loops(case: Case, step: autopar.Step, initial: PyTree) -> tuple[list[PyTree], PyTree]:
    """The metrics of each step and the last state, where each step is a plain loop over its micro-batches."""
    state, metrics = initial, []
    for seed in range(STEPS):
        args = state, case.batch(seed)
        state, found = in_a_loop(step, step.compile(*args), args)
        metrics.append(found)
    return metrics, state


def recipes_of(case: str, devices: int) -> list[str]:
    """Those that a case is run under on so many devices."""

    def runs(recipe: str) -> bool:
        if recipe in EXPERT_RECIPES:
            return case in MIXTURES and devices in EXPERT_RECIPES[recipe][0]
        return recipe != STAGES_PER_MICROBATCH or case in PER_MICROBATCH

    return [r for r in RECIPES if runs(r) and (devices > 1 or "stages" not in r)]


def case_of(name: str) -> Case:
    return next(cases[name] for cases in PUBLISHED.values() if name in cases)()


@functools.lru_cache(maxsize=2)
def reference(name: str, key: int) -> tuple[Case, tuple[PyTree, list[PyTree], PyTree]]:
    """A case, and what plain `jax.jit` makes of it: the first state, the metrics of each step, the last state."""
    case = case_of(name)
    step = jax.jit(case.step)
    initial = state = jax.jit(case.init)(jax.random.key(key))
    metrics = []
    for seed in range(STEPS):
        state, found = step(state, case.batch(seed))
        metrics.append(found)
    return case, (initial, metrics, state)


def row_of(name: str, devices: int, recipe: str) -> Row:
    row = run_row(*reference(name, 0), devices, recipe)
    if row.outcome == WRONG:
        # A ReLU so near its kink, or a number so near the middle of two integers of int8, that rounding decides: it is
        # as wrong from one key, not from the next.
        other = run_row(*reference(name, 1), devices, recipe)
        if other.outcome == EQUAL:
            at = f"{row.difference:.0e} in {row.said}"
            said = f"from key 1; from key 0 {at}, a kink or a step where rounding decides"
            return dataclasses.replace(other, said=said)
    return row


def work(wanted: tuple[str, int, str]) -> dict[str, Any]:
    """The row of a case, a number of devices and a recipe, in a process of its own."""
    warnings.simplefilter("ignore")  # those packages' own
    jax.config.update("jax_num_cpu_devices", max(DEVICES))
    return dataclasses.asdict(row_of(*wanted))


def load() -> dict[tuple[str, int, str], Row]:
    rows = [Row(**row) for row in json.loads(RESULTS.read_text())] if RESULTS.exists() else []
    return {row.key: row for row in rows}


def keep(rows: dict[tuple[str, int, str], Row]) -> None:
    ordered = sorted(rows.values(), key=lambda row: (row.case, row.devices, list(RECIPES).index(row.recipe)))
    RESULTS.write_text(json.dumps([dataclasses.asdict(row) for row in ordered], indent=1) + "\n")
    RESULTS.with_suffix(".md").write_text(page(ordered))


def page(rows: Sequence[Row]) -> str:
    """A table of outcomes, and below it what was said where they are not equal."""
    counts, cells, outcomes = [], [], {row.key: row for row in rows}
    for devices in sorted({row.devices for row in rows}):
        of = [
            collections.Counter(r.outcome for r in rows if (r.devices, r.recipe) == (devices, recipe))
            for recipe in RECIPES
        ]
        counts.append([str(devices), *(", ".join(f"{n} {what}" for what, n in sorted(some.items())) for some in of)])
    for case, devices in sorted({(row.case, row.devices) for row in rows}):
        found = [outcomes.get((case, devices, recipe)) for recipe in RECIPES]
        said = ["" if r is None else f"{r.difference:.0e}" if r.outcome == EQUAL else r.outcome for r in found]
        cells.append([case, str(devices), *said])
    lines = [
        "# Published models under every recipe",
        "",
        f"`python -m benchmarks.published_recipes`: {STEPS} steps on virtual CPU devices against plain `jax.jit`, jax "
        f"{jax.__version__}. Numbers are the difference of the worst leaf, within the case's tolerance; refused is an "
        "error of autopar's.",
        "",
        markdown(["devices", *RECIPES], counts),
        "",
        markdown(["case", "devices", *RECIPES], cells),
        "",
        *(
            f"- {row.case} on {row.devices}, {row.recipe}: {row.outcome}: {row.said}"
            for row in rows
            if row.outcome != EQUAL or " kink" in row.said
        ),
        "",
        f"Notes of plans that are equal, on {DEVICES[0]} devices:",
        "",
        *(f"- {row.case}, {row.recipe}: {note}" for row in rows if row.devices == DEVICES[0] for note in row.notes),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    every = {name: package for package, cases in PUBLISHED.items() for name in cases}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(every)}")
    parser.add_argument("--devices", nargs="+", type=int, default=list(DEVICES), choices=DEVICES)
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES), choices=list(RECIPES))
    parser.add_argument("--again", action="store_true", help="also what the table has")
    parser.add_argument("--show", action="store_true", help="run nothing")
    args = parser.parse_args()
    for devices in () if args.show else args.devices:
        for name in args.cases or every:
            have = {} if args.again else load()
            wanted = [r for r in recipes_of(name, devices) if r in args.recipes and (name, devices, r) not in have]
            if wanted and importlib.util.find_spec(every[name]) is None:
                print(f"{name} is left out: {every[name]} is not installed (the extra `published`)", file=sys.stderr)
                continue
            process = JobProcess(work, TIMEOUT_S)
            for recipe in wanted:
                found = process.run((name, devices, recipe))
                if "failure" in found:
                    found = {"outcome": BROKEN, "said": found["failure"]}
                row = Row(**{"case": name, "devices": devices, "recipe": recipe} | found)
                keep(load() | {row.key: row})
                print(row.case, row.devices, row.recipe, row.outcome, f"{row.seconds:.0f} s", row.said, flush=True)
            process.close()
    print(page(list(load().values())))


if __name__ == "__main__":
    main()
