"""Named values that `jax.checkpoint` saves by choice of the planner: the sets it tries, its choice, memory, numbers."""

import itertools

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

import autopar
from autopar import recipes
from autopar.errors import InvalidArgumentError, MemoryLimitError
from autopar.frontend.build_graph import build_graph
from autopar.frontend.saved_names import names_of, saving
from autopar.frontend.tracing import trace
from autopar.ir.rules import RuleBook
from autopar.search.saved_names import candidate_sets
from tests.small_steps import grouped, slow_cluster

EXAMPLES, WIDTH, INNER, LAYERS = 16384, 64, 256, 4
NAMES = ("act", "mid", "up")
policies = jax.checkpoint_policies


def training_step(policy=None, scanned=True):
    def layer(x, p):
        hidden = jnp.tanh(checkpoint_name(x @ p["a"], "up"))
        gate = jax.nn.gelu(checkpoint_name(hidden @ p["b"], "mid"))
        return x + checkpoint_name(jnp.sin(gate), "act") @ p["c"]

    layer = jax.checkpoint(layer, policy=policy)

    def step(state, batch):
        def loss(state):
            if scanned:
                x, _ = jax.lax.scan(lambda x, p: (layer(x, p), None), batch["x"], state)
            else:
                x = batch["x"]
                for i in range(LAYERS):
                    x = layer(x, jax.tree.map(lambda p, i=i: p[i], state))
            return jnp.mean((x - batch["y"]) ** 2)

        value, gradients = jax.value_and_grad(loss)(state)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, gradients), value

    return step


def arguments(examples=EXAMPLES):
    keys = iter(jax.random.split(jax.random.key(0), 5))
    sizes = {"a": (LAYERS, WIDTH, INNER), "b": (LAYERS, INNER, INNER), "c": (LAYERS, INNER, WIDTH)}
    state = {n: 0.2 * jax.random.normal(next(keys), s) for n, s in sizes.items()}
    return state, {n: jax.random.normal(next(keys), (examples, WIDTH)) for n in "xy"}


def parallel(remat, step=None, recipe=None, cluster=None, **options):
    return autopar.parallelize(
        step or training_step(),
        plan=recipe or recipes.data_parallel(),
        cluster=cluster or slow_cluster(2),
        cache_dir=None,
        **grouped(remat=remat, **options),
    )


def planned(remat, **options):
    return parallel(remat, **options).plan(*jax.eval_shape(arguments))


def step_time_s(remat, limit_bytes):
    try:
        return planned(remat, memory_limit_bytes=limit_bytes).predicted.step_time_s
    except MemoryLimitError:
        return float("inf")


# As much memory as all names need; as two need, of which the estimate knows no difference; as one needs.
@pytest.mark.cases(1)
@pytest.mark.parametrize(("limit_bytes", "within"), [(160_000_000, 1.0), (120_000_000, 1.01), (100_000_000, 1.0)])
def test_the_choice_is_the_best_of_all_sets(limit_bytes, within):
    sets = [s for r in range(len(NAMES) + 1) for s in itertools.combinations(NAMES, r)]
    best_s = min(step_time_s(names, limit_bytes) for names in sets)
    chosen = planned("auto", memory_limit_bytes=limit_bytes)
    assert best_s <= chosen.predicted.step_time_s <= best_s * within
    assert chosen.predicted.step_time_s < step_time_s("as written", limit_bytes)
    assert max(chosen.predicted.peak_bytes) <= limit_bytes
    assert any(note.startswith("jax.checkpoint saves ") for note in chosen.record.notes)
    assert {row.source for row in chosen.record.rejected} >= {"saved names"}


def test_what_is_written_stays_where_nothing_is_faster_or_has_a_name():
    everything = planned("auto", step=training_step(policies.everything_saveable))
    assert everything.record.saved_names is None
    assert planned("auto", memory_limit_bytes=65_000_000).record.saved_names is None
    assert (
        planned("auto", step=lambda state, batch: (jax.tree.map(jnp.sin, state), batch["x"].mean())).record.saved_names
        is None
    )


RECIPES = {"one program": recipes.data_parallel(), "stages": recipes.pipeline(2, num_microbatches=2)}


@pytest.mark.slow
@pytest.mark.parametrize("where", [pytest.param("one program"), pytest.param("stages", marks=pytest.mark.slow)])
def test_numbers_are_those_of_jit_and_memory_that_of_the_compiled_program(where, tmp_path):
    limit_bytes = 120_000_000 if where == "one program" else None
    step = parallel("auto", recipe=RECIPES[where], memory_limit_bytes=limit_bytes)
    compared = autopar.verify(step, *arguments())
    assert step.latest_plan.record.saved_names
    assert compared.difference < 1e-5
    assert compared.peak.ratio == pytest.approx(1.0, abs=0.03)
    step.latest_plan.save(tmp_path / "plan.json")
    again = autopar.parallelize(training_step(), plan=autopar.Plan.load(tmp_path / "plan.json"))
    again.compile(*jax.eval_shape(arguments))
    assert again.latest_plan.record.saved_names == step.latest_plan.record.saved_names


def test_layers_written_out_are_chosen_for_on_accelerators():
    """XLA's compiler for CPU undoes the recomputation of these; those for GPU and TPU keep it."""
    options = dict(step=training_step(scanned=False), cluster="dgx-h100", recipe=recipes.data_parallel())
    fewest, most = (planned(names, **options).predicted for names in ((), NAMES))
    assert max(fewest.peak_bytes) < 0.8 * max(most.peak_bytes)
    tight = planned("auto", memory_limit_bytes=max(fewest.peak_bytes) * 11 // 10, **options)
    assert tight.predicted.step_time_s >= most.step_time_s


def test_sets_are_tried_from_few_bytes_to_many_and_each_is_faster():
    traced = trace(
        training_step(), jax.eval_shape(arguments), names=("state", "batch"), donate=(0,), batch=(1,)
    )  # fmt: skip
    assert names_of(traced) == NAMES
    sets = candidate_sets(build_graph(saving(traced, ()), RuleBook()), slow_cluster(1), NAMES)
    assert sets == [frozenset(), {"mid"}, {"mid", "up"}, frozenset(NAMES)]


@pytest.mark.parametrize("remat", ["all", ("up", "down"), (1,)])
def test_unknown_words_and_names_are_refused(remat):
    with pytest.raises(InvalidArgumentError, match=r"Search\(remat"):
        planned(remat)
