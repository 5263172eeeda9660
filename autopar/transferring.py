"""`autopar.transfer`: the arrays of a tree in other shardings, on other meshes and in other processes."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, NamedSharding, Sharding

from autopar.common import jax_compat
from autopar.errors import (
    AutoparError,
    DonatedStateError,
    InvalidArgumentError,
    NotEnoughDevicesError,
    PlanMismatchError,
    ProcessMismatchError,
)
from autopar.execute import nnx_objects
from autopar.execute.search import checked_bytes
from autopar.execute.step_leaves import LeafwiseStep, with_process_lost_errors
from autopar.frontend.static_leaves import set_apart
from autopar.plan.plan import Plan
from autopar.runtime.agreement import said_by_all
from autopar.runtime.execute import turn
from autopar.runtime.moves import ROUNDS_IN_FLIGHT, Box, Ends, NotHeldError, boxes_of, move_in_rounds, sends_in_rounds
from autopar.runtime.moves import num_elements as elements_in
from autopar.runtime.transfers import aval_of
from autopar.step import Step
from autopar.train.checkpoint.manifest import NUMBERS, NamedLeaf, named_leaves, tree_of
from autopar.train.checkpoint.targets import shardings_of_plan

_AT = "autopar.transfer"
_PLANNED = (Plan, Step, LeafwiseStep)
# The pieces on their way take this part of the largest share of a device, within these bounds.
_BUFFER_SHARE = 20
_LEAST_BUFFER_BYTES, _MOST_BUFFER_BYTES = 2**20, 2**28


def transfer(tree: Any, to: Any, *, buffer_bytes: int | str | None = None) -> Any:
    """The arrays of a tree in other shardings: on another mesh, in other processes; the numbers stay bit for bit.

    `to` is a sharding, or a plan, a step or a compiled step, whose state the tree is; or a tree of these, whose leaves
    may stand for subtrees. The result shares no memory with `tree`, which stays as it is.

    Beside its parts of both trees a device holds at most `buffer_bytes` (a number, or text such as `256MiB`): pieces on
    their way, of several arrays at once. By default that is a twentieth of the largest such part, from 1 to 256 MiB.
    This returns when everything has arrived.

    In a program of several processes all call it, with trees of one structure and the same `to`. Each gives the arrays
    that it has, and `jax.ShapeDtypeStruct` in place of those that it has no part of; a numpy array or a number is held
    by every process that gives it. In a process without devices of a target the array has no parts.

    Raises: InvalidArgumentError for another structure, shapes that do not divide, unknown devices, and arrays that no
    process has; PlanMismatchError for the plan of another state; DonatedStateError; ProcessMismatchError,
    ProcessLostError. Each names the leaf.
    """
    with turn:
        leaves, structure, made = with_process_lost_errors(lambda: _moved(tree, to, buffer_bytes))
    rest = iter(made)
    return tree_of(structure, [leaf.value if leaf.is_static else next(rest) for leaf in leaves])


@dataclasses.dataclass(frozen=True, slots=True)
class _Transfer:
    """What a process is to transfer: the (shape and type, sharding) that each array is to have, its parts here and
    there, and the number of each device in them.
    """

    leaves: list[NamedLeaf]
    structure: Any
    targets: list[tuple[jax.ShapeDtypeStruct, Sharding]]
    ends: list[Ends]
    numbers: dict[Any, int]
    buffer_bytes: int | None

    @property
    def arrays(self) -> list[NamedLeaf]:
        return [leaf for leaf in self.leaves if not leaf.is_static]


def _described(tree: Any, to: Any, buffer_bytes: int | str | None) -> _Transfer:
    """Raises: as `transfer`."""
    nbytes = checked_bytes(f"{_AT}(buffer_bytes=...)", buffer_bytes)
    leaves, structure = named_leaves(tree)
    targets = _targets(tree, leaves, to)
    found = _Transfer(leaves, structure, targets, [], {device: i for i, device in enumerate(jax.devices())}, nbytes)
    found.ends.extend(_ends(leaf, *aim, found.numbers) for leaf, aim in zip(found.arrays, targets, strict=True))
    return found


def _moved(tree: Any, to: Any, buffer_bytes: int | str | None) -> tuple[list[NamedLeaf], Any, list[Any]]:
    """(leaves, structure, the arrays among the leaves as they are to be)."""
    describe = functools.partial(_described, tree, to, buffer_bytes)
    found = describe() if jax.process_count() == 1 else _agreed(describe)
    arrays, devices = found.arrays, list(found.numbers)
    nbytes = (found.buffer_bytes or _default_buffer_bytes(found.ends)) // (2 * ROUNDS_IN_FLIGHT)  # each way
    try:
        rounds = sends_in_rounds(found.ends, [d.process_index for d in devices], max(nbytes, 1))
    except NotHeldError as error:
        raise _nobody_has(arrays[error.array], error.box) from None
    made = move_in_rounds([leaf.value for leaf in arrays], found.targets, rounds, devices, _AT)
    return found.leaves, found.structure, made


def _targets(tree: Any, leaves: Sequence[NamedLeaf], to: Any) -> list[tuple[jax.ShapeDtypeStruct, Sharding]]:
    """(shape and type, sharding) of each array. Raises: as `transfer`."""
    kinds = (Sharding, *_PLANNED)
    (split,) = nnx_objects.split((tree,))
    whole = set_apart(split, kept=NUMBERS)
    given, form = jax.tree.flatten(nnx_objects.split((to,))[0], is_leaf=lambda x: isinstance(x, kinds))
    try:
        parts: list[Any] = form.flatten_up_to(whole)  # type: ignore[attr-defined]
    except ValueError as error:
        raise InvalidArgumentError(
            where=f"{_AT}(to=...)",
            expected="a sharding or a plan, or a tree of them in the structure of what is transferred",
            got=str(error).splitlines()[0][:300],
            hint="one for a whole subtree may stand in its place",
        ) from None
    targets, rest = [], iter(leaves)
    for target, part in zip(given, parts, strict=True):
        below = [leaf for leaf in (next(rest) for _ in jax.tree.leaves(part)) if not leaf.is_static]
        for leaf, sharding in zip(below, _shardings(target, below), strict=True):
            targets.append((_checked_aval(leaf, sharding), sharding))
    return targets


def _shardings(target: Any, leaves: Sequence[NamedLeaf]) -> Sequence[Any]:
    if not isinstance(target, _PLANNED):
        return [target] * len(leaves)
    plan = target if isinstance(target, Plan) else target.latest_plan if isinstance(target, Step) else target.plan
    if plan is None:
        raise InvalidArgumentError(
            where=f"{_AT}(to=...)",
            expected="a step that has a plan",
            got="one that was neither called nor planned",
            hint="plan it first: step.plan(*args)",
        )
    return shardings_of_plan(plan, leaves, f"{_AT}(to=...)", PlanMismatchError)


def _checked_aval(leaf: NamedLeaf, sharding: Any) -> jax.ShapeDtypeStruct:
    """Shape and type of an array, which a sharding divides. Raises: as `transfer`."""
    where, value = f"{_AT}, {leaf.path or leaf.name}", leaf.value
    if jax_compat.is_tracer(value) or not isinstance(sharding, Sharding):
        raise InvalidArgumentError(
            where=where,
            expected="an array, and a sharding, a plan or a step for it",
            got=f"{type(value).__name__}, and {type(sharding).__name__}",
            hint="call autopar.transfer outside of jax.jit, with shardings such as plan.state_shardings",
        )
    if isinstance(value, jax.Array) and value.is_deleted():
        raise DonatedStateError(
            where=where,
            expected="an array",
            got="one that was donated to a step",
            hint="transfer what the step returned",
        )
    aval = aval_of(value)
    weak = getattr(value, "weak_type", False) or isinstance(value, bool | int | float | complex)
    try:
        sharding.shard_shape(aval.shape)
    except ValueError as error:
        raise InvalidArgumentError(
            where=where,
            expected="a shape that its sharding divides",
            got=f"{aval.dtype}{list(aval.shape)} in {sharding}: {str(error).splitlines()[0][:200]}",
            hint="split another dimension of it, or over fewer devices",
        ) from None
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=weak)


def _ends(leaf: NamedLeaf, aval: jax.ShapeDtypeStruct, sharding: Sharding, numbers: dict[Any, int]) -> Ends:
    """The parts that this process has, and those that all are to have. `numbers` of devices; further ones are added.

    Raises: NotEnoughDevicesError.
    """
    shape, value = tuple(aval.shape), leaf.value
    held: dict[Any, Any] = {}
    if isinstance(value, jax.Array):
        held = dict(value.sharding.addressable_devices_indices_map(shape))
    elif not isinstance(value, jax.ShapeDtypeStruct):
        held = {jax.local_devices()[0]: (slice(None),) * len(shape)}
    is_abstract = isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, AbstractMesh)
    wanted = {} if is_abstract else sharding.devices_indices_map(shape)
    unknown = [d for d in (*held, *wanted) if d not in numbers and (jax.process_count() > 1 or not _is_of_program(d))]
    if is_abstract or unknown:
        raise NotEnoughDevicesError(
            where=f"{_AT}, {leaf.path or leaf.name}",
            expected=f"a sharding on some of the {len(jax.devices())} devices of this program",
            got=f"{sharding} of an abstract mesh" if is_abstract else str(unknown[0]),
            hint="make the mesh of jax.devices()",
        )
    for device in (*held, *wanted):
        numbers.setdefault(device, len(numbers))
    return Ends(
        held=boxes_of(held, shape, numbers), wanted=boxes_of(wanted, shape, numbers), itemsize=jax_compat.itemsize(aval)
    )


def _is_of_program(device: Any) -> bool:
    """Whether a device is one of this process, of whatever backend, and not one that is only compiled for."""
    try:
        return device in jax.devices(device.platform)
    except RuntimeError:
        return False


def _agreed(describe: Callable[[], _Transfer]) -> _Transfer:
    """The transfer of this process, with the parts that all processes have and want.

    Raises: ProcessMismatchError where they do not mean the same transfer, in all of them.
    """
    failure, said = None, dict[str, Any]()
    try:
        own = describe()
        arrays = [_said(*of_one) for of_one in zip(own.arrays, own.targets, own.ends, strict=True)]
        said = {"arrays": arrays, "buffer_bytes": own.buffer_bytes}
    except Exception as error:  # whatever it is, the others must hear of it: they wait
        kind = "" if isinstance(error, AutoparError) else f"{type(error).__name__}: "
        failure, said = error, {"failed": f"{kind}{error}"}
    together = "all processes to call autopar.transfer together"
    heard = said_by_all(_AT, "autopar/transfer", said, together=together, hint="call it in all processes")
    if failure is not None:
        raise failure
    _compare(heard)
    ends, targets = [], []
    for i, (end, (aval, sharding)) in enumerate(zip(own.ends, own.targets, strict=True)):
        of_all = [of_process["arrays"][i] for of_process in heard]
        held = [(int(d), tuple(map(tuple, box))) for of_process in of_all for d, box in of_process["held"]]
        ends.append(dataclasses.replace(end, held=tuple(held)))
        targets.append((aval.update(weak_type=all(of_process["is_weak"] for of_process in of_all)), sharding))
    return dataclasses.replace(own, targets=targets, ends=ends)


def _said(leaf: NamedLeaf, target: tuple[jax.ShapeDtypeStruct, Sharding], ends: Ends) -> dict[str, Any]:
    """What a process tells the others of an array."""
    aval, _ = target
    wanted = zlib.crc32(repr(ends.wanted).encode())
    return {
        "name": leaf.path or leaf.name,
        "is": f"{aval.dtype}{list(aval.shape)}",
        "is_weak": bool(aval.weak_type),
        "wanted": wanted,
        "held": ends.held,
    }


def _compare(heard: Sequence[dict[str, Any]]) -> None:
    """Raises: ProcessMismatchError, in all processes."""

    def differs(
        process: int, what: str, where: str = _AT, expected: str = "the same transfer in all processes"
    ) -> None:
        raise ProcessMismatchError(
            where=f"{where}, process {jax.process_index()} of {jax.process_count()}",
            expected=expected,
            got=f"in process {process} {what}",
            hint="call it in all processes with trees of one structure and one target; jax.ShapeDtypeStruct stands for "
            "an array that a process has no part of",
        )

    for process, said in enumerate(heard):
        if "failed" in said:
            differs(process, said["failed"])
    for process, said in enumerate(heard[1:], 1):
        first, other = heard[0]["arrays"], said["arrays"]
        for a, b in itertools.zip_longest(first, other):
            if a is None or b is None or a["name"] != b["name"]:
                names = [repr(x["name"]) if x else "nothing more" for x in (b, a)]
                differs(process, f"{names[0]}, in process 0 {names[1]}")
            where = f"{_AT}, {a['name']}"
            if a["is"] != b["is"]:
                differs(process, b["is"], where, f"{a['is']}, as in process 0")
            if a["wanted"] != b["wanted"]:
                differs(process, "another one", where, "the same target sharding in all processes")
        nbytes = [x["buffer_bytes"] for x in (heard[0], said)]
        if nbytes[0] != nbytes[1]:
            differs(process, f"buffer_bytes={nbytes[1]}", expected=f"buffer_bytes={nbytes[0]}, as in process 0")


def _nobody_has(leaf: NamedLeaf, box: Box) -> InvalidArgumentError:
    value = leaf.value
    part = ", ".join(f"{start}:{stop}" for start, stop in box)
    return InvalidArgumentError(
        where=f"{_AT}, {leaf.path or leaf.name}",
        expected="an array that this process has, or another one",
        got=f"{type(value).__name__} {tuple(value.shape)}, and nobody has [{part}] of it",
        hint="pass the array where it is; jax.ShapeDtypeStruct stands for it in processes that have no part of it",
    )


def _default_buffer_bytes(arrays: Sequence[Ends]) -> int:
    shares = collections.Counter[tuple[str, int]]()
    for ends in arrays:
        for side, parts in (("held", ends.held), ("wanted", ends.wanted)):
            for device, box in parts:
                shares[side, device] += elements_in(box) * ends.itemsize
    largest = max(shares.values(), default=0)
    return min(max(largest // _BUFFER_SHARE, _LEAST_BUFFER_BYTES), _MOST_BUFFER_BYTES)
