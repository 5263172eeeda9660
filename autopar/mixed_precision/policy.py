"""Precision policies: the types of parameters, computation, outputs and reductions, as those of `jmp` with the last.

(1) Parameters and optimizer state are kept in `param_dtype`: float32 masters under every named policy.
(2) The loss function computes in `compute_dtype`. Parameters are cast inside of what is differentiated, so that their
    gradients come back in the type of (1); and autopar moves the cast before a gather, which then sends half the bytes.
(3) The loss and other floating results leave in `output_dtype`.
(4) Gradients are summed over examples, devices and micro-batches in `reduce_dtype` where that is wider than (2), and
    returned in it where it is wider than (1).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from autopar.common.paths import name_of_key
from autopar.errors import InvalidArgumentError
from autopar.mixed_precision.finite import all_finite, select
from autopar.mixed_precision.float8 import delayed_scaling, float8_dot_general, is_scaling
from autopar.mixed_precision.gradients import value_and_grad
from autopar.mixed_precision.loss_scale import FACTOR, FIRST, PERIOD, LossScale

T = TypeVar("T")

_DTYPES = {
    **dict.fromkeys(("f32", "fp32", "full", "float32"), "float32"),
    **dict.fromkeys(("bf16", "bfloat16"), "bfloat16"),
    **dict.fromkeys(("f16", "fp16", "float16"), "float16"),
    **dict.fromkeys(("f64", "fp64", "float64"), "float64"),
}
_FIELDS = {
    **dict.fromkeys(("p", "params"), "param_dtype"),
    **dict.fromkeys(("c", "compute"), "compute_dtype"),
    **dict.fromkeys(("o", "output"), "output_dtype"),
    **dict.fromkeys(("r", "reductions"), "reduce_dtype"),
}
_WHERE = "autopar.precision"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Types for a training step. Made by `autopar.precision`.

    Attributes:
        float8: Whether matrix products take float8 operands, through `dot_general_cls` or `dot_general`.
    """

    param_dtype: np.dtype
    compute_dtype: np.dtype
    output_dtype: np.dtype
    reduce_dtype: np.dtype
    float8: bool = False

    # Casts of the floating leaves of a tree

    def cast_to_param(self, tree: T) -> T:
        return cast(tree, self.param_dtype)

    def cast_to_compute(self, tree: T, keep: Sequence[str] = ()) -> T:
        """Entries and fields of the names in `keep` keep their types."""
        return cast(tree, self.compute_dtype, keep)

    def cast_to_output(self, tree: T) -> T:
        return cast(tree, self.output_dtype)

    # Gradients

    def value_and_grad(
        self,
        function: Callable[..., Any],
        argnums: int | Sequence[int] = 0,
        has_aux: bool = False,
        keep: Sequence[str] = (),
    ) -> Callable[..., Any]:
        """`jax.value_and_grad` of a function that computes in `compute_dtype`: arguments are cast to it, results to
        `output_dtype`. Gradients are summed in `reduce_dtype` where it is wider, and come back in the parameters' type,
        or that of reductions where it is wider. Arguments with a name in `keep`, such as a regression's targets, keep
        their types, and so do entries of arguments.

        What is returned takes one keyword more, `loss_scale`: the gradients are those of the scaled loss, unscaled.

        Raises: InvalidArgumentError under "fp8" where no product of the function has float8 operands, and for a name in
        `keep` that nothing has; UnsupportedError for NNX objects.
        """
        return value_and_grad(self, function, argnums, has_aux, keep)

    @property
    def needs_loss_scale(self) -> bool:
        """Whether small gradients vanish in the type that is computed in, as they do in float16."""
        return self.compute_dtype == np.float16

    def init_loss_scale(
        self, first: float = FIRST, *, period: int = PERIOD, factor: float = FACTOR, least: float = 1.0
    ) -> LossScale:
        """A dynamic loss scale, a part of the state. As `LossScale.create`. Raises: InvalidArgumentError."""
        return LossScale.create(first, period=period, factor=factor, least=least)

    def apply_if_finite(self, gradients: Any, new: T, old: T) -> tuple[T, jax.Array]:
        """(the new state where all gradients are finite, else the old one; whether they are).

        Loss scales in the state are adjusted either way. Everything stays inside of the step: on each device and each
        stage its part of the state is selected, by one number that all of them have.
        """
        finite = all_finite(gradients)
        return select(finite, new, old), finite

    # Products of float8 operands

    @property
    def dot_general_cls(self) -> Any:
        """The argument `dot_general_cls` of Flax Linen modules (`nn.Dense` and others); None without float8.

        Flax's own operation, with delayed scaling: scales and the largest numbers of the latest steps are variables of
        the collection `_overwrite_with_gradient`, whose "gradient" is their next value.
        """
        return delayed_scaling() if self.float8 else None

    @property
    def dot_general(self) -> Any:
        """As `jax.lax.dot_general`, for what has no variables: `nnx.Linear(..., dot_general=policy.dot_general)`.

        With float8 each operand is scaled as a whole, by its largest number in this step.
        """
        return float8_dot_general if self.float8 else jax.lax.dot_general

    def __str__(self) -> str:
        types = ("params", self.param_dtype), ("compute", self.compute_dtype), ("output", self.output_dtype)
        return ",".join(f"{name}={dtype}" for name, dtype in (*types, ("reductions", self.reduce_dtype)))


def precision(policy: Any) -> Policy:
    """A precision policy.

    Args:
        policy: "bf16", "fp16" (with a dynamic loss scale) or "fp8" (bfloat16, products with float8 operands), each
            with float32 parameters, outputs and reductions; types by name, as
            "params=float32,compute=bfloat16,output=float32,reductions=float32" (parameters are float32 unless said,
            the others of the parameters' type); or an object with param_dtype, compute_dtype and output_dtype, such as
            a `jmp.Policy`.

    Raises: InvalidArgumentError.
    """
    if isinstance(policy, Policy):
        return policy
    if isinstance(policy, str):
        return _of_text(policy)
    named = {name: getattr(policy, name, None) for name in ("param_dtype", "compute_dtype", "output_dtype")}
    if None in named.values():
        raise _invalid(repr(policy)[:80])
    return _of_types({**named, "reduce_dtype": getattr(policy, "reduce_dtype", None) or named["param_dtype"]})


def _of_text(text: str) -> Policy:
    named = text.strip().lower()
    if named in ("fp8", "float8"):
        return dataclasses.replace(_of_types({"compute_dtype": "bfloat16"}), float8=True)
    if named in _DTYPES:
        return _of_types({"compute_dtype": _DTYPES[named]})
    types = {}
    for part in named.split(","):
        key, _, dtype = (word.strip() for word in part.partition("="))
        if key not in _FIELDS or dtype not in _DTYPES:
            raise _invalid(repr(text))
        types[_FIELDS[key]] = _DTYPES[dtype]
    return _of_types(types)


def _of_types(types: Mapping[str, Any]) -> Policy:
    params = types.get("param_dtype", "float32")
    every = {"param_dtype": params, "compute_dtype": params, "output_dtype": params, "reduce_dtype": params, **types}
    dtypes = {name: np.dtype(dtype) for name, dtype in every.items()}
    for name, dtype in dtypes.items():
        if not jnp.issubdtype(dtype, jnp.floating) or dtype.itemsize < 2:
            raise InvalidArgumentError(
                where=f"{_WHERE}, {name}", expected="a floating type of 16 bits or more", got=str(dtype),
                hint="for products of float8 operands take autopar.precision('fp8')",
            )  # fmt: skip
        if jnp.dtype(dtype) == jnp.float64 and not jax.config.read("jax_enable_x64"):
            raise InvalidArgumentError(
                where=f"{_WHERE}, {name}", expected="a type that JAX has", got="float64",
                hint="set jax.config.update('jax_enable_x64', True) first",
            )  # fmt: skip
    return Policy(**dtypes)


def _invalid(got: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        where=_WHERE,
        expected="'bf16', 'fp16', 'fp8', types as 'params=float32,compute=bfloat16,output=float32', or a policy",
        got=got,
        hint="names of types are float32, bfloat16, float16 and float64; a policy has param_dtype, compute_dtype and "
        "output_dtype, as jmp.Policy",
    )


def cast(tree: T, dtype: Any, keep: Sequence[str] = ()) -> T:
    """The tree with its floating arrays in a type; those under names in `keep`, and scales of float8, keep theirs."""

    def leaf(path: Any, x: Any) -> Any:
        is_array = isinstance(x, (np.ndarray, np.generic, jax.Array))
        if not is_array or not jnp.issubdtype(x.dtype, jnp.floating) or is_scaling(path):
            return x
        if keep and any(name_of_key(key) in keep for key in path):
            return x
        return x if x.dtype == dtype else x.astype(dtype)

    return jax.tree_util.tree_map_with_path(leaf, tree)
