"""`autopar.lint`: steps on plain `jax.jit`, their shardings, what these cost and what would pay."""

import json
import re
import runpy
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import autopar
from autopar.__main__ import main
from autopar.errors import InvalidArgumentError, UnsupportedError
from autopar.execute.collectives import collectives, traffic
from autopar.frontend.jit_shardings import jit_shardings_of
from autopar.hardware.cluster import Cluster
from autopar.linting import _step_of
from tests.small_steps import ROOT

WIDTH, HIDDEN, EXAMPLES = 4096, 16384, 8192
MATRIX_BYTES = 4 * WIDTH * HIDDEN
H100S = Cluster.preset("dgx-h100", hosts=1)


def mesh(data=8, model=1):
    return Mesh(np.array(jax.devices()[: data * model]).reshape(data, model), ("data", "model"))


def at(*spec, on=None):
    return NamedSharding(on or mesh(), P(*spec))


def array(*shape, sharding=None):
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)


def momentum_step(state, batch, hidden=lambda x: x):
    """Two layers with a momentum for each matrix."""

    def loss(params):
        inside = hidden(jnp.tanh(batch @ params["up"]))
        return jnp.mean((inside @ params["down"]) ** 2)

    value, grads = jax.value_and_grad(loss)(state["params"])
    moments = jax.tree.map(lambda m, g: 0.9 * m + g, state["moments"], grads)
    params = jax.tree.map(lambda p, m: p - 0.1 * m, state["params"], moments)
    return {"params": params, "moments": moments}, value


def matrices(up=None, down=None):
    return {"up": array(WIDTH, HIDDEN, sharding=up), "down": array(HIDDEN, WIDTH, sharding=down)}


STATE = {"params": matrices(), "moments": matrices()}
BATCH = array(EXAMPLES, WIDTH)


def linted(step, *args, **options):
    return autopar.lint(step, *args, cluster=H100S, **({"search": False} | options))


def change(found, start):
    (told,) = [c for c in found.changes if c.text.startswith(start) and not c.is_sum]
    return told


def told(found):
    """All changes that were planned."""
    return (*(c.text for c in found.changes), *found.without_gain)


def test_state_that_every_device_holds_whole_is_told_with_its_bytes():
    found = linted(jax.jit(momentum_step, in_shardings=(at(), at("data")), donate_argnums=0), STATE, BATCH)
    held = {row.name: row for row in found.whole}
    for name in ("state/params/up", "state/params/down", "state/moments/up", "state/moments/down"):
        assert (held[name].nbytes, held[name].copies) == (MATRIX_BYTES, 8)
        assert held[name].spare_bytes == MATRIX_BYTES * 7 // 8
        assert held[name].spec == "P(None, None)"
    assert any(text.startswith("the optimizer's state over data") for text in told(found))


def test_state_that_does_not_fit_is_split():
    wide = {"up": array(WIDTH, 64 * HIDDEN), "down": array(64 * HIDDEN, WIDTH)}
    step = jax.jit(momentum_step, in_shardings=(at(), at("data")), donate_argnums=0)
    found = linted(step, {"params": wide, "moments": wide}, BATCH)
    assert "it does not fit" in " ".join(str(found).split())
    moments = change(found, "the optimizer's state over data")
    assert moments.specs == (("state/moments/down", 'P("data", None)'), ("state/moments/up", 'P(None, "data")'))
    assert moments.less_bytes > 64 * MATRIX_BYTES
    assert change(found, "the whole state over data").fits


def test_a_spec_forces_a_gather_and_the_line_of_the_product_is_told():
    layouts = {"params": {"up": at("data"), "down": at()}, "moments": {"up": at("data"), "down": at()}}
    found = linted(jax.jit(momentum_step, in_shardings=(layouts, at("data")), donate_argnums=0), STATE, BATCH)
    (gather,) = [row for row in found.collectives if row.kind == "all-gather"]
    assert re.match(r"tests/face/test_linting.py:\d+ \(momentum_step.<locals>.loss\)$", gather.line)
    number = int(gather.line.split(":")[1].split()[0])
    assert 'batch @ params["up"]' in Path(__file__).read_text().splitlines()[number - 1]
    assert gather.axes == ("data",)
    assert gather.sent_bytes == pytest.approx(MATRIX_BYTES * 7 / 8)


def test_what_is_computed_again_although_memory_is_free():
    def recomputing(state, batch):
        def loss(params):
            inside = jax.checkpoint(lambda x: jnp.tanh(x @ params["up"]) @ params["down"])(batch)
            return jnp.mean(inside**2)

        grads = jax.grad(loss)(state)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads)

    found = linted(jax.jit(recomputing, in_shardings=(at(), at("data")), donate_argnums=0), matrices(), BATCH)
    assert any(text.startswith("without jax.checkpoint the step would fit") for text in found.recomputed)
    less = change(found, "no recomputation")
    assert less.less_s > 0
    assert "leave out jax.checkpoint" in str(found)


def test_attention_that_is_written_out():
    def step(params, batch):
        def loss(params):
            query, key, value = (jnp.einsum("bld,dhk->blhk", batch, p) for p in params)
            scores = jax.nn.softmax(jnp.einsum("blhk,bmhk->bhlm", query, key) / 8)
            return jnp.mean(jnp.einsum("bhlm,bmhk->blhk", scores, value).astype(jnp.float32) ** 2)

        grads = jax.grad(loss)(params)
        return [p - 0.1 * g for p, g in zip(params, grads, strict=True)]

    half = jax.ShapeDtypeStruct((512, 8, 64), jnp.bfloat16)
    batch = jax.ShapeDtypeStruct((16, 2048, 512), jnp.bfloat16)
    found = linted(jax.jit(step, in_shardings=(at(), at("data")), donate_argnums=0), [half] * 3, batch)
    assert "test_linting.py" in found.scores[0]
    assert change(found, "attention by cuDNN's fused attention").less_s > 0


def test_state_that_is_not_donated():
    large = {"params": matrices(), "moments": matrices()}
    kept = linted(jax.jit(momentum_step, in_shardings=(at("data"), at())), large, BATCH)
    donated = linted(jax.jit(momentum_step, in_shardings=(at("data"), at()), donate_argnums=0), large, BATCH)
    assert change(kept, "donate the state: jax.jit(..., donate_argnums=(0,))").less_bytes > 0
    assert not any("donate" in text for text in told(donated))


def test_an_axis_that_no_sharding_names_does_the_same_work():
    on = mesh(4, 2)
    found = linted(jax.jit(momentum_step, in_shardings=(at(on=on), at("data", on=on)), donate_argnums=0), STATE, BATCH)
    assert "No sharding names model=2: the devices along it do the same work" in found.notes
    products = [row for row in found.alike if "loss" in row.line]
    assert products[0].copies == 2
    assert change(found, "the batch over model").specs == (("batch", 'P(("data", "model"), None)'),)


def test_shardings_of_arguments_and_of_the_code_are_read_too():
    split, whole = at("data"), at()
    state = {"params": matrices(), "moments": matrices()}

    def constrained(state, batch):
        return momentum_step(state, batch, hidden=lambda x: jax.lax.with_sharding_constraint(x, whole))

    batch = array(EXAMPLES, WIDTH, sharding=split)
    plain, found = linted(momentum_step, state, batch), linted(constrained, state, batch)
    assert found.plan.predicted.step_time_s > plain.plan.predicted.step_time_s
    gathers = [row for row in found.collectives if row.kind == "all-gather"]
    assert any(row.sent_bytes == pytest.approx(4 * EXAMPLES * HIDDEN * 7 / 8) for row in gathers)
    assert change(found, "without the constraints in the code").less_s > 0


def test_an_argument_that_the_code_lays_anew_is_moved():
    """A parameter arrives split, and is gathered by a constraint on the argument itself."""

    def step(w, x):
        return jnp.mean(x @ jax.lax.with_sharding_constraint(w, at()))

    found = linted(jax.jit(step, in_shardings=(at("data"), at("data"))), array(WIDTH, HIDDEN), BATCH)
    assert [len(axes) for axes in found.plan.record.arguments[0].layout.dims] == [1, 0]
    assert any(row.kind == "all-gather" for row in found.collectives)


TENSOR = {"up": P(None, "model"), "down": P("model", None)}
GATHERED = {"up": P("data", None), "down": P(None, "data")}


@pytest.mark.parametrize(("specs", "kind"), [(TENSOR, "all-reduce"), (GATHERED, "all-gather")])
def test_bytes_are_those_of_the_program_that_xla_compiles(specs, kind):
    on = mesh(2, 4) if specs is TENSOR else mesh()
    params = {"up": array(64, 256), "down": array(256, 64)}
    layouts = {name: NamedSharding(on, spec) for name, spec in specs.items()}
    args = {"params": params, "moments": params}, array(512, 64)
    of_state = {"params": layouts, "moments": layouts}
    step = jax.jit(momentum_step, in_shardings=(of_state, at("data", on=on)), out_shardings=(of_state, None))
    compiled = traffic(collectives(step.lower(*args).compile().as_text()))
    found = autopar.lint(step, *args, cluster="local:8", search=False)
    assert found.plan.predicted.by_kind()[kind][1] == pytest.approx(compiled.bytes[kind], rel=0.02)


@pytest.mark.slow
def test_a_decoder_split_by_hand_sends_about_the_bytes_of_its_compiled_program():
    sizes = dict(layers=2, width=256, heads=8, kv_heads=4, feed_forward=512, vocabulary=1024, examples=16, length=128)
    step, *args = runpy.run_path(str(ROOT / "examples" / "llama.py"))["by_hand"](**sizes)
    compiled = traffic(collectives(step.lower(*args).compile().as_text()))
    found = autopar.lint(step, *args, cluster="local:8", search=False)
    assert found.plan.predicted.sent_bytes == pytest.approx(compiled.total_bytes, rel=0.1)


def test_a_step_without_any_sharding_is_refused():
    with pytest.raises(InvalidArgumentError, match=r"in_shardings of jax.jit.*got none"):
        linted(jax.jit(momentum_step), STATE, BATCH)


def test_a_mesh_of_another_size_than_the_cluster_is_refused():
    four = mesh(4, 1)
    with pytest.raises(InvalidArgumentError, match="a cluster of 4 devices, those of the mesh"):
        linted(jax.jit(momentum_step, in_shardings=(at(on=four), at("data", on=four))), STATE, BATCH)


def test_axes_may_split_a_dimension_in_either_order():
    on = mesh(2, 4)
    rows = at(("model", "data"), on=on)
    found = linted(jax.jit(momentum_step, in_shardings=(at(on=on), rows), donate_argnums=0), STATE, BATCH)
    assert found.axes == (("model", 4), ("data", 2))
    columns = at(None, ("data", "model"), on=on)
    with pytest.raises(UnsupportedError, match="one order in which mesh axes split dimensions together"):
        linted(jax.jit(momentum_step, in_shardings=(columns, rows), donate_argnums=0), STATE, BATCH)


def test_an_axis_of_one_device_splits_nothing():
    on = Mesh(np.array(jax.devices()).reshape(1, 4, 2), ("replica", "data", "model"))
    rows = at(("replica", "data"), on=on)
    found = linted(jax.jit(momentum_step, in_shardings=(at(on=on), rows), donate_argnums=0), STATE, BATCH)
    assert found.axes == (("data", 4), ("model", 2))
    assert change(found, "the batch over model").specs == (("batch", 'P(("data", "model"), None)'),)


def test_shardings_over_two_meshes_are_refused():
    with pytest.raises(UnsupportedError, match="shardings over one mesh"):
        linted(jax.jit(momentum_step, in_shardings=(at(), at("data", on=mesh(4, 2)))), STATE, BATCH)


JOB = """
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P


def step(w, x):
    return w - 0.1 * jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)


def job():
    mesh = Mesh(np.array(jax.devices()[:8]), ("data",))
    w = jax.jit(lambda key: jax.random.normal(key, (100_000, 8192)), out_shardings=NamedSharding(mesh, P()))
    x = jax.device_put(jnp.zeros((64, 100_000)), NamedSharding(mesh, P("data")))
    return jax.jit(step, donate_argnums=0), w(jax.random.key(0)), x
"""


def test_the_command_reads_the_shardings_that_a_job_gives_to_its_arguments(tmp_path, capsys):
    (tmp_path / "job.py").write_text(JOB)
    command = ["lint", f"{tmp_path}/job.py:job", "--cluster", "dgx-h100"]
    assert main([*command, "--against", "none"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("step on dgx-h100 (8 x H100-SXM5-80GB), mesh data=8")
    assert "3.28 GB: w float32[100000, 8192] P(None, None), 8 devices hold the same" in out
    assert "By the search" not in out
    assert main([*command, "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["search"]["step_time_s"] <= values["plan"]["step_time_s"]
    assert values["axes"] == [["data", 8]]


def adapted_step(adapter, base, batch, key):
    """A frozen matrix beside the one that is trained."""
    keep = jax.random.bernoulli(key, 0.9, batch["x"].shape)
    loss = lambda adapter: jnp.mean((jnp.where(keep, batch["x"], 0) @ (base + adapter) - batch["y"]) ** 2)
    return adapter - 0.1 * jax.grad(loss)(adapter)


def test_frozen_parameters_and_keys_are_no_batch():
    matrix, key = array(64, 64), jax.eval_shape(lambda: jax.random.key(0))
    args = (matrix, matrix, {"x": array(8, 64), "y": array(8, 64)}, key)
    step = jax.jit(adapted_step, in_shardings=(at(), at(), at("data"), None))
    assert _step_of(step, args, jit_shardings_of(step, args))._options.batch_argnums == (2,)
    args = (*args[:3], jax.ShapeDtypeStruct((2,), jnp.uint32))
    assert _step_of(step, args, jit_shardings_of(step, args))._options.batch_argnums == (2,)
