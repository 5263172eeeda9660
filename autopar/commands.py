"""What the verbs of the command line do: each takes parsed arguments and returns its result, as text and as values."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import importlib.util
import logging
import os
import platform
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import msgspec

import autopar
from autopar.api import as_step, planned_with, with_search
from autopar.benching import named_ways
from autopar.common.files import default_directory
from autopar.common.text import PLAIN, TextFormat, text_of_bytes, text_of_rate
from autopar.errors import AutoparError, InvalidArgumentError
from autopar.execute import aot
from autopar.execute.search import Search
from autopar.frontend.tracing import name_of
from autopar.hardware import calibrate
from autopar.hardware.cluster import Cluster
from autopar.hardware.measurement import Measurement
from autopar.kept_files import BEGINNINGS, Kind, clear, kept_in
from autopar.measuring import check_arguments, check_cluster
from autopar.plan import render, render_summary
from autopar.plan.comparison import Comparison
from autopar.plan.options import Effort
from autopar.plan.plan import Plan
from autopar.recipes.parse import recipe_of
from autopar.step_files import devices_for_meshes, returned_by, shapes_only
from autopar.step_views import batch_argnums_of, on_cluster
from autopar.train.checkpoint.description import describe, export
from autopar.train.checkpoint.targets import array_files

# What is installed, which devices, caches and measurements there are, and what would go wrong: `autopar doctor`.


OURS = ("autopar", "jax", "jaxlib", "flax")
# What runs a step on accelerators. jax has an extra for each, and autopar has none, as a machine has one kind.
BACKENDS = ("libtpu", "jax_cuda13_plugin")

# The name that a requirement begins with: `jax` of `jax[tpu]>=0.10`.
_NAME = re.compile(r"[\w.-]+")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One fact. `advice`: what would go wrong, and what to do; empty where nothing would."""

    what: str
    state: str
    advice: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Diagnosis:
    """All findings."""

    findings: tuple[Finding, ...]

    def to_dict(self) -> dict[str, Any]:
        """The findings as plain values, as `json.dumps` takes them."""
        return {"findings": [msgspec.to_builtins(finding) for finding in self.findings]}

    def text(self, text_format: TextFormat = PLAIN) -> str:
        """A line for each finding, and one for each advice."""
        width = max(len(finding.what) for finding in self.findings)
        lines = []
        for finding in self.findings:
            lines.append(f"{finding.what:{width}}  {finding.state}")
            if finding.advice:
                lines.append(f"{'':{width}}  ! {finding.advice}")
        return text_format.broken(lines, hanging=width + 4)

    __str__ = text


def diagnose() -> Diagnosis:
    """Looks at this machine and this installation."""
    return Diagnosis((*_installed(), *_devices(), *_cache(default_directory())))


def _installed() -> list[Finding]:
    found = [Finding(what="python", state=platform.python_version())]
    for name in OURS:  # autopar itself may run from its checkout
        found.append(Finding(what=name, state=_version(name) or "not installed as a package"))
    for name in BACKENDS:
        there = importlib.util.find_spec(name) is not None
        found.append(Finding(what=name, state="installed" if there else "not installed (optional)"))
    return [*found, *_extras()]


def _extras() -> list[Finding]:
    """The extras of autopar's own metadata, and what each lacks here."""
    try:
        here = metadata.metadata("autopar").get_all("Provides-Extra") or []
        required = metadata.requires("autopar") or []
    except metadata.PackageNotFoundError:
        return [Finding(what="extras", state="not known: autopar is not installed as a package")]
    return [_extra(name, required) for name in sorted(here)]


def _extra(extra: str, required: Sequence[str]) -> Finding:
    mark = re.compile(rf"""extra == ["']{re.escape(extra)}["']""")
    names = sorted({_NAME.findall(text)[0] for text in required if mark.search(text)})
    missing = [name for name in names if _version(name) is None]
    what = f"extra {extra}"
    if not missing:
        return Finding(what=what, state="installed")
    count = "nothing of it" if len(missing) == len(names) else f"without {', '.join(missing)}"
    return Finding(what=what, state=f"not installed (optional): {count}")


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _devices() -> list[Finding]:
    try:
        cluster = Cluster.local()
    except (AutoparError, RuntimeError) as error:
        return [Finding(what="devices", state="none that autopar knows", advice=str(error))]
    devices, device = jax.devices(), cluster.device
    rate = text_of_rate(cluster.inside_host.bytes_per_s, "B")
    table = "" if cluster.fits else "from a table: "
    found = [
        Finding(what="devices", state=f"{len(devices)} x {devices[0].device_kind}"),
        Finding(what="processes", state=str(jax.process_count())),
        Finding(what="memory of a device", state=text_of_bytes(device.memory_bytes)),
        Finding(what="link inside a host", state=f"{rate} ({table}{cluster.inside_host.source})"),
    ]
    if cluster.num_hosts > 1:
        rate = text_of_rate(cluster.between_hosts.bytes_per_s, "B")
        found.append(Finding(what="link between hosts", state=f"{rate} ({table}{cluster.between_hosts.source})"))
    advice = ""
    if not cluster.fits:
        advice = "predictions use tables of constants, not these devices: autopar measure (a minute) times them"
    quality = "; ".join(
        f"{fit.what}: {fit.points} timings, median error {fit.median_error:.0%}" for fit in cluster.fits
    )
    found.append(Finding(what="measured", state=quality or "nothing", advice=advice))
    if len(devices) == 1:
        advice = "a step runs whole on one device; to try parallel plans on a CPU, set JAX_NUM_CPU_DEVICES=8"
        found.append(Finding(what="parallel", state="no", advice=advice))
    return found


def _cache(directory: Path | None) -> list[Finding]:
    if directory is None:
        return [Finding(what="cache", state="none", advice="plans are made anew in every run: set AUTOPAR_CACHE_DIR")]
    if not directory.is_dir():
        return [Finding(what="cache", state=f"{directory}, not there yet: the first plan makes it")]
    kept = kept_in(directory)
    plans, measured = len(kept.of_kind(Kind.PLANS)), len(kept.of_kind(Kind.MEASUREMENTS))
    total = text_of_bytes(sum(file.size_bytes for file in kept.files))
    state = f"{directory}: {plans} plans, {measured} measurements, {total}"
    advice = "" if os.access(directory, os.W_OK) else "it cannot be written: plans are made anew in every run"
    dated = [
        Finding(
            what="measurement", state=f"{Path(file.path).stem.removeprefix(BEGINNINGS[file.kind])}, of {file.written}"
        )
        for file in kept.of_kind(Kind.MEASUREMENTS)
    ]
    return [Finding(what="cache", state=state, advice=advice), *dated]


@dataclasses.dataclass(frozen=True, slots=True)
class Output:
    """The result of a verb: the text that is printed, in the format of where it goes, and what --json prints."""

    text: Callable[[TextFormat], str]
    values: Any


def plan(parsed: argparse.Namespace) -> Output:
    """Plans a step."""
    _check_folder("--save", parsed.save)
    _check_folder("--report", parsed.report)
    cluster = Cluster.parse(parsed.cluster)
    step, arguments = shapes_only(parsed.function, parsed.arg, cluster.num_devices)
    planned = _planned_for(step, cluster, _search_of(parsed), parsed.recipe)
    with _told_on_stderr(on_terminal=True):
        made = planned.plan(*arguments)
    if parsed.save:
        made.save(parsed.save)
    if parsed.report:
        made.report(parsed.report)
    shown = functools.partial(render.table if parsed.table else render_summary.screen, made.record)
    return Output(_with_written(shown, parsed.save, parsed.report), made.to_dict())


def explain(parsed: argparse.Namespace) -> Output:
    """Explains a module or an argument of a saved plan."""
    found = load(parsed.plan).explanation(parsed.what)
    return Output(found.text, found.to_dict())


def why_not(parsed: argparse.Namespace) -> Output:
    """Compares the plan of a step with that of a recipe."""
    recipe = recipe_of(parsed.recipe)
    cluster = Cluster.parse(parsed.cluster)
    step, arguments = shapes_only(parsed.function, parsed.arg, cluster.num_devices)
    request = recipe.request
    if request.binding is not None and request.admits_one_program:
        request.binding.on(cluster.num_devices)  # sizes that are wrong are said before the step is planned
    planned = _planned_for(step, cluster, _search_of(parsed)).plan(*arguments)
    found = planned.why_not(recipe)
    return Output(found.text, found.to_dict())


def diff(parsed: argparse.Namespace) -> Output:
    """The differences of two saved plans."""
    found = Comparison(plan=load(parsed.one).record, other=load(parsed.other).record)
    rows = [{"what": what, "plan": a, "other": b} for what, a, b in found.differences()]
    return Output(found.difference_text, {"differences": rows})


def report(parsed: argparse.Namespace) -> Output:
    """Writes the page of a saved plan."""
    _check_folder("PAGE.html", parsed.page)
    load(parsed.plan).report(parsed.page)
    return Output(_sentence(f"Written to {parsed.page}: open it in a browser"), {"page": parsed.page})


def compare(parsed: argparse.Namespace) -> Output:
    """Writes the page of two saved plans."""
    _check_folder("PAGE.html", parsed.page)
    load(parsed.one).compare(load(parsed.other), parsed.page)
    return Output(_sentence(f"Written to {parsed.page}: open it in a browser"), {"page": parsed.page})


def fit(parsed: argparse.Namespace) -> Output:
    """Finds the largest batch that fits on each cluster."""
    _check_folder("--report", parsed.report)
    lengths = None if parsed.lengths is None else _lengths_in(parsed.lengths)
    if lengths is not None and parsed.batch_arg is None:
        raise InvalidArgumentError(
            where="autopar fit --lengths",
            expected="--batch-arg too: the argument of FUNCTION that is the number of examples",
            got="none",
            hint="add --batch-arg NAME, and --length-arg NAME where their length is not called length",
        )
    clusters = parsed.cluster or ["local"]
    num_devices = Cluster.parse(clusters[0]).num_devices
    made = _of_batch_sizes(parsed) if parsed.batch_arg else shapes_only(parsed.function, parsed.arg, num_devices)
    step, arguments = made
    prices = dict(_price(text) for text in parsed.price or ())
    step = with_search(as_step(step), Search(effort=parsed.effort))
    with _told_on_stderr():
        found = autopar.fit(
            step,
            *arguments,
            clusters=clusters,
            multiple=parsed.multiple,
            prices=prices,
            lengths=lengths,
            buckets=parsed.buckets,
        )
    if parsed.report:
        found.report(parsed.report)
    return Output(found.text, found.to_dict())


def bench(parsed: argparse.Namespace) -> Output:
    """Compares the plan of the search with manual ways to run a step."""
    _check_folder("--report", parsed.report)
    clusters = parsed.cluster or ["local"]
    # What is named wrongly is said before the step and its arguments are made.
    num_devices, *_ = [Cluster.parse(cluster).num_devices for cluster in clusters]
    recipes = None if parsed.recipes is None else named_ways(parsed.recipes)
    step, arguments = (returned_by if parsed.measure else shapes_only)(parsed.function, parsed.arg, num_devices)
    step = with_search(as_step(step), _search_of(parsed))
    with _told_on_stderr(on_terminal=True):
        found = autopar.bench(
            step, *arguments, clusters=clusters, recipes=recipes, measure=parsed.measure, report=parsed.report
        )
    return Output(_with_written(found.text, parsed.report), found.to_dict())


def lint(parsed: argparse.Namespace) -> Output:
    """What a step's own shardings cost, and what would pay."""
    cluster = Cluster.parse(parsed.cluster)
    devices_for_meshes(cluster.num_devices)
    step, arguments = shapes_only(parsed.function, parsed.arg, cluster.num_devices, sharded=True)
    found = autopar.lint(
        step, *arguments, cluster=cluster, search=parsed.against == "auto", effort=parsed.effort or Effort.QUICK
    )
    return Output(found.text, found.to_dict())


@contextlib.contextmanager
def _told_on_stderr(*, on_terminal: bool = False) -> Iterator[None]:
    """Writes what the logger "autopar" says to stderr, so that a long command is seen to go on. On a terminal the
    progress line shows that, so that it is written there only where it tells more.
    """
    logger, handler = logging.getLogger("autopar"), logging.StreamHandler(sys.stderr)
    level, propagates = logger.level, logger.propagate
    if sys.stderr.isatty() and not on_terminal:
        yield
        return
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagates


def _of_batch_sizes(parsed: argparse.Namespace) -> tuple[Callable[..., Any], list[Any]]:
    """The step and its arguments, of which those with examples are functions of their number, and of their length where
    lengths are given.
    """

    def of(examples: int, *length: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        lengths = [f"{parsed.length_arg}={each}" for each in length]
        return shapes_only(parsed.function, [*parsed.arg, f"{parsed.batch_arg}={examples}", *lengths])

    def batch(number: int) -> Callable[..., Any]:
        return lambda *sizes: of(*sizes)[1][number]

    step, arguments = of(parsed.multiple or 1, *([1] if parsed.lengths else []))
    argnums = batch_argnums_of(as_step(step), arguments)
    return step, [batch(i) if i in argnums else arg for i, arg in enumerate(arguments)]


def _lengths_in(path: str) -> list[int]:
    """The lengths in a file, one a line. Raises: InvalidArgumentError for a file that has something else."""
    try:
        return [int(line) for line in Path(path).read_text(encoding="utf-8").split()]
    except (OSError, ValueError) as error:
        raise InvalidArgumentError(
            where="--lengths",
            expected="a text file with the tokens of each sequence of a sample, one number a line",
            got=f"{path}: {error}",
            hint="write one number a line",
        ) from None


def doctor(parsed: argparse.Namespace) -> Output:
    """Looks at this machine."""
    found = diagnose()
    return Output(found.text, found.to_dict())


def cache_list(parsed: argparse.Namespace) -> Output:
    """What the cache holds."""
    kept = kept_in(default_directory())
    return Output(kept.text, kept.to_dict())


def cache_clear(parsed: argparse.Namespace) -> Output:
    """Empties the cache."""
    removed = clear(default_directory(), [Kind(kind) for kind in parsed.kind or Kind])
    return Output(removed.text, removed.to_dict())


def verify(parsed: argparse.Namespace) -> Output:
    """Holds a plan against its compiled program."""
    cluster = Cluster.parse(parsed.cluster)
    is_local = parsed.cluster.startswith("local")
    compile_for = None if is_local else aot.spec_of(cluster)
    if not is_local and compile_for is None:
        raise InvalidArgumentError(
            where="--cluster",
            expected="local, or hardware that there is a compiler for, such as tpu-v5e:2x4 or dgx-h100",
            got=parsed.cluster,
            hint="verify where the hardware is, with --cluster local",
        )
    made = returned_by if is_local else shapes_only
    step, arguments = made(parsed.function, parsed.arg, cluster.num_devices)
    found = autopar.verify(_planned_for(step, cluster, recipe=parsed.recipe), *arguments, compile_for=compile_for)
    rows = [msgspec.to_builtins(row) for row in found.plan.record.measured]
    numbers = {"difference": found.difference, "differs": found.differs}
    return Output(found.text, {"target": found.target, **numbers, "measured": rows})


def tune(parsed: argparse.Namespace) -> Output:
    """Times plans on the devices here."""
    if not parsed.cluster.startswith("local") and not parsed.cluster.endswith(".json"):
        raise InvalidArgumentError(
            where="--cluster",
            expected="the devices here: local, local:4, or a .json file that was measured on them",
            got=parsed.cluster,
            hint="tune where the hardware is, or predict: autopar plan",
        )
    _check_folder("--save", parsed.save)
    cluster = Cluster.parse(parsed.cluster)
    step, arguments = returned_by(parsed.function, parsed.arg, cluster.num_devices)
    tuned = autopar.tune(_planned_for(step, cluster), *arguments, beside=parsed.recipe)
    if parsed.save:
        tuned.plan.save(parsed.save)
    fields = ("name", "predicted_s", "measured_s", "quartiles_s", "why")
    rows = [{field: getattr(row, field) for field in fields} for row in tuned.rows]
    return Output(tuned.text, {"target": tuned.target, "rows": rows})


def measure(parsed: argparse.Namespace) -> Output:
    """Measures, and says what came out and where it lies."""
    _check_folder("--save", parsed.save)
    if parsed.function is None:
        if parsed.arg:
            raise InvalidArgumentError(
                where="--arg", expected="FILE:FUNCTION, whose argument it is", got="none", hint="name the function too"
            )
        measurement, of_step = calibrate.measure(parsed.devices), None
    else:
        measurement, of_step = _measure_step(parsed)
    path: Path | None
    if parsed.save:
        Cluster.of_measurement(measurement, parsed.devices).save(parsed.save)
        path, told = Path(parsed.save), f"Saved to {parsed.save}: plan for it with --cluster {parsed.save}"
    else:
        path = measurement.save()
        told = f"Saved to {path}: Cluster.local() counts with it from now on"
        if path is None:
            directory = default_directory() or "the user's cache"
            told = f"Not saved: {directory} cannot be written (choose a file with --save)"
    fits = [msgspec.to_builtins(fit) for fit in measurement.fits]
    values: dict[str, Any] = {"saved": None if path is None else str(path), "fits": fits}
    values |= {} if of_step is None else {"step": of_step.to_dict()}

    def text(text_format: TextFormat) -> str:
        tables = [measured.text(text_format) for measured in (measurement, of_step) if measured is not None]
        return "\n\n".join([*tables, text_format.broken([told])])

    return Output(text, values)


def _measure_step(parsed: argparse.Namespace) -> tuple[Measurement, autopar.StepMeasurement]:
    """Measures the devices, and on the first of them a step; the device of the measurement has its times."""
    tables = Cluster.local(parsed.devices, measured=False)
    check_cluster(tables)
    step, shapes = shapes_only(parsed.function, parsed.arg, tables.num_devices)
    check_arguments(name_of(step), shapes, tables)
    measurement = calibrate.measure(parsed.devices)
    step, arguments = returned_by(parsed.function, parsed.arg, tables.num_devices)
    found = autopar.measure(_planned_for(step, Cluster.of_measurement(measurement, parsed.devices)), *arguments)
    cluster = found.cluster
    return dataclasses.replace(measurement, device=cluster.device, fits=cluster.fits), found


def show_checkpoint(parsed: argparse.Namespace) -> Output:
    """Describes a checkpoint."""
    found = describe(parsed.folder, parsed.step)
    return Output(found.text, found.to_dict())


def export_checkpoint(parsed: argparse.Namespace) -> Output:
    """Writes the parameters of a checkpoint as safetensors."""
    _check_folder("FILE.safetensors", parsed.file)
    names = export(parsed.folder, parsed.file, array_files("autopar checkpoint export"), parsed.step, parsed.select)
    return Output(_sentence(f"Written to {parsed.file}: {len(names)} arrays"), {"file": parsed.file, "names": names})


def _with_written(text: Callable[[TextFormat], str], *files: str | None) -> Callable[[TextFormat], str]:
    """A text, and below it the files that were written."""
    written = [f"Written to {file}" for file in files if file]
    if not written:
        return text
    return lambda text_format: "\n".join([text(text_format).rstrip("\n"), text_format.broken(written)])


def _sentence(text: str) -> Callable[[TextFormat], str]:
    return lambda text_format: text_format.broken([text])


def load(path: str) -> Plan:
    """A saved plan. Raises: InvalidArgumentError for a file that is not there, PlanFormatError."""
    if not Path(path).is_file():
        raise InvalidArgumentError(
            where=path, expected="a plan in a file", got="no such file", hint="make one with autopar plan ... --save"
        )
    return Plan.load(path)


def _search_of(parsed: argparse.Namespace) -> Search:
    return Search(effort=parsed.effort, memory_limit_bytes=parsed.memory_limit_bytes)


def _planned_for(
    step: Callable[..., Any],
    cluster: Cluster,
    search: Search | None = None,
    recipe: str | None = None,
) -> autopar.Step:
    """A step on a cluster: what `parallelize` made with its own options, a plain function with the defaults; under the
    recipe that is named in place of its own.
    """
    own = as_step(step)
    placed = on_cluster(own, cluster) if recipe is None else planned_with(own, cluster=cluster, plan=recipe)
    return placed if search is None else with_search(placed, search)


def _check_folder(where: str, path: str | None) -> None:
    """Raises: InvalidArgumentError, before anything is planned, for a file in a folder that is not there, and for one
    that cannot be written.
    """
    if not path:
        return
    if not Path(path).absolute().parent.is_dir():
        raise InvalidArgumentError(
            where=where, expected="a path in a folder that is there", got=path, hint="make the folder first"
        )
    if Path(path).is_dir():
        raise InvalidArgumentError(
            where=where, expected="the path of a file", got=f"{path}, a folder", hint="name a file in it"
        )
    there = Path(path) if Path(path).exists() else Path(path).absolute().parent
    if not os.access(there, os.W_OK):
        raise InvalidArgumentError(
            where=where, expected="a file that can be written", got=path, hint="name one elsewhere"
        )


def _price(text: str) -> tuple[str, float]:
    """`dgx-h100x2=98.3` as a cluster and its price of an hour."""
    name, _, price = text.rpartition("=")
    try:
        value = float(price)
    except ValueError:
        value = -1.0
    if not name or not value >= 0:
        raise InvalidArgumentError(
            where="--price", expected="CLUSTER=PRICE of an hour", got=text, hint="such as --price dgx-h100x2=98.3"
        )
    return name, value
