"""Builds the graph of operations from a traced step: calls inlined, loops and branches nested, dead work removed."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from autopar.common import jax_compat, jax_local
from autopar.common.paths import parts_of
from autopar.errors import UnsupportedError
from autopar.frontend.callbacks import is_callback
from autopar.frontend.fingerprints import program_fingerprint
from autopar.frontend.recompute_in_scans import Recompute, choice_of, recompute_in_scans
from autopar.ir.graph import Atom, Block, Constant, Op, OpGraph, OpKind, Role, Value, walk
from autopar.ir.primitives import MATRIX_PRODUCTS, dtype_text
from autopar.ir.rewrite import remove_dead
from autopar.ir.rules import RuleBook, equation_key, replicated_rule, with_rules
from autopar.ir.traced_step import TracedStep, WrittenLayout
from autopar.ops.attention.kernels import Kernel
from autopar.ops.attention.match import blockwise
from autopar.ops.attention.score_kernels import mark_score_kernels
from autopar.ops.kernels.grouped import as_grouped_product, in_blocks
from autopar.ops.kernels.islands import PLACEMENTS
from autopar.ops.kernels.local import local_rule
from autopar.ops.kernels.ragged_experts import ragged_experts, with_load

# Names of operations where the code names no module: the paths of the parameters that they read.
#
# `jax.named_scope`, which Linen and Haiku call, is in the name stacks of a trace. NNX and plain trees leave
# none, Equinox the classes of its layers. Only what is read is named so (rows of modules, collectives, profiles): what
# a user's pattern permits, and the layers of a pipeline, follow the modules of the code.


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


_WRAPPER = re.compile(r"^(?:transpose|jvp|vmap|jit|pjit|remat|checkpoint|rematted_computation)\((.*)\)$")
_NOISE = frozenset(
    # `eval_jaxpr` is the name of `closed_call` from jax 0.11 on.
    ["", "while", "body", "cond", "closed_call", "eval_jaxpr", "checkpoint", "rematted_computation", "scan", "branch"]
)
# `jnp.einsum` names what it traces after its subscripts, which are no module.
_SUBSCRIPTS = re.compile(r"[\w., ]*->[\w. ]*")
_LOOPS = {"scan": OpKind.SCAN, "while": OpKind.WHILE, "cond": OpKind.COND}


def build_graph(traced: TracedStep, rules: RuleBook) -> OpGraph:
    """The graph of a traced step, with the sharding rule of every operation.

    Raises: UnsupportedError for equations with a mesh of their own that no plan can host (`jax.pmap`);
    InvalidArgumentError for a load of experts (`TracedStep.expert_load`) that it has none of.
    """
    graph = by_kernel(graph_as_written(traced, rules), traced.attention_kernel, rules)
    return saving_in_scans(graph, traced.scan_recompute, rules)


def graph_as_written(traced: TracedStep, rules: RuleBook) -> OpGraph:
    """The graph before a kernel takes its attention and it is said what is saved of scans. Raises: as `build_graph`."""
    builder = _Builder(traced.written, traced.row_blocks)
    inputs = [builder.value(v, f"constant {i}") for i, v in enumerate(traced.jaxpr.constvars)]
    builder.constants += traced.constants
    for i, (v, path) in enumerate(zip(traced.jaxpr.invars, traced.in_paths, strict=True)):
        inputs.append(builder.value(v, path, traced.example_dim(i)))
    num_top = len(traced.constants)
    ops: list[Op] = []
    outputs = builder.inline(traced.jaxpr, inputs, "", 1.0, ops)
    # Constants of inner jaxprs are found on the way; they go with the outer ones, in front of the arguments.
    inputs = [*inputs[:num_top], *builder.inner_constants, *inputs[num_top:]]
    offset = len(inputs) - len(traced.in_avals)
    graph = OpGraph(
        values=tuple(builder.values),
        block=remove_dead(Block(inputs=tuple(inputs), outputs=tuple(outputs), ops=tuple(ops))),
        constants=tuple(builder.constants),
        tied=tuple((offset + i, o) for i, o in sorted(traced.tied.items())),
        donated=frozenset(offset + i for i in traced.donated),
        batch=frozenset(offset + i for i in traced.batch),
        written=tuple(builder.written),
    )
    graph = with_parameter_names(dataclasses.replace(graph, block=with_rules(graph.block, rules)))
    graph = ragged_experts(graph, rules)
    if traced.expert_load:
        graph = with_load(graph, traced.expert_load)
    return graph


def by_kernel(graph: OpGraph, attention_kernel: str, rules: RuleBook, named: OpGraph | None = None) -> OpGraph:
    """A graph of `graph_as_written` with the attention that a kernel takes (`TracedStep.attention_kernel`) as its
    passes. `named`: as of `blockwise`.
    """
    if not attention_kernel:
        return graph
    graph = blockwise(graph, Kernel[attention_kernel], named)
    return dataclasses.replace(graph, block=with_rules(graph.block, rules))


def saving_in_scans(graph: OpGraph, scan_recompute: str, rules: RuleBook) -> OpGraph:
    """A graph of `by_kernel` with what is saved of its scans (`TracedStep.scan_recompute`)."""
    if scan_recompute:
        all_kept = scan_recompute == Recompute.NOTHING.value
        graph = recompute_in_scans(graph, choice_of(scan_recompute), all_kept=all_kept)
        graph = dataclasses.replace(graph, block=with_rules(graph.block, rules))
    return mark_score_kernels(graph)


def graph_of_body(jaxpr: Any) -> OpGraph:
    """The graph of an island's body (an open or closed jaxpr) on one part; its operations have no rules."""
    builder, inner = _Builder(), jax_compat.open_jaxpr(jaxpr)
    ops: list[Op] = []
    top = [builder.value(v, f"constant {i}") for i, v in enumerate(inner.constvars)]
    builder.constants += jax_compat.jaxpr_consts(jaxpr)
    inputs = [builder.value(v) for v in inner.invars]
    outputs = builder.inline(inner, [*top, *inputs], "", 1.0, ops)
    block = Block(inputs=(*top, *builder.inner_constants, *inputs), outputs=tuple(outputs), ops=tuple(ops))
    return OpGraph(
        values=tuple(builder.values), block=remove_dead(block), constants=tuple(builder.constants), tied=(),
        donated=frozenset(), batch=frozenset(),
    )  # fmt: skip


class _Builder:
    """Numbers values and operations while jaxprs are walked. `row_blocks`: as of `TracedStep`."""

    def __init__(self, written: Sequence[tuple[Any, WrittenLayout]] = (), row_blocks: Any = None) -> None:
        self._row_blocks = row_blocks
        self._written_of: dict[Any, list[WrittenLayout]] = {}
        for var, layout in written:
            self._written_of.setdefault(var, []).append(layout)
        self.written: list[tuple[int, WrittenLayout]] = []
        self.values: list[Value] = []
        self.constants: list[Any] = []
        self.inner_constants: list[int] = []
        self._constant_ids: dict[int, int] = {}
        self._num_ops = 0
        self._caller = jax_compat.STEP

    def value(self, var: Any, name: str = "", example_dim: int | None = None) -> int:
        aval = var.aval
        shape, dtype = tuple(int(n) for n in aval.shape), dtype_text(aval.dtype)
        weak_type = bool(getattr(aval, "weak_type", False))
        value = Value(len(self.values), shape, dtype, jax_compat.itemsize(aval), name, weak_type)
        self.values.append(replace(value, example_dim=example_dim))
        return len(self.values) - 1

    def constant(self, var: Any, array: Any) -> int:
        """The value of an inner jaxpr's constant, one for each array."""
        if id(array) not in self._constant_ids:
            self._constant_ids[id(array)] = self.value(var, f"constant {len(self.constants)}")
            self.constants.append(array)
            self.inner_constants.append(self._constant_ids[id(array)])
        return self._constant_ids[id(array)]

    def inline(self, jaxpr: Any, args: Sequence[Atom], stack: str, count: float, ops: list[Op]) -> list[Atom]:
        """Appends the operations of a jaxpr whose inputs (constants first) are `args`; returns its outputs."""
        env: dict[Any, Atom] = dict(zip((*jaxpr.constvars, *jaxpr.invars), args, strict=True))

        def read(atom: Any) -> Atom:
            return Constant(atom) if isinstance(atom, jax_compat.Literal) else env[atom]

        for eqn in jaxpr.eqns:
            ins = [read(v) for v in eqn.invars]
            outs = self._equation(eqn, ins, stack_of(eqn, stack), count, ops)
            env.update(zip(eqn.outvars, outs, strict=True))
        if self._written_of:
            for var, atom in env.items():
                self.written += [(atom, w) for w in self._written_of.get(var, ()) if isinstance(atom, int)]
        return [read(v) for v in jaxpr.outvars]

    def _equation(self, eqn: Any, ins: list[Atom], stack: str, count: float, ops: list[Op]) -> Sequence[Atom]:
        name = eqn.primitive.name
        if name in jax_compat.OPAQUE_CALLS:
            raise UnsupportedError(
                where=f"{module_path(stack)} at {jax_compat.source_line(eqn)}",
                expected="a step written for one device",
                got=f"an equation that brings its own mesh ({name})",
                hint="take the manual parallelism out of the step: autopar decides it",
            )
        if (product := as_grouped_product(eqn)) is not None:
            return self._equation(product, ins, stack, count, ops)
        eqn = in_blocks(eqn, self._row_blocks)
        if name in PLACEMENTS:  # in the body of an island; those of the step are gone
            return ins
        if (inner := called_jaxpr(eqn)) is not None:
            return self._call(eqn, inner, ins, stack, count, ops)
        if (both := jax_local.transposed_first(eqn)) is not None:
            between = self._equation(both[0], ins, stack, count, ops)
            return self._equation(both[1], list(between), stack, count, ops)
        if name == "custom_linear_solve":  # how it is differentiated is behind it
            return self._call(eqn, *_solving(eqn, ins), stack, count, ops)
        if name in jax_compat.REMAT_CALLS:
            ins = self._barrier(eqn, ins, stack, count, ops)
            return self._call(eqn, eqn.params["jaxpr"], ins, stack, count, ops)
        if name == "optimization_barrier":
            return self._barrier(eqn, ins, stack, count, ops)
        if name in _LOOPS:
            return self._loop(eqn, ins, stack, count, ops)
        outputs = tuple(self.value(v) for v in eqn.outvars)
        op = self._op(OpKind.EQUATION, eqn, ins, outputs, stack, count, key=equation_key(eqn))
        if is_callback(eqn):  # each is called for itself, on whole arrays
            op = replace(op, key=f"{op.key}#{op.id}", rule=replicated_rule(eqn, ""))
        elif (rule := local_rule(op.eqn)) is not None:
            op = replace(op, key=f"{op.key}#{program_fingerprint(op.eqn)}", rule=rule)
        ops.append(op)
        return outputs

    def _op(
        self, kind: OpKind, eqn: Any, ins: Iterable[Atom], outs: Iterable[int], stack: str, count: float, **details: Any
    ) -> Op:
        self._num_ops += 1
        eqn = self._caller.located(eqn)
        return Op(
            id=self._num_ops - 1, kind=kind, primitive=eqn.primitive.name, eqn=eqn, inputs=tuple(ins),
            outputs=tuple(outs), rule=None, role=role_of(stack), module=module_path(stack), count=count,
            recomputes=jax_compat.RECOMPUTED in stack, **details,
        )  # fmt: skip

    def _call(self, eqn: Any, closed: Any, ins: list[Atom], stack: str, count: float, ops: list[Op]) -> list[Atom]:
        jaxpr = jax_compat.open_jaxpr(closed)
        consts = [self.constant(v, c) for v, c in zip(jaxpr.constvars, jax_compat.jaxpr_consts(closed), strict=True)]
        with self._called_by(eqn, closed):
            return self.inline(jaxpr, [*consts, *ins], stack, count, ops)

    @contextlib.contextmanager
    def _called_by(self, eqn: Any, closed: Any) -> Iterator[None]:
        around, self._caller = self._caller, self._caller.of(eqn, closed)
        yield
        self._caller = around

    def _barrier(self, eqn: Any, ins: list[Atom], stack: str, count: float, ops: list[Op]) -> list[Atom]:
        passing = {atom: None for atom in ins if isinstance(atom, int)}
        through = {atom: self._copy_of(atom) for atom in passing}
        ops.append(self._op(OpKind.BARRIER, eqn, passing, through.values(), stack, count))
        return [through[a] if isinstance(a, int) else a for a in ins]

    def _copy_of(self, atom: int) -> int:
        self.values.append(replace(self.values[atom], id=len(self.values), name=""))
        return len(self.values) - 1

    def _block(self, eqn: Any, closed: Any, stack: str, count: float) -> Block:
        """A nested block; constants of its jaxpr are read from the outside (closed over)."""
        jaxpr = jax_compat.open_jaxpr(closed)
        consts = [self.constant(v, c) for v, c in zip(jaxpr.constvars, jax_compat.jaxpr_consts(closed), strict=True)]
        inputs = [self.value(v) for v in jaxpr.invars]
        ops: list[Op] = []
        with self._called_by(eqn, closed):
            outputs = self.inline(jaxpr, [*consts, *inputs], stack, count, ops)
        return Block(inputs=tuple(inputs), outputs=tuple(outputs), ops=tuple(ops))

    def _loop(self, eqn: Any, ins: list[Atom], stack: str, count: float, ops: list[Op]) -> tuple[int, ...]:
        kind, params = _LOOPS[eqn.primitive.name], eqn.params
        counts: dict[str, Any]
        blocks: tuple[Block, ...]
        if kind is OpKind.SCAN:
            num_consts, num_carry = jax_compat.scan_counts(params)
            trips = int(params["length"])
            blocks = (self._block(eqn, params["jaxpr"], stack, count * trips),)
            counts = dict(num_consts=num_consts, num_carry=num_carry, trips=trips)
        elif kind is OpKind.WHILE:
            # The trip count of a while loop is not known: costs inside count once.
            blocks = tuple(self._block(eqn, params[p], stack, count) for p in ("cond_jaxpr", "body_jaxpr"))
            num_consts = params["cond_nconsts"] + params["body_nconsts"]
            num_carry = len(ins) - num_consts
            counts = dict(num_consts=num_consts, num_carry=num_carry, num_condition_consts=params["cond_nconsts"])
        else:
            blocks = tuple(self._block(eqn, b, stack, count) for b in params["branches"])
            counts = {}
        outputs = tuple(self.value(v) for v in eqn.outvars)
        ops.append(self._op(kind, eqn, ins, outputs, stack, count, blocks=blocks, **counts))
        return outputs


def called_jaxpr(eqn: Any) -> Any | None:
    """The jaxpr of a call that is inlined; None for other equations, and where values are computed again behind it."""
    if eqn.primitive.name in jax_compat.REMAT_CALLS and eqn.params["differentiated"] and eqn.params["prevent_cse"]:
        return None
    return jax_compat.called_jaxpr(eqn)


def _solving(eqn: Any, inputs: Sequence[Atom]) -> tuple[Any, list[Atom]]:
    """The jaxpr that solves the equations of `jax.lax.custom_linear_solve`, and those of its inputs that it reads."""
    of, programs = eqn.params["const_lengths"], eqn.params["jaxprs"]
    before = of.matvec + of.vecmat
    return programs.solve, [*inputs[before : before + of.solve], *inputs[sum(of) :]]


def stack_of(eqn: Any, stack: str) -> str:
    """The name stack of an equation whose jaxpr is called under `stack`."""
    return "/".join(filter(None, (stack, jax_compat.name_stack(eqn))))


def role_of(stack: str) -> Role:
    """Backward where a name stack holds `transpose(`, forward where it holds `jvp(` only, else update."""
    if "transpose(" in stack:
        return Role.BACKWARD
    return Role.FORWARD if "jvp(" in stack else Role.UPDATE


@functools.lru_cache(1 << 14)
def module_path(stack: str) -> str:
    """The user's module path in a name stack: `transpose(jvp(M))/layer0/jit(_where)` is `M/layer0`."""
    parts: list[str] = []
    for part in split_stack(stack):
        called = part.startswith(("jit(", "pjit("))
        while match := _WRAPPER.match(part):
            part = match.group(1)
        if not called:
            parts += [p for p in part.split("/") if p not in _NOISE and not _SUBSCRIPTS.fullmatch(p)]
    return "/".join(parts)


def stack_of_module(module: str, role: Role) -> str:
    """The name stack that a module's operations have under `jax.grad`; `module_path` and `role_of` invert it."""
    first, *rest = module.split("/", 1)
    if role is Role.UPDATE:
        return module
    first = f"jvp({first})" if role is Role.FORWARD else f"transpose(jvp({first}))"
    return "/".join((first, *rest))


def split_stack(stack: str) -> list[str]:
    """Splits at slashes outside of parentheses."""
    parts, depth, start = [], 0, 0
    for i, c in enumerate(stack):
        depth += (c == "(") - (c == ")")
        if c == "/" and depth == 0:
            parts.append(stack[start:i])
            start = i + 1
    return [*parts, stack[start:]]
