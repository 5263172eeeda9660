"""One of several processes that pass rows of their own to a step: `python tests/execute/own_rows.py` TASK.

Each try is a step of its own; the losses that it gave, or the error that it ended in, go to the folder of the task.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

import autopar
from tests.in_processes import join

EXAMPLES = 16
STEPS = 3
PIPELINE = autopar.recipes.pipeline(2, "1f1b", num_microbatches=2)
PLANS = {"one program": None, "stages": PIPELINE, "tensor parallel": autopar.recipes.tensor_parallel()}


class Tries:
    """What is tried in a process; every process tries the same."""

    def __init__(self, process: int, processes: int) -> None:
        from tests import small_steps  # which uses jax's devices

        self.process, self.processes = process, processes
        self.mlp_step, self.mlp_state, self.mlp_batch = (
            small_steps.mlp_step,
            small_steps.mlp_state,
            small_steps.mlp_batch,
        )

    def own(self, batch: Any, rows: list[int] | None = None) -> Any:
        """The rows of this process, as many in each unless `rows` says otherwise."""
        ends = np.cumsum([0, *(rows or [EXAMPLES // self.processes] * self.processes)])
        return jax.tree.map(lambda x: x[ends[self.process] : ends[self.process + 1]], batch)

    def uneven(self, batch: Any) -> Any:
        return self.own(batch, [12, 4] if self.processes == 2 else [1, 7, 3, 5])

    def losses(
        self,
        pick: Callable[[Any, Any], Any],
        *,
        function: Any = None,
        planned_for: int = 0,
        zeros: bool = False,
        **options: Any,
    ) -> list[float]:
        """The losses of a new step on what `pick(step, whole batch)` gives of each batch."""
        step = autopar.parallelize(function or self.mlp_step, cache_dir=None, **options)
        if planned_for:
            shapes = jax.eval_shape(lambda: jax.tree.map(jax.numpy.asarray, self.mlp_batch(planned_for)))
            step.plan(jax.eval_shape(self.mlp_state, jax.random.key(0)), shapes)
        batches = [self.mlp_batch(EXAMPLES, seed) for seed in range(STEPS)]
        if zeros:
            batches.insert(0, jax.tree.map(np.zeros_like, batches[0]))
        state, out = step.init(self.mlp_state, jax.random.key(0)), []
        for batch in batches:
            state, metrics = step(state, pick(step, batch))
            out.append(float(metrics["loss"]))
        return out

    def all(self) -> dict[str, Callable[[], list[float]]]:
        def call(step: Any, batch: Any) -> Any:
            return self.own(batch)

        def put(step: Any, batch: Any) -> Any:
            return step.put_batch(self.own(batch))

        def whole(step: Any, batch: Any) -> Any:
            return batch

        def global_arrays(step: Any, batch: Any) -> Any:
            sharding = jax.NamedSharding(jax.make_mesh((jax.device_count(),), ("i",)), jax.P("i"))
            return jax.tree.map(lambda x: jax.make_array_from_process_local_data(sharding, x), self.own(batch))

        def on_own_devices(step: Any, batch: Any) -> Any:
            mesh = jax.sharding.Mesh(np.array(jax.local_devices()), ("i",))
            return jax.device_put(self.own(batch), jax.NamedSharding(mesh, jax.P("i")))

        def scaled(state: Any, batch: Any) -> Any:
            new, metrics = self.mlp_step(state, batch["rows"])
            return new, jax.tree.map(lambda x: batch["scale"] * x, metrics)

        def with_scale(value: float) -> list[float]:
            return self.losses(lambda _, b: {"rows": self.own(b), "scale": value}, function=scaled)

        def another_state() -> list[float]:
            step = autopar.parallelize(self.mlp_step, cache_dir=None)
            state = self.mlp_state(jax.random.key(self.process))
            return [float(step(state, self.own(self.mlp_batch(EXAMPLES)))[1]["loss"])]

        def fewer_in_one_process() -> list[float]:
            sizes = [EXAMPLES // self.processes] * (self.processes - 1)
            at = [0]

            def rows(step: Any, batch: Any) -> Any:
                at[0] += 1
                return self.own(batch) if at[0] == 1 else self.own(batch, [*sizes, 1])

            return self.losses(rows)

        half = EXAMPLES // self.processes
        tries: dict[str, Callable[[], list[float]]] = {}
        for name, plan in PLANS.items():
            tries[f"{name}, a call"] = lambda plan=plan: self.losses(call, plan=plan)
            tries[f"{name}, put_batch"] = lambda plan=plan: self.losses(put, plan=plan)
            tries[f"{name}, uneven rows"] = lambda plan=plan: self.losses(lambda _, b: self.uneven(b), plan=plan)
            tries[f"{name}, the whole batch"] = lambda plan=plan: self.losses(whole, plan=plan)
        return tries | {
            "put_batch says local": lambda: self.losses(lambda step, b: step.put_batch(self.own(b), batch="local")),
            "put_batch says global": lambda: self.losses(lambda step, b: step.put_batch(b, batch="global")),
            "local": lambda: self.losses(call, batch="local"),
            "global": lambda: self.losses(whole, batch="global"),
            "jax arrays": lambda: self.losses(lambda _, b: jax.tree.map(jax.numpy.asarray, self.own(b))),
            "global arrays": lambda: self.losses(global_arrays),
            "planned for all rows": lambda: self.losses(call, planned_for=EXAMPLES),
            "planned for the rows of one, local": lambda: self.losses(call, planned_for=half, batch="local"),
            "a number in the batch": lambda: with_scale(1.0),
            "zeros first, local": lambda: self.losses(call, zeros=True, batch="local")[1:],
            # What does not fit together.
            "numbers that differ": lambda: with_scale(1.0 + self.process),
            "own rows, said global": lambda: self.losses(call, batch="global"),
            "planned for the rows of one": lambda: self.losses(call, planned_for=half),
            "planned for twice the rows": lambda: self.losses(whole, planned_for=EXAMPLES * self.processes),
            "zeros first": lambda: self.losses(call, zeros=True),
            "another state": another_state,
            "on own devices": lambda: self.losses(on_own_devices),
            "fewer in one process": fewer_in_one_process,
        }


def main(task: dict[str, Any]) -> None:
    join(task)
    tries, found = Tries(task["process"], task["processes"]).all(), {}
    for name in task.get("tries") or [name for name in tries if name != "fewer in one process"]:
        try:
            found[name] = tries[name]()
        except autopar.errors.AutoparError as error:
            found[name] = f"{type(error).__name__}: {error}"
        print(name, found[name], flush=True)
        (Path(task["folder"]) / f"found{task['process']}").write_text(json.dumps(found))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
