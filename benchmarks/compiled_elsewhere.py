"""Our predictions beside the programs that XLA's GPU and TPU compilers make, for hardware that is not here.

    python -m benchmarks.compiled_elsewhere                             all rows; no GPU, no TPU needed
    python -m benchmarks.compiled_elsewhere gpu:h100:8 'gpt 4x2048'     rows whose names have all these parts
    python -m benchmarks.compiled_elsewhere --again                     predicts anew what is kept already

Needs `autopar[gpu]` and `autopar[tpu]`; a row without its compiler says so. What is compared: the bytes that a device
sends in a step, how many collectives send them, the memory of a device, the kernels that run attention, and XLA's own
cost analysis (arithmetic and bytes read and written) with ours.

Rows run in processes of their own and are kept at once in results/compiled_elsewhere.json, and the table beside it, so
that a run which is cut off goes on. With `--again` a program that has not changed is not compiled again: its figures
are kept by its text.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from benchmarks import row_processes
from benchmarks.machine import description

RESULTS = Path(__file__).parent / "results" / "compiled_elsewhere.json"
TIMEOUT_S = 1200.0
SENT_TOLERANCE, PEAK_TOLERANCE = 0.05, 0.10

# Target -> the cluster to plan for, as the command line names it.
TARGETS = {
    "gpu:h100:8": "dgx-h100",
    "gpu:b200:8": "dgx-b200",
    "tpu:v5e:2x4": "tpu-v5e:2x4",
    "tpu:v5p:2x2x2": "tpu-v5p:2x2x2",
    "tpu:v6e:2x4": "tpu-v6e:2x4",
}


def plain(name: str) -> tuple[Callable, tuple, dict[str, Any]]:
    from benchmarks.plain_steps import STEPS

    case = STEPS[name]()
    return case.step, case.args, {"donate_argnums": (0, 1), "batch_argnums": (2,)}


def zoo(
    name: str, attention: str = "as written", plan: Any = None, **sizes: Any
) -> tuple[Callable, tuple, dict[str, Any]]:
    import jax.numpy as jnp

    import autopar
    from benchmarks.zoo import CASES

    if "dtype" in sizes:
        sizes["dtype"] = jnp.dtype(sizes["dtype"])
    case = CASES[name](**sizes)
    return case.step, case.shapes(), {"search": autopar.Search(attention=attention), "plan": plan}


def ragged(experts: int) -> tuple[Callable, tuple, dict[str, Any]]:
    from autopar import recipes

    return zoo("moe", plan=recipes.expert_parallel(), experts=experts, **_RAGGED)


def scanned() -> tuple[Callable, tuple, dict[str, Any]]:
    """Under ZeRO-3, which computes again what `jax.checkpoint` says: a search finds memory enough to keep it."""
    from autopar import recipes

    return zoo("llama", "blockwise", plan=recipes.zero(3), **_SCANNED)


_LARGE = {"layers": 4, "width": 2048, "heads": 16, "vocabulary": 32_768, "length": 1024, "batch": 32}
_LONG = {
    "layers": 2, "width": 1024, "heads": 8, "kv_heads": 2, "feed_forward": 3584, "vocabulary": 32_768,
    "length": 8192, "batch": 8, "block": 1024, "dtype": "bfloat16",
}  # fmt: skip
# Layers in a scan, each computed again: the gradients of all are there at once, beside the weights that are read.
_SCANNED = {
    "layers": 8, "width": 2048, "heads": 16, "kv_heads": 4, "feed_forward": 8192, "vocabulary": 32_768,
    "length": 2048, "batch": 16, "block": 2048, "dtype": "bfloat16", "scan": True,
}  # fmt: skip
_RAGGED = {
    "layers": 1, "width": 1024, "heads": 8, "ragged": 1024, "vocabulary": 8192, "length": 1024, "batch": 32,
}  # fmt: skip
# Dense in 32 and in 16 bits, a mixture of experts, one whose rows are sorted under expert parallelism (one expert on a
# device; eight, whose products are made in blocks of rows), a long context, that with fused attention, a recurrence.
MODELS: dict[str, Callable[[], tuple[Callable, tuple, dict[str, Any]]]] = {
    "one-layer gpt": lambda: plain("one_layer_gpt"),
    "gpt 4x2048 bf16": lambda: zoo("gpt_bf16", **_LARGE),
    "one-layer moe": lambda: plain("one_layer_moe"),
    "ragged moe": lambda: ragged(8),
    "ragged moe of 64": lambda: ragged(64),
    "llama 8k": lambda: zoo("llama", **_LONG),
    "llama scanned": scanned,
    "llama 8k blockwise": lambda: zoo("llama", "blockwise", **_LONG | {"block": _LONG["length"]}),
    "lstm": lambda: zoo("lstm", width=1024, features=256, length=128, batch=512),
}

# A call of a kernel of attention, of jax's or cuDNN's. Where attention is as written, XLA's TPU compiler makes a kernel
# of a softmax and the product behind it by itself, and calls it so.
_KERNEL = re.compile(r'^ *(?:ROOT )?%(?!online-softmax).*custom_call_target="(?:tpu_custom_call|__cudnn\$fmha)', re.M)

COLUMNS = (
    "target", "model", "mesh", "sent, MB: predicted", "compiled", "ratio", "collectives: predicted -> compiled",
    "peak, MB: predicted", "compiled", "ratio", "kernels of attention: predicted -> compiled", "GFLOP: ours", "XLA's",
    "GB read and written: ours", "XLA's", "version of costs",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compiled:
    """What a compiler made of a program for one device. `cost`: its own analysis, where loops count as one turn;
    `kernels`: calls of attention's kernels.
    """

    sent_bytes: dict[str, float]
    counts: dict[str, int]
    argument_bytes: int
    peak_bytes: int
    cost: dict[str, float]
    compile_s: float
    kernels: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One model on one target; `failure` in place of all figures. `cost` is ours, of the same names as XLA's; `kernels`
    are predicted calls of attention's kernels.

    `search_version` is that of the costs by which it was predicted.
    """

    mesh: str = ""
    sent_bytes: dict[str, float] = dataclasses.field(default_factory=dict)
    counts: dict[str, float] = dataclasses.field(default_factory=dict)
    peak_bytes: int = 0
    cost: dict[str, float] = dataclasses.field(default_factory=dict)
    kernels: int = 0
    plan_s: float = 0.0
    program: str = ""
    search_version: int = 0
    compiled: dict[str, Any] = dataclasses.field(default_factory=dict)
    failure: str = ""


def compare(target: str, name: str, known: Mapping[str, Any]) -> Row:
    """Plans and compiles in this process. `known`: a row made before, whose program need not be compiled again."""
    import autopar
    from autopar.cost.cost_model import cost_model
    from autopar.errors import MissingCompilerError
    from autopar.ir.rules import RuleBook
    from autopar.plan.cache import SEARCH_VERSION
    from autopar.search.materialize import make_function
    from autopar.verification import lower_for_target

    step, args, options = MODELS[name]()
    parallel = autopar.parallelize(step, cluster=autopar.Cluster.parse(TARGETS[target]), cache_dir=None, **options)
    begun = time.perf_counter()
    plan = parallel.plan(*args)
    plan_s = time.perf_counter() - begun
    try:
        whole = lower_for_target(parallel, target, *args)
    except MissingCompilerError as error:
        return Row(failure=error.hint.split(",")[0])
    compilers = ", ".join(f"{name} {version}" for name, version in versions())
    program = hashlib.sha256(f"{target} {compilers} {whole.lowered.as_text()}".encode()).hexdigest()[:16]
    compiled = known["compiled"] if known.get("program") == program else dataclasses.asdict(compiled_by_xla(whole))
    made = make_function(whole.traced, whole.plan, whole.mesh, RuleBook())
    model = cost_model(whole.plan.cluster, whole.plan.mesh)
    sent = plan.predicted.by_kind()
    return Row(
        mesh="x".join(map(str, plan.mesh.axis_sizes)),
        sent_bytes={kind: sent_bytes for kind, (_, sent_bytes) in sent.items()},
        counts={kind: count for kind, (count, _) in sent.items()},
        peak_bytes=max(plan.predicted.peak_bytes),
        cost=own_cost(made, model),
        kernels=own_kernels(made, model),
        plan_s=plan_s,
        program=program,
        search_version=SEARCH_VERSION,
        compiled=compiled,
    )


def compiled_by_xla(whole: Any) -> Compiled:
    from autopar.common import jax_compat
    from autopar.cost.peak_memory import allocated_bytes
    from autopar.execute import collectives

    begun = time.perf_counter()
    compiled = whole.compile()
    compile_s = time.perf_counter() - begun
    text = compiled.as_text()
    traffic = collectives.traffic(collectives.collectives(text))
    # The GPU compiler gives no analysis for cards that are not there.
    executable = getattr(compiled, "executable", compiled)  # of a step of ours, or of `jax.jit`
    cost = executable.cost_analysis() or jax_compat.shared_cost_analysis(executable)
    return Compiled(
        sent_bytes={kind.value: sent for kind, sent in traffic.bytes.items()},
        counts={kind.value: count for kind, count in traffic.count.items()},
        argument_bytes=executable.memory_analysis().argument_size_in_bytes,
        peak_bytes=allocated_bytes(executable),
        cost={name: float(cost[name]) for name in ("flops", "bytes accessed") if name in cost},
        compile_s=compile_s,
        kernels=len(_KERNEL.findall(text)),
    )


def own_cost(made: Any, model: Any) -> dict[str, float]:
    """Arithmetic of one device, and what its kernels read and write, counted as XLA's cost analysis counts: the body of
    a loop once.
    """
    from autopar.cost import peak_memory
    from autopar.cost.memory_program import memory_program
    from autopar.cost.roofline import flops_of

    flops = 0.0
    for compute in computed(made.lowered):
        flops += flops_of(compute.op) / (compute.strategy.split if compute.strategy is not None else 1)
    program, _ = memory_program(made.graph, made.lowered, model)
    return {"flops": flops, "bytes accessed": float(peak_memory.accessed_bytes(program, model.compiler))}


def own_kernels(made: Any, model: Any) -> int:
    """Calls of kernels by which passes of attention run; on TPU a backward pass is two, of keys' and of queries'
    gradients.
    """
    from autopar.cost.roofline import kernel_under
    from autopar.ops.attention import ring
    from autopar.ops.attention.kernels import Kernel

    calls = 0
    for compute in computed(made.lowered):
        if compute.op.primitive in ring.PRIMITIVES:
            devices = 1 if compute.strategy is None else model.links.mesh.size(compute.strategy.ring)
            kernel = kernel_under(compute.op, model.device, devices)
            backward = 2 if kernel is Kernel.TPU_SPLASH else 1
            is_forward = compute.op.eqn.params["gradients"] is None
            calls += 0 if kernel is Kernel.BLOCKS else 1 if is_forward else backward
    return calls


def computed(lowered: Any) -> Iterator[Any]:
    """The operations of a block, and of its loops' blocks."""
    from autopar.lowering.instructions import Compute, Loop

    for instruction in lowered.instructions:
        if isinstance(instruction, Compute):
            yield instruction
        elif isinstance(instruction, Loop):
            for block in instruction.blocks:
                yield from computed(block)


def versions() -> list[tuple[str, str]]:
    """The compilers' packages, those that are installed."""
    found = []
    for name in ("jax-cuda13-pjrt", "libtpu"):
        try:
            found.append((name, metadata.version(name)))
        except metadata.PackageNotFoundError:
            found.append((name, "not installed"))
    return found


def cells(name: str, rows: row_processes.Rows) -> list[str]:
    row, named = Row(**rows[name]), name.split(" | ")
    if row.failure:
        return [*named, row.failure]
    found = Compiled(**row.compiled)
    kinds = dict.fromkeys((*row.counts, *found.counts))
    return [
        *named, row.mesh,
        *_pair(sum(row.sent_bytes.values()), sum(found.sent_bytes.values()), SENT_TOLERANCE),
        ", ".join(f"{kind} {row.counts.get(kind, 0):g} -> {found.counts.get(kind, 0):g}" for kind in kinds),
        *_pair(row.peak_bytes, found.peak_bytes, PEAK_TOLERANCE),
        f"{row.kernels} -> {found.kernels}",
        *(f"{n / 1e9:,.1f}" for name in ("flops", "bytes accessed") for n in (row.cost[name], found.cost.get(name, 0))),
        str(row.search_version),
    ]  # fmt: skip


def _pair(predicted: float, compiled: float, tolerance: float) -> tuple[str, str, str]:
    ratio = predicted / compiled if compiled else 1.0 if not predicted else float("inf")
    missed = "" if abs(ratio - 1) <= tolerance else " (missed)"
    return f"{predicted / 1e6:,.1f}", f"{compiled / 1e6:,.1f}", f"{ratio:.3f}{missed}"


_NOTES = f"""Sent: by one device in a step, missed where it is more than {SENT_TOLERANCE:.0%} off. Peak:
arguments, results and temporaries of one device, missed where it is more than {PEAK_TOLERANCE:.0%} off. A row's two
collectives of a kind are predicted and compiled; XLA combines several into one, which changes no byte. The GPU compiler
gives no cost analysis for cards that are not there: its figures are those of the analysis that all of XLA's backends
share, made of its program.

Kernels of attention: calls of cuDNN or of jax's splash attention; where attention is as written none is predicted.
XLA's TPU compiler makes a kernel of its own of a softmax and the product behind it, which is not counted: scores are
written all the same, for the backward pass. XLA's analyses count no arithmetic of kernels of attention.

Vector memory. XLA's TPU compiler keeps what it can there (112 MiB for values on v5e, 96 on v6e, 48 on v5p), by times
and free space. With flash attention one plan's program of the one-layer GPT took 102 MB on v5e, 159 on v6e, 196 on v5p,
that of the mixture 222, 256 and 295: the difference is what lies there. Of its logits and their gradients, 34 MB each,
v5e holds three and 17 MB beside them, v6e three and nothing else, v5p one. The prediction places values at addresses,
those first that take the least for the shortest, and leaves out what waits for long. What it is off by is at most the
vector memory, which is little beside the memory of a device.

Numbers of rows of attention (their largest score and their sum) wait for the backward pass as the TPU's kernel writes
them, once for each of 128 lanes, 8 MB for each of the two in the one-layer models: XLA takes one of each where they are
read, also behind an optimization barrier.

Memory of TPU programs. libtpu's `temp_size_in_bytes` counts what it takes for space between buffers twice. It says 420
MB of a program of three scanned layers that are computed again, which it compiles for 334 MiB of memory and refuses for
331. Rows have the block that is allocated, by jax 0.12's `total_allocation_bytes`; before jax 0.12 it is read from
`peak_memory_in_bytes`, which leaves out the space between buffers (0 to 3 % of gigabytes, 14 % of 142 MB).

Logits of a loss are held in 16 bits and once more in 32, as the gather of the labels' logits reads them: 805 MB of the
large GPT's program. They wait until the gradient of the head is made, which XLA's scheduler puts off.

None of these plans runs products in pieces (collective matmul). A recipe that asks for them on TPU takes more memory
than is predicted: a plan in pieces that fits by little may not fit.

Bytes. On v5p, XLA fills the parts of two reductions up to whole tiles and sends what is too much on with a permute: 3%
of the bytes of the one-layer GPT. Of some reduce-scatters along the dimension that lies last in memory XLA makes
all-reduces, which send twice as much: 4% of the bytes of Llama 8k for v5e and v6e, 1% of those of Llama 8k with
blockwise attention; and of the reduce-scatter of the gradient of queries', keys' and values' weights in the one-layer
models (11 MB)."""


def exchanges() -> str:
    """Of the rows with exchanges of rows or of dimensions, the ratios of their predicted to their compiled bytes."""
    ratios = []
    for row in row_processes.load(RESULTS).values():
        both = row.get("sent_bytes", {}), row.get("compiled", {}).get("sent_bytes", {})
        predicted, compiled = (sum(of[kind] for kind in of if kind.endswith("all-to-all")) for of in both)
        if predicted or compiled:
            ratios.append(predicted / max(compiled, 1))
    if not ratios:
        return ""
    found = (
        "equal to the compiled bytes"
        if {f"{ratio:.3f}" for ratio in ratios} == {"1.000"}
        else (f"{min(ratios):.3f} to {max(ratios):.3f} of the compiled bytes")
    )
    return f"All-to-alls alone, dense and ragged ones: {len(ratios)} rows, predicted bytes {found}."


def page() -> row_processes.Page:
    compilers = " Compilers: " + ", ".join(f"{name} {version}" for name, version in versions()) + "."
    head = (
        "# Predictions beside programs compiled for hardware that is not here\n\n"
        f"`python -m benchmarks.compiled_elsewhere`. {_NOTES}\n\n{exchanges()}\n\n{description()}{compilers}"
    )
    order = [f"{target} | {model}" for target in TARGETS for model in MODELS]
    return row_processes.Page(path=RESULTS, head=head, columns=COLUMNS, order=order, cells=cells)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("only", nargs="*", help="parts of names, of targets and models")
    parser.add_argument("--again", action="store_true", help="also rows that are kept already")
    parser.add_argument("--child", nargs=2, metavar=("TARGET", "MODEL"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        known = row_processes.load(RESULTS).get(" | ".join(arguments.child), {})
        print(json.dumps(dataclasses.asdict(compare(*arguments.child, known))))
        return 0

    def made(name: str) -> dict[str, Any]:
        command = ["--child", *name.split(" | ")]
        return row_processes.in_fresh_process("benchmarks.compiled_elsewhere", command, TIMEOUT_S)

    kept = page()
    chosen = [name for name in kept.order if all(part in name for part in arguments.only)]
    rows = kept.make(chosen, made, arguments.again)
    return int(any(row.get("failure") for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
