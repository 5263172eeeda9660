"""The GPUs of this host, found without JAX, and how its processes share them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

_DEVICES = Path("/dev")
# Who sees fewer than all, in the order in which the libraries ask.
_VISIBLE = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")


def count_gpus(environment: Mapping[str, str], devices: Path = _DEVICES) -> int:
    """How many GPUs JAX would see in a process of this host; 0 where it is told to use CPU devices."""
    platforms = environment.get("JAX_PLATFORMS", "")
    if platforms and not {"cuda", "rocm", "gpu"} & set(platforms.split(",")):
        return 0
    for name in _VISIBLE:
        if name in environment:
            return len([part for part in environment[name].split(",") if part.strip() not in ("", "-1")])
    if not devices.is_dir():
        return 0
    nvidia = [path for path in devices.iterdir() if re.fullmatch(r"nvidia\d+", path.name)]
    amd = list((devices / "dri").glob("renderD*")) if (devices / "kfd").exists() else []
    return len(nvidia) or len(amd)


def gpus_of(local_process: int, processes: int, per_process: int | None, gpus: int) -> tuple[int, ...] | None:
    """The GPUs of one of the processes of this host, as JAX numbers those that it sees; None: JAX takes all there are.

    Raises: ValueError where there are too few.
    """
    if gpus == 0 or (processes == 1 and per_process is None):
        return None
    each = per_process if per_process is not None else gpus // processes
    if each * processes > gpus or each == 0:
        raise ValueError(
            f"{processes} processes with {each or 1} GPUs each need {processes * max(each, 1)}, this host has {gpus}"
        )
    return tuple(range(local_process * each, (local_process + 1) * each))
