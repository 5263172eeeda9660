"""Plans whose best form and traffic are known in closed form, on small steps in plain JAX.

Computing is slow beside sending in these clusters, so that splitting the work pays; what is left to choose is who sends
what. Bytes are those that each device sends: 2(n-1)/n of an all-reduced array, (n-1)/n of a gathered one.
"""

import contextlib
import dataclasses
import io
import itertools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar import solver
from autopar.cost import cost_model
from autopar.cost.stream_simulator import overlap_of
from autopar.cost.usage import predicted_collectives
from autopar.frontend.build_graph import build_graph
from autopar.frontend.tracing import trace
from autopar.hardware.cluster import Cluster, Link
from autopar.hardware.kinds import Platform
from autopar.hardware.presets import H100
from autopar.ir.layout import Layout, LogicalMesh
from autopar.ir.rules import RuleBook
from autopar.search.intra_op import formulation
from autopar.search.intra_op.ilp import IntraOp
from autopar.search.intra_op.spmd_candidate import evaluated
from benchmarks.zoo.moe import experts_layer
from tests.small_steps import grouped
from tests.solver.brute_force import brute_force

LINK = Link(latency_s=1e-7, bytes_per_s=1e9, overhead_s=1e-6, source="test")
SLOW_LINK = dataclasses.replace(LINK, bytes_per_s=1e8)
SLOW = dataclasses.replace(
    H100, name="slow", peak_flops=(("float32", 1e9),), launch_overhead_s=0.0, flops_efficiency=(("float32", 1.0),),
    sustained_share=1.0, least_kernel_s=0.0, float32_fill_s=0.0, peak_memory_bytes_per_s=1e12,
)  # fmt: skip
FASTER = dataclasses.replace(SLOW, name="faster", peak_flops=(("float32", 1e11),))
N = 4
SCALAR = 4.0  # the loss: reduced too


@pytest.fixture(autouse=True)
def no_overlap(monkeypatch):
    """Nothing is sent beside computing: what is best is what takes least in sum."""
    monkeypatch.setattr(cost_model, "overlap_of", lambda *given, **named: overlap_of(Platform.CPU))


def shape(*dims, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(dims, dtype)


def all_reduced(nbytes, n=N):
    return 2 * (n - 1) / n * nbytes


def gathered(nbytes, n=N):
    """Also what a reduce-scatter of a whole array of `nbytes` sends."""
    return (n - 1) / n * nbytes


def plan(step, state, batch, *, device=SLOW, num_devices=N, **options):
    cluster = Cluster.flat(num_devices, device=device, links=(LINK,))
    return autopar.plan(step, state, batch, cluster=cluster, cache_dir=None, **grouped(**options))


def layouts(found):
    """The layouts of the arguments by path."""
    return {v.path: v.layout.text(found.mesh) for v in found.record.arguments}


def traffic(found):
    """Bytes sent by kind, without the few of scalars."""
    return {kind: sent for kind, (_, sent) in found.predicted.by_kind().items() if sent > 100}


def trained(loss):
    def step(params, batch):
        value, grads = jax.value_and_grad(loss)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return step


def adam(loss):
    def step(state, batch):
        value, grads = jax.value_and_grad(loss)(state["params"], batch)
        mu = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["mu"], grads)
        nu = jax.tree.map(lambda n, g: 0.99 * n + 0.01 * g * g, state["nu"], grads)
        params = jax.tree.map(lambda p, m, n: p - 0.1 * m / (jnp.sqrt(n) + 1e-8), state["params"], mu, nu)
        return {"params": params, "mu": mu, "nu": nu}, value

    return step


def mlp(params, batch):
    h = batch["x"]
    for name in sorted(params):
        h = jnp.tanh(h @ params[name])
    return jnp.mean((h - batch["y"]) ** 2)


def weights(*widths):
    return {f"w{i}": shape(a, b) for i, (a, b) in enumerate(itertools.pairwise(widths))}


def data(rows, width):
    return {"x": shape(rows, width), "y": shape(rows, width)}


# Data and tensor parallelism


@pytest.mark.parametrize("n", [2, 4, 8])
def test_many_rows_through_narrow_layers_are_data_parallel(n):
    found = plan(trained(mlp), weights(16, 32, 16), data(4096, 16), num_devices=n)
    parameter_bytes = 2 * 16 * 32 * 4
    assert {layouts(found)[f"params['w{i}']"] for i in range(2)} == {"P(None, None)"}
    assert found.predicted.by_kind() == {"all-reduce": (3, all_reduced(parameter_bytes + SCALAR, n))}
    matmul_flops = 5 * 2 * 4096 * 16 * 32  # two forward, two for the weights, one for the hidden layer
    assert found.predicted.compute_time_s == pytest.approx(matmul_flops / 1e9 / n, rel=0.01)


def test_few_rows_through_wide_layers_are_split_by_columns_then_by_rows():
    found = plan(trained(mlp), weights(512, 2048, 512), data(8, 512))
    at = layouts(found)
    assert (at["params['w0']"], at["params['w1']"]) == ('P(None, "model")', 'P("model", None)')
    # One all-reduce of the activations, forward. Nobody needs the gradient of the batch, so there is none backward.
    assert traffic(found) == {"all-reduce": all_reduced(8 * 512 * 4)}


def test_each_pair_of_layers_all_reduces_activations_once_in_each_direction():
    found = plan(trained(mlp), weights(512, 2048, 512, 2048, 512), data(8, 512))
    at = layouts(found)
    assert [at[f"params['w{i}']"] for i in range(4)] == [
        'P(None, "model")',
        'P("model", None)',
        'P(None, "model")',
        'P("model", None)',
    ]
    # Forward behind both pairs, backward in front of the second.
    assert traffic(found) == {"all-reduce": all_reduced(3 * 8 * 512 * 4)}


# Attention


def projections(layer, x):
    return (jnp.einsum("btd,dhk->bthk", x, layer[name]) for name in "qkv")


def attention(layer, x):
    q, k, v = projections(layer, x)
    scores = jax.nn.softmax(jnp.einsum("bthk,bshk->bhts", q, k), axis=-1)
    return jnp.einsum("bthk,hkd->btd", jnp.einsum("bhts,bshk->bthk", scores, v), layer["o"])


def attention_weights(width, heads, size):
    return {name: shape(width, heads, size) for name in "qkv"} | {"o": shape(heads, size, width)}


ATTENTION_BATCH = {"x": shape(1, 16, 64), "y": shape(1, 16, 64)}
ACTIVATION_BYTES = 16 * 64 * 4


def test_attention_on_one_sequence_is_split_by_heads():
    def loss(params, batch):
        return jnp.mean((attention(params, batch["x"]) - batch["y"]) ** 2)

    found = plan(trained(loss), attention_weights(64, 4, 16), ATTENTION_BATCH)
    at = layouts(found)
    assert {at[f"params['{name}']"] for name in "qkv"} == {'P(None, "model", None)'}
    assert at["params['o']"] == 'P("model", None, None)'
    assert traffic(found) == {"all-reduce": all_reduced(ACTIVATION_BYTES)}


def two_layers(prepare):
    def loss(params, batch):
        x = batch["x"]
        for layer in params:
            x = x + attention(layer, prepare(x))
        return jnp.mean((x - batch["y"]) ** 2)

    return plan(trained(loss), [attention_weights(64, 4, 16)] * 2, ATTENTION_BATCH)


def test_input_gradients_of_query_key_and_value_are_added_before_one_reduction():
    found = two_layers(lambda x: x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6))
    # Two forward; one backward, as nobody needs the gradient of the batch.
    assert sum(traffic(found).values()) == 3 * all_reduced(ACTIVATION_BYTES)


def test_input_gradients_are_added_before_one_reduction_beside_a_bypass_too():
    found = two_layers(lambda x: x)
    assert sum(traffic(found).values()) == 3 * all_reduced(ACTIVATION_BYTES)


# Embeddings


def token_loss(logits, targets):
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), targets[:, None], axis=1))


def tokens(count):
    return {"t": shape(count, dtype=jnp.int32), "y": shape(count, dtype=jnp.int32)}


def test_huge_tables_are_split_and_only_activations_are_sent():
    def loss(params, batch):
        hidden = jnp.tanh(params["table"][batch["t"]] @ params["w"])
        return token_loss(hidden @ params["out"], batch["y"])

    params = {"table": shape(4096, 64), "w": shape(64, 64), "out": shape(64, 4096)}
    found = plan(trained(loss), params, tokens(32))
    at = layouts(found)
    assert at["params['out']"] == 'P(None, "model")'
    assert at["params['table']"] in ('P("model", None)', 'P(None, "model")')
    # Hidden activations forward and their gradient backward; a maximum, a sum and a label's logit for each token.
    hidden_bytes, row_bytes = 32 * 64 * 4, 32 * 4
    sent = sum(traffic(found).values())
    assert 2 * all_reduced(hidden_bytes) < sent <= 2 * all_reduced(hidden_bytes) + 4 * all_reduced(row_bytes)


def test_two_gradients_of_one_tied_table_are_reduced_once():
    def loss(params, batch):
        hidden = jnp.tanh(params["table"][batch["t"]] @ params["w"])
        return token_loss(hidden @ params["table"].T, batch["y"])

    params = {"table": shape(64, 64), "w": shape(64, 64)}
    found = plan(trained(loss), params, tokens(4096))
    assert found.predicted.by_kind() == {"all-reduce": (3, all_reduced(2 * 64 * 64 * 4 + SCALAR))}


# Experts


def test_experts_are_split_and_tokens_go_to_them_and_back():
    def loss(params, batch):
        y, balance = experts_layer(batch["x"], params, top_k=1, capacity=8)
        return jnp.mean((y - batch["y"]) ** 2) + 0.01 * balance

    params = {"router": shape(32, 4), "expert_in": shape(4, 32, 256), "expert_out": shape(4, 256, 32)}
    found = plan(trained(loss), params, {"x": shape(4, 32, 32), "y": shape(4, 32, 32)})
    at = layouts(found)
    assert (at["params['expert_in']"], at["params['expert_out']"]) == (
        'P("expert", None, None)',
        'P("expert", None, None)',
    )
    assert {at[f"batch['{name}']"] for name in "xy"} == {'P("expert", None, None)'}
    # There and back forward, back's gradient backward; nobody needs the gradient of the batch.
    slots_bytes = 4 * 4 * 8 * 32 * 4  # experts, groups, slots, width
    assert found.predicted.by_kind()["all-to-all"] == (3, 3 * gathered(slots_bytes / N))
    assert traffic(found)["all-reduce"] == pytest.approx(all_reduced(32 * 4 * 4), abs=20)  # the router, and scalars


# Memory


LAYERS = 6
STATE = dict.fromkeys(("params", "mu", "nu"), weights(*[64] * (LAYERS + 1)))
PARAMETER_BYTES = LAYERS * 64 * 64 * 4


def limited(limit_bytes=None):
    return plan(adam(mlp), STATE, data(1024, 64), device=FASTER, memory_limit_bytes=limit_bytes)


def split_leaves(found, name):
    return sum(path.startswith(f"state['{name}']") and at != "P(None, None)" for path, at in layouts(found).items())


def test_memory_to_spare_keeps_the_state_whole():
    found = limited()
    assert [split_leaves(found, name) for name in STATE] == [0, 0, 0]
    assert traffic(found) == {"all-reduce": all_reduced(PARAMETER_BYTES + SCALAR)}


def test_memory_below_a_whole_optimiser_state_splits_it_and_sends_no_more():
    # ZeRO-1: a reduce-scatter and an all-gather are the two halves of the all-reduce.
    saved = 3 * PARAMETER_BYTES // 2  # by two moments split over four devices
    limit = limited().predicted.peak_bytes[0] - saved
    found = limited(limit)
    assert found.predicted.peak_bytes[0] <= limit
    assert (split_leaves(found, "mu"), split_leaves(found, "nu")) == (LAYERS, LAYERS)
    assert traffic(found) == {
        "reduce-scatter": gathered(PARAMETER_BYTES), "all-gather": gathered(PARAMETER_BYTES),
    }  # fmt: skip


def test_memory_below_whole_parameters_splits_them_and_gathers_them_forward_and_backward():
    # ZeRO-3: each weight is gathered for forward and again for backward; the first has no input gradient.
    found = limited(limited().predicted.peak_bytes[0] - 9 * PARAMETER_BYTES // 4)
    assert [split_leaves(found, name) for name in STATE] == [LAYERS] * 3
    assert traffic(found) == {
        "reduce-scatter": gathered(PARAMETER_BYTES),
        "all-gather": gathered(PARAMETER_BYTES) * (2 * LAYERS - 1) / LAYERS,
    }


def test_a_limit_that_nothing_meets_is_an_error_with_the_bytes_over():
    with pytest.raises(autopar.errors.MemoryLimitError, match="over"):
        limited(PARAMETER_BYTES)


# One mesh


def graph_of(step, *args, donate=(0,)):
    traced = trace(step, args, names=("params", "batch", "more")[: len(args)], donate=donate, batch=())
    return build_graph(traced, RuleBook())


def intra_op_of(graph, axis_sizes, links=(LINK,)):
    cluster = Cluster.flat(LogicalMesh(axis_sizes=axis_sizes).num_devices, device=SLOW, links=links)
    return IntraOp(graph, cost_model.cost_model(cluster, LogicalMesh(axis_sizes=axis_sizes)))


def solved(intra_op):
    """(solution, the candidate that it stands for)."""
    solution = intra_op.solve(time_limit_s=60.0)
    assert solution.status is solver.Status.OPTIMAL
    return solution, evaluated(intra_op.graph, intra_op.model, intra_op.decode(solution))


def sent_by_axes(step, args, links):
    """Bytes sent by kind and mesh axes on a (2, 2) mesh, without those of scalars."""
    graph = graph_of(step, *args)
    _, candidate = solved(intra_op_of(graph, (2, 2), links))
    sent = {}
    for use in predicted_collectives(graph, candidate.lowered, candidate.model):
        if use.sent_bytes > 100:
            sent[use.kind.value, use.axes] = sent.get((use.kind.value, use.axes), 0) + use.sent_bytes
    return sent


@pytest.mark.parametrize("slow", [0, 1])
def test_of_a_slow_and_a_fast_axis_the_large_gradients_take_the_fast_one(slow):
    # 64 rows, 64 wide inside and out, 512 between: per layer 32k parameters, and 4k activations at the ends.
    links = (SLOW_LINK, LINK) if slow == 0 else (LINK, SLOW_LINK)
    sent = sent_by_axes(trained(mlp), (weights(64, 512, 64), data(64, 64)), links)
    by_axis = {axis: sum(n for (_, axes), n in sent.items() if axis in axes) for axis in (0, 1)}
    assert by_axis[slow] < by_axis[1 - slow]


@pytest.mark.parametrize("slow", [0, 1])
def test_a_sum_over_a_slow_and_a_fast_axis_runs_as_it_was_charged(slow):
    links = (SLOW_LINK, LINK) if slow == 0 else (LINK, SLOW_LINK)
    graph = graph_of(jnp.matmul, shape(64, 4096), shape(4096, 64), donate=())
    intra_op = intra_op_of(graph, (2, 2), links)
    a, b, product, placed = intra_op.choices.nodes
    ((_, strategies),) = product.members
    columns, rows, whole = Layout(((), (0, 1))), Layout(((0, 1), ())), Layout(((), ()))
    contracted = [s.operands for s in strategies].index((columns, rows))
    choice = (a.layouts.index(columns), b.layouts.index(rows), contracted, placed.layouts.index(whole))
    chosen = dataclasses.replace(intra_op.solve(time_limit_s=60.0), choice=choice)
    candidate = evaluated(graph, intra_op.model, intra_op.decode(chosen))
    assert candidate.step_time_s == pytest.approx(intra_op.cost(choice), rel=1e-9)


# The ILP against every choice there is


def square(a, b):
    return jnp.exp(a @ b)


def chain(a, b, c):
    return jnp.tanh(a @ b) @ c


def normalised(a):
    return a / jnp.sum(a, axis=1, keepdims=True)


@pytest.mark.parametrize(
    ("function", "shapes", "axis_sizes"),
    [
        (jnp.matmul, [(4, 8), (8, 2)], (2, 2)),
        (jnp.matmul, [(2, 64), (64, 2)], (2, 2)),
        (square, [(8, 4), (4, 8)], (2, 2)),
        (jnp.dot, [(64,), (64,)], (2, 2)),
        (chain, [(64, 4), (4, 8), (8, 4)], (2,)),
        (chain, [(2, 16), (16, 64), (64, 16)], (2,)),
        (normalised, [(4, 8)], (2, 2)),
        (lambda a: jnp.max(a, axis=0), [(8, 4)], (2, 2)),
    ],
)
def test_the_solver_finds_what_trying_every_choice_finds(function, shapes, axis_sizes):
    intra_op = intra_op_of(graph_of(function, *(shape(*dims) for dims in shapes), donate=()), axis_sizes)
    best_s, _ = brute_force(intra_op.problem)
    solution, candidate = solved(intra_op)
    assert solution.objective == pytest.approx(best_s, rel=1e-9)
    assert solution.objective > 0
    # No two operations share a resharding in these: what is lowered takes what the objective says.
    assert candidate.step_time_s == pytest.approx(solution.objective, rel=1e-9)


def test_layers_that_share_their_decision_cost_what_layers_cost_that_decide_alone(monkeypatch):
    graph = graph_of(trained(mlp), weights(*[16, 64] * 8, 16), data(64, 16))
    folded = intra_op_of(graph, (2, 2))
    monkeypatch.setattr(formulation, "SMALL", len(folded.choices.nodes))
    alone = intra_op_of(graph, (2, 2))
    assert len(set(folded.classes)) < len(set(alone.classes)) == len(alone.choices.nodes)
    assert solved(folded)[0].objective == pytest.approx(solved(alone)[0].objective, rel=1e-9)


# Against the compiled program


@pytest.mark.cases(1)
@pytest.mark.parametrize(("widths", "rows"), [((16, 32, 16), 512), ((64, 256, 64), 8), ((8, 8, 8), 64)])
def test_compiled_programs_send_the_bytes_that_were_predicted(widths, rows):
    cluster = Cluster.flat(N, device=SLOW, links=(LINK,))
    step = autopar.parallelize(trained(mlp), cluster=cluster, cache_dir=None)
    keys = iter(jax.random.split(jax.random.key(0), 8))
    shapes = (weights(*widths), data(rows, widths[0]))
    args = jax.tree.map(lambda s: 0.3 * jax.random.normal(next(keys), s.shape), shapes)
    found = autopar.verify(step, *args)
    assert found.total.predicted > 0
    assert [row.predicted for row in found.collectives] == [row.compiled for row in found.collectives]
    assert found.difference <= 1e-5


def test_the_page_on_how_a_plan_is_chosen_shows_what_its_snippets_print(monkeypatch):
    monkeypatch.undo()  # as a reader runs them: sends run beside computing
    page = Path(__file__).parents[3] / "docs" / "how-a-plan-is-chosen.md"
    names, printed, compared = {}, io.StringIO(), 0
    for language, block in re.findall(r"```(\w+)\n(.*?)```", page.read_text(), flags=re.DOTALL):
        if language == "python":
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(block, names)
        else:
            assert block == printed.getvalue()
            compared += 1
    assert compared >= 7
