"""Models of other people's packages, run as they are, with random weights; packages are imported by the cases."""

from collections.abc import Callable

from benchmarks.zoo.case import Case
from benchmarks.zoo.published import (
    decoders,
    equinox_nets,
    flax_models,
    haiku_nets,
    huggingface,
    keras_models,
    low_precision,
    scientific,
    tunix_models,
)

# By the name under which the package is imported.
PUBLISHED: dict[str, dict[str, Callable[..., Case]]] = {
    package: {make.__name__: make for make in makes}
    for package, makes in {
        "transformers": (
            huggingface.hf_gpt2,
            huggingface.hf_llama,
            huggingface.hf_bert,
            huggingface.hf_bart,
            huggingface.hf_vit,
            huggingface.hf_whisper,
            huggingface.hf_clip,
            huggingface.hf_t5,
        ),
        "haiku": (haiku_nets.hk_resnet, haiku_nets.hk_transformer, haiku_nets.hk_vq_vae),
        "equinox": (equinox_nets.eqx_mlp, equinox_nets.eqx_batch_norm),
        "keras": (keras_models.keras_convnet, keras_models.keras_transformer),
        "diffrax": (scientific.diffrax_neural_ode,),
        "jraph": (scientific.jraph_network,),
        "jmp": (low_precision.jmp_mixed_precision,),
        "optimistix": (scientific.optimistix_fixed_point,),
        "ott": (scientific.ott_sinkhorn,),
        "numpyro": (scientific.numpyro_regression,),
        "distrax": (scientific.distrax_flow,),
        "e3nn_jax": (scientific.e3nn_points,),
        "penzai": (decoders.penzai_transformer, decoders.penzai_gemma),
        "levanter": (decoders.levanter_llama,),
        "torchax": (decoders.torchax_llama,),
        "tunix": (
            tunix_models.tunix_llama,
            tunix_models.tunix_qwen3,
            tunix_models.tunix_qwen3_experts,
            tunix_models.tunix_qwen3_megablox,
            tunix_models.tunix_qwen3_megablox_skewed,
            tunix_models.tunix_qwen3_splash,
            tunix_models.tunix_gemma,
            tunix_models.tunix_gemma3,
            tunix_models.tunix_gemma4_experts,
        ),
        "flax": (flax_models.nnx_scanned_transformer, flax_models.linen_float8),
        "qwix": (low_precision.qwix_int8,),
        "keras_hub": (
            keras_models.keras_hub_mixtral,
            keras_models.keras_hub_mixtral_skewed,
            keras_models.keras_hub_qwen_moe,
            keras_models.keras_hub_qwen3_moe,
            keras_models.keras_hub_gpt_oss,
        ),
    }.items()
}

__all__ = ["PUBLISHED"]
