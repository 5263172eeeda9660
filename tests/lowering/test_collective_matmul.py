"""Products that gather an operand, or scatter their result, piece by piece while they run."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar import recipes
from autopar.cost.cost_model import cost_model
from autopar.errors import InvalidArgumentError
from autopar.search.intra_op.spmd_candidate import memory_of
from autopar.search.materialize import make_function
from autopar.verification import lower_for_target, peak_bytes
from tests.sections import BOOK
from tests.small_steps import assert_close, grouped, slow_cluster

B, L, W, F = 2, 16, 8, 32
_STARTS = re.compile(r"%?([\w.\-]+) = .*? collective-permute-start\(")
_ENDS = re.compile(r"collective-permute-done\(.*?%?([\w.\-]+)\)")
_PRODUCT = re.compile(r"= .*? (convolution|dot|custom-call|fusion)\(.*(dot_general|gemm|convolution)")


def overlapped(text: str) -> tuple[int, int]:
    """(asynchronous permutes of a scheduled program, those with a product between start and end)."""
    started: dict[str, bool] = {}
    beside = 0
    for line in text.splitlines():
        if (end := _ENDS.search(line)) is not None:
            beside += started.get(end[1], False)
        elif (start := _STARTS.search(line)) is not None:
            started[start[1]] = False
        elif _PRODUCT.search(line):
            started = dict.fromkeys(started, True)
    return len(started), beside


def step(state, batch):
    def loss(p):
        x = batch["x"]
        x = x + jnp.tanh(x @ p["up"]) @ p["down"]
        x = x + jnp.tanh(x @ p["up2"]) @ p["down2"]
        return ((x - batch["y"]) ** 2).mean()

    value, grads = jax.value_and_grad(loss)(state)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), value


def arguments():
    keys = iter(jax.random.split(jax.random.key(0), 8))
    shapes = {"up": (W, F), "down": (F, W), "up2": (W, F), "down2": (F, W)}
    state = {name: 0.2 * jax.random.normal(next(keys), shape) for name, shape in shapes.items()}
    return state, {name: jax.random.normal(next(keys), (B, L, W)) for name in "xy"}


def made(recipe, devices, **options):
    return autopar.parallelize(step, plan=recipe, cluster=slow_cluster(devices), cache_dir=None, **grouped(**options))


def sent(plan):
    found = {}
    for use in plan.predicted.collectives:
        found[use.kind] = found.get(use.kind, 0) + use.sent_bytes
    return found


@pytest.mark.parametrize(
    "devices", [4, pytest.param(2, marks=pytest.mark.slow), pytest.param(8, marks=pytest.mark.slow)]
)
def test_gathers_and_scatters_become_permutes_of_as_many_bytes(devices):
    args = arguments()
    whole = made(recipes.sequence_parallel("megatron"), devices).plan(*args)
    in_pieces = made(recipes.sequence_parallel("megatron", collective_matmul=True), devices)
    before, now = sent(whole), sent(in_pieces.plan(*args))
    assert "collective-permute" not in before
    assert now["collective-permute"] > 0
    assert now.get("all-gather", 0) < before["all-gather"]
    assert now.get("reduce-scatter", 0) < before["reduce-scatter"]
    assert sum(now.values()) == pytest.approx(sum(before.values()))
    compared = autopar.verify(in_pieces, *args)
    assert compared.difference < 1e-5
    # XLA for CPU may send a piece once where forward and backward pass are meant to send it each.
    assert compared.total.compiled <= compared.total.predicted
    assert_close(in_pieces(*jax.tree.map(jnp.copy, args)), jax.jit(step)(*args))


def forward(state, batch):
    return state, jnp.tanh(batch["x"] @ state["up"]) @ state["down"]


def in_pieces_over_all(of, plan):
    """Of a plan whose products gather and scatter whole the same in pieces, over its first axis."""
    decisions = dataclasses.replace(plan.record.decisions, overlapped_axes=(0,))
    return autopar.parallelize(
        of,
        plan=dataclasses.replace(plan, record=dataclasses.replace(plan.record, decisions=decisions)),
        cluster=plan.cluster,
        cache_dir=None,
    )


def test_products_of_no_example_run_in_pieces():
    state, batch = arguments()
    state, batch = {name: state[name] for name in ("up", "down")}, {"x": batch["x"][:0]}
    whole = autopar.parallelize(forward, plan=recipes.zero(3), cluster=slow_cluster(4), cache_dir=None)
    _, result = in_pieces_over_all(forward, whole.plan(state, batch))(state, batch)
    assert result.shape == (0, L, W)


@pytest.mark.parametrize("devices", [4, pytest.param(8, marks=pytest.mark.slow)])
def test_weights_come_in_pieces_of_what_is_summed_and_of_what_is_not(devices):
    """Of the first product a piece is columns of the result, of the second one a summand."""
    state, batch = arguments()
    state, batch = {name: state[name] for name in ("up", "down")}, {"x": jnp.tile(batch["x"], (4, 1, 1))}
    whole = autopar.parallelize(forward, plan=recipes.zero(3), cluster=slow_cluster(devices), cache_dir=None)
    made_in_pieces = in_pieces_over_all(forward, whole.plan(state, batch))
    compared = autopar.verify(made_in_pieces, state, batch)
    counts = {count.name: count.compiled for count in compared.counts if count.compiled}
    assert counts == {"collective-permute": 2 * (devices - 1)}
    assert compared.total.compiled == 2 * (devices - 1) * W * F * 4 / devices
    assert compared.difference < 1e-5
    assert_close(made_in_pieces(jax.tree.map(jnp.copy, state), batch), jax.jit(forward)(state, batch))


@pytest.mark.extra("tpu")
@pytest.mark.parametrize(("target", "cluster"), [("tpu:v5p:2x2x2", "tpu-v5p:2x2x2"), ("tpu:v5e:2x2", "tpu-v5e:2x2")])
def test_compiled_for_a_tpu_no_piece_is_computed_ahead_of_its_turn(target, cluster):
    """Programs that compute all pieces at once take eight times a sum in 32 bits, 1.1 GB."""
    of = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    state, batch = {"up": of(2048, 16_384), "down": of(16_384, 2048)}, {"x": of(32, 1024, 2048)}
    whole = autopar.parallelize(forward, plan=recipes.zero(3), cluster=cluster, cache_dir=None, donate_argnums=(0,))
    plan = whole.plan(state, batch)
    made_in_pieces = in_pieces_over_all(forward, plan)
    lowered = lower_for_target(made_in_pieces, target, state, batch)
    compiled, devices = lowered.compile(), plan.mesh.axis_sizes[0]
    permutes, beside = overlapped(compiled.as_text())
    assert permutes == 2 * (devices - 1)
    assert beside >= permutes - 1
    emitted = make_function(lowered.traced, lowered.plan, lowered.mesh, BOOK)
    predicted = memory_of(emitted.graph, emitted.lowered, cost_model(plan.cluster, plan.mesh)).estimate
    assert predicted.peak_bytes == pytest.approx(peak_bytes(compiled), rel=0.1)


@pytest.mark.slow
def test_in_stages_and_micro_batches_numbers_are_those_of_jit():
    recipe = recipes.combine(
        tp=2, pp=2, sequence_parallel=True, collective_matmul=True, num_microbatches=2, recompute="input"
    )
    args = arguments()
    in_stages = made(recipe, 4)
    assert sent(in_stages.plan(*args))["collective-permute"] > 0
    assert_close(in_stages(*jax.tree.map(jnp.copy, args)), jax.jit(step)(*args))


def test_what_is_sent_hides_behind_products_on_a_tpu():
    """Matrices of 2,048 x 8,192 and 16,384 tokens in 16 bits, on 8 TPUs v5e."""
    of_width = lambda w: jax.ShapeDtypeStruct((256 * w.shape[0], 256 * w.shape[1]), jnp.bfloat16)
    state = jax.tree.map(of_width, arguments()[0])
    batch = {name: jax.ShapeDtypeStruct((8, 2048, 256 * W), jnp.bfloat16) for name in "xy"}

    def predicted_s(in_pieces):
        recipe = recipes.sequence_parallel("megatron", collective_matmul=in_pieces)
        found = autopar.parallelize(step, plan=recipe, cluster="tpu-v5e:2x4", cache_dir=None)
        return found.plan(state, batch).predicted.step_time_s

    assert predicted_s(True) < 0.95 * predicted_s(False)


def test_pieces_that_are_sent_in_place_need_no_copies_beside_them():
    of_width = lambda w: jax.ShapeDtypeStruct((256 * w.shape[0], 256 * w.shape[1]), jnp.bfloat16)
    state = jax.tree.map(of_width, arguments()[0])
    batch = {name: jax.ShapeDtypeStruct((8, 2048, 256 * W), jnp.bfloat16) for name in "xy"}
    hosts = autopar.Cluster.preset("dgx-h100")

    def step_s(in_place):
        link = dataclasses.replace(hosts.inside_host, sends_in_place=in_place)
        plan = autopar.parallelize(
            step,
            plan=recipes.sequence_parallel("megatron", collective_matmul=True),
            cluster=dataclasses.replace(hosts, inside_host=link),
            cache_dir=None,
        ).plan(state, batch)
        return plan.predicted.step_time_s

    in_place_s, beside_s = step_s(True), step_s(False)
    assert in_place_s < 0.99 * beside_s


def test_a_plan_with_it_is_saved_and_read(tmp_path):
    args, recipe = arguments(), recipes.sequence_parallel("megatron", collective_matmul=True)
    made(recipe, 4).plan(*args).save(tmp_path / "plan.json")
    again = made(autopar.Plan.load(tmp_path / "plan.json"), 4)
    assert sent(again.plan(*args))["collective-permute"] > 0
    assert_close(again(*jax.tree.map(jnp.copy, args)), jax.jit(step)(*args))


def test_it_needs_positions_in_parts_between_the_matrices():
    with pytest.raises(InvalidArgumentError, match="sequence_parallel=True"):
        recipes.combine(tp=2, collective_matmul=True)
    with pytest.raises(InvalidArgumentError, match="kind 'megatron'"):
        recipes.sequence_parallel("ring", collective_matmul=True)
