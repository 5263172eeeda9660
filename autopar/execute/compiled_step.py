"""A step compiled under its plan: as one SPMD program over all devices, or as the programs of a pipeline's tasks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from autopar.common import jax_compat
from autopar.common.progress import Progress
from autopar.errors import UnsupportedError
from autopar.execute.compiled_pipeline import CompiledPipeline, build_pipeline
from autopar.execute.step_leaves import GlobalStep, LeafwiseStep, put, result_like
from autopar.frontend.callbacks import raise_failures
from autopar.ir.graph import HOST
from autopar.ir.jax_sharding import check_host_memory, named_sharding
from autopar.ir.rules import RuleBook
from autopar.ir.traced_step import TracedStep
from autopar.plan.plan import Plan
from autopar.runtime.execute import InFlight, in_flight_on, smallest
from autopar.search.materialize import make_function, with_saved_names


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Compiled(LeafwiseStep):
    """A step compiled under a plan for one set of shapes.

    `executable` maps the constants and the leaves of the dynamic arguments to the leaves of the results; `donated` are
    the leaves whose memory it reuses. `across` brings arguments to the devices in a program of several processes; None
    in one process. `in_flight` counts executions that have not ended, where their number is limited, by the result
    `noted`. `failures` collects the exceptions of callbacks; None in a step without callbacks.
    """

    plan: Plan
    traced: TracedStep
    executable: Any
    constants: tuple[Any, ...]
    constant_shardings: tuple[Any, ...]
    leaf_shardings: tuple[NamedSharding, ...]
    donated: frozenset[int]
    across: GlobalStep | None = None
    in_flight: InFlight | None = None
    noted: int | None = None
    failures: list[BaseException] | None = None

    @property
    def own_constants(self) -> Sequence[Any]:
        return self.constants

    def _run_across(self, leaves: Sequence[Any]) -> Any:
        assert self.across is not None, "for programs of several processes"
        results = self._run(self.across.arguments(leaves))
        self.across.await_end(results)
        return results

    def _run(self, leaves: Sequence[Any]) -> Any:
        results = self.executable(self.constants, *leaves)
        if self.in_flight is not None and self.noted is not None:
            self.in_flight.add(results[self.noted])
        if self.failures is not None:
            raise_failures(results, self.failures)
        return results

    def ready(self) -> Compiled:
        """The same step with its constants on the devices."""
        return dataclasses.replace(self, constants=put(self.constants, self.constant_shardings))

    def as_text(self) -> str:
        """The optimised program."""
        return self.executable.as_text()

    def memory_analysis(self) -> Any:
        return self.executable.memory_analysis()

    def cost_analysis(self) -> Any:
        """The cost analysis of XLA, of one device."""
        return self.executable.cost_analysis()


def build_whole(traced: TracedStep, plan: Plan, mesh: Mesh, rules: RuleBook) -> Compiled:
    """Compiles a step as one program for the devices of a mesh.

    Raises: PlanMismatchError; UnsupportedError where the devices cannot keep state in the memory of the host.
    """
    return lower_whole(traced, plan, mesh, rules).compile()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LoweredWhole:
    """A step as one program that is not compiled yet."""

    plan: Plan
    traced: TracedStep
    lowered: Any
    mesh: Mesh
    constants: tuple[Any, ...]
    constant_shardings: tuple[Any, ...]
    leaf_shardings: tuple[NamedSharding, ...]
    result_shardings: Sequence[NamedSharding]
    failures: list[BaseException] | None

    def compile(self) -> Compiled:
        several = _processes(self.mesh) > 1
        reads = list(enumerate(self.leaf_shardings))
        not_state = set(range(len(self.traced.out_avals))) - set(self.traced.tied.values())
        return Compiled(
            plan=self.plan,
            traced=self.traced,
            executable=jax_compat.compiled(self.lowered, self.plan.compiler_options_on(self.mesh.devices.flat[0])),
            constants=self.constants,
            constant_shardings=self.constant_shardings,
            leaf_shardings=self.leaf_shardings,
            donated=frozenset(self.traced.tied),
            across=GlobalStep(self.traced, reads, self.result_shardings) if several else None,
            in_flight=in_flight_on(list(self.mesh.devices.flat)),
            noted=smallest(self.traced.out_avals, not_state),
            failures=self.failures,
        )


@jax_compat.no_mesh_set()
def lower_whole(
    traced: TracedStep, plan: Plan, mesh: Mesh, rules: RuleBook, *, is_numbered: bool = False
) -> LoweredWhole:
    """Lowers a step as one program for the devices of a mesh. `is_numbered`: as in `Emitter`. Raises: see `build`."""
    traced = with_saved_names(traced, plan)
    emitted = make_function(traced, plan, mesh, rules, is_numbered=is_numbered)
    if emitted.lowered.in_host:
        local_devices = [d for d in mesh.devices.flat if d.process_index == jax.process_index()]
        check_host_memory(f"plan of {plan.record.step}", (local_devices or list(mesh.devices.flat))[0])
    inputs = [named_sharding(layout, mesh, in_host=state == HOST) for layout, state in emitted.lowered.entries()]
    results = [named_sharding(v.layout, mesh, in_host=v.in_host) for v in plan.record.results]
    constants = tuple(inputs[: len(emitted.graph.constants)])
    arguments = tuple(inputs[len(constants) :])

    def step(constants: tuple[Any, ...], *leaves: Any) -> Any:
        results = emitted.function(*constants, *leaves)
        return [result_like(x, aval) for x, aval in zip(results, traced.out_avals, strict=True)]

    step.__name__ = traced.name
    jitted = jax.jit(
        step,
        in_shardings=(constants, *arguments),
        out_shardings=results,
        donate_argnums=tuple(i + 1 for i in sorted(traced.tied)),
    )
    shapes = tuple(jax_compat.shape_of(c) for c in emitted.graph.constants)
    return LoweredWhole(
        plan=plan,
        traced=traced,
        lowered=jitted.lower(shapes, *traced.in_avals),
        mesh=mesh,
        constants=emitted.graph.constants,
        constant_shardings=constants,
        leaf_shardings=arguments,
        result_shardings=results,
        failures=emitted.failures,
    )


def _processes(mesh: Mesh) -> int:
    return len({d.process_index for d in mesh.devices.flat})


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
