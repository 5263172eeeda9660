"""What a pass of attention does on a device, by the kernel that runs it: arithmetic, memory traffic, scores held."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp

from autopar.common import jax_compat
from autopar.ops.attention.form import KEY, exact_type, goes_round, sizes_of
from autopar.ops.attention.kernels import LANES, SUBLANES, Kernel, runs_in_steps, visible_share
from autopar.ops.attention.ring import query_block
from autopar.ops.attention.ring_order import RingOrder, ring_order


def flops(eqn: Any, kernel: Kernel = Kernel.BLOCKS, ring: int = 1) -> float:
    """Two matrix products forward, five backward, as scores are computed again; the TPU's kernel computes the gradients
    of keys and values, and that of queries, from scores and gradients of weights of their own: seven.

    What a mask hides wholly is left out as far as `computed_share` says.
    """
    form, sizes = eqn.params["form"], sizes_of(eqn)
    inner, outer = (
        functools.reduce(lambda n, letter: n * sizes[letter], letters, 1.0)
        for letters in (set(form.query) - set(form.rows), set(form.out) - set(form.rows))
    )
    each = 2.0 * _scores(eqn) * computed_share(eqn, kernel, ring)
    if eqn.params["gradients"] is None:
        return each * (inner + outer)
    again = 1.0 if kernel is Kernel.TPU_SPLASH else 0.0
    return each * ((3.0 + again) * inner + (2.0 + again) * outer)


def order_of(eqn: Any, ring: int) -> RingOrder:
    """Whose keys come to a device in a ring of so many."""
    form = eqn.params["form"]
    return ring_order(form, sizes_of(eqn)[form.position] // ring, ring)


def computed_share(eqn: Any, kernel: Kernel, ring: int) -> float:
    """The part of all scores that is computed. Kernels leave out blocks that a mask hides wholly: of causal attention
    almost half. Blocks of XLA's leave out the hidden halves of a balanced ring's steps, and what a window does not
    reach.
    """
    if not goes_round(eqn):
        return 1.0
    form, positions = eqn.params["form"], sizes_of(eqn)[eqn.params["form"].position]
    return visible_share(form, kernel, positions) if kernel.skips else order_of(eqn, ring).computed_share


def in_steps(eqn: Any, kernel: Kernel, ring: int) -> bool:
    """Whether a pass in a ring runs as `autopar.ops.attention.execute` says."""
    form = eqn.params["form"]
    return runs_in_steps(form, kernel, sizes_of(eqn)[form.position] // ring, ring)


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
    """Bytes that a kernel takes beside its operands and results: the TPU's writes a number of each row of scores once
    for each lane, and reads two of them backward once for each sublane. Segments of queries it has once for each lane,
    those of keys for each sublane. Heads that fill no lanes are as wide as these in its operands and results.
    """
    if kernel is not Kernel.TPU_SPLASH:
        return 0
    form, sizes = eqn.params["form"], sizes_of(eqn)

    def of(letters: str) -> int:
        return functools.reduce(lambda n, letter: n * sizes[letter], letters, 4)

    def beside_heads(names: str, wide: str) -> int:
        (letter,) = set(wide) - set(form.rows)
        return of(names) // 4 // sizes[letter] * (-sizes[letter] % LANES) * jax_compat.itemsize(eqn.invars[0].aval)

    segments = sum(of(names) * (SUBLANES if KEY in names else LANES) for names in form.arrays)
    empty = sum(beside_heads(names, form.query) for names in (form.query, form.key))
    empty += sum(beside_heads(names, form.out) for names in (form.value, form.out))
    if eqn.params["gradients"] is None:
        return segments + empty + of(form.rows) * LANES
    return segments + 2 * empty + of(form.rows) * 2 * SUBLANES


def score_traffic_bytes(eqn: Any, ring: int = 1) -> float:
    """Memory traffic of all blocks of scores where XLA runs them, as its GPU compiler divides them into kernels.

    Forward: scores are written, read for each row's largest and sum, and read for the weights, which are written and
    read. Backward: scores and gradients of weights are written; weights are made of scores, written and read; scores
    and those gradients are read for the gradient of scores, which is written, and read by two products.
    """
    exact = jnp.dtype(exact_type(eqn.invars[0].aval)).itemsize
    narrow = jax_compat.itemsize(eqn.invars[2].aval)
    scores = _scores(eqn) * computed_share(eqn, Kernel.BLOCKS, ring)
    if eqn.params["gradients"] is None:
        return scores * (3 * exact + 2 * narrow)
    return scores * (5 * exact + 5 * narrow)


def launched_kernels(eqn: Any, kernel: Kernel, ring: int = 1) -> int:
    """The kernels that run a pass on one device in one step of a ring: of XLA's blocks those that `score_traffic_bytes`
    counts, for each block of queries.
    """
    if kernel is not Kernel.BLOCKS:
        return 1
    here = sizes_of(eqn)[eqn.params["form"].position] // ring
    return (4 if eqn.params["gradients"] is None else 7) * -(-here // query_block(here))


def step_traffic_bytes(eqn: Any) -> float:
    """Memory traffic beside the kernel of one step of a ring, on all devices: what the step has made is read, and added
    to what the others made, in 32 bits, which is read and written. Forward the result, backward the three gradients.
    """
    exact = jnp.dtype(exact_type(eqn.invars[0].aval)).itemsize
    made = eqn.outvars[:1] if eqn.params["gradients"] is None else eqn.outvars
    return float(sum(v.aval.size * (3 * exact) for v in made))


# The first arrays of those that go round; sums of gradients come behind them.
KEYS_AND_VALUES = 2


def travelling(eqn: Any) -> tuple[tuple[int, int], ...]:
    """(number of the operand of whose shape it is, bytes of an element) of each array that goes round the ring."""
    blocks = tuple((i, jax_compat.itemsize(eqn.invars[i].aval)) for i in (1, 2))
    if eqn.params["gradients"] is None:
        return blocks
    exact = jnp.dtype(exact_type(eqn.invars[0].aval)).itemsize
    return (*blocks, *((i, exact) for i in (1, 2)))


class ExchangedArrays(NamedTuple):
    """Arrays of a pass, by their numbers among its operands and among its results."""

    operands: tuple[int, ...]
    results: tuple[int, ...]


def exchanged(eqn: Any) -> ExchangedArrays:
    """The arrays whose positions change places in a balanced ring: before its first step, and after its last one. Those
    that scores read do so where they have positions of queries.
    """
    form = eqn.params["form"]
    first = len(eqn.invars) - len(form.arrays)
    arrays = tuple(first + i for i, names in enumerate(form.arrays) if form.position in names)
    if eqn.params["gradients"] is None:
        # The result, and one number of each row.
        return ExchangedArrays(operands=(0, 1, 2, *arrays), results=(0, 1))
    return ExchangedArrays(operands=(0, 1, 2, 3, 4, 6, *arrays), results=(0, 1, 2))


def held_in_steps(eqn: Any, order: RingOrder) -> tuple[tuple[int, int], ...]:
    """As `travelling`: what a ring's steps hold beside what goes round. Queries, keys and values with their positions
    changed; the sum of results, or of gradients of queries, in 32 bits; and of more than one step that of a step, and
    what arrives while a step is computed.
    """
    exact = jnp.dtype(exact_type(eqn.invars[0].aval)).itemsize
    placed = tuple((i, jax_compat.itemsize(eqn.invars[i].aval)) for i in (0, 1, 2)) if order.balanced else ()
    beside = ((0, exact), *travelling(eqn)) if order.steps > 1 else ()
    return (*placed, (0, exact), *beside)
