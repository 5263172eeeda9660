"""Equal matrices of the update are stacked, and the stack is split: the numbers are those of jax.jit."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import autopar
from autopar import recipes
from autopar.cost.roofline import flops_of
from autopar.frontend.build_graph import build_graph
from autopar.frontend.tracing import trace
from autopar.ir.graph import OpKind, Role
from autopar.passes.stack_updates import stack_updates
from tests.passes.matrix_optimizers import muon, optax_muon, shampoo, soap
from tests.sections import BOOK
from tests.small_steps import grouped, slow_cluster

WIDTH = 16


def examples(seed=0):
    return np.random.default_rng(seed).normal(size=(32, WIDTH)).astype(np.float32)


def training(optimizer, *, scanned, layers=3):
    """A step of residual layers with two square matrices, a wide one and a tall one each, and its state."""

    def layer(x, p):
        x = x + jnp.tanh(x @ p["a"]) @ p["b"]
        return x + jnp.tanh(x @ p["up"]) @ p["down"]

    def loss_of(params, x):
        y = x @ params["first"]
        if scanned:
            y, _ = jax.lax.scan(lambda y, p: (layer(y, p), None), y, params["layers"])
        else:
            for p in params["layers"]:
                y = layer(y, p)
        return jnp.mean((y - x) ** 2)

    def step(state, batch):
        grads = jax.grad(loss_of)(state["params"], batch)
        updates, new = optimizer.update(grads, state["optimizer"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "optimizer": new}, None

    drawn = np.random.default_rng(0)
    shapes = {"a": (WIDTH, WIDTH), "b": (WIDTH, WIDTH), "up": (WIDTH, 2 * WIDTH), "down": (2 * WIDTH, WIDTH)}
    each = [
        {n: drawn.normal(size=s).astype(np.float32) / s[0] ** 0.5 for n, s in shapes.items()} for _ in range(layers)
    ]
    made = jax.tree.map(lambda *ps: np.stack(ps), *each) if scanned else each
    params = {"first": np.eye(WIDTH, dtype=np.float32), "layers": made}
    return step, jax.tree.map(jnp.asarray, {"params": params, "optimizer": optimizer.init(params)})


def graph_of(step, state, batch):
    return build_graph(trace(step, (state, batch), names=("state", "batch"), donate=(0,), batch=(1,)), BOOK)


def update_products(graph):
    """The shapes of the results of the update's products and decompositions."""
    names = {"dot_general", "eigh", "qr"}
    ops = (op for op in graph.ops() if op.role is Role.UPDATE and op.primitive in names)
    return [graph.values[op.outputs[0]].shape for op in ops]


def check_equal(step, state, *, num_devices, tolerance=1e-5, **options):
    """Two steps under autopar, and under plain jax.jit."""
    split = autopar.parallelize(step, cluster=slow_cluster(num_devices), **grouped(**options))
    expected, got = state, jax.tree.map(jnp.array, state)
    for seed in range(2):
        expected, _ = jax.jit(step)(expected, examples(seed))
        got, _ = split(got, examples(seed))
    for want, have in zip(jax.tree.leaves(expected), jax.tree.leaves(got), strict=True):
        scale = max(float(np.abs(want).max()), 1e-6)
        np.testing.assert_allclose(np.asarray(have) / scale, np.asarray(want) / scale, rtol=0, atol=tolerance)
    return split.plan(state, examples())


def test_matrices_of_layers_are_one_stack_in_rounds_of_one_for_each_device():
    step, state = training(muon(), scanned=False)
    graph = graph_of(step, state, examples())
    stacked = stack_updates(graph, 4, flops_of, BOOK)
    # 6 square matrices in two rounds of four, in a loop; 6 of 16 x 32, tall ones transposed, in two.
    assert len(update_products(graph)) == 12 * 15
    assert sorted(set(update_products(stacked))) == [(4, 16, 16), (4, 16, 32)]
    assert len(update_products(stacked)) == 2 * 15
    loops = [op for op in stacked.block.ops if op.kind is OpKind.SCAN and op.role is Role.UPDATE]
    assert sorted(loop.trips for loop in loops) == [2, 2]


def test_stacked_layers_are_taken_apart_where_the_devices_do_not_divide_them():
    step, state = training(muon(), scanned=True)
    stacked = stack_updates(graph_of(step, state, examples()), 4, flops_of, BOOK)
    assert sorted(set(update_products(stacked))) == [(4, 1, 16, 16), (4, 1, 16, 32)]
    step, state = training(muon(), scanned=True, layers=4)
    graph = graph_of(step, state, examples())
    assert stack_updates(graph, 4, flops_of, BOOK) is graph


def test_a_single_matrix_and_products_with_vectors_stay():
    def step(state, batch):
        grads = jax.grad(lambda p: jnp.mean((batch @ p["a"]) ** 2) + jnp.mean((batch @ p["b"]) ** 2))(state["p"])
        vectors = {n: grads[n] @ state["v"][n] for n in grads}
        return {"p": jax.tree.map(lambda p, g: p - 0.1 * g, state["p"], grads), "v": vectors}, None

    matrix, vector = jax.ShapeDtypeStruct((16, 16), np.float32), jax.ShapeDtypeStruct((16,), np.float32)
    state = {"p": {"a": matrix, "b": matrix}, "v": {"a": vector, "b": vector}}
    graph = graph_of(step, state, jax.ShapeDtypeStruct((8, 16), np.float32))
    assert stack_updates(graph, 4, flops_of, BOOK) is graph

    def alone(state, batch):
        grad = jax.grad(lambda p: jnp.mean((batch @ p) ** 2))(state)
        return state - grad @ grad.T @ grad, None

    graph = graph_of(alone, matrix, jax.ShapeDtypeStruct((8, 16), np.float32))
    assert stack_updates(graph, 4, flops_of, BOOK) is graph


def test_matrices_that_read_one_another_are_not_of_one_stack():
    def step(state, batch):
        grads = jax.grad(lambda p: jnp.mean((batch @ p["a"]) ** 2) + jnp.mean((batch @ p["b"]) ** 2))(state)

        def direction(g):
            return g @ g.T @ g

        a = direction(grads["a"])
        b = direction(grads["b"] + jnp.tanh(jnp.sum(a)) * grads["b"])
        return {"a": state["a"] - a, "b": state["b"] - b}, None

    matrix = jax.ShapeDtypeStruct((16, 16), np.float32)
    graph = graph_of(step, {"a": matrix, "b": matrix}, jax.ShapeDtypeStruct((8, 16), np.float32))
    assert stack_updates(graph, 4, flops_of, BOOK) is graph


def test_what_examples_pass_outside_of_the_gradient_is_not_stacked():
    """Two equal teachers multiply examples, whose dimension is split as it is."""

    def step(state, batch):
        targets = [jnp.tanh(batch @ t @ t.T) for t in state["teachers"]]
        grad = jax.grad(lambda p: sum(jnp.mean((batch @ p - t) ** 2) for t in targets))(state["p"])
        return {"p": state["p"] - grad, "teachers": state["teachers"]}, None

    matrix = jax.ShapeDtypeStruct((16, 16), np.float32)
    state = {"p": matrix, "teachers": [matrix, matrix]}
    graph = graph_of(step, state, jax.ShapeDtypeStruct((64, 16), np.float32))
    assert stack_updates(graph, 4, flops_of, BOOK) is graph


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("optimizer", "scanned"),
    [
        (muon(1e-2), False),
        (muon(1e-2), True),
        (shampoo(1e-2, damping=1e-2), True),
        # Small roots and nearly equal eigenvalues would show the rounding of sums over devices.
        (soap(1e-2, damping=1.0, epsilon=1e-2), False),
    ],
    ids=["muon", "muon scanned", "shampoo scanned", "soap"],
)
def test_zero3_gives_the_numbers_of_jit(optimizer, scanned):
    step, state = training(optimizer, scanned=scanned)
    plan = check_equal(step, state, num_devices=4, plan=autopar.recipes.zero(3))
    assert plan.record.stacked_over == 4


def test_tensor_parallelism_of_matrices_that_the_update_stacks():
    """What the rows of one matrix count, those of the other do not, though an optimizer has both in one stack."""
    drawn = np.random.default_rng(0)
    state = [jnp.asarray(drawn.normal(size=(WIDTH, WIDTH)) / 4, jnp.float32) for _ in range(2)]

    def step(state, batch):
        grads = jax.grad(lambda p: jnp.mean(jnp.square(jnp.tanh(batch @ p[0]) @ p[1] - batch)))(state)
        stack = jnp.stack(grads)
        stack = stack / (1e-3 + jnp.sqrt(jnp.mean(jnp.square(stack), axis=(1, 2), keepdims=True)))
        return [p - 0.1 * stack[i] for i, p in enumerate(state)], None

    plan = check_equal(step, state, num_devices=4, plan=recipes.tensor_parallel())
    assert [s.spec for s in plan.state_shardings] == [P(None, "model"), P("model")]


@pytest.mark.slow
def test_the_free_search_on_eight_devices():
    step, state = training(muon(1e-2), scanned=True)
    assert check_equal(step, state, num_devices=8).record.stacked_over == 8


def test_zero1_on_eight_devices():
    step, state = training(muon(1e-2), scanned=False, layers=2)
    assert check_equal(step, state, num_devices=8, plan=autopar.recipes.zero(1)).record.stacked_over == 8


def test_optax_muon():
    step, state = training(optax_muon(), scanned=False, layers=2)
    assert check_equal(step, state, num_devices=4, plan=autopar.recipes.zero(3)).record.stacked_over == 4


def test_in_bfloat16_as_near_as_its_rounding():
    step, state = training(muon(1e-2, dtype=jnp.bfloat16), scanned=True)
    check_equal(step, state, num_devices=4, tolerance=2e-3, plan=autopar.recipes.zero(3))


def test_a_condition_of_all_matrices_stays_one_and_one_of_each_is_not_stacked():
    def chain(predicate_of):
        def direction(g, count):
            return jax.lax.cond(predicate_of(g, count), lambda g: g @ g.T @ g, lambda g: g, g)

        def step(state, batch):
            grads = jax.grad(lambda p: sum(jnp.mean((batch @ m) ** 2) for m in p))(state["p"])
            new = [p - direction(g, state["count"]) for p, g in zip(state["p"], grads, strict=True)]
            return {"p": new, "count": state["count"] + 1}, None

        matrix = jax.ShapeDtypeStruct((16, 16), np.float32)
        state = {"p": [matrix, matrix, matrix], "count": jax.ShapeDtypeStruct((), np.int32)}
        return graph_of(step, state, jax.ShapeDtypeStruct((8, 16), np.float32))

    shared = chain(lambda g, count: count % 2 == 0)
    stacked = stack_updates(shared, 4, flops_of, BOOK)
    assert sum(op.kind is OpKind.COND for op in shared.ops()) == 3
    assert sum(op.kind is OpKind.COND for op in stacked.ops()) == 1
    own = chain(lambda g, count: jnp.sum(g) > 0)
    assert stack_updates(own, 4, flops_of, BOOK) is own


def test_a_plan_from_a_file_has_its_stacks(tmp_path):
    step, state = training(muon(1e-2), scanned=True)
    plan = autopar.plan(step, state, examples(), cluster=slow_cluster(4), plan=autopar.recipes.zero(3))
    plan.save(tmp_path / "plan.json")
    loaded = autopar.Plan.load(tmp_path / "plan.json")
    assert loaded.record.stacked_over == 4
    check_equal(step, state, num_devices=4, plan=loaded)


def test_one_stage_in_micro_batches_stacks_what_comes_after_them():
    step, state = training(muon(1e-2), scanned=False)
    plan = check_equal(step, state, num_devices=4, plan=autopar.recipes.combine(zero=3, num_microbatches=2))
    assert plan.record.stacked_over == 4
    assert plan.record.pipeline.num_microbatches == 2


def test_stages_update_their_own_layers():
    step, state = training(muon(1e-2), scanned=False, layers=2)
    plan = check_equal(step, state, num_devices=4, plan=autopar.recipes.pipeline(2, num_microbatches=2))
    assert plan.record.stacked_over == 0
    assert len(plan.record.pipeline.stages) == 2
