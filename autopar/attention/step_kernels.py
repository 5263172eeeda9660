"""What computes one step of a ring: a kernel of a library, or blocks of XLA's.

Results of a part of the keys are joined by the largest or the sum of each row. The arrays lie as the kernel takes them.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import jax.numpy as jnp

from autopar.attention import ring
from autopar.attention.form import KEY, AttentionForm, Gradients, exact_type
from autopar.attention.kernels import KERNEL_CALLS, CanonicalShape, Kernel
from autopar.attention.masks import DistanceMask, distance_mask
from autopar.attention.ring import At, Places

Arrays = tuple[Any, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Axes:
    """The dimension of positions of the arrays of a step."""

    operands: tuple[int, ...]  # queries, keys and values
    rows: tuple[int, ...]  # the result, the logarithm of each row's sum, and the gradient of the result
    part: tuple[int, ...]  # the result of a part of the keys
    result: tuple[int, ...]  # the result, and the logarithm of each row's sum
    gradients: tuple[int, ...]  # of queries, keys and values


class StepKernel(Protocol):
    """What computes steps, and how their arrays lie."""

    axes: Axes

    def operands(self, query: Any, key: Any, value: Any) -> Arrays: ...

    def rows(self, out: Any, log_sum: Any, change: Any) -> Arrays: ...

    def forward(self, q: Any, k: Any, v: Any, at: At, is_own: bool) -> Arrays:
        """The result of a part of the keys."""
        ...

    def joined(self, one: Arrays, other: Arrays) -> Arrays:
        """The result of both parts; of the first each row has seen some keys."""
        ...

    def result(self, part: Arrays, dtype: Any) -> Arrays:
        """(result, logarithm of the sum of each row) of all keys."""
        ...

    def backward(self, q: Any, k: Any, v: Any, rows: Arrays, at: At, is_own: bool) -> Arrays:
        """Gradients of queries, keys and values, of a part of the keys, in 32 bits."""
        ...

    def native_result(self, out: Any, log_sum: Any) -> Arrays:
        """The results as the operation has them."""
        ...

    def native_gradients(self, of_query: Any, of_key: Any, of_value: Any) -> Arrays: ...


def step_kernel(
    form: AttentionForm, gradients: Gradients | None, kernel: Kernel, places: Places, query: Any
) -> StepKernel:
    if kernel is Kernel.BLOCKS:
        return _BlockSteps(form, gradients, places)
    mask = distance_mask(form, query.shape[form.query.index(form.position)] * places.size(form.position))
    assert mask is not None, "the kernel was chosen for its mask"
    return _KernelSteps(form, gradients, kernel, mask, query)


class _KernelSteps:
    """Steps of a library's kernel: (examples, heads, positions, width)."""

    axes = Axes(operands=(2, 2, 2), rows=(2, 2, 2), part=(2, 2), result=(2, 2), gradients=(2, 2, 2))

    def __init__(
        self, form: AttentionForm, gradients: Gradients | None, kernel: Kernel, mask: DistanceMask, query: Any
    ) -> None:
        self.form, self.gradients, self.kernel, self.mask = form, gradients, kernel, mask
        self.shape, self.exact = CanonicalShape(form, query), exact_type(query)

    def operands(self, query: Any, key: Any, value: Any) -> Arrays:
        return self.shape.operands(query, key, value)

    def rows(self, out: Any, log_sum: Any, change: Any) -> Arrays:
        form, gradients = self.form, self.gradients
        assert gradients is not None, "rows are read in a backward pass"
        names = (form.out, form.rows, gradients.out)
        return tuple(self.shape.into(a, n, form.position) for a, n in zip((out, log_sum, change), names, strict=True))

    def forward(self, q: Any, k: Any, v: Any, at: At, is_own: bool) -> Arrays:
        run, _ = KERNEL_CALLS[self.kernel]
        # Its own positions are in order on each device, so that the mask is that of neighbouring ones.
        out, largest, total = run(q, k, v, scale=self.mask.scale, causal=self.mask.causal and is_own)
        return out.astype(self.exact), largest + jnp.log(total)

    def joined(self, one: Arrays, other: Arrays) -> Arrays:
        log_sum = jnp.logaddexp(one[1], other[1])
        by = [jnp.exp(part[1] - log_sum)[..., None] for part in (one, other)]
        return one[0] * by[0] + other[0] * by[1], log_sum

    def result(self, part: Arrays, dtype: Any) -> Arrays:
        return part[0].astype(dtype), part[1]

    def backward(self, q: Any, k: Any, v: Any, rows: Arrays, at: At, is_own: bool) -> Arrays:
        out, log_sum, change = rows
        _, run = KERNEL_CALLS[self.kernel]
        saved = (out, log_sum, jnp.ones_like(log_sum))
        made = run(q, k, v, saved, change, scale=self.mask.scale, causal=self.mask.causal and is_own)
        return tuple(a.astype(self.exact) for a in made)

    def native_result(self, out: Any, log_sum: Any) -> Arrays:
        form = self.form
        return self.shape.back(out, form.out, form.position), self.shape.back(log_sum, form.rows, form.position)

    def native_gradients(self, of_query: Any, of_key: Any, of_value: Any) -> Arrays:
        assert self.gradients is not None, "gradients are made in a backward pass"
        names = (self.gradients.query, self.form.position), (self.gradients.key, KEY), (self.gradients.value, KEY)
        return tuple(self.shape.back(a, *name) for a, name in zip((of_query, of_key, of_value), names, strict=True))


class _BlockSteps:
    """Steps in blocks of XLA's, of any form: arrays lie as the operation has them."""

    def __init__(self, form: AttentionForm, gradients: Gradients | None, places: Places) -> None:
        self.form, self.gradients, self.places = form, gradients, places
        at, rows = form.position, form.rows.index(form.position)
        made = gradients or Gradients(out=form.out, query=form.query, key=form.key, value=form.value)
        self.axes = Axes(
            operands=(form.query.index(at), form.key.index(KEY), form.value.index(KEY)),
            rows=(form.out.index(at), rows, made.out.index(at)),
            part=(ring.weighed(form).index(at), rows, rows),
            result=(form.out.index(at), rows),
            gradients=(made.query.index(at), made.key.index(KEY), made.value.index(KEY)),
        )

    def operands(self, query: Any, key: Any, value: Any) -> Arrays:
        return query, key, value

    def rows(self, out: Any, log_sum: Any, change: Any) -> Arrays:
        return out, log_sum, change

    def forward(self, q: Any, k: Any, v: Any, at: At, is_own: bool) -> Arrays:
        return ring.block_forward(self.form, self.places, at, q, k, v)

    def joined(self, one: Arrays, other: Arrays) -> Arrays:
        return ring.joined(self.form, one, other)

    def result(self, part: Arrays, dtype: Any) -> Arrays:
        return ring.weighed_result(self.form, part, dtype), part[1] + jnp.log(part[2])

    def backward(self, q: Any, k: Any, v: Any, rows: Arrays, at: At, is_own: bool) -> Arrays:
        assert self.gradients is not None, "gradients are made in a backward pass"
        out, log_sum, change = rows
        along = ring.change_along(self.form, self.gradients, out, change)
        given = change, log_sum, jnp.ones_like(log_sum), along
        return ring.block_backward(self.form, self.gradients, self.places, at, (q, k, v), given)

    def native_result(self, out: Any, log_sum: Any) -> Arrays:
        return out, log_sum

    def native_gradients(self, of_query: Any, of_key: Any, of_value: Any) -> Arrays:
        return of_query, of_key, of_value
