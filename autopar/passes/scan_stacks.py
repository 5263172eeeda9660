"""Finds the scan over layers that holds most work of a step, and the values that are stacked like its layers.

Calls are inlined, so all equations are in one list. Then dimension 0 of the scan's inputs and stacked outputs is
followed through the sharding rules of the equations around it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from scipy.cluster.hierarchy import DisjointSet

from autopar.common import jax_compat
from autopar.frontend.build_graph import called_jaxpr, role_of
from autopar.ir.graph import FactorKind, Role, Rule
from autopar.ir.primitives import multiplications
from autopar.ir.traced_step import TracedStep
from autopar.sharding.rules import RuleBook, equation_key

DOMINATING = 0.5  # of the forward pass's matrix products: a scan with less is no stack that stages could be cut from
LOOPS = frozenset({"scan", "while", "cond"})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Stacks:
    """`scans` (by position of the equation in the flat jaxpr) go over the same `trips` layers; `stacked` are the
    variables whose dimension 0 counts them, `arguments` and `results` the numbers of the state's among them."""

    closed: Any
    trips: int
    scans: frozenset[int]
    stacked: frozenset[Any]
    arguments: frozenset[int]
    results: frozenset[int]
    name: str

    @property
    def jaxpr(self) -> Any:
        return jax_compat.open_jaxpr(self.closed)

    def holds(self, atom: Any) -> bool:
        return not isinstance(atom, jax_compat.Literal) and atom in self.stacked


def find_stacks(traced: TracedStep, rules: RuleBook, sliced: frozenset[int] = frozenset()) -> Stacks | None:
    """The layers of the scan with most of the forward pass's arithmetic, if it scans over state; else None.

    The leaves `sliced` are state that is stacked like the layers, whether the step returns them or not.
    """
    if not _may_hold_stacks(traced):
        return None
    closed = _flattened(traced)
    jaxpr = jax_compat.open_jaxpr(closed)
    forward = [eqn for eqn in jaxpr.eqns if role_of(jax_compat.name_stack(eqn)) is Role.FORWARD]
    if sliced and not forward:  # a step without gradients
        forward = list(jaxpr.eqns)
    work = [_products(eqn) for eqn in forward]
    largest = max(zip(work, range(len(forward)), strict=True), default=(0.0, 0))
    if largest[0] <= DOMINATING * sum(work) or forward[largest[1]].primitive.name != "scan":
        return None
    main = forward[largest[1]]
    trips = int(main.params["length"])
    _, xs, _ = _scan_operands(main)
    if trips < 2 or not xs:
        return None
    groups = _Groups(rules_of(jaxpr, trips, rules))
    for eqn in jaxpr.eqns:
        groups.follow(eqn)
    for i, o in traced.tied.items():
        groups.join(jaxpr.invars[i], jaxpr.outvars[o])
    state = {groups.find(jaxpr.invars[i]) for i in {*traced.tied, *sliced}}
    if state.isdisjoint(groups.find(v) for v in xs if not isinstance(v, jax_compat.Literal)):
        return None
    scans, roots = _scans_over(jaxpr, main, trips, groups)
    variables = {*jaxpr.invars, *jaxpr.constvars, *(v for eqn in jaxpr.eqns for v in eqn.outvars)}
    stacked = frozenset(v for v in variables if groups.find(v) in roots and _divides(v, trips))
    if not all(_divides(jaxpr.invars[i], trips) for i in sliced):
        return None
    arguments = sliced | {i for i in traced.tied if jaxpr.invars[i] in stacked}
    return Stacks(
        closed=closed,
        trips=trips,
        scans=scans,
        stacked=stacked,
        arguments=arguments,
        results=frozenset(traced.tied[i] for i in arguments if i in traced.tied),
        name=f"the scan at {jax_compat.source_line(main)}",
    )


def _flattened(traced: TracedStep) -> Any:
    """The closed jaxpr of a step with calls inlined, as `build_graph` inlines them."""

    def run(*args: Any) -> list[Any]:
        return _inline(traced.jaxpr, traced.constants, args)

    shapes = {leaf.leaf: leaf.shape for leaf in traced.padded}  # of the code, of what is stored padded
    avals = [a.update(shape=shapes[i]) if i in shapes else a for i, a in enumerate(traced.in_avals)]
    return jax.make_jaxpr(run)(*avals)


def _inline(jaxpr: Any, constants: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    env: dict[Any, Any] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*constants, *args), strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, jax_compat.Literal) else env[atom]

    for eqn in jaxpr.eqns:
        operands = [read(v) for v in eqn.invars]
        with jax_compat.standing_at(eqn):
            inner = called_jaxpr(eqn)
            if inner is None:
                outs = jax_compat.bind(eqn, operands)
            else:
                outs = _inline(jax_compat.open_jaxpr(inner), jax_compat.jaxpr_consts(inner), operands)
        env.update(zip(eqn.outvars, outs, strict=True))
    return [read(v) for v in jaxpr.outvars]


def _may_hold_stacks(traced: TracedStep) -> bool:
    def holds(jaxpr: Any) -> bool:
        for eqn in jaxpr.eqns:
            inner = called_jaxpr(eqn)
            if eqn.primitive.name == "scan" or (inner is not None and holds(jax_compat.open_jaxpr(inner))):
                return True
        return False

    return holds(traced.jaxpr)


def _divides(variable: Any, trips: int) -> bool:
    shape = variable.aval.shape
    return bool(shape) and shape[0] % trips == 0


def _scans_over(jaxpr: Any, main: Any, trips: int, groups: _Groups) -> tuple[frozenset[int], set[Any]]:
    """(positions of the scans over the same layers, the sets of their stacked values).

    A scan over the stacked results of another one, or over the same state, belongs to them: the backward pass.
    """
    scans: set[int] = set()
    roots: set[Any] = set()
    changed = True
    while changed:
        changed = False
        for position, eqn in enumerate(jaxpr.eqns):
            if eqn.primitive.name != "scan" or position in scans or int(eqn.params["length"]) != trips:
                continue
            _, xs, ys = _scan_operands(eqn)
            stacked = {groups.find(v) for v in (*xs, *ys) if not isinstance(v, jax_compat.Literal)}
            if eqn is main or not roots.isdisjoint(stacked):
                scans.add(position)
                roots |= stacked
                changed = True
    return frozenset(scans), roots


def _scan_operands(eqn: Any) -> tuple[list[Any], list[Any], list[Any]]:
    """(constants and carried values, scanned inputs, stacked results) of a scan."""
    consts, carry = jax_compat.scan_counts(eqn.params)
    return list(eqn.invars[: consts + carry]), list(eqn.invars[consts + carry :]), list(eqn.outvars[carry:])


def _products(eqn: Any) -> float:
    """Arithmetic of the matrix products and convolutions of an equation, in multiplications."""
    if (own := multiplications(eqn)) is not None:
        return own
    inner = [
        jax_compat.open_jaxpr(j)
        for p in eqn.params.values()
        for j in (p if isinstance(p, (tuple, list)) else (p,))
        if hasattr(jax_compat.open_jaxpr(j), "eqns")
    ]
    return float(eqn.params.get("length", 1)) * sum(_products(e) for j in inner for e in j.eqns) if inner else 0.0


def rules_of(jaxpr: Any, trips: int, rules: RuleBook) -> dict[str, Rule]:
    """The rules, by key, of the equations with a dimension 0 that may be the layers'."""
    equations: dict[str, Any] = {}
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in LOOPS | jax_compat.REMAT_CALLS:
            continue
        if any(v.aval.shape[:1] == (trips,) for v in (*eqn.invars, *eqn.outvars)):
            equations[equation_key(eqn)] = eqn
    rules.learn(equations.items())
    return {key: rules.rule(key) for key in equations}


class _Groups:
    """Variables whose dimension 0 is the same factor (its major part), joined."""

    def __init__(self, rules: Mapping[str, Rule]) -> None:
        self.rules = rules
        self._variables = DisjointSet()

    def find(self, variable: Any) -> Any:
        self._variables.add(variable)
        return self._variables[variable]

    def join(self, one: Any, other: Any) -> None:
        if not isinstance(one, jax_compat.Literal) and not isinstance(other, jax_compat.Literal):
            self._variables.merge(self.find(one), self.find(other))

    def follow(self, eqn: Any) -> None:
        rule = self.rules.get(equation_key(eqn)) if eqn.primitive.name not in LOOPS else None
        if rule is None:
            return
        first: dict[int, Any] = {}
        for variable, d, (factor, *_) in rule.factored_dims((*eqn.invars, *eqn.outvars)):
            if d == 0 and rule.factors[factor].kind is FactorKind.PASS:
                self.join(first.setdefault(factor, variable), variable)


def major(dims: tuple[tuple[int, ...], ...]) -> int | None:
    """The major factor of dimension 0."""
    return dims[0][0] if dims and dims[0] else None
