"""What each threshold and weight of the planner does at half and at double: predicted times and planning time.

    python -m benchmarks.thresholds                          all of them, about half an hour
    python -m benchmarks.thresholds MOST_BUILT "sources.*"   some, by name or by module and name
    python -m benchmarks.thresholds --keep                   also keeps the table in results/thresholds.md

Every number of the planner's packages that decides between plans, or how long is searched, has a row here
(`THRESHOLDS`). A constant is set to half and to double, in the module that has it and in those that import it, and the
steps of `STEPS` are planned: the table has the largest and the median ratio of predicted times, and the ratio of
processor seconds, against the value as it is. Facts about hardware are no thresholds: they stand with their sources in
`autopar/hardware`.
"""

import argparse
import dataclasses
import fnmatch
import importlib
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.machine import description, kept_rows, markdown

RESULTS = Path(__file__).parent / "results" / "thresholds.md"


@dataclasses.dataclass(frozen=True)
class Threshold:
    """A constant: its module, its name, the decision it takes, and where its value comes from.

    `highest`: the highest value that has a meaning; such as 1 for a share, twice of which may be more.
    """

    module: str
    name: str
    decides: str
    chosen: str
    highest: float = math.inf

    @property
    def value(self) -> float:
        return getattr(importlib.import_module(self.module), self.name)

    @property
    def key(self) -> str:
        return f"{self.module.removeprefix('autopar.')}.{self.name}"


def _of(module: str, *rows: tuple[str, str, str] | tuple[str, str, str, float]) -> list[Threshold]:
    return [Threshold(f"autopar.{module}", *row) for row in rows]


TASKS = "handing out a task takes about 0.1 ms (results/dispatch.md)"
PRICES = "a geometric scale that spans all prices in the given number of steps"
ALPA = "Zheng et al., Alpa, 2022"

THRESHOLDS = [
    *_of(
        "compiler.planner",
        (
            "MEMORY_MARGIN",
            "memory left free where no limit is given",
            "errors of predicted peaks (benchmarks/memory_study.py)",
        ),
    ),
    *_of(
        "compiler.sources",
        ("WHOLE_UP_TO", "devices up to which a program without stages is searched for", "planning time"),
        (
            "LOST",
            "share of a step lost to communication from which pipelines are searched",
            "plans of benchmarks/auto_vs_manual",
        ),
    ),
    *_of(
        "inter_op.handing_out",
        ("HAND_OUT_S", "time of a process for each run of a task of a pipeline", TASKS),
        ("SLICE_HOST_DEVICES", "devices of a host of a TPU slice", "25 GB/s a host of 4 chips, scaling-book tpus.md"),
    ),
    *_of(
        "plan.options",
        (
            "NEARLY_EQUAL",
            "difference below which fewer axes are taken, and less than which is not searched for",
            "half of the 0.01 % by which no recipe may be faster than the search",
        ),
    ),
    *_of(
        "intra_op.mesh_choice",
        ("GAIN_OF_AN_AXIS", "gain of a second mesh axis from which three are tried", "planning time"),
    ),
    *_of(
        "intra_op.overlapped_axes",
        (
            "LEAST_GAIN",
            "part of a program's time that products in pieces must gain",
            "what the model of pieces errs by; time to compile them",
        ),
    ),
    *_of(
        "intra_op.spmd_search",
        ("MEMORY_ROUNDS", "prices of a byte that are tried until a plan fits", PRICES),
        ("FIRST_PRICE", "the first of these prices, as a part of step time / peak", PRICES),
        ("PRICE_RISE", "factor from one price to the next", PRICES),
        ("LONG_STEP", "operations from which a step gets fewer tries", "planning time"),
        (
            "LASTING_WAIT",
            "part of the waiting in a step of few layers that one of many has too",
            "GPT of 12 layers",
            1.0,
        ),
    ),
    *_of(
        "intra_op.ilp",
        ("ROUNDS", "rounds of the solver for one program", "results/solver_rounds.md"),
        ("RELATIVE_GAP", "proven distance to the optimum that ends a search", "a tenth of NEARLY_EQUAL"),
    ),
    *_of(
        "intra_op.symmetry",
        ("ROUNDS", "neighbourhood that operations must share to be decided alike", "half a transformer layer each way"),
        ("SMALL", "choices up to which nothing is folded", "such problems are solved whole"),
    ),
    *_of("passes.fold_step", ("THIN_LAYER_OPS", "operations of a layer whose run ends are decided apart", "chain: 9")),
    *_of(
        "passes.stack_updates",
        (
            "LEAST_INTENSITY",
            "arithmetic for each byte from which on equal chains of the update are stacked",
            "products with vectors: 0.5",
        ),
    ),
    *_of(
        "sharding.axis_groups",
        ("LEAST_GAIN", "share of a device's state that a second mesh axis must save", "a sixth of 3 %"),
    ),
    *_of(
        "intra_op.masks",
        (
            "COMPUTED_WHOLE",
            "weight of a value computed whole against a recipe",
            "order of the weights: gather, compute, keep",
        ),
        ("KEPT_WHOLE", "weight of a value kept whole against a recipe", "order of the weights: gather, compute, keep"),
        (
            "GATHERED",
            "weight of weights gathered over the axis of a recipe",
            "order of the weights: gather, compute, keep",
        ),
        ("SECONDS", "weight of the plan's time beside them", "decides between equals only"),
        (
            "OPENED",
            "weight of a way that a recipe does not have, so that it is taken last",
            "decides between equals only",
        ),
    ),
    *_of(
        "inter_op.search",
        (
            "OVERSTATED",
            "memory of one stage by the tables, over the limit, that is still built",
            "shared values count in each layer",
        ),
        ("NEAR_THE_BEST", "time against the best by the tables up to which a pipeline is built", "error of the tables"),
    ),
    *_of(
        "inter_op.search_space",
        ("SMALLEST_MICROBATCH", "examples of the smallest micro-batch on many devices", "planning time"),
        ("MICROBATCH_SIZES", "sizes of micro-batches that are searched", "planning time"),
        ("MICROBATCH_RATIO", "ratio of these sizes", "planning time; factors of two are tried near the best"),
        ("SHARING", "devices that may share an example", "planning time"),
        ("MICROBATCHES_A_STAGE", "micro-batches for each stage that leave next to no bubble", "bubble of 1F1B: 1/16"),
        ("MOST_STAGES", "stages up to which more of them are searched", "planning time"),
        ("MOST_PARTS", "parts of the devices in the search over stages", "planning time"),
        ("FEW_MESHES", "meshes up to which one stage is decided on all", "planning time"),
        ("MOST_CHUNKS", "stages of a group of devices that interleave", "planning time"),
        ("MOST_ODD", "odd numbers of hosts that stages may have", "3 for Megatron's 48 copies of a model"),
        ("FINEST_PARTS", "parts in which a scan over layers is priced", "deepest published models"),
    ),
    *_of(
        "inter_op.microbatch_walk",
        (
            "APART",
            "least factor between numbers of micro-batches for stages",
            "planning time: a table is made for each",
        ),
    ),
    *_of(
        "inter_op.mesh_screen",
        (
            "MUCH_SLOWER",
            "time against the fastest mesh of as many devices from which a mesh is left out",
            "planning time: GPT-3 on 1,024 A100",
        ),
    ),
    *_of(
        "inter_op.evaluate",
        ("MOST_BUILT", "pipelines that are built exactly", "planning time"),
        ("TIGHTENED", "searches with a lower limit where a built one does not fit", "planning time"),
        ("ESTIMATE_ERROR", "how much slower than built an estimate of one stage may be", "order of magnitude"),
        ("BOUND_ERROR", "the same under data parallelism and ZeRO", "BERT of 340M on 8 H100: 0.05 % at most"),
        ("PEAK_ERROR", "how much more memory than built an estimate may need", "BERT of 340M on 8 H100: 5.6 % at most"),
        (
            "WORTH_AN_ESTIMATE",
            "part of the step that one stage, decided otherwise, may gain at least",
            "what a plan may be longer; GPT 2.6B on 8 V100: a third of the estimates less",
        ),
    ),
    *_of(
        "inter_op.refine_one_stage",
        (
            "REFINED_WITHIN",
            "time against the best from which one stage is decided again, under data parallelism and ZeRO too",
            "a ViT of 632M on 16 TPU v5e: one stage by the tables is 8 % slower, ZeRO-3 in two micro-batches as fast",
        ),
    ),
    *_of(
        "inter_op.microbatch_counts",
        (
            "WALKED_WITHIN",
            "time against the best from which one stage is tried in more micro-batches",
            "a GPT of 2.6B on 8 A100: ZeRO-3 in 64 is 1 % slower than the best, in 16 it is 4 % faster",
        ),
    ),
    *_of(
        "inter_op.joined_tasks",
        (
            "LEAST_GAIN",
            "share of a step that the last micro-batch with the update as one program must save",
            "one more program is compiled, which is as large as those of a micro-batch and of the update together",
        ),
    ),
    *_of(
        "inter_op.layer_decisions",
        ("TIE_BREAKING_READS", "price of a byte among equally fast decisions", "decides between equals only"),
        ("LEANER", "decisions with a higher price on state", PRICES),
        ("FIRST_PRICE", "the first of these prices", PRICES),
        ("PRICE_RISE", "factor from one price to the next", PRICES),
        ("STATE_SHARE", "share of memory that state must take for leaner decisions", "planning time"),
        ("SAVED_SHARE", "share of memory that saved values must take for leaner decisions", "planning time"),
        ("ALIKE_SECONDS", "part of their seconds by which decisions must differ to be priced", "a fifth of 0.5 %"),
        ("ALIKE_BYTES", "part of their bytes by which they must differ", "planning time"),
    ),
    *_of(
        "inter_op.fit_stages",
        ("LEANER", "decisions of a stage that does not fit with higher prices", PRICES),
        ("FIRST_PRICE", "the first of these prices", PRICES),
        ("PRICE_RISE", "factor from one price to the next", PRICES),
    ),
    *_of(
        "inter_op.truncated_model",
        (
            "SHORT",
            "layers of a run with which a step in one stage is estimated",
            "tests/inter_op/test_truncated_model.py",
        ),
        ("UNEVEN_COLLECTIVES", "of a step, by what an estimate may be off", "ESTIMATE_ERROR, which it is a part of"),
        ("JOINED_FROM", "of the least gain of one program for two, from which short steps have it", "planning time"),
        ("SHORTER", "layers of the step that it is compared with", "tests/inter_op/test_truncated_model.py"),
        ("WHOLE_UP_TO", "layers of a run up to which such a step is built whole", "planning time"),
    ),
    *_of(
        "cost.cost_model",
        (
            "EXPOSED_FRACTION",
            "part of hideable communication that is charged",
            "GPT 15B on 4 and 8 V100: 0.2 to 0.4 are best",
        ),
        ("LEAST_EXPOSED_FRACTION", "the same in a second try", "gathers of split state hide better"),
        ("_MOST_READERS", "readers for which a cheap value is computed again", "programs that XLA compiled"),
        ("_ROW_BYTES", "length of rows where a value is copied with another dimension last", "order of magnitude"),
    ),
    *_of(
        "cost.roofline",
        ("FUSED_TRAFFIC_SHARE", "part of its result that a fused operation reads and writes", "order of magnitude"),
    ),
    *_of(
        "cost.xla_program",
        (
            "BROADCAST_RATIO",
            "result over operand from which an operand is taken for a broadcast one",
            "sizes of types: 8",
        ),
        ("SCALAR_BYTES", "operands up to this size are constants of a kernel", "the largest scalar"),
    ),
    *_of(
        "cost.stream_simulator",
        ("RESULTS_AHEAD", "gathered parts of state held at once", "one used, one on its way"),
    ),
    *_of(
        "microbatch.microbatch_analysis", ("_MAX_ROUNDS", "rounds in which carried values settle", "one for each form")
    ),
    *_of(
        "passes.layers",
        ("MAX_LAYERS", "layers of a step", "128 blocks, embedding and loss"),
        ("HEAVY", "part of the mean layer from which operations are a layer of their own", "embeddings and heads"),
    ),
    *_of(
        "passes.layers",
        ("CLUSTERS", "layers of a model without modules", f"{ALPA}: 8 to 16"),
        ("SLACK", "excess of a cluster over the mean", f"{ALPA}: delta"),
        ("COVERED", "arithmetic that modules must explain to be trusted", "majority"),
    ),
    *_of(
        "passes.remat_cheap",
        ("WORTH_MAKING", "part of the state from which copies are made anew where memory is short", "planning time"),
    ),
    *_of("passes.scan_stacks", ("DOMINATING", "part of the products that a scan must have to be cut", "majority")),
    *_of(
        "lowering.host_offload",
        ("BUCKETS", "parts in which state comes from the host", "as many copies as hide"),
        ("AHEAD", "parts that are under way", "one used, one on its way"),
    ),
    *_of("solver.stages.search", ("FEW_CUTS", "cuts of interleaved layers up to which all are tried", "10 ms")),
    *_of(
        "solver.solving",
        ("EXACT_ENTRIES", "edge variables that the integer program gets at once", "results/solvers.md"),
        ("EXACT_NODES", "nodes up to which a problem is tried without its memory", "results/solvers.md"),
    ),
    *_of(
        "solver.ilp.exact",
        ("ROWS_AT_ONCE", "rows added to the program after an answer that breaks them", "results/solvers.md"),
        ("WHOLE", "rows up to which a program gets them all", "results/solvers.md"),
    ),
    *_of(
        "solver.anytime.anytime",
        ("MIX", "weight of the best prices in those tried (Wentges)", "results/solvers.md"),
        ("WARM_SWEEPS", "sweeps of messages before prices", "results/solvers.md"),
        ("FEW_SWEEPS", "sweeps a round while prices move", "results/solvers.md"),
        ("MANY_SWEEPS", "sweeps a round once they have settled", "results/solvers.md"),
        ("RECENT", "choices that are combined", "results/solvers.md"),
        ("DRAWN", "nodes drawn anew before a round", "results/solvers.md"),
    ),
    *_of("solver.anytime.column_generation", ("MOST_COLUMNS", "columns of the master program", "results/solvers.md")),
    *_of(
        "solver.anytime.finish",
        ("PROOF_ENTRIES", "variables with which a proof is tried", "results/solvers.md"),
        ("COMBINE_ENTRIES", "variables of a search among recent choices", "results/solvers.md"),
    ),
    *_of(
        "solver.anytime.tables",
        ("FIRST_PART", "part of the gap in which tables look for a choice first", "planning time"),
        ("STEP", "ratio of the next such part to it", "planning time"),
        ("TRIES", "parts that are tried in a row", "planning time"),
    ),
    *_of(
        "solver.presolve.presolve",
        ("DOMINANCE_WORK", "comparisons of one pass over dominated strategies", "a tenth of a second"),
        ("SETTLED", "strategies left by a turn of reductions that ends them", "planning time", 1.0),
        ("TABLE_ENTRIES", "entries of a table that elimination forms", "32 MB"),
    ),
    *_of(
        "solver.presolve.elimination",
        ("LARGEST_TABLE", "entries of a table in a solution by tables", "160 MB"),
        ("ALL_TABLES", "entries of all of them", "a second"),
    ),
]


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

    def zoo(name: str, on: Any, options: dict[str, Any], **sizes: Any) -> Callable[[], Any]:
        case = CASES[name](**sizes)
        given = (jax.eval_shape(case.init, jax.random.key(0)), case.batch(0))
        return lambda: autopar.plan(case.step, *given, cluster=on, cache_dir=None, show_progress=False, **options)

    four = autopar.Cluster.preset("dgx-h100").submesh(1, 4)
    small_gpt = dict(layers=2, width=128, heads=4, vocabulary=1024, length=64, batch=8)
    return {
        "two stages": lambda: autopar.plan(chain, *args, cluster=hosts, cache_dir=None, show_progress=False),
        "micro-batches in 3 MB": zoo("mlp", four, {"memory_limit_bytes": 3_000_000}, layers=2, width=512, batch=2048),
        "gpt": zoo("gpt", "p3.16xlarge", {}, **small_gpt),
        "gpt in 15 MB": zoo("gpt", four, {"memory_limit_bytes": 15_000_000}, **small_gpt),
        "tensor parallel": zoo("gpt", four, {"plan": autopar.recipes.tensor_parallel()}, **small_gpt),
        "moe": zoo("gshard_moe", "p3.16xlarge", {}),
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
        value = min(threshold.value * factor, threshold.highest)
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
    chosen = [t for t in THRESHOLDS if any(fnmatch.fnmatch(t.key, f"*{pattern}") for pattern in patterns)]
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
        kept = {row[0]: row for row in kept_rows(RESULTS)} | rows
        order = [f"`{t.key}`" for t in THRESHOLDS]
        RESULTS.write_text(
            "# Thresholds of the planner\n\n`python -m benchmarks.thresholds --keep`: the predicted time of the step "
            "that changes most, as a part of that with the value as it is, and processor time of planning all steps "
            f"({', '.join(steps)}), where a constant is halved and doubled.\n\n{description()}\n\n"
            + markdown(COLUMNS, [kept[key] for key in order if key in kept])
            + "\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
