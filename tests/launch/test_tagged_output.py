"""Lines of several processes as one output."""

import os
import threading

from autopar.launch.supervisor import MOST_LINE_BYTES, LineSplitter, OutputOfProcess, Tagger, tagged


def test_pieces_become_lines():
    splitter = LineSplitter()
    assert list(splitter.lines(b"one\ntw")) == [b"one"]
    assert list(splitter.lines(b"o\n\nthree")) == [b"two", b""]
    assert list(splitter.end()) == [b"three"]
    assert list(splitter.end()) == []


def test_a_line_without_end_is_written_in_parts():
    assert [len(part) for part in LineSplitter().lines(b"x" * (2 * MOST_LINE_BYTES + 1))] == [MOST_LINE_BYTES] * 2


def test_a_line_has_the_number_of_its_process():
    assert tagged(3, b"a line\r") == b"[3] a line\n"
    assert tagged(12, b"") == b"[12] \n"


def test_lines_of_processes_do_not_mix():
    written: list[tuple[int, bytes]] = []
    tagger = Tagger(lambda to, data: written.append((to, data)))
    outputs, ends = [], []
    for process in range(3):
        (out, out_end), (err, err_end) = os.pipe(), os.pipe()
        outputs.append(OutputOfProcess(process, os.fdopen(out, "rb"), os.fdopen(err, "rb"), tagger))
        ends += [(out_end, b"out of %d\n" % process), (err_end, b"err of %d\n" % process)]

    def write(end: int, line: bytes) -> None:
        for byte in line * 50:
            os.write(end, bytes([byte]))
        os.close(end)

    threads = [threading.Thread(target=write, args=end) for end in ends]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for output in outputs:
        output.join(5.0)
    expected = [(to, b"[%d] %s of %d\n" % (p, name, p)) for p in range(3) for to, name in ((1, b"out"), (2, b"err"))]
    assert sorted(written) == sorted(expected * 50)
    assert [line for _, line in outputs[1].last_of_stderr] == ["err of 1"] * 50
