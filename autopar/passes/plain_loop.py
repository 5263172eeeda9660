"""Runs a graph of operations on one device, equation by equation, going over its micro-batches one after the other.

What the graph of a step that is cut into micro-batches means, in the plainest way: what `autopar.verify` compares plans
with whose modules are taken per micro-batch.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from autopar.common import jax_compat, loops
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
    return env[atom] if isinstance(atom, int) else atom.literal.val


def run_ops(ops: Sequence[Op], env: Environment, graph: OpGraph) -> None:
    for op in ops:
        with jax_compat.standing_at(op.eqn):
            made = _results(op, [read(env, a) for a in op.inputs], env, graph)
        for value, array in zip(op.outputs, made, strict=True):
            expected = graph.values[value]
            assert (tuple(array.shape), str(array.dtype)) == (expected.shape, expected.dtype), (op.primitive, expected)
            env[value] = array


def run_block(block: Block, arguments: Sequence[Any], graph: OpGraph, around: Mapping[int, Any] | None = None) -> Any:
    """The outputs of a block of a graph."""
    env = {**(around or {}), **dict(zip(block.inputs, arguments, strict=True))}
    run_ops(block.ops, env, graph)
    return [read(env, a) for a in block.outputs]


def _results(op: Op, inputs: list[Any], env: Environment, graph: OpGraph) -> Sequence[Any]:
    if op.kind is OpKind.BARRIER:
        return inputs
    if op.kind is OpKind.EQUATION:
        return jax_compat.bind(op.eqn, inputs)
    runs = [functools.partial(lambda block, xs: run_block(block, xs, graph, env), block) for block in op.blocks]
    values = [graph.values[v] for v in op.outputs]
    avals = [jax_compat.struct(v.shape, v.dtype, v.weak_type) for v in values]
    if op.kind is OpKind.COND:
        return loops.cond(runs, inputs, loops.like(avals))
    k, typed = op.num_consts, loops.like(avals[: op.num_carry])
    if op.kind is OpKind.WHILE:
        j = op.num_condition_consts
        return loops.while_loop(runs[0], runs[1], inputs, (j, k - j), typed)
    how = {"length": op.trips, "reverse": op.eqn.params["reverse"], "unroll": op.eqn.params["unroll"]}
    return loops.scan(runs[0], inputs, (k, op.num_carry), typed, **how)
