"""One of two processes that move arrays between meshes (test_moves.py)."""

import json
import sys

from tests.in_processes import join

SHAPES = ((128,), (64, 32), (), (128, 4, 8))
SOURCES = ((0,), (1, 0), (2, 3), (3,))


def main() -> None:
    join(json.loads(sys.argv[1]))
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from autopar.runtime.process_rows import move
    from autopar.runtime.transfers import aval_of, from_whole

    devices = np.array(sorted(jax.devices(), key=lambda d: d.id))
    for source in SOURCES:
        at = NamedSharding(Mesh(devices[list(source)], ("x",)), PartitionSpec())
        for shape in SHAPES:
            value = np.random.default_rng(0).normal(size=shape).astype(np.float32)
            array = from_whole(value, aval_of(value), at)
            for spec in (PartitionSpec(), PartitionSpec("y") if shape else PartitionSpec()):
                moved = move(array, NamedSharding(Mesh(devices, ("y",)), spec))
                for shard in moved.addressable_shards:
                    np.testing.assert_array_equal(shard.data, value[shard.index] if shape else value)
    # As a state whose plan has the devices in another order: more leaves than XLA takes programs at once.
    other = NamedSharding(Mesh(devices[[0, 2, 1, 3]].reshape(2, 2), ("y", "z")), PartitionSpec("z", "y"))
    value = np.arange(16, dtype=np.float32).reshape(4, 4)
    rows = NamedSharding(Mesh(devices, ("x",)), PartitionSpec("x"))
    for moved in [move(from_whole(value, aval_of(value), rows), other) for _ in range(80)]:
        for shard in moved.addressable_shards:
            np.testing.assert_array_equal(shard.data, value[shard.index])
    transfers(devices)
    in_an_explicit_mesh(devices)
    print("moved")


def in_an_explicit_mesh(devices):
    """The results of a step lie in the mesh of its arguments, whether the plan has them so or not."""
    import jax
    import numpy as np
    from jax.sharding import AxisType, Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    import autopar
    from autopar.runtime.transfers import aval_of, from_whole

    mesh = Mesh(devices.reshape(2, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    rows = NamedSharding(mesh, P("model", "data"))
    value = np.arange(32, dtype=np.float32).reshape(8, 4)
    for constraints in ("pins", "ignore"):
        search = autopar.Search(constraints=constraints)
        step = autopar.parallelize(lambda x: 2 * x, search=search, batch_argnums=(), cache_dir=None)
        with jax.set_mesh(mesh):
            x = from_whole(value, aval_of(value), rows)
            for scale in (2, 4):
                x = step(x)
                assert x.sharding.is_equivalent_to(rows, 2)
                assert jax.typeof(x) == jax.typeof(from_whole(value, aval_of(value), rows))
                for shard in x.addressable_shards:
                    np.testing.assert_array_equal(shard.data, scale * value[shard.index])
        weak = autopar.parallelize(lambda x: (2 * x, 3.0), search=search, batch_argnums=(), cache_dir=None)
        with jax.set_mesh(mesh):
            assert [result.weak_type for result in weak(x)] == [False, True]


def transfers(devices):
    """`autopar.transfer`: of arrays that one process has, of what both have, and what they disagree about."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import pytest
    from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
    from jax.sharding import PartitionSpec as P

    import autopar
    from autopar.errors import InvalidArgumentError, ProcessMismatchError

    class Unreadable:
        """A node that raises no error of autopar."""

    def no_children(node):
        raise ValueError("a tree of another library")

    jax.tree_util.register_pytree_node(Unreadable, no_children, lambda aux, children: Unreadable())
    process = jax.process_index()
    others = [devices[:2], devices[2:]]
    value = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
    keys = np.asarray(jax.random.key_data(jax.random.split(jax.random.key(0), 8)))
    shape = jax.ShapeDtypeStruct(value.shape, value.dtype)
    rows = [NamedSharding(Mesh(d, ("x",)), P("x")) for d in others]
    first = {  # process 0 has it
        "rows": jax.device_put(value, rows[0]) if process == 0 else shape,
        "one": jax.device_put(value, devices[1]) if process == 0 else shape,
        "short": jax.device_put(value.astype(jnp.bfloat16), rows[0])
        if process == 0
        else shape.update(dtype=jnp.bfloat16),
        "keys": jax.random.wrap_key_data(jax.device_put(keys, rows[0]))
        if process == 0
        else jax.eval_shape(jax.random.wrap_key_data, keys),
        "numpy": value if process == 0 else shape,
        "both": value,
        "step": 3,
    }
    columns = NamedSharding(Mesh(devices[[2, 3]], ("y",)), P(None, "y"))
    flat = NamedSharding(columns.mesh, P("y"))
    everywhere = NamedSharding(Mesh(devices, ("y",)), P())
    to = dict.fromkeys(first, columns) | {"keys": flat, "both": everywhere, "step": everywhere}
    for buffer_bytes in (None, 256):
        there = autopar.transfer(first, to, buffer_bytes=buffer_bytes)
        for name, array in there.items():
            assert array.sharding == to[name]
            want = {"keys": keys, "step": np.int32(3)}.get(name, value)
            want = want.astype(jnp.bfloat16) if name == "short" else want
            for shard in array.addressable_shards:
                data = jax.random.key_data(shard.data) if name == "keys" else shard.data
                assert np.asarray(data).tobytes() == np.ascontiguousarray(want[shard.index]).tobytes(), name
        back = autopar.transfer({name: there[name] for name in ("rows", "short")}, SingleDeviceSharding(devices[0]))
        assert [len(x.addressable_shards) for x in back.values()] == [1 - process] * 2
    state = {"a": [value, shape]}
    with pytest.raises(InvalidArgumentError, match=r"\['a'\]\[1\].*nobody has"):
        autopar.transfer(state, columns)
    with pytest.raises(ProcessMismatchError, match=r"\['a'\]\[0\].*float32\[16, 8\].*process 1 float32\[16, 7\]"):
        autopar.transfer({"a": [value[:, : 8 - process]]}, everywhere)
    with pytest.raises(ProcessMismatchError, match=r"the same target sharding"):
        autopar.transfer(value, rows[process])
    with pytest.raises(ProcessMismatchError, match=r"process 1 .*'b'.*, in process 0 .*'a'"):
        autopar.transfer({"ab"[process]: value}, everywhere)
    with pytest.raises(ProcessMismatchError, match=r"buffer_bytes=268435456.*process 1 buffer_bytes=None"):
        autopar.transfer(value, everywhere, buffer_bytes="256MiB" if process == 0 else None)
    error = ProcessMismatchError if process == 0 else InvalidArgumentError
    with pytest.raises(error, match=r"a size, such as 80GB"):
        autopar.transfer(value, everywhere, buffer_bytes=None if process == 0 else "much")
    with pytest.raises(ProcessMismatchError if process == 0 else ValueError, match="a tree of another library"):
        autopar.transfer(value if process == 0 else {"a": Unreadable()}, everywhere)
    weak = autopar.transfer([3, 4], everywhere) + autopar.transfer([(3, np.int32(3))[process]], everywhere)
    assert [x.weak_type for x in weak] == [True, True, False]
    with pytest.raises(error, match=r"\['a'\].*expected a shape that its sharding divides"):
        autopar.transfer({"a": value[: 16 - process]}, rows[0])


if __name__ == "__main__":
    main()
