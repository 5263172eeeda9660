"""What the launcher makes of its arguments."""

import sys

import pytest

from autopar.train.launch.command_line import parse
from autopar.train.launch.restart_policy import Policy


def test_defaults():
    options = parse(["train.py"])
    assert options.command == (sys.executable, "train.py")
    assert (options.processes, options.devices_per_process, options.policy) == (1, None, Policy())
    assert (options.grace_s, options.stuck_after_s, options.nodes, options.coordinator) == (30.0, None, 1, None)


def test_arguments_after_the_program_are_its_own():
    options = parse(["--processes", "4", "--devices-per-process", "2", "train.py", "--processes", "9", "-m"])
    assert options.command == (sys.executable, "train.py", "--processes", "9", "-m")
    assert (options.processes, options.devices_per_process) == (4, 2)


def test_modules_and_commands():
    assert parse(["-m", "my.training", "x"]).command == (sys.executable, "-m", "my.training", "x")
    assert parse(["--no-python", "./run", "x"]).command == ("./run", "x")


def test_elastic_starts_with_the_most():
    options = parse(["--restarts", "5", "--elastic", "2:4", "train.py"])
    assert (options.processes, options.policy) == (4, Policy(restarts=5, elastic=(2, 4)))
    assert parse(["--elastic", "2:4", "--processes", "3", "train.py"]).processes == 3


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--processes", "0", "a.py"], "expected a whole number, at least 1, got '0'"),
        (["--processes", "x", "a.py"], "expected a whole number, at least 1, got 'x'"),
        (["--node-rank", "first", "a.py"], "expected a whole number, at least 0, got 'first'"),
        (["--grace-s", "soon", "a.py"], "expected seconds, at least 0, got 'soon'"),
        (["--elastic", "4:2", "a.py"], "expected MIN:MAX with 1 <= MIN <= MAX, such as 2:4, got '4:2'"),
        (["--elastic", "2:4", "--processes", "5", "a.py"], "--processes 5 is not within --elastic 2:4"),
        (["--size-file", "x", "a.py"], "--size-file needs --elastic MIN:MAX"),
        (["--nodes", "2", "a.py"], "--nodes needs --coordinator HOST:PORT"),
        (
            ["--nodes", "2", "--node-rank", "2", "--coordinator", "a:1", "a.py"],
            "--node-rank must be from 0 to 1, got 2",
        ),
        (["--coordinator", "here", "a.py"], "'here' is not host:port"),
        (["--grace-s", "-1", "a.py"], "expected seconds, at least 0, got '-1'"),
        (["--restarts", "-1", "a.py"], "expected a whole number, at least 0, got '-1'"),
        ([], "the following arguments are required: train.py"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_arguments_are_refused_with_a_reason(capsys, arguments, said):
    with pytest.raises(SystemExit) as refused:
        parse(arguments)
    assert refused.value.code == 2
    assert said in capsys.readouterr().err
