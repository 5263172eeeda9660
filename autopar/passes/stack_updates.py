"""Equal matrices of the update as one stack, which devices share out (Muon, Shampoo, SOAP).

An optimizer that iterates on matrices does the same with each: a chain of products or a decomposition, of which none
reads another's results. Split along rows or columns each product sends; whole on every device each does all of them.
Stacked, whole matrices are split over devices: one exchange before and one after, and no collective between.

Such chains are found by their equal structure, stacked in rounds of one matrix for each device, and batched by
`jax.vmap`; a scan goes over the rounds, so that a device holds the temporaries of one matrix. A last round that is not
full is filled with copies of matrices, whose results nobody reads: it takes as long as a full one either way. Layers
that the user has stacked already are taken apart first, where the devices do not divide their number.

How stack and matrices are laid out is decided with everything else, whole on every device and in parts included.
"""

from __future__ import annotations

import collections
import dataclasses
import graphlib
import heapq
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence, Set
from typing import Any

import jax
import jax.numpy as jnp
from msgspec.structs import replace
from scipy.cluster.hierarchy import DisjointSet

from autopar.common import jax_compat
from autopar.errors import UnsupportedError
from autopar.frontend.build_graph import graph_of_body
from autopar.ir.graph import (
    Block,
    FactorKind,
    Op,
    OpGraph,
    OpKind,
    Role,
    Section,
    has_effects,
    read_by,
    values_of,
    walk,
)
from autopar.ir.primitives import DECOMPOSITIONS, MATRIX_PRODUCTS
from autopar.ir.rewrite import CanonicalForm, renumbered
from autopar.ir.rules import RuleBook, with_rules
from autopar.ops.kernels.local import runs_locally
from autopar.passes.cut_graph import cut_graph
from autopar.passes.plain_loop import run_block

# Arithmetic operations for each byte that enters and leaves: below it a chain multiplies matrices with vectors, which
# takes less time than bringing the matrices to other devices.
LEAST_INTENSITY = 4.0
# The most operations that lead from a chain of products back to the matrix whose norm divides it.
_LONGEST_SCALE = 16

_REDUCTIONS = frozenset({"reduce_sum", "reduce_max", "reduce_min"})
_KINDS = frozenset({OpKind.EQUATION, OpKind.SCAN, OpKind.WHILE, OpKind.COND})


def stack_updates(graph: OpGraph, parts: int, flops: Callable[[Op], float], rules: RuleBook) -> OpGraph:
    """The graph with equal chains of its update stacked, for so many devices; the same object where there are none.

    `flops(op)` is the arithmetic of one run of an equation.
    """
    chains = _chains(graph)
    groups = [group for group in _groups(graph, chains, parts, rules) if _is_worth_it(graph, group, flops)]
    replacements = [made for group in groups if (made := _stacked(graph, group, parts)) is not None]
    if not replacements:
        return graph
    return renumbered(_with_replacements(graph, replacements, rules))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Chain:
    """Operations of the update, in program order, what they read of others, and what others read of them.

    `key`: equal for chains that compute the same, whose operations, inputs and outputs then correspond.
    """

    ops: tuple[Op, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    key: tuple

    @property
    def block(self) -> Block:
        return Block(inputs=self.inputs, outputs=self.outputs, ops=self.ops)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """Chains that compute the same. `shared`: for each input whether all matrices of all chains read the same value.
    `batch`: of layers that the user has stacked, the chain on one of them; None where each chain has one matrix.
    """

    chains: tuple[_Chain, ...]
    shared: tuple[bool, ...]
    batch: _Batch | None

    @property
    def layers(self) -> int:
        """How many matrices each chain has."""
        return 1 if self.batch is None else self.batch.size


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Batch:
    """The number of layers, the graph on one of them, and the dimension that counts them in each input (None: in none)
    and output.
    """

    size: int
    one: OpGraph
    input_dims: tuple[int | None, ...]
    output_dims: tuple[int | None, ...]


# Which operations


def _chains(graph: OpGraph) -> list[_Chain]:
    """The connected operations of the update between products of matrices, and decompositions."""
    update = _update(graph)
    heavy = {op.id for op in update if _is_heavy(op)}
    if not heavy:
        return []
    between = _between(update, heavy)
    hull = [op for op in update if op.id in between]
    connected = DisjointSet(op.id for op in hull)
    maker = {v: op for op in hull for v in op.outputs}
    for op in hull:
        for v in read_by(op):
            if v in maker:
                connected.merge(maker[v].id, op.id)
    members: dict[int, list[Op]] = collections.defaultdict(list)
    for op in hull:
        members[connected[op.id]].append(op)
    readers: dict[int, list[Op]] = collections.defaultdict(list)
    for op in graph.block.ops:
        for v in read_by(op):
            readers[v].append(op)
    results = {a for a in graph.block.outputs if isinstance(a, int)}
    made = {v: op for op in update for v in op.outputs}
    found = []
    for ops in members.values():
        if all(_can_be_stacked(op) for op in ops):
            scaled = _with_scales(graph, ops, made, readers, results)
            found.append(_chain(graph, scaled, readers, results))
    return found


def _update(graph: OpGraph) -> list[Op]:
    """The operations of the update that read no examples but through gradients."""
    if graph.forward_role is not Role.FORWARD:
        return []
    of_examples = {v for i, v in enumerate(graph.block.inputs) if i in graph.batch}
    found = []
    for op in graph.block.ops:
        if any(inner.role is Role.BACKWARD for inner in _with_inner(op)):
            continue
        if not of_examples.isdisjoint(read_by(op)):
            of_examples.update(op.outputs)
        elif op.role is Role.UPDATE and op.section in (Section.WHOLE, Section.AFTER):
            found.append(op)
    return found


def _with_inner(op: Op) -> Iterable[Op]:
    yield op
    for block in op.blocks:
        yield from walk(block)


def _is_heavy(op: Op) -> bool:
    """Whether it multiplies matrices, or takes them apart."""
    names = MATRIX_PRODUCTS | DECOMPOSITIONS
    return any(
        inner.primitive in names and any(len(v.aval.shape) > 1 for v in inner.eqn.outvars) for inner in _with_inner(op)
    )


def _can_be_stacked(op: Op) -> bool:
    """Whether `jax.vmap` of the operation gives the same numbers: of random ones, and of code that jax does not see
    into, nobody knows.
    """
    if has_effects(op):
        return False
    for inner in _with_inner(op):
        is_other = inner.primitive.startswith(("random", "rng")) or "callback" in inner.primitive
        if inner.kind not in _KINDS or is_other or (inner.kind is OpKind.EQUATION and runs_locally(inner.eqn)):
            return False
    return True


def _between(ops: Sequence[Op], heavy: Collection[int]) -> set[int]:
    """The operations that read what heavy ones make, and make what heavy ones read."""
    after, before = set(heavy), set(heavy)
    made = {v for op in ops if op.id in heavy for v in op.outputs}
    for op in ops:
        if not made.isdisjoint(read_by(op)):
            after.add(op.id)
            made.update(op.outputs)
    read = {v for op in ops if op.id in heavy for v in read_by(op)}
    for op in reversed(ops):
        if not read.isdisjoint(op.outputs):
            before.add(op.id)
            read.update(read_by(op))
    return after & before


def _with_scales(
    graph: OpGraph,
    ops: Sequence[Op],
    made: Mapping[int, Op],
    readers: Mapping[int, Sequence[Op]],
    results: Set[int],
) -> list[Op]:
    """The operations, and those that divide a matrix by its norm before them: a norm of a whole matrix sends nothing.

    From an operand back to one matrix of its size, where a sum or maximum is on the way.
    """
    inside = {op.id: op for op in ops}
    place = {op.id: i for i, op in enumerate(graph.block.ops)}
    own = {v for op in ops for v in op.outputs}
    for operand in dict.fromkeys(v for op in ops for v in read_by(op) if v not in own):
        taken, frontier = dict[int, Op](), {operand}
        while len(taken) < _LONGEST_SCALE:
            steps = [made[v] for v in frontier if v in made and made[v].id not in inside]
            steps = [op for op in steps if op.kind is OpKind.EQUATION and op.rule is not None]
            latest = max(steps, key=lambda op: place[op.id], default=None)
            within = inside.keys() | taken.keys()
            if latest is None or not _can_be_stacked(latest) or not results.isdisjoint(latest.outputs):
                break
            if any(reader.id not in within for v in latest.outputs for reader in readers[v]):
                break
            taken[latest.id] = latest
            frontier = frontier - set(latest.outputs) | set(read_by(latest))
            wide = [v for v in frontier if graph.values[v].size > 1]
            reduces = any(op.primitive in _REDUCTIONS for op in taken.values())
            if reduces and len(wide) == 1 and graph.values[wide[0]].nbytes <= graph.values[operand].nbytes:
                inside |= taken
                break
    return sorted(inside.values(), key=lambda op: place[op.id])


def _chain(graph: OpGraph, ops: Sequence[Op], readers: Mapping[int, Sequence[Op]], results: Collection[int]) -> _Chain:
    inside, made = {op.id for op in ops}, {v for op in ops for v in op.outputs}
    outputs = [
        v for op in ops for v in op.outputs if v in results or any(reader.id not in inside for reader in readers[v])
    ]
    form = CanonicalForm(graph, lambda op: str(op.eqn.params.get("reverse", "")) if op.kind is OpKind.SCAN else None)
    key = tuple(form.op_key(op) for op in ops)
    inputs = tuple(dict.fromkeys(v for op in ops for v in read_by(op) if v not in made))
    number = {v: n for n, v in enumerate(form.values)}
    return _Chain(
        ops=tuple(ops),
        inputs=tuple(sorted(inputs, key=number.__getitem__)),
        outputs=tuple(outputs),
        key=(key, tuple(number[v] for v in outputs)),
    )


# Which of them together


def _groups(graph: OpGraph, chains: Sequence[_Chain], parts: int, rules: RuleBook) -> list[_Group]:
    """Several matrices of equal structure of which none reads another's results, even through others."""
    levels, equals = _levels(graph, chains), _equal_numbers(graph)
    equal: dict[tuple, list[_Chain]] = collections.defaultdict(list)
    for chain, level in zip(chains, levels, strict=True):
        if level is not None:
            equal[level, chain.key].append(chain)
    found = []
    for members in equal.values():
        columns = zip(*(chain.inputs for chain in members), strict=True)
        same = tuple(len({equals.get(v, v) for v in column}) == 1 for column in columns)
        batch = _batch(graph, members[0], rules)
        if batch is not None:
            same = tuple(each and dim is None for each, dim in zip(same, batch.input_dims, strict=True))
        group = _Group(chains=tuple(members), shared=same, batch=batch)
        # What is a multiple of the devices is a stack that they share out as it is.
        if group.layers * len(members) > 1 and (group.layers == 1 or group.layers % parts):
            found.append(group)
    return found


def _equal_numbers(graph: OpGraph) -> dict[int, int]:
    """For each single number that the update makes the first one that is made in the same way: schedules and conditions
    are worked out for each matrix anew.
    """
    first: dict[Hashable, int] = {}
    equals: dict[int, int] = {}
    for op in graph.block.ops:
        single = op.kind is OpKind.EQUATION and op.role is Role.UPDATE and not has_effects(op)
        if single and all(graph.values[v].size == 1 for v in op.outputs):
            read = tuple(equals.get(a, a) if isinstance(a, int) else None for a in op.inputs)
            for number, v in enumerate(op.outputs):
                equals[v] = first.setdefault((op.key, read, number), v)
    return equals


def _levels(graph: OpGraph, chains: Sequence[_Chain]) -> list[int | None]:
    """How many chains one after the other lead to each; None for one that depends on itself through others."""
    chain_of = {op.id: n for n, chain in enumerate(chains) for op in chain.ops}
    needs: list[int] = [0] * len(chains)  # bits
    found: dict[int, int] = {}
    own = [{v for op in chain.ops for v in op.outputs} for chain in chains]
    for op in graph.block.ops:
        n, mask = chain_of.get(op.id), 0
        for v in read_by(op):
            mask |= found.get(v, 0)
            if n is not None and v not in own[n]:
                needs[n] |= found.get(v, 0)
        if n is not None:
            mask |= 1 << n
        if mask:
            found.update(dict.fromkeys(op.outputs, mask))
    waits = {n: {k for k in range(len(chains)) if needs[n] >> k & 1} for n in range(len(chains))}
    stuck: set[int] = {n for n, on in waits.items() if n in on}
    while True:
        try:
            free = {n: on - stuck for n, on in waits.items() if n not in stuck}
            order = list(graphlib.TopologicalSorter(free).static_order())
            break
        except graphlib.CycleError as error:
            stuck |= set(error.args[1])
    level: dict[int, int] = {}
    for n in order:
        level[n] = 1 + max((level[k] for k in waits[n] - stuck), default=0)
    return [level.get(n) for n in range(len(chains))]


def _is_worth_it(graph: OpGraph, group: _Group, flops: Callable[[Op], float]) -> bool:
    """Whether the chains compute more than they read and write."""
    chain = group.chains[0]
    moved = sum(graph.values[v].nbytes for v, same in zip(chain.inputs, group.shared, strict=True) if not same)
    moved += sum(graph.values[v].nbytes for v in chain.outputs)
    inner = (each for op in chain.ops for each in _with_inner(op))
    work = sum(flops(op) * op.count for op in inner if op.kind is OpKind.EQUATION)
    return work >= LEAST_INTENSITY * moved


# The stacked program


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Replacement:
    """The graph of a stacked group, which takes `inputs` and makes `outputs`, in the place of `ops`."""

    ops: frozenset[int]
    graph: OpGraph
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    module: str


def _stacked(graph: OpGraph, group: _Group, parts: int) -> _Replacement | None:
    """A group as one program; None where `jax.vmap` would run both branches of a condition."""
    inputs = _operands(group)
    structs = [_struct(graph, v) for v in inputs]
    closed = jax.make_jaxpr(_program(graph, group, parts))(*structs)
    body = graph_of_body(closed)
    conditions = sum(op.kind is OpKind.COND for first in group.chains[0].ops for op in _with_inner(first))
    if sum(op.kind is OpKind.COND for op in walk(body.block)) < conditions:
        return None
    heavy = next(op for op in group.chains[0].ops if _is_heavy(op))
    return _Replacement(
        ops=frozenset(op.id for chain in group.chains for op in chain.ops),
        graph=body,
        inputs=inputs,
        outputs=tuple(v for chain in group.chains for v in chain.outputs),
        module=heavy.module,
    )


def _operands(group: _Group) -> tuple[int, ...]:
    """What the program of a group takes: shared inputs once, of each other input that of each chain."""
    found: list[int] = []
    for position, same in enumerate(group.shared):
        found += [chain.inputs[position] for chain in group.chains[: 1 if same else None]]
    return tuple(found)


def _struct(graph: OpGraph, v: int) -> jax.ShapeDtypeStruct:
    value = graph.values[v]
    return jax_compat.struct(value.shape, value.dtype, value.weak_type)


def _batch(graph: OpGraph, chain: _Chain, rules: RuleBook) -> _Batch | None:
    """Layers that the user has stacked: dimension 0 of the matrices, along which each operation does the same with each
    layer for itself; None where there are none.
    """
    largest = max(chain.inputs, key=lambda v: graph.values[v].size)
    size = next(iter(graph.values[largest].shape), 1)
    if size == 1:
        return None
    own = [n for n, v in enumerate(chain.inputs) if graph.values[v].shape[:1] == (size,)]
    alone = dataclasses.replace(
        graph, block=chain.block, constants=(), tied=(), donated=frozenset(), batch=frozenset(), written=(),
    )  # fmt: skip
    try:
        one = cut_graph(alone, dict.fromkeys(own, 0), size, rules, "update")
    except UnsupportedError:
        return None
    dims = {v: _cut_dims(graph.values[v].shape, one.values[v].shape) for v in values_of(chain.block)}
    if not all(_works_along(op, dims, size) for first in chain.ops for op in _with_inner(first)):
        return None
    if any(len(dims[v]) != 1 for v in chain.outputs):
        return None
    return _Batch(
        size=size,
        one=one,
        input_dims=tuple(next(iter(dims[v]), None) for v in chain.inputs),
        output_dims=tuple(dims[v][0] for v in chain.outputs),
    )


def _cut_dims(whole: Sequence[int], part: Sequence[int]) -> tuple[int, ...]:
    return tuple(d for d, (n, m) in enumerate(zip(whole, part, strict=True)) if n != m)


def _works_along(op: Op, dims: Mapping[int, tuple[int, ...]], size: int) -> bool:
    """Whether an operation does the same along the cut dimension, of which each value that it reads and makes has one
    at most, and its results have one where an operand does, or where they repeat the operand.
    """
    atoms = [a for a in (*op.inputs, *op.outputs) if isinstance(a, int)]
    if any(len(dims[a]) > 1 for a in atoms):
        return False
    if op.rule is None:
        return True  # what is inside is asked itself
    reads = any(dims[a] for a in op.inputs if isinstance(a, int))
    makes = [bool(dims[v]) for v in op.outputs]
    if not reads:
        return not any(makes) or op.primitive == "broadcast_in_dim"
    cut = [
        next((op.rule.factors[f] for f in factors if op.rule.factors[f].size % size == 0), None)
        for atom, dim, factors in op.rule.factored_dims((*op.inputs, *op.outputs))
        if isinstance(atom, int) and dim in dims[atom]
    ]
    return all(makes) and all(f is not None and f.size == size and f.kind is FactorKind.PASS for f in cut)


def _program(graph: OpGraph, group: _Group, parts: int) -> Callable[..., list[Any]]:
    """A function from the operands of a group to its results, chain after chain."""
    batch, count, total = group.batch, len(group.chains), len(group.chains) * group.layers
    block, of = (group.chains[0].block, graph) if batch is None else (batch.one.block, batch.one)
    in_dims = batch.input_dims if batch is not None else [None] * len(group.shared)
    out_dims = batch.output_dims if batch is not None else [None] * len(block.outputs)
    rounds = -(-total // parts)
    sizes = [group.layers] * count + ([rounds * parts - total] if total % parts else [])
    mapped = [not same for same in group.shared]

    def of_all(*operands: Any) -> list[Any]:
        rest, columns = iter(operands), []
        for same, dim in zip(group.shared, in_dims, strict=True):
            arrays = [next(rest) for _ in range(1 if same else count)]
            rows = [_layers_first(array, dim, group.layers) for array in arrays if not same]
            columns.append(arrays[0] if same else _first([*rows] * -(-rounds * parts // total), rounds * parts))
        of_round = jax.vmap(lambda *xs: run_block(block, xs, of), in_axes=[0 if each else None for each in mapped])
        made = [jax.lax.split(rows, sizes) for rows in _over_rounds(of_round, columns, mapped, rounds)]
        return [_layers_back(pieces[n], dim) for n in range(count) for pieces, dim in zip(made, out_dims, strict=True)]

    return of_all


def _over_rounds(
    of_round: Callable[..., list[Any]], columns: Sequence[Any], mapped: Sequence[bool], rounds: int
) -> list[Any]:
    """The results of matrices behind one another, of so many rounds one after the other."""
    if rounds == 1:
        return of_round(*columns)
    in_rounds = [
        column.reshape((rounds, -1, *column.shape[1:])) for column, each in zip(columns, mapped, strict=True) if each
    ]

    def body(_: None, slices: Sequence[Any]) -> tuple[None, list[Any]]:
        rest = iter(slices)
        return None, of_round(*(next(rest) if each else column for column, each in zip(columns, mapped, strict=True)))

    return [rows.reshape((-1, *rows.shape[2:])) for rows in jax.lax.scan(body, None, in_rounds)[1]]


def _first(rows: Sequence[Any], want: int) -> Any:
    """The first of rows behind one another."""
    found: list[Any] = []
    for row in rows:
        if want > 0:
            found.append(row if len(row) <= want else jax.lax.slice_in_dim(row, 0, want))
            want -= len(row)
    return jax.lax.concatenate(found, 0)


def _layers_first(array: Any, dim: int | None, layers: int) -> Any:
    """One row for each layer; in it the dimension that counts them is of size one, where the array has it."""
    if dim is None:
        return jnp.broadcast_to(array, (layers, *array.shape))
    return jnp.expand_dims(jnp.moveaxis(array, dim, 0), dim + 1)


def _layers_back(rows: Any, dim: int | None) -> Any:
    """The inverse of `_layers_first`."""
    return jnp.squeeze(rows, 0) if dim is None else jnp.moveaxis(jnp.squeeze(rows, dim + 1), 0, dim)


# In the graph


def _with_replacements(graph: OpGraph, replacements: Sequence[_Replacement], rules: RuleBook) -> OpGraph:
    """The graph with the programs in the place of the operations that they replace."""
    values, constants = list(graph.values), list(graph.constants)
    next_id = 1 + max(op.id for op in graph.ops())
    added: list[int] = []
    nodes: list[list[Op]] = []
    taken = frozenset[int]().union(*(each.ops for each in replacements))
    for each in replacements:
        inner = each.graph
        names: dict[int, int] = dict(zip(inner.block.inputs[len(inner.constants) :], each.inputs, strict=True))
        names |= {a: v for a, v in zip(inner.block.outputs, each.outputs, strict=True) if isinstance(a, int)}
        for value in inner.values:
            if value.id not in names:
                names[value.id] = len(values)
                values.append(replace(value, id=len(values), name=""))
        for v, constant in zip(inner.block.inputs, inner.constants, strict=False):
            added.append(names[v])
            values[names[v]] = replace(values[names[v]], name=f"constant {len(constants)}")
            constants.append(constant)
        section = next(op.section for op in graph.block.ops if op.id in each.ops)
        placed = [_renamed(op, names, next_id, each.module) for op in inner.block.ops]
        next_id += 1 + max(op.id for op in inner.ops())
        nodes.append([replace(op, section=section) for op in placed])
    ops = _in_order([[op] for op in graph.block.ops if op.id not in taken], nodes, graph, replacements)
    first, shift = len(graph.constants), len(added)
    inputs = (*graph.block.inputs[:first], *added, *graph.block.inputs[first:])

    def moved(i: int) -> int:
        return i + shift if i >= first else i

    made = {*inputs, *(v for op in ops for v in op.outputs)}
    return dataclasses.replace(
        graph,
        values=tuple(values),
        constants=tuple(constants),
        block=with_rules(Block(inputs=inputs, outputs=graph.block.outputs, ops=tuple(ops)), rules),
        tied=tuple((moved(i), o) for i, o in graph.tied),
        donated=frozenset(map(moved, graph.donated)),
        batch=frozenset(map(moved, graph.batch)),
        repeating=frozenset(map(moved, graph.repeating)),
        written=tuple((v, layout) for v, layout in graph.written if v in made),
    )


def _renamed(op: Op, names: Mapping[int, int], first_id: int, module: str) -> Op:
    def of(atoms: Iterable[Any]) -> tuple[Any, ...]:
        return tuple(names[a] if isinstance(a, int) else a for a in atoms)

    blocks = tuple(
        Block(
            inputs=of(block.inputs),
            outputs=of(block.outputs),
            ops=tuple(_renamed(inner, names, first_id, module) for inner in block.ops),
        )
        for block in op.blocks
    )
    return replace(
        op, id=op.id + first_id, inputs=of(op.inputs), outputs=of(op.outputs), blocks=blocks, role=Role.UPDATE,
        module=op.module or module,
    )  # fmt: skip


def _in_order(
    alone: Sequence[list[Op]], nodes: Sequence[list[Op]], graph: OpGraph, replacements: Sequence[_Replacement]
) -> list[Op]:
    """All operations, each after what it reads, else in the order of the program."""
    place = {op.id: i for i, op in enumerate(graph.block.ops)}
    ranked = [(place[node[0].id], node) for node in alone]
    ranked += [(min(place[o] for o in each.ops), node) for each, node in zip(replacements, nodes, strict=True)]
    maker = {v: n for n, (_, node) in enumerate(ranked) for op in node for v in op.outputs}
    waits = [{maker[v] for op in node for v in read_by(op) if v in maker} - {n} for n, (_, node) in enumerate(ranked)]
    readers: dict[int, list[int]] = collections.defaultdict(list)
    for n, on in enumerate(waits):
        for k in on:
            readers[k].append(n)
    ready = [(rank, n) for n, (rank, _) in enumerate(ranked) if not waits[n]]
    heapq.heapify(ready)
    ordered: list[Op] = []
    while ready:
        _, n = heapq.heappop(ready)
        ordered += ranked[n][1]
        for reader in readers[n]:
            waits[reader].discard(n)
            if not waits[reader]:
                heapq.heappush(ready, (ranked[reader][0], reader))
    assert len(ordered) == sum(len(node) for _, node in ranked), "groups do not depend on themselves"
    return ordered
