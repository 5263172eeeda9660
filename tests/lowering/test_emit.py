"""What is emitted keeps the numbers, sends what was predicted, and bears the user's modules.

Each step of a path is run between random layouts. XLA's partitioner folds away arrays without elements, also among the
operands of sums over devices.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import autopar
from autopar import recipes
from autopar.execute import collectives
from autopar.frontend.build_graph import build_graph, module_path, role_of, stack_of_module
from autopar.frontend.tracing import trace
from autopar.hardware.collective_cost import PLANNED_KINDS, Link, sent_bytes
from autopar.ir.graph import Role
from autopar.ir.jax_sharding import concrete_mesh, named_sharding
from autopar.ir.layout import Layout, LogicalMesh, enumerate_with_partial
from autopar.ir.resharding import MeshLinks, ReshardStep, StepKind, fits, gather_and_slice, paths
from autopar.ir.rules import RuleBook
from autopar.lowering.emit import Emitter
from benchmarks.zoo import CASES
from tests.small_steps import slow_cluster

LINK = Link(latency_s=1e-7, bytes_per_s=1e9, overhead_s=1e-6, source="test")
MESHES = [LogicalMesh(axis_sizes=sizes) for sizes in ((8,), (2, 4), (2, 2, 2))]
SHAPE = (8, 16)
GRAPH = build_graph(trace(jnp.negative, (jax.ShapeDtypeStruct(SHAPE, jnp.float32),), names="a", donate=(), batch=()),
                    RuleBook())  # fmt: skip


def links_of(mesh):
    return MeshLinks(mesh=mesh, links=(LINK,) * len(mesh.axis_sizes))


def summands(value, layout, mesh):
    """A value as it is given in a layout: where it is partial, an array of different summands in front."""
    if not layout.partial:
        return value
    parts = np.random.default_rng(1).integers(-8, 8, (mesh.size(layout.partial), *value.shape)).astype(np.float32)
    parts[0] += value - parts.sum(axis=0)
    return parts


def whole(array, layout):
    return np.asarray(array).sum(axis=0) if layout.partial else np.asarray(array)


def emitted(steps, source, mesh):
    """The compiled function that takes a value from layout to layout by these steps."""
    devices = concrete_mesh(mesh)
    emitter = Emitter(GRAPH, devices)

    def run(array):
        for step in steps:
            array = emitter.step(array, step)
        return array

    rank = (mesh.size(source.partial), *SHAPE) if source.partial else SHAPE
    target = steps[-1].after if steps else source
    shardings = (named_sharding(source, devices), named_sharding(target, devices))
    jitted = jax.jit(run, in_shardings=shardings[0], out_shardings=shardings[1])
    return jitted.lower(jax.ShapeDtypeStruct(rank, jnp.float32)).compile(), shardings[0]


def check(steps, source, target, mesh):
    """Emits steps; holds numbers, layout, and the collectives of the compiled program against what was predicted."""
    value = np.arange(float(np.prod(SHAPE)), dtype=np.float32).reshape(SHAPE)
    compiled, sharding = emitted(steps, source, mesh)
    result = compiled(jax.device_put(summands(value, source, mesh), sharding))
    assert (whole(result, target) == value).all()
    expected = {}
    for step in steps:
        collective = links_of(mesh).as_compiled(step, value.nbytes)
        if collective is not None:
            kind, result_bytes = collective
            sent = float(sent_bytes(kind, result_bytes, mesh.size(step.axes)))
            expected[kind.value] = expected.get(kind.value, 0.0) + sent
    found = {
        kind.value: sent
        for kind, sent in collectives.traffic(collectives.collectives(compiled.as_text())).bytes.items()
    }
    assert found == expected, (source.text(mesh), target.text(mesh), steps)


@st.composite
def journeys(draw):
    mesh = draw(st.sampled_from(MESHES))
    layouts = st.sampled_from(enumerate_with_partial(SHAPE, mesh))
    return mesh, draw(layouts), draw(layouts)


@settings(deadline=None, derandomize=True, max_examples=40)
@given(journeys())
def test_a_path_keeps_the_numbers_and_sends_what_was_predicted(journey):
    mesh, source, target = journey
    steps = paths(len(SHAPE), links_of(mesh)).steps(source, target)
    if not fits(steps, SHAPE, mesh):
        steps = gather_and_slice(source, target)
    check(steps, source, target, mesh)


SQUARE = LogicalMesh(axis_sizes=(2, 4))


@pytest.mark.parametrize(
    ("kind", "axes", "source", "target"),
    [
        (StepKind.ALL_REDUCE, (1,), Layout(((), ()), (1,)), Layout(((), ()))),
        (StepKind.ALL_REDUCE, (0, 1), Layout(((), ()), (0, 1)), Layout(((), ()))),
        (StepKind.ALL_REDUCE, (1,), Layout(((0,), ()), (1,)), Layout(((0,), ()))),
        (StepKind.ALL_REDUCE, (1,), Layout(((), ()), (0, 1)), Layout(((), ()), (0,))),
        (StepKind.REDUCE_SCATTER, (1,), Layout(((), ()), (1,)), Layout(((), (1,)))),
        (StepKind.REDUCE_SCATTER, (1,), Layout(((0,), ()), (1,)), Layout(((0, 1), ()))),
        (StepKind.REDUCE_SCATTER, (0, 1), Layout(((), ()), (0, 1)), Layout(((), (0, 1)))),
        (StepKind.ALL_GATHER, (1,), Layout(((0, 1), ())), Layout(((0,), ()))),
        (StepKind.ALL_GATHER, (1,), Layout(((0,), (1,))), Layout(((0,), ()))),
        (StepKind.ALL_TO_ALL, (1,), Layout(((1,), ())), Layout(((), (1,)))),
        (StepKind.ALL_TO_ALL, (1,), Layout(((0, 1), ())), Layout(((0,), (1,)))),
        (StepKind.COLLECTIVE_PERMUTE, (0, 1), Layout(((0, 1), ())), Layout(((1, 0), ()))),
        (StepKind.SLICE, (1,), Layout(((0,), ())), Layout(((0, 1), ()))),
        (StepKind.MASK, (1,), Layout(((0,), ())), Layout(((0,), ()), (1,))),
        (StepKind.MASK, (0,), Layout(((), ()), (1,)), Layout(((), ()), (0, 1))),
    ],
)
def test_each_kind_of_step_is_the_collective_of_its_name(kind, axes, source, target):
    check((ReshardStep(kind=kind, axes=axes, before=source, after=target),), source, target, SQUARE)


def test_every_kind_of_collective_is_among_the_steps_that_are_tried():
    assert {kind.collective for kind in StepKind} - {None} == set(PLANNED_KINDS)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (Layout(((0,), ())), Layout(((), (0,)), (1,))),
        (Layout(((0,), ()), (1,)), Layout(((), (0,)), (1,))),
        (Layout(((), ()), (0,)), Layout(((), ()), (1,))),
    ],
)
def test_the_path_that_always_exists_makes_summands_and_keeps_them(source, target):
    check(gather_and_slice(source, target), source, target, SQUARE)


W = np.linspace(-0.3, 0.4, 8 * 16, dtype=np.float32).reshape(8, 16)
BATCH = {"x": np.sin(np.arange(64, dtype=np.float32)).reshape(8, 8), "extra": np.zeros((8, 0, 8), np.float32)}


def step(w, batch):
    """`extra` has no tokens: the gradient of the weight by it is a sum over nothing."""

    def loss(w):
        return jnp.square(batch["x"] @ w).mean() + jnp.einsum("bnd,de->bne", batch["extra"], w).sum()

    value, gradient = jax.value_and_grad(loss)(w)
    return w - 0.1 * gradient, value


@pytest.mark.parametrize("plan", [recipes.data_parallel(), recipes.zero(3), recipes.pipeline(1, num_microbatches=2)])
def test_products_of_empty_arrays(plan):
    found = autopar.parallelize(step, plan=plan, cache_dir=None)(W, BATCH)
    for seen, expected in zip(found, jax.jit(step)(W, BATCH), strict=True):
        np.testing.assert_allclose(seen, expected, rtol=2e-5)


GPT = CASES["gpt"](layers=1, width=32, length=16, batch=8)


@pytest.mark.parametrize("module", ["", "M", "M/layer0/dense"])
@pytest.mark.parametrize("role", [Role.FORWARD, Role.BACKWARD, Role.UPDATE])
def test_stacks_are_read_back(module, role):
    stack = stack_of_module(module, role)
    assert (module_path(stack), role_of(stack)) == (module, role)


def test_products_are_named_as_in_the_plain_step():
    """But for the subscripts of einsum, which jax takes into its names, and which are no module."""
    args = jax.eval_shape(GPT.init, jax.random.key(0)), GPT.batch(0)
    step = autopar.parallelize(GPT.step, plan=recipes.zero(3), cluster=slow_cluster(4), cache_dir=None)
    ours, plain = (
        set(re.findall(r' dot\(.*op_name="([^"]*/dot_general)"', compiled.as_text()))
        for compiled in (step.compile(*args), jax.jit(GPT.step).lower(*args).compile())
    )
    assert {name.replace("shard_map/", "") for name in ours} == {re.sub("/[^/]*->[^/]*", "", name) for name in plain}
    assert "jit(step)/transpose(jvp(GPT))/layer0/feed_forward_in/dot_general" in plain
