"""From the arguments of a call to a traced step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from autopar.calls import nnx_objects
from autopar.calls.call_arguments import CallArguments
from autopar.calls.step_options import DEFAULT_ARGNUMS
from autopar.calls.warn_once import WarnOnce
from autopar.errors import InvalidArgumentError
from autopar.frontend.callback_results import with_callbacks_as_results
from autopar.frontend.donation import untied_arguments
from autopar.frontend.tracing import tie_state, trace
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
    elif arguments.has_default_batch:
        _check_default_roles(traced, dynamic, names, arguments)
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


def _check_default_roles(
    traced: TracedStep, dynamic: Sequence[Any], names: Sequence[str], arguments: CallArguments
) -> None:
    """Raises: InvalidArgumentError where argument 1, which no option names, is state: the step returns its new value,
    and its leaves have no number of examples in common. As examples it would be split, and the batch would not.
    """
    tied = tie_state(dynamic, range(len(dynamic)), traced.out_tree, traced.in_avals, traced.out_avals)
    returned = {traced.argument_of[leaf] for leaf in tied}
    sizes: dict[int, dict[Any, None]] = {}  # by argument, the first ones of the shapes of its leaves
    for leaf, of in zip(traced.in_avals, traced.argument_of, strict=True):
        sizes.setdefault(of, {}).update(dict.fromkeys(leaf.shape[:1]))
    has_examples = len(sizes.get(1, ())) <= 1
    others = [i for i in sorted(sizes) if i not in returned and sizes[i]]
    examples = next((n for i in others for n in sizes[i]), None)
    others = [i for i in others if examples in sizes[i]]  # a key for random numbers has no examples
    if 1 not in returned or has_examples or not others:
        return
    name = arguments.step_name
    batch, donate = (f"({', '.join(map(str, found))}{',' * (len(found) == 1)})" for found in (others, sorted(returned)))
    raise InvalidArgumentError(
        where=f"{name}, batch_argnums={DEFAULT_ARGNUMS['batch_argnums']}, the default",
        expected="examples in argument 1",
        got=f"{names[1]!r}, which is state: the step returns it anew",
        hint=f"name the roles: autopar.parallelize({name}, batch_argnums={batch}, donate_argnums={donate})",
    )
