"""JAX API that is private or differs between versions, under stable names; and what JAX lacks."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import jax
import jax.experimental
import jax.numpy as jnp
from jax._src import ad_checkpoint, api_util, config, debugging, sharding_impls
from jax._src import array as jax_array
from jax._src.core import InternalMutableArrayEffect, Ref
from jax._src.interpreters import mlir, partial_eval
from jax._src.lib import _jax, xla_client
from jax._src.source_info_util import is_user_filename
from jax._src.state import AbstractRef, discharge
from jax.experimental.layout import Layout, with_layout_constraint
from jax.extend import core as jax_core
from jax.extend import source_info_util
from jax.extend.mlir import ir, passmanager

_OURS = str(Path(__file__).parents[1])
source_info_util.register_exclusion(_OURS)  # lines of kernels and of their errors are the user's
_TRACING = str(Path(_OURS, "frontend", "tracing.py"))
_INSTALLED = tuple(f"{sysconfig.get_path(name)}/" for name in ("purelib", "platlib", "stdlib"))
Literal = jax_core.Literal
DropVar = jax_core.DropVar
JaxprEqn = jax_core.JaxprEqn
Var = jax_core.Var
ClosedJaxpr = jax_core.ClosedJaxpr
Tracer = jax.core.Tracer
ShapedArray = jax.core.ShapedArray
ArrayImpl = jax_array.ArrayImpl

# Equations that only call another jaxpr; the parameter that holds it.
INLINED_CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "eval_jaxpr": "call_jaxpr",  # the name of `closed_call` from jax 0.11 on
    "core_call": "call_jaxpr",
    "call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "fun_jaxpr",
    "custom_vmap_call": "call",
    "remat_opt": "fwd_jaxpr",  # of `jax.custom_vjp` with `optimize_remat`
    "custom_lin": None,
}
REMAT_CALLS = frozenset({"remat", "remat2", "checkpoint"})
OPAQUE_CALLS = frozenset({"xla_pmap"})


def called_jaxpr(eqn: Any) -> Any | None:
    """The jaxpr that a call equation (jit, custom_vjp, checkpoint, ...) calls; None for other equations."""
    name = eqn.primitive.name
    if name not in INLINED_CALLS and name not in REMAT_CALLS:
        return None
    names = [k for k in (INLINED_CALLS.get(name), "jaxpr", "call_jaxpr", "fun_jaxpr") if k in eqn.params]
    assert names, f"{name} holds no jaxpr under a known name: {sorted(eqn.params)}"
    return eqn.params[names[0]]


def open_jaxpr(jaxpr: Any) -> Any:
    """The jaxpr inside a closed one (one class since jax 0.11)."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def is_jaxpr(value: Any) -> bool:
    """Whether a value is an open or a closed jaxpr."""
    return hasattr(open_jaxpr(value), "eqns")


def jaxpr_consts(jaxpr: Any) -> list[Any]:
    return list(getattr(jaxpr, "consts", ()))


def with_equations(jaxpr: Any, eqns: Sequence[Any], outvars: Sequence[Any], consts: Sequence[Any]) -> Any:
    """An open or closed jaxpr with other equations, results and constants (one class since jax 0.11)."""
    inner = open_jaxpr(jaxpr)
    rewritten = inner.replace(eqns=list(eqns), outvars=list(outvars))
    if inner is jaxpr and not consts:
        return rewritten
    return jaxpr.replace(jaxpr=rewritten, consts=list(consts))


def closed_like(jaxpr: Any, inner: Any) -> Any:
    """A jaxpr with the constants of a closed one around another inside."""
    if hasattr(jaxpr, "jaxpr"):
        return jaxpr.replace(jaxpr=inner)
    return inner.replace(consts=list(jaxpr.consts))


def variable_like(var: Any, shape: Sequence[int]) -> Any:
    """A new variable of another shape; of the same shape for a reference in a kernel."""
    is_same = tuple(var.aval.shape) == tuple(shape)
    return type(var)(var.aval if is_same else var.aval.update(shape=tuple(shape)))


def variable_of(shape: Sequence[int], dtype: str, weak_type: bool = False) -> Any:
    """A new variable of a shape and of a type by its name."""
    return Var(ShapedArray(tuple(shape), struct(shape, dtype).dtype, weak_type=weak_type))


def scan_counts(params: dict[str, Any]) -> tuple[int, int]:
    """(number of constants, number of carried values) of a scan; renamed in jax 0.11."""
    if "ft_in" in params:
        consts, carry, _ = params["ft_in"].unpack()
        return len(consts), len(carry)
    return params["num_consts"], params["num_carry"]


def name_stack(eqn: Any) -> str:
    return str(eqn.source_info.name_stack)


def lowered_jaxpr(closed: Any) -> Any:
    """A closed jaxpr of plain equations: what `jax.checkpoint`, `jax.custom_vjp` and others trace to as high-level
    primitives (`jax_remat3`, `jax_custom_vjp3`) is expanded, and references that it makes itself are values.
    """
    if open_jaxpr(closed).is_high:
        closed = partial_eval.lower_jaxpr2(closed)
    if any(isinstance(effect, InternalMutableArrayEffect) for effect in closed.effects):
        closed = discharge.discharge_state(closed, should_discharge=False)
    return closed


def plain_jaxpr(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The closed jaxpr of plain equations that a function traces to."""
    return lowered_jaxpr(jax.make_jaxpr(function)(*args, **kwargs))


def has_own_gradient(eqn: Any) -> bool:
    """Whether an equation calls a function of `jax.custom_vjp`, also where that is a high-level primitive."""
    called = type(eqn.params.get("_prim")).__name__
    return eqn.primitive.name.startswith("custom_vjp_call") or called == "CustomVJPTraced"


def is_reference(value: Any) -> bool:
    """Whether a value, or the type of a variable, is a reference to an array (`jax.new_ref`)."""
    return isinstance(value, (Ref, AbstractRef))


def traced_as(flat: Callable[..., Any], function: Callable[..., Any], paths: Sequence[str]) -> Callable[..., Any]:
    """A new function that calls `flat`; jax's errors name another one and the paths of its leaves in place of it."""

    def called(*leaves: Any) -> Any:
        return flat(*leaves)

    info = api_util.debug_info("jit", _unwrapped(function), (), {})
    api_util.save_wrapped_fun_debug_info(called, info._replace(arg_names=tuple(paths)))
    return called


def _unwrapped(function: Any) -> Any:
    """The function that decorators and partial calls are of; of an object its method `__call__`."""
    while True:
        inner = inspect.unwrap(function)
        if isinstance(inner, functools.partial):
            function = inner.func
        elif inner is not function:
            function = inner
        elif inspect.isroutine(inner) or isinstance(inner, type) or not inspect.isroutine(type(inner).__call__):
            return inner
        else:
            function = type(inner).__call__


def source_line(eqn: Any, inside: tuple[str, str] | None = None) -> str:
    """`file:line (function)` of the user's code that made an equation, or an empty string.

    The step's own code rather than that of installed packages it calls, where both are on the way to the equation. Of
    packages alone, the one that imports the others: a model's rather than the layers' that it is made of, and theirs
    rather than that of wrappers. `inside` is a function, by file and name: only code that it calls counts.
    """
    return _line_in_step(eqn.source_info.traceback, inside)


@functools.lru_cache(maxsize=4096)
def _line_in_step(made_at: Any, inside: tuple[str, str] | None) -> str:
    found = _of_the_user(_frames(made_at, inside))
    return _text_of_frame(*found) if found else ""


@functools.lru_cache(maxsize=4096)
def _is_nearer(made_at: Any, inside: tuple[str, str] | None, called_at: Any) -> bool:
    """Whether the function `inside` itself is nearer to the user's code than what calls it."""
    own = _frames(made_at, inside, itself=True)
    return _of_the_user([*own, *_frames(called_at, None)]) in [frame for _, frame in own]


def _frames(made_at: Any, inside: tuple[str, str] | None, itself: bool = False) -> list[tuple[str, tuple[Any, int]]]:
    """The frames that the step calls, or that the function `inside` does, also `itself`; with their files, the
    innermost first.
    """
    codes, positions = made_at.raw_frames() if made_at else ([], [])
    frames = []
    for code, position in zip(codes, positions, strict=True):
        is_inside = (code.co_filename, code.co_name) == inside
        if code.co_filename == _TRACING or (is_inside and not itself):
            break
        frames.append((code.co_filename, (code, position)))
        if is_inside:
            break
    return frames


def _of_the_user(frames: Iterable[tuple[str, Any]]) -> Any:
    """The value given with the user's frame, of (file, value) of each frame, the innermost first; None where all are
    jax's.
    """
    installed: dict[str, Any] = {}  # of each package the innermost
    for path, found in frames:
        if is_user_filename(path):
            if not path.startswith(_INSTALLED):
                return found
            installed.setdefault(_package_of(path), found)
    importing = (p for p in installed if not any(p in _imported(other) for other in installed if other != p))
    return installed[next(importing, next(iter(installed)))] if installed else None


def _package_of(path: str) -> str:
    """The top-level package, or the module of the standard library, of an installed file."""
    folder = max((root for root in _INSTALLED if path.startswith(root)), key=len)
    return Path(path).relative_to(folder).parts[0].removesuffix(".py")


@functools.cache
def _imported(package: str) -> frozenset[str]:
    """The packages of which a loaded module of a package has a module, class or function."""
    loaded = [m for name, m in [*sys.modules.items()] if name.partition(".")[0] == package and m is not None]
    # Some modules load what they have when it is asked for, and some objects run code of theirs when their class is.
    values = (value for module in loaded for value in [*object.__getattribute__(module, "__dict__").values()])
    named = (
        object.__getattribute__(value, "__dict__").get("__name__")
        if issubclass(type(value), ModuleType)
        else value.__module__
        for value in values
        if issubclass(type(value), (ModuleType, type, FunctionType))
    )
    return frozenset(str(name).partition(".")[0] for name in named)


def _text_of_frame(code: Any, position: int) -> str:
    line, column, *_ = xla_client.Traceback.code_addr2location(code, position)
    return f"{code.co_filename}:{line}{f':{column}' if column else ''} ({code.co_qualname})"


def library_function(jaxpr: Any) -> tuple[str, str] | None:
    """File and name of the traced function, where it is one of jax or of an installed package.

    JAX keeps the traces of such functions: their equations have the line of the first call.
    """
    traced = open_jaxpr(jaxpr).debug_info
    path = getattr(traced, "func_filename", None)
    if path is None or (is_user_filename(path) and not path.startswith(_INSTALLED)):
        return None
    return path, traced.func_name


@dataclasses.dataclass(frozen=True, slots=True)
class Caller:
    """The call whose trace is inlined: the equation of the innermost one with a line of the user's code, if any, and
    the function of a library that was traced.
    """

    eqn: Any = None
    library: tuple[str, str] | None = None

    def of(self, eqn: Any, called: Any) -> Caller:
        """The caller of the equations of the jaxpr that an equation calls."""
        located = self.located(eqn)
        return Caller(located if source_line(located) else None, library_function(called))

    def located(self, eqn: Any) -> Any:
        """An equation of the inlined trace, with the line of the call where it has none of its own."""
        if self.eqn is None or source_line(eqn, self.library):
            return eqn
        made_at, called_at = eqn.source_info.traceback, self.eqn.source_info.traceback
        return eqn if _is_nearer(made_at, self.library, called_at) else at_line_of(self.eqn, eqn)


STEP = Caller()  # of the equations of the step itself


def present_line() -> str:
    """`file:line (function)` of the user's code that is running, or an empty string."""
    return source_info_util.summarize(source_info_util.current())


def line_of_error(error: BaseException) -> str:
    """`file:line (function)` of the user's code in which an error was raised, or an empty string.

    The user's own code rather than that of installed packages, as `source_line` has it.
    """
    raised = [(frame.f_code, number) for frame, number in traceback.walk_tb(error.__traceback__)]
    found = _of_the_user((code.co_filename, (code, number)) for code, number in reversed(raised))
    return f"{found[0].co_filename}:{found[1]} ({found[0].co_qualname})" if found else ""


def at_line_of(eqn: Any, target: Any) -> Any:
    """The equation `target` with the source line of `eqn`."""
    return target.replace(source_info=target.source_info.replace(traceback=eqn.source_info.traceback))


def bind(eqn: Any, args: Sequence[Any], **changed: Any) -> list[Any]:
    """Evaluates one equation on other arguments and with other parameters, under no mesh."""
    with context_of(eqn):
        return rebind(eqn, args, **changed)


def rebind(eqn: Any, args: Sequence[Any], **changed: Any) -> list[Any]:
    """Evaluates one equation on other arguments and with other parameters, in the present context."""
    extra = eqn.primitive.get_bind_params({**eqn.params, **changed})
    functions, params = extra if isinstance(extra, tuple) else ((), extra)
    out = eqn.primitive.bind(*functions, *args, **params)
    return list(out) if eqn.primitive.multiple_results else [out]


def shapes_made(eqn: Any, operands: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The shapes that an equation makes of operands of other shapes. Raises: TypeError or ValueError where it does not
    take them.
    """
    if jaxprs_in(eqn):  # these have sizes of their own, which binding checks
        structs = [jax.ShapeDtypeStruct(at, a.aval.dtype) for at, a in zip(operands, eqn.invars, strict=True)]
        return [tuple(out.shape) for out in jax.eval_shape(lambda *args: bind(eqn, args), *structs)]
    with context_of(eqn):  # without a trace, which takes longer
        avals = [jax.core.ShapedArray(at, a.aval.dtype) for at, a in zip(operands, eqn.invars, strict=True)]
        made, _ = eqn.primitive.abstract_eval(*avals, **eqn.params)
    return [tuple(out.shape) for out in (made if eqn.primitive.multiple_results else [made])]


def jaxprs_in(eqn: Any) -> list[Any]:
    """The open jaxprs among the parameters of an equation."""
    params = [v for p in eqn.params.values() for v in (p if isinstance(p, (tuple, list)) else (p,))]
    return [open_jaxpr(v) for v in params if is_jaxpr(v)]


def equations_in(jaxpr: Any) -> Iterator[Any]:
    """The equations of an open jaxpr and of those inside of it."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jaxprs_in(eqn):
            yield from equations_in(inner)


def call_back(eqn: Any, args: Sequence[Any]) -> list[Any]:
    """Evaluates the equation of a callback in a program over any number of devices.

    Of ordered effects jax knows only those of `io_callback` on several devices: ordered debug callbacks become such.
    """
    name = eqn.primitive.name
    ordered = eqn.params.get("ordered", False) or eqn.params.get("effect") is debugging.ordered_debug_effect
    if name not in ("debug_callback", "debug_print") or not ordered:
        return bind(eqn, args)
    plain = {"ordered": False} if name == "debug_print" else {"effect": debugging.debug_effect}
    call = functools.partial(eqn.primitive.impl, **{**eqn.params, **plain})

    def called(*arrays: Any) -> None:
        call(*arrays)

    with context_of(eqn):
        jax.experimental.io_callback(called, None, *args, ordered=True)
    return []


_NO_MESH = jax.sharding.AbstractMesh((), ())
UNSPECIFIED_SHARDING = sharding_impls.UNSPECIFIED


@contextlib.contextmanager
def context_of(eqn: Any) -> Iterator[None]:
    """The context in which an equation was traced, but for the mesh that the user had set."""
    with eqn.ctx.manager, jax.sharding.use_abstract_mesh(_NO_MESH):
        yield


def without_mesh(var: Any) -> Any:
    """A variable whose type names no mesh and no memory: itself, or a new one."""
    aval = var.aval
    if not isinstance(aval, jax.core.ShapedArray):
        return var
    if aval.sharding.mesh.empty and aval.memory_space == jax.memory.Space.Device:
        return var
    with jax.sharding.use_abstract_mesh(_NO_MESH):
        return type(var)(aval.update(sharding=None, memory_space=jax.memory.Space.Device))


@contextlib.contextmanager
def no_mesh_set() -> Iterator[None]:
    """Inside, no mesh is set that the user has set with `jax.set_mesh`: programs bring a mesh of their own."""
    if jax.sharding.get_abstract_mesh().empty:
        yield
        return
    with jax.set_mesh(None):
        yield


def under_present_mesh(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, called with the mesh set that is set now (`jax.set_mesh`): a step's code may name its axes."""
    if jax.sharding.get_abstract_mesh().empty:
        return function
    mesh = jax.sharding.get_mesh()

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        with jax.set_mesh(mesh):
            return function(*args, **kwargs)

    return called


def explicit_type(value: Any) -> Any | None:
    """The sharding in the type of an array, its shape or its aval, where it lies in a mesh with explicit axes.

    Its mesh is abstract. None for other values.
    """
    if not isinstance(value, (jax.Array, jax.ShapeDtypeStruct, jax.core.ShapedArray)):
        return None
    sharding = getattr(value if isinstance(value, jax.core.ShapedArray) else jax.typeof(value), "sharding", None)
    return sharding if isinstance(sharding, jax.sharding.NamedSharding) and _is_explicit(sharding.mesh) else None


def explicit_mesh(values: Sequence[Any]) -> Any | None:
    """The mesh with explicit axes of the first array, or its shape, that lies in one, else the one that is set; None
    without.
    """
    arrays = (x for x in values if isinstance(x, (jax.Array, jax.ShapeDtypeStruct)))
    meshes = (getattr(getattr(x, "sharding", None), "mesh", None) for x in arrays)
    return next(
        (m for m in (*meshes, jax.sharding.get_mesh()) if isinstance(m, jax.sharding.Mesh) and _is_explicit(m)), None
    )


def _is_explicit(mesh: Any) -> bool:
    return jax.sharding.AxisType.Explicit in (mesh.axis_types or ())


@contextlib.contextmanager
def standing_at(eqn: Any) -> Iterator[None]:
    """What is traced inside has the source line of an equation and, behind the present name stack, its names."""
    stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
    with source_info_util.user_context(eqn.source_info.traceback, name_stack=stack):
        yield


def is_key_dtype(dtype: Any) -> bool:
    return jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key)


def itemsize(aval: Any) -> int:
    """Bytes per element; a typed PRNG key counts as its raw words."""
    if is_key_dtype(aval.dtype):
        raw = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct((), aval.dtype))
        return int(raw.size) * raw.dtype.itemsize
    return int(aval.dtype.itemsize)


def annotated_module(function: Callable[..., Any], avals: Sequence[Any]) -> Any:
    """The StableHLO module of a function, each op carrying Shardy's rule in `sdy.sharding_rule`."""
    module = jax.jit(function).trace(*avals).lower().compiler_ir("stablehlo")
    with module.context:
        pipeline = "builtin.module(func.func(sdy-populate-op-sharding-rules))"
        passmanager.PassManager.parse(pipeline).run(module.operation)
    return module


def module_functions(module: Any) -> dict[str, Any]:
    """The functions of a module by name."""
    return {
        ir.StringAttr(f.attributes["sym_name"]).value: f for f in module.body.operations if "sym_name" in f.attributes
    }


def with_type(array: Any, aval: Any) -> Any:
    """An array or number with the dtype and the weak type of `aval`."""
    if is_key_dtype(aval.dtype):
        return array
    return jax.lax.convert_element_type_p.bind(
        jax.numpy.asarray(array), new_dtype=aval.dtype, weak_type=bool(aval.weak_type), sharding=None
    )


def struct_of(aval: Any) -> jax.ShapeDtypeStruct:
    """Shape, type and weak type."""
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=bool(getattr(aval, "weak_type", False)))


def with_weak_type(array: Any, weak_type: bool) -> Any:
    """An array whose type is weak, or is not."""
    if is_key_dtype(array.dtype) or array.aval.weak_type == weak_type:
        return array
    return with_type(array, jax.ShapeDtypeStruct(array.shape, array.dtype, weak_type=weak_type))


def shape_of(array: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, jax.dtypes.canonicalize_dtype(array.dtype, allow_extended_dtype=True))


_KEY_IMPLEMENTATIONS = {"fry": "threefry2x32", "rbg": "rbg", "urbg": "unsafe_rbg"}  # as key types print them


def struct(shape: Sequence[int], dtype: str, weak_type: bool = False) -> jax.ShapeDtypeStruct:
    """Shape and type from a type's name, `key<fry>` and the like included."""
    if dtype.startswith("key<"):
        implementation = _KEY_IMPLEMENTATIONS[dtype[4:-1]]
        return jax.ShapeDtypeStruct(tuple(shape), jax.eval_shape(lambda: jax.random.key(0, impl=implementation)).dtype)
    return jax.ShapeDtypeStruct(tuple(shape), jax.numpy.dtype(dtype), weak_type=weak_type)


def jax_version() -> tuple[int, ...]:
    return jax.__version_info__


def is_tracer(array: Any) -> bool:
    return isinstance(array, Tracer)


# What `jax.jit` keys its programs by where `trace_context` is not known by that name, and what it keys them by beside.
_CONFIGURATION = (
    "jax_enable_x64", "jax_numpy_dtype_promotion", "jax_numpy_rank_promotion", "jax_default_matmul_precision",
    "jax_threefry_partitionable", "jax_default_device", "jax_disable_jit", "jax_random_seed_offset",
)  # fmt: skip
_BESIDE = ("default_prng_impl", "optimization_level", "memory_fitting_level")
_beside: tuple[Any, ...] = tuple(getattr(config, name) for name in _BESIDE if hasattr(config, name))
_trace_context: Callable[[], tuple[Any, ...]] = getattr(
    config, "trace_context", lambda: tuple(getattr(jax.config, name, None) for name in _CONFIGURATION)
)


def trace_context() -> tuple[Any, ...]:
    """jax's configuration in this thread, as far as what is traced and compiled depends on it. To be compared."""
    return *_trace_context(), *[state.value for state in _beside]


def lowering_flags() -> tuple[tuple[str, str], ...]:
    """What of the configuration decides how one jaxpr is lowered; the same in every process."""
    names = ("jax_threefry_partitionable", "jax_default_prng_impl", "jax_enable_x64", "jax_use_shardy_partitioner")
    return tuple((name, str(getattr(jax.config, name, None))) for name in names)


def buffer_addresses(array: Any) -> tuple[int, ...]:
    """Where in memory the shards of an array are that this process holds: of arrays that share memory, one is alike.

    Empty where the backend does not tell.
    """
    try:
        shards = array._arrays if type(array) is ArrayImpl else [shard.data for shard in array.addressable_shards]
        return tuple([shard.unsafe_buffer_pointer() for shard in shards])
    except (AttributeError, NotImplementedError, jax.errors.JaxRuntimeError):  # each backend refuses in its own way
        return ()


def raw_key(dtype: Any) -> tuple[Any, tuple[int, ...]]:
    """(dtype, shape) of the numbers that one random key is made of."""
    raw = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct((), dtype))
    return raw.dtype, raw.shape


def key_of(numbers: Any, dtype: Any) -> Any:
    """The random keys of a key type that are made of these numbers."""
    name = str(dtype)
    return jax.random.wrap_key_data(numbers, impl=_KEY_IMPLEMENTATIONS[name[4:-1]])


def shard_putter(shardings: Sequence[Any]) -> Callable[[Sequence[Any]], list[Any]]:
    """`jax.device_put` of arrays to these shardings, where each shard goes whole to one device of this process.

    That is one call of what `device_put` comes down to then, less than half as long; keys, and versions of jax that
    know it by another name, take the public way.
    """
    copy: Any = getattr(xla_client, "batched_copy_array_to_devices_with_sharding", None)
    device_lists = [getattr(s, "_internal_device_list", None) for s in shardings]
    targets = list(shardings)

    def by_device_put(arrays: Sequence[Any]) -> list[Any]:
        arrays_on_devices: list[Any] = jax.device_put(list(arrays), targets)
        return arrays_on_devices

    all_devices_known = all(d is not None for d in device_lists) and hasattr(xla_client, "ArrayCopySemantics")
    if copy is None or not all_devices_known:
        return by_device_put
    semantics = [xla_client.ArrayCopySemantics.REUSE_INPUT] * len(targets)

    def put(arrays: Sequence[Any]) -> list[Any]:
        if any(is_key_dtype(a.dtype) for a in arrays):
            return by_device_put(arrays)
        with config.explicit_device_put_scope():  # else `jax.transfer_guard` takes it for an accident
            arrays_on_devices: list[Any] = copy(list(arrays), device_lists, targets, semantics)
        return arrays_on_devices

    return put


def in_rows(array: Any) -> Any:
    """The array laid out in memory row by row, which else the compiler chooses."""
    return with_layout_constraint(array, Layout(major_to_minor=tuple(range(array.ndim))))


def compiled(lowered: Any, options: dict[str, Any]) -> Any:
    """A lowered program, compiled. The layouts of arguments of less than 8 bits an element are not compared on calls:
    jax before 0.12 says of arrays that an element takes a byte and of programs that it takes less, and refuses all.
    """
    program = lowered.compile(options)
    executable = program._executable  # shared by the calls of the program, whose check takes None for any layout
    if any(layout is not None and layout.sub_byte_element_size_in_bits for layout in executable._xla_in_layouts):
        executable._xla_in_layouts = [
            None if layout is None or layout.sub_byte_element_size_in_bits else layout
            for layout in executable._xla_in_layouts
        ]
    return program


def names_in_cache_key() -> contextlib.AbstractContextManager[None]:
    """Inside, no program comes from jax's cache of compiled ones whose operations have other names."""
    return config.compilation_cache_include_metadata_in_key(True)


def looks_for_nans_and_infs() -> tuple[bool, bool]:  # `jax_debug_nans`, `jax_debug_infs`
    return bool(config.debug_nans.value), bool(config.debug_infs.value)


def jit_is_disabled() -> bool:
    return bool(config.disable_jit.value)


def shared_cost_analysis(compiled: jax.stages.Compiled) -> dict[str, float]:
    """The analysis that all XLA's backends share, of a compiled program: calls of libraries count no arithmetic."""
    executable: Any = compiled.runtime_executable()
    (module,) = executable.hlo_modules()
    return dict(_jax.hlo_module_cost_analysis(jax.devices("cpu")[0].client, module))


def with_jaxprs(value: Any, rewritten: Callable[[Any], Any]) -> Any:
    """A parameter of an equation with its jaxprs rewritten, be it one or a tuple or list with some."""
    if is_jaxpr(value):
        return rewritten(value)
    if not isinstance(value, (tuple, list)) or not any(map(is_jaxpr, value)):
        return value
    members = [rewritten(v) if is_jaxpr(v) else v for v in value]
    if all(a is b for a, b in zip(members, value, strict=True)):
        return value
    return type(value)(*members) if hasattr(value, "_fields") else type(value)(members)


def with_body(closed: Any, inner: Any) -> Any:
    """An open or closed jaxpr with another inside, and its own constants."""
    is_open = open_jaxpr(closed) is closed and not jaxpr_consts(closed)
    return inner if is_open else closed_like(closed, inner)


def variables_of(shape: Sequence[Any]) -> set[str]:
    """The variables in the dimensions of a shape; none where all of them are numbers."""
    return {name for size in shape if _is_expression(size) for name in size._get_vars()}


def evaluated(shape: Sequence[Any], values: Mapping[str, int]) -> tuple[int, ...]:
    """A shape with numbers for its variables. Raises: ValueError for numbers that its constraints exclude."""
    sizes = []
    for size in shape:
        if _is_expression(size):
            _check_constraints(size, values)
            sizes.append(int(size._evaluate(values)))
        else:
            sizes.append(int(size))
    return tuple(sizes)


def _is_expression(size: Any) -> bool:
    # Here, as numbers are what nearly every dimension is, and jax.export is not loaded with jax.
    from jax.export import is_symbolic_dim

    return not isinstance(size, int) and is_symbolic_dim(size)


def _check_constraints(size: Any, values: Mapping[str, int]) -> None:
    """Raises: ValueError with a constraint of the scope that does not hold."""
    for constraint in size.scope._explicit_constraints:
        difference = constraint.diff
        if _is_expression(difference):
            if not set(difference._get_vars()) <= set(values):
                continue  # of variables that are not in the shape
            difference = int(difference._evaluate(values))
        if difference < 0 or (constraint.cmp.name == "EQ" and difference):
            raise ValueError(constraint.debug_str)


@functools.cache
def run_wide_products_on_cpus() -> None:
    """Has jax give XLA's CPU compiler products of 16-bit operands with wider results as products of wide operands.

    XLA ends such a product with "Unsupported element type for DotThunk::Execute: BF16 x BF16 = F32" where a transpose
    follows it, which it folds into the product after it has decided that operands may stay narrow (jaxlib 0.10.2).
    Elsewhere its CPU compiler widens them itself: the numbers are the same. Other platforms are left alone.
    """
    primitive = jax.lax.dot_general_p
    original = mlir._platform_specific_lowerings["cpu"][primitive].rule

    def rule(ctx: Any, lhs: Any, rhs: Any, **params: Any) -> Any:
        of_lhs, of_rhs = ctx.avals_in
        (result,) = ctx.avals_out
        operands = {jnp.dtype(of_lhs.dtype), jnp.dtype(of_rhs.dtype)}
        if operands <= {jnp.dtype("bfloat16"), jnp.dtype("float16")} and result.dtype in ("float32", "float64"):
            wide = [aval.update(dtype=result.dtype) for aval in (of_lhs, of_rhs)]
            lhs, rhs = (mlir.convert_hlo(ctx, x, a, w) for x, a, w in zip((lhs, rhs), ctx.avals_in, wide, strict=True))
            ctx = ctx.replace(avals_in=wide)
        return original(ctx, lhs, rhs, **params)

    mlir.register_lowering(primitive, rule, platform="cpu")


RECOMPUTED = "rematted_computation"  # in the name stack of what `jax.checkpoint` computes again
NAME = "name"  # the primitive of `checkpoint_name`
# Whether `jax_remat3` asks policies about names; before jax 0.12 it knows jax's own policies only.
ASKS_POLICIES = hasattr(ad_checkpoint, "CheckpointNameFwd")
_IN_HOST = "autopar: in the memory of the host"  # the name of a value that an offload policy sends there
# The names that are saved by traces of this thread; None: those of the policies. It is in the keys of jax's caches.
_saved: Any = jax.make_user_context(None)


def in_host_memory(eqn: Any, operand: Any, result: Any) -> Any:
    """An equation that gives a value another name, under which it waits in the memory of the host.

    Every pass knows such equations, and values of the memory of the host have the types of others.
    """
    params = {"name": _IN_HOST}
    return eqn.replace(primitive=ad_checkpoint.name_p, invars=[operand], outvars=[result], params=params)


def is_in_host_memory(eqn: Any) -> bool:
    """Whether an equation was made by `in_host_memory`."""
    return eqn is not None and eqn.primitive is ad_checkpoint.name_p and eqn.params["name"] == _IN_HOST


@dataclasses.dataclass(frozen=True, slots=True, weakref_slot=True)  # jax refers to policies weakly
class SavedNames:
    """A policy of `jax.checkpoint` that saves these names, and of unnamed values what `policy` saves.

    Names that `policy` sends to the host still go there, unless they are saved.
    """

    names: frozenset[str]
    policy: Any

    def __call__(self, primitive: Any, *avals: Any, **params: Any) -> Any:
        if primitive is not ad_checkpoint.name_p:
            return self.policy(primitive, *avals, **params)
        if params["name"] in self.names:
            return True
        own = self.policy(primitive, *avals, **params)
        return own if isinstance(own, partial_eval.Offloadable) else False


@contextlib.contextmanager
def saved_names(names: frozenset[str]) -> Iterator[None]:
    """Under it, traces save these names in each region of `jax.checkpoint`, and no other names."""
    with _saved(names):
        yield


def _install() -> None:
    """Has jax ask `_saved` before a region's own policy. Without names there, jax does what it does without this."""
    original = partial_eval.custom_partial_eval_rules[ad_checkpoint.remat_p]

    def rule(trace: Any, *tracers: Any, policy: Any, **params: Any) -> Any:
        names = _saved.value
        if names is not None:
            policy = SavedNames(names, policy or jax.checkpoint_policies.nothing_saveable)
        return original(trace, *tracers, policy=policy, **params)

    partial_eval.custom_partial_eval_rules[ad_checkpoint.remat_p] = rule
    if ASKS_POLICIES:
        _install_for_high_level_primitives()


def _install_for_high_level_primitives() -> None:
    """The same under `jax_remat3`; names stay in the plain equations that a region is lowered to."""
    module: Any = ad_checkpoint
    region = module.RematTraced
    original = region.__init__

    def made(self: Any, jaxpr: Any, policy: Any, *args: Any, **kwargs: Any) -> None:
        names = _saved.value
        if names is not None and not isinstance(policy, SavedNames):
            policy = SavedNames(names, policy or jax.checkpoint_policies.nothing_saveable)
        original(self, jaxpr, policy, *args, **kwargs)

    region.__init__ = made
    for named in (module.CheckpointName, module.CheckpointNameFwd):
        _keep_the_name(named)


def _keep_the_name(named: Any) -> None:
    original = named.remat

    def remat(self: Any, trace: Any, x: Any) -> Any:
        result, saved, again = original(self, trace, x)
        is_computed_again = isinstance(saved, tuple)
        return result, saved, (lambda _, x: type(self)(self.name, self.in_avals[0])(x)) if is_computed_again else again

    named.remat = remat
    named.expand = lambda self, x: ad_checkpoint.name_p.bind(x, name=self.name)


_install()
