"""What the devices of this process did, as JAX's profiler records it: one event for each run of an HLO operation."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

# XLA's options for programs whose runs are recorded, by JAX's name of the backend. A kernel in a CUDA graph bears the
# name of the graph and not of its operation, so that programs for a GPU are without graphs.
RECORDED_PROGRAM_OPTIONS: Mapping[str, Mapping[str, str]] = {"gpu": {"xla_gpu_enable_command_buffer": ""}}

_DEVICE_PLANE = re.compile(r"^/device:\w+:(\d+)")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeviceEvent:
    """A run of an operation. `device` counts the devices of this process; `run` tells apart runs of one program."""

    device: int
    program: str
    run: int
    operation: str
    start_s: float
    end_s: float


@contextlib.contextmanager
def recorded() -> Iterator[Callable[[], list[DeviceEvent]]]:
    """Records what runs inside; the function returns the events once the context is left."""
    with tempfile.TemporaryDirectory(prefix="autopar-profile-") as folder:
        events: list[DeviceEvent] = []
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0
        jax.profiler.start_trace(folder, profiler_options=options)
        try:
            yield lambda: events
        finally:
            jax.profiler.stop_trace()
            with warnings.catch_warnings():
                # Of classes of jaxlib without a module's name (0.12): as an error the warning would end the process.
                warnings.simplefilter("ignore", DeprecationWarning)
                for path in sorted(Path(folder).rglob("*.xplane.pb")):
                    events += events_of(jax.profiler.ProfileData.from_file(str(path)))


def events_of(profile: Any) -> list[DeviceEvent]:
    """The events of HLO operations, by their starts.

    GPUs and TPUs have a plane each; CPU devices share the host's plane, and their events bear the device's number.
    """
    found = []
    for plane in profile.planes:
        at = _DEVICE_PLANE.match(plane.name)
        for line in plane.lines:
            for event in line.events:
                stats = dict(event.stats)
                if "hlo_op" not in stats:
                    continue
                start_s = event.start_ns * 1e-9
                found.append(
                    DeviceEvent(
                        device=int(at[1]) if at else int(stats.get("device_ordinal", 0)),
                        program=str(stats.get("hlo_module", "")),
                        run=int(stats.get("run_id", 0)),
                        operation=str(stats["hlo_op"]),
                        start_s=start_s,
                        end_s=start_s + event.duration_ns * 1e-9,
                    )
                )
    return sorted(found, key=lambda e: (e.start_s, e.device))
