"""Collectives that XLA makes one of: gathers ahead of their readers and behind the update, and reductions up to a size
of their own.
"""

from autopar.cost.stream_simulator import Stream, StreamWork, overlap_of, run
from autopar.hardware.collective_cost import CollectiveKind
from autopar.hardware.kinds import Platform


def compute(makes, seconds, reads="", **others):
    return StreamWork(
        name=makes, stream=Stream.COMPUTE, seconds=seconds, reads=tuple(reads.split()), makes=(makes,), **others
    )


def gather(makes, seconds, reads="", nbytes=1.0):
    """A gather of which one second is latency."""
    return StreamWork(
        name=makes, stream=Stream.SEND, seconds=seconds, reads=tuple(reads.split()), makes=(makes,), nbytes=nbytes,
        gather="x", latency_s=1.0,
    )  # fmt: skip


def scatter(makes, reads, nbytes):
    return StreamWork(
        name=makes, stream=Stream.SEND, seconds=2.0, reads=(reads,), makes=(makes,), nbytes=nbytes,
        reduction=(CollectiveKind.REDUCE_SCATTER, (0,)), latency_s=1.0,
    )  # fmt: skip


def timetable(program, *thresholds):
    ran = run(program, *thresholds)
    return {w.name: (start, start + w.seconds) for w, start in zip(ran.order, ran.starts_s, strict=True)}


def test_gathers_of_parameters_and_their_casts_become_one_up_to_a_size():
    program = [
        gather("w", 3.0, nbytes=3.0), compute("half", 1.0, "b", is_light=True), gather("b whole", 2.0, "half"),
        compute("h", 5.0, "w"), gather("v", 2.0, nbytes=3.0), compute("y", 1.0, "h v"),
    ]  # fmt: skip
    assert timetable(program, 4) == {
        "half": (0, 1), "v": (0, 2), "w and 1 more": (2, 6), "h": (6, 11), "y": (11, 12),
    }  # fmt: skip
    assert "w" in timetable(program, 2)


def test_gathers_of_new_parameters_start_together_and_save_latencies():
    program = [
        compute("p2", 1.0), gather("p2 whole", 2.0, "p2"), compute("p1", 5.0), gather("p1 whole", 2.0, "p1"),
    ]  # fmt: skip
    assert timetable(program, 1) == {"p2": (0, 1), "p2 whole": (1, 3), "p1": (1, 6), "p1 whole": (6, 8)}
    assert timetable(program, 2) == {"p2": (0, 1), "p1": (1, 6), "p2 whole": (6, 8), "p1 whole": (8, 9)}


def test_a_gather_that_waits_for_another_is_not_combined_with_it_nor_with_what_comes_ahead():
    program = [
        compute("h", 1.0, "x"), gather("h_whole", 2.0, "h"), gather("w", 2.0), compute("y", 1.0, "w h_whole"),
        gather("z", 2.0, "y"),
    ]  # fmt: skip
    assert timetable(program, 100) == {"w": (0, 2), "h": (0, 1), "h_whole": (2, 4), "y": (4, 5), "z": (5, 7)}


def test_scattered_gradients_are_combined_by_their_operands_and_save_latencies():
    program = [
        compute("g2", 1.0), scatter("s2", "g2", 1.0), compute("g1", 9.0), scatter("s1", "g1", 1.0),
    ]  # fmt: skip
    assert timetable(program, 100, 1) == {"g2": (0, 1), "s2": (1, 3), "g1": (1, 10), "s1": (10, 12)}
    assert timetable(program, 100, 2) == {"g2": (0, 1), "g1": (1, 10), "s2": (10, 12), "s1": (12, 13)}
    assert overlap_of(Platform.GPU, 48).scattered_bytes == overlap_of(Platform.GPU).combined_bytes // 48
