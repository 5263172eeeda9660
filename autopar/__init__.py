"""autopar, an auto-parallel compiler for JAX: a training step written for one device runs on all devices."""

import itertools
import sys
from importlib import metadata

# Python imports this package before `python -m autopar.launch`, which starts processes and needs neither the compiler
# nor JAX. While Python looks for a module that it is to run, argv[0] is "-m".
if not (sys.argv[:1] == ["-m"] and ("-m", "autopar.launch") in itertools.pairwise(sys.orig_argv)):
    from autopar import checkpoint, data, distributed, errors, mixed_precision, recipes
    from autopar.api import parallelize, plan
    from autopar.benching import Bench, bench
    from autopar.execute.compiled_step import Compiled
    from autopar.execute.search import Search
    from autopar.fitting import Fitting, fit
    from autopar.hardware.cluster import Cluster, DeviceKind, Fabric, Link
    from autopar.initialization import initialize
    from autopar.lint_report import Lint
    from autopar.linting import lint
    from autopar.measuring import StepMeasurement, measure
    from autopar.ops.kernels.call import kernel
    from autopar.ops.kernels.known import known_kernel
    from autopar.plan.plan import Plan
    from autopar.recipes.recipe import constrain
    from autopar.step import Step
    from autopar.train.mixed_precision.policy import precision
    from autopar.train.monitoring.monitor import Monitor
    from autopar.transferring import transfer
    from autopar.tuning import Timed, Tuning, tune
    from autopar.verification import Verification, verify

try:
    __version__ = metadata.version("autopar")
except metadata.PackageNotFoundError:  # a checkout on the path that is not installed
    __version__ = "0+checkout"

__all__ = [
    "Bench",
    "Cluster",
    "Compiled",
    "DeviceKind",
    "Fabric",
    "Fitting",
    "Link",
    "Lint",
    "Monitor",
    "Plan",
    "Search",
    "Step",
    "StepMeasurement",
    "Timed",
    "Tuning",
    "Verification",
    "bench",
    "checkpoint",
    "constrain",
    "data",
    "distributed",
    "errors",
    "fit",
    "initialize",
    "kernel",
    "known_kernel",
    "lint",
    "measure",
    "mixed_precision",
    "parallelize",
    "plan",
    "precision",
    "recipes",
    "transfer",
    "tune",
    "verify",
]


def __dir__() -> list[str]:
    """What there is to use, without the modules behind it."""
    return sorted(name for name in globals() if name in __all__ or name.startswith("__"))
