"""Arguments of a call by number and name: static, donated and batch arguments; and the key of a call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from autopar.calls import nnx_objects
from autopar.calls.signatures import Signature
from autopar.calls.step_options import DEFAULT_ARGNUMS, StepOptions
from autopar.common import jax_compat
from autopar.errors import DonatedStateError, InvalidArgumentError, UnsupportedError
from autopar.frontend.static_leaves import set_apart
from autopar.frontend.tracing import abstract, flatten_arguments


class CallArguments:
    """The application of a step's options to the arguments of its calls, in the order of its signature.

    Options count all arguments. Dynamic arguments are those that are not static; traces and plans count only them.
    """

    def __init__(self, name: str, signature: Signature, options: StepOptions) -> None:
        self.step_name, self._signature, self._options = name, signature, options

    @property
    def cuts_steps(self) -> bool:
        """Whether micro-batches or stages are asked for, or a given or followed plan has them, in one process."""
        options, plan = self._options, self._options.plan
        if options.follow is not None:
            plan = options.follow.latest_plan()
        in_parts = not options.request.admits_one_program if plan is None else plan.record.pipeline is not None
        return in_parts and jax.process_count() == 1

    def dynamic(self, args: Sequence[Any]) -> list[Any]:
        """The dynamic arguments, with their static leaves set apart."""
        return [set_apart(arg) for arg in self._not_static(args)]

    def _not_static(self, items: Sequence[Any]) -> list[Any]:
        return [item for i, item in enumerate(items) if i not in self._options.static_argnums]

    def static(self, args: Sequence[Any]) -> dict[int, Any]:
        """The static arguments by number."""
        return {i: a for i, a in enumerate(args) if i in self._options.static_argnums}

    def with_dynamic(self, args: Sequence[Any], dynamic: Sequence[Any]) -> tuple[Any, ...]:
        """All arguments, with these dynamic ones."""
        remaining = iter(dynamic)
        return tuple(arg if i in self._options.static_argnums else next(remaining) for i, arg in enumerate(args))

    def names(self, num_args: int) -> list[str]:
        known = self._signature.names
        return [known[i] if i < len(known) else f"argument {i}" for i in range(num_args)]

    def dynamic_names(self, num_args: int) -> list[str]:
        return self._not_static(self.names(num_args))

    def batch_numbers(self, args: Sequence[Any]) -> tuple[int, ...]:
        """The numbers of the dynamic arguments that hold examples."""
        numbers = nnx_objects.batch_argnums(args, self._options.batch_argnums, DEFAULT_ARGNUMS["batch_argnums"])
        return self._dynamic_numbers(numbers, len(args))

    @property
    def has_default_batch(self) -> bool:
        """Whether the numbers of the arguments with examples are the default ones, counted without static arguments."""
        options = self._options
        return options.batch_argnums == DEFAULT_ARGNUMS["batch_argnums"] and not options.static_argnums

    def example_dims(self, args: Sequence[Any]) -> dict[int, int | None] | None:
        """By leaf of the dynamic arguments, the dimension that counts examples, None of one without; None where the
        options leave that open. Raises: InvalidArgumentError for axes that the batch does not have.
        """
        if self._options.batch_axis is None:
            return None
        batch, dynamic, dims = self.batch_numbers(args), self.dynamic(args), dict[int, int | None]()
        of_argument = dict(zip(batch, self.axes_of([dynamic[i] for i in batch]), strict=True))
        first = 0
        for number, argument in enumerate(dynamic):
            dims |= {first + i: axis for i, axis in enumerate(of_argument.get(number, ()))}
            first += len(jax.tree.leaves(argument))
        return dims

    def axes_of(self, batch: Sequence[Any]) -> list[list[int | None]]:
        """Of each leaf of the arguments with examples, the dimension that counts them: as the options say, else the
        first one; None of a leaf without. Raises: InvalidArgumentError for axes that the batch does not have.
        """
        axes = 0 if self._options.batch_axis is None else self._options.batch_axis
        each = axes if len(batch) > 1 and isinstance(axes, tuple) else (axes,) * len(batch)
        if len(each) != len(batch):
            raise self._wrong_axis(f"{len(each)} for {len(batch)} arguments with examples")
        pairs = [(self._axes(own, arg), jax.tree.leaves(arg)) for own, arg in zip(each, batch, strict=True)]
        return [list(map(self._example_dim, *pair)) for pair in pairs]

    def _axes(self, axes: Any, argument: Any) -> list[Any]:
        """Of each leaf of an argument its entry in a tree of axes, which may stand for several."""
        found: list[Any] = []
        try:
            jax.tree.map(
                lambda axis, part: found.extend([axis] * len(jax.tree.leaves(part))),
                axes, argument, is_leaf=lambda axis: axis is None,
            )  # fmt: skip
        except (ValueError, TypeError):
            paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(argument)]
            raise self._wrong_axis(f"another tree than that of the leaves {', '.join(paths):.80}") from None
        return found

    def _example_dim(self, axis: Any, leaf: Any) -> int | None:
        rank = len(np.shape(leaf))
        if axis is None or rank == 0:
            return None
        if isinstance(axis, bool) or not isinstance(axis, int) or not -rank <= axis < rank:
            raise self._wrong_axis(f"{axis!r} for a leaf of shape {tuple(np.shape(leaf))}")
        return axis % rank

    def _wrong_axis(self, got: str) -> InvalidArgumentError:
        return InvalidArgumentError(
            where=f"{self.step_name}, batch_axis={self._options.batch_axis!r:.60}",
            expected="a dimension of each leaf of the batch, or a tree of them like the batch",
            got=got,
            hint="give one number, or a tree as in_axes of jax.vmap, with None for a leaf without examples",
        )

    def donated_numbers(self, args: Sequence[Any]) -> tuple[int, ...]:
        """The numbers of the donated dynamic arguments; none where the step follows another one."""
        numbers = nnx_objects.donate_argnums(args, self._options.donate_argnums, DEFAULT_ARGNUMS["donate_argnums"])
        return self._dynamic_numbers(numbers if self._options.follow is None else (), len(args))

    def _dynamic_numbers(self, argnums: Sequence[int], num_args: int) -> tuple[int, ...]:
        dynamic = self._not_static(range(num_args))
        return tuple(dynamic.index(i) for i in argnums if i in dynamic)

    def key(self, args: Sequence[Any]) -> Any:
        """The inputs of a trace: tree, shapes and types of the arguments, static values, JAX's configuration.

        Raises: InvalidArgumentError for leaves that are not arrays, and for a static argument without a hash.
        """
        names = self.names(len(args))
        leaves, tree, paths, _ = flatten_arguments(self.dynamic(args), self._not_static(names))
        avals = [abstract(leaf, path) for leaf, path in zip(leaves, paths, strict=True)]
        static = tuple(_with_types(_hashable(a, names[i])) for i, a in self.static(args).items())
        types = tuple((a.shape, str(a.dtype), a.weak_type) for a in avals)
        return tree, types, static, jax_compat.trace_context()

    def check_argnums(self, num_args: int) -> None:
        """Raises: InvalidArgumentError for numbers that no argument has."""
        for option in ("batch_argnums", "donate_argnums", "static_argnums"):
            numbers = getattr(self._options, option)
            outside = [i for i in numbers if not 0 <= i < self._signature.most(num_args)]
            if outside and numbers != DEFAULT_ARGNUMS.get(option):
                raise InvalidArgumentError(
                    where=f"{self.step_name}, {option}={numbers}",
                    expected=f"numbers of its {num_args} arguments, from 0",
                    got=f"{outside[0]}",
                    hint="count positional arguments from 0; static ones count too, the self of a method does not",
                )

    def check_usable(self, dynamic: Sequence[Any], names: Sequence[str]) -> None:
        """Raises: InvalidArgumentError for shapes, which no step can be run on, DonatedStateError for deleted arrays,
        UnsupportedError within another transformation.
        """
        leaves, _, paths, _ = flatten_arguments(dynamic, names)
        for leaf, path in zip(leaves, paths, strict=True):
            if jax_compat.is_tracer(leaf):
                raise UnsupportedError(
                    where=f"{self.step_name}, {path}",
                    expected="an array",
                    got="a traced value: the step is called inside of jax.jit, jax.grad or another transformation",
                    hint="transform the plain function and decorate the result",
                )
            if isinstance(leaf, jax.Array) and leaf.is_deleted():
                raise DonatedStateError(
                    where=f"{self.step_name}, {path}",
                    expected="an array that still holds its data",
                    got="one that an earlier step took over (it was donated)",
                    hint=f"use the state that the step returned: state, ... = {self.step_name}(state, ...); or pass "
                    "donate_argnums=() to keep both",
                )
            if isinstance(leaf, jax.ShapeDtypeStruct):
                raise InvalidArgumentError(
                    where=f"{self.step_name}, {path}",
                    expected="an array: the step is run",
                    got=f"a shape, {leaf}",
                    hint="pass the state and the batch themselves; autopar.plan and step.plan take shapes",
                )


def _with_types(value: Any) -> Any:
    """A static argument with its type, and those inside of tuples: 1, 1.0 and True are equal, and trace differently."""
    return type(value), tuple(map(_with_types, value)) if type(value) is tuple else value


def _hashable(value: Any, name: str) -> Any:
    try:
        hash(value)
    except TypeError:
        raise InvalidArgumentError(
            where=name,
            expected="a static argument that can be hashed: each value of it is a step of its own",
            got=type(value).__name__,
            hint="pass a tuple or a frozen dataclass, or take it out of static_argnums",
        ) from None
    return value
