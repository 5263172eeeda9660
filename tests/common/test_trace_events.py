"""Traces for Perfetto: which rows they have, and that nothing in a row overlaps."""

from autopar.common.trace_events import DEVICES, LINKS, Timeline, TraceEvent, chrome_trace


def traced(*spans, process=DEVICES, **options):
    """The trace of one row with events by (name, start, end)."""
    events = tuple(TraceEvent(process, 0, name, "compute", start_s, end_s) for name, start_s, end_s in spans)
    return chrome_trace(Timeline(rows=("a",), links=("b",), events=events), **options)["traceEvents"]


def rows_of(events):
    return {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}


def shown(events):
    """(row, name, start, duration) of each event."""
    rows = rows_of(events)
    return [(rows[e["pid"], e["tid"]], e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]


def test_numbers_begin_at_one_and_rows_keep_their_order():
    events = traced(("x", 0.0, 1.0))
    assert rows_of(events) == {(1, 1): "a", (2, 1): "b"}
    orders = [e["args"]["sort_index"] for e in events if e["name"] == "process_sort_index"]
    assert orders == [1, 2]
    assert rows_of(traced(("x", 0.0, 1.0), first_process=3)) == {(3, 1): "a", (4, 1): "b"}


def test_events_that_overlap_stand_in_further_rows():
    events = traced(("x", 0.0, 2e-6), ("y", 1e-6, 3e-6), ("z", 2e-6, 4e-6), ("inside", 2.5e-6, 2.6e-6))
    assert shown(events) == [
        ("a", "x", 0.0, 2.0),
        ("a", "z", 2.0, 2.0),
        ("a (2)", "y", 1.0, 2.0),
        ("a (3)", "inside", 2.5, 0.1),
    ]


def test_events_that_touch_do_not_overlap_once_times_are_rounded():
    first_s, second_s = 170_587.34e-9, 311_023.51e-9
    (_, _, start, length), (row, _, begin, _) = shown(traced(("x", first_s, second_s), ("y", second_s, 1e-3)))
    assert row == "a"
    assert (start, begin) == (170.587, 311.024)
    assert round((start + length) * 1e3) == round(begin * 1e3)


def test_transfers_have_bytes():
    event = TraceEvent(LINKS, 0, "send", "send", 0.0, 1.0, 0, 7)
    made = chrome_trace(Timeline(rows=("a",), links=("b",), events=(event,)))["traceEvents"]
    assert [e["args"] for e in made if e["ph"] == "X"] == [{"bytes": 7}]
