"""autopar: write a training step for one device, run it on all of them, sharded as a search finds best."""

from autopar import errors
from autopar.api import Compiled, Step, parallelize, plan
from autopar.cluster import Cluster
from autopar.plan import Plan

__all__ = ["Cluster", "Compiled", "Plan", "Step", "errors", "parallelize", "plan"]
