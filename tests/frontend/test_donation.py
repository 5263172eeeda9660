"""What a user is told of donated arguments that no result replaces; under jax.jit, too, such a step does not train."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.core import freeze

import autopar
from tests.small_steps import assert_close, grouped, mlp_batch, mlp_loss, mlp_step, new_mlp_state, slow_cluster


def only_the_loss(state, batch):
    return mlp_loss(state, batch)


def in_place(state, batch):
    loss, grads = jax.value_and_grad(mlp_loss)(state, batch)
    state["first"] = state["first"] - 0.1 * grads["first"]
    return loss


def another_dtype(state, batch):
    new, metrics = mlp_step(state, batch)
    return new | {"second": new["second"].astype(jnp.bfloat16)}, metrics


def a_leaf_more(state, batch):
    new, metrics = mlp_step(state, batch)
    return new | {"count": jnp.zeros(())}, metrics


def a_leaf_less(state, batch):
    new, metrics = mlp_step(state, batch)
    return {"first": new["first"], "second": new["second"]}, metrics


def another_kind(state, batch):
    new, metrics = mlp_step(state, batch)
    return freeze(new), metrics


SAID = {
    only_the_loss: ["argument 'state' is donated", "returns nothing that is like it", "donate_argnums=()"],
    in_place: ["state['first'] in place, which is lost, as under jax.jit: return it"],
    another_dtype: ["state['second'] is float32[64, 16], and result[0]['second'] is bfloat16[64, 16]"],
    a_leaf_more: ["result[0]['count'] is not in state"],
    a_leaf_less: ["result[0] has no ['bias']"],
    another_kind: ["result[0] has the same leaves in another kind of tree"],
}


def made(function, **options):
    return autopar.parallelize(function, cluster=slow_cluster(4), cache_dir=None, **grouped(**options))


@pytest.mark.cases(5)
@pytest.mark.parametrize("function", SAID, ids=lambda f: f.__name__)
def test_a_donated_argument_that_no_result_replaces_is_named_once(function, caplog):
    parallel, state = made(function), new_mlp_state()
    with caplog.at_level(logging.WARNING, "autopar"):
        found = [parallel(state, mlp_batch()) for _ in range(2)]  # nothing is donated: the state is there for both
    (record,) = [r for r in caplog.records if "donated" in r.message]
    assert all(text in record.message for text in SAID[function]), record.message
    expected = jax.jit(function)(new_mlp_state(), mlp_batch())
    for one in found:
        for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(expected), strict=True):
            assert_close(
                np.asarray(a, np.float32), np.asarray(b, np.float32), 1e-2 if b.dtype == jnp.bfloat16 else 1e-5
            )


@pytest.mark.parametrize("options", [{"donate_argnums": ()}, {}], ids=["not donated", "replaced"])
def test_nothing_is_said_of_what_is_not_donated_or_is_replaced(options, caplog):
    function = mlp_step if not options else only_the_loss
    with caplog.at_level(logging.WARNING, "autopar"):
        made(function, **options)(new_mlp_state(), mlp_batch())
    assert not caplog.records
