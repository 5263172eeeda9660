"""Plans of JAX training steps: how a step is split over many devices, how long it takes, what it needs.

    autopar plan FILE:FUNCTION --cluster dgx-h100x16 --save plan.json --report plan.html
    autopar bench FILE:FUNCTION --cluster dgx-h100x8 --report bench.html
    autopar lint FILE:FUNCTION --cluster dgx-h100
    autopar explain plan.json WHAT
    autopar why-not FILE:FUNCTION "tensor_parallel(size=8)" --cluster dgx-h100x16
    autopar diff plan.json other.json
    autopar report plan.json plan.html
    autopar compare plan.json other.json page.html
    autopar fit FILE:FUNCTION --cluster dgx-h100 --cluster tpu-v5e:2x4
    autopar verify FILE:FUNCTION --cluster tpu-v5e:2x4
    autopar tune FILE:FUNCTION --save plan.json
    autopar measure --save cluster.json
    autopar measure FILE:FUNCTION
    autopar doctor
    autopar checkpoint show FOLDER
    autopar checkpoint export FOLDER params.safetensors
    autopar cache list
    autopar cache clear --kind plans

FUNCTION returns a step and its arguments, `(train_step, state, batch)`; its own are given as `layers=48` right behind
it, or as `--arg layers=48`. For absent hardware it is traced, not run, so its state may exceed the memory of this
machine. `maxtext:base.yml model_name=llama2-7b` is the train step of a MaxText configuration. Every command takes
--json.
The exit status is 0 on success, 1 after an error of autopar (its message is printed), 2 for wrong arguments, 130 after
Ctrl-C or SIGTERM.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

import autopar
from autopar import commands
from autopar.common.text import TextFormat
from autopar.errors import AutoparError
from autopar.kept_files import Kind

LATER_S = 0.1  # until a signal that came at a bad moment is taken


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status: 0, or 1 after an error that autopar has words for."""
    parsed = _parser().parse_args(arguments)
    try:
        with _interrupted_by_signals():
            output = parsed.command(parsed)
    except AutoparError as error:
        print(f"autopar: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("autopar: interrupted", file=sys.stderr)
        return 130
    try:
        text_format = TextFormat.of_stream(sys.stdout, os.environ)
        print(json.dumps(output.values, indent=2) if parsed.json else output.text(text_format), flush=True)
    except BrokenPipeError:  # whoever reads it (head, less) has read enough
        # What is left in the buffer would be written, and fail again, when Python ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


@contextlib.contextmanager
def _interrupted_by_signals() -> Iterator[None]:
    """SIGTERM does what Ctrl-C does, so that what a command has made by then is kept."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers
        return
    earlier = {number: signal.signal(number, _interrupt) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)}
    try:
        yield
    finally:
        for number, handler in earlier.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raises: KeyboardInterrupt, a little later where the collection of garbage calls jax, which would swallow it."""
    callbacks = [getattr(callback, "__code__", None) for callback in gc.callbacks]
    while frame is not None:
        if frame.f_code in callbacks:
            signal.setitimer(signal.ITIMER_REAL, LATER_S)
            return
        frame = frame.f_back
    raise KeyboardInterrupt


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="autopar", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"autopar {autopar.__version__}")
    verbs = parser.add_subparsers(required=True, metavar="COMMAND")
    add = _adding_to(verbs)
    _add_planning(add)
    _add_reading(add)
    _add_running(add)
    text = "show a folder of checkpoints, or export parameters from it"
    example = "example: autopar checkpoint show runs/a"
    checkpoint = verbs.add_parser("checkpoint", help=text, description=text, epilog=example)
    _add_checkpoints(_adding_to(checkpoint.add_subparsers(required=True, metavar="COMMAND")))
    _add_cache(verbs)
    return parser


Add = Callable[[str, Callable[[argparse.Namespace], commands.Output], str, str], argparse.ArgumentParser]


def _adding_to(verbs: Any) -> Add:
    """Adds verbs to the parser that `verbs` are of."""

    def add(
        name: str, command: Callable[[argparse.Namespace], commands.Output], text: str, example: str
    ) -> argparse.ArgumentParser:
        verb: argparse.ArgumentParser = verbs.add_parser(
            name, help=text, description=text, epilog=f"example: autopar {example}"
        )
        verb.add_argument("--json", action="store_true", help="print the result as JSON")
        verb.set_defaults(command=command)
        return verb

    return add


def _cluster(verb: argparse.ArgumentParser, text: str, **options: Any) -> None:
    verb.add_argument("--cluster", **({"default": "local", "help": f"{text} (%(default)s)"} | options))


def _function(verb: argparse.ArgumentParser, text: str, *, has_others: bool = False, **options: Any) -> None:
    """`has_others`: other arguments stand behind it, so that those of FUNCTION are options."""
    verb.add_argument("function", metavar="FILE:FUNCTION", help=text, **options)
    told = "an argument of FUNCTION: a literal, or @FILE:NAME for an object of a file or module"
    behind = f"right behind FILE:FUNCTION, {told}; of maxtext:base.yml what is set in the configuration"
    if not has_others:
        verb.add_argument("arg", action="extend", nargs="*", default=[], metavar="NAME=VALUE", help=behind)
    verb.add_argument("--arg", action="append", default=[], metavar="NAME=VALUE", help=f"{told}; may be repeated")


def _memory_limit(verb: argparse.ArgumentParser) -> None:
    text = "memory of one device that the step may use: 80GB, 16GiB or 1000000"
    verb.add_argument("--memory-limit-bytes", metavar="SIZE", help=text)


def _effort(verb: argparse.ArgumentParser) -> None:
    text = "how far to search for a faster plan: quick, default or thorough"
    verb.add_argument("--effort", choices=("quick", "default", "thorough"), help=text)


def _recipe(verb: argparse.ArgumentParser) -> None:
    text = "the manual plan to follow in place of a free search: 'zero(3)', 'combine(pp=2, tp=4)'"
    verb.add_argument("--recipe", metavar="RECIPE", help=text)


def _add_planning(add: Add) -> None:
    """The verbs that plan a step."""
    plan = add(
        "plan", commands.plan, "plan a step for a cluster, here or not, and print the plan",
        "plan train.py:job --cluster dgx-h100x2 --save plan.json --report plan.html",
    )  # fmt: skip
    _function(plan, "a function that returns (step, *arguments), in a file or in a module: package.module:FUNCTION")
    _cluster(plan, "local, dgx-h100x16, tpu-v5e:2x4, a .json file, or dgx-h100x16@FILE.json with its devices")
    _memory_limit(plan)
    _effort(plan)
    _recipe(plan)
    plan.add_argument("--save", metavar="PATH", help="write the plan as JSON")
    plan.add_argument("--report", metavar="PATH", help="write the plan as a page for a browser")
    plan.add_argument("--table", action="store_true", help="print every row of the plan")

    why_not = add(
        "why-not", commands.why_not, "what a recipe would give instead of the plan, and where it loses",
        'why-not train.py:job "tensor_parallel(size=8)" --cluster dgx-h100x2',
    )  # fmt: skip
    _function(why_not, "as for plan", has_others=True)
    why_not.add_argument("recipe", metavar="RECIPE", help="a call of autopar.recipes: 'zero(1)', 'combine(pp=2, tp=4)'")
    _cluster(why_not, "as for plan")
    _memory_limit(why_not)
    _effort(why_not)

    bench = add(
        "bench", commands.bench, "the plan of the search beside manual ways to run the same step",
        "bench train.py:job --cluster dgx-h100x8 --recipes fsdp tp 'combine(pp=2, tp=4)' plan.json --report bench.html",
    )  # fmt: skip
    _function(bench, "as for plan; run for real with --measure")
    text = "as for plan; several are compared one by one (local)"
    _cluster(bench, text, action="append", default=None, help=text)
    _memory_limit(bench)
    _effort(bench)
    text = "ways (fsdp, tp, pipeline), which get their best settings, recipes as for why-not, saved plans (all ways)"
    bench.add_argument("--recipes", nargs="+", metavar="RECIPE", help=text)
    bench.add_argument("--measure", action="store_true", help="run those that fit in turns on the devices here")
    bench.add_argument("--report", metavar="PATH", help="write the comparison as a page for a browser")

    _add_lint(add)
    fit = add(
        "fit", commands.fit, "the largest batch that fits, and the time of an example",
        "fit train.py:job --cluster dgx-h100 --cluster tpu-v5e:2x4 --price dgx-h100=98.3",
    )  # fmt: skip
    _function(fit, "as for plan; its batch gets other sizes")
    text = "as for plan; several are compared (local)"
    _cluster(fit, text, action="append", default=None, help=text)
    _effort(fit)
    fit.add_argument("--multiple", type=int, metavar="N", help="batches are multiples of N (the number of devices)")
    text = "the argument of FUNCTION that is the number of examples, where the batch does not have them first"
    fit.add_argument("--batch-arg", metavar="NAME", help=text)
    text = "the tokens of each sequence of a sample, one a line: what padding costs, and buckets (with --batch-arg)"
    fit.add_argument("--lengths", metavar="PATH", help=text)
    text = "with --lengths, the argument of FUNCTION that is the length of the examples (length)"
    fit.add_argument("--length-arg", metavar="NAME", default="length", help=text)
    fit.add_argument("--buckets", type=int, metavar="N", default=4, help="with --lengths, the most buckets (4)")
    fit.add_argument("--report", metavar="PATH", help="write charts over batch sizes as a page for a browser")
    fit.add_argument("--price", action="append", metavar="CLUSTER=PRICE", help="of an hour on the whole cluster")


def _add_lint(add: Add) -> None:
    lint = add(
        "lint", commands.lint, "what a step's own shardings on jax.jit cost, line by line, and what would pay",
        "lint train.py:job --cluster dgx-h100",
    )  # fmt: skip
    _function(lint, "as for plan; the step is jax.jit(...), or its arguments have shardings")
    _cluster(lint, "as for plan, of as many devices as the mesh of the shardings")
    _effort(lint)
    text = "what to compare with: auto, the search's plan without these shardings, or none (%(default)s)"
    lint.add_argument("--against", choices=("auto", "none"), default="auto", help=text)


def _add_reading(add: Add) -> None:
    """The verbs that read saved plans, and look at this machine."""
    explain = add(
        "explain", commands.explain, "why a module or an argument of a saved plan is split as it is",
        "explain plan.json 'layer*/mlp'",
    )  # fmt: skip
    explain.add_argument("plan", metavar="PLAN.json")
    explain.add_argument(
        "what", metavar="WHAT", help="part of a module's or an argument's path, or a name as tables have it"
    )
    diff = add("diff", commands.diff, "what differs between two saved plans of a step", "diff plan.json other.json")
    report = add("report", commands.report, "a saved plan as a page for a browser", "report plan.json plan.html")
    report.add_argument("plan", metavar="PLAN.json")
    compare = add(
        "compare", commands.compare, "two saved plans side by side, as a page", "compare plan.json other.json page.html"
    )
    for verb in (diff, compare):
        verb.add_argument("one", metavar="PLAN.json")
        verb.add_argument("other", metavar="OTHER.json")
    for verb in (report, compare):
        verb.add_argument("page", metavar="PAGE.html")
    add(
        "doctor", commands.doctor, "what is installed, measured and kept here, and what would go wrong", "doctor --json"
    )


def _add_running(add: Add) -> None:
    """The verbs that compile or run."""
    verify = add(
        "verify", commands.verify, "compare a step's plan with the program that XLA compiles for it",
        "verify train.py:job --cluster tpu-v5e:2x4",
    )  # fmt: skip
    _function(verify, "as for plan; run where the cluster is local")
    _cluster(verify, "local, or tpu-v5e:2x4 or dgx-h100x2 to compile for it")
    _recipe(verify)

    tune = add(
        "tune", commands.tune, "time the plans predicted to be the fastest on the devices here",
        "tune train.py:job --save plan.json",
    )  # fmt: skip
    _function(tune, "as for plan; run for real")
    _cluster(tune, "what to plan for: local, local:4, or a .json file for these")
    text = "timed beside the search's plan, in place of data parallelism and ZeRO; may be repeated"
    tune.add_argument("--recipe", action="append", metavar="RECIPE", help=text)
    tune.add_argument("--save", metavar="PATH", help="write the fastest plan as JSON")

    measure = add(
        "measure", commands.measure,
        "time the devices of this machine, and a step on one of them, so that predictions use measured times",
        "measure train.py:job --save cluster.json",
    )  # fmt: skip
    _function(
        measure, "as for plan; run for real on the first device, whose times of its operations are kept", nargs="?"
    )
    measure.add_argument("--devices", type=int, metavar="N", help="the first N devices only")
    measure.add_argument("--save", metavar="PATH", help="write the cluster, for --cluster PATH, not to the cache")


def _add_checkpoints(add: Add) -> None:
    """The verbs of `autopar checkpoint`."""
    show = add(
        "show", commands.show_checkpoint, "the checkpoints of a folder; of one its leaves, plan and data position",
        "checkpoint show runs/a --json",
    )  # fmt: skip
    export = add(
        "export", commands.export_checkpoint, "write parameters as a safetensors file",
        "checkpoint export runs/a params.safetensors --select params",
    )  # fmt: skip
    for verb in (show, export):
        verb.add_argument("folder", metavar="FOLDER", help="the folder of autopar.checkpoint.Checkpointer")
        verb.add_argument("--step", type=int, metavar="N", help="the checkpoint of this step (the latest)")
    export.add_argument("file", metavar="FILE.safetensors")
    export.add_argument("--select", metavar="PATH", help="the part of the state, as show prints it (params)")


def _add_cache(verbs: Any) -> None:
    """The verbs of the cache, one level below."""
    text = "what autopar keeps on this machine: plans, sharding rules, measurements"
    cache = verbs.add_parser("cache", help=text, description=text, epilog="example: autopar cache list")
    add = _adding_to(cache.add_subparsers(required=True, metavar="ACTION"))
    add("list", commands.cache_list, "list what is kept, with sizes and dates", "cache list --json")
    clear = add(
        "clear", commands.cache_clear, "remove what is kept; it is made anew when wanted", "cache clear --kind plans"
    )
    kinds = [str(kind) for kind in Kind]
    clear.add_argument("--kind", action="append", choices=kinds, help="only this kind; may be repeated (all kinds)")


if __name__ == "__main__":
    sys.exit(main())
