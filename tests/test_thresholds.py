"""Every number that decides between plans has its row in the table of thresholds, with its present value."""

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

from benchmarks.machine import kept_rows
from benchmarks.thresholds import RESULTS, thresholds

ROOT = Path(__file__).parent.parent
PLANNER = ("search", "cost", "solver")
GRAPH = ("ir", "lowering", "ops", "passes", "plan/options.py")

# Numbers of these packages that are no thresholds, and why.
NONE = {
    "search.memory_breakdown.LARGEST": "rows that are shown",
    "search.memory_breakdown.COURSE_PARTS": "points that are shown",
    "search.memory_errors._NAMED": "rows that are shown",
    "search.planner.PRICED_ALONE": "rows that are shown",
    "search.intra_op.saved_values.SHOWN": "rows that are shown",
    "cost.roofline._WINOGRAD_SHARE": "arithmetic of an algorithm",
    "cost.stream_simulator.WORTH_ANOTHER_ORDER": "processor time of planning: from where on another order is simulated",
    "search.intra_op.saved_values.SHARES": "amounts of memory that are tried: what lies between them is as good",
    "search.inter_op.one_stage.TRIED_MIXES": "steps between those that are too large and those that fit",
    "search.inter_op.stage_costs.CHOICES": "choices that are tried: layers mix what lies between",
    "search.notes.LEAST_SPARED": "what a note is worth: changes no plan",
    "search.notes.MOST_FILLED": "the error of what a note says: changes no plan",
    "search.notes.NAMED": "rows that are shown",
    "search.intra_op.mesh_searches.MOST_AXES": "of the recipes that are tried",
    "ir.constraints.LARGEST_NAMED": "rows that are shown",
    "ir.pins.CLOSEST_SHOWN": "rows that are shown",
    "ir.resharding.SIZES_BYTES": "sizes for which paths are found: each value takes the cheapest",
    "ops.kernels.grouped._TILE": "of kernels of other libraries: blocks of any number of these are tried",
    "ops.kernels.grouped._SMALL_KERNELS": "of the program that runs",
    "ops.kernels.row_exchange._ROOM": "of the program that runs: rows beyond it take another turn",
    "ops.attention.reader.RELATIVE_ERROR": "rounding",
    "ops.attention.form.HIDDEN": "of 32-bit numbers",
    "ops.attention.form._ROUNDING": "rounding",
    "ops.attention.kernels._BLOCK": "of kernels of other libraries",
    "ops.attention.kernels.LANES": "of a TPU's registers",
    "ops.attention.kernels.SUBLANES": "of a TPU's registers",
    "ops.attention.kernels._CUDNN_WIDTH": "what cuDNN takes",
    "ops.attention.kernels._CUDNN_WIDTH_MULTIPLE": "what cuDNN takes",
    "ops.attention.work.KEYS_AND_VALUES": "a number of arrays",
    "ops.attention.score_kernels._LEAST_OF_TILES": "of a kernel of XLA's",
    "ops.attention.ring.QUERY_BLOCK": "of the program that runs: the same for every plan",
    "solver.solving.SAFETY": "rounding",
    "solver.stage_search.EQUAL": "rounding",
    "passes.example_rules.SHARED": "a mark, not a size",
    "passes.forms.TRIPS": "a mark, not a size",
    "passes.forms._MOST_POWERS": "a limit of what is followed: beyond it weights are found anew",
    "ops.attention.reader.LONGEST": "a limit of what is followed: beyond it an array stays one",
    "passes.scan_stacks.MOST_STACKS": "a limit of what is followed: further loops stay whole",
    "cost.compiler_options.HOST_COPIES": "an option of libtpu's: changes no plan",
    "cost.roofline._REAL_PRODUCTS": "of a product of complex numbers",
    "ops.kernels.grouped.WHOLE": "the only part of one",
    "ops.kernels.ragged_experts.RESULT": "a mark, not a size",
    "ops.kernels.grouped._NUM_OPERANDS": "of a ragged product",
    "ops.kernels.grouped._RANK_OF_MATRICES": "of a ragged product",
    "ops.kernels.index_functions._MOST_NUMBERS": "a limit of what is followed: beyond it an index is not known",
    "ops.kernels.index_functions._MOST_ROWS": "a limit of what is followed: beyond it an index is not known",
    "ops.kernels.ragged_regions._NO_BOUNDS": "of all numbers",
    "ops.kernels.ragged_regions._DEEPEST": "a limit of what is followed: beyond it numbers may be any",
    "cost.cost_model._CLOSED": "of a TPU's wires",
    "cost.inner_collectives._ROW_BYTES": "of a TPU's tiles",
    "ops.kernels.call._OTHER_SIZES": "sizes at which shapes are looked at: change no answer",
    "cost.roofline._PASSES_OF_EXCHANGE": "reads and writes of the program that runs",
    "lowering.host_copies.BUCKETS": "of the program that runs: the same for every plan",
    "lowering.host_copies.AHEAD": "of the program that runs: the same for every plan",
    "lowering.emit._TILE": "of a TPU's tiles",
    "cost.stream_simulator.ALL_BYTES": "more than any program has",
    "cost.xla_program.BROADCAST_RATIO": "more than sizes of types differ by",
    "cost.xla_program.SCALAR_BYTES": "of the largest scalar",
    "search.inter_op.staged.HAND_OUT_S": "a time that was measured: a fact of the processor",
    "search.inter_op.staged.SLICE_HOST_DEVICES": "of a host of a TPU slice",
    "cost.xla_fusion.SEVERAL": "a mark, not a size",
    "ir.layout._PARTIAL": "a mark, not a size",
    "passes.fold_layers._NOWHERE": "a mark, not a size",
    "passes.stack_updates._LONGEST_SCALE": "a limit of what is followed: beyond it a norm is made before the stack",
    "search.intra_op.mesh_searches.ZERO_STAGES": "names of stages",
    "plan.options.AS_FAST": "how a difference is told: no choice depends on it",
    "plan.options.QUICK_GAIN": "what a quick search is: only where it is asked for",
    "ir.rules._BATCH": "how many rules are asked for at once: changes no answer",
    "solver.stage_search.FIRST_LABELS": "room at first: grows as needed",
    "solver.presolve.PART": "the same sums to the bit, in parts that a cache holds",
}


def constants(package: str) -> Iterator[str]:
    """Module and name of each number, or tuple of numbers, that a module of a package, or a file, names."""
    path = ROOT / "autopar" / package
    for file in [path] if path.suffix else sorted(path.rglob("*.py")):
        module = ".".join(file.relative_to(ROOT / "autopar").with_suffix("").parts)
        for statement in ast.parse(file.read_text()).body:
            if not isinstance(statement, ast.Assign | ast.AnnAssign) or statement.value is None:
                continue
            for target in statement.targets if isinstance(statement, ast.Assign) else [statement.target]:
                for name in target.elts if isinstance(target, ast.Tuple) else [target]:
                    assert isinstance(name, ast.Name)
                    if is_number(getattr(importlib.import_module(f"autopar.{module}"), name.id)):
                        yield f"{module}.{name.id}"


def is_number(value: object) -> bool:
    if isinstance(value, tuple):
        return bool(value) and all(is_number(part) for part in value)
    return isinstance(value, int | float) and not isinstance(value, bool)


def test_every_number_of_the_planner_has_a_row_or_a_reason_to_have_none():
    found = {key for package in PLANNER + GRAPH for key in constants(package)}
    assert found == {t.key for t in thresholds()} | set(NONE)


def test_the_table_has_the_present_values():
    kept = {row[0].strip("`"): row[1] for row in kept_rows(RESULTS)}
    assert kept == {t.key: f"{t.value:g}" for t in thresholds()}
