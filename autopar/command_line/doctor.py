"""What is installed, which devices, caches and measurements there are, and what would go wrong: `autopar doctor`."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import platform
import re
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import msgspec

from autopar.command_line.kept_files import BEGINNINGS, Kind, kept_in
from autopar.common.files import default_directory
from autopar.common.text import PLAIN, TextFormat, text_of_bytes, text_of_rate
from autopar.errors import AutoparError
from autopar.hardware.cluster import Cluster

OURS = ("autopar", "jax", "jaxlib", "flax")
# What runs a step on accelerators. jax has an extra for each, and autopar has none, as a machine has one kind.
BACKENDS = ("libtpu", "jax_cuda13_plugin")

# The name that a requirement begins with: `jax` of `jax[tpu]>=0.10`.
_NAME = re.compile(r"[\w.-]+")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One fact. `advice`: what would go wrong, and what to do; empty where nothing would."""

    what: str
    state: str
    advice: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Diagnosis:
    """All findings."""

    findings: tuple[Finding, ...]

    def to_dict(self) -> dict[str, Any]:
        """The findings as plain values, as `json.dumps` takes them."""
        return {"findings": [msgspec.to_builtins(finding) for finding in self.findings]}

    def text(self, text_format: TextFormat = PLAIN) -> str:
        """A line for each finding, and one for each advice."""
        width = max(len(finding.what) for finding in self.findings)
        lines = []
        for finding in self.findings:
            lines.append(f"{finding.what:{width}}  {finding.state}")
            if finding.advice:
                lines.append(f"{'':{width}}  ! {finding.advice}")
        return text_format.broken(lines, hanging=width + 4)

    __str__ = text


def diagnose() -> Diagnosis:
    """Looks at this machine and this installation."""
    return Diagnosis((*_installed(), *_devices(), *_cache(default_directory())))


def _installed() -> list[Finding]:
    found = [Finding(what="python", state=platform.python_version())]
    for name in OURS:  # autopar itself may run from its checkout
        found.append(Finding(what=name, state=_version(name) or "not installed as a package"))
    for name in BACKENDS:
        there = importlib.util.find_spec(name) is not None
        found.append(Finding(what=name, state="installed" if there else "not installed (optional)"))
    return [*found, *_extras()]


def _extras() -> list[Finding]:
    """The extras of autopar's own metadata, and what each lacks here."""
    try:
        here = metadata.metadata("autopar").get_all("Provides-Extra") or []
        required = metadata.requires("autopar") or []
    except metadata.PackageNotFoundError:
        return [Finding(what="extras", state="not known: autopar is not installed as a package")]
    return [_extra(name, required) for name in sorted(here)]


def _extra(extra: str, required: Sequence[str]) -> Finding:
    mark = re.compile(rf"""extra == ["']{re.escape(extra)}["']""")
    names = sorted({_NAME.findall(text)[0] for text in required if mark.search(text)})
    missing = [name for name in names if _version(name) is None]
    what = f"extra {extra}"
    if not missing:
        return Finding(what=what, state="installed")
    count = "nothing of it" if len(missing) == len(names) else f"without {', '.join(missing)}"
    return Finding(what=what, state=f"not installed (optional): {count}")


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _devices() -> list[Finding]:
    try:
        cluster = Cluster.local()
    except (AutoparError, RuntimeError) as error:
        return [Finding(what="devices", state="none that autopar knows", advice=str(error))]
    devices, device = jax.devices(), cluster.device
    rate = text_of_rate(cluster.inside_host.bytes_per_s, "B")
    table = "" if cluster.fits else "from a table: "
    found = [
        Finding(what="devices", state=f"{len(devices)} x {devices[0].device_kind}"),
        Finding(what="processes", state=str(jax.process_count())),
        Finding(what="memory of a device", state=text_of_bytes(device.memory_bytes)),
        Finding(what="link inside a host", state=f"{rate} ({table}{cluster.inside_host.source})"),
    ]
    if cluster.num_hosts > 1:
        rate = text_of_rate(cluster.between_hosts.bytes_per_s, "B")
        found.append(Finding(what="link between hosts", state=f"{rate} ({table}{cluster.between_hosts.source})"))
    advice = ""
    if not cluster.fits:
        advice = "predictions use tables of constants, not these devices: autopar measure (a minute) times them"
    quality = "; ".join(
        f"{fit.what}: {fit.points} timings, median error {fit.median_error:.0%}" for fit in cluster.fits
    )
    found.append(Finding(what="measured", state=quality or "nothing", advice=advice))
    if len(devices) == 1:
        advice = "a step runs whole on one device; to try parallel plans on a CPU, set JAX_NUM_CPU_DEVICES=8"
        found.append(Finding(what="parallel", state="no", advice=advice))
    return found


def _cache(directory: Path | None) -> list[Finding]:
    if directory is None:
        return [Finding(what="cache", state="none", advice="plans are made anew in every run: set AUTOPAR_CACHE_DIR")]
    if not directory.is_dir():
        return [Finding(what="cache", state=f"{directory}, not there yet: the first plan makes it")]
    kept = kept_in(directory)
    plans, measured = len(kept.of_kind(Kind.PLANS)), len(kept.of_kind(Kind.MEASUREMENTS))
    total = text_of_bytes(sum(file.size_bytes for file in kept.files))
    state = f"{directory}: {plans} plans, {measured} measurements, {total}"
    advice = "" if os.access(directory, os.W_OK) else "it cannot be written: plans are made anew in every run"
    dated = [
        Finding(
            what="measurement", state=f"{Path(file.path).stem.removeprefix(BEGINNINGS[file.kind])}, of {file.written}"
        )
        for file in kept.of_kind(Kind.MEASUREMENTS)
    ]
    return [Finding(what="cache", state=state, advice=advice), *dated]
