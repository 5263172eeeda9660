"""Ways of planning, and what becomes of a program under one of them."""

from __future__ import annotations

import dataclasses
import functools
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

import autopar
from autopar import errors, recipes
from autopar.frontend.tracing import trace
from autopar.hardware import presets
from autopar.ir.rules import RuleBook
from autopar.passes.microbatch import micro_batched
from autopar.passes.plain_loop import run_graph
from autopar.runtime.schedule import V_SHAPED
from autopar.runtime.standard_schedules import SCHEDULES
from benchmarks.random_programs.forms import SAME_RESULTS
from benchmarks.random_programs.program import Program, load
from benchmarks.rounding import difference, noise_of, perturbed_arguments, results_of

STEPS = 2
TIME_LIMIT_S = 5.0
SLOWNESS = 1e-4  # of the devices that are planned for, so that splitting next to nothing pays
LIMITS = (0.6, 0.6, 0.8, 0.95)  # of the free plan's peak memory
RULES = "rules of micro-batches"  # the mode that runs the graph of micro-batches on one device, without a plan
KINDS = ("equal", "refused", "wrong", "refused without a line", "crash")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mode:
    """What `parallelize` is asked for.

    Attributes:
        name: The row of the table.
        plan: A recipe as source text, "" for the free search.
        memory: A part of what the free plan needs, which is the memory limit; 0 for none.
    """

    name: str
    devices: int
    plan: str = ""
    num_microbatches: int = 0
    memory: float = 0.0
    x64: bool = False

    @property
    def text(self) -> str:
        """The options of `parallelize`."""
        parts = [f"devices={self.devices}"]
        parts += [f"plan={self.plan}"] if self.plan else []
        parts += [f"num_microbatches={self.num_microbatches}"] if self.num_microbatches else []
        parts += [f"memory limit {self.memory:g} of the free plan's"] if self.memory else []
        parts += ["x64"] if self.x64 else []
        return ", ".join(parts)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """`kind` is one of `KINDS`, or "invalid" where plain `jax.jit` refuses the program."""

    kind: str
    reason: str = ""
    seconds: float = 0.0

    @property
    def failed(self) -> bool:
        return self.kind in ("wrong", "refused without a line", "crash")


def modes_of(program: Program, drawn: int) -> list[Mode]:
    """The free search, and so many other modes drawn by the program's seed."""
    random = np.random.default_rng((program.seed, 1))

    def one(things: Any) -> Any:
        return things[int(random.integers(len(things)))]

    def devices() -> int:
        return int(random.choice([2, 4, 4, 8]))

    def micro_batches() -> int:
        """From 1 to 4, seldom one by which the batch does not divide."""
        examples = program.batch[0].shape[0]
        return one([m for m in (1, 2, 3, 4) if examples % m == 0 or random.random() < 0.2])

    known = [recipe for recipe in _RECIPES if random.random() < 0.1 or _suits(recipe[0], program)]
    products = sum(s.text.count("@") + s.text.count("einsum") + s.text.count("conv") for s in program.statements)
    out = [Mode(name="free search", devices=devices())]
    for _ in range(drawn):
        kind = float(random.random())
        if kind < 0.4:
            text, least = one(known)
            out.append(Mode(name=text, devices=max(devices(), least), plan=f"recipes.{text}"))
        elif kind < 0.6:
            named = [name for name in sorted(SCHEDULES) if name.startswith("inference") != bool(program.loss)]
            if products < 4 and random.random() < 0.9:
                named = [name for name in named if name not in _CHUNKED]
            schedule, m = one(named), micro_batches()
            stages = one((1, 2, 2)) if schedule not in _CHUNKED and (products > 1 or random.random() < 0.1) else 1
            stages = 2 if schedule in _CHUNKED else stages
            chunks = ", chunks=2" if schedule in _CHUNKED else ""
            inner = one(("", "", ", tp=2, dp=1", ", dp=2", ", zero=1", ", zero=3", ", recompute='input'"))
            count = {", dp=2": 2 * stages, ", tp=2, dp=1": 2 * stages}.get(inner, max(devices(), stages))
            text = f"recipes.combine(pp={stages}, schedule='{schedule}', num_microbatches={m}{chunks}{inner})"
            out.append(Mode(name=f"schedule {schedule}", devices=count, plan=text))
        elif kind < 0.7:
            out.append(Mode(name="micro-batches, free", devices=devices(), num_microbatches=micro_batches()))
        elif kind < 0.8:
            out.append(Mode(name="memory limit", devices=devices(), memory=one(LIMITS)))
        elif kind < 0.9:
            if (text := _pins(program, random)) is not None:
                out.append(Mode(name="pins", devices=devices(), plan=text))
        elif kind < 0.95:
            out.append(Mode(name="x64, free", devices=devices(), x64=True))
        else:
            text, least = one(known)
            out.append(Mode(name="x64, recipes", devices=max(devices(), least), plan=f"recipes.{text}", x64=True))
    return list(dict.fromkeys(out))


def modes_of_rules(program: Program) -> list[Mode]:
    """The graph of two or three micro-batches, drawn by the seed of those by which the batch divides; else of as many
    as examples."""
    examples = program.batch[0].shape[0]
    counts = [m for m in (2, 3) if examples % m == 0] or [examples]
    return [Mode(name=RULES, devices=1, num_microbatches=counts[program.seed % len(counts)])]


# With the least number of devices.
_RECIPES = (
    ("data_parallel()", 2),
    ("zero(1)", 2),
    ("zero(2)", 2),
    ("zero(3)", 2),
    ("zero(1, offload='optimizer')", 2),
    ("tensor_parallel()", 2),
    ("tensor_parallel(size=2)", 2),
    ("tensor_parallel('2d', size=4)", 4),
    ("tensor_parallel('2.5d', depth=2)", 8),
    ("tensor_parallel('3d')", 8),
    ("expert_parallel(2)", 2),
    ("sequence_parallel(size=2)", 2),
    ("sequence_parallel('ulysses', size=2)", 2),
    ("sequence_parallel('ring', size=2)", 2),
    ("combine(dp=2, tp=2)", 4),
    ("combine(tp=2, zero=3)", 4),
    ("combine(sp=2, zero=1)", 4),
    ("combine(recompute='input')", 2),
    ("combine(recompute='matmuls', num_microbatches=2)", 2),
    ("pipeline(2, num_microbatches=2)", 2),
    ("pipeline(2)", 2),
    ("cut(recipes.tensor_parallel(size=2), stages=2, num_microbatches=2)", 4),
    ("cut(recipes.zero(2), stages=2, num_microbatches=4)", 4),
)


_CHUNKED = ("interleaved", *V_SHAPED)


def _suits(recipe: str, program: Program) -> bool:
    """Whether a program has what a recipe splits: attention, experts, products."""
    if "sequence" in recipe or "sp=" in recipe:
        return "attention" in program.blocks
    if "expert" in recipe:
        return "experts" in program.blocks
    return "tensor" not in recipe or any("@" in s.text or "einsum" in s.text for s in program.statements)


def _pins(program: Program, random: np.random.Generator) -> str | None:
    """One or two leaves with a dimension pinned, seldom one that may not divide."""
    leaves = [("p", x) for x in program.stored] + [("batch", x) for x in program.batch]
    places = [
        (f"{group}/{leaf.name}", dim)
        for group, leaf in leaves
        for dim, size in enumerate(leaf.shape)
        if size % 8 == 0 or random.random() < 0.1
    ]
    if not places:
        return None
    pins = {}
    for name in ("a", "b")[: 1 + int(random.integers(2))]:
        path, dim = places[int(random.integers(len(places)))]
        pins.setdefault(path, f"P({', '.join(['None'] * dim + [repr(name)])})")
    sizes = ", axis_sizes={'a': 2}" if random.random() < 0.3 else ""
    text = ", ".join(f"'{path}': {spec}" for path, spec in pins.items())
    return f"autopar.constrain({{{text}}}{sizes})"


def slow_cluster(num_devices: int) -> autopar.Cluster:
    """As in the tests: CPU devices by name, next to no speed, fast links."""
    v100 = presets.V100
    device = dataclasses.replace(
        v100,
        name="CPU",
        peak_flops=tuple((dtype, rate * SLOWNESS) for dtype, rate in v100.peak_flops),
        peak_memory_bytes_per_s=v100.peak_memory_bytes_per_s * SLOWNESS,
    )
    return autopar.Cluster.flat(num_devices, device=device, links=(presets.NVLINK2,))


class Bench:
    """One program, what plain `jax.jit` makes of it, and its runs.

    Args:
        rules: Shared by all programs of a process.
        other_form: Another form of the program, which computes the same. Its reference is compared with first, as a
            reference takes more time than a run.
    """

    def __init__(
        self,
        program: Program,
        rules: dict[Any, RuleBook],
        folder: Path | None = None,
        other_form: Bench | None = None,
    ) -> None:
        self.program, self.rules, self.other_form = program, rules, other_form
        self.module = load(program, folder or Path(tempfile.gettempdir()) / "random_programs")
        self._references: dict[bool, Any] = {}
        self._peaks: dict[int, int] = {}

    def run(self, mode: Mode) -> Outcome:
        with jax.enable_x64(mode.x64):
            outcome = self._outcome(mode)
            if outcome.failed:
                try:
                    self._reference(mode.x64)
                except Exception as error:
                    return Outcome(kind="invalid", reason=_line(error))
            return outcome

    def _outcome(self, mode: Mode) -> Outcome:
        try:
            got = self._parallel(mode)
            if self.other_form and not self.other_form.difference(mode, got):
                return Outcome(kind="equal")
            worst = self.difference(mode, got, self._exact)
        except errors.AutoparError as error:
            return Outcome(kind="refused" if _is_clear(error) else "refused without a line", reason=_line(error))
        except Exception as error:
            return Outcome(kind="crash", reason=f"{_line(error)} ({_where(error)})")
        return Outcome(kind="wrong", reason=worst) if worst else Outcome(kind="equal")

    def difference(self, mode: Mode, got: list[Any], exact: Callable[[], list[Any]] | None = None) -> str:
        """What differs from plain `jax.jit`."""
        expected, noise = self._reference(mode.x64)
        return difference(expected, got, noise, exact)

    def _reference(self, x64: bool) -> tuple[list[Any], list[list[float]]]:
        """Results of each step, and for each leaf how far rounding in the arguments moves it."""
        if x64 not in self._references:
            step = jax.jit(self.module.step)
            runs = [self._results(step, *self.arguments(x64, seed)) for seed in (None, 1, 2, 3)]
            self._references[x64] = runs[0], noise_of(runs[0], runs[1:])
        return self._references[x64]

    def _exact(self) -> list[Any]:
        """What plain `jax.jit` makes of the program in float64."""
        with jax.enable_x64(True):
            state, batch = jax.tree.map(lambda x: _wide(np.asarray(x)), self.module.arguments())
            return self._results(jax.jit(self.module.step), state, batch)

    def arguments(self, x64: bool, perturbed: int | None = None) -> tuple[Any, Any]:
        """State and batch; of seed `perturbed` each float is moved by some units in its last place."""
        state, batch = self.module.arguments()
        if x64 and self.program.seed % 2:
            state, batch = jax.tree.map(lambda x: _wide(np.asarray(x)), (state, batch))
        if perturbed is not None:
            state, batch = perturbed_arguments(self.module.step, (state, batch), perturbed)
        return state, batch

    @staticmethod
    def _results(step: Callable[..., Any], state: Any, batch: Any) -> list[Any]:
        return results_of(step, state, [batch] * STEPS)

    def _step(self, mode: Mode, **options: Any) -> autopar.Step:
        plan = eval(mode.plan, {"recipes": recipes, "autopar": autopar, "P": PartitionSpec}) if mode.plan else None
        if mode.num_microbatches:
            options["num_microbatches"] = mode.num_microbatches
        step = autopar.parallelize(
            self.module.step,
            plan=plan,
            cluster=slow_cluster(mode.devices),
            cache_dir=None,
            search=autopar.Search(time_limit_s=TIME_LIMIT_S, **options),
        )
        step._sources._rules = self.rules
        return step

    def _in_micro_batches(self, count: int) -> Callable[..., Any]:
        """The step by its graph over micro-batches, which is run as it stands."""
        args = self.arguments(False)
        traced = trace(self.module.step, args, names=("state", "batch"), donate=(0,), batch=(1,))
        graph = micro_batched(traced, count, self.rules.setdefault(RULES, RuleBook()))
        run = jax.jit(lambda leaves: run_graph(graph, leaves))
        return lambda *args: jax.tree.unflatten(traced.out_tree, run(jax.tree.leaves(args)))

    def _parallel(self, mode: Mode) -> list[Any]:
        if mode.name == RULES:
            return self._results(self._in_micro_batches(mode.num_microbatches), *self.arguments(False))
        options = {}
        if mode.memory:
            options["memory_limit_bytes"] = int(mode.memory * self._peak(mode.devices))
        return self._results(self._step(mode, **options), *self.arguments(mode.x64))

    def _peak(self, devices: int) -> int:
        if devices not in self._peaks:
            plan = self._step(Mode(name="free search", devices=devices)).plan(*self.arguments(False))
            self._peaks[devices] = max(plan.predicted.peak_bytes)
        return self._peaks[devices]


@functools.cache
def _rules() -> dict[Any, RuleBook]:
    """Those of all programs of a process."""
    return {}


@functools.lru_cache(maxsize=2)
def _bench(program: Program) -> Bench:
    """A program, beside the first of its forms that compute the same."""
    first = dataclasses.replace(program, form="scanned") if program.form in SAME_RESULTS else program
    return Bench(program, _rules(), other_form=None if first == program else _bench(first))


def work(job: tuple[Program, Mode]) -> dict[str, str]:
    """What becomes of a program under a mode, in a process of its own."""
    program, mode = job
    outcome = _bench(program).run(mode)
    return {"kind": outcome.kind, "reason": outcome.reason}


def _wide(x: np.ndarray) -> np.ndarray:
    return x.astype({"float32": np.float64, "complex64": np.complex128}.get(str(x.dtype), x.dtype))


_LINE = re.compile(r"program_\w+\.py:\d+")
# What the options themselves are wrong about: sizes, memory, an argument's name. No operation stands behind these.
_OF_OPTIONS = (errors.MemoryLimitError, errors.BatchMismatchError, errors.InvalidArgumentError)


def _is_clear(error: errors.AutoparError) -> bool:
    of_the_step = "step with attention" in error.expected  # which the step has none of
    return bool(_LINE.search(str(error))) or isinstance(error, _OF_OPTIONS) or of_the_step


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:600]


def _where(error: BaseException) -> str:
    """The last line of ours on the way to an error."""
    trace, last = error.__traceback__, "?"
    while trace is not None:
        path = Path(trace.tb_frame.f_code.co_filename)
        if path.parent.name in ("autopar", "solver", "runtime") or path.parent.parent.name == "autopar":
            last = f"{path.name}:{trace.tb_lineno}"
        trace = trace.tb_next
    return last
