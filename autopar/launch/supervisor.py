"""The launcher: starts the processes of this host, and starts them again as the policy says."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from collections import deque
from pathlib import Path
from types import FrameType

from autopar.common.launched import STUCK_AFTER_S
from autopar.launch.command_line import Options
from autopar.launch.first_error import first_error, report
from autopar.launch.one_start import OneStart
from autopar.launch.placement import Placement, environments, on_one_host
from autopar.launch.restart_policy import Outcome, Policy, Stop, next_start
from autopar.launch.tagged_output import Tagger

WRONG_ARGUMENTS = 2
_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def launch(options: Options) -> int:
    """Runs the program until it has ended for good, and returns the exit code of the launcher."""
    tagger, signals, outcomes = Tagger(), _receive_signals(), list[Outcome]()
    processes, delay_s = options.processes, 0.0
    while True:
        _wait(delay_s, signals)
        if (number := _ending_signal(signals)) is not None:
            return 128 + number
        placement = on_one_host(len(outcomes), processes)
        folder = Path(tempfile.mkdtemp(prefix="autopar-launch-"))
        try:
            outcome = _start(options, placement, folder, tagger, signals)
        except ValueError as error:  # too few GPUs
            tagger.say(str(error))
            return WRONG_ARGUMENTS
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        outcomes.append(outcome)
        following = next_start(options.policy, outcomes, requested(options.policy, options.size_file))
        if isinstance(following, int):
            return following
        processes, delay_s = following.processes, following.delay_s
        failures = sum(o.stop is Stop.FAILED for o in outcomes)
        of = f"restart {failures} of {options.policy.restarts}" if outcome.stop is Stop.FAILED else "a new number"
        tagger.say(f"starts {processes} processes again in {delay_s:.0f} s ({of})")


def _start(
    options: Options, placement: Placement, folder: Path, tagger: Tagger, signals: deque[signal.Signals]
) -> Outcome:
    environment = dict(os.environ)
    if options.stuck_after_s is not None:
        environment[STUCK_AFTER_S] = str(options.stuck_after_s)
    start = OneStart(
        options.command,
        environments(placement, options.devices_per_process, folder, environment),
        placement.first_process,
        folder,
        options.grace_s,
        tagger,
    )
    outcome = start.run(signals, lambda: requested(options.policy, options.size_file))
    error = first_error(list(start.ended.values()))
    if error is not None and outcome.stop is Stop.FAILED:
        for line in report(error, list(start.ended.values())):
            tagger.say(line)
    return outcome


def requested(policy: Policy, size_file: Path | None) -> int | None:
    """The number of processes that the file asks for, as far as it is allowed; None where it asks for none."""
    if size_file is None:
        return None
    try:
        return policy.clamped(int(size_file.read_text()))
    except (OSError, ValueError):  # not there, or just being written
        return None


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
