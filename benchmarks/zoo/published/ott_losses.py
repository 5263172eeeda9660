"""A map between clouds of points, fitted by the Sinkhorn loss of OTT."""

import jax
import numpy as np
import optax

from benchmarks.zoo.case import Case, PyTree
from benchmarks.zoo.data import Batch
from benchmarks.zoo.mlp import init_mlp
from benchmarks.zoo.training import training_case


def ott_sinkhorn(*, width: int = 32, dimensions: int = 4, batch: int = 16) -> Case:
    """The entropic transport cost from mapped points to targets, by a fixed number of iterations."""
    from ott.geometry import pointcloud
    from ott.problems.linear import linear_problem
    from ott.solvers.linear import sinkhorn

    solver = sinkhorn.Sinkhorn(min_iterations=20, max_iterations=20)

    def loss(params: PyTree, batch: PyTree) -> jax.Array:
        *hidden, last = params
        y = batch["points"]
        for layer in hidden:
            y = jax.nn.relu(y @ layer["weight"] + layer["bias"])
        y = y @ last["weight"] + last["bias"]
        geometry = pointcloud.PointCloud(y, batch["targets"], epsilon=0.5)
        return solver(linear_problem.LinearProblem(geometry)).reg_ot_cost

    def make_batch(seed: int) -> Batch:
        points, targets = np.random.default_rng(seed).standard_normal((2, batch, dimensions), dtype=np.float32)
        return {"points": points, "targets": targets + 1}

    return training_case(
        name="ott_sinkhorn",
        init_params=lambda key: init_mlp(key, (dimensions, width, dimensions)),
        loss=loss,
        batch=make_batch,
        optimizer=optax.sgd(1e-2, momentum=0.9),
        tolerance=1e-4,
    )


CASES = (ott_sinkhorn,)
