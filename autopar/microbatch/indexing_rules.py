"""Rules for examples in slices, gathers and scatters."""

from __future__ import annotations

from typing import Any

from autopar.microbatch.example_places import (
    AGAINST_OTHERS,
    BY_POSITION,
    SEVERAL,
    MixesExamples,
    Places,
    common_place,
    only_place,
    rank_of,
    shape_of,
)


def static_slice(eqn: Any, places: Places) -> list[int]:
    dim, p = common_place(eqn, places), eqn.params
    is_full = p["start_indices"][dim] == 0 and p["limit_indices"][dim] == shape_of(eqn.invars[0])[dim]
    if not is_full or (p["strides"] or {dim: 1})[dim] != 1:
        raise MixesExamples(BY_POSITION)
    return [dim]


def pad(eqn: Any, places: Places) -> list[int]:
    dim = only_place(eqn, places, 0)
    if tuple(eqn.params["padding_config"][dim]) != (0, 0, 0):
        raise MixesExamples(BY_POSITION)
    return [dim]


def dynamic_slice(eqn: Any, places: Places) -> list[int]:
    dim = only_place(eqn, places, 0)
    if eqn.params["slice_sizes"][dim] != shape_of(eqn.invars[0])[dim]:
        raise MixesExamples(BY_POSITION)
    return [dim]  # a slice of full size starts at 0, whatever its index says


def dynamic_update_slice(eqn: Any, places: Places) -> list[int]:
    dim = places[0]
    operand, update = (shape_of(v) for v in eqn.invars[:2])
    if dim is None or places[1] != dim or update[dim] != operand[dim] or any(p is not None for p in places[2:]):
        raise MixesExamples(BY_POSITION)
    return [dim]


def gather(eqn: Any, places: Places) -> list[int]:
    """Examples are a dimension of the indices, or whole slices of the operand, or a batching dimension of both."""
    (operand, indices), numbers = places, eqn.params["dimension_numbers"]
    shape, (out,) = shape_of(eqn.invars[0]), eqn.outvars
    of_indices = [d for d in range(rank_of(out)) if d not in numbers.offset_dims]
    batching = dict(zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True))
    if operand is not None and operand in batching:
        if indices is None:
            raise MixesExamples(AGAINST_OTHERS)
        if indices != batching[operand]:
            raise MixesExamples(SEVERAL)
        return [of_indices[indices]]
    if operand is not None:
        if operand in numbers.collapsed_slice_dims or operand in numbers.start_index_map:
            raise MixesExamples(BY_POSITION)
        if indices is not None:
            raise MixesExamples(SEVERAL)
        sliced = [d for d in range(len(shape)) if d not in numbers.collapsed_slice_dims and d not in batching]
        if eqn.params["slice_sizes"][operand] != shape[operand]:
            raise MixesExamples(BY_POSITION)
        return [int(numbers.offset_dims[sliced.index(operand)])]
    assert indices is not None, "some operand holds examples"
    if indices in batching.values():
        raise MixesExamples(AGAINST_OTHERS)
    if indices == rank_of(eqn.invars[1]) - 1:
        raise MixesExamples(BY_POSITION)
    return [of_indices[indices]]


def scatter(eqn: Any, places: Places) -> list[int]:
    """Examples are a dimension of the operand that is updated as a whole, or a batching dimension of all three."""
    (operand, indices, updates), numbers = places, eqn.params["dimension_numbers"]
    if operand is None or updates is None:
        raise MixesExamples(BY_POSITION)
    of_indices = _scattered_dims(eqn)
    batching = dict(zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True))
    if operand in batching:
        if indices is None:
            raise MixesExamples(AGAINST_OTHERS)
        if indices != batching[operand] or updates != of_indices[indices]:
            raise MixesExamples(SEVERAL)
        return [operand]
    if operand in numbers.inserted_window_dims or operand in numbers.scatter_dims_to_operand_dims:
        raise MixesExamples(BY_POSITION)
    if indices is not None:
        raise MixesExamples(SEVERAL)
    window = [d for d in range(rank_of(eqn.invars[0])) if d not in numbers.inserted_window_dims and d not in batching]
    is_full = shape_of(eqn.invars[2])[updates] == shape_of(eqn.invars[0])[operand]
    if numbers.update_window_dims[window.index(operand)] != updates or not is_full:
        raise MixesExamples(BY_POSITION)
    return [operand]


def _scattered_dims(eqn: Any) -> list[int]:
    """Of each dimension of a scatter's indices but the last, which one of its updates it is."""
    window = eqn.params["dimension_numbers"].update_window_dims
    return [d for d in range(rank_of(eqn.invars[2])) if d not in window]


def sums_scattered_rows(eqn: Any, places: Places) -> bool:
    """Examples are rows of the updates, each with its own index, and the operand is the same for all."""
    operand, indices, updates = places
    batching = eqn.params["dimension_numbers"].scatter_indices_batching_dims
    if operand is not None or indices is None or updates is None or indices in batching:
        return False
    dims = _scattered_dims(eqn)
    return indices < len(dims) and dims[indices] == updates
