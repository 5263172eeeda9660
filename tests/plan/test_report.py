"""The page of a plan: its values, and HTML in which names are text and nothing is loaded."""

import dataclasses
import html.parser
import json
import math
import re

import msgspec
import pytest

import autopar
from autopar.common.trace_events import DEVICES, LINKS, TraceEvent
from autopar.hardware.cluster import Cluster
from autopar.ir.layout import Layout
from autopar.plan import page, summary
from autopar.plan.bench import sent
from autopar.plan.drawing import BETWEEN, BETWEEN_STAGES, INSIDE, drawing_of, link_loads, stages_of_devices
from autopar.plan.page import (
    PARTS,
    Token,
    candidate_rows,
    in_parts,
    memory_panel,
    module_tree,
    time_text,
    timeline_data,
    tokens_of,
)
from autopar.plan.schema import CandidateRecord, MeasuredRecord, MemoryKind, MemoryUse, PlanRecord
from tests.plan.records import module, pipeline, program, value

VOID = {"meta", "link", "input", "br", "img", "hr"}
HOSTILE = "</script><img src=x onerror=alert(1)>"


class Page(html.parser.HTMLParser):
    """Elements with their attributes, the text of the page, and what is not closed or closed twice."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.faults: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.faults.append(f"</{tag}> at {self.getpos()}")

    def handle_data(self, page):
        self.texts.append((self.open[-1] if self.open else "", page))

    def ids(self) -> list[str]:
        return [attributes["id"] for _, attributes in self.elements if "id" in attributes]

    def text_in(self, *tags: str) -> str:
        return "".join(text for tag, text in self.texts if tag in tags)


def checked(text: str) -> Page:
    parsed = Page(text)
    assert not parsed.faults
    assert not parsed.open
    assert len(set(parsed.ids())) == len(parsed.ids())
    return parsed


RECORDS = {
    "program": program(),
    "layers": program(layers=96),
    "pipeline": pipeline(),
    "stages": pipeline(layers=96, stages=12),
    "measured": program(measured=(MeasuredRecord(source="tune", name="step", unit="s", predicted=1.0, measured=2.0),)),
    "bare": program(modules=(), arguments=(), candidates=(), memory_limit_bytes=None, axis_roles=(("",),)),
}


@pytest.mark.parametrize("record", RECORDS.values(), ids=RECORDS)
def test_a_page_is_well_formed_and_loads_nothing(record, tmp_path):
    autopar.Plan(record).report(tmp_path / "plan.html")
    text = (tmp_path / "plan.html").read_text(encoding="utf-8")
    parsed = checked(text)
    links = [attributes.get("href") or "" for tag, attributes in parsed.elements if tag in ("a", "link")]
    assert all(link.startswith(("#", "data:")) for link in links)
    assert not [attributes for _, attributes in parsed.elements if "src" in attributes]
    assert not re.search(r"https?://|url\(|@import", text)
    assert {link[1:] for link in links if link.startswith("#")} <= set(parsed.ids())


def test_a_page_has_every_panel():
    parsed = checked(page.page_of(pipeline()))
    assert {"time", "cluster", "modules", "arguments", "memory", "steps", "candidates"} <= set(parsed.ids())
    opening = "2 stages of 4 devices, 8 micro-batches in schedule 1f1b"
    sentence = f"{opening}; inside each, the batch and the state split over 4."
    assert sentence in parsed.text_in("p")


def test_names_of_the_program_are_text():
    """Of the step, modules, arguments, notes, candidates, the timeline, the cluster and holders of memory."""
    record = pipeline()
    assert record.pipeline is not None
    timeline = record.pipeline.timeline
    events = tuple(type(e)(e.process, e.row, HOSTILE, HOSTILE, e.start_s, e.end_s) for e in timeline.events)
    holder = dataclasses.replace(record.predicted.memory[0].largest[0], name=HOSTILE)
    memory = (dataclasses.replace(record.predicted.memory[0], largest=(holder,)),) * 2
    hostile = dataclasses.replace(
        record,
        step=HOSTILE,
        cluster=dataclasses.replace(record.cluster, name=HOSTILE),
        modules=(module(HOSTILE, compute_s=1.0, send_s=1.0), module(f"a/{HOSTILE}", compute_s=1.0)),
        arguments=(value(f"state['{HOSTILE}']"),),
        notes=(HOSTILE,),
        candidates=(dataclasses.replace(program().rejected[0], text=HOSTILE, why=HOSTILE),),
        measured=(MeasuredRecord(source=HOSTILE, name=HOSTILE, unit="s", predicted=1.0, measured=2.0),),
        predicted=dataclasses.replace(record.predicted, memory=memory),
        pipeline=dataclasses.replace(
            record.pipeline,
            timeline=changed_timeline(timeline, rows=(HOSTILE,) * 2, events=events),
        ),
    )
    for text in (page.page_of(hostile), page.comparison_of(hostile, program(step=HOSTILE))):
        parsed = checked(text)
        assert not [tag for tag, _ in parsed.elements if tag == "img"]
        assert not [name for _, attributes in parsed.elements for name in attributes if name.startswith("on")]
        assert HOSTILE in parsed.text_in("code", "td", "li", "title")
    assert page.page_of(hostile).count("</script>") == 2


def changed_timeline(timeline, **changes):
    """A timeline with changes."""
    return type(timeline)(**({f: getattr(timeline, f) for f in timeline.__struct_fields__} | changes))


def test_the_data_of_the_timeline_are_json_that_ends_no_element():
    value = {"name": HOSTILE, "line": "\u2028", "and": "&"}
    text = str(page.safe_json(value))
    assert json.loads(text) == value
    assert not set("<>&\u2028") & set(text)


def test_axes_in_layouts_are_pieces_of_their_own():
    assert tokens_of('forward: P(None, ("x", "y")) @ P("y", None) -> P(None, unreduced={"x"})') == (
        Token("forward: P(None, ("),
        Token("x", "x"),
        Token(", "),
        Token("y", "y"),
        Token(")) @ P("),
        Token("y", "y"),
        Token(", None) -> P(None, unreduced={"),
        Token("x", "x"),
        Token("})"),
    )
    assert tokens_of('x float32[2, 3] P("data")') == (
        Token("x float32[2, 3] P("),
        Token("data", "data"),
        Token(")"),
    )


def test_the_tree_of_modules():
    tree = module_tree(program(layers=3))
    assert [(n.path, n.depth, n.has_children, len(n.instances)) for n in tree] == [
        ("layer*", 0, True, 0),
        ("layer*/attention", 1, False, 3),
        ("layer*/mlp", 1, False, 3),
    ]
    assert [(n.cost.compute_s, n.cost.send_s, n.saved_bytes) for n in tree] == [
        (7.5, 6.0, 6000),
        (3.0, 0.0, 3000),
        (4.5, 6.0, 3000),
    ]
    assert tree[0].share == 1.0
    assert [c.count for c in tree[2].collectives] == [6.0]
    assert [n.axes for n in tree] == [(), ("x",), ("x",)]
    assert tree[2].splits == (('forward: P(None, None) @ P(None, "x") -> P(None, "x")',),)


def test_modules_of_stages_are_means_over_the_devices():
    (layers, mlp) = module_tree(pipeline(layers=4, stages=2))
    assert (layers.cost.compute_s, layers.cost.send_s) == (2.0, 1.0)
    assert [(i.module, i.stage) for i in mlp.instances] == [(f"layer{n}/mlp", n // 2) for n in range(4)]


def test_links_have_the_load_of_their_axes():
    (load,) = link_loads(program())
    assert (load.where, load.what, load.sent_bytes, load.time_s, load.busy) == (
        INSIDE,
        "collectives over x",
        16_000,
        4.0,
        0.4,
    )
    (load,) = link_loads(program(axis_sizes=(16,), cluster=Cluster.preset("dgx-h100", hosts=2)))
    assert load.where == BETWEEN


def test_what_stages_send_each_other_is_a_load_of_the_links_between_their_devices():
    """Stages of four devices: the first two in one host, the third in another. Each device sends its part."""
    record = pipeline(layers=3, stages=3)
    sends = [
        TraceEvent(LINKS, row, "x", "send", float(row), row + 1.0, 0, nbytes)
        for row, nbytes in ((0, 300), (0, 300), (1, 1200))
    ]
    timeline = msgspec.structs.replace(
        record.pipeline.timeline, links=("mesh 0 to mesh 1", "mesh 1 to mesh 2"), events=tuple(sends)
    )
    record = dataclasses.replace(record, pipeline=dataclasses.replace(record.pipeline, timeline=timeline))
    share = 4 / summary.num_devices(record)
    loads = {load.where: load for load in link_loads(record) if load.what == BETWEEN_STAGES}
    assert {where: load.sent_bytes for where, load in loads.items()} == {INSIDE: 600 * share, BETWEEN: 1200 * share}
    assert loads[INSIDE].time_s == 2 * share
    assert sent(record)[BETWEEN] == 1200 * share
    inside = sum(load.sent_bytes for load in link_loads(record) if load.where == INSIDE)
    assert sent(record)[INSIDE] == inside > 600 * share


def test_devices_are_drawn_with_their_stages():
    record = pipeline(stages=4)
    assert stages_of_devices(record) == {device: (device // 4,) for device in range(16)}
    drawing = drawing_of(record)
    assert len(drawing.hosts) == 2
    assert [box.stages for box in drawing.devices] == [(device // 4,) for device in range(16)]
    for box in (*drawing.hosts, *drawing.devices):
        assert 0 <= box.x <= box.x + box.width <= drawing.width
        assert 0 <= box.y <= box.y + box.height <= drawing.height


def test_idle_devices_have_no_stage():
    drawing = drawing_of(program(cluster=Cluster.preset("dgx-h100", hosts=2)))
    assert [bool(box.stages) for box in drawing.devices] == [True] * 8 + [False] * 8


def test_of_large_clusters_hosts_are_drawn():
    drawing = drawing_of(program(cluster=Cluster.preset("dgx-h100", hosts=512), axis_sizes=(4096,)))
    assert len(drawing.devices) == 512


def test_what_stages_send_each_other_is_drawn():
    record = pipeline()
    assert record.pipeline is not None
    events = (
        TraceEvent(LINKS, 0, "send", "send", 0.0, 1.0, 0, 1000),
        TraceEvent(LINKS, 0, "send", "send", 2.0, 3.0, 0, 1000),
        TraceEvent(LINKS, 1, "send", "send", 3.0, 4.0, 0, 500),
    )
    timeline = changed_timeline(record.pipeline.timeline, links=("mesh 0 to mesh 1", "mesh 1 to mesh 0"), events=events)
    record = dataclasses.replace(record, pipeline=dataclasses.replace(record.pipeline, timeline=timeline))
    one, other = drawing_of(record).wires
    assert (one.name, one.nbytes, one.busy, one.share) == ("stage 0 to stage 1", 2000, 0.2, 1.0)
    assert (other.nbytes, other.share) == (500, 0.25)
    assert (one.x1, one.y1, one.x2, one.y2) == (other.x2, other.y2, other.x1, other.y1)


def test_memory_over_the_step():
    panel = memory_panel(pipeline())
    assert panel.is_over_seconds
    assert panel.highest == 0
    assert panel.groups[0].name == "stage 0"
    assert panel.groups[0].curve[:2] == (4000, 4000)
    assert max(panel.groups[0].curve) == 10_000
    assert panel.groups[0].at_peak == ((MemoryKind.PARAMETER, 4000), (MemoryKind.SAVED, 6000))
    panel = memory_panel(program())
    assert (panel.is_over_seconds, panel.groups[0].curve) == (False, (4000, 10_000, 5000))


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([], ()),
        ([(0.0, 5)], (5, 5, 5, 5)),
        ([(0.0, 5), (2.0, 1)], (5, 5, 5, 1)),
        ([(0.0, 1), (1.2, 9), (1.4, 2)], (1, 9, 2, 2)),
    ],
)
def test_the_most_in_each_part_of_a_time(steps, expected):
    assert in_parts(steps, 4.0, 4) == expected


def test_the_timeline_is_in_parts_of_the_step():
    timeline = timeline_data(program())
    assert timeline.names == ("layer0/mlp", "all-reduce over x, layer0/mlp")
    compute, sends = timeline.rows
    assert (compute.name, compute.is_link, compute.events, compute.busy) == (
        "every device",
        False,
        ((0, 0, PARTS // 2),),
        0.5,
    )
    assert (sends.is_link, sends.events) == (True, ((1, PARTS // 2, PARTS // 2),))


def test_starts_on_the_page_count_from_the_start_before():
    made = json.loads(str(page.timeline_json(timeline_data(pipeline()))))
    assert [row["events"] for row in made["rows"]] == [[0, 0, PARTS // 10], [1, PARTS // 10, PARTS // 10]]


def test_candidates_by_time_with_the_plan_first():
    rows = page.candidate_rows(program())
    assert [(r.text, r.relative, r.why) for r in rows] == [
        ("One program on 8 devices: the matrices split over 8.", 1.0, ""),
        ("ZeRO-1", 1.2, "slower by 2 s"),
        ("data parallelism", 1.5, "slower by 5 s"),
        ("all of them", None, "not searched"),
    ]


def test_the_chart_has_the_plan_and_what_came_next_by_time():
    rows = page.candidate_rows(program())
    bars = page.fastest(rows)
    assert [row.text for row in bars] == [row.text for row in rows[:3]]  # without the one that has no time
    parsed = checked(page.page_of(program()))
    assert parsed.ids().index("candidates") < parsed.ids().index("cluster")


def test_the_title_names_the_hosts():
    record = pipeline(layers=4, stages=4, cluster=Cluster.preset("dgx-h100", hosts=2))
    assert "Plan of train on dgx-h100, 2 hosts of 8" in checked(page.page_of(record)).text_in("title")


def test_two_plans_side_by_side(tmp_path):
    autopar.Plan(program()).compare(autopar.Plan(pipeline()), tmp_path / "two.html")
    text = (tmp_path / "two.html").read_text(encoding="utf-8")
    shown = checked(text).text_in("td", "p")
    assert "It takes 10 s a step, as the plan does" in shown
    assert "layer*/attention" in shown


def test_a_large_plan_is_small(tmp_path):
    """96 layers in 128 stages on 1,024 devices, each stage with 768 tasks."""
    record: PlanRecord = pipeline(layers=128, stages=128, cluster=Cluster.preset("dgx-h100", hosts=128))
    assert record.pipeline is not None
    events = tuple(
        TraceEvent(DEVICES, s, f"F {n} of stage {s}", "F", n * 0.01, n * 0.01 + 0.01, s)
        for s in range(128)
        for n in range(768)
    )
    timeline = changed_timeline(record.pipeline.timeline, events=events)
    record = dataclasses.replace(record, pipeline=dataclasses.replace(record.pipeline, timeline=timeline))
    assert len(page.page_of(record).encode()) < 5e6


def test_state_that_is_split_less_says_why():
    """On a mesh 2x4: 63 x 10 divides by neither unused axis, 64 x 10 would; small state is not asked about."""
    mesh = dataclasses.replace(program(), axis_sizes=(2, 4), pinned=None)

    def state(path, shape, dims):
        return dataclasses.replace(
            value(path), kind="state", shape=shape, layout=Layout(dims), nbytes=4 * math.prod(shape)
        )

    values = (
        state("params['split']", (64, 8), ((0, 1), ())),
        state("params['odd']", (63, 10), ((), ())),
        state("params['even']", (64, 10), ((0,), ())),
        state("params['scale']", (8,), ((),)),
    )
    rows = page.argument_rows(dataclasses.replace(mesh, arguments=values))
    why = {row.pattern: row.why_whole for row in rows}
    price = "by the search's costs without a gain: plan.explain('params/odd', alternatives=3) prices it"
    assert why["params/odd"] == f"dimension 1 divides by x (2), {price}"
    assert why["params/even"].startswith("dimension 0 divides by y (4)")
    assert why["params/split"] == why["params/scale"] == ""
    rows = page.argument_rows(dataclasses.replace(mesh, arguments=values, recipe="zero(3)"))
    assert not any(row.why_whole for row in rows)
    (odd, *_) = page.argument_rows(
        dataclasses.replace(mesh, arguments=(state("params['odd']", (63, 11), ((), ())), values[0]))
    )
    assert odd.why_whole == "no dimension divides by x (2) and y (4)"


def test_the_head_has_parameters_and_tokens():
    sizes = {"params['a']": (4, 8), "opt['mu']['a']": (4, 8), "params['b']": (3,), "opt['mu']['b']": (3,)}
    arguments = [
        dataclasses.replace(
            value(path), kind="state", shape=shape, layout=Layout(((),) * len(shape)), nbytes=4 * math.prod(shape)
        )
        for path, shape in sizes.items()
    ]
    tokens = dataclasses.replace(value("batch"), kind="batch", shape=(2, 16), dtype="int32", layout=Layout(((), ())))
    record = dataclasses.replace(program(), arguments=(*arguments, tokens))

    def counted(parameter_bytes):
        use = MemoryUse(throughout={MemoryKind.PARAMETER: parameter_bytes}, at_peak={}, largest=())
        predicted = dataclasses.replace(record.predicted, memory=(use,))
        return summary.num_parameters(dataclasses.replace(record, predicted=predicted))

    assert counted(4 * 35) == 35
    assert counted(4 * 70) == 0  # the plan counts more as parameters than paths tell apart
    assert page.batch_facts(record) == page.BatchFacts(array="int32[2, 16]", number=32, unit="tokens")


def test_a_time_that_no_prediction_resolves_is_told_as_short():
    assert (time_text(4.6e-8), time_text(2.49e-4), time_text(0.0)) == ("< 1 us", "249 us", "0 s")


def test_a_mesh_that_lost_says_what_it_splits():
    lost = CandidateRecord(
        source="one program", text="mesh 2x4", why="slower by 2.5 s", step_time_s=12.5, axis_sizes=(2, 4),
        axis_roles=("data", "tensor"),
    )  # fmt: skip
    texts = [row.text for row in candidate_rows(program(candidates=(lost,)))]
    assert "mesh 2x4: the batch split over 2, the matrices split over 4" in texts
