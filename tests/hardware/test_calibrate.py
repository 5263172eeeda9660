"""Measured constants: found again where they are known, kept in a file, taken up by Cluster.local."""

import dataclasses
import json
import re

import jax
import pytest

import autopar
from autopar.__main__ import main
from autopar.errors import InvalidArgumentError
from autopar.hardware import calibrate, discovery, measurement, presets
from autopar.hardware.calibrate import CollectiveRun, ConvolutionRun, MatmulRun, Run, StreamRun
from autopar.hardware.cluster import Cluster
from autopar.hardware.collective_cost import PLANNED_KINDS, Fabric, Link, time_s
from autopar.hardware.kinds import DeviceKind
from autopar.hardware.measurement import MeasuredOn
from tests.small_steps import MLP_BATCH, MLP_STATE, mlp_step, python, shapes

LINK = Link(overhead_s=20e-6, latency_s=5e-6, bytes_per_s=2e9, fabric=Fabric.SHARED_MEMORY, source="known")
NETWORK = Link(overhead_s=50e-6, latency_s=90e-6, bytes_per_s=1e8, fabric=Fabric.SHARED_MEMORY, source="known")
FLOPS_PER_S = {"float32": 30e9, "bfloat16": 60e9, "float16": 20e9}
MEMORY_BYTES_PER_S, LAUNCH_S = 8e9, 3e-6
CONVOLUTION_SHARE = 0.6


class KnownClock:
    """Devices that keep to the model exactly, and every seventh sample of which takes five times as long."""

    def __init__(self, slow_after: int = 2048, link: Link = LINK) -> None:
        self.samples, self.link = 0, link
        self.slow_after = slow_after  # bfloat16 products of this width or more take for ever
        self.prepared: list[Run] = []

    def prepare(self, run: Run) -> float:
        self.prepared.append(run)
        return self._seconds(run)

    def sample(self, run: Run) -> float:
        assert run in self.prepared
        self.samples += 1
        return self._seconds(run) * (5 if self.samples % 7 == 0 else 1)

    def slowest(self, seconds: float) -> float:
        return seconds

    def _seconds(self, run: Run) -> float:
        match run:
            case MatmulRun():
                if run.dtype == "bfloat16" and run.width >= self.slow_after:
                    return 100.0
                return 3 * LAUNCH_S + run.flops / FLOPS_PER_S[run.dtype]
            case StreamRun():
                return run.moved_bytes / MEMORY_BYTES_PER_S
            case ConvolutionRun():
                return LAUNCH_S + run.flops / (CONVOLUTION_SHARE * FLOPS_PER_S[run.dtype])
            case CollectiveRun():
                link = NETWORK if run.between_hosts else self.link
                return float(time_s(run.kind, run.result_bytes, run.n, link))


@pytest.fixture
def directory(tmp_path, monkeypatch):
    monkeypatch.setenv("AUTOPAR_CACHE_DIR", str(tmp_path))
    return tmp_path


def measured(num_devices=None, clock=None, **options) -> measurement.Measurement:
    clock = clock or KnownClock()
    return calibrate.measure(num_devices, clock=lambda devices, found: clock, **options)


def test_known_constants_are_found_again():
    found = measured()
    assert found.inside_host.overhead_s == pytest.approx(LINK.overhead_s, rel=1e-3)
    assert found.inside_host.latency_s == pytest.approx(LINK.latency_s, rel=1e-3)
    assert found.inside_host.bytes_per_s == pytest.approx(LINK.bytes_per_s, rel=1e-3)
    for dtype, rate in FLOPS_PER_S.items():
        assert found.device.flops_per_s(dtype) == pytest.approx(rate, rel=1e-3)
    assert found.device.flops_per_s("float64") == pytest.approx(FLOPS_PER_S["float32"] / 2, rel=1e-3)
    assert found.device.memory_bytes_per_s == pytest.approx(MEMORY_BYTES_PER_S, rel=1e-3)
    assert found.device.launch_overhead_s == pytest.approx(LAUNCH_S, rel=1e-3)
    assert found.device.float32_fill_s == pytest.approx(0.0, abs=1e-9)
    assert {(t.kind, t.n) for t in found.timings} == {(k, n) for k in PLANNED_KINDS for n in (2, 4, 8)}
    assert found.between_hosts == presets.cpu_process_link(8)  # one process: nothing to measure it on
    assert all(fit.median_error < 1e-6 for fit in found.fits)


def test_hosts_are_measured_apart_from_what_is_inside_of_them():
    """Of 4 hosts of 6 devices: groups of 2 and of all 6 inside, of 2 and 4 hosts."""
    found = dataclasses.replace(discovery.find(8, measured=False), num_hosts=4, devices_per_host=6)
    on = MeasuredOn(
        platform="cpu", device_kind="cpu", num_hosts=4, devices_per_host=6, jax_version=jax.__version__, cores=2
    )
    clock = KnownClock()
    times = {run: clock._seconds(run) for series in calibrate.runs(found, calibrate.CPU_SIZES) for run in series}
    result = calibrate.fitted(found, on, times, "made up")
    assert {t.n for t in result.timings} == {2, 6}
    assert {t.n for t in result.timings_between} == {2, 4}
    assert result.inside_host.bytes_per_s == pytest.approx(LINK.bytes_per_s, rel=1e-3)
    assert result.between_hosts.latency_s == pytest.approx(NETWORK.latency_s, rel=1e-3)
    assert result.between_hosts.bytes_per_s == pytest.approx(NETWORK.bytes_per_s, rel=1e-3)


def measured_h200(clock: KnownClock) -> DeviceKind:
    found = dataclasses.replace(discovery.find(1, measured=False), device=presets.H200)
    on = MeasuredOn(
        platform="gpu", device_kind="NVIDIA H200", num_hosts=1, devices_per_host=1, jax_version="0", cores=0
    )
    series = calibrate.runs(found, calibrate.ACCELERATOR_SIZES)
    times = {run: seconds for runs in series for run in runs if (seconds := clock._seconds(run)) < 100.0}
    return calibrate.fitted(found, on, times, "made up").device


def test_measured_accelerators_keep_their_peaks():
    device = measured_h200(KnownClock(slow_after=10**6))
    assert device.peak_flops == presets.H200.peak_flops
    assert device.peak_memory_bytes_per_s == presets.H200.peak_memory_bytes_per_s
    assert device.flops_per_s("float16") == pytest.approx(20e9, rel=1e-3)
    assert device.flops_per_s("bfloat16") == pytest.approx(60e9, rel=1e-3)
    assert device.flops_share("int8") == device.flops_share("bfloat16")  # as all that is not timed
    assert device.convolution_share == pytest.approx(CONVOLUTION_SHARE, rel=1e-3)
    assert device.memory_bytes_per_s == pytest.approx(MEMORY_BYTES_PER_S, rel=1e-3)


@pytest.mark.parametrize(
    ("most", "sizes"), [(1, []), (2, [2]), (6, [2, 6]), (7, [7]), (8, [2, 4, 8]), (12, [2, 4, 12])]
)
def test_groups_fill_the_devices(most, sizes):
    assert calibrate.group_sizes(most) == sizes


def test_what_takes_too_long_is_left_out():
    clock = KnownClock(slow_after=256)
    found = measured(clock=clock)
    widths = [run.width for run in clock.prepared if isinstance(run, MatmulRun) and run.dtype == "bfloat16"]
    assert widths == [16, 128, 256]  # 256 was tried
    assert [fit.what for fit in found.fits] == [
        "float32 products",
        "bfloat16 products",
        "float16 products",
        "memory",
        "links inside a host",
    ]


def test_a_type_whose_products_take_too_long_goes_as_float32():
    device = measured(clock=KnownClock(slow_after=1)).device
    assert device.flops_per_s("bfloat16") == device.flops_per_s("float32")  # as all that is not listed


def test_convolutions_that_take_too_long_go_as_products():
    clock = KnownClock(slow_after=10**6)
    known = clock._seconds
    clock._seconds = lambda run: 100.0 if isinstance(run, ConvolutionRun) else known(run)
    assert measured_h200(clock).convolution_share == 1.0


def test_a_short_budget_ends_the_rounds():
    clock = KnownClock()
    measured(clock=clock, budget_s=0.0)
    assert clock.samples == len(clock.prepared)


def test_times_that_do_not_grow_are_refused():
    class Stuck(KnownClock):
        def _seconds(self, run: Run) -> float:
            return 1e-3

    with pytest.raises(InvalidArgumentError, match="expected times that grow with the work"):
        measured(clock=Stuck())


def test_a_saved_measurement_is_taken_up_by_the_local_cluster(directory):
    before = Cluster.local()
    assert not before.fits
    path = measured().save()
    assert path is not None
    assert path.parent == directory
    cluster = Cluster.local()
    assert cluster.inside_host.bytes_per_s == pytest.approx(LINK.bytes_per_s, rel=1e-3)
    assert cluster.device.memory_bytes == before.device.memory_bytes
    assert [fit.what for fit in cluster.fits][-1] == "links inside a host"
    assert Cluster.local(measured=False) == before
    assert Cluster.parse("local") == cluster


def test_cpu_devices_share_their_host_so_that_their_number_must_be_the_same(directory):
    measured().save()
    assert Cluster.local(4) == Cluster.local(4, measured=False)
    measured(4).save()
    assert Cluster.local(4) != Cluster.local(4, measured=False)
    assert Cluster.local().inside_host.source != Cluster.local(4).inside_host.source


def test_accelerators_do_not_share_so_that_more_of_them_hold_for_fewer(directory):
    eight, on = measured(), dict(platform="gpu", device_kind="NVIDIA H100 80GB", jax_version="0.10.2", cores=0)
    for hosts, devices in ((1, 8), (4, 8)):
        shape = MeasuredOn(num_hosts=hosts, devices_per_host=devices, **on)
        dataclasses.replace(eight, on=shape, conditions=f"{hosts} hosts").save()

    def taken(hosts: int, devices: int, **other: str) -> str | None:
        found = measurement.saved_for(MeasuredOn(num_hosts=hosts, devices_per_host=devices, **(on | other)))
        return found and found.conditions

    assert taken(1, 4) == "1 hosts"
    assert taken(2, 8) == "4 hosts"
    assert taken(8, 8) is None
    assert taken(1, 16) is None
    assert taken(1, 8, device_kind="NVIDIA A100") is None
    assert taken(1, 8, jax_version="0.12.0") is None


def test_damaged_measurements_count_as_absent(directory):
    path = measured().save()
    assert path is not None
    path.write_text(re.sub('"format_version": [0-9]+', '"format_version": 1', path.read_text()))
    assert Cluster.local() == Cluster.local(measured=False)
    path.write_text("{")
    assert Cluster.local() == Cluster.local(measured=False)


def test_a_directory_that_cannot_be_written_keeps_nothing(tmp_path):
    (tmp_path / "file").write_text("")
    assert measured().save(tmp_path / "file") is None


def test_cluster_files_carry_the_quality_of_the_fit(directory):
    measured().save()
    cluster = Cluster.local()
    cluster.save(directory / "cluster.json")
    assert Cluster.load(directory / "cluster.json") == cluster
    assert Cluster.parse(str(directory / "cluster.json")).fits == cluster.fits


def test_plans_of_other_constants_are_not_taken_from_the_cache(directory):
    def planned() -> autopar.Step:
        step = autopar.parallelize(mlp_step)
        step.plan(shapes(MLP_STATE), shapes(MLP_BATCH))
        return step

    planned()
    assert "graph" not in planned().last_progress.spent_s  # from the cache
    measured().save()
    assert "graph" in planned().last_progress.spent_s


def test_the_report_holds_every_fit_and_timing():
    text = str(measured())
    assert text.startswith(f"Measured 8 x CPU (one host), jax {jax.__version__}; ")
    assert "links inside a host  overhead 20 us, latency 5 us, 2 GB/s" in text
    assert "float32 products     30 Gflop/s, overhead 9 us" in text
    assert text.count("reduce-scatter") == len(calibrate.CPU_SIZES.array_bytes)
    assert "(1.00)" in text


def test_the_command_line_measures(directory, monkeypatch, capsys):
    monkeypatch.setattr(calibrate, "DeviceClock", lambda devices, num_hosts: KnownClock())
    assert main(["measure", "--devices", "4"]) == 0
    out = capsys.readouterr().out
    assert "Measured 4 x CPU" in out
    assert f"Saved to {directory}" in out
    assert Cluster.local(4).fits
    assert not Cluster.local().fits

    assert main(["measure", "--save", str(directory / "eight.json")]) == 0
    assert "--cluster" in capsys.readouterr().out
    assert not Cluster.local().fits
    assert Cluster.load(directory / "eight.json").inside_host.bytes_per_s == pytest.approx(2e9, rel=1e-3)


MEASURING = """
import autopar
from autopar.hardware import calibrate
sizes = calibrate.Sizes(
    array_bytes=(1 << 12, 1 << 20), widths=(16, 128), stream_bytes=(1 << 18, 1 << 22), convolutions=((4, 8, 16),)
)
assert calibrate.measure(sizes=sizes, rounds=5).save() is not None
cluster = autopar.Cluster.local()
assert autopar.Cluster.local(measured=False) != cluster
assert 1e8 < cluster.device.flops_per_s("float32") < 1e13, cluster
assert 1e7 < cluster.device.memory_bytes_per_s < 1e13, cluster
assert 1e7 < cluster.inside_host.bytes_per_s < 1e12, cluster
assert 0 < cluster.device.convolution_share <= 1, cluster
assert 0 < cluster.inside_host.overhead_s + cluster.inside_host.latency_s < 0.01, cluster
print("measured", len(cluster.fits))
"""


@pytest.mark.slow
@pytest.mark.parametrize("devices", [4, 5])
def test_real_devices_are_measured(tmp_path, devices):
    """Virtual devices in a process of their own, small runs; several, for the machine may do other things too."""
    child = python(MEASURING, cache=tmp_path, devices=devices)
    assert child.returncode == 0, child.stderr
    assert "measured 6" in child.stdout
    assert list(tmp_path.glob(f"measured-cpu-*-1x{devices}-*.json"))


def test_a_saved_measurement_that_was_changed_is_named_and_left_aside(directory, caplog):
    path = measured().save()
    assert path is not None
    content = json.loads(path.read_text())
    content["measurement"]["inside_host"]["latency_s"] *= 2
    deep = '{"was": ' + "[" * 100_000
    for changed, message in ((json.dumps(content), "changed since it was measured"), (deep, "too deep to be read")):
        path.write_text(changed)
        assert Cluster.local() == Cluster.local(measured=False)
        assert f"cache {path}: " in caplog.text
        assert message in caplog.text
    del content["checksum"]  # as files were before there was one
    path.write_text(json.dumps(content))
    assert Cluster.local().inside_host.latency_s == content["measurement"]["inside_host"]["latency_s"]
