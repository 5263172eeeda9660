"""Models of other people's packages, in parallel on 8 devices, against plain `jax.jit`."""

import pytest

from benchmarks.correctness import plain_run, run_case
from benchmarks.zoo.published import PUBLISHED

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
    pytest.importorskip(package)
    case = PUBLISHED[package][name]()
    row = run_case(case, plain_run(case), "hosts", 8)
    assert row.passed, row
