"""Graphs of steps in micro-batches: numbers against plain `jax.jit`, and what is refused."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar.errors import BatchMismatchError, InvalidArgumentError, MixedExamplesError, UnsupportedError
from autopar.frontend.tracing import trace
from autopar.ir.graph import OpGraph, OpKind, Section
from autopar.ir.rules import RuleBook
from autopar.ir.traced_step import TracedStep
from autopar.passes.microbatch import micro_batched
from autopar.passes.plain_loop import run_graph
from benchmarks.everyday import STEPS
from benchmarks.zoo import CASES
from benchmarks.zoo.comparison import worst_difference
from benchmarks.zoo.published.haiku_nets import hk_resnet
from tests import small_steps

RULES = RuleBook()
WIDTH, CLASSES = 6, 5


def traced(step, state, batch) -> TracedStep:
    return trace(step, (state, batch), names=("state", "batch"), donate=(0,), batch=(1,))


def check(step, state, batch, num_microbatches: int = 2) -> OpGraph:
    """The graph in micro-batches, once it is known to give what the step gives."""
    t = traced(step, state, batch)
    graph = micro_batched(t, num_microbatches, RULES)
    leaves = [jnp.asarray(x) for x in jax.tree.leaves((state, batch))]
    got = jax.tree.unflatten(t.out_tree, jax.jit(lambda leaves: run_graph(graph, leaves))(leaves))
    small_steps.assert_close(got, jax.jit(step)(state, batch))
    return graph


def weights(seed: int = 0) -> dict[str, jax.Array]:
    first, second = jax.random.split(jax.random.key(seed))
    return {"a": jax.random.normal(first, (WIDTH, WIDTH)), "b": jax.random.normal(second, (WIDTH, CLASSES))}


def examples(count: int = 8, seed: int = 0) -> dict[str, jax.Array]:
    random = np.random.default_rng(seed)
    return {
        "x": jnp.asarray(random.normal(size=(count, WIDTH)).astype(np.float32)),
        "label": jnp.asarray(random.integers(0, CLASSES, count).astype(np.int32)),
        "mask": jnp.asarray((random.uniform(size=count) < 0.7).astype(np.float32)),
    }


def losses(params, batch):
    logits = jnp.tanh(batch["x"] @ params["a"]) @ params["b"]
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), batch["label"][:, None], 1)[:, 0]


def training(loss):
    def step(params, batch):
        value, grads = jax.value_and_grad(loss)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), {"loss": value}

    return step


def counted(graph: OpGraph) -> collections.Counter:
    return collections.Counter(op.kind for op in graph.block.ops if op.eqn is None)


def products_by_section(graph: OpGraph) -> collections.Counter:
    return collections.Counter(op.section for op in graph.block.ops if op.primitive == "dot_general")


@pytest.mark.cases(2)
@pytest.mark.parametrize("num_microbatches", [1, 2, 4])
def test_a_mean_over_examples(num_microbatches):
    graph = check(training(lambda p, b: losses(p, b).mean()), weights(), examples(), num_microbatches)
    assert graph.num_microbatches == num_microbatches
    # The inputs are cut and the labels; two gradients and the loss are added up.
    assert counted(graph) == {OpKind.SPLIT: 2, OpKind.ACCUMULATE: 3}


def test_a_sum_over_examples():
    check(training(lambda p, b: losses(p, b).sum()), weights(), examples())


def test_the_update_runs_once_and_the_products_once_a_micro_batch():
    graph = check(training(lambda p, b: losses(p, b).mean()), weights(), examples(), 4)
    counts = {op.count for op in graph.block.ops if op.primitive == "dot_general"}
    assert counts == {4.0}
    assert {op.count for op in graph.block.ops if op.section is Section.AFTER} == {1.0}
    assert [op.id for op in graph.ops()] == list(range(len(list(graph.ops()))))


def test_the_number_of_micro_batches_must_divide_the_batch():
    t = traced(training(lambda p, b: losses(p, b).mean()), weights(), examples())
    with pytest.raises(BatchMismatchError, match="3 equal micro-batches, got 8 examples"):
        micro_batched(t, 3, RULES)
    with pytest.raises(InvalidArgumentError, match="num_microbatches"):
        micro_batched(t, 0, RULES)


def test_a_mean_over_what_is_not_masked():
    """The number of examples that count is known before the loop."""

    def loss(p, b):
        return (losses(p, b) * b["mask"]).sum() / jnp.maximum(b["mask"].sum(), 1.0)

    graph = check(training(loss), weights(), examples())
    assert counted(graph)[OpKind.ACCUMULATE] == 3
    (count,) = [op for op in graph.block.ops if op.primitive == "max" and op.section is Section.BEFORE]
    assert graph.values[count.outputs[0]].shape == ()


def test_results_for_each_example_are_joined_again():
    def step(p, b):
        values = losses(p, b)
        order = jnp.arange(len(values))
        return p, {"losses": values, "features": (b["x"] @ p["a"]).T, "given": b["label"], "order": order}

    graph = check(step, weights(), examples())
    assert [op.dim for op in graph.block.ops if op.kind is OpKind.STACK] == [0, 1]


def test_metrics_may_mix_examples_after_the_loop():
    def step(p, b):
        values = losses(p, b)
        metrics = {"worst": values.max(), "sorted": jnp.sort(values), "deviation": values.std(), "first": values[0]}
        return training(lambda p, b: losses(p, b).mean())(p, b)[0], metrics

    graph = check(step, weights(), examples())
    assert {op.section for op in graph.block.ops if op.primitive in ("sort", "reduce_max")} >= {Section.AFTER}


def test_dropout_has_the_masks_of_the_whole_batch():
    def loss(p, b):
        keep = jax.random.bernoulli(p["key"], 0.5, b["x"].shape)
        return losses(p, b | {"x": jnp.where(keep, b["x"] / 0.5, 0)}).mean()

    def step(p, b):
        grads = jax.grad(lambda w: loss(w | {"key": p["key"]}, b))({"a": p["a"], "b": p["b"]})
        return {"key": jax.random.split(p["key"])[0]} | jax.tree.map(lambda x, g: x - g, {k: p[k] for k in "ab"}, grads)

    graph = check(step, weights() | {"key": jax.random.PRNGKey(3)}, examples(), 4)
    (bits,) = [op for op in graph.block.ops if op.primitive in ("random_bits", "threefry2x32") and op.count == 1.0][-1:]
    assert bits.section is Section.BEFORE


@pytest.mark.cases(2)
@pytest.mark.parametrize("source", ["gathered", "drawn", "recomputed"])
def test_rows_that_the_step_draws_itself_are_worked_on_in_the_loop_of_one_micro_batch(source):
    """Of a replay buffer, or of random numbers: their products are layers, as those of the batch."""

    def loss(p, rows):
        return jnp.mean(jnp.tanh(jnp.tanh(rows @ p["a"]) @ p["b"]) ** 2)

    def step(state, b):
        key, sub = jax.random.split(state["key"])
        buffer = state["buffer"]
        rows = buffer[jax.random.randint(sub, (16,), 0, 32)]
        if source == "drawn":
            rows = jax.random.normal(sub, (16, WIDTH))
        of_rows = jax.checkpoint(loss) if source == "recomputed" else loss
        value, grads = jax.value_and_grad(of_rows)(state["w"], rows)
        w = jax.tree.map(lambda p, g: p - 0.1 * g, state["w"], grads)
        return {"w": w, "buffer": buffer.at[:8].set(b["x"]), "key": key}, value

    buffer = jax.random.normal(jax.random.key(1), (32, WIDTH))
    state = {"w": weights(), "buffer": buffer, "key": jax.random.PRNGKey(0)}
    assert products_by_section(check(step, state, examples(), 1))[Section.FORWARD] == 2
    assert products_by_section(check(step, state, examples(), 2))[Section.FORWARD] == 0


def test_products_of_parameters_alone_stay_in_front_of_the_loop():
    """Of a low-rank change of a matrix: each stage makes what it reads."""

    def loss(p, b):
        return jnp.mean((b["x"] @ (p["a"] @ p["a"])) ** 2)

    assert products_by_section(check(training(loss), weights(), examples(), 1))[Section.BEFORE] == 1


def test_a_key_for_each_example():
    def loss(p, b, key):
        noise = jax.vmap(lambda k: jax.random.normal(k, (WIDTH,)))(jax.random.split(key, len(b["x"])))
        return losses(p, b | {"x": b["x"] + noise}).mean()

    def step(state, b):
        p, key = state
        return (jax.tree.map(lambda x, g: x - g, p, jax.grad(loss)(p, b, key)), jax.random.split(key)[0])

    state = (weights(), jax.random.key(0))
    graph = micro_batched(traced(step, state, examples()), 4, RULES)
    got = run_graph(graph, jax.tree.leaves((state, examples())))
    small_steps.assert_close(got[:2], jax.tree.leaves(jax.jit(step)(state, examples())[0]))


def test_a_tied_embedding_is_added_up_once():
    case = small_steps.transformer(layers=1)
    graph = check(case.step, case.create(jax.random.key(0)), case.batch, 4)
    assert counted(graph)[OpKind.ACCUMULATE] == len(jax.tree.leaves(case.shapes)) + 1


def test_a_regulariser_is_added_once():
    def loss(p, b):
        return losses(p, b).mean() + 0.1 * sum(jnp.sum(w**2) for w in jax.tree.leaves(p))

    graph = check(training(loss), weights(), examples(), 4)
    added = [op for op in graph.block.ops if op.primitive == "add_any" and op.section is Section.AFTER]
    assert {graph.values[op.outputs[0]].shape for op in added} == {(WIDTH, WIDTH), (WIDTH, CLASSES)}


def test_gradients_are_clipped_after_the_loop():
    def step(p, b):
        grads = jax.grad(lambda p: losses(p, b).mean())(p)
        norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))
        return jax.tree.map(lambda p, g: p - g * jnp.minimum(1.0, 0.01 / norm), p, grads), norm

    graph = check(step, weights(), examples())
    assert {op.section for op in graph.block.ops if op.primitive == "sqrt"} == {Section.AFTER}


def test_layers_in_a_scan():
    def loss(p, b):
        x = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), x.sum()), b["x"], p["layers"])[0]
        return losses(p, b | {"x": x}).mean()

    layers = jax.random.normal(jax.random.key(1), (3, WIDTH, WIDTH))
    graph = check(training(loss), weights() | {"layers": layers}, examples(), 4)
    assert [op.section for op in graph.block.ops if op.kind is OpKind.SCAN] == [Section.FORWARD, Section.BACKWARD]
    assert {op.count for loop in graph.block.ops for b in loop.blocks for op in b.ops} == {12.0}


def test_time_steps_in_a_scan():
    """One matrix for all steps: its gradient is added up in the loop's carry."""

    def loss(p, b):
        def step(h, x):
            h = jnp.tanh(h @ p["a"] + x)
            return h, h

        time_major = jnp.swapaxes(b["x"].reshape(-1, 3, WIDTH), 0, 1)
        h, every = jax.lax.scan(step, jnp.zeros((len(b["x"]), WIDTH)), time_major)
        return losses(p, b | {"x": h}).mean() + jnp.mean(every**2)

    batch = examples() | {"x": jax.random.normal(jax.random.key(1), (8, 3 * WIDTH))}
    check(training(loss), weights(), batch, 4)


@pytest.mark.parametrize("policy", [None, jax.checkpoint_policies.dots_saveable])
def test_recomputed_layers(policy):
    def loss(p, b):
        hidden = jax.checkpoint(lambda p, x: jnp.tanh(jnp.tanh(x @ p["a"]) @ p["a"]), policy=policy)
        return losses(p, b | {"x": hidden(p, hidden(p, b["x"]))}).mean()

    graph = check(training(loss), weights(), examples())
    barriers = [op for op in graph.block.ops if op.kind is OpKind.BARRIER]
    assert barriers
    assert {op.section for op in barriers} == {Section.BACKWARD}


def test_a_recomputed_loss_with_a_mask():
    def loss(p, b):
        return (losses(p, b) * b["mask"]).sum() / b["mask"].sum()

    check(training(jax.checkpoint(loss)), weights(), examples())


def test_one_example_in_each_micro_batch():
    check(training(lambda p, b: (jnp.tanh(b["x"] @ p["a"]) @ p["b"]).mean()), weights(), examples(4), 4)


def test_micro_batches_that_the_user_made():
    """Each of them is cut."""

    def step(p, b):
        parts = jax.tree.map(lambda x: x.reshape(2, -1, *x.shape[1:]), b)

        def add(total, part):
            return jax.tree.map(jnp.add, total, jax.grad(lambda p: losses(p, part).sum())(p)), None

        total, _ = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, p), parts)
        return jax.tree.map(lambda p, g: p - 0.1 * g, p, total), 0.0

    check(step, weights(), examples())


def test_leaves_of_another_size_are_for_all_examples():
    def loss(p, b):
        return (losses(p, b) * b["class_weight"][b["label"]]).mean() * b["scale"]

    batch = examples() | {"class_weight": jnp.arange(1.0, CLASSES + 1), "scale": jnp.float32(2.0)}
    check(training(loss), weights(), batch)


def test_a_constant_with_a_number_for_each_example():
    def loss(p, b):
        return (losses(p, b) * np.linspace(0.5, 1, len(b["x"]), dtype=np.float32)).mean()

    check(training(loss), weights(), examples())


def test_a_loop_of_fixed_length_and_a_branch():
    def loss(p, b):
        x = jax.lax.fori_loop(0, 3, lambda i, x: jnp.tanh(x @ p["a"]) + i, b["x"])
        y = jax.lax.cond(p["a"][0, 0] > 0, lambda x: x * 2, lambda x: jnp.zeros_like(x), x)
        return losses(p, b | {"x": y}).mean()

    check(training(loss), weights(), examples())


def test_picking_by_the_number_of_the_example():
    def loss(p, b):
        logits = jax.nn.log_softmax(jnp.tanh(b["x"] @ p["a"]) @ p["b"])
        return -logits[jnp.arange(len(logits)), b["label"]].mean()

    check(training(loss), weights(), examples(), 4)


def test_examples_inside_of_a_dimension():
    def loss(p, b):
        time_major = jnp.swapaxes(b["x"].reshape(-1, 3, WIDTH), 0, 1)
        flat = jnp.tanh(jnp.sin(time_major.reshape(-1, WIDTH) @ p["a"]))
        return losses(p, b | {"x": flat.reshape(3, -1, WIDTH).sum(0)}).mean()

    check(training(loss), weights(), examples() | {"x": jax.random.normal(jax.random.key(1), (8, 3 * WIDTH))}, 4)


ROWS = np.array([0, 7, 2])  # of a table of five: one is not there


OF_SUMS = {
    "floor": lambda total: total // 3,
    "div": lambda total: jax.lax.div(total, jnp.full_like(total, 3)),
    "shift": lambda total: total.astype(jnp.int32) >> 1,
    "narrow": lambda total: total.astype(jnp.bfloat16),
    "truth": lambda total: total.astype(bool),
    "fill": lambda total: jnp.take(total, ROWS, mode="fill", fill_value=1),
    "fill by itself": lambda total: jnp.take(total, ROWS, mode="fill"),
    "fill with zero": lambda total: jnp.take(total, ROWS, mode="fill", fill_value=0),
    "clip": lambda total: jnp.take(total, ROWS, mode="clip"),
    "pad": lambda total: jnp.pad(total, 1, constant_values=1),
    "drop": lambda total: total.at[ROWS].add(2, mode="drop"),
    "select": lambda total: jnp.where(total > 3, total, 0),
    "clamp": lambda total: jnp.clip(total, 0, 3),
    "wide": lambda total: jax.lax.dot(total, jnp.full_like(total, 3), preferred_element_type=jnp.float32),
    "wide integers": lambda total: jax.lax.dot(
        total.astype(jnp.int8), jnp.full(5, 3, jnp.int8), preferred_element_type=jnp.int32
    ),
}


def test_what_is_not_linear_is_computed_of_the_whole_sum():
    """Counts that the loss gives beside itself; of whole numbers, so that what is rounded is rounded alike."""

    def loss(p, b):
        at = jnp.argmax((b["x"] @ p["a"])[:, :5], 1)
        totals = [jnp.zeros(5, dtype).at[at].add(np.asarray(40, dtype)) for dtype in (jnp.float32, jnp.int8)]
        return losses(p, b).mean(), {name: [of_sum(t) for t in totals] for name, of_sum in OF_SUMS.items()}

    def step(p, b):
        return jax.value_and_grad(loss, has_aux=True)(p, b)

    with np.errstate(invalid="ignore"):
        check(step, weights(), examples(), 4)


def batch_norm(x):
    with jax.named_scope("norm"):
        return (x - x.mean(0)) * jax.lax.rsqrt(x.var(0) + 1e-5)


def test_batch_norm_is_refused_by_name():
    def loss(p, b):
        return losses(p, b | {"x": batch_norm(b["x"] @ p["a"])}).mean()

    t = traced(training(loss), weights(), examples())
    with pytest.raises(MixedExamplesError, match=r"^norm at .*passes/test_microbatch.py:\d+:\d+ \(batch_norm\)"):
        micro_batched(t, 2, RULES)
    check(training(loss), weights(), examples(), 1)


def test_inputs_may_be_normalised_over_the_batch():
    def loss(p, b):
        return losses(p, b | {"x": batch_norm(b["x"])}).mean()

    check(training(loss), weights(), examples())


def test_a_contrastive_loss_is_refused():
    def loss(p, b):
        features = b["x"] @ p["a"]
        return -jnp.diag(jax.nn.log_softmax(features @ features.T)).mean()

    t = traced(training(loss), weights(), examples())
    with pytest.raises(MixedExamplesError, match="dot_general mixes the examples"):
        micro_batched(t, 2, RULES)
    check(training(loss), weights(), examples(), 1)


def test_a_loss_that_is_not_linear_in_the_sum_is_refused():
    t = traced(training(lambda p, b: jnp.sqrt(losses(p, b).mean())), weights(), examples())
    with pytest.raises(MixedExamplesError, match="reduce_sum"):
        micro_batched(t, 2, RULES)


def test_a_second_pass_with_new_weights_is_refused():
    first = training(lambda p, b: losses(p, b).mean())
    t = traced(lambda p, b: first(first(p, b)[0], b), weights(), examples())
    with pytest.raises(MixedExamplesError, match=r"dot_general mixes .* needs the result for each of them"):
        micro_batched(t, 2, RULES)
    check(lambda p, b: first(first(p, b)[0], b), weights(), examples(), 1)


def test_a_branch_on_the_number_of_examples_is_that_of_the_whole_batch():
    def loss(p, b):
        values = losses(p, b)
        return values.mean() if len(values) >= 8 else values.mean() + values.sum()

    check(training(loss), weights(), examples())


def test_a_written_number_of_examples():
    def loss(p, b):
        return (losses(p, b) * jnp.arange(8.0)).mean()

    check(training(loss), weights(), examples())


def test_a_power_that_is_the_number_of_examples_is_that_of_the_whole_batch():
    check(training(lambda p, b: (losses(p, b) ** len(b["x"])).mean()), weights(), examples())


# The zoo, and published and everyday steps: what is refused, and how that is said.
REFUSED = {
    "fixed_point": "reduce_max mixes",  # how long it iterates depends on all examples
    "resnet": "^ResNet/BatchNorm_0 at .*reduce_sum mixes",
    "nnx_model": r"reduce_sum at .*nnx_model.py.*reduce_sum mixes",
}
ALSO_REFUSED = {
    STEPS["clip"]: r"dot_general mixes the examples of the batch \(it reads examples in several places\)",
    STEPS["gan"]: "conv_general_dilated mixes .* needs the result for each",  # evaluates the new weights in the step
    STEPS["gnn"]: r"scatter-add mixes .* \(it sums over examples",  # one graph of all: nodes read others
    hk_resnet: "^res_net/initial_batchnorm at .*reduce_sum mixes",
}
QUICK = {("dropout", 4), ("bookkeeping", 2), ("loss_scaling", 2), ("lstm", 4)}
ACCEPTED = [(name, m) for name in CASES if name not in REFUSED for m in ((2, 3) if name == "gpt_odd" else (2, 4))]


def zoo_step(make):
    case = make()
    state, batch = jax.jit(case.init)(jax.random.key(0)), jax.tree.map(jnp.asarray, case.batch(0))
    return case, traced(case.step, state, batch), state, batch


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("make", "said"), [*((CASES[name], said) for name, said in REFUSED.items()), *ALSO_REFUSED.items()]
)
def test_a_step_of_the_zoo_is_refused(make, said):
    t = zoo_step(make)[1]
    with pytest.raises(UnsupportedError, match=said):
        micro_batched(t, 2, RULES)


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("name", "num_microbatches"),
    [case if case in QUICK else pytest.param(*case, marks=pytest.mark.slow) for case in ACCEPTED],
)
def test_a_step_of_the_zoo_gives_what_it_gives_on_the_whole_batch(name, num_microbatches):
    case, t, state, batch = zoo_step(CASES[name])
    graph = micro_batched(t, num_microbatches, RULES)
    leaves = jax.jit(lambda state, batch: run_graph(graph, jax.tree.leaves((state, batch))))(state, batch)
    got = jax.tree.unflatten(t.out_tree, leaves)
    difference = worst_difference(case, jax.jit(case.step)(state, batch), got)
    assert difference.relative <= case.tolerance, difference
