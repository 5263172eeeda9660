"""Shardings that a step's code names, as advice, as pins, and ignored."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import autopar
from autopar.common.progress import Progress
from autopar.common.text import text_of_s
from autopar.errors import InvalidArgumentError
from autopar.frontend.tracing import trace
from autopar.ir.rules import RuleBook
from autopar.ir.traced_step import ShardingsInCode
from autopar.plan.options import PlanRequest
from autopar.search import planner
from autopar.search.comparison import choose
from autopar.search.planner import planning_context, with_pins_of_code
from tests.small_steps import assert_close, grouped, slow_cluster, verified_step

WIDTH = 32


def mesh(data, model):
    return Mesh(np.array(jax.devices()[: data * model]).reshape(data, model), ("data", "model"))


def mlp(constrain):
    """Two products; `constrain` lays what is between them."""

    def step(params, batch):
        def loss(params):
            hidden = constrain(jnp.tanh(batch["x"] @ params["up"]))
            return jnp.mean((hidden @ params["down"] - batch["y"]) ** 2)

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return step


def arguments():
    random = np.random.default_rng(0)
    up, down = random.normal(size=(2, WIDTH, WIDTH)).astype(np.float32) / 6
    x, y = random.normal(size=(2, 16, WIDTH)).astype(np.float32)
    return {"up": up, "down": down}, {"x": x, "y": y}


def laid(on, *spec):
    return lambda x: jax.lax.with_sharding_constraint(x, NamedSharding(on, P(*spec)))


def parallel(step, devices, **options):
    return autopar.parallelize(step, cluster=slow_cluster(devices), cache_dir=None, **grouped(**options))


def note(plan):
    (found,) = [text for text in plan.record.notes if text.startswith("the author's sharding")]
    return found


def searched(step, constraints):
    """The context of a search on four devices, and its plan as a candidate."""
    args = arguments()
    traced = trace(step, args, names=("params", "batch"), donate=(0,), batch=(1,))
    request = PlanRequest(constraints=constraints)
    context = planning_context(traced, slow_cluster(4), request, RuleBook(), Progress("", show=False))
    context = planner.ask_sources(with_pins_of_code(context))
    return context, choose(context)


@pytest.mark.parametrize("devices", [4, 8])
def test_pins_keep_the_layout_and_the_numbers(devices):
    on = mesh(2, devices // 2)
    step = parallel(mlp(laid(on, "data", "model")), devices, constraints="pins")
    args = arguments()
    verified_step(step, args, 1e-5)
    assert_close(step(*args), jax.jit(mlp(lambda x: x))(*args))
    pinned = step.plan(*args).record.pinned
    assert {pin.spec for pin in pinned.pins} == {'P("data", "model")'}
    assert all(
        "with_sharding_constraint at" in pin.pattern and "test_shardings_in_code.py" in pin.pattern
        for pin in pinned.pins
    )
    assert pinned.step_time_s >= pinned.free_step_time_s * 0.99


@pytest.mark.parametrize("spec", [("data", "model"), ("data",), (None, "model"), (None, ("data", "model"))])
def test_pinned_values_lie_as_the_code_says(spec):
    context, chosen = searched(mlp(laid(mesh(2, 2), *spec)), ShardingsInCode.PINS)
    names = chosen.pins.names
    wanted = tuple(() if e is None else (e,) if isinstance(e, str) else e for e in (*spec, *(None,) * (2 - len(spec))))
    found = [chosen.sharding.reduced[value] for value, _ in context.graph.written]
    assert len(found) == 2  # of the hidden values, and of their gradient
    assert {tuple(tuple(names[a] for a in axes) for axes in layout.dims) for layout in found} == {wanted}
    assert all(chosen.sharding.mesh.axis_sizes[names.index(name)] == 2 for axes in wanted for name in axes)


def test_arguments_and_bodies_of_loops_are_pinned():
    rows = laid(mesh(2, 2), "data")

    def step(params, batch):
        def loss(stacked):
            x, _ = jax.lax.scan(lambda x, w: (rows(jnp.tanh(x @ w)), None), rows(batch["x"]), stacked)
            return jnp.mean((x - batch["y"]) ** 2)

        value, grads = jax.value_and_grad(loss)(params)
        return params - 0.1 * grads, value

    params, batch = arguments()
    args = jnp.stack(list(params.values())), batch
    found = parallel(step, 4, constraints="pins")
    verified_step(found, args, 1e-5)
    (x,) = [a for a in found.plan(*args).record.arguments if a.path.endswith("['x']")]
    assert [len(axes) for axes in x.layout.dims] == [1, 0]
    pins = found.plan(*args).record.pinned.pins
    assert sum(pin.count for pin in pins) >= 3
    assert all(pin.of == "values" for pin in pins)


def test_dimensions_that_are_left_open_are_searched():
    open_ = laid(mesh(4, 1), "data", P.UNCONSTRAINED)
    context, chosen = searched(mlp(open_), ShardingsInCode.PINS)
    for value, _ in context.graph.written:
        rows, _ = chosen.sharding.reduced[value].dims
        assert chosen.sharding.mesh.size(rows) == 4


def test_advice_tells_what_the_authors_sharding_costs():
    step = mlp(laid(mesh(2, 2), "data"))
    plan = parallel(step, 4).plan(*arguments())
    pinned = parallel(step, 4, constraints="pins").plan(*arguments())
    free = parallel(step, 4, constraints="ignore").plan(*arguments())
    cost_s = pinned.predicted.step_time_s
    assert plan.predicted.step_time_s == free.predicted.step_time_s < cost_s
    assert f"(2 of 2 values as written) costs {text_of_s(cost_s)}; the plan takes " in note(plan)
    (lost,) = [r for r in plan.record.rejected if r.source == "shardings in the code"]
    assert lost.step_time_s == pytest.approx(cost_s)
    assert lost.why == f"slower by {text_of_s(cost_s - free.predicted.step_time_s)}"


def test_advice_that_is_faster_is_the_plan(monkeypatch):
    """As if the search had missed it."""
    monkeypatch.setattr(planner, "mesh_candidates", lambda context: [])
    monkeypatch.setattr(planner, "_pipelines_that_may_pay", lambda context, best: [])
    step, args = mlp(laid(mesh(2, 2), "data", "model")), arguments()
    found = parallel(step, 4)
    assert note(found.plan(*args)).endswith("and is the plan")
    verified_step(found, args, 1e-5)
    assert_close(found(*args), jax.jit(step)(*args))


def test_advice_that_cannot_be_kept_is_counted():
    def reordered(x):  # no operation makes a whole matrix of parts by itself, and one value lies in two ways
        return laid(mesh(2, 2), None, "model")(laid(mesh(2, 2), "data")(x))

    plan = parallel(mlp(reordered), 4).plan(*arguments())
    assert "of 2 values as written) costs" in note(plan)
    with pytest.raises(InvalidArgumentError, match=r"one layout of a value, P\(.data., None\) of with_sharding"):
        parallel(mlp(reordered), 4, constraints="pins").plan(*arguments())


def test_ignored_shardings_are_dropped_with_a_note():
    step, args = mlp(laid(mesh(2, 2), "data")), arguments()
    found = parallel(step, 4, constraints="ignore")
    plan = found.plan(*args)
    verified_step(found, args, 1e-5)
    assert plan.record.rejected == parallel(mlp(lambda x: x), 4).plan(*args).record.rejected
    (text,) = plan.record.notes
    assert "are dropped: the plan decides" in text


def test_a_mesh_that_the_devices_cannot_have_is_named_with_its_line():
    step = mlp(laid(mesh(4, 2), "data", "model"))
    with pytest.raises(InvalidArgumentError, match=r"test_shardings_in_code.py:.*4 devices, got data=4, model=2"):
        parallel(step, 4, constraints="pins").plan(*arguments())
    text = note(parallel(step, 4).plan(*arguments()))
    assert "was not weighed: with_sharding_constraint at" in text
    assert "test_shardings_in_code.py" in text


def test_two_sizes_of_one_axis_are_refused():
    step = mlp(lambda x: laid(mesh(4, 2), "data")(jnp.sin(laid(mesh(2, 2), "data")(x))))
    with pytest.raises(InvalidArgumentError, match=r"an axis 'data' of 2 devices, as with_sharding.*got one of 4"):
        parallel(step, 8, constraints="pins").plan(*arguments())


def test_pins_exclude_stages_and_recipes_with_axes():
    step = mlp(laid(mesh(2, 2), "data"))
    for plan in (autopar.recipes.pipeline(2, num_microbatches=2), autopar.recipes.data_parallel()):
        with pytest.raises(InvalidArgumentError, match=r"test_shardings_in_code.py"):
            parallel(step, 4, constraints="pins", plan=plan).plan(*arguments())
        rejected = parallel(step, 4, plan=plan).plan(*arguments()).record.rejected
        assert any("the author's sharding was not weighed" in r.why and "the request has" in r.why for r in rejected)


def test_pins_by_path_stand_beside_those_of_the_code():
    args = arguments()
    pins = autopar.constrain({"params/up": P(None, "model")})
    step = parallel(mlp(laid(mesh(2, 2), "data", "model")), 4, plan=pins, constraints="pins")
    verified_step(step, args, 1e-5)
    record = step.plan(*args).record
    (up,) = [a for a in record.arguments if a.kind == "state" and "up" in a.path]
    assert [[record.axis_names[0][a] for a in axes] for axes in up.layout.dims] == [[], ["model"]]
    assert [pin.count for pin in record.pinned.pins] == [1, 2]
    pins = autopar.constrain({"params/up": P(None, "model")}, axis_sizes={"model": 4})
    with pytest.raises(InvalidArgumentError, match=r"model=2, as the mesh in the step's code has it"):
        parallel(mlp(laid(mesh(2, 2), "data", "model")), 4, plan=pins, constraints="pins").plan(*args)


def test_typed_shardings_are_pins_too():
    def step(params, batch):
        def loss(params):
            x = jax.sharding.reshard(batch["x"], P("data"))
            for w in params.values():
                x = jnp.tanh(jnp.einsum("bi,ij->bj", x, w, out_sharding=P("data", None)))
            return jnp.mean((x - batch["y"]) ** 2)

        value, grads = jax.value_and_grad(loss)(params)
        return grads, value

    args = arguments()
    explicit = (jax.sharding.AxisType.Explicit,)
    with jax.set_mesh(jax.make_mesh((4,), ("data",), devices=jax.devices()[:4], axis_types=explicit)):
        found = parallel(step, 4, constraints="pins")
        assert_close(found(*args), jax.jit(step)(*args))
        pins = found.plan(*args).record.pinned.pins
    assert {pin.pattern.split(" at ")[0] for pin in pins} == {"reshard", "out_sharding"}
    assert {pin.spec for pin in pins} == {'P("data", None)'}


EXPLICIT = (jax.sharding.AxisType.Explicit,) * 2


def explicit_mesh():
    return jax.make_mesh((2, 2), ("data", "model"), devices=jax.devices()[:4], axis_types=EXPLICIT)


def in_explicit_mesh():
    """Arguments that lie in the mesh that is set."""
    specs = {"up": P(None, "model"), "down": P("model", None)}, {"x": P("data", None), "y": P("data", None)}
    return jax.tree.map(jax.reshard, arguments(), specs)


def typed_step(way="unrolled"):
    """Two layers, whose products say where they lie; scanned, unrolled, under `jax.checkpoint`, or with a cast."""

    def layers(x, params):
        x = jnp.tanh(jnp.einsum("bi,ij->bj", x, params["up"], out_sharding=P("data", "model")))
        return jnp.einsum("bi,ij->bj", x, params["down"], out_sharding=P("data", None))

    def step(params, batch):
        def loss(params):
            x = batch["x"]
            if way == "scanned":
                x, _ = jax.lax.scan(lambda x, _: (layers(x, params), None), x, length=2)
            elif way == "cast":
                x = layers(x.astype(jnp.bfloat16).astype(jnp.float32), params)
            else:
                x = (jax.checkpoint(layers) if way == "checkpoint" else layers)(x, params)
            return jnp.mean((x - batch["y"]) ** 2)

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), {"loss": value, "double": 2 * batch["x"]}

    return step


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("constraints", "way"),
    [("advice", "unrolled"), ("ignore", "unrolled")]
    + [("pins", way) for way in ("unrolled", "scanned", "checkpoint", "cast")],
)
def test_arrays_of_an_explicit_mesh_come_back_in_it(constraints, way):
    step = typed_step(way)
    with jax.set_mesh(explicit_mesh()):
        found = parallel(step, 4, constraints=constraints)
        state, others = in_explicit_mesh()[0], in_explicit_mesh()[0]
        batch = in_explicit_mesh()[1]
        for _ in range(3):  # the second and third on what the step returned, by the program at hand
            state, metrics = found(state, batch)
            others, expected = jax.jit(step)(others, batch)
            assert_close((state, metrics), (others, expected))
            for one, other in zip(jax.tree.leaves((state, metrics)), jax.tree.leaves((others, expected)), strict=True):
                assert jax.typeof(one) == jax.typeof(other)
                assert one.sharding.is_equivalent_to(other.sharding, one.ndim)
            jax.tree.map(jnp.add, state, others)  # code in explicit mode goes on
        plan = found.latest_plan
        moves = [note for note in plan.record.notes if "move between" in note]
        assert len(moves) == (constraints != "pins")
        if constraints == "pins":  # they lie so, in the program too
            for name, sharding in plan.state_shardings.items():
                assert sharding.is_equivalent_to(state[name].sharding, 2)


def test_stages_return_arrays_of_an_explicit_mesh_too():
    with jax.set_mesh(explicit_mesh()):
        args = in_explicit_mesh()
        expected = jax.jit(typed_step())(*args)
        found = parallel(typed_step(), 4, plan=autopar.recipes.pipeline(2, num_microbatches=2))(*args)
        assert_close(found, expected)
        assert jax.tree.map(jax.typeof, found) == jax.tree.map(jax.typeof, expected)


def test_a_state_outside_of_the_explicit_mesh_stays_in_the_layout_of_the_plan():
    """Its type would be that of a replicated array."""
    with jax.set_mesh(explicit_mesh()):
        step = parallel(typed_step(), 4, constraints="ignore")
        state, _ = arguments()
        batch = in_explicit_mesh()[1]
        new, metrics = step(state, batch)
        layouts = step.latest_plan.state_shardings
        assert {k: v.sharding for k, v in new.items()} == layouts
        assert jax.typeof(metrics["double"]) == jax.typeof(batch["x"])


@pytest.mark.parametrize(
    ("constraints", "end"), [("advice", "are advice: the plan"), ("pins", "are pins"), ("ignore", "are dropped")]
)
def test_types_alone_are_told_of(constraints, end):
    """Of a step whose code names no sharding."""
    with jax.set_mesh(explicit_mesh()):
        step = parallel(lambda x: x * 2, 4, constraints=constraints, donate_argnums=(), batch_argnums=())
        notes = step.plan(jax.reshard(jnp.arange(8.0), P("data"))).record.notes
    (found,) = [text for text in notes if text.startswith("shardings that the step's code names at 2 places (types;")]
    assert end in found
    assert ("no time and no memory includes" in found) == (constraints != "pins")


def test_other_types_are_another_step():
    with jax.set_mesh(explicit_mesh()):
        step = parallel(lambda x: x * 2, 4, constraints="pins", donate_argnums=(), batch_argnums=())
        for spec in (P("data"), P("model"), P("data")):
            x = jax.reshard(jnp.arange(8.0), spec)
            for _ in range(2):
                assert jax.typeof(step(x)) == jax.typeof(x)


@pytest.mark.parametrize("abstract", [False, True])
def test_results_lie_in_the_mesh_of_the_call(abstract):
    """No mesh is set; the step was planned with shapes, and a second mesh has the devices in another order."""
    meshes = [Mesh(devices, ("data",), EXPLICIT[:1]) for devices in (jax.devices()[:4], jax.devices()[3::-1])]
    step = parallel(lambda x: x * 2, 4, constraints="pins", donate_argnums=(), batch_argnums=())
    of_shape = NamedSharding(meshes[0].abstract_mesh if abstract else meshes[0], P("data"))
    step.plan(jax.ShapeDtypeStruct((8,), np.float32, sharding=of_shape))
    for on in (*meshes, *meshes):
        x = jax.device_put(jnp.arange(8.0), NamedSharding(on, P("data")))
        for _ in range(2):
            assert step(x).sharding == x.sharding
            assert jax.typeof(step(x)) == jax.typeof(x)
            np.testing.assert_array_equal(step(x), 2 * np.arange(8))


def test_logical_constraints_of_flax_are_pins_too():
    step, args = mlp(lambda x: nn.with_logical_constraint(x, ("batch", "hidden"))), arguments()
    with jax.set_mesh(mesh(2, 2)), nn.logical_axis_rules((("batch", "data"), ("hidden", "model"))):
        found = parallel(step, 4, constraints="pins")
        verified_step(found, args, 1e-5)
        (pin,) = found.plan(*args).record.pinned.pins
    assert (pin.spec, pin.count, pin.of) == ('P("data", "model")', 2, "values")


class Net(nnx.Module):
    def __init__(self, rngs):
        init = nnx.initializers.lecun_normal()
        self.up = nnx.Linear(WIDTH, WIDTH, kernel_init=nnx.with_partitioning(init, (None, "model")), rngs=rngs)
        self.down = nnx.Linear(WIDTH, WIDTH, kernel_init=nnx.with_partitioning(init, ("model", None)), rngs=rngs)

    def __call__(self, x):
        return self.down(jnp.tanh(self.up(x)))


def train_net(net, optimizer, batch):
    loss, grads = nnx.value_and_grad(lambda net: jnp.mean((net(batch["x"]) - batch["y"]) ** 2))(net)
    optimizer.update(net, grads)
    return loss


MOMENTUM = optax.sgd(0.1, momentum=0.9)


def new_net():
    net = Net(nnx.Rngs(0))
    return net, nnx.Optimizer(net, MOMENTUM, wrt=nnx.Param)


def test_metadata_of_nnx_variables_are_advice_or_pins():
    """Those of the optimizer's moments too, which have them from the parameters."""
    _, batch = arguments()
    with jax.set_mesh(mesh(2, 2)):
        expected = new_net()
        loss = nnx.jit(train_net)(*expected, batch)
        for constraints in ("advice", "pins", "ignore"):
            objects = new_net()
            step = parallel(train_net, 4, constraints=constraints)
            assert_close(step(*objects, batch), loss)
            assert_close(nnx.state(objects[0]), nnx.state(expected[0]))
            record = step.latest_plan.record
            if constraints == "pins":
                specs = {pin.pattern.removeprefix("metadata of nnx at "): pin.spec for pin in record.pinned.pins}
                assert {k: v for k, v in specs.items() if k.startswith("net.")} == {
                    "net.up.kernel": 'P(None, "model")',
                    "net.down.kernel": 'P("model", None)',
                }
                assert len(specs) == 4
                kernel = step.latest_plan.sharding("net.up.kernel")
                assert kernel.shard_shape((WIDTH, WIDTH)) == (WIDTH, WIDTH // 2)
            elif constraints == "advice":
                assert "of 4 values as written" in note(step.latest_plan)
            told = {"advice": "are advice", "pins": "are pins", "ignore": "are dropped"}[constraints]
            assert f"{told}: the " in " ".join(record.notes)


def test_metadata_that_name_no_axis_of_the_mesh_are_none():
    with jax.set_mesh(mesh(2, 2)):
        objects = new_net()
    objects[0].up.kernel.set_metadata(out_sharding=("rows", None))
    with jax.set_mesh(mesh(2, 2)):
        plan = parallel(train_net, 4, constraints="pins").plan(*objects, arguments()[1])
    assert "net.up.kernel" not in str([pin.pattern for pin in plan.record.pinned.pins])


def test_metadata_pin_the_state_and_code_may_gather_it():
    """As where parameters are sharded over the data too: the code gathers them where they are used."""

    def train(net, batch):
        def loss(net):
            kernel = laid(mesh(2, 2), None, "model")(net.kernel[...])
            return jnp.mean((batch["x"] @ kernel - batch["y"]) ** 2)

        value, grads = nnx.value_and_grad(loss)(net)
        net.kernel[...] -= 0.1 * grads.kernel[...]
        return value

    with jax.set_mesh(mesh(2, 2)):
        init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("data", "model"))
        net = nnx.Linear(WIDTH, WIDTH, use_bias=False, kernel_init=init, rngs=nnx.Rngs(0))
        expected = nnx.Linear(WIDTH, WIDTH, use_bias=False, kernel_init=init, rngs=nnx.Rngs(0))
        step, batch = parallel(train, 4, constraints="pins"), arguments()[1]
        assert_close(step(net, batch), nnx.jit(train)(expected, batch))
        assert_close(nnx.state(net), nnx.state(expected))
    assert step.latest_plan.sharding("net.kernel").shard_shape((WIDTH, WIDTH)) == (WIDTH // 2, WIDTH // 2)


def test_a_value_that_is_resharded_is_pinned_where_it_lay():
    def step(x, w):
        return jnp.matmul(jax.reshard(x, P("data", None)), w, out_sharding=P("data", None))

    with jax.set_mesh(explicit_mesh()):
        found = parallel(step, 4, constraints="pins", donate_argnums=(), batch_argnums=())
        x = jax.reshard(jnp.arange(64.0).reshape(8, 8), P(None, "data"))
        args = x, jnp.eye(8)
        assert_close(found(*args), jax.jit(step)(*args))
        assert jax.typeof(found(*args)) == jax.typeof(jax.jit(step)(*args))
        record = found.latest_plan.record
    (names,) = record.axis_names
    layouts = [[[names[a] for a in axes] for axes in v.layout.dims] for v in (record.arguments[0], record.results[0])]
    assert layouts == [[[], ["data"]], [["data"], []]]


def test_the_cache_tells_layouts_apart(tmp_path):
    def pinned(*spec):
        step = mlp(laid(mesh(2, 2), *spec))
        made = autopar.parallelize(
            step, cluster=slow_cluster(4), cache_dir=tmp_path, search=autopar.Search(constraints="pins")
        )
        return [pin.spec for pin in made.plan(*arguments()).record.pinned.pins]

    assert pinned("data") == pinned("data") == ['P("data", None)']
    assert pinned(None, "model") == ['P(None, "model")']


def test_an_unknown_kind_is_refused():
    with pytest.raises(InvalidArgumentError, match=r"'advice' or 'pins' or 'ignore', got 'hints'"):
        autopar.parallelize(mlp(lambda x: x), search=autopar.Search(constraints="hints"))
