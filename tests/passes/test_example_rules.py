"""Each rule on examples: what keeps them apart runs on micro-batches and gives what jit gives; the rest is refused."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.random import threefry2x32_p

import autopar
from autopar.errors import MixedExamplesError
from autopar.ir.graph import OpKind, Section, walk
from autopar.ir.primitives import SCALED_PRODUCTS
from autopar.ops.kernels.cudnn import NAMES
from autopar.passes.example_rules import APART, SUMS
from autopar.passes.forms import Form, State
from autopar.passes.microbatch import micro_batched
from autopar.passes.microbatch_analysis import reshaped
from tests.passes.test_microbatch import RULES, check, traced, training
from tests.small_steps import assert_close

EXAMPLES, WIDTH = 8, 6
ROW = np.zeros((1, WIDTH), np.float32)
SQUARE = jnp.eye(3) * 4


def batch():
    """Numbers of few digits: products with a permutation are exact."""
    random = np.random.default_rng(0)
    x = random.permutation(np.arange(-30, 31))[: EXAMPLES * WIDTH].reshape(EXAMPLES, WIDTH) / 32
    return {"x": x.astype(np.float32)}


def integers(x):
    return (x * 8).astype(jnp.int32)


def matrices(x):
    """A positive matrix of 3 x 3 for each example."""
    m = x.reshape(-1, 2, 3)
    return jnp.einsum("eij,eik->ejk", m, m) + SQUARE


def keys(x):
    return jax.random.wrap_key_data(lax.bitcast_convert_type(x[:, :2], jnp.uint32))


def gammas(keys, shape):
    return jax.vmap(jax.random.gamma)(keys, shape)


def images(x):
    return jnp.broadcast_to(x[:, None, :, None], (*x.shape[:1], 4, WIDTH, 4))


def convolved(images, kernel, groups=1):
    return lax.conv_general_dilated(
        images, kernel, (1, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=groups
    )


FLOATS = {
    "abs": jnp.abs, "acos": lax.acos, "acosh": lambda x: lax.acosh(2 + x**2), "asin": lax.asin, "asinh": lax.asinh,
    "atan": lax.atan, "atan2": lambda x: lax.atan2(x, x + 1), "atanh": lax.atanh, "cbrt": lax.cbrt, "ceil": lax.ceil,
    "clamp": lambda x: lax.clamp(-0.5, x, 0.5), "complex": lambda x: lax.complex(x, x + 1),
    "conj": lambda x: lax.conj(lax.complex(x, x)),
    "convert_element_type": lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), "copy": lambda x: lax.copy_p.bind(x),
    "cos": lax.cos, "cosh": lax.cosh, "div": lambda x: x / (2 + x**2), "eq": lambda x: x == x.round(),
    "eq_to": lambda x: lax.eq_to_p.bind(x, x), "erf": lax.erf, "erfc": lax.erfc, "erf_inv": lax.erf_inv, "exp": lax.exp,
    "exp2": lax.exp2, "expm1": lax.expm1, "floor": lax.floor, "ge": lambda x: x >= 0, "gt": lambda x: x > 0,
    "imag": lambda x: lax.imag(lax.complex(x, x)), "integer_pow": lambda x: lax.integer_pow(x, 3),
    "is_finite": lax.is_finite, "le": lambda x: x <= 0, "le_to": lambda x: lax.le_to_p.bind(x, -x),
    "log": lambda x: lax.log(1 + x**2), "log1p": lambda x: lax.log1p(x**2), "log2": lambda x: jnp.log2(1 + x**2),
    "logistic": lax.logistic, "lt": lambda x: x < 0, "lt_to": lambda x: lax.lt_to_p.bind(x, -x),
    "max": lambda x: lax.max(x, x**2), "min": lambda x: lax.min(x, x**2), "mul": lambda x: x * jnp.arange(6.0),
    "name": lambda x: checkpoint_name(x, "x"), "ne": lambda x: x != 0, "neg": lambda x: -x,
    "nextafter": lambda x: lax.nextafter(x, x + 1), "pow": lambda x: (1 + x**2) ** x,
    "real": lambda x: lax.real(lax.complex(x, x)), "reduce_precision": lambda x: lax.reduce_precision(x, 5, 4),
    "rem": lambda x: lax.rem(x, 0.3), "round": lax.round, "rsqrt": lambda x: lax.rsqrt(1 + x**2),
    "select_n": lambda x: jnp.where(x > 0, x, 2 * x), "sign": lax.sign, "sin": lax.sin, "sinh": lax.sinh,
    "sqrt": lambda x: lax.sqrt(x**2), "square": lax.square, "stop_gradient": lax.stop_gradient, "sub": lambda x: x - 1,
    "add": lambda x: x + jnp.arange(6.0), "tan": lax.tan, "tanh": lax.tanh,
    "add_any": lambda x: jax.grad(lambda y: jnp.sum(jnp.sin(y) * jnp.cos(y)))(x),
}  # fmt: skip

SPECIAL = {
    "bessel_i0e": lax.bessel_i0e, "bessel_i1e": lax.bessel_i1e, "digamma": lambda x: lax.digamma(2 + x**2),
    "igamma": lambda x: lax.igamma(1 + x**2, 1 + x**2), "igammac": lambda x: lax.igammac(1 + x**2, 1 + x**2),
    "igamma_grad_a": lambda x: lax.igamma_grad_a(1 + x**2, 1 + x**2), "lgamma": lambda x: lax.lgamma(2 + x**2),
    "polygamma": lambda x: lax.polygamma(jnp.ones_like(x), 1 + x**2),
    "regularized_incomplete_beta": lambda x: lax.betainc(1 + x**2, 2 + x**2, 0.3 + 0 * x),
    "zeta": lambda x: lax.zeta(2 + x**2, 1 + x**2), "random_gamma": lambda x: gammas(keys(x), 1 + x[:, 0] ** 2),
}  # fmt: skip

INTEGERS = {
    "and": lambda x: integers(x) & 3, "clz": lambda x: lax.clz(integers(x)), "not": lambda x: ~integers(x),
    "or": lambda x: integers(x) | 3, "population_count": lambda x: lax.population_count(integers(x)),
    "shift_left": lambda x: integers(x) << 2, "shift_right_arithmetic": lambda x: integers(x) >> 2,
    "shift_right_logical": lambda x: lax.shift_right_logical(integers(x), 2), "xor": lambda x: integers(x) ^ 3,
    "threefry2x32": lambda x: threefry2x32_p.bind(*(lax.bitcast_convert_type(x[:, i], jnp.uint32) for i in range(4))),
}  # fmt: skip

SHAPES = {
    "transpose": lambda x: x.T, "broadcast_in_dim": lambda x: jnp.broadcast_to(x[None], (3, *x.shape)),
    "squeeze": lambda x: jnp.squeeze(x[:, None, :1], (1, 2)), "concatenate": lambda x: jnp.concatenate([x, x + 1], 1),
    "split": lambda x: jnp.split(x, 2, 1)[1], "stack": lambda x: jnp.stack([x, x + 1]),
    "unstack": lambda x: sum(jnp.unstack(x, axis=1)), "tile": lambda x: jnp.tile(x, (1, 2)),
    "rev": lambda x: jnp.flip(x, 1), "slice": lambda x: x[:, 1:5:2], "pad": lambda x: jnp.pad(x, ((0, 0), (1, 2))),
    "bitcast_convert_type": lambda x: lax.bitcast_convert_type(x, jnp.uint8),
    "reshape": lambda x: jnp.sin(x.reshape(-1, 2, 3)).reshape(-1, 6),
    "stack, behind": lambda x: jnp.stack([x, x + 1], 1),
}  # fmt: skip

REDUCTIONS = {
    "reduce_sum": lambda x: x.sum(1), "reduce_prod": lambda x: x.T.prod(0), "reduce_max": lambda x: x.max(1),
    "reduce_min": lambda x: x.min(1), "reduce_and": lambda x: (x > -1).all(1), "reduce_or": lambda x: (x > 1).any(1),
    "reduce_xor": lambda x: lax.reduce(integers(x), np.int32(0), lax.bitwise_xor, (1,)),
    "argmax": lambda x: x.argmax(1), "argmin": lambda x: x.argmin(1),
    "reduce": lambda x: lax.reduce(x, 0.0, lambda a, b: a * b + a, (1,)), "cumsum": lambda x: jnp.cumsum(x, 1),
    "cumprod": lambda x: jnp.cumprod(x, 1), "cummax": lambda x: lax.cummax(x, 1), "cummin": lambda x: lax.cummin(x, 1),
    "cumlogsumexp": lambda x: lax.cumlogsumexp(x, 1), "sort": lambda x: jnp.sort(x, 1),
    "top_k": lambda x: lax.top_k(x, 2)[1], "approx_top_k": lambda x: lax.approx_max_k(x, 2)[0],
    "reduce_window_sum": lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 2), (1, 2), "SAME"),
    "reduce_window_max": lambda x: lax.reduce_window(x, -np.inf, lax.max, (1, 2), (1, 2), "SAME"),
    "reduce_window_min": lambda x: lax.reduce_window(x, np.inf, lax.min, (1, 2), (1, 2), "SAME"),
    "select_and_scatter_add": jax.grad(
        lambda x: jnp.sum(lax.reduce_window(x, -np.inf, lax.max, (1, 2), (1, 2), "SAME") ** 2)
    ),
    "select_and_gather_add": lambda x: jax.jvp(
        lambda x: lax.reduce_window(x, -np.inf, lax.max, (1, 2), (1, 2), "SAME"), (x,), (x**2,)
    )[1],
}  # fmt: skip

PRODUCTS = {
    "dot_general": lambda x: x @ jnp.ones((6, 4)), "dot_general, other side": lambda x: jnp.ones((4, 6)) @ x.T,
    "dot_general, batched": lambda x: jnp.einsum("ei,eij->ej", x[:, :3], matrices(x)),
    "conv_general_dilated": lambda x: convolved(images(x), jnp.ones((2, 2, 4, 3))),
    "conv_general_dilated, grouped": lambda x: convolved(images(x), jnp.ones((2, 2, 2, 6)), groups=2),
    "conv_general_dilated, kernels": lambda x: convolved(jnp.ones((2, 4, 4, 2)), x[:, :4].T.reshape(1, 2, 2, -1)),
    "fft": lambda x: jnp.fft.fft(x), "cholesky": lambda x: jnp.linalg.cholesky(matrices(x)),
    "eigh": lambda x: jnp.linalg.eigh(matrices(x))[0], "qr": lambda x: jnp.abs(jnp.linalg.qr(matrices(x))[1]),
    "lu": lambda x: lax.linalg.lu(matrices(x))[0], "svd": lambda x: jnp.linalg.svd(matrices(x), compute_uv=False),
    "lu_pivots_to_permutation": lambda x: lax.linalg.lu_pivots_to_permutation(jnp.abs(integers(x[:, :3])) % 3, 4),
    "householder_product": lambda x: lax.linalg.householder_product(matrices(x), x[:, :3]),
    "triangular_solve": lambda x: lax.linalg.triangular_solve(matrices(x), x[:, :3, None], left_side=True),
    "tridiagonal_solve": lambda x: lax.linalg.tridiagonal_solve(0 * x, 2 + x**2, 0 * x, x[..., None]),
    "eig": lambda x: jnp.abs(jnp.linalg.eigvals(matrices(x))).sum(1),
    "hessenberg": lambda x: lax.linalg.hessenberg(matrices(x))[0],
    "schur": lambda x: jnp.abs(lax.linalg.schur(matrices(x))[0]),
    "geqrf": lambda x: jnp.linalg.qr(matrices(x), mode="raw")[1],
}  # fmt: skip

INDICES = {
    "dynamic_slice": lambda x: lax.dynamic_slice(x, (0, jnp.arange(3)[1]), (len(x), 3)),
    "dynamic_update_slice": lambda x: lax.dynamic_update_slice(x, x[:, :2] + 1, (0, 3)),
    "gather, slices": lambda x: jnp.take(x, jnp.array([4, 1, 5]), axis=1),
    "gather, rows of a table": lambda x: jnp.arange(12.0).reshape(4, 3)[jnp.abs(integers(x)) % 4],
    "gather": lambda x: jnp.take_along_axis(x, jnp.argsort(x, 1)[:, :2], 1),
    "scatter": lambda x: x.at[:, 1].set(x[:, 2] + 1), "scatter-add": lambda x: x.at[:, 1].add(x[:, 2]),
    "scatter-sub": lambda x: x.at[:, 1].subtract(x[:, 2]), "scatter-mul": lambda x: x.at[:, 1].multiply(x[:, 2]),
    "scatter-min": lambda x: x.at[:, 1].min(x[:, 2]), "scatter-max": lambda x: x.at[:, 1].max(x[:, 2]),
    "scatter, batched": lambda x: jax.vmap(lambda row: row.at[jnp.argmax(row)].set(9.0))(x),
}  # fmt: skip

KEYS = {
    "random_wrap": lambda x: jax.random.key_data(keys(x)), "random_unwrap": lambda x: jax.random.key_data(keys(x)),
    "random_bits": lambda x: jax.vmap(jax.random.bits)(keys(x)),
    "random_split": lambda x: jax.random.key_data(jax.vmap(jax.random.split)(keys(x))),
    "random_fold_in": lambda x: jax.random.key_data(jax.vmap(jax.random.fold_in)(keys(x), jnp.abs(integers(x[:, 0])))),
    "random_seed": lambda x: jax.random.key_data(jax.vmap(jax.random.key)(jnp.abs(integers(x[:, 0])))),
    "random_clone": lambda x: jax.random.key_data(jax.random.clone(keys(x))),
}  # fmt: skip

GROUPS = {
    "floats": FLOATS, "special": SPECIAL, "integers": INTEGERS, "shapes": SHAPES, "reductions": REDUCTIONS,
    "products": PRODUCTS, "indices": INDICES, "keys": KEYS,
}  # fmt: skip
# Primitives of one version of jax only, or that other tests have: attention in test_attention_patterns, kernels in
# tests/ops/kernels.
ELSEWHERE = {
    "attention", "attention_backward", "kernel", "log2", "mulhi", "one_minus_square", "pallas_call", *NAMES,
    *SCALED_PRODUCTS,
}  # fmt: skip

# What addresses examples by their position, or depends on their order or on all of them.
BY_POSITION = {
    "scatter": lambda x: x.at[0].set(0.0),
    "scatter-add": lambda x: x.at[1].add(1.0),
    "scatter-mul": lambda x: x.at[jnp.array([0, 3])].multiply(2.0),
    "dynamic_update_slice": lambda x: lax.dynamic_update_slice(x, jnp.ones((1, WIDTH)), (2, 0)),
    "dynamic_slice": lambda x: x * lax.dynamic_slice(x, (2, 0), (1, WIDTH)),
    "gather": lambda x: x[jnp.arange(len(x))[::-1]],
    "ragged_dot_general": lambda x: lax.ragged_dot(x, jnp.ones((2, 6, 6)), jnp.array([3, 5])),
    "cumsum": lambda x: jnp.cumsum(x, 0),
    "sort": lambda x: jnp.sort(x, 0),
    "top_k": lambda x: lax.top_k(x.T, 2)[0],
    "rev": lambda x: x[::-1],
    "concatenate": lambda x: jnp.concatenate([x, x]),
    "pad": lambda x: jnp.pad(x, ((1, 1), (0, 0))),
    "slice": lambda x: x - x[:1],
    "tile": lambda x: jnp.tile(x, (2, 1)),
    "fft": lambda x: jnp.abs(jnp.fft.fft(x, axis=0)),
    "reduce_max": lambda x: x - x.max(0),
    "argmax": lambda x: x * jnp.argmax(x, 0),
    "reduce_window_sum": lambda x: lax.reduce_window(x, 0.0, lax.add, (2, 1), (1, 1), "SAME"),
    "conv_general_dilated": lambda x: lax.conv(x[None, None], jnp.ones((1, 1, 3, 1)), (1, 1), "SAME")[0, 0],
    "dot_general": lambda x: (x @ x.T) @ x,
}

# The same, where a loop or a recomputation does it.
IN_BLOCKS = {
    "scan": lambda x: lax.scan(lambda c, i: (c.at[i].multiply(0.5), None), x, jnp.arange(3))[0],
    "fori_loop": lambda x: lax.fori_loop(0, 3, lambda i, c: lax.dynamic_update_slice(c, ROW, (i, 0)), x),
    "checkpoint": lambda x: jax.checkpoint(lambda x: jnp.sin(x.at[0].set(0.0)))(x),
    "cond": lambda x: lax.cond(True, lambda x: x.at[0].set(0.0), lambda x: x, x),
}


def applied(functions):
    """A step that applies functions of examples that are not known before the loop."""

    def step(state, batch):
        x = batch["x"] @ state["a"]  # too much work to be done before the loop
        return state, {name: function(x) for name, function in functions.items()}

    return step


def trained(function):
    """A step whose gradients pass through a function of examples."""
    return training(lambda p, b: jnp.mean(function(jnp.tanh(b["x"] @ p["a"])) ** 2))


def state():
    return {"a": jnp.eye(WIDTH)[::-1]}


def primitives(graph, *sections):
    return {inner.primitive for op in graph.block.ops if op.section in sections for inner in walk_op(op)}


def walk_op(op):
    return [op, *(inner for block in op.blocks for inner in walk(block))]


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    "group", [pytest.param(name, marks=pytest.mark.slow) if name == "special" else name for name in GROUPS]
)
def test_what_keeps_examples_apart_runs_on_micro_batches(group):
    functions = GROUPS[group]
    graph = check(applied(functions), state(), batch(), 2)
    late = {op.primitive for op in graph.block.ops if op.section is Section.AFTER and op.kind is OpKind.EQUATION}
    assert not late, "all runs on micro-batches"
    named = {name.split(",")[0] for name in functions} - ELSEWHERE
    assert named <= primitives(graph, Section.FORWARD, Section.BACKWARD)


def test_every_rule_is_tested():
    tested = {name.split(",")[0] for functions in GROUPS.values() for name in functions}
    assert set(APART) <= tested | ELSEWHERE


def test_every_sum_is_tested():
    """Gradients of parameters: of products, of kernels, of rows of a table, of what is added to each example."""

    def loss(p, b):
        x = jnp.tanh(b["x"] @ p["a"])
        rows = p["table"][jnp.abs(integers(b["x"])) % 4].sum((1, 2))
        image = convolved(images(x), p["kernel"]) + p["bias"]
        return jnp.mean(image.sum((1, 2, 3)) * rows)

    p = state() | {"table": jnp.ones((4, 3)), "kernel": jnp.ones((2, 2, 4, 3)) / 8, "bias": jnp.zeros(3)}
    graph = check(training(loss), p, batch(), 4)
    assert set(SUMS) - {"scatter-sub"} - SCALED_PRODUCTS <= primitives(graph, Section.FORWARD, Section.BACKWARD)

    def counts(p, b):
        return p, jnp.zeros(6).at[jnp.argmax(b["x"] @ p["a"], 1)].subtract(1.0)

    graph = check(counts, state(), batch(), 4)
    assert "scatter-sub" in primitives(graph, Section.FORWARD)


HEAVY = ("dot_general", "conv_general_dilated", "ragged_dot_general")


def test_what_addresses_examples_by_position_runs_on_the_whole_batch():
    light = {name: f for name, f in BY_POSITION.items() if name not in HEAVY}
    graph = check(applied(light), state(), batch(), 2)
    assert set(light) <= primitives(graph, Section.AFTER)


@pytest.mark.cases(13)
@pytest.mark.parametrize("name", [*(name for name in BY_POSITION if name not in ("concatenate", "tile")), *IN_BLOCKS])
def test_gradients_do_not_pass_through_what_mixes_examples(name):
    function = {**BY_POSITION, **IN_BLOCKS}[name]
    line = f"passes/test_example_rules.py:{inspect.getsourcelines(function)[1]}:"
    with pytest.raises(MixedExamplesError, match="mixes the examples of the batch") as caught:
        micro_batched(traced(trained(function), state(), batch()), 2, RULES)
    assert line in str(caught.value)
    if name in BY_POSITION:
        assert f"got {name} mixes" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("sort", "it puts examples in order"),
        ("top_k", "it puts examples in order"),
        ("cumsum", "it combines examples"),
        ("reduce_max", "it combines examples"),
        ("rev", "it addresses examples by their position in the batch"),
    ],
)
def test_the_reason_is_what_it_does_to_the_examples(name, reason):
    with pytest.raises(MixedExamplesError, match=rf"{name} mixes the examples of the batch \({reason}\)"):
        micro_batched(traced(trained(BY_POSITION[name]), state(), batch()), 2, RULES)


def test_accuracy_among_the_largest_scores_is_a_mean_over_the_examples():
    def loss_of(params, batch):
        scores = jnp.tanh(batch["x"] @ params["a"])
        is_among = jnp.any(lax.top_k(scores, 3)[1] == jnp.argmin(batch["x"], 1)[:, None], axis=-1)
        return jnp.mean(scores**2), jnp.mean(is_among)

    def step(params, batch):
        (loss, accuracy), grads = jax.value_and_grad(loss_of, has_aux=True)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), (loss, accuracy)

    graph = check(step, state(), batch(), 2)
    assert "top_k" in primitives(graph, Section.FORWARD)
    on_devices = autopar.parallelize(
        step, search=autopar.Search(num_microbatches=2), cluster=autopar.Cluster.local(2), cache_dir=None
    )
    expected = jax.jit(step)(state(), batch())
    assert 0.0 < expected[1][1] < 1.0
    assert_close(on_devices(state(), batch()), expected)


@pytest.mark.parametrize(
    "name", ["scatter", "dynamic_update_slice", "gather", "sort", "slice", "fft", "reduce_window_sum"]
)
def test_inputs_may_be_mixed(name):
    """What is computed of the batch alone is computed before it is cut."""
    function = BY_POSITION[name]
    check(training(lambda p, b: jnp.mean(jnp.tanh(function(b["x"]) @ p["a"]) ** 2)), state(), batch(), 2)


def test_one_key_draws_for_all_examples():
    """Random numbers of one key are those of the whole batch, also where what they are drawn for is computed."""

    def loss(p, b):
        x = jnp.tanh(b["x"] @ p["a"])
        return jnp.mean(jnp.where(jax.random.bernoulli(jax.random.key(1), 0.5, x.shape), x, 0.0) ** 2)

    check(training(loss), state(), batch(), 4)
    drawn = {"gamma": lambda x: jax.random.gamma(jax.random.key(1), 1 + x**2)}
    graph = micro_batched(traced(applied(drawn), state(), batch()), 2, RULES)
    assert "random_gamma" in primitives(graph, Section.AFTER)


def test_keys_of_other_generators_are_not_taken_apart():
    """What the generator `rbg` draws for one of many keys depends on the others."""

    def step(state, b):
        noise = jax.vmap(jax.random.bits)(jax.random.wrap_key_data(four(b["x"] @ state["a"]), impl="rbg"))
        return state, noise

    def four(x):
        return lax.bitcast_convert_type(x[:, :4], jnp.uint32)

    graph = micro_batched(traced(step, state(), batch()), 2, RULES)
    assert "random_bits" in primitives(graph, Section.AFTER)


@pytest.mark.parametrize(
    ("old", "new", "place", "expected"),
    [
        ((8, 6), (48,), (0, 1), (0, 1)),
        ((48,), (8, 6), (0, 1), (0, 1)),
        ((3, 8), (24,), (1, 1), (0, 3)),
        ((24,), (3, 8), (0, 3), (1, 1)),
        ((24, 2), (3, 8, 2), (0, 3), (1, 1)),
        ((8, 6), (2, 4, 6), (0, 1), (0, 1)),
        ((1, 8), (8, 1), (1, 1), (0, 1)),
        ((2, 3, 8), (6, 8), (2, 1), (1, 1)),
        ((2, 3, 8), (2, 24), (2, 1), (1, 3)),
        ((8, 6), (6, 8), (0, 1), (0, 1)),  # of two halves, the first three rows are the first
        ((2, 8), (4, 4), (1, 1), (0, 2)),
        ((8,), (1, 8), (0, 1), (1, 1)),
        ((6, 8), (16, 3), (1, 1), None),
    ],
)
def test_examples_in_a_reshape(old, new, place, expected):
    """Against a reshape of numbers that say to which micro-batch an element belongs."""
    state = State(form=Form.SPLIT, dim=place[0], outer=place[1])
    result = reshaped(old, new, state, 2, lambda dim: True)
    assert result == (expected and (*expected, False))
    found = expected

    def owners(shape, dim, outer):
        of_rows = np.arange(shape[dim]) % (shape[dim] // outer) // (shape[dim] // outer // 2)
        return np.broadcast_to(of_rows.reshape([-1 if d == dim else 1 for d in range(len(shape))]), shape)

    if found is not None:
        np.testing.assert_array_equal(owners(old, *place).reshape(new), owners(new, *found))
