"""Before jax and autopar are imported: 8 virtual CPU devices, and a cache of this run's own."""

import collections
import gc
import importlib.util
import os
import shutil
import tempfile
from importlib import metadata

import hypothesis
import pytest

NUM_DEVICES = 8

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# The command line follows them, and the processes of pytest-xdist say 80 columns.
for _name in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR"):
    os.environ.pop(_name, None)
# The programs of the tests run for milliseconds: LLVM's optimiser takes longer than it could save. Collectives and
# memory are decided by XLA's own passes, which run as always.
_FLAGS = {
    "--xla_force_host_platform_device_count": str(NUM_DEVICES),
    "--xla_backend_optimization_level": "0",
    "--xla_llvm_disable_expensive_passes": "true",
    "--xla_cpu_parallel_codegen_split_count": "1",
}
# The older emitters of fusions compile two to four times as fast; later jaxlibs have the newer ones alone.
if tuple(map(int, metadata.version("jaxlib").split(".")[:2])) < (0, 11):
    _FLAGS["--xla_cpu_use_fusion_emitters"] = "false"
_GIVEN = os.environ.get("XLA_FLAGS", "")
_ADDED = [f"{name}={value}" for name, value in _FLAGS.items() if name not in _GIVEN]
os.environ["XLA_FLAGS"] = " ".join([_GIVEN, *_ADDED]).strip()

# A plan that an older version of the code left in the user's cache would pass for one of this version, and what the
# user has measured would decide what Cluster.local() is.
_CACHE = tempfile.mkdtemp(prefix="autopar-tests-")
os.environ["AUTOPAR_CACHE_DIR"] = _CACHE

# Many tests compile the same small programs: of the processes of one run each finds what another has compiled.
for _name, _value in {
    "JAX_COMPILATION_CACHE_DIR": os.path.join(_CACHE, "compiled"),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}.items():
    os.environ.setdefault(_name, _value)

# The same examples in every run: what a run shows is the change's doing. Sweeps with other examples are made by hand.
hypothesis.settings.register_profile("repeatable", derandomize=True)
hypothesis.settings.load_profile("repeatable")


# Extra -> a module that comes with it.
_EXTRAS = {"docs": "myst_nb", "gpu": "jax_plugins.xla_cuda13", "published": "transformers", "tpu": "libtpu"}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a test with `@pytest.mark.cases(n)` so many of its cases, evenly spaced, run by default; others are slow.

    Tests with `@pytest.mark.extra(name)` are slow, and skipped where that extra is not installed.
    """
    cases = collections.defaultdict(list)
    for item in items:
        for mark in item.iter_markers("extra"):
            item.add_marker(pytest.mark.slow)
            if not _is_installed(_EXTRAS[mark.args[0]]):
                item.add_marker(pytest.mark.skip(reason=f"needs autopar[{mark.args[0]}]"))
        if item.get_closest_marker("cases") and not item.get_closest_marker("slow"):
            cases[item.nodeid.partition("[")[0]].append(item)
    for of in cases.values():
        n = of[0].get_closest_marker("cases").args[0]
        kept = {round(i * (len(of) - 1) / max(n - 1, 1)) for i in range(n)}
        for i, item in enumerate(of):
            if i not in kept:
                item.add_marker(pytest.mark.slow)


def _is_installed(module: str) -> bool:
    package = module.partition(".")[0]  # without it the look-up of a module in it raises
    return importlib.util.find_spec(package) is not None and importlib.util.find_spec(module) is not None


def pytest_collection_finish() -> None:
    """Looks for cycles seldom: jax keeps what was traced, and each full collection would go through all of it."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 20)


def pytest_unconfigure(config: pytest.Config) -> None:
    shutil.rmtree(_CACHE, ignore_errors=True)
