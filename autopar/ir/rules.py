"""Sharding rules of equations, asked of Shardy and cached.

Each distinct equation (primitive, parameters, shapes) is lowered to StableHLO, Shardy annotates every op with its
factors, and the ops of one equation are joined along def-use into one rule. What has no usable rule is replicated.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from msgspec.structs import replace
from scipy.cluster.hierarchy import DisjointSet

from autopar.common import jax_compat
from autopar.ir.graph import Block, Factor, FactorKind, OpKind, Rule, walk
from autopar.ir.primitives import COMBINING, DECOMPOSITIONS, SUMMING, dtype_text, window_dims

_RULE = re.compile(r"<\((.*?)\)->\((.*?)\)(?: \{([^}]*)\})?(.*)>")
_TENSOR = re.compile(r"\[([^\]]*)\]")
_FACTOR = re.compile(r"[a-z](?:_\d+)?")
_SPECIAL = re.compile(r"(reduction|need_replication|permutation|blocked_propagation)=\{([^}]*)\}")

Dims = tuple[tuple[int, ...], ...]


def equation_key(eqn: Any) -> str:
    """What an equation computes of its operands, as text that is the same in every process."""
    params = ",".join(f"{k}={v!r}" for k, v in sorted(eqn.params.items()) if not _is_code(v))
    avals = ",".join(_aval_key(v) for v in eqn.invars)
    outs = ",".join(_aval_key(v) for v in eqn.outvars)
    return f"{eqn.primitive.name}[{params}]({avals})->({outs})"


def has_code(eqn: Any) -> bool:
    """Whether an equation calls something, which is no part of its key."""
    return any(map(_is_code, eqn.params.values()))


def _is_code(value: Any) -> bool:
    return callable(value) or hasattr(value, "eqns")


def _aval_key(var: Any) -> str:
    # By value: JAX has classes of its own for literals, whose texts differ and leave out digits.
    aval = var.aval
    literal = f"={np.asarray(var.val, aval.dtype).tolist()!r}" if isinstance(var, jax_compat.Literal) else ""
    return f"{dtype_text(aval.dtype)}{list(aval.shape)}{literal}"


class RuleBook:
    """Rules by equation key. `asked` counts the equations whose rules were not `known` at first. These are taken from
    `learned`, what other books of the process found, or added to it.
    """

    def __init__(self, known: dict[str, Rule] | None = None, learned: dict[str, Rule] | None = None) -> None:
        self._known = dict(known or {})
        self._learned = {} if learned is None else learned
        self.asked = 0

    @property
    def known(self) -> dict[str, Rule]:
        return dict(self._known)

    def learn(self, equations: Iterable[tuple[str, Any]]) -> None:
        """Finds the rules of all equations (with their keys) that are not known yet, many in one lowering."""
        new: dict[str, Any] = {}
        for key, eqn in equations:
            if key not in self._known:
                new.setdefault(key, eqn)
        self.asked += len(new)
        items = [(key, eqn) for key, eqn in new.items() if key not in self._learned]
        for start in range(0, len(items), _BATCH):
            self._learn_batch(items[start : start + _BATCH])
        self._known |= {key: self._learned[key] for key in new if key in self._learned}

    def _learn_batch(self, items: list[tuple[str, Any]]) -> None:
        try:
            module = _lower_side_by_side([eqn for _, eqn in items])
        except (TypeError, ValueError, RuntimeError, KeyError, AssertionError) as error:
            # Lowering runs every primitive's own code, and some cannot be lowered outside of their surroundings.
            if len(items) == 1:
                key, eqn = items[0]
                self._known[key] = replicated_rule(eqn, f"cannot be lowered alone ({type(error).__name__})")
                return
            middle = len(items) // 2
            self._learn_batch(items[:middle])
            self._learn_batch(items[middle:])
            return
        for (key, _), rule in zip(items, _read_rules(module, [eqn for _, eqn in items]), strict=True):
            self._learned[key] = rule

    def rule(self, key: str) -> Rule:
        """The rule of an equation that was learned."""
        return self._known[key]


def with_rules(block: Block, rules: RuleBook) -> Block:
    """The block, with the sharding rules of the equations that have none yet."""
    rules.learn((op.key, op.eqn) for op in walk(block) if op.kind is OpKind.EQUATION and op.rule is None)
    return _with_known_rules(block, rules)


def _with_known_rules(block: Block, rules: RuleBook) -> Block:
    ops = []
    for op in block.ops:
        if op.kind is OpKind.EQUATION and op.rule is None:
            op = replace(op, rule=rules.rule(op.key))
        if op.blocks:
            op = replace(op, blocks=tuple(_with_known_rules(b, rules) for b in op.blocks))
        ops.append(op)
    return replace(block, ops=tuple(ops))


def rule_of_parts(function: Callable[..., Any], avals: Sequence[Any]) -> Rule:
    """The rule of a whole function that each device would run on its part by itself.

    Numbers of positions (`iota`) and arrays that are written into it are then those of the part: dimensions along which
    they differ are fixed.
    """
    (eqn,) = jax.make_jaxpr(lambda *args: jax.jit(function)(*args))(*avals).eqns
    (rule,) = _read_rules(_lower_side_by_side([eqn]), [eqn], numbered=True)
    return rule


_BATCH = 64  # equations per lowering; a failure bisects, so this only amortises the pass manager's start


def replicated_rule(eqn: Any, note: str) -> Rule:
    """A rule under which nothing may be split."""
    operands, results = ([([()] * len(v.aval.shape), v.aval.shape) for v in of] for of in (eqn.invars, eqn.outvars))
    return replace(Rule.by_names(operands, results, lambda _, size: Factor(size, FactorKind.FIXED)), note=note)


def _lower_side_by_side(eqns: Sequence[Any]) -> Any:
    """One annotated module that evaluates every equation on arguments of its own."""
    avals = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for eqn in eqns for v in _variables(eqn)]

    def side_by_side(*args: Any) -> list[Any]:
        rest, out = iter(args), []
        for eqn in eqns:
            literal = jax_compat.Literal
            out += jax_compat.bind(eqn, [v.val if isinstance(v, literal) else next(rest) for v in eqn.invars])
        return out

    return jax_compat.annotated_module(side_by_side, avals)


def _variables(eqn: Any) -> list[Any]:
    return [v for v in eqn.invars if not isinstance(v, jax_compat.Literal)]


def _read_rules(module: Any, eqns: Sequence[Any], *, numbered: bool = False) -> list[Rule]:
    """One rule for each equation of a module made by `_lower_side_by_side`; `numbered` as in `_Join`."""
    functions = jax_compat.module_functions(module)
    join = _Join(numbered)
    block = functions["main"].regions[0].blocks[0]
    arguments = [join.tensor(_shape(a)) for a in block.arguments]
    results = _walk_body(join, functions, block, arguments)
    rules, rest = [], iter(arguments)
    for eqn in eqns:
        # A typed PRNG key has its words as dimensions behind its own: only its own count.
        ins = [None if isinstance(v, jax_compat.Literal) else next(rest)[: len(v.aval.shape)] for v in eqn.invars]
        outs = [t[: len(v.aval.shape)] for t, v in zip(results, eqn.outvars, strict=False)]
        results = results[len(eqn.outvars) :]
        rules.append(join.rule(eqn, ins, outs))
    return rules


@dataclasses.dataclass
class _Class:
    """A factor of the joined rule while it is being put together."""

    size: int
    fixed: bool = False
    reduced: bool = False
    parts: tuple[int, ...] = ()  # the finer factors it turned out to consist of, major first


class _Join:
    """Union of the factors of ops that share tensors. A tensor is a list of dimensions, each a list of factors.

    `numbered`: what is made of nothing (iota, constants) depends on the place in the whole.
    """

    def __init__(self, numbered: bool = False) -> None:
        self.numbered = numbered
        self._sets = DisjointSet()
        self._class: list[_Class] = []  # by factor: of the set that it is the root of

    def new(self, size: int) -> int:
        self._sets.add(len(self._class))
        self._class.append(_Class(size))
        return len(self._class) - 1

    def expand(self, dim: Iterable[int]) -> list[int]:
        """A dimension's factors, at their finest, as representatives of their classes."""
        out: list[int] = []
        for f in dim:
            root = self._sets[f]
            parts = self._class[root].parts
            out += self.expand(parts) if parts else [root]
        return out

    def union(self, f: int, g: int) -> None:
        a, b = self._class[self._sets[f]], self._class[self._sets[g]]
        if not self._sets.merge(f, g):
            return
        a.fixed |= b.fixed or a.size != b.size
        a.reduced |= b.reduced
        self._class[self._sets[f]] = a

    def fix(self, factors: Iterable[int]) -> None:
        for f in self.expand(factors):
            self._class[f].fixed = True

    def reduce(self, factors: Iterable[int]) -> None:
        for f in self.expand(factors):
            self._class[f].reduced = True

    def sizes(self, dim: Iterable[int]) -> list[int]:
        return [self._class[f].size for f in self.expand(dim)]

    def tensor(self, shape: Sequence[int]) -> list[list[int]]:
        return [[self.new(n)] if n != 1 else [] for n in shape]

    def connect(self, one: list[list[int]], other: list[list[int]]) -> None:
        """Says that two descriptions are of the same tensor."""
        for dim_a, dim_b in zip(one, other, strict=True):
            a, b = self.expand(dim_a), self.expand(dim_b)
            a_sizes, b_sizes = self.sizes(a), self.sizes(b)
            if a_sizes == b_sizes:
                for f, g in zip(a, b, strict=True):
                    self.union(f, g)
            elif len(a) == 1 and math.prod(b_sizes) == a_sizes[0]:
                self._split(a[0], b)
            elif len(b) == 1 and math.prod(a_sizes) == b_sizes[0]:
                self._split(b[0], a)
            else:
                self.fix([*a, *b])

    def _split(self, whole: int, parts: list[int]) -> None:
        """Where one side sees a dimension as one factor and the other as several, it is several everywhere."""
        c = self._class[whole]
        if c.fixed:
            self.fix(parts)
        if c.reduced:
            self.reduce(parts)
        c.parts = tuple(parts)

    def rule(self, eqn: Any, ins: list[list[list[int]] | None], outs: list[list[list[int]]]) -> Rule:
        number: dict[int, int] = {}
        factors: list[Factor] = []
        in_results = {f for t in outs for dim in t for f in self.expand(dim)}
        in_operands = {f for t in ins if t is not None for dim in t for f in self.expand(dim)}
        for operand, d in window_dims(eqn):
            if (tensor := ins[operand]) is not None:
                self.fix(tensor[d])
        if eqn.primitive.name in DECOMPOSITIONS:  # of each matrix all is needed for any part of the results
            first = len(eqn.invars[0].aval.shape) - 2
            self.fix(f for tensor in (*ins, *outs) if tensor is not None for dim in tensor[first:] for f in dim)
        repeated = _repeated(self, [*[t for t in ins if t is not None], *outs])
        primitive = eqn.primitive.name

        def kind(f: int) -> FactorKind:
            c = self._class[f]
            if c.fixed or f in repeated:
                return FactorKind.FIXED
            if f in in_results:
                # Reduced inside and yet split outside: the op needs a collective of its own in between.
                return FactorKind.FIXED if c.reduced else FactorKind.PASS
            if c.reduced and primitive in SUMMING:
                return FactorKind.SUM
            if c.reduced and primitive in COMBINING:
                return FactorKind.EXTREMUM
            return FactorKind.FIXED

        def dims(tensor: list[list[int]] | None, rank: int) -> Dims:
            if tensor is None:
                return ((),) * rank
            out = []
            for dim in tensor:
                row = []
                for root in self.expand(dim):
                    if root not in number:
                        number[root] = len(factors)
                        factors.append(Factor(self._class[root].size, kind(root)))
                    row.append(number[root])
                out.append(tuple(row))
            return tuple(out)

        operands = tuple(dims(t, len(v.aval.shape)) for t, v in zip(ins, eqn.invars, strict=True))
        results = tuple(dims(t, len(v.aval.shape)) for t, v in zip(outs, eqn.outvars, strict=True))
        usable = any(f.kind is not FactorKind.FIXED for f in factors)
        splittable = any(self._class[f].size > 1 for f in in_results | in_operands)
        note = "" if usable or not splittable else "none of its dimensions can be split"
        for described, var in zip((*operands, *results), (*eqn.invars, *eqn.outvars), strict=True):
            for n, dim in zip(var.aval.shape, described, strict=True):
                if dim and math.prod(factors[f].size for f in dim) != n:
                    return replicated_rule(eqn, "factors do not multiply to its dimensions")
        return Rule(tuple(factors), operands, results, note)


def _repeated(join: _Join, tensors: list[list[list[int]]]) -> set[int]:
    """Factors that stand twice in one tensor: splitting both places by one axis is not possible."""
    out: set[int] = set()
    for tensor in tensors:
        seen: set[int] = set()
        for f in (f for dim in tensor for f in join.expand(dim)):
            if f in seen:
                out.add(f)
            seen.add(f)
    return out


def _walk_body(
    join: _Join, functions: dict[str, Any], block: Any, arguments: list[Any], outer: dict[Any, Any] | None = None
) -> list[Any]:
    """Applies the rules of a function's or region's ops; returns the tensors that it returns."""
    tensors: dict[Any, list[list[int]]] = {**(outer or {}), **dict(zip(block.arguments, arguments, strict=True))}
    for op in block.operations:
        name = op.operation.name
        ins = [tensors[v] for v in op.operands]
        if name in ("func.return", "stablehlo.return"):
            return ins
        if name == "func.call":
            callee = functions[op.attributes["callee"].value]
            outs = _walk_body(join, functions, callee.regions[0].blocks[0], ins)
        else:
            outs = [join.tensor(_shape(v)) for v in op.results]
            if name == "stablehlo.while":
                _loop(join, functions, op, ins, outs, tensors)
            else:
                _constrain(join, op, name, ins, outs)
        for value, tensor in zip(op.results, outs, strict=True):
            tensors[value] = tensor
    raise AssertionError("a function ends with a return")


def _loop(join: _Join, functions: dict[str, Any], op: Any, ins: list[Any], outs: list[Any], outer: dict) -> None:
    """A loop inside one primitive's lowering (threefry's rounds): each carried value is one tensor throughout."""
    condition, body = (region.blocks[0] for region in op.regions)
    _walk_body(join, functions, condition, ins, outer)
    for carried, after, result in zip(ins, _walk_body(join, functions, body, ins, outer), outs, strict=True):
        join.connect(carried, after)
        join.connect(carried, result)


def _shape(value: Any) -> tuple[int, ...]:
    return tuple(value.type.shape)


def _constrain(join: _Join, op: Any, name: str, ins: list[list[list[int]]], outs: list[list[list[int]]]) -> None:
    """Applies one op's rule to its operands and results."""
    if "sdy.sharding_rule" in op.attributes:
        _apply(join, str(op.attributes["sdy.sharding_rule"]), ins, outs)
    elif name == "chlo.top_k":
        for out in outs:
            join.connect(ins[0][:-1], out[:-1])
        join.fix(f for tensor in (*ins, *outs) for f in tensor[-1])
    elif name.startswith("chlo.") and all(_same_sizes(join, t, outs[0]) for t in (*ins, *outs)):
        for tensor in (*ins, *outs[1:]):  # the rest of chlo is elementwise mathematics
            join.connect(tensor, outs[0])
    elif ins:
        join.fix(f for tensor in (*ins, *outs) for dim in tensor for f in dim)
    elif join.numbered:
        join.fix(f for tensor in outs for d, dim in enumerate(tensor) if _differs_along(op, name, d) for f in dim)
    # Else an op without operands (iota, constant) may be made in any layout.


def _differs_along(op: Any, name: str, dim: int) -> bool:
    """Whether what an op makes of nothing differs along a dimension, or may."""
    if name == "stablehlo.iota":
        return int(op.attributes["iota_dimension"]) == dim
    return not (name == "stablehlo.constant" and bool(op.attributes["value"].is_splat))


def _same_sizes(join: _Join, one: list[list[int]], other: list[list[int]]) -> bool:
    return [join.sizes(d) for d in one] == [join.sizes(d) for d in other]


def _apply(join: _Join, text: str, ins: list[list[list[int]]], outs: list[list[list[int]]]) -> None:
    match = _RULE.search(text)
    assert match is not None, f"not a sharding rule: {text}"
    left, right, sizes_text, special_text = match.groups()
    sizes = {k.strip(): int(v) for k, v in (item.split("=") for item in (sizes_text or "").split(",") if item.strip())}
    factor = {name: join.new(size) for name, size in sizes.items()}
    for side, tensors in ((left, ins), (right, outs)):
        described = [[_FACTOR.findall(d) for d in t.split(",") if d.strip()] for t in _TENSOR.findall(side)]
        for names, tensor in zip(described, tensors, strict=True):
            join.connect([[factor[n] for n in dim if sizes[n] != 1] for dim in names], tensor)
    for what, names in _SPECIAL.findall(special_text):
        for n in (part.strip() for part in names.split(",")):
            if what == "reduction":
                join.reduce([factor[n]])
            else:
                # A permuted, replicated or blocked factor would need data from other devices inside the op.
                join.fix([factor[n]])
