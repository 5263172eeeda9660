"""One small training step for each kind of thing that large codebases write: what `benchmarks.kinds` runs.

Most are the steps of the tests of these kinds.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks.zoo import CASES
from benchmarks.zoo.case import Case

# Names of recipes; `benchmarks.kinds` has them.
DATA, ZERO, TENSOR, ULYSSES, RING, USP, EXPERT = "data", "zero 3", "tensor", "ulysses", "ring", "usp", "expert"
DENSE = (DATA, ZERO, TENSOR)
SEQUENCES = (*DENSE, ULYSSES, RING, USP)


@dataclasses.dataclass(frozen=True, kw_only=True)
class KindStep:
    """`step(state, batch)` with its arguments, the recipes that apply to it, and options of `parallelize`. In stages
    `per_microbatch` is given too.
    """

    step: Callable[[Any, Any], Any]
    args: tuple[Any, Any]
    recipes: tuple[str, ...] = DENSE
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    per_microbatch: tuple[str, ...] = ()


def kernel_with_a_rule(devices: int) -> KindStep:
    from tests.kernels import pallas_steps

    return KindStep(step=pallas_steps.train_step, args=pallas_steps.arguments(), recipes=(*DENSE, ULYSSES))


def unknown_kernel(devices: int) -> KindStep:
    """A Pallas call that the table does not have: split as its grid says."""
    from tests.kernels import pallas_steps

    @jax.custom_vjp
    def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return pallas_steps.pallas_attention(q, k, v)

    attention.defvjp(
        lambda q, k, v: (pallas_steps.pallas_attention(q, k, v), (q, k, v)),
        lambda kept, g: jax.vjp(pallas_steps.plain_attention, *kept)[1](g),
    )

    def step(state: Any, batch: Any) -> Any:
        def loss(state: Any) -> jax.Array:
            return pallas_steps.loss(state, batch, attention, lambda x, w: 2.0 * x * w)

        value, gradients = jax.value_and_grad(loss)(state)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, gradients), value

    return KindStep(step=step, args=pallas_steps.arguments(), recipes=(*DENSE, ULYSSES))


def splash(devices: int) -> KindStep:
    from tests.kernels.test_pallas_grids import splash_arguments, splash_step

    return KindStep(step=splash_step, args=splash_arguments(), recipes=(*DENSE, ULYSSES))


def megablox(devices: int) -> KindStep:
    return _grouped("megablox")


def ragged(devices: int) -> KindStep:
    return _grouped("ragged")


def _grouped(name: str) -> KindStep:
    """A dense layer, and one of experts without capacity: each row goes to one, which rows say."""
    from tests.kernels import test_grouped_products as products

    product = getattr(products, name)
    state, batch = products.arguments()
    keys = jax.random.split(jax.random.key(1), 2)
    rows = batch["x"].shape[1]
    state |= {"in": jax.random.normal(keys[0], (rows, rows)), "router": jax.random.normal(keys[1], (rows, products.E))}

    def loss(state: Any, batch: Any) -> jax.Array:
        x = jnp.tanh(batch["x"] @ state["in"])
        with jax.named_scope("experts"):
            expert = jnp.argmax(x @ state["router"], axis=-1)
            order, sizes = jnp.argsort(expert), jnp.bincount(expert, length=products.E)
            inner = jnp.tanh(product(x[order], state["a"], sizes))
            x = jnp.zeros_like(x).at[order].set(product(inner, state["b"], sizes))
        return jnp.mean(jnp.sin(x))

    def step(state: Any, batch: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(state, batch)
        return jax.tree.map(lambda p, g: p - g, state, gradients), value

    return KindStep(step=step, args=(state, batch), recipes=(DATA, ZERO), per_microbatch=("experts",))


def attention_in_blocks(devices: int) -> KindStep:
    return _of(CASES["llama"](block=16), recipes=SEQUENCES, options={"attention": "blockwise"})


def library_attention(devices: int) -> KindStep:
    """`jax.nn.dot_product_attention`, causal, two heads of queries to a head of keys."""

    def core(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        heads = query.reshape(*query.shape[:2], -1, query.shape[-1])
        return jax.nn.dot_product_attention(heads, key, value, is_causal=True).reshape(query.shape)

    return _of(CASES["llama"](core=core), recipes=SEQUENCES)


def custom_partitioning(devices: int) -> KindStep:
    from tests.kernels import test_custom_partitions as partitions

    step = partitions.step_of(partitions.product(partitions.RULE))
    return KindStep(step=step, args=partitions.arguments())


def island(devices: int) -> KindStep:
    """An island without collectives, over all devices."""
    from tests.kernels import island_steps

    return KindStep(step=island_steps.step_of(island_steps.rows(devices), "square"), args=island_steps.arguments())


def island_with_sums(devices: int) -> KindStep:
    """An island of Megatron's two matrices, over as many devices as there are."""
    from tests.kernels import island_steps

    made = island_steps.megatron(max(devices // 2, 1), min(devices, 2))
    return KindStep(step=island_steps.step_of(made, "up", "down"), args=island_steps.arguments())


def island_in_stages(devices: int) -> KindStep:
    """The same for half of the devices, as each of two stages has."""
    return island_with_sums(max(devices // 2, 1))


def shardings_as(constraints: str, devices: int) -> KindStep:
    from tests.compiler import test_shardings_in_code as shardings

    on = shardings.mesh(max(devices // 2, 1), min(devices, 2))
    step = shardings.mlp(
        lambda x: jax.lax.with_sharding_constraint(x, NamedSharding(on, PartitionSpec("data", "model")))
    )
    recipes = () if constraints == "pins" else DENSE  # pins are a plan of their own
    return KindStep(step=step, args=shardings.arguments(), recipes=recipes, options={"constraints": constraints})


def named_checkpoints(policy: str, scans: bool, devices: int) -> KindStep:
    from tests.lowering import test_policy_offload as offload

    return KindStep(step=offload.training_step(getattr(offload, policy), scans=scans), args=offload.arguments())


def chosen_checkpoints(devices: int) -> KindStep:
    found = named_checkpoints("KEPT", True, devices)
    return dataclasses.replace(found, options={"remat": "auto"})


def callbacks(forward: str, after: str, devices: int) -> KindStep:
    from tests.frontend import test_callbacks as calls

    step = calls.training_step(getattr(calls, forward), getattr(calls, after))
    return KindStep(step=step, args=calls.arguments(), recipes=(DATA, ZERO))


def of_type(dtype: str, devices: int) -> KindStep:
    from tests.programs import type_steps

    return KindStep(step=type_steps.training_step(type_steps.PRODUCTS[dtype]), args=type_steps.arguments())


def few_heads_of_keys(devices: int) -> KindStep:
    """Eight heads of queries and two of keys, on up to eight devices."""
    from tests.sharding import test_axis_groups as heads

    return KindStep(step=heads.step_of(heads.grouped), args=heads.arguments(), recipes=SEQUENCES)


def latent_attention(devices: int) -> KindStep:
    from benchmarks.zoo.mla import mla

    return _of(mla(), recipes=SEQUENCES)


def latent_attention_in_blocks(devices: int) -> KindStep:
    from benchmarks.zoo.mla import mla

    return _of(mla(), recipes=SEQUENCES, options={"attention": "blockwise"})


def experts(devices: int) -> KindStep:
    """Eight experts by capacity."""
    return _of(CASES["moe"](), recipes=(*DENSE, EXPERT))


def six_experts(devices: int) -> KindStep:
    """Experts that four devices do not divide."""
    return _of(CASES["moe"](experts=6), recipes=(*DENSE, EXPERT))


def batch_statistics(devices: int) -> KindStep:
    return _accumulated("norm_loss", "BatchNorm")


def router(devices: int) -> KindStep:
    return _accumulated("router_loss", "moe")


def _accumulated(loss: str, module: str) -> KindStep:
    from tests.microbatch import test_accumulation as accumulation

    args = accumulation.state_of(), accumulation.batch_of(examples=24)
    return KindStep(step=accumulation.step_of(getattr(accumulation, loss)), args=args, per_microbatch=(module,))


def _of(case: Case, **details: Any) -> KindStep:
    state = case.init(jax.random.key(0))
    return KindStep(step=case.step, args=(state, jax.tree.map(jnp.asarray, case.batch(0))), **details)


KINDS: dict[str, Callable[[int], KindStep]] = {
    "kernel with a rule and a twin": kernel_with_a_rule,
    "kernel that no table has": unknown_kernel,
    "splash attention": splash,
    "megablox": megablox,
    "ragged_dot": ragged,
    "jax.nn.dot_product_attention": library_attention,
    "attention in blocks": attention_in_blocks,
    "custom_partitioning": custom_partitioning,
    "island": island,
    "island with sums": island_with_sums,
    "island for a stage's devices": island_in_stages,
    "shardings as advice": functools.partial(shardings_as, "advice"),
    "shardings as pins": functools.partial(shardings_as, "pins"),
    "shardings ignored": functools.partial(shardings_as, "ignore"),
    "named checkpoints": functools.partial(named_checkpoints, "KEPT", False),
    "named checkpoints in a scan": functools.partial(named_checkpoints, "KEPT", True),
    "named offload": functools.partial(named_checkpoints, "NAMED", False),
    "named offload in a scan": functools.partial(named_checkpoints, "NAMED", True),
    "checkpoints that the planner chooses": chosen_checkpoints,
    "debug.callback": functools.partial(callbacks, "in_layers", "nothing"),
    "io_callback and pure_callback": functools.partial(callbacks, "no_callback", "results"),
    "float8": functools.partial(of_type, "float8"),
    "int8": functools.partial(of_type, "int8"),
    "int4": functools.partial(of_type, "int4"),
    "complex64": functools.partial(of_type, "complex64"),
    "two heads of keys": few_heads_of_keys,
    "latent attention": latent_attention,
    "latent attention in blocks": latent_attention_in_blocks,
    "eight experts": experts,
    "six experts": six_experts,
    "batch statistics, per micro-batch": batch_statistics,
    "router, per micro-batch": router,
}
