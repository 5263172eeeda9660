"""`jax.shard_map` in a step: equal to plain `jax.jit` under every kind of plan, on the devices it is split over."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType

import autopar
from autopar import recipes
from autopar.common import loops
from autopar.errors import MixedExamplesError, UnsupportedError
from autopar.frontend.build_graph import build_graph
from autopar.frontend.tracing import trace
from autopar.ir.rules import RuleBook
from autopar.ops.kernels.islands import island_of, run_parts
from tests.ops.kernels.island_steps import P, arguments, megatron, mesh_of, nested, normalised, rows, step_of
from tests.ops.kernels.test_kernels import assert_equals_jit, parallel, splits
from tests.small_steps import assert_close

HERE = "island_steps.py"
PIPELINE = recipes.pipeline(2, num_microbatches=2)


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("island", "names", "recipe", "devices", "split"),
    [
        (rows(1), ("square",), None, 1, None),
        (rows(4), ("square",), None, 4, 4),
        (rows(4), ("square",), None, 8, 4),
        (rows(4), ("square",), recipes.data_parallel(), 4, 4),
        (rows(2), ("square",), recipes.data_parallel(), 4, 1),
        (normalised(4), ("square",), None, 4, None),
        (normalised(2), ("square",), recipes.data_parallel(), 4, 1),
        (megatron(2, 2), ("up", "down"), None, 4, 4),
        (megatron(2, 4), ("up", "down"), None, 8, 8),
        (megatron(4, 1), ("up", "down"), recipes.zero(3), 4, 4),
        (megatron(1, 2), ("up", "down"), recipes.tensor_parallel(), 2, 2),
    ],
)
def test_a_step_with_islands_equals_plain_jit_and_sends_what_was_predicted(island, names, recipe, devices, split):
    step, args = step_of(island, *names), arguments()
    made = assert_equals_jit(step, recipe, devices, args)
    if split is not None:  # None: either is as fast, or none is left
        assert splits(made, args, "shard_map") == [split] * 4
    verified = autopar.verify(made, *args)
    assert {c.name: c.compiled for c in verified.collectives} == {c.name: c.predicted for c in verified.collectives}


def test_an_island_of_one_device_is_a_part_of_the_step():
    made = assert_equals_jit(step_of(megatron(1, 1), "up", "down"), recipes.data_parallel(), 4, arguments())
    assert splits(made, arguments(), "shard_map") == []
    assert set(splits(made, arguments(), "tanh")) == {4}


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("island", "names", "recipe", "devices"),
    [
        (rows(1), ("square",), PIPELINE, 2),
        (rows(2), ("square",), PIPELINE, 4),
        (megatron(1, 2), ("up", "down"), PIPELINE, 4),
        (megatron(2, 2), ("up", "down"), PIPELINE, 8),
        (megatron(2, 2), ("up", "down"), recipes.cut(recipes.zero(2), num_microbatches=2), 4),
    ],
)
def test_islands_in_micro_batches_and_stages(island, names, recipe, devices):
    assert_equals_jit(step_of(island, *names), recipe, devices, arguments())


@pytest.mark.cases(1)
@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_kernels_and_islands_run_in_the_loop_over_micro_batches(num_microbatches):
    """They are work on examples, not something to do for the whole batch before the loop."""
    tanh_product = autopar.kernel(lambda a, b: jnp.tanh(a @ b), "m [k], [k] [n] -> m [n]")
    island = megatron(2, 2)

    def step(state, batch):
        def loss(p):
            x = batch["x"] + tanh_product(batch["x"], p["square"])
            x = x + island(x, p["up"], p["down"])
            return jnp.mean((x - batch["y"]) ** 2)

        value, grads = jax.value_and_grad(loss)(state)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), value

    keys = jax.random.split(jax.random.key(0), 5)
    shapes = {"square": (8, 8), "up": (8, 16), "down": (16, 8)}
    state = {name: 0.3 * jax.random.normal(key, shapes[name]) for name, key in zip(shapes, keys, strict=False)}
    batch = {"x": jax.random.normal(keys[3], (16, 8)), "y": jax.random.normal(keys[4], (16, 8))}
    recipe = recipes.combine(zero=3, recompute="matmuls", num_microbatches=num_microbatches)
    assert_equals_jit(step, recipe, 8, (state, batch))


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("recipe", "devices"),
    [(None, 2), (PIPELINE, 4), (recipes.cut(recipes.zero(3), num_microbatches=2), 2)],
)
def test_islands_in_a_scan_over_layers(recipe, devices):
    island = megatron(1, 2)

    def step(state, batch):
        def body(x, p):
            return jnp.tanh(x + island(x, p["up"], p["down"])) @ p["square"], None

        def loss(state):
            x, _ = jax.lax.scan(jax.checkpoint(body), batch["x"], state)
            return jnp.mean((x - batch["y"]) ** 2)

        return jax.tree.map(lambda p, g: p - 0.1 * g, state, jax.grad(loss)(state))

    state, batch = arguments()
    layers = {name: jnp.stack([state[name]] * 4) for name in ("up", "down", "square")}
    assert_equals_jit(step, recipe, devices, (layers, batch))


def test_the_plan_says_which_islands_it_does_not_split():
    plan = parallel(step_of(rows(2), "square"), recipes.data_parallel(), 4).plan(*arguments())
    (note,) = [n for n in plan.record.notes if "shard_map" in n]
    assert f"{HERE}:" in note
    assert "(x 2) is split among 1 of its 2 devices" in note
    split = parallel(step_of(rows(4), "square"), recipes.data_parallel(), 4).plan(*arguments())
    assert not [n for n in split.record.notes if "shard_map" in n]


def test_an_island_that_mixes_examples_is_not_cut_into_micro_batches():
    with pytest.raises(MixedExamplesError, match="it combines examples") as caught:
        parallel(step_of(normalised(2), "square"), PIPELINE, 4)(*arguments())
    assert f"{HERE}:" in caught.value.where


def test_an_island_that_numbers_the_devices_of_its_examples_is_not_cut_into_micro_batches():
    def body(x, w):
        return x @ w * (1.0 + jax.lax.axis_index("x"))

    island = jax.shard_map(body, mesh=mesh_of(x=2), in_specs=(P("x"), P()), out_specs=P("x"))
    with pytest.raises(MixedExamplesError, match="by their position"):
        parallel(step_of(island, "square"), PIPELINE, 4)(*arguments())


def test_an_island_for_another_mesh_names_the_sizes_that_fit():
    with pytest.raises(UnsupportedError, match="of 1, 2, 4 devices") as caught:
        parallel(step_of(rows(8), "square"), None, 4).plan(*arguments())
    assert "one of 8 devices (x 8)" in caught.value.got
    assert f"{HERE}:" in caught.value.where


@pytest.mark.cases(1)
@pytest.mark.parametrize("recipe", [None, recipes.data_parallel(), PIPELINE], ids=["free", "data", "stages"])
def test_axes_that_an_island_leaves_to_the_compiler_say_nothing(recipe):
    def body(x, w):
        hidden = jax.lax.with_sharding_constraint(jnp.tanh(x @ w), P(None, "y"))
        return hidden * jax.lax.psum(jnp.sum(w[0]), "x")

    mesh = mesh_of(x=2, y=2)
    island = jax.shard_map(body, mesh=mesh, in_specs=(P("x"), P()), out_specs=P("x"), axis_names={"x"})
    with jax.set_mesh(mesh):
        assert_equals_jit(step_of(island, "square"), recipe, 4, arguments())


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("recipe", "devices"),
    [(None, 4), (recipes.data_parallel(), 2), (PIPELINE, 4), (recipes.cut(recipes.zero(3), num_microbatches=2), 4)],
)
def test_an_island_inside_of_an_island_equals_plain_jit(recipe, devices):
    assert_equals_jit(step_of(nested(2, 2), "up", "down"), recipe, devices, arguments())


def test_an_island_inside_of_a_checkpointed_scan_body_equals_plain_jit():
    island = nested(2, 2)

    def step(state, batch):
        def body(x, p):
            return jnp.tanh(x + island(x, p["up"], p["down"])), None

        def loss(state):
            return jnp.mean((jax.lax.scan(jax.checkpoint(body), batch["x"], state)[0] - batch["y"]) ** 2)

        return jax.tree.map(lambda p, g: p - 0.1 * g, state, jax.grad(loss)(state))

    state, batch = arguments()
    layers = {name: jnp.stack([state[name]] * 2) for name in ("up", "down")}
    assert_equals_jit(step, recipes.cut(recipes.zero(3), num_microbatches=2), 4, (layers, batch))


def test_an_island_inside_that_sums_over_the_devices_of_examples_is_not_cut_into_micro_batches():
    def outer(x, w):
        inner = jax.shard_map(
            lambda x, w: jax.lax.psum(jnp.tanh(x @ w), "x"),
            in_specs=(P(), P(None, "y")), out_specs=P(None, "y"), axis_names={"y"}, check_vma=False,
        )  # fmt: skip
        return jnp.sin(inner(x, w))

    mesh = mesh_of(x=2, y=2)
    island = jax.shard_map(
        outer, mesh=mesh, in_specs=(P("x"), P()), out_specs=P("x"), axis_names={"x"}, check_vma=False
    )
    step = step_of(island, "square")
    with pytest.raises(MixedExamplesError, match="it combines examples") as caught:
        parallel(step, PIPELINE, 4)(*arguments())
    assert f"{HERE}:" in caught.value.where
    assert_equals_jit(step, None, 4, arguments())


def test_an_island_inside_that_numbers_the_devices_of_examples_is_not_cut_into_micro_batches():
    def outer(x, w):
        inner = jax.shard_map(
            lambda w: w * (1.0 + jax.lax.axis_index("x")),
            in_specs=P("y"), out_specs=P("y"), axis_names={"y"}, check_vma=False,
        )  # fmt: skip
        return x @ inner(w)

    mesh = mesh_of(x=2, y=2)
    island = jax.shard_map(
        outer, mesh=mesh, in_specs=(P("x"), P()), out_specs=P("x"), axis_names={"x"}, check_vma=False
    )
    with pytest.raises(MixedExamplesError, match="by their position"):
        parallel(step_of(island, "square"), PIPELINE, 4)(*arguments())


def test_the_gradient_of_islands_in_islands_that_jax_does_not_lower_is_refused_by_its_line():
    step = step_of(nested(2, 2, check_vma=True), "up", "down")
    with pytest.raises(UnsupportedError, match="check_vma=False to both calls") as caught:
        parallel(step, None, 4).plan(*arguments())
    assert f"{HERE}:" in caught.value.where


def test_a_branch_and_a_while_loop_inside_of_an_island():
    def body(x, w):
        x = jax.lax.fori_loop(0, jnp.int32(3), lambda i, c: jnp.tanh(c @ w) + i, x)
        return jax.lax.cond(jax.lax.psum(jnp.sum(x), "x") > 0, lambda x: x, lambda x: -x, x)

    island = jax.shard_map(body, mesh=mesh_of(x=4), in_specs=(P("x"), P()), out_specs=P("x"))

    def step(state, batch):
        return state, island(batch["x"], state["square"])

    for recipe, devices in ((None, 4), (None, 8), (recipes.data_parallel(), 8)):
        assert_equals_jit(step, recipe, devices, arguments())


def test_a_condition_for_all_rows_is_computed_once_a_turn():
    def goes_on(operands):
        return [operands[0] < 5]

    run = functools.partial(loops.while_loop, goes_on, lambda operands: [operands[0] + 1], counts=(0, 0), typed=list)
    (loop,) = jax.make_jaxpr(lambda x: run(operands=[x]))(jnp.int32(0)).eqns
    assert [eqn.primitive.name for eqn in loop.params["cond_jaxpr"].eqns] == ["lt"]
    assert [eqn.primitive.name for eqn in loop.params["body_jaxpr"].eqns] == ["add"]
    assert run(operands=[jnp.int32(0)]) == [5]


def test_a_while_loop_that_goes_on_for_some_rows_of_an_island():
    def halved(row):
        return jax.lax.while_loop(lambda r: jnp.sum(jnp.abs(r)) > 1.0, lambda r: 0.5 * r, row)

    island = jax.shard_map(jax.vmap(halved), mesh=mesh_of(x=4), in_specs=P("x"), out_specs=P("x"))

    def step(state, batch):
        return state, island(batch["x"] * jnp.arange(16.0)[:, None])

    for recipe, devices in ((None, 4), (recipes.data_parallel(), 8)):
        assert_equals_jit(step, recipe, devices, arguments())


@pytest.mark.cases(1)
@pytest.mark.parametrize("place", [jax.lax.with_sharding_constraint, jax.sharding.reshard])
def test_placements_inside_of_an_island_say_nothing(place):
    def body(x, w):
        return place(jnp.tanh(x @ w), P(None, None))

    island = jax.shard_map(body, mesh=mesh_of(x=4), in_specs=(P("x"), P()), out_specs=P("x"))
    assert_equals_jit(step_of(island, "square"), None, 4, arguments())


def test_an_island_of_one_device_is_code_of_the_step():
    mesh = jax.make_mesh((1, 1), ("data", "expert"), devices=jax.devices()[:1], axis_types=(AxisType.Auto,) * 2)

    def body(x, w):
        first = jax.lax.axis_index("expert")
        gathered = jax.lax.all_gather(w, "data", axis=0, tiled=True)
        y = jax.lax.psum(x @ gathered, ("data", "expert")) + first
        y = jax.lax.all_to_all(y, "expert", 0, 1, tiled=True)
        y = jax.lax.ppermute(y, "data", [(0, 0)])
        stacked = jax.lax.all_gather(y, "expert")
        y = jax.lax.psum_scatter(stacked, "expert", scatter_dimension=0, tiled=False)
        y = y + jax.lax.pmax(jax.lax.stop_gradient(y), "data")
        return y, jax.lax.pmean(jnp.sum(y), ("data", "expert"))

    def step(w, x):
        def loss(w):
            run = jax.shard_map(
                body, mesh=mesh, in_specs=(P("data"), P("expert")), out_specs=(P("data"), P()), check_vma=False
            )
            y, total = run(x, w)
            return jnp.mean(y**2) + total

        value, grad = jax.value_and_grad(jax.checkpoint(loss))(w)
        return w - 0.1 * grad, value

    args = jnp.linspace(-1.0, 1.0, 128).reshape(16, 8), jnp.linspace(0.0, 1.0, 128).reshape(8, 16)
    parallel = autopar.parallelize(step, plan="dp", donate_argnums=(), cache_dir=None)
    graph = build_graph(trace(step, args, names=("w", "x"), donate=(), batch=(1,)), RuleBook())
    assert "shard_map" not in {op.primitive for op in graph.ops()}
    assert_close(parallel(*args), jax.jit(step)(*args))


def test_rows_sent_to_the_device_itself():
    mesh = jax.make_mesh((1,), ("expert",), devices=jax.devices()[:1], axis_types=(AxisType.Auto,))
    one = [jnp.array([n]) for n in (1, 3, 2, 3)]
    run = jax.shard_map(
        lambda x, out: jax.lax.ragged_all_to_all(x, out, *one, axis_name="expert"),
        mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False,
    )  # fmt: skip
    x, out = jnp.arange(12.0).reshape(6, 2), -jnp.ones((8, 2))
    (eqn,) = jax.make_jaxpr(run)(x, out).jaxpr.eqns[-1:]
    (made,) = run_parts(eqn, island_of(eqn), {}, [*one, x, out][-len(eqn.invars) :])
    assert_close(made, out.at[2:5].set(x[1:4]))
