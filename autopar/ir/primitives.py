"""Algebraic facts about primitives that sharding rules lack: linear operands, sums, numbers of multiplications.

They determine where partial (unreduced) values may flow. A primitive that is not listed counts as not linear: its
operands are reduced first, which is always correct.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import numpy as np

from autopar.common import jax_compat

# Linear in each set of operands jointly, the other operands held fixed.
_LINEAR: dict[str, tuple[frozenset[int], ...]] = {
    **dict.fromkeys(("add", "add_any", "sub"), (frozenset({0, 1}),)),
    **dict.fromkeys(
        ("neg", "transpose", "reshape", "squeeze", "expand_dims", "broadcast_in_dim", "reduce_sum", "cumsum", "slice",
         "copy", "rev", "dynamic_slice", "gather", "div", "reduce_window_sum", "real", "imag", "conj"),
        (frozenset({0}),),
    ),
    **dict.fromkeys(("mul", "dot_general", "conv_general_dilated"), (frozenset({0}), frozenset({1}))),
    **dict.fromkeys(("dynamic_update_slice", "pad"), (frozenset({0, 1}),)),
    **dict.fromkeys(("scatter-add", "scatter-sub"), (frozenset({0, 2}),)),
}  # fmt: skip

# Products of matrices, and convolutions: where a model's arithmetic is, and what reads a parameter as a matrix.
RAGGED_PRODUCT, GROUPED_PRODUCT = "ragged_dot_general", "grouped_product"
# Of operands in blocks, each with a scale: `jax.lax.scaled_dot`, and what `jax.nn.scaled_matmul` makes.
SCALED_DOT, SCALED_MATMUL = "scaled_dot", "scaled_matmul_wrapper"
SCALED_PRODUCTS = frozenset({SCALED_DOT, SCALED_MATMUL})
MATRIX_PRODUCTS = frozenset({"dot_general", "conv_general_dilated", RAGGED_PRODUCT, GROUPED_PRODUCT, *SCALED_PRODUCTS})
# What takes matrices apart, or solves with them: library calls on one matrix after the other, in the last two
# dimensions of operands and results.
DECOMPOSITIONS = frozenset(
    {"cholesky", "eig", "eigh", "geqrf", "hessenberg", "householder_product", "lu", "qr", "schur", "svd",
     "triangular_solve", "tridiagonal"}
)  # fmt: skip
# cuDNN's attention, forward and backward.
CUDNN_FORWARD, CUDNN_BACKWARD = "dot_product_attention_fwd_wrapper", "dot_product_attention_bwd_wrapper"
# Calls of code that XLA does not see into, whose factors are known by rules of their own: kernels, foreign functions,
# and calls with a partitioner of their own.
KERNEL_CALLS = frozenset(
    {"kernel", "pallas_call", "ffi_call", "tpu_custom_call", "custom_partitioning", CUDNN_FORWARD, CUDNN_BACKWARD}
)
# What changes the rows of an operand that indices name.
SCATTERS = ("scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max")
# What XLA's partitioner takes in equal parts only. Arrays that are split unevenly are filled up with zeros before them.
IN_EQUAL_PARTS = frozenset({"gather", "conv_general_dilated", *SCATTERS})
# Primitives whose reduced factors are sums, so that each device's result is a summand of the whole.
SUMMING = frozenset({"dot_general", "reduce_sum", "conv_general_dilated", "scatter-add", "gather"})
# Those of them that can be run on a device's own part as they are: nothing in their parameters depends on the size of
# what is summed. A gather is not, but for a lookup in a table (`autopar.lowering.emit`).
LOCALLY_SUMMING = frozenset(
    {"dot_general", "reduce_sum", "conv_general_dilated", "scatter-add", "kernel", RAGGED_PRODUCT, GROUPED_PRODUCT,
     *SCALED_PRODUCTS}
)  # fmt: skip
# Primitives whose reduced factors combine by an idempotent or associative operation other than a sum.
COMBINING = frozenset({"reduce_max", "reduce_min", "reduce_and", "reduce_or", "reduce_xor", "reduce_prod"})


def linear_operands(primitive: str, eqn: Any) -> tuple[frozenset[int], ...]:
    """The sets of operand positions in which an equation is linear; empty when it is in none.

    Linear here means that a sum goes through: of integers, which wrap around, where the type stays what it is.
    """
    if primitive == "select_n":
        return (frozenset(range(1, len(eqn.invars))),)
    if primitive == "concatenate":
        return (frozenset(range(len(eqn.invars))),)
    if primitive == "convert_element_type":
        return (frozenset({0}),) if _keeps_every_digit(eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype) else ()
    if primitive == "integer_pow":
        return (frozenset({0}),) if eqn.params["y"] == 1 else ()
    if primitive == "gather" and not _fills_linearly(eqn):
        return ()
    if primitive == "pad" and _pads_with_zeros(eqn):
        return (frozenset({0}), frozenset({0, 1}))
    if primitive == "div" and not is_summing_type(eqn):  # rounds
        return ()
    if primitive in ("dot_general", "conv_general_dilated") and not _multiplies_as_it_sums(eqn):
        return ()
    return _LINEAR.get(primitive, ())


@functools.lru_cache(256)
def dtype_text(dtype: Any) -> str:
    """The name of a type: numpy writes it anew each time, in Python."""
    return str(dtype)


@functools.lru_cache(256)
def is_inexact(dtype: Any) -> bool:
    """Whether a type is one of floating point numbers, real or complex."""
    return bool(jax.dtypes.issubdtype(dtype, np.inexact))


def is_summing_type(eqn: Any) -> bool:
    """Whether results may be held as partial sums: floating point, so that sums in any order are accepted."""
    return all(is_inexact(v.aval.dtype) for v in eqn.outvars)


def _multiplies_as_it_sums(eqn: Any) -> bool:
    """Whether integers of a product wrap around where those of its operands do."""
    types = {v.aval.dtype for v in (*eqn.invars, *eqn.outvars)}
    return len(types) == 1 or all(map(is_inexact, types))


def _keeps_every_digit(source: Any, target: Any) -> bool:
    """Whether a type has all numbers of another. Narrowing before a sum would round each summand."""
    if not (is_inexact(source) and is_inexact(target)):
        return False
    source_info, target_info = jax.numpy.finfo(source), jax.numpy.finfo(target)
    return bool(source_info.nmant <= target_info.nmant and source_info.maxexp <= target_info.maxexp)


def _fills_linearly(eqn: Any) -> bool:
    """Whether what a gather puts in the place of rows that are not there is what sums of it are: zero, or nan."""
    if eqn.params["mode"] != jax.lax.GatherScatterMode.FILL_OR_DROP:
        return True
    fill = eqn.params["fill_value"]
    return is_summing_type(eqn) if fill is None else bool(fill == 0 or fill != fill)


def _pads_with_zeros(eqn: Any) -> bool:
    padding = eqn.invars[1]
    return isinstance(padding, jax_compat.Literal) and bool(np.all(np.asarray(padding.val) == 0))


def window_dims(eqn: Any) -> tuple[tuple[int, int], ...]:
    """(operand, dimension) places over which a window slides: splitting them needs the neighbours' edges.

    Shardy's rule of a convolution calls them reduced or permuted, counting on a halo exchange.
    """
    if eqn.primitive.name != "conv_general_dilated":
        return ()
    numbers = eqn.params["dimension_numbers"]
    specs = (numbers.lhs_spec, numbers.rhs_spec)
    return tuple((operand, d) for operand, spec in enumerate(specs) for d in spec[2:])


def product_dimension_numbers(eqn: Any) -> Any:
    """((summed of both operands), (batches of both)) of a `dot_general`, or of a scaled product."""
    return eqn.params.get("dimension_numbers", (((2,), (2,)), ((0,), (0,))))


def multiplications(eqn: Any) -> float | None:
    """Those of a matrix product or a convolution; None of anything else.

    Of a convolution, what its window covers: zeros that are put between the inputs (`lhs_dilation`, as in the gradient
    of one with strides) are not multiplied with. Of a ragged product, each row with the matrix of its own group.
    """
    if eqn.primitive.name == "dot_general" or eqn.primitive.name in SCALED_PRODUCTS:
        (summed, _), _ = product_dimension_numbers(eqn)
        left_shape = eqn.invars[0].aval.shape
        return float(eqn.outvars[0].aval.size) * math.prod(left_shape[d] for d in summed)
    if eqn.primitive.name in (RAGGED_PRODUCT, GROUPED_PRODUCT):
        numbers = eqn.params["ragged_dot_dimension_numbers"]
        (summed, _), _ = numbers.dot_dimension_numbers
        left_shape, groups = eqn.invars[0].aval.shape, eqn.invars[2].aval.shape[-1]
        # Where the groups are parts of the summed dimension, the result has one matrix for each of them.
        parts = groups if set(numbers.lhs_ragged_dimensions) <= set(summed) else 1
        return float(eqn.outvars[0].aval.size) * math.prod(left_shape[d] for d in summed) / parts
    if eqn.primitive.name == "conv_general_dilated":
        kernel = eqn.invars[1].aval
        features = kernel.shape[eqn.params["dimension_numbers"].rhs_spec[0]]
        covered = float(eqn.outvars[0].aval.size) * kernel.size / features
        return covered / math.prod(eqn.params["lhs_dilation"])
    return None


def sums_locally(eqn: Any) -> bool:
    """Whether an equation with a split reduced factor can be run on a device's own part."""
    return eqn.primitive.name in LOCALLY_SUMMING or looked_up_dim(eqn) is not None


def looked_up_dim(eqn: Any) -> int | None:
    """The dimension of a table from which a gather takes whole rows by their numbers; None of any other equation."""
    if eqn.primitive.name != "gather":
        return None
    numbers, table = eqn.params["dimension_numbers"], eqn.invars[0].aval
    if len(numbers.start_index_map) != 1 or numbers.start_index_map != numbers.collapsed_slice_dims:
        return None
    (dim,) = numbers.start_index_map
    rest = (
        n == size for d, (n, size) in enumerate(zip(eqn.params["slice_sizes"], table.shape, strict=True)) if d != dim
    )
    return dim if not numbers.operand_batching_dims and all(rest) else None


# What `autopar.attention` puts in place of the operations of attention: forward, and backward.
ATTENTION_PASSES = ("attention", "attention_backward")
