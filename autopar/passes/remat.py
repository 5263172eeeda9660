"""Rematerialisation by layer: forward values that the backward pass reads are computed again instead of kept.

A layer's forward operations are cloned into the backward section behind a barrier over what they start from. The
barrier takes the cotangents that arrive at the layer as well, so that the work waits for the backward pass. Parameters
that the recomputation starts from are read behind the barrier by the layer's other backward operations too: where
devices share the parameters, a layer gathers each once for both, when its turn comes. Source: Chen et al., "Training
deep nets with sublinear memory cost", arXiv:1604.06174.

What each layer recomputes is a text: a policy, or the values that it keeps, on the devices or in the memory of the
hosts. One text stands for all layers, or for every second one and so on (`input every 2`).
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from autopar.errors import PlanMismatchError
from autopar.frontend.recompute_in_scans import (
    BY_VALUE,
    IN_HOST,
    Recompute,
    SavedValues,
    is_by_value,
    is_kept,
    is_plain_product,
)
from autopar.ir.graph import Op, OpGraph, OpKind, Role, Section, read_by
from autopar.ir.rewrite import Fresh, clone, reading, remove_dead, renumbered
from autopar.passes.assign_layers import LayerAssignment, assign_layers
from autopar.passes.layers import Layers, portable_ops


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rematerialised:
    """A graph in which layers compute values again, and the layers of all its operations."""

    graph: OpGraph
    assignment: LayerAssignment


def rematerialise(
    graph: OpGraph,
    layers: Layers,
    policy: str | Sequence[str],
    assignment: LayerAssignment | None = None,
) -> Rematerialised:
    """The graph with recomputation, for all layers alike or for each its own: a `Recompute`, or a text of
    `text_of_kept`. `assignment` of the graph to these layers saves finding it again.

    Each operation keeps its layer, and is computed again in the layer that reads it; what nothing reads any longer is
    left out. Regions that the user rematerialises stay as they are. Random numbers come out the same again: they are
    functions of their key.
    """
    policies = [policy] * len(layers) if isinstance(policy, str) else list(policy)
    assert len(policies) == len(layers), f"{len(policies)} policies for {len(layers)} layers"
    ids = [op.id for op in graph.ops()]
    assert ids == list(range(len(ids))), "operations are numbered in program order (`renumbered`)"
    assignment = assign_layers(graph, layers) if assignment is None else assignment
    readers = _Readers(graph, _by_id(graph, assignment))
    fresh = Fresh(graph)
    inserted: dict[int, list[tuple[Op, int | None]]] = {}  # with their layers, by position
    recomputed: dict[int, list[tuple[int, dict[int, int]]]] = {}
    names: list[dict[int, int]] = [{} for _ in policies]  # by layer, for its backward operations from there on
    same_as = dict(assignment.same_as)
    in_host = set(graph.saved_in_host)
    for layer, policy_of_layer in enumerate(policies):
        if policy_of_layer != Recompute.NOTHING:
            in_host |= _saved(layer, policy_of_layer, readers.forward(layer), readers).in_host
            at, ops, new, made = _recomputation(layer, policy_of_layer, readers, fresh)
            same_as |= made
            places = (None if op.kind is OpKind.BARRIER else layer for op in ops)
            inserted.setdefault(at, []).extend(zip(ops, places, strict=True))
            recomputed.setdefault(at, []).append((layer, new))
    rows: list[tuple[Op, int | None]] = []
    for position, (op, at_layer) in enumerate(zip(graph.block.ops, assignment.layer_of, strict=True)):
        rows += inserted.get(position, [])
        for layer, new in recomputed.get(position, []):
            names[layer] = new
        rows.append((readers.renamed(op, names) if op.section.is_backward else op, at_layer))
    block = remove_dead(replace(graph.block, ops=tuple(op for op, _ in rows)))
    alive = {op.id for op in block.ops}
    layer_of = tuple(at_layer for op, at_layer in rows if op.id in alive)
    return Rematerialised(
        graph=renumbered(
            dataclasses.replace(graph, values=tuple(fresh.values), block=block, saved_in_host=frozenset(in_host))
        ),
        assignment=dataclasses.replace(assignment, layer_of=layer_of, same_as=same_as),
    )


def _by_id(graph: OpGraph, assignment: LayerAssignment) -> dict[int, int | None]:
    return {op.id: layer for op, layer in zip(graph.block.ops, assignment.layer_of, strict=True)}


@dataclasses.dataclass(frozen=True, slots=True)
class Recomputation:
    """The forward operations of a layer that run again, by their ids.

    Attributes:
        kept_bytes: Of results of the layer that are kept.
        in_host: Results that wait in the memory of the host.
        left_out: Those of the operations that do not run in the forward pass, as nothing reads what they make there.
    """

    ops: frozenset[int]
    kept_bytes: int
    in_host: frozenset[int] = frozenset()
    left_out: frozenset[int] = frozenset()


def recomputations(
    graph: OpGraph, layer_of: Mapping[int, int | None], policies: Sequence[Mapping[int, str]]
) -> list[dict[int, Recomputation]]:
    """For each of several policies of all layers, what comes of it; `layer_of[op.id]` as in `LayerAssignment`."""
    readers = _Readers(graph, layer_of)

    def of_layer(layer: int, policy: str) -> Recomputation:
        if policy == Recompute.NOTHING:
            again, in_host = list[Op](), frozenset[int]()
        else:
            _, again = _recomputed(layer, policy, readers)
            in_host = _saved(layer, policy, readers.forward(layer), readers).in_host
        results = {v for op in again for v in op.outputs}
        starts = {v for op in again for v in read_by(op)}
        own = {v for op in readers.forward(layer) if readers.layer[op.id] == layer for v in op.outputs}
        kept = [v for v in own - results - in_host if v in starts or layer in readers.layers.get(v, ())]
        kept_bytes = sum(graph.values[v].nbytes for v in kept)
        left_out = readers.unread(layer, again)
        return Recomputation(frozenset(op.id for op in again), kept_bytes, in_host, left_out)

    return [{layer: of_layer(layer, policy) for layer, policy in of_layers.items()} for of_layers in policies]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayerForward:
    """The forward pass of a layer, as far as it may be computed again.

    Attributes:
        ops: In program order, with those that every layer runs for itself.
        places: The values that may be kept, by their places in it: `2.0` is the first result of the layer's own
            operation 2.
        read: The values that its backward pass reads.
        there: Its results that are there anyway, as another layer's backward pass reads them.
    """

    ops: tuple[Op, ...]
    places: Mapping[str, int]
    read: frozenset[int]
    there: frozenset[int]


def forward_of_layers(graph: OpGraph, layer_of: Mapping[int, int | None]) -> dict[int, LayerForward]:
    """The forward passes of layers that have a backward one, by layer; `layer_of[op.id]` as in `LayerAssignment`."""
    readers = _Readers(graph, layer_of)
    found = {}
    for layer in sorted({layer for layer in layer_of.values() if layer is not None}):
        ops, own = readers.forward(layer), readers.own_places(layer)
        there = frozenset(v for v in own.values() if readers.layers.get(v, {layer}) != {layer})
        made = {v for op in ops for v in op.outputs}
        read = frozenset(v for v in made if layer in readers.layers.get(v, ()))
        if read:
            places = {place: v for place, v in own.items() if v not in there}
            found[layer] = LayerForward(ops=ops, places=places, read=read - there, there=there)
    return found


def text_of_kept(places: Sequence[str], in_host: Sequence[str] = ()) -> str:
    """The policy of a layer that keeps these values of its forward pass, and those in the memory of the host, and
    computes the others again.
    """
    if not places and not in_host:
        return Recompute.ALL.value
    return " ".join((BY_VALUE.strip(), *places, *((IN_HOST, *in_host) if in_host else ())))


class _Readers:
    """The readers of values in the backward section. `layers[v]` are the layers that read v, through barriers and
    portable operations too."""

    def __init__(self, graph: OpGraph, layer_of: Mapping[int, int | None]) -> None:
        self.ops = graph.block.ops
        self.layer = layer_of
        self.portable = portable_ops(graph)
        # The positions of operations that are computed again, and of those that may read that, by layer.
        self.forward_of: dict[int | None, list[int]] = {}
        self.backward_of: dict[int | None, list[int]] = {}
        for i, op in enumerate(self.ops):
            if op.kind in (OpKind.ACCUMULATE, OpKind.STACK):
                continue
            if op.section is Section.FORWARD and op.kind not in (OpKind.SPLIT, OpKind.BARRIER):
                self.forward_of.setdefault(layer_of[op.id], []).append(i)
            elif op.section.is_backward:
                self.backward_of.setdefault(layer_of[op.id], []).append(i)
        self.position = {v: i for i, op in enumerate(self.ops) for v in op.outputs}
        self.results = {a for a in graph.block.outputs if isinstance(a, int)}
        # The operations that read a value, but for those of the backward pass.
        self.others: dict[int, list[int]] = {}
        for op in self.ops:
            if not op.section.is_backward or op.kind in (OpKind.ACCUMULATE, OpKind.STACK):
                for v in read_by(op):
                    self.others.setdefault(v, []).append(op.id)
        self.layers: dict[int, set[int]] = {}
        for op in reversed(self.ops):
            if not op.section.is_backward or op.kind in (OpKind.ACCUMULATE, OpKind.STACK):
                continue
            own = self.layer[op.id]
            if op.kind is OpKind.BARRIER:
                pairs = [(v, out) for v, out in zip(op.inputs, op.outputs, strict=True) if isinstance(v, int)]
            else:
                pairs = list(itertools.product(read_by(op), op.outputs))
            for v, out in pairs:
                self.layers.setdefault(v, set()).update({own} if own is not None else self.layers.get(out, ()))

    def forward(self, layer: int) -> tuple[Op, ...]:
        """The operations of a layer that may run again, with those that every layer runs for itself (of masks)."""
        of_layer, of_all = self.forward_of.get(layer, ()), self.forward_of.get(None, ())
        return tuple(self.ops[i] for i in sorted((*of_layer, *of_all)))

    def own_places(self, layer: int) -> dict[str, int]:
        """The results of the operations that the layer alone has, by their places: the same in a folded graph."""
        own = (op for i in self.forward_of.get(layer, ()) if (op := self.ops[i]).id not in self.portable)
        return {f"{i}.{k}": v for i, op in enumerate(own) for k, v in enumerate(op.outputs)}

    def unread(self, layer: int, again: Sequence[Op]) -> frozenset[int]:
        """Those of the operations that a layer computes again whose results in the forward pass nothing reads then."""
        unread: set[int] = set()
        for op in reversed(again):
            if self.layer[op.id] == layer and all(
                v not in self.results
                and self.layers.get(v, {layer}) <= {layer}
                and unread.issuperset(self.others.get(v, ()))
                for v in op.outputs
            ):
                unread.add(op.id)
        return frozenset(unread)

    def renamed(self, op: Op, names: Sequence[Mapping[int, int]]) -> Op:
        """A backward operation that reads the values its layer recomputed; one of no layer those of its only reader."""
        own = self.layer[op.id]
        if op.kind in (OpKind.ACCUMULATE, OpKind.STACK):
            return op
        if own is not None:
            return reading(op, names[own])
        if op.kind is not OpKind.BARRIER:
            reading_layers = set().union(*(self.layers.get(v, ()) for v in op.outputs))
            return reading(op, names[next(iter(reading_layers))]) if len(reading_layers) == 1 else op
        here: dict[int, int] = {}
        for v, out in zip(op.inputs, op.outputs, strict=True):
            reading_layers = self.layers.get(out, set())
            if isinstance(v, int) and len(reading_layers) == 1:
                (layer,) = reading_layers
                here |= {v: names[layer][v]} if v in names[layer] else {}
        return reading(op, here)


def _recomputed(layer: int, policy: str, readers: _Readers) -> tuple[list[int], list[Op]]:
    """(values that the layer's backward operations read anew, the operations that make them, in program order)."""
    forward = readers.forward(layer)
    saved = _saved(layer, policy, forward, readers)
    recomputable = {v: op for op in forward for v in op.outputs if v not in saved.kept | saved.in_host}
    # What other layers keep as their input is there anyway.
    for op in forward:
        if readers.layer[op.id] == layer:
            for v in op.outputs:
                if readers.layers.get(v, {layer}) != {layer}:
                    recomputable.pop(v, None)
    read = [v for v in recomputable if layer in readers.layers.get(v, ())]
    return read, _needed(read, recomputable, forward)


def _saved(layer: int, policy: str, forward: Sequence[Op], readers: _Readers) -> SavedValues:
    """The values of a layer that a policy keeps, as far as the backward pass reads them.

    Of each two products of a matrix with another one, in the order of the layer, HALF keeps the first: torchtitan's
    selective recomputation, which counts anew in each block and keeps attention. Products in a batch of matrices, such
    as those of attention and of experts, are kept.

    Raises: PlanMismatchError for a text that names values that the layer does not have.
    """
    if policy == Recompute.ALL:
        return SavedValues()
    if is_by_value(policy):
        places, (named, _, sent) = readers.own_places(layer), policy.removeprefix(BY_VALUE).partition(IN_HOST)
        if unknown := [place for place in (*named.split(), *sent.split()) if place not in places]:
            raise PlanMismatchError(
                where=f"$.plan.pipeline.recomputed[{layer}]", expected=f"values of a layer of {len(places)}",
                got=", ".join(unknown), hint="plan anew: the step is another one",
            )  # fmt: skip
        return SavedValues(*(frozenset(places[place] for place in each.split()) for each in (named, sent)))
    kept = [op for op in forward if is_kept(op)]
    if policy == Recompute.HALF:
        products = [op.id for op in forward if readers.layer[op.id] == layer and is_plain_product(op)]
        kept = [op for op in kept if op.id not in products[1::2]]
    return SavedValues(kept=frozenset(v for op in kept for v in op.outputs))


def _recomputation(
    layer: int, policy: str, readers: _Readers, fresh: Fresh
) -> tuple[int, list[Op], dict[int, int], dict[int, int]]:
    """(position, operations to insert there, new names for the operands of the layer's backward operations, the values
    that are made again by their new names).
    """
    ops = readers.ops
    read, recomputed = _recomputed(layer, policy, readers)
    of_all = (i for i in readers.backward_of.get(None, ()) if _is_read_by(ops[i], layer, readers))
    backward = sorted((*readers.backward_of.get(layer, ()), *of_all))
    at = next((i for i in backward if not {*read}.isdisjoint(read_by(ops[i]))), None)
    if at is None:
        return 0, [], {}, {}
    results = {v for op in recomputed for v in op.outputs}
    starts = dict.fromkeys(v for op in recomputed for v in read_by(op) if v not in results)
    cotangents = _cotangents(layer, at, backward, readers)
    parameters = [v for v in starts if _is_parameter(v, readers)]
    through = {v: fresh.copy_of(v) for v in (*starts, *cotangents)}
    first = ops[at]
    barrier = Op(
        id=fresh.op_id(), kind=OpKind.BARRIER, primitive="optimization_barrier", eqn=None, inputs=tuple(through),
        outputs=tuple(through.values()), rule=None, role=Role.BACKWARD, module=first.module, count=first.count,
        section=Section.BACKWARD,
    )  # fmt: skip
    names = dict(through)
    clones = [replace(clone(op, names, fresh), section=Section.BACKWARD, role=Role.BACKWARD) for op in recomputed]
    renamed = {v: names[v] for v in (*read, *parameters, *cotangents)}
    return at, [barrier, *clones], renamed, {names[v]: v for v in results}


def _is_parameter(v: int, readers: _Readers) -> bool:
    """Whether a value is there before the first micro-batch, as parameters and their casts are."""
    position = readers.position.get(v)
    return position is None or readers.ops[position].section is Section.BEFORE


def _is_read_by(op: Op, layer: int, readers: _Readers) -> bool:
    """Whether a layer alone reads something that an operation of no layer makes."""
    return any(readers.layers.get(v) == {layer} for v in op.outputs)


def _needed(values: Sequence[int], producer: Mapping[int, Op], forward: Sequence[Op]) -> list[Op]:
    """The forward operations that compute the values from saved ones, in program order."""
    needed: set[int] = set()
    stack = list(values)
    while stack:
        op = producer[stack.pop()]
        if op.id not in needed:
            needed.add(op.id)
            stack += [v for v in read_by(op) if v in producer]
    return [op for op in forward if op.id in needed]


def _cotangents(layer: int, at: int, backward: Sequence[int], readers: _Readers) -> list[int]:
    """The last cotangent that the layer's backward operations wait for when they start.

    Not all of them: a gradient that is added to another layer's (tied parameters) would be held up for nothing.
    """
    ops = readers.ops

    def is_cotangent(v: int) -> bool:
        position = readers.position.get(v)
        return (
            position is not None
            and position < at
            and ops[position].section.is_backward
            and readers.layer[ops[position].id] is not None
        )

    read = dict.fromkeys(v for i in backward if i >= at for v in read_by(ops[i]) if is_cotangent(v))
    arriving = [v for v in read if readers.layer[ops[readers.position[v]].id] != layer]
    own = [v for v in read_by(ops[at]) if v in read]
    return sorted(arriving or own, key=lambda v: readers.position[v])[-1:]


_TEXT = re.compile(rf"({'|'.join(policy.value for policy in Recompute)})(?: every ([1-9]\d*))?")
FORMS = " or ".join(repr(policy.value) for policy in Recompute) + ", also with ' every 2' or another number behind it"


def name_of(policy: str) -> str:
    """The policy of a layer in a few words."""
    if not is_by_value(policy):
        return policy
    return "by value, some in the hosts" if IN_HOST in policy else "by value"


def is_policy(text: str) -> bool:
    return _TEXT.fullmatch(text) is not None


def policies_of(text: str, num_layers: int) -> tuple[str, ...]:
    """The policy of each layer: with a number n of the layers n-1, 2n-1 and so on, the others keep everything.

    What is kept and what is computed again is then in between (Megatron's recomputation of some layers, Korthikanti et
    al., "Reducing activation recomputation in large transformer models", 2023, section 5).
    """
    found = _TEXT.fullmatch(text)
    assert found is not None, f"{text!r} is no policy: {FORMS}"
    policy, every = found[1], int(found[2] or 1)
    return tuple(policy if layer % every == every - 1 else Recompute.NOTHING.value for layer in range(num_layers))
