"""Which primitives keep the examples of a batch independent: one rule for each, over its parameters.

Sharding rules (Shardy's) do not answer this: a dimension that can be partitioned need not hold independent examples.
The partitioner may exchange data between devices, and it knows which device holds row 0 of `x.at[0].set(0)`. A
micro-batch has neither the other micro-batches nor the positions of its rows in the batch.

A rule of `APART` takes an equation and, for each operand, the dimension that holds the examples (None: the operand is
the same for all examples), and returns that dimension of each result. It promises that slice i of each result is a
function of slice i of those operands alone, the same function for each i, whatever the number of examples; a result for
which it returns None is the sum of those for disjoint parts of the examples. A rule of `SUMS` returns whether the
result is the sum of the results for disjoint parts of the examples. A primitive that is in neither table, or that has
other parameters, is taken to mix the examples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from autopar.ir.primitives import SCALED_PRODUCTS, SCATTERS, product_dimension_numbers
from autopar.ops.attention import ring
from autopar.ops.attention.form import counted, letters
from autopar.ops.kernels import cudnn, operation, pallas_grid
from autopar.ops.kernels.known import known_grid

# Of each operand the dimension that holds the examples; None where it is the same for all of them.
Places = Sequence[int | None]
# Of each result that dimension; None where the result is a sum over examples, `SHARED` where it reads none of them.
Results = Sequence[int | None]
SHARED = -1
Rule = Callable[[Any, Places], Results]

COMBINES = "it combines examples"
BY_POSITION = "it addresses examples by their position in the batch"
IN_ORDER = "it puts examples in order"
SEVERAL = "it reads examples in several places"
AGAINST_OTHERS = "it holds examples against others"
UNKNOWN = "it is not known to keep examples apart"


class MixesExamples(Exception):
    """An equation does not keep examples independent; its text is the reason. Internal."""


def shape_of(variable: Any) -> tuple[int, ...]:
    return tuple(variable.aval.shape)


def rank_of(variable: Any) -> int:
    return len(variable.aval.shape)


def common_place(eqn: Any, places: Places) -> int:
    """The dimension that holds the examples in every operand except scalars."""
    dims = {place for v, place in zip(eqn.invars, places, strict=True) if shape_of(v)}
    if None in dims:
        raise MixesExamples(AGAINST_OTHERS)
    if len(dims) != 1:
        raise MixesExamples(SEVERAL)
    (dim,) = dims
    assert dim is not None
    return dim


def only_place(places: Places) -> int:
    """The dimension that holds the examples in the first operand, the others being the same for all."""
    place, *others = places
    if place is None or any(p is not None for p in others):
        raise MixesExamples(SEVERAL if place is not None else COMBINES)
    return place


def named_dims(eqn: Any, name: str, rank: int) -> set[int]:
    """The dimensions that a parameter names, counted from the front."""
    value = eqn.params[name]
    return {int(a) % rank for a in (value if isinstance(value, (tuple, list)) else (value,))}


def elementwise(eqn: Any, places: Places) -> list[int]:
    """Element by element; scalars, and dimensions of size one, are combined with all examples."""
    dims = {place for place in places if place is not None}
    if len(dims) != 1:
        raise MixesExamples(SEVERAL)
    (dim,) = dims
    for v, place in zip(eqn.invars, places, strict=True):
        if place is None and shape_of(v) and shape_of(v)[dim] != 1:
            raise MixesExamples(AGAINST_OTHERS)
    return [dim for _ in eqn.outvars]


def along(name: str, reason: str = BY_POSITION) -> Rule:
    """Works along the dimensions of a parameter, which must not hold the examples; `reason`: what it would do there."""

    def rule(eqn: Any, places: Places) -> list[int]:
        dim = common_place(eqn, places)
        if dim in named_dims(eqn, name, rank_of(eqn.invars[0])):
            raise MixesExamples(reason)
        return [dim for _ in eqn.outvars]

    return rule


def reducing(name: str) -> Rule:
    """Drops the dimensions of a parameter."""

    def rule(eqn: Any, places: Places) -> list[int]:
        dim = common_place(eqn, places)
        dropped = named_dims(eqn, name, rank_of(eqn.invars[0]))
        if dim in dropped:
            raise MixesExamples(COMBINES)
        return [dim - sum(d < dim for d in dropped) for _ in eqn.outvars]

    return rule


def matrices(*ranks: int) -> Rule:
    """Linear algebra on the last dimensions of each operand: `ranks` are their numbers for each operand in order."""

    def rule(eqn: Any, places: Places) -> list[int]:
        dim = common_place(eqn, places)
        if any(dim >= rank_of(v) - rank for v, rank in zip(eqn.invars, ranks, strict=True)):
            raise MixesExamples(COMBINES)
        return [dim for _ in eqn.outvars]

    return rule


def windowed(eqn: Any, places: Places) -> list[int]:
    """A sliding window: along the examples it must cover one at a time."""
    dim, p = common_place(eqn, places), eqn.params
    is_single = p["window_dimensions"][dim] == 1 and tuple(p["padding"][dim]) == (0, 0)
    for name in ("window_strides", "base_dilation", "window_dilation"):
        is_single = is_single and p.get(name, {dim: 1})[dim] == 1
    if not is_single:
        raise MixesExamples(COMBINES)
    return [dim for _ in eqn.outvars]


def of_keys(rule: Rule) -> Rule:
    """Random numbers of one key for each example. Only threefry gives for many keys the numbers of each single key."""

    def keys(eqn: Any, places: Places) -> Results:
        if str(eqn.invars[0].aval.dtype) != "key<fry>":
            raise MixesExamples("what it makes of a key depends on the other keys")
        if places[0] is None:
            raise MixesExamples("it draws for all examples from one key")
        return rule(eqn, places)

    return keys


# Rules for examples in slices, gathers and scatters.


def static_slice(eqn: Any, places: Places) -> list[int]:
    dim, p = common_place(eqn, places), eqn.params
    is_full = p["start_indices"][dim] == 0 and p["limit_indices"][dim] == shape_of(eqn.invars[0])[dim]
    if not is_full or (p["strides"] or {dim: 1})[dim] != 1:
        raise MixesExamples(BY_POSITION)
    return [dim]


def pad(eqn: Any, places: Places) -> list[int]:
    dim = only_place(places)
    if tuple(eqn.params["padding_config"][dim]) != (0, 0, 0):
        raise MixesExamples(BY_POSITION)
    return [dim]


def dynamic_slice(eqn: Any, places: Places) -> list[int]:
    dim = only_place(places)
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


def places_of_results(eqn: Any, places: Places) -> Results:
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


def _transpose(eqn: Any, places: Places) -> list[int]:
    return [[int(d) for d in eqn.params["permutation"]].index(common_place(eqn, places))]


def _broadcast_in_dim(eqn: Any, places: Places) -> list[int]:
    dim = only_place(places)
    target = int(eqn.params["broadcast_dimensions"][dim])
    if shape_of(eqn.outvars[0])[target] != shape_of(eqn.invars[0])[dim]:
        raise MixesExamples(COMBINES)
    return [target]


def _tile(eqn: Any, places: Places) -> list[int]:
    dim, reps = common_place(eqn, places), eqn.params["reps"]
    if len(reps) != rank_of(eqn.invars[0]) or reps[dim] != 1:
        raise MixesExamples(BY_POSITION)
    return [dim]


def _stack(eqn: Any, places: Places) -> list[int]:
    dim = common_place(eqn, places)
    return [dim + (int(eqn.params["axis"]) <= dim)]


def _bitcast(eqn: Any, places: Places) -> list[int]:
    dim = common_place(eqn, places)
    ranks = rank_of(eqn.invars[0]), rank_of(eqn.outvars[0])
    if dim == ranks[0] - 1 and ranks[0] > ranks[1]:  # several numbers become one
        raise MixesExamples(COMBINES)
    return [dim]


def _random_wrap(eqn: Any, places: Places) -> list[int]:
    dim = common_place(eqn, places)
    if dim >= rank_of(eqn.outvars[0]):  # the words of one key
        raise MixesExamples(COMBINES)
    return [dim]


def _random_gamma(eqn: Any, places: Places) -> list[int]:
    dim = common_place(eqn, places)
    if dim >= rank_of(eqn.invars[0]):
        raise MixesExamples("it draws for all examples from one key")
    return [dim]


def _dot_general(eqn: Any, places: Places) -> list[int]:
    (summed, batched), (left, right) = product_dimension_numbers(eqn), places
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
        free = [d for d in range(rank_of(eqn.invars[side])) if d not in summed[side] and d not in batched[side]]
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
    operands, results = letters(form, gradients)
    apart = set(form.query) & set(form.key) & set(form.value) & set(form.out) - counted(form.score)
    letter = _along(operands, places, lambda x: x in apart and all(x in names for names in results))
    return [names.index(letter) for names in results]


def _along(operands: Sequence[Sequence[Any]], places: Places, may_split: Callable[[Any], bool]) -> Any:
    """What examples lie along, of the names of dimensions: it may be split, and holds them wherever it stands."""
    found = {names[p] for names, p in zip(operands, places, strict=True) if p is not None}
    if len(found) != 1:
        raise MixesExamples(SEVERAL)
    (name,) = found
    if not may_split(name):
        raise MixesExamples(COMBINES)
    if any((name in names) != (p is not None) for names, p in zip(operands, places, strict=True)):
        raise MixesExamples(AGAINST_OTHERS)
    return name


def _kernel(eqn: Any, places: Places) -> list[int | None]:
    """Examples are a factor that may be split. Gradients of operands that all examples share are sums over them."""
    rule = eqn.params["function"].rule
    name = _along(rule.operands, places, lambda x: x in rule.split)
    without = None if name in rule.summed else SHARED
    return [x.index(name) if name in x else without for x in rule.results]


def _pallas_call(eqn: Any, places: Places) -> list[int | None]:
    """Examples are a grid dimension whose cells are independent, one cell or run of cells for each of them."""
    grid = known_grid(eqn)
    if grid is None:
        raise MixesExamples(UNKNOWN)
    g = _along(grid.operands, places, lambda g: g is not None and g in grid.single)
    return [dims.index(g) if g in dims else SHARED for dims in grid.results]


def _scaled_product(eqn: Any, places: Places) -> list[int]:
    """Blocks lie along the inner dimension: an operand and its scales have their examples in one place."""
    if list(places[:2]) != list(places[2:]):
        raise MixesExamples(AGAINST_OTHERS)
    return _dot_general(eqn, places[:2])


def _cudnn_attention(eqn: Any, places: Places) -> list[int | None]:
    if not cudnn.is_cudnn_attention(eqn):
        raise MixesExamples(UNKNOWN)
    expected, results = cudnn.examples_of(eqn)
    if list(places) != expected:
        raise MixesExamples(COMBINES)
    return results


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
    "slice": static_slice,
    "pad": pad,
    "bitcast_convert_type": _bitcast,
    # Reductions and scans along other dimensions
    **dict.fromkeys(
        ("reduce_sum", "reduce_prod", "reduce_max", "reduce_min", "reduce_and", "reduce_or", "reduce_xor", "argmax",
         "argmin"),
        reducing("axes"),
    ),
    "reduce": reducing("dimensions"),
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"), along("axis", COMBINES)),
    "sort": along("dimension", IN_ORDER),
    "top_k": along("axis", IN_ORDER),
    "approx_top_k": along("reduction_dimension", IN_ORDER),
    **dict.fromkeys(
        ("reduce_window_sum", "reduce_window_max", "reduce_window_min", "select_and_scatter_add",
         "select_and_gather_add"),
        windowed,
    ),
    # Products, and matrices of each example
    "dot_general": _dot_general,
    **dict.fromkeys(SCALED_PRODUCTS, _scaled_product),
    "conv_general_dilated": _convolution,
    "fft": lambda eqn, places: matrices(len(eqn.params["fft_lengths"]))(eqn, places),
    **dict.fromkeys(("cholesky", "eig", "eigh", "geqrf", "hessenberg", "lu", "qr", "schur", "svd"), matrices(2)),
    "lu_pivots_to_permutation": matrices(1),
    "householder_product": matrices(2, 1),
    "triangular_solve": matrices(2, 2),
    "tridiagonal_solve": matrices(1, 1, 1, 2),
    **dict.fromkeys(ring.PRIMITIVES, _attention),
    operation.NAME: _kernel,
    pallas_grid.NAME: _pallas_call,
    **dict.fromkeys(cudnn.NAMES, _cudnn_attention),
    # Indices
    "dynamic_slice": dynamic_slice,
    "dynamic_update_slice": dynamic_update_slice,
    "gather": gather,
    **dict.fromkeys(SCATTERS, scatter),
    # A key for each example
    "random_bits": of_keys(elementwise),
    "random_split": of_keys(elementwise),
    "random_fold_in": of_keys(elementwise),
    "random_gamma": of_keys(_random_gamma),
    "random_wrap": _random_wrap,
    "random_unwrap": elementwise,
}  # fmt: skip


def _reduces(eqn: Any, places: Places) -> bool:
    return places[0] in named_dims(eqn, "axes", rank_of(eqn.invars[0]))


def _contracts(eqn: Any, places: Places) -> bool:
    (left, right), _ = product_dimension_numbers(eqn)
    if list(places[:2]) != list(places[2:] or places[:2]):  # of a scaled product: operands, and their scales
        return False
    return places[0] in left and places[1] in right and list(left).index(places[0]) == list(right).index(places[1])


def _convolves(eqn: Any, places: Places) -> bool:
    """The gradient of a kernel: each number of the result is a sum over examples."""
    numbers = eqn.params["dimension_numbers"]
    return eqn.params["feature_group_count"] == 1 and list(places) == [numbers.lhs_spec[1], numbers.rhs_spec[1]]


SUMS: dict[str, Callable[[Any, Places], bool]] = {
    "reduce_sum": _reduces,
    **dict.fromkeys(("dot_general", *SCALED_PRODUCTS), _contracts),
    "conv_general_dilated": _convolves,
    "scatter-add": sums_scattered_rows,
    "scatter-sub": sums_scattered_rows,
}
