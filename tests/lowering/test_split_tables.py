"""Lookups in a table whose rows are split: summands on each device that add up to what plain jax finds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, PartitionSpec

import autopar
from autopar import recipes
from autopar.ir.primitives import looked_up_dim
from autopar.lowering.emit import local_rows
from tests.small_steps import assert_close, transformer

TABLE = np.random.default_rng(0).normal(size=(12, 3)).astype(np.float32)
INDICES = np.array([[0, 11, 5], [-1, 12, 40], [3, 4, 8]], np.int32)


def summed(lookup, table, indices, dim):
    """The sum of four devices' summands."""
    (eqn,) = (e for e in jax.make_jaxpr(lookup)(table, indices).eqns if e.primitive.name == "gather")
    assert looked_up_dim(eqn) == dim
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    spec = PartitionSpec(*[None] * dim, ("x", "y"))

    def local(part, at):
        return jax.lax.psum(local_rows(eqn, part, at, ["x", "y"]), ("x", "y"))

    run = jax.shard_map(local, mesh=mesh, in_specs=(spec, PartitionSpec()), out_specs=PartitionSpec(), check_vma=False)
    return run(table, indices[..., None])


@pytest.mark.cases(1)
@pytest.mark.parametrize("mode", ["clip", "fill", "promise_in_bounds"])
@pytest.mark.parametrize("dim", [0, 1])
def test_summands_add_up(mode, dim):
    indices = np.clip(INDICES, 0, 11) if mode == "promise_in_bounds" else INDICES
    table = TABLE if dim == 0 else TABLE.T

    def lookup(table, indices):
        return table.at[(slice(None),) * dim + (indices,)].get(mode=mode, wrap_negative_indices=False)

    np.testing.assert_array_equal(summed(lookup, table, indices, dim), lookup(jnp.asarray(table), indices))


@pytest.mark.cases(1)
@pytest.mark.parametrize("mode", ["clip", "fill"])
def test_large_unsigned_indices_find_what_plain_jax_finds(mode):
    indices = np.array([[0, 11, 2**31 + 5]], np.uint32)

    def lookup(table, indices):
        return table.at[indices].get(mode=mode, wrap_negative_indices=False)

    np.testing.assert_array_equal(summed(lookup, TABLE, indices, 0), jax.jit(lookup)(TABLE, indices))


def test_other_gathers_are_no_lookups():
    found = {
        "elements": lambda t, i: t[i, i],
        "parts of rows": lambda t, i: jax.vmap(lambda k: jax.lax.dynamic_slice(t, (k, 0), (1, 2)))(i[0]),
    }
    for name, lookup in found.items():
        eqns = [e for e in jax.make_jaxpr(lookup)(TABLE, np.clip(INDICES, 0, 2)).eqns if e.primitive.name == "gather"]
        assert eqns, name
        assert all(looked_up_dim(e) is None for e in eqns), name


def test_sequence_parallelism_sends_no_table():
    case = transformer(layers=1, vocabulary=4096)
    recipe = recipes.combine(dp=2, tp=4, sequence_parallel=True, num_microbatches=2)
    step = autopar.parallelize(case.step, plan=recipe, cluster=autopar.Cluster.preset("dgx-h100"), cache_dir=None)
    state = jax.jit(case.create)(jax.random.key(0))
    expected = jax.jit(case.step)(state, case.batch)
    assert_close(step(jax.tree.map(np.array, state), case.batch), expected)
    table_bytes = 4 * 4096 * 32
    verified = autopar.verify(step, case.shapes, case.batch)
    for kind in ("all-gather", "reduce-scatter"):
        (use,) = (c for c in verified.collectives if c.name == kind)
        assert 0 < use.predicted == use.compiled < table_bytes / 8
