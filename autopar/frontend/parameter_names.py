"""Names of operations where the code names no module: the paths of the parameters that they read.

`jax.named_scope`, which Linen and Haiku call, is in the name stacks of a trace. NNX and plain trees leave
none, Equinox the classes of its layers. Only what is read is named so (rows of modules, collectives, profiles). What a
user's pattern permits, and the layers of a pipeline, follow the modules of the code.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from msgspec.structs import replace

from autopar.common.paths import parts_of
from autopar.ir.graph import Atom, Block, Op, OpGraph, OpKind, Role, Value, walk
from autopar.ir.primitives import MATRIX_PRODUCTS

# What is made of a parameter by these is the parameter in another form.
_FORMS = frozenset(
    {"convert_element_type", "transpose", "reshape", "broadcast_in_dim", "squeeze", "expand_dims", "copy"}
)


def with_parameter_names(graph: OpGraph) -> OpGraph:
    """The graph with `Op.parameters` at each equation whose module the code does not name."""
    if all(op.has_place for op in walk(graph.block)):
        return graph
    return dataclasses.replace(graph, block=_Names(graph).named())


class _Names:
    """The paths of parameters followed through a graph, operation by operation in program order."""

    def __init__(self, graph: OpGraph) -> None:
        self.graph, self.role = graph, graph.forward_role
        self.parameters: dict[int, str] = {}  # values that are parameters, in whatever form
        self.made_by: dict[int, tuple[str, Role]] = {}  # other values, by what they are made by

    def named(self) -> Block:
        graph = self.graph
        first = len(graph.constants)
        leaves = {
            v: graph.values[v].name for i, v in enumerate(graph.block.inputs) if i >= first and i not in graph.batch
        }
        read = frozenset(_read_by(graph.block, self.role, dict.fromkeys(leaves)))
        self.parameters = {v: _module_of(path) for v, path in leaves.items() if v in read}
        return self.block(graph.block, self.updates(read))

    def updates(self, parameters: frozenset[int]) -> dict[int, str]:
        """By operation, the parameter whose gradient or new value it makes, and nothing else of its size."""
        maker = {v: op for op in walk(self.graph.block) for v in op.outputs}
        found: dict[int, str] = {}
        for i, o in self.graph.tied:
            leaf = self.graph.block.inputs[i]
            waiting = [self.graph.block.outputs[o]] if leaf in parameters else []
            while waiting:
                value = waiting.pop()
                if not isinstance(value, int) or value not in maker:
                    continue
                op = maker[value]
                if op.role is self.role or op.id in found:
                    continue
                if op.kind is OpKind.SCAN:  # what each turn makes of a stack, or adds to a sum
                    waiting.append(op.blocks[0].outputs[op.outputs.index(value)])
                    continue
                found[op.id] = self.parameters[leaf]
                if op.kind is OpKind.EQUATION and op.primitive not in MATRIX_PRODUCTS:
                    size = _size(self.graph.values[value])
                    waiting += [a for a in op.inputs if isinstance(a, int) and _size(self.graph.values[a]) == size]
        return found

    def block(self, block: Block, updates: Mapping[int, str]) -> Block:
        return replace(block, ops=_by_readers([self.op(op, updates) for op in block.ops]))

    def op(self, op: Op, updates: Mapping[int, str]) -> Op:
        if op.blocks:
            return self.loop(op, updates)
        name = updates.get(op.id) or self.name_of(op)
        of_parameter = op.primitive in _FORMS and isinstance(op.inputs[0], int) and op.inputs[0] in self.parameters
        if of_parameter or op.kind is OpKind.BARRIER:
            for a, out in zip(op.inputs, op.outputs, strict=op.kind is OpKind.BARRIER):
                self.pass_on(a, out)
        elif name and not op.has_place:
            self.made_by |= dict.fromkeys(op.outputs, (name, op.role))
        return op if op.has_place or not name or op.kind is not OpKind.EQUATION else replace(op, parameters=name)

    def pass_on(self, source: Atom, target: int) -> None:
        """What is known of a value holds for another."""
        if isinstance(source, int) and source in self.parameters:
            self.parameters[target] = self.parameters[source]
        elif isinstance(source, int) and source in self.made_by:
            self.made_by[target] = self.made_by[source]

    def name_of(self, op: Op) -> str:
        own = dict.fromkeys(self.parameters[a] for a in op.inputs if isinstance(a, int) and a in self.parameters)
        if own:
            return _joined(list(own))
        operands = [a for a in op.inputs if isinstance(a, int) and a in self.made_by]
        if op.role is Role.BACKWARD:  # the derivative of what made its residuals
            operands = [a for a in operands if self.made_by[a][1] is Role.FORWARD] or operands
        return _joined(list(dict.fromkeys(self.made_by[a][0] for a in sorted(operands))))

    def loop(self, op: Op, updates: Mapping[int, str]) -> Op:
        blocks = []
        for block, inputs in zip(op.blocks, inputs_of_blocks(op), strict=True):
            for outer, inner in zip(inputs, block.inputs, strict=True):
                self.pass_on(outer, inner)
            blocks.append(self.block(block, updates))
            if len(block.outputs) == len(op.outputs):  # all but the condition of a while
                for made, result in zip(block.outputs, op.outputs, strict=True):
                    self.pass_on(made, result)
        return replace(op, blocks=tuple(blocks))


def _by_readers(ops: Sequence[Op]) -> tuple[Op, ...]:
    """Operations, of which one that reads nothing named has the name of the first that reads what it makes."""
    named: list[Op] = []
    reader: dict[int, str] = {}
    for op in reversed(ops):
        name = op.parameters or next((reader[v] for v in op.outputs if v in reader), "")
        if name != op.parameters and not op.has_place and op.kind is OpKind.EQUATION:
            op = replace(op, parameters=name)
        if name and not op.has_place:
            reader |= dict.fromkeys((a for a in op.inputs if isinstance(a, int)), name)
        named.append(op)
    return tuple(reversed(named))


def inputs_of_blocks(op: Op) -> list[tuple[Atom, ...]]:
    """For each block of a loop or branch, the operands that become its inputs."""
    if op.kind is OpKind.COND:
        return [op.inputs[1:]] * len(op.blocks)
    if op.kind is OpKind.WHILE:
        of_condition, carried = op.num_condition_consts, op.inputs[op.num_consts :]
        return [(*op.inputs[:of_condition], *carried), op.inputs[of_condition:]]
    return [op.inputs]


def _read_by(block: Block, role: Role, leaves: Mapping[int, None]) -> Iterator[int]:
    """The leaves, also in loops and in other forms, that operations of a role read."""
    of: dict[int, int] = {v: v for v in leaves}

    def pass_on(sources: Sequence[Atom], targets: Sequence[int]) -> None:
        of.update((v, of[a]) for a, v in zip(sources, targets, strict=False) if isinstance(a, int) and a in of)

    def read_in(block: Block) -> Iterator[int]:
        for op in block.ops:
            if op.blocks:
                for inner, inputs in zip(op.blocks, inputs_of_blocks(op), strict=True):
                    pass_on(inputs, inner.inputs)
                    yield from read_in(inner)
            elif op.primitive in _FORMS or op.kind is OpKind.BARRIER:
                pass_on(op.inputs, op.outputs)
            elif op.role is role:
                yield from (of[a] for a in op.inputs if isinstance(a, int) and a in of)

    return read_in(block)


def _joined(names: Sequence[str]) -> str:
    """One name of those of several operands, the latest last: the parent of siblings, else the latest."""
    if not names:
        return ""
    parent = names[-1].rpartition("/")[0]
    are_siblings = len(names) > 1 and "/" in parent and all(name.rpartition("/")[0] == parent for name in names)
    return parent if are_siblings else names[-1]


def _module_of(path: str) -> str:
    """`model/blocks/0/up` of `model.blocks[0].up.kernel`; a leaf of the argument itself stands for itself."""
    parts = parts_of(path)
    return "/".join(parts if len(parts) <= 2 else parts[:-1])


def _size(value: Value) -> int:
    size = 1
    for n in value.shape:
        size *= n
    return size
