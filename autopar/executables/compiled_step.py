"""A step compiled under its plan: one program over all devices, or the programs of a pipeline's tasks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from autopar.common import jax_compat
from autopar.common.progress import Progress
from autopar.errors import UnsupportedError
from autopar.executables.compiled_pipeline import CompiledPipeline, build_pipeline
from autopar.executables.compiled_spmd import Compiled, LoweredWhole, build_whole
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


# A step between tracing and compiling, staged as `jax.jit` stages: `step.lower(*args).compile()`.


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Lowered:
    """A step lowered under its plan. `whole` is its one program, None where the plan has stages."""

    plan: Plan
    whole: LoweredWhole | None
    compiling: Callable[[], CompiledStep]

    def compile(self) -> CompiledStep:
        """The compiled program; later calls of the step with arguments of these shapes run it too."""
        return self.compiling()

    def as_text(self, dialect: str | None = None) -> str:
        """The StableHLO program with all shardings. Raises: UnsupportedError for a plan with stages."""
        text: str = self._program("as_text").as_text(dialect)
        return text

    def compiler_ir(self, dialect: str | None = None) -> Any:
        """The MLIR module. Raises: UnsupportedError for a plan with stages."""
        return self._program("compiler_ir").compiler_ir(dialect)

    def cost_analysis(self) -> Any:
        """The cost analysis of XLA before compilation. Raises: UnsupportedError for a plan with stages."""
        return self._program("cost_analysis").cost_analysis()

    def _program(self, method: str) -> Any:
        if self.whole is None:
            pipeline = self.plan.record.pipeline
            assert pipeline is not None, "a plan without stages is lowered to one program"
            raise UnsupportedError(
                where=f"{self.plan.record.step}.lower(...).{method}()",
                expected="a plan of one program",
                got=f"one of {len(pipeline.stages)} stages, whose tasks are lowered and compiled one by one",
                hint="step.compile(...).as_text() has the optimised programs of all tasks",
            )
        return self.whole.lowered
