"""`maxtext:base.yml`: the train step of a MaxText configuration (extra: maxtext)."""

import sys

import jax
import pytest

import autopar
from autopar.__main__ import main
from autopar.errors import InvalidArgumentError
from autopar.step_files import returned_by, shapes_only
from tests.small_steps import assert_close

TINY = (
    "base_emb_dim=32", "base_num_decoder_layers=2", "base_num_query_heads=4", "base_num_kv_heads=2", "base_mlp_dim=64",
    "head_dim=8", "vocab_size=64", "max_target_length=16", "per_device_batch_size=2", "dtype=float32",
)  # fmt: skip
EXPERTS = ("decoder_block=mixtral", "num_experts=4", "num_experts_per_tok=2", "base_moe_mlp_dim=64")


def numbers_of(tree):
    """The leaves, keys as their numbers."""
    is_key = lambda leaf: jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return [jax.random.key_data(leaf) if is_key(leaf) else leaf for leaf in jax.tree.leaves(tree)]


def test_where_maxtext_is_not_installed_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "maxtext", None)
    with pytest.raises(InvalidArgumentError, match=r"maxtext(.|\n)*pip install 'autopar\[maxtext\]'"):
        shapes_only("maxtext:base.yml", ["model_name=llama2-7b"])


def test_arguments_stand_behind_the_function_or_as_options(tmp_path, capsys):
    (tmp_path / "job.py").write_text(
        "import jax.numpy as jnp\n"
        "def job(width=4, rows=8):\n"
        "    return (lambda w, x: (w, (x @ w).sum())), jnp.ones((width, 4)), jnp.ones((rows, width))\n"
    )
    command = ["plan", f"{tmp_path}/job.py:job", "width=16", "--cluster", "dgx-h100", "--arg", "rows=24", "--json"]
    assert main(command) == 0
    assert '"shape": [\n' in (text := capsys.readouterr().out)
    assert all(number in text for number in ("16,\n", "24,\n"))


@pytest.mark.parametrize("settings", [(), EXPERTS], ids=["dense", "experts"])
def test_a_step_is_what_maxtext_runs(settings):
    pytest.importorskip("maxtext")
    step, (state, batch) = returned_by("maxtext:base.yml", [*TINY, *settings], num_devices=4)
    assert batch["inputs"].shape == (8, 16)
    parallel = autopar.parallelize(step, cluster="local:4", plan="zero(3)", donate_argnums=(), cache_dir=None)
    assert_close(*(numbers_of(run(state, batch)) for run in (parallel, jax.jit(step))))


@pytest.mark.parametrize("settings", [(), ("per_device_batch_size=0.5", "gradient_accumulation_steps=2")])
def test_a_batch_of_another_size_has_the_step_of_another_configuration(settings):
    """MaxText's step is made for one number of examples, and leaves out the others."""
    pytest.importorskip("maxtext")
    made = [shapes_only("maxtext:base.yml", [*TINY, *settings], num_devices=number) for number in (4, 8)]
    (_, (state, few)), (_, (_, many)) = made
    assert 2 * len(few["inputs"]) == len(many["inputs"])
    assert len({jax.jit(step).lower(state, many).as_text() for step, _ in made}) == 1


def test_shapes_are_those_of_the_arrays_and_errors_of_maxtext_are_told():
    pytest.importorskip("maxtext")
    _, shapes = shapes_only("maxtext:base.yml", TINY, num_devices=4)
    _, arrays = returned_by("maxtext:base.yml", TINY, num_devices=4)
    assert [(a.shape, a.dtype) for a in jax.tree.leaves(shapes)] == [
        (a.shape, a.dtype) for a in jax.tree.leaves(arrays)
    ]
    for given, told in ((["layers=9"], "layers"), (["model_name=none"], "model_name")):
        with pytest.raises(InvalidArgumentError, match=told):
            shapes_only("maxtext:base.yml", given)
    with pytest.raises(InvalidArgumentError, match="no such file"):
        shapes_only("maxtext:none.yml")
    step, (state, _) = shapes_only("maxtext:base.yml", [*TINY, "ici_tensor_parallelism=2"], 4, sharded=True)
    specs = {str(leaf.sharding.spec) for leaf in jax.tree.leaves(state["model"])}
    assert any("tensor" in spec for spec in specs)
    assert callable(step)
