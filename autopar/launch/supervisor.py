"""The launcher: starts the processes of this host, and starts them again as the policy says."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections import deque
from pathlib import Path
from types import FrameType

from autopar.common.launched import STUCK_AFTER_S
from autopar.launch.command_line import Options
from autopar.launch.first_error import first_error, report
from autopar.launch.hosts import Hosts, OneHost
from autopar.launch.member import SeveralHosts
from autopar.launch.one_start import STOPPED_AFTER_S, Limits, OneStart
from autopar.launch.placement import Placement, environments
from autopar.launch.restart_policy import Outcome, Stop
from autopar.launch.tagged_output import Tagger

WRONG_ARGUMENTS = 2
WITHOUT_CHECKPOINT = (
    "neither autopar nor orbax has saved or restored a checkpoint: unless the script saves by itself, it begins at its "
    "first step again (autopar.checkpoint.Checkpointer)"
)
_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def launch(options: Options) -> int:
    """Runs the program until it has ended for good, and returns the exit code of the launcher."""
    tagger, signals = Tagger(), _receive_signals()
    hosts = _hosts(options, tagger)
    try:
        return _launch(options, hosts, tagger, signals)
    finally:
        hosts.close()


def _launch(options: Options, hosts: Hosts, tagger: Tagger, signals: deque[signal.Signals]) -> int:
    outcome: Outcome | None = None
    has_said = False
    while True:
        start = hosts.next(outcome, lambda: bool(signals))
        if isinstance(start, int):
            return start
        if start is not None and outcome is not None:
            count, delay_s = start.placement.num_processes, start.delay_s
            tagger.say(f"starts {count} processes again in {delay_s:.0f} s (restart {start.placement.restart})")
            if outcome.is_lost and not has_said:
                has_said = True
                tagger.say(WITHOUT_CHECKPOINT)
        if start is not None:
            _wait(start.delay_s, signals)
        if (number := _ending_signal(signals)) is not None:
            return 128 + number
        if start is not None:
            try:
                outcome = _start(options, start.placement, hosts, tagger, signals)
            except ValueError as error:  # too few GPUs
                tagger.say(str(error))
                return WRONG_ARGUMENTS


def _hosts(options: Options, tagger: Tagger) -> Hosts:
    if options.nodes == 1:
        return OneHost(options.processes, options.policy, options.size_file, tagger.say)
    assert options.coordinator is not None, "checked with the arguments"
    return SeveralHosts(
        options.coordinator, options.nodes, options.node_rank, options.processes, options.policy, tagger.say
    )


def _start(
    options: Options, placement: Placement, hosts: Hosts, tagger: Tagger, signals: deque[signal.Signals]
) -> Outcome:
    environment = dict(os.environ)
    if options.stuck_after_s is not None:
        environment[STUCK_AFTER_S] = str(options.stuck_after_s)
    stopped_after_s = 0.0 if options.stuck_after_s == 0 else STOPPED_AFTER_S
    limits = Limits(grace_s=options.grace_s, stopped_after_s=stopped_after_s)
    with tempfile.TemporaryDirectory(prefix="autopar-launch-", ignore_cleanup_errors=True) as folder:
        start = OneStart(
            options.command,
            environments(placement, options.devices_per_process, Path(folder), environment),
            placement.first_process,
            Path(folder),
            limits,
            tagger,
        )
        outcome = start.run(signals, hosts.asked_to_end)
    error = first_error(list(start.ended.values()))
    if error is not None and outcome.stop is Stop.FAILED:
        for line in report(error, list(start.ended.values())):
            tagger.say(line)
    return outcome


def _receive_signals() -> deque[signal.Signals]:
    signals: deque[signal.Signals] = deque()

    def receive(number: int, _: FrameType | None) -> None:
        signals.append(signal.Signals(number))

    for number in _PASSED_ON:
        signal.signal(number, receive)
    return signals


def _wait(delay_s: float, signals: deque[signal.Signals]) -> None:
    end_s = time.monotonic() + delay_s
    while time.monotonic() < end_s and not signals:
        time.sleep(0.05)


def _ending_signal(signals: deque[signal.Signals]) -> int | None:
    """The number of a signal that ends the launcher between two starts; the others have nobody to go to."""
    ending = [s for s in signals if s in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)]
    signals.clear()
    return int(ending[0]) if ending else None
