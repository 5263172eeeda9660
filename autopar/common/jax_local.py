"""JAX API for code on one device's part that is private or differs between versions, and kernels of attention.

The kernels are cuDNN's on GPUs, Pallas's on TPUs. All take queries, keys and values as (examples, heads, positions,
width), with as many heads of queries as of keys or a multiple, and give or take of each row of scores its largest and
the sum of its exponentials over that of the largest. They are imported when they are called: jax loads neither of them
otherwise.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import custom_partitioning_sharding_rule as sharding_rules
from jax.extend import core as jax_core
from jax.interpreters import batching, mlir


def primitive(
    name: str,
    function: Callable[..., Any],
    batched: Callable[..., Any] | None = None,
    like: Callable[..., Any] | None = None,
) -> Any:
    """A new primitive with several results that does what a function of arrays and static parameters does.

    `batched` of arrays, their dimensions under `jax.vmap` and the parameters gives (results, their dimensions). `like`:
    a function with results of the same shapes and types that takes less time to trace.
    """
    new_primitive = jax_core.Primitive(name)
    new_primitive.multiple_results = True

    def shapes(*avals: Any, **params: Any) -> list[Any]:
        args = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals]
        out = jax.eval_shape(functools.partial(like or function, **params), *args)
        return [jax.core.ShapedArray(a.shape, a.dtype) for a in out]

    new_primitive.def_abstract_eval(shapes)
    new_primitive.def_impl(function)
    mlir.register_lowering(new_primitive, mlir.lower_fun(function, multiple_results=True))
    if batched is not None:
        batching.primitive_batchers[new_primitive] = batched
    return new_primitive


def sharding_rule_of(eqn: Any) -> Any | None:
    """The sharding rule of an equation of `custom_partitioning`, in Shardy's terms; None where it has none.

    Raises: what the user's function for the rule raises.
    """
    rule, sizes = eqn.params["sharding_rule"], {}
    if callable(rule):
        types = [[jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in of] for of in (eqn.invars, eqn.outvars)]
        rule = rule(*eqn.params["static_args"], jax.sharding.AbstractMesh((), ()), *types)
        if isinstance(rule, (list, tuple)) and len(rule) == 2:
            rule, sizes = rule
    return sharding_rules.str_to_sdy_sharding_rule(rule, **sizes) if isinstance(rule, str) else rule


def closed(jaxpr: Any, consts: Sequence[Any]) -> Any:
    """An open jaxpr with its constants."""
    return jax_core.ClosedJaxpr(jaxpr, list(consts))


# Equations of kernels

MEGABLOX_FILE = "jax/experimental/pallas/ops/tpu/megablox/gmm.py"


def megablox() -> Any:
    """The module of jax that has `gmm` and `tgmm`."""
    return importlib.import_module("jax.experimental.pallas.ops.tpu.megablox.gmm")


def with_primitive(eqn: Any, new_primitive: Any, **params: Any) -> Any:
    """An equation of the same variables, at the same line, with another primitive."""
    return eqn.replace(primitive=new_primitive, params=params, effects=jax_core.no_effects)


def transposed_first(eqn: Any) -> tuple[Any, Any] | None:
    """The transpose and the reshape of a reshape that takes the dimensions in another order, as the gradient of a
    product along an axis does; None of any other equation.
    """
    if eqn.primitive.name != "reshape" or eqn.params["dimensions"] is None:
        return None
    (operand,), order = eqn.invars, tuple(map(int, eqn.params["dimensions"]))
    between = jax_core.Var(operand.aval.update(shape=tuple(operand.aval.shape[d] for d in order)))
    transpose = eqn.replace(primitive=jax.lax.transpose_p, params={"permutation": order}, outvars=[between])
    return transpose, eqn.replace(invars=[between], params={**eqn.params, "dimensions": None})


def function_of(jaxpr: Any) -> tuple[str, str]:
    """(name, file) of the function that a jaxpr was traced from; empty texts where they are not known."""
    information = getattr(getattr(jaxpr, "debug_info", None), "func_src_info", None) or ""
    name, _, place = str(information).partition(" at ")
    return name, place.rpartition(":")[0]


def block_rows(size: Any) -> int | None:
    """The rows of one block of a Pallas call along a dimension; None where blocks may overlap or differ in size."""
    kind = type(size).__name__
    if size is None or kind == "Squeezed":
        return 1
    if isinstance(size, int):
        return size
    return int(size.block_size) if kind == "Blocked" else None


def smaller_call(eqn: Any, times: Mapping[int, int], shapes: Sequence[Sequence[int]]) -> Any:
    """A Pallas call whose grid dimensions are some times shorter, on operands and results of these shapes."""
    params = dict(eqn.params)
    mapping = params["grid_mapping"]
    blocks = shapes[len(eqn.invars) - mapping.num_inputs :]
    params["grid_mapping"] = mapping.replace(
        grid=tuple(n // times.get(g, 1) if g in times else n for g, n in enumerate(mapping.grid)),
        block_mappings=tuple(
            block.replace(array_aval=block.array_aval.update(shape=tuple(shape)))
            for block, shape in zip(mapping.block_mappings, blocks, strict=True)
        ),
    )
    made = zip(params["out_avals"], shapes[len(eqn.invars) :], strict=True)
    params["out_avals"] = tuple(aval.update(shape=tuple(shape)) for aval, shape in made)
    estimate, parts = params.get("cost_estimate"), math.prod(times.values())
    if estimate is not None:
        fields = {f.name: getattr(estimate, f.name) // parts for f in dataclasses.fields(estimate)}
        params["cost_estimate"] = type(estimate)(**fields)
    return eqn.replace(params=params)


def foreign_call_of(eqn: Any, shapes: Sequence[Sequence[int]]) -> Any:
    """A call of a foreign function (`jax.ffi`) with results of other sizes."""
    avals = eqn.params["result_avals"]
    made = tuple(aval.update(shape=tuple(shape)) for aval, shape in zip(avals, shapes, strict=True))
    return eqn.replace(params={**eqn.params, "result_avals": made})


def without_context_mesh(eqn: Any) -> Any:
    """An equation in the context in which it was traced, but for the mesh that was set."""
    if eqn.ctx.cur_abstract_mesh.empty:
        return eqn
    with eqn.ctx.manager, jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
        return eqn.replace(ctx=type(eqn.ctx)())


def _cudnn() -> Any:
    return importlib.import_module("jax._src.cudnn.fused_attention_stablehlo")


def _splash() -> Any:
    return importlib.import_module("jax.experimental.pallas.ops.tpu.splash_attention")


class ScoreOptions(NamedTuple):
    """Scores are `scale` times the product of query and key. `causal`: a query sees its own position and those before
    it, of these the last `window` ones where it is given. `segments` of queries and of keys, (examples, positions)
    each: a row sees some key of its own, if not here then in another part of the keys.
    """

    scale: float
    causal: bool
    window: int | None = None
    segments: tuple[Any, Any] | None = None


def cudnn_forward(q: Any, k: Any, v: Any, of: ScoreOptions) -> tuple[Any, Any, Any]:
    """(result, largest, total): cuDNN gives the logarithm of a row's sum, which stands for the largest of total one."""
    run = _cudnn()._dot_product_attention_fwd_impl
    out, log_sum = run(q, k, v, *_cudnn_nothing(q), is_training=True, **_cudnn_options(run, of))
    return out, log_sum, jnp.ones_like(log_sum)


def cudnn_backward(
    q: Any, k: Any, v: Any, saved: tuple[Any, Any, Any], change: Any, of: ScoreOptions
) -> tuple[Any, Any, Any]:
    """The gradients of queries, keys and values, from what the forward pass gave (`saved`)."""
    run, (out, largest, total) = _cudnn()._dot_product_attention_bwd_impl, saved
    log_sum, change = largest + jnp.log(total), change.astype(q.dtype)
    q_change, k_change, v_change = run(q, k, v, *_cudnn_nothing(q), log_sum, out, change, **_cudnn_options(run, of))
    return q_change, k_change, v_change


def _cudnn_nothing(q: Any) -> tuple[Any, ...]:
    """No bias, no lengths, no offsets, no pages."""
    return tuple(jnp.zeros(0, dtype=q.dtype) for _ in range(7))


def _cudnn_options(run: Callable[..., Any], of: ScoreOptions) -> dict[str, Any]:
    cudnn, names = _cudnn(), inspect.signature(run).parameters
    # From jax 0.12 on scores may be changed by a function.
    unchanged = {name: value for name, value in (("score_mod", None), ("score_mod_args", ())) if name in names}
    return {
        **unchanged,
        "scale": of.scale, "seed": 42, "dropout_rate": 0.0, "variadic_args": (False, False),
        "mask_type": cudnn.MaskType.CAUSAL if of.causal else cudnn.MaskType.NO_MASK,
        "layout": cudnn.AttentionLayout.BNTH.value, "sliding_window_length": of.window,
    }  # fmt: skip


def tpu_forward(q: Any, k: Any, v: Any, of: ScoreOptions) -> tuple[Any, Any, Any]:
    """As `cudnn_forward`, by splash attention."""
    kernel = _splash_kernel(*q.shape[1:3], k.shape[2], of.causal, of.window)
    out, (log_sum,) = jax.vmap(kernel)(_scaled(q, of.scale), k, v, _segment_ids(of))
    return out, log_sum, jnp.ones_like(log_sum)


def tpu_backward(
    q: Any, k: Any, v: Any, saved: tuple[Any, Any, Any], change: Any, of: ScoreOptions
) -> tuple[Any, Any, Any]:
    """As `cudnn_backward`, by splash attention."""
    out, largest, total = saved
    kernel, module = _splash_kernel(*q.shape[1:3], k.shape[2], of.causal, of.window), _splash().splash_attention_kernel
    options = {**kernel.kwargs, "save_residuals": False}

    def backward(q: Any, k: Any, v: Any, segments: Any, out: Any, log_sum: Any, change: Any) -> Any:
        read = q, k, v, segments, None, out, log_sum, kernel.dq_mask_info, kernel.dkv_mask_info
        return module._splash_attention_bwd(**options, res=read, do=change)[3:6]

    log_sum, change = largest + jnp.log(total), change.astype(q.dtype)
    args = _scaled(q, of.scale), k, v, _segment_ids(of), out, log_sum, change
    q_change, k_change, v_change = jax.vmap(backward)(*args)
    return _scaled(q_change, of.scale), k_change, v_change


def _scaled(a: Any, scale: float) -> Any:
    """The kernel knows no scale: queries have it, rounded to their type."""
    return a if scale == 1.0 else (a.astype(jnp.float32) * scale).astype(a.dtype)


@functools.cache
def _splash_kernel(heads: int, positions: int, keys: int, causal: bool, window: int | None) -> Any:
    """The kernel for one example, with so many heads and positions of queries, and positions of keys."""
    splash, shape, n, of_keys = _splash(), (positions, keys), tpu_block(positions), tpu_block(keys)
    before = None if window is None else window - 1
    mask = _band_mask()(shape, window_size=(before, 0), offset=0) if causal else splash.FullMask(shape)
    blocks = splash.BlockSizes(
        block_q=n, block_kv=of_keys, block_kv_compute=of_keys, block_q_dkv=n, block_kv_dkv=of_keys,
        block_kv_dkv_compute=of_keys, block_q_dq=n, block_kv_dq=of_keys,
    )  # fmt: skip
    masks = splash.MultiHeadMask([mask] * heads)
    with jax.ensure_compile_time_eval():
        kernel = splash.make_splash_mha_single_device(masks, block_sizes=blocks, save_residuals=True)
    for name in ("fwd_mask_info", "dq_mask_info", "dkv_mask_info"):  # arrays of no device: the kernel is kept
        setattr(kernel, name, jax.tree.map(np.asarray, getattr(kernel, name)))
    return kernel


@functools.cache
def _band_mask() -> Any:
    """`LocalMask` that computes no block of which it shows all or nothing: of 131,072 positions, all take a minute."""
    filled = functools.cache(np.full)

    class BandMask(_splash().LocalMask):  # type: ignore[misc]  # jax's module is imported where it is used
        def __getitem__(self, block: tuple[slice, slice]) -> Any:
            queries, keys = (range(n)[of] for n, of in zip(self.shape, block, strict=True))
            least, most, before = queries[0] - keys[-1], queries[-1] - keys[0], self.window_size[0]
            shows_all = least >= 0 and (before is None or most <= before)
            if shows_all or most < 0 or (before is not None and least > before):
                return filled((len(queries), len(keys)), shows_all)
            return super().__getitem__(block)

    return BandMask


def _segment_ids(of: ScoreOptions) -> Any:
    return None if of.segments is None else _splash().SegmentIds(*of.segments)


def tpu_block(positions: int) -> int:
    """Positions of a block: the most of jax's own benchmarks' that divide those of an array."""
    return next(n for n in (512, 256, 128) if positions % n == 0)
