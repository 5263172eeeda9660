"""`autopar checkpoint show` and `autopar checkpoint export`."""

import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import autopar
from autopar.__main__ import main
from autopar.checkpoint import Checkpointer
from benchmarks.zoo import CASES

ROOT = Path(__file__).parents[3]


class Position:
    def position(self) -> dict[str, int]:
        return {"epoch": 1, "batch": 7}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    """Checkpoints of steps 3 and 4, with a plan and a position."""
    path = tmp_path_factory.mktemp("run")
    case = CASES["mlp"]()
    step = autopar.parallelize(case.step, plan=autopar.recipes.zero(3), cache_dir=None)
    step.plan(jax.eval_shape(case.init, jax.random.key(0)), case.batch(0))
    params = {
        "dense": {
            "w": jnp.arange(6.0).reshape(2, 3),
            "half": jnp.arange(4, dtype="bfloat16"),
            "none": jnp.zeros((0, 2)),
        },
        "flag": jnp.array([True, False]),
    }
    state = {"params": params, "key": jax.random.key(1), "step": 3, "small": {"u": jnp.zeros(4, "uint4")}}
    with Checkpointer(path, on_preemption=False) as checkpoints:
        checkpoints.save(3, state, plan=step, data=Position())
        checkpoints.save(4, state)
    return str(path)


def test_show_prints_steps_leaves_plan_and_position(folder, capsys):
    assert main(["checkpoint", "show", folder, "--step", "3"]) == 0
    text = capsys.readouterr().out
    assert text.splitlines() == [
        f"{folder}: steps 3, 4",
        "Step 3: 7 leaves, 46 B",
        "  key                keys of threefry2x32[]  8 B",
        "  params/dense/half  bfloat16[4]             8 B",
        "  params/dense/none  float32[0,2]            0 B",
        "  params/dense/w     float32[2,3]            24 B",
        "  params/flag        bool[2]                 2 B",
        "  small/u            uint4[4]                4 B",
        "  step               int 3",
        "Plan: One program on 8 devices: the batch and the state split over 8.",
        'Data: {"epoch": 1, "batch": 7}',
    ]


def test_show_as_json(folder, capsys):
    assert main(["checkpoint", "show", folder, "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert (values["steps"], values["step"], values["bytes"], values["plan"], values["data"]) == (
        [3, 4], 4, 46, None, None,
    )  # fmt: skip
    assert values["leaves"][3] == {
        "name": "params/dense/w", "kind": "array", "dtype": "float32", "shape": [2, 3], "bytes": 24,
    }  # fmt: skip


@pytest.mark.slow
def test_show_looks_for_no_devices_and_imports_no_orbax(folder):
    program = (
        "import sys; from autopar.train.checkpoint.description import describe; str(describe(sys.argv[1]));"
        "from jax._src import xla_bridge; print(xla_bridge.backends_are_initialized(), 'orbax' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", program, folder], cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout == "False False\n"


def test_export_writes_parameters_that_safetensors_reads(folder, capsys, tmp_path):
    path = tmp_path / "params.safetensors"
    assert main(["checkpoint", "export", folder, str(path)]) == 0
    assert "4 arrays" in capsys.readouterr().out
    arrays = load_file(path)
    assert {name: (str(a.dtype), a.shape) for name, a in arrays.items()} == {
        "dense.half": ("bfloat16", (4,)),
        "dense.none": ("float32", (0, 2)),
        "dense.w": ("float32", (2, 3)),
        "flag": ("bool", (2,)),
    }
    assert np.array_equal(arrays["dense.w"], np.arange(6.0).reshape(2, 3))
    assert arrays["dense.half"].tolist() == [0, 1, 2, 3]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["params.safetensors"]


@pytest.mark.parametrize(
    ("select", "message"),
    [
        ("encoder", "no 'encoder' among key, params, small, step"),
        ("small", "small/u: expected an array of a type that safetensors has, got uint4"),
        ("key", "got random keys"),
    ],
)
def test_export_names_what_it_cannot_write(folder, capsys, tmp_path, select, message):
    assert main(["checkpoint", "export", folder, str(tmp_path / "x.safetensors"), "--select", select]) == 1
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_missing_folder_is_an_error_in_words(tmp_path, capsys):
    assert main(["checkpoint", "show", str(tmp_path / "nowhere")]) == 1
    assert "expected a checkpoint, got no folder" in capsys.readouterr().err
