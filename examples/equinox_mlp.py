"""Train an Equinox network on scikit-learn's breast cancer data, on all devices at once.

    python examples/equinox_mlp.py

The network's arrays travel through the training step; its functions and sizes are closed over.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_breast_cancer
from sklearn.model_selection import train_test_split

import autopar

jax.config.update("jax_num_cpu_devices", 8)  # where there are no accelerators

FEATURES = 30
BATCH = 64
EPOCHS = 30

optimizer = optax.adamw(1e-3, weight_decay=1e-2)


def create_network(key: jax.Array) -> eqx.nn.MLP:
    return eqx.nn.MLP(FEATURES, "scalar", width_size=256, depth=3, activation=jax.nn.gelu, key=key)


# What is left of a network without its arrays.
skeleton = eqx.filter(
    eqx.filter_eval_shape(create_network, jax.random.key(0)),
    lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct),
    inverse=True,
)


def create_state(key: jax.Array) -> tuple:
    params = eqx.filter(create_network(key), eqx.is_array)
    return params, optimizer.init(params)


def logits_of(params: eqx.nn.MLP, inputs: jax.Array) -> jax.Array:
    return jax.vmap(eqx.combine(params, skeleton))(inputs)


@autopar.parallelize
def train_step(state: tuple, batch: dict[str, jax.Array]) -> tuple[tuple, dict[str, jax.Array]]:
    def loss_fn(params: eqx.nn.MLP) -> jax.Array:
        return optax.sigmoid_binary_cross_entropy(logits_of(params, batch["inputs"]), batch["labels"]).mean()

    params, opt_state = state
    loss, grads = jax.value_and_grad(loss_fn)(params)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return (eqx.apply_updates(params, updates), opt_state), {"loss": loss}


@autopar.parallelize(plan=train_step)  # the state stays where training has it
def accuracy_of(state: tuple, batch: dict[str, jax.Array]) -> jax.Array:
    return jnp.mean((logits_of(state[0], batch["inputs"]) > 0) == (batch["labels"] > 0))


def main() -> None:
    inputs, labels = load_breast_cancer(return_X_y=True)
    inputs, test_inputs, labels, test_labels = train_test_split(
        inputs.astype(np.float32), labels.astype(np.float32), test_size=0.2, random_state=0
    )
    mean, deviation = inputs.mean(axis=0), inputs.std(axis=0)
    inputs, test_inputs = (inputs - mean) / deviation, (test_inputs - mean) / deviation

    state = train_step.init(create_state, jax.random.key(0))
    rng = np.random.default_rng(0)
    for epoch in range(EPOCHS):
        order = rng.permutation(len(labels))
        for start in range(0, len(order) - BATCH + 1, BATCH):
            chosen = order[start : start + BATCH]
            batch = {"inputs": inputs[chosen], "labels": labels[chosen]}
            state, metrics = train_step(state, train_step.put_batch(batch))
        if (epoch + 1) % 10 == 0:
            accuracy = accuracy_of(state, {"inputs": test_inputs, "labels": test_labels})
            print(f"epoch {epoch + 1:2}  loss {metrics['loss']:.4f}  test accuracy {accuracy:.1%}")
    print(train_step.plan(state, batch))


if __name__ == "__main__":
    main()
