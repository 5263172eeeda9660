"""Ways in which steps are called: as methods, with keywords, staged as jax.jit stages, eagerly, and looked at."""

import functools
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import autopar
from autopar import recipes
from autopar.errors import InvalidArgumentError, NonFiniteError, UnsupportedError
from tests.small_steps import assert_close, grouped, mlp_batch, mlp_loss, mlp_step, new_mlp_state, slow_cluster

OPTIONS = {"cluster": slow_cluster(4), "cache_dir": None}


def made(function=mlp_step, **options):
    return autopar.parallelize(function, **grouped(**OPTIONS | options))


def updated(state, batch, rate):
    loss, grads = jax.value_and_grad(mlp_loss)(state, batch)
    return jax.tree.map(lambda p, g: p - rate * g, state, grads), {"loss": loss}


class Trainer:
    def __init__(self, rate):
        self.rate = rate

    @autopar.parallelize(**OPTIONS)
    def step(self, state, batch):
        """Its text."""
        return updated(state, batch, self.rate)

    @autopar.parallelize(static_argnames="training", **OPTIONS)
    def named(self, state, batch, *, training):
        return updated(state, batch, self.rate if training else 0.0)


def test_a_method_has_a_step_for_each_instance():
    slow, fast = Trainer(0.1), Trainer(0.5)
    for _ in range(2):
        for trainer in (slow, fast):
            expected = updated(new_mlp_state(), mlp_batch(), trainer.rate)
            assert_close(trainer.step(new_mlp_state(), mlp_batch()), expected)
    assert slow.step._plans is slow.step._plans
    assert len(slow.step._plans) == 1
    assert isinstance(slow.step, autopar.Step)
    arguments = slow.step.plan(new_mlp_state(), mlp_batch()).record.arguments
    assert [v.kind for v in arguments] == ["state"] * 3 + ["batch"] * 2
    assert slow.step.__name__ == "step"
    assert slow.step.__doc__ == "Its text."
    assert autopar.verify(slow.step, new_mlp_state(), mlp_batch()).difference < 1e-5
    kept = autopar.parallelize(Trainer(0.2).step, plan=recipes.zero(1), **OPTIONS)
    assert_close(kept(new_mlp_state(), mlp_batch()), updated(new_mlp_state(), mlp_batch(), 0.2))


def test_argument_names_of_a_method():
    trainer = Trainer(0.1)
    assert_close(trainer.named(new_mlp_state(), mlp_batch(), training=True), updated(new_mlp_state(), mlp_batch(), 0.1))


def test_the_step_of_an_instance_goes_with_it():
    trainer = Trainer(0.1)
    trainer.step.compile(new_mlp_state(), mlp_batch())
    step = trainer.step
    gone = weakref.ref(trainer)
    del trainer
    assert_close(step(new_mlp_state(), mlp_batch()), updated(new_mlp_state(), mlp_batch(), 0.1))
    del step
    gc.collect()
    assert gone() is None
    assert not Trainer.__dict__["step"]._of_instances._values


def test_the_method_of_an_nnx_object_changes_it():
    class Model(nnx.Module):
        def __init__(self):
            self.linear = nnx.Linear(32, 16, rngs=nnx.Rngs(0))

        def gradient_step(self, batch):
            def loss_fn(model):
                return jnp.mean((model.linear(batch["x"]) - batch["y"]) ** 2)

            loss, grads = nnx.value_and_grad(loss_fn)(self)
            nnx.update(self, jax.tree.map(lambda p, g: p - 0.1 * g, nnx.state(self, nnx.Param), grads))
            return loss

        step = autopar.parallelize(gradient_step, **OPTIONS)

    ours, expected = Model(), Model()
    for _ in range(2):
        assert_close(ours.step(mlp_batch()), nnx.jit(Model.gradient_step)(expected, mlp_batch()))
    assert_close(ours.linear.kernel[...], expected.linear.kernel[...])


def keywords(state, batch, scale=1.0, *, rate=0.1, reverse=False, **more):
    sign = -1.0 if reverse else 1.0
    new, metrics = updated(state, batch, sign * rate * scale)
    return new, metrics | more


@pytest.mark.cases(3)
@pytest.mark.parametrize(
    "given",
    [
        {},
        {"rate": 0.2},
        {"scale": 2.0, "rate": jnp.float32(0.3)},
        {"reverse": True},
        {"scale": 0.5, "reverse": True},
        {"note": jnp.ones(3)},
    ],
    ids=lambda given: ", ".join(given) or "none",
)
def test_keyword_arguments(given):
    parallel = made(keywords, static_argnames=("reverse",))
    for _ in range(2):
        assert_close(parallel(new_mlp_state(), mlp_batch(), **given), keywords(new_mlp_state(), mlp_batch(), **given))
    assert len(parallel._plans) == 1
    assert parallel.plan(new_mlp_state(), mlp_batch(), **given) is parallel.plan(new_mlp_state(), mlp_batch(), **given)
    assert_close(parallel.plain(new_mlp_state(), mlp_batch(), **given), parallel(new_mlp_state(), mlp_batch(), **given))


def test_arguments_by_name():
    def step(batch, *, params, training):
        new, metrics = updated(params, batch, 0.1 if training else 0.0)
        return new, metrics

    parallel = made(step, batch_argnames="batch", donate_argnames="params", static_argnames=("training",))
    state = jax.device_put(new_mlp_state())
    plan = parallel.plan(mlp_batch(), params=state, training=True)
    assert {v.path: v.kind for v in plan.record.arguments if v.path in ("batch['x']", "params['first']")} == {
        "batch['x']": "batch",
        "params['first']": "state",
    }
    for training in (True, False, True):
        state, metrics = parallel(mlp_batch(), params=new_mlp_state(), training=training)
        assert_close((state, metrics), step(mlp_batch(), params=new_mlp_state(), training=training))
    with pytest.raises(InvalidArgumentError, match="batch, params, training, got 'parameters'"):
        made(step, donate_argnames="parameters")


def test_partial_binds_arguments():
    parallel = made(functools.partial(keywords, rate=0.3))
    expected = keywords(new_mlp_state(), mlp_batch(), rate=0.3)
    assert_close(parallel(new_mlp_state(), mlp_batch()), expected)


def test_a_step_says_what_it_is():
    parallel = made()
    assert repr(parallel) == "<Step mlp_step(state, batch), not planned yet>"
    parallel.plan(new_mlp_state(), mlp_batch())
    assert repr(parallel).startswith("<Step mlp_step(state, batch), <Plan of mlp_step on flat-4, mesh")


@pytest.mark.cases(1)
@pytest.mark.parametrize("options", [{}, {"plan": recipes.pipeline(2, num_microbatches=2)}], ids=["searched", "stages"])
def test_without_jit_the_function_itself_runs(options):
    seen = []

    def step(state, batch):
        seen.append(isinstance(batch["x"], jax.core.Tracer))
        return mlp_step(state, batch)

    parallel = made(step, **options)
    state, _ = parallel(new_mlp_state(), mlp_batch())
    expected, _ = mlp_step(new_mlp_state(), mlp_batch())
    seen.clear()
    with jax.disable_jit():
        assert_close(parallel(state, mlp_batch()), mlp_step(expected, mlp_batch()))
    assert seen == [False]


def logarithms(state, batch):
    """Its head takes a logarithm of what is negative where the batch is."""

    def loss_fn(state):
        with jax.named_scope("body"):
            hidden = jnp.tanh(batch["x"] @ state["first"] + state["bias"])
        with jax.named_scope("head"):
            hidden = jax.jit(lambda h: h + jnp.log(batch["y"].sum() + 1e3))(hidden)
        return jnp.mean((hidden @ state["second"]) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(state)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), loss


def scanned(state, batch):
    def layer(x, w):
        with jax.named_scope("layer"):
            return jnp.sqrt(x - 1.0) * w, None

    x, _ = jax.lax.scan(layer, jnp.abs(batch["x"]) + 1.0, state["bias"])
    return {**state, "bias": state["bias"] + x.mean()}, x.mean()


@pytest.mark.cases(1)
@pytest.mark.parametrize("options", [{}, {"plan": recipes.pipeline(2, num_microbatches=2)}], ids=["searched", "stages"])
def test_the_first_nan_is_named_by_module_and_line(options):
    parallel, bad = made(logarithms, **options), mlp_batch()
    bad["y"] = bad["y"] - 1e5
    with jax.debug_nans(True):
        state, _ = parallel(new_mlp_state(), mlp_batch())
        with pytest.raises(NonFiniteError, match=r"head at .*test_call_forms\.py:\d+.*nan made by log of f") as caught:
            parallel(state, bad)
        assert isinstance(caught.value, FloatingPointError)
        again, _ = parallel(state, mlp_batch())  # it was not taken over
        assert_close(again, jax.jit(logarithms)(jax.device_get(state), mlp_batch())[0])
        with pytest.raises(NonFiniteError, match=r"batch\['x'\]: expected finite numbers .* got nan in it"):
            parallel(state, mlp_batch() | {"x": np.full((16, 32), np.nan, np.float32)})


def test_the_first_nan_in_a_scan():
    with jax.debug_nans(True), pytest.raises(NonFiniteError, match=r"layer at .*nan made by sqrt of float32\[16,32\]"):
        made(scanned)(new_mlp_state(), mlp_batch())
    with jax.debug_infs(True), pytest.raises(NonFiniteError, match=r"inf made by div"):
        made(lambda s, b: (s, 1.0 / (b["x"] * 0.0)))(new_mlp_state(), mlp_batch())


class Tensor:
    """As those of other libraries."""

    def __init__(self, array):
        self.array = array

    def __array__(self, dtype=None, copy=None):
        return self.array


def test_tensors_of_other_libraries_are_to_be_converted():
    with pytest.raises(InvalidArgumentError, match=r"batch\['x'\].*got Tensor[^$]*hint: convert it: np\.asarray"):
        made()(new_mlp_state(), mlp_batch() | {"x": Tensor(mlp_batch()["x"])})
    with pytest.raises(TypeError):
        jax.jit(mlp_step)(new_mlp_state(), mlp_batch() | {"x": Tensor(mlp_batch()["x"])})
    with pytest.raises(InvalidArgumentError, match="close over it"):
        made()(new_mlp_state(), {"text"})


def test_a_step_is_staged_as_jit_stages():
    parallel = made()
    lowered = parallel.lower(new_mlp_state(), mlp_batch())
    assert "sdy.sharding" in lowered.as_text() or "mhlo.sharding" in lowered.as_text()
    assert lowered.plan is parallel.plan(new_mlp_state(), batch=mlp_batch())
    compiled = lowered.compile()
    assert compiled is parallel.compile(new_mlp_state(), mlp_batch())
    assert "ENTRY" in compiled.as_text()
    placed = jax.device_put((new_mlp_state(), mlp_batch()), compiled.shardings)
    assert_close(compiled(*placed), jax.jit(mlp_step)(new_mlp_state(), mlp_batch()))
    staged = made(plan=recipes.pipeline(2, num_microbatches=2)).lower(new_mlp_state(), mlp_batch())
    with pytest.raises(UnsupportedError, match="one of 2 stages"):
        staged.as_text()
    assert "ENTRY" in staged.compile().as_text()


@pytest.mark.parametrize("wrapped", [lambda k: k, lambda k: (0, k)])
def test_static_arguments_that_are_equal_and_of_other_types_are_steps_of_their_own(wrapped):
    def step(w, x, k):
        exponent = k if not isinstance(k, tuple) else k[1]
        counted = jnp.arange(4) / 2 if isinstance(exponent, float) else jnp.arange(4) // 2
        return w * (10 if exponent is True else 1), (counted, x.sum())

    parallel = autopar.parallelize(step, static_argnums=2, donate_argnums=(), batch_argnums=1, cache_dir=None)
    w, x = jnp.ones(4), jnp.ones((8, 2))
    for k in (1, True, 1.0, 1):
        found, expected = parallel(w, x, wrapped(k)), step(w, x, k)
        for seen, wanted in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            assert seen.dtype == wanted.dtype
            np.testing.assert_allclose(seen, wanted)


def noisy_loss(state, noise, batch):
    return mlp_loss(state, batch) + jnp.mean(noise)


def stepped(state, key, rate, x, y):
    noise = jax.random.normal(key, (3,)) if key is not None else 0.0
    loss, grads = jax.value_and_grad(noisy_loss)(state, noise, {"x": x, "y": y})
    return jax.tree.map(lambda p, g: p - rate * g, state, grads), loss


def distilled(state, batch, teacher):
    targets = batch["x"] @ teacher["first"] @ teacher["second"]
    loss, grads = jax.value_and_grad(lambda s: jnp.mean((batch["x"] @ s["first"] @ s["second"] - targets) ** 2))(state)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), loss


KEYS = {
    "none": None,
    "typed": jax.random.key(0),
    "raw": jax.random.PRNGKey(0),
    "several raw": jax.random.split(jax.random.PRNGKey(0), 8),  # as many as there are examples
    "several by name": {"dropout": jax.random.PRNGKey(0), "noise": jax.random.key(1), "count": np.int32(3)},
}


@pytest.mark.parametrize("name", KEYS)
def test_arguments_of_keys_and_numbers_alone_are_no_batch(name):
    def step(state, keys, rate, batch):
        return updated(state, batch, rate)

    plan = made(step).plan(new_mlp_state(), KEYS[name], 0.1, mlp_batch())
    assert {a.path for a in plan.record.arguments if a.kind == "batch"} == {"batch['x']", "batch['y']"}


def test_a_key_is_the_batch_of_a_step_without_other_arrays():
    def step(state, key):
        return jax.tree.map(lambda p: p + jax.random.normal(key, p.shape), state)

    plan = made(step).plan(new_mlp_state(), jax.random.PRNGKey(0))
    assert [a.path for a in plan.record.arguments if a.kind == "batch"] == ["key"]


@pytest.mark.parametrize("key", [jax.random.key(0), jax.random.PRNGKey(0), None], ids=["typed", "raw", "none"])
def test_the_batch_is_by_default_the_first_argument_with_arrays_and_what_has_as_many_rows(key):
    state, batch = new_mlp_state(), mlp_batch()
    step = made(stepped)
    arguments = state, key, 0.1, batch["x"], batch["y"]
    kinds = {argument.path: argument.kind for argument in step.plan(*arguments).record.arguments}
    assert {path for path, kind in kinds.items() if kind == "batch"} == {"x", "y"}
    expected = jax.jit(stepped)(*arguments)
    for a, b in zip(jax.tree.leaves(step(*arguments)), jax.tree.leaves(expected), strict=True):
        assert_close(a, b, 1e-5)


def test_parameters_beside_the_batch_are_no_examples():
    step, state = made(distilled), new_mlp_state()
    plan = step.plan(state, mlp_batch(), new_mlp_state())
    assert {argument.path.split("[")[0] for argument in plan.record.arguments if argument.kind == "batch"} == {"batch"}


OPTIMIZERS = {
    "Adam": optax.adam(1e-2, eps=1e-3),
    "SGD": optax.sgd(1e-2),
    "accumulated": optax.MultiSteps(optax.sgd(1e-2, momentum=0.9), 2),
    "Adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=4),  # whose arrays have other shapes
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_state_of_an_optimizer_beside_the_parameters_is_state(name):
    optimizer = OPTIMIZERS[name]

    def step(params, opt_state, x, y):
        loss, grads = jax.value_and_grad(mlp_loss)(params, {"x": x, "y": y})
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    x, y = mlp_batch(24).values()
    parallel, ours, expected = made(step), new_mlp_state(), new_mlp_state()
    of_ours, of_expected = optimizer.init(ours), optimizer.init(expected)
    has_arrays = any(np.ndim(leaf) for leaf in jax.tree.leaves(of_ours))
    trees = parallel.plan(ours, of_ours, x, y).trees
    assert (trees.donated, trees.batch) == ({0, 1} if has_arrays else {0}, {2, 3})
    for _ in range(2):
        ours, of_ours, loss = parallel(ours, of_ours, x, y)
        expected, of_expected, wanted = jax.jit(step)(expected, of_expected, x, y)
        assert_close((ours, of_ours, loss), (expected, of_expected, wanted), 1e-5)


def test_parameters_that_a_step_only_reads_are_neither_donated_nor_the_batch():
    def step(params, average, reference, batch):
        aim = mlp_loss(reference, batch)
        params, metrics = updated(params, batch, 0.1 * aim)
        return params, jax.tree.map(lambda a, p: 0.9 * a + 0.1 * p, average, params), metrics

    trees = made(step).plan(new_mlp_state(), new_mlp_state(), new_mlp_state(), mlp_batch()).trees
    assert (trees.donated, trees.batch) == ({0, 1}, {3})


def test_a_teacher_of_other_widths_in_front_of_the_batch_is_no_batch():
    def step(params, teacher, batch):
        return updated(params, batch | {"y": jnp.tanh(batch["x"] @ teacher["in"]) @ teacher["out"]}, 0.1)

    batch = mlp_batch()
    teacher = {"in": jnp.ones((batch["x"].shape[1], 5)), "out": jnp.ones((5, batch["y"].shape[1]))}
    trees = made(step).plan(new_mlp_state(), teacher, batch).trees
    assert (trees.donated, trees.batch) == ({0}, {2})


@pytest.mark.parametrize("way", ["free", "micro-batches", "recipe", "saved"])
def test_a_shorter_last_batch_in_two_arguments_keeps_the_plan(way, tmp_path):
    x, y = mlp_batch().values()
    options = {"micro-batches": {"num_microbatches": 2}, "recipe": {"plan": recipes.zero(3)}}.get(way, {})
    if way == "saved":
        made(stepped).plan(new_mlp_state(), None, 0.1, x, y).save(tmp_path / "plan.json")
        options = {"plan": autopar.Plan.load(tmp_path / "plan.json")}
    step, ours, expected = made(stepped, **options), new_mlp_state(), new_mlp_state()
    for rows in (slice(None), slice(6)):
        ours, loss = step(ours, None, 0.1, x[rows], y[rows])
        expected, wanted = jax.jit(stepped)(expected, None, 0.1, x[rows], y[rows])
        assert_close((ours, loss), (expected, wanted))
    assert len(step._plans) == 1
