"""Islands: calls of `jax.shard_map` in a step, each one operation of the plan.

An island is written for a mesh of its own. Each of its axes is a factor, the major part of the dimensions that its
specs split by that axis, and the mesh axes that split the factor are the island's axis: all of it, or none. An axis
that no mesh axes stand for is run on every device, part by part (`run_parts`), which computes the same. An island of
one device is no operation: its body is the step's own (`of_one_device`).

Axes that an island leaves to the compiler (`axis_names=`) say nothing of what is computed: it has the others only. An
island inside of an island is a part of its body: every device runs all parts of the inner one.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autopar.common import jax_compat, jax_local, loops
from autopar.errors import UnsupportedError
from autopar.ir.graph import Factor, FactorKind, Op, OpGraph, Rule
from autopar.ir.jax_sharding import dims_of
from autopar.ir.layout import Layout, LogicalMesh
from autopar.ops.kernels.operation import Shapes

NAME = "shard_map"
# Axes of an island that split each dimension of an array, major first.
Spec = tuple[tuple[str, ...], ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Island:
    """What an equation of `shard_map` says: its axes with their sizes, and which of them split what."""

    axes: tuple[tuple[str, int], ...]
    operands: tuple[Spec, ...]
    results: tuple[Spec, ...]

    @property
    def sizes(self) -> dict[str, int]:
        return dict(self.axes)

    @property
    def shards(self) -> int:
        return math.prod(self.sizes.values())


def is_island(eqn: Any) -> bool:
    return eqn is not None and eqn.primitive.name == NAME


def island_of(eqn: Any) -> Island:
    """Raises: UnsupportedError for an island that is not taken, with the line of its call."""
    mesh, params = eqn.params["mesh"], eqn.params
    sizes = {str(name): int(n) for name, n in mesh.shape.items()}
    manual = params.get("newly_manual_axes", params.get("manual_axes", frozenset(sizes)))
    island = Island(
        axes=tuple((name, n) for name, n in sizes.items() if name in manual),
        operands=_specs(params["in_specs"], eqn.invars),
        results=_specs(params["out_specs"], eqn.outvars),
    )
    named = {name for spec in (*island.operands, *island.results) for names in spec for name in names}
    if around := sorted(named - set(island.sizes)):
        # The types of kept values have the axes of both calls; jax.jit cannot lower such specs either.
        raise UnsupportedError(
            where=f"shard_map at {jax_compat.source_line(eqn)}",
            expected="a shard_map inside of another one whose specs name axes of its own",
            got=f"specs over {', '.join(around)}, an axis of the call around it, which jax.grad writes",
            hint="pass check_vma=False to both calls of jax.shard_map; jax.jit does not run the gradient without it",
        )
    return island


def check_islands_inside(eqn: Any) -> None:
    """Raises: UnsupportedError for an island in an island's body that is not taken."""
    for inner in jax_compat.equations_in(jax_compat.open_jaxpr(eqn.params["jaxpr"])):
        if is_island(inner):
            island_of(inner)


def _specs(specs: Sequence[Any], variables: Sequence[Any]) -> tuple[Spec, ...]:
    rows = (dims_of(spec, len(v.aval.shape)) for spec, v in zip(specs, variables, strict=True))
    return tuple(tuple(axes or () for axes in row) for row in rows)


def island_rule(eqn: Any) -> Rule:
    """Axes are factors that may be split; what a device has of a dimension is whole."""
    island = island_of(eqn)
    operands = zip(island.operands, [v.aval.shape for v in eqn.invars], strict=True)
    results = zip(island.results, [v.aval.shape for v in eqn.outvars], strict=True)
    return Rule.by_names(operands, results, lambda name, _: Factor(island.sizes[name], FactorKind.PASS))


def mesh_axes(island: Island, layouts: Sequence[Layout], mesh: LogicalMesh) -> dict[str, tuple[int, ...]] | None:
    """The mesh axes that stand for each axis of an island, from the layouts of its operands and results.

    None where they do not: an axis that is split in part, or by mesh axes that are not neighbours in their order.
    """
    found: dict[str, tuple[int, ...]] = {}
    for spec, layout in zip((*island.operands, *island.results), layouts, strict=True):
        for names, on in zip(spec, layout.dims, strict=True):
            *of_names, rest = mesh.split([island.sizes[name] for name in names], on)
            if rest or any(found.setdefault(name, taken) != taken for name, taken in zip(names, of_names, strict=True)):
                return None
    for name, axes in found.items():
        wide = [a for a in axes if mesh.axis_sizes[a] > 1]
        if wide and mesh.size(axes) != island.sizes[name]:
            return None
        if any(b != a + 1 for a, b in itertools.pairwise(axes)):
            return None
    return {name: axes for name, axes in found.items() if mesh.size(axes) > 1}


@dataclasses.dataclass(frozen=True, slots=True)
class IslandAdmits:
    """Whether mesh axes stand for an island's axes under a strategy."""

    island: Island

    def __call__(self, operands: Shapes, results: Shapes, layouts: tuple[Layout, ...], mesh: LogicalMesh) -> bool:
        return mesh_axes(self.island, layouts, mesh) is not None


def check_islands(graph: OpGraph, num_devices: int) -> None:
    """Raises: UnsupportedError for an island that so many devices cannot host, with the line of its call."""
    for op in graph.ops():
        if is_island(op.eqn):
            _check_island(op, num_devices)
            check_islands_inside(op.eqn)


def _check_island(op: Op, num_devices: int) -> None:
    island = island_of(op.eqn)
    if num_devices % island.shards == 0:
        return
    sizes = " x ".join(f"{name} {n}" for name, n in island.sizes.items())
    taken = [n for n in range(1, num_devices + 1) if num_devices % n == 0]
    raise UnsupportedError(
        where=f"shard_map at {jax_compat.source_line(op.eqn)}",
        expected=f"a mesh that {num_devices} devices can host: of {', '.join(map(str, taken))} devices",
        got=f"one of {island.shards} devices ({sizes})",
        hint="write its mesh for a divisor of the devices, such as jax.make_mesh((jax.device_count(),), ...)",
    )


# Runs an island on one device's part, under the mesh of a plan.
#
# The body was traced under the mesh of the island, whose name its types carry, so that it is evaluated anew, one
# equation after another. Where no mesh axes stand for an axis of the island, a device has the operands of all its
# parts. With collectives over such an axis the parts are computed side by side (`jax.vmap` with the axis' name),
# without any one after the other.

# Parameters of an equation without the mesh of the island in which it was traced.
#
# Inside of `jax.shard_map` the type of every value names the mesh. An equation that is bound again under the mesh of a
# plan must not bring such types: those of a Pallas call are its `out_avals`, and in the jaxprs of its kernel and of its
# index maps.


def without_island_mesh(value: Any) -> Any:
    """A parameter without meshes in its types; the same object where none names one."""
    if isinstance(value, jax_compat.ShapedArray):
        return _type(value)
    if jax_compat.is_jaxpr(value):
        return _jaxpr(value)
    if isinstance(value, (tuple, list)):
        members = [without_island_mesh(v) for v in value]
        if all(a is b for a, b in zip(members, value, strict=True)):
            return value
        return type(value)(*members) if hasattr(value, "_fields") else type(value)(members)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        found = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
        changed = {name: without_island_mesh(v) for name, v in found.items()}
        changed = {name: v for name, v in changed.items() if v is not found[name]}
        return dataclasses.replace(value, **changed) if changed else value
    return value


def _type(aval: Any) -> Any:
    inner = getattr(aval, "inner_aval", None)  # of a reference, in the body of a kernel
    if inner is not None:
        plain = _type(inner)
        return aval if plain is inner else aval.update(inner_aval=plain)
    if not isinstance(aval, jax_compat.ShapedArray) or aval.sharding.mesh.empty:
        return aval
    return jax_compat.ShapedArray(aval.shape, aval.dtype, aval.weak_type, memory_space=aval.memory_space)


def _jaxpr(closed: Any) -> Any:
    inner = jax_compat.open_jaxpr(closed)
    renamed: dict[Any, Any] = {}

    def plain(var: Any) -> Any:
        aval = _type(var.aval)
        return var if aval is var.aval else renamed.setdefault(var, type(var)(aval))

    def read(atom: Any) -> Any:
        if isinstance(atom, jax_compat.Literal):
            aval = _type(atom.aval)  # its number may have a type of its own
            return atom if aval is atom.aval else type(atom)(np.asarray(atom.val, aval.dtype), aval)
        return renamed.get(atom, atom)

    constvars, invars = [plain(v) for v in inner.constvars], [plain(v) for v in inner.invars]
    eqns, is_changed = [], bool(renamed)
    for traced in inner.eqns:
        eqn = jax_local.without_context_mesh(traced)
        ins, params = [read(a) for a in eqn.invars], {k: without_island_mesh(v) for k, v in eqn.params.items()}
        outs = [plain(v) for v in eqn.outvars]
        same = all(a is b for a, b in zip((*ins, *outs), (*eqn.invars, *eqn.outvars), strict=True))
        same = same and all(params[k] is v for k, v in eqn.params.items())
        is_changed = is_changed or not same or eqn is not traced
        eqns.append(eqn if same else eqn.replace(invars=ins, outvars=outs, params=params))
    outvars = [read(a) for a in inner.outvars]
    if not is_changed and all(a is b for a, b in zip(outvars, inner.outvars, strict=True)):
        return closed
    cleaned = inner.replace(constvars=constvars, invars=invars, eqns=eqns, outvars=outvars)
    return jax_compat.with_body(closed, cleaned)


# What only changes the type of a value that differs, or does not differ, between the devices.
TYPE_CHANGES = frozenset({"pvary", "pcast", "pbroadcast", "reduced_vary_cast"})

# What only says where a value lies. All axes of an island are its own, so that in its body nothing is left to say.
PLACEMENTS = frozenset({"sharding_constraint", "reshard", "mesh_cast"})


def collective_axes(eqn: Any) -> tuple[str, ...]:
    """The axes over which an equation sends, or whose devices it numbers; none of other equations."""
    if eqn.primitive.name in TYPE_CHANGES:
        return ()
    for param in ("axis_name", "axes"):
        value = eqn.params.get(param)
        names = value if isinstance(value, (tuple, list)) else (value,)
        if value is not None and all(isinstance(name, str) for name in names):
            return tuple(names)
    return ()


def run_parts(
    eqn: Any, island: Island, mapped: Mapping[str, Any], parts: Sequence[Any], alone: frozenset[str] = frozenset()
) -> list[Any]:
    """The results on one device, of operands as it has them; mesh axes stand for the `mapped` axes of the island.
    `alone`: axes of one device of the islands around it.
    """
    whole = [name for name, n in island.sizes.items() if name not in mapped and n > 1]
    jaxpr = jax_compat.open_jaxpr(eqn.params["jaxpr"])
    sends = {name for inner in jax_compat.equations_in(jaxpr) for name in collective_axes(inner)}
    body = _Body(alone | {name for name, n in island.sizes.items() if n == 1 and name not in mapped})

    def evaluated(*args: Any) -> list[Any]:
        return body.evaluate(jaxpr, args)

    run: Callable[..., list[Any]] = evaluated
    for name in reversed(whole):
        run = _over_parts(run, island, name, together=name in sends)
    args = [_taken_apart(a, spec, island, whole) for a, spec in zip(parts, island.operands, strict=True)]
    made = run(*args)
    return [_put_together(a, spec, island, whole) for a, spec in zip(made, island.results, strict=True)]


def of_one_device(eqn: Any) -> Any | None:
    """The equation of a call of an island's body, where the island is written for one device; None for others."""
    if not is_island(eqn) or eqn.params["mesh"].size > 1:
        return None
    island = island_of(eqn)
    avals = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, weak_type=v.aval.weak_type) for v in eqn.invars]
    run = jax.jit(lambda *args: run_parts(eqn, island, {}, args))
    (call,) = jax_compat.open_jaxpr(jax.make_jaxpr(run)(*avals)).eqns
    return call


def _over_parts(run: Callable[..., list[Any]], island: Island, name: str, *, together: bool) -> Callable[..., Any]:
    """The function over all parts of an axis, which is the first dimension of the operands that it splits."""
    split = [any(name in dim for dim in spec) for spec in island.operands]
    n = island.sizes[name]
    if together:
        axes = tuple(0 if s else None for s in split)
        return jax.vmap(run, in_axes=axes, out_axes=0, axis_name=name, axis_size=n)

    def one_after_the_other(*args: Any) -> Any:
        def part(number: Any) -> Any:
            taken = [
                lax.dynamic_index_in_dim(a, number, 0, keepdims=False) if s else a
                for a, s in zip(args, split, strict=True)
            ]
            return run(*taken)

        return lax.map(part, jnp.arange(n))

    return one_after_the_other


def _taken_apart(array: Any, spec: Spec, island: Island, whole: Sequence[str]) -> Any:
    """An operand with the axes that stand for nothing as its first dimensions."""
    shape: list[int] = []
    first: dict[str, int] = {}
    for n, names in zip(array.shape, spec, strict=True):
        apart = [name for name in names if name in whole]
        for name in apart:
            first[name] = len(shape)
            shape.append(island.sizes[name])
        shape.append(n // math.prod(island.sizes[name] for name in apart))
    front = [first[name] for name in whole if name in first]
    rest = [d for d in range(len(shape)) if d not in front]
    return jnp.transpose(array.reshape(shape), [*front, *rest])


def _put_together(array: Any, spec: Spec, island: Island, whole: Sequence[str]) -> Any:
    """The inverse for a result, which has all these axes first, also those whose parts are all alike."""
    used = {name for names in spec for name in names}
    for position, name in reversed(list(enumerate(whole))):
        if name not in used:
            array = lax.index_in_dim(array, 0, position, keepdims=False)
    front = [name for name in whole if name in used]
    own = array.shape[len(front) :]
    order, shape = [], []
    for d, (n, names) in enumerate(zip(own, spec, strict=True)):
        apart = [name for name in names if name in whole]
        order += [*(front.index(name) for name in apart), len(front) + d]
        shape.append(n * math.prod(island.sizes[name] for name in apart))
    return jnp.transpose(array, order).reshape(shape)


# The body


def _sent_to_itself(eqn: Any, args: Sequence[Any]) -> Sequence[Any]:
    """What a collective makes on one device. Raises: UnsupportedError for those that are not known."""
    name, params = eqn.primitive.name, eqn.params
    if name in ("psum", "psum_invariant", "pmax", "pmin"):
        return args
    if name == "axis_index":
        return [jnp.zeros((), jnp.int32)]
    if name in ("all_gather", "all_gather_invariant"):
        return args if params["tiled"] else [jnp.expand_dims(a, params["all_gather_dimension"]) for a in args]
    if name == "reduce_scatter":
        return args if params["tiled"] else [jnp.squeeze(a, params["scatter_dimension"]) for a in args]
    if name == "all_to_all":
        if params["tiled"]:
            return args
        return [jnp.expand_dims(jnp.squeeze(a, params["split_axis"]), params["concat_axis"]) for a in args]
    if name == "ppermute":
        return args if params["perm"] else [jnp.zeros_like(a) for a in args]
    if name == "ragged_all_to_all":
        operand, out, (start,), (count,), (to,), _ = args
        rows = jnp.arange(len(out)) - to
        taken = jnp.take(operand, rows + start, axis=0, mode="clip")
        received = jnp.expand_dims((rows >= 0) & (rows < count), tuple(range(1, out.ndim)))
        return [jnp.where(received, taken, out)]
    raise UnsupportedError(
        where=f"{name} at {jax_compat.source_line(eqn)}",
        expected="a collective of jax.lax over an axis of one device",
        got=name, hint="leave the call out where the axis has one device",
    )  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class _Body:
    """Evaluates a body. `alone`: axes of one device, over which nothing is sent."""

    alone: frozenset[str]

    def evaluate(self, jaxpr: Any, args: Sequence[Any], consts: Sequence[Any] = ()) -> list[Any]:
        """The results of an open jaxpr, traced under the mesh that is set now rather than that of its types."""
        env: dict[Any, Any] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

        def read(atom: Any) -> Any:
            if not isinstance(atom, jax_compat.Literal):
                return env[atom]
            aval: Any = atom.aval
            return np.asarray(atom.val, aval.dtype)

        for eqn in jaxpr.eqns:
            with jax_compat.standing_at(eqn):
                outs = [_without_mesh(a) for a in self._equation(eqn, [read(v) for v in eqn.invars])]
            env.update(zip(eqn.outvars, outs, strict=True))
        return [read(v) for v in jaxpr.outvars]

    def _closed(self, closed: Any, args: Sequence[Any]) -> list[Any]:
        return self.evaluate(jax_compat.open_jaxpr(closed), args, jax_compat.jaxpr_consts(closed))

    def _equation(self, eqn: Any, args: list[Any]) -> Sequence[Any]:
        name, params = eqn.primitive.name, eqn.params
        if name in TYPE_CHANGES or name in PLACEMENTS:
            return args
        if self.alone and (axes := collective_axes(eqn)):
            others = tuple(axis for axis in axes if axis not in self.alone)
            if not others:
                return _sent_to_itself(eqn, args)
            params = params | {"axes" if "axes" in params else "axis_name": others}
        if is_island(eqn):
            return run_parts(eqn, island_of(eqn), {}, args, self.alone)
        if name == "psum_invariant":
            summed: Sequence[Any] = lax.psum(args, params["axes"])
            return summed
        if name == "all_gather_invariant":
            return [
                lax.all_gather(a, params["axis_name"], axis=params["all_gather_dimension"], tiled=params["tiled"])
                for a in args
            ]
        if _is_kernel(eqn):
            return _jitted(params["name"], lambda *xs: self._closed(params["jaxpr"], xs))(*args)
        if (called := jax_compat.called_jaxpr(eqn)) is not None:
            return self._closed(called, args)
        if name == "scan":
            counts, variables = jax_compat.scan_counts(params), jax_compat.open_jaxpr(params["jaxpr"]).outvars
            carried, how = _typed(variables[: counts[1]]), {key: params[key] for key in ("length", "reverse", "unroll")}
            return loops.scan(functools.partial(self._closed, params["jaxpr"]), args, counts, carried, **how)
        if name == "while":
            goes_on, body = (functools.partial(self._closed, params[key]) for key in ("cond_jaxpr", "body_jaxpr"))
            counts = params["cond_nconsts"], params["body_nconsts"]
            return loops.while_loop(goes_on, body, args, counts, _typed(eqn.outvars))
        if name == "cond":
            branches = [functools.partial(self._closed, branch) for branch in params["branches"]]
            return loops.cond(branches, args, _typed(eqn.outvars))
        # After the island's own mesh:
        named = {k: None for k, v in params.items() if isinstance(v, jax.sharding.Sharding)}
        plain = {k: without_island_mesh(v) for k, v in params.items()} | named
        return jax_compat.bind(eqn.replace(params=plain), args)


def _is_kernel(eqn: Any) -> bool:
    """Whether it is a jitted function that calls a Pallas kernel: its name may tell what it computes."""
    body = eqn.params.get("jaxpr")
    if "name" not in eqn.params or body is None or eqn.primitive.name not in jax_compat.INLINED_CALLS:
        return False
    return any(e.primitive.name == "pallas_call" for e in jax_compat.equations_in(jax_compat.open_jaxpr(body)))


def _jitted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    function.__name__ = name
    return jax.jit(function)


def _without_mesh(array: Any) -> Any:
    """A number that is known already has the type of the mesh under which its equation was traced."""
    return array if jax_compat.is_tracer(array) or jax_compat.is_key_dtype(array.dtype) else np.asarray(array)


def _typed(variables: Sequence[Any]) -> loops.Typed:
    """What a loop carries, of the types that it was traced with, weak ones included."""
    return loops.like([v.aval for v in variables])
