"""Other names saved under the policies of `jax.checkpoint` than the step's code says: jax's private parts for it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
from jax._src import ad_checkpoint
from jax._src.interpreters import partial_eval

RECOMPUTED = "rematted_computation"  # in the name stack of what `jax.checkpoint` computes again
NAME = "name"  # the primitive of `checkpoint_name`
# Whether `jax_remat3` asks policies about names; before jax 0.12 it knows jax's own policies only.
ASKS_POLICIES = hasattr(ad_checkpoint, "CheckpointNameFwd")
_IN_HOST = "autopar: in the memory of the host"  # the name of a value that an offload policy sends there
# The names that are saved by traces of this thread; None: those of the policies. It is in the keys of jax's caches.
_saved: Any = jax.make_user_context(None)


def in_host_memory(eqn: Any, operand: Any, result: Any) -> Any:
    """An equation that gives a value another name, under which it waits in the memory of the host.

    Every pass knows such equations, and values of the memory of the host have the types of others.
    """
    params = {"name": _IN_HOST}
    return eqn.replace(primitive=ad_checkpoint.name_p, invars=[operand], outvars=[result], params=params)


def is_in_host_memory(eqn: Any) -> bool:
    """Whether an equation was made by `in_host_memory`."""
    return eqn is not None and eqn.primitive is ad_checkpoint.name_p and eqn.params["name"] == _IN_HOST


@dataclasses.dataclass(frozen=True, slots=True, weakref_slot=True)  # jax refers to policies weakly
class SavedNames:
    """A policy of `jax.checkpoint` that saves these names, and of unnamed values what `policy` saves.

    Names that `policy` sends to the host still go there, unless they are saved.
    """

    names: frozenset[str]
    policy: Any

    def __call__(self, primitive: Any, *avals: Any, **params: Any) -> Any:
        if primitive is not ad_checkpoint.name_p:
            return self.policy(primitive, *avals, **params)
        if params["name"] in self.names:
            return True
        own = self.policy(primitive, *avals, **params)
        return own if isinstance(own, partial_eval.Offloadable) else False


@contextlib.contextmanager
def saved_names(names: frozenset[str]) -> Iterator[None]:
    """Under it, traces save these names in each region of `jax.checkpoint`, and no other names."""
    with _saved(names):
        yield


def _install() -> None:
    """Has jax ask `_saved` before a region's own policy. Without names there, jax does what it does without this."""
    original = partial_eval.custom_partial_eval_rules[ad_checkpoint.remat_p]

    def rule(trace: Any, *tracers: Any, policy: Any, **params: Any) -> Any:
        names = _saved.value
        if names is not None:
            policy = SavedNames(names, policy or jax.checkpoint_policies.nothing_saveable)
        return original(trace, *tracers, policy=policy, **params)

    partial_eval.custom_partial_eval_rules[ad_checkpoint.remat_p] = rule
    if ASKS_POLICIES:
        _install_for_high_level_primitives()


def _install_for_high_level_primitives() -> None:
    """The same under `jax_remat3`; names stay in the plain equations that a region is lowered to."""
    module: Any = ad_checkpoint
    region = module.RematTraced
    original = region.__init__

    def made(self: Any, jaxpr: Any, policy: Any, *args: Any, **kwargs: Any) -> None:
        names = _saved.value
        if names is not None and not isinstance(policy, SavedNames):
            policy = SavedNames(names, policy or jax.checkpoint_policies.nothing_saveable)
        original(self, jaxpr, policy, *args, **kwargs)

    region.__init__ = made
    for named in (module.CheckpointName, module.CheckpointNameFwd):
        _keep_the_name(named)


def _keep_the_name(named: Any) -> None:
    original = named.remat

    def remat(self: Any, trace: Any, x: Any) -> Any:
        result, saved, again = original(self, trace, x)
        is_computed_again = isinstance(saved, tuple)
        return result, saved, (lambda _, x: type(self)(self.name, self.in_avals[0])(x)) if is_computed_again else again

    named.remat = remat
    named.expand = lambda self, x: ad_checkpoint.name_p.bind(x, name=self.name)


_install()
