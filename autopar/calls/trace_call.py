"""From the arguments of a call to a traced step."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from autopar.calls import nnx_objects
from autopar.calls.call_arguments import CallArguments
from autopar.calls.warn_once import WarnOnce
from autopar.frontend.callback_results import with_callbacks_as_results
from autopar.frontend.donation import untied_arguments
from autopar.frontend.tracing import trace
from autopar.ir.traced_step import TracedStep
from autopar.plan.plan import Trees


def trace_call(
    function: Callable[..., Any], args: tuple[Any, ...], arguments: CallArguments, warn: WarnOnce
) -> tuple[TracedStep, Trees]:
    """A step traced for the arguments of a call, in their places and with NNX objects split, and its public trees.

    Raises: InvalidArgumentError, UnsupportedError.
    """
    arguments.check_argnums(len(args))
    dynamic, static = arguments.dynamic(args), arguments.static(args)
    names = arguments.dynamic_names(len(args))

    @functools.wraps(function)
    def bound(*values: Any) -> Any:
        remaining = iter(values)
        all_arguments = [static[i] if i in static else next(remaining) for i in range(len(args))]
        return nnx_objects.pure(function, all_arguments, arguments.names(len(args)))

    bound.__name__ = arguments.step_name
    donate, batch = arguments.donated_numbers(args), arguments.batch_numbers(args)
    dims = arguments.example_dims(args)
    traced = trace(bound, dynamic, names=names, donate=donate, batch=batch, example_dims=dims)
    if any(map(nnx_objects.is_split, dynamic)):
        traced = nnx_objects.tie_objects(traced, dynamic, donate)
        donate = tuple(sorted({traced.argument_of[leaf] for leaf in traced.donated}))
        for sentence in nnx_objects.idle_optimizers(traced, dynamic, names):
            warn(sentence)
    for sentence in untied_arguments(traced, names, donate):
        warn(sentence)
    if arguments.cuts_steps:
        traced = with_callbacks_as_results(traced)
    trees = Trees(
        arguments=tuple(map(nnx_objects.public_tree, dynamic)),
        names=tuple(names),
        donated=frozenset(donate),
        batch=frozenset(batch),
    )
    return traced, trees
