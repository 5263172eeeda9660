"""The options of a step, and the arguments of its calls: placed by the function's signature, static, donated or batch;
and the key of a call.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from autopar.common import jax_compat
from autopar.errors import DonatedStateError, InvalidArgumentError, UnsupportedError, expect_one_of
from autopar.execute import nnx_objects
from autopar.execute.search import FollowedStep, Search
from autopar.frontend.static_leaves import set_apart
from autopar.frontend.tracing import abstract, flatten_arguments
from autopar.hardware.cluster import Cluster
from autopar.plan.options import PlanRequest
from autopar.plan.plan import Plan

_NAMED = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@jax.tree_util.register_static
class Omitted:
    """Placeholder for an argument left to its default in front of one that a call passes."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Omitted)

    def __hash__(self) -> int:
        return 0

    def __repr__(self) -> str:
        return "omitted"


OMITTED = Omitted()


class Signature:
    """The positions of a function's arguments: positional ones, then keyword-only ones, then a dictionary of the rest.

    Arguments that a call leaves out behind the last one that it gives have no place; one in between is `OMITTED`.
    """

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        self._name = name
        try:
            self._signature = inspect.signature(function)
        except ValueError:  # some built-in functions have none
            self._signature = inspect.signature(lambda *args: None)
        parameters = list(self._signature.parameters.values())
        self._positional = [p.name for p in parameters if p.kind in _NAMED]
        self._keyword_only = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
        self._rest = next((p.name for p in parameters if p.kind is p.VAR_KEYWORD), None)
        self._any_number = any(p.kind is p.VAR_POSITIONAL for p in parameters)
        self.names = [*self._positional, *self._keyword_only, *([self._rest] if self._rest else [])]

    def __str__(self) -> str:
        return f"({', '.join(self._signature.parameters)})"

    def most(self, num_args: int) -> int:
        """The most arguments that a call may pass, at least `num_args`."""
        return num_args if self._any_number else max(num_args, len(self.names))

    def from_first(self, number: int) -> int:
        """The number of a positional argument, of one that counts from the last as in `jax.jit`; others as they are."""
        most = len(self._positional)
        return number + most if not self._any_number and -most <= number < 0 else number

    def places(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """The arguments of a call in their places. Raises: TypeError as the function would, InvalidArgumentError."""
        if not kwargs:
            return tuple(args)
        by_name = dict(self._signature.bind(*args, **kwargs).arguments)
        if self._any_number:
            if any(name in self._keyword_only or name == self._rest for name in by_name):
                raise InvalidArgumentError(
                    where=self._name,
                    expected="arguments by position, where a function takes any number of them",
                    got=f"the keywords {', '.join(kwargs)}",
                    hint="bind the keyword arguments with functools.partial",
                )
            bound = self._signature.bind(*args, **kwargs)
            return bound.args
        placed = [by_name.get(name, OMITTED) for name in self.names]
        while placed and placed[-1] is OMITTED:
            placed.pop()
        return tuple(placed)

    def caller(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, to be called with arguments in their places."""

        @functools.wraps(function)
        def called(*places: Any) -> Any:
            return self._call(function, places)

        return called

    def _call(self, function: Callable[..., Any], places: Sequence[Any]) -> Any:
        if self._any_number:
            return function(*places)
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for i, (name, value) in enumerate(zip(self.names, places, strict=False)):
            if isinstance(value, Omitted):
                continue
            if name == self._rest:
                kwargs |= value
            elif name in self._keyword_only or len(args) < i:  # behind one that is left out
                kwargs[name] = value
            else:
                args.append(value)
        return function(*args, *places[len(self.names) :], **kwargs)

    def names_of(self, num_args: int) -> list[str]:
        """The names of so many arguments by position; those of `*args` have none."""
        named = self._positional[:num_args]
        return named + [""] * (num_args - len(named))

    def numbers(self, option: str, names: str | Sequence[str]) -> tuple[int, ...]:
        """The places of arguments, by name. Raises: InvalidArgumentError for a name that there is not."""
        names = (names,) if isinstance(names, str) else tuple(names)
        allowed_names = self._positional if self._any_number else self.names
        for name in names:
            where, expected = (
                f"parallelize({self._name}, {option}=...)",
                f"names of its arguments: {', '.join(allowed_names)}",
            )
            expect_one_of(where, name, allowed_names, "name them as in the function's signature", expected)
        return tuple(allowed_names.index(name) for name in names)


logger = logging.getLogger("autopar")


class WarnOnce:
    """Logs sentences about a step; a sentence that was logged before is left out."""

    def __init__(self, step_name: str) -> None:
        self._step_name = step_name
        self._logged: set[str] = set()

    def __call__(self, sentence: str) -> None:
        if sentence not in self._logged:
            self._logged.add(sentence)
            logger.warning("%s: %s", self._step_name, sentence)


class Unnamed(tuple[int, ...]):
    """Numbers of arguments that no option names: the same numbers mean no more than that where they are named."""

    __slots__ = ()


DEFAULT_ARGNUMS = {"batch_argnums": Unnamed((1,)), "donate_argnums": Unnamed((0,)), "static_argnums": Unnamed()}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepOptions:
    """Names as in the signature of `parallelize`, whose `plan` is a plan, the request of a recipe, or a step to follow.

    Attributes:
        request: The request of the recipe with the wishes of the search.
    """

    plan: Plan | None
    recipe: PlanRequest
    follow: FollowedStep | None
    search: Search
    cluster: Cluster | None
    batch_argnums: tuple[int, ...]
    donate_argnums: tuple[int, ...]
    static_argnums: tuple[int, ...]
    batch_argnames: tuple[str, ...]
    donate_argnames: tuple[str, ...]
    static_argnames: tuple[str, ...]
    batch_axis: Any
    batch: str
    cache_dir: str | Path | None
    request: PlanRequest = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "request", self.search.request(self.recipe))

    @property
    def has_recipe(self) -> bool:
        return self.recipe != PlanRequest()

    @property
    def show_progress(self) -> bool:
        return self.search.show_progress is not False

    def with_numbers(self, signature: Signature) -> StepOptions:
        """The options with argument numbers in place of names, and counted from 0 in place of those that count from the
        last argument. Raises: InvalidArgumentError for an unknown name.
        """
        numbers: dict[str, Any] = {}
        for kind in ("batch", "donate", "static"):
            names, argnums = getattr(self, f"{kind}_argnames"), getattr(self, f"{kind}_argnums")
            are_given = not isinstance(argnums, Unnamed)
            if any(number < 0 for number in argnums):
                argnums = tuple(map(signature.from_first, argnums))
                numbers[f"{kind}_argnums"] = argnums
            if names:
                explicit = argnums if are_given else ()
                named = signature.numbers(f"{kind}_argnames", names)
                numbers |= {f"{kind}_argnums": tuple(dict.fromkeys((*explicit, *named))), f"{kind}_argnames": ()}
        return dataclasses.replace(self, **numbers)


class CallArguments:
    """The application of a step's options to the arguments of its calls, in the order of its signature.

    Options count all arguments. Dynamic arguments are those that are not static; traces and plans count only them.
    """

    def __init__(self, name: str, signature: Signature, options: StepOptions) -> None:
        self.step_name, self._signature, self._options = name, signature, options
        self._alike: dict[Any, frozenset[int]] = {}  # by the structure and the shapes of arguments

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
        return self._dynamic_numbers(self.batch_argnums(args), len(args))

    def batch_argnums(self, args: Sequence[Any]) -> tuple[int, ...]:
        """The numbers of the arguments that hold examples: as the options say; by default the first one with arrays
        after argument 0, those like it and the last NNX object, and those after it with as many rows in each array;
        behind several objects all that have arrays. Keys of random numbers and single numbers are no examples; nor is
        what has arrays of several sizes in front of an argument whose arrays all have another number of rows.
        """
        numbers, objects = self._options.batch_argnums, nnx_objects.numbers_of_objects(args)
        if not isinstance(numbers, Unnamed):
            return numbers
        begins = max((0, *(i + 1 for i in objects)))
        candidates = [i for i in range(max(begins, *numbers), len(args)) if i not in self._options.static_argnums]
        rows = {i: _rows(args[i]) for i in candidates}
        arrays = [i for i in candidates if rows[i]]
        holding = [i for i in arrays if not _is_keys_alone(args[i])]
        if begins > max(numbers):
            return tuple(holding or arrays)
        if not holding:
            return numbers
        alike = self.like_state(args) if len(holding) > 1 else frozenset()
        first, *others = [i for i in holding if i not in alike] or holding
        if self._options.batch_axis is not None:
            return (first,)
        if len(rows[first]) > 1:
            even = [i for i in others if len(rows[i]) == 1 and not rows[i] <= rows[first]]
            first, *others = even or [first]
        return (first, *(i for i in others if rows[i] == rows[first]))

    def like_state(self, args: Sequence[Any]) -> frozenset[int]:
        """The numbers of the arguments most of whose arrays have the name and the shape of one of argument 0, as the
        state of an optimizer and other parameters have; none where argument 0 is a single array.
        """
        if not args or self._options.static_argnums or nnx_objects.numbers_of_objects(args):
            return frozenset()
        leaves, structure = jax.tree.flatten(tuple(args))
        key = structure, tuple(map(np.shape, leaves))
        if key not in self._alike:  # which each step of several processes asks for
            known, named = set(_named_shapes(args[0])), {i: _named_shapes(arg) for i, arg in enumerate(args) if i}
            alike = (i for i, own in named.items() if 2 * sum(each in known for each in own) > len(own))
            self._alike[key] = frozenset(alike if len(known) > 1 else ())
        return self._alike[key]

    @property
    def has_default_batch(self) -> bool:
        """Whether the numbers of the arguments with examples are the default ones, counted without static arguments."""
        return isinstance(self._options.batch_argnums, Unnamed) and not self._options.static_argnums

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
        """The numbers of the donated dynamic arguments; none where the step follows one made of another function. By
        default the NNX objects, else argument 0, those like it, and others in front of the batch: of these what the
        step's results continue.
        """
        numbers: Sequence[int] = self._options.donate_argnums
        if isinstance(numbers, Unnamed):
            front = range(1, min(self.batch_argnums(args), default=0))
            numbers = nnx_objects.numbers_of_objects(args) or (*numbers, *sorted({*front, *self.like_state(args)}))
        follow = self._options.follow
        return self._dynamic_numbers(numbers if follow is None or follow.donates else (), len(args))

    @property
    def donates_by_default(self) -> bool:
        """Whether no option says what is donated."""
        return isinstance(self._options.donate_argnums, Unnamed)

    def _dynamic_numbers(self, argnums: Sequence[int], num_args: int) -> tuple[int, ...]:
        dynamic = self._not_static(range(num_args))
        return tuple(dynamic.index(i) for i in argnums if i in dynamic)

    def key(self, args: Sequence[Any]) -> Any:
        """The inputs of a trace: tree, shapes, types and explicit mesh of the arguments, static values, JAX's
        configuration.

        Raises: InvalidArgumentError for leaves that are not arrays, and for a static argument without a hash.
        """
        names = self.names(len(args))
        leaves, tree, paths, _ = flatten_arguments(self.dynamic(args), self._not_static(names))
        avals = [abstract(leaf, path) for leaf, path in zip(leaves, paths, strict=True)]
        static = tuple(_with_types(_hashable(a, names[i])) for i, a in self.static(args).items())
        types = tuple(
            (a.shape, str(a.dtype), a.weak_type, jax_compat.explicit_type(leaf))
            for a, leaf in zip(avals, leaves, strict=True)
        )
        return tree, types, jax_compat.explicit_mesh(leaves), static, jax_compat.trace_context()

    def check_argnums(self, num_args: int) -> None:
        """Raises: InvalidArgumentError for numbers that no argument has."""
        for option in ("batch_argnums", "donate_argnums", "static_argnums"):
            numbers = getattr(self._options, option)
            outside = [i for i in numbers if not 0 <= i < self._signature.most(num_args)]
            if outside and not isinstance(numbers, Unnamed):
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
                    hint="transform the plain function and decorate the result; `eval_shape` of the step tells shapes",
                )
            if isinstance(leaf, jax.Array) and leaf.is_deleted():
                raise DonatedStateError(
                    where=f"{self.step_name}, {path}",
                    expected="an array that still holds its data",
                    got="one that an earlier call took over, of this step or another one (it was donated)",
                    hint="use the state that this call returned, as in state, ... = step(state, ...); or make the step "
                    "that took it over with donate_argnums=(), to keep both",
                )
            if isinstance(leaf, jax.ShapeDtypeStruct):
                raise InvalidArgumentError(
                    where=f"{self.step_name}, {path}",
                    expected="an array: the step is run",
                    got=f"a shape, {leaf}",
                    hint="pass the state and the batch themselves; autopar.plan and step.plan take shapes",
                )


def _arrays(argument: Any) -> list[Any]:
    """The leaves of an argument with dimensions, but typed keys of random numbers."""
    leaves = [leaf for leaf in jax.tree.leaves(argument) if np.shape(leaf)]
    return [leaf for leaf in leaves if not jax_compat.is_key_dtype(getattr(leaf, "dtype", None))]


def _rows(argument: Any) -> set[int]:
    """The sizes of the first dimension of the arrays of an argument."""
    return {np.shape(leaf)[0] for leaf in _arrays(argument)}


def _named_shapes(argument: Any) -> list[tuple[str, tuple[int, ...]]]:
    """The last name on the way to each array of an argument, and its shape."""
    paths = jax.tree_util.tree_leaves_with_path(argument)
    return [(str(path[-1:]), shape) for path, leaf in paths if (shape := np.shape(leaf))]


def _is_keys_alone(argument: Any) -> bool:
    """Whether all arrays of an argument are keys, typed or as `jax.random.PRNGKey` makes them."""
    arrays = [(np.shape(leaf), getattr(leaf, "dtype", None)) for leaf in _arrays(argument)]
    return all(dtype == np.uint32 and shape[-1] == 2 for shape, dtype in arrays)


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
