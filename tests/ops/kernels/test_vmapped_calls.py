"""Pallas calls without a rule, mapped by `jax.vmap`: split over what was mapped, also in islands and micro-batches."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from autopar import recipes
from autopar.errors import UnsupportedError
from tests.ops.kernels.island_steps import P, mesh_of
from tests.ops.kernels.test_kernels import assert_equals_jit, parallel, splits

B, L, W = 8, 4, 8
PIPELINE = recipes.pipeline(2, num_microbatches=2)


def _running_sum_body(x_ref, o_ref, sum_ref):
    @pl.when(pl.program_id(0) == 0)
    def _():
        sum_ref[...] = jnp.zeros((1, W))

    sum_ref[...] += x_ref[...] * (1.0 + pl.program_id(0))
    o_ref[...] = 0.5 * sum_ref[...]


@jax.custom_vjp
def running_sum(x):
    """Of one example: half the sum of the rows up to each one, the n-th counted n times, by scratch memory."""
    row = pl.BlockSpec((1, x.shape[1]), lambda i: (i, 0))
    return pl.pallas_call(
        _running_sum_body, grid=(x.shape[0],), in_specs=[row], out_specs=row, interpret=True,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), scratch_shapes=[pltpu.VMEM((1, x.shape[1]), x.dtype)],
    )(x)  # fmt: skip


def _backward(_, g):
    scale = 0.5 * (1.0 + jnp.arange(g.shape[0], dtype=g.dtype))[:, None]
    return (scale * jnp.cumsum(g[::-1], 0)[::-1],)


running_sum.defvjp(lambda x: (running_sum(x), None), _backward)


def on_examples(x):
    return jax.vmap(running_sum)(x)


def step_of(mapped):
    def step(state, batch):
        def loss(state):
            x = batch["x"]
            for w in state:
                x = jnp.tanh(x + mapped(x @ w))
            return jnp.mean((x - batch["y"]) ** 2)

        value, gradients = jax.value_and_grad(loss)(state)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, gradients), value

    return step


def arguments():
    keys = jax.random.split(jax.random.key(0), 4)
    state = [0.3 * jax.random.normal(key, (W, W)) for key in keys[:2]]
    return state, {name: jax.random.normal(key, (B, L, W)) for name, key in zip("xy", keys[2:], strict=True)}


def island(devices):
    return jax.shard_map(on_examples, mesh=mesh_of(x=devices), in_specs=P("x"), out_specs=P("x"), check_vma=False)


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("mapped", "recipe", "devices"),
    [
        (on_examples, None, 1),
        (on_examples, recipes.data_parallel(), 4),
        (on_examples, PIPELINE, 4),
        (island(2), None, 2),
        (island(2), recipes.data_parallel(), 4),  # the island on every device, part by part
        (island(2), PIPELINE, 4),
    ],
)
def test_a_mapped_call_equals_plain_jit(mapped, recipe, devices):
    assert_equals_jit(step_of(mapped), recipe, devices, arguments())


def test_what_was_mapped_is_split():
    made, args = parallel(step_of(on_examples), recipes.data_parallel(), 4), arguments()
    assert splits(made, args, "pallas_call") == [4, 4]


def test_micro_batches_of_one_example_a_call_are_refused_with_their_line():
    """Of one example `jax.vmap` makes another call: it has no axis for what was mapped."""
    with pytest.raises(UnsupportedError, match="examples") as caught:
        parallel(step_of(on_examples), recipes.pipeline(2, num_microbatches=B), 2)(*arguments())
    assert "pallas_call" in str(caught.value)
