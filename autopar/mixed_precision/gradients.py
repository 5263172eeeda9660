"""`value_and_grad` under a policy: the casts are inside of what is differentiated."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from autopar.calls import nnx_objects
from autopar.calls.signatures import Signature
from autopar.common.paths import name_of_key
from autopar.errors import InvalidArgumentError, UnsupportedError
from autopar.mixed_precision.float8 import check_has_products, is_scaling
from autopar.mixed_precision.loss_scale import LossScale
from autopar.mixed_precision.wide_sums import with_wide_sums

logger = logging.getLogger("autopar")


class Types(Protocol):
    """What a policy says about gradients."""

    @property
    def param_dtype(self) -> np.dtype: ...

    @property
    def compute_dtype(self) -> np.dtype: ...

    @property
    def reduce_dtype(self) -> np.dtype: ...

    @property
    def float8(self) -> bool: ...

    @property
    def needs_loss_scale(self) -> bool: ...

    def cast_to_compute(self, tree: Any, keep: Sequence[str]) -> Any: ...

    def cast_to_output(self, tree: Any) -> Any: ...


def value_and_grad(
    policy: Types, function: Callable[..., Any], argnums: int | Sequence[int], has_aux: bool, keep: Sequence[str]
) -> Callable[..., Any]:
    """As `Policy.value_and_grad`."""
    numbers = (argnums,) if isinstance(argnums, int) else tuple(argnums)
    keep = (keep,) if isinstance(keep, str) else tuple(keep)

    def names_of(num_args: int) -> Sequence[str]:
        return Signature(function, getattr(function, "__name__", "function")).names_of(num_args)

    def computed(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """(loss, other results) in the output type."""
        # Arguments by position are in places of the names that they have in the signature, as those of jax.jit.
        args = tuple(
            arg if name in keep else policy.cast_to_compute(arg, keep)
            for name, arg in zip(names_of(len(args)), args, strict=True)
        )
        results = function(*args, **policy.cast_to_compute(kwargs, keep))
        loss, aux = results if has_aux else (results, None)
        return policy.cast_to_output((jnp.asarray(loss), aux))

    @functools.wraps(function)
    def differentiated(*args: Any, loss_scale: LossScale | None = None, **kwargs: Any) -> Any:
        if nnx_objects.holds_objects((args, kwargs)):
            raise _holds_objects(function)
        if loss_scale is not None and not (hasattr(loss_scale, "scale") and hasattr(loss_scale, "unscale")):
            raise InvalidArgumentError(
                where="value_and_grad(loss_fn)(..., loss_scale=...)", expected="a loss scale of the state, or None",
                got=f"{loss_scale!r}"[:60], hint="keep policy.init_loss_scale(1024.0) in the state and pass it",
            )  # fmt: skip
        _check_names(keep, names_of(len(args)), args, kwargs)
        if policy.needs_loss_scale and loss_scale is None:
            _warn_of_no_scale()
        if policy.float8:
            check_has_products(computed, args, kwargs)

        def scaled(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
            loss, aux = computed(*args, **kwargs)
            return loss if loss_scale is None else loss_scale.scale(loss), (loss, aux)

        places = {n % len(args) for n in numbers}
        wide = [_widened(policy, arg) if i in places else arg for i, arg in enumerate(args)]
        differentiate = jax.value_and_grad(scaled, argnums, has_aux=True)
        if policy.reduce_dtype.itemsize > policy.compute_dtype.itemsize:
            differentiate = with_wide_sums(differentiate, policy.reduce_dtype, _which_are_gradients)
        (_, (loss, aux)), gradients = differentiate(*wide, **kwargs)
        if loss_scale is not None:
            gradients = loss_scale.unscale(gradients)
        return ((loss, aux) if has_aux else loss), gradients

    return differentiated


@functools.cache
def _warn_of_no_scale() -> None:
    logger.warning(
        "gradients in float16 without a loss scale: those below 6e-8 become 0; keep policy.init_loss_scale() in the "
        "state and pass it as value_and_grad(loss_fn)(..., loss_scale=...), or compute in bfloat16"
    )


def _check_names(keep: Sequence[str], names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raises: InvalidArgumentError for a name that no argument has, and no entry of one."""
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path((args, kwargs))[0]]
    there = {*names, *kwargs, *(name_of_key(key) for path in paths for key in path)}
    for name in keep:
        if name not in there:
            raise InvalidArgumentError(
                where="value_and_grad(keep=...)",
                expected=f"names of arguments ({', '.join([*names, *kwargs])}), or of entries in them",
                got=repr(name),
                hint="write the name as in the signature of the loss function, or as the key in the batch",
            )


def _widened(policy: Types, params: Any) -> Any:
    """Parameters in the type of reductions where that is wider, so that gradients come back in it."""
    if policy.reduce_dtype.itemsize <= policy.param_dtype.itemsize:
        return params
    return jax.tree_util.tree_map_with_path(
        lambda path, x: (
            x.astype(policy.reduce_dtype) if jnp.issubdtype(x.dtype, jnp.floating) and not is_scaling(path) else x
        ),
        params,
    )


def _which_are_gradients(results: Any) -> Any:
    """A tree of bools for ((loss, others), gradients); what float8 scales by is no gradient."""
    values, gradients = results
    of_gradients = jax.tree_util.tree_map_with_path(
        lambda path, x: bool(jnp.issubdtype(x.dtype, jnp.floating)) and not is_scaling(path), gradients
    )
    return jax.tree.map(lambda _: False, values), of_gradients


def _holds_objects(function: Any) -> UnsupportedError:
    return UnsupportedError(
        where=f"value_and_grad({getattr(function, '__name__', function)})",
        expected="parameters as arrays in a tree",
        got="an NNX object, whose modules have types of their own",
        hint="give the modules dtype=policy.compute_dtype and param_dtype=policy.param_dtype and use "
        "nnx.value_and_grad, or nnx.split the model and pass its state",
    )
