"""One of four processes: a pipeline of two stages trains in two of them, and its weights go to a tensor-parallel
sampler in the two others (test_moves.py).
"""

import json
import sys
import threading
import time
from pathlib import Path

from tests.in_processes import join

WIDTH, LAYERS = 2048, 16  # 256 MiB in float32


def anonymous_bytes() -> int:
    """The memory of this process but for the pages of files, such as the code of libraries."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


class Peak:
    """The most memory that this process has had between two points, above that of the first."""

    def __enter__(self) -> "Peak":
        self.first_bytes = self.most_bytes = anonymous_bytes()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def _look(self) -> None:
        while not self._is_over.wait(0.002):
            self.most_bytes = max(self.most_bytes, anonymous_bytes())

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    @property
    def bytes(self) -> int:
        return self.most_bytes - self.first_bytes


def main(task: dict) -> None:
    join(task)
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    import autopar

    def init():
        key = jax.random.key(0)
        return {f"layer{i:02}": jax.random.normal(jax.random.fold_in(key, i), (WIDTH, WIDTH)) for i in range(LAYERS)}

    def forward(state, x):
        for name in sorted(state):
            x = jnp.tanh(x @ state[name] / WIDTH**0.5)
        return x

    def train_step(state, batch):
        loss, grads = jax.value_and_grad(lambda s: jnp.mean((forward(s, batch["x"]) - batch["y"]) ** 2))(state)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), loss

    batch = {"x": np.ones((8, WIDTH), np.float32), "y": np.zeros((8, WIDTH), np.float32)}
    recipe = autopar.recipes.pipeline(2, "1f1b", num_microbatches=4)
    step = autopar.parallelize(train_step, plan=recipe, cluster=autopar.Cluster.local(2), cache_dir=None)
    step.plan(jax.eval_shape(init), batch)
    state = step.init(init)
    state, _ = step(state, batch)

    sampler = Mesh(np.array(jax.devices()[2:]), ("model",))
    columns = NamedSharding(sampler, P(None, "model"))
    first = sorted(state)[:: LAYERS - 1]  # of each stage one, so that the programs of moves are there
    autopar.transfer({name: state[name] for name in first}, columns)
    jax.block_until_ready([s.data for x in state.values() for s in x.addressable_shards])
    shares = [sum(s.data.nbytes for x in state.values() for s in x.addressable_shards)]
    begun = time.perf_counter()
    with Peak() as peak:
        weights = autopar.transfer(state, columns)
    seconds = time.perf_counter() - begun
    shares.append(sum(s.data.nbytes for x in weights.values() for s in x.addressable_shards))
    assert all(x.sharding == columns for x in weights.values())
    source, target = shares
    # What the source takes is there before; the whole may be 1.1 of both parts.
    assert peak.bytes <= 0.1 * source + 1.1 * target, f"{peak.bytes} bytes more, of {source} and {target}"

    if jax.process_index() >= 2:  # the sampler
        jax.block_until_ready(jax.jit(forward)(weights, jax.device_put(batch["x"], NamedSharding(sampler, P()))))
    back = autopar.transfer(weights, step)
    for name, x in state.items():
        assert back[name].sharding == x.sharding
        for one, other in zip(x.addressable_shards, back[name].addressable_shards, strict=True):
            assert np.asarray(one.data).tobytes() == np.asarray(other.data).tobytes()
    state, loss = step(back, batch)
    assert np.isfinite(float(loss))
    mib = [n / 2**20 for n in (source, target, peak.bytes)]
    print("peak {2:.0f} MiB more, of parts of {0:.0f} and {1:.0f} MiB, in {3:.2f} s".format(*mib, seconds), flush=True)
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
