"""Which primitives keep the examples of a batch independent: one rule for each, over its parameters.

Sharding rules (Shardy's) do not answer this: a dimension that can be partitioned need not hold independent examples.
The partitioner may exchange data between devices, and it knows which device holds row 0 of `x.at[0].set(0)`. A
micro-batch has neither the other micro-batches nor the positions of its rows in the batch.

A rule of `APART` takes an equation and, for each operand, the dimension that holds the examples (None: the operand is
the same for all examples), and returns that dimension of each result. It promises that slice i of each result is a
function of slice i of those operands alone, the same function for each i, whatever the number of examples. A rule of
`SUMS` returns whether the result is the sum of the results for disjoint parts of the examples. A primitive that is in
neither table, or that has other parameters, is taken to mix the examples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from autopar.attention import ring

# Of each operand the dimension that holds the examples; None where it is the same for all of them.
Places = Sequence[int | None]
Rule = Callable[[Any, Places], list[int]]

COMBINES = "it combines examples"
BY_POSITION = "it addresses examples by their position in the batch"
SEVERAL = "it reads examples in several places"
AGAINST_OTHERS = "it holds examples against others"
UNKNOWN = "it is not known to keep examples apart"


class MixesExamples(Exception):
    """An equation does not keep examples apart; its text says why. Stays inside."""


def places_of_results(eqn: Any, places: Places) -> list[int]:
    """The dimension of each result that holds the examples, given that of each operand.

    Raises: MixesExamples where they are not kept apart.
    """
    rule = APART.get(eqn.primitive.name)
    if rule is None:
        raise MixesExamples(UNKNOWN)
    try:
        return rule(eqn, places)
    except KeyError as error:  # a parameter that this version of jax calls by another name
        raise MixesExamples(UNKNOWN) from error


def sums_over_examples(eqn: Any, places: Places) -> bool:
    """Whether the result on all examples is the sum of the results on parts of them."""
    rule = SUMS.get(eqn.primitive.name)
    return rule is not None and rule(eqn, places)


def reshaped(old: Sequence[int], new: Sequence[int], dim: int, outer: int, parts: int) -> tuple[int, int] | None:
    """(dimension, outer blocks) of the examples after a reshape; None where no dimension holds them.

    Examples lie in dimension `dim` of `old`, which is `outer` blocks of all examples each, cut into `parts` each.
    """
    blocks = math.prod(old[:dim]) * outer  # each is cut into `parts`, in the order of the elements
    before = 1
    for d, size in enumerate(new):
        if blocks % before == 0 and blocks < before * size:
            inner = blocks // before
            return (d, inner) if size % (inner * parts) == 0 else None
        before *= size
    return None


# What a rule reads


def _shape(variable: Any) -> tuple[int, ...]:
    return tuple(variable.aval.shape)


def _rank(variable: Any) -> int:
    return len(variable.aval.shape)


def _together(eqn: Any, places: Places) -> int:
    """The dimension that holds the examples in every operand but numbers."""
    found = {place for v, place in zip(eqn.invars, places, strict=True) if _shape(v)}
    if None in found:
        raise MixesExamples(AGAINST_OTHERS)
    if len(found) != 1:
        raise MixesExamples(SEVERAL)
    (dim,) = found
    assert dim is not None
    return dim


def _only(eqn: Any, places: Places, operand: int) -> int:
    """The dimension that holds the examples in one operand, the others being the same for all."""
    place = places[operand]
    if place is None or any(p is not None for i, p in enumerate(places) if i != operand):
        raise MixesExamples(SEVERAL if place is not None else COMBINES)
    return place


def _members(eqn: Any, name: str, rank: int) -> set[int]:
    """The dimensions that a parameter names, one or several, from the front."""
    value = eqn.params[name]
    return {int(a) % rank for a in (value if isinstance(value, (tuple, list)) else (value,))}


# Rules


def elementwise(eqn: Any, places: Places) -> list[int]:
    """Element by element; numbers, and dimensions of size one, are held against all examples."""
    found = {place for place in places if place is not None}
    if len(found) != 1:
        raise MixesExamples(SEVERAL)
    (dim,) = found
    for v, place in zip(eqn.invars, places, strict=True):
        if place is None and _shape(v) and _shape(v)[dim] != 1:
            raise MixesExamples(AGAINST_OTHERS)
    return [dim for _ in eqn.outvars]


def along(name: str) -> Rule:
    """Works along the dimensions of a parameter, which may not hold the examples."""

    def rule(eqn: Any, places: Places) -> list[int]:
        dim = _together(eqn, places)
        if dim in _members(eqn, name, _rank(eqn.invars[0])):
            raise MixesExamples(BY_POSITION)
        return [dim for _ in eqn.outvars]

    return rule


def reducing(name: str) -> Rule:
    """Drops the dimensions of a parameter."""

    def rule(eqn: Any, places: Places) -> list[int]:
        dim = _together(eqn, places)
        dropped = _members(eqn, name, _rank(eqn.invars[0]))
        if dim in dropped:
            raise MixesExamples(COMBINES)
        return [dim - sum(d < dim for d in dropped) for _ in eqn.outvars]

    return rule


def matrices(*ranks: int) -> Rule:
    """Linear algebra on the last dimensions of each operand: so many of the first operand, the second, ..."""

    def rule(eqn: Any, places: Places) -> list[int]:
        dim = _together(eqn, places)
        if any(dim >= _rank(v) - rank for v, rank in zip(eqn.invars, ranks, strict=True)):
            raise MixesExamples(COMBINES)
        return [dim for _ in eqn.outvars]

    return rule


def windowed(eqn: Any, places: Places) -> list[int]:
    """A window that slides: along the examples it covers one at a time."""
    dim, p = _together(eqn, places), eqn.params
    one = p["window_dimensions"][dim] == 1 and tuple(p["padding"][dim]) == (0, 0)
    for name in ("window_strides", "base_dilation", "window_dilation"):
        one = one and p.get(name, {dim: 1})[dim] == 1
    if not one:
        raise MixesExamples(COMBINES)
    return [dim for _ in eqn.outvars]


def of_keys(rule: Rule) -> Rule:
    """Random numbers of one key for each example. Only threefry makes of many keys what it makes of each."""

    def keys(eqn: Any, places: Places) -> list[int]:
        if str(eqn.invars[0].aval.dtype) != "key<fry>":
            raise MixesExamples("what it makes of a key depends on the other keys")
        if places[0] is None:
            raise MixesExamples("it draws for all examples from one key")
        return rule(eqn, places)

    return keys


def _transpose(eqn: Any, places: Places) -> list[int]:
    return [[int(d) for d in eqn.params["permutation"]].index(_together(eqn, places))]


def _broadcast_in_dim(eqn: Any, places: Places) -> list[int]:
    dim = _only(eqn, places, 0)
    target = int(eqn.params["broadcast_dimensions"][dim])
    if _shape(eqn.outvars[0])[target] != _shape(eqn.invars[0])[dim]:
        raise MixesExamples(COMBINES)
    return [target]


def _tile(eqn: Any, places: Places) -> list[int]:
    dim, reps = _together(eqn, places), eqn.params["reps"]
    if len(reps) != _rank(eqn.invars[0]) or reps[dim] != 1:
        raise MixesExamples(BY_POSITION)
    return [dim]


def _stack(eqn: Any, places: Places) -> list[int]:
    dim = _together(eqn, places)
    return [dim + (int(eqn.params["axis"]) <= dim)]


def _bitcast(eqn: Any, places: Places) -> list[int]:
    dim = _together(eqn, places)
    ranks = _rank(eqn.invars[0]), _rank(eqn.outvars[0])
    if dim == ranks[0] - 1 and ranks[0] > ranks[1]:  # several numbers become one
        raise MixesExamples(COMBINES)
    return [dim]


def _random_wrap(eqn: Any, places: Places) -> list[int]:
    dim = _together(eqn, places)
    if dim >= _rank(eqn.outvars[0]):  # the words of one key
        raise MixesExamples(COMBINES)
    return [dim]


def _random_gamma(eqn: Any, places: Places) -> list[int]:
    dim = _together(eqn, places)
    if dim >= _rank(eqn.invars[0]):
        raise MixesExamples("it draws for all examples from one key")
    return [dim]


def _slice(eqn: Any, places: Places) -> list[int]:
    dim, p = _together(eqn, places), eqn.params
    whole = p["start_indices"][dim] == 0 and p["limit_indices"][dim] == _shape(eqn.invars[0])[dim]
    if not whole or (p["strides"] or {dim: 1})[dim] != 1:
        raise MixesExamples(BY_POSITION)
    return [dim]


def _pad(eqn: Any, places: Places) -> list[int]:
    dim = _only(eqn, places, 0)
    if tuple(eqn.params["padding_config"][dim]) != (0, 0, 0):
        raise MixesExamples(BY_POSITION)
    return [dim]


def _dynamic_slice(eqn: Any, places: Places) -> list[int]:
    dim = _only(eqn, places, 0)
    if eqn.params["slice_sizes"][dim] != _shape(eqn.invars[0])[dim]:
        raise MixesExamples(BY_POSITION)
    return [dim]  # a slice of full size starts at 0, whatever its index says


def _dynamic_update_slice(eqn: Any, places: Places) -> list[int]:
    dim = places[0]
    operand, update = (_shape(v) for v in eqn.invars[:2])
    if dim is None or places[1] != dim or update[dim] != operand[dim] or any(p is not None for p in places[2:]):
        raise MixesExamples(BY_POSITION)
    return [dim]


def _gather(eqn: Any, places: Places) -> list[int]:
    """Examples are a dimension of the indices, or whole slices of the operand, or a batching dimension of both."""
    (operand, indices), numbers = places, eqn.params["dimension_numbers"]
    shape, (out,) = _shape(eqn.invars[0]), eqn.outvars
    of_indices = [d for d in range(_rank(out)) if d not in numbers.offset_dims]
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
    if indices == _rank(eqn.invars[1]) - 1:
        raise MixesExamples(BY_POSITION)
    return [of_indices[indices]]


def _scatter(eqn: Any, places: Places) -> list[int]:
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
    window = [d for d in range(_rank(eqn.invars[0])) if d not in numbers.inserted_window_dims and d not in batching]
    whole = _shape(eqn.invars[2])[updates] == _shape(eqn.invars[0])[operand]
    if numbers.update_window_dims[window.index(operand)] != updates or not whole:
        raise MixesExamples(BY_POSITION)
    return [operand]


def _scattered_dims(eqn: Any) -> list[int]:
    """Of each dimension of a scatter's indices but the last, which one of its updates it is."""
    window = eqn.params["dimension_numbers"].update_window_dims
    return [d for d in range(_rank(eqn.invars[2])) if d not in window]


def _dot_general(eqn: Any, places: Places) -> list[int]:
    (summed, batched), (left, right) = eqn.params["dimension_numbers"], places
    if left in batched[0] or right in batched[1]:
        if left not in batched[0] or right not in batched[1]:
            raise MixesExamples(AGAINST_OTHERS)
        if (number := list(batched[0]).index(left)) != list(batched[1]).index(right):
            raise MixesExamples(SEVERAL)
        return [number]
    if left is not None and right is not None:
        raise MixesExamples(SEVERAL)
    at = len(batched[0])
    for side, place in enumerate((left, right)):
        free = [d for d in range(_rank(eqn.invars[side])) if d not in summed[side] and d not in batched[side]]
        if place is not None:
            if place not in free:
                raise MixesExamples(AGAINST_OTHERS)
            return [at + free.index(place)]
        at += len(free)
    raise AssertionError("some operand holds examples")


def _convolution(eqn: Any, places: Places) -> list[int]:
    """Examples are images, or kernels of their own for each example beside one another."""
    numbers, (images, kernel) = eqn.params["dimension_numbers"], places
    if eqn.params["batch_group_count"] == 1:
        if images == numbers.lhs_spec[0] and kernel is None:
            return [int(numbers.out_spec[0])]
        if kernel == numbers.rhs_spec[0] and images is None and eqn.params["feature_group_count"] == 1:
            return [int(numbers.out_spec[1])]
    raise MixesExamples(SEVERAL if images is not None and kernel is not None else COMBINES)


def _attention(eqn: Any, places: Places) -> list[int]:
    form, gradients = eqn.params["form"], eqn.params["gradients"]
    operands, results = ring.letters(form, gradients)
    found = {names[p] for names, p in zip(operands, places, strict=True) if p is not None}
    if len(found) != 1:
        raise MixesExamples(SEVERAL)
    (letter,) = found
    apart = set(form.query) & set(form.key) & set(form.value) & set(form.out)
    if letter not in apart or any(letter not in names for names in results) or letter in ring.counted(form.score):
        raise MixesExamples(COMBINES)
    if any((letter in names) != (p is not None) for names, p in zip(operands, places, strict=True)):
        raise MixesExamples(AGAINST_OTHERS)
    return [names.index(letter) for names in results]


_ELEMENTWISE = (
    "abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2", "atanh", "bessel_i0e",
    "bessel_i1e", "cbrt", "ceil", "clamp", "clz", "complex", "conj", "convert_element_type", "copy", "cos", "cosh",
    "digamma", "div", "eq", "eq_to", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "ge", "gt", "igamma",
    "igamma_grad_a", "igammac", "imag", "integer_pow", "is_finite", "le", "le_to", "lgamma", "log", "log1p", "log2",
    "logistic", "lt", "lt_to", "max", "min", "mul", "mulhi", "name", "ne", "neg", "nextafter", "not",
    "one_minus_square", "or", "polygamma", "population_count", "pow", "random_clone", "random_seed", "real",
    "reduce_precision", "regularized_incomplete_beta", "rem", "round", "rsqrt", "select_n", "shift_left",
    "shift_right_arithmetic", "shift_right_logical", "sign", "sin", "sinh", "sqrt", "square", "stop_gradient", "sub",
    "tan", "tanh", "threefry2x32", "xor", "zeta",
)  # fmt: skip

APART: dict[str, Rule] = {
    **dict.fromkeys(_ELEMENTWISE, elementwise),
    # Shapes
    "transpose": _transpose,
    "broadcast_in_dim": _broadcast_in_dim,
    "squeeze": reducing("dimensions"),
    "concatenate": along("dimension"),
    "split": along("axis"),
    "stack": _stack,
    "unstack": reducing("axis"),
    "tile": _tile,
    "rev": along("dimensions"),
    "slice": _slice,
    "pad": _pad,
    "bitcast_convert_type": _bitcast,
    # Reductions and scans along other dimensions
    **dict.fromkeys(
        ("reduce_sum", "reduce_prod", "reduce_max", "reduce_min", "reduce_and", "reduce_or", "reduce_xor", "argmax",
         "argmin"),
        reducing("axes"),
    ),
    "reduce": reducing("dimensions"),
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"), along("axis")),
    "sort": along("dimension"),
    "top_k": along("axis"),
    "approx_top_k": along("reduction_dimension"),
    **dict.fromkeys(
        ("reduce_window_sum", "reduce_window_max", "reduce_window_min", "select_and_scatter_add",
         "select_and_gather_add"),
        windowed,
    ),
    # Products, and matrices of each example
    "dot_general": _dot_general,
    "conv_general_dilated": _convolution,
    "fft": lambda eqn, places: matrices(len(eqn.params["fft_lengths"]))(eqn, places),
    **dict.fromkeys(("cholesky", "eig", "eigh", "geqrf", "hessenberg", "lu", "qr", "schur", "svd"), matrices(2)),
    "lu_pivots_to_permutation": matrices(1),
    "householder_product": matrices(2, 1),
    "triangular_solve": matrices(2, 2),
    "tridiagonal_solve": matrices(1, 1, 1, 2),
    **dict.fromkeys(ring.PRIMITIVES, _attention),
    # Indices
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "gather": _gather,
    **dict.fromkeys(("scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max"), _scatter),
    # A key for each example
    "random_bits": of_keys(elementwise),
    "random_split": of_keys(elementwise),
    "random_fold_in": of_keys(elementwise),
    "random_gamma": of_keys(_random_gamma),
    "random_wrap": _random_wrap,
    "random_unwrap": elementwise,
}  # fmt: skip


def _reduces(eqn: Any, places: Places) -> bool:
    return places[0] in _members(eqn, "axes", _rank(eqn.invars[0]))


def _contracts(eqn: Any, places: Places) -> bool:
    (left, right), _ = eqn.params["dimension_numbers"]
    return places[0] in left and places[1] in right and list(left).index(places[0]) == list(right).index(places[1])


def _convolves(eqn: Any, places: Places) -> bool:
    """The gradient of a kernel: examples are what each number of the result is a sum over."""
    numbers = eqn.params["dimension_numbers"]
    return eqn.params["feature_group_count"] == 1 and list(places) == [numbers.lhs_spec[1], numbers.rhs_spec[1]]


def _scatters(eqn: Any, places: Places) -> bool:
    """Examples are rows of the updates, each with its own index, and the operand is the same for all."""
    operand, indices, updates = places
    batching = eqn.params["dimension_numbers"].scatter_indices_batching_dims
    if operand is not None or indices is None or updates is None or indices in batching:
        return False
    dims = _scattered_dims(eqn)
    return indices < len(dims) and dims[indices] == updates


SUMS: dict[str, Callable[[Any, Places], bool]] = {
    "reduce_sum": _reduces,
    "dot_general": _contracts,
    "conv_general_dilated": _convolves,
    "scatter-add": _scatters,
    "scatter-sub": _scatters,
}
