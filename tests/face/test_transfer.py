"""`autopar.transfer`: bits stay between any shardings, the result is independent, and errors name the leaf."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import autopar
from autopar.common.jax_compat import buffer_addresses
from autopar.errors import DonatedStateError, InvalidArgumentError, NotEnoughDevicesError, PlanMismatchError
from autopar.runtime import moves


def on(devices, spec, sizes=(), names=("x", "y"), **how):
    grid = np.array(jax.devices())[list(devices)].reshape(sizes or (len(devices),))
    return NamedSharding(Mesh(grid, names[: grid.ndim]), spec, **how)


ENDS = [
    (on(range(4), P("x")), on(range(4, 8), P(None, "x"))),
    (on(range(2), P("x")), on(range(2, 8), P(None, "x"))),
    (on(range(4), P("x", "y"), (2, 2)), on(range(4), P("y", "x"), (2, 2))),
    (on(range(4), P("x", "y"), (2, 2)), on(range(4, 8), P("x", "y"), (2, 2), ("y", "x"))),
    (on(range(8), P("y"), (4, 2)), on((6, 1, 3), P(None, "x"))),
    (on(range(4), P()), on((3, 2, 5), P())),
    (SingleDeviceSharding(jax.devices()[3]), on(range(8), P(("x", "y")), (2, 4))),
    (on(range(8), P(None, "x"), (2, 4)), SingleDeviceSharding(jax.devices()[7])),
    (on(range(2), P("x"), memory_kind="pinned_host"), on(range(2, 4), P(None, "x"))),
    (on(range(2), P("x")), on(range(2, 4), P(None, "x"), memory_kind="pinned_host")),
]


def bits(array):
    if jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    return np.asarray(array).tobytes()


@pytest.mark.cases(1)
@pytest.mark.parametrize("buffer_bytes", [None, 64])
@pytest.mark.parametrize(("source", "target"), ENDS)
def test_bits_stay_between_any_shardings(source, target, buffer_bytes):
    """Numbers that are none (NaN with a payload) too; in pieces of a few elements, and in whole ones."""
    words = np.random.default_rng(0).integers(0, 2**32, (24, 24), np.uint32)
    words[0] = 0x7FC00001
    given = {
        "floats": words.view(np.float32),
        "short": words.astype(np.uint16).view(jnp.bfloat16),
        "shorter": words.astype(np.uint8).view(jnp.float8_e4m3fn),
        "shortest": (words % 16).astype(np.uint8).view(jnp.float4_e2m1fn),
        "truths": words > 2**31,
        "deep": words.reshape(24, 12, 2, 1).astype(np.int8),
    }
    tree = jax.device_put(given, source)
    moved = autopar.transfer(tree, target, buffer_bytes=buffer_bytes)
    for name, array in moved.items():
        assert array.sharding == target
        assert bits(array) == given[name].tobytes()
        assert not set(buffer_addresses(array)) & set(buffer_addresses(tree[name]))


def test_scalars_empty_arrays_keys_and_what_lies_in_the_memory_of_the_host():
    everywhere, rows = on(range(4), P()), on(range(4), P("x"))
    tree = {
        "step": 3,
        "scale": np.float32(0.5),
        "empty": jnp.zeros((0, 4)),
        "keys": jax.random.split(jax.random.key(1), 8),
        "rows": np.arange(8),
        "name": "a text stays",
    }
    to = {"step": everywhere, "scale": everywhere, "empty": rows, "keys": rows, "rows": rows, "name": everywhere}
    moved = autopar.transfer(tree, to)
    assert moved["name"] == "a text stays"
    assert {name: moved[name].sharding for name in to if name != "name"} == {n: s for n, s in to.items() if n != "name"}
    assert bits(moved["keys"]) == bits(tree["keys"])
    assert moved["step"].weak_type
    assert int(moved["step"]) == 3
    assert float(moved["scale"]) == 0.5
    assert moved["empty"].shape == (0, 4)
    np.testing.assert_array_equal(moved["rows"], np.arange(8))


def test_parts_go_into_the_memory_of_the_host_with_their_last_piece(monkeypatch):
    on_devices, land = [], moves._Mover.land

    def counted(mover, *sent):
        land(mover, *sent)
        on_devices.append(sum(part.sharding.memory_kind != "pinned_host" for part in mover._written.values()))

    monkeypatch.setattr(moves._Mover, "land", counted)
    rows = on(range(2), P("x"))
    given = jax.device_put([np.arange(64.0, dtype=np.float32).reshape(8, 8) + i for i in range(4)], rows)
    moved = autopar.transfer(given, on(range(2, 4), P(None, "x"), memory_kind="pinned_host"), buffer_bytes=128)
    for array, source in zip(moved, given, strict=True):
        np.testing.assert_array_equal(array, source)
    assert on_devices == [2, 2, 2, 0] * 4  # the two parts of one array


def test_the_result_outlives_a_donated_source_that_lay_there_already():
    source = jax.device_put(jnp.arange(8.0), on(range(4), P("x")))
    moved = autopar.transfer(source, source.sharding)
    jax.jit(lambda x: x + 1, donate_argnums=0)(source)
    assert source.is_deleted()
    np.testing.assert_array_equal(moved, np.arange(8.0))


def test_an_explicit_mesh_that_is_set_does_not_matter():
    source = jax.device_put(jnp.arange(8.0), on(range(4), P("x")))
    with jax.set_mesh(jax.make_mesh((8,), ("z",), axis_types=(jax.sharding.AxisType.Explicit,))):
        moved = autopar.transfer(source, on(range(4, 8), P("x")), buffer_bytes=16)
    np.testing.assert_array_equal(moved, np.arange(8.0))


def train_step(state, batch):
    loss, grads = jax.value_and_grad(lambda s: jnp.mean((batch @ s["up"] @ s["down"]) ** 2))(state)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), loss


def planned():
    """A state on one device, and a step that is planned for it."""
    state = {"up": jnp.ones((16, 32)), "down": jnp.ones((32, 8))}
    step = autopar.parallelize(
        train_step, plan=autopar.recipes.tensor_parallel(size=4), cluster=autopar.Cluster.local(4), cache_dir=None
    )
    return state, step, step.plan(state, jnp.ones((8, 16)))


def test_the_layout_of_a_plan_a_step_a_compiled_step_and_of_a_tree_of_them():
    state, step, plan = planned()
    everywhere = on(range(4, 8), P())
    layouts = plan.state_shardings
    assert not layouts["up"].is_fully_replicated
    for to in (plan, step, step.compile(state, jnp.ones((8, 16))), layouts):
        moved = autopar.transfer(state, to)
        assert {k: v.sharding for k, v in moved.items()} == layouts
    both = autopar.transfer({"train": state, "average": state}, {"train": step, "average": everywhere})
    assert {k: v.sharding for k, v in both["train"].items()} == layouts
    assert {v.sharding for v in both["average"].values()} == {everywhere}


def test_nnx_modules_become_new_ones():
    nnx = pytest.importorskip("flax.nnx")
    model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    target = on(range(4), P("x"))
    moved = autopar.transfer(model, target)
    assert moved is not model
    assert moved.kernel[...].sharding == target
    np.testing.assert_array_equal(moved.kernel[...], model.kernel[...])


def test_errors_name_the_leaf():
    rows = on(range(3), P("x"))
    state, step, plan = planned()
    with pytest.raises(
        InvalidArgumentError, match=r"transfer, \['b'\]\[0\].*a shape that its sharding divides"
    ) as found:
        autopar.transfer({"a": np.zeros(6), "b": [np.zeros(4)]}, rows)
    assert "float32[4]" in str(found.value)
    with pytest.raises(InvalidArgumentError, match=r"transfer, \['a'\].*nobody has \[0:2\]"):
        autopar.transfer({"a": jax.ShapeDtypeStruct((6,), np.float32)}, rows)
    with pytest.raises(InvalidArgumentError, match=r"transfer\(to=...\).*a tree of them"):
        autopar.transfer({"a": np.zeros(6)}, {"b": rows})
    with pytest.raises(InvalidArgumentError, match=r"transfer, \['a'\].*str"):
        autopar.transfer({"a": np.zeros(6)}, {"a": "rows"})
    with pytest.raises(NotEnoughDevicesError, match=r"transfer, \['a'\].*abstract mesh"):
        autopar.transfer({"a": np.zeros(6)}, NamedSharding(AbstractMesh((3,), ("x",)), P("x")))
    with pytest.raises(
        PlanMismatchError, match=r"transfer\(to=...\), \['up'\].*no such leaf|\['up'\].*float32\[32, 16\]"
    ):
        autopar.transfer({**state, "up": jnp.ones((32, 16))}, plan)
    with pytest.raises(InvalidArgumentError, match="neither called nor planned"):
        autopar.transfer(state, autopar.parallelize(train_step))
    with pytest.raises(InvalidArgumentError, match="buffer_bytes"):
        autopar.transfer(state, rows, buffer_bytes="much")
    with pytest.raises(InvalidArgumentError, match=r"outside of jax.jit"):
        jax.jit(lambda x: autopar.transfer(x, rows))(jnp.zeros(6))
    held = autopar.transfer(state, step)
    jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)(held)
    with pytest.raises(DonatedStateError, match=r"transfer, \['down'\]"):
        autopar.transfer(held, on(range(4), P()))
