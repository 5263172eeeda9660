"""States saved and restored: every type, every tree, onto other layouts and other plans, bit for bit."""

import asyncio
import tempfile
from typing import Any, NamedTuple

import flax.struct
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import autopar
from autopar.checkpoint import Checkpointer
from autopar.train.checkpoint.array_files import _InFlight
from benchmarks.zoo import CASES
from tests.train.checkpoint.trees import assert_equal

DTYPES = (
    "bool", "int4", "uint4", "int2", "int8", "uint8", "int16", "int32", "uint32", "float16", "bfloat16", "float32",
    "complex64", "float8_e4m3fn", "float8_e5m2", "float8_e4m3", "float8_e8m0fnu", "float4_e2m1fn",
)  # fmt: skip


def over(num_devices: int, *spec: Any, memory_kind: str | None = None, first: int = 0) -> NamedSharding:
    mesh = Mesh(np.array(jax.devices()[first : first + num_devices]), ("x",), axis_types=(AxisType.Auto,))
    return NamedSharding(mesh, PartitionSpec(*spec), memory_kind=memory_kind)


def saved(tmp_path: Any, state: Any, **options: Any) -> Checkpointer:
    checkpoints = Checkpointer(tmp_path, on_preemption=False)
    checkpoints.save(1, state, **options)
    return checkpoints


def test_reads_on_their_way_stay_within_the_budget_and_a_larger_one_goes_alone():
    limiter, now, seen = _InFlight(10), [], []

    async def read(size: int) -> None:
        await limiter.wait_for_bytes(size)
        now.append(size)
        seen.append(tuple(now))
        await asyncio.sleep(0)
        now.remove(size)
        await limiter.release_bytes(size)

    async def all_at_once() -> None:
        await asyncio.wait_for(asyncio.gather(*map(read, [4, 6, 5, 20, 10, 1])), timeout=10)

    asyncio.run(all_at_once())
    assert sorted(sizes[-1] for sizes in seen) == [1, 4, 5, 6, 10, 20]
    assert all(sum(sizes) <= 10 or sizes == (20,) for sizes in seen)
    assert (4, 6) in seen


class Moments(NamedTuple):
    mean: Any
    empty: tuple[()]


@flax.struct.dataclass
class State:
    params: Any
    moments: Any
    name: str = flax.struct.field(pytree_node=False, default="static")


def leaves() -> st.SearchStrategy[Any]:
    shapes = st.sampled_from([(), (4,), (2, 3), (6, 2), (0, 3), (1, 1, 2)])

    def array(draw: Any) -> Any:
        dtype, shape, device = draw(st.sampled_from(DTYPES)), draw(shapes), draw(st.integers(0, 3))
        numbers = np.random.default_rng(draw(st.integers(0, 9))).integers(0, 255, size=shape)
        value = jnp.asarray(numbers % 2 if dtype in ("int2", "uint4", "int4") else numbers).astype(dtype)
        match device:
            case 0:
                return value
            case 1:
                return np.asarray(value)
            case 2:
                return jax.device_put(value, over(2))
        split = ("x",) if shape and shape[0] % 2 == 0 else ()
        return jax.device_put(value, over(2, *split))

    keys = st.builds(
        lambda seed, kind: jax.random.split(jax.random.key(seed, impl=kind), 2),
        st.integers(0, 5),
        st.sampled_from(["threefry2x32", "rbg"]),
    )
    numbers = st.one_of(st.integers(), st.floats(), st.booleans(), st.complex_numbers(), st.text(max_size=3))
    return st.one_of(st.composite(array)(), numbers, keys, st.none())


def trees() -> st.SearchStrategy[Any]:
    def above(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        names = st.sampled_from(["a", "b/c", "a.b", "0", "..", "~"])
        return st.one_of(
            st.dictionaries(names, inner, max_size=3),
            st.lists(inner, max_size=3),
            st.builds(lambda x: Moments(x, ()), inner),
            st.builds(lambda x, y: State(x, y), inner, inner),
        )

    return st.recursive(leaves(), above, max_leaves=6)


@hypothesis.settings(max_examples=25, deadline=None)
@hypothesis.given(trees())
def test_any_state_comes_back_bit_for_bit(state):
    with tempfile.TemporaryDirectory() as folder, saved(folder, state) as checkpoints:
        assert_equal(checkpoints.restore(like=state), state)


def test_arrays_keep_their_layouts_and_their_memory(tmp_path):
    state = {
        "split": jax.device_put(jnp.arange(8.0), over(4, "x")),
        "host": jax.device_put(jnp.arange(8.0), over(2, "x", memory_kind="pinned_host", first=4)),
        "keys": jax.device_put(jax.random.split(jax.random.key(1), 4), over(4, "x")),
    }
    with saved(tmp_path, state) as checkpoints:
        back = checkpoints.restore(like=state)
    assert_equal(back, state)
    for name, array in back.items():
        assert array.sharding.is_equivalent_to(state[name].sharding, 1)
        assert array.sharding.memory_kind == state[name].sharding.memory_kind


def test_a_layout_can_be_given_for_all_leaves_or_for_each(tmp_path):
    state = {"w": jnp.arange(8.0), "b": jnp.arange(4.0)}
    with saved(tmp_path, state) as checkpoints:
        everywhere = checkpoints.restore(like=state, shardings=over(4))
        each = checkpoints.restore(like=state, shardings={"w": over(8, "x"), "b": over(2, "x")})
    assert_equal(everywhere, state)
    assert_equal(each, state)
    assert everywhere["w"].sharding == over(4)
    assert (each["w"].sharding, each["b"].sharding) == (over(8, "x"), over(2, "x"))


def test_without_a_structure_the_state_is_dictionaries(tmp_path):
    state = State(params={"w": jnp.ones(3)}, moments=[Moments(jnp.zeros(2), ()), 7])
    with saved(tmp_path, state) as checkpoints:
        back = checkpoints.restore()
        assert_equal(back, {"params": {"w": jnp.ones(3)}, "moments": {"0": {"mean": jnp.zeros(2)}, "1": 7}})
        assert_equal(checkpoints.restore(like={"params": {"w": jnp.ones(3)}}, partial=True), {"params": state.params})


def test_objects_of_nnx_come_back_as_objects(tmp_path):
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    other = nnx.Linear(2, 3, rngs=nnx.Rngs(1))
    with saved(tmp_path, (model, optimizer)) as checkpoints:
        back, _ = checkpoints.restore(like=(other, nnx.Optimizer(other, optax.adam(1e-3), wrt=nnx.Param)))
        names = list(checkpoints.restore()["0"])
    assert isinstance(back, nnx.Linear)
    assert_equal(nnx.to_pure_dict(nnx.state(back)), nnx.to_pure_dict(nnx.state(model)))
    assert sorted(names) == ["bias", "kernel"]


def test_a_state_that_is_donated_at_once_is_saved_as_it_was(tmp_path):
    advance = jax.jit(lambda x: jax.tree.map(lambda leaf: leaf + 100, x), donate_argnums=0)
    first = {str(i): jax.device_put(jnp.full((512, 256), float(i)), over(2, "x")) for i in range(16)}
    with saved(tmp_path, first) as checkpoints:
        state = first
        for _ in range(4):
            state = advance(state)
        checkpoints.wait()
        back = checkpoints.restore()
    assert {name: float(np.unique(array).item()) for name, array in back.items()} == {
        str(i): float(i) for i in range(16)
    }


PLANS = {
    "one program": lambda: autopar.recipes.data_parallel(),
    "zero3": lambda: autopar.recipes.zero(3),
    "stages": lambda: autopar.recipes.pipeline(2, "1f1b", num_microbatches=4),
}


@pytest.mark.cases(1)
@pytest.mark.parametrize(("one", "other"), [("zero3", "stages"), ("stages", "one program")])
def test_a_state_of_one_plan_opens_under_another(tmp_path, one, other):
    case = CASES["mlp"]()
    steps = {name: autopar.parallelize(case.step, plan=PLANS[name](), cache_dir=None) for name in (one, other)}
    state = steps[one].init(case.init, jax.random.key(0))
    state, _ = steps[one](state, case.batch(0))
    shapes = jax.eval_shape(case.init, jax.random.key(0))
    plan = steps[other].plan(shapes, case.batch(0))
    with saved(tmp_path, state, plan=steps[one]) as checkpoints:
        moved = checkpoints.restore(step=steps[other])  # the step knows the structure by its plan
        by_plan = checkpoints.restore(plan=plan, like=shapes)
        plain = checkpoints.restore(like=shapes)
        assert str(checkpoints.plan()) == str(steps[one].latest_plan)
    for back in (moved, by_plan):
        assert_equal(back, state)
        wanted = jax.tree.leaves(plan.state_shardings)
        got = [x.sharding for x in jax.tree.leaves(back)]
        assert all(a.is_equivalent_to(b, x.ndim) for a, b, x in zip(got, wanted, jax.tree.leaves(back), strict=True))
    assert_equal(plain, state)
    assert {x.sharding.device_set.pop() for x in jax.tree.leaves(plain)} == {jax.devices()[0]}
