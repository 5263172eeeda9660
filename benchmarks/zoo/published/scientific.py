"""Differential equations, graphs, clouds of points, densities and inference, each by the package that people use."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.zoo.case import Case, PyTree
from benchmarks.zoo.data import Batch, vector_batch
from benchmarks.zoo.mlp import apply_mlp, init_mlp
from benchmarks.zoo.training import cross_entropy, training_case

BATCH, WIDTH = 8, 32
TOLERANCE = 1e-4  # where rounding moves the number or the size of a solver's steps


def float_batch(*shape: int) -> Callable[[int], np.ndarray]:
    return lambda seed: np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def diffrax_neural_ode() -> Case:
    """An adaptive step and its checkpointed adjoint; the number of steps depends on the data, within a bound."""
    import diffrax

    times, dimensions = jnp.linspace(0.0, 1.0, 8), 2

    def vector_field(t: jax.Array, y: jax.Array, params: PyTree) -> jax.Array:
        return apply_mlp(params, y, jnp.tanh)

    def trajectory(params: PyTree, start: jax.Array) -> jax.Array:
        solution = diffrax.diffeqsolve(
            diffrax.ODETerm(vector_field),
            diffrax.Bosh3(),
            t0=times[0],
            t1=times[-1],
            dt0=0.1,
            y0=start,
            args=params,
            saveat=diffrax.SaveAt(ts=times),
            # Coarse, so that the estimated error, which sets the step, is far above rounding.
            stepsize_controller=diffrax.PIDController(rtol=1e-2, atol=1e-2),
            max_steps=32,
        )
        return solution.ys

    def make_batch(seed: int) -> Batch:
        start = float_batch(BATCH, dimensions)(seed)
        decay = np.exp(-np.asarray(times))[None, :, None]
        return {"start": start, "targets": (start[:, None] * decay).astype(np.float32)}

    def loss(params: PyTree, batch: PyTree) -> jax.Array:
        predicted = jax.vmap(trajectory, in_axes=(None, 0))(params, batch["start"])
        return jnp.mean((predicted - batch["targets"]) ** 2)

    return training_case(
        name="diffrax_neural_ode",
        init_params=lambda key: init_mlp(key, (dimensions, WIDTH, WIDTH, dimensions)),
        loss=loss,
        batch=make_batch,
        tolerance=TOLERANCE,
    )


def jraph_network() -> Case:
    """`jraph.GraphNetwork` with edge, node and global updates; the last graph of a padded tuple is the padding."""
    import jraph

    width, features, graphs, nodes_per_graph, edges_per_graph = 16, 8, 8, 8, 16

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
        def update(name: str) -> Callable[..., jax.Array]:
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


def optimistix_fixed_point() -> Case:
    """A deep equilibrium network: its layer is a fixed point that Optimistix finds, differentiated implicitly."""
    import optimistix

    features, classes = 16, 8

    def init_params(key: jax.Array) -> PyTree:
        inner, outer, head = jax.random.split(key, 3)
        return {
            "inner": 0.3 * jax.random.normal(inner, (WIDTH, WIDTH)) / WIDTH**0.5,
            "outer": jax.random.normal(outer, (features, WIDTH)) / features**0.5,
            "head": jax.random.normal(head, (WIDTH, classes)) / WIDTH**0.5,
        }

    def loss(params: PyTree, batch: PyTree) -> jax.Array:
        injected = batch["inputs"] @ params["outer"]
        found = optimistix.fixed_point(
            lambda z, args: jnp.tanh(z @ args[0] + args[1]),
            optimistix.FixedPointIteration(rtol=1e-6, atol=1e-6),
            jnp.zeros_like(injected),
            args=(params["inner"], injected),
            max_steps=64,
        )
        return cross_entropy(found.value @ params["head"], batch["labels"])

    return training_case(
        name="optimistix_fixed_point",
        init_params=init_params,
        loss=loss,
        batch=vector_batch(batch=BATCH, features=features, classes=classes),
        tolerance=TOLERANCE,
    )


def ott_sinkhorn() -> Case:
    """A map between clouds of points: the entropic transport cost to targets, by a fixed number of iterations."""
    from ott.geometry import pointcloud
    from ott.problems.linear import linear_problem
    from ott.solvers.linear import sinkhorn

    dimensions = 4
    solver = sinkhorn.Sinkhorn(min_iterations=20, max_iterations=20)

    def loss(params: PyTree, batch: PyTree) -> jax.Array:
        mapped = apply_mlp(params, batch["points"], jax.nn.relu)
        geometry = pointcloud.PointCloud(mapped, batch["targets"], epsilon=0.5)
        return solver(linear_problem.LinearProblem(geometry)).reg_ot_cost

    def make_batch(seed: int) -> Batch:
        points, targets = float_batch(2, 16, dimensions)(seed)
        return {"points": points, "targets": targets + 1}

    return training_case(
        name="ott_sinkhorn",
        init_params=lambda key: init_mlp(key, (dimensions, WIDTH, dimensions)),
        loss=loss,
        batch=make_batch,
        optimizer=optax.sgd(1e-2, momentum=0.9),
        tolerance=TOLERANCE,
    )


def numpyro_regression() -> Case:
    """Bayesian logistic regression with an automatic normal guide; the state is NumPyro's own."""
    import numpyro
    import numpyro.distributions as dist
    from numpyro.infer import SVI, Trace_ELBO
    from numpyro.infer.autoguide import AutoNormal

    features = 16

    def model(inputs: jax.Array, labels: jax.Array) -> None:
        weights = numpyro.sample("weights", dist.Normal(jnp.zeros(features), 1).to_event(1))
        bias = numpyro.sample("bias", dist.Normal(0.0, 1.0))
        with numpyro.plate("examples", inputs.shape[0]):
            numpyro.sample("labels", dist.Bernoulli(logits=inputs @ weights + bias), obs=labels)

    svi = SVI(model, AutoNormal(model), numpyro.optim.Momentum(1e-3, 0.9), Trace_ELBO())

    def make_batch(seed: int) -> Batch:
        inputs = float_batch(16, features)(seed)
        return {"inputs": inputs, "labels": (inputs[:, 0] > 0).astype(np.float32)}

    # Sites and their constraints are read off a first run of the model.
    svi.init(jax.random.key(0), **make_batch(0))

    def init(key: jax.Array) -> PyTree:
        return svi.init(key, **make_batch(0))

    def step(state: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
        state, loss = svi.update(state, **batch)
        return state, {"loss": loss}

    return Case(name="numpyro_regression", step=step, init=init, batch=make_batch)


def distrax_flow() -> Case:
    """A normalizing flow: masked affine couplings, fitted by maximum likelihood."""
    import distrax

    layers, dimensions = 2, 8

    def affine(params: jax.Array) -> PyTree:
        shift, log_scale = jnp.split(params, 2, axis=-1)
        return distrax.ScalarAffine(shift=shift, log_scale=log_scale)

    def coupling(number: int, params: PyTree) -> PyTree:
        mask = jnp.arange(dimensions) % 2 == number % 2
        return distrax.MaskedCoupling(
            mask=mask, bijector=affine, conditioner=lambda x: 0.1 * apply_mlp(params, x, jnp.tanh)
        )

    def loss(params: PyTree, batch: PyTree) -> jax.Array:
        couplings = [coupling(i, layer) for i, layer in enumerate(params)]
        base = distrax.MultivariateNormalDiag(jnp.zeros(dimensions), jnp.ones(dimensions))
        flow = distrax.Transformed(base, distrax.Inverse(distrax.Chain(couplings)))
        return -jnp.mean(flow.log_prob(batch["points"]))

    return training_case(
        name="distrax_flow",
        init_params=lambda key: [
            init_mlp(k, (dimensions, WIDTH, 2 * dimensions)) for k in jax.random.split(key, layers)
        ],
        loss=loss,
        batch=lambda seed: {"points": 1 + 2 * float_batch(16, dimensions)(seed)},
    )


def e3nn_points() -> Case:
    """One number of a cloud of points whose features turn with it: spherical harmonics, equivariant linear layers."""
    import e3nn_jax as e3nn
    import flax.linen as nn

    channels, points = 8, 4

    class Network(nn.Module):
        @nn.compact
        def __call__(self, positions: jax.Array) -> jax.Array:
            x = e3nn.spherical_harmonics("0e + 1o + 2e", positions, normalize=True)
            hidden = f"{channels}x0e + {channels}x1o"
            x = e3nn.flax.Linear(hidden)(x)
            x = e3nn.flax.Linear(hidden)(e3nn.tensor_square(x))
            x = e3nn.sum(x, axis=1)
            return e3nn.flax.Linear("1x0e")(e3nn.tensor_square(x)).array[:, 0]

    network = Network()

    def loss(params: PyTree, batch: PyTree) -> jax.Array:
        return jnp.mean((network.apply(params, batch["positions"]) - batch["targets"]) ** 2)

    def make_batch(seed: int) -> Batch:
        positions = float_batch(BATCH, points, 3)(seed)
        return {"positions": positions, "targets": np.square(positions).sum((1, 2)) / 10}

    return training_case(
        name="e3nn_points",
        init_params=lambda key: network.init(key, jnp.ones((BATCH, points, 3))),
        loss=loss,
        batch=make_batch,
        optimizer=optax.sgd(1e-5, momentum=0.9),  # products of products: larger steps diverge
    )
