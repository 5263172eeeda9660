"""Reinforcement learning and learning from preferences: of agents and of language models."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.everyday.parts import (
    VOCABULARY,
    WIDTH,
    apply_mlp,
    decoded,
    decoder_params,
    float_batch,
    integers,
    joined,
    mlp,
    normal,
)
from benchmarks.zoo.case import Case, PyTree
from benchmarks.zoo.training import descend

LENGTH = 12


def ppo(batch: int = 8) -> Case:
    """Time-major rollouts: advantages by a scan backwards, then epochs over shuffled parts, each an update."""
    times, observations, actions, epochs, parts = 16, 8, 4, 2, 4
    tx = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(3e-4, eps=1e-5))

    def init(key: jax.Array) -> PyTree:
        a, b, c = jax.random.split(key, 3)
        params = {"policy": mlp(a, (observations, 32, actions)), "value": mlp(b, (observations, 32, 1))}
        return {"params": params, "opt_state": tx.init(params), "key": c}

    def advantages(values: jax.Array, rollout: PyTree) -> jax.Array:
        def back(carry: tuple, at: tuple) -> tuple:
            gae, next_value = carry
            reward, done, value = at
            delta = reward + 0.99 * next_value * (1 - done) - value
            gae = delta + 0.99 * 0.95 * (1 - done) * gae
            return (gae, value), gae

        done = (rollout["done"] > 1.5).astype(jnp.float32)
        last = jnp.zeros_like(values[0])
        return jax.lax.scan(back, (last, last), (rollout["reward"], done, values), reverse=True)[1]

    def loss_fn(params: PyTree, part: PyTree) -> tuple[jax.Array, PyTree]:
        logs = jax.nn.log_softmax(apply_mlp(params["policy"], part["observation"], jnp.tanh))
        taken = jnp.take_along_axis(logs, part["action"][:, None], axis=1)[:, 0]
        ratio = jnp.exp(taken - part["log_prob"])
        gain = part["advantage"]
        gain = (gain - gain.mean()) / (gain.std() + 1e-8)
        policy = -jnp.minimum(ratio * gain, jnp.clip(ratio, 0.8, 1.2) * gain).mean()
        value = (
            0.5 * jnp.square(apply_mlp(params["value"], part["observation"], jnp.tanh)[:, 0] - part["target"]).mean()
        )
        entropy = -jnp.sum(jnp.exp(logs) * logs, axis=-1).mean()
        return policy + 0.5 * value - 0.01 * entropy, {"value": value, "entropy": entropy}

    def step(state: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
        params = state["params"]
        observation, action = batch["observation"], batch["action"]
        values = apply_mlp(params["value"], observation, jnp.tanh)[..., 0]
        logs = jax.nn.log_softmax(apply_mlp(params["policy"], observation, jnp.tanh))
        gain = advantages(values, batch)
        data = {
            "observation": observation,
            "action": action,
            "log_prob": jnp.take_along_axis(logs, action[..., None], axis=-1)[..., 0],
            "advantage": gain,
            "target": gain + values,
        }
        flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), data)
        size = flat["action"].shape[0]

        def epoch(carry: tuple, key: jax.Array) -> tuple:
            order = jax.random.permutation(key, size)
            shuffled = jax.tree.map(lambda x: x[order].reshape(parts, -1, *x.shape[1:]), flat)

            def update(carry: tuple, part: PyTree) -> tuple:
                params, opt_state = carry
                (loss, aux), params, opt_state = descend(tx, loss_fn, params, opt_state, part, has_aux=True)
                return (params, opt_state), {"loss": loss, **aux}

            return jax.lax.scan(update, carry, shuffled)

        key, *epoch_keys = jax.random.split(state["key"], epochs + 1)
        (params, opt_state), metrics = jax.lax.scan(epoch, (params, state["opt_state"]), jnp.stack(epoch_keys))
        return {"params": params, "opt_state": opt_state, "key": key}, jax.tree.map(jnp.mean, metrics)

    def make(seed: int) -> PyTree:
        shape = (times, batch)
        floats = float_batch(observation=(*shape, observations), reward=shape, done=shape)
        return floats(seed) | integers(actions, action=shape)(seed)

    return Case(name="ppo", step=step, init=init, batch=make)


def _lm_params(key: jax.Array) -> PyTree:
    a, b = jax.random.split(key)
    return decoder_params(a, 2, scanned=False) | {"positions": normal(b, 2 * LENGTH, WIDTH, scale=0.02)}


def _token_log_probs(params: PyTree, tokens: jax.Array) -> jax.Array:
    """Of each token but the first, given those before it."""
    h = decoded(params, tokens[..., :-1])
    logs = jax.nn.log_softmax((h @ params["embed"].T).astype(jnp.float32))
    return jnp.take_along_axis(logs, tokens[..., 1:, None], axis=-1)[..., 0]


def grpo(batch: int = 8) -> Case:
    """Groups of answers to each prompt: rewards less their group's mean, clipped ratios, a penalty for leaving."""
    group = 4
    tx = optax.adamw(1e-4)

    def init(key: jax.Array) -> PyTree:
        params = _lm_params(key)
        return {"params": params, "reference": jax.tree.map(jnp.copy, params), "opt_state": tx.init(params)}

    def step(state: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
        rewards = batch["rewards"]
        mean, std = rewards.mean(axis=1, keepdims=True), rewards.std(axis=1, keepdims=True)
        gain = ((rewards - mean) / (std + 1e-4)).reshape(-1, 1)
        tokens = batch["tokens"].reshape(-1, batch["tokens"].shape[-1])
        mask = (jnp.arange(tokens.shape[1] - 1) >= batch["prompt_lengths"].repeat(group)[:, None]).astype(jnp.float32)
        old = _token_log_probs(state["params"], tokens)
        reference = _token_log_probs(state["reference"], tokens)

        def loss_fn(params: PyTree) -> tuple[jax.Array, jax.Array]:
            logs = _token_log_probs(params, tokens)
            ratio = jnp.exp(logs - jax.lax.stop_gradient(old))
            policy = -jnp.minimum(ratio * gain, jnp.clip(ratio, 0.8, 1.2) * gain)
            kl = jnp.exp(reference - logs) - (reference - logs) - 1
            per_answer = jnp.sum((policy + 0.04 * kl) * mask, axis=1) / jnp.maximum(mask.sum(1), 1)
            return per_answer.mean(), jnp.sum(kl * mask) / mask.sum()

        (loss, kl), params, opt_state = descend(tx, loss_fn, state["params"], state["opt_state"], has_aux=True)
        return state | {"params": params, "opt_state": opt_state}, {"loss": loss, "kl": kl, "reward": rewards.mean()}

    make = joined(
        integers(VOCABULARY, tokens=(batch, group, LENGTH)),
        integers(LENGTH // 2, prompt_lengths=(batch,)),
        float_batch(rewards=(batch, group)),
    )
    return Case(name="grpo", step=step, init=init, batch=make)


def dpo(batch: int = 8) -> Case:
    """Chosen beside rejected answers in one forward pass, held against a frozen reference; padding is masked."""
    tx = optax.adamw(1e-4)
    beta = 0.1

    def init(key: jax.Array) -> PyTree:
        params = _lm_params(key)
        return {"params": params, "reference": jax.tree.map(jnp.copy, params), "opt_state": tx.init(params)}

    def log_probs(params: PyTree, batch: PyTree) -> tuple[jax.Array, jax.Array]:
        tokens = jnp.concatenate([batch["chosen"], batch["rejected"]], axis=0)
        mask = tokens[:, 1:] != 0
        total = jnp.sum(jnp.where(mask, _token_log_probs(params, tokens), 0.0), axis=-1)
        chosen, rejected = jnp.split(total, 2)
        return chosen, rejected

    def loss_fn(params: PyTree, reference: PyTree, batch: PyTree) -> tuple[jax.Array, PyTree]:
        chosen, rejected = log_probs(params, batch)
        ref_chosen, ref_rejected = log_probs(reference, batch)
        margin = beta * ((chosen - ref_chosen) - (rejected - ref_rejected))
        loss = -jax.nn.log_sigmoid(margin).mean()
        return loss, {"margin": margin.mean(), "accuracy": (margin > 0).mean()}

    def step(state: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
        (loss, aux), params, opt_state = descend(
            tx, loss_fn, state["params"], state["opt_state"], state["reference"], batch, has_aux=True
        )
        return {**state, "params": params, "opt_state": opt_state}, {"loss": loss, **aux}

    def make(seed: int) -> PyTree:
        random = np.random.default_rng(seed)
        made = {}
        for name in ("chosen", "rejected"):
            tokens = random.integers(1, VOCABULARY, (batch, LENGTH), dtype=np.int32)
            made[name] = np.where(np.arange(LENGTH) < random.integers(4, LENGTH + 1, (batch, 1)), tokens, 0)
        return made

    return Case(name="dpo", step=step, init=init, batch=make)


def dqn(batch: int = 8) -> Case:
    """New transitions go into a ring in the state, a sample of it is learnt from, and the target network follows."""
    observations, actions, capacity, sampled = 8, 4, 64, 32
    tx = optax.adam(1e-3)

    def init(key: jax.Array) -> PyTree:
        a, b, c = jax.random.split(key, 3)
        params = mlp(a, (observations, 32, 32, 32, actions))
        buffer = {
            "observation": jax.random.normal(b, (capacity, observations)),
            "action": jnp.zeros(capacity, jnp.int32),
            "reward": jnp.zeros(capacity),
            "done": jnp.zeros(capacity, bool),
            "next": jnp.zeros((capacity, observations)),
        }
        return {
            "params": params,
            "target": jax.tree.map(jnp.copy, params),
            "opt_state": tx.init(params),
            "buffer": buffer,
            "written": jnp.zeros((), jnp.int32),
            "key": c,
        }

    def step(state: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
        new = batch | {"done": batch["done"] > 1.5}
        number = new["action"].shape[0]
        places = (state["written"] + jnp.arange(number)) % capacity
        buffer = {name: old.at[places].set(new[name]) for name, old in state["buffer"].items()}
        key, sample_key = jax.random.split(state["key"])
        chosen = jax.random.randint(sample_key, (sampled,), 0, capacity)
        drawn = jax.tree.map(lambda x: x[chosen], buffer)

        def loss_fn(params: PyTree) -> jax.Array:
            q = apply_mlp(params, drawn["observation"])
            q = jnp.take_along_axis(q, drawn["action"][:, None], axis=1)[:, 0]
            best = apply_mlp(params, drawn["next"]).argmax(-1)
            later = jnp.take_along_axis(apply_mlp(state["target"], drawn["next"]), best[:, None], axis=1)[:, 0]
            wanted = drawn["reward"] + 0.99 * jnp.where(drawn["done"], 0.0, later)
            return optax.huber_loss(q, jax.lax.stop_gradient(wanted)).mean()

        loss, params, opt_state = descend(tx, loss_fn, state["params"], state["opt_state"])
        written = state["written"] + number
        target = optax.periodic_update(params, state["target"], written // number, 2)
        made = {"params": params, "target": target, "opt_state": opt_state}
        return made | {"buffer": buffer, "written": written, "key": key}, {"loss": loss}

    make = joined(
        float_batch(observation=(batch, observations), next=(batch, observations), reward=(batch,), done=(batch,)),
        integers(actions, action=(batch,)),
    )
    return Case(name="dqn", step=step, init=init, batch=make)


STEPS = (ppo, grpo, dpo, dqn)
