"""What a scan over layers makes without the examples, made before it: random bits, positions, and results.

Outside of loops, random bits of one key are drawn for the whole batch before the loop over micro-batches, each of which
takes its part (`value_states`): their numbers depend on the position in the batch. In the body of a scan they are out
of reach for that. Here what makes them, of keys alone, becomes a scan that returns the bits of all trips, and the scan
over layers reads a slice of them. The bits of all layers are in memory, as they are where layers are written out. What
is the same in all trips is made once: numbers of examples (`jnp.arange(len(x))`), bits of a key that no layer changes,
and what is added up of the batch alone, such as the number of tokens that a layer's own loss is divided by.

Likewise what such a scan makes without the examples, for each trip or at its end, and what leaves the step or is drawn
of behind the scan, such as the counts and keys of each layer's random numbers, or a key that the layers hand on: it is
made once, not in each micro-batch.

Results of a scan that are known before the micro-batches are made by a scan of their own, without the carried values
that they do not depend on. A loss that is summed over chunks of tokens is divided by a count that the same scan sums.
The count comes of the batch alone, but beside the loss it would be known after the last micro-batch only, and gradients
need it in the first one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from typing import Any

from msgspec.structs import replace

from autopar.common import jax_compat
from autopar.ir.graph import Atom, Block, Op, OpGraph, OpKind, Value, free_values, has_effects, read_by
from autopar.ir.rewrite import Fresh, clone, equal_values, handed_on, scan_equation
from autopar.passes.microbatch_analysis import is_heavy


def part_of_results(op: Op, wanted: Collection[int]) -> Op | None:
    """The operation that makes the `wanted` results alone, of the operands that they need, under the same numbers.

    An equation is taken as it is. None for what cannot be taken apart, or has effects, which would happen once more.
    """
    if has_effects(op):
        return None
    if op.kind is OpKind.EQUATION:
        return op
    if op.kind is not OpKind.SCAN or free_values(op.blocks[0]):
        return None
    (body,), k, n = op.blocks, op.num_consts, op.num_consts + op.num_carry
    unchanged = handed_on(op)
    made = [body.inputs[k + i] if i in unchanged else a for i, a in enumerate(body.outputs)]
    results = {i for i, v in enumerate(op.outputs) if v in wanted}
    while True:
        ops, read = _needed(body, [made[i] for i in results])
        positions = [i for i, v in enumerate(body.inputs) if v in read or i - k in results & set(range(op.num_carry))]
        carried = {i - k for i in positions if k <= i < n}
        if carried <= results:
            break
        results |= carried
    kept = sorted(results)
    block = Block(inputs=tuple(body.inputs[i] for i in positions), outputs=tuple(made[i] for i in kept), ops=tuple(ops))
    return replace(
        op,
        eqn=scan_equation(op, positions).replace(outvars=[op.eqn.outvars[i] for i in kept]),
        inputs=tuple(op.inputs[i] for i in positions),
        outputs=tuple(op.outputs[i] for i in kept),
        blocks=(block,),
        num_consts=sum(i < k for i in positions),
        num_carry=len(carried),
    )


def _needed(block: Block, outputs: Sequence[Any]) -> tuple[list[Op], set[int]]:
    """(the operations of a block that some of its outputs need, in order; all values that they read)."""
    read = {a for a in outputs if isinstance(a, int)}
    ops = []
    for op in reversed(block.ops):
        if read.isdisjoint(op.outputs):
            continue
        if op.kind is OpKind.BARRIER:
            passed = [(a, v) for a, v in zip(op.inputs, op.outputs, strict=True) if v in read]
            op = replace(op, inputs=tuple(a for a, _ in passed), outputs=tuple(v for _, v in passed))
        op = part_of_results(op, read) or op
        ops.append(op)
        read |= set(read_by(op))
    return ops[::-1], read


def _has_scans(graph: OpGraph) -> bool:
    return any(op.kind is OpKind.SCAN for op in graph.block.ops)


def split_known_results(whole: OpGraph, part: OpGraph) -> tuple[OpGraph, OpGraph]:
    """Both graphs, of a whole batch and of a micro-batch, with such results made apart.

    Only results that an equation reads: what another loop reads, such as a mask that is kept for the backward pass,
    stays. Both graphs have the same operations before and after.
    """
    if not _has_scans(whole):
        return whole, part
    wanted = _wanted(whole)
    return (_with_parts(whole, wanted), _with_parts(part, wanted)) if wanted else (whole, part)


def _with_parts(graph: OpGraph, wanted: Mapping[int, frozenset[int]]) -> OpGraph:
    fresh, ops = Fresh(graph), []
    for op in graph.block.ops:
        ops += _apart(op, wanted[op.outputs[0]], fresh) if op.outputs and op.outputs[0] in wanted else [op]
    return dataclasses.replace(graph, values=tuple(fresh.values), block=replace(graph.block, ops=tuple(ops)))


def _apart(op: Op, known: frozenset[int], fresh: Fresh) -> list[Op]:
    """The scan of the known results, and that of the others; the operation itself where it cannot be taken apart."""
    apart = part_of_results(op, known)
    rest = part_of_results(op, [v for v in op.outputs if v not in known])
    if apart is None or rest is None:
        return [op]
    again = set(apart.outputs)  # what the others need too
    outputs = tuple(fresh.copy_of(v) if v in again else v for v in rest.outputs)
    return [replace(clone(apart, {}, fresh), outputs=apart.outputs), replace(rest, outputs=outputs)]


def _wanted(graph: OpGraph) -> dict[int, frozenset[int]]:
    """By the first result of a scan, its results that are known before the loop and that equations read."""
    known = set(graph.block.inputs)
    read = {a for op in graph.block.ops if op.kind is OpKind.EQUATION for a in op.inputs if isinstance(a, int)}
    wanted = {}
    for op in graph.block.ops:
        found = known_results(op, known)
        known |= found
        if op.kind is OpKind.SCAN and 0 < len(found) < len(op.outputs) and not read.isdisjoint(found):
            wanted[op.outputs[0]] = frozenset(found & read)
    return wanted


def known_results(op: Op, known: Set[int]) -> set[int]:
    """The results of an operation that are known where some values are, and cheap to make for the whole batch."""
    if op.kind is OpKind.BARRIER:
        return {v for a, v in zip(op.inputs, op.outputs, strict=True) if _is_known(a, known)}
    if op.kind is not OpKind.SCAN:
        return set(op.outputs) if not is_heavy(op) and all(v in known for v in read_by(op)) else set()
    (body,), k, n = op.blocks, op.num_consts, op.num_consts + op.num_carry
    carried = {i for i in range(op.num_carry) if _is_known(op.inputs[k + i], known)}
    others = {v for i, v in enumerate(body.inputs) if not k <= i < n and _is_known(op.inputs[i], known)}
    while True:
        inside = known | others | {body.inputs[k + i] for i in carried}
        for inner in body.ops:
            inside |= known_results(inner, inside)
        if all(_is_known(body.outputs[i], inside) for i in carried):
            break
        carried = {i for i in carried if _is_known(body.outputs[i], inside)}
    stacked = range(op.num_carry, len(op.outputs))
    return {op.outputs[i] for i in (*carried, *(j for j in stacked if _is_known(body.outputs[j], inside)))}


def _is_known(atom: Atom, known: Set[int]) -> bool:
    return not isinstance(atom, int) or atom in known


_DRAWS = "random_bits"


def hoist_draws(whole: OpGraph, part: OpGraph) -> tuple[OpGraph, OpGraph]:
    """Both graphs, of a whole batch and of a micro-batch, with such bits and results made in front of their scans.

    Both have the same operations before and after. What is drawn of keys that follow the examples stays where it is.
    """
    if not _has_scans(whole):
        return whole, part
    whole, part = _Fixed(whole, part).graphs()
    values = list(whole.values), list(part.values)
    ops: tuple[list[Op], list[Op]] = ([], [])
    first_id = 1 + max(op.id for op in whole.ops())
    plans = _plans(whole, part)
    for op, other in zip(whole.block.ops, part.block.ops, strict=True):
        plan = plans.get(op.id)
        for loop, numbered, out in zip((op, other), values, ops, strict=True):
            out += [loop] if plan is None else _drawn_apart(loop, plan, numbered, first_id + len(out))
    return tuple(
        dataclasses.replace(g, values=tuple(v), block=replace(g.block, ops=tuple(o)))
        for g, v, o in zip((whole, part), values, ops, strict=True)
    )  # type: ignore[return-value]  # a pair, of a pair of graphs


class _Fixed:
    """Both graphs, with what all trips of a scan make alike in front of it: for the examples but of none of them, or of
    examples that are known before the first micro-batch but for none of them.
    """

    def __init__(self, whole: OpGraph, part: OpGraph) -> None:
        self.both = whole, part
        self.fresh = Fresh(whole), Fresh(part)

    def graphs(self) -> tuple[OpGraph, OpGraph]:
        known = set(self.both[0].block.inputs)
        pairs = self._rewritten(zip(*(g.block.ops for g in self.both), strict=True), known)
        whole, part = (
            dataclasses.replace(g, values=tuple(f.values), block=replace(g.block, ops=tuple(ops)))
            for g, f, ops in zip(self.both, self.fresh, _columns(pairs), strict=True)
        )
        return whole, part

    def _rewritten(self, pairs: Iterable[tuple[Op, Op]], known: set[int]) -> list[tuple[Op, Op]]:
        """Operations of a block, with those that are made in front of its scans. `known`: values that are known before
        the first micro-batch; takes those that the block makes.
        """
        found: list[tuple[Op, Op]] = []
        for pair in pairs:
            found += self._in_front(*pair, known) if pair[0].kind is OpKind.SCAN else [pair]
            known |= known_results(pair[0], known)
        return found

    def _in_front(self, op: Op, other: Op, known: set[int]) -> list[tuple[Op, Op]]:
        """What is made in front of a scan, and the scan."""
        consts = zip(op.inputs[: op.num_consts], op.blocks[0].inputs, strict=False)
        inside = known | {v for a, v in consts if not isinstance(a, int) or a in known}
        inner = self._rewritten(zip(op.blocks[0].ops, other.blocks[0].ops, strict=True), inside)
        scans = tuple(_with_body(scan, ops) for scan, ops in zip((op, other), _columns(inner), strict=True))
        moved, needed = [], set[int]()
        for i, pair in enumerate(inner):
            sources = None
            if _fills(*pair):
                sources = _sources(scans[0], pair[0].inputs, self._follows_examples)
            elif self._combines(pair[0]) and inside.issuperset(pair[0].outputs):
                sources = _sources(scans[0], pair[0].inputs, lambda v: False)
            if sources is None or any(position >= op.num_consts for position in sources[1]):
                continue
            made_of = sources[0] | {i}
            if not any(has_effects(inner[j][0]) for j in made_of):
                moved.append(i)
                needed |= made_of
        if not moved:
            return [(scans[0], scans[1])]
        made = [self._made(scan, sorted(needed), moved, fresh) for scan, fresh in zip(scans, self.fresh, strict=True)]
        return list(zip(*made, strict=True))

    def _combines(self, op: Op) -> bool:
        """Whether an equation makes of examples what is for none of them."""
        of_examples = any(isinstance(a, int) and self._follows_examples(a) for a in op.inputs)
        return op.kind is OpKind.EQUATION and of_examples and not any(map(self._follows_examples, op.outputs))

    def _follows_examples(self, v: int) -> bool:
        first, second = (fresh.values[v].shape for fresh in self.fresh)
        return first != second

    def _made(self, op: Op, needed: Sequence[int], moved: Sequence[int], fresh: Fresh) -> list[Op]:
        """The operations of a scan's body in front of it, and the scan, which reads what those make that are moved."""
        (body,), k = op.blocks, op.num_consts
        made = {v: fresh.copy_of(v) for i in needed for v in body.ops[i].outputs}
        names: dict[int, Atom] = {**dict(zip(body.inputs[:k], op.inputs, strict=False)), **made}
        equal = equal_values(body)
        in_front = [
            replace(
                source, id=fresh.op_id(), count=op.count, outputs=tuple(made[v] for v in source.outputs),
                inputs=tuple(names[equal.get(a, a)] if isinstance(a, int) else a for a in source.inputs),
            )
            for source in (body.ops[i] for i in needed)
        ]  # fmt: skip
        read = [v for i in moved for v in body.ops[i].outputs]
        rest = tuple(inner for i, inner in enumerate(body.ops) if i not in moved)
        block = replace(body, inputs=(*body.inputs[:k], *read, *body.inputs[k:]), ops=rest)
        scan = replace(
            op, eqn=scan_equation(op, range(len(op.inputs)), [fresh.values[v] for v in read], k),
            inputs=(*op.inputs[:k], *(made[v] for v in read), *op.inputs[k:]), num_consts=k + len(read),
            blocks=(block,),
        )  # fmt: skip
        return [*in_front, scan]


def _columns(pairs: Sequence[tuple[Op, Op]]) -> tuple[tuple[Op, ...], tuple[Op, ...]]:
    return tuple(first for first, _ in pairs), tuple(second for _, second in pairs)


def _with_body(op: Op, ops: Sequence[Op]) -> Op:
    return replace(op, blocks=(replace(op.blocks[0], ops=tuple(ops)),))


def _fills(op: Op, part: Op) -> bool:
    """Whether an equation makes an element for each example, of none of them: random bits, or their numbers."""
    if op.primitive == "iota":
        sizes = {e.outvars[0].aval.shape[e.params["dimension"]] for e in (op.eqn, part.eqn)}
        return len(sizes) > 1
    return op.primitive == _DRAWS and op.eqn.outvars[0].aval.shape != part.eqn.outvars[0].aval.shape


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """What is made apart from a scan: positions of operations in its body, of its inputs, and values from around.

    `results`: positions among the results of each trip. `fixed`: constants of the scan. `carried`: positions among the
    carried values. `slices`: inputs that are sliced.
    """

    draws: tuple[int, ...]
    results: tuple[int, ...]
    ops: tuple[int, ...]
    fixed: tuple[int, ...]
    carried: tuple[int, ...]
    slices: tuple[int, ...]

    def inputs(self, op: Op) -> list[int]:
        """The positions of the inputs of the scan that are read: constants, carried values and slices."""
        return [*self.fixed, *(op.num_consts + j for j in self.carried), *self.slices]


def _of_examples(graph: OpGraph) -> set[int]:
    """The values of a graph that depend on the examples, those inside of scans too."""
    depend = {graph.block.inputs[i] for i in graph.batch}
    for op in graph.block.ops:
        if op.kind is not OpKind.SCAN:
            depend |= _depending(op, depend)
            continue
        reads = [isinstance(a, int) and a in depend for a in op.inputs]
        (body,), k, carry = op.blocks, op.num_consts, op.num_carry
        depend |= {v for v, is_read in zip(body.inputs, reads, strict=True) if is_read}
        before = -1
        while len(depend) > before:
            before = len(depend)
            for inner in body.ops:
                depend |= _depending(inner, depend)
            handed_on = [isinstance(a, int) and a in depend for a in body.outputs]
            depend |= {v for v, follows in zip(body.inputs[k : k + carry], handed_on, strict=False) if follows}
        depend |= {v for v, follows in zip(op.outputs, handed_on, strict=True) if follows}
        depend |= {v for v, a in zip(op.outputs, body.inputs[k : k + carry], strict=False) if a in depend}
    return depend


def _depending(op: Op, depend: set[int]) -> set[int]:
    """The results of an operation that is no scan which depend on some values; a barrier hands each operand on."""
    if op.kind is OpKind.BARRIER:
        return {out for a, out in zip(op.inputs, op.outputs, strict=True) if isinstance(a, int) and a in depend}
    read = {a for a in op.inputs if isinstance(a, int)}.union(*(free_values(block) for block in op.blocks))
    return set() if depend.isdisjoint(read) else set(op.outputs)


def _plans(whole: OpGraph, part: OpGraph) -> dict[int, _Plan]:
    """What is made apart, of each scan where that is something, by its number.

    From the last operation to the first, with the values without examples that are wanted of those before: of which
    results of the step are made, and keys of what is drawn. (The keys of layers that are computed again in a backward
    pass are results of the scan of the forward pass.)
    """
    depend, follows_examples = _of_examples(whole), _follows_examples(whole, part)
    wanted = {a for a in whole.block.outputs if isinstance(a, int) and a not in depend}
    plans: dict[int, _Plan] = {}
    for op in reversed(whole.block.ops):
        if op.kind is OpKind.SCAN and not depend.isdisjoint(op.outputs):
            plan = _plan_of(op, wanted, follows_examples)
            if plan is None:
                continue
            plans[op.id] = plan
            read = [op.inputs[i] for i in plan.inputs(op)]
        elif op.kind is OpKind.BARRIER:
            read = [a for a, out in zip(op.inputs, op.outputs, strict=True) if out in wanted]
        elif _draws(op, follows_examples) or not wanted.isdisjoint(op.outputs):
            read = list(op.inputs)
        else:
            continue
        wanted |= {a for a in read if isinstance(a, int) and a not in depend}
    return plans


def _draws(op: Op, follows_examples: Callable[[int], bool]) -> bool:
    """Whether an operation draws for all examples, or one in its blocks does."""
    if op.primitive == _DRAWS:
        return any(map(follows_examples, op.outputs))
    return any(_draws(inner, follows_examples) for block in op.blocks for inner in block.ops)


def _sources(
    op: Op, atoms: Sequence[Atom], follows_examples: Callable[[int], bool]
) -> tuple[set[int], set[int]] | None:
    """The operations and inputs of a scan's body of which values are made; None where that is not of keys alone."""
    (body,), k, n = op.blocks, op.num_consts, op.num_consts + op.num_carry
    made_by = {v: i for i, inner in enumerate(body.ops) for v in inner.outputs}
    equal = equal_values(body)
    position = {v: i for i, v in enumerate(body.inputs)}
    ops: set[int] = set()
    inputs: set[int] = set()
    remaining = list(atoms)
    while remaining:
        atom = remaining.pop()
        if not isinstance(atom, int):
            continue
        atom = equal.get(atom, atom)
        if follows_examples(atom):
            return None
        if atom in position:
            if position[atom] not in inputs:
                inputs.add(position[atom])
                if k <= position[atom] < n:
                    remaining.append(body.outputs[position[atom] - k])
        elif atom in made_by:
            if body.ops[made_by[atom]].kind is not OpKind.EQUATION:
                return None
            if made_by[atom] not in ops:
                ops.add(made_by[atom])
                remaining += body.ops[made_by[atom]].inputs
        else:
            return None  # of a value from around the scan
    return ops, inputs


def _follows_examples(whole: OpGraph, part: OpGraph) -> Callable[[int], bool]:
    return lambda v: whole.values[v].shape != part.values[v].shape


def _plan_of(op: Op, wanted: set[int], follows_examples: Callable[[int], bool]) -> _Plan | None:
    """What is made apart from a scan of which some results are wanted. None where that is nothing."""
    (body,), k, n = op.blocks, op.num_consts, op.num_consts + op.num_carry
    draws = [i for i, inner in enumerate(body.ops) if inner.primitive == _DRAWS and _draws(inner, follows_examples)]
    found = _sources(op, [a for i in draws for a in body.ops[i].inputs], follows_examples)
    if found is None:
        draws, found = [], (set(), set())
    ops, inputs = found[0] | set(draws), found[1]
    results = []
    for j, v in enumerate(op.outputs):
        atom = body.inputs[k + j] if j < op.num_carry else body.outputs[j]
        if v not in wanted or not isinstance(atom, int) or (found := _sources(op, [atom], follows_examples)) is None:
            continue
        if j >= op.num_carry:
            results.append(j - op.num_carry)
        ops, inputs = ops | found[0], inputs | found[1]
    carried = sorted(i - k for i in inputs if k <= i < n)
    if not draws and not results and wanted.isdisjoint(op.outputs[j] for j in carried):
        return None
    return _Plan(
        draws=tuple(draws),
        results=tuple(results),
        ops=tuple(sorted(ops)),
        fixed=tuple(sorted(i for i in inputs if i < k)),
        carried=tuple(carried),
        slices=tuple(sorted(i for i in inputs if i >= n)),
    )


def _drawn_apart(op: Op, plan: _Plan, values: list[Value], new_id: int) -> list[Op]:
    """The scan that draws, and the scan that reads what it drew. Adds to the values."""
    (body,) = op.blocks
    equal = equal_values(body)
    drawn = [v for i in plan.draws for v in body.ops[i].outputs]
    new: dict[int, int] = {}

    def copy(v: int, shape: tuple[int, ...] | None = None) -> int:
        values.append(replace(values[v], id=len(values), name="", shape=values[v].shape if shape is None else shape))
        return len(values) - 1

    def named(atom: Atom) -> Atom:
        return new[equal.get(atom, atom)] if isinstance(atom, int) else atom

    read = plan.inputs(op)
    for i in read:
        new[body.inputs[i]] = copy(body.inputs[i])
    inner = []
    for i in plan.ops:
        source = body.ops[i]
        inputs = tuple(map(named, source.inputs))
        for v in source.outputs:
            new[v] = copy(v)
        inner.append(replace(source, inputs=inputs, outputs=tuple(new[v] for v in source.outputs)))
    inside = tuple(new[body.inputs[i]] for i in read)
    apart = {op.num_carry + j for j in plan.results}
    results = [*(body.outputs[j] for j in plan.carried), *drawn, *(body.outputs[j] for j in sorted(apart))]
    block = Block(inputs=inside, outputs=tuple(map(named, results)), ops=tuple(inner))
    stacked = [copy(v, (op.trips, *values[v].shape)) for v in drawn]
    # A key that is carried on is read of the scan that draws, so that the next scan may draw of it too.
    handed_on = {j: op.outputs[j] for j in plan.carried}
    outvars = [jax_compat.variable_of(values[v].shape, values[v].dtype, values[v].weak_type) for v in stacked]
    outvars[:0] = [op.eqn.outvars[j] for j in plan.carried]
    outvars += [op.eqn.outvars[j] for j in sorted(apart)]
    drawing = replace(
        op, id=new_id, eqn=scan_equation(op, read).replace(outvars=outvars), inputs=tuple(op.inputs[i] for i in read),
        outputs=(*handed_on.values(), *stacked, *(op.outputs[j] for j in sorted(apart))), blocks=(block,),
        num_consts=len(plan.fixed), num_carry=len(plan.carried),
    )  # fmt: skip
    outputs = tuple(copy(v) if j in handed_on or j in apart else v for j, v in enumerate(op.outputs))
    rest = tuple(inner_op for i, inner_op in enumerate(body.ops) if i not in plan.draws)
    reading = replace(
        op, eqn=scan_equation(op, range(len(op.inputs)), [values[v] for v in drawn]),
        inputs=(*op.inputs, *stacked), outputs=outputs,
        blocks=(replace(body, inputs=(*body.inputs, *drawn), ops=rest),),
    )  # fmt: skip
    return [drawing, reading]
