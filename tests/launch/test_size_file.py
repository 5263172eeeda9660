"""What the launcher makes of the size file of --elastic."""

import pytest

from autopar.launch.restart_policy import OneHost, Policy, SizeFile, Wanted

POLICY = Policy(elastic=(1, 3))
STAYS = "; expected a number of processes, such as 2: it stays at 2"


def looks(path, times=3):
    """What is wanted at the last of several looks, and what was said, without the name of the file."""
    said = []
    size = SizeFile(path, POLICY, said.append)
    wanted = [size.wanted(2) for _ in range(times)][-1]
    return wanted, [text.removeprefix(f"--size-file {path}: ") for text in said]


@pytest.mark.parametrize("data", [b"3", b" 3\n", b"+3"])
def test_a_number_is_taken_in_silence(tmp_path, data):
    (tmp_path / "size").write_bytes(data)
    assert looks(tmp_path / "size") == (Wanted(processes=3), [])


@pytest.mark.parametrize(
    ("data", "read"),
    [
        (b"rubbish", "'rubbish'"),
        (b"2.5", "'2.5'"),
        (b"1 2", "'1 2'"),
        (b"0x2", "'0x2'"),
        (b"", "''"),
        (b"\xff\x00", r"'\\xff\x00'"),
    ],
    ids=repr,
)
def test_what_is_no_number_is_said_once(tmp_path, data, read):
    (tmp_path / "size").write_bytes(data)
    assert looks(tmp_path / "size") == (None, [f"read {read}{STAYS}"])
    assert looks(tmp_path / "size", times=1) == (None, [])  # it may just be being written


def test_what_cannot_be_read_is_said_once(tmp_path):
    assert looks(tmp_path) == (None, [f"it cannot be read (Is a directory){STAYS}"])
    assert looks(tmp_path / "none" / "size") == (None, [f"there is no folder {tmp_path / 'none'}{STAYS}"])
    assert looks(tmp_path / "size") == (None, [])  # it may come


def test_a_number_outside_of_the_limits_names_them(tmp_path):
    path = tmp_path / "size"
    host = OneHost(3, POLICY, path, print)
    path.write_text("-1")
    assert host.asked_to_end() == "-1 are asked for, and --elastic allows 1 to 3: 1 instead of 3 processes"
    path.write_text("2")
    assert host.asked_to_end() == "2 are asked for instead of 3 processes"
    said = []
    path.write_text("99")
    host = OneHost(3, POLICY, path, said.append)
    assert [host.asked_to_end() for _ in range(3)] == [None] * 3
    assert said == [f"--size-file {path}: 99 are asked for, and --elastic allows 1 to 3: it stays at 3"]
