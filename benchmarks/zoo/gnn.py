"""Graph network in plain jax.numpy: messages along edges are gathered from nodes and summed into nodes."""

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.zoo.case import Case, PyTree
from benchmarks.zoo.data import Batch
from benchmarks.zoo.training import training_case


def gnn(
    *, layers: int = 2, width: int = 32, features: int = 8, graphs: int = 8, nodes: int = 64, edges: int = 256
) -> Case:
    """One target per graph; `nodes` and `edges` count all graphs of the batch together.

    There is no batch dimension that runs through the model: a node's graph is known only from the data.
    """

    def make_batch(seed: int) -> Batch:
        rng = np.random.default_rng(seed)
        return {
            "nodes": rng.standard_normal((nodes, features), dtype=np.float32),
            "senders": rng.integers(0, nodes, edges, dtype=np.int32),
            "receivers": rng.integers(0, nodes, edges, dtype=np.int32),
            "graph_of_node": np.sort(rng.integers(0, graphs, nodes, dtype=np.int32)),
            "targets": rng.standard_normal(graphs, dtype=np.float32),
        }

    def init_params(key: jax.Array) -> PyTree:
        initializer = jax.nn.initializers.glorot_normal()
        encode_key, readout_key, *layer_keys = jax.random.split(key, 2 + layers)

        def init_layer(key: jax.Array) -> PyTree:
            message_key, update_key = jax.random.split(key)
            return {
                "message": initializer(message_key, (2 * width, width)),
                "update": initializer(update_key, (2 * width, width)),
            }

        return {
            "encode": initializer(encode_key, (features, width)),
            "layers": [init_layer(k) for k in layer_keys],
            "readout": initializer(readout_key, (width, 1)),
        }

    def loss(params: PyTree, batch: PyTree) -> jax.Array:
        x = batch["nodes"] @ params["encode"]
        degree = jnp.zeros(nodes).at[batch["receivers"]].add(1.0)
        for layer in params["layers"]:
            pairs = jnp.concatenate([x[batch["senders"]], x[batch["receivers"]]], axis=-1)
            messages = jax.nn.gelu(pairs @ layer["message"])
            received = jax.ops.segment_sum(messages, batch["receivers"], nodes) / (1 + degree)[:, None]
            x = x + jax.nn.gelu(jnp.concatenate([x, received], axis=-1) @ layer["update"])
        sizes = jax.ops.segment_sum(jnp.ones(nodes), batch["graph_of_node"], graphs)
        pooled = jax.ops.segment_sum(x, batch["graph_of_node"], graphs) / (1 + sizes)[:, None]
        return jnp.mean(((pooled @ params["readout"])[:, 0] - batch["targets"]) ** 2)

    return training_case(name="gnn", init_params=init_params, loss=loss, batch=make_batch)
