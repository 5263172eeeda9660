"""The leaves of a state by name: `params/dense/kernel`, whether the state is a dictionary, a dataclass or NNX objects.

The same name for an attribute, a key and an index: what was saved from a `TrainState` opens as plain dictionaries.
Types have names too, and numbers of Python are kept as exact text.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterator
from typing import Any

import jax

from autopar.calls import nnx_objects
from autopar.errors import UnsupportedError
from autopar.frontend.static_leaves import set_apart

# The name of the one leaf of a state that is an array itself.
WHOLE = "(state)"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NamedLeaf:
    """A leaf: its name in a checkpoint, its path as Python writes it, and its value.

    `is_static`: steps take it as a part of the structure, so that plans do not have it.
    """

    name: str
    path: str
    value: Any
    is_static: bool


def named_leaves(tree: Any) -> tuple[list[NamedLeaf], Any]:
    """(leaves, structure) of a tree, with NNX objects split. No two names are equal.

    What is neither an array nor a number or text (a function) is part of the structure.
    """
    (split,) = nnx_objects.split((tree,))
    with_paths, structure = jax.tree_util.tree_flatten_with_path(set_apart(split, kept=NUMBERS))
    arrays = {jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(set_apart(split))[0]}
    leaves, taken = [], set[str]()
    for path, value in with_paths:
        name = plain = "/".join(_parts(path)) or WHOLE
        copies = 1
        while name in taken:  # {"a/b": x, "a": {"b": y}}
            copies += 1
            name = f"{plain}~{copies}"
        taken.add(name)
        text = jax.tree_util.keystr(path)
        leaves.append(NamedLeaf(name=name, path=text, value=value, is_static=text not in arrays))
    return leaves, structure


def tree_of(structure: Any, values: list[Any]) -> Any:
    """The tree of a structure that `named_leaves` gave, with new NNX objects in place of split ones."""
    return nnx_objects.merged(jax.tree.unflatten(structure, values))


def nested(values: dict[str, Any]) -> Any:
    """Dictionaries in dictionaries, by the parts of the names."""
    if list(values) == [WHOLE]:
        return values[WHOLE]
    folders = {name[:i] for name in values for i, letter in enumerate(name) if letter == "/"}
    tree: dict[str, Any] = {}
    for name, value in values.items():
        if name in folders:  # a leaf beside others, such as the `value` of a class that has more fields
            name = next(n for n in _names_below(name) if n not in values and n not in folders)
        *above, last = name.split("/")
        place = tree
        for folder in above:
            place = place.setdefault(folder, {})
        place[last] = value
    return tree


def _names_below(folder: str) -> Iterator[str]:
    yield f"{folder}/value"
    yield from (f"{folder}/value~{i}" for i in itertools.count(2))


def is_name(name: str) -> bool:
    """Whether a leaf may be called so in a checkpoint: parts between slashes, none of them empty or a way elsewhere."""
    is_text = not any("\ud800" <= letter <= "\udfff" for letter in name)
    return is_text and "\0" not in name and not {"", ".", ".."} & set(name.split("/"))


def check_name(leaf: NamedLeaf, where: str) -> None:
    """Raises: UnsupportedError for a leaf whose name no checkpoint can have."""
    if not is_name(leaf.name):
        raise UnsupportedError(
            where=where,
            expected="names of leaves whose parts between slashes are neither empty nor '.' or '..'",
            got=repr(leaf.name),
            hint="call the entry of the state otherwise",
        )


def _parts(path: tuple[Any, ...]) -> list[str]:
    parts: list[str] = []
    for i, entry in enumerate(path):
        match entry:
            case jax.tree_util.GetAttrKey(name="value") if i == len(path) - 1:
                pass  # the box of a variable: Flax's `Partitioned`, an `nnx.State`
            case jax.tree_util.GetAttrKey(name=name):
                parts.append(str(name))
            case jax.tree_util.DictKey(key=key) | jax.tree_util.FlattenedIndexKey(key=key):
                parts.append(str(key))
            case jax.tree_util.SequenceKey(idx=index):
                parts.append(str(index))
            case _:  # `.layers[0].kernel`, the path inside of an NNX object
                parts += [text.strip("'\"") for text in re.split(r"[.\[\]]+", str(entry)) if text]
    return parts


NUMBERS = (bool, int, float, complex, str)  # a bool is an int too: the first that fits
_WRITTEN_OUT = 2**64  # larger whole numbers are written in hexadecimal, which Python reads at any length


def array_dtype(name: str) -> Any:
    """The type of an array. Raises: TypeError."""
    return jax.numpy.dtype(name)


def key_dtype(implementation: str) -> Any:
    """The type of random keys of an implementation. Raises: ValueError for one that is not registered."""
    return jax.eval_shape(lambda: jax.random.key(0, impl=implementation)).dtype


def type_of(number: Any) -> str:
    """The type of a number (or text) of Python."""
    return next(kind.__name__ for kind in NUMBERS if isinstance(number, kind))


def text_of(number: Any) -> str:
    """A number as text."""
    if isinstance(number, bool | str):
        return str(number)
    if isinstance(number, int):
        return str(number) if abs(number) < _WRITTEN_OUT else hex(number)
    if isinstance(number, float):
        return number.hex()
    return f"{number.real.hex()} {number.imag.hex()}"


def number_of(kind: str, text: str) -> Any:
    """The number of a type and a text. Raises: ValueError."""
    match kind:
        case "bool" if text in ("True", "False"):
            return text == "True"
        case "int":
            return int(text, 0)
        case "float":
            return float.fromhex(text)
        case "complex":
            real, _, imaginary = text.partition(" ")
            return complex(float.fromhex(real), float.fromhex(imaginary))
        case "str":
            return text
    raise ValueError(f"no number: {kind} {text[:20]!r}")
