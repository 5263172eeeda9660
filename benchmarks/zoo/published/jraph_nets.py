"""Graph networks of jraph, on one padded tuple of graphs."""

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.zoo.case import Case, PyTree
from benchmarks.zoo.mlp import apply_mlp, init_mlp
from benchmarks.zoo.training import training_case


def jraph_network(
    *,
    width: int = 16,
    features: int = 8,
    graphs: int = 8,
    nodes_per_graph: int = 8,
    edges_per_graph: int = 16,
) -> Case:
    """`jraph.GraphNetwork` with edge, node and global updates; the last graph is the padding."""
    import jraph

    def make_batch(seed: int) -> PyTree:
        rng = np.random.default_rng(seed)
        nodes, edges = graphs * nodes_per_graph, graphs * edges_per_graph
        graph_of_edge = np.repeat(np.arange(graphs), edges_per_graph) * nodes_per_graph
        senders, receivers = rng.integers(0, nodes_per_graph, (2, edges)) + graph_of_edge
        graph = jraph.GraphsTuple(
            nodes=rng.standard_normal((nodes, features), dtype=np.float32),
            edges=rng.standard_normal((edges, features), dtype=np.float32),
            globals=np.zeros((graphs, width), np.float32),
            senders=senders.astype(np.int32),
            receivers=receivers.astype(np.int32),
            n_node=np.full(graphs, nodes_per_graph, np.int32),
            n_edge=np.full(graphs, edges_per_graph, np.int32),
        )
        return {"graph": graph, "targets": rng.standard_normal(graphs, dtype=np.float32)}

    def init_params(key: jax.Array) -> PyTree:
        edge_key, node_key, global_key, readout_key = jax.random.split(key, 4)
        return {
            "edge": init_mlp(edge_key, (3 * features + width, width, width)),
            "node": init_mlp(node_key, (features + 3 * width, width, width)),
            "global": init_mlp(global_key, (3 * width, width, width)),
            "readout": init_mlp(readout_key, (width, 1)),
        }

    def loss(params: PyTree, batch: PyTree) -> jax.Array:
        def update(name: str):
            return lambda *inputs: apply_mlp(params[name], jnp.concatenate(inputs, axis=-1))

        network = jraph.GraphNetwork(
            update_edge_fn=update("edge"),
            update_node_fn=update("node"),
            update_global_fn=update("global"),
            aggregate_edges_for_nodes_fn=jraph.segment_mean,
            aggregate_nodes_for_globals_fn=jraph.segment_mean,
            aggregate_edges_for_globals_fn=jraph.segment_mean,
        )
        predictions = apply_mlp(params["readout"], network(batch["graph"]).globals)[:, 0]
        real = jnp.arange(graphs) < graphs - 1
        return jnp.mean((predictions - batch["targets"]) ** 2, where=real)

    return training_case(name="jraph_network", init_params=init_params, loss=loss, batch=make_batch)


CASES = (jraph_network,)
