"""What users get wrong: the message says what, and the step can be called rightly afterwards."""

import inspect
import logging
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

import autopar
from autopar import errors, recipes
from tests.small_steps import (
    MLP_BATCH,
    MLP_STATE,
    assert_close,
    grouped,
    mlp_batch,
    mlp_state,
    mlp_step,
    new_mlp_state,
    python,
    slow_cluster,
)


def small(function=mlp_step, **options):
    return autopar.parallelize(function, **grouped(**{"cluster": slow_cluster(2), **options}))


def assert_works(step, *more) -> None:
    assert_close(step(new_mlp_state(), mlp_batch(), *more), mlp_step(new_mlp_state(), mlp_batch()))


def cached_plans(directory) -> list[str]:
    return sorted(path.name for path in directory.glob("plan-*"))


def test_a_number_of_micro_batches_may_be_left_to_the_search():
    with pytest.raises(errors.InvalidArgumentError, match=r"a positive whole number, or 'auto', got 'many'"):
        small(num_microbatches="many")


# The function


def test_side_effects_are_named(tmp_path):
    shown, seen = True, jax.new_ref(jnp.zeros(()))

    def step(state, batch):
        if shown:
            seen[...] += batch["x"].sum()
        return mlp_step(state, batch)

    parallel = small(step, cache_dir=tmp_path)
    with pytest.raises(
        errors.UnsupportedError, match=r"step, .*face/test_bad_input.py.*without side effects"
    ) as caught:
        parallel(new_mlp_state(), mlp_batch())
    assert "as a result" in caught.value.hint
    assert cached_plans(tmp_path) == []
    shown = False
    assert_works(parallel)


@pytest.mark.cases(1)
@pytest.mark.parametrize("source", ["numpy array", "numpy scalar", "counter"])
def test_impure_functions_run_their_first_trace_and_are_named(source, caplog):
    random, count = np.random.default_rng(0), 0

    def step(state, batch):
        nonlocal count
        count += 1
        noise = {"numpy array": random.normal(size=(16, 1)), "numpy scalar": random.normal(), "counter": count}[source]
        return mlp_step(state, batch | {"x": batch["x"] + noise})

    expected = jax.jit(step)(new_mlp_state(), mlp_batch())
    random, count = np.random.default_rng(0), 0
    parallel = small(step, cache_dir=None)
    with caplog.at_level(logging.WARNING, "autopar"):
        found = parallel(new_mlp_state(), mlp_batch())
    assert_close(found, expected)
    assert "two traces of the function differ" in caplog.text
    assert "jax.random" in caplog.text
    random, count = np.random.default_rng(0), 0
    parallel = small(step, plan=recipes.pipeline(2, num_microbatches=2), cache_dir=None)
    assert_close(parallel(new_mlp_state(), mlp_batch()), expected)


def test_a_step_is_traced_again_when_it_is_compiled_and_not_for_a_plan_of_one_program(caplog):
    count = 0

    def step(state, batch):
        nonlocal count
        count += 1
        return mlp_step(state, batch | {"x": batch["x"] + count})

    parallel = small(step, cache_dir=None, num_microbatches=1)
    with caplog.at_level(logging.WARNING, "autopar"):
        parallel.plan(new_mlp_state(), mlp_batch())
        assert count == 1
        parallel.compile(new_mlp_state(), mlp_batch())
    assert count > 1
    assert caplog.text.count("two traces of the function differ") == 1


def test_whoever_finds_the_plan_in_the_cache_is_warned_too(tmp_path, caplog):
    count = 0

    def step(state, batch):
        nonlocal count
        count += 1
        return mlp_step(state, batch | {"x": batch["x"] + count})

    with caplog.at_level(logging.WARNING, "autopar"):
        small(step, cache_dir=tmp_path).compile(new_mlp_state(), mlp_batch())
        caplog.clear()
        count = 0  # as in a new process
        found = small(step, cache_dir=tmp_path)
        found.compile(new_mlp_state(), mlp_batch())
    assert count == 1
    assert len(cached_plans(tmp_path)) == 1
    assert caplog.text.count("two traces of the function differ") == 1


def test_counting_calls_is_not_impure():
    calls = []

    def step(state, batch):
        calls.append(1)
        return mlp_step(state, batch)

    assert_works(small(step))
    assert calls


def test_a_shard_map_for_another_mesh_is_named_with_its_line():
    mesh = jax.make_mesh((8,), ("own",), axis_types=(AxisType.Auto,))
    manual = True

    def step(state, batch):
        if manual:
            total = jax.shard_map(
                lambda x: jax.lax.psum(x, "own"), mesh=mesh, in_specs=PartitionSpec("own"), out_specs=PartitionSpec()
            )(batch["x"])
            batch = batch | {"x": batch["x"] + total.sum()}
        return mlp_step(state, batch)

    parallel = small(step)
    with pytest.raises(errors.UnsupportedError, match=r"shard_map at .*test_bad_input\.py:\d+") as caught:
        parallel(new_mlp_state(), mlp_batch())
    assert "write its mesh for a divisor of the devices" in caught.value.hint
    manual = False
    assert_works(parallel)


def test_a_result_that_is_no_array_is_named():
    def step(state, batch):
        return mlp_step(state, batch)[0], {"names": {"text"}}

    with pytest.raises(Exception, match="got set") as caught:
        small(step)(new_mlp_state(), mlp_batch())
    assert isinstance(caught.value, errors.InvalidArgumentError)
    assert "result[1]['names']" in str(caught.value)


def test_what_cannot_be_called_is_refused_at_once():
    with pytest.raises(errors.InvalidArgumentError, match="int"):
        autopar.parallelize(3)


def test_a_step_without_arguments_runs():
    assert small(lambda: jnp.ones(3))().tolist() == [1, 1, 1]


# Arguments


@pytest.mark.parametrize("wrong", [{"a"}, np.array(["a", "b"])], ids=["set", "array of strings"])
def test_arguments_that_are_no_arrays_are_named(wrong):
    parallel = small()
    with pytest.raises(errors.InvalidArgumentError, match=r"\['y'\]: expected an array.*got (set|ndarray)") as caught:
        parallel(new_mlp_state(), mlp_batch() | {"y": wrong})
    assert "close over it" in caught.value.hint
    assert_works(parallel)


def test_shapes_in_place_of_arrays_are_named_before_anything_is_planned():
    parallel, state = small(), jax.eval_shape(new_mlp_state)
    for call in (parallel, parallel.profile):
        with pytest.raises(errors.InvalidArgumentError, match="expected an array: the step is run, got a shape"):
            call(state, mlp_batch())
    assert parallel.latest_plan is None
    assert_works(parallel)


def test_the_path_of_an_argument_that_is_no_array_begins_with_its_name():
    with pytest.raises(errors.InvalidArgumentError) as caught:
        small()(new_mlp_state(), mlp_batch() | {"y": {"text"}})
    assert "batch['y']" in caught.value.where


def test_structured_arrays_are_refused():
    with pytest.raises(errors.InvalidArgumentError):
        small()(new_mlp_state(), mlp_batch() | {"y": np.zeros(3, [("a", "f4")])})


def test_a_missing_argument_is_pythons_own_error():
    parallel = small()
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'batch'"):
        parallel(new_mlp_state())
    assert_works(parallel)


@pytest.mark.parametrize("name", ["batch_argnums", "donate_argnums", "static_argnums"])
@pytest.mark.parametrize("number", [2, -3])
def test_argument_numbers_out_of_range(name, number):
    parallel = small(**{name: number})
    with pytest.raises(
        errors.InvalidArgumentError, match=rf"{name}=\({number},\).*its 2 arguments, from 0, got {number}"
    ):
        parallel(new_mlp_state(), mlp_batch())


def test_a_static_argument_without_a_hash_is_named():
    parallel = small(lambda state, batch, sizes: mlp_step(state, batch), static_argnums=2)
    with pytest.raises(errors.InvalidArgumentError, match="sizes"):
        parallel(new_mlp_state(), mlp_batch(), [1, 2])


def test_put_batch_of_another_structure():
    parallel = small()
    parallel.plan(MLP_STATE, MLP_BATCH)
    with pytest.raises(errors.BatchMismatchError, match=r"put_batch: expected .*'x': \*, 'y': \*.*got .*'z'"):
        parallel.put_batch({"x": mlp_batch()["x"], "z": mlp_batch()["y"]})
    assert_works(parallel)


def test_put_batch_of_what_is_no_array():
    parallel = small()
    parallel.plan(MLP_STATE, MLP_BATCH)
    with pytest.raises(errors.InvalidArgumentError):
        parallel.put_batch({"x": {"text"}, "y": {"text"}})


def test_a_step_inside_of_another_transformation_says_so():
    parallel = small()
    with pytest.raises(errors.UnsupportedError):
        jax.jit(parallel)(new_mlp_state(), mlp_batch())


# A state used again. Where autopar does not see it, jaxlib dies of it: so in a process of its own.

DONATED = """
import jax, numpy as np
import autopar
from tests.small_steps import *
step = autopar.parallelize(mlp_step, cluster=slow_cluster(2), cache_dir=None)
old = step.init(mlp_state, jax.random.key(0))
{steps}
try:
    step(old, mlp_batch({examples}))
except autopar.errors.DonatedStateError as error:
    print("refused:", error)
state, metrics = step(step.init(mlp_state, jax.random.key(0)), mlp_batch({examples}))
assert_close((state, metrics), mlp_step(new_mlp_state(), mlp_batch({examples})))
print("and works afterwards")
"""
ONCE = "state, _ = step(old, mlp_batch())"
TWICE = "old, _ = step(old, mlp_batch()); state, _ = step(old, mlp_batch())"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("steps", "examples"),
    [
        pytest.param(ONCE, 16, id="same shapes"),
        pytest.param(TWICE, 16, id="same shapes, later", marks=pytest.mark.slow),
        pytest.param(ONCE, 8, id="other shapes", marks=pytest.mark.slow),
    ],
)
def test_a_donated_state_used_again(steps, examples):
    child = python(DONATED.format(steps=steps, examples=examples))
    assert child.returncode == 0, child.stderr[-500:]
    assert "refused: mlp_step, state['bias']: expected an array that still holds its data" in child.stdout
    assert "state, ... = step(state, ...)" in child.stdout
    assert "and works afterwards" in child.stdout


def test_errors_name_arguments_behind_static_ones():
    def step(name, state, batch):
        return mlp_step(state, batch)

    parallel = small(step, static_argnums=0, donate_argnums=1, batch_argnums=2, cache_dir=None)
    old = new_mlp_state()
    old["bias"].delete()
    with pytest.raises(errors.DonatedStateError, match=re.escape("step, state['bias']")):
        parallel("a", old, mlp_batch())


TWINS = """
import jax, numpy as np
import autopar
from jax.sharding import NamedSharding, PartitionSpec
from tests.small_steps import *
def step(state, batch):
    params, metrics = mlp_step(state["params"], batch)
    return {"params": params, "average": jax.tree.map(lambda a, p: (a + p) / 2, state["average"], params)}, metrics
def written_otherwise(x):
    spec = (*x.sharding.spec, *[None] * (x.ndim - len(x.sharding.spec)))
    return jax.device_put(x, NamedSharding(x.sharding.mesh, PartitionSpec(*spec)))
parallel = autopar.parallelize(step, cluster=slow_cluster(2), cache_dir=None)
plan = parallel.plan({"params": MLP_STATE, "average": MLP_STATE}, MLP_BATCH)
params = jax.device_put(new_mlp_state(), plan.state_shardings["params"])
state, _ = parallel({"params": params, "average": TWIN}, mlp_batch())
expected, _ = step({"params": new_mlp_state(), "average": new_mlp_state()}, mlp_batch())
assert_close(state, expected)
print("works")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "twin",
    [
        pytest.param("params", id="one array"),
        pytest.param(
            "jax.tree.map(written_otherwise, params)", marks=pytest.mark.slow, id="two arrays around one buffer"
        ),
    ],
)
def test_one_array_in_two_places_of_the_state(twin):
    child = python(TWINS.replace("TWIN", twin))
    assert child.returncode == 0, child.stderr[-500:]
    assert "works" in child.stdout


# Options


@pytest.mark.parametrize("options", [{"num_microbatches": 0}, {"num_microbatches": "4"}, {"schedule": "2f2b"}], ids=str)
def test_micro_batches_and_schedules_that_are_none(options):
    ((name, value),) = options.items()
    with pytest.raises(errors.InvalidArgumentError, match=name) as caught:
        autopar.parallelize(mlp_step, **grouped(**options))
    assert repr(value) in str(caught.value)


def test_two_numbers_of_micro_batches():
    recipe = autopar.recipes.pipeline(2, num_microbatches=8)
    autopar.parallelize(mlp_step, plan=recipe, search=autopar.Search(num_microbatches=8))
    with pytest.raises(errors.InvalidArgumentError, match="the recipe's 8 micro-batches, got 4"):
        autopar.parallelize(mlp_step, plan=recipe, search=autopar.Search(num_microbatches=4))


@pytest.mark.parametrize("limit", [0, -1, 8e9])
def test_a_memory_limit_that_is_none(limit):
    with pytest.raises(errors.InvalidArgumentError, match=rf"memory_limit_bytes.*positive number.*got .*{limit}"):
        autopar.parallelize(mlp_step, search=autopar.Search(memory_limit_bytes=limit))


@pytest.mark.parametrize(
    "options",
    [
        {"cluster": 8},
        {"cache_dir": 3},
        {"search": "quick"},
        {"plan": "plan.json"},
    ],
    ids=lambda options: next(iter(options)),
)
def test_an_option_of_the_wrong_type_is_named(options):
    ((name, value),) = options.items()
    with pytest.raises(errors.InvalidArgumentError, match=f"{name}.*{type(value).__name__}"):
        autopar.parallelize(mlp_step, **options)


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ({"effort": "quick"}, r"expected search=autopar\.Search\(effort='quick'\), got effort='quick'"),
        ({"follow": mlp_step}, "expected plan=<function mlp_step"),
        ({"devices": 8}, "expected the options plan, cluster, search, batch_argnums, .*cache_dir, got devices=8"),
    ],
    ids=["of the search", "a step to follow", "unknown"],
)
def test_an_option_that_there_is_not_is_named_with_its_place(option, says):
    with pytest.raises(errors.InvalidArgumentError, match=says):
        autopar.parallelize(mlp_step, **option)
    with pytest.raises(errors.InvalidArgumentError, match=says):
        autopar.plan(mlp_step, MLP_STATE, MLP_BATCH, cluster="dgx-h100", **option)


def test_parallelize_has_at_most_twelve_options():
    options = [p for p in inspect.signature(autopar.parallelize).parameters.values() if p.kind is p.KEYWORD_ONLY]
    assert len(options) <= 12


def test_one_device_that_is_too_small_is_said_to_be():
    """There is nothing to choose there, so that every choice costs nothing."""

    def step(state, batch):
        return state - 0.1 * jnp.tanh(state @ state), batch.sum()

    shape = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    with pytest.raises(errors.MemoryLimitError, match=r"expected at most 1 kB per device"):
        autopar.plan(
            step,
            shape,
            shape,
            cluster=autopar.Cluster.local(1),
            search=autopar.Search(memory_limit_bytes=1000),
            cache_dir=None,
        )


def test_a_memory_limit_that_nothing_satisfies(tmp_path):
    parallel = small(memory_limit_bytes=1_000, cache_dir=tmp_path)
    with pytest.raises(errors.MemoryLimitError) as caught:
        parallel(new_mlp_state(), mlp_batch())
    error = caught.value
    state_bytes = sum(x.size * 4 for x in MLP_STATE.values())
    assert error.limit_bytes == 1_000
    assert error.needed_bytes >= state_bytes / 2  # two devices
    assert error.bytes_over == error.needed_bytes - 1_000
    assert re.search(r"mlp_step on mesh 2: expected at most 1 kB per device, got [\d.]+ kB, [\d.]+ kB over", str(error))
    assert any("state['first']" in name for name, _ in error.largest)
    assert all(word in error.hint for word in ("more devices", "smaller batch", "jax.checkpoint"))
    assert cached_plans(tmp_path) == []


def test_a_memory_limit_that_is_just_enough():
    needed = small(memory_limit_bytes=1_000)
    with pytest.raises(errors.MemoryLimitError) as caught:
        needed.plan(MLP_STATE, MLP_BATCH)
    enough = small(memory_limit_bytes=caught.value.needed_bytes)
    assert enough.plan(MLP_STATE, MLP_BATCH).predicted.peak_bytes[0] <= caught.value.needed_bytes
    assert_works(enough)


def test_more_devices_than_there_are():
    cluster = autopar.Cluster.preset("dgx-h100", hosts=2)
    parallel = autopar.parallelize(mlp_step, cluster=cluster)
    assert parallel.plan(MLP_STATE, MLP_BATCH).mesh.num_devices == 16
    for run in (lambda: parallel(new_mlp_state(), mlp_batch()), lambda: parallel.init(mlp_state, jax.random.key(0))):
        with pytest.raises(errors.NotEnoughDevicesError, match="expected 16 devices, got 8 cpu") as caught:
            run()
        assert "cluster=None" in caught.value.hint


def test_more_local_devices_than_there_are():
    with pytest.raises(errors.NotEnoughDevicesError, match=r"expected 1 to 8 devices.*got 9"):
        autopar.Cluster.local(9)


# Plans given


@pytest.mark.parametrize("seconds", [-1, float("nan"), True, "3"])
def test_a_time_limit_that_is_none_is_refused(seconds):
    with pytest.raises(errors.InvalidArgumentError, match=r"Search\(time_limit_s=...\): expected seconds, 0 or more"):
        small(time_limit_s=seconds)
    parallel = small()
    with pytest.raises(errors.InvalidArgumentError, match=r"replan\(time_limit_s=...\): expected seconds, 0 or more"):
        parallel.replan(new_mlp_state(), mlp_batch(), time_limit_s=seconds)


def test_state_in_the_place_of_the_batch_is_refused():
    """Its leaves have no number of examples in common, and the step returns them anew."""
    state = {"up": jnp.ones((16, 32)), "down": jnp.ones((32, 8))}
    rows, batch = {"sums": jnp.ones((16,)), "more": jnp.ones((32,))}, {"x": jnp.ones((16, 16))}

    def step(params, rows, batch):
        grads = jax.grad(lambda p: jnp.mean((batch["x"] @ p["up"] @ p["down"]) ** 2))(params)
        rows = {"sums": rows["sums"] + grads["up"].sum(1), "more": rows["more"] + grads["down"].sum(1)}
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), rows

    expected = re.escape("autopar.parallelize(step, batch_argnums=(2,), donate_argnums=(0, 1))")
    with pytest.raises(errors.InvalidArgumentError, match=expected):
        small(step)(state, rows, batch)

    def with_key(params, rows, batch, key):
        return step(params, rows, {"x": batch["x"] * jax.random.bernoulli(key, 0.5, (16, 16))})

    with pytest.raises(errors.InvalidArgumentError, match=r"batch_argnums=\(2,\), donate_argnums=\(0, 1\)"):
        small(with_key)(state, rows, batch, jax.random.key(0))
    told = small(step, batch_argnums=(2,), donate_argnums=(0, 1), cache_dir=None)
    copies = [jax.tree.map(jnp.copy, each) for each in (state, rows)]
    assert_close(told(*copies, batch), jax.jit(step)(state, rows, batch))


def test_an_output_like_the_examples_is_no_reason_to_refuse():
    """A step that returns what it reads, beside an argument that it does not."""

    def step(state, batch, scale):
        grads = jax.grad(lambda w: jnp.mean((scale * batch["x"] @ w - batch["y"]) ** 2))(state)
        return state - 0.1 * grads, batch

    batch = {"x": jnp.ones((8, 16)), "y": jnp.ones((8, 4))}
    _, same = small(step, cache_dir=None)(jnp.ones((16, 4)), batch, jnp.float32(2.0))
    assert_close(same, batch)


# Searches


@pytest.mark.parametrize(
    "fields",
    [
        {"num_microbatches": np.array([1, 2])},
        {"num_microbatches": True},
        {"per_microbatch": 5},
        {"expert_load": [[1, 2], [0, 0]]},
        {"remat": 5},
        {"show_progress": 0},
        {"memory_limit_bytes": True},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_a_field_of_the_wrong_type_is_named(fields):
    ((name, _),) = fields.items()
    with pytest.raises(errors.InvalidArgumentError, match=rf"Search\({name}=\.\.\.\)"):
        autopar.Search(**fields)


def test_a_search_keeps_no_mapping_of_the_caller():
    options = {"b": 1, "a": True}
    search = autopar.Search(compiler_options=options)
    options["c"] = 2
    assert search == autopar.Search(compiler_options={"a": True, "b": 1})
    assert hash(search) == hash(autopar.Search(compiler_options={"a": True, "b": 1}))
    assert search.updated(autopar.Search(effort="quick")).compiler_options == search.compiler_options


@pytest.mark.parametrize(
    ("option", "place"),
    [
        ("num_microbatches", r"search=autopar\.Search\(num_microbatches=4\)"),
        ("follow", "plan=4: a step to follow, a recipe or a plan"),
        ("in_shardings", r"plan=autopar\.constrain\(\.\.\.\): docs/from-pjit\.md"),
        ("devices", "the options plan, cluster, search"),
    ],
)
def test_an_option_that_there_is_not_is_told_its_place(option, place):
    with pytest.raises(errors.InvalidArgumentError, match=place):
        autopar.parallelize(mlp_step, **{option: 4})
