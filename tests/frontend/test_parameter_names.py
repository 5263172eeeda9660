"""Operations in no module of the code are named by the paths of the parameters that they read."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import autopar
from autopar.frontend.build_graph import _joined, _module_of, build_graph
from autopar.frontend.tracing import trace
from autopar.ir.graph import OpKind, Role, walk
from autopar.ir.rules import RuleBook

OPTIMIZER = optax.adamw(1e-3)
WIDTH = 8


def layer(x, p):
    hidden = jax.nn.gelu(x @ p["up"]["kernel"] + p["up"]["bias"])
    return x + hidden.astype(p["down"]["kernel"].dtype) @ p["down"]["kernel"]


def new_layer():
    up = {"kernel": jnp.ones((WIDTH, 4 * WIDTH)), "bias": jnp.zeros(4 * WIDTH)}
    return {"up": up, "down": {"kernel": jnp.ones((4 * WIDTH, WIDTH))}}


def forward(params, x, form, dtype):
    params = jax.tree.map(lambda p: p.astype(dtype), params)
    one = jax.checkpoint(layer) if "checkpoint" in form else layer
    if "scan" in form:
        return jax.lax.scan(lambda x, p: (one(x, p), None), x, params["layers"])[0]
    for p in params["layers"]:
        x = one(x, p)
    return x


def step_of(form, dtype):
    def step(state, x):
        loss = lambda params: jnp.mean(forward(params, x.astype(dtype), form, dtype).astype(jnp.float32) ** 2)
        gradients = jax.grad(loss)(state["params"])
        updates, optimizer = OPTIMIZER.update(gradients, state["optimizer"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "optimizer": optimizer}

    return step


def products(graph):
    return [op for op in walk(graph.block) if op.primitive == "dot_general"]


@pytest.mark.parametrize("form", ["unrolled", "scan", "scan, checkpoint"])
def test_subscripts_of_einsum_and_classes_of_equinox_are_no_modules(form):
    """The products are those of their layer, whatever the library's scopes are called."""

    def layer(x, p):
        with jax.named_scope("eqx.nn.MultiheadAttention"), jax.named_scope("eqx.nn.Linear"):
            hidden = jnp.einsum("bd,df->bf", x, p["up"]["kernel"])
        return x + jnp.einsum("bf,fd->bd", hidden, p["down"]["kernel"])

    def step(state, x):
        one = jax.checkpoint(layer) if "checkpoint" in form else layer

        def loss(params):
            if "scan" in form:
                return jnp.sum(jax.lax.scan(lambda x, p: (one(x, p), None), x, params["layers"])[0] ** 2)
            return jnp.sum(one(x, params["layers"]) ** 2)

        return jax.tree.map(lambda p, g: p - g, state, jax.grad(loss)(state))

    layers = {"up": {"kernel": jnp.ones((WIDTH, 4 * WIDTH))}, "down": {"kernel": jnp.ones((4 * WIDTH, WIDTH))}}
    state = {"layers": jax.tree.map(lambda x: jnp.stack([x, x]), layers) if "scan" in form else layers}
    traced = trace(step, (state, jnp.ones((4, WIDTH))), names=("state", "x"), donate=(0,), batch=(1,))
    graph = build_graph(traced, RuleBook())
    assert {op.place for op in products(graph)} == {"state/layers/up", "state/layers/down"}
    assert {op.module for op in products(graph)} == {"eqx.nn.MultiheadAttention/eqx.nn.Linear", ""}


@pytest.mark.cases(5)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("form", ["unrolled", "unrolled, checkpoint", "scan", "scan, checkpoint"])
def test_a_plain_tree_names_the_operations_that_read_it(form, dtype):
    layers = [new_layer() for _ in range(2)]
    params = {"layers": jax.tree.map(lambda *x: jnp.stack(x), *layers) if "scan" in form else layers}
    state = {"params": params, "optimizer": OPTIMIZER.init(params)}
    traced = trace(step_of(form, dtype), (state, jnp.ones((4, WIDTH))), names=("state", "x"), donate=(0,), batch=(1,))
    graph = build_graph(traced, RuleBook())
    of_layers = ["state/params/layers"] if "scan" in form else [f"state/params/layers/{i}" for i in range(2)]
    for role in (Role.FORWARD, Role.BACKWARD):
        names = {op.place for op in products(graph) if op.role is role}
        assert names == {f"{name}/{part}" for name in of_layers for part in ("up", "down")}
    equations = [op for op in walk(graph.block) if op.kind is OpKind.EQUATION]
    assert all(op.module == "" for op in equations), "what permits and cuts follows the code alone"
    gelu = {op.place for op in equations if op.primitive == "tanh"}
    assert gelu == {f"{name}/up" for name in of_layers}
    updates = {op.place for op in equations if op.primitive == "sqrt"}
    assert updates == {f"{name}/{part}" for name in of_layers for part in ("up", "down")}


def test_modules_of_the_code_stay():
    def step(state, x):
        with jax.named_scope("mlp"):
            return state["w"] - jax.grad(lambda w: jnp.mean((x @ w) ** 2))(state["w"])

    traced = trace(step, ({"w": jnp.ones((8, 8))}, jnp.ones((4, 8))), names=("state", "x"), donate=(), batch=(1,))
    graph = build_graph(traced, RuleBook())
    assert {op.place for op in walk(graph.block)} == {"mlp"}
    assert all(op.parameters == "" for op in walk(graph.block))


@pytest.mark.parametrize(
    ("names", "joined"),
    [
        ([], ""),
        (["m/attention/query", "m/attention/key"], "m/attention"),
        (["m/0/down", "m/1/down"], "m/1/down"),
        (["params/w1", "params/w2"], "params/w2"),
    ],
)
def test_siblings_are_their_parent(names, joined):
    assert _joined(names) == joined


def test_the_last_part_of_a_path_is_the_parameter_of_a_module():
    assert _module_of("model.blocks[0].up.kernel") == "model/blocks/0/up"
    assert _module_of("state['w']") == "state/w"


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return x + self.down(jax.nn.gelu(self.up(self.norm(x))))


class Model(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List([Block(rngs) for _ in range(2)])

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def test_plans_of_nnx_models_have_rows_of_modules():
    model = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, OPTIMIZER, wrt=nnx.Param)

    @autopar.parallelize(cache_dir=None)
    def step(model, optimizer, x):
        loss, gradients = nnx.value_and_grad(lambda model: jnp.mean(model(x) ** 2))(model)
        optimizer.update(model, gradients)
        return loss

    plan = step.plan(model, optimizer, jnp.ones((16, WIDTH)))
    seconds = {row.module: row.compute_time_s for row in plan.record.modules}
    assert {"model/blocks/0/up", "model/blocks/1/down"} <= set(seconds)
    assert seconds.get("", 0.0) < 0.05 * sum(seconds.values())
    assert "model/blocks/*/up (2x)" in plan.table()
