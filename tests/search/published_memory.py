"""Published memory of training steps: model states of ZeRO, activations of a transformer layer; and plans of such steps
that recipes make.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import autopar
from autopar import recipes
from autopar.plan.plan import Plan

HALF = jnp.float16
# Far above what any plan needs: nothing is to be decided by memory.
NO_LIMIT_BYTES = 10**18
ACTIVATION_TARGET = 0.02

# Rajbhandari et al., "ZeRO", arXiv:1910.02054, table 1: GB of model states on each of so many devices, as printed, by
# billions of parameters and by stage. Parameters and gradients take 2 bytes, the optimizer's state 12 (Adam, mixed
# precision). Small numbers are rounded there, large ones cut off: 4187.5 is 4187, 257.75 is 257.
DEVICES = (1, 4, 16, 64, 256, 1024)
ZERO_GB: dict[tuple[str, int], tuple[str, ...]] = {
    ("7.5", 1): ("120", "52.5", "35.6", "31.4", "30.4", "30.1"),
    ("7.5", 2): ("120", "41.3", "21.6", "16.6", "15.4", "15.1"),
    ("7.5", 3): ("120", "30", "7.5", "1.88", "0.47", "0.12"),
    ("128", 1): ("2048", "896", "608", "536", "518", "513"),
    ("128", 2): ("2048", "704", "368", "284", "263", "257"),
    ("128", 3): ("2048", "512", "128", "32", "8", "2"),
    ("1000", 1): ("16000", "7000", "4750", "4187", "4046", "4011"),
    ("1000", 2): ("16000", "5500", "2875", "2218", "2054", "2013"),
    ("1000", 3): ("16000", "4000", "1000", "250", "62.5", "15.6"),
}
PARAMETERS = {"7.5": 7_500_000_000, "128": 128_000_000_000, "1000": 1_000_000_000_000}
WIDTHS = {"7.5": 24_576, "128": 131_072, "1000": 262_144}


def matrices(num_parameters: int, width: int) -> list[tuple[int, ...]]:
    """Shapes of exactly so many parameters: square matrices, a last one with fewer columns, a short vector in front."""
    squares, rest = divmod(num_parameters, width * width)
    columns, rest = divmod(rest, width)
    vector = [(rest,)] if rest else []
    return [*vector, *[(width, width)] * squares, *([(width, columns)] if columns else [])]


def adam_step(state: dict[str, list[Any]], batch: dict[str, Any]) -> dict[str, list[Any]]:
    """Adam in mixed precision: 16-bit parameters and gradients; master copy, mean and variance of 32 bits."""

    def loss(params: list[Any]) -> Any:
        x = batch["x"]
        for p in params:
            x = x @ p if p.ndim == 2 else x * jnp.pad(p, (0, x.shape[1] - p.shape[0]))
        return jnp.mean(x.astype(jnp.float32) ** 2)

    def updated(master: Any, mean: Any, variance: Any, grad: Any) -> tuple[Any, Any, Any]:
        grad = grad.astype(jnp.float32)
        mean = 0.9 * mean + 0.1 * grad
        variance = 0.95 * variance + 0.05 * grad * grad
        return master - 1e-3 * mean / (jnp.sqrt(variance) + 1e-8), mean, variance

    grads = jax.grad(loss)(state["params"])
    new = [updated(*leaf) for leaf in zip(state["master"], state["mean"], state["variance"], grads, strict=True)]
    master, mean, variance = (list(column) for column in zip(*new, strict=True))
    return {"params": [x.astype(HALF) for x in master], "master": master, "mean": mean, "variance": variance}


def zero_plan(num_parameters: int, width: int, stage: int, num_devices: int) -> Plan:
    """The plan of `adam_step` on so many devices; two micro-batches, so that gradients are kept and added up."""
    shapes = matrices(num_parameters, width)

    def arrays(dtype: Any) -> list[jax.ShapeDtypeStruct]:
        return [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]

    masters = {name: arrays(jnp.float32) for name in ("master", "mean", "variance")}
    batch = {"x": jax.ShapeDtypeStruct((2 * max(DEVICES), width), HALF)}
    recipe = recipes.combine(zero=stage, num_microbatches=2)
    return _planned(adam_step, {"params": arrays(HALF), **masters}, batch, num_devices, recipe)


def _planned(step: Callable[..., Any], state: Any, batch: Any, num_devices: int, recipe: recipes.Recipe) -> Plan:
    return autopar.plan(
        step,
        state,
        batch,
        cluster=autopar.Cluster.flat(num_devices),
        plan=recipe,
        search=autopar.Search(memory_limit_bytes=NO_LIMIT_BYTES),
        cache_dir=None,
    )


def is_printed(value: float, printed: str) -> bool:
    """Whether a number, rounded or cut off to as many digits, is the printed one."""
    digits = len(printed.partition(".")[2])
    return abs(value - float(printed)) < 10**-digits


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """A GPT of three layers."""

    batch: int
    length: int
    width: int
    heads: int
    layers: int = 3


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A row of the second paper's table 2. `recomputes`: nothing, attention or layer."""

    name: str
    bytes_of: Callable[[int, int, int, int, int], float]
    tensor: bool = False
    sequence: bool = False
    recomputes: str = "nothing"


# Korthikanti et al., "Reducing activation recomputation in large transformer models", arXiv:2205.05198, table 2: bytes
# of activations per layer; s positions, b examples, h wide, a heads, t devices of a tensor group.
CASES = (
    Case(
        name="no parallelism",
        bytes_of=lambda s, b, h, a, t: s * b * h * (34 + 5 * a * s / h),
    ),
    Case(
        name="tensor parallel", tensor=True,
        bytes_of=lambda s, b, h, a, t: s * b * h * (10 + 24 / t + 5 * a * s / (h * t)),
    ),
    Case(
        name="tensor + sequence parallel", tensor=True, sequence=True,
        bytes_of=lambda s, b, h, a, t: s * b * h / t * (34 + 5 * a * s / h),
    ),
    Case(
        name="tensor parallel, attention recomputed", tensor=True, recomputes="attention",
        bytes_of=lambda s, b, h, a, t: s * b * h * (10 + 24 / t),
    ),
    Case(
        name="tensor + sequence parallel, attention recomputed", tensor=True, sequence=True,
        recomputes="attention", bytes_of=lambda s, b, h, a, t: s * b * h * 34 / t,
    ),
    Case(name="layer recomputed", recomputes="layer", bytes_of=lambda s, b, h, a, t: s * b * h * 2),
)  # fmt: skip


def layer_norm(x: Any, scale: Any, offset: Any) -> Any:
    y = x.astype(jnp.float32)
    y = (y - y.mean(-1, keepdims=True)) * jax.lax.rsqrt(y.var(-1, keepdims=True) + 1e-5)
    return (y * scale + offset).astype(x.dtype)


def dropout(key: Any, x: Any, rate: float = 0.1) -> Any:
    kept = jax.random.bernoulli(key, 1 - rate, x.shape)
    return jnp.where(kept, x / (1 - rate), 0).astype(x.dtype)


def attention(q: Any, k: Any, v: Any, key: Any) -> Any:
    """The core of causal attention: what the paper's selective recomputation makes again."""
    length = q.shape[1]
    later = jnp.triu(jnp.full((length, length), -jnp.inf, q.dtype), 1)  # added: a selection would keep its mask
    scores = jnp.einsum("bsad,btad->bast", q, k) / q.shape[-1] ** 0.5
    probabilities = dropout(key, jax.nn.softmax(scores + later, axis=-1))
    return jnp.einsum("bast,btad->bsad", probabilities, v)


def gpt_layer(p: dict[str, Any], x: Any, key: Any, recomputes_attention: bool) -> Any:
    """A layer that keeps what Megatron's kernels keep: of norms and GeLU the input alone."""
    norm, gelu = jax.checkpoint(layer_norm), jax.checkpoint(jax.nn.gelu)
    core = jax.checkpoint(attention) if recomputes_attention else attention
    in_attention, behind_attention, behind = jax.random.split(key, 3)
    y = norm(x, p["scale_1"], p["offset_1"])
    q, k, v = (jnp.einsum("bsh,had->bsad", y, p[name]) for name in "qkv")
    made = jnp.einsum("bsad,adh->bsh", core(q, k, v, in_attention), p["out"])
    x = x + dropout(behind_attention, made)
    y = gelu(norm(x, p["scale_2"], p["offset_2"]) @ p["widen"])
    return x + dropout(behind, y @ p["narrow"])


def gpt_step(recomputes: str) -> Callable[..., Any]:
    """A training step of such layers, by plain gradient descent. The key is state."""
    layer = functools.partial(gpt_layer, recomputes_attention=recomputes == "attention")
    layer = jax.checkpoint(layer) if recomputes == "layer" else layer

    def step(state: dict[str, Any], batch: dict[str, Any]) -> dict[str, Any]:
        def loss(params: list[dict[str, Any]]) -> Any:
            x = batch["x"]
            for i, p in enumerate(params):
                with jax.named_scope(f"layer{i}"):
                    x = layer(p, x, jax.random.fold_in(state["key"], i))
            return jnp.mean(x.astype(jnp.float32) ** 2)

        grads = jax.grad(loss)(state["params"])
        params = jax.tree.map(lambda p, g: p - 0.01 * g, state["params"], grads)
        return {"params": params, "key": jax.random.fold_in(state["key"], len(params))}

    return step


def gpt_plan(case: Case, sizes: Sizes, tensor_devices: int) -> Plan:
    h, a = sizes.width, sizes.heads
    shapes = {"q": (h, a, h // a), "k": (h, a, h // a), "v": (h, a, h // a), "out": (a, h // a, h)}
    shapes |= {"widen": (h, 4 * h), "narrow": (4 * h, h)}
    shapes |= dict.fromkeys(("scale_1", "offset_1", "scale_2", "offset_2"), (h,))
    params = [{n: jax.ShapeDtypeStruct(shape, HALF) for n, shape in shapes.items()} for _ in range(sizes.layers)]
    state = {"params": params, "key": jax.eval_shape(lambda: jax.random.key(0))}
    batch = {"x": jax.ShapeDtypeStruct((sizes.batch, sizes.length, h), HALF)}
    devices = tensor_devices if case.tensor else 1
    recipe = recipes.combine(dp=1, tp=devices, sequence_parallel=case.sequence)
    return _planned(gpt_step(case.recomputes), state, batch, devices, recipe)


def layer_bytes(plan: Plan, layer: int) -> int:
    """Bytes on one device that wait for a layer's backward pass."""
    return sum(row.saved_bytes for row in plan.record.modules if row.module.split("/")[0] == f"layer{layer}")


def published_bytes(case: Case, sizes: Sizes, tensor_devices: int) -> float:
    return case.bytes_of(sizes.length, sizes.batch, sizes.width, sizes.heads, tensor_devices)
