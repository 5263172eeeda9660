"""What values are and what their dimensions count, followed through small steps by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar.frontend.build_graph import build_graph
from autopar.frontend.tracing import trace
from autopar.ir.graph import Dimension, Purpose
from autopar.ir.rules import RuleBook
from autopar.ir.semantics import annotate_semantics
from autopar.ops.attention.checks import score_products
from benchmarks.zoo import CASES

EXAMPLE, SEQUENCE, EXPERT, HEAD = Dimension.EXAMPLE, Dimension.SEQUENCE, Dimension.EXPERT, Dimension.HEAD


def graph_of(step, state, batch):
    traced = trace(step, (state, batch), names=("state", "batch"), donate=(0,), batch=(1,))
    return annotate_semantics(build_graph(traced, RuleBook()))


def of(graph, primitive):
    """(dimensions, purpose) of the first result of the first operation of a kind."""
    value = next(graph.values[op.outputs[0]] for op in graph.ops() if op.primitive == primitive)
    return [set(names) for names in value.dimensions], value.purpose


def arguments(graph):
    return {graph.values[v].name: graph.values[v].purpose for v in graph.block.inputs}


def shape(*sizes, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(sizes, dtype)


def test_examples_pass_through_products():
    graph = graph_of(lambda w, x: (w, x @ w), shape(8, 4), shape(16, 8))
    assert of(graph, "dot_general") == ([{EXAMPLE}, set()], Purpose.ACTIVATION)


def test_positions_are_followed_through_a_reshape_and_back():
    def step(w, tokens):
        flat = jnp.take(w, tokens.reshape(-1), axis=0)
        return w, jnp.sin(flat).reshape(16, 32, 8)

    graph = graph_of(step, shape(64, 8), shape(16, 32, dtype=np.int32))
    assert of(graph, "sin") == ([{EXAMPLE, SEQUENCE}, set()], Purpose.ACTIVATION)
    result = graph.values[graph.block.outputs[1]]
    assert [set(names) for names in result.dimensions] == [{EXAMPLE}, {SEQUENCE}, set()]


def test_the_last_dimension_of_real_numbers_holds_features():
    graph = graph_of(lambda w, x: (w, jnp.sin(x)), shape(4), shape(16, 32, 8))
    assert of(graph, "sin")[0] == [{EXAMPLE}, {SEQUENCE}, set()]


def test_positions_reach_what_is_added_to_them():
    graph = graph_of(lambda p, x: (p, x + jnp.sin(p)), shape(32, 8), shape(16, 32, 8))
    assert of(graph, "sin")[0] == [{SEQUENCE}, set()]


def test_a_scan_hands_names_inside_and_outside():
    def step(w, x):
        def body(carry, slice_):
            return jnp.sin(carry + slice_), jnp.cos(slice_)

        last, stacked = jax.lax.scan(body, jnp.zeros((16, 8)), jnp.moveaxis(x, 1, 0))
        return w, (last, stacked)

    graph = graph_of(step, shape(4), shape(16, 32, 8))
    assert of(graph, "sin")[0] == [{EXAMPLE}, set()]
    stacked = graph.values[graph.block.outputs[2]]
    assert [set(names) for names in stacked.dimensions] == [{SEQUENCE}, {EXAMPLE}, set()]


def test_joined_batches_count_examples_and_so_do_their_parts():
    def step(w, batch):
        hidden = jnp.tanh(jnp.concatenate([batch["a"], batch["b"]]) @ w)
        first, second = jnp.split(hidden, 2)
        return w, jnp.exp(first) - jnp.sin(hidden[8:]) + second

    graph = graph_of(step, shape(4, 6), {"a": shape(8, 4), "b": shape(8, 4)})
    for primitive in ("concatenate", "tanh", "split", "exp", "slice", "sin"):
        assert of(graph, primitive)[0][0] == {EXAMPLE}


def test_of_what_is_joined_to_examples_nothing_is_known():
    graph = graph_of(lambda w, x: (w, jnp.exp(jnp.concatenate([x, w]))), shape(4, 6), shape(8, 6))
    assert of(graph, "exp")[0] == [set(), set()]


@pytest.mark.parametrize(
    "taken",
    [
        lambda t: t[:, :-1],
        lambda t: t[:, 1:],
        lambda t: t[:, :20],
        lambda t: jnp.roll(t, 1, axis=1),
        lambda t: jnp.pad(t, ((0, 0), (1, 0)))[:, :-1],
        lambda t: jnp.pad(t, ((0, 0), (0, 7))),
        lambda t: jnp.concatenate([jnp.ones((16, 1), t.dtype), t[:, :-1]], axis=1),
        lambda t: jnp.roll(t, 1, axis=1).at[:, 0].set(1),
        lambda t: jax.lax.dynamic_slice_in_dim(t, 1, 32, axis=1),
        lambda t: jax.lax.dynamic_update_slice_in_dim(jnp.zeros((16, 40), t.dtype), t, 4, axis=1),
    ],
)
def test_pieces_of_sequences_count_positions(taken):
    graph = graph_of(
        lambda w, t: (w, jnp.sin(jnp.take(w, taken(t), axis=0))), shape(64, 8), shape(16, 33, dtype=np.int32)
    )
    assert of(graph, "sin")[0] == [{EXAMPLE}, {SEQUENCE}, set()]


def test_the_whole_of_which_pieces_are_positions_counts_positions():
    def step(w, x):
        first = jnp.broadcast_to(jnp.sin(w), (16, 1, 8))  # the class of an image, in front of its patches
        return w, jnp.cos(jnp.concatenate([first, x], axis=1))

    assert of(graph_of(step, shape(8), shape(16, 32, 8)), "cos")[0] == [{EXAMPLE}, {SEQUENCE}, set()]


def test_pieces_of_what_counts_more_than_positions_have_no_name():
    graph = graph_of(lambda w, x: (w, jnp.sin(x.reshape(-1, 8)[:7])), shape(4), shape(16, 32, 8))
    assert of(graph, "sin")[0] == [set(), set()]


def test_experts_are_what_a_product_of_weights_keeps_apart():
    case = CASES["moe"]()
    graph = graph_of(case.step, jax.eval_shape(case.init, jax.random.key(0)), case.batch(0))
    expert = {
        graph.values[v].name: [d for d, names in enumerate(graph.values[v].dimensions) if EXPERT in names]
        for v in graph.block.inputs
    }
    assert {name for name, dims in expert.items() if "expert_in" in name or "expert_out" in name} == {
        name for name, dims in expert.items() if dims == [0]
    }


def test_heads_are_what_products_of_positions_keep_apart():
    def forward(w, x):
        heads = (x @ w).reshape(*x.shape[:2], 2, 4)
        return jnp.einsum("bqhd,bkhd->bhqk", heads, heads)

    graph = graph_of(trained(forward), shape(8, 8), shape(16, 32, 8))
    assert of(graph, "dot_general")[0] == [{EXAMPLE}, {SEQUENCE}, {HEAD}]
    assert [op.outputs for op in score_products(graph)] == [
        op.outputs for op in graph.ops() if graph.values[op.outputs[0]].shape == (16, 2, 32, 32) and op.rule is not None
    ][:1]
    scores = graph.values[next(score_products(graph)).outputs[0]]
    assert [set(names) for names in scores.dimensions] == [{EXAMPLE}, {HEAD}, {SEQUENCE}, {SEQUENCE}]


def test_purposes_of_a_training_step():
    case = CASES["gpt_adamw"](layers=1)
    graph = graph_of(case.step, jax.eval_shape(case.init, jax.random.key(0)), case.batch(0))
    found = arguments(graph)
    for name, purpose in found.items():
        if name.startswith("batch"):
            assert purpose is Purpose.BATCH
        elif ".mu" in name or ".nu" in name:
            assert purpose is Purpose.OPTIMIZER
        elif name.endswith("['kernel']"):
            assert purpose is Purpose.MATRIX
        elif name.endswith(("['scale']", "['bias']")):
            assert purpose is Purpose.PARAMETER
    updated = graph.values[graph.block.outputs[graph.tied[0][1]]]
    assert updated.purpose is Purpose.UPDATE


@pytest.mark.parametrize("around", [lambda layer: layer, jax.checkpoint])
def test_weights_behind_the_barriers_of_recomputation_are_matrices(around):
    """A barrier hands on weights beside what depends on the examples."""

    def layer(h, w):
        w, h = jax.lax.optimization_barrier((w, h))
        return jnp.tanh(h @ w), None

    def loss(w, x):
        group = around(lambda h, w: jax.lax.scan(jax.checkpoint(layer), h, w))
        return jnp.sum(jax.lax.scan(group, x, w)[0])

    def step(w, x):
        return w - jax.grad(loss)(w, x), 0.0

    graph = graph_of(step, shape(2, 3, 4, 4), shape(8, 4))
    assert graph.values[graph.block.inputs[0]].purpose is Purpose.MATRIX


def test_gradients_hold_no_examples():
    def step(w, x):
        return w - jax.grad(lambda w: jnp.sum(jnp.sin(x @ w)))(w), 0.0

    graph = graph_of(step, shape(8, 4), shape(16, 8))
    backward = [op for op in graph.ops() if op.primitive == "dot_general"][-1]
    assert graph.values[backward.outputs[0]].purpose is Purpose.GRADIENT


def test_names_survive_the_cut_into_micro_batches():
    from autopar.passes.microbatch import micro_batched

    case = CASES["mlp"](batch=16)
    state = jax.eval_shape(case.init, jax.random.key(0))
    traced = trace(case.step, (state, case.batch(0)), names=("state", "batch"), donate=(0,), batch=(1,))
    graph = annotate_semantics(micro_batched(traced, 4, RuleBook()))
    assert of(graph, "dot_general")[0][0] == {EXAMPLE}


def widths(step, *shapes):
    """The dimensions of the arguments in front of the batch, and whether each is handed on from layer to layer."""
    graph = graph_of(step, *shapes)
    values = [graph.values[v] for i, v in enumerate(graph.block.inputs) if i not in graph.batch]
    return [[Dimension.FEATURE in names for names in v.dimensions] for v in values]


def trained(forward):
    """A training step whose loss is the mean of what a function makes."""

    def step(params, x):
        return jax.grad(lambda params: jnp.mean(forward(params, x) ** 2))(params), x

    return step


def test_of_two_widths_that_a_matrix_joins_one_is_handed_on():
    def forward(params, x):
        for first, second in params:
            x = x + jnp.tanh(x @ first) @ second
        return x

    pair = (shape(8, 32), shape(32, 8))
    assert widths(trained(forward), [pair, pair], shape(16, 8)) == [[True, False], [False, True]] * 2


def test_without_a_residual_stream_columns_are_inner_widths_then_rows():
    def forward(params, x):
        for matrix in params:
            x = jnp.tanh(x @ matrix)
        return x

    shapes = [shape(8, 16), shape(16, 24), shape(24, 4)]
    assert widths(trained(forward), shapes, shape(32, 8)) == [[True, False], [False, True], [True, False]]


def test_a_matrix_whose_result_is_added_to_what_it_reads_tells_no_widths_apart():
    assert widths(trained(lambda w, x: x + jnp.tanh(x @ w)), shape(8, 8), shape(16, 8)) == [[False, False]]


def test_an_embedding_in_front_does_not_decide_which_width_is_handed_on():
    def forward(params, x):
        embedding, (first, second) = params
        x = x @ embedding
        return x + jnp.tanh(x @ first) @ second

    shapes = (shape(4, 8), (shape(8, 32), shape(32, 8)))
    assert widths(trained(forward), shapes, shape(16, 4)) == [[False, True], [True, False], [False, True]]


def test_an_embedding_as_a_product_with_ones_looks_rows_up():
    """The words that it reads and that the logits make again are no width that layers hand on."""

    def forward(params, tokens):
        embedding, (first, second) = params
        x = jax.nn.one_hot(tokens, 64) @ embedding
        return jax.nn.log_softmax((x + jnp.tanh(x @ first) @ second) @ embedding.T)

    def step(params, tokens):
        return jax.grad(lambda params: jnp.mean(forward(params, tokens) ** 2))(params), tokens

    shapes = (shape(64, 8), (shape(8, 32), shape(32, 8)))
    of_weights = widths(step, shapes, shape(16, 4, dtype=np.int32))
    assert of_weights == [[False, True], [True, False], [False, True]]


def test_a_layer_that_reads_categories_as_ones_hands_them_on():
    """Its columns are cut, then the rows of the next one, as behind any other input."""

    def forward(params, categories):
        first, second = params
        return jnp.tanh(jax.nn.one_hot(categories, 64) @ first) @ second

    shapes = (shape(64, 32), shape(32, 4))
    assert widths(trained(forward), shapes, shape(16, dtype=np.int32)) == [[True, False], [False, True]]


def sides(forward, weights, x):
    """The sides of each weight's dimensions, and of those of what it becomes."""

    def step(weights, x):
        grads = jax.grad(lambda weights: jnp.sum(forward(weights, x) ** 2))(weights)
        return jax.tree.map(lambda w, g: w - g, weights, grads), x

    graph = graph_of(step, weights, x)
    before = [graph.values[v].sides for i, v in enumerate(graph.block.inputs) if i not in graph.batch]
    assert before == [graph.values[graph.block.outputs[after]].sides for _, after in graph.tied]
    assert all(not any(v.sides) for v in graph.values if v.purpose in (Purpose.BATCH, Purpose.ACTIVATION))
    return [["".join(sorted(side.value for side in names)) for names in of_weight] for of_weight in before]


def test_a_matrix_has_an_input_and_an_output_side_and_its_bias_none():
    found = sides(lambda weights, x: x @ weights[0] + weights[1], (shape(8, 4), shape(4)), shape(16, 8))
    assert found == [["input", "output"], [""]]


def test_a_matrix_that_is_read_both_ways_has_both_sides():
    assert sides(lambda w, x: (x @ w) @ w.T, shape(8, 4), shape(16, 8)) == [["inputoutput", "inputoutput"]]


def test_heads_are_an_output_and_experts_no_side():
    assert sides(lambda w, x: jnp.einsum("bd,dhe->bhe", x, w), shape(8, 4, 2), shape(16, 8)) == [
        ["input", "output", "output"]
    ]
    assert sides(lambda w, x: jnp.einsum("ebd,edf->ebf", jnp.stack([x] * 4), w), shape(4, 8, 6), shape(16, 8)) == [
        ["", "input", "output"]
    ]
    assert sides(lambda w, x: jax.lax.ragged_dot(x, w, jnp.full(4, 4, jnp.int32)), shape(4, 8, 6), shape(16, 8)) == [
        ["", "input", "output"]
    ]


def of_arguments(step, *shapes, donate=()):
    traced = trace(step, shapes, names=("params", "batch"), donate=donate, batch=(1,))
    graph = annotate_semantics(build_graph(traced, RuleBook()))
    return graph, [graph.values[v] for v in graph.block.inputs]


def test_in_a_step_without_gradients_all_is_forward_and_what_is_no_batch_is_a_parameter():
    def step(params, x):
        return {"loss": jnp.mean(jnp.tanh(x @ params["first"] + params["bias"]) @ params["second"])}

    params = {"bias": shape(32), "first": shape(8, 32), "second": shape(32, 8)}
    graph, (bias, first, second, x) = of_arguments(step, params, shape(16, 8))
    assert [v.purpose for v in (bias, first, second, x)] == [
        Purpose.PARAMETER, Purpose.MATRIX, Purpose.MATRIX, Purpose.BATCH,
    ]  # fmt: skip
    assert [Dimension.FEATURE in names for names in first.dimensions] == [True, False]
    assert of(graph, "tanh") == ([{EXAMPLE}, set()], Purpose.ACTIVATION)


def test_parameters_need_not_be_given_up():
    step = trained(lambda w, x: jnp.tanh(x @ w[0]) @ w[1])
    _, (first, second, x) = of_arguments(step, [shape(8, 16), shape(16, 8)], shape(32, 8))
    assert [v.purpose for v in (first, second, x)] == [Purpose.MATRIX, Purpose.MATRIX, Purpose.BATCH]
