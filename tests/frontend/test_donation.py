"""What a user is told of donated arguments that no result replaces; under jax.jit, too, such a step does not train."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.core import freeze

import autopar
from autopar.errors import DonatedStateError
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


def deep_loss(state, batch):
    """A loss whose layers are scanned and checkpointed, with a penalty on the parameters."""
    layers = jnp.stack([jnp.outer(state["bias"], state["bias"]), jnp.eye(64)])
    x = batch["x"] @ state["first"]
    x, _ = jax.lax.scan(jax.checkpoint(lambda x, p: (jnp.tanh(x @ p), None)), x, layers)
    return mlp_loss(state, batch) + jnp.mean(x**2) + 1e-3 * sum(jnp.sum(p**2) for p in jax.tree.leaves(state))


@pytest.mark.parametrize("gradient", [jax.grad, jax.value_and_grad])
@pytest.mark.parametrize("loss", [mlp_loss, jax.jit(mlp_loss), deep_loss])
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["plain", "jitted"])
def test_gradients_do_not_replace_the_parameters(gradient, loss, wrap, caplog):
    step, state = made(wrap(gradient(loss))), new_mlp_state()
    with caplog.at_level(logging.WARNING, "autopar"):
        found = step(state, mlp_batch())
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(gradient(loss)(state, mlp_batch())), strict=True):
        assert_close(np.asarray(a), np.asarray(b), 1e-5)  # the state is there
    (note,) = [note for note in step.plan(state, mlp_batch()).record.notes if "is donated" in note]
    assert note.startswith("nothing of argument '")
    assert note.endswith("donate_argnums=(0,) donates it")
    assert not [r.message for r in caplog.records if "donated" in r.message]


def test_what_a_step_only_reads_is_a_note_unless_the_caller_donates_it(caplog):
    step, state = made(only_the_loss), new_mlp_state()
    with caplog.at_level(logging.WARNING, "autopar"):
        (note,) = [note for note in step.plan(state, mlp_batch()).record.notes if "donated" in note]
        assert not [r.message for r in caplog.records if "donated" in r.message]
        made(only_the_loss, donate_argnums=0)(state, mlp_batch())
    (record,) = [r for r in caplog.records if "donated" in r.message]
    paths = "state['bias'], state['first'], state['second']"
    assert note == f"3 leaves of the state are not donated, as no result with the same tree replaces them ({paths})"
    assert (
        "nothing of argument 'state' is donated, as no result replaces it: the step returns nothing" in record.message
    )


def guarded(state, batch):
    loss, grads = jax.value_and_grad(mlp_loss)(state, batch)
    new = jax.tree.map(lambda p, g: p - 0.1 * g, state, grads)
    return jax.lax.cond(jnp.isfinite(loss), lambda: new, lambda: state), loss


def several_updates(state, batch):
    return jax.lax.scan(lambda state, _: mlp_step(state, batch), state, length=2)


def averaged(state, batch):
    return jax.tree.map(lambda p: 0.9 * p, state)


@pytest.mark.parametrize("function", [mlp_step, jax.jit(mlp_step), guarded, several_updates, averaged])
def test_what_is_no_gradient_replaces_the_state(function):
    step = made(function)
    result = step(new_mlp_state(), mlp_batch())
    state = result if isinstance(result, dict) else result[0]
    step(state, mlp_batch())
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))


def test_gradients_are_donated_to_where_the_caller_says_so():
    step = made(jax.grad(mlp_loss), donate_argnums=[0])
    state = step(new_mlp_state(), mlp_batch())
    step(state, mlp_batch())
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))


@pytest.mark.parametrize("options", [{"donate_argnums": ()}, {}], ids=["not donated", "replaced"])
def test_nothing_is_said_of_what_is_not_donated_or_is_replaced(options, caplog):
    function = mlp_step if not options else only_the_loss
    with caplog.at_level(logging.WARNING, "autopar"):
        made(function, **options)(new_mlp_state(), mlp_batch())
    assert not caplog.records


def test_the_error_of_an_array_that_another_step_took_over_blames_that_step():
    step, reader = made(mlp_step), made(only_the_loss)
    state, _ = step(new_mlp_state(), mlp_batch())
    step(state, mlp_batch())
    with pytest.raises(
        DonatedStateError, match=r"only_the_loss, state\['bias'\]: .* of this step or another one"
    ) as raised:
        reader(state, mlp_batch())
    assert "make the step that took it over with donate_argnums=()" in str(raised.value)
    assert "only_the_loss(" not in str(raised.value)
