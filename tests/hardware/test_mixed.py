"""Clusters of several kinds of devices: as slow and as small as the slowest and smallest, whatever is asked of all."""

import dataclasses
import types

import jax
import pytest

from autopar.errors import InvalidArgumentError
from autopar.hardware import presets
from autopar.hardware.cluster import Cluster, memory_shares, part_number
from autopar.hardware.mixed import slowest_kind, slowest_link


def test_two_machines_by_name():
    cluster = Cluster.parse("dgx-a100-80g+p3.16xlarge")
    assert cluster == Cluster.joined([Cluster.preset("dgx-a100-80g"), Cluster.preset("p3.16xlarge")])
    assert (cluster.num_devices, cluster.num_hosts) == (16, 2)
    assert memory_shares(cluster) == (5.0, 1.0)
    assert cluster.between_parts.bytes_per_s == presets.ETHERNET_25G.bytes_per_s
    assert cluster.inside_host.bytes_per_s == presets.NVLINK2.bytes_per_s


def test_a_part_of_a_host_is_named_by_its_cards():
    cluster = Cluster.parse("dgx-h100:4+dgx-a100-80g")
    assert [part.num_devices for part in cluster.parts] == [4, 8]
    assert (cluster.num_hosts, cluster.devices_per_host) == (3, 4)  # eight cards are two groups of four
    assert cluster.between_hosts.bytes_per_s == presets.HDR200.bytes_per_s
    for text in ("dgx-h100:3", "dgx-h100:16", "dgx-h100:0"):
        with pytest.raises(InvalidArgumentError, match=f"expected 1, 2, 4 or 8 cards of a host .*, got '{text}'"):
            Cluster.parse(text)


def test_the_slowest_and_smallest_of_two_cards():
    both = slowest_kind([presets.A100_80GB, presets.V100])
    assert both.name == f"{presets.A100_80GB.name} and {presets.V100.name}"
    assert both.memory_bytes == presets.V100.memory_bytes
    for dtype in ("float16", "bfloat16", "float32", "float8_e4m3fn"):
        assert both.flops_per_s(dtype) <= min(k.flops_per_s(dtype) for k in (presets.A100_80GB, presets.V100))
    assert both.memory_bytes_per_s <= presets.V100.memory_bytes_per_s
    assert both.attention_shares is None
    for backward in (False, True):
        kinds = (presets.H100, presets.A100_80GB)
        rates = [kind.attention_flops_per_s("bfloat16", 128, backward=backward) for kind in kinds]
        slowest = slowest_kind(kinds)
        assert slowest.attention_flops_per_s("bfloat16", 128, backward=backward) <= min(rates)


def test_the_slowest_of_links_has_the_longest_latency_of_all():
    link = slowest_link([dataclasses.replace(presets.NVLINK4, latency_s=1.0), presets.HDR200])
    assert (link.bytes_per_s, link.latency_s) == (presets.HDR200.bytes_per_s, 1.0)


def test_which_part_has_devices():
    cluster = Cluster.parse("dgx-h100:4+dgx-a100-80g")
    assert [part_number(cluster, *at) for at in ((0, 4), (2, 2), (4, 8), (10, 2), (0, 12))] == [0, 0, 1, 1, -1]
    with pytest.raises(InvalidArgumentError, match="devices of one part"):
        part_number(cluster, 2, 4)


def test_files_keep_the_parts(tmp_path):
    cluster = Cluster.parse("dgx-h100:4+dgx-a100-80g:4")
    cluster.save(tmp_path / "both.json")
    assert Cluster.load(tmp_path / "both.json") == cluster


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dgx-h100+tpu-v5e:2x4", "without links for single mesh axes.*a torus"),
        ("dgx-h100+local:4", "devices of one platform"),
        ("+".join(["dgx-h100"] * 5), "2 to 4 clusters"),
    ],
)
def test_what_cannot_be_joined_is_refused(text, message):
    with pytest.raises(InvalidArgumentError, match=message):
        Cluster.parse(text)


def test_local_devices_of_two_kinds_are_joined(monkeypatch):
    def device(kind, process):
        return types.SimpleNamespace(
            device_kind=kind, platform="gpu", process_index=process, memory_stats=lambda: None, compute_capability=""
        )

    names = {kind: prefix for prefix, kind in presets.BY_JAX_NAME}
    fast, slow = names[presets.H100], names[presets.V100]
    devices = [device(fast, n // 4) for n in range(8)] + [device(slow, 2) for _ in range(2)]
    monkeypatch.setattr(jax, "devices", lambda: devices)
    cluster = Cluster.local(measured=False)
    assert [(part.device.name, part.num_hosts, part.num_devices) for part in cluster.parts] == [
        (presets.H100.name, 2, 8),
        (presets.V100.name, 1, 2),
    ]
    assert Cluster.local(8, measured=False).parts == ()
