"""One of two processes that train in float16 with an overflow: the program of a test in test_steps.py."""

import json
import sys
from pathlib import Path

from tests.in_processes import join


def main(task):
    join(task)

    import jax

    import autopar
    from tests.train.mixed_precision.small_training import batches, training

    found = {}
    for name, plan in (
        ("stages", autopar.recipes.pipeline(2, "1f1b", num_microbatches=4)),
        ("ZeRO-3", autopar.recipes.zero(3)),
    ):
        create, function = training("fp16")
        step = autopar.parallelize(function, plan=plan, cache_dir=None)
        state, rows = step.init(create, jax.random.key(0)), []
        for batch in batches(task["steps"], overflows_at=task["overflows_at"]):
            before = parts_of(state["params"])
            state, metrics = step(state, batch)
            is_same = before == parts_of(state["params"])
            rows.append([bool(metrics["finite"]), is_same, float(metrics["loss"])])
        found[name] = rows
    (Path(task["folder"]) / f"found{task['process']}.json").write_text(json.dumps(found))


def parts_of(params):
    """What this process has of each leaf, as bytes."""
    import jax
    import numpy as np

    return [[np.array(s.data).tobytes() for s in x.addressable_shards] for x in jax.tree.leaves(params)]


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
