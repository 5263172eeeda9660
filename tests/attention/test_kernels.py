"""Kernels of other libraries: which pass they take, what they leave out, and what they compute."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from autopar.attention import execute, kernels, ring
from autopar.attention.form import AttentionForm, DistanceMask, Gradients, distance_mask
from autopar.attention.kernels import Kernel, kernel_of, library_of, visible_share
from autopar.hardware import presets
from tests.attention.test_match import causal, distance, graph_of, padded, plain, stock, window_by_addition

SCALED = ("mul", (), ("score",), ("const", 0.25, "float32"))
POSITIONS = (("iota", "q", "int32"), ("iota", "k", "int32"))
CAUSAL = ("select_n", (), ("ge", (), *POSITIONS), ("const", -1e30, "float32"), SCALED)
# Queries of two heads share keys.
FORM = AttentionForm(
    query="bqhgd", key="bkhd", value="bkhd", out="bqhgd", rows="bhgq", position="q", score=CAUSAL, arrays=()
)


def form_of(attention):
    (op, *_) = (op for op in graph_of(attention).ops() if op.primitive == "attention")
    return op.eqn.params["form"]


def by_a_root(q, k, v, batch):
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / jnp.sqrt(q.shape[-1])
    scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, jnp.finfo(scores.dtype).min)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)


@pytest.mark.parametrize(
    ("attention", "mask"),
    [
        (plain, DistanceMask(scale=0.5, causal=False)),
        (causal, DistanceMask(scale=1.0, causal=True)),
        (stock, DistanceMask(scale=0.5, causal=True)),
        (by_a_root, DistanceMask(scale=0.5, causal=True)),
        (window_by_addition, None),
        (distance, None),
        (padded, None),
    ],
)
def test_masks_are_read_from_what_is_computed_of_positions(attention, mask):
    assert distance_mask(form_of(attention), 8) == mask


@pytest.mark.parametrize(
    ("condition", "is_causal"),
    [
        (("ge", (), *POSITIONS), True),
        (("not", (), ("gt", (), *POSITIONS[::-1])), True),
        (("ge", (), ("sub", (), *POSITIONS), ("const", 0, "int32")), True),
        (("gt", (), *POSITIONS), False),  # a query does not see itself
        (("le", (), *POSITIONS), False),  # it sees what comes later
        (("ge", (), ("add", (), POSITIONS[0], ("const", 1, "int32")), POSITIONS[1]), False),  # and the next one
    ],
)
def test_only_the_mask_of_causal_attention_is_one(condition, is_causal):
    form = dataclasses.replace(FORM, score=("select_n", (), condition, ("const", -1e30, "float32"), SCALED))
    assert (distance_mask(form, 8) == DistanceMask(scale=0.25, causal=True)) is is_causal


def test_a_mask_that_does_not_go_by_the_distance_is_none():
    """Positions before the third are hidden from all: as far as their distance goes that is no mask."""
    early = ("ge", (), POSITIONS[1], ("const", 3, "int32"))
    form = dataclasses.replace(FORM, score=("select_n", (), early, ("const", -1e30, "float32"), SCALED))
    assert distance_mask(form, 8) is None


def chosen(dtype, library, positions=256, width=16, form=FORM, ring=1):
    shapes = [(2, positions, 2, 2, width), (2, positions, 2, width), (2, positions, 2, width)]
    return kernel_of(form, shapes, [jnp.dtype(dtype)] * 3, library, ring)


def test_each_kernel_takes_its_types_and_sizes():
    assert chosen(jnp.bfloat16, Kernel.CUDNN) is Kernel.CUDNN
    assert chosen(jnp.float32, Kernel.CUDNN) is Kernel.BLOCKS
    assert chosen(jnp.bfloat16, Kernel.CUDNN, width=12) is Kernel.BLOCKS
    assert chosen(jnp.bfloat16, Kernel.CUDNN, width=256) is Kernel.BLOCKS
    assert chosen(jnp.bfloat16, Kernel.CUDNN, ring=2) is Kernel.CUDNN
    assert chosen(jnp.bfloat16, Kernel.CUDNN, ring=2, positions=255) is Kernel.BLOCKS  # no two halves
    assert chosen(jnp.float32, Kernel.TPU_FLASH) is Kernel.TPU_FLASH
    assert chosen(jnp.float32, Kernel.TPU_FLASH, positions=200) is Kernel.BLOCKS
    assert chosen(jnp.float32, Kernel.TPU_FLASH, positions=256, ring=2) is Kernel.TPU_FLASH
    assert chosen(jnp.float32, Kernel.TPU_FLASH, positions=128, ring=2) is Kernel.BLOCKS  # halves of 64
    assert chosen(jnp.bfloat16, Kernel.BLOCKS) is Kernel.BLOCKS


def test_the_libraries_of_devices():
    assert library_of(presets.H100) is Kernel.CUDNN
    assert library_of(presets.A100_80GB) is Kernel.CUDNN
    assert library_of(presets.TPU_V5E) is Kernel.TPU_FLASH
    assert library_of(presets.V100) is Kernel.BLOCKS  # cuDNN's need compute capability 8.0
    assert library_of(presets.MI300X) is Kernel.BLOCKS
    assert library_of(dataclasses.replace(presets.MI300X, name="AMD Instinct MI300X")) is Kernel.BLOCKS
    assert kernels.library_on(jax.devices("cpu")[0]) is Kernel.BLOCKS


def test_of_causal_attention_a_kernel_computes_the_blocks_on_the_diagonal_and_below():
    assert visible_share(FORM, 1024) == (8 * 9 / 2) / 64
    assert visible_share(dataclasses.replace(FORM, score=SCALED), 1024) == 1.0


@pytest.mark.slow
def test_the_kernel_of_tpus_computes_what_blocks_do():
    """Interpreted, as there is no TPU."""
    keys = jax.random.split(jax.random.key(0), 4)
    query, change = (jax.random.normal(key, (1, 128, 2, 2, 8)) for key in keys[:2])
    key, value = (jax.random.normal(key, (1, 128, 2, 8)) for key in keys[2:])
    gradients = Gradients(out="bqhgd", query="bqhgd", key="bkhd", value="bkhd")

    def passes(library):
        made = execute.run(FORM, None, ring.HERE, (query, key, value), library)
        return (*made, *execute.run(FORM, gradients, ring.HERE, (query, key, value, *made, change), library))

    with pltpu.force_tpu_interpret_mode():
        found = passes(Kernel.TPU_FLASH)
    for a, b in zip(passes(Kernel.BLOCKS), found, strict=True):
        np.testing.assert_allclose(b, a, atol=2e-6 * float(abs(a).max()))
