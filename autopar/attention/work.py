"""What a pass of attention does on a device, by the kernel that runs it: arithmetic, memory traffic, scores held."""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp

from autopar.attention.form import KEY, exact_type, sizes_of
from autopar.attention.kernels import LANES, Kernel, visible_share
from autopar.attention.query_blocks import query_block
from autopar.common import jax_compat


def flops(eqn: Any, kernel: Kernel = Kernel.BLOCKS) -> float:
    """Two matrix products forward, five backward, as scores are computed again; the TPU's kernel computes the gradients
    of keys and values, and that of queries, from scores and gradients of weights of their own: seven.

    Kernels leave out blocks that a mask hides wholly: of causal attention almost half.
    """
    form, sizes = eqn.params["form"], sizes_of(eqn)
    inner, outer = (
        functools.reduce(lambda n, letter: n * sizes[letter], letters, 1.0)
        for letters in (set(form.query) - set(form.rows), set(form.out) - set(form.rows))
    )
    share = visible_share(form, sizes[form.position]) if kernel.skips else 1.0
    each = 2.0 * _scores(eqn) * share
    if eqn.params["gradients"] is None:
        return each * (inner + outer)
    again = 1.0 if kernel is Kernel.TPU_FLASH else 0.0
    return each * ((3.0 + again) * inner + (2.0 + again) * outer)


def _scores(eqn: Any) -> float:
    sizes = sizes_of(eqn)
    return functools.reduce(lambda n, letter: n * sizes[letter], (*eqn.params["form"].rows, KEY), 1.0)


def block_bytes(eqn: Any, split: int = 1, ring: int = 1) -> int:
    """Bytes of the scores that a device holds at once, as they are computed: of a block of its queries, with the keys
    of one device. The pass is split among `split` devices, of which `ring` share positions.
    """
    here = sizes_of(eqn)[eqn.params["form"].position] // ring
    scores = _scores(eqn) / (split * ring) * query_block(here) / here
    return int(scores) * jnp.dtype(exact_type(eqn.invars[0].aval)).itemsize


def row_bytes(eqn: Any, kernel: Kernel) -> int:
    """Bytes that a kernel takes for numbers of each row of scores beside its operands and results: the TPU's has each
    number once for each lane, of two arrays forward, of three backward.
    """
    if kernel is not Kernel.TPU_FLASH:
        return 0
    sizes = sizes_of(eqn)
    rows = functools.reduce(lambda n, letter: n * sizes[letter], eqn.params["form"].rows, 4)
    return rows * LANES * (2 if eqn.params["gradients"] is None else 3)


def score_traffic_bytes(eqn: Any) -> float:
    """Memory traffic of all blocks of scores where XLA runs them, as its GPU compiler divides them into kernels.

    Forward: scores are written, read for each row's largest and sum, and read for the weights, which are written and
    read. Backward: scores and gradients of weights are written; weights are made of scores, written and read; scores
    and those gradients are read for the gradient of scores, which is written, and read by two products.
    """
    exact = jnp.dtype(exact_type(eqn.invars[0].aval)).itemsize
    narrow = jax_compat.itemsize(eqn.invars[2].aval)
    if eqn.params["gradients"] is None:
        return _scores(eqn) * (3 * exact + 2 * narrow)
    return _scores(eqn) * (5 * exact + 5 * narrow)


def travelling(eqn: Any) -> tuple[tuple[int, int], ...]:
    """(number of the operand of whose shape it is, bytes of an element) of each array that goes round the ring."""
    blocks = tuple((i, jax_compat.itemsize(eqn.invars[i].aval)) for i in (1, 2))
    if eqn.params["gradients"] is None:
        return blocks
    exact = jnp.dtype(exact_type(eqn.invars[0].aval)).itemsize
    return (*blocks, *((i, exact) for i in (1, 2)))
