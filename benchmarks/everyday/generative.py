"""Generative models: diffusion, flows, adversaries, autoencoders."""

import jax
import jax.numpy as jnp
import optax

from benchmarks.everyday.parts import apply_mlp, attend, attention_params, dense, float_batch, mlp, normal
from benchmarks.zoo.case import Case, PyTree
from benchmarks.zoo.training import descend

IMAGE = 8


def _conv(p: PyTree, x: jax.Array, stride: int = 1) -> jax.Array:
    y = jax.lax.conv_general_dilated(x, p["w"], (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    return y + p["b"]


def _conv_params(key: jax.Array, inputs: int, outputs: int, size: int = 3) -> PyTree:
    w = jax.random.normal(key, (size, size, inputs, outputs)) / (size * size * inputs) ** 0.5
    return {"w": w, "b": jnp.zeros(outputs)}


def _time_features(t: jax.Array, width: int) -> jax.Array:
    frequency = jnp.exp(-jnp.log(1e4) * jnp.arange(width // 2) / (width // 2))
    angle = t.astype(jnp.float32)[:, None] * frequency
    return jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], axis=-1)


def flow_matching(batch: int = 8) -> Case:
    """Velocities between noise and data by a transformer, whose scanned layers are modulated by time and class."""
    tokens, width, layers, classes = 16, 32, 3, 10
    tx = optax.adamw(1e-3)

    def layer_params(key: jax.Array) -> PyTree:
        k = jax.random.split(key, 4)
        return {
            "modulation": normal(k[0], width, 6 * width, scale=0.02),
            "attention": attention_params(k[1], width, 4),
            "up": normal(k[2], width, 2 * width),
            "down": normal(k[3], 2 * width, width),
        }

    def init(key: jax.Array) -> PyTree:
        k = jax.random.split(key, 7)
        params = {
            "in": dense(k[0], 8, width),
            "time": mlp(k[1], (width, width, width)),
            "classes": normal(k[2], classes + 1, width),
            "layers": jax.vmap(layer_params)(jax.random.split(k[3], layers)),
            "out": dense(k[4], width, 8),
        }
        return {"params": params, "opt": tx.init(params), "ema": params, "key": k[5]}

    def norm(x: jax.Array) -> jax.Array:
        return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-6)

    def velocity(params: PyTree, x: jax.Array, t: jax.Array, label: jax.Array) -> jax.Array:
        c = apply_mlp(params["time"], _time_features(1000 * t, width), jax.nn.silu) + params["classes"][label]

        def layer(h: jax.Array, p: PyTree) -> tuple[jax.Array, None]:
            s1, b1, g1, s2, b2, g2 = jnp.split((jax.nn.silu(c) @ p["modulation"])[:, None], 6, axis=-1)
            h = h + g1 * attend(p["attention"], norm(h) * (1 + s1) + b1)
            return h + g2 * (jax.nn.gelu((norm(h) * (1 + s2) + b2) @ p["up"]) @ p["down"]), None

        h, _ = jax.lax.scan(layer, x @ params["in"]["w"] + params["in"]["b"], params["layers"])
        return norm(h) @ params["out"]["w"] + params["out"]["b"]

    def loss_fn(params: PyTree, x1: jax.Array, labels: jax.Array, key: jax.Array) -> jax.Array:
        time_key, noise_key, drop_key = jax.random.split(key, 3)
        t = jax.nn.sigmoid(jax.random.normal(time_key, x1.shape[:1]))
        x0 = jax.random.normal(noise_key, x1.shape)
        xt = (1 - t[:, None, None]) * x0 + t[:, None, None] * x1
        labels = jnp.where(jax.random.bernoulli(drop_key, 0.1, labels.shape), classes, labels)
        return jnp.mean((velocity(params, xt, t, labels) - (x1 - x0)) ** 2)

    def step(state: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
        key, step_key = jax.random.split(state["key"])
        labels = jnp.argmax(batch["scores"], axis=-1)
        loss, params, opt = descend(tx, loss_fn, state["params"], state["opt"], batch["x"], labels, step_key)
        ema = optax.incremental_update(params, state["ema"], 0.01)
        return {"params": params, "opt": opt, "ema": ema, "key": key}, {"loss": loss}

    return Case(
        name="flow_matching", step=step, init=init, batch=float_batch(x=(batch, tokens, 8), scores=(batch, classes))
    )


def gan(batch: int = 8) -> Case:
    """Both networks in one step, each by its own optimizer; the generator is judged by the new discriminator."""
    latent = 16
    g_tx, d_tx = optax.adam(2e-4, b1=0.5), optax.adam(2e-4, b1=0.5)

    def init(key: jax.Array) -> PyTree:
        a, b, c, d, e = jax.random.split(key, 5)
        g = {"in": dense(a, latent, 4 * 4 * 16), "out": _conv_params(b, 16, 3)}
        d_params = {"conv": _conv_params(c, 3, 16), "out": dense(d, 4 * 4 * 16, 1)}
        return {"g": g, "d": d_params, "g_opt": g_tx.init(g), "d_opt": d_tx.init(d_params), "key": e}

    def generate(g: PyTree, z: jax.Array) -> jax.Array:
        x = jax.nn.relu(z @ g["in"]["w"] + g["in"]["b"]).reshape(-1, 4, 4, 16)
        x = jnp.repeat(jnp.repeat(x, 2, axis=1), 2, axis=2)
        return jnp.tanh(_conv(g["out"], x))

    def judge(d: PyTree, x: jax.Array) -> jax.Array:
        h = jax.nn.leaky_relu(_conv(d["conv"], x, 2), 0.2)
        return (h.reshape(h.shape[0], -1) @ d["out"]["w"] + d["out"]["b"])[:, 0]

    def step(state: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
        key, z_key = jax.random.split(state["key"])
        real = batch["images"]
        z = jax.random.normal(z_key, (real.shape[0], latent))

        def d_loss_fn(d: PyTree) -> jax.Array:
            fake = jax.lax.stop_gradient(generate(state["g"], z))
            bce = optax.sigmoid_binary_cross_entropy
            on_real, on_fake = judge(d, real), judge(d, fake)
            return (bce(on_real, jnp.ones_like(on_real)) + bce(on_fake, jnp.zeros_like(on_fake))).mean()

        d_loss, d, d_opt = descend(d_tx, d_loss_fn, state["d"], state["d_opt"])

        def g_loss_fn(g: PyTree) -> jax.Array:
            logits = judge(d, generate(g, z))
            return optax.sigmoid_binary_cross_entropy(logits, jnp.ones_like(logits)).mean()

        g_loss, g_grads = jax.value_and_grad(g_loss_fn)(state["g"])
        g_updates, g_opt = g_tx.update(g_grads, state["g_opt"])
        g = optax.apply_updates(state["g"], g_updates)
        return {"g": g, "d": d, "g_opt": g_opt, "d_opt": d_opt, "key": key}, {"loss": g_loss, "d_loss": d_loss}

    return Case(name="gan", step=step, init=init, batch=float_batch(images=(batch, IMAGE, IMAGE, 3)))


def wgan_gp(batch: int = 8) -> Case:
    """Two critic updates by a scan, then one of the generator; a penalty for the slope between real and fake."""
    latent, critic_steps = 8, 2
    tx = optax.adam(1e-4, b1=0.0, b2=0.9)

    def init(key: jax.Array) -> PyTree:
        a, b, c = jax.random.split(key, 3)
        params = {"generator": mlp(a, (latent, 32, 16)), "critic": mlp(b, (16, 32, 1))}
        return {"params": params, "opt": {name: tx.init(p) for name, p in params.items()}, "key": c}

    def critic_loss(critic: PyTree, generator: PyTree, real: jax.Array, key: jax.Array) -> jax.Array:
        z_key, mix_key = jax.random.split(key)
        fake = apply_mlp(generator, jax.random.normal(z_key, (real.shape[0], latent)))
        share = jax.random.uniform(mix_key, (real.shape[0], 1))
        between = share * real + (1 - share) * fake
        slopes = jax.vmap(jax.grad(lambda x: apply_mlp(critic, x, jax.nn.silu)[0]))(between)
        penalty = jnp.mean((jnp.sqrt(jnp.sum(slopes**2, axis=-1) + 1e-12) - 1) ** 2)
        score = lambda x: apply_mlp(critic, x, jax.nn.silu).mean()  # noqa: E731
        return score(fake) - score(real) + 10.0 * penalty

    def step(state: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
        key, generator_key, *critic_keys = jax.random.split(state["key"], critic_steps + 2)
        generator = state["params"]["generator"]

        def train_critic(carry: tuple[PyTree, PyTree], key: jax.Array) -> tuple[tuple[PyTree, PyTree], jax.Array]:
            critic, opt = carry
            loss, critic, opt = descend(tx, critic_loss, critic, opt, generator, batch["x"], key)
            return (critic, opt), loss

        begin = state["params"]["critic"], state["opt"]["critic"]
        (critic, critic_opt), losses = jax.lax.scan(train_critic, begin, jnp.stack(critic_keys))

        def generator_loss(generator: PyTree) -> jax.Array:
            z = jax.random.normal(generator_key, (batch["x"].shape[0], latent))
            return -apply_mlp(critic, apply_mlp(generator, z), jax.nn.silu).mean()

        loss, generator, generator_opt = descend(tx, generator_loss, generator, state["opt"]["generator"])
        params = {"generator": generator, "critic": critic}
        opt = {"generator": generator_opt, "critic": critic_opt}
        return {"params": params, "opt": opt, "key": key}, {"loss": loss, "critic_loss": losses.mean()}

    return Case(name="wgan_gp", step=step, init=init, batch=float_batch(x=(batch, 16)))


def vae(batch: int = 8) -> Case:
    """A Gaussian code by its mean and log-variance, sampled in the step; the weight of the divergence grows."""
    inputs, hidden, latent = 64, 64, 8
    tx = optax.adam(1e-3)

    def init(key: jax.Array) -> PyTree:
        a, b, c = jax.random.split(key, 3)
        params = {"encoder": mlp(a, (inputs, hidden, 2 * latent)), "decoder": mlp(b, (latent, hidden, inputs))}
        return {"params": params, "opt_state": tx.init(params), "key": c, "step": jnp.zeros((), jnp.int32)}

    def step(state: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
        key, noise_key = jax.random.split(state["key"])
        beta = jnp.minimum(1.0, (state["step"] + 1) / 100)
        x = jax.nn.sigmoid(batch["x"])

        def loss_fn(params: PyTree) -> tuple[jax.Array, PyTree]:
            mean, log_var = jnp.split(apply_mlp(params["encoder"], x), 2, axis=-1)
            z = mean + jnp.exp(0.5 * log_var) * jax.random.normal(noise_key, mean.shape)
            logits = apply_mlp(params["decoder"], z)
            reconstruction = optax.sigmoid_binary_cross_entropy(logits, x).sum(-1).mean()
            kl = -0.5 * jnp.sum(1 + log_var - mean**2 - jnp.exp(log_var), axis=-1).mean()
            return reconstruction + beta * kl, {"reconstruction": reconstruction, "kl": kl}

        (loss, aux), params, opt_state = descend(tx, loss_fn, state["params"], state["opt_state"], has_aux=True)
        new = {"params": params, "opt_state": opt_state, "key": key, "step": state["step"] + 1}
        return new, {"loss": loss, **aux}

    return Case(name="vae", step=step, init=init, batch=float_batch(x=(batch, inputs)))


def vq_vae(batch: int = 8) -> Case:
    """The nearest of a codebook straight through; the codebook is an average over time of what fell to each code."""
    codes, width = 16, 8
    tx = optax.adam(1e-3)

    def init(key: jax.Array) -> PyTree:
        k = jax.random.split(key, 5)
        params = {
            "down": _conv_params(k[0], 3, 16),
            "to_code": _conv_params(k[1], 16, width, 1),
            "from_code": _conv_params(k[2], width, 16, 1),
            "out": _conv_params(k[3], 16, 3),
        }
        embeddings = jax.random.normal(k[4], (codes, width))
        codebook = {"count": jnp.ones(codes), "sum": embeddings, "embeddings": embeddings}
        return {"params": params, "opt_state": tx.init(params), "codebook": codebook}

    def loss_fn(params: PyTree, images: jax.Array, codebook: PyTree) -> tuple[jax.Array, PyTree]:
        z = _conv(params["to_code"], jax.nn.relu(_conv(params["down"], images, 2)))
        flat = z.reshape(-1, width)
        table = codebook["embeddings"]
        distance = (flat**2).sum(1, keepdims=True) - 2 * flat @ table.T + (table**2).sum(1)
        nearest = jnp.argmin(distance, axis=1)
        chosen = jax.nn.one_hot(nearest, codes)
        quantized = (chosen @ table).reshape(z.shape)
        commitment = jnp.mean(jnp.square(z - jax.lax.stop_gradient(quantized)))
        straight = z + jax.lax.stop_gradient(quantized - z)
        h = jax.nn.relu(_conv(params["from_code"], straight))
        h = jax.image.resize(h, (*images.shape[:3], h.shape[-1]), "nearest")
        reconstruction = jnp.mean(jnp.square(_conv(params["out"], h) - images))
        usage = chosen.mean(0)
        perplexity = jnp.exp(-jnp.sum(usage * jnp.log(usage + 1e-10)))
        found = {"count": chosen.sum(0), "sum": chosen.T @ flat, "perplexity": perplexity}
        return reconstruction + 0.25 * commitment, jax.lax.stop_gradient(found)

    def step(state: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
        old = state["codebook"]
        (loss, found), params, opt_state = descend(
            tx, loss_fn, state["params"], state["opt_state"], batch["images"], old, has_aux=True
        )
        count = 0.99 * old["count"] + 0.01 * found["count"]
        sums = 0.99 * old["sum"] + 0.01 * found["sum"]
        total = count.sum()
        smoothed = (count + 1e-5) / (total + codes * 1e-5) * total
        new = {
            "params": params,
            "opt_state": opt_state,
            "codebook": {"count": count, "sum": sums, "embeddings": sums / smoothed[:, None]},
        }
        return new, {"loss": loss, "perplexity": found["perplexity"]}

    return Case(name="vq_vae", step=step, init=init, batch=float_batch(images=(batch, IMAGE, IMAGE, 3)))


STEPS = (flow_matching, gan, wgan_gp, vae, vq_vae)
