"""One of two processes that save or restore a state by orbax's emergency manager: for `tests.in_processes.launch`.

Each process has a disk of its own, `diskN`, where a checkpoint of every step goes, and only the first step goes to the
folder. Step 2 has the numbers of step 1 plus 1.
"""

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from tests.in_processes import join


def state_of(kind: str, step: int) -> dict[str, Any]:
    """The state of a step: whole in each process, split over them, on the first one's devices, or with a number."""
    import jax
    import numpy as np
    from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

    devices = np.array(jax.devices()).reshape(2, 2)[: 1 if kind == "stage" else 2]
    mesh = Mesh(devices, ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    spec = PartitionSpec("data" if kind == "split" else None, "model")
    whole = np.arange(16.0, dtype=np.float32).reshape(4, 4) + step
    sharding = NamedSharding(mesh, spec)
    array = jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index], dtype=whole.dtype)
    return {"w": array, "n": step} if kind == "number" else {"w": array}


def main(task: dict[str, Any]) -> None:
    join(task)
    import jax
    import numpy as np
    import orbax.checkpoint as ocp
    from absl import flags
    from jax.sharding import AxisType, Mesh
    from orbax.checkpoint.experimental.emergency import checkpoint_manager as emergency

    flags.FLAGS(["emergency"])
    ocp.multihost.initialize_runtime_to_distributed_ids()
    ocp.multihost.initialize_distributed_to_device_ids()
    folder = Path(task["folder"])
    disk, shared = folder / f"disk{task['process']}", folder / "shared"
    for path in (disk, shared):
        path.mkdir(exist_ok=True)
    array = state_of(task["kind"], 1)["w"]
    shapes = {"w": jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)}
    manager = emergency.CheckpointManager(
        disk, shared, Mesh(np.array(jax.devices()).reshape(2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2),
        shapes, options=emergency.CheckpointManagerOptions(
            local=emergency.LocalCheckpointOptions(save_interval_steps=1, max_to_keep=2),
            persistent=emergency.PersistentCheckpointOptions(save_interval_steps=1000),
        ),
    )  # fmt: skip
    if task["what"] == "save":
        for step in (1, 2):
            state = ocp.args.PyTreeSave(state_of(task["kind"], step))
            assert manager.save(step, args=ocp.args.Composite(state=state))
        manager.wait_until_finished()
    else:
        step = int(manager.latest_step())
        back, saved = manager.restore(step).state, state_of(task["kind"], step)
        for one, other in zip(back["w"].addressable_shards, saved["w"].addressable_shards, strict=True):
            np.testing.assert_array_equal(np.asarray(one.data), np.asarray(other.data))
        (folder / f"restored{task['process']}").write_text(str(step))


if __name__ == "__main__":
    try:
        main(json.loads(sys.argv[1]))
    except Exception:
        traceback.print_exc()
        os._exit(1)  # the end of Python would wait for the other process
