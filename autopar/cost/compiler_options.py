"""XLA's options for a platform, on which the predicted overlap rests, and what a user puts in their place."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax

from autopar.cost.stream_simulator import Overlap, overlap_of, overlap_of_exchanges
from autopar.errors import InvalidArgumentError
from autopar.hardware.kinds import Platform
from autopar.plan.schema import OptionValue

# A value of an option; None: XLA's own.
Requested = tuple[tuple[str, OptionValue | None], ...]
_WHERE = "Search(compiler_options=...)"
# Copies to the memory of the host, and from there, that may be on their way at once; as many as MaxText allows for
# offloading. Left to itself, libtpu 0.0.42.1 has a program for TPU7x wait for copies of 16 MiB, though not of 8 MiB.
HOST_COPIES = 24
# The options of these compilers have one table: each knows those of the other, and no more.
_SHARING = (Platform.CPU, Platform.GPU)


def assumed_options(platform: Platform, largest_axis: int = 1) -> dict[str, OptionValue]:
    """The options that say what `stream_simulator.overlap_of` says: collectives run beside computation, and are
    combined up to a size; copies to the host and from there do so too. But for those of reduce-scatters and of copies,
    they are the defaults of jaxlib 0.10.2 and libtpu 0.0.42 (programs compiled with them are the same), and hold here
    whatever a later version or `XLA_FLAGS` has.

    `largest_axis`: the devices of the largest axis of the plan's meshes.

    Sources: "GPU performance tips" (docs.jax.dev/en/latest/gpu_performance_tips.html) for the scheduler and the combine
    thresholds; "XLA flags guidance" (openxla.org/xla/flags_guidance), "v5e/Async", for asynchronous gathers on TPU;
    MaxText, benchmarks/xla_flags_library.py, for copies.
    """
    if platform is Platform.GPU:
        return {
            "xla_gpu_enable_latency_hiding_scheduler": True,
            **_gpu_thresholds(overlap_of(platform, largest_axis)),
        }
    if platform is Platform.TPU:
        return {
            "xla_tpu_enable_latency_hiding_scheduler": True,
            "xla_tpu_enable_async_collective_fusion": True,
            "xla_tpu_enable_async_collective_fusion_fuse_all_gather": True,
            "xla_enable_async_collective_permute": True,
            "xla_tpu_host_transfer_overlap_limit": HOST_COPIES,
        }
    return {}


def _gpu_thresholds(overlap: Overlap) -> dict[str, OptionValue]:
    return {
        "xla_gpu_all_gather_combine_threshold_bytes": overlap.combined_bytes,
        "xla_gpu_all_reduce_combine_threshold_bytes": overlap.combined_bytes,
        "xla_gpu_reduce_scatter_combine_threshold_bytes": overlap.scattered_bytes,
    }


def exchange_options_of(requested: Requested, platform: Platform, largest_axis: int = 1) -> dict[str, OptionValue]:
    """Options of a pipeline's programs that run once a step, in place of those of `options_of`: none that a user sets.

    Source: `stream_simulator.overlap_of_exchanges`.
    """
    if platform is not Platform.GPU:
        return {}
    thresholds = _gpu_thresholds(overlap_of_exchanges(overlap_of(platform, largest_axis)))
    return {name: value for name, value in thresholds.items() if name not in dict(requested)}


def options_of(requested: Requested, platform: Platform, largest_axis: int = 1) -> dict[str, OptionValue]:
    """The options of a plan: those assumed, with the requested ones added or in their place."""
    options = {**assumed_options(platform, largest_axis), **dict(requested)}
    return {name: value for name, value in options.items() if value is not None}


def unlike_assumed(requested: Requested, platform: Platform, largest_axis: int = 1) -> str | None:
    """A note on requested options of which the prediction takes other values; None where there are none."""
    assumed = assumed_options(platform, largest_axis)
    unlike = [f"{name}={assumed[name]}" for name, value in requested if name in assumed and value != assumed[name]]
    return f"the prediction assumes {', '.join(unlike)}, and not what compiler_options say" if unlike else None


def requested_options(options: object) -> Requested:
    """Options as a user gives them, ordered by name. Raises: InvalidArgumentError for what are none."""
    if options is None:
        return ()
    kinds = (bool, int, float, str, type(None))
    named = options.items() if isinstance(options, Mapping) else ()
    if isinstance(options, Mapping) and all(isinstance(k, str) and isinstance(v, kinds) for k, v in named):
        return tuple(sorted(named))
    raise InvalidArgumentError(
        where=_WHERE,
        expected="a dict from names of XLA's options to True, False, numbers or text (None: XLA's own value)",
        got=f"{options!r:.80}",
        hint="as for jax.jit: compiler_options={'xla_gpu_all_gather_combine_threshold_bytes': 1 << 28}",
    )


def check_options(options: Mapping[str, OptionValue], platform: Platform) -> None:
    """Tries options on an empty program, where a compiler of the platform is at hand; what compiles for TPU is only
    where TPUs are.

    Raises: InvalidArgumentError for an option that the compiler does not know, or a value that it refuses.
    """
    here = Platform(jax.default_backend()) if jax.default_backend() in tuple(Platform) else None
    if here is None or (here is not platform and not {here, platform}.issubset(_SHARING)):
        return
    for name, value in options.items():
        refusal = _refusal(name, value)
        if refusal:
            raise InvalidArgumentError(
                where=f"{_WHERE}, {name!r}",
                expected=f"an option of XLA's compiler for {platform.value} devices (jax {jax.__version__})",
                got=refusal,
                hint="correct it; None in place of a value leaves out an option that plans set themselves",
            )


@functools.lru_cache(maxsize=256)
def _refusal(name: str, value: OptionValue) -> str:
    """Why the compiler at hand refuses an option; empty: it does not."""
    options: dict[str, Any] = {name: value}
    try:
        jax.jit(lambda: 0).lower().compile(compiler_options=options)
    except jax.errors.JaxRuntimeError as error:
        return str(error).removeprefix("INVALID_ARGUMENT: ")
    return ""
