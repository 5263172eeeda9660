"""Rows of published runs: what follows from a row, and constants fitted to rows."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import optax
import pytest

from benchmarks.calibrate import Evaluation, TooFewRowsError, fit
from benchmarks.ledger import as_run, cluster_of, recipe_of
from benchmarks.published_rows import ROWS, Model, llama_flops, megatron_flops
from benchmarks.zoo import CASES
from benchmarks.zoo.float8 import float8_product


@pytest.mark.parametrize(
    ("key", "dp", "microbatches", "step_time_s"),
    [
        ("megatron a100 39.1B", 32, 12, 14.453),
        # 192 sequences on 48 copies; 8.87 Pflop at 48 x 408.8 Tflop/s
        ("megatron-core h100 1.7B", 48, 1, 0.4519),
        # 8 x 2 sequences of 8192 tokens, 8532 tokens a second on each of 8 cards
        ("torchtitan 8B on 8 H100 float8", 8, 1, 16 * 8192 / 8532 / 8),
        ("torchtitan 8B on 128 H100", 128, 1, 256 * 8192 / 6514 / 128),  # without float8
        ("torchtitan 8B on 128 H100 float8", 128, 1, 256 * 8192 / 8380 / 128),
        ("torchtitan 70B on 256 H100 tp8 async float8", 32, 1, 512 * 8192 / 876 / 256),
        ("torchtitan 8B on 8 H100 cp2 64k float8", 4, 1, 4 * 65_536 / 2540 / 8),
        ("torchtitan 405B on 512 H100 tp8 pp8 float8", 8, 8, 256 * 8192 / 100 / 512),
        ("tpu-recipes 8B on 256 v6e", 256, 1, 4 * 8192 / 7207.336),
    ],
)
def test_rows_have_the_times_of_their_sources(key, dp, microbatches, step_time_s):
    row = ROWS[key]
    assert (row.dp, row.num_microbatches) == (dp, microbatches)
    assert row.step_time_s == pytest.approx(step_time_s, rel=1e-3)


def test_only_tensor_parallelism_that_waits_holds_up_computing():
    waits, does_not = (ROWS[f"torchtitan 70B on 256 H100 tp8 {what}float8"] for what in ("", "async "))
    assert not cluster_of(waits).inside_host.is_asynchronous
    assert cluster_of(waits).between_hosts.is_asynchronous
    assert cluster_of(does_not).inside_host.is_asynchronous


def test_products_that_send_while_they_run_take_no_channels_of_nccl():
    in_place, beside, waits = (
        cluster_of(ROWS[key]).inside_host
        for key in (
            "megatron-core h100 16B",
            "torchtitan 70B on 256 H100 tp8 async float8",
            "torchtitan 70B on 256 H100 tp8",
        )
    )
    assert (in_place.sends_in_place, beside.sends_in_place, waits.sends_in_place) == (True, False, False)
    assert in_place.detail.pair_bytes_per_s is beside.detail.pair_bytes_per_s is None
    assert waits.detail.pair_bytes_per_s is not None


@pytest.mark.parametrize("row", ROWS.values(), ids=lambda row: row.key)
def test_rows_fill_their_machines(row):
    assert cluster_of(row).num_devices == row.gpus == row.dp * row.tp * row.pp * row.cp
    assert row.batch == row.num_microbatches * row.micro_batch * row.dp
    recipe_of(row)


def test_flops_of_models_by_hand():
    model = Model(
        family="llama", layers=2, width=8, heads=2, kv_heads=1, head=4, feed_forward=16, vocabulary=32, length=4
    )
    # a layer: queries and output 2 x 64, keys and values 2 x 32, feed-forward 3 x 128; the last product 256
    weights = 2 * (128 + 64 + 384) + 256
    assert llama_flops(model, 3) == 3 * 4 * (6 * weights + 12 * 2 * 4 * 8)
    assert megatron_flops(dataclasses.replace(model, family="gpt"), 3) == pytest.approx(
        3 * 4 * (6 * (2 * 12 * 64 + 8 * 32) + 12 * 2 * 4 * 8)
    )


def rows(*ratios: float, slope: float = -0.8) -> list[tuple[float, Evaluation]]:
    """Published times of one second, predicted as given; times fall with 0.8 of the logarithm of the share."""
    return [
        (1.0, Evaluation(constants={"share": 0.5}, seconds=r, slopes={"share": slope}, attention="", is_short=False))
        for r in ratios
    ]


def test_a_constant_is_fitted_to_the_mean_of_its_rows():
    found = fit(rows(0.8, 1.25, 0.5, 0.5), ("share",))
    mean = math.log(0.8 * 1.25 * 0.25) / 4
    assert found.constants["share"] == pytest.approx(0.5 * math.exp(mean / 0.8))
    assert found.ratios == pytest.approx([r * math.exp(-mean) for r in (0.8, 1.25, 0.5, 0.5)])
    # the last row by the mean of the three others
    assert found.left_out[-1] == pytest.approx(0.5 / (0.8 * 1.25 * 0.5) ** (1 / 3))


def test_two_constants_are_told_apart_by_rows_that_differ_in_slopes():
    true = {"share": 0.6, "memory": 0.9}
    base = {"share": 0.5, "memory": 0.7}
    slopes = [(-0.9, -0.1), (-0.5, -0.5), (-0.2, -0.8), (-0.7, 0.0)]
    found = fit(
        [
            (
                math.exp(sum(s * math.log(true[n] / base[n]) for s, n in zip(pair, base, strict=True))),
                Evaluation(
                    constants=base, seconds=1.0, slopes=dict(zip(base, pair, strict=True)), attention="", is_short=False
                ),
            )
            for pair in slopes
        ],
        ("share", "memory"),
    )
    assert found.constants == pytest.approx(true)
    assert found.left_out == pytest.approx([1.0] * 4)


def test_more_constants_than_rows_tell_are_refused():
    with pytest.raises(TooFewRowsError, match=r"1 constants \(share\): expected 2 rows or more, got 1"):
        fit(rows(1.1), ("share",))


def test_products_in_float8_are_near_those_in_float32():
    keys = jax.random.split(jax.random.key(0), 3)
    x, w = jax.random.normal(keys[0], (2, 8, 4, 8)), jax.random.normal(keys[1], (4, 8, 16))
    ahead = jax.random.normal(keys[2], (2, 8, 16))
    exact, to_exact = jax.vjp(lambda x, w: jnp.tensordot(x, w, 2), x, w)
    found, to_found = jax.vjp(lambda x, w: float8_product(x, w, 2), x, w)
    for one, other in zip((exact, *to_exact(ahead)), (found, *to_found(ahead)), strict=True):
        assert one.shape == other.shape
        error = jnp.linalg.norm(one - other) / jnp.linalg.norm(one)
        assert 1e-3 < error < 0.1  # of 3 and of 2 bits, and not none


def test_a_llama_in_float8_has_products_of_8_bits():
    case = CASES["llama"](float8=True, dtype=jnp.bfloat16)
    state = jax.eval_shape(case.init, jax.random.key(0))
    text = str(jax.make_jaxpr(case.step)(state, case.batch(0)))
    # forward and twice backward, of seven products in each of two layers
    assert text.count("preferred_element_type=bfloat16") >= 3 * 7 * 2
    assert "f8_e4m3fn" in text
    assert "f8_e5m2" in text


@pytest.mark.parametrize("half", [False, True])
def test_weights_of_16_bits_have_moments_of_16_bits(half):
    state, _ = CASES["llama"](half_weights=half, dtype=jnp.bfloat16, optimizer=optax.adamw(1e-4)).shapes()
    floats = [leaf.dtype for leaf in jax.tree.leaves(state) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    assert set(floats) == {jnp.dtype(jnp.bfloat16 if half else jnp.float32)}
    assert len(floats) == 3 * (2 * 9 + 3)  # a parameter and two moments: nine in each of two layers, three around them


def test_runs_of_one_configuration_are_one_prediction():
    first, later, in_blocks = (
        as_run(ROWS[f"megatron-bridge {name}"])
        for name in ("25.11 8B on 8 B200 FP8", "25.09 8B on 8 B200 FP8", "25.11 8B on 8 B200 MXFP8")
    )
    assert first == later == in_blocks
    assert first != as_run(ROWS["megatron-bridge 25.11 8B on 8 GB200 FP8"])


def test_rates_of_a_card_are_times_of_a_step():
    row = ROWS["megatron-bridge 26.06 405B on 256 GB300 tp4 pp8 FP8"]
    assert row.step_time_s == pytest.approx(46.901, rel=1e-4)  # 1536 sequences of 8192 tokens, 1048 a second of 256
    assert (row.release, row.num_microbatches, row.chunks, row.fitted) == ("26.06", 192, 4, False)
