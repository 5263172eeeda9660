"""What `FILE:FUNCTION` and `--arg` name: files, modules, literals, objects of configuration files."""

import re
import sys

import jax
import pytest
from jax.sharding import PartitionSpec as P

from autopar.errors import InvalidArgumentError
from autopar.step_files import returned_by, shapes_only

JOB = """
import dataclasses
import jax.numpy as jnp


@dataclasses.dataclass
class Config:
    width: int = 8


SMALL = Config(width=4)


def step(state, batch):
    return state, batch


def job(layers=2, width=8, name="plain", config=None):
    width = config.width if config else width
    return step, [jnp.zeros((width, width))] * layers, name


def needs(layers):
    return (lambda state: state), layers
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "jobs_of_test").mkdir()
    (tmp_path / "jobs_of_test" / "one.py").write_text(JOB)
    (tmp_path / "broken_job_of_test.py").write_text("import a_module_that_is_nowhere")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path


def test_arguments_are_literals_and_other_text_is_text(folder):
    _, (state, name) = returned_by("jobs_of_test/one.py:job", ["layers=3", "width=2", "name=bfloat16"])
    assert (len(state), state[0].shape, name) == (3, (2, 2), "bfloat16")


def test_a_configuration_is_an_object_of_a_file_or_a_module(folder):
    for where in ("@jobs_of_test/one.py:SMALL", "@jobs_of_test.one:SMALL"):
        _, (state, _) = returned_by("jobs_of_test.one:job", [f"config={where}"])
        assert state[0].shape == (4, 4)


def test_of_absent_hardware_arguments_give_shapes(folder):
    _, (state,) = shapes_only("jobs_of_test/one.py:needs", ["layers=[1.0, 2.0]"])
    assert state == [jax.ShapeDtypeStruct((), "float32", weak_type=True)] * 2


LAID = """
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P


def job():
    at = NamedSharding(Mesh(np.array(jax.devices()[:2]), ("data",)), P("data"))
    made = jax.jit(lambda: jnp.ones(4), out_shardings=at)()
    constrained = jax.jit(lambda x: jax.lax.with_sharding_constraint(x, at))(jnp.ones(4))
    shape = jax.ShapeDtypeStruct((4,), jnp.float32, sharding=at)
    return (lambda *arrays: arrays), made, jax.device_put(np.ones(4), at), constrained, shape, jnp.ones(4)
"""


def test_shapes_have_the_shardings_that_the_function_gives_to_its_arrays(folder):
    (folder / "laid_job_of_test.py").write_text(LAID)
    _, shapes = shapes_only("laid_job_of_test.py:job")
    assert [s.sharding is not None and s.sharding.spec == P("data") for s in shapes] == [True] * 4 + [False]


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("jobs_of_test/one.py:job", ["layers"], "--arg: expected NAME=VALUE, got 'layers'"),
        ("jobs_of_test/one.py:job", ["=3"], "--arg: expected NAME=VALUE"),
        ("jobs_of_test/one.py:job", ["depth=3"], "got an unexpected keyword argument 'depth'"),
        ("jobs_of_test/one.py:needs", [], "missing a required argument: 'layers'"),
        ("jobs_of_test/one.py:job", ["config=@jobs_of_test/one.py:BIG"], "expected an object 'BIG'"),
        ("jobs_of_test/one.py:job", ["config=@nowhere.py:BIG"], "got no file 'nowhere.py'"),
        ("jobs_of_test.other:job", [], "got no file 'jobs_of_test.other'"),
        ("no_module_of_test:job", [], "got no file 'no_module_of_test'"),
    ],
)
def test_what_is_wrong_says_what_is_expected(folder, name, given, message):
    with pytest.raises(InvalidArgumentError, match=re.escape(message)):
        returned_by(name, given)


def test_what_a_module_itself_lacks_is_its_own_error(folder):
    with pytest.raises(ModuleNotFoundError, match="a_module_that_is_nowhere"):
        returned_by("broken_job_of_test:job")


@pytest.mark.parametrize(
    ("returned", "got"),
    [
        ("(step,)", "a tuple of step alone"),
        ("()", "an empty tuple"),
        ("(3, 4)", "a tuple whose first element (int) cannot be called"),
        ("step", "a function"),
    ],
)
def test_what_is_no_step_with_arguments_is_told(folder, returned, got):
    (folder / "other_job_of_test.py").write_text(f"def step():\n    pass\n\n\ndef job():\n    return {returned}\n")
    with pytest.raises(InvalidArgumentError, match=f"one or more, got {re.escape(got)}\n"):
        returned_by("other_job_of_test.py:job")


def test_functions_within_arguments_stay_beside_the_shapes(tmp_path):
    """As layers of Equinox have them: they are no arrays, and the step gets them as they are."""
    (tmp_path / "with_functions.py").write_text(
        "import jax, jax.numpy as jnp\n\n"
        "def job():\n"
        "    return (lambda state, batch: (state, batch)), {'w': jnp.zeros(3), 'f': jax.nn.relu}, jnp.ones(2)\n"
    )
    _, (state, batch) = shapes_only(f"{tmp_path}/with_functions.py:job")
    assert state["f"] is jax.nn.relu
    assert (state["w"].shape, batch.shape) == ((3,), (2,))


@pytest.mark.parametrize(
    ("returned", "got"),
    [
        ("model, step, 3", r"Model and 2 arguments \(too many positional arguments\)"),
        ("step, 3, 4, 5", r"step and 3 arguments \(too many positional arguments\)"),
        ("jax.jit(step), 3", r"step and 1 argument \(missing a required argument: 'batch'\)"),
    ],
)
def test_a_step_that_is_not_first_or_lacks_arguments_is_told(folder, returned, got):
    """A model that can be called, in the place of the step, is taken for one until it is called."""
    (folder / "unlike_job_of_test.py").write_text(
        "import jax\n\n\nclass Model:\n    def __call__(self, x):\n        return x\n\n\n"
        "def step(state, batch):\n    return state\n\n\n"
        f"def job():\n    model = Model()\n    return {returned}\n"
    )
    with pytest.raises(InvalidArgumentError, match=rf"the step, which stands first, and every argument.*got {got}"):
        returned_by("unlike_job_of_test.py:job")
