"""What a checkpoint says about itself, in JSON: its leaves, the plan's file and the data position.

A checkpoint of step 50 is the folder `FOLDER/50`: `manifest/metadata` is this file, `state/` the arrays as orbax writes
them. Reading it needs no devices. Nothing in it is run or unpickled, and its paths are checked before a file is opened.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import logging
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import msgspec

from autopar.common.files import JsonFaultError, decoded
from autopar.errors import CheckpointFormatError, CheckpointNotFoundError, PlanFormatError, UnsupportedError
from autopar.execute import nnx_objects
from autopar.frontend.static_leaves import set_apart
from autopar.plan.plan import Plan, decode
from autopar.train.checkpoint.folders import COMMITTED, complete_in, is_in_bucket, names_in

# The leaves of a state by name: `params/dense/kernel`, whether the state is a dictionary, a dataclass or NNX objects.
#
# The same name for an attribute, a key and an index: what was saved from a `TrainState` opens as plain dictionaries.
# Types have names too, and numbers of Python are kept as exact text.


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


logger = logging.getLogger("autopar")

FORMAT_VERSION = 1
STATE, MANIFEST = "state", "manifest"
_MANIFEST_FILE = "metadata"  # as orbax names the file of a JSON item
_ARRAYS_FILE = "_METADATA"
_HINT = "restore another step of the folder (autopar checkpoint show FOLDER lists them)"

Kind = Literal["array", "key", "number"]


class LeafRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One leaf of the state.

    Attributes:
        kind: An array, typed random keys, or a number (or text) of Python.
        shape, dtype: Those of the array; keys have their implementation for a type.
        stored_dtype: The type of the array on disk: that of its bits, where the format has no such type.
        is_numpy: Whether it was an array of numpy.
        number: The value of a number as text, exact; floats in hexadecimal. `dtype` is then its Python type.
    """

    name: str
    kind: Kind
    shape: tuple[int, ...] = ()
    dtype: str
    stored_dtype: str = ""
    is_numpy: bool = False
    number: str = ""

    @property
    def leaf_dtype(self) -> Any:
        """The type of an array or of random keys. Raises: TypeError, ValueError for no type, an unknown one."""
        return key_dtype(self.dtype) if self.kind == "key" else array_dtype(self.dtype)

    @property
    def is_host(self) -> bool:
        """Whether it was a number of Python or an array of numpy."""
        return self.kind == "number" or self.is_numpy

    @property
    def value(self) -> Any:
        """The value of a number of Python. Raises: ValueError."""
        return number_of(self.dtype, self.number)

    @property
    def is_stored(self) -> bool:
        """Whether the arrays on disk have it: not what has no elements."""
        return self.kind != "number" and 0 not in self.shape


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The whole file. `plan` is the text of a plan file, or empty; `data` a position, or None."""

    format_version: int
    step: int
    leaves: tuple[LeafRecord, ...]
    plan: str = ""
    data: Any = None

    def plan_of(self, where: str) -> Plan | None:
        """The plan that the state was saved under. Raises: PlanFormatError for a damaged or foreign one."""
        return Plan(decode(self.plan.encode(), f"{where}, plan")) if self.plan else None


class _Version(msgspec.Struct):
    format_version: int


class _Arrays(msgspec.Struct):
    use_ocdbt: bool = False


def complete_steps(folder: Path) -> list[int]:
    """The numbers of the complete checkpoints of a folder, ascending. Unfinished ones have other names or no end."""
    return complete_in(folder, _step_numbers(folder))


def incomplete(folder: Path) -> list[Path]:
    """What has the name and the parts of a checkpoint in a bucket, and is none: other folders may be called 2024."""
    steps = _step_numbers(folder)
    left = [folder / str(step) for step in sorted({*steps} - {*complete_in(folder, steps)})]
    return [at for at in left if {*names_in(at)} <= {STATE, MANIFEST, *COMMITTED}]


def _step_numbers(folder: Path) -> list[int]:
    names = [name for name in names_in(folder) if name.isascii() and name.isdigit()]
    return sorted(int(name) for name in names if str(int(name)) == name)


def find(folder: Path, step: int | None, steps: Sequence[int] | None = None) -> int:
    """The number of a checkpoint of a folder: of a step, or the latest; `steps` are those in it, if they are known.

    Raises: CheckpointNotFoundError.
    """
    steps = complete_steps(folder) if steps is None else steps
    if not steps or (step is not None and step not in steps):
        there = (
            "no folder" if not folder.is_dir() else f"steps {list(steps)}" if steps else "no complete checkpoint in it"
        )
        raise CheckpointNotFoundError(
            where=str(folder),
            expected="a checkpoint" if step is None else f"a checkpoint of step {step}",
            got=there,
            hint="save one with Checkpointer.save, or begin anew where there is none: Checkpointer.restore_or",
        )
    return steps[-1] if step is None else step


def read(folder: Path, step: int) -> Manifest:
    """The manifest of a complete checkpoint, its plan and its paths checked.

    Raises: CheckpointFormatError for a newer format, a damaged file, or links and paths that lead elsewhere;
    PlanFormatError for a plan file that was changed.
    """
    at = folder / str(step)
    if not at.is_dir():
        raise CheckpointNotFoundError(
            where=str(at),
            expected="the checkpoint that process 0 sees",
            got="no such folder in this process",
            hint="save to a folder that all processes share",
        )
    _check_paths(at)
    path = at / MANIFEST / _MANIFEST_FILE
    where = str(path)
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise _fault(str(at), "a checkpoint that autopar saved", f"none: {MANIFEST} is missing") from None
    try:
        version = decoded(data, _Version, "the manifest of a checkpoint").format_version
        if version > FORMAT_VERSION:
            raise CheckpointFormatError(
                where=where,
                expected=f"format version {FORMAT_VERSION} at most",
                got=f"format version {version}",
                hint="a newer autopar saved it: restore with that version, or update this one",
            )
        manifest = decoded(data, Manifest, "the manifest of a checkpoint")
    except JsonFaultError as error:
        raise _fault(f"{where}, {error.fault.place}", error.fault.expected, error.fault.got) from error
    if manifest.step != step:
        raise _fault(where, f"the manifest of step {step}", f"that of step {manifest.step}")
    for name, times in collections.Counter(leaf.name for leaf in manifest.leaves).items():
        if not is_name(name) or times > 1:
            raise _fault(where, "names of leaves, each once, without '..'", repr(name))
    for leaf in manifest.leaves:
        if any(size < 0 for size in leaf.shape):
            raise _fault(f"{where}, {leaf.name}", "a shape", str(leaf.shape))
        try:
            _ = leaf.value if leaf.kind == "number" else leaf.leaf_dtype
        except (TypeError, ValueError) as error:
            raise _fault(f"{where}, {leaf.name}", "a type and a value", f"{leaf.kind} {leaf.dtype!r}") from error
    _check_arrays(at, manifest)
    try:
        manifest.plan_of(where)
    except PlanFormatError:
        if _other_plan_format(manifest.plan):
            logger.warning("%s: its plan is of an older format and left out; the state opens under any plan", at)
            return msgspec.structs.replace(manifest, plan="")
        raise
    return manifest


def encoded(manifest: Manifest) -> Any:
    """The manifest as what `json.dumps` takes."""
    return msgspec.to_builtins(manifest)


def _other_plan_format(plan: str) -> bool:
    """Whether a plan is of an older format: the state opens under any plan, so that one of no use is left out."""
    from autopar.plan.schema import FORMAT_VERSION as PLAN_FORMAT_VERSION

    try:
        return msgspec.json.decode(plan, type=_Version).format_version < PLAN_FORMAT_VERSION
    except msgspec.DecodeError:
        return False


def _check_paths(at: Path) -> None:
    """Raises: CheckpointFormatError where a checkpoint is, or holds, a link, which buckets have not."""
    if is_in_bucket(at):
        return
    if at.is_symlink():
        raise _fault(str(at), "a folder", "a symbolic link")
    for root, folders, files in os.walk(at):
        for name in (*folders, *files):
            path = Path(root, name)
            if path.is_symlink():
                raise _fault(str(path), "files and folders of the checkpoint itself", "a symbolic link")


def _check_arrays(at: Path, manifest: Manifest) -> None:
    """Raises: CheckpointFormatError where the arrays are not in one database, whose keys are no paths of files."""
    if not any(leaf.is_stored for leaf in manifest.leaves):
        return
    path = at / STATE / _ARRAYS_FILE
    try:
        arrays = decoded(path.read_bytes(), _Arrays, "orbax's description of the arrays")
    except FileNotFoundError:
        raise _fault(str(path), "orbax's description of the arrays", "no such file") from None
    except JsonFaultError as error:
        raise _fault(f"{path}, {error.fault.place}", error.fault.expected, error.fault.got) from error
    if not arrays.use_ocdbt:
        raise _fault(f"{path}, $.use_ocdbt", "arrays in one OCDBT database", "a file for each by its name")


def _fault(where: str, expected: str, got: str) -> CheckpointFormatError:
    return CheckpointFormatError(where=where, expected=expected, got=got, hint=_HINT)
