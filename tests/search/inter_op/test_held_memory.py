"""What every pipeline of a step holds refuses micro-batches that cannot fit, before any table is made."""

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.errors import AutoparError
from autopar.frontend.tracing import trace
from autopar.hardware.cluster import Cluster
from autopar.ir.rules import RuleBook
from autopar.passes.split_scan import split_scans
from autopar.search.inter_op import search
from autopar.search.inter_op.build_stages import cut_layers
from autopar.search.inter_op.search import held_bytes, why_too_large
from tests.small_steps import chain_step

WIDTH, LAYERS, EXAMPLES = 64, 4, 32
WEIGHT_BYTES = 4 * WIDTH * WIDTH


def graph_of(step, params, m):
    rules = RuleBook()
    examples = jax.ShapeDtypeStruct((EXAMPLES, WIDTH), "float32")
    traced = trace(step, (params, {"x": examples, "y": examples}), names=("params", "batch"), donate=(0,), batch=(1,))
    return cut_layers(split_scans(traced, 1, rules), m, rules).graph


def weights(n):
    return [jax.ShapeDtypeStruct((WIDTH, WIDTH), "float32")] * n


def tied_step(params, batch):
    """The one weight is read by two products, whose gradients a pipeline may sum in two stages."""

    def loss(params):
        return jnp.mean((jnp.tanh(batch["x"] @ params[0]) @ params[0].T - batch["y"]) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - g, params, grads), value


@pytest.mark.parametrize(
    ("step", "layers", "m", "expected"),
    [
        (chain_step, LAYERS, 1, LAYERS * WEIGHT_BYTES),  # no sums over micro-batches
        (chain_step, LAYERS, 4, 2 * LAYERS * WEIGHT_BYTES + 4),  # gradients, and the loss
        (tied_step, 1, 4, WEIGHT_BYTES + 4),  # a sum that may be taken behind the loop is not counted
    ],
)
def test_state_and_sums_are_held(step, layers, m, expected):
    assert held_bytes(graph_of(step, weights(layers), m)) == expected


def test_devices_of_a_cluster_hold_in_proportion_to_their_memory():
    graph, small = graph_of(chain_step, weights(LAYERS), 4), Cluster.preset("dgx-a100-40g").submesh(1, 2)
    in_small = -(-held_bytes(graph) // 2)
    assert why_too_large(graph, small, in_small) is None
    assert "4 micro-batches, split over all devices, take 65.5 kB on each" in why_too_large(graph, small, in_small - 1)


def test_no_table_is_made_where_nothing_can_fit(monkeypatch):
    monkeypatch.setattr(search, "PosedProblems", None)
    step = autopar.parallelize(
        chain_step, cluster=Cluster.preset("dgx-a100-40g").submesh(1, 2),
        search=autopar.Search(memory_limit_bytes=int(0.6 * LAYERS * WEIGHT_BYTES), num_microbatches=4), cache_dir=None,
    )  # fmt: skip
    examples = jax.ShapeDtypeStruct((EXAMPLES, WIDTH), "float32")
    with pytest.raises(AutoparError, match="the state and the sums of 4 micro-batches, split over all devices, take"):
        step.plan(weights(LAYERS), {"x": examples, "y": examples})
