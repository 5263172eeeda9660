"""One of several processes that train together: `python tests/in_processes.py` with a task in JSON, and the launcher.

The launcher ends what is left with SIGKILL after a time limit, or when all but stopped ones have ended: jax catches
SIGTERM.
"""

import atexit
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for s in sockets:
            s.bind(("127.0.0.1", 0))
        return [s.getsockname()[1] for s in sockets]


def launch(
    folder: Path, processes: int, devices: int, time_limit_s: float, program: str = __file__, **task: Any
) -> list[tuple[int, str, float]]:
    """(exit code, output, seconds until it ended) of each process; -9 for those that had to be ended.

    `program` is a file that takes a task as this one does.
    """
    *ports, coordinator = free_ports(processes + 1)
    running, files = [], []
    for i in range(processes):
        place = {"process": i, "processes": processes, "devices": devices, "folder": str(folder)}
        addresses = {"coordinator": f"127.0.0.1:{coordinator}", "address": f"127.0.0.1:{ports[i]}"}
        # Programs are compiled as in this process: with other flags their numbers are others in the last places.
        flags = [f for f in os.environ.get("XLA_FLAGS", "").split() if "device_count" not in f]
        environment = os.environ | {"XLA_FLAGS": " ".join(flags), "PYTHONPATH": str(ROOT)}
        files.append((folder / f"log{i}").open("w"))
        command = [sys.executable, program, json.dumps(task | place | addresses)]
        running.append(subprocess.Popen(command, env=environment, stdout=files[i], stderr=subprocess.STDOUT))
    start = time.monotonic()
    ended_s = [time_limit_s] * processes
    while time.monotonic() - start < time_limit_s and any(p.poll() is None and not is_stopped(p) for p in running):
        time.sleep(0.05)
        for i, p in enumerate(running):
            if p.poll() is not None:
                ended_s[i] = min(ended_s[i], time.monotonic() - start)
    for p, file in zip(running, files, strict=True):
        p.send_signal(signal.SIGKILL)
        p.wait()
        file.close()
    return [(p.returncode, (folder / f"log{i}").read_text(), ended_s[i]) for i, p in enumerate(running)]


def is_stopped(process: subprocess.Popen) -> bool:
    """Whether it got SIGSTOP."""
    try:
        return Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T"
    except FileNotFoundError:
        return False


def join(task: dict[str, Any]) -> None:
    """Makes this process one of the program."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", task["devices"])
    jax.config.update("jax_cross_host_transfer_socket_address", task["address"])
    jax.distributed.initialize(task["coordinator"], task["processes"], task["process"])


def at_its_end(is_victim: bool) -> None:
    print("only C++ is left", flush=True)
    if is_victim:
        os.kill(os.getpid(), signal.SIGSTOP)


def main(task: dict[str, Any]) -> None:
    """Trains a case of the zoo, and writes losses, the local parts of the state, and the plan."""
    if "stops_at_its_end" in task:  # what is registered first runs last, here after what jax and autopar do at the end
        atexit.register(at_its_end, task["process"] == task["stops_at_its_end"])
    join(task)

    import jax
    import numpy as np

    import autopar
    from autopar.runtime import heartbeat
    from benchmarks.zoo import CASES

    heartbeat.LOST_AFTER_S = task.get("lost_after_s", heartbeat.LOST_AFTER_S)
    case = CASES[task["case"]]()
    recipe = autopar.recipes.pipeline(task["stages"], task["schedule"], num_microbatches=task["microbatches"])
    if task.get("offloads"):
        # The devices of a process share a stage: sums over several processes are taken in another order.
        recipe = autopar.recipes.combine(pp=task["processes"], zero=2, num_microbatches=4, offload="optimizer")
    if task.get("two_axes"):
        recipe = autopar.recipes.combine(tp=2, zero=3)
    function = case.step
    if task.get("differs") == task["process"]:

        def function(state: Any, batch: Any) -> Any:
            new, metrics = case.step(state, batch)
            return new, jax.tree.map(lambda x: 2 * x, metrics)

    step = autopar.parallelize(function, plan=recipe, cache_dir=None)
    batch = [case.batch(i) for i in range(2)]
    if task.get("plan_first"):
        step.plan(jax.eval_shape(case.init, jax.random.key(0)), batch[0])
    state = step.init(case.init, jax.random.key(0))
    metrics, seconds = [], []
    for i in range(task["steps"]):
        if task.get("dies") == [task["process"], i]:
            os.kill(os.getpid(), signal.SIGKILL)
        if task.get("raises") == [task["process"], i]:
            raise ValueError("a fault of the user's")
        start = time.monotonic()
        state, made = step(state, step.put_batch(batch[i % 2]) if task.get("put_batch") else batch[i % 2])
        metrics.append(jax.tree.map(float, made))
        seconds.append(time.monotonic() - start)
        print(f"step {i} {metrics[-1]} {seconds[-1]:.3f} s", flush=True)
    leaves = [x for x in jax.tree.leaves(state) if not jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)]
    parts = [[(s.index, np.asarray(s.data)) for s in x.addressable_shards] for x in leaves]
    folder = Path(task["folder"])
    (folder / f"result{task['process']}").write_bytes(pickle.dumps((metrics, parts, seconds)))
    if task["process"] == 0:
        step.plan(state, batch[0]).save(folder / "plan.json")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
