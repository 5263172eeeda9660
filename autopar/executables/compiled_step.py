"""A step compiled under its plan: one program over all devices, or the programs of a pipeline's tasks."""

from __future__ import annotations

from autopar.common import jax_compat
from autopar.common.progress import Progress
from autopar.executables.compiled_pipeline import CompiledPipeline, build_pipeline
from autopar.executables.compiled_spmd import Compiled, build_whole
from autopar.ir.traced_step import TracedStep
from autopar.plan.plan import Plan
from autopar.sharding.rules import RuleBook

CompiledStep = Compiled | CompiledPipeline


@jax_compat.no_mesh_set()
def build(traced: TracedStep, plan: Plan, rules: RuleBook, progress: Progress) -> CompiledStep:
    """Emits, lowers and compiles a step under a plan for this program's devices.

    Raises: NotEnoughDevicesError, PlanMismatchError; UnsupportedError where the plan keeps state in the memory of the
    host and this program's devices cannot.
    """
    plan.check_devices()
    with progress.pass_("compile"):
        if plan.record.pipeline is not None:
            return build_pipeline(traced, plan, rules, progress)
        return build_whole(traced, plan, plan.concrete_mesh(), rules)
