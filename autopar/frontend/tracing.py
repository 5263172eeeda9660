"""From a Python function to a `TracedStep`: the jaxpr, its trees, and which leaves are state, batch and constants."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from autopar.common import jax_compat
from autopar.common.jax_compat import variables_of
from autopar.errors import AutoparError, InvalidArgumentError
from autopar.frontend.batched_gathers import with_batched_gathers
from autopar.frontend.callbacks import check_effects
from autopar.frontend.drop_shardings import Removed, without_placements
from autopar.frontend.fingerprints import first_difference, jaxpr_fingerprint
from autopar.frontend.static_leaves import is_of_another_library, set_apart
from autopar.ir.traced_step import METADATA, TYPES, Placement, TracedStep

STATIC = "close over it, or make a tuple or a frozen dataclass of it: a leaf that has a hash is static"
CONVERT = (
    "convert it: np.asarray(x), or jax.numpy.from_dlpack(x) for a tensor of another library; jax.jit takes neither"
)
# How the warning of a function that is not pure begins.
IMPURE = "two traces of the function differ"


def abstract(leaf: Any, path: str, hint: str = STATIC) -> jax.ShapeDtypeStruct:
    """Shape and dtype of a leaf of the arguments or results.

    Raises: InvalidArgumentError when the leaf is not an array, or has symbolic dimensions.
    """
    if jax_compat.is_reference(leaf):
        raise InvalidArgumentError(
            where=path,
            expected="an array",
            got="a reference to one (jax.new_ref)",
            hint="pass its value, ref[...], and return the new one; inside of the step it may be a reference",
        )
    if isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct)) or hasattr(leaf, "__jax_array__"):
        if isinstance(leaf, jax.ShapeDtypeStruct) and variables_of(leaf.shape):
            raise InvalidArgumentError(
                where=path,
                expected="numbers as dimensions: a plan is made for one size",
                got=f"({', '.join(map(str, leaf.shape))})",
                hint="give the size; autopar.fit evaluates symbolic dimensions at the sizes that it tries",
            )
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=getattr(leaf, "weak_type", False))
    if isinstance(leaf, (bool, int, float, complex)) and not isinstance(leaf, np.generic):
        return jax.ShapeDtypeStruct((), jax.numpy.asarray(leaf).dtype, weak_type=is_weak(leaf))
    numbers = (np.number, np.bool_)
    if isinstance(leaf, (np.ndarray, np.generic)) and any(jax.dtypes.issubdtype(leaf.dtype, n) for n in numbers):
        return jax.ShapeDtypeStruct(leaf.shape, jax.dtypes.canonicalize_dtype(leaf.dtype))
    raise InvalidArgumentError(
        where=path,
        expected="an array, a number, a jax.ShapeDtypeStruct or what has a hash",
        got=f"{type(leaf).__name__} ({str(leaf)[:60]})",
        hint=CONVERT if is_of_another_library(leaf) else hint,
    )


def is_weak(leaf: Any) -> bool:
    """Whether the type of a leaf is weak in JAX: Python's numbers, and arrays made of them."""
    if isinstance(leaf, (bool, int, float, complex)):
        return not isinstance(leaf, (bool, np.generic))
    return bool(getattr(leaf, "weak_type", False))


def flatten_arguments(args: Sequence[Any], names: Sequence[str]) -> tuple[list[Any], Any, list[str], list[int]]:
    """(leaves, tree, readable paths, the argument each leaf belongs to), with static leaves in the tree."""
    leaves, paths, owner = [], [], []
    args = tuple(map(set_apart, args))
    for i, (arg, name) in enumerate(zip(args, names, strict=True)):
        for path, leaf in _leaves_with_paths((arg,), (name,)):
            leaves.append(leaf)
            paths.append(path)
            owner.append(i)
    return leaves, jax.tree.structure(args), paths, owner


# The one leaf of a variable of Flax (`nnx.Variable`, `nn.Partitioned`), which has the variable's name.
_BOXED = jax.tree_util.GetAttrKey("value")


def _leaves_with_paths(args: Sequence[Any], names: Sequence[str]) -> Iterator[tuple[str, Any]]:
    for arg, name in zip(args, names, strict=True):
        rows = jax.tree_util.tree_flatten_with_path(arg)[0]
        inside = collections.Counter(path[:-1] for path, _ in rows)
        for path, leaf in rows:
            is_boxed = path and path[-1] == _BOXED and inside[path[:-1]] == 1
            yield name + jax.tree_util.keystr(path[:-1] if is_boxed else path), leaf


@dataclasses.dataclass(slots=True)
class _Results:
    """The results of a function as it is traced; `changed_in_place` are paths of arguments that it replaced."""

    tree: Any = None
    paths: tuple[str, ...] = ()
    changed_in_place: tuple[str, ...] = ()


def _flat_function(
    function: Callable[..., Any], name: str, in_tree: Any, in_paths: Sequence[str], names: Sequence[str]
) -> tuple[Callable[..., list[Any]], _Results]:
    """A function from leaves to leaves, and its results as traced. Raises, when traced: InvalidArgumentError."""
    results = _Results()

    def flat(*flat_args: Any) -> list[Any]:
        arguments = jax.tree.unflatten(in_tree, flat_args)
        before = dict(zip(in_paths, jax.tree.leaves(set_apart(arguments)), strict=True))
        out = set_apart(function(*arguments))
        try:
            after = dict(_leaves_with_paths(set_apart(arguments), names))
        except (TypeError, ValueError):  # the function put into its own copy what is no tree for jax
            after = {}
        results.changed_in_place = tuple(path for path, leaf in before.items() if after.get(path) is not leaf)
        with_paths, tree = jax.tree_util.tree_flatten_with_path(out)
        if results.tree is None:
            results.tree = tree
        results.paths = tuple("result" + jax.tree_util.keystr(path) for path, _ in with_paths)
        hint = "return arrays, numbers and what has a hash: a tuple or a frozen dataclass"
        for path, (_, leaf) in zip(results.paths, with_paths, strict=True):
            abstract(leaf, f"{name}, {path}", hint)
        return [leaf for _, leaf in with_paths]

    return flat, results


def trace(
    function: Callable[..., Any],
    args: Sequence[Any],
    *,
    names: Sequence[str],
    donate: Sequence[int],
    batch: Sequence[int],
    example_dims: Mapping[int, int | None] | None = None,
    layouts: Mapping[str, NamedSharding] = MappingProxyType({}),
) -> TracedStep:
    """Traces `function` on abstract arguments.

    `names`, `donate` and `batch` are over `args`, static arguments already bound; `example_dims` are over leaves;
    `layouts` are those that the author gave to leaves, by their paths. Raises: InvalidArgumentError, UnsupportedError.
    """
    leaves, in_tree, in_paths, owner = flatten_arguments(args, names)
    in_avals = tuple(abstract(leaf, path) for leaf, path in zip(leaves, in_paths, strict=True))
    name = name_of(function)
    flat, results = _flat_function(function, name, in_tree, in_paths, names)
    types = tuple(map(jax_compat.explicit_type, leaves))

    def traced_on(avals: Sequence[jax.ShapeDtypeStruct]) -> Any:
        # A fresh function object, so that jax does not answer from its cache of traces.
        called = jax_compat.traced_as(flat, function, in_paths)
        return jax_compat.plain_jaxpr(called, *map(_typed, avals, in_avals, types))

    try:
        original = traced_on(in_avals)
    except Exception as error:  # the user's own code may raise anything
        if not isinstance(error, AutoparError):
            error.add_note(f"autopar: raised while {name} was traced with {_told(names, owner, in_avals)}")
        raise
    check_effects(original, name)
    paths, result_avals = (*in_paths, *results.paths), [v.aval for v in jax_compat.open_jaxpr(original).outvars]
    (closed, removed), out_avals = _as_planned(original, paths, layouts), tuple(map(jax_compat.struct_of, result_avals))
    trace_again = jax_compat.under_present_mesh(lambda avals: _as_planned(traced_on(avals), paths, layouts))
    return TracedStep(
        name=name,
        jaxpr=jax_compat.open_jaxpr(closed),
        constants=tuple(jax_compat.jaxpr_consts(closed)),
        in_tree=in_tree,
        out_tree=results.tree,
        in_avals=in_avals,
        out_avals=out_avals,
        in_paths=tuple(in_paths),
        out_paths=results.paths,
        argument_of=tuple(owner),
        donated=frozenset(i for i, o in enumerate(owner) if o in donate),
        batch=frozenset(i for i, o in enumerate(owner) if o in batch),
        example_dims=dict(example_dims or {}),
        tied=tie_state(args, donate, results.tree, in_avals, out_avals),
        fingerprint=jaxpr_fingerprint(closed),
        retrace=lambda avals: trace_again(avals)[0],
        trace_again=trace_again,
        placements=removed.placements,
        written=removed.written,
        changed_in_place=results.changed_in_place,
        result_types=_result_types(leaves, types, result_avals),
        untyped=frozenset(i for i, of_type in enumerate(types) if of_type is None),
    )


def _told(names: Sequence[str], owner: Sequence[int], avals: Sequence[jax.ShapeDtypeStruct]) -> str:
    """The arguments of a function in short, so that one in the place of another is seen."""
    told = []
    for i, name in enumerate(names):
        own = [aval for aval, of in zip(avals, owner, strict=True) if of == i]
        more = f" and {len(own) - 1} more arrays" if len(own) > 1 else ""
        told.append(f"{name}: {own[0].dtype}{list(own[0].shape)}{more}" if own else f"{name}: no array")
    return ", ".join(told)


def _as_planned(closed: Any, paths: Sequence[str], layouts: Mapping[str, NamedSharding]) -> tuple[Any, Removed]:
    """A traced step as it is planned and run, which computes the same numbers; what is said of placements, by types of
    arguments and results too, or else by the author (`layouts`).
    """
    inner, known = jax_compat.open_jaxpr(closed), []
    for atom, path in zip((*inner.invars, *inner.outvars), paths, strict=True):
        of_type = jax_compat.explicit_type(atom.aval)
        known.append((of_type or layouts.get(path), Placement(METADATA if of_type is None else TYPES, path)))
    cleaned, removed = without_placements(closed, known)
    return with_batched_gathers(cleaned), removed


def _typed(
    aval: jax.ShapeDtypeStruct, given: jax.ShapeDtypeStruct, explicit: NamedSharding | None
) -> jax.ShapeDtypeStruct:
    """A shape with the sharding that the type of the given argument of this shape has."""
    return aval if explicit is None or aval.shape != given.shape else aval.update(sharding=explicit)


def _result_types(
    leaves: Sequence[Any], types: Sequence[NamedSharding | None], results: Sequence[Any]
) -> tuple[NamedSharding, ...]:
    """The sharding of each result as its type has it, where arguments or results lie in an explicit mesh."""
    found = [jax_compat.explicit_type(result) for result in results]
    mesh = jax_compat.explicit_mesh(leaves)
    if mesh is None or not any(t is not None for t in (*types, *found)):
        return ()
    return tuple(NamedSharding(mesh, PartitionSpec() if t is None else t.spec) for t in found)


def name_of(function: Any) -> str:
    """The name of a function, of the function of a `functools.partial`, or of a callable object's class."""
    while not hasattr(function, "__name__") and hasattr(function, "func"):
        function = function.func
    return getattr(function, "__name__", type(function).__name__)


def impurity(traced: TracedStep) -> str | None:
    """Traces the function a second time. Returns a warning if that gives another computation.

    Plain `jax.jit` keeps what the first trace gives, and so does a step, whose micro-batches are cut out of that trace.
    """
    second_trace = traced.retrace(traced.in_avals)
    if jaxpr_fingerprint(second_trace) == traced.fingerprint:
        return None
    at = first_difference(traced.retrace(traced.in_avals), second_trace)
    return (
        f"{IMPURE}{f' ({at})' if at else ''}; the first is run every time, as under jax.jit. "
        "Does it read or change something outside of its arguments (a counter, the time, "
        "numpy's random numbers)? Pass that in as an argument, or use jax.random with a key in the state"
    )


def checked_when_traced_again(traced: TracedStep, warn: Callable[[str], None]) -> TracedStep:
    """The step whose function is checked (`impurity`) when `is_pure` is first called, which tracing it on other shapes
    does: of a function that is not pure that would be another computation.
    """
    found: list[bool] = []

    def is_pure() -> bool:
        if not found:
            impure = impurity(traced)
            found.append(impure is None)
            if impure is not None:
                warn(impure)
        return found[0]

    def retrace(avals: Sequence[jax.ShapeDtypeStruct]) -> Any:
        if not is_pure():
            raise TypeError("two traces of the function differ: what a micro-batch does cannot be told from a trace")
        return traced.retrace(avals)

    return dataclasses.replace(traced, retrace=retrace, is_pure=is_pure)


def tie_state(
    args: Sequence[Any],
    donate: Sequence[int],
    out_tree: Any,
    in_avals: Sequence[jax.ShapeDtypeStruct],
    out_avals: Sequence[jax.ShapeDtypeStruct],
) -> dict[int, int]:
    """Pairs each leaf of a donated argument with the output leaf that replaces it.

    The output itself, or one of its parts at the first level, in order, must have the argument's tree and shapes.
    """
    outputs: list[tuple[Any, int]] = [(out_tree, 0)]
    start = 0
    for child in out_tree.children() if not jax.tree_util.treedef_is_leaf(out_tree) else ():
        outputs.append((child, start))
        start += child.num_leaves
    tied: dict[int, int] = {}
    used: set[int] = set()
    first = 0
    for i, arg in enumerate(args):
        tree: Any = jax.tree.structure(arg)
        n = tree.num_leaves
        if i in donate and n:
            for child, at in outputs:
                matches = (
                    child == tree
                    and at not in used
                    and all(
                        a.shape == b.shape and a.dtype == b.dtype
                        for a, b in zip(in_avals[first : first + n], out_avals[at : at + n], strict=True)
                    )
                )
                if matches:
                    tied.update({first + k: at + k for k in range(n)})
                    used.update(range(at, at + n))
                    break
        first += n
    return tied
