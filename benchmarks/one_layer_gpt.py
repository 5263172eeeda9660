"""One-layer GPT on a TPU v5p 2x2x2 slice that need not be here: what our plan sends, its peak memory, time to decide.

    python -m benchmarks.one_layer_gpt [--topology 2x2x2] [--links equal|torus] [--limit-mb 292]

Vocabulary 8192, width 1024, 16 heads, sequence 512, batch 16, float32, tied embedding, Adam. Needs the extra
`autopar[tpu]`. For comparison, measured in the same way: the best hand-written plan (data 4 x tensor 2) sends 142 MB a
device with a peak of 292 MB; XLA's auto-sharding pass, deleted in 2026, sent 254 MB and took 191 s to decide.
"""

from __future__ import annotations

import argparse
import os
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import autopar
from autopar.verification import compile_for_target
from benchmarks.plain_steps import one_layer_gpt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topology", default="2x2x2")
    parser.add_argument(
        "--links",
        choices=("equal", "torus"),
        default="equal",
        help="equal: every mesh axis has the same link, so that plans rank by what they send; torus: by wires",
    )
    parser.add_argument("--limit-mb", type=float, default=292.0, help="memory of one device that the plan may use")
    parser.add_argument("--save", help="where to keep the compiled program's text")
    args = parser.parse_args()
    cluster = autopar.Cluster.preset("tpu-v5p", topology=args.topology)
    if args.links == "equal":
        cluster = autopar.Cluster.flat(cluster.num_devices, device=cluster.device, links=(cluster.inside_host,))
    case = one_layer_gpt()
    step = autopar.parallelize(
        case.step,
        cluster=cluster,
        donate_argnums=(0, 1),
        batch_argnums=(2,),
        memory_limit_bytes=int(args.limit_mb * 1e6),
        cache_dir=None,
    )
    begun = time.perf_counter()
    plan = step.plan(*case.args)
    decided_s = time.perf_counter() - begun
    print(plan)
    print(f"decided in {decided_s:.1f} s, tracing included: {step.last_progress.spent_s}")
    if args.save:
        compiled = compile_for_target(step, f"tpu:v5p:{args.topology}", *case.args)
        with open(args.save, "w") as file:
            file.write(compiled.as_text())
    print(autopar.verify(step, *case.args, compile_for=f"tpu:v5p:{args.topology}"))


if __name__ == "__main__":
    main()
