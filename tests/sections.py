"""Steps cut into sections for tests, and an evaluator of their graphs: what a rewrite must not change."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from msgspec.structs import replace

from autopar.common import jax_compat
from autopar.frontend.build_graph import build_graph
from autopar.frontend.tracing import trace
from autopar.ir.graph import Block, Constant, Op, OpGraph, OpKind, Role, Section, read_by
from autopar.ir.rewrite import Fresh, reading, renumbered
from autopar.ir.rules import RuleBook
from autopar.ir.traced_step import TracedStep

BOOK = RuleBook()
ORDER = list(Section)


def traced_step(step: Any, state: Any, batch: Any, num_microbatches: int = 1) -> TracedStep:
    """A step traced with the shapes of one micro-batch. `batch` holds arrays of the whole batch, examples first."""
    micro = jax.tree.map(lambda x: jax.ShapeDtypeStruct((x.shape[0] // num_microbatches, *x.shape[1:]), x.dtype), batch)
    return trace(step, (state, micro), names=("state", "batch"), donate=(0,), batch=(1,))


def sectioned(traced: TracedStep, num_microbatches: int = 1) -> OpGraph:
    """The graph of a step in sections by the roles of its operations.

    What is read behind the loop is summed over micro-batches, whatever it is: the numbers are not those of the step,
    but every correct rewrite keeps them.
    """
    graph = build_graph(traced, BOOK)
    batch = {graph.block.inputs[i] for i in graph.batch}
    from_batch, in_loop = set(batch), set()
    for op in graph.block.ops:
        if op.role is not Role.UPDATE and not from_batch.isdisjoint(read_by(op)):
            from_batch |= set(op.outputs)
    for op in reversed(graph.block.ops):
        if op.role is not Role.UPDATE or not in_loop.isdisjoint(op.outputs):
            in_loop |= {*op.outputs, *read_by(op)}
    section: dict[int, Section] = {}
    for op in graph.block.ops:
        if op.role is Role.FORWARD:
            section[op.id] = Section.FORWARD
        elif op.role is Role.BACKWARD:
            section[op.id] = Section.BACKWARD
        elif in_loop.isdisjoint(op.outputs):
            section[op.id] = Section.AFTER
        else:
            section[op.id] = Section.FORWARD if not from_batch.isdisjoint(read_by(op)) else Section.BEFORE
    return with_loop(graph, section, num_microbatches)


def with_loop(graph: OpGraph, section: Mapping[int, Section], num_microbatches: int) -> OpGraph:
    """Puts operations into their sections, SPLITs on the batch, and ACCUMULATEs on what is read behind the loop."""
    fresh = Fresh(graph)
    ops = [replace(op, section=section[op.id]) for op in graph.block.ops]
    splits, names, arguments = [], {}, list(graph.block.inputs)
    for i in sorted(graph.batch):
        whole, micro = fresh.copy_of(arguments[i]), arguments[i]
        value = graph.values[micro]
        fresh.values[whole] = replace(value, id=whole, shape=(value.shape[0] * num_microbatches, *value.shape[1:]))
        fresh.values[micro] = replace(value, name="")
        arguments[i] = whole
        splits.append(loop_op(fresh, OpKind.SPLIT, whole, micro))
    made = {v for op in ops if op.section.repeats for v in op.outputs}
    wanted = {v for op in ops if op.section is Section.AFTER for v in read_by(op)}
    wanted |= {v for v in graph.block.outputs if isinstance(v, int)}
    sums = []
    for v in sorted(made & wanted):
        names[v] = fresh.copy_of(v)
        sums.append(loop_op(fresh, OpKind.ACCUMULATE, v, names[v]))
    ops = [reading(op, names) if op.section is Section.AFTER else op for op in ops]
    outputs = tuple(names.get(v, v) if isinstance(v, int) else v for v in graph.block.outputs)
    ops = sorted([*splits, *ops, *sums], key=lambda op: ORDER.index(op.section))
    return renumbered(
        dataclasses.replace(
            graph,
            values=tuple(fresh.values),
            block=Block(inputs=tuple(arguments), outputs=outputs, ops=tuple(ops)),
            num_microbatches=num_microbatches,
        )
    )


def loop_op(fresh: Fresh, kind: OpKind, operand: int, result: int) -> Op:
    section = Section.FORWARD if kind is OpKind.SPLIT else Section.BACKWARD
    return Op(
        id=fresh.op_id(), kind=kind, primitive=kind.value, eqn=None, inputs=(operand,), outputs=(result,), rule=None,
        role=Role.UPDATE, module="", count=1.0, section=section,
    )  # fmt: skip


def evaluate(graph: OpGraph, args: Sequence[Any]) -> list[np.ndarray]:
    """The outputs of a graph for its arguments (without constants), section by section as a pipeline would run it."""
    m = graph.num_microbatches
    outer = dict(zip(graph.block.inputs, [*graph.constants, *args], strict=True))
    envs: list[dict[int, Any]] = [{} for _ in range(m)]

    def read(atom: Any, env: Mapping[int, Any]) -> Any:
        if isinstance(atom, Constant):
            return jax_compat.with_type(atom.literal.val, atom.literal.aval)
        return env[atom] if atom in env else outer[atom]

    ops = sorted(graph.block.ops, key=lambda op: ORDER.index(op.section))
    assert ops == list(graph.block.ops), "operations stand in the order of their sections"
    for op in ops:
        if op.kind in (OpKind.ACCUMULATE, OpKind.STACK):
            parts = [read(op.inputs[0], env) for env in envs]
            summed = op.kind is OpKind.ACCUMULATE
            outer[op.outputs[0]] = sum(parts[1:], parts[0]) if summed else jnp.concatenate(parts, axis=op.dim)
        elif op.section.repeats or op.kind is OpKind.SPLIT:
            for i, env in enumerate(envs):
                env.update(zip(op.outputs, run(op, functools.partial(read, env=env), i, m), strict=True))
        else:
            outer.update(zip(op.outputs, run(op, functools.partial(read, env={}), 0, m), strict=True))
    outputs = [read(a, {}) for a in graph.block.outputs]
    return [np.asarray(jax.random.key_data(x) if jax_compat.is_key_dtype(x.dtype) else x) for x in outputs]


def run(op: Op, read: Callable[[Any], Any], index: int, num_microbatches: int) -> list[Any]:
    """The results of an operation; of a scan from its block, as a step runs it: its equation is that of the step."""
    operands = [read(a) for a in op.inputs]
    if op.kind is OpKind.BARRIER:
        return operands
    if op.kind is OpKind.SPLIT:
        return [jnp.split(operands[0], num_microbatches, axis=op.dim)[index]]
    if op.kind is OpKind.SCAN:
        return _run_scan(op, operands, read)
    return jax_compat.bind(op.eqn, operands)


def _run_scan(op: Op, operands: Sequence[Any], read: Callable[[Any], Any]) -> list[Any]:
    (body,), k, n = op.blocks, op.num_consts, op.num_consts + op.num_carry
    consts, carry, stacked = operands[:k], list(operands[k:n]), operands[n:]
    trips: int = op.eqn.params["length"]
    rows: list[list[Any]] = [[] for _ in op.outputs[n - k :]]
    backwards = op.eqn.params["reverse"]
    for i in reversed(range(trips)) if backwards else range(trips):
        env = dict(zip(body.inputs, [*consts, *carry, *(x[i] for x in stacked)], strict=True))

        def inner(atom: Any, env: dict[int, Any] = env) -> Any:
            return env[atom] if isinstance(atom, int) and atom in env else read(atom)

        for inner_op in body.ops:
            env.update(zip(inner_op.outputs, run(inner_op, inner, 0, 1), strict=True))
        results = [inner(a) for a in body.outputs]
        carry = results[: n - k]
        for row, result in zip(rows, results[n - k :], strict=True):
            row.append(result)
    return [*carry, *(jnp.stack(row[::-1] if backwards else row) for row in rows)]


def assert_same_numbers(before: OpGraph, after: OpGraph, args: Sequence[Any], tolerance: float = 1e-5) -> None:
    for a, b in zip(evaluate(after, args), evaluate(before, args), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * (np.abs(b.astype(np.float64)).max(initial=0) + 1e-30))


def zoo_step(case: Any, num_microbatches: int = 1) -> tuple[OpGraph, list[Any]]:
    """The graph of a case of the zoo in sections, and arguments to evaluate it with."""
    state, batch = jax.jit(case.init)(jax.random.key(0)), case.batch(0)
    return plain_step(case.step, state, batch, num_microbatches)


def plain_step(step: Any, state: Any, batch: Any, num_microbatches: int = 1) -> tuple[OpGraph, list[Any]]:
    graph = sectioned(traced_step(step, state, batch, num_microbatches), num_microbatches)
    return graph, [jnp.asarray(x) for x in jax.tree.leaves((state, batch))]


def text(graph: OpGraph, stages: Sequence[int | None] | None = None) -> str:
    """A line for each operation: section, stage where there is one, `results = primitive operands`."""
    names: dict[int, str] = {}

    def name(atom: Any) -> str:
        if not isinstance(atom, int):
            return repr(float(atom.literal.val))
        return graph.values[atom].name or names.setdefault(atom, f"%{len(names)}")

    lines = []
    for i, op in enumerate(graph.block.ops):
        operands, results = " ".join(map(name, op.inputs)), " ".join(map(name, op.outputs))
        stage = "" if stages is None else f" {stages[i]}"
        lines.append(f"{op.section.value}{stage}: {results} = {op.primitive} {operands}")
    return "\n".join([*lines, f"-> {' '.join(map(name, graph.block.outputs))}"])
