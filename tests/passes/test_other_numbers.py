"""Graphs in several numbers of micro-batches of one step: the same, whatever number was asked for before."""

import dataclasses
import gc

import jax
import jax.numpy as jnp
import pytest

from autopar.errors import AutoparError, UnsupportedError
from autopar.frontend.build_graph import build_graph
from autopar.frontend.tracing import trace
from autopar.ir.graph import Constant
from autopar.ir.kept import KeptWithGraphs
from autopar.ir.rules import RuleBook
from autopar.passes import microbatch
from autopar.passes.cut_graph import CutDims, cut_graph
from autopar.passes.forms import Form, State, with_weights_of
from autopar.passes.microbatch import micro_batched
from autopar.passes.microbatch_analysis import Follower
from autopar.passes.smaller_step import example_leaves
from autopar.passes.value_states import ValueStates, find_states
from benchmarks.zoo import CASES
from tests import small_steps

RULES = RuleBook()
NAMES = ("first", "second", "third")


def traced(step, state, batch, patterns=()):
    found = trace(step, (state, batch), names=("state", "batch"), donate=(0,), batch=(1,))
    return dataclasses.replace(found, per_microbatch=patterns)


def spelled(graph):
    """All that a graph says, to be compared."""

    def atom(a):
        return repr(a.literal) if isinstance(a, Constant) else a

    def block(b):
        ops = [
            (op.id, op.primitive, [atom(a) for a in op.inputs], op.outputs, op.key, op.rule, op.count, op.section,
             op.trips, op.dim, op.kernel_bytes, op.order_cost, [block(inner) for inner in op.blocks])
            for op in b.ops
        ]  # fmt: skip
        return b.inputs, [atom(a) for a in b.outputs], ops

    return graph.values, block(graph.block), graph.num_microbatches, graph.runs_of_examples, graph.per_microbatch


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("name", "patterns"),
    [
        ("gpt", ()),
        ("resnet", ("*",)),
        *(pytest.param(n, (), marks=pytest.mark.slow) for n in ("dropout", "gpt_scan_remat", "lstm")),
        *(pytest.param(n, ("*",), marks=pytest.mark.slow) for n in ("moe", "gpt_scan", "gshard_moe")),
    ],
)
def test_a_graph_is_the_same_whatever_number_was_asked_for_before(name, patterns):
    case = CASES[name]()
    t = traced(case.step, jax.eval_shape(case.init, jax.random.key(0)), small_steps.shapes(case.batch(0)), patterns)
    whole = build_graph(t, RULES)
    for number in (4, 2, 8):
        assert spelled(micro_batched(t, number, RULES, whole)) == spelled(micro_batched(t, number, RULES))


def mlp():
    return traced(small_steps.mlp_step, small_steps.MLP_STATE, small_steps.MLP_BATCH)


def test_dimensions_and_states_are_found_once(monkeypatch):
    t = mlp()
    whole = build_graph(t, RULES)
    micro_batched(t, 2, RULES, whole)
    monkeypatch.delattr(microbatch, "cut_dims")
    monkeypatch.delattr(microbatch, "find_states")
    assert micro_batched(t, 4, RULES, whole).num_microbatches == 4


def test_cut_dimensions_hold_where_the_same_sizes_are_divided():
    dims = CutDims(of={}, num_microbatches=2, sizes=frozenset({16, 6}))
    assert not dims.hold_in(4)  # 6
    assert not dims.hold_in(3)  # 16
    assert CutDims(of={}, num_microbatches=2, sizes=frozenset({16, 7})).hold_in(4)


def test_a_number_that_is_refused_is_refused_behind_others():
    def step(params, x):
        def loss(params):
            pairs = jnp.tanh(x @ params).reshape(2, 4, 3)
            return (pairs * pairs.sum(1, keepdims=True)).mean()  # four examples each

        value, grads = jax.value_and_grad(loss)(params)
        return params - 0.1 * grads, value

    t = traced(step, jnp.ones((5, 3)), jnp.ones((8, 5)))
    whole = build_graph(t, RULES)
    micro_batched(t, 2, RULES, whole)
    told = []
    for graph in (whole, None):
        with pytest.raises(AutoparError) as error:
            micro_batched(t, 4, RULES, graph)
        told.append((type(error.value), str(error.value)))
    assert told[0] == told[1]


def test_states_hold_in_another_number_if_each_kind_of_operation_has_them():
    examples = jnp.ones((32, 5))
    t = traced(small_steps.chain_step, [jnp.ones((5, 5))] * 4, {"x": examples, "y": examples})
    whole = build_graph(t, RULES)
    inputs = {len(whole.block.inputs) - len(t.in_avals) + i: dim for i, dim in example_leaves(t).items()}

    def follower(number):
        part = cut_graph(whole, inputs, number, RULES, t.name)
        return Follower(whole, part, number, body_states=microbatch.body_states)

    states = find_states(whole, follower(2).part, follower(2), inputs)
    assert 0 < len(states.different) < len(whole.block.ops)
    other = follower(4)
    assert states.in_other_number(whole, other.part, other).of == states.of
    made = next(op.outputs[0] for op in whole.block.ops if states.of[op.outputs[0]].form is Form.SPLIT)
    wrong = dataclasses.replace(states, of={**states.of, made: State(form=Form.INVARIANT)})
    assert wrong.in_other_number(whole, other.part, follower(4)) is None


def test_weights_are_powers_of_the_number():
    states = {
        0: State(form=Form.PARTIAL_SUM, weight=0.5),
        1: State(form=Form.SPLIT),
        2: State(form=Form.OWN, weight=4.0),
    }
    assert [s.weight for s in with_weights_of(states, 2, 8).values()] == [0.125, 1.0, 64.0]
    assert with_weights_of({0: State(form=Form.PARTIAL_SUM, weight=0.3)}, 2, 8) is None
    unknown = {0: State(form=Form.OWN, weight=None)}
    assert with_weights_of(unknown, 2, 8) == unknown


def test_states_that_do_not_hold_are_found_anew(monkeypatch):
    t = mlp()
    whole = build_graph(t, RULES)
    micro_batched(t, 2, RULES, whole)
    expected = spelled(micro_batched(t, 4, RULES))
    # As if an operation had results in other states in this number, once the follower has seen some of them.
    monkeypatch.setattr(ValueStates, "in_other_number", lambda *args: setattr(args[-1], "runs", 1))
    graph = micro_batched(t, 4, RULES, whole)
    assert spelled(graph) == expected
    assert graph.runs_of_examples > 1


def scaled_step(least, calls):
    """Returns the largest number of a micro-batch by how many examples that has, or by `least`."""

    def step(params, x):
        calls.append(x.shape[0])

        def loss(params):
            h = jnp.tanh(x @ params)
            with jax.named_scope("scaled"):
                largest = jnp.max(jnp.abs(jax.lax.stop_gradient(h)))
                h = h / largest
                largest = largest / float(max(x.shape[0], least))
            return h.mean(), largest

        (value, largest), grads = jax.value_and_grad(loss, has_aux=True)(params)
        return params - 0.1 * grads, (value, largest)

    return step


def test_a_micro_batch_is_traced_in_no_divisor_of_another_number():
    calls = []
    t = traced(scaled_step(1, calls), jnp.ones((5, 3)), jnp.ones((32, 5)), ("scaled",))
    whole = build_graph(t, RULES)
    graphs = {number: micro_batched(t, number, RULES, whole) for number in (8, 2, 4, 16)}
    assert calls == [32, 4, 2]
    for number, graph in graphs.items():
        assert graph.per_microbatch == ("scaled",)
        assert spelled(graph) == spelled(micro_batched(t, number, RULES))


def test_all_modules_that_mix_are_named_in_other_numbers():
    def step(params, x):
        def loss(params):
            h = jnp.tanh(x @ params)
            for name in NAMES:
                with jax.named_scope(name):
                    h = h / jnp.max(jnp.abs(jax.lax.stop_gradient(h)))
            return h.mean()

        value, grads = jax.value_and_grad(loss)(params)
        return params - 0.1 * grads, value

    t = traced(step, jnp.ones((5, 3)), jnp.ones((32, 5)), NAMES)
    whole = build_graph(t, RULES)
    assert [micro_batched(t, n, RULES, whole).per_microbatch for n in (8, 4)] == [tuple(sorted(NAMES))] * 2
    others = dataclasses.replace(t, per_microbatch=("*",))
    assert micro_batched(others, 4, RULES, whole).per_microbatch == ("*",)


@pytest.mark.parametrize("numbers", [(4, 3, 2), (6, 3, 2, 4), (2, 6, 3)])
def test_a_size_that_is_rounded_is_traced_where_it_may_not_be_even(numbers):
    """Of twelve examples in parts of three each four micro-batches have as many, three have one part too little."""

    def step(params, x):
        padded = -(-x.shape[0] // 3) * 3

        def loss(params):
            h = jnp.tanh(x @ params)
            with jax.named_scope("norm"):
                h = h - h.sum(0) / padded
            return (h**2).mean()

        value, grads = jax.value_and_grad(loss)(params)
        return params - 0.1 * grads, value

    t = traced(step, jnp.ones((5, 3)), jnp.ones((12, 5)), ("norm",))
    whole = build_graph(t, RULES)
    for number in numbers:
        assert spelled(micro_batched(t, number, RULES, whole)) == spelled(micro_batched(t, number, RULES))


@pytest.mark.parametrize("numbers", [(2, 4, 8, 16), (16, 8, 4, 2)])
def test_a_size_that_is_at_least_so_large_is_traced(numbers):
    t = traced(scaled_step(4, []), jnp.ones((5, 3)), jnp.ones((32, 5)), ("scaled",))
    whole = build_graph(t, RULES)
    for number in numbers:
        assert spelled(micro_batched(t, number, RULES, whole)) == spelled(micro_batched(t, number, RULES))


def test_what_is_kept_with_a_graph_goes_with_it():
    kept, found = KeptWithGraphs(), []
    graph = build_graph(mlp(), RULES)
    for key in ("a", "a", "b"):
        kept.of(graph, key, lambda: found.append(1) or len(found))
    assert len(found) == 2
    assert len(kept) == 1
    del graph
    assert len(kept) == 0


def test_what_is_kept_of_cuts_keeps_no_graph_alive():
    """Nor do the errors that states of values have as their cause, and the frames in which they were raised."""
    case = CASES["bookkeeping"]()
    t = traced(case.step, jax.eval_shape(case.init, jax.random.key(0)), small_steps.shapes(case.batch(0)))
    gc.collect()
    others = len(microbatch._found)
    whole = build_graph(t, RULES)
    micro_batched(t, 2, RULES, whole)
    assert len(microbatch._found) == others + 1
    del whole
    gc.collect()
    assert len(microbatch._found) == others


def test_a_step_whose_traces_differ_is_refused_where_modules_are_named():
    sizes = iter(range(3, 100))

    def step(params, x):
        scale = float(next(sizes))
        with jax.named_scope("scaled"):
            return params * scale, (x * scale).sum()

    t = traced(step, jnp.ones(3), jnp.ones((8, 5)), ("scaled",))
    impure = dataclasses.replace(t, is_pure=lambda: False, retrace=_refused)
    with pytest.raises(UnsupportedError, match="two traces differ"):
        micro_batched(impure, 2, RULES)


def _refused(avals):
    raise TypeError("two traces differ")
