"""Lines of several processes as one output."""

import os
import threading

from autopar.train.launch.supervisor import MOST_LINE_BYTES, OutputOfProcess, Tagger, tagged


def written_of(*pieces: bytes) -> list[bytes]:
    """What is written of a process that prints these pieces, one after the other."""
    written: list[bytes] = []
    (out, out_end), (err, err_end) = os.pipe(), os.pipe()
    tagger = Tagger(lambda to, data: written.append(data))
    output = OutputOfProcess(0, os.fdopen(out, "rb"), os.fdopen(err, "rb"), tagger)
    for piece in pieces:
        os.write(out_end, piece)
    for end in (out_end, err_end):
        os.close(end)
    output.join(5.0)
    return written


def test_pieces_become_lines():
    assert written_of(b"one\ntw", b"o\n\nthree") == [b"[0] one\n", b"[0] two\n", b"[0] \n", b"[0] three\n"]


def test_a_line_comes_before_the_next_is_there():
    came = threading.Event()
    (out, out_end), (err, err_end) = os.pipe(), os.pipe()
    output = OutputOfProcess(0, os.fdopen(out, "rb"), os.fdopen(err, "rb"), Tagger(lambda to, data: came.set()))
    os.write(out_end, b"one\ntw")
    assert came.wait(5.0)
    for end in (out_end, err_end):
        os.close(end)
    output.join(5.0)


def test_a_line_without_end_is_written_in_parts():
    half = b"x" * (MOST_LINE_BYTES // 2)
    parts = written_of(half, half, half)
    assert [len(part) for part in parts] == [len(b"[0] \n") + MOST_LINE_BYTES, len(b"[0] \n") + MOST_LINE_BYTES // 2]
    full = [len(part) - len(b"[0] \n") for part in written_of(half, half, b"\n\nb\n")]
    assert full == [MOST_LINE_BYTES, 0, 1]


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
