"""Models of other people's packages, in parallel on 8 devices, against plain `jax.jit`."""

import importlib.util

import pytest

from benchmarks.zoo.published import PUBLISHED
from tests.beside_jit import check_one_program

QUICK = {"hf_gpt2", "eqx_mlp", "jraph_network"}


@pytest.mark.filterwarnings("ignore")  # those packages' own
@pytest.mark.parametrize(
    ("package", "name"),
    [
        pytest.param(package, name, marks=[] if name in QUICK else pytest.mark.slow, id=name)
        for package, cases in PUBLISHED.items()
        for name in cases
    ],
)
def test_published_model_gives_the_numbers_of_one_device(package: str, name: str):
    if importlib.util.find_spec(package) is None:  # a package that is there must be importable
        pytest.skip(f"needs {package} (autopar[published])")
    check_one_program(PUBLISHED[package][name]())
