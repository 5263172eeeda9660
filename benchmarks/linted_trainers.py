"""Steps of published trainers in their own shardings, for `autopar lint`: of Tunix, Keras and Levanter, small decoders.

autopar lint benchmarks/linted_trainers.py:tunix --cluster dgx-h100       (extra: tunix)
autopar lint benchmarks/linted_trainers.py:keras --cluster dgx-h100       (extra: published)
autopar lint benchmarks/linted_trainers.py:levanter --cluster dgx-h100    (extra: levanter)
"""

import contextlib
import functools
import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

VOCABULARY, LAYERS, WIDTH, HEADS, KV_HEADS = 8192, 4, 1024, 16, 8
TOKENS = np.zeros((64, 1024), np.int32)


def tunix(constrained: bool = True) -> tuple[Any, ...]:
    """`PeftTrainer` on Llama 3, over "fsdp" and "tp". On CPU devices Tunix leaves its constraints out; `constrained`:
    they are there all the same.
    """
    from flax import nnx
    from tunix.models.llama3 import model as llama
    from tunix.sft import sharding_utils
    from tunix.sft.peft_trainer import PeftTrainer, TrainingConfig
    from tunix.sft.utils import build_positions_from_mask, make_causal_attn_mask

    mesh = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("fsdp", "tp"))
    config = llama.ModelConfig(
        num_layers=LAYERS,
        vocab_size=VOCABULARY,
        embed_dim=WIDTH,
        hidden_dim=4 * WIDTH,
        num_heads=HEADS,
        head_dim=WIDTH // HEADS,
        num_kv_heads=KV_HEADS,
        rope_theta=10_000,
        norm_eps=1e-5,
    )
    if constrained:
        llama.shard = lambda x, spec: jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))

    def inputs_of(batch: dict[str, Any]) -> dict[str, Any]:
        mask = batch["mask"] != 0
        return {
            "input_tokens": batch["tokens"],
            "input_mask": mask,
            "positions": build_positions_from_mask(mask),
            "attention_mask": make_causal_attn_mask(mask),
        }

    with mesh:
        model = llama.Llama3(config, rngs=nnx.Rngs(0))
        state = nnx.state(model)
        nnx.update(model, jax.lax.with_sharding_constraint(state, nnx.get_partition_spec(state)))
        trainer = PeftTrainer(model, optax.adamw(1e-3), TrainingConfig(eval_every_n_steps=1, max_steps=1))
        trainer._shard_optimizer(mesh)
        step = trainer.with_gen_model_input_fn(inputs_of).create_train_step_fn()
        batch = sharding_utils.shard_input({"tokens": TOKENS, "mask": np.ones_like(TOKENS)}, ("fsdp",))
    return step, trainer.model, trainer.optimizer, batch


def keras() -> tuple[Any, ...]:
    """`Model.fit` on Llama 3 of KerasHub, under `ModelParallel` with the layout map of its authors."""
    os.environ["KERAS_BACKEND"] = "jax"
    import keras
    import keras_hub
    from keras.src.backend.jax import trainer

    distribution, steps = keras.distribution, list[Any]()

    def jit(function: Any, **options: Any) -> Any:
        steps.append(jax.jit(function, **options))
        return steps[-1]

    with jax.ensure_compile_time_eval(), mock.patch.object(trainer, "jit", jit):
        mesh = distribution.DeviceMesh((2, 4), ["batch", "model"], devices=distribution.list_devices()[:8])
        layouts = keras_hub.models.Llama3Backbone.get_layout_map(mesh)
        placed = distribution.ModelParallel(layout_map=layouts, batch_dim_name="batch")
        distribution.set_distribution(placed)
        backbone = keras_hub.models.Llama3Backbone(
            vocabulary_size=VOCABULARY,
            num_layers=LAYERS,
            num_query_heads=HEADS,
            hidden_dim=WIDTH,
            intermediate_dim=4 * WIDTH,
            num_key_value_heads=KV_HEADS,
        )
        model = keras.Model(backbone.input, keras.layers.Dense(VOCABULARY, name="head")(backbone.output))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer=keras.optimizers.AdamW(1e-3), loss=loss)
        model.optimizer.build(model.trainable_variables)
        inputs = {"token_ids": TOKENS, "padding_mask": np.ones_like(TOKENS)}
        model._symbolic_build(data_batch=(inputs, TOKENS))
        model.make_train_function()
        kinds = ("trainable", "non_trainable", "optimizer", "metrics")
        state = model._get_jax_state(**{f"{kind}_variables": True for kind in kinds})
        at = placed.get_data_layout(TOKENS.shape).backend_layout
        data = jax.tree.map(lambda array: jax.device_put(array, at), (inputs, TOKENS))
    return steps[0], state, data


def levanter() -> tuple[Any, ...]:
    """`Trainer` on Llama 3, over "data" and "model", on which heads and the inner width of feed-forward layers lie."""
    import equinox as eqx
    import haliax as hax
    from haliax.partitioning import infer_resource_partitions
    from levanter.layers.attention import AttentionBackend
    from levanter.models.llama import LlamaConfig
    from levanter.models.lm_model import LmExample, compute_next_token_loss
    from levanter.tracker.tracker import NoopConfig
    from levanter.trainer import Trainer, TrainerConfig
    from levanter.trainer_state import TrainerState

    config = TrainerConfig(
        id="lint",
        tracker=NoopConfig(),
        train_batch_size=len(TOKENS),
        model_axis_size=2,
        tensor_parallel_axes=["mlp", "kv_head", "heads"],
    )
    model = LlamaConfig(
        seq_len=TOKENS.shape[1],
        hidden_dim=WIDTH,
        intermediate_dim=4 * WIDTH,
        num_layers=LAYERS,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        attn_backend=AttentionBackend.VANILLA,  # the others are for accelerators
    )

    def mean(losses: Any, where: Any, axis: Any) -> Any:
        """Of Levanter's mask, whose floats jax refuses by now."""
        return hax.mean(losses, where=where != 0, axis=axis)

    loss = functools.partial(compute_next_token_loss, reduction=mean)
    trainer = Trainer(config, optax.adamw(1e-3), loss, add_default_hooks=False)
    places = trainer.parameter_axis_mapping

    @contextlib.contextmanager
    def entered() -> Iterator[None]:
        """What `Trainer.__enter__` enters, where `jax.set_mesh` is not allowed."""
        mesh = trainer.device_mesh
        with mesh, jax.sharding.use_abstract_mesh(mesh.abstract_mesh), hax.axis_mapping(places):
            yield

    def create(key: jax.Array) -> Any:
        built = model.build(hax.Axis("vocab", VOCABULARY), key=key)
        return TrainerState.init(trainer.optimizer, built, key=key, mp=trainer.mp)

    names = (config.batch_axis, model.Pos.name)
    batch = LmExample(tokens=hax.named(TOKENS, names), loss_mask=hax.named(np.ones_like(TOKENS, np.float32), names))
    with entered():
        state = eqx.filter_eval_shape(create, jax.random.key(0))
        arrays, rest = eqx.partition(state, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))
        shardings = tuple(infer_resource_partitions(tree, places) for tree in (arrays, batch))

    def step(arrays: Any, batch: Any) -> Any:
        with entered():
            result = trainer._train_step(eqx.combine(arrays, rest), (batch,), {}, _no_hooks=True)
        return eqx.filter(result.new_state, eqx.is_array), result.loss

    return jax.jit(step, in_shardings=shardings, donate_argnums=0), arrays, batch
