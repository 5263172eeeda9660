"""Policies and loss scales without a mesh."""

import re
import types

import flax.linen as nn
import jax
import jax.numpy as jnp
import jmp
import numpy as np
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import autopar
from autopar.errors import InvalidArgumentError, UnsupportedError
from autopar.mixed_precision import LossScale, all_finite
from autopar.train.mixed_precision import policy as precision_policy
from tests.small_steps import ROOT, mlp_batch, mlp_loss, new_mlp_state
from tests.train.mixed_precision.small_training import OPTIMIZER


@pytest.mark.parametrize(
    ("policy", "types"),
    [
        ("bf16", "params=float32,compute=bfloat16,output=float32,reductions=float32"),
        ("fp16", "params=float32,compute=float16,output=float32,reductions=float32"),
        ("fp8", "params=float32,compute=bfloat16,output=float32,reductions=float32"),
        ("params=bfloat16,reductions=f32", "params=bfloat16,compute=bfloat16,output=bfloat16,reductions=float32"),
        ("p=f32, c=bf16, o=f16", "params=float32,compute=bfloat16,output=float16,reductions=float32"),
        (
            jmp.get_policy("params=float32,compute=float16,output=float32"),
            "params=float32,compute=float16,output=float32,reductions=float32",
        ),
    ],
)
def test_policies_by_name_by_types_and_by_example(policy, types):
    made = autopar.precision(policy)
    assert str(made) == types
    assert autopar.precision(made) is made
    assert made.float8 == (policy == "fp8")


@pytest.mark.parametrize("policy", ["int8", "compute=int8", "compute", "float8_e4m3fn", 16, types.SimpleNamespace()])
def test_what_is_no_policy(policy):
    with pytest.raises(InvalidArgumentError, match="'bf16', 'fp16', 'fp8'"):
        autopar.precision(policy)


def test_types_that_cannot_be():
    with pytest.raises(InvalidArgumentError, match="jax_enable_x64"):
        autopar.precision("params=float64")
    with pytest.raises(InvalidArgumentError, match="16 bits or more"):
        autopar.precision(jmp.Policy(jnp.float32, jnp.float8_e4m3fn, jnp.float32))


def test_casts_change_floating_arrays_alone():
    policy = autopar.precision("bf16")
    tree = {"w": jnp.ones(2), "ids": np.arange(2), "key": jax.random.key(0), "rate": 0.5, "none": None}
    cast = policy.cast_to_compute(tree)
    assert cast["w"].dtype == jnp.bfloat16
    assert [cast[name] is tree[name] for name in ("ids", "key", "rate", "none")] == [True] * 4
    scaling = {"params": {"w": jnp.ones(2)}, "_overwrite_with_gradient": {"scale": jnp.ones(2)}}
    assert policy.cast_to_compute(scaling)["_overwrite_with_gradient"]["scale"].dtype == jnp.float32


def test_named_entries_keep_their_types():
    policy, seen = autopar.precision("bf16"), {}

    def loss_of(params, batch):
        seen.update({name: x.dtype for name, x in batch.items()})
        return mlp_loss(params, batch)

    jax.eval_shape(policy.value_and_grad(loss_of, keep=("y",)), new_mlp_state(), mlp_batch())
    assert seen == {"x": jnp.bfloat16, "y": jnp.float32}


@pytest.mark.parametrize("by_position", [True, False])
def test_arguments_are_named_as_those_of_jit_are(by_position):
    policy, seen = autopar.precision("bf16"), []

    def loss_of(params, x, y):
        seen.append((x.dtype, y.dtype))
        return mlp_loss(params, {"x": x, "y": y})

    batch = mlp_batch()
    args, kwargs = ((batch["x"], batch["y"]), {}) if by_position else ((), batch)
    jax.eval_shape(policy.value_and_grad(loss_of, keep="y"), new_mlp_state(), *args, **kwargs)
    assert seen == [(jnp.bfloat16, jnp.float32)]
    with pytest.raises(InvalidArgumentError, match=r"names of arguments \(params, x, y\).*got 'targets'"):
        policy.value_and_grad(loss_of, keep="targets")(new_mlp_state(), *args, **kwargs)


def test_gradients_come_back_in_the_type_of_parameters_or_of_reductions():
    for policy, expected in (("bf16", "float32"), ("p=bf16", "bfloat16"), ("p=bf16,r=f32", "float32")):
        made, seen = autopar.precision(policy), []

        def loss_of(params, batch, seen=seen):
            seen.append((params["first"].dtype, batch["x"].dtype))
            return mlp_loss(params, batch), {"predicted": batch["y"]}

        params = made.cast_to_param(new_mlp_state())
        (loss, aux), grads = made.value_and_grad(loss_of, has_aux=True)(params, mlp_batch())
        assert {str(g.dtype) for g in jax.tree.leaves(grads)} == {expected}
        assert seen == [(jnp.bfloat16, jnp.bfloat16)]
        assert loss.dtype == aux["predicted"].dtype == made.output_dtype


def test_gradients_of_several_arguments():
    policy = autopar.precision("p=bf16,r=f32")
    value, (of_a, of_b) = policy.value_and_grad(lambda a, b, *, c: a * b * c, argnums=(0, 1))(
        jnp.bfloat16(3), jnp.bfloat16(2), c=jnp.float32(5)
    )
    assert (float(value), float(of_a), float(of_b)) == (30, 10, 15)
    assert of_a.dtype == of_b.dtype == jnp.float32


def test_the_loss_scale_keeps_small_gradients():
    policy = autopar.precision("fp16")

    def loss_of(w):
        return jnp.sum(w * jnp.float16(1e-3)) * jnp.float16(1e-5)

    w = jnp.ones(4)
    _, lost = policy.value_and_grad(loss_of)(w)
    loss, kept = policy.value_and_grad(loss_of)(w, loss_scale=policy.init_loss_scale())
    assert not np.asarray(lost).any()
    np.testing.assert_allclose(kept, 1e-8, rtol=0.02)
    assert loss == policy.value_and_grad(loss_of)(w)[0]  # the loss itself is returned unscaled


def test_the_loss_scale_is_halved_after_an_overflow_and_doubled_after_a_period():
    scale = LossScale.create(2.0**10, period=3, least=2.0**9)
    adjust = jax.jit(LossScale.adjust)
    values = []
    for finite in (True, True, False, False, True, True, True, True):
        scale = adjust(scale, jnp.bool_(finite))
        values.append((float(scale.value), int(scale.num_finite)))
    assert values == [
        (1024, 1), (1024, 2), (512, 0), (512, 0), (512, 1), (512, 2), (1024, 0), (1024, 1),
    ]  # fmt: skip
    largest = LossScale.create(2.0**127, period=1).adjust(jnp.bool_(True))
    assert float(largest.value) == 2.0**127
    for first in (0.5, float("inf"), float("nan")):
        with pytest.raises(InvalidArgumentError, match="first >= least"):
            LossScale.create(first)


def test_the_loss_scales_that_the_page_makes_are_made():
    page = (ROOT / "docs" / "precision.md").read_text()
    calls = re.findall(r"policy\.init_loss_scale\(.*?\)", page)
    made = [eval(call, {"policy": autopar.precision("fp16")}) for call in calls]
    assert {(float(scale.value), scale.period) for scale in made} == {(2.0**15, 2000), (2.0**13, 500)}
    with pytest.raises(InvalidArgumentError, match=r"a loss scale of the state, or None, got 1024\.0"):
        autopar.precision("fp16").value_and_grad(lambda w: (w * w).sum())(jnp.ones(3), loss_scale=1024.0)


def test_apply_if_finite_selects_the_whole_state():
    policy = autopar.precision("fp16")
    old = {"w": jnp.zeros(2), "key": jax.random.key(0), "count": jnp.int32(0), "scale": policy.init_loss_scale()}
    new = {**old, "w": jnp.ones(2), "key": jax.random.key(1), "count": jnp.int32(1)}
    taken, finite = policy.apply_if_finite({"w": jnp.ones(2)}, new, old)
    assert finite
    assert (float(taken["w"][0]), int(taken["count"]), int(taken["scale"].num_finite)) == (1, 1, 1)
    for bad in (jnp.array([1, jnp.inf]), jnp.array([jnp.nan, 0])):
        kept, finite = policy.apply_if_finite({"w": bad, "n": jnp.arange(2)}, new, old)
        assert not finite
        assert (float(kept["w"][0]), int(kept["count"]), float(kept["scale"].value)) == (0, 0, 2.0**14)
        assert jax.random.key_data(kept["key"]).tolist() == jax.random.key_data(old["key"]).tolist()
    assert all_finite({})
    with pytest.raises(InvalidArgumentError, match="two states of one structure"):
        policy.apply_if_finite({}, {"w": 1}, old)


def test_float8_through_flax_and_without_a_module():
    policy = autopar.precision("fp8")
    model = nn.Dense(16, dtype=policy.compute_dtype, dot_general_cls=policy.dot_general_cls)
    batch = mlp_batch()
    state = TrainState.create(apply_fn=model.apply, params=model.init(jax.random.key(0), batch["x"]), tx=OPTIMIZER)

    def loss_of(variables, batch):
        return jnp.mean((policy.cast_to_output(model.apply(variables, batch["x"])) - batch["y"]) ** 2)

    _, gradients = jax.jit(policy.value_and_grad(loss_of))(state.params, batch)
    state = state.apply_gradients(grads=gradients)
    (scaling,) = state.params["_overwrite_with_gradient"].values()
    np.testing.assert_allclose(scaling["input_amax_history"][0], abs(batch["x"]).max(), rtol=2**-8)
    x, w = batch["x"], np.asarray(new_mlp_state()["first"])
    product = policy.dot_general(x, w, (((1,), (0,)), ((), ())))
    np.testing.assert_allclose(product, x @ w, atol=0.05 * np.abs(x @ w).max())
    assert not np.allclose(product, x @ w, atol=1e-3)
    grads = jax.grad(lambda x, w: jnp.sum(policy.dot_general(x, w, (((1,), (0,)), ((), ()))) ** 2), (0, 1))(x, w)
    for got, wanted in zip(grads, (2 * (x @ w) @ w.T, x.T @ (2 * (x @ w))), strict=True):
        np.testing.assert_allclose(got, wanted, atol=0.1 * np.abs(wanted).max())


def test_what_float8_and_nnx_cannot():
    policy = autopar.precision("fp8")
    with pytest.raises(InvalidArgumentError, match="none in the function"):
        policy.value_and_grad(mlp_loss)(new_mlp_state(), mlp_batch())
    assert autopar.precision("bf16").dot_general_cls is None
    assert autopar.precision("bf16").dot_general is jax.lax.dot_general
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0), dtype=policy.compute_dtype, dot_general=policy.dot_general)
    assert model(jnp.ones((1, 2))).dtype == jnp.bfloat16
    with pytest.raises(UnsupportedError, match="modules have types of their own"):
        policy.value_and_grad(lambda model: model(jnp.ones((1, 2))).sum())(model)


def test_a_large_scale_leaves_small_gradients_of_16_bits():
    scale = LossScale.create(2.0**26)
    gradients = scale.unscale({"w": jnp.float16(6.7)})  # the inverse of the scale is 0 in float16
    np.testing.assert_allclose(gradients["w"], jnp.float16(6.7 * 2.0**-26), rtol=0.5)
    assert float(gradients["w"]) > 0


def test_arguments_are_counted_from_the_end_too():
    policy = autopar.precision("params=bfloat16,compute=bfloat16,reductions=float32")
    first, last = (policy.value_and_grad(lambda x, w: (x * w).sum(), argnums=n) for n in (1, -1))
    x, w = jnp.ones(4, jnp.bfloat16), jnp.ones(4, jnp.bfloat16)
    assert first(x, w)[1].dtype == last(x, w)[1].dtype == jnp.float32


def test_float16_without_a_loss_scale_warns_once(caplog):
    precision_policy._warn_of_no_scale.cache_clear()
    differentiated = autopar.precision("fp16").value_and_grad(lambda w: jnp.sum(w**2))
    for _ in range(2):
        differentiated(jnp.ones(3))
    (record,) = caplog.records
    assert "without a loss scale" in record.getMessage()
