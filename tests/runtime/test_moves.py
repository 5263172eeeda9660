"""Arrays move from some devices of a program of two processes to all of them."""

from pathlib import Path

from tests.in_processes import launch


def test_from_a_few_devices_to_those_of_all_processes(tmp_path):
    program = str(Path(__file__).with_name("moving.py"))
    for code, text, _ in launch(tmp_path, 2, 2, 60.0, program):
        assert code == 0, text
        assert text.splitlines()[-1] == "moved"
