"""A recipe as a value, and the request of a plan that it makes; its mesh axes, in Megatron's order, and their sizes;
`constrain`, a recipe of pins.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

from jax.sharding import PartitionSpec

from autopar.errors import InvalidArgumentError, expect_one_of, expect_type
from autopar.execute.search import check_number
from autopar.ir.binding import Binding
from autopar.ir.constraints import AxisUse
from autopar.ir.jax_sharding import dims_of
from autopar.ir.layout import AXIS_NAMES
from autopar.ir.parallelisms import data_axis, expert_axis, replica_axis, sequence_axis, tensor_axis
from autopar.ir.pins import Pin, Pins
from autopar.plan.options import HasRequest, PlanRequest

# The name of a recipe: the call of its function, as a plan made under it prints it.


P = ParamSpec("P")
R = TypeVar("R", bound=HasRequest)


def named(function: Callable[P, R]) -> Callable[P, R]:
    """Makes a function of recipes name what it returns after its call: `zero(1, size=8)`."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def of_name(*args: P.args, **kwargs: P.kwargs) -> R:
        made: Any = function(*args, **kwargs)
        name = f"{function.__name__}({', '.join(_arguments(signature, *args, **kwargs))})"
        return dataclasses.replace(made, request=dataclasses.replace(made.request, recipe=name))

    return of_name


def _arguments(signature: inspect.Signature, *args: Any, **kwargs: Any) -> list[str]:
    """The arguments that are not the defaults, as they are written in a call."""
    given = signature.bind(*args, **kwargs).arguments
    texts: list[str] = []
    for name, value in given.items():
        parameter = signature.parameters[name]
        if value == parameter.default:
            continue
        text = value.request.recipe if hasattr(value, "request") else repr(value)
        is_named = parameter.kind is inspect.Parameter.KEYWORD_ONLY or len(texts) < list(given).index(name)
        texts.append(f"{name}={text}" if is_named else text)
    return texts


# Checks of the arguments of recipes.


def check_zero_stage(where: str, stage: object) -> None:
    """Raises: InvalidArgumentError for what is no stage of ZeRO."""
    if isinstance(stage, bool) or stage not in (0, 1, 2, 3):
        raise InvalidArgumentError(
            where=where,
            expected="0, 1, 2 or 3",
            got=repr(stage),
            hint="0 keeps the whole state on every device",
        )


def check_gather(where: str, gather: object, stage: int, gathers: Sequence[str]) -> None:
    """Raises: InvalidArgumentError for a time to gather parameters that there is not, or not in this stage of ZeRO."""
    if gather not in gathers or (gather == "ahead" and stage == 0):
        raise InvalidArgumentError(
            where=where,
            expected=f"{' or '.join(map(repr, gathers))}, the second with zero=1, 2 or 3",
            got=f"{gather!r} with zero={stage}",
            hint="leave it out to gather after the update",
        )


def check_sequence(where: str, kind: object, kinds: Sequence[str]) -> None:
    """Raises: InvalidArgumentError for a way to split positions that is not one of the kinds."""
    expect_one_of(where, kind, kinds, "leave it out")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Constraints of a plan; the search chooses the rest. Made by the functions of `autopar.recipes`."""

    request: PlanRequest = dataclasses.field(default_factory=PlanRequest)

    def __repr__(self) -> str:
        """The calls that make it: `constrain({'w': P(None, "model")}, recipe=zero(3))`."""
        request = self.request
        if request.pins is None:
            return request.recipe or f"Recipe({_changed(request)})"
        pins = ", ".join(f"{pin.pattern!r}: {pin.text}" for pin in request.pins.pins)
        sizes = f", axis_sizes={dict(request.pins.axis_sizes)}" if request.pins.axis_sizes else ""
        recipe = f", recipe={request.recipe}" if request.recipe else ""
        return f"constrain({{{pins}}}{sizes}{recipe})"


def _changed(request: PlanRequest) -> str:
    """The fields of a request that are not the defaults."""
    fields = ((f.name, getattr(request, f.name)) for f in dataclasses.fields(request))
    return ", ".join(f"{name}={value!r}" for name, value in fields if value != getattr(PlanRequest(), name))


# The ways in which an axis of its own splits positions.
SEQUENCES = ("ulysses", "ring", "usp")


def data_beside(size: int | None) -> list[tuple[AxisUse, int | None]]:
    """The data axis beside an axis of so many devices, or of all of them."""
    return [(data_axis(), None if size is not None else 1)]


def hybrid_axes(
    where: str,
    shares: AxisUse,
    stage: int,
    size: int,
    dp: int | None = None,
    others: tuple[int | None, ...] = (),
) -> list[tuple[AxisUse, int | None]]:
    """The data axes of hybrid sharding: copies of the state, and the devices that share it beside the others' axes."""
    check_number(where, size)
    if stage == 0:
        raise InvalidArgumentError(
            where=where,
            expected="a stage of ZeRO, which the devices of a group share",
            got=f"{size} with stage 0",
            hint="take stage 1, 2 or 3, or leave the size out",
        )
    beside = math.prod(n for n in others if n is not None)
    if None in others or size % beside:
        raise InvalidArgumentError(
            where=where,
            expected="a multiple of ep * sp, the devices that share the state beside the data axis",
            got=f"{size} with ep * sp = {' * '.join(map(str, others))}",
            hint="zero_size counts all devices that share one copy of the state",
        )
    shared = size // beside
    if dp is not None and dp % shared:
        raise InvalidArgumentError(
            where=where,
            expected=f"groups that make up the {dp} copies of the model",
            got=f"{shared} copies of it in a group",
            hint="zero_size divides dp * ep * sp",
        )
    return [(replica_axis(), None if dp is None else dp // shared), (shares, shared)]


def bind_axes(
    data: Sequence[tuple[AxisUse, int | None]],
    *,
    tp: int | None = 1,
    sp: int | None = 1,
    ep: int | None = 1,
    zero: int = 0,
    gather: str = "after",
    sequence: str = "ulysses",
    tensor: AxisUse | None = None,
) -> Recipe:
    """The recipe of one program on these axes: data, experts and sequences where several devices share them, tensor."""
    uses = ((expert_axis(zero, gather), ep), (sequence_axis(sequence, zero, gather), sp))
    shared = [(use, size) for use, size in uses if size != 1]
    axes, sizes = zip(*data, *shared, (tensor or tensor_axis(), tp), strict=True)
    binding = Binding(axes=axes, sizes=sizes)
    return Recipe(request=PlanRequest(binding=binding))


# `autopar.constrain`: pinned layouts of arguments and modules; the search chooses the rest.


def constrain(
    pins: Mapping[str, PartitionSpec],
    *,
    axis_sizes: Mapping[str, int] | None = None,
    recipe: Recipe | None = None,
) -> Recipe:
    """A recipe that pins the layouts of arguments (by path) or of the results of modules; the search chooses the rest.

    ```python
    plan = autopar.constrain({"layers/*/attn/kernel": P(None, "model"), "batch/tokens": P("data")})
    step = autopar.parallelize(train_step, plan=plan)
    ```

    The plan records the cost of the pins: the predicted step time with and without them (`plan.record.pinned`).

    Args:
        pins: For each pattern the layout of the values that it matches. A pattern is matched against the end of paths
            such as `state/params/layers/0/attn/kernel`, so that it also matches the optimiser's moments of a parameter.
            `*` matches characters of one part, `**` any number of parts. A pattern that matches no argument applies to
            the results of the modules that it matches. Axes have any names; `PartitionSpec.UNCONSTRAINED` leaves a
            dimension to the search.
        axis_sizes: The number of devices along an axis. Other sizes are searched for. What an axis splits that no pin
            has is left to the search, which the plan's notes say.
        recipe: Further constraints on the plan. Axes then have the recipe's names (data, model); with a recipe without
            names (`recipes.pipeline`), any. Pins that the recipe has itself hold too.

    Raises: InvalidArgumentError.
    """
    if not isinstance(pins, Mapping) or not pins:
        raise InvalidArgumentError(
            where="constrain(pins)",
            expected="a dictionary from patterns to PartitionSpecs",
            got=repr(pins),
            hint="for a plan without pins leave out plan=...",
        )
    if recipe is not None:
        expect_type("constrain(recipe=...)", recipe, Recipe, "a recipe, or None", "take one of autopar.recipes")
    sizes = tuple((name, check_number(f"constrain(axis_sizes={{{name!r}: ...}})", n)) for name, n in _items(axis_sizes))
    parsed = Pins(pins=tuple(_pin(pattern, spec) for pattern, spec in pins.items()), axis_sizes=sizes)
    if recipe is not None and recipe.request.pins is not None:
        parsed = _joined(recipe.request.pins, parsed)
    several = [name for name in parsed.names if dict(parsed.axis_sizes).get(name) != 1]
    if len(several) > len(AXIS_NAMES):
        raise InvalidArgumentError(
            where="constrain(pins)",
            expected=f"at most {len(AXIS_NAMES)} mesh axes of more than one device",
            got=", ".join(several),
            hint="give axes of one device the size 1, or join axes that always stand together",
        )
    return Recipe(request=dataclasses.replace((recipe or Recipe()).request, pins=parsed))


def _joined(of_recipe: Pins, more: Pins) -> Pins:
    """The pins of a recipe, and more. Raises: InvalidArgumentError where these contradict each other."""
    for kind, ours, theirs in (
        ("pattern", {pin.pattern: pin.text for pin in of_recipe.pins}, {pin.pattern: pin.text for pin in more.pins}),
        ("axis_sizes", dict(of_recipe.axis_sizes), dict(more.axis_sizes)),
    ):
        for name in ours.keys() & theirs.keys():
            if ours[name] != theirs[name]:
                raise InvalidArgumentError(
                    where=f"constrain, {kind} {name!r}",
                    expected=f"{ours[name]}, as the recipe has it",
                    got=str(theirs[name]),
                    hint="name it once: in the recipe, or beside it",
                )
    known = {pin.pattern for pin in of_recipe.pins}
    pins = (*of_recipe.pins, *(pin for pin in more.pins if pin.pattern not in known))
    return Pins(pins=pins, axis_sizes=tuple({**dict(of_recipe.axis_sizes), **dict(more.axis_sizes)}.items()))


def _items(sizes: Mapping[str, int] | None) -> list[tuple[str, int]]:
    return list(sizes.items()) if sizes is not None else []


def _pin(pattern: str, spec: PartitionSpec) -> Pin:
    if not isinstance(pattern, str) or not pattern.strip("/") or not isinstance(spec, PartitionSpec):
        raise InvalidArgumentError(
            where=f"constrain, pattern {pattern!r}",
            expected="a path and a jax.sharding.PartitionSpec",
            got=f"{type(pattern).__name__} and {type(spec).__name__} ({spec!r:.40})",
            hint="write P(None, 'model') with P = jax.sharding.PartitionSpec",
        )
    if getattr(spec, "unreduced", None) or getattr(spec, "reduced", None):
        raise InvalidArgumentError(
            where=f"constrain, pattern {pattern!r}",
            expected="a spec that says how the dimensions are split",
            got=f"{spec}, with axes over which the value is a partial sum",
            hint="leave these axes out: whether a value is kept as a partial sum is left to the search",
        )
    pin = Pin(pattern=pattern, dims=dims_of(spec, len(spec)))
    names = [name for axes in pin.dims for name in axes or ()]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise InvalidArgumentError(
            where=f"constrain, pattern {pattern!r}",
            expected="every mesh axis at most once in a spec",
            got=f"{pin.text}, with {', '.join(map(repr, twice))} twice",
            hint="give the second dimension another axis",
        )
    return pin
