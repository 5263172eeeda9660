"""Compiling for hardware that is not there: what names it, and TPU slices. GPUs: xla/test_aot_gpu.py."""

import importlib.util

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from autopar.errors import InvalidArgumentError, MissingCompilerError
from autopar.hardware.cluster import Cluster
from autopar.hardware.collective_cost import CollectiveKind
from autopar.xla import aot, collectives
from tests.xla.spanned_axes import spanned_axes

needs_libtpu = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu (autopar[tpu])")


@pytest.mark.parametrize(
    ("spec", "generation", "chips", "num_slices"),
    [
        ("tpu:v5e:2x4", "v5e", (2, 4), 1),
        ("tpu:v5p:2x2x2", "v5p", (2, 2, 2), 1),
        ("tpu:v6e:16x16:2", "v6e", (16, 16), 2),
        ("tpu:tpu7x:2x2x1", "tpu7x", (2, 2, 1), 1),
    ],
)
def test_specs_read_and_print(spec, generation, chips, num_slices):
    parsed = aot.parse(spec)
    assert parsed == aot.TpuSlice(generation=generation, chips=chips, num_slices=num_slices)
    assert str(parsed) == spec


@pytest.mark.parametrize(
    "spec",
    [
        "v5e:2x4", "tpu:v5e", "tpu:v5e:8", "tpu:v5e:2x4:", "tpu:v5e:2x2x2x2", "cpu:8",
        "gpu:h100", "gpu:h100:", "gpu:h100:0", "gpu:h100:0x8", "gpu:h100:2x8x1", "gpu:h101:8", "gpu:a100:8",
        "gpu:v100:8", "h100:8",
    ],
)  # fmt: skip
def test_other_texts_are_refused_with_an_example(spec):
    with pytest.raises(InvalidArgumentError, match=r"tpu:v5e:2x4.*gpu:h100:2x8") as caught:
        aot.parse(spec)
    assert "a100-40g, a100-80g, h100, h200, b200" in str(caught.value)


@pytest.mark.parametrize(
    ("cluster", "spec"),
    [
        ("tpu-v5e:2x4", "tpu:v5e:2x4"),
        ("tpu-v5p:2x2x2:4", "tpu:v5p:2x2x2:4"),
        ("tpu7x:2x2x1", "tpu:tpu7x:2x2x1"),
        ("dgx-a100-40g", "gpu:a100-40g:8"),
        ("dgx-a100-80gx4", "gpu:a100-80g:4x8"),
        ("dgx-h100x2", "gpu:h100:2x8"),
        ("dgx-h200", "gpu:h200:8"),
        ("gb200-nvl72", "gpu:b200:72"),
    ],
)
def test_clusters_have_specs(cluster, spec):
    assert aot.spec_of(Cluster.parse(cluster)) == spec
    assert str(aot.parse(spec)) == spec


@pytest.mark.parametrize("cluster", ["p3.16xlarge", "local:2"])
def test_clusters_of_other_devices_have_no_spec(cluster):
    assert aot.spec_of(Cluster.parse(cluster)) is None


def test_without_libtpu_the_extra_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingCompilerError, match=r"autopar\[tpu\]"):
        aot.target_devices("tpu:v5e:2x4")


@needs_libtpu
def test_a_slice_that_does_not_exist_is_refused():
    with pytest.raises(InvalidArgumentError, match="a slice that libtpu can describe"):
        aot.target_devices("tpu:v5e:2x3")


@needs_libtpu
def test_axes_must_fill_the_slice():
    with pytest.raises(InvalidArgumentError, match="its 8 devices"):
        aot.target_mesh("tpu:v5e:2x4", (2, 2), ("data", "model"))
    with pytest.raises(InvalidArgumentError, match="a multiple of 2"):
        aot.target_mesh("tpu:v5e:2x4:2", (1, 16), ("data", "model"))
    with pytest.raises(InvalidArgumentError, match="one name for each"):
        aot.target_mesh("tpu:v5e:2x4", (8,), ("data", "model"))


@needs_libtpu
def test_of_several_slices_the_first_axis_crosses_them():
    mesh = aot.target_mesh("tpu:v5e:2x4:2", (4, 4), ("data", "model"))
    assert [[d.slice_index for d in row] for row in mesh.devices] == [[0] * 4, [0] * 4, [1] * 4, [1] * 4]


@needs_libtpu
@pytest.mark.parametrize("spec", ["tpu:v5e:2x4", "tpu:v5p:2x2x2"])
def test_a_program_compiles_for_the_slice_though_jax_has_other_devices(spec):
    jax.devices()  # the backend of this process is started first, as in a user's session
    mesh = aot.target_mesh(spec, (2, 4), ("data", "model"))
    on = lambda *axes: NamedSharding(mesh, P(*axes))
    step = jax.jit(jnp.matmul, in_shardings=(on("data", "model"), on("model")), out_shardings=on("data"))
    x, w = jax.ShapeDtypeStruct((512, 1024), jnp.float32), jax.ShapeDtypeStruct((1024, 512), jnp.float32)
    compiled = step.lower(x, w).compile()
    (reduce,) = collectives.collectives(compiled.as_text())
    assert (reduce.kind, reduce.result_bytes) == (CollectiveKind.ALL_REDUCE, 256 * 512 * 4)
    assert spanned_axes(reduce, mesh.shape) == ("model",)
    stats = compiled.memory_analysis()
    assert stats is not None
    assert stats.argument_size_in_bytes == (256 * 256 + 256 * 512) * 4
