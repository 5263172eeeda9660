"""The layer of every operation and argument of a training step: forward and backward pass, update, state.

Pipeline stages consist of whole layers, so one assignment serves every division into stages. The operands of a backward
operation determine its layer: the transpose of a forward operation reads that operation's residuals.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping

from scipy.cluster.hierarchy import DisjointSet

from autopar.ir.graph import Op, OpGraph, OpKind, Section, read_by
from autopar.ir.rewrite import makers
from autopar.passes.layers import Layers, portable_ops

_SUMS = (OpKind.ACCUMULATE, OpKind.STACK)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayerAssignment:
    """`layer_of[i]` of the i-th operation of the top block; None where it runs wherever its results are read:
    portable operations and barriers. `homes[i]` is the layer at which the i-th input of the top block lies.
    `same_as[v]` is the forward value that v is computed again for.
    """

    layer_of: tuple[int | None, ...]
    homes: tuple[int, ...]
    same_as: Mapping[int, int]


def assign_layers(graph: OpGraph, layers: Layers, given: Mapping[int, int] | None = None) -> LayerAssignment:
    """The layer of every operation. `given`: the layers at which state lies, by the position of the input.

    (1) Forward: as in `layers`. (2) Hoisted operations: with their arguments or readers. (3) Backward: see
    `_Backward`. (4) Sums over micro-batches: where the summand is made. (5) The update: with the state of its shape,
    else with the largest operand. (6) State: where that is given, else at the first layer that reads it.
    """
    return _Assignment(graph, layers, given or {}).result()


class _Assignment:
    """The assignment while it grows. `layer` is by operation id; values are followed by their maker."""

    def __init__(self, graph: OpGraph, layers: Layers, given: Mapping[int, int]) -> None:
        self.graph, self.ops, self.last = graph, graph.block.ops, len(layers) - 1
        self.portable = portable_ops(graph)
        self.maker = makers(self.ops)
        self.state = dict.fromkeys(graph.block.inputs[len(graph.constants) :])
        for i in graph.batch:
            self.state.pop(graph.block.inputs[i], None)
        self.layer: dict[int, int] = {
            op: number for number, group in enumerate(layers.ops) for op in group if op not in self.portable
        }
        self.touched = self._touched()
        self.home: dict[int, int] = {v: min(self.touched[v]) for v in graph.block.inputs if self.touched.get(v)}
        self.home |= {graph.block.inputs[i]: layer for i, layer in given.items()}

    def result(self) -> LayerAssignment:
        self._hoisted()
        backward = _Backward(self)
        pulled = backward.run()
        self._hoisted_for_backward()
        self._sums()
        update = _Update(self)
        update.shapes()
        for op_id, layer in pulled(update.wanted).items():
            self.layer[op_id] = layer
        self._sums()
        update.run()
        layer_of: tuple[int | None, ...] = tuple(self.layer.get(op.id) for op in self.ops)
        first: dict[int, int] = {}
        for op, at in zip(self.ops, layer_of, strict=True):
            for v in read_by(op):
                if at is not None:
                    first.setdefault(v, at)
        homes = tuple(self.home.get(v, first.get(v, 0)) for v in self.graph.block.inputs)
        return LayerAssignment(layer_of=layer_of, homes=homes, same_as=backward.same_as)

    def _touched(self) -> dict[int, set[int]]:
        """The layers that make or read a value in the forward section, directly or through its operands."""
        touched: dict[int, set[int]] = {}
        for op in self.ops:
            if op.id in self.layer:
                for v in (*op.outputs, *read_by(op)):
                    touched.setdefault(v, set()).add(self.layer[op.id])
        for op in reversed(self.ops):
            if op.section is Section.BEFORE or (op.id in self.portable and op.section is Section.FORWARD):
                through = set().union(*(touched.get(v, set()) for v in op.outputs))
                for v in read_by(op):
                    touched.setdefault(v, set()).update(through)
        return touched

    def _hoisted(self) -> None:
        """(2) Hoisted operations join their arguments, or their readers where fewer bytes are sent then."""
        values = self.graph.values
        for op in self.ops:
            if op.section is not Section.BEFORE or op.id in self.portable or op.kind is OpKind.BARRIER:
                continue
            readers = [t for v in op.outputs for t in self.touched.get(v, ())]
            at = self.at_largest(read_by(op))
            grows = sum(values[v].nbytes for v in read_by(op)) < sum(values[v].nbytes for v in op.outputs)
            if readers and (grows or at is None):
                at = min(readers)
            if at is not None:
                self.layer[op.id] = at

    def _hoisted_for_backward(self) -> None:
        """(2) Operations without state that only the backward section reads are placed with their first reader."""
        layer_reading: dict[int, int] = {}
        for op in reversed(self.ops):
            hoisted = op.section is Section.BEFORE and op.kind is not OpKind.BARRIER and op.id not in self.portable
            if hoisted and op.id not in self.layer:
                self.layer[op.id] = max((layer_reading[v] for v in op.outputs if v in layer_reading), default=0)
            if op.id in self.layer:
                for v in read_by(op):
                    root = self.root(v)
                    layer_reading[root] = max(layer_reading.get(root, 0), self.layer[op.id])

    def _sums(self) -> None:
        for op in self.ops:
            if op.kind in _SUMS:
                places = [at for v in read_by(op) if (at := self.at(v)) is not None]
                self.layer[op.id] = places[0] if places else 0

    def at(self, value: int) -> int | None:
        """The layer of a value; None for values of no layer and those that each reader computes."""
        value = self.root(value)
        if value in self.maker:
            return self.layer.get(self.maker[value].id)
        return self.home.get(value) if value in self.state else None

    def at_largest(self, values: Iterable[int]) -> int | None:
        """The layer of the largest value that has one; of equally large ones the last layer."""
        known = [(self.graph.values[v].nbytes, at) for v in values if (at := self.at(v)) is not None]
        return max(known)[1] if known else None

    def root(self, value: int) -> int:
        """The value in front of the barriers that it passed."""
        while value in self.maker and self.maker[value].kind is OpKind.BARRIER:
            value = self.in_front(self.maker[value], value)
        return value

    def in_front(self, barrier: Op, value: int) -> int:
        source = barrier.inputs[barrier.outputs.index(value)]
        assert isinstance(source, int), "a barrier passes values only"
        return source


class _Backward:
    """(3) Layers of the backward section, in program order.

    What is computed again (behind a barrier) lies where it was computed first. Else the residuals that an operation
    reads were all made or read by the layer that it differentiates; no layer may come before what it needs: the last
    such layer that is not behind those of the cotangents. The user's module decides between several. Without residuals
    it lies with its cotangents, or at the layer that wants its result if that layer reads the same cotangents anyway.
    """

    def __init__(self, assignment: _Assignment) -> None:
        self.of = assignment
        self.modules: dict[str, set[int]] = {}
        self.first: dict[tuple, Op] = {}
        self.same_as: dict[int, int] = {}
        for op in assignment.ops:
            if op.section is Section.FORWARD and op.id in assignment.layer:
                self.modules.setdefault(op.module, set()).add(assignment.layer[op.id])
            if op.section in (Section.BEFORE, Section.FORWARD) and op.kind is OpKind.EQUATION:
                self.first.setdefault(self.number(op), op)
        self.without_residuals: list[Op] = []

    def run(self) -> _Pull:
        layer = self.of.layer
        for op in self.of.ops:
            if not op.section.is_backward or op.kind in (*_SUMS, OpKind.BARRIER, OpKind.SPLIT):
                continue
            again = self.first.get(self.number(op)) if op.kind is OpKind.EQUATION else None
            if again is not None:
                self.same_as.update(zip(op.outputs, again.outputs, strict=True))
            if op.id not in self.of.portable:
                known = layer.get(again.id) if again is not None else None
                layer[op.id] = known if known is not None else self.layer_of(op)
        return _Pull(self.of, tuple(self.without_residuals))

    def number(self, op: Op) -> tuple:
        """Equal for equations that compute the same."""
        operands = (self.of.root(a) if isinstance(a, int) else a.content for a in op.inputs)
        return op.key, *(self.same_as.get(v, v) if isinstance(v, int) else v for v in operands)

    def layer_of(self, op: Op) -> int:
        bound = math.inf
        residuals: list[set[int]] = []
        weak: list[set[int]] = []
        for v in read_by(op):
            root = self.of.root(v)
            # What is computed again counts as what it was first: a stage may read that instead.
            if root in self.same_as:
                root = self.same_as[root]
                if self.is_portable(root):
                    continue  # equal ones of other layers are the same
            maker = self.of.maker.get(root)
            if maker is not None and maker.section.is_backward:
                bound = min(bound, self.of.layer.get(maker.id, math.inf))
            else:
                touched = self.of.touched.get(root, set())
                (weak if self.is_portable(root) else residuals).append(touched)
                bound = min(bound, self.limit(v))
        # What every layer can make for itself tells less than what came from one: it counts where nothing else does.
        possible: list[set[int]] = []
        for sets in (residuals, weak):
            possible = [within for touched in sets if (within := {t for t in touched if t <= bound})]
            if possible:
                break
        hint = {t for t in self.layers_of_module(op.module) if t <= bound}
        if not possible:
            if hint:
                return max(hint)
            self.without_residuals.append(op)
            return self.of.last if math.isinf(bound) else int(bound)
        shared = set.intersection(*possible) or {min(max(touched) for touched in possible)}
        return max(shared & hint or shared)

    def layers_of_module(self, module: str) -> set[int]:
        """Of the forward operations of a module. Rematerialised work has the outer names twice in its path."""
        while module and module not in self.modules:
            module = module.partition("/")[2]
        return self.modules[module] if module else set()

    def is_portable(self, root: int) -> bool:
        maker = self.of.maker.get(root)
        return maker.id in self.of.portable if maker is not None else root not in self.of.state

    def limit(self, value: int) -> float:
        """The first layer of the cotangents that pass the same barriers: what is recomputed is not behind them."""
        limit = math.inf
        while value in self.of.maker and self.of.maker[value].kind is OpKind.BARRIER:
            barrier = self.of.maker[value]
            for v in read_by(barrier):
                maker = self.of.maker.get(self.of.root(v))
                if maker is not None and maker.section.is_backward:
                    limit = min(limit, self.of.layer.get(maker.id, math.inf))
            value = self.of.in_front(barrier, value)
        return limit


@dataclasses.dataclass(frozen=True, slots=True)
class _Pull:
    """Operations without residuals that may move towards their readers: a bias's gradient to the bias."""

    of: _Assignment
    ops: tuple[Op, ...]

    def __call__(self, wanted: Mapping[int, int]) -> dict[int, int]:
        """The new layers. `wanted[v]` is where the update wants the sum v."""
        readers: dict[int, list[Op]] = {}
        for op in self.of.ops:
            if op.kind is not OpKind.BARRIER:
                for v in read_by(op):
                    readers.setdefault(self.of.root(v), []).append(op)
        moved: dict[int, int] = {}

        def at(op: Op) -> int:
            if op.kind in _SUMS:
                return wanted.get(op.outputs[0], self.of.layer[op.id])
            return moved.get(op.id, self.of.layer.get(op.id, 0))

        def readers_at(op: Op) -> int:
            return max((at(r) for v in op.outputs for r in readers.get(v, ())), default=self.of.last)

        def is_there(value: int, op: Op) -> bool:
            """Whether an operand is at hand where the operation would move."""
            root = self.of.root(value)
            maker = self.of.maker.get(root)
            with_it = maker is not None and moved.get(maker.id) == moved[op.id]
            return with_it or any(r.id not in moved and at(r) == moved[op.id] for r in readers[root])

        for op in reversed(self.ops):
            if readers_at(op) < self.of.layer[op.id]:
                moved[op.id] = readers_at(op)
        while stay := [
            op for op in self.ops
            if op.id in moved and (readers_at(op) > moved[op.id] or not all(is_there(v, op) for v in read_by(op)))
        ]:  # fmt: skip
            for op in stay:
                del moved[op.id]
        return moved


class _Update:
    """(5) and (6): layers of operations behind the loop, and homes of the state that only the update reads."""

    def __init__(self, assignment: _Assignment) -> None:
        self.of = assignment
        self.ops = [
            op for op in assignment.ops
            if op.section is Section.AFTER and op.id not in assignment.portable and op.kind not in _SUMS
        ]  # fmt: skip
        self._combined = DisjointSet()  # values of one shape that operations combine
        self.wanted: dict[int, int] = {}  # by value: the layer of the state that it is combined with

    def shapes(self) -> None:
        """Joins the values of one shape that operations combine, and places them with the state among them."""
        values = self.of.graph.values
        for op in self.ops:
            for out in op.outputs:
                for v in read_by(op):
                    if values[v].shape == values[out].shape and values[v].size > 1:
                        self._combined.add(v)
                        self._combined.add(out)
                        self._combined.merge(v, out)
        homes: dict[int, set[int]] = {}
        for v in self._combined:
            if v in self.of.home and v in self.of.state:
                homes.setdefault(self._combined[v], set()).add(self.of.home[v])
        # State of several layers that is combined (a norm over equal shapes, say) tells nothing.
        self.group: dict[int, int] = {g: min(at) for g, at in homes.items() if len(at) == 1}
        self.mixed = {g for g, at in homes.items() if len(at) > 1}
        self.wanted = {v: self.group[g] for v in self._combined if (g := self._combined[v]) in self.group}

    def run(self) -> None:
        self._grow()
        for v in self.of.state:
            if v not in self.of.home and v in self._combined and self._combined[v] in self.group:
                self.of.home[v] = self.group[self._combined[v]]
        block = self.of.graph.block
        tied = {a: block.inputs[i] for i, o in self.of.graph.tied if isinstance(a := block.outputs[o], int)}
        for op in self.ops:
            if op.kind is OpKind.BARRIER:
                continue
            groups = [self._combined[v] for v in op.outputs if v in self._combined]
            known = [self.group[g] for g in groups if g in self.group]
            largest = self.of.at_largest(read_by(op)) or 0
            self.of.layer[op.id] = known[0] if known else largest
        for op in self.ops:
            new = [tied[v] for v in op.outputs if v in tied]
            if new and op.id in self.of.layer:
                home = self.of.home.setdefault(new[0], self.of.layer[op.id])
                self.of.layer[op.id] = home

    def _grow(self) -> None:
        """Places groups without state with their reduced or reshaped operands, until nothing changes."""
        for op in self.of.ops:
            if op.kind in _SUMS and op.outputs[0] in self._combined:
                group = self._combined[op.outputs[0]]
                if group not in self.mixed:
                    self.group.setdefault(group, self.of.layer[op.id])
        changed = True
        while changed:
            changed = False
            for op in self.ops:
                for out in op.outputs:
                    if out not in self._combined:
                        continue
                    group = self._combined[out]
                    if group in self.group or group in self.mixed:
                        continue
                    near = [self._place(v) for v in read_by(op) if self.of.graph.values[v].size > 1]
                    layers_near = [at for at in near if at is not None]
                    if layers_near:
                        self.group[group] = max(layers_near)
                        changed = True

    def _place(self, value: int) -> int | None:
        if value in self._combined and self._combined[value] in self.group:
            return self.group[self._combined[value]]
        return self.of.at(value)
