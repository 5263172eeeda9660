"""Networks that come with Equinox, without state and with."""

import jax

from benchmarks.zoo.case import Case, PyTree
from benchmarks.zoo.published.sizes import CLASSES, FEATURES, vectors
from benchmarks.zoo.training import cross_entropy, momentum, training_case

WIDTH = 64


def eqx_mlp() -> Case:
    """The model itself, functions included, would be the state of an Equinox program; here its arrays are."""
    import equinox as eqx

    def create(key: jax.Array) -> PyTree:
        return eqx.nn.MLP(FEATURES, CLASSES, WIDTH, depth=2, activation=jax.nn.silu, key=key)

    model_shape = eqx.filter_eval_shape(create, jax.random.key(0))
    static = eqx.filter(model_shape, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct), inverse=True)

    def loss(params: PyTree, batch: PyTree) -> jax.Array:
        return cross_entropy(jax.vmap(eqx.combine(params, static))(batch["inputs"]), batch["labels"])

    return training_case(
        name="eqx_mlp", init_params=lambda key: eqx.filter(create(key), eqx.is_array), loss=loss, batch=vectors
    )


def eqx_batch_norm() -> Case:
    """Statistics over a named `jax.vmap` axis, running ones in `eqx.nn.State`."""
    import equinox as eqx

    tx = momentum()

    class Network(eqx.Module):
        inner: eqx.nn.Linear
        norm: eqx.nn.BatchNorm
        head: eqx.nn.Linear

        def __init__(self, key: jax.Array):
            inner_key, head_key = jax.random.split(key)
            self.inner = eqx.nn.Linear(FEATURES, WIDTH, use_bias=False, key=inner_key)
            self.norm = eqx.nn.BatchNorm(WIDTH, axis_name="batch", mode="batch")
            self.head = eqx.nn.Linear(WIDTH, CLASSES, key=head_key)

        def __call__(self, x: jax.Array, state: eqx.nn.State) -> tuple[jax.Array, eqx.nn.State]:
            x, state = self.norm(self.inner(x), state)
            return self.head(jax.nn.gelu(x)), state

    create = eqx.nn.make_with_state(Network)
    # Every call makes markers of its own that tie a model to its state, so one call's serve for all.
    model, network_state = create(jax.random.key(0))
    static = eqx.filter(model, eqx.is_array, inverse=True)
    network_structure = jax.tree.structure(network_state)

    def init(key: jax.Array) -> PyTree:
        model, network_state = create(key)
        params = eqx.filter(model, eqx.is_array)
        return params, jax.tree.leaves(network_state), tx.init(params)

    def step(state: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
        params, network_leaves, opt_state = state
        network_state = jax.tree.unflatten(network_structure, network_leaves)

        def loss_fn(params: PyTree) -> tuple[jax.Array, PyTree]:
            model = eqx.combine(params, static)
            batched = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
            logits, new_network_state = batched(batch["inputs"], network_state)
            return cross_entropy(logits, batch["labels"]), new_network_state

        (loss, new_network_state), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        updates, opt_state = tx.update(grads, opt_state)
        return (eqx.apply_updates(params, updates), jax.tree.leaves(new_network_state), opt_state), {"loss": loss}

    return Case(name="eqx_batch_norm", step=step, init=init, batch=vectors)
