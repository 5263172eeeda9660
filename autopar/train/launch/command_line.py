"""The command line of the launcher."""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from autopar.train.launch.placement import host_and_port
from autopar.train.launch.restart_policy import Policy

GRACE_S = 30.0

DESCRIPTION = """Starts the processes of a program on this host, watches them, and starts them again.

    python -m autopar.launch --processes 4 train.py --epochs 3
    python -m autopar.launch --processes 4 --devices-per-process 2 train.py     CPU devices, or GPUs
    python -m autopar.launch --processes 4 --restarts 10 --elastic 2:4 train.py
    python -m autopar.launch --nodes 2 --node-rank 0 --coordinator 10.0.0.1:9000 --processes 8 train.py

train.py calls autopar.initialize() first. Lines of output carry the number of their process. The exit code is that of
the process that failed first; 128 and the signal's number where a signal killed it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What is started, how often, and where. `processes` are those of this host."""

    command: tuple[str, ...]
    processes: int
    devices_per_process: int | None
    policy: Policy
    size_file: Path | None
    grace_s: float
    stuck_after_s: float | None
    nodes: int
    node_rank: int
    coordinator: str | None


def parse(arguments: Sequence[str]) -> Options:
    """Ends the program with exit code 2 and a message where the arguments are wrong."""
    parser = _parser()
    found = parser.parse_args(arguments)
    elastic = found.elastic
    processes = found.processes if found.processes is not None else (elastic[1] if elastic and found.nodes == 1 else 1)
    if elastic is not None and found.nodes == 1 and not elastic[0] <= processes <= elastic[1]:
        parser.error(f"--processes {processes} is not within --elastic {elastic[0]}:{elastic[1]}")
    if found.size_file is not None and elastic is None:
        parser.error("--size-file needs --elastic MIN:MAX")
    if found.size_file is not None and found.nodes > 1:
        parser.error("--size-file is for one host: with --nodes the number follows the hosts that are there")
    if not 0 <= found.node_rank < found.nodes:
        parser.error(f"--node-rank must be from 0 to {found.nodes - 1}, got {found.node_rank}")
    if found.nodes > 1 and found.coordinator is None:
        parser.error(
            "--nodes needs --coordinator HOST:PORT, the same on all hosts: an address of the host of node rank 0"
        )
    if found.coordinator is not None:
        try:
            host_and_port(found.coordinator)
        except ValueError as error:
            parser.error(f"--coordinator: {error}")
    return Options(
        command=_command(found),
        processes=processes,
        devices_per_process=found.devices_per_process,
        policy=Policy(restarts=found.restarts, elastic=elastic),
        size_file=found.size_file,
        grace_s=found.grace_s,
        stuck_after_s=found.stuck_after_s,
        nodes=found.nodes,
        node_rank=found.node_rank,
        coordinator=found.coordinator,
    )


def _command(found: argparse.Namespace) -> tuple[str, ...]:
    program = (found.program, *found.arguments)
    if found.no_python:
        return program
    return (sys.executable, "-m", *program) if found.module else (sys.executable, *program)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m autopar.launch",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--processes", type=_count, metavar="N", help="processes on this host; 1, or on one host MAX")
    add("--devices-per-process", type=_count, metavar="M", help="CPU devices, or GPUs of this host, of each process")
    add("--restarts", type=_count_or_none, default=0, metavar="K", help="starts after failures, at most; 0")
    add(
        "--elastic",
        type=_range,
        metavar="MIN:MAX",
        help="processes in all, at least and at most; starts with MAX on one host",
    )
    add(
        "--size-file",
        type=Path,
        metavar="FILE",
        help="a file with the number of processes wanted; may change at any time",
    )
    add("--grace-s", type=_seconds, default=GRACE_S, metavar="S", help="from SIGTERM or SIGINT to SIGKILL; 30")
    add("--stuck-after-s", type=_seconds, metavar="S", help="a process that stands still so long is lost; 0: never; 40")
    add("--nodes", type=_count, default=1, metavar="N", help="hosts; on each of them the launcher is started once")
    add("--node-rank", type=_node_rank, default=0, metavar="R", help="the number of this host, from 0")
    add("--coordinator", metavar="HOST:PORT", help="with --nodes: where the hosts meet, on the host of node rank 0")
    add("-m", "--module", action="store_true", help="the program is a module, as after python -m")
    add("--no-python", action="store_true", help="the program is a command of its own, not of Python")
    add("program", metavar="train.py")
    add("arguments", nargs=argparse.REMAINDER, metavar="...", help="arguments of the program")
    return parser


def _count(text: str) -> int:
    return _whole_number(text, least=1)


def _count_or_none(text: str) -> int:
    return _whole_number(text, least=0)


def _node_rank(text: str) -> int:
    return _whole_number(text, least=0)


def _whole_number(text: str, *, least: int) -> int:
    """Raises: ArgumentTypeError, whose text argparse shows, for what is none or too low."""
    if not re.fullmatch(r"[+-]?\d+", text) or int(text) < least:
        raise argparse.ArgumentTypeError(f"expected a whole number, at least {least}, got {text!r}")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"expected seconds, at least 0, got {text!r}")
    return seconds


def _range(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+):(\d+)", text)
    if found is None or not 1 <= int(found[1]) <= int(found[2]):
        raise argparse.ArgumentTypeError(f"expected MIN:MAX with 1 <= MIN <= MAX, such as 2:4, got {text!r}")
    return int(found[1]), int(found[2])
