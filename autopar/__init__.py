"""autopar, an auto-parallel compiler for JAX: a training step written for one device runs on all devices."""

from autopar import checkpoint, data, distributed, errors, recipes
from autopar.api import parallelize, plan
from autopar.constraining import constrain
from autopar.executables.compiled_spmd import Compiled
from autopar.fitting import Fitting, fit
from autopar.hardware.cluster import Cluster
from autopar.kernels.call import kernel
from autopar.mixed_precision.policy import precision
from autopar.monitoring.monitor import Monitor
from autopar.plan.plan import Plan
from autopar.step import Step
from autopar.tuning import Timed, Tuning, tune
from autopar.verification import Verification, verify

__all__ = [
    "Cluster",
    "Compiled",
    "Fitting",
    "Monitor",
    "Plan",
    "Step",
    "Timed",
    "Tuning",
    "Verification",
    "checkpoint",
    "constrain",
    "data",
    "distributed",
    "errors",
    "fit",
    "kernel",
    "parallelize",
    "plan",
    "precision",
    "recipes",
    "tune",
    "verify",
]


def __dir__() -> list[str]:
    """What there is to use, without the modules behind it."""
    return sorted(name for name in globals() if name in __all__ or name.startswith("__"))
