"""A recipe as a value, and the request of a plan that it makes; its mesh axes, in Megatron's order, and their sizes."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, Protocol, TypeVar

from autopar.calls.search import check_number
from autopar.errors import InvalidArgumentError, expect_one_of
from autopar.plan.options import PlanRequest
from autopar.sharding.binding import Binding
from autopar.sharding.constraints import AxisUse
from autopar.sharding.parallelisms import data_axis, expert_axis, replica_axis, sequence_axis, tensor_axis

# The name of a recipe: the call of its function, as a plan made under it prints it.


class _HasRequest(Protocol):
    @property
    def request(self) -> PlanRequest: ...


P = ParamSpec("P")
R = TypeVar("R", bound=_HasRequest)


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
