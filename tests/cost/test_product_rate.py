"""The rate of a product by its operands' types and its precision, in seconds of whole products."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from autopar.cost.cost_model import NodeCosts, cost_model
from autopar.cost.roofline import ProductRate, product_rate
from autopar.frontend.build_graph import build_graph
from autopar.frontend.tracing import trace
from autopar.hardware.cluster import Cluster
from autopar.hardware.kinds import FULL_FLOAT32, Platform
from autopar.ir.mesh import LogicalMesh
from autopar.sharding.rules import RuleBook

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
