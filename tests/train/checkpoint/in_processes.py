"""One of several processes that save and restore together: a program for `tests.in_processes.launch`."""

import hashlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from tests.in_processes import join

KINDS = ("one program", "stages", "offload")


def autopar_join(task: dict[str, Any]) -> None:
    """Makes this process one of the program, with failure detection."""
    import jax

    import autopar

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", task["devices"])
    autopar.distributed.initialize(task["coordinator"], task["processes"], task["process"])


def recipe(kind: str) -> Any:
    import autopar

    match kind:
        case "one program":
            return autopar.recipes.zero(3)
        case "stages":
            return autopar.recipes.pipeline(2, "1f1b", num_microbatches=4)
    return autopar.recipes.combine(pp=2, zero=2, num_microbatches=4, offload="optimizer")


def digest(state: Any) -> str:
    """Of all leaves of a state that this process has whole."""
    import jax
    import numpy as np

    total = hashlib.sha256()
    for leaf in jax.tree.leaves(state):
        total.update(np.asarray(leaf).tobytes())
    return total.hexdigest()


def holds_its_parts(array: Any, whole: Any) -> bool:
    """Whether each shard of an array in this process is that of the whole array."""
    import numpy as np

    parts = [(shard.index, np.asarray(shard.data)) for shard in array.addressable_shards]
    return all(part.tobytes() == np.asarray(whole)[index].tobytes() for index, part in parts)


def restore_onto_each_other(folder: str) -> dict[str, Any]:
    """Saves a state of each kind and restores it onto each: digests of the states, and what was not equal."""
    import jax

    import autopar
    from autopar.checkpoint import Checkpointer
    from benchmarks.zoo import CASES

    case = CASES["mlp"]()
    shapes = jax.eval_shape(case.init, jax.random.key(0))
    steps = {kind: autopar.parallelize(case.step, plan=recipe(kind), cache_dir=None) for kind in KINDS}
    digests, unequal, in_host = {}, [], 0
    for kind in KINDS:
        state = steps[kind].init(case.init, jax.random.key(0))
        for i in range(2):
            state, _ = steps[kind](state, case.batch(i))
        with Checkpointer(f"{folder}/{kind}") as checkpoints:
            checkpoints.save(2, state, plan=steps[kind])
            plain = checkpoints.restore(like=shapes)
            digests[kind] = digest(plain)
            back = {other: checkpoints.restore(step=steps[other], like=shapes) for other in KINDS}
        for name, tree in {**back, "itself": state}.items():
            pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(plain), strict=True)
            unequal += [(kind, name, i) for i, (array, whole) in enumerate(pairs) if not holds_its_parts(array, whole)]
        in_host += sum(x.sharding.memory_kind == "pinned_host" for x in jax.tree.leaves(back["offload"]))
    return {"digests": digests, "unequal": unequal, "in_host": in_host, "mixed": mixed_leaves(f"{folder}/mixed")}


def mixed_leaves(folder: str) -> bool:
    """Whether what each process has whole comes back: arrays of numpy and of one device, keys, numbers."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from autopar.checkpoint import Checkpointer
    from tests.train.checkpoint.trees import bits

    state = {"np": np.arange(5), "one": jnp.arange(4.0), "key": jax.random.key(3), "n": 7, "none": jnp.zeros((0, 2))}
    with Checkpointer(folder) as checkpoints:
        checkpoints.save(1, state)
        back = checkpoints.restore(like=state)
    return jax.tree.map(bits, back) == jax.tree.map(bits, state)


def train_until_told_to_end(task: dict[str, Any], folder: Path) -> None:
    """Saves every hundredth step; the last process is told to end after the fifth."""
    import jax.numpy as jnp

    from autopar.checkpoint import Checkpointer

    checkpoints = Checkpointer(folder, every=100)
    for i in range(1, 2000):
        if i == 5 and task["process"] == task["processes"] - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        checkpoints.save(i, {"n": jnp.int32(i)})


def train_until_one_is_killed(task: dict[str, Any], folder: Path) -> None:
    """Saves every step; the last process is killed in the middle of a save."""
    import jax.numpy as jnp

    from autopar.checkpoint import Checkpointer

    checkpoints = Checkpointer(folder)
    for i in range(1, 50):
        checkpoints.save(i, {"n": jnp.int32(i), "w": jnp.full((1024, 1024), float(i))})
        if i == 5 and task["process"] == task["processes"] - 1:
            os.kill(os.getpid(), signal.SIGKILL)


def save_to_a_folder_of_its_own(task: dict[str, Any], folder: Path) -> None:
    """Saves to a path that is the same text in all processes, and another folder in each."""
    import jax.numpy as jnp

    from autopar.checkpoint import Checkpointer
    from autopar.errors import ProcessMismatchError
    from autopar.train.checkpoint import checkpointer

    checkpointer.SEEN_S = 1.0
    at = folder / f"disk{task['process']}"
    at.mkdir()
    os.chdir(at)
    try:
        Checkpointer("/proc/self/cwd/run").save(1, {"w": jnp.ones(4)})
    except ProcessMismatchError as error:
        (folder / f"result{task['process']}").write_text(str(error))


def main(task: dict[str, Any]) -> None:
    if task["what"] == "kill":
        autopar_join(task)
    else:
        join(task)
    folder = Path(task["folder"])
    if task["what"] == "preemption":
        train_until_told_to_end(task, folder / "run")
    elif task["what"] == "kill":
        train_until_one_is_killed(task, folder / "run")
    elif task["what"] == "own folders":
        save_to_a_folder_of_its_own(task, folder)
    else:
        result = restore_onto_each_other(task.get("runs", str(folder)))
        (folder / f"result{task['process']}").write_text(json.dumps(result))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
