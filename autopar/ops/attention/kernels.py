"""The kernels that run a pass of attention: which of them takes it, and the call of each.

On NVIDIA's GPUs cuDNN's fused attention, on TPUs the splash attention of jax's Pallas kernels, where they have the form
and the type; on other devices, and for other forms, XLA in blocks of queries (`ops.attention.ring`). None of the
kernels writes scores to memory. In a ring the same kernel runs each step (`autopar.ops.attention.execute`).

Sources: Dao, "FlashAttention-2", 2023; `jax.nn.dot_product_attention`; `jax.experimental.pallas.ops.tpu`.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from autopar.common import jax_local
from autopar.common.jax_local import ScoreOptions
from autopar.hardware.kinds import DeviceKind, Platform
from autopar.ops.attention.form import KEY, NONE, AttentionForm, DistanceMask, Gradients, distance_mask, holds
from autopar.ops.attention.ring_order import ring_order


class Kernel(enum.Enum):
    """What runs a pass of attention on one device."""

    BLOCKS = "XLA in blocks of queries"
    CUDNN = "cuDNN's fused attention"
    TPU_SPLASH = "Pallas splash attention"

    @property
    def skips(self) -> bool:
        """Whether blocks that a mask hides wholly are left out."""
        return self is not Kernel.BLOCKS

    @property
    def takes_segments(self) -> bool:
        """Whether scores between segments of packed sequences are hidden inside of the kernel."""
        return self is not Kernel.CUDNN

    @property
    def writes_scores(self) -> bool:
        """Whether blocks of scores go to memory."""
        return self is Kernel.BLOCKS


# Side of the blocks of scores that kernels compute or leave out.
_BLOCK = 128
LANES, SUBLANES = 128, 8  # of a TPU's registers
_CUDNN_WIDTH, _CUDNN_WIDTH_MULTIPLE = 128, 8  # of a head: the most on every card, and the multiple


def library_of(device: DeviceKind) -> Kernel:
    """The kernels that a device kind has."""
    if device.platform is Platform.TPU:
        return Kernel.TPU_SPLASH
    return Kernel.BLOCKS if device.attention_shares is None else Kernel.CUDNN


def library_on(device: Any) -> Kernel:
    """The kernels that a device of jax has: cuDNN's need compute capability 8.0."""
    if device.platform == "tpu":
        return Kernel.TPU_SPLASH
    capability = str(getattr(device, "compute_capability", ""))
    major = capability.split(".")[0]
    return Kernel.CUDNN if "." in capability and major.isdigit() and int(major) >= 8 else Kernel.BLOCKS


def kernel_of(
    form: AttentionForm, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[Any], library: Kernel, ring: int
) -> Kernel:
    """The kernel for one device's part of queries, keys and values of these shapes: one of the library, or blocks.
    `dtypes`: theirs, and those of the arrays that scores read. Among `ring` devices positions are split.
    """
    return Kernel.BLOCKS if _obstacle(form, shapes, dtypes, library, ring) else library


def _obstacle(
    form: AttentionForm, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[Any], library: Kernel, ring: int
) -> str:
    """The property that a kernel of a library does not take; empty where it takes all. Blocks take all."""
    if library is Kernel.BLOCKS:
        return ""
    if _dims(form) is None:
        return "dimensions that are no heads"
    if len(set(dtypes[:3])) > 1:
        return "operands of several types"
    positions, width = shapes[0][form.query.index(form.position)], shapes[0][inner_dim(form)]
    keys, of_values = shapes[1][form.key.index(KEY)], shapes[2][_outer_dim(form)]
    mask = distance_mask(form, max(positions, keys) * ring)
    if mask is None:
        return "a mask or a bias that is not causal" + (", or of segments" if library.takes_segments else "")
    if mask.segments is not None and (found := _obstacle_of_segments(form, mask.segments, dtypes[3:], library)):
        return found
    if mask.window is not None and ring > 1:
        return f"a window of {mask.window} keys in a ring"
    if mask.shown is not None and ring > 1:
        return "segments of which queries see nothing, in a ring"
    if width != of_values and library is Kernel.CUDNN:
        return f"values of another width ({of_values}) than keys ({width})"
    if mask.causal and keys != positions:
        return f"a causal mask over {keys} keys and {positions} queries"
    in_halves, dtype = mask.causal and ring > 1, jnp.dtype(dtypes[0])
    if in_halves and positions % 2:
        return f"{positions} positions, which two do not divide"
    if library is Kernel.CUDNN:
        if width > _CUDNN_WIDTH or width % _CUDNN_WIDTH_MULTIPLE:
            return f"heads of {width} (at most {_CUDNN_WIDTH}, in steps of {_CUDNN_WIDTH_MULTIPLE})"
        return "" if dtype in (jnp.bfloat16, jnp.float16) else f"{dtype} (bfloat16 or float16)"
    if positions % (2 * _BLOCK if in_halves else _BLOCK) or keys % _BLOCK:
        return f"{positions} queries and {keys} keys (multiples of {_BLOCK})"
    return "" if dtype in (jnp.bfloat16, jnp.float32) else f"{dtype} (bfloat16 or float32)"


def _obstacle_of_segments(
    form: AttentionForm, segments: tuple[int, int], dtypes: Sequence[Any], library: Kernel
) -> str:
    if not library.takes_segments:
        return "segments of packed sequences"
    apart, _ = _dims(form) or ("", "")
    if not {*form.arrays[segments[0]]} <= {*apart, form.position, NONE}:
        return "segments that heads which share keys have of their own"
    exact = all(jnp.dtype(t).kind in "biu" and jnp.dtype(t).itemsize <= 4 for t in dtypes)
    return "" if exact else f"segments of {dtypes[0]} (integers of 32 bits at most)"


def kernel_for(eqn: Any, library: Kernel, ring: int) -> Kernel:
    """The kernel for an equation of a pass, whose positions are split among `ring` devices."""
    return Kernel.BLOCKS if obstacle_for(eqn, library, ring) else library


def obstacle_for(eqn: Any, library: Kernel, ring: int) -> str:
    """The property of such an equation that a kernel of a library does not take; empty where it takes all."""
    form, avals = eqn.params["form"], [v.aval for v in eqn.invars[:3]]
    shapes = [
        tuple(n // ring if x in (form.position, KEY) else n for n, x in zip(a.shape, names, strict=True))
        for a, names in zip(avals, (form.query, form.key, form.value), strict=True)
    ]
    read = [v.aval for v in eqn.invars[len(eqn.invars) - len(form.arrays) :]]
    return _obstacle(form, shapes, [a.dtype for a in (*avals, *read)], library, ring)


def runs_in_steps(form: AttentionForm, kernel: Kernel, positions: int, ring: int) -> bool:
    """Whether a pass in a ring, with so many positions on a device, runs as `autopar.ops.attention.execute` says."""
    if ring == 1 or kernel is not Kernel.BLOCKS:
        return ring > 1
    order = ring_order(form, positions, ring)
    return order.balanced or not order.is_whole


def visible_share(form: AttentionForm, kernel: Kernel, positions: int) -> float:
    """The part of the blocks of scores in which a mask leaves something. Rates of causal attention are those of the
    blocks of `_BLOCK`, whatever more a kernel computes on the diagonal.
    """
    mask = distance_mask(form, positions)
    if mask is None or not mask.causal or positions <= _BLOCK:
        return 1.0
    causal = (1.0 + _BLOCK / positions) / 2.0
    if mask.window is None:
        return causal
    side = jax_local.tpu_block(positions) if kernel is Kernel.TPU_SPLASH else _BLOCK
    blocks = positions / side
    before = min(math.ceil((mask.window - 1) / side), blocks - 1)  # blocks of keys before a query's
    return min(causal, (blocks + before * (before + 1) / 2 + before * (blocks - 1 - before)) / blocks**2)


# Dimensions: those that keep everything apart, the groups of queries that share keys, and the width


def _dims(form: AttentionForm) -> tuple[str, str] | None:
    """(letters that queries, keys and values have in common, letters of queries alone); None for other forms."""
    apart = [x for x in form.rows if x in form.key]
    groups = [x for x in form.rows if x not in form.key and x != form.position]
    names = (form.query, form.key, form.value, form.out)
    if any(NONE in name for name in names) or set(apart) - set(form.value):
        return None
    wide = [set(form.query) - set(form.rows), set(form.value) - {KEY, *apart}]
    is_plain = all(len(letters) == 1 for letters in wide)
    return ("".join(apart), "".join(groups)) if is_plain and set(form.rows) <= set(form.query) else None


def inner_dim(form: AttentionForm) -> int:
    """The dimension of queries that products of queries and keys sum over."""
    return next(d for d, x in enumerate(form.query) if x not in form.rows)


def _outer_dim(form: AttentionForm) -> int:
    return next(d for d, x in enumerate(form.value) if x not in form.rows and x != KEY)


class CanonicalShape:
    """Arrays of a pass to and from (examples, heads, positions, width), heads of groups side by side."""

    def __init__(self, form: AttentionForm, query: Any) -> None:
        dims = _dims(form)
        assert dims is not None, "the kernel was chosen for its form"
        self.form = form
        self.apart, self.groups = dims
        # The last dimension is that of heads, but where segments have it: heads of queries that all share one of keys.
        has_heads = not any(x in names for x in self.apart[-1:] for names in form.arrays)
        self.examples = self.apart[:-1] if has_heads else self.apart
        self.size = dict(zip(form.query, query.shape, strict=True))

    def into(self, array: Any, names: str, position: str) -> Any:
        """(examples, heads, positions, width) of an array, or without width where it has none."""
        grouped = [x for x in self.groups if x in names]
        width = [x for x in names if x not in (*self.apart, *grouped, position)]
        order = [*self.apart, *grouped, position, *width]
        array = jnp.transpose(array, [names.index(x) for x in order])
        heads = self.of([*self.apart[len(self.examples) :], *grouped])
        return array.reshape((self.of(self.examples), heads, *array.shape[len(self.apart) + len(grouped) :]))

    def segments(self, mask: DistanceMask, arrays: Sequence[Any]) -> tuple[Any, Any] | None:
        """(examples, positions) of the segments of queries and of keys, of the arrays that scores read; None where the
        mask has none.
        """
        if mask.segments is None:
            return None
        of_query, of_key = mask.segments
        return self._of_examples(arrays, of_query, self.form.position), self._of_examples(arrays, of_key, KEY)

    def seeing(self, mask: DistanceMask, arrays: Sequence[Any]) -> Any:
        """(examples, 1, positions, 1): the queries of segments that see anything; None where all do."""
        if mask.shown is None or mask.segments is None:
            return None
        of_query = self._of_examples(arrays, mask.segments[0], self.form.position)
        return holds(mask.shown, of_query)[:, None, :, None]

    def _of_examples(self, arrays: Sequence[Any], number: int, position: str) -> Any:
        array, names = arrays[number], self.form.arrays[number]
        array = array.reshape([n for n, x in zip(array.shape, names, strict=True) if x != NONE])
        has, dims = names.replace(NONE, ""), (*self.examples, position)
        array = jnp.einsum(f"{has}->{''.join(x for x in dims if x in has)}", array)
        array = jnp.expand_dims(array, [d for d, x in enumerate(dims) if x not in has])
        sizes = *(self.size[x] for x in self.examples), array.shape[-1]
        return jnp.broadcast_to(array, sizes).reshape(-1, sizes[-1]).astype(jnp.int32)

    def of(self, letters: Sequence[str]) -> int:
        n = 1
        for letter in letters:
            n *= self.size[letter]
        return n

    def back(self, array: Any, names: str, position: str) -> Any:
        """An array with the dimensions of `names`."""
        grouped = [x for x in self.groups if x in names]
        width = [x for x in names if x not in (*self.apart, *grouped, position)]
        sizes = [self.size[x] for x in (*self.apart, *grouped)]
        order = [*self.apart, *grouped, position, *width]
        array = array.reshape((*sizes, *array.shape[2:]))
        return jnp.transpose(array, [order.index(x) for x in names])

    def operands(self, query: Any, key: Any, value: Any) -> tuple[Any, Any, Any]:
        form = self.form
        return (
            self.into(query, form.query, form.position),
            self.into(key, form.key, KEY),
            self.into(value, form.value, KEY),
        )


# The forward and the backward pass of each library.
KERNEL_CALLS: dict[Kernel, tuple[Callable[..., Any], Callable[..., Any]]] = {
    Kernel.CUDNN: (jax_local.cudnn_forward, jax_local.cudnn_backward),
    Kernel.TPU_SPLASH: (jax_local.tpu_forward, jax_local.tpu_backward),
}


def forward(
    form: AttentionForm, kernel: Kernel, query: Any, key: Any, value: Any, *arrays: Any
) -> tuple[Any, Any, Any]:
    """As `ring.forward`, on one device that has all positions."""
    shape, mask = CanonicalShape(form, query), _mask(form, query)
    run, _ = KERNEL_CALLS[kernel]
    of = ScoreOptions(mask.scale, mask.causal, mask.window, shape.segments(mask, arrays))
    q, k, v = shape.operands(query, key, value)
    out, largest, total = run(q, k, v, of)
    if (seeing := shape.seeing(mask, arrays)) is not None:
        groups = q.shape[1] // v.shape[1]
        mean = jnp.repeat(jnp.mean(v, axis=2, keepdims=True, dtype=jnp.float32), groups, axis=1)
        out = jnp.where(seeing, out, mean.astype(out.dtype))
    rows = [shape.back(a, form.rows, form.position) for a in (largest, total)]
    return shape.back(out, form.out, form.position), rows[0], rows[1]


def backward(
    form: AttentionForm,
    gradients: Gradients,
    kernel: Kernel,
    operands: tuple[Any, Any, Any],
    saved: tuple[Any, Any, Any],
    change: Any,
    *arrays: Any,
) -> tuple[Any, Any, Any]:
    """As `ring.backward`, on one device that has all positions."""
    shape, mask = CanonicalShape(form, operands[0]), _mask(form, operands[0])
    q, k, v = shape.operands(*operands)
    out = shape.into(saved[0], form.out, form.position)
    largest, total = (shape.into(a, form.rows, form.position) for a in saved[1:])
    change = shape.into(change, gradients.out, form.position)
    _, run = KERNEL_CALLS[kernel]
    of = ScoreOptions(mask.scale, mask.causal, mask.window, shape.segments(mask, arrays))
    seeing = shape.seeing(mask, arrays)
    seen = change if seeing is None else jnp.where(seeing, change, 0)
    q_change, k_change, v_change = run(q, k, v, (out, largest, total), seen, of)
    if seeing is not None:
        unseen = jnp.sum(jnp.where(seeing, 0, change), axis=2, keepdims=True, dtype=jnp.float32) / v.shape[2]
        unseen = jnp.sum(unseen.reshape((*v.shape[:2], -1, 1, v.shape[3])), axis=2)
        v_change = (v_change + unseen).astype(v_change.dtype)
    return (
        shape.back(q_change, gradients.query, form.position),
        shape.back(k_change, gradients.key, KEY),
        shape.back(v_change, gradients.value, KEY),
    )


def _mask(form: AttentionForm, query: Any) -> DistanceMask:
    mask = distance_mask(form, query.shape[form.query.index(form.position)])
    assert mask is not None, "the kernel was chosen for its mask"
    return mask
