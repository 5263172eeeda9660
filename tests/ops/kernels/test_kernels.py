"""`autopar.kernel`: equal to plain `jax.jit` under every kind of plan, split where the rule allows it."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl

import autopar
from autopar import recipes
from autopar.common import jax_compat
from autopar.errors import InvalidArgumentError, UnsupportedError
from autopar.frontend.build_graph import build_graph
from autopar.ir.graph import FactorKind
from autopar.ir.rules import RuleBook
from autopar.ops.kernels.operation import parse
from autopar.passes.example_rules import MixesExamples, places_of_results
from tests.ops.kernels import pallas_steps as steps
from tests.ops.kernels.pallas_steps import plain_attention, train_step
from tests.small_steps import assert_close, slow_cluster

HERE = "test_kernels.py"


def parallel(step, recipe, devices):
    return autopar.parallelize(step, plan=recipe, cluster=slow_cluster(devices), cache_dir=None)


def assert_equals_jit(step, recipe, devices, args):
    """The step under a plan, whose state is replaced, against plain jit."""
    expected = jax.jit(step)(*args)
    made = parallel(step, recipe, devices)
    assert_close(made(*jax.tree.map(jnp.copy, args)), expected)
    return made


def kernels_of(fun, *args):
    return [e for e in jax_compat.equations_in(jax_compat.plain_jaxpr(fun, *args)) if e.primitive.name == "kernel"]


def splits(step, args, primitive):
    """Among how many devices each operation of a primitive is split."""
    compiled = step.compile(*args)
    decisions = compiled.plan.record.decisions
    graph = build_graph(compiled.traced, RuleBook())
    return [
        decisions.strategies[decisions.of_op[op.id]].split if op.id in decisions.of_op else 1
        for op in graph.ops()
        if op.primitive == primitive
    ]


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("recipe", "devices"),
    [
        (None, 1),
        (None, 2),
        (None, 4),
        (None, 8),
        (recipes.data_parallel(), 4),
        (recipes.zero(3), 4),
        (recipes.tensor_parallel(), 2),
        (recipes.sequence_parallel("ulysses", size=2), 4),
        (recipes.pipeline(2, num_microbatches=2), 2),
        (recipes.pipeline(2, num_microbatches=2), 4),
    ],
)
def test_a_step_with_pallas_kernels_equals_plain_jit(recipe, devices):
    assert_equals_jit(train_step, recipe, devices, steps.arguments())


@pytest.mark.slow
def test_kernels_are_split_and_what_they_send_is_what_was_predicted():
    step, args = parallel(train_step, recipes.data_parallel(), 4), steps.arguments()
    assert splits(step, args, "kernel") == [4] * 6
    made = autopar.verify(step, *args)
    assert {c.name: c.compiled for c in made.collectives} == {c.name: c.predicted for c in made.collectives}
    assert {c.name for c in made.collectives} == {"all-reduce", "total"}


@pytest.mark.parametrize(
    ("kind", "devices", "says"),
    [
        ("ulysses", 8, r"heads that 8 devices can share(?s:.*)heads: \[4\]"),
        ("ring", 4, r"a kernel \(kernel\) that needs the positions of keys whole"),
    ],
)
def test_sequences_that_a_kernel_cannot_share_are_refused(kind, devices, says):
    made = parallel(train_step, recipes.sequence_parallel(kind), devices)
    with pytest.raises(UnsupportedError, match=says):
        made.plan(*steps.arguments())


@pytest.mark.slow
def test_gradients_of_shared_operands_are_reduced_once_a_step_not_once_a_micro_batch():
    recipe, args = recipes.cut(recipes.data_parallel(), num_microbatches=2), steps.arguments()
    made = autopar.verify(assert_equals_jit(train_step, recipe, 2, args), *args)
    parameters = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(args[0]))
    assert {c.name: c.compiled for c in made.collectives}["total"] == pytest.approx(parameters, rel=0.01)


def test_factors_that_the_twin_does_not_keep_apart_are_whole():
    q = jnp.ones((2, 4, 8, 16))
    jaxpr = jax.make_jaxpr(steps.attention)(q, q, q)
    assert re.search(r"rule=b h q \[d\], b h \[k\] \[d\], b h \[k\] \[d\] -> b h q \[d\]", str(jaxpr))

    def causal(q, k, v):
        hidden = jnp.arange(q.shape[2])[:, None] < jnp.arange(k.shape[2])[None]
        weights = jax.nn.softmax(jnp.where(hidden, -1e30, jnp.einsum("bhqd,bhkd->bhqk", q, k)))
        return jnp.einsum("bhqk,bhkd->bhqd", weights, v)

    masked = autopar.kernel(causal, "b h q d, b h k d, b h k d -> b h q d", like=causal)
    assert "rule=b h [q] [d], b h [k] [d]" in str(jax.make_jaxpr(masked)(q, q, q))


def test_a_split_that_the_kernel_cannot_take_is_no_strategy():
    """Blocks of four queries: 8 of them may be split in two, and no further."""
    attention = autopar.kernel(
        steps.pallas_attention, "b h q d, b h k d, b h k d -> b h q d", whole=("b", "h", "k", "d")
    )

    def step(state, batch):
        return state, attention(batch["q"], state, state)

    args = jnp.ones((1, 1, 8, 8)), {"q": jax.random.normal(jax.random.key(0), (1, 1, 8, 8))}
    for devices, split in ((2, 2), (4, 2)):
        made = assert_equals_jit(step, None, devices, args)
        assert max(splits(made, args, "kernel")) <= split


def test_residuals_have_the_factors_with_which_they_grow():
    @jax.custom_vjp
    def scaled(x, w):
        return x * w

    def forward(x, w):
        return x * w, (x, w, jnp.sum(x, -1))

    scaled.defvjp(forward, lambda kept, g: (g * kept[1] + 0 * kept[2][:, None], jnp.sum(g * kept[0], 0)))
    called = autopar.kernel(scaled, "b d, d -> b d", whole=("d",))
    text = str(jax.make_jaxpr(jax.grad(lambda x, w: called(x, w).sum(), (0, 1)))(jnp.ones((4, 8)), jnp.ones(8)))
    assert "rule=b [d], [d] -> b [d], b\n" in text
    assert "rule=b [d], [d], b, b [d] -> b [d], [d], summed over b\n" in text


def test_a_residual_that_reads_no_operand_keeps_every_factor():
    """As the blocks of a mask that splash attention hands to its backward pass."""

    @jax.custom_vjp
    def scaled(x):
        return x * jnp.arange(4.0)

    scaled.defvjp(lambda x: (x * jnp.arange(4.0), jnp.arange(4.0)), lambda kept, g: (g * kept,))
    called = autopar.kernel(scaled, "b d -> b d", whole=("d",))

    def step(state, batch):
        return jax.tree.map(lambda p, g: p - g, state, jax.grad(lambda s: jnp.sum(called(batch["x"] @ s)))(state))

    args = jnp.ones((4, 4)), {"x": jax.random.normal(jax.random.key(0), (8, 4))}
    made = assert_equals_jit(step, recipes.data_parallel(), 4, args)
    assert splits(made, args, "kernel") == [4, 4]
    assert_equals_jit(step, recipes.cut(recipes.data_parallel(), num_microbatches=2), 2, args)


def test_a_residual_that_cannot_be_told_is_computed_again():
    @jax.custom_vjp
    def scaled(x):
        return 2.0 * x

    scaled.defvjp(lambda x: (2.0 * x, jnp.max(x)), lambda largest, g: (2.0 * g + 0.0 * largest,))
    called = autopar.kernel(scaled, "b d -> b d")
    text = str(jax.make_jaxpr(jax.grad(lambda x: called(x).sum()))(jnp.ones((4, 8))))
    assert "rule=b d -> b d\n" in text
    assert "rule=b d, b d -> b d\n" in text


def test_under_vmap_a_kernel_has_one_more_factor():
    x = jax.random.normal(jax.random.key(0), (3, 4, 16, 16))
    assert "rule=batch0 b l w, w -> batch0 b l w" in str(
        jax.make_jaxpr(jax.vmap(steps.scale, (0, None)))(x, x[0, 0, 0])
    )
    assert_close(jax.vmap(steps.scale, (0, None))(x, x[0, 0, 0]), 2.0 * x * x[0, 0, 0])


def test_a_factor_may_leave_summands():
    product = autopar.kernel(lambda a, b: a @ b, "m k, k n -> m n", summed=("k",))

    def step(state, batch):
        return jax.tree.map(lambda p: 0.9 * p, state), jnp.tanh(product(batch["a"], state["b"]))

    args = {"b": jax.random.normal(jax.random.key(0), (64, 2))}, {"a": jax.random.normal(jax.random.key(1), (2, 64))}
    (op,) = [
        op
        for op in build_graph(parallel(step, None, 1).compile(*args).traced, RuleBook()).ops()
        if op.primitive == "kernel"
    ]
    assert [f.kind for f in op.rule.factors] == [FactorKind.PASS, FactorKind.SUM, FactorKind.PASS]
    for devices in (2, 4):
        assert_equals_jit(step, None, devices, args)


def test_kernels_inside_of_a_scan():
    def step(state, batch):
        def loss(state):
            out, _ = jax.lax.scan(lambda x, w: (jnp.tanh(steps.scale(x, w["s"]) @ w["m"]), None), batch["x"], state)
            return jnp.mean(out**2)

        return jax.tree.map(lambda p, g: p - 0.1 * g, state, jax.grad(loss)(state))

    state = {"s": 0.3 * jnp.ones((4, 16)), "m": jax.random.normal(jax.random.key(1), (4, 16, 16))}
    args = state, {"x": jax.random.normal(jax.random.key(0), (8, 16, 16))}
    for recipe, devices in ((None, 4), (recipes.pipeline(2, num_microbatches=2), 2)):
        assert_equals_jit(step, recipe, devices, args)


def test_examples_are_a_factor_that_may_be_split():
    x, w = jnp.ones((8, 16, 16)), jnp.ones(16)
    forward, backward = kernels_of(jax.grad(lambda x, w: steps.scale(x, w).sum(), (0, 1)), x, w)
    assert places_of_results(forward, (0, None)) == [0]
    assert places_of_results(backward, (0, None, 0)) == [0, None]  # the gradient of the vector is a sum over examples
    assert places_of_results(forward, (2, 0)) == [2]
    for places in ((0, 0), (None, 0)):
        with pytest.raises(MixesExamples):
            places_of_results(forward, places)
    (attention,) = kernels_of(steps.attention, *[jnp.ones((2, 4, 8, 8))] * 3)
    with pytest.raises(MixesExamples):
        places_of_results(attention, (3, 3, 3))


@pytest.mark.slow
def test_kernels_under_rematerialisation():
    def step(state, batch):
        def layer(x, p):
            q, k, v = (jnp.einsum("blw,whd->bhld", x, p[n]) for n in "qkv")
            x = x + jnp.einsum("bhld,hdw->blw", steps.attention(q, k, v), p["o"])
            return x + jnp.tanh(steps.scale(x, p["scale"]) @ p["w"])

        def loss(state):
            x = batch["x"]
            for p in state:
                x = jax.checkpoint(layer)(x, p)
            return jnp.mean((x - batch["y"]) ** 2)

        return jax.tree.map(lambda p, g: p - 0.1 * g, state, jax.grad(loss)(state))

    for recipe, devices in ((recipes.data_parallel(), 4), (recipes.pipeline(2, num_microbatches=2), 2)):
        assert_equals_jit(step, recipe, devices, steps.arguments())


def test_flops_and_bytes_may_be_given():
    called = autopar.kernel(
        lambda x: jnp.sin(x), "b d -> b d", flops=lambda x: 1e9 * x.size, bytes=lambda x: 12.0 * x.size
    )
    (eqn,) = kernels_of(called, jnp.ones((2, 3)))
    work = eqn.params["function"].work([jax.ShapeDtypeStruct((2, 3), "float32")])
    assert (work.flops, work.nbytes) == (6e9, 72.0)


def plain_call(x):
    body = lambda x_ref, o_ref: o_ref.__setitem__(..., jnp.sin(x_ref[...]))
    return pl.pallas_call(
        body, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True,
        cost_estimate=pl.CostEstimate(flops=100, transcendentals=28, bytes_accessed=4096),
    )(x)  # fmt: skip


@pytest.mark.cases(2)
@pytest.mark.parametrize("devices", [1, 2, 8])
def test_a_pallas_call_without_a_rule_runs_whole_and_the_plan_says_so(devices):
    def step(state, batch):
        return state + jnp.mean(batch["x"]), plain_call(batch["x"] @ state)

    args = jnp.ones((8, 8)), {"x": jax.random.normal(jax.random.key(0), (8, 8))}
    made = assert_equals_jit(step, None, devices, args)
    notes = [n for n in made.plan(*args).record.notes if "Pallas call" in n]
    assert len(notes) == (devices > 1)  # one device has nothing to share
    assert all(f"{HERE}:" in note and "autopar.kernel(fun, rule=...)" in note for note in notes)


def test_calls_that_differ_only_in_their_bodies_are_two():
    def call(function, x):
        def body(x_ref, o_ref):
            o_ref[...] = function(x_ref[...])

        return pl.pallas_call(body, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x)

    def step(state, batch):
        return state, call(jnp.sin, batch["x"]), call(jnp.cos, batch["x"])

    args = jnp.ones(()), {"x": jnp.arange(8.0).reshape(2, 4)}
    made = assert_equals_jit(step, None, 2, args)
    graph = build_graph(made.compile(*args).traced, RuleBook())
    assert len({op.key for op in graph.ops() if op.primitive == "pallas_call"}) == 2


# Bad input


def refused(text, match, **options):
    with pytest.raises(InvalidArgumentError, match=match) as caught:
        autopar.kernel(plain_attention, text, **options)
    assert f"{HERE}:" in caught.value.where


def test_rules_that_cannot_be_name_the_line():
    refused("b h q d", "one arrow")
    refused("b b -> b", "'b' twice")
    refused("b 3 -> b", "letters, digits")
    refused("b h q d, b h k d, b h k d -> b h q d", "factor 'k' in every result")
    refused("b k -> b", "factor 'q'|names of the rule", whole=("q",))
    refused("b -> b", "a function", flops=3.0)


def test_shapes_that_are_not_those_of_the_rule_name_the_line_of_the_call():
    called = autopar.kernel(lambda x, w: x * w, "b d, d -> b d")
    with pytest.raises(InvalidArgumentError, match="2 dimensions") as caught:
        called(jnp.ones(3), jnp.ones(3))
    assert f"{HERE}:" in caught.value.where
    with pytest.raises(InvalidArgumentError, match="factor 'd' of size 3"):
        called(jnp.ones((2, 3)), jnp.ones(1))
    with pytest.raises(InvalidArgumentError, match="2 operands"):
        called(jnp.ones((2, 3)))
    other = autopar.kernel(lambda x: jnp.sum(x, 0), "b d -> b d")
    with pytest.raises(InvalidArgumentError, match="2 dimensions"):
        other(jnp.ones((2, 3)))


def test_a_kernel_that_reads_a_traced_array_around_it_is_refused():
    def outer(x):
        return autopar.kernel(lambda y: y * x, "b -> b")(jnp.ones(3))

    with pytest.raises(InvalidArgumentError, match="a function of its arguments alone"):
        jax.jit(outer)(jnp.ones(3))


def test_a_twin_of_other_shapes_is_refused():
    called = autopar.kernel(lambda x: 2.0 * x, "b d -> b d", like=lambda x: 2.0 * x[0])
    with pytest.raises(InvalidArgumentError, match="a twin"):
        called(jnp.ones((2, 3)))


def test_a_kernel_without_any_gradient_is_refused_when_it_is_differentiated():
    called = autopar.kernel(lambda x: jax.pure_callback(lambda a: a, x, x), "b d -> b d")
    with pytest.raises(UnsupportedError, match="a kernel with a gradient") as caught:
        jax.grad(lambda x: called(x).sum())(jnp.ones((2, 3)))
    assert f"{HERE}:" in caught.value.where


def test_verify_finds_a_kernel_that_does_not_compute_what_its_twin_computes():
    wrong = autopar.kernel(lambda x: 2.1 * x, "b d -> b d", like=lambda x: 2.0 * x)

    def step(state, batch):
        return state, wrong(batch["x"])

    made = parallel(step, None, 2)
    with pytest.raises(InvalidArgumentError, match="the numbers of its twin") as caught:
        autopar.verify(made, jnp.ones(()), {"x": jnp.ones((4, 4))})
    assert f"{HERE}:" in caught.value.where


def test_verify_finds_a_gradient_that_is_not_that_of_the_twin():
    @jax.custom_vjp
    def doubled(x):
        return 2.0 * x

    doubled.defvjp(lambda x: (2.0 * x, None), lambda _, g: (2.1 * g,))
    wrong = autopar.kernel(doubled, "b d -> b d", like=lambda x: 2.0 * x)

    def step(state, batch):
        return state - jax.grad(lambda s: wrong(batch["x"] * s).sum())(state)

    with pytest.raises(InvalidArgumentError, match=r"twin .* in gradient 0") as caught:
        autopar.verify(parallel(step, None, 2), jnp.ones(()), {"x": jnp.ones((4, 4))})
    assert f"{HERE}:" in caught.value.where


def test_the_text_of_a_rule_reads_back():
    rule = parse("b h [q] d, _ d -> b h [q]", ("d",), (), "here")
    assert str(rule) == "b h [q] [d], _ [d] -> b h [q]"
    assert rule.split == {"b", "h"}
