"""Compiling for hardware that is not there: the names of TPU slices and of hosts with NVIDIA cards, and what is
compiled.
"""

import importlib.util

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import autopar
from autopar.errors import InvalidArgumentError, MissingCompilerError
from autopar.execute import aot, collectives
from autopar.execute.aot import CARDS, GpuHosts
from autopar.hardware.cluster import Cluster
from autopar.hardware.collective_cost import CollectiveKind
from autopar.hardware.presets import BY_JAX_NAME
from benchmarks.zoo import CASES
from tests.execute.spanned_axes import spanned_axes


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


@pytest.mark.extra("tpu")
def test_a_slice_that_does_not_exist_is_refused():
    with pytest.raises(InvalidArgumentError, match="a slice that libtpu can describe"):
        aot.target_devices("tpu:v5e:2x3")


@pytest.mark.extra("tpu")
def test_axes_must_fill_the_slice():
    with pytest.raises(InvalidArgumentError, match="its 8 devices"):
        aot.target_mesh("tpu:v5e:2x4", (2, 2), ("data", "model"))
    with pytest.raises(InvalidArgumentError, match="a multiple of 2"):
        aot.target_mesh("tpu:v5e:2x4:2", (1, 16), ("data", "model"))
    with pytest.raises(InvalidArgumentError, match="one name for each"):
        aot.target_mesh("tpu:v5e:2x4", (8,), ("data", "model"))


@pytest.mark.extra("tpu")
def test_of_several_slices_the_first_axis_crosses_them():
    mesh = aot.target_mesh("tpu:v5e:2x4:2", (4, 4), ("data", "model"))
    assert [[d.slice_index for d in row] for row in mesh.devices] == [[0] * 4, [0] * 4, [1] * 4, [1] * 4]


@pytest.mark.extra("tpu")
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


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("gpu:h100:8", GpuHosts(card="h100", cards_per_host=8)),
        ("gpu:h100:2x8", GpuHosts(card="h100", cards_per_host=8, num_hosts=2)),
        ("gpu:a100-40g:4", GpuHosts(card="a100-40g", cards_per_host=4)),
    ],
)
def test_gpu_specs_read_and_print(spec, expected):
    assert aot.parse(spec) == expected
    assert str(expected) == spec


def test_one_host_may_be_spelled_out():
    assert aot.parse("gpu:b200:1x8") == aot.parse("gpu:b200:8")


@pytest.mark.parametrize("card", CARDS.values(), ids=CARDS)
def test_cards_are_those_that_plans_know(card):
    assert next(kind for prefix, kind in BY_JAX_NAME if card.name.startswith(prefix)) is card.kind
    assert card.memory_bytes == pytest.approx(card.kind.memory_bytes, rel=0.08)


def test_a_description_says_what_differs():
    lines = [line.strip() for line in CARDS["h100"].description().splitlines()]
    assert "core_count: 132" in lines
    assert "memory_bandwidth: 3352000000000" in lines
    assert "cuda_compute_capability { major: 9 minor: 0 }" in lines
    assert 'device_description_str: "NVIDIA H100 80GB HBM3"' in lines


@pytest.mark.parametrize("found", [None, "jax_plugins"])
def test_without_the_plugin_the_extra_is_named(monkeypatch, found):
    there = object()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: there if name == found else None)
    with pytest.raises(MissingCompilerError, match=r"autopar\[gpu\]"):
        aot.target_devices("gpu:h100:8")


def test_a_plugin_that_jax_left_out_is_an_error_with_words(monkeypatch):
    def get_topology_desc(**options):
        raise NotImplementedError("topology not implemented for cuda")

    monkeypatch.setattr(aot, "has_gpu_compiler", lambda: True)
    monkeypatch.setattr(aot.topologies, "get_topology_desc", get_topology_desc)
    with pytest.raises(InvalidArgumentError, match="JAX_PLATFORMS=cpu"):
        aot.target_devices("gpu:h100:8")


@pytest.mark.extra("gpu")
@pytest.mark.parametrize("card", CARDS)
def test_a_program_compiles_for_cards_that_are_not_there(card):
    mesh = aot.target_mesh(f"gpu:{card}:8", (2, 4), ("data", "model"))
    assert mesh.devices[0, 0].device_kind == CARDS[card].name
    on = lambda *axes: NamedSharding(mesh, P(*axes))
    step = jax.jit(jnp.matmul, in_shardings=(on("data", "model"), on("model")), out_shardings=on("data"))
    x, w = jax.ShapeDtypeStruct((512, 1024), jnp.float32), jax.ShapeDtypeStruct((1024, 512), jnp.float32)
    compiled = step.lower(x, w).compile()
    (reduce,) = collectives.collectives(compiled.as_text())
    assert (reduce.kind, reduce.result_bytes) == (CollectiveKind.ALL_REDUCE, 256 * 512 * 4)
    assert spanned_axes(reduce, mesh.shape) == ("model",)
    assert compiled.memory_analysis().argument_size_in_bytes == (256 * 256 + 256 * 512) * 4


@pytest.mark.extra("gpu")
def test_of_several_hosts_the_first_axis_crosses_them():
    mesh = aot.target_mesh("gpu:h100:2x4", (4, 2), ("data", "model"))
    assert [[d.process_index for d in row] for row in mesh.devices] == [[0, 0], [0, 0], [1, 1], [1, 1]]
    with pytest.raises(InvalidArgumentError, match="a multiple of 2"):
        aot.target_mesh("gpu:h100:2x4", (1, 8), ("data", "model"))
    with pytest.raises(InvalidArgumentError, match="its 8 devices"):
        aot.target_mesh("gpu:h100:2x4", (2, 2), ("data", "model"))


@pytest.mark.extra("gpu")
@pytest.mark.parametrize("hosts", [1, 2])
def test_plans_are_held_against_the_program_of_the_gpu_compiler(hosts):
    cluster = Cluster.preset("dgx-h100", hosts=hosts)
    case = CASES["gpt"](layers=4, width=256, heads=4, vocabulary=1024, length=256, batch=16)
    step = autopar.parallelize(case.step, cluster=cluster)
    found = autopar.verify(step, *case.shapes(), compile_for=aot.spec_of(cluster))
    assert found.total.compiled > 0
    assert found.total.ratio == pytest.approx(1, abs=0.01)
    assert found.difference is None
