"""Llama 3 8B on `jax.jit`, with shardings written by hand: matrices split over "model", the batch over "data".

autopar lint examples/llama_jit.py:job --cluster dgx-h100
"""

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import llama  # beside this file

# By the end of the path of a parameter. Moments of the optimizer lie as their parameters do.
SPECS = {
    "query/kernel": P(None, "model", None),
    "key/kernel": P(None, "model", None),
    "value/kernel": P(None, "model", None),
    "out/kernel": P("model", None, None),
    "gate/kernel": P(None, "model"),
    "up/kernel": P(None, "model"),
    "down/kernel": P("model", None),
    "embedding/embedding": P("model", None),
    "head/kernel": P(None, "model"),
}


def spec_of(path: Any) -> P:
    names = [str(getattr(key, "key", getattr(key, "name", ""))) for key in path]
    spec = SPECS.get("/".join(names[-2:]), P())
    return P(None, *spec) if "layers" in names and len(spec) else spec  # the layers of a scan are stacked


def job(model: int = 4, devices: int = 8, **sizes: Any) -> tuple[Any, ...]:
    """The step under `jax.jit`, its state and a batch; sizes as of `examples/llama.py`."""
    _, state, batch = llama.job(**{"examples": 16, "length": 4096} | sizes)
    mesh = Mesh(np.array(jax.devices()[:devices]).reshape(-1, model), ("data", "model"))
    of_state = jax.tree_util.tree_map_with_path(lambda path, _: NamedSharding(mesh, spec_of(path)), state)
    of_batch = NamedSharding(mesh, P("data"))
    step = jax.jit(
        llama.train_step.__wrapped__, in_shardings=(of_state, of_batch), out_shardings=(of_state, None)
    )
    return step, state, batch
