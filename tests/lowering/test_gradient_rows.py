"""Gradients of weights lie row by row in programs for TPUs, as the weights and their moments do."""

import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import autopar
from autopar import recipes
from autopar.frontend.build_graph import build_graph
from autopar.frontend.tracing import trace
from autopar.ir.graph import OpKind
from autopar.ir.layout import Layout
from autopar.ir.rules import RuleBook
from autopar.lowering.emit import gradients_in_rows, in_whole_tiles
from autopar.verification import compile_for_target
from tests.sections import plain_step

EXPERTS, WIDTH, HIDDEN = 8, 1024, 4096


def experts_step(state, batch):
    def loss(w):
        hidden = jax.nn.gelu(jnp.einsum("esd,edf->esf", batch, w["up"]))
        return jnp.mean(jnp.einsum("esf,efd->esd", hidden, w["down"]) ** 2)

    grads = jax.grad(loss)(state["w"])
    moments = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["m"], grads)
    return {"w": jax.tree.map(lambda w, m: w - 1e-3 * m, state["w"], moments), "m": moments}, {}


def shapes():
    shape = {"up": (EXPERTS, WIDTH, HIDDEN), "down": (EXPERTS, HIDDEN, WIDTH)}
    weights = {name: jax.ShapeDtypeStruct(of, jnp.float32) for name, of in shape.items()}
    return {"w": weights, "m": weights}, jax.ShapeDtypeStruct((EXPERTS, 160, WIDTH), jnp.float32)


def devices_of(platform):
    return types.SimpleNamespace(devices=np.array([types.SimpleNamespace(platform=platform)]))


def test_the_gradients_that_the_update_reads_are_found_on_tpu_only():
    graph = build_graph(trace(experts_step, shapes(), names=("state", "batch"), donate=(0,), batch=(1,)), RuleBook())
    found = gradients_in_rows(graph, devices_of("tpu"))
    assert sorted(graph.values[v].shape for v in found) == [(EXPERTS, WIDTH, HIDDEN), (EXPERTS, HIDDEN, WIDTH)]
    assert gradients_in_rows(graph, devices_of("gpu")) == frozenset()


def test_gradients_that_micro_batches_add_up_are_found_too():
    def step(w, batch):
        return w - 0.1 * jax.grad(lambda w: jnp.sum(jnp.sin(batch @ w)))(w), ()

    graph, _ = plain_step(step, np.ones((4, 4), np.float32), np.ones((6, 4), np.float32), 2)
    (found,) = gradients_in_rows(graph, devices_of("tpu"))
    assert [op.kind for op in graph.block.ops if found in op.inputs] == [OpKind.ACCUMULATE]


@pytest.mark.parametrize(
    ("shape", "layout", "said"),
    [
        ((16, 256), Layout(((0,), ())), True),
        ((16, 256), Layout(((), (0,))), True),
        ((8, 256), Layout(((0,), ())), False),  # four rows each
        ((16, 128), Layout(((), (0,))), False),  # half a tile's columns
        ((2, 16, 256), Layout(((), ()), partial=(0,)), True),  # summands in front
    ],
)
def test_parts_that_fill_whole_tiles_are_laid_out_by_rows(shape, layout, said):
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    text = str(jax.make_jaxpr(lambda a: in_whole_tiles(a, layout, mesh))(jnp.zeros(shape)))
    assert ("layout_constraint" in text) is said


@pytest.mark.extra("tpu")
def test_a_compiled_update_copies_no_state():
    step = autopar.parallelize(experts_step, plan=recipes.zero(3), cluster="tpu-v6e:2x4", cache_dir=None)
    text = compile_for_target(step, "tpu:v6e:2x4", *shapes()).as_text()
    state = rf"f32\[(1,{WIDTH},{HIDDEN}|1,{HIDDEN},{WIDTH}|{WIDTH},{HIDDEN}|{HIDDEN},{WIDTH})\]"
    assert re.search(rf"{state}\S* parameter", text), "the state is split as the test thinks"
    assert not re.findall(rf"= {state}\S* copy\(", text)
