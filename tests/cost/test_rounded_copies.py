"""Copies that a TPU's compiler sends in 16 bits: those that only matrix products at default precision read."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar import recipes
from autopar.cost.overlap import timed, timed_beside, works_together
from autopar.ir.resharding import StepKind
from autopar.lowering.instructions import Move
from autopar.runtime.emit import joinable
from autopar.search.inter_op import build_stages
from autopar.search.inter_op.staged import task_cost
from benchmarks.zoo import CASES

WIDTH, DEVICES = 256, 8
# What a device of eight sends to make one whole float32 weight on all of them.
GATHERED = WIDTH * WIDTH * 4 * (DEVICES - 1) / DEVICES


def gathered_bytes(cluster, precision=None, reads=lambda w: w):
    """Bytes of all-gathers by which the weights of two layers are made whole under ZeRO 3."""

    def step(weights, x):
        def loss(weights):
            h = jnp.dot(x, reads(weights[0]), precision=precision)
            return jnp.mean(jnp.dot(jnp.tanh(h), reads(weights[1]), precision=precision) ** 2)

        grads = jax.grad(loss)(weights)
        return [w - 0.1 * g for w, g in zip(weights, grads, strict=True)], {}

    weights = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * 2
    batch = jax.ShapeDtypeStruct((64 * DEVICES, WIDTH), jnp.float32)
    parallel = autopar.parallelize(step, plan=recipes.zero(3), cluster=cluster, cache_dir=None)
    return parallel.plan(weights, batch).predicted.by_kind()["all-gather"][1]


@pytest.mark.parametrize(
    ("reads", "precision", "share"),
    [
        (lambda w: w, None, 0.5),
        (lambda w: w.T, None, 0.5),
        (lambda w: w, "highest", 1.0),
        # Two gathers of the weights for the sort, in 32 bits; three of what is sorted, which only products read.
        (lambda w: jnp.sort(w.ravel()).reshape(w.shape), None, (2 + 3 * 0.5) / 5),
    ],
    ids=["products", "transposed", "all 32 bits asked for", "read by others"],
)
def test_weights_of_products_are_gathered_in_half_their_bytes_on_tpu(reads, precision, share):
    on_gpu = gathered_bytes("dgx-h100", precision, reads)
    assert on_gpu % GATHERED == 0
    assert on_gpu > 0
    assert gathered_bytes("tpu-v5e:2x4", precision, reads) == share * on_gpu


def staged_step(monkeypatch, cluster):
    """Two layers under ZeRO 3 with two micro-batches, whose weights are gathered in the task of a micro-batch."""

    def step(weights, x):
        grads = jax.grad(lambda weights: jnp.mean((jnp.tanh(x @ weights[0]) @ weights[1]) ** 2))(weights)
        return [w - 0.1 * g for w, g in zip(weights, grads, strict=True)], {}

    made = []
    monkeypatch.setattr(build_stages, "join_where_it_pays", lambda staged, limit_bytes: made.append(staged) or staged)
    weights = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * 2
    batch = jax.ShapeDtypeStruct((64 * DEVICES, WIDTH), jnp.float32)
    recipe = recipes.combine(dp=DEVICES, zero=3, num_microbatches=2)
    autopar.parallelize(step, plan=recipe, cluster=cluster, cache_dir=None).plan(weights, batch)
    return made[-1]


def gathers(ran):
    return [work.sent_bytes for work in ran.order if "all-gather" in work.name]


@pytest.mark.parametrize(("cluster", "share"), [("tpu-v5e:2x4", 0.5), ("dgx-h100", 1.0)])
def test_joined_tasks_send_what_they_send_apart(cluster, share, monkeypatch):
    staged = staged_step(monkeypatch, cluster)
    (planned,) = staged.stages
    graph, model = planned.stage.graph, planned.model
    chains = joinable(staged.simulated.pipeline, staged.schedule)
    assert len(chains) == 2
    for chain in chains:
        tasks = [staged.staged.tasks[number] for number, _ in chain]
        parts = [(task.instructions, 2 if task.kind.repeats else 1) for task in tasks]
        _, results = build_stages._places(staged, chain)
        # XLA's GPU compiler makes one collective of them.
        assert sum(gathers(timed_beside([works_together(graph, parts, results, model)], model))) == 3 * share * GATHERED
        apart_s = sum(staged.task_s[number] for number, _ in chain)
        assert build_stages.joined_task(staged, chain).seconds <= apart_s * (1 + 1e-9)


def test_a_copy_that_a_task_hands_on_is_sent_in_32_bits(monkeypatch):
    staged = staged_step(monkeypatch, "tpu-v5e:2x4")
    (planned,) = staged.stages
    graph, model = planned.stage.graph, planned.model
    (task,) = [task for task in staged.staged.tasks if task.kind.repeats]
    copies = {
        (i.value, i.target)
        for i in task.instructions
        if isinstance(i, Move) and [step.kind for step in i.steps] == [StepKind.ALL_GATHER]
    }
    assert len(copies) == 3
    handing_on = dataclasses.replace(task, outputs=(*task.outputs, *copies))
    block = dataclasses.replace(planned.lowered.lowered, instructions=task.instructions)
    # Twice as many bytes of the two micro-batches together.
    assert gathers(timed(graph, block, model, results=task.outputs)) == [GATHERED] * 3
    assert gathers(timed(graph, block, model, results=handing_on.outputs)) == [2 * GATHERED] * 3
    cluster = autopar.Cluster.parse("tpu-v5e:2x4")
    assert task_cost(planned, handing_on, cluster).seconds > task_cost(planned, task, cluster).seconds


def recurrent_gathers(cluster, turn, *, carried=False):
    """Bytes of all-gathers under ZeRO 3 of a scan whose turns read a weight, which they hand on where it is carried."""

    def step(w, x):
        def of_turn(carry, x):
            h, *own = carry
            return (turn(own[0] if carried else w, h + x), *own), None

        def loss(w):
            first = jnp.zeros_like(x[0])
            (h, *_), _ = jax.lax.scan(of_turn, (first, w) if carried else (first,), x)
            return jnp.mean(h**2)

        return (w - 0.1 * jnp.sign(w)) * (loss(w) > 0), {}

    batch = jax.ShapeDtypeStruct((4, 64 * DEVICES, WIDTH), jnp.float32)
    parallel = autopar.parallelize(step, plan=recipes.zero(3), cluster=cluster, cache_dir=None, batch_axis=1)
    plan = parallel.plan(jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32), batch)
    return plan.predicted.by_kind()["all-gather"][1]


@pytest.mark.parametrize(
    ("turn", "carried", "share"),
    [
        (lambda w, h: jnp.tanh(h @ w), False, 0.5),
        (lambda w, h: jnp.tanh(h @ w), True, 0.5),
        (lambda w, h: jnp.tanh(h @ w) + w[0], False, 1.0),
    ],
    ids=["products", "carried", "read by others"],
)
def test_weights_that_turns_of_a_scan_gather_come_in_half_their_bytes_on_tpu(turn, carried, share):
    assert recurrent_gathers("dgx-h100", turn, carried=carried) == 4 * GATHERED
    assert recurrent_gathers("tpu-v5e:2x4", turn, carried=carried) == share * 4 * GATHERED


@pytest.mark.parametrize(
    ("cluster", "weights", "others"),
    [
        # States are gathered in each turn, and stacked for the gradient of weights.
        ("tpu-v5e:2x4", 0, 16_128),
        # Weights are gathered in front of the scan that multiplies with them, states for their gradient.
        ("tpu-v5p:2x2x2", 2 * (1024 + 256) * 4096 * 7 / 8, 0),
    ],
    ids=["stacked", "constant"],
)
def test_what_a_scan_stacks_or_reads_for_products_comes_in_half_its_bytes_on_tpu(cluster, weights, others):
    """The bytes of XLA's programs for an LSTM (`benchmarks.compiled_elsewhere`)."""
    turns, examples, width = 16, 512, 1024
    case = CASES["lstm"](width=width, features=256, length=turns, batch=examples)
    arguments = jax.eval_shape(case.init, jax.random.key(0)), case.batch(0)
    plan = autopar.plan(case.step, *arguments, cluster=cluster, cache_dir=None)
    of_states = 2 * turns * examples * width * (DEVICES - 1) / DEVICES
    assert plan.predicted.by_kind()["all-gather"][1] == of_states + weights + others
