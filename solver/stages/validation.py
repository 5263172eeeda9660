"""Whether a problem of stages is well formed."""

from __future__ import annotations

import numpy as np

from autopar.solver.stages.problem import Schedule, StageOption, StageProblem


def validate(problem: StageProblem) -> None:
    """Check a problem that a user made.

    Raises: ValueError naming the field, or the option and its field, at fault.
    """
    for name in ("num_devices", "num_layers", "num_microbatches", "host_devices"):
        if getattr(problem, name) < 1:
            raise ValueError(f"{name}: expected 1 or more, got {getattr(problem, name)}")
    if problem.fixed_num_stages is not None and problem.fixed_num_stages < 1:
        raise ValueError(f"fixed_num_stages: expected 1 or more, got {problem.fixed_num_stages}")
    if (problem.chunks >= 2) != (problem.schedule is Schedule.INTERLEAVED) or problem.chunks < 1:
        raise ValueError(
            f"chunks: expected 2 or more if interleaved, else 1, got {problem.chunks} ({problem.schedule})"
        )
    if not isinstance(problem.schedule, Schedule):
        raise ValueError(f"schedule: expected one of {[str(s) for s in Schedule]}, got {problem.schedule!r}")
    if len(problem.placements) not in (0, len(problem.options)):
        raise ValueError(f"placements: expected none, or one of each option, got {len(problem.placements)}")
    if problem.placements and problem.schedule is Schedule.INTERLEAVED:
        raise ValueError("placements: expected none where all stages have one option (interleaved)")
    _check_sizes(problem)
    for number, option in enumerate(problem.options):
        _check_option(problem, number, option)


def _check_sizes(problem: StageProblem) -> None:
    hosts = [lies.host_devices for lies in problem.placements] or [problem.host_devices] * len(problem.options)
    for host in set(hosts):
        sizes = {o.num_devices for o, n in zip(problem.options, hosts, strict=True) if n == host}
        parts = sorted(size for size in sizes if size < host)
        for small, large in zip(parts, [*parts[1:], host], strict=False):
            if small < 1 or large % small:
                raise ValueError(
                    f"num_devices of options: {small} does not divide {large}, so that stages may not tile a host"
                )
    for number, (option, host) in enumerate(zip(problem.options, hosts, strict=True)):
        where = f"option {number}" + (f" ({option.name})" if option.name else "")
        if option.num_devices > host and option.num_devices % host:
            raise ValueError(
                f"{where}: expected a part of a host of {host} devices or whole hosts, got {option.num_devices} devices"
            )


def _check_option(problem: StageProblem, number: int, option: StageOption) -> None:
    where = f"option {number}" + (f" ({option.name})" if option.name else "")
    for name in ("forward_s", "backward_s", "weight_s", "once_s", "send_s"):
        values = getattr(option, name)
        if values is None and name == "weight_s":
            continue
        _check_shape(f"{where}: {name}", values, problem.num_layers)
        free = values[np.isfinite(values)] if name == "forward_s" else values
        if not np.isfinite(free).all() or (values < 0).any() or np.isnan(values).any():
            raise ValueError(f"{where}: {name}: expected finite seconds, not negative, got {values}")
    for name in ("state_bytes", "saved_bytes", "deferred_bytes", "working_bytes"):
        values = getattr(option, name)
        if values is None and name == "deferred_bytes":
            continue
        _check_shape(f"{where}: {name}", values, problem.num_layers)
        if values.dtype.kind not in "iu" or (values < 0).any():
            raise ValueError(f"{where}: {name}: expected whole numbers, not negative, got {values.dtype}")


def _check_shape(where: str, values: np.ndarray, num_layers: int) -> None:
    if values.shape != (num_layers,):
        raise ValueError(f"{where}: expected shape {(num_layers,)}, got {values.shape}")
