"""Cutting a graph into stages: literal graphs before and after."""

import dataclasses

from msgspec.structs import replace

from autopar.ir.graph import Section
from autopar.passes.stage_graph import split_backward, split_stages
from tests.hand_made import ON_B, two_layers, two_stages
from tests.sections import text

FIRST = """\
before: x = split batch
forward: h = layer_a w_a x
forward:  = send h
backward: g_a = grad_w dh x
backward: G_a = accumulate g_a
after: n_a = square G_a
after:  = send n_a
after: w_a' = update w_a G_a norm
-> w_a'"""

SECOND = """\
forward: y = layer_b w_b h
backward: dh = grad_h w_b y
backward: g_b = grad_w h y
backward: G_b = accumulate g_b
backward:  = send dh
after: norm = add_square n_a G_b
after: w_b' = update w_b G_b norm
after:  = send norm
-> w_b' norm"""


def names(stage, values):
    return [stage.graph.values[v].name for v in values]


def test_two_stages():
    first, second = two_stages()
    assert text(first.graph) == FIRST
    assert text(second.graph) == SECOND


def test_inputs_are_arguments_then_what_is_received():
    first, second = two_stages()
    assert names(first, first.graph.block.inputs) == ["w_a", "batch", "dh", "norm"]
    assert (first.arguments, first.received, first.results) == ((0, 2), (1, 1), (0,))
    assert names(second, second.graph.block.inputs) == ["w_b", "h", "n_a"]
    assert (second.arguments, second.received, second.results) == ((1,), (0, 0), (1, 2))
    assert set(first.sends.values()) == {1}
    assert set(second.sends.values()) == {0}


def test_what_belongs_to_inputs_follows_them():
    first, second = two_stages()
    assert (first.graph.tied, first.graph.donated, first.graph.batch) == (((0, 0),), {0}, {1})
    assert (second.graph.tied, second.graph.donated, second.graph.batch) == (((0, 0),), {0}, frozenset())
    assert names(first, [first.graph.block.inputs[i] for i in first.graph.repeating]) == ["dh"]
    assert names(second, [second.graph.block.inputs[i] for i in second.graph.repeating]) == ["h"]
    assert first.graph.num_microbatches == second.graph.num_microbatches == 4


def test_what_goes_to_and_fro_after_the_loop_runs_level_by_level():
    levels = {}
    for stage in two_stages():
        for op in stage.graph.block.ops:
            if op.section is Section.AFTER:
                made = names(stage, op.outputs) or [f"send {names(stage, op.inputs)[0]}"]
                levels[made[0]] = stage.level_of[op.id]
    assert levels == {"n_a": 0, "send n_a": 0, "norm": 1, "w_b'": 1, "send norm": 1, "w_a'": 2}


def test_arrivals_are_one_level_behind_the_send():
    first, second = two_stages()
    arrived = [{first.graph.values[v].name: found for v, found in stage.arrival.items()} for stage in (first, second)]
    assert arrived == [{"norm": (Section.AFTER, 2)}, {"n_a": (Section.AFTER, 1)}]


def test_a_result_ends_on_the_stage_of_the_argument_it_replaces():
    graph = two_layers()
    (update,) = [op for op in graph.block.ops if graph.values[op.outputs[0]].name == "w_a'"]
    stage_of = {op.id: int(graph.values[op.outputs[0]].name in ON_B or op is update) for op in graph.block.ops}
    first, second = split_stages(graph, stage_of, {0: 0, 1: 1}, 2)
    assert names(first, first.graph.block.outputs) == ["w_a'"]
    assert "w_a'" in names(first, first.graph.block.inputs)
    assert names(second, second.graph.block.outputs) == ["w_b'", "norm"]
    assert "w_a" in names(second, second.graph.block.inputs), "the parameter is sent to where it is updated"


def test_one_stage_sends_nothing():
    graph = two_layers()
    (only,) = split_stages(graph, dict.fromkeys((op.id for op in graph.block.ops), 0), {0: 0, 1: 0}, 1)
    assert (only.sends, only.received, only.results) == ({}, (), (0, 1, 2))
    assert [op.primitive for op in only.graph.block.ops] == [op.primitive for op in graph.block.ops]


def test_only_what_another_stage_awaits_stays_in_the_backward_section():
    first, second = map(split_backward, two_stages())
    sections = {
        name: op.section
        for stage in (first, second)
        for op in stage.graph.block.ops
        for name in names(stage, op.outputs)
        if op.section.repeats
    }
    assert sections == {
        "h": Section.FORWARD, "y": Section.FORWARD, "dh": Section.BACKWARD, "g_b": Section.WEIGHT,
        "G_b": Section.WEIGHT, "g_a": Section.WEIGHT, "G_a": Section.WEIGHT,
    }  # fmt: skip
    order = [op.section for op in second.graph.block.ops]
    assert order == sorted(order, key=list(Section).index)


def test_a_batch_is_there_on_every_stage_that_reads_it():
    graph = two_layers()
    (layer_b,) = [op for op in graph.block.ops if op.primitive == "layer_b"]
    (batch,) = [v.id for v in graph.values if v.name == "batch"]
    ops = tuple(replace(op, inputs=(*op.inputs, batch)) if op is layer_b else op for op in graph.block.ops)
    first, second = two_stages(dataclasses.replace(graph, block=replace(graph.block, ops=ops)))
    assert 2 in first.arguments
    assert 2 in second.arguments
    assert "batch" not in names(second, [v for op in first.graph.block.ops if op.id in first.sends for v in op.inputs])
