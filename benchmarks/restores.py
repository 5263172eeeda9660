"""States saved under one plan and restored under another, on other numbers of devices: bits, time and memory.

    python -m benchmarks.restores           # about 15 minutes on two cores
    python -m benchmarks.restores --keep    # and write benchmarks/results/restores.md

For each number of CPU devices one process saves a state under every plan; then one process for each restores all of
them under every plan, and as plain JAX does on one device, and compares bits. Memory is that of fresh processes: the
peak of resident memory above what there was before, by the bytes of the arrays that the process gets.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.machine import description, markdown

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "restores.md"

DEVICES = (1, 2, 4, 8)
KINDS = ("one program", "ZeRO-3", "2 stages", "4 stages, interleaved", "offload")
ON_ONE_DEVICE = ("one program", "offload")
LAYERS, BATCH = 8, 16
SMALL, LARGE = 32, 1536  # width of the layers
TIME_LIMIT_S = 1200
PLAIN = "plain JAX"
# (devices that saved, its plan) of the large state.
LARGE_SAVED = ((1, "one program"), (8, "ZeRO-3"))
LIMIT = 1.3  # of the share


def kinds_on(devices: int) -> tuple[str, ...]:
    return ON_ONE_DEVICE if devices == 1 else KINDS


def recipe(kind: str) -> Any:
    from autopar import recipes

    match kind:
        case "one program":
            return recipes.data_parallel()
        case "ZeRO-3":
            return recipes.zero(3)
        case "2 stages":
            return recipes.pipeline(2, "1f1b", num_microbatches=4)
        case "4 stages, interleaved":
            return recipes.pipeline(2, "interleaved", num_microbatches=4, chunks=2)
    return recipes.combine(zero=2, offload="optimizer")


class Training:
    """A training step of dense layers with Adam, and a state whose every leaf is random."""

    def __init__(self, width: int) -> None:
        import jax
        import jax.numpy as jnp
        import optax

        optimizer = optax.adam(1e-3)

        def init() -> Any:
            params = {f"layer{i}": {"w": jnp.zeros((width, width)), "b": jnp.zeros(width)} for i in range(LAYERS)}
            return {"params": params, "moments": optimizer.init(params), "step": jnp.int32(0)}

        def loss(params: Any, batch: Any) -> Any:
            x = batch["x"]
            for i in range(LAYERS):
                x = jnp.tanh(x @ params[f"layer{i}"]["w"] + params[f"layer{i}"]["b"])
            return jnp.mean((x - batch["y"]) ** 2)

        def step(state: Any, batch: Any) -> Any:
            value, gradients = jax.value_and_grad(loss)(state["params"], batch)
            updates, moments = optimizer.update(gradients, state["moments"])
            params = optax.apply_updates(state["params"], updates)
            return {"params": params, "moments": moments, "step": state["step"] + 1}, {"loss": value}

        def create() -> Any:
            leaves, tree = jax.tree.flatten(init())
            key = jax.random.key(0)
            return jax.tree.unflatten(tree, [_random(jax.random.fold_in(key, i), x) for i, x in enumerate(leaves)])

        self.step, self.create, self.shapes = step, create, jax.eval_shape(init)
        row = jax.ShapeDtypeStruct((BATCH, width), jnp.float32)
        self.batch = {"x": row, "y": row}

    def planned(self, kind: str) -> Any:
        """The step with a plan of a kind."""
        import autopar

        step = autopar.parallelize(self.step, plan=recipe(kind), cache_dir=None, show_progress=False)
        step.plan(self.shapes, self.batch)
        return step


def _random(key: Any, like: Any) -> Any:
    """Numbers of 24 random bits, which every layout and compiler makes alike."""
    import jax
    import jax.numpy as jnp

    bits = jax.random.bits(key, like.shape, "uint32") >> 8
    return (bits * jnp.float32(2**-24) if like.dtype == jnp.float32 else bits).astype(like.dtype)


# In processes of their own


def save_all(folder: Path, width: int, kinds: list[str], devices: int) -> dict[str, Any]:
    """Saves a state under each plan."""
    from autopar.checkpoint import Checkpointer

    training = Training(width)
    for kind in kinds:
        step = training.planned(kind)
        with Checkpointer(folder / f"{devices} {kind}", on_preemption=False) as checkpoints:
            checkpoints.save(1, step.init(training.create), plan=step)
    return {}


def restore_all(folder: Path, devices: int) -> dict[str, Any]:
    """Restores every small state under every plan of this number of devices: how many were equal, and seconds."""
    import jax
    import numpy as np

    from autopar.checkpoint import Checkpointer

    training = Training(SMALL)
    expected = [np.asarray(x).tobytes() for x in jax.tree.leaves(jax.jit(training.create)())]
    targets = {kind: training.planned(kind) for kind in kinds_on(devices)} | {PLAIN: None}
    rows = []
    for kind, step in targets.items():
        equal, placed, seconds = 0, 0, []
        saved = sorted(folder.iterdir())
        for path in saved:
            start = time.perf_counter()
            state = Checkpointer(path, on_preemption=False).restore(step=step, like=training.shapes)
            leaves = jax.block_until_ready(jax.tree.leaves(state))
            seconds.append(time.perf_counter() - start)
            equal += [np.asarray(x).tobytes() for x in leaves] == expected
            wanted = [x.sharding for x in leaves] if step is None else step.state_shardings(leaves)
            placed += all(x.sharding.is_equivalent_to(s, x.ndim) for x, s in zip(leaves, wanted, strict=True))
        row = {"kind": kind, "saved": len(saved), "equal": equal, "placed": placed}
        rows.append(row | {"median_s": sorted(seconds)[len(seconds) // 2]})
    return {"rows": rows}


def restore_large(small: Path, large: Path, kind: str) -> dict[str, Any]:
    """The peak of memory while the large state is restored, beside the bytes of this process's arrays."""
    import jax

    from autopar.checkpoint import Checkpointer

    step, warm = (None, None) if kind == PLAIN else (Training(LARGE).planned(kind), Training(SMALL).planned(kind))
    Checkpointer(small, on_preemption=False).restore(step=warm, like=Training(SMALL).shapes)
    gc.collect()
    before = memory_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    start = time.perf_counter()
    state = Checkpointer(large, on_preemption=False).restore(step=step, like=Training(LARGE).shapes)
    leaves = jax.block_until_ready(jax.tree.leaves(state))
    seconds = time.perf_counter() - start
    peak = memory_bytes("VmHWM") - before
    share = sum(shard.data.nbytes for x in leaves for shard in x.addressable_shards)
    return {"peak_bytes": peak, "share_bytes": share, "whole_bytes": sum(x.nbytes for x in leaves), "seconds": seconds}


def memory_bytes(name: str) -> int:
    (line,) = (x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


# Around them


def in_processes(task: dict[str, Any], devices: int, processes: int = 1) -> list[dict[str, Any]]:
    """What each process of a program says last. Raises: RuntimeError for one that fails."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(processes + 1)]
        for s in sockets:
            s.bind(("127.0.0.1", 0))
        *ports, coordinator = [s.getsockname()[1] for s in sockets]
    # What is freed goes back at once, so that resident memory is what is in use.
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "2"}
    running = []
    for i in range(processes):
        place = {"devices": devices, "processes": processes, "process": i, "coordinator": coordinator, "port": ports[i]}
        command = [sys.executable, "-m", "benchmarks.restores", "--task", json.dumps(task | place)]
        running.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True))
    out = []
    for process in running:
        try:
            text, _ = process.communicate(timeout=TIME_LIMIT_S)
        finally:
            process.kill()
        if process.returncode:
            raise RuntimeError(f"{task} ended with status {process.returncode}")
        out.append(json.loads(text.splitlines()[-1]))
    return out


def run_task(task: dict[str, Any]) -> dict[str, Any]:
    import jax

    jax.config.update("jax_num_cpu_devices", task["devices"])
    if task["processes"] > 1:
        jax.config.update("jax_cross_host_transfer_socket_address", f"127.0.0.1:{task['port']}")
        jax.distributed.initialize(f"127.0.0.1:{task['coordinator']}", task["processes"], task["process"])
    folder = Path(task["folder"])
    match task["what"]:
        case "save":
            return save_all(folder, task["width"], task["kinds"], task["devices"])
        case "restore":
            return restore_all(folder, task["devices"])
    return restore_large(Path(task["small"]), folder, task["kind"])


def matrix(folder: Path) -> list[list[str]]:
    for devices in DEVICES:
        task = {"what": "save", "folder": str(folder), "width": SMALL, "kinds": kinds_on(devices)}
        in_processes(task, devices)
    rows = []
    for devices in DEVICES:
        (found,) = in_processes({"what": "restore", "folder": str(folder)}, devices)
        for row in found["rows"]:
            name = row["kind"] if row["kind"] != PLAIN else f"{PLAIN}, the first device"
            counts = [f"{row['equal']} of {row['saved']}", f"{row['placed']} of {row['saved']}"]
            rows.append([str(devices), name, *counts, f"{1e3 * row['median_s']:.0f} ms"])
            print("  ".join(rows[-1]), flush=True)
    return rows


def memory(small: Path, folder: Path) -> list[list[str]]:
    for devices, kind in LARGE_SAVED:
        in_processes({"what": "save", "folder": str(folder), "width": LARGE, "kinds": [kind]}, devices)
    targets = [(1, 1, PLAIN), *((1, 8, kind) for kind in KINDS), *((2, 2, kind) for kind in KINDS)]
    rows = []
    for saved_on, saved_as in LARGE_SAVED:
        for processes, devices, kind in targets:
            task = {"what": "memory", "folder": str(folder / f"{saved_on} {saved_as}"), "kind": kind}
            task["small"] = str(small / "1 one program")
            for i, got in enumerate(in_processes(task, devices, processes)):
                ratio = got["peak_bytes"] / got["share_bytes"]
                where = f"{devices} devices" if processes == 1 else f"process {i} of 2, 2 devices each"
                sizes = [f"{got[n] / 1e6:.0f} MB" for n in ("whole_bytes", "share_bytes", "peak_bytes")]
                verdict = "yes" if ratio <= LIMIT else "NO"
                seconds = f"{got['seconds']:.1f} s"
                rows.append([f"{saved_as}, {saved_on}", where, kind, *sizes, f"{ratio:.2f}", verdict, seconds])
                print("  ".join(rows[-1]), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", action="store_true", help=f"write {RESULTS.relative_to(ROOT)}")
    parser.add_argument("--task", help=argparse.SUPPRESS)
    parsed = parser.parse_args()
    if parsed.task:
        print(json.dumps(run_task(json.loads(parsed.task))))
        return
    with tempfile.TemporaryDirectory() as name:
        small, large = Path(name) / "small", Path(name) / "large"
        bits, bytes_ = matrix(small), memory(small, large)
    if parsed.keep:
        RESULTS.write_text(page(bits, bytes_))


def page(bits: list[list[str]], bytes_: list[list[str]]) -> str:
    by_bits = markdown(("devices", "restored as", "equal bit for bit", "in the plan's layout", "median"), bits)
    columns = ("saved as, devices", "restored in", "restored as", "state", "share", "peak", "peak / share", "", "time")
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("orbax-checkpoint", "tensorstore"))
    return f"""# Restores

`python -m benchmarks.restores --keep`. {description()} {versions}.

States saved on {", ".join(map(str, DEVICES))} CPU devices under {"; ".join(KINDS)} (one device:
{" and ".join(ON_ONE_DEVICE)}), each restored under each plan of each number of devices, and as plain JAX:

{by_bits}

Peak of resident memory while a large state is restored, above what the process had before. The share is the bytes of
the arrays that the process gets: CPU devices are in its memory, whole copies count once for each. The last but one
column says whether the peak is within {LIMIT} of it.

{markdown(columns, bytes_)}
"""


if __name__ == "__main__":
    main()
