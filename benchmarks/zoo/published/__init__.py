"""Models of other people's packages, run as they are, with random weights; packages are imported by the cases."""

from collections.abc import Callable

from benchmarks.zoo.case import Case
from benchmarks.zoo.published import (
    diffrax_ode,
    distrax_flows,
    e3nn_nets,
    equinox_nets,
    flax_models,
    haiku_nets,
    huggingface,
    jmp_nets,
    jraph_nets,
    keras_hub_models,
    keras_models,
    levanter_models,
    numpyro_svi,
    optimistix_layers,
    ott_losses,
    penzai_models,
    qwix_models,
    torchax_models,
    tunix_models,
)

# By the name under which the package is imported.
PUBLISHED: dict[str, dict[str, Callable[..., Case]]] = {
    package: {case.__name__: case for case in module.CASES}
    for package, module in {
        "transformers": huggingface,
        "haiku": haiku_nets,
        "equinox": equinox_nets,
        "keras": keras_models,
        "diffrax": diffrax_ode,
        "jraph": jraph_nets,
        "jmp": jmp_nets,
        "optimistix": optimistix_layers,
        "ott": ott_losses,
        "numpyro": numpyro_svi,
        "distrax": distrax_flows,
        "e3nn_jax": e3nn_nets,
        "penzai": penzai_models,
        "levanter": levanter_models,
        "torchax": torchax_models,
        "tunix": tunix_models,
        "flax": flax_models,
        "qwix": qwix_models,
        "keras_hub": keras_hub_models,
    }.items()
}

__all__ = ["PUBLISHED"]
