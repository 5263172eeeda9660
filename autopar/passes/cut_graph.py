"""The graph of a micro-batch, cut out of the graph of the whole batch: sizes of examples are divided in its shapes.

No function of the user's runs again for it, and steps are cut that cannot be traced on fewer examples, or become other
operations there: axes of a fixed size (Haliax, Levanter), sizes that are closed over, contractions ordered by size.
Which dimensions hold examples is followed from the batch through the factors of the sharding rules, forward and
backward: a dimension that shares a factor with one that is cut is cut as well. Sizes in the parameters of equations
follow the shapes, and every equation is evaluated abstractly.

That says nothing about what a step means by its examples: whether they are independent is for the analysis of both
graphs to prove (`value_states`), as for a graph that was traced. Literals, other parameters and constants stay those of
the whole batch.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
from msgspec.structs import replace

from autopar.common import jax_compat
from autopar.errors import UnsupportedError
from autopar.ir.graph import Atom, Block, Op, OpGraph, OpKind, Rule, read_by
from autopar.ir.rewrite import params_of_part
from autopar.ir.rules import RuleBook, equation_key, has_code, with_rules
from autopar.ops.attention import ring
from autopar.ops.kernels.local import runs_locally


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CutDims:
    """`of[v]` are the dimensions of a value that are cut. Of the number of micro-batches they depend by one thing:
    which of the `sizes` it divides. `keys`: by the results of an equation, what it computes and is cut by; equal for
    those that are the same on a micro-batch.
    """

    of: dict[int, set[int]]
    num_microbatches: int
    sizes: frozenset[int]
    keys: dict[tuple[int, ...], tuple] = dataclasses.field(default_factory=dict)

    def hold_in(self, num_microbatches: int) -> bool:
        """Whether they are those of another number of micro-batches too."""
        return all((n % num_microbatches == 0) == (n % self.num_microbatches == 0) for n in self.sizes)


def cut_graph(
    whole: OpGraph, inputs_with_examples: Mapping[int, int], num_microbatches: int, rules: RuleBook, where: str
) -> OpGraph:
    """The graph on a micro-batch: the same operations on values of the same numbers.

    `inputs_with_examples` are positions of inputs with examples, and the dimensions that count them.
    Raises: UnsupportedError for an operation that no change of sizes makes one on fewer examples.
    """
    dims = cut_dims(whole, inputs_with_examples, num_microbatches, where)
    return cut_along(whole, dims, num_microbatches, rules, where)


def cut_dims(whole: OpGraph, inputs_with_examples: Mapping[int, int], num_microbatches: int, where: str) -> CutDims:
    """The dimensions that `cut_graph` cuts. Raises: UnsupportedError for a size that cannot be divided."""
    cutter = _Cutter(whole, num_microbatches, where)
    inputs = {whole.block.inputs[position]: dim for position, dim in inputs_with_examples.items()}
    for v, dim in inputs.items():
        cutter.dims[v].add(dim)
    while cutter.spread(whole.block):
        pass
    cutter.cut_ignored({whole.values[v].shape[dim] for v, dim in inputs.items()})
    return CutDims(of=cutter.dims, num_microbatches=num_microbatches, sizes=frozenset(cutter.asked))


def cut_along(whole: OpGraph, dims: CutDims, num_microbatches: int, rules: RuleBook, where: str) -> OpGraph:
    """The graph on a micro-batch, by the dimensions that are cut. Raises: as `cut_graph`."""
    cutter = _Cutter(whole, num_microbatches, where, dims.of, dims.keys)
    values = tuple(replace(v, shape=cutter.shape(v.id)) if cutter.dims.get(v.id) else v for v in whole.values)
    block = cutter.rewritten(whole.block)
    return dataclasses.replace(whole, values=values, block=with_rules(block, rules))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _CutEquation:
    """An equation on fewer examples: its operands and results, its parameters, its key, and its rule where that is not
    the rule book's.
    """

    invars: list[Any]
    outvars: list[Any]
    params: dict[str, Any]
    key: str
    rule: Rule | None


class _Cutter:
    """`dims[v]` are the dimensions of a value that are cut; `asked` the sizes of which it was asked whether the number
    of micro-batches divides them; `keys` as of `CutDims`.
    """

    def __init__(
        self,
        whole: OpGraph,
        num_microbatches: int,
        where: str,
        dims: dict[int, set[int]] | None = None,
        keys: dict[tuple[int, ...], tuple] | None = None,
    ) -> None:
        self.whole, self.num_microbatches, self.where = whole, num_microbatches, where
        self.dims: dict[int, set[int]] = collections.defaultdict(set) if dims is None else dims
        self.asked: set[int] = set()
        self._changed = False
        # By the id of an operation: how many dimensions around it were cut when it was last looked at. Dimensions are
        # only added, so that an equal number is an equal state, of which nothing new follows.
        self._seen: dict[int, int] = {}
        # Operations of which several factors may be the one to cut, until what is around them has told.
        self._undecided: dict[int, Op] = {}
        # Equal layers share what an equation computes and which dimensions of its operands and results are cut.
        self.keys: dict[tuple[int, ...], tuple] = {} if keys is None else keys
        self._cut_equations: dict[tuple, _CutEquation] = {}

    def shape(self, v: int) -> tuple[int, ...]:
        shape = self.whole.values[v].shape
        return tuple(n // self.num_microbatches if d in self.dims[v] else n for d, n in enumerate(shape))

    # Which dimensions are cut

    def _divides(self, size: int) -> bool:
        """Whether the number of micro-batches divides a size."""
        self.asked.add(size)
        return size % self.num_microbatches == 0

    def spread(self, block: Block) -> bool:
        """Carries what is known about cut dimensions through all operations once; whether that was anything new."""
        self._changed = False
        self._spread(block)
        while self._undecided and not self._changed:  # nothing else tells: the first of the factors that can be cut
            self._follow_factors(self._undecided.pop(next(iter(self._undecided))), decide=True)
        return self._changed

    def _spread(self, block: Block) -> None:
        for op in block.ops:
            if op.rule is None or op.blocks:
                for a, b, dropped in links(op):
                    self._link(a, b, dropped)
                if self._is_over_examples(op):
                    for atom in _sliced_and_stacked(op):
                        self._cut(atom, 0)
                for inner in op.blocks:
                    self._spread(inner)
            if op.rule is not None and self._num_cut(op) != self._seen.get(op.id, 0):
                self._follow_factors(op)
                self._seen[op.id] = self._num_cut(op)

    def _is_over_examples(self, op: Op) -> bool:
        """Whether an operation is a scan whose trips go over examples, so that a micro-batch has fewer of them."""
        return op.kind is OpKind.SCAN and any(
            isinstance(a, int) and 0 in self.dims.get(a, ()) for a in _sliced_and_stacked(op)
        )

    def _num_cut(self, op: Op) -> int:
        """The number of cut dimensions of what an operation reads and makes."""
        return sum(len(self.dims[a]) for a in (*op.inputs, *op.outputs) if isinstance(a, int) and a in self.dims)

    def cut_ignored(self, examples: Collection[int]) -> None:
        """Cuts filled arrays that loops take and do not read, as transposed scans do, where a dimension has as many
        elements as there are examples: a trace on a micro-batch has them as small. Their content does not matter.
        """
        filled = {v for op in self.whole.block.ops if not read_by(op) for v in op.outputs if not self.dims.get(v)}
        for op in self.whole.block.ops:
            if op.kind is OpKind.SCAN:
                read = {v for inner in op.blocks[0].ops for v in read_by(inner)}
                read |= {a for a in op.blocks[0].outputs if isinstance(a, int)}
                for atom, inside in zip(op.inputs[: op.num_consts], op.blocks[0].inputs, strict=False):
                    shape = self.whole.values[inside].shape
                    is_ignored = isinstance(atom, int) and atom in filled and inside not in read
                    if is_ignored and (at := [d for d in examples if d in shape]):
                        self._cut(atom, shape.index(at[0]))
        while self.spread(self.whole.block):
            pass

    def _cut(self, atom: Atom, dim: int) -> None:
        if isinstance(atom, int) and dim not in self.dims[atom]:
            if not self._divides(self.whole.values[atom].shape[dim]):
                raise self._refusal(None, f"{self.whole.values[atom].shape[dim]} in dimension {dim} of a value")
            self.dims[atom].add(dim)
            self._changed = True

    def _link(self, a: Atom, b: Atom, dropped: int) -> None:
        """Dimension d + `dropped` of a is dimension d of b."""
        if not isinstance(a, int) or not isinstance(b, int):
            return
        for d in tuple(self.dims[a]):
            if d >= dropped:
                self._cut(b, d - dropped)
        for d in tuple(self.dims[b]):
            self._cut(a, d + dropped)

    def _follow_factors(self, op: Op, decide: bool = False) -> None:
        rule, atoms = op.rule, (*op.inputs, *op.outputs)
        assert rule is not None, "an equation has one"
        places = list(rule.factored_dims(atoms))
        examples = []  # of each dimension that is cut: the factors that may be the one
        for atom, dim, factors in sorted(places, key=lambda place: len(place[2])):
            if isinstance(atom, int) and dim in self.dims[atom]:
                divide = [f for f in factors if self._divides(rule.factors[f].size)]
                examples.append(divide or list(factors[:1]))
        cut: set[int] = set()
        for divide in examples:
            if cut.isdisjoint(divide):
                common = [f for f in divide if all(f in others for others in examples)] or divide
                if len(common) > 1 and not decide:
                    self._undecided[op.id] = op
                    continue
                cut.add(common[0])
        for atom, dim, factors in places:
            if not cut.isdisjoint(factors):
                self._cut(atom, dim)

    # Equations of other sizes

    def rewritten(self, block: Block) -> Block:
        """A block on a micro-batch, without the bytes of attention's kernels, which are those of the whole batch."""
        ops = []
        for op in block.ops:
            if op.kernel_bytes is not None or op.order_cost is not None:
                op = replace(op, kernel_bytes=None, order_cost=None)
            if op.blocks:
                op = replace(op, blocks=tuple(self.rewritten(inner) for inner in op.blocks))
            if self._is_over_examples(op):
                op = replace(op, trips=op.trips // self.num_microbatches)
            ops.append(self._equation(op) if op.kind is OpKind.EQUATION and self._num_cut(op) else op)
        return replace(block, ops=tuple(ops))

    def _equation(self, op: Op) -> Op:
        key = self.keys.get(op.outputs)
        if key is None:
            code = id(op.eqn) if has_code(op.eqn) else None
            atoms = (a for a in (*op.inputs, *op.outputs) if isinstance(a, int))
            key = op.key, code, tuple(tuple(sorted(self.dims.get(a, ()))) for a in atoms)
            if op.outputs:
                self.keys[op.outputs] = key
        if key not in self._cut_equations:
            self._cut_equations[key] = self._evaluated(op)
        cut = self._cut_equations[key]
        eqn = op.eqn.replace(invars=cut.invars, outvars=cut.outvars, params=cut.params)
        return replace(op, eqn=eqn, key=cut.key, rule=cut.rule)

    def _evaluated(self, op: Op) -> _CutEquation:
        """An equation on the sizes of a micro-batch, evaluated abstractly. Raises: UnsupportedError."""
        if runs_locally(op.eqn):
            raise self._refusal(op, "a kernel or an island")
        invars = [
            jax_compat.variable_like(v, self.shape(a)) if isinstance(a, int) else v
            for a, v in zip(op.inputs, op.eqn.invars, strict=True)
        ]
        outvars = [jax_compat.variable_like(v, self.shape(a)) for a, v in zip(op.outputs, op.eqn.outvars, strict=True)]
        eqn = op.eqn.replace(invars=invars, outvars=outvars, params=self._params(op))
        expected = [tuple(v.aval.shape) for v in outvars]
        try:
            found = jax.eval_shape(
                lambda *args: jax_compat.bind(eqn, args), *(jax_compat.struct_of(v.aval) for v in invars)
            )
        except (TypeError, ValueError, NotImplementedError) as error:  # jax's rule does not take these shapes
            raise self._refusal(op, str(error).strip().split("\n")[0]) from error
        if [tuple(v.shape) for v in found] != expected:
            raise self._refusal(op, f"shapes {[tuple(v.shape) for v in found]} in place of {expected}")
        rule = ring.rule_of(eqn) if op.primitive in ring.PRIMITIVES else None
        return _CutEquation(invars=invars, outvars=outvars, params=eqn.params, key=equation_key(eqn), rule=rule)

    def _params(self, op: Op) -> dict[str, Any]:
        source = [a for a in op.inputs[:1] if isinstance(a, int)]
        whole, part = [self.whole.values[a].shape for a in source], [self.shape(a) for a in source]
        return {**op.eqn.params, **params_of_part(op.eqn, self.shape(op.outputs[-1]), whole, part)}

    def _refusal(self, op: Op | None, got: str) -> UnsupportedError:
        line = jax_compat.source_line(op.eqn) if op is not None else ""
        name = f"{op.primitive}: {got}" if op is not None else got
        return UnsupportedError(
            where=f"{self.where} at {line}" if line else self.where,
            expected=f"operations that exist for one of {self.num_microbatches} micro-batches",
            got=name,
            hint="take sizes from the arrays rather than writing them into the step",
        )


def _sliced_and_stacked(op: Op) -> tuple[Atom, ...]:
    """What a scan slices, a slice for each trip, and what it stacks."""
    return (*op.inputs[op.num_consts + op.num_carry :], *op.outputs[op.num_carry :])


def links(op: Op) -> list[tuple[Atom, Atom, int]]:
    """(a, b, dropped) for values that are one around and inside of an operation: dim d + dropped of a is d of b."""
    pairs: list[tuple[Atom, Atom, int]] = []

    def join(xs: Sequence[Atom], ys: Sequence[Atom], dropped: int = 0) -> None:
        pairs.extend((x, y, dropped) for x, y in zip(xs, ys, strict=True))

    if op.kind is OpKind.BARRIER:
        join(op.inputs, op.outputs)
    elif op.kind is OpKind.SCAN:
        (body,), k, n = op.blocks, op.num_consts, op.num_consts + op.num_carry
        join(op.inputs[:n], body.inputs[:n])
        join(op.inputs[n:], body.inputs[n:], 1)
        join(op.outputs[: n - k], body.outputs[: n - k])
        join(op.outputs[: n - k], op.inputs[k:n])
        join(op.outputs[n - k :], body.outputs[n - k :], 1)
    elif op.kind is OpKind.WHILE:
        (condition, body), j, n = op.blocks, op.num_condition_consts, op.num_consts
        join(op.inputs[:j], condition.inputs[:j])
        join(op.inputs[j:n], body.inputs[: n - j])
        for inside in (condition.inputs[j:], body.inputs[n - j :], body.outputs, op.outputs):
            join(op.inputs[n:], inside)
    elif op.kind is OpKind.COND:
        for block in op.blocks:
            join(op.inputs[1:], block.inputs)
            join(op.outputs, block.outputs)
    return pairs
