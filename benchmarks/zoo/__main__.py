"""Run cases for three steps under plain `jax.jit`: `python -m benchmarks.zoo [CASE ...]`."""

import sys
import time

import jax

from benchmarks.zoo import CASES


def main(names: list[str]) -> None:
    print(f"jax {jax.__version__}")
    for name in names or CASES:
        case = CASES[name]()
        start_s = time.perf_counter()
        state = jax.jit(case.init)(jax.random.key(0))
        step = jax.jit(case.step)
        losses = []
        for seed in range(3):
            state, metrics = step(state, case.batch(seed))
            losses.append(float(metrics["loss"]))
        elapsed_s = time.perf_counter() - start_s
        print(f"{case.name:24} losses {losses[0]:.5f} {losses[1]:.5f} {losses[2]:.5f}   {elapsed_s:.1f} s")


if __name__ == "__main__":
    main(sys.argv[1:])
