"""Steps that change NNX objects in place: split into graphs and arrays, run as pure functions, written back.

This follows `nnx.jit`: modules, optimizers, metrics and Rngs among the arguments share references, also with each
other. The graph of an object is static: it is part of the tree of the arguments. An argument that the step does not
change is in no result. `flax.nnx` is used where the program has loaded it, and never imported.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from autopar.errors import UnsupportedError
from autopar.frontend.tracing import tie_state
from autopar.ir.traced_step import TracedStep


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class ObjectState:
    """An object in two parts: its graph, which is static, and an `nnx.State` of its arrays, or of their shapes."""

    graph: Any
    state: Any


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Returned:
    """The results of a step with objects: each object argument's new state (None if unchanged), and `result`.

    `names` are those of the object arguments.
    """

    names: tuple[str, ...]
    states: tuple[Any, ...]
    result: Any


@dataclasses.dataclass(frozen=True, slots=True)
class _Key:
    """A step of a path as Python writes it."""

    text: str

    def __str__(self) -> str:
        return self.text


def _flatten_state(node: ObjectState) -> tuple[list[Any], Any]:
    leaves, tree = jax.tree.flatten(node.state)
    return leaves, (node.graph, tree)


def _flatten_state_with_paths(node: ObjectState) -> tuple[list[Any], Any]:
    leaves, tree = jax.tree_util.tree_flatten_with_path(node.state)
    return [(_Key(_path_text(path)), leaf) for path, leaf in leaves], (node.graph, tree)


def _unflatten_state(aux: Any, leaves: Iterable[Any]) -> ObjectState:
    graph, tree = aux
    return ObjectState(graph, jax.tree.unflatten(tree, leaves))


def _flatten_returned_with_paths(node: Returned) -> tuple[list[Any], Any]:
    keys = [*(_Key(f".{name}") for name in node.names), _Key("")]
    return list(zip(keys, (*node.states, node.result), strict=True)), node.names


def _unflatten_returned(names: tuple[str, ...], children: Iterable[Any]) -> Returned:
    *states, result = children
    return Returned(names, tuple(states), result)


jax.tree_util.register_pytree_with_keys(ObjectState, _flatten_state_with_paths, _unflatten_state, _flatten_state)
jax.tree_util.register_pytree_with_keys(
    Returned, _flatten_returned_with_paths, _unflatten_returned, lambda node: ((*node.states, node.result), node.names)
)


def _path_text(path: Sequence[Any]) -> str:
    """`.layers[0].kernel` for the path of an array in an `nnx.State`."""
    text = ""
    for key in path:
        if isinstance(key, jax.tree_util.DictKey):
            name = key.key
            text += f".{name}" if isinstance(name, str) and name.isidentifier() else f"[{name!r}]"
        elif not (isinstance(key, jax.tree_util.GetAttrKey) and key.name == "value" and key is path[-1]):
            text += str(key)
    return text


def _is_leaf(x: Any) -> bool:
    nnx = sys.modules["flax.nnx"]
    return isinstance(x, (nnx.Pytree, nnx.Variable, nnx.State))


def _is_object(x: Any) -> bool:
    nnx = sys.modules["flax.nnx"]
    return isinstance(x, (nnx.Pytree, nnx.Variable))


def is_object(x: Any) -> bool:
    """Whether a value is an NNX object itself."""
    return "flax.nnx" in sys.modules and _is_object(x)


def holds_objects(tree: Any) -> bool:
    """Whether a tree holds NNX objects. An `nnx.State` is not one: it is a tree of arrays."""
    if "flax.nnx" not in sys.modules:
        return False
    return any(map(_is_object, jax.tree.leaves(tree, is_leaf=_is_leaf)))


def is_split(arg: Any) -> bool:
    """Whether an argument holds objects that are split."""
    leaves = jax.tree.leaves(arg, is_leaf=lambda x: isinstance(x, ObjectState))
    return any(isinstance(x, ObjectState) for x in leaves)


def _split(trees: Sequence[Any], tag: Any = None) -> list[Any]:
    """Trees with `ObjectState`s in place of objects, in one context: a repeated object is a reference."""
    nnx = sys.modules["flax.nnx"]
    with nnx.split_context(tag) as context:

        def split(x: Any) -> Any:
            return ObjectState(*context.split(x)) if _is_object(x) else x

        return [jax.tree.map(split, t, is_leaf=_is_leaf) if holds_objects(t) else t for t in trees]


def _merge(trees: Sequence[Any], tag: Any = None, inner: bool | None = None) -> list[Any]:
    """The inverse of `_split`."""
    nnx = sys.modules["flax.nnx"]
    with nnx.merge_context(tag, inner) as context:

        def merge(x: Any) -> Any:
            return context.merge(x.graph, x.state) if isinstance(x, ObjectState) else x

        def merge_tree(tree: Any) -> Any:
            return jax.tree.map(merge, tree, is_leaf=lambda x: isinstance(x, ObjectState))

        return [merge_tree(t) if is_split(t) else t for t in trees]


def split(args: Sequence[Any]) -> tuple[Any, ...]:
    """Arguments with their objects split; the others as they are."""
    if not any(map(holds_objects, args)):
        return tuple(args)
    return tuple(_split(args))


def merged(tree: Any) -> Any:
    """A tree with new objects in place of the split ones."""
    return _merge([tree])[0] if is_split(tree) else tree


def run_and_write_back(run: Callable[..., Any], args: Sequence[Any]) -> Any:
    """Runs `run(*split(args))` and writes the new states into the objects of `args`. Returns the step's own result."""
    nnx, tag = sys.modules["flax.nnx"], object()
    with nnx.update_context(tag):
        out = run(*_split(args, tag))
        *_, result = _merge([*out.states, out.result], tag, inner=False)
    return result


def pure(function: Callable[..., Any], args: Sequence[Any], names: Sequence[str]) -> Any:
    """`function` on arguments with split objects, as a pure function to `Returned`; on others its own result."""
    positions = [i for i, arg in enumerate(args) if is_split(arg)]
    if not positions:
        return function(*args)
    nnx, tag = sys.modules["flax.nnx"], object()
    with nnx.update_context(tag):
        objects = _merge([args[i] for i in positions], tag, inner=True)
        before = [jax.tree.flatten(x) for x in _split(objects, tag)]  # at once: the variables in there are the objects'
        of = dict(zip(positions, objects, strict=True))
        result = function(*(of.get(i, arg) for i, arg in enumerate(args)))
        *after, result = _split([*objects, result], tag)
    changed = [_changed(a, b) for a, b in zip(before, after, strict=True)]
    coming = [b for b, is_changed in zip(after, changed, strict=True) if is_changed]
    if is_split(result) or any(map(_refers_outside, coming)):
        changed = [True] * len(after)  # what is referred to must come back too
    states = tuple(b if is_changed else None for b, is_changed in zip(after, changed, strict=True))
    return Returned(tuple(names[i] for i in positions), states, result)


def _changed(before: tuple[list[Any], Any], after: Any) -> bool:
    leaves, tree = jax.tree.flatten(after)
    return bool(tree != before[1] or any(a is not b for a, b in zip(leaves, before[0], strict=True)))


def _refers_outside(tree: Any) -> bool:
    """Whether a graph has references to nodes that belong to other arguments."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, ObjectState))
    nodes = [node for x in leaves if isinstance(x, ObjectState) for node in x.graph.nodes]
    references = {node.index for node in nodes if type(node).__name__ == "NodeRef"}
    return not references <= {
        node.index for node in nodes if type(node).__name__ != "NodeRef" and hasattr(node, "index")
    }


def numbers_of_objects(args: Sequence[Any]) -> tuple[int, ...]:
    """The numbers of the arguments that are or hold objects, which a step changes."""
    return tuple(i for i, arg in enumerate(args) if is_split(arg))


def tie_objects(traced: TracedStep, args: Sequence[Any], donate: Sequence[int]) -> TracedStep:
    """A step with split objects, in which each array of a donated object is tied to its new value."""
    position = {path: i for i, path in enumerate(traced.out_paths)}
    objects = {i for i, arg in enumerate(args) if is_split(arg)}
    tied: dict[int, int] = {}
    for i, (path, owner) in enumerate(zip(traced.in_paths, traced.argument_of, strict=True)):
        replaced_by = position.get(f"result.{path}") if owner in objects and owner in donate else None
        if replaced_by is not None:
            a, b = traced.in_avals[i], traced.out_avals[replaced_by]
            if (a.shape, a.dtype) == (b.shape, b.dtype):
                tied[i] = replaced_by
    result = traced.out_tree.children()[-1]
    first = traced.out_tree.num_leaves - result.num_leaves
    plain_arguments = [i for i in donate if i not in objects]
    for i, at in tie_state(args, plain_arguments, result, traced.in_avals, traced.out_avals[first:]).items():
        tied[i] = first + at
    untied = {i for i in objects if not any(owner == i and k in tied for k, owner in enumerate(traced.argument_of))}
    donated = frozenset(k for k in traced.donated if traced.argument_of[k] not in untied)
    return dataclasses.replace(traced, tied=tied, donated=donated)


def layouts_in_metadata(args: Sequence[Any], names: Sequence[str]) -> dict[str, NamedSharding]:
    """The shardings that the metadata of variables name (`nnx.with_partitioning`), by the paths of their arrays.

    Their mesh is the one that is set, or that the array was made in; names of another mesh, and logical ones without
    rules, are none.
    """

    nnx: Any = sys.modules.get("flax.nnx")

    def specs(x: Any) -> list[Any]:
        leaves: list[Any] = jax.tree.leaves(x)
        tree: Any = jax.tree.structure(x)
        is_one = isinstance(x, nnx.Variable) and len(leaves) == 1 and tree.num_nodes == 2
        if not is_one or not hasattr(leaves[0], "shape"):
            return [None] * len(leaves)  # a number, a text, a tree of arrays: a specification says nothing of them
        return jax.tree.leaves(nnx.get_partition_spec(x))

    layouts = {}
    for arg, name in zip(args, names, strict=True):
        if not is_split(arg):
            continue
        variables = jax.tree.leaves(_with_states(arg), is_leaf=lambda x: isinstance(x, nnx.Variable))
        of_leaves = [spec for x in variables for spec in specs(x)]
        for (path, leaf), spec in zip(jax.tree_util.tree_flatten_with_path(arg)[0], of_leaves, strict=True):
            if not isinstance(spec, PartitionSpec) or not any(spec):
                continue
            axes = {axis for entry in spec for axis in (entry if isinstance(entry, tuple) else (entry,)) if axis}
            meshes = (jax.sharding.get_abstract_mesh(), getattr(getattr(leaf, "sharding", None), "mesh", None))
            mesh = next((m for m in meshes if m is not None and axes <= set(m.axis_names)), None)
            if mesh is not None:
                layouts[name + jax.tree_util.keystr(path)] = NamedSharding(mesh, spec)
    return layouts


def idle_optimizers(traced: TracedStep, args: Sequence[Any], names: Sequence[str]) -> list[str]:
    """A warning for each optimizer that the step returns unchanged."""
    optimizer: Any = sys.modules["flax.nnx"].Optimizer
    back = {path.removeprefix("result.").partition(".")[0] for path in traced.out_paths}
    sentences = []
    for arg, name in zip(args, names, strict=True):
        parts = jax.tree.leaves(arg, is_leaf=lambda x: isinstance(x, ObjectState))
        kinds = [getattr(x.graph.nodes[0], "type", object) for x in parts if isinstance(x, ObjectState)]
        if name not in back and any(isinstance(kind, type) and issubclass(kind, optimizer) for kind in kinds):
            sentences.append(
                f"the step changes nothing of the optimizer {name!r}. What jax.jit or another transformation of jax "
                "inside of the step changes in place is lost: use those of nnx there"
            )
    return sentences


def public_tree(arg: Any) -> Any:
    """The structure in which an argument's shardings are shown: an `nnx.State` for each object."""
    return jax.tree.structure(_with_states(arg) if is_split(arg) else arg)


def _with_states(arg: Any) -> Any:
    """An argument with an `nnx.State` for each object."""
    return jax.tree.map(
        lambda x: x.state if isinstance(x, ObjectState) else x, arg, is_leaf=lambda x: isinstance(x, ObjectState)
    )


def unwrapped(function: Any) -> Any:
    """The function inside `nnx.jit`, whose work `parallelize` does itself.

    Raises: UnsupportedError for nnx.jit with shardings.
    """
    if type(function).__module__.partition(".")[0] != "flax" or not hasattr(function, "jitted_fn"):
        return function
    requested: list[str] = [n for n in ("in_shardings", "out_shardings") if getattr(function, n, None) is not None]
    if requested or getattr(function, "partial_args", None):
        raise UnsupportedError(
            where=f"parallelize(nnx.jit({getattr(function, '__name__', 'fun')}))",
            expected="a function, or nnx.jit of one without shardings",
            got=f"nnx.jit with {', '.join(requested) or 'bound arguments'}",
            hint="decorate the function itself with parallelize; layouts are asked for by recipes and constrain",
        )
    return function.fun
