"""Precision policies: the types of parameters, computation, outputs and reductions, as those of `jmp` with the last.

(1) Parameters and optimizer state are kept in `param_dtype`: float32 masters under every named policy.
(2) The loss function computes in `compute_dtype`. Parameters are cast inside of what is differentiated, so that their
    gradients come back in the type of (1); and autopar moves the cast before a gather, which then sends half the bytes.
(3) The loss and other floating results leave in `output_dtype`.
(4) Gradients are summed over examples, devices and micro-batches in `reduce_dtype` where that is wider than (2), and
    returned in it where it is wider than (1).
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from autopar.common import jax_compat, loops
from autopar.common.jax_compat import run_wide_products_on_cpus
from autopar.common.paths import name_of_key
from autopar.errors import InvalidArgumentError, NonFiniteError, UnsupportedError, expect_one_of
from autopar.execute import nan_check, nnx_objects
from autopar.execute.call_arguments import Signature
from autopar.ir.primitives import MATRIX_PRODUCTS, RAGGED_PRODUCT, linear_operands
from autopar.train.mixed_precision.scaling import (
    FACTOR,
    FIRST,
    PERIOD,
    LossScale,
    check_has_products,
    delayed_scaling,
    float8_dot_general,
    is_scaling,
)

# `value_and_grad` under a policy: the casts are inside of what is differentiated.

# Gradients summed in a wider type than that of the products which they are sums of.
#
# A parameter's gradient is a sum over examples: of a matrix product, a lookup or a broadcast. Under a policy its terms
# are in the type of computation, and so is the sum, which is only converted afterwards. Where devices hold different
# examples, partial sums then go between them in the narrow type. Here the equations of the gradient are rewritten: each
# such sum is made in the type of reductions (`preferred_element_type`), the conversion after it disappears, and what
# only moves or adds sums in between works on the wide ones. That is part of the program, so that plain `jax.jit` sums
# alike, on one device and on many.
#
# The sums that are made wide are the last ones before a gradient leaves. Those of activations and of their cotangents
# stay as they are: partial sums of tensor parallelism are half as long for it. Products whose `precision` names the
# type of accumulation, kernels and `shard_map` keep the types that they say. So do convolutions: cuDNN has none whose
# results are wider than its operands, and XLA would convert these to float32.

# Sums whose type is a parameter; `reduce_sum` and `scatter-add` have the type of what they sum.
_TYPED = frozenset({"dot_general", RAGGED_PRODUCT})
# Equations whose results are their operands, one by one.
_PASSING = frozenset({"name", "sharding_constraint", "reshard", "mesh_cast", "optimization_barrier", "device_put"})
_CALLS = frozenset({"jit", "pjit", "closed_call", "core_call"})


def with_wide_sums(
    function: Callable[..., Any], dtype: np.dtype, is_gradient: Callable[[Any], Any]
) -> Callable[..., Any]:
    """The function under a trace, with the sums that lead to gradients among its results made in `dtype`.

    `is_gradient` says, from the tree of results, which of them are: a tree of bools.
    """

    def called(*args: Any, **kwargs: Any) -> Any:
        leaves, tree = jax.tree.flatten((args, kwargs))
        places = [i for i, leaf in enumerate(leaves) if jax_compat.is_tracer(leaf)]
        if not places:  # nothing is compiled, so that no program sums over devices
            return function(*args, **kwargs)
        form: list[Any] = []  # the tree of the results, and what of them is no array

        def of_traced(*traced: Any) -> list[Any]:
            given = list(leaves)
            for i, array in zip(places, traced, strict=True):
                given[i] = array
            args, kwargs = jax.tree.unflatten(tree, given)
            results = function(*args, **kwargs)
            flags = jax.tree.leaves(is_gradient(results))
            flat, result_tree = jax.tree.flatten(results)
            is_array = [isinstance(leaf, jax.Array) for leaf in flat]
            others = [None if array else leaf for array, leaf in zip(is_array, flat, strict=True)]
            form[:] = [result_tree, others, is_array, flags]
            return [leaf for leaf in flat if isinstance(leaf, jax.Array)]

        run_wide_products_on_cpus()
        traced = [leaves[i] for i in places]
        jaxpr = jax_compat.plain_jaxpr(of_traced, *traced)
        result_tree, others, is_array, flags = form
        chosen = [flag for flag, array in zip(flags, is_array, strict=True) if array]
        widened = _Widening(np.dtype(dtype)).run(jaxpr, traced, [False] * len(traced), chosen)
        # In the types that the results have without this, literals as arrays.
        outs = (jnp.asarray(_of_type(out, aval.dtype)) for out, aval in zip(widened, jaxpr.out_avals, strict=True))
        flat = [next(outs) if array else other for array, other in zip(is_array, others, strict=True)]
        return jax.tree.unflatten(result_tree, flat)

    return called


class _Widening:
    def __init__(self, dtype: np.dtype) -> None:
        self.dtype = dtype

    def wide_type(self, aval: Any) -> np.dtype:
        is_narrow = _is_floating(aval) and aval.dtype.itemsize < self.dtype.itemsize
        return self.dtype if is_narrow else np.dtype(aval.dtype)

    # Which values are sums, or linear functions of sums

    def sums_in(self, jaxpr: Any, given: Sequence[bool]) -> set[Any]:
        """The variables of an open jaxpr that are; `given` says which of its arguments are."""
        found = {v for v, is_sum in zip(jaxpr.invars, given, strict=True) if is_sum}
        for eqn in jaxpr.eqns:
            flags = self.results_that_sum(eqn, _flags(eqn.invars, found))
            found.update(v for v, is_sum in zip(eqn.outvars, flags, strict=True) if is_sum and _is_floating(v.aval))
        return found

    def results_that_sum(self, eqn: Any, given: Sequence[bool]) -> Sequence[bool]:
        if eqn.primitive.name in _PASSING:
            return given
        if not _is_read(eqn):
            return [_is_sum(eqn) or any(given[i] for i in _linear_in(eqn))] * len(eqn.outvars)
        if eqn.primitive.name == "cond":
            of_each = [self._results(branch, given[1:]) for branch in eqn.params["branches"]]
            return [any(flags) for flags in zip(*of_each, strict=True)]
        given, carried = list(given), _carried(eqn)
        while True:  # what one iteration of a scan hands on the next one is given
            results = self._results(_called(eqn), given)
            handed_on = [a or b for a, b in zip(given[carried], results, strict=False)]
            if handed_on == given[carried]:
                return results
            given[carried] = handed_on

    def _results(self, jaxpr: Any, given: Sequence[bool]) -> list[bool]:
        inner = jax_compat.open_jaxpr(jaxpr)
        return _flags(inner.outvars, self.sums_in(inner, given))

    # Which of them are wanted in the wide type

    def wanted_in(self, jaxpr: Any, sums: set[Any], results: Sequence[bool]) -> set[Any]:
        """The variables of an open jaxpr that are, where some of its results are."""
        wanted = {v for v, is_wanted in zip(jaxpr.outvars, results, strict=True) if is_wanted and _is_in(v, sums)}
        for eqn in reversed(jaxpr.eqns):
            flags = _flags(eqn.outvars, wanted)
            if any(flags):
                operands, _ = self.wanted_by(eqn, _flags(eqn.invars, sums), flags)
                wanted.update(v for v, w in zip(eqn.invars, operands, strict=True) if w and _is_in(v, sums))
        return wanted

    def wanted_by(
        self, eqn: Any, sums: Sequence[bool], results: Sequence[bool]
    ) -> tuple[Sequence[bool], Sequence[bool]]:
        """(operands, results) that are wide, where these results are. What a scan carries is both or neither."""
        if eqn.primitive.name in _PASSING:
            return results, results
        if not _is_read(eqn):
            linear = frozenset() if _is_sum(eqn) else _linear_in(eqn)
            return [i in linear and is_sum for i, is_sum in enumerate(sums)], results
        if eqn.primitive.name == "cond":
            of_each = [self._arguments(branch, sums[1:], results) for branch in eqn.params["branches"]]
            return [False, *(any(flags) for flags in zip(*of_each, strict=True))], results
        given, results, carried = list(sums), list(results), _carried(eqn)
        num_carried = len(given[carried])
        handed_on = self.results_that_sum(eqn, sums)
        given[carried] = [a or b for a, b in zip(given[carried], handed_on, strict=False)]
        while True:
            arguments = self._arguments(_called(eqn), given, results)
            wide = [a or b for a, b in zip(arguments[carried], results, strict=False)]
            arguments[carried] = wide
            if wide == results[:num_carried]:
                return arguments, results
            results[:num_carried] = wide

    def _arguments(self, jaxpr: Any, given: Sequence[bool], results: Sequence[bool]) -> list[bool]:
        inner = jax_compat.open_jaxpr(jaxpr)
        return _flags(inner.invars, self.wanted_in(inner, self.sums_in(inner, given), results))

    # The program

    def run(
        self,
        jaxpr: Any,
        args: Sequence[Any],
        is_wide: Sequence[bool],
        results: Sequence[bool],
        caller: jax_compat.Caller = jax_compat.STEP,
    ) -> list[Any]:
        """Evaluates a jaxpr on arguments of which some are wide; some of its results come back wide."""
        inner = jax_compat.open_jaxpr(jaxpr)
        sums = self.sums_in(inner, is_wide)
        wanted, values = self.wanted_in(inner, sums, results), _Values(self.wide_type)
        values.write(inner.constvars, jax_compat.jaxpr_consts(jaxpr), [False] * len(inner.constvars))
        values.write(inner.invars, args, is_wide)
        for eqn in inner.eqns:
            flags: Sequence[bool] = _flags(eqn.outvars, wanted)
            with jax_compat.standing_at(caller.located(eqn)), eqn.ctx.manager:
                if any(flags):
                    operands, flags = self.wanted_by(eqn, _flags(eqn.invars, sums), flags)
                    outs = self.evaluate(eqn, values, operands, flags, caller)
                else:
                    outs = jax_compat.rebind(eqn, [values.read(a) for a in eqn.invars])
            values.write(eqn.outvars, outs, flags)
        return [values.read(v, wide) for v, wide in zip(inner.outvars, results, strict=True)]

    def evaluate(
        self,
        eqn: Any,
        values: _Values,
        operands: Sequence[bool],
        results: Sequence[bool],
        caller: jax_compat.Caller,
    ) -> Sequence[Any]:
        """The results of an equation, some of them wide."""
        name = eqn.primitive.name
        if _is_read(eqn) or name in _PASSING:
            args = [values.read(a, wide) for a, wide in zip(eqn.invars, operands, strict=True)]
            if name in _PASSING:
                return jax_compat.rebind(eqn, args)
            return self.call(eqn, args, operands, results, caller)
        wide_type = self.wide_type(eqn.outvars[0].aval)
        if name == "convert_element_type":
            return [jax.lax.convert_element_type(values.read(eqn.invars[0], operands[0]), wide_type)]
        if name in _TYPED:
            return jax_compat.rebind(eqn, [values.read(a) for a in eqn.invars], preferred_element_type=wide_type)
        args = [values.read(a, _is_floating(a.aval)) for a in eqn.invars]
        if name == "scatter-add":  # holds its addition as a jaxpr of the narrow type
            how = ("dimension_numbers", "indices_are_sorted", "unique_indices", "mode")
            return [jax.lax.scatter_add(*args, **{key: eqn.params[key] for key in how})]
        return jax_compat.rebind(eqn, args)

    def call(
        self,
        eqn: Any,
        args: Sequence[Any],
        operands: Sequence[bool],
        results: Sequence[bool],
        caller: jax_compat.Caller,
    ) -> Sequence[Any]:
        name, params = eqn.primitive.name, eqn.params
        if name == "cond":
            runs = [
                lambda arrays, branch=branch: self.run(branch, arrays, operands[1:], results)
                for branch in params["branches"]
            ]
            return loops.cond(runs, args, list)
        if name == "scan":
            return self.scan(eqn, args, operands, results)
        if name in jax_compat.REMAT_CALLS:
            made = jax.make_jaxpr(lambda *args: self.run(params["jaxpr"], args, operands, results))(*args)
            assert not jax_compat.jaxpr_consts(made), "all that a call reads are its operands"
            return jax_compat.rebind(eqn, args, jaxpr=jax_compat.open_jaxpr(made))
        args, called = _placed(args, params.get("in_shardings", ())), _called(eqn)
        outs = self.run(called, args, operands, results, caller.of(eqn, called))
        return _placed(outs, params.get("out_shardings", ()))

    def scan(self, eqn: Any, args: Sequence[Any], operands: Sequence[bool], results: Sequence[bool]) -> Sequence[Any]:
        params, how = eqn.params, {key: eqn.params[key] for key in ("length", "reverse", "unroll")}
        types = [self.wide_type(a.aval) if w else a.aval.dtype for a, w in zip(eqn.outvars, results, strict=True)]
        return loops.scan(
            lambda arrays: self.run(params["jaxpr"], arrays, operands, results),
            args, jax_compat.scan_counts(params), lambda arrays: _gradients_of_types(arrays, types), **how,
        )  # fmt: skip


class _Values:
    """The values of a jaxpr, each in its own type or in the wide one, and in the other once it is read so."""

    def __init__(self, wide_type: Callable[[Any], np.dtype]) -> None:
        self.wide_type = wide_type
        self.plain: dict[Any, Any] = {}
        self.wide: dict[Any, Any] = {}

    def write(self, variables: Sequence[Any], arrays: Sequence[Any], is_wide: Sequence[bool]) -> None:
        for var, array, wide in zip(variables, arrays, is_wide, strict=True):
            (self.wide if wide else self.plain)[var] = array

    def read(self, atom: Any, wide: bool = False) -> Any:
        if isinstance(atom, jax_compat.Literal):
            return _of_type(atom.val, self.wide_type(atom.aval)) if wide else atom.val
        there, other = (self.wide, self.plain) if wide else (self.plain, self.wide)
        if atom not in there:
            there[atom] = _of_type(other[atom], self.wide_type(atom.aval) if wide else atom.aval.dtype)
        return there[atom]


def _is_floating(aval: Any) -> bool:
    return hasattr(aval, "dtype") and bool(jnp.issubdtype(aval.dtype, jnp.floating))


def _is_in(atom: Any, variables: set[Any]) -> bool:
    return not isinstance(atom, jax_compat.Literal) and atom in variables


def _flags(atoms: Sequence[Any], variables: set[Any]) -> list[bool]:
    return [_is_in(a, variables) for a in atoms]


def _is_sum(eqn: Any) -> bool:
    """Whether an equation sums, in a type that it does not name itself."""
    name, params = eqn.primitive.name, eqn.params
    if name == "reduce_sum":
        return any(eqn.invars[0].aval.shape[d] > 1 for d in params["axes"])
    return name == "scatter-add" or (name in _TYPED and not _names_its_type(params.get("precision")))


def _names_its_type(precision: Any) -> bool:
    return isinstance(precision, (jax.lax.DotAlgorithm, jax.lax.DotAlgorithmPreset))


def _linear_in(eqn: Any) -> frozenset[int]:
    """The operands in which an equation that only moves or scales them, or adds them up, is linear.

    Roundings are left out, but for those to 8 bits: what they make is read by products in 8 bits.
    """
    name = eqn.primitive.name
    if name in MATRIX_PRODUCTS or jax_compat.jaxprs_in(eqn) or not all(_is_floating(v.aval) for v in eqn.outvars):
        return frozenset()
    if name == "convert_element_type":
        return frozenset({0} if eqn.outvars[0].aval.dtype.itemsize > 1 else ())
    return frozenset().union(*linear_operands(name, eqn))


def _is_read(eqn: Any) -> bool:
    """Whether an equation is one that calls jaxprs in which sums are looked for."""
    name = eqn.primitive.name
    return name in _CALLS or name in jax_compat.REMAT_CALLS or name in ("scan", "cond")


def _called(eqn: Any) -> Any:
    return eqn.params["call_jaxpr" if "call_jaxpr" in eqn.params else "jaxpr"]


def _carried(eqn: Any) -> slice:
    """Where the carried values of a scan are among its operands; nowhere for a call."""
    if eqn.primitive.name != "scan":
        return slice(0, 0)
    consts, carry = jax_compat.scan_counts(eqn.params)
    return slice(consts, consts + carry)


def _of_type(array: Any, dtype: Any) -> Any:
    return array if getattr(array, "dtype", None) == dtype else jax.lax.convert_element_type(array, dtype)


def _gradients_of_types(arrays: Sequence[Any], types: Sequence[Any]) -> list[Any]:
    return [_of_type(array, dtype) for array, dtype in zip(arrays, types, strict=False)]


def _placed(arrays: Sequence[Any], shardings: Sequence[Any]) -> list[Any]:
    """Arrays with the shardings that a call names for them, where it does."""
    if not any(isinstance(s, jax.sharding.Sharding) for s in shardings):
        return list(arrays)
    return [
        jax.lax.with_sharding_constraint(array, s) if isinstance(s, jax.sharding.Sharding) else array
        for array, s in zip(arrays, shardings, strict=True)
    ]


logger = logging.getLogger("autopar")


class Types(Protocol):
    """What a policy says about gradients."""

    @property
    def param_dtype(self) -> np.dtype: ...

    @property
    def compute_dtype(self) -> np.dtype: ...

    @property
    def reduce_dtype(self) -> np.dtype: ...

    @property
    def float8(self) -> bool: ...

    @property
    def needs_loss_scale(self) -> bool: ...

    def cast_to_compute(self, tree: Any, keep: Sequence[str]) -> Any: ...

    def cast_to_output(self, tree: Any) -> Any: ...


def value_and_grad(
    policy: Types, function: Callable[..., Any], argnums: int | Sequence[int], has_aux: bool, keep: Sequence[str]
) -> Callable[..., Any]:
    """As `Policy.value_and_grad`."""
    numbers = (argnums,) if isinstance(argnums, int) else tuple(argnums)
    keep = (keep,) if isinstance(keep, str) else tuple(keep)

    def names_of(num_args: int) -> Sequence[str]:
        return Signature(function, getattr(function, "__name__", "function")).names_of(num_args)

    def computed(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """(loss, other results) in the output type."""
        # Arguments by position are in places of the names that they have in the signature, as those of jax.jit.
        args = tuple(
            arg if name in keep else policy.cast_to_compute(arg, keep)
            for name, arg in zip(names_of(len(args)), args, strict=True)
        )
        results = function(*args, **policy.cast_to_compute(kwargs, keep))
        loss, aux = results if has_aux else (results, None)
        return policy.cast_to_output((jnp.asarray(loss), aux))

    @functools.wraps(function)
    def differentiated(*args: Any, loss_scale: LossScale | None = None, **kwargs: Any) -> Any:
        if nnx_objects.holds_objects((args, kwargs)):
            raise _holds_objects(function)
        if loss_scale is not None and not (hasattr(loss_scale, "scale") and hasattr(loss_scale, "unscale")):
            raise InvalidArgumentError(
                where="value_and_grad(loss_fn)(..., loss_scale=...)", expected="a loss scale of the state, or None",
                got=f"{loss_scale!r}"[:60], hint="keep policy.init_loss_scale(1024.0) in the state and pass it",
            )  # fmt: skip
        _check_names(keep, names_of(len(args)), args, kwargs)
        if policy.needs_loss_scale and loss_scale is None:
            _warn_of_no_scale()
        if policy.float8:
            check_has_products(computed, args, kwargs)

        def scaled(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
            loss, aux = computed(*args, **kwargs)
            return loss if loss_scale is None else loss_scale.scale(loss), (loss, aux)

        places = {n % len(args) for n in numbers}
        wide = [_widened(policy, arg) if i in places else arg for i, arg in enumerate(args)]
        differentiate = jax.value_and_grad(scaled, argnums, has_aux=True)
        if policy.reduce_dtype.itemsize > policy.compute_dtype.itemsize:
            differentiate = with_wide_sums(differentiate, policy.reduce_dtype, _which_are_gradients)
        (_, (loss, aux)), gradients = differentiate(*wide, **kwargs)
        if loss_scale is not None:
            gradients = loss_scale.unscale(gradients)
        return ((loss, aux) if has_aux else loss), gradients

    return differentiated


@functools.cache
def _warn_of_no_scale() -> None:
    logger.warning(
        "gradients in float16 without a loss scale: those below 6e-8 become 0; keep policy.init_loss_scale() in the "
        "state and pass it as value_and_grad(loss_fn)(..., loss_scale=...), or compute in bfloat16"
    )


def _check_names(keep: Sequence[str], names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raises: InvalidArgumentError for a name that no argument has, and no entry of one."""
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path((args, kwargs))[0]]
    there = {*names, *kwargs, *(name_of_key(key) for path in paths for key in path)}
    for name in keep:
        expected = f"names of arguments ({', '.join([*names, *kwargs])}), or of entries in them"
        hint = "write the name as in the signature of the loss function, or as the key in the batch"
        expect_one_of("value_and_grad(keep=...)", name, there, hint, expected)


def _widened(policy: Types, params: Any) -> Any:
    """Parameters in the type of reductions where that is wider, so that gradients come back in it."""
    if policy.reduce_dtype.itemsize <= policy.param_dtype.itemsize:
        return params
    return jax.tree_util.tree_map_with_path(
        lambda path, x: (
            x.astype(policy.reduce_dtype) if jnp.issubdtype(x.dtype, jnp.floating) and not is_scaling(path) else x
        ),
        params,
    )


def _which_are_gradients(results: Any) -> Any:
    """A tree of bools for ((loss, others), gradients); what float8 scales by is no gradient."""
    values, gradients = results
    of_gradients = jax.tree_util.tree_map_with_path(
        lambda path, x: bool(jnp.issubdtype(x.dtype, jnp.floating)) and not is_scaling(path), gradients
    )
    return jax.tree.map(lambda _: False, values), of_gradients


def _holds_objects(function: Any) -> UnsupportedError:
    return UnsupportedError(
        where=f"value_and_grad({getattr(function, '__name__', function)})",
        expected="parameters as arrays in a tree",
        got="an NNX object, whose modules have types of their own",
        hint="give the modules dtype=policy.compute_dtype and param_dtype=policy.param_dtype and use "
        "nnx.value_and_grad, or nnx.split the model and pass its state",
    )


# Stops a run at a step that is not finite, with the number of the step and the first module that is not.


def stop_if_not_finite(finite: Any, number: int, step: Callable[..., Any], *args: Any) -> None:
    """Raises: NonFiniteError where `finite` is not true, with the number of the step.

    `finite` is what `Policy.apply_if_finite` returned, so that the state among `args` is as it was before the step. The
    step runs again on it, under `jax_debug_nans`: in a program of one process the error names the operation that made
    the first NaN, or the first infinity, by its module and line. Reading `finite` waits for the step.
    """
    if bool(finite):
        return
    for look in (jax.debug_nans, jax.debug_infs):
        try:
            with look(True), nan_check.inside_too():
                step(*args)
        except NonFiniteError as error:
            raise NonFiniteError(
                where=f"step {number}, {error.where}", expected=error.expected, got=error.got, hint=error.hint
            ) from None
    raise NonFiniteError(
        where=f"step {number}", expected="finite gradients",
        got="some that are not, in a step that is finite when it runs again",
        hint="with a loss scale it was too large, and is smaller now: go on; in several processes return the norm of "
        "the gradients among the metrics, so that what is not finite shows in a result",
    )  # fmt: skip


# Whether gradients are finite, and the selection of a state by that.


def all_finite(tree: Any) -> jax.Array:
    """Whether no floating leaf has a NaN or an infinity; a bool without dimensions."""
    finite = [jnp.isfinite(x).all() for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.inexact)]
    return jnp.stack(finite).all() if finite else jnp.bool_(True)


def select(finite: jax.Array, new: T, old: T) -> T:
    """The new state or the old one, with its loss scales adjusted. Raises: InvalidArgumentError."""
    trees: list[Any] = [jax.tree.structure(new), jax.tree.structure(old)]
    if trees[0] != trees[1]:
        raise InvalidArgumentError(
            where="apply_if_finite(gradients, new, old)", expected=f"two states of one structure, {_shown(old)}",
            got=_shown(new), hint="pass the whole state before and after the update",
        )  # fmt: skip

    def leaf(before: Any, after: Any) -> Any:
        if isinstance(before, LossScale):
            return before.adjust(finite)
        return before if after is before else jnp.where(finite, after, before)

    return jax.tree.map(leaf, old, new, is_leaf=lambda x: isinstance(x, LossScale))


def _shown(tree: Any) -> str:
    return f"{jax.tree.structure(tree)}"[:200]


T = TypeVar("T")

_DTYPES = {
    **dict.fromkeys(("f32", "fp32", "full", "float32"), "float32"),
    **dict.fromkeys(("bf16", "bfloat16"), "bfloat16"),
    **dict.fromkeys(("f16", "fp16", "float16"), "float16"),
    **dict.fromkeys(("f64", "fp64", "float64"), "float64"),
}
_FIELDS = {
    **dict.fromkeys(("p", "params"), "param_dtype"),
    **dict.fromkeys(("c", "compute"), "compute_dtype"),
    **dict.fromkeys(("o", "output"), "output_dtype"),
    **dict.fromkeys(("r", "reductions"), "reduce_dtype"),
}
_WHERE = "autopar.precision"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Types for a training step. Made by `autopar.precision`.

    Attributes:
        float8: Whether matrix products take float8 operands, through `dot_general_cls` or `dot_general`.
    """

    param_dtype: np.dtype
    compute_dtype: np.dtype
    output_dtype: np.dtype
    reduce_dtype: np.dtype
    float8: bool = False

    # Casts of the floating leaves of a tree

    def cast_to_param(self, tree: T) -> T:
        return cast(tree, self.param_dtype)

    def cast_to_compute(self, tree: T, keep: Sequence[str] = ()) -> T:
        """Entries and fields of the names in `keep` keep their types."""
        return cast(tree, self.compute_dtype, keep)

    def cast_to_output(self, tree: T) -> T:
        return cast(tree, self.output_dtype)

    # Gradients

    def value_and_grad(
        self,
        function: Callable[..., Any],
        argnums: int | Sequence[int] = 0,
        has_aux: bool = False,
        keep: Sequence[str] = (),
    ) -> Callable[..., Any]:
        """`jax.value_and_grad` of a function that computes in `compute_dtype`: arguments are cast to it, results to
        `output_dtype`. Gradients are summed in `reduce_dtype` where it is wider, and come back in the parameters' type,
        or that of reductions where it is wider. Arguments with a name in `keep`, such as a regression's targets, keep
        their types, and so do entries of arguments.

        What is returned takes one keyword more, `loss_scale`: the gradients are those of the scaled loss, unscaled.

        Raises: InvalidArgumentError under "fp8" where no product of the function has float8 operands, and for a name in
        `keep` that nothing has; UnsupportedError for NNX objects.
        """
        return value_and_grad(self, function, argnums, has_aux, keep)

    @property
    def needs_loss_scale(self) -> bool:
        """Whether small gradients vanish in the type that is computed in, as they do in float16."""
        return self.compute_dtype == np.float16

    def init_loss_scale(
        self, first: float = FIRST, *, period: int = PERIOD, factor: float = FACTOR, least: float = 1.0
    ) -> LossScale:
        """A dynamic loss scale, a part of the state. As `LossScale.create`. Raises: InvalidArgumentError."""
        return LossScale.create(first, period=period, factor=factor, least=least)

    def apply_if_finite(self, gradients: Any, new: T, old: T) -> tuple[T, jax.Array]:
        """(the new state where all gradients are finite, else the old one; whether they are).

        Loss scales in the state are adjusted either way. Everything stays inside of the step: on each device and each
        stage its part of the state is selected, by one number that all of them have.
        """
        finite = all_finite(gradients)
        return select(finite, new, old), finite

    # Products of float8 operands

    @property
    def dot_general_cls(self) -> Any:
        """The argument `dot_general_cls` of Flax Linen modules (`nn.Dense` and others); None without float8.

        Flax's own operation, with delayed scaling: scales and the largest numbers of the latest steps are variables of
        the collection `_overwrite_with_gradient`, whose "gradient" is their next value.
        """
        return delayed_scaling() if self.float8 else None

    @property
    def dot_general(self) -> Any:
        """As `jax.lax.dot_general`, for what has no variables: `nnx.Linear(..., dot_general=policy.dot_general)`.

        With float8 each operand is scaled as a whole, by its largest number in this step.
        """
        return float8_dot_general if self.float8 else jax.lax.dot_general

    def __str__(self) -> str:
        types = ("params", self.param_dtype), ("compute", self.compute_dtype), ("output", self.output_dtype)
        return ",".join(f"{name}={dtype}" for name, dtype in (*types, ("reductions", self.reduce_dtype)))


def precision(policy: Any) -> Policy:
    """A precision policy.

    Args:
        policy: "bf16", "fp16" (with a dynamic loss scale) or "fp8" (bfloat16, products with float8 operands), each
            with float32 parameters, outputs and reductions; types by name, as
            "params=float32,compute=bfloat16,output=float32,reductions=float32" (parameters are float32 unless said,
            the others of the parameters' type); or an object with param_dtype, compute_dtype and output_dtype, such as
            a `jmp.Policy`.

    Raises: InvalidArgumentError.
    """
    if isinstance(policy, Policy):
        return policy
    if isinstance(policy, str):
        return _of_text(policy)
    named = {name: getattr(policy, name, None) for name in ("param_dtype", "compute_dtype", "output_dtype")}
    if None in named.values():
        raise _invalid(repr(policy)[:80])
    return _of_types({**named, "reduce_dtype": getattr(policy, "reduce_dtype", None) or named["param_dtype"]})


def _of_text(text: str) -> Policy:
    named = text.strip().lower()
    if named in ("fp8", "float8"):
        return dataclasses.replace(_of_types({"compute_dtype": "bfloat16"}), float8=True)
    if named in _DTYPES:
        return _of_types({"compute_dtype": _DTYPES[named]})
    types = {}
    for part in named.split(","):
        key, _, dtype = (word.strip() for word in part.partition("="))
        if key not in _FIELDS or dtype not in _DTYPES:
            raise _invalid(repr(text))
        types[_FIELDS[key]] = _DTYPES[dtype]
    return _of_types(types)


def _of_types(types: Mapping[str, Any]) -> Policy:
    params = types.get("param_dtype", "float32")
    every = {"param_dtype": params, "compute_dtype": params, "output_dtype": params, "reduce_dtype": params, **types}
    dtypes = {name: np.dtype(dtype) for name, dtype in every.items()}
    for name, dtype in dtypes.items():
        if not jnp.issubdtype(dtype, jnp.floating) or dtype.itemsize < 2:
            raise InvalidArgumentError(
                where=f"{_WHERE}, {name}", expected="a floating type of 16 bits or more", got=str(dtype),
                hint="for products of float8 operands take autopar.precision('fp8')",
            )  # fmt: skip
        if jnp.dtype(dtype) == jnp.float64 and not jax.config.read("jax_enable_x64"):
            raise InvalidArgumentError(
                where=f"{_WHERE}, {name}", expected="a type that JAX has", got="float64",
                hint="set jax.config.update('jax_enable_x64', True) first",
            )  # fmt: skip
    return Policy(**dtypes)


def _invalid(got: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        where=_WHERE,
        expected="'bf16', 'fp16', 'fp8', types as 'params=float32,compute=bfloat16,output=float32', or a policy",
        got=got,
        hint="names of types are float32, bfloat16, float16 and float64; a policy has param_dtype, compute_dtype and "
        "output_dtype, as jmp.Policy",
    )


def cast(tree: T, dtype: Any, keep: Sequence[str] = ()) -> T:
    """The tree with its floating arrays in a type; those under names in `keep`, and scales of float8, keep theirs."""

    def leaf(path: Any, x: Any) -> Any:
        is_array = isinstance(x, (np.ndarray, np.generic, jax.Array))
        if not is_array or not jnp.issubdtype(x.dtype, jnp.floating) or is_scaling(path):
            return x
        if keep and any(name_of_key(key) in keep for key in path):
            return x
        return x if x.dtype == dtype else x.astype(dtype)

    return jax.tree_util.tree_map_with_path(leaf, tree)
