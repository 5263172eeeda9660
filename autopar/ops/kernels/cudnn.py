"""Calls of cuDNN's attention (`jax.nn.dot_product_attention(implementation="cudnn")`): split over examples and heads.

Heads of queries that share a key head stay together. Each device calls cuDNN on its part. Left whole: calls with
dropout (every device would draw the same bits), packed sequences, page tables, and those that give a gradient of a
bias.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autopar.ir.graph import Factor, FactorKind, NamedDims, Rule
from autopar.ir.primitives import CUDNN_BACKWARD, CUDNN_FORWARD
from autopar.ops.kernels.operation import KernelWork

FORWARD, BACKWARD = CUDNN_FORWARD, CUDNN_BACKWARD
NAMES = (FORWARD, BACKWARD)
_EXAMPLES = "b"
# By the call's layout: queries, keys and values; n: heads of queries, g: of keys.
_LAYOUTS = {0: ("btnh", "bsgh"), 1: ("bnth", "bgsh")}
_SPARE = "...."  # offsets of packed sequences, page tables: whole
_PRODUCTS = {FORWARD: 2, BACKWARD: 5}
_CAUSAL = ("CAUSAL", "PADDING_CAUSAL", "CAUSAL_BOTTOM_RIGHT")


def is_cudnn_attention(eqn: Any) -> bool:
    return eqn is not None and eqn.primitive.name in NAMES and _letters(eqn) is not None


def _letters(eqn: Any) -> tuple[list[str], list[str]] | None:
    """What the dimensions of operands and results are; None of a call that is left whole."""
    params, shapes = eqn.params, [v.aval.shape for v in eqn.invars]
    layout = _LAYOUTS.get(int(params["layout"]))
    packed_or_paged = any(0 not in shape for shape in shapes[6:10])
    gives_bias_gradient = eqn.primitive.name == BACKWARD and params["variadic_args"][1]
    if layout is None or params["dropout_rate"] or gives_bias_gradient or packed_or_paged:
        return None
    query, key = layout
    operands = [query, key, key, "bnts", "b", "b", *_SPARE]
    results = [query, "bnt"][: len(eqn.outvars)]
    if eqn.primitive.name == BACKWARD:
        operands += ["bnt", query, query]
        results = [query, key, key]
    # What a call does not have is an array of no numbers.
    operands = ["." * len(shape) if 0 in shape else names for names, shape in zip(operands, shapes, strict=False)]
    fits = len(operands) == len(shapes) and len(results) == len(eqn.outvars)
    return (operands, results) if fits and shapes[0][query.index("n")] % shapes[1][key.index("g")] == 0 else None


def cudnn_rule(eqn: Any) -> Rule:
    letters = _letters(eqn)
    assert letters is not None, "asked of calls that may be split"
    operands, results = letters
    query, key = eqn.invars[0].aval.shape, eqn.invars[1].aval.shape
    examples, key_heads = query[0], key[operands[1].index("g")]
    factors = {name: Factor(size, FactorKind.PASS) for name, size in (("b", examples), ("g", key_heads))}
    of = {"b": "b", "g": "g", "n": "g"}  # heads of queries are those of keys, and what is left

    def named(arrays: Sequence[str], variables: Sequence[Any]) -> NamedDims:
        for names, v in zip(arrays, variables, strict=True):
            shape = v.aval.shape
            split = [x in of and n > 1 and n % factors[of[x]].size == 0 for x, n in zip(names, shape, strict=True)]
            yield [(of[x],) if is_split else () for x, is_split in zip(names, split, strict=True)], shape

    return Rule.by_names(named(operands, eqn.invars), named(results, eqn.outvars), lambda name, _: factors[name])


def cudnn_work(eqn: Any) -> KernelWork:
    """Products of queries, keys and values: two forward, five backward; of causal attention half of each."""
    operands, _ = _letters(eqn) or ([], [])
    length = eqn.invars[1].aval.shape[operands[1].index("s")]
    share = 0.5 if getattr(eqn.params["mask_type"], "name", "") in _CAUSAL else 1.0
    return KernelWork(flops=2.0 * _PRODUCTS[eqn.primitive.name] * eqn.invars[0].aval.size * length * share)


def examples_of(eqn: Any) -> tuple[list[int | None], list[int | None]]:
    """The dimension of examples of each operand and each result."""
    letters = _letters(eqn)
    assert letters is not None, "asked of calls that may be split"

    def places(names: Sequence[str], variables: Sequence[Any]) -> list[int | None]:
        return [
            row.index(_EXAMPLES) if _EXAMPLES in row and v.aval.shape[row.index(_EXAMPLES)] > 1 else None
            for row, v in zip(names, variables, strict=True)
        ]

    return places(letters[0], eqn.invars), places(letters[1], eqn.outvars)


def run_cudnn(eqn: Any, parts: Sequence[Any]) -> Sequence[Any]:
    """The call on one device's part: below the partitioner of its own that jax puts around it."""
    made: Sequence[Any] = eqn.primitive.impl(*parts, **eqn.params)
    return made
