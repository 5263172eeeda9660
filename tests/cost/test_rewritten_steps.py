"""What XLA's TPU compiler makes of operations before it fuses them: literal programs, and one that it compiles."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import optax
import pytest

import autopar
from autopar import recipes
from autopar.common import jax_compat
from autopar.cost.peak_memory import (
    GPU,
    TPU,
    MemoryProgram,
    MemoryStep,
    allocated_bytes,
    live_ranges,
    shifted_scores,
    with_sunk_broadcasts,
)
from autopar.cost.xla_program import puts_one_in_each_row
from autopar.verification import compile_for_target
from tests.cost.test_peak_memory import BIG, Builder, peak


def step(kind, inputs, output, **fields):
    return MemoryStep(inputs=inputs, outputs=(output,), kind=kind, fusible=kind != "scan", **fields)


def test_a_mask_that_a_loop_reads_is_made_in_its_body():
    row, mask, shifted_mask, x, inner_mask, inner_x, out, result = range(8)
    nbytes = dict.fromkeys(range(8), 1000) | {row: 10}
    body = (step("add", (inner_x, inner_mask), out),)
    inside = dict(body=body, body_inputs=(inner_mask, inner_x), body_outputs=(out,))
    loop = step("scan", (shifted_mask, x), result, **inside, num_constants=1, num_carried=1)
    like = {}
    steps = (step("broadcast_in_dim", (row,), mask), step("neg", (mask,), shifted_mask), loop)
    (sunk,) = with_sunk_broadcasts(steps, (result,), nbytes, like)
    assert like == {-1: row, -2: mask, -3: shifted_mask}
    assert (sunk.inputs, sunk.body_inputs, sunk.num_constants) == ((row, x), (-1, inner_x), 1)
    assert [(s.kind, s.inputs, s.outputs) for s in sunk.body] == [
        ("broadcast_in_dim", (-1,), (-2,)),
        ("neg", (-2,), (-3,)),
        ("reshape", (-3,), (inner_mask,)),
        ("add", (inner_x, inner_mask), (out,)),
    ]
    (kept, _, _) = with_sunk_broadcasts(steps, (result, shifted_mask), nbytes, {})
    assert kept == steps[0], "what is read outside as well stays there too"


def test_a_value_that_is_no_broadcast_stays_outside_of_a_loop():
    big, made, x, inner, inner_x, out, result = range(7)
    inside = dict(body=(step("add", (inner_x, inner), out),), body_inputs=(inner, inner_x), body_outputs=(out,))
    loop = step("scan", (made, x), result, **inside, num_constants=1, num_carried=1)
    steps = (step("exp", (big,), made), loop)
    assert with_sunk_broadcasts(steps, (result,), dict.fromkeys(range(7), 1000), {}) == steps


def test_a_broadcast_in_a_body_has_the_size_of_a_value_of_the_program_where_another_one_was_sunk_beside_it():
    row, table, shifted, x, inner, inner_x, out, result = range(8)
    nbytes = dict.fromkeys(range(8), 1000) | {row: 20}
    body = (step("add", (inner_x, inner), out),)
    inside = dict(body=body, body_inputs=(inner, inner_x), body_outputs=(out,))
    loop = step("scan", (shifted, x), result, **inside, num_constants=1, num_carried=1)
    steps = (step("broadcast_in_dim", (row,), table), step("mul", (table, row), shifted), loop)
    program = MemoryProgram(steps=steps, nbytes=nbytes, arguments=(row, x), results=(result,), donated={})
    assert {r.value for r in live_ranges(program, TPU)} <= set(nbytes)
    assert peak(program, TPU) == 1000, "the result, which is carried; the table is made where it is read"


def table_layer(x, w):
    return (x @ w) * (jnp.arange(128.0)[:, None] * jnp.arange(32.0)).astype(x.dtype), None


@pytest.mark.cases(7)
@pytest.mark.parametrize("form", ["scan", "scan, checkpoint", "unrolled", "unrolled, checkpoint"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("preset", ["tpu-v5e:2x4", "tpu-v5p:2x2x2"])
def test_a_constant_table_made_in_the_body_of_a_layer_is_planned_for_a_tpu(form, dtype, preset):
    layer = jax.checkpoint(table_layer) if "checkpoint" in form else table_layer

    def loss(p, x):
        p, x = p.astype(dtype), x.astype(dtype)
        if "scan" in form:
            return jnp.mean(jax.lax.scan(layer, x, p)[0] ** 2)
        for w in p:
            x, _ = layer(x, w)
        return jnp.mean(x**2)

    def step(p, x):
        value, gradient = jax.value_and_grad(loss)(p, x)
        return p - gradient, value

    made = autopar.parallelize(step, cluster=preset, cache_dir=None)
    plan = made.plan(jax.ShapeDtypeStruct((2, 32, 32), jnp.float32), jax.ShapeDtypeStruct((16, 128, 32), jnp.float32))
    assert max(plan.predicted.peak_bytes) < 16 * 128 * 32 * 4 * 12


def softmax_after(op, scores, *arithmetic):
    wide = op("convert_element_type", scores, nbytes=2 * BIG)
    for kind in arithmetic:
        wide = op(kind, wide, nbytes=2 * BIG)
    most = op("reduce_max", wide, nbytes=BIG // 100)
    return op("sub", wide, most, nbytes=2 * BIG)


@pytest.mark.parametrize("arithmetic", [(), ("mul",), ("mul", "select_n")])
def test_scores_are_written_less_their_maximum_where_that_is_not_the_maximum_of_the_product(arithmetic):
    op = Builder()
    scores = op("dot_general", op.value(BIG), op.value(BIG))
    shifted = softmax_after(op, scores, *arithmetic)
    op("exp", shifted, nbytes=2 * BIG)
    assert shifted_scores(op.steps, (), op.nbytes) == ({scores: shifted} if arithmetic else {})


def test_scores_with_another_reader_are_written_as_they_are():
    op = Builder()
    scores = op("dot_general", op.value(BIG), op.value(BIG))
    softmax_after(op, scores, "mul")
    op("neg", scores)
    assert shifted_scores(op.steps, (), op.nbytes) == {}


@pytest.mark.parametrize(("wide", "row", "written"), [(2 * BIG, 10, BIG), (2 * BIG, 0, 0), (BIG, 10, 0)])
def test_what_two_products_read_is_written_where_that_moves_fewer_bytes(wide, row, written):
    """To read three times its size twice is as much as to read that once, to write it, and to read it twice."""
    op = Builder()
    x, weights, kept, sums = op.value(BIG), op.value(10), op.value(wide), op.value(row)
    gradient = op("dot_general", x, weights)
    scores = op("select_n", sums, gradient, kept)
    ends = [op("dot_general", scores, weights, nbytes=10) for _ in range(2)]
    program = op.program([x, weights, kept, sums], ends)
    assert peak(program, TPU) == BIG + max(written, 20)  # both results come when what is written is free
    assert peak(program, GPU) == BIG + 20, "there it takes the memory of the gradient"


def test_one_number_of_each_row_is_told_from_whole_rows():
    x = jnp.zeros((8, 16))
    of_each_row = lambda x, i: jnp.sum(jnp.take_along_axis(x, i, axis=1, mode="clip"))

    def told(f, *args):
        equations = jax_compat.equations_in(jax.make_jaxpr(jax.grad(f))(*args))
        scatters = [e for e in equations if e.primitive.name == "scatter-add"]
        return [puts_one_in_each_row(SimpleNamespace(primitive=e.primitive.name, eqn=e)) for e in scatters]

    assert told(of_each_row, x, jnp.zeros((8, 1), jnp.int32)) == [True]
    assert told(of_each_row, x, jnp.zeros((8, 2), jnp.int32)) == [False]
    assert told(lambda x, i: jnp.sum(x[i]), x, jnp.zeros((4,), jnp.int32)) == [False]


HEADS, LENGTH, WIDTH, VOCABULARY = 8, 1024, 64, 32_768


def predicted_and_compiled(step, state, batch):
    cluster = autopar.Cluster.preset("tpu-v5e", topology="2x2")
    search = autopar.Search(attention="as written")
    made = autopar.parallelize(step, plan=recipes.data_parallel(), cluster=cluster, search=search, cache_dir=None)
    compiled = compile_for_target(made, "tpu:v5e:2x2", state, batch)
    return max(made.plan(state, batch).predicted.peak_bytes), allocated_bytes(compiled.executable)


def attention(q, k, v):
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32) / 8
    scores = jnp.where(jnp.tril(jnp.ones((LENGTH, LENGTH), bool)), scores, -1e9)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores).astype(v.dtype), v)


@pytest.mark.extra("tpu")
@pytest.mark.parametrize("is_computed_again", [True, False])
def test_attention_as_written_needs_what_was_predicted(is_computed_again):
    def layer(x, weights):
        q, k, v = (jnp.einsum("blw,whd->blhd", x, w) for w in weights)
        return x + attention(q, k, v).reshape(x.shape), None

    def step(state, batch):
        def loss(state):
            if is_computed_again:
                return jnp.sum(jax.lax.scan(jax.checkpoint(layer), batch, state)[0].astype(jnp.float32))
            x = batch
            for i in range(2):
                x, _ = layer(x, [w[i] for w in state])
            return jnp.sum(x.astype(jnp.float32))

        return jax.tree.map(jnp.subtract, state, jax.grad(loss)(state)), 0.0

    width = HEADS * WIDTH
    state = [jax.ShapeDtypeStruct((2, width, HEADS, WIDTH), jnp.bfloat16)] * 3
    batch = jax.ShapeDtypeStruct((64, LENGTH, width), jnp.bfloat16)
    predicted, compiled = predicted_and_compiled(step, state, batch)
    assert predicted == pytest.approx(compiled, rel=0.1)


@pytest.mark.extra("tpu")
@pytest.mark.parametrize("way", ["labels", "log-probabilities", "16 bits"])
def test_a_loss_needs_what_was_predicted(way):
    def step(embedding, batch):
        def loss(embedding):
            logits = batch["x"] @ embedding
            if way == "log-probabilities":
                found = jax.nn.log_softmax(logits.astype(jnp.float32))
                return -jnp.take_along_axis(found, batch["y"][:, None], axis=1).mean()
            logits = logits if way == "16 bits" else logits.astype(jnp.float32)
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

        value, gradient = jax.value_and_grad(loss)(embedding)
        return embedding - gradient, value

    rows = 16_384
    batch = {
        "x": jax.ShapeDtypeStruct((rows, 512), jnp.bfloat16),
        "y": jax.ShapeDtypeStruct((rows,), jnp.int32),
    }
    embedding = jax.ShapeDtypeStruct((512, VOCABULARY), jnp.bfloat16)
    predicted, compiled = predicted_and_compiled(step, embedding, batch)
    assert predicted == pytest.approx(compiled, rel=0.02)
