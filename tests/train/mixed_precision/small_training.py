"""A small training step under a policy, with Adam and a loss scale, for the tests of precision."""

import jax
import jax.numpy as jnp
import optax

import autopar
from tests.small_steps import mlp_batch, mlp_state

OPTIMIZER = optax.adam(1e-2)


def forward(policy, params, x):
    hidden = jnp.tanh(policy.dot_general(x, params["first"], (((1,), (0,)), ((), ()))) + params["bias"])
    return policy.dot_general(hidden, params["second"], (((1,), (0,)), ((), ())))


def training(policy):
    """(a function that makes the state, the step)."""
    policy = autopar.precision(policy)

    def loss_of(params, batch):
        # The loss itself is not rounded: 16 bits of it would hide every difference.
        outputs = policy.cast_to_output(forward(policy, params, batch["x"]))
        return jnp.mean((outputs - batch["y"]) ** 2)

    def create(key):
        params = policy.cast_to_param(mlp_state(key))
        state = {"params": params, "optimizer": OPTIMIZER.init(params), "steps": jnp.int32(0)}
        return {**state, "loss_scale": policy.init_loss_scale()} if policy.needs_loss_scale else state

    def step(state, batch):
        differentiated = policy.value_and_grad(loss_of, keep=("y",))
        loss, gradients = differentiated(state["params"], batch, loss_scale=state.get("loss_scale"))
        updates, optimizer = OPTIMIZER.update(gradients, state["optimizer"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        new = {**state, "params": params, "optimizer": optimizer, "steps": state["steps"] + 1}
        new, finite = policy.apply_if_finite(gradients, new, state)
        return new, {"loss": loss, "finite": finite}

    return create, step


def batches(count, overflows_at=None):
    """With an overflow in float16: of one example of a batch, on the devices and in the micro-batch that have it."""
    made = [mlp_batch(16, seed=i) for i in range(count)]
    if overflows_at is not None:
        made[overflows_at]["x"][5] *= 1e5
    return made


def run(step, create, data):
    """(the state after each batch, the metrics)."""
    state, states, metrics = create(jax.random.key(0)), [], []
    for batch in data:
        state, made = step(state, batch)
        states.append(jax.device_get(state))
        metrics.append(jax.device_get(made))
    return states, metrics
