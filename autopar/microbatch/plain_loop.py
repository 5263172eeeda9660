"""Runs a graph of operations on one device, equation by equation, going over its micro-batches one after the other.

What the graph of a step that is cut into micro-batches means, in the plainest way: what `autopar.verify` compares plans
with whose modules are taken per micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from autopar.common import jax_compat
from autopar.common.jax_compat import while_any
from autopar.ir.graph import Atom, Block, Op, OpGraph, OpKind, Section

Environment = dict[int, Any]


def run_graph(graph: OpGraph, leaves: Sequence[Any]) -> list[Any]:
    """The outputs of a graph's top block. Values that a micro-batch makes are out of sight after it."""
    shared: Environment = dict(zip(graph.block.inputs, [*graph.constants, *leaves], strict=True))
    for value, array in shared.items():
        assert tuple(array.shape) == graph.values[value].shape, graph.values[value]
    ops = {section: [op for op in graph.block.ops if op.section is section] for section in Section}
    assert [op for section in Section for op in ops[section]] == list(graph.block.ops), "ops stand by section"
    splits = [op for op in ops[Section.BEFORE] if op.kind is OpKind.SPLIT]
    run_ops([op for op in ops[Section.BEFORE] if op.kind is not OpKind.SPLIT], shared, graph)
    stacks = [op for op in ops[Section.AFTER] if op.kind is OpKind.STACK]
    sums: Environment = {}
    parts: dict[int, list[Any]] = {op.outputs[0]: [] for op in stacks}
    for i in range(graph.num_microbatches):
        env = dict(shared)
        for op in splits:
            env[op.outputs[0]] = part_of(read(env, op.inputs[0]), op.dim, i, graph.num_microbatches)
        for section in (Section.FORWARD, Section.BACKWARD):
            for op in ops[section]:
                if op.kind is OpKind.ACCUMULATE:
                    summand = read(env, op.inputs[0])
                    sums[op.outputs[0]] = sums[op.outputs[0]] + summand if op.outputs[0] in sums else summand
                else:
                    run_ops([op], env, graph)
        for op in stacks:
            parts[op.outputs[0]].append(read(env, op.inputs[0]))
    shared |= sums
    shared |= {op.outputs[0]: jnp.concatenate(parts[op.outputs[0]], op.dim) for op in stacks}
    run_ops([op for op in ops[Section.AFTER] if op.kind is not OpKind.STACK], shared, graph)
    return [read(shared, atom) for atom in graph.block.outputs]


def part_of(array: Any, dim: int, index: int, count: int) -> Any:
    size = array.shape[dim] // count
    return jax.lax.slice_in_dim(array, index * size, (index + 1) * size, axis=dim)


def read(env: Environment, atom: Atom) -> Any:
    return env[atom] if isinstance(atom, int) else jax_compat.with_type(atom.literal.val, atom.literal.aval)


def run_ops(ops: Sequence[Op], env: Environment, graph: OpGraph) -> None:
    for op in ops:
        for value, array in zip(op.outputs, run_op(op, env, graph), strict=True):
            expected = graph.values[value]
            assert (tuple(array.shape), str(array.dtype)) == (expected.shape, expected.dtype), (op.primitive, expected)
            env[value] = array


def run_op(op: Op, env: Environment, graph: OpGraph) -> Sequence[Any]:
    inputs = [read(env, a) for a in op.inputs]
    if op.kind is OpKind.BARRIER:
        return inputs
    if op.kind is OpKind.EQUATION:
        return jax_compat.bind(op.eqn, inputs)

    def block(b: Block, values: Sequence[Any]) -> list[Any]:
        inner = env | dict(zip(b.inputs, values, strict=True))
        run_ops(b.ops, inner, graph)
        return [read(inner, a) for a in b.outputs]

    k, c = op.num_consts, op.num_carry
    if op.kind is OpKind.SCAN:
        avals = [v.aval for v in jax_compat.open_jaxpr(op.eqn.params["jaxpr"]).invars[k : k + c]]

        def body(carry: Any, xs: Any) -> Any:
            out = [*block(op.blocks[0], [*inputs[:k], *carry, *xs])]
            return [jax_compat.with_type(x, a) for x, a in zip(out[:c], avals, strict=True)], out[c:]

        first = [jax_compat.with_type(x, a) for x, a in zip(inputs[k : k + c], avals, strict=True)]
        carry, ys = jax.lax.scan(body, first, inputs[k + c :], op.trips, reverse=op.eqn.params["reverse"])
        return [*carry, *ys]
    if op.kind is OpKind.WHILE:
        n, avals = k, [v.aval for v in jax_compat.open_jaxpr(op.eqn.params["body_jaxpr"]).invars[-c:]]
        j = op.num_condition_consts
        first = [jax_compat.with_type(x, a) for x, a in zip(inputs[n:], avals, strict=True)]
        return while_any(
            lambda carry: block(op.blocks[0], [*inputs[:j], *carry])[0],
            lambda carry: [
                jax_compat.with_type(x, a)
                for x, a in zip(block(op.blocks[1], [*inputs[j:n], *carry]), avals, strict=True)
            ],
            first,
        )
    assert op.kind is OpKind.COND, op.kind
    return jax.lax.switch(inputs[0], [lambda *xs, b=b: block(b, xs) for b in op.blocks], *inputs[1:])
