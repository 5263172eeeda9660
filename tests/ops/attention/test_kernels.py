"""Kernels of other libraries: which pass they take, what they leave out, and what they compute."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo

import autopar
from autopar.common import jax_compat
from autopar.hardware import presets
from autopar.ops.attention import execute, kernels, ring
from autopar.ops.attention.form import AttentionForm, DistanceMask, Gradients, distance_mask
from autopar.ops.attention.kernels import Kernel, kernel_of, library_of, visible_share
from tests.ops.attention.test_match import causal, counted, distance, graph_of, padded, plain, stock, window_by_addition

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
        (counted, DistanceMask(scale=0.5, causal=True)),
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
        (("ge", (), *(("mul", (), at, ("const", 2, "int32")) for at in POSITIONS)), True),
        (("ge", (), ("mul", (), POSITIONS[0], ("const", 2, "int32")), POSITIONS[1]), False),
        (("le", (), *(("mul", (), ("const", -1, "int32"), at) for at in POSITIONS)), True),
        (("ge", (), *(("mul", (), at, at) for at in POSITIONS)), False),  # causal, but not linear in positions
        (("gt", (), *POSITIONS), False),  # a query does not see itself
        (("le", (), *POSITIONS), False),  # it sees what comes later
        (("ge", (), ("add", (), POSITIONS[0], ("const", 1, "int32")), POSITIONS[1]), False),  # and the next one
    ],
)
def test_only_the_mask_of_causal_attention_is_one(condition, is_causal):
    form = dataclasses.replace(FORM, score=("select_n", (), condition, ("const", -1e30, "float32"), SCALED))
    assert (distance_mask(form, 8) == DistanceMask(scale=0.25, causal=True)) is is_causal


def with_window(window, positions=POSITIONS):
    near = ("gt", (), POSITIONS[1], ("sub", (), POSITIONS[0], ("const", window, "int32")))
    hidden = ("and", (), ("ge", (), *positions), near)
    return dataclasses.replace(FORM, score=("select_n", (), hidden, ("const", -1e30, "float32"), SCALED))


@pytest.mark.parametrize(
    ("form", "mask"),
    [
        (with_window(1), DistanceMask(scale=0.25, causal=True, window=1)),
        (with_window(3), DistanceMask(scale=0.25, causal=True, window=3)),
        (with_window(8), DistanceMask(scale=0.25, causal=True)),  # of 8 positions it hides none
        (with_window(3, POSITIONS[::-1]), None),  # what comes later is seen
    ],
)
def test_a_window_is_found_where_it_hides_what_is_far_before(form, mask):
    assert distance_mask(form, 8) == mask


def test_a_mask_that_does_not_go_by_the_distance_is_none():
    """Positions before the third are hidden from all: as far as their distance goes that is no mask."""
    early = ("ge", (), POSITIONS[1], ("const", 3, "int32"))
    form = dataclasses.replace(FORM, score=("select_n", (), early, ("const", -1e30, "float32"), SCALED))
    assert distance_mask(form, 8) is None


SAME, OTHER = (("array", 0), ("array", 1)), (("array", 1), ("array", 0))
AND_CAUSAL = ("and", (), ("ge", (), *POSITIONS))


def packed(condition, hidden=-1e30, arrays=("bq", "bk"), sources=(0, 0)):
    score = ("select_n", (), condition, ("const", hidden, "float32"), SCALED)
    return dataclasses.replace(FORM, score=score, arrays=arrays, sources=sources)


PACKED = packed((*AND_CAUSAL, ("eq", (), *SAME)))
SHOWN = ("ge", (), ("array", 1), ("const", 1, "int32"))  # segments are counted from one, zero is padding
SHOWN_OR_OTHER = (
    "or",
    (),
    ("and", (), SHOWN, ("eq", (), *SAME)),
    ("and", (), ("not", (), SHOWN), ("not", (), ("eq", (), *SAME))),
)
PADDED = packed((*AND_CAUSAL, ("and", (), SHOWN, ("eq", (), *SAME))))


@pytest.mark.parametrize(
    ("form", "mask"),
    [
        (PACKED, DistanceMask(scale=0.25, causal=True, segments=(0, 1))),
        (packed(("eq", (), *OTHER), -np.inf), DistanceMask(scale=0.25, causal=False, segments=(0, 1))),
        (packed((*AND_CAUSAL, ("not", (), ("ne", (), *SAME)))), DistanceMask(scale=0.25, causal=True, segments=(0, 1))),
        (PADDED, DistanceMask(scale=0.25, causal=True, segments=(0, 1), shown=SHOWN)),
        # Rows that see nothing have equal weights only where all their scores are one number.
        (dataclasses.replace(PADDED, score=("add", (), packed(PADDED.score[2], -1e5).score, SCALED)), None),
        (packed(PADDED.score[2], -np.inf), None),  # nor has a row that sees nothing any
        (packed((*AND_CAUSAL, ("or", (), SHOWN, ("eq", (), *SAME)))), None),
        (packed((*AND_CAUSAL, ("ne", (), *SAME))), None),  # a query does not see itself
        (packed(("or", *AND_CAUSAL[1:], ("eq", (), *SAME))), None),  # what lies before is seen in other segments too
        (packed((*AND_CAUSAL, ("ge", (), *SAME))), None),  # earlier segments are seen
        (packed(SHOWN_OR_OTHER, arrays=PADDED.arrays), None),  # padding sees other segments
        (packed((*AND_CAUSAL, ("eq", (), *SAME)), -10.0), None),  # nothing is hidden
        (packed((*AND_CAUSAL, ("eq", (), *SAME)), sources=(0, 1)), None),  # a row may see nothing
        (packed((*AND_CAUSAL, ("eq", (), *SAME)), arrays=("bq", "bhk")), None),
        (packed((*AND_CAUSAL, ("and", (), ("eq", (), *SAME), ("array", 2))), arrays=("bq", "bk", "bk")), None),
    ],
)
def test_segments_are_found_where_all_between_two_is_hidden(form, mask):
    assert distance_mask(form, 8) == mask


def chosen(dtype, library, positions=256, width=16, form=FORM, ring=1, segments="int32"):
    shapes = [(2, positions, 2, 2, width), (2, positions, 2, width), (2, positions, 2, width)]
    dtypes = [jnp.dtype(dtype)] * 3 + [jnp.dtype(segments)] * len(form.arrays)
    return kernel_of(form, shapes, dtypes, library, ring)


def test_the_kernel_of_tpus_takes_segments_of_examples():
    assert chosen(jnp.bfloat16, Kernel.TPU_SPLASH, form=PACKED) is Kernel.TPU_SPLASH
    assert chosen(jnp.bfloat16, Kernel.TPU_SPLASH, form=PACKED, segments="float32") is Kernel.BLOCKS
    of_heads = dataclasses.replace(PACKED, arrays=("bhq", "bhk"))
    assert chosen(jnp.bfloat16, Kernel.TPU_SPLASH, form=of_heads) is Kernel.TPU_SPLASH
    of_groups = dataclasses.replace(PACKED, arrays=("bgq", "bgk"))
    assert chosen(jnp.bfloat16, Kernel.TPU_SPLASH, form=of_groups) is Kernel.BLOCKS
    assert chosen(jnp.bfloat16, Kernel.CUDNN, form=PACKED) is Kernel.BLOCKS
    assert chosen(jnp.bfloat16, Kernel.TPU_SPLASH, form=PADDED) is Kernel.TPU_SPLASH
    assert chosen(jnp.bfloat16, Kernel.TPU_SPLASH, form=PADDED, ring=2) is Kernel.BLOCKS


def test_each_kernel_takes_its_types_and_sizes():
    assert chosen(jnp.bfloat16, Kernel.CUDNN) is Kernel.CUDNN
    assert chosen(jnp.float32, Kernel.CUDNN) is Kernel.BLOCKS
    assert chosen(jnp.bfloat16, Kernel.CUDNN, width=12) is Kernel.BLOCKS
    assert chosen(jnp.bfloat16, Kernel.CUDNN, width=256) is Kernel.BLOCKS
    assert chosen(jnp.bfloat16, Kernel.CUDNN, ring=2) is Kernel.CUDNN
    assert chosen(jnp.bfloat16, Kernel.CUDNN, ring=2, positions=255) is Kernel.BLOCKS  # no two halves
    assert chosen(jnp.float32, Kernel.TPU_SPLASH) is Kernel.TPU_SPLASH
    assert chosen(jnp.float32, Kernel.TPU_SPLASH, positions=200) is Kernel.BLOCKS
    assert chosen(jnp.float32, Kernel.TPU_SPLASH, positions=256, ring=2) is Kernel.TPU_SPLASH
    assert chosen(jnp.float32, Kernel.TPU_SPLASH, positions=128, ring=2) is Kernel.BLOCKS  # halves of 64
    assert chosen(jnp.bfloat16, Kernel.BLOCKS) is Kernel.BLOCKS


@pytest.mark.parametrize("library", [Kernel.CUDNN, Kernel.TPU_SPLASH])
def test_kernels_take_windows_where_a_device_has_all_positions(library):
    assert chosen(jnp.bfloat16, library, form=with_window(100)) is library
    assert chosen(jnp.bfloat16, library, form=with_window(100), ring=2) is Kernel.BLOCKS


def test_the_kernel_of_tpus_takes_values_of_another_width():
    shapes, dtypes = [(2, 256, 2, 2, 24), (2, 256, 2, 24), (2, 256, 2, 16)], [jnp.dtype(jnp.bfloat16)] * 3
    assert kernel_of(FORM, shapes, dtypes, Kernel.TPU_SPLASH, 1) is Kernel.TPU_SPLASH
    assert kernel_of(FORM, shapes, dtypes, Kernel.CUDNN, 1) is Kernel.BLOCKS


@pytest.mark.parametrize(
    ("kernel", "form", "windows"),
    [
        (Kernel.CUDNN, FORM, [0, 0]),
        (Kernel.CUDNN, with_window(100), [100, 100]),
        (Kernel.TPU_SPLASH, FORM, []),
    ],
)
def test_both_passes_are_the_calls_of_the_jax_that_is_installed(kernel, form, windows, monkeypatch):
    """Private functions of jax run them, whose arguments differ between its versions."""
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91000)
    gradients = Gradients(out=form.out, query=form.query, key=form.key, value=form.value)

    def passes(q, k, v):
        saved = kernels.forward(form, kernel, q, k, v)
        return saved, kernels.backward(form, gradients, kernel, (q, k, v), saved, saved[0])

    shapes = [jax.ShapeDtypeStruct((2, 256, *heads, 16), jnp.bfloat16) for heads in ((2, 2), (2,), (2,))]
    closed, (saved, changes) = jax.make_jaxpr(passes, return_shape=True)(*shapes)
    assert [a.shape for a in saved] == [(2, 256, 2, 2, 16), (2, 2, 2, 256), (2, 2, 2, 256)]
    assert [a.shape for a in changes] == [a.shape for a in shapes]
    calls = [e.params for e in jax_compat.equations_in(closed) if "sliding_window_length" in e.params]
    assert [of["sliding_window_length"] or 0 for of in calls] == windows


def test_the_libraries_of_devices():
    assert library_of(presets.H100) is Kernel.CUDNN
    assert library_of(presets.A100_80GB) is Kernel.CUDNN
    assert library_of(presets.TPU_V5E) is Kernel.TPU_SPLASH
    assert library_of(presets.V100) is Kernel.BLOCKS  # cuDNN's need compute capability 8.0
    assert library_of(presets.MI300X) is Kernel.BLOCKS
    assert library_of(dataclasses.replace(presets.MI300X, name="AMD Instinct MI300X")) is Kernel.BLOCKS
    assert kernels.library_on(jax.devices("cpu")[0]) is Kernel.BLOCKS


def test_of_causal_attention_a_kernel_computes_the_blocks_on_the_diagonal_and_below():
    assert visible_share(FORM, Kernel.CUDNN, 1024) == (8 * 9 / 2) / 64
    assert visible_share(dataclasses.replace(FORM, score=SCALED), Kernel.CUDNN, 1024) == 1.0


@pytest.mark.parametrize(("kernel", "side"), [(Kernel.CUDNN, 128), (Kernel.TPU_SPLASH, 512)])
@pytest.mark.parametrize("window", [1, 2, 128, 129, 130, 500, 513, 2047])
def test_of_a_window_a_kernel_computes_the_blocks_in_which_it_shows_anything(window, kernel, side):
    at = np.arange(2048)
    shown = (at[:, None] >= at[None, :]) & (at[:, None] - at[None, :] < window)
    blocks = shown.reshape(2048 // side, side, 2048 // side, side).any(axis=(1, 3))
    assert visible_share(with_window(window), kernel, 2048) == min(blocks.mean(), (1 + 128 / 2048) / 2)


NEAR_AND_PACKED = packed(("and", (), with_window(40).score[2], ("eq", (), *SAME)))


@pytest.mark.parametrize(
    ("form", "arrays", "value_width"),
    [
        (with_window(100), (), 4),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (FORM, (), 8),
                (NEAR_AND_PACKED, ("bq", "bk"), 8),
                (PACKED, ("bq", "bk"), 8),
                (PACKED, ("q", "k"), 8),
                (PACKED, ("_q", "_k"), 8),
                (PACKED, ("bhq", "bhk"), 8),  # as of heads that all share one of keys: `h` are examples too
                (PADDED, ("bq", "bk"), 8),
            )
        ),
    ],
)
def test_the_kernel_of_tpus_computes_what_blocks_do(form, arrays, value_width, interpreted):
    form = dataclasses.replace(form, arrays=arrays)
    keys = jax.random.split(jax.random.key(0), 4)
    query, change = (
        jax.random.normal(key, (2, 128, 2, 2, n)) for key, n in zip(keys[:2], (8, value_width), strict=True)
    )
    key, value = (jax.random.normal(key, (2, 128, 2, n)) for key, n in zip(keys[2:], (8, value_width), strict=True))
    gradients = Gradients(out="bqhgd", query="bqhgd", key="bkhd", value="bkhd")
    segments = np.stack([np.repeat([1, 2, 1], [50, 48, 30]), np.repeat([1, 2, 0], [3, 100, 25])])
    of_heads = np.stack([segments, segments[::-1]], axis=1)
    shaped = {"b": segments, "": segments[0], "_": segments[:1], "bh": of_heads}
    read = [jnp.asarray(shaped[letters[:-1]]) for letters in arrays]

    assert chosen(jnp.float32, Kernel.TPU_SPLASH, form=form) is Kernel.TPU_SPLASH

    def passes(library):
        made = execute.run(form, None, ring.HERE, (query, key, value, *read), library)
        args = (query, key, value, *made, change, *read)
        return (*made, *execute.run(form, gradients, ring.HERE, args, library))

    found, expected = passes(Kernel.TPU_SPLASH), passes(Kernel.BLOCKS)
    of_rows = [largest + jnp.log(total) for _, largest, total, *_ in (found, expected)]
    pairs = [(found[0], expected[0]), *zip(found[3:], expected[3:], strict=True)]
    if form.score != PADDED.score:  # of rows that see nothing only the result is used
        pairs.append((of_rows[0], of_rows[1]))
    for a, b in pairs:
        np.testing.assert_allclose(a, b, atol=2e-6 * float(abs(b).max()))


def test_queries_keys_values_and_the_result_wait_for_the_backward_pass():
    chip = autopar.Cluster.preset("tpu-v5e", topology="1x1")
    chip = dataclasses.replace(chip, device=dataclasses.replace(chip.device, vector_memory_bytes=0))

    def peak_bytes(layers):
        def step(scales, batch):
            def loss(scales):
                x = batch
                for of_layer in scales:
                    q, k, v = (jnp.tanh(scale * x).reshape(2, 512, 8, 128) for scale in of_layer)
                    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32)
                    x = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores).astype(x.dtype), v).reshape(x.shape)
                return jnp.sum(x * x)

            return jax.tree.map(jnp.subtract, scales, jax.grad(loss)(scales))

        scales = [[jax.ShapeDtypeStruct((1024,), jnp.bfloat16)] * 3] * layers
        batch, search = jax.ShapeDtypeStruct((2, 512, 1024), jnp.bfloat16), autopar.Search(attention="kernel")
        found = autopar.plan(step, scales, batch, cluster=chip, cache_dir=None, search=search)
        assert not found.record.notes  # such as that attention stays as it is written
        return max(found.predicted.peak_bytes)

    assert 4 <= (peak_bytes(3) - peak_bytes(2)) / (2 * 512 * 1024 * 2) <= 4.1
