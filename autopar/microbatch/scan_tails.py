"""A scan of the step as two: in the loop over micro-batches what works on examples, behind it what reads whole sums.

Outside of scans, an operation that reads a sum over examples and is not linear in it runs behind the loop, on the sum
of all micro-batches: the cast of a parameter's gradient to a narrower type, the root of a mean square that is returned.
So does a metric that mixes examples otherwise, such as the largest activation. In the body of a scan over layers such
operations become a scan of their own, the tail. The sums and the rows of examples that it reads are results of each
trip of the scan that remains, so that their micro-batches are put together as those of any other result.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping

from autopar.common import jax_compat
from autopar.common.records import replaced
from autopar.ir.graph import Atom, Block, Op, OpKind
from autopar.ir.rewrite import Fresh, clone, reading, scan_equation
from autopar.microbatch.forms import Form, State, of_stack
from autopar.microbatch.part_of_results import part_of_results


def apart(op: Op, late: Mapping[int, Mapping[int, State]], fresh: Fresh) -> tuple[Op, ...]:
    """The scan that remains, where something does, and its tail, which makes the results that are made of whole sums.

    Args:
        late: Of this scan, and of those in its body with a tail, the states of the values in the body, as
            `Follower.late` has them.
        fresh: Takes the new values.

    Raises: CombinesExamples where the tail would read examples, or what cannot be taken apart.
    """
    return _apart(op, late, fresh)[0]


def _apart(op: Op, late: Mapping[int, Mapping[int, State]], fresh: Fresh) -> tuple[tuple[Op, ...], dict[int, State]]:
    """The scans, and the stacks that the first one hands to the second, with their states."""
    states = dict(late[op.outputs[0]])
    op = _with_inner_tails(op, late, states, fresh)
    (body,), k, carried = op.blocks, op.num_consts, op.num_carry
    results = [*body.inputs[k : k + carried], *body.outputs[carried:]]
    waiting = [_is_late(atom, states) for atom in results]
    late_results = {v for v, waits in zip(op.outputs, waiting, strict=True) if waits}
    read = [a for a, waits in zip(body.outputs, waiting, strict=True) if waits]
    for inner in body.ops:
        if inner.kind is not OpKind.BARRIER and any(_is_late(v, states) for v in inner.outputs):
            read += inner.inputs
    outer = {*body.inputs[:k], *body.inputs[k + carried :]}  # the tail reads these itself
    of_micro_batches = [
        a
        for a in read
        if isinstance(a, int)
        and (states[a].form is Form.PARTIAL_SUM or (states[a].form is Form.SPLIT and a not in outer))
    ]
    sums = tuple(dict.fromkeys(of_micro_batches))
    stacks = tuple(fresh.value((op.trips, *v.shape), v.dtype, v.itemsize) for v in [fresh.values[s] for s in sums])
    stacked = [jax_compat.variable_of(v.shape, v.dtype, v.weak_type) for v in (fresh.values[s] for s in stacks)]
    summing = replaced(
        op, eqn=op.eqn.replace(outvars=[*op.eqn.outvars, *stacked]), outputs=(*op.outputs, *stacks),
        blocks=(replaced(body, outputs=(*body.outputs, *sums)),),
    )  # fmt: skip
    kept = {*op.outputs, *stacks} - late_results
    head = part_of_results(summing, kept)
    tail = part_of_results(_reading_sums(op, sums, stacks, fresh), late_results)
    if head is None or tail is None or _makes_examples(tail, states):
        raise next(s.cause for s in states.values() if s.form is Form.UNAVAILABLE and s.cause is not None)
    tail = replaced(clone(tail, {}, fresh), outputs=tail.outputs)  # with values of its own but for the results
    stacked_states = {stack: of_stack(states[s]) for stack, s in zip(stacks, sums, strict=True)}
    return ((head, tail) if kept else (tail,)), stacked_states


def _with_inner_tails(
    op: Op, late: Mapping[int, Mapping[int, State]], states: MutableMapping[int, State], fresh: Fresh
) -> Op:
    """The scan with those scans of its body apart that have a tail themselves."""
    (body,), ops = op.blocks, list[Op]()
    for inner in body.ops:
        if inner.kind is OpKind.SCAN and inner.outputs[0] in late:
            scans, stacks = _apart(inner, late, fresh)
            states.update(stacks)
            ops += scans
        else:
            ops.append(inner)
    return replaced(op, blocks=(replaced(body, ops=tuple(ops)),))


def _is_late(atom: Atom, states: Mapping[int, State]) -> bool:
    """Whether a value is made of whole sums over examples."""
    return isinstance(atom, int) and states[atom].form is Form.UNAVAILABLE


def _reading_sums(op: Op, sums: tuple[int, ...], stacks: tuple[int, ...], fresh: Fresh) -> Op:
    """The scan that takes the sums over all micro-batches as slices, in the place of those that its body makes."""
    (body,) = op.blocks
    names = {s: fresh.copy_of(s) for s in sums}
    ops = tuple(reading(inner, names) for inner in body.ops)
    outputs = tuple(names.get(a, a) if isinstance(a, int) else a for a in body.outputs)
    return replaced(
        op,
        id=fresh.op_id(),
        eqn=scan_equation(op, range(len(op.inputs)), [fresh.values[s] for s in sums]),
        inputs=(*op.inputs, *stacks),
        blocks=(Block(inputs=(*body.inputs, *names.values()), outputs=outputs, ops=ops),),
    )


def _makes_examples(tail: Op, states: Mapping[int, State]) -> bool:
    """Whether the body of the tail makes rows of examples, or carries them."""
    (body,) = tail.blocks
    carry = body.inputs[tail.num_consts : tail.num_consts + tail.num_carry]
    values = [*carry, *(v for op in body.ops for v in op.outputs)]
    return any(states[v].form in (Form.SPLIT, Form.OWN) for v in values if v in states)
