"""What an island makes of the examples of a micro-batch, from its body on one part.

Examples may lie on several devices of an island's axis. A collective over such an axis mixes them, but for a sum of
sums over examples; what numbers the devices of the axis, or is not the same on all of them, tells examples by their
position.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from autopar.common import jax_compat
from autopar.frontend.build_graph import graph_of_body
from autopar.ir.graph import Op
from autopar.kernels.islands import Spec, is_island, island_of
from autopar.kernels.run_island import TYPE_CHANGES, collective_axes
from autopar.microbatch.example_places import BY_POSITION, COMBINES, SEVERAL, UNKNOWN
from autopar.microbatch.forms import CombinesExamples, Form, IslandLayout, State, differs_by_trip
from autopar.microbatch.microbatch_analysis import Follower

# Collectives that combine or send elements in their places.
_IN_PLACE = frozenset({"psum", "psum_invariant", "pmax", "pmin", "ppermute"})
_SUMS = frozenset({"psum", "psum_invariant"})


def body_states(op: Op, part: Op, states: Sequence[State], num_microbatches: int) -> list[State]:
    """The states of the results of an operation with a body. Raises: CombinesExamples where they have no form."""
    if is_island(op.eqn):
        return island_states(op, part, states, num_microbatches)
    whole, smaller = graph_of_body(op.eqn.params["call"]), graph_of_body(part.eqn.params["call"])
    follower = Follower(whole, smaller, num_microbatches, body_states=body_states)
    constants = [follower.by_shape(v) for v in whole.block.inputs[: len(whole.constants)]]
    inside = [dataclasses.replace(s, early=False, streams=True, cut=False) for s in states]
    try:
        return follower.block_states(whole.block, smaller.block, [*constants, *inside])
    except CombinesExamples as error:
        raise CombinesExamples(op, f"in its body, {error.op.primitive}: {error.why}") from None


def island_states(
    op: Op, part: Op, states: Sequence[State], num_microbatches: int, around: frozenset[str] = frozenset()
) -> list[State]:
    """The states of an island's results. Raises: CombinesExamples where they have no form.

    `around`: the axes that examples lie on, of the island in whose body this one is.
    """
    island = island_of(op.eqn)
    pairs = list(zip(island.operands, states, strict=True))
    axes = _example_axes(op, pairs)
    whole, smaller = graph_of_body(op.eqn.params["jaxpr"]), graph_of_body(part.eqn.params["jaxpr"])
    follower = _BodyFollower(whole, smaller, num_microbatches, island=op, axes=around | frozenset(axes))
    constants = [follower.by_shape(v) for v in whole.block.inputs[: len(whole.constants)]]
    inside = [
        dataclasses.replace(s, early=False, streams=True, cut=False, laid=s.laid and s.laid.inside) for s in states
    ]
    try:
        made = follower.block_states(whole.block, smaller.block, [*constants, *inside])
    except CombinesExamples as error:
        raise CombinesExamples(op, f"in its body, {error.op.primitive}: {error.why}") from None
    return [_result(op, spec, s, axes) for spec, s in zip(island.results, made, strict=True)]


def _example_axes(op: Op, pairs: Sequence[tuple[Spec, State]]) -> tuple[str, ...]:
    """The axes that examples lie on, from the specs and states of the operands."""
    held = {
        s.laid.axes if s.laid is not None else spec[s.dim]
        for spec, s in pairs
        if s.form is Form.SPLIT or s.laid is not None
    }
    if len(held) > 1:
        raise CombinesExamples(op, SEVERAL)
    axes = held.pop() if held else ()
    for spec, s in pairs:
        is_laid = s.laid is not None and s.laid.spec == spec
        mixed = s.outer > 1 and bool(spec[s.dim]) if s.form is Form.SPLIT else not _names(spec).isdisjoint(axes)
        read_apart = s.laid is not None and (s.form is Form.SPLIT or s.laid.inside is not None)
        if not is_laid and (mixed or read_apart):
            raise CombinesExamples(op, BY_POSITION)
    return axes


def _names(spec: Spec) -> set[str]:
    return {name for names in spec for name in names}


def _result(op: Op, spec: Spec, s: State, axes: tuple[str, ...]) -> State:
    """The state of an island's result from that of its part on one device."""
    laid = IslandLayout(spec=spec, axes=axes, inside=s.laid) if s.laid is not None else None
    if s.form is Form.PARTIAL_SUM and not _names(spec).isdisjoint(axes):
        raise CombinesExamples(op, BY_POSITION)
    if s.form is Form.SPLIT and spec[s.dim] != axes:
        if not set(axes) <= set(spec[s.dim]):
            raise CombinesExamples(op, BY_POSITION)
        laid = IslandLayout(spec=spec, axes=axes, inside=s.laid)
    if s.form is Form.INVARIANT and not _names(spec).isdisjoint(axes):
        laid = IslandLayout(spec=spec, axes=axes, inside=s.laid)
    cause = CombinesExamples(op, "it sums over examples") if s.form is Form.PARTIAL_SUM else None
    return dataclasses.replace(s, cause=cause, laid=laid)


@dataclasses.dataclass(slots=True, kw_only=True)
class _BodyFollower(Follower):
    """Follows examples through the body of an island, whose `axes` they lie on."""

    island: Op
    axes: frozenset[str]

    def follow(self, op: Op, part: Op, states: Sequence[State], around: Mapping[int, State]) -> list[State]:
        if op.primitive in TYPE_CHANGES:
            return list(states)
        if is_island(op.eqn):
            return self._island_inside(op, part, states, around)
        names = collective_axes(op.eqn) if op.eqn is not None else ()
        if not names:
            return Follower.follow(self, op, part, states, around)
        forms = {s.form for s in states}
        if self.axes.isdisjoint(names):
            return self._beside(op, states) if states else [State(form=Form.INVARIANT) for _ in op.outputs]
        if op.primitive in _SUMS and forms <= {Form.PARTIAL_SUM, Form.INVARIANT}:
            return list(states)
        raise CombinesExamples(op, BY_POSITION if op.primitive == "axis_index" else COMBINES)

    def _island_inside(self, op: Op, part: Op, states: Sequence[State], around: Mapping[int, State]) -> list[State]:
        """Results of an island in the body of this one, whose collectives may be over the axes of both."""
        if not any(s.form is Form.RUNNING or differs_by_trip(s) for s in states):
            return self._checked(op, island_states(op, part, states, self.num_microbatches, self.axes))
        body = jax_compat.open_jaxpr(op.eqn.params["jaxpr"])
        if any(not self.axes.isdisjoint(collective_axes(e)) for e in jax_compat.equations_in(body)):
            raise CombinesExamples(op, COMBINES)
        return Follower.follow(self, op, part, states, around)

    def _beside(self, op: Op, states: Sequence[State]) -> list[State]:
        """Results of a collective between devices that have the same examples."""
        if op.primitive in _IN_PLACE:
            if op.primitive not in _SUMS and any(s.form is Form.PARTIAL_SUM for s in states):
                raise CombinesExamples(op, "it is not linear in a sum over examples")
            return list(states)
        (state,) = states
        params = op.eqn.params
        if state.form is not Form.SPLIT:
            return [state for _ in op.outputs]
        if op.primitive in ("all_gather", "all_gather_invariant"):
            at = params["all_gather_dimension"]
            if params["tiled"]:
                return [self._unless(op, state, {at})]
            return [dataclasses.replace(state, dim=state.dim + (at <= state.dim))]
        if op.primitive == "reduce_scatter":
            at = params["scatter_dimension"]
            kept = self._unless(op, state, {at})
            return [kept if params["tiled"] else dataclasses.replace(kept, dim=kept.dim - (at < kept.dim))]
        if op.primitive == "all_to_all" and params["tiled"]:
            return [self._unless(op, state, {params["split_axis"], params["concat_axis"]})]
        raise CombinesExamples(op, UNKNOWN)

    def _unless(self, op: Op, state: State, dims: set[int]) -> State:
        if state.dim in dims:
            raise CombinesExamples(op, COMBINES)
        return state
