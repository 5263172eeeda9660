"""What XLA makes of products that send while they run (`collective_matmul`), for hardware that is not here.

    python -m benchmarks.collective_matmul                  a GPT of two layers on v5e and H100; minutes
    python -m benchmarks.collective_matmul tpu:v5p:2x2x2    other targets of `benchmarks.compiled_elsewhere`
    python -m benchmarks.collective_matmul --keep           also keeps the table in results/collective_matmul.md

Needs `autopar[gpu]` and `autopar[tpu]`. Each target has a row without and one with it: the step as predicted, bytes
that a device sends and its peak memory as predicted and as compiled, the asynchronous permutes of the program, and how
many of them have a product between their start and their end.
"""

import argparse
import os
import re
import sys
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

import autopar
from autopar import recipes
from autopar.verification import compile_for_target, peak_bytes, traffic_of
from benchmarks.compiled_elsewhere import TARGETS
from benchmarks.machine import description, markdown
from benchmarks.zoo import CASES

RESULTS = Path(__file__).parent / "results" / "collective_matmul.md"
SIZES = {"layers": 2, "width": 4096, "heads": 32, "vocabulary": 32_768, "length": 2048, "batch": 8}
COLUMNS = (
    "target", "collective matmul", "step", "sent, MB", "compiled", "peak, GB", "compiled", "permutes",
    "beside a product",
)  # fmt: skip
_STARTS = re.compile(r"%?([\w.\-]+) = .*? collective-permute-start\(")
_ENDS = re.compile(r"collective-permute-done\(.*?%?([\w.\-]+)\)")
_PRODUCT = re.compile(r"= .*? (convolution|dot|custom-call|fusion)\(.*(dot_general|gemm|convolution)")


def row(target: str, collective_matmul: bool) -> list[str]:
    """The step under Megatron's sequence parallelism, compiled for a target."""
    case = CASES["gpt_bf16"](**SIZES)
    state = jax.eval_shape(case.init, jax.random.key(0))
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), case.batch(0))
    recipe = recipes.sequence_parallel("megatron", collective_matmul=collective_matmul)
    step = autopar.parallelize(
        case.step, plan=recipe, cluster=TARGETS[target], cache_dir=None, show_progress=False
    )  # fmt: skip
    predicted = step.plan(state, batch).predicted
    compiled = compile_for_target(step, target, state, batch)
    permutes, beside = overlapped(compiled.as_text())
    return [
        target,
        "with" if collective_matmul else "without",
        f"{1e3 * predicted.step_time_s:.1f} ms",
        f"{sum(c.sent_bytes for c in predicted.collectives) / 1e6:,.1f}",
        f"{traffic_of(compiled).total_bytes / 1e6:,.1f}",
        f"{max(predicted.peak_bytes) / 1e9:.2f}",
        f"{peak_bytes(compiled) / 1e9:.2f}",
        str(permutes),
        str(beside),
    ]


def overlapped(text: str) -> tuple[int, int]:
    """(asynchronous permutes of a scheduled program, those with a product between start and end)."""
    started: dict[str, bool] = {}
    beside = 0
    for line in text.splitlines():
        if (end := _ENDS.search(line)) is not None:
            beside += started.get(end[1], False)
        elif (start := _STARTS.search(line)) is not None:
            started[start[1]] = False
        elif _PRODUCT.search(line):
            started = dict.fromkeys(started, True)
    return len(started), beside


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", default=["tpu:v5e:2x4", "gpu:h100:8"], help="of compiled_elsewhere")
    parser.add_argument("--keep", action="store_true", help=f"keep the table in results/{RESULTS.name}")
    args = parser.parse_args()
    rows = [row(target, with_it) for target in args.targets for with_it in (False, True)]
    table = markdown(COLUMNS, rows)
    print(table)
    if args.keep:
        text = "`python -m benchmarks.collective_matmul`: a GPT of 2 layers, 4,096 wide, bfloat16, 8 x 2,048 tokens."
        RESULTS.write_text(f"# Products that send while they run\n\n{text}\n\n{description()}\n\n{table}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
