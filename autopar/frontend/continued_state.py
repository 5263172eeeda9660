"""Whether a result continues an argument: it is the argument's old value, changed, and not a value of the same shape.

The gradients of `jax.grad` have the tree and the shapes of the parameters, and do not replace them; nor does a matrix
product of an array. An update leads from the old value to the new one by operations that treat it element by element,
or move its elements. They may also lead to gradients (of a penalty they are a multiple of the parameters), but then one
of them is of a backward pass, and does not count.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from autopar.common import jax_compat
from autopar.ir.traced_step import TracedStep

_ELEMENT_BY_ELEMENT = frozenset({
    "abs", "add", "add_any", "and", "atan2", "cbrt", "ceil", "clamp", "conj", "convert_element_type", "copy", "copy_p",
    "cos", "div", "erf", "erf_inv", "exp", "exp2", "expm1", "floor", "imag", "integer_pow", "log", "log1p", "logistic",
    "max", "min", "mul", "neg", "nextafter", "not", "or", "pow", "real", "reduce_precision", "rem", "round", "rsqrt",
    "select_n", "shift_left", "shift_right_arithmetic", "shift_right_logical", "sign", "sin", "sqrt", "square", "sub",
    "tan", "tanh", "xor",
})  # fmt: skip
_MOVING = frozenset({
    "bitcast_convert_type", "broadcast_in_dim", "complex", "concatenate", "dynamic_slice", "dynamic_update_slice",
    "expand_dims", "gather", "mesh_cast", "pad", "reshape", "reshard", "rev", "scatter", "scatter-add", "scatter-max",
    "scatter-min", "scatter-mul", "scatter-sub", "sharding_constraint", "slice", "split", "squeeze", "stack", "tile",
    "transpose", "unstack",
})  # fmt: skip
# In shard_map regions: parameters that are gathered, or averaged over devices.
_COLLECTIVE = frozenset({
    "all_gather", "all_gather_invariant", "all_to_all", "pbroadcast", "pcast", "ppermute", "psum", "psum_invariant",
    "pvary", "reduce_scatter",
})  # fmt: skip
# Each result is the operand in the same place.
_IN_PLACE = frozenset({"optimization_barrier", "device_put"})


def continued_arguments(traced: TracedStep) -> frozenset[int]:
    """The donated arguments that results continue: of at least one leaf that which would replace it does."""
    results = _Results(traced.jaxpr)
    tied = traced.tied.items()
    return frozenset(traced.argument_of[leaf] for leaf, result in tied if leaf in results.reached_from(result))


class _Results:
    """The results of a jaxpr, by the arguments that they continue."""

    def __init__(self, jaxpr: Any) -> None:
        self._jaxpr = jax_compat.open_jaxpr(jaxpr)
        self._number = {v: i for i, v in enumerate(self._jaxpr.invars)}
        self._made_by = {v: (eqn, i) for eqn in self._jaxpr.eqns for i, v in enumerate(eqn.outvars)}
        self._inner: dict[int, _Results] = {}  # by the identity of a jaxpr inside

    def reached_from(self, result: int) -> frozenset[int]:
        """The numbers of the arguments from which a result is reached."""
        found, seen, left = set[int](), set[Any](), [self._jaxpr.outvars[result]]
        while left:
            value = left.pop()
            if hasattr(value, "val") or value in seen:  # a number written in the jaxpr has no variable
                continue
            seen.add(value)
            if value in self._number:
                found.add(self._number[value])
            elif value in self._made_by:
                left.extend(self._continued(*self._made_by[value]))
        return frozenset(found)

    def _continued(self, eqn: Any, result: int) -> Iterable[Any]:
        """The operands that a result of an equation continues."""
        name = eqn.primitive.name
        if "transpose(" in jax_compat.name_stack(eqn):
            return ()
        if name in _ELEMENT_BY_ELEMENT or name in _MOVING or name in _COLLECTIVE:
            return eqn.invars
        if name in _IN_PLACE:
            return (eqn.invars[result],)
        if (aliases := eqn.params.get("input_output_aliases")) is not None:  # a kernel that replaces its operands
            return [eqn.invars[operand] for operand, of in dict(aliases).items() if of == result]
        return [eqn.invars[i] for i in self._of_inner(eqn, result)]

    def _of_inner(self, eqn: Any, result: int) -> Iterator[int]:
        """The numbers of the operands that a result of a call, a branch or a loop continues."""
        name, params = eqn.primitive.name, eqn.params
        if name == "cond":
            for branch in params["branches"]:
                yield from (1 + i for i in self._within(branch).reached_from(result))
        elif name == "while":
            first, consts = params["cond_nconsts"], params["body_nconsts"]
            yield from (first + i for i in self._of_loop(params["body_jaxpr"], result, consts, len(eqn.outvars)))
        elif name == "scan":
            yield from self._of_loop(params["jaxpr"], result, *jax_compat.scan_counts(params))
        elif name == "shard_map":
            yield from self._within(params["jaxpr"]).reached_from(result)
        elif (called := jax_compat.called_jaxpr(eqn)) is not None:
            yield from self._within(called).reached_from(result)

    def _of_loop(self, body: Any, result: int, consts: int, carried: int) -> set[int]:
        """The numbers of a body's arguments that a result continues in any number of turns."""
        results, found, left = self._within(body), set[int](), {result}
        while left:
            new = results.reached_from(left.pop()) - found
            found |= new
            left |= {i - consts for i in new if consts <= i < consts + carried}
        return found

    def _within(self, jaxpr: Any) -> _Results:
        if id(jaxpr) not in self._inner:
            self._inner[id(jaxpr)] = _Results(jaxpr)
        return self._inner[id(jaxpr)]
