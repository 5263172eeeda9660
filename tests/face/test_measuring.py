"""`autopar.measure`: kernels of a recorded step are joined to operations, whose times price steps on any devices."""

import dataclasses
import json
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.__main__ import main
from autopar.common import jax_compat
from autopar.cost.cost_model import NodeCosts, cost_model, least_time_s, timed_kinds
from autopar.errors import InvalidArgumentError, UnsupportedError
from autopar.execute.compiled_step import LoweredWhole
from autopar.frontend.build_graph import build_graph
from autopar.frontend.tracing import trace
from autopar.hardware import calibrate
from autopar.hardware.kinds import OperationTimes
from autopar.hardware.measurement import FitQuality
from autopar.ir.graph import OpKind, Role
from autopar.ir.layout import LogicalMesh
from autopar.ir.rules import RuleBook
from autopar.measuring import (
    RanInstruction,
    check_cluster,
    on_the_clock,
    operation_times,
    ran_instructions,
    seconds_of_operations,
    with_products,
    with_shares_of,
)
from autopar.step_views import on_cluster
from autopar.train.monitoring.step_profile import DeviceEvent
from tests.hardware.test_calibrate import KnownClock
from tests.small_steps import slow_cluster

PRODUCT = "dot_general of float32"
FORWARD, UPDATE = (f"elementwise operations and reductions, {role}" for role in ("forward", "update"))
TEXT = """
HloModule jit_step, is_scheduled=true

%fused (p: f32[4,4]) -> f32[4,4] {
  %p = f32[4,4]{1,0} parameter(0)
  %dot.1 = f32[4,4]{1,0} dot(%p, %p), metadata={op_name="jit(step)/jvp(M)/#3/dot_general"}
  ROOT %add.1 = f32[4,4]{1,0} add(%dot.1, %p), metadata={op_name="jit(step)/jvp(M)/#4/add"}
}

%body (p: f32[4,4]) -> f32[4,4] {
  %p = f32[4,4]{1,0} parameter(0)
  ROOT %fusion.2 = f32[4,4]{1,0} fusion(%p), kind=kOutput, calls=%fused
}

ENTRY %main (x: f32[4,4]) -> f32[4,4] {
  %x = f32[4,4]{1,0} parameter(0)
  %while.1 = f32[4,4]{1,0} while(%x), body=%body, metadata={op_name="jit(step)/while"}
  %gemm = f32[4,4]{1,0} custom-call(%while.1), custom_call_target="__cublas$gemm", metadata={op_name="jit(step)/#7/dot"}
  ROOT %copy.1 = f32[4,4]{0,1} copy(%gemm)
}
"""


def events(*rows, program="jit_step"):
    return [DeviceEvent(device=0, program=program, run=0, operation=o, start_s=s, end_s=e) for o, s, e in rows]


def op(primitive, *, inputs=(), outputs=(), role=Role.FORWARD, count=1.0, form=""):
    operand = SimpleNamespace(aval=SimpleNamespace(dtype=np.dtype("float32")))
    return SimpleNamespace(
        primitive=primitive, inputs=inputs, outputs=outputs or (99,), role=role, count=count, kind=OpKind.EQUATION,
        eqn=SimpleNamespace(
            primitive=primitive, invars=[operand], outvars=[operand], params={"dimension_numbers": form}
        ),
    )  # fmt: skip


def ran(*numbers, seconds, runs=1.0, multiplies=False):
    return RanInstruction(numbers=frozenset(numbers), multiplies=multiplies, runs=runs, seconds=seconds)


def test_events_are_of_the_operations_whose_numbers_their_instructions_bear():
    """Of two steps; a loop's own event holds those of its body, and one run of three was disturbed."""
    recorded = events(
        ("while.1", 0.0, 9.0), ("fusion.2", 0.0, 2.0), ("fusion.2", 2.0, 4.0), ("fusion.2", 4.0, 9.0),
        ("fusion.2", 9.0, 11.0), ("gemm", 11.0, 12.0), ("gemm", 12.0, 13.0), ("copy.1", 13.0, 14.0),
    ) + events(("gemm", 20.0, 30.0), program="jit_other")  # fmt: skip
    found, side_by_side = ran_instructions(recorded, TEXT, steps=2)
    assert found == [
        ran(3, 4, seconds=4.0, runs=2.0, multiplies=True),
        ran(7, seconds=1.0, multiplies=True),
        ran(seconds=0.5, runs=0.5),
    ]
    assert side_by_side == 1.0
    at_once = events(("gemm", 0.0, 4.0), ("copy.1", 1.0, 3.0))
    assert ran_instructions(at_once, TEXT, steps=1)[1] == pytest.approx(4 / 6)


def test_a_product_that_is_named_by_its_transpose_is_found():
    """12 transposes what product 11 made of what product 10 made: the nearest is meant. What does not multiply has a
    product's number, as a kernel that adds up its parts, only where it has no other.
    """
    ops = {
        10: op("dot_general", inputs=(0, 1), outputs=(2,)),
        11: op("dot_general", inputs=(2, 1), outputs=(3,)),
        12: op("transpose", inputs=(3,), outputs=(4,)),
        13: op("add", inputs=(3, 4), outputs=(5,)),
    }
    multiplying = [ran(12, seconds=1.0, multiplies=True), ran(10, 12, seconds=1.0, multiplies=True)]
    others = [ran(13, seconds=1.0), ran(11, 13, seconds=1.0), ran(11, seconds=1.0)]
    assert [each.numbers for each in with_products(multiplying, ops)] == [{11, 12}, {10, 12}]
    assert [each.numbers for each in with_products(others, ops)] == [{13}, {13}, {11}]
    before_any = [ran(12, seconds=1.0, multiplies=True)]
    assert with_products(before_any, {12: ops[12]}) == before_any
    # Without a name, and 11 is seen: it is the other one.
    nameless = [ran(11, seconds=1.0, multiplies=True), ran(seconds=1.0, multiplies=True)]
    assert [each.numbers for each in with_products(nameless, ops)] == [{11}, {10}]


@pytest.mark.parametrize(
    ("side_by_side", "step_s", "beside_s", "seconds"),
    [
        (1.0, 4.0, 0.0, [1.0, 3.0]),
        (0.5, 2.0, 0.0, [0.5, 1.5]),  # two ran at once
        (1.0, 2.0, 0.0, [0.5, 1.5]),  # recording took as long as the step
        (1.0, 8.0, 0.0, [2.0, 6.0]),  # 4 s in which nothing ran, over 1 and 3 runs
        (1.0, 8.0, 4.0, [1.0, 3.0]),  # which the model has between turns of loops
    ],
)
def test_seconds_add_up_to_those_by_the_clock(side_by_side, step_s, beside_s, seconds):
    given = [ran(1, seconds=1.0, runs=1.0), ran(2, seconds=3.0, runs=3.0)]
    assert [each.seconds for each in on_the_clock(given, side_by_side, step_s, beside_s)] == pytest.approx(seconds)


def test_operations_that_run_as_one_share_its_time_as_predicted():
    """Operation 2 is computed in both; 4 was predicted to take nothing; 9 is in no prediction."""
    found, of_none_s = seconds_of_operations(
        [ran(1, 2, seconds=8.0), ran(2, 3, seconds=2.0), ran(4, seconds=0.5), ran(9, seconds=0.25), ran(seconds=0.25)],
        {1: 3.0, 2: 2.0, 3: 1.0, 4: 0.0},
    )
    assert found == pytest.approx({1: 6.0, 2: 2.0 + 1.0, 3: 1.0, 4: 0.0})
    assert of_none_s == pytest.approx(1.0)


def test_time_of_no_operation_goes_to_what_moves_bytes_and_to_all_where_nothing_does():
    ops = {1: op("dot_general"), 2: op("add"), 3: op("mul")}
    predicted = {1: 6.0, 2: 1.0, 3: 3.0}
    assert with_shares_of(4.0, ops, predicted, {1: 5.0, 2: 1.0, 3: 1.0}) == pytest.approx({1: 5.0, 2: 2.0, 3: 4.0})
    assert with_shares_of(2.0, ops, {1: 6.0}, {1: 5.0}) == pytest.approx({1: 7.0})


def test_times_of_a_kind_by_size():
    """Two products of one size are one; of sizes whose larger takes less, or that were not seen, all get the mean of
    their five runs; a kind that was not seen is left out; elementwise operations have one ratio for each pass.
    """
    ops = {
        1: op("dot_general", count=2.0), 2: op("dot_general"), 3: op("dot_general"), 4: op("dot_general"),
        5: op("add"), 6: op("mul"), 7: op("add", role=Role.UPDATE), 8: op("gather"),
        9: op("dot_general"),
    }  # fmt: skip
    predicted = {1: 2.0, 2: 1.0, 3: 2.0, 4: 5.0, 5: 1.0, 6: 3.0, 7: 1.0, 8: 1.0, 9: 0.5}
    measured = {1: 10.0, 2: 2.0, 3: 2.0, 4: 9.0, 5: 0.0, 6: 6.0, 7: 1.0, 8: 0.0, 9: 0.0}
    assert operation_times(ops, predicted, measured) == (
        OperationTimes(kind=PRODUCT, predicted_s=(0.5, 1.0, 2.0, 5.0), measured_s=(2.8, 2.8, 2.8, 9.0)),
        OperationTimes(kind=FORWARD, predicted_s=(2.0,), measured_s=(3.0,)),
        OperationTimes(kind=UPDATE, predicted_s=(1.0,), measured_s=(1.0,)),
    )


def test_products_of_another_form_have_times_of_their_own():
    """Half of the slow one is not the fast one of that size; a form that was not timed goes as all together."""
    ops = {1: op("dot_general", form="forward"), 2: op("dot_general", form="backward")}
    times = operation_times(ops, {1: 1.0, 2: 2.0}, {1: 1.0, 2: 6.0})
    device = timed_device(*times)
    for form, predicted_s, corrected_s in (("forward", 1.0, 1.0), ("backward", 1.0, 3.0), ("other", 1.5, 3.5)):
        kinds = timed_kinds(op("dot_general", form=form))
        assert device.corrected_s(kinds, np.float64(predicted_s)) == pytest.approx(corrected_s)


TIMES = OperationTimes(kind=PRODUCT, predicted_s=(1.0, 3.0), measured_s=(2.0, 4.0))


def test_between_sizes_times_lie_on_a_line_and_beyond_them_at_the_nearest_ratio():
    assert TIMES.corrected_s(np.array([0.0, 0.5, 1.0, 2.0, 6.0])) == pytest.approx([0.0, 1.0, 2.0, 3.0, 8.0])


def timed_device(*times):
    return dataclasses.replace(slow_cluster(4).device, operation_times=times)


def graph_of(function, *shapes):
    traced = trace(function, shapes, names=tuple("wx"[: len(shapes)]), donate=(), batch=())
    return build_graph(traced, RuleBook())


def graph_of_a_product():
    graph = graph_of(lambda w, x: x @ w, *(jax.ShapeDtypeStruct((n, 512), "float32") for n in (512, 64)))
    (product,) = graph.ops()
    return graph, product


def test_the_cost_model_prices_a_part_by_the_time_of_its_size():
    """A product on one device and shared by four, of which each takes what is measured of a quarter."""
    graph = graph_of(
        lambda w, x: x @ w, jax.ShapeDtypeStruct((512, 512), "float32"), jax.ShapeDtypeStruct((64, 512), "float32")
    )
    (product,) = graph.ops()
    cluster, mesh = slow_cluster(4), LogicalMesh(axis_sizes=(4,))
    plain = NodeCosts(graph, cost_model(cluster, mesh))
    whole_s, quarter_s = plain.compute_s(product, None), plain.shared_s(product, 4)
    times = OperationTimes(kind=PRODUCT, predicted_s=(quarter_s, whole_s), measured_s=(3 * quarter_s, 5 * whole_s))
    costs = NodeCosts(graph, cost_model(dataclasses.replace(cluster, device=timed_device(times)), mesh))
    assert costs.compute_s(product, None) == pytest.approx(5 * whole_s)
    assert costs.shared_s(product, 4) == pytest.approx(3 * quarter_s)
    assert costs.even_s(product, 4) == pytest.approx(times.corrected_s(np.float64(whole_s / 4)))


def test_a_bound_holds_where_small_parts_are_relatively_faster():
    """A quarter of the whole time would be more than four devices take."""
    graph = graph_of(
        lambda w, x: x @ w, jax.ShapeDtypeStruct((512, 512), "float32"), jax.ShapeDtypeStruct((64, 512), "float32")
    )
    (product,) = graph.ops()
    cluster, mesh = slow_cluster(4), LogicalMesh(axis_sizes=(4,))
    whole_s = NodeCosts(graph, cost_model(cluster, mesh)).compute_s(product, None)
    times = OperationTimes(kind=PRODUCT, predicted_s=(whole_s / 2, whole_s), measured_s=(whole_s / 2, 8 * whole_s))
    timed = dataclasses.replace(cluster, device=timed_device(times))
    assert least_time_s(graph, timed) <= NodeCosts(graph, cost_model(timed, mesh)).shared_s(product, 4)


def test_equal_operations_of_two_passes_have_their_own_times():
    """The same sum in the forward pass and in the update, which the cost model else prices once."""

    def step(w, x):
        grad = jax.grad(lambda w: jnp.sum(jnp.tanh(w) * x))(w)
        return jnp.tanh(w + grad)

    shape = jax.ShapeDtypeStruct((256, 256), "float32")
    graph = graph_of(step, shape, shape)
    forward, update = (
        next(o for o in graph.ops() if o.primitive == "tanh" and o.role is r) for r in (Role.FORWARD, Role.UPDATE)
    )
    times = [
        OperationTimes(kind=kind, predicted_s=(1.0,), measured_s=(ratio,))
        for kind, ratio in ((FORWARD, 2.0), (UPDATE, 3.0))
    ]
    cluster, mesh = slow_cluster(1), LogicalMesh(axis_sizes=(1,))
    costs = NodeCosts(graph, cost_model(dataclasses.replace(cluster, device=timed_device(*times)), mesh))
    plain_s = NodeCosts(graph, cost_model(cluster, mesh)).compute_s(forward, None)
    assert costs.compute_s(forward, None) == pytest.approx(2 * plain_s)
    assert costs.compute_s(update, None) == pytest.approx(3 * plain_s)


def test_a_cluster_file_keeps_the_times(tmp_path):
    cluster = dataclasses.replace(slow_cluster(4), device=timed_device(TIMES))
    cluster.save(tmp_path / "cluster.json")
    assert autopar.Cluster.load(tmp_path / "cluster.json") == cluster


# Steps that run


def layers(form):
    """A step of three layers: under a scan, written out, recomputed, in bfloat16."""

    def layer(x, w):
        return jnp.tanh(x @ w), None

    def loss(state, batch):
        x, body = batch["x"], jax.checkpoint(layer) if form == "recomputed" else layer
        ws = state["w"]
        if form == "casts":
            x, ws = x.astype(jnp.bfloat16), ws.astype(jnp.bfloat16)
        if form == "unrolled":
            for i in range(3):
                x, _ = body(x, ws[i])
        else:
            x, _ = jax.lax.scan(body, x, ws)
        return jnp.mean(x.astype(jnp.float32) ** 2)

    def step(state, batch):
        value, grads = jax.value_and_grad(loss)(state, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), value

    return step, {"w": jnp.full((3, 128, 128), 0.01)}, {"x": jnp.ones((64, 128))}


def with_earlier_times(cluster):
    """As another step left it."""
    fit = FitQuality(what="step another", constants="1 kind", points=1, median_error=0.0, worst="")
    device = dataclasses.replace(cluster.device, operation_times=(TIMES,))
    return dataclasses.replace(cluster, device=device, fits=(*cluster.fits, fit))


@pytest.mark.cases(1)
@pytest.mark.parametrize("form", ["scanned", "unrolled", "recomputed", "casts"])
def test_a_step_is_predicted_as_it_was_timed(form):
    """All of its products are found among the kernels, and the state survives."""
    step, state, batch = layers(form)
    cluster = autopar.Cluster.local(1, measured=False)
    search = autopar.Search(remat="as written" if form == "recomputed" else None)
    step = autopar.parallelize(step, cluster=cluster, search=search, plan="data_parallel()", cache_dir=None)
    found = autopar.measure(on_cluster(step, with_earlier_times(cluster)), state, batch, seconds=0)
    assert found.corrected_s == pytest.approx(found.measured_s, rel=1e-6)
    kinds = {row.kind: row for row in found.kinds}
    product = kinds["dot_general of bfloat16" if form == "casts" else PRODUCT]
    # Forward and twice backward, but that nothing wants the gradient of x; and forward again.
    assert product.runs == (3 + 6 - (form == "unrolled") + 3 * (form == "recomputed"))
    assert product.measured_s > 0
    assert kinds[UPDATE].measured_s > 0
    assert sum(row.measured_s for row in found.kinds) == pytest.approx(found.measured_s)
    assert dataclasses.replace(found.cluster.device, operation_times=()) == cluster.device
    assert [fit.what for fit in found.cluster.fits] == ["step step"]
    assert "with these times the step is predicted to take" in str(found)
    np.testing.assert_array_equal(state["w"], np.full((3, 128, 128), 0.01, np.float32))


def test_a_program_of_other_names_is_not_taken_from_jaxs_cache(monkeypatch):
    flags, compile_ = [], LoweredWhole.compile

    def compiled(self):
        flags.append(jax_compat.config.compilation_cache_include_metadata_in_key.value)
        return compile_(self)

    monkeypatch.setattr(LoweredWhole, "compile", compiled)
    step, state, batch = layers("scanned")
    step = autopar.parallelize(step, cluster=autopar.Cluster.local(1, measured=False), cache_dir=None)
    autopar.measure(step, state, batch, seconds=0)
    assert flags == [False, True]  # as it is timed, as it is recorded


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("instruction", "predicted_s", "got"),
    [
        (ran(seconds=1.0), 1.0, "1 instructions without"),
        (ran(*range(99), seconds=1.0), 0.0, "no time of one that is predicted to take any"),
        (ran(*range(99), seconds=0.0), 1.0, "no time of one that is predicted to take any"),
    ],
)
def test_a_profile_without_the_step_is_said(monkeypatch, instruction, predicted_s, got):
    """Without names; with those of operations of no predicted time alone; of a profile in which nothing takes time."""
    monkeypatch.setattr("autopar.measuring.ran_instructions", lambda events, text, steps: ([instruction], 1.0))
    of_operations = lambda graph, *rest: dict.fromkeys((op.id for op in graph.ops()), predicted_s)
    monkeypatch.setattr("autopar.measuring.compute_times_s", of_operations)
    step, state, batch = layers("scanned")
    step = autopar.parallelize(step, cluster=autopar.Cluster.local(1, measured=False), cache_dir=None)
    with pytest.raises(UnsupportedError, match=f"operations bear their names, got {got}"):
        autopar.measure(step, state, batch, seconds=0)


@pytest.mark.parametrize(
    ("cluster", "got"),
    [("local:8", "8 x CPU, which share the cores of one host"), ("dgx-h100:1", "1 x H100-SXM5-80GB")],
)
def test_only_devices_here_are_timed_and_of_a_cpu_one(cluster, got):
    step, state, batch = layers("scanned")
    step = autopar.parallelize(step, cluster=autopar.Cluster.parse(cluster), cache_dir=None)
    with pytest.raises(InvalidArgumentError, match=got):
        autopar.measure(step, state, batch)


@pytest.mark.parametrize(
    ("here", "refused"),
    [("NVIDIA H100 80GB HBM3", ["dgx-h200:1", "dgx-a100-80g:1", "mi300x:1"]), ("a card of no table", ["tpu-v5e:2x4"])],
)
def test_only_the_accelerator_that_is_here_is_timed(monkeypatch, here, refused):
    """By its name in the tables; one that no table has goes by its platform."""
    card = SimpleNamespace(
        platform="gpu", device_kind=here, process_index=0, memory_stats=lambda: None, compute_capability="1.0"
    )
    monkeypatch.setattr(jax, "devices", lambda *args: [card])
    check_cluster(autopar.Cluster.parse("dgx-h100:2"))
    for name in refused:
        cluster = autopar.Cluster.parse(name)
        with pytest.raises(InvalidArgumentError, match=f"x {re.escape(cluster.device.name)}"):
            check_cluster(cluster)


def test_a_step_that_does_not_fit_says_what_to_do():
    step, state, batch = layers("scanned")
    local = autopar.Cluster.local(1, measured=False)
    small = dataclasses.replace(local, device=dataclasses.replace(local.device, memory_bytes=200_000))
    step = autopar.parallelize(step, cluster=small, cache_dir=None)
    with pytest.raises(InvalidArgumentError, match=r"needs 688 kB of 180 kB\n.*fewer layers or examples"):
        autopar.measure(step, state, batch)


JOB = """
import jax.numpy as jnp
from jax import grad, tree

def train_step(state, batch):
    grads = grad(lambda p: jnp.mean((batch @ p) ** 2))(state)
    return state - 0.1 * grads, {}

def job(width=64):
    return train_step, jnp.ones((width, width)) / width, jnp.ones((16, width))
"""


@pytest.fixture
def job(tmp_path, monkeypatch):
    monkeypatch.setenv("AUTOPAR_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(calibrate, "DeviceClock", lambda devices, num_hosts: KnownClock())
    (tmp_path / "job.py").write_text(JOB)
    return f"{tmp_path / 'job.py'}:job"


def test_the_verb_keeps_the_times_of_a_step_with_those_of_the_device(job, tmp_path, capsys):
    path = tmp_path / "cluster.json"
    assert main(["measure", job, "--devices", "1", "--save", str(path), "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["step"]["step"] == "train_step"
    assert values["step"]["corrected_s"] == pytest.approx(values["step"]["measured_s"], rel=1e-6)
    assert [fit["what"] for fit in values["fits"]][-1] == "step train_step"
    kinds = {times.kind for times in autopar.Cluster.load(path).device.operation_times}
    assert PRODUCT in kinds
    assert autopar.Cluster.local(1).device.operation_times == ()

    assert main(["measure", job, "--devices", "1"]) == 0
    out = capsys.readouterr().out
    assert "float32 products" in out
    assert "train_step on one CPU" in out
    assert {times.kind for times in autopar.Cluster.local(1).device.operation_times} == kinds


def test_the_verb_refuses_before_it_measures(job, monkeypatch, capsys):
    monkeypatch.setattr(calibrate, "measure", None)
    for given, text in (
        ([job, "--devices", "8"], "which share the cores of one host"),
        ([job, "--devices", "1", "--arg", "width=1000000"], "arguments of 4 TB"),
        (["--arg", "width=8"], "name the function too"),
    ):
        assert main(["measure", *given]) == 1
        assert text in capsys.readouterr().err
