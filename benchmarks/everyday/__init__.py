"""Fifty training steps as people write them, each small enough to compile in seconds on a CPU.

`STEPS` has them by name; each is made for a batch of any size. Six are the zoo's. `MIXING` names those whose result is
one of the whole batch, which its parts do not have: micro-batches of them are rightly refused. `ONE_LAYER` names those
that have no two layers one after the other, each with parameters of its own: stages of them are rightly refused.
"""

import functools
from collections.abc import Callable

from benchmarks.everyday import (
    finetuning,
    generative,
    language,
    libraries,
    optimizers,
    reinforcement,
    scientific,
    vision,
)
from benchmarks.zoo import CASES, Case

_MODULES = (language, vision, generative, scientific, reinforcement, finetuning, libraries, optimizers)

_OF_ZOO = ("bert", "encoder_decoder", "fixed_point", "llama", "resnet", "unet")


def _of_zoo(name: str, batch: int) -> Case:
    return CASES[name](batch=batch)


STEPS: dict[str, Callable[[int], Case]] = {make.__name__: make for module in _MODULES for make in module.STEPS}
STEPS |= {name: functools.partial(_of_zoo, name) for name in _OF_ZOO}

MIXING: dict[str, str] = {
    "clip": "each pair is told from all others of the batch",
    "resnet": "batch statistics",
    "fixed_point": "how long it iterates depends on all examples",
    "gan": "the generator's loss reads the discriminator after its update, which sums over all examples",
    "wgan_gp": "later losses read parameters after earlier updates, which sum over all examples",
    "gnn": "nodes and edges of all graphs lie in one list, and edges name nodes by their place in it",
    "ppo": "advantages are normalised over the examples of a part, and parts are shuffled from all examples",
    "dqn": "what is learnt from is drawn from the buffer after all new transitions are in it",
    "fp8": "operands are scaled by the largest number of the whole batch",
    "lbfgs": "the line search asks for the loss of the whole batch again and again",
}

ONE_LAYER: dict[str, str] = {
    "neural_ode": "each step of the loop over time needs all parameters",
    "own_accumulation": "each trip of the step's own loop over micro-batches needs all parameters",
    "lbfgs": "the loss, its gradients and the line search are branches and loops that need all parameters",
}

__all__ = ["MIXING", "ONE_LAYER", "STEPS", "Case"]
