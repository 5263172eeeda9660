"""Arrays stored in larger shapes, in the memory of devices and of their host: the numbers that they were made of."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autopar.executables.padded_arrays import PaddedArray, store_on_host
from autopar.ir.padded import PaddedForm

FORMS = [
    PaddedForm((6, 5), (8, 5)),
    PaddedForm((6, 5), (32,)),
    PaddedForm((6, 5), (8, 5), (2, 1, 2, 1)),
]


def stored(array, form, memory_kind):
    mesh = Mesh(np.array(jax.devices()[:4]), ("x",))
    sharding = NamedSharding(mesh, PartitionSpec("x"), memory_kind=memory_kind)
    return PaddedArray(jax.device_put(store_on_host(array, form), sharding), form)


def test_numbers_come_back_inside_of_a_mesh_of_the_user():
    numbers = np.arange(30.0, dtype=np.float32).reshape(6, 5)
    padded = stored(numbers, FORMS[0], None)
    with jax.set_mesh(jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))):
        assert np.array_equal(padded.unpadded(), numbers)


@pytest.mark.parametrize("memory_kind", [None, "pinned_host"])
@pytest.mark.parametrize("form", FORMS, ids=["at the end", "in one dimension", "behind each part"])
def test_numbers_and_random_keys_come_back(form, memory_kind):
    numbers = np.arange(30.0, dtype=np.float32).reshape(6, 5)
    padded = stored(numbers, form, memory_kind)
    assert np.array_equal(padded.unpadded(), numbers)
    assert np.array_equal(np.asarray(padded), numbers)

    keys = jax.random.split(jax.random.key(0), (6, 5))
    back = stored(keys, form, memory_kind).unpadded()
    assert back.dtype == keys.dtype
    assert np.array_equal(jax.random.key_data(back), jax.random.key_data(keys))
