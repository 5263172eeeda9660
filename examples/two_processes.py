"""Train a small network in two processes, a stage of it in each: what runs on two machines, tried on one.

    python examples/two_processes.py

starts itself twice, to show what happens; `python -m autopar.launch` does it for any script (docs/launch.md). On two
machines start it by hand on each, with the address of the first one in both:

    python examples/two_processes.py --process 0 --coordinator 10.0.0.1:9000 --address 10.0.0.1:9001
    python examples/two_processes.py --process 1 --coordinator 10.0.0.1:9000 --address 10.0.0.2:9001

Every process runs the same lines, each on rows of its own of every batch. `--address` is where the others reach this
process's arrays; CPU needs it, GPUs and TPUs have links of their own.
"""

import argparse
import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np

import autopar

WIDTH, LAYERS = 64, 4

Params = list[dict[str, jax.Array]]


def create(key: jax.Array) -> Params:
    return [{"w": jax.random.normal(k, (WIDTH, WIDTH)) / WIDTH**0.5} for k in jax.random.split(key, LAYERS)]


def loss_of(params: Params, batch: dict[str, jax.Array]) -> jax.Array:
    x = batch["x"]
    for layer in params:
        x = x + jnp.tanh(x @ layer["w"])
    return jnp.mean((x - batch["y"]) ** 2)


@autopar.parallelize(plan=autopar.recipes.pipeline(2, "1f1b", num_microbatches=4), batch="local")
def train_step(params: Params, batch: dict[str, jax.Array]) -> tuple[Params, dict[str, jax.Array]]:
    loss, gradients = jax.value_and_grad(loss_of)(params, batch)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), {"loss": loss}


def train(process: int, coordinator: str, address: str, steps: int) -> None:
    jax.config.update("jax_num_cpu_devices", 2)
    jax.config.update("jax_cross_host_transfer_socket_address", address)
    autopar.distributed.initialize(coordinator, num_processes=2, process_id=process)
    random = np.random.default_rng(process)  # as a data loader: 16 of the 32 rows of a batch in each process
    batches = [{name: random.normal(size=(16, WIDTH)).astype(np.float32) for name in "xy"} for _ in range(4)]
    params = train_step.init(create, jax.random.key(0))
    for i in range(steps):
        params, metrics = train_step(params, batches[i % 4])
        print(f"process {process}: step {i}, loss {float(metrics['loss']):.6f}", flush=True)


def start_both(steps: int) -> int:
    """The larger exit code of the two."""
    with socket.socket() as a, socket.socket() as b, socket.socket() as c:
        for s in (a, b, c):
            s.bind(("127.0.0.1", 0))
        coordinator, *addresses = [f"127.0.0.1:{s.getsockname()[1]}" for s in (a, b, c)]
    running = []
    for process, address in enumerate(addresses):
        options = ["--process", str(process), "--coordinator", coordinator, "--address", address]
        running.append(subprocess.Popen([sys.executable, __file__, *options, "--steps", str(steps)]))
    return max(p.wait() for p in running)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--process", type=int, choices=(0, 1), help="which of the two this is")
    parser.add_argument("--coordinator", help="host:port of process 0")
    parser.add_argument("--address", help="host:port at which the other process reaches this one")
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    if options.process is None:
        sys.exit(start_both(options.steps))
    train(options.process, options.coordinator, options.address, options.steps)


if __name__ == "__main__":
    main()
