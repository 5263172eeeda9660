"""Finds the scans over layers of a step, and the values that are stacked like their layers.

Calls are inlined, so all equations are in one list. Then dimension 0 of the inputs and stacked outputs of scans is
followed through the sharding rules of the equations around them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
from scipy.cluster.hierarchy import DisjointSet

from autopar.common import jax_compat
from autopar.frontend.build_graph import called_jaxpr, role_of
from autopar.ir.graph import FactorKind, Role, Rule
from autopar.ir.primitives import multiplications
from autopar.ir.rules import RuleBook, equation_key
from autopar.ir.traced_step import TracedStep

MOST_STACKS = 3  # an encoder, a decoder and one more: the largest of a step with more loops
LOOPS = frozenset({"scan", "while", "cond"})
COMBINE = {  # what makes one result of those of parts, by the primitive that made them
    "reduce_sum": jax.lax.add,
    "dot_general": jax.lax.add,
    "reduce_max": jax.lax.max,
    "reduce_min": jax.lax.min,
    "reduce_and": jax.lax.bitwise_and,
    "reduce_or": jax.lax.bitwise_or,
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Stacks:
    """One scan over `trips` layers in the forward pass, and all that is stacked like them.

    `scans` (by position of the equation in the flat jaxpr) go over the same layers; `stacked` are the variables whose
    dimension 0 counts them, `arguments` and `results` the numbers of the state's among them. `work`: the matrix
    products of the forward pass in it, in multiplications.
    """

    trips: int
    work: float
    scans: frozenset[int]
    stacked: frozenset[Any]
    arguments: frozenset[int]
    results: frozenset[int]
    name: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StackedStep:
    """A flat step with its stacks, in the order of the forward pass. `loops`: the number of its other loops with matrix
    products in the forward pass, and these.
    """

    closed: Any
    stacks: tuple[Stacks, ...]
    loops: tuple[int, float]

    @property
    def jaxpr(self) -> Any:
        return jax_compat.open_jaxpr(self.closed)


def find_stacks(traced: TracedStep, rules: RuleBook, sliced: frozenset[int] = frozenset()) -> StackedStep | None:
    """The scans over state with most of the forward pass's arithmetic; None where they have too little of it.

    The leaves `sliced` are state that is stacked like the layers, whether the step returns them or not.
    """
    found = all_stacks(traced, rules, sliced)
    if found is None:
        return None
    loops, work = found.loops, sum(stacks.work for stacks in found.stacks)
    of_forward = sum(map(_products, _forward(found.jaxpr, sliced).values()))
    # Of the products beside other loops, which no stages divide, the scans must have most to be cut into stages.
    return found if 2 * work > of_forward - loops[1] else None


def all_stacks(traced: TracedStep, rules: RuleBook, sliced: frozenset[int] = frozenset()) -> StackedStep | None:
    """The scans over state, however little of the arithmetic they have; None where there are none."""
    if not _may_hold_stacks(traced):
        return None
    closed = _flattened(traced)
    search = _Search(traced, jax_compat.open_jaxpr(closed), rules, sliced)
    stacks = search.stacks()
    if not stacks:
        return None
    cut = frozenset().union(*(found.scans for found in stacks))
    others = [_products(eqn) for at, eqn in search.forward.items() if eqn.primitive.name in LOOPS and at not in cut]
    others = [work for work in others if work]
    return StackedStep(closed=closed, stacks=stacks, loops=(len(others), sum(others)))


def _forward(jaxpr: Any, sliced: frozenset[int]) -> dict[int, Any]:
    """The equations of the forward pass by position; of a step without gradients that has `sliced` leaves, all."""
    found = {at: e for at, e in enumerate(jaxpr.eqns) if role_of(jax_compat.name_stack(e)) is Role.FORWARD}
    return dict(enumerate(jaxpr.eqns)) if sliced and not found else found


class _Search:
    """The scans over state of a flat jaxpr."""

    def __init__(self, traced: TracedStep, jaxpr: Any, rules: RuleBook, sliced: frozenset[int]) -> None:
        self.traced, self.jaxpr, self.sliced = traced, jaxpr, sliced
        self.forward = _forward(jaxpr, sliced)
        self.rules = rules_of(jaxpr, rules)
        self.groups = _Groups(self.rules)
        for eqn in jaxpr.eqns:
            self.groups.follow(eqn)
        for i, o in traced.tied.items():
            self.groups.join(jaxpr.invars[i], jaxpr.outvars[o])
        self.of_batch = _reached(jaxpr, [jaxpr.invars[i] for i in traced.batch])
        self.of_state = _reached(jaxpr, [jaxpr.invars[i] for i in {*traced.tied, *sliced}]) - self.of_batch

    def stacks(self) -> tuple[Stacks, ...]:
        """In the order of the forward pass, at most `MOST_STACKS`, each of layers of its own.

        A scan over the steps of time whose weights are the same in each is none where there is another: every stage
        would need all of them. Nor is one over rows of a table in which examples look up theirs, or one whose layers
        the forward pass goes through twice: no stages could hold their layers in order.
        """
        state = {self.groups.find(self.jaxpr.invars[i]) for i in {*self.traced.tied, *self.sliced}}
        over_state = [at for at in self.forward if self.is_over(state, at)]
        for is_better in (self.reads_batch, self.has_own_weights):
            over_state = [at for at in over_state if is_better(at)] or over_state
        found: dict[int, Stacks] = {}
        for at in sorted(over_state, key=lambda at: -_products(self.forward[at])):
            stacks = self.stacks_of(at)
            if self.may_be_cut(stacks, at) and all(stacks.stacked.isdisjoint(s.stacked) for s in found.values()):
                found[at] = stacks
        largest = dict(list(found.items())[:MOST_STACKS])
        stacks_in_turn = [stacks for _, stacks in sorted(largest.items())]
        return self.with_sliced(stacks_in_turn)

    def is_over(self, state: set[Any], at: int) -> bool:
        eqn = self.forward[at]
        if eqn.primitive.name != "scan" or int(eqn.params["length"]) < 2 or not _products(eqn):
            return False
        return not state.isdisjoint(map(self.groups.find, _variables(_scan_operands(eqn)[1])))

    def reads_batch(self, at: int) -> bool:
        return not self.of_batch.isdisjoint(self.forward[at].outvars)

    def has_own_weights(self, at: int) -> bool:
        """Whether most of what a scan reads of the state is read by one trip each."""
        same, own, _ = _scan_operands(self.forward[at])
        same_bytes, own_bytes = (
            sum(v.aval.size * v.aval.dtype.itemsize for v in _variables(atoms) if v in self.of_state)
            for atoms in (same, own)
        )
        return own_bytes >= same_bytes

    def stacks_of(self, at: int) -> Stacks:
        jaxpr, main = self.jaxpr, self.forward[at]
        trips = int(main.params["length"])
        scans, roots = _scans_over(jaxpr, main, trips, self.groups)
        variables = {*jaxpr.invars, *jaxpr.constvars, *(v for eqn in jaxpr.eqns for v in eqn.outvars)}
        stacked = frozenset(v for v in variables if self.groups.find(v) in roots and _divides(v, trips))
        given = {*self.traced.tied, *self.sliced}
        arguments = frozenset(i for i in given if jaxpr.invars[i] in stacked)
        return Stacks(
            trips=trips,
            work=_products(main),
            scans=scans,
            stacked=stacked,
            arguments=arguments,
            results=frozenset(self.traced.tied[i] for i in arguments if i in self.traced.tied),
            name=f"the scan at {jax_compat.source_line(main)}",
        )

    def may_be_cut(self, stacks: Stacks, main: int) -> bool:
        """Whether stages can hold the layers in order: what the forward pass computes of examples goes through them
        once, and reads them nowhere by their number.
        """
        for at, eqn in self.forward.items():
            if at == main or self.of_batch.isdisjoint(eqn.outvars):
                continue
            if at in stacks.scans:
                if _products(eqn):
                    return False
            elif self.reads_state_of(stacks, eqn) and not self.is_in_parts(eqn, stacks):
                return False
        return True

    def reads_state_of(self, stacks: Stacks, eqn: Any) -> bool:
        return any(v in stacks.stacked and v in self.of_state for v in _variables(eqn.invars))

    def is_in_parts(self, eqn: Any, stacks: Stacks) -> bool:
        """Whether an equation combines nothing of one layer with another, but by sums."""
        rule = self.rules.get(equation_key(eqn)) if eqn.primitive.name not in LOOPS else None
        if rule is None:
            return False
        factors = [
            dims[0][0] if dims and dims[0] else None
            for a, dims in zip(eqn.invars, rule.operands, strict=True)
            if not isinstance(a, jax_compat.Literal) and a in stacks.stacked
        ]
        combines = eqn.primitive.name in COMBINE
        kinds = [rule.factors[factor].kind if factor is not None else FactorKind.FIXED for factor in factors]
        return all(kind is FactorKind.PASS or (combines and kind is not FactorKind.FIXED) for kind in kinds)

    def with_sliced(self, stacks: Sequence[Stacks]) -> tuple[Stacks, ...]:
        """The stacks with the leaves that lie in slices and that nothing reads; none where a leaf fits to none."""
        placed = frozenset[int]().union(*(found.arguments for found in stacks))
        more: dict[int, list[int]] = {}
        for leaf in sorted(self.sliced - placed):
            v = self.jaxpr.invars[leaf]
            fitting = [n for n, found in enumerate(stacks) if _divides(v, found.trips)]
            if not fitting:
                return ()
            more.setdefault(min(fitting, key=lambda n: v.aval.shape[0] != stacks[n].trips), []).append(leaf)
        return tuple(
            dataclasses.replace(found, arguments=found.arguments | frozenset(more.get(n, ())))
            for n, found in enumerate(stacks)
        )


def _variables(atoms: Iterable[Any]) -> list[Any]:
    return [a for a in atoms if not isinstance(a, jax_compat.Literal)]


def _reached(jaxpr: Any, sources: Iterable[Any]) -> set[Any]:
    """The variables that depend on these."""
    reached = set(sources)
    for eqn in jaxpr.eqns:
        if not reached.isdisjoint(_variables(eqn.invars)):
            reached.update(eqn.outvars)
    return reached


def _flattened(traced: TracedStep) -> Any:
    """The closed jaxpr of a step with calls inlined, as `build_graph` inlines them."""

    def run(*args: Any) -> list[Any]:
        return _inline(traced.jaxpr, traced.constants, args)

    return jax.make_jaxpr(run)(*traced.in_avals)


def _inline(
    jaxpr: Any, constants: Sequence[Any], args: Sequence[Any], caller: jax_compat.Caller = jax_compat.STEP
) -> list[Any]:
    env: dict[Any, Any] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*constants, *args), strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, jax_compat.Literal) else env[atom]

    for eqn in jaxpr.eqns:
        operands = [read(v) for v in eqn.invars]
        with jax_compat.standing_at(caller.located(eqn)):
            inner = called_jaxpr(eqn)
            if inner is None:
                outs = jax_compat.bind(eqn, operands)
            else:
                called = jax_compat.open_jaxpr(inner), jax_compat.jaxpr_consts(inner)
                outs = _inline(*called, operands, caller.of(eqn, inner))
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

    A scan over the stacked results of another one, or over the same state, belongs to them: the backward pass, and
    layers in blocks (`lax.map` with a batch size).
    """
    scans: set[int] = set()
    roots: set[Any] = set()
    changed = True
    while changed:
        changed = False
        for position, eqn in enumerate(jaxpr.eqns):
            if eqn.primitive.name != "scan" or position in scans or trips % int(eqn.params["length"] or trips + 1):
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


def rules_of(jaxpr: Any, rules: RuleBook) -> dict[str, Rule]:
    """The rules, by key, of the equations with a dimension 0 that may be the layers' of a scan."""
    lengths = {int(eqn.params["length"]) for eqn in jaxpr.eqns if eqn.primitive.name == "scan"}
    equations: dict[str, Any] = {}
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in LOOPS | jax_compat.REMAT_CALLS:
            continue
        if any(v.aval.shape and v.aval.shape[0] in lengths for v in (*eqn.invars, *eqn.outvars)):
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
