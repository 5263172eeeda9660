"""Fingerprints of traced functions: hashes of the computation, equal in every process and for every trace.

Jaxprs are compared by structure. The printed form of their parameters may contain addresses (functions, objects without
a text of their own), which differ each time. Weak types are excluded: they determine the traced operations, and nothing
else.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import re
from collections.abc import Mapping, Set
from typing import Any

import jax
import numpy as np

from autopar.common import jax_compat
from autopar.ops.kernels.operation import is_kernel, program_of

_ADDRESS = re.compile(r"0x[0-9a-fA-F]{6,}|\b[0-9]{12,}\b")  # also as `id` writes it
_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(Ellipsis), enum.Enum, np.dtype)
_SHORT = frozenset({bool, int, str, type(None)})
_TREE = type(jax.tree.structure(0))


def jaxpr_fingerprint(closed: Any) -> str:
    """A hash of a closed jaxpr that is the same in every process: equations, parameters, shapes and constants."""
    return _Hasher().of(closed).hex()[:32]


def program_fingerprint(eqn: Any) -> str:
    """A hash of an equation whose text does not tell what it computes: that of a kernel, or with jaxprs inside."""
    return _Hasher().of_equation(eqn, {}).hex()[:32]


def module_fingerprint(jaxpr: Any) -> str:
    """A hash of the name stacks of all equations: the user's modules, which `jaxpr_fingerprint` leaves out. Plans name
    modules, and cut a step into the layers that modules number.
    """
    return _of_name_stacks(jaxpr, {}).hex()[:32]


def _of_name_stacks(jaxpr: Any, hashes: dict[int, bytes]) -> bytes:
    jaxpr = jax_compat.open_jaxpr(jaxpr)
    if id(jaxpr) not in hashes:
        parts: list[str | bytes] = []
        for eqn in jaxpr.eqns:
            parts.append(_ADDRESS.sub("", jax_compat.name_stack(eqn)))
            parts += [_of_name_stacks(inner, hashes) for inner in _jaxprs(eqn.params)]
        hashes[id(jaxpr)] = _digest(*parts)
    return hashes[id(jaxpr)]


def first_difference(first: Any, second: Any) -> str:
    """The first equation in which two jaxprs differ, as `primitive at file:line (function)`; empty where none does."""
    hasher = _Hasher()
    return _first_difference(hasher, jax_compat.open_jaxpr(first), jax_compat.open_jaxpr(second))


def _first_difference(hasher: _Hasher, first: Any, second: Any) -> str:
    names: tuple[dict[Any, bytes], dict[Any, bytes]] = ({}, {})
    for a, b in zip(first.eqns, second.eqns, strict=False):
        if hasher.of_equation(a, names[0]) != hasher.of_equation(b, names[1]):
            inner = zip(_jaxprs(a.params), _jaxprs(b.params), strict=False)
            deeper = (_first_difference(hasher, x, y) for x, y in inner)
            return next(filter(None, deeper), "") or f"{a.primitive.name} at {jax_compat.source_line(a)}"
    return "" if len(first.eqns) == len(second.eqns) else f"{len(first.eqns)} and {len(second.eqns)} operations"


def _jaxprs(value: Any) -> list[Any]:
    if jax_compat.is_jaxpr(value):
        return [jax_compat.open_jaxpr(value)]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else ()
    return [jaxpr for part in parts for jaxpr in _jaxprs(part)]


class _Hasher:
    """Hashes values by content. Each jaxpr is hashed once."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, bytes]] = {}  # with the jaxpr, so that its id stays its own
        self._inside: set[int] = set()
        self._of_short: dict[tuple[type, Any], bytes] = {}  # of what most parameters of equations are
        self._types: dict[Any, str] = {}

    def of(self, value: Any) -> bytes:
        kind = type(value)
        # Equal values of these types are written alike, which those of others need not be: 0.0 and -0.0.
        is_short = kind in _SHORT or (kind is tuple and all(type(part) is int for part in value))
        if is_short and (kind, value) in self._of_short:
            return self._of_short[kind, value]
        found = self._of_value(value)
        if is_short:
            self._of_short[kind, value] = found
        return found

    def _of_value(self, value: Any) -> bytes:
        if isinstance(value, _PLAIN):
            return _digest(type(value).__name__, repr(value))
        if jax_compat.is_jaxpr(value):
            return self._of_jaxpr(value)
        if isinstance(value, (np.ndarray, np.generic, jax.Array)) and not jax_compat.is_tracer(value):
            return _of_array(value)
        if isinstance(value, jax_compat.ShapedArray):
            return _digest("type", _type(value))
        if isinstance(value, (type, _TREE)):
            return self._of_tree(value) if isinstance(value, _TREE) else _digest("type", _name(value))
        if id(value) in self._inside:
            return b"itself"
        self._inside.add(id(value))
        try:
            return self._of_parts(value)
        finally:
            self._inside.discard(id(value))

    def _of_parts(self, value: Any) -> bytes:
        kind = _name(type(value))
        if isinstance(value, Mapping):
            return _digest(kind, *(self.of(part) for item in value.items() for part in item))
        if isinstance(value, (tuple, list)):
            return _digest(kind, *map(self.of, value))
        if isinstance(value, Set):
            return _digest(kind, *sorted(map(self.of, value)))
        if isinstance(value, functools.partial):
            return _digest(kind, self.of(value.func), self.of(value.args), self.of(value.keywords))
        code = getattr(value, "__code__", None)
        if code is not None:
            return _digest("function", _name(value), self._of_code(code))
        if dataclasses.is_dataclass(value) and kind.rpartition(".")[2] != "DebugInfo":  # which has paths and lines
            fields = [f.name for f in dataclasses.fields(value) if f.compare and hasattr(value, f.name)]
            return _digest(kind, *(part for name in fields for part in (name, self.of(getattr(value, name)))))
        if callable(value) and hasattr(value, "__qualname__"):
            return _digest(kind, _name(value))
        return _digest(kind, _ADDRESS.sub("", repr(value)))

    def _of_code(self, code: Any) -> bytes:
        inner = type(code)
        consts = (self._of_code(c) if isinstance(c, inner) else self.of(c) for c in code.co_consts)
        return _digest(code.co_code, *code.co_names, *consts)

    def _of_tree(self, tree: Any) -> bytes:
        """The parts of a tree's structure: its classes and their auxiliary data."""
        node = tree.node_data()
        if node is None:
            return _digest("leaf", str(tree.num_leaves))
        return _digest("node", _name(node[0]), self.of(node[1]), *map(self._of_tree, tree.children()))

    def _of_jaxpr(self, value: Any) -> bytes:
        if id(value) not in self._known:
            met: dict[Any, bytes] = {}
            jaxpr = jax_compat.open_jaxpr(value)
            parts: list[bytes] = [_of_array(const) for const in jax_compat.jaxpr_consts(value)]
            parts += [self._of_atom(v, met) for v in (*jaxpr.constvars, *jaxpr.invars)]
            parts += [self.of_equation(eqn, met) for eqn in jaxpr.eqns]
            parts += [self._of_atom(v, met) for v in jaxpr.outvars]
            self._known[id(value)] = value, _digest("jaxpr", *parts)
        return self._known[id(value)][1]

    def of_equation(self, eqn: Any, met: dict[Any, bytes]) -> bytes:
        """Of an equation whose variables are numbered in the order in which they are met; `met`: the hash of each."""
        operands = [self._of_atom(v, met) for v in eqn.invars]
        params = [part for key in sorted(eqn.params.keys() - {"weak_type"}) for part in (key, self.of(eqn.params[key]))]
        results = [self._of_atom(v, met) for v in eqn.outvars]
        if is_kernel(eqn):
            params.append(self.of(program_of(eqn)))
        return _digest(eqn.primitive.name, *operands, *params, *results)

    def _of_atom(self, atom: Any, met: dict[Any, bytes]) -> bytes:
        if isinstance(atom, jax_compat.Literal):
            return _digest("literal", self.of(_value(atom)), self._type(atom.aval))
        if atom not in met:
            met[atom] = _digest(str(len(met)), self._type(atom.aval))
        return met[atom]

    def _type(self, aval: Any) -> str:
        if aval not in self._types:
            self._types[aval] = _type(aval)
        return self._types[aval]


def _value(literal: Any) -> Any:
    """A literal's value in its own type: weakly typed ones may be written with more digits."""
    if not jax.dtypes.issubdtype(literal.aval.dtype, np.number):
        return literal.val
    return np.asarray(literal.val).astype(literal.aval.dtype)


def _type(aval: Any) -> str:
    return str(aval.str_short()).removeprefix("~")


def _of_array(array: Any) -> bytes:
    if jax_compat.is_key_dtype(array.dtype):
        array = jax.random.key_data(array)
    values = np.asarray(array)
    return _digest("array", str(values.dtype), str(values.shape), values.tobytes())


def _name(value: Any) -> str:
    return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__qualname__)}"


def _digest(*parts: str | bytes) -> bytes:
    written: list[bytes] = []
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        written += (len(data).to_bytes(8, "little"), data)
    return hashlib.sha256(b"".join(written)).digest()
