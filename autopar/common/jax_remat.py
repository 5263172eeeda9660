"""Other names saved under the policies of `jax.checkpoint` than the step's code says: jax's private parts for it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
from jax._src import ad_checkpoint
from jax._src.interpreters import partial_eval

NAME = "name"  # the primitive of `checkpoint_name`
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


_install()
