"""`autopar.constrain`: plans with pinned layouts of arguments and modules; the search chooses the rest."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from jax.sharding import PartitionSpec

from autopar.calls.search import check_number
from autopar.errors import InvalidArgumentError, expect_type
from autopar.ir.mesh import AXIS_NAMES
from autopar.recipes.recipe import Recipe
from autopar.sharding.pins import Pin, Pins


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
    dims: list[tuple[str, ...] | None] = []
    for entry in spec:
        if entry is PartitionSpec.UNCONSTRAINED:
            dims.append(None)
        else:
            dims.append(() if entry is None else (entry,) if isinstance(entry, str) else tuple(entry))
    pin = Pin(pattern=pattern, dims=tuple(dims))
    names = [name for axes in dims for name in axes or ()]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise InvalidArgumentError(
            where=f"constrain, pattern {pattern!r}",
            expected="every mesh axis at most once in a spec",
            got=f"{pin.text}, with {', '.join(map(repr, twice))} twice",
            hint="give the second dimension another axis",
        )
    return pin
