"""The launcher with real processes that import nothing: output, exit codes, signals, restarts, and no orphans."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tests.train.launch.launching import ROOT, Launcher, launch, wait_for

WHO = "import os, sys, time, signal; who = int(os.environ['AUTOPAR_PROCESS_ID'])\n"


@pytest.fixture
def script(tmp_path):
    def write(text: str) -> Path:
        path = tmp_path / "train.py"
        path.write_text(WHO + textwrap.dedent(text))
        return path

    return write


def test_each_process_gets_its_place_and_its_lines_a_number(script):
    path = script("""
        names = ("AUTOPAR_NUM_PROCESSES", "AUTOPAR_LOCAL_DEVICES", "AUTOPAR_RESTART")
        print(*[os.environ[name] for name in names], *sys.argv[1:])
        print("to stderr", file=sys.stderr)
    """)
    ended = launch("--processes", "2", "--devices-per-process", "3", path, "--epochs", "1")
    assert ended.code == 0
    assert sorted(ended.stdout.splitlines()) == ["[0] 2 3 0 --epochs 1", "[1] 2 3 0 --epochs 1"]
    assert sorted(ended.stderr.splitlines()) == ["[0] to stderr", "[1] to stderr"]


def test_addresses_are_different_and_on_loopback(script):
    path = script("print(os.environ['AUTOPAR_COORDINATOR'], os.environ['AUTOPAR_TRANSFER_ADDRESS'])")
    one, other = (line.split()[1:] for line in launch("--processes", "2", path).stdout.splitlines())
    assert one[0] == other[0]
    assert len({one[0], one[1], other[1]}) == 3
    assert all(address.startswith("127.0.0.1:") for address in (*one, *other))


def test_the_first_error_is_on_top_and_its_code_is_kept(script):
    path = script("""
        if who == 1:
            time.sleep(0.2)
            raise SystemExit(7)
        time.sleep(60)
    """)
    ended = launch("--processes", "3", path)
    assert ended.code == 7
    assert ended.stderr.splitlines() == [
        "autopar.launch: process 1 failed first: exit code 7",
        "autopar.launch: the others: 0 ended by the launcher, 2 ended by the launcher",
    ]
    assert ended.seconds < 15.0


def test_a_process_that_a_signal_killed_has_the_code_of_a_shell(script):
    ended = launch("--processes", "1", script("os.kill(os.getpid(), signal.SIGKILL)"))
    assert (ended.code, "process 0 failed first: killed by SIGKILL" in ended.stderr) == (137, True)


def test_a_restart_is_numbered_and_ends_with_success(script):
    path = script("""
        restart = int(os.environ["AUTOPAR_RESTART"])
        print("restart", restart)
        sys.exit(0 if restart == 2 else 3)
    """)
    ended = launch("--processes", "1", "--restarts", "2", path)
    assert ended.code == 0
    assert ended.stdout.splitlines() == [f"[0] restart {i}" for i in range(3)]
    assert "starts 1 processes again in 2 s (restart 2)" in ended.stderr
    ended = launch("--processes", "1", "--restarts", "1", path)
    assert ended.code == 3
    last = ended.stderr.splitlines()[-1]
    assert last == "autopar.launch: the restarts are used up (--restarts 1): ends with exit code 3"


def test_what_all_raise_at_their_beginning_is_the_error_of_each(script, tmp_path):
    path = script("""
        open(f"{sys.argv[1]}/began{who}", "w").close()
        while not os.path.exists(f"{sys.argv[1]}/began{1 - who}"):
            time.sleep(0.01)
        time.sleep(0.3 * who)
        raise RuntimeError("no config")
    """)
    ended = launch("--processes", "2", path, tmp_path)
    assert ended.code == 1
    assert ended.stderr.splitlines()[-1] == "autopar.launch: the others: 1 exit code 1"


@pytest.mark.cases(1)
@pytest.mark.parametrize(("reached", "said"), [("joined", 1), ("checkpoint", 0)])
def test_a_restart_without_a_checkpoint_is_said_once(script, tmp_path, reached, said):
    size = tmp_path / "size"
    path = script(f"""
        for name in ("joined", {reached!r}):
            open(f"{{os.environ['AUTOPAR_LAUNCH_FOLDER']}}/{{name}}.{{who}}", "w").close()
        print("restart", os.environ["AUTOPAR_RESTART"], flush=True)
        time.sleep(60 if os.environ["AUTOPAR_RESTART"] != "2" else 0)
    """)
    with Launcher("--elastic", "1:2", "--size-file", size, path) as launcher:
        for number in (1, 2):
            wait_for(lambda: f"restart {number - 1}" in launcher.stdout)  # noqa: B023
            size.write_text(str(number))
        assert launcher.wait() == 0
    assert launcher.stderr.count("has saved or restored a checkpoint: unless") == said


def test_elastic_leaves_out_what_did_not_start(script, tmp_path):
    path = script("""
        count = int(os.environ["AUTOPAR_NUM_PROCESSES"])
        print("of", count, flush=True)
        open(f"{sys.argv[1]}/printed{count}.{who}", "w").close()
        if count == 3 and who == 2:
            while not all(os.path.exists(f"{sys.argv[1]}/printed3.{i}") for i in range(3)):
                time.sleep(0.01)
            sys.exit(1)
        time.sleep(60 if count == 3 else 0)
    """)
    ended = launch("--elastic", "2:3", "--restarts", "1", path, tmp_path)
    assert ended.code == 0
    assert sorted(ended.stdout.splitlines()) == ["[0] of 2", "[0] of 3", "[1] of 2", "[1] of 3", "[2] of 3"]


def test_the_size_file_changes_the_number_of_processes(script, tmp_path):
    size = tmp_path / "size"
    path = script("""
        count = int(os.environ["AUTOPAR_NUM_PROCESSES"])
        print("of", count, os.environ["AUTOPAR_RESTART"], flush=True)
        time.sleep(60 if os.environ["AUTOPAR_RESTART"] != "2" else 0)
    """)
    with Launcher("--elastic", "1:3", "--processes", "3", "--size-file", size, path) as launcher:
        wait_for(lambda: launcher.stdout.count("of 3 0") == 3)
        size.write_text("1\n")
        wait_for(lambda: "of 1 1" in launcher.stdout)
        size.write_text("99")  # at most 3
        assert launcher.wait() == 0
    assert launcher.stdout.count("of 3 2") == 3


@pytest.mark.cases(2)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2])
def test_signals_reach_every_process_once(script, number):
    path = script("""
        def end(number, frame):
            print("got", signal.Signals(number).name, flush=True)
            sys.exit(0)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, end)
        print("ready", flush=True)
        time.sleep(60)
    """)
    with Launcher("--processes", "2", "--restarts", "3", path) as launcher:
        wait_for(lambda: launcher.stdout.count("ready") == 2)
        launcher.send(number)
        assert launcher.wait() == 0
    assert launcher.stdout.count(f"got {number.name}") == 2


def test_who_ignores_sigterm_is_killed_after_the_grace(script):
    path = script("""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("ready", flush=True)
        time.sleep(60)
    """)
    with Launcher("--processes", "1", "--grace-s", "0.5", "--restarts", "3", path) as launcher:
        wait_for(lambda: "ready" in launcher.stdout)
        sent = time.monotonic()
        launcher.send(signal.SIGTERM)
        assert launcher.wait() == 128 + signal.SIGTERM
    assert 0.4 < time.monotonic() - sent < 10.0


def test_processes_end_with_a_launcher_that_is_killed(script):
    path = script("print('pid', os.getpid(), flush=True)\ntime.sleep(60)")
    with Launcher("--processes", "2", path) as launcher:
        wait_for(lambda: launcher.stdout.count("pid") == 2)
        pids = [int(line.split()[-1]) for line in launcher.stdout.splitlines()]
        launcher.send(signal.SIGKILL)
        launcher.wait()
    wait_for(lambda: not any(is_running(pid) for pid in pids))


@pytest.mark.slow
def test_a_process_that_is_stopped_is_ended_and_named_before_it_has_joined(script):
    path = script("""
        if who == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(60)
    """)
    ended = launch("--processes", "2", path)
    assert ended.code == 137
    assert ended.stderr.startswith("autopar.launch: process 1 failed first: stopped (SIGSTOP) for 15 s\n")
    assert ended.seconds < 30.0


def test_what_a_process_leaves_running_ends_with_it(script):
    path = script("""
        import subprocess
        print("pid", subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]).pid)
    """)
    ended = launch("--processes", "1", path)
    assert ended.code == 0
    assert ended.seconds < 10.0
    wait_for(lambda: not is_running(int(ended.stdout.split()[-1])))


def test_modules_and_other_programs():
    assert launch("-m", "this").stdout.startswith("[0] The Zen of Python")
    ended = launch("--no-python", "sh", "-c", "echo $AUTOPAR_PROCESS_ID; exit 4")
    assert (ended.stdout, ended.code) == ("[0] 0\n", 4)
    missing = launch("--no-python", "no-such-program")
    assert (missing.code, "[0] no-such-program: No such file or directory" in missing.stderr) == (1, True)


def test_the_launcher_does_not_import_jax():
    names = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "autopar.launch", "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stderr
    imported = {line.rsplit("|", 1)[1].strip() for line in names.splitlines()}
    assert "autopar.train.launch.supervisor" in imported
    assert not {name for name in imported if name.split(".")[0] in ("jax", "jaxlib", "numpy")}


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state not in "ZX"


def test_the_reader_of_states_sees_this_process():
    assert is_running(os.getpid())
