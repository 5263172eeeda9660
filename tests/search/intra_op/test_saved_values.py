"""What layers save by value: the integer program against every choice there is, and the step that comes of it."""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.common.progress import Progress
from autopar.errors import PlanMismatchError, UnsupportedError
from autopar.frontend.build_graph import build_graph
from autopar.frontend.tracing import trace
from autopar.ir.graph import OpKind, read_by
from autopar.ir.rules import RuleBook
from autopar.passes.saved_arrays import offloaded_by_policy, waiting_in_host
from autopar.plan.options import PlanRequest
from autopar.plan.plan import Trees
from autopar.search.intra_op import saved_values
from autopar.search.intra_op.saved_values import LayerValues, SavingProgram
from autopar.search.planner import make_plan
from autopar.search.step_ways import bytes_saved
from tests.frontend.test_recompute_in_scans import (
    FORMS,
    HIDDEN,
    INPUT,
    LAYERS,
    PRODUCT,
    WIDTH,
    arguments,
    in_16_bits,
    in_scans,
    stepped,
    traced,
    turned_and_checkpointed,
)
from tests.small_steps import assert_close, shapes, slow_cluster


@pytest.fixture(autouse=True)
def _any_size_is_sent(monkeypatch):
    monkeypatch.setattr(saved_values, "SENT_FROM_BYTES", 0)


def layers_of(form, devices=2):
    return LayerValues.of_scans(build_graph(traced(form, ""), RuleBook()), slow_cluster(devices))


def two_products(state, batch):
    def layer(x, p):
        return x + jnp.tanh(jnp.tanh(x @ p["up"]) @ p["down"]), None

    return jax.lax.scan(layer, batch["x"], state["layers"])[0]


def every_choice(layers):
    """(seconds, bytes kept, bytes sent) of each way to keep, send or compute again the values of one layer."""
    (layer,), device = layers.layers, layers.cluster.device
    makers = {v: op for op in layer.forward for v in op.outputs}
    values = list(layer.places.values())
    size = {v: layer.times * layers.values[v].nbytes for v in values}
    for places in itertools.product(("kept", "sent", "again"), repeat=len(values)):
        place = dict(zip(values, places, strict=True))
        again, waiting = {}, [v for v in layer.read if place.get(v) == "again"]
        while waiting and waiting[-1] in makers:
            op = makers[waiting.pop()]
            if op.id not in again:
                again[op.id] = op
                waiting += [v for v in read_by(op) if place.get(v) == "again"]
        if waiting:
            continue  # what a layer is given cannot be made again
        there = [v for v in values if place[v] != "again"]
        moved_s = sum(device.memory_s(2 * size[v]) / layers.cluster.num_devices for v in there)
        seconds = moved_s + sum(map(layers.seconds, again.values()))
        yield seconds, *(sum(size[v] for v in there if place[v] == kind) for kind in ("kept", "sent"))


def test_no_choice_costs_less_for_any_price_of_a_byte():
    layers = layers_of(two_products)
    program, choices = SavingProgram(layers), list(every_choice(layers))
    seconds_of, bytes_of, sent_of, _ = np.array(program.costs).T
    for most_sent_bytes in (0, 2048, 8192, 1e9):
        found = [(seconds_of @ x, bytes_of @ x) for x in program.frontier(most_sent_bytes, 1000)]
        assert all(sent_of @ x <= most_sent_bytes for x in program.frontier(most_sent_bytes, 1000))
        assert [kept for _, kept in found] == sorted((kept for _, kept in found), reverse=True)
        allowed = [(s, kept) for s, kept, sent in choices if sent <= most_sent_bytes]
        assert found[-1][1] == min(kept for _, kept in allowed)
        for price in (0, *np.geomspace(1e-13, 1e-6, 40)):
            least = min(s + price * kept for s, kept in allowed)
            assert min(s + price * kept for s, kept in found) == pytest.approx(least, rel=3e-3)


def test_of_a_frontier_some_choices_are_taken_in_even_steps():
    program = SavingProgram(layers_of(FORMS[0]))
    size_of = np.array(program.costs)[:, 1]
    every, some = ([size_of @ taken for taken in program.frontier(0.0, most)] for most in (1000, 1))
    assert len(some) <= 2 < len(every)
    assert {every[-1]} <= {*some} <= {*every}


def test_in_fewer_bytes_no_choice_takes_less_time():
    layers = layers_of(two_products)
    program, choices = SavingProgram(layers), list(every_choice(layers))
    seconds_of, bytes_of, _, _ = np.array(program.costs).T
    for most_sent_bytes in (0, 2048, 1e9):
        for taken in program.in_shares(most_sent_bytes, (1.0, 0.5, 0.2, 0.0)):
            inside = [s for s, kept, sent in choices if kept <= bytes_of @ taken and sent <= most_sent_bytes]
            assert seconds_of @ taken == pytest.approx(min(inside), rel=2e-3)


def test_fewer_bytes_save_less():
    choices = list(layers_of(FORMS[0]).choices())
    assert [c.kept_bytes for c in choices] == sorted((c.kept_bytes for c in choices), reverse=True)
    assert choices[-1].text.endswith(": input0 host")
    assert choices[-1].kept_bytes == INPUT
    assert all(c.text.endswith("host") for c in choices)  # virtual CPU devices keep all in one memory


def test_a_choice_for_so_many_bytes_is_as_fast_as_any_in_them():
    layers = layers_of(two_products)
    choices = list(every_choice(layers))
    for most_bytes in {kept for _, kept, sent in choices if not sent}:
        taken = SavingProgram(layers).within(most_bytes, 0.0)
        seconds_of, bytes_of, _, _ = np.array(SavingProgram(layers).costs).T
        assert bytes_of @ taken <= most_bytes
        fastest_s = min(s for s, kept, sent in choices if kept <= most_bytes and not sent)
        assert seconds_of @ taken == pytest.approx(fastest_s, rel=2e-3)
        assert layers.choice_within(most_bytes, sends=False).kept_bytes == pytest.approx(bytes_of @ taken)


def first_product(form):
    """The name of the layer, and the place of that result in it."""
    (layer,) = layers_of(form).layers
    return layer.name, f"{[op.primitive for op in layer.forward].index('dot_general')}.0"


def test_what_a_text_names_is_stacked_and_nothing_else():
    # Of x + gelu(tanh(x * scale) @ up) @ down, the input and the first product.
    name, product = first_product(FORMS[0])
    kept = in_scans(FORMS[0], f"values {name}: input0 {product} host")
    assert kept == in_scans(FORMS[0], "matmuls") == ([(2, 2), (4, 2)], INPUT + PRODUCT)
    assert in_scans(FORMS[0], f"values {name}: input0 host") == ([(2, 2), (5, 2)], INPUT)


def test_what_is_sent_waits_in_the_memory_of_the_hosts():
    graph = build_graph(traced(FORMS[0], "values {}: input0 host {}".format(*first_product(FORMS[0]))), RuleBook())
    (sent,) = offloaded_by_policy(graph)
    assert graph.values[sent].shape == (8, HIDDEN)
    stacked = waiting_in_host(graph, frozenset({sent})) - {sent}
    assert [graph.values[v].shape for v in stacked] == [(LAYERS, 8, HIDDEN)]
    forward = next(op for op in graph.ops() if op.kind is OpKind.SCAN)
    assert stacked < set(forward.outputs)


def texts_of(form):
    """What is saved in half of the bytes: on the devices, and in the memory of the hosts too."""
    program = SavingProgram(layers_of(form))
    on_devices, anywhere = program.frontier(0.0, 1000), program.frontier(math.inf, 1000)
    return [program.choice(taken).text for taken in (on_devices[len(on_devices) // 2], anywhere[-1])]


@pytest.mark.cases(1)
@pytest.mark.parametrize("form", [*FORMS, turned_and_checkpointed], ids=lambda form: form.__name__)
@pytest.mark.parametrize(("devices", "options"), [(1, {}), (2, {"num_microbatches": 2}), (4, {})])
def test_results_are_those_of_jit(form, devices, options):
    state, batch = arguments()
    trees = Trees(
        arguments=(jax.tree.structure(state), jax.tree.structure(batch)), names=("state", "batch"),
        donated=frozenset({0}), batch=frozenset({1}),
    )  # fmt: skip
    expected = jax.jit(stepped(form))(state, batch)
    for text in texts_of(form):
        request = PlanRequest(scan_recompute=text, **options)
        plan = make_plan(traced(form, ""), trees, slow_cluster(devices), request, RuleBook(), Progress("", show=False))
        assert plan.record.scan_recompute == text
        step = autopar.parallelize(stepped(form), plan=plan, cache_dir=None)
        got = step(jax.tree.map(jnp.copy, state), batch)
        assert_close(jax.tree.map(np.asarray, got), expected, 2e-2 if form is in_16_bits else 1e-5)


def test_layers_of_one_name_save_the_same():
    def form(state, batch):
        return FORMS[0](state, {"x": FORMS[0](state, batch)})

    once, twice = layers_of(FORMS[0]), layers_of(form)
    assert len({layer.name for layer in (*once.layers, *twice.layers)}) == 1
    assert len(twice.layers) == 2
    assert [c.text for c in twice.choices()] == [c.text for c in once.choices()]
    assert next(twice.choices()).kept_bytes == 2 * next(once.choices()).kept_bytes


def test_what_makes_the_largest_values_is_named_once():
    def form(state, batch):
        return two_products(state, {"x": FORMS[0](state, batch)})

    layers = layers_of(form)
    assert len({layer.name for layer in layers.layers}) == 2
    made_by = [[text.rsplit(" ", 2)[0] for text in choice.largest] for choice in layers.choices()]
    assert any("the input of layers" in names for names in made_by)
    assert all(len({*names}) == len(names) for names in made_by)


def test_a_step_without_scans_has_nothing_to_save():
    step = dataclasses.replace(traced(lambda state, batch: batch["x"] @ state["layers"]["up"][0][:, :WIDTH], ""))
    assert list(LayerValues.of_scans(build_graph(step, RuleBook()), slow_cluster(1)).choices()) == []


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("text", "error", "got"),
    [
        ("half", PlanMismatchError, "'half'"),
        ("values {}: input0 99.0 host", UnsupportedError, "99.0"),
        ("values abc: input0 host", UnsupportedError, "layers abc"),
        ("values", PlanMismatchError, "'values'"),
    ],
)
def test_a_text_that_is_of_no_layer_is_refused(text, error, got):
    (layer,) = layers_of(FORMS[0]).layers
    with pytest.raises(error) as raised:
        build_graph(traced(FORMS[0], text.format(layer.name)), RuleBook())
    assert raised.value.got == got
    assert raised.value.where == "$.plan.scan_recompute"


def accumulating(state, batch):
    """A step that takes the gradients of two halves of its batch in a loop of its own."""

    def loss(state, half):
        x, _ = jax.lax.scan(
            lambda x, p: (jnp.tanh(jnp.tanh(x @ p["up"]) @ p["down"]), None), half["x"], state["layers"]
        )
        return jnp.mean((x - half["y"]) ** 2)

    def add(total, half):
        return jax.tree.map(jnp.add, total, jax.grad(loss)(state, half)), None

    halves = jax.tree.map(lambda a: a.reshape(2, -1, *a.shape[1:]), batch)
    total, _ = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, state), halves)
    return jax.tree.map(lambda p, g: p - 0.05 * g, state, total)


def test_layers_in_a_loop_save_for_one_turn_of_it():
    args = tuple(map(shapes, arguments()))
    step = trace(accumulating, args, names=("state", "batch"), donate=(0,), batch=(1,))
    saved = {}
    layers = LayerValues.of_scans(build_graph(step, RuleBook()), slow_cluster(1))
    for text in ("", [choice.text for choice in layers.choices()][-1]):
        saved[text] = bytes_saved(build_graph(dataclasses.replace(step, scan_recompute=text), RuleBook()))
    last = 4 * WIDTH * 4  # bytes of what the loss reads, of four examples; as many enter each layer
    assert list(saved.values())[1] == (LAYERS + 1) * last < saved[""]
    # Both products run twice in a step, once in each turn of the outer loop.
    (layer,) = layers.layers
    assert {op.count for op in layer.forward} == {2.0 * LAYERS}
