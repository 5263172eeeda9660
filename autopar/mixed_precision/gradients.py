"""`value_and_grad` under a policy: the casts are inside of what is differentiated."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from autopar.calls import nnx_objects
from autopar.errors import UnsupportedError
from autopar.mixed_precision.float8 import check_has_products, is_scaling
from autopar.mixed_precision.loss_scale import LossScale


class Types(Protocol):
    """What a policy says about gradients."""

    @property
    def param_dtype(self) -> np.dtype: ...

    @property
    def reduce_dtype(self) -> np.dtype: ...

    @property
    def float8(self) -> bool: ...

    def cast_to_compute(self, tree: Any, keep: Sequence[str]) -> Any: ...

    def cast_to_output(self, tree: Any) -> Any: ...


def value_and_grad(
    policy: Types, function: Callable[..., Any], argnums: int | Sequence[int], has_aux: bool, keep: Sequence[str]
) -> Callable[..., Any]:
    """As `Policy.value_and_grad`."""
    numbers = (argnums,) if isinstance(argnums, int) else tuple(argnums)

    def computed(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """(loss, other results) in the output type."""
        args, kwargs = policy.cast_to_compute((args, kwargs), keep)
        results = function(*args, **kwargs)
        loss, aux = results if has_aux else (results, None)
        return policy.cast_to_output((jnp.asarray(loss), aux))

    @functools.wraps(function)
    def differentiated(*args: Any, loss_scale: LossScale | None = None, **kwargs: Any) -> Any:
        if nnx_objects.holds_objects((args, kwargs)):
            raise _holds_objects(function)
        if policy.float8:
            check_has_products(computed, args, kwargs)

        def scaled(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
            loss, aux = computed(*args, **kwargs)
            return loss if loss_scale is None else loss_scale.scale(loss), (loss, aux)

        places = {n % len(args) for n in numbers}
        wide = [_widened(policy, arg) if i in places else arg for i, arg in enumerate(args)]
        (_, (loss, aux)), gradients = jax.value_and_grad(scaled, argnums, has_aux=True)(*wide, **kwargs)
        if loss_scale is not None:
            gradients = loss_scale.unscale(gradients)
        return ((loss, aux) if has_aux else loss), gradients

    return differentiated


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


def _holds_objects(function: Any) -> UnsupportedError:
    return UnsupportedError(
        where=f"value_and_grad({getattr(function, '__name__', function)})",
        expected="parameters as arrays in a tree",
        got="an NNX object, whose modules have types of their own",
        hint="give the modules dtype=policy.compute_dtype and param_dtype=policy.param_dtype and use "
        "nnx.value_and_grad, or nnx.split the model and pass its state",
    )
