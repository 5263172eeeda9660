"""The rate of a product by types and precision, and the price of attention by its kernel: no scores in memory."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from msgspec.structs import replace

import autopar
from autopar import recipes
from autopar.cost.cost_model import NodeCosts, cost_model
from autopar.cost.inner_collectives import far_permute_s
from autopar.cost.roofline import ProductRate, Work, attention_s, kernel_under, multiplied_share, product_rate, time_s
from autopar.frontend.build_graph import build_graph
from autopar.frontend.tracing import trace
from autopar.hardware import presets
from autopar.hardware.cluster import Cluster
from autopar.hardware.collective_cost import CollectiveKind
from autopar.hardware.kinds import FULL_FLOAT32, Platform
from autopar.ir.graph import OpKind
from autopar.ir.layout import LogicalMesh
from autopar.ir.rules import RuleBook
from autopar.ir.strategies import replicated_strategy
from autopar.ops.attention.kernels import Kernel
from autopar.ops.attention.work import block_bytes, flops

BF16, F32, F16, INT8, F64 = "bfloat16", "float32", "float16", "int8", "float64"
E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
HIGH, HIGHEST = lax.Precision.HIGH, lax.Precision.HIGHEST
PRESETS = lax.DotAlgorithmPreset


def dot(left: str, right: str, *, result: str | None = None, precision: object = None):
    shapes = [jax.ShapeDtypeStruct((8, 8), jnp.dtype(t)) for t in (left, right)]
    (eqn,) = jax.make_jaxpr(
        lambda a, b: lax.dot_general(
            a, b, (((1,), (0,)), ((), ())), precision=precision, preferred_element_type=result and jnp.dtype(result)
        )
    )(*shapes).eqns
    return eqn


@pytest.mark.parametrize(
    ("eqn", "expected"),
    [
        (dot(BF16, BF16), (BF16, 1)),
        (dot(BF16, BF16, result=F32), (BF16, 1)),
        (dot(BF16, BF16, result=F32, precision=HIGHEST), (BF16, 1)),  # levels concern float32
        (dot(E4M3, E4M3, result=BF16), ("float8", 1)),
        (dot(E5M2, E4M3, result=F32), ("float8", 1)),
        (dot(INT8, INT8, result="int32"), (INT8, 1)),
        (dot("int4", "int4", result="int32"), ("int4", 1)),  # at int8's rate: DeviceKind.peak_flops_per_s
        (dot("complex64", "complex64"), (F32, 4)),
        (dot("complex64", "complex64", precision=HIGHEST), (FULL_FLOAT32, 4)),
        (dot(BF16, F32, result=F32), (F32, 1)),
        (dot(F16, BF16, result=F32), (F32, 1)),
        (dot(F32, F32), (F32, 1)),  # TF32
        (dot(F32, F32, precision=HIGH), (F32, 1)),
        (dot(F32, F32, precision=HIGHEST), (FULL_FLOAT32, 1)),
        (dot(F32, F32, precision=(lax.Precision.DEFAULT, HIGHEST)), (FULL_FLOAT32, 1)),
        (dot(F32, F32, precision=PRESETS.DEFAULT), (F32, 1)),
        (dot(F32, F32, precision=PRESETS.TF32_TF32_F32), (F32, 1)),
        (dot(F32, F32, precision=PRESETS.TF32_TF32_F32_X3), (F32, 3)),
        (dot(F32, F32, precision=PRESETS.BF16_BF16_F32), (BF16, 1)),
        (dot(F32, F32, precision=PRESETS.BF16_BF16_F32_X6), (BF16, 6)),
        (dot(F32, F32, precision=PRESETS.F16_F16_F32), (F16, 1)),
        (dot(F32, F32, precision=PRESETS.F32_F32_F32), (FULL_FLOAT32, 1)),
        (dot(E4M3, E4M3, result=F32, precision=PRESETS.ANY_F8_ANY_F8_F32_FAST_ACCUM), ("float8", 1)),
        (dot(F32, F32, precision=lax.DotAlgorithm(jnp.bfloat16, jnp.bfloat16, jnp.float32, 1, 1, 3)), (BF16, 3)),
    ],
    ids=lambda x: None,
)
def test_products_on_gpus(eqn, expected):
    assert product_rate(eqn, Platform.GPU) == ProductRate(*expected)


@pytest.mark.parametrize(
    ("precision", "passes"),
    [(None, 1), (HIGH, 3), (HIGHEST, 6), (PRESETS.F32_F32_F32, 6)],
)
def test_tpus_make_several_passes_of_exact_products(precision, passes):
    assert product_rate(dot(F32, F32, precision=precision), Platform.TPU) == ProductRate(F32, passes)
    assert product_rate(dot(F32, F32, precision=HIGHEST), Platform.CPU) == ProductRate(F32, 1)


def seconds(product, *dtypes: str, n: int = 8192) -> float:
    shapes = [jax.ShapeDtypeStruct((n, n), jnp.dtype(t)) for t in dtypes]
    traced = trace(product, tuple(shapes), names=("a", "b"), donate=(), batch=())
    graph = build_graph(traced, RuleBook())
    model = cost_model(Cluster.preset("dgx-h100"), LogicalMesh(axis_sizes=(8,)))
    (op,) = (op for op in graph.ops() if op.primitive == "dot_general")
    return NodeCosts(graph, model).compute_s(op, None)


def test_a_product_takes_the_time_of_its_operands_type():
    """8192^3 twice over H100's peaks of 989, 1979 and 67 Tflop/s, and the shares in its table; 3.7 us to launch it."""
    flops = 2 * 8192**3

    def expected_s(tera: float, share: float) -> float:
        fill_s = 4.5e-6 * 494.5 / tera
        return 3.7e-6 + flops / (tera * 1e12 * share) + fill_s

    def to_float32(a, b):
        return lax.dot(a, b, preferred_element_type=jnp.float32)

    def exact(a, b):
        return lax.dot(a, b, precision=HIGHEST)

    half, eight, full = (cluster_share(t) for t in (BF16, "float8_e4m3fn", FULL_FLOAT32))
    assert seconds(to_float32, BF16, BF16) == pytest.approx(expected_s(989, half))
    assert seconds(to_float32, E4M3, E4M3) == pytest.approx(expected_s(1979, eight))
    assert seconds(exact, F32, F32) == pytest.approx(expected_s(67, full))


def cluster_share(dtype: str) -> float:
    device = Cluster.preset("dgx-h100").device
    return device.flops_per_s(dtype) / device.peak_flops_per_s(dtype)


B, L, H, D, W = 2, 2048, 4, 128, 256
SCORES = B * H * L * L
ONE = LogicalMesh(axis_sizes=(1,))


def graph_of(is_causal, blockwise, dtype=jnp.bfloat16, key_heads=H):
    def step(state, batch):
        def loss(state):
            q, k, v = (jnp.einsum("blw,whd->blhd", batch["x"], p) for p in state)
            made = jax.nn.dot_product_attention(q, k, v, is_causal=is_causal)
            return jnp.mean(jnp.sin(made.astype(jnp.float32)))

        return jax.grad(loss)(state)

    weights = [jax.ShapeDtypeStruct((W, heads, D), dtype) for heads in (H, key_heads, key_heads)]
    args = (weights, {"x": jax.ShapeDtypeStruct((B, L, W), dtype)})
    traced = trace(step, args, names=("state", "batch"), donate=(0,), batch=(1,))
    return build_graph(dataclasses.replace(traced, attention_kernel="BLOCKS" if blockwise else ""), RuleBook())


def passes(graph):
    return [op for op in graph.ops() if op.primitive in ("attention", "attention_backward")]


def computing_s(graph, cluster="dgx-h100"):
    costs = NodeCosts(graph, cost_model(Cluster.parse(cluster), ONE))
    return sum(costs.compute_s(op, None) for op in graph.ops() if op.kind is OpKind.EQUATION)


def test_a_kernel_takes_the_time_of_its_arithmetic_or_of_what_it_reads_and_writes():
    forward, backward = passes(graph_of(is_causal=False, blockwise=True))
    strategy = replicated_strategy([v.aval.shape for v in forward.eqn.invars], [(), (), ()])
    moved = 4 * B * L * H * D * 2
    got = attention_s(forward, strategy, moved, presets.H100, Kernel.CUDNN) - presets.H100.launch_overhead_s
    # Two products at the rate of cuDNN's kernel, 0.607 of the peak, of which long runs leave 0.75; memory is faster.
    arithmetic_s = 4 * SCORES * D / (0.607 * 0.75 * 989e12) + presets.H100.fill_s("bfloat16")
    assert got == pytest.approx(arithmetic_s, rel=0.01)
    assert presets.H100.memory_s(moved) < arithmetic_s
    assert flops(backward.eqn, Kernel.CUDNN) == 2.5 * flops(forward.eqn, Kernel.CUDNN)
    # The TPU's computes scores, and gradients of weights, once for queries and once for keys and values.
    assert flops(backward.eqn, Kernel.TPU_SPLASH) == 3.5 * flops(forward.eqn, Kernel.TPU_SPLASH)


def test_causal_attention_costs_half_where_hidden_blocks_are_left_out():
    (full, _), (causal, _) = (passes(graph_of(is_causal=c, blockwise=True)) for c in (False, True))
    blocks = L // 128
    assert flops(causal.eqn, Kernel.CUDNN) / flops(full.eqn, Kernel.CUDNN) == (blocks + 1) / (2 * blocks)
    assert flops(causal.eqn, Kernel.BLOCKS) == flops(full.eqn, Kernel.BLOCKS)


def test_scores_that_stay_in_a_kernel_cost_no_traffic():
    as_written, blockwise = (computing_s(graph_of(is_causal=False, blockwise=b)) for b in (False, True))
    device = presets.H100
    # Scores are written in 32 bits, read for the softmax twice, weights written and read twice; gradients of weights
    # written, read with scores, and gradients of scores written and read twice, in 32 bits but for the weights' side.
    assert as_written - blockwise > SCORES * (4 + 8 + 2 + 4 + 2 + 6 + 2) / device.memory_bytes_per_s


def test_blocks_that_xla_computes_do_cost_traffic():
    """float32 has no kernel on a GPU."""
    (forward, _) = passes(graph_of(is_causal=True, blockwise=True, dtype=jnp.float32))
    assert kernel_under(forward, presets.H100, ring=1) is Kernel.BLOCKS
    strategy = replicated_strategy([v.aval.shape for v in forward.eqn.invars], [(), (), ()])
    least_s = SCORES * (3 * 4 + 2 * 4) / presets.H100.memory_bytes_per_s
    assert attention_s(forward, strategy, 0.0, presets.H100, Kernel.BLOCKS) > least_s


def test_blocks_hold_scores_of_512_queries():
    (forward, _) = passes(graph_of(is_causal=True, blockwise=True, dtype=jnp.float32))
    assert block_bytes(forward.eqn) == SCORES * 4 * 512 // L
    assert block_bytes(forward.eqn, split=4) == SCORES * 512 // L
    # Of four devices in a ring each holds a fourth of the queries, and a fourth of the keys at a time.
    assert block_bytes(forward.eqn, split=4, ring=4) == SCORES * 4 // 16


def test_plans_hold_no_scores_where_a_kernel_takes_them():
    def step(state, batch):
        def loss(state):
            q, k, v = (jnp.einsum("blw,whd->blhd", batch["x"], p) for p in state)
            made = jax.nn.dot_product_attention(q, k, v, is_causal=True)
            return jnp.mean(jnp.sin(made.astype(jnp.float32)))

        return jax.grad(loss)(state)

    args = (
        [jax.ShapeDtypeStruct((W, H, D), jnp.bfloat16)] * 3,
        {"x": jax.ShapeDtypeStruct((8 * B, L, W), jnp.bfloat16)},
    )
    peaks, seconds = [], []
    for attention in ("as written", "blockwise"):
        plan = autopar.plan(
            step,
            *args,
            cluster="dgx-h100",
            plan=recipes.data_parallel(),
            search=autopar.Search(attention=attention),
            cache_dir=None,
        )
        peaks.append(max(plan.predicted.peak_bytes))
        seconds.append(plan.predicted.step_time_s)
    assert peaks[0] > SCORES * (4 + 2)  # scores in 32 bits, and weights
    assert peaks[1] < SCORES * 2
    assert seconds[1] < 0.5 * seconds[0]


def test_kernels_run_the_steps_of_rings():
    """Of four devices each takes as long as for a fourth of the whole, and joins the results of three steps."""
    (forward, _) = passes(graph_of(is_causal=True, blockwise=True))
    assert kernel_under(forward, presets.H100, ring=4) is Kernel.CUDNN
    assert flops(forward.eqn, Kernel.CUDNN, ring=4) == flops(forward.eqn, Kernel.CUDNN)
    split = replace(replicated_strategy([v.aval.shape for v in forward.eqn.invars], [(), (), ()]), split=4, ring=(0,))
    device = dataclasses.replace(presets.H100, launch_overhead_s=0.0, float32_fill_s=0.0)
    arithmetic_s = flops(forward.eqn, Kernel.CUDNN) / 4 / (0.607 * 0.75 * 989e12)
    joined_s = 3 * (B * L * H * D / 4) * 3 * 4 / device.memory_bytes_per_s
    assert attention_s(forward, split, 0.0, device, Kernel.CUDNN, 4) == pytest.approx(arithmetic_s + joined_s, rel=0.01)


def test_rings_exchange_no_positions_that_lie_in_their_order():
    (forward, _) = passes(graph_of(is_causal=True, blockwise=True))
    shapes = [v.aval.shape for v in forward.eqn.invars]
    split = replace(replicated_strategy(shapes, [(), (), ()]), split=4, ring=(0,))
    moved = 1e9
    exchanged, in_order = (
        attention_s(forward, split, moved, presets.H100, Kernel.CUDNN, 4, exchanges=on) for on in (True, False)
    )
    assert exchanged - in_order == pytest.approx(4 * moved / presets.H100.memory_bytes_per_s)


def test_blocks_in_a_causal_ring_leave_hidden_halves_out():
    (causal, _), (full, _) = (passes(graph_of(is_causal=c, blockwise=True, dtype=jnp.float32)) for c in (True, False))
    assert flops(causal.eqn, Kernel.BLOCKS, ring=4) == (1 + 3 / 2) / 4 * flops(causal.eqn, Kernel.BLOCKS)
    assert flops(full.eqn, Kernel.BLOCKS, ring=4) == flops(full.eqn, Kernel.BLOCKS)


@pytest.mark.parametrize("nbytes", [1e5, 1e8])
def test_far_permutes_take_one_step_over_the_links_that_they_cross(nbytes):
    """Behind a switch no device is nearer than another; between hosts a host's links carry what all of its send."""
    permute, exchange = CollectiveKind.COLLECTIVE_PERMUTE, CollectiveKind.ALL_TO_ALL
    inside = cost_model(Cluster.preset("dgx-h100"), LogicalMesh(axis_sizes=(8,))).links
    assert far_permute_s(nbytes, (0,), inside) == inside.time_s(permute, nbytes, (0,))
    hosts = cost_model(Cluster.preset("p3.16xlarge", hosts=2), LogicalMesh(axis_sizes=(16,))).links
    steps_s = hosts.time_s(exchange, 0.0, (0,)) - hosts.time_s(permute, 0.0, (0,))
    assert far_permute_s(nbytes, (0,), hosts) == pytest.approx(hosts.time_s(exchange, nbytes, (0,)) - steps_s)
    assert far_permute_s(nbytes, (0,), hosts) > 2 * hosts.time_s(permute, nbytes, (0,)) or nbytes < 1e6
    torus = cost_model(Cluster.parse("tpu-v5e:2x4"), LogicalMesh(axis_sizes=(8,))).links
    assert far_permute_s(nbytes, (0,), torus) >= torus.time_s(exchange, nbytes, (0,))


def test_a_head_narrower_than_a_matrix_unit_leaves_a_part_of_it_empty():
    rates = {
        (device.name, width): device.attention_flops_per_s("bfloat16", width, backward=False)
        / device.flops_per_s("bfloat16")
        for device in (presets.TPU_V5E, presets.TPU_V6E)
        for width in (64, 128, 256)
    }
    assert rates == {
        ("TPU v5e", 64): 0.5, ("TPU v5e", 128): 1.0, ("TPU v5e", 256): 1.0,
        ("TPU v6e", 64): 0.25, ("TPU v6e", 128): 0.5, ("TPU v6e", 256): 1.0,
    }  # fmt: skip


def convolutions(window: int, strides: int = 1):
    """A convolution and its gradients."""
    numbers = ("NHWC", "HWIO", "NHWC")
    images, kernel = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((2, 16, 16, 8), (window, window, 8, 8)))

    def step(state, batch):
        def loss(batch, state):
            return jnp.sum(
                lax.conv_general_dilated(batch, state, (strides, strides), "SAME", dimension_numbers=numbers)
            )

        return jax.grad(loss, (0, 1))(batch, state)

    graph = build_graph(trace(step, (kernel, images), names=("state", "batch"), donate=(0,), batch=(1,)), RuleBook())
    return [op for op in graph.block.ops if op.primitive == "conv_general_dilated"]


def test_convolutions_of_three_by_three_in_whole_float32_multiply_less():
    in_tiles, of_one, with_strides = convolutions(3), convolutions(1), convolutions(3, strides=2)
    assert [multiplied_share(op, F32, presets.V100) for op in in_tiles] == [16 / 36] * len(in_tiles)
    assert [multiplied_share(op, FULL_FLOAT32, presets.A100_80GB) for op in in_tiles] == [16 / 36] * len(in_tiles)
    for op in (*of_one, *with_strides):
        assert multiplied_share(op, F32, presets.V100) == 1.0
    # Matrix units round to TF32; a TPU has no such kernels.
    assert {multiplied_share(op, F32, device) for op in in_tiles for device in (presets.H100, presets.TPU_V5P)} == {1.0}


def test_some_libraries_copy_images_for_matrix_units():
    work = Work(
        flops=0.0, dtype=F32, operand_bytes=(6 << 30, 0), result_bytes=(2 << 30,), fusible=False, is_convolution=True
    )
    device = dataclasses.replace(presets.A100_40GB, float32_fill_s=0.0, launch_overhead_s=0.0)
    copies = dataclasses.replace(device, reorders_convolutions=True)
    as_it_is, copied, half = (
        time_s(w, 1, ((1, 1), (1,)), d)
        for w, d in ((work, device), (work, copies), (dataclasses.replace(work, dtype=BF16), copies))
    )
    assert copied == pytest.approx(3 * as_it_is)
    assert half == as_it_is
