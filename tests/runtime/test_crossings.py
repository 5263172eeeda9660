"""Values cross between meshes of two processes, from any layout to any other. Each process runs this file too."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TIME_LIMIT_S = 240
PROCESSES = 2
DEVICES = 4  # of each process
SHAPES = ((8, 4), (2, 3), ())
# (mesh, its devices) of the source and of the target; devices 0 to 3 are of the first process.
MESHES = [
    (((2,), (0, 1)), ((4,), (4, 5, 6, 7))),
    (((4,), (0, 1, 2, 3)), ((2,), (4, 5))),
    (((4,), (0, 1, 4, 5)), ((2,), (2, 6))),
    (((2,), (0, 4)), ((2, 2), (2, 3, 6, 7))),
    (((4,), (0, 1, 2, 3)), ((2, 2), (4, 5, 6, 7))),
]


@pytest.mark.slow
def test_numbers_stay_between_unequal_meshes_of_two_processes():
    ports = []
    for _ in range(PROCESSES + 1):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            ports.append(s.getsockname()[1])
    # Programs are compiled as in this process: with other flags their numbers are others in the last places.
    flags = [f for f in os.environ.get("XLA_FLAGS", "").split() if "device_count" not in f]
    environment = os.environ | {"XLA_FLAGS": " ".join(flags), "PYTHONPATH": str(ROOT)}
    running = [
        subprocess.Popen(
            [sys.executable, __file__, json.dumps({"process": i, "ports": ports})],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for i in range(PROCESSES)
    ]
    try:
        outputs = [p.communicate(timeout=TIME_LIMIT_S)[0] for p in running]
    finally:
        for p in running:  # jax catches SIGTERM
            p.send_signal(signal.SIGKILL)
            p.wait()
    assert [p.returncode for p in running] == [0] * PROCESSES, "\n".join(outputs)


def main(process, ports):
    import jax
    import numpy as np
    from jax.sharding import AxisType, Mesh

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    jax.config.update("jax_cross_host_transfer_socket_address", f"127.0.0.1:{ports[process]}")
    jax.distributed.initialize(f"127.0.0.1:{ports[-1]}", PROCESSES, process)

    from autopar.ir.jax_sharding import named_sharding
    from autopar.ir.layout import LogicalMesh, replicated
    from autopar.runtime.cross_mesh import End, wire_layouts
    from autopar.runtime.transfers import aval_of, crosser, crossing, from_whole, is_here

    def end(layout, logical, devices):
        grid = np.array([jax.devices()[i] for i in devices]).reshape(logical.axis_sizes)
        mesh = Mesh(grid, logical.axis_names, axis_types=(AxisType.Auto,) * grid.ndim)
        return End(layout=layout, logical=logical, mesh=mesh, sharding=named_sharding(layout, mesh))

    for shape in SHAPES:
        array = np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)
        for (sizes, devices), (other_sizes, other_devices) in MESHES:
            meshes = LogicalMesh(axis_sizes=sizes), LogicalMesh(axis_sizes=other_sizes)
            whole = replicated(len(shape))
            for leaves, arrives in (wire_layouts(shape, *meshes), (whole, whole)):
                source, target = end(leaves, meshes[0], devices), end(arrives, meshes[1], other_devices)
                held = from_whole(array, aval_of(array), source.sharding) if is_here(source.sharding) else None
                (arrived,) = crosser([crossing(shape, array.dtype, source, target)])([held])
                assert (arrived is not None) == is_here(target.sharding)
                if arrived is not None:
                    assert arrived.sharding == target.sharding
                    for shard in arrived.addressable_shards:
                        np.testing.assert_array_equal(np.asarray(shard.data), array[shard.index])
    print("done", flush=True)
    jax.distributed.shutdown()  # waits for the other process: it may still be receiving


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
