"""The ways of a call: from its arguments to a traced step, or directly to the program of the last call.

The second one makes the checks that the program does not make. A compiled program refuses arguments of other shapes,
dtypes and layouts. It does not detect a change of JAX's configuration or of the weak type of an argument, for each of
which `jax.jit` has another program. It must never get a deleted array, or a donated buffer that another argument reads.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import operator
import re
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax

from autopar.common import jax_compat
from autopar.errors import InvalidArgumentError
from autopar.execute import nnx_objects
from autopar.execute.call_arguments import CallArguments, WarnOnce
from autopar.execute.compiled_step import CompiledStep
from autopar.execute.step_leaves import share_memory
from autopar.frontend.callbacks import with_callbacks_as_results
from autopar.frontend.continued_state import continued_arguments
from autopar.frontend.static_leaves import RawLeaves, StaticLeaf, static_leaves
from autopar.frontend.tracing import is_weak, tie_state, trace
from autopar.ir.traced_step import TracedStep
from autopar.plan.plan import Trees

# Donated arguments that no result replaces: their memory cannot be reused, and a training step would not train.

_KEY = re.compile(r"\[[^\]]*\]|\.\w+")  # one step of a path: ['w'], [0] or .params


def untied_arguments(traced: TracedStep, names: Sequence[str], donate: Iterable[int]) -> Iterator[tuple[str, bool]]:
    """For each donated argument with leaves that no result replaces a sentence, and whether the step only reads it: it
    changes nothing of it, and no result is like it.
    """
    tied = {traced.argument_of[leaf] for leaf in traced.tied}
    for i in sorted({traced.argument_of[i] for i in traced.donated} & set(donate) - tied):
        yield _sentence(traced, names[i], i)


def _sentence(traced: TracedStep, name: str, argument: int) -> tuple[str, bool]:
    leaves = [i for i, owner in enumerate(traced.argument_of) if owner == argument]
    leaves_by_path = {traced.in_paths[i].removeprefix(name): traced.in_avals[i] for i in leaves}
    changed = [path for path in traced.changed_in_place if path in {traced.in_paths[i] for i in leaves}]
    difference = _difference(name, argument, leaves_by_path, traced)
    why = difference or "the step returns nothing that is like it"
    text = f"nothing of argument {name!r} is donated, as no result replaces it: {why}."
    if changed:
        text += f" The step changes {', '.join(changed[:3])} in place, which is lost, as under jax.jit: return it."
    text += (
        " Return the new value with the tree, shapes and dtypes of the old one, or say "
        "donate_argnums=() for a step that only reads it"
    )
    return text, not difference and not changed


def _difference(name: str, number: int, argument: dict[str, jax.ShapeDtypeStruct], traced: TracedStep) -> str:
    """The first leaf that differs between an argument and the most similar result; empty where none is similar."""
    best = max(_results(traced), key=lambda candidate: _similarity(argument, candidate[1]), default=None)
    if best is None or not _similarity(argument, best[1]):
        return ""
    prefix, result = best
    if static := _static_difference(name, number, prefix, traced):
        return static
    for path, aval in argument.items():
        if path not in result:
            return f"{prefix} has no {path or 'such leaf'}"
        if (result[path].shape, result[path].dtype) != (aval.shape, aval.dtype):
            return f"{name}{path} is {_text(aval)}, and {prefix}{path} is {_text(result[path])}"
    for path in result:
        if path not in argument:
            return f"{prefix}{path} is not in {name}"
    return f"{prefix} has the same leaves in another kind of tree"


def _static_difference(name: str, number: int, prefix: str, traced: TracedStep) -> str:
    """The first static leaf of an argument that another value, or an array, is to replace."""
    results = {f"result{path}": value for path, value in static_leaves(traced.out_tree).items()}
    for path, value in static_leaves(traced.in_tree.children()[number]).items():
        by = prefix + path
        if by in traced.out_paths or (by in results and StaticLeaf(results[by]) != StaticLeaf(value)):
            other = "an array" if by in traced.out_paths else repr(results[by])
            return f"{name}{path} is static, {value!r}, and {by} is {other}; what changes has to be an array"
    return ""


def _results(traced: TracedStep) -> list[tuple[str, dict[str, jax.ShapeDtypeStruct]]]:
    """(prefix, leaves by the path behind it) of the result and its parts, which may replace an argument."""
    pairs = list(zip(traced.out_paths, traced.out_avals, strict=True))
    candidates = [("result", {path.removeprefix("result"): aval for path, aval in pairs})]
    tree = traced.out_tree
    start = 0
    for child in tree.children() if not jax.tree_util.treedef_is_leaf(tree) else ():
        part = pairs[start : start + child.num_leaves]
        start += child.num_leaves
        if part:
            key = _KEY.match(part[0][0], len("result"))
            prefix = key.string[: key.end()] if key is not None else part[0][0]
            candidates.append((prefix, {path.removeprefix(prefix): aval for path, aval in part}))
    return candidates


def _similarity(argument: dict[str, jax.ShapeDtypeStruct], result: dict[str, jax.ShapeDtypeStruct]) -> int:
    """The number of leaves with the same path; a single array is similar to one of its shape."""
    if "" in argument:
        return int("" in result and result[""].shape == argument[""].shape != ())
    return len(argument.keys() & result.keys())


def _text(aval: jax.ShapeDtypeStruct) -> str:
    return f"{aval.dtype}{list(aval.shape)}"


def trace_call(
    function: Callable[..., Any], args: tuple[Any, ...], arguments: CallArguments, warn: WarnOnce
) -> tuple[TracedStep, Trees]:
    """A step traced for the arguments of a call, in their places and with NNX objects split, and its public trees.

    Raises: InvalidArgumentError, UnsupportedError.
    """
    arguments.check_argnums(len(args))
    dynamic, static = arguments.dynamic(args), arguments.static(args)
    names = arguments.dynamic_names(len(args))

    @functools.wraps(function)
    def bound(*values: Any) -> Any:
        remaining = iter(values)
        all_arguments = [static[i] if i in static else next(remaining) for i in range(len(args))]
        return nnx_objects.pure(function, all_arguments, arguments.names(len(args)))

    bound.__name__ = arguments.step_name
    donate, batch = arguments.donated_numbers(args), arguments.batch_numbers(args)
    dims = arguments.example_dims(args)
    layouts = nnx_objects.layouts_in_metadata(dynamic, names)
    traced = trace(bound, dynamic, names=names, donate=donate, batch=batch, example_dims=dims, layouts=layouts)
    if any(map(nnx_objects.is_split, dynamic)):
        traced = nnx_objects.tie_objects(traced, dynamic, donate)
        donate = tuple(sorted({traced.argument_of[leaf] for leaf in traced.donated}))
        for sentence in nnx_objects.idle_optimizers(traced, dynamic, names):
            warn(sentence)
    else:
        if arguments.donates_by_default and donate:
            traced, donate = _donating_what_continues(traced, donate, names)
        if arguments.has_default_batch and batch:
            _check_default_roles(traced, dynamic, names, batch[0], arguments)
    for sentence, is_only_read in untied_arguments(traced, names, donate):
        if not (is_only_read and arguments.donates_by_default):  # the plan has a note
            warn(sentence)
    if arguments.cuts_steps:
        traced = with_callbacks_as_results(traced)
    trees = Trees(
        arguments=tuple(map(nnx_objects.public_tree, dynamic)),
        names=tuple(names),
        donated=frozenset(donate),
        batch=frozenset(batch),
    )
    return traced, trees


def _donating_what_continues(
    traced: TracedStep, donate: tuple[int, ...], names: Sequence[str]
) -> tuple[TracedStep, tuple[int, ...]]:
    """A step that donates those arguments alone that its results continue; the first also where no result is like it,
    which is told elsewhere.
    """
    continued, returned = continued_arguments(traced), {traced.argument_of[leaf] for leaf in traced.tied}
    first = donate[0]
    kept = tuple(i for i in donate if i in continued or (i == first and i not in returned))
    notes = traced.notes
    if first not in kept:
        notes += (
            f"nothing of argument {names[first]!r} is donated: what the step returns in its shapes is not its old "
            "value changed (gradients are not). donate_argnums=(0,) donates it",
        )
    of = traced.argument_of
    tied = {leaf: result for leaf, result in traced.tied.items() if of[leaf] in kept}
    donated = frozenset(leaf for leaf in traced.donated if of[leaf] in kept)
    return dataclasses.replace(traced, tied=tied, donated=donated, notes=notes), kept


def _check_default_roles(
    traced: TracedStep, dynamic: Sequence[Any], names: Sequence[str], batch: int, arguments: CallArguments
) -> None:
    """Raises: InvalidArgumentError where the argument that is taken for the batch, and that no option names, is state:
    the step returns its new value, and its leaves have no number of examples in common. As examples it would be split,
    and the batch would not.
    """
    tied = tie_state(dynamic, range(len(dynamic)), traced.out_tree, traced.in_avals, traced.out_avals)
    returned = {traced.argument_of[leaf] for leaf in tied}
    sizes: dict[int, dict[Any, None]] = {}  # by argument, the first ones of the shapes of its leaves
    for leaf, of in zip(traced.in_avals, traced.argument_of, strict=True):
        sizes.setdefault(of, {}).update(dict.fromkeys(leaf.shape[:1]))
    has_examples = len(sizes.get(batch, ())) <= 1
    others = [i for i in sorted(sizes) if i not in returned and sizes[i]]
    examples = next((n for i in others for n in sizes[i]), None)
    others = [i for i in others if examples in sizes[i]]  # a key for random numbers has no examples
    if batch not in returned or has_examples or not others:
        return
    name = arguments.step_name
    with_examples, donate = (
        f"({', '.join(map(str, found))}{',' * (len(found) == 1)})"
        for found in (others, sorted(returned) if traced.tied else ())
    )
    raise InvalidArgumentError(
        where=f"{name}, batch_argnums=({batch},), the default",
        expected=f"examples in argument {batch}",
        got=f"{names[batch]!r}, which is state: the step returns {'it anew' if traced.tied else 'what has its shapes'}",
        hint=f"name the roles: autopar.parallelize({name}, batch_argnums={with_examples}, donate_argnums={donate})",
    )


class FastPath:
    """A compiled step, and the properties that a call must share with the last one, whose leaves were `leaves`, `raw`
    with its static ones.

    The results that replaced the donated leaves in the last call are new memory of known types, and most calls pass
    them on. All checks take a fraction of a microsecond for each leaf.
    """

    def __init__(self, compiled: CompiledStep, leaves: Sequence[Any], raw: RawLeaves) -> None:
        traced = compiled.traced
        self.compiled, self.raw = compiled, raw
        self._context = jax_compat.trace_context()
        self._weak = _weak_types(leaves)
        self._types = _explicit(leaves) if traced.result_types else None
        donated, donates = sorted(compiled.donated), compiled.donated
        self._donated = _picker(donated)
        self._others = [i for i in range(len(leaves)) if i not in donates]
        self._replaced = _picker([traced.tied[i] for i in donated])
        self._weak_of_others = [self._weak[i] for i in self._others]
        self._stays_as_weak = all(bool(traced.out_avals[traced.tied[i]].weak_type) == self._weak[i] for i in donated)
        # An array that is not taken over can share memory with one that is only where both have equal shards.
        same_shards: dict[Any, list[int]] = collections.defaultdict(list)
        for i, (aval, sharding) in enumerate(zip(traced.in_avals, compiled.leaf_shardings, strict=True)):
            same_shards[sharding.shard_shape(aval.shape), aval.dtype].append(i)
        groups = [(set(group) & donates, set(group) - donates) for group in same_shards.values()]
        self._same_shards = sorted(
            i for donated_group, other_group in groups if donated_group and other_group for i in donated_group
        )
        self._kept = sorted(i for donated_group, other_group in groups if donated_group for i in other_group)
        self.called_s: float | None = None  # the latest run, by time.perf_counter
        # References to what is known to share no memory: what replaced the donated leaves, and what was kept beside it.
        self._new: list[Any] = []
        self._beside: list[Any] = []
        self._others_before: list[Any] = []  # references to what was not replaced, of a program that refuses late

    def accepts(self, leaves: Sequence[Any]) -> bool:
        """Whether a call with these leaves may run the program at once; the program may still refuse it."""
        if jax_compat.trace_context() != self._context or not _hold_data(leaves):
            return False
        if self._types is not None and _explicit(leaves) != self._types:
            return False
        donated = self._donated(leaves)
        is_new = bool(self._new) and all(map(operator.is_, map(operator.call, self._new), donated))
        if is_new and self._stays_as_weak:
            if self._weak_of_others != _weak_types([leaves[i] for i in self._others]):
                return False
        elif self._weak != _weak_types(leaves):
            return False
        if self.compiled.refuses_late and not self._are_accepted(leaves, is_new):
            return False
        if len(set(map(id, leaves))) != len(leaves):
            ids = set(map(id, donated))
            if len(ids) != len(donated) or any(id(leaves[i]) in ids for i in self._others):
                return False
        return self._share_no_memory(leaves, donated, is_new)

    def _are_accepted(self, leaves: Sequence[Any], is_new: bool) -> bool:
        """Whether the program accepts the leaves, of which those of the last call, and its results, are known."""
        if not is_new:
            return self.compiled.accepts(leaves, range(len(leaves)))
        known = map(operator.call, self._others_before) if self._others_before else [None] * len(self._others)
        return self.compiled.accepts(
            leaves, [i for i, before in zip(self._others, known, strict=True) if before is not leaves[i]]
        )

    def _share_no_memory(self, leaves: Sequence[Any], donated: Sequence[Any], is_new: bool) -> bool:
        """Whether donated leaves share no memory with other leaves."""
        beside = [leaves[i] for i in self._kept]
        if is_new and all(map(operator.is_, map(operator.call, self._beside), beside)):
            return True
        if is_new:
            donated = [leaves[i] for i in self._same_shards]
        return not share_memory(*([x for x in xs if isinstance(x, jax.Array)] for xs in (donated, beside)))

    def run(self, leaves: Sequence[Any]) -> Sequence[Any]:
        """Runs the program on leaves that share no memory. Results that replace donated leaves are new memory."""
        beside = [leaves[i] for i in self._kept]
        self.called_s = time.perf_counter()
        results = self.compiled.run(leaves)
        self._new = _references(self._replaced(results))
        self._beside = _references(beside)
        if self.compiled.refuses_late:
            self._others_before = _references([leaves[i] for i in self._others])
        return results


_ONLY_ARRAYS = {jax_compat.ArrayImpl}


def _hold_data(leaves: Sequence[Any]) -> bool:
    """Whether all leaves hold data: none is a tracer or a deleted array."""
    kinds = set(map(type, leaves))
    if kinds == _ONLY_ARRAYS:
        return not any(map(jax_compat.ArrayImpl.is_deleted, leaves))
    if any(issubclass(kind, jax_compat.Tracer) for kind in kinds):
        return False
    return not any(x.is_deleted() for x in leaves if isinstance(x, jax.Array))


def _explicit(leaves: Sequence[Any]) -> list[Any]:
    """The explicit mesh of the leaves, and the sharding in the type of each."""
    return [jax_compat.explicit_mesh(leaves), *map(jax_compat.explicit_type, leaves)]


def _weak_types(leaves: Sequence[Any]) -> list[bool]:
    try:
        return [x.weak_type for x in leaves]
    except AttributeError:
        return [is_weak(x) for x in leaves]


def _picker(positions: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    if len(positions) > 1:
        return operator.itemgetter(*positions)
    return lambda values: [values[i] for i in positions]


def _references(values: Sequence[Any]) -> list[Any]:
    """Weak references; to what accepts none, functions that give nothing."""
    try:
        return list(map(weakref.ref, values))
    except TypeError:
        return [_reference(x) for x in values]


def _reference(x: Any) -> Any:
    try:
        return weakref.ref(x)
    except TypeError:
        return lambda: None
