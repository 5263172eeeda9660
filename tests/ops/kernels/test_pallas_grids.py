"""Pallas calls without a rule run whole, but for mapped ones, jax's own attention, and those of an entry."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas.ops.tpu.flash_attention import flash_attention
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask

import autopar
from autopar import recipes
from autopar.common import jax_compat
from autopar.errors import InvalidArgumentError, UnsupportedError
from autopar.ops.kernels import known
from autopar.ops.kernels.known import opaque_rule
from autopar.ops.kernels.local import local_work
from autopar.ops.kernels.pallas_grid import grid_along, grid_of, kernel_name
from autopar.passes.example_rules import MixesExamples, places_of_results
from tests.ops.kernels.pallas_steps import arguments, loss, pallas_attention, plain_attention
from tests.small_steps import assert_close, slow_cluster

with warnings.catch_warnings():  # jax 0.12 names tokamax's attention in the place of this one
    warnings.simplefilter("ignore", DeprecationWarning)
    from jax.experimental.pallas.ops.gpu.attention import mha


@pytest.fixture
def table(monkeypatch):
    monkeypatch.setattr(known, "_ENTRIES", {})


def calls_in(function, *args):
    jaxpr = jax_compat.plain_jaxpr(function, *args)
    return [e for e in jax_compat.equations_in(jax_compat.open_jaxpr(jaxpr)) if e.primitive.name == "pallas_call"]


def call_in(function, *args):
    (call,) = calls_in(function, *args)
    return call


def runs(function, *args):
    """Of a call whose cells leave nothing to one another."""
    call = call_in(function, *args)
    grid = grid_along(call, set(range(len(call.params["grid_mapping"].grid))), may_read_number=False)
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
    grid = grid_along(call_in(shared, jnp.ones((8, 4)), jnp.ones((4, 4))), {0}, may_read_number=False)
    assert grid.runs == (4,)
    assert not grid.single


@jax.custom_vjp
def unknown_attention(q, k, v):
    return pallas_attention(q, k, v)


unknown_attention.defvjp(
    lambda q, k, v: (pallas_attention(q, k, v), (q, k, v)), lambda kept, g: jax.vjp(plain_attention, *kept)[1](g)
)


def attention_step(state, batch):
    value, gradients = jax.value_and_grad(loss)(state, batch, unknown_attention, lambda x, w: 2.0 * x * w)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, gradients), value


def planned(recipe, devices):
    return autopar.parallelize(attention_step, plan=recipe, cluster=slow_cluster(devices), cache_dir=None)


def test_an_unknown_kernel_runs_whole_equals_plain_jit_and_is_named(table):
    args = arguments(layers=1)
    made = planned(recipes.data_parallel(), 2)
    assert_close(made(*jax.tree.map(jnp.copy, args)), jax.jit(attention_step)(*args))
    (note,) = [n for n in made.plan(*args).record.notes if "Pallas call" in n]
    assert "runs whole on every device" in note
    assert "autopar.known_kernel('_attention_body', rule)" in note


def test_an_unknown_kernel_in_micro_batches_is_an_error_that_says_how_to_give_a_rule(table):
    with pytest.raises(UnsupportedError, match=r"autopar.kernel\(fun,"):
        planned(recipes.pipeline(2, num_microbatches=2), 4).plan(*arguments())


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("recipe", "devices"), [(None, 4), (recipes.data_parallel(), 4), (recipes.pipeline(2, num_microbatches=2), 4)]
)
def test_with_an_entry_it_is_split_and_equals_plain_jit(table, recipe, devices):
    autopar.known_kernel("_attention_body", "b h q [d], b h [k] [d], b h [k] [d] -> b h q [d]")
    args = arguments()
    made = planned(recipe, devices)
    assert_close(made(*jax.tree.map(jnp.copy, args)), jax.jit(attention_step)(*args))
    assert not [n for n in made.plan(*args).record.notes if "Pallas call" in n]


# The user's table


def counted_rows(x):
    """A kernel whose body reads the number of its cell, in a way that a split does not change."""

    def numbered(x_ref, o_ref):
        o_ref[...] = x_ref[...] + 0.0 * pl.program_id(0)

    return rows(numbered, x, grid=(8,), in_map=lambda i: (i, 0), out_map=lambda i: (i, 0), block=(1, 8))


@pytest.mark.cases(1)
@pytest.mark.parametrize("devices", [2, 4])
def test_an_entry_of_the_user_splits_a_kernel_by_its_name(table, devices):
    def step(state, batch):
        return 0.9 * state, counted_rows(jnp.tanh(batch["x"] @ state))

    args = jnp.ones((8, 8)), {"x": jax.random.normal(jax.random.key(0), (8, 8))}

    def noted():
        made = autopar.parallelize(step, plan=recipes.data_parallel(), cluster=slow_cluster(devices), cache_dir=None)
        assert_close(made(*jax.tree.map(jnp.copy, args)), jax.jit(step)(*args))
        return [n for n in made.plan(*args).record.notes if "known_kernel" in n]

    assert noted()
    autopar.known_kernel("numbered", "b [d] -> b [d]", flops=lambda x: 7.0 * x.size)
    assert not noted()
    assert local_work(call_in(counted_rows, args[0])).flops == 7.0 * 64


def test_examples_are_cells_of_their_own(table):
    autopar.known_kernel("numbered", "b [d] -> b [d]")
    assert places_of_results(call_in(counted_rows, jnp.ones((8, 8))), (0,)) == [0]
    autopar.known_kernel("copied", "b d -> b d")
    same = lambda i, j: (i, j)
    apart = call_in(lambda x: rows(copied, x, grid=(8, 2), in_map=same, out_map=same), jnp.ones((8, 8)))
    assert places_of_results(apart, (0,)) == [0]
    with pytest.raises(MixesExamples):  # blocks of four
        places_of_results(apart, (1,))


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
    made = autopar.parallelize(step, plan=recipes.data_parallel(), cluster=slow_cluster(4), cache_dir=None)
    assert_close(made(*jax.tree.map(jnp.copy, args)), jax.jit(step)(*args))
    assert not [n for n in made.plan(*args).record.notes if "foreign" in n]


# Kernels of jax


def of_heads(masks):
    return jax.vmap(splash_attention_kernel.make_splash_mha_single_device(splash_attention_mask.MultiHeadMask(masks)))


def causal_masks(heads):
    return [splash_attention_mask.CausalMask((256, 256))] * heads


def of_each(heads):
    local = splash_attention_mask.LocalMask((256, 256), (128, 0), 0)
    return [*causal_masks(heads // 2), *[local] * (heads // 2)]


SHARED_HEADS = {"fwd": (2, 2, 1, 1), "dkv": (2, 1, 2, 1), "dq": (2, 2, 1, 1)}
EXAMPLES = (2, 4, 1, 1)


@pytest.mark.parametrize(
    ("attention", "key_heads", "is_last", "expected"),
    [
        (of_heads(causal_masks(4)), 2, False, [SHARED_HEADS["fwd"], SHARED_HEADS["dkv"], SHARED_HEADS["dq"]]),
        (of_heads(of_each(4)), 2, False, [(2, 1, 1, 1)] * 3),  # a mask of each head stands whole on every device
        (functools.partial(flash_attention, causal=True), 4, False, [EXAMPLES] * 3),
        (functools.partial(mha, segment_ids=None, causal=True), 4, True, [(1, 2, 4), (1, 2, 4), (2, 4, 1)]),
    ],
    ids=["splash", "splash, masks by head", "flash", "Triton"],
)
def test_attention_kernels_of_jax_are_split_over_examples_and_heads(attention, key_heads, is_last, expected):
    def operand(heads):
        return jax.ShapeDtypeStruct((2, 256, heads, 128) if is_last else (2, heads, 256, 128), jnp.bfloat16)

    gradients = jax.grad(lambda *args: jnp.sum(attention(*args).astype(jnp.float32)), argnums=(0, 1, 2))
    calls = calls_in(gradients, operand(4), operand(key_heads), operand(key_heads))
    assert [grid_of(call).runs for call in calls] == expected, [kernel_name(call) for call in calls]


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
    made = autopar.parallelize(splash_step, plan=recipe, cluster=slow_cluster(devices), cache_dir=None)
    assert_close(made(*jax.tree.map(jnp.copy, args)), jax.jit(splash_step)(*args))
    assert not [n for n in made.plan(*args).record.notes if "Pallas call" in n]
