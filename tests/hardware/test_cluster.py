"""Clusters: presets, names, files, and the link of each mesh axis."""

import dataclasses
import json
import types

import jax
import pytest

import autopar
from autopar.cost.cost_model import cost_model
from autopar.errors import InvalidArgumentError, NotEnoughDevicesError
from autopar.hardware import discovery, presets
from autopar.hardware.cluster import Cluster, Link
from autopar.hardware.collective_cost import CollectiveKind, Fabric, time_s
from autopar.hardware.kinds import OperationTimes
from autopar.ir.layout import LogicalMesh

GPU_PRESETS = [
    "p3.16xlarge", "dgx-a100-40g", "dgx-a100-80g", "dgx-h100", "dgx-h200", "dgx-b200", "dgx-b300", "gb200-nvl72",
    "gb300-nvl72", "vr200-nvl72", "mi300x", "mi355x",
]  # fmt: skip


def rates(cluster: Cluster, *axis_sizes: int) -> list[float]:
    return [link.bytes_per_s / 1e9 for link in cluster.axis_links(axis_sizes)]


def test_what_a_cluster_is_made_of_is_in_autopar():
    device = autopar.DeviceKind(
        name="ours", peak_flops=(("float32", 1e13),), memory_bytes=2**34, peak_memory_bytes_per_s=1e12,
        launch_overhead_s=1e-6, flops_efficiency=(("float32", 0.8),), memory_efficiency=0.9, source="its maker",
    )  # fmt: skip
    link = autopar.Link(latency_s=5e-6, bytes_per_s=3e9, source="our switch", fabric=autopar.Fabric.SWITCHED)
    assert autopar.Cluster.flat(8, device=device, links=(link,)).num_devices == 8


@pytest.mark.parametrize("name", GPU_PRESETS)
def test_gpu_presets(name):
    cluster = Cluster.preset(name, hosts=4)
    assert cluster.num_devices == 4 * (72 if name.endswith("-nvl72") else 8)
    assert cluster.between_hosts.bytes_per_s < cluster.inside_host.bytes_per_s


@pytest.mark.parametrize(
    ("name", "topology", "devices"),
    [("tpu-v5e", "2x4", 8), ("tpu-v6e", "16x16", 256), ("tpu-v4", "4x4x8", 128), ("tpu-v5p", "2x2x1", 4)],
)
def test_tpu_presets(name, topology, devices):
    cluster = Cluster.preset(name, topology=topology, hosts=2)
    assert (cluster.devices_per_host, cluster.num_devices) == (devices, 2 * devices)
    assert cluster.inside_host.fabric is Fabric.TORUS


@pytest.mark.parametrize(
    ("name", "topology", "message"),
    [
        ("dgx-h300", None, "got 'dgx-h300'"),
        ("dgx-h100", "2x4", "topology on TPU only"),
        ("tpu-v5e", None, "a topology of 2 axes, such as topology='4x4'"),
        ("tpu-v5p", "4x4", "a topology of 3 axes"),
        ("tpu-v5e", "0x4", "a topology of 2 axes"),
    ],
)
def test_wrong_presets_say_what_there_is(name, topology, message):
    with pytest.raises(InvalidArgumentError, match=message):
        Cluster.preset(name, topology=topology)


@pytest.mark.parametrize(
    ("text", "devices"),
    [
        ("dgx-h100", 8),
        ("dgx-h100x16", 128),
        ("p3.16xlargex2", 16),
        ("gb200-nvl72x2", 144),
        ("local:4", 4),
        ("local", 8),
    ],
)
def test_names_on_the_command_line(text, devices):
    assert Cluster.parse(text).num_devices == devices


@pytest.mark.parametrize("text", ["dgx-h100:3", "dgx-h100:16", "dgx-h100:0"])
def test_a_part_of_a_host_is_as_large_as_it_can_be(text):
    assert Cluster.parse("dgx-h100:4").num_devices == 4
    with pytest.raises(InvalidArgumentError, match=f"expected 1, 2, 4 or 8 cards of a host .*, got '{text}'"):
        Cluster.parse(text)


def test_tpu_names_on_the_command_line():
    cluster = Cluster.parse("tpu-v5p:4x4x4:2")
    assert cluster == Cluster.preset("tpu-v5p", topology="4x4x4", hosts=2)


@pytest.mark.parametrize("text", ["dgx-h100y2", "tpu-v5e", "local:", "", "dgx-h100x"])
def test_wrong_names_say_what_there_is(text):
    with pytest.raises(InvalidArgumentError, match="dgx-h100, dgx-h200"):
        Cluster.parse(text)


def test_no_hosts_are_no_cluster():
    with pytest.raises(InvalidArgumentError, match="0 hosts of 8 devices"):
        Cluster.preset("dgx-h100", hosts=0)


def test_clusters_are_saved_and_loaded(tmp_path):
    for cluster in (Cluster.preset("tpu-v5e", topology="2x4"), Cluster.parse("dgx-b200x2"), Cluster.local()):
        cluster.save(tmp_path / "cluster.json")
        assert Cluster.load(tmp_path / "cluster.json") == cluster
        assert Cluster.parse(str(tmp_path / "cluster.json")) == cluster


@pytest.mark.parametrize("name", ["run@h100.json", "dgx@h100.json", "local-run@a@b.json"])
def test_a_path_with_an_at_sign_is_a_file(tmp_path, monkeypatch, name):
    """Absolute and relative; a known machine with the devices of such a file."""
    monkeypatch.chdir(tmp_path)
    cluster = Cluster.preset("dgx-h100")
    cluster.save(tmp_path / name)
    assert Cluster.parse(str(tmp_path / name)) == Cluster.parse(name) == cluster
    for machine in ("dgx-h100x2", "dgx-h100:4"):
        assert Cluster.parse(f"{machine}@{name}").num_devices == Cluster.parse(machine).num_devices


@pytest.mark.parametrize("damage", [b"", b"{}", b'{"format_version": 1', b"\xff", b"[" * 100_000])
def test_damaged_files_say_so(tmp_path, damage):
    path = tmp_path / "cluster.json"
    path.write_bytes(damage)
    with pytest.raises(InvalidArgumentError, match="expected a cluster in format version 3"):
        Cluster.load(path)


def test_another_format_version_says_so(tmp_path):
    path = tmp_path / "cluster.json"
    Cluster.preset("dgx-h100").save(path)
    older = json.loads(path.read_bytes()) | {"format_version": 1}
    older["cluster"]["device"]["flops_efficiency"] = 0.8  # as it was
    path.write_text(json.dumps(older))
    with pytest.raises(InvalidArgumentError, match=r"got format version 1[\s\S]*make the file anew"):
        Cluster.load(path)


def test_axes_inside_a_host_run_on_its_link():
    cluster = Cluster.preset("dgx-h100")
    assert cluster.axis_links((2, 4)) == (presets.NVLINK4, presets.NVLINK4)


def test_an_axis_between_hosts_has_one_network_card_a_device():
    cluster = Cluster.preset("dgx-h100", hosts=16)
    outer, inner = cluster.axis_links((16, 8))
    assert (outer, inner) == (presets.NDR400, presets.NVLINK4)


def test_an_axis_over_hosts_and_devices_uses_all_cards_of_a_host():
    cluster = Cluster.preset("p3.16xlarge", hosts=4)
    assert rates(cluster, 32) == pytest.approx([3.1])  # the host's 25 Gbit/s for its one group
    assert rates(cluster, 16, 2) == pytest.approx([3.1 / 2, 110.0])  # two groups share it
    assert rates(cluster, 4, 8) == pytest.approx([3.1 / 8, 110.0])  # eight groups do
    assert rates(Cluster.preset("dgx-h100", hosts=2), 16) == pytest.approx([350.0])  # 8 x 47 is more than NVLink gives


# Seconds of 16 MB on p3.16xlarge (110 GB/s inside, eight devices share 3.1 GB/s to other hosts), by hand.
SHARED_GB = 3.1e9 / 8


@pytest.mark.parametrize(
    ("hosts", "sizes", "axes", "kind", "expected_s"),
    [
        # Each of 16 devices sends 8 of its 16 parts of 1 MB to the other host, over an eighth of its card.
        (2, (16,), (0,), CollectiveKind.ALL_TO_ALL, 8e6 / SHARED_GB),
        (2, (16,), (0,), CollectiveKind.RAGGED_ALL_TO_ALL, 8e6 / SHARED_GB),
        # Of a ring of 16 only the edges cross, with the card to themselves.
        (2, (16,), (0,), CollectiveKind.ALL_GATHER, 15e6 / 3.1e9),
        (2, (16,), (0,), CollectiveKind.ALL_REDUCE, 30e6 / 3.1e9),
        (2, (16,), (0,), CollectiveKind.COLLECTIVE_PERMUTE, 16e6 / 3.1e9),
        # Four groups, whose edges share the card; to reorder axes all eight devices send.
        (2, (4, 4), (0,), CollectiveKind.COLLECTIVE_PERMUTE, 16e6 / (3.1e9 / 4)),
        (2, (4, 4), (0, 1), CollectiveKind.COLLECTIVE_PERMUTE, 16e6 / SHARED_GB),
        # 32 devices on 4 hosts: 24 of 32 parts of 0.5 MB leave.
        (4, (32,), (0,), CollectiveKind.ALL_TO_ALL, 12e6 / SHARED_GB),
        # Two groups of 8, four of each in a host: 4 of 8 parts of 2 MB leave; each ring has half of the card.
        (2, (8, 2), (0,), CollectiveKind.ALL_TO_ALL, 8e6 / SHARED_GB),
        (2, (8, 2), (0,), CollectiveKind.ALL_GATHER, 14e6 / (3.1e9 / 2)),
        # Eight groups of one device a host: all that is sent leaves, over an eighth of the card.
        (2, (2, 8), (0,), CollectiveKind.ALL_TO_ALL, 8e6 / SHARED_GB),
        (2, (2, 8), (0,), CollectiveKind.ALL_GATHER, 8e6 / SHARED_GB),
        # Over both axes of a mesh as over one of 16.
        (2, (2, 8), (0, 1), CollectiveKind.ALL_GATHER, 15e6 / 3.1e9),
        (2, (2, 8), (0, 1), CollectiveKind.ALL_TO_ALL, 8e6 / SHARED_GB),
        (2, (2, 4, 2), (0, 2), CollectiveKind.ALL_GATHER, 12e6 / (3.1e9 / 4)),
        (2, (2, 4, 2), (1, 2), CollectiveKind.ALL_GATHER, 14e6 / 110e9),
        # Groups of 12 on three hosts: 8 and 4, 4 and 8 devices. Four send 8 of 12 parts; four shares are the least.
        (3, (2, 12), (1,), CollectiveKind.ALL_TO_ALL, 16e6 * 8 / 12 / SHARED_GB),
        (3, (2, 12), (1,), CollectiveKind.ALL_GATHER, 16e6 * 11 / 12 / (4 * SHARED_GB)),
    ],
)
def test_collectives_over_hosts_by_hand(hosts, sizes, axes, kind, expected_s):
    cluster = Cluster.preset("p3.16xlarge", hosts=hosts)
    model = cost_model(cluster, LogicalMesh(axis_sizes=sizes))
    assert model.links.time_s(kind, 16e6, axes) - model.links.time_s(kind, 0.0, axes) == pytest.approx(expected_s)


def test_a_device_with_a_card_of_its_own_sends_over_that_one():
    (link,) = Cluster.preset("dgx-h100", hosts=2).axis_links((16,))
    assert link.rate_of(CollectiveKind.COLLECTIVE_PERMUTE) == 47e9
    assert link.rate_of(CollectiveKind.ALL_TO_ALL) == pytest.approx(15 / 8 * 47e9)  # 8 of 15 parts leave


def test_an_all_reduce_over_hosts_goes_up_and_down_trees_inside_and_between():
    (link,) = Cluster.preset("dgx-h100", hosts=16).axis_links((128,))
    # 3 of 7 levels inside at 4.5 us, 4 between hosts at 14 us, up and down; NVLink's 19.4 us to begin
    seconds = time_s(CollectiveKind.ALL_REDUCE, 0.0, 128, link)
    assert seconds == pytest.approx(19.4e-6 + 2 * (3 * 4.5e-6 + 4 * 14e-6))


def test_a_collective_over_both_axes_of_a_torus_uses_the_wires_of_both():
    cluster = Cluster.preset("tpu-v5e", topology="16x16")
    ((axes, link),) = cluster.joint_links((16, 16))
    assert (axes, link.bytes_per_s, link.rings) == ((0, 1), pytest.approx(180e9), 2)
    assert link == cluster.axis_links((256,))[0]


def test_an_nvlink_domain_may_span_hosts():
    cluster = Cluster.preset("gb200-nvl72", hosts=2)
    assert (cluster.num_hosts, cluster.devices_per_host) == (36, 4)
    assert (cluster.num_domains, cluster.domain_devices, cluster.num_devices) == (2, 72, 144)
    # 72 neighbours are joined by NVLink, whatever host they are of; 144 by the 72 cards of each rack, one a device.
    assert cluster.axis_links((2, 72)) == (presets.NDR400, presets.NVLINK5_NVL72)
    assert cluster.axis_links((2, 2, 36))[1:] == (presets.NVLINK5_NVL72, presets.NVLINK5_NVL72)
    assert rates(cluster, 144) == pytest.approx([671.0])
    with pytest.raises(InvalidArgumentError, match="whole domains, or a part of one \\(2 domains of 72 devices\\)"):
        cluster.axis_links((100,))


@pytest.mark.parametrize(
    ("domains", "devices", "hosts", "of_host"),
    [(1, 72, 18, 4), (2, 72, 36, 4), (1, 4, 1, 4), (1, 2, 1, 2), (1, 36, 9, 4), (1, 18, 9, 2)],
)
def test_parts_of_a_domain_keep_its_hosts(domains, devices, hosts, of_host):
    part = Cluster.preset("gb200-nvl72", hosts=2).submesh(domains, devices)
    assert (part.num_devices, part.num_domains, part.domain_devices) == (domains * devices, domains, devices)
    assert (part.num_hosts, part.devices_per_host) == (hosts, of_host)


def test_files_from_before_domains_are_read(tmp_path):
    path = tmp_path / "cluster.json"
    cluster = dataclasses.replace(Cluster.preset("gb200-nvl72"), num_hosts=1, devices_per_host=72, hosts_per_domain=1)
    cluster.save(path)
    kept = json.loads(path.read_text())
    for field in ("hosts_per_domain", "inside_chip"):
        del kept["cluster"][field]
    for link in ("inside_host", "between_hosts"):
        del kept["cluster"][link]["devices_per_card"]
    path.write_text(json.dumps(kept))
    assert Cluster.load(path) == cluster


def test_domains_are_whole_hosts():
    with pytest.raises(InvalidArgumentError, match="a number that divides 2 hosts"):
        dataclasses.replace(Cluster.preset("dgx-h100", hosts=2), hosts_per_domain=3)


def test_processes_that_nvlink_joins_are_hosts_of_a_domain():
    devices = [device("NVIDIA GB200", process_index=i // 4, slice_index=0) for i in range(72)]
    cluster = Cluster._of(discovery.describe(devices))
    assert (cluster.num_hosts, cluster.devices_per_host, cluster.hosts_per_domain) == (18, 4, 18)


def test_two_devices_of_a_tpu7x_chip_share_its_wires():
    cluster = Cluster.preset("tpu7x", topology="4x4x4")
    assert (cluster.num_devices, cluster.torus) == (128, (4, 4, 4, 2))
    # Wires of 90 GB/s: a ring has both ways; a device alone has half of the chip's.
    assert rates(cluster, 64, 2) == pytest.approx([3 * 2 * 90.0 / 2, 6 * 90.0])
    assert rates(cluster, 16, 8) == pytest.approx([2 * 2 * 90.0 / 2, 2 * 90.0])
    assert Cluster.parse("tpu7x:4x4x4") == cluster
    assert (cluster.submesh(1, 8).torus, cluster.submesh(1, 1).torus) == ((4, 2), (1, 1))


def test_cards_that_wires_join_have_one_to_each_other_card():
    cluster = Cluster.preset("mi300x", hosts=2)
    one = cluster.axis_links((2, 8))[1]
    gather = CollectiveKind.ALL_GATHER

    def moved_s(kind, n):
        return float(time_s(kind, 8e9, n, one) - time_s(kind, 0.0, n, one))

    # 7/8 of 8 GB over seven wires of 50 GB/s; half of it over one; a permute has one wire.
    assert moved_s(gather, 8) == pytest.approx(7e9 / 350e9)
    assert moved_s(gather, 2) == pytest.approx(4e9 / 50e9)
    assert moved_s(CollectiveKind.ALL_TO_ALL, 8) == pytest.approx(7e9 / 350e9)
    assert moved_s(CollectiveKind.COLLECTIVE_PERMUTE, 8) == pytest.approx(8e9 / 50e9)
    assert rates(cluster, 16) == pytest.approx([350.0])  # eight cards of 47 are more


def test_latency_over_hosts_counts_each_step_where_it_runs():
    cluster = Cluster.preset("dgx-a100-80g", hosts=2)
    (link,) = cluster.axis_links((16,))
    # NCCL's ring of 2 x 8 devices: one of 15 steps goes over the network
    assert 15 * link.latency_s == pytest.approx(14e-6 + 14 * 3.4e-6)


def test_axes_of_size_one_run_inside():
    cluster = Cluster.preset("dgx-h100", hosts=2)
    assert cluster.axis_links((1, 16))[0] == presets.NVLINK4
    assert cluster.axis_links((16, 1))[1] == presets.NVLINK4


@pytest.mark.parametrize("sizes", [(3,), (5, 2), (4, 8), (12,)])
def test_meshes_that_do_not_fit_are_refused(sizes):
    with pytest.raises(InvalidArgumentError, match="whole hosts, or a part of one"):
        Cluster.preset("dgx-h100", hosts=2).axis_links(sizes)


def test_a_ring_of_a_torus_has_both_ways_and_a_line_has_one():
    assert rates(Cluster.preset("tpu-v5e", topology="16x16"), 16, 16) == pytest.approx([90.0, 90.0])
    assert rates(Cluster.preset("tpu-v5e", topology="4x8"), 4, 8) == pytest.approx([45.0, 45.0])
    assert rates(Cluster.preset("tpu-v5p", topology="4x4x4"), 4, 4, 4) == pytest.approx([180.0] * 3)
    assert rates(Cluster.preset("tpu-v5p", topology="2x2x2"), 2, 2, 2) == pytest.approx([90.0] * 3)


def test_an_axis_over_several_physical_axes_uses_all_of_them():
    cluster = Cluster.preset("tpu-v5p", topology="4x4x4")
    assert rates(cluster, 4, 16) == pytest.approx([180.0, 360.0])
    assert [link.rings for link in cluster.axis_links((4, 16))] == [1, 2]


def test_groups_that_interleave_on_one_physical_axis_share_its_wires():
    cluster = Cluster.preset("tpu-v5e", topology="2x4")
    outer, middle, inner = rates(cluster, 2, 2, 2)
    assert (outer, middle, inner) == pytest.approx((45.0, 45.0 / 2, 45.0))


def test_sizes_that_do_not_divide_a_torus_get_a_careful_rate():
    whole = Cluster.preset("tpu-v4", topology="2x2x2")
    cluster = dataclasses.replace(whole, devices_per_host=24, torus=(3, 4, 2))
    slowest = min(link.bytes_per_s for link in cluster.axis_links((8, 3)))
    assert slowest < presets.TPU_ICI["TPU v4"].bytes_per_s


def test_slices_are_joined_by_the_data_centre_network():
    cluster = Cluster.preset("tpu-v5p", topology="4x4x4", hosts=2)
    outer, inner = cluster.axis_links((2, 64))
    assert outer == presets.TPU_DCN
    assert inner.bytes_per_s == pytest.approx(3 * 180e9)


def test_a_part_of_a_cluster_keeps_its_links():
    cluster = Cluster.preset("dgx-h100", hosts=16)
    assert cluster.submesh(2, 8).axis_links((2, 8)) == cluster.axis_links((16, 8))
    assert cluster.submesh(1, 4).num_devices == 4
    assert Cluster.preset("tpu-v5e", topology="4x4").submesh(1, 4).torus == (4,)


def test_links_may_be_given_for_each_axis():
    fast, slow = (Link(latency_s=1e-6, bytes_per_s=rate, source="test") for rate in (2e9, 1e9))
    cluster = Cluster.flat(8, links=(slow, fast))
    assert cluster.axis_links((2, 4)) == (slow, fast)
    assert cluster.axis_links((8,)) == (slow,)
    assert Cluster.flat(8, links=(slow,)).axis_links((2, 2, 2)) == (slow, slow, slow)
    with pytest.raises(InvalidArgumentError, match="2 axes, one for each link given"):
        cluster.axis_links((2, 2, 2))


def test_a_cluster_can_be_a_key():
    assert len({Cluster.preset("dgx-h100"), Cluster.preset("dgx-h100"), Cluster.preset("dgx-h200")}) == 2


def test_the_devices_of_this_program():
    cluster = Cluster.local()
    assert (cluster.num_devices, cluster.device.name) == (len(jax.devices()), "CPU")
    half = Cluster.local(4)
    assert half.device.flops_per_s("float32") == pytest.approx(2 * cluster.device.flops_per_s("float32"))
    assert half.device.memory_bytes == pytest.approx(2 * cluster.device.memory_bytes, rel=1e-6)


@pytest.mark.parametrize("wrong", [0, 9])
def test_more_devices_than_there_are(wrong):
    with pytest.raises(NotEnoughDevicesError, match=r"(?s)expected 1 to 8 devices.*JAX_NUM_CPU_DEVICES"):
        Cluster.local(wrong)


def device(kind: str, **fields: object) -> types.SimpleNamespace:
    """What local_devices asks of a jax device."""
    given = {"device_kind": kind, "platform": "gpu", "process_index": 0, "memory_stats": lambda: None, **fields}
    return types.SimpleNamespace(**given)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("NVIDIA H100 80GB HBM3", presets.H100),
        ("NVIDIA H200", presets.H200),
        ("NVIDIA A100-SXM4-40GB", presets.A100_40GB),
        ("NVIDIA A100-SXM4-80GB", presets.A100_80GB),
        ("Tesla V100-SXM2-16GB", presets.V100),
        ("NVIDIA B300 SXM6 AC", presets.B300),
        ("NVIDIA GB300", presets.GB300),
        ("AMD Instinct MI300X", presets.MI300X),
        ("AMD Instinct MI355X", presets.MI355X),
    ],
)
def test_gpus_are_known_by_name(name, kind):
    found = discovery.describe([device(name)] * 8)
    assert found.device == kind
    assert (found.num_hosts, found.devices_per_host) == (1, 8)


def test_gpus_of_another_name_go_by_compute_capability():
    found = discovery.describe([device("NVIDIA H800", compute_capability="9.0")])
    assert found.device == dataclasses.replace(presets.H100, source=found.device.source)
    assert "NVIDIA H800" in found.device.source


def test_unknown_devices_say_what_to_do():
    with pytest.raises(InvalidArgumentError, match="got 'Quantum 1'\n  hint: pass a cluster"):
        discovery.describe([device("Quantum 1")])


def test_mixed_devices_say_so():
    with pytest.raises(InvalidArgumentError, match="1 of 'NVIDIA H100', 1 of 'NVIDIA A100'"):
        discovery.describe([device("NVIDIA H100"), device("NVIDIA A100")])


def test_the_memory_that_the_allocator_gives_counts():
    found = discovery.describe([device("NVIDIA H200", memory_stats=lambda: {"bytes_limit": 113_000_000_000})])
    assert found.device.memory_bytes == 113_000_000_000


def test_one_process_a_device_is_still_one_host_where_jax_says_so():
    devices = [device("NVIDIA H100", process_index=i, slice_index=i // 8) for i in range(16)]
    found = discovery.describe(devices)
    assert (found.num_hosts, found.devices_per_host) == (2, 8)


def test_uneven_hosts_count_on_the_network_only():
    devices = [device("NVIDIA H100", process_index=i // 3) for i in range(4)]
    found = discovery.describe(devices)
    assert (found.num_hosts, found.devices_per_host) == (4, 1)


def test_tpus_tell_their_shape():
    devices = [
        device("TPU v5 lite", platform="tpu", slice_index=s, coords=(x, y, 0))
        for s in (0, 1)
        for x in (0, 1)
        for y in range(4)
    ]
    found = discovery.describe(devices)
    assert (found.torus, found.num_hosts) == ((2, 4), 2)
    assert found.device == presets.TPU_V5E


# Published measurements that are not among those the constants were fitted to. 64 MB and more: bandwidth, not latency.
@pytest.mark.parametrize(
    ("preset", "hosts", "kind", "n", "bytes_per_s", "tolerance"),
    [
        ("dgx-h100", 1, CollectiveKind.ALL_REDUCE, 8, 267e9, 0.2),  # meta-pytorch/autoparallel, H100, large messages
        ("dgx-h100", 1, CollectiveKind.ALL_GATHER, 8, 394e9, 0.1),
        ("dgx-h100", 2, CollectiveKind.ALL_REDUCE, 16, 205e9, 0.1),  # NCCL tuner's model, ring, 2 hosts
        ("dgx-h100", 2, CollectiveKind.ALL_GATHER, 16, 410e9, 0.1),
    ],
)
def test_published_rates_of_large_collectives(preset, hosts, kind, n, bytes_per_s, tolerance):
    (link,) = Cluster.preset(preset, hosts=hosts).axis_links((n,))
    size = 4e9
    assert size / time_s(kind, size, n, link) == pytest.approx(bytes_per_s, rel=tolerance)


@pytest.mark.parametrize(
    ("name", "topology", "nearest"),
    [
        ("tpu-v5e", "16x32", "16x16, 8x16"),
        ("tpu-v5e", "4x5", "4x4"),
        ("tpu-v6e", "4x2", "2x4"),
        ("tpu-v5p", "4x4x6", "4x4x8, 4x4x4"),
        ("tpu-v4", "3x3x3", "2x4x4"),
    ],
)
def test_topologies_that_do_not_exist_are_refused_with_the_nearest(name, topology, nearest):
    with pytest.raises(InvalidArgumentError, match=f"a topology that there is; nearest: {nearest}.*got {topology}"):
        Cluster.parse(f"{name}:{topology}")


@pytest.mark.parametrize(
    "text",
    [
        "tpu-v5e:1x1",
        "tpu-v5e:2x2",
        "tpu-v5e:8x16",
        "tpu-v6e:16x16",
        "tpu-v4:2x2x1",
        "tpu-v5p:2x4x4",
        "tpu-v5p:16x16x24",
    ],
)
def test_topologies_that_exist(text):
    assert Cluster.parse(text).name == text


def test_a_machine_with_the_devices_of_a_file(tmp_path):
    """Their times and rates, the machine's memory; the link inside a host where that was measured too."""
    measured = Cluster.parse("dgx-h100:2")
    times = OperationTimes(kind="gather of float32", predicted_s=(1.0,), measured_s=(2.0,))
    device = dataclasses.replace(measured.device, memory_bytes=10**10, launch_overhead_s=1e-6, operation_times=(times,))
    link = dataclasses.replace(measured.inside_host, latency_s=9e-6)
    for count, inside in ((1, Cluster.preset("dgx-h100").inside_host), (2, link)):
        path = tmp_path / f"{count}.json"
        dataclasses.replace(measured, devices_per_host=count, device=device, inside_host=link).save(path)
        found = Cluster.parse(f"dgx-h100x4@{path}")
        assert found.num_devices == 32
        assert found.inside_host == inside
        assert found.device == dataclasses.replace(device, memory_bytes=presets.H100.memory_bytes)
    with pytest.raises(InvalidArgumentError, match=r"a file of A100-SXM4-80GB, got one of H100-SXM5-80GB"):
        Cluster.parse(f"dgx-a100-80g@{path}")
