"""Pallas calls without a rule: split over the grid dimensions that only choose blocks, and over no others."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask

import autopar
from autopar import recipes
from autopar.errors import InvalidArgumentError
from autopar.kernels import known
from autopar.kernels.local import local_work
from autopar.kernels.opaque import opaque_rule
from autopar.kernels.pallas_grid import grid_of, with_unread_marked
from autopar.microbatch.example_places import MixesExamples
from autopar.microbatch.example_rules import places_of_results
from tests.kernels.pallas_steps import arguments, loss, pallas_attention, plain_attention
from tests.small_steps import assert_close, slow_cluster


def call_in(function, *args):
    jaxpr = jax.make_jaxpr(function)(*args)
    (eqn,) = [e for e in jaxpr.eqns if e.primitive.name == "pallas_call"]
    return with_unread_marked(eqn, jaxpr)


def runs(function, *args):
    grid = grid_of(call_in(function, *args))
    return None if grid is None else grid.runs


def rows(body, x, *, grid, in_map, out_map, block=(1, 4), out_shape=None):
    return pl.pallas_call(
        body, grid=grid, in_specs=[pl.BlockSpec(block, in_map)], out_specs=pl.BlockSpec(block, out_map),
        out_shape=jax.ShapeDtypeStruct(out_shape or x.shape, x.dtype), interpret=True,
    )(x)  # fmt: skip


def copied(x_ref, o_ref):
    o_ref[...] = jnp.sin(x_ref[...])


def test_a_grid_dimension_that_chooses_blocks_may_be_split():
    x, same, by_row = jnp.ones((8, 8)), lambda i, j: (i, j), lambda i: (i, 0)
    assert runs(lambda x: rows(copied, x, grid=(8, 2), in_map=same, out_map=same), x) == (8, 2)
    assert runs(lambda x: rows(copied, x, grid=(8,), in_map=by_row, out_map=by_row, block=(1, 8)), x) == (8,)


def test_other_orders_of_blocks_may_not():
    x = jnp.ones((8, 8))
    same = lambda i, j: (i, j)
    for in_map, expected in ((lambda i, j: (7 - i, j), (1, 2)), (lambda i, j: ((i + j) % 8, j), None)):
        assert runs(lambda x, m=in_map: rows(copied, x, grid=(8, 2), in_map=m, out_map=same), x) == expected
    # Blocks of three of eight columns: the last one is not whole.
    assert runs(lambda x: rows(copied, x, grid=(8, 3), in_map=same, out_map=same, block=(1, 3)), x) == (8, 1)


def test_a_body_that_reads_the_number_of_its_cell_is_not_split_there():
    def counts(x_ref, o_ref):
        o_ref[...] = x_ref[...] + pl.program_id(0)

    def counts_in_runs(x_ref, o_ref):
        o_ref[...] = x_ref[...] + jax.lax.rem(pl.program_id(0), 2)

    same = lambda i, j: (i, j)
    assert runs(lambda x: rows(counts, x, grid=(8, 2), in_map=same, out_map=same), jnp.ones((8, 8))) == (1, 2)
    assert runs(lambda x: rows(counts_in_runs, x, grid=(8, 2), in_map=same, out_map=same), jnp.ones((8, 8))) == (4, 2)


def test_cells_that_share_a_block_stay_together():
    """As query heads that share a key head: the result has a block for each, the operand one for two."""
    shared = pl.pallas_call(
        lambda x_ref, k_ref, o_ref: o_ref.__setitem__(..., x_ref[...] * k_ref[...]), grid=(8,),
        in_specs=[pl.BlockSpec((1, 4), lambda i: (i, 0)), pl.BlockSpec((1, 4), lambda i: (jax.lax.div(i, 2), 0))],
        out_specs=pl.BlockSpec((1, 4), lambda i: (i, 0)), out_shape=jax.ShapeDtypeStruct((8, 4), "float32"),
        interpret=True,
    )  # fmt: skip
    grid = grid_of(call_in(shared, jnp.ones((8, 4)), jnp.ones((4, 4))))
    assert grid.runs == (4,)
    assert not grid.single


def test_a_sum_over_cells_is_not_split_unless_nothing_reads_it():
    def both(x_ref, o_ref, total_ref):
        o_ref[...] = 2 * x_ref[...]
        total_ref[...] = x_ref[...]

    def call(x):
        return pl.pallas_call(
            both, grid=(8,), in_specs=[pl.BlockSpec((1, 4), lambda i: (i, 0))],
            out_specs=[pl.BlockSpec((1, 4), lambda i: (i, 0)), pl.BlockSpec((1, 4), lambda i: (0, 0))],
            out_shape=[jax.ShapeDtypeStruct((8, 4), "float32"), jax.ShapeDtypeStruct((1, 4), "float32")],
            interpret=True,
        )(x)  # fmt: skip

    assert runs(call, jnp.ones((8, 4))) is None
    assert runs(lambda x: call(x)[0], jnp.ones((8, 4))) == (8,)


def sums(reset, *, semantics=None):
    """Running sums over a grid of 2 x 4 cells in scratch memory, which `reset` clears in some of them."""

    def body(x_ref, o_ref, sum_ref):
        @pl.when(reset(pl.program_id(0), pl.program_id(1)))
        def _():
            sum_ref[...] = jnp.zeros((1, 4))

        sum_ref[...] += x_ref[...]
        o_ref[...] = sum_ref[...]

    block = pl.BlockSpec((1, 4), lambda i, j: (i, j))
    return lambda x: pl.pallas_call(
        body, grid=(2, 4), in_specs=[block], out_specs=block, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        scratch_shapes=[pltpu.VMEM((1, 4), "float32")], interpret=True,
        compiler_params=pltpu.CompilerParams(dimension_semantics=semantics),
    )(x)  # fmt: skip


@pytest.mark.parametrize(
    ("reset", "semantics", "split"),
    [
        (lambda i, j: j == 0, None, (2, 1)),  # a row begins anew
        (lambda i, j: i == 0, None, None),  # the second row goes on from what the first left
        (lambda i, j: (i == 0) & (j == 0), None, None),
        (lambda i, j: i >= 0, None, (1, 4)),  # in each cell; the number of its row is read
        (lambda i, j: True, None, (2, 4)),
        (lambda i, j: False, ("parallel", "arbitrary"), (2, 1)),  # as the user says
    ],
)
def test_cells_that_find_what_others_left_in_scratch_memory_are_not_split(reset, semantics, split):
    assert runs(sums(reset, semantics=semantics), jnp.ones((2, 16))) == split


def test_examples_are_independent_cells():
    x = jnp.ones((8, 8))
    apart = call_in(lambda x: rows(copied, x, grid=(8, 2), in_map=lambda i, j: (i, j), out_map=lambda i, j: (i, j)), x)
    assert places_of_results(apart, (0,)) == [0]
    with pytest.raises(MixesExamples):  # blocks of four
        places_of_results(apart, (1,))


@pytest.mark.parametrize(
    ("recipe", "devices"),
    [(None, 4), (recipes.data_parallel(), 4), (recipes.pipeline(2, num_microbatches=2), 4)],
)
def test_a_step_with_an_unknown_kernel_is_split_and_equals_plain_jit(recipe, devices):
    @jax.custom_vjp
    def attention(q, k, v):
        return pallas_attention(q, k, v)

    attention.defvjp(
        lambda q, k, v: (pallas_attention(q, k, v), (q, k, v)), lambda kept, g: jax.vjp(plain_attention, *kept)[1](g)
    )

    def step(state, batch):
        value, gradients = jax.value_and_grad(lambda s: loss(s, batch, attention, lambda x, w: 2.0 * x * w))(state)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, gradients), value

    args = arguments()
    made = autopar.parallelize(step, plan=recipe, cluster=slow_cluster(devices), cache_dir=None, show_progress=False)
    assert_close(made(*jax.tree.map(jnp.copy, args)), jax.jit(step)(*args))
    notes = made.plan(*args).record.notes
    assert not [n for n in notes if "Pallas call" in n]


# The user's table


@pytest.fixture
def table(monkeypatch):
    monkeypatch.setattr(known, "_ENTRIES", {})


def counted_rows(x):
    """A kernel whose body reads the number of its cell, in a way that a split does not change."""

    def numbered(x_ref, o_ref):
        o_ref[...] = x_ref[...] + 0.0 * pl.program_id(0)

    return rows(numbered, x, grid=(8,), in_map=lambda i: (i, 0), out_map=lambda i: (i, 0), block=(1, 8))


@pytest.mark.parametrize("devices", [2, 4])
def test_an_entry_of_the_user_splits_a_kernel_by_its_name(table, devices):
    def step(state, batch):
        return 0.9 * state, counted_rows(jnp.tanh(batch["x"] @ state))

    args = jnp.ones((8, 8)), {"x": jax.random.normal(jax.random.key(0), (8, 8))}

    def noted():
        made = autopar.parallelize(
            step, plan=recipes.data_parallel(), cluster=slow_cluster(devices), cache_dir=None, show_progress=False
        )
        assert_close(made(*jax.tree.map(jnp.copy, args)), jax.jit(step)(*args))
        return [n for n in made.plan(*args).record.notes if "known_kernel" in n]

    assert noted()
    autopar.known_kernel("numbered", "b [d] -> b [d]", flops=lambda x: 7.0 * x.size)
    assert not noted()
    assert local_work(call_in(counted_rows, args[0])).flops == 7.0 * 64


def test_an_entry_that_does_not_fit_a_call_leaves_it_alone(table):
    autopar.known_kernel("numbered", "b h d -> b h d")
    assert opaque_rule(call_in(counted_rows, jnp.ones((8, 8)))).note


def test_an_entry_that_the_grid_cannot_follow_names_its_line(table):
    autopar.known_kernel("numbered", "b d -> b d")
    with pytest.raises(InvalidArgumentError, match="factor 'd' to be a dimension of the kernel's grid") as caught:
        opaque_rule(call_in(counted_rows, jnp.ones((8, 8))))
    assert "test_pallas_grids.py:" in caught.value.where
    with pytest.raises(InvalidArgumentError, match="a function of the operands' shapes"):
        autopar.known_kernel("numbered", "b -> b", flops=3.0)


def test_a_foreign_function_is_split_by_its_entry(table):
    """The Cholesky factors of jaxlib's own library, one matrix an example."""

    def factors(x):
        made = jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct(x.shape[:1], jnp.int32)
        return jax.ffi.ffi_call("lapack_spotrf_ffi", made)(x, uplo=np.uint8(ord("L")))

    def step(state, batch):
        x = batch["x"] * state
        return state, factors(jnp.einsum("bij,bkj->bik", x, x) + jnp.eye(4))[0]

    args = jnp.ones(()), {"x": jax.random.normal(jax.random.key(0), (8, 4, 4))}
    jax.block_until_ready(jnp.linalg.cholesky(jnp.eye(4)))  # which makes jaxlib load its library
    autopar.known_kernel("lapack_spotrf_ffi", "b [m] [n] -> b [m] [n], b")
    made = autopar.parallelize(
        step, plan=recipes.data_parallel(), cluster=slow_cluster(4), cache_dir=None, show_progress=False
    )
    assert_close(made(*jax.tree.map(jnp.copy, args)), jax.jit(step)(*args))
    assert not [n for n in made.plan(*args).record.notes if "foreign" in n]


# Kernels of jax


def splash_step(state, batch):
    """Splash attention, causal, with two queries' heads to a key head."""

    def attention(q, k, v):
        mask = splash_attention_mask.CausalMask((q.shape[2], k.shape[2]))
        masks = splash_attention_mask.MultiHeadMask([mask] * q.shape[1])
        return jax.vmap(splash_attention_kernel.make_splash_mha_single_device(masks, interpret=True))(q, k, v)

    def loss(state):
        x = batch["x"]
        for p in state:
            q, k, v = (jnp.einsum("blw,whd->bhld", x, p[n]) for n in "qkv")
            x = x + jnp.einsum("bhld,hdw->blw", attention(q, k, v), p["o"])
        return jnp.mean(jnp.square(x))

    value, gradients = jax.value_and_grad(loss)(state)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, gradients), value


def splash_arguments(examples=8):
    keys = iter(jax.random.split(jax.random.key(0), 9))
    sizes = {"q": (16, 4, 128), "k": (16, 2, 128), "v": (16, 2, 128), "o": (4, 128, 16)}
    state = [{n: 0.1 * jax.random.normal(next(keys), s) for n, s in sizes.items()} for _ in range(2)]
    return state, {"x": jax.random.normal(next(keys), (examples, 256, 16))}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "devices"),
    [
        *((None, n) for n in (1, 2, 4, 8)),
        (recipes.data_parallel(), 4),
        (recipes.tensor_parallel(), 2),
        (recipes.sequence_parallel("ulysses", size=2), 4),
        (recipes.pipeline(2, num_microbatches=2), 2),
    ],
)
def test_splash_attention_without_a_rule_equals_plain_jit(recipe, devices):
    args = splash_arguments()
    made = autopar.parallelize(
        splash_step, plan=recipe, cluster=slow_cluster(devices), cache_dir=None, show_progress=False
    )
    assert_close(made(*jax.tree.map(jnp.copy, args)), jax.jit(splash_step)(*args))
    assert not [n for n in made.plan(*args).record.notes if "Pallas call" in n]
