"""Mixtures of experts with sorted rows: found as people write them, and equal to plain jax however they are split."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu import megablox
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import autopar
from autopar import recipes
from autopar.common import jax_compat
from autopar.cost.inner_collectives import parts_of_operands
from autopar.errors import InvalidArgumentError
from autopar.frontend.build_graph import build_graph
from autopar.frontend.tracing import trace
from autopar.ir.graph import FactorKind
from autopar.ir.layout import LogicalMesh
from autopar.ir.rules import RuleBook
from autopar.ir.strategies import Signature, enumerate_strategies, strategy_of
from autopar.lowering.emit import run_on_parts
from autopar.ops.kernels.local import admits
from autopar.ops.kernels.operation import (
    DenseWork,
    dense_work,
    equations_of_first_turn,
    held_bytes,
    is_kernel,
    ragged_work,
)
from autopar.ops.kernels.ragged_experts import EXPERT_FACTOR
from autopar.ops.kernels.row_exchange import Devices, RowExchange, busiest_share, quota, turns_of
from tests.ops.kernels.ragged_steps import (
    EXPERTS,
    LAYERS_AS_WRITTEN,
    TOP_K,
    WIDTH,
    batch,
    gated,
    route,
    scattered,
    shared,
    state,
    step,
)
from tests.small_steps import assert_close, slow_cluster

WAYS = {
    "unrolled": {}, "scanned": dict(scanned=True), "checkpoint": dict(checkpoint=True),
    "scanned, checkpoint": dict(scanned=True, checkpoint=True), "casts": dict(dtype=jnp.bfloat16),
    "products saved": dict(scanned=True, checkpoint=True, policy=jax.checkpoint_policies.dots_saveable),
}  # fmt: skip


def graph_of(function, layers=1):
    args = jax.eval_shape(lambda: (state(layers), batch()))
    return build_graph(trace(function, args, names=("state", "batch"), donate=(0,), batch=(1,)), RuleBook())


def passes(graph):
    return [op for op in graph.ops() if is_kernel(op.eqn)]


def left(graph):
    return [op for op in graph.ops() if op.primitive in ("ragged_dot_general", "sort")]


def arrays_of(op):
    """Operands of a pass; zeros to which rows are added stay zeros."""
    numbers, made = np.random.default_rng(0), op.eqn.params["function"].function
    arrays = [
        jnp.asarray(numbers.integers(0, EXPERTS, a.shape) if a.dtype.kind == "i" else numbers.normal(size=a.shape))
        for a in (v.aval for v in op.eqn.invars)
    ]
    are_zeros = [made.reader.is_zero(a.value) for a in made.arguments]
    return [jnp.zeros_like(a) if zero else a for a, zero in zip(arrays, are_zeros, strict=True)]


def signature_of(op):
    return Signature(
        rule=op.rule, operand_shapes=tuple(v.aval.shape for v in op.eqn.invars),
        result_shapes=tuple(v.aval.shape for v in op.eqn.outvars), sums_partially=True, admits=admits(op.eqn),
    )  # fmt: skip


def equals_jit(function, devices, layers=1, **options):
    args = state(layers), batch()
    made = autopar.parallelize(function, cluster=slow_cluster(devices), cache_dir=None, **options)
    assert_close(made(*jax.tree.map(jnp.copy, args)), jax.jit(function)(*args))
    return made


# Found


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("layer", "way"),
    [
        pytest.param(layer, way, marks=[] if "unrolled" in way or layer == "repeated" else pytest.mark.slow)
        for layer in LAYERS_AS_WRITTEN
        for way in WAYS
    ],
)
def test_a_mixture_is_found_however_it_is_written(layer, way):
    graph = graph_of(step(LAYERS_AS_WRITTEN[layer], **WAYS[way]))
    assert not left(graph)
    assert len(passes(graph)) in (2, 3)


def test_the_forward_pass_keeps_tokens_and_the_inner_width_apart():
    forward, backward = passes(graph_of(step(scattered)))
    rule = "t [k], t [d0], e [d0] d2, e [d0] d2, e d2 d3, t [k] -> t d3, summed over d2"
    assert str(forward.eqn.params["rule"]) == rule
    kinds = [f.kind for f in forward.rule.factors]
    assert [kinds.count(kind) for kind in (FactorKind.EXCHANGE, FactorKind.SUM)] == [1, 1]  # experts, the inner width
    assert {v.aval.shape for v in backward.eqn.outvars} >= {v.aval.shape for v in forward.eqn.invars[2:5]}


@pytest.mark.cases(1)
@pytest.mark.parametrize("layer", LAYERS_AS_WRITTEN)
def test_parts_of_a_factor_make_parts_or_summands_of_the_results(layer):
    found = passes(graph_of(step(LAYERS_AS_WRITTEN[layer])))
    assert found
    for op in found:
        function, arrays = op.eqn.params["function"], arrays_of(op)
        whole = function(*arrays)
        for name in sorted(function.rule.split - {EXPERT_FACTOR}):
            split = [
                jnp.split(a, 2, names.index(name)) if name in names else [a, a]
                for a, names in zip(arrays, function.rule.operands, strict=True)
            ]
            parts = zip(*(function(*(half[i] for half in split)) for i in range(2)), strict=True)
            for made, (first, second), names in zip(whole, parts, function.rule.results, strict=True):
                joined = np.concatenate([first, second], names.index(name)) if name in names else first + second
                np.testing.assert_allclose(joined, made, rtol=1e-4, atol=1e-4, err_msg=name)


def inner_width(rule, is_matrix=lambda names: EXPERT_FACTOR in names and len(names) == 3):
    """The factor of the rows of the second matrix."""
    return next(names[1] for names in reversed(rule.operands) if is_matrix(names))


@pytest.mark.parametrize("layer", ["fused", "fused_in_parts", "biased"])
def test_gate_and_up_in_one_matrix_are_split_by_their_columns(layer):
    forward, backward = passes(graph_of(step(LAYERS_AS_WRITTEN[layer])))
    for op in (forward, backward):
        rule = op.eqn.params["function"].rule
        both = next(names for names in rule.operands if len(names) == 4)
        assert inner_width(rule) in rule.split
        assert set(both[2:]) == {inner_width(rule), "_"}
        assert "_" in rule.whole


def test_choices_lie_one_after_the_other_by_a_remainder_too():
    def layer(x, p, chosen, weights):
        flat = chosen.T.reshape(-1)
        tokens = jnp.argsort(flat) % x.shape[0]
        return jnp.zeros_like(x).at[tokens].add(gated(x[tokens], p, jnp.bincount(flat, length=EXPERTS)))

    forward, _ = passes(graph_of(step(layer)))
    assert forward.eqn.invars[0].aval.shape == (TOP_K, 64)


def test_tokens_that_data_number_are_whole():
    forward, _ = passes(graph_of(step(LAYERS_AS_WRITTEN["numbered"])))
    rule = forward.eqn.params["function"].rule
    assert rule.results[0][0] in rule.whole


def test_rows_of_a_table_of_experts_are_looked_up_where_experts_are():
    for op in passes(graph_of(step(LAYERS_AS_WRITTEN["biased"]))):
        function, avals = op.eqn.params["function"], [v.aval for v in op.eqn.invars]
        of_experts = {i for i, names in enumerate(function.rule.operands) if EXPERT_FACTOR in names}
        parts = [
            jax.ShapeDtypeStruct((a.shape[0] // 2, *a.shape[1:]), a.dtype) if i in of_experts or "t" in names else a
            for i, (a, names) in enumerate(zip(avals, function.rule.operands, strict=True))
        ]
        program = jax_compat.open_jaxpr(function.exchanging_program(parts, 2, "cpu"))
        sent = [e.invars[0].aval for e in jax_compat.equations_in(program) if e.primitive.name == "all_to_all"]
        rows = {(a.shape[2:], a.dtype.kind) for a in sent if a.ndim == 3}
        assert rows <= {((WIDTH,), "f"), ((1,), "f")}  # rows and their weights: neither biases nor numbers of experts


def test_an_axis_of_experts_splits_tokens_too():
    forward, backward = passes(graph_of(step(scattered)))
    mesh = LogicalMesh(axis_sizes=(2, 4))
    for op in (forward, backward):
        signature = signature_of(op)
        strategies = [s for s in enumerate_strategies(signature, mesh) if s.ring == (1,)]
        (both,) = [s for s in strategies if s.operands[0].dims[0] == (0, 1)]
        assert both.operands[2].dims[0] == (1,)
        assert both.split == 8
        assert strategy_of(signature, both.operands, both.results, mesh) == both
    gradients = [at for at in both.results if len(at.dims) == 3]
    assert all(at.dims[0] == (1,) and at.partial == (0,) for at in gradients)  # summands of the copies only


def tiled(x, p, chosen, weights):
    """By megablox, in tiles of 64 rows."""
    order = jnp.argsort(chosen.ravel())
    sizes = jnp.bincount(chosen.ravel(), length=EXPERTS).astype(jnp.int32)
    options = {"tiling": (64, 8, 16), "interpret": True}
    out = megablox.gmm(megablox.gmm(x[order // TOP_K], p["up"], sizes, **options), p["down"], sizes, **options)
    return jnp.zeros_like(x).at[order // TOP_K].add(out)


@pytest.mark.cases(1)
@pytest.mark.parametrize(("layer", "check_vma"), [(scattered, True), (tiled, False)], ids=["ragged", "megablox"])
def test_a_mixture_in_a_shard_map_of_one_device_is_found(layer, check_vma):
    def numbered(x, p, *choices):
        return layer(x + jax.lax.axis_index("data"), p, *choices)

    def inside(*args):
        one = jax.make_mesh((1, 1), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
        specs = (P("data"), P(), P("data"), P("data"))
        return jax.shard_map(numbered, mesh=one, in_specs=specs, out_specs=P("data"), check_vma=check_vma)(*args)

    graph = graph_of(step(inside))
    assert len(passes(graph)) == 2
    assert not [op for op in graph.ops() if op.primitive in ("shard_map", "psum", "psum_invariant")]


def test_tiles_of_rows_are_whole_on_each_device():
    forward, _ = passes(graph_of(step(tiled)))
    assert forward.eqn.invars[0].aval.shape == (64, TOP_K)
    for devices, ways in ((2, {(2, ()), (2, (0,))}), (4, {(4, (0,))})):  # rows of a device: 64, or 32 of its own
        strategies = enumerate_strategies(signature_of(forward), LogicalMesh(axis_sizes=(devices,)))
        found = {(devices, s.ring) for s in strategies if s.operands[0].dims[0]}
        assert found == ways


# What is in the way


def dropped(x, p, chosen, weights):
    """At most three rows of each expert."""
    flat = chosen.reshape(-1)
    order = jnp.argsort(flat)
    out = gated(x[order // TOP_K], p, jnp.minimum(jnp.bincount(flat, length=EXPERTS), 3))
    return jnp.zeros_like(x).at[order // TOP_K].add(out)


def by_table(x, p, chosen, weights):
    """Experts by a table of the state, which may have any numbers."""
    return scattered(x, p, p["bias"][chosen, 0].astype(jnp.int32), weights)


def mixed(x, p, chosen, weights):
    """Neighbours in the sorted order are added up."""
    flat = chosen.reshape(-1)
    order = jnp.argsort(flat)
    out = jnp.cumsum(gated(x[order // TOP_K], p, jnp.bincount(flat, length=EXPERTS)), axis=0)
    return jnp.zeros_like(x).at[order // TOP_K].add(out)


def backwards(x, p, chosen, weights):
    """Rows in the opposite order of the groups."""
    flat = chosen.reshape(-1)
    order = jnp.argsort(-flat)
    out = gated(x[order // TOP_K], p, jnp.bincount(flat, length=EXPERTS))
    return jnp.zeros_like(x).at[order // TOP_K].add(out)


def padded(x, p, chosen, weights):
    """Two more experts than there are in the second product."""
    flat = chosen.reshape(-1)
    order, down = jnp.argsort(flat), jnp.pad(p["down"], ((0, 2), (0, 0), (0, 0)))
    hidden = jax.lax.ragged_dot(x[order // TOP_K], p["up"], jnp.bincount(flat, length=EXPERTS))
    out = jax.lax.ragged_dot(hidden, down, jnp.bincount(flat, length=EXPERTS + 2))
    return jnp.zeros_like(x).at[order // TOP_K].add(out)


def added(x, p, chosen, weights):
    """Sums over the rows of each expert, onto numbers that are no zeros."""
    flat = chosen.reshape(-1)
    order = jnp.argsort(flat)
    out = gated(x[order // TOP_K], p, jnp.bincount(flat, length=EXPERTS))
    return x + p["bias"].at[flat[order]].add(out).sum()


def elsewhere(x, p, chosen, weights):
    """Brought back to other tokens than they came from."""
    flat = chosen.reshape(-1)
    order = jnp.argsort(flat)
    out = gated(x[order // TOP_K], p, jnp.bincount(flat, length=EXPERTS))
    return jnp.zeros_like(x).at[order % x.shape[0]].add(out)


def by_token(chosen):
    """How often each token chose each expert."""
    return jnp.sum(jax.nn.one_hot(chosen, EXPERTS, dtype=jnp.int32), axis=1)


OTHER_SIZES = {
    "at most": lambda chosen: jnp.sum(jnp.minimum(by_token(chosen), 1), axis=0),
    "at all": lambda chosen: jnp.sum(by_token(chosen) > 0, axis=0, dtype=jnp.int32),
    "of some": lambda chosen: jnp.sum(jnp.minimum(jnp.sum(by_token(chosen).reshape(8, 8, -1), 1), 5), axis=0),
    "in another order": lambda chosen: jnp.bincount(chosen.ravel(), length=EXPERTS).reshape(2, -1).T.ravel(),
    "of few bits": lambda chosen: jnp.bincount(chosen.ravel(), length=EXPERTS).astype(jnp.int8).astype(jnp.int32),
    "of many steps": lambda chosen: functools.reduce(
        lambda n, i: n ^ i, range(600), jnp.bincount(chosen.ravel(), length=EXPERTS)),
    "of two orders": lambda chosen: jnp.zeros(EXPERTS, jnp.int32).at[
        jnp.maximum(chosen.ravel(), chosen.T.ravel())].add(1),
}  # fmt: skip


@pytest.mark.parametrize("sizes", OTHER_SIZES)
def test_numbers_that_only_look_like_counts_are_not_taken_for_them(sizes):
    def layer(x, p, chosen, weights):
        order = jnp.argsort(chosen.ravel())
        out = gated(x[order // TOP_K], p, OTHER_SIZES[sizes](chosen))
        return jnp.zeros_like(x).at[order // TOP_K].add(out)

    assert not passes(graph_of(step(layer)))


def test_counts_may_be_summed_in_turns_and_in_another_type():
    def layer(x, p, chosen, weights):
        order, by_pairs = jnp.argsort(chosen.ravel()), jnp.sum(by_token(chosen).reshape(8, 8, -1), 1)
        out = gated(x[order // TOP_K], p, jnp.sum(by_pairs.astype(jnp.float32), axis=0).astype(jnp.int32))
        return jnp.zeros_like(x).at[order // TOP_K].add(out)

    assert passes(graph_of(step(layer)))


def limited(chosen):
    for _ in range(20):  # each is to be read once: there are 3**20 ways back
        chosen = jax.lax.clamp(chosen, chosen, chosen)
    return chosen


@pytest.mark.parametrize(
    ("numbers", "is_found"),
    [(limited, True), (lambda chosen: jax.lax.clamp(0, chosen, chosen - 1), False)],
    ids=["within limits", "less than zero"],
)
def test_numbers_of_experts_are_within_known_limits(numbers, is_found):
    found = graph_of(step(lambda x, p, chosen, weights: scattered(x, p, numbers(chosen), weights)))
    assert bool(passes(found)) == is_found


@pytest.mark.parametrize(
    ("layer", "why"),
    [
        (dropped, "groups whose sizes are not how often each expert is chosen"),
        (by_table, "experts whose numbers may be others than 0 to 7"),
        (mixed, "cumsum"),
        (backwards, "experts whose numbers may be others"),
        (padded, "another number of groups than the products before it"),
        (added, "rows that are added to others"),
        (elsewhere, "rows of other tokens"),
    ],
)
def test_other_mixtures_stay_as_they_are_and_say_why(layer, why):
    graph = graph_of(step(layer))
    assert not passes(graph)
    notes = {op.rule.note for op in graph.ops() if op.primitive == "ragged_dot_general"} - {""}
    assert [why in note for note in notes] == [True]


def test_a_recipe_names_what_is_in_the_way():
    made = autopar.parallelize(step(mixed), cluster="local:2", cache_dir=None, plan=recipes.expert_parallel())
    with pytest.raises(InvalidArgumentError, match=r"cumsum at .*test_ragged_experts\.py"):
        made.plan(state(1), batch())


def test_a_recipe_names_what_is_in_the_way_of_one_layer_of_two():
    def both(x, p, chosen, weights):
        return mixed(scattered(x, p, chosen, weights), p, chosen, weights)

    made = autopar.parallelize(step(both), cluster="local:2", cache_dir=None, plan=recipes.expert_parallel())
    with pytest.raises(InvalidArgumentError, match=r"cumsum at .*test_ragged_experts\.py"):
        made.plan(state(1), batch())


# Equal to plain jax


def test_a_pass_with_experts_in_its_results_alone_is_split_by_them():
    def function(state, batch):
        def loss(up):
            x = batch.reshape(-1, batch.shape[-1])
            chosen = jax.lax.top_k(x @ state["router"][0], TOP_K)[1]
            order = jnp.argsort(chosen.ravel())
            out = jax.lax.ragged_dot(x[order // TOP_K], up, jnp.bincount(chosen.ravel(), length=EXPERTS))
            return jnp.mean(jnp.zeros((x.shape[0], out.shape[1])).at[order // TOP_K].add(out) ** 2)

        return state | {"up": state["up"] - jax.grad(loss)(state["up"][0])}

    _, backward = passes(graph_of(function))
    assert str(backward.eqn.params["rule"]) == "t [k], t d0, t d1 -> e d0 d1, summed over t"
    (strategy,) = [s for s in enumerate_strategies(signature_of(backward), LogicalMesh(axis_sizes=(2,))) if s.ring]
    arrays, mesh = arrays_of(backward), Mesh(np.array(jax.devices()[:2]), ("a",))
    run = jax.jit(lambda *args: run_on_parts(backward.eqn, strategy.operands, strategy.results, mesh, args))
    assert_close(run(*arrays), backward.eqn.params["function"](*arrays))


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("layer", "way", "devices", "recipe"),
    [
        ("scattered", "unrolled", 8, recipes.data_parallel()),
        ("unsorted", "scanned, checkpoint", 4, recipes.expert_parallel()),
        pytest.param("named", "scanned, checkpoint", 4, recipes.expert_parallel(), marks=pytest.mark.slow),
        pytest.param("named", "unrolled", 2, recipes.combine(pp=2, num_microbatches=2), marks=pytest.mark.slow),
        pytest.param("biased", "scanned, checkpoint", 4, recipes.combine(ep=2, tp=2), marks=pytest.mark.slow),
        pytest.param("fused_in_parts", "scanned", 2, recipes.tensor_parallel(), marks=pytest.mark.slow),
        pytest.param("by_choice", "unrolled", 2, recipes.combine(pp=2, num_microbatches=2), marks=pytest.mark.slow),
        pytest.param("numbered", "unrolled", 2, recipes.expert_parallel(), marks=pytest.mark.slow),
        pytest.param(
            "shared", "unrolled", 4, recipes.combine(pp=2, ep=2, num_microbatches=2), marks=pytest.mark.slow,
        ),
        pytest.param("scattered", "scanned", 1, None, marks=pytest.mark.slow),
        pytest.param("unsorted", "scanned", 2, recipes.data_parallel(), marks=pytest.mark.slow),
        pytest.param("keyed", "scanned", 4, recipes.zero(3), marks=pytest.mark.slow),
        pytest.param("repeated", "checkpoint", 8, recipes.expert_parallel(4), marks=pytest.mark.slow),
        pytest.param("scaled", "unrolled", 2, recipes.expert_parallel(), marks=pytest.mark.slow),
        pytest.param("scattered", "unrolled", 4, recipes.combine(ep=2, tp=2), marks=pytest.mark.slow),
        pytest.param("keyed", "checkpoint", 8, recipes.combine(ep=2, dp=4, zero=3), marks=pytest.mark.slow),
        pytest.param("scattered", "scanned", 2, recipes.tensor_parallel(), marks=pytest.mark.slow),
        pytest.param("scattered", "unrolled", 4, None, marks=pytest.mark.slow),
        pytest.param(
            "unsorted", "unrolled", 2, recipes.combine(dp=2, num_microbatches=2), marks=pytest.mark.slow,
        ),
        pytest.param(
            "scattered", "scanned", 4, recipes.combine(pp=2, ep=2, num_microbatches=2), marks=pytest.mark.slow,
        ),
        pytest.param("keyed", "unrolled", 2, recipes.combine(pp=2, num_microbatches=2), marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_a_step_equals_plain_jit(layer, way, devices, recipe):
    layers = 2 if recipe is not None and recipe.request.num_stages else 1
    equals_jit(step(LAYERS_AS_WRITTEN[layer], **WAYS[way]), devices, layers, plan=recipe)


WITH_A_SHARED_EXPERT = [
    (None, (1, 2, 4, 8), 0.0),
    (recipes.expert_parallel(), (2, 4, 8), 0.0),
    (recipes.expert_parallel(), (4, 8), 100.0),
    (recipes.combine(ep=2, tp=2), (4, 8), 0.0),
    (recipes.combine(ep=2, zero=3), (2, 4, 8), 0.0),
    (recipes.combine(pp=2, num_microbatches=2), (2,), 0.0),
    (recipes.combine(pp=2, ep=2, num_microbatches=2), (4, 8), 0.0),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "devices", "skew"), [(recipe, n, skew) for recipe, counts, skew in WITH_A_SHARED_EXPERT for n in counts]
)
def test_a_mixture_with_a_shared_expert_equals_plain_jit(recipe, devices, skew):
    equals_jit(step(shared, skew=skew), devices, layers=2, plan=recipe)


def counted(x, p, chosen, weights):
    """With a sum over sorted rows of what is the same for each."""
    flat = chosen.reshape(-1)
    order = jnp.argsort(flat)
    out = gated(x[order // TOP_K], p, jnp.bincount(flat, length=EXPERTS)) * weights.reshape(-1)[order][:, None]
    rows = jnp.zeros(EXPERTS).at[flat[order]].add(1.0)
    return jnp.zeros_like(x).at[order // TOP_K].add(out) * (1 + 0.1 * jnp.max(rows))


@pytest.mark.parametrize(
    ("layer", "devices", "recipe"),
    [
        (scattered, 4, recipes.expert_parallel()),
        (counted, 4, recipes.expert_parallel()),
        pytest.param(scattered, 4, recipes.data_parallel(), marks=pytest.mark.slow),
        pytest.param(LAYERS_AS_WRITTEN["biased"], 4, recipes.expert_parallel(), marks=pytest.mark.slow),
        pytest.param(scattered, 8, recipes.expert_parallel(4), marks=pytest.mark.slow),  # two groups of devices
        pytest.param(LAYERS_AS_WRITTEN["unsorted"], 8, recipes.expert_parallel(), marks=pytest.mark.slow),
    ],
)
def test_a_router_that_prefers_one_expert_drops_no_rows(layer, devices, recipe):
    equals_jit(step(layer, skew=100.0), devices, plan=recipe)


@pytest.mark.slow
def test_losses_of_the_router_stay_as_they_are_written():
    equals_jit(step(scattered, balance=0.1), 4, plan=recipes.expert_parallel())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "sends_rows"),
    [(recipes.expert_parallel(), True), (recipes.combine(ep=2, tp=2), True), (recipes.zero(3), False)],
)
def test_what_is_sent_is_what_was_predicted(recipe, sends_rows):
    made = autopar.parallelize(step(scattered, scanned=True), cluster="local:4", cache_dir=None, plan=recipe)
    compared = autopar.verify(made, state(2), batch())
    for of in compared.collectives:
        assert of.compiled == pytest.approx(of.predicted, rel=0.05), of.name
    assert any(of.name == "all-to-all" and of.compiled for of in compared.collectives) == sends_rows


@pytest.mark.extra("tpu")
def test_rows_sent_on_tpus_are_those_predicted():
    made = autopar.parallelize(
        step(scattered, scanned=True), cluster="tpu-v5p:2x2x1", cache_dir=None, plan=recipes.expert_parallel()
    )
    shapes = jax.eval_shape(lambda: (state(2, jnp.bfloat16), batch().astype(jnp.bfloat16)))
    compared = autopar.verify(made, *shapes, compile_for="tpu:v5p:2x2x1")
    (rows,) = [of for of in compared.collectives if of.name == "ragged-all-to-all"]
    assert rows.compiled == pytest.approx(rows.predicted, rel=0.05)
    assert rows.compiled > 0


# Work, and loads of experts


def test_matrices_are_not_among_the_rows_that_a_pass_moves():
    arrays = jnp.zeros((64, 8)), jnp.zeros((4, 8, 16)), jnp.zeros(4, jnp.int32)
    work = ragged_work(jax.make_jaxpr(jax.lax.ragged_dot)(*arrays))
    assert (work.flops, work.nbytes, work.product_bytes) == (2 * 64 * 8 * 16, None, 4 * (64 * 8 + 64 * 16 + 4))
    assert work.between_bytes == 0


def held_by(function, platform, *shapes):
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    sizes = jax.ShapeDtypeStruct((4,), jnp.int32)
    program = jax.make_jaxpr(function, axis_env=[("x", 2)])(*arrays, sizes)
    return held_bytes(jax_compat.lowered_jaxpr(program), platform)


@pytest.mark.parametrize(("platform", "copies"), [("gpu", 4), ("tpu", 0)])
def test_a_ragged_product_masks_its_rows_for_each_group_on_gpus(platform, copies):
    rows, made, matrices = (64, 8), (64, 16), (4, 8, 16)
    product = jax.lax.ragged_dot

    def of_rows(x, w, cotangent, sizes):
        return jax.linear_transpose(lambda x: product(x, w, sizes), x)(cotangent)

    def of_matrices(x, w, cotangent, sizes):
        return jax.linear_transpose(lambda w: product(x, w, sizes), w)(cotangent)

    assert held_by(product, platform, rows, matrices) == 4 * copies * 64 * 8
    assert held_by(of_rows, platform, rows, matrices, made) == 4 * copies * 64 * 16
    assert held_by(of_matrices, platform, rows, matrices, made) == 4 * copies * (64 * 8 + 64 * 16)


@pytest.mark.parametrize(
    ("platform", "forward", "of_matrices", "masked_bytes"),
    [("gpu", 4, 4, 2 * 4 * 4 * 64 * 8), ("tpu", 0, 4, 0), ("cpu", 0, 0, 0)],
)
def test_rows_are_multiplied_with_the_matrices_of_all_groups(platform, forward, of_matrices, masked_bytes):
    """`forward`, `of_matrices`: how many times its own arithmetic a product takes; 0: none that is dense."""
    x, w, sizes = jnp.zeros((64, 8)), jnp.zeros((4, 8, 16)), jnp.zeros(4, jnp.int32)
    own = 2 * 64 * 8 * 16

    def gradient(x, w, sizes):
        made = jnp.zeros((64, 16))
        return jax.linear_transpose(lambda w: jax.lax.ragged_dot(x, w, sizes), w)(made)

    def dense(function):
        return dense_work(jax.make_jaxpr(function)(x, w, sizes).eqns, platform)

    assert dense(jax.lax.ragged_dot) == DenseWork(forward * own, own if forward else 0, masked_bytes)
    assert (dense(gradient).flops, dense(gradient).own_flops) == (of_matrices * own, own if of_matrices else 0)


@pytest.mark.parametrize("devices", [2, 4, 8])
def test_room_for_twice_an_equal_share_is_moved_and_multiplied_whole(devices):
    forward, _ = passes(graph_of(step(scattered)))
    mesh = LogicalMesh(axis_sizes=(devices,))
    strategy = next(s for s in enumerate_strategies(signature_of(forward), mesh) if s.ring)
    function, parts = forward.eqn.params["function"], parts_of_operands(forward, strategy, mesh)
    whole = function.program([v.aval for v in forward.eqn.invars])
    between_bytes, dense = function.work_in_turn(parts, devices, "gpu")
    assert between_bytes > 1.5 * ragged_work(whole).between_bytes / devices  # some is moved here, some there
    # Each of the rows that there is room for is multiplied with the matrices of the experts that a device has.
    assert (
        dense.flops
        == 2 * (EXPERTS / devices) * dense_work(equations_of_first_turn(whole.jaxpr), "gpu").own_flops / devices
    )
    assert function.work_in_turn(parts, devices, "cpu")[1] == DenseWork()


def test_what_an_element_by_element_result_is_computed_of_is_held_until_it_is_written():
    def program(x, y, w, sizes):
        cut = jnp.tanh(x @ w)  # written where the product behind the sort reads it
        return cut @ jax.lax.sort(y)

    assert held_by(program, "tpu", (8, 32), (16, 16), (32, 16)) == 4 * (8 * 16 + 8 * 16 + 16 * 16)


def test_gradients_of_matrices_wait_on_gpus_until_rows_are_sent():
    def program(x, w, sizes):
        rows, cotangent = jax.lax.sort(x), jax.lax.sort(x)
        (gradient,) = jax.linear_transpose(lambda w: jax.lax.ragged_dot(rows, w, sizes), w)(cotangent)
        numbers = sizes[:2]
        sent = jax.lax.ragged_all_to_all(jax.lax.sort(x), jnp.zeros((64, 8)), *[numbers] * 4, axis_name="x")
        return gradient, sent

    array = 4 * 64 * 8
    # The third sorted array is sent into zeros. The others are free by then, or masked for each of four groups.
    assert held_by(program, "tpu", (64, 8), (4, 8, 8)) // array == 2
    assert held_by(program, "gpu", (64, 8), (4, 8, 8)) // array == 4 + 4 + 2


@pytest.mark.parametrize(
    ("load", "devices", "share"),
    [
        ((), 4, 1),
        (((5, 1, 1, 1),), 1, 1),
        (((5, 1, 1, 1),), 4, 5 / 2),
        (((5, 1, 1, 1),), 2, 6 / 4),
        (((8, 0, 0, 0), (0.5, 0.5, 0.5, 0.5)), 4, (4 + 1) / 2),  # each layer waits for its own
    ],
)
def test_the_share_of_the_busiest_device(load, devices, share):
    assert busiest_share(load, devices) == share


def planned(recipe, **search):
    cluster = autopar.Cluster.preset("tpu-v5p", topology="2x2x2")  # whose kernel takes the time of the rows there are
    shapes = jax.eval_shape(lambda: (state(1, jnp.bfloat16), jnp.tile(batch().astype(jnp.bfloat16), (16, 16, 1))))
    search = autopar.Search(**search)
    return autopar.plan(step(scattered), *shapes, plan=recipe, cluster=cluster, cache_dir=None, search=search).record


@pytest.mark.parametrize(
    ("rows", "devices", "tile", "room"),
    [(64, 2, 1, 64), (64, 4, 1, 32), (65, 4, 1, 33), (64, 8, 1, 16), (3, 8, 1, 1), (32, 4, 128, 32), (128, 6, 128, 64)],
)
def test_there_is_room_for_twice_an_equal_share_in_whole_tiles(rows, devices, tile, room):
    assert quota(rows, devices, tile) == room
    assert devices * room % tile == 0


@pytest.mark.parametrize(
    ("load", "devices", "turns"), [(1, 8, 1), (2, 8, 1), (2.1, 8, 2), (8, 8, 4), (4, 4, 2), (2, 2, 1), (1, 1, 1)]
)
def test_a_device_with_more_rows_gets_them_in_more_turns(load, devices, turns):
    assert turns_of(load, devices) == turns


def test_devices_wait_for_the_busiest_one():
    loads = (
        [1] * 8,
        [10.5, *[6.5] * 7],
        [14, *[6] * 7],
        [7, *[1] * 7],
    )  # the busiest device: 1, 1.5, 2 and 4 times a share
    plans = [planned(recipes.expert_parallel(), expert_load=load).predicted for load in loads]
    times_s = [plan.compute_time_s for plan in plans]
    assert times_s == sorted(times_s)
    assert len(set(times_s)) == 4
    sends = {of[0].kind: of for of in zip(*(plan.collectives for plan in plans), strict=True)}
    for kind, (once, more, twice, four) in sends.items():
        assert once.sent_bytes == more.sent_bytes == twice.sent_bytes == four.sent_bytes
        more_s = more.time_s - once.time_s
        assert (more_s > 1e-6 * once.time_s) == (kind == "ragged-all-to-all")
        assert twice.time_s - once.time_s == pytest.approx(2 * more_s, abs=1e-9 * once.time_s)  # the rest is latency
        # Four times a share takes two turns, of each of which devices tell one another the sizes.
        assert (four.time_s > twice.time_s) == (kind in ("ragged-all-to-all", "all-to-all", "all-gather"))
    assert "ragged-all-to-all" in sends


def test_a_load_says_nothing_of_devices_with_all_experts():
    equal, skewed = (planned(recipes.data_parallel(), expert_load=load) for load in (None, [7, 1, 1, 1, 1, 1, 1, 1]))
    assert skewed.predicted == equal.predicted
    assert (equal.expert_load, skewed.expert_load) == ((), (("**", ((7, 1, 1, 1, 1, 1, 1, 1),)),))


@pytest.mark.slow
def test_a_plan_with_a_load_is_saved_with_it_and_equals_plain_jit(tmp_path):
    recipe, load = recipes.combine(pp=2, ep=2, num_microbatches=2), [7, 1, 1, 1, 1, 1, 1, 1]
    made = equals_jit(step(scattered), 4, layers=2, plan=recipe, search=autopar.Search(expert_load=load))
    plan = made.plan(state(2), batch())
    plan.save(tmp_path / "plan.json")
    loaded = autopar.Plan.load(tmp_path / "plan.json")
    assert loaded.record.expert_load == plan.record.expert_load == (("**", (tuple(load),)),)
    equals_jit(step(scattered), 4, layers=2, plan=plan)


@pytest.mark.parametrize("num_layers", [2, pytest.param(12, marks=pytest.mark.slow)])
def test_each_mixture_has_the_load_of_its_module(num_layers):
    """Of layers that are equal but for it; of 12 some stand for others. The first one's pass back is less."""
    layers = [f"layer{i}" for i in range(num_layers)]

    def function(state, batch):
        def loss(state):
            x = batch
            for i, name in enumerate(layers):
                with jax.named_scope(name):
                    p = jax.tree.map(lambda a, i=i: a[i], state)
                    rows = x.reshape(-1, WIDTH)
                    x = x + scattered(rows, p, *reversed(route(rows, p["router"])[1:])).reshape(x.shape)
            return jnp.mean(x**2)

        return jax.tree.map(lambda p, g: p - 0.3 * g, state, jax.grad(loss)(state))

    cluster = autopar.Cluster.preset("tpu-v5p", topology="2x2x1")
    shapes = jax.eval_shape(
        lambda: (state(num_layers, jnp.bfloat16), jnp.tile(batch().astype(jnp.bfloat16), (16, 16, 1)))
    )

    def arithmetic_s(load):
        search = autopar.Search(expert_load=load)
        plan = autopar.plan(
            function, *shapes, plan=recipes.expert_parallel(), cluster=cluster, cache_dir=None, search=search
        )
        return plan.predicted.compute_time_s

    skewed = [7, 1, 1, 1, 1, 1, 1, 1]
    none, every = arithmetic_s(None), arithmetic_s(skewed)
    even, odd = arithmetic_s(dict.fromkeys(layers[::2], skewed)), arithmetic_s({"*[02468]": [1] * 8, "**": skewed})
    assert (even - none) + (odd - none) == pytest.approx(every - none, rel=1e-6)
    assert even - none == pytest.approx((every - none) / 2, rel=0.2)


def test_a_load_of_a_module_without_a_mixture_is_refused():
    with pytest.raises(InvalidArgumentError, match=r"expert_load=\{'elsewhere': ...\}.*the path of a module"):
        planned(recipes.expert_parallel(), expert_load={"elsewhere": [1] * 8})
    with pytest.raises(InvalidArgumentError, match="counts by patterns"):
        autopar.Search(expert_load={})


def test_a_load_of_other_experts_is_refused():
    with pytest.raises(InvalidArgumentError, match=r"expected counts of 8 experts.*got counts of 4 experts"):
        planned(recipes.expert_parallel(), expert_load=[1, 2, 3, 4])


# Rows sent to their experts


def ragged_by_gathers(operand, output, starts, sizes, targets, received, *, axis_name):
    """`jax.lax.ragged_all_to_all`, which XLA's CPU compiler does not have."""
    me = jax.lax.axis_index(axis_name)
    arrays, begins, counts, places = (jax.lax.all_gather(a, axis_name) for a in (operand, starts, sizes, targets))
    for source in range(arrays.shape[0]):
        within = jnp.arange(output.shape[0]) - places[source, me]
        comes = (within >= 0) & (within < counts[source, me])
        rows = arrays[source][jnp.clip(begins[source, me] + within, 0, operand.shape[0] - 1)]
        output = jnp.where(comes.reshape(-1, *[1] * (output.ndim - 1)), rows, output)
    return output


@pytest.mark.cases(2)
@pytest.mark.parametrize("platform", ["cpu", "tpu"])
@pytest.mark.parametrize("axes", [("a",), ("a", "b")])
def test_rows_come_to_their_experts_and_back(platform, axes, monkeypatch):
    monkeypatch.setattr(jax.lax, "ragged_all_to_all", ragged_by_gathers)
    mesh, count = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("a", "b")), 2 ** len(axes)

    def local(experts, rows):
        sizes, right, back = jnp.bincount(experts, length=EXPERTS).astype(jnp.int32), True, jnp.zeros_like(rows)
        for turn in range(count):
            exchange = RowExchange(Devices(axes=axes, count=count, platform=platform), experts, sizes, turn)
            numbers = exchange.to_experts(experts)
            first = jax.lax.axis_index(axes) * (EXPERTS // count)
            here = jnp.repeat(jnp.arange(EXPERTS // count) + first, exchange.sizes, total_repeat_length=len(numbers))
            right &= jnp.where(exchange.is_row(), here == numbers, True).all()
            right &= (turn < exchange.num_turns) | ~exchange.is_row().any()
            sent = exchange.to_tokens(2 * exchange.to_experts(rows))
            back += jnp.where(exchange.in_turn()[:, None], sent, 0)
        return back, right[None]

    chosen = np.random.default_rng(0).choice(EXPERTS, (4, 16), p=[0.6, 0.3, 0, 0, 0, 0.05, 0.05, 0])
    rows, spec = jax.random.normal(jax.random.key(0), (64, 3)), P(("a", "b"))
    run = jax.shard_map(local, mesh=mesh, in_specs=(spec, spec), out_specs=(spec, spec), check_vma=False)
    back, right = jax.jit(run)(jnp.asarray(np.sort(chosen).reshape(-1)), rows)
    np.testing.assert_array_equal(back, 2 * rows)
    assert right.all()
