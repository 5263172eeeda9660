"""Calls of kernels without a rule around them, and the user's table of them: `autopar.known_kernel`.

What jax has is known without the table (`pallas_grid`, `grouped`). An entry is for a Pallas call or a foreign function
in code that cannot be changed; it is looked up by the kernel's name, and holds for calls with as many arrays, of as
many dimensions, as its rule has. A call that no entry fits is what it was without the table. What nobody knows the
factors of runs on whole arrays on every device.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

from autopar.common import jax_compat, jax_local
from autopar.errors import InvalidArgumentError, expect_function
from autopar.ir.graph import Rule
from autopar.ir.rules import replicated_rule
from autopar.ops.kernels.operation import (
    UNNAMED,
    KernelRule,
    KernelWork,
    amount_of,
    call_work,
    check_results,
    graph_rule,
    parse,
)
from autopar.ops.kernels.pallas_grid import (
    Grid,
    call_on_part,
    grid_along,
    grid_of,
    grid_rule,
    is_pallas_call,
    kernel_name,
)

Amount = Callable[..., float]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KnownKernel:
    """An entry of the user's. `flops` and `nbytes`: of the operands' shapes, None: counted."""

    name: str
    rule: KernelRule
    flops: Amount | None
    nbytes: Amount | None
    where: str


_ENTRIES: dict[str, KnownKernel] = {}


def known_kernel(
    name: str,
    rule: str,
    *,
    whole: Sequence[str] = (),
    flops: Amount | None = None,
    bytes: Amount | None = None,
) -> None:
    """Says how the calls of a kernel in code of others may be split, and what they cost.

    Args:
        name: Of the kernel: the `name=` of its `pallas_call`, else the name of the function that is its body; of a
            foreign function its target's name. A later entry replaces an earlier one of the same name.
        rule: The factor of each dimension of the call's operands and results, as `autopar.kernel` takes it. For a
            Pallas call: of those that come in blocks; scalars that are prefetched are whole.
        whole: Factors that need whole operands, as brackets say.
        flops: A function from the operands' shapes (each a `jax.ShapeDtypeStruct`) to arithmetic operations.
        bytes: The same for bytes of memory traffic.

    A factor of a Pallas call may be split where its grid chooses blocks by it, and the call is then made on a part's
    shapes; the entry says that the kernel's body allows that, also where it reads the number of its cell. Parts of a
    foreign function are made by the same target with the same attributes.

    Raises: InvalidArgumentError for a rule that cannot be, with the line of the call.
    """
    line = jax_compat.present_line()
    where = f"autopar.known_kernel({name!r})" + (f" at {line}" if line else "")
    parsed = parse(rule, whole, (), where)
    check_results(parsed, where)
    for argument, given in (("flops", flops), ("bytes", bytes)):
        if given is not None:
            expected, hint = "a function of the operands' shapes", "lambda q, k, v: 4.0 * q.size * k.shape[1]"
            expect_function(f"{where}, {argument}", given, expected, hint)
    _ENTRIES[name] = KnownKernel(name=name, rule=parsed, flops=flops, nbytes=bytes, where=where)


def entries() -> tuple[str, ...]:
    """The user's entries as text, on which plans depend: rules, and the code of what says their work."""
    return tuple(
        sorted(f"{name}: {entry.rule} {_code(entry.flops)} {_code(entry.nbytes)}" for name, entry in _ENTRIES.items())
    )


def _code(function: Callable[..., float] | None) -> str:
    code = getattr(function, "__code__", None)
    return "" if function is None else f"{code.co_code.hex()} {code.co_consts}" if code is not None else repr(function)


def name_of(eqn: Any) -> str:
    """The name by which an entry of a call is looked up."""
    return kernel_name(eqn) if is_pallas_call(eqn) else str(eqn.params.get("target_name", ""))


def entry_of(eqn: Any) -> KnownKernel | None:
    """The entry that a call fits."""
    entry = _ENTRIES.get(name_of(eqn)) if _ENTRIES else None
    if entry is None:
        return None
    arrays = [*in_blocks(eqn), *eqn.outvars]
    ranks = [len(v.aval.shape) for v in arrays]
    return entry if [len(names) for names in (*entry.rule.operands, *entry.rule.results)] == ranks else None


def in_blocks(eqn: Any) -> Sequence[Any]:
    """The operands that a rule is about: of a Pallas call those that come in blocks."""
    if not is_pallas_call(eqn):
        operands: Sequence[Any] = eqn.invars
        return operands
    return list(eqn.invars[len(eqn.invars) - eqn.params["grid_mapping"].num_inputs :])


def known_work(eqn: Any, counted: KernelWork) -> KernelWork:
    """The work of a call as its entry says it, else as it was counted."""
    entry = entry_of(eqn)
    if entry is None:
        return counted
    shapes = [jax_compat.struct_of(v.aval) for v in in_blocks(eqn)]
    return KernelWork(
        flops=amount_of(entry.flops, shapes, f"{entry.where}, flops") if entry.flops is not None else counted.flops,
        nbytes=amount_of(entry.nbytes, shapes, f"{entry.where}, bytes") if entry.nbytes is not None else counted.nbytes,
    )


def grid_under(entry: KnownKernel, eqn: Any) -> Grid | None:
    """How a Pallas call may be split by its entry: where both the grid and the rule do.

    Raises: InvalidArgumentError where the rule splits a dimension by which the grid does not choose blocks.
    """
    mapping = eqn.params["grid_mapping"]
    grid = grid_along(eqn, set(range(len(mapping.grid))), may_read_number=True)
    names = [*entry.rule.operands, *entry.rule.results]
    places = [] if grid is None else [*grid.operands[len(eqn.invars) - mapping.num_inputs :], *grid.results]
    met: dict[int, set[str]] = {}
    chosen: dict[str, set[int | None]] = {}
    sizes = [v.aval.shape for v in (*in_blocks(eqn), *eqn.outvars)]
    for i, row in enumerate(names):
        for d, name in enumerate(row):
            g = places[i][d] if places else None
            if g is not None:
                met.setdefault(g, set()).add(name)
            if name != UNNAMED and sizes[i][d] > 1:
                chosen.setdefault(name, set()).add(g)
    for name in sorted(entry.rule.split & chosen.keys()):
        if len(chosen[name]) != 1 or None in chosen[name]:
            raise InvalidArgumentError(
                where=entry.where,
                expected=f"factor {name!r} to be a dimension of the kernel's grid, as it may be split",
                got=f"a grid {tuple(mapping.grid)} that does not choose blocks by it alone, in the call at "
                f"{jax_compat.source_line(eqn)}",
                hint=f"mark it [{name}] where the kernel needs it whole",
            )
    if grid is None:
        return None
    split = {g for g, of in met.items() if of <= entry.rule.split}
    runs = tuple(n if g in split else 1 for g, n in enumerate(grid.runs))
    return None if max(runs) == 1 else dataclasses.replace(grid, runs=runs)


# The calls

# Primitives that call code which XLA does not see into, and what users know them by.
CALLS = {"pallas_call": "a Pallas call", "ffi_call": "a foreign function (jax.ffi)", "tpu_custom_call": "a Mosaic call"}


def is_opaque(eqn: Any) -> bool:
    return eqn is not None and eqn.primitive.name in CALLS


class _SameEquation:
    """An equation by its identity: those of jax compare by what they hold."""

    def __init__(self, eqn: Any) -> None:
        self.eqn = eqn

    def __hash__(self) -> int:
        return id(self.eqn)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _SameEquation) and other.eqn is self.eqn


def known_grid(eqn: Any) -> Grid | None:
    """How a Pallas call may be split; None where nothing of it may be. Raises: InvalidArgumentError of its entry."""
    return _grid(_SameEquation(eqn), entry_of(eqn))


@functools.lru_cache(maxsize=4096)
def _grid(same: _SameEquation, entry: Any) -> Grid | None:
    return grid_under(entry, same.eqn) if entry is not None else grid_of(same.eqn)


def opaque_rule(eqn: Any) -> Rule:
    """What an entry or the grid says; else nothing may be split, with a note that says how to change that."""
    if is_pallas_call(eqn):
        grid = known_grid(eqn)
        if grid is not None:
            return grid_rule(grid, eqn)
    elif (entry := entry_of(eqn)) is not None:
        return graph_rule(entry.rule, [v.aval for v in eqn.invars], [v.aval for v in eqn.outvars])
    line = jax_compat.source_line(eqn)
    return replicated_rule(
        eqn,
        f"{CALLS[eqn.primitive.name]} without a rule{f', at {line},' if line else ''} runs whole on every device; "
        f"autopar.kernel(fun, rule=...) around the function that calls it, or autopar.known_kernel({name_of(eqn)!r}, "
        "rule), says how it may be split",
    )


def opaque_work(eqn: Any) -> KernelWork:
    """What a call does on whole arrays."""
    return known_work(eqn, call_work(eqn))


def run_opaque(eqn: Any, shapes: Sequence[Sequence[int]], parts: Sequence[Any]) -> list[Any]:
    """A call on one device's part of its operands. `shapes`: those of its results there."""
    if is_pallas_call(eqn):
        return call_on_part(known_grid(eqn), eqn, shapes, parts)
    return jax_compat.bind(jax_local.foreign_call_of(eqn, shapes), parts)
