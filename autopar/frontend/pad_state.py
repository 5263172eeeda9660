"""The graph of a step whose state is stored padded: what the update computes element by element, it computes padded.

A leaf of the state that no number of devices divides is stored in a larger shape (`autopar.ir.padded`). Its readers in
the forward and backward pass get it cut to the shape of the code; each pass cuts it anew, so that a gathered copy does
not outlive the pass. Element by element, an update computes the same in either shape: from the gradient on, which is
padded once, moments, master weights and new parameters are computed in the stored shape. A sum over all elements leaves
the padding out. All else reads what the code has, cut out of what is stored. So the results are those of the code,
whatever the padding holds.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from autopar.common import jax_compat
from autopar.ir.graph import Atom, Block, Constant, Op, OpGraph, OpKind, Role, read_by
from autopar.ir.padded import PaddedForm, PaddedLeaf
from autopar.ir.rewrite import Fresh, makers, reading, remove_dead
from autopar.ir.traced_step import TracedStep
from autopar.sharding.rules import equation_key

# Operations that compute each element of one result from the same element of their operands.
_ELEMENTWISE = frozenset({
    "abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2", "atanh", "cbrt", "ceil", "clamp",
    "convert_element_type", "copy", "copy_p", "cos", "cosh", "digamma", "div", "eq", "erf", "erf_inv", "erfc", "exp",
    "exp2", "expm1", "floor", "ge", "gt", "imag", "integer_pow", "is_finite", "le", "lgamma", "log", "log1p",
    "logistic", "lt", "max", "min", "mul", "ne", "neg", "nextafter", "not", "or", "pow", "real", "reduce_precision",
    "rem", "round", "rsqrt", "select_n", "sign", "sin", "sinh", "sqrt", "square", "stop_gradient", "sub", "tan", "tanh",
    "xor",
})  # fmt: skip


def store(array: Any, form: PaddedForm) -> Any:
    """An array in its stored shape, padded with zeros (False of truth values), of random keys with the first ones."""
    if form.rows:
        return jax.lax.concatenate([store(a, f) for a, f in _parts(array, form.rows, form)], 0)
    if form.is_flat:
        array = jax.lax.reshape(array, form.flat_shape)
    widths = [(0, s - n, 0) for n, s in zip(form.flat_shape, form.stored_shape, strict=True)]
    if jax.dtypes.issubdtype(array.dtype, jax.dtypes.extended):
        return _with_first_ones(array, [w for _, w, _ in widths])
    return jax.lax.pad(array, np.zeros((), array.dtype)[()], widths) if any(w for _, w, _ in widths) else array


def _with_first_ones(array: Any, widths: Sequence[int]) -> Any:
    """`jax.lax.pad` at the ends takes numbers only, and there is no zero among random keys."""
    for d, width in enumerate(widths):
        if width:
            first = jax.lax.slice_in_dim(array, 0, 1, axis=d)
            shape = (*array.shape[:d], width, *array.shape[d + 1 :])
            array = jax.lax.concatenate([array, jax.lax.broadcast_in_dim(first, shape, range(array.ndim))], d)
    return array


def unstore(array: Any, form: PaddedForm) -> Any:
    """The array of the code, cut out of what is stored."""
    if form.rows:
        stored = _parts(array, (form.rows_of_part,) * len(form.rows), form)
        return jax.lax.concatenate([unstore(a, f) for a, f in stored], 0)
    if form.flat_shape != form.stored_shape:
        array = jax.lax.slice(array, (0,) * len(form.flat_shape), form.flat_shape)
    return jax.lax.reshape(array, form.shape) if form.is_flat else array


def _parts(array: Any, rows: Sequence[int], form: PaddedForm) -> Iterator[tuple[Any, PaddedForm]]:
    """An array cut into so many rows each along dimension 0, and the form of each part."""
    for part, (stop, n) in enumerate(zip(itertools.accumulate(rows), rows, strict=True)):
        cut = jax.lax.slice_in_dim(array, stop - n, stop)
        yield cut, PaddedForm((form.rows[part], *form.shape[1:]), (form.rows_of_part, *form.stored_shape[1:]))


def padded_step(traced: TracedStep, forms: Mapping[int, PaddedForm], *, num_stages: int = 1) -> TracedStep:
    """The step with some leaves of its state, by number, in the forms in which they are stored, for so many stages."""
    padded = tuple(
        PaddedLeaf(leaf=leaf, shape=form.shape, stored_shape=form.stored_shape, rows=form.rows)
        for leaf, form in sorted(forms.items())
    )
    if not padded:
        return traced
    results = {traced.tied[leaf]: form for leaf, form in forms.items() if leaf in traced.tied}
    digest = hashlib.sha256(repr((traced.fingerprint, padded)).encode()).hexdigest()

    def retrace(avals: Sequence[jax.ShapeDtypeStruct]) -> Any:
        codes = {leaf: form.shape for leaf, form in forms.items()}
        return traced.retrace([_of_shape(a, codes[i]) if i in codes else a for i, a in enumerate(avals)])

    return dataclasses.replace(
        traced,
        in_avals=tuple(_of_shape(a, forms[i].stored_shape) if i in forms else a for i, a in enumerate(traced.in_avals)),
        out_avals=tuple(
            _of_shape(a, results[i].stored_shape) if i in results else a for i, a in enumerate(traced.out_avals)
        ),
        fingerprint=digest,
        code_fingerprint=traced.fingerprint,
        retrace=retrace,
        padded=padded,
        pads_summands=num_stages > 1,  # they may be made on different stages, and are added behind the micro-batches
    )


def _of_shape(aval: jax.ShapeDtypeStruct, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, aval.dtype, weak_type=aval.weak_type)


def pad_state(graph: OpGraph, forms: Mapping[int, PaddedForm], *, pads_summands: bool = False) -> OpGraph:
    """The graph with inputs, by position, in their stored shapes, and the outputs that they are tied to.

    `pads_summands`: of a gradient that is a sum, each summand is padded. Operations have no rules yet.
    """
    inputs = {graph.block.inputs[position]: form for position, form in forms.items()}
    writer = _Writer(graph, inputs, pads_summands)
    return dataclasses.replace(writer.run(), padded=frozenset(forms))


class _Writer:
    """`form[v]`: the form in which a value of the code is computed or needed; `stored[v]`: that value, once it is."""

    def __init__(self, graph: OpGraph, inputs: Mapping[int, PaddedForm], pads_summands: bool) -> None:
        self.graph, self.inputs, self.pads_summands = graph, inputs, pads_summands
        self.fresh = Fresh(graph)
        self.maker = makers(graph.block.ops)
        self.updating = Role.UPDATE
        self.form = self._forms()
        self.stored: dict[int, int] = {}
        self.cut: dict[tuple[int, Role], int] = {}
        self.rows: list[Op] = []

    def _forms(self) -> dict[int, PaddedForm]:
        """Spread from the padded inputs, and the outputs tied to them, over what the update computes by elements."""
        form = dict(self.inputs)
        block = self.graph.block
        for source, target in self.graph.tied:
            result = block.outputs[target]
            if block.inputs[source] in self.inputs and isinstance(result, int):
                form.setdefault(result, self.inputs[block.inputs[source]])
        before = -1
        while len(form) > before:
            before = len(form)
            for op in (*block.ops, *reversed(block.ops)):
                if self._is_elementwise(op):
                    own = [a for a in (*op.outputs, *op.inputs) if isinstance(a, int) and self._has_shape_of(a, op)]
                    found = next((form[v] for v in own if v in form), None)
                    if found is not None:
                        for v in own:
                            form.setdefault(v, found)
                elif self._adds_gradients(op) and op.outputs[0] in form:
                    for summand in read_by(op):
                        form.setdefault(summand, form[op.outputs[0]])
        return form

    def _has_shape_of(self, value: int, op: Op) -> bool:
        return self.graph.values[value].shape == self.graph.values[op.outputs[0]].shape

    def _is_elementwise(self, op: Op) -> bool:
        """Whether an operation of the update computes by elements, with numbers for other operands, or another one
        rounds a leaf of the state, which is gathered in fewer bytes behind that.
        """
        if op.kind is not OpKind.EQUATION:
            return False
        if op.role is not self.updating:
            return self._rounds_input(op)
        shape = self.graph.values[op.outputs[0]].shape if op.outputs else ()
        shapes = [self.graph.values[a].shape if isinstance(a, int) else a.shape for a in op.inputs]
        if op.primitive == "broadcast_in_dim":
            return bool(shape) and shapes == [()]
        by_elements = op.primitive in _ELEMENTWISE and len(op.outputs) == 1
        return by_elements and bool(shape) and all(s in ((), shape) for s in shapes) and shape in shapes

    def _rounds_input(self, op: Op) -> bool:
        source = op.inputs[0] if op.primitive == "convert_element_type" else None
        if not isinstance(source, int) or source not in self.inputs:
            return False
        return self.graph.values[op.outputs[0]].itemsize < self.graph.values[source].itemsize

    def _adds_gradients(self, op: Op) -> bool:
        """Whether an operation adds gradients of one array (tied embeddings) each of which is to be padded."""
        return self.pads_summands and op.primitive == "add_any" and op.role is Role.BACKWARD

    def run(self) -> OpGraph:
        block = self.graph.block
        inputs = tuple(self._input(v) if v in self.inputs else v for v in block.inputs)
        for op in block.ops:
            result = op.outputs[0] if op.outputs else None
            if self._is_stored(op) and result in self.form:
                self._computed_stored(op, self.form[result])
            elif self._is_sum_of_stored(op):
                self._sum(op)
            else:
                self.rows.append(self._reading_code(op))
                for v in op.outputs:
                    if v in self.form:  # padded, and with it summed to parts, where it is made: not all at the end
                        self._stored(v)
        tied = {
            target: self.inputs[v] for source, target in self.graph.tied if (v := block.inputs[source]) in self.inputs
        }
        outputs = tuple(self._output(atom, tied.get(position)) for position, atom in enumerate(block.outputs))
        rewritten = remove_dead(Block(inputs=inputs, outputs=outputs, ops=tuple(self.rows)))
        return dataclasses.replace(self.graph, values=tuple(self.fresh.values), block=rewritten)

    def _input(self, v: int) -> int:
        value, form = self.graph.values[v], self.inputs[v]
        self.fresh.values.append(dataclasses.replace(value, id=len(self.fresh.values), shape=form.stored_shape))
        self.stored[v] = len(self.fresh.values) - 1
        return self.stored[v]

    # Values of the code

    def _code(self, v: int, role: Role, module: str) -> int:
        """A value as the code has it, for operations of a role."""
        if v not in self.stored or (v not in self.inputs and not self._is_computed_stored(v)):
            return v
        if (v, role) not in self.cut:
            form = self.form[v]
            self.cut[v, role] = self._write(lambda x: unstore(x, form), [self.stored[v]], role, module)
        return self.cut[v, role]

    def _is_computed_stored(self, v: int) -> bool:
        return v in self.maker and self._is_stored(self.maker[v]) and v in self.form

    def _is_stored(self, op: Op) -> bool:
        return self._is_elementwise(op) or self._adds_gradients(op)

    def _reading_code(self, op: Op) -> Op:
        return reading(op, {v: self._code(v, op.role, op.module) for v in read_by(op)})

    def _output(self, atom: Atom, form: PaddedForm | None) -> Atom:
        if form is None:
            return self._code(atom, self.updating, "") if isinstance(atom, int) else atom
        if not isinstance(atom, int):
            return self._constant(atom, form)
        if self.form[atom] == form:
            return self._stored(atom)
        code = self._code(atom, self.updating, "")
        return self._write(lambda x: store(x, form), [code], self.updating, "")

    def _constant(self, atom: Constant, form: PaddedForm) -> Atom:
        number = atom.literal.val
        return self._write(lambda: store(jax.numpy.broadcast_to(number, form.shape), form), [], self.updating, "")

    # Stored values

    def _stored(self, v: int) -> int:
        """A value in its stored shape: padded where it is made, if it is not computed so."""
        if v not in self.stored:
            form, maker = self.form[v], self.maker.get(v)
            role = maker.role if maker is not None else self.updating
            module = maker.module if maker is not None else ""
            self.stored[v] = self._write(lambda x: store(x, form), [v], role, module)
        return self.stored[v]

    def _operand(self, atom: Atom, form: PaddedForm) -> Atom:
        if not isinstance(atom, int) or self.graph.values[atom].shape != form.shape:
            return self._code(atom, self.updating, "") if isinstance(atom, int) else atom
        if self.form[atom] == form:
            return self._stored(atom)
        code = self._code(atom, self.updating, "")
        return self._write(lambda x: store(x, form), [code], self.updating, "")

    def _computed_stored(self, op: Op, form: PaddedForm) -> None:
        operands = [self._operand(atom, form) for atom in op.inputs]
        (result,), eqn = op.outputs, op.eqn
        invars = [
            jax_compat.variable_like(v, form.stored_shape)
            if not isinstance(v, jax_compat.Literal) and tuple(v.aval.shape) == form.shape
            else v
            for v in eqn.invars
        ]
        outvar = jax_compat.variable_like(eqn.outvars[0], form.stored_shape)
        eqn = eqn.replace(invars=invars, outvars=[outvar])
        if op.primitive == "broadcast_in_dim":
            eqn = eqn.replace(params={**eqn.params, "shape": form.stored_shape})
        value = self.graph.values[result]
        self.fresh.values.append(
            dataclasses.replace(value, id=len(self.fresh.values), shape=form.stored_shape, name="")
        )
        self.stored[result] = len(self.fresh.values) - 1
        self.rows.append(
            dataclasses.replace(
                op, eqn=eqn, inputs=tuple(operands), outputs=(self.stored[result],), key=equation_key(eqn), rule=None
            )
        )

    # Sums over all elements

    def _is_sum_of_stored(self, op: Op) -> bool:
        """Whether an operation sums all elements of what is computed stored: a norm of gradients or updates."""
        if op.kind is not OpKind.EQUATION or op.role is not self.updating or op.primitive != "reduce_sum":
            return False
        (source,) = op.inputs
        if not isinstance(source, int) or source not in self.form:
            return False
        return len(op.eqn.params["axes"]) == len(self.graph.values[source].shape)

    def _sum(self, op: Op) -> None:
        (source,) = op.inputs
        assert isinstance(source, int), "literals have no form"
        form, target = self.form[source], op.outputs[0]
        made = self._write(lambda x: _sum_without_padding(x, form), [self._stored(source)], op.role, op.module)
        last = self.rows.pop()
        assert last.outputs == (made,), "the sum is the last operation"
        self.rows.append(dataclasses.replace(last, outputs=(target,)))

    # Operations

    def _write(self, function: Callable[..., Any], inputs: Sequence[int], role: Role, module: str) -> int:
        """Appends the operations of a function of values; returns its result."""
        avals = [self._aval(v) for v in inputs]
        jaxpr = jax_compat.open_jaxpr(jax.make_jaxpr(function)(*avals))
        env: dict[Any, Atom] = dict(zip(jaxpr.invars, inputs, strict=True))
        for eqn in jaxpr.eqns:
            outputs = []
            for var in eqn.outvars:
                aval = var.aval
                value = self.fresh.value(tuple(aval.shape), str(aval.dtype), jax_compat.itemsize(aval))
                outputs.append(value)
                env[var] = value
            operands = tuple(Constant(v) if isinstance(v, jax_compat.Literal) else env[v] for v in eqn.invars)
            self.rows.append(
                Op(
                    id=self.fresh.op_id(), kind=OpKind.EQUATION, primitive=eqn.primitive.name, eqn=eqn, inputs=operands,
                    outputs=tuple(outputs), rule=None, role=role, module=module, count=1.0, key=equation_key(eqn),
                )
            )  # fmt: skip
        result = env[jaxpr.outvars[0]]
        assert isinstance(result, int), "what is written has operations"
        return result

    def _aval(self, v: int) -> jax.ShapeDtypeStruct:
        value = self.fresh.values[v]
        return jax_compat.struct(value.shape, value.dtype, value.weak_type)


def _sum_without_padding(array: Any, form: PaddedForm) -> Any:
    for d, (n, s) in enumerate(zip(form.flat_shape, form.stored_shape, strict=True)):
        if n != s:
            position = jax.lax.broadcasted_iota(np.int32, form.stored_shape, d)
            starts = range(0, s, form.rows_of_part) if d == 0 else (0,)
            rows = form.rows if d == 0 and form.rows else (n,)
            inside = [(position >= at) & (position < at + m) for at, m in zip(starts, rows, strict=True)]
            is_own = functools.reduce(jax.lax.bitwise_or, inside)
            array = jax.lax.select(is_own, array, jax.lax.full_like(array, 0))
    return jax.lax.reduce_sum(array, tuple(range(array.ndim)))
