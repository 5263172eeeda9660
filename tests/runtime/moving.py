"""One of two processes that move arrays between meshes (test_moves.py)."""

import json
import sys

from tests.in_processes import join

SHAPES = ((128,), (64, 32), (), (128, 4, 8))
SOURCES = ((0,), (1, 0), (2, 3), (3,))


def main() -> None:
    join(json.loads(sys.argv[1]))
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from autopar.runtime.process_rows import move
    from autopar.runtime.transfers import aval_of, from_whole

    devices = np.array(sorted(jax.devices(), key=lambda d: d.id))
    for source in SOURCES:
        at = NamedSharding(Mesh(devices[list(source)], ("x",)), PartitionSpec())
        for shape in SHAPES:
            value = np.random.default_rng(0).normal(size=shape).astype(np.float32)
            array = from_whole(value, aval_of(value), at)
            for spec in (PartitionSpec(), PartitionSpec("y") if shape else PartitionSpec()):
                moved = move(array, NamedSharding(Mesh(devices, ("y",)), spec))
                for shard in moved.addressable_shards:
                    np.testing.assert_array_equal(shard.data, value[shard.index] if shape else value)
    # As a state whose plan has the devices in another order: more leaves than XLA takes programs at once.
    other = NamedSharding(Mesh(devices[[0, 2, 1, 3]].reshape(2, 2), ("y", "z")), PartitionSpec("z", "y"))
    value = np.arange(16, dtype=np.float32).reshape(4, 4)
    rows = NamedSharding(Mesh(devices, ("x",)), PartitionSpec("x"))
    for moved in [move(from_whole(value, aval_of(value), rows), other) for _ in range(80)]:
        for shard in moved.addressable_shards:
            np.testing.assert_array_equal(shard.data, value[shard.index])
    print("moved")


if __name__ == "__main__":
    main()
